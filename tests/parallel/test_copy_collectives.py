"""Collectives by copy engines, with threads as GPUs: memory is shared, a copy is a memmove, and a stream that
waits for a flag is a waiting thread. tests/parallel/mpi/gpus.py tests real GPUs."""

import ctypes
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain.config import ModelConfig
from xtrain.errors import UserError
from xtrain.kernels import peers
from xtrain.kernels.cast import BFLOAT16
from xtrain.nn.mode import no_grad
from xtrain.nn.model import Transformer
from xtrain.nn.optim import AdamW
from xtrain.nn.sharded_arena import Share
from xtrain.parallel import collectives, copy_collectives
from xtrain.parallel.gathering import Gathered, Gathering
from xtrain.parallel.zero3 import Zero3AdamW

PATIENCE = 20.0  # seconds until a wait counts as a deadlock


class Array(np.ndarray):
    data = property(lambda self: SimpleNamespace(ptr=self.__array_interface__["data"][0]))


def array(shape, dtype=np.float32, fill=0):
    return np.full(shape, fill, dtype).view(Array)


class World:
    """R ranks, one thread each, that share this process's memory."""

    def __init__(self, size, seed):
        self.size, self.barrier = size, threading.Barrier(size, timeout=PATIENCE)
        self.slots, self.broken = [None] * size, threading.Event()
        self.rngs = [np.random.default_rng([seed, rank]) for rank in range(size)]

    def ranks(self, rank):
        def gather(thing):
            self.slots[rank] = thing
            self.barrier.wait()
            found = list(self.slots)
            self.barrier.wait()
            return found

        return SimpleNamespace(rank=rank, world=self.size, gather=gather, sum=lambda x: gather(x))


def at_address(address, n, dtype):
    nbytes = n * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype).view(Array)


@pytest.fixture
def fake_gpu(monkeypatch):
    """-> run(world, work): calls work(ranks) on every rank in parallel; raises the exception of a rank."""
    local = threading.local()

    def pause():  # ranks run at different speeds
        if local.rng.random() < 0.2:
            time.sleep(local.rng.random() * 1e-3)

    def batch(stream, count, operations, flags):
        assert count == len(operations)
        for verb, address, value in operations:
            pause()
            word = ctypes.c_int32.from_address(address)
            if verb == "write":
                word.value = value
            end = time.monotonic() + PATIENCE
            while verb == "wait" and word.value != value:
                if local.world.broken.is_set() or time.monotonic() > end:
                    raise TimeoutError("a flag that was never set")
                time.sleep(0)
        return (0,)

    def copy(target, source, nbytes, kind, stream):
        pause()
        ctypes.memmove(target, source, nbytes)

    class Stream:
        ptr = 0
        __init__ = lambda self, **_: None
        wait_event = __exit__ = lambda *_: None
        __enter__ = lambda self: self

    event = lambda **_: SimpleNamespace(record=lambda stream: None)
    runtime = SimpleNamespace(
        memcpyAsync=copy, memcpyDeviceToDevice=3, ipcGetMemHandle=lambda base: base.to_bytes(8, "big"),
        ipcOpenMemHandle=lambda handle: int.from_bytes(handle, "big"), ipcCloseMemHandle=lambda _: None,
    )  # fmt: skip
    cuda = SimpleNamespace(
        Stream=Stream, Event=event, get_current_stream=Stream, runtime=runtime,
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
    )  # fmt: skip
    for module in (collectives, copy_collectives):
        monkeypatch.setattr(module, "cupy", lambda: SimpleNamespace(cuda=cuda))
        empty = lambda like, shape, dtype=None: array(shape, dtype or like.dtype, 99)
        monkeypatch.setattr(module, "empty", empty)
    driver = SimpleNamespace(cuStreamBatchMemOp=batch, CUresult=SimpleNamespace(CUDA_SUCCESS=0))
    monkeypatch.setattr(copy_collectives, "zeros", lambda _, shape, dtype: array(shape, dtype))
    for name in ("add_peers", "copy_to_peers"):
        reference = getattr(peers, f"{name}_ref")
        monkeypatch.setattr(
            copy_collectives, name, lambda *arrays, f=reference: pause() or f(*arrays)
        )
    monkeypatch.setattr(collectives, "cast_into", lambda y, x: y.__setitem__(..., x))
    monkeypatch.setattr(collectives, "add_into", lambda y, x: y.__setitem__(..., y + x))
    monkeypatch.setattr(copy_collectives, "at_address", at_address)
    monkeypatch.setattr(copy_collectives, "cuda_driver", lambda: driver)
    monkeypatch.setattr(copy_collectives, "write", lambda address, value: ("write", address, value))
    monkeypatch.setattr(copy_collectives, "wait", lambda address, value: ("wait", address, value))
    monkeypatch.setattr(copy_collectives, "allocation", lambda address: address - 64)
    monkeypatch.setattr(copy_collectives, "CHUNK", 96)  # longer slices need several copies

    def run(world, work):
        errors = []

        def rank_main(rank):
            local.rng, local.world = world.rngs[rank], world
            try:
                work(world.ranks(rank))
            except Exception as error:
                errors.append(error)
                world.broken.set()
                world.barrier.abort()

        threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(world.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error

    return run


def numbers(rank, step, n):
    """Integers: their sums are exact in any order."""
    return np.random.default_rng([rank, step]).integers(-8, 9, n).astype(np.float32)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("size, steps", [(2, 12), (3, 12), (4, 12), (8, 5)])
def test_every_collective_at_random(fake_gpu, size, steps, half):
    """Steps of random collectives, with odd and even numbers of barriers, every rank at its own speed.

    Every third slice is not divided evenly: its pieces belong to any ranks, and some ranks have none.
    """
    n = 384 * size
    plans = np.random.default_rng(size)
    plan = []
    for _ in range(steps):
        cuts = (
            np.sort(plans.choice(np.arange(1, n // 64), plans.integers(1, 6), replace=False)) * 64
        )
        edges = [0, *cuts.tolist(), n]
        slices = [(a, b - int(plans.integers(0, 5))) for a, b in itertools.pairwise(edges)]
        plan.append([(plans.choice(["all_reduce", "reduce_scatter"]), *s) for s in slices])
    idle = plans.random(steps) < 0.5
    slices = [(a, b) for calls in plan for _, a, b in calls][::3]
    pieces = {}
    for a, b in [*slices, (0, n)]:
        edges = [a, *sorted(plans.integers(a, b, 3).tolist()), b]
        pieces[a, b] = [(*edge, int(plans.integers(size))) for edge in itertools.pairwise(edges)]

    def work(ranks):
        grads = array(n)
        weights = array(n, BFLOAT16 if half else np.float32)
        arena = SimpleNamespace(grads=grads, weights=weights, half=weights if half else None)
        c, norms = copy_collectives.CopyCollectives(ranks, arena), array(n // 4)
        c.register(norms)
        c.pieces = pieces
        value = lambda step: array(1, fill=ranks.rank + step)
        for step, calls in enumerate(plan):
            grads[...] = numbers(ranks.rank, step, n)
            expected = sum(numbers(rank, step, n) for rank in range(size))
            losses = c.start_gather(value(step))
            for what, a, b in calls:
                getattr(c, what)(a, b, idle=idle[step])
            c.join()
            for what, a, b in calls:
                parts = [(a, b)] if what == "all_reduce" else c.own(grads, a, b)
                for start, end in parts:
                    assert np.array_equal(grads[start:end], expected[start:end]), (step, what, a, b)
            assert losses.tolist() == [rank + step for rank in range(size)]
            before = weights.astype(np.float32)  # still the old values, whatever the other ranks do
            assert np.array_equal(before, numbers(7, step - 1, n) if step else np.zeros(n))
            if step % 3:
                assert c.gather_1(value(2 * step)).tolist() == [r + 2 * step for r in range(size)]
            for target in (weights, norms, array(n)):
                for start, end in c.own(target, 0, target.size):
                    target[start:end] = numbers(7, step, target.size)[start:end]
                c.all_gather(target, 0, target.size, idle=idle[step])
            c.join()
            assert np.array_equal(weights.astype(np.float32), numbers(7, step, n))
            assert np.array_equal(norms, numbers(7, step, n // 4))
            assert np.array_equal(target, numbers(7, step, n))
        c.close()

    fake_gpu(World(size, 1), work)


def without_barrier(which):
    """-> CopyCollectives whose ZeRO-3 methods lack the n-th of their four barriers, in the order of the file"""

    class Broken(copy_collectives.CopyCollectives):
        def _call(self, name, first, *arguments):
            self.number = first
            getattr(copy_collectives.CopyCollectives, name)(self, *arguments)
            self.number = -10

        number = -10

        def _barrier(self, stream):
            self.number += 1
            if self.number - 1 != which:
                super()._barrier(stream)

        def gather_shares(self, *arguments):
            self._call("gather_shares", 0, *arguments)

        def sum_share(self, *arguments):
            self._call("sum_share", 2, *arguments)

    return Broken


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("size, steps", [(2, 8), (3, 8), (4, 5)])
def test_layers_in_turn_in_two_buffers(fake_gpu, size, steps, half):
    """Gathers and sums of ZeRO-3: a buffer is used again as soon as the mark before it has passed."""
    fake_gpu(World(size, 4), layers_in_turn(copy_collectives.CopyCollectives, size, steps, half))


@pytest.mark.parametrize("which", range(4))
def test_no_barrier_of_them_is_superfluous(fake_gpu, monkeypatch, which):
    monkeypatch.setattr(f"{__name__}.PATIENCE", 2.0)
    with pytest.raises((AssertionError, TimeoutError)):
        fake_gpu(World(3, 5), layers_in_turn(without_barrier(which), 3, 60, False))


def layers_in_turn(copies, size, steps, half, layers=5):
    n = 128 * size

    def work(ranks):
        arena = SimpleNamespace(grads=array(64), weights=None, half=None)
        c = copies(ranks, arena)
        weights = [array(n, BFLOAT16 if half else np.float32) for _ in range(2)]
        grads = [array(n) for _ in range(2)]
        for buffer in (*weights, *grads):
            c.register(buffer)
        own = slice(ranks.rank * 128, ranks.rank * 128 + 128)
        sums = [array(128) for _ in range(layers)]

        def gather(step, i):
            if 0 <= i < layers:
                c.gather_shares(weights[i % 2], array(128) + numbers(9 + i, step, n)[own])
                c.wait(c.mark())

        def compute(step, i):
            for _ in range(5):
                time.sleep(ranks.rank * 2e-4)
                assert np.array_equal(weights[i % 2].astype(np.float32), numbers(9 + i, step, n))

        for step in range(steps):
            gather(step, 0)
            for i in range(layers):
                gather(step, i + 1)  # before this one computes
                compute(step, i)
            for i in reversed(range(layers)):
                compute(step, i)
                gather(step, i - 2 if i > 1 else -1)
                for add in (False, True):
                    grads[i % 2][...] = numbers(ranks.rank, step + i + 50 * add, n)
                    c.sum_share(grads[i % 2], sums[i], add)
                    c.wait(c.mark())
            c.join()
            for i in range(layers):
                of = lambda at: sum(numbers(rank, at, n) for rank in range(size))[own]
                assert np.array_equal(sums[i], of(step + i) + of(step + i + 50)), (step, i)
        c.close()

    return work


class OnNumPy(copy_collectives.CopyCollectives):
    """For the arrays of a model, which are of no derived class."""

    def register(self, x):
        super().register(x.view(Array))

    def gather_shares(self, x, own):
        super().gather_shares(x.view(Array), own.view(Array))

    def sum_share(self, x, own, add):
        super().sum_share(x.view(Array), own.view(Array), add)


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_whose_layers_are_divided(fake_gpu, size):
    """Steps of ZeRO-3 with these collectives, every rank on its own rows: the weights of one rank with all rows."""
    config = ModelConfig(vocab_size=61, dim=24, n_layers=3, n_heads=3, head_dim=8, max_seq_len=8)
    ids = np.random.default_rng(0).integers(0, 61, (4, size, 2, 9))  # step, rank, rows
    plain = Transformer(config, 0)
    optimizer = AdamW(plain, lr=1e-3)
    for rows in ids:
        plain.zero_grad()
        rows = rows.reshape(-1, 9)
        plain.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    expected = dict(plain.views(plain.arena.weights))
    share_1 = np.full(1, 1 / (16 * size), np.float32)

    def work(ranks):
        model = Transformer(config, 0, "cpu", world=size, share=Share(ranks.rank, size))
        grads = model.arena.grads.view(Array)
        c = OnNumPy(ranks, SimpleNamespace(grads=grads, weights=None, half=None))
        stage = Gathered(Gathering(model, c))
        own = Zero3AdamW(model, c, stage.gathering, lr=1e-3)
        for rows in ids[:, ranks.rank]:
            with no_grad():  # as a validation between steps
                model.loss(rows[:, :-1], rows[:, 1:])
            hyper = own.advance()
            assert c.used == 0, "the step uses the same events again, also one that is replayed"
            model.zero_grad()
            stage.backward(model.loss(rows[:, :-1], rows[:, 1:], share_1), True)
            own.apply(hyper)
        for name, start, shape in model.places():
            unit = next(u for u in model.arena.units if u.start <= start < u.end)
            n = int(np.prod(shape))
            first = min(max(unit.own_start, start), start + n)
            wanted = expected[name].reshape(-1)[first - start :][: unit.share_of(start, n).size]
            found = np.asarray(unit.share_of(start, n))
            np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)
        c.close()

    fake_gpu(World(size, 6), work)


def test_shards_cover_every_slice():
    for world in (1, 2, 3, 5, 8):
        for length in (0, 1, 4, 37, 64, 1000):
            ranks = [SimpleNamespace(rank=r, world=world) for r in range(world)]
            shard = copy_collectives.CopyCollectives.shard
            shards = [shard(SimpleNamespace(ranks=r), 8, 8 + length) for r in ranks]
            assert shards[0].start == 8 and shards[-1].stop == 8 + length
            assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
            assert all(s.start % 4 == 0 or s.start == s.stop for s in shards)
            if length % (4 * world) == 0:
                assert len({s.stop - s.start for s in shards}) == 1, "ZeRO divides evenly"


@pytest.mark.parametrize("broken", ["one row", "no barrier at the end", "none before sending"])
def test_the_test_sees_a_broken_protocol(fake_gpu, monkeypatch, broken):
    """With fewer rows of flags or fewer barriers, a rank reads or writes too early, or waits for ever."""
    monkeypatch.setattr(f"{__name__}.PATIENCE", 2.0)
    copies = copy_collectives.CopyCollectives
    if broken == "one row":
        monkeypatch.setattr(
            copies, "_barrier", lambda self, s: self._pass_barrier(copy_collectives.JOIN, s)
        )
    elif broken == "no barrier at the end":
        monkeypatch.setattr(copies, "join", lambda self: None)
    else:
        always = property(lambda self: True, lambda self, value: None)
        monkeypatch.setattr(copies, "aligned", always, raising=False)

    def work(ranks):
        grads, weights = array(512), array(512)
        c = copies(ranks, SimpleNamespace(grads=grads, weights=weights, half=None))
        for step in range(200):
            grads[...] = numbers(ranks.rank, step, 512)
            c.reduce_scatter(0, 512)
            c.join()
            own = c.shard(0, 512)
            assert np.array_equal(grads[own], sum(numbers(r, step, 512) for r in range(3))[own])
            if step:
                assert np.array_equal(weights, numbers(7, step - 1, 512))
            weights[own] = numbers(7, step, 512)[own]
            c.all_gather(weights, 0, 512)
            c.join()

    with pytest.raises((AssertionError, TimeoutError)):
        fake_gpu(World(3, 2), work)


def test_where_copies_are_not_possible(monkeypatch):
    def ranks(local_world, world, mine=0):
        return SimpleNamespace(
            local=mine, local_world=local_world, world=world, gather=lambda x: [x] * world
        )

    def gpus(count, connected=True):
        runtime = SimpleNamespace(
            getDeviceCount=lambda: count,
            getDevice=lambda: 0,
            deviceCanAccessPeer=lambda a, b: connected,
        )
        monkeypatch.setattr(
            copy_collectives, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        )

    gpus(4)
    assert copy_collectives.why_no_copies(ranks(4, 4)) == ""
    assert "several machines" in copy_collectives.why_no_copies(ranks(4, 8))
    gpus(1)
    assert "only its own GPU" in copy_collectives.why_no_copies(ranks(4, 4))
    gpus(2, connected=False)
    assert "cannot access each other" in copy_collectives.why_no_copies(ranks(2, 2))
    with pytest.raises(
        UserError, match="--transport copy is not possible: the GPUs cannot access each other"
    ):
        copy_collectives.gpu_collectives(ranks(2, 2), None, False, "copy")
