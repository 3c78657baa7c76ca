"""Gradients that count as zero, whatever is in memory, while a step is captured: the numbers are those of an eager step.

Without a GPU the step runs at once inside `graph.recording`, over memory full of NaN: what is read too early shows.
"""

import numpy as np
import pytest

from xtrain import ModelConfig, Transformer
from xtrain.kernels import elementwise, gemm
from xtrain.kernels.cross_entropy import count_targets
from xtrain.nn import cuda_graph as graph
from xtrain.nn import functional as F
from xtrain.nn.autograd import Tensor
from xtrain.nn.modules import Linear, RMSNorm
from xtrain.parallel.ddp import STAGES, buckets

SHAPE = dict(
    vocab_size=61, dim=16, n_layers=2, n_heads=2, head_dim=8, hidden_dim=24, max_seq_len=16
)
IDS, TARGETS = np.random.default_rng(4).integers(0, 61, (2, 6, 12)).astype(np.int32)


def make(recompute="none", **more):
    """A model with a matrix that no step uses, of 15 numbers, after which the arena has a gap, and with a frozen one."""
    model = Transformer(ModelConfig(**SHAPE, **more), 0, "cpu", recompute=recompute)
    model.spare = Linear(5, 3, 0.1)
    model.renew_arena()
    model.model.layers[1].mlp.down_proj.weight.requires_grad = False
    return model


def capture(model, step):
    """step(model) as a capture runs it, the gradients being NaN before. -> what it returns"""
    model.arena.grads.fill(np.nan)
    with graph.recording() as end:
        out = step(model)
        end()
    assert not any(p.blank for _, p in model.storage())
    return out


def agree(step, **more):
    """Eager and captured: the same bits of all gradients, and of what step returns."""
    models = make(**more), make(**more)
    eager, captured = step(models[0]) or (), capture(models[1], step) or ()
    bits = lambda model, out: [(x + 0.0).tobytes() for x in (model.arena.grads, *out)]  # -0 is 0
    assert bits(models[0], eager) == bits(models[1], captured)
    assert np.isfinite(models[0].arena.grads).all() and models[0].arena.grads.any()


def loss(model, i=0, n=3):
    return model.loss(IDS[i : i + n], TARGETS[i : i + n])


head = lambda model: model._head()


# ----------------------------------------------------------------------------- whole steps
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "more", [{}, dict(tie_embeddings=True), dict(qk_norm=True), dict(recompute="block")], ids=str
)
def test_a_step(more, micro_batches):
    def step(model):
        model.zero_grad()
        for i in range(micro_batches):
            loss(model, 2 * i, 2).backward()
        return (model.arena.grads.copy(),)  # as clipping reads them, in the capture

    agree(step, **more)


def test_two_steps_in_one_capture():
    def step(model):
        for i in range(2):
            model.zero_grad()
            loss(model, i).backward()

    agree(step)


def test_without_reading_the_end_of_the_capture_settles():
    def step(model):
        model.zero_grad()
        loss(model).backward()
        assert model.spare.weight.blank == (graph._at_end.get() is not None)

    agree(step)


def test_what_is_saved(monkeypatch):
    """The first micro-batch writes, the next one adds; the head's gradient is added nowhere. Eager steps add."""
    flags, added = [], []
    matmul, add_into = gemm.matmul, elementwise.add_into

    def noted(out, *args, **options):
        flags.append(options["accumulate"]) if options.get("trans_a") else None
        return matmul(out, *args, **options)

    monkeypatch.setattr(gemm, "matmul", noted)
    monkeypatch.setattr(elementwise, "add_into", lambda s, x: added.append(s) or add_into(s, x))

    def step(model):
        model.zero_grad()
        for i in range(2):
            flags.clear(), added.clear()
            loss(model, i).backward()
            results.append((len(flags), set(flags), len(added)))

    results = []
    step(make())
    capture(make(), step)
    assert results == [(7, {True}, 1), (7, {True}, 1), (7, {False}, 0), (7, {True}, 1)]


# ----------------------------------------------------------------------------- the head, whose gradient comes early
def both(model):
    model.zero_grad()
    return loss(model, 0), loss(model, 3)


def first_then_second(model):
    a, b = both(model)
    a.backward(), b.backward()


def second_then_first(model):
    a, b = both(model)
    b.backward(), a.backward()


def together(model):
    a, b = both(model)
    (a + 0.5 * b).backward()


def only_the_second(model):
    _, b = both(model)
    b.backward()


def only_forward(model):
    both(model)
    loss(model)
    model.model.norm.weight.grad[...] = 1  # not everything is zero


def scaled(model):
    model.zero_grad()
    (loss(model) * -2.5).backward()


def from_above(model):
    model.zero_grad()
    loss(model).backward(np.array(3, np.float32))


def zeroed_between(model):
    model.zero_grad()
    a = loss(model)
    model.zero_grad()
    a.backward()


def zeroed_between_and_used_again(model):
    model.zero_grad()
    a = loss(model, 0)
    seen = head(model).grad.copy()
    model.zero_grad()
    b = loss(model, 3)
    a.backward(), b.backward()
    return (seen,)


def read_between_and_zeroed_later(model):
    model.zero_grad()
    a = loss(model, 0)
    seen = head(model).grad.copy()
    loss(model, 3).backward()
    model.zero_grad()
    a.backward()
    return (seen,)


def read_between(model):
    model.zero_grad()
    a, p = loss(model), head(model)
    seen = p.grad.copy()
    a.backward()
    return seen, p.grad.copy()


def arena_read_between(model):
    model.zero_grad()
    a = loss(model)
    seen = model.arena.grads.copy()
    a.backward()
    return (seen,)


def part_read_between(model):
    """A view made before, read during: of the head, and of a packed matrix."""
    parts = dict(model.named_parameters())
    names = "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"
    model.zero_grad()
    a = loss(model)
    seen = [parts[name].grad.copy() for name in names]
    a.backward()
    return *seen, *(parts[name].grad.copy() for name in names)


def given_between(model):
    model.zero_grad()
    a, p = loss(model), head(model)
    p.grad = np.full(p.shape, 2, np.float32)
    a.backward()


def part_given_between(model):
    model.zero_grad()
    parts, a = dict(model.named_parameters()), loss(model)
    parts["lm_head.weight"].grad = None
    parts["model.layers.1.mlp.up_proj.weight"].grad += 1
    a.backward()


def other_op_first(model):
    """A newer op with the same matrix: its backward comes before that of the loss."""
    model.zero_grad()
    a, targets = loss(model), TARGETS[0]
    x = Tensor(np.random.default_rng(1).standard_normal((12, 16), np.float32))
    logits = F.linear(x, head(model))
    (a + F.cross_entropy(logits, targets, 61, count_targets(targets))).backward()


def a_part_as_leaf(model):
    model.zero_grad()
    part = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    x = Tensor(np.random.default_rng(1).standard_normal((4, 16), np.float32))
    F.linear(x, part).backward(np.ones((4, 24), np.float32))


CASES = [
    first_then_second, second_then_first, together, only_the_second, only_forward, scaled, from_above, zeroed_between,
    zeroed_between_and_used_again, read_between_and_zeroed_later, read_between, arena_read_between, part_read_between, given_between, part_given_between,
    other_op_first, a_part_as_leaf,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_head(case):
    agree(case)


@pytest.mark.parametrize("case", [second_then_first, together, read_between, other_op_first])
def test_tied_head(case):
    agree(case, tie_embeddings=True)


def test_no_buffer_of_its_own():
    """Between forward and backward the head's gradient is in the arena, and still counts as zero."""

    def step(model):
        for i in range(2):
            model.zero_grad()
            a, p = loss(model, i), head(model)
            there = p._grad.copy()
            model.zero_grad()  # again: nothing to do
            assert p.blank and p.ahead[0] is p._grad and there.any()
            a.backward()
            assert not p.blank and np.array_equal(p.grad, there)

    capture(make(), step)


# ----------------------------------------------------------------------------- around a capture
def test_outside_a_capture_nothing_is_put_off():
    """Which of several graphs is replayed next, or what runs eagerly between, no flag can know."""
    model = make()
    model.arena.grads.fill(np.nan)
    model.zero_grad()
    assert not model.arena._grads.any() and not any(p.blank for _, p in model.storage())
    capture(model, lambda model: model.zero_grad())  # a graph that zeroes, another one that adds
    assert not model.arena._grads.any()
    with graph.recording() as end:
        loss(model, 0).backward()
        end()
    once = model.arena.grads.copy()
    loss(model, 0).backward()
    np.testing.assert_allclose(model.arena.grads, 2 * once, rtol=1e-5, atol=1e-7)


def test_without_matrices():
    norm = RMSNorm(70, 1e-6)
    norm.arena = norm.make_arena("cpu", 0)
    capture(norm, lambda norm: norm.zero_grad())
    assert not norm.arena._grads.any()


def test_a_capture_that_fails_leaves_no_flag():
    def step(model):
        model.zero_grad()
        loss(model)
        raise ValueError("no")

    model = make()
    with pytest.raises(ValueError, match="no"):
        capture(model, step)
    assert not graph.at_end_of_capture(lambda: None)
    assert not model.arena._grads.any() and not any(p.blank for _, p in model.storage())


# ----------------------------------------------------------------------------- gradients that travel
class Journal:
    """Collectives that keep what they would send. Like the real ones they have the array from the start."""

    def __init__(self, arena):
        self.grads, self.sent = arena.grads, {}

    def all_reduce(self, a, b, idle=False):
        self.sent[a, b] = self.grads[a:b].copy()

    def join(self):
        pass

    progress = join


@pytest.mark.parametrize("stage", ["naive", "flat", "overlap", "bucket"])
def test_what_backward_did_not_reach_travels_as_zeros(stage):
    model = make()
    journal = Journal(model.arena)
    pieces = buckets(model.arena.n_decay, model.arena.weights.size, 1, 4000)
    sync = STAGES[stage](model, journal, pieces, False)

    def step(model):
        journal.sent.clear()
        model.zero_grad()
        for i in range(2):
            sync.backward(loss(model, 3 * i), i == 1)

    for _ in range(2):
        capture(model, step)
        for (a, b), sent in journal.sent.items():
            assert np.array_equal(sent, model.arena.grads[a:b])
        assert sum(b - a for a, b in journal.sent) >= sum(p.size for _, p in model.storage())
        assert np.isfinite(model.arena.grads).all()
