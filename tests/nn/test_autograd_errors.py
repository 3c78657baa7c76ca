"""What the engine says when it is used wrongly, and the in-place changes that it finds."""

import numpy as np
import pytest
from checks import to_host
from test_autograd import DEVICES, grads, leaf, mul, total

from xtrain import AdamW, ModelConfig, Tensor, Transformer
from xtrain.device import to_device
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.cross_entropy import count_targets
from xtrain.nn import functional as F
from xtrain.nn import modules as nn
from xtrain.nn.autograd import Function
from xtrain.simulator import sim


# ----------------------------------------------------------------------------- errors
def test_backward_twice():
    x = leaf(1, 2)
    y = mul(x, x)
    loss = total(y)
    loss.backward()
    with pytest.raises(
        RuntimeError, match=r"backward was called twice through Sum.*run forward again"
    ):
        loss.backward()
    with pytest.raises(RuntimeError, match="twice through Mul"):
        total(y).backward()
    assert grads(x) == [[2, 4]]


def test_backward_needs_a_graph_and_a_scalar():
    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        x.backward()
    with pytest.raises(ValueError, match=r"\(2,\) needs a gradient"):
        mul(x, x).backward()
    with pytest.raises(ValueError, match=r"gradient has shape \(3,\), the tensor \(2,\)"):
        mul(x, x).backward(np.ones(3, np.float32))
    mul(leaf(3), leaf(4)).backward()  # one element, shape (1,)


def bad(gradients):
    """-> an op x + y with this backward"""

    class Bad(Function):
        forward = staticmethod(lambda ctx, x, y: x + y)
        backward = staticmethod(lambda ctx, dz: gradients(dz))

    return Bad


def test_a_gradient_of_the_wrong_shape_names_the_op():
    Bad = bad(lambda dz: (dz, dz[:1]))
    with pytest.raises(ValueError, match=r"Bad returned .* \(1,\) for argument 1 of shape \(2,\)"):
        total(Bad.apply(leaf(1, 2), leaf(3, 4))).backward()


def test_shapes_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"add: b has shape \(3\), expected \(2\)|add: b has shape \(3,\)"
    ):
        _ = leaf(1, 2) + leaf(1, 2, 3)
    x = leaf(1, 2)
    with pytest.raises(ValueError, match=r"\(2,\) cannot hold \(3,\)"):
        x.data = np.ones(3, np.float32)


def test_what_a_tensor_cannot_hold():
    with pytest.raises(TypeError, match="detach"):
        Tensor(leaf(1))
    with pytest.raises(TypeError, match="floating-point numbers if it has a gradient"):
        Tensor(np.arange(3), requires_grad=True)
    assert Tensor([[1.0, 2.0]]).shape == (1, 2)


@pytest.mark.parametrize("given", [1, 3])
def test_a_gradient_for_every_argument(given):
    """One that is forgotten would leave a parameter as it is, without a word."""
    Bad = bad(lambda dz: (dz,) * given)
    with pytest.raises(ValueError, match=f"Bad returned {given} gradients for 2 arguments"):
        total(Bad.apply(leaf(1, 2), leaf(3, 4))).backward()
    if given == 1:  # y needs none
        x = leaf(1, 2)
        total(Bad.apply(x, np.ones(2, np.float32))).backward()
        assert grads(x) == [[1, 1]]


def test_a_gradient_of_any_layout_reaches_a_leaf():
    class Transposed(Function):
        @staticmethod
        def forward(ctx, x):
            return x.T.copy()

        @staticmethod
        def backward(ctx, dy):
            return dy.T

    x = leaf([1, 2, 3], [4, 5, 6])
    Transposed.apply(x).backward(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert grads(x) == [[[0, 2, 4], [1, 3, 5]]]


def test_numpy_and_tensors():
    x, ones = leaf(1, 2), np.ones(2, np.float32)
    assert np.array_equal((ones + x).data, [2, 3]) and (ones + x).requires_grad
    assert np.array_equal((np.float64(2) * x).data, [2, 4])
    for wrong in (lambda: ones * x, lambda: x * x, lambda: x * leaf(2), lambda: x * ones):
        with pytest.raises(TypeError, match="multiplied by a number"):
            wrong()  # the second factor would get no gradient
    with pytest.raises(TypeError, match="not 1"):
        _ = 1 + x
    for wrong in (lambda: np.asarray(x), lambda: np.array([x, x]), lambda: mul(x, x).backward(x)):
        with pytest.raises(TypeError, match="a Tensor is not an array"):
            wrong()
    with pytest.raises(TypeError, match="__array_ufunc__"):
        np.exp(x)
    with pytest.raises(ValueError, match=r"gradient has shape \(\), the tensor \(2,\)"):
        mul(x, x).backward(1.0)
    with pytest.raises(TypeError, match="a Tensor holds numbers"):
        Tensor(None)  # what a forward without return gives


def test_differences_and_quotients():
    x, y = leaf(1, 2), leaf(5, 3)
    z = -x / 4 - y
    assert np.array_equal(z.data, [-5.25, -3.5])
    total(z).backward()
    assert grads(x, y) == [[-0.25, -0.25], [-1, -1]]


def test_a_number_where_an_array_is_expected():
    with pytest.raises(TypeError, match=r"inv_count must be an array, got 0\.5"):
        F.cross_entropy(leaf([1, 2], [3, 4]), np.array([0, 1]), 2, 0.5)


def test_types_are_not_mixed_in_a_product():
    w = Tensor(np.ones((2, 2), np.float32), requires_grad=True)
    with pytest.raises(TypeError, match=r"float64 times float32 .* NumPy scalars"):
        F.linear(Tensor(w.data * np.sqrt(2.0)), w)


@pytest.mark.parametrize("device", DEVICES)
def test_ops_leave_their_inputs_as_they_are(device):
    """Cross-entropy and softmax work in place, in copies: a second term of the loss may read the same logits."""
    x, targets = leaf([1, 2, 3], [3, 1, 2], device=device), to_device(np.array([0, 1]), device)
    before = to_host(x.data).copy()
    F.cross_entropy(x, targets, 3, count_targets(targets))
    F.causal_softmax(x.reshape(1, 2, 3), 2, 1.0, False)
    assert np.array_equal(to_host(x.data), before)


# ----------------------------------------------------------------------------- in-place changes
def _assign(x):
    x.data[...] = 7


def _one_element(x):
    x.data[0] += 1


def _add(x):
    x.data += 1


def _item(x):
    x[1:] = 0


def _replace(x):
    x.data = x.data * 2


@pytest.mark.parametrize("change", [_assign, _one_element, _add, _item, _replace])
@pytest.mark.parametrize("n", [3, 1000])
def test_a_change_of_a_saved_array_is_found(change, n):
    x = Tensor(np.linspace(1, 2, n, dtype=np.float32), requires_grad=True)
    y = total(mul(x, x))
    change(x)
    with pytest.raises(
        RuntimeError, match=rf"shape \({n},\) that (Sum|Mul) saved was changed in place"
    ):
        y.backward()


@pytest.mark.parametrize("change", [_assign, _add, _item, _replace])
def test_a_change_of_a_large_saved_array_is_found(change):
    x = Tensor(np.linspace(1, 2, 5000, dtype=np.float32).reshape(50, 100), requires_grad=True)
    y = total(mul(x, x))
    change(x)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_a_changed_activation_is_found():
    x = leaf(1, 2)
    a = x * 2.0
    y = total(mul(a, a))
    a.data[0] = 9
    with pytest.raises(RuntimeError, match="Mul saved"):
        y.backward()


def test_what_was_not_saved_may_change():
    x = leaf(1, 2)
    y = x + x
    x.data += 5
    y.backward(np.ones(2, np.float32))
    assert grads(x) == [[2, 2]]
    z = mul(x, x)
    z.backward(np.ones(2, np.float32))
    x.data += 1  # after backward everything may


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_step_between_forward_and_backward_is_found(device):
    c = ModelConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, max_seq_len=8)
    model = Transformer(c, device=device)
    ids = np.arange(8).reshape(2, 4)
    optimizer = AdamW(model, 1e-3)
    model.loss(ids, ids).backward()
    loss = model.loss(ids, ids)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place before backward"):
        loss.backward()
    model.loss(ids, ids).backward()


def test_a_bf16_copy_that_an_optimizer_step_wrote_is_found():
    """Where no checksum is taken: the ops are given the copy, the optimizer is known by the float32 weights."""
    model = nn.Linear(4, 3, 0.1)
    model.arena = model.make_arena("sim", 0, bf16=True)
    model.arena.refresh()
    x, dy = (sim(np.ones(shape).astype(BFLOAT16)) for shape in ((2, 4), (2, 3)))
    y = model(Tensor(x))
    model.weight.data = model.weight.data + 1
    model.arena.refresh()
    with pytest.raises(
        RuntimeError, match="shape \\(3, 4\\) that Linear saved was changed in place"
    ):
        y.backward(dy)


def test_a_changed_parameter_is_found_under_its_hugging_face_name():
    c = ModelConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, max_seq_len=8)
    model = Transformer(c)
    ids = np.arange(8).reshape(2, 4)
    loss = model.loss(ids, ids)
    up = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    up.data *= 1.5
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
