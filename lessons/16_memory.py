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
# # 16 Memory
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/16_memory.ipynb)
#
# *About 60 minutes. You need [lesson 8](08_training.ipynb); for the section on ZeRO also [lesson
# 15](15_data_parallel.ipynb). No GPU.*
#
# **The question.** A model of 67 million parameters is 268 MB of float32. Training it at batch 32
# takes 5.5 GB. Where does the rest go, why does a program sometimes run out of memory while a
# quarter of the card is free, and what can be given up for what?
#
# The one idea: memory is a question of **who lives when**. What must live at the same moment adds
# up; what does not can share a place. All of it can be computed before anything runs.

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

import xtrain
from xtrain import lesson

# %% [markdown]
# ## What a step keeps, by hand
#
# Per parameter, AdamW in float32 holds four numbers all the time: the weight, its gradient, two
# moments. 16 bytes.
#
# And forward must keep what backward will need: the **activations**. One layer of xtrain keeps, of
# every token, in numbers of 4 bytes:
#
# | what | numbers |
# |---|---|
# | residual stream, before each of the two norms | 2 C |
# | q, k, v, as they come out of their product | 3 C |
# | q and k, normalised and rotated, and v, as attention takes them | 3 C |
# | output of attention | C |
# | gate and up | 2 F |
# | without FlashAttention: the weights p of all heads | H T |
# | one over the length of each normalised row: two norms, and q and k of each head | 2 + 2 H |
#
# C is the width, F that of the MLP, H the heads, T the sequence. (The results of the norms and of
# SwiGLU are not kept; backward makes them again on its way.) For B, T, C = 2, 3, 4, with F = 8 and
# H = 2:

# %%
B, T, C, F, H = 2, 3, 4, 8, 2
per_token = 9 * C + 2 * F + H * T + 2 + 2 * H
print(f"{per_token} numbers per token and layer")
print(f"{B * T} tokens, 4 bytes each: {4 * B * T * per_token} bytes per layer")

# %% [markdown]
# Is that true? `memory.saved_bytes` walks through the graph behind a loss and adds up what it keeps
# (the reference of this lesson). A second layer must add just that:

# %%
from xtrain.training import memory_plan as memory


def kept(layers):
    config = xtrain.ModelConfig(
        vocab_size=32, dim=C, n_layers=layers, n_heads=H, hidden_dim=F, max_seq_len=T
    )
    model = xtrain.Transformer(config, seed=0, device="cpu")
    ids = np.zeros((B, T), np.int32)
    return memory.saved_bytes(model.loss(ids, ids))


print("one layer:", kept(1), " two layers:", kept(2), " difference:", kept(2) - kept(1))

# %%
lesson.source(memory.saved_bytes)

# %% [markdown]
# ## Asking for memory
#
# A step makes hundreds of arrays and drops them again. The driver's own `cudaMalloc` and `cudaFree`
# are slow, and freeing waits for the GPU. So a library asks the driver for large pieces and cuts
# them up itself: a **pool**. It is a list of free blocks and two operations.
#
# - *take*: find a free block that is large enough, cut off what is needed, keep the rest;
# - *give*: put the block back, and join it with free neighbours, so that large requests can be met
#   again.
#
# Which block? *Best fit* takes the smallest that is large enough: large blocks stay for large
# requests. By hand:

# %%
free = [(0, 8), (20, 3), (40, 5)]  # (start, size)
for size in (3, 4):
    s, at = min((s, at) for at, s in free if s >= size)
    print(f"{size} needed, free {free}: best fit is {(at, s)}")

# %% [markdown]
# ## Exercise 16.1: take
#
# Blocks are (start, size). The given list must stay as it is: return a new one.


# %% tags=["exercise"]
def take(free, size):
    """-> (start, new list of free blocks), or (None, free) if no block is large enough.

    free: [(start, size), ...] in the order of start. Best fit; of equal ones the first.
    What is left of the block, behind the part that was taken, stays free. No block has size
    0.
    """
    # YOUR CODE


# %%
lesson.check("16.1", take)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `fits = [(s, start) for start, s in free if s >= size]`; the smallest of them is `min(fits)`. Then
# build the new list block by block.
#
# </details>


# %% tags=["solution"]
# Solution 16.1
def take(free, size):
    """-> (start, new list of free blocks), or (None, free) if no block is large enough.

    free: [(start, size), ...] in the order of start. Best fit; of equal ones the first.
    What is left of the block, behind the part that was taken, stays free. No block has size
    0.
    """
    fits = [(s, start) for start, s in free if s >= size]
    if not fits:
        return None, free
    s, start = min(fits)
    rest = [(start + size, s - size)] if s > size else []
    return start, [x for block in free for x in (rest if block == (start, s) else [block])]


# %% [markdown]
# ## Exercise 16.2: give
#
# The other way round. Without joining, the pool crumbles: four free blocks of 1 side by side cannot
# serve a request of 4.


# %% tags=["exercise"]
def give(free, start, size):
    """-> the new list of free blocks, in the order of start, with the block joined to free
    neighbours.
    """
    # YOUR CODE


# %%
lesson.check("16.2", give)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Put the block into the list and sort. Then walk through it: if a block begins where the last one
# of the result ends, make that last one longer, else append.
#
# </details>


# %% tags=["solution"]
# Solution 16.2
def give(free, start, size):
    """-> the new list of free blocks, in the order of start, with the block joined to free
    neighbours.
    """
    joined = []
    for at, s in sorted([*free, (start, size)]):
        if joined and joined[-1][0] + joined[-1][1] == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + s)
        else:
            joined.append((at, s))
    return joined


# %% [markdown]
# ## Fragmentation
#
# Memory can be free and of no use. Here is your pool with 10 places, and a program that takes and
# gives:

# %%
free, places = [(0, 10)], {}
for what, name, size in [
    ("take", "a", 3),
    ("take", "b", 1),
    ("take", "c", 4),
    ("give", "a", 3),
    ("give", "c", 4),
    ("take", "d", 7),
]:
    if what == "take":
        places[name], free = take(free, size)
    else:
        free = give(free, places.pop(name), size)
    total = sum(s for _, s in free)
    print(f"{what} {name} ({size}): free {free}")
    if places.get(name, 0) is None:
        print(f"    no room for {size}, though {total} are free")

# %% [markdown]
# One little block in the middle, b, and 9 free places cannot serve a request of 7. That is
# *external* fragmentation. (Rounding requests up, as all pools do, wastes a little inside of
# blocks: *internal*.)
#
# `lessons/allocator.py` is a pool as PyTorch and CuPy have it, in about a hundred lines, and three
# programs for it: a training step, a server whose caches grow, and one small long-lived array after
# each large temporary. Four allocators, from naive to sensible:

# %%
import sys

sys.path.insert(0, str(lesson.LESSONS))
import allocator

print(f"{'program':18} {'allocator':24} driver calls   peak MB reserved   peak MB in use")
for program, events in allocator.PROGRAMS.items():
    for name, options in allocator.POOLS.items():
        pool = allocator.Pool(allocator.Driver(), **options)
        s = allocator.replay(pool, events())
        calls, reserved, used = pool.driver.calls, s.peak_reserved / 1e6, s.peak_used / 1e6
        print(f"{program:18} {name:24} {calls:12}   {reserved:16.1f}   {used:14.1f}")

# %% [markdown]
# A training step is easy: forward takes, backward gives in the opposite order, a stack. Any pool
# does it. Where lives overlap at random, as in serving, joining saves a factor of four against
# splitting alone, and even so the best pool holds about three times what is in use. And the third
# program shows why small and large requests live apart: one array of 100 bytes sits down in the
# middle of a free 64 MB block, and the next temporary needs another one.
#
# ## The arena: do not ask
#
# The best allocation is none. All parameters live as long as the model, and so do their gradients
# and moments. xtrain lays them into **one array each**, the arena, with every parameter a view:

# %%
lesson.source(xtrain.nn.Arena.__init__, part="offsets, size, unit")

# %% [markdown]
# One allocation cannot fragment. And one array is one kernel: AdamW, the norm of all gradients,
# setting them to zero, a bucket of [lesson 15](15_data_parallel.ipynb) are each a single launch
# over a flat range, where a model of 12 layers has 99 parameters. (Better still is not to set them
# to zero: in a captured step backward writes over what is there.) The decayed ones come first, so
# weight decay is a comparison of indices.
#
# ## Forgetting on purpose
#
# Activations are the largest part, and they need not be kept: forward can throw them away and
# backward can compute them **again**, layer by layer, from the layer's input. That is *recompute*
# (or *checkpointing*). Each layer then keeps its input only, and just one layer at a time has all
# its activations.
#
# ## Exercise 16.3: the peak
#
# Layer i keeps kept[i] bytes for its backward, or, if it is to be computed again, its input,
# inputs[i] bytes, until its backward is done. Backward goes from the last layer to the first; it
# makes kept[i] again (all of it beside inputs[i]), uses it, and gives both back. Nothing else is
# counted. What is the most that lives at once?


# %% tags=["exercise"]
def peak(kept, inputs, again):
    """-> the largest number of bytes alive at any moment of forward and backward.

    kept, inputs: bytes of each layer, first to last. again: activations are computed again
    in backward.
    """
    # YOUR CODE


# %%
lesson.check("16.3", peak)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Without `again`, everything is alive when forward ends. With it: when backward is at layer i,
# which inputs are still there?
#
# </details>


# %% tags=["solution"]
# Solution 16.3
def peak(kept, inputs, again):
    """-> the largest number of bytes alive at any moment of forward and backward.

    kept, inputs: bytes of each layer, first to last. again: activations are computed again
    in backward.
    """
    if not again:
        return sum(kept)
    return max((sum(inputs[: i + 1]) + kept[i] for i in range(len(kept))), default=0)


# %%
layers = 12
print("kept:          ", peak([100] * layers, [10] * layers, False))
print("computed again:", peak([100] * layers, [10] * layers, True))

# %% [markdown]
# ## Measure
#
# xtrain plans a whole step before it runs. `memory.plan` runs the real code of the GPU path with
# arrays that have shapes and no memory, *ghosts*, and a model of CuPy's pool that counts. So the
# plan follows the code by itself. The 67 million parameter model, batch 32, T 256:

# %%
config = xtrain.ModelConfig(
    vocab_size=50257, dim=384, n_layers=12, n_heads=12, hidden_dim=1536, max_seq_len=256
)
plans = {
    (precision, again): memory.plan(config, 32, 256, precision, again)
    for precision in ("fp32", "bf16")
    for again in ("none", "attention", "block")
}
print("precision   computed again   GB reserved   GB in use at the peak")
for (precision, again), p in plans.items():
    print(f"{precision:9}   {again:14}   {p.reserved / 1e9:11.2f}   {p.peak / 1e9:21.2f}")

# %%
plain = plans["fp32", "none"]
largest = dict(sorted(plain.kinds.items(), key=lambda kind: -kind[1])[:7])
lesson.figures.bars(
    {kind: size / 1e9 for kind, size in largest.items()},
    "GB",
    f"float32, at its fullest moment: {plain.op}",
)

# %% [markdown]
# The question's answer: weights, gradients and moments are 1.07 GB; activations make up nearly all
# the rest. In float32 more than a third of those are attention's. `peak` is what lives at once,
# `reserved` what the pool had to take for it; the difference is fragmentation: one percent in the
# first row, nine in the third.
#
# Measured on an H200, with PyTorch (eager, the same model and batch) beside it for scale:

# %%
lesson.table(
    ["bench_train/dim384/fp32"],
    {"xtrain, GB taken": "peak_gb", "PyTorch eager, GB taken": "peer_peak_gb"},
)
print(f"the plan of the code that is here: {plain.reserved / 1e9:.2f} GB")

# %% [markdown]
# A measurement belongs to a commit, a plan to the code that one has. Where the two differ, the code
# has changed in between, and has learned to keep less or more. For the code of one commit they have
# to agree: `tests/test_memory.py` holds the plan to what a GPU's pool takes, to within 5 %.
#
# On a GPU, the next cell checks the plan against the pool:

# %%
if lesson.on_gpu():
    most = memory.measure(config, 32, 256)
    print(f"planned {plain.reserved / 1e9:.2f} GB, measured {most / 1e9:.2f} GB")
else:
    print("No GPU here: nothing is measured.")

# %% [markdown]
# ## One improvement: compute attention again
#
# **The reason:** memory is kept for a long time, arithmetic is over at once. Of all that a float32
# layer keeps, the weights of attention grow with T times T, and cost two matrix products and a
# softmax to make again. **The effect**, by the plan: from 5.5 to 3.8 GB. The whole block again: 2.1
# GB, of which 1.07 are parameters. The price is at most one more forward; forward is one part of
# three of a step, so a third.
#
# And several GPUs? In [lesson 15](15_data_parallel.ipynb) every rank holds the same moments and
# updates them in the same way, R times the same work on R copies. **ZeRO-1** divides them: after
# the *reduce-scatter* rank r has the final gradients of its own parts, updates only those, and the
# *all-gather* sends the new weights instead of gradients. The traffic is the same. Bytes per
# parameter and rank:

# %%
print("ranks   fp32   fp32, ZeRO-1   bf16   bf16, ZeRO-1")
for R in (1, 2, 4, 8, 64):
    zero_fp32, zero_bf16 = 8 + 8 / R, 6 + 12 / R
    print(f"{R:5}   {16:4}   {zero_fp32:12.2f}   {18:4}   {zero_bf16:12.2f}")

# %% [markdown]
# In bf16 there is a second copy of the weights, which forward reads; the float32 ones are then the
# optimizer's alone, and are divided too. Gradients stay whole: they are complete on each rank
# before they are added. Dividing these as well, and the weights, is ZeRO-2 and 3, or FSDP; [lesson
# 23](23_beyond.ipynb) points to it.
#
# ## The library's kernel
#
# Memory has no kernel. This is what runs instead of one: recompute, your `peak` with `again`. The
# forward pass runs unrecorded, so nothing is kept but x; backward records, and goes through the
# recording.

# %%
from xtrain.nn.recompute import Recompute

lesson.source(Recompute)

# %% [markdown]
# ZeRO's step: AdamW on the owned parts, and each bucket's new weights on their way while the next
# one is computed.

# %%
from xtrain.parallel.zero import ShardedAdamW

lesson.source(ShardedAdamW.apply)

# %% [markdown]
# And the model of CuPy's pool in the plan: your `take` and `give`, with best fit.

# %%
lesson.source(memory.Pool.take)
lesson.source(memory.Pool.give)

# %% [markdown]
# ## What did not help
#
# *Computing attention again in bf16.* The bf16 path uses FlashAttention ([lesson
# 13](13_flash_attention.ipynb)), which keeps one number per row and no T x T. What is left to
# forget is little:

# %%
for precision in ("fp32", "bf16"):
    saved = plans[precision, "none"].reserved - plans[precision, "attention"].reserved
    print(
        f"{precision}: {saved / 1e9:.2f} GB less, {saved / plans[precision, 'none'].reserved:.0%}"
    )

# %% [markdown]
# There FlashAttention has already made the same bargain, inside the kernel and at a better price.
#
# *A cleverer pool for growing caches.* The table above says it: joining and sorting by size bring
# 3,163 MB down to some 810, for 264 to 303 in use. The engine's answer ([lesson
# 18](18_kv_cache.ipynb)) is not a better pool: it takes its cache once, whole.
#
# ## More exercises
#
# 1. Change `take` to *first fit* and replay the program under "Fragmentation". Does it fail
#    earlier?
# 2. How many parameters can be trained on 80 GB with 8 ranks, bf16 and ZeRO-1, if 20 GB go to
#    activations? And without ZeRO?
# 3. With L equal layers of k bytes and inputs of c bytes, recompute only the start of every group
#    of g layers: keep one input per group, and in backward all of one group. Which g is best?
# 4. Plan your own model: `memory.plan(config, batch, seq_len, "bf16")`, and find the largest batch
#    for your card with `memory.largest`.
#
# <details><summary>Solutions</summary>
#
# 1: No; here first fit makes the same choices until the request of 7, which nothing can serve. 2:
# 60 GB / (6 + 12 / 8) bytes = 8.0 thousand million; without, 60 / 18 = 3.3. 3: L / g inputs and g
# layers at once: c L / g + k g is least at g = sqrt(c L / k); with k of the size of c this is the
# root of L, the classic result of Chen et al. 4: `memory.largest(lambda b: memory.plan(config, b,
# 256, "bf16").reserved < 16e9)` for a card of 16 GB.
#
# </details>
#
# ## Sources
#
# - T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016.
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory Optimizations Toward Training
#   Trillion Parameter Models*, 2020.
# - P. Wilson et al., *Dynamic Storage Allocation: A Survey and Critical Review*, 1995: fits and
#   fragmentation.
# - PyTorch documentation, "CUDA semantics: Memory management"; CuPy documentation, "Memory
#   Management".
