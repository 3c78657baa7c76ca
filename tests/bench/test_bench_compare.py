"""bench/compare.py: what belongs together, what is marked, the exit code."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

path = Path(__file__).resolve().parents[2] / "bench" / "compare.py"
spec = importlib.util.spec_from_file_location("bench_compare", path)
bench_compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_compare)


def line(ms, name="rmsnorm", **more):
    record = {"bench": "bench_kernels", "name": name, "shape": "N=8", "dtype": "fp32", "gpu": "H200", "ms": ms}  # fmt: skip
    return json.dumps(record | {"value": 1.0, "unit": "GB/s"} | more) + "\n"


def run(tmp_path, old, new, **options):
    """-> exit code, what was printed"""
    files = []
    for name, text in (("old.jsonl", old), ("new.jsonl", new)):
        files.append(tmp_path / name)
        files[-1].write_text(text)
    console = Console(file=io.StringIO(), width=160)
    code = bench_compare.main(bench_compare.Options(*files, **options), console)
    return code, console.file.getvalue()


@pytest.mark.parametrize(
    "ms, code, word",
    [(1.04, 1, "slower"), (1.029, 0, None), (0.971, 0, None), (0.95, 0, "faster")],
)
def test_changes_beyond_three_percent_are_marked(tmp_path, ms, code, word):
    got, text = run(tmp_path, line(1.0), line(ms))
    assert got == code
    assert ("rmsnorm" in text) == (word is not None)
    assert word is None or (word in text and f"{100 * (ms - 1):+.1f} %" in text)
    assert "1 compared" in text


def test_the_limit_can_be_chosen_and_all_can_be_listed(tmp_path):
    assert run(tmp_path, line(1.0), line(1.08), percent=10)[0] == 0
    assert "rmsnorm" in run(tmp_path, line(1.0), line(1.0), all=True)[1]


def test_the_worst_comes_first(tmp_path):
    old = line(1.0, "a") + line(1.0, "b") + line(1.0, "c")
    new = line(1.1, "a") + line(1.5, "b") + line(0.5, "c")
    code, text = run(tmp_path, old, new)
    assert code == 1 and text.index(" b ") < text.index(" a ") < text.index(" c ")
    assert "2 slower and 1 faster" in text


@pytest.mark.parametrize("key", ["bench", "name", "shape", "dtype", "gpu"])
def test_other_measurements_are_not_compared(tmp_path, key):
    other = {"bench": "x", "name": "x", "shape": "x", "dtype": "x", "gpu": "x"}[key]
    code, text = run(tmp_path, line(1.0) + line(1.0, "same"), line(9.0, **{key: other}) + line(1.0, "same"))  # fmt: skip
    assert code == 0 and "1 compared" in text
    assert "only in old 1, only in new 1" in text


def test_of_several_lines_the_last_counts(tmp_path):
    assert run(tmp_path, line(5.0) + line(1.0), line(9.0) + line(1.0))[0] == 0


def test_folders(tmp_path):
    for folder, ms in (("old", 1.0), ("new", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "bench_a.jsonl").write_text(line(ms, "a"))
        (tmp_path / folder / "bench_b.jsonl").write_text(line(1.0, "b") + "\n")
    options = bench_compare.Options(tmp_path / "old", tmp_path / "new")
    assert bench_compare.main(options, Console(file=io.StringIO())) == 1


def test_the_records_of_this_repository():
    """Beside the benches' lines there are those of the fuzzer, which are no times."""
    results = path.parent / "results"
    console = Console(file=io.StringIO(), width=160)
    assert bench_compare.main(bench_compare.Options(results, results), console) == 0
    assert "0 slower and 0 faster" in console.file.getvalue()


def test_what_cannot_be_compared(tmp_path):
    code, text = run(tmp_path, line(1.0, "a"), line(1.0, "b"))
    assert code == 2 and "no measurement with the same" in text
    code, text = run(tmp_path, "{}\n", line(1.0))
    assert code == 2 and "old.jsonl:1" in text
    missing = bench_compare.Options(tmp_path / "none.jsonl", tmp_path / "new.jsonl")
    assert bench_compare.main(missing, Console(file=io.StringIO())) == 2
