"""A device function takes few arguments: arrays and numbers that belong together come in a named tuple.

A kernel's own arguments are flat, as the launcher passes them; its first lines make the tuples.
"""

import ast
from pathlib import Path

from xtrain import kernels

MOST = 11
FOLDER = Path(kernels.__file__).parent


def with_many_arguments(source: str) -> list[str]:
    """Return the names of the device functions that take more than MOST arguments."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    on_device = lambda f: any("device" in ast.unparse(d) for d in f.decorator_list)
    return [f.name for f in functions if on_device(f) and len(f.args.args) > MOST]


def test_device_functions_take_few_arguments():
    found = {str(p): with_many_arguments(p.read_text()) for p in FOLDER.rglob("*.py")}
    assert len(found) > 50
    wrong = {k: v for k, v in found.items() if v}
    assert not wrong, (
        f"{wrong}: more than {MOST} arguments; put those that belong together into a named tuple"
    )


def test_many_arguments_are_noticed():
    arguments = ", ".join(f"x{i}" for i in range(30))
    for decorator in ("device", "cuda.jit(device=True)"):
        source = f"@{decorator}\ndef f({arguments}):\n    pass\n"
        assert with_many_arguments(source) == ["f"]
    assert with_many_arguments(f"@kernel(32)\ndef f({arguments}):\n    pass\n") == []
