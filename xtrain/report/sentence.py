"""What a model computes for one sentence: the attention of each head in each layer, and the most
likely next tokens."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device import to_numpy
from ..nn.autograd import no_grad
from ..nn.model import Transformer
from ..nn.observers import Op, observe_ops

MOST_TOKENS = 24
MOST_LAYERS = 12
MOST_HEADS = 8
TOP = 5


@no_grad()
def look(model: Transformer, tokenizer: Any, ids: list[int], step: int) -> dict[str, Any]:
    """Run the model on ids, at least one token, and return the content of sentence.json.

    attention: {layer: {"mean": T x T, "heads": {head: T x T}}}; a row is a query, a column a key.
    Of many layers or heads, only an evenly spaced selection; the mean is over all heads.
    next: for each token, the most likely next tokens, and the probability of the actual one.
    """
    ids = list(ids)[: min(MOST_TOKENS, model.config.max_seq_len)]
    seen: dict[str, tuple] = {}

    @contextlib.contextmanager
    def observer(op: Op) -> Iterator[None]:
        yield
        if op.name == "Attention":
            q_BTHD, k_BTGD, _, scale, *_ = op.inputs
            q_THD, k_TGD = (to_numpy(x)[0].astype(np.float32) for x in (q_BTHD, k_BTGD))
            seen[op.layer] = q_THD, k_TGD, scale

    with observe_ops(observer):
        logits_TV = to_numpy(model(np.array([ids])).data)[0].astype(np.float64)
    p_TV = np.exp(logits_TV - logits_TV.max(-1, keepdims=True))
    p_TV /= p_TV.sum(-1, keepdims=True)
    text = lambda i: (
        tokenizer.token_bytes[i].decode("utf-8", "replace") if i < tokenizer.vocab_size else ""
    )
    following = []
    for t, p_V in enumerate(p_TV):
        top = np.argsort(-p_V, kind="stable")[:TOP]
        real = None
        if t + 1 < len(ids):
            real = ids[t + 1]
        following.append(
            {
                "top": [[text(int(i)), round(float(p_V[i]), 4)] for i in top],
                "real": None if real is None else round(float(p_V[real]), 4),
            }
        )
    layers = _some(list(seen), MOST_LAYERS)
    return {
        "step": step,
        "tokens": [text(i) for i in ids],
        "attention": {layer: _maps(*seen[layer]) for layer in layers},
        "layers": len(seen),
        "next": following,
    }


def _maps(q_THD, k_TGD, scale):
    H = q_THD.shape[1]
    G = k_TGD.shape[1]
    T = len(q_THD)
    k_THD = np.repeat(k_TGD, H // G, axis=1)
    s_HTT = np.einsum("thd,shd->hts", q_THD, k_THD) * scale
    s_HTT = np.where(np.tri(T, dtype=bool), s_HTT, -np.inf)
    p_HTT = np.exp(s_HTT - s_HTT.max(-1, keepdims=True))
    p_HTT /= p_HTT.sum(-1, keepdims=True)
    shown = lambda p_TT: np.round(p_TT.astype(np.float64), 3).tolist()
    heads = {str(h): shown(p_HTT[h]) for h in _some(list(range(H)), MOST_HEADS)}
    return {"mean": shown(p_HTT.mean(0)), "heads": heads, "of": H}


def _some(items: list, most: int) -> list:
    """Return at most `most` of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
