"""Save a run and resume it, bit for bit.

    runs/NAME/checkpoints/step-000200/
        config.json, model.safetensors, tokenizer.json ...
                                 the model in the Hugging Face layout, ready to be served
        optimizer.safetensors    both moments of each tensor, float32: m.NAME, v.NAME (AdamW; with
                                 Muon m is the momentum, v zero); in fp8 training also fp8.scale
                                 (nn/fp8.py); w.NAME, ema.NAME of norms whose file holds w - 1
                                 (Gemma), a difference that float32 may round
        ema/                     with --ema: the model again, with the average of its weights
        state.json               step, position in the data, options: formats/saved_runs.py
        manifest.json            a checksum of every file and tensor: formats/manifest.py

No state of a random generator is stored: initialisation, the order of the text and samples follow
from the seed, and the order of an epoch from (seed, epoch). model.safetensors holds the float32
weights, also of a run in bf16 or fp8.

`snapshot` copies the state to host memory; training waits only for that. `write` writes it to a
temporary folder next to its final one, reads it back, syncs it to disk and renames it. So a
checkpoint is either complete or absent, and later damage is detected. Its contents do not depend on
how parameters are packed or padded in memory, or on the number of ranks.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..device import HostCopies, to_device
from ..errors import UserError
from ..files import cannot_write, publish, sync, sync_folder
from ..formats import huggingface
from ..formats.adapters import PREFIX
from ..formats.architectures import is_norm
from ..formats.manifest import (
    Unreadable,
    tensor_checksum,
    unlisted,
    write_manifest,
)
from ..formats.saved_runs import EMA, STATE, Saved, best, folders, open_checkpoint, step_of
from ..formats.tensor_file import read_header, write_safetensors
from ..nn.autograd import Tensor
from ..nn.model import Transformer
from ..nn.optim import AdamW

OPTIMIZER = "optimizer.safetensors"
# the files of a RunLog
LOGS = ("metrics.jsonl", "layers.jsonl", "timing.jsonl", "samples.txt", "rollouts.jsonl")
TEMPORARY = ".step-*.tmp"  # checkpoints that are being written, or whose writer was killed


# ----------------------------------------------------------------------------- copying the state
@dataclass(frozen=True)
class Snapshot:
    """A copy of the state in host memory, which later steps do not change. Another thread may write
    it.

    tensors, moments, ema: {name: array in the Hugging Face shape}; ema is empty without a moving
    average. moments: all of OPTIMIZER.
    wait(): blocks until the copies have arrived.
    """

    saved_config: ModelConfig  # Transformer.saved_config
    tensors: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    state: dict[str, Any]  # the contents of state.json
    tokenizer: Any
    wait: Callable[[], None]
    variation: str = ""  # Transformer.variation
    change: str = ""  # Transformer.change
    adapter: dict[str, Any] | None = None  # Transformer.adapter
    special_tokens: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] | None = None
    ema: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, nearly the size of the checkpoint."""
        groups = (self.tensors, self.moments, self.ema)
        return sum(x.nbytes for group in groups for x in group.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the interface of a model that huggingface.write_files needs."""
        return ((name, Tensor(values)) for name, values in self.tensors.items())


def snapshot(
    model: Transformer, moments: Any, state: dict[str, Any], tokenizer: Any, copies: HostCopies
) -> Snapshot:
    """Copy everything that a checkpoint holds. moments: an AdamW, or an object with m, v and ema of
    the whole arena in host memory and t, whose arrays no later step changes.

    The arrays belong to `copies`: make the next snapshot with it only when this one is no longer in
    use.
    """
    in_host_memory: Callable[[str, Any], Any]
    if isinstance(moments, AdamW):
        in_host_memory = copies
    else:  # they were gathered there, and belong to this snapshot
        in_host_memory = lambda name, array: array
    weights = model.arena.weights
    if weights is None:  # with ZeRO-3 they were gathered, too
        w = moments.weights
    else:
        w = copies("w", weights)
    m = in_host_memory("m", moments.m)
    v = in_host_memory("v", moments.v)
    fp8 = model.fp8
    scales = {}
    if fp8 is not None and fp8.ready:
        scales = {"fp8.scale": copies("fp8", fp8.scale_S)}
    if moments.ema is None:
        ema = {}
    else:
        ema = dict(model.views(in_host_memory("ema", moments.ema)))
    tensors = dict(model.views(w))
    exact: dict[str, Any] = {}
    if huggingface.offset_of_norms(model):
        for letter, group in (("w", tensors), ("ema", ema)):
            exact |= {f"{letter}.{name}": x for name, x in group.items() if is_norm(name)}
    return Snapshot(
        saved_config=model.saved_config,
        tensors=tensors,
        moments={
            f"{letter}.{name}": view
            for letter, array in (("m", m), ("v", v))
            for name, view in model.views(array)
        }
        | scales
        | exact,
        state={**state, "optimizer_step": moments.t},
        tokenizer=tokenizer,
        wait=copies.event(),
        variation=model.variation,
        change=model.change,
        adapter=model.adapter,
        special_tokens=model.special_tokens,
        generation=model.generation,
        ema=ema,
    )


# ----------------------------------------------------------------------------- writing
def write(run: Path, snapshot: Snapshot) -> Path:
    """Write run/checkpoints/step-NNNNNN. -> its folder. Raises UserError on failure, and leaves
    nothing behind."""
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
        # an existing one is damaged (the run resumed from an earlier one), or is not a folder
        publish(new, folder, _aside(folder))
        sync(run)
    except OSError as error:
        raise cannot_write(folder, error) from error
    except UserError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise cannot_write(folder, error.__context__) from error  # the written files are gone
    finally:
        _remove(new)
        if os.path.lexists(folder):
            _remove(_aside(folder))
    return folder


def _write_files(folder, snapshot):
    prefix = ""
    if snapshot.adapter:
        prefix = PREFIX
    checksums_of = lambda tensors: {name: tensor_checksum(x) for name, x in tensors.items()}

    def model_checksums(snapshot):
        tensors = huggingface.written_tensors(snapshot)
        return {prefix + name: tensor_checksum(x.numpy()) for name, x in tensors.items()}

    if snapshot.ema:
        averaged = folder / EMA
        averaged.mkdir()
        average = replace(snapshot, tensors=snapshot.ema)
        huggingface.write_files(average, averaged, snapshot.tokenizer)
        write_manifest(averaged, model_checksums(average))
    huggingface.write_files(snapshot, folder, snapshot.tokenizer)
    write_safetensors(folder / OPTIMIZER, {n: Tensor(x) for n, x in snapshot.moments.items()})
    text = json.dumps(snapshot.state, indent=2, sort_keys=True)
    (folder / STATE).write_text(text + "\n", encoding="utf-8")
    write_manifest(folder, model_checksums(snapshot) | checksums_of(snapshot.moments))


def _aside(folder):
    """Return the name of a checkpoint before it is removed: if the removal is interrupted, the rest
    does not look like a checkpoint."""
    return folder.with_name(f".{folder.name}.old.tmp")


def _remove_strays(folder):
    for stray in folder.glob(TEMPORARY):
        _remove(stray)


def _remove(path):
    """Remove a folder with its contents, or a file. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def prune(run: Path, newest: int, keep: int) -> None:
    """Remove old checkpoints after checkpoint `newest` was written: keep the last `keep` and the
    best one. keep=0: keep all.

    Checkpoints newer than `newest` are deleted: they were unusable when the run resumed from an
    earlier one. A checkpoint to which the user has added files stays.
    """
    checkpoints = folders(run)
    past = [folder for folder in checkpoints if step_of(folder) <= newest]
    kept = set(past[-keep:] if keep else past)
    kept |= {x for x in [best(past)] if x is not None}
    for folder in checkpoints:
        if folder not in kept:
            _remove_checkpoint(folder)
    _remove_strays(run / "checkpoints")


def make_room(run: Path, step: int, needed: int) -> str | None:
    """On a disk too full for the checkpoint of `step`, of `needed` bytes: remove an older one. ->
    its name, or None if none may be removed, or if it would not fit without all of them.

    The newest undamaged one before `step` always stays, and those that cannot be read at the
    moment, or to which the user has added files. Removed first are damaged ones after it, then the
    oldest; last the best one.
    """
    checkpoints = folders(run)
    damaged = []
    while checkpoints:
        newest = checkpoints.pop()
        try:
            open_checkpoint(newest)
            if step_of(newest) < step:
                break
        except Unreadable:
            continue
        except UserError:
            damaged.append(newest)
    else:
        return None
    best_one = best(checkpoints)
    spare = [*damaged, *sorted(checkpoints, key=lambda folder: folder == best_one)]
    spare = [folder for folder in spare if not _has_unlisted(folder)]
    if shutil.disk_usage(run).free + sum(map(_bytes, spare)) < needed:
        return None
    return next((folder.name for folder in spare if _remove_checkpoint(folder)), None)


def too_little_room(run: Path, needed: int, keep: int, left: int) -> str | None:
    """Return a sentence if the disk has no room for the checkpoints of a run: `keep`, the best one,
    and one that is being written.

    needed: bytes of a checkpoint.  left: the number of checkpoints that the run has still to write.
    """
    with contextlib.suppress(OSError):
        there = folders(run)
        if keep:
            needed_at_once = min(keep + 2, len(there) + left)
        else:
            needed_at_once = len(there) + left
        fit = (shutil.disk_usage(run).free + sum(map(_bytes, there))) // needed
        if fit < needed_at_once:
            options = "--keep 0"
            if keep:
                options = f"--keep {keep}, the best and the one being written"
            return (
                f"the disk of {run} has room for {fit} of the {needed_at_once} checkpoints of "
                f"{needed / 1e9:.3g} GB that this run needs "
                f"({options}): make room or choose a smaller --keep, else the oldest are removed "
                "when the disk is full"
            )
    return None


def _bytes(folder):
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return 0


def _remove_checkpoint(folder):
    """Remove it unless the user has added files. Return whether it is gone."""
    with contextlib.suppress(OSError):  # the next call tries again
        if not _has_unlisted(folder):
            _remove(folder.rename(_aside(folder)))
            return True
    return False


def _has_unlisted(folder):
    try:
        return bool(unlisted(folder))
    except Unreadable:  # unknown
        return True
    except UserError:  # the manifest is damaged
        return False


# ----------------------------------------------------------------------------- loading
def load(saved: Saved, model: Transformer, optimizer: AdamW) -> None:
    """Fill model and optimizer. Raises UserError if the files are damaged or belong to another
    model.

    A run that was saved without a moving average begins it with the weights. Names and shapes are checked first:
    if they do not fit, model and optimizer are unchanged.
    """
    path = saved.folder / OPTIMIZER
    places = list(model.places())
    stored = read_header(path)
    for letter in ("m", "v"):
        for name, _, shape in places:
            tensor = stored.get(f"{letter}.{name}")
            if tensor is None or tensor.shape != shape:
                raise UserError(
                    f"{path} does not belong to this model ({letter}.{name}): resume with the "
                    "options of that run"
                )
    averaged = saved.folder / EMA
    has_average = optimizer.ema is not None and averaged.is_dir()
    average = {}
    if has_average:
        average = huggingface.tensors_for(model, averaged)
    huggingface.load_into(model, saved.folder)
    for name, parameter in model.named_parameters():
        if f"w.{name}" in stored:
            parameter.data = to_device(stored[f"w.{name}"].read(), model.device)
    huggingface.read_companions(model, saved.folder)
    for letter in ("m", "v"):
        for name, start, _ in places:
            optimizer.assign_state(letter, start, stored[f"{letter}.{name}"].read())
    optimizer.start_average()
    if has_average:
        for name, start, _ in places:
            tensor = stored.get(f"ema.{name}", average[name])
            optimizer.assign_state("ema", start, tensor.read())
    scale = stored.get("fp8.scale")
    fp8 = model.fp8
    # none, or for other matrices: after --allow-change precision or fp8_head. The first step
    # measures then
    if fp8 is not None and scale is not None and scale.shape == fp8.scale_S.shape:
        fp8.load(scale.read())
    optimizer.t = saved.state["optimizer_step"]
