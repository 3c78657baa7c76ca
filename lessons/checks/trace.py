"""The memory accesses of a kernel, as recorded by the simulator.

    trace = traced(kernel, grid, block, *args)
    trace.accesses                    list of Access, in the order in which the simulator ran them
    trace.traffic("x_NC")             32-byte sectors that the warps requested, and the bytes that the threads used

The hardware handles the accesses of a warp together: the 32 lanes of one instruction need as many transactions as
there are different 32-byte sectors among their addresses. Here an instruction is a position in the source, and the k-th
access of a lane at this position belongs to the k-th access of the other lanes. This is correct for kernels whose lanes
take the same path. Two reads of the same element in one line, as in x[i] * x[i], count as one instruction, as they do
for a compiler.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xtrain import simulator
from xtrain.simulator.observers import ATOMIC, WRITE, Observer, observe
from xtrain.simulator.performance import SECTOR, passes, sectors
from xtrain.simulator.recording import parameters, width


class Access(NamedTuple):
    """One access of one thread to one element. index: flat index of the element in its array.

    turn: number of earlier accesses of this thread at this position in the source.
    launch: 0 for the first traced kernel, 1 for the second, ...
    """

    array: str
    kind: str  # "global" | "shared"
    write: bool
    block: tuple[int, int, int]
    thread: int  # position in the block
    index: int
    bytes: int
    line: int
    turn: int
    launch: int = 0
    column: int = 0  # of the position in its line


class Traffic(NamedTuple):
    """requests: warp instructions. sectors: 32-byte sectors that they touch. wanted: bytes that the threads use."""

    requests: int
    sectors: int
    wanted: int

    @property
    def moved(self) -> int:
        return self.sectors * SECTOR

    @property
    def efficiency(self) -> float:
        """Bytes used over bytes moved: 1.0 means fully coalesced."""
        return self.wanted / self.moved if self.sectors else 1.0


class Trace:
    def __init__(self, accesses: list[Access]):
        self.accesses = accesses

    def of(
        self, array: str | None = None, write: bool | None = None, kind="global"
    ) -> list[Access]:
        """The accesses to one array (None: to all arrays); write selects only writes or only reads."""
        return [
            a
            for a in self.accesses
            if a.kind == kind
            and (array is None or a.array == array)
            and (write is None or a.write == write)
        ]

    def requests(self, array=None, write=None, kind="global") -> list[list[Access]]:
        """Accesses grouped as in the hardware: one list per warp, instruction and turn."""
        groups = defaultdict(list)
        for a in self.of(array, write, kind):
            line = a.launch, a.array, a.block, a.thread // 32, a.line, a.write, a.turn
            groups[line, a.column].append(a)
        once = {}
        for (line, _), group in groups.items():
            once.setdefault((line, tuple((a.thread, a.index) for a in group)), group)
        return list(once.values())

    def traffic(self, array=None, write=None) -> Traffic:
        """Global-memory sectors that the warps request, ignoring caches."""
        requests = self.requests(array, write)
        moved = sum(sectors(a.index * a.bytes for a in r) for r in requests)
        wanted = sum(a.bytes for r in requests for a in r)
        return Traffic(len(requests), moved, wanted)

    def bank_conflicts(self, array=None) -> list[int]:
        """For every warp access to shared memory: the number of passes that bank conflicts require. 1: no conflict."""
        ways = []
        for request in self.requests(array, None, "shared"):
            ways.append(passes(a.index * a.bytes // 4 for a in request))
        return ways


def traced(kernel, grid, block, *args, shared: int = 0) -> Trace:
    """Run a kernel in the simulator (arrays change in place) and record every access to global and shared memory.

    A global array has the name of the kernel's parameter, also inside device functions.
    """
    with tracing() as trace:
        simulator.run(kernel, grid, block, *args, shared=shared)
    return trace


class _Tracer(Observer):
    """Notes every access to global and shared memory."""

    def __init__(self):
        self.accesses, self.turns, self.widths, self.launches = [], defaultdict(int), {}, {}

    def access(self, thread, array, k, site, how, value):
        if array.memory.kind == "local" or how == ATOMIC:
            return
        launch, size, name = thread.block.launch, array.dtype.itemsize, site.what
        if launch not in self.launches:
            self.launches[launch] = len(self.launches), parameters(launch)
        number, arguments = self.launches[launch]
        if array.memory.kind == "global":
            name, k = _place(arguments, array.flat.__array_interface__["data"][0] + k * size, size)
        if site not in self.widths:
            self.widths[site] = width(thread.instruction, size)
        write = how == WRITE
        position = tuple(int(i) for i in thread.block.position)
        who = (number, position, thread.index, site.line, site.column, name, write)
        turn = self.turns[who] // self.widths[site]
        self.turns[who] += 1
        what = (name, array.memory.kind, write, position, thread.index, int(k), size)
        self.accesses.append(Access(*what, site.line, turn, number, site.column))


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """Record the accesses of all kernels that run in the simulator in this context, e.g. through a launcher with SimArrays."""
    with observe(_Tracer()) as tracer:
        yield Trace(tracer.accesses)


def _place(parameters, address, size):
    """-> name of the parameter that contains this byte, index of the element in it"""
    for low, high, place in parameters:
        if low <= address < high:
            return place.name, (address - low) // size
    return "constant", 0


def owners(trace: Trace, array: str, shape, what="thread") -> np.ndarray:
    """-> integer array of `shape`: the thread (or block) that wrote each element last; -1 if it was not written."""
    owner = np.full(int(np.prod(shape)), -1)
    for a in trace.of(array, write=True):
        owner[a.index] = a.thread if what == "thread" else a.block[0]
    return owner.reshape(shape)
