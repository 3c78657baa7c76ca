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
# # 33 A step as one kernel
#
# *About 90 minutes. You need [lesson 19](19_decode_attention.ipynb) and [lesson 31](31_hardware.ipynb).*
#
# **The question.** One user talks to a model of 135 million parameters. A decoding step is five
# kernels per layer, 30 layers, all in one CUDA graph, and each kernel takes 2 to 3 microseconds,
# however little it has to do. What if the whole step were *one* kernel, which never ends between
# two layers?
#
# Then its blocks have to wait for each other, and that is the one new idea: **blocks that wait at
# counters in global memory**. You will write such a wait, divide a step into a table of tasks that
# cannot deadlock, write the kernel that works through the table again and again without resetting
# anything, and compute when each task runs.

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
from numba import cuda, float32, int64

import xtrain
from xtrain import lesson, simulator
from xtrain.kernels.primitives.ptx import atomic_add_release, load_acquire, prefetch
from xtrain.kernels.rope import rope_tables

KIND, STAGE, SHARE, SHARES, WAIT, ARRIVALS, SIGNAL = range(7)  # columns of a table of tasks

# %% [markdown]
# ## Two to three microseconds a kernel
#
# How long should a layer take? A step reads every weight once, so divide its bytes by the memory's
# speed. For the shape of SmolLM2-135M in bf16, and the 3.35 TB/s of an H100's data sheet:

# %%
C, H, G, D, F, L = 576, 9, 3, 64, 1536, 30
parts = {
    "QKV": C * (H + 2 * G) * D,
    "output projection": C * H * D,
    "gate and up": 2 * F * C,
    "down": F * C,
}
for name, n in parts.items():
    print(f"{name:18} {2 * n / 1e6:5.2f} MB   {2 * n / 3.35e6:5.2f} µs")
print(
    f"{'a layer':18} {2 * sum(parts.values()) / 1e6:5.2f} MB   "
    f"{2 * sum(parts.values()) / 3.35e6:5.2f} µs"
)

# %% [markdown]
# How long does it take? On one H100 a step of one sequence with 128 keys takes 387 µs in separate kernels,
# which is 13 µs per layer, 2.6 per kernel: six times what the bytes need. Launching is not the reason,
# since all kernels are in a CUDA graph ([lesson 10](10_profiling.ipynb)). It is what happens at the
# *boundary* between two kernels: the last block finishes, its writes are flushed, the next kernel's blocks
# start, and only then do they issue their first loads. During much of this time, memory is idle.
#
# A kernel boundary does two things that we need: it *waits* until all blocks are done, and what they
# wrote is *visible* afterwards. Can blocks do both by themselves, without ending?
#
# ## Waiting, by hand
#
# A small problem with the same structure as the layers of a model: in every round, each element becomes
# the sum of itself and of its two neighbours (the last one's neighbour is the first). A block owns 32
# elements, and at its edges it needs what other blocks have computed in the round before.

# %%
x = np.array([0, 0, 1, 0, 0, 0], np.int32)
for r in range(3):
    x = np.roll(x, 1) + x + np.roll(x, -1)
    print(f"after round {r}: {x}")

# %% [markdown]
# With separate kernels, each round is a launch. There are two rows, and round r reads row r % 2 and
# writes the other one:


# %%
@cuda.jit
def one_round_kernel(x_2n, r):
    i, n = cuda.grid(1), x_2n.shape[1]
    old, new = r % 2, (r + 1) % 2
    if i < n:
        x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]


def start(n):
    """Two rows; the first is 0 with a single 1."""
    x = np.zeros((2, n), np.int32)
    x[0, 2] = 1
    return x


x_2n = lesson.array(start(80))
for r in range(4):
    lesson.launch(one_round_kernel, 3, 32, x_2n, r)
four_rounds = lesson.host(x_2n)[0]
print(four_rounds[:8], "... ", four_rounds[-3:])

# %% [markdown]
# In *one* kernel the blocks meet after each round, at a **counter** in global memory. Each block adds
# 1 to it when it has written its elements (it *arrives*), and waits until all blocks have arrived.
# Four things must hold:
#
# | what | why |
# |---|---|
# | `cuda.syncthreads()` before thread 0 arrives | the other threads of the block must have written |
# | the addition **releases**: `atomic_add_release(count, i, int64(1))` | what the block has written becomes visible before the sum does |
# | the read **acquires**: `load_acquire(count, i)` | what is read later is not older than the sum |
# | `cuda.syncthreads()` after thread 0 has waited | the other threads must not run ahead |
#
# A plain read would not do: the compiler may read once and keep the value in a register, and then the
# loop never ends. `cuda.atomic.add` alone would not do either: it counts correctly, but it does not
# order the writes before it. [Lesson 19](19_decode_attention.ipynb) had `cuda.threadfence()` for this; the two functions above
# are cheaper, as they order the accesses of this pair and not all fences of the GPU.
#
# The counter is **never reset**. Who should do it, and when? Another block may still be reading it.
# Instead the target grows: after round r (from 0) all blocks together have arrived
# `(r + 1) * cuda.gridDim.x` times. And because a fast block may already have arrived for the next
# round, a block waits while the count is *less* than the target, not while it differs.
#
# ## Exercise 33.1: all rounds in one kernel


# %% tags=["exercise"]
@cuda.jit
def rounds_kernel(x_2n, count_1, rounds):
    """`rounds` rounds: x[new, i] = x[old, i - 1] + x[old, i] + x[old, i + 1], indices modulo n, old
    = r % 2, new = (r + 1) % 2.

    x: (2, n) int32. count: (1,) int64, 0 at first. Grid ceil(n / 32), block 32, all blocks
    resident. Between two rounds all blocks wait for each other, at count[0].
    """
    # YOUR CODE


# %%
lesson.check("33.1", rounds_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `for r in range(rounds):` the body of `one_round_kernel`; then a barrier, thread 0 arrives and
# waits, and another barrier. Threads past the end take part in the barriers.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Thread 0: `atomic_add_release(count_1, 0, int64(1))`, and then
# `while load_acquire(count_1, 0) < (r + 1) * cuda.gridDim.x: pass`.
#
# </details>


# %% tags=["solution"]
# Solution 33.1
@cuda.jit
def rounds_kernel_solution(x_2n, count_1, rounds):
    """`rounds` rounds: x[new, i] = x[old, i - 1] + x[old, i] + x[old, i + 1], indices modulo n, old
    = r % 2, new = (r + 1) % 2.

    x: (2, n) int32. count: (1,) int64, 0 at first. Grid ceil(n / 32), block 32, all blocks
    resident. Between two rounds all blocks wait for each other, at count[0].
    """
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.syncthreads()  # all threads have written
        if cuda.threadIdx.x == 0:
            atomic_add_release(count_1, 0, int64(1))
            while load_acquire(count_1, 0) < (r + 1) * cuda.gridDim.x:
                pass
        cuda.syncthreads()  # thread 0 has waited


rounds_kernel = lesson.yours(rounds_kernel, rounds_kernel_solution)


# %%
x_2n, count = lesson.array(start(80)), lesson.array(np.zeros(1, np.int64))
lesson.launch(rounds_kernel, 3, 32, x_2n, count, 4, resident=True)
print("as with four kernels:", np.array_equal(lesson.host(x_2n)[0], four_rounds))
print("the counter:", int(lesson.host(count)[0]), "= 4 rounds x 3 blocks")

# %% [markdown]
# ## Without release, and with a block too many
#
# What if the addition does not release? On a GPU the kernel may give the right numbers in every test, and
# wrong ones later: nothing orders the accesses, so the timing decides. The simulator knows which accesses a release and an acquire put in order, and every
# other pair is a race:


# %%
@cuda.jit
def unordered_kernel(x_2n, count_1, rounds):
    i, n = cuda.grid(1), x_2n.shape[1]
    for r in range(rounds):
        old, new = r % 2, (r + 1) % 2
        if i < n:
            x_2n[new, i] = x_2n[old, (i - 1) % n] + x_2n[old, i] + x_2n[old, (i + 1) % n]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(count_1, 0, 1)  # counts, and releases nothing
            while load_acquire(count_1, 0) < (r + 1) * cuda.gridDim.x:
                pass
        cuda.syncthreads()


def simulated(kernel, **options):
    arrays = simulator.sim(start(80)), simulator.sim(np.zeros(1, np.int64))
    simulator.run(kernel, 3, 32, *arrays, np.int64(4), **options)


lesson.report(simulated, unordered_kernel)

# %% [markdown]
# The second danger is worse. A GPU starts a block only when a multiprocessor has room for it, and a
# block leaves only when it has ended. If there is room for two of three blocks, these two wait for
# the third, which cannot start before one of them ends. `resident=2` gives the simulator such a GPU:

# %%
lesson.report(simulated, rounds_kernel, resident=2)

# %% [markdown]
# No block can see this from the inside, so it must be excluded *before* the launch. `resident_blocks`
# in `kernels/runtime/launch.py` asks the driver what you computed in 31.1: how many blocks of this kernel a
# multiprocessor holds, by registers, shared memory and warps; and multiplies by the number of
# multiprocessors. `launch(..., resident=True)` refuses a larger grid. It also launches the kernel as a
# *cooperative* one: then the driver, too, either runs all blocks at the same time or refuses. In the simulator there is room for 3:

# %%
x_2n, count = simulator.sim(start(120)), simulator.sim(np.zeros(1, np.int64))
try:
    lesson.launch(rounds_kernel, 4, 32, x_2n, count, 4, resident=True)
except ValueError as error:
    print(error)

# %% [markdown]
# ## A table of tasks
#
# The stages of a decoding step are not alike. The QKV product of the model above has 60 tiles
# of 16 rows of weights, the head has 3,072, and attention has one unit per sequence, key head and part of the
# keys. There may be more units than blocks, or fewer. So the host writes a **table**: each row is one
# task, the *share* of one stage that one block does.
#
# | column | meaning |
# |---|---|
# | kind, stage | what to compute |
# | share, shares | this task is share 0, 1, ... of so many: units share, share + shares, ... |
# | wait, arrivals | begin when so many tasks have arrived at counter `wait` |
# | signal | arrive at this counter when done |
#
# Stage s (from 0) waits at counter s, for all tasks of the stage before it, and signals counter s + 1.
# The first stage waits for nothing: 0 arrivals. A stage has as many tasks as there are blocks, or as it
# has units if these are fewer. Block b of P does rows b, b + P, b + 2P, ..., in this order.
#
# ## Exercise 33.2: the table


# %% tags=["exercise"]
def make_tasks(stages, blocks):
    """stages: [(kind, units), ...] in order -> the table: a list of rows (kind, stage, share,
    shares, wait, arrivals, signal).

    Stage s waits at counter s for all tasks of stage s - 1 and signals counter s + 1. It has as
    many tasks as possible, at most `units` and at most `blocks`. A task waits only for tasks in
    earlier rows.
    """
    # YOUR CODE


# %%
lesson.check("33.2", make_tasks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `shares = min(units, blocks)`. Remember the `shares` of the stage before: these are the arrivals, 0 at first.
#
# </details>


# %% tags=["solution"]
# Solution 33.2
def make_tasks_solution(stages, blocks):
    """stages: [(kind, units), ...] in order -> the table: a list of rows (kind, stage, share,
    shares, wait, arrivals, signal).

    Stage s waits at counter s for all tasks of stage s - 1 and signals counter s + 1. It has as
    many tasks as possible, at most `units` and at most `blocks`. A task waits only for tasks in
    earlier rows.
    """
    rows, before = [], 0
    for s, (kind, units) in enumerate(stages):
        shares = min(units, blocks)
        for share in range(shares):
            rows.append((kind, s, share, shares, s, before, s + 1))
        before = shares
    return rows


make_tasks = lesson.yours(make_tasks, make_tasks_solution)


# %% [markdown]
# One sequence, two layers, three blocks, with the few units of a tiny model:

# %%
NAMES = ["EMBED", "QKV", "ATTEND", "OUT", "GATE_UP", "DOWN", "HEAD"]
UNITS = {"EMBED": 1, "QKV": 3, "ATTEND": 2, "OUT": 2, "GATE_UP": 4, "DOWN": 2, "HEAD": 5}
layer = ["QKV", "ATTEND", "OUT", "GATE_UP", "DOWN"]
step = [(NAMES.index(name), UNITS[name]) for name in ["EMBED", *layer, *layer, "HEAD"]]
tasks = make_tasks(step, 3)
print("row block  task             waits for    signals")
for row, (kind, _, share, shares, wait, arrivals, signal) in enumerate(tasks[:16]):
    print(
        f"{row:3} {row % 3:5}  {NAMES[kind]:8} {share} of {shares}   {arrivals} at {wait:2}      "
        f"{signal:2}"
    )
print(f"... {len(tasks)} rows in all")

# %% [markdown]
# **There is no deadlock**, whatever the durations. The proof is short, and it needs two properties of the table: a task waits only
# for tasks in *earlier rows*, and a block does its rows in *ascending order*. Suppose that some tasks never
# finish, and take the one in the earliest row. All that it waits for is in earlier rows, so it is
# done, and the counter has reached its target. All earlier rows of its own block are done, too, so the block
# has come to this row. And the block runs, because all blocks are resident. So the task finishes: a
# contradiction.
#
# The first property can be checked on the host, once for every table. Exchange two rows of different stages, and the check objects:


# %%
def check_tasks(tasks):
    """Raise ValueError unless each task waits for all tasks that signal its counter.

    These tasks must be in earlier rows.
    """
    signals = [task[SIGNAL] for task in tasks]
    for row, task in enumerate(tasks):
        signallers = signals.count(task[WAIT])
        earlier = signals[:row].count(task[WAIT])
        if not signallers == earlier == task[ARRIVALS]:
            raise ValueError(
                f"task {row} waits for {task[ARRIVALS]} arrivals at counter {task[WAIT]}: "
                f"{earlier} earlier tasks signal it, {signallers} in all"
            )


check_tasks(tasks)
swapped = [*tasks[:3], tasks[4], tasks[3], *tasks[5:]]
try:
    check_tasks(swapped)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Counters that outlive a launch
#
# A CUDA graph replays the step for every token, and nothing resets the counters in between. (A kernel that did so
# would be one more boundary.) So the rounds of 33.1 continue from launch to launch: in launch e (from 0), a task
# waits until its counter has reached `arrivals * (e + 1)`.
#
# How does a block know e? Every block, when it has finished its last row, arrives at **counter 0**, also if the table
# has no row for it; nothing else arrives there. A block that is about to start has not finished, so in launch e
# counter 0 is at least e P and less than (e + 1) P: with an integer division, e = counter 0 // P. (The first stage
# waits at counter 0 too, but for 0 arrivals.)
#
# ## Exercise 33.3: the kernel that works through the table
#
# Let all stages do what a round of 33.1 did, from row s of x to row s + 1. A decoding step has the same structure, with seven kinds of
# task instead of one.


# %% tags=["exercise"]
@cuda.jit
def tasks_kernel(x_Sn, tasks_RF, count_S):
    """One step. Task (stage s, share, shares): x[s + 1, i] = x[s, i - 1] + x[s, i] + x[s, i + 1],
    indices modulo n, for thread t's elements i = 32 * share + t, and on in steps of 32 * shares.

    Grid P, block 32, all resident. Block b does rows b, b + P, ... of the table; its columns are
    KIND, STAGE, ..., SIGNAL.
    x: (stages + 1, n) int32. count: (stages + 1,) int64, never reset: it continues from launch to
    launch. In launch e a task
    waits for (e + 1) times its arrivals. A block that has finished arrives at counter 0.
    """
    # YOUR CODE


# %%
lesson.check("33.3", tasks_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# At the start: `e = load_acquire(count_S, 0) // cuda.gridDim.x`. Then
# `for row in range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x)`: wait, barrier, compute, barrier, arrive.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The wait is for counter `tasks_RF[row, WAIT]`, until `tasks_RF[row, ARRIVALS] * (e + 1)`. The arrival is at
# `tasks_RF[row, SIGNAL]`. After the loop, thread 0 arrives at counter 0.
#
# </details>


# %% tags=["solution"]
# Solution 33.3
@cuda.jit
def tasks_kernel_solution(x_Sn, tasks_RF, count_S):
    """One step. Task (stage s, share, shares): x[s + 1, i] = x[s, i - 1] + x[s, i] + x[s, i + 1],
    indices modulo n, for thread t's elements i = 32 * share + t, and on in steps of 32 * shares.

    Grid P, block 32, all resident. Block b does rows b, b + P, ... of the table; its columns are
    KIND, STAGE, ..., SIGNAL.
    x: (stages + 1, n) int32. count: (stages + 1,) int64, never reset: it continues from launch to
    launch. In launch e a task
    waits for (e + 1) times its arrivals. A block that has finished arrives at counter 0.
    """
    n, t = x_Sn.shape[1], cuda.threadIdx.x
    e = load_acquire(count_S, 0) // cuda.gridDim.x
    for row in range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x):
        s, share, shares = tasks_RF[row, STAGE], tasks_RF[row, SHARE], tasks_RF[row, SHARES]
        if t == 0:
            while load_acquire(count_S, tasks_RF[row, WAIT]) < tasks_RF[row, ARRIVALS] * (e + 1):
                pass
        cuda.syncthreads()  # thread 0 has waited
        for i in range(32 * share + t, n, 32 * shares):
            x_Sn[s + 1, i] = x_Sn[s, (i - 1) % n] + x_Sn[s, i] + x_Sn[s, (i + 1) % n]
        cuda.syncthreads()  # all threads have written
        if t == 0:
            atomic_add_release(count_S, tasks_RF[row, SIGNAL], int64(1))
    if t == 0:
        atomic_add_release(count_S, 0, int64(1))  # this block has finished


tasks_kernel = lesson.yours(tasks_kernel, tasks_kernel_solution)


# %%
four = make_tasks([(0, 3), (0, 1), (0, 3), (0, 2)], 3)
tasks_RF, count_S = lesson.array(np.array(four, np.int32)), lesson.array(np.zeros(5, np.int64))
for e in range(3):
    x = np.zeros((5, 80), np.int32)
    x[0, 2] = e + 1
    x_Sn = lesson.array(x)
    lesson.launch(tasks_kernel, 3, 32, x_Sn, tasks_RF, count_S, resident=True)
    right = np.array_equal(lesson.host(x_Sn)[4], (e + 1) * four_rounds)
    print(f"launch {e}: right: {right}, counters {lesson.host(count_S).tolist()}")

# %% [markdown]
# An int64 counter that grows by 132 in each of 2,000 steps per second lasts for a million years. On a GPU, keep counters 128 bytes apart, so that
# blocks that wait at one do not slow down those that arrive at another.
#
# ## When does each task run?
#
# The proof said that no task needs to look at later rows. So the times can be computed row by row, from the top.
#
# ## Exercise 33.4: the time of every task


# %% tags=["exercise"]
def task_times(tasks, blocks, durations, hand_over):
    """-> [(begin, end), ...], a pair per row of the table. durations: of each row's task. tasks:
    rows as in 33.2, also of other tables.

    Row r is done by block r % blocks, after its earlier rows. A task begins as soon as its block is
    free and, if it waits for any arrivals, `hand_over` after the last task has ended that signals
    its counter. Everything starts at 0.
    """
    # YOUR CODE


# %%
lesson.check("33.4", task_times)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two things to remember: when each block is free, and for each counter when the last of its tasks has ended
# (`done = {}`, `done[signal] = max(done.get(signal, 0), end)`).
#
# </details>


# %% tags=["solution"]
# Solution 33.4
def task_times_solution(tasks, blocks, durations, hand_over):
    """-> [(begin, end), ...], a pair per row of the table. durations: of each row's task. tasks:
    rows as in 33.2, also of other tables.

    Row r is done by block r % blocks, after its earlier rows. A task begins as soon as its block is
    free and, if it waits for any arrivals, `hand_over` after the last task has ended that signals
    its counter. Everything starts at 0.
    """
    free, done, times = [0] * blocks, {}, []
    for row, task in enumerate(tasks):
        begin = free[row % blocks]
        if task[ARRIVALS]:
            begin = max(begin, done[task[WAIT]] + hand_over)
        end = begin + durations[row]
        free[row % blocks] = end
        done[task[SIGNAL]] = max(done.get(task[SIGNAL], 0), end)
        times.append((begin, end))
    return times


task_times = lesson.yours(task_times, task_times_solution)


# %% [markdown]
# The table from above as a picture. A unit takes as long as the number says, a hand-over takes 1, and the white gaps are
# blocks that wait:

# %%
EACH = dict(zip(NAMES, (2, 2, 3, 2, 2, 3, 3)))


def picture(tasks, blocks, hand_over, units):
    durations = []
    for kind, s, share, shares, *_ in tasks:
        own = len(range(share, units[s], shares))
        durations.append(own * EACH[NAMES[kind]])
    times = task_times(tasks, blocks, durations, hand_over)
    rows = {f"block {b}": [] for b in range(blocks)}
    for row, (task, (begin, end)) in enumerate(zip(tasks, times)):
        rows[f"block {row % blocks}"].append((begin, end, NAMES[task[KIND]]))
    return rows, max(end for _, end in times), sum(durations)


units = [n for _, n in step]
rows, end, busy = picture(tasks, 3, 1, units)
print(f"{end} units of time; the blocks are busy {busy / (3 * end):.0%} of it")
lesson.figures.timeline(rows, "two layers on three blocks", "time")

# %% [markdown]
# Two reasons for gaps. *Uneven shares*: GATE_UP has four units for three blocks, so two blocks wait while one does a second
# unit. And *hand-overs*, after each stage, however short it is. With more blocks the first shrinks with the stages, and the second stays:

# %%
for blocks in (1, 2, 3, 6):
    for hand_over in (0, 1):
        _, end, busy = picture(make_tasks(step, blocks), blocks, hand_over, units)
        print(
            f"{blocks} blocks, hand-over {hand_over}: {end:3} units of time, busy "
            f"{busy / (blocks * end):4.0%}"
        )

# %% [markdown]
# ## Measure
#
# A kernel with all seven kinds of task, in bf16 and on tensor cores, against xtrain's separate kernels. Both run in a CUDA graph,
# with 128 keys, and were measured in one run. (xtrain does not contain this kernel, for the reason that you are about to see. A small version of it is below.)

# %%
STEPS = [
    lesson.record(f"bench_one_kernel/{model}/B={B} context=128/bf16")
    for model in ("SmolLM2-135M", "Qwen3-0.6B")
    for B in (1, 4, 8)
]
print(lesson.records.machine(STEPS))
for r in STEPS:
    separate = r["ms"] * r["ratio"]
    print(
        f"{r['name']:12} {r['shape']:18} separate {separate:.3f} ms   one kernel {r['ms']:.3f} ms "
        f"({r['ms'] / separate - 1:+.0%})"
    )

# %% [markdown]
# It is slower with one sequence, and in the best case 4 % faster. This is less than the first section of this lesson
# suggests. The reason can be measured, too: leave stages out of the *table*, and time the rest. (The result is then
# wrong, but the work is done.) Here a first version of the kernel, all 30 layers, one sequence, 128 keys, 132 blocks of
# 256 threads, one H100, as [the note](notes/one_kernel.md) has it:

# %%
ALONE = {  # microseconds of all layers, with only these stages in the table
    "no stages": 5,
    "QKV": 72,
    "attention": 111,
    "output projection": 59,
    "gate and up": 127,
    "down": 90,
    "all stages": 469,
}
each = {name: us / L for name, us in ALONE.items() if name not in ("no stages", "all stages")}
print("the sum of the parts:", sum(us for name, us in ALONE.items() if name != "all stages"), "µs")
lesson.figures.bars(each, "µs per stage", "time of a stage in the one kernel")

# %% [markdown]
# The whole is the sum of its parts, so stages do not get in each other's way. And the smallest of them, the output projection, has to read
# 0.66 MB, which takes 0.2 µs, and takes 2.0. What is the rest? A **hand-over** is a chain, and each link waits for the one before:
#
# 1. the block's last write, and the barrier;
# 2. the release: the writes must have arrived in the L2 cache before the sum does;
# 3. the atomic addition, in L2;
# 4. the acquire: another block reads the counter in L2, again and again, and sees the sum;
# 5. the barrier, and the first read of the new data, which come from L2.
#
# Each of these costs hundreds of nanoseconds of *latency*, and no bandwidth shortens it. Together they are about 2 µs, as a
# kernel shows that does nothing else: in each round all blocks write a vector of C numbers together, and then read all of it.

# %%
rounds = [
    lesson.record(f"bench_handover/counter/C={C_} blocks=132/int32") for C_ in (576, 1536, 2048)
]
print(lesson.records.machine(rounds))
for r in rounds:
    print(f"{r['shape']:18} {r['value']:.2f} µs per round")

# %% [markdown]
# A kernel boundary is not much worse, because the separate kernels already do the best part of it: on Hopper the next kernel may start before
# the previous one has ended (*programmatic dependent launch*, `overlap=True`), so it issues the loads of its first weights and then waits.
# With five hand-overs per layer:

# %%
least = 5 * L * rounds[0]["value"] / 1000
print(f"{least:.2f} ms of hand-overs, of {STEPS[0]['ms']:.3f} ms per step")

# %% [markdown]
# Even if all data were free, a step could not be faster than 0.3 ms, and only *fewer stages* would change that.
#
# ## The improvement
#
# While a block waits, memory is idle: nothing is in flight, except for what was requested *before* the wait. The activations depend on the stage
# before, but the **weights do not**. So a task first issues the loads of its weights, then waits, and finds the weights in registers when it has the
# activations. (Attention prefetches keys and values of earlier tokens.)
#
# In the first version a warp had 4 chunks of weights in flight. For gate/up and down that was half of a tile: a second round of loads came
# after the wait, and its latency was added to the stage. That is why these two stages stand out among the products. The version that was
# measured has up to 8 chunks in flight, so that a tile is a single round. And it arrives by an addition that does not return the old value
# (`red` instead of `atom`), so no thread waits for it. ([The note](notes/one_kernel.md) has the times.)
#
# With all of that the one kernel comes close to the separate kernels, and passes them in one case of six. That is not worth a second kernel for every model,
# so the engine decodes with separate kernels.
#
# ## A decoding step in one kernel
#
# Here is the whole step, for one sequence in float32, without tensor cores. The wait and the arrival are those of 33.1, as device functions:


# %%
@cuda.jit(device=True)
def wait_for_count(counters, i, target):
    """The block waits until counter i has reached the target."""
    if cuda.threadIdx.x == 0:
        while load_acquire(counters, i) < target:
            pass
    cuda.syncthreads()  # thread 0 has waited


@cuda.jit(device=True)
def arrive(counters, i):
    """The block signals counter i."""
    cuda.syncthreads()  # all threads have written
    if cuda.threadIdx.x == 0:
        atomic_add_release(counters, i, int64(1))


# %% [markdown]
# A product is divided by its rows, one thread a row. All weights of an xtrain model lie in one array, its *arena*, so a row of a matrix
# is an index into it. Where a norm precedes the product, its factor 1 / rms(x) is the same for all columns, and one loop does both:


# %%
@cuda.jit(device=True)
def dot(weights, row, x_K):
    """weights[row : row + K] times x."""
    acc = float32(0.0)
    for k in range(x_K.size):
        acc += weights[row + k] * x_K[k]
    return acc


@cuda.jit(device=True)
def normed_dot(weights, row, norm, x_K, eps):
    """weights[row : row + K] times RMSNorm(x), whose weights begin at `norm`."""
    acc, squares = float32(0.0), float32(0.0)
    for k in range(x_K.size):
        acc += weights[row + k] * x_K[k] * weights[norm + k]
        squares += x_K[k] * x_K[k]
    return acc / math.sqrt(squares / float32(x_K.size) + eps)


# %% [markdown]
# Attention of one head (lessons [18](18_kv_cache.ipynb) and [19](19_decode_attention.ipynb)): thread d owns channel d. Query heads that share a key head may be in different blocks, and
# only one of them writes the new key and value to the cache. The others must not read them there, because nothing orders the two:


# %%
@cuda.jit(device=True)
def rotated(qkv_P, start, d, D, cos, sin):
    """Channel d of a head of qkv after RoPE. cos, sin (D / 2): those of the token's position."""
    half = D // 2
    x, c = qkv_P[start + d], d % half
    if d < half:
        return x * cos[c] - qkv_P[start + d + half] * sin[c]
    return x * cos[c] + qkv_P[start + d - half] * sin[c]


@cuda.jit(device=True)
def attend(o_Q, qkv_P, k_SGD, v_SGD, cos, sin, t, head):
    """Output of one query head for the token at position t. D <= 32.

    The token's key and value are added to the cache.
    """
    q_s, k_s = cuda.shared.array(32, float32), cuda.shared.array(32, float32)
    _, G, D = k_SGD.shape
    H, d = o_Q.size // D, cuda.threadIdx.x
    g = head // (H // G)
    key, value = (H + g) * D, (H + G + g) * D  # where they begin in qkv
    cuda.syncthreads()  # the head before has been computed
    if d < D:
        q_s[d] = rotated(qkv_P, head * D, d, D, cos, sin) / math.sqrt(float32(D))
        k_s[d] = rotated(qkv_P, key, d, D, cos, sin)
        if head % (H // G) == 0:
            k_SGD[t, g, d] = k_s[d]
            v_SGD[t, g, d] = qkv_P[value + d]
    cuda.syncthreads()
    if d < D:
        top, total, acc = float32(-math.inf), float32(0.0), float32(0.0)
        for s in range(t + 1):
            score = float32(0.0)
            for c in range(D):
                score += q_s[c] * (k_s[c] if s == t else k_SGD[s, g, c])
            new_top = max(top, score)
            shrink, weight = math.exp(top - new_top), math.exp(score - new_top)
            acc = acc * shrink + weight * (qkv_P[value + d] if s == t else v_SGD[s, g, d])
            total = total * shrink + weight
            top = new_top
        o_Q[head * D + d] = acc / total


# %% [markdown]
# And the kernel, as in 33.3. Look for the step number e, the loop over rows, the loads of weights *before* the wait (here a prefetch of the first row of
# weights), and the two arrivals at the end. The residual stream h is read by all tasks of a stage and written by those of the next stage but
# one: a task that writes waits, through the stages between, until all that read are done.

# %%
EMBED, QKV, ATTEND, OUT, GATE_UP, DOWN, HEAD = range(7)


@cuda.jit
def step_kernel(
    logits_V, h_C, qkv_P, o_Q, act_F, k_LSGD, v_LSGD, count_S, id_1, tasks_RF, weights,
    matrices_LK, norms_LK, cos_TR, sin_TR, t, eps,
):  # fmt: skip
    """Logits of the token after id_1[0], which is at position t. Grid P, block 32, all resident.

    matrices, norms (layers + 1, kinds): where the matrix of a kind of task, and the norm before
    it, begin in `weights`. The head is in the last row, the embedding in the first.
    """
    tid, C, Q, F = cuda.threadIdx.x, h_C.size, o_Q.size, act_F.size
    e = load_acquire(count_S, 0) // cuda.gridDim.x
    for row in range(cuda.blockIdx.x, tasks_RF.shape[0], cuda.gridDim.x):
        kind, share, shares = tasks_RF[row, KIND], tasks_RF[row, SHARE], tasks_RF[row, SHARES]
        layer = max(tasks_RF[row, STAGE] - 1, 0) // 5
        w, norm = matrices_LK[layer, kind], norms_LK[layer, kind]
        first, step = 32 * share + tid, 32 * shares
        if kind != EMBED and kind != ATTEND:
            columns = Q if kind == OUT else F if kind == DOWN else C
            prefetch(weights, w + share * 32 * columns)
        wait_for_count(count_S, tasks_RF[row, WAIT], tasks_RF[row, ARRIVALS] * (e + 1))
        if kind == EMBED:
            for i in range(first, C, step):
                h_C[i] = weights[w + id_1[0] * C + i]
        elif kind == QKV:
            for i in range(first, qkv_P.size, step):
                qkv_P[i] = normed_dot(weights, w + i * C, norm, h_C, eps)
        elif kind == ATTEND:
            for head in range(share, Q // k_LSGD.shape[3], shares):
                attend(o_Q, qkv_P, k_LSGD[layer], v_LSGD[layer], cos_TR[t], sin_TR[t], t, head)
        elif kind == OUT:
            for i in range(first, C, step):
                h_C[i] += dot(weights, w + i * Q, o_Q)
        elif kind == GATE_UP:
            for i in range(first, F, step):
                gate = normed_dot(weights, w + i * C, norm, h_C, eps)
                up = normed_dot(weights, w + (F + i) * C, norm, h_C, eps)
                act_F[i] = gate / (float32(1.0) + math.exp(-gate)) * up
        elif kind == DOWN:
            for i in range(first, C, step):
                h_C[i] += dot(weights, w + i * F, act_F)
        else:
            for i in range(first, logits_V.size, step):
                logits_V[i] = normed_dot(weights, w + i * C, norm, h_C, eps)
        arrive(count_S, tasks_RF[row, SIGNAL])
    arrive(count_S, 0)  # this block has finished


# %% [markdown]
# A tiny Llama with random weights, a table for three blocks, and four tokens, one launch each. The last column is the largest difference from the logits of the model itself:

# %%
shape = dict(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48)
model = xtrain.Transformer(xtrain.ModelConfig(**shape, max_seq_len=16, qk_norm=False), 0, "cpu")
c, decoder = model.config, model.model
matrices, norms = np.zeros((2, c.n_layers + 1, 7), np.int64)
for i, block in enumerate(decoder.layers):
    matrices[i, QKV] = block.self_attn.qkv.weight.offset
    matrices[i, OUT] = block.self_attn.o_proj.weight.offset
    matrices[i, GATE_UP] = block.mlp.gate_up.weight.offset
    matrices[i, DOWN] = block.mlp.down_proj.weight.offset
    norms[i, QKV] = block.input_layernorm.weight.offset
    norms[i, GATE_UP] = block.post_attention_layernorm.weight.offset
matrices[0, EMBED] = decoder.embed_tokens.weight.offset
matrices[-1, HEAD] = model.lm_head.offset
norms[-1, HEAD] = decoder.norm.weight.offset

query_width = c.n_heads * c.head_dim
qkv_width = query_width + 2 * c.n_kv_heads * c.head_dim
outputs = {EMBED: c.dim, QKV: qkv_width, OUT: c.dim, GATE_UP: c.hidden_dim}
outputs |= {DOWN: c.dim, HEAD: c.vocab_size}
units = {kind: -(-n // 32) for kind, n in outputs.items()} | {ATTEND: c.n_heads}
stages = [EMBED, *[QKV, ATTEND, OUT, GATE_UP, DOWN] * c.n_layers, HEAD]
tasks = make_tasks([(kind, units[kind]) for kind in stages], 3)
check_tasks(tasks)

zeros = lambda *shape: lesson.array(np.zeros(shape, np.float32))
logits = zeros(c.vocab_size)
buffers = zeros(c.dim), zeros(qkv_width), zeros(query_width), zeros(c.hidden_dim)
cache = [zeros(c.n_layers, 16, c.n_kv_heads, c.head_dim) for _ in range(2)]
count = lesson.array(np.zeros(len(stages) + 1, np.int64))
constants = [np.array(tasks, np.int32), model.arena.weights, matrices, norms]
constants = [lesson.array(x) for x in (*constants, *rope_tables(c.head_dim, 16, c.rope_theta))]
ids = [3, 14, 15, 9]
expected = model(np.array([ids])).data[0, :, : c.vocab_size]
for t, token in enumerate(ids):
    arguments = *buffers, *cache, count, lesson.array(np.array([token], np.int32)), *constants
    lesson.launch(
        step_kernel, 3, 32, logits, *arguments, np.int64(t), np.float32(c.norm_eps), resident=True
    )
    got = lesson.host(logits)
    error = np.abs(got - expected[t]).max()
    print(
        f"token {t}: next is {got.argmax()}, in the model {expected[t].argmax()}, difference below "
        f"1e-6: {error < 1e-6}"
    )

# %% [markdown]
# **A fault that no simulator found.** On the GPU the tokens of two sequences changed after a batch of another size had been decoded. Each batch size has its own CUDA
# graph, and all graphs share one pool of memory: what is free after the capture of one graph may be used by the next capture. But a graph writes to its
# addresses *in every replay*, also to those that were free again when its capture ended. The counters of a second step had been allocated at such addresses. They are
# not like other buffers, which a launch writes before it reads them: **what outlives a launch must lie outside of the pool**. Such counters
# are now allocated apart.
#
# ## The library's kernels
#
# They stay separate. Most of what a hand-over inside one kernel gains, a *launch* can have as well: the next kernel starts while the previous one ends, loads its first weights, and
# then waits for its inputs (`wait_for_previous`). That is one attribute of the launch, and `resident=True` is another one:

# %%
from xtrain.kernels.runtime import overlap

lesson.source(overlap.launch_overlapping)
lesson.source(overlap.launch_resident)

# %% [markdown]
# ## What did not help
#
# *More blocks, or more threads.* Hand-overs get slower: more blocks must arrive at each counter, or more threads at each barrier.
#
# *Fewer tasks.* Fewer arrivals, but then fewer multiprocessors load weights.
#
# *Prefetching the weights of the next task into the L2 cache*, before a block begins its present one. The loads that are in flight
# during the wait already hide the latency of memory; what remains is the hand-over.
#
# *Words with a seal*, 8 bytes that hold a number and its round, which every thread polls: no fence, no counter, no second read. (NCCL's
# low-latency protocol, LL, does this.) With one block they are faster than a counter, with 132 blocks they are not.
#
# *Resetting the counters.* A kernel of its own before the step would reset them, and it is a boundary. Inside the step, the block that resets must know that all
# others have stopped waiting, which needs another counter.
#
# What each of these cost, and why, is in a note: [a decoding step in one kernel](notes/one_kernel.md).
#
# ## More exercises
#
# 1. In 33.1 there are two rows. Why would three rows permit every block to be a round ahead, and does this table of hand-overs allow it?
# 2. `rounds_kernel` waits for all blocks, though a block needs its two neighbours only. Give each block a counter of its own. What are the targets
#    now, and is a deadlock still impossible with all blocks resident?
# 3. What goes wrong if blocks take tasks from an atomic ticket ("the next row that no block has taken") instead of rows b, b + P, ...? Is a deadlock possible? What happens
#    to the bits?
# 4. Merge OUT into ATTEND: each task of attention multiplies its heads' outputs by their columns of Wo. It saves a hand-over per layer. What must be summed,
#    by whom, and in which order?
#
# <details><summary>Solutions</summary>
#
# 1: With two rows, a block that is one round ahead would overwrite what a slow neighbour still reads. With three it could write one more row, but the wait is for all
# blocks of the round, so none gets ahead. 2: Block b arrives at counter b, and waits until those of its neighbours have reached r + 1. The block that is furthest behind
# never waits, so there is no deadlock. 3: No deadlock, even if blocks are not resident: rows are taken in order, by blocks that run. The bits stay the same, if a
# task's result does not depend on which block computes it. But an atomic per task is on the path, and weights can be loaded before the wait only if the ticket is taken early.
# 4: The partial outputs of all tasks, C numbers each: written to memory and summed by the tasks that read delta, in the order of the heads. Float atomics would change
# the bits from run to run.
#
# </details>
#
# ## Sources
#
# - S. Xiao and W. Feng, *Inter-Block GPU Communication via Fast Barrier Synchronization*, 2010.
# - K. Gupta, J. A. Stuart, J. D. Owens, *A Study of Persistent Threads Style GPU Programming for GPGPU Workloads*, 2012.
# - NVIDIA, *PTX ISA*: the memory consistency model, release and acquire patterns. *CUDA C++ Programming Guide*: cooperative launches.
# - B. Spector et al., *Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B*, 2025: a step as one kernel in C++, with counters.
