"""Every memory-bound kernel compared with a copy of the same number of bytes, and with PyTorch.

    python bench/bench_kernels.py [--only swiglu adamw] [--dtypes bf16] [--no-torch]

A kernel with little arithmetic can at best be as fast as a copy that moves its bytes: each input is
read once, each output written once (`nbytes` of each case). `share` is the time of that copy
divided by the time of the kernel. Both are measured in this run, inside a CUDA graph, with the L2
cache flushed before each. PyTorch, eager and compiled, is timed in the same way, its backward
through autograd. Results are checked against the reference in float64 before they are timed.

To add a kernel, write a case: see _cases.py.
"""

import re
import traceback
from dataclasses import dataclass, field

import _cases_engine
import _cases_flat
import _cases_fp8
import _cases_rows
import cupy as cp
import tyro
from _cases import CASES, DTYPES, Case, Peer, double, tensor
from _timing import copy_ms, graph_ms, record

# importing them fills CASES
__all__ = ["_cases_engine", "_cases_flat", "_cases_fp8", "_cases_rows"]
TOLERANCE = {"fp32": 2e-6, "bf16": 6e-3}
ONE_DTYPE = {
    "cast_narrow",
    "cast_widen",
    "adamw",
    "adamw_with_copy_and_zeros",
    "grad_norm_and_factor",
    "embedding_plan",
}
BACKWARD = re.compile("_bwd|cross_entropy")  # at least 0.85 of the copy; the others 0.90


# ----------------------------------------------------------------------------- measure
def compare(case: Case, dtype: str) -> float:
    """Return the largest |got - want| / |want| over all outputs.

    Raises AssertionError if one exceeds TOLERANCE.
    """
    got = case.got() if case.got else case.run()
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, case.want()))
    worst = 0.0
    for k, r in zip(got, want):
        if r is None:
            continue
        r = cp.asarray(r)
        error = float(cp.linalg.norm((double(k) - r).ravel()) / cp.linalg.norm(r.ravel()))
        half = k.dtype == DTYPES["bf16"] or dtype == "bf16"
        # A NaN never passes.
        assert error <= TOLERANCE["bf16" if half else "fp32"], f"error {error:.2e}"
        worst = max(worst, error)
    return worst


def torch_ms(peer: Peer, compiled: bool, runs: int) -> float:
    """Return the median milliseconds of PyTorch, eager or compiled"""
    import torch

    inputs = [tensor(x) for x in peer.inputs]
    f = torch.compile(peer.f) if compiled else peer.eager or peer.f
    if peer.dy is None:
        return float(graph_ms(lambda: f(*inputs), runs, torch)[0])
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    if not peer.dy:  # forward and backward of a loss
        return float(graph_ms(lambda: torch.autograd.grad(f(*inputs), leaves), runs, torch)[0])
    dy = [tensor(x) for x in peer.dy]
    outputs = []

    def backward():
        if not outputs:  # in the first call: this must run on the stream that is captured later
            y = f(*inputs)
            outputs.extend(y if isinstance(y, tuple) else (y,))
        return torch.autograd.grad(outputs, leaves, dy, retain_graph=True, allow_unused=True)

    return float(graph_ms(backward, runs, torch)[0])


def attempt(f, *args):
    """Return f(*args); if it raises, print the reason and return None."""
    try:
        return f(*args)
    except Exception as error:
        lines = str(error).strip().splitlines() or [traceback.format_exc().splitlines()[-1]]
        print(f"    not measured: {type(error).__name__}: {lines[0][:150]}", flush=True)
        return None


def measure(name: str, dtype: str, o) -> dict | None:
    """Check and time one case, and return its record.

    None if the dtype is not supported or the result is wrong.
    """
    try:
        case = CASES[name](DTYPES[dtype])
        error = compare(case, dtype)
    except TypeError as refused:
        print(f"{name} {dtype}: not supported: {str(refused)[:120]}", flush=True)
        return None
    except Exception as wrong:
        print(f"{name} {dtype}: WRONG, not timed: {type(wrong).__name__}: {wrong}", flush=True)
        return None
    ms = graph_ms(case.run, o.runs)
    copy = copy_ms(case.nbytes)
    naive = attempt(graph_ms, case.naive, o.runs) if case.naive else None
    eager = None
    compiled = None
    if o.torch and case.peer:
        eager = attempt(torch_ms, case.peer, False, o.runs)
        compiled = attempt(torch_ms, case.peer, True, o.runs)
    best = min((t for t in (eager, compiled) if t), default=None)
    gbs = lambda t: case.nbytes / t / 1e6
    line = record(
        "bench_kernels",
        name,
        shape=case.shape,
        dtype=dtype,
        ms=ms[0],
        value=gbs(ms[0]),
        unit="GB/s",
        peer="torch" if best else None,
        peer_value=gbs(best) if best else None,
        p20_p80=[round(float(t), 4) for t in ms[1:]],
        nbytes=case.nbytes,
        copy_ms=round(copy, 4),
        share=round(copy / ms[0], 3),
        error=float(f"{error:.1e}"),
        naive_ms=round(float(naive[0]), 4) if naive is not None else None,
        torch_eager_ms=round(eager, 4) if eager else None,
        torch_compile_ms=round(compiled, 4) if compiled else None,
    )
    return line


@dataclass
class Options:
    # Regular expressions of the cases' names; none: all.
    only: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=lambda: ["fp32", "bf16"])
    torch: bool = True
    runs: int = 20


def main(o: Options) -> None:
    lines = []
    if o.torch:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # the backward runs more than once
    for name in CASES:
        if o.only and not any(re.search(pattern, name) for pattern in o.only):
            continue
        for dtype in o.dtypes[:1] if name in ONE_DTYPE else o.dtypes:
            lines.append(measure(name, dtype, o))
            cp.get_default_memory_pool().free_all_blocks()
            if o.torch:
                torch.cuda.empty_cache()
    print(
        f"\n{'kernel':28}{'dtype':6}{'ms':>8}{'GB/s':>7}{'copy':>8}{'share':>7}"
        f"{'naive':>9}{'eager':>9}{'compile':>9}"
    )
    for line in filter(None, lines):
        least = 0.85 if BACKWARD.search(line["name"]) else 0.90
        times = (line["naive_ms"], line["torch_eager_ms"], line["torch_compile_ms"])
        cells = "".join(f"{t:9.4f}" if t else f"{'-':>9}" for t in times)
        print(
            f"{line['name']:28}{line['dtype']:6}{line['ms']:8.4f}{line['value']:7.0f}"
            f"{line['copy_ms']:8.4f}{line['share']:7.2f}{cells}"
            f"{'' if line['share'] >= least else '  < ' + str(least)}"
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
