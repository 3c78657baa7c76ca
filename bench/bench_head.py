"""The output head and the loss in chunks of rows: time and memory for several chunk sizes.

    python bench/bench_head.py [--models dim384 dim768 gpt124m] [--rows 1024 2048 4096 8192]
    [--precision bf16]

The time covers the head's part of a training step: logits, loss and its gradient, dx, dw (three
products of 2 N P C operations each), inside a CUDA graph. The memory is the peak in addition to x
and w: the logits of a chunk, dx and dw.
"""

from dataclasses import dataclass, field
from typing import Literal

import cupy as cp
import numpy as np
import tyro
from _timing import graph_ms, record
from bench_train import model_config

from xtrain.device import to_device
from xtrain.kernels.cast import cast_fwd
from xtrain.kernels.cross_entropy import count_targets
from xtrain.kernels.linear_cross_entropy import chunk_rows, linear_cross_entropy


@dataclass
class Options:
    models: list[str] = field(default_factory=lambda: ["dim384", "dim768", "gpt124m"])
    rows: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    precision: list[Literal["fp32", "bf16"]] = field(default_factory=lambda: ["bf16"])


def bench(name: str, precision: str, rows: int) -> None:
    """Time chunks of `rows` rows for one model and append the record."""
    config, B, T = model_config(name)
    N = B * T
    C = config.dim
    V = config.vocab_size
    P = config.padded_vocab_size
    draw = np.random.default_rng(0)
    normal = lambda *shape: to_device(draw.standard_normal(shape, np.float32), "gpu")
    kind = np.float32 if precision == "fp32" else "bfloat16"
    x, w = (cast_fwd(a, kind) for a in (normal(N, C), normal(P, C) * np.float32(0.02)))
    targets = cp.asarray(draw.integers(0, V, N))
    inverse = count_targets(targets)
    ms, p20, p80 = graph_ms(lambda: linear_cross_entropy(x, w, targets, V, inverse, rows=rows))
    step = chunk_rows(N, rows)
    nbytes = (min(step, N) * P + N * C) * x.itemsize + 4 * P * C
    record(
        "bench_head",
        f"{name} rows={rows}",
        shape=f"N={N} C={C} V={V}",
        dtype=precision,
        ms=ms,
        value=6 * N * P * C / ms / 1e9,
        unit="TFLOP/s",
        peak_gb=round(nbytes / 1e9, 3),
        p20_p80=[round(p20, 4), round(p80, 4)],
    )


def main(o: Options) -> None:
    for name in o.models:
        for precision in o.precision:
            for rows in o.rows:
                bench(name, precision, rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
