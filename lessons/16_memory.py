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
# *About 60 minutes. You need [lesson 8](08_training.ipynb); for the section on ZeRO also [lesson
# 15](15_data_parallel.ipynb). You need no GPU.*
#
# **The question.** A model of 67 million parameters is 268 MB of float32. Training it at batch 32
# takes 5.5 GB. Where does the rest go, why does a program sometimes run out of memory while a
# quarter of the GPU's memory is free, and what can you trade for memory?
#
# The one new idea: memory use depends on **lifetimes**. Arrays that live at the same time add up;
# arrays that do not can share memory. All of this can be computed before anything runs.

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
# Per parameter, AdamW in float32 permanently holds four numbers: the weight, its gradient and two
# moments. That is 16 bytes.
#
# In addition, forward must save what backward will need: the **activations**. One layer of xtrain
# saves, for every token, in numbers of 4 bytes:
#
# | what | numbers |
# |---|---|
# | residual stream, before each of the two norms | 2 C |
# | q, k, v, as their matrix product returns them | 3 C |
# | q and k, normalised and rotated, and v, as attention receives them | 3 C |
# | output of attention | C |
# | gate and up | 2 F |
# | without FlashAttention: the weights p of all heads | H T |
# | rstd of each normalised row: two norms, and q and k of each head | 2 + 2 H |
#
# C is the model width, F the MLP's hidden width, H the number of heads, T the sequence length. (The
# results of the norms and of SwiGLU are not saved; backward recomputes them.) For B, T, C = 2, 3,
# 4, with F = 8 and H = 2:

# %%
B, T, C, F, H = 2, 3, 4, 8, 2
per_token = 9 * C + 2 * F + H * T + 2 + 2 * H
print(f"{per_token} numbers per token and layer")
print(f"{B * T} tokens, 4 bytes each: {4 * B * T * per_token} bytes per layer")

# %% [markdown]
# Is that true? `memory.saved_bytes` (the reference of this lesson) walks through the graph behind a
# loss and sums the sizes of the saved arrays. A second layer must add exactly the number above:

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
# ## Allocating memory
#
# A step allocates and frees hundreds of arrays. The driver's own `cudaMalloc` and `cudaFree` are
# slow, and freeing waits for the GPU. So a library requests large pieces from the driver and
# divides them itself: a **memory pool**. It consists of a list of free blocks and two operations.
#
# - *take*: find a free block that is large enough, use the part that is needed, and keep the rest
#   free;
# - *give*: return the block, and merge (`join`) it with free neighbours, so that large requests can
#   be served again.
#
# Which block? *Best fit* takes the smallest one that is large enough, which preserves large blocks
# for large requests. By hand:

# %%
free = [(0, 8), (20, 3), (40, 5)]  # (start, size)
for size in (3, 4):
    s, at = min((s, at) for at, s in free if s >= size)
    print(f"request {size}, free {free}: best fit is {(at, s)}")

# %% [markdown]
# ## Exercise 16.1: take
#
# Blocks are (start, size). Do not change the given list: return a new one.


# %% tags=["exercise"]
def take(free, size):
    """-> (start, new list of free blocks), or (None, free) if no block is large enough.

    free: [(start, size), ...], sorted by start. Use best fit; among equal blocks, the first.
    Take the front of the block; the rest stays free. The list contains no block of size 0.
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
def take_solution(free, size):
    """-> (start, new list of free blocks), or (None, free) if no block is large enough.

    free: [(start, size), ...], sorted by start. Use best fit; among equal blocks, the first.
    Take the front of the block; the rest stays free. The list contains no block of size 0.
    """
    fits = [(s, start) for start, s in free if s >= size]
    if not fits:
        return None, free
    s, start = min(fits)
    rest = [(start + size, s - size)] if s > size else []
    return start, [x for block in free for x in (rest if block == (start, s) else [block])]


take = lesson.yours(take, take_solution)


# %% [markdown]
# ## Exercise 16.2: give
#
# This is the inverse operation. Without merging, the pool fragments: four adjacent free blocks of
# size 1 cannot serve a request of 4.


# %% tags=["exercise"]
def give(free, start, size):
    """-> the new list of free blocks, sorted by start, with the returned block merged with
    free neighbours.
    """
    # YOUR CODE


# %%
lesson.check("16.2", give)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Add the block to the list and sort. Then go through the list: if a block begins where the last
# block of the result ends, extend that last block; otherwise append the block.
#
# </details>


# %% tags=["solution"]
# Solution 16.2
def give_solution(free, start, size):
    """-> the new list of free blocks, sorted by start, with the returned block merged with
    free neighbours.
    """
    joined = []
    for at, s in sorted([*free, (start, size)]):
        if joined and joined[-1][0] + joined[-1][1] == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + s)
        else:
            joined.append((at, s))
    return joined


give = lesson.yours(give, give_solution)


# %% [markdown]
# ## Fragmentation
#
# Memory can be free but unusable. Here is your pool with 10 units of memory, and a program that
# takes and gives:

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
        print(f"    no block of {size}, although {total} are free")

# %% [markdown]
# One small block in the middle, b, is enough: 9 free units cannot serve a request of 7. This is
# *external* fragmentation. (All pools round requests up, which wastes a little memory inside the
# blocks: *internal* fragmentation.)
#
# `lessons/allocator.py` is a pool like those of PyTorch and CuPy, in about a hundred lines, with
# three programs to run on it: a training step, a server whose caches grow, and a program that
# allocates one small long-lived array after each large temporary. The next cell compares four
# allocators, from naive to sensible:

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
# A training step is easy: forward allocates and backward frees in the opposite order, like a stack.
# Any pool handles that. Where lifetimes overlap at random, as in serving, merging saves a factor of
# four compared with splitting alone, but even the best pool reserves about three times the memory
# in use. The third program shows why small and large requests are kept apart: an array of 100 bytes
# occupies the middle of a free 64 MB block, and the next temporary needs another block.
#
# ## The arena: do not allocate
#
# The best allocation is none. All parameters live as long as the model, and so do their gradients
# and moments. xtrain stores each of these kinds in **one array**, the arena, and every parameter is
# a view into it:

# %%
lesson.source(xtrain.nn.Arena.__init__, part="offsets = []")

# %% [markdown]
# A single allocation cannot fragment, and a single array needs only one kernel. AdamW, the norm of
# all gradients, setting them to zero, a bucket of [lesson 15](15_data_parallel.ipynb): each is a
# single launch over a flat range, although a model of 12 layers has 99 parameters. (It is even
# better not to zero the gradients: in a captured step, backward overwrites the old values.)
# Parameters with weight decay come first, so applying weight decay is a comparison of indices.
#
# ## Activation checkpointing
#
# Activations are the largest part, and they need not be saved. Forward can discard them, and
# backward can compute them **again**, layer by layer, from each layer's input. This is *activation
# checkpointing*, also called *recomputation*. Each layer then saves only its input, and only one
# layer at a time holds all its activations.
#
# ## Exercise 16.3: the peak
#
# Layer i saves kept[i] bytes for its backward. If its activations are recomputed, it saves only its
# input, inputs[i] bytes, until its backward is done. Backward goes from the last layer to the
# first; it recomputes the kept[i] bytes (in addition to inputs[i]), uses them, and frees both.
# Nothing else counts. What is the largest number of bytes alive at the same time?


# %% tags=["exercise"]
def peak(kept, inputs, recompute):
    """-> the largest number of bytes alive at any moment of forward and backward.

    kept, inputs: bytes of each layer, first to last. recompute: True if activations are
    recomputed in backward.
    """
    # YOUR CODE


# %%
lesson.check("16.3", peak)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Without `recompute`, everything is alive when forward ends. With it: when backward is at layer i,
# which inputs are still alive?
#
# </details>


# %% tags=["solution"]
# Solution 16.3
def peak_solution(kept, inputs, recompute):
    """-> the largest number of bytes alive at any moment of forward and backward.

    kept, inputs: bytes of each layer, first to last. recompute: True if activations are
    recomputed in backward.
    """
    if not recompute:
        return sum(kept)
    return max((sum(inputs[: i + 1]) + kept[i] for i in range(len(kept))), default=0)


peak = lesson.yours(peak, peak_solution)


# %%
layers = 12
print("saved:     ", peak([100] * layers, [10] * layers, False))
print("recomputed:", peak([100] * layers, [10] * layers, True))

# %% [markdown]
# ## Measure
#
# xtrain can plan the memory of a whole step before it runs. `memory.plan` runs the real code of the
# GPU path on *ghosts*, arrays that have shapes but no memory, with a model of CuPy's pool that
# counts their bytes. So the plan always follows the code. For the model of 67 million parameters,
# batch 32, T 256:

# %%
config = xtrain.ModelConfig(
    vocab_size=50257, dim=384, n_layers=12, n_heads=12, hidden_dim=1536, max_seq_len=256
)
plans = {
    (precision, recompute): memory.plan(config, 32, 256, precision, recompute)
    for precision in ("fp32", "bf16")
    for recompute in ("none", "attention", "block")
}
print("precision   recomputed   GB reserved   GB in use at the peak")
for (precision, recompute), p in plans.items():
    print(f"{precision:9}   {recompute:10}   {p.reserved / 1e9:11.2f}   {p.peak / 1e9:21.2f}")

# %%
plain = plans["fp32", "none"]
largest = dict(sorted(plain.kinds.items(), key=lambda kind: -kind[1])[:7])
lesson.figures.bars(
    {kind: size / 1e9 for kind, size in largest.items()},
    "GB",
    f"float32, at the peak: {plain.op}",
)

# %% [markdown]
# This answers the question: weights, gradients and moments are 1.07 GB, and activations are nearly
# all the rest. In float32, more than a third of the activations belongs to attention. `peak` is
# what is alive at the same time, `reserved` what the pool had to allocate for it. The difference is
# fragmentation: 1 % in the first row, 6 % in the third.
#
# Next is a measurement on an H200, with PyTorch (eager, the same model and batch) for comparison:

# %%
lesson.table(
    ["bench_train/dim384/fp32"],
    {"xtrain, GB reserved": "peak_gb", "PyTorch eager, GB reserved": "peer_peak_gb"},
)
print(f"the plan of the current code: {plain.reserved / 1e9:.2f} GB")

# %% [markdown]
# A measurement belongs to a commit; a plan belongs to the current code. If the two differ, the code
# has changed since the measurement and now uses less or more memory. For the same commit they must
# agree: `tests/training/test_memory_plan.py` requires the plan to match what a GPU's pool reserves
# to within 5 %.
#
# On a GPU, the next cell compares the plan with the pool:

# %%
if lesson.on_gpu():
    most = memory.measure(config, 32, 256)
    print(f"planned {plain.reserved / 1e9:.2f} GB, measured {most / 1e9:.2f} GB")
else:
    print("There is no GPU here, so nothing is measured.")

# %% [markdown]
# ## One improvement: recompute attention
#
# **The reason:** saved activations occupy memory for a long time, while recomputing them takes
# little time. Of everything that a float32 layer saves, only the attention weights p grow with T
# times T, and recomputing them costs two matrix products and a softmax. **The effect**, according
# to the plan: from 5.47 to 3.84 GB. With the whole block recomputed: 2.05 GB, of which 1.07 are
# parameters, gradients and moments. The price is at most one more forward; forward is about a third
# of a step, so the step takes at most a third longer.
#
# And with several GPUs? In [lesson 15](15_data_parallel.ipynb), every rank holds the same moments
# and updates them in the same way: R times the same work on R copies. **ZeRO-1** divides the
# moments among the ranks. After the *reduce-scatter*, rank r has the final gradients of its own
# parts and updates only those; the *all-gather* then sends the new weights
# instead of gradients (lesson 15 has both).
# The traffic is the same. Bytes per parameter and rank:

# %%
print("ranks   fp32   fp32, ZeRO-1   bf16   bf16, ZeRO-1")
for R in (1, 2, 4, 8, 64):
    zero_fp32, zero_bf16 = 8 + 8 / R, 6 + 12 / R
    print(f"{R:5}   {16:4}   {zero_fp32:12.2f}   {18:4}   {zero_bf16:12.2f}")

# %% [markdown]
# In bf16 there is a second copy of the weights, which forward reads. The float32 weights are then
# needed only by the optimizer and are divided, too. Gradients stay whole: each rank's backward
# computes all of them before they are summed. Dividing gradients as well is ZeRO-2, and also
# dividing the weights is ZeRO-3 or FSDP (`--zero 3`); [lesson 32](32_model_parallel.ipynb) builds
# it.
#
# ## The library's kernel
#
# There is no kernel for memory. Here is the code of activation checkpointing instead, your `peak`
# with `recompute`. The forward pass runs without recording, so only x is saved. Backward runs the
# forward again with recording, and then goes backward through that recording.

# %%
from xtrain.nn.recompute import Recompute

lesson.source(Recompute)

# %% [markdown]
# ZeRO's step runs AdamW on the owned parts, and sends each bucket's new weights while it computes
# the next.

# %%
from xtrain.parallel.zero import ShardedAdamW

lesson.source(ShardedAdamW.update_owned)

# %% [markdown]
# And here is the plan's model of CuPy's pool: your `take` and `give`, with best fit.

# %%
lesson.source(memory.Pool.allocate)
lesson.source(memory.Pool.free)

# %% [markdown]
# ## What did not help
#
# *Recomputing attention in bf16.* The bf16 path uses FlashAttention ([lesson
# 13](13_flash_attention.ipynb)), which saves one number per row and no T x T array. Little is left
# to discard:

# %%
for precision in ("fp32", "bf16"):
    saved = plans[precision, "none"].reserved - plans[precision, "attention"].reserved
    print(
        f"{precision}: {saved / 1e9:.2f} GB less, {saved / plans[precision, 'none'].reserved:.0%}"
    )

# %% [markdown]
# FlashAttention has already made the same trade inside the kernel, at a lower price.
#
# *A smarter pool for growing caches.* The table above shows that merging and separating by size
# reduce 3,163 MB to about 810, with 264 to 303 MB in use. The engine's solution ([lesson
# 18](18_kv_cache.ipynb)) is not a better pool: it allocates its whole cache once.
#
# ## More exercises
#
# 1. Change `take` to *first fit* and replay the program under "Fragmentation". Does it fail
#    earlier?
# 2. How many parameters can you train on GPUs of 80 GB with 8 ranks, bf16 and ZeRO-1, if
#    activations take 20 GB? And without ZeRO?
# 3. There are L equal layers of k bytes, with inputs of c bytes. Checkpoint only the input of every
#    group of g layers: save one input per group and, in backward, recompute all of one group. Which
#    g is best?
# 4. Plan your own model with `memory.plan(config, batch, seq_len, "bf16")`, and find the largest
#    batch for your GPU with `memory.largest`.
#
# <details><summary>Solutions</summary>
#
# 1: No; here first fit makes the same choices until the request of 7, which neither can serve. 2:
# 60 GB / (6 + 12 / 8) bytes = 8.0 billion; without ZeRO, 60 / 18 = 3.3 billion. 3: L / g inputs and
# g layers are alive at the same time: c L / g + k g is smallest at g = sqrt(c L / k); if k is about
# as large as c, this is the square root of L, the classic result of Chen et al. 4:
# `memory.largest(lambda b: memory.plan(config, b, 256, "bf16").reserved < 16e9)` for a GPU with 16
# GB.
#
# </details>
#
# ## Sources
#
# - T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016.
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory Optimizations Toward Training
#   Trillion Parameter Models*, 2020.
# - P. Wilson et al., *Dynamic Storage Allocation: A Survey and Critical Review*, 1995: fit
#   strategies and fragmentation.
# - PyTorch documentation, "CUDA semantics: Memory management"; CuPy documentation, "Memory
#   Management".
