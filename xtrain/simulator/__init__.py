"""Run a @cuda.jit kernel on the CPU, and report the mistakes that a GPU does not report.

    from xtrain import simulator
    simulator.run(kernel, grid, block, *arrays_and_scalars, shared=0)      raises the first finding
    simulator.check(kernel, grid, block, *arrays_and_scalars, shared=0)    runs to the end, returns all findings

Every CUDA thread is a Python generator over the kernel's own source. The threads of a block run one
after the other, each up to its next barrier, shuffle or vote, and so do blocks. Numbers have the
types that Numba gives them on a GPU (scalars.py). A finding is a KernelError: it names the kernel,
block, threads, file and lines. Its subclasses:

    RaceError           a data race: two threads access the same element of shared or global memory,
                        at least one writes and at least one without an atomic, and nothing orders
                        the accesses (the memory model: releases.py); or two overlapping kernels do
    UninitializedError  a value that depends on memory that was never written reaches a store to
                        global memory, an atomic, a branch, an index or a warp function (unset.py). If
                        another thread writes the element before the next barrier, the report names
                        both lines
    OutOfBoundsError    an index past the end, on any axis; a computed negative index
    DeadlockError       a barrier, a warp function or a waiting loop that some threads do not get past:
                        the report says where each group of threads waits
    AsyncError          an asynchronous copy or product (TMA, wgmma) whose result is used, or whose
                        operands are changed, before it is known to be complete; a descriptor that
                        does not describe a tile (engines.py,
                        kernels/primitives/hopper_simulated.py)
    StreamError         two operations on streams, or an operation and the host, access the same bytes
                        in no order (streams.py)
    CollectiveError     a warp function in a block that is not whole warps, a mask without the
                        calling lane, a shuffle from a lane that does not take part
    KernelError         anything else: too much shared memory, an integer divided by zero, a Python
                        exception in the kernel

Each finding has a `kind`, a key of KINDS, and a `severity`. A "warning" is defined on current GPUs
but rarely meant: several threads that write the same value to one element, a computed negative
index, which Numba counts from the end, threads that have exited before a barrier.
`allow={"same_value_race"}` accepts a kind, `allow={"race:total"}` for one array, the comment
`# simulate: allow race because ...` at one line. `enable={"integer_overflow"}` adds a kind that is
off by default.

A launcher runs its kernel here if its arguments are SimArrays: `rmsnorm_fwd(sim(x), sim(w), eps)`.
The array type selects the simulator; there is no mode and no flag.

`record` does the same and keeps what each thread of a block did, to be stepped through as a page
(recording.py, stepper.py).

A kernel that Numba would not compile is a KernelError too, if its source, its types or its launch
configuration show it: a shared array whose shape is computed, a list, an atomic on uint8
(refused.py, thread.py). lessons/simulator.md lists what runs, what is refused and what is not
modelled.

It needs NumPy alone: `from xtrain.simulator import cuda, types` is its own @cuda.jit (own_cuda.py).

Limits
- Threads take turns where they wait, and every hundred iterations in a loop that accesses memory.
  A loop in which nothing changes, or of more than 100 million iterations, is a KernelError.
- Unwritten global memory is tracked in the arrays of `simulator.empty` and, inside `simulate`, of
  `cuda.device_array`; launchers fill it with NaN.
- One order of blocks and threads runs, unless `schedules=` asks for more. Races are found by
  bookkeeping, not by chance.
- A variable that gets different types in different branches keeps each of them; Numba would use the
  wider one.
- Float functions are correctly rounded; a GPU's results differ in the last few bits.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import own_cuda as cuda
    from . import own_types as types
    from .api import check, empty, record, run
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
    )
    from .host import simulate
    from .intrinsics import simulates
    from .observers import observe
    from .sim_array import SimArray, sim
    from .stepper import Stepper
    from .streams import StreamError
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
    "Stepper",
    "StreamError",
    "UninitializedError",
    "check",
    "cuda",
    "empty",
    "mark_unwritten",
    "mark_written",
    "observe",
    "record",
    "run",
    "sim",
    "simulate",
    "simulates",
    "types",
]
_HOME = {
    "SimArray": "sim_array",
    "Stepper": "stepper",
    "StreamError": "streams",
    "observe": "observers",
    "simulate": "host",
    "simulates": "intrinsics",
    "sim": "sim_array",
    **dict.fromkeys(("check", "empty", "record", "run"), "api"),
    **dict.fromkeys(("mark_unwritten", "mark_written"), "unwritten"),
}

_MODULES = {"cuda": "own_cuda", "types": "own_types"}  # for programs that run without Numba


# A name is imported at its first use: Numba takes half a second, which pytest without
# --simulate-cuda does not need.
def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    try:
        home = importlib.import_module(f".{_HOME.get(name, 'errors')}", __name__)
    # in Numba; Python would take it for a name that is missing here
    except AttributeError as error:
        raise ImportError(str(error)) from error
    return getattr(home, name)


def __dir__():
    return sorted({*globals(), *__all__})
