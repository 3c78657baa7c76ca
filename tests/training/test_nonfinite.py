"""NaN and infinity in training: every op is made to return them, forward and backward, and must be named."""

import contextlib
import functools
import json
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, to_host
from rich.console import Console
from runs import DEVICE, assert_same_run, metrics, run

from xtrain import ModelConfig, Transformer
from xtrain.data.batches import Batch
from xtrain.device import to_device, to_numpy
from xtrain.errors import UserError
from xtrain.formats.adapters import LoraPart, Ranks
from xtrain.kernels.cross_entropy import count_targets
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function
from xtrain.nn.deferred import AddNormLinear, ResidualRMSNorm, SwiGLULinear
from xtrain.nn.expert_lora import EXPERT_MATRICES, LoraExperts
from xtrain.nn.experts import MixtureOfExperts
from xtrain.nn.loss_functions import LinearLogprobs
from xtrain.nn.modules import Module, Parameter
from xtrain.nn.observers import in_layer, observe_ops
from xtrain.nn.router_losses import AddTerms, RouterLosses
from xtrain.training.loop import Loop
from xtrain.training.nonfinite import count_nonfinite, first_nonfinite, spike, unsound
from xtrain.training.run import Run

swapped = mock.patch.object
CONFIG = ModelConfig(vocab_size=40, dim=64, n_layers=2, n_heads=2, hidden_dim=32, max_seq_len=8)
FUSED = AddNormLinear, ResidualRMSNorm, SwiGLULinear, AddTerms
OPS = {
    c
    for c in [*vars(F).values(), *FUSED]
    if isinstance(c, type) and issubclass(c, Function) and c is not Function
}


pytestmark = pytest.mark.usefixtures("cache")


# ----------------------------------------------------------------------------- models that use every op
def transformer(precision="fp32", recompute="none", tied=False):
    config = ModelConfig(**{**CONFIG.to_dict(), "tie_embeddings": tied})
    model = Transformer(config, 0, DEVICE, precision, recompute)
    ids = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)

    def step():
        model.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()

    return model, step


EXPERTS = ModelConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1, hidden_dim=6, max_seq_len=4, n_experts=3, experts_per_token=2)  # fmt: skip


class Zoo(Module):
    """A layer with the ops that the Transformer does not use."""

    def __init__(self):
        self.weight = Parameter((8,), None)
        self.own = Parameter((2,), None, {"own": 2})
        self.square, self.a, self.b = (
            Parameter(shape, 0.5, {name: shape[0]})
            for name, shape in (("square", (8, 8)), ("a", (2, 8)), ("b", (6, 2)))
        )
        self.experts = MixtureOfExperts(EXPERTS)
        ranks = Ranks(2, 1.0, {}, {}, False)
        self.adapted = LoraExperts(MixtureOfExperts(EXPERTS), "adapted.", EXPERT_MATRICES, ranks)

    def __call__(self, x_NC):
        tables = [to_device(normal(i, 4, 4), DEVICE) for i in range(2)]
        x = F.rmsnorm(x_NC, self.weight, 1e-6).reshape(6, 1, 8)
        x = F.scale(F.rope(x, *tables, None, 3), 0.7).reshape(2, 3, 1, 8)
        x = F.scale(F.swap_heads(x).reshape(2, 3, 8), 1.1)
        x = F.causal_softmax(x, 3, 1.0, False).reshape(6, 8)
        parts = [LoraPart(slice(0, 6), slice(0, 2), 0.5)]
        x = F.lora_linear(x, self.square, self.a, None, None, None, parts, self.b)
        bias = F.replace_rows(self.weight.data, self.own, [slice(1, 3)])
        square = F.adapted_matrix(self.square, self.square, self.square, 0.5)
        x = F.linear(x, square, None, bias)
        x = F.add(x, F.cast_gradient(F.silu(x_NC), np.float32))
        x = F.cast(F.cast(x, ml_dtypes.bfloat16 if GPU else np.float64), np.float32)
        return self.adapted(self.experts(F.swiglu(x.reshape(3, 16))))


class Menagerie(Module):
    def __init__(self):
        self.layers, self.table = [Zoo(), Zoo()], Parameter((8, 8), 0.5)
        self.arena = self.make_arena(DEVICE, 0)

    def __call__(self):
        targets = to_device(np.array([1, 2, 3], np.int32), DEVICE)
        x = F.embedding(to_device(np.arange(6, dtype=np.int32), DEVICE), self.table)
        with RouterLosses(0.1, 0.1).collected() as losses:
            a, b = (in_layer(i, layer, x) for i, layer in enumerate(self.layers))
        logits = F.narrow(F.linear(F.add(a, b), self.table), 7)
        inverse = count_targets(targets)
        loss = F.cross_entropy(logits, targets, 7, inverse)
        yield F.scale(losses.added_to(loss, inverse).reshape(1), 1.5)
        x = F.embedding(targets, self.table)
        logprobs = F.linear_logprobs(x, self.table, targets, 7)
        yield F.with_gradient(logprobs, 1.5, logprobs.data.copy())
        teacher = to_device(np.full((3, 1), -0.7, np.float32), DEVICE)
        known = targets, targets.reshape(3, 1), teacher
        x = F.embedding(targets, self.table)
        yield F.linear_distillation(x, self.table, *known, 7, count_targets(targets), 0.5)


def menagerie():
    model = Menagerie()

    def step():
        model.arena.grads.fill(0)
        for loss in model():
            loss.backward()

    return model, step


# ----------------------------------------------------------------------------- faults
def put(result, value):
    """Set the first element of the first floating-point array in a result to `value`. -> was there one?"""
    for x in result if isinstance(result, tuple) else (result,):
        if hasattr(x, "dtype") and x.dtype.name in ("float32", "bfloat16", "float64") and x.size:
            first = (0,) * x.ndim  # of x itself, which need not be contiguous
            if x.dtype.name == "bfloat16":
                x.view(np.uint16)[first] = int(np.array(value, x.dtype).view(np.uint16))
            else:
                x[first] = value
            return True
    return False


@contextlib.contextmanager
def wrapped_ops(around):
    """Call around(cls, way, result) after every op."""

    def call(cls, way, original, ctx, *args):
        result = original(ctx, *args)
        around(cls, way, result)
        return result

    with contextlib.ExitStack() as stack:
        for cls in OPS:
            for way in ("forward", "backward"):
                new = functools.partial(call, cls, way, getattr(cls, way))
                stack.enter_context(swapped(cls, way, staticmethod(new)))
        yield


def events(model, step):
    """-> every op of a step: (layer, op, way)"""
    seen = []

    @contextlib.contextmanager
    def observer(op):
        yield
        seen.append((op.layer or "outside the layers", op.name, op.way))

    with observe_ops(observer):
        step()
    return [event for event in seen if event[1] in {c.__name__ for c in OPS}]


MODELS = {
    "transformer": transformer,
    "tied": lambda: transformer(tied=True),
    "attention again": lambda: transformer(recompute="attention"),
    "block again": lambda: transformer(recompute="block"),
    "the other ops": menagerie,
}
if GPU:
    MODELS["bf16"] = lambda: transformer("bf16")
    MODELS["bf16, block again"] = lambda: transformer("bf16", "block")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", MODELS)
def test_every_op_is_named(name, value):
    model, step = MODELS[name]()
    assert first_nonfinite(model, step) is None
    clean = events(model, step)
    for k, (layer, op, way) in enumerate(clean):
        count = iter(range(10**9))
        fault = lambda cls, way, result: next(count) == k and put(result, value)  # noqa: B023
        with wrapped_ops(fault):
            found = first_nonfinite(model, step)
        assert found is not None, (k, layer, op, way)
        assert found.startswith(f"{layer}, {op}") and f", {way} (" in found, (found, layer, op, way)
        assert (
            f"({int(np.isnan(value))} NaN and {int(np.isinf(value))} infinite of" in found
            or way == "backward"
        )


def test_every_op_is_among_them():
    seen = {op for name in ("transformer", "the other ops") for _, op, _ in events(*MODELS[name]())}
    different = seen ^ {c.__name__ for c in OPS}
    assert not different, f"{different}: add it to Zoo, the model of the other ops"
    for name in MODELS:
        ways = {}
        for _, op, way in events(*MODELS[name]()):
            ways.setdefault(op, set()).add(way)
        assert all(both == {"forward", "backward"} for both in ways.values()), ways


def test_rows_without_a_target_are_no_fault():
    """Their log-probability is NaN."""
    model, _ = transformer()
    ids = np.arange(8, dtype=np.int32).reshape(2, 4)
    targets = np.where(ids % 2, ids, -100).astype(np.int32)
    logprobs = lambda: model.logprobs(to_device(ids, DEVICE), to_device(targets, DEVICE))
    assert np.isnan(to_numpy(logprobs().data)).sum() == 4
    assert first_nonfinite(model, logprobs) is None
    with wrapped_ops(lambda cls, way, r: cls is LinearLogprobs and way == "forward" and r.fill(np.nan)):  # fmt: skip
        found = first_nonfinite(model, logprobs)
    assert found.startswith("outside the layers, LinearLogprobs") and "(4 NaN" in found


def test_weights_come_first():
    model, step = transformer()
    weight = dict(model.named_parameters())["model.layers.1.self_attn.k_proj.weight"]
    weight.data[0, 3] = np.inf
    found = first_nonfinite(model, step)
    assert found.startswith(
        "the weights model.layers.1.self_attn.{q_proj.weight,k_proj.weight,v_proj.weight}"
    )
    assert "(0 NaN and 1 infinite of" in found


def test_the_parameter_is_named():
    model, step = transformer()
    with wrapped_ops(
        lambda cls, way, r: (cls, way) == (SwiGLULinear, "forward") and put(r, np.nan)
    ):
        found = first_nonfinite(model, step)
    assert found.startswith(
        "layer 0, SwiGLULinear with model.layers.0.mlp.down_proj.weight, forward"
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", ml_dtypes.bfloat16])
def test_count(dtype, monkeypatch):
    from xtrain.training import nonfinite

    monkeypatch.setattr(nonfinite, "CHUNK", 7)
    x = normal(0, 5, 8).astype(dtype)
    x[0, 0] = np.finfo(np.float32).max if dtype != ml_dtypes.bfloat16 else 3e38
    assert count_nonfinite(to_device(x, DEVICE)) is None
    x[0, 1], x[3, 3], x[4, 7] = np.nan, np.inf, -np.inf
    for y in (x, x.T, -x):
        assert count_nonfinite(to_device(y, DEVICE)) == "1 NaN and 2 infinite of 40 values"
    for other in (None, 3.0, np.arange(3), x[:0], "x"):
        assert count_nonfinite(other) is None


# ----------------------------------------------------------------------------- in a run
@contextlib.contextmanager
def poisoned(cls, way, steps, value, in_replay=True):
    """Add `value` to an op's first float32 result in these steps. It is read from an array, so a captured step works too."""
    poison = to_device(np.zeros(1, np.float32), DEVICE)
    step = Run.step

    def poisoned_step(self):
        poison.fill(value if self.done + 1 in steps else 0)
        return step(self)

    def around(c, w, result):
        if (c, w) == (cls, way):
            results = result if isinstance(result, tuple) else (result,)
            x = next(x for x in results if x is not None and x.dtype == np.float32)
            x.reshape(-1)[:1] += poison

    def explained(self, n):
        poison.fill(value if in_replay else 0)
        return explain(self, n)

    explain = Run.explain
    with (
        wrapped_ops(around), swapped(Run, "step", poisoned_step), swapped(Run, "explain", explained)
    ):  # fmt: skip
        yield


FORWARD_BACKWARD = [
    (F.Embedding, "forward"),
    (F.Embedding, "backward"),
    (F.LinearCrossEntropy, "forward"),
]
KINDS = [dict(precision="bf16"), dict(precision="bf16", graph=False), dict()] if GPU else [dict()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("cls, way", FORWARD_BACKWARD)
def test_a_bad_step_changes_nothing_but_the_count(tmp_path, cls, way, value, kind):
    """Also if only the loss is infinite and every gradient is finite. Training then continues."""
    seen = {}

    def note(self, log_lengths):
        seen[self.done] = [
            to_host(x).tobytes()
            for x in (self.model.arena.weights, self.optimizer.m, self.optimizer.v)
        ]
        return snapshot(self, log_lengths)

    snapshot, console = Run.snapshot, Console(record=True, width=1000)
    with poisoned(cls, way, (5, 6, 9), value), swapped(Run, "snapshot", note):
        folder = run(
            tmp_path, console, steps=12, save_every=1, sample_every=99, eval_every=99, **kind
        )
    rows = [m for m in metrics(folder) if "loss" in m]
    assert [m["step"] for m in rows if "skipped" in m] == [5, 6, 9]
    bad, good = rows[4], rows[5 + 1]
    assert bad["loss"] is None or bad["grad_norm"] is None
    assert isinstance(good["loss"], float) and isinstance(good["grad_norm"], float)
    assert seen[4] == seen[5] == seen[6] != seen[7] and seen[8] == seen[9] != seen[10]
    text = console.export_text()
    assert "step 5 is skipped: the " in text and "3 steps were skipped" in text


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_after_max_skips_the_run_stops(tmp_path, kind, every):
    """The weights are those before the first skipped step, however late the numbers are read: here after up to ten steps."""
    made = []
    init, loop = Run.__init__, Loop.__init__

    def reads_late(self, *args):
        loop(self, *args)
        self.read_every, self.layers_every = every, 99

    def note(self, *args, **more):
        init(self, *args, **more)
        made.append(self)

    good = run(tmp_path / "good", steps=12, stop_at=3, **kind)
    with (
        poisoned(F.Embedding, "forward", (4, 5, 6), np.nan, in_replay=False), swapped(Run, "__init__", note),
        swapped(Loop, "__init__", reads_late),
        pytest.raises(UserError) as error,
    ):  # fmt: skip
        run(tmp_path / "bad", steps=12, max_skips=3, eval_every=99, sample_every=99, **kind)
    text = str(error.value)
    assert text.startswith(
        "3 steps in a row were skipped (--max-skips), the last at step 6: the loss is nan."
    )
    assert (
        "First value that is not finite: every result is finite when the step is repeated" in text
    )
    saved = Transformer.from_pretrained(good / "checkpoints" / "step-000003")
    bad = dict(made[-1].model.named_parameters())
    for name, tensor in saved.named_parameters():
        assert np.array_equal(tensor.numpy(), to_host(bad[name].data)), name
    assert [m["step"] for m in metrics(tmp_path / "bad" / "run")] == [1, 2, 3, 4, 5, 6]
    assert made[-1].done == (10 if every == 10 else 6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("cls", sorted({op for _, op, _ in events(*transformer())}))
def test_a_run_names_the_op(tmp_path, cls, way, value):
    """From step 3 on, the first call of an op in a step goes wrong (with attention: every call)."""
    now, calls = [0], []
    step = Run.step

    def counted(self):
        now[0] = self.done + 1
        calls.clear()
        return step(self)

    def around(c, w, result):
        if (c.__name__, w) == (cls, way) and now[0] >= 3:
            calls.append(c)
            if len(calls) == 1 or cls == "Attention":
                put(result, value)

    explain = Run.explain
    again = lambda self, n: (calls.clear(), explain(self, n))[1]
    with (
        wrapped_ops(around), swapped(Run, "step", counted), swapped(Run, "explain", again),
        pytest.raises(UserError) as error,
    ):  # fmt: skip
        run(tmp_path, steps=9, max_skips=2, eval_every=99, sample_every=99, graph=False)
    assert f", {cls}" in str(error.value) and f", {way} (" in str(error.value), str(error.value)
    assert "the last at step 4" in str(error.value)


def test_a_run_with_skips_resumes_exactly(tmp_path):
    """The number of skipped steps in a row is saved: the third one stops the run, wherever it was interrupted."""
    steps = (4, 5, 9, 10, 11)
    with poisoned(F.Embedding, "forward", steps, np.nan):
        whole, parts = tmp_path / "a", tmp_path / "b"
        for stop_at in (4, 7, 10):
            run(parts, steps=12, stop_at=stop_at, resume=stop_at > 4, max_skips=3)
        for folder, resume in ((whole, False), (parts, True)):
            with pytest.raises(
                UserError, match=r"3 steps in a row were skipped .* the last at step 11"
            ):
                run(folder, steps=12, max_skips=3, resume=resume)
        a, b = (json.dumps(metrics(folder / "run")) for folder in (whole, parts))
        assert a == b
        run(parts, steps=12, max_skips=4, resume=True)
        assert_same_run(run(tmp_path / "c", steps=12, max_skips=4), parts / "run")
    for max_skips in (1, 2):  # fewer than were counted already: the next one is the last
        with poisoned(F.Embedding, "forward", (2, 3, 4), np.nan):
            folder = tmp_path / str(max_skips)
            run(folder, steps=12, max_skips=9, stop_at=3)
            with pytest.raises(UserError, match="the last at step 4"):
                run(folder, steps=12, max_skips=max_skips, resume=True)


# ----------------------------------------------------------------------------- spikes
def test_unsound():
    assert unsound(1.0, 2.0) is None and unsound(3.4e38, 0.0) is None
    assert unsound(float("nan"), 1.0) == "the loss is nan"
    assert unsound(1.0, float("inf")) == "the gradient norm is inf"


def test_spike():
    rng = np.random.default_rng(0)
    calm = list(4 + 0.1 * rng.standard_normal(60))
    assert spike(calm, 4.3, 6) is None and spike(calm, 5.0, 6) > 8
    assert spike(calm, 5.0, 0) is None, "0: never"
    assert spike(calm, 0.1, 6) is None, "a fall is no spike"
    assert spike(calm[:19], 9.0, 6) is None, "too few to tell"
    assert spike([100.0] * 30 + calm[:50], 5.0, 6) > 8, "the last 50 count"
    assert spike([2.0] * 50, 2.0001, 6) is None and spike([2.0] * 50, 2.1, 6) == pytest.approx(50)
    assert spike([0.0] * 50, 1e-12, 6) is None


def test_a_spike_is_flagged_in_a_run(tmp_path, monkeypatch):
    """At step 25 the batch is noise. A resumed run reports the same spike."""
    train_step = Run.train_step

    def noisy(self, hyper, inv_count, batch):
        if self.done == 24:
            noise = np.random.default_rng(0).integers(0, 256, batch.ids.shape).astype(np.int32)
            batch = Batch(*[to_device(noise, DEVICE)] * 2)
            self.spiked = True
        return train_step(self, hyper, inv_count, batch)

    monkeypatch.setattr(Run, "train_step", noisy)
    kind = dict(steps=26, lr=3e-3, eval_every=99, sample_every=99, graph=False, spike_z=2.0)
    console = Console(record=True, width=1000)
    whole = run(tmp_path / "a", console, **kind)
    flagged = {m["step"]: m["spike"] for m in metrics(whole) if "spike" in m}
    assert flagged.get(25, 0) > 2, metrics(whole)
    assert "step 25: the loss jumps to" in console.export_text()
    run(tmp_path / "b", **kind, stop_at=23)
    parts = run(tmp_path / "b", **kind, resume=True)
    assert_same_run(whole, parts)
