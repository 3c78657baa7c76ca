"""Which files --data names, in which order, and how each of them is read.

    file            itself
    folder          its files and those of its subfolders, in sorted order
    glob (quoted)   its matches, in sorted order
    "-"             standard input: `from_standard_input` first; text, or JSON lines

A folder that `save_to_disk` of the library `datasets` has written is the .arrow files that its
state.json names. Of several splits one is used. No file is read twice: the first name counts.
"""

import contextlib
import functools
import glob
import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import UserError
from ..json_files import listed, read_json
from . import text_files
from .columns import read_arrow, read_parquet
from .compressed import BadFile, is_packed, suffix
from .text_files import holds_json_lines, read_jsonl, read_text, with_end

STANDARD_INPUT = "-"
STRAY_SECONDS = 86400  # the copy of standard input that a killed process has left unfinished

Data = str | Path | Sequence[str | Path] | None
READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, bool]]]] = {
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


class Source(NamedTuple):
    """A file.

    is_named: on the command line, by itself or a glob. What is in it then decides whether it is
    text or JSON lines, if its suffix does not.
    """

    path: Path
    is_named: bool

    def read(self, key: str) -> Iterator[tuple[str, bool]]:
        """Yield (part of the text, is it the last part of a document?). key: of the field or
        column. Raises BadFile."""
        if not os.path.isfile(self.path):
            what = "does not exist"
            if os.path.exists(self.path):
                what = "is not a regular file"
            raise BadFile(f"{self.path} {what}: replace or remove it")
        reader = READERS.get(suffix(self.path))
        if is_packed(self.path) and reader in (read_parquet, read_arrow):
            raise BadFile(f"{self.path} cannot be read in its {self.path.suffix}: unpack it")
        if reader is None and self.is_named and holds_json_lines(self.path, key):
            reader = read_jsonl
        if reader is None:
            return with_end(read_text(self.path))
        return reader(self.path, key)


class Sources:
    """The files of --data. None: the source of the Python standard library. Raises UserError for
    what does not exist.

    name: of the text
    """

    def __init__(self, data: Data = None):
        self.own = data is None or data == ()
        if isinstance(data, (str, Path)):
            paths = [data]
        else:
            paths = list(data or ())
        if self.own:
            paths = [sysconfig.get_path("stdlib")]
        self.paths = list(map(Path, paths))
        self.absolute_paths = [os.path.abspath(path) for path in self.paths]
        self._splits: dict[Path, str] = {}  # of each saved DatasetDict

    @property
    def name(self) -> str:
        if self.own:
            return f"Python {sys.version.split()[0]} standard library"
        return listed([str(path) for path in self.paths], 3) + self.splits

    @property
    def splits(self) -> str:
        """Which splits `find` has used, for the end of a name; "" if there was no choice."""
        if not self._splits:
            return ""
        return f" ({', '.join(self._splits.values())})"

    def find(self) -> list[Source]:
        """Return the files as they are now."""
        sources: dict[str, Source] = {}
        real = functools.cache(os.path.realpath)
        for path in self.paths:
            for source in self._of(path):
                folder, name = os.path.split(source.path)
                is_link = os.path.islink(source.path)
                if is_link:
                    same = real(source.path)
                else:
                    same = os.path.join(real(folder), name)
                sources.setdefault(same, source)
        return list(sources.values())

    def _of(self, path: Path) -> Iterable[Source]:
        if os.path.isfile(path):
            return [Source(path, True)]
        if os.path.isdir(path):
            return self._in_folder(path)
        if "\0" not in str(path) and not os.path.lexists(path) and glob.has_magic(str(path)):
            matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
            if not matches:
                raise UserError(f"no file matches {path}: check the pattern")
            folders = {match for match in matches if os.path.isdir(match)}
            # a/** matches folders as well as what is in them
            kept = [match for match in matches if folders.isdisjoint(match.parents)]
            return [s for match in sorted(kept, key=Path.as_posix) for s in self._of(match)]
        exists = "\0" not in str(path) and os.path.exists(path)
        what = "does not exist"
        if exists:
            what = "is neither a file nor a folder"
        hint = "give a file, a folder or a glob"
        if self.own:
            hint = "give a text with --data"
        raise UserError(f"{path} {what}: {hint}")

    def _in_folder(self, root: Path) -> list[Source]:
        files = list(self._walk(root))
        if self.own:
            files = [path for path in files if path.suffix == ".py" and os.path.isfile(path)]
        files.sort(key=lambda path: path.relative_to(root).as_posix())
        return [Source(path, False) for path in files]

    def _walk(self, root: Path) -> Iterator[Path]:
        """Yield the files of a folder.

        Names that begin with a dot are skipped. Links to folders are followed; none is read twice.
        """
        unwanted: tuple[str, ...] = ()
        if self.own:
            unwanted = ("site-packages", "dist-packages", "__pycache__")
        is_seen = lambda name: name not in unwanted and not name.startswith(".")
        roots = [root]
        seen = set()
        for root in roots:  # grows inside the loop: linked folders are walked after real ones
            for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
                real = os.path.realpath(folder)
                if real in seen:  # two links to one folder, or a cycle
                    folders.clear()
                    continue
                seen.add(real)
                if "dataset_dict.json" in names:
                    folders[:] = [self._split(Path(folder))]
                    names = []
                elif {"state.json", "dataset_info.json"} <= set(names):
                    folders[:] = []
                    names = _data_files(Path(folder))
                folders[:] = sorted(filter(is_seen, folders))  # the same on every machine
                if not self.own:
                    roots += filter(os.path.islink, [Path(folder, name) for name in folders])
                yield from (Path(folder, name) for name in names if not name.startswith("."))

    def _split(self, folder: Path) -> str:
        """Return the split of a saved DatasetDict to use: train, or the only one."""
        splits: Any = read_json(folder / "dataset_dict.json").get("splits")
        if not _are_names(splits):
            raise UserError(
                f"{folder / 'dataset_dict.json'} names no splits: save the dataset again"
            )
        if "train" not in splits and len(splits) > 1:
            raise UserError(
                f"{folder} has the splits {listed(splits)} and no train: give the folder of one, "
                f"such as {folder / splits[0]}"
            )
        used = "train"
        if "train" not in splits:
            used = splits[0]
        others = [split for split in splits if split != used]
        self._splits[folder] = f"split {used}" + (f", not {listed(others)}" if others else "")
        return used


def _are_names(names: Any) -> bool:
    """Return True for a list of names of files or folders, none of which is a path."""
    is_name = lambda x: isinstance(x, str) and x not in ("", ".", "..") and Path(x).name == x
    return isinstance(names, list) and bool(names) and all(map(is_name, names))


def _data_files(folder: Path) -> list[str]:
    """Return the .arrow files of a dataset that was saved on disk."""
    state = read_json(folder / "state.json")
    files = state.get("_data_files")
    names: Any = [x.get("filename") if isinstance(x, dict) else None for x in files or ()]
    if not _are_names(names):
        raise UserError(f"{folder / 'state.json'} names no data files: save the dataset again")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UserError(
            f"{folder} is a selection of rows, saved by an old version of datasets: load and save "
            "it again"
        )
    return names


def _raise_unreadable(error: OSError) -> None:
    raise UserError(text_files.unreadable(error)) from None


# ----------------------------------------------------------------------------- standard input
def from_standard_input(
    data: Sequence[str], cache: Path, stream: BinaryIO | None = None
) -> tuple[str, ...]:
    """Replace "-" in `data` by a copy of standard input in the cache: a text is read several times.

    stream: read instead of standard input

    The copy is named after its hash, so that a resumed run finds it without standard input. Raises
    UserError.
    """
    if STANDARD_INPUT not in data:
        return tuple(data)
    if stream is None:
        stream = sys.stdin.buffer
    if stream.isatty():
        raise UserError(
            "--data - reads standard input, which is a terminal: pipe a text to the program, or "
            "give a path"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        copy = os.path.abspath(_copy(stream, cache))
    except OSError as error:
        raise UserError(
            f"standard input cannot be copied to {cache} ({error.strerror or error}): make room, "
            "or set XTRAIN_CACHE to another folder"
        ) from None
    return tuple(copy if path == STANDARD_INPUT else path for path in data)


def _copy(stream: BinaryIO, cache: Path) -> Path:
    for stray in cache.glob("stdin-*.part"):
        with contextlib.suppress(OSError):
            if time.time() - stray.stat().st_mtime > STRAY_SECONDS:
                stray.unlink()
    unfinished = cache / f"stdin-{os.getpid()}.part"
    digest = hashlib.sha256()
    try:
        with open(unfinished, "wb") as file:
            while block := stream.read(1 << 20):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        path = cache / f"stdin-{digest.hexdigest()[:16]}.txt"
        if not path.is_file() or path.stat().st_size != unfinished.stat().st_size:
            os.replace(unfinished, path)  # else its times stay, and its text is known
    finally:
        unfinished.unlink(missing_ok=True)
    return path
