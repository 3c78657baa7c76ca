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
from ..kernels.runtime.launch import check, dtype_name, empty, on_host, zeros
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


def _in_order_of_memory(row):
    """Return the tensors of a parameter with its axes in the order of its memory: contiguous views
    of a matrix that is transposed, or of weights in channels_last."""
    strides = row[0].stride()
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    return tuple([x.permute(order) for x in row])


class _Optimizer(torch.optim.Optimizer):
    """What both have in common: options, the state of a parameter, a group's tensors as lists."""

    moments: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()  # numbers in the state of a parameter

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Raises ValueError for one that cannot be updated."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError if an option of a group is out of range."""
        for name in ("lr", "eps", "weight_decay"):
            check(group.get(name, 0) >= 0, f"{self.name}: {name} is {group.get(name)}, below 0")
        for rate in (*group.get("betas", ()), group.get("momentum", 0)):
            check(
                0 <= rate < 1, f"{self.name}: a rate of a moment is {rate}, expected 0 to below 1"
            )

    @property
    def name(self) -> str:
        """The name of the class, for messages"""
        return type(self).__name__

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, which is made when it first has a gradient.

        Its tensors have the parameter's layout in memory.
        """
        state = self.state[p]
        for name in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype == torch.bfloat16 and "weight" not in state:
            state["weight"] = p.detach().float()
        for name, x in state.items():
            if not isinstance(x, Tensor) or (x.is_contiguous() and p.is_contiguous()):
                continue
            if x.stride() != p.stride():  # it was read from a file
                state[name] = torch.empty_like(p, dtype=torch.float32).copy_(x)
        return state

    def updated(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that have a gradient.

        Raises TypeError for a dtype other than float32 and bf16, and for a sparse gradient.
        """
        with_gradient = []
        for p in params:
            if p.grad is None:
                continue
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(
                    f"{self.name}: a parameter is {p.dtype}, expected float32 or bfloat16"
                )
            if p.grad.layout != torch.strided:
                raise TypeError(
                    f"{self.name}: a gradient is sparse: make the embedding sparse=False"
                )
            with_gradient.append(p)
        return with_gradient

    def tensors(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return parameters, float32 weights, gradients and moments, for the ops: of a parameter
        that FSDP2 has divided, the part of this rank."""
        columns: list[list[Tensor]] = [[] for _ in range(3 + len(self.moments))]
        for p in params:
            state = self.state_of(p)
            weight = state["weight"] if p.dtype == torch.bfloat16 else p
            row = (p, weight, p.grad, *[state[name] for name in self.moments])
            row = tuple([x.to_local() if hasattr(x, "to_local") else x for x in row])
            if not row[0].is_contiguous():
                row = _in_order_of_memory(row)
            for column, x in zip(columns, row):
                column.append(x)
        return columns

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do torch's, which converts states to the dtypes of their parameters, and undo that.

        Raises ValueError for the state of another optimizer.
        """
        saved = state_dict["state"]
        names = (*self.counts, *self.moments)
        for values in saved.values():
            check(
                set(values) - {"weight"} == set(names),
                f"{self.name}: the state holds {', '.join(values)}, expected {', '.join(names)}: "
                "another optimizer has saved it",
            )
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params):
            for name, value in saved.get(i, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update(group, self.updated(group["params"]))
        return loss

    def update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update parameters of a group, all of which have a gradient."""
        raise NotImplementedError


class AdamW(_Optimizer):
    """AdamW (Loshchilov & Hutter 2019) for float32 and bf16 parameters; kernels/adamw.py.

    params: tensors or groups, as for torch.optim.AdamW; a group may have another lr, betas, eps or
        weight_decay. They may be divided by FSDP2.
    """

    moments = ("m", "v")
    counts = ("step",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, options)

    def update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update parameters of a group, those with one number of updates and GPU together."""
        together: dict[tuple, list[Tensor]] = {}
        for p in params:
            step = self.state[p].get("step", 0) + 1
            self.state[p]["step"] = step
            together.setdefault((step, p.device), []).append(p)
        beta1, beta2 = group["betas"]
        for (step, _), some in together.items():
            tensors = self.tensors(some)
            hyper = hyper_on(tensors, group["lr"], beta1, beta2, step)
            _adamw_op(*tensors, hyper, beta1, beta2, group["eps"], group["weight_decay"])


class Muon(_Optimizer):
    """Muon (Jordan et al. 2024) for matrices of float32 or bf16; kernels/muon.py.

    An update has about the size of AdamW's, so one learning rate serves both. Give embeddings, the
    head and vectors to AdamW. Raises ValueError for a parameter that is not a matrix, or of which
    FSDP2 has given this rank a part only.
    """

    moments = ("m",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ):
        options = dict(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, options)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError if an option is out of range, or a parameter is not a whole matrix."""
        super().check_group(group)
        for p in group["params"]:
            check(
                p.dim() == 2,
                f"Muon: a parameter has shape {tuple(p.shape)} and is not a matrix: give it to "
                "AdamW",
            )
            check(
                not hasattr(p, "to_local"),
                "Muon: a parameter is divided among ranks, and an update needs the whole matrix: "
                "give it to AdamW",
            )

    def update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update matrices of a group, those of one shape and GPU together."""
        together: dict[tuple, list[Tensor]] = {}
        for p in params:
            together.setdefault((p.shape, p.device, p.is_contiguous()), []).append(p)
        for some in together.values():
            tensors = self.tensors(some)
            hyper = hyper_on(tensors, group["lr"], 0.0, 0.0, 1)  # it reads the learning rate
            _muon_op(*tensors, hyper, group["momentum"], group["weight_decay"])


def hyper_on(
    tensors: list[list[Tensor]], lr: float, beta1: float, beta2: float, step: int
) -> Tensor:
    """Return what changes with the step (kernels/adamw.py), on the device of the parameters."""
    values = _adamw.adamw_hyper(float(lr), beta1, beta2, step)
    return torch.from_numpy(values).to(tensors[0][0].device)
