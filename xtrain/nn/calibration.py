"""Prepare a model for quantized weights by a text: scale columns, by what its matrices multiply (AWQ,
Lin et al. 2023), then for codes of four bits round them (rounding.py).

    y = x w^T = (x / s) (w s)^T       s: (K,), one number per column of w

A weight that meets large inputs matters more. Its column, multiplied by s > 1, takes more of the
steps of its group, and its error is divided by s again. With a_k = mean |x_k| over a text,

    s_k = a_k^alpha / sqrt(max s min s)      alpha = 0, 1/20, ... 19/20

and alpha is the one with the smallest error ||x (w' - w)^T||^2 of w' = quantized(w s) / s, for up
to ROWS rows of the text. 0 is no scaling, so a matrix's error never grows on them.

1 / s is multiplied into what makes x, so until it is rounded the model computes the same as before,
and nothing is left to do when it runs:

    q, k, v, and gate, up    the weight of the norm before; one s for matrices with the same input
    down                     the rows of up: the product of gate and up is linear in up
    o                        the rows of v (and its bias): attention is linear in v. Query heads of
                             one key head share its values, and so s

    by hand   x = (10, 1), w = (0.1, 1): the steps of w are 1/15, so 0.1 becomes 0.133 or 0.067, an
              error of 0.33 in y. With alpha = 0.5, s = (1.78, 0.56): w s = (0.178, 0.562), steps of
              0.037 and an error of 0.0075, in y 0.0075 / 1.78 x 10 = 0.04

SmolLM2-135M's perplexity of two texts in int4 rises by 33 and 23 % without scaling, and by 20 and
19 % with it; what rounding adds: lessons/notes/quantized_weights.md.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Array, to_device, to_numpy
from ..errors import UserError
from ..kernels.cast import cast_fwd
from ..kernels.four_bits import FOUR_BITS
from ..kernels.gemm import linear_fwd
from ..kernels.quantize import dequantize, quantize
from .autograd import no_grad
from .decoder import MLP, Attention, Block, SandwichBlock
from .model import Transformer
from .modules import Linear, Parameter, RMSNorm
from .rounding import round_weights
from .tensor import Tensor

ROWS = 512  # of the inputs of a matrix
STEPS = 20  # values of alpha
FLOAT32 = np.dtype(np.float32)


@dataclass
class _Inputs:
    """Stand in for a Linear and note what it multiplies."""

    linear: Linear
    limit: int  # rows to keep of each call
    size_K: Any = 0.0  # sum of |x|
    rows: int = 0

    def __post_init__(self):
        self.kept: list[Array] = []

    def __call__(self, x_NK: Tensor) -> Tensor:
        x = cast_fwd(x_NK.data, FLOAT32)
        self.size_K = self.size_K + abs(x).sum(0)
        self.rows += len(x)
        self.kept.append(x[:: -(-len(x) // self.limit)].copy())
        return self.linear(x_NK)

    @property
    def mean_K(self) -> np.ndarray:
        return np.maximum(to_numpy(self.size_K) / self.rows, 1e-8)


def calibrate(model: Transformer, ids_BT: np.ndarray, kind: str) -> list[float]:
    """Scale the columns of every matrix, and undo it before them, for weights of this kind; then
    round those of four bits.

    ids: (B, T) tokens of a text like those that the model will see.
    Returns the alpha of each matrix, in the order o, qkv, down, gate_up of each layer. Matrices of
    modules that `changed` has replaced stay as they are. Raises UserError for a quantized model,
    and for a mixture of experts.
    """
    if model.config.n_experts:
        raise UserError(
            "calibration is not supported for a mixture of experts: leave out --calibrate, --weights "
            "then rounds its matrices as they are"
        )
    if any(p.quantized is not None for _, p in model.storage()):
        raise UserError("the model is quantized already: calibrate before quantizing")
    alphas: list[float] = []
    with noted_inputs(model, max(1, ROWS // len(ids_BT))) as inputs, no_grad():
        for row in ids_BT:
            model.loss(row[None, :-1], row[None, 1:])
    for layer in model.model.layers:
        alphas += _scale_layer(layer, inputs, kind)
    model.arena.refresh()
    if kind in FOUR_BITS:
        round_weights(model, ids_BT, kind)
    return alphas


@contextlib.contextmanager
def noted_inputs(model: Transformer, limit: int) -> Iterator[dict[int, _Inputs]]:
    """Yield {id of a Linear: its inputs}, which grows while the model computes."""
    inputs: dict[int, _Inputs] = {}
    replaced = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            if type(module) not in (Attention, MLP):
                continue
            for attribute, linear in list(vars(module).items()):
                if type(linear) is Linear:
                    inputs[id(linear)] = _Inputs(linear, limit)
                    setattr(module, attribute, inputs[id(linear)])
                    replaced.append((module, attribute, linear))
    try:
        yield inputs
    finally:
        for module, attribute, linear in replaced:
            setattr(module, attribute, linear)


def _scale_layer(layer: Block, inputs: dict[int, _Inputs], kind: str) -> Iterator[float]:
    """Scale the matrices of a layer; each after those whose rows it scales."""
    attention, mlp = layer.self_attn, layer.mlp
    norm: Any = layer.post_attention_layernorm
    if type(layer) is SandwichBlock:
        norm = layer.pre_feedforward_layernorm
    if type(attention) is Attention and type(attention.o_proj) is type(attention.qkv) is Linear:
        c = attention.config
        heads = c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        alpha, s_K = _best(attention.o_proj, inputs, kind, heads)
        _multiply(attention.o_proj.weight, s_K)
        values = slice(-heads[0] * heads[2], None)
        s_GHD = s_K.reshape(heads)
        _multiply(attention.qkv.weight, 1 / s_GHD[:, 0].reshape(-1, 1), values)
        if attention.qkv.bias is not None:
            _multiply(attention.qkv.bias, 1 / s_GHD[:, 0].reshape(-1), values)
        yield alpha
        if type(layer.input_layernorm) is RMSNorm:
            yield _scale_after_norm(layer.input_layernorm, attention.qkv, inputs, kind)
    if type(mlp) is MLP and type(mlp.gate_up) is type(mlp.down_proj) is Linear:
        alpha, s_K = _best(mlp.down_proj, inputs, kind)
        _multiply(mlp.down_proj.weight, s_K)
        _multiply(mlp.gate_up.weight, 1 / s_K[:, None], slice(len(s_K), None))
        yield alpha
        if type(norm) is RMSNorm:
            yield _scale_after_norm(norm, mlp.gate_up, inputs, kind)


def _scale_after_norm(norm: RMSNorm, linear: Linear, inputs, kind: str) -> float:
    alpha, s_K = _best(linear, inputs, kind)
    _multiply(norm.weight, 1 / s_K)
    _multiply(linear.weight, s_K)
    return alpha


def _multiply(parameter: Parameter, factor: np.ndarray, rows: slice = slice(None)) -> None:
    """Multiply rows of a parameter by factors that are broadcast to them."""
    w = cast_fwd(parameter.data, FLOAT32).copy()
    w[rows] *= _like(w, factor)
    parameter.data = cast_fwd(w, parameter.dtype)


def _like(w: Array, x: np.ndarray) -> Array:
    """Return x as float32 where w is."""
    x = x.astype(np.float32)
    return x if isinstance(w, np.ndarray) else to_device(x, "gpu")


def _best(
    linear: Linear, inputs: dict[int, _Inputs], kind: str, heads: tuple[int, int, int] | None = None
) -> tuple[float, np.ndarray]:
    """Return alpha and s (K,) with the smallest error.

    heads: (G, H / G, D) where columns are those of H heads, and the heads of a group share s.
    """
    noted = inputs[id(linear)]
    mean_K = noted.mean_K
    if heads is not None:
        mean_GHD = mean_K.reshape(heads).mean(1, keepdims=True)
        mean_K = np.broadcast_to(mean_GHD, heads).reshape(-1)
    w_OK = cast_fwd(linear.weight.data, FLOAT32)
    best = (np.inf, 0.0, np.ones_like(mean_K))
    for step in range(STEPS):
        s_K = mean_K ** (step / STEPS)
        s_K = np.maximum(s_K / np.sqrt(s_K.max() * s_K.min()), 1e-4)
        scale = _like(w_OK, s_K)
        difference = dequantize(quantize(w_OK * scale, kind)) / scale - w_OK
        error = sum(float((linear_fwd(x, difference) ** 2).sum()) for x in noted.kept)
        if error < best[0]:
            best = (error, step / STEPS, s_K)
    return best[1:]
