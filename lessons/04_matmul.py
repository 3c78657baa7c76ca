# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 Matrix products
#
# *About 75 minutes. You need [lesson 2](02_memory.ipynb).*
#
# **The question.** Nearly all the arithmetic of a language model is in its matrix products. Why is
# this the one operation that xtrain does not write itself, but takes from NVIDIA's library, cuBLAS?
# And how do you call a library that stores matrices by columns?
#
# You will write a matrix product, make it read eight times fewer elements from memory, and count
# what is still missing. Then you will call cuBLAS for exactly the product you want, without ever
# transposing a matrix.

# %% tags=["install"]
# On Google Colab (a free T4 is enough) this fetches xtrain. Anywhere else it does nothing.
import os
import subprocess
import sys

if "google.colab" in sys.modules and not os.path.exists("setup.cfg"):
    clone = "git clone -q --depth 1 https://github.com/OWNER/xtrain xtrain"
    subprocess.run(f"{clone} && pip install -q -e './xtrain[gpu12]'", shell=True, check=True)
    os.chdir("xtrain")
    sys.path.insert(0, os.getcwd())

# %% tags=["imports"]
import numpy as np
from numba import cuda, float32

from xtrain import lesson, simulator

# %% [markdown]
# ## A linear layer by hand
#
# A linear layer has one row of weights per output: `w` is (O, I), for O outputs and I inputs.
# PyTorch, Hugging Face and xtrain all store it this way. For N rows of input, x (N, I):
#
# $$y = x w^\top \qquad y_{n o} = \sum_i x_{n i} \, w_{o i}$$
#
# For N, I, O = 2, 3, 4:

# %%
x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
w = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1], [0.5, -1, 0.5]], np.float32)


def linear_ref(x_NI, w_OI):
    """The reference."""
    return x_NI @ w_OI.T


print(linear_ref(x, w))
print("y[1, 2] by hand:", 4 * 1 + 5 * 1 + 6 * 1)

# %% [markdown]
# The product takes 2 N O I operations (a multiplication and an addition each) and must move at
# least 4 (N I + O I + N O) bytes. For square matrices of size n, this is n / 6 operations per byte:

# %%
for n in (8, 128, 1024, 4096):
    flops, nbytes = 2 * n**3, 4 * 3 * n**2
    print(f"n = {n:5}: {flops / nbytes:6.1f} operations per byte")

# %% [markdown]
# Lesson 2 put the ridge of an H200 at about 17 operations per byte. A large product could therefore
# run at the full arithmetic speed, 67 TFLOP/s. *Could.*
#
# ## Exercise 4.1: one thread per output


# %% tags=["exercise"]
@cuda.jit
def linear_kernel(y_NO, x_NI, w_OI):
    """y = x w^T.   y: (N, O)   x: (N, I)   w: (O, I)

    Grid (ceil(O / 8), ceil(N / 8)), block (8, 8). One element of y per thread:
    .x counts columns o, .y rows n.
    """
    # YOUR CODE


# %%
lesson.check("4.1", linear_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `o` comes from the .x parts of blockIdx and threadIdx, `n` from the .y parts. Inside the guard:
# `acc = float32(0.0)`, a loop over `range(x_NI.shape[1])`, and one line that writes.
#
# </details>


# %% tags=["solution"]
# Solution 4.1
@cuda.jit
def linear_kernel_solution(y_NO, x_NI, w_OI):
    """y = x w^T.   y: (N, O)   x: (N, I)   w: (O, I)

    Grid (ceil(O / 8), ceil(N / 8)), block (8, 8). One element of y per thread:
    .x counts columns o, .y rows n.
    """
    o = cuda.blockIdx.x * 8 + cuda.threadIdx.x
    n = cuda.blockIdx.y * 8 + cuda.threadIdx.y
    if n < y_NO.shape[0] and o < y_NO.shape[1]:
        acc = float32(0.0)
        for i in range(x_NI.shape[1]):
            acc += x_NI[n, i] * w_OI[o, i]
        y_NO[n, o] = acc


linear_kernel = lesson.yours(linear_kernel, linear_kernel_solution)


# %% [markdown]
# ## Its memory traffic

# %%
n = 32
x_s, w_s = simulator.sim(np.ones((n, n), np.float32)), simulator.sim(np.ones((n, n), np.float32))
y_s = simulator.sim(np.zeros((n, n), np.float32))
naive = lesson.traced(linear_kernel, (n // 8, n // 8), (8, 8), y_s, x_s, w_s)
flops = 2 * n**3


def count(name, trace):
    reads = len(trace.of("x_NI")) + len(trace.of("w_OI"))
    moved = trace.traffic().moved
    print(
        f"{name:16} {reads:6,} elements read, {moved:7,} bytes moved: {flops / moved:.2f} "
        "operations per byte"
    )


print(
    f"at best          {2 * n * n:6,} elements read, {12 * n * n:7,} bytes moved: "
    f"{flops / (12 * n * n):.2f}"
)
count("one per thread", naive)

# %% [markdown]
# Every element of x is read once for each of the 32 outputs, and every element of w once for each
# of the 32 rows. Worse, neighbouring threads read `w[o, i]`, `w[o + 1, i]`, ... at the same time,
# and these are a whole row apart. The arithmetic waits for memory. Caches help, but this kernel is
# far to the left of the ridge.
#
# ## Tiles
#
# The threads of a block compute 8 x 8 outputs. Together they need 8 rows of x and 8 rows of w, and
# they use *each element of those 8 times*. So let the block load each element once into shared
# memory, and let all its threads read it from there. Rows may be long, so the block works through
# them in steps: in each step it loads 8 columns of its rows of x and of w. Each such 8 x 8 piece is
# a **tile**. The figure shows the block in row 2 and column 1 of y's blocks (counted from 0). Grey
# is everything it needs in its four steps, orange and blue are what it loads in step 1 (steps are
# counted from 0 too), and green is what it computes:

# %%
lesson.figures.tiles(
    32, 32, 32, 8, (2, 1), 1, "y = x w^T, written as C = A B with B = w^T: step 1 of block (2, 1)"
)

# %% [markdown]
# What is the gain? With tiles of T x T, one step loads 2 T² numbers, which is 8 T² bytes, and does
# 2 T³ operations:
#
# $$\frac{2 T^3}{8 T^2} = \frac{T}{4} \text{ operations per byte}$$
#
# This is 2 for T = 8; reaching the ridge of 17 takes T = 68 or so.
#
# ## Exercise 4.2: a tiled product
#
# Each step has four parts: every thread loads one element of x and one of w into the tiles;
# barrier; every thread adds 8 products; barrier. Sizes need not be multiples of 8: where a tile
# extends past the edge, load 0.0.


# %% tags=["exercise"]
@cuda.jit
def tiled_linear_kernel(y_NO, x_NI, w_OI):
    """y = x w^T.   y: (N, O)   x: (N, I)   w: (O, I)

    Grid (ceil(O / 8), ceil(N / 8)), block (8, 8). Each block reads each element of x and w that
    it needs exactly once.
    """
    x_tile = cuda.shared.array((8, 9), float32)
    w_tile = cuda.shared.array((8, 9), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    # YOUR CODE


# %%
lesson.check("4.2", tiled_linear_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In both loads, let tx run along i: `x_tile[ty, tx]` is x[n, k + tx] with
# `n = cuda.blockIdx.y * 8 + ty`, and `w_tile[ty, tx]` is w[o, k + tx] with
# `o = cuda.blockIdx.x * 8 + ty`. Both loads are then coalesced.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The output of this thread is row `cuda.blockIdx.y * 8 + ty` and column `cuda.blockIdx.x * 8 + tx`,
# so its products are `x_tile[ty, j] * w_tile[tx, j]`.
#
# </details>


# %% tags=["solution"]
# Solution 4.2
@cuda.jit
def tiled_linear_kernel_solution(y_NO, x_NI, w_OI):
    """y = x w^T.   y: (N, O)   x: (N, I)   w: (O, I)

    Grid (ceil(O / 8), ceil(N / 8)), block (8, 8). Each block reads each element of x and w that
    it needs exactly once.
    """
    x_tile = cuda.shared.array((8, 9), float32)
    w_tile = cuda.shared.array((8, 9), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    N, I = x_NI.shape
    O = w_OI.shape[0]
    first = cuda.blockIdx.x * 8  # column of y
    n, o = cuda.blockIdx.y * 8 + ty, first + ty
    acc = float32(0.0)
    for k in range(0, I, 8):
        x_tile[ty, tx] = x_NI[n, k + tx] if n < N and k + tx < I else float32(0.0)
        w_tile[ty, tx] = w_OI[o, k + tx] if o < O and k + tx < I else float32(0.0)
        cuda.syncthreads()  # the tiles are full
        for j in range(8):
            acc += x_tile[ty, j] * w_tile[tx, j]
        cuda.syncthreads()  # the tiles may be overwritten
    if n < N and first + tx < O:
        y_NO[n, first + tx] = acc


tiled_linear_kernel = lesson.yours(tiled_linear_kernel, tiled_linear_kernel_solution)


# %%
tiled = lesson.traced(tiled_linear_kernel, (n // 8, n // 8), (8, 8), y_s, x_s, w_s)
count("one per thread", naive)
count("tiled", tiled)

# %% [markdown]
# One block of the tiled kernel, step by step. Watch the reads of a tile between two barriers: in each
# step all threads of a row read the same element (a cell with "×8"), which costs no more than one.

# %%
lesson.stepped(tiled_linear_kernel, (n // 8, n // 8), (8, 8), y_s, x_s, w_s)

# %% [markdown]
# The kernel reads eight times fewer elements, as computed. Why not use tiles of 64 x 64, then? A
# block has at most 1024 threads, and there is a second limit.
#
# ## The improvement: registers
#
# Count the reads from *shared* memory: the tiled kernel reads two numbers for each multiplication.
# A multiprocessor can do 128 multiply-adds per cycle, but its shared memory delivers only 32
# numbers per cycle. At two numbers each, that is enough for 16 multiply-adds: an eighth of the
# arithmetic speed, at best.
#
# The solution is the same idea one level up. Let each thread compute 4 x 4 outputs and hold them in
# registers: it then loads 4 numbers of x and 4 of w for 16 multiply-adds. That is half a number per
# multiply-add, and a block of 8 x 8 threads owns a tile of 32 x 32.


# %% tags=["bench"]
@cuda.jit
def register_linear_kernel(y_NO, x_NI, w_OI):
    """y = x w^T.   Grid (ceil(O / 32), ceil(N / 32)), block (8, 8).

    4 x 4 outputs per thread, 8 apart in both directions.
    """
    x_tile = cuda.shared.array((32, 9), float32)
    w_tile = cuda.shared.array((32, 9), float32)
    acc = cuda.local.array((4, 4), float32)
    x4, w4 = cuda.local.array(4, float32), cuda.local.array(4, float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    N, I = x_NI.shape
    O = w_OI.shape[0]
    n, o = cuda.blockIdx.y * 32, cuda.blockIdx.x * 32
    for a in range(4):
        for b in range(4):
            acc[a, b] = float32(0.0)
    for k in range(0, I, 8):
        for a in range(4):
            row = ty + 8 * a
            inside = k + tx < I
            x_tile[row, tx] = x_NI[n + row, k + tx] if inside and n + row < N else float32(0.0)
            w_tile[row, tx] = w_OI[o + row, k + tx] if inside and o + row < O else float32(0.0)
        cuda.syncthreads()
        for j in range(8):
            for a in range(4):
                x4[a] = x_tile[ty + 8 * a, j]
                w4[a] = w_tile[tx + 8 * a, j]
            for a in range(4):
                for b in range(4):
                    acc[a, b] += x4[a] * w4[b]
        cuda.syncthreads()
    for a in range(4):
        for b in range(4):
            if n + ty + 8 * a < N and o + tx + 8 * b < O:
                y_NO[n + ty + 8 * a, o + tx + 8 * b] = acc[a, b]


# %%
rng = np.random.default_rng(0)
x_t, w_t = (simulator.sim(rng.standard_normal(s).astype(np.float32)) for s in ((37, 19), (45, 19)))
y_t = simulator.sim(np.zeros((37, 45), np.float32))
simulator.run(register_linear_kernel, (2, 2), (8, 8), y_t, x_t, w_t)
print("correct for odd sizes too:", np.allclose(y_t, linear_ref(x_t, w_t), atol=1e-5))

registers = lesson.traced(register_linear_kernel, (1, 1), (8, 8), y_s, x_s, w_s)
count("4 x 4 per thread", registers)
for name, trace in (("tiled", tiled), ("4 x 4 per thread", registers)):
    loads = len(trace.of(kind="shared", write=False))
    print(f"{name:16} {loads / n**3:.2f} shared-memory reads per multiply-add")

# %% [markdown]
# ## Measure

# %%
big = 2048 if lesson.on_gpu() else 16
x_b, w_b = (lesson.array(rng.standard_normal((big, big)).astype(np.float32)) for _ in range(2))
y_b = lesson.empty(x_b, (big, big))


def with_tiles(kernel, tile):
    grid = -(-big // tile)
    return lambda: lesson.launch(kernel, (grid, grid), (8, 8), y_b, x_b, w_b)


from xtrain.kernels import gemm

runs = {
    "one per thread": with_tiles(linear_kernel, 8),
    "tiled": with_tiles(tiled_linear_kernel, 8),
    "4 x 4 per thread": with_tiles(register_linear_kernel, 32),
    "cuBLAS": lambda: gemm.linear_fwd(x_b, w_b),
}
times = lesson.measure(runs, flops=2 * big**3)

# %% [markdown]
# From the recorded benchmarks, for 2048 x 2048 x 2048. The 4 x 4 kernel is called *registers*:

# %%
PRODUCTS = (
    "one_per_thread/{}/fp32",
    "tiled_8/{}/fp32",
    "registers/{}/fp32",
    "cublas/{}/fp32",
    "cublas/{}/bf16",
)
lesson.table(
    [f"bench_lessons/linear_{p.format('N=O=I=2048')}" for p in PRODUCTS],
    {"ms": "ms", "TFLOP/s": "value"},
)

# %% [markdown]
# The tiles gain a factor of 3, out of a possible 8: caches had already provided the rest. The
# registers gain another 3, of at most 4. cuBLAS is nearly four times as fast again: three quarters
# of the 67 TFLOP/s.
#
# A lot of engineering separates the third kernel from cuBLAS. cuBLAS loads the next tiles while it
# multiplies the current ones. It uses 16-byte accesses, tiles without bank conflicts, 64 to 256
# rows per block, and the right split for each of hundreds of shapes and GPUs. In bf16, the last
# line, it uses the *tensor cores*, which multiply whole tiles in one instruction (lesson 14
# programs them, for attention). xtrain's rule is: where a well-maintained library does exactly what
# is needed, use it. So xtrain uses cuBLAS for the products and its own kernels for everything around
# them, where fusing saves bytes.
#
# ## A library that stores matrices by columns
#
# cuBLAS is NVIDIA's version of BLAS, the *Basic Linear Algebra Subprograms*, whose names and
# arguments are the same on every machine. Its matrix product is called gemm, *general matrix
# multiply*. NumPy stores a matrix row by row (row-major). BLAS comes from Fortran, which stores it
# column by column (column-major). The memory of a row-major (2, 3) matrix, read by columns, is a
# (3, 2) matrix: the transpose. No data moves; only the interpretation changes.

# %%
a = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
print("memory:           ", a.reshape(-1))
print("read by rows:     ", a.tolist())
print("read by columns:  ", np.lib.stride_tricks.as_strided(a, (3, 2), (4, 12)).tolist())

# %% [markdown]
# To compute C = A B in row-major memory, ask BLAS for $C^\top = B^\top A^\top$: the memory is the
# same, the operands are swapped, and nothing is transposed. Each operand also has a flag "use it
# transposed", which changes only the order in which memory is read, and a **leading dimension**:
# the number of elements between the starts of two neighbouring columns (for us: rows). This is the
# function:


# %% tags=["imports"]
def gemm_by_columns(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc):
    """What cuBLAS does: c (m, n) = op(a) (m, k) times op(b) (k, n), all read by columns.

    op(a) is a, or its transpose if trans_a is True.
    lda, ldb, ldc: elements from one column to the next.
    """
    columns = lambda x, rows, cols, lead: np.lib.stride_tricks.as_strided(
        x, (rows, cols), (4, 4 * lead)
    )
    a = columns(a, *((k, m) if trans_a else (m, k)), lda)
    b = columns(b, *((n, k) if trans_b else (k, n)), ldb)
    columns(c, m, n, ldc)[...] = (a.T if trans_a else a) @ (b.T if trans_b else b)


# %% [markdown]
# ## Exercise 4.3: y = x wᵀ through BLAS
#
# Write one call of `gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc)` that fills y. Do not
# copy an array or use `.T`; choose the right order and the right numbers.


# %% tags=["exercise"]
def linear_by_blas(gemm, y_NO, x_NI, w_OI):
    """y = x w^T with one call of gemm, which reads all matrices by columns: see gemm_by_columns.

    y: (N, O), to be filled   x: (N, I)   w: (O, I)   float32, row-major as in NumPy
    """
    N, I = x_NI.shape
    O = w_OI.shape[0]
    # YOUR CODE


# %%
lesson.check("4.3", linear_by_blas)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# BLAS sees y as (O, N), x as (I, N) and w as (I, O). In this view the result is
# `y.T = w @ x.T`: O rows, N columns, and the sum runs over I.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The first operand must be (O, I), but BLAS sees w as (I, O), so w is used transposed. The second
# must be (I, N), which is how BLAS sees x already. A leading dimension is the length of a row in
# NumPy's view.
#
# </details>


# %% tags=["solution"]
# Solution 4.3
def linear_by_blas_solution(gemm, y_NO, x_NI, w_OI):
    """y = x w^T with one call of gemm, which reads all matrices by columns: see gemm_by_columns.

    y: (N, O), to be filled   x: (N, I)   w: (O, I)   float32, row-major as in NumPy
    """
    N, I = x_NI.shape
    O = w_OI.shape[0]
    gemm(True, False, O, N, I, w_OI, I, x_NI, I, y_NO, O)


linear_by_blas = lesson.yours(linear_by_blas, linear_by_blas_solution)


# %%
y = np.zeros((2, 4), np.float32)
linear_by_blas(gemm_by_columns, y, x, w)
print(y)

# %% [markdown]
# A linear layer needs three products, and none of them needs a transpose in memory. With $dy$ the
# gradient of the loss with respect to y (lesson 5 derives them):
#
# | product | shape | first operand for BLAS | second operand |
# |---|---|---|---|
# | $y = x w^\top$ | (N, O) | w, transposed | x |
# | $dx = dy \, w$ | (N, I) | w | dy |
# | $dw = dy^\top x$ | (O, I) | x | dy, transposed |
#
# ## Many small products at once
#
# Attention (lesson 7) multiplies one small pair of matrices for each of its heads. A *strided
# batch* does them all in one call: in addition to the leading dimension, it has a third number, the
# distance from one matrix to the next. The heads can therefore stay where they are, in `(T, H, D)`
# order: each row of a head is D numbers wide, and the next row is H D numbers further:

# %%
T, H, D = 4, 2, 3
q_THD, k_THD = (rng.standard_normal((T, H, D)).astype(np.float32) for _ in range(2))
q_HTD, k_HTD = q_THD.transpose(1, 0, 2), k_THD.transpose(1, 0, 2)  # views: nothing is copied
scores = np.zeros((H, T, T), np.float32)
gemm.matmul(scores, q_HTD, k_HTD, trans_b=True)
print("strides of q in elements (head, row, number):", [s // 4 for s in q_HTD.strides])
print("a copy was made:", not np.shares_memory(q_HTD, q_THD))
print(
    "same as head by head:",
    all(np.allclose(scores[h], q_THD[:, h] @ k_THD[:, h].T, atol=1e-6) for h in range(H)),
)

# %% [markdown]
# ## The library's kernel
#
# There is none: this is the one op of xtrain that only calls a library. It is row-major outside and
# column-major inside, which you can now read:

# %%
lesson.source(gemm.cublas_product)
lesson.source(gemm.linear_fwd)

# %% [markdown]
# `matmul` calls `cublas_product(out, b, a, ...)`: the operands are swapped. `beta` is 1 when the product
# is *added* to the current content of the output, so weight gradients accumulate inside the
# product, without a separate kernel.
#
# ## What did not help
#
# *Larger tiles alone.* A block of 16 x 16 threads with tiles of 16 x 16 reads memory half as often
# as one of 8 x 8. But each thread still computes one output, so the limit of shared memory is
# unchanged:


# %% tags=["bench"]
def make_tiled_kernel(TILE):
    # A size of shared memory must be a compile-time constant, not a sum.
    WIDE = TILE + 1

    @cuda.jit
    def tiled_kernel(y_NO, x_NI, w_OI):
        """Grid (O / TILE, N / TILE), block (TILE, TILE). All sizes are multiples of TILE."""
        x_tile = cuda.shared.array((TILE, WIDE), float32)
        w_tile = cuda.shared.array((TILE, WIDE), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        n, o = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        acc = float32(0.0)
        for k in range(0, x_NI.shape[1], TILE):
            x_tile[ty, tx] = x_NI[n + ty, k + tx]
            w_tile[ty, tx] = w_OI[o + ty, k + tx]
            cuda.syncthreads()
            for j in range(TILE):
                acc += x_tile[ty, j] * w_tile[tx, j]
            cuda.syncthreads()
        y_NO[n + ty, o + tx] = acc

    return tiled_kernel


# %%
for TILE in (8, 16):
    grid = n // TILE, n // TILE
    trace = lesson.traced(make_tiled_kernel(TILE), grid, (TILE, TILE), y_s, x_s, w_s)
    loads = len(trace.of(kind="shared", write=False)) / n**3
    intensity = flops / trace.traffic().moved
    print(
        f"tiles of {TILE:2}: {intensity:.2f} operations per byte, {loads:.2f} shared-memory reads "
        "per multiply-add"
    )
lesson.table(
    [f"bench_lessons/linear_{name}/fp32" for name in ("tiled_8", "tiled_16", "registers")],
    {"ms": "ms", "TFLOP/s": "value"},
)

# %% [markdown]
# The 16 x 16 tiles halve the bytes and save a third of the time. The registers save two thirds.
#
# ## More exercises
#
# 1. Write `dx = dy w` with `gemm_by_columns`, then `dw = dy^T x`. The table above gives the
#    operands; find the sizes.
# 2. By the formula T / 4, how many operations per byte does the kernel with 4 x 4 outputs per thread
#    do? Compare with the count above.
# 3. Change the register kernel to 8 x 8 outputs per thread. How many shared-memory reads per
#    multiply-add does it need? Which resource becomes scarce?
#
# <details><summary>Solutions</summary>
#
# 1: `gemm(False, False, I, N, O, w, I, dy, O, dx, I)` and
# `gemm(False, True, I, O, N, x, I, dy, O, dw, I)`.
#
# 2: Its tile is 32, so the formula gives 8. The count is lower, because it includes writing y and
# because n is small.
#
# 3: 16 numbers for 64 multiply-adds, a quarter. 64 accumulators per thread take many registers, so
# fewer blocks fit on a multiprocessor.
#
# </details>
#
# ## Sources
#
# - K. Goto, R. van de Geijn, *Anatomy of High-Performance Matrix Multiplication*, 2008: tiles for
#   every level of memory.
# - NVIDIA, *cuBLAS Library*, "Data Layout" and `cublasGemmStridedBatchedEx`.
# - V. Volkov, J. Demmel, *Benchmarking GPUs to Tune Dense Linear Algebra*, 2008: why registers, not
#   shared memory, hold the outputs.
