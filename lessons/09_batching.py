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
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/09_batching.ipynb)
#
# *About 60 minutes. You need the model and the training step of lessons [7](07_model.ipynb) and
# [8](08_training.ipynb), and [lesson 4](04_matmul.ipynb).*
#
# **The question.** A model that trains one sequence at a time is right, easy to read, and keeps an
# expensive GPU idle most of the time. Everybody's first thought is "do more at once". More of what?
# Of the three guesses that one makes first, two are wrong, and one of them makes training *slower*.
# How does one find out before rewriting half of the program?
#
# You will write a kernel that knows where a sequence begins, one that computes all heads of all
# sequences in a single launch, and a model of the queue between Python and the GPU that predicts
# what a change will bring.

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
# A batch is B sequences of T tokens, each token a vector of C numbers: (B, T, C) = (2, 3, 4). A
# linear layer multiplies every token by the same matrix. One sequence after the other, that is B
# products of a (3, 4) matrix:

# %%
B, T, C, O = 2, 3, 4, 2
x_BTC = np.arange(1, 25, dtype=np.float32).reshape(B, T, C)
w_OC = np.array([[1, 0, 0, -1], [0.5, 0.5, 0.5, 0.5]], np.float32)

y_loop = np.stack([x_BTC[b] @ w_OC.T for b in range(B)])
print(y_loop)

# %% [markdown]
# No token looks at another one here. So it does not matter where a sequence ends, and the six
# tokens may as well be six rows of **one** matrix, N = B T rows. The array lies in memory that way
# already: the reshape moves nothing.

# %%
x_NC = x_BTC.reshape(B * T, C)
print("the same memory:", np.shares_memory(x_NC, x_BTC))
y_NO = x_NC @ w_OC.T
print(y_NO)
print("the same numbers:", np.array_equal(y_NO.reshape(B, T, O), y_loop))

# %% [markdown]
# One product of six rows instead of two of three: the same arithmetic, half as many launches, and
# the weights are read once instead of twice.
#
# Which layers of the model are like that? Embedding, norm, linear, SwiGLU, the residual addition
# and the cross-entropy see one token at a time. (Their backward adds up weight gradients over all
# rows, without asking which sequence a row is of.) There are just two places where a row must know
# more than itself:
#
# - **positions**: RoPE turns a token by its place *in its sequence*, and row n of the flat matrix
#   is token `n % T` of sequence `n // T`;
# - **attention**: a token looks at earlier tokens, of its own sequence only.

# %%
print("row n      ", *range(B * T))
print("sequence b ", *(n // T for n in range(B * T)))
print("position t ", *(n % T for n in range(B * T)))

# %% [markdown]
# What happens if attention forgets where a sequence begins? Take the simplest attention there is,
# all weights equal: every token becomes the **mean** of the tokens up to itself. The second
# sequence begins at row 3.


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
# The wrong version runs without a complaint, and the second sequence has read the first. Such a
# *leak* is found by a test like this one: change the first sequence, and see whether anything
# changes in the second.
#
# ## Exercise 9.1: where does my sequence begin?
#
# Block n owns row n. A loop over the rows from the first of its sequence to itself, for every
# column.


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
# `for c in range(tid, x_NC.shape[1], cuda.blockDim.x):`, in it `acc = float32(0.0)` and a loop over
# rows. How many rows were added?
#
# </details>


# %% tags=["solution"]
# Solution 9.1
@cuda.jit
def prefix_mean_kernel(y_NC, x_NC, T):
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


# %%
x_here = lesson.array(x_NC)
y_here = lesson.empty(x_here, x_NC.shape)
lesson.launch(prefix_mean_kernel, B * T, 32, y_here, x_here, T)
print("like the reference:", np.allclose(lesson.host(y_here), prefix_mean_ref(x_NC, T)))
changed = x_NC.copy()
changed[:T] += 100
lesson.launch(prefix_mean_kernel, B * T, 32, y_here, lesson.array(changed), T)
leaks = not np.allclose(lesson.host(y_here)[T:], prefix_mean_ref(x_NC, T)[T:])
print("does the second sequence see the first?", leaks)

# %% [markdown]
# ## All heads of all sequences in one launch
#
# Real attention begins with scores: for every sequence b, every head h, every query i and every key
# j the product of two vectors,
#
# $$s_{b,h,i,j} = \text{scale} \cdot \sum_d q_{b,i,h,d} \, k_{b,j,h,d}$$
#
# Written as it is thought, that is a loop over b, a loop over h, and a matrix product inside: with
# 32 sequences and 12 heads, 384 products per layer. Nothing in one of them needs another. So b and
# h can be *places in the grid* instead of turns of a loop. A grid has a third axis, `.z`, which is
# free:
#
# $$z = b \cdot H + h$$
#
# ## Exercise 9.2: scores
#
# In the grid .x counts keys j, .y queries i, and .z the pairs of a sequence and a head. (No mask
# yet: the softmax takes care of it.)


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
# `z = cuda.blockIdx.z`, then `b, h = z // H, z % H`: counting through is division with remainder,
# as it was for blocks and threads in lesson 1.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `j = cuda.blockIdx.x * 8 + cuda.threadIdx.x`, `i` the same with `.y`. Guard both, and add up in a
# variable of the thread.
#
# </details>


# %% tags=["solution"]
# Solution 9.2
@cuda.jit
def scores_kernel(s_BHTT, q_BTHD, k_BTHD, scale):
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


# %% [markdown]
# The loop and the single launch, side by side. The kernel is the same; in the loop it is handed one
# head of one sequence at a time. The numbers agree bit for bit, since every element is one thread's
# sum either way.

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
print("the same bits:", np.array_equal(lesson.host(looped), lesson.host(at_once)))
want = np.einsum("bihd,bjhd->bhij", lesson.host(q_BTHD), lesson.host(k_BTHD)) * scale
print("like NumPy:   ", np.allclose(lesson.host(at_once), want, atol=1e-4))

# %% [markdown]
# ## Why launches cost anything at all
#
# A launch is Python packing the arguments and calling the driver; only then the GPU can begin. It
# takes several microseconds (lesson 10 measures it), and the code between two launches, the
# autograd and the launchers' checks, takes more. A launch does not *wait* for the kernel: Python
# goes on at once and puts the next one into a queue. The GPU takes kernels from the queue in order.
#
# So there are two workers, and a kernel starts when **both** are ready: it has been launched, and
# the kernel before it has ended. For three kernels of 4, 4 and 4 microseconds, and 10 microseconds
# per launch:

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
    "larger kernels: Python is ahead, and the launches cost nothing but the first one",
    "microseconds",
)

# %% [markdown]
# The first picture is called **launch-bound**. The second picture has seven and a half times the
# work and takes three times as long, since all launches but one are hidden behind kernels. Whoever
# measures the first picture and makes its kernels twice as fast gains next to nothing.
#
# ## Exercise 9.3: the queue
#
# Write that model down. It is what the rest of this lesson predicts with.


# %% tags=["exercise"]
def queue_ends(gpu_us, launch_us):
    """When does each kernel end? -> a list as long as gpu_us, in microseconds.

    gpu_us: how long each kernel runs. Python starts at 0 and needs launch_us for every
    launch, one after the other, without waiting for the GPU. A kernel begins as soon as
    it has been launched and the kernel before it has ended.
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
# Keep `free`, the moment at which the GPU has nothing to do any more, 0 at first. A kernel begins
# at the *later* of the two moments.
#
# </details>


# %% tags=["solution"]
# Solution 9.3
def queue_ends(gpu_us, launch_us):
    """When does each kernel end? -> a list as long as gpu_us, in microseconds.

    gpu_us: how long each kernel runs. Python starts at 0 and needs launch_us for every
    launch, one after the other, without waiting for the GPU. A kernel begins as soon as
    it has been launched and the kernel before it has ended.
    """
    ends, free = [], 0
    for i, run in enumerate(gpu_us):
        launched = (i + 1) * launch_us
        free = max(launched, free) + run
        ends.append(free)
    return ends


# %%
print("kernels   Python alone   GPU alone   both   GPU busy")
for run in (1, 4, 10, 30, 100):
    kernels = [run] * 100
    end = queue_ends(kernels, 10)[-1]
    busy = sum(kernels) / end
    print(f"100 x {run:3}   {1000:10}   {sum(kernels):9}   {end:6}   {busy:8.0%}")

# %% [markdown]
# In short: **a step takes as long as the slower of the two workers.** With P for Python's time per
# step, and G for the GPU's time *per sequence*, a batch of B sequences takes about max(P, B G).
#
# ## Measure: three beliefs and what they met
#
# How many launches does a training step make? We count them without running any: a model in the
# simulator, the kernels swapped for a note. It has the 12 layers of the preset `dim384`, only
# narrower, for the number of layers is what counts.

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
        np.errstate(all="ignore"),  # nothing was computed, so the products multiply garbage
    ):
        model.loss(ids, ids).backward()
        optimizer.step(clip(model, 1.0)[1])
    return names


names = count_launches(12, 1)
print("12 layers,  1 sequence: ", names.total(), "launches")
print("12 layers, 32 sequences:", count_launches(12, 32).total(), "launches")
print(names.most_common(3))

# %% [markdown]
# The number does not depend on the batch: that is the whole trick of this lesson. (With a large
# vocabulary the loss is computed piece by piece, which adds a few launches, and attention may be
# made of other kernels than here. It stays with several hundred.)
#
# Now the measurements, of the same model on the same card. The first line trains one sequence per
# step.

# %%
HISTORY = [
    "bench_history/one sequence/fp32",
    "bench_history/batch by loop/fp32",
    "bench_history/looped attention/fp32",
    "bench_history/batched/fp32",
]
lesson.table(HISTORY, {"ms per step": "ms", "tokens per second": "value"})

# %% [markdown]
# Read it as one would have lived through it.
#
# **Belief 1: the optimizer is too expensive.** AdamW, the gradient norm and the zeroing touch every
# parameter once per step. With one sequence per step, that work is done for only 256 tokens. So
# keep the gradients of 32 sequences, and step once: the second line. Prediction, if the belief were
# right: the step's cost is divided by 32 and training becomes several times faster.

# %%
one, by_loop_record = lesson.record(HISTORY[0]), lesson.record(HISTORY[1])
gain = by_loop_record["value"] / one["value"]
print(f"tokens per second grow by a factor of {gain:.2f}")
print(f"a step of one sequence takes {one['ms']:.1f} ms")
print(f"without the optimizer it takes   {by_loop_record['ms'] / 32:.1f} ms")

# %% [markdown]
# Almost nothing. The optimizer is a handful of launches among hundreds, and the GPU is quick at it.
#
# **Belief 2: the matrix products are too small.** So let the linear layers see the whole batch, (B
# T, C) as above, and leave attention for later: it goes on head by head, and takes its slices
# through the host. That is the third line. It is slower than *before*. (Why so many copies? Forward
# brings slices of q, k, v to the host and back, and the result; backward the gradient that comes
# in, and three that go out.)

# %%
looped_record = lesson.record(HISTORY[2])
print(f"{looped_record['ms'] / by_loop_record['ms']:.1f} times slower")
heads, layers, sequences = 12, 12, 32
calls = heads * layers * sequences
copies = calls * (3 + 3 + 1 + 1) + calls * (
    1 + 1 + 3 + 3
)  # q, k, v, o down and up; then do, dq, dk, dv
print(f"{calls:,} attention calls a step, each for one head of one sequence")
print(f"{copies:,} copies between host and GPU")
print(f"{1e3 * looped_record['ms'] / copies:.0f} microseconds of the step for each copy")

# %% [markdown]
# Half of these copies **wait**: `array.get()` gives numbers to Python, so the GPU has to finish
# everything before it, and the queue runs empty. And every call brings some fifteen launches of its
# own, of kernels that do next to nothing. The products of the linear layers did become larger.
# Nobody was waiting for them.
#
# **The measurement** that would have told, before any of it: how long is the GPU busy? In the last
# line it is, nearly all of the time: we shall see that taking Python away changes nothing there.
# That gives G, the GPU's time per sequence. Compare with what a step of one sequence takes:

# %%
batched = lesson.record(HISTORY[3])
P, G = one["ms"], batched["ms"] / 32
print(f"A step of one sequence takes {P:.1f} ms. The GPU needs {G:.1f} ms: {G / P:.0%} busy.")
print(f"Python and the GPU take equally long from {P / G:.0f} sequences on.")

# %% [markdown]
# (About, since a kernel on one sequence fills the card less well than on 32, and the optimizer's
# part does not shrink with the batch.) With that, max(P, B G) draws the whole story. Up to the
# knee, more sequences cost nothing:

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
# **The improvement of this lesson** is the fourth line of the table: everything at once, attention
# too. The reason: launches per step stay the same while the work of each grows by B, until the GPU
# is the slower of the two. The effect, against one sequence at a time:

# %%
print(f"{batched['value'] / one['value']:.1f} times as many tokens per second")

# %% [markdown]
# And the kernels of this notebook: 192 launches against one. On a GPU the next cell measures it.

# %%
times = lesson.measure({"a launch per head": by_loop, "one launch": in_one_launch})

# %% [markdown]
# ## A prediction that can fail
#
# If the model is right, then removing Python from the step altogether (a *CUDA graph* does that,
# lesson 10) must bring **nothing** where the GPU is the slower one, and a lot where Python is. In
# float32 a batch of 32 is far beyond the knee. In bf16 (lesson 12) the GPU's part is much shorter,
# and Python's about the same. In the table *batched* and *bf16 eager* are launched from Python
# kernel by kernel; *graph* and *bf16* are the same two steps without it.

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
    print(f"{name} without Python {gain:.2f} times as fast")

# %% [markdown]
# So it came. The same step is launch-bound or not depending on how fast its kernels are: **every**
# speed-up of the kernels brings the question back.
#
# ## The library's kernel
#
# How the library knows where it is. The model never has a batch axis outside of attention; RoPE
# gets T and divides, as you did in 9.1:

# %%
from xtrain.nn import model
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.kernels import layout, rope

lesson.source(rope.position_of)
lesson.source(rope.rope_plane_kernel)

# %% [markdown]
# Attention is the only layer that sees sequences. `reshape` gives it its four axes, for nothing:

# %%
lesson.source(model.Attention.attend)

# %% [markdown]
# And your 9.2, by strided-batched matrix products: the pair of sequence and head is the batch axis.
# cuBLAS wants the rows of one head together, so one kernel swaps two axes first.

# %%
lesson.source(attention.attention_fwd)
lesson.source(layout.swap_heads_plain_kernel)

# %% [markdown]
# ## What did not help
#
# *Stepping the optimizer less often*, and *batching the linear layers alone*: lines two and three
# of the table. Both were sound ideas about the GPU's work. The GPU's work was not what the step
# waited for.
#
# *A larger batch beyond the knee.* The model says that the curve is flat from there. Memory is not:
# activations grow with B, and a larger batch takes fewer optimizer steps per token, which changes
# what the model learns. So the batch is chosen for learning, as soon as it is past the knee.
#
# ## More exercises
#
# 1. Sequences of different lengths are laid one behind the other, without padding, and an array
#    `first_N` says for every row where its sequence begins. Change 9.1. What else in the model has
#    to change?
# 2. A batch is split into two halves, and each computes its mean loss over the targets that count
#    (those that are not -100). Is the mean of the two the loss of the whole? `Transformer.loss` has
#    an argument `inv_count`: what is it for?
# 3. From how many sequences on would the bf16 step, launched by Python, keep the GPU busy? Take the
#    numbers from the second table.
#
# <details><summary>Solutions</summary>
#
# 1: `first = first_N[n]`, and the position is `n - first` where it was `n % T`: in RoPE and in
# attention, nowhere else.
#
# 2: Only if both halves have equally many targets. Each half must divide its sum by the number of
# targets of the *whole* batch, and `inv_count` is one over that number.
#
# 3: Python's part P is the time of "bf16 eager", for that step waits for Python; G is the time of
# "bf16" divided by 32: P / G = 16.21 / (7.807 / 32) = 66, twice the 32 that were measured.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *CUDA C++ Programming Guide*, asynchronous execution: what a launch waits for and what
#   not.
# - A. Vaswani et al., *Attention Is All You Need*, 2017.
# - `bench/bench_history.py`: the program behind the tables, looped attention included.
