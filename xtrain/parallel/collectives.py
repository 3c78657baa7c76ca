"""What ranks say to each other: a few words between the hosts (MPI), and the gradients (MPI on the CPU, NCCL between GPUs).

    SINGLE_PROCESS     the only process of xtrain.train, with the methods of Ranks (training/single_process.py)
    Ranks              host side: who am I, rank 0 first, sums of a few numbers, does anybody want to stop
    HostCollectives    sums and exchanges of slices of the arena, in NumPy memory: non-blocking MPI
    NcclCollectives    the same in GPU memory: NCCL on a stream of its own, joined to the computation by events
                       (peer.py has a faster way between the GPUs of one machine)

A collective on slice [a, b) of the arena is only *started*; `join` makes what follows wait for all that were started. So
whatever is computed between the two hides the communication. Every rank must start the same ones in the same order.

    all_reduce(a, b)             grads[a:b] = the sum over ranks
    reduce_scatter(a, b)         the same, but rank r gets the r-th part of it only: half the traffic
    all_gather(array, a, b)      rank r's r-th part of array[a:b] to everybody: the other half
    start_gather(own_1)          one number of each rank to everybody

idle=True: nothing else is being computed, so the first two may use the whole GPU. Every step ends with a `join`.

Sums of the same numbers are the same bits on every rank: MPI and NCCL add each element on one rank, or in one order.
"""

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device import Array, cupy
from ..errors import UserError
from ..kernels.cast import BFLOAT16, cast_into
from ..kernels.runtime.launch import empty
from .ranks import Ranks


class HostCollectives:
    """Slices of an arena in NumPy memory. bf16: gradients are rounded to it before they are added (in float32, as MPI
    knows no bf16): the accuracy of bf16 communication, not its speed.

    exposed, hidden: seconds since `clear` in which communication was waited for, and went on beside computation.
    """

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        self.ranks, self.grads, self.bf16 = ranks, arena.grads, bf16
        self.waiting: list[tuple[Any, Any, Any]] = []  # request, where its result goes, result
        self.clear()

    def clear(self) -> None:
        self.exposed, self.hidden, self.under_way, self.looked = 0.0, 0.0, bool(self.waiting), 0.0

    def close(self) -> None:
        pass

    def part(self, a: int, b: int) -> slice:
        """This rank's part of [a, b)."""
        n = (b - a) // self.ranks.world
        return slice(a + self.ranks.rank * n, a + (self.ranks.rank + 1) * n)

    def all_reduce(self, a: int, b: int, idle: bool = False) -> None:
        x = self._gradients(a, b)
        self._started(self.ranks.comm.Iallreduce(_in_place(), x))

    def reduce_scatter(self, a: int, b: int, idle: bool = False) -> None:
        x, own = self._gradients(a, b), self.part(a, b)
        received = np.empty(own.stop - own.start, x.dtype)
        request = self.ranks.comm.Ireduce_scatter_block(x, received)
        self._started(request, self.grads[own], received)

    def all_gather(self, array: np.ndarray, a: int, b: int) -> None:
        x = array[a:b].view(np.uint8)
        self._started(self.ranks.comm.Iallgather(_in_place(), x))

    def share(self, array: np.ndarray) -> None:
        pass

    def start_gather(self, own_1: np.ndarray) -> np.ndarray:
        """(1,) of each rank -> (world,), in the order of the ranks; not to be read before `join`."""
        all_R = np.empty(self.ranks.world, own_1.dtype)
        self._started(self.ranks.comm.Iallgather(own_1, all_R))
        return all_R

    def gather_1(self, own_1: np.ndarray) -> np.ndarray:
        """The same, at once."""
        all_R = self.start_gather(own_1)
        self.join()
        return all_R

    def progress(self) -> None:
        """To be called now and then while computing: without a thread of its own, MPI works only inside its calls."""
        self._look()

    def join(self) -> None:
        self._look()
        for request, target, received in self.waiting:
            request.Wait()
            if target is not None:
                target[...] = received
        self.waiting.clear()
        self.under_way = False
        self.exposed += time.perf_counter() - self.looked

    def _gradients(self, a, b):
        x = self.grads[a:b]
        if self.bf16:
            x[...] = x.astype(BFLOAT16)
        return x

    def _started(self, request, target=None, received=None):
        self._look()
        self.waiting.append((request, target, received))
        self.under_way = True

    def _look(self):
        """Let MPI work. The time since the last look counts as hidden if something was under way."""
        now = time.perf_counter()
        if self.under_way:
            self.hidden += now - self.looked
            self.under_way = not all([request.Test() for request, _, _ in self.waiting])
        self.looked = now


class GpuCollectives:
    """What the two ways between GPUs share. bf16: gradients travel in bf16: half the bytes.

    All calls go to a stream of their own, which waits for an event of the computing stream first; `join` makes the
    computing stream wait for it. Captured in a CUDA graph, this fork and join become branches of the graph.
    """

    exposed = hidden = None  # a replayed graph cannot be asked: bench/bench_ddp.py measures both

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        self.ranks, self.grads = ranks, arena.grads
        self.half = empty(arena.grads, arena.grads.shape, BFLOAT16) if bf16 else None
        # what runs there is short and others wait for it: it goes first
        self.stream = cupy().cuda.Stream(non_blocking=True, priority=-1)
        self.events: list[Any] = []  # kept: a captured graph must not lose its events
        self.used = 0

    part, share = HostCollectives.part, HostCollectives.share

    def clear(self) -> None:
        pass

    progress = clear  # the GPU needs no reminding

    def join(self) -> None:
        cupy().cuda.get_current_stream().wait_event(self._event(self.stream))
        self.used = 0

    gather_1 = HostCollectives.gather_1

    @contextlib.contextmanager
    def _side(self) -> Iterator[int]:
        self.stream.wait_event(self._event(cupy().cuda.get_current_stream()))
        with self.stream:
            yield self.stream.ptr

    def _event(self, stream):
        if self.used == len(self.events):
            self.events.append(cupy().cuda.Event(disable_timing=True))
        event = self.events[self.used]
        self.used += 1
        event.record(stream)
        return event

    def _gradients(self, a, b):
        if self.half is None:
            return self.grads[a:b]
        cast_into(self.half[a:b], self.grads[a:b])
        return self.half[a:b]

    def _widen(self, where):
        if self.half is not None:
            cast_into(self.grads[where], self.half[where])


class NcclCollectives(GpuCollectives):
    """Between any GPUs, of one machine or of many. With bf16, gradients are also added in bf16."""

    def __init__(self, ranks: Ranks, arena: Any, bf16: bool = False):
        super().__init__(ranks, arena, bf16)
        nccl = load_nccl()
        name = ranks.comm.bcast(nccl.get_unique_id() if ranks.rank == 0 else None)
        self.nccl = nccl.NcclCommunicator(ranks.world, name, ranks.rank)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.nccl))  # only `close` may destroy it
        self.sum, self.types = nccl.NCCL_SUM, {4: nccl.NCCL_FLOAT32, 2: nccl.NCCL_BFLOAT16}

    def close(self) -> None:
        """Give NCCL's memory back. Every captured graph must be gone, as NCCL waits for the end of those it is in."""
        self.nccl.destroy()

    def all_reduce(self, a: int, b: int, idle: bool = False) -> None:
        with self._side() as stream:
            x = self._gradients(a, b)
            self.nccl.allReduce(
                x.data.ptr, x.data.ptr, b - a, self.types[x.itemsize], self.sum, stream
            )
            self._widen(slice(a, b))

    def reduce_scatter(self, a: int, b: int, idle: bool = False) -> None:
        own = self.part(a, b)
        with self._side() as stream:
            x = self._gradients(a, b)
            to = x.data.ptr + (own.start - a) * x.itemsize
            n = own.stop - own.start
            self.nccl.reduceScatter(x.data.ptr, to, n, self.types[x.itemsize], self.sum, stream)
            self._widen(own)

    def all_gather(self, array: Array, a: int, b: int) -> None:
        own, x = self.part(a, b), array[a:b]
        with self._side() as stream:
            start = x.data.ptr + (own.start - a) * x.itemsize
            n = own.stop - own.start
            self.nccl.allGather(start, x.data.ptr, n, self.types[x.itemsize], stream)

    def start_gather(self, own_1: Array) -> Array:
        all_R = empty(own_1, self.ranks.world)
        self.given = own_1  # the other stream reads it later than we return
        with self._side() as stream:
            self.nccl.allGather(own_1.data.ptr, all_R.data.ptr, 1, self.types[4], stream)
        return all_R


def load_nccl() -> Any:
    """cupy.cuda.nccl. Raises UserError when CuPy has no NCCL library to call."""
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no NCCL library ({reason}): `pip install nvidia-nccl-cu13` (or -cu12, as your CuPy), or use --device cpu"
        ) from None
    return nccl


def _in_place():
    from mpi4py import MPI

    return MPI.IN_PLACE
