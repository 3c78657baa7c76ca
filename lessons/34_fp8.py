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
# # 34 fp8 and scaling: training with one byte
#
# *About 60 minutes. You need [lesson 4](04_matmul.ipynb) and [lesson 12](12_bf16.ipynb).
# [Lesson 29](29_quantized.ipynb) is about weights of one byte in serving.*
#
# **The question.** The tensor cores of a Hopper GPU multiply numbers of one byte twice as fast as bf16. A
# training step is mostly matrix products. Can a model be trained with numbers that have 3 bits of fraction,
# or 2? And if the largest number is 448, where do gradients of a millionth go?
#
# The new idea is the **scale**: each matrix is stored as small numbers times one factor. You will write the
# rounding and the choice of the scale, and train a model with and without scales. The kernel that writes codes, and the
# products that read them, are [lesson 45](45_fp8_kernel.ipynb).

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

from xtrain import lesson

# fraction bits, exponent of the smallest normal number, largest number
FORMATS = {
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
    "bf16": (7, -126, float(np.uint32(0x7F7F0000).view(np.float32))),
}

# %% [markdown]
# ## Two formats, by hand
#
# Eight bits are divided in two ways. **e4m3** has 4 bits of exponent and 3 of fraction, **e5m2** has 5 and 2.
# In both, a number is
#
# $$\pm \left(1 + \tfrac{m}{2^f}\right) 2^{e}$$
#
# with f bits of fraction m. Below the smallest normal number $2^{l}$ the **subnormal** numbers continue down to
# 0 in equal steps of $2^{l-f}$. So three values say everything about a format: f, l, and the largest number.

# %%
print("       steps of a number   largest   smallest normal   smallest above 0")
for name, (f, least, most) in FORMATS.items():
    steps = f"1/{2**f} to 1/{2 ** (f + 1)}"
    print(f"{name}   {steps:17} {most:9.3g}   {f'2^{least}':>15}   {f'2^{least - f}':>16}")
f, least, most = FORMATS["e4m3"]
print("e4m3 from 1 to 2:      ", *(1 + m / 2**f for m in range(2**f)))
print("e4m3, the smallest:    ", *(f"{m * 2.0 ** (least - f):.4f}" for m in range(6)), "...")

# %% [markdown]
# How is a number rounded? From $2^e$ to $2^{e+1}$ the steps are $2^{e-f}$ wide. So find e, divide by the step, round
# to a whole number (`np.rint` rounds halves to the even one), and multiply again. Take 0.3 in e4m3: it is
# between $2^{-2}$ and $2^{-1}$, so the step is $2^{-5} = 0.03125$. And 0.3 / 0.03125 = 9.6, which becomes 10: 0.3125. In e5m2 the
# step is twice as wide: 4.8 becomes 5, 5 x 0.0625 = 0.3125 again, but 0.28 would become 0.25.
#
# Two things happen at the ends. A number above the largest one **saturates**: it becomes the largest. A number of at most half the
# smallest becomes 0: it **underflows**.
#
# ## Exercise 34.1: round to any format


# %% tags=["exercise"]
def round_to(v, fraction, least, most):
    """v: float32 of any shape -> the nearest numbers of a format, same shape, float.

    fraction: bits of fraction. 2.0**least: the smallest normal number; below it the steps get no
    smaller.
    most: the largest number; beyond it, and for infinity: most, with v's sign.
    Halfway between two numbers: the even multiple of the step. NaN stays NaN.
    """
    # YOUR CODE


# %%
lesson.check("34.1", round_to)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `_, e = np.frexp(a)` gives an e with `2**(e-1) <= a < 2**e`: one more than the e above. Small numbers and 0 need the e of
# `2**least`: `np.frexp(np.maximum(a, 2.0**least))`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `a = np.minimum(np.abs(v), most)` first, and at the end `np.copysign(..., v)`. The step is `np.ldexp(1.0, e - 1 - fraction)`.
#
# </details>


# %% tags=["solution"]
# Solution 34.1
def round_to_solution(v, fraction, least, most):
    """v: float32 of any shape -> the nearest numbers of a format, same shape, float.

    fraction: bits of fraction. 2.0**least: the smallest normal number; below it the steps get no
    smaller.
    most: the largest number; beyond it, and for infinity: most, with v's sign.
    Halfway between two numbers: the even multiple of the step. NaN stays NaN.
    """
    a = np.minimum(np.abs(v), most)
    _, e = np.frexp(np.maximum(a, 2.0**least))  # 2^(e - 1) <= a < 2^e
    step = np.ldexp(np.float32(1), e - 1 - fraction)
    return np.copysign(np.rint(a / step) * step, v)


round_to = lesson.yours(round_to, round_to_solution)


# %% [markdown]
# What does a format cost at each size of number? The relative error (root mean square) of numbers of about one size. A
# relative error of 1 means that nothing is left:

# %%
sizes = 2.0 ** np.arange(-20, 19)
band = sizes[:, None] * 2.0 ** np.linspace(-0.5, 0.5, 200)
lines = {}
for name, form in FORMATS.items():
    error = np.abs(round_to(band.astype(np.float32), *form) - band) / band
    lines[name] = np.sqrt((error**2).mean(1))
    normal = sizes == 1
    print(
        f"{name}: {lines[name][normal][0]:.2%} for numbers near 1, {lines[name][0]:.2%} near 2^-20"
    )
lesson.figures.curves(sizes, lines, "size of the number", "relative error (rms)")

# %% [markdown]
# Each bit of fraction halves the error, and each bit of exponent doubles the *length* of the flat part, in powers of two. e4m3 is
# as accurate over about 15 powers of two, and useless outside. The flat part of e5m2 is 30 powers long, at twice the error. bf16
# has the range of float32, so its range is never a question.
#
# Weights and activations of one matrix have similar sizes, and their errors go into the loss directly: **e4m3**. Gradients
# differ more in size, and an optimizer averages their errors over many steps: **e5m2**.
#
# ## Why training needs scales
#
# A small language, as in lesson 29: the next token follows from the last two by a table, nine times out of ten. The model has an
# embedding, two layers $x \leftarrow x + \mathrm{relu}(x)\,W^T$ and a head, 10,496 parameters in all, with its backward pass
# by hand ([lesson 5](05_backward.ipynb)). The function `store` stands where the products of the layers read
# a matrix: whatever it returns is what they multiply. First it changes nothing and looks.

# %%
V, H, N, LAYERS, STEPS = 12, 64, 512, 2, 60  # N: tokens of a batch
table = np.random.default_rng(0).integers(0, V, (V, V))


def batch(rng):
    a, b = rng.integers(0, V, (2, N))
    sure = rng.random(N) < 0.9
    return a, b, np.where(sure, table[a, b], rng.integers(0, V, N))


def train(store, tokens=N, lr=0.01):
    """-> the losses.

    store(name, kind, matrix): what a product reads. tokens: of a whole optimizer step, N or more.
    """
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    table_w, head_w = 0.7 * draw(2 * V, H), np.zeros((V, H), np.float32)
    layers = [draw(H, H) / np.float32(np.sqrt(H)) for _ in range(LAYERS)]
    weights = [table_w, *layers, head_w]
    first, second = ([np.zeros_like(w) for w in weights] for _ in range(2))
    losses = []
    for step in range(1, STEPS + 1):
        a, b, y = batch(rng)
        x, saved = table_w[a] + table_w[V + b], []
        for i, w in enumerate(layers):
            r = store(f"x{i}", "e4m3", np.maximum(x, 0))
            w = store(f"w{i}", "e4m3", w)
            saved.append((x, r, w))
            x = x + r @ w.T  # product 1
        logits = x @ head_w.T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(N), y]).mean())
        p[np.arange(N), y] -= 1
        dlogits = p / np.float32(tokens)  # the loss is the mean over the tokens of the step
        gradients, dx = [dlogits.T @ x], dlogits @ head_w
        for i, (x, r, w) in reversed([*enumerate(saved)]):
            dy = store(f"dy{i}", "e5m2", dx)
            gradients.insert(0, dy.T @ r)  # product 3
            dx = dx + (dy @ w) * (x > 0)  # product 2
        dtable = np.zeros_like(table_w)
        np.add.at(dtable, a, dx)
        np.add.at(dtable, V + b, dx)
        for w, m, v, g in zip(weights, first, second, [dtable, *gradients]):  # Adam
            m += 0.1 * (g - m)
            v += 0.01 * (g * g - v)
            w -= lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.99**step)) + 1e-15)
    return losses


sizes_of = {}


def look(name, kind, x):
    sizes_of.setdefault(name, []).append(np.abs(x[x != 0]).ravel())
    return x


exact = train(look)
print(f"loss at first {exact[0]:.2f}; at the end {np.mean(exact[-20:]):.2f}")

# %% [markdown]
# Which powers of two do the numbers of the second layer have, over all steps? And in a real run a step has not 512 tokens but half a million,
# in many micro-batches. The loss is their mean, so every gradient is 1,024 times smaller:

# %%
powers = np.arange(-36, 4)
shown = {}
for name, title in (("x1", "activations"), ("w1", "weights"), ("dy1", "gradients")):
    e = np.floor(np.log2(np.concatenate(sizes_of[name])))
    shown[title] = [100 * (e == power).mean() for power in powers]
shown["gradients, 2^19 tokens"] = np.append(shown["gradients"][10:], [0.0] * 10)
figure = lesson.figures.curves(powers, shown, "power of two", "% of the numbers", log=False)
figure.axes[0].set_ylim(0, 46)
for (name, (f, least, _)), height in zip(FORMATS.items(), (36, 41)):
    figure.axes[0].plot([least - f] * 2, [0, height + 4], "--", color="#263238", lw=1)
    figure.axes[0].text(least - f, height, f" {name} begins here", fontsize=9)
figure

# %% [markdown]
# Activations and weights fit into e4m3 as they are. The gradients do not. Without a scale, how much of them is left?

# %%
dy = np.concatenate(sizes_of["dy1"][:10])  # of the first steps
print("                    tokens    e4m3: 0    e5m2: 0")
for tokens in (2**9, 2**14, 2**19):
    share = [
        (round_to(dy * np.float32(N / tokens), *FORMATS[k]) == 0).mean() for k in ("e4m3", "e5m2")
    ]
    print(f"{tokens:26,}  {share[0]:10.0%} {share[1]:10.0%}")

# %% [markdown]
# They underflow: the weights of these layers would not move at all. So do not store x, store x / s with a **scale** s, and
# multiply the product by the scales. For a scale per matrix they leave the sum:
#
# $$y = \sum_k x_k w_k \approx s_x s_w \sum_k c^x_k c^w_k$$
#
# The best s puts the largest number at the top of the range: $s = \max |x| / 448$. (fp16 has a similar trouble, and one factor for the
# whole loss is enough for its range. In fp8 each matrix needs its own.)
#
# ## How many scales?
#
# One for the matrix? One per row? One for every 128 numbers of a row? int8 codes were better the fewer numbers share a scale
# (lesson 29). For floats it is different. Three matrices: normal numbers; rows of very different size; and columns of very different size:

# %%
M, K = 64, 1024
plain = np.random.default_rng(2).normal(size=(M, K)).astype(np.float32)
spread = lambda n: 2.0 ** np.linspace(-24, 0, n, dtype=np.float32)
matrices = {
    "normal": plain,
    "rows of 2^-24 to 1": plain * spread(M)[:, None],
    "columns of 2^-24 to 1": plain * spread(K),
}
BLOCKS = {"per matrix": (M, K), "per row": (1, K), "per 1 x 128": (1, 128)}


def stored(x, kind, rows, columns):
    """x as it is after rounding, with a scale for each part of rows x columns."""
    parts = x.reshape(len(x) // rows, rows, -1, columns)
    scale = np.abs(parts).max((1, 3), keepdims=True) / FORMATS[kind][2]
    return (round_to(parts / scale, *FORMATS[kind]) * scale).reshape(x.shape)


print("relative error (rms):       " + "".join(f"{name:>14}" for name in BLOCKS) + "    (e4m3)")
for name, x in matrices.items():
    errors = []
    for rows, columns in BLOCKS.values():
        error = (stored(x, "e4m3", rows, columns) - x) / x
        errors.append(np.sqrt((error**2).mean()))
    print(f"{name:26}", "".join(f"{error:14.1%}" for error in errors))

# %% [markdown]
# For numbers of similar size the scale hardly matters: a float's steps are relative, and a scale only *moves* the range. More scales help
# only where sizes within one matrix differ by more than the 15 powers of two of e4m3. (With e5m2 for the gradients it is 30.)
#
# And what do they cost?
#
# - **Per matrix.** One multiplication per output. Nothing else.
# - **Per row.** $y = x\,w^T$ sums over the columns of x, and the scale of a row leaves the sum. But $dw = dy^T x$ sums over
#   the *rows* of x. There the scale would stay inside, so the transposed copy needs scales of its own, one per column of x, and codes of its own:
#   x is rounded twice, from two passes over it.
# - **Per 1 x 128.** The scale stays inside the sum, and changes every 128 terms. A product has to stop, multiply by two scales in float32 and add. Tensor
#   cores do not do this by themselves on Hopper, and the transposed copy needs other blocks, too.
#
# All products of the blocks of three models, measured with each of the three: [known issues](known_issues.md). The library
# takes one scale per matrix. It is the fastest; whether it always trains as well is not known yet.
#
# ## Where does the scale come from?
#
# The scale needs the largest number of the matrix. A kernel that writes codes knows it only at its *end*. Two ways out:
#
# - **Current scaling**: read the matrix twice. First for its maximum, then to write codes. It never saturates. It costs a pass
#   over the memory, and the kernel that computes the numbers cannot write codes: it has to store the numbers first.
# - **Delayed scaling**: take the scale from the maxima of the *steps before*, with some room for growth, and note today's maximum
#   for tomorrow. One pass.
#
# With a room of 2 and the last maximum 7: $s = 2 \cdot 7 / 448 = 0.03125$, so numbers up to 14 fit. If the next maximum is 20, the numbers above 14 saturate. They are
# **counted**, so that a log shows them, and the step after has a scale for up to 40.
#
# ## Exercise 34.2: the next scale
#
# Three cases need care. A matrix may be all zeros (the gradient of the first step, if the head is 0): a scale of 0 would make 0 / 0. A
# maximum may be infinite or NaN, after a step that went wrong: a scale made from it would spoil every later step. And before the first step there is no maximum at all.


# %% tags=["exercise"]
def next_scale(maxima, scale, most, room):
    """-> the scale for the next step: room x (the largest of the maxima) / most.

    maxima: max |x| of the last steps, a list of float32, perhaps empty. Those that are 0, infinite
    or NaN do not count; if none counts, the scale stays `scale`. most: the largest number of the
    format. The scale is at least 2.0**-126, and finite.
    """
    # YOUR CODE


# %%
lesson.check("34.2", next_scale)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `good = [m for m in maxima if 0 < m < np.inf]`: a comparison with NaN is false. `room * m` may be too large for float32: divide first.
#
# </details>


# %% tags=["solution"]
# Solution 34.2
def next_scale_solution(maxima, scale, most, room):
    """-> the scale for the next step: room x (the largest of the maxima) / most.

    maxima: max |x| of the last steps, a list of float32, perhaps empty. Those that are 0, infinite
    or NaN do not count; if none counts, the scale stays `scale`. most: the largest number of the
    format. The scale is at least 2.0**-126, and finite.
    """
    good = [m for m in maxima if 0 < m < np.inf]
    return max(max(good) * (room / most), 2.0**-126) if good else scale


next_scale = lesson.yours(next_scale, next_scale_solution)


# %% [markdown]
# How long should the history be? A matrix of 4,096 normal numbers, 40 steps. It grows slowly; at step 15 there is a **spike**, 16 times as large, for one step:

# %%
rng, T = np.random.default_rng(3), 40
growth = 1.03 ** np.arange(T)
growth[15] *= 16
xs = [(g * rng.normal(size=4096)).astype(np.float32) for g in growth]
lines = {"max |x|": [np.abs(x).max() for x in xs]}
print("                  step 15: saturated   worst error   median error of step 16   of step 30")
for history in (1, 16):
    scale, maxima, ends, report = 1.0, [np.abs(xs[0]).max()], [], []
    for x in xs:
        scale = next_scale(maxima[-history:], scale, 448.0, 2.0)
        largest = scale * 448
        error = np.abs(round_to(x / scale, *FORMATS["e4m3"]) * scale - x)
        report.append((np.abs(x) > largest).sum())
        report.append(error.max() / np.abs(x).max())
        report.append(np.median(error / np.abs(x)))
        maxima.append(np.abs(x).max())
        ends.append(largest)
    lines[f"fits, history of {history}"] = ends
    report = np.array(report).reshape(T, 3)
    print(
        f"history of {history:2} {report[15, 0]:15.0f} of 4,096 {report[15, 1]:13.0%} "
        f"{report[16, 2]:25.2%} {report[30, 2]:12.2%}"
    )
figure = lesson.figures.curves(range(T), lines, "step", "largest number", log=False)
figure.axes[0].set_yscale("log")
figure

# %% [markdown]
# *At* the spike both do the same: the large numbers are cut, as a clipped gradient is, but number by number. *After* it, a scale
# that is too large by 16 costs nothing that can be seen, because a float loses range and not digits. So a history of one step is enough, and it needs
# two numbers per matrix: the scale, and today's maximum. That is what the library keeps.
#
# ## Measure: a training with and without scales
#
# Four ways to store. And the counters: numbers that saturated, and nonzero gradients that became 0.


# %%
class Store:
    """Rounds what the products read.

    scaled: delayed scales; else the scale is 1. only: one format for all matrices, or None.
    """

    def __init__(self, scaled, only=None, room=2.0):
        self.scaled, self.only, self.room, self.scales = scaled, only, room, {}
        self.saturated, self.lost = 0, []

    def __call__(self, name, kind, x):
        form = FORMATS[self.only or kind]
        largest = np.abs(x).max()
        if self.scaled and name not in self.scales:  # the first step measures before it encodes
            self.scales[name] = next_scale([largest], 1.0, form[2], self.room)
        scale = np.float32(self.scales.get(name, 1.0))
        self.saturated += (np.abs(x) > form[2] * scale).sum()
        y = round_to(x / scale, *form) * scale
        if kind == "e5m2":
            self.lost.append(((y == 0) & (x != 0)).mean())
        if self.scaled:
            self.scales[name] = next_scale([largest], scale, form[2], self.room)
        return y


ways = {
    "float32": lambda name, kind, x: x,
    "bf16": Store(False, "bf16"),
    "fp8, scaled": Store(True),
    "fp8, not scaled": Store(False),
}
losses = {name: train(store, tokens=2**19) for name, store in ways.items()}
mean = lambda loss: np.convolve(loss, np.ones(5) / 5, "valid")
for name, store in ways.items():
    end = np.mean(losses[name][-20:])
    print(f"{name:16} loss at the end {end:.2f}", end="")
    print(f"   gradients lost {np.mean(store.lost):4.0%}" if getattr(store, "lost", 0) else "")
numbers = STEPS * LAYERS * (2 * N * H + H * H)
print(f"saturated with scales: {ways['fp8, scaled'].saturated / numbers:.4%}")
lines = {name: mean(loss) for name, loss in losses.items()}
lesson.figures.curves(np.arange(len(lines["bf16"])), lines, "step", "loss", log=False)

# %% [markdown]
# With scales, fp8 trains as float32 does, here. (It loses the gradients of one of the 60 steps: the head begins at 0, so the first gradients are 0 and
# leave no maximum. The scale of the second step is still 1, and everything underflows once.)
#
# Without scales the two layers stay as they were drawn (their gradients are 0), and only the embedding and the
# head learn, whose products are not in fp8.
#
# ## The library's kernel
#
# The state of a matrix from step to step, and the next scale (34.2). (With several ranks, all take the largest maximum, so all have the same scale.)

# %%
from xtrain.kernels import fp8

lesson.source(fp8.Slot)
lesson.source(fp8.next_scale)

# %% [markdown]
# The kernel that rounds, notes the maximum and counts is the subject of [lesson 45](45_fp8_kernel.ipynb).
#
# ## What did not help
#
# *A history of 16 maxima.* The cell above: nearly the same errors at a spike and after it, and 15 more numbers to keep
# per matrix.
#
# *No room for growth.* With a room of 1, a maximum that grows from step to step saturates in every step. In the run above (`Store(True, room=1.0)`) more numbers do, though this model learns as well. A room of 2 gives up one of 15 powers of two.
#
# *One factor for the whole loss*, as for fp16. It moves all gradients together. Those of e5m2 would fit, while the layers' gradients are similar in size; weights and activations would need their scales all the same.
#
# ## More exercises
#
# 1. The library's scale is $2 \max|x| / 448$ and no power of two. What would a scale that is a power of two save in the rounding, and what does it cost?
# 2. Which product of a layer could use e4m3 for dy instead of e5m2 with the least risk? Try `only="e4m3"` in `Store(True, ...)`: does the loss differ?
# 3. Two GPUs train with the same data-parallel model ([lesson 15](15_data_parallel.ipynb)). Each notes the maxima of its own part of the batch. What must they exchange so that both keep identical weights?
#
# <details><summary>Solutions</summary>
#
# 1: Dividing by it changes the exponent only, so x / s is exact, and rounding happens once. It costs up to one power of two of range, since the scale must be rounded up; the digits stay the same. 2: In dw the errors
# of many tokens average out, so there; but the codes of dy are made once for both products. In this small model the loss is the same: with a scale, its gradients span fewer than 15 powers of two.
# 3: Nothing. The weights' maxima are the same on all ranks, and
# the scales of x and dy concern only a rank's own tokens. The gradients are summed over the ranks as ever, so the weights stay identical. A maximum over the ranks (an all-reduce, [lesson 15](15_data_parallel.ipynb)) is needed only if a run on one GPU is to give the same numbers.
#
# </details>
#
# ## Sources
#
# - P. Micikevicius et al., *FP8 Formats for Deep Learning*, 2022: e4m3, e5m2, and which tensors use them.
# - NVIDIA, *Transformer Engine* documentation: current and delayed scaling, histories of maxima.
