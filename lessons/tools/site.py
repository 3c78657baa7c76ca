"""What mkdocs does beyond its plugins: see mkdocs.yml.

lessons found in lessons/ come into the navigation by themselves
formulas ($...$ in notebooks and pages) become MathML, which browsers draw without scripts and fonts
solution cells are folded
nothing is loaded from other sites
measurements older than the kernel they are about are named
"""

import re
import sys
from pathlib import Path

import bs4
from latex2mathml.converter import convert

LESSONS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(LESSONS.parent))

from xtrain import lesson  # noqa: E402

FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?!\s)([^$]{1,200}?)(?<!\s)\$(?!\w)", re.S)
NOT_TEXT = {"code", "pre", "script", "style", "math", "textarea", "svg"}
IDENTITY = re.compile(r"[\"'](bench_\w+/[^\"'{}]+)[\"']")


def on_config(config):
    """Navigation: the lessons that are there, between the course and the reference.

    And below each page a link to the repository, once it has a name. (Not repo_url: its script asks GitHub for stars.)
    """
    name = config["extra"]["repository"]
    if not name.startswith("OWNER/"):
        link = {"icon": "fontawesome/brands/github", "link": f"https://github.com/{name}"}
        config["extra"]["social"] = [link]
    lessons = [
        {_title(p): p.with_suffix(".ipynb").name} for p in sorted(LESSONS.glob("[0-9][0-9]_*.py"))
    ]
    config["nav"].insert(1, {"Lessons": lessons})
    return config


def _title(path):
    return re.search(r"^# # (.+)$", path.read_text(encoding="utf-8"), re.M)[1]


def on_page_content(html, page, config, files):
    soup = bs4.BeautifulSoup(html, "html.parser")
    for outside in soup.find_all(["script", "link"], src=re.compile("^https?:")):
        outside.decompose()
    for script in soup.find_all("script"):
        if "cdnjs" in script.text or "cdn.jsdelivr" in script.text or "MathJax" in script.text:
            script.decompose()
    for toolbar in soup.select(".celltoolbar"):  # the tags of a cell
        toolbar.decompose()
    for tag, title in (("solution", "Solution"), ("install", "Only on Google Colab")):
        for cell in soup.select(f".celltag_{tag}"):
            _fold(soup, cell, title)
    _formulas(soup, page)
    if page.file.src_path.endswith(".ipynb"):
        _links(soup, page)
        _old_measurements(soup, page)
    return str(soup)


def _fold(soup, cell, title):
    details = soup.new_tag("details", attrs={"class": "solution"})
    summary = soup.new_tag("summary")
    summary.string = title
    cell.wrap(details)
    details.insert(0, summary)


def _formulas(soup, page):
    for text in soup.find_all(string=re.compile(r"\$")):
        if any(parent.name in NOT_TEXT for parent in text.parents):
            continue
        parts, end = [], 0
        for found in FORMULA.finditer(text):
            tex, display = (found[1], "block") if found[1] else (found[2], "inline")
            parts += [
                text[end : found.start()],
                bs4.BeautifulSoup(_math(tex, display, page), "html.parser"),
            ]
            end = found.end()
        if parts:
            text.replace_with(*parts, text[end:])


def _math(tex, display, page):
    try:
        made = convert(tex.strip(), display=display)
    except Exception as error:
        raise ValueError(
            f"{page.file.src_path}: the formula {tex!r} cannot be converted: {error!r}"
        ) from error
    unknown = re.search(r"\\[A-Za-z]+", made)
    if unknown:
        raise ValueError(
            f"{page.file.src_path}: {unknown[0]} in the formula {tex!r} is not known to latex2mathml"
        )
    return made


def _links(soup, page):
    """Links of a notebook to its neighbours: mkdocs looks only at those of Markdown pages."""
    for link in soup.find_all("a", href=True):
        target, _, anchor = link["href"].partition("#")
        if not target or ":" in target:
            continue
        if not (LESSONS / target).exists():
            raise ValueError(f"{page.file.src_path} links to {target}, which is not in lessons/")
        if target.endswith((".ipynb", ".md")):
            link["href"] = re.sub(r"\.(ipynb|md)$", ".html", target) + (
                f"#{anchor}" if anchor else ""
            )


def _old_measurements(soup, page):
    """A line on the page, and one on the terminal. Not a warning of mkdocs: --strict is about the pages, not about age."""
    source = (LESSONS / page.file.src_path).with_suffix(".py").read_text(encoding="utf-8")
    notes = []
    for identity in dict.fromkeys(IDENTITY.findall(source)):
        sentence = lesson.records.changed_since(lesson.records.find(identity))
        if sentence:
            print(f"{page.file.src_path}: {sentence}", file=sys.stderr)
            notes.append(sentence)
    if notes:
        box = soup.new_tag("div", attrs={"class": "admonition note"})
        title = soup.new_tag("p", attrs={"class": "admonition-title"})
        title.string = "Older than the code"
        box.append(title)
        for sentence in notes:
            line = soup.new_tag("p")
            line.string = f"{sentence}."
            box.append(line)
        soup.append(box)
