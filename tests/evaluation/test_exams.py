"""Multiple choice, cloze and generation: against log_softmax and `generate` of transformers, and accuracy by hand."""

import math

import numpy as np
import pytest
from evaluating import evaluate, lines, logprobs, results, theirs
from serving import CHATML, TOKENIZER, tokenizer_folder
from tokenizers import AddedToken
from twins import random_model, small

from xtrain import UserError
from xtrain.data.tokenizer import Tokenizer
from xtrain.evaluation import run
from xtrain.evaluation.exams import extracted, normalized
from xtrain.evaluation.scorer import Scorer
from xtrain.evaluation.tasks import Question
from xtrain.serving.pretrained import load

CHOICES = ["return x", "(x):", "größe + x", "  #"]
PROMPTS = ["def f", "return ", "größe", "x +"]


def loglikelihood(model, tokenizer, prompt, continuation):
    """lm-eval's definition. -> (sum of log-probabilities, is it greedy?)"""
    n = len(prompt) - len(prompt.rstrip())
    if n:
        prompt, continuation = prompt[:-n], prompt[-n:] + continuation
    context = tokenizer(prompt).input_ids
    first = len(context)
    ids = context + tokenizer(prompt + continuation).input_ids[first:]
    rows = logprobs(model, ids)[first - 1 :]
    assert len(rows)
    return float(rows[range(len(rows)), ids[first:]].sum()), (rows.argmax(1) == ids[first:]).all()


@pytest.mark.parametrize("around", ["$A </s>", "<s> $A </s>"])
def test_a_tokenizer_that_ends_every_text(tmp_path, capsys, around):
    """A prompt goes on: its end token is not scored, as log_softmax of the plain ids says."""
    special = [AddedToken(name, special=True) for name in ("<s>", "</s>")]
    names = dict(bos_token="<s>", eos_token="</s>")
    folder = tokenizer_folder(tmp_path / "model", added=special, around=around, **names)
    config = small(vocab_size=Tokenizer.load(folder).vocab_size, head_dim=16)
    random_model(config).save_pretrained(folder)
    model, tokenizer = theirs(folder)
    begin = [tokenizer.bos_token_id] * ("<s>" in around)
    row = {"prompt": "def f", "choices": CHOICES, "answer": 1, "delimiter": " "}
    (found,) = results(capsys, tmp_path, folder, lines(tmp_path / "quiz.jsonl", row))
    for choice, got in zip(CHOICES, found["items"][0]["logprobs"], strict=True):
        context, whole = (
            begin + tokenizer(text, add_special_tokens=False).input_ids
            for text in ("def f", f"def f {choice}")
        )
        rows = logprobs(model, whole)[len(context) - 1 :]
        want = rows[range(len(rows)), whole[len(context) :]].sum()
        assert got == pytest.approx(want, abs=2e-4)


def test_choices(folder, tmp_path, capsys):
    model, tokenizer = theirs(folder)
    for delimiter in (" ", "\n"):
        rows = [
            {"prompt": p, "choices": CHOICES, "answer": i, "delimiter": delimiter}
            for i, p in enumerate(PROMPTS)
        ]
        file = lines(tmp_path / "quiz.jsonl", *rows)
        (found,) = results(capsys, tmp_path, folder, file)
        want = [
            [loglikelihood(model, tokenizer, p, delimiter + c)[0] for c in CHOICES] for p in PROMPTS
        ]
        got = [item["logprobs"] for item in found["items"]]
        np.testing.assert_allclose(got, want, atol=2e-4)
        lengths = [8, 4, 9, 3]  # characters, without the delimiter
        acc = [np.argmax(row) == i for i, row in enumerate(want)]
        norm = [np.argmax(np.array(row) / lengths) == i for i, row in enumerate(want)]
        metrics = found["metrics"]
        assert (metrics["acc"]["value"], metrics["acc_norm"]["value"]) == (
            np.mean(acc),
            np.mean(norm),
        )
        assert metrics["acc"]["stderr"] == pytest.approx(np.std(acc, ddof=1) / 2)
        assert found["n"] == 4 and found["kind"] == "choice"
    # The same answers with other right ones: all are right, or none is.
    best = [int(np.argmax(row)) for row in want]
    for shift, value in ((0, 1.0), (1, 0.0)):
        changed = [row | {"answer": (b + shift) % 4} for row, b in zip(rows, best)]
        (found,) = results(capsys, tmp_path, folder, lines(file, *changed))
        assert found["metrics"]["acc"] == {"value": value, "stderr": 0.0}


def test_cloze(folder, tmp_path, capsys):
    model, tokenizer = theirs(folder)
    rows = [{"prompt": p, "continuation": c} for p, c in zip(PROMPTS, CHOICES)]
    for prompt in (
        "x",
        "y",
        "return",
        "größe",
        "日",
    ):  # what the model says greedily, if text can say it
        ids = tokenizer(prompt).input_ids
        ids.append(int(logprobs(model, [*ids, 0])[-1].argmax()))
        said = tokenizer.decode(ids)[len(prompt) :]
        if said.strip() and tokenizer(prompt + said).input_ids == ids:
            rows.append({"prompt": prompt, "continuation": said, "delimiter": ""})
    assert len(rows) > len(PROMPTS)
    file = tmp_path / "cloze.jsonl"
    (found,) = results(capsys, tmp_path, folder, lines(file, *rows))
    want = [
        loglikelihood(model, tokenizer, r["prompt"], r.get("delimiter", " ") + r["continuation"])
        for r in rows
    ]
    np.testing.assert_allclose(
        [item["logprob"] for item in found["items"]], [x for x, _ in want], atol=2e-4
    )
    assert found["metrics"]["acc"]["value"] == np.mean([greedy for _, greedy in want]) > 0
    mean = np.mean([x for x, _ in want])
    assert found["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(-mean), rel=1e-3)


def test_generation(folder, tmp_path, capsys):
    model, tokenizer = theirs(folder)
    said = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
        new = out[0, inputs.input_ids.shape[1] :]
        said.append(tokenizer.decode(new, skip_special_tokens=True))
    assert all(s.strip() for s in said)
    rows = [
        {"prompt": p, "answer": s if i else s + "?"} for i, (p, s) in enumerate(zip(PROMPTS, said))
    ]
    file, short = lines(tmp_path / "q.jsonl", *rows), ["--max-new-tokens", 12]
    (found,) = results(capsys, tmp_path, folder, file, *short)
    assert [item["text"] for item in found["items"]] == said
    assert found["metrics"]["exact_match"]["value"] == 0.75
    # A stop string, and an expression that finds one character.
    stop = said[1][3]
    (found,) = results(capsys, tmp_path, folder, file, *short, "--stop", stop, "--extract", "(.)$")
    for item, text in zip(found["items"], said):
        assert item["text"] == text.split(stop)[0]
        assert item["found"] == (item["text"][-1:] or None)
    (found,) = results(capsys, tmp_path, folder, file, *short, "--limit", 2)
    assert found["n"] == 2


def test_a_chat_model_is_asked(tmp_path, capsys):
    """By messages, or by prompts in its template; choices follow the generation prompt. As transformers renders them."""
    tokens = [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    folder = tokenizer_folder(tmp_path / "model", added=tokens, template=CHATML)
    random_model(small(vocab_size=Tokenizer.load(folder).vocab_size, head_dim=16)).save_pretrained(
        folder
    )
    model, tokenizer = theirs(folder)
    user = {"role": "user", "content": "def f"}
    talk = [{"role": "system", "content": "x"}, user]
    ids = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    asked = ["--max-new-tokens", 8, "--system", "x"]
    chat = lines(tmp_path / "chat.jsonl", {"messages": [user], "answer": said})
    plain = lines(tmp_path / "plain.jsonl", {"prompt": "def f", "answer": said})
    for file, more, kind in (
        (chat, [], "chat"),
        (chat, ["--chat-template", "model"], "chat"),
        (lines(tmp_path / "p.jsonl", {"prompt": [user], "answer": said}), [], "question"),
        (lines(tmp_path / "s.jsonl", {"conversations": [{"from": "human", "value": "def f"}], "answer": said}), [], "chat"),
        (plain, ["--chat-template", "model"], "question"),
        (plain, ["--chat-template", "chatml"], "question"),
    ):  # fmt: skip
        (found,) = results(capsys, tmp_path, folder, file, *asked, *more)
        assert found["kind"] == kind and found["items"][0]["text"] == said
    (found,) = results(capsys, tmp_path, folder, plain, "--max-new-tokens", 8)
    assert found["items"][0]["text"] != said
    row = {"prompt": [user], "choices": CHOICES, "answer": 1}
    file = lines(tmp_path / "quiz.jsonl", row)
    (found,) = results(capsys, tmp_path, folder, file, "--system", "x")
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    want = [loglikelihood(model, tokenizer, text, choice)[0] for choice in CHOICES]
    np.testing.assert_allclose(found["items"][0]["logprobs"], want, atol=2e-4)
    for arguments, words in (
        ([chat, "--shots", 1, "--examples", plain], "of kind question"),
        ([chat, "--shots", 1, "--examples", lines(tmp_path / "c2.jsonl", {"messages": [user], "answer": "x"})],
         "has messages, which --shots cannot be put in front of"),
        ([plain, "--system", "x"], "--system needs records with messages"),
        ([plain, "--chat-template-kwargs", "{}"], "--chat-template-kwargs needs records with messages"),
        ([plain, "--chat-template", "llama"], "--chat-template llama is not a file"),
    ):  # fmt: skip
        code, _, err = evaluate(capsys, folder, *arguments)
        assert code == 2 and words in err


def test_the_last_number_is_the_flexible_match(tmp_path, capsys, folder, monkeypatch):
    said = ["It is 7, so #### 1,042", "I say $1,042.", "It is 1042, not 7.", "none"]
    monkeypatch.setattr(Scorer, "generate", lambda *_: said)
    rows = [{"question": "How many?", "answer": "40\n#### 1,042"}] * 4
    (found,) = results(
        capsys, tmp_path, folder, lines(tmp_path / "t.jsonl", *rows), "--max-new-tokens", 8
    )
    assert [item["exact_match"] for item in found["items"]] == [1, 0, 0, 0]
    assert [item["flexible_match"] for item in found["items"]] == [1, 1, 0, 0]
    assert found["metrics"]["flexible_match"]["value"] == 0.5


def test_extraction_and_comparison():
    gsm = Question(
        where="", prompt="p", answer="a", extract=r"#### (-?[0-9.,]+)", ignore=(",", r"\$", r"\.$")
    )
    assert extracted(gsm, "so\n#### 1,042. or #### 7") == "1,042."
    assert normalized(gsm, "1,042.") == "1042" and extracted(gsm, "42") is None
    plain = Question(where="", prompt="p", answer="a", ignore_case=True)
    assert extracted(plain, " Yes\n") == " Yes\n" and normalized(plain, " Yes\n") == "yes"
    whole = Question(where="", prompt="p", answer="a", extract="[0-9]+")
    assert extracted(whole, "a 12 b 13") == "12"


def test_a_prompt_keeps_its_own_tokens(folder):
    """Also if its last one would be another one together with the continuation."""
    scorer, text, differ = (
        Scorer(load(folder, precision="fp32"), 64),
        "def f(x):\n    return größe",
        0,
    )
    for cut in range(1, len(text)):
        pair = scorer.encode_pair(text[:cut], text[cut:])
        context, whole = TOKENIZER.encode(text[:cut].rstrip()), TOKENIZER.encode(text)
        assert (pair.context, pair.continuation) == (context, whole[len(context) :])
        differ += context != whole[: len(context)]
    assert differ > 3


def test_items_that_do_not_fit(folder, tmp_path, capsys):
    whole, file = "x" + " x" * 63, tmp_path / "x.jsonl"
    assert len(TOKENIZER.encode(whole)) == 64
    good = {"prompt": whole, "choices": ["x", "y"], "answer": 0}  # the last token is only predicted
    assert len(TOKENIZER.encode(whole + " x")) == 65
    assert evaluate(capsys, folder, lines(file, good | {"choices": ["x", "x"]}))[0] == 0
    for changes, want in [
        ({"choices": ["x x", "x"]}, "the prompt and choice 1 have 66 tokens, the context only 64"),
        ({"choices": ["x", "x x"]}, "the prompt and choice 2 have 66 tokens"),
    ]:
        rows = good | {"choices": ["x", "x"]}, good | changes
        code, out, err = evaluate(capsys, folder, lines(file, *rows))
        assert code == 2 and out == "" and f"x.jsonl line 2: {want}" in err
    code, _, err = evaluate(capsys, folder, lines(file, {"prompt": "a", "answer": "b"}))
    assert code == 2 and "line 1: the prompt has 1 tokens and the answer may have 256" in err


def test_a_broken_model(folder, tmp_path):
    """Numbers that are not numbers end the command; none of them is a right or wrong answer."""
    broken = load(folder, precision="fp32")
    dict(broken.model.named_parameters())["model.norm.weight"].data[:] = np.nan
    for row, want in (
        ({"prompt": "a", "continuation": "b"}, "log-probabilities that are not numbers"),
        ({"prompt": "a", "answer": "b"}, "logits that are not numbers"),
    ):
        tasks = (str(lines(tmp_path / "x.jsonl", row)),)
        with pytest.raises(UserError, match=want):
            run.evaluate(run.Options(model="", tasks=tasks, max_new_tokens=4), broken)
