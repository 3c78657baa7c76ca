"""Reads the folder of a run as far as possible: the run may still be training, have been killed or
have damaged files."""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import reading
from . import axes
from .chart import Points


@dataclass
class Record:
    """The content of the files of one run. missing: sentences about what could not be read.

    metrics, layers, timing: the JSON lines of their files, each with a "step". samples: (step,
    text).
    starts, rollouts: the lines of starts.jsonl and rollouts.jsonl.
    """

    name: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    sentence: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @cached_property
    def axes(self) -> axes.Axes | None:
        """The steps in tokens and in seconds; None if timing.jsonl does not say it."""
        return axes.read(self.timing)

    def points(self, key: str, lines: list[dict[str, Any]] | None = None) -> Points:
        """Return (step, value) of every line that has the key, in ascending order.

        value None: not a finite number
        """
        if lines is None:
            lines = self.metrics
        values = {line["step"]: _number(line[key]) for line in lines if key in line}
        return sorted(values.items())

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of config.json, {} if it is missing.

        name: "train", "model", "data", "machine" or "versions"
        """
        value = self.config.get(name)
        if isinstance(value, dict):
            return value
        return {}

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric."""
        values = [y for _, y in self.points(key) if y is not None]
        return values[-1] if values else None

    def best(self, key: str) -> float | None:
        """Return the lowest finite value of a metric."""
        return min((y for _, y in self.points(key) if y is not None), default=None)

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        return max((line["step"] for line in self.metrics), default=0)


def read(folder: Path) -> Record:
    """Read a run. Raises UserError if the folder is not the folder of a run."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give that of a run, such as runs/tiny")
    if not any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
        raise UserError(
            f"{folder} is not a run, because it has no config.json and no metrics.jsonl: give a "
            "folder such as runs/tiny"
        )
    run = Record(folder.resolve().name, folder)
    run.config = _object(run, "config.json")
    run.metrics, run.layers, run.timing = (
        _lines(run, name) for name in ("metrics.jsonl", "layers.jsonl", "timing.jsonl")
    )
    # runs of earlier versions have no starts, others than those of `reinforce` no rollouts
    if (folder / "starts.jsonl").is_file():
        run.starts = _lines(run, "starts.jsonl")
    if (folder / "rollouts.jsonl").is_file():
        run.rollouts = _lines(run, "rollouts.jsonl")
    text = _text(run, "samples.txt") or ""
    pieces = re.split(r"^--- step (\d{1,12})$\n?", text, flags=re.M)
    run.samples = [(int(n), s.rstrip("\n")) for n, s in zip(pieces[1::2], pieces[2::2])]
    run.sentence, run.profile = (
        _object(run, name) if (folder / name).is_file() else {}
        for name in ("sentence.json", "profile.json")
    )
    return run


def _number(x):
    if isinstance(x, (int, float)) and abs(x) < 1e300:
        return float(x)
    return None


def _text(run, name):
    path = run.folder / name
    if not path.is_file():
        run.missing.append(f"{name} is missing")
        return None
    with reading(path):
        return path.read_bytes().decode("utf-8", "replace")


def _object(run, name):
    text = _text(run, name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        run.missing.append(f"{name} is damaged")
        return {}
    return value


def _lines(run, name):
    records = []
    bad = 0
    for line in (_text(run, name) or "").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if (
            isinstance(record, dict)
            and type(record.get("step")) is int
            and 0 <= record["step"] < 2**53
        ):
            records.append(record)
        else:
            bad += bool(line.strip())
    if bad:
        run.missing.append(f"{bad} lines of {name} are damaged")
    return records
