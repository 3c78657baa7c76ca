"""Check every page of the built site in headless Chromium, as a reader sees it.

    mkdocs build --strict -d /tmp/site
    pip install websocket-client && python lessons/tools/browse.py /tmp/site [--pages PAGE ...] [--shots FOLDER PAGE ...]

At desktop and at phone width, each page must have no console errors or warnings, no requests to other sites, no failed
requests, no broken images, no content that is wider than the screen and does not scroll, no formulas left as text, and no
figure whose letters are too small to read. The same holds for the pages in frames. On a desktop no formula and no source
of the library scrolls. Every link to a page of the site, and to an anchor in it, must lead there. The search must find a word.
Exit code: 1 if a check fails. Starts `chromium` (or $CHROMIUM) with a temporary profile.
--pages: check only these.  --shots: write screenshots of these pages, at both widths.
"""

import argparse
import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

WIDTHS = {"desktop": 1400, "phone": 390}  # pixels
HEIGHT, TALLEST = 900, 12000
WORD = "deadlock"  # the search must find it
LOOK = """(() => {
  const scrolls = e => { for (let p = e.parentElement; p; p = p.parentElement)
    if (getComputedStyle(p).overflowX != 'visible') return true; return false };
  const content = document.querySelector('.md-content');
  if (!content) return ['the page has no content'];
  const found = [];
  for (const e of content.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > innerWidth + 2 && !scrolls(e)) found.push('too wide: ' + e.tagName + ' ' + e.className);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push('the page scrolls sideways');
  const texts = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const t = texts.currentNode;
    if (t.parentElement.closest('pre,code,script,style,textarea,.clipboard-copy-txt')) continue;
    if (/\\$[^$\\s][^$]*\\$|\\\\[a-z]{3,}/.test(t.data)) found.push('formula as text: ' + t.data.trim().slice(0, 80));
  }
  for (const e of content.querySelectorAll('math[display=block], [class~="library-source"], .doc pre > code'))
    if (innerWidth > 1300 && e.scrollWidth > e.clientWidth + 1 && e.clientWidth) found.push('scrolls: ' + e.textContent.slice(0, 80));
  for (const e of content.querySelectorAll('img[style*="--width"], svg.chart')) {  // letters of 12.5 pixels in a figure, of 12 in a chart
    const wide = e.viewBox ? e.viewBox.baseVal.width : e.naturalWidth, shown = e.getBoundingClientRect().width;
    if (shown && shown < 0.72 * wide) found.push(`too small: a figure ${Math.round(shown)} of ${wide} pixels wide`);
  }
  for (const e of content.querySelectorAll('[class~="doc-label"] code'))
    if (parseFloat(getComputedStyle(e).fontSize) < SMALLEST) found.push('too small: ' + e.textContent);
  for (const page of [document, ...[...document.querySelectorAll('iframe')].map(f => f.contentDocument)]) {
    const view = page.defaultView, root = page.documentElement;
    if (page != document && root.scrollWidth > view.innerWidth) found.push('a frame scrolls sideways: ' + page.title);
    for (const t of page.querySelectorAll('svg text')) {
      const size = t.getScreenCTM().a * parseFloat(view.getComputedStyle(t).fontSize);
      if (t.getBoundingClientRect().width && size < SMALLEST) found.push(`too small: ${size.toFixed(1)} pixels: ${t.textContent}`);
    }
    for (const i of page.images) if (i.complete && !i.naturalWidth) found.push('no picture: ' + i.src);
  }
  return found.slice(0, 5);
})()""".replace("SMALLEST", "9")  # pixels of a letter
LINKS = """({anchors: [...document.querySelectorAll('[id]')].map(e => e.id),
  links: [...new Set([...document.querySelectorAll('a[href]')].map(a => a.href))]})"""
SEARCH = """(() => { const i = document.querySelector('.md-search__input'); i.focus(); i.value = '%s';
  for (const name of ['keyup', 'input']) i.dispatchEvent(new Event(name, {bubbles: true})) })()"""
RESULTS = "document.querySelectorAll('.md-search-result__item').length"


class Browser:
    """Chromium, controlled through its DevTools protocol."""

    def __init__(self):
        import websocket

        program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chrome")
        if not program:
            raise SystemExit("chromium was not found: install it, or set $CHROMIUM to its path")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        options += [f"--user-data-dir={self.profile.name}", "--remote-allow-origins=*"]
        silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen([program, *options, "about:blank"], **silent)
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tab = next(t for t in json.load(answer) if t["type"] == "page")
        self.socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=120)
        self.number, self.events = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _port(self):
        file, until = Path(self.profile.name) / "DevToolsActivePort", time.monotonic() + 60
        while not (file.exists() and file.read_text().strip()):
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit("chromium did not start")
            time.sleep(0.1)
        return file.read_text().split()[0]

    def call(self, method, **parameters):
        """Send a command. -> the browser's answer. Events that arrive before it go to self.events."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            got = json.loads(self.socket.recv())
            if got.get("id") == message["id"]:
                return got.get("result", {})
            self.events.append(got)

    def evaluate(self, script):
        """-> the value of a JavaScript expression"""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer.get("result", {}).get("value")

    def wait(self, script, seconds=60):
        """Wait until the script is true. -> False on timeout"""
        until = time.monotonic() + seconds
        while not self.evaluate(script):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def size(self, width, height=HEIGHT):
        metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, url):
        """Load a page and wait until it is complete."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        here = json.dumps(url)
        self.wait(f"location.href == {here} && document.readyState == 'complete'")
        time.sleep(0.3)  # scripts that run after loading
        self.evaluate("1")

    def picture(self, width, file):
        """Write a screenshot of the whole page as PNG."""
        height = min(self.evaluate("document.documentElement.scrollHeight"), TALLEST)
        self.size(width, height)
        time.sleep(0.3)
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
        self.size(width)

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.profile.cleanup()


def complaints(events, base):
    """-> the errors, warnings and unexpected requests among the events"""
    for event in events:
        method, about = event["method"], event.get("params", {})
        if method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            yield f"console: {about['entry']['text']} {about['entry'].get('url', '')}"
        elif method == "Runtime.exceptionThrown":
            yield f"exception: {about['exceptionDetails'].get('exception', {}).get('description')}"
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            yield f"console: {[a.get('value') for a in about['args']]}"
        elif method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith((base, "data:", "blob:")):
                yield f"request to {url}"
        elif method == "Network.responseReceived" and about["response"]["status"] >= 400:
            yield f"{about['response']['status']} for {about['response']['url']}"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def broken(base, every, found):
    """-> (page, link) where a link leads to no file of the site, or to no anchor of a page that was opened

    every: the files of the site. found: {page: what LINKS returned}
    """
    anchors = {page: {*about["anchors"]} for page, about in found.items()}
    for page, about in found.items():
        for link in about["links"]:
            if link.startswith(base):
                file, _, anchor = map(urllib.parse.unquote, link[len(base) :].partition("#"))
                file = file or "index.html"
                if file not in every or (anchor and anchor not in anchors.get(file, {anchor})):
                    yield page, link[len(base) :]


def look(browser, pages, base, shots, folder, every):
    """Check these pages at every width, their links, and the search. -> the number of failures"""
    wrong, links = 0, {}
    for name, width in WIDTHS.items():
        browser.size(width)
        for page in pages:
            browser.open(base + page)
            found = [*complaints(browser.events, base), *browser.evaluate(LOOK)]
            if found:
                wrong += 1
                print(f"{page} ({name})", *found, sep="\n    ", flush=True)
            links[page] = browser.evaluate(LINKS)
            if page in shots:
                browser.picture(width, folder / f"{name}_{page[:-5].replace('/', '_')}.png")
    for page, link in broken(base, every, links):
        wrong += 1
        print(f"{page} has a link that leads nowhere: {link}")
    browser.size(WIDTHS["desktop"])
    browser.open(f"{base}index.html")
    browser.evaluate(SEARCH % WORD)
    if not browser.wait(f"{RESULTS} > 0"):
        wrong += 1
        print(f"the search does not find {WORD!r}")
    print(f"{len(pages)} pages, {len(WIDTHS)} widths, links, the search: {wrong} failures")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", nargs="+", default=[], metavar="FOLDER PAGE")
    parser.add_argument("--pages", nargs="+", default=[], metavar="PAGE")
    options = parser.parse_args()
    if not (options.site / "index.html").is_file():
        parser.error(f"{options.site} contains no site: mkdocs build --strict -d {options.site}")
    files = {p.relative_to(options.site).as_posix() for p in options.site.rglob("*") if p.is_file()}
    every = sorted(file for file in files if file.endswith(".html") and file != "404.html")
    folder, *shots = options.shots or ["."]
    for page in (*options.pages, *shots):
        if page not in every:
            parser.error(f"{options.site} contains no page {page}: the name ends in .html")
    Path(folder).mkdir(parents=True, exist_ok=True)
    handler = functools.partial(Quiet, directory=options.site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser()
        try:
            base = f"http://127.0.0.1:{server.server_port}/"
            wrong = look(browser, options.pages or every, base, shots, Path(folder), files)
        finally:
            browser.close()
            server.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
