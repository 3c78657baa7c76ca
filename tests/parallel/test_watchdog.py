"""When a rank counts as hanging. tests/parallel/test_ddp.py tests that all ranks end then."""

import time
from types import SimpleNamespace

import pytest

from xtrain.parallel import command
from xtrain.parallel.watchdog import AbortOnError, Watchdog, print_error
from xtrain.training.loop import Loop
from xtrain.training.single_process import SINGLE_PROCESS


def test_a_watchdog_watches_from_the_first_beat_until_it_is_stopped(monkeypatch):
    reports = []
    report = lambda self: reports.append(time.monotonic())
    monkeypatch.setattr(Watchdog, "_report_and_exit", report)
    with Watchdog(0.05, SINGLE_PROCESS, lambda: 1) as watchdog:
        time.sleep(0.15)
        assert not reports, "loading a checkpoint is not a step"
        watchdog.beat()
        time.sleep(0.15)
        assert reports
        watchdog.beat()
        watchdog.stop()
        reports.clear()
        time.sleep(0.15)
    assert not reports


def test_an_mpi_library_without_threads(capsys, monkeypatch):
    """There are no heartbeats then, which is said once."""
    monkeypatch.delenv("PMI_FD", raising=False)
    for rank in (0, 1):
        with AbortOnError(SimpleNamespace(rank=rank, world=2, threads=False), "name") as guard:
            assert guard.heartbeats is None
        said = capsys.readouterr().err
        assert ("one thread only" in said) == (rank == 0)


def test_a_message_of_a_thread_while_options_are_parsed(capsys):
    """What a parser prints is kept until all ranks have parsed; the job may end before."""

    class Ended(Exception):
        pass

    def parse():
        print_error("the process of rank 0 has not run")
        raise Ended

    with pytest.raises(Ended):
        command._parse("name", parse, SimpleNamespace(ranks=SINGLE_PROCESS))
    assert capsys.readouterr().err == "the process of rank 0 has not run\n"


def test_waiting_for_a_checkpoint_is_progress():
    """There are beats while it is written, so that a short --watchdog does not take it for a hang."""
    beats, until = [], time.monotonic() + 0.5

    def busy(seconds):
        time.sleep(min(seconds, max(0, until - time.monotonic())))
        return time.monotonic() < until

    parallel = SimpleNamespace(report_progress=lambda: beats.append(time.monotonic()))
    run = SimpleNamespace(ranks=SINGLE_PROCESS, parallel=parallel)
    Loop.wait_for_writer(SimpleNamespace(run=run, writer=SimpleNamespace(busy=busy)))
    assert len(beats) >= 3
