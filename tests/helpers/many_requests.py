"""Many small requests through one engine, with random cancels: what is left of them in memory.

    python tests/helpers/many_requests.py [20000] [--device gpu]

Prints memory and objects after a quarter of the requests and at the end; exit code 1 if they have grown.
"""

import argparse
import collections
import gc
import os
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from serving_state import check_nothing_is_used
from twins import random_model, small

from xtrain import Engine
from xtrain.device import cupy, free_cached

SHAPE = dict(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=16, max_seq_len=64)  # fmt: skip
AT_A_TIME = 25  # requests of a stream
# Growth that is none: interned objects, caches of the libraries, fragments of the allocator.
MOST_OBJECTS, MOST_TRACED, MOST_RESIDENT, MOST_ON_GPU = 200, 64 << 10, 16 << 20, 0


@dataclass(frozen=True)
class Usage:
    requests: int
    objects: int  # that Python's garbage collector knows
    traced: int  # bytes that Python allocated
    resident: int  # bytes of the process
    on_gpu: int  # bytes in use, also by other processes if this is not a worker of pytest

    def __str__(self):
        return (
            f"{self.requests:,} requests: {self.objects:,} objects, {self.traced / 1e6:.3f} MB allocated by Python, "
            f"{self.resident / 1e6:.1f} MB resident, {self.on_gpu / 1e6:.1f} MB on the GPU"
        )


def usage(requests, device):
    gc.collect()
    on_gpu = 0
    if device == "gpu":
        free_cached("gpu")
        on_gpu = cupy().get_default_memory_pool().total_bytes()
        if "PYTEST_XDIST_WORKER" not in os.environ:  # else other processes use the GPU, too
            free, total = cupy().cuda.runtime.memGetInfo()
            on_gpu = total - free
    resident = 0
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
    return Usage(requests, len(gc.get_objects()), tracemalloc.get_traced_memory()[0], resident, on_gpu)  # fmt: skip


def serve(engine, n, draw):
    """n requests, in streams of which some are cancelled, in part or as a whole. -> how many requests ended for which reason"""
    stem, reasons = list(range(1, 41)), collections.Counter()
    for _ in range(0, n, AT_A_TIME):
        prompts = [
            stem[: draw.integers(1, 40)] + draw.integers(0, 60, draw.integers(1, 8)).tolist()
            for _ in range(AT_A_TIME)
        ]
        answers = draw.integers(1, 8, AT_A_TIME).tolist()
        options = dict(
            temperature=draw.integers(0, 2, AT_A_TIME).tolist(),
            repetition_penalty=draw.choice([1.0, 1.3], AT_A_TIME).tolist(),
            logprobs=[None if draw.integers(2) else 2 for _ in prompts],
        )
        stream = engine.stream(prompts, answers, **options)
        way = draw.integers(4)
        for i, _ in enumerate(stream):
            if way == 1 and i % 7 == 0:
                stream.cancel(int(draw.integers(AT_A_TIME)))
            elif way == 2 and i == 30:
                stream.close()
                break
            elif way == 3 and i == 20:
                break
        completions = stream.completions
        del stream  # a stream that was left cancels its requests
        engine.step()
        reasons.update(completion.reason for completion in completions)
        engine.logprobs(prompts[:1], top=1)
    engine.generate([[1]], 1)  # on a GPU, the last tokens of the cancelled requests arrive
    return reasons


def measure(n, device):
    """-> usage after a quarter of n requests and after all, why they ended, how many were preempted"""
    engine = Engine(
        random_model(small(**SHAPE), device=device), 8, 64, block_tokens=16, prefill_tokens=64, cache_bytes=8 << 11,
        warm_up=True,  # a kernel that is compiled later would look like growth
    )  # fmt: skip
    engine.scheduler.trace = collections.deque(
        maxlen=50
    )  # a full trace of 4096 steps would look like growth
    draw, tracing = np.random.default_rng(0), tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        reasons = serve(engine, n // 4, draw)
        first = usage(engine.scheduler.submitted, device)
        reasons += serve(engine, n - n // 4, draw)
        last = usage(engine.scheduler.submitted, device)
    finally:
        if not tracing:
            tracemalloc.stop()
    check_nothing_is_used(engine)
    return engine, first, last, reasons


def grown(first, last):
    """-> a sentence on what has grown, or None"""
    limits = dict(
        objects=MOST_OBJECTS, traced=MOST_TRACED, resident=MOST_RESIDENT, on_gpu=MOST_ON_GPU
    )
    for name, most in limits.items():
        more = getattr(last, name) - getattr(first, name)
        if more > most:
            return f"{name} has grown by {more:,}, at most {most:,} is expected"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int, nargs="?", default=20000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "gpu"))
    o = parser.parse_args()
    start = time.perf_counter()
    engine, first, last, reasons = measure(o.n, o.device)
    print(first, last, sep="\n")
    print(
        f"{dict(reasons)}; {engine.steps:,} steps, {engine.reused_tokens:,} tokens shared, {time.perf_counter() - start:.0f} s; "
        f"all {engine.scheduler.pool.size} blocks are free or can be found again"
    )
    return grown(first, last) or 0


if __name__ == "__main__":
    sys.exit(main())
