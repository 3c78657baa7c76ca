"""What started this process, told from the environment alone, and the memory that it can get, told from files."""

import os
import re
import resource
from pathlib import Path

import pytest

from xtrain.machine import first_on_machine, free_memory, launcher

HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}
BATCH = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0"}
TORCH = {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}
STARTED = {  # environment -> name, variable, processes
    "MPICH": (HYDRA, ("MPICH's mpirun", "PMI_SIZE", 2)),
    "one rank": ({**HYDRA, "PMI_SIZE": "1"}, ("MPICH's mpirun", "PMI_SIZE", 1)),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", 4)),
    "MVAPICH2": ({"MV2_COMM_WORLD_SIZE": "3"}, ("MVAPICH2's mpirun", "MV2_COMM_WORLD_SIZE", 3)),
    "only a rank": ({"PMIX_RANK": "5"}, ("Open MPI's mpirun", "PMIX_RANK", 6)),
    "srun": (STEP, ("srun", "SLURM_NTASKS", 4)),
    "srun --mpi=pmi2": ({**STEP, "PMI_SIZE": "4", "PMI_RANK": "0"}, ("srun", "PMI_SIZE", 4)),
    "fewer tasks than the job": ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, ("srun", "SLURM_STEP_NUM_TASKS", 1)),
    "mpirun starts its ranks through srun": ({**STEP, **HYDRA, "PMI_SIZE": "1"}, ("MPICH's mpirun", "PMI_SIZE", 1)),
    "torchrun": (TORCH, ("torchrun", "WORLD_SIZE", 8)),
    "torchrun under srun -n 1": ({**STEP, "SLURM_NTASKS": "1", **TORCH}, ("torchrun", "WORLD_SIZE", 8)),
}  # fmt: skip
NOT_STARTED = {
    "a terminal": {},
    "a shell of salloc": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"},
    "a script of sbatch": BATCH,
    "a script of sbatch, which is a step": {**BATCH, "SLURM_STEP_ID": "4294967291"},
    "an interactive step": {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290"},
    "a pod": {"WORLD_SIZE": "2", "RANK": "1"},
    "not a number": {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "x"},
}


@pytest.mark.parametrize("name", STARTED)
def test_launcher(name):
    environment, expected = STARTED[name]
    found = launcher(environment)
    assert (found.name, found.variable, found.world) == expected


@pytest.mark.parametrize("name", NOT_STARTED)
def test_no_launcher(name):
    assert launcher(NOT_STARTED[name]) is None


def test_first_on_machine():
    assert first_on_machine({}) and first_on_machine({"MPI_LOCALRANKID": "0", "PMI_RANK": "8"})
    assert not first_on_machine(HYDRA) and not first_on_machine(TORCH)


# ----------------------------------------------------------------------------- free memory
MEMINFO = "MemTotal:       8000000 kB\nMemAvailable:    1000000 kB\nSwapFree:   24 kB\n"
FREE = 1024 * 1000024
GROUP = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
GROUP_2 = "memory.max", "memory.current", ""


def tree(folder, files):
    """Write the files of proc and sys into a folder. files: {path: text}"""
    for path, text in ({"proc/meminfo": MEMINFO} | files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def group(path, limit, use, names, files=0):
    """The files of one cgroup. files: bytes of the page cache that count as its use"""
    limit_name, use_name, prefix = names
    path = f"sys/fs/cgroup/{path}"
    stat = (
        f"cache 7\n{prefix}inactive_file {files - files // 3}\n{prefix}active_file {files // 3}\n"
    )
    return {
        f"{path}/{limit_name}": f"{limit}\n",
        f"{path}/{use_name}": f"{use}\n",
        f"{path}/memory.stat": stat,
    }


JOB = "slurm/uid_0/job_1/step_0"  # the job's limit is the lowest, no group inside has one
GROUPS = {
    "no groups": ({}, FREE),
    "of version 2": ({"proc/self/cgroup": "0::/\n", **group("", 5000, 1000, GROUP_2)}, 4000),
    "without a limit": ({"proc/self/cgroup": "0::/\n", **group("", "max", 1000, GROUP_2)}, FREE),
    "page cache is free": ({"proc/self/cgroup": "0::/\n", **group("", 5000, 4500, GROUP_2, 300)}, 800),
    "nested": (
        {
            "proc/self/cgroup": f"0::/{JOB}\n",
            **group("slurm/uid_0/job_1", 5000, 1000, GROUP_2),
            **group("slurm", 900000, 1000, GROUP_2),
            **group(JOB, "max", 500, GROUP_2),
        },
        4000,
    ),
    "of version 1, nested": (
        {
            "proc/self/cgroup": f"9:name=systemd:/\n4:cpu,memory:/{JOB}\n0::/\n",
            **group("memory/slurm/uid_0/job_1", 5000, 1000, GROUP, 100),
            **group(f"memory/{JOB}", 2**63 - 4096, 500, GROUP),
        },
        4100,
    ),
    "seen from inside a container": (
        {"proc/self/cgroup": "4:memory:/docker/0123\n", **group("memory", 7000, 1000, GROUP)},
        6000,
    ),
    "used up": ({"proc/self/cgroup": "0::/../a\n", **group("a", 5000, 6000, GROUP_2)}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_the_smallest_group_decides(tmp_path, name):
    files, expected = GROUPS[name]
    assert free_memory(tree(tmp_path, files)) == expected


def test_limits_of_the_process(tmp_path, monkeypatch):
    root = tree(tmp_path, {"proc/self/status": "Name:\tpython\nVmSize:\t  10 kB\nVmData:\t 4 kB\n"})
    limits = {resource.RLIMIT_AS: 20 << 10, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    assert free_memory(root) == 10 << 10
    limits[resource.RLIMIT_DATA] = 5 << 10
    assert free_memory(root) == 1 << 10


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_a_limit_that_this_process_has():
    """`ulimit -d`, read from the files of this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    (used,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(used) + (64 << 20), hard))
    try:
        assert 0 < free_memory() <= 64 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_unknown_memory(tmp_path):
    assert free_memory(tmp_path) is None
