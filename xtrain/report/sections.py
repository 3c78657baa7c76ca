"""The sections of a page about one run."""

import html
import time
from dataclasses import replace
from typing import Any

import numpy as np

from . import chart as charts
from .chart import Curve, axis_switch, by_depth, colors, palette, running_mean
from .pictures import image
from .record import Record
from .style import table, tiles

EXPERTS = "experts of "  # begins a key of layers.jsonl
MOST_EVENTS = 30
MOST_SAMPLES = 40
MOST_ROLLOUTS = 32


def head(run: Record) -> str:
    """Return the name of the run, what could not be read, and the final values."""
    goal = run.section("train").get("steps")
    bigram = run.section("data").get("bigram_bpb")
    val = run.last("val_loss")
    bpb = run.last("val_bpb")
    speed = _median([y for _, y in run.points("tokens_per_s", run.timing)])
    memory = _median([y for _, y in run.points("memory_bytes", run.timing)][-1:])
    items = [
        ("steps", f"{run.steps:,}" + (f" of {goal:,}" if isinstance(goal, int) else "")),
        ("training loss", _shown(_last_mean(run), "{:.4f}")),
        ("validation loss", _shown(val, "{:.4f}")),
        ("validation reward", _shown(run.last("val_reward"), "{:.4f}")),
        ("bits per byte", _shown(bpb, "{:.3f}")),
        ("bits per byte, bigrams", _shown(_float(bigram), "{:.3f}")),
        ("tokens per second", _shown(speed, "{:,.0f}")),
        ("memory", _shown(memory and memory / 1e9, "{:.2f} GB")),
    ]
    device = run.section("machine").get("device", "")
    today = time.strftime("%Y-%m-%d %H:%M")
    lines = [
        f"<h1>{html.escape(run.name)}</h1>",
        f"<p>{html.escape(str(device))}, page of {today}</p>",
    ]
    lines += [f"<p>{html.escape(text)}</p>" for text in run.missing]
    if run.starts:
        last = run.starts[-1]
        lines.append(f"<p>{html.escape(_source(last))}</p>")
        lines.append(f'<pre class="command">{html.escape(str(last.get("command", "")))}</pre>')
    return "".join(lines) + tiles([(k, v) for k, v in items if v])


def curves(run: Record) -> str:
    """Return all charts over the steps of a run."""
    loss = run.points("loss")
    val = run.points("val_loss")
    grad = run.points("grad_norm")
    lr = run.points("lr")
    shown = [
        chart(
            run,
            "Loss",
            loss_unit(run),
            Curve("training", loss, palette(0), "faint"),
            Curve("training, running mean", running_mean(loss), palette(0)),
            Curve("validation", val, palette(1), "faint"),
            Curve("validation", val, palette(1), "dots"),
        ),
        chart(run, "Learning rate", "", Curve("learning rate", lr, palette(3))),
        chart(
            run,
            "Gradient norm",
            "before clipping",
            Curve("gradient norm", grad, palette(4), "faint"),
            Curve("running mean", running_mean(grad), palette(4)),
            log=True,
        ),
        *tasks(run),
        layer_norms(run),
        expert_loads(run),
        *timing(run),
    ]
    switch = axis_switch([run.axes])
    return f'<h2>Curves</h2>{switch}<div class="charts">{"".join(shown)}</div>'


def loss_unit(run: Record) -> str:
    """Return the unit of the loss: none for one that is not a mean over tokens."""
    if run.points("margin"):
        return ""
    return "nats per token"


def chart(run: Record, title: str, unit: str, *curves: Curve, log: bool = False) -> str:
    """Return a chart of one run: see chart.chart."""
    return charts.chart(title, unit, [replace(c, axes=run.axes) for c in curves], log)


def tasks(run: Record) -> list[str]:
    """Return a chart for each metric of the files of --eval-tasks."""
    keys = [k for k in dict.fromkeys(k for line in run.metrics for k in line) if "/" in k]
    names: dict[str, list[str]] = {}
    for key in keys:
        file, _, metric = key.rpartition("/")
        names.setdefault(metric, []).append(file)
    return [
        chart(
            run,
            f"Tasks: {metric}",
            "",
            *(
                Curve(file, run.points(f"{file}/{metric}"), color, style)
                for file, color in zip(files, colors(len(files)))
                for style in ("faint", "dots")
            ),
        )
        for metric, files in names.items()
    ]


# title, unit, and label, name and color of each curve
REWARD_CHARTS = (
    ("Rollouts against training", "first update", ("|ratio - 1|, largest", "ratio_error", 4), ("KL", "rollout_kl", 5)),
    ("Completions", "tokens", ("mean length", "completion_tokens", 2)),
    ("Turns", "of the model in a conversation", ("mean", "turns", 1)),
    ("Shares", "of tokens, of groups, of completions",
     ("clipped tokens", "clipped", 3), ("completions without an end", "truncated", 2), ("groups of equal rewards", "equal_groups", 1)),
    ("Entropy", "nats per token", ("of what was drawn", "entropy", 0)),
    ("KL to the reference", "nats per token", ("KL", "reference_kl", 5)),
)  # fmt: skip


def rewards(run: Record) -> str:
    """Return the charts of reinforcement learning, and how rollouts and training differ."""
    reward = run.points("reward")
    if not reward:
        return ""
    tasks = sorted({name for m in run.metrics for name in m if name.startswith("rewards/")})
    shown = [
        chart(
            run,
            "Reward",
            "mean of a step",
            Curve("rollouts", reward, palette(0), "faint"),
            Curve("rollouts, running mean", running_mean(reward), palette(0)),
            Curve("validation", run.points("val_reward"), palette(1), "dots"),
        ),
        chart(
            run,
            "Rewards of the tasks",
            "mean of a step, without the weights",
            *(
                Curve(name.partition("/")[2], run.points(name), color)
                for name, color in zip(tasks, colors(len(tasks)))
            ),
        ),
    ]
    for title, unit, *curves in REWARD_CHARTS:
        drawn = [Curve(label, run.points(name), palette(i)) for label, name, i in curves]
        shown.append(chart(run, title, unit, *drawn))
    return f'<h2>Rewards</h2><p>{_drift(run)}</p><div class="charts">{"".join(shown)}</div>'


def _drift(run: Record) -> str:
    """Return how the log-probabilities of rollouts and training differ."""
    points = run.points("ratio_error") + run.points("rollout_kl")
    measured = [y for _, y in points if y is not None]
    steps = len(run.points("reward"))
    largest = f"{max(measured, default=0):.2g}"
    if run.section("train").get("off_policy"):
        return (
            "The completions of a step come from the weights one step before (--off-policy): a "
            f"ratio was off by up to {largest}."
        )
    if len(measured) == 2 * steps and not any(measured):
        return (
            f"In all {steps:,} steps the ratio of the first update was exactly 1, and the KL "
            "exactly 0: rollouts and training computed the same bits."
        )
    return (
        "Log-probabilities of rollouts and training differ: the ratio of a first update was off "
        f"by up to {largest}."
    )


def preferences(run: Record) -> str:
    """Return the charts of learning from preferences."""
    if not run.points("margin"):
        return ""
    shown = []
    for title, unit, *names in (
        ("Rewards", "mean of a step", "reward_chosen", "reward_rejected", "margin"),
        ("Log-probabilities", "nats per answer", "logprob_chosen", "logprob_rejected"),
        ("Accuracy", "share of answers in the right order", "accuracy"),
        ("KL to the reference", "nats per answer", "kl"),
    ):
        curves = []
        for name, color in zip(names, colors(len(names))):
            label = name.replace("_", " ")
            curves.append(Curve(label, running_mean(run.points(name)), color))
            curves.append(Curve(f"{label}, validation", run.points(f"val_{name}"), color, "dots"))
        if run.points(names[0]):
            shown.append(chart(run, title, unit, *curves))
    return f'<h2>Preferences</h2><div class="charts">{"".join(shown)}</div>'


def fp8(run: Record) -> str:
    """Return how many numbers did not fit their scale, by kind of tensor.

    "" if the run was not in fp8.
    """
    names = ("fp8_clamped", "fp8_nonfinite")
    lines = [m for m in run.metrics if names[0] in m]
    if not lines:
        return ""
    counts = {
        key: [y for _, y in run.points(key) if y]
        for key in sorted({k for m in lines for k in m if k.startswith(names)} - {*names})
    }
    rows = []
    for name, what in zip(names, ("clamped to the largest code", "not finite")):
        for key, values in counts.items():
            if key.startswith(name + "_") and values:
                module, _, matrix = key.removeprefix(name + "_").rpartition("_")
                many = f"{sum(values):,.0f}", f"{len(values):,}", f"{max(values):,.0f}"
                rows.append([f"{module} {matrix}", what, *many])
    text = (
        f"Numbers that did not fit the scale of their tensor, in {len(lines):,} steps. "
        "x: what a product reads, w: its matrix, dy: the gradient of its result."
    )
    if not rows:
        return f"<h2>fp8</h2><p>{text} There were none.</p>"
    columns = ["tensors", "numbers", "in all", "steps with some", "most in a step"]
    shown = chart(
        run,
        "Clamped fp8 numbers",
        "per step",
        Curve("all tensors", run.points(names[0]), palette(1)),
    )
    listed = table(columns, rows, "", "num")
    return f'<h2>fp8</h2><p>{text}</p>{listed}<div class="charts">{shown}</div>'


def layer_norms(run: Record) -> str:
    """Return the chart of the gradient norm of each layer."""
    names = [name for name in _layer_keys(run) if not name.startswith(EXPERTS)]
    lines = [
        Curve(name, run.points(name, run.layers), by_depth(i, len(names)))
        for i, name in enumerate(names)
    ]
    return chart(run, "Gradient norm per layer", "before clipping", *lines, log=True)


def expert_loads(run: Record) -> str:
    """Return the chart of the most tokens that an expert of each layer got, compared with the mean."""
    names = [name for name in _layer_keys(run) if name.startswith(EXPERTS)]
    lines = []
    for i, name in enumerate(names):
        largest = [
            {"step": line["step"], name: _largest_load(line.get(name))} for line in run.layers
        ]
        points: list[tuple[float, float | None]] = [
            (x, y) for x, y in run.points(name, largest) if y is not None
        ]
        lines.append(Curve(name.removeprefix(EXPERTS), points, by_depth(i, len(names))))
    return chart(run, "Largest expert load per layer", "times the mean of the layer", *lines)


def _largest_load(counts):
    if not isinstance(counts, list) or not all(type(n) is int and n >= 0 for n in counts):
        return None
    return max(counts) * len(counts) / sum(counts) if any(counts) else None


def _layer_keys(run):
    keys = dict.fromkeys(key for line in run.layers for key in line)
    return [key for key in keys if key != "step"]


def timing(run: Record) -> list[str]:
    """Return the charts of throughput, MFU, time by phase and memory."""
    speed = run.points("tokens_per_s", run.timing)
    mfu = run.points("mfu", run.timing)
    memory = [(x, y and y / 1e9) for x, y in run.points("memory_bytes", run.timing)]
    timed = [t for t in run.timing if isinstance(t.get("phases_ms"), dict)]
    phases = {
        name: [{"step": t["step"], "ms": t["phases_ms"].get(name)} for t in timed]
        for name in dict.fromkeys(name for t in timed for name in t["phases_ms"])
    }
    return [
        chart(
            run,
            "Throughput",
            "tokens per second",
            Curve("tokens per second", speed, palette(2), "faint"),
            Curve("running mean", running_mean(speed), palette(2)),
        ),
        chart(
            run,
            "MFU",
            "% of the GPU's peak",
            Curve("MFU", [(x, y and 100 * y) for x, y in mfu], palette(5)),
        ),
        chart(
            run,
            "Time by phase",
            "ms per step, running mean",
            *(
                Curve(n, running_mean(run.points("ms", lines)), palette(i))
                for i, (n, lines) in enumerate(phases.items())
            ),
        ),
        chart(run, "Memory", "GB, peak so far", Curve("memory", memory, palette(1))),
    ]


def events(run: Record) -> str:
    """Return the table of skipped steps and loss spikes."""
    rows = [[str(m["step"]), f"skipped: {m['skipped']}"] for m in run.metrics if m.get("skipped")]
    spike = "the loss jumps to {}, {} standard deviations above the previous losses"
    rows += [
        [str(m["step"]), spike.format(m.get("loss"), m["spike"])]
        for m in run.metrics
        if m.get("spike")
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: int(row[0]))
    others = ""
    if len(rows) > MOST_EVENTS:
        others = f"<p>and {len(rows) - MOST_EVENTS} more</p>"
    return (
        "<h2>Skipped steps and loss spikes</h2>"
        + table(["step", "event"], rows[:MOST_EVENTS])
        + others
    )


# ----------------------------------------------------------------------------- a sentence
def sentence(run: Record) -> str:
    """Return next tokens and attention for one sentence; "" if there is no sentence.json."""
    s = run.sentence
    try:
        return _sentence(s) if s else ""
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        run.missing.append("sentence.json is damaged")
        return ""


def _sentence(s: dict[str, Any]) -> str:
    tokens = s["tokens"]
    text = html.escape("".join(tokens))
    rows = "".join(_next_row(token, x) for token, x in zip(tokens, s["next"]))
    maps = "".join(
        _layer_maps(layer, m, tokens, i == 0) for i, (layer, m) in enumerate(s["attention"].items())
    )
    n_columns = max((len(x["top"]) for x in s["next"]), default=1)
    some = len(s["attention"]) < s["layers"]
    fewer = ""
    if some:
        fewer = f" {len(s['attention'])} of {s['layers']} layers."
    return (
        f"<h2>One sentence, step {int(s['step'])}</h2><pre>{text}</pre>"
        "<h3>Next tokens</h3><p>After each token: the probability of the actual next token, and "
        "the most likely next tokens.</p>"
        '<div class="scroll"><table class="next"><thead><tr><th>after</th><th>actual next</th><th '
        f'colspan="{n_columns}">most likely next'
        f"</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "<h3>Attention</h3><p>Rows are queries, columns are keys; darker blue is a larger weight, "
        "and each row sums to 1. "
        f"The heads have the same rows and columns as the mean.{fewer}</p>{maps}"
    )


def _next_row(token, following):
    real = following["real"]
    chance = ""
    if real is not None:
        chance = f"{100 * float(real):.1f} %"
    cells = "".join(
        f'<td>{_token(t)}<span class="bar" '
        f'style="width:{60 * float(p):.1f}px"></span>{100 * float(p):.1f} %</td>'
        for t, p in following["top"]
    )
    return f'<tr><td>{_token(token)}</td><td class="real">{chance}</td>{cells}</tr>'


def _token(text):
    return f'<span class="token">{html.escape(_visible(text))}</span>'


def _visible(text):
    return str(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def _layer_maps(layer, maps, tokens, is_open):
    mean = image(_square(maps["mean"], len(tokens)), f"{layer}, mean of all heads")
    labels = "".join(f"<span>{html.escape(_visible(t))}</span>" for t in tokens)
    heads = "".join(
        f"<figure>{image(_square(p, len(tokens)), f'{layer}, head {h}')}<figcaption>head "
        f"{html.escape(h)}</figcaption></figure>"
        for h, p in maps["heads"].items()
    )
    if len(maps["heads"]) < maps["of"]:
        of = f", {len(maps['heads'])} of {maps['of']} heads"
    else:
        of = ""
    return (
        f"<details{' open' if is_open else ''}><summary>{html.escape(layer)}{of}</summary>"
        f'<div class="maps"><figure class="mean" style="--side:{11 * len(tokens)}px"><div '
        f'class="columns">{labels}</div>'
        f'<div class="rows">{labels}</div>{mean}<figcaption>mean of all '
        f"heads</figcaption></figure>{heads}</div></details>"
    )


def _square(p, T):
    p_TT = np.array(p, np.float64)
    if p_TT.shape != (T, T):
        raise ValueError("not a map of this sentence")
    return p_TT


# ------------------------------------------------------------- samples, profile, configuration
def samples(run: Record) -> str:
    """Return the generated samples, the newest first; at most about MOST_SAMPLES of them."""
    if not run.samples:
        return ""
    step = max(1, -(-len(run.samples) // MOST_SAMPLES))
    chosen = run.samples[::-1][::step]  # the newest first
    shown = "".join(
        f"<details{' open' if i == 0 else ''}><summary>step "
        f"{n:,}</summary><pre>{html.escape(text)}</pre></details>"
        for i, (n, text) in enumerate(chosen)
    )
    return f"<h2>Samples over time</h2>{shown}"


def rollouts(run: Record) -> str:
    """Return a table of completions of the last step that rollouts.jsonl has, at most
    MOST_ROLLOUTS: groups stay together."""
    last = max((line["step"] for line in run.rollouts), default=None)
    lines = [line for line in run.rollouts if line["step"] == last][:MOST_ROLLOUTS]
    columns = ["prompt", "completion", "reward", "advantage", "finish", "tokens"]
    text = lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)
    rows = [[text(line.get(name, "")) for name in columns] for line in lines]
    shown = table(columns, rows)
    return shown and f"<h2>Completions of step {last:,}</h2>{shown}"


def profile(run: Record) -> str:
    """Return the tables of profile.json."""
    tables = run.profile.get("tables")
    if not isinstance(tables, list):
        return ""
    valid = [t for t in tables if isinstance(t, dict) and isinstance(t.get("rows"), list)]
    shown = "".join(
        table(
            t.get("columns", []),
            [r for r in t["rows"] if isinstance(r, list)],
            t.get("title", ""),
            "num",
        )
        for t in valid
    )
    return f"<h2>Profile</h2><p>{html.escape(str(run.profile.get('about', '')))}</p>{shown}"


def _source(start):
    """Return which code a start of a run ran."""
    commit = start.get("commit")
    if start.get("changed"):
        changed = ", with changes"
    else:
        changed = ""
    code = "not in a git repository"
    if commit:
        code = f"commit {str(commit)[:12]}{changed}"
    return f"{code}, xtrain {start.get('xtrain', '')}, started {start.get('time', '')}"


def configuration(run: Record) -> str:
    """Return the tables of config.json, and the starts of a run that was resumed."""
    names = {
        "train": "Options",
        "model": "Model",
        "data": "Text",
        "machine": "Machine",
        "versions": "Versions",
    }
    shown = "".join(
        f"<div>{table([], [[k, _value(v)] for k, v in run.section(section).items()], name)}</div>"
        for section, name in names.items()
    )
    rows = [[f"{s['step']:,}", _source(s), str(s.get("command", ""))] for s in run.starts]
    starts = ""
    if len(rows) > 1:
        starts = table(["after step", "code", "command"], rows, "Starts")
    return f'<h2>Configuration</h2>{starts}<div class="configs">{shown}</div>'


def _value(x):
    if x is None or x == []:
        return "-"
    if type(x) is int:
        return f"{x:,}"
    if type(x) is float:
        return f"{x:.6g}"
    return str(x)


def _last_mean(run):
    means = running_mean(run.points("loss"))
    if means:
        return means[-1][1]
    return None


def _median(values):
    finite = [y for y in values if y is not None]
    if finite:
        return float(np.median(finite))
    return None


def _float(x):
    if isinstance(x, (int, float)):
        return float(x)
    return None


def _shown(x, form):
    if x is None:
        return ""
    return form.format(x)
