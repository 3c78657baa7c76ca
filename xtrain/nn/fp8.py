"""Training in fp8: the products of the blocks on fp8 codes, and the scales of their matrices from step to step.

    y = x w^T        dx = dy w        dw += dy^T x        x, w: e4m3   dy: e5m2   y, dx: bf16   dw, the sums: float32

In a model of precision "fp8" everything is as in bf16 but these three products of each matrix of the blocks: float32 master
weights and their bf16 copy, residual stream, norms, attention, embedding, head and loss. The maths of codes and scales is in
kernels/fp8.py, the products are in kernels/fp8_gemm.py.

    x saved for backward     as the codes of x^T, half the bytes of bf16. The output of a norm is saved so, not recomputed
    MLP                      one Function (Fp8MLP): the result of SwiGLU and the gradient of gate and up exist as codes only
    norms                    their results, too (kernels/fp8_norm.py), in the Functions where a product follows
    scales                   those of the step before. The first step measures each matrix before it encodes it (`ready` False)
    no backward              validation, sampling and serving compute in bf16 (autograd.is_training)

Each use of w is encoded again: 4 bytes per weight and micro-batch, against some hundred operations per weight and token.
"""

from typing import Any

import numpy as np

from ..device import Array, is_gpu, to_device
from ..errors import UserError
from ..kernels import bias as _bias
from ..kernels import cast as _cast
from ..kernels import residual as _residual
from ..kernels.cast import BFLOAT16
from ..kernels.fp8 import (
    TILE,
    Fp8,
    Operand,
    Slot,
    fp8,
    fp8_swiglu,
    fp8_swiglu_bwd,
    scale_factor,
    update_scales,
)
from ..kernels.fp8_gemm import fp8_matmul
from ..kernels.fp8_norm import fp8_norm
from ..kernels.runtime.launch import empty
from .autograd import Context, Function, is_training
from .tensor import Tensor

KINDS = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}  # the matrices of a layer
SPACING = (
    4  # floats from one scale to the next: cuBLASLt reads scales at multiples of 16 bytes only
)


class Fp8Scales:
    """The scales of all matrices of a model's fp8 products, on the device, for the whole life of the model.

    scale_S: float32, three per layer (KINDS), SPACING apart.  last_counts_2: of the last step, how many numbers were clamped and
    how many were not finite, int64.  ready: are there scales of a step before?
    """

    def __init__(self, weights: list[tuple[str, Any]], device: str):
        """weights: (name, Parameter) of the matrices, which get their Fp8Layer. Raises UserError for another shape."""
        for name, w in weights:
            rows, columns = w.declared_shape
            if rows % TILE or columns % TILE:
                raise UserError(
                    f"precision fp8 needs matrices whose rows and columns are multiples of {TILE}, but {name} is {rows} x {columns}: "
                    "choose such widths, or precision bf16"
                )
        kinds = [kind for kind in KINDS.values() for _ in range(SPACING)] * len(weights)
        put = lambda x: to_device(x, device)
        self.scale_S: Array = put(np.ones(len(kinds), np.float32))
        self.largest_S = put(np.zeros(len(kinds), np.int32))
        self.factor_S = put(np.array([scale_factor(kind) for kind in kinds], np.float32))
        self.counts_2, self.last_counts_2 = (put(np.zeros(2, np.int64)) for _ in range(2))
        self.ready = False
        for i, (_, w) in enumerate(weights):
            w.fp8 = Fp8Layer(self, [self._slot(3 * i + j) for j in range(3)])

    def _slot(self, s):
        views = (x[SPACING * s : SPACING * s + 1] for x in (self.scale_S, self.largest_S))
        return Slot(*views, self.counts_2, [*KINDS.values()][s % 3])

    def update(self) -> None:
        """After a step: the scales of the next one. It can be captured in a CUDA graph, because a graph is captured when there
        are scales already."""
        state = self.scale_S, self.largest_S, self.factor_S, self.counts_2, self.last_counts_2
        update_scales(*state)
        self.ready = True

    def load(self, scale_S: np.ndarray) -> None:
        """Continue with the scales of a checkpoint."""
        self.scale_S[...] = to_device(scale_S, "gpu") if is_gpu(self.scale_S) else scale_S
        self.ready = True


class Fp8Layer:
    """Makes the codes of the three matrices of a linear layer."""

    def __init__(self, scales: Fp8Scales, slots: list[Slot]):
        self.scales = scales
        self.x, self.w, self.dy = slots

    @property
    def current(self) -> bool:
        """Must a matrix be measured before it is encoded?"""
        return not self.scales.ready


def fp8_layer(w: Tensor) -> Fp8Layer | None:
    """What encodes for this matrix, where its products compute in fp8; else None."""
    return getattr(w, "fp8", None) if is_training() else None


# ----------------------------------------------------------------------------- products
def _product(x: Fp8, w: Fp8, dtype: Any, b_O: Array | None) -> Array:
    """y = x w^T + b"""
    y_NO = empty(x.codes_NK, (x.codes_NK.shape[0], w.codes_NK.shape[0]), dtype)
    if b_O is not None:
        _bias.fill_rows(y_NO, b_O)
    return fp8_matmul(y_NO, x.rows, w.rows, accumulate=b_O is not None)


def _input_gradient(dy: Fp8, w_IO: Operand) -> Array:
    """dx = dy w, bf16.  w: transposed codes"""
    dx_NI = empty(dy.codes_NK, (dy.codes_NK.shape[0], w_IO.codes.shape[0]), BFLOAT16)
    return fp8_matmul(dx_NI, dy.rows, w_IO)


def _weight_gradient(ctx: Context, i: int, w_OI: Array, dy: Fp8, x_IN: Operand) -> Array | None:
    """dw = dy^T x, added where the gradient of argument i goes. x: transposed codes"""
    if not ctx.needs_grad[i]:
        return None
    dw_OI, add = ctx.grad_target(i, w_OI)
    return fp8_matmul(dw_OI, dy.columns, x_IN, accumulate=add)


def _bias_gradient(ctx: Context, i: int, b_O: Array | None, dy_NO: Array) -> Array | None:
    if b_O is None or not ctx.needs_grad[i]:
        return None
    db_O = ctx.grad_buffer(i, b_O)
    _bias.bias_bwd(dy_NO, db_O)
    return db_O


# ----------------------------------------------------------------------------- Functions, as in functional.py
class Fp8Linear(Function):
    """y = x w^T + b"""

    @staticmethod
    def forward(ctx, x_NI, w_OI, b_O, layer, dtype=None):
        x, w = fp8(x_NI, layer.x, layer.current), fp8(w_OI, layer.w, layer.current)
        ctx.save(x.columns, w.columns, w_OI, b_O, layer)
        return _product(x, w, dtype or x_NI.dtype, b_O)

    @staticmethod
    def backward(ctx, dy_NO):
        x_IN, w_IO, w_OI, b_O, layer = ctx.saved
        dy_NO = _cast.cast_fwd(dy_NO, BFLOAT16)
        dy = fp8(dy_NO, layer.dy, layer.current)
        dx_NI = _input_gradient(dy, w_IO) if ctx.needs_grad[0] else None
        dw_OI = _weight_gradient(ctx, 1, w_OI, dy, x_IN)
        return dx_NI, dw_OI, _bias_gradient(ctx, 2, b_O, dy_NO)


class Fp8AddNormLinear(Function):
    """The start of a branch: h = x + delta, y = norm(h) v^T + b"""

    @staticmethod
    def forward(ctx, x_NC, delta_NC, w_C, v_OC, b_O, layer, eps):
        h_NC, n, rstd_N = fp8_norm(x_NC, delta_NC, w_C, eps, layer.x, layer.current)
        v = fp8(v_OC, layer.w, layer.current)
        ctx.save(h_NC, w_C, rstd_N, n.columns, v.columns, v_OC, b_O, layer)
        return h_NC, _product(n, v, BFLOAT16, b_O)

    @staticmethod
    def backward(ctx, dh_NC, dy_NO):
        h_NC, w_C, rstd_N, n_CN, v_CO, v_OC, b_O, layer = ctx.saved
        if dy_NO is None:  # only h was used
            return dh_NC, dh_NC, None, None, None
        dy = fp8(dy_NO, layer.dy, layer.current)
        db_O = _bias_gradient(ctx, 4, b_O, dy_NO)
        dv_OC = _weight_gradient(ctx, 3, v_OC, dy, n_CN)
        dn_NC, dw_C = _input_gradient(dy, v_CO), ctx.grad_buffer(2, w_C)
        dx_NC = _residual.residual_rmsnorm_bwd(dh_NC, dn_NC, h_NC, w_C, rstd_N, dw_C)
        return dx_NC, dx_NC, dw_C, dv_OC, db_O  # x and delta have the same gradient


class Fp8MLP(Function):
    """A branch: h = x + delta, z = swiglu(norm(h) v^T) u^T.     v: gate and up, u: down"""

    @staticmethod
    def forward(ctx, x_NC, delta_NC, w_C, v_2FC, u_CF, first, second, eps):
        h_NC, n, rstd_N = fp8_norm(x_NC, delta_NC, w_C, eps, first.x, first.current)
        v = fp8(v_2FC, first.w, first.current)
        gu_N2F = _product(n, v, BFLOAT16, None)
        n_CN, v_C2F = n.columns, v.columns
        del n, v
        y, u = fp8_swiglu(gu_N2F, second.x, second.current), fp8(u_CF, second.w, second.current)
        codes, weights = (n_CN, v_C2F, y.columns, u.columns), (v_2FC, u_CF)
        ctx.save(h_NC, w_C, rstd_N, gu_N2F, *codes, *weights, first, second)
        return h_NC, _product(y, u, BFLOAT16, None)

    @staticmethod
    def backward(ctx, dh_NC, dz_NC):
        h_NC, w_C, rstd_N, gu_N2F, n_CN, v_C2F, y_FN, u_FC, v_2FC, u_CF, first, second = ctx.saved
        if dz_NC is None:  # only h was used
            return dh_NC, dh_NC, None, None, None
        dz = fp8(dz_NC, second.dy, second.current)
        du_CF = _weight_gradient(ctx, 4, u_CF, dz, y_FN)
        dgu = fp8_swiglu_bwd(_input_gradient(dz, u_FC), gu_N2F, first.dy, first.current)
        dv_2FC = _weight_gradient(ctx, 3, v_2FC, dgu, n_CN)
        dn_NC, dw_C = _input_gradient(dgu, v_C2F), ctx.grad_buffer(2, w_C)
        del dz, dgu
        dx_NC = _residual.residual_rmsnorm_bwd(dh_NC, dn_NC, h_NC, w_C, rstd_N, dw_C)
        return dx_NC, dx_NC, dw_C, dv_2FC, du_CF
