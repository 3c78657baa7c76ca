"""Generation without a KV cache: the whole prefix is computed again for every token.

serving/engine.py is the fast one; this one is short, and what its tests compare with.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..device import Array, as_array, is_gpu, to_device, to_numpy
from ..errors import UserError
from .mode import no_grad
from .tensor import Tensor


@no_grad()
def generate(
    model: Any,
    ids: Array,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stop: Iterable[int] = (),
) -> Array:
    """Append tokens to ids. model: a Transformer, whose `generate` explains the arguments."""
    ids = as_array(ids)
    tokens = np.atleast_2d(to_numpy(ids))
    if not tokens.size:
        raise UserError("the prompt is empty: give at least one token")
    tokens = model.check_ids(tokens, "ids").astype(np.int64)
    total = tokens.shape[1] + max_new_tokens
    if total > model.config.context or max_new_tokens < 0:
        raise UserError(
            f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones do not fit into "
            f"max_seq_len {model.config.context}"
        )
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be 0 or a positive number, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1, or None for all tokens, got {top_k}")
    streams = [np.random.default_rng([seed, row]) for row in range(len(tokens))]
    ended = np.zeros(len(tokens), bool)
    for _ in range(max_new_tokens):
        B, T = tokens.shape
        last_BC = model.hidden(tokens).data.reshape(B, T, -1)[:, -1].copy()
        logits = to_numpy(model.logits(Tensor(last_BC)).data)[:, : model.config.vocab_size]
        if np.isnan(logits).any():
            raise UserError("the model's logits are NaN: its weights are damaged, use another copy")
        picks = [pick(row, temperature, top_k, stream) for row, stream in zip(logits, streams)]
        tokens = np.concatenate([tokens, np.array(picks, tokens.dtype)[:, None]], axis=1)
        ended |= np.isin(picks, list(stop))
        if ended.all():
            break
    fits = model.config.vocab_size - 1 <= np.iinfo(ids.dtype).max
    out = tokens.reshape(*ids.shape[:-1], -1).astype(ids.dtype if fits else np.int64)
    return to_device(out, "gpu") if is_gpu(ids) else out


def pick(
    logits_V: np.ndarray, temperature: float, top_k: int | None, rng: np.random.Generator
) -> int:
    """Choose a token. Ties go to the lower id, both at temperature 0 and at the limit of the top_k.

    If the largest logit is infinite, the first such token is chosen at every temperature.
    """
    if temperature == 0 or np.isinf(logits_V.max()):
        return int(logits_V.argmax())
    scaled = logits_V.astype(np.float64) / temperature
    if top_k is not None and top_k < scaled.size:
        kept = np.argsort(-scaled, kind="stable")[:top_k]
        masked = np.full_like(scaled, -np.inf)
        masked[kept] = scaled[kept]
        scaled = masked
    p = np.exp(scaled - scaled.max())
    return int(
        np.searchsorted(np.cumsum(p) / p.sum(), rng.random(), side="right").clip(0, p.size - 1)
    )
