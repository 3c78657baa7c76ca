"""The folder of a run: choosing it, locking it, and config.json in it. An existing run is never overwritten."""

import contextlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig, ResolvedConfig
from ..data.dataset import Corpus
from ..device import device_name
from ..errors import UserError
from ..files import Busy, cannot_write, owned, write_whole
from ..json_files import read_json
from ..version import VERSION
from . import checkpoint
from .checkpoint import Saved


@dataclass(frozen=True)
class RunFolder:
    """Where a run is written.

    saved: the checkpoint to resume from.  contents: what the folder held when it was chosen (see `_contents`).
    first_options: the options of the run's first start, as far as they are known.
    """

    path: Path
    saved: Saved | None = None
    contents: tuple[str, ...] = ()
    first_options: dict[str, Any] = field(default_factory=dict)


def choose(config: ResolvedConfig, name: str | None, warn: Callable[[str], None]) -> RunFolder:
    """Choose the folder from --out, --name and --resume. name: --name as given; None: the first free name is chosen.

    Raises UserError if the folder of a given name is taken, or holds no checkpoint to resume from.
    """
    path = first = Path(config.out) / config.name
    if config.resume:
        while name is None and _contents(_next_path(path, first)):
            path = _next_path(path, first)
        contents, saved = _contents(path), None
        if contents and not checkpoint.folders(path):
            warn(f"{path} holds no checkpoint yet: the run starts from its beginning")
        else:
            saved = checkpoint.newest(path, warn)
        return RunFolder(path, saved, contents, _first_options(path))
    if name is not None and _contents(path):
        raise UserError(
            f"{path} already exists: add --resume to continue that run, or choose another --name"
        )
    while _contents(path):
        path = _next_path(path, first)
    return RunFolder(path)


def claim(
    folder: RunFolder,
    config: ResolvedConfig,
    name: str | None,
    warn: Callable[[str], None],
    stack: contextlib.ExitStack,
) -> RunFolder:
    """Lock the folder until `stack` is left. If another process has written there since `choose`, choose again."""
    while True:
        with contextlib.ExitStack() as attempt:
            _lock(folder.path, attempt)
            if _contents(folder.path) == folder.contents:
                stack.push(attempt.pop_all())
                return folder
        before, folder = folder, choose(config, name, warn)
        if before.saved and not folder.saved:  # the model is about to be filled from it
            raise UserError(f"{before.saved.folder} is gone: start again")


def with_first_options(config: ResolvedConfig, folder: RunFolder) -> ResolvedConfig:
    """On --resume, take shape, weights and tokenizer from the checkpoint: the folder of --init may be gone."""
    if folder.saved is None:
        return config
    tokenizer, first = config.tokenizer, folder.first_options
    if tokenizer is None and first.get("tokenizer"):
        tokenizer = str(folder.saved.folder / "tokenizer.json")
    return replace(config, init=config.init or first.get("init"), tokenizer=tokenizer)


def write_config(
    folder: Path, config: ResolvedConfig, model: ModelConfig, corpus: Corpus, device: str
) -> None:
    """Write config.json: options, shape, text, machine and versions. Raises UserError."""
    import numba

    record = {
        "train": asdict(config),
        "model": model.to_dict(),
        "data": {
            "name": corpus.name, "files": corpus.files, "skipped": corpus.skipped, "documents": corpus.documents,
            "bytes": corpus.bytes, "sha256": corpus.sha256, "train_tokens": corpus.train_tokens,
            "val_tokens": corpus.val_tokens, "bigram_bpb": corpus.bigram_bpb, "vocab_size": corpus.vocab_size,
        },
        "machine": {"device": device_name(device), "system": platform.platform()},
        "versions": {
            "xtrain": VERSION, "python": platform.python_version(),
            "numpy": np.__version__, "numba": numba.__version__,
        },
    }  # fmt: skip
    path = folder / "config.json"
    for stray in folder.glob("*.tmp"):  # left behind by a killed process
        with contextlib.suppress(OSError):
            stray.unlink()
    try:
        write_whole(path, (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error) from error


def _contents(path: Path) -> tuple[str, ...]:
    """Names that make `path` the folder of a run, and those of its checkpoints; () if it is not one."""
    found = [name for name in ("config.json", "checkpoints") if os.path.exists(path / name)]
    return (*found, *(folder.name for folder in checkpoint.folders(path)))


def _next_path(path: Path, first: Path) -> Path:
    """tiny -> tiny-2 -> tiny-3, for first = tiny"""
    number = int(path.name[len(first.name) + 1 :] or 1)
    return path.with_name(f"{first.name}-{number + 1}")


def _first_options(path: Path) -> dict[str, Any]:
    with contextlib.suppress(UserError):
        options = read_json(path / "config.json").get("train")
        if isinstance(options, dict):
            return {name: x for name, x in options.items() if isinstance(x, str)}
    return {}


def _lock(path: Path, stack: contextlib.ExitStack) -> None:
    """Create the folder and lock it until `stack` is left."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        stack.enter_context(owned(path))
    except Busy as busy:
        advice = f"; {busy}" if str(busy) else ""
        raise UserError(
            f"{path} is being written by another process: wait for it, or choose another --name{advice}"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
