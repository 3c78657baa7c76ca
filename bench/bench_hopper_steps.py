"""FlashAttention forward on compute capability 9.0: what each step of lesson 23 gains.

    python bench/bench_hopper_steps.py

    mma.sync        the kernel of lesson 14
    wgmma           tiles by TMA, a producer thread, products of a warpgroup; small tiles, one block
                    per tile of queries, and nothing overlaps the exponentials
    larger tiles    the tiles of the table
    beside          the exponentials overlap the product p V of the previous tile
    persistent      as many blocks as the GPU holds, which take one tile of queries after another:
                    the kernel in use

Every step includes the previous ones, and its result is compared with that of the first. The steps
alternate, each in its own CUDA graph.
"""

import contextlib
from dataclasses import dataclass

import cupy as cp
import ml_dtypes
import numpy as np
import tyro
from _attention import capture, compile_all, compile_hopper, in_turns, operations, report_compiled

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention.flash_attention_hopper import Gpu
from xtrain.kernels.attention.flash_attention_hopper_table import HopperPlan, HopperTiles

B = 4
H = 16
T = 4096
SMALL = {
    64: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=3, blocks=3, own=1), planes=0),
    128: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=2, blocks=2, own=1), planes=0),
}
UNLIMITED = 1 << 20  # multiprocessors, for a grid with one block per tile


@dataclass
class Options:
    heads: tuple[int, ...] = (64, 128)
    turns: int = 7
    keep: bool = True  # append to bench/results


@contextlib.contextmanager
def no_overlap():
    """Make every wait of the forward kernel wait for all products.

    None is in flight during the exponentials.
    """
    usual = hopper.make_wgmma_wait

    def clear():
        hopper.make_consumer.cache_clear()
        hopper.make_fwd_kernel.cache_clear()

    clear()
    hopper.make_wgmma_wait = lambda n, pending: usual(n, 0)
    try:
        yield
    finally:
        hopper.make_wgmma_wait = usual
        clear()


def compile_step(task):
    """Fill the kernel cache, in a worker.

    task: D, plan, True if products overlap the exponentials.
    """
    D, plan, overlap = task
    with contextlib.nullcontext() if overlap else no_overlap():
        _, local, wrong = compile_hopper(("fwd", D, True, plan.tiles))
    return task, local, wrong


def compile_steps(heads) -> None:
    tasks = []
    for D in heads:
        large = hopper.choose("fwd", D, T, True)
        tasks += [(D, SMALL[D], False), (D, large, False), (D, large, True)]
    report_compiled(compile_all((compile_step, task) for task in tasks))


def steps(D, arrays):
    """Return {step: (start, o)}; the kernels of earlier steps are kept alive in `start`."""
    q, k, v = arrays
    scale = np.float32(D**-0.5)
    gpu = fa.gpu_of(q)
    o = {name: cp.empty_like(q) for name in ("wgmma", "larger tiles", "beside", "persistent")}
    lse = cp.empty((B, H, T), np.float32)
    large = hopper.choose("fwd", D, T, True)

    def filler(name, plan, multiprocessors):
        # kept: its module must not be unloaded
        kernel = hopper.make_fwd_kernel(D, True, plan.tiles)
        size = Gpu(multiprocessors, gpu.l2_bytes)

        def start(kernel=kernel):
            hopper.fill_o(o[name], lse, q, k, v, scale, True, size, plan)

        start()
        return capture(start), kernel

    def mma_sync():
        fa.HOPPER = False
        try:
            return fa.flash_attention_fwd(q, k, v, scale, True)[0]
        finally:
            fa.HOPPER = True

    right = mma_sync()
    contestants = {"mma.sync": (capture(mma_sync), None)}
    with no_overlap():
        contestants["wgmma"] = filler("wgmma", SMALL[D], UNLIMITED)
        contestants["larger tiles"] = filler("larger tiles", large, UNLIMITED)
    contestants["beside"] = filler("beside", large, UNLIMITED)
    contestants["persistent"] = filler("persistent", large, gpu.multiprocessors)
    cp.cuda.Device().synchronize()
    for name, got in o.items():
        got, want = got.astype(cp.float32), right.astype(cp.float32)
        error = float(cp.linalg.norm(got - want) / cp.linalg.norm(want))
        assert error < 2e-2, f"{name}: off by {error:.1e} of mma.sync's result"
    return contestants


def main(options: Options) -> None:
    from _timing import record

    compile_steps(options.heads)
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
                    "bench_hopper_steps",
                    f"fwd {name}",
                    shape=shape,
                    dtype="bf16",
                    ms=ms,
                    value=rate,
                    unit="TFLOP/s",
                    p20_p80=[round(float(x), 4) for x in (low, high)],
                )


if __name__ == "__main__":
    main(tyro.cli(Options))
