"""AdamW against PyTorch over twenty steps, clipping, the schedule."""

import itertools
import math

import numpy as np
import pytest
import torch
from checks import normal, to_host

from xtrain import AdamW, ModelConfig, Tensor, Transformer, UserError
from xtrain.device import to_device
from xtrain.nn import modules as nn
from xtrain.nn.arena import ALIGN
from xtrain.nn.optim import Decay, Muon, clip, learning_rate

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
TINY = ModelConfig(
    vocab_size=50, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, hidden_dim=24, max_seq_len=16
)  # fmt: skip


def set_gradients(model, seed, scale=1.0):
    """The same random gradient for every parameter, on every device. -> {name: gradient}"""
    gradients = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        gradients[name] = normal([seed, i], *p.shape, scale=scale)
        p.grad[...] = to_device(gradients[name], model.device)
    return gradients


# ----------------------------------------------------------------------------- AdamW
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, dict(betas=(0.8, 0.999), eps=1e-6, weight_decay=0.0)])
def test_twenty_steps_against_pytorch(options, device):
    model = Transformer(TINY, device=device)
    theirs = {name: torch.tensor(to_host(p.data).copy()) for name, p in model.named_parameters()}
    decay = options.get("weight_decay", 0.1)
    groups = [
        dict(params=[p for n, p in theirs.items() if "norm" not in n], weight_decay=decay),
        dict(params=[p for n, p in theirs.items() if "norm" in n], weight_decay=0.0),
    ]
    torch_options = dict(
        lr=1e-2, betas=options.get("betas", (0.9, 0.95)), eps=options.get("eps", 1e-8)
    )
    reference = torch.optim.AdamW(groups, **torch_options)
    ours = AdamW(model, 1e-2, **options)
    for step in range(20):
        ours.lr = reference.param_groups[0]["lr"] = reference.param_groups[1]["lr"] = 1e-2 / (
            1 + step
        )
        for name, gradient in set_gradients(model, step, scale=0.1).items():
            theirs[name].grad = torch.tensor(gradient)
        ours.step()
        reference.step()
    assert ours.t == 20
    for name, p in model.named_parameters():
        difference = np.abs(to_host(p.data) - theirs[name].numpy()).max()
        assert difference <= 1e-6, f"{name}: {difference}"


@pytest.mark.parametrize("device", DEVICES)
def test_only_matrices_decay_and_padding_stays_zero(device):
    model = Transformer(TINY, device=device)
    before = {name: to_host(p.data).copy() for name, p in model.named_parameters()}
    optimizer = AdamW(model, lr=0.1, weight_decay=0.5)
    optimizer.step()  # all gradients are zero: what is left is the decay
    for name, p in model.named_parameters():
        factor = np.float32(1 if "norm" in name else 1 - 0.1 * 0.5)
        np.testing.assert_allclose(to_host(p.data), before[name] * factor, rtol=1e-6)
    for _ in range(3):
        set_gradients(model, 1)
        optimizer.step()
    for table in (model.model.embed_tokens.weight, model.lm_head):
        assert table.shape[0] == 128 and not to_host(table.data)[50:].any()
        assert to_host(table.data)[:50].all()


def test_frozen_parameters_stay():
    """Those between them get what they would get without freezing: their part of the moments too."""
    free, model = (Transformer(TINY) for _ in range(2))
    frozen = ("model.layers.0.mlp.", "model.embed_tokens.", "model.layers.1.self_attn.q_norm.")
    for name, p in model.storage():
        p.requires_grad = not name.startswith(frozen)
    before = {name: p.data.copy() for name, p in model.named_parameters()}
    steps = AdamW(free, lr=0.1), AdamW(model, lr=0.1)
    for i in range(3):
        for m, optimizer in zip((free, model), steps):
            set_gradients(m, i)
            optimizer.step()
    for (name, p), (_, other) in zip(model.named_parameters(), free.named_parameters()):
        want = before[name] if name.startswith(frozen) else other.data
        assert np.array_equal(p.data, want), name


# ----------------------------------------------------------------------------- parameter groups
def by_name(model, *marks):
    return [p for name, p in model.named_parameters() if any(mark in name for mark in marks)]


OWN = {  # of a group
    ("embed_tokens", "lm_head"): dict(lr=3e-2, weight_decay=0.0),
    ("norm",): dict(weight_decay=0.3),
    ("down_proj", "q_proj", "k_proj", "v_proj"): dict(lr=1e-3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pieces", [1, 3])
def test_groups_against_pytorch(pieces, device):
    """Also where slices that a rank owns begin inside a parameter (pieces), and with a moving average."""
    model = Transformer(TINY, device=device)
    size = model.arena.weights.size
    cuts = [size * i // pieces // ALIGN * ALIGN for i in range(pieces)] + [size]
    ours = AdamW(
        model, 1e-2, owned=list(itertools.pairwise(cuts)), ema_decay=0.5,
        groups=[dict(own, params=by_name(model, *marks)) for marks, own in OWN.items()],
    )  # fmt: skip
    theirs = {name: torch.tensor(to_host(p.data).copy()) for name, p in model.named_parameters()}
    chosen = {n: own for n in theirs for marks, own in OWN.items() if any(m in n for m in marks)}
    reference = torch.optim.AdamW(
        [{"weight_decay": 0.1, **chosen.get(n, {}), "params": [p]} for n, p in theirs.items()],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
    rates = [group["lr"] for group in reference.param_groups]
    for step in range(5):
        ours.lr = 1e-2 / (1 + step)
        for group, rate in zip(reference.param_groups, rates):
            group["lr"] = rate / (1 + step)
        for name, gradient in set_gradients(model, step, scale=0.1).items():
            theirs[name].grad = torch.tensor(gradient)
        ours.step()
        reference.step()
    for name, p in model.named_parameters():
        difference = np.abs(to_host(p.data) - theirs[name].numpy()).max()
        assert difference <= 1e-6, f"{name}: {difference}"


def test_a_frozen_group_stays_and_muon_has_groups_for_the_rest():
    model = Transformer(TINY)
    model.lm_head.requires_grad = False
    before = model.lm_head.data.copy()
    table = model.model.embed_tokens.weight
    optimizer = Muon(
        model, 0.1, groups=[dict(params=[model.lm_head, ("name", table)], lr=0.0, weight_decay=0.5)]
    )
    was = table.data.copy()
    set_gradients(model, 1)
    optimizer.step()
    assert np.array_equal(model.lm_head.data, before) and np.array_equal(table.data, was)
    with pytest.raises(UserError, match=r"Muon updates the matrices .* leave them out"):
        Muon(model, 0.1, groups=[dict(params=by_name(model, "down_proj"), lr=1.0)])


def test_groups_that_cannot_be():
    class Own(AdamW):
        def update(self, *arguments): ...

    model = Transformer(TINY)
    qkv = by_name(model, "layers.0.self_attn.q_proj")
    norm = model.model.norm.weight
    wrong = [
        ([dict(params=qkv)], r"q_proj\.weight, .* are one parameter: give all to one group"),
        ([dict(params=norm), dict(params=[norm], lr=1.0)], "weight: a parameter is in two groups"),
        ([dict(lr=1.0)], "has lr: give params, and"),
        ([dict(params=norm, betas=(0, 0))], "has params, betas: give params, and lr or weight_d"),
        ([dict(params=norm, lr=-1.0)], "out of range"),
        ([dict(params=norm, weight_decay=math.nan)], "out of range"),
        ([dict(params=[norm.data])], "holds ndarray: give tensors of"),
        ([dict(params=Transformer(TINY).model.norm.weight)], "holds Parameter: give tensors of"),
    ]
    for groups, sentence in wrong:
        with pytest.raises(UserError, match=sentence):
            AdamW(model, 0.1, groups=groups)
    with pytest.raises(UserError, match="give one above 0"):
        AdamW(model, 0.0, groups=[dict(params=norm, lr=1.0)])
    with pytest.raises(UserError, match=r"Own\.update decides the weight decay"):
        Own(model, 0.1, groups=[dict(params=norm, weight_decay=1.0)])
    with pytest.raises(UserError, match=r"got list: give parameter groups with groups="):
        AdamW([dict(params=[norm])], lr=0.1)


def test_an_optimizer_gets_the_model_not_its_parameters():
    with pytest.raises(UserError, match="an optimizer needs the model itself, got generator"):
        AdamW(Transformer(TINY).named_parameters(), lr=0.1)


def test_a_model_that_was_changed_needs_a_new_arena():
    model, other = Transformer(TINY), Transformer(TINY)
    optimizer = AdamW(model, lr=0.1)
    model.renew_arena()
    with pytest.raises(UserError, match="make AdamW last"):
        optimizer.step()
    model.model.norm = other.model.norm
    with pytest.raises(UserError, match="not in the model's arena"):
        AdamW(model, lr=0.1)


def test_a_module_of_ones_own_trains():
    class Line(nn.Module):
        def __init__(self):
            self.up = nn.Linear(3, 1, 0.1)
            self.arena = self.make_arena("cpu", seed=0)

    model, x = Line(), normal(1, 8, 3)
    optimizer, want = AdamW(model, lr=0.1, weight_decay=0), x @ np.ones((3, 1), np.float32)
    for _ in range(100):
        model.zero_grad()
        y = model.up(Tensor(x))
        y.backward(y.data - want)
        optimizer.step()
    np.testing.assert_allclose(model.up.weight.data, 1, atol=0.02)


def test_the_clip_factor_scales_the_gradient():
    one, two = Transformer(TINY), Transformer(TINY)
    for model, scale, factor in ((one, 1.0, 0.25), (two, 0.25, None)):
        set_gradients(model, 0)
        model.arena.grads *= np.float32(scale)
        AdamW(model, 0.1).step(None if factor is None else np.full(1, factor, np.float32))
    assert np.array_equal(one.arena.weights, two.arena.weights)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_twice(device):
    results = []
    for _ in range(2):
        model = Transformer(TINY, device=device)
        optimizer = AdamW(model, 0.01)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step(clip(model, 1.0)[1])
        results.append([to_host(x) for x in (model.arena.weights, optimizer.m, optimizer.v)])
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_zero_grad():
    model = Transformer(TINY)
    set_gradients(model, 0)
    AdamW(model, 0.1).zero_grad()
    assert not model.arena.grads.any()
    set_gradients(model, 0)
    model.zero_grad()
    assert not model.arena.grads.any()


@pytest.mark.parametrize(
    "name, bad",
    [
        ("lr", -1e-3), ("lr", math.inf), ("lr", math.nan), ("betas", (1.0, 0.9)), ("betas", (0.9, -0.1)),
        ("betas", (0.9, math.nan)), ("eps", 0.0), ("eps", -1.0), ("weight_decay", -0.1),
        ("weight_decay", math.nan),
    ],
)  # fmt: skip
def test_hyperparameters_out_of_range(name, bad):
    options = {"lr": 1e-3, name: bad}
    with pytest.raises(UserError, match=f"AdamW: {name}"):
        AdamW(Transformer(TINY), **options)


# ----------------------------------------------------------------------------- clipping
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clip_against_pytorch(max_norm, device):
    model = Transformer(TINY, device=device)
    theirs = []
    for gradient in set_gradients(model, 7).values():
        theirs.append(torch.zeros(gradient.shape, requires_grad=True))
        theirs[-1].grad = torch.tensor(gradient)
    first = theirs[0].grad.clone()
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    before = to_host(model.arena.grads).copy()
    norm, factor = clip(model, max_norm)
    assert norm.shape == factor.shape == (1,) and np.array_equal(to_host(model.arena.grads), before)
    np.testing.assert_allclose(to_host(norm), float(want), rtol=1e-6)
    np.testing.assert_allclose(to_host(factor)[0] * first, theirs[0].grad, rtol=1e-5)


def test_clipping_switched_off():
    model = Transformer(TINY)
    norm, factor = clip(model, 0)
    assert norm[0] == 0 and factor[0] == 1  # no gradient, no norm, and nothing is divided by it
    set_gradients(model, 0, scale=100)
    norm, factor = clip(model, 0)
    assert norm[0] > 1000 and factor[0] == 1


# ----------------------------------------------------------------------------- the schedule
def test_learning_rate_at_the_corners():
    rate = lambda step: learning_rate(step, steps=100, peak=2.0, warmup=10, min_ratio=0.1)
    assert rate(0) == pytest.approx(0.2) and rate(4) == pytest.approx(1.0)
    assert rate(9) == pytest.approx(2.0) and rate(10) == pytest.approx(2.0)
    assert rate(99) == pytest.approx(0.2) and rate(1000) == pytest.approx(0.2)
    middle = 10 + (99 - 10) / 2
    assert (rate(math.floor(middle)) + rate(math.ceil(middle))) / 2 == pytest.approx(1.1)
    rates = [rate(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    "steps, warmup, want",
    [
        (1, 0, [1.0]),
        (2, 0, [1.0, 0.0]),
        (3, 0, [1.0, 0.5, 0.0]),
        (2, 2, [0.5, 1.0]),
        (3, 2, [0.5, 1.0, 1.0]),
        (2, 5, [0.2, 0.4]),
        (0, 0, []),
    ],
)
def test_short_runs(steps, warmup, want):
    rates = [learning_rate(step, steps, 1.0, warmup, 0.0) for step in range(steps)]
    assert rates == pytest.approx(want)


@pytest.mark.parametrize(
    "shape, middle", [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)]
)
def test_warm_up_stable_decay(shape, middle):
    """100 steps: 10 of warm-up, the peak, and a decay over the last 20."""
    rate = lambda step: learning_rate(step, 100, 2.0, 10, 0.1, Decay(0.2, shape))
    assert [rate(0), rate(9)] == pytest.approx([0.2, 2.0])
    assert {rate(step) for step in range(9, 80)} == {2.0}
    assert rate(80) < 2.0 and rate(89) == pytest.approx(2.0 * (0.1 + 0.9 * middle))
    assert rate(99) == pytest.approx(0.2) and rate(1000) == pytest.approx(0.2)
    decay = [rate(step) for step in range(79, 100)]
    assert decay == sorted(decay, reverse=True) and len(set(decay)) == 21


def test_up_to_the_decay_the_number_of_steps_does_not_matter():
    wsd = Decay(0.2, "sqrt")
    short, long = ([learning_rate(i, n, 1.0, 5, 0.0, wsd) for i in range(80)] for n in (100, 1000))
    assert short == long


@pytest.mark.parametrize(
    "steps, warmup, fraction", [(1, 0, 0.2), (3, 2, 0.9), (5, 0, 0.1), (4, 0, 1.0)]
)
def test_short_runs_with_a_stable_phase(steps, warmup, fraction):
    rates = [
        learning_rate(i, steps, 1.0, warmup, 0.0, Decay(fraction, "linear")) for i in range(steps)
    ]
    want = {1: [1.0], 3: [0.5, 1.0, 1.0], 5: [1.0] * 5, 4: [1.0, 2 / 3, 1 / 3, 0.0]}[steps]
    assert rates == pytest.approx(want)
