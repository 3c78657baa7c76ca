"""Every kernel that a lesson's solution holds compiles for the cards from a free Colab T4 to today's, in float32."""

import types as python_types

import pytest
import test_lessons
from offline import check_float32, nvvm, ptx_for

from xtrain import lesson
from xtrain._lesson import attempt
from xtrain.kernels import _launch

__all__ = ["nvvm"]


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
def test_solutions_compile_to_float32(number, nvvm, monkeypatch):
    for kernel, signature in launched(number, monkeypatch):
        for cc, ptx in ptx_for(monkeypatch, kernel, signature, [(7, 5)]).items():
            check_float32(kernel, cc, ptx)
