"""Reward functions that hang, raise, exit or give no reward: what is said, and what a run has left."""

import asyncio
import contextlib
import decimal
import json
import linecache
import math
import os
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from checks import GPU
from runs import SILENT, assert_same_run, checkpoints, metrics

from xtrain.data.conversations import Conversation
from xtrain.errors import UserError
from xtrain.reinforce import main, reinforce
from xtrain.reinforcement.calls import CallError, Interrupted, Limits, time_limit
from xtrain.reinforcement.episodes import Episode
from xtrain.reinforcement.prompts import Prompt
from xtrain.reinforcement.reinforce import ReinforceConfig
from xtrain.reinforcement.rewards import Group, Task, weighted_sum
from xtrain.training import preemption
from xtrain.training.progress import Progress, progress

PROMPT = Prompt("x.jsonl line 3", [1], {"prompt": "a"})
CAN_INTERRUPT = hasattr(signal, "setitimer")
needs_signals = pytest.mark.skipif(not CAN_INTERRUPT, reason="no timer signals here")


def good(record, texts):
    return [len(set(text)) / 9 for text in texts]


def hang(*_):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


def catch_everything(*_):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


HANGS = {
    "sleep": hang,
    "bare except": catch_everything,
    "map": lambda record, texts: map(hang, texts),
    "regular expression": lambda record, texts: re.match(r"(a+)+$", "a" * 60 + "b"),
}


@pytest.fixture(autouse=True)
def task(monkeypatch):
    module = types.SimpleNamespace(reward=good)
    monkeypatch.setitem(sys.modules, "a_reward_task", module)
    return module


# ----------------------------------------------------------------------------- one call
def group_of(prompt, *texts):
    """Completions of a prompt; a limit has ended the last one."""
    reasons = ["stop"] * (len(texts) - 1) + ["length"]
    said = [[*prompt.asked, {"role": "assistant", "content": text}] for text in texts]
    return Group(prompt, [Episode(prompt, None, x, [7], text=t, reason=r) for x, t, r in zip(said, texts, reasons)])  # fmt: skip


def rewards(*texts, seconds=0.0, overdue=lambda: False):
    """The rewards of completions of PROMPT. Raises CallError."""
    task = Task("a_reward_task:reward")
    (found,) = task.rewards([group_of(PROMPT, *texts)], 1, Limits(seconds, overdue))
    if isinstance(found, CallError):
        raise found
    return found


@needs_signals
@pytest.mark.parametrize("kind", HANGS)
def test_a_call_that_hangs_is_ended(task, kind):
    task.reward = HANGS[kind]
    words = r"the task a_reward_task:reward took more than 0.3 s .* for x.jsonl line 3: fix"
    with pytest.raises(CallError, match=words):
        rewards("a", seconds=0.3)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@needs_signals
def test_another_timer_continues_afterwards():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 100)
    with time_limit(Limits(5)):
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
        with pytest.raises(Interrupted), time_limit(Limits(0, lambda: bool(ticks))):
            pass
    finally:
        sys.settrace(tracer)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


@needs_signals
def test_a_call_does_not_delay_the_end_of_the_run(task):
    task.reward = hang
    with pytest.raises(Interrupted):
        rewards("a", overdue=lambda: True)


def test_what_a_call_may_return(task):
    call = lambda: rewards("a", "b")
    task.reward = lambda *_: [None, 2]
    nothing, two = call()
    assert math.isnan(nothing) and two == 2.0
    task.reward = lambda *_: sys.exit(3)
    with pytest.raises(CallError, match=r"called sys.exit\(3\) for x.jsonl line 3: fix the func"):
        call()
    for returned, words in (
        ([None, math.nan], "returned the reward nan"),
        ([1, 10**400], r"returned \[1, 1000"),
        (map(lambda x: x, [1.0, math.inf]), "returned the reward inf"),
        ([1e308, 0], r"returned the reward 1e\+308, which is larger than 1e\+30, for"),
        (map(lambda x: 1 / x, [1, 0]), "raised ZeroDivisionError"),
        ("10", "returned '10', not a list of numbers"),
        (["1", "0"], r"returned \['1', '0'\], not a list of numbers"),
        ({1.0, 2.0}, r"returned .1.0, 2.0., not a list of numbers"),
        ([Unreadable(), 1], r"returned \[<.*>, 1\], not a list of numbers"),
    ):
        task.reward = lambda *_, returned=returned: returned
        with pytest.raises(CallError, match=words):
            call()
    task.reward = lambda *_: map(float, [1, 2])
    assert call() == [1.0, 2.0]
    task.reward = lambda *_: [np.True_, np.float32(2)]
    assert call() == [1.0, 2.0]
    task.reward = lambda *_: [True, decimal.Decimal("2")]
    assert call() == [1.0, 2.0]

    async def lazily(*_):
        return (x for x in (1.0, math.nan))

    task.reward = lazily
    with pytest.raises(CallError, match="returned the reward nan"):
        call()


class Unreadable:
    def __float__(self):
        raise RuntimeError("a bug")


def test_an_error_that_is_no_exception(task):
    """asyncio.CancelledError is none. Ctrl-C stays one."""

    async def cancelled(record, texts):
        raise asyncio.CancelledError

    def interrupted(record, texts):
        raise KeyboardInterrupt

    task.reward = cancelled
    with pytest.raises(CallError, match=r"raised CancelledError \(\) at .* for x.jsonl line 3"):
        rewards("a")
    task.reward = lambda *_: asyncio.run(cancelled(*_))
    with pytest.raises(CallError, match=r"raised CancelledError"):
        rewards("a")
    task.reward = interrupted
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # with nohup it is another
    try:
        with pytest.raises(KeyboardInterrupt):
            rewards("a")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_async", [False, True])
def test_ctrl_c_in_a_run_and_a_function_that_raises_the_same(task, is_async):
    """The function's own KeyboardInterrupt is its failure, so the run is saved."""

    def raising(error):
        def reward(*_):
            raise error

        async def later(*_):
            raise error

        return later if is_async else reward

    with preemption.StopRequest():
        task.reward = raising(KeyboardInterrupt)
        with pytest.raises(CallError, match=r"raised KeyboardInterrupt \(\) at test_rewards"):
            rewards("a")
        task.reward = lambda *_: os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            rewards("a")


THREADS = """
import sys, time
from concurrent.futures import {pool}
from xtrain.cli import command_line
from xtrain.reinforcement.calls import Call, Limits, UserFunction

def wait(*_):
    with {pool}(1) as pool:
        list(pool.map(time.sleep, [1000]))

def main():
    (error,) = UserFunction("__main__:wait").results([Call("line 1", ((),))], Limits(0.3))
    print(error)
    return 2

if __name__ == "__main__":
    sys.exit(command_line(main))
"""


@needs_signals
@pytest.mark.parametrize("pool", ["ThreadPoolExecutor", "ProcessPoolExecutor"])
def test_threads_of_a_call_that_hangs_do_not_keep_the_program(pool):
    """Python waits for them at its end."""
    script = f"import xtrain.cli; xtrain.cli.EXIT_SECONDS = 0.5\n{THREADS.format(pool=pool)}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "took more than 0.3 s" in done.stdout, done
    assert "threads or processes that a function has started do not end" in done.stderr


@needs_signals
def test_a_call_stays_in_its_folder_and_process(task, tmp_path):
    before = os.getcwd()

    def leave(*_):
        os.chdir(tmp_path)
        if os.fork():
            os.wait()
            return [1.0]
        return [2.0]  # the child's, which must not become a second run

    task.reward = leave
    assert rewards("a") == [1.0] and os.getcwd() == before


@needs_signals
@pytest.mark.parametrize("code, status", [(0, 0), (None, 0), (3, 3), ("no", 1)])
def test_a_process_that_a_call_has_started_keeps_its_exit_status(task, code, status):
    def in_a_child(*_):
        child = os.fork()
        if not child:
            sys.exit(code)
        return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]

    task.reward = in_a_child
    assert rewards("a") == [status]


def test_a_function_cannot_change_the_conversation(task):
    prompt = prompt_of(1, chat=True)
    task.reward = lambda prompts, **more: [prompts[0][0].update(content="changed") or 1.0]
    assert list(Task("a_reward_task:reward").rewards([group_of(prompt, "a")], 1, Limits()))
    assert prompt.asked == [{"role": "user", "content": "prompt 1"}]


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_cannot_change_the_data(task, batched):
    """Otherwise a resumed run, which reads the file again, would have other rewards."""
    fields = {"prompt": "a", "answers": ["b"]}
    group = group_of(Prompt("x.jsonl line 3", [1], fields), "a")
    task.reward = lambda record, texts: [record["answers"].append("c") or 1.0]
    if batched:
        task.reward = lambda prompts, answers, **more: [answers[0].append("c") or 1.0]
    assert list(Task("a_reward_task:reward").rewards([group], 1, Limits())) == [[1.0]]
    assert fields["answers"] == ["b"]


BAD_TASKS = {
    "returned 3 rewards for 2 completions": lambda record, texts: [0.0] * 3,
    "returned the reward nan": lambda record, texts: [0.0, math.nan],
    "returned the reward inf": lambda record, texts: [math.inf, 0.0],
    "raised KeyError .'answer'.": lambda record, texts: record["answer"],
    "returned None, not a list": lambda record, texts: None,
    "returned .'good', 'bad'., not a list": lambda record, texts: ["good", "bad"],
}


@pytest.mark.parametrize("words", BAD_TASKS)
def test_a_bad_task_is_one_sentence(task, words):
    task.reward = BAD_TASKS[words]
    with pytest.raises(UserError, match=f"the task a_reward_task:reward {words}.* line 3: fix the func") as caught:  # fmt: skip
        rewards("a", "b")
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------- what a call gets
def prompt_of(n, chat=False):
    """A prompt, with the answer n."""
    if not chat:
        return Prompt(f"line {n}", [1], {"prompt": f"prompt {n}", "answer": n})
    asked = [{"role": "user", "content": f"prompt {n}"}]
    conversation = Conversation(f"line {n}", asked)
    return Prompt(f"line {n}", [1], {"messages": asked, "answer": n}, conversation)


def test_extra_parameters_are_given_by_name(task):
    seen = []

    def reward(record, texts, finish_reasons, step, other=3):
        seen.append((record["answer"], texts, finish_reasons, step, other))
        return [0, 1]

    task.reward = reward
    call = Task("a_reward_task:reward")
    assert list(call.rewards([group_of(prompt_of(1), "a", "b")], 5, Limits())) == [[0, 1]]
    assert seen == [(1, ["a", "b"], ["stop", "length"], 5, 3)]


@pytest.mark.parametrize("chat", [False, True])
def test_a_function_of_a_whole_step_is_called_as_trl_does(task, chat):
    def reward(prompts, completions, answer, completion_ids, **more):
        assert len(prompts) == len(completions) == len(completion_ids) == 5
        assert more["step"] == 5 and more["finish_reasons"][1] == "length"
        if chat:
            assert prompts[0] == [{"role": "user", "content": "prompt 1"}]
            assert completions[0] == [{"role": "assistant", "content": "a"}]
        else:
            assert prompts[0] == "prompt 1" and completions[0] == "a"
        return [None if x == 2 else 10 * x for x in answer]

    task.reward = reward
    texts = {1: "ab", 2: "c", 3: "de"}
    groups = [group_of(prompt_of(n, chat), *texts[n]) for n in texts]
    found = list(Task("a_reward_task:reward").rewards(groups, 5, Limits()))
    assert str(found) == "[[10.0, 10.0], [nan], [30.0, 30.0]]"
    task.reward = lambda completions, **_: [1]
    found = list(Task("a_reward_task:reward").rewards(groups, 5, Limits()))
    assert all("returned 1 rewards for 5 completions for line 1 and the other prompts" in str(x) for x in found)  # fmt: skip


def test_an_async_function_is_called_for_all_prompts_at_the_same_time(task):
    """Each call waits for the others; the one that fails, and those that hang, are named."""
    waiting = []

    async def reward(record, texts):
        waiting.append(record["answer"])
        while len(waiting) < 4:
            await asyncio.sleep(0)
        if record["answer"] == 2:
            sys.exit(1)
        if record["answer"] == 3:
            await asyncio.sleep(60)
        if record["answer"] == 4:
            time.sleep(0 if not CAN_INTERRUPT else 60)
        return [record["answer"]]

    task.reward = reward
    groups = [group_of(prompt_of(n), "a") for n in (1, 2, 3, 4)]
    found = list(Task("a_reward_task:reward").rewards(groups, 1, Limits(0.3)))
    assert found[0] == [1]
    assert "called sys.exit(1) for line 2" in str(found[1])
    assert "took more than 0.3 s (--reward-timeout) for line 3" in str(found[2])
    if CAN_INTERRUPT:
        assert "took more than 0.3 s (--reward-timeout) for line 4" in str(found[3])
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_async_function_in_a_notebook(task):
    """A loop is running there."""

    async def reward(record, texts):
        await asyncio.sleep(0)
        return [2.0]

    async def cell():
        return rewards("a")

    task.reward = reward
    assert asyncio.run(cell()) == [2.0]


def test_the_sum_of_several_rewards():
    nan = math.nan
    found = weighted_sum([[1.0, nan, nan], [10.0, 20.0, nan]], (0.5, 2.0))
    assert str(found.tolist()) == "[20.5, 40.0, nan]"


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
    # a prompt has one completion in a validation
    assert {m["val_reward"] for m in metrics(run) if "val_reward" in m} == {None}
    assert progress(metrics(run), "val_reward", 3) == Progress(None, 0)


def test_a_step_without_any_reward_ends_the_run(folder, tmp_path, task):
    task.reward = lambda record, texts: [None] * len(texts)
    with pytest.raises(UserError, match=r"step 1: no completion has a reward: .* returned None"):
        reinforce(config_of(folder, tmp_path), SILENT)
    task.reward = FAILURES["raised ZeroDivisionError"]
    with pytest.raises(UserError, match=r"step 1: no completion has a reward: .* raised Zero"):
        reinforce(config_of(folder, tmp_path, name="skip", reward_errors="skip"), SILENT)


def test_several_rewards_are_weighted_and_logged(folder, tmp_path, task):
    task.short = lambda prompts, completions, **_: [None if "x" in x else -len(x) for x in completions]  # fmt: skip
    names = ("a_reward_task:reward", "a_reward_task:short")
    run = reinforce(config_of(folder, tmp_path, task=names, reward_weights=(2.0, 0.1)), SILENT)
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    for x in rows:
        own = x["rewards"]
        assert own["reward"] == good({}, [x["completion"]])[0]
        assert own["short"] == (None if "x" in x["completion"] else -len(x["completion"]))
        assert abs(x["reward"] - 2 * own["reward"] - 0.1 * (own["short"] or 0)) < 1e-12
    for m in (m for m in metrics(run) if "loss" in m):
        own = [x["rewards"] for x in rows if x["step"] == m["step"]]
        for name in ("reward", "short"):
            values = [x[name] for x in own if x[name] is not None]
            assert abs(m[f"rewards/{name}"] - sum(values) / len(values)) < 1e-12
    page = (run / "report.html").read_text()
    assert "Rewards of the tasks" in page and "Turns" not in page
    more = ["--resume", "--steps", "4", "--allow-change", "steps"]
    assert main(["--out", str(tmp_path), "--name", "run", *more]) == 0, "the name is enough"
