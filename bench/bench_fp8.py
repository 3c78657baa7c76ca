"""Training in fp8 next to bf16: the matrix products of a step, and the losses of whole runs.

(Whole steps: bench_train.py.)

    python bench/bench_fp8.py products [--models gpt124m qwen3-0.6b tinyllama-1.1b]
    python bench/bench_fp8.py losses [--models dim768 300m] [--variants bf16 fp8 fp8-head] [--steps
    2000] [--text PATH ...]

products: forward, input gradient and weight gradient of every matrix of the blocks, and of the head
in its chunks of rows, in bf16 and on fp8 codes with one scale per matrix. The codes are random, and
making them is not part of the time (bench_kernels.py has that). One layer, or one chunk, is one
CUDA graph; ms is that of the whole step, `value` the rate, the peer bf16's.

losses: the same text, seed, batches and schedule in each variant, bf16 the first. `value` is by how
much the validation loss at the end exceeds bf16's, in percent. A record has the curves (validation,
and the mean training loss of each 50 steps), the numbers that were clamped or not finite, in all
and by kind of tensor, and the median time of a step. TEXT: files or folders as for `xtrain.train
--data`; default: this repository.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import cupy as cp
import numpy as np
from _timing import graph_ms, record
from bench_train import SHAPES, model_config

from xtrain.config import SHAPE_OPTIONS
from xtrain.kernels.cast import BFLOAT16, cast_fwd
from xtrain.kernels.fp8_gemm import Operand, fp8_matmul
from xtrain.kernels.gemm import linear_into, matmul
from xtrain.kernels.linear_cross_entropy import chunk_rows
from xtrain.nn.fp8 import HEAD_KINDS, KINDS

ROOT = Path(__file__).resolve().parent.parent
TEXT = [str(ROOT / name) for name in ("xtrain", "lessons", "tests", "bench", "README.md")]
WARM_UP = 50  # steps before the CUDA graph and the clocks are warm
MEAN = 50  # steps of which the training curve has the mean
LR = {"300m": 4e-4}  # of the shapes in bench_train.py


# ----------------------------------------------------------------------------- products
def matrices(config) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the matrices of a block."""
    C = config.dim
    F = config.hidden_dim
    D = config.head_dim
    heads = config.n_heads + 2 * config.n_kv_heads
    return [(heads * D, C), (C, config.n_heads * D), (2 * F, C), (C, F)]


def products(shapes: list[tuple[int, int]], rows: int, kinds: dict[str, str]):
    """Return two functions: the three products of each matrix, in bf16 and in fp8."""
    draw = cp.random.default_rng(0)
    numbers = lambda *shape: cast_fwd(draw.standard_normal(shape, dtype=np.float32), BFLOAT16)
    scale = cp.full(1, 0.01, np.float32)
    # positive codes below infinity and NaN
    codes = lambda kind, *shape: Operand(draw.integers(0, 0x70, shape, dtype=np.uint8), scale, kind)
    in_bf16 = []
    in_fp8 = []
    for outputs, inputs in shapes:
        y, dx = cp.empty((rows, outputs), BFLOAT16), cp.empty((rows, inputs), BFLOAT16)
        dw = cp.zeros((outputs, inputs), np.float32)
        x_w_dy = (rows, inputs), (outputs, inputs), (rows, outputs)
        in_bf16.append((y, dx, dw, *(numbers(*shape) for shape in x_w_dy)))
        plain = [codes(kind, *shape) for kind, shape in zip(kinds.values(), x_w_dy)]
        transposed = [codes(kind, *shape[::-1]) for kind, shape in zip(kinds.values(), x_w_dy)]
        in_fp8.append((y, dx, dw, *plain, *transposed))

    def bf16():
        for y, dx, dw, x, w, dy in in_bf16:
            linear_into(y, x, w)
            matmul(dx, dy, w)
            matmul(dw, dy, x, trans_a=True, accumulate=True)

    def fp8():
        for y, dx, dw, x, w, dy, x_t, w_t, dy_t in in_fp8:
            fp8_matmul(y, x, w)
            fp8_matmul(dx, dy, w_t)
            fp8_matmul(dw, dy_t, x_t, accumulate=True)

    return bf16, fp8


def bench_products(name: str) -> None:
    """Time the products of a step of one model and append two records."""
    config, B, T = model_config(name)
    N = B * T
    head = (config.padded_vocab_size, config.dim)
    rows = chunk_rows(N)
    for part, shapes, n, times, kinds in (
        ("blocks", matrices(config), N, config.n_layers, KINDS),
        ("head", [head], rows, N / rows, HEAD_KINDS),
    ):
        bf16_ms, fp8_ms = (times * graph_ms(f)[0] for f in products(shapes, n, kinds))
        flops = 6 * n * times * sum(a * b for a, b in shapes)
        record(
            "bench_fp8",
            f"{name}/products/{part}",
            shape=f"B={B} T={T} V={config.vocab_size}",
            dtype="fp8",
            ms=fp8_ms,
            value=flops / fp8_ms / 1e9,
            unit="TFLOP/s",
            peer="bf16",
            peer_value=flops / bf16_ms / 1e9,
            peer_ms=round(bf16_ms, 4),
        )
        cp.get_default_memory_pool().free_all_blocks()


# ----------------------------------------------------------------------------- losses
def command(o, out: Path, model: str, variant: str) -> list[str]:
    """Return the command line of one run."""
    preset = "gpt124m" if model in SHAPES else model
    given = {
        "out": out,
        "name": variant,
        "preset": preset,
        "precision": variant.removesuffix("-head"),
        "steps": o.steps,
        "eval-every": o.eval_every,
        "vocab-size": 16384,
        "sample-every": o.steps,
        "save-every": o.steps,
    }
    if model in SHAPES:
        shape, batch, T = SHAPES[model]
        options = {option: shape[name] for option, name in SHAPE_OPTIONS.items() if name in shape}
        given |= {"seq-len": T, "batch": batch, "lr": LR[model], **options}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    head = ["--fp8-head"] if variant.endswith("-head") else []
    return [sys.executable, "-m", "xtrain.train", *words, *head, "--data", *o.text]


def lines(path: Path) -> list[dict]:
    """Return the records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def results(run: Path) -> dict:
    """Return the fields of a record, from the folder of a run."""
    metrics, timing = lines(run / "metrics.jsonl"), lines(run / "timing.jsonl")
    steps = [m for m in metrics if "loss" in m]
    losses = [m["loss"] for m in steps]
    counts: dict[str, float] = {}
    for key, n in ((k, n) for m in steps for k, n in m.items() if k.startswith("fp8_")):
        counts[key] = counts.get(key, 0) + n
    return dict(
        ms=statistics.median(t["ms"] for t in timing[WARM_UP:]),
        peak_gb=round(timing[-1]["memory_bytes"] / 1e9, 2),
        curve=[(m["step"], round(m["val_loss"], 4)) for m in metrics if "val_loss" in m],
        train_curve=[
            (i + MEAN, round(statistics.fmean(losses[i : i + MEAN]), 4))
            for i in range(0, len(losses) - MEAN + 1, MEAN)
        ],
        skipped=sum("skipped" in m for m in steps),
        counts=counts,
    )


def bench_losses(o, model: str) -> None:
    """Train one model in each variant and append a record for each."""
    bf16_end = 0.0
    with tempfile.TemporaryDirectory() as out:
        for variant in o.variants:
            done = subprocess.run(
                command(o, Path(out), model, variant), capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            found = results(Path(out) / variant)
            end = found["curve"][-1][1]
            bf16_end = end if variant == "bf16" else bf16_end
            excess = 100 * (end / bf16_end - 1)
            record(
                "bench_fp8",
                f"{model}/losses/{variant}",
                shape=f"{o.steps} steps",
                dtype=variant.removesuffix("-head"),
                value=excess,
                unit="% above bf16's validation loss",
                end=end,
                bf16_end=bf16_end,
                **found,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["products", "losses"])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--variants", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--text", nargs="+", default=TEXT)
    o = parser.parse_args()
    if o.what == "products":
        for name in o.models or ["gpt124m", "qwen3-0.6b", "tinyllama-1.1b"]:
            bench_products(name)
        return
    if o.variants[0] != "bf16":
        parser.error("the first of --variants must be bf16: the others are compared with it")
    for name in o.models or ["dim768", "300m"]:
        bench_losses(o, name)


if __name__ == "__main__":
    main()
