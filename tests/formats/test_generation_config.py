"""generation_config.json: the defaults of generate, chat, serve and evaluate, against transformers' generate."""

import json

import pytest
import torch
import transformers
from serving import OPTIONS, make_folder, run

from xtrain import Transformer
from xtrain.chat import main as chat_main
from xtrain.errors import UserError
from xtrain.evaluation.scorer import Scorer
from xtrain.formats.generation_config import IGNORED, TYPES, UNSUPPORTED, GenerationDefaults
from xtrain.serving import pretrained

PROMPT = "def f(x): return x + größe"
GENERATE = {"max_new_tokens": 128, "temperature": 0.0}
SERVE = {"max_new_tokens": 16, "temperature": 1.0}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def write(folder, **content):
    (folder / "generation_config.json").write_text(json.dumps(content))


def theirs(folder, new=24, **options):
    """-> prompt and continuation as transformers generates it, and the ids of the continuation"""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=new, pad_token_id=0, **options)[0]
    n = inputs["input_ids"].shape[1]
    text = tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text, out[n:].tolist()


# ----------------------------------------------------------------------------- the same text
@pytest.mark.parametrize("penalty", [1.1, 1.3, 0.8])
def test_greedy_text_with_a_repetition_penalty_is_that_of_transformers(folder, capsys, penalty):
    """do_sample false ignores temperature, top_k and top_p, but not the penalty. An option overrides the file."""
    plain = theirs(folder)[0]
    write(folder, repetition_penalty=penalty, do_sample=False, temperature=0.7, top_k=3, top_p=0.5)
    want = theirs(folder)[0]
    code, out, err = run(capsys, "--model", folder, PROMPT, *OPTIONS)
    assert code == 0 and out == want + "\n" and want != plain
    assert f"generation_config.json: repetition_penalty {penalty}\n" in err
    off = ["--repetition-penalty", "1"]
    code, out, err = run(capsys, "--model", folder, PROMPT, *OPTIONS, *off)
    assert code == 0 and out == plain + "\n" and "generation_config" not in err


def test_evaluate_generates_as_transformers_does(folder):
    """lm-eval's hf model calls generate with do_sample=False, and so takes the penalty of the file."""
    write(folder, repetition_penalty=1.3, do_sample=True, temperature=0.7, top_k=3)
    p = pretrained.load(folder, "cpu", "fp32")
    ids = p.tokenizer.encode(PROMPT)
    (text,) = Scorer(p, 64).generate([ids], 24, ["never"])
    new = [i for i in theirs(folder, do_sample=False)[1] if i not in p.tokenizer.special_ids]
    assert text == p.tokenizer.decode(new)
    drawn = Scorer(p, 64).generate([ids] * 2, 24, [], temperature=1.0, top_k=1)
    assert drawn == [text] * 2


def test_what_config_json_says_without_a_generation_config(folder, capsys, tmp_path_factory):
    """As in older models. It is in the file that is written."""
    plain = theirs(folder)[0]
    content = json.loads((folder / "config.json").read_text())
    old = {"repetition_penalty": 1.3, "do_sample": False, "top_k": 50, "temperature": 1.0}
    (folder / "config.json").write_text(json.dumps(content | old))
    want = theirs(folder)[0]
    assert want != plain and run(capsys, "--model", folder, PROMPT, *OPTIONS)[1] == want + "\n"
    saved = tmp_path_factory.mktemp("saved")
    p = pretrained.load(folder, "cpu")
    p.model.save_pretrained(saved, p.tokenizer)
    content = json.loads((saved / "generation_config.json").read_text())
    assert content["repetition_penalty"] == 1.3 and "do_sample" not in content
    assert theirs(saved)[0] == want


def test_every_entry_survives_reading_and_writing(folder, tmp_path_factory):
    content = {"repetition_penalty": 1.3, "top_k": 3, "no_repeat_ngram_size": 3, "mine": [1, {}]}
    write(folder, **content)
    saved = tmp_path_factory.mktemp("saved")
    Transformer.from_pretrained(folder).save_pretrained(saved)
    written = json.loads((saved / "generation_config.json").read_text())
    assert {name: written[name] for name in content} == content


# ----------------------------------------------------------------------------- the rule
RULE = [  # file, given by the user, the command's own -> what is used
    ({}, {}, GENERATE, {"temperature": 0}),
    ({}, {}, SERVE, {"temperature": 1}),
    # do_sample decides; what it leaves open is off
    ({"do_sample": True}, {}, GENERATE, {"temperature": 1, "top_p": 1, "top_k": 0}),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {}, GENERATE, {"temperature": 0.6, "top_k": 20}),
    ({"do_sample": True}, {}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1, "top_p": 1}),
    ({"do_sample": False, "temperature": 0.6}, {}, SERVE, {"temperature": 0}),
    # without it a command that draws takes the numbers, and one that does not stays greedy
    ({"temperature": 0.6, "top_p": 0.8}, {}, SERVE, {"temperature": 0.6, "top_p": 0.8}),
    ({"temperature": 0.6, "top_p": 0.8}, {}, GENERATE, {"temperature": 0, "top_p": 0.8}),
    # the user decides in any case
    ({"do_sample": True, "top_p": 0.8}, {"temperature": 0.0}, GENERATE, {"temperature": 0}),
    ({"do_sample": False, "top_p": 0.8}, {"temperature": 0.5}, SERVE, {"temperature": 0.5, "top_p": 0.8}),
    ({"top_k": 20, "min_p": 0.1}, {"top_k": 0}, SERVE, {"top_k": 0, "min_p": 0.1}),
    ({"max_new_tokens": 7}, {}, SERVE, {"max_new_tokens": 7}),
    ({"max_new_tokens": 7, "repetition_penalty": 1.2}, {"max_new_tokens": 3}, SERVE, {"max_new_tokens": 3, "repetition_penalty": 1.2}),
]  # fmt: skip


@pytest.mark.parametrize("content, given, own, used", RULE)
def test_the_rule(content, given, own, used):
    found = GenerationDefaults.of(content).fill(given, own)
    assert {name: found[name] for name in used} == used


def test_values_that_change_nothing_are_silent():
    content = {
        "do_sample": False,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "typical_p": 1.0,
    }
    content |= {"no_repeat_ngram_size": 0, "suppress_tokens": None, "bad_words_ids": [], "max_length": 4096}  # fmt: skip
    content |= transformers.GenerationConfig().to_dict() | {"transformers_version": "4.37.0"}
    assert GenerationDefaults.of(content).notes({}, GENERATE) == []


# ----------------------------------------------------------------------------- what is not supported
@pytest.mark.parametrize("name", [*sorted(UNSUPPORTED), "an_unknown_one"])
def test_what_changes_the_text_is_named(name):
    (note,) = GenerationDefaults.of({name: 3}).notes({}, SERVE)
    assert f"sets {name} 3: xtrain does not support this" in note


def test_every_entry_of_transformers_is_known():
    """A new entry is either taken over, or changes the text, or does not."""
    names = {*vars(transformers.GenerationConfig())}
    assert names <= {*TYPES, *IGNORED, *UNSUPPORTED}, names - {*TYPES, *IGNORED, *UNSUPPORTED}
    assert not {*TYPES} & IGNORED and not {*TYPES} & {*UNSUPPORTED} and not IGNORED & {*UNSUPPORTED}


def test_generate_and_chat_name_it_at_the_start(folder, capsys, monkeypatch):
    content = {"no_repeat_ngram_size": 2, "suppress_tokens": [3, 4], "do_sample": True, "top_k": 1}
    write(folder, **content)
    warned = "sets no_repeat_ngram_size 2, suppress_tokens [3, 4]: xtrain does not support this"
    used = "generation_config.json: temperature 1.0, top_k 1\n"
    code, _, err = run(capsys, "--model", folder, PROMPT, *OPTIONS)
    assert code == 0 and warned in err and used in err and err.count("generation_config") == 2
    monkeypatch.setattr("builtins.input", lambda *_: "/exit")
    assert chat_main(["--model", str(folder), "--device", "cpu"]) == 0
    err = capsys.readouterr().err
    assert warned in err and "generation_config.json: temperature 1.0, top_p 1.0, top_k 1\n" in err


WRONG = [
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"temperature": float("nan")}, "temperature nan: expected 0"),
    ({"temperature": -1}, "temperature -1: expected 0"),
    ({"top_p": 1.5}, "top_p 1.5: expected more than 0"),
    ({"top_p": [0.9]}, r"top_p must be a number, got \[0.9\]"),
    ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
    ({"top_k": -3}, "top_k -3: expected 0"),
    ({"min_p": True}, "min_p must be a number, got True"),
    ({"repetition_penalty": 0}, "repetition_penalty 0: expected more than 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty inf: expected"),
    ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
]


@pytest.mark.parametrize("content, says", WRONG)
def test_a_wrong_value_is_one_sentence(content, says):
    with pytest.raises(UserError, match=f"generation_config.json: {says}.*: correct it$") as caught:
        GenerationDefaults.of(content)
    assert "\n" not in str(caught.value)


def test_a_wrong_value_ends_a_command(folder, capsys):
    write(folder, top_p="x" * 1000 + "\n")
    code, out, err = run(capsys, "--model", folder, PROMPT, *OPTIONS)
    assert code == 2 and out == "" and err.count("\n") == 1 and len(err) < 400
