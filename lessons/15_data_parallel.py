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
# # 15 Data parallel
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/15_data_parallel.ipynb)
#
# *About 75 minutes. You need [lesson 8](08_training.ipynb), a training step from loss to AdamW. No
# GPU: the ranks are played in this notebook.*
#
# **The question.** Four GPUs each hold the same model, and each takes a quarter of the batch. After
# the step they must hold the same model again, to the last bit, for thousands of steps. What has to
# be sent, how little of it, and when, so that nobody waits?
#
# The one idea: gradients are **sums over tokens**, so the ranks' gradients add up to the gradient
# of the whole batch. All the rest is how to add.

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
from collections import Counter

import numpy as np

from xtrain import lesson


def part(n, world, rank):
    """The rank's part of n elements, as a slice: they are divided evenly."""
    return slice(n // world * rank, n // world * (rank + 1))


def play(ranks):
    """Run generators, one per rank, each up to its next `yield`, which is a barrier."""
    while ranks:
        ranks = [r for r in ranks if next(r, "ended") != "ended"]


# %% [markdown]
# ## One batch, two ranks, by hand
#
# A *rank* is one process with one GPU; R of them make a *world*. Take the smallest model there is,
# y = x w, and the mean of squared errors over all tokens that have a target:
#
# $$L = \frac{1}{n} \sum_{i} (x_i w - t_i)^2 \qquad \frac{dL}{dw} = \frac{1}{n} \sum_i 2 (x_i w - t_i) \, x_i$$
#
# B, T = 2, 3: two sequences of three tokens. The second sequence is shorter, its last two tokens
# have no target. Each rank takes one sequence:

# %%
w = 2.0
x = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
t = np.array([[1.0, 3.0, 7.0], [9.0, np.nan, np.nan]])  # nan: no target
valid = ~np.isnan(t)
terms = np.where(valid, 2 * (x * w - np.nan_to_num(t)) * x, 0)
print("terms of the sum, by sequence:\n", terms)
n_all, n_own = valid.sum(), valid.sum(1)
print("the whole batch:               ", terms.sum() / n_all)
print("sum of shares, each / n of all:", sum(terms.sum(1) / n_all))
print("mean of the ranks' own means:  ", np.mean(terms.sum(1) / n_own))

# %% [markdown]
# The last line is what one writes first, and it is wrong as soon as ranks have different numbers of
# targets: a rank with few tokens counts as much as one with many. So each rank must know the number
# of **all** targets *before* its backward. That is one number to be added up, and the reference is
# the first line: one process that sees everything.
#
# ## Exercise 15.1: a rank's share
#
# `total(v)` gives the sum of v over all ranks; every rank calls it once. Targets that are NaN do
# not count.


# %% tags=["exercise"]
def share(x_NI, t_N, w_I, total):
    """-> (I,): this rank's share of dL/dw, such that the shares of all ranks add up to it.

    L is the mean of (x w - t)^2 over all targets of all ranks that are not NaN.
    """
    # YOUR CODE


# %%
lesson.check("15.1", share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `valid = ~np.isnan(t_N)`, then work with `x_NI[valid]` and `t_N[valid]` alone. The gradient of the
# sum of squares is `2 * (x w - t) @ x`.
#
# </details>


# %% tags=["solution"]
# Solution 15.1
def share(x_NI, t_N, w_I, total):
    """-> (I,): this rank's share of dL/dw, such that the shares of all ranks add up to it.

    L is the mean of (x w - t)^2 over all targets of all ranks that are not NaN.
    """
    valid = ~np.isnan(t_N)
    count = total(valid.sum())
    error = x_NI[valid] @ w_I - t_N[valid]
    return 2 * error @ x_NI[valid] / count


# %% [markdown]
# The same with a real model of the library, two ranks one after the other. `model.loss` takes 1 /
# count of the whole batch; -100 marks a token without a target.

# %%
import xtrain

config = xtrain.ModelConfig(vocab_size=32, dim=16, n_layers=2, n_heads=2, max_seq_len=8)
random = np.random.default_rng(0)
ids = random.integers(0, 32, (4, 8))
targets = random.integers(0, 32, (4, 8))
targets[3, 2:] = -100


def gradient(rows):
    """The arena of gradients after backward of these sequences."""
    model = xtrain.Transformer(config, seed=0, device="cpu")
    count = np.array([1 / np.count_nonzero(targets != -100)], np.float32)
    model.loss(ids[rows], targets[rows], count).backward()
    return model.arena.grads.copy()


whole = gradient(slice(0, 4))
shares = [gradient(slice(0, 2)), gradient(slice(2, 4))]
print(f"{whole.size:,} gradients in one array, the arena")
summed = shares[0] + shares[1]
print("the shares add up to the whole, to 1e-6:", np.allclose(summed, whole, atol=1e-6))

# %% [markdown]
# ## All-reduce: adding arrays that lie on different GPUs
#
# Every rank has an array of n gradients, every rank wants the sum. The obvious way, everybody reads
# everybody's array, moves (R - 1) n numbers into each rank. And it has a second fault. Floats do
# not add up in any order to the same bits ([lesson 3](03_reductions.ipynb)). If each rank begins
# with its own array, each has another order:

# %%
arrays = [random.standard_normal(100_000).astype(np.float32) for _ in range(4)]
own_first = [sum((arrays[(r + i) % 4] for i in range(1, 4)), arrays[r]) for r in range(4)]
differ = np.mean(own_first[0] != own_first[1])
print(f"elements in which rank 0 and rank 1 differ: {differ:.0%}")
print(f"largest difference: {np.abs(own_first[0] - own_first[1]).max():.1e}")

# %% [markdown]
# A last bit, one might say. But the weights differ from then on, the next gradients are computed at
# different weights, and nobody notices: every rank's loss looks fine. After a week one trains R
# models that drift apart.
#
# Both faults vanish with one plan. **Each element is added up by one rank, its owner, and then
# copied.**
#
# - *reduce-scatter*: rank r reads part r of everybody else and adds it to its own part r;
# - a barrier: all parts are final;
# - *all-gather*: rank r copies part s from rank s, for all s.
#
# In each half a rank reads R - 1 parts of n / R elements, so both halves together move
#
# $$2 \, n \, \frac{R - 1}{R}$$
#
# numbers into each rank: less than 2 n however many ranks there are. And whoever copies a sum has
# the same bits.

# %%
print("ranks   everybody reads all   reduce-scatter + all-gather   (in arrays of n)")
for R in (2, 4, 8, 64):
    print(f"{R:5}   {R - 1:19}   {2 * (R - 1) / R:27.3f}")

# %% [markdown]
# ## Exercise 15.2: all-reduce
#
# Write what **one** rank does. `read(rank, a, b)` gives a copy of elements a to b of another rank's
# array. `yield`, alone on a line, is a barrier: nobody goes on before all ranks are there. (A
# function with `yield` is a generator; `play` runs all ranks from barrier to barrier, one after the
# other. The check does the same.) `part(n, world, rank)` is given above.


# %% tags=["exercise"]
def all_reduce(me, world, own_n, read):
    """own (n,) float32 becomes, in place, the sum over ranks, the same bits on all.

    n is a multiple of world. At the start all arrays are complete.
    """
    # YOUR CODE


# %%
lesson.check("15.2", all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `mine = part(own_n.size, world, me)`. For every other rank: `own_n[mine] += read(rank, mine.start,
# mine.stop)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Then `yield`. Then for every other rank its part: `theirs = part(own_n.size, world, rank)`, and
# `own_n[theirs] = read(rank, theirs.start, theirs.stop)`.
#
# </details>


# %% tags=["solution"]
# Solution 15.2
def all_reduce(me, world, own_n, read):
    """own (n,) float32 becomes, in place, the sum over ranks, the same bits on all.

    n is a multiple of world. At the start all arrays are complete.
    """
    mine = part(own_n.size, world, me)
    others = [(me + i) % world for i in range(1, world)]
    for rank in others:
        own_n[mine] += read(rank, mine.start, mine.stop)
    yield
    for rank in others:
        theirs = part(own_n.size, world, rank)
        own_n[theirs] = read(rank, theirs.start, theirs.stop)


# %%
def reader(arrays):
    return lambda rank, a, b: arrays[rank][a:b].copy()


by_play = [a.copy() for a in arrays]
play([all_reduce(me, 4, by_play[me], reader(by_play)) for me in range(4)])
print("the same bits on all ranks:", all(np.array_equal(by_play[0], a) for a in by_play))
print("the sum, to 1e-5:", np.allclose(by_play[0], sum(arrays), atol=1e-5))

# %% [markdown]
# Each rank begins with another neighbour, `me + 1`: so nobody is read by all at once.
#
# ## When to send
#
# Backward runs from the loss down to the embedding. The gradient of the last layer is final long
# before that of the first, and could travel while backward goes on. As a picture, with invented
# lengths:

# %%
backward = [(0, 2, "head"), (2, 4, "layer 2"), (4, 6, "layer 1"), (6, 7, "embedding")]
sending = [(2, 3.3, "head"), (4, 4.8, "layer 2"), (6, 6.8, "layer 1"), (7, 8.1, "embedding")]
lesson.figures.timeline(
    {
        "flat: computing": backward,
        "flat: sending": [(7, 11, "all")],
        "overlap: computing": backward,
        "overlap: sending": sending,
    },
    "one message after backward, or pieces on their way during backward",
)

# %% [markdown]
# Two things decide how to cut. A message costs some time however short it is, so there should be
# few; and a piece can leave only when *all* gradients in it are final, so they should not be too
# long either. Hence **buckets**: slices of the arena of one size, whatever parameters lie in them.
#
# When is a gradient final? Not when something was added to it for the first time: a tied embedding
# is used at the start and at the end of the model, and gets two additions.
#
# ## Exercise 15.3: which bucket may leave
#
# `order` lists the parameters in the order in which backward adds to their gradients; one that is
# used twice is in it twice. After each addition: which buckets, that could not leave before, may
# leave now?


# %% tags=["exercise"]
def schedule(order, spans, buckets):
    """-> for each addition in `order`, the numbers of the buckets that may leave right
    after it.

    A list of lists: [[0], [], [1, 2]]. spans: {parameter: (a, b)}, elements a to b - 1 of
    the arena. buckets: [(a, b), ...], which cover the arena. A bucket may leave when
    nothing will be added any more to any parameter that lies in it, wholly or partly.
    """
    # YOUR CODE


# %%
lesson.check("15.3", schedule)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `left = Counter(order)` counts how many additions are still to come, for each parameter. [a, b)
# and [p, q) have elements in common if p < b and a < q.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A list `left_at` of the buckets that have left already keeps each of them from leaving twice.
#
# </details>


# %% tags=["solution"]
# Solution 15.3
def schedule(order, spans, buckets):
    """-> for each addition in `order`, the numbers of the buckets that may leave right
    after it.

    A list of lists: [[0], [], [1, 2]]. spans: {parameter: (a, b)}, elements a to b - 1 of
    the arena. buckets: [(a, b), ...], which cover the arena. A bucket may leave when
    nothing will be added any more to any parameter that lies in it, wholly or partly.
    """
    left, gone, leaves = Counter(order), set(), []
    for name in order:
        left[name] -= 1
        ready = []
        for i, (a, b) in enumerate(buckets):
            inside = [n for n, (p, q) in spans.items() if p < b and a < q]
            if i not in gone and all(left[n] == 0 for n in inside):
                ready.append(i)
        gone.update(ready)
        leaves.append(ready)
    return leaves


# %%
spans = {"embedding": (0, 40), "layer 1": (40, 60), "layer 2": (60, 80), "norm": (80, 90)}
cut = [(80, 90), (50, 80), (20, 50), (0, 20)]
tied = ["embedding", "norm", "layer 2", "layer 1", "embedding"]  # the head is the embedding
for name, ready in zip(tied, schedule(tied, spans, cut)):
    print(f"added to {name:10} leaves: {ready}")

# %% [markdown]
# Bucket 2 holds a piece of layer 1 and a piece of the embedding, so it waits for the embedding, to
# the very end.
#
# ## Measure
#
# How long is the part that nothing can hide? What backward completes last, the embedding, travels
# when there is nothing left to compute. In xtrain's smallest GPU model:

# %%
c = xtrain.ModelConfig(
    vocab_size=50257, dim=384, n_layers=12, n_heads=12, hidden_dim=1536, max_seq_len=256
)
per_layer = 4 * c.dim**2 + 3 * c.dim * c.hidden_dim
embedding = c.vocab_size * c.dim
total_parameters = 2 * embedding + c.n_layers * per_layer
print(f"{total_parameters / 1e6:.1f} M parameters in matrices,")
print(f"{embedding / 1e6:.1f} M of them the embedding:")
print(f"{embedding / total_parameters:.0%} of all bytes can leave only when backward has ended")

# %% [markdown]
# And what do many short messages cost? The records of whole steps on four H200s also hold what the
# messages take with nothing else to do: all gradients of that model in one (`flat`), in buckets of
# 32 MiB, and in one message per parameter (`naive`), all three by NCCL, NVIDIA's library for
# messages between GPUs.

# %%
small = xtrain.ModelConfig(vocab_size=32, dim=16, n_layers=12, n_heads=2, max_seq_len=8)
parameters = len(list(xtrain.Transformer(small, device="cpu").storage()))
buckets = -(-4 * total_parameters // 2**25) + 1  # and a short one for the norms' weights
measured = {
    1: lesson.record("bench_ddp/dim384, 4 GPU, flat/bf16")["comm_ms"],
    buckets: lesson.record("bench_ddp/dim384, 4 GPU, bucket 32 MiB nccl fp32/bf16")["comm_ms"],
    parameters: lesson.record("bench_ddp/dim384, 4 GPU, naive/bf16")["comm_ms"],
}
each = (measured[parameters] - measured[1]) / (parameters - 1)
print("messages   ms in all   ms if a message cost nothing but", f"{1e3 * each:.0f} us more")
for pieces, ms in measured.items():
    print(f"{pieces:8}   {ms:9.2f}   {measured[1] + each * (pieces - 1):9.2f}")

# %%
lesson.figures.bars(
    {f"{p} message{'s' * (p > 1)}": ms for p, ms in measured.items()},
    "ms",
    "67 million float32, four GPUs, all-reduce",
)

# %% [markdown]
# A message per parameter, `--dp overlap`, hides its communication and multiplies it.
#
# **The improvement of this lesson:** overlap hides what can be hidden, and buckets make it cheap:
# nine messages take about a sixth longer than a single one, 99 more than twice as long.
#
# Whole steps of that model on four GPUs, in the order of the stages. `none` leaves communication
# out; what a step takes above it is *exposed*. (`copy` is a subject of the next section, ZeRO-1 of
# [lesson 16](16_memory.ipynb).)

# %%
stages = [
    "bench_ddp/dim384, 4 GPU, none/bf16",
    "bench_ddp/dim384, 4 GPU, naive/bf16",
    "bench_ddp/dim384, 4 GPU, flat/bf16",
    "bench_ddp/dim384, 4 GPU, overlap/bf16",
    "bench_ddp/dim384, 4 GPU, bucket 32 MiB nccl fp32/bf16",
    "bench_ddp/dim384, 4 GPU, bucket 32 MiB copy fp32/bf16",
    "bench_ddp/dim384, 4 GPU, bucket 32 MiB copy fp32 ZeRO-1/bf16",
]
columns = {"ms": "ms", "exposed": "exposed_ms", "alone": "comm_ms"}
lesson.table(stages, columns | {"linear": lambda r: f"{r['of_linear']:.0%}"})

# %% [markdown]
# *Alone* is how long the same messages take with nothing else to do, *linear* the share of what the
# four GPUs do by themselves. A message per parameter takes as long for `naive` as for `overlap`;
# the one exposes all of it, and waits at every message besides, the other hides a part. `flat`
# sends one message and hides nothing. The last three hide and send few. Between them stands the
# next question:
#
# ## Who does the copying?
#
# One more cost does not show on a time line. NCCL adds and copies with *kernels*. They occupy
# multiprocessors, and a matrix product that was laid out for all of them then needs a second round.
# The docstring of `peer.py`, xtrain's own way between the GPUs of one machine (NVLink is what
# connects them):

# %%
from xtrain.parallel import copy_collectives as peer

print(peer.__doc__.split("\n\n")[1])

# %% [markdown]
# ## The library's kernel
#
# There is none: the ranks' work is two copies and an addition, your exercise 15.2 with one rank
# per GPU, `_copy` instead of `read` and a barrier of flags in GPU memory. Two things differ. The
# owner does not wait to be read: it *sends* its sum, into memory that nobody else needs any more,
# so the second barrier goes. And when backward is over (`idle`), the addition itself reads the
# neighbour's memory: nobody needs the multiprocessors then, and a copy less is time saved.

# %%
lesson.source(peer.CopyCollectives.all_reduce)
lesson.source(peer.CopyCollectives._reduce)
lesson.source(peer.CopyCollectives._send)

# %% [markdown]
# The stages, from the simplest to the fastest, each a class of a few lines. `Naive` is the
# specification: the tests compare all others with it.

# %%
from xtrain.parallel import ddp

lesson.source(ddp.Naive)
lesson.source(ddp.Flat)

# %% [markdown]
# Your 15.3 as it runs: autograd calls `added` after every addition. The first backward only counts
# the uses; `progress` reminds MPI, which works inside its calls only.

# %%
lesson.source(ddp.Overlap.added)

# %%
lesson.source(ddp.buckets)

# %% [markdown]
# And rank 0 is not trusted either: `--check-ranks 100` compares a hash of all weights of all ranks
# every 100 steps, and ends the run when they differ.
#
# ## What did not help
#
# *A thread per GPU in one process.* The program that xtrain descends from (Rust and CUDA C++, on
# RTX 5090 cards) did that. Its log: forward and backward of the **same** work per rank, in
# milliseconds, by the number of GPUs:

# %%
forward_backward = {"1 GPU": 136, "2 GPUs": 202, "4 GPUs": 342, "8 GPUs": 780}
lesson.figures.bars(forward_backward, "ms", "a thread per GPU: the same work per GPU")

# %% [markdown]
# It was believed that communication was slow. The measurement that settled it was to switch
# communication *off*: the times stayed. All-reduce was 6 to 7 % of the step. The threads queued for
# each other at every call into the driver, above all at the allocation of memory, several per
# operation. Four GPUs were 1.41 times as fast as one, eight slower than four. So xtrain has a
# **process** per GPU, and takes no memory from the driver once the first steps are done ([lesson
# 16](16_memory.ipynb)). And it keeps the experiment at hand: `--dp none` computes without
# communicating.
#
# *Grouping all all-reduces into one NCCL group* gave that program no speed either, and broke the
# identity of the ranks: the largest difference of a weight went from 0 to 1.5e-8. With NCCL 2.28
# every variant tried gave identical bits; but a check costs little, and reduce-scatter with
# all-gather is identical by construction.
#
# ## More exercises
#
# 1. Change `all_reduce` so that the gradients travel rounded to half precision (`np.float16` will
#    do here), and are added in float32. Are the ranks still identical? Which line decides?
# 2. Gradient accumulation: each rank makes 4 backwards before a step. After which of them must
#    gradients travel?
# 3. Two machines with four GPUs each, fast inside, slow between them. Which plan moves the fewest
#    numbers between the machines?
# 4. If you have mpi4py: `mpirun -n 2 python -m xtrain.ddp --help`, then train on two processes of
#    your laptop, once with `--dp naive` and once with `--dp bucket`. Compare the losses.
#
# <details><summary>Solutions</summary>
#
# 1: Round before reading and once more after adding: every rank, the owner too, must use the
# rounded sum that the others copy. `own_n[mine]` has to be rounded after the sum is complete, else
# the owner alone keeps more digits. 2: Only after the last; the arena adds up. All four use 1 /
# count of the whole batch. 3: Reduce-scatter inside each machine, all-reduce of each part between
# the two, all-gather inside: n / 4 numbers per GPU pass between the machines, in each direction. 4:
# They agree to rounding: the order of additions is another one.
#
# </details>
#
# ## Sources
#
# - S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB
#   2020: buckets and overlap.
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in
#   MPICH*, 2005: reduce-scatter and all-gather.
# - NVIDIA, *NCCL* documentation, "Collective Operations".
# - Hugging Face, *picotron*: naive first, then buckets, in a teaching code.
