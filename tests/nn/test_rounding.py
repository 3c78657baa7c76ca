"""rounding.py: the error of a matrix against rounding each number alone; codes survive quantizing; a whole model; the command."""

import numpy as np
import pytest
import torch
from checks import to_host
from serving import make_folder
from twins import random_model, small, twin

from xtrain import UserError
from xtrain import export as command
from xtrain.data.tokenizer import Tokenizer
from xtrain.evaluation.run import Options, evaluate
from xtrain.export import main as export
from xtrain.kernels.four_bits import GROUP, grid_of, nearest_on_grid
from xtrain.kernels.quantize import dequantize, quantize
from xtrain.nn import rounding
from xtrain.nn.modules import Linear
from xtrain.nn.quantized import linear_weights, quantize_weights
from xtrain.nn.rounding import round_weights, rounded

SHAPES = {
    "grouped heads": small(head_dim=16),
    "bias": small(head_dim=16, qk_norm=False, qkv_bias=True),
}


def uneven_model(config):
    """Random, with a few large channels in front of each matrix."""
    model = random_model(config, device="cpu")
    random = np.random.default_rng(0)
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            tensor.data = tensor.data * np.exp(random.standard_normal(tensor.shape)).astype("f")
        if name.endswith(("up_proj.weight", "v_proj.weight")):
            rows = np.exp(random.standard_normal((tensor.shape[0], 1)))
            tensor.data = tensor.data * rows.astype("f")
    return model


def tokens(config, B=4, T=17):
    return np.random.default_rng(1).integers(0, config.vocab_size, (B, T)).astype(np.int32)


def problem(O=24, K=200, N=400):  # noqa: E741
    """-> w (O, K), H of correlated inputs"""
    draw = np.random.default_rng(0)
    w = draw.standard_normal((O, K)).astype(np.float32)
    x = draw.standard_normal((N, K)) @ draw.standard_normal((K, K)) * draw.uniform(0.1, 2, K)
    return w, (x.T @ x).astype(np.float32)


def error(new, w, h):
    d = (new - w).astype(np.float64)
    return float((d @ h * d).sum())


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_a_matrix(kind):
    w, h = problem()
    new = rounded(w, h, kind)
    alone = dequantize(quantize(w, kind))
    assert error(new, w, h) < 0.35 * error(alone, w, h)
    again = dequantize(quantize(new, kind))
    assert np.abs(again - new).max() < 0.02 * np.abs(new).max()
    assert error(again, w, h) < 0.4 * error(alone, w, h)


def test_by_hand():
    """x = (1, 1) always: the second column makes up for the first."""
    w = np.zeros((1, 128), np.float32)
    w[0, :4] = -8, 7, 0.4, 0.4
    h = np.diag(np.full(128, 1e-3, np.float32))
    h[2:4, 2:4] = 1
    new = rounded(w, h, "int4")[0]
    assert new[:2].tolist() == [-8, 7] and sorted(new[2:4].tolist()) == [0, 1]


def test_factors():
    _, h = problem()
    a, squares = rounding._factors(h.astype(float))
    assert np.array_equal(a, np.triu(a, 1))
    a = a.astype(float) + np.eye(len(a))
    np.testing.assert_allclose(a * squares @ a.T, h, rtol=1e-4, atol=1e-4 * h.max())


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_the_first_pass_is_gptq(kind, monkeypatch):
    """The updates of its paper, with the Cholesky factor of H's inverse, in float64."""
    monkeypatch.setattr(rounding, "SWEEPS", 0)
    monkeypatch.setattr(rounding, "RANGES", (1.0,))
    monkeypatch.setattr(rounding, "BLOCK", 48)
    w, h = problem(O=8, K=100)
    step, zero = grid_of(quantize(w, kind))
    size = abs(w) if kind == "nf4" else w
    ends = (size == size.max(1, keepdims=True)) | (size == size.min(1, keepdims=True))
    if kind == "nf4":
        ends = size == size.max(1, keepdims=True)
    damped = h.astype(float) + np.diag(np.full(100, 0.01 * np.diag(h).mean()))
    order = np.argsort(-np.diag(h))
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    moved = w[:, order].astype(float)
    expected = np.empty_like(w)
    for i, k in enumerate(order):
        aim = np.where(ends[:, k], w[:, k], moved[:, i])
        expected[:, k] = nearest_on_grid(aim, step[:, k], zero[:, k], kind)
        e = (moved[:, i] - expected[:, k]) / upper[i, i]
        moved[:, i:] -= np.outer(e, upper[i, i:])
    new = rounded(w, h, kind)
    assert np.mean(abs(new - expected) < 1e-5) > 0.98
    assert error(new, w, h) == pytest.approx(error(expected, w, h), rel=0.02)


def test_sweeps_end_where_no_column_alone_can_improve(monkeypatch):
    w, h = problem(O=6, K=80)
    errors = []
    for sweeps in (0, 1, 30):
        monkeypatch.setattr(rounding, "SWEEPS", sweeps)
        new = rounded(w, h, "int4")
        errors.append(error(new, w, rounding._damped(h)))
    assert errors[0] > errors[1] > errors[2]
    step, _ = grid_of(quantize(new, "int4"))
    h = rounding._damped(h)
    low, high = new.min(1, keepdims=True), new.max(1, keepdims=True)
    slope = (new - w) @ h
    for sign in (-1, 1):
        change = sign * step
        inside = (new > low) & (new < high) & (new + change > low) & (new + change < high)
        gain = 2 * change * slope + change**2 * np.diag(h)
        assert gain[inside].min() > -1e-3 * np.median(abs(gain))


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_ranges(kind):
    """Of each group the one with the smallest weighted error, of all that are tried."""
    w, _ = problem(K=200)
    weights = np.random.default_rng(1).uniform(0.1, 3, 200).astype(np.float32)
    size = GROUP[kind]
    low, high = rounding._range(w, weights, kind)
    factors = set()
    for o in range(len(w)):
        for first in range(0, 200, size):
            group = slice(first, first + size)
            errors = []
            for f in rounding.RANGES:
                ends = [f * min(w[o, group].min(), 0), f * max(w[o, group].max(), 0)]
                if kind == "nf4":
                    ends = [-f * abs(w[o, group]).max(), f * abs(w[o, group]).max()]
                limited = np.clip(w[o : o + 1, group], *ends)
                d = dequantize(quantize(limited, kind)) - w[o, group]
                errors.append((float((d**2 * weights[group]).sum()), f, ends))
            least = min(errors)
            expected = next(x for x in errors if x[2][1] == pytest.approx(high[o, first]))
            assert expected[0] <= 1.03 * least[0]  # steps of one group alone are rounded otherwise
            assert low[o, first] == pytest.approx(expected[2][0])
            factors.add(expected[1])
    assert len(factors) > 2


def test_without_inputs_each_number_is_rounded_alone(monkeypatch):
    monkeypatch.setattr(rounding, "RANGES", (1.0,))
    w, _ = problem(K=130)
    new = rounded(w, np.zeros((130, 130), np.float32), "int4")
    np.testing.assert_allclose(new, dequantize(quantize(w, "int4")), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["grouped heads", "bias"])
def test_h_is_that_of_torch(name):
    """Sums of inputs, weighted by the mean squares of gradients, of each matrix in transformers' model."""
    config = SHAPES[name]
    model, ids = uneven_model(config), tokens(config)
    other = twin(model)
    expected, inputs = {}, {}

    def forward(name):
        def note(module, args, output):
            inputs[name] = args[0].detach().flatten(0, 1).double()
            output.register_hook(lambda g: backward(name, g.flatten(0, 1).double()))

        return note

    def backward(name, g):
        x = inputs[name]
        expected[name] = expected.get(name, 0) + (x * (g**2).mean(1, keepdim=True)).T @ x

    for name, module in other.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(forward(name))
    for row in torch.from_numpy(ids).long():
        logits = other(row[None, :-1]).logits
        torch.nn.functional.cross_entropy(logits[0], row[1:]).backward()
    with rounding._observed(model, model.model.layers) as observed:
        for row in ids:
            model.loss(row[None, :-1], row[None, 1:]).backward()
    prefixes = {id(p): prefix for prefix, p in model.storage()}
    for seen in observed:
        for part, h in zip(seen.linear.weight.parts, seen.h_PKK):
            path = prefixes[id(seen.linear.weight)] + part
            theirs = expected[path.removesuffix(".weight")].numpy()
            assert np.linalg.norm(h - theirs) < 1e-4 * np.linalg.norm(theirs), path
    assert len(observed) == 4 * config.n_layers


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_a_model(kind):
    """Nearer to the whole model's logits than each weight rounded alone; nothing but its matrices changes."""
    config = SHAPES["grouped heads"]
    ids = tokens(config, 8, 33)
    whole = uneven_model(config)
    exact = to_host(whole(ids).data)
    models = [uneven_model(config) for _ in "ab"]
    for _, p in linear_weights(models[0]):
        p.data = dequantize(quantize(p.data, kind))
    round_weights(models[1], ids, kind)
    alone, ours = (np.square(to_host(m(ids).data) - exact).mean() for m in models)
    assert ours < 0.9 * alone
    changed = {id(p) for _, p in linear_weights(models[1])}
    for (name, a), (_, b) in zip(whole.storage(), models[1].storage()):
        assert np.array_equal(a.data, b.data) == (id(b) not in changed), name


def test_one_layer_at_a_time(monkeypatch):
    """The last layer's H comes from the inputs that the rounded layers make."""
    config = SHAPES["grouped heads"]
    ids = tokens(config, 8, 33)
    whole = uneven_model(config)
    exact = to_host(whole(ids).data)
    model, alone = (uneven_model(config) for _ in "ab")
    for _, p in linear_weights(alone):
        p.data = dequantize(quantize(p.data, "int4"))
    groups = []
    observed = rounding._observed
    monkeypatch.setattr(rounding, "MEMORY", 1)
    monkeypatch.setattr(
        rounding, "_observed", lambda m, layers: groups.append(layers) or observed(m, layers)
    )
    round_weights(model, ids, "int4")
    assert groups == [[layer] for layer in model.model.layers]
    ours, theirs = (np.square(to_host(m(ids).data) - exact).mean() for m in (model, alone))
    assert ours < 0.9 * theirs


def test_a_replaced_module_is_left_as_it_is():
    class Own(Linear):
        pass

    model = uneven_model(SHAPES["grouped heads"])
    own = model.model.layers[0].mlp.down_proj
    own.__class__ = Own
    weights = own.weight.data.copy()
    before = model.model.layers[0].mlp.gate_up.weight.data.copy()
    round_weights(model, tokens(model.config), "nf4")
    assert not np.array_equal(model.model.layers[0].mlp.gate_up.weight.data, before)
    assert np.array_equal(own.weight.data, weights)


def test_refused():
    model = random_model(SHAPES["bias"], device="cpu")
    model.arena.trainable = False
    quantize_weights(model, "int8")
    with pytest.raises(UserError, match="quantized already: calibrate before quantizing"):
        round_weights(model, tokens(model.config), "int4")
    assert len(linear_weights(model)) == 4 * model.config.n_layers


def test_rows_are_spread_over_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CALIBRATION_ROWS", 3)
    folder = make_folder(tmp_path / "model", dim=64, hidden_dim=64)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"x{i} = {i}\n" for i in range(60)), encoding="utf-8")
    ids = tokenizer.encode(text.read_text())
    rows = command.calibration_tokens(text, tokenizer, 8)
    assert rows.shape == (3, 8) and rows[0].tolist() == ids[:8]
    assert rows[2].tolist() == ids[: len(ids) // 8 * 8][-8:]


def test_the_command(tmp_path, capsys):
    folder = make_folder(tmp_path / "model", dim=64, hidden_dim=64)
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 200, encoding="utf-8")
    out = tmp_path / "out"
    line = ["--model", str(folder), "--folder", str(out), "--calibrate", str(text)]
    assert export([*line, "--weights", "int4"]) == 0
    few = tmp_path / "few.txt"
    few.write_text("x", encoding="utf-8")
    assert export([*line[:-1], str(few)]) == 2
    assert "--calibrate needs at least" in capsys.readouterr().err
    for where in (["--folder", str(tmp_path / "b")], ["--gguf", str(tmp_path / "b.gguf")]):
        assert export([*line[:2], *where, "--weights", "int4"]) == 2
        assert "--weights int4 is for --calibrate TEXT: give both" in capsys.readouterr().err
    found = []
    for model, weights in ((folder, "full"), (out, "full"), (out, "int4")):
        options = Options(
            model=str(model), tasks=(str(text),), context=32, device="cpu", weights=weights
        )
        found.append(evaluate(options)[0].metrics["perplexity"].value)
    assert found[0] == pytest.approx(found[1], rel=0.05)
    # it has been rounded already, all but its head
    assert found[1] == pytest.approx(found[2], rel=3e-3)
    changed = [(d / "model.safetensors").read_bytes() for d in (folder, out)]
    assert changed[0] != changed[1]
