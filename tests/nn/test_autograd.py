"""The engine: what is added up, what is recorded, what is freed. (What it refuses: test_autograd_errors.py.)"""

import gc
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import to_host

from xtrain import ModelConfig, Tensor, Transformer, no_grad
from xtrain.device import to_device
from xtrain.inspect.gradcheck import CASES, Draw
from xtrain.kernels.rope import rope_tables
from xtrain.nn import autograd, functions
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function, is_unit
from xtrain.nn.deferred import ResidualRMSNorm

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


class Mul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved
        return dy * b, dy * a


class Sum(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return x.sum().reshape(())

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved
        return dy + 0 * x


mul, total = Mul.apply, Sum.apply


def leaf(*values, device="cpu"):
    return Tensor(to_device(np.array(values, np.float32), device), requires_grad=True)


def grads(*tensors):
    return [to_host(t.grad).tolist() for t in tensors]


# ----------------------------------------------------------------------------- what is added up
@pytest.mark.parametrize("device", DEVICES)
def test_used_twice_adds_up(device):
    x = leaf(1, 2, 3, device=device)
    total(mul(x, x)).backward()
    assert grads(x) == [[2, 4, 6]]


@pytest.mark.parametrize("device", DEVICES)
def test_diamond(device):
    """x feeds two paths that meet: d/dx of (2x)(3x) + 2x is 12x + 2."""
    x = leaf(1, 2, device=device)
    a, b = x * 2.0, 3.0 * x
    total(mul(a, b) + a).backward()
    assert grads(x) == [[14, 26]]


def test_many_diamonds():
    """y = 2 y, thirty times by y + y: walking every path would take 2^30 steps."""
    x = y = leaf(1)
    for _ in range(30):
        y = y + y
    total(y).backward()
    assert grads(x) == [[2**30]]


def test_one_array_as_two_gradients():
    """Add hands one array to both summands; adding to one of them must not change the other."""
    x, z = leaf(1, 1), leaf(5, 7)
    a, b = x * 1.0, z * 1.0
    total((a + b) + a).backward()
    assert grads(x, z) == [[2, 2], [1, 1]]


@pytest.mark.parametrize("device", DEVICES)
def test_leaves_accumulate_over_backward_calls(device):
    x = leaf(1, 2, device=device)
    for _ in range(3):
        total(mul(x, x)).backward()
    assert grads(x) == [[6, 12]]
    x.grad = None
    total(x).backward()
    assert grads(x) == [[1, 1]]


def test_only_leaves_that_want_it_get_a_gradient():
    x, c = leaf(2), Tensor(np.array([5], np.float32))
    y = mul(x, c)
    total(y).backward()
    assert grads(x) == [[5]] and c.grad is None and y.grad is None


class Split(Function):
    """-> x, 2x, 3x"""

    seen = None

    @staticmethod
    def forward(ctx, x):
        return x.copy(), 2 * x, 3 * x

    @staticmethod
    def backward(ctx, *d):
        Split.seen = [dx is not None for dx in d]
        return sum(i * dx for i, dx in zip((1, 2, 3), d) if dx is not None)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (2, 1), (0, 1, 2), (1, 1)])
def test_outputs_that_nothing_used_have_no_gradient(used):
    x = leaf(1, 1)
    outputs = Split.apply(x)
    y = outputs[used[0]]
    for i in used[1:]:
        y = y + outputs[i]
    total(y).backward()
    assert Split.seen == [i in used for i in range(3)]
    assert grads(x) == [[sum(i + 1 for i in used)] * 2]


@pytest.mark.parametrize("use", ["h", "y", "both"])
def test_residual_rmsnorm_with_one_output_unused(use):
    rng = np.random.default_rng(0)
    x, r, w, c = (rng.standard_normal((2, 5)) for _ in range(4))
    w = w[0].copy()
    tensors = [Tensor(a, requires_grad=True) for a in (x, r, w)]
    h, y = ResidualRMSNorm.apply(*tensors, 1e-6)
    {"h": h, "y": y, "both": h + y}[use].backward(c)
    again = [Tensor(a, requires_grad=True) for a in (x, r, w)]
    h = again[0] + again[1]
    y = F.rmsnorm(h, again[2], 1e-6)
    {"h": h, "y": y, "both": h + y}[use].backward(c)
    for ours, plain in zip(tensors, again):
        want = np.zeros_like(ours.data) if plain.grad is None else plain.grad
        np.testing.assert_allclose(ours.grad, want, atol=1e-12)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_qk_norm_rope_with_one_output_unused(unused):
    d = Draw(lambda values: max(values[:2]))  # the second size, every option on
    qkv, q_w, k_w = (
        Tensor(np.random.default_rng(i).standard_normal(shape), requires_grad=True)
        for i, shape in enumerate([(d.M, d.Q), (d.D,), (d.D,)])
    )
    outputs = list(CASES["qk_norm_rope"][1](d, qkv, q_w, k_w))
    del outputs[unused]
    y = total(outputs[0]) + total(outputs[1])
    y.backward()
    columns = qkv.grad.reshape(d.M, d.H + 2 * d.G, d.D)
    parts = [columns[:, : d.H], columns[:, d.H : d.H + d.G], columns[:, d.H + d.G :]]
    assert [bool(np.any(p)) for p in parts] == [i != unused for i in range(3)]


@pytest.mark.parametrize("op", [op for op in CASES if op != "transformer"])
def test_every_input_alone_as_a_leaf_and_as_an_activation(op):
    """The gradient of an input depends neither on which others want one nor on where the input comes from."""
    inputs, call = CASES[op]
    d = Draw(lambda values: max(values[:2]))  # the second size, every option on
    d.pad = 5
    shapes = [tuple(getattr(d, s) for s in i.split(": ")[1].split()) for i in inputs.split(", ")]
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape) for shape in shapes]
    c = None

    def gradients(wanted, wrap):
        nonlocal c
        leaves = [Tensor(v.copy(), requires_grad=i in wanted) for i, v in enumerate(values)]
        out = call(d, *map(wrap, leaves))
        outputs = out if isinstance(out, tuple) else (out,)
        c = c or [np.asarray(rng.standard_normal(y.shape)).astype(y.dtype) for y in outputs]
        y = total(mul(outputs[0], Tensor(c[0])))
        for output, weight in zip(outputs[1:], c[1:]):
            y = y + total(mul(output, Tensor(weight)))
        y.backward()
        return [t.grad for t in leaves]

    want = gradients(range(len(values)), lambda t: t)
    got = gradients(range(len(values)), lambda t: t.reshape(*t.shape))
    for a, b in zip(want, got):
        np.testing.assert_allclose(a, b, atol=1e-12)
    for i in range(len(values)):
        alone = gradients([i], lambda t: t)
        assert all((g is None) == (j != i) for j, g in enumerate(alone))
        np.testing.assert_allclose(alone[i], want[i], atol=1e-12)


# ----------------------------------------------------------------------------- recording
def test_no_grad_concerns_one_thread():
    """A thread that generates text does not stop the recording of the thread that trains."""
    x, inside, leave = Tensor(np.ones(3, np.float32), True), threading.Event(), threading.Event()

    @no_grad()
    def other():
        inside.set()
        leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    y = F.silu(x)
    leave.set()
    thread.join()
    assert y.node is not None


def test_no_grad_records_nothing():
    x = leaf(1, 2)
    with no_grad():
        y = mul(x, x)
        with no_grad():
            pass
        z = mul(y, x)  # still inside the outer one
    assert y.node is None and not y.requires_grad and z.node is None
    with pytest.raises(ZeroDivisionError), no_grad():
        _ = 1 / 0
    assert mul(x, x).node is not None

    @no_grad()
    def decorated():
        return mul(x, x)

    assert decorated().node is None and decorated().node is None


def test_without_a_gradient_to_compute_nothing_is_recorded():
    a = Tensor(np.ones(2, np.float32))
    y = mul(a, a)
    assert y.node is None and not y.requires_grad
    assert leaf(1).detach().requires_grad is False


def test_an_explicit_gradient():
    x = leaf(1, 2)
    mul(x, x).backward(np.array([10, 100], np.float32))
    assert grads(x) == [[20, 400]]


def test_the_unit_gradient_is_known_by_identity():
    seen = []

    class Probe(Function):
        @staticmethod
        def forward(ctx, x):
            return x + 0

        @staticmethod
        def backward(ctx, dy):
            seen.append(is_unit(dy))
            return dy

    x = leaf(3)
    Probe.apply(x).backward()
    Probe.apply(x).backward(np.ones(1, np.float32))
    (Probe.apply(x) * 2.0).backward()
    assert seen == [True, False, False] and grads(x) == [[4]]


def test_a_scaled_cross_entropy():
    logits = np.random.default_rng(0).standard_normal((3, 5))
    targets, inv_count = np.array([1, -100, 4]), np.array([0.5], np.float32)
    results = []
    for factor in (1.0, 3.0):
        x = Tensor(logits.copy(), requires_grad=True)
        loss = F.cross_entropy(x, targets, 5, inv_count)
        (loss if factor == 1 else loss * factor).backward()
        results.append(x.grad)
    np.testing.assert_allclose(results[1], 3 * results[0], rtol=1e-12)


# ----------------------------------------------------------------------------- memory
class Spy(Function):
    """Multiplies by 2, saving its input; on the way back it notes which of the earlier Spies' arrays still live."""

    alive: list = []
    log: list = []

    @staticmethod
    def forward(ctx, x):
        Spy.alive.append(weakref.ref(x))
        ctx.save(x)
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        Spy.log.append([ref() is not None for ref in Spy.alive])
        return dy * 2


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_saved_arrays_die_as_backward_passes_them(no_collector):
    Spy.alive, Spy.log = [], []
    x = leaf(1, 2)
    y = x
    for _ in range(4):
        y = Spy.apply(y)
    assert [ref() is not None for ref in Spy.alive] == [True] * 4
    y = total(y)
    y.backward()
    # x, the leaf, lives on; the activation of a Spy is dead when the next one runs
    assert Spy.log == [
        [True, True, True, True],
        [True, True, True, False],
        [True, True, False, False],
        [True, False, False, False],
    ]
    assert [ref() is not None for ref in Spy.alive] == [True, False, False, False]
    assert grads(x) == [[16, 16]]


def test_gradients_die_as_backward_passes_them(no_collector):
    refs, counts = [], []

    class Probe(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            counts.append(sum(ref() is not None for ref in refs))
            dx = dy * 1
            refs.append(weakref.ref(dx))
            return dx

    y = leaf(*range(100))
    for _ in range(6):
        y = Probe.apply(y)
    total(y).backward()
    assert max(counts) <= 1, counts  # the gradient that is handed over, and no older one


def test_what_no_op_saves_is_freed_in_the_forward_pass(no_collector):
    refs = []
    y = leaf(1, 2)
    for _ in range(3):
        y = y + y
        refs.append(weakref.ref(y.data))
    assert [ref() is not None for ref in refs] == [False, False, True]
    y.backward(np.ones(2, np.float32))


def test_no_reference_cycles(no_collector):
    """Whatever is dropped is freed at once: with big arrays the garbage collector would come too late."""
    c = ModelConfig(vocab_size=11, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, max_seq_len=8)
    model = Transformer(c)
    ids = np.arange(8).reshape(2, 4)
    model.loss(ids, ids).backward()  # whatever is cached is cached now
    gc.collect()

    loss = model.loss(ids, ids)
    node = weakref.ref(loss)
    loss.backward()
    del loss
    assert node() is None and gc.collect() == 0
    loss = model.loss(ids, ids)  # never used for a backward
    del loss
    assert gc.collect() == 0
    del model, ids
    assert gc.collect() == 0


def test_nothing_of_a_step_is_left_after_it(no_collector):
    c = ModelConfig(vocab_size=11, dim=8, n_layers=2, n_heads=2, max_seq_len=8)
    model = Transformer(c)
    ids = np.arange(8).reshape(2, 4)

    def tensors_and_nodes():
        gc.collect()
        kinds = (Tensor, autograd.Node, autograd.Context, autograd.Edge)
        return sum(type(o) in kinds for o in gc.get_objects())

    model.loss(ids, ids).backward()
    before = tensors_and_nodes()
    loss = model.loss(ids, ids)
    loss.backward()
    assert tensors_and_nodes() <= before + 2  # the loss and the node that made it


def test_deep_graphs():
    """Neither backward nor freeing may recurse: Python allows 1000 levels."""
    assert sys.getrecursionlimit() <= 2000
    x = y = leaf(1)
    for _ in range(3000):
        y = y + x
    total(y).backward()
    assert grads(x) == [[3001]]
    for _ in range(50_000):  # and freed without a backward
        y = y * 1.0
    del y


# ----------------------------------------------------------------------------- the rest of Tensor
@pytest.mark.parametrize("device", DEVICES)
def test_tensor_basics(device):
    x = leaf(1, 2, 3, 4, device=device)
    assert (x.shape, x.ndim, x.size, len(x), x.dtype) == ((4,), 1, 4, 4, np.float32)
    y = x.reshape(2, -1)
    assert y.shape == (2, 2) and y.reshape((4, 1)).shape == (4, 1)
    assert total(x).item() == float(total(x)) == 10.0 and total(x).shape == ()
    assert np.array_equal((2 * x + x).numpy(), [3, 6, 9, 12])
    assert "made by Reshape" in repr(y) and "made by" not in repr(x)
    assert x.detach().data is x.data and not x.detach().requires_grad


def test_a_tensor_of_one_number_is_a_number():
    """As in PyTorch."""
    loss = total(leaf(1, 0.25))
    assert (f"{loss:.3f}", f"{loss}", f"{loss:>6.1f}") == ("1.250", "1.25", "   1.2")
    assert (int(loss), float(loss), bool(loss), bool(Tensor(np.int64(0)))) == (1, 1.25, True, False)
    assert loss < 2 and loss <= 1.25 and loss > 1 and not loss >= 2
    assert min(total(leaf(2)), loss) is loss and sum([loss, loss]).item() == 2.5
    assert "abc"[Tensor(np.int64(2))] == "c" and list(range(Tensor(np.int32(2)))) == [0, 1]
    for wrong in (lambda: len(loss), lambda: "abc"[loss], lambda: f"{leaf(1, 2):.3f}"):
        with pytest.raises(TypeError):
            wrong()
    for wrong in (bool, int, float, lambda x: x < 2):
        with pytest.raises(ValueError, match=r"one element|size 1"):
            wrong(leaf(1, 2))
    assert f"{leaf(1)}" == repr(leaf(1)) == "Tensor(array([1.], dtype=float32), requires_grad=True)"


def test_other_libraries_share_the_memory():
    """DLPack: read and written without a copy."""
    model = Transformer(ModelConfig(vocab_size=30, dim=8, n_layers=1, n_heads=1))
    for _, p in [*model.named_parameters(), *model.storage(), (None, Tensor(np.ones(3)))]:
        torch.from_dlpack(p)[0] = 5
        array = np.from_dlpack(p)
        assert np.shares_memory(array, p.data) and (p.data[0] == 5).all()
        array[0] = 6
        assert (p.data[0] == 6).all()
        assert not np.shares_memory(np.from_dlpack(p, copy=True), p.data)
    with pytest.raises(BufferError, match=r"lose its gradient: use \.detach"):
        np.from_dlpack(total(leaf(1)))


def test_the_engine_stays_short():
    assert len(Path(autograd.__file__).read_text().splitlines()) < 300


def packed_attention(qkv, more, dtype=np.float64):
    """-> gradient of packed q, k, v through attention; more: v is used a second and a third time"""
    B, T, H, G, D = 2, 3, 2, 1, 4
    tables = rope_tables(D, T, 100.0)
    x = Tensor(qkv.astype(dtype), requires_grad=True)
    q, k, v = F.qk_norm_rope(x, None, None, *tables, H, G, T, 1e-6, None)
    q, k, v4 = (y.reshape(B, T, -1, D) for y in (q, k, v))
    o = F.attention(q, k, v4, 0.5, True)
    if more:
        o = o + F.attention(q, k, v4, 0.5, False)
        o = o + F.attention(q, k, v.reshape(B, T, -1, D), 0.25, True)
    o.backward(np.random.default_rng(1).standard_normal(o.shape).astype(dtype))
    return x.grad


@pytest.mark.parametrize("more", [False, True])
def test_the_gradient_of_v_is_written_where_it_belongs(monkeypatch, more):
    """Its first user writes it into the packed gradient; what others give is added. The values are those without that."""
    qkv = np.random.default_rng(0).standard_normal((6, 16))
    seen = []
    same_place = functions.same_place

    def noted(a, b):
        seen.append(same_place(a, b))
        return seen[-1]

    monkeypatch.setattr(functions, "same_place", noted)
    got = packed_attention(qkv, more)
    assert seen == [not more]
    monkeypatch.setattr(functions.QKNormRope, "gradient_view", staticmethod(lambda ctx, i: None))
    assert np.array_equal(got, packed_attention(qkv, more)) and seen[1:] == [False]
