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
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/10_profiling.ipynb)
#
# *About 60 minutes. You need [lesson 9](09_batching.ipynb).*
#
# **The question.** In lesson 9 two of three improvements were wrong, because nobody had measured
# what the step waits for. Measuring is not easier than writing kernels: the obvious stopwatch
# around a kernel measures something else altogether, and says so to nobody. How does one time
# something that runs on another machine, behind a queue?
#
# You will write an honest timer, the number that says whether kernels matter at all, and a kernel
# that can be part of a **CUDA graph**, which takes Python out of the step.

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
from xtrain._lesson.machine import Machine

from xtrain import lesson, simulator

# %% [markdown]
# ## A machine on paper
#
# Real times differ from run to run, and here perhaps there is no GPU. So we begin with a machine
# that exists on paper: the two workers of lesson 9, with exact clocks. What it does to a stopwatch,
# a GPU does too.

# %%
lesson.source(Machine)

# %% [markdown]
# By hand: a launch takes Python 10 microseconds, the kernel runs for 500, and the first launch of a
# kernel compiles it, for 300 milliseconds. Three ways to hold a stopwatch:

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
# The true answer is 500. The first number is the compiler. The second is the launch: Python hands
# the kernel over and goes on. The third waits, but it also waits for the two earlier runs, which
# were still in the queue.
#
# What helps is a clock **on the GPU's side**. An *event* is put into the queue like a kernel; when
# the GPU comes to it, it notes the time. Two events, one before and one after, and the difference
# belongs to what lies between.

# %%
begin = machine.record()
machine.launch("norm", 500)
end = machine.record()
machine.synchronize()
print("between two events:", machine.elapsed_us(begin, end))

# %% [markdown]
# Ten too many, for the queue was empty: the first event was noted at once, and then the GPU waited
# for the launch. We shall come back to these ten.
#
# ## Exercise 10.1: an honest timer
#
# Warm up first (three calls are enough). Then time every run by itself, and return the **median**:
# now and then the machine does something else, and one such run in twenty spoils a mean.


# %% tags=["exercise"]
def time_us(machine, run, repeats):
    """How long the GPU works on what run() launches: median of `repeats` runs, in us.

    machine: has record(), synchronize(), elapsed_us(begin, end) and clock(), see above.
    run: a function without arguments that launches kernels on it.
    """
    # YOUR CODE


# %%
lesson.check("10.1", time_us)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Per run: `begin = machine.record()`, `run()`, `end = machine.record()`, `machine.synchronize()`,
# and `machine.elapsed_us(begin, end)` goes into a list.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `np.median` of the list. The warm-up is a loop of its own in front.
#
# </details>


# %% tags=["solution"]
# Solution 10.1
def time_us(machine, run, repeats):
    """How long the GPU works on what run() launches: median of `repeats` runs, in us.

    machine: has record(), synchronize(), elapsed_us(begin, end) and clock(), see above.
    run: a function without arguments that launches kernels on it.
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


# %% [markdown]
# `lesson.measure`, which you have called since lesson 2, is the same on a real GPU:

# %%
lesson.source(lesson.measure)

# %% [markdown]
# Two traps are left.
#
# **Short kernels.** The ten microseconds from above do not matter for a kernel of 500. For one of 4
# they are most of what is measured:

# %%
import functools

for runs_us in (500, 50, 4):
    machine = Machine(launch_us=10)
    run = functools.partial(machine.launch, "k", runs_us)
    plain = time_us(machine, run, 5)
    spans = []
    for _ in range(5):
        machine.launch("something long", 200)  # Python gets ahead while this runs
        begin = machine.record()
        run()
        end = machine.record()
        machine.synchronize()
        spans.append(machine.elapsed_us(begin, end))
    behind = np.median(spans)
    print(f"kernel of {runs_us:3} us: events {plain:4.0f}, behind a long one {behind:4.0f}")

# %% [markdown]
# **Warm caches.** A kernel that is run twenty times on the same array finds it in the GPU's cache
# from the second time on, and beats the memory's speed. In training its input was last touched
# hundreds of kernels ago. So xtrain's benches write through a large array before every run: that
# empties the cache, *and* is the something long of the cell above.
#
# ## Is the GPU busy?
#
# The first number to ask for is not the time of any kernel. If the GPU waits for half of the step,
# then kernels twice as fast gain nothing (lesson 9). A profiler gives start and end of every
# kernel; two kernels may overlap, for a GPU can work on several.
#
# ## Exercise 10.2: the busy share
#
# Of the time from the first start to the last end, the share in which *at least one* kernel ran.


# %% tags=["exercise"]
def busy_share(spans):
    """-> from 0 to 1.   spans: [(start, end), ...] in any order; they may overlap."""
    # YOUR CODE


# %%
lesson.check("10.2", busy_share)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through `sorted(spans)` with a variable `until`: the GPU has been looked at up to there. A span
# adds what of it lies after `until`, `max(0, end - max(start, until))`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A span may lie inside an earlier one: `until = max(until, end)`.
#
# </details>


# %% tags=["solution"]
# Solution 10.2
def busy_share(spans):
    """-> from 0 to 1.   spans: [(start, end), ...] in any order; they may overlap."""
    first = min(start for start, _ in spans)
    busy, until = 0, first
    for start, end in sorted(spans):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / (until - first)


# %%
for runs_us in (4, 9, 50):
    machine = Machine(launch_us=10)
    for i in range(100):
        machine.launch(f"kernel {i % 7}", runs_us)
    share = busy_share([(start, end) for _, start, end in machine.spans])
    print(f"100 kernels of {runs_us:2} us, launched every 10 us: busy for {share:.0%}")

# %% [markdown]
# ## Measure: what does a launch cost?
#
# What Python does for a launch: look at every argument, pack what the driver wants, call it. Numba
# passes an array as at least seven numbers. The library packs them itself; here is an array of
# shape (2, 3) and a scalar, as 8-byte words:

# %%
from xtrain.kernels.runtime import launch as _launch

x_23 = simulator.sim(np.ones((2, 3), np.float32))
print("array:  ", _launch.numba_type(x_23), "as", _launch.struct_format(x_23))
print("float32:", _launch.numba_type(np.float32(1)), "as", _launch.struct_format(np.float32(1)))
lesson.source(_launch._launch_gpu, "for a in args")

# %% [markdown]
# (`q` is an integer of 8 bytes, `f4x` a float32 and 4 bytes of nothing: the letters of Python's
# `struct`. An array is two zeros that Numba keeps for itself, the number of elements, the bytes of
# one, the address, the shape, the strides.) Numba's own way of launching does more: it looks up
# types, wraps each array again (on a GPU xtrain's arrays are CuPy's, a NumPy for the GPU), and may
# wait for the GPU. On a GPU the next cell times a thousand launches of an empty kernel both ways.


# %%
@cuda.jit
def empty_kernel(a_n, b_n, c_n, d_n):
    """Does nothing. Four arrays, like a kernel of the model."""


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
        print(f"{name:15} {1e3 * (time.perf_counter() - start):6.1f} us a launch")
        cupy().cuda.Device().synchronize()
else:
    print("No GPU here, so nothing is timed.")

# %% [markdown]
# In a training step there is more between two launches than the launch: autograd's records, the
# launchers' checks, memory. From the records of lesson 9: a bf16 step of `dim384`, launched by
# Python, and the number of its launches, counted in the simulator as there. (They are fewer than
# those of the float32 step, since attention has kernels of its own in bf16, three a layer: lesson
# 13.)

# %%
import xtrain
from xtrain.nn.observers import swapped
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

    watched = swapped(simulator, "run", kernel), swapped(np, "matmul", product)
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
# Only when the GPU is busy, the kernels' own times matter. A **kernel table** lists them by their
# share of the step, and beside each what it reached *of what the card can do*: bytes per second
# against a copy's for kernels that move numbers, operations per second against a large product's
# for those that multiply. `python -m xtrain.profile` prints it for any model. It gets the times
# from NVIDIA's CUPTI, which notes start and end of each kernel, and the bytes from the arguments of
# each launch.
#
# Here is such a table from the records: kernels of a bf16 step of 32768 tokens, width 768, each as
# often as 12 layers call it (the vocabulary is 50304, AdamW has 150 million parameters; the
# residual kernels were measured with all arrays in bf16, while a step keeps the stream in float32,
# lesson 12):

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
print(f"together {whole:.1f} ms, to gain {gain:.1f} ms, {gain / whole:.0%}")

# %% [markdown]
# How to read it. The last column is what would be gained if the kernel ran at the speed of a copy,
# and all together it is little: *these kernels are nearly done*. To be much faster, they must move
# fewer bytes, and that is lesson 11. The column "calls" matters too: a kernel of 20 microseconds
# that is called a thousand times looks in the sum like one that takes 20 milliseconds, and needs
# another cure.
#
# **Whose kernel is it?** A name such as `nvjet_sm90_tst_128x256` does not say which layer called
# it. A profiler can show *ranges* above the kernels, opened and closed by the program: NVIDIA's
# interface for that is called **NVTX**. xtrain opens one per op and layer while it is profiled, and
# none otherwise: for the time of a `with` block every op's function is swapped for one that takes
# notes. The same swap with a note of our own shows what the ranges are:

# %%
import contextlib

from xtrain.inspect import profile
from xtrain.nn.observers import watch_ops

ranges = []


@contextlib.contextmanager
def note(op, way, layer):
    ranges.append(" ".join(filter(None, (layer, op, way))))
    yield


shape = dict(dim=16, n_layers=1, n_heads=2, head_dim=8, hidden_dim=16, max_seq_len=4)
small = xtrain.Transformer(xtrain.ModelConfig(vocab_size=32, **shape))
with watch_ops(small, note):
    small.loss(np.array([[1, 2, 3, 4]]), np.array([[2, 3, 4, 5]])).backward()
print(*ranges[:10], "...", sep="\n")
lesson.source(profile.nvtx_note)

# %% [markdown]
# With that, `nsys profile python -m xtrain.profile` records a step whose ranges NVIDIA's viewer
# shows above the kernels. `--trace FILE` writes the same for ui.perfetto.dev, without NVIDIA's
# tools.
#
# ## One improvement: the CUDA graph
#
# If Python is in the way, the launches can be taken out of the step. The queue of lesson 9 is
# called a *stream*. While it is *capturing*, the driver does not run what is launched on it; it
# writes down kernels and their arguments. The result is a **graph**, and one call starts it all
# again. On the paper machine:

# %%
step = [(f"kernel {i}", 4.0) for i in range(100)]
eager_machine, graph_machine = Machine(launch_us=10), Machine(launch_us=10)
for name, runs_us in step:
    eager_machine.launch(name, runs_us)
graph_machine.replay(step)
for name, m in (("launch by launch", eager_machine), ("one graph", graph_machine)):
    m.synchronize()
    share = busy_share([(start, end) for _, start, end in m.spans])
    print(f"{name:17} {m.clock():6.0f} us, the GPU is busy for {share:.0%}")
lesson.figures.timeline(
    {
        "launch by launch": [(a, b, str(i)) for i, (_, a, b) in enumerate(eager_machine.spans[:8])],
        "one graph": [(a, b, str(i)) for i, (_, a, b) in enumerate(graph_machine.spans[:8])],
    },
    "when the GPU works: the first eight kernels",
    "microseconds",
)

# %% [markdown]
# The price: **the arguments are written down too**. Addresses of arrays, and the *values* of
# scalars. A recording in Python shows what that does. Here is a captured step of gradient descent
# whose learning rate is a scalar argument:


# %%
class Recording:
    """What a capture writes down: kernel, grid, block, arguments."""

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
for lr in (1.0, 0.1, 0.01):  # the schedule wants this ...
    before = w[0]
    recording.replay()  # ... but nobody tells the graph
    print(f"lr {lr:4}: w moves by {before - w[0]:.2f}")

# %% [markdown]
# No error, just a training run whose learning rate never falls. So everything that changes from
# step to step must be **in memory**, at an address that stays: the graph notes the address, and the
# number is read when the kernel runs.
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
# All threads read the same element, `lr_1[0]`; that costs nothing, a warp fetches it once.
#
# </details>


# %% tags=["solution"]
# Solution 10.3
@cuda.jit
def sgd_kernel(w_n, g_n, lr_1):
    """w = w - lr g, with lr in lr_1[0].   Grid ceil(n / block), any block."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < w_n.size:
        w_n[i] -= lr_1[0] * g_n[i]


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
# Three more rules follow from the same idea. No copy to the host and no wait inside a step: a
# capture refuses them, so a captured step is *proof* that there is none. Memory comes from a pool
# that belongs to the graph, for the addresses must stay. And every shape needs a graph of its own.
#
# The effect, measured: the bf16 step launched from Python, and as one graph.

# %%
lesson.table(
    ["bench_history/bf16 eager/bf16", "bench_history/bf16/bf16"],
    {"ms per step": "ms", "tokens per second": "value"},
)
graph = lesson.record("bench_history/bf16/bf16")
print(f"{eager['ms'] / graph['ms']:.2f} times as fast")
print(f"so before, the GPU was busy for about {graph['ms'] / eager['ms']:.0%}")

# %% [markdown]
# ## The library's kernel
#
# AdamW is your 10.3 with more numbers. `hyper_3` holds what changes with the step; its constants
# (the betas) are scalars, since they never change:

# %%
from xtrain.inspect import kernel_times
from xtrain.kernels import adamw
from xtrain.nn import cuda_graph as graph_module

lesson.source(adamw.adamw_hyper)
lesson.source(adamw.make_adamw_kernel, "factor, lr, root2")

# %% [markdown]
# The whole machinery of graphs is one file. The first two calls of a step run as they are (they
# compile kernels); the third is captured. `end` does what the step has put off until it is known
# whether it is needed: setting those gradients to zero that backward has not written.

# %%
lesson.source(graph_module._Recording)

# %% [markdown]
# What is a table of all kernels of a step good for? In dim384's it showed three kinds of work that
# nobody had asked for, each of a few microseconds and most of them many times. Gradients were set to
# zero, only to be added to; that of the head was computed in one place and added to another; and
# before each large product cuBLAS cleared a counter, from which its blocks took their tiles, for it had
# been given memory for one (`xtrain/kernels/gemm.py`).
#
# And your 10.2, at work in `python -m xtrain.profile`:

# %%
lesson.source(kernel_times.busy_share)

# %% [markdown]
# ## What did not help
#
# *A graph for the float32 step.* There the GPU is busy anyway, so taking Python away gains next to
# nothing:

# %%
batched = lesson.record("bench_history/batched/fp32")
graphed = lesson.record("bench_history/graph/fp32")
print(f"float32: {batched['ms']:.1f} ms from Python, {graphed['ms']:.1f} ms as a graph")

# %% [markdown]
# *Waiting after every kernel*, to time each with a stopwatch. It is tempting, since every number
# then belongs to its kernel. But the queue never fills, so the step under measurement is not the
# step that trains. For a hundred kernels of 30 microseconds, on paper:

# %%
free, waiting = Machine(launch_us=10), Machine(launch_us=10)
for i in range(100):
    free.launch(f"kernel {i}", 30)
    waiting.launch(f"kernel {i}", 30)
    waiting.synchronize()
free.synchronize()
print(f"as it trains:               {free.clock():.0f} us")
print(f"waiting after every kernel: {waiting.clock():.0f} us")

# %% [markdown]
# *Events around every launch* of an eager step: better, but each pair is some microseconds too long
# (the ten from above), which for a step of small kernels changes the order of the table. xtrain
# falls back on it where CUPTI cannot be had, and says so.
#
# ## More exercises
#
# 1. Two runs of a bench differ by 3 %. Is a change that gains 2 % real? What would you do to find
#    out?
# 2. A training loop prints the loss after every step, with `float(loss)`. What does that do to the
#    queue, and to a graph? How would you log without it?
# 3. On the paper machine: a step has 100 kernels of 4 us and one of 2000 us. Does it matter where
#    the long one stands? Try the beginning and the end.
#
# <details><summary>Solutions</summary>
#
# 1: One pair of runs cannot tell. Time both variants in one process, alternately, many times, and
# compare medians with the spread, p20 to p80: xtrain's records keep it.
#
# 2: `float` copies to the host, so Python waits and the queue runs empty at every step; a capture
# refuses it. Keep the losses on the device, and read those of several steps at once, as
# `Loop.read_numbers` in `xtrain/train.py` does.
#
# 3: Yes. At the beginning it takes 2410 us, for Python gets ahead while it runs; at the end 3010
# us, for it begins only after 100 launches, one every 10 us, and its own.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*, the chapters on events, streams and graphs.
# - NVIDIA, *CUPTI* and *NVTX* documentation.
# - `bench/_timing.py`: events, flushing, and events inside a graph; what all records of this course
#   come from.
