"""The page of one run while it trains: xtrain report --live RUN serves it on this machine alone,
and refreshes it.

Two addresses exist: / is the page, /content its sections if the files of the run have changed
since. Files are never served.
"""

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ..errors import UserError
from . import page, record, style

HOST = "127.0.0.1"
FILES = (
    "config.json",
    "metrics.jsonl",
    "layers.jsonl",
    "timing.jsonl",
    "samples.txt",
    "rollouts.jsonl",
    "sentence.json",
    "profile.json",
    "starts.jsonl",
)
SECONDS = 30  # for a request


class Content:
    """The sections of a run's page, made again when its files change. Threads share it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = threading.Lock()
        self.stamp = ""
        self.name = ""
        self.sections: list[str] = []

    def read(self) -> tuple[str, str, list[str]]:
        """Return a stamp of the files, the name of the run, and the sections as HTML.

        Raises UserError if the run is gone.
        """
        with self.lock:
            stamp = self._stamp()
            if stamp != self.stamp:
                run = record.read(self.folder)
                self.sections = page.sections_of(run)
                self.stamp = stamp
                self.name = run.name
            return self.stamp, self.name, self.sections

    def _stamp(self) -> str:
        """Return the seconds since 1970 when the newest file changed, and the sizes of all."""
        times = [0.0]
        sizes = []
        for name in FILES:
            try:
                stat = (self.folder / name).stat()
                times.append(stat.st_mtime)
                sizes.append(str(stat.st_size))
            except OSError:
                sizes.append("-")
        return f"{max(times):.3f}-{'-'.join(sizes)}"


class Handler(BaseHTTPRequestHandler):
    """Answers GET / and GET /content?after=STAMP, to pages of this server only."""

    server: "Server"
    server_version = "xtrain"
    sys_version = ""
    timeout = SECONDS

    def do_GET(self) -> None:
        """Answer one request."""
        names = {f"{host}:{self.server.server_port}" for host in (HOST, "localhost")}
        if self.headers.get("Host") not in names:  # a page of another site whose name leads here
            return self._answer(403, "text/plain", b"this page is for this machine alone")
        url = urllib.parse.urlsplit(self.path)
        if url.path not in ("/", "/content"):
            return self._answer(404, "text/plain", b"there is only /")
        try:
            stamp, name, sections = self.server.content.read()
        except (UserError, OSError) as error:
            return self._answer(503, "text/plain", str(error).encode("utf-8", "replace"))
        if url.path == "/":
            html = style.page(name, sections, live=stamp)
            return self._answer(200, "text/html", html.encode("utf-8", "replace"))
        if urllib.parse.parse_qs(url.query).get("after") == [stamp]:
            return self._answer(204, "text/plain", b"")
        content = json.dumps({"stamp": stamp, "sections": sections})
        return self._answer(200, "application/json", content.encode())

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """Serves one run until `shutdown`. Raises UserError if the folder is not a run or the port is
    in use."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int):
        record.read(folder)
        self.content = Content(folder)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}): give another --port, or 0 for any"
            ) from None

    def handle_error(self, *_: object) -> None:
        """Ignore that a browser closes its connection."""

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"
