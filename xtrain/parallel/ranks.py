"""Ranks on the host side: who am I, rank 0 first, sums of a few numbers, does any rank want to stop (MPI)."""

import contextlib
import faulthandler
import hashlib
import os
import platform
from typing import Any

import numpy as np

from ..device import Array, cupy, to_numpy
from ..errors import UserError
from ..training.single_process import SingleProcess

START_SECONDS = 600.0  # between the start of the first rank and that of the last, at most


class Ranks(SingleProcess):
    """The ranks of an MPI communicator.  local, local_world: the same among those of this machine."""

    def __init__(self, comm: Any):
        from mpi4py import MPI

        self.comm, self.rank, self.world = comm, comm.rank, comm.size
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.node, self.local, self.local_world = node, node.rank, node.size
        self.failed = comm.Dup()  # see faults.py: its messages cannot be mistaken for others

    def first(self, work):
        result = error = None
        if self.rank == 0:
            try:
                result = work()
            except UserError as e:
                error = e
        result, error = self.comm.bcast((result, error))
        if error is not None:
            raise error
        return result

    def in_turn(self, work):
        done = []  # not sent: each rank has its own
        self.first(lambda: done.append(work()))
        return done[0] if done else work()

    def total(self, values):
        mine = np.array(values, np.float64)
        all_RN = np.empty((self.world, mine.size))
        self.comm.Allgather(mine, all_RN)
        return all_RN.sum(axis=0).tolist()

    def any(self, flag):
        return self.total([float(flag)])[0] > 0

    def gather(self, thing):
        return self.comm.allgather(thing)

    def parts(self, own_n: np.ndarray) -> np.ndarray | None:
        """own (n,), n the same on all ranks -> (world, n) on rank 0, None elsewhere."""
        all_Rn = np.empty((self.world, own_n.size), own_n.dtype) if self.rank == 0 else None
        self.comm.Gather(np.ascontiguousarray(own_n), all_Rn)
        return all_Rn

    def check_same(self, things: dict[str, Any], needed: str) -> None:
        """Raises UserError, on every rank, when some rank has another value for one of the names. needed: of all ranks."""
        for rank, other in enumerate(found := self.gather(things)):
            for name, value in found[0].items():
                if repr(other.get(name)) != repr(value):  # nan is not equal to itself
                    raise UserError(
                        f"rank {rank} has {name} {other.get(name)}, rank 0 has {value}: all ranks need {needed}"
                    )

    def check_identical(self, arrays: list[Array], step: int) -> None:
        """Raises UserError, on every rank, when the arrays are not the same bits everywhere."""
        digest = hashlib.blake2b(digest_size=16)
        for array in arrays:
            digest.update(to_numpy(array).view(np.uint8).data)
        found = self.gather(digest.hexdigest())
        others = [rank for rank, other in enumerate(found) if other != found[0]]
        if others:
            when, advice = f"after step {step}", "resume from the last checkpoint, with --zero 1"
            if step == 0:
                when, advice = "before the first step", "all need the same --init"
            raise UserError(
                f"{when} the parameters of rank {others[0]} are not those of rank 0 "
                f"({len(others)} of {self.world} ranks differ): {advice}"
            )


def connect() -> Ranks:
    """The ranks that mpirun (or srun) started. Raises UserError when there is no MPI to be had."""
    how = "`pip install -e '.[mpi]'` in the checkout brings mpi4py and an MPI library"
    try:
        MPI = _when_all_ranks_have_started()
    except ModuleNotFoundError:
        where = platform.node()  # one machine of several may lack it
        raise UserError(
            f"several ranks need mpi4py, which is not installed on {where}: {how}"
        ) from None
    except (
        ImportError,
        RuntimeError,
    ) as error:  # mpi4py is there, the library that it calls is not
        reason = str(error).splitlines()[0]
        raise UserError(f"mpi4py finds no MPI library ({reason}): {how}") from None
    return Ranks(MPI.COMM_WORLD)


def _when_all_ranks_have_started() -> Any:
    """-> MPI. Importing it waits for all ranks. MPICH waits for ever for one that has failed before it came so far: then
    this process ends. It cannot speak meanwhile, but where it stood is printed: hence this function's name."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # a stderr that is no file
        faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    try:
        from mpi4py import MPI
    finally:
        faulthandler.cancel_dump_traceback_later()
    return MPI


def choose_gpu(ranks: Ranks) -> None:
    """The GPU of this rank becomes CuPy's current device: the l-th of the machine for its l-th rank.

    Must come before any other use of a GPU. Where a launcher shows each rank a GPU of its own (srun
    --gpus-per-task=1), it is that one. Raises UserError when a machine has more ranks than GPUs.
    """
    runtime = cupy().cuda.runtime
    count = runtime.getDeviceCount()
    visible = ranks.node.allgather((os.environ.get("CUDA_VISIBLE_DEVICES"), count))
    own = all(n == 1 for _, n in visible) and len(set(visible)) == ranks.local_world > 1
    shortage = ranks.gather(not own and ranks.local_world > count)
    if any(shortage):
        machine = "this machine" if shortage[ranks.rank] else "another machine"
        raise UserError(
            f"{machine} has fewer GPUs than ranks ({count} and {ranks.local_world} here): start one rank per GPU, "
            "or use --device cpu"
        )
    cupy().cuda.Device(0 if own else ranks.local).use()
