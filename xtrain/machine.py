"""Facts about this machine, and what started this process, from the standard library alone."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# environment variables in which launchers pass a process's rank on its machine
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK")
SPECIAL_STEP = 0xFFFFFFF0  # Slurm's steps from here on are shells, no parallel programs


def free_memory() -> int | None:
    """Free host memory in bytes, of the machine or, if lower, of the container; None if unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        available = re.search(r"MemAvailable:\s+(\d+)", text)
        free = 1024 * int(available[1] if available else "")  # "": ValueError, try the next way
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            limit = int((group / "memory.max").read_text(encoding="utf-8"))
            free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
        return max(free, 0)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def shared_memory() -> tuple[int, int] | None:
    """The size of /dev/shm and what is free of it, in bytes; None if there is no such folder."""
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
    """The launcher that started this process; None if there is none.

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
    """Is this the first of the processes that a launcher started on this machine?"""
    return all(environment.get(name, "0") == "0" for name in LOCAL_RANK)
