"""A run that dies anywhere in a step, and is resumed, has the bits of one that was never killed."""

import json
import os
import sys
import time
import types
from dataclasses import replace

import pytest
from checks import only_slow
from faults import KILL, FailingDisk, killed
from runs import SILENT, assert_same_run, checkpoints, metrics

from xtrain import Engine
from xtrain.errors import UserError
from xtrain.reinforce import reinforce
from xtrain.reinforcement import reinforce as module
from xtrain.reinforcement.environment import Environment
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.training.option_changes import option_changes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
STEPS = 3


def reward(record, texts):
    return [len(set(text)) / 9 for text in texts]


def reply(record, messages):
    return ") + " if len(messages) < 6 else None


TASK = types.SimpleNamespace(reward=reward, reply=reply)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_killed_task", TASK)


def config_of(folder, out, **more):
    """Three turns, two updates a step in two micro-batches, a reference, truncated sampling."""
    options = dict(
        init=str(folder), data=(str(folder / "prompts.jsonl"),), out=str(out), name="run", device="cpu", task="a_killed_task:reward",
        group=4, batch=8, micro_batch=4, max_new_tokens=16, steps=STEPS, lr=1e-2, save_every=1, eval_every=2, blas_threads=1,
        rollout_batch=3, kl=0.05, updates=2, temperature=0.9, top_p=0.8,
        environment="a_killed_task:reply", stop_strings=("e", "f", "r", "x", " "),
    )  # fmt: skip
    return ReinforceConfig(**(options | more))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    sys.modules["a_killed_task"] = TASK
    run = reinforce(config_of(folder, tmp_path_factory.mktemp("whole")), SILENT)
    assert all(1.5 < m["turns"] <= 3 for m in metrics(run) if "loss" in m)
    return run


def dies_at(owner, name, n, left):
    """The process ends at the n-th call of a function, when `left` checkpoints are written."""
    call, calls = getattr(owner, name), []

    def prepare(run):
        def counted(*arguments, **options):
            calls.append(None)
            if len(calls) == n:
                while left and not (run / "checkpoints" / f"step-00000{left}").exists():
                    time.sleep(0.01)  # a thread writes it
                os._exit(9)
            return call(*arguments, **options)

        setattr(owner, name, counted)

    return prepare


def dies_writing(n):
    """The process ends at the n-th access of the checkpoint writer to the disk."""
    patch = types.SimpleNamespace(setattr=setattr)
    return lambda run: FailingDisk(patch, run / "checkpoints", n, KILL)


POINTS = {  # where the process ends, and the checkpoints that it leaves
    "in a rollout of the second step": (dies_at(Engine, "_step", 60, 1), 1),
    "between two turns": (dies_at(Environment, "replies", 5, 1), 1),
    "in the second update": (dies_at(module, "surrogate", 8, 1), 1),
    "in the weights of a checkpoint": (dies_writing(5), 0),
}
MORE = {
    "in the first rollout": (dies_at(Engine, "_step", 4, 0), 0),
    "between micro-batches": (dies_at(module, "surrogate", 6, 1), 1),
    "before the first byte of a checkpoint": (dies_writing(1), 0),
    "in the second checkpoint": (dies_writing(80), 1),
}


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(x, marks=only_slow) for x in MORE)])
def test_the_same_bits_after_a_kill(whole, folder, tmp_path, point):
    prepare, left = (POINTS | MORE)[point]
    run = tmp_path / "run"
    assert killed(lambda: prepare(run), lambda: reinforce(config_of(folder, tmp_path), SILENT))
    there = [x for x in checkpoints(run) if x[0] != "."] if (run / "checkpoints").exists() else []
    assert len(there) == left, there
    reinforce(config_of(folder, tmp_path, resume=True), SILENT)
    assert_same_run(run, whole)
    assert (run / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    assert checkpoints(run) == checkpoints(whole) and len(metrics(run)) == len(metrics(whole))


def test_a_checkpoint_without_the_newer_options_is_compared_with_their_defaults(folder, tmp_path):
    then = {"group": 4}
    config = config_of(folder, tmp_path)
    assert option_changes(then, {"group": 4, "temperature": 1.0, "top_p": 1.0}, config) == {}
    changed = option_changes(then, {"group": 4, "temperature": 0.9}, config)
    assert changed == {"temperature": "temperature was 1.0, is 0.9"}


def test_other_sampling_options_are_refused_on_resuming(folder, tmp_path):
    reinforce(config_of(folder, tmp_path, steps=2, stop_at=1), SILENT)
    for change in (dict(top_p=0.7), dict(logprobs_of="model")):
        with pytest.raises(UserError, match=f"{next(iter(change))} was "):
            reinforce(config_of(folder, tmp_path, steps=2, resume=True, **change), SILENT)


# ----------------------------------------------------------------------------- one step off-policy
def test_one_step_off_policy_resumes_with_the_same_bits(folder, tmp_path):
    """Completions are those of the weights before; a checkpoint has those of the next step."""
    options = dict(off_policy=1, top_p=1.0, steps=4)
    whole = reinforce(config_of(folder, tmp_path, name="whole", **options), SILENT)
    lines = [m for m in metrics(whole) if "loss" in m]
    assert [m["ratio_error"] > 0 for m in lines] == [False, True, True, True]
    page = (whole / "report.html").read_text()
    assert "from the weights one step before" in page and "Turns" in page
    assert lines[0]["rollout_kl"] == 0 < min(m["rollout_kl"] for m in lines[1:])
    rows = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    assert [x["step"] for x in rows] == [step for step in (1, 2, 3, 4) for _ in range(8)]
    run = tmp_path / "run"
    prepare = dies_at(module, "surrogate", 10, 2)  # in the third step
    config = config_of(folder, tmp_path, **options)
    assert killed(lambda: prepare(run), lambda: reinforce(config, SILENT))
    reinforce(replace(config, resume=True), SILENT)
    assert_same_run(run, whole)
    assert (run / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    # the second step's completions are those of the first weights
    on = reinforce(config_of(folder, tmp_path, name="on", **options | {"off_policy": 0, "lr": 1e-12}), SILENT)  # fmt: skip
    others = [json.loads(line) for line in (on / "rollouts.jsonl").read_text().splitlines()]
    same = [x["completion"] == y["completion"] for x, y in zip(rows, others)]
    assert all(same[:16]) and not all(same[16:])


def test_truncated_sampling_cannot_be_off_policy(folder, tmp_path):
    with pytest.raises(UserError, match="--off-policy 1 cannot keep the tokens of --top-p"):
        config_of(folder, tmp_path, off_policy=1).validate()
    config_of(folder, tmp_path, off_policy=1, logprobs_of="model").validate()
