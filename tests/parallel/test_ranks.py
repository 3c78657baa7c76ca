"""Ranks that would train alone, or whose MPI library cannot start, are refused in one sentence."""

import os
import subprocess
import sys

import pytest
from test_ddp import MODULE, MPICH, command, environment, finish, mpi, one_sentence, start  # noqa: F401

from xtrain import machine
from xtrain.errors import UserError
from xtrain.parallel.ranks import check_launcher, shared_memory_shortage
from xtrain.train import main as train_main

LIBRARY = {
    "MPICH": "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure:    --with-pm=hydra\n",
    "MPICH with PMIx": "MPICH Version:      4.2.0\nMPICH Device:       ch4:ofi\nMPICH configure:    --with-pmix=/usr\n",
    "Open MPI": "Open MPI v5.0.11, package: Open MPI root@localhost Distribution, ident: 5.0.11",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
TORCH = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
STEP = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
SALLOC = {"SLURM_NTASKS": "4"}
# library, environment, size of COMM_WORLD (None: before MPI_Init), what the message says (None: it fits)
FITS = [
    ("MPICH", HYDRA, None, None),
    ("MPICH", HYDRA, 2, None),
    ("MPICH", HYDRA, 1, "MPICH's mpirun started 2 ranks (PMI_SIZE), but mpi4py uses MPICH 5.0.2"),
    ("MPICH", OMPI, None, "Open MPI's mpirun started 2 ranks (OMPI_COMM_WORLD_SIZE), but mpi4py uses MPICH 5.0.2"),
    ("MPICH", OMPI, 1, "use the mpirun of MPICH 5.0.2"),
    ("MPICH with PMIx", OMPI, None, None),
    ("MPICH with PMIx", OMPI, 2, None),
    ("MPICH", {"PMIX_RANK": "0", **STEP}, None, "srun started 4 ranks"),
    ("Open MPI", OMPI, None, None),
    ("Open MPI", OMPI, 2, None),
    ("Open MPI", HYDRA, None, "MPICH's mpirun started 2 ranks (PMI_SIZE), but mpi4py uses Open MPI v5.0.11"),
    ("Open MPI", {**HYDRA, "PMI_SIZE": "1"}, None, None),
    ("Open MPI", {**HYDRA, "PMI_SIZE": "1"}, 1, None),
    ("Open MPI", {**STEP, "PMI_SIZE": "4", "PMI_RANK": "0"}, None, None),
    ("Open MPI", {"PMIX_RANK": "1"}, 1, "PMIX_RANK"),
    ("MPICH", {"MV2_COMM_WORLD_SIZE": "2"}, 1, "MVAPICH2's mpirun started 2 ranks"),
    ("MPICH", TORCH, None, None),
    ("MPICH", TORCH, 1, "torchrun started 2 ranks (WORLD_SIZE)"),
    ("MPICH", TORCH, 1, "use `mpirun -n 2 xtrain train`"),
    ("MPICH", STEP, 1, "srun started 4 ranks (SLURM_NTASKS)"),
    ("MPICH", STEP, 1, "srun --mpi=list"),
    ("MPICH", STEP, 4, None),
    ("MPICH", SALLOC, 1, None),
    ("MPICH", {}, 1, None),
]  # fmt: skip


@pytest.mark.parametrize("library, environment, world, sentence", FITS)
def test_the_launcher_and_the_library(library, environment, world, sentence):  # noqa: F811
    if sentence is None:
        check_launcher(LIBRARY[library], world, environment)
        return
    with pytest.raises(UserError) as error:
        check_launcher(LIBRARY[library], world, environment)
    assert sentence in str(error.value) and "xtrain.doctor" in str(error.value)


@mpi
@pytest.mark.parametrize("variables", [HYDRA, OMPI, TORCH, STEP], ids=lambda v: next(iter(v)))
def test_a_rank_that_is_alone_does_not_train(variables, environment, tmp_path):  # noqa: F811
    """As when the library is not the launcher's: the variables are set, but COMM_WORLD has one rank."""
    done = subprocess.run(
        [*MODULE, *command(tmp_path)],
        capture_output=True, text=True, env={**environment, **variables}, timeout=60,
    )  # fmt: skip
    one_sentence((done.returncode, done.stdout, done.stderr), "in which every rank is alone")
    assert not list(tmp_path.iterdir())


@mpi
def test_an_allocation_is_no_launcher(environment, tmp_path):  # noqa: F811
    done = subprocess.run(
        [*MODULE, *command(tmp_path)],
        capture_output=True, text=True, env={**environment, **SALLOC, "SLURM_PROCID": "0"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "run").is_dir(), done.stderr


@mpi
def test_a_command_that_is_one_process(environment, tmp_path):  # noqa: F811
    options = ["--model", tmp_path, "the"]
    job = start(environment, 2, sys.executable, "-m", "xtrain.generate", *options)
    one_sentence(finish(job, 60), "`mpirun -n 2 xtrain train`")
    assert not list(tmp_path.iterdir())


def test_one_process_in_an_allocation_or_as_one_rank(monkeypatch, capsys):
    for variables in (SALLOC, {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert train_main(["--data", "/nowhere"]) == 2
        assert "/nowhere" in capsys.readouterr().err


# ----------------------------------------------------------------------------- /dev/shm
MB = 10**6
SPACE = [  # library, ranks, size, free, UCX_TLS, is it enough?  As measured with MPICH 5.0.2
    ("MPICH", 1, 16.8, 16.8, None, False),
    ("MPICH", 2, 16.8, 16.8, None, False),
    ("MPICH", 2, 16.8, 16.8, "^posix", True),
    ("MPICH", 2, 2.1, 2.1, "^posix", False),
    ("MPICH", 4, 67.1, 67.1, None, True),
    ("MPICH", 8, 50.3, 50.3, None, False),
    ("MPICH", 8, 67.1, 67.1, None, True),
    ("MPICH", 8, 67.1, 67.1 - 7 * 5.4, None, True),  # the other seven have allocated theirs
    ("MPICH", 8, 67.1, 5, None, False),  # something else has
    ("MPICH", 16, 67.1, 67.1, None, False),
    ("MPICH with PMIx", 4, 16.8, 16.8, None, True),  # without UCX
    ("MPICH with PMIx", 4, 4.1, 4.1, None, False),
    ("Open MPI", 8, 1, 1, None, True),
]


@pytest.mark.parametrize("library, ranks, size, free, tls, enough", SPACE)
def test_shared_memory(library, ranks, size, free, tls, enough, monkeypatch):
    monkeypatch.setattr(machine, "shared_memory", lambda: (int(size * MB), int(free * MB)))
    given = {"MPI_LOCALNRANKS": str(ranks), **({"UCX_TLS": tls} if tls else {})}
    shortage = shared_memory_shortage(LIBRARY[library], given)
    assert (shortage == "") is enough, shortage
    assert enough or (f"for {ranks} ranks" in shortage and "--shm-size" in shortage)


@mpi
@pytest.mark.skipif(not MPICH, reason="only MPICH needs it")
def test_a_small_shared_memory_is_refused_before_mpi_starts(environment, tmp_path):  # noqa: F811
    script = (
        "import sys; from xtrain import machine; machine.shared_memory = lambda: (2**24, 2**24)\n"
        "from xtrain.ddp import main; sys.exit(main())"
    )
    job = start(environment, 2, sys.executable, "-c", script, *command(tmp_path))
    one_sentence(finish(job, 60), "/dev/shm has 16.8 of 16.8 MB free")
    assert not list(tmp_path.iterdir())


@mpi
@pytest.mark.skipif(not MPICH, reason="only MPICH needs it")
def test_ranks_start_in_just_enough_shared_memory(environment, tmp_path):  # noqa: F811
    """The constants are what the library needs. Needs the right to mount."""
    mount = "mount -t tmpfs -o size={}k tmpfs /dev/shm && exec "
    inside = lambda kilobytes, *more: [
        "unshare",
        "-m",
        "sh",
        "-c",
        mount.format(kilobytes) + " ".join(more),
    ]
    if os.name != "posix" or subprocess.run(inside(1000, "true"), capture_output=True).returncode:
        pytest.skip("no right to mount a /dev/shm")
    for kilobytes, code in ((16384, 2), (24250, 0)):
        job = inside(kilobytes, "mpirun", "-n 2", *MODULE, *map(str, command(tmp_path)))
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        done = subprocess.run(
            job, capture_output=True, text=True, env={**environment, "PATH": path}, timeout=60
        )
        assert done.returncode == code, done.stderr
