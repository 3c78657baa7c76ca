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
# # 40 Scaling laws, and how much to believe an evaluation
#
# *About 75 minutes. You need [lesson 39](39_data.ipynb).*
#
# **The question.** The large run can be made once. What will its loss be, how large should the model be for the money, and when
# two models have been made: is the one with 5 more right answers of 200 better?
#
# You will fit a power law to small runs and predict a larger one, derive the best size for a given amount of arithmetic, score
# multiple-choice questions by likelihood, and compute the error of the comparison.

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
# ## A language with a long tail
#
# As in lesson 39, the next token follows from the last two by a table, here with a probability of 0.7. But now tokens have very
# different frequencies, in proportion to 1, 1/2, 1/3, ... (Zipf's law, which words of real languages follow): a few rules are needed all the time,
# and most of the 4,096 hardly ever. The **entropy**, the loss of a perfect model, is known:

# %%
V = 64
T = 32
frequency = 1 / np.arange(1, V + 1)
frequency /= frequency.sum()
table = np.random.default_rng(0).choice(V, (V, V), p=frequency)


def stream(n, seed):
    """-> (n + 2,) int32"""
    rng = np.random.default_rng(seed)
    tokens = [0, 1]
    sure = rng.random(n) < 0.7
    other = rng.choice(V, n, p=frequency)
    for i in range(n):
        tokens.append(int(table[tokens[-2], tokens[-1]] if sure[i] else other[i]))
    return np.array(tokens, np.int32)


train_ids = stream(300_000, 1)
test_ids = stream(16_000, 2)
p = 0.7 * np.eye(V) + 0.3 * frequency  # row r: if the table says r
entropy = -(p * np.log(p)).sum(1)[table[test_ids[:-2], test_ids[1:-1]]].mean()
print(f"entropy {entropy:.3f}; guessing by frequency {-np.log(frequency[test_ids]).mean():.3f}")

# %% [markdown]
# ## Runs of several lengths
#
# One small model, trained for 100 to 400 steps. Each run is complete: the learning rate rises, and falls to 0 at *its own* end.


# %% tags=["varies"]
def train(steps, at=None):
    """-> the model after `steps` steps; at: stop there, with the schedule of the longer run"""
    shape = dict(dim=16, n_layers=2, n_heads=1, head_dim=16, hidden_dim=32, max_seq_len=T)
    model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=V, **shape), seed=0)
    optimizer = xtrain.AdamW(model, lr=2e-2, weight_decay=0.0)
    rng = np.random.default_rng(3)
    for step in range(at or steps):
        optimizer.lr = 2e-2 * min(1, (step + 1) / 10) * (1 - step / steps)
        rows = train_ids[rng.integers(0, len(train_ids) - T, 16)[:, None] + np.arange(T + 1)]
        model.zero_grad()
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    return model


def loss(model):
    n = (len(test_ids) - 1) // T * T
    with xtrain.no_grad():
        return model.loss(test_ids[:n].reshape(-1, T), test_ids[1 : n + 1].reshape(-1, T)).item()


lengths = [100, 150, 200, 300, 400]
models = {steps: train(steps) for steps in lengths}
losses = [loss(models[steps]) for steps in lengths]
for steps, x in zip(lengths, losses):
    print(f"{steps:4} steps, {steps * 16 * T:7,} tokens: loss {x:.3f}, to learn {x - entropy:.3f}")
print(f"a run of 800 steps, stopped after 200: {loss(train(800, at=200)):.3f}")

# %% [markdown]
# The last line is a warning. A run that is stopped in the middle still has a large learning rate, so its loss is higher than that of a run
# planned for that length. One long run does not replace the short ones.
#
# ## A power law
#
# Over many orders of magnitude the losses of language models have been found close to
#
# $$L(D) = E + \frac{a}{D^{\,b}}$$
#
# with D tokens, an exponent b, and E, what no model can predict. With E known this is a straight line: $\log(L - E) = \log a - b \log D$. By hand: a loss
# that is 0.8 above E after 100 steps and 0.4 above it after 400 has $b = \log 2 / \log 4 = 0.5$: four times the tokens halve it.
#
# ## Exercise 40.1: the line


# %% tags=["exercise"]
def fit_power(x, y, floor):
    """-> a, b of y = floor + a / x**b: the line through log(y - floor) over log(x).

    By least squares. x, y: lists of at least two numbers, x > 0, y > floor.
    """
    # YOUR CODE


# %%
lesson.check("40.1", fit_power)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `slope, intercept = np.polyfit(np.log(x), ..., 1)`. The slope is -b, the intercept is log a.
#
# </details>


# %% tags=["solution"]
# Solution 40.1
def fit_power_solution(x, y, floor):
    """-> a, b of y = floor + a / x**b: the line through log(y - floor) over log(x).

    By least squares. x, y: lists of at least two numbers, x > 0, y > floor.
    """
    slope, intercept = np.polyfit(np.log(x), np.log(np.array(y) - floor), 1)
    return float(np.exp(intercept)), float(-slope)


fit_power = lesson.yours(fit_power, fit_power_solution)


# %% [markdown]
# ## Measure: predict a run that is twice as long
#
# The fit sees the five runs. Then the sixth is made. For comparison a fit that does not know E and takes 0:

# %% tags=["varies"]
tokens = [steps * 16 * T for steps in lengths]
long = 800 * 16 * T
measured = loss(train(800))
lines = {"measured above E": [x - entropy for x in [*losses, measured]]}
for name, floor in (("with E", entropy), ("with E = 0", 0.0)):
    a, b = fit_power(tokens, losses, floor)
    print(f"{name:11} b = {b:.2f}: predicts {floor + a / long**b:.3f} for 800 steps")
    lines[name] = [floor + a / x**b - entropy for x in [*tokens, long]]
print(f"measured: {measured:.3f}")
lesson.figures.curves([*tokens, long], lines, "tokens", "loss above the entropy")

# %% [markdown]
# Both lines fit the five runs about equally well. The one with E is closer to the sixth, because the part that cannot be learned does not become
# smaller. For real text E is not known: it is fitted as well, which needs runs over a wide range. And both promise too much: a small
# model cannot hold all rules and must stop somewhere above E, and the law in D alone does not know that.
#
# ## How large should the model be?
#
# With N parameters and D tokens a training takes about $C = 6\,N\,D$ operations: 2 per parameter and token in the forward pass, 4 in the
# backward pass. Hoffmann et al. (2022) fitted hundreds of runs by
#
# $$L(N, D) = E + \frac{A}{N^{\,\alpha}} + \frac{B}{D^{\,\beta}}$$
#
# For a fixed C more parameters mean fewer tokens. At the best N the two terms change equally fast: put $D = C / (6N)$ into L, and set its derivative
# by N to 0. That gives $\alpha A / N^{\alpha} = \beta B / D^{\beta}$, and with D replaced:
#
# $$N = \left(\frac{\alpha A}{\beta B}\right)^{\frac{1}{\alpha + \beta}} \left(\frac{C}{6}\right)^{\frac{\beta}{\alpha + \beta}}$$
#
# ## Exercise 40.2: the best size


# %% tags=["exercise"]
def best_size(C, A, alpha, B, beta):
    """-> N, D with 6 N D = C for which A / N**alpha + B / D**beta is smallest, floats."""
    # YOUR CODE


# %%
lesson.check("40.2", best_size)

# %% [markdown]
# <details><summary>Hint</summary>
#
# N is the formula above, and D follows from C. Check: is `alpha * A / N**alpha` equal to `beta * B / D**beta`?
#
# </details>


# %% tags=["solution"]
# Solution 40.2
def best_size_solution(C, A, alpha, B, beta):
    """-> N, D with 6 N D = C for which A / N**alpha + B / D**beta is smallest, floats."""
    ratio = alpha * A / (beta * B)
    N = ratio ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))
    return N, C / (6 * N)


best_size = lesson.yours(best_size, best_size_solution)


# %%
FITTED = dict(A=406.4, alpha=0.34, B=410.7, beta=0.28)  # Hoffmann et al. 2022, appendix D.3
print("operations   parameters       tokens   tokens per parameter")
for C in (1e19, 1e21, 1e23):
    N, D = best_size(C, **FITTED)
    print(f"{C:10.0e} {N:12.1e} {D:12.1e} {D / N:22.0f}")
C = 1e21
E = 1.69
sizes = 10 ** np.linspace(7.5, 11, 36)
at = lambda N: E + 406.4 / N**0.34 + 410.7 / (C / 6 / N) ** 0.28
N, _ = best_size(C, **FITTED)
print(f"1e21 operations: loss {at(N):.2f} at the best size, {at(N / 3):.2f} at a third of it")
lesson.figures.curves(sizes, {"the law, for 1e21 operations": at(sizes)}, "parameters", "loss")

# %% [markdown]
# The minimum is flat: a model of a third of the best size, trained for three times the tokens, is hardly worse (the last line), and three times cheaper to *serve*. That is why
# models are trained for far more tokens than this rule asks for. (Besiroglu et al. 2024 found that the published constants do not fit the
# published runs well; the other two methods of the paper give about 20 tokens per parameter at all sizes.)
#
# ## Evaluation: which answer is likelier?
#
# A benchmark of multiple choice asks a model without a word being generated: for each option, how likely is it as the continuation of the
# question? The log-probability of an option is the sum over its tokens. But every token lowers a sum, so a longer option is rarely chosen; the mean per token
# is the remedy that many benchmarks use, and it has the opposite fault.
#
# By hand: an option of one token with -1.5, and one of three tokens with -0.7 each. By the sum the first one wins, -1.5 against -2.1; by the mean the second.
#
# ## Exercise 40.3: choose


# %% tags=["exercise"]
def choose(options):
    """-> by_sum, by_mean: the index of the best option by each of the two rules.

    options: for each option the list of its tokens' log-probabilities, at least one. Of equally
    good options: the first.
    """
    # YOUR CODE


# %%
lesson.check("40.3", choose)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `sums = [sum(x) for x in options]`, and `sums.index(max(sums))` is the first of the largest.
#
# </details>


# %% tags=["solution"]
# Solution 40.3
def choose_solution(options):
    """-> by_sum, by_mean: the index of the best option by each of the two rules.

    options: for each option the list of its tokens' log-probabilities, at least one. Of equally
    good options: the first.
    """
    sums = [sum(x) for x in options]
    means = [sum(x) / len(x) for x in options]
    return sums.index(max(sums)), means.index(max(means))


choose = lesson.yours(choose, choose_solution)


# %% [markdown]
# An exam for our models: a beginning of 12 tokens, and four options, of which one is what the table says and the others are
# random tokens. Two rows of the same length are compared, so here sum and mean agree.


# %% tags=["varies"]
def exam(n, seed):
    """-> beginnings (n, 12), options (n, 4, 2), the index of the right one (n,)"""
    rng = np.random.default_rng(seed)
    ids = stream(20 * n, seed)[: 20 * n].reshape(n, 20)[:, :12]
    options = rng.choice(V, (n, 4, 2), p=frequency)
    right = rng.integers(0, 4, n)
    for i, r in enumerate(right):
        first = table[ids[i, -2], ids[i, -1]]
        options[i, r] = first, table[ids[i, -1], first]
    return ids, options, right


def answers(model, ids, options):
    """-> (n,) the option that the model finds likeliest"""
    chosen = []
    for beginning, several in zip(ids, options):
        rows = np.array([[*beginning, *option] for option in several], np.int32)
        with xtrain.no_grad():
            logits = model(rows).data.reshape(4, 14, -1)[:, 11:13].astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        each = [
            [float(logp[o, j, t]) for j, t in enumerate(option)] for o, option in enumerate(several)
        ]
        chosen.append(choose(each)[0])
    return np.array(chosen)


ids, options, key = exam(200, seed=5)
right = {
    steps: (answers(models[steps], ids, options) == key).astype(int) for steps in (100, 300, 400)
}
for steps, x in right.items():
    error = x.std(ddof=1) / np.sqrt(200)
    print(f"{steps} steps: {x.sum()} of 200 right, {x.mean():.1%} +- {error:.1%}")

# %% [markdown]
# ## Is the difference real?
#
# 200 questions are a sample of all that could have been asked. The share of right answers has a **standard error** $\sigma / \sqrt n$, where $\sigma$ is the standard
# deviation of the zeros and ones, in the column after the share. The difference between 300 and 400 steps looks lost in these errors. But both models got the *same* questions, and
# most of them both get right, or both get wrong. What decides is the differences, question by question: $d_i = a_i - b_i$, with a mean and a standard error of their own.
#
# ## Exercise 40.4: compare two models


# %% tags=["exercise"]
def compare(a, b):
    """-> difference, error: the mean of a - b, and its standard error, floats.

    a, b: lists of 0 and 1, what two models scored on the same n >= 2 questions. The error is the
    standard deviation of the n differences, with n - 1 in its denominator, over the root of n.
    """
    # YOUR CODE


# %%
lesson.check("40.4", compare)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `d = np.array(a) - np.array(b)`, and `d.std(ddof=1)` has n - 1 in its denominator.
#
# </details>


# %% tags=["solution"]
# Solution 40.4
def compare_solution(a, b):
    """-> difference, error: the mean of a - b, and its standard error, floats.

    a, b: lists of 0 and 1, what two models scored on the same n >= 2 questions. The error is the
    standard deviation of the n differences, with n - 1 in its denominator, over the root of n.
    """
    d = np.array(a) - np.array(b)
    return float(d.mean()), float(d.std(ddof=1) / np.sqrt(len(d)))


compare = lesson.yours(compare, compare_solution)

# %% tags=["varies"]
for long_run, short_run in ((400, 100), (400, 300)):
    x = right[long_run]
    y = right[short_run]
    difference, error = compare(x.tolist(), y.tolist())
    apart = np.sqrt((x.var(ddof=1) + y.var(ddof=1)) / 200)
    print(f"{long_run} against {short_run} steps: {difference:+.1%}, error {error:.1%}", end="")
    print(f" (not paired {apart:.1%})")

# %% [markdown]
# As a rule, a difference of less than two errors is no evidence. The loss of the same models told them apart at once: it uses the probability of every
# token, where an answer is only right or wrong. So while models are small, compare losses; and state an error with every share.
#
# **The improvement** over more questions: pairs. They cost nothing, since both models answer the same exam anyway.
#
# ## The library's kernel
#
# This lesson has no kernel. `xtrain evaluate` prints the standard error next to each number, with this function. With denominators it is the error of a ratio, as that of
# bits per byte ([lesson 38](38_bpe.ipynb)):

# %%
from xtrain.evaluation import results

lesson.source(results.ratio)
x = right[400]
theirs = results.ratio(x.tolist())
print(f"as by hand, up to {abs(theirs.stderr - x.std(ddof=1) / np.sqrt(200)):.0e}")

# %% [markdown]
# ## What did not help
#
# *One long run instead of several.* Above: its loss in the middle is that of a large learning rate.
#
# *A straight line through the losses themselves.* The fit with E = 0. It looks fine up to the last point, and promises too much after it.
#
# *An exam of 20 questions.* Its error is $\sqrt{10}$ times that of 200, and only very different models differ by more.
#
# ## More exercises
#
# 1. How many questions are needed for an error of 1 % of a share near 50 %?
# 2. A model is to answer $10^{13}$ tokens in its life, 2 N operations each. Should it be larger or smaller than `best_size` says?
# 3. Fit a, b **and** the floor to the six losses: try floors from 0 to the smallest loss, and take the one with the smallest squared error of the line. How close
#    is it to the entropy?
#
# <details><summary>Solutions</summary>
#
# 1: $0.5 / \sqrt n = 0.01$, so n = 2,500. 2: Smaller, and trained for longer: the total is $6 N D + 2 N \cdot 10^{13}$, and its second part only grows with N. 3:
# It depends on the few points: small errors of the losses move the floor by much. That is why such fits need many runs over a wide range.
#
# </details>
#
# ## Sources
#
# - J. Kaplan et al., *Scaling Laws for Neural Language Models*, 2020.
# - J. Hoffmann et al., *Training Compute-Optimal Large Language Models*, 2022: the law, and its constants.
# - T. Besiroglu et al., *Chinchilla Scaling: A replication attempt*, 2024.
# - E. Miller, *Adding Error Bars to Evals*, 2024: paired differences.
