"""The captured step: the same bits as eager steps, no look at a value, a new shape captures anew."""

from dataclasses import replace

import numpy as np
import pytest

from xtrain import AdamW, ModelConfig, Transformer
from xtrain.device import cupy, to_device, to_numpy
from xtrain.kernels.elementwise import scale_fwd
from xtrain.nn.modules import Linear
from xtrain.nn.optim import clip

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(
    vocab_size=100, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, max_seq_len=32
)  # fmt: skip


def batch(seed, B=3, T=17):
    ids = np.random.default_rng(seed).integers(0, 100, (B, T + 1)).astype(np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def make(precision):
    model = Transformer(CONFIG, seed=1, device="gpu", precision=precision)
    optimizer = AdamW(model, lr=1e-2)

    def compute(ids, targets, hyper):
        model.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        norm, factor = clip(model, 1.0)
        optimizer.apply(hyper, factor)
        return loss.data.reshape(1), norm

    return model, optimizer, compute


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graph_and_eager_give_the_same_bits(precision):
    from xtrain.nn.cuda_graph import Graphed

    results = []
    for graph in (False, True):
        model, optimizer, compute = make(precision)
        run = (
            Graphed(compute, model.arena)
            if graph
            else lambda *x, f=compute: f(*(to_device(a, "gpu") for a in x))
        )
        out = []
        for step in range(8):
            shape = {"T": 9} if step == 5 else {}  # another shape in between
            if step == 6:  # weights assigned after the capture
                _, weight = next(model.storage())
                weight.data = weight.data * np.float32(0.5)
            out += [to_numpy(x).copy() for x in run(*batch(step, **shape), optimizer.advance())]
        results.append((out, to_numpy(model.arena.weights), to_numpy(optimizer.v)))
        if graph:
            # eager calls; the step of the other shape came once
            assert sorted(r.calls for r in run.recordings.values()) == [1, 2]
            assert [r.graph is not None for r in run.recordings.values()] == [True, False]
    (eager, *eager_state), (captured, *captured_state) = results
    assert all(a.tobytes() == b.tobytes() for a, b in zip(eager, captured))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(eager_state, captured_state))
    assert np.isfinite(eager_state[0]).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("more", [{}, dict(tie_embeddings=True, qk_norm=True)], ids=str)
def test_a_captured_step_reads_no_gradient_of_the_step_before(more, precision):
    """Nor does an eager one: with NaN in all gradients before every call, both give the same bits."""
    from xtrain.nn.cuda_graph import Graphed

    results = []
    for graph in (False, True):
        model = Transformer(replace(CONFIG, **more), seed=1, device="gpu", precision=precision)
        model.spare = Linear(5, 3, 0.1)  # which no step uses
        model.renew_arena(seed=1)
        model.model.layers[1].mlp.down_proj.weight.requires_grad = False
        optimizer = AdamW(model, lr=1e-2)

        def compute(ids, targets, hyper, model=model, optimizer=optimizer):
            model.zero_grad()
            for i in range(2):  # micro-batches
                loss = model.loss(ids[i : i + 1], targets[i : i + 1])
                (loss * 0.5).backward()
            norm, factor = clip(model, 1.0)
            optimizer.apply(hyper, factor)
            return loss.data.reshape(1), norm

        run = Graphed(compute, model.arena) if graph else compute
        out = []
        for step in range(6):
            model.arena.grads.fill(np.nan)
            inputs = [to_device(x, "gpu") for x in (*batch(step, B=2), optimizer.advance())]
            out += [to_numpy(x).copy() for x in run(*inputs)]
            out.append(to_numpy(model.arena.grads).copy())
        results.append([*out, to_numpy(model.arena.weights), to_numpy(optimizer.v)])
        if graph:
            assert [r.graph is not None for r in run.recordings.values()] == [True]
    assert all(np.isfinite(x).all() and x.any() for x in results[0])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results))


def test_a_graph_that_zeroes_and_one_that_adds():
    """Replayed in any order, with eager calls between."""
    from xtrain.nn.cuda_graph import Graphed

    model, _, _ = make("fp32")
    ids, targets = (to_device(x, "gpu") for x in batch(0))

    def adds(ids, targets):
        loss = model.loss(ids, targets)
        loss.backward()
        return (loss.data.reshape(1),)

    def zeroes(ids):
        model.zero_grad()
        return (ids,)

    add, zero = Graphed(adds, model.arena), Graphed(zeroes, model.arena)
    for _ in range(4):  # both are captured
        zero(ids), add(ids, targets)
    once = to_numpy(model.arena.grads).copy()
    add(ids, targets)
    assert once.any()
    np.testing.assert_allclose(to_numpy(model.arena.grads), 2 * once, rtol=1e-5, atol=1e-7)
    zero(ids)
    assert not to_numpy(model.arena.grads).any()
    adds(ids, targets)  # eagerly
    assert np.array_equal(to_numpy(model.arena.grads), once)
    model.arena.grads.fill(np.nan)
    model.zero_grad()  # eagerly: the replay must neither read the NaN nor leave its gradients unwritten
    add(ids, targets)
    assert np.array_equal(to_numpy(model.arena.grads), once)
    zero(ids), add(ids, targets)
    assert np.array_equal(to_numpy(model.arena.grads), once)


def test_a_step_that_looks_at_a_value_cannot_be_captured():
    """The capture is the proof that a training step copies nothing to the host and never waits."""
    from xtrain.nn.cuda_graph import Graphed

    def looks(x):
        y = scale_fwd(x, 2.0)
        return (scale_fwd(y, float(y[0].get())),)

    run, x = Graphed(looks), np.ones(4, np.float32)
    run(x), run(x)  # eager: allowed
    with pytest.raises((RuntimeError, cupy().cuda.runtime.CUDARuntimeError), match="captur"):
        run(x)


def test_results_follow_the_inputs():
    from xtrain.nn.cuda_graph import Graphed

    run = Graphed(lambda x, y: (scale_fwd(x, 3.0),))
    for i in range(6):
        x = np.full(5, i, np.float32)
        given = to_device(x, "gpu") if i % 2 else x
        assert np.array_equal(to_numpy(run(given, x)[0]), 3 * x)
