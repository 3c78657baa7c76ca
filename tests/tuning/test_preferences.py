"""Preferences: losses and gradients against torch, the forms of a record, runs that learn and resume, what is refused."""

import json
import shutil
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
import twins
from checks import rng
from runs import SILENT, assert_same_run, checkpoints, metrics, write_lines
from serving import CHATML, chat_folder, chat_tokenizer

from xtrain.data.chat_template import ChatTemplate
from xtrain.errors import UserError
from xtrain.prefer import main, prefer
from xtrain.tuning.examples import Example
from xtrain.tuning.prefer import PreferConfig, PreferRun, loss_named
from xtrain.tuning.preference_losses import LOSSES, Answers, Losses
from xtrain.tuning.preferences import Preferences, mismatched, read_rows

USER = {"role": "user", "content": "add one"}
GOOD = {"role": "assistant", "content": "x + 1"}
BAD = {"role": "assistant", "content": "return"}
OPTIONS = PreferConfig(
    beta=0.7, label_smoothing=0.1, target_margin=0.3, desirable_weight=1.5, undesirable_weight=0.8
)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("model"), tokenizer, max_seq_len=64)


# ----------------------------------------------------------------------------- losses
def torch_losses(name, now, reference, tokens, desirable, kl, o):
    """The losses of each row, written from the papers, of tensors as in Answers."""
    logsigmoid, log = torch.nn.functional.logsigmoid, torch.log
    smooth = lambda h: -(1 - o.label_smoothing) * logsigmoid(h) - o.label_smoothing * logsigmoid(-h)
    if name == "kto":
        r = o.beta * (now - reference)[:, 0]
        good = o.desirable_weight * (1 - torch.sigmoid(r - o.beta * kl))
        return torch.where(desirable, good, o.undesirable_weight * (1 - torch.sigmoid(o.beta * kl - r)))  # fmt: skip
    c, r = now.unbind(1)
    log_ratios = c - r - (reference[:, 0] - reference[:, 1])
    if name == "dpo":
        return smooth(o.beta * log_ratios)
    if name == "ipo":
        c, r = ((now - reference) / tokens).unbind(1)
        return (c - r - 1 / (2 * o.beta)) ** 2
    c, r = (now / tokens).unbind(1)
    if name == "simpo":
        return smooth(o.beta * (c - r) - o.target_margin)
    odds = [log(torch.exp(x) / (1 - torch.exp(x))) for x in (c, r)]
    return -c - o.beta * logsigmoid(odds[0] - odds[1])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_slopes_are_those_of_torch_in_float64(name):
    draw = rng(3)
    shape = (5, 1) if name == "kto" else (5, 2)
    tokens = draw.integers(2, 9, shape)
    now, reference = (-tokens * draw.uniform(0.2, 2, shape) for _ in range(2))
    desirable = draw.random(5) < 0.5
    found = LOSSES[name](Answers(now, reference, tokens, desirable, 0.4), OPTIONS)
    x = torch.tensor(now, requires_grad=True)
    want = torch_losses(name, x, *map(torch.tensor, (reference, tokens, desirable)), 0.4, OPTIONS)
    want.sum().backward()
    np.testing.assert_allclose(found.losses, want.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.slopes, x.grad.numpy(), rtol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_finite_far_from_the_reference(name):
    shape = (2, 1) if name == "kto" else (2, 2)
    now = np.array([[0.0, -1e4], [-1e4, 0.0]])[:, : shape[1]]
    zeros, ones = np.zeros(shape), np.ones(shape)
    found = LOSSES[name](Answers(now, zeros, ones, np.array([True, False])), OPTIONS)
    assert np.isfinite(found.losses).all() and np.isfinite(found.slopes).all()


def run_of(name, model, corpus, **options):
    """A PreferRun, without a folder."""
    config = replace(OPTIONS, loss=name, init="none", data=("d",), lr=1e-3, seq_len=24, steps=4)
    config = replace(config, batch=4, micro_batch=2, warmup=0, eval_every=0, **options)
    return PreferRun(config, model, corpus)


def random_corpus(tokenizer, labelled):
    """Eight rows of answers of different lengths."""
    draw, texts = rng(5), []
    for i in range(16):
        ids = draw.integers(0, tokenizer.vocab_size, draw.integers(5, 20)).astype(np.int32)
        texts.append(Example(str(i), ids, np.arange(len(ids)) >= 3))
    desirable = None
    if labelled:
        texts = [x for pair in zip(texts[:8], mismatched(texts[:8], 24)) for x in pair]
        desirable = {"train": draw.random(8) < 0.5, "val": np.ones(8, bool)}
    return Preferences("d", 1, texts, texts, 0, tokenizer, None, desirable=desirable)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_that_of_transformers(tokenizer, name):
    """Loss and gradients of a batch in two micro-batches, after a step has moved the model from its reference."""
    config = twins.small(vocab_size=tokenizer.vocab_size, qk_norm=False)
    model = twins.random_model(config, device="cpu")
    before = twins.twin(model)
    corpus = random_corpus(tokenizer, name == "kto")
    run = run_of(name, model, corpus)
    run.step()
    theirs = twins.twin(model)
    batch = run.loader.order(0)[4:8]  # of the second step

    def scores(twin, k):
        rows = [corpus.train[2 * i + k] for i in batch]
        sums = []
        for x in rows:  # each text alone
            logits = twin(torch.tensor(x.ids[None]).long()).logits[0, :-1]
            found = torch.log_softmax(logits.double(), -1)[range(len(x.ids) - 1), x.ids[1:]]
            sums.append(found[torch.tensor(x.trained[1:])].sum())
        return torch.stack(sums)

    columns = range(1 if name == "kto" else 2)
    now = torch.stack([scores(theirs, k) for k in columns], 1)
    with torch.no_grad():
        reference = torch.stack([scores(before, k) for k in columns], 1)
        kl = torch.zeros(())
        if name == "kto":
            kl = (scores(theirs, 1) - scores(before, 1)).mean().clamp(min=0)
    tokens = torch.tensor([[corpus.train[2 * i + k].trained.sum() for k in columns] for i in batch])
    desirable = torch.tensor(corpus.desirable["train"][batch]) if name == "kto" else None
    want = torch_losses(name, now, reference, tokens, desirable, kl, run.config).mean()
    want.backward()
    run.optimizer.apply = lambda *_: None
    result = run.step()
    assert abs(float(result.loss[0]) - want.item()) < 2e-5
    found = twins.gradients(model)
    for weight, parameter in theirs.named_parameters():
        scale = abs(parameter.grad.numpy()).max()
        np.testing.assert_allclose(
            found[weight], parameter.grad.numpy(), rtol=1e-3, atol=2e-4 * scale
        )


# ----------------------------------------------------------------------------- records
def texts_of(example, tokenizer):
    """What comes before the trained tokens, and these."""
    return tokenizer.decode(example.prompt), tokenizer.decode(example.ids[example.trained])


def test_the_forms_of_a_pair_are_one(tmp_path, tokenizer):
    """The prompt is a text, messages, or what both conversations begin with; its answers are not trained."""
    forms = [
        {"prompt": "add one", "chosen": "x + 1", "rejected": "return"},
        {"prompt": [USER], "chosen": "x + 1", "rejected": [BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "add one", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # UltraFeedback
        {"chosen": [USER, BAD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
    ]
    data = write_lines(tmp_path / "x.jsonl", *forms)
    (plain, _), *talks = read_rows([data], False, tokenizer, ChatTemplate(CHATML, {}))
    ends = "<|endoftext|>", "<|im_end|>"
    asked = "<|im_start|>user\nadd one<|im_end|>\n<|im_start|>assistant\n"
    for pair, prompt, end in (
        (plain, "add one", ends[0]),
        *((pair, asked, ends[1]) for pair, _ in talks[:4]),
        (talks[4][0], f"{asked}return<|im_end|>\n{asked}", ends[1]),
    ):
        found = [texts_of(x, tokenizer) for x in pair]
        assert found == [(prompt, "x + 1" + end), (prompt, "return" + end)]


def test_answers_with_a_label(tmp_path, tokenizer):
    """A pair is two of them. Each gets the answer to another prompt, the same in every run."""
    data = write_lines(
        tmp_path / "x.jsonl",
        {"prompt": "def f", "completion": "(x)", "label": False},
        {"prompt": [USER], "completion": [GOOD], "label": True},
        {"prompt": "add", "chosen": " one", "rejected": " f"},
    )
    rows = list(read_rows([data], True, tokenizer, ChatTemplate(CHATML, {})))
    assert [label for _, label in rows] == [False, True, True, False]
    answers = [x for (x,), _ in rows]
    said = [texts_of(x, tokenizer)[1] for x in answers]
    end = "<|endoftext|>"
    assert said == ["(x)" + end, "x + 1<|im_end|>", " one" + end, " f" + end]
    others = mismatched(answers, 50)
    for x, y in zip(answers, others):
        assert x.prompt.tolist() == y.prompt.tolist()
    other = [texts_of(x, tokenizer)[1] for x in others]
    assert sorted(other) == sorted(said) and all(a != b for a, b in zip(said, other))


OTHER = {"role": "user", "content": "subtract"}


def test_bad_preferences_are_named(tmp_path, tokenizer):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    cases = [
        (False, {"prompt": "a", "chosen": "b"}, 'has no field "rejected": add it$'),
        (False, {"prompt": "a", "completion": "b", "label": True}, "or use --loss kto"),
        (False, pair | {"rejected": "b"}, '"chosen" and "rejected" are the same'),
        (False, pair | {"chosen": " "}, '"chosen" is empty'),
        (False, {"prompt": [USER], "chosen": [GOOD], "rejected": ""}, '"rejected" is empty'),
        (False, pair | {"chosen": 7}, "must be a string, not int"),
        (False, {"chosen": "b", "rejected": "c"}, 'has no field "prompt"'),
        (False, {"chosen": [USER], "rejected": [USER, BAD]}, '"chosen" must be an answer to the prompt'),
        (False, {"chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, "has no prompt that its answers share"),
        (False, {"prompt": [USER], "chosen": [GOOD], "rejected": [OTHER, BAD]}, '"rejected" must be an answer'),
        (False, {"chosen": [GOOD], "rejected": [BAD]}, "has no prompt that its answers share"),
        (True, {"prompt": [USER], "completion": [OTHER, BAD], "label": True}, '"completion" must be an answer'),
        (True, {"prompt": "a", "completion": "b"}, '"label" must be true or false, got None'),
        (True, {"completion": "b", "label": True}, 'has no field "prompt"'),
    ]  # fmt: skip
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    for labelled, record, words in cases:
        data = write_lines(tmp_path / "x.jsonl", pair, record)
        with pytest.raises(UserError, match=rf"x\.jsonl line 2:? .*{words}"):
            list(read_rows([data], labelled, tokenizer, template))
        places = []
        refused = lambda where, error: places.append(where)  # noqa: B023
        assert len(list(read_rows([data], labelled, tokenizer, template, refused))) == 1 + labelled
        assert places == [f"{data} line 2"]


# ----------------------------------------------------------------------------- runs
def pairs(n=24):
    """Conversations, in which the good answer ends in 1."""
    draw = rng(1)
    word = lambda: "".join(draw.choice(list("xf(+"), draw.integers(1, 5)))
    return [
        {"prompt": [USER], "chosen": word() + "1", "rejected": word() + "return"} for _ in range(n)
    ]


def config_of(folder, out, data, **more):
    shape = dict(
        batch=4, steps=6, save_every=3, eval_every=3, lr=3e-3, sample_tokens=4, val_share=0.2
    )
    return PreferConfig(
        init=str(folder), data=(data,), out=str(out), name="run", device="cpu", **(shape | more)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_learns_which_answer_is_preferred(tmp_path, folder, name):
    data = write_lines(tmp_path / "d.jsonl", *pairs())
    run = prefer(config_of(folder, tmp_path, data, loss=name, steps=12, eval_every=12), SILENT)
    lines = metrics(run)
    steps = [m for m in lines if "loss" in m]
    if name == "dpo":
        assert abs(steps[0]["loss"] - np.log(2)) < 1e-5  # the first margin is 0
    (validation,) = [m for m in lines if "val_margin" in m]
    assert validation["val_margin"] > steps[0]["margin"] + 0.1
    assert name == "kto" or validation["val_accuracy"] == 1
    assert "Preferences" in (run / "report.html").read_text()


@pytest.mark.parametrize("more", [{}, {"lora": 4, "loss": "kto"}], ids=["all weights", "adapters"])
def test_a_run_that_stops_resumes_bit_for_bit(tmp_path, folder, more):
    """Also where the model of --init is gone: the checkpoint has the numbers of the reference."""
    data = write_lines(tmp_path / "d.jsonl", *pairs())
    whole = prefer(config_of(folder, tmp_path / "a", data, **more), SILENT)
    source = folder
    if not more:
        source = shutil.copytree(folder, tmp_path / "gone")
    half = prefer(config_of(source, tmp_path / "b", data, stop_at=3, **more), SILENT)
    if not more:
        shutil.rmtree(source)
    assert main(["--out", str(tmp_path / "b"), "--name", "run", "--resume"]) == 0
    assert json.loads((half / "config.json").read_text())["train"]["beta"] == 0.1
    assert_same_run(whole, half)
    state = json.loads((half / "checkpoints/step-000006/state.json").read_text())
    assert ("reference" in state) == (not more)


def test_what_a_resumed_run_may_not_change(tmp_path, folder, capsys):
    data = write_lines(tmp_path / "d.jsonl", *pairs())
    prefer(config_of(folder, tmp_path, data, stop_at=1), SILENT)
    other = write_lines(tmp_path / "other.jsonl", *pairs(30))
    again = ["--out", str(tmp_path), "--name", "run", "--resume"]
    for arguments, words in (
        (["--beta", "0.2"], "beta was 0.1, is 0.2"),
        (["--loss", "ipo"], "loss was dpo, is ipo"),
        (["--data", other, "--allow-change", "data"], "belong to other data"),
    ):
        assert main([*again, *arguments]) == 2
        assert words in capsys.readouterr().err


def test_adapters_that_are_trained_further_are_the_reference(tmp_path, folder):
    """New adapters are switched off for it; those of --init are part of it."""
    data = write_lines(tmp_path / "d.jsonl", *pairs())
    first = prefer(config_of(folder, tmp_path / "a", data, lora=4), SILENT)
    further = config_of(first, tmp_path / "b", data, lora=4, stop_at=1)
    run = prefer(further, SILENT)
    for trained in (first, run):
        assert abs(metrics(trained)[0]["loss"] - np.log(2)) < 1e-5
    assert [m for m in metrics(first) if "margin" in m][-1]["margin"] > 0.05


@pytest.mark.parametrize(
    "own, words",
    [
        (lambda x, options: 1 / 0, r"--loss a_loss:own raised ZeroDivisionError"),
        (lambda x, options: 5, r"returned 5, not Losses: fix the function"),
        (lambda x, options: Losses(x.logprobs, x.logprobs, x.logprobs), r"returned an array of shape \(2, 2\), not \(2,\), as losses"),
        (lambda x, options: Losses([1, 2], [[1], [2, 3]], x.logprobs), r"returned .*, not an array of numbers, as slopes"),
        (lambda x, options: Losses([1, 2], x.logprobs, x.logprobs * np.nan), r"returned numbers that are not finite"),
    ],
)  # fmt: skip
def test_a_bad_loss_is_one_sentence(own, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "a_loss", types.SimpleNamespace(own=own))
    with pytest.raises(UserError, match=words) as caught:
        loss_named("a_loss:own")(Answers(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2))), None)
    assert "\n" not in str(caught.value)


def test_a_loss_of_ones_own(tmp_path, folder, monkeypatch):
    """The one of preference_losses by another name gives the same run."""
    data = write_lines(tmp_path / "d.jsonl", *pairs())
    names = ("dpo", "xtrain.tuning.preference_losses:dpo")
    runs = [
        prefer(config_of(folder, tmp_path / str(i), data, loss=name, stop_at=2), SILENT)
        for i, name in enumerate(names)
    ]
    assert metrics(runs[0]) == metrics(runs[1])


def test_a_loss_may_return_lists_and_change_what_it_gets(monkeypatch):
    def own(x, options):
        x.logprobs[:] = 7
        return Losses([1, 2], [[1, 2], [3, 4]], [[5, 6], [7, 8]])

    monkeypatch.setitem(sys.modules, "a_loss", types.SimpleNamespace(own=own))
    answers = Answers(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))
    found = loss_named("a_loss:own")(answers, None)
    assert found.losses.sum() == 3 and found.slopes.shape == (2, 2)
    assert (answers.logprobs == 1).all()


def test_a_run_is_saved_before_a_loss_ends_it(tmp_path, folder, monkeypatch):
    left = iter(range(2))
    own = lambda x, options: LOSSES["dpo"](x, options) if next(left, None) is not None else 1 / 0
    monkeypatch.setitem(sys.modules, "a_loss", types.SimpleNamespace(own=own))
    data = write_lines(tmp_path / "d.jsonl", *pairs())
    config = config_of(folder, tmp_path, data, loss="a_loss:own", eval_every=0, save_every=0, micro_batch=4)  # fmt: skip
    with pytest.raises(UserError, match="ZeroDivisionError"):
        prefer(config, SILENT)
    assert checkpoints(tmp_path / "run") == ["step-000002"]


def test_what_the_command_refuses(tmp_path, folder, capsys):
    data = write_lines(tmp_path / "d.jsonl", *pairs(4))
    base = ["--init", str(folder), "--data", data, "--device", "cpu", "--out", str(tmp_path / "r")]
    for arguments, words in (
        (["--loss", "ppo"], "--loss ppo is not known: choose dpo, ipo, simpo, orpo, kto, or"),
        (["--loss", "nowhere:loss"], "--loss nowhere:loss: nowhere cannot be imported"),
        (["--beta", "0"], "--beta must be positive, got 0"),
        (["--loss", "ipo", "--label-smoothing", "0.1"], "--label-smoothing is for dpo and simpo"),
        (["--label-smoothing", "0.5"], "at least 0 and below 0.5"),
        (["--seq-len", "4"], "no example is left: 8 left out, the first is"),
        (["--seq-len", "65"], "is longer than the model's max_seq_len 64"),
    ):
        assert main([*base, *arguments]) == 2
        said = capsys.readouterr().err.strip()
        assert words in said and "\n" not in said, said
    assert not (tmp_path / "r").exists()
