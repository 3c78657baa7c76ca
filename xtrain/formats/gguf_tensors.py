"""The tensors of a GGUF file, dequantized when they are read.

A folder in xtrain's cache describes the file (gguf_model.py); INDEX there says where they are.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..json_files import read_json, reading
from .architectures import is_norm
from .tensor_file import DTYPES, Stored

MAGIC = b"GGUF"
INDEX = "gguf.json"


def library() -> Any:
    """Return the package gguf. Raises UserError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise UserError(
            "GGUF files need the package gguf: install it with `pip install -e '.[gguf]'`"
        ) from None


def is_gguf(path: Path) -> bool:
    """Return True if the file begins as a GGUF file does."""
    with reading(path), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def file_of(folder: Path) -> Path | None:
    """Return the GGUF file that a folder describes; None: it is another folder."""
    if not (folder / INDEX).is_file():
        return None
    return Path(read_json(folder / INDEX)["file"])


def shown(folder: Path) -> Path:
    """Return what a message calls a model's folder: the GGUF file that it describes, or itself."""
    return file_of(folder) or folder


def tensors_of(folder: Path) -> dict[str, Stored]:
    """Return {name: tensor} of the GGUF file that a folder describes."""
    index = read_json(folder / INDEX)
    path = Path(index["file"])
    tensors: dict[str, Stored] = {}
    for name, (kind, shape, start, heads) in index["tensors"].items():
        offset = index["norm_offset"] if is_norm(name) else 0.0
        options = {"offset": offset, "kind": kind, "heads": heads}
        tensors[name] = Quantized(path, name, DTYPES["F32"], tuple(shape), start, **options)
    return tensors


@dataclass(frozen=True)
class Quantized(Stored):
    """A tensor in a GGUF file. Its values are float32.

    kind: its type there, such as Q4_K.
    heads: how many heads its rows belong to if they are in the order of pairs, else 0
    """

    kind: str = "F32"
    heads: int = 0

    def _in_file(self) -> np.ndarray:
        gguf = library()
        kind = gguf.GGMLQuantizationType[self.kind]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        *rows, width = self.shape
        data = np.empty((*rows, width // block * size), np.uint8)
        with reading(self.path), open(self.path, "rb") as file:
            file.seek(self.start)
            n = file.readinto(data.reshape(-1).data)
        if n != data.nbytes:
            raise UserError(f"{self.path} was shortened while it was read: try again")
        if kind.name in DTYPES:
            values = data.view(DTYPES[kind.name]).astype(np.float32)
        else:
            values = gguf.quants.dequantize(data, kind)
        values = values.reshape(self.shape)
        if self.heads:
            values = halves_from_pairs(values, self.heads)
        return values


def halves_from_pairs(w: np.ndarray, heads: int) -> np.ndarray:
    """Undo pairs_from_halves (gguf_file.py)."""
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(w.shape))
