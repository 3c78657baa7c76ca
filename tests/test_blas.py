"""Threads of NumPy's matrix products: the number is measured, asked for or given by the environment."""

import io
import time

import numpy as np
import pytest
from rich.console import Console
from runs import run

from xtrain import blas
from xtrain.errors import UserError

needs_threads = pytest.mark.skipif(blas.threads() is None, reason="the BLAS library is not known")


@pytest.fixture
def four_cores(monkeypatch):
    """A machine of four cores on which nothing else sets the number."""
    monkeypatch.setattr(blas, "cores", lambda: 4)
    for name in blas.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch, seconds):
    """A machine on which the work takes seconds[threads]; time passes only there. -> the numbers of threads that were tried"""
    clock, now, tried = [0.0], [1], []

    class Threads:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            now[0] = self.number

        def __exit__(self, *_):
            now[0] = 1

    def work():
        tried.append(now[0])
        clock[0] += seconds[now[0]]

    monkeypatch.setattr(blas, "use_threads", Threads)
    monkeypatch.setattr(blas.time, "perf_counter", lambda: clock[0])
    return work, tried


@pytest.mark.parametrize(
    "seconds, most, best",
    [
        ({1: 0.4, 2: 0.2, 4: 0.1}, 4, 4),  # nothing else runs
        ({1: 0.1, 2: 0.4, 4: 0.4}, 4, 1),  # a busy machine
        ({1: 0.4, 2: 0.2, 4: 0.198}, 4, 2),  # two more threads for 1 %
        ({1: 0.4, 2: 0.3, 4: 0.2, 6: 0.1}, 6, 6),  # not a power of two
        ({1: 0.4}, 1, 1),
    ],
)
def test_the_fastest_number(monkeypatch, seconds, most, best):
    work, tried = machine(monkeypatch, seconds)
    assert blas._fastest(work, most) == best
    assert set(tried) == (set(seconds) if most > 1 else set())


def test_measuring_is_short():
    for rows, width, hidden in ((1024, 128, 384), (8192, 768, 2048), (1, 2, 2), (100, 8192, 32768)):
        start = time.perf_counter()
        assert 1 <= blas.fastest_threads(rows, width, hidden, blas.cores()) <= blas.cores()
        assert time.perf_counter() - start < 20, "about half a second on an idle machine"


def test_the_number_in_use_stays_unless_another_is_much_faster(monkeypatch):
    for slow, best in ((0.14, 2), (0.16, 1)):
        work, _ = machine(monkeypatch, {1: 0.1, 2: slow})
        assert blas._fastest(work, 2, in_use=2) == best


def test_the_number_is_measured_again_when_steps_become_slower(monkeypatch):
    """20 seconds after the start, and then only if steps take 1.5 times as long; a jump of one step is none."""
    clock = [0.0]
    measured = []
    in_use = []
    monkeypatch.setattr(blas.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(blas, "threadpool_limits", lambda number, api: in_use.append(number))
    fastest = {"now": 2}
    monkeypatch.setattr(blas, "fastest_threads", lambda *a: measured.append(a) or fastest["now"])
    watch = blas.ThreadWatch(2, 8, 16, 32, 4)

    def steps(*seconds):
        for x in seconds:
            clock[0] += x
            if watch.after_step(x):
                yield clock[0]

    assert list(steps(*[1.0] * 19)) == [] == measured
    assert list(steps(1.0)) == [] and measured == [(8, 16, 32, 4, 2)]
    assert list(steps(*[1.0] * 40, 9.0, 1.0, 1.0, *[1.3] * 30)) == [] and len(measured) == 1
    fastest["now"] = 1
    assert len(list(steps(*[3.0] * 10))) == 1
    assert watch.number == 1 and in_use == [1] and len(measured) == 2
    assert list(steps(*[0.5] * 60)) == [] and len(measured) == 2, "faster now"


@needs_threads
def test_a_run_that_has_measured_the_number_measures_again(tmp_path, monkeypatch, four_cores):
    """Not one that was told the number, or has resumed."""
    seconds = []
    monkeypatch.setattr(blas, "fastest_threads", lambda *shape: 1)
    monkeypatch.setattr(blas.ThreadWatch, "after_step", lambda self, x: seconds.append(x) or True)
    out = io.StringIO()
    run(tmp_path, Console(file=out, width=200), steps=2, device="cpu")
    assert len(seconds) == 2 and "matrix products now use 1 of 4 cores" in out.getvalue()
    run(tmp_path, steps=4, device="cpu", resume=True, allow_change=("steps", "warmup"))
    run(tmp_path, steps=2, device="cpu", name="told", blas_threads=1)
    assert len(seconds) == 2


@needs_threads
def test_the_number_in_use():
    with blas.use_threads(1):
        assert blas.threads() == 1
        with blas.use_threads(None):
            assert blas.threads() == 1


@needs_threads
def test_one_number_of_threads_has_the_same_bits():
    """What a resumed run relies on."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((300, 200), (200, 100)))
    for number in range(1, blas.cores() + 1):
        with blas.use_threads(number):
            first = a @ b
            assert all(np.array_equal(a @ b, first) for _ in range(20))


@needs_threads
def test_what_decides(four_cores, monkeypatch):
    monkeypatch.setattr(blas, "fastest_threads", lambda *shape: 3)
    assert blas.choose_threads(None, 8, 8, 8, 4) == 3
    assert blas.choose_threads(2, 8, 8, 8, 4) == 2
    with pytest.raises(UserError, match="--blas-threads 5 is more than the 4 cores"):
        blas.choose_threads(5, 8, 8, 8, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert blas.choose_threads(None, 8, 8, 8, 4) == blas.threads()
    assert blas.choose_threads(2, 8, 8, 8, 4) == 2


def test_a_library_that_is_not_known(four_cores, monkeypatch):
    monkeypatch.setattr(blas, "threadpool_info", lambda: [{"user_api": "openmp", "num_threads": 4}])
    assert blas.choose_threads(None, 8, 8, 8, 4) is None
    with pytest.raises(UserError, match="is not supported by the BLAS library"):
        blas.choose_threads(2, 8, 8, 8, 4)
