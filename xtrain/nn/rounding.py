"""Round a matrix to codes of four bits one column after the other: GPTQ (Frantar et al. 2023).

    y = x w^T       H = sum_n g_n x_n x_n^T   (K, K)       error of w': tr((w' - w) H (w' - w)^T)

The columns that are not rounded yet are moved so that they make up for the errors of those that are.
With U the upper Cholesky factor of H^-1 (H^-1 = U^T U), and q_k the nearest value of column k's
group,

    e = (w_k - q_k) / U_kk       w_j = w_j - e U_kj   for the columns j > k

Columns with a large H_kk come first, while most others can still move. Steps and zero points are
those of the groups of w, and the largest and smallest weights of a group keep their codes. So the
result is on the grid of its groups, and kernels/four_bits.py finds the same codes when it quantizes
it.

g_n is the mean square of the loss's gradient by y_n: an error counts as much as it changes the loss
(GuidedQuant, Kim et al. 2025). A model's first token often has inputs a thousand times as large as
the others, and hardly any influence: without g most of H is that token. SmolLM2-135M's perplexity
of two texts: lessons/notes/quantized_weights.md.

The H of all layers may take more memory than the model (Llama-3-8B: 39 GB). So the text is computed
once for as many layers at a time as MEMORY allows, and the inputs of later layers are those that
the rounded ones make.

    by hand   x = (1, 1) always, w = (0.4, 0.4), steps of 1: rounded alone both become 0, y is 0
              instead of 0.8. Here the first becomes 0 and the second 0.8, which becomes 1
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device import Array, to_device, to_numpy
from ..kernels.cast import cast_fwd
from ..kernels.four_bits import GROUP, grid_of, nearest_on_grid
from ..kernels.gemm import matmul
from ..kernels.quantize import quantize
from ..kernels.runtime.launch import empty
from .autograd import Function
from .decoder import MLP, Attention, Block
from .model import Transformer
from .modules import Linear
from .tensor import Tensor

DAMPING = 0.01  # of the mean of H's diagonal, added to it
BLOCK = 128  # columns, after which the others are moved at once
MEMORY = 4 * 2**30  # bytes of all H at the same time
FLOAT32 = np.dtype(np.float32)


class _Note(Function):
    """y, whose gradient is noted."""

    @staticmethod
    def forward(ctx, y, note):
        ctx.save(note)
        return y

    @staticmethod
    def backward(ctx, dy):
        (note,) = ctx.saved
        note(dy)
        return dy, None


class _Observed:
    """Stand in for a Linear and sum H over its calls, for each matrix that it holds."""

    def __init__(self, linear: Linear):
        self.linear = linear
        self.rows = list(linear.weight.parts.values())
        self.h_PKK: list[Any] = [0.0] * len(self.rows)

    def __call__(self, x_NK: Tensor) -> Tensor:
        x = cast_fwd(x_NK.data, FLOAT32)
        return _Note.apply(self.linear(x_NK), lambda dy: self._add(x, cast_fwd(dy, FLOAT32)))

    def _add(self, x_NK: Array, dy_NO: Array) -> None:
        first = 0
        for i, rows in enumerate(self.rows):
            g_N1 = (dy_NO[:, first : first + rows] ** 2).mean(1, keepdims=True)
            h = empty(x_NK, (x_NK.shape[1],) * 2, np.float32)
            self.h_PKK[i] = self.h_PKK[i] + matmul(h, x_NK * g_N1, x_NK, trans_a=True)
            first += rows


class _Table:
    """Stand in for the embedding: the gradients begin at what it returns."""

    def __init__(self, table: Any):
        self.table = table

    def __call__(self, ids: Array) -> Tensor:
        return Tensor(self.table(ids).data, requires_grad=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


def _linears(layer: Block) -> list[tuple[Any, str, Linear]]:
    """Return (module, attribute, Linear) of the matrices that are rounded."""
    return [
        (module, name, item)
        for module in (layer.self_attn, layer.mlp)
        if type(module) in (Attention, MLP)
        for name, item in vars(module).items()
        if type(item) is Linear
    ]


def _in_turn(layers: list[Block]) -> Iterator[list[Block]]:
    """Yield neighbouring layers, as many as MEMORY allows, at least one."""
    group: list[Block] = []
    size = 0
    for layer in layers:
        weights = [linear.weight for *_, linear in _linears(layer)]
        own = sum(FLOAT32.itemsize * len(w.parts) * w.shape[1] ** 2 for w in weights)
        if group and size + own > MEMORY:
            yield group
            group = []
            size = 0
        group.append(layer)
        size += own
    yield group


@contextlib.contextmanager
def _observed(model: Transformer, layers: list[Block]) -> Iterator[list[_Observed]]:
    """Yield what the matrices of these layers have seen, which grows while the model computes."""
    table = model.model.embed_tokens
    linears = [item for layer in layers for item in _linears(layer)]
    found = [_Observed(linear) for *_, linear in linears]
    stand_in: Any = _Table(table)
    model.model.embed_tokens = stand_in
    for (module, name, _), seen in zip(linears, found):
        setattr(module, name, seen)
    try:
        yield found
    finally:
        model.model.embed_tokens = table
        for module, name, linear in linears:
            setattr(module, name, linear)


def round_weights(model: Transformer, ids_BT: np.ndarray, kind: str) -> None:
    """Round the matrices of attentions and MLPs to values that codes of this kind have, in place.

    ids: (B, T) tokens of a text like those that the model will see.
    kind: of four bits.
    """
    for layers in _in_turn(model.model.layers):
        with _observed(model, layers) as observed:
            for row in ids_BT:
                model.loss(row[None, :-1], row[None, 1:]).backward()
        for seen in observed:
            _round(seen, kind, model.device)
        if model.arena.trainable:
            model.zero_grad()
        model.arena.refresh()


def _round(seen: _Observed, kind: str, device: str) -> None:
    """Round a matrix, and free its H."""
    weight = seen.linear.weight
    w_OK = to_numpy(cast_fwd(weight.data, FLOAT32))
    parts = np.split(w_OK, np.cumsum(seen.rows)[:-1])
    new = [rounded(w, to_numpy(h), kind) for w, h in zip(parts, seen.h_PKK)]
    seen.h_PKK.clear()
    weight.data = cast_fwd(to_device(np.concatenate(new), device), weight.dtype)


def rounded(w_OK: np.ndarray, h_KK: np.ndarray, kind: str) -> np.ndarray:
    """Return w (O, K) float32 rounded to codes of this kind, with a small error tr(d H d^T)."""
    step_OK, zero_OK = grid_of(quantize(w_OK, kind))
    ends_OK = _ends(w_OK, kind)
    kept_OK = nearest_on_grid(w_OK, step_OK, zero_OK, kind)
    order = np.argsort(-np.diag(h_KK), kind="stable")
    upper = _factor(h_KK[np.ix_(order, order)])
    w = w_OK[:, order].copy()
    step, zero, ends, kept = (x[:, order] for x in (step_OK, zero_OK, ends_OK, kept_OK))
    result = np.empty_like(w)
    K = w.shape[1]
    for first in range(0, K, BLOCK):
        last = min(first + BLOCK, K)
        errors = np.empty((len(w), last - first), np.float32)
        for k in range(first, last):
            nearest = nearest_on_grid(w[:, k], step[:, k], zero[:, k], kind)
            result[:, k] = np.where(ends[:, k], kept[:, k], nearest)
            errors[:, k - first] = (w[:, k] - result[:, k]) / upper[k, k]
            w[:, k:last] -= np.outer(errors[:, k - first], upper[k, k:last])
        w[:, last:] -= errors @ upper[first:last, last:]
    return np.ascontiguousarray(result[:, np.argsort(order)])


def _ends(w_OK: np.ndarray, kind: str) -> np.ndarray:
    """Return where w is the largest or the smallest of its group, in nf4 by its size: (O, K)."""
    O, K = w_OK.shape  # noqa: E741
    size = GROUP[kind]
    w = np.pad(w_OK, ((0, 0), (0, -K % size))).reshape(O, -1, size)
    if kind == "nf4":
        w = abs(w)
    ends = w == w.max(2, keepdims=True)
    if kind == "int4":
        ends |= w == w.min(2, keepdims=True)
    return ends.reshape(O, -1)[:, :K]


def _factor(h_KK: np.ndarray) -> np.ndarray:
    """Return the upper Cholesky factor of the inverse of H, damped, float32."""
    h = h_KK.astype(np.float64)
    diagonal = np.diag(h)
    mean = diagonal.mean() or 1.0  # without any input all columns are alike
    h += np.diag(np.where(diagonal > 0, 0, mean) + DAMPING * mean)
    return np.linalg.cholesky(np.linalg.inv(h)).T.astype(np.float32)
