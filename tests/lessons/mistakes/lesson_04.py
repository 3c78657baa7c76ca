"""Typical mistakes, planted in the solutions of lesson 4: (exercise, old, new, phrase in the answer)."""

MISTAKES = [
    ("4.1", "w_OI[o, i]", "w_OI[i, o]", "the LAST index of w"),
    ("4.1", "acc += x_NI", "acc = x_NI", "add up with +="),
    ("4.1", "y_NO[n, o] = acc", "y_NO[n, o] += acc", "it holds NaN before"),
    ("4.1", "if n < y_NO.shape[0] and o < y_NO.shape[1]:", "if True:", "both n and o need a guard"),
    ("4.1", "range(x_NI.shape[1])", "range(1)", "the loop must cover all i"),
    ("4.1", "range(x_NI.shape[1])", "range(x_NI.shape[1] - 1)", "The last product is missing"),
    ("4.1", "range(x_NI.shape[1])", "range(x_NI.shape[0])", "The sum runs over i"),
    ("4.1", "y_NO[n, o] =", "y_NO[o, n] =", "That is y^T"),
    ("4.1", "o = cuda.blockIdx.x", "o = cuda.blockIdx.y", "o from the .x parts"),
    (
        "4.1", "o = cuda.blockIdx.x * 8 + cuda.threadIdx.x\n    n = cuda.blockIdx.y * 8 + cuda.threadIdx.y",
        "n = cuda.blockIdx.x * 8 + cuda.threadIdx.x\n    o = cuda.blockIdx.y * 8 + cuda.threadIdx.y", "the .x parts of the grid count the columns o",
    ),
    ("4.1", "        y_NO[n, o] = acc", "            y_NO[n, o] = acc", "in every iteration of the loop"),
    ("4.2", "range(0, I, 8)", "range(0, I)", "Neighbouring tiles overlap"),
    ("4.2", "w_tile[tx, j]", "w_tile[j, tx]", "The indices of the tile of w are swapped"),
    ("4.2", "w_tile[tx, j]", "w_tile[ty, j]", "All columns of y are the same"),
    ("4.2", "        cuda.syncthreads()  # the tiles are full\n", "", "barrier after loading is missing"),
    ("4.2", "        cuda.syncthreads()  # the tiles may be overwritten\n", "", "any thread loads the next tiles"),
    ("4.2", "range(0, I, 8)", "range(0, 8, 8)", "there are ceil(I / 8) steps"),
    ("4.2", " if o < O and k + tx < I else float32(0.0)", "", "Load 0.0 where any of the two indices is outside"),
    ("4.2", "    for k in range(0, I, 8):\n", "    for k in range(0, I, 8):\n        acc = float32(0.0)\n", "set the accumulator to 0 once"),
    (
        "4.2", "acc += x_tile[ty, j] * w_tile[tx, j]",
        "acc += x_NI[n, k + j] * w_OI[first + tx, k + j] if n < N and first + tx < O and k + j < I else float32(0.0)",
        "multiply from the tiles",
    ),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "gemm(True, False, N, O, I, x_NI, I, w_OI, I, y_NO, N)", "the operands swap places"),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "gemm(True, False, N, O, I, w_OI, I, x_NI, I, y_NO, O)", "as BLAS sees it"),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "gemm(False, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "sees the 4 x 3 array that you pass as 3 x 4"),
    ("4.3", "w_OI, I,", "w_OI, O,", "lda is 4, but a is stored in rows of 3 numbers"),
    ("4.3", "True, False,", "'T', 'N',", "True or False"),
    ("4.3", "w_OI, I,", "w_OI.T, I,", "a transposed view"),
    ("4.3", "    gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "    y_NO[:] = x_NI @ w_OI.T", "gemm was called 0 times"),
    ("4.3", "    gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "    pass", "never called"),
    ("4.1", "        acc = float32(0.0)\n        for i in range(x_NI.shape[1]):\n            acc += x_NI[n, i] * w_OI[o, i]\n        y_NO[n, o] = acc", "        acc = 0.0\n        for i in range(x_NI.shape[1]):\n            acc += x_NI[n, i] * w_OI[o, i]\n        y_NO[n, o] = float32(acc)", "computed in float64"),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I,", "gemm(False, False, O, N, I, w_OI.T.copy(), O,", "a is a copy"),
]  # fmt: skip

UNTRUE = [  # mistakes with a phrase that the answer must not contain
    ("4.1", "if n < y_NO.shape[0] and", "if n < y_NO.shape[0] - 1 and", "the .x parts of the grid count"),
    ("4.2", "y_NO[n, first + tx] = acc", "pass", "written with +="),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("4.1", "y_NO", "out"),
]  # fmt: skip
