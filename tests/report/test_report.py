"""The page of a run: its content, that a browser shows it without errors, and that no file in the folder can break it."""

import html
import itertools
import json
import re
import shutil
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from checks import GPU
from runs import metrics, run

from xtrain.data.tokenizer import Tokenizer
from xtrain.errors import UserError
from xtrain.nn.model import Transformer
from xtrain.report import axes, live
from xtrain.report import page as report
from xtrain.report.__main__ import main as report_main
from xtrain.report.chart import Curve, chart, running_mean
from xtrain.report.pictures import png
from xtrain.report.sentence import look


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    return run(base, name="one", steps=12, eval_every=4, sample_every=6)


@pytest.fixture(scope="module")
def other(folder):
    return run(folder.parent, name="two", steps=12, lr=1e-3, eval_every=4)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ----------------------------------------------------------------------------- what is written
def test_training_leaves_a_page(folder):
    page = (folder / "report.html").read_text()
    for title in (
        "Loss",
        "Learning rate",
        "Gradient norm per layer",
        "Throughput",
        "Time by phase",
        "Memory",
    ):
        assert f'aria-label="{title} over steps"' in page, title
    for text in (
        "<h3>Next tokens</h3>",
        "<h3>Attention</h3>",
        "Samples over time",
        "Configuration",
        "Machine",
    ):
        assert text in page, text
    assert page.count('class="map"') == 2 * (1 + 2)  # layers x (mean, heads)
    for part in (json.loads((folder / "config.json").read_text())["model"], {"sha256": ""}):
        assert all(f"<td>{key}</td>" in page for key in part)


def test_a_page_loads_nothing(folder):
    page = (folder / "report.html").read_text()
    assert page.count("<script") == 1 and "http" not in page.replace("http-equiv", "")
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', page)) == {"data:"}


def test_the_loss_curve_goes_through_the_numbers(folder):
    losses = [m["loss"] for m in metrics(folder) if "loss" in m]
    page = (folder / "report.html").read_text()
    d = re.search(r'<path class="faint"[^>]*d="M([^"]*)"', page)[1]
    ys = np.array([float(p.split()[1]) for p in d.split("L")])
    assert len(ys) == 12
    np.testing.assert_allclose(np.corrcoef(ys, losses)[0, 1], -1, atol=1e-5)  # down is up in SVG


def test_timing_by_phase(folder):
    for line in lines(folder / "timing.jsonl"):
        assert {"tokens_per_s", "mfu", "ms", "phases_ms", "memory_bytes"} <= set(line)
        phases = line["phases_ms"]
        assert (
            min(phases.values()) >= 0
            and 0.3 * line["ms"] < sum(phases.values()) <= line["ms"] * 1.001
        )
        assert 1e6 < line["memory_bytes"] < 1e12
    if not GPU:
        assert list(phases) == ["data", "forward", "backward", "optimizer"]


def test_layer_norms_add_up(folder):
    total = {m["step"]: m["grad_norm"] for m in metrics(folder) if "grad_norm" in m}
    rows = lines(folder / "layers.jsonl")
    assert rows and set(rows[0]) == {"step", "embedding", "layer 0", "layer 1", "last norm", "head"}
    for row in rows:
        norms = np.array([x for key, x in row.items() if key != "step"])
        np.testing.assert_allclose(np.sqrt((norms**2).sum()), total[row["step"]], rtol=1e-5)


def test_expert_loads(tmp_path):
    """A validation counts the experts that its tokens choose: K of each token in each layer."""
    folder = run(tmp_path, steps=2, eval_every=1, sample_every=0, experts=3)
    rows = [row for row in lines(folder / "layers.jsonl") if "experts of layer 0" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert set(row) == {"step", "experts of layer 0", "experts of layer 1"}
        for name in set(row) - {"step"}:
            assert len(row[name]) == 3 and sum(row[name]) == 2 * (2 * 4 * 32)  # 2 batches
    page = (folder / "report.html").read_text()
    assert 'aria-label="Largest expert load per layer over steps"' in page
    for damaged in ([10**400, 0, 1], [-1, 1], "x", [], [0, 0], [1.5]):
        (folder / "layers.jsonl").write_text(json.dumps({"step": 1, "experts of layer 0": damaged}))
        report.write([folder])


def test_attention_and_probabilities_are_the_models(folder):
    newest = max((folder / "checkpoints").iterdir())
    model, tokenizer = Transformer.from_pretrained(newest), Tokenizer.load(newest)
    ids = tokenizer.encode("the cat sees the dog . a bird")[:9]
    seen = look(model, tokenizer, ids, 12)
    logits = model(np.array([ids])).numpy()[0].astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for t, following in enumerate(seen["next"]):
        assert following["top"][0] == [tokenizer.decode([p[t].argmax()]), round(p[t].max(), 4)]
        real = None if t + 1 == len(ids) else round(p[t, ids[t + 1]], 4)
        assert following["real"] == real
    for maps in seen["attention"].values():
        heads = np.array(list(maps["heads"].values()))
        np.testing.assert_allclose(heads.sum(-1), 1, atol=0.02)
        np.testing.assert_allclose(heads.mean(0), maps["mean"], atol=2e-3)
        assert (heads * np.triu(np.ones(heads.shape[1:]), 1) == 0).all()  # causal
    assert list(seen["attention"]) == ["layer 0", "layer 1"]


# ----------------------------------------------------------------------------- hostile and broken folders
def test_what_a_model_writes_is_text(folder, tmp_path):
    copy = tmp_path / "<b>evil</b>"
    shutil.copytree(folder, copy)
    (copy / "samples.txt").write_text("--- step 3\n<script>alert(1)</script></pre><img src=x>\n")
    content = json.loads((copy / "sentence.json").read_text())
    content["tokens"][0] = "<script>"
    (copy / "sentence.json").write_text(json.dumps(content))
    start = {"step": 0, "command": "x --name '<script>'", "commit": "<img src=x>", "time": "</p>"}
    (copy / "starts.jsonl").write_text(2 * (json.dumps(start) + "\n"))
    layers = lines(copy / "layers.jsonl")
    layers[-1]["<script>\"'"] = 1.0  # the name of a curve, in data-chart
    (copy / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in layers))
    page = report.write([copy]).read_text()
    assert page.count("<script") == 1 and "&lt;script&gt;\\&quot;&#x27;" in page
    assert "'&lt;script&gt;" not in page and "commit &lt;img src=x&gt;" in page
    assert (
        "<script" not in page.replace("<script>" + report.style.SCRIPT, "")
        and "<img src=x" not in page
        and "<b>evil" not in page
    )
    assert html.escape("<script>alert(1)</script>") in page


BROKEN = {
    "cut lines": ("metrics.jsonl", lambda b: b[: len(b) // 2] + b"\n[]\n{\"step\": -1}\nnonsense"),
    "not finite": ("metrics.jsonl", lambda b: b + b'{"step": 13, "loss": null, "skipped": "the loss is nan"}\n'),
    "huge numbers": ("metrics.jsonl", lambda b: b + b'{"step": 13, "loss": 1e999, "lr": true, "grad_norm": "x"}\n'),
    "no metrics": ("metrics.jsonl", lambda b: b""),
    "hostile timing": ("timing.jsonl", lambda b: b'{"step": 1, "ms": 1e999, "tokens_per_s": -1}\n{"step": 2, "ms": "x", "seconds": []}\n'),
    "huge timing": ("timing.jsonl", lambda b: b'{"step": 9007199254740991, "ms": 1e14, "tokens_per_s": 1e14, "seconds": 1e14}\n'),
    "starts of another kind": ("starts.jsonl", lambda b: b'{"step": 0, "commit": [], "command": {}, "time": 1e999}\n[]\n'),
    "no timing": ("timing.jsonl", lambda b: None),
    "not JSON": ("config.json", lambda b: b"\xff{"),
    "another JSON": ("config.json", lambda b: b'{"train": 3, "model": {"dim": [1]}}'),
    "a sentence of another kind": ("sentence.json", lambda b: b'{"tokens": [1], "next": 3}'),
    "a map of another size": ("sentence.json", lambda b: b.replace(b'"mean": [[1.0', b'"mean": [[1.0, 2')),
    "a probability without end": ("sentence.json", lambda b: re.sub(rb'"step": [0-9]+', b'"step": Infinity', b)),
    "deep": ("sentence.json", lambda b: b"[" * 100_000),
    "a profile of another kind": ("profile.json", lambda b: b'{"tables": [3, {"rows": [3, ["a"]]}]}'),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(folder, tmp_path, name, capsys):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    file, change = BROKEN[name]
    content = change((copy / file).read_bytes() if (copy / file).exists() else b"")
    (copy / file).unlink(missing_ok=True)
    if content is not None:
        (copy / file).write_bytes(content)
    assert report_main([str(copy)]) == 0
    page = (copy / "report.html").read_text()
    assert "NaN" not in page and "Infinity" not in page and "<h1>run</h1>" in page
    if name == "not finite":
        assert "skipped: the loss is nan" in page


def test_phases_of_a_captured_step(folder, tmp_path):
    """One of the phases has the name "step", like the number of the step."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    timing = lines(copy / "timing.jsonl")
    for line in timing:
        line["phases_ms"] = {"data": 1.0, "step": 1e4}
    (copy / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))
    page = report.write([copy]).read_text()
    chart_of = re.search(r">Time by phase .*?</figure>", page, re.S)[0]
    assert re.findall(r"<title>(.*?)</title>", chart_of) == ["data", "step"]
    ticks = re.findall(r'class="x"[^>]*>(.*?)<', chart_of)
    assert max(map(float, ticks)) <= 12


def test_what_cannot_be_shown(tmp_path, capsys):
    for arguments, sentence in (
        ([], "no run was given"),
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path)], "is not a run"),
        ([str(tmp_path), str(tmp_path), "--sentence", "a"], "for one run"),
    ):
        assert report_main(arguments) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1, error


def test_a_sentence_of_ones_own(folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / "sentence.json").unlink()
    assert report_main([str(copy), "--sentence", "the dog sees"]) == 0
    content = json.loads((copy / "sentence.json").read_text())
    assert "".join(content["tokens"]) == "the dog sees" and content["step"] == 12
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint"):
        report.look_at_text(copy, "x", print)
    (copy / "sentence.json").unlink()
    assert report_main([str(copy)]) == 0  # a page without it


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_whole", full)
    out = run(tmp_path, steps=2)
    assert not (out / "report.html").exists() and (out / "checkpoints" / "step-000002").is_dir()


# ----------------------------------------------------------------------------- several runs
def test_comparison(folder, other, capsys):
    assert report_main([str(folder), str(other)]) == 0
    page = (folder.parent / "compare.html").read_text()
    assert f"{folder.parent / 'compare.html'}\n" == capsys.readouterr().out
    row = next(r for r in re.findall(r"<tr>.*?</tr>", page) if "train: lr" in r)
    assert re.findall(r"<td>(.*?)</td>", row) == ["train: lr", "0.0005", "0.001"]
    assert "train: steps" not in page
    best = min(m["val_loss"] for m in metrics(other) if "val_loss" in m)
    assert f"<td>{best:.4f}</td>" in page


# ----------------------------------------------------------------------------- axes
def test_tokens_and_seconds_of_a_step():
    line = lambda step, seconds, batch: {
        "step": step, "ms": 1e3 * 0.5, "tokens_per_s": batch / 0.5, "seconds": seconds,
    }  # fmt: skip
    # a batch of 100 tokens, of 300 from step 3 on; the line of step 4 is lost; 10 s of validation after step 2
    found = axes.read(
        [line(1, 1.0, 100), line(2, 2.0, 100), line(3, 13.0, 300), line(5, 15.0, 300)]
    )
    at = found.positions([0, 1, 2, 2.5, 3, 4, 5])
    assert at["tokens"] == [0, 100, 200, 350, 500, 800, 1100]
    assert at["time"] == [0, 1, 2, 7.5, 13, 14, 15]
    older = axes.read([{"step": s, "ms": 500.0, "tokens_per_s": 200.0} for s in (1, 2, 4)])
    assert older.positions([1, 2, 3, 4])["time"] == [0.5, 1, 1.5, 2]
    assert axes.read([]) is None and axes.read([{"step": 1}]) is None


def test_the_axes_are_those_of_the_run(folder):
    run = report.record.read(folder)
    at = run.axes.positions([1, 12])
    assert at["tokens"] == [4 * 32, 12 * 4 * 32]
    np.testing.assert_allclose(at["time"][1], run.timing[-1]["seconds"])
    drawn = re.findall(r'data-chart="(.*?)"', (folder / "report.html").read_text())
    loss = json.loads(html.unescape(drawn[0]))
    assert loss["axes"]["tokens"]["high"] == 12 * 4 * 32 and list(loss["axes"]) == ["steps", "tokens", "time"]  # fmt: skip
    training = loss["curves"][0]
    np.testing.assert_allclose(
        training["values"], [m["loss"] for m in metrics(folder) if "loss" in m], rtol=1e-5
    )
    (start,) = run.starts
    page = (folder / "report.html").read_text()
    assert html.escape(start["command"]) in page and start["step"] == 0
    if start["commit"]:
        assert f"commit {start['commit'][:12]}" in page


# ----------------------------------------------------------------------------- charts
def test_chart_edges():
    assert chart("nothing", "", [Curve("a", [], "red"), Curve("b", [(1, None)], "red")]) == ""
    one = chart("one", "", [Curve("a", [(3, 5.0)], "red")])
    assert "nan" not in one and one.count("<path") > 1
    for values in (
        [0.0, 0.0],
        [-1e-9, 1e-9],
        [1e12, 2e12],
        [5, None, 7],
        [float("inf"), 1.0],
        [-3, -3],
        [54943611.84262803, 54943611.84262804],  # neighbours in float64
        [0.02324663451601074, 0.023246634516010743],
    ):
        for log in (False, True):
            drawn = chart("x", "", [Curve("a", list(enumerate(values)), "red")], log)
            numbers = [
                float(x)
                for x in re.findall(r"-?\d+\.?\d*", "".join(re.findall(r' d="([^"]*)"', drawn)))
            ]
            assert all(-1 <= x <= 1001 for x in numbers), (values, drawn)


def test_the_running_mean_forgets_the_first_point():
    """Computed by hand: weights 0.05 * 0.95^age, divided by their sum."""
    ys = [9.0, 1.0, 2.0]
    weights = np.array([0.95**2, 0.95, 1.0])
    means = running_mean(list(enumerate([9.0, 1.0, None, 2.0])))
    assert [x for x, _ in means] == [0, 1, 3] and means[0][1] == pytest.approx(9)
    assert means[-1][1] == pytest.approx((weights * ys).sum() / weights.sum())


def test_labels_of_one_axis_are_written_alike():
    ticks = lambda top: re.findall(
        r'class="y"[^>]*>(.*?)<', chart("x", "", [Curve("a", [(0, 0.0), (1, top)], "red")])
    )
    assert ticks(1e-3) == ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]
    assert ticks(0.05) == ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]
    assert ticks(5e7) == ["0", "10M", "20M", "30M", "40M", "50M"]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "low, high",
    [
        (0.2, 0.20003),
        (0.1999, 0.2001),
        (12345678, 12345699),
        (1e5, 1e5 + 3),
        (-1e-5, 1e-5),
        (0.00200001, 0.00200002),
    ],
)
def test_labels_of_one_axis_differ(low, high, log):
    """Memory that hardly changes had the labels 0.2 0.2 0.2."""
    points = (
        [(1_000_000, abs(low)), (1_000_020, high)] if log else [(1_000_000, low), (1_000_020, high)]
    )
    drawn = chart("x", "", [Curve("a", points, "red")], log=log)
    for axis in "xy":
        labels = re.findall(rf'class="{axis}"[^>]*>(.*?)<', drawn)
        assert len(set(labels)) == len(labels), labels


def test_many_points_keep_their_peaks():
    points = [(i, 1.0) for i in range(100_000)]
    points[31_415] = (31_415, 9.0)
    drawn = chart("x", "", [Curve("a", points, "red")])
    assert len(drawn) < 30_000
    d = re.search(r'class="line"[^>]*d="M([^"]*)"', drawn)[1]
    top = min(d.split("L"), key=lambda p: float(p.split()[1]))
    assert float(top.split()[0]) == pytest.approx(314.15, abs=0.1)


def test_png():
    pytest.importorskip("matplotlib")
    import io

    from matplotlib.image import imread

    alpha = np.random.default_rng(0).random((3, 5))
    pixels = imread(io.BytesIO(png(alpha)), format="png")
    np.testing.assert_allclose(pixels[..., 3], alpha, atol=0.5 / 255 + 1e-6)


# ----------------------------------------------------------------------------- in a browser
MEASURE = """
(() => {
  const page = document, result = {};
  result.width = page.documentElement.clientWidth;
  result.needs = page.documentElement.scrollWidth;
  result.font = [...page.querySelectorAll(".plot span")].map(e => parseFloat(getComputedStyle(e).fontSize));
  result.curves = [...page.querySelectorAll(".plot path:not(.grid)")].map(
    e => { const r = e.getBoundingClientRect(); return [e.querySelector("title").textContent, r.width, r.height] });
  const box = e => e.getBoundingClientRect();
  result.first = Math.min(...[...page.querySelectorAll("td:first-child")].map(e => box(e).width));
  result.labels = [...page.querySelectorAll(".plot")].flatMap(plot => [
    [...plot.querySelectorAll(".x")].flatMap(e => [box(e).left, box(e).right]),
    [...plot.querySelectorAll(".y")].reverse().flatMap(e => [box(e).top, box(e).bottom])]);
  const map = page.querySelector(".mean img");
  result.tokens = map && ["rows", "columns"].map(c => [...map.parentNode.querySelectorAll(`.${c} span`)].map(
    e => c == "rows" ? (box(e).top + box(e).bottom) / 2 - box(map).top : (box(e).left + box(e).right) / 2 - box(map).left));
  result.side = map && box(map).width;
  result.legends = [...page.querySelectorAll(".legend")].map(e => [...e.children].map(i => i.textContent));
  result.maps = [...page.querySelectorAll("img.map")].map(e => [e.complete, e.naturalWidth]);
  result.dark = getComputedStyle(page.body).backgroundColor;
  return result;
})()
"""


def measured(browser, page, width):
    """The result of MEASURE in a page of this width. Fails for faults that no page may have."""
    browser.open(page.as_uri(), width)
    result = browser.evaluate(MEASURE)
    assert browser.complaints == []
    assert result["needs"] <= result["width"] <= width, "the page must be scrolled sideways"
    assert min(result["font"]) >= 11 and result["first"] >= 24, "a name is written letter by letter"
    for labels in result["labels"]:
        assert all(a <= b + 0.5 for a, b in itertools.pairwise(labels)), "labels overlap"
    return result


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(folder, browser, width):
    result = measured(browser, folder / "report.html", width)
    names = [name for name, _, _ in result["curves"]]
    for name in (
        "training, running mean",
        "learning rate",
        "layer 1",
        "head",
        "tokens per second",
        "running mean",
        "backward",
    ):
        assert name in names
    long = [c for c in result["curves"] if c[0] in ("training", "learning rate", "layer 0")]
    assert all(w > 0.5 * min(width, 560) and h > 1 for _, w, h in long), long
    T = len(json.loads((folder / "sentence.json").read_text())["tokens"])
    assert result["maps"] and all(done and side == T for done, side in result["maps"])
    cells = (np.arange(T) + 0.5) * result["side"] / T
    for labels in result["tokens"]:  # every token is next to its row, and above its column
        np.testing.assert_allclose(labels, cells, atol=2)
    assert ["training", "training, running mean", "validation"] in result["legends"]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_comparison_in_a_browser(folder, other, browser, tmp_path, width):
    page = report.write([folder, other], tmp_path / "compare.html")
    result = measured(browser, page, width)
    assert result["legends"] == [["one", "two"]] * 5
    assert [name for name, _, _ in result["curves"]] == ["one", "two"] * 5
    assert all(w > 0.5 * min(width, 560) and h > 1 for _, w, h in result["curves"])


def test_many_runs_have_a_colour_and_a_name_each(folder):
    runs = [report.record.read(folder) for _ in range(12)]
    for i, r in enumerate(runs):
        r.name = f"run {i}"
    page = report.page(runs)
    for drawn in re.findall(r"<figure.*?</figure>", page, re.S):
        lines = re.findall(r'class="line" style="stroke:(.*?)"', drawn)
        legend = re.search(r'class="legend">(.*?)</div>', drawn)[1]
        assert len(set(lines)) == 12 and re.findall(r"run \d+", legend) == [r.name for r in runs]


TIP = "document.querySelector('.tip')?.innerText"


def point_at(browser, plot, x, y=0.5):
    """Move the mouse to a fraction of the width and height of a plot."""
    left, top, width, height = browser.evaluate(
        f"(() => {{ const p = document.querySelectorAll('.plot')[{plot}]; p.scrollIntoView({{block: 'center'}}); "
        "const r = p.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] })()"
    )
    browser.call(
        "Input.dispatchMouseEvent", type="mouseMoved", x=left + x * width, y=top + y * height
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_values_under_the_cursor_and_other_axes(folder, browser, width):
    browser.open((folder / "report.html").as_uri(), width)
    by_step = {m["step"]: m for m in metrics(folder) if "loss" in m}
    seconds = [line["seconds"] for line in lines(folder / "timing.jsonl")]
    for step in (1, 6, 12):
        point_at(browser, 0, (step - 1) / 11)
        shown = browser.evaluate(TIP)
        assert shown.startswith(f"step {step} · {step * 128:,} tokens · ")
        assert float(re.search(r"training\n(\S+)", shown)[1]) == pytest.approx(by_step[step]["loss"], rel=1e-4)  # fmt: skip
        assert ("validation" in shown) == (step == 12)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    before = browser.evaluate("document.querySelector('.plot path.faint').getAttribute('d')")
    browser.evaluate("document.querySelector('[data-axis=tokens]').click()")
    labels = browser.evaluate("[...document.querySelectorAll('.plot')[0].querySelectorAll('.x')].map(e => e.textContent)")  # fmt: skip
    assert labels[-1] == "1500" and "1000" in labels
    assert browser.evaluate("document.querySelector('.plot path.faint').getAttribute('d')") == before  # fmt: skip
    browser.evaluate("document.querySelector('[data-axis=time]').click()")
    d = browser.evaluate("document.querySelector('.plot path.faint').getAttribute('d')")
    xs = np.array([float(p.split()[0]) for p in d[1:].split("L")])
    expected = (np.array(seconds) - seconds[0]) / (seconds[-1] - seconds[0])
    np.testing.assert_allclose(xs / 1000, expected, atol=1e-3)
    point_at(browser, 0, float(expected[7]))
    assert "step 8 " in browser.evaluate(TIP)
    browser.evaluate("document.querySelectorAll('.plot')[1].focus({focusVisible: true})")
    assert browser.evaluate(TIP).startswith("step 12 ")
    browser.press("Escape")
    assert browser.evaluate(TIP) is None and browser.complaints == []


@pytest.fixture
def served(folder, tmp_path):
    """A copy of a run whose last steps are missing, and the server of its page."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for name in ("metrics.jsonl", "timing.jsonl"):
        kept = [line for line in lines(copy / name) if line["step"] <= 6]
        (copy / name).write_text("".join(json.dumps(line) + "\n" for line in kept))
    with live.Server(copy, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield copy, server
        server.shutdown()
        thread.join()


def test_a_live_page_serves_one_run_to_this_machine(served):
    copy, server = served

    def get(path, **headers):
        try:
            request = urllib.request.Request(server.url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers

    assert server.server_address[0] == "127.0.0.1"
    status, text, headers = get("")
    assert status == 200 and "<h1>run</h1>" in text and "connect-src" in text
    assert headers["X-Frame-Options"] == "DENY" and "Python" not in headers["Server"]
    stamp = re.search(r'data-live="(.*?)"', text)[1]
    assert get(f"content?after={stamp}")[:2] == (204, "")
    (copy / "samples.txt").write_text("--- step 6\n<script>hit</script>\n")
    status, text, _ = get(f"content?after={stamp}")
    content = json.loads(text)
    assert status == 200 and content["stamp"] != stamp
    assert "&lt;script&gt;hit" in "".join(content["sections"])
    for path in ("config.json", "../run/config.json", "checkpoints/", "%2e%2e/", "contents"):
        assert get(path)[0] == 404, path
    assert get("", Host="example.org")[0] == 403  # a name that another site made lead here
    with pytest.raises(UserError, match=f"port {server.server_port} cannot be used"):
        live.Server(copy, server.server_port)
    shutil.rmtree(copy)
    assert get("content")[0] == 503


def test_a_live_page_follows_the_run(folder, served, browser):
    copy, server = served
    browser.open(server.url)
    steps = "document.querySelector('.tiles b').textContent"
    assert browser.evaluate(steps) == "6 of 12"
    browser.evaluate("document.querySelector('details').open = false")
    browser.evaluate("document.querySelector('[data-axis=tokens]').click()")
    for name in ("timing.jsonl", "metrics.jsonl"):
        shutil.copy(folder / name, copy / name)
    browser.wait(f"{steps} == '12 of 12'")
    point_at(browser, 0, 1)
    assert browser.evaluate(TIP).startswith("step 12 · 1,536 tokens")
    assert browser.evaluate("document.querySelector('[data-axis=tokens]').ariaPressed") == "true"
    assert not browser.evaluate("document.querySelector('details').open")
    assert browser.complaints == []


def test_the_console_shows_errors(browser, tmp_path):
    """A test of the tests above: a page that violates its own policy is noticed."""
    page = tmp_path / "bad.html"
    page.write_text(report.style.page("x", ['<img src="https://example.invalid/x.png">']))
    browser.open(page.as_uri())
    assert any("Content Security Policy" in line for line in browser.complaints)
