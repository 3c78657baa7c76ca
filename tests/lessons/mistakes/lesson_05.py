"""Typical mistakes, planted in the solutions of lesson 5: (exercise, old, new, phrase in the answer)."""

MISTAKES = [
    ("5.1", "return dy_NO @ w_OI, dy_NO.T @ x_NI", "return dy_NO.T @ x_NI, dy_NO @ w_OI", "dx and dw are swapped"),
    ("5.1", "dy_NO @ w_OI", "dy_NO @ w_OI.T", "ValueError"),
    ("5.1", "dy_NO.T @ x_NI", "dy_NO.T @ x_NI / len(x_NI)", "it is the sum"),
    ("5.1", "dy_NO.T @ x_NI", "x_NI.T @ dy_NO", "must have shape"),
    ("5.1", "return dy_NO @ w_OI, dy_NO.T @ x_NI", "dx, dw = dy_NO @ w_OI, dy_NO.T @ x_NI", "Nothing is returned"),
    ("5.1", "return dy_NO @ w_OI, dy_NO.T @ x_NI", "return dy_NO @ w_OI", "One thing is returned"),
    ("5.1", "dy_NO.T @ x_NI", "np.outer(dy_NO[-1], x_NI[-1])", "sum over all rows"),
    ("5.2", "(g_NC * xhat_NC).mean(1)", "np.full(len(x_NC), (g_NC * xhat_NC).mean())", "over the whole array"),
    ("5.2", "mean(1)\n    dx_NC = rstd_N[:, None] * (g_NC - xhat_NC * mean_N[:, None])", "mean(0)\n    dx_NC = rstd_N[:, None] * (g_NC - xhat_NC * mean_N)", "over rows"),
    ("5.2", "dx_NC = rstd_N[:, None] * ", "dx_NC = ", "in front of the bracket"),
    ("5.2", "x_NC * rstd_N[:, None]", "x_NC * rstd_N", "make it a column"),
    ("5.2", ".sum(0)", ".sum(1)", "one number per column"),
    ("5.2", " - xhat_NC * mean_N[:, None]", "", "treats r as a constant"),
    ("5.2", "(g_NC * xhat_NC).mean(1)", "(g_NC * xhat_NC).sum(1)", "where it needs a mean"),
    ("5.2", "(g_NC - xhat", "(g_NC + xhat", "sign of the second term"),
    ("5.2", "(dy_NC * xhat_NC).sum(0)", "(dy_NC * x_NC).sum(0)", "the factor of w is xhat = x r"),
    ("5.2", "(dy_NC * xhat_NC).sum(0)", "(g_NC * xhat_NC).sum(0)", "w itself does not appear"),
    ("5.3", "f(x - step * v)", "f(x)", "the one-sided difference"),
    ("5.3", "/ (2 * step)", "/ step", "Divide by 2 step"),
    ("5.3", "abs(numeric - analytic)", "(numeric - analytic) - 1e-3", "take the absolute value"),
    ("5.3", " / max(abs(numeric), abs(analytic))", "", "so that the error is relative"),
    ("5.3", "(gradient * v).sum()", "gradient.sum()", "not with the gradient's sum"),
    ("5.3", "f(x + step * v) - f(x - step * v)", "f(x + step) - f(x - step)", "all elements move at once"),
    ("5.3", "max(abs(numeric), abs(analytic))", "max(numeric, analytic)", "The larger of two slopes"),
    ("5.3", "    numeric =", "    x += step\n    numeric =", "x has changed"),
    ("5.3", "f(x + step * v)", "f((x + step * v).astype(np.float32))", "is lost in rounding errors"),
    ("5.4", " / float32(C)", "", "not divided by C"),
    ("5.4", " / float32(C)", " / C", "computed in float64"),
    ("5.4", "dx_NC[n, c] = ", "dx_NC[n, c] += ", "written with +="),
    ("5.4", "block_sum(acc, partial)", "acc", "adds up the threads of the block"),
    ("5.4", "dx_NC[n, c] = rstd * ", "dx_NC[n, c] = ", "in front of the bracket"),
    ("5.4", "acc += dy_NC[n, c] * w_C[c] * ", "acc += dy_NC[n, c] * ", "w is missing in the sum"),
    ("5.4", "(dy_NC[n, c] * w_C[c] - ", "(dy_NC[n, c] - ", "w is missing in the first term"),
    ("5.4", " - x_NC[n, c] * rstd * mean", "", "only the first term"),
    ("5.4", "acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd", "acc += dy_NC[n, c] * w_C[c] * x_NC[n, c]", "where it needs xhat = x r"),
    ("5.3", "abs(numeric - analytic) / max(abs(numeric), abs(analytic))", "abs(abs(numeric) - abs(analytic)) / abs(analytic)", "A gradient with the wrong sign"),
    ("5.4", "cuda.blockDim.x", "64", "not 64"),
    ("5.4", "    for c in range(tid, C, cuda.blockDim.x):\n        acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd\n    mean = block_sum(acc, partial)", "    for c in range(C):\n        acc += dy_NC[n, c] * w_C[c] * x_NC[n, c] * rstd\n    mean = acc", "times over"),
    ("5.3", "max(abs(numeric), abs(analytic))", "abs(numeric)", "the LARGER of the two"),
    ("5.3", "max(abs(numeric), abs(analytic))", "abs(analytic)", "the LARGER of the two"),
]  # fmt: skip

UNTRUE = [  # mistakes with a phrase that the answer must not contain
    ("5.3", "max(abs(numeric), abs(analytic))", "max(numeric, 1e-9)", "a million times"),
    ("5.3", "/ max(abs(numeric), abs(analytic))", "/ analytic**2", "take the absolute value of the difference"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("5.3", "max(abs(numeric), abs(analytic))", "(abs(numeric) + abs(analytic))"),
]  # fmt: skip
