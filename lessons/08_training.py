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
# # 8 Training
#
# *About 75 minutes. You need [lesson 7](07_model.ipynb).*
#
# **The question.** We have a loss and its gradient with respect to every weight. How do we get from
# there to a model that has learnt something? And how can a run stop on Tuesday and resume on
# Thursday as if nothing had happened?
#
# You will write AdamW as a kernel, the learning-rate schedule, and gradient clipping. You will make
# a model memorise 27 tokens, and then train it on a text that cannot be memorised.

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
from numba import cuda, float32

from xtrain import lesson

# %% [markdown]
# ## Gradient descent
#
# The simplest rule is `w -= lr * g`. Its problem is the single learning rate for all weights: a
# weight whose gradients are a thousand times larger than another's takes steps a thousand times
# larger. **Adam** divides each weight's step by the typical size of *its own* gradients. It keeps
# two numbers per weight: a running mean m of g (the average direction) and a running mean v of
# $g^2$ (the typical squared size):
#
# $$m \leftarrow m + (1 - \beta_1)(g - m) \qquad v \leftarrow v + (1 - \beta_2)(g^2 - v)$$
#
# $$w \leftarrow w - \text{lr} \cdot \frac{m / (1 - \beta_1^t)}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}$$
#
# Why the divisions by $1 - \beta^t$ (the bias corrections)? m and v start at zero, so after one
# step m is only a tenth of g. By hand, for one weight with the gradient 0.2 three times,
# $\beta_1 = 0.9$, $\beta_2 = 0.95$:

# %%
m = v = 0.0
for t in (1, 2, 3):
    g = 0.2
    m += (1 - 0.9) * (g - m)
    v += (1 - 0.95) * (g * g - v)
    c1, root2 = 1 - 0.9**t, math.sqrt(1 - 0.95**t)
    print(
        f"step {t}: m {m:.4f}, v {v:.5f}; corrected m {m / c1:.3f}, root of v "
        f"{math.sqrt(v) / root2:.3f}: ratio {m / c1 / (math.sqrt(v) / root2):.3f}"
    )

# %% [markdown]
# With the corrections, the ratio is 1 from the first step on: a gradient that always points the
# same way moves its weight by exactly lr, **whatever its size**. A gradient whose sign alternates
# hardly moves its weight at all.
#
# The W in AdamW is weight decay: each step also shrinks the weights a little,
# `w -= lr * weight_decay * w`. If the decay were added to the gradient instead (as in "L2
# regularization"), it would also go through the division. It applies to matrices only; the few norm
# weights are exempt. In xtrain's parameter array the decayed weights come first, so one number,
# `n_decay`, says where decay ends.
#
# The reference, from the library (`copy_n` is a bf16 copy: lesson 12):

# %%
from xtrain.kernels import adamw

lesson.source(adamw.adamw_ref)

# %% [markdown]
# ## Exercise 8.1: AdamW
#
# Use one thread per weight. First apply the decay (to weights with i < n_decay), then update m and
# v, then take the step. c1 is $1 - \beta_1^t$ and root2 is $\sqrt{1 - \beta_2^t}$. Both are
# computed on the host in float64, because they are differences of nearly equal numbers.


# %% tags=["exercise"]
@cuda.jit
def adamw_kernel(w_n, m_n, v_n, g_n, lr, c1, root2, n_decay, beta1, beta2, eps, weight_decay):
    """One AdamW step, in place on w, m and v.   w, m, v, g: (n,)   n_decay: int

    All others are float32 numbers. Grid ceil(n / block), any block. Decay applies to i < n_decay.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("8.1", adamw_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Inside the guard: `w, m, v, g = w_n[i], m_n[i], v_n[i], g_n[i]`. Constants need float32:
# `(float32(1.0) - beta1)`. The last line of arithmetic is
#
# `w -= lr / c1 * m / (math.sqrt(v) / root2 + eps)`
#
# </details>


# %% tags=["solution"]
# Solution 8.1
@cuda.jit
def adamw_kernel_solution(
    w_n, m_n, v_n, g_n, lr, c1, root2, n_decay, beta1, beta2, eps, weight_decay
):
    """One AdamW step, in place on w, m and v.   w, m, v, g: (n,)   n_decay: int

    All others are float32 numbers. Grid ceil(n / block), any block. Decay applies to i < n_decay.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < w_n.size:
        w, m, v, g = w_n[i], m_n[i], v_n[i], g_n[i]
        if i < n_decay:
            w -= lr * weight_decay * w
        m += (float32(1.0) - beta1) * (g - m)
        v += (float32(1.0) - beta2) * (g * g - v)
        w_n[i] = w - lr / c1 * m / (math.sqrt(v) / root2 + eps)
        m_n[i] = m
        v_n[i] = v


adamw_kernel = lesson.yours(adamw_kernel, adamw_kernel_solution)


# %% [markdown]
# ## The schedule
#
# At the beginning, v is an average over few steps, so the divisions are unreliable and full-sized
# steps do damage. The learning rate is therefore *warmed up*. At the end, steps should become small
# so that the weights converge. In between, the rate follows half a cosine.
#
# ## Exercise 8.2: the learning rate of a step
#
# Write it in Python. It returns one number for one step.


# %% tags=["exercise"]
def learning_rate(step, steps, peak, warmup, min_ratio):
    """The learning rate at `step` (0 ... steps - 1), a number.

    First a line from peak / warmup (at step 0) to peak (at step warmup - 1), then half a cosine
    from peak (at step warmup) down to min_ratio * peak (at the last step).
    """
    # YOUR CODE


# %%
lesson.check("8.2", learning_rate)

# %% [markdown]
# <details><summary>Hint</summary>
#
# After the warm-up, `progress = (step - warmup) / max(1, steps - 1 - warmup)` runs from 0 to 1, and
# `0.5 * (1 + math.cos(math.pi * progress))` from 1 to 0.
#
# </details>


# %% tags=["solution"]
# Solution 8.2
def learning_rate_solution(step, steps, peak, warmup, min_ratio):
    """The learning rate at `step` (0 ... steps - 1), a number.

    First a line from peak / warmup (at step 0) to peak (at step warmup - 1), then half a cosine
    from peak (at step warmup) down to min_ratio * peak (at the last step).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


learning_rate = lesson.yours(learning_rate, learning_rate_solution)


# %%
rates = [learning_rate(s, 800, 3e-3, 30, 0.1) for s in range(800)]
lesson.figures.curves(
    list(range(800)),
    {"tiny": rates},
    "step",
    "learning rate",
    "the schedule of the preset tiny",
    log=False,
)

# %% [markdown]
# ## Clipping
#
# Occasionally, a batch gives a gradient many times larger than usual. One such step can undo hours
# of training. So the gradient is scaled down to a maximum norm, usually 1. The norm is that of
# **all parameters together, as one long vector**, so the direction does not change.
#
# ## Exercise 8.3: the clip factor
#
# Write it in NumPy. The gradients are a list of arrays of any shapes.


# %% tags=["exercise"]
def clip_factor(gradients, limit):
    """-> the factor (at most 1) that limits the norm of all gradients together to `limit`.

    gradients: list of arrays of any shapes   limit: float
    """
    # YOUR CODE


# %%
lesson.check("8.3", clip_factor)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Sum `(g * g).sum()` over all arrays and take the root once. Then `min(1.0, limit / norm)`.
#
# </details>


# %% tags=["solution"]
# Solution 8.3
def clip_factor_solution(gradients, limit):
    """-> the factor (at most 1) that limits the norm of all gradients together to `limit`.

    gradients: list of arrays of any shapes   limit: float
    """
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
    return min(1.0, limit / norm)


clip_factor = lesson.yours(clip_factor, clip_factor_solution)


# %% [markdown]
# Why return a factor instead of scaled gradients? Because scaling 67 million numbers in memory
# means reading and writing all of them. The optimizer reads them anyway and can multiply by the
# factor as it does.
#
# ## Overfit one sequence
#
# Before a real run, do the cheapest test of the whole system: can the model learn *one* sequence of
# 27 tokens? If it cannot, something is broken, and you know within seconds. The next cell uses your
# schedule and your clipping with xtrain's model and optimizer:

# %%
import xtrain
from xtrain.nn.optim import clip

shape = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64)
model = xtrain.Transformer(
    xtrain.ModelConfig(vocab_size=50, max_seq_len=32, **shape), seed=0, device="cpu"
)
optimizer = xtrain.AdamW(model, lr=1e-2, weight_decay=0.0)
text = np.random.default_rng(0).integers(0, 50, (1, 28))
ids, targets = text[:, :-1], text[:, 1:]
right = lambda: int((model(ids).data.argmax(-1) == targets).sum())
print(f"before: {right()} of 27 correct; a random guess is correct once in 50")
STEPS = 100
for step in range(STEPS):
    model.zero_grad()
    loss = model.loss(ids, targets)
    loss.backward()
    optimizer.lr = learning_rate(step, STEPS, 1e-2, 10, 0.1)
    factor = clip_factor([p.grad for _, p in model.named_parameters()], 1.0)
    optimizer.step(np.array([factor], np.float32))
print(f"after {STEPS} steps: {right()} of 27 correct, loss below 0.1: {loss.item() < 0.1}")
print("it generates the sequence by itself:", np.array_equal(model.generate(text[:, :1], 27), text))

# %% [markdown]
# ## A run that must generalise
#
# The data is a small language: sentences of a subject, a verb and an object, in which the number of
# the subject (singular or plural) determines the form of the verb. The text is different in every
# batch, so memorising it does not help. The tokens are simply words.

# %%
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "cats",
    "dogs",
    "birds",
    "sees",
    "hears",
    "likes",
    "see",
    "hear",
    "like",
    "old",
    "small",
    ".",
]
token_id = {w: i for i, w in enumerate(WORDS)}


def sentence(rng):
    plural_subject = rng.random() < 0.5
    noun = lambda plural: rng.choice(WORDS[5:8] if plural else WORDS[2:5])
    article = lambda plural: "the" if plural or rng.random() < 0.5 else "a"
    adjective = lambda: [rng.choice(["old", "small"])] if rng.random() < 0.5 else []
    plural_object = rng.random() < 0.5
    words = [
        article(plural_subject),
        *adjective(),
        noun(plural_subject),
        rng.choice(WORDS[11:14] if plural_subject else WORDS[8:11]),
    ]
    return [*words, article(plural_object), *adjective(), noun(plural_object), "."]


def batch(rng, B, T):
    rows = []
    for _ in range(B):
        row = []
        while len(row) <= T:
            row += [token_id[w] for w in sentence(rng)]
        rows.append(row[: T + 1])
    block = np.array(rows)
    return block[:, :-1], block[:, 1:]


rng = np.random.default_rng(0)
print(" ".join(sentence(rng)), " ".join(sentence(rng)))


# %%
def fresh():
    model = xtrain.Transformer(
        xtrain.ModelConfig(vocab_size=len(WORDS), max_seq_len=32, **shape), seed=0, device="cpu"
    )
    return model, xtrain.AdamW(model, lr=1e-2)


def train(model, optimizer, rng, first, last, steps=60):
    """Steps first ... last - 1 of a run of `steps`. -> losses"""
    losses = []
    for step in range(first, last):
        ids, targets = batch(rng, 16, 24)
        model.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        optimizer.lr = learning_rate(step, steps, 1e-2, 5, 0.1)
        optimizer.step(clip(model, 1.0)[1])
        losses.append(loss.item())
    return losses


model, optimizer = fresh()
losses = train(model, optimizer, np.random.default_rng(1), 0, 60)
for step in (0, 10, 30, 59):
    print(f"step {step:2}   loss {losses[step]:.1f}")
print(f"untrained: ln {len(WORDS)} = {math.log(len(WORDS)):.1f}")

# %% [markdown]
# The loss cannot reach 0, because the text itself is random: the next noun is unpredictable. How
# low can it go? The best possible loss is the *entropy* of the source, which we can compute here. A
# choice among k equally likely words has an entropy of ln k (its unit is the *nat*), so sum the
# choices in a sentence and divide by its number of words. The cell also checks whether the model
# has learnt the grammar:

# %%
nats = (
    2 * math.log(2)  # subject and object: singular or plural
    + 2 * 0.5 * math.log(2)  # "the" or "a", if it is singular
    + 2 * math.log(2)  # an adjective or none
    + 2 * 0.5 * math.log(2)  # which adjective
    + 3 * math.log(3)  # noun, verb, noun
)
# twice (article, perhaps an adjective, noun), then the verb and the full stop
words = 2 * (1 + 0.5 + 1) + 1 + 1
print(
    f"entropy: about {nats / words:.1f} nats per word; mean of the last ten losses: "
    f"{np.mean(losses[-10:]):.1f}"
)


def share_of_right_verbs(model):
    right = total = 0
    rng = np.random.default_rng(5)
    for _ in range(40):
        words = sentence(rng)
        verb = next(i for i, w in enumerate(words) if token_id[w] in range(8, 14))
        prompt = [token_id["."], *(token_id[w] for w in words[:verb])]
        logits = model(np.array([prompt])).data[0, -1]
        plural = words[verb - 1] in WORDS[5:8]
        right += (int(logits.argmax()) in range(11, 14)) == plural
        total += 1
    return right / total


print(
    f"verbs that agree with their subject: {share_of_right_verbs(model):.0%}, untrained: "
    f"{share_of_right_verbs(fresh()[0]):.0%}"
)

# %% [markdown]
# ## Stop and resume
#
# What must a checkpoint contain so that a stopped run continues exactly as if it had not been
# stopped? Try it: stop after 30 steps, resume until step 60, and compare the losses with those of
# the uninterrupted run, bit for bit.


# %%
def resumed(keep_moments=True, keep_count=True, keep_position=True):
    model, optimizer = fresh()
    rng = np.random.default_rng(1)
    train(model, optimizer, rng, 0, 30)
    saved = model.arena.weights.copy(), optimizer.m.copy(), optimizer.v.copy(), optimizer.t
    position = rng.bit_generator.state

    model, optimizer = fresh()  # a new process starts here
    model.arena.weights[...] = saved[0]
    if keep_moments:
        optimizer.m[...], optimizer.v[...] = saved[1], saved[2]
    if keep_count:
        optimizer.t = saved[3]
    rng = np.random.default_rng(1)
    if keep_position:
        rng.bit_generator.state = position
    return train(model, optimizer, rng, 30, 60)


for name, options in (
    ("everything", {}),
    ("without the moments m, v", {"keep_moments": False}),
    ("without the step count t", {"keep_count": False}),
    ("without the position in the text", {"keep_position": False}),
):
    after = resumed(**options)
    same = sum(a == b for a, b in zip(after, losses[30:]))
    print(f"{name:34} {same:2} of 30 losses are bitwise equal")

# %% [markdown]
# (The one equal loss is the first after the stop: it depends only on the weights, before any new
# step.) In practice these three mistakes go unnoticed, because the loss still falls. xtrain's
# checkpoints hold everything, and a test compares the bits. (The step number is also needed for the
# schedule; here the code passes it explicitly.)
#
# ## Measure, and one improvement
#
# Your kernel reads w, g, m and v and writes w, m and v: 28 bytes per weight, with almost no
# arithmetic. As a series of array operations it would be:

# %%
passes = {
    "w *= 1 - lr decay": (1, 1), "g - m": (2, 1), "... times (1 - beta1)": (1, 1),
    "m += ...": (2, 1), "g * g": (1, 1), "... - v": (2, 1), "... times (1 - beta2)": (1, 1),
    "v += ...": (2, 1), "sqrt(v)": (1, 1), "... / root2 + eps": (1, 1), "m / ...": (2, 1),
    "w -= ...": (2, 1),
}  # fmt: skip
reads, writes = (sum(p[i] for p in passes.values()) for i in (0, 1))
print(f"array by array: {4 * (reads + writes)} bytes per weight; one kernel: {4 * (4 + 3)}")

# %% [markdown]
# A model has hundreds of parameter arrays, most of them small. One launch per array would cost more
# than the arithmetic of the small ones. **xtrain keeps all parameters in one array, the arena**
# ([lesson 16](16_memory.ipynb); and all gradients in one, and m, and v). The optimizer is therefore *one* launch, whatever the
# model. The gradient norm is one reduction. And in lesson 15, a bucket of gradients to send is a
# slice.

# %%
print("parameter arrays in this small model:", len(list(model.named_parameters())))
print(
    "launches of the optimizer: 1, over",
    f"{model.arena.weights.size:,}",
    "numbers, of which",
    f"{model.arena.n_decay:,}",
    "decay",
)
lesson.table(
    ["bench_kernels/adamw/fp32", "bench_kernels/grad_norm_and_factor/fp32"],
    {
        "ms": "ms",
        "copy of the same bytes, ms": "copy_ms",
        "GB/s": "value",
        "PyTorch, ms": "torch_eager_ms",
    },
)

# %%
n = 1 << 24 if lesson.on_gpu() else 256
w_n, m_n, v_n, g_n = (lesson.array(np.ones(n, np.float32)) for _ in range(4))
numbers = (
    [np.float32(x) for x in (1e-3, 0.1, 0.2236)],
    [np.float32(x) for x in (0.9, 0.95, 1e-8, 0.1)],
)
runs = {
    "yours": lambda: lesson.launch(
        adamw_kernel, -(-n // 256), 256, w_n, m_n, v_n, g_n, *numbers[0], np.int64(n), *numbers[1]
    )
}
times = lesson.measure(runs, nbytes=28 * n)

# %% [markdown]
# ## The library's kernel

# %%
lesson.source(adamw.make_adamw_kernel)
lesson.source(adamw.update)

# %% [markdown]
# `fmul_rn`, `fadd_rn` and so on are operations that round individually and that the compiler may
# not merge, so the kernel on a GPU gives the same bits as the reference on a CPU. The clip factor
# is an array on the device, so nothing waits for the host. If it is NaN, the step is skipped: a
# broken batch does not become a broken model.
#
# This is xtrain's complete training step:

# %%
from xtrain.training import run

lesson.source(run.Run.step)
lesson.source(run.Run.train_step)

# %% [markdown]
# ## Your first real run
#
# ```sh
# python -m xtrain.train
# ```
#
# This takes two to three minutes on two cores. The text is the source of Python's standard library on your
# machine, with a vocabulary of 2048 tokens. Watch four things: the first loss is near ln(2048) = 7.6; the
# gradient norm falls from above 1 and then stays low; the validation loss falls below that of the
# byte-bigram model, which predicts each byte from the previous one; and the samples begin to look like
# code.
#
# ## What did not help
#
# *Decay in the gradient*, as in Adam with L2: for a weight with large gradients, the division
# removes most of the decay. Take two weights with gradients of size 10 and 0.01 that alternate in
# sign, and decay 0.5 for 100 steps at lr 0.01:

# %%
for decoupled in (True, False):
    w, m, v = np.ones(2), np.zeros(2), np.zeros(2)
    for t in range(1, 101):
        g = np.array([10.0, 0.01]) * (-1) ** t
        if decoupled:
            w -= 0.01 * 0.5 * w
        else:
            g = g + 0.5 * w
        m += 0.1 * (g - m)
        v += 0.05 * (g * g - v)
        w -= 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    print(f"{'AdamW' if decoupled else 'Adam + L2':10} weights after 100 steps: {w.round(1) + 0.0}")

# %% [markdown]
# With AdamW both weights have shrunk by the same amount. With L2 the first has hardly shrunk at
# all, and the second has been driven nearly to zero.
#
# *Clipping each array separately*: every array is scaled by a different factor, so the direction
# changes.
#
# *No warm-up*: on the small language above it makes no difference, so such a run cannot decide about it.
#
# ## More exercises
#
# 1. Remove the bias corrections in 8.1 (c1 = root2 = 1) and train the 27 tokens with plain NumPy
#    AdamW. What happens in the first steps?
# 2. Which weights does `n_decay` exempt? Print the names of all parameters with one axis.
# 3. How many bytes does AdamW's state take for a model of a billion parameters? How does lesson 16
#    divide them?
#
# <details><summary>Solutions</summary>
#
# 1: With beta1 = 0.9, beta2 = 0.95, the first step is 0.1 / sqrt(0.05) = 0.45 of the corrected one:
# too *small*. With beta2 = 0.999 it is 0.1 / 0.032 = 3.2, too large.
#
# 2: `[name for name, p in model.named_parameters() if p.ndim == 1]`: all norms.
#
# 3: m and v in float32, 8 GB. ZeRO-1 ([lesson 16](16_memory.ipynb)) divides them among the GPUs.
#
# </details>
#
# ## Sources
#
# - D. Kingma, J. Ba, *Adam: A Method for Stochastic Optimization*, 2014.
# - I. Loshchilov, F. Hutter, *Decoupled Weight Decay Regularization*, 2019.
# - R. Pascanu, T. Mikolov, Y. Bengio, *On the difficulty of training recurrent neural networks*,
#   2013: clipping by the global norm.
# - A. Karpathy, *A Recipe for Training Neural Networks*, 2019: overfit one batch first.
