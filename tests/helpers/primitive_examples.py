"""The programs in examples/primitives: run them, and list the kernels that they launch."""

import types
from pathlib import Path
from unittest import mock

from xtrain.kernels.runtime.launch import numba_type
from xtrain.simulator import dispatch, simulate

FILES = sorted((Path(__file__).parents[2] / "examples/primitives").glob("*.py"))


def loaded(path, old="", new=""):
    """-> the module of a program, for the compiler in use, with a part of its source replaced

    Call it inside simulate(), which keeps the source of generated code.
    """
    source = path.read_text(encoding="utf-8")
    assert old in source, f"{path.name} has no {old}"
    source = source.replace("from numba import", "from xtrain.kernels.runtime.compiler import")
    module = types.ModuleType(path.stem)
    exec(source.replace(old, new), vars(module))
    return module


def launched():
    """-> {name of the program: (kernel, argument types)} of the kernel that each launches"""
    found = {}
    run = dispatch.launched

    def note(kernel, grid, block, *args, **options):
        found[path.stem] = kernel, tuple(map(numba_type, args))
        return run(kernel, grid, block, *args, **options)

    with mock.patch.object(dispatch, "launched", note), simulate():
        for path in FILES:
            loaded(path).main()
    return found
