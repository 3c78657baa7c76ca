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
# # 19 Decode attention with split keys
#
# *About 60 minutes. You need [lesson 18](18_kv_cache.ipynb) and lesson 13.*
#
# **The question.** One user talks to a model with 8 key/value heads, and the conversation is 30 000
# tokens long. Attention for the next token is 8 weighted sums over 30 000 keys. One block per
# key/value head makes 8 blocks, on a GPU with 132 multiprocessors. How do the other 124 get work?
#
# By splitting the *keys*. You will write the kernel that processes one part of the keys, and the
# merge that turns many partial softmaxes into one.

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
# Take six keys with the scores 1, 2, 0, 3, 1, 2, and one value each. Compute the result once in one
# pass and once in two parts of three keys. Each part has its own largest score m, its own sum l of
# exponentials, and its own weighted sum acc of the values:

# %%
s, v = np.array([1.0, 2, 0, 3, 1, 2]), np.array([10.0, 20, 30, 40, 50, 60])
p = np.exp(s - s.max())
print(f"one pass: {p @ v / p.sum():.4f}")
parts = []
for a in (0, 3):
    m = s[a : a + 3].max()
    e = np.exp(s[a : a + 3] - m)
    parts.append((m, e.sum(), e @ v[a : a + 3]))
    print(f"part {a // 3}: m {m:g}, l {e.sum():.4f}, acc {e @ v[a : a + 3]:.4f}")
M = max(m for m, _, _ in parts)
numerator, denominator = (sum(math.exp(part[0] - M) * part[i] for part in parts) for i in (2, 1))
print(f"merged:   {numerator:.4f} / {denominator:.4f} = {numerator / denominator:.4f}")

# %% [markdown]
# The same as a picture. The two boxes in the middle are all that the blocks pass on: three numbers
# each here, D + 2 numbers for values of D numbers.

# %%
keys = ["keys 0, 1, 2\nscores 1, 2, 0", "keys 3, 4, 5\nscores 3, 1, 2"]
sums = [f"m {m:g}\nl {l:.2f}\nacc {acc:.1f}" for m, l, acc in parts]
factors = [math.exp(m - M) for m, _, _ in parts]
scaled = [" + ".join(f"{f:.2f} {x}" for f in factors) for x in ("acc", "l")]
merged = f"M {M:g}\no = ({scaled[0]}) / ({scaled[1]})"
lesson.figures.graph(
    {keys[0]: (0, 0), keys[1]: (1, 0), sums[0]: (0, 1.3), sums[1]: (1, 1.3), merged: (0.5, 2.6)},
    [(keys[0], sums[0]), (keys[1], sums[1]), (sums[0], merged), (sums[1], merged)],
    "two blocks, one part of the keys each; then the merge",
    width=lesson.figures.NARROW,
)

# %% [markdown]
# Each part computed its exponentials relative to its own m. To rescale them to a common M, multiply
# both sums of part i by $e^{m_i - M}$:
#
# $$o = \frac{\sum_i e^{m_i - M} \, acc_i}{\sum_i e^{m_i - M} \, l_i}$$
#
# FlashAttention uses the same formula to continue from one tile to the next (lesson 13). The
# difference is that here the parts are computed *at the same time*, by different blocks.
#
# ## Exercise 19.1: one part
#
# There is one head of width 32 and one warp per part; lane d holds channel d. Block s owns `chunk`
# keys, starting at key s · chunk (fewer in the last block). Loop over them with a running m, l and
# acc: when a larger score appears, multiply l and acc by exp(old m - new m).


# %% tags=["exercise"]
@cuda.jit
def partial_kernel(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    """m, l, acc of keys s * chunk .. s * chunk + chunk - 1.

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
# Set `new = x if x > m else m`, `keep = math.exp(m - new)` and `p = math.exp(x - new)`; then l and
# acc become `... * keep + p ...`, and m becomes new. Start with m = minus infinity: exp(-inf) is 0.
#
# </details>


# %% tags=["solution"]
# Solution 19.1
@cuda.jit
def partial_kernel_solution(m_S, l_S, acc_SD, q_D, k_ND, v_ND, scale, chunk):
    """m, l, acc of keys s * chunk .. s * chunk + chunk - 1.

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


partial_kernel = lesson.yours(partial_kernel, partial_kernel_solution)


# %% [markdown]
# ## Exercise 19.2: the merge


# %% tags=["exercise"]
def merge(m_S, l_S, acc_SD):
    """-> o (D,), the attention output over all parts, from m, l (S,) and acc (S, D).

    An empty part has m = -inf, l = 0 and acc = 0.
    """
    # YOUR CODE


# %%
lesson.check("19.2", merge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute `share_S = np.exp(m_S - m_S.max())`, then apply the formula above.
#
# </details>


# %% tags=["solution"]
# Solution 19.2
def merge_solution(m_S, l_S, acc_SD):
    """-> o (D,), the attention output over all parts, from m, l (S,) and acc (S, D).

    An empty part has m = -inf, l = 0 and acc = 0.
    """
    share_S = np.exp(m_S - m_S.max())
    return (share_S[:, None] * acc_SD).sum(0) / (share_S * l_S).sum()


merge = lesson.yours(merge, merge_solution)


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
    print(f"{S} parts: equal to one pass: {np.allclose(o, exact, atol=1e-5)}")

# %% [markdown]
# ## Exercise 19.3: how many parts?
#
# With too few parts, multiprocessors are idle. With too many, each part has only a few keys and the merge gets longer.
# xtrain uses one part per 256 keys, about, and at most 32. Note what the number of parts depends on: **the length of
# the row, and nothing else**. If it depended on the other sequences in the batch, the last bits of a sequence's result
# would depend on them too. (xtrain makes two exceptions, for speed: a part has about 192 keys in a batch of few
# sequences, and 1024 in one of many. `Engine(batch_invariant=True)` has no parts: it adds in the order of training,
# [lesson 35](35_one_order.ipynb).)


# %% tags=["exercise"]
def splits(n, chunk, most):
    """-> [(begin, end), ...]: n keys in equal parts, end exclusive; the last part may be
    shorter.

    No part is empty. At most `most` parts, no more than c = ceil(n / chunk), and at least half
    as many as both allow.
    """
    # YOUR CODE


# %%
lesson.check("19.3", splits)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute `used = min(most, ceil(n / chunk))` and `size = ceil(n / used)`. The parts then begin at
# `range(0, n, size)`.
#
# </details>


# %% tags=["solution"]
# Solution 19.3
def splits_solution(n, chunk, most):
    """-> [(begin, end), ...]: n keys in equal parts, end exclusive; the last part may be
    shorter.

    No part is empty. At most `most` parts, no more than c = ceil(n / chunk), and at least half
    as many as both allow.
    """
    used = min(most, -(-n // chunk))
    size = -(-n // used)
    return [(begin, min(begin + size, n)) for begin in range(0, n, size)]


splits = lesson.yours(splits, splits_solution)


# %% [markdown]
# ## Which block merges?
#
# A second kernel could merge the parts, but it would be launched for every layer and every token,
# and lesson 10 showed what a launch costs. Instead the **last block that finishes** merges them. It
# is not known in advance which block that is, so the blocks count: each block writes its part,
# makes the write visible to all other blocks (`threadfence`), and atomically adds 1 to a counter.
# The block that completes the count knows that all parts are written. It needs a fence, too: without
# one, its reads may be older than the count that it has seen.


# %%
@cuda.jit
def last_one_kernel(total_1, parts_S, counter_1, x_n):
    """Block s sums its own 32 numbers; the last block to finish sums the parts, in index
    order.
    """
    s = cuda.blockIdx.x
    v = warp_sum(x_n[32 * s + cuda.threadIdx.x])
    if cuda.threadIdx.x == 0:
        parts_S[s] = v
        cuda.threadfence()  # the part is written before the count
        if cuda.atomic.add(counter_1, 0, 1) == cuda.gridDim.x - 1:
            cuda.threadfence()  # the parts are read after the count
            acc = float32(0.0)
            for i in range(cuda.gridDim.x):
                acc += parts_S[i]
            total_1[0] = acc


x = simulator.sim(np.arange(128, dtype=np.float32))
total, parts = simulator.sim(np.zeros(1, np.float32)), simulator.sim(np.zeros(4, np.float32))
simulator.run(last_one_kernel, 4, 32, total, parts, simulator.sim(np.zeros(1, np.int32)), x)
print("sum:", float(total[0]), "expected", x.sum())

# %% [markdown]
# The block that arrives last, step by step (`of` names it): after the shuffles of the warp's sum one
# thread writes the part and adds to the counter. Only in this block it then reads all parts.

# %%
counter = simulator.sim(np.zeros(1, np.int32))
lesson.stepped(last_one_kernel, 4, 32, total, parts, counter, x, of=(3,))

# %% [markdown]
# Note two details. The counter is an *integer*, so its value does not depend on the order in which
# blocks arrive. And the block that arrives last adds the parts **in the order of the keys**,
# whichever block it is: the bits of the result do not depend on the order of arrival. Without the
# first fence, the simulator reports a race; without the second one, a `missing_acquire`:


# %%
@cuda.jit
def unfenced_kernel(total_1, parts_S, counter_1, x_n):
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
    simulator.run, unfenced_kernel, 4, 32, total, parts, simulator.sim(np.zeros(1, np.int32)), x
)

# %% [markdown]
# ## Measure, and one improvement
#
# How many blocks have work, for a model with 8 key/value heads?

# %%
print("tokens   sequences   blocks without splitting   with splitting")
for length, B in ((200, 1), (2000, 1), (30_000, 1), (30_000, 8), (2000, 64)):
    print(f"{length:6}   {B:9}   {8 * B:24}   {8 * B * len(splits(length, 256, 32)):4}")

# %% [markdown]
# **The improvement is more parallelism.** A single conversation of 30 000 tokens uses 256 blocks
# instead of 8. The cost is one (m, l, acc) per part and head: a few hundred bytes, compared with
# the hundreds of kilobytes of keys and values that the part has read. With many sequences there is
# enough work without splitting, and it makes little difference.
#
# The table shows how long a full decoding step takes with few keys and with many, for a model of
# 1.1 billion parameters. The line below it compares the difference with the time needed to read the
# additional keys and values:

# %%
lesson.table(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=1 context=4096/bf16",
    ],
    {
        "context": lambda r: r["shape"].split("=")[-1],
        "ms per step": "ms",
        "GB of keys and values": "kv_gb",
    },
)
few, many = lesson.records.together(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=1 context=4096/bf16",
    ]
)
least = (many["kv_gb"] - few["kv_gb"]) / many["copy_gb_s"] * 1e3
print(
    f"{many['ms'] - few['ms']:.3f} ms more; reading the keys and values at copy bandwidth takes "
    f"{least:.3f} ms"
)

# %% [markdown]
# On a GPU: one head of width 32 over half a million keys, in one part and in many:

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
# The same launch does more than attention: it also computes QK-norm and RoPE and appends to the
# cache (lesson 18), since each of these alone would cost one launch per layer and token for a few
# kilobytes of work. The docstring, and how the kernel divides the keys:

# %%
from xtrain.kernels.attention import decode_attention as library
from xtrain.kernels.attention import decode_attention_parts as library_parts

print(library.__doc__)

# %%
lesson.source(library_parts.make_split_keys)

# %% [markdown]
# `split_keys` is your 19.3, with two differences. Part sizes are multiples of 16 keys, for the tensor cores. And the
# last part takes the rest: 4097 keys are 16 parts, where rounding up would make a 17th part of one key, for which a
# block would have to prepare the query and write a result, and 17 parts per key head may be more blocks than the GPU runs
# at a time: then the last one begins when the others have ended.
#
# Each block asks for its next part until there are none left, because the host does not know the lengths: it would have
# to start a block for every part that a row may ever have, and most of them would find nothing to do. This function
# finds the block that merges:

# %%
from xtrain.kernels.primitives import last_block

lesson.source(last_block.arrive_last)

# %% [markdown]
# Where are the fences? In the example above, a `threadfence` precedes the atomic and another one follows it. Each
# compiles to `MEMBAR.SC`, the strongest fence: it puts all such fences of the whole GPU into a single order, which is
# not needed here. `atomic_add_acq_rel` is a single PTX instruction, `atom.acq_rel`: *release* means that everything
# written before it is visible to a block that sees the new count; *acquire* means that this block then reads current
# values. One `MEMBAR.ALL` remains, which waits for the block's own writes.
#
# ## What did not help
#
# *Choosing the number of parts from the batch size*, so that the number of blocks is always close to the number of
# multiprocessors: this is slightly faster for some batches, but a sequence's tokens then depend on which other
# sequences are being served. The library has only the three part sizes mentioned above. The bits of the result change
# with the parts:

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
    "equal up to rounding:",
    all(np.allclose(o, outs[0], atol=1e-6) for o in outs),
    "  bitwise equal:",
    all(np.array_equal(o, outs[0]) for o in outs),
)

# %% [markdown]
# *Very small parts.* Each block loads the query and prepares it; with 16 keys per block that is as
# much work as the keys themselves.
#
# ## More exercises
#
# 1. Write `merge` as a kernel: one warp, lane d for channel d.
# 2. In 19.1 one warp processes one key at a time. How could the 4 warps of a block share a part,
#    and what has to be merged then?
# 3. How many bytes of m, l and acc are written per token, for 32 query heads of 128 and 32 parts?
#    Compare with the keys and values of 30 000 tokens.
#
# <details><summary>Solutions</summary>
#
# 1: loop over s to find the largest m, then loop again for both sums; every lane holds the same m
# and l. 2: each warp takes every fourth key, with its own m, l and acc; at the end they are merged
# through shared memory with the same formula. 3: 32 · 32 · 130 · 4 bytes = 0.5 MB; the keys and
# values of one layer in bf16 with 8 key/value heads: 2 · 8 · 30 000 · 128 · 2 = 123 MB.
#
# </details>
#
# ## Sources
#
# - T. Dao, D. Haziza, F. Massa, G. Sizov, *Flash-Decoding for long-context inference*, 2023.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018.
# - NVIDIA, CUDA samples, `threadFenceReduction`: the last block.
