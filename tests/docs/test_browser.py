"""The lessons in a browser: the files that the site serves, the judges in Pyodide, and a page in Chromium.

Needs npm, once with the network; Node.js for the verdicts, and Chromium for the page.
"""

import functools
import gzip
import http.server
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from checks import only_slow

from xtrain import lesson
from xtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("browser_hook", ROOT / "lessons/tools/browser.py")
hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)
LESSONS = sorted((ROOT / "lessons").glob("[0-9][0-9]_*.py"))
MEGABYTES = 15  # of the first load, compressed: what a reader waits for


@pytest.fixture(scope="module")
def made():
    """The files that the site's build makes: their content by path."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")  # it fetches Pyodide and NumPy; without them no page can be made
    try:
        return hook.site_files()
    except UserError as error:
        pytest.skip(str(error))  # npm has no network here and the cache is empty: nothing to test


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    """The files in a folder site/browser, as the site has them."""
    folder = tmp_path_factory.mktemp("site") / "browser"
    folder.mkdir()
    hook.write(made, folder)
    return folder


# ----------------------------------------------------------------------------- the files
def test_the_first_load_is_small(made):
    """Servers compress text and WebAssembly; archives are compressed already."""
    size = sum(len(gzip.compress(content, 6)) for content in made.values())
    assert size < MEGABYTES * 1e6, f"{size / 1e6:.1f} MB"


def test_nothing_is_loaded_from_another_origin():
    """The checksums are in the lock, and no address of a registry."""
    lock = json.loads((hook.SOURCE / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: about for name, about in lock["packages"].items() if name}
    assert len(packages) > 10
    assert all(about["integrity"].startswith("sha512-") for about in packages.values())
    assert not any("resolved" in about for about in packages.values())
    for path in hook.SOURCE.rglob("*.*"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"https?://(?!(localhost|127\.0\.0\.1|www\.w3\.org/2000/svg))", text
        ), path.name


def test_a_second_build_needs_no_npm(made, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert hook.packages().is_dir()


def test_without_npm_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"needs npm.*install Node.js, or.*XTRAIN_BROWSER=false"):
        hook.packages()


def test_packages_that_cannot_be_fetched(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no such host >&2\nexit 1\n", encoding="utf-8")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XTRAIN_CACHE", str(tmp_path / "cache"))
    for _ in range(2):  # what an interrupted call has left is not taken for the packages
        with pytest.raises(UserError, match=r"no such host.*try again"):
            hook.packages()


# ----------------------------------------------------------------------------- the exercises of a page
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_pieces_of_a_page_are_the_file_of_the_command_line(path, tmp_path):
    pieces = hook.pieces(path.read_text(encoding="utf-8"), int(path.stem[:2]))
    judges = lesson.load_checks("api")
    text = judges.head(path) + "\n\n\n".join(piece["text"] for piece in pieces) + "\n"
    assert text == judges.start(path.stem[:2], tmp_path).read_text(encoding="utf-8")
    numbers = [piece["number"] for piece in pieces if piece["number"]]
    assert numbers == [e.number for e in judges._exercises_of(path.stem[:2])]


def test_exercises_that_run_elsewhere_exist():
    judges = lesson.load_checks("api")
    for number in hook.ELSEWHERE:
        assert number in [e.number for e in judges._exercises_of(number.split(".")[0])]


def test_the_how_to_names_them():
    text = (ROOT / "lessons/howto/browser.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if "| no" in line]
    assert {number for row in rows for number in re.findall(r"\d+\.\d+", row)} == {*hook.ELSEWHERE}


def test_every_exercise_of_a_page_is_marked():
    cell = '<div class="jp-Cell celltag_exercise" id="cell-id=cell-{}">'
    html = hook.with_editors("".join(map(cell.format, "abc")), LESSONS[0])
    assert re.findall(r'data-piece="(\d)" id="cell-id=cell-(.)"', html) == [("1", "a"), ("2", "b"), ("3", "c")]  # fmt: skip


# ----------------------------------------------------------------------------- the verdicts
CASES = [  # exercise, old, new: a typical mistake, planted in the solution
    ("1.3", "    cuda.syncthreads()\n", ""),
    ("2.2", "tile[tx, ty]", "tile[ty, tx]"),
    ("3.2", "cuda.blockDim.x):", "32):"),
    ("5.3", "f(x - step * v)", "f(x)"),
    ("6.1", "dy * b.data", "dy * a.data"),
    ("8.2", "0.5 * (1 + ", "(1 + "),
    ("16.3", "inputs[: i + 1]", "inputs[:i]"),
    ("21.4", '("replace")', '("ignore")'),
    ("30.1", "range(5)", "range(4)"),
    ("46.1", "np.argsort(-logits_NE", "np.argsort(logits_NE"),
]


def attempts():
    """Yield (exercise, text of the reader's file): the solution, and the same with a mistake."""
    judges = lesson.load_checks("api")
    for number, old, new in CASES:
        path = judges.lesson_file(number.split(".")[0])
        right = judges.tagged(path.read_text(encoding="utf-8"), "imports", "exercise", "solution")
        [exercise] = [e for e in judges._exercises_of(number.split(".")[0]) if e.number == number]
        head, body = right.rsplit(f"def {exercise.name}(", 1)
        assert old in body, f"the solution of {number} has changed: {old!r} is not in it"
        yield exercise, path.stem, right
        yield exercise, path.stem, f"{head}def {exercise.name}({body.replace(old, new, 1)}"


def verdicts_in_pyodide(given, folder, tmp_path):
    """What in_browser.check says of each (exercise, name of the file, its text)."""
    if shutil.which("node") is None:
        pytest.skip("needs Node.js")  # it runs Pyodide; the tests in Chromium check fewer verdicts
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([(e.number, text, stem, 1) for e, stem, text in given]))
    program = ROOT / "tests/helpers/verdicts.mjs"
    done = subprocess.run(["node", program, folder, cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_judge_can_be_imported_without_ml_dtypes():
    """With the stand-ins of the browser: a constant in bf16, made at import, would end all exercises of a lesson."""
    judges = lesson.load_checks("api")
    numbers = {e.number for path in LESSONS for e in judges._exercises_of(path.stem[:2])}
    lessons = {int(number.split(".")[0]) for number in numbers - set(hook.ELSEWHERE)}
    names = [f"lesson_{number:02d}" for number in sorted(lessons)]
    assert len(names) > 40
    script = f"""
import sys
sys.path.insert(0, {str(hook.SOURCE / "python")!r})
import ml_dtypes
assert isinstance(ml_dtypes.bfloat16, type) and "browser" in ml_dtypes.__file__
from xtrain import lesson
for name in {names}:
    lesson.load_checks(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


@only_slow  # Pyodide judges all exercises that the pages say it can
def test_every_exercise_that_runs_in_the_browser_can_be_passed(folder, tmp_path):
    judges = lesson.load_checks("api")
    given = []
    for path in LESSONS:
        text = path.read_text(encoding="utf-8")
        right = judges.tagged(text, "imports", "exercise", "solution")
        for exercise in judges._exercises_of(path.stem[:2]):
            if exercise.number not in hook.ELSEWHERE:
                given.append((exercise, path.stem, right))
    assert len(given) > 130
    verdicts = verdicts_in_pyodide(given, folder, tmp_path)
    assert not [verdict["text"] for verdict in verdicts if not verdict["passed"]]


@only_slow  # Pyodide starts, and two processes judge twenty attempts
def test_the_verdicts_are_those_of_the_command_line(folder, tmp_path):
    judges = lesson.load_checks("api")
    given = list(attempts())
    verdicts = verdicts_in_pyodide(given, folder, tmp_path)
    for i, ((e, stem, text), verdict) in enumerate(zip(given, verdicts, strict=True)):
        file = Path(f"/my_lessons/{stem}.py")
        imports = judges.tagged(judges.lesson_file(stem[:2]).read_text(encoding="utf-8"), "imports")
        said = judges.judge_file(e, file, text, imports, seed=1, steps=False)
        assert verdict["text"] == str(said)
        assert verdict["passed"] == said.passed == (i % 2 == 0), str(said)
        assert bool(verdict["page"]) == e.kernel


# ----------------------------------------------------------------------------- a page in Chromium
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval'; img-src 'self' data:"
RACE = """@cuda.jit
def reverse_kernel(y_n, x_n):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * 32
    m = min(32, x_n.size - first)
    if t < m:
        tile[t] = x_n[first + t]
    cuda.syncthreads()
    if t < m:
        tile[t] = tile[m - 1 - t]
        y_n[first + t] = tile[t]
"""
RIGHT = RACE.replace("        tile[t] = tile[m - 1 - t]\n", "").replace("= tile[t]\n", "= tile[m - 1 - t]\n")  # fmt: skip


class Handler(http.server.SimpleHTTPRequestHandler):
    """Pages that may load from this server only, also in their workers.

    missing: a path that it does not have now. cut: one that it does not answer, as without a network.
    """

    missing = ""
    cut = ""

    def do_GET(self):
        if self.path == self.cut:
            self.close_connection = True
            return None
        if self.path == self.missing:
            return self.send_error(503)
        return super().do_GET()

    def end_headers(self):
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *arguments): ...


@pytest.fixture(scope="module")
def address(folder):
    """A page with the exercises of lesson 1, as the site's build makes it."""
    path = LESSONS[0]
    pieces = hook.pieces(path.read_text(encoding="utf-8"), 1)
    cell = '<div class="jp-Cell celltag_exercise" id="cell-id=cell-{}"><div class="jp-Cell-inputWrapper"><pre>{}</pre></div></div>'
    cells = [cell.format(i, piece["text"]) for i, piece in enumerate(pieces) if piece["editor"]]
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    style = '<link rel="stylesheet" href="browser/cells.css">'
    html = hook.with_editors(f"<article class='md-typeset'><h1>1</h1>{''.join(cells)}", path)
    (folder.parent / "page.html").write_text(head + style + html, encoding="utf-8")
    handler = functools.partial(Handler, directory=folder.parent)
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()


class Page:
    """The page in Chromium."""

    def __init__(self, browser, address):
        self.browser = browser
        self.address = address
        self.open()
        browser.evaluate("localStorage.clear()")  # of an earlier test
        self.open()

    def open(self, width=1400):
        self.browser.base = self.address
        self.browser.size(width)
        self.browser.evaluate("window.isOld = true")
        self.browser.call("Page.navigate", url=f"{self.address}page.html")
        self.browser.wait("!window.isOld && document.querySelectorAll('.cm-content').length == 3")

    def of(self, i, selector):
        """An expression: the element of exercise i, from 0."""
        return f"document.querySelectorAll('.exercise')[{i}].querySelector('{selector}')"

    def text_of(self, i, selector):
        return f"{self.of(i, selector)}.textContent"

    def text(self, i, selector):
        return self.browser.evaluate(self.text_of(i, selector))

    def write(self, i, text):
        """Replace what is in the editor, as a reader does."""
        self.browser.evaluate(f"{self.of(i, '.cm-content')}.focus()")
        key = dict(key="a", code="KeyA", windowsVirtualKeyCode=65, modifiers=2)
        self.browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.browser.call("Input.dispatchKeyEvent", type="keyUp", **key)
        self.browser.type(text)

    def key(self, key, code, modifiers=0):
        same = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers)
        for kind in ("rawKeyDown", "keyUp"):
            self.browser.call("Input.dispatchKeyEvent", type=kind, **same)

    def focused(self):
        script = "document.activeElement.ariaLabel || document.activeElement.textContent"
        return self.browser.evaluate(script)

    def press(self, i, name):
        buttons = f"[...document.querySelectorAll('.exercise')[{i}].querySelectorAll('button')]"
        self.browser.evaluate(f"{buttons}.find(b => b.textContent == '{name}').click()")

    def output(self, i):
        """Wait for the end of the program. Return what it printed, or the verdict."""
        self.browser.wait(f"{self.of(i, 'button.main')}.ariaDisabled == 'false'", 120)
        return self.text(i, ".output")

    def check(self, i):
        self.press(i, "Check")
        return self.output(i)


@only_slow  # Pyodide starts twice
def test_a_race_is_found_fixed_and_kept(address, browser):
    page = Page(browser, address)
    page.write(2, RACE)
    said = page.check(2)
    assert "data race in reverse_kernel" in said and "01_threads.py:" in said
    browser.evaluate(f"{page.of(2, '.steps')}.open = true")
    browser.wait(f"{page.of(2, 'iframe')}")
    assert "reverse_kernel" in browser.evaluate(f"{page.of(2, 'iframe')}.srcdoc")
    page.write(2, RIGHT)
    assert page.check(2).startswith("1.3 reverse_kernel: correct. 5 cases")

    page.write(0, "while True:\n    print(1)\n")
    page.press(0, "Run")
    browser.wait(f"{page.of(0, '.status')}.textContent.startsWith('Running')")
    page.press(0, "Stop")
    browser.wait(f"{page.of(0, '.status')}.textContent == 'Stopped.'")
    page.write(0, "print(6 * 7)\nlesson.figures\n")
    page.press(0, "Run")
    said = page.output(0)
    assert said.startswith("42\n") and "01_threads.py" in said and "matplotlib" in said
    assert "in_browser.py" not in said

    page.open(390)
    assert browser.evaluate("document.querySelector('.count').textContent").startswith("1 of 3")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert "print(6 * 7)" in page.text(0, ".cm-content")
    assert "tile[m - 1 - t]" in page.text(2, ".cm-content")
    assert not browser.complaints


def test_files_go_to_the_command_line_and_back(address, browser, tmp_path):
    page = Page(browser, address)
    judges = lesson.load_checks("api")
    page.write(2, RIGHT)
    browser.evaluate("import('./browser/storage.js').then(s => (s.note('1.3', true), s.note('2.1', true)))")  # fmt: skip
    script = "import('./browser/storage.js').then(s => s.exported().arrayBuffer()).then(b => [...new Uint8Array(b)])"
    archive = zipfile.ZipFile(io.BytesIO(bytes(browser.evaluate(script))))
    assert archive.testzip() is None
    archive.extractall(tmp_path)
    folder = tmp_path / "my_lessons"
    assert judges.passed(folder) == {"1.3", "2.1"}
    file = folder / "01_threads.py"
    [(number, verdict)] = judges.check_file("1.3", file)
    assert verdict.passed and number == "1.3"

    text = file.read_text(encoding="utf-8")
    text = text.replace("@cuda.jit\n", "import math\n\n\n@cuda.jit\n", 1)
    file.write_text(text.replace("# YOUR CODE", "pass  # mine: é", 1), encoding="utf-8")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "my_lessons/01_threads.py")
        archive.writestr("my_lessons/passed.txt", "1.1\n3.2\n")
    numbers = json.dumps(list(buffer.getvalue()))
    opened = f"s.opened([new File([new Uint8Array({numbers})], 'a.zip')])"
    script = f"import('./browser/storage.js').then(async s => {{ const found = await {opened}; const lost = s.replaced(found); s.imported(found); return lost }})"
    assert browser.evaluate(script) == ["01_threads.py"]  # a text that would be lost: the page asks
    assert browser.evaluate(script) == []
    page.open()
    assert browser.evaluate("document.querySelector('.count').textContent").startswith("2 of 3")
    browser.wait(f"{page.of(0, '.cm-content')}.textContent.includes('pass  # mine: é')")
    joined = "import('./browser/storage.js').then(s => s.exported().text())"
    assert file.read_text(encoding="utf-8") in browser.evaluate(joined)
    assert not browser.complaints


def test_a_damaged_archive_changes_nothing(address, browser):
    page = Page(browser, address)
    page.write(2, RIGHT)
    script = """import('./browser/storage.js').then(async s => {
        const bytes = new Uint8Array(await s.exported().arrayBuffer()), found = [];
        const damaged = [new Uint8Array(3), new Uint8Array(99), bytes.slice(0, 60), bytes.slice(90), bytes.map((b, i) => i == 99 ? b ^ 1 : b)];
        for (const each of damaged) found.push(await s.opened([new File([each], 'a.zip')]).then(() => 'read', e => e.message));
        return [...found, Object.keys(await s.opened([new File([bytes], 'a.zip')])).length];
    })"""
    *messages, files = browser.evaluate(script)
    assert files == 2 and len(messages) == 5
    assert all("not a zip archive, or it is damaged" in message for message in messages), messages


def test_an_archive_for_which_there_is_no_room_changes_nothing(address, browser):
    page = Page(browser, address)
    page.write(2, RIGHT)
    script = """import('./browser/storage.js').then(s => {
        const before = JSON.stringify(localStorage);
        const texts = {'passed.txt': '1.1\\n', '01_threads.py': 'x = 1', '02_memory.py': 'x'.repeat(6e6)};
        try { s.imported(texts) } catch (error) { return [error.message, JSON.stringify(localStorage) == before] }
    })"""
    message, same = browser.evaluate(script)
    assert "storage is full" in message and same


def test_another_tab_of_the_lesson_is_followed(address, browser):
    """A frame of the same page is another tab: what is written in one must not be lost when the other is written in."""
    page = Page(browser, address)
    page.write(0, "mine = 1")
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('iframe'), {src: 'page.html', style: 'width: 900px'}))"
    )
    inner = "document.querySelector('iframe').contentDocument.querySelectorAll('.cm-content')"
    browser.wait(f"document.querySelector('iframe').contentDocument && {inner}.length == 3")
    page.write(1, "mine = 2")
    browser.wait(f"{inner}[1].textContent == 'mine = 2'")
    assert browser.evaluate(f"{inner}[0].textContent") == "mine = 1"
    browser.evaluate("document.querySelector('iframe').contentWindow.eval(\"import('./browser/storage.js').then(s => s.note('1.2', true))\")")  # fmt: skip
    browser.wait("document.querySelector('.count').textContent.startsWith('1 of 3')")
    assert page.text(1, ".cm-content") == "mine = 2"
    assert not browser.complaints


def test_a_lesson_that_has_another_exercise_keeps_the_attempts(address, browser):
    page = Page(browser, address)
    page.write(2, RIGHT)
    kept = "JSON.parse(localStorage['xtrain/file/01_threads'])"
    browser.evaluate(
        f"localStorage['xtrain/file/01_threads'] = JSON.stringify({kept}.toSpliced(1, 1))"
    )
    page.open()
    assert "tile[m - 1 - t]" in page.text(2, ".cm-content")
    assert "# YOUR CODE" in page.text(0, ".cm-content")


def test_what_the_reader_has_not_changed_follows_the_lesson(address, browser):
    """The site is built again with other imports and another text: they would not fit what is kept of the old ones."""
    page = Page(browser, address)
    page.write(2, RIGHT)
    script = """import('./browser/storage.js').then(s => {
        const {pieces} = JSON.parse(document.getElementById('lesson-exercises').textContent);
        const newer = pieces.map(piece => ({...piece, text: '# newer\\n' + piece.text}));
        return s.pieces('01_threads', newer).map(text => text.startsWith('# newer'));
    })"""
    assert browser.evaluate(script) == [True, True, True, False]
    assert "# YOUR CODE" in browser.evaluate(EXPORTED)


@only_slow  # Pyodide starts twice
def test_a_load_that_failed_is_tried_again(address, browser, monkeypatch):
    """Also the one after a stop."""
    page = Page(browser, address)
    block = lambda path: monkeypatch.setattr(Handler, "missing", path)
    page.write(0, "print(6 * 7)")
    block("/browser/numpy.zip")
    page.press(0, "Run")
    assert "numpy.zip: 503" in page.output(0)
    block("")
    page.press(0, "Run")
    assert page.output(0) == "42\n"

    page.write(0, "while True: pass")
    page.press(0, "Run")
    browser.wait(f"{page.of(0, '.status')}.textContent.startsWith('Running')")
    block("/browser/numpy.zip")
    page.press(0, "Stop")
    page.write(0, "print(6 * 7)")
    page.press(0, "Run")
    assert "numpy.zip: 503" in page.output(0)
    block("")
    page.press(0, "Run")
    assert page.output(0) == "42\n"


@only_slow  # Pyodide starts
def test_what_a_program_leaves_behind_does_not_reach_the_next(address, browser):
    """Output without an end of line, in a loop without an end, too; settings of NumPy and of Python."""
    page = Page(browser, address)
    page.write(0, "print('é字', end='')")
    page.press(0, "Run")
    assert page.output(0) == "é字"
    page.write(
        0, "import sys\nnp.seterr(all='raise')\nsys.setrecursionlimit(90)\nsys.stdout = None"
    )
    page.press(0, "Run")
    assert "printed nothing" in page.output(0)
    page.write(0, "print(np.float32(1) / np.float32([0]))")
    page.press(0, "Run")
    assert page.output(0) == "[inf]\n"

    page.write(0, "print('字' * 70_000)")  # its output is cut in the middle of a character
    page.press(0, "Run")
    assert page.output(0).endswith("(The rest of the output is not shown.)\n")
    page.write(0, "print('next')")
    page.press(0, "Run")
    assert page.output(0) == "next\n"

    page.write(0, "while True:\n    print('x', end='')")
    page.press(0, "Run")
    browser.wait(f"{page.text_of(0, '.output')}.includes('The rest of the output')", 60)
    assert len(page.text(0, ".output")) < 201_000
    page.press(0, "Stop")
    browser.wait(f"{page.text_of(0, '.status')} == 'Stopped.'")
    assert not browser.complaints


@only_slow  # Pyodide starts
def test_a_file_that_is_not_python_costs_no_verdict(address, browser):
    """As on the command line: a gap that is being written elsewhere does not undo what has passed."""
    page = Page(browser, address)
    page.write(2, RIGHT)
    assert page.check(2).startswith("1.3 reverse_kernel: correct.")
    page.write(0, "def half(:")
    assert "01_threads.py cannot be read as Python: SyntaxError" in page.check(2)
    assert browser.evaluate("localStorage['xtrain/passed']") == '["1.3"]'
    assert not browser.evaluate(f"{page.of(2, '.mark')}.hidden")


@only_slow  # Pyodide starts
def test_the_keyboard_alone(address, browser):
    page = Page(browser, address)
    page.write(2, RIGHT)
    page.key("Enter", 13, modifiers=2)  # Control
    assert page.output(2).startswith("1.3 reverse_kernel: correct.")
    page.key("Tab", 9)  # indents
    assert page.focused() == "Exercise 1.3"
    page.key("Escape", 27)
    page.key("Tab", 9)
    assert page.focused() == "Run"
    page.key("Tab", 9)
    assert page.focused() == "Check"
    page.key(" ", 32)
    for _ in range(9):  # while the first one runs
        page.key(" ", 32)
    assert page.output(2).startswith("1.3 reverse_kernel: correct.")
    assert page.focused() == "Check"
    page.key("Tab", 9)
    page.key("Tab", 9)
    assert page.focused() == "Exercise 1.3: output"
    assert not browser.complaints


CLOSED = (
    "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('closed') }})"
)
EXPORTED = "import('./browser/storage.js').then(s => s.exported().text())"


def test_without_storage_a_page_works_and_saves_to_a_file(address, browser):
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=CLOSED)
    try:
        page = Page.__new__(Page)
        page.browser, page.address = browser, address
        page.open()
        assert browser.evaluate("document.querySelector('.count').textContent").startswith("0 of 3")
        page.write(2, RIGHT)
        assert "storage is full or closed" in browser.evaluate(
            "document.querySelector('.unkept').textContent"
        )
        assert "y_n[first + t] = tile[m - 1 - t]" in browser.evaluate(EXPORTED)
        opened = "import('./browser/storage.js').then(s => s.imported({'01_threads.py': 'x = 1'})).catch(e => e.message)"
        assert "Nothing was opened" in browser.evaluate(opened)
        assert "y_n[first + t] = tile[m - 1 - t]" in browser.evaluate(EXPORTED)
        assert not browser.complaints
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])
    browser.dialogs.clear()
    browser.open("about:blank")
    assert browser.dialogs == ["beforeunload"]


FILL = """(() => {
    let text = "", n = 2 ** 22;
    while (n >= 1) try { localStorage.rest = text + "x".repeat(n); text = localStorage.rest } catch { n >>= 1 }
})()"""


def test_a_full_storage_keeps_the_text_in_the_page(address, browser):
    page = Page(browser, address)
    page.write(0, "kept = 1")
    browser.evaluate(FILL)
    page.write(2, "new = 2  # " + "more " * 500)
    kept = "localStorage['xtrain/file/01_threads']"
    assert not browser.evaluate(f"{kept}.includes('new = 2')")
    warning = "document.querySelector('.unkept').textContent"
    assert "Save to a file" in browser.evaluate(warning)
    exported = browser.evaluate(EXPORTED)
    assert "kept = 1" in exported and "new = 2" in exported
    browser.evaluate("localStorage.removeItem('rest')")
    page.write(2, "new = 3")
    assert browser.evaluate(warning) == ""
    assert browser.evaluate(f"{kept}.includes('new = 3')")
    assert not browser.evaluate("!dispatchEvent(new Event('beforeunload', {cancelable: true}))")


def test_a_storage_that_something_else_has_written_to(address, browser):
    page = Page(browser, address)
    for passed, file in (("5", "[1, 2, 3, 4]"), ('"1.1"', "{}"), ("[3]", "5"), ("{", "{")):
        script = f"localStorage['xtrain/passed'] = {passed!r}; localStorage['xtrain/file/01_threads'] = {file!r}"
        browser.evaluate(script)
        page.open()
        assert "# YOUR CODE" in page.text(0, ".cm-content")
        assert browser.evaluate("document.querySelector('.count').textContent").startswith("0 of 3")
        assert "passed.txt" in browser.evaluate(EXPORTED)
    assert not browser.complaints


def test_a_file_that_is_not_text_changes_nothing(address, browser):
    Page(browser, address)
    script = "import('./browser/storage.js').then(s => s.opened([new File([new Uint8Array([%s])], '%s')])).then(o => JSON.stringify(o), e => e.message)"
    said = browser.evaluate(script % ("0xff, 0xfe, 0x41, 0", "01_threads.py"))
    assert said == "01_threads.py is not text in UTF-8: save it as UTF-8, and open it again."
    assert (
        browser.evaluate(script % ("65, 13, 10, 66, 13, 67", "01_threads.py"))
        == '{"01_threads.py":"A\\nB\\nC"}'
    )
    assert (
        browser.evaluate(script % ("65", "notes.md")) == "{}"
    )  # the page says which files it reads


def test_a_page_that_the_back_button_shows_again_is_up_to_date(address, browser):
    """It has not seen what other pages saved since it was left, and would overwrite it with its older text."""
    page = Page(browser, address)
    page.write(0, "mine = 1")
    kept = "localStorage['xtrain/file/01_threads']"
    browser.evaluate(f"{kept} = {kept}.replace('mine = 1', 'mine = 2')")
    browser.evaluate("localStorage['xtrain/passed'] = JSON.stringify(['1.2'])")
    browser.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    assert page.text(0, ".cm-content") == "mine = 2"
    assert browser.evaluate("document.querySelector('.count').textContent").startswith("1 of 3")
    page.write(1, "other = 1")
    assert browser.evaluate(f"{kept}.includes('mine = 2')")


@only_slow  # Pyodide starts
def test_without_a_network_one_sentence_says_what_to_do(address, browser, monkeypatch):
    """The page stays usable: it tries again at the next press."""
    page = Page(browser, address)
    page.write(0, "print(6 * 7)")
    for path in ("/browser/xtrain.zip", "/browser/worker.js", "/browser/pyodide/pyodide.asm.wasm"):
        monkeypatch.setattr(Handler, "cut", path)
        page.press(0, "Run")
        said = page.output(0)
        assert said.startswith("Python could not be loaded (") and "press the button again" in said
    monkeypatch.setattr(Handler, "cut", "")
    page.press(0, "Run")
    assert page.output(0) == "42\n"


RECURSION = """import('./browser/runtime.js').then(async ({ start }) => {
  const runtime = await start(), end = "def learning_rate(*a, **k):\\n    return learning_rate(*a, **k)\\n";
  const { passed, text } = await runtime.check("8.2", end, { file: "08_training", seed: 1 });
  return [passed, text, (await (await start()).run("print(6 * 7)")).ok];
})"""


@only_slow  # Pyodide starts twice
def test_recursion_without_an_end_is_named(address, browser):
    """It overflows the stack of the browser before Python counts a thousand calls: Python is gone, and starts again."""
    page = Page(browser, address)
    passed, text, runs = browser.evaluate(RECURSION)
    assert not passed and "RecursionError" in text
    assert runs
    page.write(0, "def f(n):\n    return f(n + 1)\n\n\nf(0)")
    page.press(0, "Run")
    assert "RecursionError" in page.output(0)
