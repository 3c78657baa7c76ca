"""Muon against AdamW: steps until AdamW's final validation loss, and the time of a step.

    python bench/bench_muon.py TEXT [--preset dim384] [--steps 2000] [--rates 6e-4 1.2e-3 2.4e-3 4.8e-3]

Both optimizers train on the same text with the same seed, batches and schedule, once per peak learning rate; the best rate of
each is the one with the lowest loss at the end. A record has the loss of each validation. `value` is the first step at which
Muon's validation loss is at most the one that AdamW ends with, as a share of AdamW's steps; Muon's schedule is as long as
AdamW's, so a shorter schedule may need fewer. ms is the median of a step, batches included, validation not.

TEXT: a file or folder, as for `xtrain.train --data`. Its name and size are in the record, not the text.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _timing import record

WARM_UP = 50  # steps before the CUDA graph and the clocks are warm


def lines(path):
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(o, out, optimizer, rate):
    """One run. -> ([(step, validation loss)], median milliseconds of a step, peak GB)."""
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


def main():
    """Run all rates of both optimizers and write one record each for the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--preset", default="dim384")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-4, 1.2e-3, 2.4e-3, 4.8e-3])
    o = parser.parse_args()
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
            "bench_muon", f"{o.preset}/{optimizer}", shape=f"{o.steps} steps, vocabulary {o.vocab_size}", dtype="bf16",
            ms=ms, value=100 * (reached or 0) / o.steps, unit="% of AdamW's steps" if reached else "never",
            peak_gb=round(gb, 2), lr=result["rate"], final_losses=result["ends"], target=target, curve=curve,
            text_mb=text_mb,
        )  # fmt: skip


if __name__ == "__main__":
    main()
