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
# # 25 Fine-tuning: SFT and LoRA by hand
#
# *About 60 minutes. You need [lesson 8](08_training.ipynb) and [lesson 16](16_memory.ipynb).*
#
# **The question.** A pretrained model continues text. It does not answer: after a question it may
# well write a second question. A few thousand conversations change that. But training in bf16 takes
# 18 bytes per parameter before the first activation: weights in two precisions, gradients, moments.
# How do we teach a model of a billion parameters to answer, on a card with 8 GB?
#
# You will write the targets of supervised fine-tuning (SFT), the mask that lets several
# conversations share a row, and the backward pass of LoRA.

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

IGNORE = -100  # a target that does not count

# %% [markdown]
# ## What is trained, by hand
#
# A chat template turns a conversation into one text. Every token of it is an input. But only what
# the assistant says is a **target**: the model should learn to answer, not to ask.
#
# ```text
# ids       <user>  1 + 2  <end>  <bot>   3   <end>
# trained     no     no      no     no   yes   yes
# ```
#
# The token that ends the answer is trained too, otherwise the model never stops. As in [lesson
# 8](08_training.ipynb), the target of an input is the token after it. So the input `<bot>` has the
# target 3, although `<bot>` itself is not trained:

# %%
words = ["<user>", "1", "+", "2", "<end>", "<bot>", "3", "<end>"]
trained = [False, False, False, False, False, False, True, True]
for word, after, yes in zip(words, words[1:], trained[1:]):
    print(f"{word:7} -> {after if yes else 'ignored'}")

# %% [markdown]
# ## Exercise 25.1: inputs and targets


# %% tags=["exercise"]
def inputs_and_targets(ids, trained):
    """ids (n,) whole numbers, trained (n,) bool -> inputs, targets, (n - 1,) each.

    The target of an input is the token after it, or IGNORE where that token is not trained.
    """
    # YOUR CODE


# %%
lesson.check("25.1", inputs_and_targets)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.where(condition, x, y)`. Both the tokens and the flags move by one.
#
# </details>


# %% tags=["solution"]
# Solution 25.1
def inputs_and_targets_solution(ids, trained):
    """ids (n,) whole numbers, trained (n,) bool -> inputs, targets, (n - 1,) each.

    The target of an input is the token after it, or IGNORE where that token is not trained.
    """
    return ids[:-1], np.where(trained[1:], ids[1:], IGNORE)


inputs_and_targets = lesson.yours(inputs_and_targets, inputs_and_targets_solution)


# %% [markdown]
# The loss is the mean over the targets that count. So a long question costs computation but does not
# change the weight of its answer.
#
# ## Several conversations in a row
#
# Conversations have different lengths. With one per row, all rows are as long as the longest, and
# most of the computation may be padding. **Packing** puts several into one row:
#
# ```text
# one per row    [ a a a a a . . . . ]        packed    [ a a a a a b b b c ]
#                [ b b b . . . . . . ]        starts    [ 0 0 0 0 0 5 5 5 8 ]
#                [ c . . . . . . . . ]
# ```
#
# Then b must not see a. Everything per token (norms, MLP, products) does not mix tokens anyway. Two
# things do depend on the sequence: attention needs another mask, and RoPE other **positions**, which
# count from the start of each conversation. `starts` holds the column at which a token's conversation
# begins, and both follow from it.
#
# ## Exercise 25.2: a mask without leaks


# %% tags=["exercise"]
def mask_and_positions(starts):
    """starts (T,) -> may_see (T, T) bool, positions (T,).

    may_see[t, s]: may the query at column t read the key at column s? Only keys of its
    conversation, itself and earlier ones.  positions: of each token in its conversation, from 0.
    """
    # YOUR CODE


# %%
lesson.check("25.2", mask_and_positions)

# %% [markdown]
# <details><summary>Hint</summary>
#
# With `columns = np.arange(T)`: `columns[None, :]` are the keys and `columns[:, None]` the queries.
# A key must be neither after the query nor before the query's start.
#
# </details>


# %% tags=["solution"]
# Solution 25.2
def mask_and_positions_solution(starts):
    """starts (T,) -> may_see (T, T) bool, positions (T,).

    may_see[t, s]: may the query at column t read the key at column s? Only keys of its
    conversation, itself and earlier ones.  positions: of each token in its conversation, from 0.
    """
    columns = np.arange(len(starts))
    keys, queries = columns[None, :], columns[:, None]
    return (keys <= queries) & (keys >= starts[:, None]), columns - starts


mask_and_positions = lesson.yours(mask_and_positions, mask_and_positions_solution)


# %%
starts = np.array([0, 0, 0, 0, 0, 5, 5, 5, 8])
may_see, positions = mask_and_positions(starts)
print("\n".join("".join(".x"[int(x)] for x in row) for row in may_see))
print("positions", positions.tolist())

# %%
lesson.figures.ownership(
    np.where(may_see, np.arange(9), -1),
    "row t: the keys that the query at column t may read; –: hidden from it",
    width=lesson.figures.NARROW,
)

# %% [markdown]
# The mask has blocks on its diagonal. A kernel needs no such matrix: a query has a first and a last
# key, and [FlashAttention](13_flash_attention.ipynb) skips the tiles outside. Does the library's
# model, given `starts`, compute the same loss as for the conversations alone?

# %%
shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=32)
config = xtrain.ModelConfig(vocab_size=24, **shape)
model = xtrain.Transformer(config, seed=0)
ids, targets = np.random.default_rng(0).integers(0, 24, (2, 1, 9))
alone = [model.loss(ids[:, a:b], targets[:, a:b]).item() for a, b in ((0, 5), (5, 8), (8, 9))]
packed = model.loss(ids, targets, starts=starts[None]).item()
leaking = model.loss(ids, targets).item()
print("packed = the mean of the parts:", abs(packed - np.dot(alone, [5, 3, 1]) / 9) < 1e-5)
print("without starts:                ", abs(leaking - packed) < 1e-5)

# %% [markdown]
# ## LoRA, by hand
#
# Fine-tuning changes a matrix $w$ by some $\Delta w$. **LoRA** writes the change as a product of two
# thin matrices and trains only these:
#
# $$y = x w^T + f\,(x a^T)\,b^T \qquad w: (O, I)\ \text{frozen},\quad a: (r, I),\quad b: (O, r),\quad f = \alpha / r$$
#
# This is a layer with the matrix $w + f\,b a$, a change of rank r. At first b is 0, so the model is the
# pretrained one; a is random, otherwise both gradients would be 0 forever. The factor f keeps the
# size of the change when you try another r. How many numbers are that?

# %%
O, I, r = 4096, 4096, 16
print(f"w {O * I:,}   a and b {r * (O + I):,}: {100 * r * (O + I) / (O * I):.2f} %")

# %% [markdown]
# For the backward pass, name the intermediate result: $u = x a^T$, (N, r). Then $y = x w^T + f\,u b^T$.
# From [lesson 5](05_backward.ipynb) you know the gradients of a product: for $y = u b^T$ they are
# $du = dy\,b$ and $db = dy^T u$. Do not forget f, and note that x is used twice.
#
# ## Exercise 25.3: the backward pass


# %% tags=["exercise"]
def lora_backward(dy, x, w, a, b, f):
    """The gradients of y = x w^T + f (x a^T) b^T, with w frozen -> dx, da, db.

    dy (N, O), x (N, I), w (O, I), a (r, I), b (O, r).  f: a number.
    """
    # YOUR CODE


# %%
lesson.check("25.3", lora_backward)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `du = f * dy @ b` is the gradient with respect to u, (N, r).
#
# </details>
# <details><summary>Hint 2</summary>
#
# `da = du.T @ x`, `db = f * dy.T @ u`, and dx is a sum of two products: one by w, one by a.
#
# </details>


# %% tags=["solution"]
# Solution 25.3
def lora_backward_solution(dy, x, w, a, b, f):
    """The gradients of y = x w^T + f (x a^T) b^T, with w frozen -> dx, da, db.

    dy (N, O), x (N, I), w (O, I), a (r, I), b (O, r).  f: a number.
    """
    u, du = x @ a.T, f * dy @ b
    return dy @ w + du @ a, du.T @ x, f * dy.T @ u


lora_backward = lesson.yours(lora_backward, lora_backward_solution)


# %% [markdown]
# No gradient of w: that product, (O, N) times (N, I), is a third of the layer's work in ordinary
# training, and it is gone. What the frozen model still costs is dx: the gradient must get through to
# the adapters below.
#
# ## A model learns a second task
#
# Now with the library. The task of the first training: in a row `a b = c`, c is a + b modulo 10. Only
# c is trained; 10 stands for `=`.


# %%
def task(sign, n=64):
    """-> ids, targets (n, 3) of rows a, b, =, c"""
    a, b = rng.integers(0, 10, (2, n))
    rows = np.stack([a, b, np.full(n, 10), (a + sign * b) % 10], 1)
    flags = np.array([False, False, False, True])
    pairs = [inputs_and_targets(row, flags) for row in rows]
    return np.array([x for x, _ in pairs]), np.array([y for _, y in pairs])


def teach(model, sign, steps, lr):
    optimizer = xtrain.AdamW(model, lr=lr, weight_decay=0.0)
    for _ in range(steps):
        model.zero_grad()
        model.loss(*task(sign)).backward()
        optimizer.step()


def right(model, sign):
    ids, targets = task(sign, 400)
    return (model(ids).numpy()[:, -1].argmax(-1) == targets[:, -1]).mean()


rng = np.random.default_rng(0)
teach(model, +1, 500, 3e-3)
print(f"right: {right(model, +1):.0%} of the sums, {right(model, -1):.0%} of the differences")

# %% [markdown]
# An `AdaptedTransformer` has frozen weights, and after `adapt` its parameters are the adapters alone:

# %%
from xtrain.nn.lora import AdaptedTransformer, Lora

adapted = AdaptedTransformer(config, None, trainable=False)
for (_, mine), (_, theirs) in zip(adapted.named_parameters(), model.named_parameters()):
    mine.data = theirs.data
adapted.adapt(Lora(r=8, alpha=16))
print(f"before training:        right: {right(adapted, +1):4.0%} of the sums")
teach(adapted, -1, 500, 3e-3)
sums, differences = right(adapted, +1), right(adapted, -1)
print(f"with adapters:          right: {sums:4.0%} of the sums, {differences:.0%} of differences")
print(f"the model without them: right: {right(model, +1):4.0%} of the sums")
numbers = [sum(t.size for _, t in m.named_parameters()) for m in (model, adapted)]
print(f"trained: {numbers[1]:,} of {numbers[0]:,}")

# %% [markdown]
# After training, $w + f\,b a$ is an ordinary matrix. **Merged**, the model costs nothing extra when it
# is served. Not merged, many adapters of a few megabytes each can belong to one model.
#
# ## Measure: what LoRA saves
#
# The plan of [lesson 16](16_memory.ipynb) counts the bytes of one training step without running it.
# Here for a model of 1.1 billion parameters, one row of 1024 tokens, in bf16:

# %%
from xtrain.training.memory_plan import plan

large = dict(dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, hidden_dim=5632)
billion = xtrain.ModelConfig(vocab_size=32000, max_seq_len=2048, qk_norm=False, **large)
for rank in (0, 16):
    kinds = plan(billion, 1, 1024, "bf16", lora=rank).kinds
    state = ("frozen weights", "weights", "bf16 copy of the weights", "gradients", "moments")
    print(f"rank {rank}" if rank else "all weights")
    for kind in state:
        print(f"    {kind:25} {kinds.get(kind, 0) / 1e9:5.1f} GB")
    rest = sum(n for kind, n in kinds.items() if kind not in state)
    print(f"    {'everything else':25} {rest / 1e9:5.1f} GB")
    print(f"    {'in all':25} {sum(kinds.values()) / 1e9:5.1f} GB")

# %% [markdown]
# So a model of a billion parameters learns on a card with 8 GB: all weights need 21.4 GB, LoRA of rank 16 needs
# 4.2 GB. The frozen weights exist in bf16 only, because no optimizer adds small steps to them. The activations
# remain: LoRA does not make them smaller, activation checkpointing does.
#
# **The improvement** of packing is measured in padding. Conversations have many lengths, a few of them
# long. The share of a batch that is padding, with one per row and packed:

# %%
from xtrain.tuning import rows

lengths = np.random.default_rng(1).lognormal(5.5, 0.8, 2000).astype(int).clip(16, 2048).tolist()
groups = rows.packed(lengths, 2048)
for name, n, width in (("one per row", len(lengths), max(lengths)), ("packed", len(groups), 2048)):
    print(f"{name:12} {n:5} rows, {100 * (1 - sum(lengths) / (n * width)):3.0f} % padding")

# %% [markdown]
# ## The library's kernel
#
# LoRA needs no new kernel, only matrix products. q, k and v are one packed product in the library, so
# their adapters are packed too: one product for all $u$, and each adapter adds to its own columns of y.
# The backward is your 25.3, with `accumulate` for the two terms of dx.

# %%
from xtrain.nn import functional as F

lesson.source(F.LoraLinear.forward)
lesson.source(F.LoraLinear.backward)

# %% [markdown]
# Your 25.1 and the `starts` of 25.2:

# %%
lesson.source(rows.rows_of)
lesson.source(rows.packed)

# %% [markdown]
# ## What did not help
#
# *Sorting conversations by length*, so that rows of one batch are about equally long. It saves padding,
# too, but a batch of long ones and a batch of short ones have different gradients, and the order is no
# longer random.
#
# *Adding the adapters to w in every step*, $x (w + f\,b a)^T$. One product instead of three, but the sum
# is a second copy of w, and its gradient is the one that LoRA avoids.
#
# ## More exercises
#
# 1. Start b at random and a at 0. What changes? And what if both start at 0?
# 2. What is the largest rank for which a and b have fewer numbers than w?
# 3. Train the sums with every token as a target, not only c. Why is the loss higher at the end?
#
# <details><summary>Solutions</summary>
#
# 1: The product is 0 as well, and now a learns first. With both at 0 all gradients are 0: da contains b,
# db contains a. 2: r (O + I) < O I, so for a square matrix r < O / 2. 3: The questions are random: nothing
# can predict b, so its loss stays at ln 10, and the mean over b, `=` and c near ln(10) / 3.
#
# </details>
#
# ## Sources
#
# - E. Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021.
# - L. Ouyang et al., *Training language models to follow instructions with human feedback*, 2022:
#   supervised fine-tuning as the first step.
# - M. Krell et al., *Efficient Sequence Packing without Cross-contamination*, 2021.
# - D. Kalajdzievski, *A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA*, 2023: why f
#   should perhaps be $\alpha / \sqrt r$.
