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
# # 43 One kernel three times: Numba, Triton, CuTe
#
# *About 60 minutes. You need [lesson 3](03_reductions.ipynb) and [lesson 14](14_tensor_cores.ipynb).*
#
# **The question.** The same kernel, RMSNorm of rows, in three languages that are all Python. Which thread handles which element is
# decided by the programmer in one, by the compiler in another, by an object in the third. What do you write down, and what is left to the compiler?
#
# You will write a kernel in Triton's way of thinking, as a program that handles a block of values, and the layouts of CuTe, which are functions from
# coordinates to addresses. Triton and CuTe need packages and a GPU to run, so their kernels are read here, not run. (The one for Triton
# was run in Triton 3.9's interpreter, the one for CuTe compiled for a Hopper GPU by CuTe DSL 4.8, both without a GPU.)

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

from xtrain import lesson
from xtrain.kernels.primitives.reduce import warp_sum
from xtrain.simulator import sim

# %% [markdown]
# ## Numba: a thread
#
# Row x has C elements, and the result is $y_c = w_c\, x_c / \sqrt{\mathrm{mean}(x^2) + \varepsilon}$. In Numba, as in CUDA C++, one writes what **one thread** does. Here a warp
# has a row, and lane l the elements l, l + 32, ...:


# %%
@cuda.jit
def rmsnorm_kernel(y_NC, x_NC, w_C, eps):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    squares = float32(0.0)
    for c in range(lane, w_C.size, 32):
        squares += x_NC[row, c] * x_NC[row, c]
    rstd = float32(1.0) / (warp_sum(squares) / float32(w_C.size) + eps) ** float32(0.5)
    for c in range(lane, w_C.size, 32):
        y_NC[row, c] = x_NC[row, c] * rstd * w_C[c]


rng = np.random.default_rng(0)
x = rng.normal(size=(3, 100)).astype(np.float32)
w = rng.normal(size=100).astype(np.float32)
want = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-6) * w
y = sim(np.zeros_like(x))
lesson.launch(rmsnorm_kernel, 3, 32, y, sim(x), sim(w), np.float32(1e-6))
print(f"largest error {np.abs(np.asarray(y) - want).max():.0e}")

# %% [markdown]
# The programmer decides everything: which thread, which order, which shuffles (`warp_sum`), and, for more than one warp, shared memory and barriers. So everything can be
# chosen, and everything can be wrong: races, barriers that some threads miss. The simulator looks for that.
#
# ## Triton: a block of values
#
# In Triton one writes what **one program** does, which corresponds to a block of threads. Its variables are blocks of values, and there are no threads at all:
#
# ```python
# import triton
# import triton.language as tl
#
#
# @triton.jit
# def rmsnorm_kernel(y_ptr, x_ptr, w_ptr, C, eps, BLOCK: tl.constexpr):
#     row = tl.program_id(0)
#     c = tl.arange(0, BLOCK)
#     x = tl.load(x_ptr + row * C + c, mask=c < C, other=0.0)
#     w = tl.load(w_ptr + c, mask=c < C, other=0.0)
#     rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / C + eps)
#     tl.store(y_ptr + row * C + c, x * rstd * w, mask=c < C)
#
#
# rmsnorm_kernel[(rows,)](y, x, w, C, 1e-6, BLOCK=triton.next_power_of_2(C))
# ```
#
# `c` is a block of BLOCK numbers, a power of two, and so are all values computed from it. A pointer plus a block is a block of pointers. What lies beyond the row is kept away
# by a **mask**: masked elements are neither read nor written, and `other` takes their place. The compiler decides which thread holds which element, vectorizes loads, and
# puts the reduction into shuffles and shared memory, with its barriers. The number of warps (`num_warps`) and the sizes of tiles are found by autotuning: it runs several and keeps the fastest.
#
# A program can be read as NumPy. Here is what `load` and `store` do (on x and y alone: the program takes w itself), and the kernel above on them:


# %% tags=["exercise"]
def run_programs(program, rows, y, x, *arguments):
    """Run a program for each row. y, x: (R, C) arrays. -> y"""
    flat_y = y.reshape(-1)
    flat_x = x.reshape(-1)

    def load(offsets, mask, other):
        return np.where(mask, flat_x[np.where(mask, offsets, 0)], np.float32(other))

    def store(offsets, values, mask):
        flat_y[offsets[mask]] = values[mask]

    for row in range(rows):
        program(lambda row=row: row, load, store, *arguments)
    return y


# %%
def rmsnorm_program(program_id, load, store, C, BLOCK):
    c = np.arange(BLOCK)
    x = load(program_id() * C + c, c < C, 0.0)
    rstd = 1 / np.sqrt((x * x).sum() / C + 1e-6)
    store(program_id() * C + c, x * rstd * w[np.minimum(c, C - 1)], c < C)


y = run_programs(rmsnorm_program, 3, np.zeros_like(x), x, 100, 128)
print(f"largest error {np.abs(y - want).max():.0e}")

# %% [markdown]
# ## Exercise 43.1: softmax as a program
#
# Now softmax of a row, $y_c = e^{x_c - m} / \sum_k e^{x_k - m}$ with the largest element m of the row. Mind `other`: what may stand in the places beyond the row, so that neither the
# maximum nor the sum changes?


# %% tags=["exercise"]
def softmax_program(program_id, load, store, C, BLOCK):
    """Softmax of row program_id() of x, to the same row of y. Both are (R, C), row after row.

    load(offsets, mask, other) -> the elements of x at these offsets in memory, float32; `other`
    where the mask is False. store(offsets, values, mask) writes to y. Offsets, values and masks are
    arrays of BLOCK elements, a power of two, at least C. A program reads and writes its row only.
    """
    # YOUR CODE


# %%
lesson.check("43.1", softmax_program)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Begin as in `rmsnorm_program`. With `other = -np.inf` the maximum is that of the row, and `np.exp(-np.inf)`, 0, adds nothing to the sum.
#
# </details>


# %% tags=["solution"]
# Solution 43.1
def softmax_program_solution(program_id, load, store, C, BLOCK):
    """Softmax of row program_id() of x, to the same row of y. Both are (R, C), row after row.

    load(offsets, mask, other) -> the elements of x at these offsets in memory, float32; `other`
    where the mask is False. store(offsets, values, mask) writes to y. Offsets, values and masks are
    arrays of BLOCK elements, a power of two, at least C. A program reads and writes its row only.
    """
    c = np.arange(BLOCK)
    x = load(program_id() * C + c, c < C, -np.inf)
    e = np.exp(x - x.max())
    store(program_id() * C + c, e / e.sum(), c < C)


softmax_program = lesson.yours(softmax_program, softmax_program_solution)


# %%
y = run_programs(softmax_program, 3, np.zeros_like(x), x, 100, 128)
print("sums of the rows:", *(f"{s:.6f}" for s in y.sum(1)))

# %% [markdown]
# ## CuTe: a layout
#
# CuTe, a part of NVIDIA's CUTLASS, is again about threads, but the question "which element belongs to whom" is answered by an object, a **layout**: a function from a
# coordinate to an offset, given by a *shape* and a *stride*. A row-major (2, 4) matrix is `(2, 4):(4, 1)`: element (r, c) is at 4 r + c. A layout may also be called with one number i. It is
# turned into coordinates with the **first** one running fastest, so i = 1 is the coordinate (1, 0), at offset 4.
#
# Shapes nest: `(4, (2, 3)):(2, (1, 8))` has two modes, of 4 and of 6, and the second is itself a layout. By hand, i = 5: the first coordinate is 5 mod 4 = 1; the rest, 5 div 4 = 1, is the
# coordinate (1, 0) of the second mode. The offset is 1 · 2 + 1 · 1 + 0 · 8 = 3.
#
# ## Exercise 43.2: the offset


# %% tags=["exercise"]
def size(shape):
    """The number of elements of a shape: an integer, or a tuple of shapes."""
    return shape if isinstance(shape, int) else int(np.prod([size(s) for s in shape]))


def offset(i, shape, stride):
    """-> the offset of element i of the layout shape:stride, 0 <= i < size(shape).

    shape and stride: both an integer, or tuples of the same length, of the same kind again. The
    first mode runs fastest: its coordinate is i % size(first mode), and i // size(first mode) is
    the element of the others. The offsets of all modes are added.
    """
    # YOUR CODE


# %%
lesson.check("43.2", offset)

# %% [markdown]
# <details><summary>Hint</summary>
#
# It is recursive. For integers: `i * stride`. For tuples a loop: each mode s, d adds `offset(i % size(s), s, d)`, and then `i //= size(s)`.
#
# </details>


# %% tags=["solution"]
# Solution 43.2
def offset_solution(i, shape, stride):
    """-> the offset of element i of the layout shape:stride, 0 <= i < size(shape).

    shape and stride: both an integer, or tuples of the same length, of the same kind again. The
    first mode runs fastest: its coordinate is i % size(first mode), and i // size(first mode) is
    the element of the others. The offsets of all modes are added.
    """
    if isinstance(shape, int):
        return i * stride
    total = 0
    for s, d in zip(shape, stride):
        total += offset(i % size(s), s, d)
        i //= size(s)
    return total


offset = lesson.yours(offset, offset_solution)


# %%
print([offset(i, (2, 4), (4, 1)) for i in range(8)])
print([offset(i, (4, (2, 3)), (2, (1, 8))) for i in range(24)])

# %% [markdown]
# (CuTe prints the same two lists.)
#
# ## Who owns what
#
# A **thread-value layout** answers the question of this lesson. It has two parts, one for the thread and one for the value: value v of thread t is at
# `threads(t) + values(v)`. Two of them for a row of 128 elements and a warp:
#
# - `32:1` and `4:32`: thread t has t, t + 32, t + 64, t + 96. That is the loop of the Numba kernel;
# - `32:4` and `4:1`: thread t has 4 t to 4 t + 3, which are 16 neighbouring bytes.
#
# ## Exercise 43.3: the elements of a thread


# %% tags=["exercise"]
def owned(thread, threads, values):
    """-> the offsets of all values of this thread, a list in the order of the values.

    threads, values: layouts, (shape, stride). Value v of thread t is at threads(t) + values(v).
    `offset` and `size` may be called.
    """
    # YOUR CODE


# %%
lesson.check("43.3", owned)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `offset(thread, *threads)` is the first part, the same for all values. There are `size(values[0])` values.
#
# </details>


# %% tags=["solution"]
# Solution 43.3
def owned_solution(thread, threads, values):
    """-> the offsets of all values of this thread, a list in the order of the values.

    threads, values: layouts, (shape, stride). Value v of thread t is at threads(t) + values(v).
    `offset` and `size` may be called.
    """
    first = offset(thread, *threads)
    return [first + offset(v, *values) for v in range(size(values[0]))]


owned = lesson.yours(owned, owned_solution)


# %%
def owners(threads, values, n):
    owner = np.full(n, -1)
    for t in range(size(threads[0])):
        owner[owned(t, threads, values)] = t
    return owner


first = owners((8, 1), (4, 8), 32)
second = owners((8, 4), (4, 1), 32)
lesson.figures.ownership(np.stack([first, second]), "8:1 and 4:8 above, 8:4 and 4:1 below")

# %% [markdown]
# The kernel in CuTe's Python DSL. `local_partition` divides a tensor by a layout of threads and returns what belongs to one of them, again a tensor; `.load()` puts it into registers:
#
# ```python
# import operator
#
# import cutlass
# import cutlass.cute as cute
#
#
# @cute.kernel
# def rmsnorm_kernel(gY: cute.Tensor, gX: cute.Tensor, gW: cute.Tensor, eps: cutlass.Float32):
#     lane, _, _ = cute.arch.thread_idx()
#     row, _, _ = cute.arch.block_idx()
#     threads = cute.make_layout(32)
#     tX = cute.local_partition(gX[row, None], threads, lane)
#     tW = cute.local_partition(gW, threads, lane)
#     tY = cute.local_partition(gY[row, None], threads, lane)
#     x = tX.load()
#     squares = (x * x).reduce(cute.ReductionOp.ADD, 0.0, 0)
#     total = cute.arch.warp_reduction(squares, operator.add)
#     rstd = cute.math.rsqrt(total / gX.shape[1] + eps)
#     tY.store(x * rstd * tW.load())
#
#
# @cute.jit
# def rmsnorm(mY: cute.Tensor, mX: cute.Tensor, mW: cute.Tensor, eps: cutlass.Float32):
#     rmsnorm_kernel(mY, mX, mW, eps).launch(grid=(mX.shape[0], 1, 1), block=(32, 1, 1))
# ```
#
# The shapes must be known when the kernel is compiled, so that `x` fits into registers, and C must be a multiple of 32: this kernel has no masks. The layouts earn their keep with tensor cores, where
# the fragments of [lesson 14](14_tensor_cores.ipynb) are thread-value layouts that come with the instruction, and copies, swizzles and tiles are composed with them.
#
# ## Measure: the two layouts
#
# What the layouts mean for memory, in the simulator: both read the same 128 floats of a row, by four instructions each.


# %%
@cuda.jit
def strided_kernel(y_n, x_n):
    t = cuda.threadIdx.x
    for v in range(4):
        y_n[t + 32 * v] = x_n[t + 32 * v]


@cuda.jit
def neighbours_kernel(y_n, x_n):
    t = cuda.threadIdx.x
    for v in range(4):
        y_n[4 * t + v] = x_n[4 * t + v]


for kernel, layouts in ((strided_kernel, "32:1 and 4:32"), (neighbours_kernel, "32:4 and 4:1")):
    arrays = sim(np.zeros(128, np.float32)), sim(np.zeros(128, np.float32))
    read = lesson.traced(kernel, 1, 32, *arrays).traffic("x_n")
    print(
        f"{layouts:14} {read.requests} requests of {read.sectors // read.requests:2} sectors,",
        end="",
    )
    print(f" {read.efficiency:.0%} of the bytes used per request")

# %% [markdown]
# Number by number the second layout moves four times as many sectors, since each of its instructions touches all 16 of the row. It pays when the four neighbours are *one* access of 16 bytes
# ([lesson 2](02_memory.ipynb)). In Numba one writes that access; Triton's compiler finds it, if it can prove that the pointers are aligned; in CuTe the value layout says it.
#
# **The improvement** of one language over another is not speed: all three end in PTX. It is what one can leave out.
#
# | | Numba | Triton | CuTe |
# |---|---|---|---|
# | one writes the work of | a thread | a block of values | a thread, with layouts |
# | who assigns elements to threads | index arithmetic | the compiler | a layout |
# | shared memory, barriers | by hand | the compiler | by hand, with layouts |
# | edges | `if`, loops | masks | predicates (a mask per element), or shapes that fit |
# | tensor cores | inline PTX | `tl.dot` | atoms (an instruction and its layouts), chosen and tiled by hand |
# | mistakes show as | races, deadlocks | wrong masks, slow code | shapes that do not compose |
# | without a GPU | the simulator | the interpreter, for values | compiles |
#
# ## The library's kernel
#
# xtrain's RMSNorm, in Numba, with everything that the small one lacks: several rows per block, 16-byte accesses, rows of any length:

# %%
from xtrain.kernels import rmsnorm

lesson.source(rmsnorm.make_fwd_kernel)

# %% [markdown]
# ## What did not help
#
# *One program for a very long row.* BLOCK is a whole row here, so it must fit into registers. Beyond that it spills, and a Triton kernel gets a loop over parts, as in Numba.
#
# *Masks with `other=0` everywhere.* Right for a sum, wrong for a product, for the maximum of negative numbers, and for a sum of exponentials, to which it adds $e^{0-m}$: exercise 43.1.
#
# *Reading a layout as a shape.* `(2, 4):(4, 1)` and `(2, 4):(1, 2)` have the same shape and different orders in memory. Only shape and stride together say where an element is.
#
# ## More exercises
#
# 1. Which layout is the transpose of `(2, 4):(4, 1)`, with the same memory?
# 2. Which thread-value layout gives thread t of 32 the elements 2 t, 2 t + 1, 2 t + 64 and 2 t + 65?
# 3. In the Triton kernel, why is the mean divided by C and not by BLOCK?
#
# <details><summary>Solutions</summary>
#
# 1: `(4, 2):(1, 4)`: shape and stride are exchanged together. 2: `32:2` and `(2, 2):(1, 64)`. 3: The masked elements are 0 and add nothing to the sum, but BLOCK counts them.
#
# </details>
#
# ## Sources
#
# - P. Tillet, H. T. Kung, D. Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations*, MAPL 2019.
# - *Triton* documentation, tutorials "Vector Addition" and "Fused Softmax".
# - NVIDIA, *CUTLASS* documentation: "CuTe Layouts", "CuTe Layout Algebra", "CuTe DSL".
# - C. Cecka, *CuTe Layout Representation and Algebra*, 2025.
