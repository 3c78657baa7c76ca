"""Checksums of a folder: manifest.json holds one for every file and for every tensor.

    {"format": 1,
     "files":   {"model.safetensors": {"bytes": 3100, "blake2b": "..."}, ...},
     "tensors": {"model.norm.weight": 912384723, ...},        CRC-32 of the tensor's bytes
     "itself":  "..."}                                        BLAKE2b of everything above

safetensors detects neither a flipped bit nor a file from another folder. The file checksums find
any damage. The tensor checksums are computed in memory before anything is written, so they also
find errors on the way to the disk, and they name the damaged tensor.
"""

import contextlib
import errno
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import digest
from ..json_files import listed, parse_json, reading
from .gguf_tensors import file_of
from .tensor_file import read_header

MANIFEST = "manifest.json"
FORMAT = 1
BLOCK = 1 << 24  # bytes read at once
# of sampled_digest: bytes of a sample, and of how many a file has at least, if it is large enough
SAMPLE = 1 << 12
SAMPLES = 256
CONFIGS = ("config.json", "adapter_config.json")
WEIGHT_FILES = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Damaged(UserError):
    """A folder does not match its manifest. The message names the files."""


class Unreadable(UserError):
    """A file cannot be read at the moment, although its content may be intact."""


TEMPORARY = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENOMEM)


@contextlib.contextmanager
def _checking_access(path: Path) -> Iterator[None]:
    """Turn an OSError that says nothing about the content into Unreadable."""
    try:
        yield
    except OSError as error:
        if error.errno in TEMPORARY:
            raise Unreadable(
                f"{path} cannot be read ({error.strerror}): fix that, then try again"
            ) from None
        raise


def unlisted(folder: Path) -> list[str]:
    """Return the names of files in `folder` that its manifest does not list, except hidden ones.

    Raises Damaged if there is no valid manifest.
    """
    own = {MANIFEST, *(name.split("/")[0] for name in _read(folder / MANIFEST)["files"])}
    return [p.name for p in folder.iterdir() if p.name not in own and not p.name.startswith(".")]


def sampled_digest(folder: Path) -> str:
    """Return a digest of the weights of a model by samples, which tell two models apart, but not a
    damaged one from a good one. Raises UserError."""
    sampled = hashlib.blake2b(digest_size=16)
    with reading(folder):
        paths = [
            path
            for path in sorted(folder.iterdir())
            if WEIGHT_FILES.fullmatch(path.name) or path.name in CONFIGS
        ]
        if gguf := file_of(folder):
            paths.append(gguf)
        for path in paths:
            size = path.stat().st_size
            sampled.update(f"{path.name} {size} ".encode())
            with open(path, "rb") as file:
                for at in range(0, size, max(SAMPLE, size // SAMPLES)):
                    file.seek(at)
                    sampled.update(file.read(SAMPLE))
    return sampled.hexdigest()


def tensor_checksum(values: np.ndarray) -> int:
    """Return the CRC-32 of the bytes that a tensor has in a file."""
    stored = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return zlib.crc32(stored.reshape(-1).view(np.uint8).data)


def write_manifest(folder: Path, tensors: dict[str, int]) -> None:
    """Write the manifest of all files in `folder`, after reading them back.

    tensors: {name: tensor_checksum} of all tensors in them

    A folder inside is covered by its own manifest if it has one. Raises OSError if a file does not
    hold these tensors.
    """
    files = {}
    paths = []
    for path in sorted(folder.iterdir()):
        if (path / MANIFEST).is_file():
            paths.append(path / MANIFEST)
        elif path.is_dir():
            paths += sorted(path.iterdir())
        else:
            paths.append(path)
    for path in paths:
        wrong = _wrong_tensors(path, tensors)
        if wrong:
            raise OSError(f"{path.name} was not written correctly: {listed(wrong)}")
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "blake2b": digest(path)}
    content = {"format": FORMAT, "files": files, "tensors": tensors}
    content["itself"] = _hash_of(content)
    (folder / MANIFEST).write_bytes(_dump(content))


def verify(folder: Path) -> None:
    """Raise Damaged if a file is missing, truncated or changed, or belongs to another model.

    The error names every such file. Other unlisted files are allowed. Raises Unreadable if a file
    cannot be read at the moment.
    """
    content = _read(folder / MANIFEST)
    with reading(folder), _checking_access(folder):
        present = {path.name for path in folder.iterdir()}
    inside = [name for name in content["files"] if "/" in name]
    with _checking_access(folder):
        present |= {name for name in inside if (folder / name).is_file()}
    wrong = [f"{name} is missing" for name in content["files"] if name not in present]
    weights = [
        name for name in sorted(present - content["files"].keys()) if WEIGHT_FILES.fullmatch(name)
    ]
    wrong += [f"{name} does not belong there, move it away" for name in weights]
    for name, entry in content["files"].items():
        if name in present:
            wrong += _wrong(folder / name, entry, content["tensors"])
    if wrong:
        raise Damaged(f"{folder}: {'; '.join(wrong)}")
    for name in inside:
        if name.endswith(f"/{MANIFEST}"):
            verify((folder / name).parent)


def verify_weights(folder: Path) -> None:
    """Raise Damaged if the model's weights do not match the folder's manifest.

    Other files are ignored. A folder without a manifest, or with another program's manifest.json,
    is not checked.
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
        raise Damaged(f"{folder}: {'; '.join(wrong)}: use another checkpoint")


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a manifest without "itself". Raises Damaged or Unreadable."""
    if not path.is_file():
        raise Damaged(f"{path.parent}: {MANIFEST} is missing")
    try:
        with reading(path), _checking_access(path):
            text = path.read_bytes()
        content = parse_json(text, path)
    except Unreadable:
        raise
    except UserError as error:
        raise Damaged(str(error)) from None
    if text != _dump(content) or content.pop("itself", None) != _hash_of(content):
        raise Damaged(f"{path.parent}: {MANIFEST} is damaged")
    if content.get("format") != FORMAT:
        raise Damaged(
            f"{path} has format {content.get('format')!r}, this xtrain reads {FORMAT}: use the "
            "version that wrote it"
        )
    if not _well_formed(content):
        raise Damaged(f"{path} does not describe files and tensors")
    return content


def _well_formed(content: dict[str, Any]) -> bool:
    files = content.get("files")
    tensors = content.get("tensors")
    return (
        isinstance(files, dict)
        and isinstance(tensors, dict)
        and all(isinstance(f, dict) and type(f.get("bytes")) is int for f in files.values())
        and all(isinstance(f.get("blake2b"), str) for f in files.values())
    )


def _dump(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _wrong(path: Path, entry: dict[str, Any], tensors: dict[str, int]) -> list[str]:
    """Return what is wrong with one file: an empty list, or one sentence."""
    if not path.is_file():
        return [f"{path.name} is not a file"]
    try:
        with _checking_access(path):
            size = path.stat().st_size
            if size < entry["bytes"]:
                return [f"{path.name} was cut short ({size} of {entry['bytes']} bytes)"]
            if size > entry["bytes"]:
                return [f"{path.name} is too long ({size} bytes instead of {entry['bytes']})"]
            if digest(path) == entry["blake2b"]:
                return []
        try:
            where = _wrong_tensors(path, tensors)
        except UserError:
            return [f"{path.name} is damaged in its header"]
        return [f"{path.name} is damaged" + (f" in {listed(where, 3)}" if where else "")]
    except OSError as error:
        return [f"{path.name} cannot be read ({error.strerror or error})"]


def _wrong_tensors(path: Path, tensors: dict[str, int]) -> list[str]:
    """Return the names of tensors whose checksums differ; none if it is no safetensors file."""
    wrong: list[str] = []
    if path.suffix != ".safetensors":
        return wrong
    with open(path, "rb") as file:
        for name, stored in read_header(path).items():
            file.seek(stored.start)
            crc = 0
            left = stored.nbytes
            while left and (block := file.read(min(left, BLOCK))):
                crc = zlib.crc32(block, crc)
                left -= len(block)
            if left or tensors.get(name) != crc:
                wrong.append(name)
    return wrong
