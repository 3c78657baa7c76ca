"""Experiment trackers, --log: the numbers of a run in Weights & Biases, trackio or TensorBoard,
through their own libraries.

A run keeps one identity, in trackers.json of its folder, so --resume continues the same logged run.
Steps that a resumed run repeats have the values that they had before. An error of a library
switches its tracker off with one warning; the run continues. Where the numbers go is the library's
own matter: WANDB_MODE=offline, WANDB_PROJECT, TRACKIO_DIR, TRACKIO_SPACE_ID and so on.
"""

import importlib
import json
import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_whole

PROJECT = "xtrain"


class _Run:
    """What the runs of Weights & Biases and of trackio share: `run` and the library's Table."""

    run: Any
    table_of: Any

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log numbers of a step."""
        self.run.log(values, step=step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Log a table of a step."""
        self.run.log({name: self.table_of(columns=columns, data=rows)}, step=step)


class Wandb(_Run):
    """Weights & Biases. It drops steps below the last one that it has, which a resumed run
    repeats."""

    module = "wandb"
    package = "wandb"

    def __init__(self, library: Any, folder: Path, identity: str, first_step: int, config: Any):
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self.table_of = library.Table
        settings = library.Settings(console="off")  # the terminal belongs to the progress bar
        self.run = library.init(
            project=project,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=config,
            settings=settings,
        )

    def close(self, failed: bool) -> None:
        """End the logged run. failed: the run ended with an error."""
        self.run.finish(exit_code=int(failed))


class Trackio(_Run):
    """trackio. It finds a run by its name alone, so the name contains the identity."""

    module = "trackio"
    package = "trackio"

    def __init__(self, library: Any, folder: Path, identity: str, first_step: int, config: Any):
        name = f"{folder.name}-{identity}"
        self.finish = library.finish
        self.table_of = library.Table
        self.run = library.init(
            project=PROJECT, name=name, resume="allow", embed=False, config=config
        )

    def close(self, failed: bool) -> None:
        """End the logged run."""
        self.finish()


class TensorBoard:
    """TensorBoard's files, in RUN/tensorboard. It hides what it has of steps that a resumed run
    repeats (purge_step)."""

    module = "tensorboardX"
    package = "tensorboardX"

    def __init__(self, library: Any, folder: Path, identity: str, first_step: int, config: Any):
        # the suffix: a file of the same second would be overwritten
        self.writer = library.SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=first_step + 1 if first_step else None,
            filename_suffix=f".{first_step}",
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log numbers of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Log a table of a step, as Markdown."""
        cell = lambda x: str(x).replace("|", "\\|").replace("\n", "<br>")
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)
        self.writer.add_text(name, text, step)

    def close(self, failed: bool) -> None:
        """Write what is pending."""
        self.writer.close()


KINDS: dict[str, type[Wandb] | type[Trackio] | type[TensorBoard]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}


def library(name: str) -> Any:
    """Return the module of a tracker, a key of KINDS. Raises UserError if its package is not
    installed."""
    kind = KINDS[name]
    try:
        return importlib.import_module(kind.module)
    except ImportError as error:
        missing = (error.name or kind.module).partition(".")[0]
        what = "a package that is not installed"
        if missing != kind.module:
            what = f"{missing}, which cannot be imported ({error})"
        raise UserError(f"--log {name} needs {what}: `pip install {kind.package}`") from None


def check_installed(names: tuple[str, ...]) -> None:
    """Raises UserError if the package of a tracker is missing. names: keys of KINDS."""
    for name in names:
        library(name)


class Trackers:
    """The trackers of one run. Errors of a library are a warning.

    names: keys of KINDS.
    first_step: the step that the run resumes from, 0 for a new run.
    config: what is logged about the run.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        folder: Path,
        first_step: int,
        config: Any,
        warn: Callable[[str], None],
    ):
        self.warn = warn
        self.open: dict[str, Any] = {}
        if not names:
            return
        identity = _identity(folder, warn)
        for name in dict.fromkeys(names):
            module = library(name)

            def start(name=name, module=module):
                self.open[name] = KINDS[name](module, folder, identity, first_step, config)

            self._try(name, start)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log numbers of a step."""
        for name, tracker in list(self.open.items()):
            self._try(name, partial(tracker.log, step, values))

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Log a table of a step."""
        for kind, tracker in list(self.open.items()):
            self._try(kind, partial(tracker.table, step, name, columns, rows))

    def close(self, failed: bool) -> None:
        """End the logged runs. failed: the run ended with an error."""
        for name, tracker in list(self.open.items()):
            self._try(name, partial(tracker.close, failed))
        self.open = {}

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a library may raise anything
            self.open.pop(name, None)
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.warn(f"--log {name} is off for the rest of this run: {text[:500]}")


def _identity(folder: Path, warn: Callable[[str], None]) -> str:
    """Return the identity of the logged run: that in trackers.json, or a new one."""
    path = folder / "trackers.json"
    try:
        run_id = json.loads(path.read_text(encoding="utf-8"))["id"]
        if not (isinstance(run_id, str) and run_id.isalnum() and len(run_id) <= 64):
            raise ValueError("not an identity")
        return run_id
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        warn(f"{path} is damaged: --log starts a new logged run")
    new = uuid.uuid4().hex[:8]
    try:
        write_whole(path, (json.dumps({"id": new}) + "\n").encode())
    except OSError as error:
        warn(f"{path} cannot be written, so --resume will start a new logged run: {error.strerror}")
    return new
