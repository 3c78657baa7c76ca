"""The engine with every kernel in the simulator, which runs each thread and detects races and out-of-bounds reads."""

import numpy as np
import pytest
from cached import Cached
from flash_attention_cases import small_tiles
from twins import random_model, small

from xtrain import Engine, Transformer
from xtrain.device import to_device
from xtrain.nn import deferred, functions

SHAPE = dict(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32, vocab_size=21)
PROMPTS = [[1, 2, 3], [6]]


def pair(precision="fp32", **changes):
    """-> (a model in the simulator, the same model on the CPU)"""
    config = small(**SHAPE, **changes)
    here = random_model(config, device="cpu")
    there = Transformer(config, None, "sim", precision, trainable=precision == "fp32")
    for (_, a), (_, b) in zip(there.named_parameters(), here.named_parameters()):
        a.data = to_device(b.data.astype(a.dtype), "sim")
    return there, here


@small_tiles()
def test_the_engine_in_the_simulator():
    """Greedy and random sampling in one batch, from prefill to sampling."""
    there, here = pair()
    options = dict(max_new_tokens=[3, 2], temperature=[0.0, 1.0], top_k=5, top_p=0.9, seed=3)
    served = Engine(there, 2, 16)
    assert served.generate(PROMPTS, **options) == Engine(here, 2, 16).generate(PROMPTS, **options)
    assert served.cache_bytes == 1 * 2 * 2 * 1 * 64 * 16 * 4  # two blocks of 64 tokens


BIAS = dict(qk_norm=False, qkv_bias=True)


@pytest.mark.parametrize(
    "precision, most, few_rows, changes",
    [("fp32", 1e-5, True, {}), ("fp32", 1e-5, False, BIAS), ("bf16", 0.1, True, BIAS), ("bf16", 0.1, False, {})],
    ids=["fp32-gemv-qwen3", "fp32-GEMM-qwen2", "bf16-gemv-qwen2", "bf16-GEMM-qwen3"],
)  # fmt: skip
@small_tiles()
def test_logits_in_the_simulator(precision, most, few_rows, changes, monkeypatch):
    """Both kinds of products (gemv, GEMM), with an idle entry in the batch."""
    there, here = pair(precision, **changes)
    if not few_rows:
        for module in (functions, deferred):
            monkeypatch.setattr(module, "few_rows", lambda *_, **__: False)
    logits = []
    for model in (there, here):
        cached = Cached(model, 3, 16)
        prefill = cached.prefill(PROMPTS, [0, 0], [2, 0])
        logits.append((prefill, cached.decode([7, 0, 9], [3, 0, 1], [2, -1, 0])[[0, 2]]))
    for got, expected in zip(*logits):
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() / np.abs(expected).max() <= most
