"""Files of test items: which kind they are, examples in front of prompts, and what is wrong with a line."""

import gzip
import json

import pytest
from evaluating import lines

from xtrain import UserError
from xtrain.evaluate import main
from xtrain.evaluation.benchmarks import KINDS
from xtrain.evaluation.run import Options, evaluate, prepared
from xtrain.evaluation.tasks import Choice, Cloze, Question, read_task

CHOICE = {"prompt": "a", "choices": ["b", "c"], "answer": 1}
CLOZE = {"prompt": "a", "continuation": "b"}
QUESTION = {"prompt": "a", "answer": "b"}


def test_own_formats(tmp_path):
    for row, kind, name in [
        (CHOICE, Choice, "choice"),
        (CLOZE, Cloze, "cloze"),
        (QUESTION, Question, "question"),
    ]:
        file = lines(tmp_path / "x.jsonl", row, row | {"prompt": "z", "delimiter": "\n"}, row)
        file.write_text("\ufeff" + file.read_text() + "\n\n", encoding="utf-8")
        task = read_task(file, KINDS)
        assert task.kind == name and [x.prompt for x in task.items] == ["a", "z", "a"]
        assert all(type(x) is kind for x in task.items)
        assert [x.delimiter for x in task.items] == [" ", "\n", " "]
        assert task.items[1].where == f"{file} line 2"
        assert [x.target for x in task.items] == [{"choice": "c"}.get(name, "b")] * 3
        assert len(read_task(file, KINDS, 2).items) == 2


def test_packed_files(tmp_path):
    """Their kind is that of the file that is packed."""
    plain = lines(tmp_path / "x.jsonl", CHOICE, CHOICE)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a text"))
    (tmp_path / "m.csv.gz").write_bytes(gzip.compress(b"q,1,2,3,4,B\n"))
    prompts = lambda path: [x.prompt for x in read_task(path, KINDS).items]
    assert prompts(tmp_path / "x.jsonl.gz") == prompts(plain) == ["a", "a"]
    assert read_task(tmp_path / "b.txt.gz", KINDS).items[0].text == "a text"
    assert len(read_task(tmp_path / "m.csv.gz", KINDS).items) == 1


def options(*tasks, **changes):
    return Options(model="none", tasks=tuple(map(str, tasks)), **changes)


def test_examples_in_front_of_a_prompt(tmp_path):
    shots = [CHOICE | {"prompt": f"e{i}", "delimiter": ": "} for i in range(3)]
    examples = str(lines(tmp_path / "e.jsonl", *shots))
    task = read_task(lines(tmp_path / "x.jsonl", CHOICE), KINDS)
    (item,) = prepared(task, options(shots=2, examples=examples)).items
    assert item.prompt == "e0: c\n\ne1: c\n\na" and item.choices == ("b", "c")
    for changes, want in [
        (dict(shots=4, examples=examples), "line 1 needs 4 examples, the file of examples has 3"),
        (dict(shots=1), "there are no examples for .*: give --examples FILE"),
        (dict(shots=1, examples=str(task.path)), "would be its own file of examples"),
        (
            dict(shots=1, examples=str(lines(tmp_path / "c.jsonl", CLOZE))),
            "of kind cloze, .* of kind choice",
        ),
    ]:
        with pytest.raises(UserError, match=want):
            prepared(task, options(**changes))


BAD = [
    ({"prompt": "a", "choices": ["b"], "answer": 0}, '1 in the list "choices": give at least 2'),
    ({"prompt": "a", "choices": "bc", "answer": 0}, 'a list of strings in "choices"'),
    ({"prompt": "a", "choices": ["b", ""], "answer": 0}, '"choices" 2 is empty'),
    ({"prompt": "a", "choices": ["b", 3], "answer": 0}, '"choices" 2 must be a string, not int'),
    (CHOICE | {"answer": 2}, '"answer" is 2, but there are 2 choices: give 0 to 1'),
    (CHOICE | {"answer": -1}, '"answer" is -1'),
    (CHOICE | {"answer": True}, '"answer" must be the index of a choice, 0 to 1, not True'),
    (CHOICE | {"answer": "b"}, '"answer" must be the index of a choice'),
    ({"prompt": "a", "choices": ["b", "c"]}, 'no field "answer"'),
    ({"choices": ["b", "c"], "answer": 0}, 'no field "prompt"'),
    (CHOICE | {"prompt": " "}, '"prompt" is empty'),
    (CHOICE | {"prompt": "\ud800"}, '"prompt" has half a surrogate pair'),
    (["a"], "is not a JSON object"),
]


@pytest.mark.parametrize("row, want", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named(tmp_path, row, want):
    with pytest.raises(UserError) as error:
        read_task(lines(tmp_path / "x.jsonl", CHOICE, row), KINDS)
    assert str(error.value).startswith(f"{tmp_path}/x.jsonl line 2") and want in str(error.value)


def test_bad_files(tmp_path, capsys):
    def refused(name, content, *more):
        (tmp_path / name).write_bytes(content)
        code = main(["--model", "none", "--tasks", str(tmp_path / name), *more])
        out, err = capsys.readouterr()
        assert code == 2 and out == "" and err.count("\n") == 1, err
        return err

    assert "x.jsonl has no items" in refused("x.jsonl", b"\n\n")
    assert "line 2 is not UTF-8 (byte 2)" in refused("x.jsonl", b'\n{"\xff')
    assert "line 1 has the fields b, which belong to no known task" in refused(
        "x.jsonl", b'{"b":1}'
    )
    assert "line 1: it is nested too deeply" in refused("x.jsonl", b"[" * 100000)
    assert "x.csv has no items" in refused("x.csv", b"")
    assert "x.csv line 1 has 2 columns: it needs question, A, B" in refused("x.csv", b"a,b\n")
    assert "x.csv line 1 is not valid CSV" in refused("x.csv", b'"a\n')
    assert "x.csv line 2 is not valid CSV" in refused("x.csv", b"q,a,b,c,d,A\nq,\xff,b,c,d,A\n")
    row = (json.dumps(CHOICE) + "\n").encode()
    assert "--shots must be at least 0, got -1" in refused("x.jsonl", row, "--shots", "-1")
    assert "--limit must be at least 1, got 0" in refused("x.jsonl", row, "--limit", "0")
    assert "is not a regular expression" in refused("x.jsonl", row, "--extract", "(")
    assert "--stop text is empty" in refused("x.jsonl", row, "--stop", "")
    assert "--json" in (said := refused("x.jsonl", row, "--json", str(tmp_path)))
    assert "is a folder" in said
    assert "without --shots" in refused("x.jsonl", row, "--examples", "x")
    assert "its folder does not exist" in refused("x.jsonl", row, "--json", f"{tmp_path}/no/x.json")
    for name, want in (("missing.jsonl", "does not exist"), ("", "is a folder")):
        with pytest.raises(UserError, match=want):
            evaluate(options(tmp_path / name))
    with pytest.raises(UserError, match="there is nothing to evaluate"):
        evaluate(options())
