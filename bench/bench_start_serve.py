"""Where the time of a start of `xtrain serve` goes, and what 64 prompts that arrive at once wait for.

    python bench/bench_start_serve.py [--batch-invariant] [--cpu]

A folder with Qwen3-0.6B's shape, random weights in bf16 and a vocabulary of 143,000 tokens is made.
Then three servers start, each in a new process: `cold` with empty caches of xtrain's and of CuPy's
kernels, `warm` twice with what it has left. Each line is one part of the start: the seconds that it
took, and when it had ended. The HTTP process starts after the imports and runs next to the others.
After `ready` come the first requests, one after the other, and then twice --prompts prompts of
--length tokens at once: time to the first text, and between two events of one stream, in
milliseconds, and the parts of steps that took more than 50 ms. --cpu: a tiny model on the CPU, to
try the script. About a minute; nothing is recorded.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _shapes import QWEN3_06B

import xtrain
from xtrain.data.tokenizer import Tokenizer

TINY = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96)

# Runs in the server's process: says when each part of the start has ended, and how long calls of
# some functions took together.
CHILD = """
import functools, os, sys, time
start = float(os.environ["STARTED"])
sums = {}
def mark(name):
    print(f"MARK {time.time() - start:.3f} {name}", file=sys.stderr, flush=True)
def ends(owner, attribute, name):
    call = getattr(owner, attribute)
    @functools.wraps(call)
    def marked(*a, **k):
        result = call(*a, **k)
        mark(name)
        return result
    setattr(owner, attribute, marked)
def summed(owner, attribute, name):
    call = getattr(owner, attribute)
    @functools.wraps(call)
    def timed(*a, **k):
        before = time.perf_counter()
        try:
            return call(*a, **k)
        finally:
            sums[name] = sums.get(name, 0) + time.perf_counter() - before
    setattr(owner, attribute, timed)
if __name__ == "__main__":
    mark("Python")
    import xtrain.serve
    mark("import xtrain.serve")
    from xtrain.device import cupy
    from xtrain.kernels import row_bits
    from xtrain.kernels.runtime import launch
    from xtrain.nn.model import Transformer
    from xtrain.server import listen
    from xtrain.nn import cuda_graph
    from xtrain.serving import engine, pretrained, runner, scheduler, warm_up
    ends(pretrained, "resolve_device", "import CuPy, find the GPU")
    ends(pretrained, "load_texts", "tokenizer")
    ends(listen.Options, "load", "weights")
    ends(engine, "_make_caches", "chat template, KV cache")
    ends(warm_up, "every_launch", "forward passes of every shape, noted")
    ends(warm_up, "start_compiling_noted", "cache of kernels read, compilers started")
    ends(warm_up, "run_requests", "first requests, for CuPy's kernels")
    ends(warm_up, "compile_noted", "wait for compilers, load kernels")
    ends(runner.Runner, "every_graph", "CUDA graphs")
    summed(launch, "load_function", "load_function")
    summed(row_bits, "known", "check of the bits of cuBLAS's rows")
    gpu = cupy()
    if gpu is not None:
        summed(gpu.cuda.compiler, "compile_using_nvrtc", "NVRTC, for CuPy")
    step = engine.Engine.step
    def timed_step(self):
        sums.clear()
        before = time.perf_counter()
        result = step(self)
        seconds = time.perf_counter() - before
        if seconds > 0.05:
            last = self.trace[-1]
            text = " ".join(f"{name}: {x:.3f} s;" for name, x in sums.items())
            print(f"SLOW {seconds:.3f} s: {len(last.decoded)} sequences decode, "
                  f"{last.prefilled} tokens are prefilled; {text}", file=sys.stderr, flush=True)
        return result
    def steps():
        summed(runner.Runner, "launch_decoding", "launch of decoding")
        summed(runner.Runner, "_launch_prefill", "of prefill")
        summed(cuda_graph._Recording, "_capture", "of these, capture")
        summed(scheduler.Scheduler, "take", "wait for the GPU")
        engine.Engine.step = timed_step
    serve_engine = listen.serve_engine
    def ready(*a, **k):
        mark("the rest of the engine")
        print("SUMS", *(f"{name}: {x:.2f} s;" for name, x in sums.items()), file=sys.stderr)
        steps()
        return serve_engine(*a, **k)
    listen.serve_engine = ready
    sys.exit(xtrain.serve.main(sys.argv[1:]))
"""


def make_folder(folder: Path, tiny: bool) -> int:
    """Save a random model and a tokenizer whose tokens are up to three letters. Return the tokens
    of the vocabulary."""
    Tokenizer.train(["def f(x):\n    return x\n" * 50], 270).save(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    merges = content["model"]["merges"]
    letters = string.ascii_letters[: 4 if tiny else 52]
    pairs = [(a, b) for a in letters for b in letters]
    for a, b in [*pairs, *((x + y, z) for x, y in pairs for z in letters)]:
        if a + b not in vocab:
            vocab[a + b] = len(vocab)
            merges.append([a, b])
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    shape = QWEN3_06B | {"vocab_size": tokenizer.vocab_size, "max_seq_len": 2048}
    if tiny:
        shape |= TINY
    config = xtrain.ModelConfig(**shape)
    kind = ("cpu", "fp32") if tiny else ("gpu", "bf16")
    model = xtrain.Transformer(config, 0, *kind, trainable=False)
    model.save_pretrained(folder, tokenizer)
    return tokenizer.vocab_size


class Server:
    """`xtrain serve` in a new process, until it is ready."""

    def __init__(self, folder: Path, script: Path, caches: Path, options: list[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = caches / "log"
        more = {"XTRAIN_CACHE": caches / "xtrain", "CUPY_CACHE_DIR": caches / "cupy"}
        environment = os.environ | {name: str(path) for name, path in more.items()}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.start = time.time()
        environment["STARTED"] = str(self.start)
        command = [sys.executable, str(script), "--model", str(folder), "--port", str(self.port)]
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*command, *options], env=environment, stdout=log, stderr=log
            )
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(self.text()) from None
                time.sleep(0.01)
        self.seconds = time.time() - self.start

    def text(self) -> str:
        """Return what the server has written."""
        return self.log.read_text(encoding="utf-8")

    def show(self, name: str) -> None:
        """Print the parts of the start."""
        before = 0.0
        print(f"\n{name}: ready after {self.seconds:.1f} s")
        for line in self.text().splitlines():
            if line.startswith("MARK "):
                _, seconds, what = line.split(" ", 2)
                print(f"  {float(seconds) - before:6.2f} s, at {float(seconds):6.2f}   {what}")
                before = float(seconds)
            elif line.startswith("SUMS ") or "kernels compiled" in line:
                print("  " + line.removeprefix("SUMS "))
        print(f"  {self.seconds - before:6.2f} s, at {self.seconds:6.2f}   the HTTP side listens")

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def ask(port: int, prompt: list[int], tokens: int) -> list[float]:
    """Stream one completion. Return the seconds since the request at which its texts came."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + body).encode())
    times = []
    while data := await reader.read(1 << 16):
        if b'"text":"' in data:
            times.append(time.perf_counter() - start)
    writer.close()
    assert times, "no text came"
    return times


async def at_once(port: int, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """Stream one completion of each prompt."""
    return await asyncio.gather(*(ask(port, prompt, tokens) for prompt in prompts))


def measure(server: Server, prompts: int, length: int, vocab: int) -> None:
    """Print what the first requests wait for, and those that arrive at once; and long steps."""
    port = server.port
    slow = lambda: [line for line in server.text().splitlines() if line.startswith("SLOW")]
    draw = np.random.default_rng(0)
    random = lambda n, length: draw.integers(1, vocab, (n, length)).tolist()
    firsts = []
    for _ in range(3):
        (times,) = asyncio.run(at_once(port, random(1, 100), 20))
        firsts.append(f"{1e3 * times[0]:.0f}")
    print(f"  first text of one request after the other: {', '.join(firsts)} ms")
    for number in (1, 2):
        before = len(slow())
        streams = asyncio.run(at_once(port, random(prompts, length), 100))
        first = np.percentile([times[0] for times in streams], [0, 50, 100]) * 1e3
        gaps = np.concatenate([np.diff(times) for times in streams if len(times) > 1]) * 1e3
        last = max(times[-1] for times in streams)
        print(
            f"  {prompts} prompts of {length} tokens, round {number}: first text after "
            f"{first[0]:.0f} to {first[2]:.0f} ms (median {first[1]:.0f}); between events median "
            f"{np.median(gaps):.0f}, 99 % {np.percentile(gaps, 99):.0f}, longest {gaps.max():.0f} "
            f"ms; all after {last:.2f} s"
        )
        for line in slow()[before:][:12]:
            print("    step of" + line.removeprefix("SLOW"))


def main() -> None:
    """Make the folder, start the servers and print their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=500)
    o = parser.parse_args()
    options = ["--max-batch", "64", "--no-access-log"]
    if o.batch_invariant:
        options.append("--batch-invariant")
    if o.cpu:
        options += ["--device", "cpu"]
    with tempfile.TemporaryDirectory() as name:
        caches = Path(name)
        folder = caches / "model"
        folder.mkdir()
        script = caches / "serve.py"
        script.write_text(CHILD)
        start = time.perf_counter()
        vocab = make_folder(folder, o.cpu)
        xtrain.device.free_cached("cpu" if o.cpu else "gpu")
        print(f"{os.cpu_count()} cores; the folder was made in {time.perf_counter() - start:.1f} s")
        for row in ("cold", "warm", "warm"):
            server = Server(folder, script, caches, options)
            server.show(row)
            measure(server, o.prompts, o.length, vocab)
            server.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
