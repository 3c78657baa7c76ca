"""--log: what the libraries of Weights & Biases, trackio and TensorBoard get, on resuming too; their errors end no run."""

import json
import sys
from pathlib import Path

import pytest
from runs import SILENT, metrics, options, run

from xtrain.config import TrainConfig
from xtrain.errors import UserError
from xtrain.options import parse
from xtrain.run_options import TRACKERS
from xtrain.train import train
from xtrain.training import trackers
from xtrain.training.run_log import RunLog


class Calls:
    """Stand-ins for the three libraries, with the signatures that xtrain uses. fail: the call that raises."""

    def __init__(self, monkeypatch):
        self.inits, self.got, self.ended, self.fail = [], {}, [], None
        calls = self

        def check(name):
            if calls.fail == name:
                raise ConnectionError("<no>\nnetwork")

        class Run:
            def __init__(self, kind):
                self.kind = kind

            def log(self, values, step):
                check("log")
                for key, value in values.items():
                    calls.got[self.kind, key, step] = value

            def finish(self, exit_code=0):
                check("finish")
                calls.ended.append((self.kind, exit_code))

        def wandb_init(*, project, name, id, resume, dir, config, settings):
            check("init")
            calls.inits.append(("wandb", name, id, resume))
            assert config["train"]["steps"] and project == "xtrain" and Path(dir).is_dir()
            return Run("wandb")

        def trackio_init(project, *, name, resume, embed, config):
            calls.inits.append(("trackio", name, "", resume))
            return Run("trackio")

        class SummaryWriter:
            def __init__(self, logdir, *, purge_step, filename_suffix):
                calls.inits.append(("tensorboard", logdir, purge_step, ""))

            def add_text(self, tag, text, step):
                calls.got["tensorboard", tag, step] = text

            def add_scalar(self, tag, value, step):
                check("log")
                calls.got["tensorboard", tag, step] = value

            def close(self):
                calls.ended.append(("tensorboard", 0))

        members = {
            "wandb": {"init": wandb_init, "Settings": dict, "Table": dict},
            "trackio": {
                "init": trackio_init,
                "Table": dict,
                "finish": lambda: calls.ended.append(("trackio", 0)),
            },
            "tensorboardX": {"SummaryWriter": SummaryWriter},
        }
        for name, content in members.items():
            module = type(sys)(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return Calls(monkeypatch)


def test_the_trackers_get_the_numbers_and_a_resumed_run_is_the_same_one(tmp_path, calls):
    short = dict(steps=4, save_every=2, eval_every=2, log=TRACKERS)
    folder = run(tmp_path, **short, stop_at=3)
    identity = json.loads((folder / "trackers.json").read_text())["id"]
    assert calls.inits == [
        ("wandb", "run", identity, "allow"),
        ("trackio", f"run-{identity}", "", "allow"),
        ("tensorboard", str(folder / "tensorboard"), None, ""),
    ]
    run(tmp_path, **short, resume=True)
    assert calls.inits[3:] == [
        *calls.inits[:2],
        ("tensorboard", str(folder / "tensorboard"), 4, ""),
    ]
    assert calls.ended == [(kind, 0) for kind in TRACKERS] * 2
    for kind in TRACKERS:
        for line in metrics(folder):
            for key in set(line) - {"step", "spike"}:
                assert calls.got[kind, f"metrics/{key}", line["step"]] == line[key]
        assert (kind, "timing/tokens_per_s", 4) in calls.got
        assert (kind, "layers/head", 4) in calls.got
    # the same lines tell when and how the run was started
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 3]
    seconds = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in seconds]
    assert len(seconds) == 4 and seconds == sorted(seconds) and seconds[0] > 0


def test_completions_are_a_table(tmp_path, calls):
    log = RunLog(tmp_path, options(tmp_path, log=TRACKERS), {}, SILENT)
    rows = [{"step": 3, "completion": "a|b\nc", "reward": x} for x in (0.5, None)]
    with log:
        log.rollouts(rows)
    table = {"columns": ["completion", "reward"], "data": [["a|b\nc", 0.5], ["a|b\nc", None]]}
    assert calls.got["wandb", "rollouts", 3] == calls.got["trackio", "rollouts", 3] == table
    lines = calls.got["tensorboard", "rollouts", 3].splitlines()
    assert lines[:3] == ["| completion | reward |", "| --- | --- |", "| a\\|b<br>c | 0.5 |"]
    assert [json.loads(x) for x in (tmp_path / "rollouts.jsonl").read_text().splitlines()] == rows


def test_an_error_of_a_library_is_one_warning(tmp_path, calls):
    said = []
    for place, logged in (("init", 0), ("log", 0), ("finish", 2)):
        said.clear()
        calls.got.clear()
        calls.fail = place
        made = trackers.Trackers(("wandb",), tmp_path, 0, {"train": {"steps": 1}}, said.append)
        made.log(1, {"a": 1.0})
        made.log(2, {"a": 2.0})
        made.close(failed=False)
        (warning,) = said
        assert warning == "--log wandb is off for the rest of this run: ConnectionError: <no> network"  # fmt: skip
        assert len(calls.got) == logged


def test_a_run_without_its_tracker_trains_on(tmp_path, calls):
    calls.fail = "log"
    folder = run(tmp_path, steps=2, log=("tensorboard",))
    assert [m["step"] for m in metrics(folder) if "loss" in m] == [1, 2] and not calls.got


def test_a_failed_run_is_logged_as_failed(tmp_path, calls):
    made = trackers.Trackers(("wandb",), tmp_path, 0, {"train": {"steps": 1}}, pytest.fail)
    made.close(failed=True)
    assert calls.ended == [("wandb", 1)]


def test_a_damaged_identity_is_named(tmp_path):
    for content in ('{"id": "../x"}', "["):
        (tmp_path / "trackers.json").write_text(content)
        said = []
        new = trackers._identity(tmp_path, said.append)
        assert "is damaged" in said[0] and new == trackers._identity(tmp_path, pytest.fail)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package(tmp_path, monkeypatch, name):
    package = trackers.KINDS[name].package
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"--log {name} needs .*`pip install {package}`"):
        train(options(tmp_path, log=(name,)), SILENT)
    assert not list(tmp_path.iterdir())


def test_the_option(tmp_path):
    assert list(trackers.KINDS) == list(TRACKERS)
    with pytest.raises(UserError, match="--log mlflow is not known: choose from wandb, trackio"):
        train(options(tmp_path, log=("mlflow",)), SILENT)
    assert parse(TrainConfig, "train", arguments=["--report-to", "wandb"]).log == ("wandb",)
    with pytest.raises(UserError, match="use --log tensorboard"):
        parse(TrainConfig, "train", arguments=["--tensorboard"])


def test_tensorboard_reads_the_files(tmp_path):
    pytest.importorskip("tensorboardX")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first in (0, 2):  # stopped after step 3, resumed from step 2
        made = trackers.Trackers(("tensorboard",), tmp_path, first, {}, pytest.fail)
        for step in range(first + 1, first + 4):
            made.log(step, {"metrics/loss": first + step / 8})
        made.close(failed=False)
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("metrics/loss")]
    assert found == [(1, 0.125), (2, 0.25), (3, 2.375), (4, 2.5), (5, 2.625)]
