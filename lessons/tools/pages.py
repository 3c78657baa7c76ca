"""Hooks of mkdocs for the pages that run kernels in front of the reader.

- index.md: a kernel with a race, its steps recorded here; the tracks as paths instead of a table of numbers.
- playground.md: the programs of lessons/playground/, with their steps in browser/examples.js.
- sliders.md and some lessons: figures with sliders (browser/sliders.js).
"""

import html
import json
import re
import sys
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

LESSONS = Path(__file__).resolve().parents[1]
PROGRAMS = LESSONS / "playground"
sys.path.insert(0, str(LESSONS.parent))
sys.path.insert(0, str(LESSONS / "tools"))

import traced  # noqa: E402

from xtrain import lesson  # noqa: E402

FIRST = "rotate.py"
EXAMPLES = {  # in the order of the menu
    "empty.py": "An empty kernel",
    "saxpy.py": "saxpy",
    "reduction.py": "A reduction, with a race",
    "histogram.py": "A histogram",
    "transpose.py": "A transpose, with bank conflicts",
    "scan.py": "Prefix sums",
    "tiled_product.py": "A tiled product",
    "softmax.py": "softmax",
    "lock.py": "A lock without a fence",
    "warp_shuffle.py": "Sums by warp shuffles",
    "flash_attention.py": "FlashAttention in miniature",
    FIRST: "A rotation, with a race",
}
SLIDERS = {  # lesson: (its figure, the heading above it)
    "02_memory": ("roofline", "The roofline"),
    "24_paged_cache": ("paged_cache", "What a slot wastes"),
    "31_hardware": ("occupancy", "Occupancy, by hand"),
    "32_model_parallel": ("ring", "All-reduce in a ring"),
    "36_speculation": ("speculation", "How many drafts?"),
}
START = """<p class="starts"><a class="start" href="01_threads.html">Start</a><a href="playground.html">Playground</a>
<a href="#how-to-work">How to work</a></p>"""
SHOWN = 5  # lessons of a track; a click shows the others
TITLE = re.compile(r"^\| (\d+) \| \[(.+?)\]\((\w+)\.ipynb\)", re.M)
DATA = re.compile(r'(id="data">)(.*?)(</script>)', re.S)
STYLE = '<link rel="stylesheet" href="browser/pages.css">'


def on_page_context(context, page, config, nav):
    """Give the first page and the playground the whole width."""
    if page.file.src_path in ("index.md", "playground.md"):
        page.meta["hide"] = ["navigation", "toc"]
    return context


def on_page_content(content, page, config, files):
    """Fill the places of these pages."""
    name = page.file.src_path
    if name == "index.md":
        return first_page(content)
    if name == "playground.md":
        return playground(content)
    if "data-slider" in content:
        return content + STYLE + '<script src="browser/sliders.js"></script>'
    if Path(name).stem in SLIDERS:
        return with_slider(content, *SLIDERS[Path(name).stem])
    return content


def on_files(files, config):
    """Add the playground's programs with their steps."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "browser/examples.js", content=examples()))
    return files


# ----------------------------------------------------------------------------- a kernel and its steps
def result(name: str) -> dict[str, str]:
    """What a program of the playground prints, its report and the page of its steps."""
    return traced.run((PROGRAMS / name).read_text(encoding="utf-8"), name)


def stage(name: str, said: str, first: bool, buttons: str, after: str = "") -> str:
    """The HTML of a kernel next to its steps (browser/stage.js).

    first: it is the one of the first page, which begins at its first step. The playground's programs may come from others with
    a link, so they run confined (browser/runtime.js).
    """
    source = (PROGRAMS / name).read_text(encoding="utf-8")
    found = result(name)
    page = found.pop("page")
    code = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    mode = "first" if first else "embedded"
    confined = "" if first else "data-confined"
    return f"""<div class="stage" data-file="{name}" {confined}>
<div class="stage-code">
<div class="stage-bar"><span class="stage-file">{name}</span>{buttons}</div>
<div class="stage-code-place"><pre>{code}</pre></div>
<pre class="stage-out" hidden></pre>
</div>
<div class="stage-steps">
<iframe data-stepper="{mode}" title="the threads of a block, step by step" srcdoc="{html.escape(page)}"></iframe>
</div>
<div class="stage-foot"><p class="stage-said" role="status">{said}</p>{after}</div>
<script type="application/json">{_json(found)}</script>
</div>"""


def _json(value) -> str:
    return json.dumps(value).replace("<", "\\u003c")


def _button(does: str, text: str, more: str = "") -> str:
    return f'<button type="button" data-do="{does}" {more}>{text}</button>'


def examples() -> str:
    """A script with each program: its text, what it prints, its report and the data of its steps."""
    found = []
    for name, title in EXAMPLES.items():
        ran = result(name)
        data = DATA.search(ran.pop("page"))
        source = (PROGRAMS / name).read_text(encoding="utf-8")
        found.append({"file": name, "title": title, "source": source, "data": data[2], **ran})
    return f"globalThis.playground = {_json({'examples': found})};\n"


# ----------------------------------------------------------------------------- the pages
def parsed(html: str):
    """Return the tree of a page's HTML."""
    import bs4  # a part of [docs]; a test reads the programs' titles without it

    return bs4.BeautifulSoup(html, "html.parser")


def first_page(content: str) -> str:
    """The race above everything else, the tracks as paths."""
    soup = parsed(content)
    buttons = (
        _button("help", "Write the line", "hidden")
        + _button("reset", "Reset")
        + _button("run", "Run")
    )
    after = """<p class="stage-after" hidden><a class="start" href="01_threads.html">Start lesson 1</a>
<a href="playground.html">Ten more kernels</a></p>"""
    race = stage(FIRST, "64 threads, and one line is missing. Press step.", True, buttons, after)
    place = soup.find(id="race")
    place.replace_with(parsed(race))
    lead = soup.find("h1").find_next("p")
    lead.insert_after(parsed(START))
    for table in soup.select("#three-tracks ~ table, #three-tracks ~ * table")[:1]:
        table.replace_with(parsed(tracks()))
    scripts = "".join(
        f'<script src="browser/{name}.js"></script>'
        for name in ("code_field", "stage", "first_page")
    )
    return STYLE + str(soup) + scripts


def tracks() -> str:
    """The three tracks: a path of lessons each. first_page.js marks those that have been passed."""
    index = (LESSONS / "index.md").read_text(encoding="utf-8")
    titles = {int(number): (title, stem) for number, title, stem in TITLE.findall(index)}
    about = dict(re.findall(r"^\| \*\*(\w+)\*\*: ([^|]+?) \|", index, re.M))
    hours = dict(re.findall(r"^\| \*\*(\w+)\*\*: [^|]+ \| .+ \| (\d+) \|$", index, re.M))
    found = []
    for track, numbers in lesson.load_checks("api").TRACKS.items():
        items = [
            f'<li data-exercises="{_exercises(titles[n][1])}"><a href="{titles[n][1]}.html"><b>{n}</b><span>{_plain(titles[n][0])}</span></a></li>'
            for n in numbers
        ]
        more = len(items) - SHOWN
        found.append(f"""<section class="track {track.lower()}">
<h3>{track}</h3>
<p class="track-about">{about[track][0].upper()}{about[track][1:]}.</p>
<p class="track-done"><progress max="{len(items)}" value="0" aria-label="{track}: lessons passed"></progress>
<span>{len(items)} lessons, {hours[track]} hours</span></p>
<ol>{"".join(items[:SHOWN])}</ol>
<details><summary>{more} more</summary><ol>{"".join(items[SHOWN:])}</ol></details>
</section>""")
    return f'<div class="tracks">{"".join(found)}</div>'


def _exercises(stem: str) -> str:
    """The numbers of a lesson's exercises."""
    source = (LESSONS / f"{stem}.py").read_text(encoding="utf-8")
    return " ".join(re.findall(r'^lesson\.check\("([\d.]+)"', source, re.M))


def _plain(title: str) -> str:
    return html.escape(title.replace("`", ""), quote=False)


def playground(content: str) -> str:
    """A menu of programs, a link to what is in the editor, the stage."""
    soup = parsed(content)
    options = "".join(
        f'<option value="{name}">{title}</option>' for name, title in EXAMPLES.items()
    )
    options += '<option value="" hidden>From a link</option>'
    menu = f'<label class="pick"><span>Program</span><select>{options}</select></label>'
    buttons = _button("reset", "Reset") + _button("link", "Copy a link") + _button("run", "Run")
    made = menu + stage("reduction.py", "", False, buttons)
    soup.find(id="playground").replace_with(parsed(made))
    scripts = "".join(
        f'<script src="browser/{name}.js"></script>'
        for name in ("code_field", "stage", "examples", "playground")
    )
    return STYLE + str(soup) + scripts


def with_slider(content: str, name: str, heading: str) -> str:
    """A lesson with a figure at the end of the section that has this heading."""
    soup = parsed(content)
    titles = [h for h in soup.find_all("h2") if h.get_text().rstrip("¶").strip() == heading]
    if len(titles) != 1:
        raise ValueError(
            f"the figure {name} belongs under the heading {heading!r}, which is not there once"
        )
    figure = parsed(f'<div data-slider="{name}"></div>')
    titles[0].find_next("h2").insert_before(figure)
    return STYLE + str(soup) + '<script src="browser/sliders.js"></script>'
