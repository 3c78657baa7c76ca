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
# # 31 Hardware in earnest: what a profile means
#
# *About 75 minutes. You need [lesson 3](03_reductions.ipynb) and [lesson 10](10_profiling.ipynb).*
#
# **The question.** A profiler prints hundreds of numbers: occupancy, registers, spills, active lanes, conflicts. Which
# of them say why a kernel is slow? You can compute the important ones by hand, and then read them.
#
# You will compute how many blocks a multiprocessor holds, how many lanes of a warp work, count without contention,
# and plan copies and kernels that overlap. Every measured number below comes from the records of a GPU.

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

# Of one multiprocessor: warps, blocks, registers and bytes of shared memory; "reserved": bytes
# that each block takes in addition. From the tables of the CUDA C++ Programming Guide.
CARDS = {
    "T4": dict(warps=32, blocks=16, registers=65536, shared=64 * 1024, reserved=0),
    "A100": dict(warps=64, blocks=32, registers=65536, shared=164 * 1024, reserved=1024),
    "RTX 4090": dict(warps=48, blocks=24, registers=65536, shared=100 * 1024, reserved=1024),
    "H100": dict(warps=64, blocks=32, registers=65536, shared=228 * 1024, reserved=1024),
}

# %% [markdown]
# ## Occupancy, by hand
#
# A warp that waits for memory does nothing for hundreds of cycles. A multiprocessor has others to run in the
# meantime: all warps of its **resident** blocks keep their registers, so that changing from one to another costs
# nothing. **Occupancy** is the number of resident warps, as a share of the most the card can hold. Four things limit
# the number of blocks:
#
# | what | limit |
# |---|---|
# | warps | a block of 48 threads has 2 warps, one of them half empty |
# | blocks | 16 to 32, however small they are |
# | registers | a thread gets a multiple of 8 |
# | shared memory | what a block asks for, and what is reserved |
#
# One detail: a multiprocessor consists of **four parts**. Each has a quarter of the registers, and a warp lives in one part. So
# count how many warps' registers fit into a *quarter*, and multiply by four. For 168 registers per thread and blocks
# of 128 threads on an H100:

# %%
quarter = 65536 // 4
per_warp = 32 * 168
warps = 4 * (quarter // per_warp)
print(f"{per_warp} registers per warp, {quarter / per_warp:.2f} warps in a quarter: {warps} in all")
print(f"{warps // 4} blocks of 4 warps; occupancy {warps / 64:.0%}")

# %% [markdown]
# ## Exercise 31.1: resident blocks


# %% tags=["exercise"]
def resident_blocks(threads, registers, shared, card):
    """How many blocks a multiprocessor holds at a time: the least of four limits, which may be 0.

    threads: of a block. registers: of a thread. shared: bytes of a block. card: an entry of CARDS.
    """
    # YOUR CODE


# %%
lesson.check("31.1", resident_blocks)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `-(-a // b)` rounds a / b up. `warps = -(-threads // 32)`, and registers go up to the next multiple of 8.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Registers: `4 * (card["registers"] // 4 // (32 * registers)) // warps`. Shared memory:
# `card["shared"] // (shared + card["reserved"])`, and no limit if a block takes none.
#
# </details>


# %% tags=["solution"]
# Solution 31.1
def resident_blocks_solution(threads, registers, shared, card):
    """How many blocks a multiprocessor holds at a time: the least of four limits, which may be 0.

    threads: of a block. registers: of a thread. shared: bytes of a block. card: an entry of CARDS.
    """
    warps = -(-threads // 32)
    registers = -(-registers // 8) * 8
    by_warps = card["warps"] // warps
    by_registers = 4 * (card["registers"] // 4 // (32 * registers)) // warps
    bytes_ = shared + card["reserved"]
    by_shared = card["shared"] // bytes_ if bytes_ else card["blocks"]
    return min(by_warps, card["blocks"], by_registers, by_shared)


resident_blocks = lesson.yours(resident_blocks, resident_blocks_solution)


# %% [markdown]
# Does it agree with the library? Its kernels choose their grids by these numbers. The backward pass of RMSNorm keeps as
# many warps as its registers permit; the gradient norm wants a full H200 (whose multiprocessor is an H100's).

# %%
from xtrain.kernels import grad_norm, rmsnorm

H100 = CARDS["H100"]
for registers, wanted in ((128, rmsnorm.RESIDENT), (168, rmsnorm.RESIDENT_WIDE)):
    blocks = resident_blocks(32, registers, 0, H100)
    print(f"RMSNorm backward, {registers} registers: {blocks} warps, the library says {wanted}")
blocks = resident_blocks(256, 32, 0, H100)
print(
    f"gradient norm: {blocks} blocks x 132 = {132 * blocks}, the library says {grad_norm.PARTIALS}"
)

# %%
print("blocks of 256 threads with 40 KB of shared memory, by registers per thread:")
for name, card in CARDS.items():
    shown = [resident_blocks(256, r, 40 * 1024, card) for r in (32, 64, 128, 168)]
    print(f"{name:9}", shown, " occupancy", [f"{8 * b / card['warps']:.0%}" for b in shown])

# %% [markdown]
# **Registers and spills.** The compiler decides how many registers a thread gets, at most 255. If a kernel needs more, it
# **spills**: values go to local memory, which is global memory with a cache. More registers mean fewer warps, and
# fewer registers mean spills. `launch_bounds=(threads, blocks)` of `cuda.jit` asks the compiler for few enough registers
# that so many blocks fit. An array indexed by a variable (`cuda.local.array` in a loop that is not unrolled) is in local
# memory from the start, because registers have no addresses.
#
# ## Divergence
#
# A warp executes one instruction for all its lanes. If lanes take different branches, the branches run one after the
# other, each with the other lanes idle. A loop runs until the *last* lane has finished:


# %%
@cuda.jit
def halve_kernel(y_n, x_n):
    i = cuda.grid(1)
    if i < x_n.size:
        v, steps = x_n[i], int32(0)
        while v > 1:
            v //= 2
            steps += 1
        y_n[i] = steps


x_8 = simulator.sim(np.array([1, 200, 3, 1, 90, 2, 1, 5], np.int32))
y_8 = simulator.sim(np.zeros(8, np.int32))
lesson.stepped(halve_kernel, 1, 8, y_8, x_8)

# %% [markdown]
# The loop runs seven times, for 200, and of 8 x 7 steps of a lane 17 are useful. A profiler counts this: *active threads
# per warp*, the average number of lanes that take part in an instruction, 32 at best.
#
# ## Exercise 31.2: active lanes


# %% tags=["exercise"]
def active_lanes(trips):
    """trips (n,): how often each thread runs the body of a loop -> lanes that take part, on average
    over all executions of the body. Warps are 32 threads in a row; the last may have fewer. Without
    any execution: 0.0.
    """
    # YOUR CODE


# %%
lesson.check("31.2", active_lanes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A warp executes the body as often as its busiest thread. The average is all trips, divided by all executions of all warps.
#
# </details>


# %% tags=["solution"]
# Solution 31.2
def active_lanes_solution(trips):
    """trips (n,): how often each thread runs the body of a loop -> lanes that take part, on average
    over all executions of the body. Warps are 32 threads in a row; the last may have fewer. Without
    any execution: 0.0.
    """
    executed = sum(trips[i : i + 32].max() for i in range(0, len(trips), 32))
    return trips.sum() / executed if executed else 0.0


active_lanes = lesson.yours(active_lanes, active_lanes_solution)


# %%
rng = np.random.default_rng(0)
lengths = rng.geometric(0.01, 4096)  # of 4096 answers: a few are long
orders = {"as they come": lengths, "sorted by length": np.sort(lengths)}
lesson.figures.bars({name: active_lanes(t) for name, t in orders.items()}, "active lanes of 32")

# %% [markdown]
# One thread per sequence is a bad idea, unless threads of a warp have equal work. The library gives a sequence to a warp
# or a block, and then *all* lanes have the same trip count.
#
# ## Atomics and contention
#
# Atomic additions to one address are done one after the other. If all threads count into a few counters in global memory,
# they queue. The remedy is **privatization**: each block counts in shared memory, whose atomics are fast and
# meet only threads of the same block, and adds each of its counters to global memory once.
#
# ## Exercise 31.3: count in private


# %% tags=["exercise"]
@cuda.jit
def histogram_kernel(count_T, digit_n):
    """count[d] += how many of the digits are d (int32). Grid: any; block 64. At most 64 different
    digits: T <= 64.

    Each digit is read once. Each block has counters in shared memory. To global memory it makes at
    most one atomic addition per counter.
    """
    # YOUR CODE


# %%
lesson.check("31.3", histogram_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `mine = cuda.shared.array(64, int32)`. Thread t sets `mine[t]` to 0, all wait, all count with
# `cuda.atomic.add(mine, digit, 1)`, all wait, and thread t adds `mine[t]` to `count_T[t]` if t < T.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The grid may be smaller than the digits: `for n in range(cuda.grid(1), digit_n.size, cuda.gridsize(1))`.
#
# </details>


# %% tags=["solution"]
# Solution 31.3
@cuda.jit
def histogram_kernel_solution(count_T, digit_n):
    """count[d] += how many of the digits are d (int32). Grid: any; block 64. At most 64 different
    digits: T <= 64.

    Each digit is read once. Each block has counters in shared memory. To global memory it makes at
    most one atomic addition per counter.
    """
    mine = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    mine[t] = 0
    cuda.syncthreads()  # all counters are 0
    for n in range(cuda.grid(1), digit_n.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, digit_n[n], 1)
    cuda.syncthreads()  # everything is counted
    if t < count_T.size:
        cuda.atomic.add(count_T, t, mine[t])


histogram_kernel = lesson.yours(histogram_kernel, histogram_kernel_solution)


# %% [markdown]
# ## Streams
#
# A GPU has engines that work at the same time: one copies to the device, one computes, one copies back. Work of one **stream**
# runs in order; work of different streams may overlap, but an engine does one thing at a time. So cut the data into
# chunks, and give each chunk its own stream.
#
# ## Exercise 31.4: a timeline


# %% tags=["exercise"]
def overlap(chunks):
    """chunks: [(in, compute, out), ...] durations -> for each chunk three pairs (begin, end).

    The three parts of a chunk run in this order. Each of the three engines takes the chunks in
    their order. Everything begins as early as that permits, the first at 0.
    """
    # YOUR CODE


# %%
lesson.check("31.4", overlap)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Remember when each engine is free. A part begins at the later of two times: its engine is free, and the part before it (of the
# same chunk) has ended.
#
# </details>


# %% tags=["solution"]
# Solution 31.4
def overlap_solution(chunks):
    """chunks: [(in, compute, out), ...] durations -> for each chunk three pairs (begin, end).

    The three parts of a chunk run in this order. Each of the three engines takes the chunks in
    their order. Everything begins as early as that permits, the first at 0.
    """
    free, spans = [0, 0, 0], []
    for chunk in chunks:
        ready, parts = 0, []
        for engine, duration in enumerate(chunk):
            begin = max(ready, free[engine])
            ready = free[engine] = begin + duration
            parts.append((begin, ready))
        spans.append(parts)
    return spans


overlap = lesson.yours(overlap, overlap_solution)


# %%
for n in (1, 2, 4, 8):
    spans = overlap([(24 / n, 32 / n, 16 / n)] * n)
    print(f"{n} chunks: {spans[-1][2][1]:g} ms")
spans = overlap([(6, 8, 4)] * 4)
rows = {
    name: [(*parts[e], str(c)) for c, parts in enumerate(spans)]
    for e, name in enumerate(("copy in", "compute", "copy out"))
}
lesson.figures.timeline(rows, "four chunks", "ms", width=lesson.figures.NARROW)

# %% [markdown]
# The longest engine is the limit: 32 ms, however many chunks there are, plus the first copy in and the last copy out. Training on
# several GPUs does this with buckets of gradients ([lesson 15](15_data_parallel.ipynb)): communication overlaps with the rest of the
# backward pass. How much of it is left to see?

# %%
r = lesson.record("bench_ddp/dim768, 4 GPU, bucket 32 MiB copy fp32/bf16")
print(lesson.records.machine([r]))
print(f"communication {r['comm_ms']:.1f} ms, of which the step waits for {r['exposed_ms']:.1f} ms")

# %% [markdown]
# ## Measure: is it the occupancy?
#
# [Lesson 1](01_threads.ipynb) added two arrays with blocks of different size. With `resident_blocks` we can say how many threads a
# multiprocessor held. (We assume that it needs 32 registers or fewer: it only
# adds. Then registers are not the limit.)

# %%
print("block   resident threads   GB/s    time per block, ns")
for block in (1, 8, 32, 64, 128, 256, 1024):
    r = lesson.record(f"bench_lessons/add_block_{block}/fp32")
    blocks = resident_blocks(block, 32, 0, H100)
    each = 1e6 * r["ms"] / (16777216 / block)
    print(f"{block:5} {blocks * block:18} {r['value']:6.0f} {each:21.2f}")
print(lesson.records.machine([r]))

# %% [markdown]
# Blocks of 64 hold as many threads as blocks of 128, and are half as fast. So occupancy is *not* what limits them. The last
# column says what does: up to 128 threads every row takes 0.6 ns per block. That is how fast this GPU starts blocks, and
# a block that does so little cannot keep it busy. Larger blocks, or more work per thread, are the remedy.
#
# ## The improvement
#
# Occupancy is a means to have enough bytes in flight, and more work per thread is another. The copy kernels of
# [lesson 2](02_memory.ipynb), with one and with four elements per thread; and two products of lesson 4, of which the faster one keeps its
# tile in registers, so that fewer of its warps fit:

# %%
for name in ("copy_naive", "copy_four", "linear_tiled_16", "linear_registers"):
    r = lesson.record(f"bench_lessons/{name}/fp32")
    print(f"{name:17} {r['value']:8,.1f} {r['unit']}")

# %% [markdown]
# ## Reading a report
#
# `ncu --set full python program.py` (Nsight Compute) runs every kernel several times, and prints these metrics, among
# many others. Begin at the top. The first two rows decide which of the others matter.
#
# | metric | what it says | what to do |
# |---|---|---|
# | `dram__throughput.avg.pct_of_peak_sustained_elapsed` | share of the memory's speed | near 90: move fewer bytes ([lesson 11](11_fusing.ipynb)) |
# | `sm__throughput.avg.pct_of_peak_sustained_elapsed` | share of the busiest unit of the multiprocessors | near 90: fewer instructions, tensor cores |
# | `sm__warps_active.avg.pct_of_peak_sustained_active` | the occupancy that was reached | far below your 31.1: too few blocks, or uneven ones |
# | `launch__registers_per_thread` | registers, as the compiler gave them | put it into 31.1 |
# | `launch__occupancy_limit_registers`, `..._shared_mem`, `..._warps`, `..._blocks` | the four limits of 31.1 | the smallest one counts |
# | `smsp__thread_inst_executed_per_inst_executed.ratio` | active lanes, your 31.2 | far below 32: divergence, or blocks that are not a multiple of 32 |
# | `l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum` over `l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum` | sectors per load of a warp | 4 for float32; 32 is not coalesced ([lesson 2](02_memory.ipynb)) |
# | `l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum` | passes that bank conflicts add | swizzle, pad ([lesson 14](14_tensor_cores.ipynb)) |
# | `smsp__inst_executed_op_local_ld.sum` | loads from local memory | not 0: spills, or indexed local arrays |
# | `smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio` | warps that wait for global memory | more bytes in flight |
# | `smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio` | warps that wait at a barrier | smaller blocks, fewer barriers |
#
# If both of the first rows are low, the kernel waits: for memory latency (too little in flight), at barriers, or for its own
# launch. The records of this repository hold times and bytes, not ncu reports: reading counters needs rights on the machine that
# rented GPUs often do not give.
#
# ## The library's kernel
#
# The attention for Hopper does by hand what 31.1 computes: one warpgroup (four warps, [lesson 23](23_hopper.ipynb)) only copies, and
# gives its registers to those that compute. Your histogram is the first half of the embedding's sort.

# %%
from xtrain.kernels import embedding
from xtrain.kernels.primitives import hopper_tiles

lesson.source(hopper_tiles.registers)
lesson.source(embedding.make_split_kernel)

# %% [markdown]
# Do its numbers fit? Three warpgroups compute, one copies, each of 128 threads, one block per multiprocessor:

# %%
few, many = hopper_tiles.registers(3, 1)
print(f"registers: {few} and {many}; together {128 * few + 3 * 128 * many:,} of 65,536")

# %% [markdown]
# ## What did not help
#
# *Blocks of 1024 threads.* 2 of them fill a multiprocessor, and when one waits at a barrier or ends, half of the warps are gone. In
# the table above they are slower than blocks of 256.
#
# *Occupancy as a goal.* The block of the attention above has 16 of 64 warps, and all registers. On tensor cores a tile in registers is worth
# more than warps that wait.
#
# ## More exercises
#
# 1. A kernel with 40 KB of shared memory per block of 128 threads: how many warps fit on an RTX 4090, and what is the limit?
# 2. How much shared memory may a block take, so that 8 blocks fit on an H100?
# 3. What is `active_lanes` of a kernel whose odd lanes take one branch and whose even lanes take the other?
# 4. In 31.4, copies in and out take 6 ms each, and computing 1 ms. What does overlapping gain?
#
# <details><summary>Solutions</summary>
#
# 1: 100 // 41 = 2 blocks, 8 warps: shared memory. 2: 228 / 8 = 28.5 KB, of which 1 KB is reserved: 27.5 KB. 3: 16. 4: Half: one
# chunk takes 13 ms, many chunks little more than 6, because the two copies run at the same time.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*: compute capabilities, and the limits of each.
# - NVIDIA, *Nsight Compute Documentation*: the metrics and how they are decoded.
# - V. Volkov, *Better Performance at Lower Occupancy*, 2010.
