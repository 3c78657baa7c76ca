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
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/02_memory.ipynb)
#
# *About 60 minutes. You need [lesson 1](01_threads.ipynb).*
#
# **The question.** Your kernel of lesson 1 did one addition for every 12 bytes that it moved. An
# H200 can do 67 million million float32 operations in a second. Your kernel reached less than one
# percent of that. Was it a bad kernel?
#
# It was not: nearly all kernels of a language model are limited by memory, not by arithmetic. This
# lesson is about what memory really does when a thread asks for an element, how to ask well, and
# how to know when there is nothing left to gain.

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
# ## What a warp asks for
#
# Three facts about the hardware explain this lesson.
#
# 1. The 32 threads of a warp execute one instruction together. A line `v = x[i]` is **one request**
#    for up to 32 elements.
# 2. Memory moves in **sectors of 32 bytes**, 8 float32. Whoever wants 4 bytes of a sector gets, and
#    pays for, all 32.
# 3. A request costs as many sectors as its 32 addresses touch. If neighbouring threads want
#    neighbouring elements, that is 32 · 4 / 32 = **4 sectors**, and every byte is used: the access
#    is *coalesced*. If the threads are 8 elements apart, it is 32 sectors, and 7 of 8 bytes are
#    moved for nothing.
#
# By hand, for an array of shape B, T, C = 2, 3, 4: 24 float32, 96 bytes, three sectors. Which
# sector does each of 6 threads touch, when they walk along a row (stride 1), and when they walk
# along the first axis of the matrix (6, 4), that is down a column (stride 4)?

# %%
B, T, C = 2, 3, 4
for name, stride in (("along a row", 1), ("down a column", C)):
    elements = [lane * stride for lane in range(6)]
    sectors = [4 * i // 32 for i in elements]
    moved = 32 * len(set(sectors))
    print(f"{name:14} elements    {elements}")
    print(f"{'':14} first bytes {[4 * i for i in elements]}")
    print(f"{'':14} sectors     {sectors}: {moved} bytes moved for 24 wanted")

# %% [markdown]
# ## The microscope counts
#
# The simplest kernel that only moves memory is a copy, `y = x`. Its reference is one line of NumPy,
# `y = x.copy()`. Here it is in three versions that differ in one thing: which element a thread
# takes.


# %% tags=["bench"]
@cuda.jit
def copy_naive_kernel(y_n, x_n):
    """Grid ceil(n / block). One element per thread, neighbours side by side."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < y_n.size:
        y_n[i] = x_n[i]


@cuda.jit
def copy_chunk_kernel(y_n, x_n):
    """Any grid. Each thread copies a stretch of its own, as people would share the work."""
    threads = cuda.gridDim.x * cuda.blockDim.x
    each = (x_n.size + threads - 1) // threads
    me = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(me * each, me * each + each):
        if i < x_n.size:
            y_n[i] = x_n[i]


@cuda.jit
def copy_odd_kernel(y_n, x_n):
    """Grid ceil(n / block). Side by side, but one element late: no warp begins on a sector."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x + 1
    if i < y_n.size:
        y_n[i] = x_n[i]


# %%
x = simulator.sim(np.arange(256, dtype=np.float32))
y = simulator.sim(np.zeros(256, np.float32))
naive = lesson.traced(copy_naive_kernel, 4, 64, y, x)
chunk = lesson.traced(copy_chunk_kernel, 1, 32, y, x)
odd = lesson.traced(copy_odd_kernel, 4, 64, y, x)
print("kernel    requests   sectors   bytes moved   bytes wanted")
for name, trace in (("naive", naive), ("chunk", chunk), ("odd", odd)):
    t = trace.traffic("x_n")
    print(f"{name:8}  {t.requests:8}   {t.sectors:7}   {t.moved:11,}   {t.wanted:12,}")

# %% [markdown]
# In the figure a row is one request, a cell is one sector; the dark part of a cell is what some
# thread wanted. First the coalesced copy, then the one in which each thread has a stretch of its
# own.

# %%
lesson.figures.traffic(naive, "x_n", requests=4)

# %%
lesson.figures.traffic(chunk, "x_n", requests=4)

# %% [markdown]
# In the second one all 32 sectors are touched at time 0, for 4 bytes each, and all of them again at
# time 1, 2, ... A cache may catch the later times, if it has room for all warps at once; asking
# well does not depend on luck. **Among people one shares work in stretches; among threads of a warp
# one deals it out like cards.**
#
# ## Exercise 2.1: deal the cards
#
# Write a copy that works with *any* grid: every thread begins at its own number and goes on in
# steps of the number of all threads until the end of the array. This is the *grid-stride loop*, and
# you will see it in many kernels.


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
# The number of all threads is `cuda.gridDim.x * cuda.blockDim.x`. `range` with a start, an end and
# a step works in a kernel.
#
# </details>


# %% tags=["solution"]
# Solution 2.1
@cuda.jit
def copy_kernel(y_n, x_n):
    """y = x.   Any grid, any block. Of T threads, thread k copies k, k + T, k + 2 T, ..."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for i in range(first, y_n.size, step):
        y_n[i] = x_n[i]


# %% [markdown]
# ## When both directions cannot be coalesced
#
# A transpose, `y[c, r] = x[r, c]`, reads rows and writes columns. Whatever a thread does, its
# neighbours are side by side on one side only:


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
print(f"reads:  {plain.traffic('x_RC').efficiency:.0%} of the bytes moved were wanted")
print(f"writes: {plain.traffic('y_CR').efficiency:.0%}")

# %% [markdown]
# The way out is shared memory, which has no sectors. A block reads a square **tile** row by row,
# coalesced; all wait; then it writes the tile column by column of the original, which is row by row
# of the result, coalesced again. Between the two, every thread holds an element that another has
# read. You know that pattern from `reverse` in lesson 1.
#
# Shared memory has a rule of its own. It is divided into 32 **banks**, word i lies in bank i % 32,
# and a bank serves one word at a time. If several lanes of a warp want *different* words of one
# bank, they queue. Down a column of a tile of 16 x 16 a step is 16 words: every second row begins
# in the same bank. By hand, the banks of the 16 elements of a column, for rows of 16 and of 17:

# %%
for width in (16, 17):
    banks = [(row * width) % 32 for row in range(16)]
    print(f"rows of {width}: {len(set(banks)):2} different banks {banks}")

# %% [markdown]
# One column more than needed (*padding*), and neighbouring rows begin in different banks.
#
# ## Exercise 2.2: a transpose through a tile


# %% tags=["exercise"]
@cuda.jit
def transpose_kernel(y_CR, x_RC):
    """y[c, r] = x[r, c], both sides coalesced.   x: (R, C)   y: (C, R)

    Grid (ceil(C / 16), ceil(R / 16)), block (16, 16): a block of threads for a tile of x.
    """
    tile = cuda.shared.array((16, 17), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    # YOUR CODE


# %%
lesson.check("2.2", transpose_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First half: `r = cuda.blockIdx.y * 16 + ty`, `c = cuda.blockIdx.x * 16 + tx`, and if that is
# inside x, `tile[ty, tx] = x_RC[r, c]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Second half: now tx runs along a row of y, so along r: `r = cuda.blockIdx.y * 16 + tx`, `c =
# cuda.blockIdx.x * 16 + ty`. Which element of the tile is x[r, c]?
#
# </details>


# %% tags=["solution"]
# Solution 2.2
@cuda.jit
def transpose_kernel(y_CR, x_RC):
    """y[c, r] = x[r, c], both sides coalesced.   x: (R, C)   y: (C, R)

    Grid (ceil(C / 16), ceil(R / 16)), block (16, 16): a block of threads for a tile of x.
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


# %%
tiled = lesson.traced(transpose_kernel, (4, 2), (16, 16), y_CR, x_RC)
for name, trace in (("naive", plain), ("through a tile", tiled)):
    t = trace.traffic()
    ways = max(trace.bank_conflicts(), default=0)
    print(f"{name:15} {t.moved:6,} bytes moved for {t.wanted:,}; lanes in one bank: {ways}")

# %% [markdown]
# A warp is two rows of this tile, and at one place two of its lanes still meet; in a tile of 32 x
# 33, where a warp is one row, none do. (And the best transpose is none at all: lesson 4 shows how
# matrix products do without.)
#
# ## Fewer, larger requests
#
# Is a coalesced copy as fast as memory can be? Not yet. A multiprocessor waits several hundred
# nanoseconds for each answer from memory, and can only hide that by having many requests *under
# way* at once. How many bytes must that be? By Little's law, bandwidth times waiting time:

# %%
add = lesson.record("bench_kernels/add/fp32")
bandwidth = add["nbytes"] / add["copy_ms"] * 1e3  # bytes per second, of a plain copy on that card
reading = bandwidth / 2  # half of a copy; nobody waits for what is written
latency = 600e-9  # seconds, a round number: an idle memory needs half of it, a busy one more
multiprocessors = 132
flight = reading * latency
print(f"{reading / 1e12:.2f} TB/s x {latency * 1e9:.0f} ns = {flight / 1e6:.1f} MB under way,")
print(f"{flight / multiprocessors / 1024:.0f} KB for each of the {multiprocessors} multiprocessors")
print(f"2048 threads with one float32 each ask for {2048 * 4 // 1024} KB")

# %% [markdown]
# So one element per thread is too little, however many threads there are: a multiprocessor takes at
# most 2048, and they never all wait at once; some compute an address, some write, some have just
# begun. xtrain's kernels keep about 25 KB under way. Two remedies, and the library uses both:
#
# - **larger accesses**: one instruction can move 16 bytes per thread, four neighbouring float32;
# - **more of them before the first wait**: load two or four groups, *then* compute.
#
# Numba has no words for a 16-byte access, so xtrain brings its own: `load4(registers, x, i)` puts
# `x[i : i + 4]` into a small array that lives in the registers of the thread, `store4(x, i,
# registers)` goes the other way. `i` must be a multiple of 4, since the hardware wants an address
# that is a multiple of 16.
#
# ## Exercise 2.3: 16 bytes at once


# %% tags=["exercise"]
@cuda.jit
def copy4_kernel(y_n, x_n):
    """y = x.   Grid ceil(n / (4 block)), any block.

    Thread k owns elements 4k, 4k + 1, 4k + 2, 4k + 3, as far as there are.
    """
    registers = cuda.local.array(4, float32)
    # YOUR CODE


# %%
lesson.check("2.3", copy4_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two cases: all four elements are inside (`i + 4 <= y_n.size`), then load4 and store4; or fewer,
# then a loop from `i` to the end.
#
# </details>


# %% tags=["solution"]
# Solution 2.3
@cuda.jit
def copy4_kernel(y_n, x_n):
    """y = x.   Grid ceil(n / (4 block)), any block.

    Thread k owns elements 4k, 4k + 1, 4k + 2, 4k + 3, as far as there are.
    """
    registers = cuda.local.array(4, float32)
    i = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i + 4 <= y_n.size:
        load4(registers, x_n, i)
        store4(y_n, i, registers)
    else:
        for j in range(i, y_n.size):
            y_n[j] = x_n[j]


# %% [markdown]
# The same bytes, a quarter of the instructions:

# %%
x, y = (simulator.sim(np.zeros(1024, np.float32)) for _ in range(2))
for name, trace in (
    ("one element", lesson.traced(copy_naive_kernel, 16, 64, y, x)),
    ("four elements", lesson.traced(copy4_kernel, 4, 64, y, x)),
):
    t = trace.traffic("x_n")
    print(
        f"{name:14} {t.requests:3} requests of {t.sectors // t.requests} sectors, {t.efficiency:.0%} wanted"
    )

# %% [markdown]
# ## Measure
#
# On a GPU the next cell times all copies of this lesson on 64 MB. The simulator counts, but it
# cannot time.

# %%
n = 1 << 24 if lesson.on_gpu() else 1 << 10
x_big = lesson.array(np.ones(n, np.float32))
y_big = lesson.empty(x_big, n)
runs = {
    "naive": lambda: lesson.launch(copy_naive_kernel, -(-n // 256), 256, y_big, x_big),
    "a stretch per thread": lambda: lesson.launch(copy_chunk_kernel, 1024, 256, y_big, x_big),
    "grid-stride": lambda: lesson.launch(copy_kernel, 1024, 256, y_big, x_big),
    "16 bytes": lambda: lesson.launch(copy4_kernel, -(-n // 1024), 256, y_big, x_big),
}
times = lesson.measure(runs, nbytes=2 * 4 * n)

# %% [markdown]
# On the machine of the records, the copies of this lesson and its transposes (4096 x 4096):

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
    {"ms": "ms", "GB/s": "value", "a copy, ms": "copy_ms"},
)

# %% [markdown]
# Cards are dealt 15 times as fast as stretches; 16 bytes at once come within 6 % of a copy; the
# tile makes the transpose 1.7 times as fast. And the library's: `add`, and the narrowing cast from
# float32 to bf16 (a float of 2 bytes, the subject of lesson 12), each with one element per thread,
# and as the library does it, with 16-byte accesses and several under way. The last column is what
# counts: the time of a plain copy of as many bytes, over the time of the kernel.

# %%
lesson.table(
    ["bench_kernels/add/fp32", "bench_kernels/cast_narrow/fp32"],
    {
        "one element, ms": "naive_ms",
        "in use, ms": "ms",
        "a copy, ms": "copy_ms",
        "copy / in use": "share",
    },
)

# %% [markdown]
# **The improvement of this lesson and its reason:** the same bytes in fewer, larger requests,
# several under way per thread. It saves a fifth of the time for `add`, and nearly half for the
# cast, whose two-byte results make even smaller requests.
#
# ## The roofline
#
# Now the question from the beginning. A kernel does some operations for each byte that it moves:
# its *arithmetic intensity*. A machine has two limits, and a kernel can be no faster than
#
# $$\text{operations per second} \le \min(\text{peak},\ \text{intensity} \cdot \text{bandwidth})$$
#
# `add` does 1 operation for 12 bytes. Drawn with both axes logarithmic, the limit looks like a
# roof. Where its two parts meet, the *ridge*, both limits bind at once: at peak over bandwidth,
# here 67 over 4.0, about 17 operations a byte. The peak is NVIDIA's number
# for float32 outside of tensor cores (units for matrix products only: lesson 14); the bandwidth and
# all points are from the records; the operations per element are counted by hand from the kernels'
# formulas.

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
    speed = intensity * r["value"] * 1e9  # GB/s, so operations per second
    points[r["name"]] = (intensity, speed)
    shares = f"{speed / PEAK:11.1%}   {speed / intensity / bandwidth:16.0%}"
    print(f"{r['name']:12} {intensity:15.3f}   {speed / 1e12:7.2f}   {shares}")

# %%
lesson.figures.roofline(
    points, bandwidth, PEAK, "float32 kernels of xtrain under the roof of one H200"
)

# %% [markdown]
# (A share slightly above 100 % is no mistake: the yardstick is one copy, of another size.) All of
# them sit on the slope, 30 to 200 times left of the ridge. For such a kernel the share of peak
# arithmetic says nothing, and the share of the copy says all. That is why xtrain's benches print a
# copy beside every one of these kernels, and why lesson 11 makes kernels faster by *moving fewer
# bytes*. To the right of the ridge there is really only one inhabitant, the matrix product; it is
# the subject of lesson 4.
#
# ## The library's kernel
#
# How xtrain lays out what you have just done, in its own words:

# %%
from xtrain.kernels.primitives import flat as _flat

print(_flat.__doc__)

# %%
lesson.source(_flat.load)

# %% [markdown]
# `whole` is your `i + 4 <= y_n.size`, and says besides that x begins at a multiple of 16 bytes. A
# slice such as `x[1:]` does not: it is read element by element.
#
# ## What did not help
#
# *Eight neighbouring float32 per thread.* If 16 bytes are good, 32 should be better. There is no
# 32-byte instruction here, so it is two of 16, and each of the two touches *half* of every sector:

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
        f"{name:6} {t.requests} requests of {t.sectors // t.requests} sectors, {t.efficiency:.0%} wanted at once"
    )

# %% [markdown]
# Reads are saved by the cache, which still holds the sector when the second half is asked for.
# Writes pay:

# %%
lesson.table(
    ["bench_lessons/copy_four/fp32", "bench_lessons/copy_eight/fp32"], {"ms": "ms", "GB/s": "value"}
)

# %% [markdown]
# The library's threads therefore hold two groups of four that lie far apart.
#
# ## More exercises
#
# 1. Write `copy_kernel` with a step of one *block* instead of one grid, each block owning a
#    stretch. Is it coalesced? Look at `lesson.figures.traffic`.
# 2. Make the tile of 2.2 32 x 33 with a block of (32, 8), each thread moving 4 elements. How many
#    lanes meet in a bank now?
# 3. How many sectors does a warp touch that reads every 3rd float32? Count by hand, then trace it.
#
# <details><summary>Solutions</summary>
#
# 1: Yes. What matters is what the 32 lanes of a warp do at one moment; they are neighbours in both.
#
# 2: One, so nobody waits. A warp is now one row of threads: it fills 32 neighbouring words, and
# reads a column, whose words lie 33 apart, in 32 different banks.
#
# 3: 32 lanes span 31 · 3 + 1 = 94 elements, 376 bytes, and a step of 12 bytes leaves no sector out:
# 376 / 32 rounded up is 12.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Best Practices Guide*, "Coalesced Access to Global Memory" and "Shared
#   Memory": sectors, banks, padding.
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model for
#   multicore architectures*, CACM 2009.
# - V. Volkov, *Understanding latency hiding on GPUs*, 2016: Little's law, and why many bytes under
#   way beat many threads.
# - NVIDIA H200 data sheet: 67 TFLOP/s float32, 4.8 TB/s of memory.
