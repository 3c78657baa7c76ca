"""Capture a step in a CUDA graph once, then replay it without running Python between its kernels.

A training step of a small model is about three hundred kernels of a few microseconds each, and
Python takes longer to launch one than the GPU to run it. For fixed shapes the whole step can be
recorded (the driver notes kernels and arguments instead of running them) and launched again as one
unit.

What this requires of the step:

- Every number that changes (ids, targets, learning rate) is in device memory that is written before
  each replay.
- No copy to the host and no synchronization: the capture would fail. So a captured step is proof
  that it has neither.
- Memory comes from a separate pool, which is emptied before the capture. The capture then allocates
  exactly the arrays of the step, in the order of the step. In a pool that an earlier call has
  filled, best fit would choose other blocks, split them for smaller arrays, and run out of large
  ones. (CuPy's capture mode allows cudaMalloc.) The graph holds addresses, so from then on the pool
  keeps all blocks, even when the GPU is full.
- Whether an op writes a gradient or adds to it is decided while Python runs, from the flags
  `grad_written` (tensor.py). A replay repeats the decisions of the capture, so they must not depend
  on when it is replayed: a capture and each replay begin with all gradients written, zero-filled if
  necessary, and the capture ends with zero-filling what the step has not written.

The eager calls are real steps. The same kernels run with the same arguments either way, so the bits
are the same.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..device import Array, PrivatePool, cupy, free_cached
from ..kernels.gemm import release_workspace
from .arena import Arena

EAGER_CALLS = 2  # the first compiles kernels and allocates what is kept from step to step


class Graphed:
    """A function of arrays to arrays, captured once per combination of input shapes.

    step: takes device arrays, returns a tuple of device arrays; must do the same in every call.
    arena: where the step accumulates gradients; None if it computes none.
    Calling it with NumPy or CuPy arrays returns arrays that the next call overwrites.
    variant: an option of the step that precedes its arrays; one graph is kept per variant.
    """

    def __init__(self, step: Callable[..., tuple[Array, ...]], arena: Arena | None = None):
        self.step, self.arena = step, arena
        self.recordings: dict[tuple, _Recording] = {}
        free_cached("gpu")  # cached memory, which the new pool could not use
        self.pool = PrivatePool()
        self.stream = cupy().cuda.Stream(non_blocking=True)
        self.caller = cupy().cuda.get_current_stream()
        weakref.finalize(self, release_workspace, self.stream.ptr).atexit = False

    def __call__(self, *inputs: Array, variant: tuple = ()) -> tuple[Array, ...]:
        key = (variant, *((x.shape, x.dtype.str) for x in inputs))
        if key not in self.recordings:
            self.recordings[key] = _Recording(inputs, self.arena)
        recording = self.recordings[key]
        caller = cupy().cuda.get_current_stream()
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
        finally:  # after an error too: kernels launched before it still use the pool
            caller.wait_event(self.stream.record())


class _Recording:
    """Input buffers, and later the graph and its outputs, for one combination of shapes."""

    def __init__(self, inputs: tuple, arena: Arena | None):
        self.buffers = [cupy().empty(x.shape, x.dtype) for x in inputs]
        self.arena = arena
        self.calls = 0  # eager ones
        self.graph: Any = None
        self.outputs: tuple = ()

    def is_next_captured(self) -> bool:
        return self.calls == EAGER_CALLS

    def run(self, step: Callable, inputs: tuple, stream: Any) -> tuple:
        """Run the first calls eagerly; then capture, which runs nothing, and replay."""
        if self.calls < EAGER_CALLS:
            self._copy_inputs(inputs)
            outputs = step(*self.buffers)
            self.calls += 1  # only now: an interrupted call has not allocated everything
            return outputs
        self.graph, self.outputs = self._capture(step, stream)
        return self.replay(inputs, stream)

    def replay(self, inputs: tuple, stream: Any) -> tuple:
        self._zero_unwritten_grads()
        self._copy_inputs(inputs)
        self.graph.launch(stream)
        return self.outputs

    def _zero_unwritten_grads(self):
        if self.arena is not None:
            self.arena.zero_unwritten_grads()

    def _copy_inputs(self, inputs):
        for buffer, x in zip(self.buffers, inputs):
            if isinstance(x, np.ndarray):
                buffer.set(x)
            else:
                buffer[...] = x

    def _capture(self, step, stream):
        self._zero_unwritten_grads()
        stream.begin_capture()
        try:
            outputs = step(*self.buffers)
            self._zero_unwritten_grads()  # recorded: every replay ends with all gradients written
        except BaseException:
            with contextlib.suppress(cupy().cuda.runtime.CUDARuntimeError):
                # the recording is useless, but the stream must leave this mode
                stream.end_capture()
            raise
        return stream.end_capture(), outputs
