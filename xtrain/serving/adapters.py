"""Several LoRA adapters of one model, each for some of the sequences of a batch.

    y_n = x_n w^T + f x_n a_k^T b_k^T      k: the adapter of row n, if it has one

The matrices of all adapters are packed, so a pass has two products more, however many adapters its
rows use (kernels/decoding/adapter_columns.py). A sequence shares no blocks of the KV cache with
those of another adapter (Request.own_tokens).
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..device import Array, to_device
from ..errors import UserError
from ..formats.adapters import (
    PATTERNS,
    A,
    B,
    is_adapter,
    read_adapters,
    read_ranks,
    without_matrices,
)
from ..json_files import listed
from ..kernels import gemm
from ..kernels.decoding.adapter_columns import keep_own_columns
from ..kernels.runtime.launch import empty
from ..nn import functional as F
from ..nn.deferred import matching
from ..nn.model import Transformer
from ..nn.modules import Linear
from ..nn.tensor import Tensor

Matrices = dict[str, tuple[np.ndarray, np.ndarray]]  # {name of w: (a, factor b)}, in float32


class Adapters:
    """The adapters of a model.   names: in the order of their numbers"""

    def __init__(self, names: list[str]):
        self.names = names
        self._rows_of: dict[int, Array] = {}  # by thread: several engines may have the model

    @property
    def rows(self) -> Array | None:
        """Return the number of each row's adapter in the pass that follows in this thread, int32, -1
        for none. None: the pass is that of the model alone."""
        return self._rows_of.get(threading.get_ident())

    @rows.setter
    def rows(self, rows: Array | None) -> None:
        thread = threading.get_ident()
        if rows is None:
            self._rows_of.pop(thread, None)
        else:
            self._rows_of[thread] = rows


class SwitchedLinear(Linear):
    """A Linear with adapters."""

    def __init__(self, linear: Linear, adapters: Adapters):
        self.linear = linear
        self.adapters = adapters
        self.owners: Array | None = None  # of the columns of x a^T
        self.a: Array | None = None
        self.parts: list[tuple[slice, slice, Array]] = []  # columns of y and of x a^T, and b

    def __call__(self, x_NI: Tensor) -> Tensor:
        w = self.linear.weight
        x_NI = matching(x_NI, w)
        y_NO = F.linear(x_NI, w, None, self.linear.bias)
        rows = self.adapters.rows
        if rows is None or self.a is None or self.owners is None:
            return y_NO
        N = len(x_NI.data)
        u_NA = gemm.linear_into(empty(x_NI.data, (N, len(self.a))), x_NI.data, self.a)
        keep_own_columns(u_NA, rows[:N], self.owners)
        for columns, ranks, b in self.parts:
            gemm.linear_into(y_NO.data[:, columns], u_NA[:, ranks], b, accumulate=True)
        return y_NO

    def _storage(self, prefix):
        yield from self.linear._storage(prefix)

    def pack(self, matrices: list[Matrices], device: str, dtype: Any) -> None:
        """Take the matrices of each adapter, by the parts of w."""
        first = 0
        a: list[np.ndarray] = []
        owners: list[int] = []
        for part, rows in self.linear.weight.parts.items():
            start = len(owners)
            b = []
            for number, one in enumerate(matrices):
                if part in one:
                    a.append(one[part][0])
                    b.append(one[part][1])
                    owners += [number] * len(one[part][0])
            if b:
                packed = np.ascontiguousarray(np.concatenate(b, axis=1).astype(dtype))
                ranks = slice(start, len(owners))
                self.parts.append((slice(first, first + rows), ranks, to_device(packed, device)))
            first += rows
        if a:
            self.a = to_device(np.concatenate(a).astype(dtype), device)
            self.owners = to_device(np.array(owners, np.int32), device)


def add_adapters(model: Transformer, folders: Mapping[str, Path]) -> Adapters:
    """Add adapters to a model that is served: the folders of PEFT's adapters by their names.

    The model is changed in place, and without a row that uses them computes what it did. Raises
    UserError, and changes nothing, if the model has adapters, or a folder holds none or those of
    another model.
    """
    if model.adapters is not None:
        raise UserError(
            f"the model has the adapters {listed(model.adapters.names)} already: add all at once"
        )
    adapters = Adapters(list(folders))
    by_folder = [_matrices(folder, model.scales) for folder in folders.values()]
    unused = [set(matrices) for matrices in by_folder]
    switches: list[tuple[Any, str, SwitchedLinear]] = []
    for i, layer in enumerate(model.model.layers):
        for path, module in layer.modules():
            for name, linear in vars(module).items():
                if type(linear) is not Linear:
                    continue
                switched = SwitchedLinear(linear, adapters)
                where = f"model.layers.{i}.{path}"
                matrices: list[Matrices] = [{} for _ in by_folder]
                for part, rows in linear.weight.parts.items():
                    full = where + (f"{name}." if part == "weight" else "") + part
                    shape = (rows, linear.weight.shape[1])
                    for number, one in enumerate(by_folder):
                        if full in one:
                            folder = list(folders.values())[number]
                            matrices[number][part] = _checked(folder, full, one[full], shape)
                            unused[number].discard(full)
                switched.pack(matrices, model.device, model.branch_dtype or np.float32)
                switches.append((module, name, switched))
    for folder, left_over in zip(folders.values(), unused):
        if left_over:
            raise without_matrices(folder, left_over)
    for module, name, switched in switches:
        setattr(module, name, switched)
    model.adapters = adapters
    return adapters


def number_of(adapters: Adapters | None, name: str) -> int:
    """Return the number of an engine's adapter. Raises UserError."""
    names = [] if adapters is None else adapters.names
    if name not in names:
        raise UserError(
            f"there is no adapter {name!r}: use one of {names}, or none, or add it to the model "
            "before the engine is made"
        )
    return names.index(name)


def _matrices(folder: Path, scales: Mapping[str, float]) -> Matrices:
    """Return those of a folder with adapters, by the names of w. scales: Transformer.scales"""
    if not is_adapter(folder):
        raise UserError(f"{folder} holds no adapters of PEFT: give their folder")
    ranks = read_ranks(folder, PATTERNS)
    stored = read_adapters(folder)
    if any(".experts." in name for name in stored):
        raise UserError(
            f"{folder} has adapters of experts, which are not switched from row to row: serve the "
            f"model with them merged, --model {folder}"
        )
    matrices = {}
    unused = set(stored)
    for name in stored:
        module = name.removesuffix(A)
        if module != name and module + B in stored:
            w = f"{module}.weight"
            _, factor = ranks.of(module)
            b = np.float32(factor * scales.get(w, 1.0)) * stored[module + B].read_finite()
            matrices[w] = (stored[name].read_finite(), b)
            unused -= {name, module + B}
    if unused:
        raise without_matrices(folder, unused)
    return matrices


def _checked(folder: Path, name: str, pair: Any, shape: tuple[int, int]) -> Any:
    a, b = pair
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or (len(b), a.shape[1]) != shape:
        raise UserError(
            f"{folder}: the adapters do not fit the model: {name} has {a.shape} and {b.shape}, the "
            f"model's matrix {shape}"
        )
    return pair
