"""Running one kernel: `simulator.run`, and the arrays that select the simulator."""

import numpy as np

from .block import Launch
from .thread import Dim3


class SimArray(np.ndarray):
    """A NumPy array for which launchers run the kernel in the simulator. Views are SimArrays too."""


def sim(a) -> SimArray:
    """Return a C-contiguous copy of `a` as a SimArray."""
    return np.array(a, order="C", copy=True).view(SimArray)


def run(kernel, grid, block, *args, shared: int = 0, overlap: bool = False) -> None:
    """Run `grid` blocks of `block` threads in the simulator.

    kernel: a function compiled with @cuda.jit. grid, block: an int or a tuple of up to three ints.
    args: NumPy arrays, which the kernel changes in place, and scalars; a Python int becomes int64, a
    Python float float64. shared: bytes of dynamic shared memory.
    overlap: the kernel may start before the previous kernel of the stream has ended (programmatic
    dependent launch); an access that would then be too early is a RaceError.

    Raises KernelError or a subclass (see the module's docstring); the arrays then hold what was
    written up to the error.
    """
    with np.errstate(all="ignore"):
        Launch(kernel, _dim3(grid), _dim3(block), args, shared, overlap).run()


def _dim3(n) -> Dim3:
    n = tuple(n) if np.iterable(n) else (n,)
    if not 1 <= len(n) <= 3 or not all(isinstance(x, (int, np.integer)) and x > 0 for x in n):
        got = ", ".join(map(str, n))
        raise ValueError(f"a grid or a block must be 1 to 3 positive integers, got ({got})")
    return Dim3(*(*n, 1, 1)[:3])
