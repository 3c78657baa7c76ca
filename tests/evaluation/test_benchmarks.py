"""The published files of HellaSwag, ARC, MMLU and GSM8K: prompts as in lm-eval, and what is refused."""

import csv

import pytest
from evaluating import evaluate, lines, results
from serving import make_folder

from xtrain import UserError
from xtrain.evaluation.benchmarks import KINDS
from xtrain.evaluation.run import Options, prepared
from xtrain.evaluation.tasks import read_task

HELLASWAG = {
    "ind": 24, "activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he", "split": "val", "split_type": "indomain", "label": 3, "source_id": "x",
    "endings": ["is using wrap [title] to wrap [step] skis.", "is ripping level tiles off.", "holds a cube.", "starts pulling."],
}  # fmt: skip
AI2 = {
    "id": "M1", "answerKey": "C",
    "question": {"stem": "Which?", "choices": [{"text": t, "label": x} for t, x in zip("pqrs", "ABCD")]},
}  # fmt: skip
HUB_ARC = {
    "id": "M1", "question": "Which?", "choices": {"text": ["p", "q", "r"], "label": ["1", "2", "3"]}, "answerKey": "2",
}  # fmt: skip
HUB_MMLU = {
    "question": " Which? ",
    "subject": "college_biology",
    "choices": list("pqrs"),
    "answer": 2,
}
GSM8K = {"question": "How many?", "answer": "40 + 2 = <<40+2=42>>42\n#### 1,042"}
MMLU_TEXT = "Which?\nA. p\nB. q\nC. r\nD. s\nAnswer:"
ABOUT = "The following are multiple choice questions (with answers) about {}.\n\n"


def options(*tasks, **changes):
    return Options(model="none", tasks=tuple(map(str, tasks)), **changes)


def read(path, **changes):
    return prepared(read_task(path, KINDS), options(**changes))


def mmlu(path, *rows):
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def test_hellaswag(tmp_path):
    task = read(lines(tmp_path / "hellaswag_val.jsonl", HELLASWAG, HELLASWAG | {"label": "0"}))
    assert task.kind == "hellaswag" and [x.answer for x in task.items] == [3, 0]
    assert task.items[0].prompt == "Roof shingle removal: A man is sitting on a roof. He"
    assert task.items[0].choices[0] == "is using wrap. to wrap skis."
    assert task.items[0].choices[1:] == tuple(HELLASWAG["endings"][1:])
    for changes, want in [
        ({"label": ""}, "line 1 has no label: the test part"),
        ({"label": 4}, '"label" is 4, but there are 4 choices'),
        ({"endings": ["[step]", "b"]}, "an ending is empty"),
    ]:
        with pytest.raises(UserError, match=want):
            read(lines(tmp_path / "x.jsonl", HELLASWAG | changes))


def test_arc(tmp_path):
    task = read(lines(tmp_path / "ARC-Easy-Test.jsonl", AI2, HUB_ARC))
    assert task.kind == "arc" and [x.answer for x in task.items] == [2, 1]
    assert [x.choices for x in task.items] == [("p", "q", "r", "s"), ("p", "q", "r")]
    assert {x.prompt for x in task.items} == {"Question: Which?\nAnswer:"}
    for row, want in [
        (AI2 | {"answerKey": "E"}, "'E', which is no label of a choice"),
        (HUB_ARC | {"choices": {"text": ["p"], "label": ["1"]}}, '1 in the list "choices"'),
        (HUB_ARC | {"choices": {"text": ["p", "q"], "label": ["1"]}}, "as many labels as choices"),
        (HUB_ARC | {"choices": None}, '0 in the list "choices"'),
        (AI2 | {"question": {"stem": "a", "choices": [1, 2]}}, "must have a text and a label"),
        (HUB_ARC | {"question": 3}, '"question" must be a string'),
    ]:
        with pytest.raises(UserError, match=f"line 1.*{want}"):
            read(lines(tmp_path / "x.jsonl", row))
    without = {name: x for name, x in HUB_ARC.items() if name != "question"}
    with pytest.raises(UserError, match=r'line 2 has no text in "question": add it'):
        read(lines(tmp_path / "x.jsonl", HUB_ARC, without))


def test_mmlu(tmp_path):
    row = ["Which?", *"pqrs", "C"]
    test = mmlu(tmp_path / "test" / "high_school_physics_test.csv", row, ['a,\n"b"', *"pqrs", "A"])
    mmlu(tmp_path / "dev" / "high_school_physics_dev.csv", *([row] * 5))
    task, about = read(test), ABOUT.format("high school physics")
    assert task.kind == "mmlu" and [x.answer for x in task.items] == [2, 0]
    assert task.items[0].prompt == about + MMLU_TEXT
    assert task.items[1].prompt == about + MMLU_TEXT.replace("Which?", 'a,\n"b"')
    assert task.items[0].choices == ("A", "B", "C", "D")
    (first, _) = read(test, shots=2).items
    assert first.prompt == about + 2 * (MMLU_TEXT + " C\n\n") + MMLU_TEXT
    hub = lines(tmp_path / "hub.jsonl", HUB_MMLU, HUB_MMLU | {"subject": "anatomy"})
    assert [x.answer for x in read(hub).items] == [2, 2]
    assert read(hub).items[1].prompt == ABOUT.format("anatomy") + MMLU_TEXT
    # Examples are of the same subject.
    dev = lines(tmp_path / "dev.jsonl", HUB_MMLU | {"question": "Else?"})
    with pytest.raises(UserError, match=r"hub\.jsonl line 2 needs 1 examples"):
        read(hub, shots=1, examples=str(dev))
    mmlu(tmp_path / "header.csv", ["question", *"ABCD", "answer"], row)
    assert len(read(tmp_path / "header.csv").items) == 1
    for bad, want in [
        (["Which?", *"pqrs", "E"], "the answer is 'E': it must be A, B, C or D"),
        (["Which?", *"pqrs", "AB"], "the answer is 'AB'"),
        (["Which?", "p", "", "r", "s", "A"], '"B" is empty'),
    ]:
        with pytest.raises(UserError, match=f"bad.csv line 2.*{want}"):
            read(mmlu(tmp_path / "bad.csv", row, bad))


def test_gsm8k(tmp_path):
    lines(tmp_path / "train.jsonl", GSM8K | {"question": "Which?"})
    test = lines(tmp_path / "test.jsonl", GSM8K)
    (item,) = read(test, shots=1).items
    answer = GSM8K["answer"]
    assert item.prompt == f"Question: Which?\nAnswer: {answer}\n\nQuestion: How many?\nAnswer:"
    assert item.stop == ("Question:", "</s>", "<|im_end|>")
    with pytest.raises(UserError, match='line 1: the answer has no "#### NUMBER"'):
        read(lines(tmp_path / "x.jsonl", GSM8K | {"answer": "42"}))


def test_the_command(tmp_path, capsys, monkeypatch):
    """All of them in one call, and one more line for the files of MMLU together."""
    monkeypatch.delenv("COLUMNS", raising=False)  # a long name stays in one line
    folder = make_folder(tmp_path / "model", max_seq_len=512)
    files = [
        lines(tmp_path / "hellaswag.jsonl", HELLASWAG, HELLASWAG | {"label": 1}),
        lines(tmp_path / "arc.jsonl", AI2, HUB_ARC),
        lines(tmp_path / "gsm8k.jsonl", GSM8K),
        mmlu(tmp_path / "anatomy_test.csv", *[["Which?", *"pqrs", x] for x in "ABC"]),
        mmlu(tmp_path / "virology_test.csv", ["Which?", *"pqrs", "D"]),
    ]
    found = results(capsys, tmp_path, folder, *files, "--max-new-tokens", 8)
    assert [x["kind"] for x in found] == ["hellaswag", "arc", "gsm8k", "mmlu", "mmlu", "mmlu"]
    assert [x["n"] for x in found] == [2, 2, 1, 3, 1, 4]
    right = [item["acc"] for x in found[3:5] for item in x["items"]]
    assert found[5]["metrics"]["acc"]["value"] == sum(right) / 4
    code, out, err = evaluate(capsys, folder, files[3], "--batch-invariant")
    assert code == 0 and len(out.splitlines()) == 3 and "anatomy_test.csv: mmlu" in err
    assert "anatomy_test.csv" in out and "acc_norm" in out
