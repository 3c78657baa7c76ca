"""What belongs to one thread of the host, what is fixed when a kernel is decorated, and what a long launch prints."""

import threading

import numpy as np
import pytest
from numba import cuda

from xtrain.simulator import RaceError, host, progress, run, simulate


@cuda.jit
def racy(o):
    o[0] = cuda.threadIdx.x


def launch_in_thread(**options) -> list:
    """Launch `racy` in another thread of the host -> the findings."""
    found = []

    def launch():
        with simulate(**options):
            try:
                racy[1, 4](np.zeros(1))
            except RaceError as error:
                found.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    return found


def test_the_options_of_a_thread_are_its_own():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with simulate(allow=["race"]):
            racy[1, 4](np.zeros(1))
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with simulate(), pytest.raises(RaceError):
        racy[1, 4](np.zeros(1))
    assert len(launch_in_thread()) == 1
    leave.set()
    thread.join()


def test_the_options_of_the_main_thread_hold_for_the_others():
    with simulate(allow=["race"]):
        assert launch_in_thread() == []
    assert len(launch_in_thread()) == 1


@simulate()
def test_a_declared_kernel_keeps_the_globals_of_its_declaration():
    for declared, expected in (("('void(float64[:])')", 3), ("", 5)):
        scope = {"cuda": cuda, "N": 3}
        exec(f"@cuda.jit{declared}\ndef kernel(o):\n    o[0] = N\n", scope)
        scope["N"] = 5
        o = np.zeros(1)
        scope["kernel"][1, 1](o)
        assert o[0] == expected


@simulate()
def test_a_declared_function_may_call_itself():
    @cuda.jit("int64(int64)", device=True)
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    @cuda.jit("void(int64[:])")
    def kernel(o):
        o[0] = factorial(5)

    o = np.zeros(1, np.int64)
    kernel[1, 1](o)
    assert o[0] == 120


class _Renamed:
    def launch(self): ...


def test_a_name_that_numba_has_renamed_is_told(monkeypatch):
    monkeypatch.setattr(host, "REPLACED", {_Renamed: {"launch": None, "__call__": None}})
    with pytest.warns(RuntimeWarning, match=r"_Renamed has no __call__"):
        host.start()
    host.stop()
    monkeypatch.setattr(host, "REPLACED", {_Renamed: {"launch": None, "is_fp8_supported": None}})
    host.start()
    host.stop()


@cuda.jit
def one_each(o):
    o[cuda.grid(1)] = 1


def test_a_long_launch_says_how_long(monkeypatch, capsys):
    run(one_each, 6, 2, np.zeros(12))
    assert capsys.readouterr().err == ""
    seconds = iter(
        [0.0, 0.1, 0.2, 6, 12, 18, 36, 40, 40]
    )  # two calls around the first block, one at the start
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    run(one_each, 6, 2, np.zeros(12))
    assert capsys.readouterr().err.splitlines() == [
        "simulator: one_each: 3 of 6 blocks have ended, about 12 s left",
        "simulator: one_each: 5 of 6 blocks have ended, about 7 s left",
    ]
