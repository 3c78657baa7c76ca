"""When a rank counts as silent. tests/parallel/test_ddp.py tests stopped processes."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain.parallel import heartbeats
from xtrain.parallel.heartbeats import LEAVES, RUNS, Heartbeats


class Line:
    """The messages of two ranks, in one process: what MPI's nonblocking calls do."""

    def __init__(self):
        self.sent = [[], []]

    def rank(self, rank):
        send = lambda message, to, tag: self.sent[to].append(message.copy()) or Done()
        receive = lambda message, of, tag: Arriving(self.sent[rank], message)
        comm = SimpleNamespace(Isend=send, Irecv=receive)
        return SimpleNamespace(rank=rank, world=2, failed=comm)


class Done:
    def Test(self):
        return True


class Arriving:
    def __init__(self, sent, message):
        self.sent = sent
        self.message = message

    def Test(self):
        if self.sent:
            self.message[:] = self.sent.pop(0)
            return True
        return False


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.setattr(heartbeats, "SECONDS", 0.01)
    return []


def watching(line, rank, reports, limit=0.1):
    thread = Heartbeats(line.rank(rank), lambda *about: reports.append(about), limit)
    thread.start()
    return thread


def test_a_silent_rank_is_reported(reports):
    line = Line()
    thread = watching(line, 0, reports)
    until = time.monotonic() + 10
    while not reports and time.monotonic() < until:
        time.sleep(0.01)
    assert set(reports) == {(1, 0.1)}
    line.sent[0] += [np.full(1, RUNS, np.uint8), np.full(1, LEAVES, np.uint8)]
    thread.stop()


def test_ranks_leave_together(reports):
    line = Line()
    pair = [watching(line, rank, reports, limit=5) for rank in (0, 1)]
    leaving = threading.Thread(target=pair[0].stop)
    leaving.start()
    time.sleep(0.1)
    assert leaving.is_alive() and not reports
    pair[1].stop()
    leaving.join(5)
    assert not leaving.is_alive()


def test_time_in_which_this_process_did_not_run_does_not_count(reports, monkeypatch):
    clock = lambda: 1000.0 * next(ticks)
    ticks = iter(range(10**9))
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    line = Line()
    thread = watching(line, 0, reports, limit=3600)
    time.sleep(0.2)
    assert not reports and thread.silence < 10
    line.sent[0].append(np.full(1, LEAVES, np.uint8))
    thread.stop()


@pytest.mark.parametrize("watchdog, limit", [(0, 0), (1, 60), (100, 60), (600, 300)])
def test_the_limit_belongs_to_the_watchdog(watchdog, limit):
    thread = Heartbeats(Line().rank(0), lambda *about: None, 600)
    thread.set_watchdog(watchdog)
    assert thread.limit == limit
