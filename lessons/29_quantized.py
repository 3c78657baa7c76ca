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
# # 29 Quantized weights: one byte each
#
# *About 75 minutes. You need [lesson 12](12_bf16.ipynb) and [lesson 18](18_kv_cache.ipynb).*
#
# **The question.** To decode one token of one sequence, a GPU reads every weight once and computes two
# operations with it. So the bytes of the weights decide the speed. How few bits does a weight need, where
# do the errors go, and is a model of half the bytes twice as fast?
#
# You will write the two kinds of codes that the library stores, int8 and fp8, by hand, and a kernel that
# multiplies by codes. Then you measure what they cost: on a small model here, and in records of a GPU.

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

import xtrain
from xtrain import lesson
from xtrain.kernels.primitives.reduce import warp_sum

# %% [markdown]
# ## Whole numbers and a scale, by hand
#
# A byte has 256 values. Take the whole numbers -127 to 127 as **codes** c, and a **scale** s:
#
# $$s = \max_k |w_k| / 127 \qquad c_k = \mathrm{round}(w_k / s) \qquad w_k \approx c_k\, s$$
#
# (-128 stays unused. So w and -w have opposite codes, and 0 is exactly 0.) Three weights:

# %%
w = np.array([0.5, -1.27, 0.003])
s = np.abs(w).max() / 127
c = np.rint(w / s)
print("scale", s.round(4), " codes", c.astype(int), " they stand for", (c * s).round(4))
print("error", (c * s - w).round(4), " at most s / 2 =", (s / 2).round(4))

# %% [markdown]
# The error is at most half a step, s / 2, whatever the weight is: the third weight has become 0. And the
# step is set by the *largest* weight that shares the scale. So which weights should share one?
#
# ## Exercise 29.1: codes and scales by row


# %% tags=["exercise"]
def quantize_rows(w):
    """w (O, K) float32 -> codes (O, K) int8, scales (O,): row o is about codes[o] * scales[o].

    The largest |w| of a row gets the code 127 or -127. A row of zeros gets codes 0 and any scale
    above 0.
    """
    # YOUR CODE


# %%
lesson.check("29.1", quantize_rows)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.abs(w).max(axis=1)` is the largest of each row. Where it is 0, take 1 instead. Divide row o by
# scale o with `scales[:, None]`, round with `np.rint`, then `.astype(np.int8)`.
#
# </details>


# %% tags=["solution"]
# Solution 29.1
def quantize_rows_solution(w):
    """w (O, K) float32 -> codes (O, K) int8, scales (O,): row o is about codes[o] * scales[o].

    The largest |w| of a row gets the code 127 or -127. A row of zeros gets codes 0 and any scale
    above 0.
    """
    scales = np.abs(w).max(axis=1) / 127
    scales = np.where(scales > 0, scales, 1)
    return np.rint(w / scales[:, None]).astype(np.int8), scales


quantize_rows = lesson.yours(quantize_rows, quantize_rows_solution)


# %% [markdown]
# Three matrices: normal weights; rows of different size, as trained matrices have them; and normal weights
# with one **outlier** in row 0. One scale for the whole matrix, against one for each row. The error of a
# row is the root mean square of its errors, divided by that of its weights:


# %%
def error_of_rows(rounded, w):
    return np.sqrt(((rounded - w) ** 2).mean(1) / (w**2).mean(1))


def by_tensor(w):
    codes, scales = quantize_rows(w.reshape(1, -1))
    return (codes * scales[:, None]).reshape(w.shape)


def by_row(w):
    codes, scales = quantize_rows(w)
    return codes * scales[:, None]


rng = np.random.default_rng(0)
normal = rng.normal(size=(64, 1024)).astype(np.float32)
uneven = normal * np.geomspace(0.03, 1, 64, dtype=np.float32)[:, None]
outlier = normal.copy()
outlier[0, 0] = 60.0
matrices = {"normal": normal, "uneven rows": uneven, "one outlier": outlier}
print("                 scale of the matrix       scale per row")
print("                 median row   worst row    median row   worst row")
for name, w in matrices.items():
    each = [f(error_of_rows(r(w), w)) for r in (by_tensor, by_row) for f in (np.median, np.max)]
    print(f"{name:14}", "".join(f"{x:12.1%}" for x in each))

# %% [markdown]
# With one scale for all, a small row loses its digits to a large one, and one outlier spoils every row. With
# a scale per row the damage stays in the row. A scale costs 4 bytes per row of some thousand codes. It
# costs no time either: in $y_o = \sum_k x_k\, c_{ok}\, s_o$ the scale leaves the sum, so a product reads
# the codes alone and multiplies once per row. (A scale per *column* would stay inside the sum.)
#
# The row with the outlier is still bad: all its other weights share steps that are 18 times too wide.
#
# ## A float of eight bits
#
# A float has steps that grow with the number. **e4m3** has 1 sign bit, 4 bits of exponent e and 3 bits of
# fraction m, from the top of the byte to the bottom:
#
# $$\text{value} = \pm \left(1 + \tfrac{m}{8}\right) 2^{e - 7} \;\;(e \ge 1) \qquad \pm \tfrac{m}{8}\, 2^{-6} \;\;(e = 0)$$
#
# The numbers with e = 0 are **subnormal**: they continue down to 0 in equal steps. Unlike fp16 and bf16,
# e4m3 has no infinity: of the codes with e = 15 only m = 7 is NaN, so that the largest number is
# $1.75 \cdot 2^8 = 448$ and not 240. For example

# %%
for code in (0b0_0111_000, 0b1_0111_100, 0b0_1111_110, 0b0_0001_000, 0b0_0000_001):
    e, m = (code >> 3) & 15, code & 7
    value = (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
    print(f"{code:08b}   e = {e:2}   m = {m}   {'-' if code >> 7 else ' '}{value:g}")

# %% [markdown]
# ## Exercise 29.2: the number of a code


# %% tags=["exercise"]
def decode(codes):
    """codes: the bits of e4m3 numbers, uint8 of any shape -> their values, same shape. 0x7F and
    0xFF are NaN."""
    # YOUR CODE


# %%
lesson.check("29.2", decode)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In uint8, 3 - 7 is 252: begin with `bits = codes.astype(int)`. Then e and m are as in the cell above, the
# sign is `bits >> 7`, and `np.where(condition, a, b)` chooses between the two formulas.
#
# </details>


# %% tags=["solution"]
# Solution 29.2
def decode_solution(codes):
    """codes: the bits of e4m3 numbers, uint8 of any shape -> their values, same shape. 0x7F and
    0xFF are NaN."""
    bits = codes.astype(int)
    e, m = (bits >> 3) & 15, bits & 7
    value = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 7), m / 8 * 2.0**-6)
    value = np.where((e == 15) & (m == 7), np.nan, value)
    return np.where(bits >> 7 == 1, -value, value)


decode = lesson.yours(decode, decode_solution)


# %% [markdown]
# The other direction. In the interval from $2^e$ to $2^{e+1}$ the steps are $2^{e-3}$ wide, because the
# fraction has 3 bits. So v is rounded to a multiple of $2^{e-3}$: the eighth to sixteenth multiple. Below
# $2^{-6}$ the steps stay $2^{-9}$. If a number rounds up to the next power of two, the fraction runs over
# and the exponent grows by 1, and this is what happens if fraction and exponent are *added*: the codes are
# in the order of their values.
#
# A number above 448 has no code. It **saturates**: it becomes 448. With a scale of max / 448 none is above,
# but rounding errors of the division may put one there, and the next code is NaN.
#
# ## Exercise 29.3: the code of a number


# %% tags=["exercise"]
def encode(v):
    """v: float32 of any shape, without NaN -> the codes of the nearest e4m3 numbers, uint8 of the
    same shape.

    Halfway between two numbers: the one with the even code. Above 448 in absolute value: 448, with
    v's sign.
    """
    # YOUR CODE


# %%
lesson.check("29.3", encode)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `_, e = np.frexp(a)` gives an e with `2**(e-1) <= a < 2**e`: one more than the e above. Numbers below `2**-6`, and 0,
# need the e of `2**-6`: take `np.frexp(np.maximum(a, 2.0**-6))`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# With `a = np.minimum(np.abs(v), 448)` and that e, `n = np.rint(a / 2.0 ** (e - 4))` is 8 to 16, or less for
# subnormal numbers. For $2^{-6}$, whose code is 8, e is -5 and n is 8: the code is `n + 8 * (e + 5)`. Add 128
# for a minus sign.
#
# </details>


# %% tags=["solution"]
# Solution 29.3
def encode_solution(v):
    """v: float32 of any shape, without NaN -> the codes of the nearest e4m3 numbers, uint8 of the
    same shape.

    Halfway between two numbers: the one with the even code. Above 448 in absolute value: 448, with
    v's sign.
    """
    a = np.minimum(np.abs(v), 448)
    _, e = np.frexp(np.maximum(a, 2.0**-6))  # 2^(e - 1) <= a < 2^e
    code = np.rint(a / 2.0 ** (e - 4)) + 8 * (e + 5)  # rint: halves to the even number
    return (code + 128 * np.signbit(v)).astype(np.uint8)


encode = lesson.yours(encode, encode_solution)


# %% [markdown]
# Which one is more accurate? For a weight near the largest of its row, int8: 127 steps against 8 steps in
# each octave. For a small weight, fp8:


# %%
def by_row_fp8(w):
    scales = np.abs(w).max(axis=1, keepdims=True) / 448
    return decode(encode(w / scales)) * scales


sizes = np.geomspace(1e-4, 1, 33)
lines = {}
for name, rounded in (("int8", by_row), ("fp8", by_row_fp8)):
    band = sizes[:, None] * np.linspace(0.87, 1.15, 400)  # many weights of about this size
    row = np.append(band.ravel(), 1.15).astype(np.float32)[None]
    error = (rounded(row) - row)[0, :-1].reshape(band.shape) / band
    lines[name] = np.sqrt((error**2).mean(1))
lesson.figures.curves(sizes, lines, "weight / largest of its row", "relative error (rms)")

# %%
print("worst row:          int8     fp8")
for name, w in matrices.items():
    each = [error_of_rows(r(w), w) for r in (by_row, by_row_fp8)]
    print(f"{name:14}", "".join(f"{x.max():9.1%}" for x in each))

# %% [markdown]
# For normal weights int8 is 2.5 times as accurate, with the same bytes. The outlier does not affect fp8: it changes the
# exponents of the other weights, not their fractions.
#
# ## The product
#
# Codes are stored; arithmetic is done in floats. A kernel that first wrote the dequantized matrix to memory
# would read 1 byte, write 4 and read 4 per weight: far worse than no codes at all. So the conversion happens
# **in registers**, between the load of a code and the multiplication.
#
# ## Exercise 29.4: a matrix-vector product with int8 weights


# %% tags=["exercise"]
@cuda.jit
def gemv_int8_kernel(y_O, x_K, codes_OK, scale_O):
    """y[o] = sum over k of x[k] codes[o, k] scale[o]. Grid ceil(O / 2), block 64: one warp per row.

    Neighbouring lanes read neighbouring codes. Lane 0 of a warp writes y[o].
    """
    # YOUR CODE


# %%
lesson.check("29.4", gemv_int8_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The row is `cuda.blockIdx.x * 2 + cuda.threadIdx.x // 32`. Lane l adds the products of columns l, l + 32, ...
# in a float32. `warp_sum(acc)` gives all lanes the sum of the warp; then multiply by the row's scale.
#
# </details>


# %% tags=["solution"]
# Solution 29.4
@cuda.jit
def gemv_int8_kernel_solution(y_O, x_K, codes_OK, scale_O):
    """y[o] = sum over k of x[k] codes[o, k] scale[o]. Grid ceil(O / 2), block 64: one warp per row.

    Neighbouring lanes read neighbouring codes. Lane 0 of a warp writes y[o].
    """
    lane, o = cuda.threadIdx.x % 32, cuda.blockIdx.x * 2 + cuda.threadIdx.x // 32
    if o < y_O.size:
        acc = float32(0.0)
        for k in range(lane, x_K.size, 32):
            acc += x_K[k] * float32(codes_OK[o, k])
        total = warp_sum(acc)
        if lane == 0:
            y_O[o] = total * scale_O[o]


gemv_int8_kernel = lesson.yours(gemv_int8_kernel, gemv_int8_kernel_solution)


# %% [markdown]
# ## Measure: what the model loses
#
# Small errors of weights are not the goal, a good model is. We train one on a language whose **perplexity** is
# known. (It is $e$ to the mean loss: among how many equally likely tokens the next one has to be guessed.) The next
# token follows from the last two by a table, four times out of five; otherwise it is any of 12.

# %%
V, rng = 12, np.random.default_rng(0)
table = rng.integers(0, V, (V, V))


def text(rng, n, T=32):
    rows = rng.integers(0, V, (n, T + 1))
    for t in range(2, T + 1):
        sure = rng.random(n) < 0.8
        rows[:, t] = np.where(sure, table[rows[:, t - 2], rows[:, t - 1]], rows[:, t])
    return rows.astype(np.int32)


shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=64)
config = xtrain.ModelConfig(vocab_size=V, **shape)
model, steps = xtrain.Transformer(config, seed=0), 150
optimizer = xtrain.AdamW(model, lr=2e-2, weight_decay=0.0)
for step in range(steps):
    optimizer.lr = 2e-2 * min(1, (step + 1) / 20) * (1 - step / steps)
    rows = text(rng, 16)
    model.zero_grad()
    model.loss(rows[:, :-1], rows[:, 1:]).backward()
    optimizer.step()

held_out = text(np.random.default_rng(1), 64)


def perplexity(model):
    return float(np.exp(model.loss(held_out[:, :-1], held_out[:, 1:]).item()))


p = np.array([0.8 + 0.2 / V] + [0.2 / V] * (V - 1))
print(f"the language itself {np.exp(-(p * np.log(p)).sum()):.2f}; guessing {V:.2f}")
print(f"the model {perplexity(model):.1f}")

# %% [markdown]
# Now its matrices are replaced by what their codes stand for. Then the same with a second model that computes *the
# same* function: three rows of each `up` matrix are multiplied by 200, and the columns of `down` that read them
# are divided by it. A few channels as large as that are common in large models (Dettmers et al. 2022).

# %% tags=["varies"]
parameters = dict(model.named_parameters())
names = [n for n in parameters if "_proj" in n]
own = {n: parameters[n].data.copy() for n in names}
scaled = {n: w.copy() for n, w in own.items()}
for layer in range(2):
    scaled[f"model.layers.{layer}.mlp.up_proj.weight"][:3] *= 200
    scaled[f"model.layers.{layer}.mlp.down_proj.weight"][:, :3] /= 200

ways = {
    "float32": lambda w: w,
    "int8, per tensor": by_tensor,
    "int8, per row": by_row,
    "fp8, per row": by_row_fp8,
}
rise = {}
for title, weights in (("the model", own), ("with large channels", scaled)):
    for way, rounded in ways.items():
        for n in names:
            parameters[n].data[...] = rounded(weights[n])
        rise[title, way] = 100 * (
            perplexity(model) / rise.setdefault("first", perplexity(model)) - 1
        )
for n in names:
    parameters[n].data[...] = own[n]

raised = lambda title, way: abs(rise[title, way])
for title in ("the model", "with large channels"):
    print(f"{title}: perplexity changes by")
    for way in ways:
        print(f"    {way:18} {raised(title, way):5.1f} %")
shown = {}
for title, short in (("the model", ""), ("with large channels", ", large")):
    for way in list(ways)[1:]:
        shown[way.replace("per ", "").replace(",", "") + short] = 1 + rise[title, way] / 100
lesson.figures.bars(shown, "perplexity / that of float32")

# %% [markdown]
# By row, both kinds of codes cost this model next to nothing. One scale per matrix is fine as long as rows are
# about equal, and fails with the large channels. int8 loses a little there even by row: the three columns
# of `down` have small weights, which share their rows' wide steps and multiply large numbers. fp8 does not.
#
# `Engine(weights=...)` stores codes in place of the matrices. A model that is to be quantized is made with
# `trainable=False`: a gradient step on codes has no meaning. Greedy tokens, from eight beginnings:

# %%
tokens = {}
for kind in ("full", "int8", "fp8"):
    served = xtrain.Transformer(config, seed=0, trainable=False)
    for name, parameter in served.named_parameters():
        parameter.data[...] = parameters[name].data
    engine = xtrain.Engine(served, weights=kind)
    tokens[kind] = engine.generate(held_out[:8, :4].tolist(), max_new_tokens=24)
    same = sum(a == b for x, y in zip(tokens[kind], tokens["full"]) for a, b in zip(x, y))
    matrices = [p.quantized for _, p in xtrain.nn.quantized.linear_weights(served)]
    nbytes = sum(m.nbytes for m in matrices if m is not None)
    print(f"{kind:5} {same / (8 * 24):4.0%} of the tokens equal", end="   ")
    print(f"{nbytes:,} bytes" if nbytes else f"{4 * sum(w.size for w in own.values()):,} bytes")

# %% [markdown]
# (The codes need a little more than a quarter of float32: these rows are short, and each has a scale.)
#
# ## Measure: what it gains
#
# A model of 1.1 billion parameters on one H100, in bf16 and with quantized matrices, both in one run. The bytes of
# a step divided by the speed of a copy are the time that no kernel can beat:

# %%
records = {
    kind: lesson.record(f"bench_decode/llama 1.1B/B=1 context=128/{kind}")
    for kind in ("int8", "fp8")
}
r, wide = records["int8"], lesson.record("bench_decode/llama 1.1B/B=1 context=128/bf16")
steps = {  # tokens/s, GB that a step reads
    "bf16": (r["peer_value"], wide["weights_gb"] + wide["kv_gb"]),
    **{kind: (r["value"], r["weights_gb"] + r["kv_gb"]) for kind, r in records.items()},
}
print(lesson.records.machine([r]))
print("        tokens/s   a step, ms   its bytes, ms   the rest, ms")
rest = {}
for kind, (speed, gb) in steps.items():
    copy = 1000 * gb / r["copy_gb_s"]
    rest[kind] = 1000 / speed - copy
    print(f"{kind:5} {speed:10,.0f} {1000 / speed:12.2f} {copy:15.2f} {rest[kind]:14.2f}")
bf16, int8 = (1000 * gb / r["copy_gb_s"] for _, gb in (steps["bf16"], steps["int8"]))
print(f"if only the bytes counted: {bf16 / int8:.2f} times as fast")
print(f"if the rest stayed as in bf16: {(bf16 + rest['bf16']) / (int8 + rest['bf16']):.2f}")
print(f"measured: {r['ratio']:.2f}")

# %% [markdown]
# Part of the answer is the gaps. A step is 22 layers of 5 kernels, about 110 kernels one after the other. Each has to
# start and to wait for its first bytes. That takes about 2 µs per kernel in bf16, and codes do not shorten it: of the
# factor 1.9 about 1.5 remains.
#
# And in int8 the rest is a little *longer*: every weight has to be converted. How much can that cost? With twice the
# instructions to convert a code, and products that each wait at their end for the scales of their rows, the rest is
# 0.42 ms and the step 0.79 ([quantized weights](notes/quantized_weights.md)). Counting instructions and waits predicted
# 0.64 to 0.67 ms without them.
#
# A prediction from bytes alone holds where kernels are long; here, what helps is to have fewer of them.
#
# ## The improvement
#
# A conversion instruction is slow: a multiprocessor of an H200 receives 18 codes per cycle from memory, and can
# convert only 16 integers to float32 in that time. So the library does not convert, it moves bits. `0x4B0000uu` is the float
# $2^{23} + uu$, for any byte uu. With uu = code + 128, one byte permutation and one subtraction give the number:

# %%
codes = np.array([-127, -1, 0, 5, 127], np.int8)
bits = np.uint32(0x4B000000) | (codes.view(np.uint8) ^ np.uint8(128)).astype(np.uint32)
print("floats ", bits.view(np.float32))
print("codes  ", bits.view(np.float32) - np.float32(2**23 + 128))

# %% [markdown]
# For e4m3 the sign, exponent and fraction are moved to where a float32 has them. The exponent is then too small
# by 127 - 7 = 120, so one multiplication by $2^{120}$ ends it, and subnormal numbers come out right, too:

# %%
codes = np.array([0x38, 0xBC, 0x7E, 0x08, 0x01], np.uint8).astype(np.uint32)
bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
print("moved  ", bits.view(np.float32) * np.float32(2.0**120))
print("decoded", decode(codes.astype(np.uint8)))

# %% [markdown]
# Tensor cores take bf16, two in a register. `0x00uu` is the bf16 $uu \cdot 2^{-133}$: a subnormal number up to 127, and from 128
# on the smallest exponent, whose step is the same. So every byte is a bf16 already, in another unit, and one multiply-add
# of two of them gives code / 64 ($2^{133}$ is too large for a bf16; the scale of the row makes up for the 64):

# %%
codes = np.array([-127, -1, 0, 5, 127], np.int8)
shifted = (codes.view(np.uint8) ^ np.uint8(128)).astype(np.uint32)
units = (shifted << 16).view(np.float32)  # the upper half of a float32 is a bf16
print("units    ", units)
print("code / 64", units * np.float32(2.0**127) - 2)
print("codes    ", 64 * (units * np.float32(2.0**127) - 2))

# %% [markdown]
# And a lane loads 16 codes at a time, in one 16-byte access ([lesson 2](02_memory.ipynb)): the 32 bytes that your
# kernel's warp loads with one instruction are a quarter of what it loads in float32.
#
# ## The library's kernel
#
# How codes are made, how a warp multiplies by them (for float32 models; for bf16 it is
# `gemv_tensor_cores.py`), and where an engine puts them. Find your four exercises.

# %%
from xtrain.kernels import quantize
from xtrain.kernels.decoding import gemv
from xtrain.kernels.primitives import codes as unpacking
from xtrain.nn import quantized

lesson.source(quantize.quantize_ref)
lesson.source(quantize.to_e4m3)
lesson.source(quantize.make_quantize_kernel)
lesson.source(unpacking._int8_floats)
lesson.source(unpacking._e4m3_floats)
lesson.source(gemv.make_multiply_row)
lesson.source(quantized.quantize_weights)

# %% [markdown]
# Do they agree? In the simulator the library's kernels compute the same codes as you, and the same product.

# %%
from xtrain.simulator import sim

w, x = rng.normal(size=(2, 64)).astype(np.float32), rng.normal(size=(1, 64)).astype(np.float32)
theirs = {kind: quantize.quantize(sim(w), kind) for kind in ("int8", "fp8")}
mine, scales = quantize_rows(w)
print("int8 codes:", np.array_equal(theirs["int8"].codes_OK, mine))
v = w / np.asarray(theirs["fp8"].scale_O)[:, None]
print("fp8 codes: ", np.array_equal(theirs["fp8"].codes_OK, encode(v)))
y = np.asarray(gemv.gemv(sim(x), theirs["int8"]))
print("product:   ", np.allclose(y, x @ (mine * scales[:, None]).T, atol=1e-4))

# %% [markdown]
# ## Keys and values, too
#
# A step with many sequences reads more keys and values ([lesson 18](18_kv_cache.ipynb)) than weights. For the shape of Qwen3-0.6B, with 1024 tokens in each
# sequence:

# %%
layers, key_heads, channels, weights = 28, 8, 128, 1.19e9  # weights: bytes in bf16
for sequences in (1, 8, 32):
    keys = 2 * layers * key_heads * channels * 2 * 1024 * sequences
    fp8 = keys / 2 * (channels + 4) / channels  # a scale of 4 bytes for each key and each value
    print(
        f"{sequences:2} sequences: {keys / (weights + keys):4.0%} of a step's bytes are keys and "
        "values; "
        f"fp8: {(weights + keys) / (weights + fp8):.2f} times fewer bytes"
    )

# %% [markdown]
# Which codes, and which scale? A weight is known before the model is served, a key when its token has been computed. A scale for one token and one head is known then, and never changes. It is
# a factor of a whole dot product, or of a whole term of the sum over the values, so attention does not multiply by it once per number:
#
# $$q \cdot k'_n = s_n \, (q \cdot c_n) \qquad\qquad \sum_n p_n v'_n = \sum_n (p_n s_n) \, c_n$$
#
# For normal weights int8 was more accurate. But the keys of most models have a few channels that are much larger than
# the others (KIVI, below). What happens to a score then? Predict it before you run the cell: the large channels make
# int8's steps large, in all channels of the row.

# %%
queries = rng.normal(size=(200, 128)).astype(np.float32)
keys = rng.normal(size=(200, 128)).astype(np.float32)


def score_errors(keys, queries):
    """-> the errors of q k^T with keys in int8 and in e4m3, relative to its standard deviation"""
    codes, scales = quantize_rows(keys)
    largest = np.abs(keys).max(1, keepdims=True) / np.float32(448)
    rounded = dict(int8=codes * scales[:, None], e4m3=decode(encode(keys / largest)) * largest)
    exact = queries @ keys.T
    return {k: (queries @ x.T - exact).std() / exact.std() for k, x in rounded.items()}


large = keys.copy()
large[:, 5] *= 30
small_query = queries.copy()
small_query[:, 5] /= 30  # as a model has it: otherwise this channel alone would decide
for name, k, q in (("all alike", keys, queries), ("one large", large, small_query)):
    print(name, {kind: f"{error:.3f}" for kind, error in score_errors(k, q).items()})

# %% [markdown]
# The error of a float is relative to its own number, so the large channel does not touch the others. That is why the library's cache has e4m3 (`Engine(kv_cache="fp8")`,
# `--kv-cache fp8`). The codes of a new token are made where its key is computed, and unpacked where a warp has loaded them: 16 bytes are 16 channels of a key now, not 8.

# %%
from xtrain.kernels.attention import decode_attention_loops
from xtrain.kernels.decoding import kv_codes

lesson.source(kv_codes.make_store_codes)
lesson.source(decode_attention_loops.make_load_codes)

# %% [markdown]
# ## What did not help
#
# *int8 with 32 sequences.* The matrices are read once for all of them, so their bytes weigh less, and bf16 runs on
# cuBLAS there while codes need a kernel of the library's own:

# %%
for kind in ("int8", "fp8"):
    r = lesson.record(f"bench_decode/llama 1.1B/B=32 context=128/{kind}")
    print(
        f"{kind:5} {r['value']:,.0f} tokens/s, {r['ratio']:.2f} times bf16; {r['peak_gb']:.1f} GB"
    )

# %% [markdown]
# With 32 sequences, each block reads all of x from the L2 cache: for 16 rows of codes per block that is 176 MB a layer for 44 MB of codes. With 32
# rows per block, where there are enough for all multiprocessors, a step in int8 takes 1.306 instead of 1.390 ms (the same H100).
#
# *An offset.* Codes 0 to 255 for weights from min to max use every code, also if a row is not symmetric. But the
# product then has a term offset $\times \sum_k x_k$ for every row, and rows of trained matrices are nearly symmetric.
#
# *Codes for the head.* It is a matrix like the others, and 6 % of the bytes of the model above. But its
# errors go to the logits directly, with no layer after them.
#
# ## More exercises
#
# 1. e5m2 has 5 bits of exponent (bias 15) and 2 of fraction, with infinity and NaN as in fp16. What is its largest
#    number? Which of e4m3 and e5m2 would you take for weights, and which for gradients?
# 2. How many bits per weight do int4 codes need with one float16 scale for 32 weights? And the error of a normal
#    weight, if 7 is the largest code and the largest of 32 weights is at 2.3 standard deviations?
# 3. Change 29.4 so that a lane loads 4 neighbouring codes in each iteration. Which elements of x does it need?
# 4. The model above has 0.97 billion weights in the matrices of its layers. From the table: with how many
#    kernels per step would int8 be 1.6 times as fast, if the rest is proportional to their number?
#
# <details><summary>Solutions</summary>
#
# 1: $1.75 \cdot 2^{15}$ = 57,344. Weights of one row have similar sizes: e4m3, the finer one. Gradients vary over many
# powers of two: e5m2. 2: 4 + 16 / 32 = 4.5 bits. s = 2.3 / 7 = 0.33, and the error is 0.33 / $\sqrt{12}$ = 0.095: 10 % of a
# typical weight. 3: `x[k]` to `x[k + 3]`: four loads, or one of 16 bytes. 4: bf16 takes 0.92 ms, so int8 may take
# 0.575: 0.37 for the bytes and 0.20 for the rest, which is 0.27 with 110 kernels. So about 83, fewer than four per layer.
#
# </details>
#
# ## Sources
#
# - T. Dettmers et al., *LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale*, 2022: large channels.
# - P. Micikevicius et al., *FP8 Formats for Deep Learning*, 2022: e4m3 and e5m2.
# - Z. Liu et al., *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*, 2024: large channels of keys.
# - B. Jacob et al., *Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference*, 2018.
# - G. Xiao et al., *SmoothQuant*, 2023: moving the size of channels between a matrix and the one before it.
