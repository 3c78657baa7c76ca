"""Run a @cuda.jit kernel on the CPU, and find what a GPU would not tell.

    from xtrain import simulator
    simulator.run(kernel, grid, block, *arrays_and_scalars, shared=0)

Every CUDA thread is a Python generator over the kernel's own source. The threads of a block run one
after the other, each up to its next barrier, shuffle or vote; blocks run one after the other.
Numbers have the types that Numba gives them on a GPU (_simulator/scalars.py). A KernelError names
kernel, block, threads, file and lines of

    RaceError           two threads touch one element of shared or global memory, at least one
                        writes without an atomic, and neither a barrier nor syncwarp stands
                        between; or threads of two blocks do; or two kernels that overlap
    UninitializedError  a read of shared or local memory that was never written, or, before the
                        next barrier, is written by another thread: then both lines are named
    OutOfBoundsError    an index past the end, or below zero, on any axis
    DeadlockError       a barrier or a warp function that some threads do not reach: who waits where
    AsyncError          a copy or product that runs beside the threads (TMA, wgmma) is used, or what it
                        uses is changed, before it is known to be done; a descriptor that reads
                        something else than a tile (_simulator/engines.py, kernels/_hopper_twins.py)
    CollectiveError     a warp function in a block that is not whole warps, a mask without the
                        calling lane, a shuffle from a lane that takes no part
    KernelError         anything else: too much shared memory, a Python exception in the kernel

A launcher runs its kernel here when it is given a SimArray: `rmsnorm_fwd(sim(x), sim(w), eps)`.
That, not a mode or a flag, is what chooses the simulator.

A kernel that Numba would not compile is a KernelError too, where that shows in its source, in the
types that meet or in its grid and block: a shape of a shared array that must be computed, a list,
an atomic on uint8 (_simulator/refused.py, thread.py).

Limits: threads change only where they wait, so one that spins until another one writes would never
end; a while loop of more than a million turns is a KernelError. Unwritten global memory is not
tracked (launchers fill it with NaN). The schedule is always the same; races are found by
bookkeeping, not by luck, and _simulator/memory.py says which orders it understands; a lock that
threads of one block hand on by atomics is not among them, so what it guards is reported as a race.
A variable that gets different types in different branches keeps each of them; Numba would take the
wider one. Float functions are rounded correctly; a GPU's are off by a few units in the last place.
"""

import numpy as np

from .block import Launch
from .errors import (
    AsyncError,
    CollectiveError,
    DeadlockError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    Site,
    UninitializedError,
)
from .intrinsics import simulates
from .thread import Dim3

__all__ = [
    "AsyncError",
    "CollectiveError",
    "DeadlockError",
    "KernelError",
    "OutOfBoundsError",
    "RaceError",
    "SimArray",
    "Site",
    "UninitializedError",
    "run",
    "sim",
    "simulates",
]


class SimArray(np.ndarray):
    """A NumPy array whose type tells launchers: run the kernel in the simulator. Views stay SimArrays."""


def sim(a) -> SimArray:
    """A copy of a, C-contiguous."""
    return np.array(a, order="C", copy=True).view(SimArray)


def run(kernel, grid, block, *args, shared: int = 0, overlap: bool = False) -> None:
    """Run `grid` blocks of `block` threads (ints or tuples of up to three).

    kernel: what @cuda.jit returned. args: NumPy arrays, changed in place, and scalars; a Python int
    is an int64, a Python float a float64. shared: bytes of dynamic shared memory.
    overlap: on a GPU it may begin before the kernel run last has ended; what it does too early is a RaceError.
    Raises KernelError (see above); the arrays then hold what was written so far.
    """
    with np.errstate(all="ignore"):
        Launch(kernel, _dim3(grid), _dim3(block), args, shared, overlap).run()


def _dim3(n) -> Dim3:
    n = tuple(n) if np.iterable(n) else (n,)
    if not 1 <= len(n) <= 3 or not all(isinstance(x, (int, np.integer)) and x > 0 for x in n):
        got = ", ".join(map(str, n))
        raise ValueError(f"a grid or a block is 1 to 3 positive numbers, integers, got ({got})")
    return Dim3(*(*n, 1, 1)[:3])
