"""Running one kernel: `simulator.run` and `simulator.check`, and the arrays that select the
simulator."""

from collections.abc import Callable

import numpy as np

from .arrays import poisoned
from .errors import KernelError
from .launch import Launch
from .observers import observe
from .orders import orders_of
from .processes import checked
from .sim_array import SimArray
from .stepper import Stepper
from .thread import Dim3
from .unwritten import mark_unwritten


def empty(shape, dtype=np.float64) -> SimArray:
    """Return a SimArray that nothing has written, as cuda.device_array makes it. A kernel that uses
    an element before one has been written is reported (`unwritten_global`)."""
    flat = poisoned(int(np.prod(shape)), np.dtype(dtype))
    return mark_unwritten(flat.view(SimArray).reshape(shape))


def run(
    kernel,
    grid,
    block,
    *args,
    shared: int = 0,
    overlap: bool = False,
    allow=(),
    enable=(),
    warn: Callable[[KernelError], object] | None = None,
    raised=(),
    processes: int = 1,
    resident: int | None = None,
    cooperative: int | None = None,
    schedules: int = 1,
    seed: int | None = None,
) -> None:
    """Run `grid` blocks of `block` threads in the simulator.

    kernel: a function compiled with @cuda.jit. grid, block: an int or a tuple of up to three ints.
    args: NumPy arrays, which the kernel changes in place, and scalars; a Python int becomes int64,
    a Python float float64. shared: bytes of dynamic shared memory.
    overlap: the kernel may start before the previous kernel of the stream has ended (programmatic
    dependent launch); an access that would then be too early is a RaceError.
    allow: kinds of findings (KINDS) that are not reported, or "kind:array" for one array of the
    kernel; the comment `# simulate: allow KIND because REASON` does so for its line. enable: kinds
    that are reported, although they are not by default.
    resident: so many blocks run at a time, as on a GPU that has room for no more; a block that
    waits for one that cannot start is a DeadlockError. None: every block may start.
    cooperative: a grid of more blocks that calls grid.sync() is a KernelError.
    warn: called with every finding that is only a warning, after the run; without it a warning is
    raised, too. raised: kinds of warnings that are raised in any case.
    processes: run the blocks in so many processes if they are independent and take long enough.
    Results and findings are the same as in one process, which runs the blocks again if one has a
    finding, waits for another block, or accesses an element that a block of another process
    changes, also by an atomic (processes.py).
    schedules: run the launch in so many orders of its blocks, warps and lanes (schedules.py). What
    the usual order leaves in the arrays remains; a finding of another order names its seed.
    seed: run the order of this seed instead of the usual one.

    Raises the first finding: KernelError or a subclass (see the module's docstring); the arrays
    then hold what was written up to the error.
    """
    launched(
        kernel,
        grid,
        block,
        *args,
        shared=shared,
        overlap=overlap,
        allow=allow,
        enable=enable,
        warn=warn,
        raised=raised,
        processes=processes,
        resident=resident,
        cooperative=cooperative,
        schedules=schedules,
        seed=seed,
    )


def launched(
    kernel,
    grid,
    block,
    *args,
    shared=0,
    overlap=False,
    allow=(),
    enable=(),
    warn=None,
    raised=(),
    processes=1,
    resident=None,
    cooperative=None,
    schedules=1,
    seed=None,
) -> Launch:
    """`run`, which returns the launch that has run."""
    orders = orders_of(schedules, seed)
    reported = orders.reported(allow, enable)

    def make(schedule=None):
        launch = Launch(
            kernel, _dim3(grid), _dim3(block), args, shared, overlap, reported, schedule=schedule
        )
        launch.resident = resident
        launch.keeps_warnings = warn is not None
        launch.raised = frozenset(raised)
        launch.cooperative = cooperative
        launch.processes = checked(processes)
        return launch

    with np.errstate(all="ignore"):
        launch = make(orders.usual)
        try:
            orders.run(launch, make)
        finally:
            for finding in launch.found.values():
                if warn is not None and finding.severity == "warning":
                    warn(finding)
    return launch


def check(
    kernel,
    grid,
    block,
    *args,
    shared: int = 0,
    overlap: bool = False,
    allow=(),
    enable=(),
    processes: int = 1,
    schedules: int = 1,
    seed: int | None = None,
) -> list[KernelError]:
    """Run a kernel as `run` does, but to its end, and return all findings. Each has `kind`,
    `severity` ("error" or "warning"), `sites` and `count`, the number of times that it occurred at
    these places.

    After a finding the run continues as a GPU might: a read out of bounds gives an arbitrary
    number, such a write is dropped, threads that have exited count as arrived. A deadlock or an
    exception in the kernel ends the run. schedules, seed: as for `run`.
    """
    orders = orders_of(schedules, seed)
    reported = orders.reported(allow, enable)

    def make(schedule=None):
        return Launch(
            kernel,
            _dim3(grid),
            _dim3(block),
            args,
            shared,
            overlap,
            reported,
            True,
            schedule=schedule,
        )

    with np.errstate(all="ignore"):
        try:
            launch = make(orders.usual)
        except KernelError as error:  # Numba would not compile or launch it
            return [error]
        launch.processes = checked(processes)
        return launch.findings(lambda: orders.run(launch, make))


def record(
    kernel,
    grid,
    block,
    *args,
    shared: int = 0,
    overlap: bool = False,
    allow=(),
    enable=(),
    of: tuple[int, ...] = (0, 0, 0),
) -> Stepper:
    """Run a kernel as `run` does, and keep what each thread of one block did. of: the position of
    the block.

    A KernelError is not raised: it is in the result's `error`, and the result is about the block in
    which it happened.
    """
    stepper = Stepper(of)
    try:
        with observe(stepper):
            run(
                kernel,
                grid,
                block,
                *args,
                shared=shared,
                overlap=overlap,
                allow=allow,
                enable=enable,
            )
    except KernelError as error:
        stepper.error = error
    return stepper


def _dim3(n) -> Dim3:
    n = tuple(n) if np.iterable(n) else (n,)
    if not 1 <= len(n) <= 3 or not all(isinstance(x, (int, np.integer)) and x > 0 for x in n):
        got = ", ".join(map(str, n))
        raise ValueError(f"a grid or a block must be 1 to 3 positive integers, got ({got})")
    return Dim3(*(*n, 1, 1)[:3])
