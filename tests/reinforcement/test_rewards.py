"""Reward functions that hang, raise, exit or give no reward: what is said, and what a run has left."""

import contextlib
import linecache
import math
import os
import re
import signal
import sys
import time
import types

import pytest
from checks import GPU
from runs import SILENT, assert_same_run, checkpoints, metrics

from xtrain.errors import UserError
from xtrain.reinforce import main, reinforce
from xtrain.reinforcement.prompts import Prompt
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.reinforcement.rewards import Interrupted, RewardError, Task, time_limit
from xtrain.training import preemption

PROMPT = Prompt("x.jsonl line 3", [1], {"prompt": "a"})
CAN_INTERRUPT = hasattr(signal, "setitimer")
needs_signals = pytest.mark.skipif(not CAN_INTERRUPT, reason="no timer signals here")


def good(record, texts):
    return [len(set(text)) / 9 for text in texts]


def hang(*_):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


HANGS = {
    "sleep": hang,
    "map": lambda record, texts: map(hang, texts),
    "regular expression": lambda record, texts: re.match(r"(a+)+$", "a" * 60 + "b"),
}


@pytest.fixture(autouse=True)
def task(monkeypatch):
    module = types.SimpleNamespace(reward=good)
    monkeypatch.setitem(sys.modules, "a_reward_task", module)
    return module


# ----------------------------------------------------------------------------- one call
@needs_signals
@pytest.mark.parametrize("kind", HANGS)
def test_a_call_that_hangs_is_ended(task, kind):
    task.reward = HANGS[kind]
    words = r"the task a_reward_task:reward took more than 0.3 s .* for x.jsonl line 3: fix"
    with pytest.raises(RewardError, match=words):
        Task("a_reward_task:reward").rewards(PROMPT, ["a"], 0.3)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@needs_signals
def test_another_timer_continues_afterwards():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 100)
    with time_limit(5, lambda: False):
        pass
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert 90 < left <= 100


@needs_signals
def test_a_tick_at_the_end_of_a_call_leaves_no_timer():
    before = signal.getsignal(signal.SIGALRM)

    def overdue_at_the_end(frame, event, _):
        if frame.f_code is time_limit.__wrapped__.__code__ and event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if "inside = False" in line and not ticks:
                ticks.append(frame)
                signal.getsignal(signal.SIGALRM)(signal.SIGALRM, frame)
        return overdue_at_the_end

    ticks = []
    tracer = sys.gettrace()
    sys.settrace(overdue_at_the_end)
    try:
        with pytest.raises(Interrupted), time_limit(0, lambda: bool(ticks)):
            pass
    finally:
        sys.settrace(tracer)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


@needs_signals
def test_a_call_does_not_delay_the_end_of_the_run(task):
    task.reward = hang
    with pytest.raises(Interrupted):
        Task("a_reward_task:reward").rewards(PROMPT, ["a"], 0, lambda: True)


def test_what_a_call_may_return(task):
    call = lambda: Task("a_reward_task:reward").rewards(PROMPT, ["a", "b"])
    task.reward = lambda *_: [None, 2]
    nothing, two = call()
    assert math.isnan(nothing) and two == 2.0
    task.reward = lambda *_: sys.exit(3)
    with pytest.raises(RewardError, match=r"called sys.exit\(3\) for x.jsonl line 3: fix the func"):
        call()
    for rewards, words in (
        ([None, math.nan], "returned the reward nan"),
        ([1, 10**400], r"returned \[1, 1000"),
        (map(lambda x: x, [1.0, math.inf]), "returned the reward inf"),
        (map(lambda x: 1 / x, [1, 0]), "raised ZeroDivisionError"),
    ):
        task.reward = lambda *_, rewards=rewards: rewards
        with pytest.raises(RewardError, match=words):
            call()
    task.reward = lambda *_: map(float, [1, 2])
    assert call() == [1.0, 2.0]


# ----------------------------------------------------------------------------- runs
def config_of(folder, out, **more):
    options = dict(
        init=str(folder), data=(str(folder / "prompts.jsonl"),), out=str(out), name="run", device="cpu", task="a_reward_task:reward",
        group=4, batch=8, max_new_tokens=6, steps=3, lr=1e-2, save_every=0, eval_every=2, blas_threads=1,
    )  # fmt: skip
    return ReinforceConfig(**(options | more))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    sys.modules["a_reward_task"] = types.SimpleNamespace(reward=good)
    return reinforce(config_of(folder, tmp_path_factory.mktemp("whole")), SILENT)


def fails_at(n, failure):
    """A reward function whose n-th call fails: two calls a step, and one for each validation."""
    calls = []

    def reward(record, texts):
        calls.append(None)
        return failure(record, texts) if len(calls) == n else good(record, texts)

    return reward


FAILURES = {
    "raised ZeroDivisionError": lambda *_: 1 / 0,
    "returned the reward nan": lambda *_: [math.nan] * 4,
    "called sys.exit": lambda *_: sys.exit(0),
} | ({"took more than 0.3 s": hang} if CAN_INTERRUPT else {})


@pytest.mark.skipif(GPU, reason="on a CPU the run without a failure is compared")
@pytest.mark.parametrize("words", FAILURES)
def test_a_failure_leaves_a_checkpoint_of_the_last_step(whole, folder, tmp_path, task, words):
    """Call 4 is in step 2, after the only step that a checkpoint can save."""
    task.reward = fails_at(4, FAILURES[words])
    with pytest.raises(UserError, match=words):
        reinforce(config_of(folder, tmp_path, reward_timeout=0.3), SILENT)
    run = tmp_path / "run"
    assert checkpoints(run) == ["step-000001"]
    task.reward = good
    assert main(["--out", str(tmp_path), "--name", "run", "--resume"]) == 0
    assert_same_run(run, whole)
    assert metrics(run) == metrics(whole)


def test_a_failure_in_the_first_step_leaves_nothing(folder, tmp_path, task):
    task.reward = fails_at(1, FAILURES["called sys.exit"])
    with pytest.raises(UserError, match=r"called sys\.exit"):
        reinforce(config_of(folder, tmp_path), SILENT)
    assert not list((tmp_path / "run").glob("checkpoints/step*"))


@needs_signals
def test_a_run_can_be_stopped_while_a_call_hangs(whole, folder, tmp_path, task, monkeypatch):
    """The signal arrives in the second step. The run ends as always: without an error."""
    monkeypatch.setattr(preemption, "GRACE_SECONDS", 0.1)
    task.reward = fails_at(4, lambda *_: os.kill(os.getpid(), signal.SIGTERM) or hang())
    run = reinforce(config_of(folder, tmp_path), SILENT)
    assert checkpoints(run) == ["step-000001"]
    task.reward = good
    reinforce(config_of(folder, tmp_path, resume=True), SILENT)
    assert_same_run(run, whole)


def test_the_time_limit_is_overdue(monkeypatch):
    now = preemption.STARTED
    stop = preemption.StopRequest(100, lambda: now)
    assert not stop.overdue()
    now += 98
    assert stop.overdue() and stop.reason == "--time-limit"
    stop = preemption.StopRequest(None, lambda: now)
    stop.requested, stop.requested_at = True, now
    assert not stop.overdue()
    now += preemption.GRACE_SECONDS + 1
    assert stop.overdue()


def test_completions_without_a_reward_are_not_trained(folder, tmp_path, task, capsys):
    """Returning None for a group and skipping a call that fails are the same."""
    task.reward = fails_at(2, lambda *_: [None] * 4)
    none = reinforce(config_of(folder, tmp_path, name="none"), SILENT)
    task.reward = fails_at(2, lambda *_: 1 / 0)
    skip = reinforce(config_of(folder, tmp_path, name="skip", reward_errors="skip"), SILENT)
    assert_same_run(none, skip)
    assert "prompts.jsonl line" in capsys.readouterr().err
    lines = [m for m in metrics(none) if "loss" in m]
    assert [m.get("without_reward", 0.0) for m in lines] == [0.5, 0.0, 0.0]
    # the others of a group are compared with each other alone
    task.reward = lambda record, texts: [None, *good(record, texts[1:])]
    run = reinforce(config_of(folder, tmp_path, name="one"), SILENT)
    assert all(m["without_reward"] == 0.25 and m["loss"] == m["loss"] for m in metrics(run) if "loss" in m)  # fmt: skip


def test_a_step_without_any_reward_ends_the_run(folder, tmp_path, task):
    task.reward = lambda record, texts: [None] * len(texts)
    with pytest.raises(UserError, match=r"step 1: no completion has a reward: .* returned None"):
        reinforce(config_of(folder, tmp_path), SILENT)
    task.reward = FAILURES["raised ZeroDivisionError"]
    with pytest.raises(UserError, match=r"step 1: no completion has a reward: .* raised Zero"):
        reinforce(config_of(folder, tmp_path, name="skip", reward_errors="skip"), SILENT)
