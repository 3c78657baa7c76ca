"""The threads of the BLAS library behind NumPy's matrix products: how many there are, and how many
are fastest now.

The number of threads decides how a product is divided, and so the order of its sums: a product on 2
threads differs from the same product on 1 thread in the last bits of some elements. With the same
number its bits are the same every time. A run therefore records the number and keeps it when it
resumes (training/start.py). A run that has measured the number measures again once it has run for
a while, and when its steps become slower (ThreadWatch).
"""

import contextlib
import math
import os
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from .errors import UserError

VARIABLES = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}  # they set the number
SECONDS = 0.5  # of measuring, and at least one round
OPERATIONS = 4e8  # in one round on one number of threads: about 10 ms
WIDEST = 4096  # of the matrices that are measured
WORTH = 1.05  # fewer threads are preferred up to this factor: the machine may have other work
SLOWER = 1.5  # of steps, and of products: then the number is measured again, and changed
PAUSE = 20.0  # seconds between measurements, at least


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int | None:
    """Return the number of threads in use; None if threadpoolctl does not know NumPy's BLAS
    library."""
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    return max((library["num_threads"] for library in libraries), default=None)


def use_threads(number: int | None) -> contextlib.AbstractContextManager:
    """Inside, matrix products use this number of threads. None: as many as now."""
    if number is None:
        return contextlib.nullcontext()
    return threadpool_limits(number, "blas")


def in_environment() -> bool:
    """Return True if an environment variable sets the number."""
    return bool(VARIABLES & os.environ.keys())


def choose_threads(asked: int | None, rows: int, width: int, hidden: int, most: int) -> int | None:
    """Return `asked` if it is given, else what the environment says, else fastest_threads. None:
    the number cannot be set.

    Raises UserError if `asked` is more than the cores, or if this BLAS cannot set the number.
    """
    in_use = threads()
    if asked is not None and in_use is None:
        raise UserError(
            "--blas-threads is not supported by the BLAS library of this NumPy: omit it"
        )
    if asked is not None and asked > cores():
        raise UserError(
            f"--blas-threads {asked} is more than the {cores()} cores that this process may use: "
            "give fewer"
        )
    if asked is not None or in_use is None:
        return asked
    if in_environment():
        return in_use
    return fastest_threads(rows, width, hidden, most)


def fastest_threads(
    rows: int, width: int, hidden: int, most: int, in_use: int | None = None
) -> int:
    """Return the number of threads, of 1, 2, 4, ..., most, with which products of a training step
    are fastest now.

    rows: tokens in a forward pass.
    in_use: the number that stays unless another is SLOWER times as fast.
    width, hidden: of the model and its MLP. Takes about SECONDS; other processes that use the
    machine at the same time count.
    """
    width = min(width, WIDEST)
    hidden = min(hidden, WIDEST)
    rows = max(1, min(rows, int(OPERATIONS / (4 * width * hidden))))
    x, up, down = (
        np.ones(shape, np.float32) for shape in ((rows, width), (hidden, width), (width, hidden))
    )

    def products() -> None:
        h = x @ up.T
        np.maximum(h, 0, out=h)  # on one thread, while the others wait, as in a step
        h @ down.T

    return _fastest(products, most, in_use)


class ThreadWatch:
    """The number of threads of a run that has measured it: measured again PAUSE after the start,
    and when steps become slower, because other programs may use the cores by then.

    rows, width, hidden, most: as of fastest_threads.
    """

    def __init__(self, number: int, rows: int, width: int, hidden: int, most: int):
        self.number = number
        self.shape = (rows, width, hidden, most)
        self.measured_at = time.perf_counter()
        self.again = True  # also without slower steps: the machine may have become busy before
        self.fastest = float("inf")
        self.seconds: list[float] = []

    def after_step(self, seconds: float) -> bool:
        """Return whether another number of threads is in use now. seconds: of a step, per token."""
        self.seconds = [*self.seconds[-2:], seconds]
        recent = sorted(self.seconds)[len(self.seconds) // 2]
        self.fastest = min(self.fastest, recent)
        is_due = self.again or recent > SLOWER * self.fastest
        if not is_due or time.perf_counter() - self.measured_at < PAUSE:
            return False
        number = fastest_threads(*self.shape, self.number)
        changed = number != self.number
        self.number = number
        self.again = False
        self.fastest = recent
        if changed:
            self.seconds = []
            self.fastest = float("inf")
            threadpool_limits(number, "blas")
        self.measured_at = time.perf_counter()
        return changed


def _fastest(work: Callable[[], object], most: int, in_use: int | None = None) -> int:
    numbers = [n for n in (2**i for i in range(most.bit_length())) if n < most] + [most]
    seconds = dict.fromkeys(numbers, 0.0)
    if len(numbers) == 1:
        return most
    for number in numbers:  # the first call on a number of threads may start them
        with use_threads(number):
            work()
    end = time.perf_counter() + SECONDS
    while True:  # each number in turn, so that other load on the machine slows all of them alike
        for number in numbers:
            with use_threads(number):
                start = time.perf_counter()
                work()
                seconds[number] += time.perf_counter() - start
        if time.perf_counter() > end:
            break
    least = min(seconds.values())
    if in_use is not None and seconds.get(in_use, math.inf) <= SLOWER * least:
        return in_use
    return next(n for n in numbers if seconds[n] <= WORTH * least)
