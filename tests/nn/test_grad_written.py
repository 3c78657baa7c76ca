"""The first gradient of a step is written, later ones are added: the result is that of zeros to which everything is added.

Every step starts with NaN in the memory of all gradients, so a read of stale memory shows. Without a GPU a replay is simulated:
the step runs again, from the state of the flags in which it was captured.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from test_cuda_graph_streams import Buffer

from xtrain import ModelConfig, Transformer
from xtrain.kernels import elementwise, gemm
from xtrain.kernels.cross_entropy import count_targets
from xtrain.nn import cuda_graph
from xtrain.nn import functional as F
from xtrain.nn.arena import Arena
from xtrain.nn.modules import Linear, RMSNorm
from xtrain.nn.tensor import Tensor
from xtrain.parallel.ddp import STAGES, buckets
from xtrain.training.single_process import SINGLE_PROCESS

SHAPE = dict(
    vocab_size=61, dim=16, n_layers=2, n_heads=2, head_dim=8, hidden_dim=24, max_seq_len=16
)
IDS, TARGETS = np.random.default_rng(4).integers(0, 61, (2, 6, 12)).astype(np.int32)
X = np.zeros(1, np.float32)  # a captured step has an input; these steps need none


def make(recompute="none", **more):
    """A model with a matrix that no step uses, of 15 numbers, after which the arena has a gap, and with a frozen one."""
    model = Transformer(ModelConfig(**SHAPE, **more), 0, "cpu", recompute=recompute)
    model.spare = Linear(5, 3, 0.1)
    model.renew_arena()
    model.model.layers[1].mlp.down_proj.weight.requires_grad = False
    return model


def unwritten(model):
    return [p for _, p in model.storage() if not p.grad_written]


class Stream:
    ptr = 0

    def __init__(self, launch):
        self.launch = launch
        self.record = self.begin_capture = lambda: None
        self.wait_event = lambda event: None

    def end_capture(self):
        return SimpleNamespace(launch=lambda stream: self.launch())

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    cuda = SimpleNamespace(
        using_allocator=lambda malloc: contextlib.nullcontext(),
        get_current_stream=lambda: Stream(None),
        runtime=SimpleNamespace(CUDARuntimeError=RuntimeError),
        Stream=lambda non_blocking: Stream(None),
    )
    cupy = SimpleNamespace(cuda=cuda, empty=lambda *a: np.empty(*a).view(Buffer))
    pool = SimpleNamespace(malloc=None, free_all_blocks=lambda: None, keep=lambda: None)
    monkeypatch.setattr(cuda_graph, "cupy", lambda: cupy)
    monkeypatch.setattr(cuda_graph, "PrivatePool", lambda: pool)
    monkeypatch.setattr(cuda_graph, "free_cached", lambda device: None)


class Graphed(cuda_graph.Graphed):
    """step(model) -> arrays, captured. The capture runs it, and so does a launch, which writes to the captured outputs."""

    def __init__(self, model, step):
        super().__init__(lambda x: step(model) or (), model.arena)
        self.model, self.stream = model, Stream(self.launch)

    def launch(self):
        assert not unwritten(self.model)  # as at the start of the capture
        (recording,) = self.recordings.values()
        for kept, new in zip(recording.outputs, self.step(X)):
            kept[...] = new
        self.model.arena.zero_unwritten_grads()  # recorded at the end of the capture

    def __call__(self):
        return super().__call__(X)


def calls(model, step):
    """Eagerly, then captured: twice each -> [(outputs of step, gradients)], each from memory full of NaN."""
    graphed, found = Graphed(model, step), []
    for i in range(4):
        model.arena.grads.fill(np.nan)
        out = [x.copy() for x in graphed()]
        assert (next(iter(graphed.recordings.values())).graph is None) == (i < 2)
        assert i < 2 or not unwritten(model)
        found.append([*out, model.arena.grads.copy()])
    return found


def agree(step, **more):
    """Eager calls and replays give the same bits, and but for -0 those of an arena that is zeroed, so that all ops add."""
    model, added = make(**more), make(**more)
    results = calls(model, step)
    with pytest.MonkeyPatch.context() as patch:
        zero_grad = Arena.zero_grad
        patch.setattr(Arena, "zero_grad", lambda a: (zero_grad(a), a.zero_unwritten_grads()))
        want = [*(step(added) or ()), added.arena.grads]
    assert np.isfinite(want[-1]).all() and want[-1].any()
    bits = lambda arrays: [x.tobytes() for x in arrays]
    assert bits(x + 0.0 for x in results[0]) == bits(x + 0.0 for x in want)  # -0 becomes 0
    assert all(bits(found) == bits(results[0]) for found in results[1:])


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


def test_only_what_no_op_has_written_is_zeroed():
    def step(model):
        model.zero_grad()
        assert np.isnan(head(model)._grad).all() and not model.model.norm.weight._grad.any()
        loss(model).backward()
        frozen = model.model.layers[1].mlp.down_proj.weight
        assert {*unwritten(model)} == {model.spare.weight, frozen}

    model = make()
    model.arena.grads.fill(np.nan)
    step(model)
    agree(lambda model: (model.zero_grad(), loss(model).backward())[2:])


def test_what_is_saved(monkeypatch):
    """The first micro-batch writes, the next one adds; the gradient of the head is added once, too."""
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
    calls(make(), step)
    assert len(results) == 2 * 5  # the capture, which runs the step here, is followed by a launch
    assert results == 5 * [(7, {False}, 0), (7, {True}, 1)]


# --------------------------------------------------------------------------- the head, whose gradient is computed by the forward
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


def test_the_forward_leaves_the_arena_alone():
    """The head's gradient exists between forward and backward, but not in the memory of the parameter."""
    model = make()
    for i in range(2):
        model.arena.grads.fill(np.nan)
        model.zero_grad()
        a, b = loss(model, i), loss(model, 3)
        assert np.isnan(head(model)._grad).all() and head(model) in unwritten(model)
        del b
        a.backward()
        assert head(model) not in unwritten(model) and np.isfinite(head(model)._grad).all()


def test_a_part_reports_to_its_parameter():
    """DDP counts the contributions to a parameter: it must not send the gradient before that of a part is added."""
    model, seen = make(), []
    p = model.model.layers[0].mlp.gate_up.weight
    p.on_gradient = lambda leaf: seen.append((leaf, leaf.grad.any()))
    a_part_as_leaf(model)
    assert seen == [(p, True)]


# ----------------------------------------------------------------------------- a backward that fails
@pytest.mark.parametrize("failing", range(1, 8))
def test_a_backward_that_fails_leaves_no_old_gradient(monkeypatch, failing):
    """A loop that skips a failed micro-batch and continues: the gradient that was not written counts as zero."""
    model, products, original = make(), [], gemm.linear_bwd_w

    def product(*args):
        products.append(args)
        if len(products) == failing:
            raise MemoryError
        original(*args)

    monkeypatch.setattr(gemm, "linear_bwd_w", product)
    model.arena.grads.fill(np.nan)
    model.zero_grad()
    with pytest.raises(MemoryError):
        loss(model, 0).backward()
    loss(model, 3).backward()
    assert np.isfinite(model.arena.grads).all()


# ----------------------------------------------------------------------------- ops that can only add, other leaves
def test_an_embedding_alone():
    """The table is in the region of the matrices, and its kernel can only add."""

    def step(model):
        model.zero_grad()
        for _ in range(2):
            model.model.embed_tokens(IDS[0]).backward(np.ones((12, 16), np.float32))

    agree(step)


def test_tensors_of_the_user():
    """The gradient of a plain leaf: None, then the first contribution, then sums; also from an op that only adds."""
    x = Tensor(np.ones((3, 4), np.float32), requires_grad=True)
    w = Tensor(np.full(4, 2, np.float32), requires_grad=True)
    assert x.grad is None and w.grad is None
    F.rmsnorm(x, w, 1e-6).backward(np.ones((3, 4), np.float32))
    first = w.grad.copy()
    assert first.any() and np.isfinite(first).all()
    F.rmsnorm(x, w, 1e-6).backward(np.ones((3, 4), np.float32))
    assert np.array_equal(w.grad, 2 * first)
    dy = np.ones((3, 4), np.float32)
    x.grad = None
    (x + x).backward(dy)  # two contributions, from the same array
    assert np.array_equal(x.grad, 2 * dy) and (dy == 1).all()
    with pytest.raises(TypeError, match="type float64, the tensor's gradients are float32"):
        F.scale(x, 1.0).backward(np.ones((3, 4)))


# ----------------------------------------------------------------------------- around a capture
def test_a_graph_that_zeroes_and_one_that_adds():
    """Replayed in any order, with eager calls between them: what a replay does depends on no flag."""
    model = make()
    model.arena.grads.fill(np.nan)
    zero = Graphed(model, lambda model: model.zero_grad())
    add = Graphed(model, lambda model: loss(model).backward())
    for _ in range(4):  # both are captured
        zero(), add()
    once = model.arena.grads.copy()
    assert np.isfinite(once).all() and once.any()
    add()
    np.testing.assert_allclose(model.arena.grads, 2 * once, rtol=1e-5, atol=1e-7)
    zero()
    assert not model.arena._grads.any()
    loss(model).backward()  # eagerly
    assert np.array_equal(model.arena.grads, once)
    model.arena.grads.fill(np.nan)
    model.zero_grad()  # eagerly
    add()
    assert not unwritten(model) and np.array_equal(model.arena.grads, once)


def test_a_replay_after_an_eager_zero_grad():
    """The flags that the eager call has cleared do not make the replayed gradient look unwritten."""
    model = make()
    step = Graphed(model, lambda model: (model.zero_grad(), loss(model).backward())[2:])
    for _ in range(3):
        step()
    want = model.arena.grads.copy()
    model.zero_grad()
    step()
    assert head(model).grad.any()
    assert np.array_equal(model.arena.grads, want)
    model.zero_grad()
    loss(model).backward()  # eagerly, after a replay
    assert np.array_equal(model.arena.grads, want)
    loss(model).backward()
    np.testing.assert_allclose(model.arena.grads, 2 * want, rtol=1e-5, atol=1e-7)


def test_without_matrices():
    norm = RMSNorm(70, 1e-6)
    norm.arena = norm.make_arena("cpu", 0)
    norm.arena.grads.fill(np.nan)
    norm.zero_grad()
    assert not norm.arena._grads.any()


def test_a_capture_that_fails():
    """What the step has marked as unwritten before it failed counts as zero."""
    fails = False

    def step(model):
        model.zero_grad()
        a = loss(model)
        if fails:
            raise ValueError("no")
        a.backward()

    model = make()
    run = Graphed(model, step)
    run(), run()
    want, fails = model.arena.grads.copy(), True
    model.arena.grads.fill(np.nan)
    with pytest.raises(ValueError, match="no"):
        run()
    assert not model.arena.grads.any()
    fails = False
    run()
    assert np.array_equal(model.arena.grads, want)


# ----------------------------------------------------------------------------- gradients that travel
class Journal:
    """Collectives that keep what they would send. Like the real ones they have the array from the start."""

    ranks = SINGLE_PROCESS

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

    run = Graphed(model, step)
    for _ in range(4):
        model.arena.grads.fill(np.nan)
        run()
        for (a, b), sent in journal.sent.items():
            assert np.array_equal(sent, model.arena.grads[a:b])
        assert sum(b - a for a, b in journal.sent) >= sum(p.size for _, p in model.storage())
        assert np.isfinite(model.arena.grads).all()
