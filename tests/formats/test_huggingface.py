"""Hugging Face folders: to transformers and back bit for bit, and every kind of damage."""

import copy
import errno
import functools
import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from checks import only_slow
from faults import Fault, error, killed_at
from safetensors.torch import load_file, save_file
from twins import DEVICE, GEMMA3, LLAMA3, batch, empty_twin, random_model, small, twin, weights

from xtrain import ModelConfig, Transformer, UserError, files
from xtrain.data.tokenizer import Tokenizer
from xtrain.formats import huggingface, tensor_file
from xtrain.formats.huggingface import (
    config_from_hf,
    config_to_hf,
    load_into,
    save,
    tensor_shapes,
    written_tensors,
)

CONFIGS = {
    "llama": small(qk_norm=False),
    "llama tied": small(qk_norm=False, tie_embeddings=True),
    "qwen3": small(),
    "qwen3 tied": small(tie_embeddings=True, n_kv_heads=1),
    "qwen2": small(qk_norm=False, qkv_bias=True),
    "qwen2 tied": small(qk_norm=False, qkv_bias=True, tie_embeddings=True),
    "linear": small(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "dynamic": small(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, qk_norm=False),
    "llama3": small(rope_scaling=LLAMA3, qk_norm=False, rope_theta=500000.0, norm_eps=1e-5),
    "gemma3": small(**GEMMA3, full_attention_layers=(1,), rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "gemma3 global": small(**(GEMMA3 | dict(sliding_window=0)), tie_embeddings=True),
}  # fmt: skip
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def auto(folder, **options):
    """Load with transformers, which must neither miss nor ignore a tensor."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | options
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model.eval()


# ----------------------------------------------------------------------------- config.json
LLAMA_3_1 = {  # as Meta published it
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {  # Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA_3 = {  # Gemma 3 1B
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
LLAMA_1 = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5}  # fmt: skip


def new_style(config):
    """The same config as transformers 5 writes it."""
    config = copy.deepcopy(config)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta")}
    config["dtype"] = config.pop("torch_dtype")
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return config


@pytest.mark.parametrize("style", [copy.deepcopy, new_style], ids=["old", "new"])
def test_published_configs(style):
    scaling = {key: LLAMA_3_1["rope_scaling"][key] for key in LLAMA3}
    assert config_from_hf(style(LLAMA_3_1)) == ModelConfig(
        vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336,
        max_seq_len=131072, rope_theta=500000.0, rope_scaling=scaling, norm_eps=1e-5, qk_norm=False,
    )  # fmt: skip
    assert config_from_hf(style(QWEN3)) == ModelConfig(
        vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072,
        max_seq_len=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
    )  # fmt: skip
    gemma = ModelConfig(
        vocab_size=262144, dim=1152, n_layers=26, n_heads=4, n_kv_heads=1, head_dim=256, hidden_dim=6912,
        max_seq_len=32768, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
        sandwich_norms=True, gelu=True, scaled_embedding=True, query_pre_attn_scalar=256, local_rope_theta=10000,
        sliding_window=512, full_attention_layers=(5, 11, 17, 23),
    )  # fmt: skip
    assert config_from_hf(GEMMA_3) == gemma
    assert (
        config_from_hf(transformers.AutoConfig.for_model(**GEMMA_3).to_dict()) == gemma
    )  # the new style


def test_missing_keys_have_the_defaults_of_transformers():
    config = config_from_hf(LLAMA_1)
    assert (config.n_kv_heads, config.max_seq_len, config.rope_theta) == (32, 2048, 10000.0)
    qwen = {
        key: value
        for key, value in QWEN3.items()
        if key not in ("head_dim", "max_position_embeddings")
    }
    assert config_from_hf(qwen).head_dim == 128 and config_from_hf(qwen).max_seq_len == 32768
    old = QWEN3 | {"rope_scaling": {"type": "linear", "factor": 4}}
    assert config_from_hf(old).rope_scaling == {"rope_type": "linear", "factor": 4}
    bare = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling = config_from_hf(LLAMA_3_1 | {"rope_scaling": bare}).rope_scaling
    assert scaling["original_max_position_embeddings"] == 131072


@every_config
def test_config_round_trip(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    written_by_transformers = empty_twin(config).config.to_dict()
    assert config_from_hf(written_by_transformers) == config


@every_config
def test_every_tensor_has_its_hugging_face_name_and_shape(config):
    model = Transformer(config)
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    assert shapes == tensor_shapes(config)
    theirs = {name: tuple(p.shape) for name, p in empty_twin(config).named_parameters()}
    assert shapes == theirs


UNSUPPORTED = [
    ({"attention_bias": True}, "attention_bias True"),
    ({"mlp_bias": True}, "mlp_bias True"),
    ({"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention'"),
    ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window must be a positive"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer type 'sliding_attention'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "RoPE type 'longrope'"),
    ({"rope_scaling": None, "rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope'"),
    ({"rope_scaling": {"rope_type": ["x"]}}, "RoPE type"),
    ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "one set of parameters"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ({"architectures": ["Qwen2MoeForCausalLM"]}, "'Qwen2MoeForCausalLM'"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "model_type 'llama'"),
    ({"architectures": None, "model_type": "gemma"}, "model_type 'gemma'"),
    ({"architectures": None, "model_type": None}, "model_type None"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "quantized (bitsandbytes), which xtrain does not read: use the model's unquantized"),
    ({"is_causal": False}, "is_causal False"),
    ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config"),
    ({"hidden_size": None}, "lacks hidden_size"),
    ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive whole number"),
    ({"num_key_value_heads": 5}, "num_attention_heads 32 is not divisible by num_key_value_heads 5"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
    ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", UNSUPPORTED, ids=[words for _, words in UNSUPPORTED])
def test_unsupported_features_are_refused_by_name(changes, words):
    with pytest.raises(UserError) as caught:
        config_from_hf(LLAMA_3_1 | changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(QWEN3.keys() | new_style(QWEN3).keys() | GEMMA_3.keys()))
def test_any_value_of_any_key_works_or_is_a_user_error(key):
    odd = [
        None,
        -1,
        0,
        1,
        2.5,
        "x",
        [],
        {},
        ["x"],
        {"a": {}},
        True,
        float("nan"),
        float("inf"),
        10**400,
    ]
    for config in (QWEN3, new_style(QWEN3), GEMMA_3):
        for value in odd:
            try:
                config_from_hf(config | {key: value})
            except UserError as error:
                assert "\n" not in str(error)


# ----------------------------------------------------------------------------- there and back
def written(model):
    """Return {name: values} of its file; those of Gemma's norms are not the values in memory."""
    return {name: tensor.numpy() for name, tensor in written_tensors(model).items()}


@every_config
def test_to_transformers_and_back(config, tmp_path):
    model = random_model(config)
    model.save_pretrained(tmp_path / "ours")
    theirs = auto(tmp_path / "ours")
    state, ours = theirs.state_dict(), written(model)
    for name, values in ours.items():
        assert np.array_equal(values, state[name].numpy()), name
    ids, _ = batch(config, 2, 6)
    tokens = model.generate(ids, 12)
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(ids.shape)}
    assert np.array_equal(tokens, theirs.generate(**inputs, max_new_tokens=12, do_sample=False))
    theirs.save_pretrained(tmp_path / "theirs")
    back = Transformer.from_pretrained(tmp_path / "theirs", device=DEVICE)
    assert back.config == config and back.device == DEVICE
    for name, values in written(back).items():
        assert np.array_equal(values, ours[name]), name
    assert np.array_equal(back.generate(ids, 12), tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sharded_files_of_every_width(dtype, tmp_path):
    other = twin(random_model(small())).to(dtype)
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = Transformer.from_pretrained(str(tmp_path))
    state = other.state_dict()
    for name, values in weights(model).items():
        assert values.dtype == np.float32 and np.array_equal(values, state[name].float().numpy())


def test_our_shards(tmp_path):
    model = random_model(small())
    save(model, tmp_path, max_shard_bytes=20_000)
    shards = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((tmp_path / name).stat().st_size < 22_000 for name in shards)
    state = auto(tmp_path).state_dict()
    again = weights(Transformer.from_pretrained(tmp_path))
    for name, values in weights(model).items():
        assert np.array_equal(values, again[name]) and np.array_equal(values, state[name].numpy())


def test_files_of_older_transformers(tmp_path):
    """They hold RoPE frequencies, or a second copy of the head of a tied model."""
    model = random_model(CONFIGS["llama tied"])
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, path)
    assert weights(Transformer.from_pretrained(tmp_path)).keys() == weights(model).keys()
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path)
    refused(tmp_path, "lm_head.weight differs from the embedding table")


def contents(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def test_same_weights_same_bytes(tmp_path):
    model = random_model(small())
    for name in ("a", "b"):
        save(model, tmp_path / name)
    save(Transformer.from_pretrained(tmp_path / "a", DEVICE), tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert set(contents(tmp_path / "a")) == {"config.json", "model.safetensors"}


def test_an_older_export_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "model"
    save(random_model(small(), seed=1), folder, max_shard_bytes=20_000)
    (folder / "README.md").write_text("mine")
    (folder / "model-mine.safetensors").write_text("mine too")
    new = random_model(small(n_layers=1), seed=2)
    save(new, folder)
    names = {"config.json", "model.safetensors", "README.md", "model-mine.safetensors"}
    assert set(contents(folder)) == names
    for name, values in weights(Transformer.from_pretrained(folder)).items():
        assert np.array_equal(values, weights(new)[name])
    save(new, folder, max_shard_bytes=20_000)
    assert "model.safetensors" not in contents(folder)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]  # no temporary folder is left


def test_a_full_disk_keeps_the_old_files(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save(random_model(small()), folder)
    before = contents(folder)

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface, "write_safetensors", full)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(UserError, match=r"cannot be written: No space left on device$"):
            save(random_model(small(), seed=1), target)
    assert contents(folder) == before and [f.name for f in tmp_path.iterdir()] == ["model"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save(random_model(small()), tmp_path / "file")


# ----------------------------------------------------------------------------- kills and errors while writing
KINDS = ["exchange", "two renames", "no locks", "no links"]
EVERY_CALL = [KINDS[0], *(pytest.param(kind, marks=only_slow) for kind in KINDS[1:])]


def on_a_disk(kind, patch):
    """Make this disk one where folders cannot be exchanged, locked, or files linked."""
    if kind in ("two renames", "no locks"):
        patch.setattr(files, "_exchange", lambda a, b: False)
    if kind == "no locks":
        patch.setattr("fcntl.flock", error(errno.ENOLCK))
    if kind == "no links":
        patch.setattr(os, "link", error(errno.EPERM))


@pytest.fixture
def replaced(tmp_path):
    """-> a folder with a model of two layers, in shards, and files of the user; work that replaces it by one of one layer."""
    on_cpu = functools.partial(random_model, device="cpu")  # a process that is forked has no GPU
    folder, before, after = (
        tmp_path / "here" / "model",
        on_cpu(small()),
        on_cpu(small(n_layers=1), 2),
    )
    save(before, folder, max_shard_bytes=40_000)
    (folder / "README.md").write_text("mine")
    (folder / "runs" / "deep").mkdir(parents=True)
    (folder / "runs" / "deep" / "log").write_text("mine, too")
    (folder / "link").symlink_to("/nowhere")
    return folder, lambda: save(after, folder, max_shard_bytes=20_000), before, after


def whole(folder, *models):
    """-> the number of the model that the folder holds; the user's files are there."""
    held = weights(Transformer.from_pretrained(folder))
    same = [m for m in models if len(weights(m)) == len(held)]
    assert all(np.array_equal(values, held[name]) for name, values in weights(*same).items())
    shards = {f.name for f in folder.glob("model-*")}
    assert shards == set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())  # fmt: skip
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "runs/deep/log").read_text() == "mine, too"
    assert os.readlink(folder / "link") == "/nowhere"
    return models.index(same[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("kind", EVERY_CALL)
def test_killed_at_every_call_a_folder_is_the_old_or_the_new_one(replaced, tmp_path, monkeypatch, kind):  # fmt: skip
    folder, work, before, after = replaced
    on_a_disk(kind, monkeypatch)
    shutil.copytree(folder.parent, tmp_path / "first", symlinks=True)
    n, found, killed = 0, [], True
    while killed:
        n += 1
        shutil.rmtree(folder.parent)
        shutil.copytree(tmp_path / "first", folder.parent, symlinks=True)
        killed = killed_at(folder.parent, n, work, monkeypatch)
        found.append(whole(folder, before, after))
        if n % 5 == 0:  # the next export removes what this one has left
            monkeypatch.setattr(files, "STRAY_SECONDS", -1)
            work()
            assert whole(folder, before, after) == 1 and os.listdir(folder.parent) == ["model"]
    assert found == sorted(found) and {*found} == {0, 1} and n > 30


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_every_call_leaves_a_whole_folder(replaced, tmp_path, monkeypatch, kind):
    folder, work, before, after = replaced
    on_a_disk(kind, monkeypatch)
    shutil.copytree(folder.parent, tmp_path / "first", symlinks=True)
    n, found, fault = 0, [], None
    while fault is None or fault.count >= n:
        n += 1
        shutil.rmtree(folder.parent)
        shutil.copytree(tmp_path / "first", folder.parent, symlinks=True)
        with monkeypatch.context() as patch:
            fault = Fault(patch, folder.parent, n, error(errno.EIO))
            try:
                work()
                expected = {1}
            except UserError as refused:
                assert re.search("cannot be written: .*Input/output error", str(refused))
                expected = {0, 1}  # 1: the last sync failed
        found.append(whole(folder, before, after))
        assert found[-1] in expected
    assert {*found} == {0, 1} and n > 30


def test_a_rename_that_cannot_be_undone(replaced, monkeypatch):
    """The disk fails between the two renames and stays broken: both folders stay, and reading restores the old one."""
    folder, work, before, after = replaced
    on_a_disk("two renames", monkeypatch)
    rename = os.rename
    with monkeypatch.context() as patch:
        broken = lambda a, b: rename(a, b) if str(a) == str(folder) else error(errno.EIO)()
        patch.setattr(os, "rename", broken)
        with pytest.raises(UserError, match="cannot be written"):
            work()
        assert not folder.exists()
    assert whole(folder, before, after) == 0
    work()
    assert whole(folder, before, after) == 1 and os.listdir(folder.parent) == ["model"]


def test_a_new_folder_that_is_killed_is_absent(tmp_path, monkeypatch):
    model = random_model(small(), device="cpu")  # a process that is forked has no GPU
    n = 0
    folder = tmp_path / "here" / "model"
    folder.parent.mkdir()
    while killed_at(folder.parent, n := n + 1, lambda: save(model, folder), monkeypatch):
        if folder.exists():
            Transformer.from_pretrained(folder)
            shutil.rmtree(folder)
        else:
            with pytest.raises(UserError, match="does not exist"):
                Transformer.from_pretrained(folder)
    assert n > 10 and os.listdir(folder.parent) == ["model"]
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777


def test_an_export_is_on_the_disk_before_it_has_its_name(replaced, monkeypatch):
    folder, work, _, _ = replaced
    synced, exchange, fsync = [], files._exchange, os.fsync

    def noting(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def exchanged(new, old):
        ours = [path for path in new.iterdir() if path.name not in ("README.md", "link")]
        assert {str(path) for path in [*ours, new, new / "runs" / "deep"]} <= {*synced}
        synced.clear()
        return exchange(new, old)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(files, "_exchange", exchanged)
    work()
    assert str(folder.parent) in synced


def test_files_that_are_written_during_an_export_stay(replaced, monkeypatch):
    folder, work, before, after = replaced
    publish = files.publish

    def late(new, old, aside):
        (folder / "eval.json").write_text("{}")
        publish(new, old, aside)

    monkeypatch.setattr(files, "publish", late)
    work()
    assert whole(folder, before, after) == 1 and (folder / "eval.json").read_text() == "{}"


def test_a_folder_replaced_while_it_is_read(replaced, monkeypatch):
    folder, work, _, _ = replaced
    read = huggingface._find_tensors

    def slow(path):
        found = read(path)
        work()
        return found

    monkeypatch.setattr(huggingface, "_find_tensors", slow)
    with pytest.raises(UserError):  # a shard is gone, or the folder is another one
        Transformer.from_pretrained(folder)
    for path in folder.glob("model*"):
        path.unlink()
    save(random_model(small()), folder)
    monkeypatch.setattr(huggingface, "_find_tensors", read)
    fill = huggingface._fill
    monkeypatch.setattr(huggingface, "_fill", lambda *args: (fill(*args), work()))
    with pytest.raises(UserError, match="was replaced while it was read: try again"):
        Transformer.from_pretrained(folder)


def test_folders_that_cannot_be_replaced(replaced, tmp_path, monkeypatch):
    folder, work, before, after = replaced
    monkeypatch.chdir(folder / "runs")
    with pytest.raises(UserError, match=r"is the current folder or contains it, so .*: give"):
        work()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == folder)
    with pytest.raises(UserError, match="is a mounted disk, so another cannot take its place"):
        work()
    monkeypatch.setattr(os.path, "ismount", lambda path: False)
    assert whole(folder, before, after) == 0
    os.symlink(folder, tmp_path / "name")
    save(after, tmp_path / "name", max_shard_bytes=20_000)
    assert (tmp_path / "name").is_symlink() and whole(folder, before, after) == 1


# ----------------------------------------------------------------------------- tokenizers
def test_the_tokenizer_is_saved_with_the_model(tmp_path):
    tokenizer = Tokenizer.train(["def f(x):\n    return x\n" * 50], 270)
    model = random_model(small(vocab_size=280))
    model.save_pretrained(tmp_path / "ours", tokenizer)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = "def g(y): return f(y)"
    assert other(text)["input_ids"] == tokenizer.encode(text)
    theirs = auto(tmp_path / "ours")
    assert theirs.generation_config.eos_token_id == tokenizer.eot_id == other.eos_token_id
    model.save_pretrained(tmp_path / "again", other)  # any tokenizer of transformers
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"]
        == tokenizer.eot_id
    )
    with pytest.raises(UserError, match=r"the tokenizer has \d+ tokens, the model only 100"):
        random_model(small(vocab_size=100)).save_pretrained(tmp_path / "small", tokenizer)
    assert not (tmp_path / "small").exists()


def test_special_tokens_of_a_folder_stay(tmp_path):
    """Read and written again without a tokenizer: transformers still finds the end of an answer."""
    random_model(small()).save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["bos_token_id"] is config["eos_token_id"] is None
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    generation = {
        "eos_token_id": [5, 7], "pad_token_id": 0, "bos_token_id": "x", "do_sample": True, "top_k": 20, "temperature": 0.6,
    }  # fmt: skip
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(generation))
    Transformer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    tokenizer = Tokenizer.train(
        ["def f(x): return x\n" * 9], 257
    )  # which begins and ends texts with token 0
    random_model(small(vocab_size=300)).save_pretrained(tmp_path / "c")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "a" / name).read_text()) | {"vocab_size": 300}
        (tmp_path / "c" / name).write_text(json.dumps(content | {"eos_token_id": [0, 7]}))
    Transformer.from_pretrained(tmp_path / "c").save_pretrained(tmp_path / "d", tokenizer)
    for name, bos, eos in (("b", 1, [5, 7]), ("d", 0, [0, 7])):
        theirs = auto(tmp_path / name).generation_config
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (bos, eos, 0)
        assert (theirs.do_sample, theirs.top_k, theirs.temperature) == (True, 20, 0.6)


# ----------------------------------------------------------------------------- damage
@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(random_model(small(n_layers=1)), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refused(folder, *words):
    with pytest.raises(UserError) as caught:
        Transformer.from_pretrained(folder)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and len(message) < 3000


def test_not_a_model(tmp_path, folder):
    refused(tmp_path / "none", "none does not exist: give the folder of a model or of a run")
    refused(folder / "config.json", "is a file")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")
    for text in (b"{", b"[1]", b"\xff\xfe", b"[" * 10**5):
        (folder / "config.json").write_bytes(text)
        refused(folder, "config.json is damaged")
    (folder / "config.json").write_bytes(b" " * (tensor_file.MAX_JSON_BYTES + 1))
    refused(folder, "larger than 16 MB")


def test_a_model_in_the_cache_of_the_hub_is_found_by_its_name(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    refused("owner/model", "hf download owner/model")
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    found, want = (Transformer.from_pretrained(x) for x in ("owner/model", folder))
    assert np.array_equal(found.arena.weights, want.arena.weights)
    refused("owner/other", "hf download owner/other")


def test_a_run_without_a_checkpoint_that_can_be_used(tmp_path):
    (tmp_path / "config.json").write_text('{"train": {}, "model": {}}')
    refused(tmp_path, "is a run without a checkpoint: train it first")
    (tmp_path / "checkpoints" / "step-000200").mkdir(parents=True)
    refused(tmp_path, "no checkpoint of", "can be used", "step-000200")


def test_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor", "pytorch_model.bin must be converted")
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    refused(folder, "neither model.safetensors nor", "give the file itself")
    (folder / "model.gguf").unlink()
    refused(folder, "neither model.safetensors nor", "download them")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_pointers_of_git_lfs(folder, name):
    """What `git clone` leaves without git-lfs."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"
    (folder / name).write_text(text)
    refused(folder, f"{name} is a pointer of Git LFS", "git lfs pull")


def test_a_damaged_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, "model.safetensors was cut short")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite(folder, bad):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = bad
    save_file(tensors, path)
    refused(folder, "model.norm.weight holds values that are not finite")
    model = random_model(small(n_layers=1), seed=5)
    before = weights(model)
    with pytest.raises(UserError, match="not finite"):
        load_into(model, folder)
    assert all(np.array_equal(values, before[name]) for name, values in weights(model).items())


def test_missing_and_extra_tensors_and_wrong_shapes_are_named(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(48)
    tensors["evil\nname" + "x" * 10**4] = torch.zeros(1)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, path)
    refused(
        folder,
        "missing tensors: lm_head.weight, model.layers.0.mlp.up_proj.weight",
        r"unexpected tensors: evil\nname",
        "q_proj.bias",
        "model.norm.weight has shape (7,), expected (32,)",
    )


def test_a_config_that_does_not_fit_allocates_no_memory(folder):
    config = json.loads((folder / "config.json").read_text())
    for changes, words in (
        ({"num_hidden_layers": 2**30}, "num_hidden_layers must be at most 1024, got 1073741824"),
        ({"vocab_size": 2**30}, "vocab_size must be at most 4194304, got 1073741824"),
        ({"vocab_size": 2**20}, "expected (1048576, 32)"),
        ({"hidden_size": 2**18, "intermediate_size": 2**20}, "wrong shapes"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding table"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "q_norm.weight"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        refused(folder, words)


def test_damaged_shards(folder):
    (folder / "model.safetensors").unlink()
    save(random_model(small(n_layers=1)), folder, max_shard_bytes=10_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["model.norm.weight"]
    for weight_map in (None, [], {"a": 5}, {"a": "../x.safetensors"}, {"a": "/x.safetensors"}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(folder, "index.json is damaged")
    wrong = content["weight_map"] | {"model.nothing": shard}
    index.write_text(json.dumps({"weight_map": wrong}))
    refused(folder, "names tensors that the files lack: model.nothing")
    index.write_text(json.dumps(content))
    first = content["weight_map"]["lm_head.weight"]
    second = next(f for f in content["weight_map"].values() if f != first)
    original = (folder / second).read_bytes()
    (folder / second).write_bytes((folder / first).read_bytes())
    refused(folder, "twice")
    (folder / second).unlink()
    refused(folder, f"lacks {second}")
    (folder / second).write_bytes(original[:-4])
    refused(folder, second, "cut short")


def test_load_into_changes_nothing_unless_everything_fits(folder):
    model = random_model(small(n_layers=1), seed=5)
    before = weights(model)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    with pytest.raises(UserError, match="cut short"):
        load_into(model, folder)
    path.write_bytes(data)
    with pytest.raises(UserError, match="wrong shapes"):
        load_into(random_model(replace(model.config, hidden_dim=44)), folder)
    assert all(np.array_equal(values, before[name]) for name, values in weights(model).items())
    load_into(model, folder)
    expected = weights(Transformer.from_pretrained(folder))
    assert all(np.array_equal(values, expected[name]) for name, values in weights(model).items())
