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
# *About 75 minutes. You need [lesson 10](10_profiling.ipynb), and RMSNorm from [lesson
# 3](03_reductions.ipynb).*
#
# **The question.** In the kernel table of lesson 10, the kernels move their bytes as fast as a copy does, so they
# cannot move them any faster. Yet PyTorch, running op by op, takes 1.5 to 25 times as long for the same maths. What is
# left to save, where, and how can you predict how much?
#
# You will write the rule that predicts it, two fused kernels, and a loss that never holds its
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
# Between two layers, a transformer adds and normalises: `h = x + r`, then `y = rmsnorm(h) w`. The
# sum h is needed later, because it is the residual stream. With B, T, C = 2, 3, 4, an array has
# 6 · 4 numbers of 4 bytes each:
# %%
from xtrain.kernels.residual import residual_rmsnorm_ref

B, T, C = 2, 3, 4
x = np.arange(1, 25, dtype=np.float32).reshape(B * T, C)
r, w = np.ones((B * T, C), np.float32), np.array([1, 1, 2, 2], np.float32)
h, y, rstd = residual_rmsnorm_ref(x, r, w, 1e-6)
print("h, first row:", h[0], "  y, first row:", y[0].round(4))

size = x.nbytes
print(f"one array: {size} bytes")
print(f"addition:    read x, r, write h  {3 * size}")
print(f"norm:        read h, write y     {2 * size}")
print(f"together:                        {5 * size}")
print(f"one kernel:  read x, r, write h, y: {4 * size}")
lesson.source(residual_rmsnorm_ref)

# %% [markdown]
# The second kernel reads from memory what the first has just had in registers. In a single kernel,
# that read disappears. Nothing else changes: the additions and roundings are the same. For kernels
# limited by memory bandwidth (lesson 2), time is proportional to bytes, so the prediction is 5 / 4,
# or 1.25 times as fast.
#
# (The weights w and the rstd of lesson 3, one number per row, are small compared with N C numbers,
# so the counts leave them out.)
#
# If h were not needed later, it would not have to be written either, and 5 would become 3. So the
# rule has two parts:
#
# - an array that is produced and consumed inside the fused kernel is never **read** from memory;
# - if it is not needed afterwards, it is not **written** either.
#
# ## Exercise 11.1: the prediction
#
# Each kernel is given as two lists, the arrays it reads and the arrays it writes: the addition is
# `(["x", "r"], ["h"])`.


# %% tags=["exercise"]
def bytes_before_after(kernels, sizes, kept):
    """-> (bytes moved by the kernels run separately, bytes moved by all of them fused into one)

    kernels: [(names it reads, names it writes), ...]   sizes: {name: bytes}
    kept: names of the arrays that are needed afterwards; each is written by some kernel
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
# After: the arrays that some kernel reads and no kernel writes, each counted once (use a set), and
# the arrays in `kept`.
#
# </details>


# %% tags=["solution"]
# Solution 11.1
def bytes_before_after_solution(kernels, sizes, kept):
    """-> (bytes moved by the kernels run separately, bytes moved by all of them fused into one)

    kernels: [(names it reads, names it writes), ...]   sizes: {name: bytes}
    kept: names of the arrays that are needed afterwards; each is written by some kernel
    """
    before = sum(sizes[a] for reads, writes in kernels for a in (*reads, *writes))
    made = {a for _, writes in kernels for a in writes}
    inputs = {a for reads, _ in kernels for a in reads} - made
    return before, sum(sizes[a] for a in inputs) + sum(sizes[a] for a in kept)


bytes_before_after = lesson.yours(bytes_before_after, bytes_before_after_solution)


# %% [markdown]
# A transformer has four places where fusing pays. The unit below is an array of N rows with the
# width at that place. **QK-norm and RoPE**: some models, among them Qwen3, normalise each head's
# query and key before rotating them; fused, the values stay in registers. **SwiGLU**:
# `silu(gate) * up`. **Cross-entropy**: one pass over the logits for the loss, and another for the
# gradient.

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
# Use one block per row and **one thread per column**, so that the row stays in registers: each
# thread keeps its number in a local variable. You may use `block_sum(v, partial)` from lesson 3.
# The check also counts bytes.


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
# Compute `h = x_NC[n, c] + r_NC[n, c]`; the rest of the kernel needs only `h`.
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
def residual_rmsnorm_kernel_solution(h_NC, y_NC, rstd_N, x_NC, r_NC, w_C, eps):
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


residual_rmsnorm_kernel = lesson.yours(residual_rmsnorm_kernel, residual_rmsnorm_kernel_solution)


# %% [markdown]
# ## Exercise 11.3: SwiGLU
#
# `gu` is the result of one matrix product: each row holds first F gates, then F ups. With
# $\text{silu}(g) = g / (1 + e^{-g})$,
#
# $$y_{n,f} = \text{silu}(gu_{n,f}) \cdot gu_{n,F+f}$$


# %% tags=["exercise"]
@cuda.jit
def swiglu_kernel(y_NF, gu_N2F):
    """y = silu(gate) up.   y: (N, F)   gu: (N, 2 F), gates before ups

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
# `gate / (float32(1.0) + math.exp(-gate)) * up`. (Without `float32(...)`, the line is computed in
# float64: lesson 1.)
#
# </details>


# %% tags=["solution"]
# Solution 11.3
@cuda.jit
def swiglu_kernel_solution(y_NF, gu_N2F):
    """y = silu(gate) up.   y: (N, F)   gu: (N, 2 F), gates before ups

    Grid (N, ceil(F / 32)), block 32: blockIdx.x is the row.
    """
    n, f = cuda.blockIdx.x, cuda.blockIdx.y * 32 + cuda.threadIdx.x
    F = y_NF.shape[1]
    if f < F:
        gate, up = gu_N2F[n, f], gu_N2F[n, F + f]
        y_NF[n, f] = gate / (float32(1.0) + math.exp(-gate)) * up


swiglu_kernel = lesson.yours(swiglu_kernel, swiglu_kernel_solution)


# %% [markdown]
# ## Measure: does the prediction hold?
#
# First the bytes. The simulator counts what the threads of the library's kernels access, here for 4
# rows of 512 columns, in units of one such array:

# %%
from xtrain.kernels import elementwise, residual, rmsnorm, swiglu

rng = np.random.default_rng(0)
N, C = 4, 512
x_s, r_s = (simulator.sim(rng.standard_normal((N, C), np.float32)) for _ in range(2))
w_s = simulator.sim(np.ones(C, np.float32))


def arrays_moved(trace, unit):
    """Bytes moved, in units of one array; weights and per-row numbers are left out."""
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
print("SwiGLU in one kernel:", arrays_moved(fused, x_s.nbytes))
print("same bits:", np.array_equal(h_two, h_one) and np.array_equal(y_two, y_one))

# %% [markdown]
# Then the time. From the records: the two kernels, each measured separately, and the fused one.

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
# In float32 the gain matches the byte count. In bf16 it is slightly larger, for a second reason:
# the arrays are half as large there, and a kernel's fixed costs (starting, filling the GPU,
# draining it) are paid once instead of twice.
#
# Next, all fused kernels compared with PyTorch. *Eager* runs op by op; *compiled* is
# `torch.compile`, which also fuses, by generating its own kernels.

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
# Eager loses more than the rule predicts, because it creates more intermediate arrays than the four lists above: a
# split, a square, a mean, a product, and for each of them casts between bf16 and float32. The rule gives a lower bound
# on the gain. The compiler matches xtrain's kernels for two of the four; for the other two it takes 2.4 to 2.5 times as
# long.
#
# On a GPU, the next cell compares the library's two kernels for addition and norm with your fused
# kernel, which accesses 4 bytes at a time, and with the library's fused kernel.

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
# The head multiplies every row by the weights of the whole vocabulary, (N, C) times (C, V), and the
# loss reads the result. In a small model these **logits** are by far the largest array:

# %%
tokens, width, vocabulary, layers = 16 * 1024, 768, 50304, 12
gb = lambda *shape: 4 * np.prod(shape, dtype=float) / 1e9
print(f"logits of a batch of 16 x 1024: {gb(tokens, vocabulary):.2f} GB in float32")
print(f"the residual stream of all {layers} layers: {gb(layers, 2, tokens, width):.2f} GB")
print(f"logits of 2048 rows: {gb(2048, vocabulary):.2f} GB")

# %% [markdown]
# The logits cannot stay in registers, because a matrix product produces them and other matrix
# products consume their gradient. But they are never needed *all at once*. The loss of a row and
# its gradient d depend only on that row:
#
# $$d_{n,v} = \frac{1}{N} \left( \frac{e^{z_{n,v}}}{\sum_u e^{z_{n,u}}} - [v = \text{target}_n] \right), \qquad z = x w^T$$
#
# The model needs d only for dx = d w, row by row, and for dw = d^T x, a *sum* over rows. So process
# a chunk of rows at a time: compute its logits, turn them into d in place, use d for dx and for
# this chunk's part of dw, and reuse the memory for the next chunk. This is fusion at a larger
# scale: the intermediate result stays not in registers but in an array that stays small.
#
# This does the backward pass's work during forward. The incoming gradient is not known yet, but the
# loss is the end of the chain: the incoming gradient is 1, or a factor that can be multiplied in
# later.
#
# ## Exercise 11.4: the head and the loss in chunks of rows
#
# Write it in NumPy. Remember to subtract the largest logit of each row before `exp`: e^800
# overflows to infinity.


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
# Loop with `for first in range(0, N, rows):` and `part = slice(first, first + rows)`; NumPy clips a
# slice at the end of the array.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Let d be the logits minus their row maximum, `n = np.arange(len(d))` and
# `target = targets_N[part]`: the rows' losses are `np.log(np.exp(d).sum(1)) - d[n, target]`.
# Products, differences and exp can overwrite an existing array: `out=`, `-=`, `/=`.
#
# </details>


# %% tags=["solution"]
# Solution 11.4
def head_loss_solution(x_NC, w_VC, targets_N, rows):
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


head_loss = lesson.yours(head_loss, head_loss_solution)


# %% [markdown]
# The saving, measured here: NumPy's peak memory use for 1024 rows and a vocabulary of 4096.

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
# This is not free: every chunk reads and writes dw, V C numbers, one more time. So the chunks must
# not be too small; the library uses about 2048 rows.
#
# ## The library's kernel
#
# Here is your 11.2 for rows of any length: it accesses 16 bytes at a time, keeps a row in the
# registers of a warp or of a block, and stores the sum while it is still in registers. `few` and
# `overlap` are for decoding, with one row per sequence: more threads share a row, and its weights
# are loaded together with the rest.

# %%
lesson.source(residual.make_fwd_kernel)

# %% [markdown]
# SwiGLU's kernel has your line at its centre, between the loads and the stores.

# %%
lesson.source(swiglu.make_swiglu_fwd_kernel)

# %% [markdown]
# Here are QK-norm and RoPE in their simplest form, with one warp per head. The norm leaves its
# result in `u1` and `u2`, and the rotation reads it from there.

# %%
from xtrain.kernels import linear_cross_entropy, qk_norm_rope

lesson.source(qk_norm_rope.qk_norm_rope_fwd_warp_kernel)

# %% [markdown]
# And here is your 11.4. `cross_entropy` overwrites the logits with the gradient, in one launch per
# chunk.

# %%
lesson.source(linear_cross_entropy.linear_cross_entropy, "for first in range")

# %% [markdown]
# ## What did not help
#
# *Fusing alone.* Compare a fused SwiGLU that moves 4 bytes at a time, like yours, with the two
# kernels it replaces at full speed. (There is no record for the product of two arrays; assume that
# it runs at the speed of the addition, which moves the same number of bytes.)

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
# The fused kernel moves fewer bytes, but less efficiently, and loses much of the gain. A fused
# kernel has to use memory as efficiently as the kernels that it replaces.
#
# *Storing less, but moving more bytes.* SwiGLU's backward can recompute y, so that the forward does
# not have to keep it. That costs one more array to write. By itself this is slower, but it saves
# the memory of N F numbers in every layer, so the library does it on purpose.

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
# *Loading early, in the source only.* A kernel that loads its next row first, computes on the
# current row, and only then uses the loaded values should never wait. The library's QK-norm + RoPE
# forward loaded the angles at the very start, and took 0.0676 ms, 75 % of a copy's speed. The
# compiler had moved those loads behind the sum of squares, so the first values had to arrive before
# the second loads were issued. To the compiler the two orders are equivalent, and the later load
# occupies one register less. A `cuda.syncwarp()` between the loads and the computation keeps the
# loads in place, because no load moves across a barrier. With that, and with one head per thread
# instead of two:

# %%
asked = lesson.record("bench_kernels/qk_norm_rope_fwd/bf16")
print(f"QK-norm + RoPE forward, bf16: {asked['ms']:.4f} ms, {asked['share']:.0%} of a copy")

# %% [markdown]
# You can check this in the machine code: `nvdisasm` lists it, and loads are the `LDG` instructions.
# Look at their positions.

# %% [markdown]
# ## More exercises
#
# 1. Apply 11.1 to AdamW: one kernel reads w, g, m, v and writes w, m, v; a second rounds w to bf16
#    (2 bytes); a third fills g with zeros. What does fusing them into one kernel save? Compare with
#    the records `adamw` and `adamw_with_copy_and_zeros`.
# 2. Two residual blocks follow each other: h1 = x + r1, y1 = norm(h1), and later h2 = h1 + r2. Why
#    can the two additions not be fused?
# 3. A bias is added to the output of a matrix product, then silu is applied. Which of the three
#    operations can be fused, and what does that save?
#
# <details><summary>Solutions</summary>
#
# 1: In bytes per parameter: 28 for AdamW, 4 + 2 for the rounded copy, 4 for the zeros, 38 in total.
# As one kernel: 28 + 2 + 4 = 34, because w is not read again. The record with copy and zeros moves
# 34 bytes per parameter.
#
# 2: r2 is computed from y1, through a whole attention layer or MLP: the matrix products between the
# two additions need *all* of y1.
#
# 3: Bias and silu can always be fused, which saves writing and reading the array between them. Both
# can also be fused into the product, if you write the product yourself or the library offers it:
# that saves writing and reading the product's result as well.
#
# </details>
#
# ## Sources
#
# - A. Ivanov et al., *Data Movement Is All You Need*, 2021: the bytes a transformer moves, op by
#   op.
# - N. Shazeer, *GLU Variants Improve Transformer*, 2020.
# - P.-L. Hsu et al., *Liger Kernel*, 2024: the head and the loss in chunks.
