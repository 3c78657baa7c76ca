"""python -m xtrain.generate: every error in prompts, options, folders and files gives one sentence and exit code 2."""

import json
import os
import random
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import OPTIONS, TEXT, TOKENIZER, make_folder, run

from xtrain import UserError
from xtrain.data.tokenizer import Tokenizer
from xtrain.serving import pretrained


@pytest.fixture
def mine(tmp_path):
    """A folder that a test may damage."""
    return make_folder(tmp_path)


def refused(capsys, folder, *words, prompt="def f", more=()):
    code, out, err = run(capsys, "--model", folder, prompt, *OPTIONS, *more)
    assert code == 2 and out == "", (code, out)
    assert err.startswith("xtrain.generate: ") and err.count("\n") == 1 and len(err) < 3500, err
    assert all(word in err for word in words), err


def test_prompts_and_options(folder, capsys):
    refused(capsys, folder, "prompt 1 is empty", prompt="")
    refused(
        capsys, folder, "prompt 1 has", "the model supports 64", "shorten it", prompt="def f" * 50
    )
    refused(capsys, folder, "temperature", more=["--temperature", "-1"])
    refused(capsys, folder, "a finite number", more=["--temperature", "inf"])
    refused(capsys, folder, "a --stop text is empty", more=["--stop", ""])
    refused(capsys, folder, "top_p", more=["--top-p", "0"])
    refused(capsys, folder, "top_k", more=["--top-k", "-5"])
    refused(capsys, folder, "max_new_tokens must be a positive", more=["--max-new-tokens", "0"])
    refused(capsys, folder, "max_batch must be a positive", more=["--max-batch", "0"])
    refused(capsys, folder, "seed must be", more=["--seed", "-1"])
    refused(capsys, folder, "bf16", more=["--precision", "bf16", "--device", "cpu"])
    code, out, err = run(capsys, "--model", folder)
    assert code == 2 and not out and "give at least one prompt" in err
    code, out, err = run(capsys, "--model", folder, "x", "")
    assert code == 2 and not out and "prompt 2 is empty" in err


def test_bytes_that_are_not_text(folder, tmp_path):
    """From the shell: a prompt that is not UTF-8, an output that cannot show every character, an output that closes early."""
    command = [
        sys.executable,
        "-m",
        "xtrain.generate",
        "--model",
        str(folder),
        "--max-new-tokens",
        "3",
    ]
    done = subprocess.run([*command, b"\xff\xfe"], capture_output=True, text=True)
    assert done.returncode == 2 and "prompt 1 is not valid UTF-8" in done.stderr
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "größe"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stdout.startswith("gr??e"), done.stderr
    with subprocess.Popen(
        [*command, "x", "--stream"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as gone:
        gone.stdout.close()
        assert b"Traceback" not in gone.stderr.read()
    assert gone.returncode == 141


def test_folders(capsys, tmp_path, mine):
    refused(capsys, tmp_path / "none", "does not exist")
    refused(capsys, tmp_path / ("x" * 300), "cannot be read: File name too long")
    refused(capsys, "", "the name of the model's folder is empty")
    refused(capsys, mine / "config.json", "is a file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"train": {}, "model": {}}')
    refused(capsys, tmp_path / "run", "a run without a checkpoint")
    refused(capsys, tmp_path, "no config.json") if mine != tmp_path else None
    (mine / "tokenizer.json").unlink()
    refused(capsys, mine, "there is no tokenizer at")
    (mine / "tokenizer.model").write_bytes(b"x")
    refused(capsys, mine, "no tokenizer.json: make one with")
    (mine / "tokenizer.model").rename(mine / "vocab.json")
    refused(capsys, mine, "has a vocab.json, but no tokenizer.json: make one with")


def test_a_prompt_without_tokens(mine, capsys):
    content = json.loads((mine / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (mine / "tokenizer.json").write_text(json.dumps(content))
    refused(capsys, mine, "prompt 1 has no tokens after tokenization", prompt="  ")


def test_tokenizers(capsys, mine, tmp_path_factory):
    other = tmp_path_factory.mktemp("small")
    make_folder(other, Tokenizer.train(TEXT, 260), vocab_size=270)
    (other / "tokenizer.json").write_bytes((mine / "tokenizer.json").read_bytes())
    refused(capsys, other, f"the tokenizer has {TOKENIZER.vocab_size} tokens, the model only 270")
    refused(capsys, mine, "drafts nothing: set speculate", more=["--draft", mine])
    make_folder(other, Tokenizer.train([TEXT[0][::-1]], 300))
    more = ["--speculate", "4", "--draft", other]
    refused(capsys, mine, "has another tokenizer than", "of the same family", more=more)
    for content in (b"", b"{}", b"\xff\xfe", b"[" * 10**5, b'{"model": {"type": "BPE"}}'):
        (mine / "tokenizer.json").write_bytes(content)
        refused(capsys, mine, "tokenizer.json")


CONFIGS = [
    ({"architectures": ["Qwen2MoeForCausalLM"]}, "'Qwen2MoeForCausalLM' is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported"),
    ({"attention_bias": True}, "attention_bias True"),
    (
        {"use_sliding_window": True, "sliding_window": -5, "max_window_layers": 0},
        "sliding_window must be a positive whole number",
    ),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "RoPE type 'longrope'"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
    ({"vocab_size": 10**9}, "vocab_size must be at most"),
    ({"hidden_size": 2**40}, "hidden_size"),
    ({"hidden_size": "wide"}, "hidden_size must be a positive whole number"),
    ({"num_attention_heads": 5}, "not divisible"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    ({"rope_scaling": {"type": "dynamic", "factor": 1e12}}, "x the RoPE factor is"),
    ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
    ({"rope_theta": 0}, "rope_theta"),
]


@pytest.mark.parametrize("changes, words", CONFIGS, ids=[words for _, words in CONFIGS])
def test_absurd_configs(capsys, mine, changes, words):
    config = json.loads((mine / "config.json").read_text())
    config.pop("rope_parameters")
    (mine / "config.json").write_text(json.dumps(config | changes))
    refused(capsys, mine, words)


def test_weights(capsys, mine):
    path = mine / "model.safetensors"
    data = path.read_bytes()
    tensors = {
        k: v.clone() for k, v in load_file(path).items()
    }  # copied, since the file is overwritten
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        refused(capsys, mine, "cut short")
    with open(path, "wb") as file:  # a header of 100 MB that the file really has
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate((100 << 20) + 8 + 1000)
    refused(capsys, mine, "its header claims 104857600 bytes")
    save_file(tensors | {"extra.weight": torch.zeros(1)}, path)
    refused(capsys, mine, "unexpected tensors: extra.weight")
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, path)
    refused(capsys, mine, "missing tensors: model.layers.0.mlp.up_proj.weight, model.layers.1")
    save_file(tensors | {"model.norm.weight": torch.zeros(7)}, path)
    refused(capsys, mine, "model.norm.weight has shape (7,), expected (32,)")
    save_file(tensors | {"model.norm.weight": torch.full((32,), float("nan"))}, path)
    refused(capsys, mine, "not finite")
    path.unlink()
    refused(capsys, mine, "has neither")


def test_flipped_bits(capsys, mine):
    """In the header: rejected or harmless. The data has no checksum, but nothing may crash."""
    path = mine / "model.safetensors"
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for bit in [
        *range(0, 64, 5),
        *range(64, 8 * header, 997),
        *range(8 * header, 8 * len(data), 40_009),
    ]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        code, out, err = run(capsys, "--model", mine, "def f", "--max-new-tokens", "2")
        assert code in (0, 2) and "Traceback" not in err
        if code == 2:
            assert not out and err.count("\n") == 1
        if bit < 8 * header:
            assert code == 2 or out.startswith("def f")


ODD = [None, -1, 0, 2.5, "x", [], {}, ["x"], {"a": {}}, True, 10**400, 1e308, 2**63, "\ud800"]


def mutated(value, draw):
    """A JSON value with one value, at some depth, replaced, removed or added."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key, chance = draw.choice(sorted(value)), draw.random()
        if chance < 0.4:
            return value | {key: mutated(value[key], draw)}
        if chance < 0.8:
            return value | {key: draw.choice(ODD)}
        if chance < 0.9:
            return {k: v for k, v in value.items() if k != key}
        return value | {
            draw.choice(["x", "eos_token_id", "rope_scaling", "num_beams"]): draw.choice(ODD)
        }
    return draw.choice(ODD)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_mutated_files_are_one_sentence_or_work(name, mine, capsys):
    (mine / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    original, draw = json.loads((mine / name).read_text()), random.Random(name)
    for _ in range(40):
        (mine / name).write_text(json.dumps(mutated(original, draw)))
        code, out, err = run(capsys, "--model", mine, "def f", "--max-new-tokens", "2")
        assert (code, err.count("\n")) == (2, 1) or (code == 0 and out.startswith("def f")), err


def test_the_command_itself(folder, mine):
    """In a subprocess: no traceback, and the exit code that a shell sees."""
    command = [sys.executable, "-m", "xtrain.generate", "--model"]
    done = subprocess.run(
        [*command, folder, "def f", "--max-new-tokens", "3"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and done.stdout.startswith("def f"), done.stderr
    (mine / "model.safetensors").write_bytes(b"nothing")
    done = subprocess.run([*command, mine, "def f"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    done = subprocess.run(
        [*command, mine, "def f", "--temperatur", "1"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--temperature" in done.stderr


def test_nothing_is_loaded_partially(mine, monkeypatch):
    """The tokenizer and all headers are checked before weights are read."""
    path = mine / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(pretrained.Transformer, "__init__", None)
    with pytest.raises(UserError, match="cut short"):
        pretrained.load(mine, "cpu")
