"""The ops of Tensors. Below, one Function per op: the forward launcher, what is saved, the backward launcher; nothing else.

The lower-case functions at the end are what the rest of xtrain calls: their signatures and docstrings are the reference.

    Tensor   an argument that may have a gradient. Dtypes are float32 and bf16, on NumPy arrays also float64
    Array    one that has none: ids, targets, tables; on the device of the Tensors

Every op raises ValueError for shapes that do not match and TypeError for such dtypes, and its message has them. Results have the
dtype of the first argument unless it says otherwise. Sums and statistics are float32. The maths, its sources and the
bytes moved are in the file of kernels/ that is named. Array names end in their shape:
N rows (tokens), C width, I/O in and out features, H query heads, G key/value heads, D head width, F MLP width, V vocabulary,
P columns with padding, or positions of a table.
"""

import numpy as np
from numpy.typing import DTypeLike

from ..device import Array
from ..kernels import bias as _bias
from ..kernels import cast as _cast
from ..kernels import cross_entropy as _cross_entropy
from ..kernels import elementwise as _elementwise
from ..kernels import embedding as _embedding
from ..kernels import gemm as _gemm
from ..kernels import layout as _layout
from ..kernels import linear_cross_entropy as _linear_cross_entropy
from ..kernels import qk_norm_rope as _qk_norm_rope
from ..kernels import residual as _residual
from ..kernels import rmsnorm as _rmsnorm
from ..kernels import rope as _rope
from ..kernels import softmax as _softmax
from ..kernels import swiglu as _swiglu
from ..kernels.attention import flash_attention as _flash_attention
from ..kernels.attention import gemm_attention as _attention
from ..kernels.attention.key_bounds import UNBOUNDED, KeyBounds
from ..kernels.decoding import gemv as _gemv
from ..kernels.decoding import logprobs as _logprobs
from ..kernels.primitives.flat import same_place
from ..kernels.quantize import Quantized
from ..kernels.runtime.invariance import is_batch_invariant
from ..kernels.runtime.launch import empty, zeros
from . import fp8 as _fp8
from .autograd import Context, Function, is_inference, is_unit
from .tensor import Tensor, ops


def gradient_view_for(ctx: Context, i: int) -> Array | None:
    """A view of any layout into a larger gradient: backward may write the gradient of argument i there (not add it) and return
    the view. None: allocate it.

    Only the op that made the argument can offer one, by a static method gradient_view(ctx, which output). Its own backward must
    also accept a gradient in other memory.
    """
    edge = ctx.edges[i]
    if edge is None or edge.node is None or edge.node.ctx is None:
        return None
    offer = getattr(edge.node.function, "gradient_view", None)
    return None if offer is None else offer(edge.node.ctx, edge.index)


def few_rows(x_NK: Array, w_OK: Array | Quantized, fused: bool = False) -> bool:
    """True in inference for so few rows that a product takes as long as reading w: kernels/decoding/gemv.py computes it.

    fused: together with the norm before it."""
    if type(x_NK) is np.ndarray or is_batch_invariant() or not is_inference():
        return False
    quantized = isinstance(w_OK, Quantized)
    return _gemv.gemv_fits(x_NK.shape[0], x_NK.shape[1], w_OK.dtype, quantized, fused)


def product(
    ctx: Context, i: int, x_NI: Array, w_OI: Array | Quantized, dtype, b_O: Array | None
) -> Array:
    """x w^T + b, where w is argument i: by the kernel for few rows, or a GEMM. dtype: of the result, None: as x."""
    if few_rows(x_NI, w_OI):
        return _gemv.gemv(x_NI, w_OI, dtype or x_NI.dtype, ctx.parameters[i], b_O)
    return _gemm.linear_fwd(x_NI, w_OI, dtype, b_O)


def with_bias_gradient(
    ctx: Context, gradients: tuple, i: int, b_O: Array | None, dy_NO: Array | None
) -> tuple:
    """-> gradients, and if there is a bias, its gradient as that of argument i: the sum of dy, the product's, over the rows."""
    if b_O is None:
        return gradients
    db_O = None
    if dy_NO is not None and ctx.needs_grad[i]:
        db_O = ctx.grad_buffer(i, b_O)
        _bias.bias_bwd(dy_NO, db_O)
    return (*gradients, *[None] * (i - len(gradients)), db_O)


def lora_parts(slices: list[tuple[int, int]], b_Br: Array) -> list[tuple[slice, slice, slice]]:
    """-> of each slice of w's rows: the columns of y, the columns of x a^T, the rows of b"""
    parts, r, row = [], b_Br.shape[1], 0
    for i, (first, n) in enumerate(slices):
        parts.append((slice(first, first + n), slice(i * r, (i + 1) * r), slice(row, row + n)))
        row += n
    return parts


class Embedding(Function):
    full_precision = True  # rows are copied, not multiplied: the residual stream starts in float32

    @staticmethod
    def forward(ctx, ids_N, w_VC):
        plan = _embedding.embedding_plan(ids_N, w_VC.shape[0]) if ctx.needs_grad[1] else None
        ctx.save(ids_N, w_VC, plan and plan.order_N4)
        half = w_VC.dtype.name == "bfloat16"  # of a model without float32 weights
        return _embedding.embedding_fwd(ids_N, w_VC, np.float32 if half else None)

    @staticmethod
    def backward(ctx, dx_NC):
        ids_N, w_VC, plan_N4 = ctx.saved
        dw_VC = ctx.grad_buffer(1, w_VC)
        plan = None if plan_N4 is None else _embedding.EmbeddingPlan(plan_N4, w_VC.shape[0])
        _embedding.embedding_bwd(dx_NC, ids_N, dw_VC, plan)
        return None, dw_VC


class Linear(Function):
    """y = x w^T + b        dx = dy w        dw = dy^T x        db = sum over the rows of dy"""

    @staticmethod
    def forward(ctx, x_NI, w_OI, dtype=None, b_O=None):
        ctx.save(x_NI, w_OI, b_O)
        return product(ctx, 1, x_NI, w_OI, dtype, b_O)

    @staticmethod
    def backward(ctx, dy_NO):
        x_NI, w_OI, b_O = ctx.saved
        dy_NO = _cast.cast_fwd(dy_NO, x_NI.dtype)
        dx_NI = _gemm.linear_bwd_x(dy_NO, w_OI) if ctx.needs_grad[0] else None
        dw_OI = None
        if ctx.needs_grad[1]:
            dw_OI, add = ctx.grad_target(1, w_OI)
            _gemm.linear_bwd_w(dy_NO, x_NI, dw_OI, add)
        return with_bias_gradient(ctx, (dx_NI, dw_OI), 3, b_O, dy_NO)


class LoraLinear(Function):
    @staticmethod
    def forward(ctx, x_NI, w_OI, a_AI, b_Br, slices, factor, bias_O=None):
        y_NO = product(ctx, 1, x_NI, w_OI, None, bias_O)
        u_NA = empty(x_NI, (x_NI.shape[0], a_AI.shape[0]))
        _gemm.linear_into(u_NA, x_NI, a_AI, alpha=factor)
        parts = lora_parts(slices, b_Br)
        for columns, ranks, rows in parts:
            _gemm.linear_into(y_NO[:, columns], u_NA[:, ranks], b_Br[rows], accumulate=True)
        ctx.save(x_NI, w_OI, a_AI, b_Br, u_NA, bias_O, parts, factor)
        return y_NO

    @staticmethod
    def backward(ctx, dy_NO):
        x_NI, w_OI, a_AI, b_Br, u_NA, bias_O, parts, factor = ctx.saved
        dy_NO = _cast.cast_fwd(dy_NO, x_NI.dtype)
        dw_OI, du_NA = None, empty(u_NA, u_NA.shape)
        db_Br, add = ctx.grad_target(3, b_Br)
        for columns, ranks, rows in parts:
            dy_NP = dy_NO[:, columns]
            _gemm.matmul(du_NA[:, ranks], dy_NP, b_Br[rows], alpha=factor)
            _gemm.linear_bwd_w(dy_NP, u_NA[:, ranks], db_Br[rows], add)
        da_AI, add = ctx.grad_target(2, a_AI)
        _gemm.linear_bwd_w(du_NA, x_NI, da_AI, add)
        dx_NI = None
        if ctx.needs_grad[0]:
            dx_NI = _gemm.linear_bwd_x(dy_NO, w_OI)
            _gemm.matmul(dx_NI, du_NA, a_AI, accumulate=True)
        if ctx.needs_grad[1]:
            dw_OI, add = ctx.grad_target(1, w_OI)
            _gemm.linear_bwd_w(dy_NO, x_NI, dw_OI, add)
        return with_bias_gradient(ctx, (dx_NI, dw_OI, da_AI, db_Br), 6, bias_O, dy_NO)


class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x_NC, w_C, eps, dtype=None):
        y_NC, rstd_N = _rmsnorm.rmsnorm_fwd(x_NC, w_C, eps, dtype)
        ctx.save(x_NC, w_C, rstd_N)
        return y_NC

    @staticmethod
    def backward(ctx, dy_NC):
        x_NC, w_C, rstd_N = ctx.saved
        dw_C = ctx.grad_buffer(1, w_C)
        return _rmsnorm.rmsnorm_bwd(dy_NC, x_NC, w_C, rstd_N, dw_C), dw_C


class ResidualRMSNorm(Function):
    """The end of one block and the start of the next in one pass."""

    @staticmethod
    def forward(ctx, x_NC, r_NC, w_C, eps):
        h_NC, y_NC, rstd_N = _residual.residual_rmsnorm_fwd(x_NC, r_NC, w_C, eps)
        ctx.save(h_NC, w_C, rstd_N)
        return h_NC, y_NC

    @staticmethod
    def backward(ctx, dh_NC, dy_NC):
        h_NC, w_C, rstd_N = ctx.saved
        dw_C = ctx.grad_buffer(2, w_C)
        if dy_NC is None:  # only h was used
            return dh_NC, dh_NC, dw_C
        dx_NC = _residual.residual_rmsnorm_bwd(dh_NC, dy_NC, h_NC, w_C, rstd_N, dw_C)
        return dx_NC, dx_NC, dw_C  # x and r are added: both have the same gradient


class AddNormLinear(Function):
    """The start of a branch. Backward recomputes the norm's result."""

    @staticmethod
    def forward(ctx, x_NC, delta_NC, w_C, v_OC, eps, swiglu=False, b_O=None):
        if few_rows(x_NC, v_OC, fused=True):
            ready = ctx.parameters[2] and ctx.parameters[3]
            return _gemv.add_norm_gemv(x_NC, delta_NC, w_C, v_OC, eps, swiglu, ready, b_O=b_O)
        if delta_NC is None:
            h_NC, (n_NC, rstd_N) = x_NC, _rmsnorm.rmsnorm_fwd(x_NC, w_C, eps, v_OC.dtype)
        else:
            h_NC, n_NC, rstd_N = _residual.residual_rmsnorm_fwd(x_NC, delta_NC, w_C, eps)
        y_NO = product(ctx, 3, n_NC, v_OC, None, b_O)
        ctx.save(h_NC, w_C, rstd_N, v_OC, b_O, y_NO if swiglu else None)
        return h_NC, _swiglu.swiglu_fwd(y_NO) if swiglu else y_NO

    @staticmethod
    def backward(ctx, dh_NC, dy_NO):
        h_NC, w_C, rstd_N, v_OC, b_O, gu_N2F = ctx.saved
        if dy_NO is None:  # only h was used
            return with_bias_gradient(ctx, (dh_NC, dh_NC, None, None), 6, b_O, None)
        if gu_N2F is not None:
            dy_NO = _swiglu.swiglu_bwd(dy_NO, gu_N2F)
        dn_NC, dw_C, dv_OC = _gemm.linear_bwd_x(dy_NO, v_OC), ctx.grad_buffer(2, w_C), None
        dx_NC = _residual.residual_rmsnorm_bwd(
            dh_NC, dn_NC, h_NC, w_C, rstd_N, dw_C, recompute_y=True
        )
        n_NC = dn_NC  # recompute_y overwrote it with the norm's result
        if ctx.needs_grad[3]:
            dv_OC, add = ctx.grad_target(3, v_OC)
            _gemm.linear_bwd_w(dy_NO, n_NC, dv_OC, add)
        # x and delta are added: both have the same gradient
        return with_bias_gradient(ctx, (dx_NC, dx_NC, dw_C, dv_OC), 6, b_O, dy_NO)


class Rope(Function):
    @staticmethod
    def forward(ctx, x_NHD, cos, sin, positions_N, T):
        ctx.save(cos, sin, positions_N, T)
        return _rope.rope_fwd(x_NHD, cos, sin, positions_N, T)

    @staticmethod
    def backward(ctx, dy_NHD):
        return _rope.rope_bwd(dy_NHD, *ctx.saved)


class QKNormRope(Function):
    @staticmethod
    def forward(ctx, qkv_NP, q_w_D, k_w_D, cos, sin, H, G, T, eps, positions_N):
        arguments = (qkv_NP, q_w_D, k_w_D, cos, sin, H, G, T, eps, positions_N)
        q, k, v, rstd = _qk_norm_rope.qk_norm_rope_fwd(*arguments)
        packed: list = []  # the gradient of qkv, once gradient_view has allocated it
        ctx.save(qkv_NP, q_w_D, k_w_D, rstd, cos, sin, H, G, T, positions_N, packed)
        return q, k, v

    @staticmethod
    def gradient_view(ctx, i):
        """The columns of dv in the packed gradient, for the first op that used v. Gradients of further uses are added to it."""
        qkv_NP, *_, cos, _, H, G, _, _, packed = ctx.saved
        if i != 2 or packed:
            return None
        packed.append(empty(qkv_NP, qkv_NP.shape))
        return _qk_norm_rope.values_of(packed[0], H, G, 2 * cos.shape[1])

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv_NP, q_w, k_w, rstd, cos, sin, H, G, T, positions_N, packed = ctx.saved
        N, D = qkv_NP.shape[0], cos.shape[1] * 2
        dqkv_NP = packed.pop() if packed else empty(qkv_NP, qkv_NP.shape)
        dv_view = _qk_norm_rope.values_of(dqkv_NP, H, G, D)
        if dv is None:
            dv_view[...] = 0
        elif not same_place(dv, dv_view):
            dv_view[...] = dv
        dq, dk = (zeros(qkv_NP, (N, n, D)) if d is None else d for d, n in ((dq, H), (dk, G)))
        dq_w = None if q_w is None else ctx.grad_buffer(1, q_w)
        dk_w = None if k_w is None else ctx.grad_buffer(2, k_w)
        _qk_norm_rope.qk_norm_rope_bwd(
            dqkv_NP, dq, dk, qkv_NP, q_w, k_w, rstd, cos, sin, H, G, T, dq_w, dk_w, positions_N
        )
        return dqkv_NP, dq_w, dk_w


class Attention(Function):
    """bf16 uses FlashAttention, float32 matrix products around a softmax; in batch-invariant mode, and with a sliding window or
    documents (key_bounds.py), FlashAttention too. Both read v a packed array and write dv into one.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, bounds=UNBOUNDED):
        flash = q.dtype.name == "bfloat16" or is_batch_invariant() or bounds is not UNBOUNDED
        if flash:
            o, lse = _flash_attention.flash_attention_fwd(q, k, v, scale, causal, bounds)
            saved = q, k, v, o, lse
        else:
            o, saved = _attention.attention_fwd(q, k, v, scale, causal)
        ctx.save(flash, scale, causal, bounds, *saved)
        return o

    @staticmethod
    def backward(ctx, do):
        dv = gradient_view_for(ctx, 2)
        flash, scale, causal, bounds, *saved = ctx.saved
        if flash:
            return _flash_attention.flash_attention_bwd(do, *saved, scale, causal, dv, bounds)
        return _attention.attention_bwd(do, tuple(saved), scale, causal, dv)


class CausalSoftmax(Function):
    """(The kernels overwrite their input: they get a copy.)"""

    @staticmethod
    def forward(ctx, s_ARS, T, scale, causal):
        p_ARS = _softmax.causal_softmax_fwd(s_ARS.copy(), T, scale, causal)
        ctx.save(p_ARS, T, scale, causal)
        return p_ARS

    @staticmethod
    def backward(ctx, dp_ARS):
        p_ARS, T, scale, causal = ctx.saved
        return _softmax.causal_softmax_bwd(dp_ARS.copy(), p_ARS, T, scale, causal)


class SwiGLU(Function):
    @staticmethod
    def forward(ctx, gu_N2F):
        ctx.save(gu_N2F)
        return _swiglu.swiglu_fwd(gu_N2F)

    @staticmethod
    def backward(ctx, dy_NF):
        return _swiglu.swiglu_bwd(dy_NF, *ctx.saved)


class SwiGLULinear(Function):
    """The result of swiglu is not saved: backward recomputes it."""

    @staticmethod
    def forward(ctx, gu_N2F, w_OF):
        ctx.save(gu_N2F, w_OF)
        return _gemm.linear_fwd(_swiglu.swiglu_fwd(gu_N2F), w_OF)

    @staticmethod
    def backward(ctx, dz_NO):
        gu_N2F, w_OF = ctx.saved
        dy_NF = _gemm.linear_bwd_x(dz_NO, w_OF)
        dgu_N2F = _swiglu.swiglu_bwd(dy_NF, gu_N2F, recompute_y=True)
        y_NF, dw_OF = dy_NF, None
        if ctx.needs_grad[1]:
            dw_OF, add = ctx.grad_target(1, w_OF)
            _gemm.linear_bwd_w(dz_NO, y_NF, dw_OF, add)
        return dgu_N2F, dw_OF


class SiLU(Function):
    """y = x sigmoid(x), of any shape."""

    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return _swiglu.silu_fwd(x)

    @staticmethod
    def backward(ctx, dy):
        return _swiglu.silu_bwd(dy, *ctx.saved)


class CrossEntropy(Function):
    """(The kernel overwrites the logits with their gradient: it gets a copy.)"""

    @staticmethod
    def forward(ctx, logits_NP, targets_N, vocab_size, inv_count_1):
        loss_N, dlogits_NP = _cross_entropy.cross_entropy(
            logits_NP.copy(), targets_N, vocab_size, inv_count_1, with_gradient=ctx.needs_grad[0]
        )
        ctx.save(dlogits_NP)
        return _cross_entropy.mean_loss(loss_N, inv_count_1).reshape(())

    @staticmethod
    def backward(ctx, dloss):
        (dlogits_NP,) = ctx.saved
        if not is_unit(dloss):
            _elementwise.scale_into(dlogits_NP, dloss.reshape(1))
        return dlogits_NP


class LinearCrossEntropy(Function):
    """The logits exist for a few rows at a time. The forward also computes the gradients."""

    @staticmethod
    def forward(ctx, x_NC, w_PC, targets_N, vocab_size, inv_count_1, rows=None):
        want_dx, want_dw = ctx.needs_grad[:2]
        loss_N, dx_NC, dw_PC = _linear_cross_entropy.linear_cross_entropy(
            x_NC, w_PC, targets_N, vocab_size, inv_count_1, want_dx, want_dw, rows
        )
        ctx.save(dx_NC, dw_PC, w_PC)
        return _cross_entropy.mean_loss(loss_N, inv_count_1).reshape(())

    @staticmethod
    def backward(ctx, dloss):
        dx_NC, dw_PC, w_PC = ctx.saved
        if not is_unit(dloss):
            for gradient in (dx_NC, dw_PC):
                if gradient is not None:
                    _elementwise.scale_into(gradient, dloss.reshape(1))
        return dx_NC, head_gradient(ctx, w_PC, dw_PC)


def head_gradient(ctx: Context, w_PC: Array, dw_PC: Array | None) -> Array | None:
    """Write or add dw, float32 or None, where the gradient of argument 1 goes. -> that memory"""
    if dw_PC is None:
        return None
    target_PC, add = ctx.grad_target(1, w_PC)
    dw_PC = _cast.cast_fwd(dw_PC, target_PC.dtype)
    if add:
        _elementwise.add_into(target_PC, dw_PC)
    else:
        target_PC[...] = dw_PC
    return target_PC


class LinearLogprobs(Function):
    """The bits are those of the engine (kernels/decoding/logprobs.py) if the logits are (kernels/runtime/invariance.py).

    The logits exist for a few rows at a time. Backward computes them again: -logprob is the cross-entropy, with a
    factor per row.
    """

    @staticmethod
    def forward(ctx, x_NC, w_PC, targets_N, vocab_size, rows=None):
        ctx.save(x_NC, w_PC, targets_N, vocab_size, rows)
        N, wide = x_NC.shape[0], np.float64 if x_NC.dtype == np.float64 else np.float32
        step, logprobs_N = _linear_cross_entropy.chunk_rows(N, rows), empty(x_NC, N, wide)
        for first in range(0, N, max(step, 1)):
            part = slice(first, min(first + step, N))
            logits = _gemm.linear_fwd(x_NC[part], w_PC, wide)
            found = _logprobs.token_logprobs(logits, targets_N[part], 0, vocab_size)
            logprobs_N[part] = found[0]
        return logprobs_N

    @staticmethod
    def backward(ctx, dlogprobs_N):
        x_NC, w_PC, targets_N, vocab_size, rows = ctx.saved
        factors_N = _elementwise.scale_fwd(dlogprobs_N, -1.0)
        _, dx_NC, dw_PC = _linear_cross_entropy.linear_cross_entropy(
            x_NC, w_PC, targets_N, vocab_size, factors_N, *ctx.needs_grad[:2], rows
        )
        return dx_NC, head_gradient(ctx, w_PC, dw_PC)


class WithGradient(Function):
    @staticmethod
    def forward(ctx, x, value, dx):
        ctx.save(dx)
        loss = empty(x, 1, np.float64 if x.dtype == np.float64 else np.float32)
        loss.fill(value)
        return loss.reshape(())

    @staticmethod
    def backward(ctx, dloss):
        (dx,) = ctx.saved
        if not is_unit(dloss):
            _elementwise.scale_into(dx, dloss.reshape(1))
        return dx


class Add(Function):
    @staticmethod
    def forward(ctx, a, b):
        return _elementwise.add_fwd(a, b)

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


class Scale(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save(factor)
        return _elementwise.scale_fwd(x, factor)

    @staticmethod
    def backward(ctx, dy):
        return _elementwise.scale_fwd(dy, *ctx.saved)


class Cast(Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.save(x.dtype)
        return _cast.cast_fwd(x, dtype)

    @staticmethod
    def backward(ctx, dy):
        return _cast.cast_fwd(dy, *ctx.saved)


class CastGradient(Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.save(dtype)
        return x

    @staticmethod
    def backward(ctx, dy):
        return _cast.cast_fwd(dy, *ctx.saved)


class SwapHeads(Function):
    """Its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx, x):
        return _layout.swap_heads(x)

    @staticmethod
    def backward(ctx, dy):
        return _layout.swap_heads(dy)


class Reshape(Function):
    @staticmethod
    def forward(ctx, x, shape):
        ctx.save(x.shape, shape)
        return x.reshape(shape)

    @staticmethod
    def gradient_view(ctx, i):
        view = gradient_view_for(ctx, 0)
        return None if view is None else view.reshape(ctx.saved[1])

    @staticmethod
    def backward(ctx, dy):
        return dy.reshape(ctx.saved[0])


class Narrow(Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.save(x.shape)
        return x if n == x.shape[-1] else x[..., :n].copy()

    @staticmethod
    def backward(ctx, dy):
        dx = empty(dy, ctx.saved[0])
        dx[..., : dy.shape[-1]] = dy
        dx[..., dy.shape[-1] :] = 0
        return dx


# ----------------------------------------------------------------------------- the ops
def embedding(ids_N: Array, w_VC: Tensor) -> Tensor:
    """The rows w[ids] of a table: ids (N,) of any integer dtype, w (V, C) -> (N, C) float32.

    An id outside [0, V) raises ValueError on the CPU; on a GPU its row is NaN. Sources: kernels/embedding.py.
    """
    return Embedding.apply(ids_N, w_VC)


def linear(
    x_NI: Tensor, w_OI: Tensor, dtype: DTypeLike | None = None, b_O: Tensor | None = None
) -> Tensor:
    """y = x w^T + b: x (N, I), w (O, I), b (O,) or None -> (N, O) in `dtype`, None: that of x. See kernels/gemm.py.

    x and w have one dtype. With bf16 operands, dtype may be np.float32: sums are float32, and y is then not rounded.
    In fp8 training the product is one of fp8 codes (nn/fp8.py); so it is in add_norm_linear, add_norm_mlp and swiglu_linear.
    """
    if layer := _fp8.fp8_layer(w_OI):
        return _fp8.Fp8Linear.apply(x_NI, w_OI, b_O, layer, dtype)
    return Linear.apply(x_NI, w_OI, dtype, b_O)


def lora_linear(
    x_NI: Tensor,
    w_OI: Tensor,
    a_AI: Tensor,
    b_Br: Tensor,
    slices: list[tuple[int, int]],
    factor: float,
    bias_O: Tensor | None = None,
) -> Tensor:
    """linear(x, w, bias), to which adapters of rank r are added (LoRA, Hu et al. 2021; nn/lora.py).

    slices: (first row, number of rows) of the n matrices in w that have an adapter. The i-th adds factor (x a_i^T) b_i^T to its
    columns of y. a (n r, I), b (sum of the numbers of rows, r): those of all slices, one below the other.
    """
    return LoraLinear.apply(x_NI, w_OI, a_AI, b_Br, slices, factor, bias_O)


def rmsnorm(x_NC: Tensor, w_C: Tensor, eps: float, dtype: DTypeLike | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) w of each row: x (N, C), w (C,) -> (N, C) in `dtype`, None: that of x. See kernels/rmsnorm.py."""
    return RMSNorm.apply(x_NC, w_C, eps, dtype)


def residual_rmsnorm(x_NC: Tensor, r_NC: Tensor, w_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h = x + r, y = rmsnorm(h): x, r (N, C), w (C,) -> h in the dtype of x, y in that of r. See kernels/residual.py."""
    return ResidualRMSNorm.apply(x_NC, r_NC, w_C, eps)


def add_norm_linear(
    x_NC: Tensor,
    delta_NC: Tensor | None,
    w_C: Tensor,
    v_OC: Tensor,
    eps: float,
    swiglu: bool = False,
    b_O: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h = x + delta, y = linear(rmsnorm(h), v, b), the start of a branch: residual_rmsnorm and linear in one op.

    x, delta (N, C), w (C,), v (O, C), b (O,) or None -> h (N, C), y (N, O) in the dtype of v.  delta None: h is x.
    swiglu: y = swiglu(the product), (N, O / 2).
    """
    layer = _fp8.fp8_layer(v_OC)
    if layer is None:
        return AddNormLinear.apply(x_NC, delta_NC, w_C, v_OC, eps, swiglu, b_O)
    h_NC, y_NO = _fp8.Fp8AddNormLinear.apply(x_NC, delta_NC, w_C, v_OC, b_O, layer, eps)
    return h_NC, SwiGLU.apply(y_NO) if swiglu else y_NO


def add_norm_mlp(
    x_NC: Tensor, delta_NC: Tensor | None, w_C: Tensor, v_2FC: Tensor, u_CF: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h = x + delta, z = swiglu_linear(linear(rmsnorm(h), v), u), a whole branch -> h, z.

    v (2F, C): gate and up, u (C, F): down.
    """
    first, second = _fp8.fp8_layer(v_2FC), _fp8.fp8_layer(u_CF)
    if first and second:
        return _fp8.Fp8MLP.apply(x_NC, delta_NC, w_C, v_2FC, u_CF, first, second, eps)
    h_NC, gu_N2F = add_norm_linear(x_NC, delta_NC, w_C, v_2FC, eps)
    return h_NC, swiglu_linear(gu_N2F, u_CF)


def rope(
    x_NHD: Tensor,
    cos_PR: Array,
    sin_PR: Array,
    positions_N: Array | None = None,
    T: int | None = None,
) -> Tensor:
    """Rotate x (N, H, D) to its positions (RoPE, Su et al. 2021) -> the same shape. Sources: kernels/rope.py, also the tables.

    cos, sin (P, D / 2) float32: of each position, as rope_tables there makes them.  Row n has position positions_N[n], without
    positions n % T (T None: N). A position outside the tables raises ValueError on the CPU; on a GPU its row is NaN.
    """
    return Rope.apply(x_NHD, cos_PR, sin_PR, positions_N, T)


def qk_norm_rope(
    qkv_NP: Tensor,
    q_w_D: Tensor | None,
    k_w_D: Tensor | None,
    cos_PR: Array,
    sin_PR: Array,
    H: int,
    G: int,
    T: int,
    eps: float,
    positions_N: Array | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed heads, normalise those of q and k (QK-norm, Henry et al. 2020) and rotate them. See kernels/qk_norm_rope.py.

    qkv (N, (H + 2G) D), first the H heads of q -> q (N, H, D), k (N, G, D), v (N, G, D), a view.
    q_w, k_w (D,) float32, weights of the norms; both None: no norm.  Tables and positions as in rope.
    """
    return QKNormRope.apply(qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G, T, eps, positions_N)


def attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    scale: float,
    causal: bool = True,
    bounds: KeyBounds = UNBOUNDED,
) -> Tensor:
    """softmax(scale q k^T) v of each head: q (B, T, H, D), k, v (B, S, G, D) -> (B, T, H, D). H / G query heads share a key head.

    causal: query t sees the keys up to t + (S - T), with `bounds` not all of these: kernels/attention/key_bounds.py.
    scale: usually D^-0.5.  bf16 on a GPU needs D = 16, 32, 64 or 128. See kernels/attention/flash_attention.py.
    """
    return Attention.apply(q_BTHD, k_BSGD, v_BSGD, scale, causal, bounds)


def causal_softmax(s_ARS: Tensor, T: int, scale: float, causal: bool = True) -> Tensor:
    """softmax(scale s) of each row: s (A, R, S) float32 -> the same shape. See kernels/softmax.py.

    Row r is position r % T, and with `causal` sees the keys up to r % T + (S - T); the others get 0. R is a multiple of T.
    """
    return CausalSoftmax.apply(s_ARS, T, scale, causal)


def swiglu(gu_N2F: Tensor) -> Tensor:
    """silu(gate) up (Shazeer 2020): gu (N, 2F), first the columns of gate -> (N, F). See kernels/swiglu.py."""
    return SwiGLU.apply(gu_N2F)


def swiglu_linear(gu_N2F: Tensor, w_OF: Tensor) -> Tensor:
    """linear(swiglu(gu), w): gu (N, 2F), w (O, F) -> (N, O). Backward recomputes the result of swiglu, so it is not saved."""
    if _fp8.fp8_layer(w_OF):
        return linear(swiglu(gu_N2F), w_OF)
    return SwiGLULinear.apply(gu_N2F, w_OF)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), of any shape. See kernels/swiglu.py."""
    return SiLU.apply(x)


def cross_entropy(
    logits_NP: Tensor, targets_N: Array, vocab_size: int, inv_count_1: Array
) -> Tensor:
    """-> the mean of -log softmax(logits)[target] over the targets that are not -100, in nats; shape (). kernels/cross_entropy.py

    logits (N, P): columns from vocab_size on are padding.  targets (N,) of any integer dtype.
    inv_count (1,) float32, on the device: 1 / number of targets, as count_targets(targets) in that file gives it.
    """
    return CrossEntropy.apply(logits_NP, targets_N, vocab_size, inv_count_1)


def linear_cross_entropy(
    x_NC: Tensor,
    w_PC: Tensor,
    targets_N: Array,
    vocab_size: int,
    inv_count_1: Array,
    rows: int | None = None,
) -> Tensor:
    """cross_entropy(linear(x, w), ...): x (N, C), w (P, C). See kernels/linear_cross_entropy.py.

    The logits exist for at most `rows` rows at a time (None: a number that suits). Forward also computes the gradients: use
    no_grad where no backward follows. In fp8 training the products may be on fp8 codes (Transformer.use_fp8_head).
    """
    given = x_NC, w_PC, targets_N, vocab_size, inv_count_1, rows
    layer = _fp8.fp8_layer(w_PC)
    if layer is None:
        return LinearCrossEntropy.apply(*given)
    return _fp8.Fp8LinearCrossEntropy.apply(*given, layer)


def linear_logprobs(
    x_NC: Tensor, w_PC: Tensor, targets_N: Array, vocab_size: int, rows: int | None = None
) -> Tensor:
    """log softmax(x w^T) at the targets, in nats, NaN where the target is -100: x (N, C), w (P, C) -> (N,) float32.

    For a loss of any form: see with_gradient.  vocab_size, rows: as in linear_cross_entropy.  targets (N,) int32 or int64.
    """
    return LinearLogprobs.apply(x_NC, w_PC, targets_N, vocab_size, rows)


def with_gradient(x: Tensor, value: float, dx: Array) -> Tensor:
    """-> a loss, shape (), whose value and derivative by x are known already: dx, an array like x, on its device.

    For losses over few numbers, such as log-probabilities, that are written in NumPy: examples/dpo.py.
    """
    return WithGradient.apply(x, value, dx)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, of one shape and dtype. The operator + of Tensors."""
    return Add.apply(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """factor x. The operator * of Tensors."""
    return Scale.apply(x, factor)


def cast(x: Tensor, dtype: DTypeLike) -> Tensor:
    """x in another dtype. Its gradient comes in the dtype of x."""
    return Cast.apply(x, dtype)


def cast_gradient(x: Tensor, dtype: DTypeLike) -> Tensor:
    """x itself. Its gradient comes in `dtype`."""
    return CastGradient.apply(x, dtype)


def swap_heads(x: Tensor) -> Tensor:
    """(B, X, Y, D) -> (B, Y, X, D), in new memory."""
    return SwapHeads.apply(x)


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same numbers in another shape, a view; one length may be -1."""
    return Reshape.apply(x, shape)


def narrow(x: Tensor, n: int) -> Tensor:
    """The first n of the last axis: logits without the padding of the vocabulary. A copy if there are more, else x itself."""
    return Narrow.apply(x, n)


ops.update(reshape=reshape, add=add, scale=scale)  # the operators of Tensor
