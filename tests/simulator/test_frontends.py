"""The simulator runs kernels of numba, of numba-cuda-mlir and, without either, its own; one file alone imports them.

test_distribution.py runs kernels of numba-cuda-mlir itself.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, types

from xtrain.simulator import dispatch, frontends

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLUGIN = ["-p", "xtrain.simulator.pytest_plugin", "-p", "no:cacheprovider", "-q"]
# None in sys.modules: Python does not find the package
WITHOUT = "import sys; sys.modules.update(numba=None, numba_cuda_mlir=None, llvmlite=None); "


@pytest.fixture
def python(tmp_path):
    """Run Python in a folder with the cases."""
    shutil.copy(HERE / "frontend_cases.py", tmp_path)

    def run(*arguments, **environment):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        call = [sys.executable, *arguments]
        return subprocess.run(
            call, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    return run


def test_one_file_alone_imports_numba():
    found = set()
    for path in (ROOT / "xtrain/simulator").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {path.name for name in names if name.partition(".")[0].startswith("numba")}
    assert found == set()  # frontends.py imports by name, with importlib


def test_the_cases_pass_with_numpy_alone(python):
    """No numba, no llvmlite, no thread, no subprocess."""
    alone = "import threading, subprocess; threading.Thread.start = subprocess.Popen = None; "
    tests = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = [*PLUGIN, "--simulate-cuda", "frontend_cases.py"]
    run = python("-c", WITHOUT + alone + tests, *options, FRONTEND="numba")
    assert "6 passed" in run.stdout, run.stdout + run.stderr


def test_the_cases_pass_with_numba(python):
    run = python("-m", "pytest", *PLUGIN, "--simulate-cuda", "frontend_cases.py", FRONTEND="numba")
    assert "6 passed" in run.stdout, run.stdout + run.stderr


def test_types_and_modules_are_recognized_by_identity():
    assert frontends.is_cuda(cuda) and not frontends.is_cuda(np)
    assert frontends.has("syncthreads", cuda.syncthreads) and not frontends.has("syncthreads", len)
    assert frontends.is_number(types.float32) and frontends.is_number(types.boolean)
    assert not frontends.is_number(types.float32[:]) and not frontends.is_number(3)
    assert frontends.is_integer(types.uint8) and not frontends.is_integer(types.float32)
    assert frontends.of(types.int8).package == "numba" == frontends.first().package


def test_the_launch_of_numba_cuda_mlir_takes_a_cluster():
    """kernel[grid, block, stream, shared, cluster]: numba-cuda-mlir's configure."""
    kernel = SimpleNamespace()
    launch = dispatch.configure(kernel, 2, (8, 4), None, 16, (1, 1, 1))
    assert launch == dispatch.Configured(kernel, (2, 1, 1), (8, 4, 1), 0, 16)
    with pytest.raises(NotImplementedError, match="in clusters of 2 blocks is not simulated"):
        dispatch.configure(kernel, 2, 32, cluster=2)
