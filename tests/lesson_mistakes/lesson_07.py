"""Typical mistakes, planted in the solutions of lesson 7: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("7.1", "a * c - b * s", "a * c + b * s", "sign in the first line"),
    ("7.1", "b * c + a * s", "b * c - a * s", "sign in the second line"),
    ("7.1", "t = n % T", "t = n", "look up position n % T"),
    ("7.1", "t = n % T", "t = 0 * n", "positions begin again in each sequence"),
    ("7.1", "    y_NHD[n, h, r + R] = b * c + a * s\n", "", "upper half was never written"),
    ("7.2", "visible = t + 1", "visible = t if t > 0 else 1", "t included"),
    ("7.2", "visible = t + 1", "visible = S", "may only look at keys up to t"),
    ("7.2", "    for s in range(visible + tid, S, cuda.blockDim.x):\n        p_TS[t, s] = float32(0.0)\n", "", "that must be stored"),
    ("7.2", "top = block_max(top, partial)", "top = float32(0.0) * block_max(top, partial)", "exp overflows"),
    ("7.2", "p_TS[t, s] = math.exp(scale * s_TS[t, s] - top) / total", "p_TS[t, s] = math.exp(scale * s_TS[t, s] - top)", "does not sum to 1"),
    ("7.3", "x_NV = logits_NV - logits_NV.max(1, keepdims=True)", "x_NV = logits_NV.copy()", "subtract the maximum"),
    ("7.3", "loss_N[counted].mean()", "loss_N[counted].sum()", "the sum over rows, not the mean"),
    ("7.3", "loss_N[counted].mean()", "loss_N.mean()", "leave them out of the sum"),
    ("7.3", "    p_NV[n, target_N] -= 1\n", "", "1 of the target is missing"),
    ("7.3", "counted[:, None] / counted.sum()", "counted[:, None]", "the loss is a mean"),
    ("7.3", "p_NV * counted[:, None] / counted.sum()", "p_NV / counted.sum()", "theirs is 0"),
]  # fmt: skip
