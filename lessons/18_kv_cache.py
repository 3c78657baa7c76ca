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
# # 18 The KV cache and grouped-query attention
#
# *About 60 minutes. You need [lesson 17](17_prefill.ipynb).*
#
# **The question.** A model generates one token at a time. The thousandth token depends on the 999
# before it. Does the model have to *compute* all of them again?
#
# No. Later tokens use only the keys and values of earlier tokens, and these do not change, so we
# can store them. You will write the cache that stores them and the attention that reads it, and
# compute its cost: this memory, not arithmetic, decides how many users a GPU can serve.

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
# ## What would be computed again
#
# Without a cache, token n costs a forward pass over n tokens. Count the tokens for an answer of 4
# tokens to a prompt of 3, and for an answer of 1000 tokens to a prompt of 1000:

# %%
for prompt, new in ((3, 4), (1000, 1000)):
    without_cache = sum(prompt + i for i in range(new))
    with_cache = prompt + new - 1
    print(
        f"prompt {prompt:4}, {new:4} new: {without_cache:9,} tokens computed, with a cache "
        f"{with_cache:5,}: {without_cache / with_cache:.0f} times fewer"
    )

# %% [markdown]
# Is it correct to reuse keys and values? A token's key depends on the token, its position and
# everything *before* it, never on what follows: the causal mask guarantees this. So the key is the
# same in every later step. (Queries need not be stored: a query is used once, when its token is the
# newest.)
#
# ## The layout of the cache
#
# The cache holds keys and values for every layer. Each of R sequences has one row, and each
# key/value head has S positions of D numbers in that row:
#
# ```text
# kv (L, 2, R, G, S, D)       layer, key or value, row, key/value head, position, channel
# ```
#
# It is allocated once, at full size. A sequence is assigned a row, fills it from position 0, and
# releases it at the end. Nothing is moved or resized during generation.
#
# Why does the position come after the head? Because a decoding step writes *one* position and reads
# *all* of them: the S D numbers that the block for one key/value head reads should be contiguous.
#
# ## Exercise 18.1: append
#
# There are N new tokens, from any sequences in any order. Token n goes to position `positions_N[n]`
# of row `rows_N[n]`. A token is skipped if its row is -1 or its position lies outside the row.


# %% tags=["exercise"]
@cuda.jit
def append_kernel(cache_RGSD, new_NGD, rows_N, positions_N):
    """cache[rows[n], g, positions[n]] = new[n, g].

    cache: (R, G, S, D), new: (N, G, D), rows and positions: (N). Tokens without a valid row
    and position are skipped.
    Grid (N, G), block 32.
    """
    n = cuda.blockIdx.x
    # YOUR CODE


# %%
lesson.check("18.1", append_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Use `g = cuda.blockIdx.y`, `row, p = rows_N[n], positions_N[n]`, one `if` with three conditions,
# and a loop over the channels from threadIdx.x in steps of 32.
#
# </details>


# %% tags=["solution"]
# Solution 18.1
@cuda.jit
def append_kernel_solution(cache_RGSD, new_NGD, rows_N, positions_N):
    """cache[rows[n], g, positions[n]] = new[n, g].

    cache: (R, G, S, D), new: (N, G, D), rows and positions: (N). Tokens without a valid row
    and position are skipped.
    Grid (N, G), block 32.
    """
    n = cuda.blockIdx.x
    g = cuda.blockIdx.y
    row, p = rows_N[n], positions_N[n]
    if row >= 0 and p >= 0 and p < cache_RGSD.shape[2]:
        for d in range(cuda.threadIdx.x, new_NGD.shape[2], 32):
            cache_RGSD[row, g, p, d] = new_NGD[n, g, d]


append_kernel = lesson.yours(append_kernel, append_kernel_solution)


# %% [markdown]
# ## Grouped-query attention
#
# Decoding one token reads all keys and values and does little arithmetic with them: of the 2 D
# numbers of one key and its value, each is used for *one* multiplication. In **grouped-query
# attention** (GQA), several query heads share a key/value head: H query heads, G key/value heads, H
# / G query heads per key/value head. The cache is H / G times smaller, and each number that is read
# is used H / G times.
#
# Query head h uses key/value head h // (H / G): neighbouring heads share. By hand for H = 6, G = 2:

# %%
H, G = 6, 2
lesson.figures.ownership(
    np.array([h // (H // G) for h in range(H)]),
    "query head -> number of its key/value head",
    "head",
)

# %% [markdown]
# ## Exercise 18.2: attention for one new token
#
# For each head, the query of the newest token attends to the `length` filled positions of its row,
# including the token's own key.


# %% tags=["exercise"]
def decode_attention(q_HD, k_GSD, v_GSD, length, scale):
    """-> o (H, D): softmax(scale q k) v over the first `length` keys.

    q: (H, D), k and v: (G, S, D). Query head h uses key/value head h // (H / G).
    """
    (H, D), G = q_HD.shape, k_GSD.shape[0]
    # YOUR CODE


# %%
lesson.check("18.2", decode_attention)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Slice first: `k, v = k_GSD[:, :length], v_GSD[:, :length]`. Then loop over h.
#
# </details>


# %% tags=["solution"]
# Solution 18.2
def decode_attention_solution(q_HD, k_GSD, v_GSD, length, scale):
    """-> o (H, D): softmax(scale q k) v over the first `length` keys.

    q: (H, D), k and v: (G, S, D). Query head h uses key/value head h // (H / G).
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


decode_attention = lesson.yours(decode_attention, decode_attention_solution)


# %% [markdown]
# ## The same tokens as the full forward pass
#
# The next cell is a decoder with a cache in a few lines: the forward pass of lesson 7 for one
# token, with your 18.2 and an append to the cache in the middle. *Greedy* decoding always takes the
# most likely token. With the cache it must give, at *every* position, the same token as the full
# forward pass.

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
    """Run one token through the model. -> logits"""
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
print("full forward pass:", whole)
print("the same:", text == whole)

# %% [markdown]
# (The cache was initialized to NaN. Had any unfilled position been read, the results would be NaN.)
#
# ## Exercise 18.3: how many sequences fit?


# %% tags=["exercise"]
def largest_batch(L, H, G, D, S, size, free):
    """How many sequences of S tokens fit into `free` bytes?

    L layers, H query and G key/value heads of D numbers, `size` bytes per number.
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
def largest_batch_solution(L, H, G, D, S, size, free):
    """How many sequences of S tokens fit into `free` bytes?

    L layers, H query and G key/value heads of D numbers, `size` bytes per number.
    """
    one = 2 * L * G * S * D * size
    return free // one


largest_batch = lesson.yours(largest_batch, largest_batch_solution)


# %%
print(
    "A model of 8 billion parameters in bf16 takes 16 GB of an 80 GB GPU. Sequences of 8192 "
    "tokens that fit into the other 64 GB:"
)
for name, G in (
    ("32 KV heads, one per query", 32),
    ("8 KV heads, grouped", 8),
    ("1 KV head, shared by all", 1),
):
    one = 2 * 32 * G * 8192 * 128 * 2
    print(
        f"  {name:28} {one / 1e9:5.2f} GB each, "
        f"{largest_batch(32, 32, G, 128, 8192, 2, 64 * 10**9):4} at a time"
    )

# %% [markdown]
# ## Measure, and one improvement
#
# The simplest implementation of grouped-query attention copies every key/value head for each of its
# query heads (`repeat_kv`) and then runs ordinary attention. How many bytes does this move per
# decoding step, for a cache of 1000 tokens?

# %%
H, G, D, length = 32, 8, 128, 1000
cache = 2 * G * length * D * 2  # bytes of one layer in bf16
repeated = 2 * H * length * D * 2
print(f"read in place:             {cache / 1e6:5.1f} MB per layer")
print(
    f"copied per query head:     {(cache + repeated + repeated) / 1e6:5.1f} MB (read, write the "
    "copies, read them)"
)

# %% [markdown]
# **The improvement: read each key/value head once for all of its query heads.** This moves nine
# times fewer bytes here. Why do bytes matter? A decoding step multiplies every weight matrix with
# *one row per sequence*: each weight that is read is used only B times. Count the operations per
# byte, as in lesson 2:

# %%
weights, per_token = 8e9, 2 * 8e9  # parameters; operations for one token
for B in (1, 8, 64, 512):
    kv_bytes = B * 2 * 32 * 8 * 1000 * 128 * 2
    print(f"B = {B:3}: {B * per_token / (2 * weights + kv_bytes):6.1f} operations per byte")
print("the ridge of an H200 in bf16: 989e12 / 4.0e12 = 247")

# %% [markdown]
# Decoding is limited by memory bandwidth at every batch size that fits. So one step takes as long as it takes to read
# all weights once and all caches once: at B = 1 about 16 GB / 4 TB/s = 4 ms. By this bound, a larger batch costs almost
# no extra time until the caches are as large as the weights. This is why lesson 21 keeps the batch full.
#
# The table shows a measured full step of a Llama with 1.1 billion parameters, one token for each of
# B sequences. *Bound* is the time needed to read weights and caches at the copy bandwidth of that
# GPU:

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
        "ms per step": "ms",
        "bound, ms": lambda r: (r["weights_gb"] + r["kv_gb"]) / r["copy_gb_s"] * 1e3,
        "weights, GB": "weights_gb",
        "caches, GB": "kv_gb",
        "tokens/s": "value",
    },
)

# %% [markdown]
# With short contexts, the bound of a step for 32 sequences is 5 % above that for one, and the measured step takes 44 %
# longer. With 4096 tokens each, the caches of 32 sequences are larger than the weights, and the step takes
# correspondingly longer. (The steps reach 55 to 76 % of the speed that the bound allows: a step consists of more than a
# hundred small kernels, and memory is idle for about 2 microseconds between two of them:
# [decoding](notes/decoding.md).)
#
# On a GPU: compare your append with the library's kernel, which moves 16 bytes per thread and
# appends keys and values together.

# %%
from xtrain.kernels.decoding import kv_cache

R, G, S, D = (64, 8, 1024, 128) if lesson.on_gpu() else (2, 2, 8, 16)
rng = np.random.default_rng(0)
k_cache, v_cache = (
    lesson.zeros(lesson.array(np.zeros(1, np.float32)), (R, G, S, D)) for _ in range(2)
)
new = lesson.array(rng.standard_normal((R, G, D)).astype(np.float32))
rows, positions = lesson.array(np.arange(R, dtype=np.int32)), lesson.array(np.full(R, 5, np.int32))
runs = {
    "yours (keys, then values)": lambda: [
        lesson.launch(append_kernel, (R, G), 32, x, new, rows, positions)
        for x in (k_cache, v_cache)
    ],
    "the library's": lambda: kv_cache.append_kv(k_cache, v_cache, new, new, rows, positions),
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
for name, trace in (("yours", yours), ("the library's", library)):
    print(
        f"{name:14} {len(trace.requests()):3} memory instructions, {trace.traffic().moved:6,} "
        "bytes moved"
    )

# %% [markdown]
# ## The library's kernel

# %%
lesson.source(kv_cache.make_append_kernel)

# %% [markdown]
# Next, the reference of the attention that reads the cache. It also normalizes and rotates queries
# and keys (QK-norm, RoPE), appends to the cache, and handles many sequences at once. Its kernel is
# the subject of lesson 19.

# %%
from xtrain.kernels.attention import decode_attention as library_decode

lesson.source(library_decode.decode_attention_ref)

# %% [markdown]
# ## What did not help
#
# *Growing the cache by concatenation*, as simple implementations do: `k = concatenate([k, new])`
# copies the whole cache for every token. An answer of n tokens copies about n² / 2 positions:

# %%
for n in (10, 100, 1000):
    print(f"{n:5} tokens: {n * (n + 1) // 2:7,} positions copied; in place, {n:5,} written")

# %% [markdown]
# *Positions before heads*, (R, S, G, D), so that one token is contiguous when it is written. But a
# step writes one position and reads all of them: with 8 heads of 128 channels in bf16, a block
# would read 256 bytes and skip 1792, over and over.
#
# ## More exercises
#
# 1. Make `append_kernel` write keys and values in one launch. What does the trace show?
# 2. How many tokens must a conversation have before its cache is as large as the weights? (8
#    billion parameters, bf16, 32 layers, 8 key/value heads of 128.)
# 3. Two users send the same long system prompt. Which part of their rows is equal, and what would
#    sharing it require?
#
# <details><summary>Solutions</summary>
#
# 1: half the launches, and the rows and positions are read once. 2: a token takes 2 · 32 · 8 · 128
# · 2 = 131 072 bytes, so 16 GB hold 122 000 tokens. 3: all positions of the common prefix, in every
# layer: they depend on nothing after it. To share them, a row must consist of blocks that several
# sequences can refer to: paging (Kwon et al. 2023). xtrain's cache is divided in this way: a "row" is
# a block of 64 tokens, and a block table lists the blocks of each sequence (`serving/blocks.py`).
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
