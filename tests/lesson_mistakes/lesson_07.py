"""Typical mistakes, planted in the solutions of lesson 7: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("7.1", "a * c - b * s", "a * c + b * s", "sign in the first line"),
    ("7.1", "b * c + a * s", "b * c - a * s", "sign in the second line"),
    ("7.1", "t = n % T", "t = n", "look up position n % T"),
    ("7.1", "t = n % T", "t = 0 * n", "positions begin again in each sequence"),
    ("7.1", "    y_NHD[n, h, r + R] = b * c + a * s\n", "", "upper half was never written"),
    ("7.1", "= b * c + a * s", "= b * c + y_NHD[n, h, r] * s", "uses what the first has just computed"),
    ("7.1", "c, s = cos_TR[t, r], sin_TR[t, r]", "s, c = cos_TR[t, r], sin_TR[t, r]", "Cosine and sine are exchanged"),
    ("7.1", "    t = n % T\n", "    t = n\n    if n >= T:\n        return\n", "Only the first sequence"),
    ("7.2", "visible = t + 1", "visible = t", "t included"),
    ("7.2", "float32(-math.inf)", "float32(0.0)", "begin at minus infinity"),
    ("7.2", "    top = block_max(top, partial)\n", "", "subtracted its own maximum"),
    ("7.2", "for s in range(visible + tid, S, cuda.blockDim.x):\n        p_TS[t, s] = float32(0.0)", "for s in range(visible + tid, S, cuda.blockDim.x):\n        p_TS[t, s] = float32(1.0)", "something else than 0"),
    ("7.2", "visible = t + 1", "visible = t if t > 0 else 1", "t included"),
    ("7.2", "visible = t + 1", "visible = S", "may only look at keys up to t"),
    ("7.2", "    for s in range(visible + tid, S, cuda.blockDim.x):\n        p_TS[t, s] = float32(0.0)\n", "", "that must be stored"),
    ("7.2", "top = block_max(top, partial)", "top = float32(0.0) * block_max(top, partial)", "exp overflows"),
    ("7.2", "p_TS[t, s] = math.exp(scale * s_TS[t, s] - top) / total", "p_TS[t, s] = math.exp(scale * s_TS[t, s] - top)", "does not sum to 1"),
    ("7.3", "x_NV = logits_NV - logits_NV.max(1, keepdims=True)", "x_NV = logits_NV.copy()", "subtract the maximum"),
    ("7.3", "loss_N[counted].mean()", "loss_N[counted].sum()", "the sum over rows, not the mean"),
    ("7.3", "loss_N[counted].mean()", "loss_N.mean()", "leave them out of the sum"),
    ("7.3", "np.log(sum_N) - x_NV[n, target_N]", "-np.log(p_NV[n, target_N] / sum_N)", "a probability may round to 0"),
    ("7.3", "sum_N = p_NV.sum(1)", "sum_N = p_NV.sum(0)[target_N]", "goes over axis 1"),
    ("7.3", "p_NV[n, target_N] -= 1", "p_NV[n, target_N] += 1", "MINUS what is"),
    ("7.3", "p_NV[n, target_N] -= 1", "p_NV[:, target_N] -= 1", "One place per row"),
    ("7.3", "loss_N[counted].mean()", "loss_N", "The loss is one number"),
    ("7.3", "    p_NV[n, target_N] -= 1\n", "", "1 of the target is missing"),
    ("7.3", "counted[:, None] / counted.sum()", "counted[:, None]", "the loss is a mean"),
    ("7.3", "p_NV * counted[:, None] / counted.sum()", "p_NV / counted.sum()", "theirs is 0"),
    ("7.2", "visible = t + 1", "visible = t + 2 if t + 2 < S else S", "one key too many"),
    ("7.2", "cuda.blockDim.x", "32", "Two threads write one place of p"),
]  # fmt: skip

UNTRUE = [  # what is not to be said of these
    ("7.2", "p_TS[t, s] = math", "p_TS[t, s] += math", "Row 0 must see one key"),
    ("7.3", "loss_N[counted].mean()", "loss_N[counted].sum() * np.inf", "has overflowed"),
]  # fmt: skip
