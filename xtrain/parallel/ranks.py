"""Communication between the ranks' host processes (MPI): rank 0 first, sums of a few numbers,
equality checks.

For gradients and weights see collectives.py.
"""

import atexit
import contextlib
import faulthandler
import hashlib
import os
import platform
import signal
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import machine
from ..device import Array, cupy, to_numpy
from ..errors import UserError
from ..training.single_process import SingleProcess

START_SECONDS = 600.0  # at most, between the start of the first rank and that of the last
END_SECONDS = 600  # at most, between the ends
# What MPICH 5.0.2 (its wheel, ch4:ucx) allocates of /dev/shm in MPI_Init, in bytes a rank, measured
# with 1 to 16 ranks. UCX crashes if about UCX_SPARE are free before its last allocation, and
# allocates none with much less.
SEGMENT = 1_061_440
UCX_SEGMENT = 4_334_000
UCX_SPARE = 14_000_000


class Ranks(SingleProcess):
    """The ranks of an MPI communicator.

    rank, world: this rank and the number of ranks.
    local, local_world: the same among the ranks of this machine.
    threads: may several threads of a rank call MPI at once, on every rank?
    """

    def __init__(self, comm: Any):
        from mpi4py import MPI

        self.comm = comm
        self.rank = comm.rank
        self.world = comm.size
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.node = node
        self.local = node.rank
        self.local_world = node.size
        self.failed = comm.Dup()  # for watchdog.py and heartbeats.py: their messages are apart
        self.threads = all(comm.allgather(MPI.Query_thread() == MPI.THREAD_MULTIPLE))

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
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

    def rank_0_first(self, work: Callable[[], Any]) -> Any:
        done: list[Any] = []  # not broadcast: each rank has its own result
        self.on_rank_0(lambda: done.append(work()))
        return done[0] if done else work()

    def sum(self, values: list[float]) -> list[float]:
        mine = np.array(values, np.float64)
        all_RN = np.empty((self.world, mine.size))
        self.comm.Allgather(mine, all_RN)
        return all_RN.sum(axis=0).tolist()

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def gather(self, thing: Any) -> list[Any]:
        return self.comm.allgather(thing)

    def gather_on_rank_0(self, own_n: np.ndarray) -> list[np.ndarray] | None:
        """(n,) of each rank, of any length -> all of them on rank 0, None elsewhere."""
        sizes = self.gather(own_n.size)
        whole = None
        if self.rank == 0:
            whole = np.empty(sum(sizes), own_n.dtype)
        self.comm.Gatherv(np.ascontiguousarray(own_n), None if whole is None else (whole, sizes))
        if whole is None:
            return None
        return np.split(whole, np.cumsum(sizes)[:-1])

    def check_same(self, things: dict[str, Any], needed: str | None = None) -> None:
        """Raise UserError, on every rank, if a value differs on any rank.

        needed: what all ranks need, for the message. None: the same of what differs.
        """
        gathered = self.gather(things)
        for rank, other in enumerate(gathered):
            for name in gathered[0] | other:
                own = other.get(name)
                first = gathered[0].get(name)
                if repr(own) != repr(first):  # nan is not equal to itself
                    raise UserError(
                        f"rank {rank} has {name} {own}, rank 0 has {first}: all ranks need "
                        f"{needed or f'the same {name}'}"
                    )

    def check_identical(self, arrays: list[Array], step: int) -> None:
        """Raises UserError, on every rank, if the arrays are not the same bits on all ranks."""
        digest = hashlib.blake2b(digest_size=16)
        for array in arrays:
            digest.update(to_numpy(array).view(np.uint8).data)
        digests = self.gather(digest.hexdigest())
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            when = f"after step {step}"
            advice = "resume from the last checkpoint, with --zero 1"
            if step == 0:
                when = "before the first step"
                advice = "give all ranks the same --init"
            raise UserError(
                f"{when} the parameters of rank {others[0]} differ from those of rank 0 "
                f"({len(others)} of {self.world} ranks differ): {advice}"
            )


def connect() -> Ranks:
    """Return the ranks of MPI's COMM_WORLD.

    Raises UserError if there is no MPI library, if it is not the launcher's, or if /dev/shm is too
    small for it.
    """
    how = "run `pip install -e '.[mpi]'` in the checkout, which installs mpi4py and an MPI library"
    try:
        MPI = load_mpi()
    except ModuleNotFoundError:
        where = platform.node()  # only one of several machines may lack it
        raise UserError(
            f"several ranks need mpi4py, which is not installed on {where}: {how}"
        ) from None
    except (ImportError, RuntimeError) as error:  # mpi4py is installed, the MPI library is not
        reason = str(error).splitlines()[0]
        raise UserError(f"mpi4py finds no MPI library ({reason}): {how}") from None
    library = MPI.Get_library_version()
    check_launcher(library, None, os.environ)
    shortage = shared_memory_shortage(library, os.environ)
    if shortage:
        raise UserError(shortage)
    return _when_all_ranks_have_started(MPI, library)


def load_mpi() -> Any:
    """Return mpi4py.MPI with its library loaded, which is not initialized: that may end the
    process."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    return MPI


def check_launcher(library: str, world: int | None, environment: Mapping[str, str]) -> None:
    """Raises UserError if the launcher is not one of the MPI library: each rank would be alone, and
    train alone.

    library: MPI.Get_library_version().
    world: the size of COMM_WORLD; None before MPI_Init, which ends the process or prints half a
    page if the library does not speak the launcher's protocol (PMI or PMIx).
    """
    launcher = machine.launcher(environment)
    pmi = "PMI_RANK" in environment
    pmix = "PMIX_RANK" in environment
    if launcher is None:
        return
    fits = launcher.world == 1 or world != 1
    if world is None and library.startswith("MPICH"):
        fits = pmi or not pmix or "pmix" in library.lower()
    elif world is None and library.startswith("Open MPI"):
        fits = launcher.world == 1 or pmix or not (pmi and "MPI_LOCALRANKID" in environment)
    if fits:
        return
    uses = library_name(library)
    n = launcher.world
    remedy = f"use the mpirun of {uses}"
    if launcher.name == "srun":
        remedy = (
            f"choose what {uses} understands with --mpi (`srun --mpi=list`), or use its own mpirun"
        )
    elif launcher.name == "torchrun":
        remedy = f"use `mpirun -n {n} xtrain train`"
    raise UserError(
        f"{launcher.name} started {n} ranks ({launcher.variable}), but mpi4py uses {uses}, in "
        f"which every rank is alone: {remedy}; `python -m xtrain.doctor` checks which mpirun fits"
    )


def library_name(library: str) -> str:
    """Return what MPI.Get_library_version() says in two or three words: "MPICH 5.0.2", "Open MPI
    v5.0.11"."""
    return " ".join(
        library.strip("\0 \n").split("\n")[0].split(",")[0].replace("Version:", "").split()
    )


def shared_memory_shortage(
    library: str, environment: Mapping[str, str], ranks: int | None = None
) -> str:
    """Return why MPICH would end with a bus error or a segmentation fault in MPI_Init, and what to
    do; "" if it would not.

    ranks: on this machine; None: as many as the launcher started.
    """
    space = machine.shared_memory()
    if not library.startswith("MPICH") or "ch4" not in library or space is None:
        return ""
    total, free = space
    ranks = ranks or int(environment.get("MPI_LOCALNRANKS", 1))
    bytes_per_rank = SEGMENT
    spare = 0
    if "ch4:ucx" in library and environment.get("UCX_TLS") != "^posix":
        bytes_per_rank = SEGMENT + UCX_SEGMENT
        spare = UCX_SPARE
    need = ranks * bytes_per_rank + spare
    if min(total, free + (ranks - 1) * bytes_per_rank) >= need:  # the other ranks may have theirs
        return ""
    return (
        f"/dev/shm has {free / 1e6:.1f} of {total / 1e6:.1f} MB free, and {library_name(library)} "
        f"needs {need / 1e6:.1f} MB "
        f"for {ranks} ranks: give the container more (docker run --shm-size=1g), "
        "or set UCX_TLS=^posix, with which MPICH needs less"
    )


def _when_all_ranks_have_started(MPI: Any, library: str) -> Ranks:
    """Call MPI_Init, which waits for all ranks, and return them.

    MPICH waits forever for a rank that failed before: after START_SECONDS this process exits.
    It can then print only its stack, so the name of this function is the message.
    """
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # stderr is not a file
        faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    try:
        if not MPI.Is_initialized():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "suspicious MPI")  # check_launcher knows better
                MPI.Init_thread()
        atexit.unregister(_limit_finalize)  # once, however often ranks connect
        if hasattr(signal, "alarm"):  # not on Windows
            atexit.register(_limit_finalize)
        check_launcher(library, MPI.COMM_WORLD.size, os.environ)
        return Ranks(MPI.COMM_WORLD)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_finalize() -> None:
    """End the process if MPI_Finalize, which follows and waits for all ranks, takes too long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(END_SECONDS)


def choose_gpu(ranks: Ranks) -> None:
    """Make the GPU of this rank CuPy's current device: the machine's l-th GPU for its l-th rank.

    Call it before any other use of a GPU. If the launcher makes one GPU visible to each rank (srun
    --gpus-per-task=1), that one is used. Raises UserError if a machine has more ranks than GPUs.
    """
    runtime = cupy().cuda.runtime
    count = runtime.getDeviceCount()
    visible = ranks.node.allgather((os.environ.get("CUDA_VISIBLE_DEVICES"), count))
    one_each = all(n == 1 for _, n in visible) and len(set(visible)) == ranks.local_world > 1
    shortage = ranks.gather(not one_each and ranks.local_world > count)
    if any(shortage):
        if shortage[ranks.rank]:
            machine = "this machine"
        else:
            machine = "another machine"
        raise UserError(
            f"{machine} has fewer GPUs than ranks ({count} and {ranks.local_world} here): start "
            "one rank per GPU, or use --device cpu"
        )
    cupy().cuda.Device(0 if one_each else ranks.local).use()
