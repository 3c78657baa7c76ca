"""FlashAttention forward on compute capability 9.0, built up in the steps of lesson 23: what does each of them give?

    python bench/bench_hopper_steps.py

    mma.sync        the kernel of lesson 14
    wgmma           tiles by TMA, a thread that loads, products of a warpgroup; small tiles, a block for each tile of
                    queries, and nothing runs beside the exponentials
    larger tiles    the tiles of the table
    beside          the exponentials run beside the product p V of the tile before
    persistent      as many blocks as the GPU holds, which take one tile of queries after the other: the kernel in use

Every step has those before it, and is compared with the first one. All take turns, each in a CUDA graph of its own.
"""

import contextlib
import multiprocessing
import os
from dataclasses import dataclass

import _hopper_tiles
import cupy as cp
import ml_dtypes
import numpy as np
import tyro
from bench_attention import capture, in_turns, operations

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper

B, H, T = 4, 16, 4096
SMALL = {64: (64, 1, 3, 3, 1, 0), 128: (64, 1, 2, 2, 1, 0)}  # as in the table
ENDLESS = 1 << 20  # multiprocessors, for a grid with a block for every tile


@dataclass
class Options:
    heads: tuple[int, ...] = (64, 128)
    turns: int = 7
    keep: bool = True  # append to bench/results


@contextlib.contextmanager
def nothing_beside():
    """Every wait of the forward kernel is for all products: none is under way during the exponentials."""
    usual = hopper.make_wait

    def forget():
        hopper.make_consumer.cache_clear()
        hopper.make_fwd_kernel.cache_clear()

    forget()
    hopper.make_wait = lambda n, pending: usual(n, 0)
    try:
        yield
    finally:
        hopper.make_wait = usual
        forget()


def compile_one(task):
    """In a worker: fills the kernel cache. task: D, config, may products run beside the exponentials?"""
    D, config, beside = task
    with contextlib.nullcontext() if beside else nothing_beside():
        return _hopper_tiles.compile_one(("fwd", D, True, config))


def compile_all(heads) -> None:
    tasks = []
    for D in heads:
        large = hopper.choose("fwd", D, T, True)
        tasks += [(D, SMALL[D], False), (D, large, False), (D, large, True)]
    with multiprocessing.get_context("spawn").Pool(min(len(tasks), os.cpu_count())) as pool:
        for task, local, wrong in pool.imap_unordered(compile_one, tasks):
            if local or wrong:
                print(task, local, wrong, flush=True)


def steps(D, arrays):
    """-> {step: (start, o)}; the kernels of earlier steps are kept alive in `start`."""
    q, k, v = arrays
    scale, (multiprocessors, cache) = np.float32(D**-0.5), fa._gpu(q)
    o = {name: cp.empty_like(q) for name in ("wgmma", "larger tiles", "beside", "persistent")}
    lse = cp.empty((B, H, T), np.float32)
    large = hopper.choose("fwd", D, T, True)

    def filler(name, config, blocks):
        kernel = hopper.make_fwd_kernel(
            D, True, config[:5]
        )  # kept: its module must not be unloaded

        def start(kernel=kernel):
            hopper.fill_o(o[name], lse, q, k, v, scale, True, (blocks, cache), config)

        start()
        return capture(start), kernel

    def mma_sync():
        fa.HOPPER = False
        try:
            return fa.flash_attention_fwd(q, k, v, scale, True)[0]
        finally:
            fa.HOPPER = True

    right = mma_sync()
    found = {"mma.sync": (capture(mma_sync), None)}
    with nothing_beside():
        found["wgmma"] = filler("wgmma", SMALL[D], ENDLESS)
        found["larger tiles"] = filler("larger tiles", large, ENDLESS)
    found["beside"] = filler("beside", large, ENDLESS)
    found["persistent"] = filler("persistent", large, multiprocessors)
    cp.cuda.Device().synchronize()
    for name, got in o.items():
        got, want = got.astype(cp.float32), right.astype(cp.float32)
        error = float(cp.linalg.norm(got - want) / cp.linalg.norm(want))
        assert error < 2e-2, f"{name}: off by {error:.1e} of mma.sync's result"
    return found


def main(options: Options) -> None:
    from _timing import record

    compile_all(options.heads)
    for D in options.heads:
        draw = cp.random.default_rng(0)
        arrays = [
            draw.standard_normal((B, T, H, D), cp.float32).astype(ml_dtypes.bfloat16)
            for _ in range(3)
        ]
        found = steps(D, arrays)
        times = in_turns({name: graph for name, (graph, _) in found.items()}, options.turns)
        shape = f"B={B} H={H} T={T} D={D}"
        for name, (ms, low, high) in times.items():
            rate = operations(B, T, H, D, True) / ms / 1e9
            print(f"{name:13} {shape}  {ms:.4f} ms  {rate:4.0f} TFLOP/s", flush=True)
            if options.keep:
                record(
                    "bench_hopper_steps", f"fwd {name}", shape=shape, dtype="bf16", ms=ms, value=rate, unit="TFLOP/s",
                    p20_p80=[round(float(x), 4) for x in (low, high)],
                )  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Options))
