"""Facts about this machine, and what started this process, from the standard library alone."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# environment variables in which launchers pass a process's rank on its machine
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK")
LEAST_ADDRESS_SPACE = 500 << 20  # of the libraries, with one thread
SPECIAL_STEP = 0xFFFFFFF0  # Slurm's steps from here on are shells, no parallel programs


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process can still get; None if unknown.

    The least of: what is free of the machine, what every memory cgroup around the process leaves
    (version 1 or 2), and what its limits of address space and of data leave. Pages of files count
    as free, because the kernel drops them.

    root: the folder with proc and sys.
    """
    known = [*_of_machine(root), *_of_groups(root), *_of_limits(root)]
    return max(0, min(known)) if known else None


def _numbers(path: Path) -> dict[str, int]:
    """Return {name: number} of the lines "name number" or "name: number kB" of a file."""
    lines = re.findall(r"^(\w+):?\s+(\d+)( kB)?$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in lines}


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, KeyError):
        sizes = _numbers(root / "proc/meminfo")
        yield sizes["MemAvailable"] + sizes.get("SwapFree", 0)


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what each group around this process leaves: its limit less its use."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, prefix = mount, ""
            limit, use = "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, prefix = mount / "memory", "total_"
            limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # in a container, folders of the path that are outside it are not there
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names) + 1):
            group = folder.joinpath(*names[:depth])
            with contextlib.suppress(OSError, ValueError):  # "max" means unlimited
                left = int((group / limit).read_text()) - int((group / use).read_text())
                pages = _numbers(group / "memory.stat")
                names_of_files = (f"{prefix}inactive_file", f"{prefix}active_file")
                yield left + sum(pages.get(name, 0) for name in names_of_files)


def _of_limits(root: Path) -> Iterator[int]:
    """Yield what the limits of this process (ulimit -v, ulimit -d) leave."""
    with contextlib.suppress(ImportError, OSError, KeyError):
        import resource

        used = _numbers(root / "proc/self/status")
        for limit, use in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                yield most - used[use]


def little_address_space() -> str:
    """Why xtrain cannot start, and what to do, if `ulimit -v` leaves too little for its libraries;
    "" if it can. They would end in a traceback or abort."""
    with contextlib.suppress(ImportError, OSError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
            return (
                f"the limit of {limit / 1e6:.0f} MB of address space is too low for xtrain's "
                "libraries: raise it, such as by `ulimit -v 4000000`"
            )
    return ""


def shared_memory() -> tuple[int, int] | None:
    """Return the size of /dev/shm and what is free of it, in bytes; None if there is no such
    folder."""
    with contextlib.suppress(OSError, AttributeError):
        stat = os.statvfs("/dev/shm")
        return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return None


@dataclass(frozen=True)
class Launcher:
    """A program that starts several processes.
    world: their number.
    variable: the environment variable that says so."""

    name: str
    variable: str
    world: int

    @property
    def is_one_process(self) -> bool:
        """Did it start only this process? Unknown, hence False, where only a rank is known."""
        return self.world == 1 and "RANK" not in self.variable


def launcher(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this process; None if there is none.

    A shell of salloc or sbatch is not started by srun, although SLURM_NTASKS is set in it.
    """

    def found(name: str, variable: str, first: int = 0) -> list[Launcher]:
        value = environment.get(variable, "")
        if value.isdecimal():
            return [Launcher(name, variable, int(value) + first)]
        return []

    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    in_step = "SLURM_PROCID" in environment and step.isdecimal() and int(step) < SPECIAL_STEP
    pmi = "MPICH's mpirun"
    if in_step and "MPI_LOCALRANKID" not in environment:
        pmi = "srun"
    pmix = "Open MPI's mpirun"
    if in_step:
        pmix = "srun"
    sizes = [
        *found("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"),
        *found("MVAPICH2's mpirun", "MV2_COMM_WORLD_SIZE"),
        *found(pmi, "PMI_SIZE"),
    ]
    if not sizes:  # otherwise srun may have started what started this process
        if in_step:
            sizes += found("srun", "SLURM_STEP_NUM_TASKS") or found("srun", "SLURM_NTASKS")
        if "LOCAL_RANK" in environment:  # WORLD_SIZE alone is also set where no launcher is
            sizes += found("torchrun", "WORLD_SIZE")
        # a rank R means that there are at least R + 1 processes
        sizes += [*found(pmi, "PMI_RANK", 1), *found(pmix, "PMIX_RANK", 1)]
    return max(sizes, key=lambda launcher: launcher.world, default=None)


def first_on_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True in the first of the processes that a launcher started on this machine."""
    return all(environment.get(name, "0") == "0" for name in LOCAL_RANK)
