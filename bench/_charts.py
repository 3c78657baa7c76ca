"""The charts of lessons/speed.md, drawn from the records: SVG files that scale with the page.

tables.py writes them to lessons/charts together with the tables. A phone shows a chart 358 pixels
wide, so letters of SIZE in a drawing WIDTH wide are 10 pixels high there. Colours are CSS
variables: as a file, a chart follows the dark mode of the system; the site puts it into the page,
where it follows the page (lessons/site.css).
"""

import html
import math
from collections.abc import Callable, Iterable

Latest = Callable[..., list[dict]]  # tables.latest
Point = tuple[float, float]

WIDTH = 420.0
SIZE = 12
LETTER = 0.58 * SIZE  # mean width in a wide font; the reader's font is not known here
# margins of a plot; LEFT has room for the numbers of an axis
LEFT = 38.0
RIGHT = 14.0
NOTHING = "Not measured yet."
LIGHT = {
    "ink": "#263238",
    "soft": "#5f6b73",
    "rule": "#d8dde1",
    "paper": "#fff",
    "c0": "#00796b",
    "c1": "#d9480f",
    "c2": "#3949ab",
    "c3": "#ad1457",
}
DARK = {
    "ink": "#e4e8ec",
    "soft": "#a3adb5",
    "rule": "#3b434b",
    "paper": "#1e2129",
    "c0": "#4db6ac",
    "c1": "#ffa94d",
    "c2": "#91a7ff",
    "c3": "#f783ac",
}


def _colours(colours: dict[str, str]) -> str:
    variables = "; ".join(f"--{name}: {value}" for name, value in colours.items())
    return f"svg.chart {{ {variables} }}"


def _series(i: int) -> str:
    """Return the style of filled marks, lines and hollow marks of series i."""
    colour = f"var(--c{i})"
    return (
        f".chart .f{i} {{ fill: {colour} }} .chart .s{i} {{ stroke: {colour}; stroke-width: 2 }} "
        f".chart .h{i} {{ stroke: {colour}; stroke-width: 2; fill: var(--paper) }}"
    )


STYLE = f"""{_colours(LIGHT)}
@media (prefers-color-scheme: dark) {{ {_colours(DARK)} }}
.chart text {{ font: {SIZE}px system-ui, sans-serif; fill: var(--ink) }} \
.chart .soft {{ fill: var(--soft) }} .chart .title {{ font-weight: 600; font-size: 13px }}
.chart path, .chart line {{ fill: none; stroke: var(--rule) }} \
.chart .limit {{ stroke: var(--ink); stroke-width: 1.5 }} .chart .dashed {{ stroke-dasharray: 5 3 }}
""" + "\n".join(map(_series, range(4)))

# Roofs of one H200. The bandwidth is the fastest copy in the records.
BF16_PEAK = 989e12  # operations per second, NVIDIA's data sheet, dense
# Floating-point operations per element and bytes per element, counted from the formulas of the
# kernels (lesson 2).
OPERATIONS = {
    ("add", "bf16"): 1 / 6,
    ("rmsnorm_fwd", "bf16"): 4 / 4,
    ("adamw", "fp32"): 15 / 28,
}


class Drawing:
    """An SVG under construction. y is the position of the next line; it only grows."""

    def __init__(self, title: str):
        self.name = title
        self.parts = []
        self.y = 18.0
        self.text(0, self.y, title, "title")
        self.y += 8

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        attributes = f'x="{_n(x)}" y="{_n(y)}" class="{kind}" text-anchor="{anchor}"'
        self.parts.append(f"<text {attributes}>{html.escape(text)}</text>")

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "") -> None:
        ends = f'x1="{_n(x0)}" y1="{_n(y0)}" x2="{_n(x1)}" y2="{_n(y1)}"'
        self.parts.append(f'<line {ends} class="{kind}"/>')

    def path(self, points: Iterable[Point], kind: str) -> None:
        d = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{d}"/>')

    def bar(self, x0: float, x1: float, y: float, height: float, kind: str) -> None:
        box = f'x="{_n(x0)}" y="{_n(y)}" width="{_n(x1 - x0)}" height="{_n(height)}"'
        self.parts.append(f'<rect {box} rx="2" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str, about: str) -> None:
        circle = f'cx="{_n(x)}" cy="{_n(y)}" r="4" class="{kind}"'
        self.parts.append(f"<circle {circle}><title>{html.escape(about)}</title></circle>")

    def legend(self, entries: list[tuple[str, str]]) -> None:
        """Add marks with their texts, as many in a line as fit.

        entries: (class of a mark, text).
        """
        x = 0.0
        self.y += 16
        for kind, text in entries:
            width = 26 + LETTER * len(text)
            if x and x + width > WIDTH:
                x = 0.0
                self.y += 17
            if kind.startswith("s"):
                self.line(x, self.y - 4, x + 14, self.y - 4, kind)
            else:
                self.parts.append(
                    f'<circle cx="{_n(x + 7)}" cy="{_n(self.y - 4)}" r="4" class="{kind}"/>'
                )
            self.text(x + 18, self.y, text, "soft")
            x += width
        self.y += 8

    def note(self, text: str) -> None:
        """Add a text at the end, in lines."""
        self.y += 4
        line = ""
        for word in text.split():
            if LETTER * len(f"{line} {word}") > WIDTH:
                self.y += 16
                self.text(0, self.y, line, "soft")
                line = word
            else:
                line = f"{line} {word}".strip()
        self.y += 16
        self.text(0, self.y, line, "soft")

    def svg(self) -> str:
        body = "\n".join(self.parts)
        size = f"0 0 {WIDTH:.0f} {self.y + 8:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="{size}" '
            f'role="img" aria-label="{html.escape(self.name)}">\n'
            f"<style>\n{STYLE}\n</style>\n{body}\n</svg>\n"
        )


def _n(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def _scale(low: float, high: float, first: float, last: float, log: bool = False):
    """Return the function from values to positions, linear or logarithmic."""
    f = math.log if log else float
    return lambda v: first + (last - first) * (f(v) - f(low)) / (f(high) - f(low))


def _round(low: float, high: float, steps: tuple[int, ...] = (1, 2, 5)) -> list[float]:
    """Return the numbers 1, 2, 5, 10, ... from low to high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [n * 10.0**p for p in powers for n in steps if low <= n * 10.0**p <= high]


def gpu_name(record: dict) -> str:
    """Return the model of a record's GPU, short: "H200"."""
    return (record["gpu"] or "CPU").removeprefix("NVIDIA ")


def raced(latest: Latest) -> list[dict]:
    """Return the newest record of every training step, precision and GPU in which PyTorch ran."""
    records = [r for r in latest("bench_train", per_gpu=True) if r["peer"]]
    records.sort(key=lambda r: r["line"])
    newest = {(r["name"], r["shape"], r["dtype"], r["gpu"]): r for r in records}
    return sorted(newest.values(), key=lambda r: r["name"])


def _machine(records: list[dict]) -> str:
    return ", ".join(sorted({r["gpu"] for r in records}))


def _empty(title: str) -> str:
    drawing = Drawing(title)
    drawing.note(NOTHING)
    return drawing.svg()


def _bars(title: str, rows: list[tuple[str, list[tuple[str, float]]]], records: list[dict]) -> str:
    """Draw ratios from 1 on a logarithmic axis: to the right xtrain is faster.

    rows: (label, [(peer, ratio), ...]).
    """
    if not rows:
        return _empty(title)
    drawing = Drawing(title)
    peers = list(dict.fromkeys(peer for _, bars in rows for peer, _ in bars))
    if len(peers) > 1:
        drawing.legend([(f"f{i}", peer) for i, peer in enumerate(peers)])
    ratios = [ratio for _, bars in rows for _, ratio in bars]
    low = min(1.0, *ratios)
    high = max(1.0, *ratios)
    across = _scale(low, high * 1.0001, 2, WIDTH - 52, log=True)
    top = drawing.y
    for label, bars in rows:
        drawing.y += 18
        drawing.text(across(1.0) + 6, drawing.y, label, "soft")
        for peer, ratio in bars:
            a, b = sorted((across(1.0), across(ratio)))
            drawing.bar(a, b, drawing.y + 4, 13, f"f{peers.index(peer)}")
            drawing.text(b + 5, drawing.y + 15, f"{ratio:.2f} x")
            drawing.y += 16
        drawing.y += 2
    drawing.line(across(1.0), top + 4, across(1.0), drawing.y + 6, "limit")
    drawing.note(f"The line is 1: equal speed. {_machine(records)}.")
    return drawing.svg()


# ----------------------------------------------------------------------------- the charts
def training(latest: Latest) -> str:
    """Return the newest comparison of every training step with PyTorch, of each GPU."""
    records = raced(latest)
    rows = [
        (f"{r['name']}, {r['dtype']}, {gpu_name(r)}: {r['peer']}", [("", r["ratio"])])
        for r in records
    ]
    return _bars("Training: tokens/s of xtrain over PyTorch's", rows, records)


def decoding(latest: Latest) -> str:
    """Draw decoding with bf16 weights, next to generate() of transformers."""
    records = [r for r in latest("bench_decode") if r["dtype"] == "bf16" and r["peer"]]
    rows: dict[str, list] = {}
    for r in records:
        peer = "generate(), static cache + compile"
        if r["peer"] == "transformers plain":
            peer = "generate()"
        rows.setdefault(f"{r['name']}, {r['shape']}", []).append((peer, r["ratio"]))
    title = "Decoding: tokens/s of xtrain over transformers'"
    return _bars(title, list(rows.items()), records)


def attention(width: int, latest: Latest) -> str:
    """Draw the speed over that of PyTorch's two backends, for lengths of the sweep.

    width: of a head.
    """
    title = f"Attention, D={width}: speed of xtrain over PyTorch's"
    lines: dict[tuple[str, str], dict[int, float]] = {}
    records = []
    for r in latest("bench_attention"):
        shape = dict(part.split("=") for part in r["shape"].split())
        what, _, direction = r["name"].partition(" ")
        if what != "sweep" or shape["D"] != str(width):
            continue
        records.append(r)
        for peer, key in (("cuDNN", "cudnn_value"), ("flash", "peer_value")):
            if r.get(key):
                line = lines.setdefault((peer, direction), {})
                line[int(shape["T"])] = r["value"] / r[key]
    if not lines:
        return _empty(title)
    drawing = Drawing(title)
    words = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    kinds = {"cuDNN": "0", "flash": "1"}
    kind = lambda key: f"s{kinds[key[0]]}" + (" dashed" if key[1] != "fwd" else "")
    drawing.legend([(kind(k), f"{k[0]}, {words[k[1]]}") for k in sorted(lines)])
    values = [v for line in lines.values() for v in line.values()]
    lengths = sorted({T for line in lines.values() for T in line})
    low = min(1.0, *values) / 1.06
    high = max(1.0, *values) * 1.06
    top = drawing.y + 4
    bottom = drawing.y + 190
    up = _scale(low, high, bottom, top)
    across = _scale(lengths[0], lengths[-1] * 1.0001, LEFT + 8, WIDTH - RIGHT, log=True)
    for tick in (0.25 * i for i in range(math.ceil(4 * low), math.floor(4 * high) + 1)):
        drawing.line(LEFT, up(tick), WIDTH - RIGHT, up(tick), "limit" if tick == 1 else "")
        drawing.text(LEFT - 4, up(tick) + 4, f"{tick:g}", "soft", "end")
    for T in lengths[::2]:
        drawing.text(across(T), bottom + 16, f"{T:,}", "soft", "middle")
    for key, line in sorted(lines.items()):
        drawing.path([(across(T), up(line[T])) for T in sorted(line)], kind(key))
    drawing.y = bottom + 18
    drawing.note(f"Horizontal: sequence length. Causal, bf16. 1: equal speed. {_machine(records)}.")
    return drawing.svg()


def roofline(latest: Latest) -> str:
    """Draw operations per byte against operations per second.

    Intensities come from shapes, speeds from records.
    """
    title = "Roofline: the kernels under the limits of one H200"
    kernels = [r for r in latest("bench_kernels", per_peer=False) if "H200" in r["gpu"]]
    points: list[tuple[str, int, float, float]] = []  # name, group, operations/byte, operations/s
    for r in kernels:
        intensity = OPERATIONS.get((r["name"], r["dtype"]))
        if intensity:
            points.append((r["name"], 0, intensity, intensity * r["value"] * 1e9))
    for r in latest("bench_engine"):
        rows = r["shape"].split()[0]
        if r["name"] == "gemv_gate_up" and r["unit"] == "GB/s" and "H200" in r["gpu"]:
            intensity = float(rows.removeprefix("N="))  # 2 N operations for the 2 bytes of a weight
            points.append((f"gate/up, {rows}", 1, intensity, intensity * r["value"] * 1e9))
    for r in latest("bench_attention"):
        shape = {k: int(v) for k, v in (part.split("=") for part in r["shape"].split())}
        if r["name"] == "sweep fwd" and shape["D"] == 128 and "H200" in r["gpu"]:
            # q and the output, k and v, in bf16
            nbytes = 4 * shape["B"] * shape["T"] * shape["D"] * (shape["H"] + shape["G"])
            speed = r["value"] * 1e12
            points.append((f"T={shape['T']}", 2, speed * r["ms"] * 1e-3 / nbytes, speed))
    for r in latest("bench_lessons"):
        if r["dtype"] == "bf16" and r["name"] == "linear_cublas" and "H200" in r["gpu"]:
            n = int(r["shape"].rpartition("=")[2])
            points.append((f"cuBLAS, {n} cubed", 3, 2 * n**3 / (2 * 3 * n * n), r["value"] * 1e12))
    copies = [r["nbytes"] / (r["copy_ms"] * 1e-3) for r in kernels]
    if not points or not copies:
        return _empty(title)
    bandwidth = max(copies)
    drawing = Drawing(title)
    groups = ["one pass over memory", "decoding, weights", "attention, forward, D=128", "cuBLAS"]
    drawn = sorted({group for _, group, _, _ in points})
    drawing.legend([(f"f{g}", groups[g]) for g in drawn])
    ridge = BF16_PEAK / bandwidth
    left = min(x for _, _, x, _ in points) / 6
    right = max([ridge] + [x for _, _, x, _ in points]) * 2
    low = min(y for _, _, _, y in points) / 2
    high = BF16_PEAK * 2
    top = drawing.y + 4
    bottom = drawing.y + 250
    across = _scale(left, right, LEFT, WIDTH - RIGHT, log=True)
    up = _scale(low, high, bottom, top, log=True)
    for x in _round(left, right, (1,)):
        drawing.line(across(x), top, across(x), bottom)
        drawing.text(across(x), bottom + 16, f"{x:g}", "soft", "middle")
    for y in _round(low, high, (1,)):
        drawing.line(LEFT, up(y), WIDTH - RIGHT, up(y))
        drawing.text(LEFT - 4, up(y) + 4, f"{y / 1e12:g}", "soft", "end")
    start = max(left, low / bandwidth)
    roof = [(start, start * bandwidth), (ridge, BF16_PEAK), (right, BF16_PEAK)]
    drawing.path([(across(x), up(y)) for x, y in roof], "limit")
    half = math.sqrt(start * ridge)
    copy = f"copy, {bandwidth / 1e12:.2f} TB/s"
    drawing.text(across(half) - 8, up(half * bandwidth) - 4, copy, "", "end")
    peak = f"bf16, {BF16_PEAK / 1e12:.0f} TFLOP/s"
    drawing.text(WIDTH - RIGHT, up(BF16_PEAK) - 6, peak, "", "end")
    last = {g: max(x for _, h, x, _ in points if h == g) for g in drawn}
    for name, group, x, y in points:
        share = y / min(BF16_PEAK, x * bandwidth)
        speed = f"{y / 1e12:.3g} TFLOP/s, {share:.0%} of the limit there"
        about = f"{name}: {x:.3g} operations per byte, {speed}"
        drawing.dot(across(x), up(y), f"f{group}", about)
        if group == 0:  # just below the roof: above it there is room
            drawing.text(across(x) - 9, up(y) + 2, f"{name} {share:.0%}", "soft", "end")
        elif group == 1:
            drawing.text(across(x) + 9, up(y) + 7, f"{name} {share:.0%}", "soft")
        elif x == last[group]:
            drawing.text(across(x), up(y) + 18, f"{share:.0%}", "soft", "middle")
    drawing.y = bottom + 18
    drawing.note(
        "Horizontal: operations per byte, from the formulas and the shape. Vertical: TFLOP/s. "
        "A share is the speed over the limit at that point. The bandwidth is the fastest copy in "
        f"the records, the peak that of the data sheet. {_machine(kernels)}."
    )
    return drawing.svg()


def copy_share(latest: Latest) -> str:
    """Return the time of a copy of the same bytes as a share of each kernel's time."""
    title = "Kernels: share of the speed of a copy"
    records = latest("bench_kernels", per_peer=False)
    kernels: dict[str, dict[str, dict]] = {}
    for r in records:
        kernels.setdefault(r["name"], {})[r["dtype"]] = r
    if not kernels:
        return _empty(title)
    drawing = Drawing(title)
    types = [t for t in ("bf16", "fp32") if any(t in pair for pair in kernels.values())]
    marks = {"bf16": "f0", "fp32": "h1"}
    drawing.legend([(marks[t], t) for t in types])
    first = 15 + 6.4 * max(map(len, kernels))
    largest = max(1.0, *(r["share"] for r in records))
    across = _scale(0.0, largest, first, WIDTH - 12)
    top = drawing.y
    order = sorted(kernels, key=lambda name: -min(r["share"] for r in kernels[name].values()))
    bottom = top + 18 * len(order) + 6
    for tick in (0.25 * i for i in range(math.floor(4 * largest) + 1)):
        drawing.line(across(tick), top + 4, across(tick), bottom, "limit" if tick == 1 else "")
        drawing.text(across(tick), bottom + 14, f"{tick:.0%}", "soft", "middle")
    for i, name in enumerate(order):
        y = top + 18 * (i + 1)
        drawing.text(0, y, name)
        for t in reversed(types):
            if t in kernels[name]:
                r = kernels[name][t]
                about = f"{name}, {t}, {r['shape']}: {r['share']:.0%} of a copy, {r['ms']:.4f} ms"
                drawing.dot(across(r["share"]), y - 4, marks[t], about)
    drawing.y = bottom + 14
    drawing.note(
        "100 %: as fast as a copy of the bytes that the kernel must move (it can be slightly "
        f"faster). {_machine(records)}."
    )
    return drawing.svg()


CHARTS: dict[str, Callable[[Latest], str]] = {
    "training": training,
    "decoding": decoding,
    "attention-64": lambda latest: attention(64, latest),
    "attention-128": lambda latest: attention(128, latest),
    "roofline": roofline,
    "copy-share": copy_share,
}
