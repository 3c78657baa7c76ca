"""lessons/tools/site.py: what it makes of the pages. Needs the packages of `[docs]`."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

bs4 = pytest.importorskip("bs4")
pytest.importorskip("latex2mathml")
pytest.importorskip("pygments")
FILE = Path(__file__).resolve().parents[2] / "lessons" / "tools" / "site.py"
spec = importlib.util.spec_from_file_location("site_hooks", FILE)
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


def test_printed_source_is_highlighted_and_complete():
    text = "a = 1\n# xtrain/kernels/scale.py\ndef f(x):\n    if x < 2:\n        return x  # why\n"
    html = f'<div class="jp-OutputArea-output"><pre>{text.replace("<", "&lt;")}</pre><pre>def g</pre></div>'
    soup = bs4.BeautifulSoup(html, "html.parser")
    hooks._sources(soup)
    again = bs4.BeautifulSoup(str(soup), "html.parser")
    first, second = again.find_all("pre")
    assert first.get_text() == text and second.get_text() == "def g"
    assert [e.get_text() for e in first.select(".k")] == ["def", "if", "return"]
    assert "library-source" in first["class"] and not second.find("span")


def test_charts_are_put_into_the_page_and_other_pictures_are_not():
    html = '<img src="charts/training.svg"/><img src="colab.svg"/><img src="https://a.b/c.svg"/>'
    soup = bs4.BeautifulSoup(html, "html.parser")
    hooks._charts(soup, SimpleNamespace(file=SimpleNamespace(src_path="speed.md")))
    assert len(soup.select("svg.chart")) == 1
    assert [i["src"] for i in soup.find_all("img")] == ["colab.svg", "https://a.b/c.svg"]


def test_links_to_files_outside_the_site_lead_to_the_repository():
    text = "see [it](../../examples/own_loop.py), [a page](../api.md)"
    page = SimpleNamespace(file=SimpleNamespace(src_path="howto/own_loop.md"))
    convert = lambda name: hooks.on_page_markdown(text, page, {"extra": {"repository": name}}, [])
    assert convert("OWNER/xtrain") == "see it, [a page](../api.md)"
    address = "https://github.com/me/xtrain/blob/main/examples/own_loop.py"
    assert convert("me/xtrain") == f"see [it]({address}), [a page](../api.md)"
    with pytest.raises(ValueError, match=r"examples/none\.py"):
        text = "[it](../../examples/none.py)"
        convert("me/xtrain")
