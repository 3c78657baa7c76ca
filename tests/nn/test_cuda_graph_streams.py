"""Which stream waits for which when a captured step is started: with streams that only write down what they are asked.

(What the steps compute is test_cuda_graph.py's business, on a GPU.)
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain.nn import cuda_graph as graph


class Stream:
    now = None

    def __init__(self, log, name):
        self.log, self.name, self.ptr = log, name, id(self)

    def record(self):
        return self.name

    def wait_event(self, name):
        self.log.append(f"{self.name} waits for {name}")

    def begin_capture(self):
        self.log.append(f"capture on {self.name}")

    def end_capture(self):
        self.log.append("end of the capture")
        return SimpleNamespace(launch=lambda stream: self.log.append(f"graph on {stream.name}"))

    def __enter__(self):
        self.before, Stream.now = Stream.now, self

    def __exit__(self, *_):
        Stream.now = self.before


class Buffer(np.ndarray):
    def set(self, x):
        self[...] = x


@pytest.fixture
def log(monkeypatch):
    said = []
    cuda = SimpleNamespace(
        Stream=lambda non_blocking: Stream(said, "own"),
        get_current_stream=lambda: Stream.now,
        using_allocator=lambda malloc: contextlib.nullcontext(),
        runtime=SimpleNamespace(CUDARuntimeError=RuntimeError),
    )
    cupy = SimpleNamespace(cuda=cuda, empty=lambda *a: np.empty(*a).view(Buffer))
    monkeypatch.setattr(graph, "cupy", lambda: cupy)
    monkeypatch.setattr(graph, "free_cached", lambda device: None)
    keep = lambda: said.append("the pool keeps its blocks")
    pool = SimpleNamespace(malloc=None, free_all_blocks=lambda: None, keep=keep)
    monkeypatch.setattr(graph, "PrivatePool", lambda: pool)
    return said


def step_that_fails_on_5(log):
    def step(x):
        log.append(f"step on {Stream.now.name}")
        if x.size == 5:
            raise MemoryError
        return (x,)

    return step


def test_who_waits_for_whom(log):
    a, b, x = Stream(log, "A"), Stream(log, "B"), np.ones(3)
    around = lambda *what: ["own waits for A", *what, "A waits for own"]
    with a:
        run = graph.Graphed(step_that_fails_on_5(log))
        for expected in (
            around("step on own"), around("step on own"),  # eagerly
            around("the pool keeps its blocks", "capture on own", "step on own", "end of the capture", "graph on own"),
            ["graph on A"], ["graph on A"],  # on the caller's stream: no waiting
        ):  # fmt: skip
            log.clear()
            assert np.array_equal(run(x)[0], x)
            assert log == expected
        log.clear()
        with pytest.raises(MemoryError):
            run(np.ones(5))
        run(x)
        assert log == [*around("step on own"), "graph on A"]
    with b:  # another caller: the steps share their memory
        log.clear()
        run(x), run(x), run(np.ones(4))
    assert log == [
        "B waits for A", "graph on B", "graph on B",
        "own waits for B", "step on own", "B waits for own",
    ]  # fmt: skip


def test_a_call_that_was_interrupted_does_not_count(log):
    """Two whole ones come before the capture: in the first kernels are compiled."""
    interrupts = iter([KeyboardInterrupt, KeyboardInterrupt])

    def step(x):
        log.append("step")
        if interrupt := next(interrupts, None):
            raise interrupt
        return (x,)

    with Stream(log, "A"):
        run = graph.Graphed(step)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run(np.ones(3))
        for captured in (False, False, True):
            log.clear()
            run(np.ones(3))
            assert ("capture on own" in log) == captured


def test_when_unwritten_gradients_are_zeroed(log):
    """Before a capture, recorded at its end, and before each replay; never around an eager call. Where the caller is."""
    arena = SimpleNamespace(zero_unwritten_grads=lambda: log.append(f"zeros on {Stream.now.name}"))
    fails = False

    def step(x):
        log.append("step")
        if fails:
            raise MemoryError
        return (x,)

    with Stream(log, "A"):
        run = graph.Graphed(step, arena)
        run(np.ones(3)), run(np.ones(3))
        assert log.count("step") == 2 and "zeros on own" not in log
        log.clear()
        fails = True
        with pytest.raises(MemoryError):
            run(np.ones(3))
        begin = ["zeros on own", "capture on own", "step"]
        assert log[-5:] == [*begin, "end of the capture", "A waits for own"]
        fails = False
        log.clear()
        run(np.ones(3))
        end = ["zeros on own", "end of the capture"]
        replay = ["zeros on own", "graph on own", "A waits for own"]
        assert log[-8:] == [*begin, *end, *replay]
        log.clear()
        run(np.ones(3))
    assert log == ["zeros on A", "graph on A"]
