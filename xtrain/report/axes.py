"""What a horizontal axis may show: steps, tokens, or the wall-clock time of a run, from the lines
of its timing.jsonl."""

from dataclasses import dataclass
from typing import Any

import numpy as np

UNITS = ((2 * 86400.0, 86400.0, "d"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
NAMES = {"steps": "steps", "tokens": "tokens", "time": "wall-clock"}


@dataclass(frozen=True)
class Axes:
    """Tokens and seconds at some steps of a run, all in ascending order; between them they are
    interpolated."""

    steps: np.ndarray  # (N,) float64
    tokens: np.ndarray  # (N,) trained by the end of the step, padding included
    seconds: np.ndarray  # (N,) that the run had taken by the end of the step

    def positions(self, steps: list[float]) -> dict[str, list[float]]:
        """Return the positions of these steps on the axes "steps", "tokens" and "time"."""
        x = np.asarray(steps, np.float64)
        tokens, seconds = (
            np.interp(x, self.steps, values).tolist() for values in (self.tokens, self.seconds)
        )
        return {"steps": x.tolist(), "tokens": tokens, "time": seconds}


def read(timing: list[dict[str, Any]]) -> Axes | None:
    """Return the axes of a run; None if the lines say nothing about tokens and time.

    timing: the lines of timing.jsonl. Without "seconds" (older runs), the times of all steps are
    added up.
    """
    lines = {line["step"]: line for line in timing if _positive(line, "ms", "tokens_per_s")}
    steps = [0.0]
    tokens = [0.0]
    seconds = [0.0]
    for step, line in sorted(lines.items()):
        if step > steps[-1]:
            n = step - steps[-1]  # a line stands for the steps before it whose lines are lost
            measured = 0.0
            if _positive(line, "seconds"):
                measured = line["seconds"]
            steps.append(float(step))
            tokens.append(tokens[-1] + n * line["tokens_per_s"] * line["ms"] / 1e3)
            seconds.append(max(seconds[-1], measured or seconds[-1] + n * line["ms"] / 1e3))
    if len(steps) < 2 or tokens[-1] > 1e300 or seconds[-1] > 1e300:
        return None
    return Axes(np.array(steps), np.round(tokens), np.array(seconds))


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit for an axis up to this time: (its seconds, its name)."""
    return next((size, name) for least, size, name in UNITS if seconds >= least)


def _positive(line: dict[str, Any], *names: str) -> bool:
    return all(type(line.get(n)) in (int, float) and 0 < line[n] < 1e15 for n in names)
