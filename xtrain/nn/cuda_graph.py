"""Capture a step in a CUDA graph once, replay it ever after: Python leaves the hot path.

A training step of a small model is some three hundred kernels of a few microseconds each, and Python takes longer to start
one than the GPU to run it. For fixed shapes the whole step can be recorded (the driver notes kernels and arguments instead of
running them) and started again as one unit.

What that asks of the step:
- every number that changes (ids, targets, learning rate) is in device memory that is written before each replay;
- no copy to the host, no wait: the capture would fail, so a captured step is proof that there is none;
- memory comes from a pool of its own, which is emptied before the capture: then the capture takes from the GPU just what the
  step needs, in the order in which it needs it. In a pool that an earlier call has filled, best fit would choose other blocks,
  split them for smaller arrays, and end up short of large ones. (cudaMalloc is allowed in CuPy's mode of capture.) The graph
  holds addresses, so from then on the pool keeps everything, also when the GPU is full.

The eager calls are real steps. The same kernels run with the same arguments either way, so the bits are the same. (But for
zeros that a captured step need neither write nor add to: see nn.py.)
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..device import Array, PrivatePool, cupy, free_cached

EAGER_CALLS = 2  # the first compiles kernels and makes what stays from step to step
_at_end: ContextVar[list[Callable[[], None]] | None] = ContextVar("_at_end", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Callable[[], None]]:
    """Inside, a step is captured; the function that is given ends it, and is to be called within the capture.

    After an error, what was to be done at the end is done on the way out.
    """
    todo: list[Callable[[], None]] = []

    def end():
        while todo:
            todo.pop(0)()

    token = _at_end.set(todo)
    try:
        yield end
    finally:
        _at_end.reset(token)
        end()


def at_end_of_capture(do: Callable[[], None]) -> bool:
    """Have do() called, and recorded, at the end of the capture that is under way; if none is, False and no call.

    So a step may put off what it might not have to do at all. Only in a capture: there the kernels always run in the order in
    which Python recorded them, whatever is replayed or called between two replays.
    """
    todo = _at_end.get()
    if todo is not None:
        todo.append(do)
    return todo is not None


class Graphed:
    """A function of arrays to arrays, captured per combination of input shapes.

    step: takes device arrays, returns a tuple of device arrays; must do the same thing in every call.
    Calling it with NumPy or CuPy arrays returns arrays that the next call overwrites.
    variant: which of several steps; one graph is kept for each. It comes before the arrays in step's arguments.
    """

    def __init__(self, step: Callable[..., tuple[Array, ...]]):
        self.step, self.recordings = step, {}
        free_cached("gpu")  # it would lie idle beside the pool that is made here
        self.pool, self.stream = PrivatePool(), cupy().cuda.Stream(non_blocking=True)
        self.caller = cupy().cuda.get_current_stream()

    def __call__(self, *inputs: Array, variant: tuple = ()) -> tuple[Array, ...]:
        key = (variant, *((x.shape, x.dtype.str) for x in inputs))
        if key not in self.recordings:
            self.recordings[key] = _Recording(inputs)
        recording, caller = self.recordings[key], cupy().cuda.get_current_stream()
        if caller.ptr != self.caller.ptr:  # the steps started there use the same memory
            caller.wait_event(self.caller.record())
            self.caller = caller
        if recording.graph is not None:  # on the caller's stream: no stream has to wait for another
            return recording.replay(inputs, caller)
        self.stream.wait_event(caller.record())
        try:
            with cupy().cuda.using_allocator(self.pool.malloc), self.stream:
                if all(r.graph is None for r in self.recordings.values()):
                    self.pool.free_all_blocks()
                if recording.is_next_captured():
                    self.pool.keep()
                return recording.run(functools.partial(self.step, *variant), inputs, self.stream)
        finally:  # after an error too: what was started before it still uses the pool
            caller.wait_event(self.stream.record())


class _Recording:
    """Input buffers, and later the graph and its outputs, for one combination of shapes."""

    def __init__(self, inputs):
        self.buffers = [cupy().empty(x.shape, x.dtype) for x in inputs]
        self.calls, self.graph, self.outputs = 0, None, ()  # calls: eager ones

    def is_next_captured(self) -> bool:
        return self.calls == EAGER_CALLS

    def run(self, step: Callable, inputs: tuple, stream: Any) -> tuple:
        """The first calls: eagerly; then the capture, which runs nothing, and a first replay."""
        if self.calls < EAGER_CALLS:
            self._take(inputs)
            outputs = step(*self.buffers)
            self.calls += 1  # now: one that was interrupted has not made what stays
            return outputs
        self.graph, self.outputs = self._capture(step, stream)
        return self.replay(inputs, stream)

    def replay(self, inputs: tuple, stream: Any) -> tuple:
        self._take(inputs)
        self.graph.launch(stream)
        return self.outputs

    def _take(self, inputs):
        for buffer, x in zip(self.buffers, inputs):
            if isinstance(x, np.ndarray):
                buffer.set(x)
            else:
                buffer[...] = x

    def _capture(self, step, stream):
        with recording() as end:
            stream.begin_capture()
            try:
                outputs = step(*self.buffers)
                end()
            except BaseException:
                with contextlib.suppress(cupy().cuda.runtime.CUDARuntimeError):
                    stream.end_capture()  # what was recorded is of no use, but the stream must leave this mode
                raise
            return stream.end_capture(), outputs
