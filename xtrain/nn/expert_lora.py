"""LoRA adapters on the matrices of experts. See lora.py.

Every expert has its own a and b, and the parameters are those of adapters on E separate MLPs, under
the names that peft gives them: experts.3.gate_proj.lora_A.weight. In memory the matrices of all
experts lie one below the other, as those of the model, so each product is one grouped product
(kernels/experts/grouped_product.py): expert_functions.LoraExpertMLP.
"""

from typing import Any

from ..device import Array
from ..errors import UserError
from ..formats.adapters import Ranks
from ..kernels.experts.expert_order import ExpertOrder
from . import functional as F
from .expert_functions import Factors
from .experts import MixtureOfExperts
from .modules import Parameter
from .tensor import Tensor

EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


class LoraExperts(MixtureOfExperts):
    """A MixtureOfExperts, frozen, with adapters on some matrices of all its experts.

    mixture: its modules and parameters become those of this one.
    path: of the mixture, "model.layers.0.mlp.".
    targets: some of EXPERT_MATRICES.
    on: False inside AdaptedTransformer.without_adapters.

    Raises UserError if the experts have different ranks or factors.
    """

    on = True

    def __init__(
        self, mixture: MixtureOfExperts, path: str, targets: tuple[str, ...], ranks: Ranks
    ):
        vars(self).update(vars(mixture))
        C = self.gate_up.declared_shape[1]
        F = self.down.declared_shape[1]
        ranks_of = {
            name: self._rank(path, name, ranks) for name in EXPERT_MATRICES if name in targets
        }
        self.factors = Factors(*(ranks_of.get(name, (0, 1.0))[1] for name in EXPERT_MATRICES))
        self.gate_up_a = self._a(("gate_proj", "up_proj"), ranks_of, C)
        self.gate_b = self._b("gate_proj", ranks_of, F)
        self.up_b = self._b("up_proj", ranks_of, F)
        self.down_a = self._a(("down_proj",), ranks_of, F)
        self.down_b = self._b("down_proj", ranks_of, C)

    def _rank(self, path: str, name: str, ranks: Ranks) -> tuple[int, float]:
        """Return the rank and factor of a matrix, those of all experts."""
        each = {ranks.of(matrix) for matrix in self.matrix_names(path, name)}
        if len(each) > 1:
            raise UserError(
                f"the experts of {path.rstrip('.')} would have adapters of different ranks or "
                f"alphas on {name}: give patterns that all of them fit, as experts.*.{name}"
            )
        return each.pop()

    def _a(self, names: tuple[str, ...], ranks_of: dict[str, Any], I: int) -> Parameter | None:  # noqa: E741
        parts = {
            f"experts.{e}.{name}.lora_A.weight": ranks_of[name][0]
            for e in range(self.n_experts)
            for name in names
            if name in ranks_of
        }
        if not parts:
            return None
        # the variance of PEFT's initialisation, uniform in +- I^-1/2
        return Parameter((sum(parts.values()), I), (3 * I) ** -0.5, parts)

    def _b(self, name: str, ranks_of: dict[str, Any], O: int) -> Parameter | None:  # noqa: E741
        if name not in ranks_of:
            return None
        parts = {f"experts.{e}.{name}.lora_B.weight": O for e in range(self.n_experts)}
        return Parameter((self.n_experts * O, ranks_of[name][0]), 0.0, parts)

    def mixed(
        self, x_NC: Tensor, weights_NK: Tensor, experts_NK: Array, order: ExpertOrder | None
    ) -> Tensor:
        """Return the weighted sum of the chosen experts: (N, C)."""
        if not self.on:
            return super().mixed(x_NC, weights_NK, experts_NK, order)
        adapters = self.gate_up_a, self.gate_b, self.up_b, self.down_a, self.down_b
        matrices = self.gate_up, self.down
        return F.lora_expert_mlp(
            x_NC, weights_NK, *matrices, experts_NK, order, self.factors, adapters
        )
