"""One CUDA thread: everything a kernel can ask of `numba.cuda` that does not wait for other threads.

source.py rewrites a kernel so that `cuda.threadIdx.x` becomes `_t.threadIdx.x`, `cuda.atomic.add(...)` becomes
`_t.atomic_add(...)`, `a[i]` becomes `_t.load(a, i, site)`, where _t is the running Thread.
"""

import math
import operator

import numpy as np

from . import memory as mem
from .errors import KernelError, OutOfBoundsError, RaceError, UninitializedError
from .memory import Array, Mark, Memory, add_reader, dense_array, in_order, poisoned
from .scalars import TWINS, Int8, Int32, Integer, UInt32, UInt64, scalar_type, unify

STATIC_LIMIT = 48 * 1024  # bytes of cuda.shared.array(shape, ...) in one block, on every GPU


class Dim3:
    __slots__ = ("x", "y", "z")

    def __init__(self, x, y, z):
        self.x, self.y, self.z = Int32(x), Int32(y), Int32(z)

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"


class Thread:
    """Made by simulator.run for every thread of every block.

    block: the running Block; index: position in the block; lane, warp: index % 32, index // 32
    mark: this thread since its last synchronisation; seen: what it knows of each lane of its warp (memory.py)
    state: for the simulated functions of intrinsics, which may keep here what they need between calls
    """

    __slots__ = (
        "block", "blockDim", "blockIdx", "fence", "generator", "gridDim", "index", "lane", "laneid", "mark",
        "reply", "request", "seen", "state", "threadIdx", "warp",
    )  # fmt: skip
    warpsize = Int32(32)

    def __init__(self, block, index, position):
        self.block, self.index, self.threadIdx = block, index, position
        self.warp, self.lane = divmod(index, 32)
        self.laneid = Int32(self.lane)
        self.blockIdx, self.blockDim, self.gridDim = block.position, block.launch.block, block.launch.grid
        self.seen = [0] * 32
        self.seen[self.lane] = 1
        self.mark = Mark(self, block.epoch, 1)
        self.generator = self.request = self.reply = self.fence = None
        self.state = {}

    def __str__(self):
        flat = self.blockDim.y == self.blockDim.z == 1
        return f"thread {self.index}" if flat else f"thread {self.threadIdx}"

    # ------------------------------------------------------------------------- memory
    def load(self, a, index, site):
        """a[index]"""
        if type(a) is tuple:
            return a[index]
        k = a.locate(index)
        if k is None:
            return self._view(a, index, site)
        memory, mark = a.memory, self.mark
        if a.span != 1:
            self._wide(a, k, index, site, self._record_read)
        else:
            key, epoch = k + a.bias, mark.epoch
            record = memory.writes.get(key)
            if record is None:
                if memory.kind != "global" and key not in memory.atomics:
                    self._uninitialized(a, index, site)
            elif record[0] is not mark and record[0].epoch == epoch:
                self._check(record, "wrote", "read", a, index, site)
            if memory.watched:
                self._check(memory.atomics.get(key), "changed atomically", "read", a, index, site)
                self._check(memory.old_writes.get(key), "wrote", "read", a, index, site)
                self._check(memory.old_atomics.get(key), "changed atomically", "read", a, index, site)
            record = memory.reads.get(key)
            if record is None or record[0].epoch != epoch:
                memory.reads[key] = (mark, site)
            elif record[0] is not mark and len(record) != 4:
                add_reader(memory.reads, key, mark, site)
        value = a.flat[k]
        return value if a.wrap is None else a.wrap(value)
