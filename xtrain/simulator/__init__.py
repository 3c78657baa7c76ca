"""Run a @cuda.jit kernel on the CPU, and report the mistakes that a GPU does not report.

    from xtrain import simulator
    simulator.run(kernel, grid, block, *arrays_and_scalars, shared=0)

Every CUDA thread is a Python generator over the kernel's own source. The threads of a block run one
after the other, each up to its next barrier, shuffle or vote; blocks run one after the other.
Numbers have the types that Numba gives them on a GPU (scalars.py). A KernelError names the kernel,
block, threads, file and lines. Its subclasses:

    RaceError           a data race: two threads access the same element of shared or global memory,
                        at least one writes without an atomic, and neither a barrier nor syncwarp
                        orders the accesses; or threads of two blocks do; or two overlapping kernels
    UninitializedError  a read of shared or local memory that was never written. If another thread
                        writes the element before the next barrier, the report names both lines
    OutOfBoundsError    an index that is negative or past the end, on any axis
    DeadlockError       a barrier or a warp function that some threads do not reach: the report says
                        where each group of threads waits
    AsyncError          an asynchronous copy or product (TMA, wgmma) whose result is used, or whose
                        operands are changed, before it is known to be complete; a descriptor that
                        does not describe a tile (engines.py, kernels/primitives/hopper_simulated.py)
    CollectiveError     a warp function in a block that is not whole warps, a mask without the
                        calling lane, a shuffle from a lane that does not take part
    KernelError         anything else: too much shared memory, a Python exception in the kernel

A launcher runs its kernel here if its arguments are SimArrays: `rmsnorm_fwd(sim(x), sim(w), eps)`.
The array type selects the simulator; there is no mode and no flag.

A kernel that Numba would not compile is a KernelError too, if its source, its types or its launch
configuration show it: a shared array whose shape is computed, a list, an atomic on uint8
(refused.py, thread.py).

Limits
- The simulator switches between threads only where they wait. A thread that spins until another
  thread writes would never end, so a while loop of more than a million iterations is a KernelError.
- Unwritten global memory is not tracked; launchers fill it with NaN.
- The schedule is always the same. Races are found by bookkeeping, not by chance; memory.py lists the
  orders that it recognizes. A lock that threads of one block pass on with atomics is not one of
  them: accesses that such a lock protects are reported as races.
- A variable that gets different types in different branches keeps each of them; Numba would use the
  wider one.
- Float functions are correctly rounded; a GPU's results differ in the last few bits.
"""

import numpy as np

from .block import Launch
from .errors import (
    KINDS,
    AsyncError,
    CollectiveError,
    DeadlockError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    Site,
    UninitializedError,
    reported_kinds,
)
from .intrinsics import simulates
from .memory import poisoned
from .thread import Dim3
from .unwritten import mark_unwritten, mark_written

__all__ = [
    "KINDS",
    "AsyncError",
    "CollectiveError",
    "DeadlockError",
    "KernelError",
    "OutOfBoundsError",
    "RaceError",
    "SimArray",
    "Site",
    "UninitializedError",
    "check",
    "empty",
    "mark_unwritten",
    "mark_written",
    "run",
    "sim",
    "simulates",
]


class SimArray(np.ndarray):
    """A NumPy array for which launchers run the kernel in the simulator. Views are SimArrays too."""

    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        mark_written(self[index] if isinstance(index, slice) else self)


def sim(a) -> SimArray:
    """Return a C-contiguous copy of `a` as a SimArray."""
    return np.array(a, order="C", copy=True).view(SimArray)


def empty(shape, dtype=np.float64) -> SimArray:
    """A SimArray that nothing has written, as cuda.device_array makes it. A kernel that uses an element before one has
    been written is reported (`unwritten_global`).
    """
    flat = poisoned(int(np.prod(shape)), np.dtype(dtype))
    return mark_unwritten(flat.view(SimArray).reshape(shape))


def run(
    kernel, grid, block, *args, shared: int = 0, overlap: bool = False, allow=(), enable=()
) -> None:
    """Run `grid` blocks of `block` threads in the simulator.

    kernel: a function compiled with @cuda.jit. grid, block: an int or a tuple of up to three ints.
    args: NumPy arrays, which the kernel changes in place, and scalars; a Python int becomes int64, a
    Python float float64. shared: bytes of dynamic shared memory.
    overlap: the kernel may start before the previous kernel of the stream has ended (programmatic
    dependent launch); an access that would then be too early is a RaceError.
    allow: kinds of findings (KINDS) that are not reported; enable: kinds that are, although they are not by default.

    Raises the first finding, an error or a warning: KernelError or a subclass (see the module's
    docstring); the arrays then hold what was written up to the error.
    """
    with np.errstate(all="ignore"):
        reported = reported_kinds(allow, enable)
        Launch(kernel, _dim3(grid), _dim3(block), args, shared, overlap, reported).run()


def check(
    kernel, grid, block, *args, shared: int = 0, overlap: bool = False, allow=(), enable=()
) -> list[KernelError]:
    """Run a kernel as `run` does, but to its end, and return all findings. Each has `kind`, `severity` ("error" or "warning"),
    `sites` and `count`, the number of times that it occurred at these places.

    After a finding the run continues as a GPU might: a read out of bounds gives an arbitrary number, such a write
    is dropped, threads that have exited count as arrived. A deadlock or an exception in the kernel ends the run.
    """
    with np.errstate(all="ignore"):
        try:
            reported = reported_kinds(allow, enable)
            launch = Launch(
                kernel, _dim3(grid), _dim3(block), args, shared, overlap, reported, True
            )
        except KernelError as error:  # Numba would not compile or launch it
            return [error]
        return launch.findings()


def _dim3(n) -> Dim3:
    n = tuple(n) if np.iterable(n) else (n,)
    if not 1 <= len(n) <= 3 or not all(isinstance(x, (int, np.integer)) and x > 0 for x in n):
        got = ", ".join(map(str, n))
        raise ValueError(f"a grid or a block must be 1 to 3 positive integers, got ({got})")
    return Dim3(*(*n, 1, 1)[:3])
