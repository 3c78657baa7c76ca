"""When a rank counts as hanging. test_ddp.py checks that all ranks end when one hangs."""

import time
from types import SimpleNamespace

from xtrain.parallel.watchdog import Watchdog
from xtrain.training.loop import Loop
from xtrain.training.single_process import SINGLE_PROCESS


def test_a_watchdog_looks_from_the_first_beat_until_it_rests(monkeypatch):
    barks = []
    monkeypatch.setattr(Watchdog, "_bark", lambda dog: barks.append(time.monotonic()))
    with Watchdog(0.05, SINGLE_PROCESS, lambda: 1) as dog:
        time.sleep(0.15)
        assert not barks, "a checkpoint that is loaded is no step"
        dog.beat()
        time.sleep(0.15)
        assert barks
        dog.beat()
        dog.rest()
        barks.clear()
        time.sleep(0.15)
    assert not barks


def test_waiting_for_a_checkpoint_is_progress():
    """The run beats while a checkpoint is written, so a short --watchdog does not report a hang."""
    beats, until = [], time.monotonic() + 0.5

    def busy(seconds):
        time.sleep(min(seconds, max(0, until - time.monotonic())))
        return time.monotonic() < until

    run = SimpleNamespace(ranks=SINGLE_PROCESS, beat=lambda: beats.append(time.monotonic()))
    Loop.wait_for_writer(SimpleNamespace(run=run, writer=SimpleNamespace(busy=busy)))
    assert len(beats) >= 3
