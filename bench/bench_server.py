"""What the HTTP layer costs: a server under load, next to the engine alone.

    python bench/bench_server.py [--streams 256] [--requests 512] [--emulate]

closed     --streams clients, each sends its next streamed completion when the last one has ended;
           all answers have --tokens tokens. value: output tokens a second; peer: the engine alone
           with the same requests and slots, all submitted at once
mixed      the same with answers of half to one and a half times --tokens, so that they do not end
           together
poisson    requests arrive at random, at --load of the rate that the engine alone reaches in
           `closed`; peer: the engine alone with requests that arrive at random at the same rate,
           and first_alone_ms, its times to the first token
first_ms, last_ms: median and 99th percentile of the time to the first byte of text, and of the
whole answer. tokens_per_event: of the streams, in the mean.

Prompts of 128 random tokens, answers of 256 (greedy, no stop tokens), Qwen3-0.6B's shape with
random weights in bf16. The engine is in this process, the HTTP side in another one, as in `xtrain
serve`; the clients are further processes, over HTTP/1.1 on 127.0.0.1. --emulate: the same without a
GPU, on an engine whose steps only take as long (emulated_engine.py), for a look. It needs four idle
cores. Nothing is recorded.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tyro
from _shapes import QWEN3_06B

import xtrain
from xtrain.formats.texts import Texts
from xtrain.server.app import Limits
from xtrain.server.listen import Address, HttpProcess, bound, serve_engine
from xtrain.serving.options import PREFILL_INTERVAL
from xtrain.serving.requests import make_requests


@dataclass
class Options:
    streams: int = 256
    requests: int = 512
    tokens: int = 256  # of an answer
    prompt: int = 128
    load: float = 0.5
    emulate: bool = False
    clients: int = 4  # processes


def make_engine(o: Options) -> xtrain.Engine:
    sizes = (o.streams, o.prompt + 3 * o.tokens // 2 + 1)
    if o.emulate:
        from emulated_engine import EmulatedEngine

        return EmulatedEngine(*sizes, reuse_prefix=False, prefill_interval=PREFILL_INTERVAL["gpu"])
    config = xtrain.ModelConfig(**QWEN3_06B, max_seq_len=2048)
    model = xtrain.Transformer(config, 0, "gpu", "bf16", trainable=False)
    return xtrain.Engine(model, *sizes, reuse_prefix=False, warm_up=True)


def arrival_times(n: int, rate: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(1 / rate, n).cumsum()


# ----------------------------------------------------------------------------- clients
class Ask(asyncio.Protocol):
    """One streamed completion.

    done: -> seconds to the first text, seconds in all, tokens, pieces of the stream
    """

    def __init__(self, body: bytes):
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.start = time.perf_counter()
        self.first = 0.0
        self.last = b""
        self.pieces = 0
        self.done: asyncio.Future = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if b'"text":"' in data:
            self.first = self.first or time.perf_counter() - self.start
            self.pieces += 1
        self.last = data if len(data) > 1000 else self.last[-1000:] + data

    def connection_lost(self, error: Exception | None) -> None:
        found = self.last.rsplit(b'"completion_tokens":', 1)[-1].split(b",", 1)[0]
        tokens = int(found) if found.isdigit() else 0
        self.done.set_result((self.first, time.perf_counter() - self.start, tokens, self.pieces))


async def ask(port: int, body: bytes) -> tuple[float, float, int, int]:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(lambda: Ask(body), "127.0.0.1", port)
    return await protocol.done


async def closed(port: int, bodies: list[bytes], streams: int) -> list[tuple]:
    waiting = list(reversed(bodies))
    found = []

    async def stream():
        while waiting:
            found.append(await ask(port, waiting.pop()))

    await asyncio.gather(*(stream() for _ in range(streams)))
    return found


async def arriving(port: int, bodies: list[bytes], rate: float, seed: int) -> list[tuple]:

    async def later(seconds, body):
        await asyncio.sleep(seconds)
        return await ask(port, body)

    return await asyncio.gather(*map(later, arrival_times(len(bodies), rate, seed), bodies))


def client(port, bodies, streams, rate, seed, ready, results) -> None:
    ready.wait()
    if rate:
        work = arriving(port, bodies, rate, seed)
    else:
        work = closed(port, bodies, streams)
    try:
        results.put(asyncio.run(work))
    except Exception as error:
        results.put(repr(error))


def load(o: Options, port: int, bodies: list[bytes], rate: float = 0.0) -> tuple[float, np.ndarray]:
    """Return seconds from the first request to the end of the last, (requests, 4) as from `ask`"""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ready = context.Barrier(o.clients + 1)
    shares = [bodies[i :: o.clients] for i in range(o.clients)]
    jobs = [
        context.Process(
            target=client,
            args=(port, share, o.streams // o.clients, rate / o.clients, i, ready, results),
        )
        for i, share in enumerate(shares)
    ]
    for job in jobs:
        job.start()
    ready.wait()  # all have imported what they need
    start = time.perf_counter()
    shares = [results.get() for _ in jobs]
    if wrong := [x for x in shares if isinstance(x, str)]:
        raise RuntimeError(f"a client failed: {wrong[0]}")
    found = [row for share in shares for row in share]
    seconds = time.perf_counter() - start
    for job in jobs:
        job.join()
    return seconds, np.array(found)


# ----------------------------------------------------------------------------- the engine alone
def alone(engine: xtrain.Engine, texts: list[list[int]], lengths: list[int]) -> float:
    """Return output tokens per second of the engine without a server"""
    start = time.perf_counter()
    engine.generate(texts, lengths)
    return sum(lengths) / (time.perf_counter() - start)


def arriving_alone(
    o: Options, engine: xtrain.Engine, texts: list[list[int]], rate: float
) -> tuple[float, list[float]]:
    """Return output tokens per second, and the time to the first token.

    Median and 99th percentile, in milliseconds.
    """
    requests = make_requests(
        texts, engine.config, engine.max_seq_len, (), 0, max_new_tokens=o.tokens
    )
    times = arrival_times(o.requests, rate, 0)
    first = []
    submitted = 0
    waiting = []
    start = time.perf_counter()
    while submitted < o.requests or engine.busy:
        now = time.perf_counter() - start
        while submitted < o.requests and times[submitted] <= now:
            engine.submit(requests[submitted])
            waiting.append(submitted)
            submitted += 1
        if not engine.step() and not engine.busy and submitted < o.requests:
            time.sleep(max(0.0, times[submitted] - (time.perf_counter() - start)))
        now = time.perf_counter() - start
        first += [1e3 * (now - times[i]) for i in waiting if requests[i].completion]
        waiting = [i for i in waiting if not requests[i].completion]
    value = o.requests * o.tokens / (time.perf_counter() - start)
    return value, np.percentile(first, [50, 99]).tolist()


# ----------------------------------------------------------------------------- the server
def texts_of(V: int) -> Texts:
    tokenizer: Any = SimpleNamespace(
        vocab_size=V,
        token_bytes=[b" word"] * V,
        special_ids=frozenset(),
        encode=None,
        eos_token_id=None,
    )
    return Texts(Path("random"), tokenizer, frozenset(), None)


def main(o: Options) -> None:
    engine = make_engine(o)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, engine.config.vocab_size, (o.requests, o.prompt)).tolist()
    equal = [o.tokens] * o.requests
    mixed = rng.integers(o.tokens // 2, 3 * o.tokens // 2 + 1, o.requests).tolist()
    alone(engine, texts, mixed)  # captures the graphs of all numbers of sequences
    peers = [alone(engine, texts, lengths) for lengths in (equal, mixed)]
    rate = o.load * peers[0] / o.tokens
    random_peer, first_alone = arriving_alone(o, engine, texts, rate)

    def clients(port: int) -> None:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
        load(o, port, bodies(texts, [2] * o.requests))  # the server's first requests
        for name, lengths, peer in (("closed", equal, peers[0]), ("mixed", mixed, peers[1])):
            show(o, name, lengths, *load(o, port, bodies(texts, lengths)), peer)
        found = load(o, port, bodies(texts, equal), rate)
        times = {"first_alone_ms": [round(x, 1) for x in first_alone]}
        show(o, f"poisson {rate:.1f}/s", equal, *found, random_peer, **times)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(clients, port)
        work.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        with bound("127.0.0.1", port) as sockets:
            tokenizer_only = texts_of(engine.config.vocab_size)
            with HttpProcess(Address("127.0.0.1", port, sockets)) as http:
                http.send(tokenizer_only)
                serve_engine(engine, tokenizer_only, http, limits=Limits(queue=1 << 16))
        work.result()


def bodies(texts: list[list[int]], lengths: list[int]) -> list[bytes]:
    common = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    pairs = zip(texts, lengths)
    return [json.dumps({"prompt": x, "max_tokens": n} | common).encode() for x, n in pairs]


def show(
    o: Options,
    name: str,
    lengths: list[int],
    seconds: float,
    found: np.ndarray,
    peer: float,
    **times: Any,
) -> None:
    assert sorted(found[:, 2]) == sorted(lengths), "an answer is incomplete"
    value = sum(lengths) / seconds
    for i, what in enumerate(("first_ms", "last_ms")):
        times[what] = [round(1e3 * float(x), 1) for x in np.percentile(found[:, i], [50, 99])]
    times["tokens_per_event"] = round(sum(lengths) / float(found[:, 3].sum()), 1)
    if min(lengths) < max(lengths):
        answers = f"{min(lengths)} to {max(lengths)}"
    else:
        answers = o.tokens
    shape = f"{o.streams} slots, {o.requests} requests, {o.prompt} + {answers} tokens"
    more = {"peer": "engine alone", "peer_value": peer, **times}
    if o.emulate:
        print(name, shape, f"{value:,.0f} tok/s, {value / peer:.2f} x", more)
        return
    from _timing import record

    record(
        "bench_server",
        name,
        shape=f"Qwen3-0.6B, {shape}",
        dtype="bf16",
        ms=1e3 * seconds,
        value=value,
        unit="tok/s",
        **more,
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
