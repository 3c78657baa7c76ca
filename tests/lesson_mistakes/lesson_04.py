"""Typical mistakes, planted in the solutions of lesson 4: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("4.1", "w_OI[o, i]", "w_OI[i, o]", "the LAST one of w"),
    ("4.1", "acc += x_NI", "acc = x_NI", "add up with +="),
    ("4.1", "y_NO[n, o] = acc", "y_NO[n, o] += acc", "it holds NaN before"),
    ("4.1", "if n < y_NO.shape[0] and o < y_NO.shape[1]:", "if True:", "both n and o need a guard"),
    ("4.1", "range(x_NI.shape[1])", "range(1)", "the loop goes over all of i"),
    ("4.2", "        cuda.syncthreads()  # the tiles are full\n", "", "barrier after loading is missing"),
    ("4.2", "        cuda.syncthreads()  # the tiles may be overwritten\n", "", "anybody loads the next tiles"),
    ("4.2", "range(0, I, 8)", "range(0, 8, 8)", "there are ceil(I / 8) turns"),
    ("4.2", " if o < O and k + tx < I else float32(0.0)", "", "Load 0.0 where any of the two indices is outside"),
    ("4.2", "    for k in range(0, I, 8):\n", "    for k in range(0, I, 8):\n        acc = float32(0.0)\n", "set to 0 once"),
    (
        "4.2", "acc += x_tile[ty, j] * w_tile[tx, j]",
        "acc += x_NI[n, k + j] * w_OI[first + tx, k + j] if n < N and first + tx < O and k + j < I else float32(0.0)",
        "multiply from the tiles",
    ),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "gemm(True, False, N, O, I, x_NI, I, w_OI, I, y_NO, N)", "laid out by columns"),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "gemm(True, False, N, O, I, w_OI, I, x_NI, I, y_NO, O)", "AS BLAS SEES IT"),
    ("4.3", "gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "gemm(False, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "leading dimension"),
    ("4.3", "    gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)", "    pass", "never called"),
]  # fmt: skip
