"""Find the fastest form of the memory-bound backward kernels on this GPU.

    python bench/tune_rows.py [--only rmsnorm qk_norm embedding] [--jobs 16]

Cases of bench_kernels.py, timed as there: in a graph, the second-level cache flushed before each run. Every candidate is
compiled beside the others, one process per core, and its result compared with that of the first one, the kernel without rings
or runs: the gradient of the embedding bit for bit, of weights, which may be added in another order, to 1e-5, of activations up
to a few elements that round the other way. `share` is the time of a copy of the same number of bytes over the time of the candidate; the product of the shares of
all cases of a group decides.

    rmsnorm     rmsnorm.RINGS: _rmsnorm_ring.Ring, for bf16, and for bf16 beside a float32 stream
    qk_norm     qk_norm_rope.RINGS: _qk_norm_rope_bwd.Ring; or other RESIDENT and BWD_THREADS there
    embedding   embedding.RUNS: _embedding_sum.Config

"without the second stage" leaves out what adds up the rows of `partial`: wrong, but it shows what that costs.
"""

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
import _cases_flat
import _cases_rows
from _cases import CASES, DTYPES, C, Case, D, H, N, double, draw
from _timing import copy_ms, graph_ms

from xtrain.kernels import _qk_norm_rope_bwd, embedding, qk_norm_rope, residual, rmsnorm

__all__ = ["_cases_flat", "_cases_rows"]  # importing them fills CASES
Group = Literal["rmsnorm", "mixed", "qk_norm", "embedding"]
BF16, EPS = DTYPES["bf16"], 1e-6
FEW = 64  # rows, where a kernel is only compiled
CLOSE = 1e-5  # of the largest element of a weight's gradient
ROUNDED = 1e-4  # of the norm of an activation's gradient: a few bf16 that round the other way
WITHOUT = "without the second stage"
Norm, Heads, Runs = rmsnorm.Ring, _qk_norm_rope_bwd.Ring, embedding.sums.Config
CANDIDATES = {
    "rmsnorm": [
        None,
        WITHOUT,
        Norm(2, 16, spread=False),
        Norm(2, 16),
        Norm(3, 16),
        Norm(3, 16, once=True),
        Norm(4, 16),
        Norm(2, 20),
        Norm(3, 20, once=True),
        Norm(4, 12),
    ],
    "mixed": [None, WITHOUT, Norm(2, 16), Norm(3, 16), Norm(3, 16, once=True), Norm(3, 12), Norm(2, 20)],
    "qk_norm": [
        None,
        WITHOUT,
        (24, 192),
        (21, 96),
        (24, 384),
        Heads(2, 192, 18),
        Heads(3, 192, 18),
        Heads(4, 192, 18),
        Heads(2, 192, 24),
        Heads(3, 192, 24),
        Heads(3, 192, 24, once=True),
        Heads(3, 96, 21),
        Heads(3, 192, 18, once=True),
    ],
    "embedding": [
        None,
        Runs(8, 4, 1, 192, 4, 4),
        Runs(8, 4, 1, 192, 4),
        Runs(8, 4, 1, 192, 5),
        Runs(4, 4, 1, 192, 5),
        Runs(16, 4, 1, 192, 5),
        Runs(32, 4, 1, 192, 5),
        Runs(8, 8, 1, 192, 3),
        Runs(16, 8, 1, 192, 3),
        Runs(8, 4, 2, 192, 3),
        Runs(16, 4, 2, 192, 3),
        Runs(8, 4, 1, 96, 10),
    ],
}  # fmt: skip


@dataclass
class Options:
    only: list[Group] = field(default_factory=lambda: list(CANDIDATES))
    jobs: int = min(os.cpu_count() or 1, 16)
    runs: int = 20


# ----------------------------------------------------------------------------- a candidate
def use(group, candidate):
    """From now on the launchers work like this."""
    if group in ("rmsnorm", "mixed"):
        rmsnorm.RINGS = dict.fromkeys(
            ("bf16", "mixed"), None if candidate == WITHOUT else candidate
        )
        rmsnorm.add_column_sums = SUMS if candidate != WITHOUT else lambda *_: None
    elif group == "qk_norm":
        plain = not isinstance(candidate, Heads)
        warps, threads = candidate if plain and isinstance(candidate, tuple) else (20, 192)
        _qk_norm_rope_bwd.RESIDENT, _qk_norm_rope_bwd.BWD_THREADS = {4: 24, 8: warps}, threads
        _qk_norm_rope_bwd.make_bwd_kernel.cache_clear()
        qk_norm_rope.RINGS = {"bfloat16": None if plain else candidate}
        qk_norm_rope.add_column_sums = SUMS if candidate != WITHOUT else lambda *_: None
    else:
        embedding.RUNS = candidate


SUMS = rmsnorm.add_column_sums


def launch_few(group, dtype, add_skip=False):
    """The kernel of a group on a few rows: it is compiled."""
    ones = lambda dtype, *shape: (
        cp.ones(shape, np.float32).astype(dtype) if dtype != BF16 else cp.zeros(shape, BF16)
    )
    if group == "embedding":
        ids = cp.zeros(FEW, np.int32)
        embedding.embedding_bwd(ones(dtype, FEW, C), ids, ones(np.float32, FEW, C))
    elif group == "qk_norm":
        table, w = ones(np.float32, FEW, D // 2), ones(np.float32, D)
        qkv, dq, rstd = (
            ones(dtype, FEW, 3 * C),
            ones(dtype, FEW, H, D),
            ones(np.float32, FEW, 2 * H),
        )
        arrays = (qkv, dq, dq, qkv, w, w, rstd, table, table, H, H, FEW, w, w)
        qk_norm_rope.qk_norm_rope_bwd(*arrays)
    else:
        dy, x = ones(dtype, FEW, C), ones(np.float32 if group == "mixed" else dtype, FEW, C)
        w, rstd = ones(np.float32, C), ones(np.float32, FEW)
        rmsnorm.rmsnorm_bwd(dy, x, w, rstd, w.copy(), dy if add_skip else None)


def compile_one(task):
    """In a worker: fills the disk cache. -> (task, "" or what went wrong)"""
    group, candidate, dtype, add_skip = task
    try:
        use(group, candidate)
        launch_few(group, DTYPES[dtype], add_skip)
        cp.cuda.Device().synchronize()
        return task, ""
    except Exception as error:
        return task, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def tasks_of(groups):
    for group in groups:
        for candidate in CANDIDATES[group]:
            for dtype in ("fp32", "bf16") if group == "embedding" else ("bf16",):
                for add_skip in (False, True) if group in ("rmsnorm", "mixed") else (False,):
                    yield group, candidate, dtype, add_skip


# ----------------------------------------------------------------------------- cases
def mixed_case(add_skip) -> Case:
    """As in bf16 training: the residual stream x is float32, gradients are bf16."""
    x, w, dy = draw(np.float32, N, C), draw(np.float32, C, seed=1), draw(BF16, N, C, seed=2)
    skip, dw = draw(BF16, N, C, seed=3) if add_skip else None, cp.zeros(C, np.float32)
    rstd = rmsnorm.rmsnorm_fwd(x, w, EPS)[1]

    def got():
        fresh = cp.zeros_like(dw)
        return residual.residual_rmsnorm_bwd(skip, dy, x, w, rstd, fresh), fresh

    run = lambda: residual.residual_rmsnorm_bwd(skip, dy, x, w, rstd, dw)
    return Case(x.nbytes + (3 if add_skip else 2) * dy.nbytes, run, got)


def cases_of(group):
    """-> name, a function that makes the case"""
    names = {
        "rmsnorm": ["rmsnorm_bwd", "residual_rmsnorm_bwd"],
        "qk_norm": ["qk_norm_rope_bwd"],
        "embedding": ["embedding_bwd", "embedding_bwd_text"],
    }
    if group == "mixed":
        for add_skip in (False, True):
            yield f"mixed{' residual' if add_skip else ''} bf16", lambda a=add_skip: mixed_case(a)
    for name in names.get(group, ()):
        for dtype in ("fp32", "bf16") if group == "embedding" else ("bf16",):
            yield f"{name} {dtype}", lambda n=name, d=dtype: CASES[n](DTYPES[d])


# ----------------------------------------------------------------------------- measuring
def differs(group, got, want):
    """ "" or how the results of two candidates differ; WRONG where they do by more than rounding."""
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    words = lambda a: a.reshape(-1).view(np.uint16 if a.itemsize == 2 else np.uint32)
    count, text = int((words(got[0]) != words(want[0])).sum()), ""
    if count:
        error = double(got[0]) - double(want[0])
        error = float(cp.linalg.norm(error.ravel()) / cp.linalg.norm(double(want[0]).ravel()))
        wrong = group == "embedding" or not error <= ROUNDED
        text = f"{'WRONG: ' * wrong}{count} elements of {got[0].size} differ, {error:.1e}"
    for g, w in zip(got[1:], want[1:]):
        error = float(abs(g - w).max() / abs(w).max())
        if not error <= CLOSE:
            text += f" WRONG: a weight's gradient differs by {error:.1e}"
    return text


def decide(group, wrong, o):
    """Prints a table for each case. -> the best candidate and its shares"""
    shares = {candidate: [] for candidate in CANDIDATES[group]}
    for name, make in cases_of(group):
        use(group, None)
        case, want = make(), None
        copy = copy_ms(case.nbytes)
        print(f"{name}: {case.nbytes / 1e6:.1f} MB, a copy takes {copy:.4f} ms", flush=True)
        for candidate in CANDIDATES[group]:
            why = next((w for t, w in wrong.items() if t[:2] == (group, candidate) and w), "")
            if not why:
                use(group, candidate)
                got = case.got()
                want = got if want is None else want
                why = differs(group, got, want) if candidate != WITHOUT else ""
                ms = min(graph_ms(case.run, o.runs)[0] for _ in range(2))
                if "WRONG" not in why and candidate != WITHOUT:
                    shares[candidate].append(copy / ms)
                print(f"  {copy / ms:6.3f} {ms:8.4f}  {candidate or 'as it was'} {why}", flush=True)
            else:
                print(f"  {candidate}: {why}", flush=True)
        del case, want
        cp.get_default_memory_pool().free_all_blocks()
    most = max(map(len, shares.values()))
    whole = {c: s for c, s in shares.items() if len(s) == most}
    best = max(whole, key=lambda c: math.prod(whole[c]))
    return best, shares[best], shares[None]


def main(o: Options) -> None:
    begun = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(o.jobs) as pool:
        compiling = pool.map_async(compile_one, list(tasks_of(o.only)), chunksize=1)
        copy_ms(1 << 28)  # while they compile
        wrong = dict(compiling.get())
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    found = {group: decide(group, wrong, o) for group in o.only}
    for group, (best, shares, before) in found.items():
        shown = [" ".join(f"{s:.3f}" for s in many) for many in (before, shares)]
        print(f"{group}: {best or 'as it was'}: {shown[0]} -> {shown[1]}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
