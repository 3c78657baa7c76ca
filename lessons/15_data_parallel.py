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
# *About 75 minutes. You need [lesson 8](08_training.ipynb), a training step from loss to AdamW. You
# need no GPU: this notebook simulates the ranks.*
#
# **The question.** Four GPUs each hold the same model, and each takes a quarter of the batch. After
# the step they must again hold the same model, to the last bit, for thousands of steps. What has to
# be sent, how little of it, and when, so that no GPU waits?
#
# The one new idea: gradients are **sums over tokens**, so the ranks' gradients add up to the
# gradient of the whole batch. The rest is how to add them.

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
    """The slice of n elements that the rank owns: they are divided evenly."""
    return slice(n // world * rank, n // world * (rank + 1))


def play(ranks):
    """Run generators, one per rank, each up to its next `yield`, which acts as a barrier."""
    while ranks:
        ranks = [r for r in ranks if next(r, "ended") != "ended"]


# %% [markdown]
# ## One batch, two ranks, by hand
#
# A *rank* is one process with one GPU; R ranks make a *world*. Take the simplest possible model, y
# = x w, and the mean of squared errors over all tokens that have a target:
#
# $$L = \frac{1}{n} \sum_{i} (x_i w - t_i)^2 \qquad \frac{dL}{dw} = \frac{1}{n} \sum_i 2 (x_i w - t_i) \, x_i$$
#
# B, T = 2, 3: two sequences of three tokens. The second sequence is shorter: its last two tokens
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
# The last line is the obvious implementation, and it is wrong as soon as ranks have different
# numbers of targets: a rank with few tokens counts as much as one with many. So each rank must know
# the number of **all** targets *before* its backward pass. That requires summing one number over
# the ranks. The reference is the first line: one process that sees the whole batch.
#
# ## Exercise 15.1: a rank's share
#
# `total(v)` returns the sum of v over all ranks; every rank calls it once. Targets that are NaN do
# not count.


# %% tags=["exercise"]
def share(x_NI, t_N, w_I, total):
    """-> (I,): this rank's share of dL/dw. The shares of all ranks add up to dL/dw.

    L is the mean of (x w - t)^2 over all targets of all ranks that are not NaN.
    """
    # YOUR CODE


# %%
lesson.check("15.1", share)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute `valid = ~np.isnan(t_N)`, then use only `x_NI[valid]` and `t_N[valid]`. The gradient of
# the sum of squares is `2 * (x w - t) @ x`.
#
# </details>


# %% tags=["solution"]
# Solution 15.1
def share_solution(x_NI, t_N, w_I, total):
    """-> (I,): this rank's share of dL/dw. The shares of all ranks add up to dL/dw.

    L is the mean of (x w - t)^2 over all targets of all ranks that are not NaN.
    """
    valid = ~np.isnan(t_N)
    count = total(valid.sum())
    error = x_NI[valid] @ w_I - t_N[valid]
    return 2 * error @ x_NI[valid] / count


share = lesson.yours(share, share_solution)


# %% [markdown]
# Do the same with a real model of the library, with two ranks one after the other. `model.loss`
# takes 1 / count of the whole batch; -100 marks a token without a target.

# %%
import xtrain

config = xtrain.ModelConfig(vocab_size=32, dim=16, n_layers=2, n_heads=2, max_seq_len=8)
random = np.random.default_rng(0)
ids = random.integers(0, 32, (4, 8))
targets = random.integers(0, 32, (4, 8))
targets[3, 2:] = -100


def gradient(rows):
    """The arena of gradients after a backward pass on these sequences."""
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
# ## All-reduce: adding arrays on different GPUs
#
# Every rank has an array of n gradients, and every rank needs the sum. The obvious method, in which
# every rank reads all other ranks' arrays, moves (R - 1) n numbers into each rank. It also has a
# second fault. Floating-point sums in different orders do not give the same bits ([lesson
# 3](03_reductions.ipynb)). If each rank starts with its own array, each uses a different order:

# %%
arrays = [random.standard_normal(100_000).astype(np.float32) for _ in range(4)]
own_first = [sum((arrays[(r + i) % 4] for i in range(1, 4)), arrays[r]) for r in range(4)]
differ = np.mean(own_first[0] != own_first[1])
print(f"elements in which rank 0 and rank 1 differ: {differ:.0%}")
print(f"largest difference: {np.abs(own_first[0] - own_first[1]).max():.1e}")

# %% [markdown]
# Only the last bit, you might think. But from then on the weights differ, the next gradients are
# computed at different weights, and there is no visible symptom: every rank's loss looks fine.
# After a week of training, you have R models that drift apart.
#
# One plan removes both faults. **Each element is summed by one rank, its owner, and then copied.**
#
# - *reduce-scatter*: rank r reads part r of every other rank's array and adds it to its own part r;
# - a barrier: all parts are final;
# - *all-gather*: rank r copies part s from rank s, for all s.
#
# In each half, a rank reads R - 1 parts of n / R elements, so both halves together move
#
# $$2 \, n \, \frac{R - 1}{R}$$
#
# numbers into each rank: less than 2 n, however many ranks there are. And every rank that copies a
# sum has the same bits as its owner.

# %%
print("ranks   every rank reads all   reduce-scatter + all-gather   (in arrays of n)")
for R in (2, 4, 8, 64):
    print(f"{R:5}   {R - 1:20}   {2 * (R - 1) / R:27.3f}")

# %% [markdown]
# ## Exercise 15.2: all-reduce
#
# Write the code of **one** rank. `read(rank, a, b)` returns a copy of elements a to b - 1 of
# another rank's array. A `yield` alone on a line is a barrier: no rank continues before all ranks
# have reached it. (A function with `yield` is a generator; `play` runs all ranks from barrier to
# barrier, one after the other. The check does the same.) `part(n, world, rank)` is defined above.


# %% tags=["exercise"]
def all_reduce(me, world, own_n, read):
    """own (n,) float32 becomes, in place, the sum over ranks, with the same bits on all ranks.

    n is a multiple of world. Initially, every rank's array is complete.
    """
    # YOUR CODE


# %%
lesson.check("15.2", all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Let `mine = part(own_n.size, world, me)`. For every other rank:
# `own_n[mine] += read(rank, mine.start, mine.stop)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Then `yield`. Then copy the part of every other rank: `theirs = part(own_n.size, world, rank)`,
# and `own_n[theirs] = read(rank, theirs.start, theirs.stop)`.
#
# </details>


# %% tags=["solution"]
# Solution 15.2
def all_reduce_solution(me, world, own_n, read):
    """own (n,) float32 becomes, in place, the sum over ranks, with the same bits on all ranks.

    n is a multiple of world. Initially, every rank's array is complete.
    """
    mine = part(own_n.size, world, me)
    others = [(me + i) % world for i in range(1, world)]
    for rank in others:
        own_n[mine] += read(rank, mine.start, mine.stop)
    yield
    for rank in others:
        theirs = part(own_n.size, world, rank)
        own_n[theirs] = read(rank, theirs.start, theirs.stop)


all_reduce = lesson.yours(all_reduce, all_reduce_solution)


# %%
def reader(arrays):
    return lambda rank, a, b: arrays[rank][a:b].copy()


by_play = [a.copy() for a in arrays]
play([all_reduce(me, 4, by_play[me], reader(by_play)) for me in range(4)])
print("same bits on all ranks:", all(np.array_equal(by_play[0], a) for a in by_play))
print("the sum, to 1e-5:", np.allclose(by_play[0], sum(arrays), atol=1e-5))

# %% [markdown]
# Each rank starts with a different neighbour, `me + 1`, so that the ranks do not all read from the
# same one at the same time.
#
# ## When to send
#
# Backward runs from the loss down to the embedding. The gradient of the last layer is final long
# before that of the first, so it can be sent while backward continues. As a timeline, with invented
# durations:

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
    "one message after backward, or one per piece during backward",
)

# %% [markdown]
# Two costs determine how to split the gradients. Every message has a fixed cost, so there should be
# few. And a piece can be sent only when *all* gradients in it are final, so pieces should not be
# too large either. The compromise is **buckets**: slices of the arena of equal size, regardless of
# parameter boundaries.
#
# When is a gradient final? Not after the first addition: a tied embedding is used at the start and
# at the end of the model, so its gradient receives two additions.
#
# ## Exercise 15.3: which buckets are ready
#
# `order` lists the parameters in the order in which backward adds to their gradients; a parameter
# that is used twice appears twice. After each addition, which further buckets become ready to be
# sent?


# %% tags=["exercise"]
def schedule(order, spans, buckets):
    """-> for each addition in `order`, the numbers of the buckets that become ready
    right after it.

    A list of lists: [[0], [], [1, 2]]. spans: {parameter: (a, b)}, elements a to b - 1 of
    the arena. buckets: [(a, b), ...], which cover the arena. A bucket is ready when no
    further addition will change any parameter that lies in it, wholly or partly.
    """
    # YOUR CODE


# %%
lesson.check("15.3", schedule)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `left = Counter(order)` counts the remaining additions to each parameter. [a, b) and [p, q) have
# elements in common if p < b and a < q.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Keep a set of the buckets that have already been reported, so that none is reported twice.
#
# </details>


# %% tags=["solution"]
# Solution 15.3
def schedule_solution(order, spans, buckets):
    """-> for each addition in `order`, the numbers of the buckets that become ready
    right after it.

    A list of lists: [[0], [], [1, 2]]. spans: {parameter: (a, b)}, elements a to b - 1 of
    the arena. buckets: [(a, b), ...], which cover the arena. A bucket is ready when no
    further addition will change any parameter that lies in it, wholly or partly.
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


schedule = lesson.yours(schedule, schedule_solution)


# %%
spans = {"embedding": (0, 40), "layer 1": (40, 60), "layer 2": (60, 80), "norm": (80, 90)}
cut = [(80, 90), (50, 80), (20, 50), (0, 20)]
tied = ["embedding", "norm", "layer 2", "layer 1", "embedding"]  # the head is the embedding
for name, ready in zip(tied, schedule(tied, spans, cut)):
    print(f"after adding to {name:10} ready: {ready}")

# %% [markdown]
# Bucket 2 holds part of layer 1 and part of the embedding, so it must wait for the embedding, until
# the very end.
#
# ## Measure
#
# How much communication can never be hidden? The gradient that backward completes last, the
# embedding's, is sent when nothing is left to compute. In xtrain's smallest GPU model:

# %%
c = xtrain.ModelConfig(
    vocab_size=50257, dim=384, n_layers=12, n_heads=12, hidden_dim=1536, max_seq_len=256
)
per_layer = 4 * c.dim**2 + 3 * c.dim * c.hidden_dim
embedding = c.vocab_size * c.dim
total_parameters = 2 * embedding + c.n_layers * per_layer
print(f"{total_parameters / 1e6:.1f} M parameters in matrices,")
print(f"{embedding / 1e6:.1f} M of them in the embedding:")
print(f"{embedding / total_parameters:.0%} of all bytes can be sent only when backward has ended")

# %% [markdown]
# And what do many short messages cost? The records of whole steps on four H200s also contain the
# time of the messages alone, with no computation at the same time. All gradients of that model are
# sent in one message (`flat`), in buckets of 32 MiB, and in one message per parameter (`naive`).
# All three use NCCL, NVIDIA's library for communication between GPUs.

# %%
small = xtrain.ModelConfig(vocab_size=32, dim=16, n_layers=12, n_heads=2, max_seq_len=8)
parameters = len(list(xtrain.Transformer(small, device="cpu").storage()))
buckets = -(-4 * total_parameters // 2**25) + 1  # plus a short one for the norm weights
measured = {
    1: lesson.record("bench_ddp/dim384, 4 GPU, flat/bf16")["comm_ms"],
    buckets: lesson.record("bench_ddp/dim384, 4 GPU, bucket 32 MiB nccl fp32/bf16")["comm_ms"],
    parameters: lesson.record("bench_ddp/dim384, 4 GPU, naive/bf16")["comm_ms"],
}
each = (measured[parameters] - measured[1]) / (parameters - 1)
print("messages   ms in total   ms if each further message cost a fixed", f"{1e3 * each:.0f} us")
for pieces, ms in measured.items():
    print(f"{pieces:8}   {ms:11.2f}   {measured[1] + each * (pieces - 1):9.2f}")

# %%
lesson.figures.bars(
    {f"{p} message{'s' * (p > 1)}": ms for p, ms in measured.items()},
    "ms",
    "67 million float32, four GPUs, all-reduce",
)

# %% [markdown]
# One message per parameter, sent during backward (`--dp overlap`), hides part of the communication
# but also multiplies it.
#
# **The improvement of this lesson:** overlap hides communication behind backward, and buckets keep
# its cost low: nine messages take about a fifth longer than a single one, 99 messages more than
# three times as long.
#
# Here are whole steps of that model on four GPUs, in the order of the stages. `none` omits
# communication; any time above it is *exposed*. (The next section explains `copy`, and [lesson
# 16](16_memory.ipynb) ZeRO-1.)

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
# *Alone* is the time of the same messages without any computation. *Linear* is the throughput as a
# share of the sum of what the four GPUs reach when each trains alone. One message per parameter
# takes the same time alone for `naive` and for `overlap`; `naive` exposes all of it, and also waits
# after every message, while `overlap` hides part of it. `flat` sends one message and hides nothing.
# The last three stages send few messages and hide part of their time. What distinguishes those
# three is the next question:
#
# ## Who does the copying?
#
# One more cost is not visible on a timeline. NCCL adds and copies with *kernels*. They occupy
# multiprocessors, and a matrix product whose grid was sized for all multiprocessors then needs a
# second wave. xtrain has its own method for the GPUs of one machine, which are connected by NVLink.
# The docstring of its module `parallel/copy_collectives.py` says:

# %%
from xtrain.parallel import copy_collectives as peer

print(peer.__doc__.split("\n\n")[1])

# %% [markdown]
# ## The library's kernel
#
# There is no kernel for the whole all-reduce: the ranks' work is two copies and an addition. This
# is your exercise 15.2 with one rank per GPU, `_copy` instead of `read`, and a barrier of flags in
# GPU memory. Two things differ. First, an owner does not wait for the others to read its sum: it
# *sends* the sum into memory that no rank needs any more, so the second barrier is unnecessary.
# Second, when backward is over (`idle`), the multiprocessors have nothing else to do. Then the
# addition reads the memory of all neighbours directly, and a kernel sends to all of them at once
# (`kernels/peers.py`): copies of a few megabytes, one after the other, leave the link idle for a
# part of the time.

# %%
lesson.source(peer.CopyCollectives.all_reduce)
lesson.source(peer.CopyCollectives._reduce)
lesson.source(peer.CopyCollectives._add_neighbours)
lesson.source(peer.CopyCollectives._send)

# %% [markdown]
# The stages are, from the simplest to the fastest, classes of a few lines each. `Naive` is the
# specification: the tests compare all others with it.

# %%
from xtrain.parallel import ddp

lesson.source(ddp.Naive)
lesson.source(ddp.Flat)

# %% [markdown]
# Here is your 15.3 in the library: autograd calls `added` after every addition. The first backward
# only counts the uses, and rank 0 decides the order in which all ranks send: collectives are matched
# by it. `progress` gives MPI a chance to work, because MPI makes progress only inside its calls.

# %%
lesson.source(ddp.Overlap.added)

# %%
from xtrain.parallel import zero

lesson.source(ddp.buckets)
lesson.source(zero.cut)

# %% [markdown]
# The library also verifies that the ranks agree: `--check-ranks 100` compares a hash of all weights
# across all ranks every 100 steps, and stops the run if they differ.
#
# ## What did not help
#
# *One thread per GPU in a single process.* The threads share one context of the driver and wait for each other at every
# call into it, above all at memory allocation. So forward and backward take longer the more GPUs there are, although the
# work of each is the same. Is communication slow? The experiment that answers it is to switch communication *off*:
# `--dp none` computes without communicating. xtrain runs one **process** per GPU and allocates no memory from the driver
# after the first steps ([lesson 16](16_memory.ipynb)).
#
# *Taking it for granted that all ranks get the same bits.* An algorithm in which two ranks add in different orders breaks
# it. A check costs little, and reduce-scatter followed by all-gather is identical by construction.
#
# ## More exercises
#
# 1. Change `all_reduce` so that gradients are sent rounded to half precision (`np.float16` will do
#    here) and are added in float32. Are the ranks still identical? Which line decides?
# 2. Gradient accumulation: each rank runs 4 backward passes per optimizer step. After which of them
#    must gradients be sent?
# 3. Two machines have four GPUs each, with fast links inside a machine and a slow link between
#    them. Which plan moves the fewest numbers between the machines?
# 4. If you have mpi4py: run `mpirun -n 2 python -m xtrain.ddp --help`, then train with two
#    processes on your laptop, once with `--dp naive` and once with `--dp bucket`. Compare the
#    losses.
#
# <details><summary>Solutions</summary>
#
# 1: Round before sending and once more after adding: every rank, including the owner, must use the
# rounded sum that the others copy. `own_n[mine]` has to be rounded after the sum is complete;
# otherwise only the owner keeps more digits. 2: Only after the last one, because the arena
# accumulates. All four use 1 / count of the whole batch. 3: Reduce-scatter inside each machine,
# then an all-reduce of each part between the two machines, then all-gather inside: n / 4 numbers
# per GPU cross between the machines, in each direction. 4: They agree up to rounding: the order of
# additions differs.
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
# - Hugging Face, *picotron*: naive first, then buckets, in teaching code.
