"""repeat_kv of lesson 18 (lessons/checks/repeat_kv.py): heads copied once for each query head."""

import ml_dtypes
import numpy as np
import pytest
from checks import normal, sentinels, to_host, to_kernel
from offline import CARDS, CARDS_BF16, compiled, nvvm, signatures

from xtrain import lesson
from xtrain.simulator import sim

__all__ = ["nvvm"]
repeat_kv = lesson.load_checks("repeat_kv").repeat_kv
BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_repeat(monkeypatch, dtype):
    x = normal(1, 2, 3, 5, 4).astype(dtype)
    with sentinels(monkeypatch):
        y = repeat_kv(to_kernel(x), 2)
    assert np.array_equal(to_host(y), x[:, [0, 0, 1, 1, 2, 2]])


def test_bad_input():
    k = normal(1, 1, 2, 4, 8)
    with pytest.raises(ValueError, match="0 repeats"):
        repeat_kv(k, 0)
    with pytest.raises(ValueError, match="heads, at most 65535"):
        repeat_kv(k[:, :, :0].copy(), 2**40)


@pytest.mark.parametrize("dtype, cards", [(np.float32, CARDS), (BF16, CARDS_BF16)])
def test_the_kernel_compiles(monkeypatch, nvvm, dtype, cards):
    found = signatures(monkeypatch, lambda: repeat_kv(sim(np.ones((1, 2, 4, 8), dtype)), 2))
    compiled(monkeypatch, *found[0], cards)
