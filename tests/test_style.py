"""One thing a line: limits of STYLE for the code of the package, each with a planted violation that is found."""

import ast
import itertools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "xtrain"
ARGUMENTS = 29  # of a function or kernel
FUNCTION = 80  # code lines: no blank lines, comments or docstrings
MODULE = 600  # lines
LINE = 120  # characters
METHODS = 20  # of Engine
TUPLES = 2  # `a, b = x, y` per 100 assignments
CONDITIONS = 12  # `x if c else y` per 1,000 lines


def table_lines(tree: ast.Module, lines: list[str]) -> set[int]:
    """Return the numbers of the lines in tables: between `# fmt: off` and `# fmt: on`, or in a `# fmt: skip` statement."""
    table: set[int] = set()
    off = False
    for number, line in enumerate(lines, 1):
        off = (off or "# fmt: off" in line) and "# fmt: on" not in line
        if off:
            table.add(number)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and "# fmt: skip" in lines[node.end_lineno - 1]:
            table.update(range(node.lineno, node.end_lineno + 1))
    return table


def code_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    """Count the lines of a function that are neither blank nor a comment nor a docstring."""
    code = set(range(function.lineno, function.end_lineno + 1))
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, node.end_lineno + 1))
    return sum(bool(lines[n - 1].split("#")[0].strip()) for n in code)


def unrelated(target: ast.expr, value: ast.expr) -> bool:
    """Return True for `a, b, c = x, y, z`: three or more values, neither a rotation nor fields of one object."""
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    names = {ast.unparse(x) for x in target.elts}
    values = [ast.unparse(x) for x in value.elts]
    owners = {ast.unparse(x.value) if isinstance(x, ast.Attribute) else x for x in value.elts}
    return len(values) > 2 and not names.intersection(values) and len(owners) > 1


def violations(package: Path) -> list[str]:
    """Return what is wrong in the modules of a package and what to do: `file:line what: do`; and the two ratios of the whole."""
    wrong = []
    assignments = tuples = conditions = total = 0
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        tree = ast.parse("\n".join(lines))
        total += len(lines)
        if len(lines) > MODULE:
            limit = f"divide it by subject, {MODULE} are allowed"
            wrong.append(f"{file}:{len(lines)} module of {len(lines)} lines: {limit}")
        table = table_lines(tree, lines)
        for number, line in enumerate(lines, 1):
            if len(line) > LINE and number not in table:
                wrong.append(f"{file}:{number} line of {len(line)} characters: wrap it at 100")
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                assignments += 1
                both = (node.targets[0], node.value)
                tuples += all(isinstance(side, ast.Tuple) for side in both)
                if unrelated(*both):
                    code = lines[node.lineno - 1].strip()
                    wrong.append(f"{file}:{node.lineno} {code}: one line for each value")
            elif isinstance(node, ast.IfExp):
                conditions += 1
                nested = any(isinstance(x, ast.IfExp) for x in ast.walk(node) if x is not node)
                if nested and not file.startswith("kernels/"):
                    wrong.append(f"{file}:{node.lineno} condition in a condition: use `if`")
            elif isinstance(node, ast.FunctionDef):
                a = node.args
                arguments = len([*a.posonlyargs, *a.args, *a.kwonlyargs])
                if arguments > ARGUMENTS:
                    advice = "pass named tuples or a dataclass of what belongs together"
                    wrong.append(
                        f"{file}:{node.lineno} {node.name} has {arguments} arguments: {advice}"
                    )
                if (ast.get_docstring(node) or "").startswith("->"):
                    wrong.append(
                        f"{file}:{node.lineno} docstring of {node.name}: begin with a verb"
                    )
                length = code_lines(node, lines)
                if length > FUNCTION and not file.startswith("kernels/"):
                    advice = f"make functions of its steps, {FUNCTION} lines are allowed"
                    wrong.append(
                        f"{file}:{node.lineno} {node.name} has {length} code lines: {advice}"
                    )
            elif isinstance(node, ast.ClassDef) and node.name == "Engine":
                methods = sum(isinstance(x, ast.FunctionDef) for x in node.body)
                if methods > METHODS:
                    advice = "move one to the scheduler or the runner"
                    wrong.append(f"{file}:{node.lineno} Engine has {methods} methods: {advice}")
    if tuples > assignments * TUPLES / 100:
        wrong.append(
            f"{tuples} of {assignments} assignments are `a, b = x, y`: one line for each value"
        )
    if conditions > total * CONDITIONS / 1000:
        wrong.append(f"{conditions} conditional expressions in {total} lines: use `if` statements")
    return wrong


def test_style():
    wrong = violations(PACKAGE)
    assert not wrong, "\n".join(wrong)


WIDE = "x = '" + "y" * 120 + "'"
PLANTED = {  # code of a module, and words of the answer (None: nothing is wrong)
    "arguments": ("def f(" + ",\n".join(f"a{i}" for i in range(30)) + "): ...", "m.py:1 f has 30 arguments"),
    "tuple": ("a, b = 1, 2\nc = 3", "1 of 2 assignments"),
    "three values": ("a, b, c = 1, f(), {}" + "\nd = 1" * 60, "m.py:1 a, b, c = 1, f(), {}: one line"),
    "fields": ("a, b, c = x.a, x.b, x.c" + "\nd = 1" * 60, None),
    "rotation": ("a, b, c = b, c, d" + "\nd = 1" * 60, None),
    "conditions": ("a = 1 if b else 2 if c else 3" + "\nd = 1" * 200, "m.py:1 condition in a"),
    "docstring": ('def f():\n    """-> 1"""\n', "m.py:1 docstring of f: begin with a verb"),
    "condition": ("a = 1 if b else 2", "1 conditional expressions in 1 lines"),
    "line": (f"\n{WIDE}", "m.py:2 line of 126 characters"),
    "table": (f"{WIDE}  # fmt: skip\n# fmt: off\n{WIDE}\n# fmt: on", None),
    "after a table": (f"# fmt: off\n# fmt: on\n{WIDE}", "m.py:3 line of 126"),
    "function": ("def f():\n" + "    g()\n" * 80, "m.py:1 f has 81 code lines"),
    "comments": ('def f():\n    """A\n    B\n    """\n    # C\n\n' + "    g()\n" * 79, None),
    "module": ("\n" * 601, "module of 601 lines"),
    "methods": ("class Engine:\n" + "    def f(self): ...\n" * 21, "m.py:1 Engine has 21 methods"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(tmp_path, name):
    code, words = PLANTED[name]
    (tmp_path / "m.py").write_text(code)
    wrong = violations(tmp_path)
    assert len(wrong) == (words is not None)
    assert not wrong or words in wrong[0]


def test_no_two_test_files_have_one_name():
    """pytest imports a test file by its name alone: of two with one name it reads the first."""
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    twice = {a for a, b in itertools.pairwise(names) if a == b}
    assert not twice, f"rename one of the files named {twice}"
