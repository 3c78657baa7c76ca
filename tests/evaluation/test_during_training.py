"""--eval-tasks: the numbers of `xtrain evaluate`, in the record of the run; nothing else of the run changes."""

from pathlib import Path

import pytest
from evaluating import lines, results
from runs import assert_same_run, metrics, run

from xtrain.errors import UserError
from xtrain.evaluation.during_training import names_of
from xtrain.report import record

CHOICES = [
    {"prompt": "The dog", "choices": ["sees a cat.", "xq zj", "the the"], "answer": i % 3}
    for i in range(6)
]
LAST = ("checkpoints", "step-000020")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    quiz = lines(folder / "quiz.jsonl", *CHOICES)
    said = lines(folder / "said.jsonl", {"prompt": "The dog", "answer": "sees"})
    (folder / "book.txt").write_text("The dog sees a cat. The cat sees a dog.\n" * 8)
    return tuple(map(str, (quiz, said, folder / "book.txt")))


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run with tasks, in fp32."""
    return run(tmp_path_factory.mktemp("whole"), eval_tasks=files, eval_tasks_every=5, eval_items=4)


def test_the_numbers_are_those_of_xtrain_evaluate(whole, files, tmp_path, capsys):
    found = [m for m in metrics(whole) if "quiz/acc" in m]
    assert [m["step"] for m in found] == [5, 10, 15, 20]
    new = ["--limit", "4", "--max-new-tokens", "16"]  # half of 32, the context
    expected = {
        f"{Path(r['name']).stem}/{name}": metric["value"]
        for r in results(capsys, tmp_path, whole.joinpath(*LAST), *files, *new)
        for name, metric in r["metrics"].items()
    }
    assert {name.split("/")[0] for name in expected} == {"quiz", "said", "book"}
    assert found[-1] == {"step": 20, **expected}
    assert found[0]["book/perplexity"] > found[-1]["book/perplexity"]


def test_a_resumed_run_has_the_same_record(whole, files, tmp_path):
    more = dict(eval_tasks=files, eval_tasks_every=5, eval_items=4)
    run(tmp_path, stop_at=10, **more)
    assert_same_run(whole, run(tmp_path, resume=True, **more))


def test_the_weights_do_not_depend_on_the_tasks(whole, tmp_path):
    plain = run(tmp_path)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert whole.joinpath(*LAST, name).read_bytes() == plain.joinpath(*LAST, name).read_bytes()


def test_the_report_has_a_chart_per_metric(whole):
    text = (whole / "report.html").read_text()
    assert all(f"Tasks: {name}" in text for name in ("acc", "acc_norm", "perplexity"))
    assert ">quiz<" in text and record.read(whole).last("quiz/acc") is not None


def test_a_bad_file_is_refused_before_the_run_begins(tmp_path):
    bad = lines(tmp_path / "bad.jsonl", CHOICES[0], {**CHOICES[0], "answer": 7})
    with pytest.raises(UserError, match=r"bad\.jsonl line 2"):
        run(tmp_path / "runs", eval_tasks=(str(bad),))
    assert not (tmp_path / "runs" / "run").exists()
    long = lines(tmp_path / "long.jsonl", {**CHOICES[0], "prompt": "The dog sees a cat. " * 40})
    with pytest.raises(UserError, match=r"long\.jsonl line 1.* tokens, the context only 32"):
        run(tmp_path / "runs", eval_tasks=(str(long),))


def test_damaged_numbers_do_not_end_the_training(tmp_path, files, monkeypatch, capsys):
    def fails(self, sequences):
        raise UserError("no numbers")

    monkeypatch.setattr("xtrain.evaluation.scorer.Scorer.score", fails)
    found = metrics(run(tmp_path, steps=4, eval_tasks=files[:1]))
    assert {m["step"] for m in found} == {1, 2, 3, 4} and not any("quiz/acc" in m for m in found)
    assert "quiz.jsonl failed: no numbers" in capsys.readouterr().err


def test_files_have_short_names_if_these_differ():
    assert names_of(["a/quiz.jsonl", "b/arc.test.jsonl"]) == ["quiz", "arc.test"]
    assert names_of(["a/quiz.jsonl", "b/quiz.jsonl"]) == ["a/quiz.jsonl", "b/quiz.jsonl"]
