"""A folder that can be checked: manifest.json holds a checksum of every file and of every tensor.

    {"format": 1,
     "files":   {"model.safetensors": {"bytes": 3100, "blake2b": "..."}, ...},
     "tensors": {"model.norm.weight": 912384723, ...},        CRC-32 of the tensor's bytes, over all files
     "itself":  "..."}                                        BLAKE2b of all that is above

safetensors itself notices neither a flipped bit nor a file from elsewhere. The file checksums find any damage; those of
the tensors are taken from memory before anything is written, so they also find what went wrong on the way to the disk, and
they say which tensor is hit.
"""

import contextlib
import errno
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import digest
from .tensor_file import listed, parse_json, read_header, reading

MANIFEST = "manifest.json"
FORMAT = 1
PIECE = 1 << 24  # bytes read at once
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def strangers(folder: Path) -> list[str]:
    """Names of files that somebody has put beside those of the manifest. Raises Damaged where there is none."""
    own = {MANIFEST, *_read(folder / MANIFEST)["files"]}
    return [p.name for p in folder.iterdir() if p.name not in own and not p.name.startswith(".")]


class Damaged(UserError):
    """A folder is not what its manifest says. The message names the files."""


class Unreadable(UserError):
    """A file cannot be read now. That says nothing of what is in it: whoever mends the cause has all of it again."""


NOT_NOW = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENOMEM)


@contextlib.contextmanager
def _readable(path):
    try:
        yield
    except OSError as error:
        if error.errno in NOT_NOW:
            raise Unreadable(
                f"{path} cannot be read ({error.strerror}): mend that, then try again"
            ) from None
        raise


def tensor_checksum(values: np.ndarray) -> int:
    """CRC-32 of the bytes that a tensor has in a file."""
    return zlib.crc32(
        np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    )


def write_manifest(folder: Path, tensors: dict[str, int]) -> None:
    """Describe all files in `folder`, after reading them back. tensors: {name: tensor_checksum}, of all that are in them.

    Raises OSError when a file holds other bytes than were meant to be written.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        wrong = _wrong_tensors(path, tensors) if path.suffix == ".safetensors" else []
        if wrong:
            raise OSError(f"it was not written as it should be: {listed(wrong)}")
        files[path.name] = {"bytes": path.stat().st_size, "blake2b": digest(path)}
    content = {"format": FORMAT, "files": files, "tensors": tensors}
    content["itself"] = _of_itself(content)
    (folder / MANIFEST).write_bytes(_dump(content))


def verify(folder: Path) -> None:
    """Raises Damaged, which names every file that is missing, cut short or changed, and weights that are not its own.

    Other files are their owner's business. Raises Unreadable where nothing can be said.
    """
    content = _read(folder / MANIFEST)
    with reading(folder), _readable(folder):
        there = {path.name for path in folder.iterdir()}
    wrong = [f"{name} is missing" for name in content["files"] if name not in there]
    weights = [
        name for name in sorted(there - content["files"].keys()) if WEIGHT_FILES.fullmatch(name)
    ]
    wrong += [f"{name} does not belong there, move it away" for name in weights]
    for name, entry in content["files"].items():
        if name in there:
            wrong += _wrong(folder / name, entry, content["tensors"])
    if wrong:
        raise Damaged(f"{folder}: {'; '.join(wrong)}")


def verify_weights(folder: Path) -> None:
    """Raises Damaged when the model's weights are not those of the manifest beside them; other files may be as they like.

    A folder without a manifest, or with somebody else's, has nothing to be checked with.
    """
    path = folder / MANIFEST
    with reading(path):
        if not path.is_file() or b'"blake2b"' not in path.read_bytes():
            return
    content = _read(path)
    wrong = []
    for name, entry in content["files"].items():
        if name.startswith("model") and name.endswith(".safetensors") and (folder / name).is_file():
            wrong += _wrong(folder / name, entry, content["tensors"])
    if wrong:
        raise Damaged(f"{folder}: {'; '.join(wrong)}: take another checkpoint")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Damaged(f"{path.parent}: {MANIFEST} is missing")
    try:
        with reading(path), _readable(path):
            text = path.read_bytes()
        content = parse_json(text, path)
    except Unreadable:
        raise
    except UserError as error:
        raise Damaged(str(error)) from None
    if text != _dump(content) or content.pop("itself", None) != _of_itself(content):
        raise Damaged(f"{path.parent}: {MANIFEST} is damaged")
    if content.get("format") != FORMAT:
        raise Damaged(f"{path} has format {content.get('format')!r}, this xtrain reads {FORMAT}")
    if not _sound(content):
        raise Damaged(f"{path} describes no files and tensors")
    return content


def _sound(content: dict[str, Any]) -> bool:
    files, tensors = content.get("files"), content.get("tensors")
    return (
        isinstance(files, dict)
        and isinstance(tensors, dict)
        and all(isinstance(f, dict) and type(f.get("bytes")) is int for f in files.values())
        and all(isinstance(f.get("blake2b"), str) for f in files.values())
    )


def _dump(content):
    return (json.dumps(content, indent=1) + "\n").encode()


def _of_itself(content):
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _wrong(path: Path, entry: dict[str, Any], tensors: dict[str, int]) -> list[str]:
    """What is wrong with one file: nothing, or one sentence."""
    if not path.is_file():
        return [f"{path.name} is no file"]
    try:
        with _readable(path):
            size = path.stat().st_size
            if size < entry["bytes"]:
                return [f"{path.name} was cut short ({size} of {entry['bytes']} bytes)"]
            if size > entry["bytes"]:
                return [f"{path.name} is too long ({size} bytes instead of {entry['bytes']})"]
            if digest(path) == entry["blake2b"]:
                return []
        try:
            where = _wrong_tensors(path, tensors) if path.suffix == ".safetensors" else []
        except UserError:
            return [f"{path.name} is damaged in its header"]
        return [f"{path.name} is damaged" + (f" in {listed(where, 3)}" if where else "")]
    except OSError as error:
        return [f"{path.name} cannot be read ({error.strerror or error})"]


def _wrong_tensors(path: Path, tensors: dict[str, int]) -> list[str]:
    """Names of the tensors in a safetensors file whose bytes have another checksum."""
    wrong = []
    with open(path, "rb") as file:
        for name, stored in read_header(path).items():
            file.seek(stored.start)
            crc, left = 0, stored.nbytes
            while left and (piece := file.read(min(left, PIECE))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
            if left or tensors.get(name) != crc:
                wrong.append(name)
    return wrong
