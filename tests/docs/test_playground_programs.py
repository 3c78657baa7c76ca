"""The programs of the playground: what is right runs to its end, what is planted is found, and the fix is right."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from small_site import ROOT, hook

FOLDER = ROOT / "lessons" / "playground"
NAMES = sorted(path.name for path in FOLDER.glob("*.py"))
BARRIER = "cuda.syncthreads()"
PLANTED = {  # program: (class of the error, lines that it names, the line that is wrong, what it should be)
    "rotate.py": (
        "RaceError: data race in rotate",
        ["right = x[(i + 1) % 64]", "x[i] = right"],
        "\n\n        x[i]",
        f"\n        {BARRIER}\n        x[i]",
    ),
    "reduction.py": (
        "RaceError: data race in block_sum",
        ["other = partial[i + half]", "partial[i] += other"],
        "        half //= 2",
        f"        {BARRIER}\n        half //= 2",
    ),
    "lock.py": (
        "RaceError: data race between blocks in locked_sum",
        ["before = total[0]", "total[0] = before + x[cuda.blockIdx.x]"],
        "\n\n    cuda.atomic.exch",
        "\n    cuda.threadfence()\n    cuda.atomic.exch",
    ),
    "transpose.py": (
        "KernelError: transpose, at transpose.py:18: bank conflicts in tile",
        ["y[row, column] = tile[column, row]"],
        "ROW = 32",
        "ROW = 33",
    ),
}
WRONG = {  # program: a line, and a mistake that its own comparison with NumPy must find
    "saxpy.py": ("a * x[i] + y[i]", "a * x[i]"),
    "histogram.py": ("cuda.atomic.add(counts, t, mine[t])", "cuda.atomic.add(counts, t, 1)"),
    "scan.py": ("distance *= 2", "distance *= 4"),
    "tiled_product.py": ("for k in range(TILE)", "for k in range(TILE - 1)"),
    "softmax.py": ("/ total", "/ (total + 1)"),
    "warp_shuffle.py": ("distance = 16", "distance = 8"),
    "flash_attention.py": ("total = total * old + new", "total = total + new"),
}
traced = hook("traced")


def source(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def test_every_program_is_in_the_menu():
    assert sorted(hook("pages").EXAMPLES) == NAMES
    assert len(NAMES) == 12


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_short_and_needs_the_simulator_and_numpy_alone(name):
    assert len(source(name).splitlines()) <= 40
    modules = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert modules <= {"math", "numpy", "xtrain.simulator"}


@pytest.mark.parametrize("name", sorted({*NAMES} - {*PLANTED}))
def test_a_right_program_runs_to_its_end(name):
    found = traced.run(source(name), name)
    assert found["error"] == ""
    assert found["printed"].strip()
    assert 'id="data">{"kernel":"' in found["page"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_noticed(name):
    right, wrong = WRONG[name]
    assert source(name).count(right) == 1
    assert traced.run(source(name).replace(right, wrong), name)["error"].startswith(
        "AssertionError"
    )


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_with_its_lines_and_the_fix_is_right(name):
    begins, lines, wrong, right = PLANTED[name]
    found = traced.run(source(name), name)
    assert found["error"].startswith(begins)
    numbers = {line.strip(): n for n, line in enumerate(source(name).splitlines(), 1)}
    for line in lines:
        assert f"{name}:{numbers[line]}    {line}" in found["error"]
    assert source(name).count(wrong) == 1
    fixed = traced.run(source(name).replace(wrong, right), name)
    assert fixed["error"] == ""


def test_the_programs_run_as_files_without_numba():
    """As a reader runs them: `python FILE`. Numba cannot be imported here."""
    script = """
import runpy, sys
sys.modules["numba"] = None
for name in sys.argv[1:]:
    runpy.run_path(name, run_name="__main__")
"""
    right = [str(FOLDER / name) for name in NAMES if name not in PLANTED]
    done = subprocess.run(
        [sys.executable, "-c", script, *right], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    wrong = subprocess.run(
        [sys.executable, FOLDER / "rotate.py"], capture_output=True, text=True, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "rotate.py:12" in wrong.stderr and "rotate.py:14" in wrong.stderr


def test_the_last_of_several_launches_is_shown():
    text = source("empty.py") + "\n\n@cuda.jit\ndef second(y):\n    y[0] = 1\n\n\nsecond[1, 1](y)\n"
    assert '"kernel":"second"' in traced.run(text, "two.py")["page"]
    assert traced.run("print(1)", "none.py") == {"printed": "1\n", "error": "", "page": ""}


def test_a_mistake_of_the_build_is_not_hidden():
    with pytest.raises(NameError):
        traced.run("nothing_of_this_name", "wrong.py")


def test_the_command_writes_the_page(tmp_path):
    page = tmp_path / "page.html"
    command = [sys.executable, ROOT / "lessons/tools/traced.py", FOLDER / "rotate.py", page]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1 and "RaceError" in done.stdout
    assert Path(page).read_text(encoding="utf-8").startswith("<!doctype html>")
