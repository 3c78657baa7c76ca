"""The folder of a run: its checkpoints, and which one to load.

    runs/NAME/checkpoints/step-000200/      a Hugging Face folder, with manifest.json and state.json

training/checkpoint.py writes them. Whatever takes the folder of a model takes the folder of a run,
too (model_folder).
"""

import contextlib
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import is_folder, read_json, reading
from .gguf_tensors import is_gguf
from .manifest import Damaged, Unreadable, verify

CONFIG = "config.json"
STATE = "state.json"
EMA = "ema"  # folder in a checkpoint: the same model with the moving average of the weights
_natural = lambda x: type(x) is int and 0 <= x < 2**53
_object = lambda x: isinstance(x, dict)
# What state.json holds, and a test of each value: other programs may have edited the file.
STATE_VALUES: dict[str, Callable[[Any], bool]] = {
    "step": _natural,  # steps of the run
    "optimizer_step": _natural,  # t of AdamW: steps since its moments were zero
    "loader": _object,  # the position in the data: Shuffled.state_dict
    "options": _object,  # Run.resume_options
    "made_on": _object,  # Run.made_on
    # the length of samples.txt in bytes, to which a resumed run cuts it back; the .jsonl files are
    # cut by their steps
    "logs": lambda x: _object(x) and all(map(_natural, x.values())),
    "row": _natural,  # skipped steps in a row up to this step
    "skipped": _natural,  # skipped steps in all
    # measured at this very step, smaller is better: decides which checkpoint is the best
    "val_loss": lambda x: x is None or (type(x) in (int, float) and math.isfinite(x)),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: its folder and the contents of state.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.state["step"]


def folders(run: Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first."""
    with reading(run):
        paths = list((run / "checkpoints").glob("step-*"))
    return sorted((p for p in paths if re.fullmatch(r"step-\d+", p.name)), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name[5:])


def best(checkpoints: list[Path]) -> Path | None:
    """Return the checkpoint with the lowest validation loss, or what --best names, that was measured
    at its own step; the earlier of two equal ones. None if nothing was measured."""
    losses: dict[Path, float] = {}
    metric = None
    for folder in checkpoints:
        with contextlib.suppress(UserError):
            state = read_json(folder / STATE)
            loss = state.get("val_loss")
            if not isinstance(loss, float) or not math.isfinite(loss):
                continue
            if state.get("metric") != metric:  # the run was resumed with another --best
                losses = {}
            metric = state.get("metric")
            losses[folder] = loss
    return min(losses, key=losses.__getitem__, default=None)


def named_best(run: Path) -> Path | None:
    """Return the best checkpoint of a run that has --best, else None."""
    with contextlib.suppress(UserError):
        options = read_json(run / CONFIG).get("train")
        if isinstance(options, dict) and options.get("best"):
            return best(folders(run))
    return None


def _to_load(run: Path, warn: Callable[[str], None]) -> Path:
    """Return the checkpoint that the folder of a run means. Raises UserError."""
    if folder := named_best(run):
        try:
            return open_checkpoint(folder).folder
        except Unreadable:
            raise
        except UserError as error:
            warn(f"{error}: it is the best one, loading the newest")
    return newest(run, warn, "there is nothing to load").folder


def newest(
    run: Path,
    warn: Callable[[str], None] = lambda sentence: None,
    advice: str = "start again under another --name",
) -> Saved:
    """Return the newest undamaged checkpoint of a run.

    warn: called with a sentence about each newer, damaged one

    Raises UserError if there is none, and Unreadable if one cannot be read at the moment; an older
    checkpoint is not used instead.
    """
    checkpoints = folders(run)
    wrong = []
    if not checkpoints:
        raise UserError(
            f"{run} holds no checkpoint to resume from: start without --resume, or check --name "
            "and --out"
        )
    for folder in reversed(checkpoints):
        try:
            saved = open_checkpoint(folder)
        except Unreadable:
            raise
        except UserError as error:
            wrong.append(str(error))
            continue
        for sentence in wrong:
            warn(f"{sentence}: going back to {folder.name}")
        return saved
    raise UserError(f"no checkpoint of {run} can be used: {'; '.join(wrong)}: {advice}")


def open_checkpoint(folder: Path) -> Saved:
    """Verify a checkpoint and read its state. Raises UserError, Damaged or Unreadable."""
    verify(folder)
    state = read_json(folder / STATE)
    missing = {"step", "optimizer_step", "loader", "options", "made_on", "row"} - state.keys()
    if missing:
        raise Damaged(f"{folder}: {STATE} lacks {', '.join(sorted(missing))}")
    wrong = [
        name for name, valid in STATE_VALUES.items() if name in state and not valid(state[name])
    ]
    if wrong:
        raise Damaged(f"{folder}: {STATE} has a value of the wrong type for {', '.join(wrong)}")
    if state["step"] != step_of(folder):
        raise Damaged(f"{folder} holds the checkpoint of step {state['step']}: its name is wrong")
    return Saved(folder, state)


def model_folder(folder: Path, warn: Callable[[str], None] = warnings.warn) -> Path:
    """Return `folder` itself, or if it is a run, its newest undamaged checkpoint, with --best the
    best.

    warn: called with a sentence about each damaged checkpoint

    RUN/ema is the moving average of the weights in that checkpoint. OWNER/NAME, a model of the Hub,
    is its folder in the cache of huggingface_hub, if it was downloaded there before. A GGUF file is
    a folder in xtrain's cache that describes it (gguf_model.py).
    Raises UserError if there is no such folder, or the run has no usable checkpoint.
    """
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", folder.as_posix())
    if hub_name and not folder.exists() and (cached := _in_hub_cache(hub_name[0])):
        return cached
    if folder.name == EMA and not folder.exists() and folders(folder.parent):
        average = _to_load(folder.parent, warn) / EMA
        if not is_folder(average):
            raise UserError(
                f"{average.parent} has no moving average of the weights: train with --ema 0.999"
            )
        return average
    if not is_folder(folder):
        if folder.is_file() and is_gguf(folder):
            from .gguf_model import folder_of  # imports tokenizers

            return folder_of(folder)
        what = "does not exist"
        if folder.exists():
            what = "is a file, but not in GGUF format"
        hint = ""
        if hub_name and not folder.parent.exists():  # else it is a name in that folder, misspelt
            install = "pip install huggingface_hub && "
            if find_spec("huggingface_hub"):
                install = ""
            download = f"{install}hf download {hub_name[0]}"
            hint = (
                f" (nothing is downloaded; if it is a model of the Hub: `{download}`, then try "
                "again)"
            )
        raise UserError(f"{folder} {what}: give the folder of a model or of a run{hint}")
    if folders(folder):
        return _to_load(folder, warn)
    config = folder / CONFIG
    if config.is_file() and {"train", "model"} <= read_json(config).keys():
        raise UserError(f"{folder} is a run without a checkpoint: train it first")
    return folder


def _in_hub_cache(name: str) -> Path | None:
    """Return the newest revision that huggingface_hub has downloaded. Downloads nothing."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # it is not there, or no name of the Hub
        return None
