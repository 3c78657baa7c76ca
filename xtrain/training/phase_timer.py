"""How long do the phases of a training step take? Marks at their borders; nothing waits for the GPU.

On a CPU a mark is a look at the clock, on a GPU an event on its stream: "data" is then how long the GPU waited for the
batch. A step that is replayed from a CUDA graph is one piece; `python -m xtrain.profile` takes it apart.
"""

import sys
import time
from typing import Any

from ..device import cupy, memory_peak_bytes

WHOLE, INSIDE = ("data", "step"), ("data", "forward", "backward", "optimizer")


class Clock:
    """clock(phase) ends the phase before it and begins another, clock(None) ends the last.

    captured: the step is one piece, "step"; otherwise it is "forward", "backward" and "optimizer".
    """

    def __init__(self, device: str, captured: bool):
        self.gpu, self.phases = device == "gpu", WHOLE if captured else INSIDE
        self.marks: list[tuple[str | None, Any]] = []

    def __call__(self, phase: str | None) -> None:
        if phase is None or phase in self.phases:
            now = cupy().cuda.get_current_stream().record() if self.gpu else time.perf_counter()
            self.marks.append((phase, now))

    def read(self, steps: int) -> dict[str, float]:
        """-> {phase: ms of one step} over the marks since the last read. The GPU must have passed them."""
        ms = dict.fromkeys(self.phases, 0.0)
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:]):
            if phase is not None:
                apart = (
                    cupy().cuda.get_elapsed_time(start, end) if self.gpu else 1e3 * (end - start)
                )
                ms[phase] += apart / steps
        self.marks.clear()
        return ms


def off(phase: str | None) -> None:
    """The clock of those who do not ask."""


def memory_bytes(device: str) -> int | None:
    """The most memory so far: what CuPy's pools took from the GPU, on a CPU what the process occupied; None if unknown."""
    if device == "gpu":
        return memory_peak_bytes(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
