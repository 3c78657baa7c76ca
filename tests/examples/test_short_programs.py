"""The short programs in examples/ run unchanged and do what their docstrings say."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import DATA

ROOT = Path(__file__).resolve().parents[2]


def program(name, folder, *arguments, launcher=()):
    """Run examples/NAME in a folder. -> its output"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # for Open MPI
    env = {**os.environ, **root, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher, sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> a folder in which own_loop.py has run, and its output"""
    folder = tmp_path_factory.mktemp("programs")
    return folder, program("own_loop.py", folder, DATA / "grammar.txt", 21)


def test_own_loop(trained):
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", trained[1])]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    bpb = re.search(r"^([\d.]+) bits per byte: ['\"]the", trained[1], re.M)
    assert bpb and 0.5 < float(bpb[1]) < 6  # grammar.txt; 8 would be no model at all


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda x: x.stem)
def test_a_program_without_its_arguments_says_how_to_call_it(path, monkeypatch):
    """Run in this process: without arguments, nothing is computed."""
    (said,) = re.findall(r"^python examples/.*$", path.read_text(), re.M) or [""]
    if not re.search(r"\.py +[A-Z\"]", said):
        return  # it needs none
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert said in str(stop.value)


def test_serve(trained):
    said = program("serve.py", trained[0], "my-model", "the dog", "a cat").splitlines()
    assert any(line.startswith("the dog") for line in said)
    assert any(line.startswith("a cat") for line in said)


def test_schedule(tmp_path):
    program("schedule.py", tmp_path, DATA / "grammar.txt", 10)
    lines = (tmp_path / "runs" / "schedule" / "metrics.jsonl").read_text().splitlines()
    rates = [float(re.search(r'"lr": ([\d.e-]+)', line)[1]) for line in lines if '"lr"' in line]
    assert len(rates) == 10 and rates[0] == rates[7] and rates[9] < rates[8] <= rates[7]


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_several_ranks(tmp_path):
    ours = Path(sys.executable).with_name("mpirun")
    launcher = [str(ours if ours.exists() else "mpirun"), "-n", "2"]
    two = program("several_ranks.py", tmp_path, launcher=launcher)
    one = program("several_ranks.py", tmp_path)
    losses = [float(re.search(r"loss ([\d.]+)", text)[1]) for text in (one, two)]
    assert abs(losses[0] - losses[1]) < 1e-3 and losses[0] < 3.5
    assert "2 ranks" in two and "identical weights: True" in two


def test_lora(trained):
    said = program("lora.py", trained[0], "my-model", DATA / "grammar.txt", 12)
    first, last, merged = (float(x) for x in re.findall(r"\d+\.\d+", said.splitlines()[-1]))
    assert last < first and abs(merged - last) < 0.2  # the merged weights are one step newer
    assert "the dog" in program("serve.py", trained[0], "my-lora", "the dog")
