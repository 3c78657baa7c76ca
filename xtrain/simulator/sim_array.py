"""SimArray, the array that selects the simulator; launchers ask for its type."""

import numpy as np

from .unwritten import mark_written


class SimArray(np.ndarray):
    """A NumPy array for which launchers run the kernel in the simulator. Views are SimArrays
    too."""

    bf16_as_bits = True  # memory.is_bits

    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        mark_written(self[index] if isinstance(index, slice) else self)


def sim(a) -> SimArray:
    """Return a C-contiguous copy of `a` as a SimArray."""
    return np.array(a, order="C", copy=True).view(SimArray)
