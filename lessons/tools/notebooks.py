"""Keep each notebook lessons/NN_name.ipynb consistent with NN_name.py, the file to edit.

    python lessons/tools/notebooks.py run [NN ...]         write and execute the notebooks of these lessons (default: all)
    python lessons/tools/notebooks.py pairs                exit 1 if a notebook differs from its .py file, or shows outdated code
    python lessons/tools/notebooks.py outputs FOLDER       exit 1 if the outputs of a run in FOLDER differ from the committed ones
    python lessons/tools/notebooks.py repository [NAME]    write its name into mkdocs.yml, the Colab badges and the install cells

With the placeholder OWNER/xtrain as its name there are no badges, and the site shows no link to the repository.

A cell tagged "solution" is folded in Jupyter and on Colab. Cells are numbered, so that a new run changes only what differs.
"""

import argparse
import html
import json
import os
import re
import sys
import time
from pathlib import Path

LESSONS = Path(__file__).resolve().parents[1]
SECONDS = 120  # time limit of one cell
SHOWS = re.compile(  # a cell that only shows sources and docstrings
    r"(((from|import) .+)?\n)*(((lesson\.)?source\(.+\)|print\(\S+\.__doc__.*\))\n?)+"
)
STEPPER = "id=&quot;to-error&quot;"  # of a button that every embedded page of stepper.html has
PLACEHOLDER = "OWNER/xtrain"  # the name of a repository that is not published yet
SETTING = re.compile(r"(?<=^  repository: )[\w.-]+/[\w.-]+", re.M)  # in mkdocs.yml
CLONED = re.compile(r"(?<=git clone -q --depth 1 https://github\.com/)[\w.-]+/[\w.-]+(?= xtrain)")
BADGE = "[![Open in Colab](colab.svg)](https://colab.research.google.com/github/{name}/blob/main/lessons/{stem}.ipynb)"
# How a lesson's title and badge look in the .py file and in the notebook: the line, then an empty one.
FIRST = {
    ".py": ("# {}\n#\n", r"^# # .+\n#\n", r"^# \[!\[Open in Colab\].*\n#\n"),
    ".ipynb": (
        '    "{}\\n",\n    "\\n",\n',
        r'^    "# .+\\n",\n    "\\n",\n',
        r'^    "\[!\[Open in Colab\].*\n    "\\n",\n',
    ),
}


def sources(numbers: list[str]) -> list[Path]:
    """-> the .py files of these lessons; of all lessons if the list is empty"""
    chosen = [p for p in sorted(LESSONS.glob("[0-9][0-9]_*.py"))]
    if numbers:
        wanted = {int(n) for n in numbers}
        chosen = [p for p in chosen if int(p.name[:2]) in wanted]
        missing = wanted - {int(p.name[:2]) for p in chosen}
        if missing:
            sys.exit(f"there is no lesson {', '.join(map(str, sorted(missing)))} in {LESSONS}")
    return chosen


def notebook(path: Path):
    """-> the notebook of a .py file, without outputs"""
    import jupytext

    new = jupytext.read(path)
    for number, cell in enumerate(new.cells):
        cell["id"] = f"cell-{number}"
        if {"solution", "install"} & set(cell.metadata.get("tags", [])):
            cell.metadata["jupyter"] = {"source_hidden": True}
            cell.metadata["cellView"] = "form"
        cell.metadata.pop("lines_to_next_cell", None)
    new.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "jupytext": {"formats": "ipynb,py:percent"},
    }
    new.nbformat, new.nbformat_minor = 4, 5
    return new


def run(path: Path) -> float:
    """Execute and write one notebook. -> seconds. Raises an exception with the traceback if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    book, begin = notebook(path), time.perf_counter()
    client = NotebookClient(
        book,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(LESSONS.parent)}},
    )
    client.execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # clock times
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
        if "outputs" in cell:
            cell.outputs = _tidy(cell.outputs)
    nbformat.write(book, path.with_suffix(".ipynb"))
    return time.perf_counter() - begin


def _tidy(outputs):
    """Drop warnings, and join printed outputs, because their division into pieces depends on timing."""
    kept = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.get("name") == "stdout" == kept[-1].get("name"):
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def _cells(book):
    return [(c.cell_type, c.source, c.metadata) for c in book.cells]


def out_of_step(path: Path) -> str | None:
    """-> how a notebook differs from its .py file, or None"""
    import nbformat

    paired = path.with_suffix(".ipynb")
    if not paired.exists():
        return f"{paired.name} is missing"
    there, said = nbformat.read(paired, 4), notebook(path)
    if len(there.cells) != len(said.cells):
        return f"{paired.name} has {len(there.cells)} cells, {path.name} {len(said.cells)}"
    for number, (a, b) in enumerate(zip(_cells(there), _cells(said))):
        if a != b:
            return f"{paired.name} and {path.name} differ in cell {number}: {b[1].strip().splitlines()[:1]}"
    for cell in there.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"{paired.name} contains an error: {output.ename}: {output.evalue}"
    if not any(c.get("outputs") for c in there.cells):
        return f"{paired.name} has no outputs"
    return old_source(path)


def old_source(path: Path, root: Path = LESSONS.parent) -> str | None:
    """-> the first place where a notebook shows outdated library code, or None. Does not execute anything."""
    text = "\n".join(
        p.read_text(encoding="utf-8")
        for p in [*root.glob("xtrain/**/*.py"), *root.glob("lessons/checks/*.py")]
    )
    whole = _dense(text)
    stepper = root / "xtrain/simulator/stepper.html"
    for cell in json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]:
        code = "".join(cell["source"]).strip()
        if cell["cell_type"] != "code" or not code:
            continue
        shown = "".join(x for o in cell["outputs"] for x in o.get("text", []))
        pages = "".join(x for o in cell["outputs"] for x in o.get("data", {}).get("text/html", []))
        if STEPPER in pages:
            pages = html.unescape(pages)
            for line in stepper.read_text(encoding="utf-8").splitlines():
                if line not in pages and not re.search("TITLE|DATA", line):
                    return f"{path.stem}.ipynb holds an outdated stepper, without: {line.strip()}"
        _, *parts = re.split(r"^# (\S+\.py)$", shown, flags=re.MULTILINE)
        only = SHOWS.fullmatch(code)
        if only:
            for line in shown.splitlines():
                if line.strip() not in text and not re.fullmatch(r"# \S+\.py", line):
                    return f"{path.stem}.ipynb shows code that the library no longer has: {line}"
        elif not code.splitlines()[-1].strip().startswith("lesson.source("):
            continue
        for name, source in zip(parts[::2], parts[1::2]):
            dense = _dense(source)
            if dense not in whole:
                return f"{path.stem}.ipynb shows an outdated version of: {dense.splitlines()[0]}"
            file = root / name
            if not file.is_file() or dense not in _dense(file.read_text(encoding="utf-8")):
                return f"{path.stem}.ipynb shows code of {name}, which another file has now"
    return None


def _dense(text: str) -> str:
    """Remove indentation and empty lines."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def printed(path: Path) -> list[str]:
    """-> the printed output of each code cell; "" of a cell with the tag "varies", whose digits depend on the CPU"""
    import nbformat

    texts = []
    for cell in nbformat.read(path, 4).cells:
        outputs = [o for o in cell.get("outputs", []) if o.get("name") == "stdout"]
        if "varies" in cell.metadata.get("tags", []):
            outputs = []
        texts.append(re.sub(r"/\S+/", "", "".join(o.text for o in outputs)))
    return texts


def pairs(paths) -> list[str]:
    """-> one sentence for each notebook that differs from its .py file"""
    return [why for why in map(out_of_step, paths) if why]


def outputs(paths, folder: Path) -> list[str]:
    """-> for each notebook the first cell whose output in `folder` differs from the committed output"""
    wrong = []
    for path in paths:
        name = path.with_suffix(".ipynb").name
        for number, (old, new) in enumerate(zip(printed(LESSONS / name), printed(folder / name))):
            if old != new:
                wrong.append(
                    f"{name}, cell {number}: committed\n{old}but a clean run prints\n{new}"
                )
                break
    return wrong


def repository(settings: Path = LESSONS.parent / "mkdocs.yml") -> str:
    """-> the setting extra.repository of mkdocs.yml"""
    found = SETTING.search(settings.read_text(encoding="utf-8"))
    if not found:
        sys.exit("mkdocs.yml does not name the repository: set extra: repository: OWNER/NAME")
    return found[0]


def badge(name: str, stem: str) -> str:
    """The line that opens a lesson on Colab; "" while the repository has no name."""
    return "" if name == PLACEHOLDER else BADGE.format(name=name, stem=stem)


def name_repository(name: str, folder: Path = LESSONS) -> list[str]:
    """Write the repository name into lessons and notebooks, without executing them. -> the changed files"""
    changed = []
    for path in sorted(p for p in folder.glob("[0-9][0-9]_*.*") if p.suffix in FIRST):
        line, title, old = FIRST[path.suffix]
        new = badge(name, path.stem)
        text = path.read_text(encoding="utf-8")
        named = CLONED.sub(name, re.sub(old, "", text, count=1, flags=re.M))
        if new:
            end = re.search(title, named, re.M).end()
            named = named[:end] + line.format(new) + named[end:]
        if named != text:
            path.write_text(named, encoding="utf-8")
            changed.append(path.name)
    return changed


def set_repository(name: str, settings: Path = LESSONS.parent / "mkdocs.yml") -> None:
    """Write the repository name into mkdocs.yml."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        sys.exit(
            f"{name!r} does not name a repository: give it as OWNER/NAME, as in its address on GitHub"
        )
    text = settings.read_text(encoding="utf-8")
    settings.write_text(SETTING.sub(lambda _: name, text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["run", "pairs", "outputs", "repository"])
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(LESSONS.parent))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # committed outputs come from a CPU
    if options.command == "run":
        for path in sources(options.rest):
            print(f"{path.name}: {run(path):.1f} s", flush=True)
        return 0
    if options.command == "repository":
        for name in options.rest[:1]:
            set_repository(name)
        print(f"{repository()}: {len(name_repository(repository()))} files changed")
        return 0
    if options.command == "pairs":
        wrong = pairs(sources(options.rest))
    else:
        wrong = outputs(sources([]), Path(options.rest[0]))
    print("\n".join(wrong) or f"{options.command}: all consistent")
    if wrong:
        print(
            "To fix: run python lessons/tools/notebooks.py run NN, check the difference, commit both files"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
