"""One engine used by several threads, finalizers in the middle of a step, and Ctrl-C while other threads compute.

Only the engine's public interface is used, so the tests hold for any scheduling inside.
"""

import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from twins import random_model, small

from xtrain import Engine
from xtrain.serving import engine as engine_module

SERVING = str(Path(engine_module.__file__).parent)
CONFIG = small(head_dim=16, n_layers=1, max_seq_len=512)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
SECONDS = 60  # until a thread counts as blocked


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, device="cpu")


pytestmark = pytest.mark.usefixtures("switch_often")


def make(model, max_batch=3):
    return Engine(model, max_batch, 64, batch_invariant=True)


def alone(model, prompts, *args, **options):
    """-> the answers of an engine that no other thread uses"""
    return make(model).generate(prompts, *args, **options)


def in_threads(*functions):
    """Run the functions in one thread each. Raises what the first of them that failed raised."""
    failed = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread waits forever"
    if failed:
        raise failed[0]


def check_all_slots_are_free(served, max_batch=3):
    """max_batch new requests are admitted together, in one step."""
    before = served.trace[-1].number if served.trace else -1
    served.generate([[1]] * max_batch, 2)
    first = next(step for step in served.trace if step.number > before)
    assert len(first.admitted) == max_batch


# ----------------------------------------------------------------------------- several threads
def test_every_thread_gets_its_own_answers(model):
    served = make(model)
    work = [
        [dict(prompts=PROMPTS[: 1 + (n + k) % 4], max_new_tokens=2 + (3 * n + k) % 9,
              temperature=1.5 * (k % 2), seed=[10 * n + k + i for i in range(1 + (n + k) % 4)])
         for k in range(10)]
        for n in range(4)
    ]  # fmt: skip
    expected = [[alone(model, **call) for call in calls] for calls in work]
    answers = [[] for _ in work]

    def client(n):
        for call in work[n]:
            answers[n].append(served.generate(**call))

    in_threads(*[lambda n=n: client(n) for n in range(4)])
    assert answers == expected
    assert all(c.reason == "length" for calls in answers for call in calls for c in call)
    ended = [request_id for step in served.trace for request_id, _ in step.ended]
    assert sorted(ended) == list(range(sum(len(c["prompts"]) for calls in work for c in calls)))
    check_all_slots_are_free(served)


def test_threads_take_turns(model):
    """A thread that computes a long answer does not keep another one waiting until it has ended."""
    served = Engine(model, 2, batch_invariant=True)
    long = served.stream([[1, 2]], 450)
    next(long)
    finished_first = []

    def short():
        served.generate([[3]], 5)
        finished_first.append(long.completions[0].reason is None)

    in_threads(lambda: list(long), short)
    assert finished_first == [True]
    assert long.completions == Engine(model, 1, batch_invariant=True).generate([[1, 2]], 450)


def test_another_thread_closes_a_stream(model):
    served, (expected,) = Engine(model, 2, batch_invariant=True), alone(model, [[7, 8]], 20)
    closed, other = served.stream([[1, 2], [3], [4]], 450), served.stream([[7, 8]], 20)
    started, seen, lengths = threading.Event(), [], []

    def read():
        for token in closed:
            seen.append(token)
            started.set()

    def close():
        assert started.wait(SECONDS)
        closed.close()
        lengths.extend(len(c) for c in closed.completions)

    in_threads(read, close, lambda: list(other))
    assert [c.reason for c in closed.completions] == ["cancelled"] * 3
    for i, (completion, length) in enumerate(zip(closed.completions, lengths, strict=True)):
        # A step that was running may have appended one more token. The reader may be behind by any number of them.
        assert len(completion) - length in (0, 1)
        read_tokens = [token for number, token in seen if number == i]
        assert read_tokens == completion[: len(read_tokens)]
    assert other.completions == [expected]
    check_all_slots_are_free(served, 2)


# ----------------------------------------------------------------------------- in the middle of a step
def call_at_line(number, function):
    """-> (a trace function that calls `function` before line `number` that runs in xtrain/serving, the count of lines)"""
    count = [0]

    def watch(frame, event, _):
        if not frame.f_code.co_filename.startswith(SERVING):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number:
                function()
        return watch

    return watch, count


def closed_at_line(model, number, how):
    """Close one stream before line `number` of another one's run. -> lines in total"""
    served = make(model)
    forgotten, kept = served.stream([[1, 2], [5]], 30), served.stream([[3], [4, 5]], 3)
    next(forgotten)
    close = lambda: forgotten.close()
    watch, count = call_at_line(number, close if how == "here" else lambda: in_threads(close))
    before = sys.gettrace()
    try:
        sys.settrace(watch)
        list(kept)
    finally:
        sys.settrace(before)
    if not number:
        forgotten.close()
    assert kept.completions == alone(model, [[3], [4, 5]], 3), number
    assert [c.reason for c in forgotten.completions] == ["cancelled"] * 2
    check_all_slots_are_free(served)
    return count[0]


@pytest.mark.parametrize("how", ["here", "in another thread"])
def test_cancelling_between_any_two_statements(model, how):
    """As a finalizer does, which may run in any thread and inside a step of that thread: it must not wait for the step."""
    total = closed_at_line(model, 0, how)
    assert total > 200
    for number in range(1 + (how == "here"), total, 37):
        closed_at_line(model, number, how)


# ----------------------------------------------------------------------------- Ctrl-C
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")
def test_ctrl_c_at_random_moments_leaves_the_engine_to_other_threads(model):
    """The signal arrives at any bytecode, also while the main thread takes or releases a lock."""
    served, draw = make(model, 2), random.Random(0)
    expected = alone(model, PROMPTS, 6, 1.5, seed=[1, 2, 3, 4])
    ended, interrupts, rounds = False, [0], [0]

    def other():
        while not ended:
            assert served.generate(PROMPTS, 6, 1.5, seed=[1, 2, 3, 4]) == expected
            rounds[0] += 1

    def interrupt(*_):
        interrupts[0] += 1
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)

    def main():
        nonlocal ended
        until = time.monotonic() + 2
        try:
            while time.monotonic() < until or not rounds[0]:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 6e-3))
                    assert served.generate([[9, 8]], 3) == alone(model, [[9, 8]], 3)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            ended = True

    thread = threading.Thread(target=lambda: in_threads(other), daemon=True)
    failed = []
    hook, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_value)
    try:
        thread.start()
        main()
        thread.join(SECONDS)
    finally:
        signal.signal(signal.SIGALRM, before)
        threading.excepthook = hook
    assert not failed and not thread.is_alive() and interrupts[0] > 10 and rounds[0]
    check_all_slots_are_free(served, 2)
