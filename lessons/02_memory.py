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
# # 2 Memory
#
# *About 75 minutes. You need [lesson 1](01_threads.ipynb).*
#
# **The question.** Your kernel from lesson 1 did one addition for every 12 bytes that it moved. An
# H200 can do 67 trillion float32 operations per second, and your kernel reached less than one
# percent of that. Was it a bad kernel?
#
# It was not: nearly all kernels of a language model are limited by memory, not by arithmetic. This
# lesson shows what the memory system does when a thread reads an element, how to access memory
# efficiently, and how to know when there is nothing left to gain.

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
from xtrain.kernels.primitives.ptx import load4, store4

# %% [markdown]
# ## Memory requests of a warp
#
# Three facts about the hardware explain this lesson.
#
# 1. The 32 threads of a warp execute one instruction together. A line `v = x[i]` is **one request**
#    for up to 32 elements.
# 2. Memory moves in **sectors of 32 bytes**, which is 8 float32. A thread that reads 4 bytes of a
#    sector causes all 32 to be moved.
# 3. A request costs as many sectors as its 32 addresses touch. If neighbouring threads read
#    neighbouring elements, that is 32 · 4 / 32 = **4 sectors**, and every byte is used: the access
#    is *coalesced*. If the elements are 8 apart, it is 32 sectors, and 7 of every 8 bytes are
#    wasted.
#
# By hand, for an array of shape B, T, C = 2, 3, 4: it has 24 float32, which is 96 bytes or three
# sectors. Which sectors do 6 threads touch when they read along a row (stride 1)? And which when
# they read along the first axis of the (6, 4) matrix, down a column (stride 4)?

# %%
B, T, C = 2, 3, 4
for name, stride in (("along a row", 1), ("down a column", C)):
    elements = [lane * stride for lane in range(6)]
    sectors = [4 * i // 32 for i in elements]
    moved = 32 * len(set(sectors))
    print(f"{name:14} elements    {elements}")
    print(f"{'':14} first bytes {[4 * i for i in elements]}")
    print(f"{'':14} sectors     {sectors}: {moved} bytes moved, 24 used")

# %% [markdown]
# ## Count the traffic
#
# The simplest kernel that only moves memory is a copy, `y = x`. Its reference is one line of NumPy,
# `y = x.copy()`. Here are three versions that differ only in which element each thread copies.


# %% tags=["bench"]
@cuda.jit
def copy_naive_kernel(y_n, x_n):
    """Grid ceil(n / block). One element per thread; neighbouring threads, neighbouring elements."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = x_n[i]


@cuda.jit
def copy_chunk_kernel(y_n, x_n):
    """Any grid. Each thread copies its own contiguous chunk."""
    threads = cuda.gridDim.x * cuda.blockDim.x
    each = (x_n.size + threads - 1) // threads
    me = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(me * each, me * each + each):
        if i < x_n.size:
            y_n[i] = x_n[i]


@cuda.jit
def copy_odd_kernel(y_n, x_n):
    """Grid ceil(n / block). As naive, but shifted by one element: no warp starts on a sector."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x + 1
    if i < y_n.size:
        y_n[i] = x_n[i]


# %%
x = simulator.sim(np.arange(256, dtype=np.float32))
y = simulator.sim(np.zeros(256, np.float32))
naive = lesson.traced(copy_naive_kernel, 4, 64, y, x)
chunk = lesson.traced(copy_chunk_kernel, 1, 32, y, x)
odd = lesson.traced(copy_odd_kernel, 4, 64, y, x)
print("kernel    requests   sectors   bytes moved     bytes used")
for name, trace in (("naive", naive), ("chunk", chunk), ("odd", odd)):
    t = trace.traffic("x_n")
    print(f"{name:8}  {t.requests:8}   {t.sectors:7}   {t.moved:11,}   {t.wanted:12,}")

# %% [markdown]
# In the figures, each row is one request and each cell is one sector. The dark part of a cell is
# the part that a thread uses. The first figure shows the coalesced copy, the second the copy in
# which each thread has its own chunk.

# %%
lesson.figures.traffic(naive, "x_n", requests=4)

# %%
lesson.figures.traffic(chunk, "x_n", requests=4)

# %% [markdown]
# In the second figure, all 32 sectors are touched at time 0 for 4 bytes each, and all of them again
# at times 1, 2, ... A cache may serve the later accesses, if it has room for all warps at once; a
# coalesced access does not depend on that. **Do not give each thread a contiguous chunk. Interleave
# the elements across the threads of a warp, as you would deal cards.**
#
# ## Exercise 2.1: a grid-stride loop
#
# Write a copy that works with *any* grid: every thread starts at its own index and advances by the
# total number of threads until the end of the array. This is the *grid-stride loop*, which many
# kernels use.


# %% tags=["exercise"]
@cuda.jit
def copy_kernel(y_n, x_n):
    """y = x.   Any grid, any block. Of T threads, thread k copies k, k + T, k + 2 T, ..."""
    # YOUR CODE


# %%
lesson.check("2.1", copy_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The total number of threads is `cuda.gridDim.x * cuda.blockDim.x`. `range` with a start, an end
# and a step works in a kernel.
#
# </details>


# %% tags=["solution"]
# Solution 2.1
@cuda.jit
def copy_kernel_solution(y_n, x_n):
    """y = x.   Any grid, any block. Of T threads, thread k copies k, k + T, k + 2 T, ..."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for i in range(first, y_n.size, step):
        y_n[i] = x_n[i]


copy_kernel = lesson.yours(copy_kernel, copy_kernel_solution)


# %% [markdown]
# ## When reads and writes cannot both be coalesced
#
# A transpose, `y[c, r] = x[r, c]`, reads rows and writes columns. However the threads are assigned,
# neighbouring threads access neighbouring elements of either x or y, but not of both:


# %% tags=["bench"]
@cuda.jit
def transpose_naive_kernel(y_CR, x_RC):
    """Grid (ceil(C / 16), ceil(R / 16)), block (16, 16)."""
    c = cuda.blockIdx.x * 16 + cuda.threadIdx.x
    r = cuda.blockIdx.y * 16 + cuda.threadIdx.y
    if r < x_RC.shape[0] and c < x_RC.shape[1]:
        y_CR[c, r] = x_RC[r, c]


# %%
x_RC = simulator.sim(np.arange(32 * 64, dtype=np.float32).reshape(32, 64))
y_CR = simulator.sim(np.zeros((64, 32), np.float32))
plain = lesson.traced(transpose_naive_kernel, (4, 2), (16, 16), y_CR, x_RC)
print(f"reads:  {plain.traffic('x_RC').efficiency:.0%} of the bytes moved were used")
print(f"writes: {plain.traffic('y_CR').efficiency:.0%}")

# %% [markdown]
# The solution is shared memory, which has no sectors. A block reads a square **tile** row by row,
# coalesced. All threads wait. Then the block writes the tile's columns, which are rows of the
# result, so this is coalesced again. In between, every thread handles an element that another
# thread has read, the same pattern as `reverse` in lesson 1.
#
# Shared memory has its own rule. It is divided into 32 **banks**: word i is in bank i % 32, and a
# bank serves one word at a time. If several lanes of a warp access *different* words in the same
# bank, the accesses are serialised: a *bank conflict*. In a tile of 16 x 16, moving one element
# down a column is a step of 16 words, so every second row starts in the same bank. By hand, these
# are the banks of the 16 elements of a column, for rows of 16 and of 17 words:

# %%
for width in (16, 17):
    banks = [(row * width) % 32 for row in range(16)]
    print(f"rows of {width}: {len(set(banks)):2} different banks {banks}")

# %% [markdown]
# With one extra column (*padding*), neighbouring rows start in different banks.
#
# ## Exercise 2.2: a transpose through a tile


# %% tags=["exercise"]
@cuda.jit
def transpose_kernel(y_CR, x_RC):
    """y[c, r] = x[r, c], both sides coalesced.   x: (R, C)   y: (C, R)

    Grid (ceil(C / 16), ceil(R / 16)), block (16, 16): one block of threads per tile of x.
    """
    tile = cuda.shared.array((16, 17), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    # YOUR CODE


# %%
lesson.check("2.2", transpose_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First half: `r = cuda.blockIdx.y * 16 + ty`, `c = cuda.blockIdx.x * 16 + tx`, and if (r, c) is
# inside x, `tile[ty, tx] = x_RC[r, c]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Second half: tx now runs along a row of y, that is, along r: `r = cuda.blockIdx.y * 16 + tx`,
# `c = cuda.blockIdx.x * 16 + ty`. Which element of the tile is x[r, c]?
#
# </details>


# %% tags=["solution"]
# Solution 2.2
@cuda.jit
def transpose_kernel_solution(y_CR, x_RC):
    """y[c, r] = x[r, c], both sides coalesced.   x: (R, C)   y: (C, R)

    Grid (ceil(C / 16), ceil(R / 16)), block (16, 16): one block of threads per tile of x.
    """
    tile = cuda.shared.array((16, 17), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    r = cuda.blockIdx.y * 16 + ty
    c = cuda.blockIdx.x * 16 + tx
    if r < x_RC.shape[0] and c < x_RC.shape[1]:
        tile[ty, tx] = x_RC[r, c]
    cuda.syncthreads()
    r = cuda.blockIdx.y * 16 + tx
    c = cuda.blockIdx.x * 16 + ty
    if r < x_RC.shape[0] and c < x_RC.shape[1]:
        y_CR[c, r] = tile[tx, ty]


transpose_kernel = lesson.yours(transpose_kernel, transpose_kernel_solution)


# %%
tiled = lesson.traced(transpose_kernel, (4, 2), (16, 16), y_CR, x_RC)
for name, trace in (("naive", plain), ("through a tile", tiled)):
    t = trace.traffic()
    ways = max(trace.bank_conflicts(), default=0)
    print(f"{name:15} {t.moved:6,} bytes moved, {t.wanted:,} used; lanes per bank, at most: {ways}")

# %% [markdown]
# Step by step, the eight warps of one block: first each warp reads two rows of x, whole sectors of 32
# bytes; after the barrier each reads two columns of the tile, and the line above the source counts how
# many lanes meet in one bank.

# %%
lesson.stepped(transpose_kernel, (4, 2), (16, 16), y_CR, x_RC)

# %% [markdown]
# A warp covers two rows of this tile, and two of its lanes still conflict in one bank. In a tile of
# 32 x 33, where a warp covers one row, there is no conflict. (The best transpose is the one you
# avoid: lesson 4 shows how matrix products do without it.)
#
# ## Fewer, larger requests
#
# Is a coalesced copy as fast as memory allows? Not yet. A multiprocessor waits several hundred
# nanoseconds for each answer from memory, and it can hide that latency only by keeping many
# requests *in flight* at once. How many bytes must be in flight? By Little's law, bandwidth times
# latency:

# %%
add = lesson.record("bench_kernels/add/fp32")
bandwidth = add["nbytes"] / add["copy_ms"] * 1e3  # bytes per second, of a plain copy on that GPU
reading = bandwidth / 2  # half of a copy's traffic; no thread waits for a write
latency = 600e-9  # seconds, rounded: idle memory takes half as long, busy memory longer
multiprocessors = 132
flight = reading * latency
print(f"{reading / 1e12:.2f} TB/s x {latency * 1e9:.0f} ns = {flight / 1e6:.1f} MB in flight,")
print(f"{flight / multiprocessors / 1024:.0f} KB for each of the {multiprocessors} multiprocessors")
print(f"2048 threads with one float32 each have {2048 * 4 // 1024} KB in flight")

# %% [markdown]
# One element per thread is therefore too little, however many threads there are: a multiprocessor
# holds at most 2048, and they are never all waiting at once; some compute an address, some write,
# some have just started. xtrain's kernels keep about 25 KB in flight. There are two remedies, and
# the library uses both:
#
# - **larger accesses**: one instruction can move 16 bytes per thread, which is four neighbouring
#   float32;
# - **more loads before the first wait**: load two or four groups, *then* compute.
#
# Numba has no 16-byte access, so xtrain adds one: `load4(registers, x, i)` loads `x[i : i + 4]`
# into a small array in the thread's registers, and `store4(x, i, registers)` stores it. `i` must be
# a multiple of 4, because the hardware requires an address that is a multiple of 16.
#
# ## Exercise 2.3: 16 bytes at once


# %% tags=["exercise"]
@cuda.jit
def copy4_kernel(y_n, x_n):
    """y = x.   Grid ceil(n / (4 block)), any block.

    Thread k owns elements 4k, 4k + 1, 4k + 2, 4k + 3, up to the end of the array.
    """
    registers = cuda.local.array(4, float32)
    # YOUR CODE


# %%
lesson.check("2.3", copy4_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# There are two cases. If all four elements are inside (`i + 4 <= y_n.size`), use load4 and store4.
# Otherwise loop from `i` to the end.
#
# </details>


# %% tags=["solution"]
# Solution 2.3
@cuda.jit
def copy4_kernel_solution(y_n, x_n):
    """y = x.   Grid ceil(n / (4 block)), any block.

    Thread k owns elements 4k, 4k + 1, 4k + 2, 4k + 3, up to the end of the array.
    """
    registers = cuda.local.array(4, float32)
    i = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i + 4 <= y_n.size:
        load4(registers, x_n, i)
        store4(y_n, i, registers)
    else:
        for j in range(i, y_n.size):
            y_n[j] = x_n[j]


copy4_kernel = lesson.yours(copy4_kernel, copy4_kernel_solution)


# %% [markdown]
# The same bytes move with a quarter of the requests:

# %%
x, y = (simulator.sim(np.zeros(1024, np.float32)) for _ in range(2))
for name, trace in (
    ("one element", lesson.traced(copy_naive_kernel, 16, 64, y, x)),
    ("four elements", lesson.traced(copy4_kernel, 4, 64, y, x)),
):
    t = trace.traffic("x_n")
    print(
        f"{name:14} {t.requests:3} requests of {t.sectors // t.requests} sectors, "
        f"{t.efficiency:.0%} used"
    )

# %% [markdown]
# ## Measure
#
# On a GPU, the next cell times every copy kernel of this lesson on 64 MB. (The simulator counts
# accesses, but it cannot measure time.)

# %%
n = 1 << 24 if lesson.on_gpu() else 1 << 10
x_big = lesson.array(np.ones(n, np.float32))
y_big = lesson.empty(x_big, n)
runs = {
    "naive": lambda: lesson.launch(copy_naive_kernel, -(-n // 256), 256, y_big, x_big),
    "a chunk per thread": lambda: lesson.launch(copy_chunk_kernel, 1024, 256, y_big, x_big),
    "grid-stride": lambda: lesson.launch(copy_kernel, 1024, 256, y_big, x_big),
    "16 bytes": lambda: lesson.launch(copy4_kernel, -(-n // 1024), 256, y_big, x_big),
}
times = lesson.measure(runs, nbytes=2 * 4 * n)

# %% [markdown]
# From the recorded benchmarks: the copies of this lesson and its transposes (4096 x 4096).

# %%
lesson.table(
    [
        f"bench_lessons/{name}/{shape}/fp32"
        for shape, names in {
            "n=16777216": ("copy_chunk", "copy_naive", "copy_grid_stride", "copy_four"),
            "R=C=4096": ("transpose_naive", "transpose_tiled"),
        }.items()
        for name in names
    ],
    {"ms": "ms", "GB/s": "value", "copy, ms": "copy_ms"},
)

# %% [markdown]
# The grid-stride copy is 17 times as fast as the one with a chunk per thread; 16-byte accesses come
# within 6 % of a plain copy; the tile makes the transpose 1.7 times as fast. The next table shows
# two kernels of the library: `add`, and the cast from float32 to bf16 (a 2-byte float, the subject
# of lesson 12). Each is measured with one element per thread, and as the library does it, with
# 16-byte accesses and several in flight. The last column is the one that matters: the time of a
# plain copy of the same number of bytes, divided by the time of the kernel.

# %%
lesson.table(
    ["bench_kernels/add/fp32", "bench_kernels/cast_narrow/fp32"],
    {
        "one element, ms": "naive_ms",
        "in use, ms": "ms",
        "copy, ms": "copy_ms",
        "copy / in use": "share",
    },
)

# %% [markdown]
# **The improvement of this lesson and its reason:** move the same bytes in fewer, larger requests,
# with several in flight per thread. This saves a fifth of the time for `add`, and nearly half for
# the cast, whose two-byte results make even smaller requests.
#
# ## The roofline
#
# Back to the question from the beginning. The number of operations that a kernel does per byte
# moved is its *arithmetic intensity*. A machine has two limits, and a kernel can be no faster than
#
# $$\text{operations per second} \le \min(\text{peak},\ \text{intensity} \cdot \text{bandwidth})$$
#
# `add` does 1 operation per 12 bytes. Drawn with both axes logarithmic, the limit looks like a
# roof. Its two parts meet at the *ridge*, where the intensity equals peak over bandwidth; here that
# is 67 over 4.0, about 17 operations per byte. The peak is NVIDIA's number for float32 without
# tensor cores (units that only do matrix products: lesson 14). The bandwidth and all points come
# from the records. The operations per element are counted by hand from the kernels' formulas.

# %%
PEAK = 67e12  # float32 operations per second, H200 data sheet
operations = {  # per byte
    "bench_kernels/add/fp32": 1 / 12,
    "bench_kernels/scale/fp32": 1 / 8,
    "bench_kernels/rmsnorm_fwd/fp32": 4 / 8,
    "bench_kernels/adamw/fp32": 15 / 28,
}
points = {}
print("             operations/byte   TFLOP/s   of the peak   of the bandwidth")
for identity, intensity in operations.items():
    r = lesson.record(identity)
    speed = intensity * r["value"] * 1e9  # the value is GB/s, so this is operations per second
    points[r["name"]] = (intensity, speed)
    shares = f"{speed / PEAK:11.1%}   {speed / intensity / bandwidth:16.0%}"
    print(f"{r['name']:12} {intensity:15.3f}   {speed / 1e12:7.2f}   {shares}")

# %%
lesson.figures.roofline(
    points, bandwidth, PEAK, "xtrain's float32 kernels under the roofline of one H200"
)

# %% [markdown]
# (A share slightly above 100 % is possible: the bandwidth is that of a single copy, of another
# size.) All of these kernels are on the slope, 30 to 200 times left of the ridge. For such a
# kernel, the share of peak arithmetic says nothing; the share of a copy's bandwidth is the measure.
# This is why xtrain's benchmarks print a copy next to each of these kernels, and why lesson 11
# makes kernels faster by *moving fewer bytes*. Only one kind of kernel is to the right of the
# ridge: the matrix product, the subject of lesson 4.
#
# ## The library's kernel
#
# xtrain's description of the access pattern that you have just written:

# %%
from xtrain.kernels.primitives import flat as _flat

print(_flat.__doc__)

# %%
lesson.source(_flat.load)

# %% [markdown]
# `vectorized` is your `i + 4 <= y_n.size`, and it also means that x starts at a multiple of 16 bytes. A
# slice such as `x[1:]` does not, so it is read element by element.
#
# ## What did not help
#
# *Eight neighbouring float32 per thread.* If 16 bytes are good, 32 should be better. But this GPU
# has no 32-byte instruction, so it takes two of 16 bytes, and each of the two touches *half* of
# every sector:

# %% tags=["bench"]
from xtrain.kernels.primitives.ptx import load8, store8


@cuda.jit
def copy8_kernel(y_n, x_n):
    registers = cuda.local.array(8, float32)
    i = 8 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i + 8 <= y_n.size:
        load8(registers, x_n, i)
        store8(y_n, i, registers)


# %%
for name, kernel, each in (("four", copy4_kernel, 4), ("eight", copy8_kernel, 8)):
    t = lesson.traced(kernel, 1024 // (64 * each), 64, y, x).traffic("y_n", write=True)
    print(
        f"{name:6} {t.requests} requests of {t.sectors // t.requests} sectors, {t.efficiency:.0%} "
        "used per request"
    )

# %% [markdown]
# Reads do not suffer, because the cache still holds the sector when the second half is read. Writes
# do:

# %%
lesson.table(
    ["bench_lessons/copy_four/fp32", "bench_lessons/copy_eight/fp32"], {"ms": "ms", "GB/s": "value"}
)

# %% [markdown]
# The library's threads therefore handle two groups of four that are far apart.
#
# ## More exercises
#
# 1. Write `copy_kernel` with a step of one *block* instead of one grid, so that each block owns a
#    contiguous chunk. Is it coalesced? Look at `lesson.figures.traffic`.
# 2. Change the tile of 2.2 to 32 x 33 and the block to (32, 8), so that each thread moves 4
#    elements. How many lanes access the same bank now?
# 3. How many sectors does a warp touch when it reads every 3rd float32? Count by hand, then trace
#    it.
#
# <details><summary>Solutions</summary>
#
# 1: Yes. What matters is which elements the 32 lanes of a warp access at the same time, and they
# are neighbours in both versions.
#
# 2: One lane per bank, so no access has to wait. A warp is now one row of threads: it writes 32
# neighbouring words of the tile, and reads a column whose words are 33 apart, in 32 different
# banks.
#
# 3: 12. The 32 lanes span 31 · 3 + 1 = 94 elements, 376 bytes. A step of 12 bytes skips no sector,
# and 376 / 32 rounded up is 12.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Best Practices Guide*, "Coalesced Access to Global Memory" and "Shared
#   Memory": sectors, banks, padding.
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model for
#   multicore architectures*, CACM 2009.
# - V. Volkov, *Understanding latency hiding on GPUs*, 2016: Little's law, and why many bytes in
#   flight beat many threads.
# - NVIDIA H200 data sheet: 67 TFLOP/s float32, 4.8 TB/s of memory.
