"""Line charts as HTML: an SVG with the lines that scales with the page, and HTML labels of fixed
size around it.

The numbers are in data-chart: with them charts.js shows the values under the cursor and draws over
tokens or time.

Colours are CSS variables of the page (style.py), so a chart follows the light or dark theme of the
page.
"""

import html
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .axes import NAMES, Axes, unit_of

MOST_POINTS = 500  # per curve; a screen shows no more
SIDE = 1000.0  # width and height of the SVG's coordinate system

Points = list[tuple[float, float | None]]  # (step, value); None: not finite, a gap in the line


@dataclass(frozen=True)
class Curve:
    """One line of a chart. color: any CSS colour. style: "line", "faint" or "dots". axes: of its
    run; None: steps only."""

    name: str
    points: Points
    color: str
    style: str = "line"
    axes: Axes | None = None


def palette(i: int) -> str:
    """Return the i-th of the page's six colours."""
    return f"var(--c{i % 6})"


def by_depth(i: int, n: int) -> str:
    """Return the colour of the i-th of n layers, from violet to yellow."""
    return f"hsl({280 - 230 * i / max(1, n - 1):.0f} 65% 52%)"


def running_mean(points: Points) -> Points:
    """Return the exponential moving average, divided by the sum of its weights. Skips gaps."""
    rate = 0.05
    total = 0.0
    weight = 0.0
    out: Points = []
    for x, y in points:
        if y is not None:
            total = total + rate * (y - total)
            weight = weight + rate * (1 - weight)
            out.append((x, total / weight))
    return out


def colors(n: int) -> list[str]:
    """Return n different colours."""
    if n <= 6:
        return [palette(i) for i in range(n)]
    return [by_depth(i, n) for i in range(n)]


def chart(
    title: str, unit: str, curves: list[Curve], log: bool = False, most_names: int = 8
) -> str:
    """Return a <figure>, or "" if no curve has a finite value.

    log: a logarithmic vertical axis, without the values <= 0
    most_names: with more curves (layers), the legend names the first, the middle and the last
    """
    curves = [replace(c, points=_thin(_drawable(c.points, log))) for c in curves]
    curves = [c for c in curves if any(y is not None for _, y in c.points)]
    if not curves:
        return ""
    xs = [x for c in curves for x, _ in c.points]
    ys = [y for c in curves for _, y in c.points if y is not None]
    drawn_over = _horizontal("steps", xs)
    x_low, x_high, x_ticks = (drawn_over[key] for key in ("low", "high", "ticks"))
    y_low, y_high, y_ticks = _axis(min(ys), max(ys), log, most=5)
    across = lambda x: (x - x_low) / (x_high - x_low)
    up = _scale(y_low, y_high, log)
    name = html.escape(title)
    drawn = "".join(_path(c, across, up) for c in curves)
    grid = "".join(
        f'<path class="grid" d="M0 {_n(SIDE * (1 - up(y)))}H{SIDE:.0f}"/>' for y in y_ticks
    )
    labels = "".join(
        f'<span class="y" style="bottom:{100 * up(y):.2f}%">{text}</span>'
        for y, text in zip(y_ticks, _numbers(y_ticks))
    ) + "".join(
        f'<span class="x" style="left:{100 * across(x):.2f}%">{text}</span>' for x, text in x_ticks
    )
    data = _data(title, curves, drawn_over, (y_low, y_high), log)
    return (
        f'<figure class="chart"><figcaption>{name} <small>{html.escape(unit)}</small></figcaption>'
        f'<div class="plot" tabindex="0" data-chart="{html.escape(data)}"><svg viewBox="0 0 '
        f'{SIDE:.0f} {SIDE:.0f}" preserveAspectRatio="none" role="img" aria-label="{name} over '
        f'steps">{grid}{drawn}</svg>{labels}</div>{_legend(curves, most_names)}</figure>'
    )


def _horizontal(name: str, xs: list[float]) -> dict[str, Any]:
    """Return a horizontal axis: its ends and its ticks [[position, label], ...]."""
    low = min(xs)
    high = max(xs) if max(xs) > low else low + 1
    size, unit = unit_of(high) if name == "time" else (1.0, "")
    ticks = [x for x in _axis(low / size, high / size, log=False, most=5)[2]]
    round_numbers = _axis(low / size, high / size, log=False, most=5)[2]
    ticks = [x for x in round_numbers if low <= x * size <= high]
    labels = [f"{text} {unit}".rstrip() for text in _numbers(ticks)]
    shown = [[x * size, text] for x, text in zip(ticks, labels)]
    return {"name": NAMES[name], "low": low, "high": high, "ticks": shown}


def _data(title, curves, over_steps, y_ends, log):
    """Return the JSON in data-chart. An axis is there if all curves have it."""
    positions = [
        c.axes.positions([x for x, _ in c.points])
        if c.axes
        else {"steps": [x for x, _ in c.points]}
        for c in curves
    ]
    axes = {"steps": over_steps}
    for name in ("tokens", "time"):
        if all(name in p for p in positions):
            axes[name] = _horizontal(name, [x for p in positions for x in p[name]])
    content = {
        "title": title,
        "log": log,
        "y": list(y_ends),
        "axes": axes,
        "curves": [
            {
                "name": c.name,
                "color": c.color,
                "style": c.style,
                "values": [_short(y) for _, y in c.points],
                **{name: [_short(x, 9) for x in xs] for name, xs in p.items()},
            }
            for c, p in zip(curves, positions)
        ],
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _short(x, digits=6):
    """Return a number with few digits, because a page has many."""
    if x is None:
        return None
    x = float(f"{x:.{digits}g}")
    if x.is_integer() and abs(x) < 2**53:
        return int(x)
    return x


def axis_switch(axes: Iterable[Axes | None]) -> str:
    """Return buttons for the horizontal axis of all charts, which charts.js shows.

    "" if a run has steps only. axes: of the runs
    """
    if not all(axes):
        return ""
    buttons = "".join(
        f'<button type="button" data-axis="{key}" '
        f'aria-pressed="{str(key == "steps").lower()}">{name}</button>'
        for key, name in NAMES.items()
    )
    return f'<div class="axis" role="group" aria-label="horizontal axis" hidden>{buttons}</div>'


def _drawable(points, log):
    keep = lambda y: y is not None and math.isfinite(y) and (y > 0 or not log)
    return [(x, float(y) if keep(y) else None) for x, y in points]


def _thin(points: Points) -> Points:
    """Keep about MOST_POINTS points: the lowest and the highest of each interval, so no peak is
    lost.
    """
    if len(points) <= MOST_POINTS:
        return points
    width = math.ceil(2 * len(points) / MOST_POINTS)
    out: Points = []
    for i in range(0, len(points), width):
        interval = points[i : i + width]
        finite = [(y, x) for x, y in interval if y is not None]
        if finite:
            low = min(finite, key=lambda p: p[0])
            high = max(finite, key=lambda p: p[0])
            out += sorted({(x, y) for y, x in (low, high)})
        if len(finite) < len(interval):
            out.append((interval[-1][0], None))
    return [*out, points[-1]]  # the last point: the axis ends at the last step


def _path(curve, across, up):
    segments: list[list[str]] = [[]]  # between gaps
    for x, y in curve.points:
        if y is None:
            segments.append([])
        else:
            segments[-1].append(f"{_n(SIDE * across(x))} {_n(SIDE * (1 - up(y)))}")
    if curve.style == "dots":
        d = "".join(f"M{p}h0" for segment in segments for p in segment)
    else:  # h0 draws a single point as a dot, because lines have round ends
        d = "".join("M" + "L".join(s) + ("h0" if len(s) == 1 else "") for s in segments if s)
    title = html.escape(curve.name)
    stroke = f'class="{curve.style}" style="stroke:{curve.color}"'
    return f'<path {stroke} d="{d}"><title>{title}</title></path>'


def _legend(curves, most):
    shown = list({c.name: c for c in curves}.values())  # each name once
    if len(shown) < 2:
        return ""
    if len(shown) > most:
        shown = [shown[0], shown[len(shown) // 2], shown[-1]]
    items = (
        f'<span><i class="{c.style}" style="background:{c.color}"></i>{html.escape(c.name)}</span>'
        for c in shown
    )
    return f'<div class="legend">{"".join(items)}</div>'


# ----------------------------------------------------------------------------- axes
def _scale(low, high, log):
    if log:
        low = math.log(low)
        high = math.log(high)
        return lambda y: (math.log(y) - low) / (high - low)
    return lambda y: (y - low) / (high - low)


def _axis(low: float, high: float, log: bool, most: int) -> tuple[float, float, list[float]]:
    """Return the ends of an axis from low to high, and at most about `most` round numbers."""
    # a smaller range would need ticks with more digits than float64 has
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) / 10 or 1.0
        low, high = (low / 1.5, high * 1.5) if log else (low - margin, high + margin)
    if log:
        low, high = low / 1.05, high * 1.05
        ticks = [t for t in _decades(low, high) if low <= t <= high]
        if len(ticks) >= 2:
            return low, high, ticks[:: max(1, math.ceil(len(ticks) / most))]
        return low, high, [t for t in _axis(low, high, False, most)[2] if low <= t <= high]
    step = next(s for s in _round_steps((high - low) / most))
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return first * step, last * step, [i * step for i in range(first, last + 1)]


def _round_steps(least: float) -> Iterator[float]:
    power = 10.0 ** math.floor(math.log10(least))
    yield from (power * n for n in (1, 2, 5, 10) if power * n >= least)


def _decades(low: float, high: float) -> Iterable[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = len(powers) <= 4
    return (10.0**p * n for p in powers for n in ((1, 2, 5) if few else (1,)))


def _numbers(ticks: list[float]) -> list[str]:
    """Return the labels of an axis, all different, in one format if possible.

    Examples: 0, 2e-4, 4e-4 ... 1e-3; 1.23M
    """
    small = all(abs(x) < 0.0101 for x in ticks)
    labels: list[str] = []
    for digits in range(14):  # digits beyond the usual ones, up to those that float64 has
        labels = [_small(x, 4 + digits) if small and x else _number(x, digits) for x in ticks]
        if len(set(labels)) == len(set(ticks)):
            break
    return labels


def _small(x: float, digits: int = 4) -> str:
    mantissa, power = f"{x:.{digits - 1}e}".split("e")
    return f"{float(mantissa):.{digits}g}e{int(power)}"


def _number(x: float, digits: int = 0) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(x) >= size:
            return f"{x / (1e3 if letter == 'k' else size):.{3 + digits}g}{letter}"
    if x == 0 or abs(x) >= 1e-3:
        return f"{x:.{4 + digits}g}"
    return _small(x, 4 + digits)


def _n(x):
    return f"{x:.1f}".rstrip("0").rstrip(".")
