"""Fine-tuning: which tokens are trained, rows, refused data, loss and gradients against transformers, resuming."""

import gzip
import importlib
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
import twins
import zstandard
from runs import DEVICE, SILENT, assert_same_run, metrics, write_lines
from serving import CHATML, chat_folder, chat_tokenizer

from xtrain import Transformer
from xtrain.data.chat_template import ChatTemplate
from xtrain.data.records import short_name
from xtrain.data.sources import from_standard_input
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.finetune import finetune, main
from xtrain.formats.texts import load_texts, texts_of
from xtrain.nn.lora import AdaptedTransformer, Lora
from xtrain.reinforcement.prompts import read_prompts
from xtrain.training import out_of_memory
from xtrain.training.single_process import SingleProcess
from xtrain.tuning.examples import Example, read_examples
from xtrain.tuning.finetune import FinetuneConfig, prepare, read_teacher
from xtrain.tuning.rows import packed, rows_of
from xtrain.tuning.templates import NAMED, template_source, with_default_template

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "add one"}, {"role": "assistant", "content": "x + 1"},
    {"role": "user", "content": "more"}, {"role": "assistant", "content": "x + 2"},
]  # fmt: skip
INSIDE = """{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}
{%- for t in messages if t.role == 'tool' and m.tool_calls %}{% set said = t.content %}{{ said }}{% endfor %}{% endfor %}"""
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("model"), tokenizer, max_seq_len=96)


def examples(tmp_path, tokenizer, source, *records, **options):
    template = ChatTemplate(source, {}) if source else None
    files = [write_lines(tmp_path / "x.jsonl", *records)]
    return [x for xs in read_examples(files, tokenizer, template, **options) for x in xs]


def trained(example, tokenizer):
    return tokenizer.decode(example.ids[example.trained])


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["prefixes", "generation"])
def test_only_the_assistant_and_its_end_of_turn_are_trained(tmp_path, tokenizer, source):
    (x,) = examples(tmp_path, tokenizer, source, {"messages": TALK})
    assert tokenizer.decode(x.ids) == ChatTemplate(CHATML, {}).render(TALK, False)
    assert trained(x, tokenizer) == "x + 1<|im_end|>x + 2<|im_end|>"
    assert (
        tokenizer.decode(x.prompt) == "<|im_start|>user\nadd one<|im_end|>\n<|im_start|>assistant\n"
    )


QWEN = (  # it writes a system message where there is none
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
COLON = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("source", [CHATML, QWEN, COLON, MARKED])
def test_a_conversation_that_begins_with_the_assistant(tmp_path, tokenizer, source):
    """Neither the role nor a system message of the template is trained."""
    (x,) = examples(tmp_path, tokenizer, source, {"messages": TALK[1:]})
    assert tokenizer.decode(x.ids) == ChatTemplate(source, {}).render(TALK[1:], False)
    said = ["x + 1<|im_end|>", "x + 2<|im_end|>"]
    if source == COLON:  # its generation prompt is empty, so the model says its role, too
        said = ["assistant: " + text for text in said]
    assert trained(x, tokenizer) == "".join(said)


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_a_message_without_weight_is_not_trained(tmp_path, tokenizer, source):
    weighted = [m | {"weight": 0} if i == 1 else m | {"weight": 1} for i, m in enumerate(TALK)]
    (x,) = examples(tmp_path, tokenizer, source, {"messages": weighted})
    (plain,) = examples(tmp_path, tokenizer, source, {"messages": TALK})
    assert x.ids.tolist() == plain.ids.tolist()
    assert trained(x, tokenizer) == "x + 2<|im_end|>"
    nothing = {"messages": [m | {"weight": 0} for m in TALK]}
    one_block = "{% generation %}{{ messages | length }}{% endgeneration %}"
    wrong = {"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}
    for template, record, words in (
        (source, nothing, "has no message of the assistant"),
        (source, wrong, "message 2 has the weight 0.5: give 0"),
        (one_block, {"messages": weighted}, "does not say whose each generation block is"),
    ):
        with pytest.raises(UserError, match=words):
            examples(tmp_path, tokenizer, template, record)


def test_white_space_at_the_end_of_an_answer_is_trained(tmp_path, tokenizer):
    """Also if the post-processor cuts it off the tokens' places, as that of GPT-2 and Qwen does."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._json().decode())
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    says = {"messages": [{"role": "assistant", "content": "x \n\n    "}, TALK[0]]}
    for trimming in (tokenizer, Tokenizer(backend)):
        (x,) = examples(tmp_path, trimming, source, says)
        assert x.trained.all() and trained(x, trimming) == "x \n\n    add one"


def test_tools_have_their_own_template(tmp_path, tokenizer):
    template = ChatTemplate({"default": CHATML, "tool_use": "{{ tools }}" + MARKED}, {})
    data = write_lines(tmp_path / "x.jsonl", {"messages": TALK[:2], "tools": ["f"]}, {"messages": TALK[:2]})  # fmt: skip
    (used,), (plain,) = read_examples([data], tokenizer, template)
    assert tokenizer.decode(used.ids) == "['f']" + tokenizer.decode(plain.ids)
    assert trained(used, tokenizer) == trained(plain, tokenizer) == "x + 1<|im_end|>"
    (prompt, _) = read_prompts([data], tokenizer, template)
    assert tokenizer.decode(prompt.ids).startswith("['f']<|im_start|>user")


def test_completions_and_text(tmp_path, tokenizer):
    records = {"prompt": "def f", "completion": "(x)"}, {"text": "def f(x)"}
    pair, text = examples(tmp_path, tokenizer, None, *records)
    assert trained(pair, tokenizer) == "(x)<|endoftext|>"
    assert tokenizer.decode(pair.prompt) == "def f"
    assert text.trained.tolist() == [False] + [True] * (len(text.ids) - 1)
    assert tokenizer.decode(text.ids) == "def f(x)<|endoftext|>"


def test_null_fields_are_none(tmp_path, tokenizer):
    """As tables with a column for every kind of record write them."""
    pair = {"messages": None, "prompt": "def f", "completion": "(x)", "text": None}
    found = examples(tmp_path, tokenizer, None, pair, {"prompt": None, "text": "def f"})
    want = examples(
        tmp_path, tokenizer, None, {"prompt": "def f", "completion": "(x)"}, {"text": "def f"}
    )
    for a, b in zip(found, want, strict=True):
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.trained, b.trained)


def test_bad_data_is_named(tmp_path, tokenizer):
    user = TALK[0]
    says = lambda role, content: {"messages": [user, {"role": role, "content": content}]}
    refusing = "{{ raise_exception('roles must alternate') }}"
    cases = [
        (CHATML, says("robot", "x"), "message 2 has the role 'robot': choose one of system"),
        (CHATML, says("assistant", " "), '"content" of message 2 .assistant. is empty'),
        (CHATML, says("assistant", None), 'message 2 has no "content"'),
        (CHATML, says("assistant", 7), "must be a string, not int"),
        (CHATML, {"messages": [user, {"role": "assistant"}]}, 'message 2 has no "content"'),
        (CHATML, {"messages": [user]}, "has no message of the assistant"),
        (CHATML, {"messages": []}, "must be a list of messages"),
        (CHATML, {"messages": ["x"]}, 'message 1 needs "role"'),
        (CHATML, {"conversations": []}, "must be a list of messages"),
        (CHATML, {"body": "x"}, 'has neither "messages" nor'),
        (None, {"messages": TALK}, "has no chat template"),
        (None, {"prompt": "x"}, 'has no field "completion"'),
        (None, {"text": ""}, '"text" is empty'),
        ("{{ messages[0].content }}", {"messages": TALK}, "where message 2 is in the text is unknown"),
        (CHATML, {"messages": [user, CALLS]}, "leaves out the call of f in message 2"),
        (MARKED, {"messages": [user, CALLS]}, "leaves out the call of f in message 2"),
        (CHATML.replace("im_end", "endoftext"), {"messages": [user, CALLS]}, "leaves out the call of f in message 2"),
        (INSIDE, {"messages": [user, CALLS, {"role": "tool", "content": "7"}]}, "writes message 3 .tool. inside another"),
        ("{% macro f() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ 'ab' ~ f() }}", {"messages": TALK}, "move it out of its macro"),
        (refusing, {"messages": TALK}, "rejects this conversation: roles must alternate"),
        ("{{ messages[0].content }}{% generation %}{% endgeneration %}", {"messages": TALK}, "renders nothing"),
    ]  # fmt: skip
    for source, record, words in cases:
        with pytest.raises(UserError, match=rf"x\.jsonl line 2:? .*{words}") as caught:
            examples(tmp_path, tokenizer, source, {"text": "fine"}, record)
        assert "\n" not in str(caught.value)


def test_every_token_is_packed_once_in_a_reproducible_order():
    rng = np.random.default_rng(0)
    xs = [
        Example(str(i), rng.integers(1, 50, n).astype(np.int32), rng.random(n) < 0.5)
        for i, n in enumerate(rng.integers(2, 18, 40))
    ]
    lengths = [len(x.ids) - 1 for x in xs]
    groups = packed(lengths, 17, seed=3)
    assert groups == packed(lengths, 17, seed=3) != packed(lengths, 17, seed=4)
    assert sorted(i for group in groups for i in group) == list(range(len(xs)))
    assert len(groups) < len(xs) and len(groups) >= sum(lengths) / 17
    ids, targets, starts = rows_of([[xs[i] for i in group] for group in groups], 17)
    for row, group in enumerate(groups):
        at = 0
        for x in (xs[i] for i in group):
            end = at + len(x.ids) - 1
            assert (ids[row, at:end] == x.ids[:-1]).all() and (starts[row, at:end] == at).all()
            assert (targets[row, at:end] == np.where(x.trained[1:], x.ids[1:], -100)).all()
            at = end
        assert (targets[row, at:] == -100).all() and (starts[row, at:] == at).all()


def test_loss_and_gradients_are_those_of_transformers(tmp_path, tokenizer):
    config = twins.small(vocab_size=tokenizer.vocab_size, max_seq_len=96, qk_norm=False)
    model = twins.random_model(config, device="cpu")
    xs = examples(
        tmp_path, tokenizer, CHATML, {"messages": TALK}, {"messages": TALK[:2]}, {"text": "def"}
    )
    ids, targets, _ = rows_of([[x] for x in xs], 64)
    loss = model.loss(ids, targets)
    loss.backward()
    theirs = twins.empty_twin(config)
    ours = {name: torch.tensor(w) for name, w in twins.weights(model).items()}
    theirs.load_state_dict(ours)
    labels = np.concatenate([np.full((len(ids), 1), -100), targets], axis=1)  # they shift by one
    longer = np.concatenate([ids, np.zeros((len(ids), 1), ids.dtype)], axis=1)
    want = theirs(torch.tensor(longer).long(), labels=torch.tensor(labels).long()).loss
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-5
    found = twins.gradients(model)
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def config_of(folder, out, data, **more):
    shape = dict(batch=3, steps=6, save_every=3, eval_every=3, lr=1e-3, sample_tokens=4)
    return FinetuneConfig(
        init=str(folder), data=(data,), out=str(out), name="run", device="cpu", **(shape | more)
    )


def test_a_run_learns_and_resumes_bit_for_bit(tmp_path, folder):
    records = [{"messages": TALK[:2]}, {"messages": TALK}, {"prompt": "def f", "completion": "(x)"}]
    data = write_lines(tmp_path / "d.jsonl", *records * 4, {"text": "x + 1" * 200})
    whole = finetune(config_of(folder, tmp_path / "a", data), SILENT)
    gone = shutil.copytree(folder, tmp_path / "gone")
    half = config_of(gone, tmp_path / "b", data)
    stopped = finetune(FinetuneConfig(**{**vars(half), "stop_at": 3}), SILENT)
    arguments = ["--out", str(tmp_path / "b"), "--name", "run", "--resume"]
    assert main([*arguments, "--stop-at", "4"]) == 0, "the name is enough"
    shutil.rmtree(gone)
    assert main([*arguments, "--init", str(folder), "--data", data]) == 2, "another model"
    assert main([*arguments, "--init", str(gone), "--data", data]) == 0
    assert_same_run(whole, stopped)
    losses = [m["val_loss"] for m in metrics(whole) if "val_loss" in m]
    assert losses[-1] < losses[0]
    last = whole / "checkpoints" / "step-000006"
    assert (last / "chat_template.jinja").read_text() == CHATML and (
        whole / "report.html"
    ).is_file()
    im_end = Tokenizer.load(last).encode("<|im_end|>")[0]
    assert load_texts(last).stop == {Tokenizer.load(last).eot_id, im_end}
    assert "<|im_start|>user\nadd one<|im_end|>" in (whole / "samples.txt").read_text()
    stored = json.loads((whole / "config.json").read_text())
    assert stored["train"]["seq_len"] == 64 and stored["data"]["skipped"] == 1


def test_intervals():
    default = FinetuneConfig().intervals(30)
    assert default == dict(eval_every=3, sample_every=30, save_every=10)
    for name in default:
        assert FinetuneConfig(**{name: 0}).intervals(30) == default | {name: 0}


def test_more_epochs_are_more_steps(tmp_path, folder, capsys):
    """Also where the number is the option's default; and a run that does not exist is told first."""
    data = write_lines(tmp_path / "d.jsonl", *[{"text": "x + 1"}] * 5)
    finetune(config_of(folder, tmp_path, data, steps=None, epochs=1, batch=2), SILENT)
    arguments = ["--out", str(tmp_path), "--name", "run", "--resume", "--epochs", "3"]
    assert main(arguments) == 2
    assert "steps was 2, is 6: " in capsys.readouterr().err
    assert main([*arguments, "--allow-change", "steps"]) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 6
    assert main(["--out", str(tmp_path), "--name", "other", "--resume"]) == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err


def test_a_packed_run_is_the_run_that_is_not(tmp_path, folder):
    """With all examples in every batch, the rows make no difference; stopped and resumed none to the last bit."""
    records = [{"messages": TALK[:2]}, {"messages": TALK}, {"prompt": "def f", "completion": "(x)"}]
    data = write_lines(tmp_path / "d.jsonl", *records * 5, records[0])
    val = write_lines(tmp_path / "v.jsonl", *records)
    made = lambda name, **more: config_of(
        folder, tmp_path / name, data, val_data=(val,), seq_len=96, **more
    )
    rows = lambda run: json.loads((run / "config.json").read_text())["train"]["batch"]
    alone = finetune(made("alone", batch=None), SILENT)
    whole = finetune(made("whole", pack=True, batch=None), SILENT)
    assert rows(whole) < rows(alone) == 16
    losses = lambda run: [m[k] for m in metrics(run) for k in ("loss", "val_loss") if k in m]
    assert losses(alone) == pytest.approx(losses(whole), rel=2e-5)
    half = finetune(made("half", pack=True, batch=None, stop_at=3), SILENT)
    finetune(made("half", pack=True, batch=None, resume=True), SILENT)
    assert_same_run(whole, half)
    with pytest.raises(UserError, match="pack was True"):
        finetune(made("half", batch=None, resume=True), SILENT)


def test_packed_files_globs_a_key_and_standard_input(tmp_path, tokenizer, monkeypatch):
    """They are the examples of plain files."""
    records = [{"body": f"x + {i}"} for i in range(4)]
    plain = write_lines(tmp_path / "d.jsonl", *[{"text": r["body"]} for r in records])
    expected = [x.ids.tolist() for (x,) in read_examples([plain], tokenizer, None)]
    lines = [(json.dumps(r) + "\n").encode() for r in records]
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:2])))
    (tmp_path / "2.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[2:])))
    found = read_examples([str(tmp_path / "*.jsonl.*"), tmp_path / "1.jsonl.gz"], tokenizer, None, "body")  # fmt: skip
    assert [x.ids.tolist() for (x,) in found] == expected and len(expected) == 4
    copied = from_standard_input(["-"], tmp_path / "cache", io.BytesIO(b"".join(lines)))
    assert [x.ids.tolist() for (x,) in read_examples(copied, tokenizer, None, "body")] == expected
    with pytest.raises(
        UserError, match=r"1\.jsonl\.gz line 1 has neither .* nor \"text\".* --text-key"
    ):
        list(read_examples([tmp_path / "1.jsonl.gz"], tokenizer, None))
    (tmp_path / "1.jsonl.gz").write_bytes((tmp_path / "1.jsonl.gz").read_bytes()[:-4])
    with pytest.raises(UserError, match=r"1\.jsonl\.gz is cut off"):
        list(read_examples([tmp_path / "1.jsonl.gz"], tokenizer, None, "body"))


def test_what_the_command_refuses(tmp_path, folder, capsys):
    data = write_lines(tmp_path / "d.jsonl", *[{"text": "x + 1" * 200}] * 2, *[{"text": "x"}] * 2)
    long = write_lines(tmp_path / "long.jsonl", {"text": "x + 1" * 200})
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{')
    deep = '{"text": "x", "y": ' + "[" * 10**5 + "]" * 10**5 + "}"
    (tmp_path / "deep.jsonl").write_text('{"text": "x", "y": ' + "1" * 10_000 + "}\n" + deep)
    base = ["--device", "cpu", "--out", str(tmp_path / "runs")]
    model = ["--init", str(folder), *base]
    for arguments, words in (
        (["--data", data, *base], "give its folder with --init"),
        (model, "give .jsonl files with --data"),
        ([*model, "--data", str(tmp_path / "none.jsonl")], "none.jsonl does not exist"),
        ([*model, "--data", str(tmp_path / "bad.jsonl")], "bad.jsonl line 2 is not a JSON object"),
        ([*model, "--data", str(tmp_path / "deep.jsonl")], "line 2: it is nested too deeply: fix"),
        ([*model, "--data", data, "--too-long", "error"], "d.jsonl line 1 has "),
        ([*model, "--data", long], "no example is left: 1 left out, the first is"),
        ([*model, "--data", data, "--seq-len", "97"], "is longer than the model's max_seq_len 96"),
        ([*model, "--data", data, "--val-share", "1"], "--val-share must be between"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        said = capsys.readouterr().err.strip()
        assert words in said and "\n" not in said, said
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(DEVICE == "gpu", reason="on a GPU the allocation fails")
@pytest.mark.parametrize("more", [[], ["--lora", "4"], ["--pack"]], ids=str)
def test_a_run_that_cannot_fit_is_refused(tmp_path, folder, monkeypatch, capsys, more):
    data = write_lines(tmp_path / "d.jsonl", *[{"text": "x + 1"}] * 30)
    monkeypatch.setattr(out_of_memory, "free_memory", lambda: 1 << 20)
    given = ["--init", str(folder), "--data", data, "--out", str(tmp_path / "runs")]
    assert main([*given, *more]) == 2
    said = capsys.readouterr().err
    assert "xtrain.finetune: a run with steps of " in said and "--micro-batch 1 " in said


# ----------------------------------------------------------------------------- a model without a chat template
def test_a_model_without_a_template_gets_one(tmp_path, capsys):
    """The README's line: the run's own tokenizer has one special token."""
    base = tmp_path / "base"
    plain = Tokenizer.train(["def f(x):\n    return x + 1\n" * 50], 290)
    config = twins.small(vocab_size=plain.vocab_size, max_seq_len=96)
    twins.random_model(config, device="cpu").save_pretrained(base, plain)
    talks = [{"messages": TALK}] * 4
    line = ["--init", str(base), "--data", write_lines(tmp_path / "chats.jsonl", *talks)]
    line += ["--steps", "2", "--batch", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert main(line) == 0
    printed = capsys.readouterr()
    assert r"'user\n...<|endoftext|>\nassistant\n'" in printed.err
    assert f"python -m xtrain.chat --model {tmp_path / 'finetune'}" in printed.out
    last = tmp_path / "finetune/checkpoints/step-000002"
    theirs = transformers.AutoTokenizer.from_pretrained(last)
    want = "user\nadd one<|endoftext|>\nassistant\nx + 1<|endoftext|>\n"
    want += "user\nmore<|endoftext|>\nassistant\nx + 2<|endoftext|>\n"
    assert theirs.apply_chat_template(TALK, tokenize=False) == want
    assert ChatTemplate.load(last).render(TALK, False) == want
    (x,) = examples(tmp_path, plain, ChatTemplate.load(last).source(), talks[0])
    assert trained(x, plain) == "x + 1<|endoftext|>x + 2<|endoftext|>"
    assert (
        main(["--resume", "--steps", "3", "--allow-change", "steps", "--out", str(tmp_path)]) == 0
    )
    assert "chat template" not in capsys.readouterr().err  # it is the run's own now
    pairs = write_lines(tmp_path / "pairs.jsonl", *[{"prompt": "def", "completion": " f"}] * 4)
    line = ["--name", "pairs", *line[:2], "--data", pairs, *line[4:]]
    assert main(line) == 0  # nothing was said about a template
    assert ChatTemplate.load(tmp_path / "pairs/checkpoints/step-000002") is None


def test_the_default_template_is_chatml_if_the_tokenizer_has_its_tokens(tokenizer):
    texts = with_default_template(texts_of(Path(), tokenizer, frozenset()))
    assert texts.template.render(TALK) == ChatTemplate(CHATML, {}).render(TALK)
    with pytest.raises(UserError, match="the template chatml has no tools"):
        texts.template.render(TALK, tools=[{"type": "function"}])
    assert texts.tokenizer.sha256 == tokenizer.sha256
    assert texts.chat_stop > {tokenizer.eos_token_id}  # and the end of a turn


# ----------------------------------------------------------------------------- options of the data
def corpus_of(folder, *data, **options):
    """Return what a run of a folder reads, and its options."""
    config = FinetuneConfig(init=str(folder), data=data, device="cpu", **options)
    return prepare(config, SingleProcess())


def texts_of_corpus(examples, tokenizer):
    return sorted(tokenizer.decode(x.ids).removesuffix("<|endoftext|>") for x in examples)


def test_files_are_mixed_with_weights(tmp_path, tokenizer, folder):
    """Copies are made of what is trained on, after the choice of what is held out."""
    a = write_lines(tmp_path / "a.jsonl", *[{"text": f"a{i}"} for i in range(6)])
    b = write_lines(tmp_path / "b.jsonl", *[{"text": f"b{i}"} for i in range(40)])
    config, corpus = corpus_of(folder, a, b, mix=(3, 0.5), val_share=0.25)
    _, plain = corpus_of(folder, a, b, val_share=0.25)
    held = texts_of_corpus(corpus.val, tokenizer)
    assert held == texts_of_corpus(plain.val, tokenizer)
    found = texts_of_corpus(corpus.train, tokenizer)
    kept = texts_of_corpus(plain.train, tokenizer)
    assert not set(found) & set(held)
    assert [x for x in found if x[0] == "a"] == sorted([x for x in kept if x[0] == "a"] * 3)
    chosen = [x for x in found if x[0] == "b"]
    assert len(chosen) == len(set(chosen)) and 8 < len(chosen) < 24
    assert config.steps == -(-3 * len(found) // 16)
    for options, words in (
        (dict(mix=(1,)), "--mix has 1 weights for 2 paths"),
        (dict(mix=(1, -1)), "--mix must be numbers from 0"),
        (dict(mix=(0, 0)), "--mix leaves nothing to train on"),
        (dict(show=-1), "--show must be"),
    ):
        with pytest.raises(UserError, match=words):
            corpus_of(folder, a, b, **options)


def test_what_is_left_out_is_counted_by_reason(tmp_path, folder, capsys):
    records = [{"messages": TALK}] * 3 + [{"messages": TALK[:1]}] * 2 + [{"text": "x + 1" * 200}]
    data = write_lines(tmp_path / "d.jsonl", *records, {"text": "x"})
    with pytest.raises(UserError, match="line 4 has no message of the assistant"):
        corpus_of(folder, data)
    _, corpus = corpus_of(folder, data, bad_records="skip")
    assert corpus.skipped == 3
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"xtrain.finetune: 3 examples and 1 held out, of 2 to \d\d tokens \(median \d\d\), \d\d% of "
        "them trained",
        said[0],
    )
    assert "2 left out, the first is" in said[1] and "line 4: has no message of the" in said[1]
    assert "1 left out, the first is" in said[2] and "line 6: it is longer than 96 to" in said[2]
    late = {"prompt": "x + 1" * 200, "completion": "x"}
    _, corpus = corpus_of(folder, write_lines(tmp_path / "e.jsonl", late, *records[:2]), too_long="cut")  # fmt: skip
    assert corpus.reasons == [
        f"1 left out, the first is {tmp_path / 'e.jsonl'} line 1: nothing of its first 96 tokens is "
        "trained: give a larger --seq-len"
    ]


def test_reasoning_that_the_template_leaves_out_is_reported(tmp_path, folder):
    forgets = tmp_path / "t.jinja"
    forgets.write_text(CHATML.replace("m.content +", "m.content.split('</think>')[-1] +"))
    talk = [TALK[0], {"role": "assistant", "content": "<think>ab</think>x"}]
    data = write_lines(tmp_path / "d.jsonl", *[{"messages": talk}] * 2, {"messages": TALK})
    _, corpus = corpus_of(folder, data, chat_template=str(forgets))
    assert ["the reasoning of 2 answers" in x for x in corpus.reasons] == [True]
    assert not corpus_of(folder, data)[1].reasons


def test_examples_are_shown(tmp_path, folder, capsys):
    data = write_lines(tmp_path / "d.jsonl", *[{"messages": TALK}] * 3)
    line = ["--init", str(folder), "--data", data, "--out", str(tmp_path / "runs"), "--show", "2"]
    assert main([*line, "--train-answers", "last"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("assistant\nx + 1<|im_end|>") == 2
    assert shown.count("assistant\n⟦x + 2<|im_end|>⟧") == 2 and "d.jsonl line " in shown
    assert not (tmp_path / "runs").exists()


def test_tables_are_read(tmp_path, tokenizer):
    """Parquet, and what save_to_disk of `datasets` writes: a folder with .arrow files."""
    pyarrow = pytest.importorskip("pyarrow")
    records = [{"messages": TALK}, {"messages": TALK[:2]}]
    want = [x.ids.tolist() for x in examples(tmp_path, tokenizer, CHATML, *records)]
    with_nulls = [{"messages": [m | {"tool_calls": None} for m in r["messages"]]} for r in records]
    table = pyarrow.Table.from_pylist(with_nulls)
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "t.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    with pyarrow.ipc.new_stream(saved / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (saved / "dataset_info.json").write_text("{}")
    for path in (tmp_path / "t.parquet", saved):
        found = read_examples([path], tokenizer, ChatTemplate(CHATML, {}))
        assert [x.ids.tolist() for (x,) in found] == want
    for split in ("train", "test"):
        shutil.copytree(saved, tmp_path / "both" / split)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(list(read_examples([tmp_path / "both"], tokenizer, ChatTemplate(CHATML, {})))) == 2
    assert short_name([tmp_path / "both"]) == "both (split train, not test)"
    with pytest.raises(UserError, match=r"t\.parquet row 1: the model's folder has no chat templ"):
        list(read_examples([tmp_path / "t.parquet"], tokenizer, None))


# ----------------------------------------------------------------------------- templates by name
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
GEMMA = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content + '\n\n' %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.s + m.content | trim + '<end_of_turn>\n' }}"
    "{% set ns.s = '' %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
R1 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "name, source", [("chatml", CHATML), ("llama3", LLAMA3), ("phi3", PHI3), ("gemma", GEMMA), ("deepseek-r1", R1)]
)  # fmt: skip
def test_templates_by_name(tokenizer, name, source):
    """They write what the published ones write, which the comparison here repeats in short."""
    with pytest.raises(UserError, match=rf"no token .*, which the chat template {name} needs"):
        template_source(name, Tokenizer.train(["a"], 257))
    backend = tokenizers.Tokenizer.from_str(tokenizer._json().decode())
    backend.add_special_tokens(re.findall(r"<[^<>\s']+>", NAMED[name].text.replace("ROLE", "")))
    ours = ChatTemplate(template_source(name, Tokenizer(backend)), {})
    theirs = ChatTemplate(source, {})
    talk = [{"role": "system", "content": "s"}, *TALK[:3], {"role": "assistant", "content": " x "}]
    for messages in (TALK, talk, talk[:2]):
        for prompt in (False, True):
            assert ours.render(messages, prompt) == theirs.render(messages, prompt)
    answer = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    assert "<think>\nr\n</think>\n\nx" in ours.render([TALK[0], answer], False)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}
    for messages, tools in ((TALK, [{}]), ([TALK[0], call], None)):
        with pytest.raises(UserError, match=f"the template {name} has no tools"):
            ours.render(messages, tools=tools)


def test_a_chosen_template_is_saved_with_the_run(tmp_path, folder, capsys):
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates/tool_use.jinja").write_text("old")
    data = write_lines(tmp_path / "d.jsonl", *[{"messages": TALK}] * 3)
    _, corpus = corpus_of(folder, data, chat_template="plain")
    corpus.tokenizer.save(tmp_path / "saved")
    shutil.rmtree(folder / "additional_chat_templates")
    saved = ChatTemplate.load(tmp_path / "saved")
    assert saved.render(TALK[:1], tools=None) == "user\nadd one<|endoftext|>\nassistant\n"
    with pytest.raises(UserError, match="the template plain has no tools"):
        saved.render(TALK, tools=[{}])
    with pytest.raises(
        UserError, match=r"--chat-template llama is not a file .* one of chatml, llama3"
    ):
        corpus_of(folder, data, chat_template="llama")
    with pytest.raises(UserError, match=r"line 1: .*'x'.* does not read this value"):
        corpus_of(folder, data, chat_template_kwargs='{"x": 1}')


def test_a_model_of_ones_own_learns_roles(tmp_path, capsys):
    """chatml adds its tokens to the vocabulary; their rows are new, trained and saved, and a run resumes with the same bits."""
    base = tmp_path / "base"
    plain = Tokenizer.train(["def f(x):\n    return x + 1\n" * 50], 290)
    model = twins.random_model(
        twins.small(vocab_size=plain.vocab_size, max_seq_len=96, tie_embeddings=False),
        device="cpu",
    )
    model.save_pretrained(base, plain)
    data = write_lines(tmp_path / "d.jsonl", *[{"messages": TALK}] * 6)
    config = config_of(base, tmp_path / "a", data, steps=4, save_every=2, chat_template="chatml")
    whole = finetune(config, SILENT)
    half = config_of(base, tmp_path / "b", data, steps=4, save_every=2, chat_template="chatml")
    stopped = finetune(FinetuneConfig(**{**vars(half), "stop_at": 2}), SILENT)
    assert main(["--out", str(tmp_path / "b"), "--name", "run", "--resume"]) == 0
    assert_same_run(whole, stopped)
    last = whole / "checkpoints/step-000004"
    texts = load_texts(last)
    new = [plain.vocab_size, plain.vocab_size + 1]
    assert [texts.tokenizer.encode(x) for x in ("<|im_start|>", "<|im_end|>")] == [[x] for x in new]
    assert new[1] in texts.stop
    theirs = transformers.AutoModelForCausalLM.from_pretrained(last)
    assert theirs.config.vocab_size == plain.vocab_size + 2
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        before = twins.weights(model)[name]
        after = dict(theirs.named_parameters())[name].detach().numpy()
        assert len(after) == len(before) + 2
        moved = np.abs(after[-2:] - before.mean(0)).max(1)
        assert (moved > 2e-3).all() and not np.array_equal(after[-1], after[-2])
    ids = transformers.AutoTokenizer.from_pretrained(last).apply_chat_template(TALK)["input_ids"]
    assert ids == texts.tokenizer.encode(texts.template.render(TALK, False))
    given = ["--init", str(base), "--data", data, "--out", str(tmp_path / "c")]
    for more, words in (
        (["--lora", "4", "--chat-template", "chatml"], "adds tokens to the vocabulary, whose emb"),
        (["--chat-template", "llama3"], "no token <|start_header_id|>, which the chat template"),
    ):
        assert main([*given, *more]) == 2
        assert words in capsys.readouterr().err


# ----------------------------------------------------------------------------- distillation
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_student_learns_the_probabilities_of_its_teacher(tmp_path, folder, tokenizer, kind):
    """The first loss is that of transformers; a run that stops resumes bit for bit; the KL falls."""
    config = twins.small(vocab_size=tokenizer.vocab_size, max_seq_len=96, qk_norm=False)
    teacher = twins.random_model(config, seed=3, device="cpu")
    teacher.save_pretrained(tmp_path / "teacher", tokenizer)
    records = [{"messages": TALK[:2]}, {"prompt": "def f", "completion": "(x)"}]
    data = write_lines(tmp_path / "d.jsonl", *records)
    options = dict(teacher=str(tmp_path / "teacher"), teacher_weight=0.8, teacher_kl=kind, batch=2)
    made = lambda name, **more: config_of(
        folder, tmp_path / name, data, val_data=(data,), teacher_top_k=5, **options, **more
    )
    whole = finetune(made("whole"), SILENT)
    half = finetune(made("half", stop_at=3), SILENT)
    finetune(made("half", resume=True), SILENT)
    assert_same_run(whole, half)
    losses = [m["loss"] for m in metrics(whole) if "loss" in m]
    assert losses[-1] < losses[0] - 0.05
    total = count = 0
    for x in examples(tmp_path, tokenizer, CHATML, *records):
        s, t = (
            torch.log_softmax(torch.tensor(m(x.ids[None, :-1]).numpy()[0]).double(), -1)
            for m in (Transformer.from_pretrained(folder), teacher)
        )
        targets = torch.tensor(x.ids[1:]).long()
        ids = t.topk(5).indices
        known = [torch.cat([y.gather(1, ids), torch.log(1 - y.gather(1, ids).exp().sum(1, True))], 1) for y in (s, t)]  # fmt: skip
        p, q = known if kind == "reverse" else known[::-1]
        each = 0.8 * (p.exp() * (p - q)).sum(1) - 0.2 * s.gather(1, targets[:, None])[:, 0]
        counted = torch.tensor(x.trained[1:])
        total, count = total + each[counted].sum().item(), count + int(counted.sum())
    assert losses[0] == pytest.approx(total / count, abs=2e-5)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, folder):
    other = Tokenizer.train(["other text\n" * 50], 275)
    config = twins.small(vocab_size=other.vocab_size, max_seq_len=96)
    twins.random_model(config, device="cpu").save_pretrained(tmp_path / "teacher", other)
    data = write_lines(tmp_path / "d.jsonl", *[{"text": "x + 1"}] * 4)
    with pytest.raises(UserError, match="has another tokenizer than the model"):
        finetune(config_of(folder, tmp_path, data, teacher=str(tmp_path / "teacher")), SILENT)


def test_a_teacher_of_adapters_has_the_tokenizer_of_its_model(tmp_path, folder, tokenizer):
    model = AdaptedTransformer(Transformer.from_pretrained(folder, "cpu").config, trainable=False)
    model.adapt(Lora(2, 4.0, ("q_proj",), str(folder)))
    model.save_pretrained(tmp_path / "teacher")
    config = FinetuneConfig(
        init=str(folder), precision="fp32", seq_len=8, teacher=str(tmp_path / "teacher")
    )
    assert not (tmp_path / "teacher/tokenizer.json").exists()
    assert read_teacher(config, model, tokenizer).config.vocab_size == model.config.vocab_size
