"""Read and write safetensors files: each field of the header is checked, one tensor at a time
written.

    8 bytes    length of the header, little endian
    header     JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
               "__metadata__": {...}}
    data       the offsets count from here

The safetensors library is not used, for three reasons: it cannot return bfloat16 to NumPy, a model
on a GPU must pass through host memory one tensor at a time, and each kind of damage needs a
separate message.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UserError
from ..json_files import MAX_JSON_BYTES, check_pointer, listed, parse_json, reading

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
INT32 = np.dtype("<i4")
# ends of the names of tensors that may be I32: codes of four bits (four_bit_files.py)
INTEGERS = (".qweight", ".qzeros", ".g_idx")
BF16_INFINITY = 0x7F80  # its bits; those of NaN are larger
BF16_MINUS_INFINITY = 0xFF80
DTYPE_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LowRank:
    """What LoRA adapters make of a matrix w (O, I): v = w + factor b a, b (O, r) and a (r, I).

    magnitude: (O,), the norm that each row of v gets (DoRA, Liu et al. 2024); None: that it has.
    transposed: v = w + factor (b a)^T, of an embedding.
    residual: in place of w, w without its largest r singular values (PiSSA, Meng et al. 2024).
    """

    a: "Stored"
    b: "Stored"
    factor: float
    magnitude: "Stored | None" = None
    transposed: bool = False
    residual: bool = False

    def rows(self, first: int, n: int) -> "LowRank":
        """Return n rows of the matrix, from `first` on."""
        if self.residual or self.transposed:
            raise UserError(
                f"{self.a.path}: PiSSA of packed matrices is not supported: merge it with peft"
            )
        m = self.magnitude
        if m is not None:
            m = m.rows(first, n, m.name)
        return replace(self, b=self.b.rows(first, n, self.b.name), magnitude=m)

    def added_to(self, w: np.ndarray) -> np.ndarray:
        """Return the matrix in float32. Raises UserError as Stored.read_finite."""
        if self.residual:
            w = w - principal(w, self.a.shape[0])
        change = np.float32(self.factor) * (self.b.read_finite() @ self.a.read_finite())
        v = w + (change.T if self.transposed else change)
        if self.magnitude is None:
            return v
        norm = np.linalg.norm(v, axis=1)
        return v * (self.magnitude.read_finite() / np.where(norm == 0, 1, norm))[:, None]


def principal_factors(w: np.ndarray, r: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a (r, I), b (O, r), whose product is the part of w (O, I) with its r largest singular
    values; both have their square roots. float32."""
    u, values, v = np.linalg.svd(w, full_matrices=False)
    root = np.sqrt(values[:r])
    return root[:, None] * v[:r], u[:, :r] * root


def principal(w: np.ndarray, r: int) -> np.ndarray:
    """Return the part of w (O, I) with its r largest singular values."""
    a, b = principal_factors(w, r)
    return b @ a


@dataclass(frozen=True)
class Stored:
    """One tensor in a file, or some of its rows."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # offset of its data in the file, in bytes
    scale: float = 1.0  # by which the values are multiplied on reading
    update: LowRank | None = None  # applied before that
    offset: float = 0.0  # added after it
    picked: tuple[int, int, int] | None = None  # first column, step, columns of a row in the file

    @property
    def nbytes(self) -> int:
        """Size of the data in the file, in bytes."""
        return tensor_bytes(self)

    def rows(self, first: int, n: int, name: str) -> "Stored":
        """Return n rows, from `first` on, as a tensor of their own."""
        each = self._row_elements() * self.dtype.itemsize
        update = self.update and self.update.rows(first, n)
        start = self.start + first * each
        shape = (n, *self.shape[1:])
        return replace(self, name=name, shape=shape, start=start, update=update)

    def every(self, first: int, step: int) -> "Stored":
        """Return the columns first, first + step, ... of a matrix."""
        rows, columns = self.shape
        return replace(self, shape=(rows, columns // step), picked=(first, step, columns))

    def _row_elements(self) -> int:
        return self.picked[2] if self.picked else math.prod(self.shape[1:])

    def read(self) -> np.ndarray:
        """Return the values in float32. Raises UserError if the file cannot be read."""
        values = self._in_file().astype(np.float32, copy=False)
        if self.update is not None:
            values = self.update.added_to(values)
        if self.scale != 1:
            values = values * np.float32(self.scale)
        if self.offset:
            values = values + np.float32(self.offset)
        return values

    def read_finite(self, dtype: Any = np.float32) -> np.ndarray:
        """Return the values in `dtype`. Raises UserError also if one is infinite or NaN."""
        as_stored = self.scale == 1 and self.update is None and not self.offset
        if self.dtype == dtype and as_stored:
            data = self._in_file()
        else:
            data = self.read()
        if not _all_finite(data):
            raise UserError(
                f"{self.path} is damaged: {listed([self.name])} holds values that are not finite"
            )
        return data.astype(dtype, copy=False)

    def _in_file(self) -> np.ndarray:
        shape = (self.shape[0], self.picked[2]) if self.picked else self.shape
        data = np.empty(shape, self.dtype)
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(self.start)
            n = file.readinto(data.reshape(-1).view(np.uint8).data)
        if n != data.nbytes:
            raise UserError(f"{self.path} was shortened while it was read: try again")
        if self.picked:
            first, step, _ = self.picked
            data = np.ascontiguousarray(data[:, first::step])
        return data


def _all_finite(data: np.ndarray) -> bool:
    if data.dtype.name == "bfloat16":  # NumPy compares its bits at ten times the speed
        positive = np.max(data.view(np.int16), initial=0)
        negative = np.max(data.view(np.uint16), initial=0)
        return bool(positive < BF16_INFINITY and negative < BF16_MINUS_INFINITY)
    return not data.size or bool(np.isfinite([data.min(), data.max()]).all())


def read_header(path: Path) -> dict[str, Stored]:
    """Return {name: tensor}.

    Raises UserError if the file is truncated, damaged or not a safetensors file.
    """
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_pointer(file.read(64), path)
        file.seek(0)
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
                f"{path} is damaged: in its header {listed([tensor.name])} does not begin where "
                "another tensor ends"
            )
        end += tensor.nbytes
    if size != 8 + length + end:
        raise UserError(
            f"{path} was cut short or is damaged: its header describes {8 + length + end} bytes, "
            f"the file has {size}"
        )
    return tensors


def _entry(path: Path, name: str, entry: Any, base: int) -> Stored:
    """Return the tensor of one entry of the header. Raises UserError.

    base: where the data begins
    """
    if not isinstance(entry, dict):
        entry = {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtypes = DTYPES
    if name.endswith(INTEGERS):
        dtypes = DTYPES | {"I32": INT32}
    if isinstance(dtype, str) and dtype not in dtypes:
        raise UserError(
            f"{path}: {listed([name])} is stored as {listed([dtype])}, xtrain reads "
            f"{', '.join(DTYPES)}"
        )
    valid = (
        isinstance(dtype, str)
        and all(_naturals(x) for x in (shape, offsets))
        and len(shape) <= 8
        and len(offsets) == 2
        and offsets[1] - offsets[0] == math.prod(shape) * dtypes[dtype].itemsize
    )
    if not valid:
        raise UserError(f"{path} is damaged: its header describes {listed([name])} wrongly")
    return Stored(path, name, dtypes[dtype], tuple(shape), base + offsets[0])


def _naturals(x: Any) -> bool:
    """Return True if x is a list of integers in [0, 2^62)."""
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 2**62 for n in x)


def tensor_bytes(tensor: Any) -> int:
    """Return the size in bytes of anything with shape and dtype."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write tensors (anything with shape, dtype and numpy()) in the given order.

    dtypes: float32, float16, bf16. The same values give the same bytes. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end = end + tensor_bytes(tensor)
        dtype = DTYPE_NAMES[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            values = np.ascontiguousarray(tensor.numpy(), DTYPES[DTYPE_NAMES[tensor.dtype.name]])
            file.write(values.reshape(-1).view(np.uint8).data)
