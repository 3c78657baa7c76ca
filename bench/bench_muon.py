"""Muon against AdamW: steps until AdamW's final validation loss, and the time of a step.

    python bench/bench_muon.py TEXT [--preset dim384] [--steps 2000]
                               [--rates 6e-4 1.2e-3 2.4e-3 4.8e-3]

Both optimizers train on the same text with the same seed, batches and schedule, once per peak
learning rate; the best rate of each is the one with the lowest loss at the end. A record has the
loss of each validation. `value` is the first step at which Muon's validation loss is at most the
one that AdamW ends with, as a share of AdamW's steps; Muon's schedule is as long as AdamW's, so a
shorter schedule may need fewer. ms is the median of a step, batches included, validation not.

TEXT: a file or folder, as for `xtrain.train --data`. Its name and size are in the record, not the
text.

    python bench/bench_muon.py --time-only [--presets dim384 dim768 gpt124m]
    python bench/bench_muon.py --count [--presets ...]

--time-only: a step of each on random tokens, bf16, the vocabulary, batch and length of
bench_train.py, AdamW and Muon in one process, median of the second half of 2 x STEPS steps. `value`
of Muon is what it adds to AdamW's step, in percent.
--count: without a GPU, launches, operations and bytes of Muon's share of a step, the matrices of
the blocks. Products, at PRODUCT_TFLOPS, and the other kernels, at COPY_TBS, one after the other,
are its shortest time; AdamW needs 30 bytes per element for the same matrices.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from xtrain.config import PRESETS, ModelConfig
from xtrain.kernels.runtime.launch import observe_launches
from xtrain.nn.model import Transformer
from xtrain.nn.optim import OPTIMIZERS, parts_of
from xtrain.training.memory_plan import planning

WARM_UP = 50  # steps before the CUDA graph and the clocks are warm
STEPS = 20  # of --time-only
# of an H100: bf16 products of a training step, device-to-device copy
PRODUCT_TFLOPS = 600
COPY_TBS = 2.8


def lines(path):
    """Return the records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(o, out, optimizer, rate):
    """Run once and return ([(step, validation loss)], median milliseconds of a step, peak GB)."""
    name = f"{optimizer}-{rate:g}"
    command = [sys.executable, "-m", "xtrain.train", "--out", str(out), "--name", name]
    command += ["--data", o.text, "--preset", o.preset, "--vocab-size", str(o.vocab_size)]
    command += ["--optimizer", optimizer, "--lr", str(rate), "--steps", str(o.steps)]
    command += ["--eval-every", str(o.eval_every)]
    command += ["--sample-every", str(o.steps), "--save-every", str(o.steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    metrics, timing = lines(out / name / "metrics.jsonl"), lines(out / name / "timing.jsonl")
    curve = [(m["step"], round(m["val_loss"], 4)) for m in metrics if "val_loss" in m]
    ms = statistics.median(t["ms"] for t in timing[WARM_UP:])
    print(f"{name}: {curve[-1][1]:.4f} at the end, {ms:.3f} ms a step", flush=True)
    return curve, ms, timing[-1]["memory_bytes"] / 1e9


def time_steps(preset):
    """Time a step with each optimizer and write the records. (Imports what needs a GPU.)"""
    import cupy as cp
    from _timing import record
    from bench_train import batches, model_config, run, xtrain_step

    config, B, T = model_config(preset)
    data = batches(config, B, T, 2 * STEPS)
    times = {}
    for name, kind in OPTIMIZERS.items():
        model = Transformer(config, device="gpu", precision="bf16")
        step = xtrain_step(model, kind=kind)
        _, times[name] = run(step, data, cp.cuda.Device().synchronize)
        del model, step
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()
    for name, ms in times.items():
        record(
            "bench_muon",
            f"{preset}/step/{name}",
            shape=f"B={B} T={T} V={config.vocab_size}",
            dtype="bf16",
            ms=ms[0],
            value=100 * (ms[0] / times["adamw"][0] - 1),
            unit="% added to AdamW's step",
            p20_p80=[round(x, 3) for x in ms[1:]],
        )


def count(preset):
    """Print launches, operations and bytes of Muon's part of a step, and its shortest time."""
    events = []
    with planning(0):
        config = ModelConfig(vocab_size=16384, **PRESETS[preset].model)
        model = Transformer(config, None, "gpu", "bf16")
        muon = OPTIMIZERS["muon"](model, 1e-3)
        with observe_launches(lambda event, start: events.append(event)):
            muon.apply(model.arena.weights[:3])  # no values: nothing is launched
    events = [e for e in events if e.name != "adamw_kernel"]
    elements = sum(rows * columns for p in muon.matrices for _, rows, columns in parts_of(p))
    products = [e.cost() for e in events if e.is_product]
    flops = sum(cost.flops for cost in products)
    moved = sum(cost.nbytes for cost in products)
    others = sum(e.cost().nbytes for e in events if not e.is_product)
    ms = flops / PRODUCT_TFLOPS / 1e9 + others / COPY_TBS / 1e9
    saved = 30 * elements / COPY_TBS / 1e9
    print(
        f"{preset}: {len(events)} launches, {len(products)} products of {flops / 1e9:.0f} GFLOP "
        f"that move {moved / 1e6:.0f} MB, other kernels {others / 1e6:.0f} MB: "
        f"at least {ms:.2f} ms, {ms - saved:.2f} more than AdamW"
    )


def main():
    """Run all rates of both optimizers and write one record each for the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?")
    parser.add_argument("--time-only", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--presets", nargs="+", default=["dim384", "dim768", "gpt124m"])
    parser.add_argument("--preset", default="dim384")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4, 1.2e-3, 2.4e-3, 4.8e-3])
    o = parser.parse_args()
    if o.time_only or o.count:
        for preset in o.presets:
            (count if o.count else time_steps)(preset)
        return
    if o.text is None:
        parser.error("give TEXT, --time-only or --count")
    from _timing import record  # needs a GPU, which --count does not

    best = {}
    with tempfile.TemporaryDirectory() as out:
        for optimizer in ("adamw", "muon"):
            runs = {rate: train(o, Path(out), optimizer, rate) for rate in o.rates}
            rate = min(runs, key=lambda rate: runs[rate][0][-1][1])
            ends = {f"{r:g}": run[0][-1][1] for r, run in runs.items()}
            best[optimizer] = dict(rate=rate, ends=ends, run=runs[rate])
    target = best["adamw"]["run"][0][-1][1]
    files = [p for p in Path(o.text).rglob("*") if p.is_file()] or [Path(o.text)]
    text_mb = round(sum(p.stat().st_size for p in files) / 1e6, 1)
    for optimizer, result in best.items():
        curve, ms, gb = result["run"]
        reached = next((step for step, loss in curve if loss <= target), None)
        record(
            "bench_muon",
            f"{o.preset}/{optimizer}",
            shape=f"{o.steps} steps, vocabulary {o.vocab_size}",
            dtype="bf16",
            ms=ms,
            value=100 * (reached or 0) / o.steps,
            unit="% of AdamW's steps" if reached else "never",
            peak_gb=round(gb, 2),
            lr=result["rate"],
            final_losses=result["ends"],
            target=target,
            curve=curve,
            text_mb=text_mb,
        )


if __name__ == "__main__":
    main()
