"""Candidates for the kernels of compute capability 9.0, measured.

A shape is (D, T, causal, query heads per key head). Candidates alternate on a warm GPU, each in its
own CUDA graph; the median of the turns is used. Before that, one sequence's first key head is
compared with attention in float32 by plain CuPy, and the rest with the results of the current
table. The table has an entry per class of lengths: the winner is the candidate whose times,
relative to the best of each shape, have the smallest sum over the shapes of the class.

    tune="python bench/tune_flash_attention.py --hopper --heads 128"
    $tune                                    about 50 seconds with 16 cores; the same for 64
    $tune --kernels fwd --lengths 198 400    half of that

    python bench/_hopper_tiles.py            only compiles the kernels of the table into the kernel
                                             cache, one process per core
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import cupy as cp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from _attention import (
    WORK,
    capture,
    compile_all,
    compile_hopper,
    in_turns,
    operations,
    report_compiled,
)

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention import flash_attention_hopper_bwd as backward
from xtrain.kernels.attention import flash_attention_hopper_table
from xtrain.kernels.attention.flash_attention_hopper_table import TABLE, HopperPlan, HopperTiles
from xtrain.kernels.runtime import launch as _launch

TABLE_FILE = Path(flash_attention_hopper_table.__file__)
SHAPES = {198: (217, 4), 256: (32, 12), 400: (40, 12), 1024: (16, 12), 4096: (4, 16)}  # T -> B, H
GROUPS = {1024: (1, 4)}  # query heads per key head; elsewhere one
CLASSES = (256, 512, 2048, None)  # the longest T of each


def plan(step: int, warpgroups: int, stages: int, blocks: int, own: int, planes: int) -> HopperPlan:
    return HopperPlan(HopperTiles(step, warpgroups, stages, blocks, own), planes)


def label(p: HopperPlan) -> str:
    """Return the arguments of `plan`, as in the names of records."""
    t = p.tiles
    return str((t.step, t.warpgroups, t.stages, t.blocks, t.own, p.planes))


# (step, warpgroups, stages, blocks, own, planes). The step of dkdv divides PAD.
CANDIDATES = {
    ("fwd", 64): [
        (64, 1, 3, 3, 1, 0), (64, 1, 3, 3, 1, 1), (64, 1, 3, 3, 2, 0), (64, 1, 3, 3, 2, 1),
        (32, 1, 3, 4, 2, 1), (128, 1, 2, 2, 1, 0), (128, 1, 2, 2, 2, 0), (128, 3, 2, 1, 1, 0),
        (128, 3, 2, 1, 2, 0),
    ],
    ("fwd", 128): [
        (64, 1, 2, 2, 1, 0), (64, 1, 2, 2, 1, 1), (64, 1, 2, 2, 2, 0), (64, 1, 2, 2, 2, 1),
        (32, 1, 4, 2, 2, 0), (32, 1, 4, 2, 2, 1), (64, 2, 4, 1, 2, 1), (128, 2, 2, 1, 1, 0),
        (128, 2, 2, 1, 2, 0), (128, 2, 2, 1, 2, 1),
    ],
    ("dq", 64): [
        (64, 1, 3, 2, 1, 0), (64, 1, 4, 2, 1, 0), (64, 1, 4, 2, 1, 1), (64, 1, 4, 2, 2, 0),
        (64, 1, 4, 2, 2, 1), (128, 2, 3, 1, 1, 0), (128, 2, 3, 1, 2, 0),
    ],
    ("dq", 128): [
        (64, 2, 4, 1, 1, 0), (64, 2, 4, 1, 1, 1), (64, 1, 2, 2, 1, 0), (64, 1, 2, 2, 1, 1),
        (32, 1, 2, 2, 2, 1), (64, 2, 2, 1, 2, 0),
    ],
    ("dkdv", 64): [
        (64, 1, 4, 2, 1, 0), (64, 1, 4, 2, 1, 1), (64, 1, 4, 2, 2, 0), (64, 1, 4, 2, 2, 1),
        (64, 1, 3, 2, 2, 0),
    ],
    ("dkdv", 128): [
        (64, 2, 2, 1, 1, 0), (64, 2, 2, 1, 1, 1), (64, 2, 2, 1, 2, 0), (32, 1, 3, 2, 1, 1),
        (32, 1, 2, 2, 2, 1),
    ],
}  # fmt: skip


def candidates(kind: str, D: int) -> list[HopperPlan]:
    return [plan(*numbers) for numbers in CANDIDATES[kind, D]]


# ----------------------------------------------------------------------------- one shape
def arrays_of(T, D, group):
    B, H = SHAPES[T]
    draw = cp.random.default_rng(0)
    heads = H, H // group, H // group, H
    make = lambda n: draw.standard_normal((B, T, n, D), cp.float32).astype(ml_dtypes.bfloat16)
    return [make(n) for n in heads]


def exact(arrays, causal):
    """Return {"o", "dq", "dk", "dv"} of the first sequence's first key head.

    float32, (heads, T, D)
    """
    group = arrays[0].shape[2] // arrays[1].shape[2]
    heads = [x[0].transpose(1, 0, 2).astype(cp.float32) for x in arrays]
    q, k, v, do = (x[: group if x is heads[0] or x is heads[3] else 1] for x in heads)
    scale = np.float32(q.shape[2] ** -0.5)
    s = q @ k.transpose(0, 2, 1) * scale
    if causal:
        s = cp.where(cp.tri(s.shape[1], dtype=bool), s, np.float32(-np.inf))
    p = cp.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = p @ v
    ds = p * (do @ v.transpose(0, 2, 1) - (do * o).sum(-1, keepdims=True)) * scale
    dk, dv = ((x.transpose(0, 2, 1) @ y).sum(0, keepdims=True) for x, y in ((ds, q), (p, do)))
    return {"o": o, "dq": ds @ k, "dk": dk, "dv": dv}


def distance(x, y):
    x = x.astype(cp.float32)
    y = y.astype(cp.float32)
    return float(cp.linalg.norm(x - y) / cp.linalg.norm(y))


def present(arrays, causal, kinds):
    """Return ({name: result}, lse) with the plans of the table, compared with `exact`."""
    q, k, v, do = arrays
    scale = np.float32(q.shape[3] ** -0.5)
    o, lse = fa.flash_attention_fwd(q, k, v, scale, causal)
    results = {"o": o}
    if set(kinds) != {"fwd"}:
        gradients = fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal)
        results |= dict(zip(("dq", "dk", "dv"), gradients))
    right = exact(arrays, causal)
    for name, x in results.items():
        first_heads = x[0].transpose(1, 0, 2)[: len(right[name])]
        error = distance(first_heads, right[name])
        assert error < 1e-2, f"{name} with the plan in use is off by {error:.1e}"
    return results, lse


def kinds_of(arrays, causal, kinds):
    """Return {kind: (start(plan), [(an output, its expected value)])}."""
    q, k, v, do = arrays
    scale = np.float32(q.shape[3] ** -0.5)
    gpu = fa.gpu_of(q)
    right, lse = present(arrays, causal, kinds)
    new = {name: cp.empty_like(x) for name, x in right.items()}
    new_lse = cp.empty_like(lse)
    inputs = (q, k, v, scale, causal, gpu)
    stats = None
    if len(right) > 1:
        stats = backward.compute_statistics(do, right["o"], lse)
    starts = {
        "fwd": lambda plan: hopper.fill_o(new["o"], new_lse, *inputs, plan),
        "dq": lambda plan: backward.fill_dq(new["dq"], stats, do, *inputs, plan),
        "dkdv": lambda plan: backward.fill_dkdv(new["dk"], new["dv"], stats, do, *inputs, plan),
    }
    outputs = {"fwd": ("o",), "dq": ("dq",), "dkdv": ("dk", "dv")}
    return {kind: (starts[kind], [(new[n], right[n]) for n in outputs[kind]]) for kind in kinds}


def measure(kind, D, T, causal, group, start, pairs, turns):
    """Return {plan: median ms} of the candidates whose results are right."""
    contestants = {}
    for p in candidates(kind, D):
        for got, _ in pairs:
            got.fill(0)
        # here dK, dV do not follow the dQ kernel, which waits for its predecessor
        _launch.set_overlap(False)
        try:
            start(p)
            cp.cuda.Device().synchronize()
        except RuntimeError as error:
            print(f"{kind} D {D} {label(p)}: {str(error)[:100]}")
            continue
        finally:
            _launch.set_overlap(True)
        errors = [distance(x, y) for x, y in pairs]
        if not max(errors) < 1e-2:
            print(f"{kind} D {D} {label(p)}: wrong, errors {errors}")
            continue
        contestants[p] = capture(lambda p=p: start(p))
    times = {}
    if contestants:
        times = {p: float(t[0]) for p, t in in_turns(contestants, turns).items()}
    B, H = SHAPES[T]
    work = WORK[kind] * operations(B, T, H, D, causal)
    shape = f"D {D} T {T} {'causal' if causal else 'full'} group {group}"
    for p, ms in sorted(times.items(), key=lambda item: item[1]):
        rate = work / ms / 1e9
        used = "  in use" if p == hopper.choose(kind, D, T, causal) else ""
        print(f"{kind:5} {shape} {label(p):21} {ms:.4f} ms {rate:5.0f} TFLOP/s{used}", flush=True)
        _record(kind, shape, p, ms, rate)
    return times


def _record(kind, shape, plan, ms, rate):
    from _timing import record

    record(
        "tune_flash_attention",
        f"hopper {kind} {label(plan)}",
        shape=shape,
        dtype="bf16",
        ms=ms,
        value=rate,
        unit="TFLOP/s",
    )


def measure_statistics(arrays, turns=5) -> None:
    """Measure one row and four rows per thread; both give the same bits."""
    q, k, v, do = arrays
    o, lse = fa.flash_attention_fwd(q, k, v, np.float32(q.shape[3] ** -0.5), True)
    start = lambda rows: backward.compute_statistics(do, o, lse, rows)
    assert cp.array_equal(start(1).array, start(4).array)
    times = in_turns({rows: capture(lambda rows=rows: start(rows)) for rows in (1, 4)}, turns)
    print("statistics", q.shape, {rows: f"{t[0]:.4f} ms" for rows, t in times.items()}, flush=True)


# ----------------------------------------------------------------------------- all of them
def tune(heads, kinds, lengths, causal, turns=5) -> dict:
    """Return {(kind, D, causal): {longest T of a class: plan}}."""
    begin = time.monotonic()
    keys = [(kind, D, mode) for kind in kinds for D in heads for mode in causal]
    tasks = [(*key, p.tiles) for key in keys for p in candidates(*key[:2])]
    report_compiled(compile_all(dict.fromkeys((compile_hopper, task) for task in tasks)))
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    times: dict = {key: {} for key in keys}  # -> {class: {(T, group): {plan: ms}}}
    for D in heads:
        for T in lengths:
            for group in GROUPS.get(T, (1,)):
                arrays = arrays_of(T, D, group)
                for mode in causal:
                    for kind, (start, pairs) in kinds_of(arrays, mode, kinds).items():
                        shapes = times[kind, D, mode].setdefault(class_of(T), {})
                        measured = measure(kind, D, T, mode, group, start, pairs, turns)
                        shapes[T, group] = measured
                if set(kinds) != {"fwd"}:
                    measure_statistics(arrays)
    best = {key: {c: fastest(shapes) for c, shapes in row.items()} for key, row in times.items()}
    report(times, best)
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)
    return best


def class_of(T):
    return next(longest for longest in CLASSES if longest is None or longest >= T)


def fastest(shapes):
    """Return the plan with the smallest sum of times, each relative to the best of its shape.

    shapes: {shape: {plan: ms}}.
    """
    everywhere = set.intersection(*(set(times) for times in shapes.values()))
    cost = lambda plan: sum(t[plan] / min(t.values()) for t in shapes.values())
    return min(sorted(everywhere, key=astuple), key=cost)


def report(times, best) -> None:
    """Print what each class gains over the plan in use."""
    for (kind, D, mode), row in best.items():
        for limit, plan in row.items():
            gains = []
            for (T, group), ms in times[kind, D, mode][limit].items():
                used = ms.get(hopper.choose(kind, D, T, mode))
                gains.append(f"T {T} group {group}: {used / ms[plan] if used else 0:.3f}")
            name = f"{kind} D {D} {'causal' if mode else 'full'} to {limit}"
            print(f"best {name}: {label(plan)}, times the rate in use: {', '.join(gains)}")


def merge(best: dict) -> dict:
    """Return the table with the new measurements; other classes keep their plan."""
    table = dict(TABLE)
    for key, row in best.items():
        classes = [(limit, row.get(limit) or _current(key, limit)) for limit in CLASSES]
        table[key] = merged_classes(classes)
    return table


def _current(key, limit):
    rows = TABLE[key].items()
    return next(p for longest, p in rows if longest is None or (limit and longest >= limit))


def merged_classes(classes: list[tuple[int | None, object]]) -> dict:
    """Return {longest T: choice} of pairs (longest T, choice), with equal neighbours merged."""
    following = [choice for _, choice in classes[1:]] + [None]
    return {limit: choice for (limit, choice), after in zip(classes, following) if choice != after}


def write_table(file: Path, table: dict, show: Callable) -> str:
    """Replace GPU and TABLE in a file of tuned tiles, and return its new text.

    show: returns the source text of an entry.
    """
    text = file.read_text(encoding="utf-8")
    head, _, tail = text.partition("GPU = ")
    annotation = tail[tail.index("TABLE: ") : tail.index(" = {")]
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    lines = []
    for key in sorted(table, key=lambda key: (list(WORK).index(key[0]), key[1:])):
        rows = "".join(f"        {longest}: {show(x)},\n" for longest, x in table[key].items())
        lines.append(f'    ("{key[0]}", {key[1]}, {key[2]}): {{\n{rows}    }},\n')
    text = f'{head}GPU = "{name}"\n{annotation} = {{\n{"".join(lines)}}}\n'
    text = text.replace(", q_in_registers=False", "")
    file.write_text(text, encoding="utf-8")
    return text


def write(best: dict) -> None:
    """Write the winners to the table."""
    show = lambda plan: f"HopperPlan({plan.tiles!r}, planes={plan.planes})"
    text = write_table(TABLE_FILE, merge(best), show)
    if "XTRAIN_RESULTS" in os.environ:  # if the working tree is not copied back
        copy = Path(os.environ["XTRAIN_RESULTS"]) / TABLE_FILE.name
        copy.write_text(text, encoding="utf-8")
    named = {str(key): {T: label(p) for T, p in row.items()} for key, row in best.items()}
    print(json.dumps(named))


if __name__ == "__main__":
    tasks = {(*key, p.tiles) for key, rows in TABLE.items() for p in rows.values()}
    report_compiled(compile_all((compile_hopper, task) for task in sorted(tasks, key=str)))
