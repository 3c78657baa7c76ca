"""Hooks of mkdocs, in addition to the plugins in mkdocs.yml.

- Add the lessons in lessons/ to the navigation.
- Convert formulas ($...$ in notebooks and pages) to MathML, which browsers render without scripts and fonts.
- Fold solution cells, and highlight the source of the library that they print.
- Put charts (SVG) into the page, where they follow its light or dark theme.
- Remove everything that would be loaded from other sites.
- Mark measurements that are older than the code that they measure.
- Lead links to files outside lessons/ to the repository.
- While the repository has no name (OWNER/xtrain), show neither the cells that fetch it nor how to open a lesson on Colab.
"""

import base64
import re
import sys
from pathlib import Path

import bs4
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

LESSONS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(LESSONS.parent))

from xtrain import lesson  # noqa: E402

FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?!\s)([^$]{1,200}?)(?<!\s)\$(?!\w)", re.S)
NOT_TEXT = {"code", "pre", "script", "style", "math", "textarea", "svg"}
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./\.\./([^)]+)\)")  # from a page in a folder of lessons/
SOURCE = re.compile(r"^# \S+\.py$", re.M)  # the first line that lesson.source prints
VERDICT = re.compile(r"^\d+\.\d+ \w+: (correct|not yet)")  # of lesson.check
IDENTITY = re.compile(r"[\"'](bench_\w+/[^\"'{}]+)[\"']")


def on_config(config):
    """Add the lessons to the navigation, between the course and the reference.

    Add a link to the repository below each page, if its name is set. (repo_url would request the number of stars from GitHub.)
    """
    name = config["extra"]["repository"]
    if _is_named(config):
        link = {"icon": "fontawesome/brands/github", "link": f"https://github.com/{name}"}
        config["extra"]["social"] = [link]
    lessons = [
        {_title(p): p.with_suffix(".ipynb").name} for p in sorted(LESSONS.glob("[0-9][0-9]_*.py"))
    ]
    config["nav"].insert(1, {"Lessons": lessons})
    return config


def _is_named(config):
    return not config["extra"]["repository"].startswith("OWNER/")


def on_page_markdown(markdown, page, config, files):
    """Drop the tab about Colab while there is nothing to open there. Lead links to files outside lessons/ to the repository."""
    markdown = OUTSIDE.sub(lambda link: _outside(link, config), markdown)
    if _is_named(config) or page.file.src_path != "index.md":
        return markdown
    return re.sub(r'^=== "On Google Colab"\n(\n|    .*\n)+', "", markdown, flags=re.M)


def _outside(link, config):
    """A link to a file of the repository, which the site does not have: only its text while the repository has no name."""
    text, path = link.groups()
    if not (LESSONS.parent / path).exists():
        raise ValueError(f"a page links to {path}, which is not in the repository")
    if not _is_named(config):
        return text
    return f"[{text}](https://github.com/{config['extra']['repository']}/blob/main/{path})"


def _title(path):
    return re.search(r"^# # (.+)$", path.read_text(encoding="utf-8"), re.M)[1]


def on_page_content(html, page, config, files):
    """Rewrite the HTML of a page."""
    soup = bs4.BeautifulSoup(html, "html.parser")
    for outside in soup.find_all(["script", "link"], src=re.compile("^https?:")):
        outside.decompose()
    for script in soup.find_all("script"):
        if "cdnjs" in script.text or "cdn.jsdelivr" in script.text or "MathJax" in script.text:
            script.decompose()
    for toolbar in soup.select(".celltoolbar"):  # the tags of a cell
        toolbar.decompose()
    for cell in soup.select(".celltag_install") if not _is_named(config) else ():
        cell.decompose()
    for tag, title in (("solution", "Solution"), ("install", "Only on Google Colab")):
        for cell in soup.select(f".celltag_{tag}"):
            _fold(soup, cell, title)
    _formulas(soup, page)
    _charts(soup, page)
    _figures(soup)
    _sources(soup)
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


def _charts(soup, page):
    for image in soup.find_all("img", src=re.compile(r"\.svg$")):
        file = (LESSONS / page.file.src_path).parent / image["src"]
        if ":" in image["src"] or not file.exists():
            continue
        chart = bs4.BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser").svg
        if "chart" in chart.get("class", []):
            image.replace_with(chart)


def _figures(soup):
    """Note a figure's width: on a phone a wide one scrolls instead of becoming too small to read (site.css)."""
    for image in soup.find_all("img", src=re.compile("^data:image/png;base64,")):
        head = base64.b64decode(image["src"].partition(",")[2][:32])  # bytes 16 to 20: the width
        image["style"] = f"--width: {int.from_bytes(head[16:20], 'big')}px"


def _sources(soup):
    """Highlight printed source, from its first line to the end of the output. Mark the verdicts of checks."""
    for pre in soup.select(".jp-OutputArea-output pre"):
        text = pre.get_text()
        begin = SOURCE.search(text)
        if VERDICT.match(text):
            pre["class"] = "verdict"
        if begin:
            code = highlight(text[begin.start() :], PythonLexer(), HtmlFormatter(nowrap=True))
            pre["class"] = "highlight-ipynb library-source"
            pre.clear()
            pre.append(text[: begin.start()])
            # parsed inside <pre>: elsewhere bs4 shortens spaces
            pre.extend(list(bs4.BeautifulSoup(f"<pre>{code}</pre>", "html.parser").pre.children))


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
            f"{page.file.src_path}: latex2mathml does not know {unknown[0]} in the formula {tex!r}"
        )
    return made


def _links(soup, page):
    """Convert and check the relative links of a notebook, because mkdocs handles only Markdown pages."""
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
    """Add a note to the page and print it. It is not a warning, because outdated measurements must not fail --strict."""
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
