"""Typical mistakes, planted in the solutions of lesson 1: (exercise, old, new, phrase in the answer)."""

MISTAKES = [
    ("1.1", "if i < y_n.size:", "if True:", "Threads whose i is not below y_n.size must do nothing"),
    ("1.1", "cuda.blockIdx.x * cuda.blockDim.x + ", "", "which number tells the blocks apart"),
    ("1.1", "cuda.blockDim.x", "cuda.gridDim.x", "which number tells the blocks apart"),
    ("1.1", "cuda.blockDim.x", "(cuda.blockDim.x + 1)", "the stride from block to block is blockDim.x"),
    ("1.1", "if i < y_n.size:", "if i < cuda.blockDim.x and i < y_n.size:", "Only the first block did its work"),
    ("1.1", "y_n[i] = a_n[i] + b_n[i]", "y_n[i] = a_n[i] * b_n[i]", "the product, not the sum"),
    ("1.1", "y_n[i] = a_n[i] + b_n[i]", "y_n[i] += a_n[i] + b_n[i]", "assign it with = and not +="),
    ("1.1", "if i < y_n.size:", "if i < y_n.size - 1:", "stops one element early"),
    ("1.1", "y_n[i] = a_n[i]", "y_n = a_n[i]", "Nothing was written: the last"),
    ("1.1", "    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x\n", "    i = cuda.blockIdx.x * 0\n", "Several threads of one block"),
    ("1.1", "y_n[i] = a_n[i] + b_n[i]", "y_n[i] = a_n + b_n", "every array needs its index"),
    ("1.1", "cuda.blockIdx", "cuda.blockidx", "did you mean cuda.blockIdx?"),
    ("1.1", "cuda.blockIdx.x", "blockIdx.x", "write cuda.blockIdx"),
    ("1.1", "cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x", "cuda.blockIdx * cuda.blockDim + cuda.threadIdx", "have three parts each"),
    ("1.1", "y_n.size", "y_n.size()", "remove the () after it"),
    ("1.1", "y_n[i] =", "y_n[i / 1] =", "divide with //"),
    ("1.1", "a_n[i] + b_n[i]", "[a_n[i] + b_n[i]][0]", "a list does not compile"),
    ("1.1", "    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x\n", "    for i, _ in enumerate(a_n):\n      pass\n", "without a loop"),
    ("1.3", "cuda.syncthreads", "cuda.syncthread", "did you mean cuda.syncthreads?"),
    ("1.2", "bias_C[c]", "bias_C[r]", "one number per column"),
    ("1.2", "y_RC[r, c] =", "y_RC[c, r] =", "the row comes first"),
    ("1.2", " and c < y_RC.shape[1]", "", "Both axes need a guard"),
    ("1.2", "cuda.blockIdx.y * cuda.blockDim.y + ", "", "each axis needs its own"),
    ("1.2", " + bias_C[c]", "", "the bias is missing"),
    ("1.3", "    cuda.syncthreads()\n", "", "cuda.syncthreads()"),
    ("1.3", "        tile[t] = x_n[first + t]\n    cuda", "        tile[t] = x_n[first + t]\n        cuda", "has to reach the same"),
    ("1.3", "tile[m - 1 - t]", "tile[31 - t]", "m - 1 - t, where m is the number"),
    ("1.3", "tile[m - 1 - t]", "tile[t]", "nothing is reversed"),
    ("1.3", "tile[m - 1 - t]", "tile[(m - t) % m]", "Off by one"),
    ("1.3", "tile[m - 1 - t]", "tile[m - t]", "the mirror image of t is m - 1 - t"),
    ("1.3", "first = cuda.blockIdx.x * 32", "first = cuda.blockIdx.x * 0", "block b starts at element 32 * b"),
    ("1.3", "tile[m - 1 - t]", "x_n[first + m - 1 - t]", "does not come from `tile`"),
    ("1.1", "cuda.blockDim.x", "32", "Only the first block did its work"),
    ("1.2", "y_RC[r, c] =", "y_RC[r, c] +=", "assign it with ="),
]  # fmt: skip

UNTRUE = [  # mistakes with a phrase that the answer must not contain
    ("1.1", "b_n[i]", "b_n[i - 1]", "The last block has more threads"),
    ("1.2", "if r < y_RC.shape[0]", "if r < y_RC.shape[0] - 1", "computed from the .y parts"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("1.1", "cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x", "cuda.grid(1)"),
    ("1.1", "y_n", "out"),
    ("1.3", "tile", "piece"),
]  # fmt: skip
