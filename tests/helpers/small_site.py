"""A part of the documentation site, built with the hooks of the whole one, and served."""

import contextlib
import functools
import http.server
import importlib.util
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def hook(name: str):
    """Import a file of lessons/tools."""
    spec = importlib.util.spec_from_file_location(f"hook_{name}", ROOT / f"lessons/tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, pages: list[str], python: bool) -> Path:
    """Build some pages. pages: names of files in lessons/. python: with what runs Python in the browser.

    Returns the folder of the site.
    """
    from mkdocs.commands.build import build as build_all
    from mkdocs.config import load_config

    docs = folder / "docs"
    docs.mkdir()
    for name in (*pages, "site.css", "stack.svg"):
        shutil.copy(ROOT / "lessons" / name, docs)
    shutil.copytree(ROOT / "lessons/browser", docs / "browser")
    notebooks = {"execute": False, "include_source": True, "no_prompt": True}
    options = dict(
        docs_dir=str(docs),
        site_dir=str(folder / "built"),
        plugins=["search", {"mkdocs-jupyter": notebooks}],
        nav=[{"The course": "index.md"}, *(name for name in pages if name != "index.md")],
    )
    before = os.environ.get("XTRAIN_BROWSER")
    os.environ["XTRAIN_BROWSER"] = str(python).lower()
    logging.disable(logging.WARNING)  # links to the pages that are not built
    try:
        build_all(load_config(str(ROOT / "mkdocs.yml"), strict=False, **options))
    finally:
        logging.disable(logging.NOTSET)
        if before is None:
            del os.environ["XTRAIN_BROWSER"]
        else:
            os.environ["XTRAIN_BROWSER"] = before
    return folder / "built"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine. Gives its address, which ends in a slash."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
