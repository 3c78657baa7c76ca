"""The chat page: its policy, and in headless Chromium its answers, keys, panels and how it treats hostile text."""

import asyncio
import base64
import configparser
import hashlib
import json
import os
import re
import threading
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

from starlette.applications import Starlette  # noqa: E402
from starlette.responses import JSONResponse, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402
from twins import random_model, small  # noqa: E402
from waiting import until  # noqa: E402

from xtrain import Engine  # noqa: E402
from xtrain.data.tokenizer import Tokenizer  # noqa: E402
from xtrain.server import page  # noqa: E402
from xtrain.server.app import create_app  # noqa: E402
from xtrain.serving import pretrained  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHOTS = os.environ.get("XTRAIN_SHOTS")  # a folder: the tests write pictures of the page into it
HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 1">
[a](javascript:window.hit=1) [b](data:text/html,<script>1</script>) [c](https://example.org/?q=1 "t") ![d](https://example.org/x.png)
<svg onload=window.hit=1> **<b onclick=1>bold</b>** `<i>` &lt;u&gt;

| <img src=x onerror=window.hit=1> | b |
| --- | --- |
| [x](JavaScript:window.hit=1) | c |

```html"><script>window.hit=1</script>
<script>window.hit = 1</script>
"""
PROSE = """## Mean of squares

RMSNorm divides by the *root mean square*; **no mean** is subtracted. In `xtrain` it is one kernel:

```python
def rmsnorm(x, w, eps=1e-5):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * r * w  # größe
```

1. The sum of squares is a block reduction.
2. The result is kept for the backward pass:
   - `rstd`, one number per row
   - 1/C of the memory

| pass | reads | writes |
| :--- | ---: | ---: |
| forward | x, w | y, rstd |
| backward | x, w, dy | dx, dw |

> A bandwidth-bound kernel is as fast as its memory.
"""


# ----------------------------------------------------------------------------- without a browser
def test_the_policy_names_what_is_in_the_file():
    html = page.FILE.read_text()
    answer = TestClient(Starlette(routes=[page.route()])).get("/")
    assert answer.status_code == 200 and answer.text == html
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"""(src|href)=["'](?!data:,)|@import|url\(|\son\w+=|\sstyle=""", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", html)


def test_the_wheel_has_the_page():
    root = Path(__file__).parents[2]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    assert setup["options.package_data"]["xtrain.server"] == page.FILE.name
    assert page.FILE.parent == root / "xtrain/server"


# ----------------------------------------------------------------------------- in a browser
class Running:
    """An application in a thread of this process."""

    def __init__(self, app):
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def close(self):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


class Script:
    """A server that answers every message with `text`, in small pieces; `failures` answers fail first. -> bodies"""

    def __init__(self):
        self.text, self.failures, self.bodies, self.open_end = "", 0, [], False
        self.deltas = []  # in place of the text, if there are some
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        self.app = Starlette(routes=[page.route(), chat, Route("/v1/models", self.models)])

    async def models(self, http):
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def chat(self, http):
        self.bodies.append(await http.json())
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "the queue is full: try again later"}}, 429)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self):
        deltas = self.deltas or [
            {"content": self.text[i : i + 7]} for i in range(0, len(self.text), 7)
        ]
        events = [{"choices": [{"delta": delta}]} for delta in deltas]
        data = "".join(f"data: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events).encode()
        for i in range(0, len(data), 501):  # pieces that cut events, and characters, anywhere
            yield data[i : i + 501]
            await asyncio.sleep(0.002)
        while self.open_end:
            await asyncio.sleep(0.01)
        yield b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\ndata: [DONE]\n\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(["def f(x):\n    return x + größe\n" * 50], 290)
    config = small(vocab_size=tokenizer.vocab_size, max_seq_len=256, head_dim=16)
    random_model(config, device="cpu").save_pretrained(folder, tokenizer)
    return folder


@pytest.fixture
def scripted():
    script = Script()
    running = Running(script.app)
    script.url = running.url
    yield script
    script.open_end = False
    running.close()


def say(browser, text):
    browser.evaluate("$('message').focus()")
    browser.type(text)
    browser.press("Enter")


def shot(browser, name):
    if SHOTS:
        browser.picture(Path(SHOTS) / f"{name}.png")


DONE = "!running && turns.length == {} && turns.at(-1).again"
WIDE = """document.documentElement.scrollWidth > innerWidth || [...document.querySelectorAll('header, header *, main, form *')].some(
  e => e.getBoundingClientRect().right > innerWidth + 1)"""


def test_hostile_text_is_only_text(browser, scripted):
    scripted.text = HOSTILE
    browser.open(scripted.url)
    say(browser, HOSTILE)
    browser.wait(DONE.format(1))
    assert browser.evaluate("turns[0].text") == HOSTILE
    assert browser.evaluate("window.hit") is None
    wrong = "turns[0].element.querySelectorAll('script, img, svg, b, i, u, [onclick], [onerror]')"
    assert browser.evaluate(wrong + ".length") == 0
    links = "[...turns[0].element.querySelectorAll('a')].map(a => [a.protocol, a.rel])"
    assert browser.evaluate(links) == [["https:", "noopener noreferrer"]] * 2
    code = browser.evaluate("turns[0].element.querySelector('pre').textContent")
    assert code == "<script>window.hit = 1</script>\n"  # the fence is not closed
    blocked = (
        "(() => { try { document.body.innerHTML = 'x'; return false } catch { return true } })()"
    )
    assert browser.evaluate(blocked), "the policy forbids HTML from text"
    assert all("Trusted" in text for text in browser.complaints), browser.complaints


def test_markdown_while_it_streams(browser, scripted):
    """Every prefix has the blocks of the whole text; nothing is slow or lost, however odd the text is."""
    browser.open(scripted.url)
    browser.evaluate(f"window.prose = {json.dumps(PROSE)}")
    shape = """(() => { const whole = make('div'), grown = make('div'); showMarkdown(whole, prose);
      for (let n = 0; n <= prose.length; n++) showMarkdown(grown, prose.slice(0, n));
      return [whole.isEqualNode(grown), [...whole.children].map(e => e.tagName).join(' '), whole.querySelectorAll('li').length,
        whole.querySelector('code').textContent, whole.querySelectorAll('td, th').length, whole.querySelector('ol ul') !== null] })()"""
    assert browser.evaluate(shape) == [
        True, "H4 P DIV OL DIV BLOCKQUOTE", 4, "xtrain", 9, True
    ]  # fmt: skip
    odd = """(() => { const start = performance.now(), out = make('div');
      for (const part of ['$', '$$\\n', '$a', '\\\\(', '\\\\[', '\\\\frac{', '$x^{', '[', '**', '*a', '_', '`', '``a`', '> ', '- ', '  - a\\n', '|a', '[a](', '~~~\\n', '1. ', 'https://', '\\\\', '# ', '\\n', 'a|b\\n-|-\\n'])
        showMarkdown(out, part.repeat(8000));
      let seed = 1; const random = n => (seed = seed * 16807 % 2147483647) % n;
      for (let k = 0; k < 300; k++) showMarkdown(out, Array.from({length: 60}, () => '*_`~[]()>#-1. |\\\\\\n ab!h$^{}'[random(28)]).join(''));
      return performance.now() - start })()"""
    assert browser.evaluate(odd) < 10_000
    plain = "(() => { const e = make('div'); showMarkdown(e, 'a_b_c 2*3*4 ** x ` y'); return e.textContent })()"
    assert browser.evaluate(plain) == "a_b_c 234 ** x ` y"
    assert browser.complaints == []


def test_a_conversation_by_keys(browser, scripted):
    """Send, new line, stop, regenerate, retry and new chat; wide and narrow, light and dark."""
    scripted.text, scripted.open_end = PROSE, True
    browser.open(scripted.url)
    browser.evaluate("localStorage.clear()")
    assert browser.evaluate("document.activeElement.id") == "message"
    browser.type("What is RMSNorm?")
    browser.press("Enter", modifiers=8)
    browser.type("Be short.")
    browser.press("Enter")
    browser.wait(f"turns.length && turns[0].text.length == {len(PROSE)}")
    browser.wait("turns[0].answer.querySelector('blockquote')")
    assert browser.evaluate("$('send').hidden && !$('stop').hidden")
    assert browser.evaluate("$('turns').getAttribute('aria-busy')") == "true"
    shot(browser, "desktop_streaming")
    browser.press("Escape")
    browser.wait(DONE.format(1))
    assert "stopped" in browser.evaluate("turns[0].meta.textContent")
    assert scripted.bodies[0]["messages"] == [
        {"role": "user", "content": "What is RMSNorm?\nBe short."}
    ]
    scripted.open_end = False
    browser.evaluate("turns[0].again.focus()")
    browser.press("Enter")  # regenerate
    browser.wait(DONE.format(1) + " && turns[0].meta.textContent.includes('9 tokens')")
    assert scripted.bodies[1] == scripted.bodies[0]
    scripted.failures = 1
    browser.evaluate("$('system').value = 'Rhyme.'; $('seed').value = '5'")
    say(browser, "And LayerNorm?")
    browser.wait(DONE.format(2))
    failed = browser.evaluate("turns[1].element.querySelector('.failed').textContent")
    assert failed == "The queue is full: try again later."
    scripted.failures = 0
    say(browser, "And BatchNorm?")  # a turn without an answer is not part of the conversation
    browser.wait(DONE.format(3) + " && turns[2].text")
    asked = [m["content"] for m in scripted.bodies[-1]["messages"] if m["role"] == "user"]
    assert asked == ["What is RMSNorm?\nBe short.", "And BatchNorm?"]
    browser.evaluate("turns[1].again.click()")
    browser.wait(DONE.format(2) + " && turns[1].text")
    assert browser.evaluate("document.querySelectorAll('.failed').length") == 0
    body = scripted.bodies[-1]
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["seed"] == 5
    assert body.keys() == {
        "stream",
        "stream_options",
        "seed",
        "messages",
    }  # else the server's defaults
    for width in (1280, 390):
        browser.size(width, 844)
        for _ in range(2):
            theme = browser.evaluate("document.documentElement.dataset.theme")
            assert not browser.evaluate(WIDE)
            shot(browser, f"{width}_{theme}")
            browser.evaluate("$('theme').click()")
            assert browser.evaluate("document.documentElement.dataset.theme") != theme
    browser.evaluate("$('show-settings').click()")
    assert not browser.evaluate(WIDE)
    covers = "(e => [e.left, e.right, e.top == $('scroll').getBoundingClientRect().top])($('side').getBoundingClientRect())"
    assert browser.evaluate(covers) == [0, 390, True]
    shot(browser, "390_settings")
    browser.press("Escape")
    assert browser.evaluate("$('side').hidden && document.activeElement.id") == "show-settings"
    assert "scripted" in browser.evaluate("$('model').innerText")  # on a phone, too
    browser.evaluate("$('show-settings').click(); $('settings').querySelector('h2 button').click()")
    assert browser.evaluate("$('side').hidden && document.activeElement.id") == "show-settings"
    browser.evaluate("$('new').click()")
    assert browser.evaluate("turns.length == 0 && !document.querySelector('.turn')")
    assert all("429" in text for text in browser.complaints), browser.complaints


TALKS = "JSON.parse(localStorage.getItem('talks')).map(t => t.turns.map(u => [u.asked, u.text]))"
BUTTON = "[...{}.querySelectorAll('button')].find(b => b.textContent == '{}').click()"


def test_conversations_are_edited_and_kept(browser, scripted):
    """Editing a question, or answering an early one again, continues in a new conversation; the old one is kept."""
    browser.open(scripted.url)
    browser.evaluate("localStorage.clear()")
    for number in (1, 2, 3):
        scripted.text = f"answer {number}"
        say(browser, f"question {number}")
        browser.wait(DONE.format(number))
    whole = [[f"question {i}", f"answer {i}"] for i in (1, 2, 3)]
    assert browser.evaluate(TALKS) == [whole]
    scripted.text = "other"
    browser.evaluate(BUTTON.format("turns[1].question", "Edit"))
    assert browser.evaluate("document.activeElement.value") == "question 2"
    browser.press("Escape")
    assert browser.evaluate("turns[1].question.textContent") == "question 2Edit"
    browser.evaluate(BUTTON.format("turns[1].question", "Edit"))
    browser.type("!")
    browser.press("Enter")
    browser.wait(DONE.format(2))
    asked = [m["content"] for m in scripted.bodies[-1]["messages"]]
    assert asked[:2] == ["question 1", "answer 1"] and "!" in asked[2]
    browser.evaluate("turns[0].again.click()")
    browser.wait(DONE.format(1) + " && turns[0].text == 'other'")
    assert browser.evaluate(TALKS) == [
        [["question 1", "other"]], [["question 1", "answer 1"], [asked[2], "other"]], whole
    ]  # fmt: skip
    copied = "navigator.clipboard.writeText = async text => { window.copied = text }"
    browser.evaluate(copied + ";" + BUTTON.format("turns[0].meta", "Copy"))
    assert browser.evaluate("window.copied") == "other"
    browser.open(scripted.url)
    browser.wait("!turns.length")
    assert "this browser's storage" in browser.evaluate("$('empty').textContent")
    browser.evaluate("$('show-chats').click()")
    assert browser.evaluate("$('talks').children.length") == 3
    shot(browser, "chats")
    browser.evaluate("$('talks').children[2].firstChild.click()")
    assert browser.evaluate("turns.map(t => t.text)") == ["answer 1", "answer 2", "answer 3"]
    scripted.text = "answer 4"
    say(browser, "question 4")
    browser.wait(DONE.format(4))
    assert len(scripted.bodies[-1]["messages"]) == 7 and len(browser.evaluate(TALKS)[0]) == 4
    browser.evaluate(BUTTON.format("$('talks').children[1]", "Delete"))
    assert len(browser.evaluate(TALKS)) == 2
    full = """(() => { const set = Storage.prototype.setItem;
      Storage.prototype.setItem = function(n, v) { if (v.length > 560) throw new DOMException("", "QuotaExceededError"); set.call(this, n, v) };
      save(); Storage.prototype.setItem = set })()"""
    browser.evaluate(full)  # the oldest one makes room
    assert len(browser.evaluate(TALKS)) == 1
    browser.evaluate("$('forget').click()")
    assert browser.evaluate(TALKS) == [] and browser.complaints == []


def test_thinking_and_tools(browser, scripted):
    """Reasoning is folded, calls are shown, and their results are sent back."""
    browser.open(scripted.url)
    browser.evaluate("localStorage.clear()")
    function = {"name": "weather", "arguments": ""}
    scripted.deltas = [
        {"reasoning_content": "Hm "}, {"reasoning_content": "<b>."}, {"content": "I ask."},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Bern"}'}}]},
    ]  # fmt: skip
    browser.evaluate("$('tools').value = '{'; checkTools()")
    say(browser, "x")
    assert browser.evaluate("!turns.length && !$('settings').hidden && !$('tools').checkValidity()")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    browser.evaluate(f"$('tools').value = {json.dumps(json.dumps(tools))}; checkTools()")
    browser.evaluate("closePanel('settings'); $('write').requestSubmit()")
    browser.wait(DONE.format(1))
    assert scripted.bodies[0]["tools"] == tools
    assert browser.evaluate("turns[0].thoughts.lastChild.textContent") == "Hm <b>."
    assert browser.evaluate("!turns[0].thoughts.open && !turns[0].thoughts.hidden")
    assert browser.evaluate("turns[0].called.textContent") == 'weather(…)Copy{"city": "Bern"}'
    shot(browser, "tools")
    scripted.deltas = [{"content": "Rain."}]
    browser.evaluate("turns[0].element.querySelector('.results textarea').value = 'rain'")
    browser.evaluate("turns[0].element.querySelector('.results').requestSubmit()")
    browser.wait(DONE.format(2))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}  # fmt: skip
    assert scripted.bodies[-1]["messages"] == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm <b>.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    browser.open(scripted.url)
    browser.evaluate("openTalk(stored()[0].id)")
    assert browser.evaluate("turns.map(t => t.text)") == ["I ask.", "Rain."]
    assert browser.evaluate("turns[0].called.childNodes.length") == 1
    assert browser.complaints == []


MATHS = {  # source: what the elements of its MathML are, without mrow
    r"a_1^2 + \frac{x}{2}": "msubsup mi mn mn mo mfrac mi mn",
    r"\sqrt[3]{x^{n+1}}": "mroot msup mi mi mo mn mn",
    r"\sum_{i=1}^n \alpha_i": "munderover mo mi mo mn mi msub mi mi",
    r"\left( \mathbb{R} \right]": "mo mi mo",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": "mo mtable mtr mtd mn mtd mn mtr mtd mn mtd mn mo",
    r"\text{if } f'(x) \le \hat{y}": "mtext msup mi mo mo mi mo mo mover mi mo",
    r"\unknown{x}": "mtext mi",
    r"{{x": "mi",
    r"\frac": "mfrac",
    r"x^": "msup mi",
    r"} & \\": "mo mo mtext",
}


def test_maths_and_code(browser, scripted):
    browser.open(scripted.url)
    tags = "[...maths({}, true).querySelectorAll('*')].map(e => e.tagName).filter(t => t != 'mrow').join(' ')"
    for source, expected in MATHS.items():
        assert browser.evaluate(tags.format(json.dumps(source))) == expected, source
    assert browser.evaluate("maths('{'.repeat(9000)).tagName") == "CODE"
    assert browser.evaluate(r"maths('\\mathbb{R}\\mathbf{a}\\beta').textContent") == "ℝ𝐚β"
    text = "Costs $5 and $6. Let $x^2$ be \\(y\\):\n$$\nz = 1\n$$\nand $$q$$ end\n\\[ w \\] done\n\n$$ open"
    shown = "(() => { const e = make('div'); showMarkdown(e, %s); return %s })()"
    kinds = "[...e.querySelectorAll('math')].map(m => [m.textContent, m.getAttribute('display')])"
    assert browser.evaluate(shown % (json.dumps(text), kinds)) == [
        ["x2", None], ["y", None], ["z=1", "block"], ["q", None], ["w", "block"]
    ]  # fmt: skip
    plain = browser.evaluate(shown % (json.dumps(text), "e.textContent"))
    assert "Costs $5 and $6." in plain and plain.endswith("$$ open") and "done" in plain
    code = '```python\ndef f(x):  # größe <b>\n    return "a\\"b" + 1.5\n```\n```\ndef\n```'
    spans = "[...e.querySelectorAll('code span')].map(s => [s.className, s.textContent])"
    assert browser.evaluate(shown % (json.dumps(code), spans)) == [
        ["word", "def"], ["comment", "# größe <b>"], ["word", "return"], ["string", '"a\\"b"'],
        ["number", "1.5"],
    ]  # fmt: skip
    whole = browser.evaluate(shown % (json.dumps(code), "e.querySelector('pre').textContent"))
    assert whole == code.split("\n", 1)[1].split("\n```")[0]
    prose = r"Softmax: $p_i = \frac{e^{x_i}}{\sum_j e^{x_j}}$, and $$\nabla_x L = \left(\frac{\partial L}{\partial y}\right)^\top W$$"
    scripted.text = PROSE + prose
    say(browser, "Show it")
    browser.wait(DONE.format(1))
    shot(browser, "maths")
    assert browser.complaints == []


def test_an_engine_a_key_and_a_model_without_a_template(browser, folder):
    """The real server: it asks for a key, continues texts, frees the slot of a stopped answer, and shows its figures."""
    p = pretrained.load(folder, "cpu")
    engine = Engine(p.model, 2, 256, batch_invariant=True)
    running = Running(create_app(engine, p, "tiny", "secret"))
    try:
        browser.open(running.url)
        browser.evaluate("localStorage.clear(); sessionStorage.clear()")
        browser.complaints.clear()
        browser.open(running.url)
        browser.wait("document.activeElement.id == 'key'")
        say(browser, "def f")
        browser.wait(DONE.format(1))
        assert "API key" in browser.evaluate(
            "turns[0].element.querySelector('.failed').textContent"
        )
        browser.evaluate("$('key').focus()")
        browser.type("secret")
        browser.press("Tab")
        browser.wait("$('model').textContent == 'tiny'")
        assert browser.evaluate("JSON.stringify(localStorage).includes('secret')") is False
        browser.evaluate(
            "$('seed').value = '3'; $('max_tokens').value = '12'; turns[0].again.click()"
        )
        browser.wait(DONE.format(1) + " && !turns[0].element.querySelector('.failed')")
        assert browser.evaluate(
            "!$('note').hidden && $('note').textContent.includes('no chat template')"
        )
        body = {"prompt": "def f", "max_tokens": 12, "seed": 3}
        head = {"Authorization": "Bearer secret"}
        answer = httpx.post(running.url + "v1/completions", json=body, headers=head).json()
        assert browser.evaluate("turns[0].text") == answer["choices"][0]["text"]
        browser.evaluate("$('max_tokens').value = '240'; $('show-engine').click()")
        browser.wait("$('figure-slots').textContent.includes('of 2 slots')")
        say(browser, "def g")
        browser.wait("turns.length == 2 && turns[1].text")
        browser.press("Escape")
        until(lambda: not engine.scheduler.unfinished and len(engine.scheduler.free_slots) == 2)
        browser.wait(DONE.format(2))
        browser.wait("$('figure-speed').values?.length > 2")
        assert browser.evaluate("$('figure-blocks').querySelector('b').textContent").endswith(
            f"of {engine.scheduler.pool.size}"
        )
        assert browser.evaluate("$('engine-error').hidden")
        shot(browser, "engine")
        browser.size(390, 844)
        browser.evaluate("$('show-settings').click()")
        assert not browser.evaluate(WIDE)
        shot(browser, "390_engine")
        assert all("401" in t or "400" in t for t in browser.complaints), browser.complaints
    finally:
        running.close()
