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
# *About 90 minutes. You need [lesson 4](04_matmul.ipynb) and [lesson 12](12_bf16.ipynb).
# [Lesson 29](29_quantized.ipynb) is about weights of one byte in serving.*
#
# **The question.** The tensor cores of a Hopper GPU multiply numbers of one byte twice as fast as bf16. A
# training step is mostly matrix products. Can a model be trained with numbers that have 3 bits of fraction,
# or 2? And if the largest number is 448, where do gradients of a millionth go?
#
# The new idea is the **scale**: each matrix is stored as small numbers times one factor. You will write the
# rounding, the choice of the scale, and the two halves of the kernel that writes codes:
# rounding in the bits of a float, and the transposed copy that Hopper's products need.

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
from numba import cuda, float32, int32, uint8
from numba.cuda.libdevice import float_as_int

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
# `_, e = np.frexp(a)` gives an e with $2^{e-1} \le a < 2^e$: one more than the e above. Small numbers and 0 need the e of
# $2^{least}$: `np.frexp(np.maximum(a, 2.0**least))`.
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
# ## Rounding in a kernel
#
# A kernel has no `frexp`, and needs none: a float32 *is* an exponent and a fraction. `float_as_int(a)` shows its bits: 8 of exponent, with 127 added, and 23 of
# fraction. To keep 2 bits of fraction, as in e5m2, drop the 21 lowest. Rounded to the nearest, halves to even:
#
# - add one less than half of what is dropped, `0xFFFFF`, plus the lowest bit that is kept: then a half carries only if that bit is 1;
# - shift right by 21. A carry out of the fraction raises the exponent by one, as it should;
# - the exponent of float32 counts from -127, that of e5m2 from -15. Subtract the difference, 112, at the exponent's place: `112 << 2`.
#
# Below $2^{-14}$ the steps stay $2^{-16}$, and there is a trick: a float32 from 128 to 256 has steps of $128 \cdot 2^{-23} = 2^{-16}$. So the *addition* of 128
# rounds a to a multiple of $2^{-16}$, halves to even, and the lowest bits of the sum count the multiples. Here is e5m2 as a whole:


# %% tags=["exercise"]
@cuda.jit(device=True)
def e5m2_code(v):
    """-> the code of the e5m2 number nearest to v: 0 to 255. Beyond the largest number: that one.
    NaN: 0x7F."""
    if v != v:
        return int32(0x7F)
    a = min(abs(v), float32(57344.0))
    if a < float32(2.0**-14):
        code = float_as_int(a + float32(128.0)) - float_as_int(float32(128.0))
    else:
        bits = float_as_int(a)
        code = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    return int32(code | 0x80 if v < float32(0.0) else code)


# %% [markdown]
# A kernel that writes codes has two more duties, because it is the only one that sees the numbers. It notes the **largest** |x|, for the scale of the next step. Bits of floats that are not negative are in the
# order of the floats, so `cuda.atomic.max` on the *bits*, an int32, does it: a GPU has no atomic maximum of floats. The result is the same in any order. And it **counts** what went wrong: numbers that saturated, and numbers that were infinite or NaN.
#
# An infinite number must not saturate: 448 looks healthy, and would hide that the training has broken down. It becomes NaN, which the loss shows.
# (`e5m2_code` alone does saturate it: a kernel has to ask for infinity before it rounds.)
#
# ## Exercise 34.3: codes of e4m3


# %% tags=["exercise"]
@cuda.jit
def encode_kernel(codes_n, largest_1, counts_2, x_n, scale_1):
    """codes[i] = the e4m3 code of the number nearest to x[i] / scale[0], halves to even.

    Grid ceil(n / 64), block 64: a thread per number. x, scale: float32, scale > 0.
    codes: uint8, the sign in the highest bit. Beyond 448: the code of 448, 0x7E, with x's sign. NaN
    and both infinities: 0x7F.
    largest: (1,) int32, 0 at first: the bits of the largest |x[i]|; those of infinity if an x[i] is
    not finite.
    counts: (2,) int64, add to them: how many x[i] are finite with |x[i] / scale| > 448; how many
    are not finite.
    """
    # YOUR CODE


# %%
lesson.check("34.3", encode_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# e4m3 keeps 3 bits, so 20 are dropped, and its exponent counts from -7: `120 << 3`. Below $2^{-6}$ its steps are $2^{-9}$, which are the steps of a float32
# from $2^{14}$ on.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `abs(x_n[i]) < float32(np.inf)` is false for infinity and for NaN. Ask x itself: x / scale may overflow where x is finite. Counts: `cuda.atomic.add(counts_2, 0, 1)`.
#
# </details>


# %% tags=["solution"]
# Solution 34.3
@cuda.jit
def encode_kernel_solution(codes_n, largest_1, counts_2, x_n, scale_1):
    """codes[i] = the e4m3 code of the number nearest to x[i] / scale[0], halves to even.

    Grid ceil(n / 64), block 64: a thread per number. x, scale: float32, scale > 0.
    codes: uint8, the sign in the highest bit. Beyond 448: the code of 448, 0x7E, with x's sign. NaN
    and both infinities: 0x7F.
    largest: (1,) int32, 0 at first: the bits of the largest |x[i]|; those of infinity if an x[i] is
    not finite.
    counts: (2,) int64, add to them: how many x[i] are finite with |x[i] / scale| > 448; how many
    are not finite.
    """
    i = cuda.grid(1)
    if i < x_n.size:
        size, a, code = abs(x_n[i]), abs(x_n[i] / scale_1[0]), 0x7F
        if size < float32(np.inf):
            if a > float32(448.0):
                a = float32(448.0)
                cuda.atomic.add(counts_2, 0, 1)
            if a < float32(2.0**-6):
                code = float_as_int(a + float32(16384.0)) - float_as_int(float32(16384.0))
            else:
                bits = float_as_int(a)
                code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
            if x_n[i] < float32(0.0):
                code = code | 0x80
        else:
            size = float32(np.inf)
            cuda.atomic.add(counts_2, 1, 1)
        codes_n[i] = code
        cuda.atomic.max(largest_1, 0, float_as_int(size))


encode_kernel = lesson.yours(encode_kernel, encode_kernel_solution)


# %% [markdown]
# The example from above: the last maximum was 7, so the scale is 14 / 448. Then comes a 20, and an infinity:

# %%
x_n = lesson.array(np.array([3, -0.4, 7, 20, np.inf], np.float32))
scale_1 = lesson.array(np.array([next_scale([np.float32(7)], 1.0, 448.0, 2.0)], np.float32))
codes_n, largest_1 = lesson.array(np.zeros(5, np.uint8)), lesson.array(np.zeros(1, np.int32))
counts_2 = lesson.array(np.zeros(2, np.int64))
lesson.launch(encode_kernel, 1, 64, codes_n, largest_1, counts_2, x_n, scale_1)
print("codes  ", *(f"{c:#04x}" for c in lesson.host(codes_n)))
print("largest", lesson.host(largest_1).view(np.float32)[0], "- so the scale stays")
print("saturated, not finite:", *lesson.host(counts_2))

# %% [markdown]
# On a GPU that has fp8 the rounding is one instruction for two numbers, `cvt.rn.satfinite.e4m3x2.f32`. Yours runs on every GPU.
#
# ## Three products and a transposed copy
#
# A layer $y = x\,w^T$ has three products in a step. A tensor core reads a register of 32 bits from each operand: two neighbouring bf16 numbers, or four of
# fp8. Neighbouring along which axis? Along the one that is *summed*, K. If a matrix lies in memory with K contiguous ("K-major"), such registers are
# loaded as they are. For bf16, Hopper's instruction can transpose a tile on its way (wgmma, of [lesson 23](23_hopper.ipynb), has a flag for it, and `ldmatrix`, of [lesson 14](14_tensor_cores.ipynb), has `.trans`). Both move units of two bytes. **For fp8 there is neither**:
# one byte is not a unit that they can move. So each operand must lie in memory with the summed axis last:
#
# | product | summed over | reads | which is |
# |---|---|---|---|
# | y (N, O) = x w^T | I | x (N, I), w (O, I) | as they lie |
# | dx (N, I) = dy w | O | dy (N, O), w^T (I, O) | w transposed |
# | dw (O, I) = dy^T x | N | dy^T (O, N), x^T (I, N) | both transposed |
#
# Every matrix is needed twice, as codes and as transposed codes:

# %%
places = {
    "x": (0, 0.5), "w": (0, 2.5), "dy": (0, 4.5),
    "codes of x": (1, 0), "codes of x^T": (1, 1), "codes of w": (1, 2), "codes of w^T": (1, 3),
    "codes of dy": (1, 4), "codes of dy^T": (1, 5),
    "y = x w^T": (2.1, 1), "dx = dy w": (2.1, 3), "dw = dy^T x": (2.1, 5),
}  # fmt: skip
edges = [(x, f"codes of {x}{turned}") for x in ("x", "w", "dy") for turned in ("", "^T")]
edges += [("codes of x", "y = x w^T"), ("codes of w", "y = x w^T"), ("codes of dy", "dx = dy w")]
edges += [("codes of w^T", "dx = dy w"), ("codes of dy^T", "dw = dy^T x")]
edges += [("codes of x^T", "dw = dy^T x")]
lesson.figures.graph(places, edges, "three matrices, six of codes, three products")

# %% [markdown]
# The transposed copy comes from the same kernel. A second one would read the matrix once more. But a warp that has 32 neighbours of a *row* has 32 numbers of different rows of the
# transpose, N bytes apart: 32 sectors for 32 bytes ([lesson 2](02_memory.ipynb)). So a block takes a **tile** of 32 x 32 codes through shared memory: it writes rows into it, waits, and
# reads columns from it.
#
# Mind the banks. A column of a tile with rows of 32 bytes lies in 4 of the 32 banks. With rows of 36 bytes, 9 words, the words of a column are in 32 different banks.
#
# ## Exercise 34.4: both orientations


# %% tags=["exercise"]
@cuda.jit
def both_kernel(codes_NK, codes_KN, x_NK, scale_1):
    """codes[n, k] = e5m2_code(x[n, k] / scale[0]), and the same transposed: codes_KN[k, n].

    Grid (ceil(K / 32), ceil(N / 32)), block (32, 8): block (i, j) has the tile of columns from 32 i
    and rows from
    32 j on, a thread 4 of its rows. x, float32, is read once.
    A warp (32 threads of one threadIdx.y) reads and writes 32 neighbours in each of the three
    arrays.
    """
    # YOUR CODE


# %%
lesson.check("34.4", both_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `tile = cuda.shared.array((32, 36), uint8)`. `for r in range(cuda.threadIdx.y, 32, 8)` goes through the rows of the tile, with threadIdx.x as column. Then a barrier,
# which all threads reach, and the same loop over the columns.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the second loop, threadIdx.x is the *row* of the tile: `codes_KN[k0 + c, n0 + x] = tile[x, c]`. Its bounds are k0 + c < K and n0 + x < N.
#
# </details>


# %% tags=["solution"]
# Solution 34.4
@cuda.jit
def both_kernel_solution(codes_NK, codes_KN, x_NK, scale_1):
    """codes[n, k] = e5m2_code(x[n, k] / scale[0]), and the same transposed: codes_KN[k, n].

    Grid (ceil(K / 32), ceil(N / 32)), block (32, 8): block (i, j) has the tile of columns from 32 i
    and rows from
    32 j on, a thread 4 of its rows. x, float32, is read once.
    A warp (32 threads of one threadIdx.y) reads and writes 32 neighbours in each of the three
    arrays.
    """
    tile = cuda.shared.array((32, 36), uint8)
    N, K = x_NK.shape
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    k0, n0 = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32
    for r in range(y, 32, 8):
        if n0 + r < N and k0 + x < K:
            code = e5m2_code(x_NK[n0 + r, k0 + x] / scale_1[0])
            codes_NK[n0 + r, k0 + x] = code
            tile[r, x] = code
    cuda.syncthreads()  # the tile is complete
    for c in range(y, 32, 8):
        if k0 + c < K and n0 + x < N:
            codes_KN[k0 + c, n0 + x] = tile[x, c]


both_kernel = lesson.yours(both_kernel, both_kernel_solution)


# %% [markdown]
# What a warp does in both halves, in the simulator: sectors per instruction, and passes of an access to the tile.

# %%
from xtrain.simulator import sim

x = sim(np.random.default_rng(5).normal(size=(32, 64)).astype(np.float32))
codes = sim(np.zeros((32, 64), np.uint8)), sim(np.zeros((64, 32), np.uint8))
trace = lesson.traced(both_kernel, (2, 1), (32, 8), *codes, x, sim(np.ones(1, np.float32)))
for name in ("x_NK", "codes_NK", "codes_KN"):
    t = trace.traffic(name)
    print(f"{name:9} {t.sectors / t.requests:.0f} sectors, {t.efficiency:.0%} of their bytes used")
print("tile      passes:", max(trace.bank_conflicts()))

# %% [markdown]
# The library's kernel has tiles of 128 x 128, and moves 16 bytes per access: 16 neighbouring *codes of a column* have to be in one thread's registers. It reads words of 4 codes, and transposes
# 4 x 4 codes at a time with byte permutations.
#
# ## How many bits does a sum have?
#
# A product of two e4m3 numbers has 8 significant bits, and a sum of thousands of them needs many more. One would expect float32. But Hopper's tensor cores add fp8 products with
# about 14 bits (DeepSeek-AI 2024 found it in training). xtrain's test measured an error of $3.4 \cdot 10^{-4}$ of the largest sum on an H100, with 1,040 terms. A simple
# model of such a sum: after every 32 terms, which are one instruction, it is rounded to 14 bits. You have the function for that:

# %%
rng = np.random.default_rng(4)
a, b = (round_to(rng.normal(size=(64, 16384)).astype(np.float32), *FORMATS["e4m3"]) for _ in "ab")


def summed(K, bits, piece=32):
    """The sums over the first K terms, rounded to so many bits after each piece."""
    total = np.zeros((64, 64), np.float32)
    for k in range(0, K, piece):
        part = a[:, k : k + piece] @ b[:, k : k + piece].T
        total = round_to(total + part, bits - 1, -126, FORMATS["bf16"][2])
    return total


print("terms     error of sums of 14 bits, relative to the largest     of 24 bits")
for K in (1024, 4096, 16384):
    true = a[:, :K].astype(np.float64) @ b[:, :K].T.astype(np.float64)
    errors = [np.abs(summed(K, bits) - true).max() / np.abs(true).max() for bits in (14, 24)]
    print(f"{K:6,} {errors[0]:43.0e} {'below 1e-6' if errors[1] < 1e-6 else '':>24}")

# %% [markdown]
# The errors of the model have the size of the one that was measured. They grow slowly with the number of terms, and are
# small next to the errors of the numbers themselves: if both factors of every term are off by 2.6 %, in any direction,
# a typical sum is off by about 4 %. (Sums whose terms all have one sign suffer more: they grow, and each new term loses
# its lower bits. DeepSeek adds the partial sums of 128 terms in float32, by ordinary instructions. xtrain does not, and
# cuBLASLt's "fast accumulation", which is coarser still, is off.)
#
# ## What is in fp8, and what stays
#
# | in fp8 | in bf16 | in float32 |
# |---|---|---|
# | the three products of every matrix of the blocks: QKV, output, gate and up, down | attention's own products, embedding, head, the outputs y and dx | master weights, the residual stream, AdamW's state, weight gradients, norms' statistics, softmax, the loss |
#
# The head stays by default, because its errors go into the loss with no layer after them (`--fp8-head` moves it, in chunks, with e4m3 for its gradient). Attention stays because its products are inside a kernel of its own, and the exponentials of softmax turn an absolute error of a score into a relative error of a probability.
# How much of the arithmetic is left for fp8? Operations per token, 6 per weight and $6 L H D T$ for causal attention:

# %%
shapes = {  # layers, width, width of Q, of K and V, of the MLP, vocabulary, tokens of a sequence
    "gpt124m, T = 1024": (12, 768, 768, 768, 2048, 50304, 1024),
    "Qwen3-0.6B, T = 2048": (28, 1024, 2048, 1024, 3072, 151936, 2048),
    "TinyLlama-1.1B, T = 2048": (22, 2048, 2048, 256, 5632, 32000, 2048),
}
print("                           blocks   head   attention   if fp8 halves the blocks")
for name, (L, C, Q, KV, F, vocabulary, T) in shapes.items():
    blocks, head, attention = L * C * (2 * Q + 2 * KV + 3 * F), C * vocabulary, L * Q * T
    total = blocks + head + attention
    share = [100 * part / total for part in (blocks, head, attention)]
    print(f"{name:25} {share[0]:6.0f} % {share[1]:4.0f} % {share[2]:9.0f} %", end="")
    print(f" {total / (total - blocks / 2):13.2f} times as fast")

# %% [markdown]
# ## The improvement: fewer bytes
#
# That is more than a step can gain, since it counts only arithmetic. And the codes have to be written: per number 2 bytes are read (bf16) and 2 written (codes, both ways). How wide must a layer be for that to pay?
# For a given number of tokens the operations grow with the *square* of the width, and the codes in proportion to it. By the data sheet of an H100 (989 TFLOP/s in bf16, 1,979 in fp8, 3.35 TB/s), a square layer and 16,384 tokens:

# %%
print("width   saved by fp8, µs   writing codes, µs")
widths, tokens = (256, 512, 768, 1024, 2048, 4096), 16384
saved = [3 * 2 * tokens * C * C * (1 / 989e6 - 1 / 1979e6) for C in widths]
codes = [(2 * tokens * C + C * C) * 4 / 3.35e6 for C in widths]
for C, s, c in zip(widths, saved, codes):
    print(f"{C:5} {s:18.0f} {c:19.0f}")
times = {"saved by the products": saved, "writing codes": codes}
figure = lesson.figures.curves(widths, times, "width of the layer", "microseconds")
figure.axes[0].minorticks_off()
figure.axes[0].set_xticks(widths, widths)
figure

# %% [markdown]
# Below a width of about 800 fp8 would be *slower*, if it were done like this. (Real products reach less than the data sheet, so they have more to save.) The library saves bytes in two ways:
#
# - **Fusion.** A matrix that only products read is never written in bf16. The kernel that computes SwiGLU rounds its values in registers: it reads gate and up, and writes codes in both orientations. SwiGLU's backward pass, the norms and, with `--fp8-head`, the gradient of the loss do the same.
# - **One pass.** Delayed scaling, with the maximum and the counts in the same kernel that writes both orientations. And backward reads the codes of $x^T$ that forward has written: half of bf16's bytes of saved activations.
#
# What was measured on a GPU, and what was not, is in the [known issues](known_issues.md).
#
# ## The library's kernel
#
# The state of a matrix from step to step, the next scale (34.2), four numbers (34.3), and the kernel: 34.3 and 34.4 in one, for four sources of values. (With several ranks, all take the largest maximum, so all have the same scale.)

# %%
from xtrain.kernels import fp8
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.primitives import codes as conversions
from xtrain.nn import fp8 as training

lesson.source(fp8.Slot)
lesson.source(fp8.next_scale)
lesson.source(fp8.make_encode4)
lesson.source(fp8.make_fp8_kernel)

# %% [markdown]
# The rounding (34.1, 34.3) is the hardware's, and the 4 x 4 transposes are byte permutations:

# %%
lesson.source(conversions._codes4)
lesson.source(conversions.transpose_codes)

# %% [markdown]
# A layer with its three products. `rows` are the codes, `columns` the transposed ones: compare with the table above.

# %%
lesson.source(training._product)
lesson.source(training._input_gradient)
lesson.source(training._weight_gradient)
lesson.source(training.Fp8Linear)

# %% [markdown]
# Do they agree with yours? The library's kernel runs in the simulator, on one tile of 128 x 128:

# %%
x = rng.normal(size=(128, 128)).astype(np.float32)
x[5, 6] = 1000.0  # saturates
x_bf16 = np.asarray(round_to(x, *FORMATS["bf16"]), np.float32)
state = [sim(s) for s in (np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int64))]
theirs = fp8.fp8(sim(x_bf16.astype(BFLOAT16)), fp8.Slot(*state, "e4m3"))
x_n, scale_1 = lesson.array(x_bf16.ravel()), lesson.array(np.ones(1, np.float32))
codes_n, largest_1 = lesson.array(np.zeros(x.size, np.uint8)), lesson.array(np.zeros(1, np.int32))
counts_2 = lesson.array(np.zeros(2, np.int64))
lesson.launch(encode_kernel, x.size // 64, 64, codes_n, largest_1, counts_2, x_n, scale_1)
mine = lesson.host(codes_n).reshape(128, 128)
print("codes:     ", np.array_equal(np.asarray(theirs.codes_NK), mine))
print("transposed:", np.array_equal(np.asarray(theirs.codes_KN), mine.T))
print(
    "largest:   ", np.asarray(state[1]).view(np.float32)[0], "saturated:", *np.asarray(state[2])[:1]
)
print("numbers:   ", np.array_equal(fp8.decode(theirs.rows), round_to(x_bf16, *FORMATS["e4m3"])))

# %% [markdown]
# ## What did not help
#
# *A history of 16 maxima.* The cell above: nearly the same errors at a spike and after it, and 15 more numbers to keep
# per matrix.
#
# *No room for growth.* With a room of 1, a maximum that grows from step to step saturates in every step. In the run above (`Store(True, room=1.0)`) more numbers do, though this model learns as well. A room of 2 gives up one of 15 powers of two.
#
# *One factor for the whole loss*, as for fp16. It moves all gradients together. Those of e5m2 would fit, while the layers' gradients are similar in size; weights and activations would need their scales all the same.
#
# *Weight gradients in bf16.* Then $x^T$ and $dy^T$ need no codes, but a third of the arithmetic stays as slow as it was.
#
# ## More exercises
#
# 1. The library's scale is $2 \max|x| / 448$ and no power of two. What would a scale that is a power of two save in the rounding, and what does it cost?
# 2. Which product of a layer could use e4m3 for dy instead of e5m2 with the least risk? Try `only="e4m3"` in `Store(True, ...)`: does the loss differ?
# 3. In 34.4 x is float32. If it were bf16, how many bytes per number would each of the two stages move, and how long is the access of a warp?
# 4. Two GPUs train with the same data-parallel model ([lesson 15](15_data_parallel.ipynb)). Each notes the maxima of its own part of the batch. What must they exchange so that both keep identical weights?
#
# <details><summary>Solutions</summary>
#
# 1: Dividing by it changes the exponent only, so x / s is exact, and rounding happens once. It costs up to one power of two of range, since the scale must be rounded up; the digits stay the same. 2: In dw the errors
# of many tokens average out, so there; but the codes of dy are made once for both products. In this small model the loss is the same: with a scale, its gradients span fewer than 15 powers of two.
# 3: It reads 2 bytes and writes 1 + 1. A warp reads 64 neighbouring bytes and writes 32: one sector. That is why the library's threads read 16 bytes each. 4: Nothing. The weights' maxima are the same on all ranks, and
# the scales of x and dy concern only a rank's own tokens. The gradients are summed over the ranks as ever, so the weights stay identical. A maximum over the ranks (an all-reduce, [lesson 15](15_data_parallel.ipynb)) is needed only if a run on one GPU is to give the same numbers.
#
# </details>
#
# ## Sources
#
# - P. Micikevicius et al., *FP8 Formats for Deep Learning*, 2022: e4m3, e5m2, and which tensors use them.
# - NVIDIA, *Transformer Engine* documentation: current and delayed scaling, histories of maxima.
# - DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024: scales of 1 x 128 numbers, and sums of about 14 bits on Hopper.
# - NVIDIA, *PTX ISA*: `cvt`, `mma` and `wgmma` for .e4m3 and .e5m2; which operands can be transposed.
