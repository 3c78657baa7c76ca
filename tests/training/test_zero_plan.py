"""The memory of ZeRO-1 and ZeRO-3, planned."""

import pytest

from xtrain.config import ModelConfig
from xtrain.nn.model import Transformer
from xtrain.nn.sharded_arena import Share
from xtrain.training.memory_plan import plan
from xtrain.training.zero_plan import zero1, zero3, zero3_kinds

SMALL = ModelConfig(
    vocab_size=500, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, max_seq_len=32
)  # fmt: skip
DEEP = ModelConfig(vocab_size=500, dim=64, n_layers=24, n_heads=4, head_dim=16, max_seq_len=32)


def test_zero1_divides_moments_and_masters():
    half, full = plan(SMALL, 4, 32, "bf16"), plan(SMALL, 4, 32)
    assert zero1(half, 1) == half.reserved
    saved = half.reserved - zero1(half, 4)
    assert saved == 0.75 * (half.kinds["moments"] + half.kinds["weights"])
    assert full.reserved - zero1(full, 2) == 0.5 * full.kinds["moments"]


@pytest.mark.parametrize("precision, per_whole, per_gathered", [("fp32", 8, 16), ("bf16", 6, 12)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero3_needs_what_its_formula_says(precision, per_whole, per_gathered, ranks):
    """The bytes at the top of nn/sharded_arena.py, counted from the arrays of the arena."""
    one = plan(DEEP, 4, 32, precision)
    model = Transformer(DEEP, None, "cpu", world=ranks, share=Share(0, ranks))
    layers = model.arena.layers
    N = sum(unit.weights.size for unit in layers)
    M = model.arena.size - N
    expected = (16 * N + 12 * M) / ranks + per_whole * M + per_gathered * layers[0].weights.size
    norms = model.arena.whole[-1].weights.size  # always float32
    expected += norms * (8 - per_whole)
    assert sum(zero3_kinds(one.kinds, DEEP, precision, ranks).values()) == expected
    before = {"weights", "bf16 copy of the weights", "gradients", "moments"} & one.kinds.keys()
    assert zero3(one, DEEP, precision, ranks) - expected == one.reserved - sum(
        one.kinds[name] for name in before
    )
    assert zero3(one, DEEP, precision, ranks) < zero1(one, ranks)
    averaged = plan(DEEP, 4, 32, precision, ema=0.9)
    more = sum(zero3_kinds(averaged.kinds, DEEP, precision, ranks).values()) - expected
    assert more == 4 * model.arena.size / ranks
