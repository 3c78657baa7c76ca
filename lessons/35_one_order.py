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
# # 35 One order of summation, two schedules
#
# *About 90 minutes. You need [lesson 14](14_tensor_cores.ipynb), [lesson 19](19_decode_attention.ipynb) and
# [lesson 26](26_policy_gradients.ipynb).*
#
# **The question.** Training computes thousands of rows at once, a server computes one row for each of its sequences.
# Both multiply the same numbers, and yet the last bits of a row usually differ. [Lesson 26](26_policy_gradients.ipynb)
# showed what equal bits are good for, and what they may cost: in its record a step takes 1.74 times as long. Can a
# kernel for one row be fast *and* add in the order of a kernel for 8192 rows?
#
# It can, if we separate two things: the **order** of the additions, which decides the bits, and the **schedule**, which
# thread adds what and when. You will write a product and an attention in which two schedules have one order, find the
# products whose bits depend on the number of rows, and write the check that xtrain runs on your machine.

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
import math

import numpy as np
from numba import cuda, float32, uint32

from xtrain import lesson, simulator
from xtrain.kernels.primitives.tensor_cores import mma_bf16, pack_bf16

FULL = 0xFFFFFFFF  # all 32 lanes of a warp
CHUNK = 16  # columns of a chunk of K; keys of a chunk
D = 16  # channels of a head


@cuda.jit(device=True)
def chunk_sums(q_D, k_SD, v_SD, first, last):
    """-> m, l, acc of the keys first, ..., last - 1, at least one and at most CHUNK.

    m: the largest score. l: the sum of exp(score - m). acc: of this thread's channel, the sum of
    exp(score - m) times the value. Called by all threads of a block of D = 16; m and l are the same
    in all of them.
    """
    score = cuda.shared.array(CHUNK, float32)
    t = cuda.threadIdx.x
    cuda.syncthreads()  # the scores of an earlier call have been read
    if first + t < last:
        s = float32(0.0)
        for d in range(D):
            s += q_D[d] * k_SD[first + t, d]
        score[t] = s * float32(0.25)  # 1 / sqrt(D)
    cuda.syncthreads()
    m = score[0]
    for j in range(1, last - first):
        m = max(m, score[j])
    l, acc = float32(0.0), float32(0.0)
    for j in range(last - first):
        p = math.exp(score[j] - m)
        l += p
        acc += p * v_SD[first + j, t]
    return m, l, acc


# %% [markdown]
# ## Why sums differ
#
# A float32 has 24 significant bits, and every addition rounds to them. Above $2^{24} = 16777216$ it can represent only
# even numbers:

# %%
big, one = np.float32(2**24), np.float32(1)
print("(big + 1) + 1 =", int((big + one) + one))
print("big + (1 + 1) =", int(big + (one + one)))

# %% [markdown]
# So the terms alone do not determine a sum. Its *tree* does: which two numbers are added first, which next. Two programs
# with the same tree give the same bits, whichever threads compute it. Two with different trees usually do not.
#
# Why would the tree of a product depend on the number of rows? Because all multiprocessors of a GPU should have work. A
# product y = x w^T of 8192 rows has thousands of tiles; one block each is enough. A product of one row has a few tiles,
# and 132 multiprocessors wait for blocks. The usual remedy is **split-K**: several blocks share one sum, each with a
# part of K. Here is a product that does this. What does row 0 look like, alone and among others?

# %%
products = lesson.row_products
lesson.source(products.part_kernel)
lesson.source(products.add_parts_kernel)
lesson.source(products.filled)

# %%
rng = np.random.default_rng(0)
x = rng.normal(size=(8, 64)).astype(np.float32)
w = rng.normal(size=(6, 64)).astype(np.float32)


def run(product, x_NK):
    """y (N, O) of one of the products of row_products.py"""
    y = lesson.array(np.zeros((len(x_NK), len(w)), np.float32))
    product(y, lesson.array(x_NK), lesson.array(w))
    return lesson.host(y)


alone = run(products.filled, x[:1])[0]
for N in (1, 2, 4, 8):
    row = run(products.filled, x[:N])[0]
    print(
        f"row 0 of {N}: y[0] = {row[0]:.8f}   {(row != alone).sum()} of 6 elements have other bits"
    )

# %% [markdown]
# No number is wrong: each is correct to rounding. But a token that is drawn from such logits, its log-probability, and
# everything computed from it depend on the rest of the batch.
#
# The remedy is *not* to give up the parts. It is to let the parts depend on K alone. Then one thread may compute them one
# after the other, or many threads at the same time:
#
# | | fixed: the order | free: the schedule |
# |---|---|---|
# | product | K in chunks of 16 columns; a chunk's sum begins at 0; the sums of the chunks are added in order | which thread adds which chunk, and when |
# | attention | keys in chunks of 16; each has its own maximum and sums; these are merged in order | which block computes which chunk |
#
# ## One order, many rows
#
# With many rows there are enough elements: a thread has one, and walks along all of K.


# %%
@cuda.jit
def many_rows_kernel(y_NO, x_NK, w_OK):
    """y = x w^T. Grid ceil(N O / 64), block 64: a thread per element."""
    i = cuda.grid(1)
    K, O = x_NK.shape[1], y_NO.shape[1]
    if i < y_NO.size:
        total = float32(0.0)
        for first in range(0, K, CHUNK):
            part = float32(0.0)
            for k in range(first, min(first + CHUNK, K)):
                part += x_NK[i // O, k] * w_OK[i % O, k]
            total += part
        y_NO[i // O, i % O] = total


# %% [markdown]
# With one row a thread per element is too few threads, and each of them waits for K loads. A *warp* per element has 32
# times as many, and 32 chunks can be summed at the same time. Which lane owns which column, for K = 100 and a first
# pass over 32 chunks?

# %%
owner = np.arange(112).reshape(7, 16) // CHUNK
owner[6, 4:] = -1  # beyond K = 100
title = "K = 100: the lane that adds each column"
lesson.figures.ownership(owner, title, width=lesson.figures.NARROW)

# %% [markdown]
# Lanes 7 to 31 have nothing to do here: at K = 4096 all are busy, and each has 8 chunks. The last step, adding the sums of
# the chunks, must have the order of the walk. A butterfly of shuffles ([lesson 3](03_reductions.ipynb)) is another tree.
#
# ## Exercise 35.1: the same bits for few rows


# %% tags=["exercise"]
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    """y (N, O) = x (N, K) w (O, K)^T, float32. Grid (O, N), block 32: a warp per element.

    The order: the sum of chunk c, columns 16 c, ..., 16 c + 15 below K, begins at 0 and adds its
    products in ascending order. y begins at 0 and adds the sums of all chunks in ascending order.
    The lanes sum different chunks at the same time.
    """
    # YOUR CODE


# %%
lesson.check("35.1", few_rows_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In a pass over 32 chunks lane l sums chunk l: `for first in range(0, K, 32 * CHUNK)`, its columns begin at
# `first + lane * CHUNK` and end before `min(begin + CHUNK, K)`. A lane without columns has the sum 0.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Then `for l in range(32): total += cuda.shfl_sync(FULL, part, l)`, in every lane, after each pass. (Or the lanes write
# their sums to shared memory, and lane 0 adds them.) Lane 0 writes y.
#
# </details>


# %% tags=["solution"]
# Solution 35.1
@cuda.jit
def few_rows_kernel_solution(y_NO, x_NK, w_OK):
    """y (N, O) = x (N, K) w (O, K)^T, float32. Grid (O, N), block 32: a warp per element.

    The order: the sum of chunk c, columns 16 c, ..., 16 c + 15 below K, begins at 0 and adds its
    products in ascending order. y begins at 0 and adds the sums of all chunks in ascending order.
    The lanes sum different chunks at the same time.
    """
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    total = float32(0.0)
    for first in range(0, K, 32 * CHUNK):
        begin = first + lane * CHUNK
        part = float32(0.0)
        for k in range(begin, min(begin + CHUNK, K)):
            part += x_NK[n, k] * w_OK[o, k]
        for l in range(32):
            total += cuda.shfl_sync(FULL, part, l)
    if lane == 0:
        y_NO[n, o] = total


few_rows_kernel = lesson.yours(few_rows_kernel, few_rows_kernel_solution)


# %%
def many(y, x, w):
    lesson.launch(many_rows_kernel, -(-y.size // 64), 64, y, x, w)


def few(y, x, w):
    lesson.launch(few_rows_kernel, y.shape[::-1], 32, y, x, w)


for N in (1, 3, 8):
    equal = np.array_equal(run(many, x)[:N], run(few, x[:N]))
    print(f"{N} rows by warps, the same bits as of 8 rows by threads: {equal}")

# %% [markdown]
# ## A chain of tensor-core instructions
#
# A bf16 product uses tensor cores. One `mma` adds 16 products to an element of its accumulator. In which order,
# and how it rounds in between, NVIDIA does not document (Fasi et al. have measured it); but it is the same for every
# element and in every call. So an instruction is a chunk of 16 columns that comes with its own order, and the chain
#
# $$acc \leftarrow \mathrm{mma}(acc,\ x_{0..15},\ w_{0..15}) \quad acc \leftarrow \mathrm{mma}(acc,\ x_{16..31},\ w_{16..31}) \quad \dots$$
#
# has one order in every kernel that computes it. Two schedules: many rows of x as the left operand (16 x 16), or, if there are few,
# rows of *w* on the left and up to 8 rows of x on the right (16 x 8), so that no product of a tile is wasted.


# %%
@cuda.jit(device=True)
def number(x_NK, n, k):
    """0 beyond the last row."""
    return x_NK[n, k] if n < x_NK.shape[0] else float32(0.0)


@cuda.jit(device=True)
def chain(acc, a_MK, m, b_NK, n):
    """acc: rows m, ..., m + 15 of a times rows n, ..., n + 7 of b, along all of K in order."""
    fa, fb = cuda.local.array(4, uint32), cuda.local.array(2, uint32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    for i in range(4):
        acc[i] = float32(0.0)
    for first in range(0, a_MK.shape[1], 16):
        for i in range(4):
            row, k = m + g + 8 * (i % 2), first + 2 * t + 8 * (i // 2)
            fa[i] = pack_bf16(number(a_MK, row, k), number(a_MK, row, k + 1))
        for i in range(2):
            k = first + 2 * t + 8 * i
            fb[i] = pack_bf16(number(b_NK, n + g, k), number(b_NK, n + g, k + 1))
        mma_bf16(acc, fa, fb)


@cuda.jit
def chain_many_kernel(y_NO, x_NK, w_OK):
    """Grid (O / 8, ceil(N / 16)), block 32: 16 rows of x on the left."""
    acc = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    n, o = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    chain(acc, x_NK, n, w_OK, o)
    for i in range(4):
        if n + g + 8 * (i // 2) < y_NO.shape[0]:
            y_NO[n + g + 8 * (i // 2), o + 2 * t + i % 2] = acc[i]


@cuda.jit
def chain_few_kernel(y_NO, x_NK, w_OK):
    """Grid O / 16, block 32: at most 8 rows of x, on the right."""
    acc = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    o = 16 * cuda.blockIdx.x
    chain(acc, w_OK, o, x_NK, 0)
    for i in range(4):
        if 2 * t + i % 2 < y_NO.shape[0]:
            y_NO[2 * t + i % 2, o + g + 8 * (i // 2)] = acc[i]


def chained(kernel, grid, x_NK, w_OK):
    y = simulator.sim(np.zeros((len(x_NK), len(w_OK)), np.float32))
    simulator.run(kernel, grid, 32, y, simulator.sim(x_NK), simulator.sim(w_OK))
    return np.array(y)


x_20, w_32 = (rng.normal(size=(n, 64)).astype(np.float32) for n in (20, 32))
y_20 = chained(chain_many_kernel, (4, 2), x_20, w_32)
for N in (1, 5, 8):
    y = chained(chain_few_kernel, 2, x_20[:N], w_32)
    print(f"{N} rows on the right: the bits of 20 rows on the left: {np.array_equal(y, y_20[:N])}")

# %% [markdown]
# The simulator adds the 16 products in its own way, so this shows that the two kernels are right, not what a GPU
# does. What a GPU does was compared on an H200, and is compared again on yours: see below.
#
# A chain has a price: it cannot be divided. K / 16 instructions wait for each other, however many multiprocessors are
# idle. With one row that is what a step waits for.
#
# ## Attention: chunks that are merged in order
#
# A prompt's attention is computed by blocks that walk along the keys. For one new token the keys are split, and the parts
# are merged: [lesson 19](19_decode_attention.ipynb). Its merge rescales all parts to the largest maximum of all:
#
# $$M = \max_c m_c \qquad l = \sum_c e^{m_c - M}\, l_c$$
#
# A block that walks does not know M before the end. So fix another order, which both can have. The chunks are 16 keys,
# wherever the walk begins and however many blocks there are. Each has its **own** m, l and acc, as if it were alone. And
# they are merged one after the other:
#
# $$m' = \max(m, m_c) \qquad l' = l\, e^{m - m'} + l_c\, e^{m_c - m'} \qquad acc' = acc\, e^{m - m'} + acc_c\, e^{m_c - m'}$$
#
# By hand, for three chunks with the sums l = 1.5, 1.2 and 1.9 and rising maxima. Both ways are right, and their bits differ:


# %%
def exp(v):
    return np.float32(math.exp(v))


m_C, l_C = np.array([0.3, 0.8, 1.1], np.float32), np.array([1.5, 1.2, 1.9], np.float32)
m, l = m_C[0], l_C[0]
print(f"chunk 0: m {m:.1f}   l {l:.8f}")
for c in (1, 2):
    new = max(m, m_C[c])
    l = l * exp(m - new) + l_C[c] * exp(m_C[c] - new)
    m = new
    print(f"chunk {c}: m {m:.1f}   l {l:.8f}")
M = m_C.max()
at_once = np.float32(0)
for c in range(3):
    at_once += l_C[c] * exp(m_C[c] - M)
print(f"at once: M {M:.1f}   l {at_once:.8f}")

# %% [markdown]
# The given kernel computes the chunks, one block for each. `chunk_sums` is in the cell of the imports at the top. Blocks
# of chunks that a sequence does not have do nothing.


# %%
@cuda.jit
def chunk_kernel(m_BC, l_BC, acc_BCD, q_BD, k_BSD, v_BSD, length_B):
    """m, l, acc of chunk c of sequence b. Grid (C, B), block D = 16."""
    c, b, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    first = c * CHUNK
    last = min(first + CHUNK, length_B[b])
    if first < last:  # the same in all threads of the block
        m, l, acc = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], first, last)
        acc_BCD[b, c, d] = acc
        if d == 0:
            m_BC[b, c] = m
            l_BC[b, c] = l


# %% [markdown]
# ## Exercise 35.2: the merge


# %% tags=["exercise"]
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    """o[b] = acc / l of all chunks of sequence b, merged in order. Grid B, block D = 16.

    m, l, acc begin as those of chunk 0. Chunks 1, 2, ... are merged one after the other:
        m' = max(m, m_c)    l' = l exp(m - m') + l_c exp(m_c - m')    acc' as l'
    A sequence has ceil(length / 16) chunks, length >= 1. The memory of other chunks holds anything.
    """
    # YOUR CODE


# %%
lesson.check("35.2", merge_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Thread d has `m`, `l` and `acc` of its channel in registers, at first those of chunk 0. The number of chunks is
# `(length_B[b] + CHUNK - 1) // CHUNK`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the loop: `new = max(m, m_BC[b, c])`, `keep = math.exp(m - new)`, `add = math.exp(m_BC[b, c] - new)`. After the loop
# `o_BD[b, d] = acc / l`.
#
# </details>


# %% tags=["solution"]
# Solution 35.2
@cuda.jit
def merge_kernel_solution(o_BD, m_BC, l_BC, acc_BCD, length_B):
    """o[b] = acc / l of all chunks of sequence b, merged in order. Grid B, block D = 16.

    m, l, acc begin as those of chunk 0. Chunks 1, 2, ... are merged one after the other:
        m' = max(m, m_c)    l' = l exp(m - m') + l_c exp(m_c - m')    acc' as l'
    A sequence has ceil(length / 16) chunks, length >= 1. The memory of other chunks holds anything.
    """
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l, acc = m_BC[b, 0], l_BC[b, 0], acc_BCD[b, 0, d]
    for c in range(1, (length_B[b] + CHUNK - 1) // CHUNK):
        new = max(m, m_BC[b, c])
        keep, add = math.exp(m - new), math.exp(m_BC[b, c] - new)
        l = l * keep + l_BC[b, c] * add
        acc = acc * keep + acc_BCD[b, c, d] * add
        m = new
    o_BD[b, d] = acc / l


merge_kernel = lesson.yours(merge_kernel, merge_kernel_solution)


# %% [markdown]
# ## Exercise 35.3: the walk
#
# The other schedule: one block per sequence, no memory for the parts, no second kernel.


# %% tags=["exercise"]
@cuda.jit
def walk_kernel(o_BD, q_BD, k_BSD, v_BSD, length_B):
    """o (B, D): attention of query b to the first length[b] keys of sequence b. Grid B, block 16.

    The bits are those of chunk_kernel followed by merge_kernel, and each key is read once. The
    block walks along the chunks and keeps m, l and acc in registers. chunk_sums computes a chunk;
    q_BD[b] is a row, k_BSD[b] the keys of a sequence.
    """
    # YOUR CODE


# %%
lesson.check("35.3", walk_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 0, min(CHUNK, length))` is where m, l and acc begin. Then
# `for first in range(CHUNK, length, CHUNK)`: the sums of the next chunk, and the body of the loop of 35.2.
#
# </details>


# %% tags=["solution"]
# Solution 35.3
@cuda.jit
def walk_kernel_solution(o_BD, q_BD, k_BSD, v_BSD, length_B):
    """o (B, D): attention of query b to the first length[b] keys of sequence b. Grid B, block 16.

    The bits are those of chunk_kernel followed by merge_kernel, and each key is read once. The
    block walks along the chunks and keeps m, l and acc in registers. chunk_sums computes a chunk;
    q_BD[b] is a row, k_BSD[b] the keys of a sequence.
    """
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    q_D, k_SD, v_SD = q_BD[b], k_BSD[b], v_BSD[b]
    length = length_B[b]
    m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(CHUNK, length))
    for first in range(CHUNK, length, CHUNK):
        m_c, l_c, acc_c = chunk_sums(q_D, k_SD, v_SD, first, min(first + CHUNK, length))
        new = max(m, m_c)
        keep, add = math.exp(m - new), math.exp(m_c - new)
        l = l * keep + l_c * add
        acc = acc * keep + acc_c * add
        m = new
    o_BD[b, d] = acc / l


walk_kernel = lesson.yours(walk_kernel, walk_kernel_solution)


# %%
B, S = 4, 128
q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((B, D), (B, S, D), (B, S, D)))
k *= np.linspace(0.5, 2, S, dtype=np.float32)[:, None]  # later keys have larger scores
q_BD, k_BSD, v_BSD = map(lesson.array, (q, k, v))
length_B = lesson.array(np.array([128, 5, 41, 120], np.int32))


def shared_by_blocks(merge):
    C = S // CHUNK
    m, l, acc = (lesson.empty(q_BD, s, np.float32) for s in ((B, C), (B, C), (B, C, D)))
    o = lesson.empty(q_BD, (B, D), np.float32)
    lesson.launch(chunk_kernel, (C, B), D, m, l, acc, q_BD, k_BSD, v_BSD, length_B)
    lesson.launch(merge, B, D, o, m, l, acc, length_B)
    return lesson.host(o)


def walked():
    o = lesson.empty(q_BD, (B, D), np.float32)
    lesson.launch(walk_kernel, B, D, o, q_BD, k_BSD, v_BSD, length_B)
    return lesson.host(o)


@cuda.jit
def at_once_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    """The merge of lesson 19: all chunks relative to the largest maximum."""
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    chunks = (length_B[b] + CHUNK - 1) // CHUNK
    M, l, acc = m_BC[b, 0], float32(0.0), float32(0.0)
    for c in range(1, chunks):
        M = max(M, m_BC[b, c])
    for c in range(chunks):
        share = math.exp(m_BC[b, c] - M)
        l += l_BC[b, c] * share
        acc += acc_BCD[b, c, d] * share
    o_BD[b, d] = acc / l


one_block, blocks = walked(), shared_by_blocks(merge_kernel)
print("one block walks, several share: the same bits:", np.array_equal(one_block, blocks))
other = shared_by_blocks(at_once_kernel)
print("merged at once: close:", np.allclose(other, one_block, atol=1e-6))
print(f"merged at once: {(other != one_block).sum()} of {other.size} elements have other bits")

# %% [markdown]
# (If chunk 0 has the largest score, both orders multiply by the same factors, and the bits are equal. So a test with small random
# numbers may miss the difference, and with
# rising maxima most elements still have equal bits by chance.)
#
# The two schedules, for 64 keys:

# %%
rows = {"one block": [(t, t + 1, f"{t}") for t in range(4)]}
rows |= {f"block {c}": [(0, 1, f"{c}")] for c in range(4)}
rows["block 3"].append((1.1, 1.5, "m"))
lesson.figures.timeline(rows, "chunks 0 to 3; m: the merge", "time", width=lesson.figures.NARROW)

# %% [markdown]
# What would go wrong with the usual online softmax, whose chunk c computes its exponentials relative to the *running*
# maximum? Such a sum depends on all chunks before it. A block that has chunk 3 alone cannot know it. A chunk's own sums
# cost the walking block a second accumulator, and are what other blocks can compute too.
#
# ## Which products have one order?
#
# You have seen `filled`. Here are the other six. All compute y = x w^T, and all are right to rounding. In which do the
# bits of a row depend on something else than the row and w? Read before you run them: a test may miss a difference, but
# the source shows every addition.

# %%
lesson.source(products.thread_kernel)
lesson.source(products.per_thread)
lesson.source(products.adding_kernel)
lesson.source(products.added)

# %%
lesson.source(products.in_parts)
lesson.source(products.split)
lesson.source(products.warp_kernel)
lesson.source(products.tuned)

# %%
lesson.source(products.tile_kernel)
lesson.source(products.tiled)
lesson.source(products.scaled_kernel)
lesson.source(products.scaled)

# %% [markdown]
# ## Exercise 35.4: find the cause
#
# | answer | the order of a row's additions, or its numbers, |
# |---|---|
# | `"row"` | depend on K alone: the bits of a row do not depend on the other rows |
# | `"threads"` | depend on which thread comes first |
# | `"parts"` | depend on N: the number of rows decides how many parts K has |
# | `"kernel"` | depend on N: the number of rows decides which kernel runs |
# | `"tile"` | depend on the tile: rows of a full tile are added in another way than those of one that is not full |
# | `"numbers"` | depend on the numbers in the other rows |


# %% tags=["exercise"]
def causes():
    """-> {name: answer} for all seven: per_thread, added, filled, split, tuned, tiled, scaled.

    An answer is "row", "threads", "parts", "kernel", "tile" or "numbers".
    """
    # YOUR CODE


# %%
lesson.check("35.4", causes)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For each: write down the additions of one element for N = 1 and for N = 8. Which loop, grid or choice contains N?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A grid that depends on N is not a cause by itself, nor are parts of K. The question is whether the additions of *one*
# element change.
#
# </details>


# %% tags=["solution"]
# Solution 35.4
def causes_solution():
    """-> {name: answer} for all seven: per_thread, added, filled, split, tuned, tiled, scaled.

    An answer is "row", "threads", "parts", "kernel", "tile" or "numbers".
    """
    return {
        "per_thread": "row",
        "added": "threads",
        "filled": "parts",
        "split": "row",
        "tuned": "kernel",
        "tiled": "tile",
        "scaled": "numbers",
    }


causes = lesson.yours(causes, causes_solution)


# %% [markdown]
# ## Exercise 35.5: a check
#
# cuBLAS shows no source. Whether its products have one order can only be tried out, on this GPU, with this version:
# compare bits for different numbers of rows. Write this check for any product.


# %% tags=["exercise"]
def row_invariant(product, x_NK):
    """-> True if in all products of the first n rows, n = 1, ..., N, each row has the bits that it
    has alone; else False.

    product(x (n, K)) -> y (n, O) float32. x_NK: (N, K), N >= 1, rows to try it with. Equal bits:
    0.0 and -0.0 are different, and a NaN equals one with the same bits.
    """
    # YOUR CODE


# %%
lesson.check("35.5", row_invariant)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `alone = np.concatenate([product(x_NK[n : n + 1]) for n in range(N)])`. Bits as integers: `y.view(np.int32)`; then
# `np.array_equal`.
#
# </details>


# %% tags=["solution"]
# Solution 35.5
def row_invariant_solution(product, x_NK):
    """-> True if in all products of the first n rows, n = 1, ..., N, each row has the bits that it
    has alone; else False.

    product(x (n, K)) -> y (n, O) float32. x_NK: (N, K), N >= 1, rows to try it with. Equal bits:
    0.0 and -0.0 are different, and a NaN equals one with the same bits.
    """
    N = len(x_NK)
    bits = lambda y: np.ascontiguousarray(y).view(np.int32)
    alone = bits(np.concatenate([product(x_NK[n : n + 1]) for n in range(N)]))
    return all(np.array_equal(bits(product(x_NK[:n])), alone[:n]) for n in range(1, N + 1))


row_invariant = lesson.yours(row_invariant, row_invariant_solution)


# %%
answers = causes()
for name, product in products.PRODUCTS.items():
    passes = row_invariant(lambda x_NK, product=product: run(product, x_NK), x)
    print(f"{name:11} {answers[name]:8} passes the check: {passes}")

# %% [markdown]
# One line disagrees: `added` passes, although its order is arbitrary: in the simulator threads run in a fixed order. It
# can also run a launch in other orders of blocks, warps and lanes:

# %%
y_86 = simulator.sim(np.zeros((8, 6), np.float32))
arrays = y_86, simulator.sim(x), simulator.sim(w)
lesson.report(simulator.run, products.adding_kernel, (6, 8), 32, *arrays, schedules=8)

# %% [markdown]
# A check finds differences that occur while it runs, and reading finds those that may occur. xtrain needs both: its
# own kernels add no floats with atomics, and cuBLAS, which cannot be read, is checked.
#
# ## Measure: what does it promise, what does it cost?
#
# **The promise** of batch-invariant (exact) mode: training, prefill and decoding compute the same bits for the same token. They do
# not depend on the other sequences of the batch, on padding, on the blocks of the cache, or on where a prompt was cut. It
# holds for one machine, one build of the libraries and one model. It does not make gradients independent of the batch: a
# weight's gradient is a sum over all rows.
#
# Both modes one after the other on the same GPU, in bf16. The cost is the exact mode's time over the fast mode's:

# %%
costs, measured = {}, []
for what, identity in {
    "train, gpt124m": "bench_exact/training step gpt124m/16x1024/bf16",
    "train, 0.6 B": "bench_exact/training step Qwen3-0.6B/4x2048/bf16",
    "256 requests": "bench_exact/256 requests Qwen3-0.6B/100 to 1024 tokens/bf16",
    "128 prompts": "bench_exact/prefill Qwen3-0.6B/128x512/bf16",
    "1 long prompt": "bench_exact/prefill Qwen3-0.6B/1x16384/bf16",
    "decode, 128 rows": "bench_exact/decode step Qwen3-0.6B/B=128 context=512/bf16",
    "decode, 32 rows": "bench_exact/decode step Qwen3-0.6B/B=32 context=512/bf16",
    "decode, 8 rows": "bench_exact/decode step Qwen3-0.6B/B=8 context=512/bf16",
    "1 row": "bench_exact/decode step Qwen3-0.6B/B=1 context=512/bf16",
    "1 row, 1 B": "bench_exact/decode step Llama-3.2-1B/B=1 context=512/bf16",
    "32 rows, long": "bench_exact/decode step Qwen3-0.6B/B=32 context=4096/bf16",
    "8 rows, long": "bench_exact/decode step Qwen3-0.6B/B=8 context=4096/bf16",
    "1 row, long": "bench_exact/decode step Qwen3-0.6B/B=1 context=4096/bf16",
}.items():
    r = lesson.record(identity)
    costs[what] = r["cost"]
    measured.append(r)
    print(
        f"{what:17} {r['shape']:20} fast {r['peer_value']:8.2f}   exact {r['value']:8.2f} ms"
        f"   cost {r['cost']:.2f}"
    )
for model in ("Qwen3-0.6B", "Llama-3.2-1B"):
    bits = lesson.record(f"bench_exact/bits {model}/bf16")
    print(f"{model}, {bits['shape']}: {bits['value']:g} tokens with other bits in training")
    measured.append(bits)
print(lesson.records.machine(measured))
lesson.figures.bars(costs, "times as long", limit=("no cost", 1.0))

# %% [markdown]
# In training and from 32 rows on the order costs at most 5 %. (The long prompt is an exception. It was measured twice,
# with different results: [Serve a model](howto/serve.md#the-same-bits) has both.) With one row the fast mode divides
# each sum among many blocks, and the exact mode cannot: each chain of products is sequential. And with one row and 4096
# keys it is slowest by far, because of the order that its attention has; the library's kernel, below, shows which.
#
# ## The improvement
#
# A chain cannot be shortened, so its warp should do nothing else. In xtrain's kernel for few rows the warps of a block
# have different jobs: one warp per chain multiplies, the others copy the weights into shared memory ahead of it. Here
# is the walk of a warp along one row of pieces. Everything around `mma_bf16` exists so that the next operands are there
# in time:

# %%
from xtrain.kernels import row_bits
from xtrain.kernels.attention import exact_decode_attention
from xtrain.kernels.decoding import gemv_chain, gemv_chain_parts

lesson.source(gemv_chain_parts.make_product)

# %% [markdown]
# ## The library's kernel
#
# The docstring says which op has which order, and what was compared on a GPU:

# %%
print(gemv_chain.__doc__)

# %% [markdown]
# Attention has another order than your 35.2. Training's kernel on Hopper walks along tiles of keys with a *running*
# maximum, from the last tile to the first, so decoding has this order, too, and one block has all keys of a sequence's
# key head. With many sequences there are enough blocks. With one long sequence most multiprocessors are idle: that is
# the last row of the table. The order of 35.2 would let many blocks share the keys; its price is the second
# accumulator, in training. Within a tile there is freedom: scores of different keys are different sums, and so are the
# outputs of different channels. One order, two schedules, one level further down:

# %%
print(exact_decode_attention.__doc__)

# %% [markdown]
# And your 35.5, which is asked once for each shape, dtype and version, and whose answer is kept:

# %%
lesson.source(row_bits.agree)
lesson.source(row_bits.known)

# %% [markdown]
# ## What did not help
#
# *More precision.* A sum in float64, rounded at the end, has the same bits in most orders, not in all. These four numbers,
# from either end:

# %%
numbers = [1.0, 2.0**-24, 2.0**-53, 2.0**-53]
for order in (numbers, numbers[::-1]):
    total = 0.0
    for v in order:
        total += v
    print(f"{np.float32(total):.9f}")

# %% [markdown]
# *256 rows at a time.* A product that always has 256 rows, padded or divided, has one order by construction. xtrain
# does this for a shape that fails the check. But 8192 rows are then 32 products, and one row costs as much as 256.
#
# *A bias in the product.* With a bias in bf16, cuBLAS adds it in another way than to the float32 sum. The kernel for
# few rows does not support a bias.
#
# *A check with small whole numbers.* Their sums are exact in every order, so every product passes. It needs random numbers.
#
# ## More exercises
#
# 1. `max` appears in the merge. Does its order matter?
# 2. In 35.1 let a lane sum 32 chunks one after the other, chunks 32 l, ..., 32 l + 31, and add the lanes' sums in
#    order. For which K does it have the bits of the walk?
# 3. In exact mode, is the gradient of a weight independent of the batch? Of the number of ranks?
# 4. A product of one row has K / 16 instructions that wait for each other. What can its other warps do in the meantime?
# 5. `tiled` passes the check if x has at most 3 rows. What does that say about `ROWS` in `row_bits.py`?
#
# <details><summary>Solutions</summary>
#
# 1: No: a maximum does not round. 2: If the sum of a lane begins at 0, the chunks of lane 1 are added to each other
# before they are added to lane 0's: another tree, unless K is at most 528, where lane 1 has at most one chunk. 3: No.
# It is a sum over the rows of the batch, divided among the ranks; the same batch on the same number of ranks gives the
# same bits. 4: Walk the chains of other outputs, which are other sums, and copy the operands. 5: The numbers of rows
# must go beyond the sizes at which a library changes its algorithm, and include some that are not multiples of a tile.
#
# </details>
#
# ## Sources
#
# - N. Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, chapter 4: summation.
# - J. Demmel and H. D. Nguyen, *Fast Reproducible Floating-Point Summation*, 2013: sums that do not depend on the order.
# - M. Fasi, N. Higham, M. Mikaitis, S. Pranesh, *Numerical Behavior of NVIDIA Tensor Cores*, 2021.
# - T. Dao, D. Haziza, F. Massa, G. Sizov, *Flash-Decoding for Long-Context Inference*, 2023: keys that are split.
# - H. He and Thinking Machines Lab, *Defeating Nondeterminism in LLM Inference*, 2025: batch invariance.
