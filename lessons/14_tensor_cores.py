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
# # 14 Tensor cores from Python
#
# *About 110 minutes. You need [lesson 4](04_matmul.ipynb) and [lesson
# 13](13_flash_attention.ipynb).*
#
# **The question.** An H200 does 67 trillion float32 operations per second outside its tensor cores;
# its tensor cores do 989 trillion in bf16. But a tensor core is not a function that a thread can
# call. It is *one instruction that the 32 threads of a warp execute together*, on operands spread
# over their registers in a pattern fixed by the hardware. How do you supply those operands, and how
# do you do it from Python?
#
# The one new idea of this lesson is that pattern, the **fragment**. Everything else (`ldmatrix`,
# swizzles, `cp.async`) serves to fill fragments fast enough.

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
import ml_dtypes
import numpy as np
from numba import cuda, float32, uint16, uint32

from xtrain import device, lesson, simulator
from xtrain.kernels.primitives.tensor_cores import (
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    ldmatrix,
    mma_bf16,
    pack_bf16,
)
from xtrain.kernels.primitives.tiles import make_chunk_offset

place64 = make_chunk_offset(64)  # for exercise 14.3; it does what you write in exercise 14.2

# %% [markdown]
# These instructions require compute capability 8.0 or later (an A100, an RTX 30). On an older GPU,
# such as Colab's T4, this lesson uses the simulator, which emulates each of them.

# %%
capable = lesson.on_gpu() and int(device.cupy().cuda.Device().compute_capability) >= 80
put = lesson.array if capable else simulator.sim

# %% [markdown]
# ## One instruction, one small product
#
# `mma_bf16(c, a, b)` computes, for a whole warp,
#
# $$C_{16 \times 8} \leftarrow C_{16 \times 8} + A_{16 \times 16} \, B_{16 \times 8}$$
#
# with A and B in bf16 and C in float32. That is 16 · 8 · 16 = 2048 multiply-adds, 64 per lane, in
# one instruction. A and B lose digits when rounded to bf16 (lesson 12); the sums do not.
#
# Which lane holds which elements? A has 256 elements, 8 per lane; two bf16 numbers share a 32-bit
# register, so `a` is an array of 4 registers. B has 128 elements, so `b` is 2 registers. C has 128
# float32 elements, so `c` is 4 registers. The PTX manual defines the layout. Write the lane number
# as 4 g + t, with g from 0 to 7 and t from 0 to 3. The lane then holds
#
# | register | rows | columns |
# |---|---|---|
# | a[0], a[1] | g, and g + 8 | 2t, 2t + 1 |
# | a[2], a[3] | g, and g + 8 | 2t + 8, 2t + 9 |
# | b[0], b[1] | 2t, 2t + 1, and 2t + 8, 2t + 9 | g |
# | c[0], c[1] | g | 2t, and 2t + 1 |
# | c[2], c[3] | g + 8 | 2t, and 2t + 1 |
#
# By hand, for lane 6 of a small example:

# %%
A = np.arange(256, dtype=np.float32).reshape(
    16, 16
)  # element (r, c) is 16 r + c, so the value tells the position
g, t = divmod(6, 4)
print(f"lane 6: g = {g}, t = {t}")
for i in range(4):
    row, column = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
    print(f"a[{i}] = A[{row}, {column}:{column + 2}] = {A[row, column : column + 2]}")

# %% [markdown]
# The next two figures show the lane that holds each element of C, and of B.

# %%
owner_C = np.array([[4 * (row % 8) + column // 2 for column in range(8)] for row in range(16)])
lesson.figures.ownership(owner_C, "C (16, 8): the lane that holds each element")

# %%
owner_B = np.array([[4 * column + row % 8 // 2 for column in range(8)] for row in range(16)])
lesson.figures.ownership(owner_B, "B (16, 8): the lane that holds each element")

# %% [markdown]
# The reference rounds as the hardware does and accumulates in float32:

# %%
BF16 = ml_dtypes.bfloat16


def mma_ref(a, b):
    """a (M, K) b (K, N), rounded to bf16 and multiplied in float32."""
    return a.astype(BF16).astype(np.float32) @ b.astype(BF16).astype(np.float32)


x = np.array([[1.0, 1.00390625, 3.14159265]], np.float32)
print("rounded to bf16:", x.astype(BF16).astype(np.float32))
print("their sum of squares:", mma_ref(x, x.T)[0, 0])

# %% [markdown]
# ## Exercise 14.1: fill the fragments
#
# One warp, one instruction. a, b and c are ordinary float32 matrices in global memory.
# `pack_bf16(x, y)` packs two numbers into one 32-bit register, the first in the lower half.


# %% tags=["exercise"]
@cuda.jit
def mma_kernel(c, a, b):
    """c (16, 8) = a (16, 16) b (16, 8), float32, with one mma by one warp.

    Grid 1, block 32.
    """
    fa, fb = cuda.local.array(4, uint32), cuda.local.array(2, uint32)
    acc = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    # YOUR CODE


# %%
lesson.check("14.1", mma_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Register i of a: row `g + 8 * (i % 2)`, columns from `2 * t + 8 * (i // 2)`. A register of b holds
# two *rows* of one column: `b[row, g]` and `b[row + 1, g]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# mma adds to acc, so initialise acc with zeros. Afterwards, register i of acc belongs to row
# `g + 8 * (i // 2)` and column `2 * t + i % 2` of c.
#
# </details>


# %% tags=["solution"]
# Solution 14.1
@cuda.jit
def mma_kernel_solution(c, a, b):
    """c (16, 8) = a (16, 16) b (16, 8), float32, with one mma by one warp.

    Grid 1, block 32.
    """
    fa, fb = cuda.local.array(4, uint32), cuda.local.array(2, uint32)
    acc = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    for i in range(4):
        row, column = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
        fa[i] = pack_bf16(a[row, column], a[row, column + 1])
        acc[i] = float32(0.0)
    for i in range(2):
        row = 2 * t + 8 * i
        fb[i] = pack_bf16(b[row, g], b[row + 1, g])
    mma_bf16(acc, fa, fb)
    for i in range(4):
        c[g + 8 * (i // 2), 2 * t + i % 2] = acc[i]


mma_kernel = lesson.yours(mma_kernel, mma_kernel_solution)


# %% [markdown]
# How can a Python function contain such an instruction? Numba compiles a kernel through LLVM and
# lets the library define an *intrinsic*: a function that emits its own code, here a wrapper around
# one line of assembly. `$0` to `$13` are its registers: four results, then the operands a, b and c:

# %%
from xtrain.kernels.primitives import tensor_cores as _tensor_cores

lesson.source(_tensor_cores.mma_bf16)

# %% [markdown]
# ## ldmatrix: fragments from shared memory
#
# Filling fragments element by element, as you did, takes 12 loads of 4 bytes per mma. `ldmatrix`
# fills them for a whole warp at once. It reads four 8 x 8 matrices of bf16 from shared memory. A
# row of such a matrix is 8 · 2 = 16 bytes, a **chunk**. Each lane supplies the address of one
# chunk: lane 8 m + r that of row r of matrix m. Lane 4 g + t then receives, in register m, the
# elements 2t and 2t + 1 of row g of matrix m: exactly a fragment.
#
# For A, 16 x 16, the four matrices are in the order of A's registers: rows 0 to 7 of chunk 0, rows
# 8 to 15 of chunk 0, then the same rows of chunk 1. So lane l supplies the address of row l % 16,
# chunk l // 16. For B the layout fits even better. Scores are q k^T, so B is the transpose of k.
# The pair that lane 4 g + t needs, two rows of column g of B, is two neighbouring *columns* of row
# g of k. The same instruction loads it, without a transpose.
#
# ## The banks again
#
# Shared memory serves 32 banks of 4 bytes at a time ([lesson 2](02_memory.ipynb)). That is 128
# bytes or 8 chunks, provided that they lie at 8 different positions modulo 128 bytes. A head of
# width 64 has rows of 128 bytes, so chunk 0 of every row lies at the same position modulo 128, and
# the 8 rows of one matrix are read one after another. By hand:

# %%
print("bank group (of 8) of chunk 0 in rows 0 to 7")
for width, name in ((128, "rows of 128 bytes"), (144, "rows of 144 bytes (padded)")):
    print(f"  {name:27} {[width * row // 16 % 8 for row in range(8)]}")

# %% [markdown]
# Padding avoids these bank conflicts, as in [lesson 2](02_memory.ipynb), but uses an eighth more
# memory. A **swizzle** uses no extra memory: it leaves the rows in place and permutes the chunks
# *within* each row, differently from row to row.
#
# ## Exercise 14.2: a swizzle
#
# At which element of the tile should chunk `chunk` (0 to 7) of row `row` begin? A row has 64
# elements, a chunk 8. Every chunk stays in its row, no two chunks share a position, and each chunk
# of rows 0 to 7 (and of rows 8 to 15) lies in 8 different bank groups.


# %% tags=["exercise"]
def place(row, chunk):
    """-> the element of the tile at which this chunk begins; rows of 64 elements, chunks of 8."""
    # YOUR CODE


# %%
lesson.check("14.2", place)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The bank group is the position within the row, 0 to 7. It must depend on the row. Which operation
# on two numbers from 0 to 7 gives every result exactly once while one of the two runs from 0 to 7?
#
# </details>


# %% tags=["solution"]
# Solution 14.2. (chunk + row) % 8 would also work; exclusive-or needs no remainder.
def place_solution(row, chunk):
    """-> the element of the tile at which this chunk begins; rows of 64 elements, chunks of 8."""
    return row * 64 + (chunk ^ (row % 8)) * 8


place = lesson.yours(place, place_solution)


# %%
print("the chunks in memory order, rows 0 to 3:")
for row in range(4):
    print(f"  row {row}: " + " ".join(f"c{chunk ^ (row % 8)}" for chunk in range(8)))

# %% [markdown]
# The simulator rejects an ldmatrix with bank conflicts. Its result would be correct, only slow; but
# in a tile designed for speed, a conflict is a mistake.
#
# ## cp.async: copies that bypass the registers
#
# How do q and k get into shared memory? A thread could load 16 bytes into registers and store them.
# `cp_async16(smem, i, x, j, valid)` needs no registers and does not wait. It copies 16 bytes from
# the flat array x, starting at element j, to shared memory, starting at element i (or writes zeros,
# if not valid). The call only *starts* the copy, and the thread continues. `cp_async_commit()` closes
# a group of copies; `cp_async_wait(n)` waits until at most n of this thread's groups are still in
# flight. Data copied by *other* threads is visible only after a barrier that follows their wait.
#
# ## Exercise 14.3: put it together
#
# A block of one warp computes 16 rows of scores, s = a b^T, for a (M, 64) and b (16, 64) in bf16.
# Copy both tiles into shared memory, swizzled by `place64(row, chunk)` (a library function
# equivalent to your 14.2). Then loop over four steps of 16 columns each: one ldmatrix for a, one
# for b, which loads *two* right operands, and two mma.
#
# The arrays are flat here: element (r, c) of a is `a[r * 64 + c]`. The third argument of
# `ldmatrix(registers, smem, i, 0, 0)` is the position i of this lane's chunk. (The two zeros are
# offsets that the library uses in address arithmetic.)


# %% tags=["exercise"]
@cuda.jit
def scores_kernel(s, a, b):
    """s (M, 16) = a (M, 64) b^T, b (16, 64), all flat.

    a, b: bf16 (16-bit integers to the kernel), s: float32. Block i computes rows 16 i,
    ..., 16 i + 15.
    Grid M / 16, block 32.
    """
    smem = cuda.shared.array(2 * 16 * 64, uint16)  # 16 rows of a, followed by those of b
    fa, fb = cuda.local.array(4, uint32), cuda.local.array((2, 2), uint32)
    acc = cuda.local.array((2, 4), float32)  # columns 0 to 7, columns 8 to 15
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * 16
    # YOUR CODE


# %%
lesson.check("14.3", scores_kernel)

# %% [markdown]
# <details><summary>Hint 1: the copy</summary>
#
# A tile has 16 · 8 = 128 chunks, 4 per lane:
# `for i in range(4): row, chunk = (32 * i + lane) // 8, lane % 8`. Then `cp_async16(smem,
# place64(row, chunk), a, (first + row) * 64 + 8 * chunk, True)`; b goes to `1024 + place64(row,
# chunk)`. Then commit, wait for all groups (0), and use a barrier.
#
# </details>
# <details><summary>Hint 2: the operands</summary>
#
# Step k uses chunks 2k and 2k + 1. a: row `lane & 15`, chunk `2 * k + (lane >> 4)`. b: its four
# matrices must be (rows 0 to 7, chunk 2k), (0 to 7, 2k + 1), (8 to 15, 2k), (8 to 15, 2k + 1), so
# that `fb[0]` is the operand for columns 0 to 7 of s: row `(lane & 7) + 8 * (lane >> 4)`, chunk
# `2 * k + ((lane >> 3) & 1)`.
#
# </details>
# <details><summary>Hint 3: the result</summary>
#
# Call `mma_bf16(acc[0], fa, fb[0])` and `mma_bf16(acc[1], fa, fb[1])`. Register j of acc[n] belongs
# to row `lane // 4 + 8 * (j // 2)`, column `8 * n + 2 * (lane % 4) + j % 2`.
#
# </details>


# %% tags=["solution"]
# Solution 14.3
@cuda.jit
def scores_kernel_solution(s, a, b):
    """s (M, 16) = a (M, 64) b^T, b (16, 64), all flat.

    a, b: bf16 (16-bit integers to the kernel), s: float32. Block i computes rows 16 i,
    ..., 16 i + 15.
    Grid M / 16, block 32.
    """
    smem = cuda.shared.array(2 * 16 * 64, uint16)  # 16 rows of a, followed by those of b
    fa, fb = cuda.local.array(4, uint32), cuda.local.array((2, 2), uint32)
    acc = cuda.local.array((2, 4), float32)  # columns 0 to 7, columns 8 to 15
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * 16
    for i in range(4):
        row, chunk = (32 * i + lane) // 8, lane % 8
        cp_async16(smem, place64(row, chunk), a, (first + row) * 64 + 8 * chunk, True)
        cp_async16(smem, 1024 + place64(row, chunk), b, row * 64 + 8 * chunk, True)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    for n in range(2):
        for j in range(4):
            acc[n, j] = float32(0.0)
    for k in range(4):
        left = place64(lane & 15, 2 * k + (lane >> 4))
        right = place64((lane & 7) + 8 * (lane >> 4), 2 * k + ((lane >> 3) & 1))
        ldmatrix(fa, smem, left, 0, 0)
        ldmatrix(fb, smem, 1024 + right, 0, 0)
        mma_bf16(acc[0], fa, fb[0])
        mma_bf16(acc[1], fa, fb[1])
    for n in range(2):
        for j in range(4):
            row, column = lane // 4 + 8 * (j // 2), 8 * n + 2 * (lane % 4) + j % 2
            s[(first + row) * 16 + column] = acc[n, j]


scores_kernel = lesson.yours(scores_kernel, scores_kernel_solution)


# %%
random = np.random.default_rng(0)
a = random.standard_normal((32, 64)).astype(BF16)
b = random.standard_normal((16, 64)).astype(BF16)
a_here, b_here = put(a).reshape(-1), put(b).reshape(-1)
s_here = put(np.zeros(32 * 16, np.float32))
lesson.launch(scores_kernel, 2, 32, s_here, a_here, b_here)
s = lesson.host(s_here).reshape(32, 16)
print("matches the reference to 1e-4:", np.allclose(s, mma_ref(a, b.T), atol=1e-4))

# %% [markdown]
# ## What the simulator finds
#
# Without `cp_async_wait`, the data may or may not have arrived. The simulator treats an element as
# never written until a wait covers its copy. The second kernel below lays out its rows without a
# swizzle:


# %%
@cuda.jit
def hasty_kernel(s, a):
    smem = cuda.shared.array(256, uint16)
    cp_async16(smem, 8 * cuda.threadIdx.x, a, 8 * cuda.threadIdx.x, True)
    cp_async_commit()
    cuda.syncthreads()  # a barrier alone does not wait for copies
    s[cuda.threadIdx.x] = smem[cuda.threadIdx.x]


@cuda.jit
def straight_kernel(s, a):
    smem = cuda.shared.array(1024, uint16)
    fa = cuda.local.array(4, uint32)
    for i in range(4):
        chunk = 32 * i + cuda.threadIdx.x
        cp_async16(smem, 8 * chunk, a, 8 * chunk, True)  # no swizzle: plain row order
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    ldmatrix(fa, smem, (cuda.threadIdx.x & 15) * 64 + 8 * (cuda.threadIdx.x >> 4), 0, 0)


bits = simulator.sim(a.view(np.uint16).reshape(-1))
s_sim = simulator.sim(np.zeros(512, np.float32))
lesson.report(simulator.run, hasty_kernel, 1, 32, s_sim, bits)
lesson.report(simulator.run, straight_kernel, 1, 32, s_sim, bits)

# %% [markdown]
# Where the hasty kernel goes wrong: the threads have started their copies and met at the barrier, and
# the first read finds shared memory that no copy has filled yet.

# %%
lesson.stepped(hasty_kernel, 1, 32, s_sim, bits)

# %% [markdown]
# ## Measure
#
# How many instructions does a warp issue for a 16 x 16 block of scores with 64 columns? With
# ordinary multiply-adds, each lane owns 8 of the 256 scores and needs 64 instructions for each.
# Compare with tensor cores:

# %%
scores, columns = 16 * 16, 64
ordinary = scores // 32 * columns
mma = 2 * columns // 16
print(f"multiply-adds: {ordinary} instructions per warp")
print(f"tensor cores:  {mma} mma and {2 * columns // 16} ldmatrix")

# %% [markdown]
# On a GPU, the next cell times your kernel on a million rows. Each block copies b again and uses it
# only once, and the kernel writes 4 bytes for every 2 · 64 operations: it is bound by memory and
# cannot come near the peak.

# %%
M = 1 << 20 if capable else 32
a_big = put(np.ones((M, 64), BF16)).reshape(-1)
s_big = lesson.empty(a_big, M * 16, np.float32)
if capable:
    times = lesson.measure(
        {"yours": lambda: lesson.launch(scores_kernel, M // 16, 32, s_big, a_big, b_here)},
        nbytes=M * (64 * 2 + 16 * 4), flops=2 * M * 16 * 64,
    )  # fmt: skip
else:
    print("There is no GPU with these instructions here, so nothing is timed.")

# %% [markdown]
# What do the library's attention kernels reach with these instructions? The table shows increasing
# sequence lengths (16 heads of width 128, forward, causal):

# %%
runs = [
    "bench_attention/sweep fwd/B=128 H=16 G=16 T=256 D=128/bf16",
    "bench_attention/sweep fwd/B=32 H=16 G=16 T=1024 D=128/bf16",
    "bench_attention/sweep fwd/B=8 H=16 G=16 T=4096 D=128/bf16",
]
PEAK_BF16, PEAK_FP32 = 989e12, 67e12  # operations per second, H200 data sheet


def rate(r):
    """TFLOP/s of this lesson's kernels. `value` is for the kernels in use, which may be
    lesson 23's.
    """
    return r.get("mma_sync_value", r["value"])


lesson.table(
    runs,
    {
        "T": lambda r: r["shape"].split("T=")[1].split()[0],
        "TFLOP/s": rate,
        "of the bf16 peak": lambda r: f"{rate(r) * 1e12 / PEAK_BF16:.0%}",
        "of the fp32 peak": lambda r: f"{rate(r) * 1e12 / PEAK_FP32:.0%}",
    },
)

# %% [markdown]
# ## One improvement: prefetch the next tile
#
# In your kernel, the warp waits for its tiles, multiplies, and ends. A FlashAttention block loops
# over many tiles of keys. If it waited for each one, copying and multiplying would alternate. With
# `cp.async` and buffers for **two** tiles, it starts the copy of the next tile and then works on
# the current one:

# %%
one = []
for i in range(3):
    one += [(4 * i, 4 * i + 2, "copy"), (4 * i + 2, 4 * i + 4, "multiply")]
two_copy = [(0, 2, "copy"), (2, 4, "copy"), (4, 6, "copy")]
two_multiply = [(2, 4, "multiply"), (4, 6, "multiply"), (6, 8, "multiply")]
lesson.figures.timeline(
    {"one tile": one, "two: copies": two_copy, "two: warps": two_multiply},
    "three tiles of keys, with one buffer and with two",
)

# %% [markdown]
# **The reason:** a copy uses the memory system and a product uses the tensor cores, so they can
# overlap. In this figure, the time falls from 12 units to 8; for many tiles it approaches one half,
# if both take equally long. A second improvement costs nothing: the accumulator of one mma can
# serve as a left operand of the next. Compare the layout of two C tiles side by side with that of
# A:

# %%
owner_A = np.array([[4 * (r % 8) + c % 8 // 2 for c in range(16)] for r in range(16)])
side_by_side = np.hstack([owner_C, owner_C])
print("A's layout is that of two C tiles side by side:", np.array_equal(owner_A, side_by_side))

# %% [markdown]
# So in attention, the scores become weights in the registers that hold them, are rounded to bf16 in
# pairs, and are multiplied by v without ever leaving the lane. This needs no shared memory and no
# barrier.
#
# ## The library's kernel
#
# Here is your `place`, for heads of any width. At widths 16 and 32, 128 bytes hold four or two
# rows, so the row number is shifted first:

# %%
from xtrain.kernels.attention import flash_attention_bf16
from xtrain.kernels.primitives import tiles as _tiles

lesson.source(_tiles.make_chunk_offset)

# %% [markdown]
# Here is your 14.3, with any number of 16-row tiles (MT) and 8-column tiles (NT). `flip` is 16 k:
# moving two chunks ahead is an exclusive-or with a constant, so one address serves all steps.

# %%
lesson.source(_tiles.make_scores)

# %% [markdown]
# An accumulator becomes a left operand here:

# %%
lesson.source(_tiles.make_pack)

# %% [markdown]
# And here is the loop of the FlashAttention forward, with its two buffers (stages), `now` and
# `other`. It is your [lesson 13](13_flash_attention.ipynb), tile by tile:

# %%
lesson.source(flash_attention_bf16.make_fwd_kernel, part="while n0 + BN > begin")

# %% [markdown]
# Each iteration has one `cp_async_wait(0)`, and the next copy starts right after the barrier. The
# same barrier guarantees that all threads have finished reading the stage that is now overwritten.
#
# ## What did not help
#
# *Sixteen rows per warp.* The shared memory of a multiprocessor delivers 128 bytes per clock. Its
# tensor cores can do one 16 x 8 x 16 product per clock: 989 trillion operations per second, over
# 132 multiprocessors and some 1.83 GHz, are 2048 multiply-adds per clock. Now compare the clocks of
# one ldmatrix (512 bytes) of the right operand with those of the products that use it:

# %%
rate = 989e12 / 2 / 132 / 1.83e9
print(f"multiply-adds per clock and multiprocessor: {rate:.0f}, so {rate / 2048:.1f} mma")
for MT in (1, 2, 4):
    reading, multiplying = 512 / 128, 2 * MT * 2048 / rate
    print(f"{16 * MT:2} rows per warp: reading {reading:.0f} clocks, multiplying {multiplying:.1f}")

# %% [markdown]
# With 16 rows, the tensor cores are idle half of the time, however well the rest is written. The
# tuned tables use 32 rows per warp almost everywhere (BM divided by the number of warps):

# %%
from xtrain.kernels.attention.flash_attention_table import TABLE

for D in (32, 64, 128):
    tiles = TABLE["fwd", D, True].values()
    each = [f"{t.BM} queries / {t.warps} warps = {t.BM // t.warps}" for t in tiles]
    print(f"D = {D:3}: " + ", ".join(each))

# %% [markdown]
# At D = 32 and short sequences, 16 rows win nevertheless: more and smaller blocks distribute the
# work more evenly over the multiprocessors. The tables are measured, not derived;
# `bench/tune_flash_attention.py` writes this one.
#
# *Padding instead of a swizzle.* It avoids bank conflicts equally well and is simpler. But it needs an eighth more
# shared memory at width 64, and Hopper's engine for copying tiles, TMA ([lesson 23](23_hopper.ipynb)), writes them in
# exactly this swizzle.
#
# ## More exercises
#
# 1. Change 14.1 so that it computes c = a^T b. Which fragments change, and how?
# 2. `ldmatrix_trans` returns the transposed matrices. Which product of attention needs it, and why
#    does the other not need it?
# 3. How many bytes of shared memory does a forward block use with (BM, BN) = (128, 64), D = 64: Q,
#    and two stages of K and V? How many such blocks fit into the 227 KB of a multiprocessor?
#
# <details><summary>Solutions</summary>
#
# 1: Only fa: register i is `pack_bf16(a[column, row], a[column + 1, row])`. 2: p v. A register of
# the right operand holds two rows of one column of v, but v is stored row by row, so the 8 x 8
# matrices have to be transposed when loaded. In q k^T the right operand is k^T, so the pair is
# contiguous in k. 3: 2 · 64 · (128 + 4 · 64) = 49,152 bytes; four blocks fit by shared memory. (The
# table specifies two: with four, a lane would have 65,536 / 512 = 128 registers, and its scores,
# sums and share of Q alone take 64 + 64 + 32.)
#
# </details>
#
# ## Sources
#
# - NVIDIA, *PTX ISA*, sections "Matrix Fragments for mma.m16n8k16 with floating point type",
#   "ldmatrix", "cp.async".
# - NVIDIA, *CUTLASS* documentation: "Efficient GEMM in CUDA" on two stages; "CUTLASS Convolution",
#   section "Shared Memory Layouts", on ldmatrix and the swizzle.
# - T. Dao, *FlashAttention-2*, 2023: the loop order, and why warps split queries and not keys.
# - NVIDIA H200 data sheet: 989 TFLOP/s bf16 (dense), 67 TFLOP/s float32.
