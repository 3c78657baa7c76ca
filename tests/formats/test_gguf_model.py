"""GGUF files as models: what xtrain and the package gguf have written is read back, weight by weight."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_gguf_file import CONFIGS, TEXT, export, saved
from twins import GEMMA3, random_model, small

import xtrain.chat
import xtrain.export
import xtrain.generate
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.formats.gguf_model import NEUTRAL, merges_of
from xtrain.formats.gguf_names import PRE_TOKENIZERS
from xtrain.formats.huggingface import open_weights, read_config
from xtrain.formats.saved_runs import model_folder
from xtrain.formats.texts import load_texts
from xtrain.inspect.compare import load_transformers

gguf = pytest.importorskip("gguf")
TEMPLATE = "{{ messages[0].content }}<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT, 280)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))


def written(config, tokenizer, tmp_path, kind="f32"):
    """Return a Hugging Face folder and the same model as a GGUF file."""
    folder = saved(config, tokenizer, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert export(folder, tmp_path / "a.gguf", kind) == 0
    return folder, tmp_path / "a.gguf"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_folder_that_was_exported(name, tokenizer, tmp_path):
    folder, path = written(CONFIGS[name], tokenizer, tmp_path)
    view = model_folder(path)
    config, stored = open_weights(view)
    expected, tensors = open_weights(folder)
    ours = config.to_dict()
    theirs = expected.to_dict()
    if name == "qwen3":  # the file has the context after YaRN's scaling, and not its fixed numbers
        assert ours.pop("max_seq_len") == expected.context and theirs.pop("max_seq_len")
        yarn = ours.pop("rope_scaling")
        assert {key: yarn[key] for key in theirs["rope_scaling"]} == theirs.pop("rope_scaling")
    assert ours == theirs
    assert stored.keys() == tensors.keys()
    for tensor in stored:
        assert np.array_equal(stored[tensor].read(), tensors[tensor].read()), tensor
    texts = load_texts(view)
    assert texts.template.render([{"role": "user", "content": "hi"}]) == "hi<|endoftext|>"
    assert texts.stop == {tokenizer.eot_id}
    for text in (*TEXT[:1], "a<|endoftext|>b", "1234  \n\t x's ü"):
        assert texts.tokenizer.encode(text) == tokenizer.encode(text)
        assert texts.tokenizer.decode(tokenizer.encode(text)) == text


def add_blocks(path, source, kinds):
    """Copy the file `source` with random blocks of these types as its matrices of the first layer."""
    rng = np.random.default_rng(0)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, inner)
    values = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if ".0." in tensor.name and len(shape) == 2 and kinds:
            kind = gguf.GGMLQuantizationType[kinds.pop(0)]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = rng.integers(0, 60, (shape[0], shape[1] // block * size), np.uint8)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
            values[tensor.name] = gguf.quants.dequantize(data, kind)
        else:
            data = np.array(tensor.data).reshape(shape)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize(
    "kinds",
    [
        ["Q4_0", "Q4_1", "Q8_0", "Q5_0"],
        ["Q4_K", "Q5_K", "Q6_K"],
        ["Q2_K", "Q3_K", "IQ4_XS"],
        ["Q5_1", "BF16", "MXFP4", "IQ4_NL"],
    ],
)
def test_quantized_types(kinds, tokenizer, tmp_path):
    config = CONFIGS["qwen3"]
    config = type(config)(**config.to_dict() | {"dim": 256, "hidden_dim": 256})
    _, path = written(config, tokenizer, tmp_path)
    values = add_blocks(tmp_path / "b.gguf", path, list(kinds))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.n_layers)
    _, stored = open_weights(model_folder(tmp_path / "b.gguf"))
    read = {names.get_name(name, (".weight",)): x.read() for name, x in stored.items()}
    assert len(values) == len(kinds)
    for name, expected in values.items():
        assert np.array_equal(read[name], expected) and np.ptp(expected) > 0


def test_a_command_takes_a_file(tokenizer, tmp_path, capsys):
    folder, path = written(CONFIGS["llama"], tokenizer, tmp_path)
    capsys.readouterr()
    out = []
    for model in (folder, path):
        line = ["--model", str(model), "the quick", "--max-new-tokens", "5", "--temperature", "0"]
        assert xtrain.generate.main([*line, "--device", "cpu"]) == 0
        out.append(capsys.readouterr().out)
    assert out[0] == out[1]


def test_chat_names_the_file(tokenizer, tmp_path, capsys, monkeypatch):
    _, path = written(CONFIGS["llama"], tokenizer, tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    capsys.readouterr()
    assert xtrain.chat.main(["--model", str(path), "--device", "cpu"]) == 0
    assert capsys.readouterr().err.startswith(f"{path}; ")


def write_gemma3(path, folder):
    """Write a folder's model as llama.cpp does: 1 + w of each norm, tokens with scores, few keys."""
    config, stored = open_weights(folder)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.UNKNOWN] + [gguf.TokenType.BYTE] * 256
    tokens += ["a", "b", "▁", "ab", "▁ab"]
    types += [gguf.TokenType.NORMAL] * 5
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([0.0] * (len(tokens) - 2) + [-1.0, -2.0])
    for name, i in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(i)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.n_layers)
    for name, tensor in stored.items():
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.read())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gemma3(tmp_path):
    fixed = dict(local_rope_theta=10000.0, query_pre_attn_scalar=12)  # in llama.cpp
    config = small(
        **GEMMA3 | fixed,
        vocab_size=265,
        n_layers=7,
        full_attention_layers=(5,),
        rope_theta=1e6,
        tie_embeddings=True,
    )
    random_model(config).save_pretrained(tmp_path / "model")
    write_gemma3(tmp_path / "a.gguf", tmp_path / "model")
    view = model_folder(tmp_path / "a.gguf")
    found, stored = open_weights(view)
    assert found == config
    for name, tensor in open_weights(tmp_path / "model")[1].items():
        assert np.array_equal(stored[name].read(), tensor.read()), name
    texts = load_texts(view)
    ids = texts.tokenizer.encode("ab ab ü")
    assert ids == [263, 264, 262, 4 + 0xC3, 4 + 0xBC] and texts.tokenizer.begin == [2]
    assert texts.tokenizer.decode(ids) == "ab ab ü" and texts.stop == {1}


def test_another_file_of_the_same_name_is_another_model(tokenizer, tmp_path):
    _, path = written(CONFIGS["qwen3"], tokenizer, tmp_path)
    first = model_folder(path)
    assert model_folder(path) == first
    config = read_config(first)
    (tmp_path / "other").mkdir()
    _, other = written(CONFIGS["llama"], tokenizer, tmp_path / "other")
    copies = [Path(shutil.copy(other, tmp_path / name)) for name in ("b.gguf", "c.gguf")]
    kept, _ = map(model_folder, copies)
    (tmp_path / "c.gguf").unlink()
    other.replace(path)
    second = model_folder(path)
    assert read_config(second) != config
    # the cache keeps no folders of files that are gone
    assert set(second.parent.iterdir()) == {second, kept}


def test_a_message_names_the_file(tokenizer, tmp_path, capsys):
    _, path = written(CONFIGS["qwen3"], tokenizer, tmp_path)
    assert xtrain.export.main(["--model", str(path), "--merge", str(tmp_path / "x")]) == 2
    assert f"{path} holds no adapters" in capsys.readouterr().err


def test_a_folder_of_files_and_the_file_itself(tokenizer, tmp_path, capsys):
    _, path = written(CONFIGS["qwen3"], tokenizer, tmp_path)
    before = path.read_bytes()
    for line, words in (
        (["--model", str(path), "--gguf", str(path)], f"{path} is the model: give another file"),
        (["--model", str(tmp_path), "--gguf", "b"], f"give a GGUF file in it, such as {path}"),
    ):
        assert xtrain.export.main(line) == 2
        assert words in capsys.readouterr().err
    assert path.read_bytes() == before


def test_adapters_of_a_file(tokenizer, tmp_path, capsys):
    """Neither is the file replaced by the merged model, nor can transformers read both."""
    _, path = written(CONFIGS["qwen3"], tokenizer, tmp_path)
    before = path.read_bytes()
    folder = tmp_path / "adapters"
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(path), "r": 1, "lora_alpha": 1}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    assert xtrain.export.main(["--model", str(folder), "--gguf", str(path)]) == 2
    words = f"{path} is the model of these adapters: give another file"
    assert words in capsys.readouterr().err and path.read_bytes() == before
    with pytest.raises(UserError, match="holds adapters of a GGUF file, which transformers"):
        load_transformers(folder)


def test_what_cannot_be_read_is_one_sentence(tokenizer, tmp_path):
    _, path = written(CONFIGS["qwen3"], tokenizer, tmp_path)
    whole = path.read_bytes()
    for content, words in (
        (whole[:-100], "cut short"),
        (whole[:300], "damaged"),
        (b"GGUF" + bytes(20), "damaged"),
        (whole.replace(b"qwen3", b"mamba"), "architecture is 'mamba'"),
        (whole.replace(b"gpt-2", b"gpt-9"), "rule 'gpt-9'"),
        (whole.replace(b"ffn_up", b"ffn_uq"), "ffn_uq"),
        (b"GGML", "is a file"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=words) as error:
            open_weights(model_folder(path))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("llama.block_count", "two", "llama.block_count must be a number, got 'two'"),
        ("llama.block_count", 2**40, "tensors, too few for its layers"),
        ("llama.attention.head_count_kv", [1, 2], r"head_count_kv must be a whole number, got \[1, 2\]"),
        ("llama.rope.freq_base", float("nan"), "freq_base must be a number, got nan"),
        ("llama.expert_count", 8, "xtrain reads experts of qwen3moe, not of llama"),
        ("llama.rope.scaling.type", "yarn", "its RoPE scaling has no factor"),
        ("llama.rope.scaling.type", "longrope", "its RoPE scaling is 'longrope'"),
        *((f"llama.{key}", 2.0, f"its {key} is 2.0, which xtrain does not support") for key in NEUTRAL),
        ("llama.attention.causal", False, "its attention.causal is False"),
        ("split.count", 3, "one of 3 files of a model: join them"),
        ("tokenizer.chat_template.tool/../../x", "text", r"'tool/\.\./\.\./x' is not a name of a chat template"),
        ("tokenizer.ggml.model", "bert", "its tokenizer is 'bert', xtrain reads gpt2 and llama"),
        ("tokenizer.ggml.tokens", "abc", "tokens must be a list of str"),
        ("tokenizer.ggml.merges", [1], "merges must be a list of str"),
        ("tokenizer.ggml.token_type", ["a"], "token_type must be a list of int"),
        ("tokenizer.ggml.bos_token_id", 2**31, r"its bos token has the id \d+, of \d+ tokens"),
        ("tokenizer.ggml.pre", [1], r"splits a text by the rule '\[1\]'"),
    ],
)  # fmt: skip
def test_a_key_with_a_wrong_value_is_one_sentence(key, value, words, tmp_path):
    path = minimal(tmp_path / "a.gguf", {key: value})
    with pytest.raises(UserError, match=words) as error:
        model_folder(path)
    assert "\n" not in str(error.value)


def minimal(path, changes, endian=gguf.GGUFEndian.LITTLE, **tensors):
    """Write a file with little in it, and with these keys and tensors. -> path"""
    kinds = {str: "add_string", int: "add_uint64", float: "add_float32", list: "add_array"}
    kinds[bool] = "add_bool"
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    values = {
        **{f"llama.{name}": 8 for name in ("embedding_length", "feed_forward_length", "context_length")},
        **{f"llama.{name}": 1 for name in ("block_count", "attention.head_count")},
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
    } | changes  # fmt: skip
    for name, x in values.items():
        getattr(writer, kinds[type(x)])(name, x)
    for name, x in ({"token_embd": np.zeros((2, 8), np.float32)} | tensors).items():
        writer.add_tensor(f"{name}.weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.yarn_beta_fast": 9.0},
            {"rope_type": "yarn", "factor": 1.0, "beta_fast": 9.0, "beta_slow": 1, "attention_factor": 1.0, "original_max_position_embeddings": 8},
        ),
    ],
)  # fmt: skip
def test_rope_scaling_is_that_of_llama_cpp(keys, expected, tmp_path):
    """llama_model_loader: without a type, linear; without the original context, the whole one."""
    path = minimal(tmp_path / "a.gguf", {f"llama.{key}": x for key, x in keys.items()})
    assert read_config(model_folder(path)).rope_scaling == expected


def test_two_rope_scalings(tmp_path):
    divisors = {"rope_freqs": np.ones(4, np.float32)}
    path = minimal(tmp_path / "a.gguf", {"llama.rope.scaling.factor": 4.0}, **divisors)
    with pytest.raises(UserError, match=r"rope_freqs\.weight and a RoPE scaling by 4\.0"):
        model_folder(path)


def test_a_big_endian_file(tmp_path):
    path = minimal(tmp_path / "a.gguf", {}, gguf.GGUFEndian.BIG)
    with pytest.raises(UserError, match="it is big-endian: run `gguf-convert-endian"):
        model_folder(path)


def test_an_array_without_end(tmp_path):
    path = minimal(tmp_path / "a.gguf", {"x": [7, 8]})
    whole = path.read_bytes()
    place = whole.index(b"x\x09\0\0\0") + 9
    path.write_bytes(whole[:place] + (2**50).to_bytes(8, "little") + whole[place + 8 :])
    with pytest.raises(UserError, match="cut short or is damaged: the file ends too early"):
        model_folder(path)


def test_matrices_of_experts_in_a_model_without(tmp_path):
    path = minimal(tmp_path / "a.gguf", {}, **{"blk.0.ffn_up": np.ones((2, 8, 8), np.float32)})
    with pytest.raises(UserError, match=r"up_proj\.weight has shape \(2, 8, 8\)"):
        open_weights(model_folder(path))


def test_names_of_pre_tokenizers_are_unique():
    names = [name for several in PRE_TOKENIZERS.values() for name in several]
    assert len(names) == len(set(names))


def test_merges_follow_the_scores():
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5}
    assert merges_of(vocab, [0, 0, 0, -1, -2, -3]) == [
        ["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"],
    ]  # fmt: skip
