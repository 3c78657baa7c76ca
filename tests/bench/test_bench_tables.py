"""bench/tables.py on records written by the code of the benches, with a mock of the GPU."""

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest.mock import patch

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"

# The benches with fixed times instead of measurements. CuPy is a mock; the code that writes the records is the real one.
WRITE = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock
import numpy as np
import xtrain.serving.engine, xtrain.kernels.linear_cross_entropy, xtrain.kernels.decoding.gemv, xtrain.kernels.decoding.sampling
cupy = sys.modules["cupy"] = MagicMock()
cupy.cuda.runtime.getDeviceProperties.return_value = {"name": b"Test GPU"}
cupy.cuda.runtime.driverGetVersion.return_value = cupy.cuda.runtime.runtimeGetVersion.return_value = 13000

import bench_decode as decode
decode.ours = lambda model, prompts, new, *more: (SimpleNamespace(cache_bytes=1e9), 0.025, 2.0, [[7, 8]] * len(prompts))
decode.step_ms = lambda *_: (1.8, None)
decode.step_bytes = lambda *_: (2.0e9, 1e8)
decode.memory_peak_bytes = lambda _: 3.25e9
def their_times(theirs, prompts, new, static):
    if len(prompts) == 32 and static:
        raise RuntimeError("no memory")
    return (0.05, 4.0, [[7, 9]] * len(prompts)) if static else (0.1, 20.0, [[7, 8]] * len(prompts))
decode.their_times = their_times
model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
for B in (1, 32):
    decode.bench(model, None, B, 128, decode.Options(peers=["plain", "compile"]), 2e12)
decode.bench(model, None, 1, 4096, decode.Options(), 2e12)
decode.bench(model, None, 1, 128, decode.Options(layers=2), 2e12)
decode.bench(model, None, 1, 128, decode.Options(peers=["plain"]), 2e12, "int8", 400.0)
decode.bench(model, None, 1, 128, decode.Options(kv_cache=["full", "fp8"]), 2e12, "full", 400.0, kv_cache="fp8")

import bench_handover as handover
cupy.cuda.Device.return_value.attributes = {"MultiProcessorCount": 132}
cupy.cuda.get_elapsed_time.return_value = 4.0
cupy.asnumpy = lambda x: x
handover.VARIANTS = {
    name: lambda to_array, C, blocks, rounds: (lambda: None, lambda: handover.expected(C, rounds)) for name in handover.VARIANTS
}
handover.main(handover.Options(columns=(576,), rounds=1000))

import bench_engine as engine
engine.graph_ms = lambda *a, **k: (0.5, 0.4, 0.6)
engine.copy_ms = lambda nbytes: 0.4
engine.copy_bandwidth = lambda nbytes: 4e12
engine.replay_ms = lambda step: 1.0 if step.on else 1.25
engine.with_codes = lambda args: (args, None)
engine.product = lambda name, N: (None, 4_000_000, (np.zeros(3), np.zeros((6, 5))))
engine.converted = engine.linear_fwd = lambda *a: None
engine.attention_inputs = lambda B, context: ((), 2_000_000)
engine.draw = lambda *a, **k: ()
engine.sampling_calls = lambda B, vocab: [("sample_greedy", None)]
class Step:
    def __init__(self, B, context):
        self.nbytes, self.on = 2e9, True
        engine.set_overlap = lambda on: setattr(self, "on", on)
engine.Step = Step
engine.int32 = np.asarray
engine.main(engine.Options(
    rows=[1], batches=[1], shapes=[(1, 128), (32, 128)], prompts=[(2, 1000, 3000)], matrices=["qkv"]
))

import bench_head as head
head.to_device = lambda x, _: x
head.cast_fwd = lambda x, _: np.zeros((4, 2), np.float32)
head.count_targets = lambda _: None
head.graph_ms = lambda f: (3.0, 2.9, 3.1)
head.model_config = lambda _: (SimpleNamespace(dim=2, vocab_size=5, padded_vocab_size=8), 2, 2)
head.main(head.Options(models=["dim384"], rows=[1, 4]))

import json
from pathlib import Path
import bench_fp8 as fp8
fp8.cast_fwd = lambda x, _: x
fp8.graph_ms = lambda f: {"bf16": (0.5,), "fp8": (0.25,)}[f.__name__]
fp8.bench_products("gpt124m")
def train(words, **_):
    given = dict(word[2:].split("=") for word in words if "=" in word)
    run = Path(given["out"]) / given["name"]
    run.mkdir()
    last = {"bf16": 2.5, "fp8": 2.51, "fp8-head": 2.49}[given["name"]]
    steps = [{"step": i + 1, "loss": 3.0 - i / 1000} for i in range(120)]
    if given["precision"] == "fp8":
        steps = [step | {"fp8_clamped": 2, "fp8_nonfinite": 0, "fp8_clamped_qkv_x": 2} for step in steps]
        assert ("--fp8-head" in words) is given["name"].endswith("head")
    timing = [{"ms": 2.0, "memory_bytes": 3e9}] * 120
    for name, records in (("metrics", [*steps, {"step": 120, "val_loss": last}]), ("timing", timing)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\\n" for x in records))
    return SimpleNamespace(returncode=0)
fp8.subprocess.run, before = train, fp8.subprocess.run
import _timing
_timing._commit = lambda: "a commit"
fp8.bench_losses(SimpleNamespace(variants=["bf16", "fp8", "fp8-head"], steps=120, eval_every=60, text=["a"]), "300m")
fp8.subprocess.run = before
"""


def tables(folder):
    spec = importlib.util.spec_from_file_location("tables_of_a_test", BENCH / "tables.py")
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(BENCH), *sys.path]):
        spec.loader.exec_module(module)
    module.RESULTS = folder
    return module


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    path = os.pathsep.join([str(BENCH), str(BENCH.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", WRITE], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "XTRAIN_RESULTS": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tables(folder)


def rows(text):
    return [[c.strip() for c in x.strip("|").split("|")] for x in text.splitlines() if "|" in x][2:]


def test_without_records(tmp_path):
    module = tables(tmp_path)
    assert {make() for make in module.TABLES.values()} == {"Not measured yet."}
    for draw in module.CHARTS.values():
        title, *rest = texts(draw(module.latest))
        assert title and rest == ["Not measured yet."]


def test_every_table_is_on_a_page():
    module = tables(BENCH / "results")
    pages = "".join(page.read_text(encoding="utf-8") for page in module.PAGES)
    assert [n for n in module.TABLES if f"<!-- results:{n} -->" not in pages] == []
    assert [n for n in module.CHARTS if f"](charts/{n}.svg)" not in pages] == []
    assert {p.stem for p in module.CHART_FILES.iterdir()} == module.CHARTS.keys()


# ----------------------------------------------------------------------------- charts
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [e.text for e in ET.fromstring(svg).iter(f"{SVG}text")]


def titles(svg):
    """What the pointer shows over the dots."""
    return [e.text for e in ET.fromstring(svg).iter(f"{SVG}title")]


def write(folder, bench, *records):
    known = {"shape": "B=1 T=8", "dtype": "bf16", "peer": None, "gpu": "NVIDIA H200", "unit": ""}
    lines = [json.dumps(known | record) + "\n" for record in records]
    (folder / f"{bench}.jsonl").write_text("".join(lines))


def test_charts_show_what_the_records_say(tmp_path):
    write(
        tmp_path, "bench_train",
        dict(name="a", peer="torch", ratio=9.0, value=1.0), dict(name="a", peer="torch compiled", ratio=1.5, value=1.0),
        dict(name="b", peer="torch", ratio=0.75, value=1.0), dict(name="alone", value=1.0),
    )  # fmt: skip
    write(
        tmp_path, "bench_decode",
        dict(name="m", peer="transformers plain", ratio=8.0), dict(name="m", dtype="int8", peer="bf16 weights", ratio=1.2),
    )  # fmt: skip
    sweep = "B=2 H=4 G=2 T={} D=64"
    write(
        tmp_path, "bench_attention",
        *(dict(name="sweep fwd", shape=sweep.format(T), value=v, peer_value=100.0, cudnn_value=0.0) for T, v in ((64, 150.0), (128, 200.0))),
        dict(name="named fwd", shape=sweep.format(256), value=900.0, peer_value=100.0),
    )  # fmt: skip
    add = dict(name="add", value=3000.0, nbytes=4_000_000_000, copy_ms=1.0, ms=1.25, share=0.8)
    write(tmp_path, "bench_kernels", add, add | dict(dtype="fp32", share=0.9))
    module = tables(tmp_path)
    drawn = {name: draw(module.latest) for name, draw in module.CHARTS.items()}
    bars = [t for t in texts(drawn["training"]) if t.endswith(" x")]
    assert bars == ["1.50 x", "0.75 x"]  # the newest comparison of each step
    assert [t for t in texts(drawn["decoding"]) if t.endswith(" x")] == ["8.00 x"]
    (line,) = [
        e.get("d")
        for e in ET.fromstring(drawn["attention-64"]).iter(f"{SVG}path")
        if e.get("class") == "s1"
    ]
    (x0, y0), (x1, y1) = (map(float, point.split()) for point in line[1:].split("L"))
    assert x0 < x1 and y0 > y1  # 1.5 at T = 64, 2 at T = 128
    assert "Not measured yet." in drawn["attention-128"]
    # 1 operation for 6 bytes at 3 TB/s, and 3 of 4 TB/s
    assert titles(drawn["roofline"]) == [
        "add: 0.167 operations per byte, 0.5 TFLOP/s, 75% of the limit there"
    ]
    shares = {t.partition(":")[0]: t.partition(": ")[2] for t in titles(drawn["copy-share"])}
    assert shares["add, bf16, B=1 T=8"] == "80% of a copy, 1.2500 ms"
    assert shares["add, fp32, B=1 T=8"].startswith("90%")


def test_charts_are_readable_on_a_phone():
    """No text ends outside, and letters are at least 10 of the 358 pixels high."""
    module = tables(BENCH / "results")
    width = 0.5 * 12  # of a letter, at least
    for name, draw in module.CHARTS.items():
        root = ET.fromstring(draw(module.latest))
        full = float(root.get("viewBox").split()[2])
        assert 358 / full * 12 >= 10
        for e in root.iter(f"{SVG}text"):
            x, long = float(e.get("x")), width * len(e.text)
            x -= {"start": 0, "middle": long / 2, "end": long}[e.get("text-anchor")]
            assert x >= 0 and x + long <= full, (name, e.text)


def test_a_chart_that_differs_is_found(tmp_path, capsys):
    module = tables(BENCH / "results")
    module.PAGES, module.CHART_FILES = [], tmp_path / "charts"
    assert module.main(check=True) == 1 and module.main(check=False) == 0
    assert module.main(check=True) == 0
    file = module.CHART_FILES / "training.svg"
    file.write_text(file.read_text().replace(" x<", " y<", 1))
    capsys.readouterr()
    assert module.main(check=True) == 1
    assert capsys.readouterr().out.startswith("training.svg differs")


# ----------------------------------------------------------------------------- tables


def test_decode(written):
    text = written.decode()
    first, large, long, few = rows(text)
    assert first == [
        "llama 1.1B, B=1 context=128, Test GPU", "500", "52%", "50 (10.00 x)", "250 (2.00 x)", "25 / 100 / 50", "3.2",
    ]  # fmt: skip
    assert large[1] == "16,000" and large[3:6] == ["1,600 (10.00 x)", "-", "25 / 100 / -"]
    assert long[3:6] == ["-", "-", "25 / - / -"]
    assert few[0] == "llama 1.1B, 2 of 22 layers, B=1 context=128, Test GPU"
    (int8,) = rows(written.quantized())
    assert int8 == ["llama 1.1B, B=1 context=128, int8", "500 (400)", "1.25", "52%", "3.2"]
    assert "One Test GPU, 20" in text
    (codes,) = rows(written.kv_codes())
    assert codes == [
        "llama 1.1B, B=1 context=128, bf16, cache fp8",
        "500 (400)",
        "1.25",
        "52%",
        "3.2",
    ]


def test_a_newer_run_counts(written, tmp_path):
    lines = (written.RESULTS / "bench_decode.jsonl").read_text().splitlines()
    newer = {**json.loads(lines[0]), "value": 600.0, "ratio": 12.0}  # of the first peer
    (tmp_path / "bench_decode.jsonl").write_text("\n".join([*lines, json.dumps(newer), ""]))
    first = rows(tables(tmp_path).decode())[0]
    assert first[1] == "600" and first[3] == "50 (12.00 x)" and first[4] == "250 (2.00 x)"


def test_engine(written):
    kernels = {row[0]: row[1:] for row in rows(written.engine_kernels())}
    assert kernels["`gemv_qkv`"] == [
        "N=1 6x5", "500.0", "8 GB/s", "80%", "1.00 x cuBLAS, product alone",
    ]  # fmt: skip
    assert kernels["`decode_attention`"][1:] == ["500.0", "4 GB/s", "80%", "-"]
    # 4 H D = 8192 operations for each of 2 x 1000 queries and their 3000 + 500.5 visible keys on average
    assert kernels["`context_attention`"][1:] == ["500.0", "115 TFLOP/s", "-", "-"]
    assert kernels["`sample_greedy`"] == ["B=1 V=151936", "500.0", "-", "-", "-"]
    assert "`sample_greedy` | B=1 V=32000 | 500.0" in written.engine_kernels()
    assert rows(written.engine_step()) == [["B=1 context=128", "1,000", "50%", "800", "40%"]]


def test_head(written):
    assert [row[0] for row in rows(written.head())] == ["dim384 rows=1", "dim384 rows=4"]
    assert rows(written.head())[0][1:3] == ["N=4 C=2 V=5", "bf16"]


def test_fp8(written):
    first, second = rows(written.fp8_products())
    # 12 layers at 0.25 ms; 6 N operations per number of the matrices of a layer
    assert first[:3] == ["gpt124m, B=16 T=1024 V=50304, blocks", "6.00", "3.00"]
    flops = 6 * 16384 * 12 * 768 * (3 * 768 + 768 + 3 * 2048)
    assert first[3:] == [f"{flops / 3.0 / 1e9:.0f}", "2.00"]
    assert second[:3] == ["gpt124m, B=16 T=1024 V=50304, head", "4.00", "2.00"]  # 8 chunks
    assert rows(written.fp8_losses()) == [
        ["300m, 120 steps, fp8", "2.5000", "2.5100", "+0.40 %", "240", "0"],
        ["300m, 120 steps, fp8-head", "2.5000", "2.4900", "-0.40 %", "240", "0"],
    ]
    (r,) = [r for r in written.latest("bench_fp8") if r["name"].endswith("losses/fp8")]
    assert r["counts"] == {"fp8_clamped": 240, "fp8_nonfinite": 0, "fp8_clamped_qkv_x": 240}
    assert r["curve"] == [[120, 2.51]] and r["train_curve"] == [[50, 2.9755], [100, 2.9255]]


def test_steps_in_fp8(tmp_path):
    base = {
        "shape": "B=1",
        "peer": None,
        "peer_value": None,
        "peak_gb": 2.0,
        "gpu": "Test GPU",
        "date": "2026-01-01",
    }
    records = [
        base | {"name": "a", "dtype": "bf16", "value": 100.0},
        base | {"name": "a", "dtype": "fp8", "value": 120.0, "peak_gb": 3.0},
        base | {"name": "b", "dtype": "fp8", "value": 120.0},
        base | {"name": "a", "dtype": "fp8", "value": 150.0, "peer": "torch", "peer_value": 90.0, "torchao": 80.0},
        base | {"name": "a, head in fp8", "dtype": "fp8", "value": 160.0},
        base | {"name": "a", "dtype": "bf16", "value": 400.0, "gpu": "Another GPU"},  # not compared with the first one's
    ]  # fmt: skip
    text = "".join(json.dumps(r) + "\n" for r in records)
    (tmp_path / "bench_train.jsonl").write_text(text)
    assert rows(tables(tmp_path).fp8()) == [
        ["a, B=1", "100", "150", "1.50", "80", "90", "2.0 / 2.0"],
        ["a, head in fp8, B=1", "100", "160", "1.60", "-", "-", "2.0 / 2.0"],
    ]


def attention_record(direction, **more):
    return {
        "name": f"named {direction}", "shape": "B=1", "dtype": "bf16", "value": 100.0, "peer": "torch SDPA flash",
        "peer_value": 50.0, "cudnn_value": 120.0, "gpu": "Test GPU", "date": "2026-01-01", **more,
    }  # fmt: skip


def test_attention_with_two_kernels(tmp_path):
    """One column for each kernel, with the one in use in bold; older records have only the first."""
    new = dict(kernels="wgmma", mma_sync_value=80.0, wgmma_value=100.0)
    lines = [attention_record("fwd", **new), attention_record("fwd+bwd", shape="B=2")]
    lines.append(attention_record("fwd", name="random fwd", peer_value=None, cudnn_value=None))
    module = tables(tmp_path)
    write = lambda some: (tmp_path / "bench_attention.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in some)
    )
    write(lines)
    one, two, random = rows(module.attention("named", "random"))
    assert one == ["B=1", "80", "**100**", "50", "120", "-", "-", "-", "-"]
    assert two == ["B=2", "-", "-", "-", "-", "**100**", "-", "50", "120"]
    assert random == ["B=1", "**100**", "-", "-", "-", "-", "-", "-", "-"]
    write(lines[1:])
    assert rows(module.attention("named"))[0] == ["B=2", "-", "-", "-", "100", "50", "120"]


def test_ddp(tmp_path):
    """Each variant shows its newest record on each card, with PyTorch's result if it ran in the same run."""
    line = lambda name, **more: {
        "name": name, "shape": "s", "dtype": "bf16", "ms": 2.0, "value": 1000.0, "of_linear": 0.9, "peer": None,
        "peer_value": None, "gpu": "Test GPU", "date": "2026-01-01", **more,
    }  # fmt: skip
    older = line("m, 4 GPU, flat", exposed_ms=0.7, peer="torch", peer_value=800.0)
    own = line("m, 4 GPU, flat", exposed_ms=0.5, state_bytes=18.0)
    same_run = line("m, 2 GPU, flat", peer="torch", peer_value=700.0, peer_of_linear=0.7)
    theirs = line("m, 4 GPU, torch DDP + compile", value=500.0, of_linear=0.8)
    lines = [
        older,
        own,
        line("m, 4 GPU, none"),
        theirs,
        same_run,
        line("m, 2 GPU, flat", gpu="NVIDIA B"),
    ]
    (tmp_path / "bench_ddp.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    module = tables(tmp_path)
    assert rows(module.ddp()) == [
        ["m, 2 GPU, flat, B", "2.00", "1,000", "90.0%", "", "-", ""],
        ["m, 2 GPU, flat, Test GPU", "2.00", "1,000", "90.0%", "", "-", "700 (70%)"],
        ["m, 4 GPU, flat, Test GPU", "2.00", "1,000", "90.0%", "0.50", "18.0", ""],
        ["m, 4 GPU, none, Test GPU", "2.00", "1,000", "90.0%", "", "-", ""],
    ]
    flat = [row[0].split(", ")[1:] for row in rows(module.ddp(("flat",)))]
    assert [(gpus, name) for gpus, name, _ in flat] == [("2 GPU", "flat")] * 2 + [("4 GPU", "flat")]


@pytest.mark.parametrize("words, code", [("--help", 0), ("--chek", 2)])
def test_only_a_plain_call_writes(tmp_path, words, code):
    """The copy has no pages to read, so that writing tables would fail."""
    copy = tmp_path / "bench" / "tables.py"
    copy.parent.mkdir()
    for name in ("tables.py", "_charts.py", "_markdown.py"):
        (copy.parent / name).write_text((BENCH / name).read_text())
    done = subprocess.run([sys.executable, copy, words], capture_output=True, text=True)
    assert done.returncode == code and "usage:" in done.stdout + done.stderr


def test_markers(written):
    page = "a\n<!-- results:head -->\nold\n<!-- results:end -->\nb <!-- results:ddp --><!-- results:end -->"
    new = written.filled(page)
    assert "old" not in new and "dim384 rows=4" in new and written.filled(new) == new
    for wrong in (
        "<!-- results:nothing --><!-- results:end -->",
        "<!-- results:end -->",
        "<!-- results:ddp -->",
    ):
        with pytest.raises(ValueError, match="results:"):
            written.filled(wrong)
