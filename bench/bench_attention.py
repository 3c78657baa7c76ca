"""FlashAttention in bf16 beside PyTorch's: SDPA with the flash backend and with the cuDNN backend, in one run.

On compute capability 9.0 both of ours take part, the mma.sync kernels and those with wgmma and TMA, whichever is in use.

    python bench/bench_attention.py [--parts named random sweep]

What the sweep starts is compiled beforehand, one process per core.

Operations: forward 4 B H T^2 D (two matrix products), half of it when causal; forward + backward 3.5 times that (five
more, whatever an implementation really computes). TFLOP/s are these operations over time. All contestants read and
write (B, T, H, D). Each runs inside CUDA graphs, in turns with the others; the median of the turns counts.
"""

import itertools
import math
import multiprocessing
import os
from dataclasses import dataclass, field

import cupy as cp
import ml_dtypes
import numpy as np
import tyro

NAMED = [  # B, H, T, D
    (32, 12, 256, 32), (32, 12, 256, 64), (16, 12, 1024, 64), (4, 16, 4096, 64), (8, 16, 1024, 128), (4, 16, 4096, 128),
]  # fmt: skip
SWEEP = [2**i for i in range(7, 17)]  # T
TURNS = 7


@dataclass
class Options:
    parts: list[str] = field(default_factory=lambda: ["named", "random", "sweep"])
    turns: int = TURNS
    keep: bool = True  # append to bench/results
    alone: bool = False  # also wgmma kernels each of which begins when the one before has ended
    heads: list[int] = field(default_factory=lambda: [64, 128])  # widths in the sweep
    mma_sync: bool = True  # in the sweep, those kernels beside wgmma's


# ----------------------------------------------------------------------------- timing
def capture(run, ms: float = 4.0):
    """-> (replay, calls per replay): a CUDA graph of as many run() as take about `ms` milliseconds"""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            run()
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        run()
        end.record()
        end.synchronize()
        calls = max(1, min(100, math.ceil(ms / max(cp.cuda.get_elapsed_time(start, end), 1e-3))))
        stream.begin_capture()
        for _ in range(calls):
            run()
        graph = stream.end_capture()
    null = cp.cuda.Stream.null
    return lambda: graph.launch(null), calls


def replay_ms(replay, calls: int) -> float:
    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record(cp.cuda.Stream.null)
    replay()
    end.record(cp.cuda.Stream.null)
    end.synchronize()
    return cp.cuda.get_elapsed_time(start, end) / calls


def repeat_ms(run, turns: int = 5) -> float:
    """Median milliseconds of run(), back to back in a CUDA graph: no launches, and no cold caches either."""
    replay, calls = capture(run)
    replay()
    return float(np.median([replay_ms(replay, calls) for _ in range(turns)]))


def in_turns(contestants: dict, turns: int) -> dict[str, np.ndarray]:
    """{name: (replay, calls)} -> {name: (median, p20, p80) milliseconds}"""
    times = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, (replay, calls) in contestants.items():
            ms = replay_ms(replay, calls)
            if turn:  # the first one warms up
                times[name].append(ms)
    return {name: np.percentile(x, [50, 20, 80]) for name, x in times.items()}


# ----------------------------------------------------------------------------- contestants
def ours(q, k, v, do, causal, alone, mma_sync):
    """-> {"mma.sync": {"fwd": (replay, calls), "fwd+bwd": ...}, "wgmma": the same, where there are such kernels}

    alone: and "alone", wgmma without overlap of one kernel with the next. mma_sync: also where wgmma is in use
    """
    from xtrain.kernels.attention import flash_attention
    from xtrain.kernels.runtime import launch as _launch

    found, usual = {}, flash_attention.HOPPER
    fwd, both = both_ways(q, k, v, do, causal)
    for name in ("mma.sync", "wgmma", "alone")[: 2 + alone]:
        if name == "mma.sync" and flash_attention.use_hopper(q) and not mma_sync:
            continue
        flash_attention.HOPPER = name != "mma.sync"
        _launch.set_overlap(name != "alone")
        if name == "mma.sync" or flash_attention.use_hopper(q):
            found[name] = {"fwd": capture(fwd), "fwd+bwd": capture(both)}
    flash_attention.HOPPER = usual
    _launch.set_overlap(True)
    return found


def both_ways(q, k, v, do, causal):
    from xtrain.kernels.attention.flash_attention import flash_attention_bwd, flash_attention_fwd

    scale = q.shape[-1] ** -0.5

    def both():
        o, lse = flash_attention_fwd(q, k, v, scale, causal)
        flash_attention_bwd(do, q, k, v, o, lse, scale, causal)

    return lambda: flash_attention_fwd(q, k, v, scale, causal), both


def torch_graph(run, calls):
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay, calls


def theirs(backend, arrays, causal, calls):
    """-> {"fwd": (replay, calls), "fwd+bwd": ...} of torch's SDPA, or {} where the backend refuses the shape"""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = (
        torch.from_dlpack(x.view(np.uint16)).view(torch.bfloat16).transpose(1, 2) for x in arrays
    )
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, **gqa
    )

    def forward():
        with torch.no_grad():
            sdpa()

    both = lambda: torch.autograd.grad(sdpa(), (q, k, v), do)
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return {
                "fwd": torch_graph(forward, calls["fwd"]),
                "fwd+bwd": torch_graph(both, calls["fwd+bwd"]),
            }
    except RuntimeError as error:
        print(f"{backend}: {str(error).splitlines()[0]}")
        return {}


# ----------------------------------------------------------------------------- one shape
def operations(B, T, H, D, causal):
    return 4 * B * H * T * T * D / (2 if causal else 1)


def compare(
    name, B, H, T, D, G=None, causal=True, turns=TURNS, keep=True, alone=False, mma_sync=True
):
    from _timing import record

    from xtrain.kernels.attention import flash_attention

    G = G or H
    draw = cp.random.default_rng(0)
    make = lambda heads: draw.standard_normal((B, T, heads, D), cp.float32).astype(
        ml_dtypes.bfloat16
    )
    arrays = [make(H), make(G), make(G), make(H)]
    mine = ours(*arrays, causal, alone, mma_sync)
    used = "wgmma" if flash_attention.HOPPER and "wgmma" in mine else "mma.sync"
    calls = {part: n for part, (_, n) in mine[used].items()}
    peers = {b: theirs(b, arrays, causal, calls) for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION")}
    shape = f"B={B} H={H} G={G} T={T} D={D}" + ("" if causal else " full")
    for part, factor in (("fwd", 1.0), ("fwd+bwd", 3.5)):
        contestants = {name: graphs[part] for name, graphs in mine.items()}
        contestants |= {b: peer[part] for b, peer in peers.items() if peer}
        times = in_turns(contestants, turns)
        rate = {n: factor * operations(B, T, H, D, causal) / t[0] / 1e9 for n, t in times.items()}
        line = " | ".join(f"{n.split('_')[0].lower()} {r:.0f}" for n, r in rate.items())
        print(f"{name:7} {shape} {part}: TFLOP/s {line}", flush=True)
        if keep:
            flash, cudnn = rate.get("FLASH_ATTENTION"), rate.get("CUDNN_ATTENTION")
            wgmma, usual = rate.get("wgmma"), rate.get("mma.sync")
            record(
                "bench_attention", f"{name} {part}", shape=shape, dtype="bf16", ms=times[used][0],
                value=rate[used], unit="TFLOP/s", peer="torch SDPA flash", peer_value=flash, kernels=used,
                mma_sync_value=usual and round(usual, 2), wgmma_value=wgmma and round(wgmma, 2),
                cudnn_value=cudnn and round(cudnn, 2),
                p20_p80=[round(float(x), 4) for x in times[used][1:]],
            )  # fmt: skip


def random_shapes(n: int = 10, seed: int = 0):
    """B, H, T, D, G: T is no multiple of 64, and query heads share key heads."""
    draw = np.random.default_rng(seed)
    for _ in range(n):
        D = int(draw.choice([32, 64, 128]))
        T = int(np.exp(draw.uniform(np.log(100), np.log(5000))))
        T += T % 64 == 0
        G, group = int(draw.choice([1, 2, 4, 8])), int(draw.choice([1, 2, 3, 4]))
        B = max(1, int(draw.uniform(0.5, 2) * 2**15 / (T * max(1, G * group // 8))))
        yield B, G * group, T, D, G


def compile_ahead(shapes: set[tuple[int, int]], mma_sync: bool) -> None:
    """Fill the kernel cache with what these (D, T) start."""
    import _hopper_tiles
    import tune_flash_attention as tune

    from xtrain.kernels.attention import flash_attention as fa

    one = cp.empty((1, 1, 1, 64), ml_dtypes.bfloat16)
    limit, tasks = fa.shared_limit(one), {}
    for (D, T), kind in itertools.product(sorted(shapes), tune.WORK):
        wgmma = fa.use_hopper(cp.empty((1, 1, 1, D), ml_dtypes.bfloat16))
        if wgmma:
            config = _hopper_tiles.hopper.choose(kind, D, T, True)[:5]
            tasks[_hopper_tiles.compile_one, (kind, D, True, config)] = None
        if mma_sync or not wgmma:
            tasks[tune.compile_one, (kind, D, True, fa.choose(kind, D, T, True, limit))] = None
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for result in [pool.apply_async(compile, (task,)) for compile, task in tasks]:
            task, _, wrong = result.get()
            if wrong:
                print(task, wrong, flush=True)


def main(options: Options) -> None:
    more = {"turns": options.turns, "keep": options.keep, "alone": options.alone}
    runs = {
        "named": [(B, H, T, D, None) for B, H, T, D in NAMED],
        "random": list(random_shapes()),
        "sweep": [
            (max(1, 2**15 // T), 16, T, D, None) for D, T in itertools.product(options.heads, SWEEP)
        ],
    }
    compile_ahead({(D, T) for p in options.parts for *_, T, D, _ in runs[p]}, options.mma_sync)
    for part in options.parts:
        mma_sync = options.mma_sync or part != "sweep"
        for B, H, T, D, G in runs[part]:
            compare(part, B, H, T, D, G, **more, mma_sync=mma_sync)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
