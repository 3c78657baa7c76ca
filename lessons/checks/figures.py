"""The figures of the lessons. Each function draws one figure and returns it, so that a notebook shows it.

ownership(owner)             which thread (or block) owns which element
traffic(trace, array)        one row per warp request, one cell per 32-byte sector: bytes used, bytes wasted
timeline(rows)               what runs when
roofline(points, ...)        arithmetic intensity against speed, under the two roofs of a machine
bars(values, unit)           a few numbers side by side
tiles(...)                   which part of A and B a block of C needs
stack(steps)                 the layers of a model along its residual stream, with shapes
nucleus(p, ids, top_p, u)    which tokens top-p keeps, and which one a random number draws
ring(world)                  which ranks' numbers a chunk contains after each step of a ring all-reduce
products(rows, ranks)        matrix products whose matrices are divided among ranks

A phone shows a figure about 350 pixels wide, 76 an inch: letters of 9 points are 9.5 pixels high there.
"""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

INK, PALE, READ, ACCENT, WASTE = "#263238", "#eceff1", "#cfd8dc", "#00796b", "#ffab91"
COLORS = ["#80cbc4", "#ffcc80", "#9fa8da", "#f48fb1", "#c5e1a5", "#b0bec5", "#fff59d", "#ce93d8"]
LINES = ["#00796b", "#e65100", "#3949ab", "#ad1457", "#558b2f"]
WIDTH = NARROW = 4.6  # inches
LETTER = 0.075  # width of a letter of 9 points, in inches
MARKERS = 40  # points of a curve: more become one thick line


def _axes(height, width=WIDTH):
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def _title(axes, text):
    axes.figure.suptitle(textwrap.fill(text, 54), fontsize=10)


def _shown(figure) -> Figure:
    plt.close(figure)  # otherwise a notebook would show it twice
    return figure


def ownership(owner: np.ndarray, title="", what="thread", text=True, width=WIDTH) -> Figure:
    """owner: (N,) or (R, C) integers, one per element; -1 means no owner. The colour is the owner modulo 8."""
    grid = np.atleast_2d(np.asarray(owner))
    rows, columns = grid.shape
    figure, axes = _axes(0.34 * rows + 0.9, width)
    shade = np.where(grid < 0, len(COLORS), grid % len(COLORS))
    axes.pcolormesh(
        np.arange(columns + 1), np.arange(rows + 1), shade,
        cmap=ListedColormap([*COLORS, PALE]), vmin=0, vmax=len(COLORS), edgecolors="white", linewidth=1,
    )  # fmt: skip
    if text:
        for r in range(rows):
            for c in range(columns):
                label = str(grid[r, c]) if grid[r, c] >= 0 else "–"
                axes.text(c + 0.5, r + 0.5, label, ha="center", va="center", fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set_aspect("auto")
    step = max(1, columns // 16)
    axes.set_xticks(np.arange(0, columns, step) + 0.5, np.arange(0, columns, step))
    axes.set_yticks(np.arange(rows) + 0.5, np.arange(rows) if rows > 1 else [""])
    axes.set_xlabel("column" if rows > 1 else "element")
    axes.set_ylabel("row" if rows > 1 else "")
    _title(axes, title or f"which {what} owns which element")
    _plain(axes)
    return _shown(figure)


def traffic(trace, array: str, write=None, requests=8, title="") -> Figure:
    """Each row is one instruction of one warp, each cell a 32-byte sector that this instruction moves.

    The bytes of a sector that a lane uses are dark; the wasted bytes are light.
    """
    chosen = trace.requests(array, write)[:requests]
    last = max(a.index * a.bytes // 32 for r in chosen for a in r)
    figure, axes = _axes(0.42 * len(chosen) + 1.0)
    for row, request in enumerate(chosen):
        wanted = {}
        for a in request:
            first = a.index * a.bytes
            wanted.setdefault(first // 32, set()).update(range(first % 32, first % 32 + a.bytes))
        for sector, used in wanted.items():
            axes.add_patch(plt.Rectangle((sector, row), 1, 0.8, color=WASTE, lw=0))
            for byte in used:
                axes.add_patch(
                    plt.Rectangle((sector + byte / 32, row), 1 / 32, 0.8, color=ACCENT, lw=0)
                )
    labels = [f"block {r[0].block[0]}, warp {r[0].thread // 32},\ntime {r[0].turn}" for r in chosen]
    axes.set_yticks(np.arange(len(chosen)) + 0.4, labels, fontsize=9)
    axes.set_xlim(0, last + 1)
    axes.set_ylim(len(chosen), -0.2)
    axes.set_xlabel(f"sector of {array} (32 bytes each)")
    total = trace.traffic(array, write)
    _title(
        axes,
        title
        or f"{array}: {total.moved:,} bytes moved, {total.wanted:,} used ({total.efficiency:.0%})",
    )
    _plain(axes)
    return _shown(figure)


def timeline(
    rows: dict[str, list[tuple[float, float, str]]], title="", unit="time", width=WIDTH
) -> Figure:
    """rows: {label: [(begin, end, text), ...]}. The same text has the same colour everywhere.

    A text that is longer than one of its spans is in the legend.
    """
    words = list(dict.fromkeys(w for spans in rows.values() for _, _, w in spans))
    room = width - 0.4 - LETTER * max(map(len, rows))  # of the spans, in inches
    last = max(end for spans in rows.values() for _, end, _ in spans)
    first = min(0, *(begin for spans in rows.values() for begin, _, _ in spans))
    inches = lambda begin, end: room * (end - begin) / (last - first)
    spans = [span for some in rows.values() for span in some]
    long = [
        w
        for w in words
        if w.strip() and any(w == x and LETTER * len(w) > inches(a, b) for a, b, x in spans)
    ]
    lines = -(-len(long) // 3)
    figure, axes = _axes(0.4 * len(rows) + 1.0 + 0.2 * lines, width)
    for i, spans in enumerate(rows.values()):
        for begin, end, word in spans:
            color = COLORS[words.index(word) % len(COLORS)]
            edge = 0 if inches(begin, end) < 0.06 else 1  # or it would hide a narrow span
            axes.barh(
                i, end - begin, left=begin, height=0.7, color=color, edgecolor="white", lw=edge
            )
            if word not in long:
                axes.text(
                    (begin + end) / 2, i, word, ha="center", va="center", fontsize=9, color=INK
                )
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if long:
        patches = [
            plt.Rectangle((0, 0), 1, 1, color=COLORS[words.index(w) % len(COLORS)]) for w in long
        ]
        figure.legend(
            patches,
            long,
            loc="outside lower center",
            ncols=min(3, len(long)),
            fontsize=9,
            frameon=False,
        )
    _title(axes, title)
    _plain(axes)
    return _shown(figure)


def roofline(
    points: dict[str, tuple[float, float]], bytes_per_s: float, flops: float, title=""
) -> Figure:
    """points: {name: (floating-point operations per byte, achieved operations per second)}.

    bytes_per_s, flops: the two roofs of the machine. Left of the ridge memory is the limit, right of it arithmetic.
    """
    figure, axes = _axes(3.8)
    ridge = flops / bytes_per_s
    low = min([x for x, _ in points.values()] + [ridge]) / 4
    high = max([x for x, _ in points.values()] + [ridge]) * 8
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(x * bytes_per_s, flops) / 1e12, color=INK, lw=2)
    axes.axvline(ridge, color=INK, lw=0.7, ls=":")
    axes.text(
        ridge,
        flops / 1e12 * 1.15,
        f"ridge: {ridge:.1f} operations per byte",
        fontsize=9,
        ha="center",
    )
    for i, (name, (intensity, speed)) in enumerate(points.items()):
        axes.plot(intensity, speed / 1e12, "o", ms=8, color=COLORS[i % len(COLORS)], mec=INK)
        axes.annotate(
            name,
            (intensity, speed / 1e12),
            xytext=(8 if i % 2 else -8, 0),
            ha="left" if i % 2 else "right",
            va="center",
            textcoords="offset points",
            fontsize=9,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte moved", ylabel="TFLOP/s")
    axes.set_ylim(top=flops / 1e12 * 2.5)
    _title(axes, title)
    axes.grid(True, which="major", color=PALE)
    _plain(axes)
    return _shown(figure)


def bars(
    values: dict[str, float], unit: str, title="", limit: tuple[str, float] | None = None
) -> Figure:
    """limit: (name, value) of a dashed line, an upper bound of the values."""
    figure, axes = _axes(0.52 * len(values) + 1.0)
    axes.barh(
        range(len(values)),
        list(values.values()),
        height=0.5,
        color=COLORS[0],
        edgecolor=INK,
        lw=0.5,
    )
    top = max([*values.values(), limit[1] if limit else 0])
    for i, (name, v) in enumerate(values.items()):
        paper = dict(fc="white", ec="none", pad=0.8)  # hides the limit's line behind the number
        axes.text(v + top * 0.015, i, f"{v:,.4g}", va="center", fontsize=9, color=INK, bbox=paper)
        axes.text(0, i - 0.3, f" {name}", va="bottom", fontsize=9, color=INK)
    if limit:
        axes.axvline(limit[1], color=INK, ls="--", lw=1)
        axes.text(limit[1], -0.85, f"{limit[0]} ", fontsize=9, ha="right", color=INK)
    axes.set_yticks([])
    axes.set_xlim(0, top * 1.2)
    axes.set_ylim(len(values) - 0.6, -1.3 if limit else -0.8)
    axes.set_xlabel(unit)
    _title(axes, title)
    _plain(axes)
    return _shown(figure)


def tiles(M: int, N: int, K: int, tile: int, at: tuple[int, int], step: int, title="") -> Figure:
    """C (M, N) = A (M, K) B (K, N) in square tiles: what block `at` of C reads in iteration `step`."""
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.2), layout="constrained")
    i, j = at
    parts = [
        ("A", M, K, [(i, k, READ if k != step else COLORS[1]) for k in range(-(-K // tile))]),
        ("B", K, N, [(k, j, READ if k != step else COLORS[2]) for k in range(-(-K // tile))]),
        ("C", M, N, [(i, j, COLORS[0])]),
    ]
    for ax, (name, rows, columns, cells) in zip(axes, parts):
        for r, c, color in cells:
            height, width = min(tile, rows - r * tile), min(tile, columns - c * tile)
            ax.add_patch(plt.Rectangle((c * tile, r * tile), width, height, color=color))
        ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
        ax.set_title(f"{name} ({rows}, {columns})", fontsize=10)
        each = tile if max(M, N, K) > 16 else 1  # lines between tiles, or between elements
        ax.set_xticks(range(0, columns + 1, each))
        ax.set_yticks(range(0, rows + 1, each))
        ax.tick_params(labelbottom=False, labelleft=False, length=0)
        ax.grid(True, color="#90a4ae", lw=0.6)
    figure.suptitle(
        textwrap.fill(
            title or f"block {at} of C, iteration {step}: one tile of A, one tile of B", 54
        ),
        fontsize=10,
    )
    return _shown(figure)


def butterfly(values, steps, title="") -> Figure:
    """Lanes (left to right) hold values; in each step, a lane adds the value of the lane with index `lane ^ step`."""
    rows = [np.asarray(values, float)]
    for step in steps:
        rows.append(rows[-1] + rows[-1][np.arange(len(values)) ^ step])
    figure, axes = _axes(0.75 * len(rows) + 0.6)
    for r, row in enumerate(rows):
        for lane, v in enumerate(row):
            axes.add_patch(
                plt.Rectangle(
                    (lane + 0.14, r - 0.22), 0.72, 0.44, color=COLORS[0 if r < len(steps) else 4]
                )
            )
            axes.text(lane + 0.5, r, f"{v:g}", ha="center", va="center", fontsize=9, color=INK)
            if r < len(steps):
                for source in (lane, lane ^ steps[r]):
                    axes.plot(
                        [source + 0.5, lane + 0.5], [r + 0.22, r + 0.78], color="#90a4ae", lw=0.8
                    )
    axes.set_xticks(np.arange(len(values)) + 0.5, range(len(values)))
    axes.set_yticks(range(len(rows)), ["start", *(f"step {s}" for s in steps)])
    axes.set_xlim(0, len(values))
    axes.set_ylim(len(rows) - 0.6, -0.5)
    axes.set_xlabel("lane")
    _title(axes, title)
    _plain(axes)
    return _shown(figure)


def curves(
    x, lines: dict[str, list[float]], xlabel: str, ylabel: str, title="", log=True
) -> Figure:
    """Several lines over the same x. Both axes are logarithmic unless log is False."""
    figure, axes = _axes(3.4)
    marker = "o-" if len(x) <= MARKERS else "-"
    for i, (name, y) in enumerate(lines.items()):
        axes.plot(x, y, marker, ms=4, color=LINES[i % len(LINES)], label=name)
    if log:
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_locator(LogLocator(numticks=7))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _title(axes, title)
    columns = 1 if max(map(len, lines)) > 28 else 2
    figure.legend(loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    axes.grid(True, color=PALE)
    _plain(axes)
    return _shown(figure)


def graph(
    places: dict[str, tuple[float, float]], edges: list[tuple[str, str]], title="", width=WIDTH
) -> Figure:
    """places: {text of a box: (column, row)}. edges: (from, to). Boxes with an incoming edge have another colour."""
    rows = max(r for _, r in places.values()) + 1
    columns = max(c for c, _ in places.values()) + 1
    figure, axes = _axes(0.75 * rows + 0.5, width)
    frames = {}
    for text, (c, r) in places.items():
        kind = COLORS[0] if any(b == text for _, b in edges) else COLORS[1]
        box = dict(boxstyle="round,pad=0.35", fc=kind, ec=INK, lw=0.6)
        drawn = axes.text(
            c, r, text, ha="center", va="center", fontsize=9, color=INK, bbox=box, zorder=1
        )
        frames[text] = drawn.get_bbox_patch()
    for a, b in edges:  # drawn after the boxes, whose frames they end at
        ends = dict(patchA=frames[a], patchB=frames[b], shrinkA=2, shrinkB=2)
        arrow = dict(arrowstyle="->", color="#607d8b", lw=1, **ends)
        axes.annotate("", places[b], places[a], arrowprops=arrow, zorder=2)
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_axis_off()
    _title(axes, title)
    return _shown(figure)


def stack(
    steps: list[tuple[str, str, bool]], title="", repeat: tuple[int, int, str] | None = None
) -> Figure:
    """Layers from top to bottom, each with the shape of its result on the right.

    steps: (name, shape, branch?); what branches off reads the residual stream, and its last step adds to it.
    repeat: (first step, last step, text) of a frame, "L times".
    """
    figure, axes = _axes(0.42 * len(steps) + 0.5, NARROW)
    on_stream = [i for i, (_, _, branch) in enumerate(steps) if not branch]
    axes.plot([0.45] * 2, [on_stream[0], on_stream[-1]], color=LINES[0], lw=3, zorder=0)
    for i, (name, shape, branch) in enumerate(steps):
        left = 1.0 if branch else 0.0
        axes.add_patch(
            plt.Rectangle(
                (left, i - 0.34), 2.6, 0.68, fc=COLORS[1 if branch else 0], ec=INK, lw=0.5
            )
        )
        axes.text(left + 1.3, i, name, ha="center", va="center", fontsize=9, color=INK)
        axes.text(3.75, i, shape, ha="left", va="center", fontsize=9, color=INK)
        arrow = dict(arrowstyle="->", color=LINES[0], lw=1.3)
        if branch and not steps[i - 1][2]:
            axes.annotate("", (1.0, i), (0.45, i), arrowprops=arrow)
        if branch and not steps[i + 1][2]:
            axes.annotate("", (0.45, i + 0.5), (1.4, i + 0.5), arrowprops=arrow)
            axes.plot([1.4, 1.4], [i + 0.34, i + 0.5], color=LINES[0], lw=1.3)
            axes.text(0.25, i + 0.5, "+", ha="center", va="center", fontsize=11, color=LINES[0])
        elif branch:
            axes.plot([2.3, 2.3], [i + 0.34, i + 0.66], color="#607d8b", lw=1)
    if repeat:
        first, last, text = repeat
        box = (-0.25, first - 0.45), 6.0, last - first + 1.1
        axes.add_patch(plt.Rectangle(*box, fill=False, ec="#90a4ae", lw=1, ls="--"))
        axes.text(5.7, last + 0.55, text, ha="right", va="bottom", fontsize=9, color=INK)
    axes.set_xlim(-0.35, 5.85)
    axes.set_ylim(len(steps) - 0.4, -0.6)
    axes.set_axis_off()
    _title(axes, title)
    return _shown(figure)


def nucleus(p, ids, top_p: float, u: float, title="") -> Figure:
    """Tokens in descending order of probability: the running sum as steps, those that top-p keeps in colour.

    u: the random number; a dotted line at u times the kept sum shows which token it draws.
    """
    p = np.asarray(p, float)
    sums = np.cumsum(p)
    kept = sums - p < top_p * sums[-1]
    drawn = u * sums[kept][-1]
    figure, axes = _axes(3.0, NARROW)
    for i, (a, b) in enumerate(zip(sums - p, p)):
        chosen = kept[i] and a <= drawn < a + b
        color = ACCENT if chosen else COLORS[0] if kept[i] else PALE
        axes.bar(i, b, bottom=a, width=0.9, color=color, edgecolor=INK, lw=0.5)
        thin = b < 0.08 * sums[-1]  # no room for the number: it stands below the bar
        axes.text(
            i,
            a - 0.01 * sums[-1] if thin else a + b / 2,
            f"{b:.2g}",
            ha="center",
            va="top" if thin else "center",
            fontsize=9,
            color="white" if chosen and not thin else INK,
        )
    for y, text, style in (
        (top_p * sums[-1], f"p = {top_p:g}", "--"),
        (drawn, f"u = {u:g} of the kept", ":"),
    ):
        axes.axhline(y, color=INK, ls=style, lw=1, zorder=0)
        axes.text(len(p) - 0.45, y, text, fontsize=9, color=INK, ha="right", va="bottom")
    axes.set_xticks(range(len(p)), ids)
    axes.set_ylim(0, sums[-1] * 1.08)
    axes.set_xlabel("token, the most likely first")
    axes.set_ylabel("running sum")
    _title(axes, title)
    _plain(axes)
    return _shown(figure)


def ring(world: int) -> Figure:
    """The chunks of every rank after each step of a ring all-reduce: which ranks' numbers they contain.

    Left: reduce-scatter from the top down. Right: all-gather. A chunk that was received in the step has a thick frame.
    """
    held = [[{r} for _ in range(world)] for r in range(world)]
    states = [("start", held, [None] * world)]
    for step in range(2 * (world - 1)):
        adds, before = step < world - 1, states[-1][1]
        chunks = [(r - step - 1 + (not adds) * world) % world for r in range(world)]
        held = [[set(c) for c in row] for row in before]
        for r, c in enumerate(chunks):
            came = before[r - 1][c]
            held[r][c] = held[r][c] | came if adds else set(came)
        states.append((f"step {step + 1}", held, chunks))
    left, right = states[:world], states[world:]
    figure, grid = plt.subplots(
        world, 2, figsize=(NARROW, 0.27 * world * world + 0.25 * world + 0.6), layout="constrained"
    )
    for row, pair in enumerate(zip(left, [None, *right])):
        for axes, state in zip(grid[row], pair):
            axes.set_axis_off()
            axes.set(xlim=(-1.15, world), ylim=(world, 0))
            if state is None:
                text = "left:\nreduce-scatter,\nreceive and add\n\nright:\nall-gather,\nreceive and store"
                axes.text(world / 2, world / 2, text, ha="center", va="center", fontsize=9)
                continue
            name, held, chunks = state
            axes.set_title(name, fontsize=9, pad=2)
            for r in range(world):
                axes.text(-0.15, r + 0.5, f"rank {r}", ha="right", va="center", fontsize=9)
                for c in range(world):
                    n = len(held[r][c])
                    color = ACCENT if n == world else [PALE, COLORS[0], "#4db6ac"][min(n - 1, 2)]
                    text = "sum" if n == world else " ".join(map(str, sorted(held[r][c])))
                    ink = "white" if n == world else INK
                    new = chunks[r] == c
                    frame = dict(fc=color, ec=INK if new else "white", lw=1.8 if new else 1)
                    axes.add_patch(plt.Rectangle((c + 0.04, r + 0.06), 0.92, 0.88, **frame))
                    axes.text(c + 0.5, r + 0.52, text, ha="center", va="center", fontsize=9, color=ink)  # fmt: skip
    figure.suptitle("columns: chunks; a cell: the ranks whose numbers are in it", fontsize=10)
    return _shown(figure)


def products(rows: list[list[str | tuple[str, float, float, int | str]]], ranks=2) -> Figure:
    """Rows of matrices and signs. A matrix: (text below, height, width, whose).

    whose: 0 or 1, the axis that is divided among the ranks; "0", "1", ..., the rank that has it alone; "all": every rank has it.
    """
    wide = lambda item: 0.5 if isinstance(item, str) else item[2] + 0.3
    total = max(sum(map(wide, row)) for row in rows)
    tall = [max(item[1] for item in row if not isinstance(item, str)) + 0.9 for row in rows]
    figure, axes = _axes(NARROW / total * sum(tall) + 0.3, NARROW)
    top = 0.0
    for row, height in zip(rows, tall):
        left, middle = 0.0, top + (height - 0.7) / 2
        for item in row:
            if isinstance(item, str):
                axes.text(left + 0.2, middle, item, ha="center", va="center", fontsize=11)
                left += wide(item)
                continue
            text, h, w, axis = item
            n = ranks if axis in (0, 1) else 1
            alone = PALE if axis == "all" else COLORS[int(axis)]
            for r in range(n):
                dy, dx = (h / n if axis == 0 else 0), (w / n if axis == 1 else 0)
                size = (w / n if axis == 1 else w), (h / n if axis == 0 else h)
                color = COLORS[r] if n > 1 else alone
                corner = (left + r * dx, middle - h / 2 + r * dy)
                axes.add_patch(plt.Rectangle(corner, *size, fc=color, ec=INK, lw=0.6))
            axes.text(left + w / 2, middle + h / 2 + 0.12, text, ha="center", va="top", fontsize=9)
            left += wide(item)
        top += height
    for r in range(ranks):
        axes.add_patch(plt.Rectangle((r * 1.3, top - 0.05), 0.25, 0.25, fc=COLORS[r], ec=INK, lw=0.5))  # fmt: skip
        axes.text(r * 1.3 + 0.35, top + 0.08, f"rank {r}", va="center", fontsize=9)
    axes.set(xlim=(-0.05, total), ylim=(top + 0.3, -0.1))
    axes.set_axis_off()
    return _shown(figure)


def _plain(axes):
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
