"""FlashAttention in bf16 compared with PyTorch's SDPA (flash and cuDNN backends), in one run.

On compute capability 9.0 both versions of ours are measured, mma.sync and wgmma with TMA, whichever
is in use.

    python bench/bench_attention.py [--parts named random sweep]

All kernels are compiled beforehand, one process per core.

Operations: forward 4 B H T^2 D (two matrix products), half of it if causal; forward + backward 3.5
times that (five more products, whatever an implementation really computes). TFLOP/s are these
operations over time. All contestants read and write (B, T, H, D). Each runs inside CUDA graphs,
alternating with the others; the median of the turns is reported.
"""

import itertools
from dataclasses import dataclass, field

import cupy as cp
import ml_dtypes
import numpy as np
import tyro
from _attention import (
    WORK,
    capture,
    compile_all,
    compile_hopper,
    compile_mma_sync,
    in_turns,
    operations,
    report_compiled,
)


@dataclass(frozen=True)
class Shape:
    """Self-attention of B sequences of T tokens. G: key heads, by default H"""

    B: int
    H: int
    T: int
    D: int
    G: int | None = None
    causal: bool = True

    @property
    def key_heads(self) -> int:
        return self.G or self.H

    def __str__(self):
        text = f"B={self.B} H={self.H} G={self.key_heads} T={self.T} D={self.D}"
        return text if self.causal else f"{text} full"


NAMED = [
    Shape(B=32, H=12, T=256, D=32),
    Shape(B=32, H=12, T=256, D=64),
    Shape(B=16, H=12, T=1024, D=64),
    Shape(B=4, H=16, T=4096, D=64),
    Shape(B=8, H=16, T=1024, D=128),
    Shape(B=4, H=16, T=4096, D=128),
]
SWEEP = [2**i for i in range(7, 17)]  # T
TURNS = 7


@dataclass
class Options:
    parts: list[str] = field(default_factory=lambda: ["named", "random", "sweep"])
    turns: int = TURNS
    keep: bool = True  # append to bench/results
    alone: bool = False  # also the wgmma kernels without overlap of consecutive kernels
    heads: list[int] = field(default_factory=lambda: [64, 128])  # widths in the sweep
    mma_sync: bool = True  # in the sweep, measure these kernels in addition to wgmma's


# ----------------------------------------------------------------------------- contestants
def ours(q, k, v, do, causal, alone, mma_sync):
    """Return {"mma.sync": {"fwd": (replay, calls), "fwd+bwd": ...}, "wgmma": the same}.

    "wgmma" where there are such kernels.
    """
    from xtrain.kernels.attention import flash_attention
    from xtrain.kernels.runtime import launch as _launch

    contestants = {}
    usual = flash_attention.HOPPER
    fwd, both = both_ways(q, k, v, do, causal)
    for name in ("mma.sync", "wgmma", "alone")[: 2 + alone]:
        if name == "mma.sync" and flash_attention.use_hopper(q) and not mma_sync:
            continue
        flash_attention.HOPPER = name != "mma.sync"
        _launch.set_overlap(name != "alone")
        if name == "mma.sync" or flash_attention.use_hopper(q):
            contestants[name] = {"fwd": capture(fwd), "fwd+bwd": capture(both)}
    flash_attention.HOPPER = usual
    _launch.set_overlap(True)
    return contestants


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
    """Return {"fwd": (replay, calls), "fwd+bwd": ...} of torch's SDPA.

    {} if the backend does not support the shape.
    """
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
def compare(name: str, shape: Shape, options: Options, mma_sync: bool) -> None:
    """Measure all contestants on one shape and record the results.

    name: of the group of shapes.
    """
    from _timing import record

    from xtrain.kernels.attention import flash_attention

    B = shape.B
    T = shape.T
    D = shape.D
    causal = shape.causal
    draw = cp.random.default_rng(0)
    normal = lambda heads: draw.standard_normal((B, T, heads, D), cp.float32)
    make = lambda heads: normal(heads).astype(ml_dtypes.bfloat16)
    arrays = [make(n) for n in (shape.H, shape.key_heads, shape.key_heads, shape.H)]
    mine = ours(*arrays, causal, options.alone, mma_sync)
    used = "mma.sync"
    if flash_attention.HOPPER and "wgmma" in mine:
        used = "wgmma"
    calls = {run: n for run, (_, n) in mine[used].items()}
    peers = {b: theirs(b, arrays, causal, calls) for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION")}
    for run, factor in (("fwd", 1.0), ("fwd+bwd", 3.5)):
        contestants = {name: graphs[run] for name, graphs in mine.items()}
        contestants |= {b: peer[run] for b, peer in peers.items() if peer}
        times = in_turns(contestants, options.turns)
        work = factor * operations(B, T, shape.H, D, causal)
        rate = {n: work / t[0] / 1e9 for n, t in times.items()}
        line = " | ".join(f"{n.split('_')[0].lower()} {r:.0f}" for n, r in rate.items())
        print(f"{name:7} {shape} {run}: TFLOP/s {line}", flush=True)
        if options.keep:
            rounded = {n: round(r, 2) for n, r in rate.items()}
            record(
                "bench_attention",
                f"{name} {run}",
                shape=str(shape),
                dtype="bf16",
                ms=times[used][0],
                value=rate[used],
                unit="TFLOP/s",
                peer="torch SDPA flash",
                peer_value=rate.get("FLASH_ATTENTION"),
                kernels=used,
                mma_sync_value=rounded.get("mma.sync"),
                wgmma_value=rounded.get("wgmma"),
                cudnn_value=rounded.get("CUDNN_ATTENTION"),
                p20_p80=[round(float(x), 4) for x in times[used][1:]],
            )


def random_shapes(n: int = 10, seed: int = 0):
    """Draw shapes in which T is not a multiple of 64 and query heads share key heads."""
    draw = np.random.default_rng(seed)
    for _ in range(n):
        D = int(draw.choice([32, 64, 128]))
        T = int(np.exp(draw.uniform(np.log(100), np.log(5000))))
        T += T % 64 == 0
        G = int(draw.choice([1, 2, 4, 8]))
        group = int(draw.choice([1, 2, 3, 4]))
        B = max(1, int(draw.uniform(0.5, 2) * 2**15 / (T * max(1, G * group // 8))))
        yield Shape(B, G * group, T, D, G)


def compile_ahead(shapes: set[tuple[int, int]], mma_sync: bool) -> None:
    """Fill the kernel cache with the kernels for these (D, T)."""
    from xtrain.kernels.attention import flash_attention as fa
    from xtrain.kernels.attention import flash_attention_hopper as hopper

    one = cp.empty((1, 1, 1, 64), ml_dtypes.bfloat16)
    limit = fa.shared_limit(one)
    tasks = {}
    for (D, T), kind in itertools.product(sorted(shapes), WORK):
        wgmma = fa.use_hopper(cp.empty((1, 1, 1, D), ml_dtypes.bfloat16))
        if wgmma:
            tasks[compile_hopper, (kind, D, True, hopper.choose(kind, D, T, True).tiles)] = None
        if mma_sync or not wgmma:
            tasks[compile_mma_sync, (kind, D, True, fa.choose(kind, D, T, True, limit))] = None
    report_compiled({t: x for t, x in compile_all(tasks).items() if x[1]})


def main(options: Options) -> None:
    sweep = itertools.product(options.heads, SWEEP)
    runs = {
        "named": NAMED,
        "random": list(random_shapes()),
        "sweep": [Shape(B=max(1, 2**15 // T), H=16, T=T, D=D) for D, T in sweep],
    }
    compile_ahead({(s.D, s.T) for name in options.parts for s in runs[name]}, options.mma_sync)
    for name in options.parts:
        for shape in runs[name]:
            compare(name, shape, options, options.mma_sync or name != "sweep")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
