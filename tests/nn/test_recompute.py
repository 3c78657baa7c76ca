"""Activations computed again in backward: the same bits, fewer of them kept."""

import numpy as np
import pytest
from checks import GPU, normal, same_bytes, to_host

from xtrain.config import ModelConfig, TrainConfig
from xtrain.device import cupy, to_device
from xtrain.errors import UserError
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.cross_entropy import count_targets
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function, Tensor, no_grad
from xtrain.nn.deferred import ResidualRMSNorm, Stream
from xtrain.nn.model import Transformer
from xtrain.nn.recompute import recompute
from xtrain.training.memory_plan import saved_bytes

DEVICE = "gpu" if GPU else "cpu"
PRECISIONS = ["fp32", "bf16"] if GPU else ["fp32"]
MODES = ("none", "attention", "block")
SHAPE = dict(vocab_size=61, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48)


def make(mode, precision="fp32", **more):
    model = Transformer(
        ModelConfig(**SHAPE, max_seq_len=16, **more), 3, DEVICE, precision, recompute=mode
    )
    for p in (p for _, p in model.storage() if p.data.ndim == 1):
        p.data[...] = 1.5  # norm weights that do something
    return model


def batch(B=4, T=16):
    ids = np.random.default_rng(5).integers(0, SHAPE["vocab_size"], (2, B, T))
    return ids.astype(np.int32)


def gradients(model, micro_batch):
    """-> (losses, all gradients), added up over micro-batches"""
    ids, targets = batch()
    inv_count = count_targets(model._to_device(targets.reshape(-1)))
    model.zero_grad()
    losses = []
    for i in range(0, len(ids), micro_batch):
        part = slice(i, i + micro_batch)
        loss = model.loss(ids[part], targets[part], inv_count)
        loss.backward()
        losses.append(loss.item())
    return losses, to_host(model.arena.grads).copy()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro_batch", [4, 2])
def test_gradients_are_the_same_bits(precision, qk_norm, tied, micro_batch):
    kind = dict(qk_norm=qk_norm, tie_embeddings=tied)
    losses, plain = gradients(make("none", precision, **kind), micro_batch)
    assert np.abs(plain).max() > 0
    for mode in MODES[1:]:
        again, grads = gradients(make(mode, precision, **kind), micro_batch)
        assert again == losses, mode
        assert same_bytes(grads, plain), mode


def test_every_mode_keeps_less():
    ids, targets = batch()
    kept = [saved_bytes(make(mode).loss(ids, targets)) for mode in MODES]
    assert kept[0] > 1.2 * kept[1] and kept[1] > 1.5 * kept[2], kept


def test_a_block_keeps_two_arrays():
    """The residual stream and delta: 2 N C numbers for each block but the first, which has no delta."""
    ids, targets = batch()
    sizes = []
    for layers in (2, 5):
        config = ModelConfig(**(SHAPE | {"n_layers": layers}), max_seq_len=16)
        model = Transformer(config, device=DEVICE, recompute="block")
        sizes.append(saved_bytes(model.loss(ids, targets)))
    assert sizes[1] - sizes[0] == 3 * 2 * ids.size * SHAPE["dim"] * 4


def test_the_mode_may_change_at_any_time():
    model = make("none")
    _, plain = gradients(model, 4)
    model.recompute = "block"
    _, again = gradients(model, 4)
    assert same_bytes(plain, again)


def test_without_recording_nothing_is_kept():
    model = make("block")
    with no_grad():
        loss = model.loss(*batch())
    assert loss.node is None
    assert loss.item() == make("none").loss(*batch()).item()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_the_ops_make_again_is_what_they_had(precision):
    """Norm and product, SwiGLU and product in one op or apart: the same bits of the results and of all gradients."""
    dtype = np.float32 if precision == "fp32" else BFLOAT16
    place = lambda a, dtype=np.float32: to_device(a.astype(dtype), DEVICE)
    results = []
    for joined in (True, False):
        x, r, w, v, u = (
            Tensor(place(normal(i, *shape), kind), requires_grad=i > 0)
            for i, (shape, kind) in enumerate(
                [((6, 16), np.float32), ((6, 16), dtype), ((16,), np.float32), ((48, 16), dtype), ((16, 24), dtype)]
            )
        )  # fmt: skip
        if joined:
            stream = Stream(x, r, dtype=dtype)
            z = F.linear(F.swiglu(F.linear(F.rmsnorm(stream, w, 1e-6), v)), u)
            h = stream.h
        else:
            h, y = ResidualRMSNorm.apply(x, r, w, 1e-6)
            gated = F.swiglu(F.linear(y, v)).read()
            z = F.linear(gated, u)
        z.backward(place(normal(9, 6, 16), dtype))
        results.append(
            [to_host(a).tobytes() for a in (h.data, z.data, *(t.grad for t in (r, w, v, u)))]
        )
    assert results[0] == results[1]


# ----------------------------------------------------------------------------- the function itself
def two(x, y, w):
    """Two outputs, of which callers may use one; y is used twice."""
    return F.linear(x, w), F.silu(y) + y


def run(call, use, seed=7):
    x, y, w = (Tensor(normal((seed, i), 5, 5), requires_grad=True) for i in range(3))
    a, b = call(lambda x, y: two(x, y, w), x * 2.0, y)
    out = {"both": lambda: a + b, "first": lambda: a * 3.0, "second": lambda: b * 3.0}[use]()
    out.backward(normal(11, 5, 5))
    return [None if t.grad is None else t.grad.tobytes() for t in (x, y, w)]


@pytest.mark.parametrize("use", ["both", "first", "second"])
def test_several_inputs_and_outputs(use):
    plain = run(lambda f, *inputs: f(*inputs), use)
    again = run(recompute, use)
    nothing = np.zeros((5, 5), np.float32).tobytes()
    assert [g or nothing for g in again] == [g or nothing for g in plain]


def test_recompute_within_recompute():
    nested = lambda f, *inputs: recompute(lambda *x: recompute(f, *x), *inputs)
    assert run(nested, "both") == run(recompute, "both")


def test_f_runs_twice_and_its_second_run_is_recorded():
    calls = []

    class Count(Function):
        @staticmethod
        def forward(ctx, x):
            calls.append("forward")
            return x.copy()

        @staticmethod
        def backward(ctx, dy):
            calls.append("backward")
            return dy

    x = Tensor(normal(1, 3), requires_grad=True)
    y = recompute(Count.apply, x)
    assert calls == ["forward"]
    with no_grad():  # also where the caller records nothing
        y.backward(normal(2, 3))
    assert calls == ["forward", "forward", "backward"]
    assert same_bytes(x.grad, normal(2, 3))


def test_inputs_without_gradient():
    w = Tensor(normal(3, 2, 4), requires_grad=True)
    x = Tensor(normal(4, 3, 4))
    recompute(lambda x: F.linear(x, w), x).backward(normal(5, 3, 2))
    assert w.grad is not None and x.grad is None


def test_an_input_changed_before_backward_is_noticed():
    x = Tensor(normal(6, 3), requires_grad=True)
    y = recompute(F.silu, x)
    x.data[0] = 9.0
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward(normal(7, 3))


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match="none, attention or block"):
        make("blocks")
    assert TrainConfig().recompute == "none"


# ----------------------------------------------------------------------------- on the GPU
@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_in_a_captured_step(mode):
    from xtrain.nn.cuda_graph import Graphed

    def steps(wrap, mode):
        model = make(mode, "fp32")

        def compute(ids, targets):
            model.zero_grad()
            model.loss(ids, targets).backward()
            return (model.arena.grads.copy(),)

        run = wrap(compute, model.arena)
        ids, targets = map(cupy().asarray, batch())
        return [run(ids, targets)[0].get().tobytes() for _ in range(4)]  # the third is captured

    assert steps(Graphed, mode) == steps(lambda f, arena: f, "none")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_peak_memory_falls(precision):
    config = ModelConfig(
        vocab_size=512, dim=256, n_layers=6, n_heads=8, head_dim=32, max_seq_len=512
    )
    ids = np.zeros((8, 512), np.int32)
    peaks = []
    for mode in MODES:
        pool = cupy().cuda.MemoryPool()
        with cupy().cuda.using_allocator(pool.malloc):
            model = Transformer(config, None, "gpu", precision, recompute=mode)
            model.loss(ids, ids).backward()
            peaks.append(pool.total_bytes())
        del model
    assert peaks[0] > 1.05 * peaks[1] and peaks[1] > 1.2 * peaks[2], peaks
