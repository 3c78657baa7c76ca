"""python -m xtrain.compare: agreement, and the stage where two models part."""

import sys

import numpy as np
import pytest
from twins import DEVICE, batch, random_model, set_weights, small, twin

from xtrain.compare import main as compare_main
from xtrain.data.tokenizer import Tokenizer
from xtrain.device import to_numpy
from xtrain.export import main as export
from xtrain.inspect import compare


@pytest.fixture(scope="module", params=[False, True], ids=["llama", "qwen3 tied"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "model"
    config = small(qk_norm=request.param, tie_embeddings=request.param)
    random_model(config).save_pretrained(folder)
    return folder


STAGES = (
    ["embedding"]
    + [f"layer {i} {what}" for i in range(2) for what in ("attention", "output")]
    + ["final norm", "logits", "loss"]
)


def test_agreement(folder, capsys):
    assert compare_main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0].strip() for line in out.splitlines()[1:-1]] == STAGES
    assert "NO" not in out
    assert f"2 x 32 tokens, xtrain ({DEVICE}) and transformers: no stage differs by more" in out


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_experts_of_an_odd_width(kind, tmp_path, capsys):
    """transformers reads a GGUF file by itself; its grouped products refuse such widths."""
    config = small(n_experts=3, experts_per_token=2, expert_hidden_dim=7, vocab_size=300)
    model = tmp_path / "model"
    random_model(config).save_pretrained(model, Tokenizer.train(["the quick fox " * 9], 300))
    if kind == "gguf":
        pytest.importorskip("gguf")
        path = tmp_path / "a.gguf"
        assert export(["--model", str(model), "--gguf", str(path), "--type", "f32"]) == 0
        model = path
    assert compare_main([str(model)]) == 0
    assert "no stage differs" in capsys.readouterr().out


def test_given_ids_and_a_tolerance_that_nothing_meets(folder, capsys):
    assert compare_main([str(folder), "--ids", "1", "2", "3", "--tolerance", "1e-12"]) == 1
    assert "1 x 3 tokens" in capsys.readouterr().out


CHANGES = {
    "model.embed_tokens.weight": "embedding",
    "model.layers.0.self_attn.v_proj.weight": "layer 0 attention",
    "model.layers.1.self_attn.k_norm.weight": "layer 1 attention",
    "model.layers.0.mlp.down_proj.weight": "layer 0 output",
    "model.layers.1.post_attention_layernorm.weight": "layer 1 output",
    "model.norm.weight": "final norm",
    "lm_head.weight": "logits",
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_difference_is_named(name):
    model = random_model(small())
    other = twin(model)
    tensor = dict(model.named_parameters())[name]
    set_weights(tensor, to_numpy(tensor.data) * np.float32(1.01))
    ids, _ = batch(model.config, 2, 9)
    before = vars(model.model).copy()
    differences = compare.compare(model, other, ids)
    assert [d.stage for d in differences] == STAGES
    assert compare.first_divergence(differences, 1e-4).stage == CHANGES[name]
    assert vars(model.model) == before and not hasattr(model.model.layers[0].self_attn, "_note")
    assert not other.model.norm._forward_hooks


def test_nan_is_a_difference():
    model = random_model(small())
    other = twin(model)
    tensor = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    set_weights(tensor, np.full(tensor.shape, np.nan, np.float32))
    ids, _ = batch(model.config, 1, 5)
    first = compare.first_divergence(compare.compare(model, other, ids), 1e-4)
    assert first.stage == "layer 1 output" and np.isnan(first.relative)


def test_bad_input(folder, capsys, monkeypatch):
    for arguments, words in (
        (["nowhere"], "nowhere does not exist"),
        ([str(folder), "--length", "1"], "--length at least 2"),
        ([str(folder), "--length", "49"], "2 to 48 tokens"),
        ([str(folder), "--ids", "1", "61"], "ids from 0 to 60"),
        ([str(folder), "--ids", "5"], "2 to 48 tokens"),
    ):
        assert compare_main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("xtrain.compare: ") and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert compare_main([str(folder)]) == 2
    assert "pip install torch transformers" in capsys.readouterr().err
