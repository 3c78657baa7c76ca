"""Save a run and go on from it, bit for bit.

    runs/NAME/checkpoints/step-000200/
        config.json, model.safetensors, tokenizer.json ...   the model in the Hugging Face layout: it can be served as it is
        optimizer.safetensors                                 both AdamW moments, tensor by tensor: m.NAME, v.NAME
        state.json                                            step, position in the data, options of the run

A checkpoint is written into a temporary folder beside its place and renamed: it is there whole or not at all. Nothing in
it depends on how parameters are packed or padded in memory.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from . import huggingface
from .config import UserError
from .device import is_gpu, to_device, to_numpy
from .model import Transformer
from .optim import AdamW


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: its folder and what state.json says."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


def save(
    run: Path, model: Transformer, optimizer: AdamW, state: dict[str, Any], tokenizer=None
) -> Path:
    """Write run/checkpoints/step-NNNNNN; `state` must hold "step". -> its folder. Raises UserError when it cannot."""
    folder = run / "checkpoints" / f"step-{state['step']:06d}"
    with whole_folder(folder) as temporary:
        huggingface.write_files(model, temporary, tokenizer)
        moments = {}
        for letter, array in (("m", optimizer.m), ("v", optimizer.v)):
            for name, view in model.views(to_numpy(array)):
                moments[f"{letter}.{name}"] = np.ascontiguousarray(view)
        safetensors.numpy.save_file(moments, temporary / "optimizer.safetensors")
        text = json.dumps({**state, "optimizer_step": optimizer.t}, indent=2, sort_keys=True)
        (temporary / "state.json").write_text(text + "\n", encoding="utf-8")
    return folder


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that takes the place of `folder` at the end. On any failure nothing of it stays."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    except SafetensorError as error:  # the library wraps the operating system's error in its own
        raise UserError(
            f"{folder} cannot be written ({error}): make room or choose another --out"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(f"no space left to write {path}: make room or choose another --out")
    return UserError(f"{path} cannot be written ({error.strerror or error}): choose another --out")


def newest(run: Path) -> Saved:
    """The last checkpoint of a run. Raises UserError when there is none or its state cannot be read."""
    folders = sorted((run / "checkpoints").glob("step-*"), key=lambda p: (len(p.name), p.name))
    if not folders:
        raise UserError(
            f"{run} holds no checkpoint to resume from: start without --resume, or check --name and --out"
        )
    try:
        state = json.loads((folders[-1] / "state.json").read_text(encoding="utf-8"))
        complete = {"step", "optimizer_step", "loader", "options"} <= state.keys()
    except (OSError, ValueError, AttributeError):
        complete = False
    if not complete:
        raise UserError(
            f"{folders[-1] / 'state.json'} is missing or damaged: delete that folder to resume from the one before"
        )
    return Saved(folders[-1], state)


def load(saved: Saved, model: Transformer, optimizer: AdamW) -> None:
    """Fill model and optimizer. Raises UserError when the files are damaged or belong to another model."""
    config = huggingface.read_config(saved.folder)
    ours = model.config.to_dict()
    different = [
        f"{k} {v} (this run: {ours[k]})" for k, v in config.to_dict().items() if v != ours[k]
    ]
    if different:
        raise UserError(
            f"the checkpoint {saved.folder} has {', '.join(different)}: resume with the options it was made with"
        )
    huggingface.load_into(model, saved.folder)
    try:
        moments = safetensors.numpy.load_file(saved.folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{saved.folder / 'optimizer.safetensors'} cannot be read: {error}"
        ) from error
    for letter, array in (("m", optimizer.m), ("v", optimizer.v)):
        values = np.zeros(array.shape, np.float32)
        for name, view in model.views(values):
            tensor = moments.get(f"{letter}.{name}")
            if tensor is None or tensor.shape != view.shape:
                raise UserError(
                    f"{saved.folder / 'optimizer.safetensors'} does not belong to this model ({letter}.{name})"
                )
            view[...] = tensor
        array[...] = to_device(values, model.device) if is_gpu(array) else values
    optimizer.t = saved.state["optimizer_step"]
