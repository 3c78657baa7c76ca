"""A profile that belongs to a run: measured with the run's model and options, kept in its folder for the page."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import ModelConfig
from ..errors import UserError
from ..files import cannot_write, write_whole
from .record import read

SAME = (
    "seq_len",
    "precision",
    "recompute",
    "graph",
)  # options of a run that the profile takes over


class Keeping(Console):
    """A console that remembers the tables it has printed, and the lines between them."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.tables: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def print(self, *things: Any, **options: Any) -> None:
        for thing in things:
            if isinstance(thing, Table):
                rows = zip(*(column.cells for column in thing.columns))
                self.tables.append(
                    {
                        "title": str(thing.title),
                        "columns": [str(column.header) for column in thing.columns],
                        "rows": [[Text.from_markup(str(x)).plain for x in row] for row in rows],
                    }
                )
            else:
                self.lines.append(Text.from_markup(str(thing)).plain)
        super().print(*things, **options)

    def keep(self, folder: Path) -> Path:
        """Write what was printed. -> profile.json. Raises UserError."""
        path = folder / "profile.json"
        content = {"about": "; ".join(self.lines), "tables": self.tables}
        try:
            write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise cannot_write(path, error) from error
        return path


def shape_of(folder: Path) -> tuple[ModelConfig, int, int]:
    """The model of a run, its micro-batch and its T. Raises UserError."""
    run = read(folder)
    train = run.part("train")
    try:
        return (
            ModelConfig.from_dict(run.part("model")),
            int(train["micro_batch"]),
            int(train["seq_len"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / 'config.json'} does not say which model this is: {error}"
        ) from None


def with_options_of(folder: Path, options: Any) -> Any:
    """options (a dataclass), as the run in `folder` had them."""
    train = read(folder).part("train")
    return dataclasses.replace(options, **{name: train[name] for name in SAME if name in train})
