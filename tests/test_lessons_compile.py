"""Every kernel that a lesson's solution holds compiles for the cards from a free Colab T4 to today's, in float32."""

import re
import types as python_types

import pytest
import test_compile
import test_lessons
from test_compile import nvvm  # noqa: F401

from xtrain import lesson
from xtrain._lesson import attempt
from xtrain.kernels import _launch


def launched(number, monkeypatch):
    """-> {(kernel, argument types)} of what the judges of a lesson run"""
    found = {}

    def noting(run):
        def noted(kernel, grid, block, *args, shared=0):
            scalars = [_launch._scalar(a) for a in args]
            found[kernel, tuple(map(_launch.numba_type, scalars))] = None
            return run(kernel, grid, block, *args, shared=shared)

        return noted

    simulator = python_types.SimpleNamespace(run=noting(attempt.simulator.run))
    monkeypatch.setattr(attempt, "simulator", simulator)
    monkeypatch.setattr(attempt, "traced", noting(attempt.traced))
    solved = test_lessons.work(number, test_lessons.SOLVED)
    for e in lesson._exercises_of(number):
        assert lesson.verdict(e.number, getattr(solved, e.name)).passed
    return list(found)


@pytest.mark.parametrize("number", test_lessons.NUMBERS)
def test_solutions_compile_to_float32(number, nvvm, monkeypatch):  # noqa: F811
    import numba.cuda.dispatcher

    cc = (7, 5)
    here = python_types.SimpleNamespace(compute_capability=cc)
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: here)
    for kernel, signature in launched(number, monkeypatch):
        ptx, name = test_compile.ptx_of(kernel, signature, cc), kernel.py_func.__name__
        if ".target sm_75" not in ptx:
            pytest.skip(f"this Numba does not know compute capability {cc}")
        wide = [line.strip() for line in ptx.splitlines() if re.search(r"\.f64\b", line)]
        assert not wide, f"{name} computes in float64: {wide[0]}"
