"""Missing libraries, the choice of a GPU, the calls of NCCL: all without them. With MPI: test_ddp.py."""

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


def test_choice_of_a_gpu(monkeypatch):
    used = fake_gpus(monkeypatch, 4)
    ranks.choose_gpu(fake_ranks(3, [(None, 4)] * 4))
    own_gpu = fake_gpus(monkeypatch, 1)
    ranks.choose_gpu(fake_ranks(3, [(str(i), 1) for i in range(4)]))
    assert used == [3] and own_gpu == [0]
    with pytest.raises(UserError, match=r"fewer GPUs than ranks \(1 and 2 here\)"):
        ranks.choose_gpu(fake_ranks(1, [(None, 1)] * 2))


def test_no_nccl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UserError, match="no NCCL library"):
        collectives.load_nccl()


# ----------------------------------------------------------------------------- NCCL, with a fake
class Address(np.ndarray):
    data = property(lambda self: SimpleNamespace(ptr=self.__array_interface__["data"][0]))


@pytest.mark.parametrize("bf16", [False, True])
def test_calls_of_nccl(monkeypatch, bf16):
    """Which bytes, how many numbers of which dtype, on which stream, after which events."""
    calls, order = [], []

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
            return lambda *arguments: calls.append((name, *arguments))

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
    monkeypatch.setattr(collectives, "add_into", lambda y, x: y.__setitem__(..., y + x))
    comm = SimpleNamespace(bcast=lambda x: "id")
    ranks = SimpleNamespace(rank=2, world=4, comm=comm)
    grads = np.arange(64, dtype=np.float32).view(Address)
    c = collectives.NcclCollectives(ranks, SimpleNamespace(grads=grads), bf16)
    sent, kind = (c.half, 16) if bf16 else (grads, 32)
    at = lambda array, i: array.data.ptr + i * array.itemsize
    c.all_reduce(8, 24)
    c.reduce_scatter(16, 48)  # shards of 8: this rank's begins at 32
    c.all_gather(grads, 16, 48)
    c.progress()
    c.join()
    assert calls == [
        ("allReduce", at(sent, 8), at(sent, 8), 16, kind, 0, 7),
        ("reduceScatter", at(sent, 16), at(sent, 32), 8, kind, 0, 7),
        ("allGather", at(grads, 32), at(grads, 16), 8, 32, 7),
    ]
    assert order == [("side", "waits for", "main")] * 3 + [("main", "waits for", "side")]
    order.clear()
    calls.clear()
    x = np.zeros(32, np.float32).view(Address)  # of ZeRO-3: this rank's part begins at 16
    own = np.full(8, 5, np.float32).view(Address)
    c.gather_shares(x, own)
    assert x[16:24].tolist() == [5] * 8 and x.sum() == 40
    mark = c.mark()
    c.sum_share(x, own, False)
    assert c.mark(mark) is mark
    c.wait(mark)
    assert calls == [
        ("allGather", at(x, 16), at(x, 0), 8, 32, 7),
        ("reduceScatter", at(x, 0), at(x, 16), 8, 32, 0, 7),
    ]
    assert order == [("side", "waits for", "main")] * 2 + [("main", "waits for", "side")]
    c.sum_share(x, own, True)
    assert own.tolist() == [10] * 8
    assert c.gather_1(grads[:1]).shape == (4,) and calls[-1][0] == "allGather"
