"""What the engine says when it is used wrongly, and the in-place changes that it finds."""

import numpy as np
import pytest
from test_autograd import DEVICES, grads, leaf, mul, total

from xtrain import AdamW, ModelConfig, Tensor, Transformer
from xtrain.autograd import Function


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


def test_a_gradient_of_the_wrong_shape_names_the_op():
    class Bad(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, dz):
            return dz, dz[:1]

    with pytest.raises(ValueError, match=r"Bad gave .* \(1,\) for argument 1 of shape \(2,\)"):
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
    with pytest.raises(TypeError, match="only floating point"):
        Tensor(np.arange(3), requires_grad=True)
    assert Tensor([[1.0, 2.0]]).shape == (1, 2)


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


def test_a_changed_parameter_is_found_under_its_hugging_face_name():
    c = ModelConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, max_seq_len=8)
    model = Transformer(c)
    ids = np.arange(8).reshape(2, 4)
    loss = model.loss(ids, ids)
    up = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    up.data *= 1.5
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
