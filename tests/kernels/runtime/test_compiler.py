"""XTRAIN_COMPILER chooses the compiler of the kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.errors import UserError
from xtrain.kernels.runtime import compiler
from xtrain.simulator import frontends


@pytest.mark.parametrize(
    "wanted, installed, expected",
    [
        ("auto", ["numba", "numba_cuda"], "numba"),
        ("auto", ["numba", "numba_cuda", "numba_cuda_mlir"], "numba"),
        ("auto", ["numba", "numba_cuda_mlir"], "mlir"),
        ("auto", ["numba"], "numba"),  # the simulator needs no more
        ("auto", [], "none"),  # a browser
        ("numba", ["numba", "numba_cuda_mlir"], "numba"),
        ("mlir", ["numba", "numba_cuda", "numba_cuda_mlir"], "mlir"),
    ],
)
def test_choice(monkeypatch, wanted, installed, expected):
    monkeypatch.setattr(frontends, "installed", lambda name: name in installed)
    assert compiler.choose(wanted) == expected


def test_bad_choices_are_one_sentence(monkeypatch):
    with pytest.raises(UserError, match="XTRAIN_COMPILER is 'llvm': set it to numba, mlir or auto"):
        compiler.choose("llvm")
    monkeypatch.setattr(frontends, "installed", lambda name: False)
    with pytest.raises(UserError, match="pip install numba-cuda-mlir"):
        compiler.choose("mlir")


def test_kernels_import_no_compiler_themselves():
    """Otherwise only one of the two could compile them."""
    folder = Path(compiler.__file__).parents[1]
    may = {"compiler.py", "compile.py", "llvm_code.py", "mlir_code.py", "mlir_changes.py"}
    compilers = {"numba", "numba_cuda_mlir", "llvmlite"}
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            found += [path.name for name in names if name.split(".")[0] in compilers]
    assert found and set(found) <= may, sorted(set(found) - may)


WITHOUT = """
import sys

for name in ("numba", "numba_cuda_mlir", "llvmlite"):
    sys.modules[name] = None  # as if it were not installed

import numpy as np

from xtrain.kernels import rmsnorm
from xtrain.kernels.primitives import ptx
from xtrain.kernels.runtime import compiler
from xtrain.simulator import sim

assert compiler.COMPILER == "none"
x = np.random.default_rng(0).normal(size=(3, 37)).astype(np.float32) + 1
w = x[0] * 2
y, rstd = rmsnorm.rmsnorm_fwd(sim(x), sim(w), 1e-5)
want = rmsnorm.rmsnorm_ref(x.astype(np.float64), w.astype(np.float64), 1e-5)[0]
assert abs(y - want).max() < 1e-5, abs(y - want).max()
try:
    ptx.load4(x, 0)
except TypeError as error:
    print(error)
"""


def test_without_a_compiler_kernels_run_in_the_simulator():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.stdout == "load4 can be used in a kernel only\n", done.stderr
