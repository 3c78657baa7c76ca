"""One Function per op: the forward launcher, what is saved, the backward launcher; nothing else.

functional.py has the ops that the rest of xtrain calls, with their signatures and docstrings, and
says what the letters at the end of array names mean. Functions of several ops at once are in
deferred.py, those of the losses in loss_functions.py, those of experts in expert_functions.py.
"""

import itertools

import numpy as np

from ..device import Array, is_gpu
from ..kernels import bias as _bias
from ..kernels import cast as _cast
from ..kernels import dora as _dora
from ..kernels import elementwise as _elementwise
from ..kernels import embedding as _embedding
from ..kernels import gemm as _gemm
from ..kernels import layout as _layout
from ..kernels import qk_norm_rope as _qk_norm_rope
from ..kernels import rmsnorm as _rmsnorm
from ..kernels import rope as _rope
from ..kernels import softmax as _softmax
from ..kernels import swiglu as _swiglu
from ..kernels.attention import flash_attention as _flash_attention
from ..kernels.attention import gemm_attention as _attention
from ..kernels.attention.key_bounds import UNBOUNDED
from ..kernels.decoding import gemv as _gemv
from ..kernels.decoding import gemv_chain as _gemv_chain
from ..kernels.primitives.flat import same_place
from ..kernels.quantize import Quantized, kind_of
from ..kernels.runtime.invariance import is_batch_invariant
from ..kernels.runtime.launch import empty, empty_like, zeros
from .autograd import Context, Function
from .mode import is_inference


def gradient_view_for(ctx: Context, i: int) -> Array | None:
    """Return a view of any layout into a larger gradient, or None: allocate it.

    Backward may write the gradient of argument i there (not add it) and return the view.

    Only the op that made the argument can offer one, by a static method gradient_view(ctx, which
    output). Its own backward must also accept a gradient in other memory.
    """
    edge = ctx.edges[i]
    if edge is None or edge.node is None or edge.node.ctx is None:
        return None
    offer = getattr(edge.node.function, "gradient_view", None)
    if offer is None:
        return None
    return offer(edge.node.ctx, edge.index)


def few_rows(x_NK: Array, w_OK: Array | Quantized, fused: bool = False) -> bool:
    """Return True if kernels/decoding/gemv.py computes the product.

    It does in inference, for so few rows that the product takes as long as reading w.

    fused: together with the norm before it.
    """
    if type(x_NK) is np.ndarray or is_batch_invariant() or not is_inference():
        return False
    N, K = x_NK.shape
    return _gemv.gemv_fits(N, K, w_OK.dtype, kind_of(w_OK), fused)


def few_exact_rows(x_NK: Array, w_OK: Array | Quantized, **kind) -> bool:
    """Return True if kernels/decoding/gemv_chain.py computes the product.

    It does in inference in batch-invariant mode, for few rows. kind: see chain_pays.
    """
    if not (is_gpu(x_NK) and is_batch_invariant() and is_inference()):
        return False
    return _gemv_chain.chain_pays(x_NK, w_OK, **kind)


def product(
    ctx: Context, i: int, x_NI: Array, w_OI: Array | Quantized, dtype, b_O: Array | None
) -> Array:
    """Return x w^T + b, where w is argument i: by the kernel for few rows, or a GEMM.

    dtype: of the result; None: as x.
    """
    if few_rows(x_NI, w_OI):
        return _gemv.gemv(x_NI, w_OI, dtype or x_NI.dtype, ctx.parameters[i], b_O)
    if b_O is None and x_NI.dtype == w_OI.dtype and few_exact_rows(x_NI, w_OI, dtype=dtype):
        return _gemv_chain.chain_gemv(x_NI, w_OI, dtype, ctx.parameters[i])
    return _gemm.linear_fwd(x_NI, w_OI, dtype, b_O)


def bias_gradient(ctx: Context, i: int, b_O: Array | None, dy_NO: Array | None) -> Array | None:
    """Return the gradient of argument i, a bias: dy, that of the product, summed over the rows."""
    if b_O is None or dy_NO is None or not ctx.needs_grad[i]:
        return None
    db_O = ctx.grad_buffer(i, b_O)
    _bias.bias_bwd(dy_NO, db_O)
    return db_O


def wide_dtype(x: Array) -> type:
    """Return the dtype of sums and losses: float64 if x is, else float32."""
    return np.float64 if x.dtype == np.float64 else np.float32


class Embedding(Function):
    full_precision = True  # rows are copied, not multiplied: the residual stream starts in float32

    @staticmethod
    def forward(ctx, ids_N, w_VC):
        if ctx.needs_grad[1]:
            plan = _embedding.embedding_plan(ids_N, w_VC.shape[0])
        else:
            plan = None
        ctx.save(ids_N, w_VC, plan and plan.order_N4)
        dtype = None
        if w_VC.dtype.name == "bfloat16":  # of a model without float32 weights
            dtype = np.float32
        return _embedding.embedding_fwd(ids_N, w_VC, dtype)

    @staticmethod
    def backward(ctx, dx_NC):
        ids_N, w_VC, plan_N4 = ctx.saved
        dw_VC = ctx.grad_buffer(1, w_VC)
        if plan_N4 is None:
            plan = None
        else:
            plan = _embedding.EmbeddingPlan(plan_N4, w_VC.shape[0])
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
        dx_NI = None
        if ctx.needs_grad[0]:
            dx_NI = _gemm.linear_bwd_x(dy_NO, w_OI)
        dw_OI = None
        if ctx.needs_grad[1]:
            dw_OI, add = ctx.grad_target(1, w_OI)
            _gemm.linear_bwd_w(dy_NO, x_NI, dw_OI, add)
        return dx_NI, dw_OI, None, bias_gradient(ctx, 3, b_O, dy_NO)


class LoraLinear(Function):
    """m_O, c_O: None, or with DoRA magnitudes and inverse norms (kernels/dora.py)."""

    @staticmethod
    def forward(ctx, x_NI, w_OI, a_AI, bias_O, m_O, c_O, parts, *b):
        y_NO = product(ctx, 1, x_NI, w_OI, None, None if c_O is not None else bias_O)
        u_NA = empty(x_NI, (x_NI.shape[0], a_AI.shape[0]))
        for factor, group in itertools.groupby(parts, lambda part: part.factor):
            together = list(group)
            ranks = slice(together[0].ranks.start, together[-1].ranks.stop)
            _gemm.linear_into(u_NA[:, ranks], x_NI, a_AI[ranks], alpha=factor)
        for part, b_Or in zip(parts, b):
            _gemm.linear_into(y_NO[:, part.columns], u_NA[:, part.ranks], b_Or, accumulate=True)
        z_NO = None
        if c_O is not None:
            z_NO = y_NO
            y_NO = _dora.scale_columns(z_NO, m_O, c_O, bias_O)
        ctx.save(x_NI, w_OI, a_AI, bias_O, u_NA, z_NO, m_O, c_O, parts, *b)
        return y_NO

    @staticmethod
    def backward(ctx, dy_NO):
        x_NI, w_OI, a_AI, bias_O, u_NA, z_NO, m_O, c_O, parts, *b = ctx.saved
        dy_NO = _cast.cast_fwd(dy_NO, x_NI.dtype)
        dbias_O = bias_gradient(ctx, 3, bias_O, dy_NO)
        dm_O = None
        if c_O is not None:
            dm_O = ctx.grad_buffer(4, m_O)
            dy_NO = _dora.scale_columns_bwd(dy_NO, z_NO, m_O, c_O, dm_O)
        du_NA = empty(u_NA, u_NA.shape)
        db = []
        for i, (part, b_Or) in enumerate(zip(parts, b), 7):
            dy_NP = dy_NO[:, part.columns]
            _gemm.matmul(du_NA[:, part.ranks], dy_NP, b_Or, alpha=part.factor)
            db_Or, add = ctx.grad_target(i, b_Or)
            _gemm.linear_bwd_w(dy_NP, u_NA[:, part.ranks], db_Or, add)
            db.append(db_Or)
        da_AI, add = ctx.grad_target(2, a_AI)
        _gemm.linear_bwd_w(du_NA, x_NI, da_AI, add)
        dx_NI = None
        if ctx.needs_grad[0]:
            dx_NI = _gemm.linear_bwd_x(dy_NO, w_OI)
            _gemm.matmul(dx_NI, du_NA, a_AI, accumulate=True)
        dw_OI = None
        if ctx.needs_grad[1]:
            dw_OI, add = ctx.grad_target(1, w_OI)
            _gemm.linear_bwd_w(dy_NO, x_NI, dw_OI, add)
        return dx_NI, dw_OI, da_AI, dbias_O, dm_O, None, None, *db


class AdaptedMatrix(Function):
    """In float32: the sum w + f b a is smaller than a bf16 can show where b a is."""

    full_precision = True

    @staticmethod
    def forward(ctx, w_PC, a, b, factor, transposed=False):
        rows = a.shape[1] if transposed else b.shape[0]
        v_PC = empty(w_PC, w_PC.shape, wide_dtype(w_PC))
        v_PC[...] = _cast.cast_fwd(w_PC, v_PC.dtype)
        left, right = (a, b) if transposed else (b, a)
        trans = dict(trans_a=transposed, trans_b=transposed)
        _gemm.matmul(v_PC[:rows], left, right, alpha=factor, accumulate=True, **trans)
        ctx.save(a, b, factor, transposed, rows)
        return v_PC

    @staticmethod
    def backward(ctx, dv_PC):
        a, b, factor, transposed, rows = ctx.saved
        da, add_a = ctx.grad_target(1, a)
        db, add_b = ctx.grad_target(2, b)
        dv = dv_PC[:rows]
        on_a = dict(trans_a=True, trans_b=transposed, alpha=factor, accumulate=add_a)
        on_b = dict(trans_a=transposed, trans_b=True, alpha=factor, accumulate=add_b)
        _gemm.matmul(da, b, dv, **on_a)
        _gemm.matmul(db, dv, a, **on_b)
        return dv_PC if ctx.needs_grad[0] else None, da, db


class ReplaceRows(Function):
    @staticmethod
    def forward(ctx, x_O, y, places):
        x_O = x_O.copy()
        first = 0
        for place in places:
            n = place.stop - place.start
            x_O[place] = y[first : first + n]
            first += n
        ctx.save(y, places)
        return x_O

    @staticmethod
    def backward(ctx, dx_O):
        y, places = ctx.saved
        dy = ctx.grad_buffer(1, y)
        first = 0
        for place in places:
            n = place.stop - place.start
            _elementwise.add_into(dy[first : first + n], dx_O[place])
            first += n
        return None, dy


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
        """Return the columns of dv in the packed gradient, for the first op that used v.

        Gradients of further uses are added to it.
        """
        qkv_NP, *_, cos, _, H, G, _, _, packed = ctx.saved
        if i != 2 or packed:
            return None
        packed.append(empty(qkv_NP, qkv_NP.shape))
        return _qk_norm_rope.values_of(packed[0], H, G, 2 * cos.shape[1])

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv_NP, q_w, k_w, rstd, cos, sin, H, G, T, positions_N, packed = ctx.saved
        N = qkv_NP.shape[0]
        D = cos.shape[1] * 2
        dqkv_NP = packed.pop() if packed else empty(qkv_NP, qkv_NP.shape)
        dv_view = _qk_norm_rope.values_of(dqkv_NP, H, G, D)
        if dv is None:
            dv_view[...] = 0
        elif not same_place(dv, dv_view):
            dv_view[...] = dv
        if dq is None:
            dq = zeros(qkv_NP, (N, H, D))
        if dk is None:
            dk = zeros(qkv_NP, (N, G, D))
        dq_w = None if q_w is None else ctx.grad_buffer(1, q_w)
        dk_w = None if k_w is None else ctx.grad_buffer(2, k_w)
        _qk_norm_rope.qk_norm_rope_bwd(
            dqkv_NP, dq, dk, qkv_NP, q_w, k_w, rstd, cos, sin, H, G, T, dq_w, dk_w, positions_N
        )
        return dqkv_NP, dq_w, dk_w


class Attention(Function):
    """bf16 uses FlashAttention, float32 matrix products around a softmax; in batch-invariant mode,
    and with a sliding window or documents (key_bounds.py), FlashAttention too, unless the heads are
    too wide for its kernel. Both read v a packed array and write dv into one.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, bounds=UNBOUNDED):
        flash = q.dtype.name == "bfloat16" or is_batch_invariant()
        flash |= bounds is not UNBOUNDED and _flash_attention.fits(q)
        if flash:
            o, lse = _flash_attention.flash_attention_fwd(q, k, v, scale, causal, bounds)
            saved = q, k, v, o, lse
        else:
            o, saved = _attention.attention_fwd(q, k, v, scale, causal, bounds)
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
    @staticmethod
    def forward(ctx, s_ARS, T, scale, causal):
        p_ARS = _softmax.causal_softmax_fwd(s_ARS, T, scale, causal, empty_like(s_ARS))
        ctx.save(p_ARS, T, scale, causal)
        return p_ARS

    @staticmethod
    def backward(ctx, dp_ARS):
        p_ARS, T, scale, causal = ctx.saved
        return _softmax.causal_softmax_bwd(dp_ARS, p_ARS, T, scale, causal, empty_like(dp_ARS))


class SwiGLU(Function):
    @staticmethod
    def forward(ctx, gu_N2F, gelu=False):
        ctx.save(gu_N2F, gelu)
        return _swiglu.swiglu_fwd(gu_N2F, gelu)

    @staticmethod
    def backward(ctx, dy_NF):
        gu_N2F, gelu = ctx.saved
        return _swiglu.swiglu_bwd(dy_NF, gu_N2F, gelu=gelu)


class SiLU(Function):
    """y = x sigmoid(x), of any shape."""

    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return _swiglu.silu_fwd(x)

    @staticmethod
    def backward(ctx, dy):
        return _swiglu.silu_bwd(dy, *ctx.saved)


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
