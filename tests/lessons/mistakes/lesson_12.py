"""Typical mistakes, planted in the solutions of lesson 12: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("12.1", "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "bits >> 16", "was truncated"),
    ("12.1", "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "(bits + 0x8000) >> 16", "rounded away from zero"),
    ("12.1", "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "(bits + 0x7FFF) >> 16", "rounded towards zero. Ties to even"),
    ("12.1", "((bits >> 16) & 1)", "(1 - ((bits >> 16) & 1))", "Ties went to odd"),
    ("12.1", "if (bits & 0x7FFFFFFF) > 0x7F800000:", "if bits < 0:", "Test for NaN first"),
    ("12.1", "if (bits & 0x7FFFFFFF) > 0x7F800000:", "if (bits & 0x7FFFFFFF) >= 0x7F800000:", "only a NaN has a fraction bit"),
    ("12.1", "(bits >> 16) & 0x8000 | 0x7FC0", "0x7FC0", "sign of NaN is lost"),
    ("12.1", "    if i < y_n.size:\n", "    if True:\n", "Threads past the end"),
    ("12.2", "    half_n[...] = master_n.astype(half_n.dtype)\n", "", "The copy is unchanged"),
    ("12.2", "master_n -= lr * g_n", "master_n[...] = half_n.astype(np.float32) - lr * g_n", "started from the bf16 copy"),
    ("12.2", "master_n -= lr * g_n", "master_n += lr * g_n", "step against the gradient"),
    ("12.2", "master_n -= lr * g_n", "master_n -= (lr * g_n).astype(half_n.dtype).astype(np.float32)", "stays in float32"),
    ("12.2", "master_n -= lr * g_n", "master_n -= g_n", "learning rate is missing"),
    (
        "12.2", "    half_n[...] = master_n.astype(half_n.dtype)\n",
        "    half_n[...] = (half_n.astype(np.float32) - lr * g_n).astype(half_n.dtype)\n", "was updated separately",
    ),
    (
        "12.2", "    master_n -= lr * g_n\n    half_n[...] = master_n.astype(half_n.dtype)",
        "    half_n[...] = (half_n.astype(np.float32) - lr * g_n).astype(half_n.dtype)\n    master_n[...] = half_n", "then copied to the master",
    ),
    (
        "12.2", "    master_n -= lr * g_n\n    half_n[...] = master_n.astype(half_n.dtype)",
        "    half_n[...] = (half_n.astype(np.float32) - lr * g_n).astype(half_n.dtype)", "The master is unchanged",
    ),
    ("12.3", "load1(x, n * C + c)", "x[n * C + c]", "The bits were added"),
    ("12.3", "load1(x, n * C + c)", "load1(x, n * 32 + c)", "The reads of row n do not begin at n * C"),
    ("12.3", "load1(x, n * C + c)", "load1(x[n], c)", "a number stands where an array is needed"),
    ("12.3", "store1(y_N, n, acc)", "store1(y_N, n, acc / C)", "That is the mean"),
    ("12.3", "store1(y_N, n, acc)", "y_N[n] = acc", "writes an integer"),
    ("12.3", "    if lane == 0:\n", "    if True:\n", "Only one lane stores"),
    ("12.3", "range(lane, C, 32)", "range(lane, min(C, 32), 32)", "continue in steps of 32"),
    ("12.3", "    acc = warp_sum(acc)\n", "", "warp_sum sums over the lanes"),
    (
        "12.3", "    acc = float32(0.0)\n    for c in range(lane, C, 32):\n        acc += load1(x, n * C + c)\n    acc = warp_sum(acc)\n"
        "    if lane == 0:\n        store1(y_N, n, acc)",
        "    if lane == 0:\n        store1(y_N, n, float32(0.0))\n        for c in range(C):\n"
        "            store1(y_N, n, load1(y_N, n) + load1(x, n * C + c))", "rounded to bf16 after each addition",
    ),
    ("12.1", "cuda.blockDim.x", "32", "expected"),
    ("12.3", "    for c in range(lane, C, 32):\n        acc += load1(x, n * C + c)\n    acc = warp_sum(acc)\n", "    for c in range(C):\n      if lane == 0:\n        acc += load1(x, n * C + c)\n", "threads read x"),
    ("12.2", "half_n[...] = master_n.astype(half_n.dtype)", "half_n -= (lr * g_n).astype(half_n.dtype)", "was updated separately"),
    (
        "12.3", "        acc += load1(x, n * C + c)\n    acc = warp_sum(acc)\n    if lane == 0:\n        store1(y_N, n, acc)",
        "        acc += x[n * C + c]\n    acc = warp_sum(acc)\n    if lane == 0:\n        y_N[n] = acc", "added and stored as an integer",
    ),
]  # fmt: skip

UNTRUE = [  # words that must not appear in these answers
    ("12.3", "if lane == 0:", "if lane == 0 and n == 0:", "do not begin at n * C"),
]  # fmt: skip
