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
# # 30 Scan and sort across blocks
#
# *About 75 minutes. You need [lesson 3](03_reductions.ipynb) and [lesson 7](07_model.ipynb).*
#
# **The question.** The gradient of an embedding adds up, for every token, the rows of dx of all positions that hold
# it. Thousands of positions may hold the same token. Atomic additions would be simple, but their order differs
# from run to run, and so would the bits of the gradient. How do thousands of threads *sort* the positions by token,
# so that one thread can add each token's rows in order?
#
# You will write a prefix sum for a warp, then for a block and across blocks, use it to give every number its own place in
# the order, and sort by whole keys.

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
from numba import cuda, int32

from xtrain import lesson, simulator

FULL = 0xFFFFFFFF  # all 32 lanes of a warp

# %% [markdown]
# ## Why not just add?
#
# An atomic addition reads, adds and writes without another thread in between. No number is lost. But threads come in
# any order, and a float addition rounds. The same thousand numbers, in four orders:

# %%
rng = np.random.default_rng(0)
numbers = rng.normal(size=1000).astype(np.float32)


def added(numbers):
    total = numbers.dtype.type(0)
    for v in numbers:
        total = total + v
    return total


orders = [np.arange(1000), np.arange(1000)[::-1], rng.permutation(1000), rng.permutation(1000)]
print("float32 ", [f"{added(numbers[order]):.7f}" for order in orders])
whole = (numbers * 100).astype(np.int32)
print("integers", [int(added(whole[order])) for order in orders])

# %% [markdown]
# The last digits differ, and a training run that starts from other bits ends with another model. Integers are exact:
# their sum is the same in every order. This is the plan of this lesson: **integers decide where
# everything goes, in any order; floats are then added in one fixed order.**
#
# ## The prefix sum, by hand
#
# Five threads want to write 3, 1, 4, 1 and 5 results into one array, without gaps. Where does each begin? After the results of
# all threads before it:
#
# | thread | 0 | 1 | 2 | 3 | 4 | |
# |---|---|---|---|---|---|---|
# | results | 3 | 1 | 4 | 1 | 5 | |
# | begins at | 0 | 3 | 4 | 8 | 9 | 14 in all |
#
# The second row is the **exclusive prefix sum**, or exclusive scan, of the first. (The *inclusive* one, 3 4 8 9 14,
# also counts the element itself.) Each number depends on all before it, which looks like work for one thread. But
# take a sum of the last 1, then 2, 4, 8, ... elements: in each step lane l adds the sum of lane l - d to its own,
# and d doubles (Hillis and Steele 1986). How many elements does the sum of each lane cover? A column is a lane, a
# row is a step:

# %%
lanes = np.arange(8)
steps = [np.minimum(lanes + 1, covered) for covered in (1, 2, 4, 8)]
title = "elements in a lane's sum: at first, after d = 1, 2, 4"
lesson.figures.ownership(np.array(steps), title, width=lesson.figures.NARROW)

# %% [markdown]
# After three steps every one of the 8 lanes has its inclusive sum; 32 lanes need five. Within a warp a lane reads another's register:
# `cuda.shfl_up_sync(FULL, v, d)` gives the v of lane l - d. A lane with l < d has no such lane, and gets its own v back.
#
# ## Exercise 30.1: the scan of a warp


# %% tags=["exercise"]
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    """y: the exclusive prefix sums of x (int32), for each block's 32 elements alone. Grid ceil(n /
    32), block 32.

    Lanes exchange registers, by shuffles. All 32 lanes take part, those past the end with 0.
    """
    # YOUR CODE


# %%
lesson.check("30.1", warp_scan_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Load `own` (0 past the end) and begin with `v = own`. For d = 1, 2, 4, 8, 16: every lane calls the shuffle, and
# only lanes with l >= d add what they got.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Then v is the inclusive sum. The exclusive one is `v - own`.
#
# </details>


# %% tags=["solution"]
# Solution 30.1
@cuda.jit
def warp_scan_kernel_solution(y_n, x_n):
    """y: the exclusive prefix sums of x (int32), for each block's 32 elements alone. Grid ceil(n /
    32), block 32.

    Lanes exchange registers, by shuffles. All 32 lanes take part, those past the end with 0.
    """
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    own = x_n[i] if i < x_n.size else int32(0)
    v = own
    for k in range(5):
        other = cuda.shfl_up_sync(FULL, v, 1 << k)
        if lane >= 1 << k:
            v += other
    if i < x_n.size:
        y_n[i] = v - own


warp_scan_kernel = lesson.yours(warp_scan_kernel, warp_scan_kernel_solution)


# %% [markdown]
# Step through it: a shuffle is a moment at which all lanes meet, and no memory is touched between the first and the last.

# %%
x_8 = simulator.sim(np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32))
y_8 = simulator.sim(np.zeros(8, np.int32))
lesson.stepped(warp_scan_kernel, 1, 32, y_8, x_8)

# %% [markdown]
# ## A block, and a race
#
# The same steps in shared memory work for a whole block, so it seems:


# %%
@cuda.jit
def hasty_scan_kernel(y_n, x_n):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = x_n[t]
    for k in range(3):
        cuda.syncthreads()  # the sums of the last step are written
        if t >= 1 << k:
            tile[t] += tile[t - (1 << k)]
    y_n[t] = tile[t]


lesson.report(simulator.run, hasty_scan_kernel, 1, 8, y_8, x_8)

# %%
lesson.stepped(hasty_scan_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# In one step thread t reads `tile[t - d]` while thread t - d replaces it by its next sum. Whether t sees the old or the
# new one depends on who comes first. (On a GPU the 8 threads of one warp often run in step, and the sums happen to be
# right. With several warps they need not be.) A second barrier, between read and write, makes them right, but is slow:
# two barriers in each of ten steps for 1024 threads. Shuffles need one barrier in all: each warp scans its own 32
# elements, writes its total to shared memory, and after the barrier every thread adds the totals of the warps before its own.
#
# ## Exercise 30.2: the scan of a block


# %% tags=["exercise"]
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    """y: the exclusive prefix sums of x (int32) within each block's part; total_B[b]: the sum of
    block b's part.

    Grid ceil(n / blockDim.x), block: a multiple of 32, up to 1024. Thread t of block b owns element
    b blockDim.x + t.
    """
    # YOUR CODE: first make a device function of 30.1, that returns the inclusive sum of a lane


# %%
lesson.check("30.2", block_scan_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Above the kernel: `@cuda.jit(device=True)` and `def warp_scan(v):`, which returns v after the five steps.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `warp_total = cuda.shared.array(32, int32)`. Lane 31 of each warp has its total. After `cuda.syncthreads()`, add up
# `warp_total[w]` for w below the own warp. The last thread of the block knows the block's total.
#
# </details>


# %% tags=["solution"]
# Solution 30.2
@cuda.jit(device=True)
def warp_scan(v):
    """The sum of v over this lane and those below."""
    for k in range(5):
        other = cuda.shfl_up_sync(FULL, v, 1 << k)
        if cuda.laneid >= 1 << k:
            v += other
    return v


@cuda.jit
def block_scan_kernel_solution(y_n, total_B, x_n):
    """y: the exclusive prefix sums of x (int32) within each block's part; total_B[b]: the sum of
    block b's part.

    Grid ceil(n / blockDim.x), block: a multiple of 32, up to 1024. Thread t of block b owns element
    b blockDim.x + t.
    """
    warp_total = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    lane, warp = t % 32, t // 32
    i = cuda.blockIdx.x * cuda.blockDim.x + t
    own = x_n[i] if i < x_n.size else int32(0)
    inclusive = warp_scan(own)
    if lane == 31:
        warp_total[warp] = inclusive
    cuda.syncthreads()  # the totals of all warps are written
    before = int32(0)
    for w in range(warp):
        before += warp_total[w]
    if i < x_n.size:
        y_n[i] = before + inclusive - own
    if t == cuda.blockDim.x - 1:
        total_B[cuda.blockIdx.x] = before + inclusive


block_scan_kernel = lesson.yours(block_scan_kernel, block_scan_kernel_solution)


# %% [markdown]
# ## Across blocks
#
# Blocks run in any order and have no barrier. What orders them is the end of a kernel: the next one sees all that
# it wrote. So a long scan takes **three passes**: scan within the blocks, scan the blocks' totals (which are few),
# add to each element what comes before its block.


# %%
@cuda.jit
def add_before_kernel(y_n, before_B):
    """Grid and block as for block_scan_kernel."""
    i = cuda.grid(1)
    if i < y_n.size:
        y_n[i] += before_B[cuda.blockIdx.x]


def scan(x, block=64):
    """x: (n,) int32 of any length -> its exclusive prefix sums"""
    blocks = -(-x.size // block)
    y, total, sums = (lesson.empty(x, n, np.int32) for n in (x.size, blocks, 1))
    lesson.launch(block_scan_kernel, blocks, block, y, total, x)
    if blocks > 1:
        before = scan(total, block)  # few numbers; if they need several blocks, then again
        lesson.launch(add_before_kernel, blocks, block, y, before)
    return y


x = rng.integers(0, 9, 300).astype(np.int32)
y = lesson.host(scan(lesson.array(x)))
print("the same as NumPy:", np.array_equal(y, np.cumsum(x) - x))

# %% [markdown]
# The traffic is 4 n numbers: x is read, y written, read again and written again. Two other ways move less:
#
# - *Reduce, then scan* (3 n): the first pass only adds up each block's part and writes nothing but the total. The last
#   pass reads x again and scans it from where the block begins.
# - *Decoupled look-back* (2 n; Merrill and Garland 2016): one pass. A block publishes its total as soon as it has it, then looks
#   at the blocks before it, one after the other, and adds their totals, until it finds one that has published its prefix as
#   well. Then it publishes its own. This needs what [lesson 19](19_decode_attention.ipynb) needed: a fence between a value and the flag that
#   announces it. And a block must be sure that those before it run: it takes its number from an atomic counter when it
#   starts, instead of blockIdx.
#
# ## A stable split
#
# To sort numbers by one digit, count how often each digit occurs; a scan of the counts says where each digit's numbers
# begin. Now every number needs its rank among those of its own digit. If ranks follow the old order, the sort is
# **stable**: equal digits stay in their order. We will need that.
#
# With several blocks there is one count for every (digit, block). All numbers with digit 0 come first, those of
# block 0 before those of block 1; then those with digit 1. That is the order of a table with a row per digit, and *one* scan of it
# gives every block its places. Ten numbers, blocks of 5, digits 0 to 2:

# %%
digits = np.array([2, 0, 1, 0, 2, 0, 2, 2, 1, 0])
counts = np.array([[np.sum(part == d) for part in digits.reshape(2, 5)] for d in range(3)])
starts = (np.cumsum(counts) - counts.ravel()).reshape(3, 2)
print("counts of blocks 0 and 1:", counts.tolist())
print("they start at:           ", starts.tolist())

# %% [markdown]
# Block 1 has its two numbers with digit 0 at places 2 and 3: after those of block 0. No two blocks write to the same
# place, so they need not wait for each other.
#
# Counting is for atomics: they are integers. (Each block counts in shared memory, as
# the library does; here, for brevity, in global memory.)


# %%
@cuda.jit
def count_kernel(count_TB, digit_n):
    """Grid ceil(n / 32), block 32. count[d, b]: how many of block b's numbers have digit d."""
    n = cuda.grid(1)
    if n < digit_n.size:
        cuda.atomic.add(count_TB, (digit_n[n], cuda.blockIdx.x), 1)


# %% [markdown]
# And the rank? An atomic counter would give each lane *a* place, in the order in which lanes come. That is not stable, and
# not the same in every run. A warp can do better: `cuda.match_any_sync(FULL, digit)` gives each lane the
# set of lanes with the same digit, as the bits of an integer; `cuda.popc(bits)` counts bits.
#
# ## Exercise 30.3: every number to its place


# %% tags=["exercise"]
@cuda.jit
def scatter_kernel(order_n, digit_n, start_TB):
    """order[p] = n: number n is the p-th, if numbers are ordered by digit, and those of equal
    digits by n.

    Grid ceil(n / 32), block 32: lane l of block b owns n = 32 b + l. start[d, b]: the place of the
    first number of block b with digit d. Digits are 0, 1, ... Without atomics.
    """
    # YOUR CODE


# %%
lesson.check("30.3", scatter_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A lane past the end takes part in the match with the digit -1. The place is `start_TB[digit, b]` plus the number of
# LOWER lanes with the same digit.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(1 << lane) - 1` has a 1 for every lower lane: `cuda.popc(same & ((1 << lane) - 1))`.
#
# </details>


# %% tags=["solution"]
# Solution 30.3
@cuda.jit
def scatter_kernel_solution(order_n, digit_n, start_TB):
    """order[p] = n: number n is the p-th, if numbers are ordered by digit, and those of equal
    digits by n.

    Grid ceil(n / 32), block 32: lane l of block b owns n = 32 b + l. start[d, b]: the place of the
    first number of block b with digit d. Digits are 0, 1, ... Without atomics.
    """
    b, lane = cuda.blockIdx.x, cuda.threadIdx.x
    n = b * 32 + lane
    digit = digit_n[n] if n < digit_n.size else int32(-1)
    same = cuda.match_any_sync(FULL, digit)
    rank = cuda.popc(same & ((1 << lane) - 1))
    if n < digit_n.size:
        order_n[start_TB[digit, b] + rank] = n


scatter_kernel = lesson.yours(scatter_kernel, scatter_kernel_solution)


# %%
def split(digits, T=16):
    """digits (n,) below T -> their stable order: counts, one scan over digits and blocks, places"""
    digit_n = lesson.array(digits.astype(np.int32))
    blocks = -(-digits.size // 32)
    count, order = (
        lesson.zeros(digit_n, (T, blocks), np.int32),
        lesson.empty(digit_n, digits.size, np.int32),
    )
    lesson.launch(count_kernel, blocks, 32, count, digit_n)
    start = scan(count.reshape(-1)).reshape(T, blocks)
    lesson.launch(scatter_kernel, blocks, 32, order, digit_n, start)
    return lesson.host(order)


digits = rng.integers(0, 16, 100)
print("the same as NumPy:", np.array_equal(split(digits), np.argsort(digits, kind="stable")))

# %% [markdown]
# ## Whole keys
#
# A token is a number up to 50,000 or more: too many counters for one split. A **radix sort** takes it apart into digits of some
# bits, and splits by one digit after the other, *the lowest first*. The last split orders by the highest digit,
# and because it is stable, numbers that agree in it stay in the order of the digits below.
#
# ## Exercise 30.4: sort by digits


# %% tags=["exercise"]
def radix_order(keys, bits, split):
    """keys (n,) integers >= 0 of any size -> order (n,): keys[order] ascends, equal keys in the
    order of their positions.

    split(digits) -> the stable order of digits below 2 ** bits. Every comparison is made by it: no
    sort of NumPy's.
    """
    # YOUR CODE


# %%
lesson.check("30.4", radix_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with `order = np.arange(len(keys))`. A pass: the digits of the keys *in the order so far*,
# `(keys[order] >> shift) & (2**bits - 1)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `split(digits)` is an order of the current order: `order = order[split(digits)]`. Continue while a key has
# bits left: `(keys >> shift).any()`.
#
# </details>


# %% tags=["solution"]
# Solution 30.4
def radix_order_solution(keys, bits, split):
    """keys (n,) integers >= 0 of any size -> order (n,): keys[order] ascends, equal keys in the
    order of their positions.

    split(digits) -> the stable order of digits below 2 ** bits. Every comparison is made by it: no
    sort of NumPy's.
    """
    order, shift = np.arange(len(keys)), 0
    while (keys >> shift).any():
        digits = (keys[order] >> shift) & (2**bits - 1)
        order = order[split(digits)]
        shift += bits
    return order


radix_order = lesson.yours(radix_order, radix_order_solution)


# %% [markdown]
# ## The gradient of the embedding
#
# All together: the ids of a batch are sorted by your kernels, and the rows of each token are added in the order of the positions.

# %%
ids = np.array([7, 2, 7, 2, 7, 9])
order = radix_order(ids, 4, split)
print("positions", order, " tokens", ids[order])

N, V, C = 90, 300, 3
ids, dx = rng.integers(0, V, N), rng.normal(size=(N, C)).astype(np.float32)
ids[rng.random(N) < 0.4] = 5  # a frequent token
order = radix_order(ids, 4, split)
dw = np.zeros((V, C), np.float32)
for token in np.unique(ids):  # on a GPU: a thread per token and column
    for n in order[ids[order] == token]:
        dw[token] += dx[n]

from xtrain.kernels import embedding

print(
    "the same bits as the reference:", np.array_equal(dw, embedding.embedding_bwd_ref(dx, ids, V))
)

# %% [markdown]
# ## Measure
#
# The library sorts and adds in the same way. Its plan (the sort) and the sums, for 32,768 positions, against
# torch's gradient of the same embedding:

# %%
rows = {}
for name, what in (
    ("embedding_plan_and_bwd", "random ids"),
    ("embedding_plan_and_bwd_text", "ids of a text"),
):
    r = lesson.record(f"bench_kernels/{name}/bf16")
    rows[f"xtrain, {what}"], rows[f"torch, {what}"] = r["value"], r["peer_value"]
plan = lesson.record("bench_kernels/embedding_plan/fp32")
print(lesson.records.machine([r, plan]), "Shape:", r["shape"])
print(f"the sort alone: {1000 * plan['ms']:.1f} µs of {1000 * r['ms']:.1f} µs with the sums")
lesson.figures.bars(rows, "GB/s")

# %% [markdown]
# The sort costs 12 µs, and depends on the ids alone. So in training it can run before the gradient exists.
#
# ## The improvement
#
# The frequent token of a text has thousands of rows, and one thread would add them all while the others have long ended. The
# library cuts a token's positions into **segments** of 32. A thread adds one segment, and a last kernel adds the
# segments, again in order. The sum then has another order than above, but the same one in every run:

# %%
got = simulator.sim(np.zeros((V, C), np.float32))
embedding.embedding_bwd(simulator.sim(dx), simulator.sim(ids.astype(np.int32)), got)
few = np.bincount(ids, minlength=V) <= embedding.SEGMENT
print("bits equal, tokens that occur up to 32 times:", np.array_equal(got[few], dw[few]))
print("close, the frequent token:", np.allclose(got[5], dw[5], atol=1e-5))

# %% [markdown]
# ## The library's kernel
#
# The rank within a warp is your 30.3, with a running count, because a warp works on several groups of 32. The scan is your
# 30.1 and 30.2: over the counts of a block, for all digits and warps. Two digits are enough (of 512 values each, for
# 50,304 tokens), and the highest comes first, in another way than in 30.4: the first pass splits each tile of 1024 ids by the *high* digit; the second gives each high digit to a block, which
# collects it from all tiles and sorts it by the low one. So nothing moves across the whole array twice.

# %%
lesson.source(embedding.next_destination)
lesson.source(embedding.make_scan)
lesson.source(embedding.make_split_kernel)
lesson.source(embedding.make_sort_kernel)
lesson.source(embedding.make_bwd_kernel)

# %% [markdown]
# ## What did not help
#
# *Float atomics.* They need no sort and no plan. But the bits differ between runs, so that a resumed run is no longer
# the uninterrupted one, and a failed step cannot be repeated. The library has none.
#
# *A thread for every element of dw, that looks at all ids.* Deterministic, and the naive kernel of the library's
# file: V C N steps, for the shape above 1.3 trillion.
#
# *A bitonic sort.* It compares and exchanges pairs in a fixed pattern, in place. But it takes $\log^2 n$ steps, and is not
# stable: the position would have to become part of the key.
#
# ## More exercises
#
# 1. What does 30.1 compute if the shuffles' distances come in the order 16, 8, 4, 2, 1?
# 2. Scan with the maximum instead of the sum. Which value do lanes past the end contribute, and why can the exclusive
#    result no longer be computed from the inclusive one?
# 3. How many passes of how many counters does a radix sort of 16-bit keys need with digits of 4 bits, and of 8? What
#    speaks against one pass with 16?
# 4. Write the kernel that adds the rows of a token: grid (V), thread c adds column c. Where does a token begin in
#    `order`? Compare with `embedding_bwd_kernel`.
#
# <details><summary>Solutions</summary>
#
# 1: The same: each step adds the value shifted by d lanes to itself, and it does not matter which shift comes first.
# 2: The smallest int32. A maximum cannot be taken back as a sum can: shift the inclusive result by one lane.
# 3: 4 passes of 16 counters per block, 2 of 256; 65,536 counters per block do not fit into shared memory, and most of
# them would be 0. 4: A token begins where the scan of all tokens' counts says.
#
# </details>
#
# ## Sources
#
# - W. D. Hillis and G. L. Steele, *Data Parallel Algorithms*, 1986.
# - G. E. Blelloch, *Prefix Sums and Their Applications*, 1990.
# - M. Harris, S. Sengupta, J. D. Owens, *Parallel Prefix Sum (Scan) with CUDA*, GPU Gems 3, 2007.
# - D. Merrill and M. Garland, *Single-pass Parallel Prefix Scan with Decoupled Look-back*, 2016.
# - D. Merrill and A. Grimshaw, *High Performance and Scalable Radix Sorting*, 2011.
