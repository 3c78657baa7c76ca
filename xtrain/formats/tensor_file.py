"""safetensors files, read with suspicion and written one tensor at a time.

    8 bytes    length of the header, little endian
    header     JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    data       the offsets count from here

Here without the format's own library for three reasons: NumPy has no bfloat16 that it could return, a model on a GPU
passes through host memory one tensor at a time, and every kind of damage is told in a sentence of its own.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UserError

MAX_JSON_BYTES = 16 << 20  # a header of a model with 100 B parameters has 0.2 MB
DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file where its data begins

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self)

    def read(self) -> np.ndarray:
        """-> float32 of the same values. Raises UserError."""
        data = np.empty(self.shape, self.dtype)
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(self.start)
            n = file.readinto(data.reshape(-1).view(np.uint8))
        if n != data.nbytes:
            raise UserError(f"{self.path} became shorter while it was read")
        return data.astype(np.float32, copy=False)

    def read_finite(self) -> np.ndarray:
        """The same. Raises UserError also when a value is infinite or none at all."""
        data = self.read()
        if data.size and not np.isfinite([data.min(), data.max()]).all():
            raise UserError(
                f"{self.path} is damaged: {listed([self.name])} holds values that are not finite numbers"
            )
        return data


def read_header(path: Path) -> dict[str, Stored]:
    """{name: tensor}. Raises UserError when the file is cut short, damaged or of another kind."""
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise UserError(
                f"{path} is not a safetensors file or was cut short: "
                f"its header claims {length} bytes, the file has {size}"
            )
        text = file.read(length)
    tensors = {
        name: _entry(path, name, entry, 8 + length)
        for name, entry in parse_json(text, path).items()
        if name != "__metadata__"
    }
    end = 0
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != 8 + length + end:
            raise UserError(
                f"{path} is damaged: in its header {listed([tensor.name])} does not begin where another tensor ends"
            )
        end += tensor.nbytes
    if size != 8 + length + end:
        raise UserError(
            f"{path} was cut short or is damaged: its header describes {8 + length + end} bytes, the file has {size}"
        )
    return tensors


def _entry(path, name, entry, base):
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(
            f"{path}: {listed([name])} is stored as {dtype}, xtrain reads {', '.join(DTYPES)}"
        )
    sound = (
        isinstance(dtype, str)
        and all(_naturals(x) for x in (shape, offsets))
        and len(shape) <= 8
        and len(offsets) == 2
        and offsets[1] - offsets[0] == math.prod(shape) * DTYPES[dtype].itemsize
    )
    if not sound:
        raise UserError(f"{path} is damaged: its header describes {listed([name])} wrongly")
    return Stored(path, name, DTYPES[dtype], tuple(shape), base + offsets[0])


def _naturals(x):
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 2**62 for n in x)


def tensor_bytes(tensor: Any) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """Tensors (anything with shape, dtype and numpy()) in the order given; float32, float16 or bf16.

    The same values give the same bytes. Raises OSError.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor_bytes(tensor)
        dtype = NAMES[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = np.ascontiguousarray(tensor.numpy(), DTYPES[NAMES[tensor.dtype.name]])
            file.write(values.reshape(-1).view(np.uint8))


# ----------------------------------------------------------------------------- what readers of a folder share
def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file. Raises UserError."""
    with reading(path), open(path, "rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise UserError(f"{path} has more than {MAX_JSON_BYTES >> 20} MB, which cannot be right")
    return parse_json(text, path)


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it holds no sound JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it must hold a JSON object")
    return value


def _without_repetition(pairs):
    """Of two equal keys json would keep the last, another reader the first."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{listed([twice])} occurs twice")
    return content


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the operating system refuses inside becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def is_folder(path: Path) -> bool:
    """Raises UserError where nobody may look, or where the name is too long to be one."""
    with reading(path):
        return path.is_dir()


def listed(items: list[str], most: int = 10, longest: int = 160) -> str:
    """A list in a sentence. Names from a file may be long or hold line breaks."""
    short = [repr(item)[1:-1] for item in items[:most]]
    shown = ", ".join(s if len(s) <= longest else s[: longest - 3] + "..." for s in short)
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")
