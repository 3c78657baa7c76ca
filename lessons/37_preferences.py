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
# # 37 Preferences
#
# *About 75 minutes. You need [lesson 26](26_policy_gradients.ipynb).*
#
# **The question.** Few people can say that an answer is worth 7.3 points, but of two answers most can say which one is
# better. How does a model learn from such pairs, and what else does it learn from them?
#
# You will write the loss of a reward model, the policy that is best for a reward and a distance to a reference, DPO,
# which needs no reward model, and a loss that counts answers per token. Then you will see a reward model that is
# cheated, a margin that grows while the answer gets worse, and what $\beta$ really sets.

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
# ## From comparisons to rewards, by hand
#
# Suppose that each answer has a reward $R$, which the judge knows only roughly. Bradley and Terry (1952) say how often
# an answer c wins against r:
#
# $$P(c \succ r) = \sigma(R_c - R_r), \qquad \sigma(x) = \frac{1}{1 + e^{-x}}$$
#
# Only the difference counts, so rewards are known up to a constant. Here are three answers and all comparisons:


# %%
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


R = np.array([2.0, 0.5, -1.0])
print("row beats column:")
print(sigmoid(R[:, None] - R[None, :]).round(2))
more = R + 10
change = np.abs(sigmoid(more[:, None] - more) - sigmoid(R[:, None] - R)).max()
print(f"10 points more for each change the table by at most {change:.0e}")

# %% [markdown]
# A **reward model** computes R from the answer. It is trained on pairs: make the observed outcomes likely. The loss of
# a pair is $-\log \sigma(R_c - R_r)$, with c the answer that was chosen. Its derivative is small if the pair is in the
# right order already, and at most 1:
#
# $$\frac{\partial}{\partial m} \left(-\log \sigma(m)\right) = -\sigma(-m), \qquad m = R_c - R_r$$
#
# `np.log(sigmoid(m))` overflows at m = -1000. `np.logaddexp(0, x)` is $\log(1 + e^x)$ without overflow, and
# $-\log \sigma(m) = \log(1 + e^{-m})$.
#
# ## Exercise 37.1: the loss of a reward model


# %% tags=["exercise"]
def reward_loss(chosen, rejected):
    """chosen, rejected (n,): rewards of the two answers of each pair -> loss, d_chosen, d_rejected.

    loss: the mean of -log sigmoid(chosen - rejected), a number. d_chosen, d_rejected (n,): its
    derivatives by each reward. Rewards may be large: 1000 must not overflow.
    """
    # YOUR CODE


# %%
lesson.check("37.1", reward_loss)

# %% [markdown]
# <details><summary>Hint</summary>
#
# With `m = chosen - rejected` the losses are `np.logaddexp(0, -m)`. The slope, `-sigmoid(-m)`, is
# `-np.exp(-np.logaddexp(0, m))`. It is a mean: divide by n.
#
# </details>


# %% tags=["solution"]
# Solution 37.1
def reward_loss_solution(chosen, rejected):
    """chosen, rejected (n,): rewards of the two answers of each pair -> loss, d_chosen, d_rejected.

    loss: the mean of -log sigmoid(chosen - rejected), a number. d_chosen, d_rejected (n,): its
    derivatives by each reward. Rewards may be large: 1000 must not overflow.
    """
    m = chosen - rejected
    slopes = -np.exp(-np.logaddexp(0, m)) / len(m)
    return np.logaddexp(0, -m).mean(), slopes, -slopes


reward_loss = lesson.yours(reward_loss, reward_loss_solution)


# %% [markdown]
# ## A reward model in ten lines, and how it is cheated
#
# The model shall be linear, in two numbers that a program can see in an answer: a rough sign of its quality, and its
# length. People look for quality, but a long answer impresses them, too:

# %%
rng = np.random.default_rng(0)


def answers(n):
    """-> what the model sees (n, 2), and quality and length (n,)"""
    quality, length = rng.normal(size=n), rng.exponential(size=n)
    return np.stack([quality + 0.5 * rng.normal(size=n), length], 1), quality, length


def impression(quality, length):
    return quality + 0.8 * length


(x, *first), (y, *second) = answers(2000), answers(2000)
wins = rng.random(2000) < sigmoid(impression(*first) - impression(*second))
chosen, rejected = np.where(wins[:, None], x, y), np.where(wins[:, None], y, x)

w = np.zeros(2)  # the reward model
for _ in range(300):
    loss, d_chosen, d_rejected = reward_loss(chosen @ w, rejected @ w)
    w -= 5.0 * (d_chosen @ chosen + d_rejected @ rejected)
print(f"weights of the sign of quality {w[0]:.2f}, of the length {w[1]:.2f}")
print(f"right order: {np.mean(chosen @ w > rejected @ w):.0%} of the pairs")

# %% [markdown]
# It is a good model of the judges, and it has learned their weakness. Now optimize against it. The simplest way is
# **best of n**: draw n answers and keep the one with the largest reward.

# %%
sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def best_of(n, weights, trials=400):
    """-> means over the chosen answers: reward of the model, quality, length"""
    found = []
    for _ in range(trials):
        x, quality, length = answers(n)
        i = np.argmax(x @ weights)
        found.append((x[i] @ w, quality[i], length[i]))
    return np.mean(found, 0)


kept = np.array([best_of(n, w) for n in sizes])
blind = np.array([best_of(n, w * [1, 0]) for n in sizes])  # the same model, without the length
lines = {"reward of the model": kept[:, 0], "length": kept[:, 2], "quality": kept[:, 1]}
lines["quality, length ignored"] = blind[:, 1]
for name, values in lines.items():
    print(f"{name:24}", "  ".join(f"{v:5.2f}" for v in values))
lesson.figures.curves(
    np.log2(sizes), lines, "log2 of n", "best of n", "rewards grow, quality stops", log=False
)

# %% [markdown]
# From n = 16 on the reward and the length grow, and the quality hardly does: the search finds what the model
# overrates, not what is good. This is **overoptimization** (Gao et al. 2022), and no better optimizer helps. It is
# worse the further one goes from the answers that were judged. So do not go far: that is what a reference is for.
#
# ## The best policy near a reference
#
# Let $\pi$ be a policy over answers, and $\pi_{\text{ref}}$ the model before. We want reward, and pay for distance:
#
# $$J(\pi) = \sum_y \pi(y) R(y) - \beta\, \mathrm{KL}(\pi, \pi_{\text{ref}})
# = -\beta \sum_y \pi(y) \log \frac{\pi(y)}{\pi_{\text{ref}}(y)\, e^{R(y) / \beta}}$$
#
# With $Z = \sum_y \pi_{\text{ref}}(y)\, e^{R(y)/\beta}$ the fraction is $\pi / (\pi^* Z)$, where
# $\pi^* = \pi_{\text{ref}}\, e^{R / \beta} / Z$ sums to 1. So $J(\pi) = \beta \log Z - \beta\, \mathrm{KL}(\pi, \pi^*)$.
# Z does not depend on $\pi$, and a KL is smallest, 0, for equal distributions: **the best policy is $\pi^*$**.
#
# ## Exercise 37.2: the best policy


# %% tags=["exercise"]
def best_policy(reference, rewards, beta):
    """reference (V,), rewards (V,), beta > 0 -> the policy (V,) with the largest
    sum(p R) - beta KL(p, reference).

    reference: probabilities, of which some may be 0. A small beta must not overflow.
    """
    # YOUR CODE


# %%
lesson.check("37.2", best_policy)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `reference * np.exp((rewards - largest) / beta)`, divided by its sum. Subtract the largest reward *among the answers
# that the reference has*: if it belonged to another one, all others could become 0.
#
# </details>


# %% tags=["solution"]
# Solution 37.2
def best_policy_solution(reference, rewards, beta):
    """reference (V,), rewards (V,), beta > 0 -> the policy (V,) with the largest
    sum(p R) - beta KL(p, reference).

    reference: probabilities, of which some may be 0. A small beta must not overflow.
    """
    possible = reference > 0
    p = np.zeros(len(reference))
    scores = rewards[possible] / beta
    p[possible] = reference[possible] * np.exp(scores - scores.max())
    return p / p.sum()


best_policy = lesson.yours(best_policy, best_policy_solution)


# %%
def J(p, reference, rewards, beta):
    return p @ rewards - beta * (p * np.log(p / reference)).sum()


reference = np.array([0.5, 0.3, 0.15, 0.05])
rewards = np.array([0.0, 1.0, 2.0, 3.0])
for beta in (0.2, 1.0, 5.0):
    p = best_policy(reference, rewards, beta)
    others = [J(q, reference, rewards, beta) for q in rng.dirichlet(np.ones(4), 2000)]
    best = J(p, reference, rewards, beta)
    print(f"beta {beta}: {p.round(3)}   J {best:.4f}   the best of 2000 others {max(others):.4f}")

# %% [markdown]
# A small $\beta$ goes where the reward is, a large one stays at the reference. ($\beta$ is a temperature.)
#
# ## DPO: the reward model is the policy
#
# Solve $\pi^* = \pi_{\text{ref}}\, e^{R / \beta} / Z$ for the reward (Rafailov et al. 2023):
#
# $$R(y) = \beta \log \frac{\pi^*(y)}{\pi_{\text{ref}}(y)} + \beta \log Z$$
#
# Every policy is the best one for *some* reward: this one. Z, a sum over all answers, cannot be computed. But it is the
# same for both answers of a pair, and a pair needs only the difference. So take the loss of a reward model, and put the
# policy in its place:
#
# $$\text{loss} = -\log \sigma(r_c - r_r), \qquad r = \beta\, (\log \pi(y) - \log \pi_{\text{ref}}(y))$$
#
# No reward model, no sampling: only log-probabilities of answers that exist already. The log-probability of an answer
# is the sum over its tokens.
#
# ## Exercise 37.3: DPO


# %% tags=["exercise"]
def dpo(now, reference, beta):
    """now, reference (n, 2): log-probabilities of answers, column 0 chosen, 1 rejected -> losses
    (n,), slopes (n, 2).

    slopes: the derivative of each loss by its two numbers in `now`. Differences may be large.
    """
    # YOUR CODE


# %%
lesson.check("37.3", dpo)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `rewards = beta * (now - reference)`, and the margin is column 0 minus column 1. With s, the derivative of the loss by
# the margin, the slopes are `beta * s` and `-beta * s`: np.stack([...], 1).
#
# </details>


# %% tags=["solution"]
# Solution 37.3
def dpo_solution(now, reference, beta):
    """now, reference (n, 2): log-probabilities of answers, column 0 chosen, 1 rejected -> losses
    (n,), slopes (n, 2).

    slopes: the derivative of each loss by its two numbers in `now`. Differences may be large.
    """
    rewards = beta * (now - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    slopes = -beta * np.exp(-np.logaddexp(0, margins))
    return np.logaddexp(0, -margins), np.stack([slopes, -slopes], 1)


dpo = lesson.yours(dpo, dpo_solution)


# %% [markdown]
# Does it find $\pi^*$? Eight answers with hidden rewards, 20,000 pairs judged by Bradley and Terry's rule. The policy
# is a softmax of eight logits. DPO never sees a reward:


# %%
def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


V = 8
reference, hidden = rng.dirichlet(2 * np.ones(V)), rng.normal(size=V)
pairs = rng.choice(V, (20_000, 2), p=reference)
pairs = pairs[pairs[:, 0] != pairs[:, 1]]
wins = rng.random(len(pairs)) < sigmoid(hidden[pairs[:, 0]] - hidden[pairs[:, 1]])
pairs = np.where(wins[:, None], pairs, pairs[:, ::-1])  # chosen, rejected


def learned(beta, steps=800):
    logits, start = np.log(reference), np.log(reference)
    for _ in range(steps):
        now = np.log(softmax(logits))
        _, slopes = dpo(now[pairs], start[pairs], beta)
        slopes = slopes / len(pairs)
        # d log p(y) / d logits = onehot(y) - p, and p cancels in the difference of two answers
        logits = logits - 4 / beta**2 * np.bincount(pairs.ravel(), slopes.ravel(), V)
    return softmax(logits)


for beta in (0.5, 1.0, 3.0):
    found, best = learned(beta), best_policy(reference, hidden, beta)
    print(f"beta {beta}: largest difference from the best policy {np.abs(found - best).max():.3f}")
print("reference", reference.round(2))
print("best     ", best_policy(reference, hidden, 0.5).round(2), " beta 0.5")
print("DPO      ", learned(0.5).round(2))

# %% [markdown]
# ## What the margin does not say
#
# The loss knows only the *margin*, the difference of two log-probabilities. It can grow in two ways: c becomes more
# likely, or r becomes less likely. A language model has far fewer parameters than answers, so answers move together.
# Take three answers whose logits depend on one parameter: c and r are much alike, and a third answer, which was in no
# pair, differs from r in the same direction, but more:

# %%
features, bias = np.array([1.0, 0.0, 3.0]), np.log([0.45, 0.45, 0.10])
print("theta   chosen  rejected  third   margin")
for theta in (0.0, 0.5, 1.0, 2.0, 4.0):
    p = softmax(bias + theta * features)
    print(f"{theta:5.1f}   {p[0]:6.3f}  {p[1]:8.3f}  {p[2]:5.3f}  {np.log(p[0] / p[1]):7.2f}")

# %% [markdown]
# The margin only grows, and with it falls the loss: 100 % of the pairs are in the right order. But the chosen answer
# goes from 45 % to nearly nothing. So look at `logprob_chosen` in a run, not at the margin alone. (Razin et al. 2024
# call it likelihood displacement.)
#
# The margin has no end, either. If a pair always has the same winner, Bradley and Terry's reward difference is infinite,
# and no $\beta$ holds the policy: DPO's loss still falls. **IPO** (Azar et al. 2023) asks for a margin of a certain size
# instead, $(\log\text{-ratio}_c - \log\text{-ratio}_r - 1 / 2\beta)^2$. Two answers, always the same winner:

# %%
for steps in (10, 100, 1000, 10_000):
    ratios = {}
    for name in ("DPO", "IPO"):
        x = 0.0  # log pi(c) / pi(r), less that of the reference
        for _ in range(steps):
            if name == "DPO":
                slope = dpo(np.array([[x, 0.0]]), np.zeros((1, 2)), 0.5)[1][0, 0]
            else:
                slope = 2 * (x - 1 / (2 * 0.5))
            x -= 0.1 * slope
        ratios[name] = x
    print(f"{steps:6} steps, beta 0.5:", "  ".join(f"{k} {v:6.2f}" for k, v in ratios.items()))

# %% [markdown]
# ## Length
#
# The log-probability of an answer is a sum over tokens, so a long answer has more of it to move. How much do pairs
# change the length, if length is *all* that differs? Take a policy with one parameter: after each token it stops with
# probability s. An answer of n tokens has $\log \pi = (n - 1) \log(1 - s) + \log s$. The reference stops with 0.1, its
# answers have 10 tokens on average.
#
# **SimPO** (Meng et al. 2024) divides by the number of tokens, drops the reference, and asks for a margin of $\gamma$:
#
# $$\text{loss} = -\log \sigma\left(\beta \frac{\log \pi(c)}{n_c} - \beta \frac{\log \pi(r)}{n_r} - \gamma\right)$$
#
# ## Exercise 37.4: SimPO


# %% tags=["exercise"]
def simpo(now, tokens, beta, gamma):
    """now (n, 2): log-probabilities of answers, sums over their tokens (n, 2), column 0 chosen, 1
    rejected -> losses (n,), slopes (n, 2).

    slopes: the derivative of each loss by its two numbers in `now`.
    """
    # YOUR CODE


# %%
lesson.check("37.4", simpo)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The rewards are `beta * now / tokens`. As in 37.3, with the margin less gamma, and with slopes that are divided by the
# number of tokens of their answer.
#
# </details>


# %% tags=["solution"]
# Solution 37.4
def simpo_solution(now, tokens, beta, gamma):
    """now (n, 2): log-probabilities of answers, sums over their tokens (n, 2), column 0 chosen, 1
    rejected -> losses (n,), slopes (n, 2).

    slopes: the derivative of each loss by its two numbers in `now`.
    """
    rewards = beta * now / tokens
    margins = rewards[:, 0] - rewards[:, 1] - gamma
    slopes = -beta * np.exp(-np.logaddexp(0, margins))
    return np.logaddexp(0, -margins), np.stack([slopes, -slopes], 1) / tokens


simpo = lesson.yours(simpo, simpo_solution)


# %%
def log_likelihood(s, n):
    return (n - 1) * np.log1p(-s) + np.log(s)


def mean_length(loss, longer_wins, steps=200):
    """-> the mean length after training on pairs of which this share is won by the longer answer"""
    draw = np.random.default_rng(3)
    n = draw.geometric(0.1, (4000, 2)).astype(float)
    n = n[n[:, 0] != n[:, 1]]
    n = np.sort(n, 1)[:, ::-1]  # the longer one first
    n = np.where(draw.random((len(n), 1)) < longer_wins, n, n[:, ::-1])
    start, logit = log_likelihood(0.1, n), np.log(0.1 / 0.9)
    for _ in range(steps):
        s = sigmoid(logit)
        now = log_likelihood(s, n)
        _, slopes = dpo(now, start, 0.1) if loss == "DPO" else simpo(now, n, 2.0, 1.0)
        # d log pi / d logit = 1 - n s
        logit -= 0.3 * (slopes * (1 - n * s)).sum(1).mean()
    return 1 / sigmoid(logit)


shares = np.array([0.4, 0.5, 0.6, 0.7, 0.8])
lengths = {loss: [mean_length(loss, share) for share in shares] for loss in ("DPO", "SimPO")}
for loss, values in lengths.items():
    print(f"{loss:6}", "  ".join(f"{v:5.1f}" for v in values))
lesson.figures.curves(
    shares,
    lengths,
    "share of pairs that the longer one wins",
    "mean length in tokens",
    "the reference has 10",
    log=False,
)

# %% [markdown]
# DPO follows the pairs: at 50 % next to nothing happens, and a slight taste of the judges for length becomes answers that are
# much longer. SimPO's answers are shorter than those of the reference everywhere. Dividing by the length does not remove
# length from the loss, it turns its pull around: per token, this policy finds long answers more likely than short ones,
# so the pairs that a short one wins have the larger loss. And without a reference nothing holds it. Measure lengths
# before and after, whatever the loss is.

# %% [markdown]
# ## Measure: what beta sets
#
# Now a transformer. The task of [lesson 26](26_policy_gradients.ipynb): three digits, and an answer with the digits
# sorted up or down, half and half.

# %% tags=["varies"]
import copy

from xtrain.nn import functional as F

K, EQUALS = 3, 6  # three digits from 0 to 5; the token of =


def with_targets(rows):
    """rows (B, 2 K + 1) -> ids, targets (B, 2 K): what follows the = is counted"""
    ids, targets = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
    targets[:, :K] = IGNORE
    return ids, targets


def rows_of(digits, answers):
    return with_targets(np.concatenate([digits, np.full((len(digits), 1), EQUALS), answers], 1))


def both(n):
    """-> digits, sorted up, sorted down; (n, K) each"""
    digits = rng.integers(0, 6, (n, K))
    up = np.sort(digits, 1)
    return digits, up, up[:, ::-1]


shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=16)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=8, **shape), seed=0)
optimizer = xtrain.AdamW(model, lr=3e-3, weight_decay=0.0)
rng = np.random.default_rng(0)
for _ in range(400):
    digits, up, down = both(64)
    model.zero_grad()
    model.loss(*rows_of(digits, np.where(rng.random((64, 1)) < 0.5, up, down))).backward()
    optimizer.step()
frozen = copy.deepcopy(model)  # the reference


def scores(some_model, ids, targets):
    """-> log-probabilities of the tokens, a Tensor, and of the answers"""
    logprobs = some_model.logprobs(ids, targets)
    return logprobs, np.where(targets != IGNORE, logprobs.data, 0).sum(1, dtype=float)


grid = np.array(
    [[a, b, c] for a in range(6) for b in range(6) for c in range(6) if not a == b == c]
)


def shares(some_model):
    """-> the mean probabilities of the answers sorted up and down, and of all others"""
    up = np.sort(grid, 1)
    p = [np.exp(scores(some_model, *rows_of(grid, x))[1]).mean() for x in (up, up[:, ::-1])]
    return *p, 1 - sum(p)


print("up {:.2f}, down {:.2f}, neither {:.2f}".format(*shares(frozen)))

# %% [markdown]
# The judges prefer *up*, but are wrong in every fifth pair. A batch has 64 pairs, 128 rows: chosen and rejected
# answers, one after the other. The loss is yours; `with_gradient` carries its slopes to the weights, as in lesson 26:

# %% tags=["varies"]
WRONG = 0.2


def batch_of_pairs(n=64):
    digits, up, down = both(n)
    right = rng.random((n, 1)) >= WRONG
    answers = np.stack([np.where(right, up, down), np.where(right, down, up)], 1)
    return rows_of(np.repeat(digits, 2, 0), answers.reshape(2 * n, K))


def train(loss, steps=100, lr=3e-4):
    """-> the shares after every fifth step, (steps / 5, 3)"""
    trained = copy.deepcopy(frozen)
    optimizer, found = xtrain.AdamW(trained, lr=lr, weight_decay=0.0), []
    for step in range(1, steps + 1):
        ids, targets = batch_of_pairs()
        with xtrain.no_grad():
            before = scores(frozen, ids, targets)[1].reshape(-1, 2)
        logprobs, now = scores(trained, ids, targets)
        losses, slopes = loss(now.reshape(-1, 2), before)
        derivative = (targets != IGNORE) * slopes.reshape(-1, 1) / len(losses)
        trained.zero_grad()
        F.with_gradient(logprobs, losses.mean(), derivative.astype(np.float32)).backward()
        optimizer.step()
        if step % 5 == 0:
            found.append(shares(trained))
    return np.array(found)


def dpo_with(beta):
    return lambda now, before: dpo(now, before, beta)


betas = (0.1, 0.5, 1.0, 2.0)
runs = {beta: train(dpo_with(beta)) for beta in betas}
up, down, _ = shares(frozen)
start = np.log(up / down)
for beta, found in runs.items():
    up, down, neither = found[-4:].mean(0)
    aim = sigmoid(start + np.log((1 - WRONG) / WRONG) / beta)
    print(
        f"beta {beta}: up {up:.2f}, down {down:.2f}, neither {neither:.2f}   "
        f"up of both {up / (up + down):.2f}, where it should end {aim:.2f}"
    )
lines = {f"beta {beta}": found[:, 2] for beta, found in runs.items()}
lesson.figures.curves(
    range(5, 101, 5), lines, "step", "share of neither", "what the pairs do not show", log=False
)

# %% [markdown]
# Where should it end? If 80 % of the pairs prefer *up*, the reward difference is $\log(0.8 / 0.2) = 1.39$ by Bradley and
# Terry's rule, whatever $\beta$ is. The policy's log-ratio is this divided by $\beta$, so the logarithm of up / down grows
# by $1.39 / \beta$: with $\beta = 1$ by what the judges say, with a smaller one by more. $\beta$ is no learning rate: it
# sets the *end*, and the learning rate how fast one gets there.
#
# The runs end there, **among the answers of the pairs**. Outside of them, the third column and the figure, the loss does
# not look: with $\beta = 0.1$ a third of the answers is sorted neither up nor down, three times as many as before. It
# is the table with three answers again. Smaller steps help, and a larger $\beta$, which ends earlier; or a loss that also
# raises the chosen answer by itself, as ORPO does.
#
# ## The library's kernel
#
# No new kernel: log-probabilities come from the kernels of cross-entropy, and the loss is a few numbers per answer.
# `xtrain prefer` has these losses, and yours by `--loss MODULE:FUNCTION`:

# %%
from xtrain.tuning import preference_losses

lesson.source(preference_losses.dpo)
lesson.source(preference_losses.simpo)
lesson.source(preference_losses.kto)

# %% [markdown]
# The last one needs no pairs, only answers with a thumb up or down (KTO, Ethayarajh et al. 2024): each answer is compared
# with z, how far the policy has moved on average. Do yours agree with the library, on random numbers?

# %%
from types import SimpleNamespace

now, before = -20 * rng.random((2, 6, 2))
tokens = rng.integers(1, 9, (6, 2))
x = preference_losses.Answers(now, before, tokens)
options = SimpleNamespace(beta=0.3, label_smoothing=0.0, target_margin=0.7)
for name, mine in (("dpo", dpo(now, before, 0.3)), ("simpo", simpo(now, tokens, 0.3, 0.7))):
    theirs = preference_losses.LOSSES[name](x, options)
    of_losses = np.abs(mine[0] - theirs.losses).max()
    of_slopes = np.abs(mine[1] - theirs.slopes).max()
    print(f"{name:6} largest difference of losses {of_losses:.0e}, of slopes {of_slopes:.0e}")

# %% [markdown]
# And the other losses, on the same task with the same wrong pairs:


# %% tags=["varies"]
def of_library(name, beta):
    """A loss of the library as `train` calls it."""
    options = SimpleNamespace(beta=beta, label_smoothing=0.0, target_margin=1.0)
    sizes = np.full((64, 2), K)

    def loss(now, before):
        x = preference_losses.Answers(now, before, sizes)
        found = preference_losses.LOSSES[name](x, options)
        return found.losses, found.slopes

    return loss


for name, beta in (("dpo", 0.5), ("ipo", 0.5), ("simpo", 2.0), ("orpo", 0.5)):
    up, down, neither = train(of_library(name, beta), steps=60)[-2:].mean(0)
    print(f"{name:6} up {up:.2f}, down {down:.2f}, neither {neither:.2f}")

# %% [markdown]
# ## What did not help
#
# *A larger margin as a sign of success.* It grows by itself in training. Compare the rewards of pairs that are held out,
# and the log-probability of the chosen answers.
#
# *A smaller beta to learn faster.* DPO's slope has the factor beta, but Adam divides it out again. A smaller beta ends
# further away, not sooner.
#
# *A reward model that is trained on more pairs of the same judges.* In the first figure it would learn the weight of the
# length more exactly, and be cheated in the same way.
#
# ## More exercises
#
# 1. In 37.3, what is the loss before the first step, and why does a run that starts with another number have a bug?
# 2. `label_smoothing` of 0.2 in the library's `dpo`: where does a run end whose pairs are all right?
# 3. Set WRONG = 0.5. Which losses stay where they are?
# 4. In the reward model's figure, let the judges prefer short answers, 0.8 to -0.8. What does best of n find?
#
# <details><summary>Solutions</summary>
#
# 1: log 2 = 0.693: policy and reference are equal, so all margins are 0. Another number means that the two compute
# different log-probabilities: another mask, another template, dropout. 2: At a margin of $\log(0.8 / 0.2)$: it is the
# loss of pairs of which a fifth is turned around. 3: DPO and IPO, whose references are the start: half of the pairs pull
# each way. The others have no reference and move. 4: Short answers; but a length is never below 0, so there is less to
# exploit, and the quality keeps growing.
#
# </details>
#
# ## Sources
#
# - R. Bradley, M. Terry, *Rank Analysis of Incomplete Block Designs*, 1952.
# - L. Gao, J. Schulman, J. Hilton, *Scaling Laws for Reward Model Overoptimization*, 2022.
# - R. Rafailov et al., *Direct Preference Optimization: Your Language Model is Secretly a Reward Model*, 2023.
# - M. Azar et al., *A General Theoretical Paradigm to Understand Learning from Human Preferences*, 2023: IPO.
# - K. Ethayarajh et al., *KTO: Model Alignment as Prospect Theoretic Optimization*, 2024.
# - J. Hong, N. Lee, J. Thorne, *ORPO: Monolithic Preference Optimization without Reference Model*, 2024.
# - Y. Meng, M. Xia, D. Chen, *SimPO: Simple Preference Optimization with a Reference-Free Reward*, 2024.
# - N. Razin et al., *Unintentional Unalignment: Likelihood Displacement in Direct Preference Optimization*, 2024.
