"""The site on a phone: code wraps and its button covers none of it, and the list of lessons fits."""

import pytest
from small_site import build

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocs_jupyter")
WIDTH = 390  # pixels
LESSON = "17_prefill"
SCROLLS = "[...document.querySelectorAll('%s')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 60))"
COVERED = """[...document.querySelectorAll('.CodeMirror')].flatMap(cell => {
  const button = cell.querySelector('clipboard-copy').getBoundingClientRect();
  const nodes = document.createTreeWalker(cell.querySelector('pre'), NodeFilter.SHOW_TEXT);
  const over = r => r.width > 1 && r.top < button.bottom - 1 && r.bottom > button.top + 1 && r.right > button.left + 1;
  while (nodes.nextNode()) {
    const text = document.createRange();
    text.selectNodeContents(nodes.currentNode);
    if ([...text.getClientRects()].some(over)) return [nodes.currentNode.data];
  }
  return [];
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The course's first page and one lesson, built as the whole site is."""
    return build(tmp_path_factory.mktemp("site"), ["index.md", f"{LESSON}.ipynb"], python=False)


def test_code_wraps_and_the_button_covers_none_of_it(site, browser):
    browser.open(f"file://{site}/{LESSON}.html", WIDTH)
    assert browser.evaluate("document.querySelectorAll('.CodeMirror pre').length") > 10
    assert browser.evaluate(SCROLLS % ".CodeMirror pre, pre.verdict, pre.library-source") == []
    assert browser.evaluate(COVERED) == []


def test_the_list_of_lessons_is_as_wide_as_the_screen(site, browser):
    browser.open(f"file://{site}/index.html", WIDTH)
    assert browser.evaluate("document.querySelectorAll('table').length") > 1
    assert browser.evaluate("document.documentElement.scrollWidth") <= WIDTH
    assert (
        browser.evaluate(
            "Math.max(...[...document.querySelectorAll('table')].slice(0, 2).map(t => t.getBoundingClientRect().right))"
        )
        <= WIDTH
    )
