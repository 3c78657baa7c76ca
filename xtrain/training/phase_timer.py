"""How long each phase of a training step takes. Timestamps are taken at the phase boundaries;
nothing waits for the GPU.

On a CPU a timestamp is `time.perf_counter()`. On a GPU it is an event on the current stream, so
"data" is the time for which the GPU waited for the batch. A step that is replayed from a CUDA graph
is a single phase; `python -m xtrain.profile` measures its parts.
"""

import sys
import time
from typing import Any

from ..device import cupy, memory_peak_bytes

CAPTURED_PHASES = ("data", "step")
EAGER_PHASES = ("data", "forward", "backward", "optimizer")


class NoPhaseTimer:
    """The timer of a run that is not timed: every method does nothing."""

    def begin(self, phase: str) -> None:
        """End the current phase and begin `phase`."""

    def end(self) -> None:
        """End the current phase."""


class PhaseTimer(NoPhaseTimer):
    """Measures the phases of training steps.

    captured: the step is a CUDA graph, so its phases are CAPTURED_PHASES; otherwise they are
    EAGER_PHASES. `begin` ignores phases that are not among them.
    """

    def __init__(self, device: str, captured: bool):
        self.gpu = device == "gpu"
        self.phases: tuple[str, ...] = EAGER_PHASES
        if captured:
            self.phases = CAPTURED_PHASES
        self.timestamps: list[tuple[str | None, Any]] = []  # (phase that begins or None, time)

    def begin(self, phase: str) -> None:
        if phase in self.phases:
            self.timestamps.append((phase, self._now()))

    def end(self) -> None:
        self.timestamps.append((None, self._now()))

    def read(self, steps: int) -> dict[str, float]:
        """Return {phase: ms per step}, over the `steps` steps since the last read. The GPU must
        have finished them."""
        ms = dict.fromkeys(self.phases, 0.0)
        for (phase, start), (_, end) in zip(self.timestamps, self.timestamps[1:]):
            if phase is not None:
                ms[phase] += self._elapsed_ms(start, end) / steps
        self.timestamps.clear()
        return ms

    def _now(self):
        if self.gpu:
            return cupy().cuda.get_current_stream().record()
        return time.perf_counter()

    def _elapsed_ms(self, start, end):
        if self.gpu:
            return cupy().cuda.get_elapsed_time(start, end)
        return 1e3 * (end - start)


def memory_bytes(device: str) -> int | None:
    """Return peak memory so far: on a GPU that of CuPy's pools, on a CPU the process's resident
    memory; None if unknown."""
    if device == "gpu":
        return memory_peak_bytes(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return 1024 * peak
