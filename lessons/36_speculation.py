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
# # 36 Speculation without loss
#
# *About 75 minutes. You need [lesson 21](21_engine.ipynb) and [lesson 35](35_one_order.ipynb).*
#
# **The question.** One user waits for an answer. A decoding step reads all weights of the model and yields one token. A
# step for 8 tokens reads the same weights and takes only 9 % longer, in the first table below. But the next 8 tokens of
# one answer are not known: each depends on the one before. Can a step yield several of them, and can the answer stay
# the same, token for token?
#
# It can: *guess* the next tokens, compute all of them in one step, and keep what was right. You will write the rule that
# accepts, the loop with a cache that forgets wrong guesses, a guesser that needs no second model, and the calculation
# that says when guessing does not pay.

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
import re

import numpy as np

import xtrain
from xtrain import lesson

# %% [markdown]
# ## One more row costs little
#
# How long does a step take, by the number of its rows? Measured with the shape of Qwen3-0.6B, 512 tokens before each
# row, in exact mode:

# %%
ROWS = (1, 8, 32, 128)
records = {
    n: lesson.record(f"bench_exact/decode step Qwen3-0.6B/B={n} context=512/bf16") for n in ROWS
}
ms = {n: r["value"] for n, r in records.items()}
for n, t in ms.items():
    print(f"{n:4} rows   {t:5.2f} ms   {1000 * t / n:7.1f} µs per row")
print(lesson.records.machine(list(records.values())))

# %% [markdown]
# A server with many users fills these rows with their sequences. With one user seven of eight rows are free.
#
# ## Verify, by hand
#
# Let a made-up model have 12 tokens, and let its next token depend on the last three. Its draw needs random numbers: the
# largest of logit + noise, with noise from Gumbel's distribution, is a draw from the softmax
# ([lesson 20](20_sampling.ipynb)). The noise follows from the seed and from the *number* of the token, and from nothing else:

# %%
V = 12


def logits_of(history):
    """(V,): the logits of the token after these"""
    return 2 * np.random.default_rng(history[-3:]).normal(size=V)


def draw(history, seed):
    """The token after these."""
    noise = np.random.default_rng([seed, len(history)]).gumbel(size=V)
    return int(np.argmax(logits_of(history) + noise))


def plain(prompt, new, seed):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(draw(tokens, seed))  # one step of the model
    return tokens[len(prompt) :]


prompt = [3, 1, 4, 1, 5]
answer = plain(prompt, 8, seed=0)
print("answer:", answer)

# %% [markdown]
# Now guess the next tokens, the **drafts**, and compute a row for each: the row of draft i has the drafts before it in
# its history. What is drawn at each row?

# %%
drafts = [*answer[:2], (answer[2] + 1) % V, answer[3]]  # the third one is wrong
history = list(prompt)
for i, token in enumerate([prompt[-1], *drafts]):
    if i:
        history.append(token)
    print(f"row {i}: token {token:2}   drawn after it: {draw(history, 0):2}   plain: {answer[i]:2}")

# %% [markdown]
# Row 0 has the true history, so its token is true. If it equals the first draft, row 1 has the true history, too, and
# so on. This ends at the first draft that was not drawn: later rows follow a wrong token. But the token that was
# drawn *there* is true. So a step yields the accepted drafts and one token more: at least 1 and at most k + 1.
#
# ## Exercise 36.1: what is accepted


# %% tags=["exercise"]
def accepted(draft, drawn):
    """-> list: the tokens that the answer gets.

    draft: k guessed tokens, k >= 0. drawn: k + 1 tokens; drawn[0] was drawn after the last true
    token, drawn[i] after the first i drafts.
    """
    # YOUR CODE


# %%
lesson.check("36.1", accepted)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Count how many drafts at the start equal the drawn token of the same index. With n of them, the answer gets
# `drawn[: n + 1]`.
#
# </details>


# %% tags=["solution"]
# Solution 36.1
def accepted_solution(draft, drawn):
    """-> list: the tokens that the answer gets.

    draft: k guessed tokens, k >= 0. drawn: k + 1 tokens; drawn[0] was drawn after the last true
    token, drawn[i] after the first i drafts.
    """
    n = 0
    while n < len(draft) and draft[n] == drawn[n]:
        n += 1
    return list(drawn[: n + 1])


accepted = lesson.yours(accepted, accepted_solution)


# %%
drawn = [draw(prompt + drafts[:i], 0) for i in range(5)]
print("the step yields", accepted(drafts, drawn), " plain decoding", answer[:3])

# %% [markdown]
# ## Why the tokens are the same
#
# Two things must be equal in both ways of decoding.
#
# **The logits**, to the last bit: a row alone, and the same row among others that follow it. The causal mask says that
# later rows do not count; the exact mode of [lesson 35](35_one_order.ipynb) says that not even the order of the additions
# depends on them:

# %%
shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=256)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=64, **shape), seed=0)
ids = np.random.default_rng(0).integers(0, 64, (1, 20)).astype(np.int32)
with xtrain.batch_invariant(), xtrain.no_grad():
    whole = model(ids).data.reshape(20, -1)
    parts = [model(ids[:, :n]).data.reshape(n, -1)[-1] for n in range(1, 21)]
print(
    "a row among later ones has the bits of the last row:", np.array_equal(whole, np.array(parts))
)

# %% [markdown]
# **The random numbers**: they follow from seed and number of the token, not from how many numbers were drawn before.
#
# Without equal bits and numbers one can still speculate. *Rejection sampling* (Leviathan et al. 2023) accepts a draft
# x from a distribution q with probability min(1, p(x) / q(x)), and else draws from what is left of p. The answer then has
# the right *distribution*, but it is another answer than without drafts, and a seed does not reproduce it if the drafts change.
# Here the rule is "equal", and the answer does not depend on the drafts at all.
#
# Does this rule reject more drafts? If the guesser names one token x, both rules accept it with probability p(x). If it
# draws from q, independent draws rarely agree. But with the *same noise* on both sides they agree nearly as often as
# possible, which is $\sum_x \min(p_x, q_x)$:

# %%
rng = np.random.default_rng(1)
target = 2 * rng.normal(size=V)
guess = target + 0.5 * rng.normal(size=V)
softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
p, q = softmax(target), softmax(guess)
noise, other = rng.gumbel(size=(2, 20_000, V))
right = (target + noise).argmax(1)
shares = {
    "own noise": np.mean(right == (guess + other).argmax(1)),
    "the same noise": np.mean(right == (guess + noise).argmax(1)),
    "possible": np.minimum(p, q).sum(),
}
for name, share in shares.items():
    print(f"{name:15} {share:.3f} accepted")

# %% [markdown]
# So a second, smaller model that drafts should draw with the random numbers of the sequence, and xtrain's does.

# %% [markdown]
# ## The cache forgets
#
# The rows of a step write their keys and values to the KV cache ([lesson 18](18_kv_cache.ipynb)). Those of rejected
# drafts must not be read later. Nothing has to be deleted: they lie *behind* the end of the sequence, and the next step
# overwrites them, provided that it begins at the right position.
#
# | position | 0 ... 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|
# | a step: the last token and drafts a, b, x | 3 1 4 1 | **5** | a | b | x |
# | drawn after it | | a | b | c | ? |
# | the next step begins at 7 | | | | | **c** |
#
# The drafts a and b were right. The draft x was wrong, and c was drawn in its place. The next step begins with c, which
# has no keys yet, at the position of x.
#
# Three more things end a step early: the answer has its length, a draft would have no place in the cache, and a token
# that ends the answer was drawn.
#
# ## Exercise 36.2: the loop


# %% tags=["exercise"]
def generate(prompt, new, step, guess, end):
    """-> the answer, a list of `new` tokens, or fewer if its last one is `end`.

    step(start, rows) -> for each row the token drawn after it. It writes the rows' keys to
        positions start, start + 1, ... of the cache and reads those before; the cache has
        len(prompt) + new - 1 positions. The first call is step(0, prompt).
    guess(tokens) -> a list of drafts of any length, given all tokens so far, prompt and answer.
    """
    # YOUR CODE


# %%
lesson.check("36.2", generate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `tokens = [*prompt, step(0, prompt)[-1]]`. While the answer is not complete: the rows are `[tokens[-1], *draft]`, and
# they begin at position `len(tokens) - 1`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# With `left` tokens to go, a step needs at most left - 1 drafts, and then has places for all of them: `guess(tokens)[: left - 1]`.
# What a step yields may contain `end`: the tokens after it are dropped.
#
# </details>


# %% tags=["solution"]
# Solution 36.2
def generate_solution(prompt, new, step, guess, end):
    """-> the answer, a list of `new` tokens, or fewer if its last one is `end`.

    step(start, rows) -> for each row the token drawn after it. It writes the rows' keys to
        positions start, start + 1, ... of the cache and reads those before; the cache has
        len(prompt) + new - 1 positions. The first call is step(0, prompt).
    guess(tokens) -> a list of drafts of any length, given all tokens so far, prompt and answer.
    """
    tokens = [*prompt, step(0, list(prompt))[-1]]
    while len(tokens) < len(prompt) + new and tokens[-1] != end:
        left = len(prompt) + new - len(tokens)
        draft = list(guess(tokens))[: left - 1]
        drawn = step(len(tokens) - 1, [tokens[-1], *draft])
        n = 0
        while n < len(draft) and draft[n] == drawn[n]:
            n += 1
        for token in drawn[: n + 1]:
            tokens.append(token)
            if token == end:
                break
    return tokens[len(prompt) :]


generate = lesson.yours(generate, generate_solution)


# %%
class Cached:
    """The made-up model with a cache. Counts its steps."""

    def __init__(self, seed):
        self.seed, self.cache, self.steps = seed, [], 0

    def step(self, start, rows):
        self.steps += 1
        self.cache[start:] = rows
        return [draw(self.cache[: start + i + 1], self.seed) for i in range(len(rows))]


guessers = {
    "none": lambda tokens: [],
    "always right": lambda tokens: plain(tokens, 4, seed=0),
    "half right": lambda tokens: [*plain(tokens, 2, seed=0), 0, 0],
    "always wrong": lambda tokens: [(draw(tokens, 0) + 1) % V] * 4,
}
for name, guess in guessers.items():
    cached = Cached(seed=0)
    same = generate(prompt, 30, cached.step, guess, end=None) == plain(prompt, 30, seed=0)
    print(f"drafts {name:13} the same answer: {same}   {cached.steps:2} steps for 30 tokens")

# %% [markdown]
# ## Guess without a model
#
# Much text repeats what was there before: code that is edited, a summary with quotations, JSON with the same keys.
# **Prompt lookup** (Saxena 2023) searches the last n tokens in what came before, in prompt and answer, and drafts what
# followed them there. It needs no model and no GPU, but it must be fast: a search of the whole text in every step takes
# longer the longer the text is. So keep an **index**: a dict from each n-gram to the position after its last
# occurrence.
#
# The n-gram at the end must not find itself: nothing follows it yet. So it enters the index only when the next token
# arrives. And if the tokens that follow reach the end, continue with the draft itself, so that a repetition continues:
#
# `1 2 3 1 2 3 1 2` with n = 2: the last `1 2` occurred at 3; after it came `3 1 2`, and then the draft itself: `3 1 2 3 1 ...`
#
# ## Exercise 36.3: prompt lookup


# %% tags=["exercise"]
def make_lookup(n):
    """-> two functions, append and draft.

    append(token): the next token of the sequence, which is empty at first.
    draft(k) -> list of k tokens: what followed the last n tokens at their latest earlier
        occurrence, continued with the draft itself where the tokens end; [] if there is none.
    Both take about the same time however long the sequence is.
    """
    # YOUR CODE


# %%
lesson.check("36.3", make_lookup)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `tokens = []` and `after = {}`. In append, *before* the token is appended: `after[tuple(tokens[-n:])] = len(tokens)` if
# there are n tokens.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In draft: `i = after.get(tuple(tokens[-n:]))`. For None return []. Else take k tokens from position i on; position
# `len(tokens) + j` is the draft's own token j.
#
# </details>


# %% tags=["solution"]
# Solution 36.3
def make_lookup_solution(n):
    """-> two functions, append and draft.

    append(token): the next token of the sequence, which is empty at first.
    draft(k) -> list of k tokens: what followed the last n tokens at their latest earlier
        occurrence, continued with the draft itself where the tokens end; [] if there is none.
    Both take about the same time however long the sequence is.
    """
    tokens, after = [], {}

    def append(token):
        if len(tokens) >= n:
            after[tuple(tokens[-n:])] = len(tokens)
        tokens.append(token)

    def draft(k):
        i = after.get(tuple(tokens[-n:]))
        if i is None:
            return []
        out = []
        for j in range(i, i + k):
            out.append(tokens[j] if j < len(tokens) else out[j - len(tokens)])
        return out

    return append, draft


make_lookup = lesson.yours(make_lookup, make_lookup_solution)

# %% [markdown]
# How good is it? Texts and their answers are enough to find out; no model is needed. A function whose variable is
# renamed, and a paragraph that repeats nothing:

# %%
code = """
def running_mean(values, window):
    result = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        count = min(index + 1, window)
        result.append(total / count)
    return result
"""
edited = code.replace("result", "means").replace("0.0", "0")
prose = """
The river had risen in the night, and the ferry did not run. We waited under the roof of a closed
shop until noon; then a farmer with an empty cart offered to take our bags over the old bridge,
nine miles upstream, for the price of his dinner.
"""


def words(text):
    return re.findall(r"\w+|[^\w\s]|\n *", text)


def tokens_per_step(prompt, answer, n, k=7):
    """-> tokens per step if an answer is known, and the share of the drafts that are accepted"""
    append, draft = make_lookup(n)
    for token in prompt:
        append(token)
    at = steps = drafted = right = 0
    while at < len(answer):
        guess = draft(min(k, len(answer) - at - 1))
        got = accepted(guess, answer[at : at + len(guess) + 1])
        for token in got:
            append(token)
        at, steps = at + len(got), steps + 1
        drafted, right = drafted + len(guess), right + len(got) - 1
    return len(answer) / steps, right / max(drafted, 1)


for name, before, after in (
    ("edited code", code, edited),
    ("prose after code", code, prose),
):
    for n in (1, 2, 4):
        rate, share = tokens_per_step(words(before), words(after), n)
        print(f"{name:17} n = {n}: {rate:.2f} tokens per step, {share:4.0%} of the drafts accepted")

# %% [markdown]
# ## How many drafts?
#
# Suppose that each draft is right with probability p, if those before it are. The step yields one token for certain, a
# second one with probability p, a third one with $p^2$, ...:
#
# $$E(p, k) = 1 + p + p^2 + \dots + p^k$$
#
# ## Exercise 36.4: tokens per step


# %% tags=["exercise"]
def expected_tokens(p, k):
    """-> the tokens that a step with k drafts yields on average, a float.

    p: probability that a draft is right if those before it are, 0 <= p <= 1. k >= 0.
    """
    # YOUR CODE


# %%
lesson.check("36.4", expected_tokens)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `sum(p**i for i in range(k + 1))`. (The closed form $(1 - p^{k+1}) / (1 - p)$ fails at p = 1.)
#
# </details>


# %% tags=["solution"]
# Solution 36.4
def expected_tokens_solution(p, k):
    """-> the tokens that a step with k drafts yields on average, a float.

    p: probability that a draft is right if those before it are, 0 <= p <= 1. k >= 0.
    """
    return float(sum(p**i for i in range(k + 1)))


expected_tokens = lesson.yours(expected_tokens, expected_tokens_solution)


# %%
for k in (1, 3, 7, 15):
    shown = "   ".join(f"{expected_tokens(p, k):5.2f}" for p in (0.3, 0.5, 0.7, 0.9))
    print(f"k = {k:2}, p = 0.3, 0.5, 0.7, 0.9: {shown}")

# %% [markdown]
# At p = 0.5 the second draft is worth a quarter of a token, the seventh less than a hundredth. But each is a row that
# has to be computed. So the best k depends on p *and* on what rows cost: maximize tokens per second.
#
# ## Exercise 36.5: the best length


# %% tags=["exercise"]
def best_length(p, seconds):
    """-> k, speedup: the number of drafts with the most tokens per second, and how many times as
    many these are as without drafts.

    p: as in 36.4. seconds: seconds[k] is the time of a step with k drafts, drafting included, k =
    0, ..., len(seconds) - 1. If several k are best, the smallest. k = 0, speedup 1.0 if no drafts
    pay.
    """
    # YOUR CODE


# %%
lesson.check("36.5", best_length)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `speeds = [expected_tokens(p, k) / t for k, t in enumerate(seconds)]`. Divide the largest by the one of k = 0.
#
# </details>


# %% tags=["solution"]
# Solution 36.5
def best_length_solution(p, seconds):
    """-> k, speedup: the number of drafts with the most tokens per second, and how many times as
    many these are as without drafts.

    p: as in 36.4. seconds: seconds[k] is the time of a step with k drafts, drafting included, k =
    0, ..., len(seconds) - 1. If several k are best, the smallest. k = 0, speedup 1.0 if no drafts
    pay.
    """
    speeds = [sum(p**i for i in range(k + 1)) / t for k, t in enumerate(seconds)]
    k = speeds.index(max(speeds))
    return k, speeds[k] / speeds[0]


best_length = lesson.yours(best_length, best_length_solution)


# %% [markdown]
# ## Measure: when does it not pay?
#
# With the step times from the top: one sequence and 7 drafts are 8 rows; 8 sequences with 3 drafts are 32 rows; 32
# sequences with 3 drafts are 128. (An estimate: the measured rows belong to as many sequences, each with other keys.)

# %%
plans = {
    "1 sequence, k = 7": (1, 7),
    "8 sequences, k = 3": (8, 3),
    "32 sequences, k = 3": (32, 3),
}
chances = np.linspace(0, 1, 21)
speedups = {}
for name, (B, k) in plans.items():
    cost = ms[B * (k + 1)] / ms[B]
    speedups[name] = [expected_tokens(p, k) / cost for p in chances]
    pays = next(p for p, s in zip(chances, speedups[name]) if s > 1)
    print(f"{name:20} a step takes {cost:.2f} times as long   pays from p = {pays:.2f} on")
lesson.figures.curves(
    chances, speedups, "probability of a draft", "times as fast", "drafts, estimated", log=False
)

# %% [markdown]
# With one sequence nearly any guess pays. With 32 sequences drafts must be right more often than not, because four
# times as many rows take 2.12 times as long. So an engine should not draft a fixed number of tokens. It measures its
# steps and its guesses, and solves 36.5 in every step.
#
# xtrain's engine does this. Measured with the shape of Qwen3-8B, one sequence and up to 7 drafts: a text that repeats a
# document in which 5 % of the tokens are others, drafts that are right with probability 0.7 each, and a text without
# repetition. *Same*: the tokens are those of plain decoding.

# %%
measured = []
for identity in (
    "bench_speculation/prompt lookup Qwen3-8B/bf16",
    "bench_speculation/acceptance 0.7 Qwen3-8B/bf16",
    "bench_speculation/no repetition Qwen3-8B/bf16",
):
    r = lesson.record(identity)
    measured.append(r)
    print(
        f"{r['name']:24} plain {r['peer_value']:5.0f} tokens/s   with drafts {r['value']:5.0f}"
        f"   {r['ratio']:.2f} times   same: {r['same'] == 1}"
    )
forced = measured[1]
cost = forced["step_ms"]["verify 8"] / forced["step_ms"]["plain 1"]
new = int(forced["shape"].split("+")[1])
reached = new / (new - forced["accepted"] * forced["drafted"])
for what, tokens in (("p = 0.7", expected_tokens(0.7, 7)), ("this run", reached)):
    print(
        f"{what:8} {tokens:.2f} tokens per step, a step {cost:.2f} times as long: "
        f"{tokens / cost:.2f} times"
    )
print(lesson.records.machine(measured))

# %% [markdown]
# In this run fewer drafts were right than at p = 0.7 on average. With the tokens per step that it reached the estimate
# is 5 % above the measurement. It takes the shortest steps that were measured, and all of them with 7 drafts. (A step
# with drafts takes longer than its kernels: it starts only when the token before the drafts has reached the host, while
# plain steps are launched ahead.)
#
# ## The improvement
#
# One p for everything wastes drafts. A guess after a long match is more often right than one after a short match, and
# the probability falls with every token. xtrain estimates it for each length of the match, from how often such guesses
# were right; then it takes the most probable drafts of *all* sequences, as many as give the most tokens per second. A
# sequence that quotes gets many, and one that does not gets none.

# %% [markdown]
# ## Heads that draft
#
# The model itself may know more than the next token: its last hidden vector h, from which the head reads the next
# token, says something of the ones after it. Medusa (Cai et al. 2024) trains a small block for each of these places,
# with the model frozen, and reads its result with the model's own head:
#
# $$h_k = h + \operatorname{silu}(W_k h) \qquad k = 1, \dots, K$$
#
# Head k guesses the token k places after the next one. So it is trained like the model, with other targets.
#
# ## Exercise 36.6: what head k is trained on


# %% tags=["exercise"]
def head_targets(targets, k):
    """-> (B, T) array of whole numbers, like targets: what head k is to predict at each position.

    targets (B, T): the next token at each position, or -100 where nothing is trained. k >= 1:
    head k predicts the token k places after the next one. -100 where the row ends before it.
    """
    # YOUR CODE


# %%
lesson.check("36.6", head_targets)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The token k places after the next one is the target k columns to the right. The last k columns have none.
#
# </details>


# %% tags=["solution"]
# Solution 36.6
def head_targets_solution(targets, k):
    """-> (B, T) array of whole numbers, like targets: what head k is to predict at each position.

    targets (B, T): the next token at each position, or -100 where nothing is trained. k >= 1:
    head k predicts the token k places after the next one. -100 where the row ends before it.
    """
    out = np.full_like(targets, -100)
    out[:, :-k] = targets[:, k:]
    return out


head_targets = lesson.yours(head_targets, head_targets_solution)

# %% [markdown]
# Three heads on the Transformer, trained on texts that it has written itself: the loss of each head, and which share
# of its guesses is the model's token, before and after.

# %%
from xtrain.nn.draft_heads import HeadedTransformer

rng = np.random.default_rng(0)
starts = [rng.integers(0, 64, 8).tolist() for _ in range(32)]
writer = xtrain.Engine(model, 32, 64)
texts = np.array([p + list(a) for p, a in zip(starts, writer.generate(starts, 40))])
ids, targets = texts[:, :-1], texts[:, 1:].copy()
targets[:, :7] = -100  # the made-up beginnings

headed = HeadedTransformer(model.config, None, trainable=False)
for (_, ours), (_, theirs) in zip(headed.named_parameters(), model.named_parameters()):
    ours.data = theirs.data
headed.add_heads(3)
hidden = headed.hidden(ids)


def right(k):
    """The share of head k's guesses that are right."""
    guesses = headed.logits(headed.draft_heads(hidden)[k - 1]).data[:, :64].argmax(1)
    wanted = head_targets(targets, k).reshape(-1)
    return (guesses == wanted)[wanted != -100].mean()


optimizer = xtrain.AdamW(headed, lr=1e-2, weight_decay=0.0)
before = [right(k) for k in (1, 2, 3)]
for step in range(60):
    headed.zero_grad()
    loss = headed.loss(ids, targets)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2}: loss {loss.item():.2f}")
for k in (1, 2, 3):
    print(f"head {k}: {before[k - 1]:4.0%} of its guesses were right, now {right(k):4.0%}")

# %% [markdown]
# (The texts are the ones that it was trained on, and this model writes in circles: a real model's heads are less often right.)
# Heads need no cache and no pass for each draft, but each guesses without knowing the drafts before its own. `xtrain
# finetune --draft-heads 3` trains them, `--draft FOLDER` drafts with them. Your 36.1 accepts what is right, so bad heads
# cost time and never change an answer.
#
# ## The library's kernel
#
# A step that verifies has the launches of a plain one: for the model, the drafts of a sequence are rows of a decoding
# batch that share a block table ([lesson 24](24_paged_cache.ipynb)). Only attention must know it: the keys of the rows before
# are not in the cache yet, so it computes them itself. Your 36.1 and 36.3 in the library:

# %%
from xtrain.serving import speculation

lesson.source(speculation.count_accepted)
lesson.source(speculation.History)

# %% [markdown]
# And the engine, with up to 7 drafts and without, sampled, with log-probabilities. (On a CPU each further row takes
# about as long as a step of one row, so drafts may not pay, and then none are made. The answers do not depend on it.)

# %%
prompts = [[7, 8, 9, 10] * 6, list(range(20, 50))]
options = dict(temperature=0.8, seed=3, logprobs=0)
answers = {}
for most in (0, 7):
    engine = xtrain.Engine(model, 2, 128, batch_invariant=True, speculate=most)
    answers[most] = engine.generate(prompts, 60, **options)
print("the same tokens:", all(list(a) == list(b) for a, b in zip(answers[0], answers[7])))
print("the same bits:  ", all(a.logprobs == b.logprobs for a, b in zip(answers[0], answers[7])))

# %% [markdown]
# ## What did not help
#
# *A longer n-gram for safety.* In the table above, n = 4 has the better drafts, but after an edit it finds nothing
# until four tokens agree again; n = 1 finds something everywhere, and more of it is wrong. xtrain looks for 8 tokens
# first, then for 4, then for 2.
#
# *Drafts in a large batch.* See the curve of 32 sequences: at small p drafts make it slower.
#
# *Rejection sampling with exact bits.* It would be correct, but it consumes random numbers of its own, so the answer would
# depend on the drafts again.
#
# ## More exercises
#
# 1. In 36.2, what happens if a wrong draft's keys are read? Which test would notice it, and why not one that looks at the text?
# 2. A draft model of a tenth of the time per token, p = 0.8. Which k is best if a step takes 1 + 0.02 k? Use 36.5.
# 3. With temperature 2 instead of 0.8: what happens to p?
# 4. Why may a draft not be longer than the tokens to go minus one?
#
# <details><summary>Solutions</summary>
#
# 1: The logits are those of another history: plausible text that is not the answer of plain decoding. A comparison with
# plain decoding, token for token, notices it at once; that the comparison can be exact is what the exact mode gives. 2:
# `best_length(0.8, [1 + 0.12 * k for k in range(30)])` gives k = 5, 2.31 times as fast. 3: It falls: a draft is
# accepted with its probability under the model, and a hotter distribution is flatter. 4: The step yields one token more
# than it accepts, so `left - 1` drafts can complete the answer; another row would only be thrown away, and has no place
# in the cache.
#
# </details>
#
# ## Sources
#
# - M. Stern, N. Shazeer, J. Uszkoreit, *Blockwise Parallel Decoding for Deep Autoregressive Models*, 2018: verify guesses in one step.
# - Y. Leviathan, M. Kalman, Y. Matias, *Fast Inference from Transformers via Speculative Decoding*, 2023: rejection sampling, E(p, k).
# - C. Chen et al., *Accelerating Large Language Model Decoding with Speculative Sampling*, 2023.
# - A. Saxena, *Prompt Lookup Decoding*, 2023.
# - T. Cai et al., *Medusa*, 2024, and Y. Li et al., *EAGLE*, 2024: small heads on the model draft.
