"""A mixture of experts in a run: what is counted, what is refused, and adapters of its attention."""

import io

import numpy as np
import pytest
from rich.console import Console
from runs import run
from twins import random_model, small

from xtrain import Engine, Transformer, UserError, family
from xtrain.config import ModelConfig, TrainConfig, resolve
from xtrain.formats.huggingface import shapes_of
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.nn.rounding import round_weights
from xtrain.training.flops import flops_per_token
from xtrain.training.model_summary import describe, parameter_table

EXPERTS = dict(n_experts=4, experts_per_token=2, expert_hidden_dim=24)
CONFIG = small(**EXPERTS, dense_layers=(0,))


def test_active_parameters_are_counted():
    """2 of 4 experts of width 24 are an MLP of 48, and the router."""
    c = small(**EXPERTS)
    model, dense = Transformer(c), Transformer(small(hidden_dim=48))
    router = c.n_layers * c.dim * c.n_experts
    assert flops_per_token(model, 10) == flops_per_token(dense, 10) + 6 * router
    numbers = lambda c: family.parameters(c)
    assert numbers(c) == numbers(small(hidden_dim=48)) + router
    text = io.StringIO()
    Console(file=text, width=100).print(parameter_table(model))
    active = sum(map(np.prod, shapes_of(dense).values())) + router
    assert "active for each token" in text.getvalue() and f" {active:,} " in text.getvalue()
    assert "2 of 4 experts 24, vocabulary" in describe(c) and "Qwen3Moe-style" in describe(c)


def test_options_of_the_shape():
    resolved, shape = resolve(TrainConfig(preset="tiny", experts=8), gpu=False)
    assert (shape["n_experts"], shape["experts_per_token"]) == (8, 2)
    assert ModelConfig(vocab_size=9, **shape).expert_hidden_dim == 384
    _, shape = resolve(TrainConfig(depth=2, experts=1, expert_hidden_dim=8), gpu=False)
    assert (shape["experts_per_token"], shape["expert_hidden_dim"]) == (1, 8)
    assert (resolved.balance_loss, resolved.router_z_loss) == (0.01, 0.001)


def test_what_experts_do_not_have_is_refused():
    model = Transformer(CONFIG, trainable=False)
    with pytest.raises(UserError, match="calibration is not supported for a mixture of experts"):
        round_weights(model, np.zeros((1, 4), np.int32), "int4")
    with pytest.raises(
        UserError, match="fp8 is not supported for a mixture of experts: choose bf16"
    ):
        Transformer(small(**EXPERTS, head_dim=16), None, "sim", "fp8")
    adapted = AdaptedTransformer(CONFIG, trainable=False)
    adapted.adapt(Lora(2, 4.0, ("q_proj", "o_proj")))
    assert len(shapes_of(adapted)) == 4 * CONFIG.n_layers
    ids = np.arange(8).reshape(1, 8) % 3
    adapted.loss(ids, ids).backward()
    assert np.abs(adapted.arena.grads).max() > 0


@pytest.mark.parametrize("keep, dense", [((0,), None), ((1, 2), ()), ((2, 0), (1,))])
def test_layers_can_be_removed(keep, dense, tmp_path):
    """Layer 0 has an MLP, the others experts."""
    model = random_model(small(**EXPERTS, n_layers=3, dense_layers=(0,)), device="cpu")
    model.model.layers = [model.model.layers[i] for i in keep]
    model.renew_arena()
    assert model.variation == ""
    ids = np.arange(6)[None]
    expected = model(ids).numpy()
    model.save_pretrained(tmp_path)
    again = Transformer.from_pretrained(tmp_path)
    if dense is None:
        assert again.config.n_experts == 0
    else:
        assert again.config.dense_layers == dense
    assert np.array_equal(again(ids).numpy(), expected)


def test_the_engine_serves_a_mixture_that_no_other_program_has():
    """A row's bits depend on how many rows an expert has, which is not reading other tokens."""
    model = random_model(small(**EXPERTS, qkv_bias=True), device="cpu")
    assert model.variation == "qk_norm with qkv_bias with n_experts"
    (answer,) = Engine(model, 1).generate([[1, 2, 3]], 5)
    assert answer == model.generate(np.array([1, 2, 3]), 5)[3:].tolist()


def test_a_run_moves_the_biases_of_its_routers(tmp_path, cache):
    folder = run(
        tmp_path, steps=3, experts=4, expert_bias=True, expert_bias_rate=0.25, micro_batch=2
    )
    model = Transformer.from_pretrained(folder)
    for layer in model.model.layers:
        bias = layer.mlp.bias.data
        assert np.abs(bias).max() >= 0.25 and (bias * 4 % 1 == 0).all(), bias
    larger = Transformer.from_pretrained(folder, vocab_size=model.config.vocab_size + 2)
    assert larger.config.vocab_size == model.config.vocab_size + 2
    ids = np.arange(8).reshape(1, 8)
    np.testing.assert_allclose(larger(ids).numpy()[..., :-2], model(ids).numpy(), rtol=0, atol=1e-5)


def test_how_to_use_a_model_that_only_xtrain_has(tmp_path, cache):
    """With --expert-bias it is built from config.json."""
    text = io.StringIO()
    folder = run(tmp_path, Console(file=text, width=200), steps=2, experts=3, expert_bias=True)
    assert f"xtrain.generate --model {folder} " in text.getvalue()
    assert "build the model again" not in text.getvalue()
