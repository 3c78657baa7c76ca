"""Matrices of four bits in the files of AutoGPTQ, GPTQModel and AutoAWQ, dequantized when they are read.

A matrix w (O, K) is four tensors. Its K columns lie in groups of group_size, g(k) of column k:

    w[o, k] = scales[g(k), o] (code[k, o] - zero[g(k), o])

    name       GPTQ                                          AWQ
    scales     (groups, O), a float
    qweight    int32 (K / 8, O): nibble j of row i           int32 (K, O / 8): nibble j of column i
               is code[8 i + j, o]                           is code[k, 8 i + ORDER[j]]
    qzeros     int32 (groups, O / 8): nibble j of            int32 (groups, O / 8), as qweight
               column i is zero[g, 8 i + j] - 1 mod 16
               (layout "gptq_v2": zero)
    g_idx      int32 (K,): g(k), in any order                none: g(k) = k // group_size

kernels/four_bits.py finds the same codes again where a group has 128 columns.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import UserError
from ..json_files import listed
from .tensor_file import DTYPES, Stored

KEY = "quantization_config"  # of config.json
BITS = 4
NIBBLE = 15
PER_WORD = 8
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # column of a word -> where its nibble is in order
PARTS = ("qweight", "qzeros", "scales", "g_idx")
# key of quantization_config -> the values that are read; the first is the meaning of a missing key
METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gptq": {"bits": (BITS,), "format": ("gptq", "gptq_v2")},
    "awq": {"bits": (BITS,), "format": ("gemm",), "zero_point": (True,)},
}
# the older names of `format`, which win in transformers
FORMATS = {"gptq": ("checkpoint_format",), "awq": ("version", "checkpoint_format")}


def check_method(config: dict[str, Any]) -> None:
    """Raise UserError unless this quantization_config is of a layout that is read."""
    method = config.get("quant_method")
    if method not in list(METHODS):
        raise UserError(
            f"its weights are quantized ({method or 'unknown method'}), which xtrain does not "
            "read: use the model's unquantized weights, and quantize them with --weights int4"
        )
    values = config | {"format": _layout(config)}
    for key, allowed in METHODS[method].items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"its weights are quantized ({method}) with {key} {values[key]!r}, xtrain reads "
                f"{' or '.join(map(repr, allowed))}: use the model's unquantized weights"
            )


def _layout(config: dict[str, Any]) -> str:
    """Return how the tensors are packed, in lower case."""
    method = config["quant_method"]
    values = [config.get(key) for key in (*FORMATS[method], "format")]
    return str(next((x for x in values if x is not None), METHODS[method]["format"][0])).lower()


def dequantized(content: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Stored]:
    """Return a folder's tensors with one in place of those of each quantized matrix.

    content: of config.json.  Raises UserError if tensors do not fit together.
    """
    config = content.get(KEY)
    if not isinstance(config, dict):
        return stored
    check_method(config)
    result = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part not in PARTS:
            result[name] = tensor
        elif part == "qweight":
            result[f"{module}.weight"] = _matrix(module, stored, config)
        elif f"{module}.qweight" not in stored:
            raise UserError(f"{tensor.path} has {listed([name])}, but no qweight next to it")
    return result


def _matrix(module: str, stored: dict[str, Stored], config: dict[str, Any]) -> "FourBitMatrix":
    parts = {part: stored[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in stored}
    codes = parts["qweight"]
    gptq = config["quant_method"] == "gptq"
    needed = ["qzeros", "scales"]
    if gptq and config.get("desc_act"):
        needed.append("g_idx")  # without it nothing says which columns are a group
    missing = [part for part in needed if part not in parts]
    if missing:
        raise UserError(f"{codes.path} lacks {listed([f'{module}.{missing[0]}'])}")
    if len(codes.shape) != 2:
        raise UserError(f"{codes.path} is damaged: {listed([codes.name])} has shape {codes.shape}")
    rows, columns = codes.shape
    K, O = (rows * PER_WORD, columns) if gptq else (rows, columns * PER_WORD)  # noqa: E741
    groups = parts["scales"].shape[0] if parts["scales"].shape else 0
    shapes = {"qzeros": (groups, O // PER_WORD), "scales": (groups, O), "g_idx": (K,)}
    for part, tensor in parts.items():
        floats = tensor.dtype in DTYPES.values()
        fits = part == "qweight" or tensor.shape == shapes[part]
        if not fits or floats != (part == "scales"):
            raise UserError(
                f"{tensor.path}: {listed([tensor.name])} of shape {tensor.shape} does not fit "
                f"{listed([codes.name])} of shape {codes.shape}"
            )
    size = config.get("group_size", 128)
    size = K if size in (-1, None) else size
    if "g_idx" not in parts and (type(size) is not int or size < 1 or -(-K // size) != groups):
        raise UserError(
            f"{codes.path}: {listed([f'{module}.scales'])} has {groups} groups, group_size "
            f"{size!r} gives others for {K} columns"
        )
    before = int(gptq and _layout(config) == "gptq")
    return FourBitMatrix(
        codes.path,
        f"{module}.weight",
        DTYPES["F32"],
        (O, K),
        codes.start,
        parts=parts,
        gptq=gptq,
        group_size=size,
        zero_offset=before,
    )


@dataclass(frozen=True)
class FourBitMatrix(Stored):
    """A matrix (O, K) of codes and their scales. Its values are float32.

    parts: {end of its name: tensor}.
    zero_offset: added to the zero points in the file.
    first: its first row, of those in the file.
    """

    parts: dict[str, Stored] = field(default_factory=dict)
    gptq: bool = True
    group_size: int = 128
    zero_offset: int = 0
    first: int = 0

    def rows(self, first: int, n: int, name: str) -> "Stored":
        update = self.update and self.update.rows(first, n)
        shape = (n, self.shape[1])
        return replace(self, name=name, shape=shape, first=self.first + first, update=update)

    def _in_file(self) -> np.ndarray:
        K = self.shape[1]
        O = self.parts["scales"].shape[1]  # noqa: E741
        words = self.parts["qweight"]._in_file()
        zeros_GO = self._columns(self.parts["qzeros"]._in_file()) + self.zero_offset & NIBBLE
        scales_GO = self.parts["scales"].read()
        if self.gptq:
            codes_KO = nibbles_of(words).swapaxes(1, 2).reshape(K, O)
        else:
            codes_KO = self._columns(words)
        if "g_idx" in self.parts:
            group_K = self.parts["g_idx"]._in_file()
            if group_K.size and not 0 <= group_K.min() <= group_K.max() < len(scales_GO):
                raise UserError(f"{self.path} is damaged: g_idx of {listed([self.name])}")
        else:
            group_K = np.arange(K) // self.group_size
        values_KO = (codes_KO - zeros_GO[group_K]).astype(np.float32) * scales_GO[group_K]
        return np.ascontiguousarray(values_KO.T[self.first : self.first + self.shape[0]])

    def _columns(self, words: np.ndarray) -> np.ndarray:
        """Return the nibbles of words (N, O / 8) as (N, O)."""
        codes = nibbles_of(words)
        if not self.gptq:
            codes = codes[..., np.argsort(AWQ_ORDER)]
        return codes.reshape(len(words), -1)


def nibbles_of(words: np.ndarray) -> np.ndarray:
    """Return the four bits of int32 words, the lowest first: (..., 8) int32."""
    shifts = np.arange(PER_WORD, dtype=np.uint32) * np.uint32(BITS)
    return (words.view(np.uint32)[..., None] >> shifts & np.uint32(NIBBLE)).astype(np.int32)
