"""Find the fastest tiles of the bf16 FlashAttention kernels on this GPU.

    python bench/tune_flash_attention.py [--heads 64 ...] [--kernels fwd ...] [--write] [--hopper]

Every candidate is compiled (one process per core fills the kernel cache), checked against the
float32 kernels, and timed inside a CUDA graph. Prints TFLOP/s of the operations that the kernel
itself does (dq 1.5 and dkdv 2 times the forward's). With --write, the fastest of each shape class
are written to xtrain/kernels/attention/flash_attention_table.py. Candidates that do not fit the GPU
or spill registers are skipped.

--hopper: the kernels for compute capability 9.0 instead (_hopper_tiles.py,
flash_attention_hopper_table.py).
"""

import functools
import itertools
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
import _hopper_tiles
from _attention import WORK, compile_all, compile_mma_sync, operations, repeat_ms

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_table
from xtrain.kernels.attention.flash_attention_table import TABLE, Tiles
from xtrain.kernels.runtime.launch import launch

TABLE_FILE = Path(flash_attention_table.__file__)
CLASSES = {256: (32, 12), 1024: (16, 12), 4096: (4, 16)}  # T -> B, H that fill the GPU
LONGEST = {256: 512, 1024: 2048, 4096: None}  # the longest T of each class
OUTPUTS = {"fwd": ("o",), "dq": ("dq",), "dkdv": ("dk", "dv")}
CANDIDATES = {  # Tiles(BM, BN, warps, blocks[, q_in_registers])
    ("fwd", 16): [Tiles(64, 64, 4, 4, True), Tiles(64, 64, 4, 5, True), Tiles(128, 64, 4, 3, True)],
    ("fwd", 32): [
        Tiles(64, 64, 4, 4, True), Tiles(64, 64, 4, 5, True), Tiles(128, 64, 4, 3, True),
        Tiles(128, 64, 4, 2, True),
    ],
    ("fwd", 64): [
        Tiles(64, 64, 4, 3, True), Tiles(128, 64, 4, 2, True), Tiles(128, 64, 4, 2, False),
        Tiles(128, 32, 4, 3, False),
    ],
    ("fwd", 128): [
        Tiles(128, 64, 4, 2, False), Tiles(128, 32, 4, 2, False), Tiles(64, 64, 4, 2, True),
        Tiles(64, 32, 4, 3, False),
    ],
    ("fwd", 256): [
        Tiles(128, 64, 8, 1, False), Tiles(128, 32, 8, 1, False), Tiles(64, 32, 4, 2, False),
        Tiles(64, 64, 4, 1, False),
    ],
    ("dq", 16): [
        Tiles(64, 64, 4, 5), Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 2),
        Tiles(128, 64, 4, 3),
    ],
    ("dq", 32): [
        Tiles(64, 64, 4, 4), Tiles(64, 32, 4, 5), Tiles(128, 32, 4, 3),
        Tiles(128, 64, 4, 2),
    ],
    ("dq", 64): [
        Tiles(128, 64, 4, 2), Tiles(128, 80, 4, 2), Tiles(128, 32, 4, 3),
        Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 4),
    ],
    ("dq", 128): [Tiles(128, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3)],
    ("dq", 256): [
        Tiles(128, 32, 8, 1), Tiles(128, 16, 8, 1), Tiles(64, 16, 4, 2), Tiles(64, 64, 4, 1),
    ],
    ("dkdv", 16): [Tiles(64, 64, 4, 4), Tiles(32, 128, 4, 4), Tiles(64, 128, 4, 3)],
    ("dkdv", 32): [
        Tiles(64, 64, 4, 4), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2),
        Tiles(32, 128, 4, 3),
    ],
    ("dkdv", 64): [
        Tiles(48, 128, 4, 2), Tiles(32, 128, 4, 2), Tiles(48, 64, 4, 3),
        Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3),
    ],
    ("dkdv", 128): [Tiles(64, 128, 8, 1), Tiles(32, 64, 4, 2), Tiles(32, 128, 8, 1)],
    ("dkdv", 256): [Tiles(32, 64, 8, 1), Tiles(16, 32, 4, 2), Tiles(48, 64, 8, 1)],
}  # fmt: skip


@dataclass
class Options:
    heads: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256])  # widths D
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
    """Return the inputs of the backward kernels, and the values by the float32 kernels.

    (o, lse, delta) and {output: values for two heads}.
    """
    q, k, v, do = inputs(B, T, H, D)
    o, lse = fa.flash_attention_fwd(q, k, v, D**-0.5, causal)
    delta = (o.astype(cp.float32) * do.astype(cp.float32)).sum(-1).transpose(0, 2, 1)
    few = [cp.ascontiguousarray(x[:1, :, :2]).astype(cp.float32) for x in (q, k, v, do)]
    exact = both_ways(*few, D**-0.5, causal)
    return o, lse, cp.ascontiguousarray(delta), dict(zip(("o", "dq", "dk", "dv"), exact))


def both_ways(q, k, v, do, scale, causal):
    o, lse = fa.flash_attention_fwd(q, k, v, scale, causal)
    return o, *fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal)


def arguments(kind, T, D, causal):
    """Return all arguments of a kernel, {name of an output: the array}"""
    B, H = CLASSES[T]
    q, k, v, do = inputs(B, T, H, D)
    o, lse, delta, _ = expected(B, T, H, D, causal)
    new = {name: cp.empty_like(q) for name in OUTPUTS[kind]}
    rows = {
        "fwd": [cp.empty_like(lse), q, k, v],
        "dq": [cp.empty_like(lse), do, q, k, v, o, lse],
        "dkdv": [do, q, k, v, lse, delta],
    }[kind]
    rows.append(lse)  # in place of bounds, which these kernels do not read
    row_steps = [H * D] * (4 if kind == "dkdv" else 3)  # of q, k, v, and of dv
    sizes = [np.int32(n) for n in (T, T, H, 1, *row_steps)]
    flat = [a.reshape(-1) for a in (*new.values(), *rows)]
    return [*flat, *sizes, np.float32(D**-0.5)], new


def measure(task, T):
    """Return milliseconds. Raises AssertionError if the result is wrong."""
    kind, D, causal, tiles = task
    B, H = CLASSES[T]
    args, outputs = arguments(kind, T, D, causal)
    kernel, shared = fa.make_kernel(*task)
    gpu = fa.gpu_of(args[0])
    grid = fa.make_grid(kind, tiles, causal, (B, T, H, D), (B, T, H, D), gpu)
    run = lambda: launch(kernel, grid, 32 * tiles.warps, *args, shared=shared)
    run()
    exact = expected(B, T, H, D, causal)[3]
    for name, array in outputs.items():
        got = array[:1, :, :2].astype(cp.float32)
        error = float(cp.linalg.norm(got - exact[name]) / cp.linalg.norm(exact[name]))
        assert error < 1e-2, f"wrong: error of {name} {error:.1e} at T = {T}"
    return repeat_ms(run)


# ----------------------------------------------------------------------------- all of them
def tune(options: Options) -> dict:
    """Return {(kind, D, causal): {T: (tiles, milliseconds)}}"""
    keys = list(itertools.product(options.kernels, options.heads, options.causal))
    tasks = [(*key, tiles) for key in keys for tiles in CANDIDATES[key[:2]]]
    defaults = [
        ("fwd", D, causal, next(iter(rows.values())))
        for (kind, D, causal), rows in TABLE.items()
        if kind == "fwd" and D in options.heads and causal in options.causal
    ]
    every = dict.fromkeys((compile_mma_sync, task) for task in defaults + tasks)
    compiled = compile_all(every, options.jobs)
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
            f"{task[0]:5} D {task[1]:3} {mode:6} {task[3]!s:70}",
            " | ".join(rates),
            spill,
            wrong,
            flush=True,
        )
    return best


def tflops(kind, D, causal, T, ms):
    B, H = CLASSES[T]
    return WORK[kind] * operations(B, T, H, D, causal) / ms / 1e9


def write(best: dict) -> None:
    table = dict(TABLE)
    for key, row in best.items():
        classes = [(LONGEST[T], row[T][0]) for T in sorted(row)]
        classes[-1] = (None, classes[-1][1])
        table[key] = _hopper_tiles.merged_classes(classes)
    _hopper_tiles.write_table(TABLE_FILE, table, repr)


def tune_hopper(options: Options) -> None:
    heads = [D for D in options.heads if D in (64, 128)]
    if options.lengths != list(CLASSES):
        lengths = options.lengths
    else:
        lengths = list(_hopper_tiles.SHAPES)
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
