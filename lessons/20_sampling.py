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
# # 20 From logits to a token
#
# *About 60 minutes. You need [lesson 3](03_reductions.ipynb) and [lesson 18](18_kv_cache.ipynb).*
#
# **The question.** The model has computed a score for each of 150 000 tokens, and one of them must
# be chosen. Always the best? Then the text starts to repeat itself. A random one, according to its
# probability? Then an absurd token appears now and then. And whatever the rule: how can it run *on
# the GPU*, for many sequences at once, with random numbers that are the same in every run?
#
# You will write a two-pass search for the best token, the usual sampling rules (temperature, top-k,
# top-p), and a stateless random number generator.

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
from numba import cuda, float32, int32

from xtrain import lesson

FULL = 0xFFFFFFFF

# %% [markdown]
# ## The rules, by hand
#
# Take five tokens with the probabilities 0.1, 0.4, 0.05, 0.3, 0.15. In descending order of
# probability their ids are 1, 3, 4, 0, 2.
#
# - **Temperature** t divides the logits before the softmax: t < 1 sharpens the distribution, t > 1
#   flattens it, and t = 0 means *always the best token*.
# - **Top-k** keeps the k most likely tokens.
# - **Top-p** (nucleus sampling) keeps the smallest set of most likely tokens that holds at least
#   the share p of the remaining probability. Where the model is certain, this may be one token;
#   where it is not, a hundred.
# - **Draw**: take a random number u in [0, 1) and choose the first token at which the running sum
#   exceeds u times the total.

# %%
p = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
order = np.argsort(-p, kind="stable")
for t in (2.0, 1.0, 0.5):
    w = p[order] ** (1 / t)
    print(f"temperature {t}: tokens {order.tolist()}, probabilities {(w / w.sum()).round(3)}")
print(
    "running sum at 1.0:",
    np.cumsum(p[order]).round(2),
    "so u = 0.45 draws token",
    order[np.searchsorted(np.cumsum(p[order]), 0.45, "right")],
)

# %% [markdown]
# Top-p and the draw as a picture, for p = 0.8 and u = 0.6. Every token is a step of the running
# sum. The step that crosses the dashed line still belongs to the set (green); the pale ones are
# removed. The draw is at 0.6 of what is left, which is the dotted line: it meets the dark step.

# %%
lesson.figures.nucleus(
    p[order], order, top_p=0.8, u=0.6, title="top-p keeps ids 1, 3, 4; u draws 3"
)

# %% [markdown]
# ## The best of many
#
# Start with the simplest rule, the best token. With one block for 150 000 logits, each of 256
# threads would read about 600 of them, and one multiprocessor of 132 would work while the others
# are idle. So the search takes **two passes**: the vocabulary is split into segments and one block
# per segment finds its best token; then one block finds the best of these. The same scheme works
# for top-k.
#
# Lesson 3 computed a maximum. What is new is that the *id* must move together with its value, as a
# pair. We must also define what happens with equal values, or two runs may differ: **among equal
# logits the lower id wins**.
#
# ## Exercise 20.1: the best of each segment
#
# Each segment has 64 logits and is handled by one warp. The last segment may be shorter.


# %% tags=["exercise"]
@cuda.jit
def segment_best_kernel(ids_S, best_S, x_V):
    """ids[b], best[b] = id and value of the largest of x[64 * b : 64 * b + 64].

    Among equal values the lower id wins. ids (S): int32, best (S), x (V): float32.
    Grid S = ceil(V / 64), block 32.
    """
    lane = cuda.threadIdx.x
    first = cuda.blockIdx.x * 64
    # YOUR CODE


# %%
lesson.check("20.1", segment_best_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start with `best = float32(-math.inf)` and an id larger than any valid one, `best_id =
# int32(x_V.size)`. The loop is `for i in range(first + lane, last, 32)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Use two shuffles per step: `other = cuda.shfl_xor_sync(FULL, best, step)`, and the same for the
# id. Take the other pair if its value is larger, or equal with a lower id. Keep ids int32: `best_id
# = int32(i)`.
#
# </details>


# %% tags=["solution"]
# Solution 20.1
@cuda.jit
def segment_best_kernel_solution(ids_S, best_S, x_V):
    """ids[b], best[b] = id and value of the largest of x[64 * b : 64 * b + 64].

    Among equal values the lower id wins. ids (S): int32, best (S), x (V): float32.
    Grid S = ceil(V / 64), block 32.
    """
    lane = cuda.threadIdx.x
    first = cuda.blockIdx.x * 64
    last = first + 64 if first + 64 < x_V.size else x_V.size
    best = float32(-math.inf)
    best_id = int32(x_V.size)
    for i in range(first + lane, last, 32):
        if x_V[i] > best:  # ids increase, so among equal values the first one stays
            best, best_id = x_V[i], int32(i)
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, best, step)
        other_id = cuda.shfl_xor_sync(FULL, best_id, step)
        if other > best or (other == best and other_id < best_id):
            best, best_id = other, other_id
    if lane == 0:
        best_S[cuda.blockIdx.x] = best
        ids_S[cuda.blockIdx.x] = best_id


segment_best_kernel = lesson.yours(segment_best_kernel, segment_best_kernel_solution)


# %% [markdown]
# ## Exercise 20.2: the best k in two passes
#
# Write it in NumPy. How many candidates must each segment pass on so that none of the best k is
# lost? `logits_V` can be read in slices of at most `segment` logits, `logits_V[a:b]`. Single
# logits, or a list of ids, may be read only for tokens that a segment has passed on.


# %% tags=["exercise"]
def top_k(logits_V, k, segment):
    """-> ids (k,) of the k largest logits (V,), the best first; the lower id among equals.

    In two passes: first within segments of `segment` logits; the last may be shorter.
    """
    # YOUR CODE


# %%
lesson.check("20.2", top_k)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.argsort(-x, kind="stable")[:k]` gives the best k of one segment. Collect them from all
# segments (add the start of the segment to each id), then sort the collected candidates.
#
# </details>


# %% tags=["solution"]
# Solution 20.2
def top_k_solution(logits_V, k, segment):
    """-> ids (k,) of the k largest logits (V,), the best first; the lower id among equals.

    In two passes: first within segments of `segment` logits; the last may be shorter.
    """
    kept = []
    for first in range(0, len(logits_V), segment):
        part = logits_V[first : first + segment]
        kept.append(np.argsort(-part, kind="stable")[:k] + first)
    kept = np.concatenate(kept)
    kept.sort()  # by id, so that a stable sort prefers the lower one
    order = np.argsort(-logits_V[kept], kind="stable")
    return kept[order[:k]]


top_k = lesson.yours(top_k, top_k_solution)


# %% [markdown]
# ## Exercise 20.3: the rules
#
# Apply all rules in this order: temperature, top-k (0: off), top-p (1: off), draw with u.


# %% tags=["exercise"]
def choose(logits_V, temperature, k, top_p, u):
    """-> id of the next token, from logits (V,).

    Order: temperature (0: the best), top-k (0: all), top-p (1: all), draw with u in [0, 1).
    """
    order = np.argsort(-logits_V, kind="stable")
    # YOUR CODE


# %%
lesson.check("20.3", choose)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Compute `w = np.exp((x - x[0]) / temperature)` for the sorted logits. For top-p, a token stays if
# the sum *before* it is less than p times the total.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `np.searchsorted(np.cumsum(w), u * w.sum(), side="right")` is the index of the first running sum
# that exceeds u times the total.
#
# </details>


# %% tags=["solution"]
# Solution 20.3
def choose_solution(logits_V, temperature, k, top_p, u):
    """-> id of the next token, from logits (V,).

    Order: temperature (0: the best), top-k (0: all), top-p (1: all), draw with u in [0, 1).
    """
    order = np.argsort(-logits_V, kind="stable")
    if temperature == 0:
        return int(order[0])
    if k:
        order = order[:k]
    w = np.exp((logits_V[order] - logits_V[order[0]]) / temperature)
    stay = np.cumsum(w) - w < top_p * w.sum()
    order, w = order[stay], w[stay]
    return int(order[np.searchsorted(np.cumsum(w), u * w.sum(), side="right")])


choose = lesson.yours(choose, choose_solution)


# %% [markdown]
# ## Random numbers without state
#
# An ordinary generator has a state that every call changes. On a GPU this is a problem: which
# thread owns the state, and in which order do threads use it? In addition, a sequence's text should
# not depend on the other sequences being served. The alternative is a *function* of a counter, here
# of (step, sequence number), with the seed as its key. It must mix well: neighbouring counters must
# give unrelated numbers. **Philox** performs ten rounds of multiplications:
#
# ```text
# M0 = 0xD2511F53, M1 = 0xCD9E8D57       W0 = 0x9E3779B9, W1 = 0xBB67AE85
# a = M0 c0,  b = M1 c2                  64-bit products
# c0, c1 = upper(b) xor c1 xor k0,  lower(b)
# c2, c3 = upper(a) xor c3 xor k1,  lower(a)
# k0 += W0,  k1 += W1                    modulo 2^32
# ```
#
# (*upper* and *lower* are the two 32-bit halves; all words on the right are those from before the
# round.)
#
# ## Exercise 20.4: Philox
#
# Use Python integers. They never overflow, so reduce the results to 32 bits yourself.


# %% tags=["exercise"]
def philox(counter, key):
    """Four 32-bit words, two 32-bit words -> four random 32-bit words: Philox 4x32-10."""
    M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
    c0, c1, c2, c3 = counter
    k0, k1 = key
    # YOUR CODE


# %%
lesson.check("20.4", philox)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The upper half of a product is `a >> 32`, the lower half `a & 0xFFFFFFFF`. c0 and c2 must be used
# before they are overwritten: compute a and b first.
#
# </details>


# %% tags=["solution"]
# Solution 20.4
def philox_solution(counter, key):
    """Four 32-bit words, two 32-bit words -> four random 32-bit words: Philox 4x32-10."""
    M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = M0 * c0, M1 * c2
        c0, c1 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF
        c2, c3 = (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


philox = lesson.yours(philox, philox_solution)


# %%
print("counter 0, 1, 2:", [f"{philox((i, 0, 0, 0), (0, 0))[0]:08x}" for i in range(3)])
u = np.array([philox((i, 0, 7, 0), (42, 0))[0] / 2**32 for i in range(4000)])
print(f"4000 steps: mean {u.mean():.2f}, in each tenth {np.histogram(u, 10, (0, 1))[0].tolist()}")

# %% [markdown]
# (The first word, 6627e8d5, is the published test value.) Does drawing give the right frequencies?
# Draw 4000 times from the five tokens, without top-p and with top-p = 0.8:

# %%
logits = np.log(p)
for limit in (1.0, 0.8):
    drawn = np.bincount([choose(logits, 1.0, 0, limit, x) for x in u], minlength=5) / 4000
    print(f"top-p {limit}: frequencies {drawn.round(2)}")
print("probabilities:       ", p)

# %% [markdown]
# ## Integer weights
#
# One problem remains. A running sum of floats depends on the order of addition, and a GPU adds in a
# different order than NumPy. If u falls between two sums that differ in the last bit, GPU and CPU
# draw *different tokens*, and the texts differ from there on. The library therefore uses integer
# weights, $\lfloor 2^{40} w \rfloor$: sums of integers are exact in every order.

# %%
w = np.exp(np.random.default_rng(0).standard_normal(50_000)).astype(np.float32)
shuffled = np.random.default_rng(1).permutation(50_000)
a, b = np.add.accumulate(w)[-1], np.add.accumulate(w[shuffled])[-1]
whole = (w / w.max() * 2**40).astype(np.int64)
print(
    "sums in two orders are equal: float32",
    bool(a == b),
    "  integers",
    bool(whole.sum() == whole[shuffled].sum()),
)

# %% [markdown]
# ## Measure, and one improvement
#
# Why sample on the GPU at all? Because otherwise B x V logits are copied to the host for every
# token, and the GPU waits. The next cell computes how many bytes one step would move, and how many
# candidates the first pass leaves for the second:

# %%
B, V, segment = 64, 151_936, 2048
print(f"logits of {B} sequences: {4 * B * V / 1e6:.0f} MB per token; token ids: {4 * B} bytes")
print(
    f"over a 50 GB/s bus: {4 * B * V / 50e9 * 1e3:.2f} ms; read from GPU memory at 4 TB/s: "
    f"{4 * B * V / 4e12 * 1e3:.3f} ms"
)
segments = -(-V // segment)
print(
    f"first pass: {segments} blocks per sequence instead of 1; second pass, k = 50: "
    f"{segments * 50:,} candidates"
)

# %% [markdown]
# **The improvement is parallelism**: with one block per sequence, most of the GPU is idle when few
# sequences are served; with segments there are 75 times as many blocks. Compare your kernel with
# one block that does everything, on a GPU:


# %%
@cuda.jit
def one_block_best_kernel(ids_1, best_1, x_V):
    """The same for all of x.   Grid 1, block 32."""
    lane = cuda.threadIdx.x
    best = float32(-math.inf)
    best_id = int32(x_V.size)
    for i in range(lane, x_V.size, 32):
        if x_V[i] > best:
            best, best_id = x_V[i], int32(i)
    for step in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL, best, step)
        other_id = cuda.shfl_xor_sync(FULL, best_id, step)
        if other > best or (other == best and other_id < best_id):
            best, best_id = other, other_id
    if lane == 0:
        best_1[0] = best
        ids_1[0] = best_id


n = V if lesson.on_gpu() else 300
x = lesson.array(np.random.default_rng(0).standard_normal(n).astype(np.float32))
S = -(-n // 64)
ids, best = lesson.empty(x, S, np.int32), lesson.empty(x, S)
lesson.launch(segment_best_kernel, S, 32, ids, best, x)
host_best, host_ids = lesson.host(best), lesson.host(ids)
print("the best of the best:", int(host_ids[host_best.argmax()]) == int(lesson.host(x).argmax()))
one_id, one_best = lesson.empty(x, 1, np.int32), lesson.empty(x, 1)
runs = {
    "one block": lambda: lesson.launch(one_block_best_kernel, 1, 32, one_id, one_best, x),
    "first pass": lambda: lesson.launch(segment_best_kernel, S, 32, ids, best, x),
}
times = lesson.measure(runs, nbytes=4 * n)

# %% [markdown]
# ## The library's kernel
#
# The reference is your 20.3 with integer weights and Philox:

# %%
from xtrain.kernels.decoding import sampling, sampling_search

lesson.source(sampling.kept_ref)
lesson.source(sampling.sample_ref)

# %% [markdown]
# The kernel of the first pass follows. Your pair of value and id is a single int64 here (`key_of`),
# so that one comparison decides. There is no second launch for the blocks' results: the block that
# finishes last (`arrive_last`, [lesson 19](19_decode_attention.ipynb)) reads what the others have
# written. How many blocks share a row depends on how many rows there are.

# %%
lesson.source(sampling_search.make_top_kernel)

# %% [markdown]
# **With other rules**, sorting the whole row is too expensive, and no short list is guaranteed to suffice. The library
# sorts only the tokens that can matter. A second pass assigns tokens to 1024 bins by their distance from the largest
# logit and builds an exact histogram of the weights (with top-k: of the tokens). The running sum over the bins gives
# the bin that contains the cutoff or the draw; a third pass gathers only the tokens of that bin, and one block sorts
# them and picks one.
#
# The bitonic sort works in shared memory: threads compare and exchange in a fixed pattern, and only
# the steps whose partners are more than 32 apart need a barrier for the whole block:

# %%
lesson.source(sampling_search.put_in_order)

# %% [markdown]
# The histogram needs one more trick. `cuda.atomic.add` on 64-bit numbers in shared memory is not a
# hardware instruction but a loop: read, add, compare and swap, and retry if another thread was
# faster. Two 32-bit atomic additions, with the carry from the first passed to the second, are
# hardware instructions and equally exact.

# %%
lesson.source(sampling_search.add_weight)

# %% [markdown]
# One call handles sequences with different rules. Here the NumPy reference runs, compared with your
# functions:

# %%
logits = np.random.default_rng(3).standard_normal((3, 40)).astype(np.float32)
ids_B = np.zeros(3, np.int32)
rules = dict(temperature=[0.0, 1.0, 0.7], top_k=[0, 5, 0], top_p=[1.0, 1.0, 0.9])
sampling.sample(
    logits, ids_B, np.float32(rules["temperature"]), np.int32(rules["top_k"]),
    np.float32(rules["top_p"]),
    np.full(3, 42), np.arange(3), np.full(3, 9, np.int32),
)  # fmt: skip
mine = [
    choose(logits[b], *(rules[r][b] for r in rules), philox((9, 0, b, 0), (42, 0))[0] / 2**32)
    for b in range(3)
]
print("the library:", ids_B.tolist(), " yours:", mine)

# %% [markdown]
# ## What did not help
#
# *Sorting everything.* A full sort of 150 000 logits gives top-k, top-p and the draw in one
# operation. But a radix sort, the usual sort on a GPU, reads and writes all logits and their ids
# once for every 8 bits of a logit. The three passes read the logits three times, later ones often
# from the L2 cache, and write few.
#
# *A generator with a state per sequence* (cuRAND's default): 48 bytes per thread to store, load and
# write back, and a sequence that moves to another row would continue with the wrong state. The
# counter is the position in the text, which is known anyway:

# %%
seed, sequence = 42, 5
once = [philox((step, 0, sequence, 0), (seed, 0))[0] for step in range(6)]
later = [philox((step, 0, sequence, 0), (seed, 0))[0] for step in (3, 4, 5)]
print("steps 3 to 5 computed alone give the same numbers:", once[3:] == later)

# %% [markdown]
# ## More exercises
#
# 1. *Min-p* keeps the tokens whose probability is at least a given share of the best token's. Add
#    it to `choose`. Where in the order does it belong?
# 2. How many candidates does the second pass get for k = 1024 and V = 151 936 in segments of 2048?
#    Would you make the segments larger?
# 3. What is wrong with `u = philox(...)[0] / 2**32` in float32? (What is the largest u?)
#
# <details><summary>Solutions</summary>
#
# 1: after the temperature, `w >= min_p * w[0]`; it is relative to the best token, so the sum is not
# needed. 2: 75 · 1024 = 76 800; segments of 2048 pass on half of their tokens. Larger segments mean
# fewer candidates but also fewer blocks. 3: float32 has 24 significant bits, so numbers near
# $2^{32}$ round up to it: u can be 1.0, and no running sum exceeds the total. The library keeps 31
# bits as an integer and multiplies exactly.
#
# </details>
#
# ## Sources
#
# - A. Holtzman et al., *The Curious Case of Neural Text Degeneration*, 2020: top-p.
# - J. Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011: Philox, and its test
#   values.
# - K. Batcher, *Sorting networks and their applications*, 1968: the bitonic sort.
