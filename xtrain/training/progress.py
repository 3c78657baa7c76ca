"""Which checkpoint is the best so far, and whether a run still improves: --best and --patience.

Both follow from metrics.jsonl, so a resumed run decides as if it had not stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .loss_picture import is_number

SMALLER_IS_BETTER = ("loss", "bpb", "perplexity", "bits_per_byte")  # ends of names


@dataclass(frozen=True)
class Progress:
    """The measurements of a metric.

    score: the last value, negative if larger values are better; None if the last step has none.
    since_best: measurements since the best one, 0 if the last one is the best.
    """

    score: float | None
    since_best: int


def progress(lines: Sequence[dict[str, Any]], name: str, step: int) -> Progress:
    """Return how a metric has developed. lines: of metrics.jsonl.
    step: the last one. Raises UserError if the metric has never been measured."""
    sign = -1.0
    if name.endswith(SMALLER_IS_BETTER):
        sign = 1.0
    scores = {line["step"]: sign * line[name] for line in lines if is_number(line.get(name))}
    if not scores and any(name in line for line in lines):  # every one was unknown
        return Progress(None, 0)
    if not scores:
        others = {key for line in lines if "loss" not in line for key in line} - {"step"}
        raise UserError(
            f"--best {name} is not measured: choose from {', '.join(sorted(others)) or 'none'}"
        )
    best = min(scores, key=scores.__getitem__)  # the earlier of two equal ones
    return Progress(scores.get(step), sum(x > best for x in scores))
