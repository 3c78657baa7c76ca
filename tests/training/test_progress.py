"""The best checkpoint by a metric, which the run's folder then means, and the end of a run that no longer improves."""

import pytest
from runs import checkpoints, metrics, options, run

from xtrain.errors import UserError
from xtrain.formats.saved_runs import model_folder, named_best
from xtrain.training.progress import Progress, progress
from xtrain.training.run import Run


@pytest.fixture
def losses(monkeypatch):
    """Validations return these, one after the other."""

    def measure(values):
        left = iter(values)

        def validate(self):
            loss = next(left)
            self.val_loss = self.done, loss
            return loss, 10 - loss

        monkeypatch.setattr(Run, "validate", validate)

    return measure


def test_larger_is_better_unless_it_is_a_loss():
    lines = [{"step": 1, "quiz/acc": 0.5, "a_loss": 2.0}, {"step": 2, "loss": 1.0}]
    lines += [{"step": 3, "quiz/acc": 0.75, "a_loss": 3.0}, {"step": 5, "quiz/acc": 0.75}]
    lines += [{"step": 6, "quiz/acc": None}]
    assert progress(lines, "quiz/acc", 5) == Progress(-0.75, 1)  # equal is not better
    assert progress(lines[:3], "quiz/acc", 3) == Progress(-0.75, 0)
    assert progress(lines, "quiz/acc", 6) == Progress(None, 1)
    assert progress(lines, "a_loss", 5) == Progress(None, 1)
    with pytest.raises(
        UserError, match=r"--best acc is not measured: choose from a_loss, quiz/acc$"
    ):
        progress(lines, "acc", 5)


def test_the_best_checkpoint_is_saved_and_loaded(tmp_path, losses):
    losses([5.0, 3.0, 4.0, 2.0, 2.5, 6.0])
    folder = run(tmp_path, steps=12, eval_every=2, save_every=0, keep=1, best="val_bpb")
    # bits per byte are 10 - loss here: 5, 7, 6, 8, 7.5, 4; the best are those of steps 2 and 12
    assert checkpoints(folder) == ["step-000012"]
    losses([5.0, 3.0, 4.0, 2.0, 2.5, 6.0])
    folder = run(tmp_path, steps=12, eval_every=2, save_every=0, keep=1, best="val_loss", name="b")
    assert checkpoints(folder) == ["step-000008", "step-000012"]
    assert model_folder(folder).name == "step-000008"
    (folder / "checkpoints/step-000008/model.safetensors").write_bytes(b"damaged")
    said = []
    assert model_folder(folder, said.append).name == "step-000012" and "it is the best" in said[0]
    losses([5.0, 3.0])
    folder = run(tmp_path, steps=4, eval_every=2, save_every=2, keep=1, name="c")
    assert named_best(folder) is None and model_folder(folder).name == "step-000004"


def test_patience(tmp_path, losses):
    """A resumed run counts the measurements before it was stopped."""
    values = [5.0, 3.0, 4.0, 3.0, 3.5, 1.0]
    losses(values)
    folder = run(tmp_path, steps=12, eval_every=2, save_every=0, patience=3)
    assert checkpoints(folder) == ["step-000010"] and (folder / "report.html").exists()
    losses(values)
    part = run(tmp_path, steps=12, eval_every=2, save_every=0, patience=3, stop_at=7, name="part")
    run(tmp_path, steps=12, eval_every=2, save_every=0, patience=3, resume=True, name="part")
    assert checkpoints(part)[-1] == "step-000010"
    assert metrics(part) == metrics(folder)


def test_refused(tmp_path):
    with pytest.raises(UserError, match="--patience needs measurements: give --eval-every or"):
        options(tmp_path, patience=2, eval_every=0).validate()
    with pytest.raises(
        UserError, match="--best val_los is not measured: choose from val_bpb, val_loss"
    ):
        run(tmp_path, steps=3, eval_every=2, save_every=0, best="val_los", name="wrong")
    assert checkpoints(tmp_path / "wrong") == ["step-000002"]  # and --resume continues it
