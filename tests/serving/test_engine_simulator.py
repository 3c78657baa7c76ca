"""The engine with every kernel in the simulator, which runs each thread and detects races and out-of-bounds reads."""

import numpy as np
import pytest
from checks import to_host
from twins import random_model, small

from xtrain import Engine, Transformer
from xtrain.device import to_device
from xtrain.serving.cached_model import CachedModel

SHAPE = dict(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32, vocab_size=21)
PROMPTS = [[1, 2, 3], [6]]


def pair(precision="fp32"):
    """-> (a model in the simulator, the same model on the CPU)"""
    config = small(**SHAPE)
    here = random_model(config, device="cpu")
    there = Transformer(config, None, "sim", precision, trainable=precision == "fp32")
    for (_, a), (_, b) in zip(there.named_parameters(), here.named_parameters()):
        a.data = to_device(b.data.astype(a.dtype), "sim")
    return there, here


def test_the_engine_in_the_simulator():
    """Greedy and random sampling in one batch, from prefill to sampling."""
    there, here = pair()
    options = dict(max_new_tokens=[3, 2], temperature=[0.0, 1.0], top_k=5, top_p=0.9, seed=3)
    served = Engine(there, 2, 16)
    assert served.generate(PROMPTS, **options) == Engine(here, 2, 16).generate(PROMPTS, **options)
    assert served.cache_bytes == 1 * 2 * 2 * 1 * 16 * 16 * 4


@pytest.mark.parametrize(
    "precision, most, through_gemv",
    [("fp32", 1e-5, False), ("bf16", 0.1, True), ("bf16", 0.1, False)],
)
def test_logits_in_the_simulator(precision, most, through_gemv, monkeypatch):
    """Both kinds of decoding step (gemv, GEMM), with an idle entry in the batch."""
    there, here = pair(precision)
    logits = []
    for model in (there, here):
        cached = CachedModel(model, 3, 16)
        if model is there:
            monkeypatch.setattr(cached, "_through_gemv", lambda B: through_gemv)
        ids = np.concatenate(PROMPTS)
        logits.append([to_host(cached.prefill(ids, [3, 1], [0, 0], [2, 0]))])
        batch = ([7, 0, 9], [3, 0, 1], [2, -1, 0])  # ids, lengths, slots
        arrays = (to_device(np.array(x, np.int32), model.device) for x in batch)
        logits[-1].append(to_host(cached.decode(*arrays))[[0, 2]])
    for got, expected in zip(*logits):
        assert got.dtype == np.float32
        error = np.abs(got[:, :21] - expected[:, :21]).max() / np.abs(expected).max()
        assert error <= most
