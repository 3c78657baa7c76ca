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
# *About 60 minutes. You need [lesson 18](18_kv_cache.ipynb) and [lesson 20](20_sampling.ipynb).*
#
# **The question.** A model can generate one token for many sequences in nearly the time of one. But
# requests arrive at different times, and one needs three tokens while another needs a page. Which
# sequences share a step? And when a user replies to an answer, must the whole conversation be
# computed again?
#
# You will write the schedule that an engine follows, the kernel that advances its counters on the
# GPU, the rule that makes a long chat cheap, and the function that turns tokens into text without
# ever showing half a character.

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
# ## Why sequences share a step
#
# A decoding step computes one token for each of b sequences. It reads all weights once, for any b,
# and the cache of each sequence. By the rule of lesson 2 its time is proportional to the bytes it
# reads. For a Llama of 1.1 billion parameters in bf16, with 1000 tokens per sequence:

# %%
weights = 2 * 1.1e9
layers, heads, width, tokens = 22, 4, 64, 1000
cache = 2 * layers * heads * width * tokens * 2  # keys and values, 2 bytes each
print("sequences   GB read   GB per token")
for b in (1, 8, 32):
    moved = weights + b * cache
    print(f"{b:9}   {moved / 1e9:7.2f}   {moved / b / 1e9:12.3f}")

# %% [markdown]
# Eight sequences cost little more than one, and nearly eight times less per token. So a step should
# always be full. A **slot** is a place in the batch and holds one sequence. The memory of the cache
# limits how many there can be. In this lesson a slot has room for the longest sequence, as a row of
# the cache in lesson 18 has.
#
# ## Static batching by hand
#
# Take five requests, and suppose we know the lengths of their answers: 3, 9, 2, 5 and 1 tokens.
# There are two slots. The obvious way fills the slots, waits until both sequences have ended, and
# fills them again:

# %%
lengths, slots = [3, 9, 2, 5, 1], 2
now = 0
spans = {f"slot {r}": [] for r in range(slots)}
for first in range(0, len(lengths), slots):
    group = list(enumerate(lengths))[first : first + slots]
    for slot, (i, n) in enumerate(group):
        spans[f"slot {slot}"].append((now, now + n, str(i)))
    now += max(n for _, n in group)
used = sum(lengths) / (now * slots)
print(f"{now} steps for {sum(lengths)} tokens: slots are {used:.0%} utilized")
lesson.figures.timeline(spans, "static batching: short answers wait for long ones", "step")

# %% [markdown]
# **Continuous batching** (also called iteration-level batching; Orca, 2022) decides in every step
# which sequences are in the batch. A sequence that has ended leaves the batch, and the next waiting
# request gets its slot *in the next step*. A batch is no longer a fixed group of requests: it is
# the set of sequences that are active in a step.
#
# ## Exercise 21.1: the schedule
#
# Requests are served in order of arrival (first come, first served). A request of length n occupies
# a slot for n consecutive steps; the slot is free again in the step after the last one.


# %% tags=["exercise"]
def schedule(lengths, slots):
    """-> [(first step, slot), ...], one pair per request, in order.

    lengths: steps that each request needs. All requests are waiting at step 0.
    slots: how many requests can be served at once.
    """
    # YOUR CODE


# %%
lesson.check("21.1", schedule)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep `free_at = [0] * slots`: the step from which each slot is free.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The next request takes the slot that becomes free first: `slot = free_at.index(min(free_at))`.
#
# </details>


# %% tags=["solution"]
# Solution 21.1
def schedule_solution(lengths, slots):
    """-> [(first step, slot), ...], one pair per request, in order.

    lengths: steps that each request needs. All requests are waiting at step 0.
    slots: how many requests can be served at once.
    """
    free_at, plan = [0] * slots, []
    for n in lengths:
        slot = free_at.index(min(free_at))
        start = free_at[slot]
        plan.append((start, slot))
        free_at[slot] = start + n
    return plan


schedule = lesson.yours(schedule, schedule_solution)


# %%
plan = schedule(lengths, slots)
spans = {f"slot {r}": [] for r in range(slots)}
for i, ((start, slot), n) in enumerate(zip(plan, lengths)):
    spans[f"slot {slot}"].append((start, start + n, str(i)))
steps = max(start + n for (start, _), n in zip(plan, lengths))
print(f"{steps} steps: slots are {sum(lengths) / (steps * slots):.0%} utilized")
lesson.figures.timeline(spans, "continuous batching: a free slot is reused immediately", "step")

# %% [markdown]
# xtrain's engine does not know the lengths in advance. It follows the same schedule step by step
# and keeps a trace. A small model with random weights serves the same five requests:

# %%
import xtrain

shape = dict(dim=32, n_layers=2, n_heads=2, head_dim=16, hidden_dim=64, max_seq_len=256)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=100, **shape))
engine = xtrain.Engine(model, max_batch=slots)
prompts = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
answers = engine.generate(prompts, max_new_tokens=lengths)
begins = {name: step.number for step in engine.trace for name, _ in step.admitted}
print("answer lengths:        ", [len(a) for a in answers])
print("first step, the engine:", [begins[i] for i in range(5)])
print("first step, your plan: ", [start for start, _ in plan])
for prompt, n, answer in zip(prompts, lengths, answers):
    (alone,) = xtrain.Engine(model, max_batch=1).generate([prompt], n)
    print("same tokens as alone:", answer == alone)

# %% [markdown]
# The last lines show the property that makes continuous batching usable: *the other sequences in
# the batch do not change the result*. Each sequence has its own part of the cache, its own length,
# and its own random numbers (lesson 20). There is one caveat: matrix products of other shapes add
# in a different order, so last bits may differ, and of two nearly tied tokens the other one may
# win. `Engine(..., batch_invariant=True)` prevents this, at some cost in speed.
#
# ## State on the GPU
#
# In each step Python should only launch the same work again. Everything the kernels need is
# therefore on the device, in the **entries** of the batch. Entry b holds the state of one sequence:
# its last token, its length (the position of the next key), the number of tokens drawn so far, and
# its slot; slot -1 means that the entry is idle. The number of entries is fixed because the step is
# a CUDA graph (lesson 10), so some entries may be idle. At the end of a step a kernel advances the
# counters.
#
# ## Exercise 21.2: the end of a step


# %% tags=["exercise"]
@cuda.jit
def advance_kernel(lengths_B, step_B, slots_B):
    """One more token: add 1 to lengths and step of every entry that has a slot.

    Grid ceil(B / block), any block. An entry whose slot is -1 is idle.
    """
    # YOUR CODE


# %%
lesson.check("21.2", advance_kernel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `b = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x`. Check two conditions: entry b exists,
# and its slot is not -1.
#
# </details>


# %% tags=["solution"]
# Solution 21.2
@cuda.jit
def advance_kernel_solution(lengths_B, step_B, slots_B):
    """One more token: add 1 to lengths and step of every entry that has a slot.

    Grid ceil(B / block), any block. An entry whose slot is -1 is idle.
    """
    b = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if b < slots_B.size and slots_B[b] >= 0:
        lengths_B[b] += 1
        step_B[b] += 1


advance_kernel = lesson.yours(advance_kernel, advance_kernel_solution)


# %% [markdown]
# What would happen if idle entries advanced too? Their lengths would grow past the end of the
# cache, step by step. The kernels that write keys check the slot first; this kernel must check it
# as well.
#
# ## A chat is a growing prompt
#
# A chat model has no notion of turns. It receives one text, in which a **template** marks the
# speakers; the model's answer is the continuation. The template comes with the model:

# %%
from xtrain.data.chat_template import ChatTemplate

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
print("starts with the first text and its answer:", second.startswith(first + "Four."))

# %% [markdown]
# The prompt of each turn contains all earlier turns. Computing it from scratch costs more in every
# turn; the total cost grows with the *square* of the number of turns. But the keys and values of
# the earlier turns are still in the cache, until their blocks are needed for others. They
# can be reused as far as the tokens are the same *from the beginning, without a gap*: a key depends
# on all tokens before it.
#
# ## Exercise 21.3: how much can be reused?


# %% tags=["exercise"]
def reusable(cached, prompt):
    """-> how many of the prompt's tokens need not be computed again.

    cached: the tokens whose keys and values are in the cache.   prompt: not empty. The model
    must compute at least the last token of the prompt: its logits give the first new token.
    """
    # YOUR CODE


# %%
lesson.check("21.3", reusable)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Loop over `zip(cached, prompt)` and stop at the first difference; then return `min(...,
# len(prompt) - 1)`.
#
# </details>


# %% tags=["solution"]
# Solution 21.3
def reusable_solution(cached, prompt):
    """-> how many of the prompt's tokens need not be computed again.

    cached: the tokens whose keys and values are in the cache.   prompt: not empty. The model
    must compute at least the last token of the prompt: its logits give the first new token.
    """
    n = 0
    for a, b in zip(cached, prompt):
        if a != b:
            break
        n += 1
    return min(n, len(prompt) - 1)


reusable = lesson.yours(reusable, reusable_solution)


# %% [markdown]
# ## From tokens to text
#
# Tokens are sequences of *bytes*, and a UTF-8 character has up to four bytes. A token can end in
# the middle of a character:

# %%
text = "é is two bytes, € three, 🙂 four"
data = text.encode()
print(len(text), "characters,", len(data), "bytes")
for cut in (1, 2, 18):
    print(data[:cut], "as text:", repr(data[:cut].decode("utf-8", "replace")))

# %% [markdown]
# Decoding each token separately shows that replacement character, and then another one for the
# second half. So the bytes of an unfinished character are held back until the next token arrives.
# But not forever: bytes that can never become a character (a model may generate any bytes) are
# replaced by U+FFFD, the replacement character.
#
# ## Exercise 21.4: whole characters


# %% tags=["exercise"]
def whole_characters(data):
    """-> (text, rest): data decoded as far as it is complete, and the bytes held back.

    rest: the first bytes of a character that may still be completed, else b"".
    Bytes that cannot be part of any character become U+FFFD in the text.
    """
    # YOUR CODE


# %%
lesson.check("21.4", whole_characters)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# With `decoder = codecs.getincrementaldecoder("utf-8")("replace")`, `decoder.decode(data)` returns
# the complete part.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The bytes it holds back are `decoder.getstate()[0]`.
#
# </details>


# %% tags=["solution"]
# Solution 21.4
def whole_characters_solution(data):
    """-> (text, rest): data decoded as far as it is complete, and the bytes held back.

    rest: the first bytes of a character that may still be completed, else b"".
    Bytes that cannot be part of any character become U+FFFD in the text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


whole_characters = lesson.yours(whole_characters, whole_characters_solution)


# %%
shown, rest = "", b""
for i in range(0, len(data), 2):  # tokens of two bytes each
    piece, rest = whole_characters(rest + data[i : i + 2])
    shown += piece
print("token by token:", shown, "   the same:", shown == text)

# %% [markdown]
# ## Measure: how many steps?
#
# A step costs about the same whichever sequences are in it, so we count steps: 200 requests with
# answers of very different lengths, and 16 slots:

# %%
rng = np.random.default_rng(0)
lengths, slots = [int(n) for n in rng.geometric(1 / 60, 200)], 16


def static_steps(lengths, slots):
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


plan = schedule(lengths, slots)
continuous = max(start + n for (start, _), n in zip(plan, lengths))
static = static_steps(lengths, slots)
print(f"answers of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in total")
for name, steps in (("static", static), ("continuous", continuous)):
    print(f"{name:11} {steps:5} steps, slots {sum(lengths) / (steps * slots):.0%} utilized")
print(f"{static / continuous:.1f} times as many tokens per step")

# %% [markdown]
# **The improvement** is this factor. It comes from slots that no longer wait for their neighbours,
# and it was counted, not timed. The remaining idle steps are at the end, when no request is waiting
# any more.
#
# Now the chat: eight turns, each with 20 tokens from the user and an answer of 12, with and without
# 21.3. The engine counts the prompt tokens that it actually computed:

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
    print(f"reuse {reuse!s:5}  tokens computed per turn {computed}, total {sum(computed)}")
print("the same answers:", replies[False] == replies[True])

# %% [markdown]
# (From the second turn on it computes 21 tokens, not 20: the last token of an answer was returned
# but never went through the model, so its key is not in the cache yet.)
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
        print(f"{b} sequences: {5 * (time.perf_counter() - start):.3f} ms per step")
else:
    print("No GPU here, so nothing is timed.")

# %% [markdown]
# The table shows a model of 1.1 billion parameters, measured on a large GPU. Its weights are read
# once per step, for any number of sequences:

# %%
lesson.table(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=32 context=128/bf16",
    ],
    {"sequences": lambda r: r["shape"].split()[0][2:], "ms per step": "ms", "tokens/s": "value"},
)
alone, together = lesson.records.together(
    [
        "bench_decode/llama 1.1B/B=1 context=128/bf16",
        "bench_decode/llama 1.1B/B=32 context=128/bf16",
    ]
)
print(f"32 times the tokens for {together['ms'] / alone['ms']:.2f} times the time")

# %% [markdown]
# ## The library's kernel
#
# The first function is your 21.2; the others are the step around it that becomes a CUDA graph:
# model, sampling, advancing the counters. Python's share of a step is one launch and reading b
# token ids, which the last kernel writes to host memory. (An entry is idle here if its length is
# below 0: the engine passes the lengths as `rows_B`.)

# %%
from xtrain.kernels.decoding import sampling_kernels as _sampling_kernels
from xtrain.serving import text_stream
from xtrain.serving.engine import Engine
from xtrain.serving.runner import Runner
from xtrain.serving.scheduler import Scheduler

lesson.source(_sampling_kernels.make_advance_kernel)
lesson.source(Runner.decode)
lesson.source(Runner.decode_logits)
lesson.source(Runner.draw)

# %% [markdown]
# One step of the engine admits waiting requests, decodes, computes the next part of their prompts,
# and ends finished sequences. Steps are *in flight* when they were launched but their token ids have
# not arrived yet. On a GPU the engine launches the next step *before* it knows the tokens of the
# previous one. If one of those tokens turns out to be a stop token, one wasted token has been computed for
# that sequence and is discarded.

# %%
lesson.source(Engine._step)
lesson.source(Runner.arrived)
lesson.source(Scheduler._take_tokens)
lesson.source(Scheduler._end_if_finished)

# %% [markdown]
# The next function uses the idea of 21.3 for all requests at once. The cache consists of blocks of 64
# tokens, and a sequence has a table that lists its blocks ([lesson 24](24_paged_cache.ipynb)). Full
# blocks that hold the first tokens of the prompt are shared; a block that holds only some of the next
# ones is copied. (When the weights change, no cached keys can be reused.)

# %%
lesson.source(Scheduler._assign_blocks)

# %% [markdown]
# Your 21.4 is in the next two functions. They also handle a *stop string*, such as the start of the
# user's next turn, which may arrive in pieces too.

# %%
lesson.source(text_stream.TextStream._release)
lesson.source(text_stream.TextStream._could_become_a_stop)

# %% [markdown]
# ## What did not help
#
# *Sorting requests by length*, so that requests of similar length share a static batch. This would
# recover most of what static batching loses:

# %%
print("static, sorted by length:", static_steps(sorted(lengths), slots), "steps")
print("continuous, unsorted:    ", continuous, "steps")
guess = [n * factor for n, factor in zip(lengths, rng.lognormal(0, 1, 200))]
by_guess = [n for _, n in sorted(zip(guess, lengths))]
print("static, sorted by a guess:", static_steps(by_guess, slots), "steps")

# %% [markdown]
# But this requires the lengths in advance, and with a guess that is wrong by a factor of two or
# three most of the gain is lost. In addition, the longest requests wait longest.
#
# *A slot with room for the longest sequence*, as in the first sections: a short sequence wastes most of its row of the
# cache. [Lesson 24](24_paged_cache.ipynb) counts how much, and divides the cache into blocks.
#
# ## More exercises
#
# 1. Extend `schedule` with arrival times: request i does not exist before step `arrives[i]`. Are
#    slots still assigned first come, first served?
# 2. Two users talk to one engine with a single slot, alternately. What does `reuse_prefix` save for
#    them? And with two slots?
# 3. A stop string is "User:". The model generates "Use", then "ful". What may be shown after the
#    first piece, and what after the second?
#
# <details><summary>Solutions</summary>
#
# 1: `start = max(free_at[slot], arrives[i])`, with requests sorted by arrival. Yes: the request that
# arrived first is admitted first, though a slot may now be empty in between. 2: The same in both
# cases, as long as the cache has room: what a conversation has computed stays in its blocks after it
# has left its slot, and each user's next turn finds them. Without room, the blocks that were used
# least recently are overwritten first. 3: Nothing after "Use", because it could become the stop
# string; after "ful", all of "Useful".
#
# </details>
#
# ## Sources
#
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*,
#   2022: iteration-level scheduling.
# - W. Kwon et al., *Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*, 2023.
# - The Unicode Standard, chapter 3: which bytes are UTF-8, and where U+FFFD goes.
