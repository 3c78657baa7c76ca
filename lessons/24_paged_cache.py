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
# # 24 A paged cache: blocks, tables, sharing
#
# *About 60 minutes. You need [lesson 19](19_decode_attention.ipynb) and [lesson 21](21_engine.ipynb).*
#
# **The question.** Memory decides how many sequences an engine can serve at a time. The length of an answer is not
# known in advance. Must there be room for the longest possible one in every slot? And if a hundred requests begin with
# the same instructions, must the GPU hold their keys a hundred times?
#
# You will write the allocator that hands out blocks of the cache, a kernel that attends through a
# block table, the names by which equal beginnings are found, and the rule for writing to a block that
# others can see.

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

from xtrain import lesson
from xtrain.kernels.primitives.reduce import warp_sum

# %% [markdown]
# ## What a slot wastes
#
# In lesson 18 a sequence had one row of the cache, as long as the longest sequence may become. Take
# 256 requests whose prompts and answers have 100 to 1024 tokens each, and rows of 2048 tokens. How
# much of the memory holds a key, on average over the life of a sequence?

# %%
rng = np.random.default_rng(0)
prompts, answers = rng.integers(100, 1025, 256), rng.integers(100, 1025, 256)
average = prompts + answers / 2  # tokens, in the middle of its life
print(f"rows of 2048 tokens are {average.mean() / 2048:.0%} used")
for S in (1, 16, 64, 256, 1024):
    room = -(-average // S) * S
    print(f"blocks of {S:4} tokens: {average.sum() / room.sum():.0%} used")

# %% [markdown]
# An operating system has the same problem with the memory of its programs, and the same solution has
# worked for sixty years: divide memory into **blocks** (pages) of one size, and give a sequence
# blocks one at a time, when it needs them, wherever they are. A **block table** lists the blocks of a
# sequence in order. Only the last block of a sequence is partly empty (Kwon et al., 2023).
#
# Three sequences of 11, 6 and 9 tokens in blocks of 4. Each row is a block of the cache, each number
# the sequence whose keys it holds:

# %%
tables = {1: [0, 3, 5], 2: [1, 4], 3: [2, 6, 7]}
owner = np.full((8, 4), 0)
for sequence, tokens in ((1, 11), (2, 6), (3, 9)):
    for position in range(tokens):
        owner[tables[sequence][position // 4], position % 4] = sequence
lesson.figures.ownership(owner, "8 blocks of 4 tokens; 0: empty", "sequence")

# %% [markdown]
# Position p of a sequence is in block `table[p // S]`, at offset `p % S`. That is all there is to it,
# for the reader of the cache. What is missing is an allocator, which hands out the blocks.
#
# ## Exercise 24.1: the allocator
#
# Several sequences may *share* a block, if they begin with the same tokens. So the pool counts, for
# every block, how many sequences use it. It is free again when the last of them has released it.


# %% tags=["exercise"]
def make_pool(size):
    """-> allocate, share, release: three functions on blocks 0 .. size - 1, all free at first.

    allocate()       -> a free block, which one sequence now uses; None if no block is free
    share(block)     one more sequence uses the block
    release(block)   one sequence uses the block no more; if it was the last one, the block is free
    """
    # YOUR CODE


# %%
lesson.check("24.1", make_pool)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep a list of the free blocks and a list of counts, one per block.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `allocate` takes a block from the free list and sets its count to 1. `release` subtracts 1 from the
# count, and appends the block to the free list only if the count is now 0.
#
# </details>


# %% tags=["solution"]
# Solution 24.1
def make_pool_solution(size):
    """-> allocate, share, release: three functions on blocks 0 .. size - 1, all free at first.

    allocate()       -> a free block, which one sequence now uses; None if no block is free
    share(block)     one more sequence uses the block
    release(block)   one sequence uses the block no more; if it was the last one, the block is free
    """
    free, count = list(range(size)), [0] * size

    def allocate():
        if not free:
            return None
        block = free.pop()
        count[block] = 1
        return block

    def share(block):
        count[block] += 1

    def release(block):
        count[block] -= 1
        if count[block] == 0:
            free.append(block)

    return allocate, share, release


make_pool = lesson.yours(make_pool, make_pool_solution)


# %%
allocate, share, release = make_pool(4)
first = [allocate() for _ in range(3)]
share(first[0])  # a second sequence begins with the same tokens
for block in first:
    release(block)  # the first sequence ends
print("blocks", first, "- the first sequence has ended; still used:", first[0])
print("the next blocks:", [allocate() for _ in range(4)])

# %% [markdown]
# ## Attention through a table
#
# The kernel of lesson 19 read keys `lo .. hi - 1` of a row. Now key p is somewhere else. One warp
# computes one head; lane d holds channel d. The softmax is the online one of lesson 13: a running
# maximum m, a running sum l, and a running output, which are multiplied by exp(old m - new m) when
# a larger score appears.
#
# ## Exercise 24.2: a kernel with a block table


# %% tags=["exercise"]
@cuda.jit
def paged_attention_kernel(o, q, k_RSD, v_RSD, table, n, scale):
    """One head of width 32 of one sequence: o = softmax(scale q K^T) V over its n keys.

    Grid 1, block 32: lane d owns channel d. k_RSD, v_RSD: R blocks of S positions. Position p is in
    block table[p // S]; the entries of the table that no position needs are invalid.
    """
    # YOUR CODE


# %%
lesson.check("24.2", paged_attention_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `for p in range(n)`: the block is `table[p // S]`, the offset `p % S`, with `S = k_RSD.shape[1]`. The
# score is `warp_sum(q[d] * k_RSD[block, offset, d]) * scale`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Start with `m = float32(-math.inf)`. For each key: `new = max(m, score)`, `shrink = math.exp(m - new)`,
# `weight = math.exp(score - new)`; then `l = l * shrink + weight`, and the same for the output with
# `weight * v_RSD[block, offset, d]`.
#
# </details>


# %% tags=["solution"]
# Solution 24.2
@cuda.jit
def paged_attention_kernel_solution(o, q, k_RSD, v_RSD, table, n, scale):
    """One head of width 32 of one sequence: o = softmax(scale q K^T) V over its n keys.

    Grid 1, block 32: lane d owns channel d. k_RSD, v_RSD: R blocks of S positions. Position p is in
    block table[p // S]; the entries of the table that no position needs are invalid.
    """
    d, S = cuda.threadIdx.x, k_RSD.shape[1]
    m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
    for p in range(n):
        block, offset = table[p // S], p % S
        score = warp_sum(q[d] * k_RSD[block, offset, d]) * scale
        new = max(m, score)
        shrink, weight = math.exp(m - new), math.exp(score - new)
        l = l * shrink + weight
        acc = acc * shrink + weight * v_RSD[block, offset, d]
        m = new
    o[d] = acc / l


paged_attention_kernel = lesson.yours(paged_attention_kernel, paged_attention_kernel_solution)


# %% [markdown]
# What does the table cost? Four bytes per block of S keys: nothing compared with the keys. But an
# entry must arrive before the address of the keys is known, and both take hundreds of cycles. So the
# library loads an entry one tile ahead, and reads the tables into the L2 cache while the previous
# kernel still runs.
#
# ## Who has computed this before?
#
# The keys and values of a token depend on all tokens before it, and on nothing else. So two sequences
# that begin with the same tokens have the same keys there. If their blocks had names that say which
# tokens lead up to them, an engine could look up every block of a new prompt in a dictionary before
# it computes anything.
#
# ## Exercise 24.3: names for blocks


# %% tags=["exercise"]
def block_names(tokens, S):
    """-> a list with one name per full block of S tokens, in order. A name can be a key of a
    dictionary.

    Two blocks have the same name if and only if they hold the same tokens AND all tokens before
    them are the same. A last block that is not full has no name.
    """
    # YOUR CODE


# %%
lesson.check("24.3", block_names)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A name made of the tokens of the block alone is wrong: the same words after another beginning have
# other keys.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Build each name from the previous one: `hash((previous, tuple(block)))`. Then it depends on all
# tokens so far, and costs only S tokens of work.
#
# </details>


# %% tags=["solution"]
# Solution 24.3
def block_names_solution(tokens, S):
    """-> a list with one name per full block of S tokens, in order. A name can be a key of a
    dictionary.

    Two blocks have the same name if and only if they hold the same tokens AND all tokens before
    them are the same. A last block that is not full has no name.
    """
    names, previous = [], None
    for i in range(0, len(tokens) - S + 1, S):
        previous = hash((previous, tuple(tokens[i : i + S])))
        names.append(previous)
    return names


block_names = lesson.yours(block_names, block_names_solution)


# %%
system = list(range(100, 112))  # the instructions that every request begins with
known = {name: f"block {i}" for i, name in enumerate(block_names([*system, 1, 2, 3, 4], 4))}
question = [*system, 9, 8, 7, 6, 5]
print([known.get(name, "to compute") for name in block_names(question, 4)])

# %% [markdown]
# ("If and only if" is a little too strong for a hash: two different beginnings may have the same one.
# With Python's 64 bits that is unlikely by accident, and easy on purpose. A server that strangers
# send prompts to needs a cryptographic hash; the library uses 128 bits of BLAKE2.)
#
# ## Writing where others read
#
# A shared block is read-only. This is not a restriction while it is full: the next token goes to another
# block. But two answers to one prompt share its last block too, which is usually not full, and their
# next tokens differ. The first sequence that writes makes a **copy** for itself: *copy on write*, as an
# operating system does after `fork`.
#
# ## Exercise 24.4: where does the next token go?


# %% tags=["exercise"]
def next_place(table, count, n, S, allocate, copy):
    """-> (block, offset) for the key of token n of a sequence, which has n tokens so far.

    table: the sequence's blocks, which are changed if it needs another one.  count[block]: how many
    sequences use a block; `allocate()` gives a free block and sets its count to 1.
    copy(to, source): copy what a block holds.  A block that others use must not be written.
    """
    # YOUR CODE


# %%
lesson.check("24.4", next_place)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are three cases: all blocks are full (`n % S == 0`): a new block. The last block is the
# sequence's own: nothing to do. The last block is shared: copy it.
#
# </details>
# <details><summary>Hint 2</summary>
#
# After the copy the sequence no longer uses the old block: subtract 1 from its count.
#
# </details>


# %% tags=["solution"]
# Solution 24.4
def next_place_solution(table, count, n, S, allocate, copy):
    """-> (block, offset) for the key of token n of a sequence, which has n tokens so far.

    table: the sequence's blocks, which are changed if it needs another one.  count[block]: how many
    sequences use a block; `allocate()` gives a free block and sets its count to 1.
    copy(to, source): copy what a block holds.  A block that others use must not be written.
    """
    if n % S == 0:
        table.append(allocate())
    elif count[table[-1]] > 1:
        shared = table[-1]
        table[-1] = allocate()
        copy(table[-1], shared)
        count[shared] -= 1
    return table[-1], n % S


next_place = lesson.yours(next_place, next_place_solution)


# %% [markdown]
# ## Measure: what sharing saves, and what happens when there is no block left
#
# The engine has all of this. Twelve requests begin with the same 64 tokens, and a block has 16. How
# many prompt tokens does the engine compute?

# %%
import xtrain

shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=256)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=100, **shape))
common = [int(t) for t in rng.integers(0, 100, 64)]
requests = [[*common, *(int(t) for t in rng.integers(0, 100, 10))] for _ in range(12)]
texts = {}
for reuse in (False, True):
    engine = xtrain.Engine(model, max_batch=4, block_tokens=16, reuse_prefix=reuse)
    texts[reuse] = engine.generate(requests, max_new_tokens=8)
    print(f"sharing {reuse!s:5}  computed {engine.prefilled_tokens}, found {engine.reused_tokens}")
print("the same answers:", texts[False] == texts[True])

# %% [markdown]
# A sequence takes a block when it needs one. So the engine can admit more sequences than would fit if
# all of them became long, and at some step there may be no free block. Then the newest sequence is
# **preempted**: it gives up its blocks, waits, and computes its tokens again later, as part of its
# prompt. That sounds expensive, but a prompt is computed in one pass, many tokens at a time. Here the
# cache has only 14 blocks:

# %%
c = model.config
block_bytes = 2 * c.n_layers * c.n_kv_heads * c.head_dim * 16 * 4
for blocks in (14, 1000):
    size = dict(block_tokens=16, cache_bytes=blocks * block_bytes, max_seq_len=128)
    engine = xtrain.Engine(model, max_batch=4, reuse_prefix=False, **size)
    texts[blocks] = engine.generate(requests[:4], max_new_tokens=40)
    preempted = [name for step in engine.trace for name in step.preempted]
    print(f"{blocks} blocks: {len(engine.trace)} steps, preempted {preempted}")
print("the same answers:", texts[14] == texts[1000])

# %% [markdown]
# A table helps in a third way. A long prompt would stall the other sequences for as long as its pass
# takes. With a cache that already holds the first part of a prompt, the rest can be computed later:
# the queries of the second part read the keys of the first through the table. So the engine cuts
# long prompts, and decodes the other sequences in between (**chunked prefill**). Here a prompt of 100
# tokens arrives while another sequence decodes, with at most 32 prompt tokens in a pass:

# %%
engine = xtrain.Engine(model, max_batch=2, prefill_tokens=32)
engine.generate([[1, 2], list(range(100))], max_new_tokens=[8, 3])
spans = {"decoding": [], "prefill": []}
for step in engine.trace:
    for name, n in (("decoding", len(step.decoded)), ("prefill", step.prefilled)):
        if n:
            spans[name].append((step.number, step.number + 1, str(n)))
lesson.figures.timeline(spans, "sequences decoded and prompt tokens computed", "step")

# %% [markdown]
# **The improvement** of a paged cache is the number of sequences that fit: by the first cell of this
# lesson, about twice as many as with rows of 2048 tokens, and more where the longest sequence is
# longer. What shared beginnings save comes on top.
#
# ## The library's kernel
#
# The first function is the address in your 24.2, in 32 bits: an invalid entry of a table becomes the last block, so
# that nothing is read out of bounds, and the caller compares the entry with R. The next ones are your 24.1 and 24.3. An
# unused block keeps its contents until the block is needed: the one that was used least recently is evicted first.

# %%
from xtrain.kernels.decoding import kv_cache
from xtrain.serving import blocks
from xtrain.serving.scheduler import Scheduler

lesson.source(kv_cache.make_block_table)
lesson.source(blocks.BlockPool.allocate)
lesson.source(blocks.BlockPool.release)
lesson.source(blocks.block_keys)

# %% [markdown]
# Preemption, and your 24.4: a block is copied when the sequence is admitted, because the engine
# already knows then that it will write to it.

# %%
lesson.source(Scheduler._make_room)
lesson.source(Scheduler._assign_blocks)

# %% [markdown]
# ## What did not help
#
# *Very small blocks.* With one token per block nothing is wasted. But the keys of a head are then no
# longer contiguous: a warp of the attention kernel reads 16 keys at a time, which should be one run of
# memory, and a table would have one entry per key. With blocks of 64 tokens the first cell of this
# lesson counted a few percent of waste.
#
# *Starting a thread block for every block that a sequence may ever have.* The host does not know the lengths, so most
# of those thread blocks would have nothing to do ([lesson 19](19_decode_attention.ipynb) has the times).
#
# ## More exercises
#
# 1. Sequences release their blocks from the last to the first. Why does this order matter for what is
#    evicted first?
# 2. Four answers to a prompt of 100 tokens, with blocks of 16: how many blocks do they need after
#    one token each, with copy on write and without sharing?
# 3. Extend 24.2 to split the keys among several warps, as in lesson 19. What must a warp know about
#    the table?
#
# <details><summary>Solutions</summary>
#
# 1: A block can be found only if all blocks before it are found. If the first one were evicted first,
# the others would be useless and still take memory. 2: 6 full blocks are shared, and each answer has a
# last block of its own: 6 + 4 = 10 blocks; without sharing 4 x 7 = 28. 3: Only its own entries: a warp
# that begins with key p begins with entry `p // S`.
#
# </details>
#
# ## Sources
#
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*, 2023.
# - A. Agrawal et al., *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, 2024:
#   chunked prefill.
# - L. Zheng et al., *SGLang: Efficient Execution of Structured Language Model Programs*, 2024: finding
#   shared prefixes automatically.
# - T. Kilburn et al., *One-Level Storage System*, 1962: pages, in the Atlas computer.
