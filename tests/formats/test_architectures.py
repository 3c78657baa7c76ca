"""Other people's models: tiny ones with the keys of published configs, built by transformers, read, served and written by xtrain.

The table of lessons/howto/models.md is made here, from the models that these tests compare.
"""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checks import to_host
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoConfig, AutoModelForCausalLM
from twins import DEVICE

from xtrain import Engine, Transformer, UserError
from xtrain.device import to_device
from xtrain.formats.architectures import config_from_hf
from xtrain.formats.expert_files import mixtral_name
from xtrain.formats.huggingface import written_tensors
from xtrain.formats.unsupported import REASONS
from xtrain.inspect.compare import compare
from xtrain.nn.router_losses import RouterLosses

ROOT = Path(__file__).parents[2]
SIZE = dict(
    vocab_size=61, hidden_size=64, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
QWEN3_MOE = "Qwen3-MoE, Qwen3-Coder (A3B)"
# models -> (model_type of transformers, what differs from SIZE, what the table says)
PUBLISHED = {
    "Llama 2, TinyLlama, Yi, SmolLM, SmolLM2": ("llama", {}, ""),
    "Llama 3, 3.1, 3.2, R1-Distill-Llama": ("llama", dict(rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=True), "RoPE scaling `llama3`"),
    "Code Llama": ("llama", dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear", factor=2.0)), "RoPE scaling `linear`, `dynamic`"),
    "Qwen2, Qwen2.5, R1-Distill-Qwen": ("qwen2", dict(rope_theta=1e6, sliding_window=16, use_sliding_window=False), "bias on q, k, v"),
    "Qwen3 (dense)": ("qwen3", dict(head_dim=32, tie_word_embeddings=True), "RMSNorm on q and k"),
    "Qwen2.5 and Qwen3 with long context": ("qwen3", dict(head_dim=32, rope_scaling=YARN), "YaRN"),
    "SmolLM3": ("smollm3", dict(no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0], pad_token_id=0, pretraining_tp=2), "layers without RoPE"),
    "Mistral v0.2, v0.3, Nemo": ("mistral", dict(head_dim=32, sliding_window=None), "read as a Llama"),
    "Mistral v0.1": ("mistral", dict(head_dim=32, sliding_window=9), "sliding window"),
    "Qwen2 and Qwen3 with windows": ("qwen2", dict(sliding_window=9, use_sliding_window=True, max_window_layers=2), "sliding window in some layers"),
    "Phi-4": ("phi3", dict(sliding_window=64, pad_token_id=0), "packed weights, read as a Llama"),
    "Granite 3": ("granite", dict(
        embedding_multiplier=12.0, attention_multiplier=0.0625, residual_multiplier=0.22, logits_scaling=8.0, tie_word_embeddings=True,
    ), "multipliers, folded into the weights of a Llama"),
    "Gemma 3 (text)": ("gemma3_text", dict(
        num_hidden_layers=5, head_dim=32, query_pre_attn_scalar=20, sliding_window=9, sliding_window_pattern=5, rope_local_base_freq=100.0,
        rope_scaling=dict(rope_type="linear", factor=2.0),
    ), "norms on both sides of a branch, local layers with a window and RoPE of their own, GELU"),
    QWEN3_MOE: ("qwen3_moe", dict(
        head_dim=32, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1],
    ), "a mixture of experts, in some layers an MLP"),
    "OLMoE": ("olmoe", dict(num_experts=5, num_experts_per_tok=3, pad_token_id=0, eos_token_id=1), "a mixture of experts, RMSNorm on all of q and of k"),
    "Mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=9, rms_norm_eps=1e-5), "a mixture of experts"),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", PUBLISHED)


def keys_of(name, changes):
    """-> {key: value} of a config.json, without the keys that are None in `changes`"""
    kind, usual, _ = PUBLISHED[name]
    removed = {key for key, x in changes.items() if x is None}
    keys = {"model_type": kind} | SIZE | usual | changes
    # a copy, because transformers changes rope_scaling
    return copy.deepcopy({key: x for key, x in keys.items() if key not in removed})


def published(name, folder, **changes):
    """Write a tiny random model of transformers. -> the model: fp32, eager attention"""
    kind = PUBLISHED[name][0]
    config = AutoConfig.for_model(**keys_of(name, changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape)
        tall = parameter.ndim > 1
        centre = 0 if kind == "gemma3_text" else 1  # of a norm
        parameter.data = values * parameter.shape[-1] ** -0.5 if tall else centre + 0.3 * values
    if kind == "granite":  # order 1 in spite of the multipliers
        model.lm_head.weight.data *= 2
    model.save_pretrained(folder)
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def with_gradients(theirs):
    """-> {xtrain's name: values, gradient} of a model of transformers, which packs experts"""
    known = {}
    for name, parameter in theirs.named_parameters():
        arrays = parameter.detach().numpy(), parameter.grad.numpy()
        if "experts" not in name:
            known[name] = arrays
            continue
        prefix, end = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if end == "gate_up_proj" else ("down_proj",)
        for e, (values, gradient) in enumerate(zip(*arrays)):
            halves = zip(*(np.split(x, len(parts)) for x in (values, gradient)))
            known |= {f"{prefix}.{e}.{part}.weight": x for part, x in zip(parts, halves)}
    return known


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "Llama 3," in name or "dense" in name] + ["SmolLM3", "Granite 3"])  # fmt: skip
def test_tied_weights_under_the_name_of_the_head(tmp_path, name, sharded):
    """save_model of safetensors stores shared weights once, under the name that comes first."""
    theirs = published(name, tmp_path)
    path = tmp_path / "model.safetensors"
    save_model(theirs, path)
    tensors = load_file(path)
    assert "lm_head.weight" in tensors and "model.embed_tokens.weight" not in tensors
    if sharded:
        path.unlink()
        shards = {"model-1.safetensors": ["lm_head.weight"]}
        shards["model-2.safetensors"] = [key for key in tensors if key != "lm_head.weight"]
        for file, keys in shards.items():
            save_file({key: tensors[key] for key in keys}, tmp_path / file, {"format": "pt"})
        index = {
            "metadata": {},
            "weight_map": {key: file for file, keys in shards.items() for key in keys},
        }
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = np.random.default_rng(1).integers(0, 61, (2, 9))
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ids)
    model = Transformer.from_pretrained(tmp_path, DEVICE)
    assert np.abs(to_host(model(ids).data) - expected).max() <= 1e-5 * np.abs(expected).max()
    model.load_weights(tmp_path)
    assert np.abs(to_host(model(ids).data) - expected).max() <= 1e-5 * np.abs(expected).max()


@EVERY
def test_read_serve_train_and_write(name, tmp_path):
    theirs = published(name, tmp_path / "theirs")
    model = Transformer.from_pretrained(tmp_path / "theirs", DEVICE)
    ids = np.random.default_rng(1).integers(0, 61, (2, 40))
    expected = logits_of(theirs, ids)
    assert expected.std() > 0.2
    assert np.abs(to_host(model(ids).data) - expected).max() <= 1e-5 * max(
        1, np.abs(expected).max()
    )
    prompts = [ids[0, :5].tolist(), ids[1, :17].tolist()]
    for prompt, answer in zip(prompts, Engine(model, 2).generate(prompts, 16)):
        ours = torch.tensor([prompt + answer])
        best = logits_of(theirs, ours.numpy())[0, len(prompt) - 1 : -1].argmax(-1)
        assert answer == best.tolist()
    # the gradient of the loss in a random direction of every weight that both have
    targets = torch.from_numpy(ids[:, 1:].copy())
    loss = torch.nn.functional.cross_entropy(
        theirs(torch.from_numpy(ids[:, :-1].copy())).logits.flatten(0, 1), targets.flatten()
    )
    loss.backward()
    ours = model.loss(ids[:, :-1], ids[:, 1:])
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    ours.backward()
    known = with_gradients(theirs)
    compared = 0
    as_written = written_tensors(model)
    in_file = mixtral_name if name == "Mixtral" else str
    for path, parameter in model.named_parameters():
        values, gradient = known.get(path, (None, None))
        same = values is not None and np.allclose(
            values, as_written[in_file(path)].numpy(), rtol=0, atol=1e-7
        )
        if same and path != "model.embed_tokens.weight":
            error = np.linalg.norm(to_host(parameter.grad) - gradient)
            assert error <= 1e-4 * np.linalg.norm(gradient), path
            compared += 1
    # norms at least, and nearly all of a mixture of experts, whose weights are as in transformers
    assert compared >= (len(known) - 1 if model.config.n_experts else 9)
    model.save_pretrained(tmp_path / "ours")
    again, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert not any(found.values()), found
    assert np.abs(logits_of(again.eval(), ids) - expected).max() <= 1e-5 * max(
        1, np.abs(expected).max()
    )


@pytest.mark.gpu
@EVERY
def test_bf16_is_near_transformers_in_fp32(name, tmp_path):
    """A mixture's router may choose other experts for a token whose scores nearly tie, so the median token counts."""
    theirs = published(name, tmp_path)
    half = Transformer.from_pretrained(tmp_path, "gpu", "bf16")
    ids = np.random.default_rng(1).integers(0, 61, (4, 40))
    expected = logits_of(theirs, ids)
    errors = np.abs(to_host(half(ids).data).astype(np.float32) - expected).mean(-1)
    assert np.median(errors) <= 2e-2 * expected.std(), np.quantile(errors, [0, 0.5, 0.9, 1])
    targets = torch.from_numpy(ids[:, 1:].copy())
    loss = torch.nn.functional.cross_entropy(
        torch.from_numpy(expected[:, :-1]).flatten(0, 1), targets.flatten()
    )
    ours = half.loss(ids[:, :-1], ids[:, 1:])
    assert ours.item() == pytest.approx(loss.item(), rel=1e-2)
    ours.backward()


def test_comparing_stages_with_transformers(tmp_path):
    """Where multipliers or norms act elsewhere in xtrain, only some stages are comparable."""
    for name, n in (("Granite 3", 7), ("SmolLM3", 12), ("Gemma 3 (text)", 8)):
        theirs = published(name, tmp_path)
        model = Transformer.from_pretrained(tmp_path, DEVICE)
        theirs.config.architectures = [type(theirs).__name__]
        found = compare(model, theirs, np.arange(40).reshape(2, 20))
        assert len(found) == n and max(d.relative for d in found) < 1e-4, found


def changed(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    "name, changes, sentence",
    [
        ("Llama 2, TinyLlama, Yi, SmolLM, SmolLM2", dict(use_sliding_window=True, sliding_window=32), "a sliding window of 32 tokens, which llama has not"),
        ("Qwen2 and Qwen3 with windows", dict(layer_types=["sliding_attention"]), "layer_types has 1 entries for 4 layers"),
        ("Qwen2 and Qwen3 with windows", dict(layer_types=["chunked_attention"] * 4), "layer type 'chunked_attention', which xtrain"),
        ("Phi-4", dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.75)), "partial_rotary_factor 0.75"),
        ("Phi-4", dict(rope_scaling=dict(YARN, type="yarn")), "the RoPE type 'longrope', which xtrain"),
        ("Mistral v0.1", dict(layer_types=["full_attention", "sliding_attention"] * 2), "a sliding window in some layers only"),
        ("Phi-4", dict(num_key_value_heads=4), r"qkv_proj.weight has shape \(128, 64\), expected 192 rows"),
        ("Gemma 3 (text)", dict(final_logit_softcapping=30.0), "final_logit_softcapping 30.0, which xtrain does not support"),
        ("Gemma 3 (text)", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
        ("Gemma 3 (text)", dict(use_bidirectional_attention=True), "use_bidirectional_attention True"),
        ("Gemma 3 (text)", dict(hidden_activation="gelu"), "hidden_activation 'gelu'"),
        ("Gemma 3 (text)", dict(sliding_window=None), "layer type 'sliding_attention', which xtrain"),
        ("Gemma 3 (text)", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar must be a positive number, got 0"),
        ("Gemma 3 (text)", dict(layer_types=None, sliding_window_pattern=0), "sliding_window_pattern must be"),
        ("Gemma 3 (text)", dict(rope_parameters=dict(rope_theta=1e6)), "one set for each type of layer"),
        ("Gemma 3 (text)", dict(rope_parameters=dict(sliding_attention=YARN)), "the RoPE type 'yarn' in layers with a window"),
        ("Gemma 3 (text)", dict(rope_parameters=dict(sliding_attention=dict(type="linear", factor=2.0))), "the RoPE type 'linear' in layers with a window"),
        (QWEN3_MOE, dict(decoder_sparse_step=0), "decoder_sparse_step must be a positive whole number, got 0"),
        (QWEN3_MOE, dict(mlp_only_layers=3), "mlp_only_layers must be a list of layers, got 3"),
        (QWEN3_MOE, dict(mlp_only_layers=[0, 1, 2, 3]), "mlp_only_layers names every layer, so that none has experts: set num_experts to 0"),
        (QWEN3_MOE, dict(num_experts_per_tok=9), "num_experts_per_tok 9 is larger than num_experts 5"),
        ("OLMoE", dict(clip_qkv=8.0), "clip_qkv 8.0, which xtrain does not support"),
        ("OLMoE", dict(num_experts=6), "missing tensors: model.layers.0.mlp.experts.5.down_proj.weight"),
        ("Mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise 0.1, which xtrain does not support"),
        ("Granite 3", dict(residual_multiplier=0), "residual_multiplier must be a positive number, got 0"),
        ("Granite 3", dict(attention_multiplier="1"), "attention_multiplier must be a positive number"),
        ("SmolLM3", dict(no_rope_layers=[1, 0]), "no_rope_layers has 2 entries for 4 layers"),
        ("SmolLM3", dict(no_rope_layers=[1, 0, 2, 1]), "no_rope_layers must be a list with 0 or 1"),
        ("SmolLM3", dict(no_rope_layers=None, no_rope_layer_interval=0), "no_rope_layer_interval must be"),
        ("Qwen2.5 and Qwen3 with long context", dict(rope_parameters=dict(YARN, rope_theta=1e4, truncate=False)), "YaRN with truncate false"),
        ("Qwen2.5 and Qwen3 with long context", dict(rope_parameters=dict(YARN, rope_theta=1e4, factor=-1)), "'factor'"),
        ("Qwen2.5 and Qwen3 with long context", dict(rope_parameters=dict(YARN, rope_theta=1e4, mscale="1")), "mscale must be a positive number, got '1'"),
        ("Qwen2.5 and Qwen3 with long context", dict(rope_parameters=dict(YARN, rope_theta=1e4, beta_fast=1)), "beta_fast must be larger"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(name, changes, sentence, tmp_path):
    published(name, tmp_path)
    changed(tmp_path, **changes)
    with pytest.raises(UserError, match=sentence):
        Transformer.from_pretrained(tmp_path, DEVICE)


@pytest.mark.parametrize("name", REASONS)
def test_a_class_that_is_not_read_says_what_it_has(name):
    assert hasattr(transformers, name)
    with pytest.raises(UserError, match=rf"'{name}' is not supported \(it has {REASONS[name]}\)"):
        config_from_hf({"architectures": [name]})


def test_missing_keys_mean_what_they_mean_in_transformers(tmp_path):
    """SmolLM3's layers without RoPE from the interval alone, Mistral's window of 4096."""
    published("SmolLM3", tmp_path)
    changed(tmp_path, no_rope_layers=None, no_rope_layer_interval=2)
    model = Transformer.from_pretrained(tmp_path, DEVICE)
    assert model.config.no_rope_layers == (1, 3)
    published("Mistral v0.2, v0.3, Nemo", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["sliding_window"]
    content["max_position_embeddings"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert Transformer.from_pretrained(tmp_path, DEVICE).config.max_seq_len == 4096
    changed(tmp_path, max_position_embeddings=4097)
    assert Transformer.from_pretrained(tmp_path, DEVICE).config.sliding_window == 4096
    # Qwen3-MoE's layers with an MLP: those of the list, and all but every second one
    content = AutoConfig.for_model("qwen3_moe", **SIZE).to_dict()
    content |= dict(architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=2)
    del content["num_experts_per_tok"]
    made = config_from_hf(content | dict(mlp_only_layers=[1]))
    assert made.dense_layers == (0, 1, 2) and made.experts_per_token == 8
    assert (made.n_experts, made.expert_hidden_dim, made.sliding_window) == (128, 768, 0)
    made = config_from_hf(
        content | dict(use_sliding_window=True, sliding_window=16, max_window_layers=3)
    )
    assert made.sliding_window == 16 and made.full_attention_layers == ()


@pytest.mark.parametrize(
    "name, kind", [("Mistral v0.1", "full"), ("Mistral v0.1", "sliding"), ("Phi-4", "full")]
)
def test_layer_types_mean_what_they_mean_in_transformers(name, kind, tmp_path):
    """Mistral's window is in no layer or in all, Phi-3's always in all."""
    published(name, tmp_path)
    changed(tmp_path, sliding_window=9, layer_types=[f"{kind}_attention"] * 4)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = np.arange(40)[None]
    found = to_host(Transformer.from_pretrained(tmp_path, DEVICE)(ids).data)
    np.testing.assert_allclose(found, logits_of(theirs.eval(), ids), atol=1e-4)


def test_the_balance_loss_of_one_layer(tmp_path):
    """transformers multiplies means over all layers; of one layer, that is the loss of Switch."""
    one = dict(num_hidden_layers=1, mlp_only_layers=[], router_aux_loss_coef=0.3)
    theirs = published(QWEN3_MOE, tmp_path, **one)
    ids = np.random.default_rng(1).integers(0, 61, (2, 40))
    inputs = torch.from_numpy(ids)
    loss = theirs(inputs, labels=inputs, output_router_logits=True).loss
    loss.backward()
    model = Transformer.from_pretrained(tmp_path, DEVICE)
    with RouterLosses(0.3, 0.0).collected() as routers:
        plain = model.loss(ids[:, :-1], ids[:, 1:])
    assert len(routers.terms) == 1
    assert loss.item() - plain.item() > 0.3  # the smallest value is 0.3 K
    with RouterLosses(0.3, 0.0).collected() as routers:  # theirs counts the last tokens, too
        model.hidden(ids)
    ours = routers.added_to(
        model.loss(ids[:, :-1], ids[:, 1:]), to_device(np.ones(1, np.float32), DEVICE)
    )
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    ours.backward()
    known = with_gradients(theirs)
    for path, parameter in model.named_parameters():
        gradient = known[path][1]
        error = np.linalg.norm(to_host(parameter.grad) - gradient)
        assert error <= 1e-4 * np.linalg.norm(gradient), path


VARIATIONS = [  # what other folders have in config.json; None: the key is removed
    ("Llama 2, TinyLlama, Yi, SmolLM, SmolLM2", dict(num_key_value_heads=1, head_dim=8, rms_norm_eps=0.01, pretraining_tp=2)),
    ("Llama 2, TinyLlama, Yi, SmolLM, SmolLM2", dict(rope_scaling=dict(type="dynamic", factor=2.0), max_position_embeddings=32)),
    ("Llama 2, TinyLlama, Yi, SmolLM, SmolLM2", dict(rope_scaling=dict(LLAMA3, type="llama3"), rope_theta=500.0)),
    ("Llama 3, 3.1, 3.2, R1-Distill-Llama", dict(rope_scaling=None, rope_parameters=dict(LLAMA3, rope_theta=700.0))),
    ("Qwen2.5 and Qwen3 with long context", dict(rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.5))),
    ("Qwen2.5 and Qwen3 with long context", dict(rope_scaling=dict(YARN, mscale=0.7, beta_fast=8))),
    ("Qwen2.5 and Qwen3 with long context", dict(rope_scaling=dict(YARN, mscale=0, mscale_all_dim=0.5, beta_fast=0))),
    ("Qwen2.5 and Qwen3 with long context", dict(rope_scaling=dict(type="yarn", factor=4.0), original_max_position_embeddings=32)),
    ("Qwen2.5 and Qwen3 with long context", dict(rope_scaling=None, rope_parameters=dict(YARN, attention_factor=1.3, rope_theta=300.0))),
    ("Qwen2 and Qwen3 with windows", dict(layer_types=["sliding_attention", "full_attention"] * 2, max_window_layers=0)),
    ("Granite 3", dict(tie_word_embeddings=False, attention_multiplier=None, logits_scaling=2)),
    ("Gemma 3 (text)", dict(rope_scaling=None, rope_parameters=dict(full_attention=dict(YARN, rope_theta=500.0)))),
    ("Gemma 3 (text)", dict(layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"])),
    (QWEN3_MOE, dict(norm_topk_prob=False, mlp_only_layers=None, decoder_sparse_step=2, num_experts_per_tok=3)),
    (QWEN3_MOE, dict(norm_topk_prob=None, use_sliding_window=True, sliding_window=9)),
    ("OLMoE", dict(norm_topk_prob=True, num_key_value_heads=4)),
    ("Mixtral", dict(sliding_window=None, num_experts_per_tok=1, rope_theta=None, rope_parameters=None)),
]  # fmt: skip


@pytest.mark.parametrize("name, changes", VARIATIONS)
def test_what_other_folders_have_in_their_config(name, changes, tmp_path):
    published(name, tmp_path, **changes)
    # without what transformers 5 adds
    (tmp_path / "config.json").write_text(json.dumps(keys_of(name, changes)))
    ids = np.random.default_rng(1).integers(0, 61, (2, 40))
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    expected = logits_of(again.eval(), ids)
    found = to_host(Transformer.from_pretrained(tmp_path, DEVICE)(ids).data)
    assert np.abs(found - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", [QWEN3_MOE, "OLMoE", "Mixtral"])
def test_packed_experts(name, tmp_path):
    """transformers 5 writes its own layout with save_original_format=False, and reads both."""
    theirs = published(name, tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "packed", save_original_format=False)
    assert any(
        ".experts.gate_up_proj" in x for x in load_file(tmp_path / "packed/model.safetensors")
    )
    model = Transformer.from_pretrained(tmp_path / "packed", DEVICE)
    model.save_pretrained(tmp_path / "ours")
    written = load_file(tmp_path / "ours/model.safetensors")
    original = load_file(tmp_path / "theirs/model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in written)
    changed(tmp_path / "packed", num_experts=3, num_local_experts=3)
    with pytest.raises(UserError, match=r"unexpected tensors: model\.layers\.0\.mlp\.experts\.3"):
        Transformer.from_pretrained(tmp_path / "packed", DEVICE)


def test_damaged_packed_experts(tmp_path):
    published("OLMoE", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for shape, sentence in (((5, 80 * 64), "not one matrix of gate_proj and up_proj for each expert"),
                            ((16, 25, 64), "has shape .16, 25, 64., not one matrix")):  # fmt: skip
        save_file(tensors | {name: tensors[name].reshape(shape)}, path)
        with pytest.raises(UserError, match=sentence):
            Transformer.from_pretrained(tmp_path, DEVICE)
    save_file(
        tensors | {"model.layers.1.mlp.experts.0.down_proj.weight": torch.zeros(64, 40)}, path
    )
    with pytest.raises(UserError, match=r"experts\.0\.down_proj\.weight in two layouts"):
        Transformer.from_pretrained(tmp_path, DEVICE)


def test_the_weights_of_packed_models_can_be_loaded(tmp_path):
    published("Phi-4", tmp_path)
    model = Transformer.from_pretrained(tmp_path, DEVICE)
    other = Transformer(model.config, 5, DEVICE)
    other.load_weights(tmp_path)
    ids = np.arange(20)[None]
    assert np.array_equal(to_host(other(ids).data), to_host(model(ids).data))


def table() -> str:
    """Return the table of models in lessons/howto/models.md."""
    rows = ["| models | class of transformers | how |", "| --- | --- | --- |"]
    for name, (kind, _, how) in PUBLISHED.items():
        class_ = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))].__name__
        rows.append(f"| {name} | `{class_}` | {how or 'as it is'} |")
    return "\n".join(rows)


def test_the_table_of_models():
    page = ROOT / "lessons/howto/models.md"
    text = page.read_text(encoding="utf-8")
    assert table() in text, f"{page.name}: the table of models is now\n{table()}"
