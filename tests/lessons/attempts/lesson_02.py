"""Attempts at the exercises of lesson 2: see test_attempts.py."""


# %% 2.1 WRONG: The values are right, but 1 of 128 threads
@cuda.jit
def copy_kernel(y_n, x_n):
    if cuda.grid(1) == 0:
        for i in range(y_n.size):
            y_n[i] = x_n[i]


# %% 2.1 WRONG: neighbouring threads must touch neighbouring elements
# every thread copies one contiguous part
@cuda.jit
def copy_kernel(y_n, x_n):
    T = cuda.gridsize(1)
    part = (y_n.size + T - 1) // T
    first = cuda.grid(1) * part
    for i in range(first, min(first + part, y_n.size)):
        y_n[i] = x_n[i]


# %% 2.1 RIGHT: a while loop
@cuda.jit
def copy_kernel(y_n, x_n):
    i = cuda.grid(1)
    while i < x_n.size:
        y_n[i] = x_n[i]
        i += cuda.gridsize(1)


# %% 2.2 WRONG: This works without shared memory
@cuda.jit
def transpose_kernel(y_CR, x_RC):
    c, r = cuda.grid(2)
    if r < x_RC.shape[0] and c < x_RC.shape[1]:
        y_CR[c, r] = x_RC[r, c]


# %% 2.2 RIGHT: transposed on the way into the tile
@cuda.jit
def transpose_kernel(y_CR, x_RC):
    tile = cuda.shared.array((16, 17), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    R, C = x_RC.shape
    r0, c0 = cuda.blockIdx.y * 16, cuda.blockIdx.x * 16
    if r0 + ty < R and c0 + tx < C:
        tile[tx, ty] = x_RC[r0 + ty, c0 + tx]
    cuda.syncthreads()
    if c0 + ty < C and r0 + tx < R:
        y_CR[c0 + ty, r0 + tx] = tile[ty, tx]


# %% 2.3 WRONG: move 16 bytes per thread at once
@cuda.jit
def copy4_kernel(y_n, x_n):
    i = 4 * cuda.grid(1)
    for j in range(i, min(i + 4, y_n.size)):
        y_n[j] = x_n[j]


# %% 2.3 RIGHT: the elements past the last whole group are found first
@cuda.jit
def copy4_kernel(y_n, x_n):
    registers = cuda.local.array(4, float32)
    k = cuda.grid(1)
    whole = y_n.size // 4
    if k < whole:
        load4(registers, x_n, 4 * k)
        store4(y_n, 4 * k, registers)
    elif k == whole:
        for i in range(4 * whole, y_n.size):
            y_n[i] = x_n[i]
