"""The biases of routers, which a run moves so that experts get equally many tokens.

Wang et al. 2024: a loss that balances the load disturbs the gradient of the model; a bias that is
added when experts are chosen, and to nothing else, does not.
"""

from collections.abc import Callable

import numpy as np

from ..device import Array
from ..errors import UserError
from ..kernels.experts.load_balance import add_counts, move_bias
from ..kernels.runtime.launch import zeros
from .experts import MixtureOfExperts
from .model import Transformer
from .router_losses import RouterLosses


class ExpertBiases:
    """The biases of a model's routers, and the load of the experts in the current step.

    Those of a frozen model (adapters, draft heads) stay as they are: they would not be saved.

    load_LE: rows of each expert, int32, on the device; (0, 0) for a model without biases to move.
    rate: by which a step moves each bias.
    """

    def __init__(self, model: Transformer, rate: float):
        mixtures = [m for _, m in model.modules() if isinstance(m, MixtureOfExperts)]
        trained = {id(parameter) for _, parameter in model.storage()}
        self.biases = [
            m.bias.data for m in mixtures if m.bias is not None and id(m.bias) in trained
        ]
        if self.biases and len(self.biases) < len(mixtures):
            raise UserError("some routers have a bias and others have none: give all of them one")
        E = self.biases[0].size if self.biases else 0
        self.load_LE = zeros(model.arena.grads, (len(self.biases), E), np.int32)
        self.rate = rate

    def begin_step(self) -> None:
        """Set the load to 0."""
        if self.biases:
            self.load_LE.fill(0)

    def count(self, routers: RouterLosses) -> None:
        """Add what a forward pass has counted."""
        if self.biases:
            for load_E, counts_E in zip(self.load_LE, routers.counts, strict=True):
                add_counts(load_E, counts_E)

    def move(
        self, sum_load: Callable[[Array], None] | None = None, factor_1: Array | None = None
    ) -> None:
        """Move the biases by the load.

        sum_load: replaces the load of this rank by that of all; None: there is one rank.
        factor: NaN in a step that is skipped, which moves nothing (skip_nonfinite.py).
        """
        if sum_load is not None:
            sum_load(self.load_LE)
        for bias_E, load_E in zip(self.biases, self.load_LE):
            move_bias(bias_E, load_E, self.rate, factor_1)
