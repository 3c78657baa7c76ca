"""Candidates for the kernels of compute capability 9.0, measured: `python bench/tune_flash_attention.py --hopper`.

A shape is (D, T, causal, query heads per key head). Candidates take turns on a warm chip, each in its own CUDA graph; the
median of the turns counts. Before, one sequence's first key head is compared with attention in float32 by plain CuPy, and the
rest with the tiles that the table names now. The table has a row per class of lengths: the candidate wins whose times,
relative to the best of each shape, have the smallest sum over the shapes of the class.

    python bench/tune_flash_attention.py --hopper --heads 128    about 50 seconds with 16 cores; and the same for 64
    python bench/tune_flash_attention.py --hopper --heads 128 --kernels fwd --lengths 198 400    half of that

    python bench/_hopper_tiles.py       only compiles what the table chooses, one process per core, into the kernel cache
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import cupy as cp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_attention import capture, in_turns

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention import flash_attention_hopper_bwd as backward
from xtrain.kernels.attention.flash_attention_hopper_table import TABLE
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime.compile import load_function
from xtrain.kernels.runtime.launch import numba_type

TABLE_FILE = Path(hopper.__file__).with_name("_flash_attention_hopper_table.py")
SHARED = 227 * 1024
SHAPES = {198: (217, 4), 256: (32, 12), 400: (40, 12), 1024: (16, 12), 4096: (4, 16)}  # T -> B, H
GROUPS = {1024: (1, 4)}  # query heads per key head; elsewhere one
CLASSES = (256, 512, 2048, None)  # the longest T of each
WORK = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}  # matrix products, in forwards
SHARED_BYTES = {
    "fwd": hopper.fwd_shared_bytes,
    "dq": backward.dq_shared_bytes,
    "dkdv": backward.dkdv_shared_bytes,
}
CANDIDATES = {  # as in the table. Rows per step of dkdv divide PAD
    ("fwd", 64): [(64, 1, 3, 3, 1, 0), (64, 1, 3, 3, 1, 1), (64, 1, 3, 3, 2, 0), (64, 1, 3, 3, 2, 1), (32, 1, 3, 4, 2, 1), (128, 1, 2, 2, 1, 0), (128, 1, 2, 2, 2, 0), (128, 3, 2, 1, 1, 0), (128, 3, 2, 1, 2, 0)],
    ("fwd", 128): [(64, 1, 2, 2, 1, 0), (64, 1, 2, 2, 1, 1), (64, 1, 2, 2, 2, 0), (64, 1, 2, 2, 2, 1), (32, 1, 4, 2, 2, 0), (32, 1, 4, 2, 2, 1), (64, 2, 4, 1, 2, 1), (128, 2, 2, 1, 1, 0), (128, 2, 2, 1, 2, 0), (128, 2, 2, 1, 2, 1)],
    ("dq", 64): [(64, 1, 3, 2, 1, 0), (64, 1, 4, 2, 1, 0), (64, 1, 4, 2, 1, 1), (64, 1, 4, 2, 2, 0), (64, 1, 4, 2, 2, 1), (128, 2, 3, 1, 1, 0), (128, 2, 3, 1, 2, 0)],
    ("dq", 128): [(64, 2, 4, 1, 1, 0), (64, 2, 4, 1, 1, 1), (64, 1, 2, 2, 1, 0), (64, 1, 2, 2, 1, 1), (32, 1, 2, 2, 2, 1), (64, 2, 2, 1, 2, 0)],
    ("dkdv", 64): [(64, 1, 4, 2, 1, 0), (64, 1, 4, 2, 1, 1), (64, 1, 4, 2, 2, 0), (64, 1, 4, 2, 2, 1), (64, 1, 3, 2, 2, 0)],
    ("dkdv", 128): [(64, 2, 2, 1, 1, 0), (64, 2, 2, 1, 1, 1), (64, 2, 2, 1, 2, 0), (32, 1, 3, 2, 1, 1), (32, 1, 2, 2, 2, 1)],
}  # fmt: skip
MAKERS = {
    "fwd": hopper.make_fwd_kernel,
    "dq": backward.make_dq_kernel,
    "dkdv": backward.make_dkdv_kernel,
}


def compile_one(task):
    """In a worker: fills the kernel cache. -> (task, registers that live in memory, "" or what went wrong)"""
    kind, D, causal, config = task
    try:
        kinds = (np.uint64, np.int32) if kind == "dkdv" else (np.uint64, np.float32, np.int32)
        arrays = [cp.empty(2, dtype) for dtype in kinds]
        numbers = [np.int32(1)] * (7 if kind == "dq" else 6) + [np.float32(1)]
        signature = tuple(map(numba_type, (*arrays, *numbers)))
        kernel = MAKERS[kind](D, causal, config[:5])
        handle, _ = load_function(kernel, signature, SHARED_BYTES[kind](D, config[:5]))
        return task, cp.cuda.driver.funcGetAttribute(3, handle), ""  # LOCAL_SIZE_BYTES
    except Exception as error:
        return task, 0, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def compile_all(tasks) -> None:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for task, local, wrong in pool.imap_unordered(compile_one, tasks):
            if local or wrong:
                print(task, f"{local} bytes of local memory" if local else wrong, flush=True)


# ----------------------------------------------------------------------------- one shape
def arrays_of(T, D, group):
    B, H = SHAPES[T]
    draw = cp.random.default_rng(0)
    heads = H, H // group, H // group, H
    make = lambda n: draw.standard_normal((B, T, n, D), cp.float32).astype(ml_dtypes.bfloat16)
    return [make(n) for n in heads]


def exact(arrays, causal):
    """-> {"o", "dq", "dk", "dv"} of the first sequence's first key head, float32, (heads, T, D)"""
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
    x, y = x.astype(cp.float32), y.astype(cp.float32)
    return float(cp.linalg.norm(x - y) / cp.linalg.norm(y))


def present(arrays, causal, kinds):
    """-> ({name: result} by the tiles of the table, lse), compared with `exact`"""
    q, k, v, do = arrays
    scale = np.float32(q.shape[3] ** -0.5)
    o, lse = fa.flash_attention_fwd(q, k, v, scale, causal)
    found = {"o": o}
    if set(kinds) != {"fwd"}:
        gradients = fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal)
        found |= dict(zip(("dq", "dk", "dv"), gradients))
    right = exact(arrays, causal)
    for name, x in found.items():
        part = x[0].transpose(1, 0, 2)[: len(right[name])]
        error = distance(part, right[name])
        assert error < 1e-2, f"{name} of the tiles in use is off by {error:.1e}"
    return found, lse


def kinds_of(arrays, causal, kinds):
    """-> {kind: (start(config), [(an output, what it should be)])}"""
    q, k, v, do = arrays
    scale, gpu = np.float32(q.shape[3] ** -0.5), fa._gpu(q)
    right, lse = present(arrays, causal, kinds)
    new = {name: cp.empty_like(x) for name, x in right.items()}
    more, rest = cp.empty_like(lse), (do, q, k, v, scale, causal, gpu)
    stats = backward.compute_statistics(do, right["o"], lse) if len(right) > 1 else (None, 0)
    starts = {
        "fwd": lambda config: hopper.fill_o(new["o"], more, *rest[1:], config),
        "dq": lambda config: backward.fill_dq(new["dq"], *stats, *rest, config),
        "dkdv": lambda config: backward.fill_dkdv(new["dk"], new["dv"], stats[0], *rest, config),
    }
    outputs = {"fwd": ("o",), "dq": ("dq",), "dkdv": ("dk", "dv")}
    return {kind: (starts[kind], [(new[n], right[n]) for n in outputs[kind]]) for kind in kinds}


def measure(kind, D, T, causal, group, start, pairs, turns):
    """-> {config: median ms} of the candidates that are right"""
    contestants = {}
    for config in CANDIDATES[kind, D]:
        for got, _ in pairs:
            got.fill(0)
        _launch.set_overlap(False)  # dK, dV follow zeros here, and not the kernel of dQ that waits
        try:
            start(config)
            cp.cuda.Device().synchronize()
        except RuntimeError as error:
            print(f"{kind} D {D} {config}: {str(error)[:100]}")
            continue
        finally:
            _launch.set_overlap(True)
        errors = [distance(x, y) for x, y in pairs]
        if not max(errors) < 1e-2:
            print(f"{kind} D {D} {config}: wrong, errors {errors}")
            continue
        contestants[config] = capture(lambda config=config: start(config))
    times = {c: float(t[0]) for c, t in in_turns(contestants, turns).items()} if contestants else {}
    B, H = SHAPES[T]
    work = WORK[kind] * 4 * B * H * T * T * D / (2 if causal else 1)
    shape = f"D {D} T {T} {'causal' if causal else 'full'} group {group}"
    for config, ms in sorted(times.items(), key=lambda item: item[1]):
        rate = work / ms / 1e9
        used = "  in use" if config == hopper.choose(kind, D, T, causal) else ""
        print(f"{kind:5} {shape} {config!s:21} {ms:.4f} ms {rate:5.0f} TFLOP/s{used}", flush=True)
        _record(kind, shape, config, ms, rate)
    return times


def _record(kind, shape, config, ms, rate):
    from _timing import record

    record(
        "tune_flash_attention", f"hopper {kind} {config}", shape=shape, dtype="bf16", ms=ms, value=rate, unit="TFLOP/s"
    )  # fmt: skip


def measure_statistics(arrays, turns=5) -> None:
    """One row and four rows a thread, the same bits"""
    q, k, v, do = arrays
    o, lse = fa.flash_attention_fwd(q, k, v, np.float32(q.shape[3] ** -0.5), True)
    start = lambda rows: backward.compute_statistics(do, o, lse, rows)
    assert cp.array_equal(start(1)[0], start(4)[0])
    times = in_turns({rows: capture(lambda rows=rows: start(rows)) for rows in (1, 4)}, turns)
    print("statistics", q.shape, {rows: f"{t[0]:.4f} ms" for rows, t in times.items()}, flush=True)


# ----------------------------------------------------------------------------- all of them
def tune(heads, kinds, lengths, causal, turns=5) -> dict:
    """-> {(kind, D, causal): {longest T of a class: config}}"""
    begin = time.monotonic()
    keys = [(kind, D, mode) for kind in kinds for D in heads for mode in causal]
    compile_all(dict.fromkeys((*key, c[:5]) for key in keys for c in CANDIDATES[key[:2]]))
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    times: dict = {key: {} for key in keys}  # -> {class: {(T, group): {config: ms}}}
    for D in heads:
        for T in lengths:
            for group in GROUPS.get(T, (1,)):
                arrays = arrays_of(T, D, group)
                for mode in causal:
                    for kind, (start, pairs) in kinds_of(arrays, mode, kinds).items():
                        found = measure(kind, D, T, mode, group, start, pairs, turns)
                        shapes = times[kind, D, mode].setdefault(class_of(T), {})
                        shapes[T, group] = found
                if set(kinds) != {"fwd"}:
                    measure_statistics(arrays)
    best = {key: {c: fastest(shapes) for c, shapes in row.items()} for key, row in times.items()}
    report(times, best)
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)
    return best


def class_of(T):
    return next(longest for longest in CLASSES if longest is None or longest >= T)


def fastest(shapes):
    """{shape: {config: ms}} -> the config with the smallest sum of times, each relative to the best of its shape"""
    everywhere = set.intersection(*(set(times) for times in shapes.values()))
    cost = lambda config: sum(t[config] / min(t.values()) for t in shapes.values())
    return min(sorted(everywhere), key=cost)


def report(times, best) -> None:
    """What each class gains over the tiles in use"""
    for (kind, D, mode), row in best.items():
        for limit, config in row.items():
            gains = []
            for (T, group), found in times[kind, D, mode][limit].items():
                used = found.get(hopper.choose(kind, D, T, mode))
                gains.append(f"T {T} group {group}: {used / found[config] if used else 0:.3f}")
            name = f"{kind} D {D} {'causal' if mode else 'full'} to {limit}"
            print(f"best {name}: {config}, times the rate in use: {', '.join(gains)}")


def merge(best: dict) -> dict:
    """The table with what was measured now; a class that was not keeps its row."""
    table = dict(TABLE)
    for key, row in best.items():
        classes = [(limit, row.get(limit) or _kept(key, limit)) for limit in CLASSES]
        table[key] = tuple(
            c for i, c in enumerate(classes) if i + 1 == len(classes) or c[1] != classes[i + 1][1]
        )
    return table


def _kept(key, limit):
    rows = TABLE[key]
    return next(c for longest, c in rows if longest is None or (limit and longest >= limit))


def write(best: dict) -> None:
    text, table = TABLE_FILE.read_text(encoding="utf-8"), merge(best)
    head = text[: text.index("GPU = ")]
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    order = sorted(table, key=lambda key: (list(WORK).index(key[0]), key[1:]))
    lines = "".join(f"    {key!r}: {table[key]!r},\n" for key in order).replace("'", '"')
    text = f'{head}GPU = "{name}"\nTABLE = {{\n{lines}}}\n'
    TABLE_FILE.write_text(text, encoding="utf-8")
    if "XTRAIN_RESULTS" in os.environ:  # where the working tree does not come back
        copy = Path(os.environ["XTRAIN_RESULTS"]) / TABLE_FILE.name
        copy.write_text(text, encoding="utf-8")
    print(json.dumps({str(key): {T: str(c) for T, c in row.items()} for key, row in best.items()}))


if __name__ == "__main__":
    compile_all(
        sorted({(*key, config[:5]) for key, rows in TABLE.items() for _, config in rows}, key=str)
    )
