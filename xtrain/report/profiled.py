"""The profile of a run: measured with its model and options, stored in its folder (profile.json)
and shown on its page."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..config import ModelConfig
from ..console import PrintableConsole
from ..errors import UserError
from ..files import cannot_write, write_whole
from .record import read

SHARED_OPTIONS = (
    "seq_len",
    "precision",
    "fp8_head",
    "recompute",
    "graph",
    "change",
)  # copied from the run's options


class RecordingConsole(PrintableConsole):
    """A console that stores the tables that it prints, and the lines between them."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.tables: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def print(self, *objects: Any, **options: Any) -> None:
        """Print and store."""
        for each in objects:
            if isinstance(each, Table):
                rows = zip(*(column.cells for column in each.columns))
                self.tables.append(
                    {
                        "title": str(each.title),
                        "columns": [str(column.header) for column in each.columns],
                        "rows": [[Text.from_markup(str(x)).plain for x in row] for row in rows],
                    }
                )
            else:
                self.lines.append(Text.from_markup(str(each)).plain)
        super().print(*objects, **options)

    def save(self, folder: Path) -> Path:
        """Write what was printed to profile.json and return its path. Raises UserError."""
        path = folder / "profile.json"
        content = {"about": "; ".join(self.lines), "tables": self.tables}
        try:
            write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise cannot_write(path, error) from error
        return path


def shape_of(folder: Path) -> tuple[ModelConfig, int, int]:
    """Return the model of a run, its micro-batch size and its sequence length. Raises UserError."""
    run = read(folder)
    train = run.section("train")
    try:
        return (
            ModelConfig.from_dict(run.section("model")),
            int(train["micro_batch"]),
            int(train["seq_len"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / 'config.json'} does not describe a model ({error}): give the folder of "
            "another run"
        ) from None


def with_options_of(folder: Path, options: Any) -> Any:
    """Return a copy of `options` (a dataclass) with SHARED_OPTIONS of the run in `folder`."""
    train = read(folder).section("train")
    shared = {name: train[name] for name in SHARED_OPTIONS if name in train}
    return dataclasses.replace(options, **shared)
