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
# # 17 Serving: from prompt to logits
#
# *About 60 minutes. You need [lesson 7](07_model.ipynb) and lesson 13.*
#
# **The question.** Three users each send a prompt: one word, one sentence, one page. Training
# batches are rectangles; a batch of prompts is not. How can prompts of different lengths go through
# the model *together*, without any computation on padding, and without one prompt attending to the
# text of another?
#
# This phase is called *prefill*: all tokens of the prompts go through the model at once, their keys
# and values are stored (lesson 18), and the result is one row of logits per prompt.

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
from numba import cuda, int32

from xtrain import lesson, simulator

FULL = 0xFFFFFFFF

# %% [markdown]
# ## Padding and its cost
#
# The simple approach is a rectangle: pad every prompt to the length of the longest one. The model
# then also computes the padding tokens. How much work is wasted, for typical lengths?

# %%
for lengths in ((3, 1, 2), (12, 40, 180, 25), (7, 900, 30, 15, 60, 22, 410, 9)):
    padded, real = len(lengths) * max(lengths), sum(lengths)
    print(
        f"lengths {lengths}: {padded} rows in a rectangle, {real} real: {1 - real / padded:.0%} "
        "wasted"
    )

# %% [markdown]
# ## Packing
#
# Outside attention, each row is one token and is computed independently of the other rows. So we
# concatenate the tokens of all prompts, N rows in total, and store the row at which each prompt
# begins: the **edges**. For the lengths 3, 1, 2:
#
# ```text
# padded, T = 4      a0 a1 a2 .  b0 .  .  .  c0 c1 .  .
# packed             a0 a1 a2 b0 c0 c1                         edges 0 3 4 6
# ```
#
# Sequence a owns rows edges[a] to edges[a + 1] - 1. The edges are the running sums (prefix sums) of
# the lengths. The reference:

# %%
padding = lesson.padding

lesson.source(padding.cumulative_lengths_ref)
lengths = np.array([3, 1, 2], np.int32)
print(padding.cumulative_lengths_ref(lengths))

# %% [markdown]
# ## Exercise 17.1: running sums by one warp
#
# In lesson 3 a warp computed the sum over all its lanes. A *running* sum, in which lane a ends with
# the sum of lanes 0 to a, works in a similar way. In the first step every lane adds the value of
# the lane 1 below it, then 2 below, 4, 8 and 16. By hand for 3 1 2 4:
#
# ```text
# start      3  1  2  4
# step 1     3  4  3  6       each lane adds its left neighbour
# step 2     3  4  6 10       each lane adds the value two lanes to the left
# ```
#
# `cuda.shfl_up_sync(FULL, v, step)` gives each lane the v of the lane `step` below it. If there is
# no such lane, it returns the lane's own v. (In Numba the sum of two int32 values is an int64.
# Write `v = int32(v + w)` to keep a 4-byte value, the size that one shuffle moves.)


# %% tags=["exercise"]
@cuda.jit
def edges_kernel(edges_E, lengths_A):
    """edges (A + 1) = 0, l0, l0 + l1, ...

    Grid 1, block 32. lengths (A): int32, at most 32 of them.
    """
    a = cuda.threadIdx.x
    # YOUR CODE


# %%
lesson.check("17.1", edges_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `v = lengths_A[a] if a < lengths_A.size else int32(0)`; in the loop `before =
# cuda.shfl_up_sync(FULL, v, step)`, and `if a >= step: v = int32(v + before)`.
#
# </details>


# %% tags=["solution"]
# Solution 17.1
@cuda.jit
def edges_kernel_solution(edges_E, lengths_A):
    """edges (A + 1) = 0, l0, l0 + l1, ...

    Grid 1, block 32. lengths (A): int32, at most 32 of them.
    """
    a = cuda.threadIdx.x
    v = lengths_A[a] if a < lengths_A.size else int32(0)
    for step in (1, 2, 4, 8, 16):
        before = cuda.shfl_up_sync(FULL, v, step)
        if a >= step:
            v = int32(v + before)
    if a == 0:
        edges_E[0] = 0
    if a < lengths_A.size:
        edges_E[a + 1] = v


edges_kernel = lesson.yours(edges_kernel, edges_kernel_solution)


# %% [markdown]
# ## Exercise 17.2: remove the padding
#
# Sometimes the input is already a padded rectangle, for example from a tokenizer ([lesson
# 8](08_training.ipynb)). Remove the padding: packed row n comes from position t of sequence a. Which sequence is that? The one with
# edges[a] <= n < edges[a + 1]. A sequence may be empty.


# %% tags=["exercise"]
@cuda.jit
def remove_padding_kernel(y_NC, x_ATC, edges_E):
    """y[n] = x[a, t] for packed token n, which is token t of sequence a.   Grid N, block 32.

    Block n copies row n. y: (N, C), x: (A, T, C), edges: (A + 1).
    """
    n = cuda.blockIdx.x
    # YOUR CODE


# %%
lesson.check("17.2", remove_padding_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Start with `a = 0` and increment it while `edges_E[a + 1] <= n`. Then loop over the columns: `for
# c in range(cuda.threadIdx.x, y_NC.shape[1], 32)`.
#
# </details>


# %% tags=["solution"]
# Solution 17.2
@cuda.jit
def remove_padding_kernel_solution(y_NC, x_ATC, edges_E):
    """y[n] = x[a, t] for packed token n, which is token t of sequence a.   Grid N, block 32.

    Block n copies row n. y: (N, C), x: (A, T, C), edges: (A + 1).
    """
    n = cuda.blockIdx.x
    a = 0
    while edges_E[a + 1] <= n:
        a += 1
    t = n - edges_E[a]
    for c in range(cuda.threadIdx.x, y_NC.shape[1], 32):
        y_NC[n, c] = x_ATC[a, t, c]


remove_padding_kernel = lesson.yours(remove_padding_kernel, remove_padding_kernel_solution)


# %%
x_ATC = simulator.sim(np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8))
edges = simulator.sim(np.array([0, 3, 4, 6], np.int32))
y_NC = simulator.sim(np.zeros((6, 8), np.float32))
trace = lesson.traced(remove_padding_kernel, 6, 32, y_NC, x_ATC, edges)
owner = np.full((3, 4), -1)
for access in trace.of("x_ATC"):
    owner[access.index // 8 // 4, access.index // 8 % 4] = access.block[0]
lesson.figures.ownership(
    owner, "packed row of each element of the rectangle (– is padding, never read)", "row"
)

# %% [markdown]
# ## Attention with packed prompts
#
# Attention is the only operation in which sequences matter: a token attends to the tokens of its
# own prompt, up to and including itself. There may also be a **history**: keys that are already in
# the cache, from earlier turns of a chat or earlier chunks of a long prompt. Query i of sequence a
# is then at position history[a] + i, and attends to keys 0 to history[a] + i of the sequence's row
# of the cache. The new keys have already been written there.
#
# Keys and values have shape `(R, G, S, D)`: R rows of the cache, G key/value heads, S positions, D
# channels. Each key/value head serves H / G query heads (lesson 18).
#
# ## Exercise 17.3: context attention
#
# Write it in NumPy, with loops: this version is the specification.


# %% tags=["exercise"]
def context_attention(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale):
    """-> o (N, H, D). Query i of sequence a is packed row edges[a] + i. It attends to keys
    0 .. history[a] + i of cache row rows[a]; its head h uses key/value head h // (H / G).

    q: (N, H, D), k and v: (R, G, S, D), edges: (A + 1), history and rows: (A).
    """
    (N, H, D), (R, G, S, _) = q_NHD.shape, k_RGSD.shape
    o_NHD = np.zeros_like(q_NHD)
    # YOUR CODE


# %%
lesson.check("17.3", context_attention)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Use three loops: over a, over i in range(edges[a + 1] - edges[a]), and over h. Set `n = edges[a] +
# i` and `keys = k_RGSD[row, g, : past + i + 1]`, then take the softmax of `keys @ q_NHD[n, h] *
# scale`.
#
# </details>


# %% tags=["solution"]
# Solution 17.3
def context_attention_solution(q_NHD, k_RGSD, v_RGSD, edges_E, history_A, rows_A, scale):
    """-> o (N, H, D). Query i of sequence a is packed row edges[a] + i. It attends to keys
    0 .. history[a] + i of cache row rows[a]; its head h uses key/value head h // (H / G).

    q: (N, H, D), k and v: (R, G, S, D), edges: (A + 1), history and rows: (A).
    """
    (N, H, D), (R, G, S, _) = q_NHD.shape, k_RGSD.shape
    o_NHD = np.zeros_like(q_NHD)
    for a in range(len(rows_A)):
        row = rows_A[a]
        past = history_A[a]
        for i in range(edges_E[a + 1] - edges_E[a]):
            for h in range(H):
                g, n, seen = h // (H // G), edges_E[a] + i, past + i + 1
                s = k_RGSD[row, g, :seen] @ q_NHD[n, h] * scale
                p = np.exp(s - s.max())
                o_NHD[n, h] = p / p.sum() @ v_RGSD[row, g, :seen]
    return o_NHD


context_attention = lesson.yours(context_attention, context_attention_solution)


# %% [markdown]
# ## The complete prefill
#
# xtrain serves a model with the forward that trains it: the same blocks, the same products. Only
# attention differs. In place of "B sequences of T tokens" the model is given the description that
# you see below, made from exactly these pieces, and its attention then writes to the cache and
# reads from it. (The cache consists of blocks: `tables_AM` lists those of each sequence, which
# lesson 18 comes back to. On a GPU a pass is a CUDA graph of fixed sizes: idle sequences own the rows
# that are left over.) Does a packed batch give the same next tokens as each prompt alone?

# %%
import xtrain
from xtrain.serving.paged_cache import CachedSequences, PagedCache
from xtrain.serving.prefill_rows import PrefillRows

config = xtrain.ModelConfig(
    vocab_size=60,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    max_seq_len=32,
)
model = xtrain.Transformer(config, seed=0, device="cpu")
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 60, n) for n in (3, 1, 7)]
lengths = [len(p) for p in prompts]
alone = np.stack([model(p[None]).data[0, -1] for p in prompts])

# %%
lesson.source(PrefillRows.pack)

# %%
lesson.source(PagedCache.prefill)

# %%
lesson.source(CachedSequences.attention)

# %%
engine = xtrain.Engine(model, max_batch=3, max_seq_len=16)
answers = engine.generate([p.tolist() for p in prompts], max_new_tokens=1)
print(
    "tokens computed by the model:",
    engine.prefilled_tokens,
    f"(a padded rectangle: {3 * max(lengths)})",
)
print(
    "most likely next tokens, packed:",
    [int(a[0]) for a in answers],
    " alone:",
    alone.argmax(1).tolist(),
)

# %% [markdown]
# Prefill also saves work in the *output head*. Only the last token of each prompt needs logits, so
# the largest matrix of a small model is multiplied with A rows instead of N.
#
# ## Measure, and one improvement
#
# Your kernel from 17.2 moves one element per thread and searches the edges linearly. The kernel of
# `padding.remove_padding` moves 16 bytes per thread and finds the sequence with a binary search. For
# 16 sequences of up to 8 tokens, with 256 channels:

# %%
lengths = rng.integers(1, 9, 16).astype(np.int32)
edges_host = padding.cumulative_lengths_ref(lengths)
A, T, C, N = 16, int(lengths.max()), 256, int(edges_host[-1])
x_s, edges_s = (
    simulator.sim(rng.standard_normal((A, T, C)).astype(np.float32)),
    simulator.sim(edges_host),
)
y_s = simulator.sim(np.zeros((N, C), np.float32))
yours = lesson.traced(remove_padding_kernel, N, 32, y_s, x_s, edges_s)
with lesson.tracing() as library:
    y_lib = padding.remove_padding(x_s, edges_s, N)
print("the same rows:", np.array_equal(y_s, y_lib))
for name, trace, x_name in (("yours", yours, "x_ATC"), ("remove_padding", library, "x")):
    rows, search = trace.traffic(x_name, False), trace.traffic("edges_E", False)
    warps = len({(a.block, a.thread // 32) for a in trace.of("edges_E")})
    print(
        f"{name:14} {rows.requests / N:4.0f} load instructions per row, {warps // N} warps of its "
        "block search the edges, ",
        end="",
    )
    print(f"each with {search.requests / warps:.0f} reads")

# %% [markdown]
# **The improvement** combines lesson 2 with a better search: fewer and wider accesses, and log2(A)
# search steps instead of A. On a GPU, at the size of a real prefill:

# %%
A, T, C = (64, 512, 2048) if lesson.on_gpu() else (4, 3, 32)
lengths = rng.integers(1, T + 1, A).astype(np.int32)
edges_host = padding.cumulative_lengths_ref(lengths)
N = int(edges_host[-1])
x_b, edges_b = lesson.array(np.ones((A, T, C), np.float32)), lesson.array(edges_host)
y_b = lesson.empty(x_b, (N, C))
runs = {
    "yours": lambda: lesson.launch(remove_padding_kernel, N, 32, y_b, x_b, edges_b),
    "remove_padding": lambda: padding.remove_padding(x_b, edges_b, N),
}
times = lesson.measure(runs, nbytes=2 * 4 * N * C)

# %% [markdown]
# ## The library's kernel

# %%
lesson.source(padding.sequence_of)
lesson.source(padding.cumulative_lengths_kernel)

# %% [markdown]
# `cumulative_lengths_kernel` is your 17.1, applied to 32 lengths at a time. The attention kernel is
# FlashAttention (lesson 13) with different start and end positions. A block whose queries lie past
# the end of its sequence returns immediately, so nothing is computed for padding:

# %%
from xtrain.kernels.attention import context_attention as library_attention

lesson.source(library_attention.make_fp32_kernel, "def context_attention_fp32_kernel")

# %% [markdown]
# ## What did not help
#
# *A table with one entry per token* (`offset[n]`, as in FasterTransformer) instead of the search:
# the table must be built, stored, and read in every layer. The search reads log2(A) numbers, which
# all lie in one or two cache lines. For 16 sequences:

# %%
import math

print(
    "steps of a binary search over 17 edges:",
    math.ceil(math.log2(16)),
    "; bytes of the edges:",
    4 * 17,
    "; bytes of a table for 8192 tokens:",
    4 * 8192,
)

# %% [markdown]
# *One prompt at a time*, without packing: this is correct and simple, but each matrix product has
# only the rows of that prompt. The weights are then read once per prompt instead of once per batch.
# Lesson 18 looks at this cost.
#
# ## More exercises
#
# 1. Write `restore_padding_kernel`, the inverse operation, with zeros in the padding. Which grid
#    fits best now?
# 2. Replace the loop in 17.2 by a binary search. Test it with sequences of length 0.
# 3. A prompt of 10 000 tokens is processed in chunks of 512. What is `history` for the third chunk?
#
# <details><summary>Solutions</summary>
#
# 1: one block per padded row (a, t); the row is real if edges[a] + t < edges[a + 1], otherwise
# write zeros. 2: compare with `sequence_of` above: `low` is the last a with edges[a] <= n, so empty
# sequences own no rows. 3: 1024.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *FasterTransformer*: "effective" transformers without padding; ByteTransformer (Zhai et
#   al. 2023).
# - T. Dao, *FlashAttention*, the varlen interface: its `cu_seqlens` are our edges.
# - G. Blelloch, *Prefix Sums and Their Applications*, 1990.
