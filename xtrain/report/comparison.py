"""A page that compares several runs: final values, curves in the same charts, differences of the
configurations, samples."""

import html
import json

from .chart import Curve, axis_switch, chart, colors, running_mean
from .record import Record
from .style import table


def sections(runs: list[Record]) -> list[str]:
    """Return the sections of the page, as HTML."""
    names = _names(runs)
    missing = "".join(
        f"<p>{html.escape(f'{n}: {text}')}</p>"
        for n, run in zip(names, runs)
        for text in run.missing
    )
    return [
        f"<h1>{html.escape(' / '.join(names))}</h1>{missing}",
        _ends(runs, names),
        _curves(runs, names),
        _differences(runs, names),
        _samples(runs, names),
    ]


def _names(runs):
    """Return the names of the folders, or the whole path of names that occur twice."""
    names = [run.name for run in runs]
    return [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs)]


def _ends(runs, names):
    columns = [
        "run",
        "steps",
        "training loss",
        "best validation",
        "bits per byte",
        "tokens per second",
        "skipped",
    ]
    rows = []
    for name, run in zip(names, runs):
        loss = running_mean(run.points("loss"))
        speed = running_mean(run.points("tokens_per_s", run.timing))
        rows.append(
            [
                name,
                f"{run.steps:,}",
                _shown(loss[-1][1] if loss else None, "{:.4f}"),
                _shown(run.best("val_loss"), "{:.4f}"),
                _shown(run.best("val_bpb"), "{:.3f}"),
                _shown(speed[-1][1] if speed else None, "{:,.0f}"),
                str(sum("skipped" in m for m in run.metrics)),
            ]
        )
    return table(columns, rows, kind="num")


def _curves(runs, names):
    def compared(title, unit, points, smooth=True, log=False):
        lines = [
            Curve(name, running_mean(points(run)) if smooth else points(run), color, axes=run.axes)
            for name, run, color in zip(names, runs, colors(len(runs)))
        ]
        return chart(title, unit, lines, log, most_names=len(lines))

    charts = [
        compared("Training loss", "nats per token, running mean", lambda r: r.points("loss")),
        compared("Validation loss", "nats per token", lambda r: r.points("val_loss"), smooth=False),
        compared(
            "Gradient norm",
            "before clipping, running mean",
            lambda r: r.points("grad_norm"),
            log=True,
        ),
        compared("Learning rate", "", lambda r: r.points("lr"), smooth=False),
        compared(
            "Throughput",
            "tokens per second, running mean",
            lambda r: r.points("tokens_per_s", r.timing),
        ),
    ]
    switch = axis_switch([run.axes for run in runs])
    return f'<h2>Curves</h2>{switch}<div class="charts">{"".join(charts)}</div>'


def _differences(runs, names):
    """Return a table of the values of config.json that differ between runs."""
    rows = []
    for section in ("train", "model", "data", "machine", "versions"):
        keys = dict.fromkeys(key for run in runs for key in run.section(section))
        for key in keys:
            values = [run.section(section).get(key) for run in runs]
            if len({json.dumps(v, sort_keys=True) for v in values}) > 1:
                rows.append([f"{section}: {key}", *("-" if v is None else str(v) for v in values)])
    if not rows:
        return "<h2>Differences</h2><p>The configurations are the same.</p>"
    return "<h2>Differences</h2>" + table(["what", *names], rows)


def _samples(runs, names):
    shown = "".join(
        f"<details><summary>{html.escape(name)}, step {run.samples[-1][0]:,}</summary>"
        f"<pre>{html.escape(run.samples[-1][1])}</pre></details>"
        for name, run in zip(names, runs)
        if run.samples
    )
    return shown and f"<h2>Last samples</h2>{shown}"


def _shown(x, form):
    if x is None:
        return "-"
    return form.format(x)
