"""Find the fastest division of the work in a decoding step on this GPU.

    python bench/tune_decode.py [--stages division ring shapes few many] [--jobs 16]

The model of bench_decode.py, all 22 layers with weights of their own, as the engine decodes with it: a graph of the step
without sampling, replayed back to back. It begins with what the library chooses. One stage after the other tries its
alternatives on top of what was best so far, which is measured again with them, and keeps the fastest; the columns are
milliseconds per step for each batch and context, and the product of their shares of the memory bound decides. A new kernel is
compiled beside others, one process per core. Logits are compared with those of float32 arithmetic: what is further away than
WORSE times what the library chooses now is not kept.

    division    shared memory and first-level cache are divided alike for all kernels that overlap: _launch._one_division
    ring        which products take their weights through _gemv_ring.py, and when they let the next kernel start
    shapes      of one product: warps, chunks, blocks per multiprocessor, then early, stages
    few, many   decode_attention.Config for few key heads in a launch, and for many

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
from bench_engine import BF16, EPS, MATRICES, D, G, H, P, int32, replay_ms

from xtrain import cached_model
from xtrain.kernels import _launch, decode_attention, gemv, rope
from xtrain.kernels._gemv_tensor import Config
from xtrain.kernels._gemv_tensor import choose as choose_product
from xtrain.kernels.cast import cast_fwd
from xtrain.kernels.decode_attention import choose as choose_attention

PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
Stage = Literal["division", "ring", "shapes", "few", "many"]
STAGES = ["division", "ring", "shapes", "few", "many"]
CONTEXTS = (128, 4096)
WORSE = 1.5
RINGS = {  # warps, chunks, blocks, early, stages: 64 to 96 KB of weights under way
    "gate_up": (8, 1, 1, 1, 6),
    "down": (8, 2, 1, 1, 6),
    "head": (8, 2, 1, 1, 6),
    "qkv": (8, 2, 1, 1, 4),
    "o": (8, 2, 1, 1, 4),
}
SETS = [  # of products with a ring; early of all of them
    (("gate_up",), 1),
    (("gate_up", "down"), 1),
    (("gate_up", "down"), 2),
    (("gate_up", "down", "head"), 1),
    (("gate_up", "down", "head", "qkv"), 1),
    (("gate_up", "down", "head", "o"), 1),
    (("gate_up", "down", "head", "qkv", "o"), 1),
    (("gate_up", "down", "head", "qkv", "o"), 2),
    (("gate_up", "down", "head", "qkv", "o"), 0),
]
SHAPES = {
    "gate_up": [
        (8, 1, 1, 1, 4),
        (8, 1, 1, 1, 8),
        (8, 1, 2, 1, 3),
        (4, 2, 2, 1, 3),
        (8, 1, 1, 2, 6),
    ],
    "down": [(8, 2, 1, 1, 4), (8, 2, 1, 1, 8), (16, 1, 1, 1, 6), (8, 2, 1, 2, 6)],
    "qkv": [(8, 2, 2, 1, 3), (8, 1, 2, 1, 4), (8, 8, 2, 1, 0)],
    "o": [(8, 2, 2, 1, 3), (8, 4, 1, 1, 2)],
    "head": [(8, 2, 1, 1, 4), (8, 2, 2, 1, 3), (8, 2, 1, 1, 8)],
}
FEW = dict(warps=8, ahead=True, runs=True, at_once=16)
ATTENTION = {
    "few": [
        dict(FEW, sooner=True),
        dict(FEW, sooner=True, runs=False),
        dict(FEW, sooner=True, chunk_keys=512),
        dict(FEW, sooner=True, at_once=8),
        dict(FEW, warps=4, sooner=True),
    ],
    "many": [
        dict(chunk_keys=512),
        dict(chunk_keys=1024),
        dict(chunk_keys=1024, blocks=4),
        dict(chunk_keys=1024, ahead=True, sooner=True),
    ],
}


@dataclass
class Options:
    stages: list[Stage] = field(default_factory=lambda: list(STAGES))
    jobs: int = os.cpu_count() or 1
    layers: int = 22


# ----------------------------------------------------------------------------- a candidate
def key_of(name):
    """What gemv.choose is asked"""
    rows, K, form = MATRICES[name]
    swiglu = form.get("swiglu", False)
    return K, rows // (1 + swiglu), swiglu, form.get("norm", False)


def product_config(candidate, name):
    if name not in candidate["shapes"]:
        return choose_product(*key_of(name))
    warps, chunks, blocks, early, stages = candidate["shapes"][name]
    return Config(warps, chunks, blocks, early=early, stages=stages)


def attention_config(candidate, what):
    """what: "few" or "many" """
    if candidate[what] is None:
        return choose_attention(D, 8, G if what == "few" else 32 * G)
    return decode_attention.Config(**candidate[what])


def use(candidate):
    """From now on the launchers work like this."""
    products = {key_of(name): product_config(candidate, name) for name in MATRICES}
    gemv.choose = lambda *key: products[key]
    few, many = (attention_config(candidate, what) for what in ("few", "many"))
    limit = decode_attention.FEW_HEADS
    decode_attention.choose = lambda D, heads, key_heads: few if key_heads <= limit else many
    if _launch._one_division != candidate["division"]:
        _launch._one_division = candidate["division"]
        _launch._plans.clear()


def kernels_of(candidate):
    """-> what must be compiled for it: (name, config)"""
    for name in PRODUCTS:
        yield name, tuple(product_config(candidate, name))
    for what in ("few", "many"):
        yield "attention", tuple(attention_config(candidate, what))


def compile_one(task):
    """In a worker: fills the disk cache. -> (task, "" or what went wrong)"""
    name, config = task
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
            next_w = w[0] if name == "o" else None  # cached_model.AHEAD
            gemv.gemv(x, w, norm_w, EPS, h, swiglu, form.get("dtype"), h, True, next_w)
        cp.cuda.Device().synchronize()
        return task, ""
    except Exception as error:
        return task, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


# ----------------------------------------------------------------------------- the same in float32
def wide(x):
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if x.dtype == BF16 else x


def exact_logits(cached, token, T):
    """One step of the first row, from the cache's first T positions, in float32."""
    h = wide(cached.table[token])
    normed = lambda x, w: x / cp.sqrt((x * x).mean() + cached.config.norm_eps) * wide(w)
    cos, sin = cached.cos_PR[T], cached.sin_PR[T]
    for i, w in enumerate(cached.layers):
        heads = (wide(w.qkv) @ normed(h, w.norm)).reshape(-1, D)
        x1, x2 = cp.split(heads[: H + G], 2, axis=1)
        turned = cp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=1)
        new = turned[H:], heads[H + G :]
        old = (wide(x[0][:, :T]) for x in cached.kv_L2RGSD[i])
        k, v = (cp.concatenate([x, y[:, None]], axis=1) for x, y in zip(old, new))
        s = turned[:H].reshape(G, H // G, D) @ k.swapaxes(1, 2) * cached.scale
        p = cp.exp(s - s.max(-1, keepdims=True))
        o = (p / p.sum(-1, keepdims=True)) @ v
        h = h + wide(w.o_proj) @ o.reshape(-1)
        gate, up = cp.split(wide(w.gate_up) @ normed(h, w.mlp_norm), 2)
        h = h + wide(w.down_proj) @ (gate / (1 + cp.exp(-gate)) * up)
    return (wide(cached.head) @ normed(h, cached.norm)).get()


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
        self.exact = {T: exact_logits(self.cached, int(self.ids(1)[0]), T) for T in CONTEXTS}
        self.allowed = None  # error of what the library chooses now

    def ids(self, B):
        return np.arange(B) * 7 + 1

    def step(self, B, T):
        ids, lengths, rows = int32(self.ids(B)), int32([T] * B), int32(range(B))
        return functools.partial(self.cached.decode, ids, lengths, rows)

    def bound_ms(self, B, T):
        return sum(bench_decode.step_bytes(self.model, B, T, 0)) / self.bandwidth * 1e3

    def __call__(self, candidate, batches):
        """-> milliseconds per step in the order of batches and contexts; errors of the logits"""
        use(candidate)
        times, errors = [], []
        for B, T in itertools.product(batches, CONTEXTS):
            step = self.step(B, T)
            logits, exact = step()[0].get(), self.exact[T]
            errors.append(float(np.abs(logits - exact).max() / np.abs(exact).max()))
            times.append(replay_ms(step, 20 if B == 1 else 10))
        return times, max(errors)


def start():
    return dict(division=_launch._one_division, shapes={}, few=None, many=None)


def changed(best, change):
    return {**best, **change, "shapes": {**best["shapes"], **change.get("shapes", {})}}


def alternatives(stage, best):
    """-> lists of changes, one after the other decided, and the batches that decide"""
    other = dict(division=not best["division"])
    if stage == "division":
        yield [other], (1, 32)
    elif stage == "ring":
        rings = [{n: (*RINGS[n][:3], early, RINGS[n][4]) for n in names} for names, early in SETS]
        yield [*(dict(shapes=shapes) for shapes in rings), dict(other, shapes=rings[6])], (1,)
    elif stage == "shapes":
        for name, shapes in SHAPES.items():
            yield [dict(shapes={name: s}) for s in shapes], (1,)
    else:
        yield [{stage: config} for config in ATTENTION[stage]], (1,) if stage == "few" else (32,)


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
        bench.allowed = bench.allowed or WORSE * error
        places = list(itertools.product(batches, CONTEXTS))
        shares = [bench.bound_ms(*place) / ms for place, ms in zip(places, times)]
        if error <= bench.allowed:
            results.append((math.prod(shares), candidate))
        columns = " ".join(
            f"B={B} {T}: {ms:.4f} ({share:.1%})" for (B, T), ms, share in zip(places, times, shares)
        )
        wrong_by = "" if error <= bench.allowed else " WRONG"
        print(f"  {columns}  error {error:.1e}{wrong_by}  {what}", flush=True)
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
            for changes, batches in alternatives(stage, best):
                candidates = [changed(best, change) for change in changes]
                best = decide(bench, pool, best, candidates, batches)
            print(f"  -> { ({k: v for k, v in best.items() if v}) }   {clock()}", flush=True)
        print("all of it:", flush=True)
        decide(bench, pool, start(), [best], (1, 32))
    for name in MATRICES:
        print(f"{name}: {product_config(best, name)}")
    for what in ("few", "many"):
        print(f"attention, {what} key heads: {attention_config(best, what)}")
    print(f"one division: {best['division']}", flush=True)


def _first_tasks(o):
    """What the stages surely need, compiled while the model is made."""
    candidates = [start()]
    for stage in o.stages:
        for changes, _ in alternatives(stage, start()):
            candidates += [changed(start(), change) for change in changes]
    return list(dict.fromkeys(t for c in candidates for t in kernels_of(c)))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
