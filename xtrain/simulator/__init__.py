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

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import SimArray, run, sim
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
    from .host import simulate
    from .intrinsics import simulates

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
    "simulate",
    "simulates",
]
_HOME = {
    "simulate": "host",
    "simulates": "intrinsics",
    **dict.fromkeys(("SimArray", "run", "sim"), "api"),
}


# A name is imported at its first use: Numba takes half a second, which pytest without --simulate-cuda does not need.
def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
