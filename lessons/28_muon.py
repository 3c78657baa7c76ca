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
# # 28 An optimizer beyond AdamW
#
# *About 60 minutes. You need [lesson 8](08_training.ipynb) and [lesson 12](12_bf16.ipynb).*
#
# **The question.** For AdamW a weight matrix is a list of numbers, each with its own step. But a matrix
# is a map from inputs to outputs. Which step lowers the loss most, if what we limit is how much it
# changes the *outputs*? One answer is Muon: in the record below it reaches AdamW's loss in 55 % of the
# steps and in 0.68 of the time.
#
# You will compute that step with a singular value decomposition, then without one, by matrix products
# alone; then write the whole optimizer and a learning-rate schedule that needs no fixed end.

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

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's a, b, c

# %% [markdown]
# ## The steepest step, by hand
#
# A small step $D$ changes the loss by about $\langle G, D \rangle = \sum_{ij} G_{ij} D_{ij}$, where $G$ is
# the gradient. The longer the step, the larger the change, so "the steepest step" means nothing until
# we say how long a step is. Three ways to measure length give three optimizers:
#
# | at most 1 | steepest step | known as |
# |---|---|---|
# | $\lVert D \rVert_F$, the root of the sum of squares | $-G / \lVert G \rVert_F$ | gradient descent |
# | the largest element | $-\mathrm{sign}(G)$ | sign descent; about what AdamW does |
# | $\lVert D \rVert_2$, the spectral norm | $-U V^T$ | Muon |
#
# The spectral norm is the largest factor by which $D$ can lengthen a vector. A layer computes
# $y = W x$, so after the step no output moves by more than $\lVert D \rVert_2 \lVert x \rVert$, whatever the input is. To
# limit it is to limit how much the layer can change.
#
# Every matrix has a singular value decomposition $G = U S V^T$: turn, stretch each axis by $s_i \ge 0$,
# turn again. Then
#
# $$\langle G, D \rangle = \sum_i s_i\, u_i^T D\, v_i \ge -\sum_i s_i$$
#
# because a $D$ of spectral norm 1 cannot make $u_i^T D v_i$ smaller than $-1$. It is $-1$ for every $i$ at
# once when $D = -U V^T$: the gradient with all singular values set to 1.

# %%
G = np.array([[3.0, 0.0], [4.0, 5.0]])
U, s, Vt = np.linalg.svd(G)
print("singular values of G:", s.round(3), " sum", s.sum().round(3))
steps = {
    "gradient descent": -G / np.linalg.norm(G),
    "sign descent": -np.sign(G),
    "Muon": -U @ Vt,
}
for name, D in steps.items():
    D = D / np.linalg.norm(D, 2)  # all three as long as allowed
    change = (G * D).sum()
    print(f"{name:17} {D.round(3).tolist()!s:38} changes the loss by {change:.3f}")

# %% [markdown]
# With the same limit on the outputs, $-U V^T$ lowers the loss most. Note that it has no small direction:
# the second singular value of G was a third of the first, here both count the same.
#
# ## Exercise 28.1: the steepest step


# %% tags=["exercise"]
def steepest(G):
    """G (R, C), of full rank -> D (R, C): the steepest descent step of spectral norm 1."""
    # YOUR CODE


# %%
lesson.check("28.1", steepest)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.linalg.svd(G, full_matrices=False)` returns U, s and the transposed V. The step goes downhill.
#
# </details>


# %% tags=["solution"]
# Solution 28.1
def steepest_solution(G):
    """G (R, C), of full rank -> D (R, C): the steepest descent step of spectral norm 1."""
    U, _, Vt = np.linalg.svd(G, full_matrices=False)
    return -U @ Vt


steepest = lesson.yours(steepest, steepest_solution)


# %% [markdown]
# Does it matter for a real gradient? A small model learns sums: in a row `a b = c`, c is a + b modulo 10.
# After some steps of AdamW we look at the gradient of one matrix, and at three steps made from it.


# %%
def task(rng, n=64):
    """-> ids, targets (n, 3) of rows a, b, =, c. Only c is trained."""
    a, b = rng.integers(0, 10, (2, n))
    rows = np.stack([a, b, np.full(n, 10), (a + b) % 10], 1).astype(np.int32)
    targets = rows[:, 1:].copy()
    targets[:, :2] = -100
    return rows[:, :-1], targets


shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=16)
config = xtrain.ModelConfig(vocab_size=16, **shape)


def train(kind, lr, steps=200, schedule=lambda step, steps, peak: peak):
    """kind: the class of the optimizer -> the model, losses of each step"""
    rng, model = np.random.default_rng(0), xtrain.Transformer(config, seed=0)
    optimizer, losses = kind(model, lr=lr, weight_decay=0.0), []
    for step in range(steps):
        optimizer.lr = schedule(step, steps, lr)
        model.zero_grad()
        loss = model.loss(*task(rng))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


model, _ = train(xtrain.AdamW, 3e-3, steps=50)
g = next(t.grad for name, t in model.named_parameters() if "layers.1.mlp.up" in name)
values = lambda x: np.linalg.svd(x, compute_uv=False)
ordered = {"gradient": values(g), "its sign": values(np.sign(g)), "Muon": values(steepest(g))}
ordered = {name: x / x.max() for name, x in ordered.items()}
tenths = {name: int((x > 0.1).sum()) for name, x in ordered.items()}
print("of 32 directions, those above a tenth of the largest:")
print(f"in the gradient: {tenths['gradient']}   in Muon's step: {tenths['Muon']}")
lesson.figures.curves(range(1, 33), ordered, "direction", "singular value", log=False)

# %% [markdown]
# A few directions hold nearly all of the gradient. Gradient descent would move only along these. With the sign the rare
# ones count more, but about half of them still less than a fifth of the largest. In Muon's step the rare directions
# count as much as the common ones.
#
# ## Without a decomposition
#
# An SVD of every matrix in every step would take longer than the training step. Matrix products are
# what a GPU is good at. They are enough, because a polynomial with odd powers acts on the singular
# values alone. With $G = U S V^T$ and $U^T U = V^T V = 1$:
#
# $$G G^T G = U S V^T\, V S U^T\, U S V^T = U S^3 V^T$$
#
# So $a G + b\, G G^T G + c\, (G G^T)^2 G = U\, p(S)\, V^T$ with $p(s) = a s + b s^3 + c s^5$. Choose p such that
# repeating it takes every s between 0 and 1 to about 1. To begin in that range, divide G by its
# Frobenius norm, which is at least as large as the largest singular value.
#
# The classical choice (Newton and Schulz) is $p(s) = 1.5 s - 0.5 s^3$, which converges to exactly 1. But
# near 0 it only multiplies by 1.5. K. Jordan gave up the exact 1 for speed: his quintic multiplies small
# values by 3.4445, and ends somewhere between 0.68 and 1.2. The 2 x 2 matrix from above, step by step:

# %%
a, b, c = QUINTIC
X = G / np.linalg.norm(G)
print("begin        ", X.round(3).tolist(), " singular values", values(X).round(3))
for i in range(5):
    A = X @ X.T
    X = a * X + (b * A + c * A @ A) @ X
    print(f"iteration {i + 1}  ", X.round(3).tolist(), " singular values", values(X).round(3))
print("U V^T        ", (U @ Vt).round(3).tolist())

# %% [markdown]
# Not exactly $U V^T$, but both singular values are near 1. And small ones? All of p five times over:

# %%
s = np.geomspace(1e-3, 1, 60)
cubic, quintic = s.copy(), s.copy()
for _ in range(5):
    cubic = 1.5 * cubic - 0.5 * cubic**3
    quintic = a * quintic + b * quintic**3 + c * quintic**5
near = {"1.5 s - 0.5 s^3": cubic, "Jordan's quintic": quintic}
for name, y in near.items():
    at = np.interp([0.003, 0.01, 0.1], s, y)
    print(f"{name:17} takes 0.003, 0.01, 0.1 to", at.round(2))
lesson.figures.curves(s, near, "singular value at the beginning", "after five iterations")

# %% [markdown]
# One detail for matrices that are not square: for a tall one, R > C, the product $X X^T$ is larger than
# $X^T X$. (Both are called Gram matrices: the products of all rows, or of all columns, of X with each other.) Since $(X X^T) X = X (X^T X)$, multiply from the other side; or transpose, compute, and
# transpose back.
#
# ## Exercise 28.2: Newton-Schulz


# %% tags=["exercise"]
def newton_schulz(G, steps=5):
    """G (R, C) -> about U V^T, by `steps` iterations of the quintic from G / max(|G|, 1e-7).

    For R > C the Gram matrix is (C, C). G = 0 gives 0. G stays unchanged.
    """
    # YOUR CODE


# %%
lesson.check("28.2", newton_schulz)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.linalg.norm(G)` is the Frobenius norm. If R > C, call newton_schulz(G.T) and transpose the result.
#
# </details>


# %% tags=["solution"]
# Solution 28.2
def newton_schulz_solution(G, steps=5):
    """G (R, C) -> about U V^T, by `steps` iterations of the quintic from G / max(|G|, 1e-7).

    For R > C the Gram matrix is (C, C). G = 0 gives 0. G stays unchanged.
    """
    if G.shape[0] > G.shape[1]:
        return newton_schulz_solution(G.T, steps).T
    a, b, c = QUINTIC
    X = G / max(np.linalg.norm(G), 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


newton_schulz = lesson.yours(newton_schulz, newton_schulz_solution)


# %% [markdown]
# **Why bf16 is enough.** A weight must be exact, because its steps are small ([lesson
# 12](12_bf16.ipynb)). X is not a weight: it is a *direction*, and a slightly wrong direction lowers the
# loss nearly as much. Here every intermediate result is rounded to 8 significant bits:


# %%
def bf16(x):
    """Rounded to 8 significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def newton_schulz_bf16(G):
    X = bf16(G / np.linalg.norm(G))
    for _ in range(5):
        A = bf16(X @ X.T)
        P = bf16(b * A + c * A @ A)
        X = bf16(a * X + P @ X)
    return X


G = np.random.default_rng(1).normal(size=(64, 128))
exact, rounded = newton_schulz(G), newton_schulz_bf16(G)
error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
cosine = (exact * rounded).sum() / np.linalg.norm(exact) / np.linalg.norm(rounded)
print(f"error of X: {100 * error:.1f} %")
print(f"cosine of the angle between the two steps: {cosine:.4f}")

# %% [markdown]
# ## A step of Muon
#
# Around the direction there is little else. The running mean of gradients is the same as in AdamW,
# looked at one step ahead (Nesterov). A matrix has no second moment: half of AdamW's state is gone.
#
# $$m \leftarrow m + (1 - \mu)(g - m) \qquad x = g + \mu (m - g)$$
#
# And the length of the step? $U V^T$ of shape (R, C) has min(R, C) singular values of 1, so the sum of
# its squares is min(R, C), and its root mean square is $\sqrt{\min(R, C) / (R C)} = 1 / \sqrt{\max(R, C)}$:
# the larger the matrix, the smaller each element. AdamW's updates have a root mean square of about 0.2.
# With the factor $0.2 \sqrt{\max(R, C)}$ Muon's have it too, for every shape, so **the same learning rate
# and the same weight decay** serve both (Liu et al. 2025). (A little less, because the quintic's singular
# values are below 1 on average.)

# %%
for rows, columns in ((64, 64), (64, 256), (512, 64)):
    x = newton_schulz(np.random.default_rng(0).normal(size=(rows, columns)))
    rms = np.sqrt((x**2).mean())
    scaled = 0.2 * np.sqrt(max(rows, columns)) * rms
    print(f"{rows:3} x {columns:3}: root mean square {rms:.4f}, scaled {scaled:.2f}")

# %% [markdown]
# ## Exercise 28.3: the optimizer


# %% tags=["exercise"]
def muon_step(w, m, g, lr, mu, decay, orthogonalize):
    """w, m, g (R, C): weights, running mean, gradient -> new w, new m. The inputs stay unchanged.

    w = w (1 - lr decay) - lr 0.2 sqrt(max(R, C)) orthogonalize(x), with Nesterov's x.
    """
    # YOUR CODE


# %%
lesson.check("28.3", muon_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# m first, then x from the new m, then w: three lines. `max(w.shape)` is max(R, C).
#
# </details>


# %% tags=["solution"]
# Solution 28.3
def muon_step_solution(w, m, g, lr, mu, decay, orthogonalize):
    """w, m, g (R, C): weights, running mean, gradient -> new w, new m. The inputs stay unchanged.

    w = w (1 - lr decay) - lr 0.2 sqrt(max(R, C)) orthogonalize(x), with Nesterov's x.
    """
    m = m + (1 - mu) * (g - m)
    x = g + mu * (m - g)
    scale = 0.2 * np.sqrt(max(w.shape))
    return w * (1 - lr * decay) - lr * scale * orthogonalize(x), m


muon_step = lesson.yours(muon_step, muon_step_solution)


# %% [markdown]
# Which parameters is this for? For maps: the matrices of the blocks. A row of the embedding is looked up,
# not multiplied, the head's rows belong to tokens of very different frequency, and norms are vectors. All
# of these stay with AdamW. Packed storage is taken apart: q, k and v are three maps, each with an output
# space of its own.
#
# ## A schedule without an end
#
# Half a cosine from the peak to the end ([lesson 8](08_training.ipynb)) is a good schedule, if you know
# the end. Its checkpoints on the way are not good models: their learning rate is still high. **WSD**
# (warm-up, stable, decay) stays at the peak, and only decays in the last part, a tenth to a fifth of the
# steps. One long run in the stable phase can be finished at any point, by a short decay from a
# checkpoint. Hägele et al. (2024) found that a decay over a fifth, in the form $1 - \sqrt{t}$, is as good as
# a cosine of the same length.
#
# ## Exercise 28.4: warm-up, stable, decay


# %% tags=["exercise"]
def wsd(step, steps, peak, warmup, fraction):
    """The learning rate of a step, which counts from 0 to steps - 1.

    peak (step + 1) / warmup while step < warmup. In the last n = int(fraction steps) steps
    peak (1 - sqrt(t)), where t is k / n in the k-th of them (k = 1 to n). Between them, peak.
    """
    # YOUR CODE


# %%
lesson.check("28.4", wsd)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The k-th of the last n steps is step = steps - 1 - n + k. So k = step - (steps - 1 - n), and k <= 0
# before the decay.
#
# </details>


# %% tags=["solution"]
# Solution 28.4
def wsd_solution(step, steps, peak, warmup, fraction):
    """The learning rate of a step, which counts from 0 to steps - 1.

    peak (step + 1) / warmup while step < warmup. In the last n = int(fraction steps) steps
    peak (1 - sqrt(t)), where t is k / n in the k-th of them (k = 1 to n). Between them, peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    n = int(fraction * steps)
    k = step - (steps - 1 - n)
    return peak * (1 - np.sqrt(k / n)) if k > 0 else peak


wsd = lesson.yours(wsd, wsd_solution)


# %%
rates = {
    "cosine": [xtrain.nn.optim.learning_rate(i, 100, 1.0, 10, 0.0) for i in range(100)],
    "WSD": [wsd(i, 100, 1.0, 10, 0.2) for i in range(100)],
}
lesson.figures.curves(range(100), rates, "step", "learning rate", log=False)

# %% [markdown]
# ## A model learns
#
# The library's Muon and AdamW, on the sums of above, with your schedule, each with the best of three
# learning rates:

# %% tags=["varies"]
from xtrain.nn.optim import Muon

best = {}
for name, kind in (("AdamW", xtrain.AdamW), ("Muon", Muon)):
    schedule = lambda step, steps, peak: wsd(step, steps, peak, 10, 0.2)
    runs = [train(kind, lr, schedule=schedule)[1] for lr in (3e-3, 1e-2, 3e-2)]
    best[name] = min(runs, key=sum)
tens = {name: np.mean(np.reshape(losses, (-1, 10)), 1) for name, losses in best.items()}
half = {name: 10 * int((losses < 0.5).argmax()) for name, losses in tens.items()}
for name, losses in tens.items():
    print(f"{name:5}  loss below 0.5 after {half[name]:3} steps, {losses[-1]:.3f} at the end")
lesson.figures.curves(range(10, 201, 10), tens, "step", "mean loss of ten steps", log=False)

# %% [markdown]
# ## Measure: fewer steps, at a price
#
# That was a toy. The measured comparison has a model of 12 layers, 2,000 steps on 40 MB of text, four learning
# rates for each optimizer, of which the best one is shown:

# %%
runs = {name: lesson.record(f"bench_muon/dim384/{name}/bf16") for name in ("adamw", "muon")}
for name, r in runs.items():
    print(
        f"{name:5}  learning rate {r['lr']}, at the end {r['curve'][-1][1]:.3f}, a step "
        f"{r['ms']:.2f} ms"
    )
reached = runs["muon"]["value"]
longer = runs["muon"]["ms"] / runs["adamw"]["ms"]
print(
    f"Muon is at AdamW's last loss after {reached:.0f} % of the steps, "
    f"{reached / 100 * longer:.2f} of the time"
)
print("loss at the end, by learning rate:")
for name, r in runs.items():
    print(
        f"{name:5} ",
        *(f"{rate}: {loss:.3f}" for rate, loss in r["final_losses"].items()),
        sep="   ",
    )
steps = [step for step, _ in runs["muon"]["curve"]]
lines = {name: [loss for _, loss in r["curve"]] for name, r in runs.items()}
lesson.figures.curves(steps, lines, "step", "validation loss", log=False)

# %% [markdown]
# Read it with care. Both optimizers are best at the largest of the four rates, so the best rate of neither
# is known, and it is one model of one size. Wen et al. (2025) tuned eleven optimizers with equal effort: there
# Muon and its relatives are 1.4 times as fast as AdamW for models of 0.1 billion parameters, and 1.1 times for 1.2
# billion.
#
# The steps are worth more, and each takes longer: per matrix of m x m elements, five iterations of three
# products are $30 m^3$ operations, and the training step itself $6 m^2$ per token. So the price is
# $5 m$ / tokens of a step, whatever the GPU:

# %%
print("width m   tokens of a step   operations added")
for m, tokens in ((384, 8192), (768, 16384), (768, 524288), (4096, 4 << 20)):
    print(f"{m:7}   {tokens:16,}   {5 * m / tokens:15.1%}")

# %% [markdown]
# With the small batches of one GPU it is much, with the large batches of real training under one percent.
# With ZeRO-1, R ranks share the matrices, and each does 1 / R of it.
#
# ## The improvement
#
# A GPU spends time not only on operations. cuBLAS computes $C \leftarrow \alpha A B + \beta C$ in place, so
# $b A + c A^2$ needs a copy of A in C first, and so does $a X + P X$. Completing the square avoids both:
#
# $$a + b A + c A^2 = c \left(A + \tfrac{b}{2c}\right)^2 + \left(a - \tfrac{b^2}{4c}\right)$$
#
# Now every product overwrites its output, and the numbers are added on the diagonal only:

# %%
X = G / np.linalg.norm(G)
A = X @ X.T
S = A + b / (2 * c) * np.eye(64)
P = c * S @ S + (a - b * b / (4 * c)) * np.eye(64)
print("the same:", np.allclose(P @ X, a * X + (b * A + c * A @ A) @ X))
R, n = 384, 384
print(
    f"elements moved per iteration: {6 * R * n + 7 * n * n:,} before, {3 * R * n + 4 * n * n:,} now"
)

# %% [markdown]
# The library counts this without a GPU: `python bench/bench_muon.py --count`.
#
# ## The library's kernel
#
# Matrices of one shape, from all layers, are one batch of products. First their momentum is gathered
# from where they lie in the arena; a block sums its squares for the norm:

# %%
from xtrain.kernels import muon

lesson.source(muon.momentum_kernel)
lesson.source(muon.orthogonalize)

# %% [markdown]
# Does yours agree? On the CPU the library runs the polynomial as it is written.

# %%
x = np.random.default_rng(2).normal(size=(3, 6, 20)).astype(np.float32)
x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
theirs = muon.orthogonalize(x.copy())
mine = np.array([newton_schulz(one) for one in x])
print("the same:", np.allclose(mine, theirs, atol=1e-5))

# %% [markdown]
# `xtrain train --optimizer muon --schedule wsd` uses all of it.
#
# ## What did not help
#
# *The classical cubic.* It converges to exactly 1, which is not needed. In the figure above it has brought
# a singular value of 0.01 to 0.08 after five iterations, the quintic to 0.71. Gradients have many
# directions that small.
#
# *A limit of 3 % on the time of a step.* That was our goal for the model above. But $5 m$ / tokens is
# 23 % of the operations of the square matrices at 384 and 8,192 tokens: fewer passes over memory do not
# change that, larger batches or more ranks do.
#
# ## More exercises
#
# 1. What does `newton_schulz` give for a matrix of rank 1? And the exact $U V^T$?
# 2. Why is the gradient's length lost in Muon, and what does the clip of the gradient norm still do?
# 3. Jordan's p has $p(1) = a + b + c$. Compute it. Why is it no problem that it is not 1?
#
# <details><summary>Solutions</summary>
#
# 1: A singular value of 0 stays 0 under an odd polynomial, so newton_schulz gives about $u_1 v_1^T$. The SVD completes
# U and V with arbitrary directions, so the exact $U V^T$ is not unique. 2: The norm is divided out, so a gradient twice
# as long gives the same step. Clipping still bounds how much one gradient weighs in the running mean, among the others.
# 3: 0.701. A singular value of 1 goes to 0.7, the next iteration takes it to about 1.1: the values move around in
# [0.68, 1.2]. Only the direction matters, and a singular value of 0.68 or 1.2 is close enough.
#
# </details>
#
# ## Sources
#
# - K. Jordan et al., *Muon: an optimizer for hidden layers in neural networks*, 2024: the quintic, Nesterov.
# - J. Bernstein and L. Newhouse, *Old Optimizer, New Norm: An Anthology*, 2024: steepest descent under norms.
# - J. Liu et al., *Muon is Scalable for LLM Training*, 2025: the scale, weight decay, ZeRO-1.
# - K. Wen et al., *Fantastic Pretraining Optimizers and Where to Find Them*, 2025 (arXiv 2509.02046): a fair comparison.
# - S. Hu et al., *MiniCPM*, 2024: warm-up, stable, decay.
# - A. Hägele et al., *Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations*, 2024.
