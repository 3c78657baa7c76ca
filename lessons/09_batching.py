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
# # 9 Batching: from one sequence to (B*T, C)
#
# *About 60 minutes. You need the model and the training step of lessons [7](07_model.ipynb) and
# [8](08_training.ipynb), and [lesson 4](04_matmul.ipynb).*
#
# **The question.** A model that trains one sequence at a time is correct and easy to read, and it
# keeps an expensive GPU idle most of the time. The obvious remedy is "do more at once". More of
# what? Of the three obvious guesses, two are wrong, and one of those makes training *slower*. How
# do you find out before you rewrite half of the program?
#
# You will write a kernel that knows where a sequence begins, a kernel that computes all heads of
# all sequences in a single launch, and a model of the queue between Python and the GPU that
# predicts the effect of a change.

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

# %% [markdown]
# ## A batch by hand
#
# A batch is B sequences of T tokens, and each token is a vector of C numbers: (B, T, C) = (2, 3,
# 4). A linear layer multiplies every token by the same matrix. Processed one sequence at a time,
# that is B products with a (3, 4) matrix:

# %%
B, T, C, O = 2, 3, 4, 2
x_BTC = np.arange(1, 25, dtype=np.float32).reshape(B, T, C)
w_OC = np.array([[1, 0, 0, -1], [0.5, 0.5, 0.5, 0.5]], np.float32)

y_loop = np.stack([x_BTC[b] @ w_OC.T for b in range(B)])
print(y_loop)

# %% [markdown]
# No token depends on another one here. It does not matter where a sequence ends, so the six tokens
# can be the six rows of **one** matrix with N = B T rows. The array already has this layout in
# memory, so the reshape copies nothing.

# %%
x_NC = x_BTC.reshape(B * T, C)
print("the same memory:", np.shares_memory(x_NC, x_BTC))
y_NO = x_NC @ w_OC.T
print(y_NO)
print("the same numbers:", np.array_equal(y_NO.reshape(B, T, O), y_loop))

# %% [markdown]
# One product of six rows replaces two products of three rows: the same arithmetic, half as many
# launches, and the weights are read once instead of twice.
#
# Which layers of the model work this way? Embedding, norm, linear, SwiGLU, the residual addition
# and the cross-entropy process one token at a time. (Their backward passes sum weight gradients
# over all rows, whichever sequence a row belongs to.) Only two operations need to know more than
# the row itself:
#
# - **positions**: RoPE rotates a token according to its position *in its sequence*; row n of the
#   flat matrix is token `n % T` of sequence `n // T`;
# - **attention**: a token attends only to earlier tokens of its own sequence.

# %%
print("row n      ", *range(B * T))
print("sequence b ", *(n // T for n in range(B * T)))
print("position t ", *(n % T for n in range(B * T)))

# %% [markdown]
# What happens if attention ignores where a sequence begins? Take the simplest possible attention,
# with all weights equal: every token becomes the **mean** of all tokens up to and including itself.
# The second sequence begins at row 3.


# %%
def prefix_mean_ref(x_NC, T):
    """The reference: y[n] = the mean of the rows of n's sequence up to n."""
    x_BTC = x_NC.reshape(-1, T, x_NC.shape[1])
    count_T = np.arange(1, T + 1, dtype=x_NC.dtype)
    return (np.cumsum(x_BTC, axis=1) / count_T[:, None]).reshape(x_NC.shape)


print("column 0 of x           ", *x_NC[:, 0])
print("right: within a sequence", *prefix_mean_ref(x_NC, T)[:, 0])
print("wrong: over all rows    ", *prefix_mean_ref(x_NC, B * T)[:, 0])

# %% [markdown]
# The wrong version raises no error, but the second sequence has read the first. To detect such a
# *leak*, change the first sequence and check whether anything changes in the second.
#
# ## Exercise 9.1: where does my sequence begin?
#
# Block n owns row n. For every column, loop over the rows from the first row of the sequence up to
# row n.


# %% tags=["exercise"]
@cuda.jit
def prefix_mean_kernel(y_NC, x_NC, T):
    """y[n] = the mean of x[m] over the rows m <= n of n's own sequence.   x, y: (N, C)

    Sequences have T rows each, N = B T.
    Grid N, any block: thread tid owns the columns tid, tid + blockDim.x, ...
    """
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("9.1", prefix_mean_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Row n belongs to sequence `n // T`, and that sequence's first row is `n // T * T`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Write `for c in range(tid, x_NC.shape[1], cuda.blockDim.x):`, and inside it `acc = float32(0.0)`
# and a loop over rows. How many rows did you add?
#
# </details>


# %% tags=["solution"]
# Solution 9.1
@cuda.jit
def prefix_mean_kernel_solution(y_NC, x_NC, T):
    """y[n] = the mean of x[m] over the rows m <= n of n's own sequence.   x, y: (N, C)

    Sequences have T rows each, N = B T.
    Grid N, any block: thread tid owns the columns tid, tid + blockDim.x, ...
    """
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    first = n // T * T
    for c in range(tid, x_NC.shape[1], cuda.blockDim.x):
        acc = float32(0.0)
        for m in range(first, n + 1):
            acc += x_NC[m, c]
        y_NC[n, c] = acc / float32(n + 1 - first)


prefix_mean_kernel = lesson.yours(prefix_mean_kernel, prefix_mean_kernel_solution)


# %%
x_here = lesson.array(x_NC)
y_here = lesson.empty(x_here, x_NC.shape)
lesson.launch(prefix_mean_kernel, B * T, 32, y_here, x_here, T)
print("matches the reference:", np.allclose(lesson.host(y_here), prefix_mean_ref(x_NC, T)))
changed = x_NC.copy()
changed[:T] += 100
lesson.launch(prefix_mean_kernel, B * T, 32, y_here, lesson.array(changed), T)
leaks = not np.allclose(lesson.host(y_here)[T:], prefix_mean_ref(x_NC, T)[T:])
print("does the second sequence see the first?", leaks)

# %% [markdown]
# ## All heads of all sequences in one launch
#
# Real attention begins with scores: for every sequence b, head h, query i and key j, the dot
# product of two vectors,
#
# $$s_{b,h,i,j} = \text{scale} \cdot \sum_d q_{b,i,h,d} \, k_{b,j,h,d}$$
#
# The direct implementation loops over b and h and computes one matrix product per iteration: with
# 32 sequences and 12 heads, 384 products per layer. These products are independent of each other,
# so b and h can be *grid indices* instead of loop indices. The third axis of the grid, `.z`, is
# still free:
#
# $$z = b \cdot H + h$$
#
# ## Exercise 9.2: scores
#
# In the grid, .x indexes the keys j, .y the queries i, and .z the (sequence, head) pairs. (There is
# no mask here: the softmax applies it.)


# %% tags=["exercise"]
@cuda.jit
def scores_kernel(s_BHTT, q_BTHD, k_BTHD, scale):
    """s[b, h, i, j] = scale * sum over d of q[b, i, h, d] k[b, j, h, d].

    q, k: (B, T, H, D)   s: (B, H, T, T)
    Grid (ceil(T / 8), ceil(T / 8), B H), block (8, 8).
    """
    B, T, H, D = q_BTHD.shape
    # YOUR CODE


# %%
lesson.check("9.2", scores_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `z = cuda.blockIdx.z`, then `b, h = z // H, z % H`: integer division and remainder, as for blocks
# and threads in lesson 1.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `j = cuda.blockIdx.x * 8 + cuda.threadIdx.x`, and `i` likewise with `.y`. Guard both, and
# accumulate in a local variable.
#
# </details>


# %% tags=["solution"]
# Solution 9.2
@cuda.jit
def scores_kernel_solution(s_BHTT, q_BTHD, k_BTHD, scale):
    """s[b, h, i, j] = scale * sum over d of q[b, i, h, d] k[b, j, h, d].

    q, k: (B, T, H, D)   s: (B, H, T, T)
    Grid (ceil(T / 8), ceil(T / 8), B H), block (8, 8).
    """
    B, T, H, D = q_BTHD.shape
    z = cuda.blockIdx.z
    b, h = z // H, z % H
    j = cuda.blockIdx.x * 8 + cuda.threadIdx.x
    i = cuda.blockIdx.y * 8 + cuda.threadIdx.y
    if i < T and j < T:
        acc = float32(0.0)
        for d in range(D):
            acc += q_BTHD[b, i, h, d] * k_BTHD[b, j, h, d]
        s_BHTT[b, h, i, j] = acc * scale


scores_kernel = lesson.yours(scores_kernel, scores_kernel_solution)


# %% [markdown]
# Next, compare the loop with the single launch. Both use the same kernel; the loop passes it one
# head of one sequence at a time. The results agree bit for bit, because in both cases one thread
# computes the whole sum of an element.

# %%
B2, T2, H2, D2 = (16, 64, 12, 32) if lesson.on_gpu() else (2, 5, 3, 4)
rng = np.random.default_rng(0)
draw = lambda: lesson.array(rng.standard_normal((B2, T2, H2, D2), np.float32))
q_BTHD, k_BTHD = draw(), draw()
scale, tiles = np.float32(D2**-0.5), -(-T2 // 8)
looped, at_once = (lesson.empty(q_BTHD, (B2, H2, T2, T2)) for _ in range(2))


def by_loop():
    for b in range(B2):
        for h in range(H2):
            s = looped[b : b + 1, h : h + 1]
            q, k = (x[b : b + 1, :, h : h + 1] for x in (q_BTHD, k_BTHD))
            lesson.launch(scores_kernel, (tiles, tiles, 1), (8, 8), s, q, k, scale)


def in_one_launch():
    grid = (tiles, tiles, B2 * H2)
    lesson.launch(scores_kernel, grid, (8, 8), at_once, q_BTHD, k_BTHD, scale)


by_loop()
in_one_launch()
print("same bits:    ", np.array_equal(lesson.host(looped), lesson.host(at_once)))
want = np.einsum("bihd,bjhd->bhij", lesson.host(q_BTHD), lesson.host(k_BTHD)) * scale
print("matches NumPy:", np.allclose(lesson.host(at_once), want, atol=1e-4))

# %% [markdown]
# ## Why a launch costs time
#
# To launch a kernel, Python packs the arguments and calls the driver; only then can the GPU begin.
# This takes several microseconds (lesson 10 measures it), and the code between two launches (the
# autograd and the launchers' checks) takes more. A launch does not *wait* for the kernel: Python
# continues at once and puts the next kernel into a queue. The GPU executes the kernels of the queue
# in order.
#
# So there are two workers, Python and the GPU. A kernel starts when **both** conditions hold: it
# has been launched, and the previous kernel has ended. Here are three kernels of 4 microseconds
# each, with 10 microseconds per launch:

# %%
lesson.figures.timeline(
    {
        "Python": [(0, 10, "launch 0"), (10, 20, "launch 1"), (20, 30, "launch 2")],
        "GPU": [(10, 14, "0"), (20, 24, "1"), (30, 34, "2")],
    },
    "small kernels: the GPU waits for Python most of the time",
    "microseconds",
)

# %%
lesson.figures.timeline(
    {
        "Python": [(0, 10, "launch 0"), (10, 20, "launch 1"), (20, 30, "launch 2")],
        "GPU": [(10, 40, "0"), (40, 70, "1"), (70, 100, "2")],
    },
    "larger kernels: Python runs ahead, and only the first launch costs time",
    "microseconds",
)

# %% [markdown]
# The first timeline is **launch-bound**. The second does seven and a half times the work in three
# times the time, because all launches except the first are hidden behind kernels. If a step looks
# like the first timeline, making its kernels twice as fast gains almost nothing.
#
# ## Exercise 9.3: the queue
#
# Write this model as a function. The predictions in the rest of this lesson use it.


# %% tags=["exercise"]
def queue_ends(gpu_us, launch_us):
    """When does each kernel end? -> a list as long as gpu_us, in microseconds.

    gpu_us: the run time of each kernel. Python starts at 0 and makes the launches one after
    the other. Each takes launch_us, and Python never waits for the GPU. A kernel begins as
    soon as it has been launched and the previous kernel has ended.
    """
    # YOUR CODE


# %%
lesson.check("9.3", queue_ends)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Kernel number i has been launched at `(i + 1) * launch_us`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Keep a variable `free`, the time at which the GPU becomes idle, initially 0. A kernel begins at
# the *later* of the two times.
#
# </details>


# %% tags=["solution"]
# Solution 9.3
def queue_ends_solution(gpu_us, launch_us):
    """When does each kernel end? -> a list as long as gpu_us, in microseconds.

    gpu_us: the run time of each kernel. Python starts at 0 and makes the launches one after
    the other. Each takes launch_us, and Python never waits for the GPU. A kernel begins as
    soon as it has been launched and the previous kernel has ended.
    """
    ends, free = [], 0
    for i, run in enumerate(gpu_us):
        launched = (i + 1) * launch_us
        free = max(launched, free) + run
        ends.append(free)
    return ends


queue_ends = lesson.yours(queue_ends, queue_ends_solution)


# %%
print("kernels   Python alone   GPU alone   both   GPU busy")
for run in (1, 4, 10, 30, 100):
    kernels = [run] * 100
    end = queue_ends(kernels, 10)[-1]
    busy = sum(kernels) / end
    print(f"100 x {run:3}   {1000:10}   {sum(kernels):9}   {end:6}   {busy:8.0%}")

# %% [markdown]
# In short: **a step takes as long as the slower of the two workers.** Let P be Python's time per
# step and G the GPU's time *per sequence*. A batch of B sequences then takes about max(P, B G).
#
# ## Measure: what the guesses gain
#
# How many launches does a training step make? The next cell counts them without running any kernel:
# it builds a model in the simulator and replaces each kernel by a counter. The model has the 12
# layers of the preset `dim384` but is narrower, since only the number of layers matters here.

# %%
from collections import Counter
from unittest import mock

import xtrain
from xtrain.nn.optim import clip


def count_launches(n_layers, sequences):
    config = xtrain.ModelConfig(
        vocab_size=64,
        dim=64,
        n_layers=n_layers,
        n_heads=2,
        head_dim=32,
        hidden_dim=64,
        max_seq_len=8,
    )
    model, names = xtrain.Transformer(config, device="sim"), Counter()
    optimizer, product = xtrain.AdamW(model, 1e-3), np.matmul

    def note_kernel(kernel, *arguments, **options):
        names[kernel.py_func.__name__] += 1

    def note_product(*arguments, **options):
        names["matrix product"] += 1
        return product(*arguments, **options)

    ids = np.arange(8 * sequences).reshape(sequences, 8) % 64
    with (
        mock.patch.object(simulator, "run", note_kernel),
        mock.patch.object(np, "matmul", note_product),
        np.errstate(all="ignore"),  # the kernels compute nothing, so the products multiply garbage
    ):
        model.loss(ids, ids).backward()
        optimizer.step(clip(model, 1.0)[1])
    return names


names = count_launches(12, 1)
print("12 layers,  1 sequence: ", names.total(), "launches")
print("12 layers, 32 sequences:", count_launches(12, 32).total(), "launches")
print(names.most_common(3))

# %% [markdown]
# The number of launches does not depend on the batch size: this is why batching works. (With a
# large vocabulary the loss is computed in chunks, which adds a few launches, and attention may use
# other kernels than here. The count remains at several hundred.)
#
# Next come the measurements, of the same model on the same GPU. The first row trains one sequence
# per step.

# %%
HISTORY = [
    "bench_history/one sequence/fp32",
    "bench_history/batch by loop/fp32",
    "bench_history/looped attention/fp32",
    "bench_history/batched/fp32",
]
lesson.table(HISTORY, {"ms per step": "ms", "tokens per second": "value"})

# %% [markdown]
# Go through the table one hypothesis at a time.
#
# **Hypothesis 1: the optimizer is too expensive.** AdamW, the gradient norm and the zeroing of the
# gradients touch every parameter once per step. With one sequence per step, that work is done for
# only 256 tokens. The second row therefore accumulates the gradients of 32 sequences and steps
# once. If the hypothesis is right, the optimizer's cost per sequence falls by a factor of 32, and
# training becomes several times faster.

# %%
one, by_loop_record = lesson.record(HISTORY[0]), lesson.record(HISTORY[1])
gain = by_loop_record["value"] / one["value"]
print(f"tokens per second grow by a factor of {gain:.2f}")
print(f"a step of one sequence takes {one['ms']:.1f} ms")
print(f"without the optimizer it takes   {by_loop_record['ms'] / 32:.1f} ms")

# %% [markdown]
# Almost no gain. The optimizer is a handful of launches among hundreds, and the GPU executes them
# quickly.
#
# **Hypothesis 2: the matrix products are too small.** The third row gives the linear layers the
# whole batch, (B T, C) as above, and leaves attention for later: it still runs head by head, and
# its slices are copied through the host. This is slower than *before*. (Why so many copies? Forward
# copies slices of q, k and v to the host and back, and then the result. Backward does the same with
# one incoming gradient and three outgoing ones.)

# %%
looped_record = lesson.record(HISTORY[2])
print(f"{looped_record['ms'] / by_loop_record['ms']:.1f} times slower")
heads, layers, sequences = 12, 12, 32
calls = heads * layers * sequences
copies = calls * (3 + 3 + 1 + 1) + calls * (
    1 + 1 + 3 + 3
)  # q, k, v, o down and up; then do, dq, dk, dv
print(f"{calls:,} attention calls per step, each for one head of one sequence")
print(f"{copies:,} copies between host and GPU")
print(f"{1e3 * looped_record['ms'] / copies:.0f} microseconds of the step per copy")

# %% [markdown]
# Half of these copies **wait**: `array.get()` returns numbers to Python, so the GPU must first
# finish all earlier work, and the queue runs empty. Every call also adds some fifteen launches of
# kernels that do almost no work. The products of the linear layers did become larger, but they were
# not the bottleneck.
#
# **One measurement** would have shown this in advance: for how much of the step is the GPU busy? In
# the last row it is busy nearly all of the time: as you will see below, removing Python from that
# step changes almost nothing. That row therefore gives G, the GPU's time per sequence. Compare it
# with the time of a one-sequence step:

# %%
batched = lesson.record(HISTORY[3])
P, G = one["ms"], batched["ms"] / 32
print(f"A step of one sequence takes {P:.1f} ms. The GPU needs {G:.1f} ms: {G / P:.0%} busy.")
print(f"Python and the GPU take equally long at {P / G:.0f} sequences per step.")

# %% [markdown]
# (These are estimates: a kernel on one sequence uses the GPU less efficiently than on 32, and the
# optimizer's share does not shrink with the batch.) The formula max(P, B G) then explains all rows.
# Up to the knee of the curve, more sequences per step cost no extra time:

# %%
sizes = [1, 2, 4, 8, 16, 32, 64]
model_speed = [256 * b / max(P, b * G) * 1e3 for b in sizes]
one_by_one = [256 / P * 1e3] * len(sizes)
lesson.figures.curves(
    sizes,
    {"the whole batch at once": model_speed, "one sequence after the other": one_by_one},
    "sequences per step",
    "tokens per second",
    "predicted from two measurements: max(P, B G)",
)

# %% [markdown]
# **The improvement of this lesson** is the fourth row of the table: the whole batch at once,
# including attention. The number of launches per step stays the same while the work of each launch
# grows by a factor of B, until the GPU is the slower of the two workers. The gain over one sequence
# at a time:

# %%
print(f"{batched['value'] / one['value']:.1f} times as many tokens per second")

# %% [markdown]
# The two versions of this notebook's own kernel, 192 launches against one, are measured in the next
# cell if there is a GPU.

# %%
times = lesson.measure({"a launch per head": by_loop, "one launch": in_one_launch})

# %% [markdown]
# ## A prediction that could fail
#
# Suppose that the model is right. Then removing Python from the step altogether (with a *CUDA
# graph*, lesson 10) gains **nothing** where the GPU is the slower worker, and a lot where Python
# is. In float32, a batch of 32 is far beyond the knee. In bf16 (lesson 12) the GPU's time is much
# shorter and Python's about the same. In the table, *batched* and *bf16 eager* are launched kernel
# by kernel from Python; *graph* and *bf16* are the same two steps as CUDA graphs.

# %%
lesson.table(
    [
        "bench_history/batched/fp32",
        "bench_history/graph/fp32",
        "bench_history/bf16 eager/bf16",
        "bench_history/bf16/bf16",
    ],
    {"ms per step": "ms", "tokens per second": "value"},
)
pairs = [("float32", "bench_history/batched/fp32", "bench_history/graph/fp32")]
pairs += [("bf16   ", "bench_history/bf16 eager/bf16", "bench_history/bf16/bf16")]
for name, eager, graph in pairs:
    gain = lesson.record(eager)["ms"] / lesson.record(graph)["ms"]
    print(f"{name} {gain:.2f} times as fast without Python")

# %% [markdown]
# The prediction holds. Whether the same step is launch-bound depends on how fast its kernels are,
# so check again after **every** kernel speed-up.
#
# ## The library's kernel
#
# How does the library track positions? Outside of attention, the model never has a batch axis; RoPE
# receives T and takes the remainder, as you did in 9.1:

# %%
from xtrain.kernels import layout, rope
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.nn import model

lesson.source(rope.position_of)
lesson.source(rope.rope_plane_kernel)

# %% [markdown]
# Attention is the only layer that sees sequences. `reshape` gives it the four axes without copying:

# %%
lesson.source(model.Attention.attend)

# %% [markdown]
# The library computes your 9.2 with strided-batched matrix products, where the (sequence, head)
# pair is the batch axis. cuBLAS needs the rows of one head to be contiguous, so a kernel first
# swaps two axes.

# %%
lesson.source(attention.attention_fwd)
lesson.source(layout.swap_heads_plain_kernel)

# %% [markdown]
# ## What did not help
#
# *Stepping the optimizer less often*, and *batching only the linear layers*: rows two and three of
# the table. Both ideas do reduce the GPU's work, but the step was not waiting for the GPU.
#
# *A larger batch beyond the knee.* According to the model, throughput is flat from there on. Memory
# use is not: activations grow with B. A larger batch also takes fewer optimizer steps per token,
# which changes what the model learns. So once the batch is past the knee, choose its size for
# learning, not for speed.
#
# ## More exercises
#
# 1. Sequences of different lengths are concatenated without padding, and an array `first_N` holds,
#    for every row, the row where its sequence begins. Change 9.1. What else in the model has to
#    change?
# 2. A batch is split into two halves, and each half computes its mean loss over its valid targets
#    (those that are not -100). Is the mean of the two the loss of the whole batch?
#    `Transformer.loss` has an argument `inv_count`: what is it for?
# 3. From what batch size on would the bf16 step, launched from Python, keep the GPU busy? Take the
#    numbers from the second table.
#
# <details><summary>Solutions</summary>
#
# 1: `first = first_N[n]`, and the position `n % T` becomes `n - first`: in RoPE and in attention,
# nowhere else.
#
# 2: Only if both halves have the same number of valid targets. Each half must divide its sum by the
# number of targets of the *whole* batch; `inv_count` is the reciprocal of that number.
#
# 3: P, Python's time, is the time of "bf16 eager", because that step waits for Python. G is the
# time of "bf16" divided by 32: P / G = 16.21 / (7.807 / 32) = 66, about twice the measured batch of
# 32.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*, asynchronous execution: what a launch waits for and what
#   it does not.
# - A. Vaswani et al., *Attention Is All You Need*, 2017.
# - `bench/bench_history.py`: the program behind the tables, including looped attention.
