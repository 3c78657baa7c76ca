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
# # 41 int4 by hand: groups, GPTQ, AWQ
#
# *About 75 minutes. You need [lesson 29](29_quantized.ipynb).*
#
# **The question.** Lesson 29 stores a weight in one byte, and the model hardly notices. Half a byte has 16 values, and rounding to the nearest one
# hurts. Which scale does a group of weights need, and can the other weights make up for the error of one?
#
# You will unpack two codes from a byte, quantize in groups, write GPTQ, which corrects the weights that are not rounded yet, and the
# search of AWQ, which protects the channels that matter. A small model shows what each of them saves, in 4 bits and in 3.

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

import xtrain
from xtrain import lesson

# %% [markdown]
# ## Two codes in a byte, by hand
#
# A code of 4 bits is a number from -8 to 7 in two's complement: 0 to 7 are themselves, and -1 is 15, -8 is 8. No memory has addresses of half
# bytes, so two codes share one, the first in the lower four bits. The codes 3 and -2 are the nibbles 3 and 14, the byte $14 \cdot 16 + 3 = 227$.


# %%
def pack(codes):
    """codes (R, C) int8 from -8 to 7, C even -> (R, C / 2) uint8"""
    nibbles = codes.astype(np.uint8) & 15
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


print(pack(np.array([[3, -2], [-8, 7], [-1, 0]], np.int8)).ravel())

# %% [markdown]
# ## Exercise 41.1: unpack


# %% tags=["exercise"]
def unpack(packed):
    """packed (R, B) uint8 -> codes (R, 2 B) int8 from -8 to 7: what `pack` was given.

    Byte b of a row has code 2 b in its lower four bits and code 2 b + 1 in its upper four.
    """
    # YOUR CODE


# %%
lesson.check("41.1", unpack)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `low = packed & 15`, `high = packed >> 4`, both from 0 to 15. What is 8 or more stands for a negative number: subtract 16. In int8, not in
# uint8. `codes[:, ::2] = low` writes every second column.
#
# </details>


# %% tags=["solution"]
# Solution 41.1
def unpack_solution(packed):
    """packed (R, B) uint8 -> codes (R, 2 B) int8 from -8 to 7: what `pack` was given.

    Byte b of a row has code 2 b in its lower four bits and code 2 b + 1 in its upper four.
    """
    codes = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    codes[:, ::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    codes[codes > 7] -= 16
    return codes


unpack = lesson.yours(unpack, unpack_solution)


# %%
every = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
print(unpack(pack(every)))

# %% [markdown]
# ## A scale for every group
#
# With codes up to 7 the step of a row is its largest weight over 7, and one large weight makes the steps of the whole row wide. So a **group** of 32
# to 128 neighbouring weights of a row gets a scale of its own. The scales cost memory: with 16 bits per scale and a group of 64 a weight
# takes $4 + 16 / 64 = 4.25$ bits.
#
# By hand: the group 0.7, -0.2, 0.1, 0.33 has the scale 0.1, and the codes 7, -2, 1, 3. A group of zeros has no largest weight: its scale is 1.
#
# ## Exercise 41.2: quantize in groups


# %% tags=["exercise"]
def quantize(w, group, most):
    """-> codes (R, C) int8 from -most to most, scale (R, C / group) float32.

    w: (R, C) float32. group: divides C. The scale of a group is its largest |w| over most; of a
    group of zeros: 1. The code is w / scale, rounded to the nearest (np.rint).
    """
    # YOUR CODE


# %%
lesson.check("41.2", quantize)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `w.reshape(R, C // group, group)` has the groups as its last axis. The scale is the maximum of |w| over it, with `keepdims=True`; `np.where(scale > 0, scale, 1)`.
#
# </details>


# %% tags=["solution"]
# Solution 41.2
def quantize_solution(w, group, most):
    """-> codes (R, C) int8 from -most to most, scale (R, C / group) float32.

    w: (R, C) float32. group: divides C. The scale of a group is its largest |w| over most; of a
    group of zeros: 1. The code is w / scale, rounded to the nearest (np.rint).
    """
    groups = w.reshape(len(w), -1, group)
    scale = np.abs(groups).max(axis=2, keepdims=True) / most
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.rint(groups / scale).astype(np.int8)
    return codes.reshape(w.shape), scale[:, :, 0]


quantize = lesson.yours(quantize, quantize_solution)


# %%
rng = np.random.default_rng(0)
w = rng.normal(size=(64, 256)).astype(np.float32)
print("group   bits per weight   error, relative to the weights")
for group in (256, 128, 64, 32, 16):
    codes, scale = quantize(w, group, 7)
    back = (codes.reshape(64, -1, group) * scale[:, :, None]).reshape(w.shape)
    error = np.sqrt(((back - w) ** 2).mean() / (w**2).mean())
    print(f"{group:5} {4 + 16 / group:17.2f} {error:20.1%}")

# %% [markdown]
# ## A model, and what its matrices read
#
# Errors of weights are not the goal. A matrix computes $y = x\,w^T$, and what counts is the error of y for the x that occur. So GPTQ and AWQ
# look at the inputs of each matrix for a few texts, the **calibration**. The model is that of lesson 29, a little larger:

# %% tags=["varies"]
from xtrain.nn import modules

V = 32
table = np.random.default_rng(0).integers(0, V, (V, V))


def text(rng, n, T=32):
    """-> (n, T + 1) int32: the next token follows from the last two, four times out of five"""
    rows = rng.integers(0, V, (n, T + 1))
    for t in range(2, T + 1):
        sure = rng.random(n) < 0.8
        rows[:, t] = np.where(sure, table[rows[:, t - 2], rows[:, t - 1]], rows[:, t])
    return rows.astype(np.int32)


shape = dict(dim=64, n_layers=2, n_heads=2, head_dim=32, hidden_dim=128, max_seq_len=64)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=V, **shape), seed=0)
optimizer, steps = xtrain.AdamW(model, lr=1e-2, weight_decay=0.0), 250
for step in range(steps):
    optimizer.lr = 1e-2 * min(1, (step + 1) / 20) * (1 - step / steps)
    rows = text(rng, 16)
    model.zero_grad()
    model.loss(rows[:, :-1], rows[:, 1:]).backward()
    optimizer.step()
held_out = text(np.random.default_rng(1), 64)


def perplexity():
    with xtrain.no_grad():
        return float(np.exp(model.loss(held_out[:, :-1], held_out[:, 1:]).item()))


linears, as_trained = [], perplexity()
for block in model.model.layers:
    # a few channels of the MLP become large, and the matrix that reads them small there (lesson 29)
    half = block.mlp.gate_up.weight.data[128:]
    half[:3] *= 30
    block.mlp.down_proj.weight.data[:, :3] /= 30
    linears += [block.self_attn.qkv, block.self_attn.o_proj, block.mlp.gate_up, block.mlp.down_proj]


def inputs(rows):
    """-> what each matrix reads, (N, C)"""
    read, plain = {}, modules.Linear.__call__

    def noted(self, x):
        read[id(self)] = np.array(x.data)
        return plain(self, x)

    modules.Linear.__call__ = noted
    with xtrain.no_grad():
        model.loss(rows[:, :-1], rows[:, 1:])
    modules.Linear.__call__ = plain
    return [read[id(m)] for m in linears]


own = [m.weight.data.copy() for m in linears]
xs = inputs(text(np.random.default_rng(2), 32))
print(f"perplexity {as_trained:.2f}, with large channels {perplexity():.2f}")
print(f"{len(linears)} matrices, {xs[0].shape[0]} rows of calibration")
sizes = np.abs(xs[3]).mean(0)
print(
    f"down_proj reads channels of size {np.median(sizes):.2f}, and three of {sizes[:3].mean():.1f}"
)

# %% [markdown]
# ## GPTQ
#
# Round the weights of a row one after the other. When weight j has been rounded, it is wrong by e, and the output is wrong by $e\,x_j$. The weights behind it
# are still free, and if their inputs are correlated with $x_j$, they can take over a part of it. What is the best correction? The squared error of the output is
# $\delta H \delta^T$ for the error $\delta$ of the row, with $H = x^T x$. Minimizing it over the free weights gives (Frantar et al. 2022): with U, the upper triangle of
# the Cholesky decomposition of $H^{-1} = U^T U$,
#
# $$w_k \leftarrow w_k - \frac{w_j - q_j}{U_{jj}}\, U_{jk} \qquad \text{for all } k > j$$
#
# where $q_j$ is the rounded weight. All rows have the same H, so one column of all rows is done at a time. H may be singular, if inputs are always
# 0 or dependent: add `damp` times the mean of its diagonal to the diagonal.
#
# By hand, two weights 0.6 and 0.4 with a scale of 1, and inputs that are always equal: $x_1 = x_2$. Rounded to the nearest they are 1 and 0, and the output is
# right by luck. For 0.4 and 0.4 both become 0, and the output is 0 instead of 0.8 x. With the correction the first error, 0.4, goes to the second weight, which is 0.8 then,
# and becomes 1.
#
# ## Exercise 41.3: GPTQ


# %% tags=["exercise"]
def gptq(w, x, scale, most, damp):
    """-> codes (R, C) int8 from -most to most.

    w: (R, C). x: (N, C), calibration. scale: (R, 1), of each row. Column after column:
    code = rint(w[:, j] / scale), limited to -most ... most; then the columns behind j are corrected
    by the formula, with q_j = code * scale. H = x^T x plus damp * (mean of its diagonal) on its
    diagonal. In float64; w stays unchanged.
    """
    # YOUR CODE


# %%
lesson.check("41.3", gptq)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `U = np.linalg.cholesky(np.linalg.inv(H)).T`: NumPy returns the lower triangle L of $L L^T$, and its transpose is U.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `e = (w[:, j] - code * scale[:, 0]) / U[j, j]`, one number per row, then `w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]`, on a copy of w.
#
# </details>


# %% tags=["solution"]
# Solution 41.3
def gptq_solution(w, x, scale, most, damp):
    """-> codes (R, C) int8 from -most to most.

    w: (R, C). x: (N, C), calibration. scale: (R, 1), of each row. Column after column:
    code = rint(w[:, j] / scale), limited to -most ... most; then the columns behind j are corrected
    by the formula, with q_j = code * scale. H = x^T x plus damp * (mean of its diagonal) on its
    diagonal. In float64; w stays unchanged.
    """
    w, x, s = w.astype(np.float64), x.astype(np.float64), scale[:, 0].astype(np.float64)
    H = x.T @ x
    H += damp * np.diag(H).mean() * np.eye(len(H))
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    codes = np.empty(w.shape, np.int8)
    for j in range(w.shape[1]):
        codes[:, j] = np.clip(np.rint(w[:, j] / s), -most, most)
        e = (w[:, j] - codes[:, j] * s) / U[j, j]
        w[:, j + 1 :] -= e[:, None] * U[j, j + 1 :]
    return codes


gptq = lesson.yours(gptq, gptq_solution)


# %%
for pair in ([0.6, 0.4], [0.4, 0.4]):
    equal = np.repeat(rng.normal(size=(100, 1)), 2, 1)
    codes = gptq(np.array([pair]), equal, np.ones((1, 1)), 7, 1e-6)
    print(f"weights {pair}: codes {codes[0].tolist()}, their sum {sum(pair):.1f} and {codes.sum()}")

# %% [markdown]
# ## AWQ
#
# The other idea (Lin et al. 2023): a weight that multiplies a *large* input matters more. Multiply the weights of channel k by $c_k$ before rounding, and
# divide x by it. The product is the same, but the relative error of these weights becomes smaller, at the cost of the others in the row, whose
# common scale may grow. Which c? A power of the mean size of the input, $c_k = (\mathrm{mean}\,|x_k|)^{\,p}$: for p = 0 nothing happens, p = 1
# makes all inputs equally large. The best p of a few is found by trying.
#
# ## Exercise 41.4: the best power


# %% tags=["exercise"]
def nearest(w, most):
    """Round each row of w to codes up to `most`, and back. -> float64 of w's shape"""
    scale = np.maximum(np.abs(w).max(axis=1, keepdims=True), 1e-30) / most
    return np.rint(w / scale) * scale


def best_power(w, x, powers, most):
    """-> the power p of the list that makes the error of y = x w^T smallest.

    w: (R, C). x: (N, C), no channel is always 0. c = mean |x| of each channel, to the power p. The
    weights used are nearest(w * c, most) / c. The error is the sum of the squares of all elements
    of y - x w^T.
    """
    # YOUR CODE


# %%
lesson.check("41.4", best_power)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `c = np.abs(x).mean(axis=0) ** p` has C numbers, one per *column* of w. `difference = nearest(w * c, most) / c - w`, and the error is
# `((x @ difference.T) ** 2).sum()`.
#
# </details>


# %% tags=["solution"]
# Solution 41.4
def best_power_solution(w, x, powers, most):
    """-> the power p of the list that makes the error of y = x w^T smallest.

    w: (R, C). x: (N, C), no channel is always 0. c = mean |x| of each channel, to the power p. The
    weights used are nearest(w * c, most) / c. The error is the sum of the squares of all elements
    of y - x w^T.
    """
    errors = []
    for p in powers:
        c = np.abs(x).mean(axis=0) ** p
        errors.append(((x @ (nearest(w * c, most) / c - w).T) ** 2).sum())
    return powers[int(np.argmin(errors))]


best_power = lesson.yours(best_power, best_power_solution)

# %% [markdown]
# ## Measure: what the model loses
#
# Four ways, each for all matrices of the blocks, with codes up to 7 (4 bits) and up to 3 (3 bits). Embedding and head stay, as is usual.

# %% tags=["varies"]
POWERS = np.linspace(0, 1, 11).tolist()


def in_groups(w, x, most):
    codes, scale = quantize(w, 16, most)
    return (codes.reshape(len(w), -1, 16) * scale[:, :, None]).reshape(w.shape)


def by_gptq(w, x, most):
    scale = np.abs(w).max(axis=1, keepdims=True) / most
    return gptq(w, x, scale, most, 0.01) * scale


def by_awq(w, x, most):
    c = np.abs(x).mean(axis=0) ** best_power(w, x, POWERS, most)
    return nearest(w * c, most) / c


ways = {
    "nearest": lambda w, x, most: nearest(w, most),
    "in groups": in_groups,
    "GPTQ": by_gptq,
    "AWQ": by_awq,
}
before, bars = perplexity(), {}
print("bits   way          error of the outputs: mean, down_proj   perplexity rises by")
for bits, most in ((4, 7), (3, 3)):
    for name, way in ways.items():
        errors = []
        for m, w, x in zip(linears, own, xs):
            m.weight.data[...] = way(w, x, most)
            y, difference = x @ w.T, x @ (m.weight.data - w).T
            errors.append(np.sqrt((difference**2).sum() / (y**2).sum()))
        rise = perplexity() / before - 1
        bars[f"{bits} bits, {name}"] = 100 * rise
        print(f"{bits:4}   {name:10} {np.mean(errors):23.1%} {errors[3]:11.1%} {rise:17.1%}")
for m, w in zip(linears, own):
    m.weight.data[...] = w
lesson.figures.bars(bars, "% of perplexity")

# %% [markdown]
# GPTQ has the smallest errors on average, because inputs are correlated. The large channels are AWQ's case: look at the column of
# `down_proj`, whose matrices read them, with 4 bits. With 3 bits the others in the row pay too much for the protection.
# Real methods combine groups with one of the two.
#
# **The improvement** in speed is that of lesson 29 again: a decoding step reads half the bytes of int8. The kernel unpacks in registers, as your 41.1 does: a shift, a mask, and
# a subtraction for each code.
#
# ## The library's kernel
#
# xtrain quantizes to int8 and fp8 with one scale per row, which needs no calibration and loses next to nothing ([lesson 29](29_quantized.ipynb)), and to int4 with groups of 128 and a zero point (`kernels/four_bits.py`; `nn/rounding.py` is GPTQ). This is its reference for int8, your 41.2 with a group as long as the row:

# %%
from xtrain.kernels import quantize as library

lesson.source(library.quantize_ref)

# %% [markdown]
# ## What did not help
#
# *Codes down to -8.* One more value, for negative weights only: the step is an eighth instead of a seventh of the largest weight only in groups whose largest weight is
# negative.
#
# *Many more rows of calibration.* H is an average, and after a few hundred rows it hardly changes. What matters more is that the texts resemble those that the model will see.
#
# ## More exercises
#
# 1. Correct the columns in another order, those with the largest $H_{jj}$ first. Is the error smaller? Why would that make the kernel's life harder if every group has its own scale?
# 2. `gptq` takes the scale from the weights before any correction. What can go wrong when the corrected weights grow?
# 3. How many bytes has a model of 8 billion weights in bf16, int8, and int4 with groups of 64?
#
# <details><summary>Solutions</summary>
#
# 1: Often a little, since errors of important columns are made while many others can still correct them. The columns of a group are then scattered, and each needs a look-up of its
# group. 2: They may exceed most * scale and are limited, and that error is large. It is passed on as well. 3: 16 GB, 8 GB, and $8 \cdot 4.25 / 8 = 4.25$ GB.
#
# </details>
#
# ## Sources
#
# - E. Frantar et al., *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers*, 2022.
# - J. Lin et al., *AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration*, 2023.
# - T. Dettmers, L. Zettlemoyer, *The case for 4-bit precision: k-bit Inference Scaling Laws*, 2023: why groups.
