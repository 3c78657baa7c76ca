"""Values that are computed when they are read: what runs in a plain model, and what any other reader gets."""

import contextlib
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from checks import normal

import xtrain
from xtrain import ModelConfig, Tensor, Transformer, no_grad
from xtrain.inspect.gradcheck import check
from xtrain.nn import Module, RMSNorm
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function, inference
from xtrain.nn.deferred import Deferred, Stream
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.nn.model import MLP, Attention, Block
from xtrain.nn.observers import observe_ops

CONFIG = ModelConfig(
    vocab_size=100, dim=128, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=64, hidden_dim=128,
    max_seq_len=32,
)  # fmt: skip
SMALL = ModelConfig(
    vocab_size=11, dim=6, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, hidden_dim=5,
    max_seq_len=8, norm_eps=0.01,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 11, (2, 16))
TARGETS = np.roll(IDS, -1, 1)
EPS = 1e-6


@pytest.fixture(autouse=True)
def every_precision_on_the_host(monkeypatch):
    """NumPy arrays in bf16 and fp8, which the references accept."""
    monkeypatch.setattr(Transformer, "_check_precision", lambda *_: None)


@contextlib.contextmanager
def ops():
    """Inside, the names of the ops that run are appended to the list; the way "backward" as "-name"."""
    names = []

    @contextlib.contextmanager
    def observer(op):
        yield
        if op.name:
            names.append(op.name if op.way == "forward" else f"-{op.name}")

    with observe_ops(observer):
        yield names


def forward_of(model, ids=IDS):
    with ops() as names:
        model.loss(ids, np.roll(ids, -1, 1))
    return [name for name in names if name != "Reshape"]


def leaves(*shapes, dtype=np.float32):
    return [Tensor(normal(i, *shape).astype(dtype), True) for i, shape in enumerate(shapes)]


def value_of(x):
    """Return the Tensor that a module of one's own reads."""
    return x.read() if isinstance(x, Deferred) else x


# ----------------------------------------------------------------------------- what a plain model runs
FIRST = ["Embedding", "AddNormLinear", "QKNormRope", "Attention", "Linear"]
LAST = ["ResidualRMSNorm", "LinearCrossEntropy"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ops_of_a_step(precision):
    model = Transformer(CONFIG, precision=precision)
    with ops() as names:
        model.loss(IDS, TARGETS).backward()
    forward = [*FIRST, "AddNormLinear", "SwiGLULinear", *LAST]
    backward = [f"-{name}" for name in reversed(forward)]
    assert [name for name in names if "Reshape" not in name] == forward + backward


def test_the_ops_of_a_step_in_fp8():
    model = Transformer(CONFIG, precision="fp8")
    first = ["Embedding", "Fp8AddNormLinear", "QKNormRope", "Attention", "Fp8Linear", "Fp8MLP"]
    assert forward_of(model, np.tile(IDS, (4, 1))) == [*first, *LAST]
    with no_grad():
        assert forward_of(model) == [*FIRST, "AddNormLinear", "SwiGLULinear", *LAST]


@pytest.mark.parametrize("recompute, again", [("attention", FIRST[2:4]), ("block", None)])
def test_the_ops_of_a_step_that_recomputes(recompute, again):
    model = Transformer(CONFIG, recompute=recompute)
    with ops() as names:
        model.loss(IDS, TARGETS).backward()
    layer = [*FIRST[1:], "AddNormLinear", "SwiGLULinear"]
    times = Counter(names)
    for name in layer:
        expected = layer.count(name) * (2 if again is None or name in again else 1)
        assert times[name] == expected, name
        assert times[f"-{name}"] == layer.count(name)


def test_the_ops_of_inference():
    with inference(), ops() as names:
        Transformer(CONFIG, trainable=False)(IDS)
    names = [name for name in names if name != "Reshape"]
    expected = [*FIRST, "AddNormLinear", "Linear", "ResidualRMSNorm", "Linear", "Narrow"]
    assert names == expected


def test_adapters_read_the_norm():
    model = AdaptedTransformer(CONFIG, trainable=False)
    model.adapt(Lora(4, 8.0))
    names = forward_of(model)
    mlp = ["ResidualRMSNorm", "LoraLinear", "SwiGLU", "LoraLinear"]
    assert names == ["Embedding", "RMSNorm", "LoraLinear", *FIRST[2:4], "LoraLinear", *mlp, *LAST]


# ----------------------------------------------------------------------------- any reader gets the value
@pytest.mark.parametrize("gate", [F.swiglu, F.geglu])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_that_are_read_in_between_change_no_bit(dtype, gate):
    results = []
    for read in (lambda x: x, value_of):
        leaf, w = leaves((6, 8), (8,))
        delta, v, u = leaves((6, 8), (10, 8), (8, 5), dtype=dtype)
        h = F.cast_gradient(leaf, np.float32)
        n = read(F.rmsnorm(Stream(h, delta, dtype=dtype), w, EPS))
        y = F.linear(read(gate(read(F.linear(n, v)))), u)
        y.backward(normal(8, 6, 8).astype(dtype))
        results.append([y.data, *(x.grad for x in (leaf, delta, w, v, u))])
    for fused, apart in zip(*results):
        np.testing.assert_array_equal(fused, apart)


def test_a_value_is_computed_once_and_only_if_it_is_read():
    gu, u = leaves((3, 8), (5, 4))
    with ops() as names:
        gated = F.swiglu(gu)
        logits = F.logits(gu, Tensor(normal(3, 7, 8)))
        assert isinstance(gated, Deferred) and isinstance(logits, Deferred)
        Stream(gu, gu) + Tensor(normal(1, 3, 8))
    assert names == ["Add"]  # of a stream at most one delta is pending
    with ops() as names:
        first = F.linear(gated, u)
        gated.shape, gated.data, gated.requires_grad  # noqa: B018
        second = F.linear(gated, u)
    assert names == ["SwiGLULinear", "SwiGLU", "Linear"]
    assert np.array_equal(first.data, second.data)


def test_two_products_of_one_norm():
    h, w, v, u = leaves((6, 8), (8,), (10, 8), (10, 8))
    delta = Tensor(normal(9, 6, 8), True)
    with ops() as names:
        n = F.rmsnorm(Stream(h, delta), w, EPS)
        pair = F.linear(n, v), F.linear(n, u)
        y = pair[0] + pair[1]
    assert names == ["ResidualRMSNorm", "Linear", "Linear", "Add"]
    y.backward(normal(8, 6, 10))
    plain = leaves((6, 8), (8,), (10, 8), (10, 8))
    n = F.rmsnorm(plain[0] + Tensor(delta.data), plain[1], EPS)
    (F.linear(n, plain[2]) + F.linear(n, plain[3])).backward(normal(8, 6, 10))
    for ours, want in zip((h, w, v, u), plain):
        np.testing.assert_allclose(ours.grad, want.grad, rtol=1e-5, atol=1e-5)


def test_the_stream_is_a_tensor():
    h, delta = leaves((3, 4), (3, 4))
    stream = Stream(h, delta)
    total = h.data + delta.data
    for y in (stream + delta, delta + stream, stream - -1.0 * delta):
        assert isinstance(y, Stream)
        np.testing.assert_allclose(y.data, total + delta.data)
    np.testing.assert_allclose((2 * stream).data, 2 * total)
    np.testing.assert_allclose((stream + stream).data, 2 * total)
    np.testing.assert_allclose(F.add(stream, h).data, total + h.data)
    assert stream.reshape(-1).shape == (12,) and len(stream) == 3
    with pytest.raises(TypeError, match="only a Tensor or array of its shape"):
        stream + 1
    with pytest.raises(ValueError):
        stream + Tensor(normal(0, 2, 4))


def test_a_float32_delta_of_a_bf16_stream_is_added_exactly():
    h, delta = leaves((3, 4), (3, 4))
    stream = Stream(h, dtype=ml_dtypes.bfloat16) + delta
    assert np.array_equal(stream.data, h.data + delta.data)


# ----------------------------------------------------------------------------- the mode of the place where it was written
def test_a_value_written_without_recording_is_not_recorded():
    gu, u = leaves((3, 8), (5, 4))
    with no_grad():
        gated = F.swiglu(gu)
    y = F.linear(gated, u)
    assert not gated.requires_grad and gated.node is None
    y.backward(normal(0, 3, 5))
    assert gu.grad is None and u.grad is not None


def test_a_value_read_without_recording_is_recorded():
    gu, u = leaves((3, 8), (5, 4))
    gated = F.swiglu(gu)
    with no_grad():
        assert F.linear(gated, u).node is None
        assert gated.node is not None
    gated.backward(normal(0, 3, 4))
    assert gu.grad is not None


def test_a_look_without_recording_keeps_the_gradient_of_the_stream():
    gradients = []
    for look in (False, True):
        h, delta, w, v = leaves((3, 4), (3, 4), (4,), (5, 4))
        stream = Stream(h, delta)
        n = F.rmsnorm(stream, w, EPS)
        if look:
            with no_grad():
                F.linear(n, v).numpy()
                F.linear(F.rmsnorm(stream, w, EPS), v).numpy()
        y = F.linear(n, v)
        y.backward(normal(0, 3, 5))
        gradients.append([x.grad for x in (h, delta, w, v)])
    for plain, looked in zip(*gradients):
        np.testing.assert_allclose(looked, plain, rtol=1e-5, atol=1e-6)


def test_a_value_keeps_the_batch_invariance_of_its_place():
    x, w = leaves((3, 300), (5, 300))
    with xtrain.batch_invariant():
        expected = F.logits(x, w).numpy()
        later = F.logits(x, w)
    assert np.array_equal(later.numpy(), expected)
    expected = F.logits(x, w).numpy()
    later = F.logits(x, w)
    with xtrain.batch_invariant():
        assert np.array_equal(later.numpy(), expected)


def test_values_of_inference_may_be_read_after_weights_have_changed():
    x, w = leaves((3, 300), (5, 300))
    with inference():
        later = F.logits(x, w)
        w.version.count += 1  # as Engine.forget_prefixes of another thread
        assert later.shape == (3, 5)


def test_an_operand_that_was_changed_before_the_value_is_read():
    (gu,) = leaves((3, 8))
    gated = F.swiglu(gu)
    gu.data += 1
    with pytest.raises(RuntimeError, match="operand of a Gated was changed in place"):
        gated.numpy()


# ----------------------------------------------------------------------------- modules of the user's own
class Times(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved
        return dy * b, dy * a


class OwnMLP(MLP):
    """Reads its input twice, and not by a product first."""

    def __call__(self, x):
        return Times.apply(super().__call__(x), x)


class OwnNorm(RMSNorm):
    def __call__(self, x):
        return super().__call__(Times.apply(x, x)) * 0.5


class OwnAttention(Attention):
    def __call__(self, x, sequences):
        return super().__call__(x, sequences) + x


class PostNorm(Block):
    def __call__(self, h, sequences):
        h = h + self.input_layernorm(self.self_attn(h, sequences))
        return h + self.post_attention_layernorm(self.mlp(h))


class Parallel(Block):
    def __call__(self, h, sequences):
        x = self.input_layernorm(h)
        y = self.post_attention_layernorm(h)
        return h + (self.self_attn(x, sequences) + self.mlp(y))


class Scaled(Block):
    """Returns a plain Tensor, not a stream."""

    def __call__(self, h, sequences):
        return super().__call__(h, sequences) * 0.7


class Nothing(Module):
    """A branch that does not read its input."""

    def __call__(self, x, *_):
        return Tensor(np.zeros((IDS[:, :8].size, SMALL.dim), np.float64))


def change(layer, name):
    places = {
        "OwnMLP": lambda: setattr(layer.mlp, "__class__", OwnMLP),
        "OwnNorm": lambda: setattr(layer.post_attention_layernorm, "__class__", OwnNorm),
        "OwnAttention": lambda: setattr(layer.self_attn, "__class__", OwnAttention),
        "PostNorm": lambda: setattr(layer, "__class__", PostNorm),
        "Parallel": lambda: setattr(layer, "__class__", Parallel),
        "Scaled": lambda: setattr(layer, "__class__", Scaled),
        "Nothing": lambda: setattr(layer, "mlp", Nothing()),
    }
    places[name]()


NAMES = ["OwnMLP", "OwnNorm", "OwnAttention", "PostNorm", "Parallel", "Scaled", "Nothing"]


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_replaced_modules(name, recompute):
    """Of every parameter, in float64, against finite differences."""
    model = Transformer(SMALL)
    change(model.model.layers[0], name)
    model.recompute = recompute
    parameters = [p for _, p in model.storage()]

    def loss(*weights):
        for parameter, weight in zip(parameters, weights):
            parameter._data, parameter._grad = weight.data, weight.grad
        return model.loss(IDS[:, :8], TARGETS[:, :8])

    values = [normal(i, *p.shape, scale=0.5).astype(np.float64) for i, p in enumerate(parameters)]
    assert max(check(loss, values, step=3e-6)) < 1e-5


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("OwnMLP", "Nothing", "OwnAttention")]
)
def test_replaced_modules_in_bf16(name):
    """Close to float32, and with a gradient for every parameter."""
    losses = []
    for precision in ("fp32", "bf16"):
        model = Transformer(CONFIG, precision=precision)
        change(model.model.layers[0], name)
        loss = model.loss(IDS, TARGETS)
        loss.backward()
        losses.append(float(loss))
        assert all(p.grad.any() for _, p in model.storage())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_logits_of_ones_own_are_read_by_the_loss():
    class Doubled(Transformer):
        def logits(self, x_NC):
            return super().logits(x_NC) * 2.0

    model = Doubled(CONFIG)
    names = forward_of(model)
    assert names[-3:] == ["Linear", "Scale", "CrossEntropy"]
    same = type("Same", (Transformer,), {"logits": lambda self, x: Transformer.logits(self, x)})
    assert forward_of(same(CONFIG))[-1] == "LinearCrossEntropy"
