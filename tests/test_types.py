"""The Python interface for people and type checkers: signatures, docstrings, a user's program, an editable install.

mypy checks the package and tests/helpers/typed_program.py (mypy.ini); CI runs it after the tests.
"""

import inspect
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typed_program
from public_api import public_ops
from runs import DATA

import xtrain
from xtrain import nn
from xtrain.data import batches, dataset, tokenizer
from xtrain.nn import expert_functions, functions, loss_functions, optim
from xtrain.nn.autograd import Function

ROOT = Path(__file__).parents[1]
NAMES = {  # what a user's own loop calls
    **{name: getattr(xtrain, name) for name in xtrain.__all__ if name != "functional"},
    **{name: getattr(nn, name) for name in nn.__all__},
    **{f.__name__: f for f in (optim.Muon, optim.clip, optim.learning_rate)},
    **{
        f.__name__: f
        for f in (tokenizer.Tokenizer, dataset.Corpus, dataset.prepare, batches.Loader)
    },
}


def functions_of(thing):
    """-> (name, function) of the function itself, or of the class's public methods and properties"""
    if not inspect.isclass(thing):
        yield "", thing
        return
    for name, value in vars(thing).items():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(value) and (
            not name.startswith("_") or name in ("__init__", "__call__")
        ):
            yield name, value


def without_annotation(function, method):
    """The parameters that have none; "->" stands for the result."""
    found = list(inspect.signature(function).parameters.values())[method:]
    missing = [p.name for p in found if p.annotation is inspect.Parameter.empty]
    result = function.__name__ == "__init__" or "return" in function.__annotations__
    return missing if result else [*missing, "->"]


# ----------------------------------------------------------------------------- ops
@pytest.mark.parametrize("name", public_ops())
def test_every_op_is_a_function_with_types_and_a_docstring(name):
    function, applied = public_ops()[name]
    assert without_annotation(function, False) == []
    types = typing.get_type_hints(function)  # all names exist
    assert types["return"] in (
        xtrain.Tensor,
        tuple[(xtrain.Tensor,) * 2],
        tuple[(xtrain.Tensor,) * 3],
    )
    said = inspect.getdoc(function)
    assert said and len(said) > 25
    # a file that it names exists, and Function.forward takes the same arguments
    for file in re.findall(r"[\w/]+\.py", said):
        assert any((folder / file).exists() for folder in (ROOT, ROOT / "xtrain")), file
    given = list(inspect.signature(function).parameters.values())
    taken = list(inspect.signature(applied.forward).parameters.values())[1:]
    assert all(b.default is not b.empty for b in taken[len(given) :])
    for a, b in zip(given, taken):
        assert a.name.split("_")[0] == b.name.split("_")[0]
        assert b.default is b.empty or a.default == b.default


def test_every_function_has_its_op():
    made = {
        x
        for module in (functions, loss_functions, expert_functions)
        for x in vars(module).values()
        if inspect.isclass(x) and issubclass(x, Function) and x.__module__ == module.__name__
    }
    different = made ^ {applied for _, applied in public_ops().values()}
    assert not different, f"{different}: add a function to xtrain/nn/functional.py"


# ----------------------------------------------------------------------------- what one's own loop needs
@pytest.mark.parametrize("name", NAMES)
def test_the_public_interface_has_types_and_docstrings(name):
    thing = NAMES[name]
    assert inspect.getdoc(thing)
    for method, function in functions_of(thing):
        missing = without_annotation(
            function, inspect.isclass(thing) and not is_static(thing, method)
        )
        assert not missing, f"{name}.{method} has no types for {', '.join(missing)}"
        if not method.startswith("__"):
            assert inspect.getdoc(function), f"{name}.{method} has no docstring"


def is_static(thing, method):
    return isinstance(vars(thing).get(method), staticmethod)


def test_the_reference_has_their_modules():
    pages = "".join(page.read_text() for page in (ROOT / "lessons" / "api").glob("*.md"))
    for thing in NAMES.values():
        assert f"::: {thing.__module__}\n" in pages, thing


def test_a_typed_program(tmp_path, monkeypatch):
    """That mypy finds its planted mistakes and no other is checked by mypy itself: warn_unused_ignores."""
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path))
    typed_program.ops()
    assert len(typed_program.train(DATA / "grammar.txt")[0]) == 4
    assert "warn_unused_ignores = True" in (ROOT / "mypy.ini").read_text()


# ----------------------------------------------------------------------------- an editable install
def test_type_checkers_find_an_editable_install(tmp_path):
    """`pip install -e .` writes a plain path, which pyright and mypy follow, and no import hook, which they do not."""
    pytest.importorskip("setuptools", "70.1")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "xtrain").mkdir()
    for name in ("__init__.py", "version.py", "py.typed"):
        shutil.copy(ROOT / "xtrain" / name, tmp_path / "xtrain")
    (tmp_path / "out").mkdir()
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, "out"], cwd=tmp_path, check=True, capture_output=True
    )
    (wheel,) = (tmp_path / "out").glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    files = [f for f in (tmp_path / "site").iterdir() if f.is_file()]
    assert [f.suffix for f in files] == [".pth"]
    assert files[0].read_text().strip() == str(tmp_path)


def test_the_package_says_that_it_has_types():
    assert (Path(xtrain.__file__).parent / "py.typed").is_file()
    assert "py.typed" in (ROOT / "setup.cfg").read_text()
