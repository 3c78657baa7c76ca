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
# # 19 Decode attention, with split keys
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/19_decode_attention.ipynb)
#
# *About 60 minutes. You need [lesson 18](18_kv_cache.ipynb) and lesson 13.*
#
# **The question.** One person talks to a model of 8 key heads, and the conversation is 30 000
# tokens long. Attention for the next token is 8 sums over 30 000 keys. A block per head makes 8
# blocks, on a card with 132 multiprocessors. Where do the other 124 get work from?
#
# From dividing the *keys*. You will write the kernel that does a part of the keys, and the sum that
# makes one softmax out of many parts.

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
from xtrain.kernels.primitives.reduce import warp_sum

# %% [markdown]
# ## A softmax in parts, by hand
#
# Six keys with the scores 1, 2, 0, 3, 1, 2 and one value each. All at once, and in two parts of
# three, each with its own largest score m, its own sum l of exponentials, and its own weighted sum
# acc:

# %%
s, v = np.array([1.0, 2, 0, 3, 1, 2]), np.array([10.0, 20, 30, 40, 50, 60])
p = np.exp(s - s.max())
print(f"at once: {p @ v / p.sum():.4f}")
parts = []
for a in (0, 3):
    m = s[a : a + 3].max()
    e = np.exp(s[a : a + 3] - m)
    parts.append((m, e.sum(), e @ v[a : a + 3]))
    print(f"part {a // 3}: m {m:g}, l {e.sum():.4f}, acc {e @ v[a : a + 3]:.4f}")
M = max(m for m, _, _ in parts)
top, below = (sum(math.exp(part[0] - M) * part[i] for part in parts) for i in (2, 1))
print(f"merged:  {top:.4f} / {below:.4f} = {top / below:.4f}")

# %% [markdown]
# Each part measured its exponentials from its own m. To bring them to a common M, both of its sums
# are multiplied by $e^{m_i - M}$:
#
# $$o = \frac{\sum_i e^{m_i - M} \, acc_i}{\sum_i e^{m_i - M} \, l_i}$$
#
# This is the same step by which FlashAttention goes from tile to tile (lesson 13), only that here
# the parts are computed *at the same time*, by different blocks.
#
# ## Exercise 19.1: one part
#
# One head of width 32, one warp per part: lane d holds channel d. Block s owns `chunk` keys,
# beginning with key s · chunk, as far as there are. Walk through them with a running m, l and acc:
# when a larger score comes, what has been added so far shrinks by exp(old m - new m).


# %% tags=["exercise"]
@cuda.jit
def partial_kernel(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    """m, l, acc of keys s chunk .. s chunk + chunk - 1.

    m, l: (S), acc: (S, 32), q: (32), k and v: (N, 32), all float32.
    Grid S = ceil(N / chunk), block 32 = D.
    """
    s, d = cuda.blockIdx.x, cuda.threadIdx.x
    n = k_ND.shape[0]
    # YOUR CODE


# %%
lesson.check("19.1", partial_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The score of key i, in every lane: `x = warp_sum(q_D[d] * k_ND[i, d]) * scale`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `new = x if x > m else m`, `keep = math.exp(m - new)`, `p = math.exp(x - new)`; then l and acc
# become `... * keep + p ...`, and m becomes new. Begin with m = minus infinity: exp(-inf) is 0.
#
# </details>


# %% tags=["solution"]
# Solution 19.1
@cuda.jit
def partial_kernel(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    """m, l, acc of keys s chunk .. s chunk + chunk - 1.

    m, l: (S), acc: (S, 32), q: (32), k and v: (N, 32), all float32.
    Grid S = ceil(N / chunk), block 32 = D.
    """
    s, d = cuda.blockIdx.x, cuda.threadIdx.x
    n = k_ND.shape[0]
    first = s * chunk
    last = first + chunk if first + chunk < n else n
    q = q_D[d]
    m, total, acc = float32(-math.inf), float32(0.0), float32(0.0)
    for i in range(first, last):
        x = warp_sum(q * k_ND[i, d]) * scale
        new = x if x > m else m
        keep, p = math.exp(m - new), math.exp(x - new)
        total = total * keep + p
        acc = acc * keep + p * v_ND[i, d]
        m = new
    acc_SD[s, d] = acc
    if d == 0:
        m_S[s] = m
        l_S[s] = total


# %% [markdown]
# ## Exercise 19.2: the merge


# %% tags=["exercise"]
def merge(m_S, l_S, acc_SD):
    """-> o (D,) of all parts together, from m, l (S,) and acc (S, D).

    An empty part has m = -inf, l = 0 and acc = 0.
    """
    # YOUR CODE


# %%
lesson.check("19.2", merge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `share_S = np.exp(m_S - m_S.max())`, and then the formula above.
#
# </details>


# %% tags=["solution"]
# Solution 19.2
def merge(m_S, l_S, acc_SD):
    """-> o (D,) of all parts together, from m, l (S,) and acc (S, D).

    An empty part has m = -inf, l = 0 and acc = 0.
    """
    share_S = np.exp(m_S - m_S.max())
    return (share_S[:, None] * acc_SD).sum(0) / (share_S * l_S).sum()


# %%
rng = np.random.default_rng(0)
n = 50
q, k, v = (simulator.sim(rng.standard_normal(s).astype(np.float32)) for s in (32, (n, 32), (n, 32)))
exact = np.exp((k @ q) / np.sqrt(32)) @ v / np.exp((k @ q) / np.sqrt(32)).sum()
for chunk in (50, 16, 7):
    S = -(-n // chunk)
    m, l, acc = (simulator.sim(np.zeros(s, np.float32)) for s in (S, S, (S, 32)))
    simulator.run(partial_kernel, S, 32, m, l, acc, q, k, v, np.float32(32**-0.5), np.int64(chunk))
    o = merge(np.asarray(m), np.asarray(l), np.asarray(acc))
    print(f"{S} parts: like all at once: {np.allclose(o, exact, atol=1e-5)}")

# %% [markdown]
# ## Exercise 19.3: how many parts?
#
# Too few parts, and multiprocessors idle. Too many, and each has hardly a key, while the merge
# grows. xtrain makes one part for every 256 keys begun, at most 32. Note what the answer depends
# on: **the length of the row, and nothing else**. If it depended on how many other sequences are in
# the batch, a sequence's last bits would depend on its company. (xtrain makes one exception, for
# speed: in a batch of few sequences parts have 192 keys. `Engine(batch_invariant=True)` does
# without it.)


# %% tags=["exercise"]
def splits(n, chunk, most):
    """-> [(begin, end), ...]: equal parts of n keys, end not included; the last may be
    shorter.

    At most `most` parts, and no more than ceil(n / chunk).
    """
    # YOUR CODE


# %%
lesson.check("19.3", splits)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `used = min(most, ceil(n / chunk))`, `size = ceil(n / used)`, and then the beginnings are
# `range(0, n, size)`.
#
# </details>


# %% tags=["solution"]
# Solution 19.3
def splits(n, chunk, most):
    """-> [(begin, end), ...]: equal parts of n keys, end not included; the last may be
    shorter.

    At most `most` parts, and no more than ceil(n / chunk).
    """
    used = min(most, -(-n // chunk))
    size = -(-n // used)
    return [(begin, min(begin + size, n)) for begin in range(0, n, size)]


# %% [markdown]
# ## Who merges?
#
# A second kernel could; it would be started for every layer and every token, and lesson 10 has told
# what a launch costs. So the **last block that finishes** does it. Which one that is nobody knows
# in advance, so they count: each block writes its part, makes sure that everybody can see it
# (`threadfence`), and adds 1 to a counter, atomically. Whoever gets the last number knows that all
# parts are there.


# %%
@cuda.jit
def last_one_kernel(total_1, parts_S, counter_1, x_n):
    """Block s adds up its own 32 numbers; the last to finish adds up the parts, in their
    order.
    """
    s = cuda.blockIdx.x
    v = warp_sum(x_n[32 * s + cuda.threadIdx.x])
    if cuda.threadIdx.x == 0:
        parts_S[s] = v
        cuda.threadfence()
        if cuda.atomic.add(counter_1, 0, 1) == cuda.gridDim.x - 1:
            acc = float32(0.0)
            for i in range(cuda.gridDim.x):
                acc += parts_S[i]
            total_1[0] = acc


x = simulator.sim(np.arange(128, dtype=np.float32))
total, parts = simulator.sim(np.zeros(1, np.float32)), simulator.sim(np.zeros(4, np.float32))
simulator.run(last_one_kernel, 4, 32, total, parts, simulator.sim(np.zeros(1, np.int32)), x)
print("sum:", float(total[0]), "expected", x.sum())

# %% [markdown]
# Two things are worth a second look. The counter is an *integer*: in which order blocks arrive does
# not change it. And the last block adds the parts **in the order of the keys**, whoever it is: so
# the bits do not depend on the order of arrival, although the work is divided by chance. Forget the
# fence, and:


# %%
@cuda.jit
def hasty_kernel(total_1, parts_S, counter_1, x_n):
    s = cuda.blockIdx.x
    v = warp_sum(x_n[32 * s + cuda.threadIdx.x])
    if cuda.threadIdx.x == 0:
        parts_S[s] = v
        if cuda.atomic.add(counter_1, 0, 1) == cuda.gridDim.x - 1:
            acc = float32(0.0)
            for i in range(cuda.gridDim.x):
                acc += parts_S[i]
            total_1[0] = acc


lesson.report(
    simulator.run, hasty_kernel, 4, 32, total, parts, simulator.sim(np.zeros(1, np.int32)), x
)

# %% [markdown]
# ## Measure, and one improvement
#
# How many blocks have work, for a model of 8 key heads?

# %%
print("tokens   sequences   blocks without splitting   with")
for length, B in ((200, 1), (2000, 1), (30_000, 1), (30_000, 8), (2000, 64)):
    print(f"{length:6}   {B:9}   {8 * B:24}   {8 * B * len(splits(length, 256, 32)):4}")

# %% [markdown]
# **The improvement is parallelism where there was none.** For a single long conversation 256 blocks
# instead of 8; the cost is one (m, l, acc) per part and head, a few hundred bytes beside the
# hundreds of kilobytes of keys and values that the part has read. With many sequences there is
# enough work anyway, and it hardly matters.
#
# What a whole decoding step takes with few keys and with many, for a model of 1.1 billion
# parameters, and the least that reading those keys and values would take:

# %%
lesson.table(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=1 context=4096/bf16",
    ],
    {
        "context": lambda r: r["shape"].split("=")[-1],
        "ms a step": "ms",
        "GB of keys and values": "kv_gb",
    },
)
few = lesson.record("bench_decode/llama 1.1B/B=1 context=128/bf16")
many = lesson.record("bench_decode/llama 1.1B/B=1 context=4096/bf16")
least = (many["kv_gb"] - few["kv_gb"]) / many["copy_gb_s"] * 1e3
print(f"{many['ms'] - few['ms']:.3f} ms more, of which {least:.3f} at the speed of a copy")

# %% [markdown]
# On a GPU: one head of width 32 over half a million keys, with one part and with many:

# %%
n = 1 << 19 if lesson.on_gpu() else 64
q_b, k_b, v_b = (
    lesson.array(rng.standard_normal(s).astype(np.float32)) for s in (32, (n, 32), (n, 32))
)


def with_parts(count):
    chunk = -(-n // count)
    m, l, acc = (lesson.empty(q_b, s) for s in (count, count, (count, 32)))
    return lambda: lesson.launch(
        partial_kernel, count, 32, m, l, acc, q_b, k_b, v_b, np.float32(32**-0.5), np.int64(chunk)
    )


times = lesson.measure(
    {f"{c} parts": with_parts(c) for c in (1, 8, 64, 512, 4096)}, nbytes=2 * 4 * 32 * n, runs=3
)

# %% [markdown]
# ## The library's kernel
#
# It does more than attention, in the same launch: QK-norm, RoPE and the append to the cache (lesson
# 18), since each of these alone would cost a launch per layer and token for a few kilobytes of
# work. Its text, and how it divides the keys:

# %%
from xtrain.kernels.attention import decode_attention_parts as library_parts
from xtrain.kernels.attention import decode_attention as library

print(library.__doc__)

# %%
lesson.source(library_parts.make_split_keys)

# %% [markdown]
# `split_keys` is your 19.3, with parts rounded up to 16 keys for the tensor cores. The block that
# merges is found by

# %%
lesson.source(library_parts.arrive_last)

# %% [markdown]
# Where is the fence? Above, a `threadfence` stands before the atomic. This library had a second one
# after it, for the block that comes last to read what is there now. The machine code of each was
# `MEMBAR.SC`: the strongest fence there is, which puts all such fences of the whole GPU into one
# order. Nobody here asks for that. `atomic_add_in_order` is a single instruction of PTX,
# `atom.acq_rel`: *release*, what was written before is there for whoever sees the new count, and
# *acquire*, whoever sees it reads what is there now. One `MEMBAR.ALL` is left, which waits for the
# block's own writes. Together with the warps' sums, which are merged in registers since then, it
# made attention over 4096 keys 1.5 microseconds shorter (of 10.2, watched by CUPTI) in each of 22
# layers; over 128 keys, where nobody counts, 0.4.
#
# ## What did not help
#
# *Choosing the number of parts by the batch*, so that there are always about as many blocks as
# multiprocessors: a little faster for some batches, and a sequence's tokens then depend on who else
# is being served. Of that only the two sizes of above are left. The bits change with the parts:

# %%
k64, v64 = (simulator.sim(rng.standard_normal((64, 32)).astype(np.float32)) for _ in range(2))
chunks = (64, 17, 5)
outs = []
for chunk in chunks:
    S = -(-64 // chunk)
    m, l, acc = (simulator.sim(np.zeros(s, np.float32)) for s in (S, S, (S, 32)))
    simulator.run(
        partial_kernel, S, 32, m, l, acc, q, k64, v64, np.float32(32**-0.5), np.int64(chunk)
    )
    outs.append(merge(np.asarray(m), np.asarray(l), np.asarray(acc)))
print(
    "the same to rounding:",
    all(np.allclose(o, outs[0], atol=1e-6) for o in outs),
    "  the same bits:",
    all(np.array_equal(o, outs[0]) for o in outs),
)

# %% [markdown]
# *Very small parts.* Each block loads the query and prepares it; with 16 keys for a block that is
# as much work as the keys themselves.
#
# ## More exercises
#
# 1. Write `merge` as a kernel: one warp, lane d for channel d.
# 2. In 19.1 one warp deals with one key at a time. How could 4 warps of a block share a part, and
#    what is merged then?
# 3. How many bytes are written for m, l and acc per token, for 32 query heads of 128 and 32 parts?
#    Compare with the keys of 30 000 tokens.
#
# <details><summary>Solutions</summary>
#
# 1: loop over s for the largest m, loop again for both sums; every lane has the same m and l. 2:
# each warp takes every fourth key with its own m, l, acc; at the end they are merged through shared
# memory by the same formula. 3: 32 · 32 · 130 · 4 bytes = 0.5 MB; keys and values of one layer in
# bf16 with 8 key heads: 2 · 8 · 30 000 · 128 · 2 = 123 MB.
#
# </details>
#
# ## Sources
#
# - T. Dao, D. Haziza, F. Massa, G. Sizov, *Flash-Decoding for long-context inference*, 2023.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018.
# - NVIDIA, CUDA samples, `threadFenceReduction`: the last block.
