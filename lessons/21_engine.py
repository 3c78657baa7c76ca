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
# # 21 Continuous batching and chat
#
# [![Open in Colab](colab.svg)](https://colab.research.google.com/github/OWNER/xtrain/blob/main/lessons/21_engine.ipynb)
#
# *About 60 minutes. You need [lesson 18](18_kv_cache.ipynb) and [lesson 20](20_sampling.ipynb).*
#
# **The question.** A model can write one token for many sequences in nearly the time of one. But
# people ask at different times, and one wants three words while another wants a page. Who shares a
# step with whom? And when someone answers the answer: must the whole conversation be read again?
#
# You will write the plan that an engine follows, the kernel that keeps count on the GPU, the rule
# that makes a long chat cheap, and the piece that turns tokens into text without ever showing half
# a character.

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
import codecs

import numpy as np
from numba import cuda

from xtrain import lesson

# %% [markdown]
# ## Why share a step at all
#
# A decoding step computes one token for each of b sequences. It reads all weights once, whatever b
# is, and the cache of each sequence. By the rule of lesson 2 its time goes with the bytes. For a
# Llama of 1.1 billion parameters in bf16 whose sequences have 1000 tokens each:

# %%
weights = 2 * 1.1e9
layers, heads, width, tokens = 22, 4, 64, 1000
cache = 2 * layers * heads * width * tokens * 2  # keys and values, 2 bytes each
print("sequences   GB read   GB per token")
for b in (1, 8, 32):
    moved = weights + b * cache
    print(f"{b:9}   {moved / 1e9:7.2f}   {moved / b / 1e9:12.3f}")

# %% [markdown]
# Eight sequences cost little more than one, and per token nearly eight times less. So a step should
# be full. The memory of the cache says how many *rows* there are: places for a sequence (lesson
# 18).
#
# ## Static batching by hand
#
# Five requests, of which we pretend to know how many tokens their answers will have: 3, 9, 2, 5, 1.
# There are two rows. The obvious way fills the rows, waits until both have ended, and fills them
# again:

# %%
lengths, rows = [3, 9, 2, 5, 1], 2
now = 0
spans = {f"row {r}": [] for r in range(rows)}
for first in range(0, len(lengths), rows):
    group = list(enumerate(lengths))[first : first + rows]
    for row, (i, n) in enumerate(group):
        spans[f"row {row}"].append((now, now + n, str(i)))
    now += max(n for _, n in group)
used = sum(lengths) / (now * rows)
print(f"{now} steps for {sum(lengths)} tokens: {used:.0%} of the places are used")
lesson.figures.timeline(spans, "static batching: short answers wait for long ones", "step")

# %% [markdown]
# **Continuous batching** (Orca, 2022) decides anew in every step. Whoever has ended leaves, and the
# next who waits takes the row *in the next step*. A batch is no longer a group of requests: it is
# whoever happens to be there.
#
# ## Exercise 21.1: the plan
#
# First come, first served. A request of length n needs n steps in a row, one after the other; the
# row is free in the step after its last.


# %% tags=["exercise"]
def schedule(lengths, rows):
    """-> [(first step, row), ...], one pair for each request, in their order.

    lengths: steps that each request needs. All of them are waiting at step 0.
    rows: how many requests can be served at once.
    """
    # YOUR CODE


# %%
lesson.check("21.1", schedule)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `free_at = [0] * rows`: the step from which on each row is free.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The next request takes the row that is free first, `row = free_at.index(min(free_at))`.
#
# </details>


# %% tags=["solution"]
# Solution 21.1
def schedule(lengths, rows):
    """-> [(first step, row), ...], one pair for each request, in their order.

    lengths: steps that each request needs. All of them are waiting at step 0.
    rows: how many requests can be served at once.
    """
    free_at, plan = [0] * rows, []
    for n in lengths:
        row = free_at.index(min(free_at))
        start = free_at[row]
        plan.append((start, row))
        free_at[row] = start + n
    return plan


# %%
plan = schedule(lengths, rows)
spans = {f"row {r}": [] for r in range(rows)}
for i, ((start, row), n) in enumerate(zip(plan, lengths)):
    spans[f"row {row}"].append((start, start + n, str(i)))
steps = max(start + n for (start, _), n in zip(plan, lengths))
print(f"{steps} steps: {sum(lengths) / (steps * rows):.0%} of the places are used")
lesson.figures.timeline(spans, "continuous batching: a free row is taken at once", "step")

# %% [markdown]
# The engine of xtrain knows no lengths beforehand; nobody does. It follows the same plan step by
# step, and keeps a trace. A small model with random weights, the same five requests:

# %%
import xtrain

shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=256)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=100, **shape))
engine = xtrain.Engine(model, max_batch=rows)
prompts = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
answers = engine.generate(prompts, max_new_tokens=lengths)
begins = {name: step.number for step in engine.trace for name, _ in step.admitted}
print("tokens of the answers: ", [len(a) for a in answers])
print("first step, the engine:", [begins[i] for i in range(5)])
print("first step, your plan: ", [start for start, _ in plan])
for prompt, n, answer in zip(prompts, lengths, answers):
    (alone,) = xtrain.Engine(model, max_batch=1).generate([prompt], n)
    print("the same tokens as alone:", answer == alone)

# %% [markdown]
# The last line is the promise that makes it usable: *who else is there changes nothing*. Each
# sequence has its own row of cache, its own length, its own random numbers (lesson 20). With one
# caveat: products of other shapes add up in another order, so last bits may differ, and of two
# tokens that nearly tie the other one may win. `Engine(..., batch_invariant=True)` rules that out,
# at some cost in speed.
#
# ## What the GPU keeps
#
# In a step Python should only have to say "again": everything the kernels need lies on the device,
# in **lanes** (not those of a warp). Lane b holds for one sequence its last token, its length (where
# the next key goes), how many tokens it has drawn, and its row; -1 says that nobody is there. The
# number of lanes is fixed, because the step is a CUDA graph (lesson 10), so there are idle ones. At
# the end of a step a kernel counts up.
#
# ## Exercise 21.2: the end of a step


# %% tags=["exercise"]
@cuda.jit
def advance_kernel(lengths_B, step_B, rows_B):
    """One token more: lengths and step of every lane that has a row grow by one.

    Grid ceil(B / block), any block. A lane whose row is -1 is idle.
    """
    # YOUR CODE


# %%
lesson.check("21.2", advance_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `b = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x`. Two conditions: there is such a lane,
# and its row is not -1.
#
# </details>


# %% tags=["solution"]
# Solution 21.2
@cuda.jit
def advance_kernel(lengths_B, step_B, rows_B):
    """One token more: lengths and step of every lane that has a row grow by one.

    Grid ceil(B / block), any block. A lane whose row is -1 is idle.
    """
    b = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if b < rows_B.size and rows_B[b] >= 0:
        lengths_B[b] += 1
        step_B[b] += 1


# %% [markdown]
# What would happen if idle lanes counted too? Their lengths would walk past the end of the cache,
# step by step. The kernels that write keys look at the row first; this one must as well.
#
# ## A chat is a prompt that grows
#
# A chat model knows no turns. It gets one text, in which a **template** marks who speaks; the
# model's answer is what follows. The template comes with the model:

# %%
from xtrain.serving.chat_template import ChatTemplate

template = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
)
messages = [{"role": "user", "content": "Two plus two?"}]
first = template.render(messages)
print(first)
messages.append({"role": "assistant", "content": "Four."})
messages.append({"role": "user", "content": "Times three?"})
second = template.render(messages)
print(second)
print("begins with the first text and its answer:", second.startswith(first + "Four."))

# %% [markdown]
# Each turn's prompt contains all turns before. Computing it anew costs more with every turn; all
# turns together grow with the *square* of their number. But the keys and values of the beginning
# are in the cache still, for the row was the same conversation's. They can stay if the tokens are
# the same, *from the beginning and without a gap*: a key depends on all tokens before it.
#
# ## Exercise 21.3: how much can stay?


# %% tags=["exercise"]
def reusable(held, prompt):
    """-> how many of the prompt's tokens need not be computed again.

    held: the tokens whose keys and values are in the cache.   prompt: not empty. The model
    must see at least one token of the prompt: its logits give the first new one.
    """
    # YOUR CODE


# %%
lesson.check("21.3", reusable)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A loop over `zip(held, prompt)` that ends at the first difference; then `min(..., len(prompt) -
# 1)`.
#
# </details>


# %% tags=["solution"]
# Solution 21.3
def reusable(held, prompt):
    """-> how many of the prompt's tokens need not be computed again.

    held: the tokens whose keys and values are in the cache.   prompt: not empty. The model
    must see at least one token of the prompt: its logits give the first new one.
    """
    n = 0
    for a, b in zip(held, prompt):
        if a != b:
            break
        n += 1
    return min(n, len(prompt) - 1)


# %% [markdown]
# ## From tokens to text
#
# Tokens are pieces of *bytes*, and in UTF-8 a character may have up to four. A token can end in the
# middle of one:

# %%
text = "é is two bytes, € three, 🙂 four"
data = text.encode()
print(len(text), "characters,", len(data), "bytes")
for cut in (1, 2, 18):
    print(data[:cut], "as text:", repr(data[:cut].decode("utf-8", "replace")))

# %% [markdown]
# Whoever decodes each token by itself shows that question mark, and then the other half as a second
# one. So bytes of an unfinished character are held back until the next token comes. But not for
# ever: bytes that can never become a character (a model may write anything) are replaced by the
# sign for that, U+FFFD.
#
# ## Exercise 21.4: whole characters


# %% tags=["exercise"]
def whole_characters(data):
    """-> (text, rest): data decoded as far as it is certain, and the bytes held back.

    rest: the beginning of a character whose other bytes may still come, else b"".
    Bytes that cannot be part of any character become U+FFFD in the text.
    """
    # YOUR CODE


# %%
lesson.check("21.4", whole_characters)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `decoder = codecs.getincrementaldecoder("utf-8")("replace")`, and `decoder.decode(data)` gives
# what is certain.
#
# </details>
# <details><summary>Hint 2</summary>
#
# What it holds back: `decoder.getstate()[0]`.
#
# </details>


# %% tags=["solution"]
# Solution 21.4
def whole_characters(data):
    """-> (text, rest): data decoded as far as it is certain, and the bytes held back.

    rest: the beginning of a character whose other bytes may still come, else b"".
    Bytes that cannot be part of any character become U+FFFD in the text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


# %%
shown, rest = "", b""
for i in range(0, len(data), 2):  # tokens of two bytes each
    piece, rest = whole_characters(rest + data[i : i + 2])
    shown += piece
print("token by token:", shown, "   the same:", shown == text)

# %% [markdown]
# ## Measure: how many steps?
#
# A step costs about the same whoever is in it, so we count steps. 200 requests whose answers are of
# very different lengths, 16 rows:

# %%
rng = np.random.default_rng(0)
lengths, rows = [int(n) for n in rng.geometric(1 / 60, 200)], 16


def static_steps(lengths, rows):
    return sum(max(lengths[i : i + rows]) for i in range(0, len(lengths), rows))


plan = schedule(lengths, rows)
continuous = max(start + n for (start, _), n in zip(plan, lengths))
static = static_steps(lengths, rows)
print(f"answers of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
for name, steps in (("static", static), ("continuous", continuous)):
    print(f"{name:11} {steps:5} steps, {sum(lengths) / (steps * rows):.0%} of the places used")
print(f"{static / continuous:.1f} times as many tokens per step")

# %% [markdown]
# **The improvement** is that factor: the reason is that no place waits for its neighbours, the
# effect was counted, not timed. What remains unused is the end, when nobody waits any more.
#
# And the chat: eight turns, each of 20 tokens from the user and 12 in answer, with and without
# 21.3. The engine counts the tokens of prompts that it really computed:

# %%
replies = {False: [], True: []}
for reuse in replies:
    engine = xtrain.Engine(model, max_batch=1, reuse_prefix=reuse)
    conversation, computed = [], []
    for turn in range(8):
        conversation += [int(t) for t in np.random.default_rng(turn).integers(0, 100, 20)]
        (answer,) = engine.generate([conversation], max_new_tokens=12)
        computed.append(answer.prefilled)
        replies[reuse].append(list(answer))
        conversation += answer
    print(f"reuse {reuse!s:5}  tokens computed per turn {computed}, together {sum(computed)}")
print("the same answers:", replies[False] == replies[True])

# %% [markdown]
# (From the second turn on it is 21 and not 20: the last token of an answer was given out and never
# went through the model, so its key is not there yet.)
#
# On a GPU the next cell times a step with one sequence and with eight:

# %%
if lesson.on_gpu():
    import time

    on_gpu = xtrain.Transformer(model.config, device="gpu")
    for b in (1, 8):
        engine = xtrain.Engine(on_gpu, max_batch=8)
        engine.generate([[1, 2, 3]] * b, 20)
        start = time.perf_counter()
        engine.generate([[1, 2, 3]] * b, 200)
        print(f"{b} sequences: {5 * (time.perf_counter() - start):.3f} ms a step")
else:
    print("No GPU here, so nothing is timed.")

# %% [markdown]
# And a model of 1.1 billion parameters, measured on a large GPU. Its weights are read once per
# step, whoever is in it:

# %%
lesson.table(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=32 context=128/bf16",
    ],
    {"sequences": lambda r: r["shape"].split()[0][2:], "ms a step": "ms", "tokens/s": "value"},
)
alone = lesson.record("bench_decode/llama 1.1B/B=1 context=128/bf16")
together = lesson.record("bench_decode/llama 1.1B/B=32 context=128/bf16")
print(f"32 times the tokens for {together['ms'] / alone['ms']:.2f} times the time")

# %% [markdown]
# ## The library's kernel
#
# Your 21.2, and around it the step that becomes a CUDA graph: model, sampling, counting up.
# Python's part of a step is one launch, and reading b token ids: the last kernel puts them into
# memory of the host.

# %%
from xtrain.serving import text_stream
from xtrain.serving.engine import Engine
from xtrain.kernels.decoding import sampling_kernels as _sampling_kernels

lesson.source(_sampling_kernels.make_advance_kernel)
lesson.source(Engine._decode)

# %% [markdown]
# One step of the engine: admit, decode, end. `flights` are steps that were started and whose ids
# have not arrived. While nobody waits for a row, the engine starts the next step *before* it knows
# the tokens of the last one. If one of them turns out to be a stop token, that sequence was
# computed once too often; its token is thrown away.

# %%
lesson.source(Engine._step)
lesson.source(Engine._give)
lesson.source(Engine._end_if_over)

# %% [markdown]
# Your 21.3 is in `_take_row`: of all free rows the one that holds the longest beginning of the
# prompt. (When weights change, nothing that is held is of use.)

# %%
lesson.source(Engine._take_row)

# %% [markdown]
# And your 21.4, with one thing more: a *stop string*, such as the beginning of the user's next
# turn, may also arrive in pieces.

# %%
lesson.source(text_stream.TextStream._give)
lesson.source(text_stream.TextStream._could_become_a_stop)

# %% [markdown]
# ## What did not help
#
# *Sorting requests by length*, so that equal lengths share a static batch. It would win back most
# of what static batching loses:

# %%
print("static, sorted by length:", static_steps(sorted(lengths), rows), "steps")
print("continuous, as they come:", continuous, "steps")
guess = [n * factor for n, factor in zip(lengths, rng.lognormal(0, 1, 200))]
by_guess = [n for _, n in sorted(zip(guess, lengths))]
print("static, sorted by a guess:", static_steps(by_guess, rows), "steps")

# %% [markdown]
# But it needs to know the lengths, and with a guess that is wrong by a factor of two or three most
# of it is gone. Besides, whoever asks for much waits longest.
#
# *Several sequences per row.* Rows are of one size, so a short sequence wastes most of its row.
# Paged caches (vLLM) cut rows into small pages; xtrain has not gone that way: in a row the keys of
# a head lie one behind the other (lesson 18), and the price is memory.
#
# ## More exercises
#
# 1. Extend `schedule` by arrival times: request i is not there before step `arrives[i]`. Is first
#    come, first served still the order in which rows are taken?
# 2. Two people talk to one engine that has a single row, in turns. What does `reuse_prefix` give
#    them? And with two rows?
# 3. A stop string is "User:". The model writes "Use", then "ful". What may be shown after the first
#    piece, and what after the second?
#
# <details><summary>Solutions</summary>
#
# 1: `start = max(free_at[row], arrives[i])`, with requests sorted by arrival. Yes: whoever came
# first is admitted first, though a row may now stand empty between. 2: With one row nothing beyond
# a common beginning (a system prompt): each turn overwrites the other's keys. With two rows each
# finds its own, since the engine takes the free row that holds the longest beginning of the prompt.
# 3: Nothing after "Use", for it could become the stop string; after "ful" all of "Useful".
#
# </details>
#
# ## Sources
#
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*,
#   2022: deciding anew in every step.
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*, 2023.
# - The Unicode Standard, chapter 3: which bytes are UTF-8, and where U+FFFD goes.
