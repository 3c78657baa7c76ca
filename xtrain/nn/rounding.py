"""Round a matrix to codes of four bits one column after the other: GPTQ (Frantar et al. 2023).

    y = x w^T       H = sum_n g_n x_n x_n^T   (K, K)       error of w': tr(d H d^T), d = w - w'

A column is not rounded to what is nearest to it, but makes up for the errors of those before it.
With H = A D A^T, A upper triangular with ones on its diagonal, the nearest value of the group of
column k to

    w_k + sum_j<k d_j A_jk        is w'_k, and the error is sum_k D_k |that sum - w'_k|^2

These are GPTQ's values, without H^-1 (LDLQ, Chee et al. 2023). Columns with a large H_kk come
first, while most others can still make up for them. Then SWEEPS times each column is given the
errors of all others, not only of those before it, which never increases the error:

    w_k + sum_j!=k d_j H_jk / H_kk

A group's range is that of its weights, times the one of RANGES with the smallest sum_k D_k d_k^2 of
rounding alone: a slightly narrower one has smaller steps, and errors of few weights at its ends.
These weights keep the first and the last code. So the result is on the grid of its groups, and
kernels/four_bits.py finds the same codes when it quantizes it.

g_n is the mean square of the loss's gradient by y_n: an error counts as much as it changes the loss
(GuidedQuant, Kim et al. 2025). A model's first token often has inputs a thousand times as large as
the others, and hardly any influence: without g most of H is that token. SmolLM2-135M's perplexity
of two texts: lessons/notes/quantized_weights.md.

The H of all layers may take more memory than the model (Llama-3-8B: 39 GB). So the text is computed
once for as many layers at a time as MEMORY allows, and the inputs of later layers are those that
the rounded ones make.

    by hand   x = (1, 1) always, w = (0.4, 0.4), steps of 1: rounded alone both become 0, y is 0
              instead of 0.8. Here the first becomes 0, d_1 = 0.4, and the second the nearest to
              0.4 + 0.4, 1
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device import Array, to_device, to_numpy
from ..errors import UserError
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
SWEEPS = 2  # after the first pass
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the weights of a group
BLOCK = 128  # columns, whose errors the later ones learn of at once
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

    Matrices of modules that `changed` has replaced stay as they are. Raises UserError for a
    quantized model, and for a mixture of experts.

    ids: (B, T) tokens of a text like those that the model will see.
    kind: of four bits.
    """
    if model.config.n_experts:
        raise UserError(
            "calibration is not supported for a mixture of experts: leave out --calibrate, and "
            "--weights rounds its matrices as they are"
        )
    if any(p.quantized is not None for _, p in model.storage()):
        raise UserError("the model is quantized already: calibrate before quantizing")
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
    order = np.argsort(-np.diag(h_KK), kind="stable")
    h = _damped(h_KK[np.ix_(order, order)])
    a_KK, squares_K = _factors(h)
    jacobi = (h / np.diag(h)).astype(np.float32)
    np.fill_diagonal(jacobi, 0)
    low_OK, high_OK = _range(w_OK, squares_K[np.argsort(order)], kind)
    grid = grid_of(quantize(np.clip(w_OK, low_OK, high_OK), kind))
    arrays = (w_OK, low_OK, high_OK, *grid)
    w, low, high, step, zero = (np.ascontiguousarray(x[:, order].T) for x in arrays)
    limited = np.clip(w, low, high)
    ends = (limited == low) | (limited == high)
    d = np.zeros_like(w)
    for matrix in (a_KK, *[jacobi] * SWEEPS):
        for first in range(0, len(w), BLOCK):
            block = slice(first, min(first + BLOCK, len(w)))
            aims = w[block] + matrix[:, block].T @ d
            before = d[block].copy()
            for k in range(first, block.stop):
                row = k - first
                aim = aims[row] + matrix[first:k, k] @ (d[first:k] - before[:row])
                aim = np.where(ends[k], limited[k], aim)
                d[k] = w[k] - nearest_on_grid(aim, step[k], zero[k], kind)
    return np.ascontiguousarray((w - d)[np.argsort(order)].T)


def _factors(h_KK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return A without its diagonal of ones, and the diagonal of D, of H = A D A^T, float32."""
    upper = np.linalg.cholesky(h_KK[::-1, ::-1])[::-1, ::-1]  # H = upper upper^T
    diagonal = np.diag(upper)
    a_KK = (upper / diagonal).astype(np.float32)
    np.fill_diagonal(a_KK, 0)
    return a_KK, (diagonal**2).astype(np.float32)


def _damped(h_KK: np.ndarray) -> np.ndarray:
    """Return H, float64, with a larger diagonal: it can be factored, and is less one text's."""
    h = h_KK.astype(np.float64)
    diagonal = np.diag(h)
    mean = diagonal.mean() or 1.0  # without any input all columns are alike
    return h + np.diag(np.where(diagonal > 0, 0, mean) + DAMPING * mean)


def _range(w_OK: np.ndarray, squares_K: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest value of each weight's group, (O, K) each: those of its
    weights and 0, times the one of RANGES with the smallest error sum_k squares_k d_k^2."""
    O, K = w_OK.shape  # noqa: E741
    size = GROUP[kind]
    grouped = lambda x: np.pad(x, ((0, 0), (0, -K % size))).reshape(O, -1, size)
    spread = lambda x: np.repeat(x, size, axis=1)[:, :K]
    high = grouped(abs(w_OK) if kind == "nf4" else w_OK).max(2, initial=0)
    low = -high if kind == "nf4" else grouped(w_OK).min(2, initial=0)
    best = np.full_like(high, np.inf)
    factor = np.ones_like(high)
    for f in RANGES:
        limited = np.clip(w_OK, spread(f * low), spread(f * high))
        codes = quantize(limited, kind)
        d = nearest_on_grid(limited, *grid_of(codes), kind) - w_OK
        error = grouped(d**2 * squares_K).sum(2)
        factor = np.where(error < best, f, factor)
        best = np.minimum(best, error)
    return spread(low * factor), spread(high * factor)
