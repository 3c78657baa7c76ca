"""Print every file of xtrain with the first sentence of its docstring:   python lessons/tools/files.py

As a hook of mkdocs, write the same list as the page api/files.md, and point the links of known_issues.md at the site's pages.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "xtrain"
PAGE = "api/files.md"


def summary(path):
    """Return the first sentence of a module's docstring, or its first line up to a column, which two spaces begin."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = re.split(r"\n\s", docstring)[0]
    if "  " in paragraph:
        return paragraph.partition("  ")[0].rstrip(":")
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]
    return " ".join(sentence.split()).rstrip(":")


def rooms():
    """Yield (folder, its files) in alphabetical order, the commands first."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    for folder in sorted(folders):
        files = [path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
        if files:
            yield folder, files


def page():
    """Return the list as Markdown."""
    lines = ["# Every file", "", "The first sentence of each module's docstring."]
    for folder, files in rooms():
        lines += ["", f"## {folder.relative_to(ROOT).as_posix()}/", ""]
        introduction = summary(folder / "__init__.py")
        if introduction:
            lines += [introduction.replace("*", r"\*"), ""]
        lines += ["| file | what is in it |", "|---|---|"]
        for path in files:
            text = re.sub(r"([|*<])", r"\\\1", summary(path))
            lines.append(f"| `{path.name}` | {text} |")
    return "\n".join(lines) + "\n"


def on_files(files, config):
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Include known_issues.md, whose links are relative to the root of the repository."""
    if page.file.src_path != "known_issues.md":
        return markdown
    text = (ROOT / "known_issues.md").read_text(encoding="utf-8")
    return text.replace("](lessons/", "](")


if __name__ == "__main__":
    print(page(), end="")
