"""Typical mistakes, planted in the solutions of lesson 3: (exercise, old, new, phrase in the answer)."""

MISTAKES = [
    ("3.1", "(16, 8, 4, 2, 1)", "(16, 8, 4, 2)", "the last step has width 1"),
    ("3.1", "(16, 8, 4, 2, 1)", "(8, 4, 2, 1)", "the first step has width 16"),
    ("3.1", "(16, 8, 4, 2, 1)", "(32, 16, 8, 4, 2, 1)", "five steps are enough"),
    ("3.1", "    if lane == 0:\n", "    if True:\n", "Let only one write it"),
    ("3.1", "x_n[i] if i < x_n.size else float32(0.0)", "x_n[i]", "they contribute 0.0 to the sum"),
    ("3.1", "v += cuda", "v = cuda", "add the value that the shuffle returns to v"),
    (
        "3.1", "    for step in (16, 8, 4, 2, 1):\n        v +=",
        "    for step in (16, 8, 4, 2, 1):\n      if i < x_n.size:\n        v +=", "A shuffle is for the whole warp",
    ),
    ("3.1", "float32(0.0)", "0", "computed in float64"),
    ("3.1", "sums_W[cuda.blockIdx.x]", "sums_W[i]", "one element per block"),
    ("3.1", "if lane == 0:", "if i == 0:", "Only block 0 has written"),
    ("3.1", "sums_W[cuda.blockIdx.x] = v", "sums_W[cuda.blockIdx.x] += v", "which is NaN here"),
    (
        "3.1", "    for step in (16, 8, 4, 2, 1):\n        v += cuda.shfl_xor_sync(FULL, v, step)\n",
        "    v = float32(0.0)\n    for j in range(i, i + 32):\n        if lane == 0 and j < x_n.size:\n            v += x_n[j]\n",
        "one lane reads one element after the other",
    ),
    ("3.2", "cuda.blockDim.x):", "32):", "Elements were added more than once"),
    ("3.2", "acc = float32(0.0)", "acc = 0.0", "computed in float64"),
    ("3.2", "    cuda.syncthreads()\n", "", "cuda.syncthreads()"),
    ("3.2", " if lane < cuda.blockDim.x // 32 else float32(0.0)", "", "only as many are written as the block has warps"),
    ("3.2", "for i in range(tid, x_n.size, cuda.blockDim.x):", "for i in range(tid, tid + 1):", "must continue in steps"),
    ("3.2", "    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)\n", "", "the sum of the first warp alone"),
    ("3.2", "warp_sum(acc)", "acc", "have to be added to each other"),
    ("3.3", " / float32(C) + eps", " + eps", "the root of the MEAN"),
    ("3.3", "/ float32(C) + eps)", "/ float32(C))", "eps is missing"),
    ("3.3", "block_sum(acc, partial) / float32(C) + eps)", "block_sum(acc, partial) / float32(C)) + eps", "eps"),
    ("3.3", " * w_C[c]", "", "The weight w is missing"),
    ("3.3", "float32(1.0) / math.sqrt(", "(", "Both the root and the reciprocal are missing"),
    ("3.3", "x_NC[n, c] * x_NC[n, c]", "x_NC[n, c]", "not their squares"),
    ("3.3", "block_sum(acc, partial)", "acc", "the sum of thread 0 alone"),
    ("3.3", "block_sum(acc, partial)", "warp_sum(acc)", "adds up all warps"),
    ("3.3", " * rstd * ", " * ", "rstd is missing in y"),
    ("3.3", "w_C[c]", "w_C[n]", "belongs to the column"),
    ("3.3", "float32(1.0) /", "1.0 /", "computed in float64"),
    ("3.3", "float32(C)", "C", "computed in float64"),
    ("3.3", "    if tid == 0:\n", "    if True:\n", "Only one thread writes rstd_N[n]"),
    ("3.1", "(16, 8, 4, 2, 1)", "(0, 1, 2, 3, 4)", "each half of the previous one"),
    ("3.2", "    v = warp_sum(acc)\n    if lane == 0:\n        partial[warp] = v\n    cuda.syncthreads()\n    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)\n    v = warp_sum(v)\n    if tid == 0:\n        total_1[0] = v\n", "    tree = cuda.shared.array(1024, float32)\n    tree[tid] = acc\n    cuda.syncthreads()\n    half = cuda.blockDim.x // 2\n    while half > 0:\n        if tid < half:\n            tree[tid] += tree[tid + half]\n        cuda.syncthreads()\n        half //= 2\n    if tid == 0:\n        total_1[0] = tree[0]\n", "half of 3 is 1"),
    ("3.2", "cuda.blockDim.x):", "128):", "expected"),
    ("3.2", "    for i in range(tid, x_n.size, cuda.blockDim.x):\n        acc", "    for i in range(x_n.size):\n      if tid == 0:\n        acc", "1 of 128 threads read x_n"),
    ("3.2", "    for i in range(tid, x_n.size, cuda.blockDim.x):\n        acc", "    for i in range(tid, x_n.size, 32):\n      if tid < 32:\n        acc", "32 of 128 threads read x_n"),
    ("3.3", "cuda.blockDim.x", "64", "not 64"),
    ("3.3", "acc = float32(0.0)", "acc = 0", "start it with float32(0.0)"),
]  # fmt: skip

UNTRUE = [  # mistakes with a phrase that the answer must not contain
    ("3.1", "cuda.shfl_xor_sync(FULL, v, step)", "cuda.shfl_up_sync(FULL, v, step)", "Only block 0"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("3.1", "cuda.shfl_xor_sync", "cuda.shfl_down_sync"),
    ("3.1", "x_n", "x"),
    ("3.2", "    for i in range(tid, x_n.size, cuda.blockDim.x):", "    each = (x_n.size + cuda.blockDim.x - 1) // cuda.blockDim.x\n    for i in range(tid * each, min(x_n.size, tid * each + each)):"),
]  # fmt: skip
