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
# # 27 What lies between a request and a kernel
#
# *About 75 minutes. You need [lesson 20](20_sampling.ipynb) and [lesson 21](21_engine.ipynb).*
#
# **The question.** A client sends a few hundred bytes. Some milliseconds later a kernel runs for
# them, and words come back one by one. Which stages lie in between, in which thread, and what does
# each of them cost? (What happens when many people ask at a time is [lesson 44](44_load.ipynb).)
#
# You will follow one request with a clock, and write the function that finds a stop string in a text that arrives in
# pieces, and the client's side of server-sent events.

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
# The server needs the packages of the extra `serve`: Starlette (routes), uvicorn (HTTP), pydantic
# (validation) and prometheus-client. If the next cell fails, run `pip install -e '.[serve]'`.

# %%
if "google.colab" in sys.modules:
    packages = ["starlette", "uvicorn", "pydantic", "prometheus-client"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)

import asyncio
import contextlib
import json
import socket
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import uvicorn

from xtrain.data.tokenizer import Tokenizer
from xtrain.server import app as app_module
from xtrain.server import engine_client, engine_loop, prepare
from xtrain.server.api import ChatRequest
from xtrain.serving import pretrained

# %% [markdown]
# ## A model that knows one answer
#
# We need a model that says something. A small one learns a single conversation by heart, in the form
# that its chat template gives it: each message between `<role>` and `</>`. (The template is the one of
# lesson 21.) The tokenizer has the 256 bytes and a few frequent pairs.

# %%
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION, ANSWER = "What does tea cost?", "Tea costs 3 €, or 2 € with a 🙂."
conversation = f"<user>{QUESTION}</><assistant>{ANSWER}</>"

tokenizer = Tokenizer.train(["the tea costs what it costs, as the user said to the assistant"], 270)
shape = dict(dim=64, n_layers=2, n_heads=4, head_dim=16, hidden_dim=128, max_seq_len=256)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=tokenizer.vocab_size, **shape), seed=0)
ids = np.array([tokenizer.encode(conversation)])
optimizer = xtrain.AdamW(model, lr=3e-3, weight_decay=0.0)
for _ in range(80):
    model.zero_grad()
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}: it knows its text by heart")

folder = Path(tempfile.mkdtemp())
model.save_pretrained(folder, tokenizer)
(folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
loaded = pretrained.load(folder, "cpu")
engine = xtrain.Engine(loaded.model, max_batch=4, max_seq_len=256, batch_invariant=True)
app = app_module.create_app(engine, loaded, name="tea")

# %% [markdown]
# A server has three kinds of threads. **The event loop** is one thread that serves all connections: it
# never waits for one of them, but switches to another. A few **worker threads** do what takes long and
# needs no engine: templates, tokenizing. **The engine's thread** owns the engine: no other one calls
# `engine.step`. (`xtrain serve` puts the event loop into a process of its own; the messages between the
# two sides are the same.) Here the notebook is the client, so the loop gets a thread, too. uvicorn reads
# and writes HTTP, on a free port of this machine that other machines cannot reach:

# %%
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()


def run(coroutine):
    """Run it in the event loop. -> its result"""
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)


http_server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
serving = asyncio.run_coroutine_threadsafe(http_server.serve(), loop)
while not http_server.started:
    time.sleep(0.01)
port = http_server.servers[0].sockets[0].getsockname()[1]
print("threads:", sorted({"event loop", "engine"} & {t.name for t in threading.enumerate()}))

# %% [markdown]
# ## The bytes of a request
#
# HTTP/1.1 is text: a line with method and path, headers, an empty line, then as many bytes as
# `Content-Length` says. With `"stream": true` the answer comes in pieces. This is all that a client
# library does:

# %%
message = {"role": "user", "content": QUESTION}
body = {
    "model": "tea", "messages": [message], "temperature": 0, "max_tokens": 60, "stop": ["</>"],
    "stream": True,
}  # fmt: skip


def http_bytes(body):
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        "Host: 127.0.0.1\r\n"
        "Connection: close\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n"
        "\r\n"
    )
    return head.encode() + content


print(http_bytes(body).decode())


# %% [markdown]
# And this comes back. (Ids, dates and times on this page differ from run to run.)


# %% tags=["varies"]
def over_a_socket(data):
    reply = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        while piece := connection.recv(4096):
            reply += piece
    return reply


reply = over_a_socket(http_bytes(body))
lines = reply.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
short = [line if len(line) < 100 else f"{line[:48]} ... {line[-48:]}" for line in lines]
print("\n".join(short[:24]))

# %% [markdown]
# After the headers follows the body in **chunks**: its length is not known yet, so each chunk begins with
# a length of its own, in hexadecimal (`Transfer-Encoding: chunked`). The chunks hold **server-sent
# events**: a line `data: ` with JSON, and an empty line. Each event has a part of the answer, `delta`.
# You will read them in 27.2. Now to the stages in between.
#
# ## Validation, template, tokenizer
#
# The bytes of a body come from strangers. pydantic turns them into a `ChatRequest`, or says what is
# wrong. To look at answers without reading HTTP each time, the following client calls the application
# directly, as uvicorn does: an **ASGI** application is a function of a dict about the request, a
# function `receive` that gives it messages (the body, later "the client is gone"), and a function
# `send` that takes messages (status, then bytes).


# %%
async def ask(body, leave_after=None):
    """-> (status, [(time, bytes), ...])   leave_after: disconnect after this many pieces"""
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    gone, status, pieces = asyncio.Event(), [], []
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive():
        for message in messages:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            status.append(message["status"])
        elif message.get("body"):
            pieces.append((time.perf_counter(), message["body"]))
            if leave_after is not None and len(pieces) >= leave_after:
                gone.set()

    await app(scope, receive, send)
    return status[0], pieces


wrong = [
    {"temperature": 3}, {"messages": []}, {"messages": [{"role": "cook", "content": "Tea!"}]},
    {"modalities": ["text", "audio"]}, {"model": "coffee"},
    {"messages": [message | {"content": "tea " * 99}]},
]  # fmt: skip
for change in wrong:
    status, pieces = run(ask(body | {"stream": False} | change))
    error = json.loads(pieces[0][1])["error"]
    print(status, textwrap.shorten(error["message"], 100, placeholder=" ..."))

# %% [markdown]
# Each refusal has a sentence and costs no step of the engine. What passes is rendered by the model's
# chat template. A template is a program that comes with the model's files, so it runs in a process of
# its own, with limits. The tokenizer makes ids of the text:

# %%
request = ChatRequest.model_validate(body)
text = loaded.template.render([m.plain() for m in request.messages])
prompt = loaded.tokenizer.encode(text)
print(text)
print(prompt)

# %% [markdown]
# ## Measure: from the queue to a token, with timestamps
#
# The next cell puts a clock around thirteen functions of the library and follows one request. `submit`
# puts it into a **queue**, the only way to the engine's side. Its loop takes everything that waits
# there, then runs `engine.step()`: **admission** gives a sequence a slot and blocks of the cache,
# **prefill** computes its prompt, **decode** one token for each active sequence. After each step it
# sends the new ids, if the event loop has asked for more. A **round** of the event loop wakes the
# requests that have news, which turn ids into text and write events.


# %% tags=["varies"]
@contextlib.contextmanager
def watched(functions):
    """functions: {label: (object, name)}  -> a list that collects (begin, end, thread, label)"""
    notes = []

    def watch(label, inner):
        def call(*arguments, **options):
            begin = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                thread = threading.current_thread().name
                thread = thread if thread in ("engine", "event loop") else "worker"
                notes.append((begin, time.perf_counter(), thread, label))

        return call

    before = {label: getattr(thing, name) for label, (thing, name) in functions.items()}
    for label, (thing, name) in functions.items():
        setattr(thing, name, watch(label, before[label]))
    try:
        yield notes
    finally:
        for label, (thing, name) in functions.items():
            setattr(thing, name, before[label])


def until_idle():
    while engine.busy:
        time.sleep(0.01)


server = app.state.server
stages = {
    "validation": (ChatRequest, "model_validate_json"),
    "chat template": (loaded.template, "render"),
    "tokenizer": (loaded.tokenizer, "encode"),
    "options, limits": (prepare, "make_requests"),
    "into the queue": (server.engine, "submit"),
    "admission": (engine.scheduler, "_admit"),
    "prefill": (engine.runner, "_launch_prefill"),
    "decode": (engine.runner, "launch_decoding"),
    "sampling": (engine.runner, "sample"),
    "news": (engine_loop.EngineLoop, "_report"),
    "wake the requests": (server.engine, "_round"),
    "ids to text": (engine_client.Job, "_add"),
    "an event": (app_module, "_event"),
}
run(ask(body))  # once before, so that nothing is done for the first time
until_idle()
engine.forget_prefixes()
with watched(stages) as notes:
    start = time.perf_counter()
    status, pieces = run(ask(body))
notes += [(t, t, "event loop", "bytes to the socket") for t, _ in pieces]
notes = sorted((1e3 * (a - start), 1e3 * (b - a), *rest) for a, b, *rest in notes)
idle = ("admission", "prefill", "news")  # called in each step, also without anything to do
notes = [note for note in notes if note[3] not in idle or note[1] > 0.01]
rows = [f"{'ms':>7}  {'took':>6}  {'thread':10}  stage"]
rows += [f"{at:7.2f}  {took:6.2f}  {thread:10}  {label}" for at, took, thread, label in notes]
print("\n".join(rows[:26] + ["  ..."] + rows[-6:]))

# %% [markdown]
# One stage contains others: sampling is a part of prefill and of decode. The same as a picture, one row
# for each stage; the colour is the thread. (Short bars are drawn wider than they
# are.)

# %%
threads, spans = ["event loop", "worker", "engine"], {}
shortest = max(at for at, *_ in notes) / 150
for label in (*stages, "bytes to the socket"):
    spans[label] = [
        (at, at + max(took, shortest), " " * threads.index(thread))
        for at, took, thread, name in notes
        if name == label
    ]
lesson.figures.timeline(
    spans,
    "one request. Green: event loop, orange: a worker thread, blue: the engine's thread",
    "ms",
)

# %% [markdown]
# Some steps are followed by no event. `€` is three tokens here, and nothing can be shown before the third;
# the tokens of `</>` are held back; and what becomes ready while the event loop pauses goes into the next
# event. The next sections explain all three.
#
# On a CPU the model takes most of the time. On a GPU a decode step of a small model takes a few
# milliseconds, and it runs while Python does something else: then the other stages are what counts.
#
# ## Ids back to text: whole characters, stop strings
#
# Two things make text of ids harder than a table. A token may end inside a character (lesson 21). And
# the model does not stop at `</>` by itself; the client gave it as a **stop string**:

# %%
answer = tokenizer.encode(ANSWER + "</>")
print([tokenizer.token_bytes[i] for i in answer[-16:]])

# %% [markdown]
# Neither `€`, `🙂` nor `</>` is one token here, and in real vocabularies `</>` is not either. When `<` has
# arrived, it may be the start of `</>` or the answer `a < b`. It must not be shown before that is
# decided, because what was sent cannot be taken back. On the other hand, text that is held back for no
# reason makes the stream stutter.
#
# ## Exercise 27.1: stop strings in pieces


# %% tags=["exercise"]
def next_text(held, new, stops):
    """-> shown, held, stopped

    held: text that was held back before, new: the text that arrives now, both may be empty.
    stops: list of stop strings, none of them empty; there may be none.
    shown: the text that is certain now, held: the text that may be the start of a stop string, as
    little as possible.  stopped: True if a stop string is complete. Then shown ends before it, and
    held is "": the text ends at the stop string that begins first.
    """
    # YOUR CODE


# %%
lesson.check("27.1", next_text)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Work with `text = held + new`. First look for complete stop strings: the smallest `text.find(s)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# For n from len(text) down to 1: is `text[-n:]` the start of a stop string? The first such n is what
# must be held back.
#
# </details>


# %% tags=["solution"]
# Solution 27.1
def next_text_solution(held, new, stops):
    """-> shown, held, stopped

    held: text that was held back before, new: the text that arrives now, both may be empty.
    stops: list of stop strings, none of them empty; there may be none.
    shown: the text that is certain now, held: the text that may be the start of a stop string, as
    little as possible.  stopped: True if a stop string is complete. Then shown ends before it, and
    held is "": the text ends at the stop string that begins first.
    """
    text = held + new
    found = [text.find(s) for s in stops if s in text]
    if found:
        return text[: min(found)], "", True
    for n in range(len(text), 0, -1):
        if any(s.startswith(text[-n:]) for s in stops):
            return text[:-n], text[-n:], False
    return text, "", False


next_text = lesson.yours(next_text, next_text_solution)


# %%
held, stopped = "", False
for piece in ("a ", "<", " b", "<", "/b", "</", ">", "never shown"):
    if not stopped:
        shown, held, stopped = next_text(held, piece, ["</>"])
        print(f"{piece!r:7} shown {shown!r:7} held {held!r:5} stopped {stopped}")

# %% [markdown]
# ## Server-sent events: the client's side
#
# The network has no notion of events. It delivers bytes in arbitrary pieces: half an event, three
# events, half of a `€`. So the client collects bytes, takes the complete events and keeps the rest.
#
# ```text
# data: {"choices":[{"delta":{"content":"Tea"}}]}      an event: a line "data: " + payload,
#                                                      and an empty line, which ends it
# : ping                                               a comment: a line that begins with a colon,
#                                                      some proxies send it to keep a connection open
# data: [DONE]                                         the last event of OpenAI's streams
#
# ```
#
# ## Exercise 27.2: complete events


# %% tags=["exercise"]
def complete_events(data):
    """-> payloads, rest

    data: bytes received and not used yet. Every line ends with a newline byte, an event with an
    empty line
    (two newlines); an event has at most one line that begins with "data: ".
    payloads: list of str, what follows "data: " in each complete event that has such a line.
    rest: bytes, what follows the last complete event.
    """
    # YOUR CODE


# %%
lesson.check("27.2", complete_events)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `data.split(b"\n\n")`: what is its last element?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The bytes of a complete event are whole characters. The rest may end inside one.
#
# </details>


# %% tags=["solution"]
# Solution 27.2
def complete_events_solution(data):
    """-> payloads, rest

    data: bytes received and not used yet. Every line ends with a newline byte, an event with an
    empty line
    (two newlines); an event has at most one line that begins with "data: ".
    payloads: list of str, what follows "data: " in each complete event that has such a line.
    rest: bytes, what follows the last complete event.
    """
    *events, rest = data.split(b"\n\n")
    lines = [line for event in events for line in event.split(b"\n")]
    return [line[6:].decode() for line in lines if line.startswith(b"data: ")], rest


complete_events = lesson.yours(complete_events, complete_events_solution)


# %% [markdown]
# Your function reads the answer of the server, in pieces of seven bytes:

# %%
stream, rest, payloads = b"".join(piece for _, piece in pieces), b"", []
for i in range(0, len(stream), 7):
    found, rest = complete_events(rest + stream[i : i + 7])
    payloads += found
events = [json.loads(payload) for payload in payloads[:-1]]
print("".join(e["choices"][0]["delta"].get("content", "") for e in events))
print("last:", payloads[-1], "  finish_reason:", events[-1]["choices"][0]["finish_reason"])

# %% [markdown]
# ## Steps that requests share, and a seed
#
# Six clients ask at the same time, and the engine has four slots. Each draws with temperature 2 and its
# own seed. The picture shows the engine's own trace: which requests were in which step. The fifth and
# the sixth wait for a slot.


# %%
async def together(bodies):
    return await asyncio.gather(*(ask(body) for body in bodies))


def text_of(pieces):
    payloads, _ = complete_events(b"".join(piece for _, piece in pieces))
    choices = [json.loads(p)["choices"][0] for p in payloads[:-1]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


hot = [body | {"temperature": 2, "seed": seed, "max_tokens": 8 + 3 * seed} for seed in range(6)]
for seed, b in enumerate(hot):
    b["messages"] = [{"role": "user", "content": f"Question {seed}?"}]
last = engine.trace[-1].number
busy = run(together(hot))
spans = {}
for step in engine.trace:
    if step.number > last:
        at = step.number - last
        for name, _ in step.admitted:
            spans.setdefault(f"request {len(spans)}", (name, []))
        for name, row in spans.values():
            if name in [n for n, _ in step.admitted]:
                row.append((at, at + 1, "p"))
            elif name in step.decoded:
                row.append((at, at + 1, "d"))
lesson.figures.timeline(
    {label: row for label, (_, row) in spans.items()},
    "p: prefill, d: decode; a column is one step", "step",
)  # fmt: skip

# %% [markdown]
# Lesson 20's random numbers depend on the seed of the request, and on how many tokens it has drawn, and
# on nothing else. So an answer must not depend on who else was there:

# %%
alone = [run(ask(b)) for b in hot]
print("same text as alone:", [text_of(x[1]) == text_of(y[1]) for x, y in zip(busy, alone)])
print("texts that differ: ", len({text_of(pieces) for _, pieces in alone}))

# %% [markdown]
# (The engine was made with `batch_invariant=True`. Without it the last bits of a matrix product depend
# on its number of rows, and sometimes that decides between two nearly tied tokens.)
#
# ## A client that leaves
#
# A browser tab is closed before the answer is complete. ASGI reports it as a message that `receive`
# returns. The response then ends, and its `finally` closes the job: the engine's side is told, gives the
# completion the reason "cancelled", and the next step frees slot and blocks. The event loop does not
# wait for that.

# %%
until_idle()
before = engine.decoded_tokens
run(ask(body | {"stop": None, "max_tokens": 200, "temperature": 2, "seed": 1}, leave_after=3))
until_idle()
print("computed far less than 200 tokens:", engine.decoded_tokens - before < 100)
print(
    "free slots:",
    sorted(engine.scheduler.free_slots),
    " sequences that wait:",
    len(engine.scheduler.waiting),
)

# %% [markdown]
# ## The library's kernel, and the way to it
#
# The engine's side, from a message to the step and to the news:

# %%
lesson.source(engine_loop.EngineLoop.run)
lesson.source(engine_loop.EngineLoop._listen)
lesson.source(engine_loop.EngineLoop._report)

# %% [markdown]
# Your 27.1, and what writes the events of your 27.2:

# %%
from xtrain.serving.text_stream import TextStream

lesson.source(TextStream._release)
lesson.source(TextStream._could_become_a_stop)
lesson.source(app_module._events)

# %% [markdown]
# And at the end of the way a kernel draws the next token of each sequence. The random number that decides
# is made on the device, from three numbers of the request: seed, random stream and step.

# %%
from xtrain.kernels.decoding import sampling_kernels

lesson.source(sampling_kernels.random_fraction)

# %%
http_server.should_exit = True
serving.result(20)
print("the engine's thread has ended:", not server.engine.alive)

# %% [markdown]
# ## What did not help
#
# *Calling `engine.step()` in the event loop.* No second thread, no lock. But then no byte is read or
# written during a step, and a disconnect is seen only after it.
#
# *Looking for a stop string among the ids.* A string may begin in the middle of one token and end in another, and the same
# letters may come as other tokens. The text decides.
#
# ## More exercises
#
# 1. A request has the stop strings `a` and `ab`. Which of them is never found, and does that matter?
# 2. An event of one letter takes about 200 bytes, as the chunks above show. How many bytes per second are 256 streams of
#    50 tokens per second?
#
# <details><summary>Solutions</summary>
#
# 1: `ab`: where it begins, `a` begins too and is complete earlier. It does not matter, since the text ends before the stop
# string in both cases. 2: 256 x 50 x 200 = 2.6 MB per second, for 12,800 letters. Several tokens in one event cost less.
#
# </details>
#
# ## Sources
#
# - WHATWG, *HTML Standard*, section "Server-sent events": the format, and how a client reads it.
# - R. Fielding et al., *HTTP/1.1*, RFC 9112, 2022: messages, chunked transfer coding.
# - *ASGI specification*, version 3: what a server and an application say to each other.
# - L. Kleinrock, *Queueing Systems, Volume 1: Theory*, 1975: the waiting time of one server.
# - G.-I. Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, 2022.
