"""The chat page, which the server answers at `/`: the file page.html, and a policy under which
nothing else runs in it."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

FILE = Path(__file__).with_name("page.html")


def policy(html: str) -> str:
    """Return the Content-Security-Policy of a page: its own <script> and <style>, known by their
    hashes, and its own server"""

    def hashes(tag: str) -> str:
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts]
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors "
        "'none'; require-trusted-types-for 'script'"
    )


def route() -> Route:
    """Return the route of `/`. The page needs no API key; what it asks the server for does."""
    html = FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(http: HttpRequest) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return Route("/", page)
