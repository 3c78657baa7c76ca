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
# # 23 Beyond
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/23_beyond.ipynb)
#
# *About 45 minutes. You need lessons 14 and 16.*
#
# **The question.** You can write, check, profile and fuse kernels, train on several GPUs and serve.
# What do the largest models do in addition, and where do you begin to read?
#
# This lesson is a map. Three ideas, each small enough for an exercise: dividing a *product* among
# GPUs, dividing the *weights* among GPUs, and letting copies and arithmetic of one kernel run at
# the same time. Then pointers into the code, and out of it.

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

from xtrain import lesson


def silu(x):
    return x / (1 + np.exp(-x))


# %% [markdown]
# ## Dividing a product: tensor parallelism
#
# Data parallelism (lesson 15) gives every GPU all weights and a part of the tokens. When one layer
# is too large for one card, or one token must be faster than one card can be, the *layer* is
# divided. An MLP has two products with a nonlinearity between: $y = \text{silu}(x w_1^\top) \,
# w_2^\top$.
#
# The hidden numbers have nothing to do with each other until the second product adds them up. So
# give rank r a part of *them*: rows of $w_1$, and the columns of $w_2$ that belong to them. Each
# rank then computes a share of y by itself, nonlinearity included, and **one** sum over the ranks
# finishes the layer. By hand for 4 hidden numbers on 2 ranks:

# %%
x = np.array([[1.0, 2.0]])
w1 = np.array([[1.0, 0], [0, 1], [1, 1], [1, -1]])
w2 = np.array([[1.0, 2, 3, 4]])
hidden = silu(x @ w1.T)
print("hidden", hidden.round(3), "  y", (hidden @ w2.T).round(3))
for r in (0, 1):
    mine = slice(2 * r, 2 * r + 2)
    print(
        f"rank {r}: hidden {hidden[:, mine].round(3)}, share {(hidden[:, mine] @ w2[:, mine].T).round(3)}"
    )

# %% [markdown]
# ## Exercise 23.1: the shares of an MLP


# %% tags=["exercise"]
def mlp_shares(x_NC, w1_FC, w2_CF, ranks):
    """-> [share (N, C) of each rank]; their sum is silu(x w1^T) w2^T. Rank r uses F / ranks hidden numbers only."""
    # YOUR CODE


# %%
lesson.check("23.1", mlp_shares)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `mine = slice(r * part, (r + 1) * part)` with part = F / ranks; rows `w1_FC[mine]`, columns
# `w2_CF[:, mine]`.
#
# </details>


# %% tags=["solution"]
# Solution 23.1
def mlp_shares(x_NC, w1_FC, w2_CF, ranks):
    """-> [share (N, C) of each rank]; their sum is silu(x w1^T) w2^T. Rank r uses F / ranks hidden numbers only."""
    part = len(w1_FC) // ranks
    shares = []
    for r in range(ranks):
        mine = slice(r * part, (r + 1) * part)
        shares.append(silu(x_NC @ w1_FC[mine].T) @ w2_CF[:, mine].T)
    return shares


# %% [markdown]
# Attention is divided in the same way, by heads: each rank has some heads' queries, keys and
# values, and the columns of the output projection that belong to them. So a block costs two sums
# over ranks forward and two backward, *between* the products, where nothing can hide them. How much
# is that, against the arithmetic? For one block of width C on N tokens:

# %%
N, C = 8192, 4096
flops = 2 * N * 12 * C * C  # 12 C^2 parameters in a block, forward
for ranks in (2, 4, 8):
    compute = flops / ranks / 600e12  # at 600 TFLOP/s reached in bf16
    traffic = (
        2 * (2 * (ranks - 1) / ranks) * 2 * N * C / 320e9
    )  # two all-reduces in bf16 over a 320 GB/s bus
    print(f"{ranks} ranks: arithmetic {compute * 1e3:.1f} ms, sums {traffic * 1e3:.1f} ms")

# %% [markdown]
# (320 GB/s is what an all-reduce reaches on 4 H200s with NVLink; 600 TFLOP/s is a usual share of
# the peak.) Within one machine it pays; across machines, with a tenth of that bandwidth, it does
# not. That is why tensor parallelism stays inside a machine, and data parallelism goes between.
#
# ## Dividing the weights: FSDP
#
# ZeRO-1 (lesson 16) divides the optimizer's state. FSDP, or ZeRO-3, divides the weights as well:
# rank r keeps 1 / R of every layer. To compute a layer, all ranks send their parts to all (an
# *all-gather*), use the whole, and drop it again. In the backward once more, and the gradients are
# summed so that each rank gets only its part (a *reduce-scatter*). The arithmetic is that of data
# parallelism; the memory is not:
#
# ## Exercise 23.2: how many bytes of weights?
#
# While a layer is computed, the next ones may be gathered already (`ahead` of them), or the GPU
# would wait.


# %% tags=["exercise"]
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    """Most bytes of weights that a rank holds at one moment. With one rank nothing is gathered."""
    # YOUR CODE


# %%
lesson.check("23.2", fsdp_bytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Its own part of all layers, and whole layers for the one that is computed and those gathered
# ahead.
#
# </details>


# %% tags=["solution"]
# Solution 23.2
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    """Most bytes of weights that a rank holds at one moment. With one rank nothing is gathered."""
    if ranks == 1:
        return layers * layer_bytes
    return layers * layer_bytes // ranks + (1 + ahead) * layer_bytes


# %%
layers, layer_bytes = 80, 70_000_000_000 * 2 // 80  # 70 billion parameters in bf16
for ranks in (1, 8, 64):
    print(
        f"{ranks:2} ranks: {fsdp_bytes(layers, layer_bytes, ranks, 1) / 1e9:6.1f} GB of weights each"
    )

# %% [markdown]
# ## Inside one kernel: copies while computing
#
# The kernels of lesson 4 load a tile, wait, compute, wait. While they load, the arithmetic units
# are idle, and the other way round. With several tile buffers a load can run while another tile is
# computed. On Hopper cards the hardware does this in style:
#
# - **TMA**: one thread asks for a whole tile; the copy runs by itself, and an **mbarrier** in
#   shared memory tells when it has arrived.
# - **wgmma**: four warps together start a product of whole tiles from shared memory; it runs by
#   itself, too.
# - **Warp specialization**: one warp does nothing but ask for tiles, the others do nothing but
#   compute. A ring of buffers lies between them: "full" says the one, "free" says the other.
#
# ## Exercise 23.3: a ring of buffers
#
# Loads go one after another, and so do computations. Load i may begin when load i - 1 has ended and
# its buffer is free: buffer i % stages was last used by tile i - stages. Computation i may begin
# when load i and computation i - 1 have ended. When does the last computation end?


# %% tags=["exercise"]
def finish_time(tiles, load, compute, stages):
    """Time at which the last of `tiles` computations ends, with `stages` tile buffers."""
    loaded, done = [], []  # when each load, each computation has ended
    # YOUR CODE


# %%
lesson.check("23.3", finish_time)

# %% [markdown]
# <details><summary>Hint</summary>
#
# In a loop over i: `begin = max(end of load i - 1, end of computation i - stages)`,
# `loaded.append(begin + load)`, and the same for done.
#
# </details>


# %% tags=["solution"]
# Solution 23.3
def finish_time(tiles, load, compute, stages):
    """Time at which the last of `tiles` computations ends, with `stages` tile buffers."""
    loaded, done = [], []  # when each load, each computation has ended
    for i in range(tiles):
        free = done[i - stages] if i >= stages else 0
        loaded.append(max(loaded[-1] if loaded else 0, free) + load)
        done.append(max(loaded[i], done[-1] if done else 0) + compute)
    return done[-1]


# %%
def rows(tiles, load, compute, stages):
    """The same as a picture: {who: [(begin, end, what)]}"""
    copies, products = [], []
    for i in range(tiles):
        free = products[i - stages][1] if i >= stages else 0
        begin = max(copies[-1][1] if copies else 0, free)
        copies.append((begin, begin + load, f"load {i}"))
        begin = max(copies[i][1], products[-1][1] if products else 0)
        products.append((begin, begin + compute, f"tile {i}"))
    return {
        f"{stages} buffer{'s' * (stages > 1)}: copies": copies,
        f"{stages}: arithmetic": products,
    }


lesson.figures.timeline(
    {**rows(4, 2, 3, 1), **rows(4, 2, 3, 2)}, "the same four tiles with one buffer and with two"
)

# %% [markdown]
# ## Measure, and one improvement
#
# **The improvement is the second buffer.** The third helps only if times vary, and each costs
# shared memory, which then is missing for larger tiles:

# %%
for stages in (1, 2, 3, 4):
    times = [finish_time(32, load, 3.0, stages) for load in (1.0, 3.0, 5.0)]
    print(
        f"{stages} buffers: load 1 {times[0]:5.0f}   load 3 {times[1]:5.0f}   load 5 {times[2]:5.0f}"
    )

# %% [markdown]
# With loads slower than arithmetic (the last column) no number of buffers helps: the kernel is
# limited by memory, and only fewer bytes do. Lesson 2, once more.
#
# How much the Hopper instructions matter, measured: attention of 4096 tokens, causal, in bf16.
# xtrain's kernel here uses the instructions of the generation before (lesson 14), as PyTorch's
# flash backend does; NVIDIA's cuDNN uses wgmma and TMA.

# %%
lesson.table(
    [
        "bench_attention/named fwd/B=4 H=16 G=16 T=4096 D=64/bf16",
        "bench_attention/named fwd/B=4 H=16 G=16 T=4096 D=128/bf16",
    ],
    {
        "head width": lambda r: r["shape"].split("D=")[1],
        "xtrain, TFLOP/s": "value",
        "flash backend": "peer_value",
        "cuDNN": "cudnn_value",
    },
)

# %% [markdown]
# At a head width of 128 the difference is nearly a fifth of the card's peak of 989 TFLOP/s.
#
# ## The library's kernel
#
# There is not one for this lesson, but a map. Where each idea of the course lives:

# %%
MAP = {
    "races, deadlocks, bounds": "xtrain/simulator.py",
    "16-byte accesses, PTX": "xtrain/kernels/_ptx.py",
    "rows in registers": "xtrain/kernels/_rows.py",
    "tensor cores, ldmatrix, swizzle": "xtrain/kernels/_tiles.py",
    "FlashAttention": "xtrain/kernels/flash_attention_bf16.py",
    "autograd": "xtrain/autograd.py",
    "all ranks the same, bit for bit": "xtrain/communicator.py",
    "buckets that overlap with backward": "xtrain/ddp.py",
    "the optimizer divided": "xtrain/zero.py",
    "memory of a step, planned": "xtrain/memory.py",
    "serving": "xtrain/engine.py",
}
for idea, file in MAP.items():
    there = (lesson.LESSONS.parent / file).exists()
    print(f"{idea:38} {file}{'' if there else '  (not in this checkout)'}")

# %%
from xtrain import zero

print(zero.__doc__)

# %% [markdown]
# To go from ZeRO-1 to FSDP, what would have to change? The arena (lesson 16) is already cut into
# buckets of which each rank owns a part. Weights would be gathered bucket by bucket before a layer
# runs, and dropped after it: the reverse of what `zero.py` does after the optimizer's step.
#
# ## What did not help
#
# *Dividing w1 along its inputs.* Each rank then has a part of the sum over inputs, and the
# nonlinearity needs the whole sum: a second all-reduce in the middle of the MLP, of F numbers per
# token instead of C:

# %%
N, C, F = 8192, 4096, 11008
for name, numbers in (("along hidden numbers", N * C), ("along inputs", N * F + N * C)):
    print(f"{name:22} {2 * numbers / 1e6:6.0f} MB to be summed per MLP, in bf16")

# %% [markdown]
# *Pipelining the layers* over GPUs (each GPU has some layers) needs the least communication, and
# keeps GPUs waiting for each other at the beginning and end of every step: with R stages and M
# micro-batches the idle share is (R - 1) / (M + R - 1):

# %%
for M in (1, 8, 64):
    print(f"8 stages, {M:2} micro-batches: {7 / (M + 7):.0%} idle")

# %% [markdown]
# ## More exercises
#
# 1. Divide attention by heads: given wq, wk, wv, wo, what are the parts of rank r, and what is
#    summed?
# 2. RMSNorm comes between two divided layers. Must its input be summed before? Could each rank norm
#    a part of the tokens instead? (This is *sequence parallelism*.)
# 3. Read `xtrain/communicator.py` and find where the order of additions is fixed.
#
# <details><summary>Solutions</summary>
#
# 1: rows of wq, wk, wv of its heads, columns of wo that belong to them; the outputs of wo are
# summed. With grouped queries a rank needs whole groups. 2: yes, the norm needs the whole row; so
# reduce-scatter over tokens, norm, all-gather: the same traffic as the all-reduce, and the norm's
# work is divided, too.
#
# </details>
#
# ## Sources
#
# - M. Shoeybi et al., *Megatron-LM*, 2019: tensor parallelism. V. Korthikanti et al., 2022:
#   sequence parallelism.
# - S. Rajbhandari et al., *ZeRO*, 2020; Y. Zhao et al., *PyTorch FSDP*, 2023.
# - Y. Huang et al., *GPipe*, 2019.
# - NVIDIA, *PTX ISA*: `cp.async.bulk.tensor`, `mbarrier`, `wgmma`. J. Shah et al.,
#   *FlashAttention-3*, 2024.
