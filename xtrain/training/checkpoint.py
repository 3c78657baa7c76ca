"""Save a run and go on from it, bit for bit.

    runs/NAME/checkpoints/step-000200/
        config.json, model.safetensors, tokenizer.json ...   the model in the Hugging Face layout: it can be served as it is
        optimizer.safetensors                                 both AdamW moments, tensor by tensor: m.NAME, v.NAME
        state.json                                            step, position in the data, options of the run
        manifest.json                                         a checksum of every file and tensor: see manifest.py

How one is made: `take` copies the state to host memory, which is all that training waits for; `write` puts it into a folder
beside its place, reads that back, waits until it is on the disk and renames it. So a checkpoint is there whole or not at
all, and one that was damaged later is noticed. Nothing in it depends on how parameters are packed or padded in memory, or
on the number of ranks.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..device import HostCopies, is_gpu, to_device
from ..errors import UserError
from ..files import cannot_write, sync, sync_folder
from ..formats import huggingface
from ..formats.manifest import (
    Damaged,
    Unreadable,
    tensor_checksum,
    unlisted,
    verify,
    write_manifest,
)
from ..formats.tensor_file import read_header, write_safetensors
from ..json_files import read_json, reading
from ..nn.autograd import Tensor
from ..nn.model import Transformer
from ..nn.optim import AdamW

OPTIMIZER, STATE = "optimizer.safetensors", "state.json"
LOGS = ("metrics.jsonl", "layers.jsonl", "timing.jsonl", "samples.txt")  # of a run: see logbook.py
TEMPORARY = ".step-*.tmp"  # what is being written, or was when somebody pulled the plug


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: its folder and what state.json says."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


# ----------------------------------------------------------------------------- taking
@dataclass(frozen=True)
class Snapshot:
    """A state in host memory that no later step changes. It can be written by another thread.

    tensors, moments: {name: array in the Hugging Face shape}.  wait: until the copies have arrived.
    """

    config: ModelConfig
    tensors: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    state: dict[str, Any]  # what state.json will say
    tokenizer: Any
    wait: Callable[[], None]
    variation: str = ""  # Transformer.variation

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As a model has it: what huggingface.write_files asks for."""
        return ((name, Tensor(values)) for name, values in self.tensors.items())


def take(
    model: Transformer, optimizer: Any, state: dict[str, Any], tokenizer: Any, copies: HostCopies
) -> Snapshot:
    """Copy everything that is to be saved. optimizer: anything with the moments m and v of the whole arena, and t.

    `copies` lends the memory: nobody may take another snapshot with it while this one is in use.
    """
    weights, m, v = (
        copies(name, x)
        for name, x in (("w", model.arena.weights), ("m", optimizer.m), ("v", optimizer.v))
    )
    moments = {
        f"{letter}.{name}": view
        for letter, x in (("m", m), ("v", v))
        for name, view in model.views(x)
    }
    return Snapshot(
        model.config, dict(model.views(weights)), moments, {**state, "optimizer_step": optimizer.t}, tokenizer,
        copies.event(), model.variation,
    )  # fmt: skip


# ----------------------------------------------------------------------------- writing
def write(run: Path, snapshot: Snapshot) -> Path:
    """Write run/checkpoints/step-NNNNNN. -> its folder. Raises UserError when it cannot; then nothing of it stays."""
    folder = run / "checkpoints" / f"step-{snapshot.state['step']:06d}"
    new = folder.with_name(f".{folder.name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_strays(folder.parent)
        new.mkdir()
        snapshot.wait()
        _write_files(new, snapshot)
        sync_folder(new)
        # a checkpoint must not be newer than the numbers that led to it
        for log in filter(Path.is_file, (run / name for name in LOGS)):
            sync(log)
        _publish(new, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    except UserError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise cannot_write(folder, error.__context__) from error  # what was written is gone
    finally:
        _remove(new)
    return folder


def _write_files(folder, snapshot):
    tensors = {**snapshot.tensors, **snapshot.moments}
    checksums = {name: tensor_checksum(values) for name, values in tensors.items()}
    huggingface.write_files(snapshot, folder, snapshot.tokenizer)
    write_safetensors(folder / OPTIMIZER, {n: Tensor(x) for n, x in snapshot.moments.items()})
    text = json.dumps(snapshot.state, indent=2, sort_keys=True)
    (folder / STATE).write_text(text + "\n", encoding="utf-8")
    write_manifest(folder, checksums)


def _publish(new, folder):
    # what is there is damaged (the run had to go back further), or not even a folder
    aside = _put_aside(folder) if os.path.lexists(folder) else None
    new.rename(folder)
    sync(folder.parent)
    sync(folder.parent.parent)
    if aside is not None:
        _remove(aside)


def _put_aside(folder):
    """Before a checkpoint is removed: should that be interrupted, what is left does not look like one."""
    return folder.rename(folder.with_name(f".{folder.name}.old.tmp"))


def _remove_strays(folder):
    for stray in folder.glob(TEMPORARY):
        _remove(stray)


def _remove(path):
    """A folder with all that is in it, or whatever else has the name; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def prune(run: Path, newest: int, keep: int) -> None:
    """After checkpoint `newest` was written: remove all but the last `keep` up to it and the best on validation. 0: keep all.

    Later ones are of a future that is no more: they could not be read when the run went on from an earlier one. One in
    which somebody has put files of his own stays.
    """
    there = folders(run)
    past = [folder for folder in there if _step(folder) <= newest]
    kept = set(past[-keep:] if keep else past)
    kept |= {best for best in [_best(past)] if best is not None}
    for folder in there:
        if folder not in kept:
            with contextlib.suppress(OSError):  # the next one tries again
                if not _has_unlisted(folder):
                    _remove(_put_aside(folder))
    _remove_strays(run / "checkpoints")


def _has_unlisted(folder):
    try:
        return bool(unlisted(folder))
    except Unreadable:  # nobody knows
        return True
    except UserError:  # no sound manifest
        return False


def _best(past):
    """The checkpoint with the lowest validation loss, measured at that very step; the earlier of two equal ones."""
    losses = {}
    for folder in past:
        with contextlib.suppress(UserError):
            loss = read_json(folder / STATE).get("val_loss")
            if isinstance(loss, float):
                losses[folder] = loss
    return min(losses, key=losses.get, default=None)


# ----------------------------------------------------------------------------- finding
def folders(run: Path) -> list[Path]:
    """All checkpoints of a run, oldest first."""
    with reading(run):
        found = list((run / "checkpoints").glob("step-*"))
    return sorted((p for p in found if re.fullmatch(r"step-\d+", p.name)), key=_step)


def _step(folder):
    return int(folder.name[5:])


def newest(
    run: Path,
    say: Callable[[str], None] = lambda sentence: None,
    advice: str = "start again under another --name",
) -> Saved:
    """The last good checkpoint of a run; say(what is wrong) for each newer one. Raises UserError when there is none,
    and Unreadable, rather than go back, when one cannot be read at the moment."""
    there, wrong = folders(run), []
    if not there:
        raise UserError(
            f"{run} holds no checkpoint to resume from: start without --resume, or check --name and --out"
        )
    for folder in reversed(there):
        try:
            saved = _open(folder)
        except Unreadable:
            raise
        except UserError as error:
            wrong.append(str(error))
            continue
        for sentence in wrong:
            say(f"{sentence}: going back to {folder.name}")
        return saved
    raise UserError(f"no checkpoint of {run} can be used: {'; '.join(wrong)}: {advice}")


def _open(folder):
    verify(folder)
    state = read_json(folder / STATE)
    missing = {"step", "optimizer_step", "loader", "options", "made_on", "row"} - state.keys()
    if missing:
        raise Damaged(f"{folder}: {STATE} lacks {', '.join(sorted(missing))}")
    if state["step"] != _step(folder):
        raise Damaged(f"{folder} is the checkpoint of step {state['step']}, not what its name says")
    return Saved(folder, state)


# ----------------------------------------------------------------------------- loading
def load(saved: Saved, model: Transformer, optimizer: AdamW) -> None:
    """Fill model and optimizer. Raises UserError when the files are damaged or belong to another model.

    Names and shapes are looked at first: where they do not fit, model and optimizer are unchanged.
    """
    path, moments = saved.folder / OPTIMIZER, {"m": optimizer.m, "v": optimizer.v}
    stored = read_header(path)
    for letter, array in moments.items():
        for name, view in model.views(array):
            tensor = stored.get(f"{letter}.{name}")
            if tensor is None or tensor.shape != view.shape:
                raise UserError(f"{path} does not belong to this model ({letter}.{name})")
    huggingface.load_into(model, saved.folder)
    for letter, array in moments.items():
        values = np.zeros(array.shape, np.float32)
        for name, view in model.views(values):
            view[...] = stored[f"{letter}.{name}"].read()
        array[...] = to_device(values, model.device) if is_gpu(array) else values
    optimizer.t = saved.state["optimizer_step"]
