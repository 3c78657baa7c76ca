"""python -m xtrain.generate: the same text as transformers, streaming, stop strings, and everything that can be wrong."""

import json
import os
import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from twins import LLAMA3, random_model, small

from xtrain import Engine, TrainConfig, UserError, pretrained
from xtrain.generate import main
from xtrain.text_stream import TextStream
from xtrain.tokenizer import Tokenizer
from xtrain.train import train

TEXT = ["def f(x):\n    return x + größe  # 日本語\n" * 50]
OPTIONS = ["--max-new-tokens", "24"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT, 300)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture
def mine(tokenizer, tmp_path):
    """A folder that a test may damage."""
    return make_folder(tmp_path, tokenizer)


def make_folder(folder, tokenizer, **changes):
    shape = dict(vocab_size=tokenizer.vocab_size + 7, max_seq_len=64, head_dim=16)
    random_model(small(**(shape | changes))).save_pretrained(folder, tokenizer)
    return folder


def run(capsys, *arguments):
    """-> exit code, stdout, stderr"""
    capsys.readouterr()
    code = main(["--precision", "fp32", *map(str, arguments)])
    return code, *capsys.readouterr()


def theirs(folder, prompt, new=24, **options):
    """Prompt and continuation by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    return tokenizer.decode(out[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)


# ----------------------------------------------------------------------------- the same text
def test_the_text_of_transformers(folder, capsys):
    for prompt in ("def f", "größe", "日"):
        code, out, err = run(capsys, "--model", folder, prompt, *OPTIONS)
        assert code == 0 and out == theirs(folder, prompt) + "\n"
        assert "24 new ones" in err and "KV cache" in err


def test_several_prompts_and_streaming_print_the_same(folder, capsys):
    prompts = ["def f", "return", "x"]
    code, out, _ = run(capsys, "--model", folder, *prompts, *OPTIONS)
    assert code == 0
    for more in (
        ["--stream"],
        ["--batch-invariant"],
        ["--max-batch", "2"],
        ["--stream", "--max-batch", "1"],
    ):
        assert run(capsys, "--model", folder, *prompts, *OPTIONS, *more)[:2] == (0, out), more
    texts = [theirs(folder, prompt) for prompt in prompts]
    assert out == "".join(f"--- {i + 1} of 3\n{text}\n" for i, text in enumerate(texts))


def test_a_run_trained_here_is_served_by_both(tmp_path, capsys):
    config = TrainConfig(
        preset="tiny", data="tests/data/grammar.txt", out=str(tmp_path), name="mine", steps=30, batch=4, seq_len=32,
        warmup=3, vocab_size=300, eval_every=30, eval_batches=1, sample_every=99, save_every=20, device="cpu",
    )  # fmt: skip
    train(config)
    run_folder = tmp_path / "mine"
    newest = run_folder / "checkpoints" / "step-000030"
    assert pretrained.model_folder(run_folder) == newest
    capsys.readouterr()
    prompt = "the "
    code, out, _ = run(capsys, "--model", run_folder, prompt, *OPTIONS)
    assert code == 0 and out == theirs(newest, prompt) + "\n" and len(out) > 20
    weights = newest / "model.safetensors"
    weights.write_bytes(
        weights.read_bytes()[:-4]
    )  # half a file: the checkpoint before it is served
    code, out, err = run(capsys, "--model", run_folder, prompt, *OPTIONS)
    assert code == 0 and "going back to step-000020" in err
    assert out == theirs(newest.with_name("step-000020"), prompt) + "\n"


def test_a_token_for_the_beginning_and_one_for_the_end(tokenizer, mine, capsys):
    """A Llama's tokenizer puts one in front of every text; generation_config.json names what ends one."""
    file = mine / "tokenizer.json"
    content = json.loads(file.read_text())
    bos = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eot_id)]
    )
    content["post_processor"] = json.loads(bos.__getstate__())
    file.write_text(json.dumps(content))
    code, out, err = run(capsys, "--model", mine, "def f", *OPTIONS)
    assert code == 0 and out == theirs(mine, "def f") + "\n"
    without = len(tokenizer.encode("def f"))
    assert f"{without + 1} prompt tokens" in err
    model, prompt = (
        pretrained.load(mine, "cpu").model,
        [tokenizer.eot_id, *tokenizer.encode("def f")],
    )
    tokens = model.generate(np.array(prompt), 24)[len(prompt) :].tolist()
    (mine / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[5], 299]}))
    code, out, err = run(capsys, "--model", mine, "def f", *OPTIONS)
    n = tokens.index(tokens[5]) + 1
    assert code == 0 and f"{n} new ones" in err and out == theirs(mine, "def f") + "\n"


def sentencepiece_tokenizer():
    """A tokenizer.json as Llama 2 has it: spaces as U+2581, one in front of every text, unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    special, by_byte = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + by_byte, show_progress=False
    )
    backend.train_from_iterator(["def f(x): return x + y if x else 0"] * 50, trainer)
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = begin
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are no special tokens
    return content


def test_a_tokenizer_as_llama_2_has_it(tmp_path, capsys):
    content = sentencepiece_tokenizer()
    size = len(content["model"]["vocab"])
    config = small(vocab_size=size, max_seq_len=64, head_dim=16, qk_norm=False)
    random_model(config, 5).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    p = pretrained.load(tmp_path, "cpu")
    assert p.stop == {2} and p.tokenizer.special_ids == {0, 1, 2}
    for prompt in ("def f", "x größe", " y"):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        out = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=2
        )
        n = inputs["input_ids"].shape[1]
        ids = out[0].tolist()
        assert ids[0] == 1 and p.tokenizer.encode(prompt, special=True) == ids[:n]
        assert Engine(p.model, 1).generate([ids[:n]], 24, stop=p.stop) == [ids[n:]]
        code, shown, err = run(capsys, "--model", tmp_path, prompt, *OPTIONS)
        assert code == 0 and shown.startswith(prompt) and f"{n} prompt tokens" in err
        stream = TextStream(
            p.tokenizer
        )  # a continuation keeps the space in front of its first word
        text = "".join([stream.feed(i) for i in ids[:n]] + [stream.finish()])
        assert text == " " + prompt == " " + tokenizer.decode(ids[:n], skip_special_tokens=True)


def test_seeds_and_sampling(folder, capsys):
    hot = [
        "--model",
        folder,
        "def f",
        *OPTIONS,
        "--temperature",
        "1.2",
        "--top-k",
        "50",
        "--top-p",
        "0.95",
    ]
    first = run(capsys, *hot, "--seed", "1")[1]
    assert run(capsys, *hot, "--seed", "1")[1] == first
    assert run(capsys, *hot, "--seed", "2")[1] != first
    assert (
        run(capsys, *hot, "--top-k", "1")[1] == run(capsys, "--model", folder, "def f", *OPTIONS)[1]
    )


def test_stop_strings(folder, capsys):
    whole = run(capsys, "--model", folder, "def f", *OPTIONS)[1].rstrip("\n")[5:]
    for stop in (whole[4:7], whole[6], whole[-3:]):
        for more in ([], ["--stream"]):
            code, out, err = run(
                capsys,
                "--model",
                folder,
                "def f",
                *OPTIONS,
                "--stop",
                "no such text",
                "--stop",
                stop,
                *more,
            )
            assert code == 0 and out == "def f" + whole[: whole.index(stop)] + "\n"
            assert "text 1 ended at a stop string" in err


def test_a_full_context_is_said(folder, capsys):
    code, out, err = run(capsys, "--model", folder, "def f", "--max-new-tokens", "500")
    assert code == 0 and "text 1 ended because its row of the KV cache is full (64 tokens)" in err
    assert len(out) > 5


def interrupt(monkeypatch, step):
    """Ctrl-C in the middle of the engine's step with this number."""
    whole = Engine._step

    def broken(self, now):
        if now.number == step:
            raise KeyboardInterrupt
        return whole(self, now)

    monkeypatch.setattr(Engine, "_step", broken)


def test_ctrl_c_ends_it_with_what_there_is(folder, capsys, monkeypatch):
    whole = run(capsys, "--model", folder, "def f", *OPTIONS)[1]
    interrupt(monkeypatch, 6)
    code, out, err = run(capsys, "--model", folder, "def f", *OPTIONS, "--stream")
    assert code == 130 and err == "\nxtrain.generate: interrupted\n"
    assert whole.startswith(out) and len("def f") < len(out) < len(whole)


def test_no_more_rows_than_prompts(folder, capsys):
    """--max-batch is a limit, and a row is memory."""
    for most, rows in (("1000", 2), ("1", 1)):
        code, _, err = run(capsys, "--model", folder, "x", "y", *OPTIONS, "--max-batch", most)
        assert code == 0 and f"x 2 x {rows} rows" in err


def test_options_of_a_draw_that_is_none(folder, capsys):
    words = "--top-k, --top-p and --seed change nothing"
    for more in (["--top-p", "0.5"], ["--top-k", "3"], ["--seed", "1"]):
        assert words in run(capsys, "--model", folder, "x", *OPTIONS, *more)[2]
        assert (
            words
            not in run(capsys, "--model", folder, "x", *OPTIONS, *more, "--temperature", "1")[2]
        )
    assert words not in run(capsys, "--model", folder, "x", *OPTIONS)[2]


# ----------------------------------------------------------------------------- text, a token at a time
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_are_the_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    plain = [i for i in ids if i not in tokenizer.special_ids]
    text = "".join(tokenizer.stream(plain))
    stream = TextStream(tokenizer)
    assert "".join([stream.feed(i) for i in ids] + [stream.finish()]) == text == stream.text
    cuts = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    stops = [s for s in (text[cuts[0] : cuts[1]], data.draw(st.text(max_size=2))) if s]
    stream = TextStream(tokenizer, stops)
    pieces = [stream.feed(i) for i in ids] + [stream.finish()]
    ends = [text.index(s) for s in stops if s in text]
    assert stream.stopped == bool(ends)
    # the text ends before the stop string that is complete first
    if ends:
        first = min(stops, key=lambda s: text.index(s) + len(s) if s in text else len(text) + 1)
        assert len("".join(pieces)) <= text.index(first) and text.startswith("".join(pieces))
    else:
        assert "".join(pieces) == text


def test_half_a_character_is_held_back(tokenizer):
    ids = [tokenizer.token_bytes.index(bytes([b])) for b in "日x".encode()]
    stream = TextStream(tokenizer, ["xy"])
    assert [stream.feed(i) for i in ids] == ["", "", "日", ""] and stream.finish() == "x"
    stream = TextStream(tokenizer)
    assert stream.feed(ids[0]) == "" and stream.finish() == "\ufffd"


# ----------------------------------------------------------------------------- what is wrong
def refused(capsys, folder, *words, prompt="def f", more=()):
    code, out, err = run(capsys, "--model", folder, prompt, *OPTIONS, *more)
    assert code == 2 and out == "", (code, out)
    assert err.startswith("xtrain.generate: ") and err.count("\n") == 1 and len(err) < 3500, err
    assert all(word in err for word in words), err


def test_prompts_and_options(folder, capsys):
    refused(capsys, folder, "prompt 1 is empty", prompt="")
    refused(capsys, folder, "prompt 1 has", "the model takes 64", "shorten it", prompt="def f" * 50)
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


def test_bytes_that_are_no_text(folder, tmp_path):
    """From the shell: a prompt that is no UTF-8; an output that cannot show every character; one that closes early."""
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
    assert done.returncode == 2 and "prompt 1 holds bytes that are no UTF-8" in done.stderr
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "größe"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stdout.startswith("gr??e"), done.stderr
    with subprocess.Popen(
        [*command, "x", "--stream"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as gone:
        gone.stdout.close()
        assert b"Traceback" not in gone.stderr.read()
    assert gone.returncode == 141


def test_beam_search_is_refused_by_name(mine, capsys):
    (mine / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    refused(capsys, mine, "num_beams 4", "no beam search")


def test_folders(capsys, tmp_path, mine):
    refused(capsys, tmp_path / "none", "does not exist")
    refused(capsys, mine / "config.json", "is a file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"train": {}, "model": {}}')
    refused(capsys, tmp_path / "run", "a run without a checkpoint")
    refused(capsys, tmp_path, "no config.json") if mine != tmp_path else None
    (mine / "tokenizer.json").unlink()
    refused(capsys, mine, "there is no tokenizer at")
    (mine / "tokenizer.model").write_bytes(b"x")
    refused(capsys, mine, "no tokenizer.json: make one with")


def test_a_prompt_of_which_the_tokenizer_leaves_nothing(mine, capsys):
    content = json.loads((mine / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (mine / "tokenizer.json").write_text(json.dumps(content))
    refused(capsys, mine, "prompt 1 holds nothing that the tokenizer knows", prompt="  ")


def test_tokenizers(capsys, mine, tokenizer, tmp_path_factory):
    other = tmp_path_factory.mktemp("small")
    make_folder(other, Tokenizer.train(TEXT, 260), vocab_size=270)
    (other / "tokenizer.json").write_bytes((mine / "tokenizer.json").read_bytes())
    refused(capsys, other, f"the tokenizer has {tokenizer.vocab_size} tokens, the model only 270")
    for content in (b"", b"{}", b"\xff\xfe", b"[" * 10**5, b'{"model": {"type": "BPE"}}'):
        (mine / "tokenizer.json").write_bytes(content)
        refused(capsys, mine, "tokenizer.json")


CONFIGS = [
    ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM' is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"use_sliding_window": True}, "use_sliding_window True"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "RoPE type 'yarn'"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
    ({"vocab_size": 10**9}, "wrong shapes"),
    ({"hidden_size": 2**40}, "hidden_size"),
    ({"hidden_size": "wide"}, "hidden_size must be a positive whole number"),
    ({"num_attention_heads": 5}, "not divisible"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
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
    tensors = {k: v.clone() for k, v in load_file(path).items()}  # not a map of the file
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        refused(capsys, mine, "cut short")
    with open(path, "wb") as file:  # a header of 100 MB, really there
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate((100 << 20) + 8 + 1000)
    refused(capsys, mine, "its header claims 104857600 bytes")
    save_file(tensors | {"extra.weight": torch.zeros(1)}, path)
    refused(capsys, mine, "tensors that do not belong: extra.weight")
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, path)
    refused(capsys, mine, "missing tensors: model.layers.0.mlp.up_proj.weight, model.layers.1")
    save_file(tensors | {"model.norm.weight": torch.zeros(7)}, path)
    refused(capsys, mine, "model.norm.weight has shape (7,), expected (32,)")
    save_file(tensors | {"model.norm.weight": torch.full((32,), float("nan"))}, path)
    refused(capsys, mine, "not finite")
    path.unlink()
    refused(capsys, mine, "has neither")


def test_flipped_bits(capsys, mine):
    """In the header: refused, or harmless. In the data a file has no checksum, but nothing may crash."""
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
    """A JSON value with one of its parts, at some depth, replaced, removed or added."""
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
    """In a process of its own: no traceback, the exit code of the shell."""
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


def test_scaling_is_served(tokenizer, tmp_path, capsys):
    for i, more in enumerate((dict(rope_scaling=LLAMA3, qk_norm=False), dict(tie_embeddings=True))):
        folder = make_folder(tmp_path / str(i), tokenizer, **more)
        code, out, _ = run(capsys, "--model", folder, "def f", *OPTIONS)
        assert code == 0 and out == theirs(folder, "def f") + "\n"


def test_nothing_is_loaded_in_part(mine, monkeypatch):
    """The tokenizer and all headers are looked at before weights are read."""
    path = mine / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr("xtrain.huggingface.Transformer", None)
    with pytest.raises(UserError, match="cut short"):
        pretrained.load(mine, "cpu")
