"""Looking on from outside: ops with their layers, and nothing left afterwards."""

import contextlib

import numpy as np
import pytest
from checks import GPU

from xtrain.config import ModelConfig
from xtrain.kernels import gemm
from xtrain.kernels.runtime import launch as _launch
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function
from xtrain.nn.model import Block, Transformer
from xtrain.nn.observers import swapped, watch_launches, watch_ops

CONFIG = ModelConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_seq_len=8)


def watched(recompute="none"):
    model = Transformer(CONFIG, device="gpu" if GPU else "cpu", recompute=recompute)
    seen, depth = [], []

    @contextlib.contextmanager
    def note(*what):
        seen.append((len(depth), *what))
        depth.append(what)
        yield
        depth.pop()

    with watch_ops(model, note):
        model.loss(np.zeros((2, 8), np.int32), np.ones((2, 8), np.int32)).backward()
    assert not depth
    return seen


def test_every_op_is_seen_with_its_layer():
    seen = watched()
    ops = [(op, way, layer) for _, op, way, layer in seen if op]
    assert ops[0] == ("Embedding", "forward", "") and ops[-1] == ("Embedding", "backward", "")
    for layer in ("layer 0", "layer 1"):
        assert (0, "", "forward", layer) in seen
        for way in ("forward", "backward"):
            products = "Linear", "AddNormLinear", "SwiGLULinear"
            assert sum(ops.count((op, way, layer)) for op in products) == 4
            assert ops.count(("Attention", way, layer)) == 1
    assert ops.count(("LinearCrossEntropy", "forward", "")) == 1


def test_a_repeated_forward_lies_inside_a_backward():
    seen = [what[1:] for what in watched("block")]
    first, second = (
        i for i, what in enumerate(seen) if what == ("Attention", "forward", "layer 1")
    )
    assert first < seen.index(("Recompute", "backward", "")) < second
    assert second < seen.index(("Attention", "backward", "layer 1"))


def test_nothing_stays_swapped():
    ops = [c for c in Function.__subclasses__()]
    before = [dict(vars(c)) for c in ops], Block.__call__, _launch._launch_gpu, gemm._cublas
    watched()
    with watch_launches(print, print):
        assert _launch._launch_gpu is not before[2] and gemm._cublas is not before[3]
    after = [dict(vars(c)) for c in ops], Block.__call__, _launch._launch_gpu, gemm._cublas
    assert [b == a for b, a in zip(before, after)] == [True] * 4


def test_swapped_also_after_an_error():
    linear = F.linear
    with pytest.raises(ZeroDivisionError), swapped(F, "linear", None):
        assert F.linear is None
        raise ZeroDivisionError
    assert F.linear is linear
