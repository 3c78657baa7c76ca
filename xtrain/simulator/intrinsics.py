"""What the simulator runs for functions that exist on GPUs only, such as those of kernels/_ptx.py."""

from typing import NamedTuple

INTRINSICS: dict = {}
WARPGROUP = 128  # threads that issue a product together on compute capability 9.0


class Waiting(NamedTuple):
    """What a thread asks for that waits for more than its warp."""

    function: object
    collective: int  # WARPGROUP, or 0: asked again and again until it says yes


def simulates(intrinsic, collective: bool | int = False, polled: bool = False):
    """Decorator: what the simulator runs where a kernel calls `intrinsic`, a function that exists on GPUs only.

    By itself        f(thread, site, *args) -> value, for one thread. thread.load and thread.store
                     check and record accesses; thread.state is a dict to keep things in, such as
                     the copies in flight of a cp.async.
    collective=True  f(threads, sites, args) -> values, once for the 32 lanes of a warp after all
                     have called it; each argument and the result have an entry per lane. For a
                     tensor-core mma, an ldmatrix. collective=WARPGROUP: the same for the 128
                     threads of four warps.
    polled=True      f(thread, site, *args) -> may the thread go on? Asked until it says True; what
                     another thread or a copy (engines.py) does in between may change the answer.
    """

    def register(f):
        f.__qualname__ = intrinsic.__name__  # Python's complaint about missing arguments names it
        if polled or collective == WARPGROUP:
            INTRINSICS[intrinsic] = (Waiting(f, 0 if polled else WARPGROUP), True)
        else:
            INTRINSICS[intrinsic] = (f, collective)
        return f

    return register
