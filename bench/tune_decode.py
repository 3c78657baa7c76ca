"""Find the fastest division of the work in a decoding step on this GPU.

    python bench/tune_decode.py [--stages flags shapes ahead attention rows] [--jobs 16]

The model of bench_decode.py, all 22 layers with weights of their own, as the engine decodes with it: a graph of the step
without sampling, replayed back to back. One stage after the other tries its alternatives on top of what was best so far, which
is measured again with them, and keeps the fastest; the columns are milliseconds per step for each batch and context, and the
product of their shares of the memory bound decides. A new kernel is compiled beside others, one process per core. What changes
the logits by more than rounding is not kept.

    flags       of all products: ahead, early (that of attention, too), near of _gemv_tensor.Config
    shapes      of one product: warps, chunks, blocks per multiprocessor
    ahead       bytes of later weights: cached_model.AHEAD
    attention   decode_attention.Config
    rows        threads per row of residual.py for a few rows

Prints at the end what to write into the files.
"""

import functools
import itertools
import math
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import cupy as cp
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import bench_decode
from _timing import copy_bandwidth
from bench_engine import BF16, EPS, MATRICES, C, D, G, H, P, int32, replay_ms

from xtrain import cached_model
from xtrain.kernels import decode_attention, gemv, residual, rope
from xtrain.kernels._gemv_tensor import choose as choose_product
from xtrain.kernels.cast import cast_fwd

Stage = Literal["flags", "shapes", "ahead", "attention", "rows"]
CONTEXTS = (128, 4096)
PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
MB = 1 << 20
SAME = 0.03  # of the largest logit: bf16 roundings of 22 layers differ by less
FLAGS = [
    dict(ahead=a, early=e, near=n)
    for a, e, n in [(0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 1, 0), (0, 1, 1), (1, 1, 1), (2, 1, 1)]
]
SHAPES = {
    "gate_up": [(4, 2, 4), (4, 3, 3), (8, 1, 2)],
    "down": [(8, 3, 2), (8, 2, 3), (16, 2, 1), (4, 8, 2)],
    "head": [(4, 2, 4), (4, 4, 3), (8, 4, 1)],
    "qkv": [(4, 4, 3), (8, 2, 2)],
    "o": [(4, 4, 4), (8, 4, 2), (16, 4, 1)],
}
AHEAD = [  # MB of gate/up, gate/up, down, QKV
    (4, 0, 0, 0), (8, 0, 0, 0), (16, 0, 0, 0), (0, 4, 0, 0), (0, 8, 0, 0), (0, 16, 0, 0), (8, 8, 0, 0), (0, 0, 4, 0),
    (0, 0, 12, 0), (0, 0, 0, 10), (8, 8, 4, 10), (12, 12, 8, 10), (16, 16, 12, 10), (16, 16, 22, 10),
]  # fmt: skip
ATTENTION = [
    dict(runs=True),
    dict(runs=True, ahead=True, at_once=16),
    dict(runs=True, warps=8, blocks=2),
    dict(runs=True, warps=8, ahead=True, at_once=16),
    dict(runs=True, chunk_keys=128),
    dict(runs=True, chunk_keys=128, ahead=True, at_once=16),
    dict(runs=True, chunk_keys=128, warps=8, blocks=2),
    dict(runs=True, chunk_keys=64, ahead=True, at_once=16),
    dict(runs=True, chunk_keys=512, warps=8, blocks=2),
    dict(runs=True, chunk_keys=512, warps=8, ahead=True, at_once=16),
]


@dataclass
class Options:
    stages: list[Stage] = field(
        default_factory=lambda: ["flags", "shapes", "ahead", "attention", "rows"]
    )
    jobs: int = os.cpu_count() or 1
    layers: int = 22


# ----------------------------------------------------------------------------- a candidate
def product_config(candidate, name):
    rows, K, form = MATRICES[name]
    swiglu = form.get("swiglu", False)
    config = choose_product(K, rows // (1 + swiglu), swiglu, form.get("norm", False))
    shape = candidate["shapes"].get(name, config[:3])
    return config._replace(**candidate["flags"])._replace(**dict(zip(config._fields, shape)))


def attention_config(candidate):
    early = bool(candidate["flags"].get("early"))
    return decode_attention.Config(**{"early": early, **candidate["attention"]})


def use(candidate):
    """From now on the launchers work like this."""
    products = {}
    for name, (rows, K, form) in MATRICES.items():
        swiglu = form.get("swiglu", False)
        key = K, rows // (1 + swiglu), swiglu, form.get("norm", False)
        products[key] = product_config(candidate, name)
    gemv.choose = lambda *key: products[key]
    attention = attention_config(candidate)
    decode_attention.choose = lambda *_: attention
    cached_model.AHEAD = tuple(n * MB for n in candidate["ahead"])
    residual.FEW, residual.FEW_COLUMNS = candidate["rows"]
    residual.make_fwd_kernel.cache_clear()


def kernels_of(candidate):
    """-> what must be compiled for it: (name, config)"""
    for name, ahead in itertools.zip_longest(PRODUCTS, candidate["ahead"], fillvalue=0):
        yield name, tuple(product_config(candidate, name)), ahead > 0
    yield "attention", tuple(attention_config(candidate)), False


def compile_one(task):
    """In a worker: fills the disk cache. -> (task, "" or what went wrong)"""
    name, config, follow = task
    try:
        if name == "attention":
            decode_attention.choose = lambda *_: decode_attention.Config(*config)
            k, v = (cp.empty((1, G, 4224, D), BF16) for _ in "kv")
            tables = [cp.asarray(t) for t in rope.rope_tables(D, 4224, 1e4)]
            where = (int32([0]), int32([0]), *tables, None, None, EPS, D**-0.5)
            decode_attention.decode_attention(cp.empty((1, P), BF16), k, v, *where, True)
        else:
            rows, K, form = MATRICES[name]
            norm, swiglu = form.get("norm", False), form.get("swiglu", False)
            x = cp.empty((1, K), np.float32 if norm else BF16)
            h = cp.empty((1, rows), np.float32) if form.get("residual") else None
            gemv.choose = lambda *_: config
            norm_w, w = cp.empty(K, np.float32) if norm else None, cp.empty((rows, K), BF16)
            next_w = w[0] if follow else None
            gemv.gemv(x, w, norm_w, EPS, h, swiglu, form.get("dtype"), h, True, next_w)
        cp.cuda.Device().synchronize()
        return task, ""
    except Exception as error:
        return task, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


# ----------------------------------------------------------------------------- measuring
class Bench:
    def __init__(self, o: Options):
        self.bandwidth = copy_bandwidth(1 << 30)
        self.model = bench_decode.random_model(o)
        self.cached = cached_model.CachedModel(self.model, 32, max(CONTEXTS) + 128)
        some = cp.random.standard_normal(self.cached.kv_L2RGSD.shape[1:], dtype=cp.float32)
        some = cast_fwd(some, BF16).view(np.int16)
        for layer in self.cached.kv_L2RGSD:
            layer.view(np.int16)[...] = some
        self.exact = {}

    def step(self, B, T):
        ids, lengths, rows = int32(np.arange(B) * 7 + 1), int32([T] * B), int32(range(B))
        return functools.partial(self.cached.decode, ids, lengths, rows)

    def bound_ms(self, B, T):
        return sum(bench_decode.step_bytes(self.model, B, T, 0)) / self.bandwidth * 1e3

    def __call__(self, candidate, batches):
        """-> milliseconds per step in the order of batches and contexts; errors of the logits"""
        use(candidate)
        times, errors = [], []
        for B, T in itertools.product(batches, CONTEXTS):
            step = self.step(B, T)
            logits = step().get()
            exact = self.exact.setdefault((B, T), logits)
            errors.append(float(np.abs(logits - exact).max() / np.abs(exact).max()))
            times.append(replay_ms(step, 20 if B == 1 else 10))
        return times, max(errors)


def start():
    return dict(flags={}, shapes={}, ahead=(0, 0, 0, 0), attention={}, rows=(0, 8))


def alternatives(stage, best):
    """-> lists of candidates, one after the other decided, and the batches that decide"""
    if stage == "flags":
        yield [{**best, "flags": f} for f in FLAGS], (1,)
    elif stage == "ahead":
        yield [{**best, "ahead": a} for a in AHEAD], (1,)
    elif stage == "attention":
        yield [{**best, "attention": a} for a in ATTENTION], (1, 32)
    elif stage == "rows":
        yield [{**best, "rows": (264, columns)} for columns in (4, 8, 16)], (32,)
    else:
        for name, shapes in SHAPES.items():
            yield [{**best, "shapes": {name: s}} for s in shapes], (1,)


def decide(bench, pool, best, candidates, batches):
    """-> the fastest, the table's lines printed"""
    tasks = list(dict.fromkeys(t for c in candidates for t in kernels_of(c)))
    wrong = dict(pool.imap_unordered(compile_one, tasks))
    results = []
    for candidate in (best, *candidates):
        what = {k: v for k, v in candidate.items() if v != best[k]} or "best so far"
        why = " ".join(filter(None, (wrong.get(t) for t in kernels_of(candidate))))
        if why:
            print(f"  {what}: {why}", flush=True)
            continue
        times, error = bench(candidate, batches)
        places = list(itertools.product(batches, CONTEXTS))
        shares = [bench.bound_ms(*place) / ms for place, ms in zip(places, times)]
        if error <= SAME:
            results.append((math.prod(shares), candidate))
        columns = " ".join(
            f"B={B} {T}: {ms:.4f} ({share:.1%})" for (B, T), ms, share in zip(places, times, shares)
        )
        print(f"  {columns}  {what}{'' if error <= SAME else f' WRONG {error:.1e}'}", flush=True)
    return max(results, key=lambda r: r[0])[1] if results else best


def main(o: Options) -> None:
    begun, clock = time.perf_counter(), lambda: f"{time.perf_counter() - begun:.0f} s"
    with multiprocessing.get_context("spawn").Pool(o.jobs) as pool:
        first = pool.map_async(compile_one, _first_tasks(o), chunksize=1)
        bench, best = Bench(o), start()
        first.get()
        print(f"ready after {clock()}; copy {bench.bandwidth / 1e9:,.0f} GB/s", flush=True)
        for stage in o.stages:
            print(f"{stage}:", flush=True)
            before = best
            for candidates, batches in alternatives(stage, before):
                found = decide(bench, pool, before, candidates, batches)
                shapes = {**best["shapes"], **found["shapes"]}
                best = {**found, "shapes": shapes}
            print(f"  -> { ({k: v for k, v in best.items() if v}) }   {clock()}", flush=True)
        print("all of it:", flush=True)
        decide(bench, pool, start(), [best], (1, 32))
    for name in MATRICES:
        print(f"{name}: {product_config(best, name)}")
    print(f"attention: {attention_config(best)}; H {H}, C {C}", flush=True)


def _first_tasks(o):
    """What the first stages surely need, compiled while the model is made."""
    candidates = [start()]
    if "flags" in o.stages:
        candidates += [c for many, _ in alternatives("flags", start()) for c in many]
    return list(dict.fromkeys(t for c in candidates for t in kernels_of(c)))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
