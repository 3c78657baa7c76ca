"""packages/simulate-cuda in environments of its own: with NumPy alone, with Numba, and with numba-cuda-mlir for Numba.

A minute, and the network: XTRAIN_SLOW=all.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks import only_all

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


pytestmark = [only_all, pytest.mark.slow]


PIP = (sys.executable, "-m", "pip")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    call = [*PIP, "wheel", "-q", "--no-deps", "-w", folder, ROOT / "packages/simulate-cuda"]
    subprocess.run(call, check=True, cwd=folder)
    (file,) = folder.glob("simulate_cuda-*.whl")
    return file


@pytest.fixture
def environment(tmp_path, wheel):
    """A function that makes an environment with simulate-cuda[extra], pytest and more. It returns its packages and how to run its
    Python in tmp_path.
    """

    def run(*call, **variables):
        env = {**os.environ, "PIP_COMPILE": "0", **variables}
        return subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True)

    def make(extra, *more):
        done = run(sys.executable, "-m", "venv", "--without-pip", "clean")
        assert done.returncode == 0, done.stderr
        python = str(next((tmp_path / "clean").glob("bin/python")))
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        done = run(*PIP, "--python", python, "install", "-q", wanted, "pytest", *more)
        if extra == "numba-cuda-mlir" and "No matching distribution found" in done.stderr:
            # it has wheels for Linux and for some releases of Python only
            pytest.skip("there is no wheel of numba-cuda-mlir for this machine or in this index")
        assert done.returncode == 0, done.stderr
        listed = json.loads(run(*PIP, "--python", python, "list", "--format", "json").stdout)
        names = {package["name"].lower().replace("_", "-") for package in listed}
        assert names >= {"simulate-cuda", extra or "numpy", "numpy"}
        assert not names & {"xtrain", "ml-dtypes", "scipy"}
        return names, lambda *arguments, **variables: run(python, *arguments, **variables)

    return make


def test_the_wheel_with_numpy_alone(environment, wheel, tmp_path):
    names, python = environment(None, "twine")
    assert not names & {"numba", "llvmlite", "numba-cuda-mlir"}
    done = python("-m", "twine", "check", "--strict", str(wheel))
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(ROOT / "tests/simulator/frontend_cases.py", tmp_path)
    done = python("-m", "pytest", "-q", "--simulate-cuda", "frontend_cases.py", FRONTEND="numba")
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    _runs_with_numbas_variable(python, tmp_path)
    done = python("script.py")
    assert "No module named 'numba'" in done.stderr


def _runs_with_numbas_variable(python, folder):
    (folder / "test_it.py").write_text(TEST, encoding="utf-8")
    (folder / "script.py").write_text(f"{TEST}\ntest_right()\ntest_wrong()", encoding="utf-8")
    done = python("script.py", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 1 and "RaceError: data race in put" in done.stderr, done.stderr
    done = python("-W", "error", "-m", "pytest", "-q", "test_it.py", NUMBA_ENABLE_CUDASIM="1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr


def test_the_wheel_with_numba(environment, tmp_path):
    _, python = environment("numba", "numpy<2.5")
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")
    done = python("-m", "pytest", "-q", "--simulate-cuda", "test_it.py")  # by its entry point
    assert "1 failed, 1 passed" in done.stdout and "RaceError: data race in put" in done.stdout
    done = python(
        "-m", "simulate_cuda", "-m", "pytest", "-q", "-p", "no:simulate_cuda", "-k", "right"
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    _runs_with_numbas_variable(python, tmp_path)


PROGRAM = """
import numpy as np
import simulate_cuda
from numba_cuda_mlir import cuda

@cuda.jit
def put(x, step):
    x[cuda.threadIdx.x // step] = cuda.threadIdx.x

x = np.zeros(8)
simulate_cuda.run(put, 1, 8, x, 1)
print(x.tolist() == list(range(8)))
(race,) = simulate_cuda.check(put, 1, 2, x, 2)
print(race.kind, type(simulate_cuda.record(put, 1, 2, x, 2).error).__name__)
before = vars(type(put))["configure"], cuda.to_device
with simulate_cuda.simulate():
    put[1, 8](cuda.to_device(x), 1)
print(before == (vars(type(put))["configure"], cuda.to_device))
"""


def test_numba_cuda_mlir_without_numba(environment, tmp_path):
    names, python = environment("numba-cuda-mlir")
    assert not names & {"numba", "llvmlite", "numba-cuda"}
    shutil.copy(ROOT / "tests/simulator/frontend_cases.py", tmp_path)
    variables = {"FRONTEND": "numba_cuda_mlir"}
    done = python("-m", "pytest", "-q", "--simulate-cuda", "frontend_cases.py", **variables)
    assert "6 passed" in done.stdout, done.stdout + done.stderr

    test = TEST.replace("from numba import cuda", "from numba_cuda_mlir import cuda")
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    report = ["--simulate-cuda", "--cuda-report", "report.html"]
    done = python("-m", "pytest", "-q", *report, "test_it.py")
    assert "1 failed, 1 passed" in done.stdout and "RaceError: data race in put" in done.stdout
    assert "put" in (tmp_path / "report.html").read_text(encoding="utf-8")

    (tmp_path / "script.py").write_text(f"{test}\ntest_right()\ntest_wrong()", encoding="utf-8")
    done = python("-m", "simulate_cuda", "script.py")
    assert done.returncode == 1 and "RaceError: data race in put" in done.stderr, done.stderr
    done = python("script.py", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 1 and "RaceError: data race in put" in done.stderr, done.stderr

    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = python("program.py")
    assert done.stdout.split() == ["True", "race", "RaceError", "True"], done.stderr
