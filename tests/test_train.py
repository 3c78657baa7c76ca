"""Whole runs: files, golden losses, exact resume, and a clear sentence for everything that can go wrong."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from checks import GPU

from xtrain import checkpoint
from xtrain.config import TrainConfig, UserError
from xtrain.train import main, train

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden_losses.json"  # written by: python tests/test_train.py


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def options(out, **more):
    defaults = {
        "preset": "tiny", "data": str(DATA / "grammar.txt"), "out": str(out), "name": "run", "vocab_size": 320,
        "steps": 20, "batch": 4, "seq_len": 32, "eval_batches": 2, "eval_every": 10, "sample_every": 10,
        "sample_tokens": 8, "save_every": 10, "warmup": 2, "lr": 5e-4,
    }  # fmt: skip
    return TrainConfig(**{**defaults, **more})


def command(out, *more):
    arguments = [
        "--data",
        str(DATA / "grammar.txt"),
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


def test_a_run_leaves_everything(tmp_path, capsys):
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


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_ten_and_ten_is_twenty(tmp_path, micro_batch):
    whole = train(options(tmp_path / "a", micro_batch=micro_batch))
    train(options(tmp_path / "b", micro_batch=micro_batch, stop_at=10))
    halves = train(options(tmp_path / "b", micro_batch=micro_batch, resume=True))
    names = ["metrics.jsonl", "samples.txt"]
    names += [
        f"checkpoints/step-000020/{n}"
        for n in ("model.safetensors", "optimizer.safetensors", "state.json")
    ]
    for name in names:
        assert (whole / name).read_bytes() == (halves / name).read_bytes(), name


def test_resume_forgets_what_came_after_the_checkpoint(tmp_path):
    whole = train(options(tmp_path / "a"))
    run = train(
        options(tmp_path / "b", stop_at=13, save_every=10)
    )  # 13 is saved too, as the run's end
    import shutil

    shutil.rmtree(run / "checkpoints" / "step-000013")  # as if killed after step 13
    (run / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text()[:-9]
    )  # in the middle of a line
    train(options(tmp_path / "b", resume=True))
    assert (whole / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_micro_batches_add_up(tmp_path):
    losses = [
        [
            m["loss"]
            for m in metrics(train(options(tmp_path / str(n), micro_batch=n, steps=5)))
            if "loss" in m
        ]
        for n in (4, 2, 1)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    np.testing.assert_allclose(losses[2], losses[0], rtol=2e-6)


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    first = train(options(tmp_path, name=None, steps=2, stop_at=1))
    second = train(options(tmp_path, name=None, steps=2))
    assert (first.name, second.name) == ("tiny", "tiny-2")
    with pytest.raises(UserError, match="there already"):
        train(options(tmp_path, name="tiny", steps=2))


def test_from_given_weights(tmp_path):
    run = train(options(tmp_path / "a", steps=10))
    last = run / "checkpoints" / "step-000010"
    more = train(
        options(tmp_path / "b", steps=2, init=str(last), tokenizer=str(last / "tokenizer.json"))
    )
    before = [m["loss"] for m in metrics(run) if "loss" in m]
    assert metrics(more)[0]["loss"] < before[0] - 0.3


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
    assert "no GPU can be used here" in capsys.readouterr().err


def test_unknown_option(tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(command(tmp_path, "--learning-speed", "1"))
    assert stop.value.code == 2


def test_resume_with_other_options(tmp_path, capsys):
    train(options(tmp_path, stop_at=10))
    with pytest.raises(UserError, match=r"lr was 0.0005, is 0.1"):
        train(options(tmp_path, resume=True, lr=0.1))
    other = tmp_path / "other.txt"
    other.write_text((DATA / "grammar.txt").read_text() * 2)
    with pytest.raises(UserError, match="the text is not the same"):
        train(options(tmp_path, resume=True, data=str(other)))


def test_no_space_left(tmp_path, monkeypatch):
    """The run's checkpoint before stays whole, and no temporary folder stays."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = train(options(tmp_path, stop_at=10))
    kept = (run / "checkpoints/step-000010/state.json").read_bytes()
    monkeypatch.setattr(checkpoint.safetensors.numpy, "save_file", full)
    with pytest.raises(UserError, match="no space left"):
        train(options(tmp_path, resume=True))
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000010"]
    assert (run / "checkpoints/step-000010/state.json").read_bytes() == kept


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_checkpoint(tmp_path, name, damage):
    run = train(options(tmp_path, stop_at=1, steps=2))
    path = run / "checkpoints/step-000001" / name
    content = path.read_bytes()
    path.unlink() if damage == "missing" else path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"step-000001"):
        train(options(tmp_path, steps=2, resume=True))


def test_interrupt_saves(tmp_path):
    """Ctrl-C finishes the step, writes a checkpoint and ends well; the run can go on."""
    import os
    import signal

    from xtrain.train import Run

    step, count = Run.step, 0

    def interrupted(run):
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", interrupted)
        run = train(options(tmp_path / "b"))
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000003"]
    train(options(tmp_path / "b", resume=True))
    whole = train(options(tmp_path / "a"))
    losses = [[m for m in metrics(r) if "loss" in m] for r in (run, whole)]
    assert losses[0] == losses[1]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        record = {
            "about": "10 steps on grammar.txt, fp32, CPU",
            "losses": golden_losses(Path(folder)),
        }
    GOLDEN.write_text(json.dumps(record, indent=2) + "\n")
