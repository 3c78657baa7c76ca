"""Find the fastest tiles of the bf16 FlashAttention kernels on this GPU.

    python bench/tune_flash_attention.py [--heads 64 ...] [--kernels fwd ...] [--write] [--hopper]

Every candidate is compiled (one process per core fills the kernel cache), checked against the float32 kernels, and timed
inside a CUDA graph. Prints TFLOP/s of the operations that the kernel itself does (dq 1.5 and dkdv 2 times the
forward's); with --write the best of each shape class becomes xtrain/kernels/_flash_attention_table.py.
Candidates that do not fit the GPU or spill registers are left out.

--hopper: the kernels for compute capability 9.0 instead (_hopper_tiles.py, _flash_attention_hopper_table.py).
"""

import functools
import itertools
import multiprocessing
import os
import pprint
import sys
from dataclasses import dataclass, field
from pathlib import Path

import cupy as cp
import ml_dtypes
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_attention import repeat_ms

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention.flash_attention_table import TABLE
from xtrain.kernels.runtime.compile import load_function
from xtrain.kernels.runtime.launch import launch, numba_type

TABLE_FILE = Path(__file__).parents[1] / "xtrain" / "kernels" / "_flash_attention_table.py"
CLASSES = {256: (32, 12), 1024: (16, 12), 4096: (4, 16)}  # T -> B, H that fill the GPU
LONGEST = {256: 512, 1024: 2048, 4096: None}  # a class holds up to this T
LOCAL_SIZE_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
OUTPUTS = {"fwd": ("o",), "dq": ("dq",), "dkdv": ("dk", "dv")}
WORK = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}  # matrix products, in forwards
CANDIDATES = {  # (own rows, rows per step, warps, blocks per multiprocessor[, keep Q in registers?])
    ("fwd", 16): [(64, 64, 4, 4, True), (64, 64, 4, 5, True), (128, 64, 4, 3, True)],
    ("fwd", 32): [(64, 64, 4, 4, True), (64, 64, 4, 5, True), (128, 64, 4, 3, True), (128, 64, 4, 2, True)],
    ("fwd", 64): [(64, 64, 4, 3, True), (128, 64, 4, 2, True), (128, 64, 4, 2, False), (128, 32, 4, 3, False)],
    ("fwd", 128): [(128, 64, 4, 2, False), (128, 32, 4, 2, False), (64, 64, 4, 2, True), (64, 32, 4, 3, False)],
    ("dq", 16): [(64, 64, 4, 5), (64, 64, 4, 4), (128, 64, 4, 2), (128, 64, 4, 3)],
    ("dq", 32): [(64, 64, 4, 4), (64, 32, 4, 5), (128, 32, 4, 3), (128, 64, 4, 2)],
    ("dq", 64): [(128, 64, 4, 2), (128, 80, 4, 2), (128, 32, 4, 3), (64, 64, 4, 3), (64, 32, 4, 4)],
    ("dq", 128): [(128, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3)],
    ("dkdv", 16): [(64, 64, 4, 4), (128, 32, 4, 4), (128, 64, 4, 3)],
    ("dkdv", 32): [(64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 3)],
    ("dkdv", 64): [(128, 48, 4, 2), (128, 32, 4, 2), (64, 48, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3)],
    ("dkdv", 128): [(128, 64, 8, 1), (64, 32, 4, 2), (128, 32, 8, 1)],
}  # fmt: skip


@dataclass
class Options:
    heads: list[int] = field(default_factory=lambda: [16, 32, 64, 128])  # widths D
    kernels: list[str] = field(default_factory=lambda: ["fwd", "dq", "dkdv"])
    lengths: list[int] = field(default_factory=lambda: list(CLASSES))
    causal: list[bool] = field(default_factory=lambda: [True, False])
    jobs: int = os.cpu_count() or 1
    write: bool = False
    hopper: bool = False


# ----------------------------------------------------------------------------- one candidate
@functools.cache
def inputs(B, T, H, D):
    draw = cp.random.default_rng(0)
    return [
        draw.standard_normal((B, T, H, D), cp.float32).astype(ml_dtypes.bfloat16) for _ in range(4)
    ]


@functools.lru_cache(2)
def expected(B, T, H, D, causal):
    """What the backward kernels get: o, lse, delta of all heads. And {output: values for two heads} by the float32
    kernels.
    """
    q, k, v, do = inputs(B, T, H, D)
    o, lse = fa.flash_attention_fwd(q, k, v, D**-0.5, causal)
    delta = (o.astype(cp.float32) * do.astype(cp.float32)).sum(-1).transpose(0, 2, 1)
    few = [cp.ascontiguousarray(x[:1, :, :2]).astype(cp.float32) for x in (q, k, v, do)]
    exact = flash_attention_pair(*few, D**-0.5, causal)
    return o, lse, cp.ascontiguousarray(delta), dict(zip(("o", "dq", "dk", "dv"), exact))


def flash_attention_pair(q, k, v, do, scale, causal):
    o, lse = fa.flash_attention_fwd(q, k, v, scale, causal)
    return o, *fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal)


def arguments(kind, T, D, causal):
    """-> all arguments of a kernel, {name of an output: the array}"""
    B, H = CLASSES[T]
    q, k, v, do = inputs(B, T, H, D)
    o, lse, delta, _ = expected(B, T, H, D, causal)
    new = {name: cp.empty_like(q) for name in OUTPUTS[kind]}
    rows = {
        "fwd": [cp.empty_like(lse), q, k, v],
        "dq": [cp.empty_like(lse), do, q, k, v, o, lse],
        "dkdv": [do, q, k, v, lse, delta],
    }[kind]
    rows_apart = [H * D] * (
        4 if kind == "dkdv" else 3
    )  # of q, k, v; of dv, which may lie in a packed array
    sizes = [np.int32(n) for n in (T, T, H, 1, *rows_apart)]
    flat = [a.reshape(-1) for a in (*new.values(), *rows)]
    return [*flat, *sizes, np.float32(D**-0.5)], new


def compile_one(task):
    """In a worker: fills the disk cache. -> (task, bytes spilled per thread, "" or what went wrong)"""
    kind = task[0]
    try:
        kernel, shared = fa.make_kernel(*task)
        sizes = [np.int32(1)] * (8 if kind == "dkdv" else 7) + [np.float32(1)]
        dtypes = {
            "fwd": (2, 4, 2, 2, 2),
            "dq": (2, 4, 2, 2, 2, 2, 2, 4),
            "dkdv": (2, 2, 2, 2, 2, 2, 4, 4),
        }[kind]
        arrays = [cp.empty(1, ml_dtypes.bfloat16 if n == 2 else np.float32) for n in dtypes]
        signature = tuple(map(numba_type, (*arrays, *sizes)))
        handle, _ = load_function(kernel, signature, shared)
        return task, cp.cuda.driver.funcGetAttribute(LOCAL_SIZE_BYTES, handle), ""
    except Exception as error:
        return task, 0, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def measure(task, T):
    """-> milliseconds. Raises AssertionError when the result is wrong."""
    kind, D, causal, config = task
    B, H = CLASSES[T]
    args, outputs = arguments(kind, T, D, causal)
    kernel, shared = fa.make_kernel(*task)
    gpu = fa.multiprocessors(args[0]), fa.l2_bytes(args[0])
    grid = fa.make_grid(kind, config, causal, (B, T, H, D), (B, T, H, D), *gpu)
    run = lambda: launch(kernel, grid, 32 * config[2], *args, shared=shared)
    run()
    exact = expected(B, T, H, D, causal)[3]
    for name, array in outputs.items():
        got = array[:1, :, :2].astype(cp.float32)
        error = float(cp.linalg.norm(got - exact[name]) / cp.linalg.norm(exact[name]))
        assert error < 1e-2, f"wrong: error of {name} {error:.1e} at T = {T}"
    return repeat_ms(run)


# ----------------------------------------------------------------------------- all of them
def tune(options: Options) -> dict:
    """-> {(kind, D, causal): {T: (config, milliseconds)}}"""
    keys = list(itertools.product(options.kernels, options.heads, options.causal))
    tasks = [(*key, config) for key in keys for config in CANDIDATES[key[:2]]]
    defaults = [
        ("fwd", D, causal, rows[0][1])
        for (kind, D, causal), rows in TABLE.items()
        if kind == "fwd" and D in options.heads and causal in options.causal
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        done = pool.map(compile_one, dict.fromkeys(defaults + tasks), chunksize=1)
    compiled = {task: (spilled, wrong) for task, spilled, wrong in done}
    best = {key: {} for key in keys}
    for task in sorted(tasks, key=lambda t: (t[1], t[2], t[0])):  # inputs of one width at a time
        spilled, wrong = compiled[task]
        rates = []
        for T in [] if wrong or spilled else options.lengths:
            try:
                ms = measure(task, T)
            except (AssertionError, RuntimeError) as error:
                wrong = str(error)
                break
            row = best[task[:3]]
            if T not in row or ms < row[T][1]:
                row[T] = task[3], ms
            rates.append(f"T {T}: {ms:.4f} ms {tflops(*task[:3], T, ms):4.0f}")
        mode = "causal" if task[2] else "full"
        spill = f"spills {spilled} bytes" if spilled else ""
        print(
            f"{task[0]:5} D {task[1]:3} {mode:6} {task[3]!s:26}",
            " | ".join(rates),
            spill,
            wrong,
            flush=True,
        )
    return best


def tflops(kind, D, causal, T, ms):
    B, H = CLASSES[T]
    return WORK[kind] * 4 * B * H * T * T * D / (2 if causal else 1) / ms / 1e9


def write(best: dict) -> None:
    table = dict(TABLE)
    for key, row in best.items():
        classes = [(LONGEST[T], row[T][0]) for T in sorted(row)]
        classes[-1] = (None, classes[-1][1])
        # equal neighbours are one class
        table[key] = tuple(
            c for i, c in enumerate(classes) if i + 1 == len(classes) or c[1] != classes[i + 1][1]
        )
    text = TABLE_FILE.read_text(encoding="utf-8")
    head = text[: text.index("GPU = ")]
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    lines = "".join(
        f'    ("{kind}", {D}, {causal}): {table[kind, D, causal]!r},\n'
        for kind, D, causal in sorted(table, key=lambda key: (list(WORK).index(key[0]), key[1:]))
    )
    TABLE_FILE.write_text(f'{head}GPU = "{name}"\nTABLE = {{\n{lines}}}\n', encoding="utf-8")


def tune_hopper(options: Options) -> None:
    import _hopper_tiles

    heads = [D for D in options.heads if D in (64, 128)]
    lengths = options.lengths if options.lengths != list(CLASSES) else list(_hopper_tiles.SHAPES)
    best = _hopper_tiles.tune(heads, options.kernels, lengths, options.causal)
    if options.write:
        _hopper_tiles.write(best)


def main(options: Options) -> None:
    if options.hopper:
        tune_hopper(options)
        return
    best = tune(options)
    pprint.pp(best)
    if options.write:
        write(best)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
