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
# # 44 A server under load
#
# *About 60 minutes. You need [lesson 27](27_server.ipynb).*
#
# **The question.** A server answers one client in a second. Why does an answer take several times longer when only a
# few more people ask, and how many can it serve before that happens?
#
# You will measure what two threads of Python cost each other and what a short wait gains, and write the queue in front
# of the engine. Then requests arrive at random, in a simulation, in an engine, and in the records of a GPU.

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
# The server needs the packages of the extra `serve`, as in lesson 27. If the next cell fails, run `pip install -e '.[serve]'`.

# %%
if "google.colab" in sys.modules:
    packages = ["starlette", "uvicorn", "pydantic", "prometheus-client"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)

import asyncio
import json
import threading
import time

from xtrain.data.tokenizer import Tokenizer
from xtrain.server import engine_client, engine_loop
from xtrain.serving.requests import make_requests

# %% [markdown]
# ## Two threads
#
# As in lesson 27, an **event loop** serves all connections in one thread, and the **engine's thread** computes. What the
# model says does not matter here, so it stays as it was drawn, and its tokens are bytes.

# %%
tokenizer = Tokenizer.train(["tea"], 257)
shape = dict(dim=64, n_layers=2, n_heads=4, head_dim=16, hidden_dim=128, max_seq_len=256)
model = xtrain.Transformer(xtrain.ModelConfig(vocab_size=tokenizer.vocab_size, **shape), seed=0)
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()


def run(coroutine):
    """Run it in the event loop. -> its result"""
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)


# %% [markdown]
# ## Measure: when to ask for more
#
# Both the event loop and the engine's thread run Python, and only one thread at a time can hold
# Python's global interpreter lock (GIL). So what the loop does for a token is time that the engine's
# thread may lack. We measure it with the library's `EngineThread` and an engine that only pretends: a
# step sleeps for 2 ms, as Python does while a GPU computes, and gives each request the letter a. The
# loop asks for the next news when it has written the events of the last ones. Two policies:
#
# 1. *ask at once*, as soon as they are written;
# 2. *ask after a pause*, the library's in one process: the loop measures how long a round takes, and
#    asks when nine times as long has passed. Tokens of the same stream that arrive until then become one
#    piece.


# %% tags=["varies"]
class PretendEngine(xtrain.Engine):
    """Steps of a fixed time. A step with new requests takes `prefill` seconds, however many."""

    def __init__(self, prefill, decode):
        super().__init__(model, max_batch=4)
        self.prefill = prefill
        self.decode = decode
        self.prefills = 0

    def submit(self, *requests):
        self.scheduler.unfinished.update((id(r), r) for r in requests)

    def step(self):
        running = list(self.scheduler.unfinished.values())
        new = any(not r.completion for r in running)
        time.sleep(self.prefill if new else self.decode)
        self.scheduler.steps += 1
        self.prefills += new
        for r in running:
            r.completion.append(97)
            if len(r.completion) == r.max_new_tokens:
                r.completion.end("length")
                del self.scheduler.unfinished[id(r)]


def new_job(tokens):
    requests = make_requests([[1]], model.config, 256, (), 0, max_new_tokens=tokens)
    return engine_client.Job(requests, tokenizer)


async def events_of(job):
    """-> the number of events"""
    chunk = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "tea"}
    events = 0
    async for piece in job:
        chunk["choices"] = [{"index": 0, "delta": {"content": piece.text}, "finish_reason": None}]
        f"data: {json.dumps(chunk)}\n\n".encode()
        events += 1
    return events


async def stream(thread, job):
    thread.submit(job)
    return await events_of(job)


async def streams(thread, jobs):
    return await asyncio.gather(*(stream(thread, job) for job in jobs))


def started(pretend):
    """-> an engine's thread that runs"""
    thread = engine_client.EngineThread(pretend)
    loop.call_soon_threadsafe(thread.start)
    return thread


sys.setswitchinterval(5e-4)  # how long a thread may keep the GIL if another one wants it
rows = ["streams   policy              ms per step   events"]
steps = 60
ms = {}
for n in (8, 64, 256):
    for name, share in (
        ("ask at once", 1.0),
        ("ask after a pause", engine_client.LOOP_SHARE),
    ):
        pretend = PretendEngine(0.002, 0.002)
        thread = started(pretend)
        thread.share = share
        begin = time.perf_counter()
        counts = run(streams(thread, [new_job(steps) for _ in range(n)]))
        ms.setdefault(name, []).append(1e3 * (time.perf_counter() - begin) / pretend.steps)
        thread.stop()
        rows.append(f"{n:7}   {name:19} {ms[name][-1]:11.2f}   {sum(counts):6}")
print("\n".join(rows))

# %%
lesson.figures.curves(
    [8, 64, 256], {**ms, "the engine sleeps": [2, 2, 2]}, "streams", "ms per step", log=False
)

# %% [markdown]
# With few streams a round is short, and the policies differ little. With many, a pause makes fewer and longer
# pieces: compare the events. The reader of a stream sees several tokens at once, at most a tenth of a second
# later. Whether the engine's steps become shorter, too, depends on the machine: the table and the figure show
# this one's, with all that ran on it at the same time. With an event loop in another process, the two
# share no lock: the loop asks at once, and a slow loop only makes longer pieces. That is what
# `xtrain serve` does.
#
# ## Requests that arrive together
#
# A similar question at the other end. A step with a prefill takes long, and about equally long for one
# request as for ten. If ten arrive together, the first is ready while the worker threads still tokenize
# the others. An engine that starts at once computes a prefill for it alone, and the nine wait until it
# ends. The library's thread waits up to 10 ms for requests that are being tokenized, never for ones
# that have not arrived. Again both policies, with 16 requests at once and a prefill of 20 ms. Template and
# tokenizer are pauses here, of half a millisecond for the first request to 8 ms for the last:


# %% tags=["varies"]
async def arrive_together(thread, n):
    """-> milliseconds to the first token, for each of n requests"""
    begin = time.perf_counter()

    async def one(i):
        with thread.arrival():
            await asyncio.sleep(0.0005 * (i + 1))
            job = new_job(4)
            thread.submit(job)
        await events_of(job)
        return 1e3 * (job.first_token - begin)

    return await asyncio.gather(*(one(i) for i in range(n)))


rows = ["policy               prefills   ms to the first token: median, last"]
for name, seconds in (
    ("start at once", 0.0),
    ("wait up to 10 ms", engine_loop.ADMISSION_SECONDS),
):
    usual = engine_loop.ADMISSION_SECONDS
    engine_loop.ADMISSION_SECONDS = seconds
    prefills = []
    times = []
    for _ in range(10):
        pretend = PretendEngine(0.02, 0.005)
        thread = started(pretend)
        times.append(run(arrive_together(thread, 16)))
        prefills.append(pretend.prefills)
        thread.stop()
    engine_loop.ADMISSION_SECONDS = usual
    median = np.median(times)
    last = np.mean(np.max(times, 1))
    rows.append(f"{name:20} {np.mean(prefills):8.1f}   {median:6.1f}, {last:6.1f}")
print("\n".join(rows))

# %% [markdown]
# Without waiting there are two prefills, and the requests that missed the first wait for both.
#
# And if requests come one by one, at random? Each would cost a step with a prefill, and every stream that
# is running waits for it. `Engine(prefill_interval=k)` admits new requests at most every k steps while
# others decode. A simulation with a decode step of 5 ms, 25 ms more for a prefill of any size, and
# answers of 200 tokens, 60 requests per second:


# %%
def at_intervals(interval, rate=60, tokens=200, n=600):
    """-> steps with a prefill, median ms to the first token, median s of a whole answer"""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, n)).tolist()
    now = 0.0
    step = 0
    prefills = 0
    last = -interval  # the last step with a prefill
    waiting = []
    left = {}  # tokens that a running request, named by its arrival, still needs
    first = []
    whole = []
    while len(whole) < n:
        while arrivals and arrivals[0] <= now:
            waiting.append(arrivals.pop(0))
        if not waiting and not left:
            now = arrivals[0]
            continue
        admitted = waiting if not left or step - last >= interval else []
        now += 0.005 + 0.025 * bool(admitted)
        step += 1
        for arrival in list(left):
            left[arrival] -= 1
            if not left[arrival]:
                whole.append(now - arrival)
                del left[arrival]
        if admitted:
            first += [now - arrival for arrival in admitted]
            left |= dict.fromkeys(admitted, tokens - 1)
            waiting = []
            last = step
            prefills += 1
    return prefills, 1e3 * np.median(first), np.median(whole)


print("interval   prefills   first token, ms   whole answer, s")
for interval in (1, 2, 4, 8, 16, 32):
    prefills, first, whole = at_intervals(interval)
    print(f"{interval:8} {prefills:10} {first:17.0f} {whole:17.2f}")

# %% [markdown]
# A short wait costs the first token little, and all the others come sooner. The default is 8 on a GPU; on
# a CPU a prefill takes as long as its tokens, there is nothing to share, and the default is 1.
#
# ## Queueing
#
# Now the question of the beginning: why does an answer take so much longer when only a few more people
# ask? Let requests arrive at random, $\lambda$ per second, and let each occupy one of $c$ slots for $s$
# seconds on average. Then at most $\mu = c / s$ requests per second can be served, and the **load** is
# $\rho = \lambda / \mu$. Below 1 the queue does not grow without limit. But it is not empty either: requests
# come in clusters, and time in which a slot was idle cannot be used later.
#
# By hand, for one slot and four requests of 2 seconds each, a load of 80 %. Arrivals at 0, 2.5, 5 and
# 7.5 s: no request waits. Arrivals at 0, 0.5, 1 and 7.5 s, as many in the same time: they start at 0, 2, 4
# and 7.5 s, so two requests wait, 1.5 and 3 seconds.
#
# ## Exercise 44.1: when does each request start?


# %% tags=["exercise"]
def start_times(arrivals, seconds, slots):
    """-> list with the time at which each request starts, in order

    arrivals: seconds, ascending.  seconds: how long each request occupies its slot.  slots: at
    least 1. First come, first served: a request starts when it has arrived and a slot is free.
    """
    # YOUR CODE


# %%
lesson.check("44.1", start_times)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Like 21.1: keep `free_at = [0.0] * slots`, the time from which each slot is free. What is new: a slot
# may be free before the request arrives.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `start = max(arrival, min(free_at))`. And from when is the slot free then?
#
# </details>


# %% tags=["solution"]
# Solution 44.1
def start_times_solution(arrivals, seconds, slots):
    """-> list with the time at which each request starts, in order

    arrivals: seconds, ascending.  seconds: how long each request occupies its slot.  slots: at
    least 1. First come, first served: a request starts when it has arrived and a slot is free.
    """
    free_at = [0.0] * slots
    starts = []
    for arrival, n in zip(arrivals, seconds):
        slot = free_at.index(min(free_at))
        starts.append(max(arrival, free_at[slot]))
        free_at[slot] = starts[-1] + n
    return starts


start_times = lesson.yours(start_times, start_times_solution)


# %% [markdown]
# Random arrivals with a constant rate are a **Poisson process**: the times between them are independent
# and have an exponential distribution. If the service times are exponential too and there is one slot,
# the mean waiting time is known: $s \rho / (1 - \rho)$. First the check against this formula, then 16
# slots with answers of 1 s on average. A **percentile** p99 is the time that 99 % of the requests do not
# exceed.

# %%
rng = np.random.default_rng(0)


def simulated(load, slots, n=200_000):
    """-> waiting times, total times of n requests with a mean service time of 1 s"""
    arrivals = np.cumsum(rng.exponential(1 / (load * slots), n))
    seconds = rng.exponential(1.0, n)
    waits = np.array(start_times(arrivals.tolist(), seconds.tolist(), slots)) - arrivals
    return waits, waits + seconds


for load in (0.5, 0.8):
    print(
        f"one slot, load {load}: mean wait {simulated(load, 1)[0].mean():.1f} s, formula "
        f"{load / (1 - load):.1f} s"
    )
loads = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
percentiles = {"p50": [], "p90": [], "p99": []}
print("16 slots:   load   waiting mean    p50   p99   whole p50   p99")
for load in loads:
    waits, whole = simulated(load, 16)
    for q, row in zip((50, 90, 99), percentiles.values()):
        row.append(np.percentile(whole, q))
    w = np.percentile(waits, [50, 99])
    t = np.percentile(whole, [50, 99])
    print(f"{load:16.2f} {waits.mean():14.2f} {w[0]:6.2f} {w[1]:5.2f} {t[0]:11.2f} {t[1]:5.2f}")
lesson.figures.curves(
    loads, percentiles, "load", "seconds until the answer is complete",
    "16 slots, answers of 1 s on average", log=False,
)  # fmt: skip

# %% [markdown]
# Up to a load of 80 % most requests do not wait at all. Above 90 % the waiting time grows like
# $1 / (1 - \rho)$, and its tail first: a server is sized by the latency that its 99th percentile may
# have, not by its throughput.
#
# **The improvement** over one slot is in the same table: at a load of 80 % the mean wait is 0.10 s with 16 slots, and
# 3.9 s with one. Slots that share one queue are better than one queue for
# each: no slot is idle while a request waits in another queue.
#
# ## An engine under Poisson load
#
# Now the steps are not simulated: the tiny model, an engine with four slots, and the event loop. First 80 requests at
# once; the rate at which they are answered is the engine's $\mu$. Then 80 at random, at three loads:


# %% tags=["varies"]
async def poisson(thread, rate, n=80):
    """-> (n, 2) milliseconds to the first token and to the end.

    rate: per second; None: all at once
    """
    gaps = np.zeros(n) if rate is None else np.random.default_rng(1).exponential(1 / rate, n)

    async def one(at):
        await asyncio.sleep(at)
        begin = time.perf_counter()
        job = new_job(24)
        thread.submit(job)
        await events_of(job)
        return [1e3 * (at - begin) for at in (job.first_token, time.perf_counter())]

    return np.array(await asyncio.gather(*(one(at) for at in np.cumsum(gaps))))


thread = started(xtrain.Engine(model, max_batch=4, max_seq_len=256))
run(poisson(thread, None, 8))
begin = time.perf_counter()
run(poisson(thread, None))
rate = 80 / (time.perf_counter() - begin)
rows = [
    f"all at once: {rate:.0f} answers/s",
    "load   first token ms p50    p99   whole ms p50    p99",
]
for load in (0.3, 0.6, 0.9):
    (f50, w50), (f99, w99) = np.percentile(run(poisson(thread, load * rate)), [50, 99], axis=0)
    rows.append(f"{load:4.1f} {f50:20.0f} {f99:6.0f} {w50:14.0f} {w99:6.0f}")
thread.stop()
print("\n".join(rows))

# %% [markdown]
# Compare with the simulation: there a slot's speed did not depend on the others. Here a decode step
# takes a little longer with four sequences than with one, and every prefill delays the streams that are
# running. (These are this machine's times, with all that ran on it at the same time.)
#
# The same measurement of a server with a GPU: *closed* are 256 clients that each send the next request
# when the last one has ended; *poisson* are requests at random times, so many per second as its name
# says. Times are until the first text and until the end.

# %%
lesson.table(
    ["bench_server/closed/bf16", "bench_server/poisson*/bf16"],
    {
        "tokens/s": "value", "engine alone": "peer_value",
        "first p50 ms": lambda r: r["first_ms"][0],
        "first p99 ms": lambda r: r["first_ms"][1], "whole p50 ms": lambda r: r["last_ms"][0],
        "whole p99 ms": lambda r: r["last_ms"][1],
    },
)  # fmt: skip
names = ("bench_server/closed/bf16", "bench_server/poisson*/bf16")
closed, at_random = map(lesson.record, names)
print(f"the server reaches {closed['ratio']:.0%} of the tokens/s of the engine alone")
arriving = float(at_random["name"].removeprefix("poisson ").removesuffix("/s"))
seconds = at_random["last_ms"][0] / 1e3
print(f"poisson: {arriving} requests/s x {seconds:.2f} s = {arriving * seconds:.0f} in the server")

# %% [markdown]
# A small model with many streams is the hardest case for the stages around it: a step is short, and then
# 256 streams want their tokens.
#
# The last line is **Little's law**: the mean number of requests in a system is the arrival rate times the
# mean time that each of them spends there (here roughly, with the median). Compare it with the 256 slots
# of the shape: 154 requests are fewer, so at this rate none waits long for a slot, and the first text
# comes soon. At a rate that brings more than 256 into the server, the others wait in the queue. The
# closed loop cannot show this: it always has 256. Its answers all have the same length, so many end
# together, and one prefill serves all of the next requests. Random arrivals need a prefill in many
# more steps. So the rate that a closed loop reaches is not the rate that a server can take at random times:
# measure with the arrivals that you expect.
#
# ## The library's kernel
#
# This lesson has no kernel: it is about what happens around them. Rounds of the event loop, and the pause after them,
# which is `1 / share - 1` times as long:

# %%
lesson.source(engine_client.EngineClient._round)
lesson.source(engine_client.EngineClient._after_round)

# %% [markdown]
# ## What did not help
#
# *An event for each token, at any load.* With one stream this is best. You have measured it with 256: a step that
# sleeps for 2 ms takes longer than that, because the engine's thread waits for the GIL.
#
# *Starting at once.* The request that is alone in its prefill gains a few milliseconds, the ones that
# arrived with it lose a whole step.
#
# ## More exercises
#
# 1. Two servers with 8 slots each and a queue of their own, or one with 16? Give every second request to
#    each of the two and compare p99 at a load of 0.9.
# 2. Draw service times that are all 1 s. How much shorter is the mean wait with one slot?
# 3. The queue has a limit (`Limits.queue`), and a request above it gets status 429. Why is that better
#    than a longer queue?
#
# <details><summary>Solutions</summary>
#
# 1: `start_times(arrivals[::2], seconds[::2], 8)`: p99 is clearly higher with two queues, because one
# may be long while the other is empty. 2: About half as long: with one slot and constant service times
# the mean wait is $s \rho / (2 (1 - \rho))$. 3: Above a load of 1 any queue fills, and a longer one
# only makes all requests wait longer. A client that is told so at once can try another server.
#
# </details>
#
# ## Sources
#
# - J. D. C. Little, *A Proof for the Queuing Formula: L = λW*, Operations Research 9, 1961.
# - L. Kleinrock, *Queueing Systems*, volume 1, 1975: the waiting times of one and of several servers.
