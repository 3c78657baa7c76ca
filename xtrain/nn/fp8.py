"""Training in fp8: the products of the blocks on fp8 codes, with scales from step to step.

    y = x w^T     dx = dy w     dw += dy^T x     x, w: e4m3   dy: e5m2   y, dx: bf16   dw: float32

In a model of precision "fp8" everything is as in bf16 but these three products of each matrix of
the blocks (with `use_fp8_head` also of the head): float32 master weights and their bf16 copy,
residual stream, norms, attention, embedding and loss. The maths of codes and scales is in
kernels/fp8.py, the products are in kernels/fp8_gemm.py.

    x saved for      as the codes of x^T, half the bytes of bf16. The output of a norm is saved so,
    backward         not recomputed
    MLP              one Function (Fp8MLP): the result of SwiGLU and the gradient of gate and up
                     exist as codes only
    norms            their results, too (kernels/fp8_norm.py), where a product follows
    scales           those of the step before. The first step measures each matrix before it encodes
                     it (`ready` False)
    several ranks    one scale per matrix on all of them, by the largest number that any rank met:
                     as if one rank had the whole batch. So the codes of w are the same everywhere,
                     and any number of ranks can resume. Only in the first step x and dy have scales
                     of each rank
    head             logits in bf16, in chunks of rows (kernels/linear_cross_entropy.py); w is
                     encoded once for all chunks. The gradient d of the logits is e4m3 and exists as
                     codes only: one pass over the logits for the loss, one for the codes
    no backward      validation, sampling and serving compute in bf16 (mode.is_training)

Each use of w is encoded again: 4 bytes per weight and micro-batch, against some hundred operations
per weight and token.
"""

from typing import Any

import numpy as np

from ..device import Array, is_gpu, to_device
from ..errors import UserError
from ..kernels import bias as _bias
from ..kernels import cast as _cast
from ..kernels import linear_cross_entropy as _linear_cross_entropy
from ..kernels import residual as _residual
from ..kernels.cast import BFLOAT16
from ..kernels.cross_entropy import cross_entropy, mean_loss
from ..kernels.fp8 import (
    TILE,
    Fp8,
    Operand,
    Slot,
    fp8,
    fp8_cross_entropy,
    fp8_swiglu,
    fp8_swiglu_bwd,
    scale_factor,
    update_scales,
)
from ..kernels.fp8_gemm import fp8_matmul
from ..kernels.fp8_norm import fp8_norm
from ..kernels.runtime.launch import empty
from .autograd import Context, Function
from .functions import bias_gradient
from .loss_functions import LinearCrossEntropy
from .mode import is_training
from .tensor import Tensor

KINDS = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}  # the matrices of a layer
# In the gradient of the logits of a trained model nearly all of the size is in few numbers, those
# of probable tokens: the finer steps of e4m3 halve the error of dx and dw (0.02 instead of 0.035 in
# a NumPy experiment, 2,048 to 151,936 tokens)
HEAD_KINDS = {**KINDS, "dy": "e4m3"}
HEAD = "lm_head"
SPACING = (
    4  # floats from one scale to the next: cuBLASLt reads scales at multiples of 16 bytes only
)


class Fp8Scales:
    """The scales of all matrices of a model's fp8 products, on the device, for the model's life.

    scale_S: float32, three per layer (KINDS), SPACING apart.
    ready: are there scales of a step before?
    kinds: of tensors that are counted together, over all layers, such as "qkv x".
    last_counts_K: of the last step and each kind, how many numbers were clamped and how many were
        not finite, int64; two numbers per kind.
    largest_RS: int32, see kernels.fp8.Slot; of each rank.
    """

    def __init__(self, weights: list[tuple[str, Any]], device: str):
        """Give each matrix its Fp8Layer. Raises UserError for another shape, or none.

        weights: (name, Parameter) of the matrices.
        """
        if not weights:
            raise UserError(
                "precision fp8 found no Linear module in the model's blocks: choose precision bf16"
            )
        for name, w in weights:
            rows, columns = w.declared_shape
            if rows % TILE or columns % TILE:
                raise UserError(
                    f"precision fp8 needs matrices whose rows and columns are multiples of {TILE}, "
                    f"but {name} is {rows} x {columns}: choose such widths, or precision bf16"
                )
        formats = [f for name, _ in weights for f in _formats(name) for _ in range(SPACING)]
        self.device = device
        self.scale_S: Array = self.put(np.ones(len(formats), np.float32))
        self.factor_S = self.put(np.array([scale_factor(f) for f in formats], np.float32))
        self.weights = weights
        self.kinds = [*dict.fromkeys(kind for name, _ in weights for kind in _kinds(name))]
        self.counts_K, self.last_counts_K = (
            self.put(np.zeros(2 * len(self.kinds), np.int64)) for _ in range(2)
        )
        self.ready = False
        self.divide(0, 1)

    def put(self, x: np.ndarray) -> Array:
        """Return x on the device."""
        return to_device(x, self.device)

    def __reduce__(self) -> Any:
        scale_S = self.scale_S if self.ready else None
        return scales_of, (self.weights, self.device, scale_S)  # copy.deepcopy and pickle

    def divide(self, rank: int, world: int) -> Array:
        """Make this rank number `rank` of `world` with the same scales. Return largest_RS, flat.

        Call it before the first step. Each rank fills its part. After the last backward of a step
        and before `update` every rank needs all parts.
        """
        S = self.scale_S.size
        self.largest_RS = self.put(np.zeros(world * S, np.int32))
        for i, (name, w) in enumerate(self.weights):
            slots = []
            for j, (kind, format_) in enumerate(zip(_kinds(name), _formats(name))):
                s = SPACING * (3 * i + j)
                k = 2 * self.kinds.index(kind)
                largest_1 = self.largest_RS[rank * S + s : rank * S + s + 1]
                counts_2 = self.counts_K[k : k + 2]
                slots.append(Slot(self.scale_S[s : s + 1], largest_1, counts_2, format_))
            w.fp8 = Fp8Layer(self, slots)
        return self.largest_RS

    def coverage(self, model: Any) -> str:
        """Return which products of its model compute in fp8: a sentence for the start of a run."""
        encoded = {w for _, w in self.weights}
        blocks = [
            p for name, p in model.storage() if "layers." in name and len(p.declared_shape) == 2
        ]
        n_others = sum(p not in encoded for p in blocks)
        others = f"{n_others} other matrices of the blocks, " if n_others else ""
        if model.fp8_head:
            return (
                f"products of {len(encoded) - 1} matrices of the blocks and of the head; "
                f"{others}embedding and attention in bf16"
            )
        return (
            f"products of {len(encoded)} matrices of the blocks; "
            f"{others}embedding, attention and head in bf16"
        )

    def update(self) -> None:
        """Compute the scales of the next step, after a step.

        It can be captured in a CUDA graph, because a graph is captured when there are scales
        already.
        """
        state = self.scale_S, self.largest_RS, self.factor_S, self.counts_K, self.last_counts_K
        update_scales(*state)
        self.ready = True

    def load(self, scale_S: np.ndarray) -> None:
        """Set the scales to those of a checkpoint."""
        if is_gpu(self.scale_S):
            self.scale_S[...] = to_device(scale_S, "gpu")
        else:
            self.scale_S[...] = scale_S
        self.ready = True


def scales_of(weights: list[tuple[str, Any]], device: str, scale_S: Array | None) -> Fp8Scales:
    """Return new scales of these matrices; with the values scale_S, if there are some."""
    scales = Fp8Scales(weights, device)
    if scale_S is not None:
        scales.load(scale_S)
    return scales


def _formats(name: str) -> list[str]:
    """Return the formats of the three matrices of a layer."""
    return [*(HEAD_KINDS if name == HEAD else KINDS).values()]


def _kinds(name: str) -> list[str]:
    """Return the kinds of the three matrices of a layer: "qkv x", ...

    name: of its weight, "model.layers.0.self_attn.qkv.weight".
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    return [f"{module} {matrix}" for matrix in KINDS]


class Fp8Layer:
    """Makes the codes of the three matrices of a linear layer."""

    def __init__(self, scales: Fp8Scales, slots: list[Slot]):
        self.scales = scales
        self.x, self.w, self.dy = slots

    @property
    def current(self) -> bool:
        """Return whether a matrix must be measured before it is encoded."""
        return not self.scales.ready


def check_tokens(tokens: int) -> None:
    """Raise UserError if a forward pass cannot have this number of tokens."""
    if tokens % TILE:
        raise UserError(
            f"precision fp8 needs a multiple of {TILE} tokens in a forward pass, not {tokens}: "
            "choose another --micro-batch or --seq-len"
        )


def fp8_layer(w: Tensor) -> Fp8Layer | None:
    """Return what encodes for this matrix, where its products compute in fp8; else None."""
    return getattr(w, "fp8", None) if is_training() else None


# ----------------------------------------------------------------------------- products
def _product(x: Fp8, w: Fp8, dtype: Any, b_O: Array | None) -> Array:
    """Return y = x w^T + b."""
    y_NO = empty(x.codes_NK, (x.codes_NK.shape[0], w.codes_NK.shape[0]), dtype)
    if b_O is not None:
        _bias.fill_rows(y_NO, b_O)
    return fp8_matmul(y_NO, x.rows, w.rows, accumulate=b_O is not None)


def _input_gradient(dy: Fp8, w_IO: Operand) -> Array:
    """Return dx = dy w, bf16. w: transposed codes."""
    dx_NI = empty(dy.codes_NK, (dy.codes_NK.shape[0], w_IO.codes.shape[0]), BFLOAT16)
    return fp8_matmul(dx_NI, dy.rows, w_IO)


def _weight_gradient(ctx: Context, i: int, w_OI: Array, dy: Fp8, x_IN: Operand) -> Array | None:
    """Return dw = dy^T x, added where the gradient of argument i goes. x: transposed codes."""
    if not ctx.needs_grad[i]:
        return None
    dw_OI, add = ctx.grad_target(i, w_OI)
    return fp8_matmul(dw_OI, dy.columns, x_IN, accumulate=add)


# ------------------------------------------------------------------- Functions, as in functions.py
class Fp8Linear(Function):
    """y = x w^T + b"""

    @staticmethod
    def forward(ctx, x_NI, w_OI, b_O, layer, dtype=None):
        x = fp8(x_NI, layer.x, layer.current)
        w = fp8(w_OI, layer.w, layer.current)
        ctx.save(x.columns, w.columns, w_OI, b_O, layer)
        return _product(x, w, dtype or x_NI.dtype, b_O)

    @staticmethod
    def backward(ctx, dy_NO):
        x_IN, w_IO, w_OI, b_O, layer = ctx.saved
        dy_NO = _cast.cast_fwd(dy_NO, BFLOAT16)
        dy = fp8(dy_NO, layer.dy, layer.current)
        dx_NI = _input_gradient(dy, w_IO) if ctx.needs_grad[0] else None
        dw_OI = _weight_gradient(ctx, 1, w_OI, dy, x_IN)
        return dx_NI, dw_OI, bias_gradient(ctx, 2, b_O, dy_NO)


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
        db_O = bias_gradient(ctx, 4, b_O, dy_NO)
        dv_OC = _weight_gradient(ctx, 3, v_OC, dy, n_CN)
        dn_NC = _input_gradient(dy, v_CO)
        dw_C = ctx.grad_buffer(2, w_C)
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
        y = fp8_swiglu(gu_N2F, second.x, second.current)
        u = fp8(u_CF, second.w, second.current)
        codes = (n_CN, v_C2F, y.columns, u.columns)
        weights = (v_2FC, u_CF)
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
        dn_NC = _input_gradient(dgu, v_C2F)
        dw_C = ctx.grad_buffer(2, w_C)
        del dz, dgu
        dx_NC = _residual.residual_rmsnorm_bwd(dh_NC, dn_NC, h_NC, w_C, rstd_N, dw_C)
        return dx_NC, dx_NC, dw_C, dv_2FC, du_CF


# ----------------------------------------------------------------------------- the head
def linear_cross_entropy(
    x_NC: Array,
    w_PC: Array,
    targets_N: Array,
    vocab_size: int,
    inv_count_1: Array,
    want_dx: bool,
    want_dw: bool,
    rows: int | None,
    layer: Fp8Layer,
) -> tuple[Array, Array | None, Array | None]:
    """Do kernels.linear_cross_entropy with the products of the head on fp8 codes.

    N, C, P and rows are multiples of TILE.
    """
    (N, C), P = x_NC.shape, w_PC.shape[0]
    loss_N = empty(x_NC, N, np.float32)
    dx_NC = empty(x_NC, (N, C), BFLOAT16) if want_dx else None
    dw_PC = empty(x_NC, (P, C), np.float32) if want_dw else None
    w = fp8(w_PC, layer.w, layer.current)
    step = -(-_linear_cross_entropy.chunk_rows(N, rows) // TILE) * TILE
    logits_RP = empty(x_NC, (min(step, N), P), BFLOAT16)
    lse_R = empty(x_NC, min(step, N), np.float32)
    for first in range(0, N, step):
        part = slice(first, min(first + step, N))
        targets = targets_N[part]
        lse = lse_R[: part.stop - first]
        x = fp8(x_NC[part], layer.x, layer.current)
        logits = fp8_matmul(logits_RP[: part.stop - first], x.rows, w.rows)
        out = loss_N[part], lse
        cross_entropy(logits, targets, vocab_size, inv_count_1, False, *out)
        if not (want_dx or want_dw):
            continue
        softmax_of = logits, targets, lse, vocab_size, inv_count_1
        d = fp8_cross_entropy(*softmax_of, layer.dy, layer.current)
        if dx_NC is not None:
            fp8_matmul(dx_NC[part], d.rows, w.columns)
        if dw_PC is not None:
            fp8_matmul(dw_PC, d.columns, x.columns, accumulate=first > 0)
        del x, d  # before the next ones are made
    return loss_N, dx_NC, dw_PC


class Fp8LinearCrossEntropy(LinearCrossEntropy):
    """The head and the loss: forward also computes the gradients."""

    @staticmethod
    def forward(ctx, x_NC, w_PC, targets_N, vocab_size, inv_count_1, rows, layer):
        want_dx, want_dw = ctx.needs_grad[:2]
        loss_N, dx_NC, dw_PC = linear_cross_entropy(
            x_NC, w_PC, targets_N, vocab_size, inv_count_1, want_dx, want_dw, rows, layer
        )
        ctx.save(dx_NC, dw_PC, w_PC)
        return mean_loss(loss_N, inv_count_1).reshape(())
