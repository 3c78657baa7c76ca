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
# # 18 The KV cache, and grouped queries
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/18_kv_cache.ipynb)
#
# *About 60 minutes. You need [lesson 17](17_prefill.ipynb).*
#
# **The question.** A model writes one token at a time. To write the thousandth it must look at the
# 999 before it. Does it have to *compute* them all again?
#
# No: what the earlier tokens show to later ones are their keys and values, and these do not change.
# Keep them. You will write the memory that keeps them and the attention that reads it, and work out
# what it costs: for it is this memory, not arithmetic, that decides how many people a GPU can
# serve.

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
from numba import cuda

from xtrain import lesson, simulator

# %% [markdown]
# ## What is computed twice
#
# Without a memory, token n costs a forward pass over n tokens. By hand, for an answer of 4 tokens
# to a prompt of 3, and for one of 1000 to a prompt of 1000:

# %%
for prompt, new in ((3, 4), (1000, 1000)):
    again = sum(prompt + i for i in range(new))
    kept = prompt + new - 1
    print(
        f"prompt {prompt:4}, {new:4} new: {again:9,} tokens through the model, with a cache {kept:5,}: {again / kept:.0f} times fewer"
    )

# %% [markdown]
# May one keep keys and values? A token's key depends on the token, its position and everything
# *before* it, never on what comes after: that is what the causal mask guarantees. So it is the same
# in every later step. (Queries need not be kept: a query is used once, when its token is the
# newest.)
#
# ## The memory
#
# For every layer, keys and values; for each of R sequences a row; for every key head a stretch of S
# places of D numbers:
#
# ```text
# kv (L, 2, R, G, S, D)       layer, key or value, row, key head, position, channel
# ```
#
# It is taken once, at full size. A sequence gets a row, fills it from the left, and gives it back.
# Nothing is ever moved or enlarged while the model talks.
#
# Why is the position behind the head? Because a decoding step writes *one* position and reads
# *all*: the block that deals with one key head wants its S D numbers in one piece.
#
# ## Exercise 18.1: append
#
# N new tokens, of any sequences in any order. Token n goes to position `positions_N[n]` of row
# `rows_N[n]`. A token whose row is -1, or whose position lies outside the row, is left out.


# %% tags=["exercise"]
@cuda.jit
def append_kernel(cache_RGSD, new_NGD, rows_N, positions_N):
    """cache[rows[n], g, positions[n]] = new[n, g].

    cache: (R, G, S, D), new: (N, G, D), rows and positions: (N). Tokens without a place are
    left out.
    Grid (N, G), block 32.
    """
    n = cuda.blockIdx.x
    # YOUR CODE


# %%
lesson.check("18.1", append_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `g = cuda.blockIdx.y`, `row, p = rows_N[n], positions_N[n]`, one `if` with three conditions, and a
# loop over channels from threadIdx.x in steps of 32.
#
# </details>


# %% tags=["solution"]
# Solution 18.1
@cuda.jit
def append_kernel(cache_RGSD, new_NGD, rows_N, positions_N):
    """cache[rows[n], g, positions[n]] = new[n, g].

    cache: (R, G, S, D), new: (N, G, D), rows and positions: (N). Tokens without a place are
    left out.
    Grid (N, G), block 32.
    """
    n = cuda.blockIdx.x
    g = cuda.blockIdx.y
    row, p = rows_N[n], positions_N[n]
    if row >= 0 and p >= 0 and p < cache_RGSD.shape[2]:
        for d in range(cuda.threadIdx.x, new_NGD.shape[2], 32):
            cache_RGSD[row, g, p, d] = new_NGD[n, g, d]


# %% [markdown]
# ## Grouped queries
#
# Reading all keys and values for one new token is a lot of memory for little arithmetic: 2 D
# numbers are read for a key and its value, and each is used for *one* multiplication with one
# query. With **grouped queries** several query heads share a key head: H query heads, G key heads,
# H / G queries per key. The cache is H / G times smaller, and each number that is read is used H /
# G times.
#
# Head h belongs to key head h // (H / G): neighbours share. By hand for H = 6, G = 2:

# %%
H, G = 6, 2
lesson.figures.ownership(
    np.array([h // (H // G) for h in range(H)]), "query head (place) -> key head (number)", "head"
)

# %% [markdown]
# ## Exercise 18.2: attention of one new token
#
# The newest token's query, per head, against the `length` places of its row that are filled (its
# own key among them).


# %% tags=["exercise"]
def decode_attention(q_HD, k_GSD, v_GSD, length, scale):
    """-> o (H, D): softmax(scale q k) v over the first `length` keys.

    q: (H, D), k and v: (G, S, D). Query head h reads key head h // (H / G).
    """
    (H, D), G = q_HD.shape, k_GSD.shape[0]
    # YOUR CODE


# %%
lesson.check("18.2", decode_attention)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Cut first: `k, v = k_GSD[:, :length], v_GSD[:, :length]`. Then a loop over h.
#
# </details>


# %% tags=["solution"]
# Solution 18.2
def decode_attention(q_HD, k_GSD, v_GSD, length, scale):
    """-> o (H, D): softmax(scale q k) v over the first `length` keys.

    q: (H, D), k and v: (G, S, D). Query head h reads key head h // (H / G).
    """
    (H, D), G = q_HD.shape, k_GSD.shape[0]
    k, v = k_GSD[:, :length], v_GSD[:, :length]
    o_HD = np.zeros_like(q_HD)
    for h in range(H):
        g = h // (H // G)
        s = k[g] @ q_HD[h] * scale
        p = np.exp(s - s.max())
        o_HD[h] = p / p.sum() @ v[g]
    return o_HD


# %% [markdown]
# ## It is the same model
#
# A decoder with a cache in a few lines: lesson 7's forward pass for one token, with your two
# functions in the middle. *Greedy* decoding, which always takes the most likely token, must give
# with it, at *every* position, the token that the whole forward pass gives.

# %%
import xtrain
from xtrain.kernels.rmsnorm import rmsnorm_ref
from xtrain.kernels.rope import rope_ref, rope_tables

config = xtrain.ModelConfig(
    vocab_size=60,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    max_seq_len=32,
    qk_norm=False,
)
model = xtrain.Transformer(config, seed=3, device="cpu")
w = {name: np.array(p.data) for name, p in model.named_parameters()}
c, S = config, 32
cos, sin = rope_tables(c.head_dim, S, c.rope_theta)
kv = np.full((c.n_layers, 2, 1, c.n_kv_heads, S, c.head_dim), np.nan, np.float32)


def step(token, position):
    """One token through the model. -> logits"""
    norm = lambda x, name: rmsnorm_ref(x, w[name + ".weight"], c.norm_eps)[0]
    linear = lambda x, name: x @ w[name + ".weight"].T
    h = w["model.embed_tokens.weight"][[token]]
    at = np.array([position])
    for i in range(c.n_layers):
        name = f"model.layers.{i}."
        x = norm(h, name + "input_layernorm")
        q, k, v = (
            linear(x, name + f"self_attn.{p}_proj").reshape(1, -1, c.head_dim) for p in "qkv"
        )
        q, k = rope_ref(q, cos, sin, at), rope_ref(k, cos, sin, at)
        kv[i, 0, 0, :, position], kv[i, 1, 0, :, position] = k[0], v[0]
        o = decode_attention(q[0], kv[i, 0, 0], kv[i, 1, 0], position + 1, c.head_dim**-0.5)
        h = h + linear(o.reshape(1, -1), name + "self_attn.o_proj")
        x = norm(h, name + "post_attention_layernorm")
        gate, up = linear(x, name + "mlp.gate_proj"), linear(x, name + "mlp.up_proj")
        h = h + linear(gate / (1 + np.exp(-gate)) * up, name + "mlp.down_proj")
    return linear(norm(h, "model.norm"), "lm_head")[0]


text = [7, 3, 11]
for position in range(14):
    logits = step(text[position], position)
    if position >= 2:
        text.append(int(logits.argmax()))
whole = model.generate(np.array([text[:3]]), 12)[0].tolist()
print("with the cache:   ", text)
print("computed anew:    ", whole)
print("the same:", text == whole)

# %% [markdown]
# (The cache began as NaN. Had one unfilled place been read, NaN would be everywhere.)
#
# ## Exercise 18.3: how many sequences fit?


# %% tags=["exercise"]
def largest_batch(L, H, G, D, S, size, free):
    """How many sequences of S tokens fit into `free` bytes?

    L layers, H query and G key heads of D numbers, `size` bytes a number.
    """
    # YOUR CODE


# %%
lesson.check("18.3", largest_batch)

# %% [markdown]
# <details><summary>Hint</summary>
#
# One sequence takes 2 · L · G · S · D numbers. H does not appear.
#
# </details>


# %% tags=["solution"]
# Solution 18.3
def largest_batch(L, H, G, D, S, size, free):
    """How many sequences of S tokens fit into `free` bytes?

    L layers, H query and G key heads of D numbers, `size` bytes a number.
    """
    one = 2 * L * G * S * D * size
    return free // one


# %%
print(
    "a model of 8 billion parameters in bf16 takes 16 GB of an 80 GB card. Sequences of 8192 tokens that fit beside it:"
)
for name, G in (
    ("32 key heads, one per query", 32),
    ("8 key heads, grouped", 8),
    ("1 key head, shared by all", 1),
):
    one = 2 * 32 * G * 8192 * 128 * 2
    print(
        f"  {name:28} {one / 1e9:5.2f} GB each, {largest_batch(32, 32, G, 128, 8192, 2, 64 * 10**9):4} at a time"
    )

# %% [markdown]
# ## Measure, and one improvement
#
# The simplest grouped-query attention copies every key head for each of its queries (`repeat_kv`),
# and then has ordinary attention. What does that move, per decoding step, for a cache of 1000
# tokens?

# %%
H, G, D, length = 32, 8, 128, 1000
cache = 2 * G * length * D * 2  # bytes of one layer in bf16
repeated = 2 * H * length * D * 2
print(f"read as it is:             {cache / 1e6:5.1f} MB per layer")
print(
    f"copied for every query:    {(cache + repeated + repeated) / 1e6:5.1f} MB (read, write the copies, read them)"
)

# %% [markdown]
# **The improvement: read a key head once for all of its queries.** Nine times fewer bytes here. And
# why are bytes what counts? A decoding step multiplies every weight matrix with *one row per
# sequence*: each weight is read to be used B times. Count operations per byte, as in lesson 2:

# %%
weights, per_token = 8e9, 2 * 8e9  # parameters; operations for one token
for B in (1, 8, 64, 512):
    kv_bytes = B * 2 * 32 * 8 * 1000 * 128 * 2
    print(f"B = {B:3}: {B * per_token / (2 * weights + kv_bytes):6.1f} operations a byte")
print("the ridge of an H200 in bf16: 989e12 / 4.0e12 = 247")

# %% [markdown]
# Writing text is limited by memory, at every batch that fits. So a token takes as long as reading
# all weights once plus all caches once: at B = 1 about 16 GB / 4 TB/s = 4 ms. More sequences at a
# time are nearly free, until the caches weigh as much as the weights. This is why lesson 21 keeps
# the batch full.
#
# Measured, a whole step of a Llama of 1.1 billion parameters, one token for each of B sequences.
# *Bound* is the time in which weights and caches can be read, at the speed of a copy on that card:

# %%
lesson.table(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=32 context=128/bf16",
        "bench_decode/llama 1.1B/B=1 context=4096/bf16",
        "bench_decode/llama 1.1B/B=32 context=4096/bf16",
    ],
    {
        "": "shape",
        "ms a step": "ms",
        "bound, ms": lambda r: (r["weights_gb"] + r["kv_gb"]) / r["copy_gb_s"] * 1e3,
        "weights, GB": "weights_gb",
        "caches, GB": "kv_gb",
        "tokens/s": "value",
    },
)

# %% [markdown]
# 32 sequences of few tokens take less than half as long again as one. With 4096 tokens each, their
# caches weigh more than the weights, and the step takes accordingly longer. (Half to five eighths
# of the bound is reached: a step is some hundred small kernels, one after the other.)
#
# On a GPU: your append against the library's, which moves 16 bytes per thread and does keys and
# values together.

# %%
from xtrain.kernels.decoding import kv_cache

R, G, S, D = (64, 8, 1024, 128) if lesson.on_gpu() else (2, 2, 8, 16)
rng = np.random.default_rng(0)
k_cache, v_cache = (
    lesson.zeros(lesson.array(np.zeros(1, np.float32)), (R, G, S, D)) for _ in range(2)
)
new = lesson.array(rng.standard_normal((R, G, D)).astype(np.float32))
rows, places = lesson.array(np.arange(R, dtype=np.int32)), lesson.array(np.full(R, 5, np.int32))
runs = {
    "yours (keys, then values)": lambda: [
        lesson.launch(append_kernel, (R, G), 32, x, new, rows, places) for x in (k_cache, v_cache)
    ],
    "in use": lambda: kv_cache.append_kv(k_cache, v_cache, new, new, rows, places),
}
for run in runs.values():
    run()
times = lesson.measure(runs, nbytes=4 * 4 * R * G * D)

# %%
x = simulator.sim(np.zeros((2, 2, 8, 64), np.float32))
y, fresh = (
    simulator.sim(np.zeros_like(x)),
    simulator.sim(rng.standard_normal((4, 2, 64)).astype(np.float32)),
)
r, p = (
    simulator.sim(np.array([0, 1, 0, 1], np.int32)),
    simulator.sim(np.array([0, 0, 1, 1], np.int32)),
)
with lesson.tracing() as yours:
    simulator.run(append_kernel, (4, 2), 32, x, fresh, r, p)
    simulator.run(append_kernel, (4, 2), 32, y, fresh, r, p)
with lesson.tracing() as library:
    kv_cache.append_kv(x, y, fresh, fresh, r, p)
for name, trace in (("yours", yours), ("in use", library)):
    print(
        f"{name:7} {len(trace.requests()):3} instructions for memory, {trace.traffic().moved:6,} bytes"
    )

# %% [markdown]
# ## The library's kernel

# %%
lesson.source(kv_cache.make_append_kernel)

# %% [markdown]
# And the reference of the attention that reads it, which also turns the query, appends, and serves
# many sequences at once. Its kernel is the subject of lesson 19.

# %%
from xtrain.kernels.attention import decode_attention as library_decode

lesson.source(library_decode.decode_attention_ref)

# %% [markdown]
# ## What did not help
#
# *Enlarging the cache by concatenation*, as first implementations do: `k = concatenate([k, new])`
# copies everything at every token. For an answer of n tokens that is n² / 2 positions copied:

# %%
for n in (10, 100, 1000):
    print(f"{n:5} tokens: {n * (n + 1) // 2:7,} positions copied, in place {n:5,} written")

# %% [markdown]
# *Positions before heads* (R, S, G, D), so that one token is one piece to write. Writing is one
# position, reading is all of them: with 8 heads of 128 channels in bf16 a block would read 256
# bytes and skip 1792, again and again.
#
# ## More exercises
#
# 1. Let `append_kernel` do keys and values in one launch. What does the trace say?
# 2. How many tokens must a conversation have until its cache is as large as the weights? (8 billion
#    parameters, bf16, 32 layers, 8 key heads of 128.)
# 3. Two people send the same long system prompt. Which part of their rows is equal, and what would
#    sharing it need?
#
# <details><summary>Solutions</summary>
#
# 1: half the launches, and the rows and positions are read once. 2: a token takes 2 · 32 · 8 · 128
# · 2 = 131 072 bytes, so 16 GB are 122 000 tokens. 3: all positions of the common beginning, in
# every layer: they depend on nothing after it. A row would have to be made of pieces that may be
# shared: pages (Kwon et al. 2023). xtrain reuses the beginning of a row that is still there
# (`Engine(reuse_prefix=True)`).
#
# </details>
#
# ## Sources
#
# - R. Pope et al., *Efficiently Scaling Transformer Inference*, 2022: what limits decoding.
# - N. Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019; J. Ainslie et
#   al., *GQA*, 2023.
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*, 2023.
