"""The HTTP interface: OpenAI's routes over one engine.

    app = create_app(engine, pretrained)        an ASGI application, for uvicorn or any other server

Every refusal is OpenAI's error object with one sentence. A client that disconnects frees its slots
in the next step.
"""

import asyncio
import contextlib
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..formats.texts import Texts
from ..serving.engine import Engine
from ..serving.requests import Request, TokenLogprobs, make_requests, make_scoring_requests
from .answers import FINISH, Chat, Form, Text
from .api import ChatRequest, CompletionRequest, Error, FieldError, Sampling
from .engine_client import EngineClient, EngineThread, Job, Piece
from .metrics import Metrics
from .page import route as page_route

# pydantic's names for the types of a value
UNION_BRANCH = re.compile(r"str|constrained-str|list\[.*\]")
NAN = "the model's logits are NaN: see the server's log"
COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as at OpenAI


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may cost."""

    body_bytes: int = 4 << 20
    queue: int = 256  # sequences that wait for a slot
    seconds: float = 600.0  # per request, waiting included


class ApiError(Exception):
    """A refusal. status: of HTTP.  headers: of the answer."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, **fields: Any
    ):
        self.status = status
        self.error = Error(message=message, **fields)
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        return {"error": self.error.model_dump()}


def _invalid(error: ValidationError) -> ApiError:
    """Return the refusal of a body that does not fit its model."""
    errors = error.errors(include_url=False, include_input=False)
    # a value that may have one of several types has an error for each; one that is not about the
    # type fits best
    best = next((e for e in errors if not e["type"].endswith("_type")), errors[0])
    places = [str(x) for x in best["loc"] if not UNION_BRANCH.fullmatch(str(x))]
    ours = best.get("ctx", {}).get("error")
    if isinstance(ours, FieldError):
        where = ".".join([*places, ours.field])
        return ApiError(400, where + str(ours).removeprefix(ours.field), param=where)
    param = ".".join(places) or None
    return ApiError(400, f"{param or 'body'}: {best['msg']}", param=param)


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
        defaults: GenerationDefaults,
    ):
        self.engine = engine
        self.texts = texts
        self.defaults = defaults
        self.name = name
        self.limits = limits
        self.api_key = api_key
        self.created = int(time.time())
        self.waiting = 0
        self.metrics = Metrics(engine)

    # ------------------------------------------------------------------------- routes
    async def chat(self, http: HttpRequest) -> Response:
        """Answer /v1/chat/completions."""
        body = await self._read(http, ChatRequest)
        top = None
        if body.logprobs:
            top = body.top_logprobs or 0
        limits = (body.max_completion_tokens or body.max_tokens, self.engine.max_seq_len)
        form = Chat(self.texts, self.name)
        return await self._answer(http, body, self._chat_tokens, limits, top, form)

    async def completions(self, http: HttpRequest) -> Response:
        """Answer /v1/completions."""
        body = await self._read(http, CompletionRequest)
        limits = (body.max_tokens, COMPLETION_TOKENS)
        form = Text(self.texts, self.name, body)
        return await self._answer(http, body, self._prompt_tokens, limits, body.logprobs, form)

    async def models(self, http: HttpRequest) -> Response:
        """Answer /v1/models and /v1/models/NAME."""
        self._check_key(http)
        name = http.path_params.get("name", self.name)
        self._check_model(name)
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "xtrain"}
        single = "name" in http.path_params
        if single:
            return JSONResponse(card)
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, http: HttpRequest) -> Response:
        """Answer /health."""
        if self.engine.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped"}, 503)

    async def show_metrics(self, http: HttpRequest) -> Response:
        """Answer /metrics."""
        self._check_key(http)
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    # ------------------------------------------------------------------------- requests
    def _check_key(self, http: HttpRequest) -> None:
        if self.api_key is not None:
            # latin-1: the bytes that were sent, as Starlette has decoded them
            sent = http.headers.get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(sent, f"Bearer {self.api_key}".encode()):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    {"WWW-Authenticate": "Bearer"},
                    type="authentication_error",
                    code="invalid_api_key",
                )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"there is no model {name!r} here: use {self.name!r}",
                code="model_not_found",
                param="model",
            )

    async def _read(self, http: HttpRequest, kind: type[Any]) -> Any:
        """Return the checked body"""
        self._check_key(http)
        data = b""
        limit = self.limits.body_bytes
        async for chunk in http.stream():
            data += chunk
            if len(data) > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes: send a shorter one")
        try:
            body = kind.model_validate_json(data)
        except ValidationError as error:
            raise _invalid(error) from None
        self._check_model(body.model)
        return body

    async def _chat_tokens(self, body: ChatRequest) -> list[list[int]]:
        template = self.texts.template
        if template is None:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions", code="no_chat_template"
            )
        messages = [message.plain() for message in body.messages]
        encode = self.texts.tokenizer.encode
        return [await run_in_threadpool(lambda: encode(template.render(messages)))]

    async def _prompt_tokens(self, body: CompletionRequest) -> list[list[int]]:
        special = body.add_special_tokens is not False
        encode = self.texts.tokenizer.encode_prompt
        prompts: list[Any] = body.prompts
        if not any(isinstance(x, str) for x in prompts):
            return prompts
        return await run_in_threadpool(
            lambda: [encode(x, special) if isinstance(x, str) else x for x in prompts]
        )

    async def _answer(
        self,
        http: HttpRequest,
        body: Sampling,
        tokens_of: Callable[[Any], Awaitable[list[list[int]]]],
        limits: tuple[int | None, int],
        top: int | None,
        form: Form,
    ) -> Response:
        """Compute the answers to a body.

        tokens_of: makes its prompts.
        limits: tokens of each answer, as the body says, and by default.
        top: log-probabilities of so many tokens.
        form: the form of the answer.
        """
        with self.engine.arrival():
            await asyncio.sleep(0)  # others that have arrived are counted before this one is ready
            prompts = await tokens_of(body)
            requests = self._requests(body, prompts, limits, top, form)
            if not form.scores_prompts:
                job = self._submit(requests, body.stops)
        scores: list[list[TokenLogprobs]] = []
        if form.scores_prompts:
            scores = await self._scores(http, prompts, top or 0)
            job = self._submit(requests, body.stops)
        form.take_prompts(prompts, scores)
        if body.stream:
            form.usage_events = (
                body.stream_options is not None and body.stream_options.include_usage
            )
            events = _events(self._pieces(job), form, len(requests), form.usage_events)
            return JobResponse(events, lambda: self._close(job))
        return JSONResponse(form.whole(await self._whole(http, job), len(requests)))

    def _requests(
        self,
        body: Sampling,
        prompts: list[list[int]],
        limits: tuple[int | None, int],
        top: int | None,
        form: Form,
    ) -> list[Request]:
        """Return the checked requests for the answers to a body. Arguments: see _answer."""
        n = body.n or 1
        room = self.engine.max_batch + self.limits.queue
        if len(prompts) * n > room:
            raise ApiError(
                400,
                f"a request may have {room} answers in all: give fewer prompts or a smaller n",
            )
        if body.seed is None:
            seed = secrets.randbits(62)
        else:
            seed = body.seed
        given = body.options()
        if limits[0] is not None:
            given["max_new_tokens"] = limits[0]
        options = self.defaults.fill(given, {"temperature": 1.0, "max_new_tokens": limits[1]})
        options["max_new_tokens"] = min(options["max_new_tokens"], self.engine.max_seq_len)
        engine = self.engine
        try:
            return make_requests(
                prompts,
                engine.config,
                engine.max_seq_len,
                form.stop(),
                seed,
                n,
                logprobs=top,
                **options,
            )
        except UserError as error:  # "logit_bias holds ...", "sampling: ...", "prompt 0 has ..."
            names = [word.rstrip(":") for word in str(error).split()[:2]]
            fields = [name for name in names if name in type(body).model_fields]
            raise ApiError(400, str(error), param=[*fields, form.source][0]) from None

    async def _scores(
        self, http: HttpRequest, prompts: list[list[int]], top: int
    ) -> list[list[TokenLogprobs]]:
        """Return the log-probabilities of all tokens but the first, for each prompt of several.
        Raises ApiError if one is NaN."""
        several = [tokens for tokens in prompts if len(tokens) > 1]
        requests = make_scoring_requests(
            several, None, self.engine.config, self.engine.max_seq_len, top
        )
        values: list[list[TokenLogprobs]] = [[] for _ in requests]
        for piece in await self._whole(http, self._submit(requests, [])):
            values[piece.index] += piece.logprobs
        if any(math.isnan(value) for row in values for value, _ in row):
            raise ApiError(500, NAN, type="server_error")
        return values

    def _submit(self, requests: list[Request], stops: list[str]) -> Job:
        """Let the engine compute requests, which `_close` must follow."""
        if self.waiting + len(requests) > self.engine.max_batch + self.limits.queue:
            self.metrics.refused.inc()
            raise ApiError(
                429,
                "the queue is full: try again later",
                {"Retry-After": "1"},
                type="rate_limit_error",
                code="queue_full",
            )
        job = Job(requests, self.texts.tokenizer, stops)
        self.waiting += len(requests)
        self.engine.submit(job)
        return job

    async def _whole(self, http: HttpRequest, job: Job) -> list[Piece]:
        """Return all pieces of a job, and close it."""
        try:
            return await _unless_disconnected(http.receive, _all(self._pieces(job)))
        finally:
            self._close(job)

    async def _pieces(self, job: Job) -> AsyncIterator[Piece]:
        """Return the pieces of a job. Raises ApiError if it fails."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for piece in job:
                    if piece.reason not in (None, *FINISH):
                        why = "the engine failed: see the server's log"
                        raise ApiError(
                            500, NAN if piece.reason == "nan" else why, type="server_error"
                        )
                    yield piece
        except TimeoutError:
            message = f"the answer took longer than {self.limits.seconds:g} s: ask for fewer tokens"
            raise ApiError(504, message, type="timeout_error", code="timeout") from None

    def _close(self, job: Job) -> None:
        """Free what a job occupies; called once."""
        self.engine.close(job)
        self.waiting -= len(job.requests)
        self.metrics.observe(job)


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


async def _events(
    pieces: AsyncIterator[Piece], form: Form, n: int, usage: bool
) -> AsyncIterator[bytes]:
    """Return the server-sent events of a stream. An error after the first one is an event, too."""
    try:
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]
            for i in range(n):
                if (first := form.first(i)) is not None:
                    yield _event(form.chunk([first]))
            async for piece in pieces:
                choice = form.choice([piece], False)
                if piece.text or piece.reason or choice["logprobs"]:
                    yield _event(form.chunk([choice]))
        if usage:
            yield _event({**form.chunk([]), "usage": form.usage()})
    except ApiError as error:
        yield _event(error.body())
    yield b"data: [DONE]\n\n"


_json = json.JSONEncoder(separators=(",", ":")).encode


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {_json(content)}\n\n".encode()


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
    return JSONResponse(error.body(), error.status, error.headers)


def create_app(
    engine: Engine | EngineClient,
    texts: Texts,
    name: str | None = None,
    api_key: str | None = None,
    limits: Limits = Limits(),
    defaults: GenerationDefaults | None = None,
) -> Starlette:
    """Return an ASGI application that serves `engine`

    engine: an Engine, which gets a thread of this process, between startup and shutdown; or a
    connection to one elsewhere.
    texts: tokenizer, stop tokens and chat template of the engine's model; a Pretrained has them.
    name: of the model for clients; None: the folder's.
    api_key: what clients must send; None: nothing.
    defaults: of sampling, for requests that leave them open; None: those of the engine's model.
    """
    if isinstance(engine, Engine):
        client: EngineClient = EngineThread(engine)
        defaults = defaults or GenerationDefaults.of(engine.model.generation)
    else:
        client = engine
    name = name or texts.folder.resolve().name
    server = Server(client, texts, name, api_key, limits, defaults or GenerationDefaults())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client.start()
        yield
        await run_in_threadpool(client.stop)

    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/health", server.health),
        Route("/metrics", server.show_metrics),
        page_route(),
    ]
    kinds: list[Any] = [ApiError, UserError, HTTPException, ClientDisconnect, Exception]
    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(kinds, _refuse)
    )
    app.state.server = server
    return app
