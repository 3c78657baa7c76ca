"""Typical mistakes, planted in the solutions of lesson 5: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("5.1", "return dy_NO @ w_OI, dy_NO.T @ x_NI", "return dy_NO.T @ x_NI, dy_NO @ w_OI", "dx and dw are swapped"),
    ("5.1", "dy_NO @ w_OI", "dy_NO @ w_OI.T", "ValueError"),
    ("5.1", "dy_NO.T @ x_NI", "dy_NO.T @ x_NI / len(x_NI)", "it is the sum"),
    ("5.1", "dy_NO.T @ x_NI", "x_NI.T @ dy_NO", "must have shape"),
    ("5.2", " - xhat_NC * mean_N[:, None]", "", "treats r as a constant"),
    ("5.2", "(g_NC * xhat_NC).mean(1)", "(g_NC * xhat_NC).sum(1)", "where a mean belongs"),
    ("5.2", "(g_NC - xhat", "(g_NC + xhat", "sign of the second term"),
    ("5.2", "(dy_NC * xhat_NC).sum(0)", "(dy_NC * x_NC).sum(0)", "xhat = x r that stands beside w"),
    ("5.2", "(dy_NC * xhat_NC).sum(0)", "(g_NC * xhat_NC).sum(0)", "w itself does not appear"),
    ("5.3", "f(x - step * v)", "f(x)", "the one-sided difference"),
    ("5.3", "/ (2 * step)", "/ step", "Divide by 2 step"),
    ("5.3", "abs(numeric - analytic)", "(numeric - analytic) - 1e-3", "take the absolute value"),
    ("5.3", " / max(abs(numeric), abs(analytic))", "", "so that the error is relative"),
    ("5.3", "f(x + step * v)", "f((x + step * v).astype(np.float32))", "drowns in rounding"),
    ("5.4", " / float32(C)", "", "not divided by C"),
    ("5.4", " - x_NC[n, c] * rstd * mean", "", "only the first term"),
    ("5.4", "acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd", "acc += dy_NC[n, c] * w_C[c] * x_NC[n, c]", "where xhat = x r belongs"),
]  # fmt: skip
