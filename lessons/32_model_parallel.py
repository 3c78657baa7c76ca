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
# # 32 Splitting a model
#
# *About 90 minutes. You need [lesson 15](15_data_parallel.ipynb) and [lesson 16](16_memory.ipynb).
# You need no GPU and no MPI: the notebook runs the ranks as threads. The last sections run the same
# code on real ranks.*
#
# **The question.** In data parallelism every GPU holds the whole model. What if one GPU cannot hold
# it, or if one token must be faster than one GPU can make it? Then the *model* is split. Which
# parts can the ranks compute without each other, what must they send, and how do you know that the
# result is still that of the whole model?
#
# The one new idea: **split an operation where its parts do not depend on each other, and
# communicate only where they meet**. You will write a ring all-reduce, split an MLP and attention
# over ranks (tensor parallelism), and train with weights of which every rank has only a part
# (FSDP). Each is compared with the unsplit computation.

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


def part(n, world, rank):
    """The slice of n things that the rank owns. Some ranks may own one more than others."""
    return slice(n * rank // world, n * (rank + 1) // world)


def silu(x):
    return x / (1 + np.exp(-x))


def silu_slope(x):
    """The derivative of silu."""
    s = 1 / (1 + np.exp(-x))
    return s + x * s * (1 - s)


def layer(x_NC, w_CC):
    """One layer of the network in exercise 32.4."""
    return np.tanh(x_NC @ w_CC.T)


def layer_bwd(dy_NC, x_NC, w_CC):
    """-> dx, dw"""
    dh_NC = dy_NC * (1 - layer(x_NC, w_CC) ** 2)
    return dh_NC @ w_CC, dh_NC.T @ x_NC


def flatten(w, world):
    """-> the elements of w and then zeros, up to a multiple of world"""
    flat = np.zeros_like(w, shape=-(-w.size // world) * world)
    flat[: w.size] = w.reshape(-1)
    return flat


def square(flat, C):
    """The opposite: -> w (C, C)"""
    return flat[: C * C].reshape(C, C)


# %% [markdown]
# ## Ranks in a notebook
#
# `lesson.run_ranks(R, work)` calls `work(comm)` on R ranks, which are threads here. They share
# nothing but what they send through `comm`, and a message is a copy, as on a network:
#
# | call | what it does |
# |---|---|
# | `comm.rank`, `comm.world` | this rank's number, and how many there are |
# | `comm.exchange(send, to, receive, source)` | sends an array to rank `to`, and fills the array `receive` with what rank `source` sends |
# | `comm.all_reduce(x)` | x becomes the sum over the ranks, in place; returns x |
# | `comm.all_gather(part)` | returns the parts of all ranks, one after the other |
# | `comm.reduce_scatter(x)` | returns this rank's part of the sum over the ranks, x being divided into R equal parts |
#
# If the calls of the ranks do not fit together, you are told where each rank is stuck. On real
# machines the job would hang:


# %%
def forgets_one_rank(comm):
    x = np.full(3, 1.0 + comm.rank)
    if comm.rank != 2:
        comm.all_reduce(x)
    return x


try:
    lesson.run_ranks(3, forgets_one_rank)
except Exception as error:
    print(str(error).replace(", ", ",\n    "))
print(lesson.run_ranks(3, lambda comm: comm.all_reduce(np.full(3, 1.0 + comm.rank)))[0])

# %% [markdown]
# ## All-reduce in a ring
#
# In lesson 15 every rank read a part from all others. On a network with a link between neighbours
# only, or with one link per rank, the classic method sends around a ring: each rank sends to its
# right neighbour and receives from the left one, all at the same time. The array is cut into R
# chunks.
#
# - *Reduce-scatter*, R - 1 steps: in step s (from 0), rank r sends chunk r - s and receives chunk
#   r - s - 1, which it **adds** to its own. (All numbers modulo R.) A chunk collects one more rank
#   in every step. At the end rank r has the complete sum of chunk r + 1.
# - *All-gather*, R - 1 steps: rank r sends chunk r + 1 - s, which is complete, and **stores** the
#   chunk r - s that it receives.

# %%
lesson.figures.ring(4)

# %% [markdown]
# Each rank sends 2 (R - 1) chunks of n / R numbers, so
#
# $$2 \, n \, \frac{R - 1}{R}$$
#
# numbers: almost independent of the number of ranks, and no algorithm in which only the ranks add can send
# fewer (Patarasu and Yuan). A network that adds can do with half of it: each rank sends its n numbers once, and the
# switches return the sum (Graham et al.). And since each chunk is summed along one path and then
# copied, all ranks get the same bits.
#
# By hand, with R = 3 and one number per chunk. Follow chunk 0 (the left column): it starts at rank
# 0, is complete at rank 2, and is then passed on.

# %%
x = np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300]])  # a row per rank
print("start\n", x)
for step in range(4):
    before = x.copy()
    for r in range(3):
        c = (r - step - 1) % 3 if step < 2 else (r - (step - 2)) % 3  # the chunk received
        x[r, c] = before[r - 1, c] + (before[r, c] if step < 2 else 0)
    print("reduce-scatter" if step < 2 else "all-gather", f"\n {x}")

# %% [markdown]
# ## Exercise 32.1: a ring all-reduce
#
# Write the code of one rank, with `comm.exchange` only. The chunks are `part(n, R, i)`: if R does
# not divide n, they have different sizes, and some may be empty. `np.empty_like(chunk)` makes an
# array to receive into (and on a GPU it makes one on the GPU).


# %% tags=["exercise"]
def ring_all_reduce(comm, x_n):
    """x (n,) becomes, in place, the sum over the ranks, with the same bits on all of them.

    n: any number, also less than comm.world. A rank sends only to one neighbour in the ring,
    and at most 2 (world - 1) chunks.
    """
    # YOUR CODE


# %%
lesson.check("32.1", ring_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The right neighbour is `(comm.rank + 1) % comm.world`, the left one `(comm.rank - 1) %
# comm.world`. In the first half: `send = x_n[part(n, R, (r - step) % R)]`, the chunk to add to is
# `own = x_n[part(n, R, (r - step - 1) % R)]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Receive into a new array, then `own += received`. If you received directly into `own`, your own
# numbers would be overwritten. In the second half you may receive into the chunk itself.
#
# </details>


# %% tags=["solution"]
# Solution 32.1
def ring_all_reduce_solution(comm, x_n):
    """x (n,) becomes, in place, the sum over the ranks, with the same bits on all of them.

    n: any number, also less than comm.world. A rank sends only to one neighbour in the ring,
    and at most 2 (world - 1) chunks.
    """
    rank, world = comm.rank, comm.world
    right, left = (rank + 1) % world, (rank - 1) % world
    chunk = lambda i: x_n[part(x_n.size, world, i % world)]
    for step in range(world - 1):
        own = chunk(rank - step - 1)
        received = np.empty_like(own)
        comm.exchange(chunk(rank - step), right, received, left)
        own += received
    for step in range(world - 1):
        comm.exchange(chunk(rank + 1 - step), right, chunk(rank - step), left)


ring_all_reduce = lesson.yours(ring_all_reduce, ring_all_reduce_solution)


# %%
def all_to_all(comm, x_n):
    """The obvious method: every rank sends its whole array to every other rank."""
    total, received = x_n.copy(), np.empty_like(x_n)
    for i in range(1, comm.world):
        to, source = (comm.rank + i) % comm.world, (comm.rank - i) % comm.world
        comm.exchange(x_n, to, received, source)
        total += received
    x_n[...] = total


def sent_by_rank_0(method, world, n):
    def work(comm):
        method(comm, np.ones(n))
        return comm.sent

    return lesson.run_ranks(world, work)[0]


print("ranks   all to all   ring   2 n (R - 1) / R        numbers that rank 0 sends, n = 840")
for world in (1, 2, 3, 4, 8):
    counts = [sent_by_rank_0(method, world, 840) for method in (all_to_all, ring_all_reduce)]
    print(f"{world:5}   {counts[0]:10}   {counts[1]:4}   {2 * 840 * (world - 1) / world:15.0f}")

# %% [markdown]
# The price is latency: 2 (R - 1) steps, one after the other. For short messages on many ranks trees
# are faster; NCCL chooses by size.
#
# ## Splitting a product: tensor parallelism
#
# An MLP has two products with a nonlinearity between them: $y = \text{silu}(x w_1^\top) \,
# w_2^\top$. The hidden units are independent of each other until the second product sums them. So
# rank r gets some of *them*: rows of $w_1$ (a *column split* of $w_1^\top$), and the columns of
# $w_2$ that belong to the same units (a *row split* of $w_2^\top$).

# %%
lesson.figures.products(
    [
        [
            ("x\n(N, C)", 0.9, 0.7, "all"),
            "×",
            ("w1ᵀ\n(C, F)", 0.7, 1.4, 1),
            "=",
            ("h\n(N, F)", 0.9, 1.4, 1),
        ],
        [
            ("silu(h)\n(N, F)", 0.9, 1.4, 1),
            "×",
            ("w2ᵀ\n(F, C)", 1.4, 0.7, 0),
            "=",
            ("(N, C)", 0.9, 0.7, "0"),
            "+",
            ("(N, C)", 0.9, 0.7, "1"),
        ],
    ]
)

# %% [markdown]
# Each rank computes a share of y on its own, nonlinearity included, and **one** sum over the ranks
# completes the layer. By hand for 4 hidden units on 2 ranks:

# %%
x = np.array([[1.0, 2.0]])
w1 = np.array([[1.0, 0], [0, 1], [1, 1], [1, -1]])
w2 = np.array([[1.0, 2, 3, 4]])
hidden = silu(x @ w1.T)
print("hidden", hidden.round(3), "  y", (hidden @ w2.T).round(3))
for r in (0, 1):
    mine = part(4, 2, r)
    share = hidden[:, mine] @ w2[:, mine].T
    print(f"rank {r}: hidden {hidden[:, mine].round(3)}, share {share.round(3)}")

# %% [markdown]
# What about backward? Every rank has the whole dy, since every rank has the whole y. With its own
# hidden units h it computes, without any communication,
#
# $$da = dy \, w_2 \qquad dw_2 = dy^\top a \qquad dh = da \cdot \text{silu}'(h) \qquad dw_1 = dh^\top x$$
#
# And dx? Every hidden unit depends on every input, so $dx = dh \, w_1$ is a sum over **all** hidden
# units, of which this rank has only some. So backward needs one sum as well. Megatron-LM calls the
# two places f and g:
#
# | | where | forward | backward |
# |---|---|---|---|
# | f | before the column split | nothing | all-reduce of dx |
# | g | after the row split | all-reduce of y | nothing |
#
# They are each other's transpose, like every forward and its backward: copying to R ranks becomes
# summing over R ranks, and the other way round.
#
# ## Exercise 32.2: an MLP on several ranks, forward and backward


# %% tags=["exercise"]
def split_mlp(comm, x_NC, w1_FC, w2_CF, dy_NC):
    """y = silu(x w1^T) w2^T with the hidden units divided among the ranks. -> y, dx, dw1, dw2

    x, dy (N, C): the same on every rank, as y and dx must be. w1 (F, C), w2 (C, F): only the
    rows and columns of this rank's F hidden units, as dw1 and dw2. Do not change the arguments.
    Two all-reduces of (N, C) are enough; nothing else is sent.
    """
    # YOUR CODE


# %%
lesson.check("32.2", split_mlp)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write forward and backward as for one rank: `h = x_NC @ w1_FC.T`, `a = silu(h)`, `y = a @
# w2_CF.T`, `dh = (dy_NC @ w2_CF) * silu_slope(h)`. Which two of the results are sums over hidden
# units? Only these are all-reduced.
#
# </details>


# %% tags=["solution"]
# Solution 32.2
def split_mlp_solution(comm, x_NC, w1_FC, w2_CF, dy_NC):
    """y = silu(x w1^T) w2^T with the hidden units divided among the ranks. -> y, dx, dw1, dw2

    x, dy (N, C): the same on every rank, as y and dx must be. w1 (F, C), w2 (C, F): only the
    rows and columns of this rank's F hidden units, as dw1 and dw2. Do not change the arguments.
    Two all-reduces of (N, C) are enough; nothing else is sent.
    """
    h_NF = x_NC @ w1_FC.T
    a_NF = silu(h_NF)
    y_NC = comm.all_reduce(a_NF @ w2_CF.T)
    dh_NF = (dy_NC @ w2_CF) * silu_slope(h_NF)
    dx_NC = comm.all_reduce(dh_NF @ w1_FC)
    return y_NC, dx_NC, dh_NF.T @ x_NC, dy_NC.T @ a_NF


split_mlp = lesson.yours(split_mlp, split_mlp_solution)


# %% [markdown]
# ## A whole block
#
# Attention is split in the same way, by heads: heads do not depend on each other until the output
# projection sums them. With grouped-query attention (lesson 18) several query heads share a key
# head, so a rank gets whole *groups*: some key heads, and all query heads that use them. The norms
# and the residual stream stay whole on every rank.
#
# ## Exercise 32.3: which weights belong to a rank?
#
# The names and shapes are those of Hugging Face: weights are (out, in) and used as $x w^\top$. Head
# h of an array of H heads has rows h D to (h + 1) D - 1. Query heads g H / G to (g + 1) H / G - 1
# use key head g.


# %% tags=["exercise"]
def own_weights(rank, world, w, H, G):
    """-> the part of one block's weights that the rank needs, a dict with the same names.

    w: q_proj (H D, C), k_proj and v_proj (G D, C), o_proj (C, H D), gate_proj and up_proj
    (F, C), down_proj (C, F), input_layernorm and post_attention_layernorm (C,).
    H query heads, G key heads, world <= G. Key heads and hidden units are divided by part().
    """
    # YOUR CODE


# %%
lesson.check("32.3", own_weights)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `keys = part(G, world, rank)` are this rank's key heads. Their rows begin at `keys.start * D` with
# `D = w["k_proj"].shape[0] // G`. Its query heads begin at `keys.start * (H // G)`. q, k, v, gate
# and up are divided by rows, o and down by columns.
#
# </details>


# %% tags=["solution"]
# Solution 32.3
def own_weights_solution(rank, world, w, H, G):
    """-> the part of one block's weights that the rank needs, a dict with the same names.

    w: q_proj (H D, C), k_proj and v_proj (G D, C), o_proj (C, H D), gate_proj and up_proj
    (F, C), down_proj (C, F), input_layernorm and post_attention_layernorm (C,).
    H query heads, G key heads, world <= G. Key heads and hidden units are divided by part().
    """
    D = w["k_proj"].shape[0] // G
    heads = part(G, world, rank)
    keys = slice(heads.start * D, heads.stop * D)
    queries = slice(keys.start * (H // G), keys.stop * (H // G))
    units = part(w["up_proj"].shape[0], world, rank)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": units, "up_proj": units}
    columns = {"o_proj": queries, "down_proj": units}
    own = dict(w)
    own |= {name: w[name][s] for name, s in rows.items()}
    own |= {name: w[name][:, s] for name, s in columns.items()}
    return own


own_weights = lesson.yours(own_weights, own_weights_solution)


# %% [markdown]
# Now the whole model, from xtrain's own functional ops. `Enter` is f and `Leave` is g, as Functions
# of the autograd of lesson 6. Everything between them sees fewer heads and fewer hidden units, and
# is otherwise the code of one rank:

# %% tags=["model"]
from xtrain.device import array_module, to_device
from xtrain.kernels.adamw import adamw, adamw_hyper
from xtrain.kernels.rope import rope_tables
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function
from xtrain.nn.tensor import Tensor


class Enter(Function):
    """f, before a column split."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.save(comm)
        return x

    @staticmethod
    def backward(ctx, dx):
        (comm,) = ctx.saved
        return comm.all_reduce(dx.copy()), None


class Leave(Function):
    """g, after a row split."""

    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x.copy())

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def heads(x_NC, w, D):
    """x w^T as (N, heads, D)"""
    return F.reshape(F.linear(x_NC, w), (x_NC.shape[0], w.shape[0] // D, D))


def split_loss(comm, blocks, ends, ids_BT, targets_BT, config, device="cpu"):
    """The loss of a Transformer of whose blocks this rank has its own weights. Tensors in dicts.

    ends: embed_tokens, norm and lm_head, whole on every rank.
    """
    (B, T), D = ids_BT.shape, config.head_dim
    to = lambda x: to_device(x, device)
    cos, sin = map(to, rope_tables(D, T, config.rope_theta))
    x = F.embedding(to(ids_BT.reshape(-1)), ends["embed_tokens"])
    for w in blocks:
        normed = Enter.apply(F.rmsnorm(x, w["input_layernorm"], config.norm_eps), comm)
        q = F.rope(heads(normed, w["q_proj"], D), cos, sin, T=T)
        k = F.rope(heads(normed, w["k_proj"], D), cos, sin, T=T)
        v = heads(normed, w["v_proj"], D)
        q, k, v = (F.reshape(t, (B, T, *t.shape[1:])) for t in (q, k, v))
        mixed = F.reshape(F.attention(q, k, v, D**-0.5), (B * T, w["q_proj"].shape[0]))
        x = F.add(x, Leave.apply(F.linear(mixed, w["o_proj"]), comm))
        normed = Enter.apply(F.rmsnorm(x, w["post_attention_layernorm"], config.norm_eps), comm)
        hidden = F.swiglu(F.linear(normed, w["gate_up"]))  # gate and up, packed in one array
        x = F.add(x, Leave.apply(F.linear(hidden, w["down_proj"]), comm))
    logits = F.linear(F.rmsnorm(x, ends["norm"], config.norm_eps), ends["lm_head"])
    count = to(np.array([1 / targets_BT.size], np.float32))
    return F.cross_entropy(logits, to(targets_BT.reshape(-1)), config.vocab_size, count)


def named(model, dtype, what="data"):
    """-> blocks: [{name: array}], ends: {name: array}, copies of a model's weights or "grad" """
    blocks, ends = [{} for _ in range(model.config.n_layers)], {}
    for name, p in model.named_parameters():
        words = name.split(".")
        of = blocks[int(words[2])] if "layers" in words else ends
        of[words[-2]] = getattr(p, what).astype(dtype)
    return blocks, ends


def step_on_a_rank(comm, model, ids, targets, dtype=np.float64, device="cpu"):
    """-> loss, and the gradients of this rank's weights: blocks, ends, as `named` returns them"""
    config, (blocks, ends) = model.config, named(model, dtype)
    tensor = lambda array: Tensor(to_device(np.ascontiguousarray(array), device), True)
    mine = []
    for w in blocks:
        own = own_weights(comm.rank, comm.world, w, config.n_heads, config.n_kv_heads)
        gate_up = np.concatenate([own.pop("gate_proj"), own.pop("up_proj")])
        mine.append({name: tensor(a) for name, a in {**own, "gate_up": gate_up}.items()})
    ends = {name: tensor(a) for name, a in ends.items()}
    loss = split_loss(comm, mine, ends, ids, targets, config, device)
    loss.backward()
    found = [{name: t.grad for name, t in w.items()} for w in mine]
    for w in found:
        both = w.pop("gate_up")
        w["gate_proj"], w["up_proj"] = both[: len(both) // 2], both[len(both) // 2 :]
    return loss.item(), found, {name: t.grad for name, t in ends.items()}


# %% [markdown]
# Compare with one rank, in float64, where a mistake cannot hide behind rounding. And compare one
# rank with xtrain's own model, in its float32. 3 key heads on 2 ranks do not divide evenly: rank 0
# has one of them, rank 1 two.

# %%
from collections import Counter

import xtrain

config = xtrain.ModelConfig(
    vocab_size=40, dim=24, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=4, hidden_dim=20,
    max_seq_len=16, qk_norm=False,
)  # fmt: skip
model = xtrain.Transformer(config, seed=0, device="cpu")
random = np.random.default_rng(0)
ids, targets = random.integers(0, 40, (2, 3, 8)).astype(np.int32)
one = lesson.run_ranks(1, lambda comm: step_on_a_rank(comm, model, ids, targets))[0]
theirs = model.loss(ids, targets)
theirs.backward()
print(f"loss of xtrain.Transformer  {theirs.item():.4f}    of split_loss on one rank {one[0]:.4f}")


def worst(comm, result):
    """The largest difference between this rank's gradients and its part of the whole ones."""
    _, blocks, ends = result
    differences = [np.abs(ends[name] - one[2][name]).max() for name in ends]
    for got, whole in zip(blocks, one[1]):
        want = own_weights(comm.rank, comm.world, whole, config.n_heads, config.n_kv_heads)
        differences += [np.abs(got[name] - want[name]).max() for name in want]
    return max(differences)


def compared(comm):
    result = step_on_a_rank(comm, model, ids, targets)
    return result[0] - one[0], worst(comm, result), Counter(call for call, _ in comm.log)


for world in (1, 2, 3):
    for rank, (loss, gradient, calls) in enumerate(lesson.run_ranks(world, compared)):
        fits = abs(loss) < 1e-12 and gradient < 1e-12
        print(f"rank {rank} of {world}: equal to one rank within 1e-12: {fits}, {dict(calls)}")

# %% [markdown]
# Two layers, and per layer two sums forward and two backward: 8 all-reduces of N C numbers each, on
# one step. They are *between* the products, so there is nothing to hide them behind.
#
# ## Measure
#
# How long do these sums take compared with the arithmetic? From two records: what an all-reduce
# between four H200s reaches, and a bf16 product. For one block of width C on N tokens, forward:

# %%
bus = lesson.record("bench_ddp/dim384, 4 GPU, flat/bf16")["bus_gb_s"] * 1e9
speed = lesson.record("bench_lessons/linear_cublas/N=O=I=2048/bf16")["value"] * 1e12
print(f"all-reduce {bus / 1e9:.0f} GB/s, product {speed / 1e12:.0f} TFLOP/s")
N, C = 8192, 4096
for ranks in (2, 4, 8):
    arithmetic = 2 * N * 12 * C * C / ranks / speed  # weights: attention 4 C^2, MLP 8 C^2
    sums = 2 * (2 * (ranks - 1) / ranks) * 2 * N * C / bus  # two, of 2 bytes per number
    slow = sums * 10
    print(
        f"{ranks} ranks: arithmetic {arithmetic * 1e3:4.1f} ms, sums {sums * 1e3:.1f} ms; "
        f"over a network of a tenth of the speed {slow * 1e3:.0f} ms"
    )

# %% [markdown]
# Within one machine this pays off. Between machines the sums would take longer than the arithmetic.
# This is why tensor parallelism is used inside a machine, and data parallelism, which can hide its
# communication, between machines.
#
# ## Splitting the weights: FSDP
#
# The arithmetic of data parallelism is fine; its memory is not. Every rank keeps the same weights,
# gradients and AdamW moments. ZeRO removes the copies in three stages: ZeRO-1 divides the moments,
# ZeRO-2 the gradients too, ZeRO-3 also the weights. PyTorch calls the last one FSDP, *fully sharded
# data parallel*. For each layer, rank r permanently keeps only its **shard**, 1 / R of the weights:
#
# - forward: *all-gather* the layer's shards, compute with the whole layer, free it;
# - backward: *all-gather* it again, compute dx and dw, free it; *reduce-scatter* dw, so that each
#   rank gets the **sum over the ranks** of its own part only;
# - optimizer: AdamW updates each element on its own, so the shard of the weights, the shard of the
#   gradient and the shards of m and v are all it needs.
#
# By hand, one layer of 2 x 2 weights on 2 ranks:

# %%
w, dw = np.arange(4.0), np.array([[1.0, 1, 1, 1], [10, 20, 30, 40]])  # dw: a row per rank


def by_hand(comm):
    shard = w[part(4, 2, comm.rank)]
    whole = comm.all_gather(shard)
    return shard, whole, comm.reduce_scatter(dw[comm.rank])


for rank, (shard, whole, own) in enumerate(lesson.run_ranks(2, by_hand)):
    print(f"rank {rank}: shard {shard}, gathered {whole}, its part of the summed gradient {own}")

# %% [markdown]
# An all-gather and a reduce-scatter move (R - 1) / R of the layer each, half of an all-reduce. A
# step needs two all-gathers and a reduce-scatter: 1.5 times the traffic of data parallelism, which
# is the price of the memory.
#
# ## Exercise 32.4: a training step with sharded weights
#
# The network is a chain of layers, `layer(x, w)` with w (C, C); the loss is the sum of squared
# errors over all rows of **all** ranks, divided by `count`, the number of targets in the whole
# batch. A shard is a piece of `flatten(w, world)`: the elements of w, and zeros up to a multiple of
# `world`. `square` turns a gathered layer back into (C, C). `update(l, shard, gradient)` is AdamW
# for the shard of layer l: it changes the shard in place.


# %% tags=["exercise"]
def fsdp_step(comm, shards, x_NC, t_NC, count, update):
    """One step with the loss sum((y - t)^2) / count. -> the loss of the whole batch

    shards: of each layer, this rank's part, (n,). x, t (N, C): this rank's rows of the batch;
    N may differ between ranks. Call update once per layer, with this rank's part of the
    gradient. At most two layers may be in memory as a whole at any time.
    """
    C = x_NC.shape[1]
    # YOUR CODE


# %%
lesson.check("32.4", fsdp_step)

# %% [markdown]
# <details><summary>Hint 1: forward</summary>
#
# Keep the input of every layer in a list, but not its weights: `w = square(comm.all_gather(shard),
# C)`, `inputs.append(layer(inputs[-1], w))`. The last entry is y.
#
# </details>
# <details><summary>Hint 2: backward</summary>
#
# Start with `dy = 2 * (y - t_NC) / count`. For each layer from the last to the first, gather w
# again, then `dy, dw = layer_bwd(dy, inputs[l], w)` and `comm.reduce_scatter(flatten(dw,
# comm.world))`. The loss is a sum over ranks too: all-reduce it as an array of one number,
# `(error**2).sum().reshape(1) / count`.
#
# </details>


# %% tags=["solution"]
# Solution 32.4
def fsdp_step_solution(comm, shards, x_NC, t_NC, count, update):
    """One step with the loss sum((y - t)^2) / count. -> the loss of the whole batch

    shards: of each layer, this rank's part, (n,). x, t (N, C): this rank's rows of the batch;
    N may differ between ranks. Call update once per layer, with this rank's part of the
    gradient. At most two layers may be in memory as a whole at any time.
    """
    C = x_NC.shape[1]
    inputs = [x_NC]
    for shard in shards:
        w = square(comm.all_gather(shard), C)
        inputs.append(layer(inputs[-1], w))
    error = inputs.pop() - t_NC
    loss = (error**2).sum().reshape(1) / count
    dy = 2 * error / count
    for l in reversed(range(len(shards))):
        w = square(comm.all_gather(shards[l]), C)
        dy, dw = layer_bwd(dy, inputs[l], w)
        update(l, shards[l], comm.reduce_scatter(flatten(dw, comm.world)))
    return comm.all_reduce(loss)[0]


fsdp_step = lesson.yours(fsdp_step, fsdp_step_solution)


# %% [markdown]
# Train for 20 steps, on one rank with whole weights and on 2, 3 and 4 ranks with shards. AdamW is
# the library's. 7 x 7 weights do not divide evenly; the zeros that fill up the last shard get a
# zero gradient and stay zero.


# %% tags=["model"]
class ShardAdamW:
    """The library's AdamW on the shard of each layer: the moments are shards too."""

    def __init__(self, shards, lr=0.01):
        self.moments = [(np.zeros_like(s), np.zeros_like(s)) for s in shards]
        self.steps, self.lr = [0] * len(shards), lr
        self.factor = np.ones_like(shards[0], shape=1)

    def __call__(self, l, shard, gradient):
        self.steps[l] += 1
        hyper = adamw_hyper(self.lr, 0.9, 0.999, self.steps[l], shard.dtype)
        hyper = array_module(shard).asarray(hyper)
        state = (*self.moments[l], self.factor, hyper)
        adamw(shard, gradient, *state, shard.size, 0.9, 0.999, eps=1e-8, weight_decay=0.1)


def train_shards(comm, steps, layers=3, C=7, rows=12, dtype=np.float64, device="cpu"):
    """-> the losses, this rank's weights after the last step as arrays (C, C), its numbers"""
    random = np.random.default_rng(0)
    whole = [random.standard_normal((C, C)).astype(dtype) for _ in range(layers)]
    x, t = random.standard_normal((2, rows, C)).astype(dtype)
    to = lambda a: to_device(np.ascontiguousarray(a), device)
    flat = [flatten(w, comm.world) for w in whole]
    shards = [to(f[part(f.size, comm.world, comm.rank)]) for f in flat]
    own, update = part(rows, comm.world, comm.rank), ShardAdamW(shards)
    batch = to(x[own]), to(t[own])
    losses = [float(fsdp_step(comm, shards, *batch, rows * C, update)) for _ in range(steps)]
    kept = sum(s.size * 3 for s in shards)  # w, m, v
    return losses, [square(comm.all_gather(s), C) for s in shards], kept


# %%
unsharded = None
for world in (1, 2, 3, 4):
    losses, weights, kept = lesson.run_ranks(world, lambda comm: train_shards(comm, 20))[0]
    unsharded = unsharded or weights
    far = max(np.abs(a - b).max() for a, b in zip(weights, unsharded))
    text = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, weights equal within 1e-9: {far < 1e-9}"
    print(f"{world} ranks: {text}, {kept} numbers of w, m and v per rank")

# %% [markdown]
# ## How much memory does it take?
#
# In the accounting of the ZeRO paper, mixed precision needs 16 bytes per parameter: weights and
# gradients of 2 bytes, and the float32 master weights ([lesson 12](12_bf16.ipynb)), m and v of AdamW.
# (xtrain keeps gradients in float32: 18.) Which of these are divided by R = 64 ranks?

# %%
R, parameters = 64, 70e9
sizes = {"weights": 2, "gradients": 2, "master, m, v": 12}
stages = {"data parallel": (), "ZeRO-1": ("master, m, v",)}
stages["ZeRO-2"] = ("gradients", "master, m, v")
stages["ZeRO-3, FSDP"] = tuple(sizes)
for stage, divided in stages.items():
    per_rank = sum(parameters * b / (R if name in divided else 1) for name, b in sizes.items())
    print(f"{stage:14} {per_rank / 1e9:7.1f} GB per rank, 70 billion parameters on {R} ranks")

# %% [markdown]
# The last line is what is *kept*. While a layer is computed, it is in memory as a whole, and to
# hide the communication the next ones (`ahead` of them) are gathered already.
#
# ## Exercise 32.5: how many bytes of weights?


# %% tags=["exercise"]
def fsdp_bytes(layers, layer_bytes, ranks, ahead):
    """Peak bytes of weights on one rank. With one rank nothing is gathered.

    layers: number of layers, of layer_bytes each. ahead: less than layers. A gathered layer is
    a new array of layer_bytes, in addition to the part that the rank owns.
    """
    # YOUR CODE


# %%
lesson.check("32.5", fsdp_bytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Add the rank's own part of all layers, the whole layer that is being computed, and the whole
# layers gathered ahead.
#
# </details>


# %% tags=["solution"]
# Solution 32.5
def fsdp_bytes_solution(layers, layer_bytes, ranks, ahead):
    """Peak bytes of weights on one rank. With one rank nothing is gathered.

    layers: number of layers, of layer_bytes each. ahead: less than layers. A gathered layer is
    a new array of layer_bytes, in addition to the part that the rank owns.
    """
    if ranks == 1:
        return layers * layer_bytes
    return layers * layer_bytes // ranks + (1 + ahead) * layer_bytes


fsdp_bytes = lesson.yours(fsdp_bytes, fsdp_bytes_solution)


# %%
layers, layer_bytes = 80, 70_000_000_000 * 2 // 80  # 70 billion parameters in bf16
for ranks in (1, 8, 64):
    peak = fsdp_bytes(layers, layer_bytes, ranks, 1)
    print(f"{ranks:2} ranks: {peak / 1e9:6.1f} GB of weights per rank, one layer gathered ahead")

# %% [markdown]
# ## The same code on real ranks
#
# With mpi4py and an MPI library (`pip install -e '.[mpi]'`), your functions run on processes, one
# per rank, without a change:
#
# ```sh
# mpirun -n 4 python lessons/on_ranks.py                              # the solutions above, on CPUs
# mpirun -n 4 python lessons/on_ranks.py my_lessons/32_model_parallel.py      # yours
# mpirun -n 4 python lessons/on_ranks.py --device gpu                 # one GPU per rank
# ```
#
# The program compares each of them with the unsplit computation, counts what each rank sends, and
# takes the time of the ring next to that of the library's all-reduce. `comm` is then an object with
# the same methods: MPI for NumPy arrays, NCCL for CuPy arrays.
#
# ## The library's kernel
#
# This is that communicator. Its collectives are those of `xtrain.ddp`:

# %%
lesson.source(lesson.ProcessRank)

# %%
from xtrain.parallel import collectives

lesson.source(collectives.NcclCollectives.reduce_scatter)
lesson.source(collectives.NcclCollectives.all_gather)

# %% [markdown]
# xtrain trains with data parallelism and by default with ZeRO-1: reduce-scatter of a bucket of
# gradients, AdamW on the shard, all-gather of the new weights. Your `fsdp_step` differs in *when*
# the weights are gathered: before each use instead of after each update.

# %%
from xtrain.parallel import zero

print(zero.__doc__)

# %% [markdown]
# With `--zero 3` it does what your `fsdp_step` does, for the whole model. The layers lie in two
# buffers, in turn, and `start` gathers the next one while this one computes. How does the library
# know when the backward of a layer begins and ends? It puts an op before and behind each layer
# that returns its input. In backward the one behind runs first, and the one before runs last:

# %%
from xtrain.parallel import gathering

print(gathering.__doc__)
for method in ("around_layer", "begin_backward", "end_backward"):
    lesson.source(getattr(gathering.Gathering, method))

# %% [markdown]
# ## Other ways to split
#
# *Pipeline*: each rank has some of the layers, and passes activations on to the next. That is the
# least communication of all. But a rank waits until the first micro-batch reaches it, and at the
# end until the last gradient returns. With R stages and M micro-batches it is idle for the share
# $(R - 1) / (M + R - 1)$ of the time. Three stages and four micro-batches (forward only):

# %%
stages = {f"rank {r}": [(r + m, r + m + 1, f"{m}") for m in range(4)] for r in range(3)}
lesson.figures.timeline(stages, "micro-batches 0 to 3", width=lesson.figures.NARROW)

# %%
for M in (1, 8, 64):
    print(f"8 stages, {M:2} micro-batches: {7 / (M + 7):.0%} idle")

# %% [markdown]
# *Sequence*: between two split layers the norms and the residual stream are whole on every rank.
# They can be divided by tokens: then g becomes a reduce-scatter and f an all-gather, which together
# move what the all-reduce moved, and the activations between them take 1 / R of the memory.
#
# *Context*: for very long texts the tokens of one sequence are divided, in attention too. A rank
# keeps its queries, and keys and values travel around the ring of 32.1. The parts are combined by
# the online softmax of [lesson 13](13_flash_attention.ipynb).
#
# *Experts*: in a mixture of experts (lesson 46) each rank has some of the experts, and each token travels to
# the rank of its expert and back: an *all-to-all*.
#
# They combine: tensor parallelism inside a machine, pipeline stages between machines, data
# parallelism (sharded or not) over all that. Every rank then has a place in a grid, and each axis
# of the grid has its own `comm`.
#
# ## What did not help
#
# *Splitting w1 along its inputs.* Each rank then has a part of the sum over inputs, but the
# nonlinearity needs the whole sum. This requires a second all-reduce in the middle of the MLP, of F
# numbers per token instead of C:

# %%
N, C, F_ = 8192, 4096, 11008
for name, numbers in (("along hidden units", N * C), ("along inputs", N * F_ + N * C)):
    print(f"{name:22} {2 * numbers / 1e6:6.0f} MB to reduce per MLP, in bf16")

# %% [markdown]
# ## More exercises
#
# 1. A bias after the second product, $y = a w_2^\top + b$, is whole on every rank. Where must it be
#    added, and is its gradient reduced?
# 2. Gradient clipping in `fsdp_step` needs the norm of *all* gradients. Each rank has shards. What
#    is sent, and which update must wait for it?
# 3. Split the head, $x w^\top$ with V rows, over the ranks. Which two numbers per token must be
#    reduced for the cross-entropy, instead of V logits?
# 4. `ring_all_reduce` on two machines of four ranks each: how many numbers cross the slow link
#    between the machines, and how many would a reduce-scatter inside each machine first?
# 5. Give `fsdp_step` a ring of buffers, so that layer l + 1 is gathered while layer l computes.
#    (The threads of this notebook cannot show the gain; non-blocking MPI calls can.)
# 6. With two micro-batches per step, `--zero 3` sums the gradients of a layer over the ranks after
#    each of them, ZeRO-1 only after the second. Why do the last bits differ, and what would it
#    cost to have the same?
#
# <details><summary>Solutions</summary>
#
# 1: after the sum, or before it on one rank only, or else it is added R times; dy is whole on every
# rank, so db is too, and is not reduced. 2: all-reduce one number, the sum of squares of the
# shards; every update must wait for it, so the updates move behind the backward loop, and the
# summed gradient shards are kept until then. 3: the largest logit and the sum of exponentials; also
# the target's logit, which one rank has. 4: in the ring each of the two crossing links carries 2 n
# 7 / 8 numbers; with reduce-scatter inside first, each rank exchanges only n / 4 with its
# counterpart, n per direction in all, and the links inside do the rest. 6: with gradients a and b
# on two ranks, one is (a1 + b1) + (a2 + b2), the other (a1 + a2) + (b1 + b2), and float32 rounds
# each sum. For the same order every rank would keep its own sums of *all* layers until the last
# micro-batch, which is the memory that ZeRO-3 saves.
#
# </details>
#
# ## Sources
#
# - P. Patarasu, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*,
#   2009: the ring, and the lower bound.
# - R. Graham et al., *Scalable Hierarchical Aggregation Protocol (SHArP)*, 2016: switches that add.
# - M. Shoeybi et al., *Megatron-LM*, 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053):
#   tensor parallelism, f and g. V. Korthikanti et al., 2022: sequence parallelism.
# - S. Rajbhandari et al., *ZeRO*, 2019, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054).
# - Y. Zhao et al., *PyTorch FSDP*, 2023, [arXiv 2304.11277](https://arxiv.org/abs/2304.11277).
# - Y. Huang et al., *GPipe*, 2019: pipeline. H. Liu et al., *Ring attention*, 2023: context.
