"""The pages stay short, and what ARCHITECTURE.md names exists."""

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "xtrain"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1000
    assert len(text.splitlines()) <= 120
    assert max(map(len, text.splitlines())) <= 160


def test_known_issues_are_short_and_complete():
    """An entry has a symptom, a workaround (or says that none is needed) and a plan. The rest belongs in a note."""
    text = (ROOT / "known_issues.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 12_000
    _, *entries = re.split(r"^## ", text, flags=re.M)
    assert len(entries) > 10
    for entry in entries:
        title = entry.partition("\n")[0]
        for part in ("Symptom", "orkaround", "**Plan.**"):
            assert part in entry, f"{title}: {part} is missing"


def test_the_architecture_is_short_and_has_no_list_of_files():
    lines = ARCHITECTURE.splitlines()
    assert len(lines) <= 95
    for line in lines:
        assert len(re.findall(r"\.py\b", line)) <= 4, f"a list of files: {line}"


def spans():
    """Return the pieces of inline code in ARCHITECTURE.md."""
    return re.findall(r"`([^`\n]+)`", ARCHITECTURE)


def test_the_architecture_names_paths_that_exist():
    """Paths are relative to the repository or to xtrain/. NAME and ROOM stand for any name."""
    paths = {s for s in spans() if re.fullmatch(r"[\w./-]+(\.py|/)", s)}
    paths = {path for path in paths if not re.search("NAME|ROOM", path)}
    assert len(paths) > 30
    missing = [p for p in paths if not (ROOT / p).exists() and not (PACKAGE / p).exists()]
    assert sorted(missing) == []


def defined_names():
    """Return the names that xtrain defines: `name`, `Class.member`, `module.name`."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in assigned(node):
                names |= {name, f"{path.stem}.{name}"}
                if isinstance(node, ast.ClassDef):
                    members = [member for child in node.body for member in assigned(child)]
                    names.update(f"{name}.{member}" for member in members)
    return names


def assigned(node):
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


COMMANDS = {"xtrain", "pytest"}


def test_the_architecture_names_code_that_exists():
    names = {s for s in spans() if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", s)}
    names = {n for n in names if not n.endswith(".py")} - COMMANDS
    assert len(names) > 20
    missing = sorted(names - defined_names())
    assert not missing, f"{missing}: xtrain does not define it; write Class.member for members"


def test_the_architecture_names_every_room():
    """A room is a folder of xtrain/ that has a line of its own in the test of the imports."""
    spec = importlib.util.spec_from_file_location("imports", ROOT / "tests" / "test_imports.py")
    imports = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imports)
    rooms = {room for room in imports.ORDER if room.endswith("/")}
    assert sorted(rooms - set(spans())) == []


@pytest.fixture(scope="module")
def files():
    path = ROOT / "lessons" / "tools" / "files.py"
    spec = importlib.util.spec_from_file_location("files_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_says_what_is_in_it(files):
    page = files.page()
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    rows = re.findall(r"^\| `\w+\.py` \| (.+) \|$", page, re.M)
    assert len(rows) == len(modules)
    short = [path.name for path in modules if len(files.summary(path)) < 8]
    assert short == []


def test_the_site_includes_the_known_issues(files):
    page = SimpleNamespace(file=SimpleNamespace(src_path="known_issues.md"))
    text = files.on_page_markdown("", page, None, None)
    links = re.findall(r"\]\(([^)#]+)", text)
    assert "notes/decoding.md" in links
    assert [link for link in links if not (ROOT / "lessons" / link).exists()] == []


ACTORS = re.compile(r"\b(nobody|whoever|somebody|anybody|under way|anew|mend(s|ed)?)\b", re.I)
PAGES = [
    page
    for folder in (".", "lessons", "lessons/howto", "lessons/notes")
    for page in sorted((ROOT / folder).glob("*.md"))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_plain_english(page):
    """A sentence names its actor: the caller, the thread, the rank."""
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    assert ACTORS.findall(text) == []


def test_the_simulator_has_the_version_of_xtrain():
    from xtrain.version import VERSION

    text = (ROOT / "packages/simulate-cuda/pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.*)"$', text, re.M)[1] == VERSION
    assert f"## {VERSION} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
