"""Attempts at the exercises of lesson 4: see test_attempts.py."""


# %% 4.1 WRONG: Divide the work
@cuda.jit
def linear_kernel(y_NO, x_NI, w_OI):
    n = cuda.blockIdx.y * 8 + cuda.threadIdx.y
    if n < y_NO.shape[0] and cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        for o in range(y_NO.shape[1]):
            acc = float32(0.0)
            for i in range(x_NI.shape[1]):
                acc += x_NI[n, i] * w_OI[o, i]
            y_NO[n, o] = acc


# %% 4.1 WRONG: floats are added by an atomic
@cuda.jit
def linear_kernel(y_NO, x_NI, w_OI):
    o, n = cuda.grid(2)
    if n < y_NO.shape[0] and o < y_NO.shape[1]:
        acc = cuda.shared.array((8, 8), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        acc[y, x] = float32(0.0)
        for i in range(x_NI.shape[1]):
            cuda.atomic.add(acc, (y, x), x_NI[n, i] * w_OI[o, i])
        y_NO[n, o] = acc[y, x]


# %% 4.1 RIGHT: backwards over i, in two sums
@cuda.jit
def linear_kernel(y_NO, x_NI, w_OI):
    o, n = cuda.grid(2)
    if n < y_NO.shape[0] and o < y_NO.shape[1]:
        even, odd = float32(0.0), float32(0.0)
        for i in range(x_NI.shape[1] - 1, -1, -1):
            if i % 2:
                odd += x_NI[n, i] * w_OI[o, i]
            else:
                even += x_NI[n, i] * w_OI[o, i]
        y_NO[n, o] = even + odd


# %% 4.2 RIGHT: the tile of w is stored transposed
@cuda.jit
def tiled_linear_kernel(y_NO, x_NI, w_OI):
    x_tile = cuda.shared.array((8, 9), float32)
    w_tile = cuda.shared.array((8, 9), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    (N, O), I = y_NO.shape, x_NI.shape[1]
    n0, o0 = cuda.blockIdx.y * 8, cuda.blockIdx.x * 8
    acc = float32(0.0)
    for step in range((I + 7) // 8):
        i = step * 8 + tx
        a, b = float32(0.0), float32(0.0)
        if i < I:
            if n0 + ty < N:
                a = x_NI[n0 + ty, i]
            if o0 + ty < O:
                b = w_OI[o0 + ty, i]
        x_tile[ty, tx] = a
        w_tile[tx, ty] = b
        cuda.syncthreads()
        for j in range(8):
            acc += x_tile[ty, j] * w_tile[j, tx]
        cuda.syncthreads()
    if n0 + ty < N and o0 + tx < O:
        y_NO[n0 + ty, o0 + tx] = acc


# %% 4.2 WRONG: There is a barrier, but not all threads reach it
@cuda.jit
def tiled_linear_kernel(y_NO, x_NI, w_OI):
    x_tile = cuda.shared.array((8, 9), float32)
    w_tile = cuda.shared.array((8, 9), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    n, o = cuda.blockIdx.y * 8 + ty, cuda.blockIdx.x * 8 + tx
    acc = float32(0.0)
    for i in range(0, x_NI.shape[1], 8):
        x_tile[ty, tx] = x_NI[n, i + tx]
        w_tile[ty, tx] = w_OI[o - tx + ty, i + tx]
        if tx == 0:
            cuda.syncthreads()
        for j in range(8):
            acc += x_tile[ty, j] * w_tile[tx, j]
    y_NO[n, o] = acc


# %% 4.3 WRONG: is a copy
def linear_by_blas(gemm, y_NO, x_NI, w_OI):
    (N, I), O = x_NI.shape, len(w_OI)
    gemm(False, False, O, N, I, w_OI.T.copy(), O, x_NI, I, y_NO, O)


# %% 4.3 WRONG: gemm was called
def linear_by_blas(gemm, y_NO, x_NI, w_OI):
    (N, I), O = x_NI.shape, len(w_OI)
    for n in range(N):
        gemm(True, False, O, 1, I, w_OI, I, x_NI[n : n + 1], I, y_NO[n : n + 1], O)
