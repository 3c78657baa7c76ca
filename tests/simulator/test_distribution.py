"""packages/simulate-cuda in an environment with Numba, NumPy and pytest alone. Half a minute, and the network: XTRAIN_SLOW=1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checks import only_slow

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import numpy as np
from numba import cuda

@cuda.jit("void(int32[:], int32)")
def put(x, step):
    x[cuda.threadIdx.x // step] = cuda.threadIdx.x

def test_right():
    x = cuda.to_device(np.zeros(32, np.int32))
    put[1, 32](x, 1)
    assert x.copy_to_host().tolist() == list(range(32))

def test_wrong():
    put[1, 32](np.zeros(32, np.int32), 2)
"""


@only_slow
@pytest.mark.slow
def test_the_wheel_alone(tmp_path):
    run = lambda *call: subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    pip = (sys.executable, "-m", "pip")
    done = run(
        *pip, "wheel", "-q", "--no-deps", "-w", "wheel", str(ROOT / "packages/simulate-cuda")
    )
    assert done.returncode == 0, done.stderr
    done = run(sys.executable, "-m", "venv", "clean")
    assert done.returncode == 0, done.stderr
    python = str(next((tmp_path / "clean").glob("bin/python")))
    (wheel,) = (tmp_path / "wheel").glob("simulate_cuda-*.whl")
    done = run(python, "-m", "pip", "install", "-q", str(wheel), "pytest", "numpy<2.5")
    assert done.returncode == 0, done.stderr
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json").stdout)
    names = {package["name"].lower() for package in listed}
    assert names >= {"simulate-cuda", "numba", "numpy"} and not names & {
        "xtrain",
        "ml_dtypes",
        "scipy",
    }

    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")
    done = run(python, "-m", "pytest", "-q", "--simulate-cuda", "test_it.py")  # by its entry point
    assert "1 failed, 1 passed" in done.stdout and "RaceError: data race in put" in done.stdout
    done = run(
        python, "-m", "simulate_cuda", "-m", "pytest", "-q", "-p", "no:simulate_cuda", "-k", "right"
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
