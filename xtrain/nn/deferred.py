"""Values that are computed when they are read, so that a block can be written as its maths:

    h = h + self.self_attn(self.input_layernorm(h), sequences)
    return h + self.mlp(self.post_attention_layernorm(h))

One kernel per operator would write h, its norm and the result of SwiGLU to memory and read each of
them again. Here these operators return a `Deferred`: a Tensor that knows its operands. It computes
itself when it is first read, and only once. But an op that can compute it in its own pass takes the
operands instead, and the value itself never exists:

    written as              Deferred   what a plain model runs
    h + delta               Stream     nothing: the next norm adds delta
    rmsnorm(stream)         Normed     nothing: the next product normalises
    linear(normed, v)       Product    AddNormLinear: addition, norm and product
    normed.routed(gate)                inference: AddNormRouter: addition, norm, choice of experts
    swiglu(product)         Gated      inference: AddNormLinear, with SwiGLU at its end
    linear(gated, u)                   training: SwiGLULinear, which does not save SwiGLU's result
    linear(gated, u)                   fp8 training: Fp8MLP, the whole branch
    logits(x, head)         Logits     cross_entropy: LinearCrossEntropy, a few rows at a time

A module does not ask which module stands next to it. A norm, an MLP or an attention of your own
reads its input like any Tensor and gets the value; a pending addition is then computed by an op of
its own, or together with the norm (ResidualRMSNorm).

Three rules keep the meaning of an expression:

- A value is computed in the mode of the place where it was written (recorded or not, inference,
  batch-invariant). Only an op of the same mode may compute it in its own pass.
- The op that computes h + delta leaves the sum in the Stream for the next reader.
- A second product of one norm reads the norm's value.

A mistake in an operand, such as a wrong shape, is reported where the value is read.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..kernels import gemm as _gemm
from ..kernels import residual as _residual
from ..kernels import rmsnorm as _rmsnorm
from ..kernels import swiglu as _swiglu
from ..kernels.cast import BFLOAT16
from ..kernels.decoding import gemv as _gemv
from ..kernels.decoding import gemv_chain as _gemv_chain
from ..kernels.experts import expert_router as _expert_router
from ..kernels.runtime.invariance import invariance, is_batch_invariant
from .autograd import Function
from .expert_functions import few_router_rows
from .fp8 import Fp8AddNormLinear, Fp8Linear, Fp8MLP, fp8_layer
from .functions import (
    Add,
    Cast,
    CastGradient,
    Linear,
    RMSNorm,
    SwiGLU,
    bias_gradient,
    few_exact_rows,
    few_rows,
    product,
)
from .mode import current_mode, in_mode, is_inference
from .tensor import Tensor


def _of_value(name: str) -> Any:
    """Return a property: the attribute `name` of the value, which is computed if necessary."""

    def get(self: "Deferred") -> Any:
        return getattr(self.read(), name)

    def set_(self: "Deferred", x: Any) -> None:
        setattr(self.read(), name, x)

    return property(get, set_)


class Deferred(Tensor):
    """A Tensor that computes itself when it is first read. Derived classes define `compute`."""

    __slots__ = ("_mode", "_value", "_versions")

    # everything that a Tensor consists of
    _data = _of_value("_data")
    _grad = _of_value("_grad")
    grad_written = _of_value("grad_written")
    requires_grad = _of_value("requires_grad")
    node = _of_value("node")
    index = _of_value("index")
    version = _of_value("version")

    def __init__(self, *operands: Tensor):
        self._mode = current_mode(), is_batch_invariant()
        self._value: Tensor | None = None
        plain: list[Tensor] = []
        if not is_inference():  # where weights may change between two steps of an engine
            plain = [x for x in operands if isinstance(x, Tensor) and not isinstance(x, Deferred)]
        self._versions = [(x.version, x.version.count) for x in plain]

    def compute(self) -> Tensor:
        """Return the value. Called at most once, in the mode of the place of the expression."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Return the value, an ordinary Tensor. Raises RuntimeError if an operand has changed."""
        if self._value is None:
            self.check_operands()
            self._value = self.in_mode(self.compute)
        return self._value

    def __reduce__(self) -> Any:
        return Tensor.detach, (self.read(),)  # copy.copy, copy.deepcopy and pickle

    def check_operands(self) -> None:
        """Raise RuntimeError if an operand has been changed since the expression was written."""
        if any(version.count != count for version, count in self._versions):
            raise RuntimeError(
                f"an operand of a {type(self).__name__} was changed in place before the value was "
                "read: read it before (`y.data`), or change a copy"
            )

    def in_mode(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return compute(), whose ops run in the mode in which the expression was written."""
        if self.in_same_mode():
            return compute()
        mode, invariant = self._mode
        with in_mode(mode), invariance(invariant):
            return compute()

    def in_same_mode(self) -> bool:
        """Return whether ops run now as they did where the expression was written."""
        return self._mode == (current_mode(), is_batch_invariant())

    def is_pending(self) -> bool:
        """Return whether an op that runs now may compute this value in its own pass."""
        if self._value is not None or not self.in_same_mode():
            return False
        self.check_operands()
        return True

    def linear(self, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
        """Return self w^T + b. Classes that a product can compute in its own pass override it."""
        return linear_of(self, w_OI, None, b_O)


def linear_of(x_NI: Tensor, w_OI: Tensor, dtype: DTypeLike | None, b_O: Tensor | None) -> Tensor:
    """Return x w^T + b of values that exist: functional.linear."""
    x_NI = matching(x_NI, w_OI)
    if layer := fp8_layer(w_OI):
        return Fp8Linear.apply(x_NI, w_OI, b_O, layer, dtype)
    return Linear.apply(x_NI, w_OI, dtype, b_O)


def matching(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """Return x, in bf16 if w is.

    In bf16 training the residual stream, and what a norm of your own makes of it, is float32.
    """
    if w_OI.value.dtype == BFLOAT16 and x_NI.dtype == np.float32:
        return Cast.apply(x_NI, BFLOAT16)
    return x_NI


class Stream(Deferred):
    """The residual stream h + delta.

    h: float32, also in bf16 training.
    delta: what the last branch adds; None: nothing is pending.
    dtype: of the branches, of delta, and of the gradient of h; None: as h.
    """

    __slots__ = ("branch_dtype", "delta", "h")

    def __init__(self, h_NC: Tensor, delta_NC: Tensor | None = None, *, dtype: Any = None):
        super().__init__()
        self.h = h_NC
        self.delta = delta_NC
        self.branch_dtype = dtype or h_NC.dtype

    def compute(self) -> Tensor:
        return CastGradient.apply(self.added(), self.branch_dtype)

    def added(self) -> Tensor:
        """Return h + delta, and leave it in h."""
        if self.delta is not None:
            delta_NC = self.delta
            self.h = self.in_mode(lambda: sum_of(self.h, delta_NC))
            self.delta = None
        return self.h

    def __add__(self, other: Any) -> Tensor:
        # Reading the other value first: its ops may add what is pending here.
        is_delta = isinstance(other, Tensor) and other.dtype == self.branch_dtype
        h_NC = self.added()
        if is_delta and other.shape == h_NC.shape:
            return Stream(h_NC, other, dtype=self.branch_dtype)
        return Stream(h_NC + other, dtype=self.branch_dtype)

    __radd__ = __add__

    def parts(self) -> tuple[Tensor, ...]:
        """Return h, or h and delta: a stream can be made of them again, behind `recompute`."""
        if self.delta is None:
            return (self.h,)
        return self.h, self.delta

    def rows(self, choose: Callable[[Tensor], Tensor]) -> "Stream":
        """Return the stream of some rows, which `choose` takes from each part."""
        return Stream(*map(choose, self.parts()), dtype=self.branch_dtype)

    def rmsnorm(self, w_C: Tensor, eps: float) -> Tensor:
        """Return the norm of the stream, in the dtype of the branches."""
        if self.in_same_mode():
            return Normed(self, w_C, eps)
        return RMSNorm.apply(self, w_C, eps, self.branch_dtype)


def sum_of(h_NC: Tensor, delta_NC: Tensor) -> Tensor:
    """Return h + delta, in the dtype of h."""
    if delta_NC.dtype != h_NC.dtype:
        delta_NC = Cast.apply(delta_NC, h_NC.dtype)
    return Add.apply(h_NC, delta_NC)


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a stream, or the one Tensor that a layer of another kind has returned."""
    return x.parts() if isinstance(x, Stream) else (x,)


class Normed(Deferred):
    """The RMSNorm of a stream. The product that reads it normalises, and its backward does so
    again."""

    __slots__ = ("eps", "has_product", "stream", "w")

    def __init__(self, stream: Stream, w_C: Tensor, eps: float):
        super().__init__(w_C)
        self.stream = stream
        self.w = w_C
        self.eps = eps
        self.has_product = False

    def compute(self) -> Tensor:
        if self.stream.delta is None:
            return RMSNorm.apply(self.stream.h, self.w, self.eps, self.stream.branch_dtype)
        return self.begin(ResidualRMSNorm, self.eps)

    def begin(self, op: type[Function], *args: Any) -> Tensor:
        """Run an op that begins with the addition and this norm. Return its result."""
        stream = self.stream
        stream.h, result = op.apply(stream.h, stream.delta, self.w, *args)
        stream.delta = None
        return result

    def linear(self, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
        if self.has_product or not self.is_pending():
            return linear_of(self, w_OI, None, b_O)
        self.has_product = True
        return Product(self, w_OI, b_O)

    def routed(
        self, gate_EC: Tensor, K: int, renormalized: bool, bias_E: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return functional.routing of the norm's product with a gate, computed in one pass.

        The norm's value is then computed, too. None: that is not possible here.
        """
        stream = self.stream
        kind = gate_EC.value.dtype
        same = stream.delta is None or stream.delta.dtype == kind
        if self.has_product or not same or not self.is_pending():
            return None
        if not few_router_rows(stream.h.value, gate_EC.value, K):
            return None
        operands = stream.h, stream.delta, self.w, gate_EC, self.eps
        results = AddNormRouter.apply(*operands, K, renormalized, bias_E)
        stream.h, self._value, experts_NK, weights_NK = results
        stream.delta = None
        return experts_NK, weights_NK


class Product(Deferred):
    """normed w^T + b, the start of a branch."""

    __slots__ = ("b", "normed", "w")

    def __init__(self, normed: Normed, w_OC: Tensor, b_O: Tensor | None):
        super().__init__(w_OC)
        self.normed = normed
        self.w = w_OC
        self.b = b_O

    def compute(self) -> Tensor:
        if not self.normed.is_pending():
            return linear_of(self.normed, self.w, None, self.b)
        layer = fp8_layer(self.w)
        if layer is not None:
            return self.normed.begin(Fp8AddNormLinear, self.w, self.b, layer, self.normed.eps)
        return self.normed.begin(AddNormLinear, self.w, self.normed.eps, False, self.b)

    def is_pending(self) -> bool:
        """Return whether SwiGLU may be computed in one pass with this product and the norm."""
        return super().is_pending() and self.normed.is_pending()


class Gated(Deferred):
    """swiglu(gate_up). The product that reads it computes it, and its backward does so again.

    gelu: geglu(gate_up) instead. Only its own kernel and the product that reads it compute that.
    """

    __slots__ = ("gate_up", "gelu")

    def __init__(self, gu_N2F: Tensor, gelu: bool = False):
        super().__init__(gu_N2F)
        self.gate_up = gu_N2F
        self.gelu = gelu

    def compute(self) -> Tensor:
        branch = self.branch()
        if branch is not None and is_inference():
            normed = branch.normed
            return normed.begin(AddNormLinear, branch.w, normed.eps, True, branch.b)
        return SwiGLU.apply(self.gate_up, self.gelu)

    def branch(self) -> Product | None:
        """Return the product of gate and up if it can be computed in the same pass, else None."""
        if self.gelu or not isinstance(self.gate_up, Product) or not self.gate_up.is_pending():
            return None
        return self.gate_up

    def linear(self, w_OI: Tensor, b_O: Tensor | None) -> Tensor:
        if b_O is not None or is_inference() or not self.is_pending():
            return linear_of(self, w_OI, None, b_O)
        second = fp8_layer(w_OI)
        if second is None:
            return SwiGLULinear.apply(self.gate_up, w_OI, self.gelu)
        branch = self.branch()
        if branch is not None and branch.b is None and (first := fp8_layer(branch.w)):
            normed = branch.normed
            return normed.begin(Fp8MLP, branch.w, w_OI, first, second, normed.eps)
        return linear_of(self, w_OI, None, None)


class Logits(Deferred):
    """x w^T in float32. cross_entropy computes them for a few rows at a time, with their
    gradient."""

    __slots__ = ("w", "x")

    def __init__(self, x_NC: Tensor, w_PC: Tensor):
        super().__init__(x_NC, w_PC)
        self.x = x_NC
        self.w = w_PC

    def compute(self) -> Tensor:
        dtype = np.float32 if self.x.dtype == BFLOAT16 else None
        return linear_of(self.x, self.w, dtype, None)


# ------------------------------------------------- ops that compute several values in one pass
class ResidualRMSNorm(Function):
    """h = x + r, y = rmsnorm(h): the end of one branch and the start of the next in one pass.

    h has the dtype of x, y that of r.
    """

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


class AddNormRouter(Function):
    """h = x + delta, n = rmsnorm(h), and the experts and weights of n's rows. In inference only."""

    @staticmethod
    def forward(ctx, x_NC, delta_NC, w_C, gate_EC, eps, K, renormalized, bias_E):
        ready = ctx.parameters[2] and ctx.parameters[3]
        operands = x_NC, delta_NC, w_C, gate_EC, eps
        return _expert_router.expert_router(*operands, K, renormalized, bias_E, ready)


class AddNormLinear(Function):
    """h = x + delta, y = rmsnorm(h) v^T + b: the start of a branch.

    Backward recomputes the norm's result.

    swiglu: in inference, apply SwiGLU to y.
    """

    @staticmethod
    def forward(ctx, x_NC, delta_NC, w_C, v_OC, eps, swiglu=False, b_O=None):
        if few_rows(x_NC, v_OC, fused=True):
            ready = ctx.parameters[2] and ctx.parameters[3]
            return _gemv.add_norm_gemv(x_NC, delta_NC, w_C, v_OC, eps, swiglu, ready, b_O=b_O)
        exact = b_O is None and x_NC.dtype == np.float32
        if exact and few_exact_rows(x_NC, v_OC, norm=True, swiglu=swiglu):
            ready = ctx.parameters[2] and ctx.parameters[3]
            return _gemv_chain.chain_add_norm_gemv(x_NC, delta_NC, w_C, v_OC, eps, swiglu, ready)
        if delta_NC is None:
            h_NC = x_NC
            n_NC, rstd_N = _rmsnorm.rmsnorm_fwd(h_NC, w_C, eps, v_OC.dtype)
        else:
            h_NC, n_NC, rstd_N = _residual.residual_rmsnorm_fwd(x_NC, delta_NC, w_C, eps)
        y_NO = product(ctx, 3, n_NC, v_OC, None, b_O)
        ctx.save(h_NC, w_C, rstd_N, v_OC, b_O)
        if swiglu:
            y_NO = _swiglu.swiglu_fwd(y_NO)
        return h_NC, y_NO

    @staticmethod
    def backward(ctx, dh_NC, dy_NO):
        h_NC, w_C, rstd_N, v_OC, b_O = ctx.saved
        if dy_NO is None:  # only h was used
            return dh_NC, dh_NC, None, None, None, None, None
        dn_NC = _gemm.linear_bwd_x(dy_NO, v_OC)
        dw_C = ctx.grad_buffer(2, w_C)
        dx_NC = _residual.residual_rmsnorm_bwd(
            dh_NC, dn_NC, h_NC, w_C, rstd_N, dw_C, recompute_y=True
        )
        n_NC = dn_NC  # recompute_y overwrote it with the norm's result
        dv_OC = None
        if ctx.needs_grad[3]:
            dv_OC, add = ctx.grad_target(3, v_OC)
            _gemm.linear_bwd_w(dy_NO, n_NC, dv_OC, add)
        db_O = bias_gradient(ctx, 6, b_O, dy_NO)
        return dx_NC, dx_NC, dw_C, dv_OC, None, None, db_O  # x and delta have the same gradient


class SwiGLULinear(Function):
    """z = swiglu(gu) w^T. The result of swiglu is not saved: backward recomputes it."""

    @staticmethod
    def forward(ctx, gu_N2F, w_OF, gelu=False):
        ctx.save(gu_N2F, w_OF, gelu)
        return _gemm.linear_fwd(_swiglu.swiglu_fwd(gu_N2F, gelu), w_OF)

    @staticmethod
    def backward(ctx, dz_NO):
        gu_N2F, w_OF, gelu = ctx.saved
        dy_NF = _gemm.linear_bwd_x(dz_NO, w_OF)
        dgu_N2F = _swiglu.swiglu_bwd(dy_NF, gu_N2F, recompute_y=True, gelu=gelu)
        y_NF = dy_NF
        dw_OF = None
        if ctx.needs_grad[1]:
            dw_OF, add = ctx.grad_target(1, w_OF)
            _gemm.linear_bwd_w(dz_NO, y_NF, dw_OF, add)
        return dgu_N2F, dw_OF
