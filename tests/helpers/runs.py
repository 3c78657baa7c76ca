"""Short runs of a very small model: options, and a comparison of two runs."""

import json
from pathlib import Path

from checks import GPU
from rich.console import Console

from xtrain.config import PRESETS, Preset, TrainConfig
from xtrain.train import train

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
SILENT = Console(quiet=True)
DEVICE = "gpu" if GPU else "cpu"
SHAPE = dict(dim=64, n_layers=2, n_heads=2, head_dim=32, hidden_dim=96)
PRESETS["test"] = Preset(SHAPE, PRESETS["tiny"].train)


def options(out, **more) -> TrainConfig:
    """The options of a short run in the folder `out`; in fp32 also on a GPU."""
    defaults = {
        "preset": "test", "data": str(DATA / "grammar.txt"), "out": str(out), "name": "run", "vocab_size": 320,
        "steps": 20, "batch": 4, "seq_len": 32, "eval_batches": 2, "eval_every": 10, "sample_every": 10,
        "sample_tokens": 4, "save_every": 10, "warmup": 2, "lr": 5e-4,
        "precision": "fp32",
    }  # fmt: skip
    defaults["warmup"] = max(0, min(2, more.get("steps", 20) - 2))
    return TrainConfig(**{**defaults, **more})


def run(out, console=SILENT, **more) -> Path:
    """Train. -> the folder of the run"""
    return train(options(out, **more), console)


def write_lines(path, *records) -> str:
    """Write records as JSON lines. -> the path"""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def metrics(folder) -> list[dict]:
    """The records in metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder) -> list[str]:
    """The names of the checkpoints, sorted."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_same_run(a, b) -> None:
    """Metrics, samples and the checkpoints that both runs have are equal byte for byte."""
    both = sorted(set(checkpoints(a)) & set(checkpoints(b)))
    assert both, (checkpoints(a), checkpoints(b))
    names = ["metrics.jsonl", "layers.jsonl", "samples.txt"]
    for step in both:
        names += [f"checkpoints/{step}/{p.name}" for p in (a / "checkpoints" / step).iterdir()]
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
