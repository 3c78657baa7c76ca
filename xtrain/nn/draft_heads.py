"""Heads that guess tokens ahead (Medusa, Cai et al. 2024): small trained blocks on a frozen model.

    h (N, C)                      the model's output, from which its head predicts the next token
    h_k = h + silu(h w_k^T)       w_k (C, C), zero at first; k = 1 ... K
    head(h_k)                     the model's own head predicts the token k places after the next one

Loss: the mean of the K cross-entropies. Only the w_k are trained: the model has neither gradients nor
moments, and computes h as in inference. serving/draft_heads.py drafts with them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device import Array, cupy, is_gpu
from ..errors import UserError
from ..formats.adapters import DRAFT_HEADS
from ..formats.huggingface import shapes_of
from ..kernels.cross_entropy import IGNORE, count_targets
from . import functional as F
from .mode import no_grad
from .model import Transformer
from .modules import Linear, Module, Parameter
from .tensor import Tensor


class DraftHeads(Module):
    """K heads for a model of width `dim`."""

    def __init__(self, dim: int, K: int):
        self.heads = [Linear(dim, dim, 0.0) for _ in range(K)]

    def check_fit(self, model: Transformer) -> None:
        """Raise UserError if the heads are not for a model of this width, device and precision."""
        dim = self.heads[0].weight.shape[1]
        dtype = model.branch_dtype or np.dtype(np.float32)
        kind = (dim, self.arena.kind[0], self.heads[0].weight.dtype)
        expected = (model.config.dim, model.device, dtype)
        if kind != expected:
            raise UserError(
                f"the draft heads are of width {dim}, {kind[2]} on the {kind[1]}, the model is "
                f"{expected[0]}, {dtype} on the {model.device}: give heads that were trained for it"
            )

    def __call__(self, x_NC: Tensor) -> list[Tensor]:
        """Return h_1, ..., h_K, (N, C) each."""
        return [F.add(x_NC, F.silu(head(x_NC))) for head in self.heads]


class HeadedTransformer(Transformer):
    """A frozen Transformer with draft heads, its only parameters after `add_heads`.

    Make it with trainable=False.

    draft_heads: None before `add_heads`.
    frozen: {name: shape} of the model's own parameters, after it.
    base: the model's folder.
    """

    draft_heads: DraftHeads | None = None
    frozen: dict[str, tuple[int, ...]]
    base = ""

    def add_heads(self, K: int, base: str = "", world: int = 1) -> None:
        """Add K heads, which at first predict what the model predicts. world: see nn.Arena."""
        self.frozen = shapes_of(self)
        self.base = base
        self.base_arena = self.arena
        self.draft_heads = DraftHeads(self.config.dim, K)
        device, bf16, *_ = self.arena.kind
        self.arena = self.make_arena(device, 0, bf16, world)

    def loss(
        self,
        ids: Array,
        targets: Array,
        inv_count: Array | None = None,
        starts: Array | None = None,
    ) -> Tensor:
        """Return the mean loss of the heads; arguments and errors as in Transformer.loss."""
        if self.draft_heads is None:
            return super().loss(ids, targets, inv_count, starts)
        with no_grad():
            x_NC, targets_N = self._hidden_and_targets(ids, targets, starts)
        if inv_count is None:
            inv_count = count_targets(targets_N)
        losses = []
        for k, h_NC in enumerate(self.draft_heads(Tensor(x_NC.data)), 1):
            ahead_N = targets_ahead(targets_N.reshape(ids.shape), k, starts).reshape(-1)
            logits = self.logits(h_NC)
            losses.append(F.cross_entropy(logits, ahead_N, self.config.vocab_size, inv_count))
        return F.scale(functools.reduce(F.add, losses), 1 / len(losses))

    def _storage(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        if self.draft_heads is None:
            yield from super()._storage(prefix)
        else:
            yield from self.draft_heads._storage(prefix)

    @property
    def variation(self) -> str:
        """Return "": heads are written apart from the model, which stays what it is."""
        return "" if self.draft_heads else super().variation

    @property
    def adapter(self) -> dict[str, Any] | None:
        """Return what adapter_config.json says of them."""
        if self.draft_heads is None:
            return None
        K = len(self.draft_heads.heads)
        return {"peft_type": DRAFT_HEADS, "base_model_name_or_path": self.base, "num_heads": K}


def targets_ahead(targets_BT: Array, k: int, starts_BT: Array | None = None) -> Array:
    """Return the token k places after each target, (B, T): what head k predicts.

    -100 where the row ends before it, or it belongs to another document. starts: see
    Transformer.loss.
    """
    xp = cupy() if is_gpu(targets_BT) else np
    out_BT = xp.full_like(targets_BT, IGNORE)
    T = targets_BT.shape[1]
    if k >= T:
        return out_BT
    ahead = targets_BT[:, k:]
    if starts_BT is not None:
        same = xp.asarray(starts_BT)[:, k:] <= xp.arange(T - k, dtype=np.int32)
        ahead = xp.where(same, ahead, ahead.dtype.type(IGNORE))
    out_BT[:, :-k] = ahead
    return out_BT
