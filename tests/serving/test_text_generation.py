"""python -m xtrain.generate: the same text as transformers, streaming, stop strings."""

import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import OPTIONS, TOKENIZER, make_folder, run, sentencepiece_tokenizer
from tokenizers.processors import TemplateProcessing
from twins import LLAMA3, random_model, small

from xtrain import Engine, TrainConfig
from xtrain.serving import pretrained
from xtrain.serving.text_stream import TextStream
from xtrain.train import train


@pytest.fixture(scope="module")
def tokenizer():
    return TOKENIZER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def mine(tmp_path):
    """A folder that a test may change."""
    return make_folder(tmp_path)


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


def test_scaling_is_served(tmp_path, capsys):
    for i, more in enumerate((dict(rope_scaling=LLAMA3, qk_norm=False), dict(tie_embeddings=True))):
        folder = make_folder(tmp_path / str(i), **more)
        code, out, _ = run(capsys, "--model", folder, "def f", *OPTIONS)
        assert code == 0 and out == theirs(folder, "def f") + "\n"
