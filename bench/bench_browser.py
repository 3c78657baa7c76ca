"""The lessons in a browser: how much a page loads, and how long the first check takes.

    python bench/bench_browser.py [--repeat 5]

Needs npm and Chromium. Each repetition starts with an empty profile, so nothing is in the browser's cache; the server is on the
same machine, so the time of a download is not in it. A check is from the call to the verdict on a right attempt at exercise 1.3.
Sizes are those of the files as a server with gzip sends them.
"""

import argparse
import contextlib
import functools
import gzip
import http.server
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from _records import append  # noqa: E402
from chromium import PROGRAM, Browser  # noqa: E402

from xtrain import lesson  # noqa: E402

NUMBER = "1.3"
FILE = "01_threads"
CHECK = """(async () => {
  const begin = performance.now();
  const { start } = await import("./runtime.js");
  const runtime = await start();
  const said = await runtime.check(%s, %s, { file: %s, seed: 1 });
  if (!said.passed) throw new Error(said.text);
  return (performance.now() - begin) / 1000;
})()"""


def hook():
    """Return lessons/tools/browser.py as a module."""
    path = ROOT / "lessons" / "tools" / "browser.py"
    spec = importlib.util.spec_from_file_location("browser_hook", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Writes no log."""

    def log_message(self, *arguments): ...


@contextlib.contextmanager
def serving(folder: Path):
    """Serve a folder. Yield its address."""
    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()


def seconds(address: str, script: str) -> dict[str, float]:
    """Return the times of one browser with an empty profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        browser.open(f"{address}index.html")
        first = browser.evaluate(script)
        second = browser.evaluate(script)
        browser.call("Page.reload")
        browser.wait("document.readyState == 'complete'")
        again = browser.evaluate(script)
        browser.close()
    return {
        "first check, with the load of Python": first,
        "next check": second,
        "first check after a reload": again,
    }


def record(name: str, value: float, unit: str, ms: float = 0.0) -> None:
    """Append one line to results/bench_browser.jsonl, and print it."""
    lock = json.loads((ROOT / "lessons/browser/package-lock.json").read_text(encoding="utf-8"))
    versions = {
        "chromium": subprocess.run([PROGRAM, "--version"], capture_output=True, text=True).stdout.strip(),
        **{
            name: lock["packages"][f"node_modules/{name}"]["version"]
            for name in ("pyodide", "@emscripten-forge/numpy", "@codemirror/view")
        },
    }  # fmt: skip
    line = {
        "bench": "bench_browser",
        "name": name,
        "shape": f"exercise {NUMBER}" if ms else "files",
        "dtype": "fp32",
        "ms": ms,
        "value": value,
        "unit": unit,
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "peak_gb": None,
        "versions": versions,
    }
    append(line)
    print(f"{name}: {value} {unit}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    o = parser.parse_args()
    if PROGRAM is None:
        print("needs Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    tools = hook()
    made = tools.site_files()
    sizes = {"the editor": 0, "Python, NumPy, the simulator, the judges": 0}
    editor, python = sizes
    for name, content in made.items():
        part = editor if name.startswith("codemirror/") else python
        sizes[part] += len(gzip.compress(content, 6))
    for part, size in sizes.items():
        record(part, round(size / 1e6, 2), "MB")
    judges = lesson.load_checks("api")
    path = judges.lesson_file(NUMBER.split(".")[0])
    text = judges.tagged(path.read_text(encoding="utf-8"), "imports", "exercise", "solution")
    script = CHECK % tuple(map(json.dumps, (NUMBER, text, FILE)))
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as address:
        tools.write(made, Path(folder))
        (Path(folder) / "index.html").write_text("<!doctype html>", encoding="utf-8")
        times = [seconds(address, script) for _ in range(o.repeat)]
    for name in times[0]:
        value = statistics.median(each[name] for each in times)
        record(name, round(value, 2), "s", round(1e3 * value, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
