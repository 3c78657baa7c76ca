"""calibration.py: the model computes what it did, its quantized matrices less wrongly; by the command and by hand."""

import numpy as np
import pytest
from checks import to_host
from serving import make_folder
from twins import random_model, small

from xtrain import UserError
from xtrain.evaluation.run import Options, evaluate
from xtrain.export import main as export
from xtrain.kernels.quantize import dequantize, quantize
from xtrain.nn import calibration
from xtrain.nn.calibration import calibrate, noted_inputs
from xtrain.nn.modules import Linear
from xtrain.nn.quantized import linear_weights, quantize_weights

SHAPES = {
    "grouped heads": small(head_dim=16),
    "bias": small(head_dim=16, qk_norm=False, qkv_bias=True),
    "sandwich": small(head_dim=16, sandwich_norms=True, gelu=True),
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


def logits(model, ids):
    return to_host(model(ids).data)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_model_computes_the_same_and_less_wrongly_quantized(config, monkeypatch):
    monkeypatch.setattr(calibration, "round_weights", lambda *_: None)
    model, ids = uneven_model(config), tokens(config)
    before = logits(model, ids)
    wrong = [sum_of_errors(model, ids)]
    alphas = calibrate(model, ids, "int4")
    np.testing.assert_allclose(logits(model, ids), before, rtol=1e-3, atol=1e-3)
    wrong.append(sum_of_errors(model, ids))
    assert len(alphas) == 4 * config.n_layers and max(alphas) > 0
    assert np.mean(wrong[1] / wrong[0]) < 0.9 and (wrong[1] <= 1.001 * wrong[0]).all()


def sum_of_errors(model, ids):
    """The squared error of the output of each matrix, on the rows that calibrate compares."""
    with noted_inputs(model, 512) as inputs:
        model(ids)
    errors = []
    for noted in inputs.values():
        w = noted.linear.weight.data
        errors.append(((noted.kept[0] @ (dequantize(quantize(w, "int4")) - w).T) ** 2).sum())
    return np.array(errors)


def test_a_replaced_module_is_left_as_it_is():
    class Own(Linear):
        pass

    model = uneven_model(SHAPES["grouped heads"])
    own = model.model.layers[0].mlp.down_proj
    own.__class__ = Own
    weights = own.weight.data.copy()
    assert len(calibrate(model, tokens(model.config), "nf4")) == 4 * model.config.n_layers - 2
    assert np.array_equal(own.weight.data, weights)


def test_refused():
    model = random_model(SHAPES["bias"], device="cpu")
    model.arena.trainable = False
    quantize_weights(model, "int8")
    with pytest.raises(UserError, match="quantized already: calibrate before quantizing"):
        calibrate(model, tokens(model.config), "int4")
    assert len(linear_weights(model)) == 4 * model.config.n_layers


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
