"""Many streams with random disconnects: every answer is complete and equal to the solitary one of its seed, and nothing leaks.

python tests/server/load.py [--requests 2000] [--streams 64]        test_load.py runs fewer
"""

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from twins import random_model, small
from waiting import free_port, until

from xtrain import Engine
from xtrain.data.tokenizer import Tokenizer
from xtrain.server.app import Limits, create_app
from xtrain.serving import pretrained

SEEDS, TOKENS = 16, 40
PROMPTS = ["def f", "x + 1", "return", "def f(x):\n    return"]


async def ask(port: int, seed: int, cut: int | None = None) -> tuple[str, float, float]:
    """A streamed completion, disconnected after `cut` bytes if given. -> its text, seconds to the first text and in all"""
    start, first, data = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {
        "prompt": PROMPTS[seed % len(PROMPTS)],
        "seed": seed,
        "max_tokens": TOKENS,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    while chunk := await reader.read(1 << 14):
        data += chunk
        if not first and b'"text":' in data:
            first = time.perf_counter() - start
        if cut is not None and len(data) > cut:
            break
    writer.close()
    if cut is not None:
        return "", first, 0.0
    events = [
        line[6:]
        for line in data.split(b"\r\n")
        for line in line.split(b"\n")
        if line.startswith(b"data: ")
    ]
    assert events and events.pop() == b"[DONE]", data[-300:]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] in ("length", "stop")
    return "".join(choice["text"] for choice in choices), first, time.perf_counter() - start


async def load(port: int, requests: int, streams: int) -> dict[str, list[float]]:
    """-> {percentiles of first and whole, ms}. Raises AssertionError if an answer differs."""
    alone = [(await ask(port, seed))[0] for seed in range(SEEDS)]
    assert len(set(alone)) > 1
    left, draw, times = iter(range(requests)), random.Random(0), []

    async def stream():
        for number in left:
            seed = number % SEEDS
            cut = draw.randrange(3000) if draw.random() < 0.3 else None
            text, first, whole = await ask(port, seed, cut)
            if cut is None:
                assert text == alone[seed], (seed, text, alone[seed])
                times.append((first, whole))

    await asyncio.gather(*(stream() for _ in range(streams)))
    found = 1e3 * np.percentile(np.array(times), [50, 90, 99], axis=0).T
    return {name: [round(float(x), 1) for x in row] for name, row in zip(("first", "whole"), found)}


def resident() -> float:
    """MB of memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(folder: Path, requests: int, streams: int) -> str:
    """Serve the model in `folder` and load it. -> one line of figures. Raises AssertionError."""
    p = pretrained.load(folder, "cpu")
    engine = Engine(p.model, 8, 128, batch_invariant=True)
    app = create_app(engine, p, limits=Limits(queue=1024))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    asyncio.run(load(port, streams, streams))  # what the first requests allocate
    files, memory, start = len(os.listdir("/proc/self/fd")), resident(), time.perf_counter()
    times = asyncio.run(load(port, requests, streams))
    seconds = time.perf_counter() - start
    end = time.monotonic() + 10
    left = lambda: (
        engine.scheduler.unfinished, engine.max_batch - len(engine.scheduler.free_slots), engine.scheduler.pool.size - engine.scheduler.pool.available,
        app.state.server.waiting, len(app.state.server.engine.jobs), max(0, len(os.listdir("/proc/self/fd")) - files),
    )  # fmt: skip
    while any(left()) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(left()), f"requests, slots, blocks, waiting, jobs, files left: {left()}"
    grown = resident() - memory
    assert grown < 20 + 0.01 * requests, f"{grown:.1f} MB more memory after {requests} requests"
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    return (
        f"{requests} requests in {streams} streams, 30 % cut off: {seconds:.1f} s, all answers right, memory {grown:+.1f} MB; "
        f"first text {times['first']}, whole {times['whole']} ms (50, 90, 99 %)"
    )


def make_folder(folder: Path) -> Path:
    tokenizer = Tokenizer.train(["def f(x):\n    return x + größe\n" * 50], 290)
    config = small(vocab_size=tokenizer.vocab_size, max_seq_len=128, head_dim=16)
    random_model(config, device="cpu").save_pretrained(folder, tokenizer)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(run(make_folder(Path(temporary)), options.requests, options.streams))
