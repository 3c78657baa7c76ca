"""XTRAIN_COMPILER chooses the compiler of the kernels."""

import ast
import importlib.util
from pathlib import Path

import pytest

from xtrain.errors import UserError
from xtrain.kernels.runtime import compiler


@pytest.mark.parametrize(
    "wanted, installed, expected",
    [
        ("auto", ["numba", "numba_cuda"], "numba"),
        ("auto", ["numba", "numba_cuda", "numba_cuda_mlir"], "numba"),
        ("auto", ["numba", "numba_cuda_mlir"], "mlir"),
        ("auto", ["numba"], "numba"),  # the simulator needs no more
        ("numba", ["numba", "numba_cuda_mlir"], "numba"),
        ("mlir", ["numba", "numba_cuda", "numba_cuda_mlir"], "mlir"),
    ],
)
def test_choice(monkeypatch, wanted, installed, expected):
    found = lambda name: object() if name in installed else None
    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert compiler.choose(wanted) == expected


def test_bad_choices_are_one_sentence(monkeypatch):
    with pytest.raises(UserError, match="XTRAIN_COMPILER is 'llvm': set it to numba, mlir or auto"):
        compiler.choose("llvm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
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
