"""What started this process, told from the environment alone."""

import pytest

from xtrain.machine import first_on_machine, launcher

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
