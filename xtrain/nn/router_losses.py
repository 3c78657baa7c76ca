"""Terms of the training loss that the routers of a mixture of experts compute.

    with RouterLosses(balance, z).collected() as losses:
        loss = model.loss(ids, targets)       each router appends its term to losses.terms
    loss = losses.added_to(loss, share)

The terms are Tensors, so autograd differentiates the whole loss; a layer that is recomputed returns
its terms as results of the recomputed part (recompute.py). Nothing is collected where no backward
follows: a validation loss has no such terms.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..device import Array
from ..kernels import elementwise as _elementwise
from .autograd import Function
from .mode import is_training
from .tensor import Tensor


@dataclass
class RouterLosses:
    """The weights of the losses of routers, and the terms of one forward pass.

    balance, z: functional.router_loss; the terms of the layers are averaged.
    counts: of each layer, the rows of each expert, (E,) int32.
    """

    balance: float
    z: float
    terms: list[Tensor] = field(default_factory=list)
    counts: list[Array] = field(default_factory=list)

    def has_terms(self) -> bool:
        """Return True if each router has a term."""
        return self.balance > 0 or self.z > 0

    @contextlib.contextmanager
    def collected(self) -> Iterator["RouterLosses"]:
        """Let the routers that run inside, in this thread, append to this object."""
        before = _thread.losses
        _thread.losses = self
        try:
            yield self
        finally:
            _thread.losses = before

    def added_to(self, loss: Tensor, share_1: Array) -> Tensor:
        """Return loss + share times the mean of the terms.

        share: (1,) float32, on the device: of the batch, what the forward pass computed.
        """
        if not self.terms:
            return loss
        return AddTerms.apply(loss, share_1, *self.terms)


class _Thread(threading.local):
    losses: RouterLosses | None = None


_thread = _Thread()


def router_losses() -> RouterLosses | None:
    """Return what collects this thread's terms; None: nothing, or no backward follows."""
    losses = _thread.losses
    return losses if is_training() else None


class AddTerms(Function):
    """loss + share mean(terms)"""

    @staticmethod
    def forward(ctx, loss, share_1, *terms):
        factor_1 = _elementwise.scale_fwd(share_1, 1 / len(terms))
        ctx.save(factor_1, len(terms))
        total_1 = terms[0]
        for term_1 in terms[1:]:
            total_1 = _elementwise.add_fwd(total_1, term_1)
        total_1 = _elementwise.scale_fwd(total_1, 1.0)  # a copy
        _elementwise.scale_into(total_1, factor_1)
        return _elementwise.add_fwd(loss.reshape(1), total_1).reshape(loss.shape)

    @staticmethod
    def backward(ctx, dloss):
        factor_1, count = ctx.saved
        dterm_1 = _elementwise.scale_fwd(dloss.reshape(1), 1.0)  # a copy
        _elementwise.scale_into(dterm_1, factor_1)
        return dloss, None, *[dterm_1] * count
