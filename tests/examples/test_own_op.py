"""examples/own_op.py, the example of lessons/howto/add_an_op.md. The tests of every op look like these."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import assert_as_good, assert_directional, normal, sentinels, to_host, to_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from own_op import (
    BLOCK,
    relu_squared,
    relu_squared_bwd,
    relu_squared_bwd_ref,
    relu_squared_fwd,
    relu_squared_fwd_naive_kernel,
    relu_squared_ref,
)

from xtrain.inspect import gradcheck
from xtrain.kernels.runtime.launch import empty_like, launch
from xtrain.nn.autograd import Tensor

BF16 = ml_dtypes.bfloat16
SHAPES = [(1,), (3, 5), (4097,)]


# [start:calculus]
def test_reference_against_calculus():
    x, dy = normal(1, 3, 5).astype(np.float64), normal(2, 3, 5).astype(np.float64)
    f = lambda x: float((relu_squared_ref(x) * dy).sum())
    assert_directional(f, (x,), (relu_squared_bwd_ref(dy, x),))


# [end:calculus]


# [start:kernel]
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_against_the_reference(shape, dtype):
    x, dy = normal(1, *shape, scale=4.0).astype(dtype), normal(2, *shape).astype(dtype)
    x32, dy32 = x.astype(np.float32), dy.astype(np.float32)
    x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
    y = relu_squared_fwd(to_kernel(x))  # to_kernel: the GPU if there is one, else the simulator
    assert_as_good(y, relu_squared_ref(x64), relu_squared_ref(x32).astype(dtype), what="y")
    dx = relu_squared_bwd(to_kernel(dy), to_kernel(x))
    exact, rounded = relu_squared_bwd_ref(dy64, x64), relu_squared_bwd_ref(dy32, x32).astype(dtype)
    assert_as_good(dx, exact, rounded, what="dx")


# [end:kernel]


def test_the_naive_kernel():
    x = to_kernel(normal(1, 300))
    y = empty_like(x)
    launch(relu_squared_fwd_naive_kernel, -(-300 // BLOCK), BLOCK, y, x)
    np.testing.assert_array_equal(to_host(y), to_host(relu_squared_fwd(x)))


# [start:rest]
def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch):
    x, dy = to_kernel(normal(1, 4097)), to_kernel(normal(2, 4097))
    with sentinels(monkeypatch):
        y, dx = relu_squared_fwd(x), relu_squared_bwd(dy, x)
    assert np.array_equal(to_host(y), to_host(relu_squared_fwd(x)))
    assert np.array_equal(to_host(dx), to_host(relu_squared_bwd(dy, x)))


def test_gradcheck():
    assert max(gradcheck.check(relu_squared, [normal(1, 4, 6).astype(np.float64)])) < 1e-6


def test_against_pytorch():
    x, dy = normal(1, 6, 4), normal(2, 6, 4)
    theirs = torch.tensor(x, requires_grad=True)
    theirs.relu().square().backward(torch.tensor(dy))
    ours = Tensor(x, requires_grad=True)
    relu_squared(ours).backward(dy)
    np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-6)


def test_bad_input():
    with pytest.raises(TypeError, match="x is int32"):
        relu_squared_fwd(np.ones(3, np.int32))
    with pytest.raises(ValueError, match=r"dy has shape \(2,\), expected \(3\)"):
        relu_squared_bwd(np.ones(2, np.float32), np.ones(3, np.float32))


# [end:rest]
