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
# # 46 Mixture of experts
#
# *About 85 minutes. You need [lesson 8](08_training.ipynb) and [lesson 30](30_scan_and_sort.ipynb).*
#
# **The question.** A model can have ten times the parameters of another one and do no more arithmetic per token: each token is given to a few of many MLPs. But
# neighbouring tokens then want different matrices. How do thousands of tokens, each with matrices of its own, become products as fast as one large one?
#
# You will choose experts, put the rows in order by counting, on the CPU and in a kernel without atomics, and write the loss that keeps all
# experts at work. A small model shows what happens without it.

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

import xtrain
from xtrain import lesson

FULL = 0xFFFFFFFF  # all 32 lanes of a warp

# %% [markdown]
# ## Why: parameters that a token does not touch
#
# In a transformer most parameters are in the MLPs. A **mixture of experts** has E of them in each layer, the *experts*, and a **router** that
# chooses K for each token. Memory holds all parameters, the *total*; a token is computed with the *active* ones. Two published models, from their shapes:

# %%
from xtrain.training.memory_plan import parameters

mixtral = xtrain.ModelConfig(
    vocab_size=32000, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
    hidden_dim=14336, n_experts=8, experts_per_token=2, qk_norm=False, tie_embeddings=False,
)  # fmt: skip
qwen = xtrain.ModelConfig(
    vocab_size=151936, dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, head_dim=128,
    expert_hidden_dim=768, n_experts=128, experts_per_token=8, tie_embeddings=False,
)  # fmt: skip
sizes = {}
for name, c in (("Mixtral 8x7B", mixtral), ("Qwen3 30B", qwen)):
    idle = c.n_experts - c.experts_per_token
    total = parameters(c)
    active = total - c.n_layers * idle * 3 * c.dim * c.expert_hidden_dim
    print(f"{name:13} total {total / 1e9:.1f} billion, active {active / 1e9:.1f} billion")
    sizes[f"{name}: total"] = total / 1e9
    sizes[f"{name}: active"] = active / 1e9
lesson.figures.bars(sizes, "billion parameters")

# %% [markdown]
# Why it helps at all: a fact about one subject need not be multiplied into tokens about another one. Operations follow the active parameters, what the model can store the total.
#
# ## The router, by hand
#
# The router is a matrix with a row for each expert, so a token gets E logits. The K largest choose the experts, and softmax **over these K** gives the weights of their results:
#
# $$y_n = \sum_{k} w_{nk}\; \mathrm{MLP}_{e_{nk}}(x_n)$$
#
# E = 4, K = 2, logits 1, 3, 0, 2: experts 1 and 3, with weights $e^3 / (e^3 + e^2) = 0.73$ and 0.27. (Softmax over all four, then the two largest divided by their sum, is the same.) And logits
# 2, 2, 2, 0? Three are equal. A rule must say which two are taken, the same on every device and in every run: **the lower expert first**.
#
# ## Exercise 46.1: choose


# %% tags=["exercise"]
def choose(logits_NE, K):
    """-> experts (N, K), weights (N, K): the K experts with the largest logits of each row.

    In order of falling logit; of equal logits the lower expert comes first. The weights are softmax
    over these K logits. Logits may be as large as 1000, and E may be 64.
    """
    # YOUR CODE


# %%
lesson.check("46.1", choose)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `np.argsort(-logits_NE, axis=1, kind="stable")` leaves equal ones in the order of their numbers.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `np.take_along_axis(logits_NE, experts_NK, 1)` are the chosen logits. Subtract the first column, the largest, before `np.exp`.
#
# </details>


# %% tags=["solution"]
# Solution 46.1
def choose_solution(logits_NE, K):
    """-> experts (N, K), weights (N, K): the K experts with the largest logits of each row.

    In order of falling logit; of equal logits the lower expert comes first. The weights are softmax
    over these K logits. Logits may be as large as 1000, and E may be 64.
    """
    experts_NK = np.argsort(-logits_NE, axis=1, kind="stable")[:, :K]
    chosen_NK = np.take_along_axis(logits_NE, experts_NK, 1)
    weights_NK = np.exp(chosen_NK - chosen_NK[:, :1])
    weights_NK /= weights_NK.sum(1, keepdims=True)
    return experts_NK, weights_NK


choose = lesson.yours(choose, choose_solution)

# %%
experts, weights = choose(np.array([[1.0, 3, 0, 2], [2, 2, 2, 0]]), 2)
for e, w in zip(experts, weights):
    print("experts", *e, "  weights", *(f"{v:.2f}" for v in w))

# %% [markdown]
# ## The order of rows
#
# Token by token this is N K products of one row with a matrix, and each of them reads its matrix. Each matrix should be read once, for all tokens that want it. So **sort**: a *pair* is a token and one
# of its experts, pair n K + k, and the pairs of an expert become neighbours. The products then take tiles of rows, and a tile must have one matrix. So the rows of each expert begin at a multiple of TILE, and
# what is left of its last tile is **padding**.
#
# By hand, four tokens, K = 2, E = 3, TILE = 4:
#
# | token | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | experts | 2 0 | 2 1 | 0 2 | 2 1 |
# | pairs | 0 1 | 2 3 | 4 5 | 6 7 |
#
# *Count*: the experts 0, 1, 2 have 2, 2 and 4 pairs, rounded up 4, 4 and 4 *slots*. *Scan*: the exclusive prefix sum of these is where each begins: 0, 4, 8, and 12 is the end. *Place*: each pair, in order, gets the next free
# slot of its expert. Integers decide where every row goes, so the order is the same in every run ([lesson 30](30_scan_and_sort.ipynb)).
#
# ## Exercise 46.2: the slots


# %% tags=["exercise"]
def expert_slots(experts_P, E, TILE):
    """-> pairs, first: lists of whole numbers.

    experts_P: list, the expert of each pair, 0 to E - 1; an expert may have no pair.
    first: E + 1 numbers: the first slot of each expert, a multiple of TILE, and the end. An expert
        with c pairs has the smallest multiple of TILE that is not below c; without pairs 0 slots.
    pairs: the pair in each slot up to the end, those of an expert in their order; padding is -1.
    """
    # YOUR CODE


# %%
lesson.check("46.2", expert_slots)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `counts[e] += 1` for each pair. `-(-c // TILE) * TILE` rounds c up, and 0 stays 0. `first` begins with 0, and each expert adds its slots.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `pairs = [-1] * first[E]`, and a copy of `first` has the next free slot of each expert: pair p goes there, and the slot grows by 1.
#
# </details>


# %% tags=["solution"]
# Solution 46.2
def expert_slots_solution(experts_P, E, TILE):
    """-> pairs, first: lists of whole numbers.

    experts_P: list, the expert of each pair, 0 to E - 1; an expert may have no pair.
    first: E + 1 numbers: the first slot of each expert, a multiple of TILE, and the end. An expert
        with c pairs has the smallest multiple of TILE that is not below c; without pairs 0 slots.
    pairs: the pair in each slot up to the end, those of an expert in their order; padding is -1.
    """
    counts = [0] * E
    for e in experts_P:
        counts[e] += 1
    first = [0]
    for c in counts:
        first.append(first[-1] + -(-c // TILE) * TILE)
    pairs = [-1] * first[E]
    free = list(first)
    for p, e in enumerate(experts_P):
        pairs[free[e]] = p
        free[e] += 1
    return pairs, first


expert_slots = lesson.yours(expert_slots, expert_slots_solution)

# %%
experts = [2, 0, 2, 1, 0, 2, 2, 1]
pairs, first = expert_slots(experts, 3, 4)
print("pairs", pairs)
print("first", first)
before = experts + [-1] * (len(pairs) - len(experts))
after = [experts[p] if p >= 0 else -1 for p in pairs]
title = "the expert of each pair: as the tokens have them, and in slots (–: padding)"
lesson.figures.ownership(np.array([before, after]), title)

# %% [markdown]
# ## The grouped product
#
# Now one product for each expert, over its rows; or, as a kernel has it, one for each *tile*, which looks up its matrix: a list says which expert each tile has. All tiles have the same shape, and may be computed at
# the same time by the blocks of one launch. Both against the slow way, token by token:

# %%
N, E, K, C, F, TILE = 64, 8, 2, 16, 24, 8
rng = np.random.default_rng(0)
x = rng.normal(size=(N, C))
w = rng.normal(size=(E, F, C))
experts, weights = choose(rng.normal(size=(N, E)), K)
slow = np.array([w[e] @ x[n] for n, row in enumerate(experts) for e in row])  # (N K, F)

pairs, first = map(np.array, expert_slots(experts.ravel().tolist(), E, TILE))
rows = np.where(pairs[:, None] >= 0, x[pairs // K], 0)  # gather; padding is 0
by_expert = np.concatenate([rows[first[e] : first[e + 1]] @ w[e].T for e in range(E)])
tile_expert = np.repeat(np.arange(E), np.diff(first) // TILE)
by_tile = rows.reshape(-1, TILE, C) @ w[tile_expert].transpose(0, 2, 1)
by_tile = by_tile.reshape(-1, F)
used = pairs >= 0
for name, y in (("by expert", by_expert), ("by tile", by_tile)):
    print(f"{name:9}: equal to token by token: {np.allclose(y[used], slow[pairs[used]])}")
print("experts of the tiles", tile_expert.tolist())

# %% [markdown]
# The results of a token's K slots are then added with their weights, in the order of k: no atomics there either, each token reads its own slots.
#
# ## Measure: what padding costs
#
# How many rows are computed for nothing? That depends on the tokens that an expert has, and on TILE. 128 experts, of which each token takes 8 by chance:


# %%
def padding(tokens, TILE, E=128, K=8):
    rng = np.random.default_rng(1)
    chosen = rng.random((tokens, E)).argpartition(K, 1)[:, :K]
    counts = np.bincount(chosen.ravel(), minlength=E)
    return (-(-counts // TILE) * TILE).sum() / (tokens * K) - 1


numbers = [64, 256, 1024, 4096, 16384]
lines = {f"TILE {t}": [100 * padding(n, t) for n in numbers] for t in (16, 64, 128)}
for name, y in lines.items():
    print(f"{name:8}", *(f"{v:7.0f} %" for v in y))
lesson.figures.curves(numbers, lines, "tokens", "padding, % of the rows")

# %% [markdown]
# A training step has tens of thousands of tokens, and with TILE 128 padding costs 6 % of 16,384. For few tokens almost everything is padding; decoding, below, needs
# another way. A kernel may skip the *rows* of padding of a tile, but a tensor core multiplies whole tiles.
#
# ## Exercise 46.3: place rows in a kernel, without atomics
#
# On a GPU an atomic counter for each expert would hand out slots in the order in which threads happen to come. Here instead a **warp owns an expert**. It reads all pairs, 32 at a time. Which lanes
# have a pair of this expert is a word of 32 bits, from `cuda.ballot_sync(FULL, condition)`; the number of *lower* lanes in it, by `cuda.popc`, is a lane's place among them:
#
# | lane | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | its pair's expert is 2 | yes | | yes | | | yes | yes | |
# | lower lanes with yes | 0 | | 1 | | | 2 | 3 | |


# %% tags=["exercise"]
@cuda.jit
def place_kernel(pairs_M, expert_P, first_E):
    """pairs: the pair in each slot, -1 for padding, as in 46.2. Grid E, block 32.

    Block e writes the slots of expert e, first_E[e] up to first_E[e + 1] (not included). expert_P:
    the expert of each pair. All int32. A lane reads each pair at most once; no atomics.
    """
    # YOUR CODE


# %%
lesson.check("46.3", place_kernel)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `slot = first_E[e]`, and a loop `for start in range(0, expert_P.size, 32)`, which all lanes run. Pair p = start + lane; past the end the condition is False, but the lane must still vote.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `mine = cuda.ballot_sync(FULL, wanted)`. A lane that wants writes p to `slot + cuda.popc(mine & ((1 << lane) - 1))`. Then every lane adds `cuda.popc(mine)` to slot. What is left from slot to `first_E[e + 1]` is padding.
#
# </details>


# %% tags=["solution"]
# Solution 46.3
@cuda.jit
def place_kernel_solution(pairs_M, expert_P, first_E):
    """pairs: the pair in each slot, -1 for padding, as in 46.2. Grid E, block 32.

    Block e writes the slots of expert e, first_E[e] up to first_E[e + 1] (not included). expert_P:
    the expert of each pair. All int32. A lane reads each pair at most once; no atomics.
    """
    e = cuda.blockIdx.x
    lane = cuda.threadIdx.x
    slot = first_E[e]
    for start in range(0, expert_P.size, 32):
        p = start + lane
        wanted = p < expert_P.size and expert_P[p] == e
        mine = cuda.ballot_sync(FULL, wanted)
        if wanted:
            pairs_M[slot + cuda.popc(mine & ((1 << lane) - 1))] = p
        slot += cuda.popc(mine)
    for m in range(slot + lane, first_E[e + 1], 32):
        pairs_M[m] = -1


place_kernel = lesson.yours(place_kernel, place_kernel_solution)

# %%
experts_P = lesson.array(experts.ravel().astype(np.int32))
slots = lesson.array(np.zeros(len(pairs), np.int32))
lesson.launch(place_kernel, E, 32, slots, experts_P, lesson.array(first.astype(np.int32)))
print("the same as expert_slots:", np.array_equal(lesson.host(slots), pairs))

# %% [markdown]
# ## The gradient: through the weights, not through the choice
#
# Backward, each pair's row is multiplied by the transposed matrix of its expert, and an expert's gradient is the sum over its own rows: two more grouped products, in the same order of rows. The router
# gets its gradient **through the weights of the chosen**. Which experts are chosen is a step function of the logits: it has no gradient, except at the steps, where it has no use. One token, three experts with results -1, 2 and 0.5,
# K = 2, and the logit of expert 0 grows:

# %%
results = np.array([-1.0, 2.0, 0.5])
moving = np.linspace(-1, 3, 401)


def mixture(logits):
    experts, weights = choose(np.array([logits]), 2)
    return float((results[experts] * weights).sum())


lines = {"result of the mixture": [mixture([a, 1.0, 0.5]) for a in moving]}
for a in (0.0, 2.0):
    slope = (mixture([a + 1e-4, 1.0, 0.5]) - mixture([a - 1e-4, 1.0, 0.5])) / 2e-4
    print(f"logit {a}: slope {slope:+.2f}")
jump = mixture([0.501, 1.0, 0.5]) - mixture([0.499, 1.0, 0.5])
print(f"where expert 0 takes the place of expert 2: a jump of {jump:+.2f}")
lesson.figures.curves(moving, lines, "logit of expert 0", "result", log=False)

# %% [markdown]
# As long as expert 0 is not chosen, its logit has a gradient of exactly 0, and it gets no tokens to learn from: nothing tells the router what it missed. That is the seed of the next problem.
#
# ## What goes wrong: the rich get richer
#
# An expert that gets more tokens learns faster, so the router likes it better, so it gets more tokens. To stop that, training adds a small **balance loss** (Fedus et al. 2021). With $c_e$ pairs of expert e and
# its mean probability over N tokens, $\bar p_e = \frac{1}{N} \sum_n p_{ne}$, where p is softmax over **all** experts:
#
# $$B = E \sum_e \frac{c_e}{N}\, \bar p_e$$
#
# The counts are constants (they have no gradient); they are the weights with which probabilities are pushed down, most where the load is largest. By hand, E = 2, K = 1, N = 2: if both tokens go to expert 0 with p = 0.8,
# $B = 2 (1 \cdot 0.8 + 0) = 1.6$; with one token each and p = 0.8 for its own expert, $\bar p = (0.5, 0.5)$ and B = 1. With $q_e = E c_e / N^2$ B is $\sum_n \sum_e q_e p_{ne}$, and the gradient of softmax gives
#
# $$\frac{\partial B}{\partial x_{ne}} = p_{ne} \Big(q_e - \sum_j q_j\, p_{nj}\Big)$$
#
# ## Exercise 46.4: the balance loss


# %% tags=["exercise"]
def balance(logits_NE, counts_E):
    """-> B, a number, and its gradient with respect to the logits, (N, E).

    B = E sum_e (counts_e / N) mean_n(p_ne), p the softmax of each row. The counts are constants.
    Logits may be as large as 1000.
    """
    # YOUR CODE


# %%
lesson.check("46.4", balance)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `p = np.exp(logits_NE - logits_NE.max(1, keepdims=True))`, divided by its sum along axis 1. `q = E * counts_E / N**2`. B is the sum of `p * q` over everything.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(p * q).sum(1, keepdims=True)` is what is subtracted from q in each row, and p multiplies the difference.
#
# </details>


# %% tags=["solution"]
# Solution 46.4
def balance_solution(logits_NE, counts_E):
    """-> B, a number, and its gradient with respect to the logits, (N, E).

    B = E sum_e (counts_e / N) mean_n(p_ne), p the softmax of each row. The counts are constants.
    Logits may be as large as 1000.
    """
    N, E = logits_NE.shape
    p = np.exp(logits_NE - logits_NE.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    q = E * counts_E / N**2
    pq = p * q
    return pq.sum(), p * (q - pq.sum(1, keepdims=True))


balance = lesson.yours(balance, balance_solution)

# %%
both = np.log([[0.8, 0.2], [0.8, 0.2]])
each = np.log([[0.8, 0.2], [0.2, 0.8]])
for name, logits, counts in (("both to expert 0", both, [2, 0]), ("one each", each, [1, 1])):
    B, gradient = balance(logits, np.array(counts))
    print(f"{name:16} B = {B:.2f}, gradient of the first token {gradient[0].round(3)}")

# %% [markdown]
# ## Measure: three small models
#
# The other remedy adds no gradient at all (Wang et al. 2024): a **bias** for each expert is added when experts are *chosen*, not when they are weighted. After each step the bias of an expert with less than the mean load
# grows by a constant, that of the others falls. Three runs from the same seed on the language of [lesson 40](40_scaling.ipynb): 8 experts, K = 1. (Softmax over one logit is always 1, so the weight here is the probability among all experts.) The load is of the last 50 steps.

# %% tags=["varies"]
from xtrain.nn.expert_bias import ExpertBiases
from xtrain.nn.router_losses import RouterLosses

V = T = 32
STEPS = 300
frequency = 1 / np.arange(1, V + 1)
frequency /= frequency.sum()
rng = np.random.default_rng(0)
table = rng.choice(V, (V, V), p=frequency)
ids = [0, 1]
for sure, other in zip(rng.random(100_000) < 0.7, rng.choice(V, 100_000, p=frequency)):
    ids.append(int(table[ids[-2], ids[-1]] if sure else other))
ids = np.array(ids, np.int32)


def train(balance_loss=0.0, bias_rate=0.0):
    """-> mean loss and load of the experts in the last 50 steps, 1: the mean"""
    shape = dict(dim=16, n_layers=1, n_heads=1, head_dim=16, expert_hidden_dim=4, max_seq_len=T)
    mixture = dict(n_experts=8, experts_per_token=1, renormalized_experts=False)
    config = xtrain.ModelConfig(vocab_size=V, expert_bias=bias_rate > 0, **shape, **mixture)
    model = xtrain.Transformer(config, seed=0)
    optimizer = xtrain.AdamW(model, lr=2e-2, weight_decay=0.0)
    biases = ExpertBiases(model, bias_rate)
    rng = np.random.default_rng(3)
    losses = []
    loads = []
    for step in range(STEPS):
        optimizer.lr = 2e-2 * min(1, (step + 1) / 10) * (1 - step / STEPS)
        rows = ids[rng.integers(0, len(ids) - T, 16)[:, None] + np.arange(T + 1)]
        model.zero_grad()
        biases.begin_step()
        routers = RouterLosses(balance_loss, 0.0)
        with routers.collected():
            loss = model.loss(rows[:, :-1], rows[:, 1:])
        losses.append(loss.item())
        routers.added_to(loss, np.ones(1, np.float32)).backward()
        biases.count(routers)
        optimizer.step()
        biases.move()
        loads.append(routers.counts[0])
    load = np.sum(loads[-50:], 0)
    return np.mean(losses[-50:]), np.sort(load)[::-1] / load.mean()


lines = {}
for name, options in (
    ("without", {}),
    ("balance loss", dict(balance_loss=0.02)),
    ("bias", dict(bias_rate=0.02)),
):
    loss, load = train(**options)
    share = 100 * load[0] / 8
    print(f"{name:12} loss {loss:.2f}; fullest expert {share:3.0f} % of the tokens", end="")
    print(f", experts below a tenth of the mean: {(load < 0.1).sum()}")
    lines[name] = load
lesson.figures.curves(np.arange(1, 9), lines, "experts, the fullest first", "load", log=False)

# %% [markdown]
# Without a remedy the fullest expert gets 66 % of the tokens, and 2 of the 8 hardly any: their parameters are in memory for nothing. With the balance loss it gets 15 %, with the bias 13 %; equal loads would be 12.5 %. The
# loss of the model falls as well, but by a few hundredths, with one seed and 300 steps, and lesson 40 says how little that proves. What is certain is the time: where experts are on several GPUs, all of them wait for the fullest.
#
# ## What decoding reads
#
# Decoding is limited by the bytes that are read ([lesson 18](18_kv_cache.ipynb)), and a step reads the experts that *any* sequence of the batch has chosen. One sequence reads K of E. With B sequences that choose by chance, an expert
# is left out by all of them with probability $(1 - K/E)^B$:

# %%
numbers = np.array([1, 2, 4, 8, 16, 32, 64, 128])
lines = {}
for name, c in (("Mixtral 8x7B", mixtral), ("Qwen3 30B", qwen)):
    expert = 3 * c.dim * c.expert_hidden_dim * c.n_layers
    others = parameters(c) - c.n_experts * expert
    read = c.n_experts * (1 - (1 - c.experts_per_token / c.n_experts) ** numbers)
    lines[name] = 2e-9 * (others + read * expert)
    print(f"{name:13}", *(f"{v:5.1f}" for v in lines[name]), " GB for 1, 2, 4, ... 128 sequences")
lesson.figures.curves(numbers, lines, "sequences", "GB of weights that a step reads, bf16")

# %% [markdown]
# Alone, a user gets the speed of a model with the active parameters; a full server reads them all, and shares the reading among its sequences. For few rows the sort is not worth it: a warp reads a row of a
# matrix of the expert that its pair names, and nothing is padded (`kernels/experts/expert_gemv.py`).
#
# ## The same bits, whatever the others choose
#
# Batch invariance ([lesson 35](35_one_order.ipynb)) is harder here: not only the number of rows decides which product an ordinary library takes, but how many *other* rows chose the same expert, which no one controls. First the
# product of NumPy's BLAS for the first row, in groups of different sizes, against the group of 64; then products that are one chain of additions for each element:

# %% tags=["varies"]
rng = np.random.default_rng(2)
x = rng.normal(size=(64, 256)).astype(np.float32)
w = rng.normal(size=(64, 256)).astype(np.float32)


def chain(x, w):
    y = np.zeros((len(x), len(w)), np.float32)
    for i in range(x.shape[1]):
        y += x[:, i : i + 1] * w[:, i]
    return y


for name, product in (("BLAS", lambda x, w: x @ w.T), ("one chain", chain)):
    differ = [int((product(x[:n], w)[0] != product(x, w)[0]).sum()) for n in (1, 2, 17, 64)]
    print(f"{name:10} elements with other bits in groups of 1, 2, 17, 64:", *differ)

# %% [markdown]
# In xtrain's grouped products every sum is one chain in the order of its terms, whatever the other rows are; padding is other rows, too. So is the choice: it looks at a row's own logits alone. That rules out **capacity**, an older remedy for unequal loads: an
# expert takes at most so many tokens and *drops* the rest, so what a token gets depends on who came before it.
#
# ## The library's kernel
#
# A warp for each expert reads all pairs E times. xtrain reads them twice: one kernel counts per block, one scans, and in the third each warp ranks its lanes among those with the *same* expert, by `cuda.match_any_sync`:

# %%
from xtrain.kernels.experts import expert_order

lesson.source(expert_order.make_place_kernel)

# %% [markdown]
# (The atomics there count integers: any order gives the same counts.) Your functions and the library's:

# %%
from xtrain.kernels.experts import routing

logits = np.random.default_rng(4).normal(size=(100, 8)).astype(np.float32)
theirs, their_weights = routing.routing(logits, 2, True)
experts, weights = choose(logits, 2)
order = expert_order.expert_order(theirs, 8)
pairs, first = expert_slots(experts.ravel().tolist(), 8, expert_order.TILE)
B, gradient = balance(logits, order.counts_E)
their_B = routing.router_loss(logits, order.counts_E, 1.0, 0.0)
print("experts", np.array_equal(experts, theirs), " weights", np.allclose(weights, their_weights))
print("slots", np.array_equal(pairs, order.pairs_M[: first[-1]]), " B", np.allclose(B, their_B))

# %% [markdown]
# `xtrain train --experts 8 --experts-per-token 2` trains one: [mixtures of experts](howto/experts.md).
#
# ## What did not help
#
# *Atomic counters for the slots.* Fast and simple, but the order of an expert's rows then differs from run to run, and with it the order in which its gradient is summed.
#
# *Sizes of groups on the host.* One launch for each expert, with its number of rows, waits for the counts to arrive from the device in each layer, and cannot be in a CUDA graph. With the experts of tiles in a list on the device
# one launch serves every routing; its grid is as large as the worst case, and tiles without an expert end at once.
#
# *A gradient through the choice.* Softmax over all experts, also over those not chosen, as weights: then all experts must be computed to know what they would have added.
#
# ## More exercises
#
# 1. With K = 1 and weights that are divided by their sum, which gradient does the router get?
# 2. B is 1 for two tokens that are spread evenly, K = 1. What is its value for any K, if all probabilities and all counts are equal?
# 3. How many slots are needed at most for N tokens, whatever the router does?
#
# <details><summary>Solutions</summary>
#
# 1: None: the one weight is always 1. That is why our small models take the probability itself. 2: K: the counts are N K / E and the probabilities 1 / E. 3: Each expert with pairs wastes at most TILE - 1 slots: N K + min(E, N K) (TILE - 1), rounded down to a multiple
# of TILE.
#
# </details>
#
# ## Sources
#
# - N. Shazeer et al., *Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer*, 2017.
# - W. Fedus, B. Zoph, N. Shazeer, *Switch Transformers*, 2021: K = 1, the balance loss, capacity.
# - T. Gale et al., *MegaBlocks: Efficient Sparse Training with Mixture-of-Experts*, 2022: no token is dropped; tiles of one expert.
# - A. Jiang et al., *Mixtral of Experts*, 2024. A. Yang et al., *Qwen3 Technical Report*, 2025.
# - L. Wang et al., *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*, 2024: the bias.
