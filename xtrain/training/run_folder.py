"""The folder of a run: choosing it, locking it, and config.json in it. An existing run is never
overwritten."""

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from ..cli import say
from ..config import ModelConfig, ResolvedConfig, TrainConfig
from ..data.dataset import Corpus
from ..device import device_name, resolve_device
from ..errors import UserError
from ..files import Busy, Journal, cannot_write, digest, owned, write_whole
from ..formats import saved_runs
from ..formats.adapters import base_folder
from ..formats.manifest import MANIFEST, sampled_digest
from ..formats.saved_runs import Saved
from ..json_files import read_json
from ..option_files import is_whole_share
from ..run_options import NOT_STORED, RunOptions
from ..version import VERSION
from .single_process import SINGLE_PROCESS, SingleProcess

LEFT_OUT_SHOWN = 5  # files that are not used, named on the terminal
GIT_SECONDS = 10  # a commit is worth no longer wait
COMPILERS = ("numba", "numba-cuda", "numba-cuda-mlir")  # of the kernels
Options = TypeVar("Options", bound=RunOptions)


@dataclass(frozen=True)
class RunFolder:
    """Where a run is written.

    saved: the checkpoint to resume from.
    contents: what the folder held when it was chosen (see `_contents`).
    first_options: the run's options in config.json, as far as they are known.
    """

    path: Path
    saved: Saved | None = None
    contents: tuple[str, ...] = ()
    first_options: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self, given: str | None) -> str | None:
        """Return the tokenizer.json to use, None to train one.

        A run keeps its checkpoint's, unless --tokenizer names another.
        given: --tokenizer.
        """
        same = given in (None, self.first_options.get("tokenizer"))
        if self.saved is None or not same:
            return given
        return str(self.saved.folder / "tokenizer.json")


def choose(config: ResolvedConfig, name: str | None, warn: Callable[[str], None]) -> RunFolder:
    """Choose the folder from --out, --name and --resume. name: --name as given; None: the first
    free name is chosen.

    Raises UserError if the folder of a given name is taken, or holds no checkpoint to resume from.
    """
    path = first = Path(config.out) / config.name
    if config.resume:
        path = _last_path(first, name)
        contents = _contents(path)
        saved = None
        if contents and not saved_runs.folders(path):
            warn(f"{path} holds no checkpoint yet: the run starts from its beginning")
        else:
            saved = saved_runs.newest(path, warn)
        return RunFolder(path, saved, contents, _stored_options(path, type(config)) or {})
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
    """Lock the folder until `stack` is left. If another process has written there since `choose`,
    choose again."""
    while True:
        with contextlib.ExitStack() as attempt:
            _lock(folder.path, attempt)
            if _contents(folder.path) == folder.contents:
                stack.push(attempt.pop_all())
                return folder
        before = folder
        folder = choose(config, name, warn)
        if before.saved and not folder.saved:  # the model is about to be filled from it
            raise UserError(f"{before.saved.folder} is gone: start again")


def check_seen(folder: RunFolder, ranks: SingleProcess) -> RunFolder:
    """Return the folder. Raises UserError, on every rank, if a rank does not see the checkpoint of
    rank 0 to resume from."""
    if folder.saved:
        path = folder.saved.folder
        manifest = path / MANIFEST
        seen = digest(manifest) if manifest.is_file() else None
        _check_same(path, seen, "a folder --out that all machines share", ranks)
    return folder


def check_same_model(path: Path, ranks: SingleProcess) -> None:
    """Raise UserError, on every rank, if a rank does not see the model of rank 0 in a folder.

    Adapters and what else is trained are compared in memory before the first step, but not frozen
    weights, and with ZeRO-3 each rank keeps a share of those that it has read.
    """
    seen = None
    with contextlib.suppress(UserError):  # the base of adapters may be missing
        seen = sampled_digest(path), sampled_digest(base_folder(path))
    _check_same(path, seen, "a model that all machines have", ranks)


def _check_same(path: Path, seen: Any, needed: str, ranks: SingleProcess) -> None:
    """Raise UserError, on every rank, unless all have seen the same there. None: it is not there."""
    all_seen = ranks.gather(seen)
    others = [rank for rank, other in enumerate(all_seen) if other != all_seen[0]]
    if not others:
        return
    if None in all_seen:
        raise UserError(f"rank {all_seen.index(None)} does not see {path}: give {needed}")
    raise UserError(f"rank {others[0]} sees another {path}: give {needed}")


def refuse_another_model(options: RunOptions, folder: RunFolder) -> None:
    """Raise UserError if --init or --preset asks for another model than that of the run to resume.
    options: as given. (Presets of other shapes are refused by the shape.)"""
    first = folder.first_options
    if folder.saved is None or not first:
        return
    cannot = f"cannot resume {folder.saved.folder}"
    init = first.get("init")
    preset = getattr(options, "preset", "auto")
    stored = "init" in first  # else that line of config.json is damaged
    if options.init and stored and not _is_in(init, options.init):
        raise UserError(
            f"{cannot}: --init was {init or 'not given'}, is {options.init}: omit --init, because "
            "the run continues with its own weights"
        )
    if init and preset not in ("auto", first.get("preset")):
        raise UserError(
            f"{cannot}: --preset was {first.get('preset')}, is {preset}: omit --preset, because "
            "the model has the shape of --init"
        )


def _is_in(init: str | None, folder: str) -> bool:
    """Return True if `init`, as stored, is this folder, or the checkpoint of a run that this folder
    is."""
    if init is None:
        return False
    return Path(os.path.abspath(init)).is_relative_to(os.path.abspath(folder))


def with_first_options(config: ResolvedConfig, folder: RunFolder) -> ResolvedConfig:
    """On --resume, take weights, precision and tokenizer from the checkpoint: the folder of --init
    may be gone.

    Raises UserError if --vocab-size asks for another tokenizer.
    """
    saved = folder.saved
    first = folder.first_options
    if saved is None:
        return config
    init = config.init or first.get("init")
    if not init and isinstance(config, TrainConfig):
        was = first.get("vocab_size", config.vocab_size)
        keeps_tokenizer = folder.tokenizer(config.tokenizer) != config.tokenizer
        if keeps_tokenizer and config.vocab_size != was:
            raise UserError(
                f"cannot resume {saved.folder}: vocab_size was {was}, is {config.vocab_size}: "
                "omit --vocab-size, because a run keeps its tokenizer"
            )
    precision = config.precision
    if precision == "auto":
        precision = saved.state["options"].get("precision")
        if precision not in ("bf16", "fp8"):
            precision = "fp32"
    return replace(config, init=init, precision=precision)


# ----------------------------------------------------------------------------- the command line of a run that continues
def parse_options(
    parse: Callable[[Options | None], Options], ranks: SingleProcess = SINGLE_PROCESS
) -> Options:
    """Return the options of a command line. With --resume, those that it does not give are the
    run's own, in its config.json.

    parse(defaults) parses it; defaults None: those of the class. Rank 0 reads the run's folder:
    others may not see it. Raises UserError.
    """
    first = parse(None)
    if not first.resume:
        return first
    first.check_place()  # the other options may need some that the run has
    kept, allowed = ranks.on_rank_0(lambda: _options_to_resume(first))
    if kept:
        defaults = replace(type(first)(), **kept)
    else:
        defaults = first
    config = parse(defaults if kept else None)
    if getattr(config, "epochs", None) != kept.get("epochs") and config.steps == kept.get("steps"):
        config = replace(config, steps=None)  # --epochs is given, which decides them
    # a change that was allowed before stays allowed, until the option changes again
    value = lambda options, name: getattr(options, name.replace("-", "_"), None)
    same = [name for name in allowed if value(config, name) == value(defaults, name)]
    return replace(config, allow_change=(*config.allow_change, *same))


def to_resume(config: RunOptions) -> Path:
    """Return the folder of the run that --resume continues."""
    gpu = resolve_device(config.device) == "gpu"
    first = Path(config.out) / (config.name or config.default_name(gpu))
    return _last_path(first, config.name)


def _options_to_resume(asked: Options) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the run to resume, none if they are unknown; the changes that
    were allowed before"""
    path = to_resume(asked)
    stored = _stored_options(path, type(asked))
    if stored is None:
        if not _contents(path):
            saved_runs.newest(path)  # raises: there is none
        what = "is missing or damaged: options that are not given have their defaults"
        say(f"{path / 'config.json'} {what}")
        return {}, []
    allowed = stored.pop("allow_change", [])
    if is_whole_share(stored, read_json(path / "config.json")):
        stored.pop("micro_batch", None)
    kept = {name: x for name, x in stored.items() if name not in NOT_STORED}
    return {"name": str(path.relative_to(asked.out)), **kept}, allowed


def _installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def write_config(
    folder: Path,
    config: ResolvedConfig,
    model: ModelConfig,
    corpus: Corpus,
    device: str,
    ranks: int,
) -> None:
    """Write config.json: options, shape, text, machine and versions. Raises UserError."""
    record = {
        "train": asdict(config),
        "model": model.to_dict(),
        "data": {
            "name": corpus.name,
            "files": corpus.files,
            "skipped": corpus.skipped,
            "documents": corpus.documents,
            "bytes": corpus.bytes,
            "sha256": corpus.sha256,
            "train_tokens": corpus.train_tokens,
            "val_tokens": corpus.val_tokens,
            "bigram_bpb": corpus.bigram_bpb,
            "vocab_size": corpus.vocab_size,
        },
        "machine": {"device": device_name(device), "system": platform.platform(), "ranks": ranks},
        "versions": {
            "xtrain": VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **_installed(COMPILERS),
        },
    }
    path = folder / "config.json"
    for stray in folder.glob("*.tmp"):  # left behind by a killed process
        with contextlib.suppress(OSError):
            stray.unlink()
    try:
        write_whole(path, (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error) from error


def write_left_out(folder: Path, left_out: Sequence[str]) -> Path | None:
    """Write left_out.txt, if the files that are not used are too many for the terminal. -> its
    path, or None."""
    path = folder / "left_out.txt"
    try:
        path.unlink(missing_ok=True)  # of an earlier start
        if len(left_out) <= LEFT_OUT_SHOWN:
            return None
        write_whole(
            path,
            "".join(f"{sentence}\n" for sentence in left_out).encode("utf-8", "surrogateescape"),
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def record_start(folder: Path, step: int, warn: Callable[[str], None]) -> None:
    """Append a line to starts.jsonl: when and how this process starts or continues the run after
    `step`. Raises UserError.

    commit: of the git repository that contains the working directory, null if there is none.
    changed: do its tracked files differ from the commit?
    """
    program, *rest = sys.orig_argv or [""]
    commit, changed = _commit()
    line = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(program).name, *rest]),
        "commit": commit,
        "changed": changed,
        "xtrain": VERSION,
    }
    if not Journal(folder / "starts.jsonl").write(json.dumps(line) + "\n"):
        warn(f"no space left to write {folder / 'starts.jsonl'}")


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the working directory, and whether tracked files were changed since;
    None: there is no repository."""
    git = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            git,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):  # there is no git, or it takes too long
        return None, None
    match = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", done.stdout, re.M)
    if done.returncode or not match:
        return None, None
    return match[1], any(not line.startswith("#") for line in done.stdout.splitlines())


def _contents(path: Path) -> tuple[str, ...]:
    """Return names that make `path` the folder of a run, and those of its checkpoints; () if it is
    not one."""
    files = [name for name in ("config.json", "checkpoints") if os.path.exists(path / name)]
    return (*files, *(folder.name for folder in saved_runs.folders(path)))


def _next_path(path: Path, first: Path) -> Path:
    """tiny -> tiny-2 -> tiny-3, for first = tiny"""
    number = int(path.name[len(first.name) + 1 :] or 1)
    return path.with_name(f"{first.name}-{number + 1}")


def _last_path(first: Path, name: str | None) -> Path:
    """Return the folder of the run to resume: `first`, or if no --name is given, the last of its
    successors."""
    path = first
    while name is None and _contents(_next_path(path, first)):
        path = _next_path(path, first)
    return path


def _stored_options(path: Path, kind: type[RunOptions]) -> dict[str, Any] | None:
    """Return the options in config.json that `kind` has and whose type is right; None if there are
    none."""
    with contextlib.suppress(UserError):
        options = read_json(path / "config.json").get("train")
        if isinstance(options, dict):
            hints = get_type_hints(kind)
            names = {f.name for f in fields(kind)} & set(options)
            kept = {n: options[n] for n in names if _has_type(options[n], hints[n])}
            tuples = {n: tuple(x) for n, x in kept.items() if isinstance(x, list)}
            return kept | tuples | _one_path(options)
    return None


def _one_path(options: dict[str, Any]) -> dict[str, Any]:
    """Return --data as earlier versions stored it: one path."""
    data = options.get("data")
    if isinstance(data, str):
        return {"data": (data,)}
    return {}


def _has_type(value: Any, hint: Any) -> bool:
    """Return True if a value from JSON is of this type. hint: a type, a union of types, a Literal,
    or a tuple of as many values of one type as there are."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return value in parts
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_has_type(x, parts[0]) for x in value)
    if parts:
        return any(_has_type(value, part) for part in parts)
    return type(value) in ((int, float) if hint is float else (hint,))


def _lock(path: Path, stack: contextlib.ExitStack) -> None:
    """Create the folder and lock it until `stack` is left."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        stack.enter_context(owned(path))
    except Busy as busy:
        advice = ""
        if str(busy):
            advice = f"; {busy}"
        raise UserError(
            f"{path} is being written by another process: wait for it, or choose another "
            f"--name{advice}"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
