"""Typical mistakes, planted in the solutions of lesson 1: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("1.1", "if i < y_n.size:", "if True:", "Threads whose i is not below y_n.size must do nothing"),
    ("1.1", "cuda.blockIdx.x * cuda.blockDim.x + ", "", "which number tells the blocks apart"),
    ("1.1", "cuda.blockDim.x", "cuda.gridDim.x", "which number tells the blocks apart"),
    ("1.1", "cuda.blockDim.x", "(cuda.blockDim.x + 1)", "the stride from block to block is blockDim.x"),
    ("1.1", "if i < y_n.size:", "if i < cuda.blockDim.x and i < y_n.size:", "Only the first block did its work"),
    ("1.1", "y_n[i] = a_n[i] + b_n[i]", "y_n[i] = a_n[i] * b_n[i]", "the product, not the sum"),
    ("1.1", "y_n[i] = a_n[i] + b_n[i]", "y_n[i] += a_n[i] + b_n[i]", "assign it with = and not +="),
    ("1.2", "bias_C[c]", "bias_C[r]", "one number per column"),
    ("1.2", "y_RC[r, c] =", "y_RC[c, r] =", "a row comes first"),
    ("1.2", " and c < y_RC.shape[1]", "", "Both axes need their guard"),
    ("1.2", "cuda.blockIdx.y * cuda.blockDim.y + ", "", "each axis needs its own"),
    ("1.2", " + bias_C[c]", "", "the bias is missing"),
    ("1.3", "    cuda.syncthreads()\n", "", "cuda.syncthreads()"),
    ("1.3", "        tile[t] = x_n[first + t]\n    cuda", "        tile[t] = x_n[first + t]\n        cuda", "has to reach the same"),
    ("1.3", "tile[m - 1 - t]", "tile[31 - t]", "m - 1 - t, where m is the number"),
    ("1.3", "tile[m - 1 - t]", "tile[t]", "nothing is reversed"),
    ("1.3", "tile[m - 1 - t]", "tile[(m - t) % m]", "Off by one"),
]  # fmt: skip
