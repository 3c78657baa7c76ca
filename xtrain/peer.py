"""Collectives between the GPUs of one machine without using their multiprocessors: the copy engines move the gradients.

NCCL's kernels sit on 24 of an H200's 132 multiprocessors while they run. cuBLAS lays out a matrix product for all 132, so one
that meets NCCL needs a second round and takes up to twice as long: what overlap hides, the matrix products lose again. The
copy engines of a GPU are separate hardware; they read the memory of its neighbours over NVLink while every
multiprocessor computes.

With n ranks, a piece of the arena cut into n parts, and every rank able to read the others' arrays:

    reduce_scatter    barrier: the piece is complete everywhere
                      rank r copies part r of each neighbour's gradients to itself, adds it to its own:  n - 1 copies, n - 1 sums
    all_gather        barrier: every rank's own part is final
                      rank r copies part s from rank s, for all s:  n - 1 copies
    all_reduce        the one, then the other

Each sum is made once, by its owner, in one order, and copied: all ranks hold the same bits by construction. The barrier is
NCCL's smallest all-reduce, one element, on the communication stream; so all of it can be captured in a CUDA graph.

What could go wrong, and why it does not. A neighbour reads my gradients while I change them: I write part s of a piece only
after the second barrier, which s passes when it has read my part s; and `join` ends with a barrier, so that nobody starts a new
backward while he is still being read.
"""

from typing import Any

from .communicator import NcclCollectives, Ranks
from .config import UserError
from .device import Array, cupy
from .kernels._launch import empty
from .kernels.cast import cast_into
from .kernels.elementwise import add_into

STEP = (
    1 << 22
)  # elements copied before they are added: 16 MiB pass through memory, whatever the piece


class CopyCollectives(NcclCollectives):
    """NcclCollectives on the GPUs of one machine that can read each other's memory. bf16: gradients travel in bf16 and are
    added in float32."""

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        super().__init__(ranks, arena, bf16)
        # its kernels are short and others wait for them: they go first
        self.stream = cupy().cuda.Stream(non_blocking=True, priority=-1)
        self.wire = self.grads if self.half is None else self.half  # what neighbours read
        self.arrived = empty(self.wire, STEP)
        self.widened = None if self.half is None else empty(self.grads, STEP)
        self.flag = empty(self.grads, 1)
        self.flag.fill(0)
        self.shared: dict[int, list[int]] = {}  # address of an array -> that of each rank's
        self.opened: dict[tuple[int, bytes], int] = {}
        weights = arena.weights if arena.half is None else arena.half
        for array in (self.wire, weights):
            self._share(array)
        self.pending = False  # has anything been copied since the last join

    def close(self) -> None:
        runtime = cupy().cuda.runtime
        for address in self.opened.values():
            runtime.ipcCloseMemHandle(address)
        self.ranks.total([0.0])  # nobody frees memory that another still has open
        super().close()

    def part(self, a: int, b: int, rank: int | None = None) -> slice:
        """A rank's part of [a, b), whatever its length: in whole 16 bytes, the last ones shorter. None: this rank's."""
        rank, world = self.ranks.rank if rank is None else rank, self.ranks.world
        n = -(-(b - a) // (4 * world)) * 4
        return slice(min(b, a + rank * n), min(b, a + (rank + 1) * n))

    def all_reduce(self, a: int, b: int) -> None:
        with self._side() as stream:
            self._reduce(a, b, stream)
            own = self.part(a, b)
            if self.half is not None:
                cast_into(self.half[own], self.grads[own])
            self._gather(self.wire, a, b, stream)
            self._widen(slice(a, b))

    def reduce_scatter(self, a: int, b: int) -> None:
        with self._side() as stream:
            self._reduce(a, b, stream)

    def all_gather(self, array: Array, a: int, b: int) -> None:
        if array.data.ptr not in self.shared:  # small, or not there for long
            super().all_gather(array, a, b)
            return
        with self._side() as stream:
            self._gather(array, a, b, stream)

    def join(self) -> None:
        if self.pending:
            with self._side() as stream:
                self._barrier(stream)
            self.pending = False
        super().join()

    def _reduce(self, a, b, stream):
        """grads[own part of [a, b)] += what the neighbours have there."""
        self._gradients(a, b)  # with bf16, rounded into `half`
        self._barrier(stream)
        own = self.part(a, b)
        for first in range(own.start, own.stop, STEP):
            n = min(STEP, own.stop - first)
            for rank in self._neighbours():
                self._copy(self.arrived, 0, self.wire, first, n, rank, stream)
                x = self.arrived[:n]
                if self.half is not None:
                    cast_into(self.widened[:n], x)
                    x = self.widened[:n]
                add_into(self.grads[first : first + n], x)

    def _gather(self, array, a, b, stream):
        """array[a:b]: every part from its owner."""
        self._barrier(stream)
        for rank in self._neighbours():
            part = self.part(a, b, rank)
            n = part.stop - part.start
            self._copy(array, part.start, array, part.start, n, rank, stream)

    def _neighbours(self):
        """All others, each rank beginning with another one: no neighbour is read by everybody at once."""
        me, world = self.ranks.rank, self.ranks.world
        return [(me + i) % world for i in range(1, world)]

    def _copy(self, to, start, array, first, n, rank, stream):
        """to[start : start + n] = array[first : first + n] of that rank"""
        if not n:
            return
        source = self.shared[array.data.ptr][rank] + first * array.itemsize
        runtime, target = cupy().cuda.runtime, to.data.ptr + start * to.itemsize
        runtime.memcpyAsync(target, source, n * to.itemsize, runtime.memcpyDeviceToDevice, stream)

    def _barrier(self, stream):
        """What follows on this stream waits until every rank's stream has come here."""
        self.nccl.allReduce(
            self.flag.data.ptr, self.flag.data.ptr, 1, self.types[4], self.sum, stream
        )
        self.pending = True

    def _share(self, array):
        """Exchange the addresses of an array: every rank opens the neighbours' memory."""
        runtime, address = cupy().cuda.runtime, array.data.ptr
        base = allocation(address)
        everybody = self.ranks.everybody((runtime.ipcGetMemHandle(base), address - base))
        addresses = []
        for rank, (handle, offset) in enumerate(everybody):
            if rank == self.ranks.rank:
                addresses.append(address)
                continue
            if (rank, handle) not in self.opened:  # two arrays may lie in one allocation
                self.opened[rank, handle] = runtime.ipcOpenMemHandle(handle)
            addresses.append(self.opened[rank, handle] + offset)
        self.shared[address] = addresses


def allocation(address: int) -> int:
    """The start of the memory that the driver gave CuPy's pool, of which the array at this address is a part."""
    from cuda.bindings import driver

    error, base, _ = driver.cuMemGetAddressRange(address)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver does not know the memory at {address:#x}: {error.name}")
    return int(base)


def can_copy(ranks: Ranks) -> str:
    """Why the GPUs of these ranks cannot read each other's memory; "" when they can. The same answer on every rank."""
    if any(ranks.everybody(ranks.local_world != ranks.world)):
        return "the ranks are on several machines"
    return next(filter(None, ranks.everybody(_cannot_reach(ranks))), "")


def _cannot_reach(ranks):
    runtime = cupy().cuda.runtime
    if runtime.getDeviceCount() < ranks.local_world:
        return "a rank sees its own GPU alone"
    here = runtime.getDevice()
    others = [d for d in range(ranks.local_world) if d != here]
    if not all(runtime.deviceCanAccessPeer(here, d) for d in others):
        return "its GPUs are not connected (nvidia-smi topo -p2p r)"
    return ""


def gpu_collectives(ranks: Ranks, arena: Any, bf16: bool, how: str) -> NcclCollectives:
    """how: "nccl", "copy", or "auto": copy where it is possible. Raises UserError when "copy" is not."""
    reason = "" if how == "nccl" else can_copy(ranks)
    if how == "copy" and reason:
        raise UserError(f"--transport copy cannot be had: {reason}; use --transport nccl")
    return (NcclCollectives if how == "nccl" or reason else CopyCollectives)(ranks, arena, bf16)
