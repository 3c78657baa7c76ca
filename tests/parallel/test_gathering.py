"""ZeRO-3 in one process: which layer is gathered and summed when; bf16; what is refused. On ranks: mpi/zero3.py."""

import numpy as np
import pytest

from xtrain.config import ModelConfig, TrainConfig
from xtrain.device import to_device
from xtrain.errors import UserError
from xtrain.kernels.cast import cast_into
from xtrain.nn.autograd import no_grad
from xtrain.nn.model import Transformer
from xtrain.nn.modules import Module
from xtrain.nn.optim import AdamW
from xtrain.nn.sharded_arena import Share, Unit
from xtrain.parallel.gathering import Gathered, Gathering
from xtrain.parallel.zero3 import Zero3AdamW
from xtrain.tuning.finetune import FinetuneConfig

SHAPE = dict(vocab_size=61, dim=24, n_heads=3, head_dim=8, max_seq_len=16)
IDS = np.random.default_rng(0).integers(0, 61, (2, 17))


class OneRank:
    """Collectives of a single rank, which record their calls. What is in flight is read and written at the last moment:
    in `wait`. A mark belongs to its step: a CUDA graph cannot wait for what was recorded before it."""

    def __init__(self):
        self.events = []
        self.in_flight = []
        self.arena = None
        self.step = 0

    def name_of(self, own):
        where = [u for u in self.arena.units if own is u.master or own is u.summed]
        layers = self.arena.layers
        return layers.index(where[0]) if where[0] in layers else "whole"

    def gather_shares(self, x, own):
        x.view(np.uint8).fill(255)  # NaN until it has arrived
        self.events.append(("gather", self.name_of(own)))
        cast = lambda: cast_into(x, own) if x.dtype != own.dtype else x.__setitem__(..., own)
        self.in_flight.append(cast)

    def sum_share(self, x, own, add):
        self.events.append(("sum", self.name_of(own)))

        def arrive():
            own[...] = x + own if add else x
            if not np.shares_memory(own, x):
                x.fill(np.nan)

        self.in_flight.append(arrive)

    def mark(self, mark=None):
        return self.step, len(self.in_flight)

    def wait(self, mark):
        step, n = mark
        assert step == self.step, "a mark of another step"
        for arrive in self.in_flight[:n]:
            arrive()
        self.in_flight[:n] = [lambda: None] * n

    def join(self):
        self.wait(self.mark())

    def gather_1(self, own_1):
        self.join()
        return own_1

    own = lambda self, array, a, b: [(a, b)]
    register = lambda self, array: None
    progress = lambda self: None


def sharded(device="cpu", precision="fp32", recompute="none", **more):
    """-> model, collectives, stage"""
    config = ModelConfig(**SHAPE | more)
    model = Transformer(config, 0, device, precision, recompute, share=Share(0, 1))
    collectives = OneRank()
    collectives.arena = model.arena
    return model, collectives, Gathered(Gathering(model, collectives))


@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_gradients_are_those_of_a_whole_model(layers, recompute):
    """Weights that have not arrived are NaN, and so are gradients that were sent."""
    plain = Transformer(ModelConfig(**SHAPE, n_layers=layers), 0)
    model, _, stage = sharded(recompute=recompute, n_layers=layers)
    for step in range(2):
        for m in (plain, model):
            m.zero_grad()
        for last in (False, True):
            ids = np.roll(IDS, step + last, axis=1)
            losses = [m.loss(ids[:, :-1], ids[:, 1:]) for m in (plain, model)]
            assert losses[0].item() == losses[1].item()
            losses[0].backward()
            stage.backward(losses[1], last)
        expected = dict(plain.views(plain.arena.grads))
        for name, start, shape in model.places():
            unit = next(u for u in model.arena.units if u.start <= start < u.end)
            at = start - unit.start
            found = unit.summed[at : at + np.prod(shape)].reshape(shape)
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_next_layer_is_gathered_while_one_computes(monkeypatch):
    model, collectives, stage = sharded(n_layers=5)
    events = collectives.events
    for i, layer in enumerate(model.model.layers):
        attend = layer.self_attn.attend

        def noted(*args, i=i, attend=attend):
            events.append(("compute", i))
            return attend(*args)

        monkeypatch.setattr(layer.self_attn, "attend", noted)
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    whole = [event for event in events if event[1] == "whole"]
    assert whole == [("gather", "whole")] * 3, "embedding, head, norms"
    forward = [event for event in events if event[1] != "whole"]
    assert forward[:4] == [("gather", 0), ("gather", 1), ("compute", 0), ("gather", 2)]
    assert forward[4:] == [
        ("compute", 1), ("gather", 3), ("compute", 2), ("gather", 4), ("compute", 3), ("compute", 4)
    ]  # fmt: skip
    events.clear()
    stage.backward(loss, True)
    assert events == [
        ("gather", 2), ("sum", 4), ("gather", 1), ("sum", 3), ("gather", 0), ("sum", 2), ("sum", 1), ("sum", 0),
        *[("sum", "whole")] * 3,
    ]  # fmt: skip
    events.clear()
    with no_grad():
        model.loss(IDS[:, :-1], IDS[:, 1:])
    assert ("gather", 0) not in events and ("gather", 1) not in events, "still there"


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_steps_are_those_of_a_whole_model(layers):
    """Some with a forward pass between them, which leaves layers in the buffers. The update makes them old."""
    model, collectives, stage = sharded(n_layers=layers)
    optimizer = Zero3AdamW(model, collectives, stage.gathering, lr=1e-2)
    plain = Transformer(model.config, 0)
    other = AdamW(plain, lr=1e-2)
    for step in range(4):
        ids = np.roll(IDS, step, axis=1)
        hyper = optimizer.advance()
        collectives.step += 1
        for m in (plain, model):
            m.zero_grad()
        losses = [m.loss(ids[:, :-1], ids[:, 1:]) for m in (plain, model)]
        assert losses[0].item() == losses[1].item()
        losses[0].backward()
        stage.backward(losses[1], True)
        optimizer.clip(0)
        optimizer.apply(hyper)
        other.step()
        collectives.in_flight.clear()
        if step % 2:
            with no_grad():
                assert (
                    model.loss(ids[:, 1:], ids[:, 1:]).item()
                    == plain.loss(ids[:, 1:], ids[:, 1:]).item()
                )
    for unit in model.arena.units:
        assert np.array_equal(unit.master, plain.arena.weights[unit.start : unit.end])


@pytest.mark.parametrize("bug", ["wait", "begin_gradients", "forget"])
def test_the_test_sees_a_planted_bug(monkeypatch, bug):
    """Nothing is waited for; old gradients are added to; layers stay after an update."""
    owner = Unit if bug == "begin_gradients" else Gathering
    monkeypatch.setattr(owner, bug, lambda *_: None)
    with pytest.raises(AssertionError):
        test_steps_are_those_of_a_whole_model(4)


def test_bf16_copies_are_those_of_whole_masters():
    """Two layers, embedding and norms, in the simulator."""
    shape = dict(n_layers=2, vocab_size=16, dim=8, n_heads=1, head_dim=16, hidden_dim=8)
    model, collectives, stage = sharded("sim", "bf16", **shape, tie_embeddings=True)
    arena = model.arena
    plain = Transformer(model.config, 0, "sim", "bf16")
    optimizers = (
        Zero3AdamW(model, collectives, stage.gathering, lr=1e-2, ema_decay=0.9),
        AdamW(plain, lr=1e-2, ema_decay=0.9),
    )
    gradients = np.random.default_rng(1).standard_normal(plain.arena.size, np.float32)
    plain.arena.grads[...] = gradients
    for unit in arena.units:
        unit.summed[...] = gradients[unit.start : unit.end]
    for optimizer in optimizers:
        optimizer.apply(to_device(optimizer.advance(), "sim"))
    assert np.array_equal(arena.master, plain.arena.weights)
    assert np.array_equal(optimizers[0].ema, optimizers[1].ema)
    for i, unit in enumerate(arena.layers):
        stage.gathering.need(i)
        half = plain.arena.half[unit.start : unit.end]
        assert np.array_equal(unit.weights.view(np.uint16), half.view(np.uint16))
    (_, p), (_, q) = (next(m.storage()) for m in (model, plain))
    assert np.array_equal(p.value.view(np.uint16), q.value.view(np.uint16))
    norms = arena.whole[-1]
    assert np.array_equal(norms.weights, plain.arena.weights[norms.start :])


def test_the_master_keeps_float32(tmp_path):
    """A bf16 model that is read from a folder has the float32 weights of the folder in its shares."""
    plain = Transformer(ModelConfig(**SHAPE, n_layers=2), 3)
    plain.save_pretrained(tmp_path)
    for rank in range(2):
        share = Share(rank, 2)
        model = Transformer(plain.config, None, "cpu", world=2, share=share)
        model.load_weights(tmp_path)
        for name, start, _ in model.places():
            unit = next(u for u in model.arena.units if u.start <= start < u.end)
            values = dict(plain.views(plain.arena.weights))[name].reshape(-1)
            a, b = max(start, unit.own_start), min(start + values.size, unit.own_end)
            found = unit.master[a - unit.own_start : b - unit.own_start]
            assert np.array_equal(found, values[a - start : b - start]) or a >= b, name
    assert model.model.layers[0].mlp.down_proj.weight.assigned_dtype == np.float32


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "muon"}, {"precision": "fp8"}, {"grad_comm": "bf16"}, {"dp": "flat"}, {"change": "a:b"},
        {"eval_tasks": ("a.jsonl",)},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_what_it_does_not_support_is_refused(more):
    ((name, value),) = more.items()
    given = f"--{name.replace('_', '-')}"
    if isinstance(value, str):  # other values of the option are supported
        given += f" {value}"
    with pytest.raises(UserError, match=f"^{given} is not supported with --zero 3: "):
        TrainConfig(zero=3, **more).validate()
    TrainConfig(zero=3).validate()
    with pytest.raises(UserError, match="supported by xtrain train only"):
        FinetuneConfig(init="x", data=("y",), zero=3).validate()


def test_parts_of_a_layer_are_not_taken_for_its_weights():
    model, _, _ = sharded(n_layers=3)
    weight = model.model.layers[1].mlp.down_proj.weight
    named = dict(model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
    for read in (
        lambda: weight.data,
        lambda: named.data,
        lambda: weight.grad,
        lambda: weight.__setitem__(0, 1.0),
        lambda: model.renew_arena(),
    ):
        with pytest.raises(UserError, match="with --zero 3"):
            read()
    with pytest.raises(ValueError, match="shape"):
        weight.data = np.zeros((3, 3), np.float32)


def test_an_interrupted_forward_leaves_nothing_in_flight():
    """A captured step waits for nothing that was started before it, so the next one must not begin before that."""
    model, collectives, stage = sharded(n_layers=3)
    optimizer = Zero3AdamW(model, collectives, stage.gathering, lr=1e-2)
    model.model.layers[0].mlp = lambda x: 1 / 0
    with no_grad(), pytest.raises(ZeroDivisionError):
        model.loss(IDS[:, :-1], IDS[:, 1:])
    weights = model.arena.layers[1].weights
    assert np.isnan(weights).all(), "in flight"
    optimizer.advance()
    assert not np.isnan(weights).any()


def test_a_layer_behind_frozen_ones_is_refused():
    """Its input has no gradient, so backward would pass it by, and its sum would be 0."""
    model, _, _ = sharded(n_layers=3)
    model.model.embed_tokens.weight.requires_grad = False
    with pytest.raises(UserError, match=r"frozen embedding.*layer 0 is trained.*--zero 1"):
        model.loss(IDS[:, :-1], IDS[:, 1:])
    with no_grad():
        model.loss(IDS[:, :-1], IDS[:, 1:])
    for _, p in model.model.layers[0].storage():
        p.requires_grad = False
    with pytest.raises(UserError, match="layer 1 is trained"):
        model.loss(IDS[:, :-1], IDS[:, 1:])


@pytest.mark.parametrize("other", [lambda layers: layers[0], lambda layers: Empty()])
def test_layers_that_are_no_units_are_refused(other):
    """One that is there twice, one without a matrix: the next would get the weights of another layer."""

    class Changed(Transformer):
        def new_arena(self, *kind):
            self.model.layers[1] = other(self.model.layers)
            return super().new_arena(*kind)

    model = Changed(ModelConfig(**SHAPE, n_layers=3), 0, share=Share(0, 1))
    with pytest.raises(UserError, match="every layer needs matrices that no other layer has"):
        Gathering(model, OneRank())


class Empty(Module):
    def __call__(self, h_NC, sequences):
        return h_NC


def test_codes_of_fp8_are_refused():
    """Also where no command line says so: a checkpoint decides the precision of a run that resumes."""
    config = ModelConfig(vocab_size=16, dim=16, n_layers=2, n_heads=1, head_dim=16, max_seq_len=16)
    with pytest.raises(UserError, match="fp8 is not supported with --zero 3"):
        Transformer(config, 0, "sim", "fp8", share=Share(0, 2))
