"""How many tokens each expert of a mixture gets: counted while a forward pass runs."""

import contextlib
from collections.abc import Iterator

import numpy as np

from ..config import ModelConfig
from ..device import to_numpy
from ..nn.observers import Op, observe_ops

PREFIX = "experts of "  # and the layer: a key of layers.jsonl


@contextlib.contextmanager
def expert_loads(config: ModelConfig) -> Iterator[dict[str, np.ndarray]]:
    """Return {"experts of layer 3": tokens of each expert, (E,)}, filled by the forward passes
    inside; empty for a model without experts.

    Every layer has an entry also if no forward pass ran: ranks add theirs.
    """
    loads = {
        f"{PREFIX}layer {i}": np.zeros(config.n_experts, np.int64)
        for i in range(config.n_layers)
        if config.has_experts(i)
    }

    @contextlib.contextmanager
    def observer(op: Op) -> Iterator[None]:
        yield
        if op.name == "Routing" and op.way == "forward":
            name = f"{PREFIX}{op.layer}"
            experts_NK = to_numpy(op.outputs[0])
            counts_E = np.bincount(experts_NK.reshape(-1), minlength=config.n_experts)
            loads[name] = loads.get(name, 0) + counts_E

    if not config.n_experts:
        yield loads
        return
    with observe_ops(observer):
        yield loads
