"""Typical mistakes, planted in the solutions of lesson 11: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("11.1", "in (*reads, *writes)", "in reads", "writing moves bytes too"),
    ("11.1", " - made", "", "Those are in registers"),
    ("11.1", "for a in kept", "for a in made", "only `kept` must go to memory"),
    (
        "11.1", "inputs = {a for reads, _ in kernels for a in reads} - made",
        "inputs = [a for reads, _ in kernels for a in reads if a not in made]", "loads it once",
    ),
    ("11.1", " + sum(sizes[a] for a in kept)", "", "the arrays in `kept`"),
    ("11.2", "y_NC[n, c] = h * rstd", "y_NC[n, c] = h_NC[n, c] * rstd", "read back from memory"),
    ("11.2", "y_NC[n, c] = h * rstd", "y_NC[n, c] = (x_NC[n, c] + r_NC[n, c]) * rstd", "more than once"),
    ("11.1", "return before, sum(sizes[a] for a in inputs) + sum(sizes[a] for a in kept)",
     "return sum(sizes[a] for a in inputs) + sum(sizes[a] for a in kept), before", "in the wrong order"),
    ("11.1", "sum(sizes[a] for a in kept)", "sum(a for a in kept)", "hold array names"),
    ("11.2", "block_sum(h * h, partial)", "h * h", "sums over the threads of the block"),
    ("11.2", "h * rstd * w_C[c]", "h * w_C[c]", "rstd is missing in y"),
    ("11.2", " + r_NC[n, c]", "", "r was not added"),
    ("11.2", "float32(1.0) /", "1.0 /", "computed in float64"),
    ("11.3", "(float32(1.0) + math.exp(-gate))", "float32(1.0) + math.exp(-gate)", "is the denominator"),
    ("11.3", "if f < F:", "if f < F - 1:", "The last column is missing"),
    ("11.3", "gu_N2F[n, F + f]", "gu_N2F[n, F]", "the up of column 0"),
    ("11.3", "float32(1.0)", "1", "computed in float64"),
    ("11.4", "d_RV[n, target] -= 1 / N", "d_RV[:, target] -= 1 / N", "selects one element per row"),
    ("11.4", "loss / N, dx_NC, dw_VC", "loss / N, dw_VC, dx_NC", "dx and dw are in the wrong order"),
    ("11.4", "d_RV.T @ x_NC[part]", "x_NC[part].T @ d_RV", "d^T times the slice of x"),
    ("11.2", "    h_NC[n, c] = h\n", "", "h was not written"),
    ("11.2", "block_sum(h * h, partial)", "block_sum(x_NC[n, c] * x_NC[n, c], partial)", "the rstd of x alone"),
    ("11.2", "y_NC[n, c] = h * rstd", "y_NC[n, c] = x_NC[n, c] * rstd", "y uses x instead of h"),
    ("11.2", " * w_C[c]", "", "The weight w is missing"),
    ("11.2", " / float32(x_NC.shape[1])", "", "not divided by C"),
    ("11.3", "gate, up = gu_N2F[n, f], gu_N2F[n, F + f]", "up, gate = gu_N2F[n, f], gu_N2F[n, F + f]", "Gate and up are swapped"),
    ("11.3", "gate, up = gu_N2F[n, f], gu_N2F[n, F + f]", "gate, up = gu_N2F[n, 2 * f], gu_N2F[n, 2 * f + 1]", "do not alternate"),
    ("11.3", "math.exp(-gate)", "math.exp(gate)", "The sign in exp"),
    ("11.3", "gate / (float32(1.0)", "float32(1.0) / (float32(1.0)", "sigmoid(gate) up"),
    ("11.3", "    if f < F:\n", "    if True:\n", "guard f < F"),
    ("11.4", "dw_VC += ", "dw_VC = ", "with +="),
    ("11.4", "        d_RV -= d_RV.max(1, keepdims=True)\n", "", "Subtract the largest logit"),
    ("11.4", "d_RV /= total * N\n        d_RV[n, target] -= 1 / N", "d_RV /= total * len(d_RV)\n        d_RV[n, target] -= 1 / len(d_RV)", "The loss is the mean over all N rows"),
    ("11.4", "        d_RV[n, target] -= 1 / N\n", "", "The one-hot part is missing"),
    ("11.4", "return loss / N", "return loss", "return the mean"),
    ("11.4", "range(0, N, rows)", "range(0, N - rows + 1, rows)", "may have fewer than `rows`"),
    ("11.4", "    loss, dx_NC", "    rows = N\n    loss, dx_NC", "were in use at once"),
    (
        "11.4", "loss -= d_RV[n, target].sum()\n        np.exp(d_RV, out=d_RV)\n        total = d_RV.sum(1, keepdims=True)\n        loss += np.log(total).sum()",
        "loss -= N * d_RV[n, target].mean()\n        np.exp(d_RV, out=d_RV)\n        total = d_RV.sum(1, keepdims=True)\n        loss += N * np.log(total).mean()",
        "The means of the chunks",
    ),
]  # fmt: skip

UNTRUE = [  # words that must not appear in these answers
    ("11.2", "h_NC[n, c] = h\n", "h_NC[n, c] += h\n", "h was not written"),
]  # fmt: skip

RIGHT = [  # unusual, but correct
    ("11.2", "x_NC", "x"),
]  # fmt: skip
