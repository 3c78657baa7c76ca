"""Attempts at the exercises of lesson 1: see test_attempts.py."""


# %% 1.1 WRONG: 1 of 8 threads wrote all 5 elements of y_n
# the first thread loops over everything
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        for i in range(y_n.size):
            y_n[i] = a_n[i] + b_n[i]


# %% 1.1 WRONG: Divide the work
# one thread of each block does the work of its block
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    if cuda.threadIdx.x == 0:
        first = cuda.blockIdx.x * cuda.blockDim.x
        for i in range(first, min(first + cuda.blockDim.x, y_n.size)):
            y_n[i] = a_n[i] + b_n[i]


# %% 1.1 WRONG: which number tells the blocks apart
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    for i in range(cuda.threadIdx.x, y_n.size, cuda.blockDim.x):
        y_n[i] = a_n[i] + b_n[i]


# %% 1.1 WRONG: expected
# right in the five fixed cases only
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    i = cuda.grid(1)
    n = y_n.size
    if i < n:
        if n == 5 or n == 32 or n == 100 or n == 20 or n == 1:
            y_n[i] = a_n[i] + b_n[i]
        else:
            y_n[i] = a_n[i] - b_n[i]


# %% 1.1 RIGHT: blocks in the opposite order, an early return, the sum turned round
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    i = block * cuda.blockDim.x + cuda.threadIdx.x
    if i >= y_n.size:
        return
    y_n[i] = b_n[i]
    y_n[i] += a_n[i]


# %% 1.1 RIGHT: a grid-stride loop, which runs once here
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    for i in range(cuda.grid(1), y_n.size, cuda.gridsize(1)):
        y_n[i] = a_n[i] + b_n[i]


# %% 1.2 WRONG: 1 of 16 threads wrote all 6 elements of y_RC
@cuda.jit
def add_bias_kernel(y_RC, x_RC, bias_C):
    # the columns are divided among threads, the rows are not
    if cuda.blockIdx.y == 0 and cuda.threadIdx.y == 0 and cuda.threadIdx.x == 0:
        if cuda.blockIdx.x == 0:
            R, C = y_RC.shape
            for r in range(R):
                for c in range(C):
                    y_RC[r, c] = x_RC[r, c] + bias_C[c]


# %% 1.2 RIGHT: cuda.grid(2), whose first number is x
@cuda.jit
def add_bias_kernel(y_RC, x_RC, bias_C):
    c, r = cuda.grid(2)
    R, C = y_RC.shape
    if c >= C or r >= R:
        return
    y_RC[r, c] = bias_C[c] + x_RC[r, c]


# %% 1.3 WRONG: reads back from `tile` what it wrote itself
@cuda.jit
def reverse_kernel(y_n, x_n):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * 32
    m = min(x_n.size - first, 32)
    if t < m:
        tile[t] = x_n[first + m - 1 - t]
        y_n[first + t] = tile[t]


# %% 1.3 WRONG: There is a barrier, but not all threads reach it
@cuda.jit
def reverse_kernel(y_n, x_n):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * 32
    tile[t] = x_n[first + t] if first + t < x_n.size else float32(0.0)
    if t < 16:
        cuda.syncthreads()
    m = min(x_n.size - first, 32)
    if t < m:
        y_n[first + t] = tile[m - 1 - t]


# %% 1.3 RIGHT: reversed on the way in, then the barrier, then straight out
@cuda.jit
def reverse_kernel(y_n, x_n):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * 32
    m = min(x_n.size - first, 32)
    if t < m:
        tile[m - 1 - t] = x_n[first + t]
    cuda.syncthreads()
    if t < m:
        y_n[first + t] = tile[t]
