"""The ranks of lesson 32: threads, processes under mpirun, and the calls of NCCL. And lessons/on_ranks.py."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain import lesson
from xtrain.errors import UserError
from xtrain.parallel import collectives

ROOT = Path(__file__).resolve().parents[2]
ranks = lesson.load_checks("ranks")
HAS_MPI = importlib.util.find_spec("mpi4py") is not None
MPIRUN = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")


# ----------------------------------------------------------------------------- threads
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_call(world):
    x = np.random.default_rng(0).standard_normal((world, 2 * world, 3))

    def work(comm):
        mine, received = x[comm.rank].copy(), np.empty((2, 3))
        right, left = (comm.rank + 1) % world, (comm.rank - 1) % world
        total = comm.all_reduce(mine)
        assert total is mine
        parts = comm.reduce_scatter(x[comm.rank])
        gathered = comm.all_gather(parts)
        comm.exchange(x[comm.rank, :2], right, received, left)
        return total, parts, gathered, received, comm.log

    size = x[0].size
    for rank, (total, parts, gathered, received, log) in enumerate(lesson.run_ranks(world, work)):
        np.testing.assert_allclose(total, x.sum(0))
        np.testing.assert_allclose(parts, x.sum(0)[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(gathered, total)  # the same order of additions, too
        np.testing.assert_array_equal(received, x[rank - 1, :2])
        sends = size * (world - 1) // world
        calls = ["all_reduce", "reduce_scatter", "all_gather", "exchange"]
        assert log == list(zip(calls, [2 * sends, sends, sends, 6]))


def test_a_message_is_a_copy():
    def work(comm):
        x, received = np.full(2, float(comm.rank)), np.empty(2)
        comm.exchange(x, 1 - comm.rank, received, 1 - comm.rank)
        x[:] = 7
        comm.exchange(x, 1 - comm.rank, x, 1 - comm.rank)
        return received

    assert [a.tolist() for a in lesson.run_ranks(2, work)] == [[1, 1], [0, 0]]


BAD = {
    "rank 1 has ended": lambda comm: comm.rank or comm.all_reduce(np.ones(2)),
    "rank 0 waits for a message from rank 1, rank 1 waits for a message from rank 0":
        lambda comm: comm.exchange(np.ones(1), comm.rank, np.ones(1), 1 - comm.rank),
    "rank 1 calls all_gather with float64 (2,), and rank 0 calls all_reduce with float64 (2,)":
        lambda comm: (comm.all_gather if comm.rank else comm.all_reduce)(np.ones(2)),
    "and rank 0 calls all_reduce with float64 (1,)": lambda comm: comm.all_reduce(np.ones(1 + comm.rank)),
    "sends an array of shape (2,), rank 1 receives into one of shape (3,)": lambda comm: comm.exchange(np.ones(2), 1 - comm.rank, np.ones(3), 1 - comm.rank),
    "to=2, but the ranks are 0 to 1": lambda comm: comm.exchange(np.ones(2), 2, np.ones(2), 0),
    "the first axis of (3,) is not a multiple of 2": lambda comm: comm.reduce_scatter(np.ones(3)),
    "the array is not contiguous": lambda comm: comm.all_reduce(np.ones((2, 2))[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_calls_that_do_not_fit_together(words):
    before = threading.active_count()
    with pytest.raises(ranks.RankError) as caught:
        lesson.run_ranks(2, BAD[words])
    assert words in str(caught.value)
    assert threading.active_count() == before


def test_an_error_on_one_rank_ends_all():
    before, went_on = threading.active_count(), []

    def work(comm):
        if comm.rank == 1:
            raise KeyError("this one")
        try:
            comm.all_reduce(np.ones(2))
        except Exception:
            went_on.append(comm.rank)

    with pytest.raises(KeyError, match="this one"):
        lesson.run_ranks(3, work)
    assert threading.active_count() == before and not went_on


def test_a_loop_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(lesson.load_checks("running"), "SECONDS", 0.3)
    before = threading.active_count()
    code = "def ring_all_reduce(comm, x_n):\n    while comm.rank or True:\n        pass\n"
    said = lesson.verdict("32.1", lesson.load(code, "endless_ranks.py").ring_all_reduce)
    assert "did not end within" in said.text
    assert threading.active_count() == before


# ----------------------------------------------------------------------------- GPUs
class Address(np.ndarray):
    """A host array that has an address like one of CuPy."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def test_the_calls_of_nccl(monkeypatch):
    calls = []

    class Communicator:
        def __init__(self, *_):
            pass

        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *arguments))

    note = lambda name: lambda: calls.append((name,))
    nccl = SimpleNamespace(
        get_unique_id=lambda: "id", NcclCommunicator=Communicator, NCCL_SUM=0, NCCL_FLOAT32=32, NCCL_BFLOAT16=16,
        groupStart=note("start"), groupEnd=note("end"),
    )  # fmt: skip

    class Stream:
        ptr = 7

        def __init__(self, **_):
            pass

        def __enter__(self):
            pass

        __exit__ = wait_event = lambda self, *_: None

    event = lambda **_: SimpleNamespace(record=lambda stream: None)
    cuda = SimpleNamespace(Stream=Stream, Event=event, get_current_stream=Stream)
    monkeypatch.setattr(collectives, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(collectives, "load_nccl", lambda: nccl)
    group = SimpleNamespace(rank=1, world=2, comm=SimpleNamespace(bcast=lambda x: "id"))
    comm = ranks.ProcessRank(group, gpu=True)
    x = np.arange(8, dtype=np.float32).view(Address)
    comm.exchange(x[2:5], 0, x[5:], 0)
    address = x.__array_interface__["data"][0]
    kinds = [(name, *rest[1:]) for name, *rest in calls]
    assert kinds == [("start",), ("send", 3, 32, 0, 7), ("recv", 3, 32, 0, 7), ("end",)]
    assert calls[2][1] == address + 5 * 4
    calls.clear()
    comm.exchange(x[:0], 0, x[:0], 0)  # an empty chunk is not sent
    assert [c[0] for c in calls] == ["start", "end"]
    calls.clear()
    comm.all_reduce(x)
    part, whole = comm.reduce_scatter(x), comm.all_gather(x[:2])
    assert part.tolist() == [4, 5, 6, 7] and whole.shape == (4,) and whole[2:].tolist() == [0, 1]
    assert [(name, count, kind) for name, _, _, count, kind, *_ in calls] == [
        ("allReduce", 8, 32), ("reduceScatter", 4, 32), ("allGather", 2, 32),
    ]  # fmt: skip
    assert calls[0][1] == calls[0][2] == address
    assert calls[1][2] - calls[1][1] == 4 * 4 and calls[2][1] - calls[2][2] == 2 * 4
    with pytest.raises(ranks.RankError, match="on a GPU arrays must be float32"):
        comm.all_reduce(x.astype(np.float64))


# ----------------------------------------------------------------------------- processes
def on_ranks(world, *arguments, folder=ROOT):
    more = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }  # fmt: skip
    command = [MPIRUN, "-n", str(world), sys.executable, ROOT / "lessons" / "on_ranks.py"]
    return subprocess.run(
        [*map(str, [*command, *arguments])], cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, timeout=200
    )  # fmt: skip


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI or MPIRUN is None, reason="no mpi4py or no mpirun")
def test_a_readers_file_on_real_ranks(tmp_path):
    """Three functions are right. One would make real ranks wait for ever: it is refused before."""
    text = lesson.lesson_file("32").read_text(encoding="utf-8")
    mine = lesson.tagged(text, "imports", "exercise", "solution")
    hangs = "def split_mlp(comm, x, w1, w2, dy):\n    if comm.rank:\n        comm.all_reduce(dy)\n"
    file = tmp_path / "mine.py"
    file.write_text(f"{mine}\n\n{hangs}")
    done = on_ranks(3, file, "--numbers", 1001)
    assert done.returncode == 1, done.stdout + done.stderr
    first, ring, mlp, weights, fsdp = done.stdout.splitlines()
    assert first == "3 ranks, cpu"
    assert "32.2 split_mlp: not right yet: `xtrain lesson check 32.2`" in mlp
    names = "32.1 ring_all_reduce", "32.3 own_weights", "32.4 fsdp_step"
    for line, name in zip((ring, weights, fsdp), names):
        assert line.startswith(f"{name}: equal to the unsplit computation. "), line
    # parts of 333, 334 and 334: rank 0 sends all but one, twice
    assert re.search(r"1,001 numbers, 1,33[45] sent", ring)
    assert "loss 3.6" in weights and fsdp.endswith("153 of 441 numbers per rank")


def test_a_file_that_cannot_be_read(tmp_path):
    spec = importlib.util.spec_from_file_location("on_ranks", ROOT / "lessons" / "on_ranks.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.load(None).fsdp_step.__doc__.startswith("One step")
    with pytest.raises(UserError, match=r"nothing\.py cannot be read .*`xtrain lesson start 32`"):
        program.load(tmp_path / "nothing.py")
    (tmp_path / "broken.py").write_text("def broken(:\n")
    with pytest.raises(UserError, match=r"broken\.py cannot be read as Python: SyntaxError"):
        program.load(tmp_path / "broken.py")
