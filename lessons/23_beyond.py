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
# # 23 Beyond
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/23_beyond.ipynb)
#
# *About 75 minutes. You need [lesson 14](14_tensor_cores.ipynb) and [lesson 16](16_memory.ipynb).*
#
# **The question.** You can write, check, profile and fuse kernels, train on several GPUs and serve.
# What do the fastest kernels and the largest models do in addition, and where do you begin to read?
#
# The first half goes on where lesson 14 stopped, inside one kernel: the way from `mma.sync` to the
# kernel that xtrain uses on Hopper cards (an H100, an H200), in steps, each with its reason. The
# one idea in all of them: **let what needs different hardware run at the same time**. The second
# half divides a *product*, and then the *weights*, among GPUs, and ends with a map.

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
from numba import cuda, float32

from xtrain import lesson, simulator
from xtrain.kernels.primitives.hopper import (
    acquire_map,
    along_rows,
    load_tile,
    make_descriptor,
    make_product,
    make_wait,
    mbar_expect,
    mbar_init,
    mbar_init_fence,
    mbar_wait,
    shared_base,
)

TILE_BYTES = 64 * 64 * 2  # a tile of 64 rows of 64 numbers in bf16
Q, K = 1024, 1024 + TILE_BYTES  # where the tiles of exercise 23.1 lie, in bytes
STEPS = along_rows(64, TILE_BYTES)  # where its slices of 16 columns begin, in bytes
begin_product, wait_for_product = make_product(64, STEPS, STEPS), make_wait(64, 0)
describe = make_descriptor(TILE_BYTES)


def silu(x):
    return x / (1 + np.exp(-x))


# %% [markdown]
# ## What holds mma.sync back
#
# Lesson 14 ended with a count: the tensor cores of a multiprocessor multiply 2048 pairs per clock,
# and its shared memory gives 128 bytes. With `mma.sync` every warp fetches its right operand by
# itself. Four warps that multiply with the same tile read it four times. How long does it take to
# multiply 64 rows with 128 columns, 16 deep, and how long to read the operands?

# %%
multiply = 64 * 128 * 16 / 2048
right, left = 128 * 16 * 2, 64 * 16 * 2  # bytes of the operands in bf16
print(f"multiplying                          {multiply:.0f} clocks")
print(f"mma.sync, 16 rows a warp: right x 4  {4 * right / 128:.0f} clocks of reading")
print(f"mma.sync, 32 rows a warp: right x 2  {2 * right / 128:.0f}")
print(f"all 64 rows at once: right x 1       {right / 128:.0f}")
print(f"and the left operand from there, too {(left + right) / 128:.0f}")

# %% [markdown]
# With 32 rows per warp reading takes as long as multiplying: there is nothing to spare, and every
# `ldmatrix` has to be issued by a thread that could be doing something else. This is what Hopper's
# instructions change:
#
# - **wgmma**: the four warps of a *warpgroup* together begin one product of 64 rows. The operands
#   are read from shared memory *by the tensor core*, the right one once for all four warps. (The
#   left one may come from registers.) Nobody waits: the product runs on by itself.
# - **TMA**: one thread asks for a whole tile. An engine copies it, with the swizzle of lesson 14,
#   while that thread goes on.
# - **mbarrier**: a barrier in shared memory that says when such copies have arrived. It counts
#   arrivals and bytes; when all have come, its *phase* ends, and the next one begins.
#
# They belong together: wgmma wants its operands where TMA puts them, and neither would be of use if
# one had to stand and wait.
#
# ## Exercise 23.1: a product of a warpgroup
#
# s = q k^T again, as in 14.3, but with all of that. In the order of time:
#
# | who | what |
# |---|---|
# | thread 0 | `mbar_init(base, 1)`: a barrier at shared address `base`, one arrival. `mbar_init_fence()`: the engine sees it |
# | all | `cuda.syncthreads()`: nobody waits at a barrier that is not there yet |
# | thread 0 | `acquire_map(maps, 0)` and `(maps, 1)`: the engine reads the tensor maps as they are now |
# | thread 0 | `mbar_expect(base, n)`: arrives, and says that n bytes will come |
# | thread 0 | `load_tile(base + Q, maps, 0, base, 0, 0, 0, 0)`: from tensor map 0 to base + Q, its bytes to the barrier at `base`; column, row, head, sequence 0. The same for k: map 1, to base + K |
# | all | `mbar_wait(base, 0)`: until the barrier's first phase, number 0, has ended |
# | all | `begin_product(acc, describe(base + Q), describe(base + K))`: the 128 threads begin q k^T |
# | all | `wait_for_product(acc)`: until acc is there |
#
# A *tensor map* is a description that the host makes: where the array lies, its axes, the size of a
# tile. A *descriptor*, `describe(address)`, tells the tensor core where a tile lies in shared
# memory and how it is swizzled. The result is spread over the threads as in lesson 14, 16 rows per
# warp: with thread = 32 w + 4 g + t, the register `acc[4 * j + i]` is row `16 * w + g + 8 * (i //
# 2)`, column `8 * j + 2 * t + i % 2`.


# %% tags=["exercise"]
@cuda.jit
def warpgroup_kernel(s, maps):
    """s (64, 64) float32 = q k^T, by two copies and one product of a warpgroup.

    maps: 0 describes q (64, 64), 1 describes k (64, 64), both bf16. A tile has TILE_BYTES
    bytes.
    Grid 1, block 128.
    """
    acc = cuda.local.array(32, float32)
    base, thread = shared_base(), cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("23.1", warpgroup_kernel)

# %% [markdown]
# <details><summary>Hint 1: the copies</summary>
#
# `if thread == 0:` twice: before `cuda.syncthreads()` the barrier is made, after it two
# `acquire_map`, `mbar_expect(base, 2 * TILE_BYTES)` and two `load_tile`.
#
# </details>
# <details><summary>Hint 2: the result</summary>
#
# `w, g, t = thread // 32, thread % 32 // 4, thread % 4`, then two loops: j over 8 groups of
# columns, i over the 4 registers of one.
#
# </details>


# %% tags=["solution"]
# Solution 23.1
@cuda.jit
def warpgroup_kernel(s, maps):
    """s (64, 64) float32 = q k^T, by two copies and one product of a warpgroup.

    maps: 0 describes q (64, 64), 1 describes k (64, 64), both bf16. A tile has TILE_BYTES
    bytes.
    Grid 1, block 128.
    """
    acc = cuda.local.array(32, float32)
    base, thread = shared_base(), cuda.threadIdx.x
    if thread == 0:
        mbar_init(base, 1)
        mbar_init_fence()
    cuda.syncthreads()
    if thread == 0:
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        mbar_expect(base, 2 * TILE_BYTES)
        load_tile(base + Q, maps, 0, base, 0, 0, 0, 0)
        load_tile(base + K, maps, 1, base, 0, 0, 0, 0)
    mbar_wait(base, 0)
    begin_product(acc, describe(base + Q), describe(base + K))
    wait_for_product(acc)
    w, g, t = thread // 32, thread % 32 // 4, thread % 4
    for j in range(8):
        for i in range(4):
            s[16 * w + g + 8 * (i // 2), 8 * j + 2 * t + i % 2] = acc[4 * j + i]


# %% [markdown]
# In the simulator, beside NumPy; and what it says when somebody reads the result too early. On a
# GPU that reads whatever is in the registers.

# %%
from xtrain.kernels.primitives.tensor_maps import tensor_maps

random = np.random.default_rng(0)
q, k = (random.standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
described = [(simulator.sim(x.reshape(1, 64, 1, 64)), 64) for x in (q, k)]
maps = tensor_maps(*described)  # (sequence, row, head, column), and the rows of a tile
s_sim = simulator.sim(np.zeros((64, 64), np.float32))
simulator.run(warpgroup_kernel, 1, 128, s_sim, maps, shared=K + TILE_BYTES)
right = q.astype(np.float32) @ k.astype(np.float32).T
print("like NumPy to 1e-4:", np.allclose(s_sim, right, atol=1e-4))


@cuda.jit
def hasty_kernel(s, maps):
    acc = cuda.local.array(32, float32)
    base = shared_base()
    if cuda.threadIdx.x == 0:
        mbar_init(base, 1)
        mbar_init_fence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        mbar_expect(base, 2 * TILE_BYTES)
        load_tile(base + Q, maps, 0, base, 0, 0, 0, 0)
        load_tile(base + K, maps, 1, base, 0, 0, 0, 0)
    mbar_wait(base, 0)
    begin_product(acc, describe(base + Q), describe(base + K))
    s[0, cuda.threadIdx.x % 64] = acc[0]  # the product is still under way
    wait_for_product(acc)


lesson.report(simulator.run, hasty_kernel, 1, 128, s_sim, maps, shared=K + TILE_BYTES)

# %% [markdown]
# That was the first step, the instructions. Four more make a fast kernel of it.
#
# ## Larger tiles
#
# A tile of keys is copied once, and each of a block's queries uses it. Two warpgroups that share it
# halve the copies; more keys in a tile mean fewer turns of the loop, each with its waits. What ends
# it is room: 227 KB of shared memory for a block, and 65 536 registers of 4 bytes, which hold the
# scores and the output in float32.

# %%
print("head width, keys, warpgroups, stages   shared KB   registers for s, p and o")
for D, keys, groups, stages in (
    (128, 64, 1, 2),
    (128, 128, 2, 2),
    (128, 128, 3, 2),
    (128, 256, 2, 2),
):
    rows = 64 * groups
    shared = (2 * rows + 2 * stages * keys) * D * 2  # q, o, and the rings of k and v
    held = keys // 2 + keys // 4 + D // 2  # s and o in float32, p in bf16, over 128 threads
    room = shared < 227 * 1024 and held < 65536 // (128 * (groups + 1))
    fits = "" if room else "   too much"
    print(f"{D:10}, {keys:4}, {groups:10}, {stages:6}   {shared / 1024:9.0f}   {held:8}{fits}")

# %% [markdown]
# (A thread has at most 255 registers. Beside the warpgroups that multiply a block has one that only
# loads, see below: with two that multiply, 65 536 / 384 = 170 for each thread. The kernel moves
# registers from the one that loads to those that multiply: `setmaxnreg`.)
#
# ## A ring, and a thread that only loads
#
# The kernels of lesson 4 load a tile, wait, compute, wait. With several tile buffers a load can run
# while another tile is computed. And since one thread can load for all, a block gets a warpgroup of
# its own for that, the **producer**; the others, the **consumers**, only compute. This is *warp
# specialization*. Between them lies a ring of buffers with two barriers each: *full*, at which the
# bytes arrive and the consumers wait, and *free*, the other way round.
#
# ## Exercise 23.2: a ring of buffers
#
# Loads go one after another, and so do computations. Load i may begin when load i - 1 has ended and
# its buffer is free: buffer i % stages was last used by tile i - stages. Computation i may begin
# when load i and computation i - 1 have ended. When does the last computation end?


# %% tags=["exercise"]
def finish_time(tiles, load, compute, stages):
    """Time at which the last of `tiles` computations ends, with `stages` tile buffers."""
    loaded, done = [], []  # when each load, each computation has ended
    # YOUR CODE


# %%
lesson.check("23.2", finish_time)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In a loop over i: `begin = max(end of load i - 1, end of computation i - stages)`,
# `loaded.append(begin + load)`, and the same for done.
#
# </details>


# %% tags=["solution"]
# Solution 23.2
def finish_time(tiles, load, compute, stages):
    """Time at which the last of `tiles` computations ends, with `stages` tile buffers."""
    loaded, done = [], []  # when each load, each computation has ended
    for i in range(tiles):
        free = done[i - stages] if i >= stages else 0
        loaded.append(max(loaded[-1] if loaded else 0, free) + load)
        done.append(max(loaded[i], done[-1] if done else 0) + compute)
    return done[-1]


# %%
def rows(tiles, load, compute, stages):
    """The same as a picture: {who: [(begin, end, what)]}"""
    copies, products = [], []
    for i in range(tiles):
        free = products[i - stages][1] if i >= stages else 0
        begin = max(copies[-1][1] if copies else 0, free)
        copies.append((begin, begin + load, f"load {i}"))
        begin = max(copies[i][1], products[-1][1] if products else 0)
        products.append((begin, begin + compute, f"tile {i}"))
    return {
        f"{stages} buffer{'s' * (stages > 1)}: copies": copies,
        f"{stages}: arithmetic": products,
    }


lesson.figures.timeline(
    {**rows(4, 2, 3, 1), **rows(4, 2, 3, 2)}, "the same four tiles with one buffer and with two"
)

# %% [markdown]
# A second buffer is nearly everything. A third helps where times vary, and each costs shared
# memory, which then is missing for larger tiles:

# %%
for stages in (1, 2, 3, 4):
    times = [finish_time(32, load, 3.0, stages) for load in (1.0, 3.0, 5.0)]
    print(
        f"{stages} buffers: load 1 {times[0]:5.0f}   load 3 {times[1]:5.0f}   load 5 {times[2]:5.0f}"
    )

# %% [markdown]
# With loads slower than arithmetic (the last column) no number of buffers helps: the kernel is
# limited by memory, and only fewer bytes do. Lesson 2, once more.
#
# ## Exponentials beside products
#
# The products of attention are not alone: between them stands the softmax. A multiprocessor
# computes 16 exponentials per clock, where its tensor cores do 2048 multiplications. For a tile of
# 128 queries and 128 keys:

# %%
print("head width   both products   exponentials   in turn   at the same time")
for D in (64, 128):
    products, exponentials = 2 * 128 * 128 * D / 2048, 128 * 128 / 16
    each = f"{products:9.0f} clocks   {exponentials:5.0f} clocks   {products + exponentials:7.0f}"
    print(f"{D:10}   {each}   {max(products, exponentials):16.0f}")

# %% [markdown]
# In turn, the tensor cores stand idle for a third of the time at a head width of 128, and for half
# of it at 64. So the consumer begins the scores of tile i + 1 *before* p v of tile i, and computes
# the exponentials of these scores while p v is under way:

# %%
lesson.figures.timeline(
    {
        "in turn: tensor cores": [
            (0, 2, "q k 1"),
            (4, 6, "p v 1"),
            (6, 8, "q k 2"),
            (10, 12, "p v 2"),
        ],
        "in turn: exponentials": [(2, 4, "exp 1"), (8, 10, "exp 2")],
        "beside: tensor cores": [
            (0, 2, "q k 1"),
            (4, 6, "q k 2"),
            (6, 8, "p v 1"),
            (8, 10, "p v 2"),
        ],
        "beside: exponentials": [(2, 4, "exp 1"), (6, 8, "exp 2")],
    },
    "two tiles of keys; with many tiles nearly all exponentials run beside a product",
)

# %% [markdown]
# ## Blocks that stay
#
# A block that ends after its tile of queries pays for every one: barriers made, the first load
# waited for, the output stored while nobody multiplies. **Persistent** blocks, as many as the GPU
# holds at a time, take one tile after the other from a counter. Then the producer loads the next
# tile's keys while the consumers finish the last one: the ring does not run empty. By your 23.2, 8
# tiles of queries with 4 tiles of keys each:

# %%
print("8 blocks, one after the other: ", 8 * finish_time(4, 2.0, 3.0, 2))
print("one block that stays:          ", finish_time(32, 2.0, 3.0, 2))

# %% [markdown]
# And a block that takes its work itself can choose the order. With a causal mask the last queries
# have the most keys. If the longest come last, some blocks work alone at the end:


# %%
def makespan(lengths, workers):
    """Whoever is free takes the next. -> when all is done"""
    free = np.zeros(workers)
    for n in lengths:
        free[free.argmin()] += n
    return int(free.max())


lengths = np.repeat(
    np.arange(1, 33), 64
)  # 64 heads, 32 tiles of queries with 1 to 32 tiles of keys
print("shortest first:", makespan(lengths, 132), "turns")
print(
    "longest first: ", makespan(lengths[::-1], 132), "turns, of at least", -(-lengths.sum() // 132)
)

# %% [markdown]
# ## Measure, and one improvement
#
# **The improvement is all of it together:** the kernels of lesson 14, those with the steps above,
# and NVIDIA's cuDNN, which does the same, on attention of 4096 tokens, causal, in bf16. (The
# backward takes the same steps.)

# %%
lesson.table(
    [
        "bench_attention/named fwd/B=4 H=16 G=16 T=4096 D=64/bf16",
        "bench_attention/named fwd/B=4 H=16 G=16 T=4096 D=128/bf16",
        "bench_attention/named fwd+bwd/B=4 H=16 G=16 T=4096 D=64/bf16",
        "bench_attention/named fwd+bwd/B=4 H=16 G=16 T=4096 D=128/bf16",
    ],
    {
        "head width": lambda r: r["shape"].split("D=")[1],
        "mma.sync, TFLOP/s": "mma_sync_value",
        "wgmma": "wgmma_value",
        "times": lambda r: f"{r['wgmma_value'] / r['mma_sync_value']:.2f}",
        "cuDNN": "cudnn_value",
    },
)

# %% [markdown]
# What each step gives, forward, on 4096 tokens, 4 sequences, 16 heads. Every row has the steps of
# those above it:
#
# - *wgmma*: TMA, a thread that loads, products of a warpgroup; small tiles, a block for each tile
#   of queries, and nothing runs beside the exponentials
# - *larger tiles*: those of the table that the library uses
# - *beside*: exponentials beside products
# - *persistent*: as many blocks as the GPU holds, which take one tile after the other

# %%
lesson.table(
    [
        f"bench_hopper_steps/fwd {step}/B=4 H=16 T=4096 D={D}/bf16"
        for D in (64, 128)
        for step in ("mma.sync", "wgmma", "larger tiles", "beside", "persistent")
    ],
    {
        "head width": lambda r: r["shape"].split("D=")[1],
        "ms": "ms",
        "TFLOP/s": "value",
    },
)

# %% [markdown]
# The instruction alone gives little where heads are 64 wide: there the exponentials take as long as
# the products, and small tiles leave nothing to hide them behind. Larger tiles give the most at 64,
# and the persistent grid, longest tiles first, more than the overlap.
#
# What larger tiles give, from the record of tuning the kernel (head width 128, 4096 tokens): keys
# of a tile, consumer warpgroups, stages, blocks per multiprocessor.

# %%
lesson.table(
    [
        "tune_flash_attention/hopper fwd (64, 1, 2, 2)/D 128 T 4096 causal group 1/bf16",
        "tune_flash_attention/hopper fwd (64, 2, 3, 1)/D 128 T 4096 causal group 1/bf16",
        "tune_flash_attention/hopper fwd (80, 2, 3, 1)/D 128 T 4096 causal group 1/bf16",
        "tune_flash_attention/hopper fwd (128, 2, 2, 1)/D 128 T 4096 causal group 1/bf16",
    ],
    {"ms": "ms", "TFLOP/s": "value"},
)

# %% [markdown]
# The first two have the same tiles of keys: two small blocks side by side fill each other's gaps,
# as long as the large one is not given larger tiles. And a buffer more, in the kernel that computes
# dq:

# %%
lesson.table(
    [
        "tune_flash_attention/hopper dq (64, 2, 3, 1)/D 128 T 4096 causal group 1/bf16",
        "tune_flash_attention/hopper dq (64, 2, 4, 1)/D 128 T 4096 causal group 1/bf16",
    ],
    {"ms": "ms", "TFLOP/s": "value"},
)

# %% [markdown]
# ## The library's kernel
#
# The heart of the consumer, one turn of its loop: the scores of the new tile are begun, then p v of
# the tile before; it waits until *at most one* product is under way, so the scores are there, and
# computes the exponentials while p v runs.

# %%
from xtrain.kernels.attention import (
    flash_attention_hopper_parts as _flash_attention_hopper_parts,
    flash_attention_hopper,
)

lesson.source(flash_attention_hopper.make_consumer, part="for _ in range(1, blocks)")

# %% [markdown]
# And the producer, one thread: a stage that is free, the bytes that will come, the copies.

# %%
lesson.source(_flash_attention_hopper_parts.make_key_producer, part="def load_keys")

# %% [markdown]
# Barriers alternate between two phases, 0 and 1. Stage i % STAGES is used for the (i // STAGES)-th
# time, so *full* is waited for with the parity of that number. *Free* is waited for with the other
# one: a barrier that is new counts as if the phase before the first had ended, so the first time
# round the producer passes.

# %% [markdown]
# ## Dividing a product: tensor parallelism
#
# The second half leaves the single GPU. Data parallelism (lesson 15) gives every GPU all weights
# and a part of the tokens. When one layer is too large for one card, or one token must be faster
# than one card can be, the *layer* is divided. An MLP has two products with a nonlinearity between:
# $y = \text{silu}(x w_1^\top) \, w_2^\top$.
#
# The hidden numbers have nothing to do with each other until the second product adds them up. So
# give rank r a part of *them*: rows of $w_1$, and the columns of $w_2$ that belong to them. Each
# rank then computes a share of y by itself, nonlinearity included, and **one** sum over the ranks
# finishes the layer. By hand for 4 hidden numbers on 2 ranks:

# %%
x = np.array([[1.0, 2.0]])
w1 = np.array([[1.0, 0], [0, 1], [1, 1], [1, -1]])
w2 = np.array([[1.0, 2, 3, 4]])
hidden = silu(x @ w1.T)
print("hidden", hidden.round(3), "  y", (hidden @ w2.T).round(3))
for r in (0, 1):
    mine = slice(2 * r, 2 * r + 2)
    print(
        f"rank {r}: hidden {hidden[:, mine].round(3)}, share {(hidden[:, mine] @ w2[:, mine].T).round(3)}"
    )

# %% [markdown]
# ## Exercise 23.3: the shares of an MLP


# %% tags=["exercise"]
def mlp_shares(x_NC, w1_FC, w2_CF, ranks):
    """-> [share (N, C) of each rank], a list; their sum is silu(x w1^T) w2^T.

    x: (N, C), w1: (F, C), w2: (C, F). Rank r uses the hidden numbers r F / ranks to
    (r + 1) F / ranks - 1 only.
    """
    # YOUR CODE


# %%
lesson.check("23.3", mlp_shares)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `mine = slice(r * part, (r + 1) * part)` with part = F / ranks; rows `w1_FC[mine]`, columns
# `w2_CF[:, mine]`.
#
# </details>


# %% tags=["solution"]
# Solution 23.3
def mlp_shares(x_NC, w1_FC, w2_CF, ranks):
    """-> [share (N, C) of each rank], a list; their sum is silu(x w1^T) w2^T.

    x: (N, C), w1: (F, C), w2: (C, F). Rank r uses the hidden numbers r F / ranks to
    (r + 1) F / ranks - 1 only.
    """
    part = len(w1_FC) // ranks
    shares = []
    for r in range(ranks):
        mine = slice(r * part, (r + 1) * part)
        shares.append(silu(x_NC @ w1_FC[mine].T) @ w2_CF[:, mine].T)
    return shares


# %% [markdown]
# Attention is divided in the same way, by heads: each rank has some heads' queries, keys and
# values, and the columns of the output projection that belong to them. So a block costs two sums
# over ranks forward and two backward, *between* the products, where nothing can hide them. How much
# is that, against the arithmetic? For one block of width C on N tokens:

# %%
N, C = 8192, 4096
flops = 2 * N * 12 * C * C  # 12 C^2 parameters in a block, forward
for ranks in (2, 4, 8):
    compute = flops / ranks / 600e12  # at 600 TFLOP/s reached in bf16
    traffic = (
        2 * (2 * (ranks - 1) / ranks) * 2 * N * C / 320e9
    )  # two all-reduces in bf16 over a 320 GB/s bus
    print(f"{ranks} ranks: arithmetic {compute * 1e3:.1f} ms, sums {traffic * 1e3:.1f} ms")

# %% [markdown]
# (320 GB/s is what an all-reduce reaches on 4 H200s with NVLink; 600 TFLOP/s is a usual share of
# the peak.) Within one machine it pays; across machines, with a tenth of that bandwidth, it does
# not. That is why tensor parallelism stays inside a machine, and data parallelism goes between.
#
# ## Dividing the weights: FSDP
#
# ZeRO-1 (lesson 16) divides the optimizer's state. FSDP, or ZeRO-3, divides the weights as well:
# rank r keeps 1 / R of every layer. To compute a layer, all ranks send their parts to all (an
# *all-gather*), use the whole, and drop it again. In the backward once more, and the gradients are
# summed so that each rank gets only its part (a *reduce-scatter*). The arithmetic is that of data
# parallelism; the memory is not:
#
# ## Exercise 23.4: how many bytes of weights?
#
# While a layer is computed, the next ones may be gathered already (`ahead` of them), or the GPU
# would wait.


# %% tags=["exercise"]
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    """Most bytes of weights that a rank holds at one moment. With one rank nothing is
    gathered.

    layers: how many there are, of layer_bytes each. A gathered layer is a new array of
    layer_bytes, beside the part that the rank owns.
    """
    # YOUR CODE


# %%
lesson.check("23.4", fsdp_bytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Its own part of all layers, and whole layers for the one that is computed and those gathered
# ahead.
#
# </details>


# %% tags=["solution"]
# Solution 23.4
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    """Most bytes of weights that a rank holds at one moment. With one rank nothing is
    gathered.

    layers: how many there are, of layer_bytes each. A gathered layer is a new array of
    layer_bytes, beside the part that the rank owns.
    """
    if ranks == 1:
        return layers * layer_bytes
    return layers * layer_bytes // ranks + (1 + ahead) * layer_bytes


# %%
layers, layer_bytes = 80, 70_000_000_000 * 2 // 80  # 70 billion parameters in bf16
for ranks in (1, 8, 64):
    print(
        f"{ranks:2} ranks: {fsdp_bytes(layers, layer_bytes, ranks, 1) / 1e9:6.1f} GB of weights each"
    )

# %% [markdown]
# ## The map
#
# Where each idea of the course lives:

# %%
MAP = {
    "races, deadlocks, bounds": "xtrain/simulator.py",
    "16-byte accesses, PTX": "xtrain/kernels/_ptx.py",
    "rows in registers": "xtrain/kernels/_rows.py",
    "tensor cores, ldmatrix, swizzle": "xtrain/kernels/_tiles.py",
    "FlashAttention": "xtrain/kernels/flash_attention_bf16.py",
    "wgmma, TMA, mbarriers": "xtrain/kernels/_hopper.py",
    "FlashAttention on Hopper": "xtrain/kernels/flash_attention_hopper.py",
    "autograd": "xtrain/autograd.py",
    "all ranks the same, bit for bit": "xtrain/communicator.py",
    "buckets that overlap with backward": "xtrain/ddp.py",
    "the optimizer divided": "xtrain/zero.py",
    "memory of a step, planned": "xtrain/memory.py",
    "serving": "xtrain/engine.py",
}
for idea, file in MAP.items():
    there = (lesson.LESSONS.parent / file).exists()
    print(f"{idea:38} {file}{'' if there else '  (not in this checkout)'}")

# %%
from xtrain.parallel import zero

print(zero.__doc__)

# %% [markdown]
# To go from ZeRO-1 to FSDP, what would have to change? The arena (lesson 16) is already cut into
# buckets of which each rank owns a part. The all-gather that `zero.py` makes after the optimizer's
# step would be made bucket by bucket before a layer runs, into memory that is dropped after it.
#
# ## What did not help
#
# *Inside the kernel.* Tried when it was designed, on the shapes above, and not among the records:
# exponentials by a polynomial, on the units that multiply and add (FlashAttention-3's successors do
# that): slower by some per cent. Barriers that make two warpgroups take turns ("ping-pong"): a
# little faster at 1024 tokens, slower at 4096. Persistent blocks whose tiles are fixed beforehand,
# instead of taken from a counter: clearly slower, since blocks do not run equally fast.
#
# *Dividing w1 along its inputs.* Each rank then has a part of the sum over inputs, and the
# nonlinearity needs the whole sum: a second all-reduce in the middle of the MLP, of F numbers per
# token instead of C:

# %%
N, C, F = 8192, 4096, 11008
for name, numbers in (("along hidden numbers", N * C), ("along inputs", N * F + N * C)):
    print(f"{name:22} {2 * numbers / 1e6:6.0f} MB to be summed per MLP, in bf16")

# %% [markdown]
# *Pipelining the layers* over GPUs (each GPU has some layers) needs the least communication, and
# keeps GPUs waiting for each other at the beginning and end of every step: with R stages and M
# micro-batches the idle share is (R - 1) / (M + R - 1):

# %%
for M in (1, 8, 64):
    print(f"8 stages, {M:2} micro-batches: {7 / (M + 7):.0%} idle")

# %% [markdown]
# ## More exercises
#
# 1. Divide attention by heads: given wq, wk, wv, wo, what are the parts of rank r, and what is
#    summed?
# 2. RMSNorm comes between two divided layers. Must its input be summed before? Could each rank norm
#    a part of the tokens instead? (This is *sequence parallelism*.)
# 3. Read `xtrain/communicator.py` and find where the order of additions is fixed.
# 4. In 23.1 the tiles come with one barrier. Give each tile its own. What could begin earlier, if q
#    and k were larger?
#
# <details><summary>Solutions</summary>
#
# 1: rows of wq, wk, wv of its heads, columns of wo that belong to them; the outputs of wo are
# summed. With grouped queries a rank needs whole groups. 2: yes, the norm needs the whole row; so
# reduce-scatter over tokens, norm, all-gather: the same traffic as the all-reduce, and the norm's
# work is divided, too. 3: `Ranks.total` gathers a few numbers and adds them in the order of the
# ranks; the sums of gradients are left to MPI and NCCL, as the docstring of the file says. 4:
# nothing here, since the product needs both; in attention the scores can begin when q and k are
# there, while v is still on its way, and so the kernel has barriers for k and for v.
#
# </details>
#
# ## Sources
#
# - M. Shoeybi et al., *Megatron-LM*, 2019: tensor parallelism. V. Korthikanti et al., 2022:
#   sequence parallelism.
# - S. Rajbhandari et al., *ZeRO*, 2020; Y. Zhao et al., *PyTorch FSDP*, 2023.
# - Y. Huang et al., *GPipe*, 2019.
# - NVIDIA, *PTX ISA*: `cp.async.bulk.tensor`, `mbarrier`, `wgmma`, `setmaxnreg`. NVIDIA, *CUDA C++
#   Programming Guide*, "Arithmetic Instructions": 16 exponentials per clock and multiprocessor.
# - J. Shah et al., *FlashAttention-3*, 2024: specialized warps, softmax beside products.
