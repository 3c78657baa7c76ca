"""Collectives between the GPUs of one machine that leave the multiprocessors alone: the copy engines move the gradients.

NCCL's kernels sit on 24 of an H200's 132 multiprocessors while they run. cuBLAS lays out a matrix product for all 132, so one
that meets NCCL needs a second round and takes up to twice as long: what overlap hides, the matrix products lose again. The
copy engines of a GPU are hardware of their own; they read a neighbour's memory over NVLink while every multiprocessor computes.

With R ranks, a piece of the arena cut into R parts, and every rank able to read and write the others' memory:

    reduce_scatter    barrier: the piece is complete everywhere
                      rank r copies part r of each neighbour's gradients to itself and adds it to its own; when the
                      multiprocessors have nothing else to do, the addition reads the neighbour's memory instead
    all_gather        barrier: nobody reads the old values any more
                      rank r copies its own part to each neighbour
    all_reduce        reduce_scatter, then rank r copies the sum to each neighbour
    join              barrier: what the neighbours copied has come

Each sum is made once, by its owner, in one order, and copied: all ranks hold the same bits by construction.

The barrier is a row of flags in each rank's memory, one per neighbour. A rank writes 1 into its flag at every neighbour,
waits until all of its own are 1, and sets them back to 0. A GPU does this by itself between two operations of a
stream (cuStreamBatchMemOp), also in a CUDA graph, where the same 1 is written at every replay. A flag may be used again once
another barrier has been passed: whoever has passed that one knows that the first was passed, and its flags set back,
everywhere. Hence three rows: two that take turns, and one for `join`, which ends every step, since a step may have an
odd number of barriers.

A neighbour reads my memory while I change it? I change gradients after `join` only, which he reaches when he has read
them. He writes into them? Only part r of a piece, which nobody but rank r needs once that piece is complete everywhere.
"""

import functools
from typing import Any

import numpy as np

from ..device import Array, cupy
from ..errors import UserError
from ..kernels.elementwise import add_into
from ..kernels.runtime.launch import empty, zeros
from .collectives import GpuCollectives, NcclCollectives
from .ranks import Ranks

STEP = 1 << 22  # elements that are copied before they are added, or that pass through the window
JOIN = 2  # the row of flags of `join`


class CopyCollectives(GpuCollectives):
    """As NcclCollectives, on the GPUs of one machine, in float32."""

    def __init__(self, ranks: Ranks, arena: Any):
        super().__init__(ranks, arena)
        self.arrived = empty(self.grads, STEP)
        self.window = empty(self.grads, STEP)  # arrays that are not shared pass through here
        self.flags = zeros(self.grads, (JOIN + 1, ranks.world), np.int32)
        self.mail = zeros(self.grads, (2, ranks.world, 4), np.float32)  # 16 bytes from each rank
        self.turn = 0  # which row of flags is next
        self.pending = False  # has there been a barrier since `join`
        self.aligned = False  # since `join`, has one been passed by whatever the ranks compute
        self.opened: dict[tuple[int, bytes], int] = {}
        self.shared: dict[int, list[int]] = {}  # an array's address -> where each rank has it
        weights = arena.weights if arena.half is None else arena.half
        for array in (self.grads, weights, self.window, self.flags, self.mail):
            self.share(array)
        cupy().cuda.Device().synchronize()  # the flags are 0 ...
        ranks.total([0.0])  # ... everywhere

    def share(self, array: Array) -> None:
        """Every rank calls this with an array of its own, which all_gather may then fill without a detour."""
        self.shared[array.data.ptr] = self._addresses(array)

    def close(self) -> None:
        """Close the neighbours' memory. Every captured graph must be gone."""
        for address in self.opened.values():
            cupy().cuda.runtime.ipcCloseMemHandle(address)
        self.ranks.total([0.0])  # nobody frees memory that another still has open

    def part(self, a: int, b: int, rank: int | None = None) -> slice:
        """A rank's part of [a, b), whatever its length: in whole 16 bytes, the last ones shorter. None: this rank's."""
        rank, world = self.ranks.rank if rank is None else rank, self.ranks.world
        n = -(-(b - a) // (4 * world)) * 4
        return slice(min(b, a + rank * n), min(b, a + (rank + 1) * n))

    # ------------------------------------------------------------------------- the collectives
    def all_reduce(self, a: int, b: int, idle: bool = False) -> None:
        with self._side() as stream:
            self._reduce(a, b, idle, stream)
            self._send(self.grads, self.part(a, b), stream)

    def reduce_scatter(self, a: int, b: int, idle: bool = False) -> None:
        with self._side() as stream:
            self._reduce(a, b, idle, stream)

    def all_gather(self, array: Array, a: int, b: int) -> None:
        with self._side() as stream:
            if array.data.ptr not in self.shared:
                self._gather_through_window(array, a, b, stream)
                return
            if not self.aligned:
                self._barrier(stream)
                self.aligned = True
            self._send(array, self.part(a, b), stream)

    def start_gather(self, own_1: Array) -> Array:
        all_R, me = empty(own_1, self.ranks.world), self.ranks.rank
        row, first = self.mail[self.turn], (self.turn * self.ranks.world + me) * 4
        self.given = own_1  # the other stream reads it later than we return
        with self._side() as stream:
            row[me, :1] = own_1
            self._send(self.mail, slice(first, first + 4), stream)
            self._barrier(stream)
            all_R[...] = row[:, 0]
        return all_R

    def gather_1(self, own_1: Array) -> Array:
        all_R = self.start_gather(own_1)
        super().join()
        self.aligned = True
        return all_R

    def join(self) -> None:
        if self.pending:
            with self._side() as stream:
                self._pass_barrier(JOIN, stream)
            self.turn, self.pending, self.aligned = 0, False, False
        super().join()

    # ------------------------------------------------------------------------- their halves
    def _reduce(self, a, b, idle, stream):
        """grads[own part of [a, b)] += what the neighbours have there."""
        self._barrier(stream)
        own, address = self.part(a, b), self.grads.data.ptr
        for first in range(own.start, own.stop, STEP):
            n = min(STEP, own.stop - first)
            for rank in self._neighbours():
                theirs = self.shared[address][rank] + first * self.grads.itemsize
                if idle:
                    x = at_address(theirs, n)
                else:
                    x = self.arrived[:n]
                    _copy(x.data.ptr, theirs, x.nbytes, stream)
                add_into(self.grads[first : first + n], x)

    def _send(self, array, part, stream):
        """array[part] to every neighbour"""
        n, start = part.stop - part.start, part.start * array.itemsize
        for rank in self._neighbours() if n > 0 else ():
            there = self.shared[array.data.ptr][rank]
            _copy(there + start, array.data.ptr + start, n * array.itemsize, stream)

    def _gather_through_window(self, array, a, b, stream):
        window = self.window.view(array.dtype)
        longest = self.part(a, b, 0)
        for first in range(0, longest.stop - longest.start, STEP):
            for rank in (self.ranks.rank, *self._neighbours()):
                part = self.part(a, b, rank)
                start = part.start + first
                n = max(0, min(STEP, part.stop - start))
                here = array[start : start + n]
                if rank == self.ranks.rank:
                    window[:n] = here
                    self._barrier(stream)
                elif n:
                    _copy(here.data.ptr, self.shared[window.data.ptr][rank], here.nbytes, stream)
            self._barrier(stream)  # the window is free again

    def _neighbours(self):
        """All others, each rank beginning with another one: nobody is read by everybody at once."""
        me, world = self.ranks.rank, self.ranks.world
        return [(me + i) % world for i in range(1, world)]

    # ------------------------------------------------------------------------- barriers and addresses
    def _barrier(self, stream):
        """What follows on this stream waits until every rank's stream has come here."""
        self._pass_barrier(self.turn, stream)
        self.turn, self.pending = 1 - self.turn, True

    def _pass_barrier(self, row, stream):
        address, width = self.flags.data.ptr, self.flags.itemsize
        flag = lambda base, rank: base + (row * self.ranks.world + rank) * width
        others = self._neighbours()
        arrive = [flag(self.shared[address][rank], self.ranks.rank) for rank in others]
        mine = [flag(address, rank) for rank in others]
        in_order = [write(x, 1) for x in arrive] + [wait(x, 1) for x in mine]
        in_order += [write(x, 0) for x in mine]
        driver = cuda_driver()
        (error,) = driver.cuStreamBatchMemOp(stream, len(in_order), in_order, 0)
        _check(driver, error, "a barrier between GPUs")

    def _addresses(self, array):
        """Where each rank has this array, as seen from here: every rank opens the neighbours' memory."""
        runtime, address = cupy().cuda.runtime, array.data.ptr
        base = allocation(address)
        everybody = self.ranks.gather((runtime.ipcGetMemHandle(base), address - base))
        addresses = []
        for rank, (handle, offset) in enumerate(everybody):
            if rank == self.ranks.rank:
                addresses.append(address)
                continue
            if (rank, handle) not in self.opened:  # two arrays may lie in one allocation
                self.opened[rank, handle] = runtime.ipcOpenMemHandle(handle)
            addresses.append(self.opened[rank, handle] + offset)
        return addresses


# ----------------------------------------------------------------------------- what CuPy does not bring
def _copy(target, source, nbytes, stream):
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)


def at_address(address: int, n: int) -> Array:
    """float32 (n,): the memory there, which may be a neighbour's, as an array."""
    cp = cupy()
    memory = cp.cuda.UnownedMemory(address, 4 * n, None, cp.cuda.Device().id)
    return cp.ndarray(n, np.float32, cp.cuda.MemoryPointer(memory, 0))


@functools.cache
def cuda_driver() -> Any:
    """cuda.bindings.driver: numba-cuda needs it as well."""
    from cuda.bindings import driver

    return driver


def write(address: int, value: int) -> Any:
    """A stream's operation: the word at this address = value."""
    return _operation("writeValue", "WRITE", address, value, 0)


def wait(address: int, value: int) -> Any:
    """A stream's operation: go on when the word at this address is the value."""
    equal = cuda_driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    return _operation("waitValue", "WAIT", address, value, int(equal))


def _operation(field, verb, address, value, flags):
    driver = cuda_driver()
    operation = driver.CUstreamBatchMemOpParams()
    kind = getattr(driver.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{verb}_VALUE_32")
    operation.operation = kind
    what = getattr(operation, field)
    what.operation, what.address = kind, driver.CUdeviceptr(address)
    what.value, what.flags = driver.cuuint32_t(value), flags
    return operation


def allocation(address: int) -> int:
    """The start of the memory that the driver gave CuPy's pool, of which the array at this address is a part."""
    driver = cuda_driver()
    error, base, _ = driver.cuMemGetAddressRange(address)
    _check(driver, error, f"the memory at {address:#x}")
    return int(base)


def _check(driver, error, what):
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what}: the CUDA driver says {error.name}")


# ----------------------------------------------------------------------------- which way
def gpu_collectives(ranks: Ranks, arena: Any, bf16: bool, how: str) -> GpuCollectives:
    """how: "nccl", "copy", or "auto": copy where it is possible. Raises UserError when "copy" is not."""
    reason = "" if how == "nccl" else why_no_copies(ranks, bf16)
    if how == "copy" and reason:
        raise UserError(f"--transport copy cannot be had: {reason}; use --transport nccl")
    if how == "nccl" or reason:
        return NcclCollectives(ranks, arena, bf16)
    return CopyCollectives(ranks, arena)


def why_no_copies(ranks: Ranks, bf16: bool = False) -> str:
    """Why copy engines cannot do it; "" when they can. The same answer on every rank."""
    if bf16:  # casting twice costs more than half the bytes save
        return "gradients that travel in bf16 are NCCL's"
    if any(ranks.gather(ranks.local_world != ranks.world)):
        return "the ranks are on several machines"
    return next(filter(None, ranks.gather(_out_of_reach(ranks))), "")


def _out_of_reach(ranks):
    runtime = cupy().cuda.runtime
    if runtime.getDeviceCount() < ranks.local_world:
        return "a rank sees its own GPU alone"
    here = runtime.getDevice()
    others = [d for d in range(ranks.local_world) if d != here]
    if not all(runtime.deviceCanAccessPeer(here, d) for d in others):
        return "its GPUs are not connected (nvidia-smi topo -p2p r shows which)"
    return ""
