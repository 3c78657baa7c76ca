"""Ranks for lesson 32. The same communicator works between threads of one process and between processes.

    run_ranks(4, work)      calls work(comm) on four ranks, threads of this process -> [the result of each rank]
    ProcessRank(ranks)      between the processes that mpirun started: MPI for NumPy arrays, NCCL for CuPy arrays

A communicator `comm` has

    rank, world                           this rank's number; how many ranks there are
    exchange(send, to, receive, source)   send an array to one rank, and fill `receive` with the one that another rank sends
    all_reduce(x)                         x becomes the sum over the ranks, in place -> x
    all_gather(part)                      -> the parts of all ranks, one after the other along the first axis
    reduce_scatter(x)                     -> this rank's part of the sum over the ranks: the first axis in `world` equal parts
    log                                   [(call, numbers that this rank sent), ...]; `sent` is the sum of the numbers

Every rank must make the same calls in the same order, with arrays of the same shape. Arrays must be contiguous.
"""

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np


class RankError(Exception):
    """Ranks whose calls do not fit together."""


class _Ended(BaseException):
    """Ends the thread of a rank. Not an Exception: a reader's `except Exception` must not catch it."""


class Communicator:
    """What both kinds have in common. A collective counts what a ring sends: each of `world` parts but one."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world, self.log = rank, world, []

    @property
    def sent(self) -> int:
        return sum(numbers for _, numbers in self.log)

    def _note(self, call, x, times):
        need(x.flags.c_contiguous, f"{call}: the array is not contiguous, use np.ascontiguousarray")
        self.log.append((call, times * x.size * (self.world - 1) // self.world))

    def _note_exchange(self, send, to, receive, source):
        for name, rank in (("to", to), ("source", source)):
            known = 0 <= rank < self.world
            need(known, f"exchange: {name}={rank}, but the ranks are 0 to {self.world - 1}")
        need(receive.flags.c_contiguous, "exchange: `receive` is not contiguous")
        self.log.append(("exchange", send.size))

    def _check_parts(self, x):
        divides = x.ndim > 0 and len(x) % self.world == 0
        need(divides, f"reduce_scatter: the first axis of {x.shape} is not a multiple of {self.world}")  # fmt: skip


def need(ok: bool, text: str) -> None:
    if not ok:
        raise RankError(text)


# ----------------------------------------------------------------------------- threads of one process
class ThreadRank(Communicator):
    """One rank of run_ranks. A message is a copy, as on a network."""

    def __init__(self, group: "_Group", rank: int):
        super().__init__(rank, group.world)
        self._group, self._calls = group, 0

    def exchange(self, send, to, receive, source):
        self._note_exchange(send, to, receive, source)
        mail = self._group.mail
        mail[self.rank, to].append(np.array(send))
        here = mail[source, self.rank]
        self._group.wait(self.rank, f"waits for a message from rank {source}", lambda: here)
        came = here.popleft()
        fits = came.shape == receive.shape
        need(fits, f"rank {source} sends an array of shape {came.shape}, rank {self.rank} receives into one of shape {receive.shape}")  # fmt: skip
        receive[...] = came

    def all_reduce(self, x):
        self._note("all_reduce", x, 2)
        x[...] = sum(self._all("all_reduce", x))  # in the order of the ranks: the same bits on all
        return x

    def all_gather(self, part):
        self._note("all_gather", part, self.world)
        return np.concatenate(self._all("all_gather", part))

    def reduce_scatter(self, x):
        self._note("reduce_scatter", x, 1)
        self._check_parts(x)
        n = len(x) // self.world
        mine = slice(n * self.rank, n * (self.rank + 1))
        return sum(a[mine] for a in self._all("reduce_scatter", x))

    def _all(self, call, x):
        """The arrays with which the ranks make this call."""
        calls = self._group.calls
        if self._calls == len(calls):
            calls.append({})
        made = calls[self._calls]
        self._calls += 1
        made[self.rank] = call, np.array(x)
        for rank, (other, y) in made.items():
            same = (other, y.shape, y.dtype) == (call, x.shape, x.dtype)
            need(same, f"rank {self.rank} calls {call} with {x.dtype} {x.shape}, and rank {rank} calls {other} with {y.dtype} {y.shape}: "
                 "every rank must make the same calls in the same order")  # fmt: skip
        ready = lambda: len(made) == self.world
        self._group.wait(self.rank, f"waits in {call} for the other ranks", ready)
        return [made[rank][1] for rank in range(self.world)]


class _Group:
    """The ranks of one run_ranks. One runs at a time, until it must wait: the order is the same in every run."""

    def __init__(self, world: int, work: Callable):
        self.world, self.work = world, work
        self.mail, self.calls = defaultdict(deque), []
        self.results, self.failed, self.ending = [None] * world, None, False
        # rank -> what it waits for, and whether that is there
        self.waiting: dict[int, tuple[str, Callable]] = {}
        self.turns = [threading.Semaphore(0) for _ in range(world)]
        self.back = threading.Semaphore(0)  # a rank waits or has ended: the next may run
        self.threads = [threading.Thread(target=self._main, args=(r,), daemon=True) for r in range(world)]  # fmt: skip
        self.alive: set[int] = set(range(world))
        self.running: int | None = None

    def _main(self, rank):
        self.turns[rank].acquire()
        try:
            if not self.ending:
                self.results[rank] = self.work(ThreadRank(self, rank))
        except _Ended:
            pass
        except BaseException as error:
            self.failed = self.failed or error
        self.alive.discard(rank)
        self.back.release()

    def wait(self, rank, why, ready):
        """Let other ranks run until ready()."""
        if ready():
            return
        self.waiting[rank] = why, ready
        self.back.release()
        self.turns[rank].acquire()
        if self.ending:
            raise _Ended

    def run(self):
        for thread in self.threads:
            thread.start()
        last = -1
        try:
            while self.alive and not self.failed:
                able = [r for r in self.alive if r not in self.waiting or self.waiting[r][1]()]
                if not able:
                    self.failed = RankError(self._deadlock())
                    break
                last = min(able, key=lambda r: (r <= last, r))  # in turn
                self.waiting.pop(last, None)
                self.running = last
                self.turns[last].release()
                while not self.back.acquire(timeout=0.1):  # awake, so that a time limit can end it
                    pass
                self.running = None
        finally:
            self._end()
        if self.failed:
            raise self.failed

    def _deadlock(self):
        states = (
            f"rank {r} {self.waiting[r][0] if r in self.alive else 'has ended'}"
            for r in range(self.world)
        )
        return "no rank can continue: " + ", ".join(states)

    def _end(self):
        """End all threads. One that still runs, in a loop without end, gets an exception."""
        self.ending = True
        if self.running is not None:
            thread = ctypes.c_ulong(self.threads[self.running].ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Ended))
        for rank in sorted(self.alive):
            self.turns[rank].release()
        for thread in self.threads:
            thread.join(1.0)


def run_ranks(world: int, work: Callable[[Any], Any]) -> list:
    """Call work(comm) on `world` ranks, threads of this process. -> the result of each

    One rank runs at a time, so the times mean nothing; results and message sizes are those of real ranks. An exception on
    one rank ends all. Raises RankError if the calls of the ranks do not fit together, or if all of them wait.
    """
    group = _Group(world, work)
    group.run()
    return group.results


# ----------------------------------------------------------------------------- processes
class ProcessRank(Communicator):
    """A rank that mpirun started. gpu: for CuPy arrays of float32, by NCCL; else for NumPy arrays, by MPI.

    The collectives are those of xtrain.ddp, which work on slices of one array: here that is the whole argument.
    """

    def __init__(self, ranks: Any, gpu: bool = False):
        from types import SimpleNamespace

        from xtrain.parallel import collectives

        super().__init__(ranks.rank, ranks.world)
        self.mpi, self.gpu = ranks.comm, gpu
        kind = collectives.NcclCollectives if gpu else collectives.HostCollectives
        self.collectives: Any = kind(ranks, SimpleNamespace(grads=np.empty(0, np.float32)))

    def exchange(self, send, to, receive, source):
        self._note_exchange(send, to, receive, source)
        if self.gpu:
            self._exchange_on_gpu(send.copy(), to, receive, source)  # a contiguous copy
        else:
            self.mpi.Sendrecv(np.ascontiguousarray(send), to, recvbuf=receive, source=source)

    def _exchange_on_gpu(self, send, to, receive, source):
        from xtrain.parallel.collectives import cupy, load_nccl

        nccl, link = load_nccl(), self.collectives.nccl
        stream = cupy().cuda.get_current_stream().ptr
        nccl.groupStart()  # sent and received at the same time
        if send.size:
            link.send(send.data.ptr, send.size, nccl.NCCL_FLOAT32, to, stream)
        if receive.size:
            link.recv(receive.data.ptr, receive.size, nccl.NCCL_FLOAT32, source, stream)
        nccl.groupEnd()

    def all_reduce(self, x):
        self._note("all_reduce", x, 2)
        self._on(x).all_reduce(0, x.size)
        self.collectives.join()
        return x

    def all_gather(self, part):
        self._note("all_gather", part, self.world)
        x = np.empty_like(part, shape=(self.world * len(part), *part.shape[1:]))
        x[len(part) * self.rank : len(part) * (self.rank + 1)] = part
        self._on(x).all_gather(x.reshape(-1), 0, x.size)
        self.collectives.join()
        return x

    def reduce_scatter(self, x):
        self._note("reduce_scatter", x, 1)
        self._check_parts(x)
        n, x = len(x) // self.world, x.copy()
        self._on(x).reduce_scatter(0, x.size)
        self.collectives.join()
        return x[n * self.rank : n * (self.rank + 1)].copy()

    def close(self) -> None:
        self.collectives.close()

    def _on(self, x):
        """The collectives, for the elements of x."""
        need(x.dtype == np.float32 or not self.gpu, f"on a GPU arrays must be float32, not {x.dtype}")  # fmt: skip
        self.collectives.grads = x.reshape(-1)
        return self.collectives
