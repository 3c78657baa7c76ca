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
# # 11 Fusing
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/11_fusing.ipynb)
#
# *About 60 minutes. You need [lesson 10](10_profiling.ipynb), and RMSNorm from [lesson
# 3](03_reductions.ipynb).*
#
# **The question.** The kernel table of lesson 10 shows kernels that move their bytes as fast as a
# copy does. They cannot move them faster. And yet PyTorch, run op by op, takes many times as long
# for the same maths. What is left to save, where, and how does one know beforehand how much it will
# be?
#
# You will write down the rule that predicts it, two fused kernels, and a loss that never has its
# largest array in memory.

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

from xtrain import lesson, simulator
from xtrain.kernels.primitives.reduce import block_sum

# %% [markdown]
# ## Bytes by hand
#
# Between two layers a transformer adds and normalises: `h = x + r`, then `y = rmsnorm(h) w`. The
# sum h is needed later, for it is the residual stream. With B, T, C = 2, 3, 4 an array has 6 · 4
# numbers of 4 bytes:
# %%
from xtrain.kernels.residual import residual_rmsnorm_ref

B, T, C = 2, 3, 4
x = np.arange(1, 25, dtype=np.float32).reshape(B * T, C)
r, w = np.ones((B * T, C), np.float32), np.array([1, 1, 2, 2], np.float32)
h, y, rstd = residual_rmsnorm_ref(x, r, w, 1e-6)
print("h, first row:", h[0], "  y, first row:", y[0].round(4))

size = x.nbytes
print(f"an array: {size} bytes")
print(f"addition:    read x, r, write h  {3 * size}")
print(f"norm:        read h, write y     {2 * size}")
print(f"together:                        {5 * size}")
print(f"one kernel:  read x, r, write h, y: {4 * size}")
lesson.source(residual_rmsnorm_ref)

# %% [markdown]
# The second kernel reads what the first has just had in its registers. In one kernel that reading
# is not there. Nothing else changes: the same additions, the same roundings. For kernels that are
# limited by memory (lesson 2) the time goes with the bytes, so the prediction is 5 / 4: a quarter
# faster.
#
# (The weights w and the r of lesson 3, one number per row, are small beside N C numbers. We leave
# them out.)
#
# If h were not needed later, it would not have to be written either, and 5 would become 3. So the
# rule has two parts:
#
# - an array that is made and used within the kernel is never **read**;
# - if nobody needs it afterwards, it is not even **written**.
#
# ## Exercise 11.1: the prediction
#
# Kernels are given as lists of the arrays that they read and write, `(["x", "r"], ["h"])` for the
# addition.


# %% tags=["exercise"]
def bytes_before_after(kernels, sizes, kept):
    """-> (bytes moved by the kernels one after the other, bytes moved by all as one)

    kernels: [(names that it reads, names that it writes), ...]   sizes: {name: bytes}
    kept: names of arrays that are needed afterwards; some kernel writes each of them
    """
    # YOUR CODE


# %%
lesson.check("11.1", bytes_before_after)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Before: `sum(sizes[a] for reads, writes in kernels for a in (*reads, *writes))`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# After: what is read by some kernel and written by none, each array once (a set), and what is in
# `kept`.
#
# </details>


# %% tags=["solution"]
# Solution 11.1
def bytes_before_after(kernels, sizes, kept):
    """-> (bytes moved by the kernels one after the other, bytes moved by all as one)

    kernels: [(names that it reads, names that it writes), ...]   sizes: {name: bytes}
    kept: names of arrays that are needed afterwards; some kernel writes each of them
    """
    before = sum(sizes[a] for reads, writes in kernels for a in (*reads, *writes))
    made = {a for _, writes in kernels for a in writes}
    inputs = {a for reads, _ in kernels for a in reads} - made
    return before, sum(sizes[a] for a in inputs) + sum(sizes[a] for a in kept)


# %% [markdown]
# The four places of a transformer where it pays. The unit is an array of N rows and the width of
# that place. **QK-norm and RoPE**: some models, Qwen3 among them, normalise each head's query and
# key before they are rotated; the values stay where they are. **SwiGLU**: `silu(gate) * up`.
# **Cross-entropy**: once over the logits for the loss, once more for the gradient.

# %%
PLACES = {
    "residual + norm": (
        [(["x", "r"], ["h"]), (["h"], ["y"])],
        {"x": 1, "r": 1, "h": 1, "y": 1},
        ["h", "y"],
    ),
    "QK-norm + RoPE": (
        [(["qk of qkv"], ["u"]), (["u"], ["q, k"])],
        {"qk of qkv": 2, "u": 2, "q, k": 2},
        ["q, k"],
    ),
    "SwiGLU": (
        [(["gate"], ["s"]), (["s", "up"], ["y"])],
        {"gate": 1, "up": 1, "s": 1, "y": 1},
        ["y"],
    ),
    "cross-entropy": (
        [(["logits"], ["loss"]), (["logits"], ["gradient"])],
        {"logits": 1, "gradient": 1, "loss": 0},
        ["loss", "gradient"],
    ),
}
for name, place in PLACES.items():
    before, after = bytes_before_after(*place)
    gain = f"{before / after:.2f} times as fast"
    print(f"{name:16} {before:2} arrays before, {after} after: {gain}")

# %% [markdown]
# ## Exercise 11.2: residual and norm in one kernel
#
# One block per row and **one thread per column**, so that the row's numbers stay where they are:
# each thread keeps its own in a variable. `block_sum(v, partial)` of lesson 3 may be used. The
# check counts bytes too.


# %% tags=["exercise"]
@cuda.jit
def residual_rmsnorm_kernel(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
    """h = x + r,   y = h rstd w,   rstd = 1 / sqrt(mean(h^2) + eps).

    h, y, x, r: (N, C)   w: (C,)   rstd: (N,)
    Grid N, block C, a multiple of 32 and at most 1024: thread c owns column c.
    """
    partial = cuda.shared.array(32, float32)
    n, c = cuda.blockIdx.x, cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("11.2", residual_rmsnorm_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `h = x_NC[n, c] + r_NC[n, c]`, and from there on nothing but `h` is needed.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `rstd = float32(1.0) / math.sqrt(block_sum(h * h, partial) / float32(x_NC.shape[1]) + eps)`, as in
# lesson 3.
#
# </details>


# %% tags=["solution"]
# Solution 11.2
@cuda.jit
def residual_rmsnorm_kernel(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
    """h = x + r,   y = h rstd w,   rstd = 1 / sqrt(mean(h^2) + eps).

    h, y, x, r: (N, C)   w: (C,)   rstd: (N,)
    Grid N, block C, a multiple of 32 and at most 1024: thread c owns column c.
    """
    partial = cuda.shared.array(32, float32)
    n, c = cuda.blockIdx.x, cuda.threadIdx.x
    h = x_NC[n, c] + r_NC[n, c]
    h_NC[n, c] = h
    rstd = float32(1.0) / math.sqrt(block_sum(h * h, partial) / float32(x_NC.shape[1]) + eps)
    if c == 0:
        rstd_N[n] = rstd
    y_NC[n, c] = h * rstd * w_C[c]


# %% [markdown]
# ## Exercise 11.3: SwiGLU
#
# `gu` is what one matrix product gives: in each row first F gates, then F ups. $\text{silu}(g) = g
# / (1 + e^{-g})$ and
#
# $$y_{n,f} = \text{silu}(gu_{n,f}) \cdot gu_{n,F+f}$$


# %% tags=["exercise"]
@cuda.jit
def swiglu_kernel(y_NF, gu_N2F):
    """y = silu(gate) up.   y: (N, F)   gu: (N, 2 F), gates then ups

    Grid (N, ceil(F / 32)), block 32: blockIdx.x is the row.
    """
    n, f = cuda.blockIdx.x, cuda.blockIdx.y * 32 + cuda.threadIdx.x
    F = y_NF.shape[1]
    # YOUR CODE


# %%
lesson.check("11.3", swiglu_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `gate / (float32(1.0) + math.exp(-gate)) * up`. (Without `float32(...)` the line would be computed
# in float64: lesson 1.)
#
# </details>


# %% tags=["solution"]
# Solution 11.3
@cuda.jit
def swiglu_kernel(y_NF, gu_N2F):
    """y = silu(gate) up.   y: (N, F)   gu: (N, 2 F), gates then ups

    Grid (N, ceil(F / 32)), block 32: blockIdx.x is the row.
    """
    n, f = cuda.blockIdx.x, cuda.blockIdx.y * 32 + cuda.threadIdx.x
    F = y_NF.shape[1]
    if f < F:
        gate, up = gu_N2F[n, f], gu_N2F[n, F + f]
        y_NF[n, f] = gate / (float32(1.0) + math.exp(-gate)) * up


# %% [markdown]
# ## Measure: is it what was predicted?
#
# First the bytes. The simulator counts what the threads of the library's kernels ask for, here for
# 4 rows of 512, in units of one such array:

# %%
from xtrain.kernels import elementwise, residual, rmsnorm, swiglu

rng = np.random.default_rng(0)
N, C = 4, 512
x_s, r_s = (simulator.sim(rng.standard_normal((N, C), np.float32)) for _ in range(2))
w_s = simulator.sim(np.ones(C, np.float32))


def arrays_moved(trace, unit):
    """Bytes over the bytes of one array; weights and one number per row left out."""
    names = {a.array for a in trace.of()} - {"w_C", "rstd_N", "constant"}
    return sum(trace.traffic(name).wanted for name in names) / unit


with lesson.tracing() as two:
    h_two = elementwise.add_fwd(x_s, r_s)
    y_two, _ = rmsnorm.rmsnorm_fwd(h_two, w_s, 1e-6)
with lesson.tracing() as one:
    h_one, y_one, _ = residual.residual_rmsnorm_fwd(x_s, r_s, w_s, 1e-6)
gu_s = simulator.sim(rng.standard_normal((N, 2 * C), np.float32))
with lesson.tracing() as fused:
    swiglu.swiglu_fwd(gu_s)
print("addition, then norm:", arrays_moved(two, x_s.nbytes))
print("both in one kernel: ", arrays_moved(one, x_s.nbytes))
print("SwiGLU in one:      ", arrays_moved(fused, x_s.nbytes))
print("the same bits:", np.array_equal(h_two, h_one) and np.array_equal(y_two, y_one))

# %% [markdown]
# Then the time. From the records: the two kernels, each measured by itself, and the fused one.

# %%
two_ms = {
    "fp32": ("bench_kernels/add/fp32", "bench_kernels/rmsnorm_fwd/fp32"),
    "bf16": ("bench_kernels/add/bf16", "bench_kernels/rmsnorm_fwd/bf16"),
}
one_ms = {
    "fp32": "bench_kernels/residual_rmsnorm_fwd/fp32",
    "bf16": "bench_kernels/residual_rmsnorm_fwd/bf16",
}
for dtype, parts in two_ms.items():
    apart = sum(lesson.record(i)["ms"] for i in parts)
    together = lesson.record(one_ms[dtype])["ms"]
    gain = f"{apart / together:.2f} times as fast (predicted 1.25)"
    print(f"{dtype}: {apart:.4f} ms apart, {together:.4f} ms together, {gain}")
lesson.table(list(one_ms.values()), {"ms": "ms", "GB/s": "value", "a copy, ms": "copy_ms"})

# %% [markdown]
# In float32 it is what the bytes say. In bf16 it is a little more, for a second reason: arrays are
# half as large there, and what a kernel costs beside its bytes (starting, filling the card, running
# empty) is paid once instead of twice.
#
# Here are all fused kernels beside PyTorch. *Eager* runs op by op; *compiled* is `torch.compile`,
# which fuses too, by writing kernels of its own.

# %%
lesson.table(
    [
        "bench_kernels/residual_rmsnorm_fwd/bf16",
        "bench_kernels/qk_norm_rope_fwd/bf16",
        "bench_kernels/swiglu_fwd/bf16",
        "bench_kernels/cross_entropy_both/bf16",
    ],
    {
        "ms": "ms",
        "of a copy": lambda r: f"{r['share']:.0%}",
        "torch eager, ms": "torch_eager_ms",
        "torch.compile, ms": "torch_compile_ms",
    },
)

# %% [markdown]
# Eager loses more than our rule says, since it makes more intermediate arrays than the four lists
# above: a split, a square, a mean, a product, and casts between bf16 and float32 for each. The rule
# is a lower limit for what there is to gain.
#
# On a GPU the next cell measures your kernels: addition and norm by the library's two kernels,
# against your fused one, which accesses 4 bytes at a time.

# %%
rows = 32768 if lesson.on_gpu() else 4
x_b, r_b = (lesson.array(rng.standard_normal((rows, 768), np.float32)) for _ in range(2))
w_b, rstd_b = lesson.array(np.ones(768, np.float32)), lesson.empty(x_b, rows)
h_b, y_b = (lesson.empty(x_b, (rows, 768)) for _ in range(2))
eps = np.float32(1e-6)
yours = lambda: lesson.launch(
    residual_rmsnorm_kernel, rows, 768, h_b, y_b, rstd_b, x_b, r_b, w_b, eps
)
runs = {
    "two kernels": lambda: rmsnorm.rmsnorm_fwd(elementwise.add_fwd(x_b, r_b), w_b, 1e-6),
    "yours": yours,
    "in use": lambda: residual.residual_rmsnorm_fwd(x_b, r_b, w_b, 1e-6),
}
times = lesson.measure(runs, nbytes=4 * x_b.nbytes)

# %% [markdown]
# ## One improvement: the largest array
#
# The head multiplies every row with the whole vocabulary, (N, C) times (C, V), and the loss reads
# the result. In a small model these **logits** are by far the largest array:

# %%
tokens, width, vocabulary, layers = 16 * 1024, 768, 50304, 12
gb = lambda *shape: 4 * np.prod(shape, dtype=float) / 1e9
print(f"logits of a batch of 16 x 1024: {gb(tokens, vocabulary):.2f} GB in float32")
print(f"the residual stream of all {layers} layers: {gb(layers, 2, tokens, width):.2f} GB")
print(f"logits of 2048 rows: {gb(2048, vocabulary):.2f} GB")

# %% [markdown]
# They cannot be kept in registers, since a matrix product lies on either side. But nobody needs
# them *as a whole*. The loss of a row and its gradient d depend on that row alone:
#
# $$d_{n,v} = \frac{1}{N} \left( \frac{e^{z_{n,v}}}{\sum_u e^{z_{n,u}}} - [v = \text{target}_n] \right), \qquad z = x w^T$$
#
# and what the model wants of d are dx = d w, row by row, and dw = d^T x, a *sum* over rows. So:
# take some rows, make their logits, turn them into d in place, use d for dx and a share of dw, and
# go on with the next rows in the same memory. It is fusing at a larger scale: not through
# registers, but through an array that stays small.
#
# The backward's work is done in the forward. The gradient that comes from above is not known yet
# there, but the loss is the end of the chain: what comes is 1, or a factor that can be multiplied
# in later.
#
# ## Exercise 11.4: the head and the loss, some rows at a time
#
# In NumPy. Remember to subtract the largest logit of a row before `exp`: e^800 is infinite.


# %% tags=["exercise"]
def head_loss(x_NC, w_VC, targets_N, rows):
    """-> loss (mean over the N rows of the cross-entropy), dx (N, C), dw (V, C).

    The logits of at most `rows` rows exist at any time.
    x: (N, C), w: (V, C) floats   targets: (N,) integers from 0 to V - 1
    """
    # YOUR CODE


# %%
lesson.check("11.4", head_loss)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `for first in range(0, N, rows):` with `part = slice(first, first + rows)`; slices of NumPy end by
# themselves at the end of an array.
#
# </details>
# <details><summary>Hint 2</summary>
#
# With d the logits minus their largest, `n = np.arange(len(d))` and `target = targets_N[part]`: the
# rows' losses are `np.log(np.exp(d).sum(1)) - d[n, target]`. Products, differences and exp can
# write over an array that is there: `out=`, `-=`, `/=`.
#
# </details>


# %% tags=["solution"]
# Solution 11.4
def head_loss(x_NC, w_VC, targets_N, rows):
    """-> loss (mean over the N rows of the cross-entropy), dx (N, C), dw (V, C).

    The logits of at most `rows` rows exist at any time.
    x: (N, C), w: (V, C) floats   targets: (N,) integers from 0 to V - 1
    """
    N = len(x_NC)
    loss, dx_NC, dw_VC = 0.0, np.empty_like(x_NC), np.zeros_like(w_VC)
    memory_RV = np.empty((min(rows, N), len(w_VC)))
    for first in range(0, N, rows):
        part = slice(first, min(first + rows, N))
        n, target = np.arange(part.stop - first), targets_N[part]
        d_RV = np.matmul(x_NC[part], w_VC.T, out=memory_RV[: len(n)])
        d_RV -= d_RV.max(1, keepdims=True)
        loss -= d_RV[n, target].sum()
        np.exp(d_RV, out=d_RV)
        total = d_RV.sum(1, keepdims=True)
        loss += np.log(total).sum()
        d_RV /= total * N
        d_RV[n, target] -= 1 / N
        dx_NC[part] = d_RV @ w_VC
        dw_VC += d_RV.T @ x_NC[part]
    return loss / N, dx_NC, dw_VC


# %% [markdown]
# What it saves, measured here: the largest amount of memory that NumPy held at once, for 1024 rows
# and 4096 words.

# %%
import tracemalloc

x_64, w_64 = rng.standard_normal((1024, 8)), rng.standard_normal((4096, 8))
targets = rng.integers(0, 4096, 1024)
for rows_at_once in (1024, 256, 64):
    tracemalloc.start()
    loss, _, _ = head_loss(x_64, w_64, targets, rows_at_once)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{rows_at_once:4} rows at a time: loss {loss:.6f}, {peak / 1e6:4.0f} MB")

# %% [markdown]
# It is not free: every chunk reads and writes dw once more, V C numbers. So the chunks must not be
# too small; the library takes about 2048 rows.
#
# ## The library's kernel
#
# Your 11.2, for rows of any length: 16 bytes at a time, a row in the registers of a warp or of a
# block, and the sum stored while it is still there. `few` and `overlap` are for decoding, where there
# is a row per sequence: more threads then share a row, and its weights are asked for with the rest.

# %%
lesson.source(residual.make_fwd_kernel)

# %% [markdown]
# SwiGLU's kernel holds your line in the middle; around it are loads and stores.

# %%
lesson.source(swiglu.make_swiglu_fwd_kernel)

# %% [markdown]
# QK-norm and RoPE in their plainest form: a warp owns a head. The norm's result is in `u1` and
# `u2`, which the rotation takes from there.

# %%
from xtrain.kernels import linear_cross_entropy, qk_norm_rope

lesson.source(qk_norm_rope.qk_norm_rope_fwd_warp_kernel)

# %% [markdown]
# And your 11.4. `cross_entropy` writes the gradient over the logits, in one launch per chunk.

# %%
lesson.source(linear_cross_entropy.linear_cross_entropy, "for first in range")

# %% [markdown]
# ## What did not help
#
# *Fusing alone.* A fused SwiGLU that moves 4 bytes at a time, like yours, and the two kernels it
# replaces at full speed (the product of two arrays is taken to run at the speed of the addition in
# the records, which moves as much):

# %%
silu = lesson.record("bench_kernels/silu_fwd/fp32")
add = lesson.record("bench_kernels/add/fp32")
fused = lesson.record("bench_kernels/swiglu_fwd/fp32")
apart = silu["ms"] + fused["nbytes"] / add["value"] / 1e6
print(f"two kernels, 16 bytes at a time: {apart:.3f} ms")
print(f"fused, 4 bytes at a time:        {fused['naive_ms']:.3f} ms")
print(f"fused, 16 bytes at a time:       {fused['ms']:.3f} ms")
lesson.figures.bars(
    {"two kernels": apart, "fused, 4 bytes": fused["naive_ms"], "fused, 16 bytes": fused["ms"]},
    "ms",
    "SwiGLU in float32",
    limit=("a copy of as many bytes", fused["copy_ms"]),
)

# %% [markdown]
# Fewer bytes, moved less well: much of the gain is lost again. A fused kernel has to be as good at
# memory as those that it replaces.
#
# *Keeping less, for more bytes.* SwiGLU's backward can compute y once more, so that the forward
# need not keep it. That costs one more array to write. It is a loss in time by itself, taken on
# purpose: it saves N F numbers of memory in every layer.

# %%
lesson.table(
    ["bench_kernels/swiglu_bwd/bf16", "bench_kernels/swiglu_bwd_again/bf16"],
    {
        "ms": "ms",
        "MB moved": lambda r: r["nbytes"] / 1e6,
        "of a copy": lambda r: f"{r['share']:.0%}",
    },
)

# %% [markdown]
# *Asking early, in the source alone.* A kernel that asks for its next row, computes on this one and
# only then needs what it asked for should never wait. The library's QK-norm + RoPE forward asked
# for the angles first of all, and took 0.0676 ms, 75 % of a copy's speed: the compiler had moved
# those loads behind the sum of squares, where the first numbers had to arrive before the second
# were asked for. It sees no difference, and has a register less to keep. `cuda.syncwarp()` between
# asking and computing holds the loads in place: no load moves across a barrier. With that, and one
# head for each thread instead of two:

# %%
asked = lesson.record("bench_kernels/qk_norm_rope_fwd/bf16")
print(f"QK-norm + RoPE forward, bf16: {asked['ms']:.4f} ms, {asked['share']:.0%} of a copy")

# %% [markdown]
# The machine code tells: `nvdisasm` lists it, and loads are `LDG`. Look where they stand.

# %% [markdown]
# ## More exercises
#
# 1. Use 11.1 for AdamW: read w, g, m, v, write w, m, v; and a second kernel that rounds w to bf16
#    (2 bytes), and a third that fills g with zeros. What does one kernel save? Compare with the
#    records `adamw` and `adamw_with_copy_and_zeros`.
# 2. Two residual blocks follow each other: h1 = x + r1, y1 = norm(h1), and later h2 = h1 + r2. Why
#    can the two additions not be fused?
# 3. A bias is added to the output of a matrix product, then silu is taken. Which of the three can
#    be fused with which, and what does it save?
#
# <details><summary>Solutions</summary>
#
# 1: In bytes per parameter: 28 for AdamW, 4 + 2 for the copy, 4 for the zeros, 38 in all; as one
# kernel 28 + 2 + 4 = 34, for w is not read again. The record with copy and zeros moves 34 bytes per
# parameter.
#
# 2: r2 is computed from y1, through a whole attention or MLP: between the two additions stand
# matrix products that need *all* of y1.
#
# 3: bias and silu always, which saves writing and reading the array between them. Both with the
# product, if one writes the product oneself or the library offers it: that saves writing and
# reading the product's result as well.
#
# </details>
#
# ## Sources
#
# - A. Ivanov et al., *Data Movement Is All You Need*, 2021: the bytes of a transformer, op by op.
# - N. Shazeer, *GLU Variants Improve Transformer*, 2020.
# - P.-L. Hsu et al., *Liger Kernel*, 2024: the head and the loss in chunks.
