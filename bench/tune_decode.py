"""Find the fastest division of the work in a decoding step on this GPU.

    python bench/tune_decode.py [--weights int8] [--jobs 16]
                                [--stages qkv o gate_up down head few many residual row_tiles]

Uses the model of bench_decode.py, all 22 layers with separate weights, and decodes as the engine
does: a CUDA graph of the step without sampling, replayed back to back. It starts with the library's
choice. One stage after another tries its alternatives on top of the best so far, which is measured
again with them, and keeps the fastest: the one with the largest product of shares of the memory
bound at both contexts. New kernels are compiled beforehand, one process per core.
A candidate whose logits differ by more than ALLOWED from those of the library's choice is rejected.

    qkv ... head    gemv_tensor_cores.Config of a product
    few, many       decode_attention.Config for few key heads in a launch (batch 1), and for many
                    (batch 32)
    residual        residual.FEW and FEW_COLUMNS (batch 32)
    row_tiles       gemv.ROW_TILES, of quantized weights (batch 32)

--weights int8 or fp8: the matrices of the layers are quantized, and their products have
alternatives of their own.

Prints at the end what to write into the files.
"""

import functools
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
from bench_engine import BF16, EPS, MATRICES, D, G, H, P, S, int32, replay_ms

from xtrain.kernels import residual, rope
from xtrain.kernels.attention import decode_attention
from xtrain.kernels.attention.decode_attention import Config as Attention
from xtrain.kernels.cast import cast_fwd
from xtrain.kernels.decoding import gemv
from xtrain.kernels.decoding.gemv_tensor_cores import Config as Product
from xtrain.kernels.quantize import quantize
from xtrain.nn.autograd import inference
from xtrain.nn.quantized import quantize_weights
from xtrain.serving.paged_cache import PagedCache

CONTEXTS = (128, 4096)
BATCHES = {"many": 32, "residual": 32, "row_tiles": 32}  # of a stage; 1 otherwise
# of the largest logit: two orders of addition are about 0.1 apart in bf16, a wrong kernel 1 and
# more
ALLOWED = 0.2
# Product(warps, chunks, blocks, stage), Attention(warps, blocks, keys, splits, prefetched)
ALTERNATIVES = {
    "qkv": [Product(8, 8, 2), Product(4, 8, 3), Product(16, 4, 1), Product(4, 4, 4)],
    "o": [Product(8, 8, 2, True), Product(16, 4, 1), Product(16, 4, 1, False), Product(4, 8, 4)],
    "gate_up": [Product(8, 4, 1), Product(4, 4, 2), Product(4, 3, 4), Product(8, 3, 2)],
    "down": [Product(16, 11, 1), Product(16, 5, 1), Product(8, 11, 1), Product(16, 3, 1)],
    "head": [Product(2, 4, 8), Product(8, 4, 2), Product(4, 8, 2), Product(4, 4, 3)],
    "few": [Attention(12, 1, 192, 32, 128), Attention(8, 2, 256, 32, 512)],
    "many": [
        Attention(4, 4, 256, 32, 128),
        Attention(4, 4, 512, 32, 128),
        Attention(8, 2, 1024, 32, 128),
    ],
    "residual": [(0, 4), (264, 8)],
    "row_tiles": [1],
}
CODES = {  # the same for quantized weights: those that need no memory for registers
    "qkv": [Product(8, 4, 2), Product(8, 2, 2), Product(4, 4, 4), Product(4, 8, 2)],
    "o": [Product(8, 4, 2, True), Product(16, 2, 1, False), Product(4, 8, 2, False)],
    "gate_up": [Product(4, 2, 4), Product(8, 2, 2), Product(8, 4, 1)],
    "down": [Product(16, 6, 1), Product(8, 11, 1), Product(8, 6, 2), Product(8, 6, 1)],
}


@dataclass
class Options:
    stages: list[str] = field(default_factory=lambda: list(ALTERNATIVES))
    jobs: int = os.cpu_count() or 1
    layers: int = 22
    weights: Literal["full", "int8", "fp8", "int4", "nf4"] = "full"


# ---------------------------------------------------------------------- a candidate: stage -> value
library_choice = gemv.choose


def key_of(name, weights):
    """Return the arguments of gemv.choose for a product"""
    rows, K, form = MATRICES[name]
    swiglu = form.get("swiglu", False)
    return (
        K,
        rows // (1 + swiglu),
        swiglu,
        form.get("norm", False),
        kind_of(name, weights) != "full",
    )


def kind_of(name, weights):
    """Return the kind of weights of a product; the head is not quantized."""
    return "full" if name == "head" else weights


@functools.cache
def chosen(weights):
    """Return the library's choice, also after `use`: the first call in a process precedes it"""
    return {
        **{name: library_choice(*key_of(name, weights)) for name in MATRICES},
        "few": decode_attention.choose(D, H // G, True, G),
        "many": decode_attention.choose(D, H // G, True, 32 * G),
        "residual": (residual.FEW, residual.FEW_COLUMNS),
        "row_tiles": gemv.ROW_TILES,
    }


def use(candidate, weights):
    """Make the launchers use this candidate from now on."""
    products = {key_of(name, weights): candidate[name] for name in MATRICES}
    few, many = candidate["few"], candidate["many"]
    limit = decode_attention.FEW_HEADS
    # with 32 rows the norm is a kernel of its own: these products are no stages
    gemv.choose = lambda *key: products.get(key) or library_choice(*key)
    gemv.ROW_TILES = candidate["row_tiles"]
    decode_attention.choose = lambda D, group, half, key_heads: few if key_heads <= limit else many
    residual.FEW, residual.FEW_COLUMNS = candidate["residual"]
    residual.make_fwd_kernel.cache_clear()  # FEW_COLUMNS is not one of its arguments


def compile_one(task, weights):
    """Fill the disk cache, in a worker; return (task, what went wrong or "")."""
    stage, value = task
    use({**chosen(weights), stage: value}, weights)
    try:
        if stage in MATRICES:
            rows, K, form = MATRICES[stage]
            norm, swiglu = form.get("norm", False), form.get("swiglu", False)
            x = cp.empty((1, K), np.float32 if norm else BF16)
            w = cp.zeros((rows, K), BF16)
            if (kind := kind_of(stage, weights)) != "full":
                w = quantize(w, kind)
            if norm:
                norm_w = cp.empty(K, np.float32)
                delta = cp.empty((1, K), BF16)
                gemv.add_norm_gemv(x, delta, norm_w, w, EPS, swiglu, True, form.get("dtype"))
            else:
                gemv.gemv(x, w, form.get("dtype"), True)
        elif stage == "row_tiles" and weights != "full":
            for name in CODES:
                rows, K, _ = MATRICES[name]
                w = quantize(cp.zeros((rows, K), BF16), weights)
                gemv.gemv(cp.empty((32, K), BF16), w, None, True)
        elif stage in ("few", "many"):
            B = BATCHES.get(stage, 1)
            k, v = (cp.empty((1, G, S, D), BF16) for _ in "kv")
            angles = [cp.asarray(t) for t in rope.rope_tables(D, 66 * S, 1e4)]
            where = int32([-1] * B), int32([[0] * 66] * B), *angles, None, None, EPS, D**-0.5
            decode_attention.decode_attention(cp.empty((B, P), BF16), k, v, *where, True)
        cp.cuda.Device().synchronize()
        return task, ""
    except Exception as error:
        return task, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


# ----------------------------------------------------------------------------- measuring
class Bench:
    def __init__(self, o: Options):
        self.bandwidth = copy_bandwidth(1 << 30)
        self.model = bench_decode.random_model(o)
        self.weights = o.weights
        if o.weights != "full":
            quantize_weights(self.model, o.weights)
        capacity = max(CONTEXTS) + 128
        self.cache = PagedCache(self.model, capacity, 64)
        self.each = -(-capacity // 64)
        self.cache.allocate(32 * self.each)
        some = cp.random.standard_normal(self.cache.arrays[0].shape[1:], dtype=cp.float32)
        some = cast_fwd(some, BF16).view(np.int16)
        for layer in self.cache.arrays[0]:
            layer.view(np.int16)[...] = some
        self.logits = {}  # of the library's choice, for a batch and context

    def step(self, B, T):
        ids = int32(np.arange(B) * 7 + 1)
        lengths = int32([T] * B)
        tables = int32(np.arange(B * self.each).reshape(B, self.each))
        edges = int32(range(B + 1))

        def step():
            with inference():
                sequences = self.cache.decode(lengths, tables, edges)
                return self.model.logits(self.model.hidden(ids, sequences)).data

        return step

    def __call__(self, candidate, B):
        """Return milliseconds per step and shares of the memory bound, for each context.

        Also the largest error of its logits.
        """
        use(candidate, self.weights)
        times = []
        shares = []
        errors = []
        for T in CONTEXTS:
            step = self.step(B, T)
            logits = step().get()
            known = self.logits.setdefault((B, T), logits)
            errors.append(float(np.abs(logits - known).max() / np.abs(known).max()))
            times.append(replay_ms(step, 20 if B == 1 else 10))
            nbytes = sum(bench_decode.step_bytes(self.model, B, T, 0))
            shares.append(nbytes / self.bandwidth * 1e3 / times[-1])
        return times, shares, max(errors)


def decide(bench, wrong, stage, alternatives, best):
    """Measure a stage's alternatives and print them -> the fastest"""
    results = []
    B = BATCHES.get(stage, 1)
    for value in (best[stage], *alternatives):
        if wrong.get((stage, value)):
            print(f"  {value}: {wrong[stage, value]}", flush=True)
            continue
        times, shares, error = bench({**best, stage: value}, B)
        columns = " ".join(
            f"{T}: {ms:.4f} ms ({share:.1%})" for T, ms, share in zip(CONTEXTS, times, shares)
        )
        good = error <= ALLOWED
        print(f"  {columns}  error {error:.1e}{'' if good else ' WRONG'}  {value}", flush=True)
        if good:
            results.append((math.prod(shares), value))
    if results:
        return {**best, stage: max(results, key=lambda r: r[0])[1]}
    return best


def main(o: Options) -> None:
    begun, clock = time.perf_counter(), lambda: f"{time.perf_counter() - begun:.0f} s"
    library = chosen(o.weights)
    if o.weights == "full":
        alternatives = ALTERNATIVES
    else:
        alternatives = ALTERNATIVES | CODES
    tasks = list(library.items())
    tasks += [(stage, value) for stage in o.stages for value in alternatives[stage]]
    with multiprocessing.get_context("spawn").Pool(o.jobs) as pool:
        compiling = pool.map_async(
            functools.partial(compile_one, weights=o.weights), tasks, chunksize=1
        )
        bench, best = Bench(o), dict(library)
        wrong = dict(compiling.get())
    for B in sorted({BATCHES.get(stage, 1) for stage in o.stages}):
        bench(library, B)  # the logits to compare with
    print(f"ready after {clock()}; copy {bench.bandwidth / 1e9:,.0f} GB/s", flush=True)
    for stage in o.stages:
        print(f"{stage}, batch {BATCHES.get(stage, 1)}:", flush=True)
        best = decide(bench, wrong, stage, alternatives[stage], best)
        print(f"  -> {best[stage]}   {clock()}", flush=True)
    for stage, value in best.items():
        print(
            f"{stage}: {value}{'' if value == library[stage] else '   not ' + str(library[stage])}"
        )
    for B in (1, 32):
        for name, candidate in (("chosen", library), ("best", best)):
            shares = ", ".join(f"{share:.1%}" for share in bench(candidate, B)[1])
            print(f"batch {B}, {name}: {shares} of the memory bound at {CONTEXTS}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
