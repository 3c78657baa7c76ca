"""The captured step: the same bits as eager steps, no look at a value, a new shape captures anew."""

import numpy as np
import pytest

from xtrain import AdamW, ModelConfig, Transformer
from xtrain.device import cupy, to_device, to_numpy
from xtrain.kernels.elementwise import scale_fwd
from xtrain.optim import clip

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
    from xtrain.graph import Graphed

    results = []
    for graph in (False, True):
        model, optimizer, compute = make(precision)
        run = (
            Graphed(compute)
            if graph
            else lambda *x, f=compute: f(*(to_device(a, "gpu") for a in x))
        )
        out = []
        for step in range(8):
            shape = {"T": 9} if step == 5 else {}  # another shape in between
            if step == 6:  # weights that somebody gives, when the step has long been captured
                _, weight = next(model.storage())
                weight.data = weight.data * np.float32(0.5)
            out += [to_numpy(x).copy() for x in run(*batch(step, **shape), optimizer.advance())]
        results.append((out, to_numpy(model.arena.weights), to_numpy(optimizer.v)))
        if graph:
            # eager calls; the step of the other shape came once
            assert sorted(r.calls for r in run.recordings.values()) == [1, 2]
            assert [r.graph is not None for r in run.recordings.values()] == [True, False]
    assert all(np.array_equal(a, b) for a, b in zip(*(r[0] for r in results)))
    assert np.array_equal(results[0][1], results[1][1]) and np.array_equal(
        results[0][2], results[1][2]
    )
    assert np.isfinite(results[0][1]).all()


def test_a_step_that_looks_at_a_value_cannot_be_captured():
    """The capture is the proof that a training step copies nothing to the host and never waits."""
    from xtrain.graph import Graphed

    def looks(x):
        y = scale_fwd(x, 2.0)
        return (scale_fwd(y, float(y[0].get())),)

    run, x = Graphed(looks), np.ones(4, np.float32)
    run(x), run(x)  # eager: allowed
    with pytest.raises((RuntimeError, cupy().cuda.runtime.CUDARuntimeError), match="captur"):
        run(x)


def test_results_follow_the_inputs():
    from xtrain.graph import Graphed

    run = Graphed(lambda x, y: (scale_fwd(x, 3.0),))
    for i in range(6):
        x = np.full(5, i, np.float32)
        given = to_device(x, "gpu") if i % 2 else x
        assert np.array_equal(to_numpy(run(given, x)[0]), 3 * x)
