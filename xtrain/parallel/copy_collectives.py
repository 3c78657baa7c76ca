"""Collectives between the GPUs of one machine by copy engines, which leave the multiprocessors
free.

NCCL's kernels occupy 24 of an H200's 132 multiprocessors while they run. cuBLAS sizes the grid of a
matrix product for all 132, so a product that runs next to NCCL needs a second wave and takes up to
twice as long: the matrix products lose the time that overlap saves. The copy engines of a GPU are
separate hardware: they read a neighbour's memory over NVLink while every multiprocessor computes.

There are R ranks, each of which can read and write the others' memory. A slice of the arena is cut
into R shards:

    reduce_scatter    barrier: the slice is complete on every rank
                      rank r copies shard r of each neighbour's gradients to itself and adds them to
                      its own; if the multiprocessors are idle, the addition reads the neighbours'
                      memory instead
    all_gather        barrier: no rank reads the old values any more
                      rank r copies its own shard to each neighbour; if the multiprocessors are
                      idle, a kernel writes it to all of them
    all_reduce        reduce_scatter, then rank r copies the sum to each neighbour
    join              barrier: the neighbours' copies have arrived

Each sum is computed once, by its owner, in one order, and then copied: all ranks hold the same bits
by construction.

The barrier is a row of flags in each rank's memory, one per neighbour. A rank writes 1 to its flag
at every neighbour, waits until all flags in its own memory are 1, and resets them to 0. The GPU
does this itself between two operations of a stream (cuStreamBatchMemOp), also in a CUDA graph,
which writes the same 1 at every replay. A flag may be reused after one more barrier: a rank that
has passed that one knows that every rank has passed the first and has reset its flags. So there are
three rows: two that alternate, and one for `join`, which ends every step, because a step may have
an odd number of barriers.

No rank changes memory that a neighbour still reads: gradients change only after `join`, which a
neighbour reaches after it has read them. No rank writes to gradients that are still read: rank r
writes only shard r of a slice, which only rank r reads once that slice is complete on every rank.
"""

import functools
from typing import Any

import numpy as np

from ..device import Array, cupy
from ..errors import UserError
from ..kernels.peers import add_peers, copy_to_peers
from ..kernels.runtime.launch import empty, zeros
from .collectives import (
    GpuCollectives,
    NcclCollectives,
    Slices,
    copy_or_cast,
    equal_shards,
    store_sum,
)
from .ranks import Ranks

# elements per copy through the window, and with two ranks to a staging buffer
CHUNK = 1 << 22
JOIN = 2  # the row of flags for `join`


class CopyCollectives(GpuCollectives):
    """The collectives of NcclCollectives, between the GPUs of one machine, in float32."""

    def __init__(self, ranks: Ranks, arena: Any):
        super().__init__(ranks, arena)
        # one for each neighbour's gradients; with more ranks a slice's shards are smaller
        self.chunk = max(4, 2 * CHUNK // ranks.world // 4 * 4)
        self.staging = [empty(self.grads, self.chunk) for _ in range(ranks.world - 1)]
        self.window = empty(self.grads, CHUNK)  # arrays that are not registered are sent through it
        self.flags = zeros(self.grads, (JOIN + 1, ranks.world), np.int32)
        # for start_gather: 16 bytes from each rank, in two rows that alternate
        self.gathered = zeros(self.grads, (2, ranks.world, 4), np.float32)
        self.row = 0  # the next row of flags
        self.pending = False  # has there been a barrier since `join`?
        # since `join`, has the computing stream of every rank passed a barrier?
        self.aligned = False
        self.opened: dict[tuple[int, bytes], int] = {}  # (rank, memory handle) -> address here
        self.addresses: dict[int, list[int]] = {}  # address of an array -> its address on each rank
        if arena.half is None:
            weights = arena.weights
        else:
            weights = arena.half
        for array in (self.grads, weights, self.window, self.flags, self.gathered):
            if array is not None:  # with ZeRO-3 the weights are in no place as a whole
                self.register(array)
        cupy().cuda.Device().synchronize()
        ranks.sum([0.0])  # a barrier: the flags are 0 on every rank

    def register(self, array: Array) -> None:
        """Let all_gather fill an array directly, without the window. Every rank must call it with
        its own array."""
        self.addresses[array.data.ptr] = self._exchange_addresses(array)

    def close(self) -> None:
        """Close the neighbours' memory. All captured graphs must be deleted before."""
        for address in self.opened.values():
            cupy().cuda.runtime.ipcCloseMemHandle(address)
        self.ranks.sum([0.0])  # a barrier: no rank frees memory that another one has open

    def shard(self, a: int, b: int, rank: int | None = None) -> slice:
        """Return a rank's shard of [a, b), in units of 16 bytes; the last shards may be shorter.
        None: this rank's."""
        shards = equal_shards(a, b, self.ranks.world)
        return slice(*shards[self.ranks.rank if rank is None else rank])

    # ------------------------------------------------------------------------- the collectives
    def all_reduce(self, a: int, b: int, idle: bool = False) -> None:
        """Start grads[a:b] = the sum over ranks."""
        with self._on_own_stream() as stream:
            self._reduce(a, b, idle, stream)
            self._send(self.grads, self.own(self.grads, a, b), idle, stream)

    def reduce_scatter(self, a: int, b: int, idle: bool = False) -> None:
        """Start all_reduce of [a, b), but only this rank's shard gets the sum."""
        with self._on_own_stream() as stream:
            self._reduce(a, b, idle, stream)

    def all_gather(self, array: Array, a: int, b: int, idle: bool = False) -> None:
        """Start the copy of each rank's shard of array[a:b] to all ranks."""
        with self._on_own_stream() as stream:
            if array.data.ptr not in self.addresses:
                self._gather_through_window(array, a, b, stream)
                return
            if not self.aligned:
                self._barrier(stream)
                self.aligned = True
            self._send(array, self.own(array, a, b), idle, stream)

    def start_gather(self, own_1: Array) -> Array:
        """(1,) of each rank -> (world,), in the order of the ranks. Valid after `join`."""
        all_R = empty(own_1, self.ranks.world)
        me = self.ranks.rank
        row = self.gathered[self.row]
        first = (self.row * self.ranks.world + me) * 4
        self.input = own_1  # keep it alive: the other stream reads it after the return
        with self._on_own_stream() as stream:
            row[me, :1] = own_1
            self._send(self.gathered, [(first, first + 4)], False, stream)
            self._barrier(stream)
            all_R[...] = row[:, 0]
        return all_R

    def gather_1(self, own_1: Array) -> Array:
        """Call start_gather and wait for its result, without ending the step as `join` does."""
        all_R = self.start_gather(own_1)
        super().join()
        self.aligned = True
        return all_R

    def join(self) -> None:
        """Make the current stream wait for all collectives that were started, on every rank; the
        end of a step."""
        if self.pending:
            with self._on_own_stream() as stream:
                self._pass_barrier(JOIN, stream)
            self.row = 0
            self.pending = False
            self.aligned = False
        super().join()

    def gather_shares(self, x_n: Array, own_m: Array) -> None:
        """Start x, which is registered, = the own arrays of all ranks, in the dtype of x."""
        own = self._own_part(x_n, own_m)
        start = self.ranks.rank * own_m.size
        with self._on_own_stream() as stream:
            copy_or_cast(own, own_m)
            self._barrier(stream)  # no rank computes with what was in x before
            self._send(x_n, [(start, start + own.size)], False, stream)
            self._barrier(stream)  # the parts of all ranks have arrived

    def sum_share(self, x_n: Array, own_m: Array, add: bool) -> None:
        """Start own = this rank's part of the sum over ranks of x, which is registered, or own +=
        it."""
        start = self.ranks.rank * own_m.size
        with self._on_own_stream() as stream:
            self._barrier(stream)
            self._add_neighbours(x_n, start, start + own_m.size, False, stream)
            store_sum(own_m, self._own_part(x_n, own_m), add)
            self._barrier(stream)  # no rank reads this one's x any more

    # ------------------------------------------------------------------------- their steps
    def _reduce(self, a: int, b: int, idle: bool, stream: int) -> None:
        """grads[own shard of [a, b)] += the same slice of every neighbour."""
        self._barrier(stream)
        for start, end in self.own(self.grads, a, b):
            self._add_neighbours(self.grads, start, end, idle, stream)

    def _add_neighbours(self, array: Array, start: int, end: int, idle: bool, stream: int) -> None:
        """array[start:end] += the same slice of every neighbour, in chunks."""
        for first in range(start, end, self.chunk):
            n = min(self.chunk, end - first)
            own = array[first : first + n]
            theirs = self._at_neighbours(array, first, first + n)
            if not idle:
                staged = [x[:n] for x in self.staging]
                for x, there in zip(staged, theirs):
                    _copy(x.data.ptr, there.data.ptr, own.nbytes, stream)
                theirs = staged
            add_peers(own, theirs)

    def _chunks(self, array: Array, a: int, b: int, rank: int, most: int) -> list[tuple[int, int]]:
        """Return (first, n) of chunks of at most `most` elements that cover what a rank owns of
        array[a:b]."""
        return [
            (first, min(most, end - first))
            for start, end in self.own(array, a, b, rank)
            for first in range(start, end, most)
        ]

    def _send(self, array: Array, parts: Slices, idle: bool, stream: int) -> None:
        """Copy these parts of the array to every neighbour."""
        for start, end in parts:
            own = array.reshape(-1)[start:end]
            theirs = self._at_neighbours(array, start, end)
            if idle:
                copy_to_peers(theirs, own)
                continue
            for there in theirs:
                _copy(there.data.ptr, own.data.ptr, own.nbytes, stream)

    def _at_neighbours(self, array: Array, start: int, end: int) -> list[Array]:
        """Return elements [start, end) of the same array of each neighbour."""
        offset = start * array.itemsize
        addresses = self.addresses[array.data.ptr]
        return [
            at_address(addresses[rank] + offset, end - start, array.dtype)
            for rank in self._neighbours()
        ]

    def _gather_through_window(self, array: Array, a: int, b: int, stream: int) -> None:
        """Call all_gather of an array that is not registered, one chunk after the other."""
        window = self.window.view(array.dtype)
        chunks = [self._chunks(array, a, b, rank, CHUNK) for rank in range(self.ranks.world)]
        for i in range(max(map(len, chunks))):
            for rank in (self.ranks.rank, *self._neighbours()):
                if i < len(chunks[rank]):
                    first, n = chunks[rank][i]
                else:
                    first, n = (0, 0)
                here = array[first : first + n]
                if rank == self.ranks.rank:
                    window[:n] = here
                    self._barrier(stream)
                elif n:
                    _copy(here.data.ptr, self.addresses[window.data.ptr][rank], here.nbytes, stream)
            self._barrier(stream)  # the window may be overwritten

    def _neighbours(self) -> list[int]:
        """Return all other ranks, in an order that differs by rank: no rank is read by all others
        at once."""
        me, world = self.ranks.rank, self.ranks.world
        return [(me + i) % world for i in range(1, world)]

    # ------------------------------------------------------------------------- barriers and addresses
    def _barrier(self, stream: int) -> None:
        """Later work on this stream waits until the stream of every rank has reached this
        barrier."""
        self._pass_barrier(self.row, stream)
        self.row = 1 - self.row
        self.pending = True

    def _pass_barrier(self, row: int, stream: int) -> None:
        address = self.flags.data.ptr
        width = self.flags.itemsize
        flag = lambda base, rank: base + (row * self.ranks.world + rank) * width
        others = self._neighbours()
        theirs = [flag(self.addresses[address][rank], self.ranks.rank) for rank in others]
        mine = [flag(address, rank) for rank in others]
        in_order = [write(x, 1) for x in theirs] + [wait(x, 1) for x in mine]
        in_order += [write(x, 0) for x in mine]
        driver = cuda_driver()
        (error,) = driver.cuStreamBatchMemOp(stream, len(in_order), in_order, 0)
        _check(driver, error, "a barrier between GPUs")

    def _exchange_addresses(self, array: Array) -> list[int]:
        """Return the address of each rank's array in this process, which opens the neighbours'
        memory."""
        runtime = cupy().cuda.runtime
        address = array.data.ptr
        base = allocation(address)
        handles = self.ranks.gather((runtime.ipcGetMemHandle(base), address - base))
        addresses = []
        for rank, (handle, offset) in enumerate(handles):
            if rank == self.ranks.rank:
                addresses.append(address)
                continue
            if (rank, handle) not in self.opened:  # two arrays may be in one allocation
                self.opened[rank, handle] = runtime.ipcOpenMemHandle(handle)
            addresses.append(self.opened[rank, handle] + offset)
        return addresses


# ----------------------------------------------------------------------------- missing in CuPy
def _copy(target: int, source: int, nbytes: int, stream: int) -> None:
    runtime = cupy().cuda.runtime
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)


def at_address(address: int, n: int, dtype: Any) -> Array:
    """Return (n,): the memory at this address, which may be a neighbour's, as an array."""
    cp = cupy()
    nbytes = n * np.dtype(dtype).itemsize
    memory = cp.cuda.UnownedMemory(address, nbytes, None, cp.cuda.Device().id)
    return cp.ndarray(n, dtype, cp.cuda.MemoryPointer(memory, 0))


@functools.cache
def cuda_driver() -> Any:
    """Return cuda.bindings.driver, which numba-cuda needs as well."""
    from cuda.bindings import driver

    return driver


def write(address: int, value: int) -> Any:
    """Return a stream operation: set the 32-bit word at this address to value."""
    return _operation("writeValue", "WRITE", address, value, 0)


def wait(address: int, value: int) -> Any:
    """Return a stream operation: wait until the 32-bit word at this address equals value."""
    equal = cuda_driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    return _operation("waitValue", "WAIT", address, value, int(equal))


def _operation(field: str, verb: str, address: int, value: int, flags: int) -> Any:
    driver = cuda_driver()
    operation = driver.CUstreamBatchMemOpParams()
    kind = getattr(driver.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{verb}_VALUE_32")
    operation.operation = kind
    what = getattr(operation, field)
    what.operation = kind
    what.address = driver.CUdeviceptr(address)
    what.value = driver.cuuint32_t(value)
    what.flags = flags
    return operation


def allocation(address: int) -> int:
    """Return the start of the driver's allocation that contains this address."""
    driver = cuda_driver()
    error, base, _ = driver.cuMemGetAddressRange(address)
    _check(driver, error, f"the memory at {address:#x}")
    return int(base)


def _check(driver: Any, error: Any, what: str) -> None:
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what}: the CUDA driver returned {error.name}")


# ----------------------------------------------------------------------------- choice of the transport
def gpu_collectives(ranks: Ranks, arena: Any, bf16: bool, how: str) -> GpuCollectives:
    """how: "nccl", "copy", or "auto": copy if it is possible. Raises UserError if "copy" is not."""
    reason = ""
    if how != "nccl":
        reason = why_no_copies(ranks, bf16)
    if how == "copy" and reason:
        raise UserError(f"--transport copy is not possible: {reason}; use --transport nccl")
    if how == "nccl" or reason:
        return NcclCollectives(ranks, arena, bf16)
    return CopyCollectives(ranks, arena)


def why_no_copies(ranks: Ranks, bf16: bool = False) -> str:
    """Return why copy engines cannot be used; "" if they can. The same on every rank."""
    if bf16:  # two casts cost more time than half the bytes save
        return "gradients in bf16 (--grad-comm) need NCCL"
    if any(ranks.gather(ranks.local_world != ranks.world)):
        return "the ranks are on several machines"
    return next(filter(None, ranks.gather(_out_of_reach(ranks))), "")


def _out_of_reach(ranks: Ranks) -> str:
    """Return why this rank cannot reach the memory of the others; "" if it can."""
    runtime = cupy().cuda.runtime
    if runtime.getDeviceCount() < ranks.local_world:
        return "each rank sees only its own GPU"
    here = runtime.getDevice()
    others = [d for d in range(ranks.local_world) if d != here]
    if not all(runtime.deviceCanAccessPeer(here, d) for d in others):
        return "the GPUs cannot access each other (see nvidia-smi topo -p2p r)"
    return ""
