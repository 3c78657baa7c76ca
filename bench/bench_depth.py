"""Runs of the family of --depth: validation loss and time, at the rule's learning rate and beside it.

    python bench/bench_depth.py --data FILE [--depths 2 3 4] [--rates 0.5 1 2]

Every run is `xtrain train --depth N` on the same text with its own number of steps. The runs at
other learning rates show whether the rule's is near the best one. `value` and
`loss` are the validation loss at the end, `ms` is the time of the whole command.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from _timing import record

from xtrain import family
from xtrain.config import ModelConfig


@dataclass
class Options:
    data: list[Path]  # files or folders of text
    depths: list[int] = field(default_factory=lambda: [2, 3, 4])
    rates: list[float] = field(default_factory=lambda: [1.0])  # times the rule's


def rules(depth: int) -> dict:
    """Return the options that the rules give a depth."""
    sizes = {"vocab_size": family.VOCAB_SIZE, "max_seq_len": family.SEQ_LEN}
    model = ModelConfig(**family.shape(depth), **sizes)
    return family.options(model, family.SEQ_LEN, None, None)


def run(o: Options, depth: int, factor: float, out: str) -> None:
    """Train one model and record it."""
    rule = rules(depth)
    name = f"d{depth}-{factor}"
    command = [sys.executable, "-m", "xtrain", "train", "--depth", str(depth), "--name", name]
    command += ["--lr", str(rule["lr"] * factor), "--out", out, "--sample-every", "0"]
    command += ["--precision", "bf16", "--device", "gpu"]
    start = time.perf_counter()
    subprocess.run([*command, "--data", *map(str, o.data)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    lines = (Path(out) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [x for x in map(json.loads, lines) if "val_loss" in x][-1]
    record(
        "bench_depth",
        f"depth {depth}, rate x {factor:g}",
        shape=f"{last['step']} steps of {rule['batch']}x{family.SEQ_LEN}",
        dtype="bf16",
        ms=seconds * 1e3,
        value=last["val_loss"],
        unit="nats a token",
        loss=round(last["val_loss"], 4),
        bits_per_byte=round(last["val_bpb"], 4),
        learning_rate=rule["lr"] * factor,
    )


def main() -> None:
    """Train every depth at every rate."""
    o = tyro.cli(Options, description=__doc__)
    with tempfile.TemporaryDirectory() as out:
        for depth in o.depths:
            for factor in o.rates:
                run(o, depth, factor, out)


if __name__ == "__main__":
    main()
