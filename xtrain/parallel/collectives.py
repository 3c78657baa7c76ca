"""Collectives on slices of the arena: MPI in host memory, NCCL between GPUs.

    HostCollectives    on NumPy arrays: non-blocking MPI
    NcclCollectives    on CuPy arrays: NCCL on a separate stream, joined to the computation by events
                       (copy_collectives.py has a faster way between the GPUs of one machine)

A collective on slice [a, b) of the arena is only *started*; `join` makes everything after it wait
for all that were started. Computation between the two hides the communication. Every rank must
start the same collectives in the same order. With R ranks, rank r's shard of [a, b) is its r-th
part of equal length; a slice that must be divided otherwise (Muon's whole matrices) is in `pieces`,
which says what belongs to whom. "shard" below means either.

    all_reduce(a, b)             grads[a:b] = the sum over ranks
    reduce_scatter(a, b)         as all_reduce, but each rank gets only its shard: half the traffic
    all_gather(array, a, b)      each rank's shard of array[a:b] to all ranks: the other half
    start_gather(own_1)          one number of each rank to all ranks
    gather_shares(x_n, own)      x = the own arrays of all ranks, one after the other (ZeRO-3)
    sum_share(x_n, own, add)     own = this rank's part of the sum over ranks of x, or is added to
                                 it; x is overwritten (ZeRO-3)
    mark(), wait(mark)           as join, for what was started before the mark

idle=True: no other computation needs the multiprocessors, so a collective on a GPU may use them.
Every step ends with `join`.

Sums of the same numbers are the same bits on every rank: MPI and NCCL add each element on one rank,
or in one order.
"""

import contextlib
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Array, cupy
from ..errors import UserError
from ..kernels.cast import BFLOAT16, cast_into
from ..kernels.elementwise import add_into
from ..kernels.runtime.launch import empty
from .ranks import Ranks

Slices = list[tuple[int, int]]  # slices [start, end) of the arena
Pieces = dict[tuple[int, int], list[tuple[int, int, int]]]  # slice -> (start, end, rank), in order


def equal_shards(a: int, b: int, world: int) -> Slices:
    """Return [a, b) in `world` parts of equal length, in units of 16 bytes; the last ones may be
    shorter."""
    n = -(-(b - a) // (4 * world)) * 4
    return [(min(b, a + rank * n), min(b, a + (rank + 1) * n)) for rank in range(world)]


class Division:
    """Which part of a slice belongs to which rank. pieces: of slices of the arena that are not
    divided evenly."""

    def __init__(self, ranks: Ranks, arena: Any):
        self.ranks = ranks
        self.grads = arena.grads
        self.pieces: Pieces = {}

    def shard(self, a: int, b: int, rank: int | None = None) -> slice:
        """Return a rank's shard of an evenly divided [a, b). None: this rank's."""
        if rank is None:
            rank = self.ranks.rank
        n = (b - a) // self.ranks.world
        return slice(a + rank * n, a + (rank + 1) * n)

    def pieces_of(self, array: Array, a: int, b: int) -> list[tuple[int, int, int]] | None:
        """Return the pieces of array[a:b]; None if it is divided evenly. An array of another size
        is not laid out like the arena."""
        if array.size == self.grads.size:
            return self.pieces.get((a, b))
        return None

    def own(self, array: Array, a: int, b: int, rank: int | None = None) -> Slices:
        """Return what a rank owns of array[a:b]: its shard, or its pieces, neighbouring ones
        joined. None: this rank."""
        if rank is None:
            rank = self.ranks.rank
        pieces = self.pieces_of(array, a, b)
        if pieces is None:
            shard = self.shard(a, b, rank)
            if shard.start < shard.stop:
                return [(shard.start, shard.stop)]
            return []
        slices: Slices = []
        for start, end, owner in pieces:
            if owner == rank and start < end:
                if slices and slices[-1][1] == start:
                    start = slices.pop()[0]
                slices.append((start, end))
        return slices


class HostCollectives(Division):
    """Collectives on an arena in NumPy memory.

    bf16: round gradients to bf16 before they are added (in float32, since MPI does not support
    bf16): the accuracy of bf16 communication, not its speed.
    exposed, hidden: seconds since `clear` in which communication was waited for, and in which it
    overlapped with computation.
    """

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        super().__init__(ranks, arena)
        self.bf16 = bf16
        self.in_flight: list[_Request] = []
        self.finished = 0  # requests that were waited for
        self.clear()

    def clear(self) -> None:
        """Set exposed and hidden to 0."""
        self.exposed = 0.0
        self.hidden = 0.0
        self.unfinished = bool(self.in_flight)
        self.last_poll = 0.0

    def close(self) -> None:
        """Free resources. (None here.)"""

    def all_reduce(self, a: int, b: int, idle: bool = False) -> None:
        """Start grads[a:b] = the sum over ranks."""
        x = self._gradients(a, b)
        self._started(self.ranks.comm.Iallreduce(_in_place(), x))

    def reduce_scatter(self, a: int, b: int, idle: bool = False) -> None:
        """Start all_reduce of [a, b), but only this rank's shard gets the sum."""
        x = self._gradients(a, b)
        pieces = self.pieces_of(self.grads, a, b)
        if pieces is not None:
            for start, end, owner in pieces:
                piece = x[start - a : end - a]
                if self.ranks.rank == owner:
                    buffers: tuple[Any, Any] = (_in_place(), piece)
                else:
                    buffers = (piece, None)
                self._started(self.ranks.comm.Ireduce(*buffers, root=owner))
            return
        own = self.shard(a, b)
        received = np.empty(own.stop - own.start, x.dtype)
        request = self.ranks.comm.Ireduce_scatter_block(x, received)
        self._started(request, self.grads[own], received)

    def all_gather(self, array: np.ndarray, a: int, b: int, idle: bool = False) -> None:
        """Start the copy of each rank's shard of array[a:b] to all ranks."""
        comm = self.ranks.comm
        pieces = self.pieces_of(array, a, b)
        if pieces is None:
            self._started(comm.Iallgather(_in_place(), array[a:b].view(np.uint8)))
            return
        for start, end, owner in pieces:
            self._started(comm.Ibcast(array[start:end].view(np.uint8), root=owner))

    def gather_shares(self, x_n: np.ndarray, own_m: np.ndarray) -> None:
        """Start x = the own arrays of all ranks, in the dtype of x."""
        start = self.ranks.rank * own_m.size
        if x_n.dtype == own_m.dtype:
            x_n[start : start + own_m.size] = own_m
        else:
            cast_into(x_n[start : start + own_m.size], own_m)
        self._started(self.ranks.comm.Iallgather(_in_place(), x_n.view(np.uint8)))

    def sum_share(self, x_n: np.ndarray, own_m: np.ndarray, add: bool) -> None:
        """Start own = this rank's part of the sum over ranks of x, or own += it."""
        received = np.empty(own_m.size, x_n.dtype)
        request = self.ranks.comm.Ireduce_scatter_block(x_n, received)
        self._started(request, own_m, received, add)

    def mark(self, mark: Any = None) -> int:
        """Return what `wait` gets to wait for everything that was started so far.

        mark: one that is no longer needed.
        """
        return self.finished + len(self.in_flight)

    def wait(self, mark: int) -> None:
        """Make what follows wait for everything that was started before the mark."""
        self._poll()
        while self.finished < mark:
            started = self.in_flight.pop(0)
            started.request.Wait()
            started.store()
            self.finished += 1
        self.unfinished = bool(self.in_flight)
        now = time.perf_counter()
        self.exposed += now - self.last_poll
        self.last_poll = now

    def register(self, array: np.ndarray) -> None:
        """Prepare an array for all_gather. Every rank must call it. (Needed only by
        CopyCollectives.)"""

    def start_gather(self, own_1: np.ndarray) -> np.ndarray:
        """(1,) of each rank -> (world,), in the order of the ranks. Valid after `join`."""
        all_R = np.empty(self.ranks.world, own_1.dtype)
        self._started(self.ranks.comm.Iallgather(own_1, all_R))
        return all_R

    def gather_1(self, own_1: np.ndarray) -> np.ndarray:
        """Call start_gather and join."""
        all_R = self.start_gather(own_1)
        self.join()
        return all_R

    def progress(self) -> None:
        """Call this from time to time while computing: without a thread, MPI progresses only inside
        its calls."""
        self._poll()

    def join(self) -> None:
        """Wait for all collectives that were started."""
        self.wait(self.mark())

    def _gradients(self, a: int, b: int) -> np.ndarray:
        x = self.grads[a:b]
        if self.bf16:
            x[...] = x.astype(BFLOAT16)
        return x

    def _started(
        self,
        request: Any,
        target: np.ndarray | None = None,
        received: np.ndarray | None = None,
        add: bool = False,
    ) -> None:
        self._poll()
        self.in_flight.append(_Request(request, target, received, add))
        self.unfinished = True

    def _poll(self) -> None:
        """Let MPI progress. The time since the last poll counts as hidden if a request was
        unfinished."""
        now = time.perf_counter()
        if self.unfinished:
            self.hidden += now - self.last_poll
            # a list: every request is tested, since each test makes progress
            self.unfinished = not all([started.request.Test() for started in self.in_flight])
        self.last_poll = now


@dataclass(frozen=True)
class _Request:
    """An MPI request in flight; after it, `received` is copied to `target`, or added, unless that
    is None."""

    request: Any
    target: np.ndarray | None
    received: np.ndarray | None
    add: bool

    def store(self) -> None:
        """Copy or add what was received."""
        if self.target is None:
            return
        if self.add:
            self.target[...] += self.received
        else:
            self.target[...] = self.received


class GpuCollectives(Division):
    """Common code of the collectives between GPUs. bf16: gradients are sent in bf16, half the
    bytes.

    All calls run on a separate stream, which first waits for an event of the computing stream;
    `join` makes the computing stream wait for it. Captured in a CUDA graph, this fork and join
    become branches of the graph.
    """

    exposed = hidden = None  # unknown inside a replayed graph: bench/bench_ddp.py measures both

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        super().__init__(ranks, arena)
        self.half = None
        if bf16:
            self.half = empty(arena.grads, arena.grads.shape, BFLOAT16)
        # its operations are short and other ranks wait for them: high priority
        self.stream = cupy().cuda.Stream(non_blocking=True, priority=-1)
        self.events: list[Any] = []  # never freed: a captured graph uses them
        self.used = 0  # events since the last `join`

    register: Any = HostCollectives.register

    def clear(self) -> None:
        """Nothing to do: see `exposed`."""

    def progress(self) -> None:
        """Nothing to do: the GPU needs no calls to make progress."""

    def join(self) -> None:
        """Make the current stream wait for all collectives that were started."""
        cupy().cuda.get_current_stream().wait_event(self._event(self.stream))
        self.used = 0

    gather_1: Any = HostCollectives.gather_1

    def mark(self, mark: Any = None) -> Any:
        """Return an event, which `wait` gets to wait for everything that was started so far.

        mark: one that is no longer needed.
        """
        if mark is None:
            mark = cupy().cuda.Event(disable_timing=True)
        mark.record(self.stream)
        return mark

    def wait(self, mark: Any) -> None:
        """Make the current stream wait for everything that was started before the mark."""
        cupy().cuda.get_current_stream().wait_event(mark)

    def _own_part(self, x_n: Array, own_m: Array) -> Array:
        """Return this rank's part of x, as long as own."""
        start = self.ranks.rank * own_m.size
        return x_n[start : start + own_m.size]

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[int]:
        """Inside, the separate stream is current, after the work queued so far. -> its pointer"""
        self.stream.wait_event(self._event(cupy().cuda.get_current_stream()))
        with self.stream:
            yield self.stream.ptr

    def _event(self, stream: Any) -> Any:
        """Return an event recorded on the stream."""
        if self.used == len(self.events):
            self.events.append(cupy().cuda.Event(disable_timing=True))
        event = self.events[self.used]
        self.used += 1
        event.record(stream)
        return event

    def _gradients(self, a: int, b: int) -> Array:
        """Return grads[a:b], in bf16 if that is sent."""
        if self.half is None:
            return self.grads[a:b]
        cast_into(self.half[a:b], self.grads[a:b])
        return self.half[a:b]

    def _widen(self, where: slice) -> None:
        """Copy the received bf16 gradients back to float32."""
        if self.half is not None:
            cast_into(self.grads[where], self.half[where])


class NcclCollectives(GpuCollectives):
    """Between the GPUs of one or several machines. With bf16, gradients are also added in bf16."""

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        super().__init__(ranks, arena, bf16)
        nccl = load_nccl()
        name = ranks.comm.bcast(nccl.get_unique_id() if ranks.rank == 0 else None)
        self.nccl = nccl.NcclCommunicator(ranks.world, name, ranks.rank)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.nccl))  # destroyed only by `close`
        self.sum = nccl.NCCL_SUM
        self.types = {4: nccl.NCCL_FLOAT32, 2: nccl.NCCL_BFLOAT16}

    def close(self) -> None:
        """Destroy the communicator. All captured graphs must be deleted before: NCCL waits for
        graphs that use it."""
        self.nccl.destroy()

    def all_reduce(self, a: int, b: int, idle: bool = False) -> None:
        """Start grads[a:b] = the sum over ranks."""
        with self._on_own_stream() as stream:
            x = self._gradients(a, b)
            self.nccl.allReduce(
                x.data.ptr, x.data.ptr, b - a, self.types[x.itemsize], self.sum, stream
            )
            self._widen(slice(a, b))

    def reduce_scatter(self, a: int, b: int, idle: bool = False) -> None:
        """Start all_reduce of [a, b), but only this rank's shard gets the sum."""
        with self._on_own_stream() as stream:
            x = self._gradients(a, b)
            kind = self.types[x.itemsize]
            pieces = self.pieces_of(self.grads, a, b)
            if pieces is not None:
                with self._grouped():
                    for start, end, owner in pieces:
                        address = x.data.ptr + (start - a) * x.itemsize
                        self.nccl.reduce(
                            address, address, end - start, kind, self.sum, owner, stream
                        )
                for start, end in self.own(self.grads, a, b):
                    self._widen(slice(start, end))
                return
            own = self.shard(a, b)
            to = x.data.ptr + (own.start - a) * x.itemsize
            n = own.stop - own.start
            self.nccl.reduceScatter(x.data.ptr, to, n, kind, self.sum, stream)
            self._widen(own)

    def all_gather(self, array: Array, a: int, b: int, idle: bool = False) -> None:
        """Start the copy of each rank's shard of array[a:b] to all ranks."""
        x = array[a:b]
        with self._on_own_stream() as stream:
            kind = self.types[x.itemsize]
            pieces = self.pieces_of(array, a, b)
            if pieces is not None:
                with self._grouped():
                    for start, end, owner in pieces:
                        address = x.data.ptr + (start - a) * x.itemsize
                        self.nccl.bcast(address, end - start, kind, owner, stream)
                return
            own = self.shard(a, b)
            start = x.data.ptr + (own.start - a) * x.itemsize
            n = own.stop - own.start
            self.nccl.allGather(start, x.data.ptr, n, kind, stream)

    def gather_shares(self, x_n: Array, own_m: Array) -> None:
        """Start x = the own arrays of all ranks, in the dtype of x."""
        own = self._own_part(x_n, own_m)
        with self._on_own_stream() as stream:
            copy_or_cast(own, own_m)
            kind = self.types[x_n.itemsize]
            self.nccl.allGather(own.data.ptr, x_n.data.ptr, own.size, kind, stream)

    def sum_share(self, x_n: Array, own_m: Array, add: bool) -> None:
        """Start own = this rank's part of the sum over ranks of x, or own += it."""
        own = self._own_part(x_n, own_m)
        with self._on_own_stream() as stream:
            kind = self.types[x_n.itemsize]
            self.nccl.reduceScatter(x_n.data.ptr, own.data.ptr, own.size, kind, self.sum, stream)
            store_sum(own_m, own, add)

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        """NCCL starts all calls inside as one kernel."""
        nccl = load_nccl()
        nccl.groupStart()
        yield
        nccl.groupEnd()

    def start_gather(self, own_1: Array) -> Array:
        """(1,) of each rank -> (world,), in the order of the ranks. Valid after `join`."""
        all_R = empty(own_1, self.ranks.world)
        self.input = own_1  # keep it alive: the other stream reads it after the return
        with self._on_own_stream() as stream:
            self.nccl.allGather(own_1.data.ptr, all_R.data.ptr, 1, self.types[4], stream)
        return all_R


def copy_or_cast(to_n: Array, from_n: Array) -> None:
    """Copy on the current stream, to another dtype if that of `to` is another."""
    if to_n.dtype == from_n.dtype:
        to_n[...] = from_n
    else:
        cast_into(to_n, from_n)


def store_sum(own_m: Array, sum_m: Array, add: bool) -> None:
    """Copy a sum to where it is kept, or add it, on the current stream."""
    if add:
        add_into(own_m, sum_m)
    elif own_m.data.ptr != sum_m.data.ptr:
        own_m[...] = sum_m


def load_nccl() -> Any:
    """Return cupy.cuda.nccl. Raises UserError if CuPy finds no NCCL library."""
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no NCCL library ({reason}): `pip install nvidia-nccl-cu13` (or -cu12, to match "
            "CuPy), or use --device cpu"
        ) from None
    return nccl


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE
