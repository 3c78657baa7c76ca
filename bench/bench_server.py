"""What the HTTP layer costs: a server under load, next to the engine alone, in one process each time.

    python bench/bench_server.py [--streams 256] [--requests 512] [--tiny]

closed     --streams clients, each sends its next streamed completion when the last one has ended. value: output tokens a second;
           peer: the engine alone with the same requests and slots, all submitted at once
poisson    requests arrive at random, at --load of the rate that the closed loop reached. value: output tokens per second;
           first_ms, last_ms: median and 99th percentile of the time to the first byte of text, and of the whole answer

Prompts of 128 random tokens, answers of 256 (greedy, no stop tokens), Qwen3-0.6B's shape with random weights in bf16; --tiny: a
small model, for a look without a GPU. The clients are processes of their own on this machine, over HTTP/1.1 on 127.0.0.1.
"""

import asyncio
import functools
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tyro

import xtrain
from xtrain.server.app import Limits
from xtrain.server.listen import Address, serve_engine
from xtrain.serving.pretrained import Texts


@dataclass
class Options:
    streams: int = 256
    requests: int = 512
    tokens: int = 256  # of an answer
    prompt: int = 128
    load: float = 0.7  # of the rate of the closed loop, for the Poisson arrivals
    emulate: bool = False
    clients: int = 4  # processes


def make_engine(o: Options) -> xtrain.Engine:
    sizes = (o.streams, o.prompt + o.tokens + 1)
    if o.emulate:
        from emulated_engine import EmulatedEngine

        return EmulatedEngine(*sizes, reuse_prefix=False)
    shape = dict(
        vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072,
        max_seq_len=2048, rope_theta=1e6, tie_embeddings=True,
    )  # fmt: skip
    model = xtrain.Transformer(xtrain.ModelConfig(**shape), 0, "gpu", "bf16", trainable=False)
    return xtrain.Engine(model, *sizes, reuse_prefix=False, warm_up=True)


def prompts(o: Options, vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocab_size, (o.requests, o.prompt)).tolist()


# ----------------------------------------------------------------------------- clients
class Ask(asyncio.Protocol):
    """One streamed completion. done: -> seconds to the first text, seconds in all, tokens, pieces of the stream"""

    def __init__(self, body: bytes):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request, self.start = head.encode() + body, time.perf_counter()
        self.first, self.last, self.pieces = 0.0, b"", 0
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
    waiting, found = list(reversed(bodies)), []

    async def stream():
        while waiting:
            found.append(await ask(port, waiting.pop()))

    await asyncio.gather(*(stream() for _ in range(streams)))
    return found


async def arriving(port: int, bodies: list[bytes], rate: float, seed: int) -> list[tuple]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(bodies)).cumsum()

    async def later(seconds, body):
        await asyncio.sleep(seconds)
        return await ask(port, body)

    return await asyncio.gather(*map(later, gaps, bodies))


def client(port, bodies, streams, rate, seed, ready, results) -> None:
    ready.wait()
    work = arriving(port, bodies, rate, seed) if rate else closed(port, bodies, streams)
    try:
        results.put(asyncio.run(work))
    except Exception as error:
        results.put(repr(error))


def load(o: Options, port: int, bodies: list[bytes], rate: float = 0.0) -> tuple[float, np.ndarray]:
    """-> seconds from the first request to the end of the last, (requests, 3) as from `ask`"""
    context = multiprocessing.get_context("spawn")
    results, ready = context.Queue(), context.Barrier(o.clients + 1)
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


# ----------------------------------------------------------------------------- server and engine
def alone(o: Options, engine: xtrain.Engine, texts: list[list[int]]) -> float:
    """-> output tokens per second of the engine without a server, the second time"""
    for _ in range(2):
        start = time.perf_counter()
        found = engine.generate(texts, o.tokens)
        seconds = time.perf_counter() - start
    return sum(map(len, found)) / seconds


def texts_of(V: int) -> Texts:
    tokenizer: Any = SimpleNamespace(
        vocab_size=V,
        token_bytes=[b" word"] * V,
        special_ids=frozenset(),
        eos_token_id=None,
        encode=None,
    )
    return Texts(Path("random"), tokenizer, frozenset())


def measure(o: Options, port: int, texts: list[list[int]], peer: float) -> None:
    """Load the server on this port, and record."""
    common = {"max_tokens": o.tokens, "temperature": 0, "stream": True}
    common["stream_options"] = {"include_usage": True}
    bodies = [json.dumps({"prompt": text} | common).encode() for text in texts]
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.05)
    load(o, port, bodies)  # captures the graphs of all numbers of sequences
    seconds, found = load(o, port, bodies)
    show(o, "closed", found, seconds, peer)
    rate = o.load * o.requests / seconds
    seconds, found = load(o, port, bodies, rate)
    show(o, f"poisson {rate:.1f}/s", found, seconds, None)


def main(o: Options) -> None:
    engine = make_engine(o)
    texts = prompts(o, engine.config.vocab_size)
    peer = alone(o, engine, texts)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def clients() -> None:
        try:
            measure(o, port, texts, peer)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=clients).start()
    make_texts = functools.partial(texts_of, engine.config.vocab_size)
    serve_engine(engine, make_texts, Address("127.0.0.1", port), limits=Limits(queue=1 << 16))


def show(o: Options, name: str, found: np.ndarray, seconds: float, peer: float | None) -> None:
    assert (found[:, 2] == o.tokens).all(), "an answer is incomplete"
    value = found[:, 2].sum() / seconds
    times = {
        f"{what}_ms": [round(1e3 * float(x), 1) for x in np.percentile(found[:, i], [50, 99])]
        for i, what in enumerate(("first", "last"))
    }
    shape = f"{o.streams} slots, {o.requests} requests, {o.prompt} + {o.tokens} tokens"
    more = {} if peer is None else {"peer": "engine alone", "peer_value": peer}
    if o.emulate:
        print(name, shape, f"{value:,.0f} tok/s", times, more)
        return
    from _timing import record

    record("bench_server", name, shape=f"Qwen3-0.6B, {shape}", dtype="bf16", ms=1e3 * seconds, value=value, unit="tok/s", **times, **more)  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
