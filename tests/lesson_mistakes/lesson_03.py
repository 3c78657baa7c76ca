"""Typical mistakes, planted in the solutions of lesson 3: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("3.1", "(16, 8, 4, 2, 1)", "(16, 8, 4, 2)", "the last step has width 1"),
    ("3.1", "(16, 8, 4, 2, 1)", "(8, 4, 2, 1)", "the first step has width 16"),
    ("3.1", "(16, 8, 4, 2, 1)", "(32, 16, 8, 4, 2, 1)", "five steps are enough"),
    ("3.1", "    if lane == 0:\n", "    if True:\n", "One is enough"),
    ("3.1", "x_n[i] if i < x_n.size else float32(0.0)", "x_n[i]", "they bring 0.0 to the sum"),
    ("3.1", "v += cuda", "v = cuda", "has to be added to v"),
    (
        "3.1", "    for step in (16, 8, 4, 2, 1):\n        v +=",
        "    for step in (16, 8, 4, 2, 1):\n      if i < x_n.size:\n        v +=", "A shuffle is for the whole warp",
    ),
    ("3.2", "    cuda.syncthreads()\n", "", "cuda.syncthreads()"),
    ("3.2", " if lane < cuda.blockDim.x // 32 else float32(0.0)", "", "only as many are written as the block has warps"),
    ("3.2", "for i in range(tid, x_n.size, cuda.blockDim.x):", "for i in range(tid, tid + 1):", "has to go on in steps"),
    ("3.2", "    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)\n", "", "the sum of the first warp alone"),
    ("3.2", "warp_sum(acc)", "acc", "have to be added to each other"),
    ("3.3", " / float32(C) + eps", " + eps", "the root of the MEAN"),
    ("3.3", "/ float32(C) + eps)", "/ float32(C))", "eps is missing"),
    ("3.3", "block_sum(acc, partial) / float32(C) + eps)", "block_sum(acc, partial) / float32(C)) + eps", "eps"),
    ("3.3", " * w_C[c]", "", "The weight w is missing"),
    ("3.3", "    if tid == 0:\n", "    if True:\n", "One thread writes rstd_N[n]"),
]  # fmt: skip
