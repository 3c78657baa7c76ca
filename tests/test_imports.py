"""The plan of the house: a room imports only from itself and from the rooms below it, and no circle of files exists."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "xtrain"
# From top to bottom. A name ending in / is a room with everything below it that has no line of its own.
ORDER = [
    "commands", "torch/", "inspect/", "report/", "evaluation/", "server/", "reinforcement/", "serving/", "tuning/", "parallel/", "training/", "nn/", "formats/", "data/",
    "kernels/experts/", "kernels/attention/", "kernels/decoding/", "kernels/", "kernels/primitives/", "kernels/runtime/", "ground", "simulator/",
]  # fmt: skip
GROUND = {
    "config.py", "device.py", "family.py", "cli.py", "console.py", "files.py", "json_files.py", "machine.py", "blas.py", "errors.py",
    "version.py", "options.py", "option_fields.py", "option_files.py", "option_help.py", "option_words.py", "run_options.py", "rope_scalings.py",
}  # fmt: skip
ENTRANCES = {"__init__.py", "report/__main__.py"}  # the public API, and a command inside a room


def room(file: str) -> str:
    """The line of ORDER that a file (relative to xtrain/) belongs to."""
    if file in ENTRANCES or ("/" not in file and file not in GROUND):
        return "commands"
    if "/" not in file:
        return "ground"
    return max((r for r in ORDER if r.endswith("/") and file.startswith(r)), key=len)


def imports(path: Path, line: str = "") -> set[str]:
    """Files of the package that a file, with one more line, imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") + line)):
        if isinstance(node, ast.Import):
            names = [(a.name.split("."), []) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                list(path.relative_to(PACKAGE.parent).parts[: -node.level]) if node.level else []
            )
            start = above + (node.module.split(".") if node.module else [])
            names = [(start, [a.name for a in node.names])]
        else:
            continue
        for start, members in names:
            if start[:1] != [PACKAGE.name]:
                continue
            base = PACKAGE.joinpath(*start[1:])
            for member in members or [""]:
                candidates = (
                    [base / f"{member}.py", base / member / "__init__.py"] if member else []
                )
                candidates += [base.with_suffix(".py"), base / "__init__.py"]
                target = next((c for c in candidates if c.is_file()), None)
                assert target is not None, f"{path}: what is imported from {'.'.join(start)}?"
                found.add(target.relative_to(PACKAGE).as_posix())
    return found - {path.relative_to(PACKAGE).as_posix()}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {p.relative_to(PACKAGE).as_posix(): imports(p) for p in sorted(PACKAGE.rglob("*.py"))}


def upward(arrows: dict[str, set[str]]) -> list[str]:
    """Imports that climb the house."""
    floor = {name: i for i, name in enumerate(ORDER)}
    return [
        f"{file} ({room(file)}) imports {other} ({room(other)})"
        for file, others in arrows.items()
        for other in sorted(others)
        if floor[room(other)] < floor[room(file)]
    ]


def circle(arrows: dict[str, set[str]]) -> list[str] | None:
    """Files that import each other in a ring, or None."""
    done: set[str] = set()

    def walk(file, path):
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return None
        for other in sorted(arrows[file]):
            if found := walk(other, [*path, file]):
                return found
        done.add(file)
        return None

    return next((found for file in arrows if (found := walk(file, []))), None)


def test_every_room_is_in_the_order():
    folders = {p.relative_to(PACKAGE).parts[0] + "/" for p in PACKAGE.glob("*/*.py")}
    missing = folders - set(ORDER)
    assert not missing, f"{missing}: add it to ORDER above, and to the rooms in ARCHITECTURE.md"


def test_imports_go_down():
    climbing = "\n".join(upward(graph()))
    assert not climbing, (
        f"{climbing}\nA room imports from the rooms below it (ARCHITECTURE.md): move the code down, or pass the value as an argument; "
        "a new file of the ground floor has a place in GROUND"
    )


def test_there_is_no_circle():
    ring = " -> ".join(circle(graph()) or [])
    assert not ring, f"{ring}: move what both ends need to a file that imports neither"


def planted(file: str, line: str) -> dict[str, set[str]]:
    """The graph with one more line in a file."""
    return graph() | {file: imports(PACKAGE / file, line)}


@pytest.mark.parametrize(
    "file, line",
    [
        ("nn/autograd.py", "\nfrom ..training.run import Run\n"),
        ("kernels/rmsnorm.py", "\ndef late():\n    from ..nn import functional\n"),
        ("simulator/block.py", "\nimport xtrain.device\n"),
        ("kernels/runtime/launch.py", "\nfrom ..cast import cast_fwd\n"),
        ("files.py", "\nfrom . import train\n"),
    ],
)
def test_a_planted_upward_import_is_found(file, line):
    found = sorted(set(upward(planted(file, line))) - set(upward(graph())))
    assert len(found) == 1 and found[0].startswith(f"{file} (")


def test_a_planted_circle_is_found():
    found = circle(planted("nn/cuda_graph.py", "\nfrom . import functional\n"))
    assert found is None  # one arrow more is not yet a circle
    found = circle(planted("nn/autograd.py", "\nfrom . import functional\n"))
    assert found and {"nn/autograd.py", "nn/functional.py"} <= set(found)
