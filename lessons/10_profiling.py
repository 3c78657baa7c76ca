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
# # 10 Profiling
#
# *About 75 minutes. You need [lesson 9](09_batching.ipynb).*
#
# **The question.** In lesson 9, two of three improvements were wrong because nothing had been
# measured first: what does the step wait for? Measuring is no easier than writing kernels. The
# obvious stopwatch around a kernel measures something else, and gives no warning. How do you time
# work that runs on another processor, behind a queue?
#
# You will write a correct timer, the number that says whether kernel times matter at all, and a
# kernel that can be part of a **CUDA graph**, which removes Python from the step.

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
from numba import cuda

from xtrain import lesson, simulator
from xtrain.lesson import Machine

# %% [markdown]
# ## A machine on paper
#
# Real times differ from run to run, and you may not have a GPU here. So begin with a machine that
# exists only on paper: the two workers of lesson 9, with exact clocks. A stopwatch misbehaves on it
# just as it does on a GPU.

# %%
lesson.source(Machine)

# %% [markdown]
# By hand: a launch takes Python 10 microseconds, the kernel runs for 500, and the first launch of a
# kernel compiles it, which takes 300 milliseconds. Here are three ways to use a stopwatch:

# %%
machine = Machine(launch_us=10, compile_us=300_000)
start = machine.clock()
machine.launch("norm", 500)
print("first call, stopwatch around the launch: ", machine.clock() - start)

start = machine.clock()
machine.launch("norm", 500)
print("second call, stopwatch around the launch:", machine.clock() - start)

start = machine.clock()
machine.launch("norm", 500)
machine.synchronize()
print("third call, waiting for the GPU:         ", machine.clock() - start)

# %% [markdown]
# The true answer is 500. The first number is dominated by compilation. The second is the launch
# alone: Python enqueues the kernel and continues. The third waits for the GPU, but it also waits
# for the two earlier runs, which were still in the queue.
#
# The remedy is a clock **on the GPU**. An *event* goes into the queue like a kernel; when the GPU
# reaches it, the GPU records the time. Record one event before and one after: their difference is
# the time of the work between them.

# %%
begin = machine.record()
machine.launch("norm", 500)
end = machine.record()
machine.synchronize()
print("between two events:", machine.elapsed_us(begin, end))

# %% [markdown]
# This is 10 too many, because the queue was empty: the first event was recorded at once, and then
# the GPU waited for the launch. We return to these 10 microseconds below.
#
# ## Exercise 10.1: a correct timer
#
# Warm up first (three calls are enough). Then time every run separately and return the **median**:
# now and then the machine does something else, and one such run in twenty distorts a mean.


# %% tags=["exercise"]
def time_us(machine, run, repeats):
    """The GPU time of the kernels that run() launches: median of `repeats` runs, in us.

    machine: has record(), synchronize(), elapsed_us(begin, end) and clock(), see above.
    run: a function without arguments that launches kernels on the machine.
    """
    # YOUR CODE


# %%
lesson.check("10.1", time_us)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For each run: `begin = machine.record()`, `run()`, `end = machine.record()`,
# `machine.synchronize()`; then append `machine.elapsed_us(begin, end)` to a list.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Take `np.median` of the list. The warm-up is a separate loop before the timed one.
#
# </details>


# %% tags=["solution"]
# Solution 10.1
def time_us_solution(machine, run, repeats):
    """The GPU time of the kernels that run() launches: median of `repeats` runs, in us.

    machine: has record(), synchronize(), elapsed_us(begin, end) and clock(), see above.
    run: a function without arguments that launches kernels on the machine.
    """
    for _ in range(3):
        run()
    spans = []
    for _ in range(repeats):
        begin = machine.record()
        run()
        end = machine.record()
        machine.synchronize()
        spans.append(machine.elapsed_us(begin, end))
    return float(np.median(spans))


time_us = lesson.yours(time_us, time_us_solution)


# %% [markdown]
# `lesson.measure`, which you have used since lesson 2, does the same on a real GPU:

# %%
lesson.source(lesson.measure)

# %% [markdown]
# Two pitfalls remain.
#
# **Short kernels.** The 10 extra microseconds hardly matter for a kernel of 500 microseconds. For a
# kernel of 4 microseconds, they are most of the measurement:

# %%
import functools

for runs_us in (500, 50, 4):
    machine = Machine(launch_us=10)
    run = functools.partial(machine.launch, "k", runs_us)
    plain = time_us(machine, run, 5)
    spans = []
    for _ in range(5):
        machine.launch("something long", 200)  # Python runs ahead during this kernel
        begin = machine.record()
        run()
        end = machine.record()
        machine.synchronize()
        spans.append(machine.elapsed_us(begin, end))
    behind = np.median(spans)
    print(f"kernel of {runs_us:3} us: events {plain:4.0f}, behind a long kernel {behind:4.0f}")

# %% [markdown]
# **Warm caches.** A kernel that runs twenty times on the same array finds the array in the GPU's
# cache from the second run on, and appears faster than memory allows. In training, its input was
# last touched hundreds of kernels ago. So xtrain's benchmarks write through a large array before
# every run. That flushes the cache, *and* it is the long kernel of the cell above.
#
# ## Is the GPU busy?
#
# The first number to look at is not the time of any kernel. If the GPU waits for Python half of the
# time, kernels that are twice as fast gain nothing (lesson 9). A profiler gives the start and end
# of every kernel; two kernels may overlap, because a GPU can execute several at once.
#
# ## Exercise 10.2: the busy share
#
# Of the time from the first start to the last end, compute the share during which *at least one*
# kernel was running.


# %% tags=["exercise"]
def busy_share(spans):
    """-> from 0 to 1.   spans: [(start, end), ...] in any order; they may overlap."""
    # YOUR CODE


# %%
lesson.check("10.2", busy_share)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through `sorted(spans)` with a variable `until`: all time up to `until` has been counted. A
# span adds only its part after `until`, `max(0, end - max(start, until))`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A span may lie entirely inside an earlier one: `until = max(until, end)`.
#
# </details>


# %% tags=["solution"]
# Solution 10.2
def busy_share_solution(spans):
    """-> from 0 to 1.   spans: [(start, end), ...] in any order; they may overlap."""
    first = min(start for start, _ in spans)
    busy, until = 0, first
    for start, end in sorted(spans):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / (until - first)


busy_share = lesson.yours(busy_share, busy_share_solution)


# %%
for runs_us in (4, 9, 50):
    machine = Machine(launch_us=10)
    for i in range(100):
        machine.launch(f"kernel {i % 7}", runs_us)
    share = busy_share([(start, end) for _, start, end in machine.spans])
    print(f"100 kernels of {runs_us:2} us, launched every 10 us: GPU busy {share:.0%} of the time")

# %% [markdown]
# ## Measure: what does a launch cost?
#
# To launch a kernel, Python inspects every argument, packs it as the driver requires, and calls the
# driver. Numba passes an array as at least seven numbers. The library packs them itself; here are
# an array of shape (2, 3) and a scalar, as 8-byte words:

# %%
from xtrain.kernels.runtime import launch as _launch

x_23 = simulator.sim(np.ones((2, 3), np.float32))
print("array:  ", _launch.numba_type(x_23), "as", _launch.struct_format(x_23))
print("float32:", _launch.numba_type(np.float32(1)), "as", _launch.struct_format(np.float32(1)))
lesson.source(_launch._prepare, "for a in args")

# %% [markdown]
# (In the letters of Python's `struct`, `q` is an 8-byte integer and `f4x` is a float32 with 4 bytes
# of padding. An array is packed as two zeros for Numba's internal use, the number of elements, the
# bytes per element, the address, the shape and the strides.) Numba's own launch path does more: it
# looks up types, wraps each array again (on a GPU, xtrain's arrays are CuPy arrays; CuPy is NumPy
# for the GPU), and may wait for the GPU. On a GPU, the next cell times a thousand launches of an
# empty kernel both ways.


# %%
@cuda.jit
def empty_kernel(a_n, b_n, c_n, d_n):
    """Does nothing. It takes four arrays, as a typical kernel of the model does."""


if lesson.on_gpu():
    import time

    from xtrain.device import cupy

    arrays = [lesson.array(np.zeros(32, np.float32)) for _ in range(4)]
    ways = {
        "packed by hand": lambda: lesson.launch(empty_kernel, 1, 32, *arrays),
        "Numba's own": lambda: empty_kernel[1, 32](*arrays),
    }
    for name, launch in ways.items():
        for _ in range(10):
            launch()
        cupy().cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            launch()
        print(f"{name:15} {1e3 * (time.perf_counter() - start):6.1f} us per launch")
        cupy().cuda.Device().synchronize()
else:
    print("There is no GPU here, so nothing is timed.")

# %% [markdown]
# A training step spends more time between two launches than on the launch itself: autograd's
# bookkeeping, the launchers' checks, memory allocation. The next cell takes a bf16 step of
# `dim384`, launched from Python, from the records of lesson 9, and counts its launches in the
# simulator as in that lesson. (The count is lower than for the float32 step, because attention in
# bf16 has specialized kernels, three per layer: lesson 13.)

# %%
from unittest import mock

import xtrain
from xtrain.nn.optim import clip


def count_launches(precision):
    shape = dict(dim=64, n_layers=12, n_heads=2, head_dim=32, hidden_dim=64, max_seq_len=8)
    config = xtrain.ModelConfig(vocab_size=64, **shape)
    model, found = xtrain.Transformer(config, device="sim", precision=precision), []
    optimizer, multiply = xtrain.AdamW(model, 1e-3), np.matmul
    ids = np.arange(8).reshape(1, 8)

    def kernel(jitted, *rest, **more):
        found.append(jitted.py_func.__name__)

    def product(*operands, **more):
        found.append("matrix product")
        return multiply(*operands, **more)

    watched = mock.patch.object(simulator, "run", kernel), mock.patch.object(np, "matmul", product)
    with watched[0], watched[1], np.errstate(all="ignore"):
        model.loss(ids, ids).backward()
        optimizer.step(clip(model, 1.0)[1])
    return len(found)


eager = lesson.record("bench_history/bf16 eager/bf16")
launches = count_launches("bf16")
each = 1e3 * eager["ms"] / launches
print(f"about {launches} launches in {eager['ms']:.1f} ms: {each:.0f} us each")

# %% [markdown]
# ## The kernel table
#
# The kernels' own times matter only once the GPU is busy. A **kernel table** lists the kernels by
# their share of the step, and shows for each how close it comes to *what the GPU can do*. For
# kernels that move data, it compares bytes per second with those of a copy; for kernels that
# multiply, operations per second with those of a large matrix product. `python -m xtrain.profile`
# prints this table for any model. It takes the times from NVIDIA's CUPTI, which records the start
# and end of each kernel, and the bytes from the arguments of each launch.
#
# Here is such a table, built from the records: kernels of a bf16 step of 32768 tokens at width 768,
# each multiplied by its number of calls in 12 layers. (The vocabulary is 50304, and AdamW has 150
# million parameters. The residual kernels were measured with all arrays in bf16, while a real step
# keeps the residual stream in float32, lesson 12.)

# %%
CALLS = {
    "bench_kernels/residual_rmsnorm_fwd/bf16": 24,
    "bench_kernels/residual_rmsnorm_bwd/bf16": 24,
    "bench_kernels/qk_norm_rope_fwd/bf16": 12,
    "bench_kernels/qk_norm_rope_bwd/bf16": 12,
    "bench_kernels/swiglu_fwd/bf16": 12,
    "bench_kernels/swiglu_bwd_again/bf16": 12,
    "bench_kernels/cross_entropy_both/bf16": 1,
    "bench_kernels/grad_norm_and_factor/fp32": 1,
    "bench_kernels/adamw/fp32": 1,
}
calls = {lesson.record(i)["name"]: n for i, n in CALLS.items()}
in_step = lambda r: calls[r["name"]] * r["ms"]
to_gain = lambda r: calls[r["name"]] * max(0.0, r["ms"] - r["copy_ms"])
order = sorted(CALLS, key=lambda i: -in_step(lesson.record(i)))
lesson.table(
    order,
    {
        "calls": lambda r: calls[r["name"]],
        "ms in a step": in_step,
        "GB/s": "value",
        "of a copy": lambda r: f"{r['share']:.0%}",
        "to gain, ms": to_gain,
    },
)
records = [lesson.record(i) for i in order]
whole, gain = sum(map(in_step, records)), sum(map(to_gain, records))
print(f"{whole:.1f} ms in total, of which {gain:.1f} ms ({gain / whole:.0%}) could be gained")

# %% [markdown]
# How to read it: the last column is the time that would be saved if the kernel ran at the speed of
# a copy, and the total is small. *These kernels are nearly optimal.* To be much faster they must
# move fewer bytes, which is lesson 11. The column "calls" matters too: a kernel of 20 microseconds
# that is called a thousand times has the same total as one kernel of 20 milliseconds, but needs a
# different remedy.
#
# **Which layer launched a kernel?** A name such as `nvjet_sm90_tst_128x256` does not say which
# layer called it. A profiler can show *ranges* above the kernels, which the program opens and
# closes through NVIDIA's **NVTX** interface. xtrain opens one range per op and layer while it is
# being profiled, and none otherwise: for the duration of a `with` block, autograd calls an observer
# around every op, and that observer opens the ranges. The next cell uses an observer that only lists
# them:

# %%
import contextlib

from xtrain.inspect import profile
from xtrain.nn.observers import observe_ops

ranges = []


@contextlib.contextmanager
def note(op):
    ranges.append(" ".join(filter(None, (op.layer, op.name, op.way))))
    yield


shape = dict(dim=16, n_layers=1, n_heads=2, head_dim=8, hidden_dim=16, max_seq_len=4)
small = xtrain.Transformer(xtrain.ModelConfig(vocab_size=32, **shape))
with observe_ops(note):
    small.loss(np.array([[1, 2, 3, 4]]), np.array([[2, 3, 4, 5]])).backward()
print(*ranges[:10], "...", sep="\n")
lesson.source(profile.nvtx_ranges)

# %% [markdown]
# With these ranges, `nsys profile python -m xtrain.profile` records a step, and NVIDIA's viewer
# shows the ranges above the kernels. `--trace FILE` writes the same information for
# ui.perfetto.dev, without NVIDIA's tools.
#
# ## One improvement: the CUDA graph
#
# If Python is the bottleneck, take the launches out of the step. The queue of lesson 9 is called a
# *stream*. While a stream is *capturing*, the driver does not execute what is launched on it, but
# records the kernels and their arguments. The result is a **graph**, and a single call replays all
# of it. On the paper machine:

# %%
step = [(f"kernel {i}", 4.0) for i in range(100)]
eager_machine, graph_machine = Machine(launch_us=10), Machine(launch_us=10)
for name, runs_us in step:
    eager_machine.launch(name, runs_us)
graph_machine.replay(step)
for name, m in (("launch by launch", eager_machine), ("one graph", graph_machine)):
    m.synchronize()
    share = busy_share([(start, end) for _, start, end in m.spans])
    print(f"{name:17} {m.clock():6.0f} us, the GPU is busy {share:.0%} of the time")
lesson.figures.timeline(
    {
        "launch by launch": [(a, b, str(i)) for i, (_, a, b) in enumerate(eager_machine.spans[:8])],
        "one graph": [(a, b, str(i)) for i, (_, a, b) in enumerate(graph_machine.spans[:8])],
    },
    "when the GPU works: the first eight kernels",
    "microseconds",
)

# %% [markdown]
# The price: **the arguments are recorded too**, that is, the addresses of arrays and the *values*
# of scalars. A small recorder in Python shows the consequence. Here is a captured step of gradient
# descent whose learning rate is a scalar argument:


# %%
class Recording:
    """What a capture records: kernel, grid, block, arguments."""

    def __init__(self):
        self.launches = []

    def launch(self, kernel, grid, block, *args):
        self.launches.append((kernel, grid, block, args))

    def replay(self):
        for kernel, grid, block, args in self.launches:
            simulator.run(kernel, grid, block, *args)


@cuda.jit
def scalar_sgd_kernel(w_n, g_n, lr):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < w_n.size:
        w_n[i] -= lr * g_n[i]


w, g = simulator.sim(np.zeros(4, np.float32)), simulator.sim(np.ones(4, np.float32))
recording = Recording()
recording.launch(scalar_sgd_kernel, 1, 32, w, g, np.float32(1.0))
for lr in (1.0, 0.1, 0.01):  # the schedule sets this ...
    before = w[0]
    recording.replay()  # ... but the graph never sees it
    print(f"lr {lr:4}: w moves by {before - w[0]:.2f}")

# %% [markdown]
# There is no error, only a training run whose learning rate never falls. So everything that changes
# from step to step must be **in memory**, at a fixed address: the graph records the address, and
# the kernel reads the current value when it runs.
#
# ## Exercise 10.3: a kernel for a graph


# %% tags=["exercise"]
@cuda.jit
def sgd_kernel(w_n, g_n, lr_1):
    """w = w - lr g, with lr in lr_1[0].   Grid ceil(n / block), any block."""
    # YOUR CODE


# %%
lesson.check("10.3", sgd_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# All threads read the same element, `lr_1[0]`. This is cheap: a warp fetches it once.
#
# </details>


# %% tags=["solution"]
# Solution 10.3
@cuda.jit
def sgd_kernel_solution(w_n, g_n, lr_1):
    """w = w - lr g, with lr in lr_1[0].   Grid ceil(n / block), any block."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < w_n.size:
        w_n[i] -= lr_1[0] * g_n[i]


sgd_kernel = lesson.yours(sgd_kernel, sgd_kernel_solution)


# %%
w, lr_1 = simulator.sim(np.zeros(4, np.float32)), simulator.sim(np.zeros(1, np.float32))
recording = Recording()
recording.launch(sgd_kernel, 1, 32, w, g, lr_1)
for lr in (1.0, 0.1, 0.01):
    lr_1[0] = lr  # written before each replay
    before = w[0]
    recording.replay()
    print(f"lr {lr:4}: w moves by {before - w[0]:.2f}")

# %% [markdown]
# Three more rules follow from the same idea. A step must not copy to the host or wait for the GPU:
# a capture rejects both, so a captured step is *proof* that it does neither. Its memory must come
# from a pool that belongs to the graph, because the addresses must stay valid. And every shape
# needs its own graph.
#
# The measured effect on the bf16 step, launched from Python and replayed as one graph:

# %%
lesson.table(
    ["bench_history/bf16 eager/bf16", "bench_history/bf16/bf16"],
    {"ms per step": "ms", "tokens per second": "value"},
)
graph = lesson.record("bench_history/bf16/bf16")
print(f"{eager['ms'] / graph['ms']:.2f} times as fast")
print(f"before, the GPU was busy for about {graph['ms'] / eager['ms']:.0%} of the step")

# %% [markdown]
# ## The library's kernel
#
# AdamW is your 10.3 with more state. `hyper_3` holds the values that change from step to step. The
# constants (the betas) are scalars, because they never change:

# %%
from xtrain.inspect import kernel_times
from xtrain.kernels import adamw
from xtrain.nn import cuda_graph as graph_module

lesson.source(adamw.adamw_hyper)
lesson.source(adamw.make_adamw_kernel, "factor = factor_1[0]")

# %% [markdown]
# All the code for graphs is in one file. The first two calls of a step run normally (they compile
# kernels); the third is captured. `end` completes work that the step deferred until it knew whether
# it was needed: it zeroes those gradients that backward has not written.

# %%
lesson.source(graph_module._Recording)

# %% [markdown]
# What is a table of all kernels of a step good for? For dim384, it revealed three kinds of
# unnecessary work, each only a few microseconds long, but most of them launched many times.
# Gradients were set to zero only to be added to. The gradient of the head was computed in one
# buffer and then added to another. And before each large product cuBLAS cleared a counter from
# which its blocks take their tiles, because the workspace it had been given allowed for such a
# counter (`xtrain/kernels/gemm.py`).
#
# And here is your 10.2, as used by `python -m xtrain.profile`:

# %%
lesson.source(kernel_times.busy_share)

# %% [markdown]
# ## What did not help
#
# *A graph for the float32 step.* There the GPU is busy anyway, so removing Python gains next to
# nothing:

# %%
batched = lesson.record("bench_history/batched/fp32")
graphed = lesson.record("bench_history/graph/fp32")
print(f"float32: {batched['ms']:.1f} ms from Python, {graphed['ms']:.1f} ms as a graph")

# %% [markdown]
# *Waiting after every kernel*, to time each one with a stopwatch. It is tempting, because every
# number then belongs to one kernel. But the queue never fills, so the step being measured is not
# the step that trains. For a hundred kernels of 30 microseconds, on paper:

# %%
free, waiting = Machine(launch_us=10), Machine(launch_us=10)
for i in range(100):
    free.launch(f"kernel {i}", 30)
    waiting.launch(f"kernel {i}", 30)
    waiting.synchronize()
free.synchronize()
print(f"as in training:             {free.clock():.0f} us")
print(f"waiting after every kernel: {waiting.clock():.0f} us")

# %% [markdown]
# *Events around every launch* of an eager step. This is better, but each interval is some
# microseconds too long (the 10 from above), and for a step of small kernels that changes the order
# of the table. Where CUPTI is not available, xtrain falls back to events and says so.
#
# ## More exercises
#
# 1. Two runs of a benchmark differ by 3 %. Is a change that gains 2 % real? How would you find out?
# 2. A training loop prints the loss after every step, with `float(loss)`. What does that do to the
#    queue, and to a graph? How would you log without it?
# 3. On the paper machine, a step has 100 kernels of 4 us and one of 2000 us. Does the position of
#    the long one matter? Try the beginning and the end.
#
# <details><summary>Solutions</summary>
#
# 1: One pair of runs cannot tell. Time both variants alternately in one process, many times, and
# compare the medians together with the spread from p20 to p80, which xtrain's records include.
#
# 2: `float` copies to the host, so Python waits and the queue runs empty at every step; a capture
# rejects it. Keep the losses on the device and read those of several steps at once, as
# `Loop.read_numbers` in `xtrain/training/loop.py` does.
#
# 3: Yes. At the beginning, the step takes 2410 us, because Python runs ahead during the long
# kernel. At the end, it takes 3010 us, because the long kernel begins only after 101 launches of 10
# us each.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*, the chapters on events, streams and graphs.
# - NVIDIA, *CUPTI* and *NVTX* documentation.
# - `bench/_timing.py`: events, cache flushing, and events inside a graph; the source of all records
#   in this course.
