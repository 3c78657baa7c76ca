"""Choice of library and GPU, and the calls to NCCL, all without them. With MPI: test_ddp.py."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain.errors import UserError
from xtrain.parallel import collectives, ranks


def test_no_mpi_library(monkeypatch):
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("cannot load MPI library\nsecond line")

    monkeypatch.setitem(sys.modules, "mpi4py", Broken())
    with pytest.raises(UserError, match=r"no MPI library \(cannot load MPI library\)"):
        ranks.connect()


def fake_gpus(monkeypatch, count):
    used = []
    device = lambda i: SimpleNamespace(use=lambda: used.append(i))
    runtime = SimpleNamespace(getDeviceCount=lambda: count)
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device))
    monkeypatch.setattr(ranks, "cupy", lambda: fake)
    return used


def fake_ranks(local, visible):
    node = SimpleNamespace(allgather=lambda mine: visible)
    gather = lambda mine: [mine] * len(visible)
    return SimpleNamespace(
        rank=local, local=local, local_world=len(visible), node=node, gather=gather
    )


def test_which_gpu(monkeypatch):
    used = fake_gpus(monkeypatch, 4)
    ranks.choose_gpu(fake_ranks(3, [(None, 4)] * 4))
    fake_gpus_of_its_own = fake_gpus(monkeypatch, 1)
    ranks.choose_gpu(fake_ranks(3, [(str(i), 1) for i in range(4)]))
    assert used == [3] and fake_gpus_of_its_own == [0]
    with pytest.raises(UserError, match=r"fewer GPUs than ranks \(1 and 2 here\)"):
        ranks.choose_gpu(fake_ranks(1, [(None, 1)] * 2))


def test_no_nccl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UserError, match="no NCCL library"):
        collectives.load_nccl()


# ----------------------------------------------------------------------------- NCCL, as far as it goes without a GPU
class Address(np.ndarray):
    data = property(lambda self: SimpleNamespace(ptr=self.__array_interface__["data"][0]))


@pytest.mark.parametrize("bf16", [False, True])
def test_what_nccl_is_asked_for(monkeypatch, bf16):
    """Addresses, counts, types, streams and events of every call."""
    asked, order = [], []

    class Stream:
        ptr = 7

        def __init__(self, non_blocking, priority=0):
            self.name = "side"

        wait_event = lambda self, event: order.append((self.name, "waits for", event.stream.name))
        __enter__ = lambda self: self
        __exit__ = lambda *_: None

    class Event:
        def __init__(self, disable_timing):
            pass

        def record(self, stream):
            self.stream = stream

    class Communicator:
        def __init__(self, world, name, rank):
            assert (world, name, rank) == (4, "id", 2)

        def __getattr__(self, name):
            return lambda *arguments: asked.append((name, *arguments))

    nccl = SimpleNamespace(
        get_unique_id=lambda: "id", NcclCommunicator=Communicator, NCCL_SUM=0, NCCL_FLOAT32=32, NCCL_BFLOAT16=16
    )  # fmt: skip
    main = Stream(False)
    main.name = "main"
    cuda = SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=lambda: main)
    monkeypatch.setattr(collectives, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(collectives, "load_nccl", lambda: nccl)
    monkeypatch.setattr(
        collectives,
        "empty",
        lambda _, shape, dtype=np.float32: np.empty(shape, dtype).view(Address),
    )
    monkeypatch.setattr(collectives, "cast_into", lambda y, x: y.__setitem__(..., x))
    comm = SimpleNamespace(bcast=lambda x: "id")
    ranks = SimpleNamespace(rank=2, world=4, comm=comm)
    grads = np.arange(64, dtype=np.float32).view(Address)
    c = collectives.NcclCollectives(ranks, SimpleNamespace(grads=grads), bf16)
    sent, kind = (c.half, 16) if bf16 else (grads, 32)
    at = lambda array, i: array.data.ptr + i * array.itemsize
    c.all_reduce(8, 24)
    c.reduce_scatter(16, 48)  # parts of 8: this rank's begins at 32
    c.all_gather(grads, 16, 48)
    c.progress()
    c.join()
    assert asked == [
        ("allReduce", at(sent, 8), at(sent, 8), 16, kind, 0, 7),
        ("reduceScatter", at(sent, 16), at(sent, 32), 8, kind, 0, 7),
        ("allGather", at(grads, 32), at(grads, 16), 8, 32, 7),
    ]
    assert order == [("side", "waits for", "main")] * 3 + [("main", "waits for", "side")]
    assert c.gather_1(grads[:1]).shape == (4,) and asked[-1][0] == "allGather"
