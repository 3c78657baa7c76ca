"""AdamW and Muon for parameters of PyTorch, with the kernels of xtrain: the same input, the same bits.

Moments, and the weights that are updated, are float32. A bf16 parameter is a rounded copy of its
float32 weights, which are in the optimizer's state as `weight`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import adamw as _adamw
from ..kernels import cast as _cast
from ..kernels import muon as _muon
from ..kernels.runtime.launch import dtype_name, empty, on_host, zeros
from .register import register_op


def _one(like):
    """Return the factor of all gradients, for no clipping."""
    one = zeros(like, 1, np.float32)
    one.fill(1)
    return one


def _flat(w, p, g):
    """Return the float32 weights, their bf16 copy or None, and the gradient in float32, flat."""
    copy = p.reshape(-1) if dtype_name(p.dtype) == "bfloat16" else None
    return w.reshape(-1), copy, _cast.cast_fwd(g, np.float32).reshape(-1)


def _adamw_launcher(params, weights, grads, m, v, hyper, beta1, beta2, eps, weight_decay):
    one = _one(hyper)
    for p, w, g, m_n, v_n in zip(params, weights, grads, m, v):
        w_n, copy, g_n = _flat(w, p, g)
        moments = m_n.reshape(-1), v_n.reshape(-1)
        constants = (w_n.size if weight_decay else 0, beta1, beta2, eps, weight_decay)
        _adamw.adamw(w_n, g_n, *moments, one, hyper, *constants, copy_n=copy)


_adamw_op = register_op(
    "xtrain::adamw_(Tensor(a!)[] params, Tensor(b!)[] weights, Tensor[] grads, Tensor(c!)[] m,"
    " Tensor(d!)[] v, Tensor hyper, float beta1, float beta2, float eps, float weight_decay) -> ()",
    _adamw_launcher,
)


def _muon_launcher(params, weights, grads, m, hyper, momentum, weight_decay):
    one = _one(hyper)
    first = zeros(hyper, 1, np.int64)
    dtype = np.float32 if on_host(hyper) else _cast.BFLOAT16
    x_BRC = empty(hyper, (len(params), *params[0].shape), dtype)
    flat = [_flat(w, p, g) for w, p, g in zip(weights, params, grads)]
    for b, (_, _, g_n) in enumerate(flat):
        _muon.momentum(x_BRC[b : b + 1], m[b].reshape(-1), g_n, first, first, one, momentum)
    x_BRC = _muon.orthogonalize(x_BRC)
    for b, (w_n, copy, _) in enumerate(flat):
        x_1RC = x_BRC[b : b + 1]
        _muon.muon_update(w_n, x_1RC, first, first, one, hyper, weight_decay, copy_n=copy)


_muon_op = register_op(
    "xtrain::muon_(Tensor(a!)[] params, Tensor(b!)[] weights, Tensor[] grads, Tensor(c!)[] m,"
    " Tensor hyper, float momentum, float weight_decay) -> ()",
    _muon_launcher,
)


class _Optimizer(torch.optim.Optimizer):
    """What both have in common: the state of a parameter, and a group's tensors as lists."""

    moments: tuple[str, ...] = ()

    def tensors(self, params: Iterable[Tensor]) -> dict[str, list[Tensor]]:
        """Return the parameters that have a gradient, and what belongs to them.

        Raises TypeError for a dtype other than float32 and bf16.
        """
        found: dict[str, list[Tensor]] = {"params": [], "weights": [], "grads": []}
        found |= {name: [] for name in self.moments}
        for p in params:
            if p.grad is None:
                continue
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(
                    f"{type(self).__name__}: a parameter is {p.dtype}, expected float32 or bfloat16"
                )
            state = self.state[p]
            if not state:
                for name in self.moments:
                    state[name] = torch.zeros_like(p, dtype=torch.float32)
                if p.dtype == torch.bfloat16:
                    state["weight"] = p.detach().float()
            found["params"].append(p)
            found["weights"].append(state.get("weight", p))
            found["grads"].append(p.grad)
            for name in self.moments:
                found[name].append(state[name])
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do torch's, which converts states to the dtypes of their parameters, and undo that."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params):
            for name, value in saved.get(i, {}).items():
                self.state[p][name] = value.to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            tensors = self.tensors(group["params"])
            if tensors["params"]:
                group["step"] += 1
                self.update(group, tensors)
        return loss

    def update(self, group: dict[str, Any], tensors: dict[str, list[Tensor]]) -> None:
        """Update the parameters of a group."""
        raise NotImplementedError


class AdamW(_Optimizer):
    """AdamW (Loshchilov & Hutter 2019) for float32 and bf16 parameters; kernels/adamw.py.

    params: tensors or groups, as for torch.optim.AdamW; a group may have another lr, betas, eps or
        weight_decay.
    """

    moments = ("m", "v")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=0)
        super().__init__(params, options)

    def update(self, group: dict[str, Any], tensors: dict[str, list[Tensor]]) -> None:
        """Update the parameters of a group."""
        beta1, beta2 = group["betas"]
        hyper = hyper_on(tensors, group["lr"], beta1, beta2, group["step"])
        _adamw_op(*tensors.values(), hyper, beta1, beta2, group["eps"], group["weight_decay"])


class Muon(_Optimizer):
    """Muon (Jordan et al. 2024) for matrices of float32 or bf16; kernels/muon.py.

    An update has about the size of AdamW's, so one learning rate serves both. Give embeddings, the
    head and vectors to AdamW. Raises ValueError for a parameter that is no matrix.
    """

    moments = ("m",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ):
        options = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, step=0)
        super().__init__(params, options)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError(
                        f"Muon: a parameter has shape {tuple(p.shape)} and is not a matrix: give it "
                        "to AdamW"
                    )

    def update(self, group: dict[str, Any], tensors: dict[str, list[Tensor]]) -> None:
        """Update the matrices of a group, those of one shape together."""
        hyper = hyper_on(tensors, group["lr"], 0.0, 0.0, 1)  # of these it reads the learning rate
        for shape in dict.fromkeys(p.shape for p in tensors["params"]):
            at = [i for i, p in enumerate(tensors["params"]) if p.shape == shape]
            lists = [[values[i] for i in at] for values in tensors.values()]
            _muon_op(*lists, hyper, group["momentum"], group["weight_decay"])


def hyper_on(
    tensors: dict[str, list[Tensor]], lr: float, beta1: float, beta2: float, step: int
) -> Tensor:
    """Return what changes with the step (kernels/adamw.py), on the device of the parameters."""
    values = _adamw.adamw_hyper(float(lr), beta1, beta2, step)
    return torch.from_numpy(values).to(tensors["params"][0].device)
