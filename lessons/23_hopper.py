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
# # 23 Hopper: wgmma and TMA
#
# *About 75 minutes. You need [lesson 14](14_tensor_cores.ipynb).*
#
# **The question.** With `mma.sync`, reading the operands takes as long as multiplying them. What do
# the fastest kernels do instead?
#
# This lesson takes the steps from `mma.sync` to the kernel that xtrain uses on Hopper GPUs (H100,
# H200), each with its reason. One idea is behind all of them: **overlap work that uses different
# hardware units**.

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
    make_descriptor,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    shared_base,
    tma_load,
)

TILE_BYTES = 64 * 64 * 2  # a tile of 64 rows of 64 numbers in bf16
Q, K = 1024, 1024 + TILE_BYTES  # byte offsets of the two tiles in exercise 23.1
STEPS = along_rows(64, TILE_BYTES)  # byte offsets of a tile's slices of 16 columns
begin_product, wait_for_product = make_wgmma(64, STEPS, STEPS), make_wgmma_wait(64, 0)
describe = make_descriptor(TILE_BYTES)


# %% [markdown]
# ## What limits mma.sync
#
# Lesson 14 ended with a count: the tensor cores of a multiprocessor multiply 2048 pairs per clock,
# and its shared memory delivers 128 bytes per clock. With `mma.sync` every warp loads its right
# operand itself, so four warps that multiply with the same tile read it four times. How long does
# it take to multiply 64 rows by 128 columns with depth 16, and how long to read the operands?

# %%
multiply = 64 * 128 * 16 / 2048
right, left = 128 * 16 * 2, 64 * 16 * 2  # bytes of the operands in bf16
print(f"multiplying                          {multiply:.0f} clocks")
print(f"mma.sync, 16 rows/warp: right x 4    {4 * right / 128:.0f} clocks of reading")
print(f"mma.sync, 32 rows/warp: right x 2    {2 * right / 128:.0f}")
print(f"all 64 rows at once: right x 1       {right / 128:.0f}")
print(f"the same, plus the left operand      {(left + right) / 128:.0f}")

# %% [markdown]
# With 32 rows per warp, reading takes as long as multiplying: there is no slack, and every
# `ldmatrix` uses issue slots of a warp that could do other work. Hopper's instructions change this:
#
# - **wgmma**: the four warps of a *warpgroup* start one product of 64 rows together. The *tensor
#   core itself* reads the operands from shared memory, the right one once for all four warps. (The
#   left one may come from registers.) The instruction is asynchronous: the warps continue while the
#   product runs.
# - **TMA** (tensor memory accelerator): one thread requests a whole tile. A hardware engine copies
#   it, with the swizzle of lesson 14, while the thread continues.
# - **mbarrier**: a barrier in shared memory that tracks whether such copies have arrived. It counts
#   arrivals and bytes; when all have arrived, its *phase* completes and the next one begins.
#
# The three belong together: wgmma needs its operands where TMA puts them, and neither would help if
# the threads had to stall.
#
# ## Exercise 23.1: a warpgroup product
#
# Compute s = q k^T again, as in 14.3, now with all three. In order of time:
#
# | threads | call |
# |---|---|
# | thread 0 | `mbarrier_init(base, 1)`: initialize a barrier at shared address `base` for one arrival. `mbarrier_init_fence()`: make it visible to the copy engine |
# | all | `cuda.syncthreads()`: no thread may wait at the barrier before it is initialized |
# | thread 0 | `acquire_map(maps, 0)` and `(maps, 1)`: the copy engine reads the current tensor maps |
# | thread 0 | `mbarrier_arrive_expect_tx(base, n)`: arrive, and announce n bytes |
# | thread 0 | `tma_load(base + Q, maps, 0, base, 0, 0, 0, 0)`: copy from tensor map 0 to base + Q and count the bytes at the barrier `base`; column, row, head, sequence are 0. The same for k: map 1, to base + K |
# | all | `mbarrier_wait(base, 0)`: wait until the barrier's first phase, number 0, has completed |
# | all | `begin_product(acc, describe(base + Q), describe(base + K))`: the 128 threads start q k^T |
# | all | `wait_for_product(acc)`: wait until acc is complete |
#
# A *tensor map* is a description that the host creates: the address of the array, its axes, and the
# size of a tile. A *descriptor*, `describe(address)`, tells the tensor core where a tile is in
# shared memory and how it is swizzled. The result is distributed over the threads as in lesson 14,
# 16 rows per warp: with thread = 32 w + 4 g + t, the register `acc[4 * j + i]` holds row `16 * w +
# g + 8 * (i // 2)`, column `8 * j + 2 * t + i % 2`.


# %% tags=["exercise"]
@cuda.jit
def warpgroup_kernel(s, maps):
    """s (64, 64) float32 = q k^T, with two TMA copies and one warpgroup product.

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
# Use `if thread == 0:` twice: before `cuda.syncthreads()` to initialize the barrier, and after it
# for two `acquire_map`, one `mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)` and two `tma_load`.
#
# </details>
# <details><summary>Hint 2: the result</summary>
#
# `w, g, t = thread // 32, thread % 32 // 4, thread % 4`, then two loops: j over the 8 groups of
# columns, i over the 4 registers of each group.
#
# </details>


# %% tags=["solution"]
# Solution 23.1
@cuda.jit
def warpgroup_kernel_solution(s, maps):
    """s (64, 64) float32 = q k^T, with two TMA copies and one warpgroup product.

    maps: 0 describes q (64, 64), 1 describes k (64, 64), both bf16. A tile has TILE_BYTES
    bytes.
    Grid 1, block 128.
    """
    acc = cuda.local.array(32, float32)
    base, thread = shared_base(), cuda.threadIdx.x
    if thread == 0:
        mbarrier_init(base, 1)
        mbarrier_init_fence()
    cuda.syncthreads()
    if thread == 0:
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)
        tma_load(base + Q, maps, 0, base, 0, 0, 0, 0)
        tma_load(base + K, maps, 1, base, 0, 0, 0, 0)
    mbarrier_wait(base, 0)
    begin_product(acc, describe(base + Q), describe(base + K))
    wait_for_product(acc)
    w, g, t = thread // 32, thread % 32 // 4, thread % 4
    for j in range(8):
        for i in range(4):
            s[16 * w + g + 8 * (i // 2), 8 * j + 2 * t + i % 2] = acc[4 * j + i]


warpgroup_kernel = lesson.yours(warpgroup_kernel, warpgroup_kernel_solution)


# %% [markdown]
# Run it in the simulator and compare with NumPy. The second kernel reads the result too early: the
# simulator reports it, while a GPU would return whatever is in the registers.

# %%
from xtrain.kernels.primitives import tensor_maps

random = np.random.default_rng(0)
q, k = (random.standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
described = [(simulator.sim(x.reshape(1, 64, 1, 64)), 64) for x in (q, k)]
maps = tensor_maps(*described)  # (sequence, row, head, column), and the rows of a tile
s_sim = simulator.sim(np.zeros((64, 64), np.float32))
simulator.run(warpgroup_kernel, 1, 128, s_sim, maps, shared=K + TILE_BYTES)
right = q.astype(np.float32) @ k.astype(np.float32).T
print("equal to NumPy within 1e-4:", np.allclose(s_sim, right, atol=1e-4))


@cuda.jit
def early_read_kernel(s, maps):
    acc = cuda.local.array(32, float32)
    base = shared_base()
    if cuda.threadIdx.x == 0:
        mbarrier_init(base, 1)
        mbarrier_init_fence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        mbarrier_arrive_expect_tx(base, 2 * TILE_BYTES)
        tma_load(base + Q, maps, 0, base, 0, 0, 0, 0)
        tma_load(base + K, maps, 1, base, 0, 0, 0, 0)
    mbarrier_wait(base, 0)
    begin_product(acc, describe(base + Q), describe(base + K))
    s[0, cuda.threadIdx.x % 64] = acc[0]  # the product is still in flight
    wait_for_product(acc)


lesson.report(simulator.run, early_read_kernel, 1, 128, s_sim, maps, shared=K + TILE_BYTES)

# %% [markdown]
# That was the first step, the instructions. Four more steps make it a fast kernel.
#
# ## Larger tiles
#
# A tile of keys is copied once, and each query of the block uses it. Two warpgroups that share the
# tile halve the copies; more keys per tile mean fewer iterations of the loop, each of which has
# waits. The limit is space: 227 KB of shared memory per block, and 65 536 registers of 4 bytes,
# which hold the scores and the output in float32.

# %%
print("head width, keys, warpgroups, stages   shared KB   registers for s, p and o")
for D, keys, groups, stages in (
    (128, 64, 1, 2),
    (128, 128, 2, 2),
    (128, 128, 3, 2),
    (128, 256, 2, 2),
):
    rows = 64 * groups
    shared = (2 * rows + 2 * stages * keys) * D * 2  # q, o, and the ring buffers of k and v
    registers = keys // 2 + keys // 4 + D // 2  # s and o in float32, p in bf16, over 128 threads
    room = shared < 227 * 1024 and registers < 65536 // (128 * (groups + 1))
    fits = "" if room else "   too much"
    print(f"{D:10}, {keys:4}, {groups:10}, {stages:6}   {shared / 1024:9.0f}   {registers:8}{fits}")

# %% [markdown]
# (A thread has at most 255 registers. In addition to the warpgroups that multiply, a block has one
# that only loads, see below: with two that multiply, there are 65 536 / 384 = 170 registers per
# thread. The kernel moves registers from the loading warpgroup to the multiplying ones:
# `setmaxnreg`.)
#
# ## A ring of buffers and a producer warpgroup
#
# The kernels of lesson 4 load a tile, wait, compute, wait. With several tile buffers, one tile can
# be loaded while another is computed. And since one thread can load for all, a block gets a
# separate warpgroup for loading, the **producer**; the others, the **consumers**, only compute.
# This is *warp specialization*. Producer and consumers share a ring of buffers with two barriers
# per buffer: *full*, where the bytes arrive and the consumers wait, and *free*, where the consumers
# arrive and the producer waits.
#
# ## Exercise 23.2: a ring of buffers
#
# Loads run one after another, and so do computations. Load i can start when load i - 1 has ended
# and its buffer is free: buffer i % stages was last used by tile i - stages. Computation i can
# start when load i and computation i - 1 have ended. When does the last computation end?


# %% tags=["exercise"]
def finish_time(tiles, load, compute, stages):
    """Time at which the last of `tiles` computations ends, with `stages` tile buffers."""
    loaded, done = [], []  # end times of the loads and of the computations
    # YOUR CODE


# %%
lesson.check("23.2", finish_time)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In a loop over i, set `begin = max(end of load i - 1, end of computation i - stages)` and
# `loaded.append(begin + load)`; do the same for done.
#
# </details>


# %% tags=["solution"]
# Solution 23.2
def finish_time_solution(tiles, load, compute, stages):
    """Time at which the last of `tiles` computations ends, with `stages` tile buffers."""
    loaded, done = [], []  # end times of the loads and of the computations
    for i in range(tiles):
        free = done[i - stages] if i >= stages else 0
        loaded.append(max(loaded[-1] if loaded else 0, free) + load)
        done.append(max(loaded[i], done[-1] if done else 0) + compute)
    return done[-1]


finish_time = lesson.yours(finish_time, finish_time_solution)


# %%
def rows(tiles, load, compute, stages):
    """The same schedule for a timeline: {row: [(begin, end, text)]}"""
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
# A second buffer gives almost all of the gain. A third helps where times vary, and each one uses
# shared memory that is then not available for larger tiles:

# %%
for stages in (1, 2, 3, 4):
    times = [finish_time(32, load, 3.0, stages) for load in (1.0, 3.0, 5.0)]
    print(
        f"buffers: {stages}   load 1 {times[0]:5.0f}   load 3 {times[1]:5.0f}   load 5 "
        f"{times[2]:5.0f}"
    )

# %% [markdown]
# If loads are slower than arithmetic (the last column), no number of buffers helps: the kernel is
# memory-bound, and only moving fewer bytes helps, as in lesson 2.
#
# ## The ring, step by step
#
# A small kernel with all parts: y = x w^T for 64 rows of x and 8 rows of w, in slices of 64 columns.
# Thread 128 is the producer, threads 0 to 127 are the consumer. Each of the two buffers has a
# barrier *full*, which expects one arrival and the bytes of a slice, and a barrier *free*, which
# expects four arrivals, one from each warp of the consumer.

# %%
SLICES, BUFFERS = 3, 2
SLICE_BYTES = TILE_BYTES + 8 * 64 * 2  # 64 rows of x and 8 rows of w
FULL, FREE, RING = 0, 8 * BUFFERS, 1024  # byte offsets of the barriers and of the buffers
add_product, wait_for_sum = make_wgmma(8, STEPS, STEPS, accumulate=True), make_wgmma_wait(8, 0)


@cuda.jit(device=True, forceinline=True)
def produce(base, maps):
    """One thread copies one slice after the other to the ring."""
    acquire_map(maps, 0)
    acquire_map(maps, 1)
    for i in range(SLICES):
        b = i % BUFFERS
        full, x = base + FULL + 8 * b, base + RING + SLICE_BYTES * b
        mbarrier_wait(base + FREE + 8 * b, (i // BUFFERS + 1) % 2)
        mbarrier_arrive_expect_tx(full, SLICE_BYTES)
        tma_load(x, maps, 0, full, 64 * i, 0, 0, 0)
        tma_load(x + TILE_BYTES, maps, 1, full, 64 * i, 0, 0, 0)


@cuda.jit(device=True, forceinline=True)
def consume(acc, base):
    """A warpgroup adds the product of each slice to acc, then gives the buffer back."""
    for i in range(SLICES):
        b = i % BUFFERS
        x = base + RING + SLICE_BYTES * b
        mbarrier_wait(base + FULL + 8 * b, i // BUFFERS % 2)
        add_product(acc, describe(x), describe(x + TILE_BYTES))
        wait_for_sum(acc)
        mbarrier_arrive(base + FREE + 8 * b)


def make_ring(consume):
    """-> kernel(y, maps): y (64, 8) = x w^T. Grid 1, block 160."""

    @cuda.jit
    def ring_kernel(y, maps):
        acc = cuda.local.array(4, float32)
        base, thread = shared_base(), cuda.threadIdx.x
        if thread == 0:
            for b in range(BUFFERS):
                mbarrier_init(base + FULL + 8 * b, 1)
                mbarrier_init(base + FREE + 8 * b, 4)
            mbarrier_init_fence()
        cuda.syncthreads()
        if thread == 128:
            produce(base, maps)
        elif thread < 128:
            for j in range(4):
                acc[j] = float32(0.0)
            consume(acc, base)
            w, g, t = thread // 32, thread % 32 // 4, thread % 4
            for i in range(4):
                y[16 * w + g + 8 * (i // 2), 2 * t + i % 2] = acc[i]

    return ring_kernel


# %% [markdown]
# Step through it. Hatched cells of shared memory are bytes that an engine writes (orange) or reads
# (blue) at this moment, while the threads do something else. The list of mbarriers shows the phase
# of each and what the phase still expects. Find the step where the copy of slice 2 starts: what must
# have happened before it, and which product runs while this copy is in flight?

# %%
x, w = (random.standard_normal((n, 64 * SLICES)).astype(ml_dtypes.bfloat16) for n in (64, 8))
x_sim, w_sim = (simulator.sim(a.reshape(1, len(a), 1, -1)) for a in (x, w))
maps = tensor_maps((x_sim, 64), (w_sim, 8))
y_sim = simulator.sim(np.zeros((64, 8), np.float32))
shared = RING + BUFFERS * SLICE_BYTES
steps = lesson.stepped(make_ring(consume), 1, 160, y_sim, maps, shared=shared)
right = x.astype(np.float32) @ w.astype(np.float32).T
print("equal to NumPy within 1e-4:", np.allclose(y_sim, right, atol=1e-4))
steps

# %% [markdown]
# Now a mistake: two lines are swapped, so the buffer is given back while the tensor core still reads
# it. On a GPU the result is wrong only if the copy overtakes the product, and nothing reports it.
# The simulator reports it in every run. Step back from the error: which arrivals let the producer
# continue?


# %%
@cuda.jit(device=True, forceinline=True)
def consume_hastily(acc, base):
    for i in range(SLICES):
        b = i % BUFFERS
        x = base + RING + SLICE_BYTES * b
        mbarrier_wait(base + FULL + 8 * b, i // BUFFERS % 2)
        add_product(acc, describe(x), describe(x + TILE_BYTES))
        mbarrier_arrive(base + FREE + 8 * b)  # too early
        wait_for_sum(acc)


lesson.stepped(make_ring(consume_hastily), 1, 160, y_sim, maps, shared=shared)

# %% [markdown]
# ## Overlapping exponentials with products
#
# Attention does not consist of products alone: the softmax is between them. A multiprocessor
# computes 16 exponentials per clock, while its tensor cores do 2048 multiplications. For a tile of
# 128 queries and 128 keys:

# %%
print("head width   both products   exponentials   in turn   overlapped")
for D in (64, 128):
    products, exponentials = 2 * 128 * 128 * D / 2048, 128 * 128 / 16
    each = f"{products:9.0f} clocks   {exponentials:5.0f} clocks   {products + exponentials:7.0f}"
    print(f"{D:10}   {each}   {max(products, exponentials):10.0f}")

# %% [markdown]
# If products and exponentials run in turn, the tensor cores are idle for a third of the time at a
# head width of 128, and for half of it at 64. So the consumer starts the scores of tile i + 1
# *before* p v of tile i, and computes the exponentials of these scores while p v is in flight:

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
        "overlapped: tensor cores": [
            (0, 2, "q k 1"),
            (4, 6, "q k 2"),
            (6, 8, "p v 1"),
            (8, 10, "p v 2"),
        ],
        "overlapped: exponentials": [(2, 4, "exp 1"), (6, 8, "exp 2")],
    },
    "two tiles of keys; with many tiles almost all exponentials overlap with a product",
)

# %% [markdown]
# ## Persistent blocks
#
# A block that ends after one tile of queries pays a fixed cost for each tile: barriers are
# initialized, the first load is waited for, and the output is stored while the tensor cores are
# idle. **Persistent** blocks, as many as fit on the GPU at the same time, take one tile after the
# other from a counter. The producer then loads the keys of the next tile while the consumers finish
# the current one, so the ring does not run empty. By your 23.2, for 8 tiles of queries with 4 tiles
# of keys each:

# %%
print("8 blocks, one after the other: ", 8 * finish_time(4, 2.0, 3.0, 2))
print("one persistent block:          ", finish_time(32, 2.0, 3.0, 2))

# %% [markdown]
# Blocks that take work from a counter can also choose the order. With a causal mask the last
# queries have the most keys. If the longest tiles are processed last, some blocks work alone at the
# end:


# %%
def makespan(lengths, workers):
    """The worker that is free first takes the next item. -> time when all are done"""
    free = np.zeros(workers)
    for n in lengths:
        free[free.argmin()] += n
    return int(free.max())


# 64 heads, 32 tiles of queries with 1 to 32 tiles of keys
lengths = np.repeat(np.arange(1, 33), 64)
print("shortest first:", makespan(lengths, 132), "steps")
print(
    "longest first: ", makespan(lengths[::-1], 132), "steps; lower bound", -(-lengths.sum() // 132)
)

# %% [markdown]
# ## Measure, and one improvement
#
# **The improvement is the combination.** The table compares the kernels of lesson 14, the kernels with the steps above,
# and NVIDIA's cuDNN, which uses the same techniques, on causal attention of 4096 tokens in bf16. (The backward pass
# uses the same steps.) At these four shapes the kernels with wgmma are 1.03 to 1.13 times as fast as cuDNN.

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
        "speedup": lambda r: f"{r['wgmma_value'] / r['mma_sync_value']:.2f}",
        "cuDNN": "cudnn_value",
    },
)

# %% [markdown]
# The next table shows the gain of each step, for the forward pass with 4096 tokens, 4 sequences and 16 heads. (It comes
# from another bench, in which all times are 2 to 5 % longer.) Every row includes the steps of the rows above it:
#
# - *wgmma*: TMA, a thread that only loads, warpgroup products; small tiles, one block per tile of
#   queries, and no overlap with the exponentials
# - *larger tiles*: the tile sizes that the library uses
# - *beside*: exponentials overlapped with products
# - *persistent*: as many blocks as fit on the GPU, each of which takes one tile after the other

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
# The instructions alone gain little where heads are 64 wide: there the exponentials take as long as
# the products, and small tiles provide no work to hide them behind. At 64, larger tiles give the
# largest gain, and the persistent grid, longest tiles first, gives more than the overlap.
#
# The effect of larger tiles, from the tuning record of the kernel (head width 128, 4096 tokens).
# The four numbers are keys per tile, consumer warpgroups, stages, and blocks per multiprocessor.

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
# The first two use the same tiles of keys: two small blocks side by side fill each other's gaps and
# are faster, unless the large block also gets larger tiles. The next table shows the effect of one
# more buffer in the kernel that computes dq:

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
# This is the core of the consumer, one iteration of its loop: it starts the scores of the new tile,
# then p v of the previous tile. It waits until *at most one* product is in flight, so the scores
# are complete, and computes the exponentials while p v runs.

# %%
from xtrain.kernels.attention import (
    flash_attention_hopper,
)
from xtrain.kernels.attention import (
    flash_attention_hopper_parts as _flash_attention_hopper_parts,
)

lesson.source(flash_attention_hopper.make_consumer, part="for _ in range(begin_block + 1, blocks)")

# %% [markdown]
# The producer is one thread. It waits for a free stage, announces the bytes that will arrive, and
# starts the copies.

# %%
lesson.source(_flash_attention_hopper_parts.make_key_producer, part="def load_keys")

# %% [markdown]
# Barriers alternate between two phases, 0 and 1. Stage i % STAGES is used for the (i // STAGES)-th
# time, counting from 0, so the wait at *full* uses the parity of that number. The wait at *free*
# uses the opposite parity: a new barrier behaves as if the phase before the first one had
# completed, so in the first round the producer does not wait.

# %% [markdown]
# ## What did not help
#
# These were tried when the kernel was designed, on the shapes above, and are not in the records.
# Exponentials by a polynomial, on the multiply-add units (as in the successors of
# FlashAttention-3), were a few percent slower. Barriers that make two warpgroups alternate
# ("ping-pong") were slightly faster at 1024 tokens and slower at 4096. Persistent blocks with a
# fixed assignment of tiles, instead of a counter, were clearly slower, since blocks do not run
# equally fast.
#
# ## More exercises
#
# 1. In 23.1 both tiles use one barrier. Give each tile its own. What could start earlier if q and k
#    were larger?
# 2. In 23.2 let every fourth load take three times as long. With how many buffers does the time no
#    longer depend on it?
#
# <details><summary>Solutions</summary>
#
# 1: nothing here, since the product needs both tiles; in attention the scores can start when q and
# k have arrived, while v is still in flight, so the kernel has separate barriers for k and v. 2:
# with enough buffers that the loads are ahead by the extra time when the slow one begins; if the
# loads take longer than the computations on average, no number is enough.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *PTX ISA*: `cp.async.bulk.tensor`, `mbarrier`, `wgmma`, `setmaxnreg`. NVIDIA, *CUDA C++
#   Programming Guide*, "Arithmetic Instructions": 16 exponentials per clock and multiprocessor.
# - J. Shah et al., *FlashAttention-3*, 2024: warp specialization, softmax overlapped with products.
