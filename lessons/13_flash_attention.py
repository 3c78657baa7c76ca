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
# # 13 FlashAttention
#
# *About 110 minutes. You need [lesson 3](03_reductions.ipynb) and the attention of [lesson
# 7](07_model.ipynb).*
#
# **The question.** Attention compares every token with every earlier one: T tokens make T x T
# scores. With 16 heads and 65,536 tokens, the scores alone, at two bytes each, are 137 GB. An H200
# has 141 GB, and it must also hold a model. Yet the records of this lesson include exactly that
# shape, and it runs with a few megabytes of extra memory. Where are the scores?
#
# They never all exist at the same time. You will write the softmax that makes this possible, and
# then use it for attention, forward and backward.

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

D = 16  # width of a head
TILE = 32  # queries per block, and keys per tile
LOWEST = float32(-1e30)  # below every score


@cuda.jit(device=True)
def load_tile(tile, x_TD, first):
    """Rows first, first + 1, ... of x into the shared tile (TILE, D); zeros beyond the end."""
    for i in range(cuda.threadIdx.x, TILE * D, TILE):
        r, d = i // D, i % D
        tile[r, d] = x_TD[first + r, d] if first + r < x_TD.shape[0] else float32(0.0)


# %% [markdown]
# ## Attention by hand
#
# Take one head: q, k, v of shape (T, D). Each query t has a score for every key s, a softmax turns
# the scores into weights, and the output is the weighted mean of the values:
#
# $$s_{ts} = \frac{q_t \cdot k_s}{\sqrt{D}} \qquad p_{ts} = \frac{e^{s_{ts}}}{\sum_{j} e^{s_{tj}}} \qquad o_t = \sum_s p_{ts} v_s$$
#
# *Causal* means that s runs only up to t, because a token must not see later ones. With T, D = 3,
# 4:

# %%
q = np.array([[1.0, 0, 2, 0], [0, 2, 0, 2], [2, 2, 0, 0]])
k = np.array([[2.0, 0, 0, 0], [0, 2, 0, 2], [2, 4, 2, 0]])
v = np.array([[1.0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]])
s = q @ k.T / math.sqrt(4)
s[np.triu_indices(3, 1)] = -np.inf  # the future
p = np.exp(s - s.max(1, keepdims=True))
p /= p.sum(1, keepdims=True)
print("scores\n", s)
print("weights\n", p.round(4))
print("output\n", (p @ v).round(4))

# %% [markdown]
# As always, the largest score of a row is subtracted before exp: p does not change, and exp cannot
# overflow. That is the difficulty. Even the first weight of a row depends on the maximum and the
# sum of the *whole* row, so it seems that all scores of a row must be computed, and kept, first.
#
# The library's reference does exactly that, for all heads at once. It also returns a second array,
# which you will need below: lse, the logarithm of each row's sum of exp.

# %%
from xtrain.kernels.attention import flash_attention

lesson.source(flash_attention.flash_attention_ref)

# %% [markdown]
# ## The online softmax
#
# Suppose that only the first two scores of a row are available. You can compute *their* maximum m,
# *their* sum l of exp(s - m), and *their* weighted sum of values, acc. Then two more scores arrive,
# and one of them is larger than m. Both l and acc are too large by the same factor, because they
# were computed with the old maximum. So multiply them by exp(m - m') and continue:
#
# $$m' = \max(m, \max_j s_j) \qquad l' = l\,e^{m - m'} + \sum_j e^{s_j - m'} \qquad acc' = acc\,e^{m - m'} + \sum_j e^{s_j - m'} v_j$$
#
# At the end, o = acc / l is exactly the result of the full softmax, and lse = m + log l. By hand,
# for a row of four scores in two tiles of two:

# %%
scores = np.array([1.0, 3.0, 2.0, 5.0])
values = np.array([10.0, 20.0, 30.0, 40.0])  # one column is enough to see it
m, l, acc = -np.inf, 0.0, 0.0
print("tile         m   factor        l      acc   acc / l")
for tile in (slice(0, 2), slice(2, 4)):
    new = max(m, scores[tile].max())
    factor = math.exp(m - new)  # 0 for the first tile: exp(-inf)
    weight = np.exp(scores[tile] - new)
    l = l * factor + weight.sum()
    acc = acc * factor + weight @ values[tile]
    m = new
    print(f"{scores[tile]}  {m:3}   {factor:.4f}   {l:.4f}   {acc:.4f}   {acc / l:.4f}")
whole = np.exp(scores) / np.exp(scores).sum()
print(f"the full softmax at once: {whole @ values:.4f}")
print(f"lse {math.log(np.exp(scores).sum()):.4f}, m + log l {m + math.log(l):.4f}")

# %% [markdown]
# ## Exercise 13.1: one row, tile by tile
#
# Write it in NumPy. The arrays k and v that the check passes to you support slicing, `k_SD[a:b]`,
# but reject slices of more than `tile` rows.


# %% tags=["exercise"]
def attention_row(q_D, k_SD, v_SD, scale, tile):
    """-> o (D,), lse of one query that sees all S keys, at most `tile` of them at a time.

    o = softmax(scale k q) v, lse = log sum exp(scale k q).   q: (D,), k and v: (S, D).
    """
    # YOUR CODE


# %%
lesson.check("13.1", attention_row)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Loop with `for first in range(0, k_SD.shape[0], tile):` and compute
# `s = scale * (k_SD[first : first + tile] @ q_D)`. A slice that extends past the end is just
# shorter.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Begin with `top, total, acc = -np.inf, 0.0, np.zeros(v_SD.shape[1])`. In each iteration, compute
# the new maximum and the factor `np.exp(top - new)`, and multiply both `total` and `acc` by it
# before you add to them.
# </details>


# %% tags=["solution"]
# Solution 13.1
def attention_row_solution(q_D, k_SD, v_SD, scale, tile):
    """-> o (D,), lse of one query that sees all S keys, at most `tile` of them at a time.

    o = softmax(scale k q) v, lse = log sum exp(scale k q).   q: (D,), k and v: (S, D).
    """
    top, total, acc = -np.inf, 0.0, np.zeros(v_SD.shape[1])
    for first in range(0, k_SD.shape[0], tile):
        s = scale * (k_SD[first : first + tile] @ q_D)
        new = max(top, s.max())
        shrink, weight = np.exp(top - new), np.exp(s - new)
        total = total * shrink + weight.sum()
        acc = acc * shrink + weight @ v_SD[first : first + tile]
        top = new
    return acc / total, top + np.log(total)


attention_row = lesson.yours(attention_row, attention_row_solution)


# %% [markdown]
# ## Tiles on a GPU
#
# Now do this for all queries. A block of 32 threads owns 32 queries; each thread keeps its own
# query, m, l and acc in registers. The block loads one tile of 32 keys and values after another
# into shared memory, where all 32 queries use it. Each load is thus used 32 times, as in the matrix
# product of [lesson 4](04_matmul.ipynb).
#
# With a causal mask, most queries see only part of the keys, and many tiles are not needed at all.
# Query tile i needs key tile j only if j is at most i; in the tile j = i, each thread masks the
# keys after its own t. The next figure shows 6 tiles of queries (rows) and of keys (columns): each
# cell holds the iteration in which the block reaches that tile, and a dash means never.

# %%
turns = np.where(np.tri(6, dtype=bool), np.arange(6), -1)
lesson.figures.ownership(
    turns, "queries down, keys across: the iteration in which a block reaches a tile", "iteration"
)

# %% [markdown]
# ## Exercise 13.2: the kernel
#
# One head, causal. The function `load_tile(tile, x_TD, first)`, defined at the top, fills a shared
# tile with 32 rows; all threads of the block must call it. Every iteration needs two barriers: one
# so that no thread reads a tile before it is loaded, and one so that no thread overwrites a tile
# that another thread is still reading.


# %% tags=["exercise"]
@cuda.jit
def flash_kernel(o_TD, lse_T, q_TD, k_TD, v_TD, scale):
    """o = softmax(scale q k^T, causal) v, lse = log sum exp.

    o, q, k, v: (T, D), lse: (T,). Thread x of block i owns query t = TILE i + x and
    accumulates over its keys one at a time.
    Grid ceil(T / TILE), block TILE.
    """
    k, v = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    q, acc = cuda.local.array(D, float32), cuda.local.array(D, float32)
    T = q_TD.shape[0]
    t = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    top, total = LOWEST, float32(0.0)
    # YOUR CODE


# %%
lesson.check("13.2", flash_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First fill q from `q_TD[t, d]`, with zeros if t is past the end, and fill acc with zeros. Then
# `for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):` visits the tiles up to the block's
# own.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In each iteration: a barrier, load both tiles, a barrier, then `for j in range(TILE):` and, if
# `first + j <= t`, the score `s` of key j. With one key at a time, the new maximum is
# `new = s if s > top else top`, the factor is `math.exp(top - new)`, and the weight is
# `math.exp(s - new)`.
#
# </details>


# %% tags=["solution"]
# Solution 13.2
@cuda.jit
def flash_kernel_solution(o_TD, lse_T, q_TD, k_TD, v_TD, scale):
    """o = softmax(scale q k^T, causal) v, lse = log sum exp.

    o, q, k, v: (T, D), lse: (T,). Thread x of block i owns query t = TILE i + x and
    accumulates over its keys one at a time.
    Grid ceil(T / TILE), block TILE.
    """
    k, v = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    q, acc = cuda.local.array(D, float32), cuda.local.array(D, float32)
    T = q_TD.shape[0]
    t = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    top, total = LOWEST, float32(0.0)
    for d in range(D):
        q[d] = q_TD[t, d] if t < T else float32(0.0)
        acc[d] = float32(0.0)
    for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
        cuda.syncthreads()  # no thread still reads the previous tile
        load_tile(k, k_TD, first)
        load_tile(v, v_TD, first)
        cuda.syncthreads()
        for j in range(TILE):
            if first + j <= t:
                s = float32(0.0)
                for d in range(D):
                    s += q[d] * k[j, d]
                s *= scale
                new = s if s > top else top
                shrink, weight = math.exp(top - new), math.exp(s - new)
                total = total * shrink + weight
                for d in range(D):
                    acc[d] = acc[d] * shrink + weight * v[j, d]
                top = new
    if t < T:
        for d in range(D):
            o_TD[t, d] = acc[d] / total
        lse_T[t] = top + math.log(total)


flash_kernel = lesson.yours(flash_kernel, flash_kernel_solution)


# %% [markdown]
# A thread past the end of T computes on zeros and writes nothing; it must not return early, because
# all threads must reach the barriers. And the initial maximum is a very low number rather than
# minus infinity: a row whose first tile is completely masked would compute -inf - (-inf), which is
# NaN. (Here every query sees key 0; the library's kernels do encounter such rows.)
#
# Compare with the reference:

# %%
T, scale = 70, np.float32(1 / math.sqrt(D))
random = np.random.default_rng(0)
q_TD, k_TD, v_TD, do_TD = (random.standard_normal((T, D)).astype(np.float32) for _ in range(4))
here = [lesson.array(x) for x in (q_TD, k_TD, v_TD)]
o_here, lse_here = lesson.empty(here[0], (T, D)), lesson.empty(here[0], T)
lesson.launch(flash_kernel, -(-T // TILE), TILE, o_here, lse_here, *here, scale)


def one_head(x_TD):
    return x_TD.astype(np.float64)[None, :, None]  # (1, T, 1, D)


o_ref, lse_ref = flash_attention.flash_attention_ref(*map(one_head, (q_TD, k_TD, v_TD)), scale)
o_TD, lse_T = lesson.host(o_here), lesson.host(lse_here)
print("o   agrees to 1e-5:", np.allclose(o_TD, o_ref[0, :, 0], atol=1e-5))
print("lse agrees to 1e-5:", np.allclose(lse_T, lse_ref[0, 0], atol=1e-5))

# %% [markdown]
# ## The backward
#
# The backward pass receives do, of the same shape as o. By [lesson 5](05_backward.ipynb), for the
# two matrix products and the softmax between them, with s denoting the scaled scores:
#
# $$dv = p^T do \qquad dp = do\,v^T \qquad ds_{ts} = p_{ts} \Big(dp_{ts} - \sum_j p_{tj}\,dp_{tj}\Big)$$
#
# $$dq = scale \cdot ds\,k \qquad dk = scale \cdot ds^T q$$
#
# The weights p were never stored. Two observations make the backward possible without them:
#
# 1. **Recompute p.** p = exp(s - lse). Given lse, one number per row, a tile of p costs one small
#    matrix product, in any order, without a second online softmax.
# 2. **The sum over the whole row is also available.** It seems to need all tiles before the first
#    ds can be computed. But
#
# $$\delta_t = \sum_j p_{tj}\,dp_{tj} = \sum_j p_{tj} \, (do_t \cdot v_j) = do_t \cdot \sum_j p_{tj} v_j = do_t \cdot o_t$$
#
# is a dot product of two known vectors. On the tiny example, with do = o - 0.5 as an arbitrary
# choice:

# %%
o = p @ v
do = o - 0.5
dp = do @ v.T
print("sum of p dp over each row:", (p * dp).sum(1).round(4))
print("do . o of each row:       ", (do * o).sum(1).round(4))

# %% [markdown]
# ## Exercise 13.3: dq
#
# Use the same loop over tiles as in 13.2. For each visible key, compute its scaled score s, p =
# exp(s - lse), dp = do . v and ds = p (dp - delta), and add ds k to dq. The factor `scale` of dq
# can be applied at the end.


# %% tags=["exercise"]
@cuda.jit
def flash_dq_kernel(dq_TD, do_TD, q_TD, k_TD, v_TD, o_TD, lse_T, scale):
    """The gradient of flash_kernel with respect to q.   Grid ceil(T / TILE), block TILE.

    dq, do, q, k, v, o: (T, D), lse: (T,). Thread x of block i owns query t = TILE i + x.
    """
    k, v = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    q, do = cuda.local.array(D, float32), cuda.local.array(D, float32)
    acc = cuda.local.array(D, float32)
    T = q_TD.shape[0]
    t = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("13.3", flash_dq_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Before the loop: q, do and acc as in 13.2, and `delta`, the sum of `do_TD[t, d] * o_TD[t, d]` over
# d. Read `lse_T[t]` once, into a variable. Do all this only if `t < T`; otherwise use zeros.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Threads past the end have no lse. They only take part in the loads and barriers:
# `if first + j <= t and t < T:`.
#
# </details>


# %% tags=["solution"]
# Solution 13.3
@cuda.jit
def flash_dq_kernel_solution(dq_TD, do_TD, q_TD, k_TD, v_TD, o_TD, lse_T, scale):
    """The gradient of flash_kernel with respect to q.   Grid ceil(T / TILE), block TILE.

    dq, do, q, k, v, o: (T, D), lse: (T,). Thread x of block i owns query t = TILE i + x.
    """
    k, v = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    q, do = cuda.local.array(D, float32), cuda.local.array(D, float32)
    acc = cuda.local.array(D, float32)
    T = q_TD.shape[0]
    t = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    delta, lse = float32(0.0), float32(0.0)
    if t < T:
        lse = lse_T[t]
        for d in range(D):
            q[d], do[d], acc[d] = q_TD[t, d], do_TD[t, d], float32(0.0)
            delta += do[d] * o_TD[t, d]
    for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
        cuda.syncthreads()
        load_tile(k, k_TD, first)
        load_tile(v, v_TD, first)
        cuda.syncthreads()
        for j in range(TILE):
            if first + j <= t and t < T:
                s, dp = float32(0.0), float32(0.0)
                for d in range(D):
                    s += q[d] * k[j, d]
                    dp += do[d] * v[j, d]
                ds = math.exp(scale * s - lse) * (dp - delta)
                for d in range(D):
                    acc[d] += ds * k[j, d]
    if t < T:
        for d in range(D):
            dq_TD[t, d] = scale * acc[d]


flash_dq_kernel = lesson.yours(flash_dq_kernel, flash_dq_kernel_solution)


# %% [markdown]
# dk and dv are sums over *queries*: each key needs all queries that see it. If the dq kernel also
# computed dk, all 32 threads of every block would add to the same elements with atomics, in an
# arbitrary order, and the gradient would differ from run to run ([lesson 3](03_reductions.ipynb)).
# So xtrain has a second kernel whose blocks own *keys* and loop over the queries. It computes the
# scores a second time. The directional derivative of [lesson 5](05_backward.ipynb) checks all three
# gradients together:

# %%
wide = [one_head(x) for x in (q_TD, k_TD, v_TD)]
dq, dk, dv = flash_attention.flash_attention_bwd_ref(one_head(do_TD), *wide, o_ref, lse_ref, scale)
dq_here = lesson.empty(here[0], (T, D))
do_here = lesson.array(do_TD)
lesson.launch(
    flash_dq_kernel, -(-T // TILE), TILE, dq_here, do_here, *here, o_here, lse_here, scale
)
print(
    "dq agrees with the reference to 1e-5:",
    np.allclose(lesson.host(dq_here), dq[0, :, 0], atol=1e-5),
)
step = [random.standard_normal(x.shape) for x in wide]
h = 1e-5


def loss(moved):
    return float((flash_attention.flash_attention_ref(*moved, scale)[0] * one_head(do_TD)).sum())


ahead, behind = ([x + sign * h * e for x, e in zip(wide, step)] for sign in (1, -1))
numeric = (loss(ahead) - loss(behind)) / (2 * h)
analytic = float(sum((g * e).sum() for g, e in zip((dq, dk, dv), step)))
print(f"change of the loss along a random direction: {numeric:.5f}")
print(f"predicted by the gradients:                  {analytic:.5f}")

# %% [markdown]
# ## Measure
#
# The saving is in the T x T arrays. Here is attention as three kernels that pass the scores to each
# other through memory:


# %%
@cuda.jit
def scores_kernel(s_TT, q_TD, k_TD, scale):
    """Grid (ceil(T / 32), T), block 32: one score per thread."""
    t, n = cuda.blockIdx.y, cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if n < s_TT.shape[1]:
        acc = float32(0.0)
        for d in range(D):
            acc += q_TD[t, d] * k_TD[n, d]
        s_TT[t, n] = acc * scale if n <= t else float32(-math.inf)


@cuda.jit
def softmax_kernel(s_TT):
    """Grid T, block 32: one row per warp, in place."""
    t, lane = cuda.blockIdx.x, cuda.threadIdx.x
    top, total = LOWEST, float32(0.0)
    for n in range(lane, s_TT.shape[1], 32):
        s = s_TT[t, n]
        top = s if s > top else top
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(0xFFFFFFFF, top, step)
        top = other if other > top else top
    for n in range(lane, s_TT.shape[1], 32):
        total += math.exp(s_TT[t, n] - top)
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
    for n in range(lane, s_TT.shape[1], 32):
        s_TT[t, n] = math.exp(s_TT[t, n] - top) / total


@cuda.jit
def weigh_kernel(o_TD, p_TT, v_TD):
    """Grid T, block D: one element of o per thread."""
    t, d = cuda.blockIdx.x, cuda.threadIdx.x
    acc = float32(0.0)
    for n in range(t + 1):
        acc += p_TT[t, n] * v_TD[n, d]
    o_TD[t, d] = acc


# %% [markdown]
# The trace counts the bytes that each version moves, for 64 tokens and one head. (The kernels
# without tiles also read k and v again for every query; a good matrix product would not. So compare
# only the bytes of scores.)

# %%
n = 64
sims = [simulator.sim(x[:n]) for x in (q_TD, k_TD, v_TD)]
o_sim, lse_sim = simulator.sim(np.zeros((n, D), np.float32)), simulator.sim(np.zeros(n, np.float32))
s_sim = simulator.sim(np.zeros((n, n), np.float32))
with lesson.tracing() as three:
    simulator.run(scores_kernel, (n // 32, n), 32, s_sim, sims[0], sims[1], scale)
    simulator.run(softmax_kernel, n, 32, s_sim)
    simulator.run(weigh_kernel, n, D, o_sim, s_sim, sims[2])
by_three = np.array(o_sim)
flash = lesson.traced(flash_kernel, n // TILE, TILE, o_sim, lse_sim, *sims, scale)
print("same output:", np.allclose(by_three, o_sim, atol=1e-5))
scores_moved = sum(three.traffic(name).moved for name in ("s_TT", "p_TT"))
k_and_v = sum(flash.traffic(name).moved for name in ("k_TD", "v_TD"))
print(f"three kernels: {scores_moved:7,} bytes of scores and weights moved")
print(f"flash:         {0:7,} bytes of scores and weights, {k_and_v:,} bytes of k and v")

# %% [markdown]
# The first tile of queries, step by step, with few tokens and narrow heads. Each thread owns a query;
# a tile of keys and values comes into shared memory, a barrier, and every thread reads all of it:

# %%
few = [simulator.sim(x[:TILE]) for x in (q_TD, k_TD, v_TD)]
lesson.stepped(flash_kernel, 1, TILE, o_sim[:TILE], lse_sim[:TILE], *few, scale)

# %% [markdown]
# The scores grow with T squared; what flash attention stores (o and lse) grows with T. For 16 heads
# of width 128 in bf16, with scores in bf16 and lse in float32:

# %%
lengths = [2**i for i in range(10, 17)]
scores_gb = [16 * t * t * 2 / 1e9 for t in lengths]
kept_gb = [16 * t * (128 * 2 + 4) / 1e9 for t in lengths]
print(f"T = {lengths[-1]:,}: scores {scores_gb[-1]:.1f} GB, o and lse {kept_gb[-1]:.2f} GB")
lesson.figures.curves(
    lengths,
    {"scores, T x T": scores_gb, "o and lse": kept_gb},
    "tokens T",
    "GB",
    "one layer, 16 heads of 128",
)

# %% [markdown]
# Next, the time. The table has two records for 1024 tokens from the same machine. One is the
# *softmax alone*, on scores in memory, by an efficient kernel that keeps each row in registers. The
# other is a complete FlashAttention forward, including both matrix products. The softmax is in
# float32, the attention in bf16 with float32 sums, so the number of bytes alone explains a factor
# of two:

# %%
softmax = lesson.record("bench_kernels/softmax_fwd/fp32")
whole = lesson.record("bench_attention/named fwd/B=16 H=12 G=12 T=1024 D=64/bf16")
lesson.table(
    [
        "bench_kernels/softmax_fwd/fp32",
        "bench_attention/named fwd/B=16 H=12 G=12 T=1024 D=64/bf16",
    ],
    {"ms": "ms"},
)
print(f"softmax alone {1e3 * softmax['ms'] / 48:.2f} us per head")
print(f"all of FlashAttention {1e3 * whole['ms'] / (16 * 12):.2f} us per head")

# %% [markdown]
# On a GPU, the next cell compares your kernel with the library's (float32, without tensor cores) on
# one head of many tokens.

# %%
long = 8192 if lesson.on_gpu() else 64
big = [lesson.array(random.standard_normal((long, D)).astype(np.float32)) for _ in range(3)]
o_big, lse_big = lesson.empty(big[0], (long, D)), lesson.empty(big[0], long)
in_heads = [x.reshape(1, long, 1, D) for x in big]
times = lesson.measure(
    {
        "yours": lambda: lesson.launch(
            flash_kernel, -(-long // TILE), TILE, o_big, lse_big, *big, scale
        ),
        "the library's, float32": lambda: flash_attention.flash_attention_fwd(*in_heads, scale),
    },
    flops=2 * long * long * D,
)

# %% [markdown]
# ## One improvement: skip the future
#
# A kernel that loops over *all* tiles and relies on the mask is also correct. How much does
# skipping save? Count the tiles:


# %%
def visited(tiles):
    return tiles * (tiles + 1) // 2, tiles * tiles


print("tokens   tiles visited   of   share")
for tokens in (64, 256, 1024, 4096):
    some, every = visited(-(-tokens // TILE))
    print(f"{tokens:6}   {some:13,}   {every:6,}   {some / every:.1%}")
counted = flash.traffic("k_TD").moved // (TILE * D * 4)
print(f"and in the trace of your kernel, 64 tokens: {counted} tiles of k were read")

# %% [markdown]
# **The improvement of this lesson and its reason:** the mask saves half of the work only if masked
# tiles are skipped entirely. That saves half of the loads, the exps and the multiplications. The
# smaller the tiles, the closer the saving is to one half, but the fewer times each loaded key is
# used. Skipping makes the blocks unequal, which creates a new problem: the last block works
# longest. The library starts long blocks first where that pays; `make_grid` in its source says
# when.
#
# ## The library's kernel
#
# The online softmax in the library's softmax kernel, one score at a time:

# %%
from xtrain.kernels import softmax as softmax_kernels
from xtrain.kernels.attention import flash_attention_fp32

lesson.source(softmax_kernels.online_softmax)

# %% [markdown]
# The float32 FlashAttention processes one tile at a time. 16 lanes share a row, so they find the
# maximum with warp shuffles, in `row_max`; for each of its R rows, a lane holds C scores and W
# columns of acc:

# %%
lesson.source(flash_attention_fp32.make_add_scores)

# %%
lesson.source(flash_attention_fp32.make_fwd_kernel)

# %% [markdown]
# `past` is for serving, where the keys of earlier tokens are already in the cache ([lesson
# 18](18_kv_cache.ipynb)), and `g` is the key head, which several query heads may share. The bf16
# kernels do the same on tensor cores, the subject of [lesson 14](14_tensor_cores.ipynb). Measured
# forward and backward, compared with PyTorch, in TFLOP/s
# ([lesson 4](04_matmul.ipynb)):

# %%
by_length = [
    "bench_attention/named fwd+bwd/B=32 H=12 G=12 T=256 D=32/bf16",
    "bench_attention/named fwd+bwd/B=16 H=12 G=12 T=1024 D=64/bf16",
    "bench_attention/named fwd+bwd/B=4 H=16 G=16 T=4096 D=128/bf16",
    "bench_attention/sweep fwd+bwd/B=1 H=16 G=16 T=65536 D=128/bf16",
]
lesson.table(
    by_length,
    {
        "T": lambda r: r["shape"].split("T=")[1].split()[0],
        "xtrain, TFLOP/s": lambda r: r.get("mma_sync_value", r["value"]),
        "PyTorch, flash": "peer_value",
        "PyTorch, cuDNN": "cudnn_value",
    },
)

# %% [markdown]
# The xtrain column shows the kernels of lesson 14, which run on every GPU since the A100. From 1024
# tokens on, cuDNN, NVIDIA's own library, is faster, because it uses instructions that exist only on
# Hopper. [Lesson 23](23_hopper.ipynb) covers those, and xtrain's kernels that use them. At 65,536
# tokens, PyTorch's own flash kernels are about as fast as these.
#
# ## What did not help
#
# *Two passes.* Rescaling acc can be avoided: loop over all tiles once for the maximum and the sum,
# and a second time for the output. This is also correct. Its cost, by the trace:


# %%
@cuda.jit
def two_pass_kernel(o_TD, q_TD, k_TD, v_TD, scale):
    k, v = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    acc = cuda.local.array(D, float32)
    t = cuda.blockIdx.x * TILE + cuda.threadIdx.x  # T a multiple of TILE
    top, total = LOWEST, float32(0.0)
    for d in range(D):
        acc[d] = float32(0.0)
    for sweep in range(2):
        for first in range(0, cuda.blockIdx.x * TILE + TILE, TILE):
            cuda.syncthreads()
            load_tile(k, k_TD, first)
            if sweep == 1:
                load_tile(v, v_TD, first)
            cuda.syncthreads()
            for j in range(TILE):
                if first + j <= t:
                    s = float32(0.0)
                    for d in range(D):
                        s += q_TD[t, d] * k[j, d]
                    s *= scale
                    if sweep == 0:
                        new = s if s > top else top
                        total = total * math.exp(top - new) + math.exp(s - new)
                        top = new
                    else:
                        for d in range(D):
                            acc[d] += math.exp(s - top) / total * v[j, d]
    for d in range(D):
        o_TD[t, d] = acc[d]


two = lesson.traced(two_pass_kernel, n // TILE, TILE, o_sim, *sims, scale)
print("same output:", np.allclose(by_three, o_sim, atol=1e-5))
for name, trace, products in (("one pass", flash, 2), ("two passes", two, 3)):
    print(f"{name:10} k {trace.traffic('k_TD').moved:6,} bytes, {products} products per tile")
print(f"two passes save {D} multiplications per row and tile (rescaling once per tile),")
print(f"compared with the {2 * TILE * D:,} of the two products")

# %% [markdown]
# *Atomics for dq in the dk, dv kernel.* They would reduce the seven products per tile to five (S and dP are computed in
# both kernels), 29 % less arithmetic, but give different bits in every run. xtrain accepts the extra cost. A block that
# holds all keys of a head (up to 256 keys of width 16 or 32) can sum dq in a fixed order without atomics: its warps
# store their ds in shared memory, and dq is one more product. Such a kernel has 300 lines, and makes a training step of
# dim384 0.3 to 0.8 % faster and one of dim768 1.4 to 1.9 % (an H100, three runs each): with a causal mask, few queries
# see the late keys, and the warps that own those keys wait for the others. That is too little for the library.
#
# ## More exercises
#
# 1. Write the dk, dv kernel: a thread owns a *key* n, and the block loops over tiles of queries,
#    from its own tile to the last. Which arrays go through shared memory? Compare with
#    `flash_attention_bwd_ref`.
# 2. Merge two results: one kernel computed attention over keys 0 to 99, another over keys 100 to
#    199, and each returned o and lse. Compute the o of all 200 keys from these four arrays.
# 3. How many bytes per head must the forward save for the backward, in addition to q, k and v, with
#    D = 64 and T = 4096 in bf16? And if it stored p?
#
# <details><summary>Solutions</summary>
#
# 1: q, do, and per query lse and delta. Loop with
# `for first in range(cuda.blockIdx.x * TILE, T, TILE)`; query t sees key n if n <= t; `dv += p do`,
# `dk += scale ds q`. The next cell is one solution. 2: Let lse = log(exp(lse1) + exp(lse2)),
# computed with the larger of the two subtracted first; then o = o1 exp(lse1 - lse) + o2 exp(lse2 -
# lse). [Lesson 19](19_decode_attention.ipynb) splits keys among blocks in this way. 3: o, 4096 · 64
# · 2 bytes, and lse, 4096 · 4 bytes: 540,672 bytes. p would be 4096 · 4096 · 2 = 33,554,432.
#
# </details>


# %% tags=["solution"]
# Solution of 1
@cuda.jit
def flash_dkdv_kernel(dk_TD, dv_TD, do_TD, q_TD, k_TD, v_TD, lse_T, delta_T, scale):
    """Grid ceil(T / TILE), block TILE: thread x of block i owns key n = TILE i + x."""
    q, do = cuda.shared.array((TILE, D), float32), cuda.shared.array((TILE, D), float32)
    k, v = cuda.local.array(D, float32), cuda.local.array(D, float32)
    dk, dv = cuda.local.array(D, float32), cuda.local.array(D, float32)
    T = q_TD.shape[0]
    n = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    for d in range(D):
        k[d] = k_TD[n, d] if n < T else float32(0.0)
        v[d] = v_TD[n, d] if n < T else float32(0.0)
        dk[d], dv[d] = float32(0.0), float32(0.0)
    for first in range(cuda.blockIdx.x * TILE, T, TILE):
        cuda.syncthreads()
        load_tile(q, q_TD, first)
        load_tile(do, do_TD, first)
        cuda.syncthreads()
        for j in range(TILE):
            t = first + j
            if n <= t and t < T:
                s, dp = float32(0.0), float32(0.0)
                for d in range(D):
                    s += q[j, d] * k[d]
                    dp += do[j, d] * v[d]
                p = math.exp(scale * s - lse_T[t])
                ds = p * (dp - delta_T[t])
                for d in range(D):
                    dv[d] += p * do[j, d]
                    dk[d] += scale * ds * q[j, d]
    if n < T:
        for d in range(D):
            dk_TD[n, d], dv_TD[n, d] = dk[d], dv[d]


# %%
delta_here = lesson.array((do_TD * o_TD).sum(1))
dk_here, dv_here = lesson.empty(here[0], (T, D)), lesson.empty(here[0], (T, D))
lesson.launch(
    flash_dkdv_kernel, -(-T // TILE), TILE,
    dk_here, dv_here, do_here, *here, lse_here, delta_here, scale,
)  # fmt: skip
print(
    "dk agrees with the reference to 1e-5:",
    np.allclose(lesson.host(dk_here), dk[0, :, 0], atol=1e-5),
)
print(
    "dv agrees with the reference to 1e-5:",
    np.allclose(lesson.host(dv_here), dv[0, :, 0], atol=1e-5),
)

# %% [markdown]
# ## Sources
#
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018: the running
#   maximum and sum.
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention: Fast and Memory-Efficient Exact
#   Attention with IO-Awareness*, 2022: tiles, recomputation.
# - T. Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*,
#   2023: the loop order used here, lse and delta.
# - M. Rabe, C. Staats, *Self-attention Does Not Need O(n²) Memory*, 2021.
