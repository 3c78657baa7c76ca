"""An id for each request, and a line about it in the log when its answer has been sent.

The line is in logfmt, name=value. It has no text of the request or of the answer.
"""

import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..cli import say
from .answers import Form
from .engine_client import Job

HEADER = b"x-request-id"
VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
PROBES = ("/health", "/livez", "/readyz", "/metrics")  # their successes are not logged
DISCONNECTED = 499  # nginx's status of a request whose client has gone


class RequestRecord:
    """What is known about one request.

    id: the client's X-Request-Id, else a new one.
    error: the code of a refusal, or its type.
    job, form: the sequences of its answer, and what becomes of them.
    """

    def __init__(self, scope: Any):
        sent = dict(scope["headers"]).get(HEADER, b"")
        self.id = secrets.token_hex(12)
        if VALID_ID.fullmatch(sent):
            self.id = sent.decode()
        self.error: str | None = None
        self.job: Job | None = None
        self.form: Form | None = None
        self.start = time.perf_counter()
        self.status = DISCONNECTED
        self.ended = False

    def facts(self) -> dict[str, Any]:
        """Return what the line says, without None."""
        facts: dict[str, Any] = {
            "id": self.id,
            "seconds": round(time.perf_counter() - self.start, 4),
            "error": self.error,
        }
        job = self.job
        if job is not None and self.form is not None:
            reasons = Counter(sequence.reason or "abort" for sequence in job.sequences)
            facts |= {
                "prompt_tokens": self.form.n_prompt,
                "cached_tokens": self.form.first_job.cached_tokens,
                "tokens": sum(sequence.tokens for sequence in job.sequences),
                "finish": ",".join(f"{reason}:{n}" for reason, n in reasons.items()),
            }
            if job.first_token:
                facts["first_token"] = round(job.first_token - job.start, 4)
        return {name: value for name, value in facts.items() if value is not None}


class AccessLog:
    """ASGI middleware. The application finds the RequestRecord in scope["state"]["record"].

    ended: called with the scope and the record of each request that has ended.
    log: print the lines.
    """

    def __init__(self, app: Any, ended: Callable[[Any, RequestRecord], None], log: bool):
        self.app = app
        self.ended = ended
        self.log = log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(scope)
        scope["state"] = {**scope.get("state", {}), "record": record}

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = list(message["headers"])
                if HEADER not in dict(headers):
                    headers.append((HEADER, record.id.encode()))
                message["headers"] = headers
            elif not message.get("more_body"):  # OpenTelemetry's span ends with this message
                self._end(scope, record)
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            record.status = 500  # the answer is sent outside of this middleware
            record.error = "server_error"
            raise
        finally:
            self._end(scope, record)

    def _end(self, scope: Any, record: RequestRecord) -> None:
        if record.ended:
            return
        record.ended = True
        self.ended(scope, record)
        quiet = scope["path"] in PROBES and record.status < 400
        if self.log and not quiet:
            say(_line(scope, record))


def _line(scope: Any, record: RequestRecord) -> str:
    client = scope.get("client") or ("-",)
    path = scope.get("raw_path") or scope["path"].encode()  # raw: without line breaks
    named = {
        "client": client[0],
        "method": scope["method"],
        "path": path[:200].decode("ascii", "replace"),
        "status": record.status,
        **record.facts(),
    }
    values = " ".join(f"{name}={value}" for name, value in named.items())
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {values}"
