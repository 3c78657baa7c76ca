"""Simulated versions of functions that exist on GPUs only, such as those of
kernels/primitives/ptx.py."""

from collections.abc import Callable
from typing import NamedTuple

INTRINSICS: dict = {}
WARPGROUP = 128  # threads that issue a product together on compute capability 9.0


class Waiting(NamedTuple):
    """A request of a thread that waits for more than its warp."""

    function: Callable
    collective: int  # WARPGROUP, or 0: polled until it returns True


def simulates(intrinsic, collective: bool | int = False, polled: bool = False, last: bool = False):
    """Decorator: register what the simulator runs where a kernel calls `intrinsic`, a function that
    exists on GPUs only.

    default          f(thread, site, *args) -> value, for one thread. thread.load and thread.store
                     check and record accesses, thread.load_registers and thread.store_registers
                     those to the first elements of a local array, thread.load_elements and
                     thread.store_elements those to neighbours elsewhere; thread.state is a dict for
                     state between calls, such as the copies in flight of a cp.async.
    collective=True  f(threads, sites, args) -> values, once for the 32 lanes of a warp after all
                     have called it; each argument and the result have one entry per lane. For a
                     tensor-core mma or an ldmatrix. collective=WARPGROUP: the same for the 128
                     threads of four warps.
    polled=True      f(thread, site, *args) -> bool: may the thread resume? The scheduler calls it
                     until it returns True; other threads and copies (engines.py) change the answer.
    last=True        with collective=True: run it when no other thread can run, as if what the warp waits for took long.
    """

    def register(f):
        # Python's TypeError for missing arguments shows this name
        f.__qualname__ = intrinsic.__name__
        f.last = last
        if polled or collective == WARPGROUP:
            INTRINSICS[intrinsic] = (Waiting(f, 0 if polled else WARPGROUP), True)
        else:
            INTRINSICS[intrinsic] = (f, collective)
        return f

    return register
