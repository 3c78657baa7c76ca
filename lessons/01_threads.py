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
# # 1 A thread, a block, a grid
#
# *About 75 minutes. You need only Python and NumPy; no GPU is required.*
#
# **The question.** A language model is trained by a few dozen small programs called kernels. Each
# kernel runs as a million copies at once. What does such a program look like? How does each copy
# know which part of the work to do? And how do we check that the copies do not interfere with each
# other?
#
# You will write your first three kernels, trace every memory access they make, and break them on
# purpose: once with a **race** and once with a **deadlock**.

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
# ## From a loop to threads
#
# Every transformer adds two vectors in many places, `y = a + b`: a layer's output is added to its
# input. In plain Python this is a loop.

# %%
a = np.array([0.5, 1.5, -2.0, 3.0, 0.25, -1.0, 8.0, 0.0, 2.0, 1.0], np.float32)
b = np.arange(10, dtype=np.float32)


def add_ref(a_n, b_n):
    """The reference: what the kernel has to compute, in one line of NumPy."""
    return a_n + b_n


y = np.empty(10, np.float32)
for i in range(10):
    y[i] = a[i] + b[i]  # the body needs only i and nothing from other iterations
print(y)
print("equal to the reference:", np.array_equal(y, add_ref(a, b)))

# %% [markdown]
# No iteration of this loop needs the result of another. Given ten workers that each know their `i`,
# all ten could run at the same time.
#
# On a GPU these workers are **threads**. They are organised in three levels:
#
# - a **thread** runs the body once;
# - a **block** is a group of up to 1024 threads that run close together: they can wait for each
#   other and share a small, fast memory;
# - the **grid** is all the blocks of one launch. Blocks cannot wait for each other and run in no
#   particular order.
#
# A *kernel* is the loop body. A launch specifies the number of blocks and the number of threads per
# block, and the hardware runs the body once per thread. Inside the kernel, three numbers identify a
# thread: `cuda.blockIdx.x` (which block), `cuda.blockDim.x` (threads per block) and
# `cuda.threadIdx.x` (which thread within its block). The index in the whole grid follows from them:
#
# $$i = \text{blockIdx} \cdot \text{blockDim} + \text{threadIdx}$$
#
# By hand, for 10 elements and blocks of 4 threads: how many blocks are needed? Enough to cover 10
# elements, so 10 / 4 rounded **up**:

# %%
n, block = 10, 4
grid = -(-n // block)  # rounds up: minus, floor, minus
print(f"{n} elements, {block} threads per block: {grid} blocks, {grid * block} threads")
print("\nblock  thread    i")
for block_index in range(grid):
    for thread_index in range(block):
        i = block_index * block + thread_index
        remark = "" if i < n else "   <- past the end: this thread must do nothing"
        print(f"{block_index:5}  {thread_index:6}  {i:3}{remark}")

# %% [markdown]
# There are twelve threads for ten elements, so the last block extends past the end of the array.
# Almost every kernel in this course therefore begins with the same two steps: compute `i`, then do
# the work only if `i` is in range.
#
# ## Exercise 1.1: your first kernel
#
# A kernel is a Python function decorated with `@cuda.jit`. It returns nothing; it writes its result
# into an array argument, here `y_n`. (The suffix `_n` says that the array has one axis of length
# n.) Fill in the gap. Two or three lines are enough.


# %% tags=["exercise"]
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    """y = a + b.   Grid ceil(n / block), any block. One element per thread."""
    # YOUR CODE


# %% [markdown]
# The check does not need a GPU: xtrain's **simulator** runs your kernel's source on the CPU, thread
# by thread, and checks every memory access.

# %%
lesson.check("1.1", add_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x`
#
# </details>
# <details><summary>Hint 2</summary>
#
# The length of an array is `y_n.size`, inside a kernel as well. Guard the line that writes:
# `if i < y_n.size:`
#
# </details>


# %% tags=["solution"]
# Solution 1.1. Running this cell replaces your kernel; the cells below work with either one.
@cuda.jit
def add_kernel_solution(y_n, a_n, b_n):
    """y = a + b.   Grid ceil(n / block), any block. One element per thread."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = a_n[i] + b_n[i]


add_kernel = lesson.yours(add_kernel, add_kernel_solution)


# %% [markdown]
# ## Launch the kernel
#
# `lesson.array` puts an array where kernels run: in GPU memory if there is a GPU, otherwise in the
# simulator. `lesson.launch` launches the kernel there. Its arguments are the kernel, the grid, the
# block, and then the kernel's own arguments. The same code works with and without a GPU, and so
# does every notebook in this course.

# %%
a_here, b_here = lesson.array(a), lesson.array(b)
y_here = lesson.empty(a_here, 10)  # uninitialised memory
lesson.launch(add_kernel, grid, block, y_here, a_here, b_here)
print(lesson.host(y_here))

# %% [markdown]
# ## Trace the kernel
#
# Which thread wrote which element? `lesson.traced` runs a kernel in the simulator and records every
# memory access. The figures below are drawn from such a trace. The first has one cell per element,
# with the number of the thread *within its block*; a new block begins where the numbers start again
# at 0. (`simulator.sim` puts an array in the simulator even if there is a GPU.)

# %%
y_sim, a_sim, b_sim = simulator.sim(y), simulator.sim(a), simulator.sim(b)
trace = lesson.traced(add_kernel, grid, block, y_sim, a_sim, b_sim)
for access in trace.accesses[:6]:
    does = "writes" if access.write else "reads "
    element = f"{access.array}[{access.index}]"
    print(f"block {access.block[0]} thread {access.thread} {does} {element}")
print("...", len(trace.accesses), "accesses in total: 10 threads, three each.")
print("Threads 10 and 11 made no access.")

# %%
lesson.figures.ownership(
    lesson.owners(trace, "y_n", (10,)),
    "y: which thread of its block wrote each element (blocks of 4)",
)

# %%
lesson.figures.ownership(
    lesson.owners(trace, "y_n", (10,), "block"), "y: which block wrote each element", "block"
)

# %% [markdown]
# ## What the simulator finds
#
# A GPU does not report most mistakes. It lets a kernel write past the end of an array into other
# data, or read a value before another thread has written it, and then the result is *sometimes*
# wrong. The simulator reports such errors with the source line and the threads involved.
# (`simulator.run` runs a kernel as `lesson.launch` does; `lesson.report` calls it and prints the
# report.) Here are three common mistakes:
#
# **1. No guard.** Threads 10 and 11 write past the end.


# %%
@cuda.jit
def unguarded_kernel(y_n, a_n, b_n):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    y_n[i] = a_n[i] + b_n[i]


lesson.report(simulator.run, unguarded_kernel, grid, block, y_sim, a_sim, b_sim)

# %% [markdown]
# **2. No block index.** `threadIdx.x` alone starts at 0 again in every block. Every block then
# computes the first four elements, and the other elements are never computed. Two threads that
# write the same element in no defined order are a **race**, in this case between blocks.


# %%
@cuda.jit
def blockless_kernel(y_n, a_n, b_n):
    i = cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = a_n[i] + b_n[i]


lesson.report(simulator.run, blockless_kernel, grid, block, y_sim, a_sim, b_sim)

# %% [markdown]
# This particular race is harmless, because both threads write the same number. It is reported
# anyway: two threads that write the same element are almost always a mistake. (Why
# `block (0, 0, 0)`? Blocks can be numbered along three axes. Here only the first is used; Exercise
# 1.2 uses the second.)
#
# **3. The wrong type.** Every number in a kernel has a type, and the widest type in an expression
# wins. A Python literal such as `0.1` is a float64, so the whole expression is computed in float64.
# On an H200, the data-centre GPU used for the measurements in this course, float64 arithmetic runs
# at half the speed of float32. On a T4, the small GPU that Colab offers, it runs at one
# thirty-second. The simulator computes with the types that the GPU would use:


# %%
@cuda.jit
def tenth_kernel(out_2, x_1):
    out_2[0] = x_1[0] * 0.1
    out_2[1] = x_1[0] * float32(0.1)


x_1 = simulator.sim(np.array([3.0], np.float32))
out_2 = simulator.sim(np.zeros(2))  # float64, to see all digits
simulator.run(tenth_kernel, 1, 1, out_2, x_1)
print(f"x * 0.1          {out_2[0]:.17f}   float64")
print(f"x * float32(0.1) {out_2[1]:.17f}   float32")

# %% [markdown]
# This is why xtrain's kernels write every constant as `float32(...)`.
#
# ## Exercise 1.2: two axes
#
# A grid and a block may have two (or three) axes: `.x` and `.y`. Matrices are stored row by row, so
# neighbouring *columns* are adjacent in memory, and neighbouring threads differ in `.x`. The
# convention is therefore: **x is the column, y is the row**. (Lesson 2 shows the cost of the other
# choice.)
#
# Add one bias per column: `y[r, c] = x[r, c] + bias[c]`. On paper:
#
# $$\begin{pmatrix} 1 & 2 & 3 \\ 4 & 5 & 6 \end{pmatrix} +
# \begin{pmatrix} 10 & 20 & 30 \end{pmatrix} =
# \begin{pmatrix} 11 & 22 & 33 \\ 14 & 25 & 36 \end{pmatrix}$$


# %% tags=["exercise"]
@cuda.jit
def add_bias_kernel(y_RC, x_RC, bias_C):
    """y[r, c] = x[r, c] + bias[c].   Grid (ceil(C / block x), ceil(R / block y)), any block.

    x is the column, y is the row.
    """
    # YOUR CODE


# %%
lesson.check("1.2", add_bias_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x`, and `r` is the same with `.y`.
# `R, C = y_RC.shape` works in a kernel.
#
# </details>


# %% tags=["solution"]
# Solution 1.2
@cuda.jit
def add_bias_kernel_solution(y_RC, x_RC, bias_C):
    """y[r, c] = x[r, c] + bias[c].   Grid (ceil(C / block x), ceil(R / block y)), any block.

    x is the column, y is the row.
    """
    c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    r = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if r < y_RC.shape[0] and c < y_RC.shape[1]:
        y_RC[r, c] = x_RC[r, c] + bias_C[c]


add_bias_kernel = lesson.yours(add_bias_kernel, add_bias_kernel_solution)


# %%
x_RC = simulator.sim(np.arange(1, 71, dtype=np.float32).reshape(5, 14))
bias_C = simulator.sim(np.arange(14, dtype=np.float32))
y_RC = simulator.sim(np.zeros((5, 14), np.float32))
trace = lesson.traced(add_bias_kernel, (4, 3), (4, 2), y_RC, x_RC, bias_C)
lesson.figures.ownership(
    lesson.owners(trace, "y_RC", (5, 14)),
    "5 x 14 elements, blocks of 4 x 2: which thread of its block wrote each element",
)

# %% [markdown]
# Threads within a block are numbered along x first: threads 0 to 3 are the upper row of a 4 x 2
# block, threads 4 to 7 the lower row.
#
# ## Threads that cooperate
#
# So far, no thread has used another thread's result. Sums, maxima, matrix products and nearly
# everything else need it. Within a block there are two tools for this:
#
# - **shared memory**, a small array visible to all threads of the block and to no others:
#   `cuda.shared.array(32, float32)`;
# - a **barrier**, `cuda.syncthreads()`: no thread continues until all threads of the block have
#   reached it.
#
# The next kernel reverses 8 numbers with 8 threads. Thread t writes its number to element t of the
# shared array, then reads element 7 - t, which *another* thread has written.


# %%
@cuda.jit
def racy_reverse_kernel(y_n, x_n):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    tile[t] = x_n[t]
    y_n[t] = tile[7 - t]  # has thread 7 - t written it yet?


x_8 = simulator.sim(np.arange(8, dtype=np.float32))
y_8 = simulator.sim(np.zeros(8, np.float32))
lesson.report(simulator.run, racy_reverse_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# Thread 0 reaches its last line and reads what thread 7 has not written yet: shared memory holds
# garbage until a thread writes it. On a GPU, the 32 threads of a *warp* execute in lockstep most of
# the time, so this kernel would often work, on this GPU, with this compiler. Such bugs are the
# hardest to find.
#
# The simulator finds it because it records, for each element, which threads have read and written
# it since the last barrier. The order in which it happens to run the threads does not matter. The
# next kernel has a race that checking for uninitialised memory would not find, because each element
# *has* been written before it is read:


# %%
@cuda.jit
def racy_rotate_kernel(y_n, x_n):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    tile[t] = x_n[t]
    cuda.syncthreads()
    tile[t] = tile[(t + 1) % 8]  # reads an element that its owner overwrites
    cuda.syncthreads()
    y_n[t] = tile[t]


lesson.report(simulator.run, racy_rotate_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# Step through it: the slider or the arrow keys move through the block's instructions. A row of cells
# is a warp, a cell a thread; below are the arrays, each cell with the thread that touches it. The last
# step is the race: its element is red, and so are both lines in the source. Every check in these
# lessons can be stepped through like this, and `lesson.stepped` shows any kernel.

# %%
lesson.stepped(racy_rotate_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# The fix is a third barrier: every thread reads into a local variable, then all wait, then every
# thread writes. As a picture, with time running from left to right:

# %%
lesson.figures.timeline(
    {
        "thread 0": [(0, 1, "read 1"), (1, 2.6, "wait"), (2.6, 3.6, "write 0")],
        "thread 1": [(0, 1.8, "read 2"), (1.8, 2.6, "wait"), (2.6, 3.4, "write 1")],
        "thread 2": [(0, 2.6, "read 3"), (2.6, 3.8, "write 2")],
    },
    "the barrier: no thread writes before every thread has read",
)

# %% [markdown]
# ## Deadlocks
#
# A barrier requires that **all** threads of the block reach it. If it is inside an `if` that some
# threads skip, the threads that did enter wait forever: a **deadlock**. A GPU hangs or, worse,
# continues with wrong data. The simulator reports which threads wait at which line:


# %%
@cuda.jit
def stuck_kernel(y_n, x_n):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    if t < x_n.size:
        tile[t] = x_n[t]
        cuda.syncthreads()
        y_n[t] = tile[x_n.size - 1 - t]


x_5 = simulator.sim(np.arange(5, dtype=np.float32))
y_5 = simulator.sim(np.zeros(5, np.float32))
lesson.report(simulator.run, stuck_kernel, 1, 8, y_5, x_5)

# %% [markdown]
# In the picture, the threads that wait are red, and the others have left:

# %%
lesson.stepped(stuck_kernel, 1, 8, y_5, x_5)

# %% [markdown]
# The guard is correct and the barrier is correct; only their nesting is wrong. Put a guard around
# *accesses*, never around a barrier. The same holds for an early `return`.
#
# ## Exercise 1.3: reverse every block
#
# Each block of 32 threads reverses its own 32 elements through shared memory. The last block may
# have fewer elements.


# %% tags=["exercise"]
@cuda.jit
def reverse_kernel(y_n, x_n):
    """Block b reverses elements 32 b, ..., 32 b + 31, or up to the end of the array.

    Grid ceil(n / 32), block 32.
    """
    tile = cuda.shared.array(32, float32)
    # YOUR CODE


# %%
lesson.check("1.3", reverse_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `first = cuda.blockIdx.x * 32` is the index of the block's first element. The block has
# `m = x_n.size - first` elements, but never more than 32. (Use an `if`: some versions of Numba
# cannot compile `min` for a GPU.)
#
# </details>
# <details><summary>Hint 2</summary>
#
# Guard the write to `tile` and leave the `if`; then the barrier; then guard again and read
# `tile[m - 1 - t]`.
#
# </details>


# %% tags=["solution"]
# Solution 1.3
@cuda.jit
def reverse_kernel_solution(y_n, x_n):
    """Block b reverses elements 32 b, ..., 32 b + 31, or up to the end of the array.

    Grid ceil(n / 32), block 32.
    """
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * 32
    m = x_n.size - first
    if m > 32:
        m = 32
    if t < m:
        tile[t] = x_n[first + t]
    cuda.syncthreads()
    if t < m:
        y_n[first + t] = tile[m - 1 - t]


reverse_kernel = lesson.yours(reverse_kernel, reverse_kernel_solution)


# %% [markdown]
# ## Measure
#
# How many threads should a block have? The result does not depend on it, but the time does. The
# hardware does not run single threads. It runs **warps** of 32 threads, and all 32 get the same
# instruction at the same time. The positions within a warp are its *lanes*, numbered 0 to 31. A
# block of 1 thread still occupies a warp, with 31 idle lanes; a block of 48 is two warps, with 16
# idle lanes.
#
# The trace counts memory instructions per warp. Here are the same 1024 additions with different
# block sizes:

# %%
m = 1024
y_m, a_m, b_m = (simulator.sim(np.zeros(m, np.float32)) for _ in range(3))
print("threads per block   memory instructions   bytes moved   of these used")
for threads in (1, 8, 32, 48, 256):
    t = lesson.traced(add_kernel, -(-m // threads), threads, y_m, a_m, b_m).traffic()
    print(f"{threads:17}   {t.requests:19}   {t.moved:11,}   {t.efficiency:15.0%}")

# %% [markdown]
# Blocks of 1 thread need 32 times the instructions of full warps and move 8 times the bytes: memory
# moves 32 bytes at a time, and a single thread uses only 4 of them. **The improvement of this
# lesson is a number: make the block size a multiple of 32 threads.** Blocks of 128 or 256 are the
# usual choice. A GPU consists of *multiprocessors* (132 on an H200), and each block runs on one of
# them. A multiprocessor has room for 64 warps, but for at most 32 blocks at a time. With one warp
# per block, half of that room stays empty.
#
# If you have a GPU, the next cell measures this on 16 million elements.

# %%
big = 1 << 24 if lesson.on_gpu() else 1 << 10
a_big, b_big = lesson.array(np.ones(big, np.float32)), lesson.array(np.ones(big, np.float32))
y_big = lesson.empty(a_big, big)


def with_block(threads):
    return lambda: lesson.launch(add_kernel, -(-big // threads), threads, y_big, a_big, b_big)


times = lesson.measure(
    {f"blocks of {t}": with_block(t) for t in (1, 8, 32, 48, 256)}, nbytes=3 * 4 * big
)

# %% [markdown]
# The same measurement from the recorded benchmarks, for readers without a GPU, with more block
# sizes:

# %%
lesson.table(
    [f"bench_lessons/add_block_{t}/n=16777216/fp32" for t in (1, 8, 32, 48, 64, 128, 256, 1024)],
    {"ms": "ms", "GB/s": "value"},
)

# %% [markdown]
# Divide the times in the first rows by the number of blocks, which is 16,777,216 over the block
# size. The result is always 0.6 nanoseconds, about one clock cycle of the chip. Up to 128 threads
# per block, this is the only limit: the hardware launches about one block per clock. From 256 on,
# memory bandwidth is the limit. Blocks of 1024 are slower again: a multiprocessor holds only two of
# them, and a new block starts only when the last warp of an old one has ended.
#
# ## The library's kernel
#
# This is xtrain's own kernel. The cell reads it from the source file, so it is always up to date:

# %%
from xtrain.kernels import elementwise

lesson.source(elementwise.add_naive_kernel)

# %% [markdown]
# It is your kernel, except for `int64`: blockIdx times the block size can exceed 2 billion, the
# limit of a 32-bit integer. And this is the kernel that xtrain actually uses:

# %%
lesson.source(elementwise.add_chunks)

# %% [markdown]
# The next lesson explains what it does differently. The measured gain:

# %%
lesson.table(
    ["bench_kernels/add/fp32"],
    {
        "one element per thread, ms": "naive_ms",
        "in use, ms": "ms",
        "GB/s": "value",
        "copy of the same bytes, ms": "copy_ms",
        "PyTorch, ms": "torch_eager_ms",
    },
)

# %%
add = lesson.record("bench_kernels/add/fp32")
speeds = {
    "one element per thread": add["nbytes"] / add["naive_ms"] / 1e6,
    "in use": add["value"],
    "PyTorch": add["peer_value"],
}
copy = ("a plain copy", add["nbytes"] / add["copy_ms"] / 1e6)
lesson.figures.bars(speeds, "GB/s", "y = a + b, 25 million float32", limit=copy)

# %% [markdown]
# The five lines that you wrote reach four fifths of the GPU's memory bandwidth. That is a good
# place to start.
#
# ## What did not help
#
# Shared memory does not make `add` faster. Every element is used once, so there is nothing to
# share: the detour adds two instructions per element and a barrier, and saves no bytes. The trace
# shows this:


# %%
@cuda.jit
def detour_add_kernel(y_n, a_n, b_n):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + t
    if i < y_n.size:
        tile[t] = a_n[i]
    cuda.syncthreads()
    if i < y_n.size:
        y_n[i] = tile[t] + b_n[i]


straight = lesson.traced(add_kernel, m // 32, 32, y_m, a_m, b_m)
detour = lesson.traced(detour_add_kernel, m // 32, 32, y_m, a_m, b_m)
for name, trace in (("direct", straight), ("through shared memory", detour)):
    shared = len(trace.requests(kind="shared"))
    moved = trace.traffic().moved
    print(f"{name:<24} {moved:6,} bytes of global memory, {shared:3} shared-memory instructions")

# %% [markdown]
# ## More exercises
#
# Work in the notebook or in your own file: `python -m xtrain.lesson start 1` copies the three
# exercises to `my_lessons/01_threads.py`, which git ignores, and `python -m xtrain.lesson check 1`
# checks them.
#
# 1. Change 1.1 so that each thread computes *two* elements, `i` and `i + gridDim.x * blockDim.x`,
#    with half as many blocks. Check it with `lesson.report(simulator.run, ...)`.
# 2. Move the barrier of 1.3 inside the `if` and read the report. Then remove the barrier.
# 3. How many threads do nothing when 1.2 runs on 5 x 14 elements with blocks of 4 x 2? Count by
#    hand, then with the trace.
#
# <details><summary>Solutions</summary>
#
# 1: Repeat the body, each time with its own guard. Half as many blocks, rounded up, still cover all
# elements.
#
# ```python
# first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
# for i in (first, first + cuda.gridDim.x * cuda.blockDim.x):
#     if i < y_n.size:
#         y_n[i] = a_n[i] + b_n[i]
# ```
#
# 2: Inside the `if` it is a deadlock as soon as the last block is short (n = 40): threads 8 to 31
# never reach the barrier. Without the barrier, the read of `tile[31]` is uninitialised.
#
# 3: The grid is (4, 3), so there are 4 · 4 = 16 columns of threads and 3 · 2 = 6 rows: 96 threads
# for 70 elements, so 26 do nothing. `96 - len(trace.of("y_RC", write=True))` is 26.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*, chapters "Programming Model" and "Hardware
#   Implementation": threads, blocks, warps, barriers.
# - Numba-CUDA, *User guide*, "Writing CUDA Kernels": the same in Python.
# - S. Rush, *GPU Puzzles*: exercises with a gap and a check, the model for the exercises in this
#   course.
# - `xtrain/simulator`: what the simulator finds, and what it does not.
