"""Whole runs: files, golden losses, exact resume, and a clear message for every error of the user."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from checks import GPU
from rich.console import Console
from twins import random_model, small

from xtrain import Engine, Transformer
from xtrain.config import TrainConfig
from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.train import main, train
from xtrain.training.single_device import SingleDevice

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
# written by: PYTHONPATH=tests/helpers python tests/training/test_train.py
GOLDEN = DATA / "golden_losses.json"


pytestmark = pytest.mark.usefixtures("cache")


def options(out, **more):
    defaults = {
        "preset": "tiny", "data": str(DATA / "grammar.txt"), "out": str(out), "name": "run", "vocab_size": 320,
        "steps": 20, "batch": 4, "seq_len": 32, "eval_batches": 2, "eval_every": 10, "sample_every": 10,
        "sample_tokens": 8, "save_every": 10, "warmup": 2, "lr": 5e-4,
        "precision": "fp32",
    }  # fmt: skip
    defaults["warmup"] = max(0, min(2, more.get("steps", 20) - 2))
    return TrainConfig(**{**defaults, **more})


def command(out, *more):
    data = [] if "--data" in more else ["--data", str(DATA / "grammar.txt")]
    arguments = [
        *data,
        "--out",
        str(out),
        "--name",
        "run",
        "--steps",
        "2",
    ]
    small = [
        "--preset",
        "tiny",
        "--vocab-size",
        "300",
        "--batch",
        "2",
        "--seq-len",
        "16",
        "--eval-batches",
        "1",
    ]
    return [*arguments, *small, "--sample-tokens", "2", *more]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def golden_losses(out):
    run = train(options(out, steps=10))
    return [m["loss"] for m in metrics(run) if "loss" in m]


def test_golden_losses(tmp_path):
    expected = json.loads(GOLDEN.read_text())["losses"]
    np.testing.assert_allclose(golden_losses(tmp_path), expected, rtol=1e-4 if GPU else 1e-5)


def test_a_run_leaves_everything(loss_picture, tmp_path, capsys):
    run = train(options(tmp_path))
    out = capsys.readouterr().out
    for name in ("config.json", "metrics.jsonl", "timing.jsonl", "samples.txt", "loss.png"):
        assert (run / name).stat().st_size > 0, name
    rows = metrics(run)
    assert [m["step"] for m in rows if "loss" in m] == list(range(1, 21))
    assert all(
        set(m) in ({"step", "loss", "grad_norm", "lr"}, {"step", "val_loss", "val_bpb"})
        for m in rows
    )
    losses = [m["loss"] for m in rows if "loss" in m]
    assert losses[-1] < losses[0] - 0.5
    assert len((run / "timing.jsonl").read_text().splitlines()) == 20
    data = json.loads((run / "config.json").read_text())["data"]
    assert data["bytes"] == (DATA / "grammar.txt").stat().st_size and len(data["sha256"]) == 64
    for word in (
        "core (without embedding and head)",
        "tok/s",
        "ETA",
        "bits per byte",
        "byte-bigram",
        "What next",
    ):
        assert word in out, word
    assert not list(run.rglob("*.tmp"))


def test_an_interval_of_0_is_never(tmp_path, capsys, monkeypatch):
    """Also where the held-out text is too short for a validation. Results on tasks come at the end."""
    text = tmp_path / "text.txt"
    text.write_text((DATA / "grammar.txt").read_text()[:8000])
    tasks = tmp_path / "quiz.jsonl"
    tasks.write_text('{"prompt": "def f", "choices": ["(x)", "1"], "answer": 0}\n' * 2)
    given = dict(
        data=str(text),
        seq_len=512,
        batch=1,
        steps=4,
        dim=32,
        layers=1,
        heads=1,
        eval_tasks=(str(tasks),),
    )
    with pytest.raises(UserError, match="validation"):
        train(options(tmp_path, **given))
    watched = []
    watch = SingleDevice.watch
    monkeypatch.setattr(SingleDevice, "watch", lambda *x: watched.append(x) or watch(*x))
    run = train(options(tmp_path, **given, eval_every=0, sample_every=0, save_every=0))
    rows = metrics(run)
    assert len(watched) == 1  # a run without validations may hang, too
    assert not any("val_loss" in m for m in rows) and not (run / "samples.txt").exists()
    assert [m["step"] for m in rows if "quiz/acc" in m] == [4]
    assert [x.name for x in (run / "checkpoints").iterdir()] == ["step-000004"]
    assert (run / "report.html").is_file() and "warning" not in capsys.readouterr().out


def test_the_checkpoint_is_a_model(tmp_path):
    import xtrain

    run = train(options(tmp_path, steps=4, save_every=4))
    folder = run / "checkpoints" / "step-000004"
    model = xtrain.Transformer.from_pretrained(folder)
    assert model.generate(np.array([[1, 2, 3]]), 4).shape == (1, 7)
    assert {p.name for p in folder.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_no_run_goes_without_a_report_by_oversight(tmp_path):
    """xtrain.training does not import the report, so the caller says who writes it: the summary names the page."""
    from xtrain.training import loop

    with pytest.raises(TypeError, match="write_report"):
        loop.train(options(tmp_path))


def test_micro_batches_add_up(tmp_path):
    """In training and in validation: both use batches of --batch sequences."""
    losses = [
        [
            m.get("loss", m.get("val_loss"))
            for m in metrics(train(options(tmp_path / str(n), micro_batch=n, steps=5)))
        ]
        for n in (4, 2, 1)
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    np.testing.assert_allclose(losses[2], losses[0], rtol=2e-6)


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    first = train(options(tmp_path, name=None, steps=2, stop_at=1))
    second = train(options(tmp_path, name=None, steps=2))
    assert (first.name, second.name) == ("tiny", "tiny-2")
    with pytest.raises(UserError, match="already exists"):
        train(options(tmp_path, name="tiny", steps=2))


def test_from_given_weights(tmp_path):
    run = train(options(tmp_path / "a", steps=10))
    last = run / "checkpoints" / "step-000010"
    own = str(last / "tokenizer.json")
    more = train(options(tmp_path / "b", steps=2, init=str(last), tokenizer=own))
    before = [m["loss"] for m in metrics(run) if "loss" in m]
    assert metrics(more)[0]["loss"] < before[0] - 0.3
    alike = train(options(tmp_path / "c", steps=2, init=str(last), vocab_size=None))
    assert metrics(alike) == metrics(more)  # the tokenizer of these weights
    other = train(options(tmp_path / "d", steps=2, init=str(last), vocab_size=258))
    assert metrics(other)[0]["loss"] != metrics(more)[0]["loss"]  # another, for who asks for it


def test_from_weights_with_dropout(tmp_path):
    """It changes nothing at inference; training says that it goes without."""
    model = random_model(small(vocab_size=300), device="cpu")
    model.save_pretrained(tmp_path, Tokenizer.train(["def f(x): return x\n" * 9], 270))
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"attention_dropout": 0.1}))
    ids = np.arange(12).reshape(2, 6)
    again = Transformer.from_pretrained(tmp_path)
    assert np.array_equal(again(ids).data, model(ids).data)
    assert Engine(again, 1).generate([[1, 2]], 4) == Engine(model, 1).generate([[1, 2]], 4)
    said = io.StringIO()
    shape = dict(vocab_size=None, seq_len=16, init=str(tmp_path))
    train(options(tmp_path / "runs", steps=1, **shape), Console(file=said, width=300))
    assert (
        f"attention_dropout 0.1 of {tmp_path} is not applied: xtrain trains without"
        in said.getvalue()
    )


BAD = {
    "unknown preset": (["--preset", "huge"], "choose one of auto, tiny"),
    "negative": (["--lr", "-1"], "--lr must be a positive number"),
    "not a multiple": (["--micro-batch", "3", "--batch", "4"], "not a multiple"),
    "no data": (["--data", "/nowhere/at/all"], "/nowhere/at/all"),
    "nothing to resume": (["--resume", "--name", "other"], "no checkpoint"),
    "no weights": (["--init", "/nowhere"], "/nowhere"),
    "too long": (["--seq-len", "100000"], "tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(tmp_path, capsys, name):
    arguments, sentence = BAD[name]
    assert main(command(tmp_path, *arguments)) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and "Traceback" not in error, error
    assert not list(tmp_path.rglob("*.json*")), "something was written"


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_no_gpu(tmp_path, capsys):
    assert main(command(tmp_path, "--device", "gpu")) == 2
    assert "no usable GPU was found" in capsys.readouterr().err


def test_unknown_option(tmp_path, capsys):
    assert main(command(tmp_path, "--learning-speed", "1")) == 2
    assert "there is no option --learning-speed" in capsys.readouterr().err


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        record = {
            "about": "10 steps on grammar.txt, fp32, CPU",
            "losses": golden_losses(Path(folder)),
        }
    GOLDEN.write_text(json.dumps(record, indent=2) + "\n")
