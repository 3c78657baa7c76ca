"""The HTTP interface: OpenAI's and Anthropic's routes over one engine.

    app = create_app(engine, pretrained)        an ASGI application, for uvicorn or any other server

Every refusal is OpenAI's error object, or Anthropic's for its routes, with one sentence. A client
that disconnects frees its slots in the next step.
"""

import asyncio
import contextlib
import functools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..cli import say
from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..formats.texts import Texts
from ..serving.engine import Engine
from ..serving.requests import TokenLogprobs
from .access_log import AccessLog, RequestRecord
from .answers import FINISH, Chat, Form, Text
from .api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .block_answers import BlockForm, Messages, Responses, messages_error
from .engine_client import EngineClient, EngineThread, Job, Piece
from .grammars import Grammars
from .limits import STANDARD, Limits
from .messages import CountRequest, MessagesRequest
from .metrics import Metrics
from .openapi import route as openapi_route
from .page import route as page_route
from .prepare import SMALL, ApiError, Preparation, Prepared, Preparers
from .reasoning import PLAIN
from .responses import ResponsesRequest
from .tool_answers import ParsedChat
from .tracing import annotate, tracer_provider
from .tracing import middleware as tracing_middleware

BODY_SECONDS = 60  # until a body must have arrived
ANSWERED: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
COUNTED: dict[str, type[Any]] = {
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/messages/count_tokens": CountRequest,
}
BLOCK_FORMS: dict[type[Any], type[BlockForm]] = {
    ResponsesRequest: Responses,
    MessagesRequest: Messages,
}
# the engine's reasons that are none of FINISH -> status and message
FAILURES = {
    "nan": (500, "the model's logits are NaN: see the server's log"),
    "error": (500, "the engine failed: see the server's log"),
    "constraint": (400, "the schema or grammar is too complex for this answer: simplify it"),
    "shutdown": (503, "the server is shutting down: try again later"),
}


class JobResponse(Response):
    """Server-sent events. `close` is called however the response ends.

    Not Starlette's StreamingResponse, which costs more for each event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.events, self.close = events, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events, until the client disconnects."""
        try:
            await _unless_disconnected(receive, self._send(send))
        except ClientDisconnect:
            pass
        finally:
            self.close()

    async def _send(self, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self.events):  # type: ignore[type-var]
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Server:
    """The routes' functions and what they share. Arguments: see create_app."""

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        name: str,
        api_key: str | None,
        limits: Limits,
        preparation: Preparation,
    ):
        self.engine = engine
        self.texts = texts
        self.preparers = Preparers(preparation)
        self.draining = False  # no requests follow
        self.ended = False  # and those that were running have been ended
        self.name = name
        self.limits = limits
        self.api_key = api_key
        self.created = int(time.time())
        self.waiting = 0
        self.metrics = Metrics(engine, name)
        self.tracing: Any = None  # OpenTelemetry's provider, if enabled

    # ------------------------------------------------------------------------- routes
    async def models(self, http: HttpRequest) -> Response:
        """Answer /v1/models and /v1/models/NAME."""
        self._check_key(http)
        name = http.path_params.get("name", self.name)
        self.preparers.preparation.check_model(name)
        if "name" in http.path_params:
            return JSONResponse(self._card(name))
        names = (self.name, *self.preparers.preparation.adapters)
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    def _card(self, name: str) -> dict[str, Any]:
        """Return what clients see of a model, or of one of its adapters."""
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "xtrain"}
        parent = None if name == self.name else self.name
        return card | {  # as vLLM
            "root": name,
            "parent": parent,
            "max_model_len": self.engine.max_seq_len,
        }

    async def health(self, http: HttpRequest) -> Response:
        """Answer /health and /livez: 503 if only a new process helps. And /readyz: 503 also while
        this one shuts down."""
        if not self.engine.alive:
            status = "stopped"
        elif self.engine.stalled:
            status = "stalled"
        elif self.draining and http.url.path == "/readyz":
            status = "draining"
        else:
            status = "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def show_metrics(self, http: HttpRequest) -> Response:
        """Answer /metrics."""
        self._check_key(http)
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    def drain(self, seconds: float) -> None:
        """Say that no requests follow, and end in `seconds` what is running. May be called by a
        signal handler."""
        if self.draining:
            return
        self.draining = True
        loop = self.engine.loop

        def end() -> None:
            self.ended = True
            self.engine.end_all("shutdown")

        loop.call_soon_threadsafe(loop.call_later, seconds, end)
        if self.waiting:
            say(f"shutting down: {self.waiting} running sequences get {seconds:g} s")

    # ------------------------------------------------------------------------- requests
    def _check_key(self, http: HttpRequest) -> None:
        if self.api_key is not None:
            sent = http.headers.get("authorization", "")
            scheme, _, key = sent.partition(" ")
            if scheme.lower() != "bearer":
                key = http.headers.get("x-api-key", "")  # Anthropic's clients
            # latin-1: the bytes that were sent, as Starlette has decoded them
            if not secrets.compare_digest(key.strip().encode("latin-1"), self.api_key.encode()):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    {"WWW-Authenticate": "Bearer"},
                    type="authentication_error",
                    code="invalid_api_key",
                )

    async def _read(self, http: HttpRequest) -> bytes:
        """Return the body."""
        self._check_key(http)
        media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # a page of another origin may send others unasked
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
        limit = self.limits.body_bytes
        close = {"Connection": "close"}
        too_long = ApiError(
            413, f"the body is longer than {limit} bytes: send a shorter one", close
        )
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_long
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in http.stream():
                    data += chunk
                    if len(data) > limit:
                        raise too_long
        except TimeoutError:
            message = f"the body has not arrived within {BODY_SECONDS} s: send it at once"
            raise ApiError(408, message, close) from None
        return bytes(data)

    @contextlib.asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Raise ApiError if the block takes longer. deadline: in the event loop's time."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            message = f"the answer took longer than {self.limits.seconds:g} s: ask for fewer tokens"
            raise ApiError(504, message, type="timeout_error", code="timeout") from None

    async def _prepare(self, http: HttpRequest, kind: type[Any], data: bytes) -> Any:
        """Return what Preparation makes of a body."""
        if len(data) <= SMALL:
            return await self.preparers.small(kind, data)
        return await _unless_disconnected(http.receive, self.preparers.large(kind, data))

    async def tokens(self, kind: type[Any], http: HttpRequest) -> Response:
        """Answer what needs the tokenizer only."""
        async with self._until(asyncio.get_running_loop().time() + self.limits.seconds):
            content = await self._prepare(http, kind, await self._read(http))
        return Response(content, media_type="application/json")

    async def answer(self, kind: type[Any], http: HttpRequest) -> Response:
        """Compute the answers to a body. kind: in ANSWERED."""
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        async with self._until(deadline):
            data = await self._read(http)
            with contextlib.ExitStack() as arriving:
                if len(data) <= SMALL:
                    arriving.enter_context(self.engine.arrival())
                    # others that have arrived are counted before this one is ready
                    await asyncio.sleep(0)
                prepared = await self._prepare(http, kind, data)
                if not prepared.scoring:
                    job, form = await self._begin(http, prepared, [])
        if prepared.scoring:
            scores: list[list[TokenLogprobs]] = [[] for _ in prepared.scoring]
            scoring = self._submit(Job(prepared.scoring, self.texts.tokenizer))
            for piece in await self._whole(http, scoring, deadline):
                scores[piece.index] += piece.logprobs
            if any(math.isnan(value) for row in scores for value, _ in row):
                raise _failure("nan")
            job, form = await self._begin(http, prepared, scores)
            form.first_job = scoring
        n = len(prepared.requests)
        if prepared.body.stream:
            events = _events(self._pieces(job, deadline), form, n)
            return JobResponse(events, lambda: self._close(job))
        pieces = await self._whole(http, job, deadline)
        content = await run_in_threadpool(lambda: _slow_json(form.whole(pieces, n)))
        return Response(content, media_type="application/json")

    async def _begin(
        self, http: HttpRequest, prepared: Prepared, scores: list[list[TokenLogprobs]]
    ) -> tuple[Job, Form]:
        """Submit the requests for the answers. scores: of the prompts, if wanted."""
        body = prepared.body
        record: RequestRecord = http.state.record
        prompts = [request.prompt for request in prepared.requests[:: body.n or 1]]
        tokenizer = self.texts.tokenizer
        name = (prepared.asked or body).model or self.name
        arguments = (self.texts, name, body, record.id)
        if isinstance(body, ChatRequest):
            tokenizer = prepared.reading.showing_marks(tokenizer)
        if prepared.asked is not None:
            form: Form = BLOCK_FORMS[type(prepared.asked)](
                *arguments, prepared.reading, prepared.asked
            )
        elif prepared.reading != PLAIN:
            form = ParsedChat(*arguments, prepared.reading)
        elif isinstance(body, ChatRequest):
            form = Chat(*arguments)
        else:
            form = Text(*arguments)
        if scores or (isinstance(body, CompletionRequest) and body.echo):
            # in a thread: it takes as long as the prompts are
            await run_in_threadpool(form.take_prompts, prompts, scores)
        else:
            form.take_prompts(prompts, scores)
        job = self._submit(Job(prepared.requests, tokenizer, body.stops))
        form.first_job = job
        record.job = job
        record.form = form
        return job, form

    def _submit(self, job: Job) -> Job:
        """Let the engine compute a job, which `_close` must follow."""
        if self.ended or not self.engine.alive:
            raise _failure("shutdown")
        if self.waiting + len(job.requests) > self.engine.max_batch + self.limits.queue:
            self.metrics.refused.inc()
            raise ApiError(
                429,
                "the queue is full: try again later",
                {"Retry-After": "1"},
                type="rate_limit_error",
                code="queue_full",
            )
        self.waiting += len(job.requests)
        self.engine.submit(job)
        return job

    async def _whole(self, http: HttpRequest, job: Job, deadline: float) -> list[Piece]:
        """Return all pieces of a job, and close it."""
        try:
            return await _unless_disconnected(http.receive, _all(self._pieces(job, deadline)))
        finally:
            self._close(job)

    async def _pieces(self, job: Job, deadline: float) -> AsyncIterator[Piece]:
        """Return the pieces of a job. Raises ApiError if it fails."""
        async with self._until(deadline):
            async for piece in job:
                if job.requests[0].scores is None:
                    self.metrics.observe_piece(job, piece)
                if piece.reason is not None and piece.reason not in FINISH:
                    raise _failure(piece.reason)
                yield piece

    def _close(self, job: Job) -> None:
        """Free what a job occupies; called once."""
        self.engine.close(job)
        self.waiting -= len(job.requests)
        if job.requests[0].scores is None:
            self.metrics.observe(job)

    def count_response(self, scope: Any, record: RequestRecord) -> None:
        """Count a request that has ended."""
        path = scope["path"] if "endpoint" in scope else "none"  # so there are not many
        if scope.get("path_params"):
            path = "/v1/models/{name}"
        status = f"{record.status // 100}xx"
        self.metrics.responses.labels(path, scope["method"], status).inc()
        if self.tracing is not None:
            annotate(record)


# ------------------------------------------------------------------------- asyncio
async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        return [piece async for piece in pieces]


async def _unless_disconnected(receive: Any, answer: Any) -> Any:
    """await answer, but cancel it if the client disconnects. Raises ClientDisconnect."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(pieces: AsyncIterator[Piece], form: Form, n: int) -> AsyncIterator[bytes]:
    """Return the server-sent events of a stream. An error after the first one is an event, too."""
    try:
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]
            for event in form.begin(n):
                if form.scored:
                    yield await run_in_threadpool(_slow_event, event)
                else:
                    yield _event(event)
            async for piece in pieces:
                for event in form.next(piece):
                    yield _event(event)
        for event in form.end():
            yield _event(event)
    except ApiError as error:
        yield _event(form.failed(error.error))
    yield form.end_mark


_encoder = json.JSONEncoder(separators=(",", ":"))
_json = _encoder.encode


def _slow_json(content: Any) -> bytes:
    """Return JSON. `encode` holds the interpreter's lock until it is done; this takes longer."""
    return "".join(_encoder.iterencode(content)).encode()


def _failure(reason: str) -> ApiError:
    """Return the answer to a request that ended for one of FAILURES."""
    status, message = FAILURES.get(reason, FAILURES["error"])
    if status < 500:
        return ApiError(status, message)
    return ApiError(status, message, type="server_error")


def _event(content: dict[str, Any]) -> bytes:
    name = ""
    if "type" in content:
        name = f"event: {content['type']}\n"
    return f"{name}data: {_json(content)}\n\n".encode()


def _slow_event(content: dict[str, Any]) -> bytes:
    """Return an event that may be long."""
    return b"data: " + _slow_json(content) + b"\n\n"


async def _refuse(http: HttpRequest, error: Any) -> Response:
    """OpenAI's error object for any exception; the client sees no traceback."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # no client reads it
    if isinstance(error, UserError):
        error = ApiError(400, str(error))
    elif isinstance(error, HTTPException):
        message = f"{http.method} {http.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed: see its log", type="server_error")
    record: RequestRecord = http.state.record
    record.error = error.error.code or error.error.type
    headers = dict(error.headers or {})
    if error.status == 500:  # it may be sent outside of AccessLog
        headers["X-Request-Id"] = record.id
    if http.url.path.startswith("/v1/messages"):
        return JSONResponse(messages_error(error.error), error.status, headers)
    return JSONResponse(error.body(), error.status, headers)


def create_app(
    engine: Engine | EngineClient,
    texts: Texts,
    name: str | None = None,
    api_key: str | None = None,
    limits: Limits = STANDARD,
    defaults: GenerationDefaults | None = None,
    allowed_origins: Sequence[str] = (),
    access_log: bool = False,
    otlp_traces_endpoint: str | None = None,
    adapters: Sequence[str] = (),
) -> Starlette:
    """Return an ASGI application that serves `engine`

    engine: an Engine, which gets a thread of this process, between startup and shutdown; or a
    connection to one elsewhere.
    texts: tokenizer, stop tokens and chat template of the engine's model; a Pretrained has them.
    name: of the model for clients; None: the folder's.
    api_key: what clients must send; None: nothing.
    defaults: of sampling, for requests that leave them open; None: those of the engine's model.
    allowed_origins: pages that may use it in a browser, such as "https://example.org"; "*": all.
    access_log: print a line for each request, and one on the throughput every ten seconds.
    otlp_traces_endpoint: where OpenTelemetry sends a span of each request; None: nowhere.
    adapters: names of adapters of the engine's model, in their order (serving/adapters.py): models
    for clients, too. Of an Engine they are known.
    """
    grammars = Grammars.of(texts)
    if isinstance(engine, Engine):
        client: EngineClient = EngineThread(engine, grammars)
        if engine.adapters is not None:
            adapters = engine.adapters.names
        defaults = defaults or GenerationDefaults.of(engine.model.generation)
    else:
        client = engine
    name = name or texts.folder.resolve().name
    preparation = Preparation(
        texts.tokenizer,
        texts.template,
        texts.stop,
        texts.chat_stop,
        name,
        client.config,
        client.max_seq_len,
        limits.answers or client.max_batch + limits.queue,
        defaults or GenerationDefaults(),
        grammars,
        tuple(adapters),
    )
    server = Server(client, texts, name, api_key, limits, preparation)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client.start()
        logging = asyncio.create_task(server.metrics.log_throughput()) if access_log else None
        yield
        if logging is not None:
            logging.cancel()
        if server.tracing is not None:
            await run_in_threadpool(server.tracing.shutdown)
        await server.preparers.close()
        await run_in_threadpool(client.stop)

    kinds: list[Any] = [ApiError, UserError, HTTPException, ClientDisconnect, Exception]
    middleware = [Middleware(AccessLog, ended=server.count_response, log=access_log)]
    if otlp_traces_endpoint is not None:
        server.tracing = tracer_provider(otlp_traces_endpoint)
        middleware.insert(0, tracing_middleware(server.tracing))
    if allowed_origins:
        cors: dict[str, Any] = dict(allow_origins=allowed_origins, allow_headers=["*"])
        middleware += [Middleware(CORSMiddleware, **cors, allow_methods=["GET", "POST"])]
    app = Starlette(
        routes=_routes(server),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(kinds, _refuse),
    )
    app.state.server = server
    return app


def _routes(server: Server) -> list[Any]:
    return [
        *(
            Route(path, functools.partial(answer, kind), methods=["POST"])
            for answer, kinds in ((server.answer, ANSWERED), (server.tokens, COUNTED))
            for path, kind in kinds.items()
        ),
        openapi_route(ANSWERED, COUNTED),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        *(Route(path, server.health) for path in ("/health", "/livez", "/readyz")),
        Route("/metrics", server.show_metrics),
        page_route(),
    ]
