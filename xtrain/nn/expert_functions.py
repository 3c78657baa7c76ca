"""The Functions of a mixture of experts. See functions.py.

Adapters on the matrices of all experts (LoRA) are products of experts like those of the matrices:

    gu_m = W_e x_m + B_e (A_e x_m)        A: (E, r, C)   B: (E, 2F, r), of gate and up (pair_of)
    y_m = D_e a_m + B_e (A_e a_m)         A: (E, r, F)   B: (E, C, r)
"""

from typing import Any, NamedTuple

import numpy as np

from ..device import Array
from ..kernels import cast as _cast
from ..kernels import elementwise as _elementwise
from ..kernels.experts import expert_gemv as _expert_gemv
from ..kernels.experts import expert_router as _expert_router
from ..kernels.experts import expert_rows as _expert_rows
from ..kernels.experts import expert_swiglu as _expert_swiglu
from ..kernels.experts import grouped_product as _grouped
from ..kernels.experts import routing as _routing
from ..kernels.experts.expert_order import ExpertOrder, expert_order
from ..kernels.quantize import Quantized, kind_of
from ..kernels.runtime.invariance import is_batch_invariant
from ..kernels.runtime.launch import empty, zeros
from .autograd import Context, Function
from .mode import is_inference


class Routing(Function):
    @staticmethod
    def forward(ctx, logits_NE, K, renormalized, bias_E=None):
        experts_NK, weights_NK = _routing.routing(logits_NE, K, renormalized, bias_E)
        ctx.save(logits_NE, experts_NK, weights_NK, renormalized)
        return experts_NK, weights_NK

    @staticmethod
    def backward(ctx, _, dweights_NK):
        return _routing.routing_bwd(dweights_NK, *ctx.saved)


def few_router_rows(x_NC: Array, gate_EC: Array, K: int) -> bool:
    """Return True if kernels/experts/expert_router.py routes x; as few_expert_rows."""
    if type(x_NC) is np.ndarray or is_batch_invariant() or not is_inference():
        return False
    return x_NC.dtype == np.float32 and _expert_router.expert_router_fits(x_NC, gate_EC, K)


class RouterLoss(Function):
    @staticmethod
    def forward(ctx, logits_NE, counts_E, balance, z):
        ctx.save(logits_NE, counts_E, balance, z)
        return _routing.router_loss(logits_NE, counts_E, balance, z)

    @staticmethod
    def backward(ctx, dloss_1):
        return _routing.router_loss_bwd(dloss_1, *ctx.saved)


def of_experts(w_RI: Any, E: int) -> Any:
    """Return a view (E, R / E, I) of the matrices of all experts, one below the other; codes as they
    are."""
    if isinstance(w_RI, Quantized):
        return w_RI
    return w_RI.reshape(E, -1, w_RI.shape[1])


def few_expert_rows(x_NC: Array, down_RF: Array | Quantized, K: int) -> bool:
    """Return True if kernels/experts/expert_gemv.py computes the K experts of each row of x.

    It does in inference, for so few rows that an order by expert gains nothing.
    """
    if type(x_NC) is np.ndarray or is_batch_invariant() or not is_inference():
        return False
    if not _expert_gemv.expert_gemv_fits(x_NC, down_RF):
        return False
    N, C = x_NC.shape
    rows, F = down_RF.shape
    return _expert_gemv.expert_gemv_pays(N, K, rows // C, 3 * C * F, kind_of(down_RF))


class ExpertMLP(Function):
    """y_n = sum_k w_nk down_e(swiglu(gate_up_e(x_n))), e: the k-th expert of row n.

    x and swiglu's result in the order of experts are not saved: backward computes them again.
    """

    @staticmethod
    def forward(ctx, x_NC, weights_NK, gate_up_RC, down_RF, experts_NK, order=None):
        E = down_RF.shape[0] // x_NC.shape[1]
        if few_expert_rows(x_NC, down_RF, experts_NK.shape[1]):
            matrices = of_experts(gate_up_RC, E), of_experts(down_RF, E)
            chosen = weights_NK, experts_NK
            return _expert_gemv.expert_gemv(x_NC, *chosen, *matrices, ctx.parameters[3])
        if order is None:
            order = expert_order(experts_NK, E)
        x_MC = _expert_rows.gather_rows(x_NC, order)
        gu_M2F = _grouped.grouped_product(x_MC, of_experts(gate_up_RC, E), order)
        del x_MC
        a_MF = _expert_swiglu.expert_swiglu(gu_M2F, weights_NK, order)
        y_MC = _grouped.grouped_product(a_MF, of_experts(down_RF, E), order)
        ctx.save(x_NC, weights_NK, gate_up_RC, down_RF, gu_M2F, *order)
        return _expert_rows.sum_rows(y_MC, order)

    @staticmethod
    def backward(ctx, dy_NC):
        x_NC, weights_NK, gate_up_RC, down_RF, gu_M2F, *arrays = ctx.saved
        order = ExpertOrder(*arrays)
        E = order.counts_E.size
        dy_MC = _expert_rows.gather_rows(_cast.cast_fwd(dy_NC, x_NC.dtype), order)
        da_MF = _grouped.grouped_product_dx(dy_MC, of_experts(down_RF, E), order)
        dgu_M2F, dweights_NK = _expert_swiglu.expert_swiglu_bwd(da_MF, gu_M2F, weights_NK, order)
        a_MF = da_MF  # it was overwritten with swiglu's result
        ddown_RF = None
        if ctx.needs_grad[3]:
            ddown_RF = expert_gradient(ctx, 3, down_RF, dy_MC, a_MF, order)
        del dy_MC, da_MF, a_MF
        dgate_up_RC = None
        if ctx.needs_grad[2]:
            x_MC = _expert_rows.gather_rows(x_NC, order)
            dgate_up_RC = expert_gradient(ctx, 2, gate_up_RC, dgu_M2F, x_MC, order)
        dx_NC = None
        if ctx.needs_grad[0]:
            dx_MC = _grouped.grouped_product_dx(dgu_M2F, of_experts(gate_up_RC, E), order)
            dx_NC = _expert_rows.sum_rows(dx_MC, order)
        return dx_NC, dweights_NK, dgate_up_RC, ddown_RF


def expert_gradient(
    ctx: Context, i: int, w_RI: Array, dy_MO: Array, x_MI: Array, order: ExpertOrder
) -> Array:
    """Return the gradient of argument i, the matrices w of all experts."""
    dw_RI, add = ctx.grad_target(i, w_RI)
    _grouped.grouped_product_dw(dy_MO, x_MI, order, of_experts(dw_RI, order.counts_E.size), add)
    return dw_RI


class Factors(NamedTuple):
    """By what the products of the adapters are multiplied, alpha / r."""

    gate: float
    up: float
    down: float


def blocks_of(gate_b: Array | None, up_b: Array | None, b_EOr: Array) -> tuple[Array, Array]:
    """Return the views of gate's and up's b in the matrices of both, (E, F, their ranks).

    gate_b, up_b: (E F, rank); None: of rank 0.
    """
    F = b_EOr.shape[1] // 2
    r = 0 if gate_b is None else gate_b.shape[1]
    return b_EOr[:, :F, :r], b_EOr[:, F:, r:]


def pair_of(
    gate_b: Array | None, up_b: Array | None, factors: Factors, rows: int, u_Mr: Array
) -> Array:
    """Return b (E, rows, r) of gate and up: the gate's ranks do not reach the rows of up.

    Both are multiplied by their factors. u: of that many ranks, and of the result's dtype.
    """
    some = gate_b if gate_b is not None else up_b
    assert some is not None
    E = some.shape[0] // (rows // 2)
    b_EOr = zeros(u_Mr, (E, rows, u_Mr.shape[1]))
    places = blocks_of(gate_b, up_b, b_EOr)
    for b, block, factor in zip((gate_b, up_b), places, factors):
        if b is not None:
            copy_block(block, _elementwise.scale_fwd(b, factor).reshape(block.shape))
    return b_EOr


def copy_block(to: Array, x: Array) -> None:
    """Copy x to a part of an array, of the same shape and dtype."""
    if x.dtype.name == "bfloat16":  # copy bits: NumPy and CuPy may not know the type
        to = to.view(np.uint16)
        x = x.view(np.uint16)
    to[...] = x


def add_block(total_Rr: Array, block: Array, factor: float) -> None:
    """Add factor times a part (E, R / E, r) of an array to total, of the same dtype."""
    whole = block if block.flags.c_contiguous else block.copy()
    _elementwise.add_into(total_Rr, _elementwise.scale_fwd(whole, factor).reshape(total_Rr.shape))


class LoraExpertMLP(Function):
    """ExpertMLP with adapters: gate_up_a (E r, C), gate_b and up_b (E F, .), down_a, down_b.

    Each may be None. The rows of gate_up_a are those of each expert, first of gate, then of up.
    """

    @staticmethod
    def forward(ctx, x_NC, weights_NK, gate_up_RC, down_RF, experts_NK, order, factors, *adapters):
        gate_up_a, gate_b, up_b, down_a, down_b = adapters
        E = down_RF.shape[0] // x_NC.shape[1]
        if order is None:
            order = expert_order(experts_NK, E)
        x_MC = _expert_rows.gather_rows(x_NC, order)
        gu_M2F = _grouped.grouped_product(x_MC, of_experts(gate_up_RC, E), order)
        u_Mr = None
        if gate_up_a is not None:
            u_Mr = _grouped.grouped_product(x_MC, of_experts(gate_up_a, E), order)
            b_EOr = pair_of(gate_b, up_b, factors, gate_up_RC.shape[0] // E, u_Mr)
            _elementwise.add_into(gu_M2F, _grouped.grouped_product(u_Mr, b_EOr, order))
        a_MF = _expert_swiglu.expert_swiglu(gu_M2F, weights_NK, order)
        y_MC = _grouped.grouped_product(a_MF, of_experts(down_RF, E), order)
        v_Mr = None
        if down_a is not None:
            v_Mr = _grouped.grouped_product(a_MF, of_experts(down_a, E), order)
            b_ECr = of_experts(_elementwise.scale_fwd(down_b, factors.down), E)
            _elementwise.add_into(y_MC, _grouped.grouped_product(v_Mr, b_ECr, order))
        ctx.save(
            *(x_NC, weights_NK, gate_up_RC, down_RF, gu_M2F, factors, u_Mr, v_Mr),
            *adapters,
            *order,
        )
        return _expert_rows.sum_rows(y_MC, order)

    @staticmethod
    def backward(ctx, dy_NC):
        x_NC, weights_NK, gate_up_RC, down_RF, gu_M2F, factors, u_Mr, v_Mr, *more = ctx.saved
        gate_up_a, gate_b, up_b, down_a, down_b, *arrays = more
        order = ExpertOrder(*arrays)
        E = order.counts_E.size
        dx_of = _grouped.grouped_product_dx
        dy_MC = _expert_rows.gather_rows(_cast.cast_fwd(dy_NC, x_NC.dtype), order)
        da_MF = dx_of(dy_MC, of_experts(down_RF, E), order)
        dv_Mr = None
        ddown_b = None
        if v_Mr is not None:
            b_ECr = of_experts(_elementwise.scale_fwd(down_b, factors.down), E)
            dv_Mr = dx_of(dy_MC, b_ECr, order)
            _elementwise.add_into(da_MF, dx_of(dv_Mr, of_experts(down_a, E), order))
            ddown_b = ctx.grad_buffer(11, down_b)
            db_ECr = empty(v_Mr, b_ECr.shape, ddown_b.dtype)
            _grouped.grouped_product_dw(dy_MC, v_Mr, order, db_ECr)
            add_block(ddown_b, db_ECr, factors.down)
        dgu_M2F, dweights_NK = _expert_swiglu.expert_swiglu_bwd(da_MF, gu_M2F, weights_NK, order)
        a_MF = da_MF  # it was overwritten with swiglu's result
        ddown_RF = None
        if ctx.needs_grad[3]:
            ddown_RF = expert_gradient(ctx, 3, down_RF, dy_MC, a_MF, order)
        ddown_a = None
        if dv_Mr is not None:
            ddown_a = expert_gradient(ctx, 10, down_a, dv_Mr, a_MF, order)
        del dy_MC, da_MF, a_MF
        dx_MC = dx_of(dgu_M2F, of_experts(gate_up_RC, E), order)
        x_MC = _expert_rows.gather_rows(x_NC, order)
        dgate_up_a = None
        db: list = [None, None]
        if u_Mr is not None:
            b_EOr = pair_of(gate_b, up_b, factors, gate_up_RC.shape[0] // E, u_Mr)
            du_Mr = dx_of(dgu_M2F, b_EOr, order)
            _elementwise.add_into(dx_MC, dx_of(du_Mr, of_experts(gate_up_a, E), order))
            dgate_up_a = expert_gradient(ctx, 7, gate_up_a, du_Mr, x_MC, order)
            both = gate_b, up_b
            db = [None if b is None else ctx.grad_buffer(8 + i, b) for i, b in enumerate(both)]
            kind = next(x for x in db if x is not None).dtype
            db_EOr = empty(u_Mr, b_EOr.shape, kind)
            _grouped.grouped_product_dw(dgu_M2F, u_Mr, order, db_EOr)
            for x, block in zip(db, blocks_of(gate_b, up_b, db_EOr)):
                if x is not None:
                    add_block(x, block, factors.gate if x is db[0] else factors.up)
        dgate_up_RC = None
        if ctx.needs_grad[2]:
            dgate_up_RC = expert_gradient(ctx, 2, gate_up_RC, dgu_M2F, x_MC, order)
        dx_NC = _expert_rows.sum_rows(dx_MC, order)
        of_base = dx_NC, dweights_NK, dgate_up_RC, ddown_RF
        return *of_base, None, None, None, dgate_up_a, *db, ddown_a, ddown_b
