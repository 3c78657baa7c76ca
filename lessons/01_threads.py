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
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/01_threads.ipynb)
#
# *About 60 minutes. You need Python and NumPy, nothing else; no GPU.*
#
# **The question.** A language model is trained by a few dozen small programs, called kernels, each
# of which runs a million times at once. What does such a program look like, how does each of its
# million copies know what to do, and how do we find out that they do not get in each other's way?
#
# You will write your first three kernels, watch them under a microscope, and break them on purpose:
# once with a **race**, once with a **deadlock**.

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
# Somewhere in every transformer two vectors are added, `y = a + b`: what a layer has computed is
# added to what it was given. In Python it is a loop.

# %%
a = np.array([0.5, 1.5, -2.0, 3.0, 0.25, -1.0, 8.0, 0.0, 2.0, 1.0], np.float32)
b = np.arange(10, dtype=np.float32)


def add_ref(a_n, b_n):
    """The reference: what the kernel has to compute, in one line of NumPy."""
    return a_n + b_n


y = np.empty(10, np.float32)
for i in range(10):
    y[i] = a[i] + b[i]  # the body: it needs i, and nothing from any other turn
print(y)
print("like the reference:", np.array_equal(y, add_ref(a, b)))

# %% [markdown]
# No turn of this loop needs the result of another. So all ten could happen at once, if ten workers
# each knew their `i`.
#
# A GPU has such workers: **threads**. They come in three sizes of company:
#
# - a **thread** runs the body once;
# - a **block** is a group of threads (up to 1024) that sit close together: they can wait for each
#   other and share a small, fast memory;
# - the **grid** is all the blocks of one launch. Blocks do not know of each other, and nobody says
#   in which order they run.
#
# A *kernel* is the body. When it is launched we say how many blocks there are and how many threads
# each has, and the hardware runs the body once for each thread. Inside, three numbers tell a thread
# who it is: `cuda.blockIdx.x` (which block), `cuda.blockDim.x` (how many threads a block has) and
# `cuda.threadIdx.x` (which thread of its block). Counting through is ordinary arithmetic:
#
# $$i = \text{blockIdx} \cdot \text{blockDim} + \text{threadIdx}$$
#
# By hand, for 10 elements in blocks of 4 threads. How many blocks? Enough to cover 10, so 10 / 4
# rounded **up**:

# %%
n, block = 10, 4
grid = -(-n // block)  # rounds up: minus, floor, minus
print(f"{n} elements, {block} threads a block: {grid} blocks, {grid * block} threads")
print("\nblock  thread    i")
for block_index in range(grid):
    for thread_index in range(block):
        i = block_index * block + thread_index
        remark = "" if i < n else "   <- past the end: this thread must do nothing"
        print(f"{block_index:5}  {thread_index:6}  {i:3}{remark}")

# %% [markdown]
# Twelve threads for ten elements: the last block hangs over the edge. Almost every kernel of this
# course begins with the two lines that follow from this table: compute `i`, and do something only
# if `i` is inside.
#
# ## Exercise 1.1: your first kernel
#
# A kernel is a Python function under `@cuda.jit`. It returns nothing: it writes into an array that
# it is given (here `y_n`; the ending `_n` says that the array has one axis of length n). Fill the
# gap. Two or three lines are enough.


# %% tags=["exercise"]
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    """y = a + b.   Grid ceil(n / block), any block. One element per thread."""
    # YOUR CODE


# %% [markdown]
# The next cell checks your kernel. It does not need a GPU: xtrain's **simulator** runs the source
# of the kernel on the CPU, thread by thread, and watches every access to memory.

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
# The length of an array is `y_n.size`, also inside a kernel. Guard the line that writes: `if i <
# y_n.size:`
#
# </details>


# %% tags=["solution"]
# Solution 1.1. Running this cell replaces your kernel, so that the cells below work either way.
@cuda.jit
def add_kernel(y_n, a_n, b_n):
    """y = a + b.   Grid ceil(n / block), any block. One element per thread."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = a_n[i] + b_n[i]


# %% [markdown]
# ## Launching it
#
# `lesson.array` puts an array where kernels run: into the memory of the GPU if there is one, else
# into the simulator. `lesson.launch` starts the kernel there: kernel, grid, block, then the
# arguments. The same two lines work in both worlds, and so does every notebook of this course.

# %%
a_here, b_here = lesson.array(a), lesson.array(b)
y_here = lesson.empty(a_here, 10)  # memory that nobody has written yet
lesson.launch(add_kernel, grid, block, y_here, a_here, b_here)
print(lesson.host(y_here))

# %% [markdown]
# ## Under the microscope
#
# Which thread wrote which element? The simulator can keep a list of all accesses, `lesson.traced`.
# From it we draw the map: one cell per element, and in it the number of the thread *within its
# block*. A new block begins where the numbers begin again at 0. (`simulator.sim` puts an array into
# the simulator, also where there is a GPU.)

# %%
y_sim, a_sim, b_sim = simulator.sim(y), simulator.sim(a), simulator.sim(b)
trace = lesson.traced(add_kernel, grid, block, y_sim, a_sim, b_sim)
for access in trace.accesses[:6]:
    does = "writes" if access.write else "reads "
    element = f"{access.array}[{access.index}]"
    print(f"block {access.block[0]} thread {access.thread} {does} {element}")
print("...", len(trace.accesses), "accesses in all: 10 threads, three each.")
print("Threads 10 and 11 touched nothing.")

# %%
lesson.figures.ownership(
    lesson.owners(trace, "y_n", (10,)),
    "y: thread of its block that wrote each element (blocks of 4)",
)

# %%
lesson.figures.ownership(
    lesson.owners(trace, "y_n", (10,), "block"), "y: block that wrote each element", "block"
)

# %% [markdown]
# ## What the microscope finds
#
# A GPU is silent about most mistakes. It writes past the end of an array into somebody else's
# memory, and reads what another thread has half written; the result is *sometimes* wrong. The
# simulator reports such things with the line in the source and the threads involved.
# (`simulator.run` runs a kernel as `lesson.launch` does; `lesson.report` around it prints the
# report.) Three mistakes that everybody makes:
#
# **1. No guard.** Threads 10 and 11 write past the end.


# %%
@cuda.jit
def unguarded_kernel(y_n, a_n, b_n):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    y_n[i] = a_n[i] + b_n[i]


lesson.report(simulator.run, unguarded_kernel, grid, block, y_sim, a_sim, b_sim)

# %% [markdown]
# **2. No block.** `threadIdx.x` alone begins at 0 again in every block. All blocks then do the
# first four elements, and nobody the others. Two threads that write one element in no fixed order:
# this is a **race**, here between blocks.


# %%
@cuda.jit
def blockless_kernel(y_n, a_n, b_n):
    i = cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = a_n[i] + b_n[i]


lesson.report(simulator.run, blockless_kernel, grid, block, y_sim, a_sim, b_sim)

# %% [markdown]
# This race would do no harm by itself: both threads write the same number. It is reported all the
# same, because it says that two threads believe to own one element, and that is hardly ever meant.
# (Why `block (0, 0, 0)`? Blocks can be numbered along three axes; here only the first is in use.
# Exercise 1.2 takes the second.)
#
# **3. The wrong type.** A number has a type in a kernel, and the widest one wins. A Python literal
# such as `0.1` is a float64, and then the whole line is computed in float64. An H200, the
# data-centre card on which this course measures, does that at half the speed of float32; a T4, the
# small card that Colab lends, at a thirty-second. The simulator computes with the types that the
# GPU would use:


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
# That is why `float32(...)` stands around every constant in xtrain's kernels.
#
# ## Exercise 1.2: two axes
#
# A grid and a block may have two (or three) axes: `.x` and `.y`. Matrices are stored row by row,
# neighbouring *columns* lie next to each other in memory, and neighbouring threads differ in `.x`.
# So the custom is: **x is the column, y the row**. (Lesson 2 shows what it costs to do it the other
# way round.)
#
# Add one bias per column: `y[r, c] = x[r, c] + bias[c]`, on paper
#
# $$\begin{pmatrix} 1 & 2 & 3 \\ 4 & 5 & 6 \end{pmatrix} +
# \begin{pmatrix} 10 & 20 & 30 \end{pmatrix} =
# \begin{pmatrix} 11 & 22 & 33 \\ 14 & 25 & 36 \end{pmatrix}$$


# %% tags=["exercise"]
@cuda.jit
def add_bias_kernel(y_RC, x_RC, bias_C):
    """y[r, c] = x[r, c] + bias[c].   Grid (ceil(C / block x), ceil(R / block y)), any block.

    x is the column, y the row.
    """
    # YOUR CODE


# %%
lesson.check("1.2", add_bias_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x`, and `r` the same with `.y`. `R, C =
# y_RC.shape` works in a kernel.
#
# </details>


# %% tags=["solution"]
# Solution 1.2
@cuda.jit
def add_bias_kernel(y_RC, x_RC, bias_C):
    """y[r, c] = x[r, c] + bias[c].   Grid (ceil(C / block x), ceil(R / block y)), any block.

    x is the column, y the row.
    """
    c = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    r = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if r < y_RC.shape[0] and c < y_RC.shape[1]:
        y_RC[r, c] = x_RC[r, c] + bias_C[c]


# %%
x_RC = simulator.sim(np.arange(1, 71, dtype=np.float32).reshape(5, 14))
bias_C = simulator.sim(np.arange(14, dtype=np.float32))
y_RC = simulator.sim(np.zeros((5, 14), np.float32))
trace = lesson.traced(add_bias_kernel, (4, 3), (4, 2), y_RC, x_RC, bias_C)
lesson.figures.ownership(
    lesson.owners(trace, "y_RC", (5, 14)),
    "5 x 14 elements, blocks of 4 x 2: thread within its block",
)

# %% [markdown]
# A thread's number in its block counts along x first: threads 0 to 3 are the upper row of a block
# of 4 x 2, threads 4 to 7 the lower.
#
# ## Threads that need each other
#
# So far no thread looked at another's work. Sums, maxima, matrix products: nearly everything else
# needs it. Within a block there are two means:
#
# - **shared memory**, a small array that all threads of a block see (and only they):
#   `cuda.shared.array(32, float32)`;
# - a **barrier**, `cuda.syncthreads()`: nobody goes on before all threads of the block are there.
#
# Reverse 8 numbers with 8 threads: thread t puts its number at place t of the shared array, then
# takes the one at place 7 - t, which *another* thread has put there.


# %%
@cuda.jit
def racy_reverse_kernel(y_n, x_n):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    tile[t] = x_n[t]
    y_n[t] = tile[7 - t]  # has thread 7 - t been here yet?


x_8 = simulator.sim(np.arange(8, dtype=np.float32))
y_8 = simulator.sim(np.zeros(8, np.float32))
lesson.report(simulator.run, racy_reverse_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# Thread 0 comes to its last line and reads what thread 7 has not written: shared memory holds
# garbage until somebody writes it. On a GPU the 32 threads of a *warp* move in step most of the
# time, so this kernel would often work, on this card, with this compiler. That is the worst kind of
# mistake.
#
# The simulator finds it because it keeps books: for each element, who wrote and who read since the
# last barrier. In which order it happened to run the threads does not matter. Here is a race that
# no order would show, because each element *has* been written long before:


# %%
@cuda.jit
def racy_rotate_kernel(y_n, x_n):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    tile[t] = x_n[t]
    cuda.syncthreads()
    tile[t] = tile[(t + 1) % 8]  # reads a place that its owner overwrites
    cuda.syncthreads()
    y_n[t] = tile[t]


lesson.report(simulator.run, racy_rotate_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# The cure is a third barrier: first all read into a variable of their own, then all wait, then all
# write. As a picture, with time from left to right:

# %%
lesson.figures.timeline(
    {
        "thread 0": [(0, 1, "read 1"), (1, 2.6, "wait"), (2.6, 3.6, "write 0")],
        "thread 1": [(0, 1.8, "read 2"), (1.8, 2.6, "wait"), (2.6, 3.4, "write 1")],
        "thread 2": [(0, 2.6, "read 3"), (2.6, 3.8, "write 2")],
    },
    "the barrier lets nobody write before everybody has read",
)

# %% [markdown]
# ## Deadlocks
#
# A barrier is a promise that **all** threads of the block come. If it stands inside an `if` that
# some threads skip, those who wait do so for ever: a **deadlock**. A GPU hangs, or (worse) goes on
# with wrong data. The simulator says who waits where:


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
# The guard is right and the barrier is right; only their order is not. A guard goes around the
# *accesses*, never around a barrier. The same holds for an early `return`.
#
# ## Exercise 1.3: reverse every block
#
# Each block of 32 threads reverses its own 32 elements, through shared memory. The last block may
# have fewer.


# %% tags=["exercise"]
@cuda.jit
def reverse_kernel(y_n, x_n):
    """Block b reverses elements 32 b, ..., 32 b + 31, if there are as many.

    Grid ceil(n / 32), block 32.
    """
    tile = cuda.shared.array(32, float32)
    # YOUR CODE


# %%
lesson.check("1.3", reverse_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `first = cuda.blockIdx.x * 32` is where the block begins. It has `m = x_n.size - first` elements,
# but never more than 32. (Write an `if`: `min` cannot be compiled for a GPU by every version of
# Numba.)
#
# </details>
# <details><summary>Hint 2</summary>
#
# Guard, write, leave the `if`; barrier; guard again, read `tile[m - 1 - t]`.
#
# </details>


# %% tags=["solution"]
# Solution 1.3
@cuda.jit
def reverse_kernel(y_n, x_n):
    """Block b reverses elements 32 b, ..., 32 b + 31, if there are as many.

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


# %% [markdown]
# ## Measure
#
# How many threads should a block have? The result does not depend on it. The time does, and the
# reason is worth knowing now: the hardware does not run single threads but **warps** of 32. All 32
# get the same instruction at the same moment. The places of a warp are its *lanes*, 0 to 31. A
# block of 1 thread is still one warp, with 31 lanes that do nothing; a block of 48 is two warps,
# with 16 idle lanes.
#
# The trace counts the instructions that go to memory, per warp. The same 1024 additions, with
# blocks of different sizes:

# %%
m = 1024
y_m, a_m, b_m = (simulator.sim(np.zeros(m, np.float32)) for _ in range(3))
print("threads a block   memory instructions   bytes moved   of these wanted")
for threads in (1, 8, 32, 48, 256):
    t = lesson.traced(add_kernel, -(-m // threads), threads, y_m, a_m, b_m).traffic()
    print(f"{threads:15}   {t.requests:19}   {t.moved:11,}   {t.efficiency:15.0%}")

# %% [markdown]
# Blocks of 1 thread need 32 times the instructions of full warps, and make the memory move 8 times
# the bytes: it moves 32 bytes at a time, and a lonely thread wants 4 of them. **The improvement of
# this lesson is a number: a block is a multiple of 32 threads.** Blocks of 128 or 256 are the usual
# choice. A GPU consists of *multiprocessors* (132 on an H200), and a block runs on one of them. A
# multiprocessor has places for 64 warps, but takes no more than 32 blocks at a time: with one warp
# each, half of its places would stay empty.
#
# If you have a GPU, the next cell times it on 16 million elements.

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
# The same on the machine of the records, for whoever has no GPU here, and with more sizes:

# %%
lesson.table(
    [f"bench_lessons/add_block_{t}/n=16777216/fp32" for t in (1, 8, 32, 48, 64, 128, 256, 1024)],
    {"ms": "ms", "GB/s": "value"},
)

# %% [markdown]
# Divide the first rows by their number of blocks, 16,777,216 over the size of a block: 0.6
# billionths of a second each time, about one clock of the chip. Up to 128 threads a block that is
# all there is to see: the part of the hardware that hands out blocks gives about one per clock.
# From 256 on memory is the limit. Blocks of 1024 are slower again: a multiprocessor holds two of
# them, and a new one begins only when the last warp of an old one has ended.
#
# ## The library's kernel
#
# This is xtrain's own, read from its file at this moment, so it cannot be out of date:

# %%
from xtrain.kernels import elementwise

lesson.source(elementwise.add_naive_kernel)

# %% [markdown]
# It is your kernel, but for `int64`: blockIdx times a block size may pass 2 billion, where 32-bit
# numbers end. And this is the one that xtrain really runs:

# %%
lesson.source(elementwise.add_chunks)

# %% [markdown]
# What it does differently is the subject of the next lesson. What it gains, measured:

# %%
lesson.table(
    ["bench_kernels/add/fp32"],
    {
        "one element a thread, ms": "naive_ms",
        "in use, ms": "ms",
        "GB/s": "value",
        "a copy of as many bytes, ms": "copy_ms",
        "PyTorch, ms": "torch_eager_ms",
    },
)

# %%
add = lesson.record("bench_kernels/add/fp32")
speeds = {
    "one element a thread": add["nbytes"] / add["naive_ms"] / 1e6,
    "in use": add["value"],
    "PyTorch": add["peer_value"],
}
copy = ("a plain copy", add["nbytes"] / add["copy_ms"] / 1e6)
lesson.figures.bars(speeds, "GB/s", "y = a + b, 25 million float32", limit=copy)

# %% [markdown]
# The five lines that you wrote reach four fifths of what the memory of the card can do. That is a
# remarkable place to begin.
#
# ## What did not help
#
# Shared memory does not make `add` faster. Every element is used once, so there is nothing to
# share: the detour adds two instructions per element and a barrier, and saves no byte. The trace
# says so:


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
for name, trace in (("straight", straight), ("by way of shared memory", detour)):
    shared = len(trace.requests(kind="shared"))
    moved = trace.traffic().moved
    print(f"{name:<24} {moved:6,} bytes of global memory, {shared:3} instructions for shared")

# %% [markdown]
# ## More exercises
#
# Work in the notebook, or in a file of your own: `python -m xtrain.lesson start 1` copies the three
# exercises to `my_lessons/01_threads.py`, which git ignores, and `python -m xtrain.lesson check 1`
# checks them.
#
# 1. Change 1.1 so that each thread does *two* elements, `i` and `i + gridDim.x * blockDim.x`, with
#    half the blocks. Check it again with `lesson.report(simulator.run, ...)`.
# 2. Put the barrier of 1.3 inside the `if` and read the report. Then leave it out.
# 3. How many threads do nothing when 1.2 runs on 5 x 14 elements with blocks of 4 x 2? Count by
#    hand, then with the trace.
#
# <details><summary>Solutions</summary>
#
# 1: the body twice, each time with its own guard. Half the blocks, rounded up, still cover all
# elements.
#
# ```python
# first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
# for i in (first, first + cuda.gridDim.x * cuda.blockDim.x):
#     if i < y_n.size:
#         y_n[i] = a_n[i] + b_n[i]
# ```
#
# 2: inside the `if` it is a deadlock as soon as the last block is short (n = 40): threads 8 to 31
# never come. Without it, an uninitialised read of `tile[31]`.
#
# 3: the grid is (4, 3), so there are 4 · 4 = 16 columns of threads and 3 · 2 = 6 rows: 96 threads
# for 70 elements, 26 do nothing. `96 - len(trace.of("y_RC", write=True))` is 26.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*, chapters "Programming Model" and "Hardware
#   Implementation": threads, blocks, warps, barriers.
# - Numba-CUDA, *User guide*, "Writing CUDA Kernels": the same in Python.
# - S. Rush, *GPU Puzzles*: exercises with a gap and a check, from which this form is borrowed.
# - `xtrain/simulator.py`: what the simulator finds, and what it does not.
