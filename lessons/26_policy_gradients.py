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
# # 26 Policy gradients, and why the same bits matter
#
# *About 60 minutes. You need [lesson 21](21_engine.ipynb) and [lesson 25](25_finetuning.ipynb).*
#
# **The question.** Fine-tuning needs the right answer as a target. Often there is none, but a program
# can say whether an answer is good: the digits are sorted, the tests pass. The model draws an answer
# at random, and gets one number, the reward. Drawing has no derivative. What is the gradient?
#
# You will write REINFORCE's estimator, the advantages of a group, the clipped loss of PPO and GRPO,
# and the KL to a reference. Then you will see what happens when the program that draws and the
# program that trains disagree about the probability of a token.

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
# ## The estimator, by hand
#
# Take the smallest policy: one token out of four. Its logits $\theta$ give the probabilities $p$, and
# each token has a reward $R$. We want to raise the expected reward $J = \sum_a p_a R_a$. With four tokens
# we can compute its gradient, $\partial J / \partial \theta_a = p_a (R_a - J)$. Finite differences
# ([lesson 5](05_backward.ipynb)) must agree:


# %%
def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def J(logits):
    return softmax(logits) @ R


theta, R = np.array([0.5, 0.0, -0.5, 0.2]), np.array([1.0, 0.0, 3.0, 0.0])
p = softmax(theta)
exact = p * (R - J(theta))
steps = 1e-5 * np.eye(4)
differences = np.array([(J(theta + x) - J(theta - x)) / 2e-5 for x in steps])
print("p           ", p.round(4), "  J", J(theta).round(4))
print("dJ / dtheta ", exact.round(4))
print("differences ", differences.round(4))

# %% [markdown]
# A language model has too many completions for such a sum: with 50,000 tokens and a length of 100 there
# are $50000^{100}$. But it can draw some. Since $\nabla p = p\,\nabla \log p$, the gradient of the sum is
# an average over draws:
#
# $$\nabla J = \sum_a R_a \nabla p_a = \sum_a p_a\, R_a \nabla \log p_a = \mathbb{E}_{a \sim p}\,[R_a \nabla \log p_a]$$
#
# This is **REINFORCE**: draw, and raise the log-probability of what was drawn, in proportion to its
# reward. The reward needs no derivative. And you know the gradient of a log-probability from
# cross-entropy ([lesson 7](07_model.ipynb)): $\nabla \log p_a = \mathrm{onehot}(a) - p$.
#
# The exercise has a weight $A_i$ for each sample. For now it is the reward.
#
# ## Exercise 26.1: the policy gradient


# %% tags=["exercise"]
def policy_gradient(logits, actions, advantages):
    """logits (V,), actions (n,) whole numbers, advantages (n,) -> gradient (V,) of mean_i A_i log
    pi(a_i).

    pi is the softmax of the logits; the gradient is by the logits. Without samples (n = 0) the
    gradient is 0.
    """
    # YOUR CODE


# %%
lesson.check("26.1", policy_gradient)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `np.eye(V)[actions]` has one row per sample, onehot of its action. Subtract the softmax p,
# multiply by the advantages, take the mean.
#
# </details>


# %% tags=["solution"]
# Solution 26.1
def policy_gradient_solution(logits, actions, advantages):
    """logits (V,), actions (n,) whole numbers, advantages (n,) -> gradient (V,) of mean_i A_i log
    pi(a_i).

    pi is the softmax of the logits; the gradient is by the logits. Without samples (n = 0) the
    gradient is 0.
    """
    p = np.exp(logits - logits.max())
    p = p / p.sum()
    each = advantages[:, None] * (np.eye(len(p))[actions] - p)
    return each.sum(0) / max(len(actions), 1)


policy_gradient = lesson.yours(policy_gradient, policy_gradient_solution)


# %% [markdown]
# The estimate is random. With more samples it comes closer to the exact gradient:

# %%
rng = np.random.default_rng(0)
print("exact           ", exact.round(3))
for n in (10, 1000, 100_000):
    actions = rng.choice(4, n, p=p)
    print(f"{n:7,} samples ", policy_gradient(theta, actions, R[actions]).round(3))

# %% [markdown]
# ## A baseline
#
# Suppose that every answer gets 10 points more. Nothing changes about what is good. But now each sample
# pushes its token up by at least 10, and the right direction remains only as the difference of large
# numbers. The remedy: subtract a number $b$ from each reward. This does not change the expectation,
# because the mean of $\nabla \log p$ is zero:

# %%
print("mean of grad log p:", np.abs(p @ (np.eye(4) - p)).max() < 1e-12)


def rms_error(n, rewards, baseline, trials=300):
    """The typical distance of an estimate from the exact gradient."""
    draws = rng.choice(4, (trials, n), p=p)
    found = [policy_gradient(theta, a, rewards[a] - baseline) for a in draws]
    return np.sqrt(((np.array(found) - exact) ** 2).sum(1).mean())


samples = [2, 8, 32, 128, 512]
errors = {
    "reward + 10, no baseline": [rms_error(n, R + 10, 0.0) for n in samples],
    "reward, no baseline": [rms_error(n, R, 0.0) for n in samples],
    "either, baseline J": [rms_error(n, R, J(theta)) for n in samples],
}
for name, values in errors.items():
    print(f"{name:25}", "  ".join(f"{x:.2f}" for x in values))
lesson.figures.curves(
    samples, errors, "samples", "error of the gradient", "a baseline costs nothing"
)

# %% [markdown]
# All three are right on average, and all fall like $1 / \sqrt n$. To be as good as with the baseline,
# the first line needs about 107 times the samples: the ratio of the errors, squared.
#
# Where does a language model get $J$, its own expected reward for this prompt? PPO trains a second
# model for it. **GRPO** draws a group of G completions of the same prompt, and takes the mean of their
# rewards. It also divides by their standard deviation, so that prompts with rewards of any size weigh
# about the same. A completion is then judged only against others of its prompt. If all of a group are
# equally good, nothing can be learned from it, and the advantages must be 0.
#
# ## Exercise 26.2: advantages of a group


# %% tags=["exercise"]
def group_advantages(rewards):
    """rewards (P, G), one row per prompt -> advantages (P, G).

    (reward - mean of the group) / (standard deviation of the group + 1e-4)
    """
    # YOUR CODE


# %%
lesson.check("26.2", group_advantages)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `rewards.mean(1, keepdims=True)` is (P, 1): one mean per row. What is the deviation of a group in
# which all rewards are equal?
#
# </details>


# %% tags=["solution"]
# Solution 26.2
def group_advantages_solution(rewards):
    """rewards (P, G), one row per prompt -> advantages (P, G).

    (reward - mean of the group) / (standard deviation of the group + 1e-4)
    """
    centered = rewards - rewards.mean(1, keepdims=True)
    return centered / (rewards.std(1, keepdims=True) + 1e-4)


group_advantages = lesson.yours(group_advantages, group_advantages_solution)


# %%
print(group_advantages(np.array([[1.0, 0, 0, 1, 0, 0, 0, 0], [1.0] * 8])).round(2))

# %% [markdown]
# ## The ratio
#
# Drawing completions is slow, so we want several optimizer steps per batch. But after the first step the
# weights are no longer those that drew the tokens, and the average is over the wrong distribution. A
# weight per token corrects this, **the ratio** of new to old probability:
#
# $$r = \pi(\text{token}) / \pi_{\text{old}}(\text{token}) = \exp(\log \pi - \log \pi_{\text{old}})$$
#
# The derivative of $r A$ by $\log \pi$ is $r A$. For $r = 1$ that is REINFORCE. The correction is
# good only close to 1: with ratios like 20, a few tokens decide everything. So PPO stops when a token has
# moved far enough in the direction of its advantage:
#
# $$\text{loss} = -\min\,(r A,\ \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon)\, A)$$

# %%
r = np.linspace(0.4, 1.6, 49)
gains = {f"A = {A:+d}": np.minimum(r * A, np.clip(r, 0.8, 1.2) * A) for A in (1, -1)}
lesson.figures.curves(
    r, gains, "ratio", "min(r A, clip(r) A)", "no gain beyond the range", log=False
)

# %% [markdown]
# Flat means no gradient. A good token (A = +1) is not raised further when its ratio is above 1.2. But if
# it has become *less* likely, it is not clipped, however far it is: that has to be corrected.
#
# ## Exercise 26.3: the clipped loss


# %% tags=["exercise"]
def clipped(now, then, advantages, eps):
    """now, then, advantages (n,): log pi, log pi_old and A of each token -> losses (n,), slopes
    (n,).

    losses: -min(r A, clip(r, 1 - eps, 1 + eps) A).  slopes: the derivative of each by its `now`.
    """
    # YOUR CODE


# %%
lesson.check("26.3", clipped)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compute both products. Where the first is the smaller one, its derivative by `now` is the product
# itself, because d ratio / d now = ratio. Where the second is the smaller one, nothing depends on
# `now`.
#
# </details>


# %% tags=["solution"]
# Solution 26.3
def clipped_solution(now, then, advantages, eps):
    """now, then, advantages (n,): log pi, log pi_old and A of each token -> losses (n,), slopes
    (n,).

    losses: -min(r A, clip(r, 1 - eps, 1 + eps) A).  slopes: the derivative of each by its `now`.
    """
    ratio = np.exp(now - then)
    free, bound = ratio * advantages, np.clip(ratio, 1 - eps, 1 + eps) * advantages
    return -np.minimum(free, bound), np.where(free <= bound, -free, 0.0)


clipped = lesson.yours(clipped, clipped_solution)


# %% [markdown]
# ## The KL to a reference
#
# A reward is never all that you want. A model that only sorts digits may forget everything else, so a
# penalty holds it near a **reference**, usually the model before. The distance is
# $\mathrm{KL}(\pi, \pi_{\text{ref}}) = \mathbb{E}_{a \sim \pi}[-d]$, with
# $d = \log \pi_{\text{ref}} - \log \pi$ of the drawn token. Single samples of $-d$ are often negative,
# although a KL never is. Schulman's estimator **k3** adds something whose mean is zero:
# $\mathbb{E}[e^d - 1] = \sum_a \pi_a\, \pi_{\text{ref},a} / \pi_a - 1 = 0$, so
#
# $$k_3 = e^d - 1 - d$$
#
# has the same mean and is never negative, because $e^d \ge 1 + d$. Which has less noise?

# %%
reference = softmax(theta + np.array([0.3, -0.2, 0.2, 0.0]))
actions = rng.choice(4, 100_000, p=p)
d = np.log(reference / p)[actions]
print(f"exact KL  {p @ np.log(p / reference):.4f}")
for name, x in (("k1 = -d", -d), ("k3", np.exp(d) - 1 - d)):
    print(
        f"{name:9} {x.mean():.4f}   deviation of one sample {x.std():.3f}   lowest {x.min():+.3f}"
    )

# %% [markdown]
# The exercise has tokens in rows, as a batch has. Prompts and padding are not counted: NaN or any other
# number may stand there.
#
# ## Exercise 26.4: the KL to a reference


# %% tags=["exercise"]
def kl_to_reference(now, reference, counted):
    """now, reference (B, T) log-probabilities, counted (B, T) bool -> value, slopes (B, T).

    value: the mean of k3 over the counted tokens, 0 if there are none. slopes: its derivative by
    `now`, 0 where not counted. Where a token is not counted, now and reference are NaN or any
    number.
    """
    # YOUR CODE


# %%
lesson.check("26.4", kl_to_reference)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `now[counted]` is a flat array of the counted tokens. The derivative of exp(d) - d - 1 by d is
# exp(d) - 1, and d falls by what `now` rises.
#
# </details>


# %% tags=["solution"]
# Solution 26.4
def kl_to_reference_solution(now, reference, counted):
    """now, reference (B, T) log-probabilities, counted (B, T) bool -> value, slopes (B, T).

    value: the mean of k3 over the counted tokens, 0 if there are none. slopes: its derivative by
    `now`, 0 where not counted. Where a token is not counted, now and reference are NaN or any
    number.
    """
    n = max(counted.sum(), 1)
    d = reference[counted] - now[counted]
    slopes = np.zeros(now.shape)
    slopes[counted] = (1 - np.exp(d)) / n
    return (np.exp(d) - d - 1).sum() / n, slopes


kl_to_reference = lesson.yours(kl_to_reference, kl_to_reference_solution)


# %% [markdown]
# ## A model learns from rewards
#
# The task: `3 0 5 = 0 3 5`, sort three digits. First, as in lesson 25, a tiny model learns from
# examples, in half of which the digits go *down*. So it can sort, but does not know which direction we
# want. That is what the reward says: 1 if they go up, else 0.

# %%
from xtrain.nn import functional as F

K, EQUALS = 3, 6  # three digits from 0 to 5; the token of =


def with_targets(rows):
    """rows (B, 2 K + 1) -> ids, targets (B, 2 K): what follows the = is counted"""
    ids, targets = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
    targets[:, :K] = IGNORE
    return ids, targets


def examples(n):
    digits = rng.integers(0, 6, (n, K))
    up = np.sort(digits, 1)
    answers = np.where(rng.random((n, 1)) < 0.5, up, up[:, ::-1])
    return with_targets(np.concatenate([digits, np.full((n, 1), EQUALS), answers], 1))


shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=16)
config = xtrain.ModelConfig(vocab_size=8, **shape)
model = xtrain.Transformer(config, seed=0)
optimizer = xtrain.AdamW(model, lr=3e-3, weight_decay=0.0)
rng = np.random.default_rng(0)
for _ in range(400):
    model.zero_grad()
    model.loss(*examples(64)).backward()
    optimizer.step()
pretrained = [t.data.copy() for _, t in model.named_parameters()]

# %% [markdown]
# A step of GRPO: the engine of [lesson 21](21_engine.ipynb) draws 8 completions for each of 8 prompts,
# at temperature 1, and notes the log-probability with which it drew each token. The model that draws is
# the model that is trained, the same object.
#
# `exact` switches on batch-invariant mode in both, engine and training.


# %%
def write(weights):
    for (_, t), data in zip(model.named_parameters(), weights):
        t.data[...] = data


def restored(lr=1e-3):
    """The model as it was pretrained. -> a new optimizer"""
    write(pretrained)
    return xtrain.AdamW(model, lr=lr, weight_decay=0.0)


def rollouts(engine, seed, P=8, G=8):
    """-> ids, targets, log-probabilities when drawn, advantages: (64, 2 K) each; the mean reward"""
    digits = np.random.default_rng([1, seed]).integers(0, 6, (P, K))
    prompts = [[*row, EQUALS] for row in digits.tolist()]
    drawn = engine.generate(prompts, K, temperature=1.0, seed=seed, logprobs=0, n=G)
    answers = np.array(drawn).reshape(P, G, K)
    rewards = (answers == np.sort(digits, 1)[:, None]).all(-1).astype(float)
    rows = np.concatenate([np.repeat(prompts, G, 0), answers.reshape(-1, K)], 1)
    ids, targets = with_targets(rows)
    then = np.zeros(ids.shape, np.float32)
    then[:, K:] = [[logprob for logprob, _ in x.logprobs] for x in drawn]
    advantages = np.repeat(group_advantages(rewards).reshape(-1, 1), 2 * K, 1)
    return ids, targets, then, advantages, rewards.mean()


def update(optimizer, ids, targets, then, advantages, exact=True):
    """One optimizer step. -> (log pi, log pi_old) of the counted tokens, before the step"""
    counted = targets != IGNORE
    with xtrain.batch_invariant(exact):
        logprobs = model.logprobs(ids, targets)
    now, old = logprobs.data[counted], then[counted]
    losses, slopes = clipped(now.astype(float), old.astype(float), advantages[counted], 0.2)
    derivative = np.zeros(ids.shape, np.float32)
    derivative[counted] = slopes / counted.sum()
    model.zero_grad()
    F.with_gradient(logprobs, losses.mean(), derivative).backward()
    optimizer.step()
    return now, old


def drift(now, then):
    """-> the largest |ratio - 1|, and the mean k3 of the KL of rollouts to training"""
    d = now.astype(float) - then
    return np.abs(np.expm1(d)).max(), (np.expm1(d) - d).mean()


optimizer = restored()
engine = xtrain.Engine(model, 64, 16, batch_invariant=True)
*batch, reward = rollouts(engine, 0)
now, then = update(optimizer, *batch)
print(
    f"{now.size} tokens, of them with the same bits: "
    f"{(now.view(np.int32) == then.view(np.int32)).sum()}"
)
print("largest |ratio - 1| and KL:", *(float(x) for x in drift(now, then)))

# %% [markdown]
# Two different computations gave these numbers. The engine computed one token at a time with a KV cache,
# 64 sequences at a time. Training computed whole sequences at once, without a cache. In theory they are
# equal. In floating point they are equal only if every sum has the same terms **in the same order**: in
# batch-invariant mode, products and attention fix that order, whatever the batch.
#
# Does a second update with the same tokens have a ratio of 1? It must not: the weights have changed.

# %%
error, kl = drift(*update(optimizer, *batch))
print("second update: ratio 1:", error == 0.0, "  KL 0:", kl == 0.0)

# %% [markdown]
# ## Measure: without the same bits
#
# Where the engine and the trainer are two programs, with different kernels and often different
# precisions, the first ratio is not 1. We measure several such differences in the same step: the fast
# kernels, which choose the order of a sum by the shape of the batch; log-probabilities that are
# stored in bf16; an engine that computes with weights rounded to bf16; and a **bug**: the engine still
# has the weights of one step ago. The learning rate is
# small, 1e-5 (DeepSeekMath, below: 1e-6).


# %%
def bf16(x):
    """Rounded to 8 significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(np.float32)


def first_ratio(kind):
    """-> largest |ratio - 1| of the first update of the second step"""
    optimizer = restored(lr=1e-5)
    engine = xtrain.Engine(model, 64, 16, batch_invariant=True)
    update(optimizer, *rollouts(engine, 0)[:4])
    weights = [t.data.copy() for _, t in model.named_parameters()]
    if kind == "weights in bf16":
        write(map(bf16, weights))
    if kind == "a bug: old weights":
        write(pretrained)
    exact = kind != "fast kernels"
    engine = xtrain.Engine(model, 64, 16, batch_invariant=exact)
    ids, targets, then, advantages, _ = rollouts(engine, 1)
    write(weights)  # those of training
    then = bf16(then) if kind == "stored in bf16" else then
    return drift(*update(optimizer, ids, targets, then, advantages, exact))[0]


kinds = ("the same bits", "fast kernels", "stored in bf16", "weights in bf16", "a bug: old weights")
ratios = {kind: first_ratio(kind) for kind in kinds}
print("exactly 1:         ", [kind for kind, x in ratios.items() if x == 0])
print("off by below 1e-4: ", [kind for kind, x in ratios.items() if 0 < x < 1e-4])
print("off by more:       ", [kind for kind, x in ratios.items() if x >= 1e-4])
thousandths = {kind: 1000 * x for kind, x in ratios.items()}
lesson.figures.bars(thousandths, "thousandths", "largest |ratio - 1| of the first update")

# %% [markdown]
# The bug is of the same size as the rounding of an engine in bf16. There, a limit on the drift cannot
# find it. With the same bits, the limit is zero: **any** difference is a bug, and the first step says so. Old weights, a position that is off by one, a
# stale KV cache, another mask: each of them ends the run at once.
#
# And the learning? We run 60 steps with the same bits, with the fast kernels, and with normal noise of
# deviation 0.1 and 3 planted in the rollouts' log-probabilities. A noise of 3 changes a typical ratio by
# a factor of 20: it stands for a bad bug, not for rounding.


# %% tags=["varies"]
def learn(noise=0.0, exact=True, steps=60):
    """-> mean reward of each step, share of the tokens that the first update ignores"""
    optimizer, random = restored(), np.random.default_rng(2)
    engine = xtrain.Engine(model, 64, 16, batch_invariant=exact)
    rewards, ignored = [], []
    for step in range(steps):
        ids, targets, then, advantages, reward = rollouts(engine, step)
        then = then + (noise * random.normal(size=then.shape)).astype(np.float32)
        now, old = update(optimizer, ids, targets, then, advantages, exact)
        A = advantages[targets != IGNORE]
        _, slopes = clipped(now.astype(float), old.astype(float), A, 0.2)
        rewards.append(reward)
        ignored.append(((slopes == 0) & (A != 0)).mean())
    return rewards, np.mean(ignored)


runs = {"the same bits": {}, "fast kernels": {"exact": False}, "noise 0.1": {"noise": 0.1}}
runs["noise 3"] = {"noise": 3.0}
found = {name: learn(**options) for name, options in runs.items()}
for name, (rewards, ignored) in found.items():
    last = np.mean(rewards[-30:])
    print(f"{name:14} reward {last:.2f} at the end   ignored tokens {ignored:4.0%}")
tens = {name: np.mean(np.reshape(x, (-1, 10)), 1) for name, (x, _) in found.items()}
lesson.figures.curves(range(10, 61, 10), tens, "step", "mean reward of ten steps", log=False)

# %% [markdown]
# The lines of the first two lie on each other: learning does not suffer from a ratio that is off by a millionth. Nor
# does it from noise of 0.1. With noise of 3 the model does not learn: the clip ignores 30 % of the tokens, not
# because they have moved but because of the noise, and some of the others weigh 20 times too much or too little. So the
# same bits are not a trick to learn faster. They are **a test** that has no tolerance, and they make a run
# reproducible: it can be stopped and resumed with the same tokens, the same rewards and the same weights.
#
# What do they cost? The fixed order of sums rules out some fast variants of the kernels. On an H100 a step of GRPO with
# a model of 8 layers of width 512 took 1.74 times as long (`bench/results/bench_reinforce.jsonl`, when the exact
# products were computed 256 rows at a time).
#
# ## The library's kernel
#
# Like LoRA, GRPO needs no new kernel. The log-probabilities come from the kernels of cross-entropy, and
# the loss is a few numbers per token, computed on the host. An algorithm is three functions: advantages
# (your 26.2), the clipped loss of each token (26.3), and the weight of each token in the sum. Another
# algorithm is another function in one of the three places
# ([Train a model on rewards](howto/reinforce.md#algorithms)). `surrogate` adds the KL (26.4), and makes a
# loss of them:

# %%
from xtrain.reinforcement import grpo
from xtrain.reinforcement.surrogate import surrogate

lesson.source(grpo.advantages_of)
lesson.source(grpo.clipped)
lesson.source(grpo.of_tokens)
lesson.source(surrogate)

# %% [markdown]
# Do yours agree with it, on random numbers?

# %%
draw = np.random.default_rng(3)
now, old, ref, A = (draw.normal(-2, 0.4, (4, 6)) for _ in range(4))
counted = draw.random((4, 6)) < 0.7
inv = 1 / counted.sum()
weights = np.full(4, inv)
theirs = surrogate(grpo.of_tokens, now, old, A, counted, weights, (0.2, 0.2), 0.1, ref)
losses, slopes = clipped(now[counted], old[counted], A[counted], 0.2)
value, more = kl_to_reference(now, ref, counted)
print("loss:      ", np.isclose(losses.mean() + 0.1 * value, theirs.loss))
print("derivative:", np.allclose(slopes * inv + 0.1 * more[counted], theirs.dlogprobs[counted]))
print("advantages:", np.allclose(group_advantages(A), grpo.advantages_of(A)))

# %% [markdown]
# And the test without tolerance. Every step of a run calls it after its first update:

# %%
from xtrain.reinforcement.reinforce import ReinforceRun

lesson.source(ReinforceRun.first_update)

# %% [markdown]
# [Train a model on rewards](howto/reinforce.md) shows the command, with a reward of your own.
#
# ## What did not help
#
# *Watching the reward to notice a difference.* In three runs each, with other prompts, the mean reward of
# steps 51 to 60 was 0.89, 0.90 and 0.95 with the same bits, and 0.95, 0.96 and 0.91 with noise of 0.1,
# about a hundred thousand times the drift of the fast kernels. A bug of that size does not show.
#
# *Relying on the clip against wrong ratios.* It bounds what a token can gain. But a token with a
# negative advantage and a ratio that is far too large is not clipped: the min takes the larger penalty.
#
# *k1 as the penalty.* It has the right mean, but above its deviation was 0.20 per sample, and that of k3
# 0.015. And its derivative by $\log \pi$ is 1 for every token: on average its gradient is the mean of
# $\nabla \log \pi$, which is zero. It pulls the model nowhere. The gradient of k3, with $1 - e^d$, does pull:
# on average it is $-\sum_a \pi_{\text{ref},a} \nabla \log \pi_a$, the gradient of the KL in the other
# direction, of the reference to the model.
#
# ## More exercises
#
# 1. Rewards are 0 or 1, and a share q of a group is right. What are the two advantages? Which weighs more,
#    a rare right answer or a common one?
# 2. Set temperature=0.5 in `rollouts`. Is the ratio still exactly 1? Is the gradient still right?
# 3. Call `update` four times per batch in `learn`. What share of the tokens is clipped in the fourth?
#
# <details><summary>Solutions</summary>
#
# 1: The mean is q and the deviation $\sqrt{q (1 - q)}$, so $\sqrt{(1 - q) / q}$ for a right answer and
# $-\sqrt{q / (1 - q)}$ for a wrong one. The rarer outcome weighs more. 2: The engine returns the
# log-probabilities of the model, not those of the sharpened distribution, so the ratio is 1. But the
# tokens are drawn from another distribution than $\pi$, so the average is over the wrong one. The test does
# not find this. `xtrain reinforce` takes the log-probabilities of the sharpened distribution in both places
# (`--logprobs-of`). 3: Count
# `(slopes == 0) & (A != 0)` after each call. In one run of 40 steps it was 0, 6, 8 and 8 %.
#
# </details>
#
# ## Sources
#
# - R. Williams, *Simple statistical gradient-following algorithms for connectionist reinforcement
#   learning*, 1992: REINFORCE, and the baseline.
# - J. Schulman et al., *Proximal Policy Optimization Algorithms*, 2017: the clipped ratio.
# - J. Schulman, *Approximating KL Divergence*, 2020: k1, k2, k3.
# - Z. Shao et al., *DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models*,
#   2024: GRPO.
# - H. He and Thinking Machines Lab, *Defeating Nondeterminism in LLM Inference*, 2025: batch invariance,
#   and on-policy reinforcement learning with the same bits.
