"""Requests that have ended leave nothing behind: no memory, no objects, no blocks."""

import pytest
from checks import only_all
from many_requests import grown, measure
from twins import DEVICE

from xtrain.serving.scheduler import Scheduler


@pytest.mark.parametrize("n", [500, pytest.param(20_000, marks=[pytest.mark.slow, only_all])])
def test_requests_leave_nothing_behind(n):
    engine, first, last, reasons = measure(n, DEVICE)
    assert grown(first, last) is None, f"{first}\n{last}"
    assert last.requests >= n and engine.reused_tokens > 10 * n
    assert reasons["length"] > n / 3 and reasons["cancelled"] > n / 8 and not reasons[None]


def test_a_leak_is_found(monkeypatch):
    """The measure is no good if it does not see one small object per request."""
    kept, end = [], Scheduler._end
    leak = lambda self, request, reason: (kept.append([request]), end(self, request, reason))
    monkeypatch.setattr(Scheduler, "_end", leak)
    _, first, last, _ = measure(500, DEVICE)
    assert "has grown" in grown(first, last)
