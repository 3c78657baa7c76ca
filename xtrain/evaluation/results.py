"""What an evaluation finds: metrics with standard errors, as a table and as JSON."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ..errors import UserError
from ..files import write_whole


@dataclass(frozen=True)
class Metric:
    """A number and its standard error; None where a single item says nothing about it."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Result:
    """What was found in one file, or in several files of one kind together.

    n: items, or scored tokens of a text.
    items: what was found for each of them, to be written as JSON.
    """

    name: str
    kind: str
    n: int
    metrics: dict[str, Metric]
    items: list[dict[str, Any]]


def ratio(numerators: Sequence[float], denominators: Sequence[float] | None = None) -> Metric:
    """sum x / sum y, with the standard error of a ratio estimator (Cochran 1977, section 6.4),
    without the finite population:

        se = sqrt(n / (n - 1) sum_i (x_i - r y_i)^2) / sum y

    denominators None: all 1; then r is the mean and se = sample standard deviation / sqrt(n), as in
    lm-eval.
    """
    x = np.array(numerators, np.float64)
    if denominators is None:
        y = np.ones_like(x)
    else:
        y = np.array(denominators, np.float64)
    n = len(x)
    r = float(x.sum() / y.sum())
    if n < 2:
        return Metric(r, None)
    return Metric(r, float(math.sqrt(n / (n - 1) * np.sum((x - r * y) ** 2)) / y.sum()))


def transformed(
    metric: Metric, f: Callable[[float], float], slope: Callable[[float], float]
) -> Metric:
    """f(metric), with the standard error that its derivative `slope` gives (delta method)."""
    error = metric.stderr
    if error is not None:
        error *= abs(slope(metric.value))
    return Metric(f(metric.value), error)


def perplexity(nlls: Sequence[float], counts: Sequence[float] | None = None) -> Metric:
    """exp of the mean negative log-likelihood, in nats.  counts: tokens of each; None: one."""
    return transformed(ratio(nlls, counts), _exp, _exp)


def _exp(x: float) -> float:
    if x < 700:
        return math.exp(x)
    return math.inf


def table(results: Sequence[Result]) -> Table:
    """Return one line per metric."""
    lines = Table("task", "kind", "metric", "value", "standard error", "n", box=None)
    for column in lines.columns[3:]:
        column.justify = "right"
    for result in results:
        for i, (name, metric) in enumerate(result.metrics.items()):
            first = [result.name, result.kind]
            if i > 0:
                first = ["", ""]
            error = ""
            if metric.stderr is not None:
                error = f"{metric.stderr:.4f}"
            lines.add_row(*first, name, f"{metric.value:.4f}", error, str(result.n))
    return lines


def write_json(path: Path, settings: dict[str, Any], results: Sequence[Result]) -> None:
    """Write everything to a file, whole or not at all. Infinite numbers become null. Raises
    UserError."""
    content = {"settings": settings, "results": [asdict(result) for result in results]}
    text = json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False)
    try:
        write_whole(path, (text + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): give another file with --json"
        ) from None


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x
