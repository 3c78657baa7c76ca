"""The two hooks: ops with their layers, inputs and outputs; launches; and nothing left afterwards."""

import contextlib

import numpy as np
import pytest
from checks import GPU

from xtrain import device
from xtrain.config import ModelConfig
from xtrain.kernels.elementwise import add_fwd
from xtrain.kernels.gemm import matmul
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime.launch import launch_observers, observe_launches
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function, Tensor
from xtrain.nn.model import Block, Transformer
from xtrain.nn.observers import Op, observe_ops, op_observers
from xtrain.training.memory_plan import planning

CONFIG = ModelConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_seq_len=8)


def watched(recompute="none"):
    """-> (depth, op, way, layer) of a step"""
    model = Transformer(CONFIG, device="gpu" if GPU else "cpu", recompute=recompute)
    seen, depth = [], []

    @contextlib.contextmanager
    def observer(op):
        seen.append((len(depth), op.name, op.way, op.layer))
        depth.append(op)
        yield
        depth.pop()

    with observe_ops(observer):
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
    assert first < seen.index(("Recompute", "backward", "layer 1")) < second
    assert second < seen.index(("Attention", "backward", "layer 1"))


def test_inputs_and_outputs():
    x, w = (Tensor(np.full((2, 2), i, np.float32), requires_grad=True) for i in (2.0, 3.0))
    seen = []

    @contextlib.contextmanager
    def observer(op):
        assert not op.outputs
        yield
        seen.append(op)

    gradient = np.ones((2, 2), np.float32)
    with observe_ops(observer):
        y = F.linear(x, w)
        y.backward(gradient)
    forward, backward = seen
    assert (forward.name, forward.way, forward.layer) == ("Linear", "forward", "")
    assert forward.inputs[0] is x.data and forward.inputs[1] is w.data
    assert forward.outputs == (y.data,) and (backward.name, backward.way) == ("Linear", "backward")
    assert [id(a) for a in backward.inputs] == [id(gradient), id(x.data), id(w.data)]
    assert backward.outputs[1] is w.grad


def test_several_observers_nest():
    order = []

    def observer(name):
        @contextlib.contextmanager
        def enter(op):
            order.append(f"{name} enters")
            yield
            order.append(f"{name} leaves")

        return enter

    x = Tensor(np.ones(2, np.float32))
    with observe_ops(observer("a")), observe_ops(observer("b")):
        F.silu(x)
    assert order == ["a enters", "b enters", "b leaves", "a leaves"]


# ----------------------------------------------------------------------------- launches
def test_launches_are_seen_in_order_and_can_be_skipped():
    """While planning, no kernel starts: the outer observer, the plan's, does not call start()."""
    seen = []

    def observer(event, start):
        seen.append((event.name, event.is_product))
        start()

    with planning(0) as meter, observe_launches(observer):
        a, b = (device.cupy().empty((4, 6), np.float32) for _ in range(2))
        add_fwd(a, b)
        matmul(device.cupy().empty((4, 4), np.float32), a, b, trans_b=True)
        pair = [device.cupy().empty((2, 4, 6), np.float32) for _ in range(2)]
        matmul(device.cupy().empty((2, 4, 4), np.float32), *pair, trans_b=True)
        assert meter.now["workspace of cuBLAS"] == 32 << 20  # the plan's observer was called too
    assert seen == [
        ("add_kernel", False),
        ("product 4 x 4 x 6", True),
        ("product 2 x 4 x 4 x 6", True),
    ]


def test_the_last_observer_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(_launch, "_launch_gpu", lambda *_: order.append("start"))

    def observer(name):
        def call(event, start):
            order.append(name)
            start()

        return call

    with planning(0):
        x = device.cupy().empty(8, np.float32)
    with observe_launches(observer("a")), observe_launches(observer("b")):
        _launch.launch(_launch_kernel, 1, 32, x)
    _launch.launch(_launch_kernel, 1, 32, x)
    assert order == ["b", "a", "start", "start"]


class _launch_kernel:
    @staticmethod
    def py_func(x): ...


# ----------------------------------------------------------------------------- nothing stays
def test_nothing_is_replaced_and_nothing_stays():
    functions = lambda: (
        [dict(vars(c)) for c in Function.__subclasses__()],
        Block.__call__,
        _launch._launch_gpu,
        matmul,
    )
    before = functions()
    watched()
    with observe_ops(lambda op: contextlib.nullcontext()), observe_launches(print):
        assert [b == a for b, a in zip(before, functions())] == [True] * 4
        assert len(op_observers) == len(launch_observers) == 1
    assert not op_observers and not launch_observers


def test_nothing_stays_after_an_error():
    x = Tensor(np.ones(2, np.float32))

    @contextlib.contextmanager
    def observer(op):
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), observe_ops(observer), observe_launches(print):
        F.silu(x)
    assert not op_observers and not launch_observers
    seen = []
    with observe_ops(lambda op: contextlib.nullcontext(seen.append(op))):
        F.silu(x)
    assert isinstance(seen[0], Op) and seen[0].layer == ""
