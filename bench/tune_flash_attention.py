"""Find the fastest tiles of the bf16 FlashAttention kernels on this GPU.

    python bench/tune_flash_attention.py [--heads 64 ...] [--kernels fwd ...] [--write]

Every candidate is compiled (in parallel, one process per core), checked against the float32 kernels, and timed inside a
CUDA graph, alone on the GPU. Prints TFLOP/s of the operations that the kernel itself does (dq 1.5 and dkdv 2 times the
forward's); with --write the best of each shape class becomes xtrain/kernels/flash_attention_table.py.
Candidates that do not fit the GPU or spill registers are skipped.
"""

import functools
import itertools
import multiprocessing
import os
import pprint
import sys
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import tyro

TABLE_FILE = Path(__file__).parents[1] / "xtrain" / "kernels" / "flash_attention_table.py"
CLASSES = {256: (32, 12), 1024: (16, 12), 4096: (4, 16)}  # T -> B, H that fill the GPU
LONGEST = {256: 512, 1024: 2048, 4096: None}  # a class holds up to this T
WORK = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}  # matrix products, in forwards
CANDIDATES = {
    ("fwd", 16): [(64, 64, 4, True, 4), (128, 64, 4, True, 3), (64, 64, 4, True, 6), (128, 32, 4, True, 4)],
    ("fwd", 32): [
        (64, 64, 4, True, 4), (64, 64, 4, True, 5), (128, 64, 4, True, 3), (128, 64, 4, True, 2),
        (128, 32, 4, True, 4), (64, 32, 4, True, 6), (64, 128, 4, True, 3), (128, 64, 8, True, 2),
    ],
    ("fwd", 64): [
        (64, 64, 4, False, 4), (64, 64, 4, True, 3), (64, 32, 4, True, 4), (128, 64, 4, True, 2),
        (128, 64, 4, False, 2), (128, 32, 4, False, 3), (128, 64, 8, True, 2), (128, 128, 8, False, 1),
    ],
    ("fwd", 128): [
        (128, 64, 4, False, 2), (128, 32, 4, False, 2), (64, 64, 4, False, 3), (64, 64, 4, True, 2),
        (64, 32, 4, False, 3), (128, 64, 8, False, 1), (128, 64, 8, True, 1),
    ],
    ("dq", 16): [(64, 64, 4, 4), (128, 32, 4, 4), (128, 64, 4, 2)],
    ("dq", 32): [(64, 64, 4, 4), (64, 32, 4, 5), (128, 32, 4, 4), (128, 32, 4, 3), (128, 64, 4, 2)],
    ("dq", 64): [(128, 32, 4, 3), (128, 32, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4), (128, 64, 4, 2)],
    ("dq", 128): [(128, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 1), (128, 64, 8, 1)],
    ("dkdv", 16): [(64, 64, 4, False, 4), (64, 64, 4, False, 3), (64, 32, 4, False, 5), (128, 64, 8, False, 2)],
    ("dkdv", 32): [
        (64, 64, 4, False, 4), (64, 64, 4, False, 3), (64, 64, 4, True, 3), (64, 32, 4, False, 4),
        (64, 32, 4, True, 4), (128, 64, 8, False, 2), (128, 32, 8, False, 2), (32, 64, 4, False, 4),
        (128, 64, 4, False, 2),
    ],
    ("dkdv", 64): [
        (64, 64, 4, False, 3), (64, 64, 4, False, 2), (64, 64, 4, True, 2), (64, 32, 4, False, 4),
        (64, 32, 4, False, 3), (64, 32, 4, True, 3), (128, 64, 8, False, 1), (128, 32, 8, False, 2),
        (32, 64, 4, False, 3),
    ],
    ("dkdv", 128): [
        (64, 64, 4, False, 2), (64, 32, 4, False, 2), (128, 64, 8, False, 1), (128, 32, 8, False, 1),
        (32, 64, 4, False, 2),
    ],
}  # fmt: skip


@dataclass
class Options:
    heads: list[int] = field(default_factory=lambda: [16, 32, 64, 128])  # widths D
    kernels: list[str] = field(default_factory=lambda: ["fwd", "dq", "dkdv"])
    lengths: list[int] = field(default_factory=lambda: list(CLASSES))
    causal: list[bool] = field(default_factory=lambda: [True, False])
    jobs: int = os.cpu_count() or 1
    write: bool = False


# ----------------------------------------------------------------------------- one candidate, in a worker
@functools.cache
def inputs(B, T, H, D):
    import cupy as cp

    draw = cp.random.default_rng(0)
    return [
        draw.standard_normal((B, T, H, D), cp.float32).astype(ml_dtypes.bfloat16) for _ in range(4)
    ]


@functools.cache
def expected(B, T, H, D, causal):
    """o, dq, dk, dv of two heads by the float32 kernels; and what the backward kernels get, of all heads"""
    import cupy as cp

    from xtrain.kernels.flash_attention import flash_attention_bwd, flash_attention_fwd

    q, k, v, do = inputs(B, T, H, D)
    few = [cp.ascontiguousarray(x[:1, :, :2]).astype(cp.float32) for x in (q, k, v, do)]
    o, lse = flash_attention_fwd(*few[:3], D**-0.5, causal)
    saved = flash_attention_fwd(q, k, v, D**-0.5, causal)
    return o, flash_attention_bwd(few[3], *few[:3], o, lse, D**-0.5, causal), saved


def prepare(kind, D, causal, config, T):
    """-> (launch the candidate, its outputs, what they should begin with)"""
    import cupy as cp

    from xtrain.kernels import flash_attention as fa
    from xtrain.kernels._launch import launch

    B, H = CLASSES[T]
    q, k, v, do = inputs(B, T, H, D)
    o_ref, (dq_ref, dk_ref, dv_ref), (o, lse) = expected(B, T, H, D, causal)
    flat_q, flat_k, flat_v, sizes = fa._flat_inputs(q, k, v)
    scale, shared = np.float32(D**-0.5), fa.SHARED_BYTES[kind](D, config)
    grid = (-(-T // config[0]), B * H)
    if kind == "fwd":
        outputs, refs, more = [cp.empty_like(q)], [o_ref], []
        kernel = fa.bf16.make_fwd_kernel(D, causal, config)
        arrays = [outputs[0], cp.empty_like(lse), q, k, v]
    elif kind == "dq":
        outputs, refs = [cp.empty_like(q)], [dq_ref]
        kernel = fa.bf16_bwd.make_dq_kernel(D, causal, config)
        arrays = [outputs[0], cp.empty_like(lse), do, q, k, v, o, lse]
    else:
        outputs, refs = [cp.empty_like(k), cp.empty_like(v)], [dk_ref, dv_ref]
        kernel = fa.bf16_bwd.make_dkdv_kernel(D, causal, config)
        delta = (o.astype(cp.float32) * do.astype(cp.float32)).sum(-1).transpose(0, 2, 1)
        arrays = [*outputs, do, q, k, v, lse, cp.ascontiguousarray(delta)]
    arrays = [a.reshape(-1) for a in arrays]
    run = lambda: launch(kernel, grid, 32 * config[2], *arrays, *sizes, scale, shared=shared)
    return run, outputs, refs, kernel


def measure(task):
    """-> (task, "" or what is wrong, {T: milliseconds})"""
    import cupy as cp
    from bench_attention import graph_ms

    kind, D, causal, config, lengths = task
    times = {}
    try:
        for T in lengths:
            run, outputs, refs, kernel = prepare(kind, D, causal, config, T)
            run()  # compiles
            cp.cuda.Device().synchronize()
            spilled = max(k.local_mem_per_thread for k in kernel.overloads.values())
            if spilled > 16:
                return task, f"spills {spilled} bytes", times
            for out, ref in zip(outputs, refs):
                got = out[:1, :, :2].astype(cp.float32)
                error = float(cp.linalg.norm(got - ref) / cp.linalg.norm(ref))
                if not error < 1e-2:
                    return task, f"wrong: error {error:.1e} at T = {T}", times
            with LOCK:
                times[T] = graph_ms(run)
    except Exception as error:
        return task, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}", times
    return task, "", times


def start_worker(lock):
    global LOCK
    LOCK = lock
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


# ----------------------------------------------------------------------------- all of them
def tune(options: Options) -> dict:
    """-> {(kind, D, causal): {T: (config, milliseconds)}}"""
    tasks = [
        (kind, D, causal, config, tuple(options.lengths))
        for kind, D, causal in itertools.product(options.kernels, options.heads, options.causal)
        for config in CANDIDATES[kind, D]
    ]
    context, best = multiprocessing.get_context("spawn"), {}
    with context.Pool(min(options.jobs, len(tasks)), start_worker, (context.Lock(),)) as pool:
        for task, wrong, times in pool.imap_unordered(measure, tasks, chunksize=1):
            kind, D, causal, config, _ = task
            for T, ms in times.items():
                row = best.setdefault((kind, D, causal), {})
                if T not in row or ms < row[T][1]:
                    row[T] = config, ms
            rates = [f"T {T}: {ms:.4f} ms {tflops(kind, D, causal, T, ms):4.0f}" for T, ms in times.items()]
            mode = "causal" if causal else "full"
            print(f"{kind:5} D {D:3} {mode:6} {config!s:26}", " | ".join(rates), wrong, flush=True)
    return best


def tflops(kind, D, causal, T, ms):
    B, H = CLASSES[T]
    return WORK[kind] * 4 * B * H * T * T * D / (2 if causal else 1) / ms / 1e9


def write(best: dict) -> None:
    import cupy as cp

    from xtrain.kernels.flash_attention_table import TABLE

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
    lines = "".join(f"    {key!r}: {table[key]!r},\n" for key in sorted(table, key=str))
    TABLE_FILE.write_text(f'{head}GPU = "{name}"\nTABLE = {{\n{lines}}}\n', encoding="utf-8")


def main(options: Options) -> None:
    best = tune(options)
    pprint.pp(best)
    if options.write:
        write(best)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
