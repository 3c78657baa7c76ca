"""Every kernel of a lesson's solution compiles to float32 for compute capability 7.5 (a free Colab T4)."""

import re
import types as python_types

import pytest
import test_lessons
from numba import types
from offline import check_float32, nvvm, ptx_for

from xtrain import lesson
from xtrain.kernels.runtime import launch as _launch

__all__ = ["nvvm"]


def launched(number, monkeypatch):
    """-> [(kernel, argument types)] of the kernels that the checks of a lesson run"""
    found = {}

    running = lesson.load_checks("running")
    run = running.simulator.run

    def recorded(kernel, grid, block, *args, shared=0):
        scalars = _launch.kernel_arguments(args)
        found[kernel, tuple(map(_launch.numba_type, scalars))] = None
        return run(kernel, grid, block, *args, shared=shared)

    monkeypatch.setattr(running, "simulator", python_types.SimpleNamespace(run=recorded))
    solved = test_lessons.work(number, test_lessons.SOLVED)
    for e in lesson._exercises_of(number):
        assert lesson.verdict(e.number, getattr(solved, e.name), steps=False).passed
    return list(found)


def test_kernels_of_a_lesson_are_found(monkeypatch):
    assert len({kernel for kernel, _ in launched("1", monkeypatch)}) >= 3


@pytest.mark.parametrize("number", test_lessons.NUMBERS)
def test_solutions_compile_to_float32(number, nvvm, monkeypatch):
    for kernel, signature in launched(number, monkeypatch):
        for cc, ptx in ptx_for(monkeypatch, kernel, signature, [(7, 5)]).items():
            check_float32(kernel, cc, ptx)


def timed_only(number):
    """-> the kernels of a lesson that bench/bench_lessons.py times in addition to the exercises"""
    path = lesson.lesson_file(number)
    text = lesson.tagged(path.read_text(encoding="utf-8"), "imports", "bench")
    for name, value in vars(lesson.load(text, f"timed_of_{path.name}")).items():
        if name.startswith("make_") and name.endswith("_kernel"):
            yield from (value(size) for size in (8, 16))
        elif name.endswith("_kernel") and hasattr(value, "py_func"):
            yield value


def test_kernels_that_are_only_timed_compile(nvvm, monkeypatch):
    """They are matrix products; all take three matrices."""
    kernels = list(timed_only("4"))
    assert len(kernels) == 3
    for kernel in kernels:
        for cc, ptx in ptx_for(monkeypatch, kernel, (types.float32[:, ::1],) * 3, [(7, 5)]).items():
            check_float32(kernel, cc, ptx)


def test_listings_of_lesson_42_are_what_the_compiler_makes(nvvm, monkeypatch):
    counted = lesson.load_checks("lesson_42").counted
    text = test_lessons.text_of("42")
    kernels = lesson.load(lesson.tagged(text, "imports", "listing"), "listings.py")
    array = types.Array(types.float32, 1, "C")
    for name in ("careless", "careful"):
        shown = re.search(rf'^{name.upper()} = """\n(.*?)"""', text, re.M | re.S)[1]
        kernel = getattr(kernels, f"{name}_kernel")
        [ptx] = ptx_for(monkeypatch, kernel, (array, array), [(9, 0)]).values()
        assert counted(shown) == counted(ptx[ptx.index("\n{") :])
