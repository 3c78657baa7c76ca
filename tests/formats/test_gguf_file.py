"""GGUF files, read back with the library of llama.cpp: every tensor, the config and the tokenizer."""

import json
import re
import sys

import numpy as np
import pytest
from twins import LLAMA3, random_model, small

import xtrain.export
from xtrain.data.tokenizer import Tokenizer
from xtrain.formats.gguf_file import PRE_TOKENIZERS, pre_tokenizer
from xtrain.formats.huggingface import open_weights
from xtrain.kernels.rope import rope_frequencies

gguf = pytest.importorskip("gguf")
TEXT = ["the quick brown fox jumps over the lazy dog, 1234 times; the dog sleeps.\n"] * 20
YARN = dict(rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, attention_factor=1.5, original_max_position_embeddings=16)  # fmt: skip
SHAPE = dict(vocab_size=300, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=40)
CONFIGS = {
    "llama": small(**SHAPE, qk_norm=False, rope_scaling=LLAMA3, rope_theta=5e5),
    "qwen2": small(**SHAPE, qk_norm=False, qkv_bias=True, tie_embeddings=True),
    "qwen3": small(**SHAPE | {"head_dim": 32}, rope_scaling=YARN),
    "smollm3": small(**SHAPE, n_layers=4, qk_norm=False, no_rope_layers=(3,)),
    "qwen3moe": small(**SHAPE, n_experts=3, experts_per_token=2, expert_hidden_dim=32),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT, 280)


def export(folder, path, kind="f32"):
    line = ["--model", str(folder), "--gguf", str(path), "--type", kind]
    return xtrain.export.main(line)


def halves_from_pairs(w, heads):
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def saved(config, tokenizer, folder):
    random_model(config, device="cpu").save_pretrained(folder, tokenizer)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_and_key(name, tokenizer, tmp_path):
    config = CONFIGS[name]
    folder = saved(config, tokenizer, tmp_path / "model")
    template = "{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.n_layers)
    _, stored = open_weights(folder)
    for kind in ("f32", "f16", "q8_0"):
        assert export(folder, tmp_path / "a.gguf", kind) == 0
        reader = gguf.GGUFReader(tmp_path / "a.gguf")
        found = {t.name: t for t in reader.tensors}
        read = set()
        for theirs, tensor in stored.items():
            shared = re.sub(r"experts\.\d+", "experts", theirs)  # all experts are one tensor
            there = found[names.get_name(shared, (".weight", ".bias"))]
            values = gguf.quants.dequantize(there.data, there.tensor_type)
            if shared != theirs:
                values = values.reshape(3, -1)[int(theirs.split(".")[5])]
            values = values.reshape(tensor.shape)
            read.add(there.name)
            heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(theirs.split(".")[-2])  # fmt: skip
            if heads and name in ("llama", "smollm3"):
                values = halves_from_pairs(values, heads)
            expected = tensor.read()
            exact = kind == "f32" or expected.ndim == 1 or theirs.endswith("mlp.gate.weight")
            if exact:
                assert there.tensor_type.name == "F32" and np.array_equal(values, expected)
            elif kind == "f16" or expected.shape[1] % 32:
                assert there.tensor_type.name == "F16"
                assert np.array_equal(values, expected.astype(np.float16))
            else:
                assert there.tensor_type.name == "Q8_0"
                blocks = expected.reshape(-1, 32)
                # half a step of a block's scale, which is itself rounded to f16
                limit = np.abs(blocks).max(1, keepdims=True) / 127 * (0.5 + 127 * 2**-11) + 1e-8
                assert (np.abs(values.reshape(-1, 32) - blocks) <= limit).all()
        assert set(found) - read == ({"rope_freqs.weight"} if name == "llama" else set())
    assert not list(tmp_path.glob("*.tmp"))

    value = lambda key: reader.get_field(key.replace("*", name)).contents()
    assert value("general.architecture") == name
    numbers = {
        "block_count": config.n_layers, "embedding_length": config.dim, "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads, "attention.head_count_kv": config.n_kv_heads, "vocab_size": 300,
        "attention.key_length": config.head_dim, "rope.freq_base": config.rope_theta, "context_length": config.context,
        "attention.layer_norm_rms_epsilon": np.float32(config.norm_eps),
    }  # fmt: skip
    if name == "qwen3moe":
        numbers |= {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert {key: value(f"*.{key}") for key in numbers} == numbers
    if name == "qwen3":
        assert value("*.rope.scaling.type") == "yarn" and value("*.rope.scaling.factor") == 4
        assert value("*.rope.scaling.original_context_length") == 16
        own = 1 + 0.1 * np.log(4.0)
        assert value("*.rope.scaling.attn_factor") == pytest.approx(1.5 / own)
    tokens = value("tokenizer.ggml.tokens")
    assert len(tokens) == 300 and tokens[299] == "[PAD299]"
    content = json.loads((folder / "tokenizer.json").read_text())
    assert {t: i for i, t in enumerate(tokens[: tokenizer.vocab_size])} == content["model"]["vocab"]
    assert value("tokenizer.ggml.merges") == [" ".join(m) for m in content["model"]["merges"]]
    types = value("tokenizer.ggml.token_type")
    assert types[tokenizer.eot_id] == gguf.TokenType.CONTROL and types[299] == gguf.TokenType.UNUSED
    assert value("tokenizer.ggml.eos_token_id") == tokenizer.eot_id
    assert value("tokenizer.ggml.pre") == "gpt-2" and value("tokenizer.ggml.model") == "gpt2"
    assert value("tokenizer.ggml.add_bos_token") is False
    assert value("tokenizer.chat_template") == template


def test_the_factors_of_llama_3_are_those_of_our_frequencies(tokenizer, tmp_path):
    config = CONFIGS["llama"]
    assert export(saved(config, tokenizer, tmp_path / "m"), tmp_path / "a.gguf") == 0
    factors = next(t.data for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors if t.name == "rope_freqs.weight")  # fmt: skip
    plain = config.rope_theta ** (-np.arange(0, 16, 2) / 16)
    assert np.allclose(
        plain / factors,
        rope_frequencies(16, config.rope_theta, config.rope_scaling, config.max_seq_len),
        rtol=1e-5,
    )


def refused(capsys, folder, path, words, kind="f32"):
    assert export(folder, path, kind) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert not path.is_file() and not list(path.parent.glob("*.tmp"))


def test_what_llama_cpp_computes_otherwise_is_refused(tokenizer, tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.gguf"
    for i, (config, words) in enumerate([
        (small(**SHAPE, rope_scaling=LLAMA3), "llama3 only for a Llama"),
        (small(**SHAPE | {"head_dim": 32}, qk_norm=False, qkv_bias=True), "heads of width 16"),
        (small(**SHAPE, n_layers=4, qk_norm=False, no_rope_layers=(1,)), "every 4th layer"),
        (small(**SHAPE, rope_scaling=YARN | {"beta_fast": 16}), "beta_fast 32"),
        (small(**SHAPE, qkv_bias=True), "qk_norm with qkv_bias"),
        (small(**SHAPE, qk_norm=False, n_experts=2, experts_per_token=1), "experts to GGUF of a Qwen3-MoE"),
        (small(**SHAPE, n_experts=2, experts_per_token=1, dense_layers=(0,)), "experts in every layer"),
    ]):  # fmt: skip
        refused(capsys, saved(config, tokenizer, tmp_path / str(i)), path, words)
    folder = saved(CONFIGS["qwen3"], tokenizer, tmp_path / "good")
    (tmp_path / "folder").mkdir()
    refused(capsys, folder, tmp_path / "folder", "is a folder")
    refused(capsys, folder, tmp_path / "missing" / "a.gguf", "cannot be written")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, content["pre_tokenizer"]]}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    refused(capsys, folder, path, "convert_hf_to_gguf.py")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(capsys, folder, path, "pip install")


def test_values_too_large_for_f16(tokenizer, tmp_path, capsys):
    model = random_model(CONFIGS["qwen3"], device="cpu")
    dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"].data[0, 0] = 1e6
    model.save_pretrained(tmp_path / "m", tokenizer)
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    assert export(tmp_path / "m", path, "f16") == 2
    assert "use --type f32" in capsys.readouterr().err and path.read_bytes() == b"old"


def test_names_of_pre_tokenizers(tmp_path):
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for (regexes, ignores), name in PRE_TOKENIZERS.items():
        splits = [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in regexes]  # fmt: skip
        content = {"normalizer": {"type": "NFC"}, "model": {"ignore_merges": ignores},
                   "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]}}  # fmt: skip
        assert pre_tokenizer(tmp_path, content) == name[0]
