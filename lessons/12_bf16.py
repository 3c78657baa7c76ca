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
# # 12 bf16
#
# *About 75 minutes. You need [lesson 11](11_fusing.ipynb) and AdamW ([lesson
# 8](08_training.ipynb)).*
#
# **The question.** Fusing moves fewer numbers. Could the numbers be smaller, too? With 16 bits
# instead of 32, every kernel of lesson 11 moves half the bytes, and a GPU's tensor cores multiply
# 16-bit matrices many times as fast. But such a 16-bit number holds fewer than three decimal
# digits. Which of the numbers in training tolerate that, which do not, and what does it cost?
#
# You will write the rounding itself, an optimizer step that loses no update, and a sum that does
# not stall.

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
import ml_dtypes
import numpy as np
from numba import cuda, float32, int64

from xtrain import lesson
from xtrain.kernels.primitives.ptx import load1, store1
from xtrain.kernels.primitives.reduce import warp_sum

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# %% [markdown]
# ## The bits by hand
#
# A float32 has a sign bit, 8 exponent bits and 23 fraction bits. **bfloat16** (bf16) is its upper
# half: the same sign, the same 8 exponent bits, and 7 fraction bits. NumPy has no such type; the
# package `ml_dtypes` adds it.

# %%
for value in (1.0, 3.14159265, 0.001, 1.0 / 3):
    wide = np.float32(value)
    half = wide.astype(BFLOAT16)
    bits = f"{wide.view(np.uint32):032b}"
    parts = f"{bits[0]} {bits[1:9]} {bits[9:16]}|{bits[16:]}"
    print(f"{value:.6f}  {parts}  as bf16 {float(half):.6f}")

# %% [markdown]
# The vertical bar marks where the lower half is cut off. What remains has the *range* of float32
# but a fraction of its *resolution*: the next bf16 above 1 is 1 + 1/128. The alternative,
# **float16**, splits the 16 bits differently: 5 exponent bits and 10 fraction bits. That gives
# three more bits of resolution at the price of range:

# %%
for name, dtype in (("bfloat16", BFLOAT16), ("float16", np.float16)):
    info = ml_dtypes.finfo(dtype)
    step, most, least = map(float, (info.eps, info.max, info.smallest_subnormal))
    print(f"{name}: spacing above 1 {step:.1e}, largest {most:.1e}, smallest {least:.0e}")

# %% [markdown]
# Next is a plot of the relative rounding error for numbers of all sizes (1 means that the result is
# 0 or infinity):

# %%
sizes = 10.0 ** np.arange(-12, 7)
draws = np.random.default_rng(0).random(1000)


def worst(dtype):
    errors = []
    for size in sizes:
        exact = (size * (1 + draws)).astype(np.float32)
        with np.errstate(over="ignore"):
            got = exact.astype(dtype).astype(np.float64)
        errors.append(min(1.0, np.abs(got / exact - 1).max()))
    return errors


lesson.figures.curves(
    sizes,
    {"bfloat16": worst(BFLOAT16), "float16": worst(np.float16)},
    "size of the number",
    "largest relative error",
    "bfloat16 is coarse everywhere, float16 is accurate in a small range",
)

# %% [markdown]
# Which of the two matters for training? Take the gradient with respect to a logit: softmax minus
# one-hot, divided by the number of tokens (lesson 11). At initialisation, all tokens of the
# vocabulary are equally likely. For 8192 tokens and a vocabulary of 50304:

# %%
gradient = np.float32(1 / 50304 / 8192)
for dtype in (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16)):
    print(f"{dtype.name:9} {float(gradient.astype(dtype)):.3e}")

# %% [markdown]
# In float16 it is **zero**: of the 50304 entries of a row, only the entry of the correct token is
# nonzero, and the training signal of all the others is lost. That is why training in float16 needs
# *loss scaling*: the loss is multiplied by some large number, which scales all gradients, and the
# gradients are divided by it before the optimizer step. The factor must be monitored, because
# gradients overflow to infinity when it is too large. bf16 needs none of this: it has the exponent
# range of float32 and only fewer digits. xtrain supports bf16 and has no loss scaling.
#
# ## Exercise 12.1: rounding
#
# Truncation would make every number a little smaller, and errors of the same sign accumulate. So
# round to the nearest bf16. A number exactly half-way between two goes to the neighbour whose last
# bit is 0 (*ties to even*), so that half of the ties round up and half round down.
#
# In integer arithmetic: adding 0x7FFF to the 32 bits before the shift carries into the upper half
# if the lower half is above 0x8000. A lower half of exactly 0x8000 must carry only if the lowest
# *kept* bit is 1. A NaN (all exponent bits set, and some fraction bit) must remain a NaN: write
# sign | 0x7FC0.


# %% tags=["exercise"]
@cuda.jit
def narrow_kernel(y_n, x_n):
    """y = x rounded to bf16, nearest, ties to even.   Grid ceil(n / block), any block.

    x: the bits of float32 numbers, as uint32.   y: the bits of bf16 numbers, as uint16.
    `int64(x_n[i])` gives the bits as an integer wide enough that no addition overflows.
    """
    # YOUR CODE


# %%
lesson.check("12.1", narrow_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `bits = int64(x_n[i])`, and the lowest kept bit is `(bits >> 16) & 1`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# NaN: `(bits & 0x7FFFFFFF) > 0x7F800000`. The sign, as bit 15 of the result:
# `(bits >> 16) & 0x8000`.
#
# </details>


# %% tags=["solution"]
# Solution 12.1
@cuda.jit
def narrow_kernel_solution(y_n, x_n):
    """y = x rounded to bf16, nearest, ties to even.   Grid ceil(n / block), any block.

    x: the bits of float32 numbers, as uint32.   y: the bits of bf16 numbers, as uint16.
    `int64(x_n[i])` gives the bits as an integer wide enough that no addition overflows.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < y_n.size:
        bits = int64(x_n[i])
        if (bits & 0x7FFFFFFF) > 0x7F800000:
            y_n[i] = (bits >> 16) & 0x8000 | 0x7FC0
        else:
            y_n[i] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


narrow_kernel = lesson.yours(narrow_kernel, narrow_kernel_solution)


# %%
rng = np.random.default_rng(0)
x = rng.standard_normal(1000).astype(np.float32)
x_here = lesson.array(x.view(np.uint32))
y_here = lesson.empty(x_here, 1000, np.uint16)
lesson.launch(narrow_kernel, 8, 128, y_here, x_here)
same = np.array_equal(lesson.host(y_here), x.astype(BFLOAT16).view(np.uint16))
print("same bits as ml_dtypes:", same)
half = lesson.host(y_here).view(BFLOAT16).astype(np.float32)
print(f"largest relative error: {np.abs(half / x - 1).max():.4f}; 1/256 is {1 / 256:.4f}")

# %% [markdown]
# ## Where three digits are not enough
#
# **Weights.** A training step changes a weight by a small fraction of itself. Near 1, the spacing
# of bf16 is 1/128 above and 1/256 below, so a step of 0.001 rounds back to the starting value.
# However many such steps you take, the weight does not move:

# %%
weight = np.ones(1, BFLOAT16)
master = np.ones(1, np.float32)
for _ in range(1000):
    weight = (weight.astype(np.float32) - np.float32(0.001)).astype(BFLOAT16)
    master -= np.float32(0.001)
print(f"after 1000 steps of 0.001:  bf16 {float(weight[0])}   float32 {master[0]:.4f}")

# %% [markdown]
# So the weights stay in float32, as **master weights**. The matrix products need bf16, so there is
# also a bf16 copy, written again after each step. The gradients of the weights are sums over all
# tokens and also stay in float32.
#
# ## Exercise 12.2: a step with master weights
#
# Write plain gradient descent in NumPy, in place.


# %% tags=["exercise"]
def sgd_step(master_n, half_n, g_n, lr):
    """One step: updates the float32 array master and the bf16 array half in place.

    master = master - lr g,   half = master rounded to bf16.   g: float32, lr: a number.
    """
    # YOUR CODE


# %%
lesson.check("12.2", sgd_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `half_n[...] = master_n.astype(half_n.dtype)` writes into the given array; `half_n = ...` would
# only bind the name to another array.
#
# </details>


# %% tags=["solution"]
# Solution 12.2
def sgd_step_solution(master_n, half_n, g_n, lr):
    """One step: updates the float32 array master and the bf16 array half in place.

    master = master - lr g,   half = master rounded to bf16.   g: float32, lr: a number.
    """
    master_n -= lr * g_n
    half_n[...] = master_n.astype(half_n.dtype)


sgd_step = lesson.yours(sgd_step, sgd_step_solution)


# %% [markdown]
# **Sums.** The same happens in a sum: it stalls as soon as the next term is less than half the
# spacing at that size. Counting up by one stops at 256, where the spacing is 2 and the tie goes to
# even:

# %%
total = np.zeros(1, BFLOAT16)
for _ in range(1000):
    total = (total.astype(np.float32) + 1).astype(BFLOAT16)
print("1 added 1000 times, rounded to bf16 each time:", float(total[0]))

# %% [markdown]
# So kernels accumulate sums in float32 **registers** and round once, when the result is written to
# memory. Reading and writing in bf16 while computing in float32 costs almost nothing as long as the
# kernel is limited by memory. Tensor cores work the same way: bf16 inputs, float32 sums.
#
# ## Exercise 12.3: a sum over a row
#
# A kernel sees a bf16 array as an array of 16-bit integers. `load1(x, i)` reads element i of a flat
# array and converts it to float32; `store1(y, i, v)` rounds v to bf16 and writes it. Use one warp
# per row.


# %% tags=["exercise"]
@cuda.jit
def row_sums_kernel(y_N, x, C):
    """y[n] = the sum of row n.   Grid N, block 32.   x: bf16, flat (N C).   y: bf16."""
    n, lane = cuda.blockIdx.x, cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("12.3", row_sums_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Start with `acc = float32(0.0)`; each lane does `acc += load1(x, n * C + c)` for c = lane, lane +
# 32, ...; then `warp_sum(acc)` of lesson 3; one lane calls `store1`.
#
# </details>


# %% tags=["solution"]
# Solution 12.3
@cuda.jit
def row_sums_kernel_solution(y_N, x, C):
    """y[n] = the sum of row n.   Grid N, block 32.   x: bf16, flat (N C).   y: bf16."""
    n, lane = cuda.blockIdx.x, cuda.threadIdx.x
    acc = float32(0.0)
    for c in range(lane, C, 32):
        acc += load1(x, n * C + c)
    acc = warp_sum(acc)
    if lane == 0:
        store1(y_N, n, acc)


row_sums_kernel = lesson.yours(row_sums_kernel, row_sums_kernel_solution)


# %% [markdown]
# **The residual stream.** Every layer adds its output to h, and that output is small compared with
# the sum of all earlier ones. With h in bf16, each addition rounds at the magnitude of h, twice per
# layer:

# %%
layers, width = 48, 4096
h = np.float32(8) * rng.standard_normal(width).astype(np.float32)
exact, stream_32, stream_16 = h.astype(np.float64), h.copy(), h.astype(BFLOAT16)
for _ in range(2 * layers):
    part = (0.1 * rng.standard_normal(width)).astype(np.float32).astype(BFLOAT16)
    exact += part.astype(np.float64)
    stream_32 += part.astype(np.float32)
    stream_16 = (stream_16.astype(np.float32) + part.astype(np.float32)).astype(BFLOAT16)
added = np.linalg.norm(exact - h)
for name, stream in (("float32", stream_32), ("bf16", stream_16.astype(np.float32))):
    error = np.linalg.norm(stream - exact) / added
    print(f"stream in {name:8} error {error:.0%} of the sum of {2 * layers} parts")

# %% [markdown]
# **Logits.** The *differences* between logits determine the next token. At 8, the spacing of bf16
# is 1/16:

# %%
logits = np.array([8.00, 8.02, 8.03, 7.0], np.float32)
print("float32:", logits, "   as bf16:", logits.astype(BFLOAT16).astype(np.float32))

# %% [markdown]
# So this is what xtrain keeps in each precision:
#
# | in float32 | why | in bf16 |
# |---|---|---|
# | weights (masters), AdamW's moments | a step is far below bf16's resolution | a copy of the matrices, for the products |
# | gradients of the weights | sums over all tokens, accumulated over micro-batches | gradients of bf16 activations |
# | the residual stream | two additions per layer, in sequence | what the layers add to it |
# | all sums: norms, softmax, the products' accumulators | a sum in bf16 stalls | their inputs and results |
# | norm weights (few), RoPE's tables, logits when the model is called | precision at almost no cost | queries, keys, values, gates |
#
# ## Measure: what does it cost?
#
# This needs a bf16 model, and you may not have a GPU here. So emulate one: take xtrain's NumPy
# model, round the operands of every matrix product to bf16, and round its result too, except where
# the product accumulates into a float32 sum. This covers nearly all of the rounding in a bf16
# model.

# %%
import contextlib
from unittest import mock

import xtrain
from xtrain.kernels import gemm, linear_cross_entropy
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.nn.optim import clip

float32_matmul = gemm.matmul


def rounded(x):
    return x.astype(BFLOAT16).astype(np.float32)


def bf16_matmul(out, a, b, **how):
    float32_matmul(out, rounded(a), rounded(b), **how)
    if not how.get("accumulate"):
        out[...] = rounded(out)
    return out


@contextlib.contextmanager
def bf16_products():
    with contextlib.ExitStack() as stack:
        for module in (gemm, attention, linear_cross_entropy):
            stack.enter_context(mock.patch.object(module, "matmul", bf16_matmul))
        yield


def batch(seed, sequences=4, length=32):
    """Each token follows from the previous one, nine times out of ten."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 64, sequences)]
    for _ in range(length):
        surprise = random.random(sequences) < 0.1
        others = random.integers(0, 64, sequences)
        tokens.append(np.where(surprise, others, (5 * tokens[-1] + 7) % 64))
    tokens = np.stack(tokens, 1)
    return tokens[:, :-1], tokens[:, 1:]


shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=32)
config = xtrain.ModelConfig(vocab_size=64, **shape)


def look(model, seed=0):
    """-> loss, logits, gradient of all weights"""
    ids, targets = batch(seed)
    model.zero_grad()
    loss = model.loss(ids, targets)
    loss.backward()
    return loss.item(), model(ids).data.copy(), model.arena.grads.copy()


model = xtrain.Transformer(config)
loss, logits, gradient = look(model)
with bf16_products():
    loss_16, logits_16, gradient_16 = look(model)
off = np.abs(logits - logits_16)
apart = np.linalg.norm(gradient - gradient_16) / np.linalg.norm(gradient)
limits = {
    "loss": (abs(loss - loss_16), 2e-4),
    "logits, on average": (off.mean(), 2e-3),
    "logits, 99 % of them": (np.quantile(off, 0.99), 8e-3),
    "gradient, of its norm": (apart, 1.2e-2),
}
for what, (difference, limit) in limits.items():
    print(f"{what:22} differs by {difference:.0e}, limit {limit:.1e}")
other = look(model, seed=1)[2]
batches_apart = np.linalg.norm(gradient - other) / np.linalg.norm(gradient)
print(f"the gradient of another batch differs by {batches_apart:.1f} of its norm")

# %% [markdown]
# The first four limits are the ones that `tests/nn/test_precision.py` enforces for xtrain's real bf16
# model, on a GPU, with the layers of `dim384`; in addition, after 150 steps the losses may differ
# by at most 0.01. A gradient error of about one percent does no harm: the last line compares it
# with the much larger noise from the choice of the batch. On a GPU that supports bf16 (*compute
# capability*, NVIDIA's generation number, of 8.0 or later; a T4 has 7.5), the next cell runs the
# real model:

# %%
from xtrain.device import cupy

capable = lesson.on_gpu() and int(cupy().cuda.Device().compute_capability) >= 80
if capable:
    ids, targets = batch(0)
    losses = [
        xtrain.Transformer(config, device="gpu", precision=p).loss(ids, targets).item()
        for p in ("fp32", "bf16")
    ]
    print(f"float32 {losses[0]:.6f}, bf16 {losses[1]:.6f}")
else:
    print("There is no such GPU here.")

# %% [markdown]
# Now train three models: in float32; with bf16 products and float32 master weights; and with bf16
# products *and* bf16 weights, rounded after each step.


# %%
def train(products, keep_weights, steps=60, lr=5e-3):
    """-> the mean loss of the last ten steps"""
    model = xtrain.Transformer(config)
    optimizer, losses, weights = xtrain.AdamW(model, lr), [], model.arena.weights
    with products():
        for step in range(steps):
            optimizer.lr = lr * (1 - step / steps)
            model.zero_grad()
            loss = model.loss(*batch(step))
            loss.backward()
            optimizer.step(clip(model, 1.0)[1])
            weights[...] = keep_weights(weights)
            losses.append(loss.item())
    return float(np.mean(losses[-10:]))


whole = train(contextlib.nullcontext, lambda w: w)
masters = train(bf16_products, lambda w: w)
without = train(bf16_products, rounded)
print(f"float32              {whole:.3f}")
print(f"bf16 with masters    {masters:.3f}")
print(f"bf16 without masters {without:.3f}")

# %% [markdown]
# The smaller the learning rate, the worse this gets, and every schedule ends with a small one. The
# next cell computes the share of weights that have changed at all after 10 steps. (It excludes the
# rows that pad the vocabulary to a multiple of 128, which no token uses.)

# %%
print("learning rate   masters   bf16 weights")
for lr in (1e-4, 1e-5, 1e-6):
    shares = []
    for keep in (np.copy, rounded):
        model = xtrain.Transformer(config)
        optimizer, weights = xtrain.AdamW(model, lr, weight_decay=0.0), model.arena.weights
        weights[...] = rounded(weights)
        start = weights.copy()
        for step in range(10):
            model.zero_grad()
            model.loss(*batch(step)).backward()
            optimizer.step()
            weights[...] = keep(weights)
        shares.append((weights != start)[start != 0].mean())
    print(f"{lr:13.0e}   {shares[0]:7.1g}   {shares[1]:12.1g}")

# %% [markdown]
# **What it gains.** Half the bytes, so kernels limited by memory are nearly twice as fast:

# %%
PAIRS = [
    ("bench_kernels/rmsnorm_fwd/fp32", "bench_kernels/rmsnorm_fwd/bf16"),
    ("bench_kernels/residual_rmsnorm_fwd/fp32", "bench_kernels/residual_rmsnorm_fwd/bf16"),
    ("bench_kernels/qk_norm_rope_fwd/fp32", "bench_kernels/qk_norm_rope_fwd/bf16"),
    ("bench_kernels/swiglu_fwd/fp32", "bench_kernels/swiglu_fwd/bf16"),
    ("bench_kernels/swiglu_bwd/fp32", "bench_kernels/swiglu_bwd/bf16"),
]
for pair in PAIRS:
    wide, narrow = map(lesson.record, pair)
    gain = f"{wide['ms'] / narrow['ms']:.2f} times as fast"
    print(f"{wide['name']:22} {wide['ms']:.4f} ms   bf16 {narrow['ms']:.4f} ms   {gain}")
lesson.table(
    ["bench_history/graph/fp32", "bench_history/bf16/bf16"],
    {"ms per step": "ms", "tokens per second": "value"},
)

# %% [markdown]
# (`residual_rmsnorm_fwd` was measured with all four arrays in bf16. With x and h in float32, as in
# a real step, it moves 12 bytes per element rather than 8: three quarters of the 16 bytes in
# float32.)
#
# The whole step gains much more than a factor of two. Most of it is matrix products, and tensor
# cores multiply bf16 many times as fast as the float32 units multiply float32. (Attention also
# changes, to the kernels of lessons 13 and 14.)
#
# Memory does *not* halve. Per weight it even grows, by the copy: 4 bytes each for the weight, the
# gradient and the two moments, and 2 more. What halves is most of what forward saves for backward.
# xtrain's memory plan needs no GPU:

# %%
from xtrain.config import PRESETS
from xtrain.training import memory_plan as memory

big = xtrain.ModelConfig(vocab_size=50257, max_seq_len=256, **PRESETS["dim768"].model)
for precision in ("fp32", "bf16"):
    plan = memory.plan(big, 32, 256, precision)
    kept = ("weights", "bf16 copy of the weights", "gradients", "moments")
    per_weight = sum(plan.kept.get(kind, 0) for kind in kept)
    whole_gb, weights_gb = plan.reserved / 1e9, per_weight / 1e9
    print(f"{precision}: {whole_gb:4.1f} GB for a step, {weights_gb:.1f} GB of it per-weight state")

# %% [markdown]
# ## One improvement: two numbers at once
#
# Your 12.1 computes the rounding in integer arithmetic, and each thread writes two bytes. A GPU has
# an instruction that rounds two float32 numbers into one 32-bit word of two bf16. With it, and with
# 16-byte accesses, rounding runs at the speed of a copy again:

# %%
lesson.table(
    ["bench_kernels/cast_narrow/fp32"],
    {"one at a time, ms": "naive_ms", "in use, ms": "ms", "a copy, ms": "copy_ms"},
)

# %%
n = (1 << 24) if lesson.on_gpu() else 256
from xtrain.kernels import adamw, cast

x_b = lesson.array(rng.standard_normal(n, np.float32))
bits_b, y_b = x_b.view(np.uint32), lesson.empty(x_b, n, np.uint16)
runs = {"yours": lambda: lesson.launch(narrow_kernel, -(-n // 256), 256, y_b, bits_b)}
if capable:
    runs["in use"] = lambda: cast.cast_fwd(x_b, BFLOAT16)
times = lesson.measure(runs, nbytes=6 * n)

# %% [markdown]
# ## The library's kernel
#
# First the kernel that corresponds to yours, then the one in use:

# %%
lesson.source(cast.narrow_naive_kernel)
lesson.source(cast.cast_chunks)

# %% [markdown]
# Master weights: AdamW reads and writes the float32 weights and writes the bf16 copy in the same
# pass (`with_copy`), while the new weight is in a register. This is your 12.2, fused.

# %%
lesson.source(adamw.make_adamw_kernel, "if with_copy")

# %% [markdown]
# The residual stream: in the fused norm of lesson 11, `x` and `h` are float32 while `r` and `y` are
# bf16. `load` and `store` choose by the type of their array; the kernel's source is the same.

# %%
from xtrain.kernels import residual

lesson.source(residual.residual_rmsnorm_fwd)

# %% [markdown]
# ## What did not help
#
# *Weights in bf16 only*: see above. It saves 4 of 18 bytes per weight, and training ends with a
# higher loss.
#
# *A separate kernel for the copy.* It would read every weight again after AdamW has had it in
# registers. In bytes per weight: AdamW moves 28 (it reads weight, gradient and two moments, and
# writes all but the gradient: 7 times 4), and a separate copy 6 (read 4, write 2); a single pass
# moves 30. The second record also zeroes the gradient, 4 bytes more:

# %%
lesson.table(
    ["bench_kernels/adamw/fp32", "bench_kernels/adamw_with_copy_and_zeros/fp32"],
    {"ms": "ms", "bytes per weight": lambda r: r["nbytes"] / 150_000_000, "GB/s": "value"},
)

# %% [markdown]
# *Loss scaling*: there is nothing to scale, as the first section showed. It is listed here because
# many programs keep it when they switch from float16 to bf16.
#
# ## More exercises
#
# 1. How many ones can you add in float32, one at a time, before the sum stalls? And in float16?
# 2. The second moment of AdamW is a running mean of g², with beta2 = 0.95: v = 0.95 v + 0.05 g².
#    Would v in bf16 stall? And with beta2 = 0.999?
# 3. *Stochastic rounding* rounds up or down at random, with probabilities given by the distances.
#    Try it on the thousand steps of 0.001. What does it give up?
#
# <details><summary>Solutions</summary>
#
# 1: 2^24 = 16 777 216: from there on the spacing is 2, and 1 is half of it, so the tie goes to
# even. In float16, 2^11 = 2048. 2: A running mean stalls when the change, (1 - beta2) (g² - v), is
# below half the spacing; half the spacing is between v/512 and v/256. With 0.95 that happens only
# when g² is within eight percent of v, which does no harm. With 0.999 the change is a thousandth
# of the difference, so g² has to be three to five times v before v increases at all; and v never
# decreases, because 0.999 v rounds back to v. 3: Adding `spacing * (random - 0.5)` to x before
# rounding to nearest implements it. On average the weight arrives at 0, as it should; each single
# weight has an error like that of a random walk. And for reproducible runs, the same seed must give
# the same random numbers on any number of GPUs.
#
# </details>
#
# ## Sources
#
# - D. Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training*, 2019.
# - P. Micikevicius et al., *Mixed Precision Training*, 2018: masters, and loss scaling for float16.
# - `tests/nn/test_precision.py`: the limits, and the same comparison with PyTorch's autocast.
