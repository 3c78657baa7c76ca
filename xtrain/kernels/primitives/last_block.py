"""The last of several blocks that share a task merges what the others have written.

    partial[block, ...] = ...
    if arrive_last(counters, task, blocks, last_s):
        ... = partial[:, ...]

Integers and minima do not depend on which block is the last; sums of floats must be added in the
order of the blocks. See the CUDA guide, Memory Fence Functions.
"""

import numpy as np

from ...device import Array, cupy
from ...simulator import SimArray, sim
from ..runtime.compiler import cuda, int32
from ..runtime.instead import instead
from .ptx import atomic_add_acq_rel, device
from .tma import check_device, upload

# (device, stream of the launch or the capture, name, size) -> zeros; every launch restores the
# zeros. Never freed, because CUDA graphs keep the address, and outside of any memory pool: in a
# graph's pool, an earlier graph of that pool could write to the memory.
_counters: dict = {}


def zero_counters(like: Array, n: int, name: str) -> Array:
    """Return at least n zeros, int32, on the device of `like`.

    They are for the kernels called `name` that are launched or captured on this stream. Each of
    them must leave zeros. Raises TypeError for an array of NumPy.
    """
    if isinstance(like, SimArray):
        return sim(np.zeros(n, np.int32))
    check_device(like, "zero_counters")
    n = max(1 << (n - 1).bit_length(), 1 << 12)
    device = like.device.id
    if instead.derive is None:
        return _zeros(device, n, name)
    return instead.derive(lambda _: _zeros(device, n, name), [], n, np.dtype(np.int32))


def _zeros(device, n, name):
    key = device, cupy().cuda.get_current_stream().ptr, name, n
    if key not in _counters:  # another thread may do the same: the first one's zeros stay
        _counters.setdefault(key, upload(bytes(4 * n)).view(np.int32))
    return _counters[key]


@device
def arrive_last(counters, i, used, last_s):
    """Wait for the block; return True in the last of `used` blocks that arrives.

    That block sees what the others wrote. last_s: an int32 of shared memory.
    """
    cuda.syncthreads()  # the block's writes come before thread 0's addition
    if cuda.threadIdx.x == 0:
        last_s[0] = int32(atomic_add_acq_rel(counters, i, int32(1)) == used - 1)
        if last_s[0]:
            cuda.atomic.exch(counters, i, 0)  # for the next launch; this one does not read it again
    cuda.syncthreads()
    return last_s[0] != 0
