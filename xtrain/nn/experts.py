"""A mixture of experts (Shazeer et al. 2017) in the place of an MLP.

    logits = x gate^T                      (N, E), the router
    experts, weights = the K largest of softmax(logits)
    y_n = sum over k of weights[n, k] MLP_e(x_n),   e = experts[n, k]

No token is dropped, whatever the routing: kernels/experts/expert_order.py. The parameters are those
of the Hugging Face layout with one tensor for each expert; in memory they are two matrices.
"""

import numpy as np

from ..config import ModelConfig
from ..device import Array
from ..kernels.cast import BFLOAT16
from ..kernels.experts.expert_order import ExpertOrder, expert_order
from . import functional as F
from .deferred import Normed, matching
from .modules import STD, Linear, Module, Parameter
from .router_losses import router_losses
from .tensor import Tensor


class MixtureOfExperts(Module):
    """E MLPs with SwiGLU, of which a router chooses K for each token.

    gate: the router, (E, C).
    gate_up: (E 2F, C), of each expert its gate, then its up projection.
    down: (E C, F).
    bias: (E,), or None: added to the probabilities when experts are chosen. It has no gradient; a
        run moves it after each step (kernels/experts/load_balance.py).
    """

    bias: Parameter | None = None

    def __init__(self, c: ModelConfig):
        E, F = c.n_experts, c.expert_hidden_dim
        self.gate: Module = Linear(c.dim, E, STD)
        gate_up = {}
        down = {}
        for e in range(E):
            gate_up[f"experts.{e}.gate_proj.weight"] = F
            gate_up[f"experts.{e}.up_proj.weight"] = F
            down[f"experts.{e}.down_proj.weight"] = c.dim
        self.gate_up = Parameter((E * 2 * F, c.dim), STD, gate_up)
        self.down = Parameter((E * c.dim, F), STD / (2 * c.n_layers) ** 0.5, down)
        if c.expert_bias:
            self.bias = Parameter((E,), 0.0, {"gate.e_score_correction_bias": E})
            self.bias.requires_grad = False
        self.n_experts = E
        self.experts_per_token = c.experts_per_token
        self.renormalized = c.renormalized_experts

    def matrix_names(self, path: str, matrix: str) -> list[str]:
        """Return the names of a matrix of all experts: "gate_proj" of "model.layers.0.mlp."."""
        return [f"{path}experts.{e}.{matrix}" for e in range(self.n_experts)]

    def __call__(self, x_NC: Tensor) -> Tensor:
        """Return the mixture of x (N, C): (N, C)."""
        bias_E = None if self.bias is None else self.bias.data
        options = self.experts_per_token, self.renormalized, bias_E
        if isinstance(x_NC, Normed) and type(self.gate) is Linear:
            routed = x_NC.routed(self.gate.weight, *options)
            if routed is not None:
                experts_NK, weights_NK = routed
                return self.mixed(x_NC, weights_NK, experts_NK.data, None)
        x_NC = matching(x_NC, self.gate_up)
        logits_NE = self.logits(x_NC)
        experts_NK, weights_NK = F.routing(logits_NE, *options)
        order = None
        losses = router_losses()
        if losses is not None:
            order = expert_order(experts_NK.data, self.n_experts)
            losses.counts.append(order.counts_E)
            if losses.has_terms():
                term = F.router_loss(logits_NE, order.counts_E, losses.balance, losses.z)
                losses.terms.append(term)
        return self.mixed(x_NC, weights_NK, experts_NK.data, order)

    def mixed(
        self, x_NC: Tensor, weights_NK: Tensor, experts_NK: Array, order: ExpertOrder | None
    ) -> Tensor:
        """Return the weighted sum of the chosen experts: (N, C)."""
        return F.expert_mlp(x_NC, weights_NK, self.gate_up, self.down, experts_NK, order)

    def logits(self, x_NC: Tensor) -> Tensor:
        """Return the logits of the router (N, E), in float32: they decide the experts."""
        if x_NC.dtype != BFLOAT16:
            return self.gate(x_NC)
        if type(self.gate) is Linear:
            return F.linear(x_NC, self.gate.weight, np.float32)
        return F.cast(self.gate(x_NC), np.float32)
