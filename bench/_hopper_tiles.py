"""Candidates for the kernels of compute capability 9.0, measured: `python bench/tune_flash_attention.py --hopper`.

A class is (D, T, causal, query heads per key head). Candidates take turns on a warm chip, each in its own CUDA graph; the
median of the turns counts. All are first compared with the mma.sync kernels. The table has one row per T; where
shared heads ask for other tiles than their own, both are printed, and the sum of the times over the groups decides.

    python bench/_hopper_tiles.py       only compiles what the table chooses, one process per core, into the kernel cache
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import cupy as cp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_attention import capture, in_turns

from xtrain.kernels import _flash_attention_hopper_bwd as backward
from xtrain.kernels import flash_attention as fa
from xtrain.kernels import flash_attention_hopper as hopper
from xtrain.kernels._compile import load_function
from xtrain.kernels._flash_attention_hopper_table import TABLE
from xtrain.kernels._launch import numba_type

TABLE_FILE = Path(hopper.__file__).with_name("_flash_attention_hopper_table.py")
SHARED = 227 * 1024
GROUPS = (1, 4)  # query heads per key head
CLASSES = {256: (32, 12), 1024: (16, 12), 4096: (4, 16)}  # T -> B, H
LONGEST = {256: 512, 1024: 2048, 4096: None}  # a class holds up to this T
WORK = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}  # matrix products, in forwards
SHARED_BYTES = {
    "fwd": hopper.fwd_shared_bytes,
    "dq": backward.dq_shared_bytes,
    "dkdv": backward.dkdv_shared_bytes,
}
CANDIDATES = {  # (rows per step, consumer warpgroups, stages, blocks per multiprocessor)
    ("fwd", 64): [(64, 1, 3, 3), (128, 1, 2, 2), (128, 2, 2, 1), (128, 3, 2, 1), (176, 2, 2, 1), (64, 2, 4, 1)],
    ("fwd", 128): [(128, 2, 2, 1), (64, 1, 2, 2), (64, 2, 3, 1), (80, 2, 3, 1)],
    ("dq", 64): [(64, 1, 3, 2), (64, 1, 4, 2), (128, 2, 3, 1), (64, 2, 4, 1), (128, 2, 2, 1)],
    ("dq", 128): [(64, 2, 4, 1), (64, 2, 3, 1), (80, 2, 3, 1)],
    ("dkdv", 64): [(64, 1, 4, 2), (64, 1, 3, 2), (64, 2, 4, 1), (128, 2, 2, 1)],
    ("dkdv", 128): [(64, 2, 2, 1), (32, 2, 3, 1), (32, 2, 4, 1)],  # rows per step divide PAD
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
        kernel = MAKERS[kind](D, causal, config)
        handle, _ = load_function(kernel, signature, SHARED_BYTES[kind](D, config))
        return task, cp.cuda.driver.funcGetAttribute(3, handle), ""  # LOCAL_SIZE_BYTES
    except Exception as error:
        return task, 0, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def compile_all(tasks) -> None:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for task, local, wrong in pool.imap_unordered(compile_one, tasks):
            if local or wrong:
                print(task, f"{local} bytes of local memory" if local else wrong, flush=True)


def arrays_of(T, D, group):
    B, H = CLASSES[T]
    draw = cp.random.default_rng(0)
    heads = H, H // group, H // group, H
    make = lambda n: draw.standard_normal((B, T, n, D), cp.float32).astype(ml_dtypes.bfloat16)
    return [make(n) for n in heads]


def kinds_of(arrays, causal):
    """-> {kind: start(config), its outputs, what they should be}"""
    q, k, v, do = arrays
    D = q.shape[3]
    scale, gpu = np.float32(D**-0.5), fa._gpu(q)
    fa.HOPPER = False
    o, lse = fa.flash_attention_fwd(q, k, v, scale, causal)
    right = dict(
        zip(("dq", "dk", "dv"), fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal))
    )
    stats = backward.compute_statistics(do, o, lse)
    new = {name: cp.empty_like(x) for name, x in {"o": o, "lse": lse, **right}.items()}
    rest = do, q, k, v, scale, causal, gpu
    fwd = lambda config: hopper.fill_o(new["o"], new["lse"], q, k, v, scale, causal, gpu, config)
    dkdv = lambda config: backward.fill_dkdv(new["dk"], new["dv"], stats[0], *rest, config)
    return {
        "fwd": (fwd, [(new["o"], o)]),
        "dq": (
            lambda config: backward.fill_dq(new["dq"], *stats, *rest, config),
            [(new["dq"], right["dq"])],
        ),
        "dkdv": (dkdv, [(new[name], right[name]) for name in ("dk", "dv")]),
    }


def distance(x, y):
    x, y = x.astype(cp.float32), y.astype(cp.float32)
    return float(cp.linalg.norm(x - y) / cp.linalg.norm(y))


def measure(kind, D, T, causal, group, start, pairs, turns):
    """-> {config: median ms} of the candidates that are right"""
    contestants = {}
    for config in CANDIDATES[kind, D]:
        if SHARED_BYTES[kind](D, config) > SHARED:
            continue
        try:
            start(config)
            cp.cuda.Device().synchronize()
        except RuntimeError as error:
            print(f"{kind} D {D} {config}: {str(error)[:100]}")
            continue
        errors = [distance(x, y) for x, y in pairs]
        if not max(errors) < 2e-2:
            print(f"{kind} D {D} {config}: wrong, errors {errors}")
            continue
        contestants[config] = capture(lambda config=config: start(config))
    times = {c: float(t[0]) for c, t in in_turns(contestants, turns).items()} if contestants else {}
    B, H = CLASSES[T]
    work = WORK[kind] * 4 * B * H * T * T * D / (2 if causal else 1)
    for config, ms in sorted(times.items(), key=lambda item: item[1]):
        shape = f"D {D} T {T} {'causal' if causal else 'full'} group {group}"
        print(
            f"{kind:5} {shape} {config!s:18} {ms:.4f} ms {work / ms / 1e9:5.0f} TFLOP/s", flush=True
        )
        _record(kind, shape, config, ms, work / ms / 1e9)
    return times


def _record(kind, shape, config, ms, rate):
    from _timing import record

    record(
        "tune_flash_attention", f"hopper {kind} {config}", shape=shape, dtype="bf16", ms=ms, value=rate, unit="TFLOP/s"
    )  # fmt: skip


def tune(heads, kinds, lengths, causal, turns=5) -> dict:
    """-> {(kind, D, causal): {T: config}}"""
    best: dict = {}
    keys = [(kind, D, mode) for kind in kinds for D in heads for mode in causal]
    compile_all([(*key, config) for key in keys for config in CANDIDATES[key[:2]]])
    for D in heads:
        for mode in causal:
            for T in lengths:
                totals: dict = {}
                for group in GROUPS:
                    started = kinds_of(arrays_of(T, D, group), mode)
                    for kind in kinds:
                        for config, ms in measure(
                            kind, D, T, mode, group, *started[kind], turns
                        ).items():
                            totals.setdefault(kind, {}).setdefault(config, []).append(ms)
                for kind, times in totals.items():
                    whole = {c: sum(ms) for c, ms in times.items() if len(ms) == len(GROUPS)}
                    if whole:
                        best.setdefault((kind, D, mode), {})[T] = min(whole, key=whole.get)
    return best


def merge(best: dict) -> dict:
    """The table with what was measured now; a class that was not keeps its row."""
    table = dict(TABLE)
    for key, row in best.items():
        classes = [(LONGEST[T], row.get(T) or _kept(key, T)) for T in sorted(LONGEST)]
        table[key] = tuple(
            c for i, c in enumerate(classes) if i + 1 == len(classes) or c[1] != classes[i + 1][1]
        )
    return table


def _kept(key, T):
    return next(config for longest, config in TABLE[key] if longest is None or longest >= T)


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
        sorted({(*key, config) for key, rows in TABLE.items() for _, config in rows}, key=str)
    )
