"""When a rank counts as hanging. That all end when one does: tests/test_ddp.py."""

import time
from types import SimpleNamespace

from xtrain.parallel.watchdog import Watchdog
from xtrain.training.loop import Loop
from xtrain.training.single_process import ALONE


def test_a_watchdog_looks_from_the_first_beat_until_it_rests(monkeypatch):
    barks = []
    monkeypatch.setattr(Watchdog, "_bark", lambda dog: barks.append(time.monotonic()))
    with Watchdog(0.05, ALONE, lambda: 1) as dog:
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
    """Many a beat while it is written, so that a short --watchdog does not take it for a hang."""
    beats, until = [], time.monotonic() + 0.5

    def busy(seconds):
        time.sleep(min(seconds, max(0, until - time.monotonic())))
        return time.monotonic() < until

    run = SimpleNamespace(ranks=ALONE, beat=lambda: beats.append(time.monotonic()))
    Loop.settle(SimpleNamespace(run=run, writer=SimpleNamespace(busy=busy)))
    assert len(beats) >= 3
