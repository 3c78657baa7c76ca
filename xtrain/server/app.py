"""The HTTP interface: OpenAI's routes over one engine.

    app = create_app(engine, pretrained)        an ASGI application, for uvicorn or any other server

Every refusal is OpenAI's error object with one sentence. A client that disconnects frees its slots
in the next step.
"""

import asyncio
import contextlib
import json
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
from ..serving.engine import Engine
from ..serving.pretrained import Texts
from ..serving.requests import make_requests
from .api import ChatRequest, CompletionRequest, Error, Sampling, Usage
from .engine_client import EngineClient, EngineThread, Job, Piece
from .metrics import Metrics
from .page import route as page_route

FINISH = {"stop": "stop", "length": "length", "full": "length"}  # engine's reason -> OpenAI's
# pydantic's names for the types of a value
UNION_BRANCH = re.compile(r"str|constrained-str|list\[.*\]")
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
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # a value that may have one of several types has an error for each; one that is not about the
    # type fits best
    best = next((e for e in errors if not e["type"].endswith("_type")), errors[0])
    where = ".".join(str(x) for x in best["loc"] if not UNION_BRANCH.fullmatch(str(x))) or None
    if best["type"] == "value_error":  # a UserError of ours
        return ApiError(400, best["msg"].removeprefix("Value error, "), param=where)
    return ApiError(400, f"{where or 'body'}: {best['msg']}", param=where)


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
        self, engine: EngineClient, texts: Texts, name: str, api_key: str | None, limits: Limits
    ):
        self.engine = engine
        self.texts = texts
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
        if body.logprobs:
            top = body.top_logprobs or 0
        else:
            top = None
        max_tokens = body.max_completion_tokens or body.max_tokens or self.engine.max_seq_len
        return await self._answer(http, body, self._chat_tokens, max_tokens, top, Chat(self))

    async def completions(self, http: HttpRequest) -> Response:
        """Answer /v1/completions."""
        body = await self._read(http, CompletionRequest)
        max_tokens = body.max_tokens or COMPLETION_TOKENS
        text = Text(self)
        return await self._answer(http, body, self._prompt_tokens, max_tokens, body.logprobs, text)

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
        prompt: Any = body.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        encode = self.texts.tokenizer.encode
        if several:
            prompts = prompt
        else:
            prompts = [prompt]
        if not any(isinstance(x, str) for x in prompts):
            return prompts
        return await run_in_threadpool(
            lambda: [encode(x, special=True) if isinstance(x, str) else x for x in prompts]
        )

    async def _answer(
        self,
        http: HttpRequest,
        body: Sampling,
        tokens_of: Callable[[Any], Awaitable[list[list[int]]]],
        max_tokens: int,
        top: int | None,
        form: "Form",
    ) -> Response:
        """Compute the answers to a body.

        tokens_of: makes its prompts.
        max_tokens: of each answer.
        top: log-probabilities of so many tokens.
        form: the form of the answer.
        """
        with self.engine.arrival():
            await asyncio.sleep(0)  # others that have arrived are counted before this one is ready
            prompts = await tokens_of(body)
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
            requests = make_requests(
                prompts,
                self.engine.config,
                self.engine.max_seq_len,
                form.stop(),
                seed,
                n,
                max_new_tokens=min(max_tokens, self.engine.max_seq_len),
                logprobs=top,
                **body.options(),
            )
            if self.waiting + len(requests) > room:
                self.metrics.refused.inc()
                raise ApiError(
                    429,
                    "the queue is full: try again later",
                    {"Retry-After": "1"},
                    type="rate_limit_error",
                    code="queue_full",
                )
            job = Job(requests, self.texts.tokenizer, body.stops)
            self.waiting += len(requests)
            self.engine.submit(job)
        form.n_prompt = sum(map(len, prompts))
        pieces = self._pieces(job)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return JobResponse(
                _events(pieces, form, len(requests), usage), lambda: self._close(job)
            )
        try:
            whole = await _unless_disconnected(http.receive, _all(pieces))
            return JSONResponse(form.whole(whole, len(requests)))
        finally:
            self._close(job)

    async def _pieces(self, job: Job) -> AsyncIterator[Piece]:
        """Return the pieces of a job. Raises ApiError if it fails."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for piece in job:
                    if piece.reason not in (None, *FINISH):
                        why = "the engine failed"
                        if piece.reason == "nan":
                            why = "the model's logits are NaN"
                        raise ApiError(500, f"{why}: see the server's log", type="server_error")
                    yield piece
        except TimeoutError:
            message = f"the answer took longer than {self.limits.seconds:g} s: ask for fewer tokens"
            raise ApiError(504, message, type="timeout_error", code="timeout") from None

    def _close(self, job: Job) -> None:
        """Free what a job occupies; called once."""
        self.engine.close(job)
        self.waiting -= len(job.requests)
        self.metrics.observe(job)


# ------------------------------------------------------------------------- the form of answers
class Form:
    """One of OpenAI's two forms of an answer. n_prompt: tokens of the prompts."""

    prefix = ""
    whole_object = ""
    chunk_object = ""
    n_prompt = 0

    def __init__(self, server: Server):
        self.p = server.texts
        self.tokens = 0
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": server.name,
        }

    def stop(self) -> frozenset[int]:
        """Ids that end an answer."""
        return self.p.stop

    def logprobs(self, pieces: list[Piece]) -> Any:
        """Log-probabilities of the tokens of a sequence's pieces; None if there are none."""
        raise NotImplementedError

    def content(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the part of a choice that has the text."""
        raise NotImplementedError

    def choice(self, pieces: list[Piece], whole: bool) -> dict[str, Any]:
        """Return what the client sees of some successive pieces of a sequence."""
        self.tokens += sum(len(piece.tokens) for piece in pieces)
        reason = pieces[-1].reason
        return {
            "index": pieces[0].index,
            **self.content("".join(p.text for p in pieces), whole),
            "logprobs": self.logprobs(pieces),
            "finish_reason": reason and FINISH[reason],
        }

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far."""
        total = self.n_prompt + self.tokens
        counts = Usage(
            prompt_tokens=self.n_prompt, completion_tokens=self.tokens, total_tokens=total
        )
        return counts.model_dump()

    def whole(self, pieces: list[Piece], n: int) -> dict[str, Any]:
        """Return an answer without streaming. n: sequences."""
        sequences = [[piece for piece in pieces if piece.index == i] for i in range(n)]
        choices = [self.choice(sequence, True) for sequence in sequences]
        return {**self.head, "object": self.whole_object, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an event of a stream."""
        return {**self.head, "object": self.chunk_object, "choices": choices}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a sequence in a stream, if there is one."""
        return None

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """Return (text, bytes) of one token"""
        known = token < self.p.tokenizer.vocab_size
        data = b""
        if known:
            data = self.p.tokenizer.token_bytes[token]
        return data.decode("utf-8", "replace"), list(data)


class Chat(Form):
    """/v1/chat/completions"""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def stop(self) -> frozenset[int]:
        """Ids that end an answer."""
        return self.p.chat_stop

    def content(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the part of a choice that has the text."""
        message = {"role": "assistant", "content": text, "refusal": None}
        if whole:
            return {"message": message}
        return {"delta": {"content": text} if text else {}}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a sequence in a stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def logprobs(self, pieces: list[Piece]) -> Any:
        """Return {"content": [one entry per token]}."""
        entries = [
            self._entry(token, chosen) | {"top_logprobs": [self._entry(t, x) for t, x in top]}
            for piece in pieces
            for token, (chosen, top) in zip(piece.tokens, piece.logprobs)
        ]
        if not entries:
            return None
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.token_text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}


class Text(Form):
    """/v1/completions"""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, server: Server):
        super().__init__(server)
        self.offsets: dict[int, int] = {}  # characters of the tokens of each sequence so far

    def content(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the part of a choice that has the text."""
        return {"text": text}

    def logprobs(self, pieces: list[Piece]) -> Any:
        """Return lists with one value per token."""
        tokens = []
        chosen = []
        tops = []
        offsets = []
        index = pieces[0].index
        for piece in pieces:
            for token, (value, top) in zip(piece.tokens, piece.logprobs):
                text = self.token_text(token)[0]
                tokens.append(text)
                chosen.append(max(value, -9999.0))
                tops.append({self.token_text(t)[0]: max(x, -9999.0) for t, x in top})
                offsets.append(self.offsets.get(index, 0))
                self.offsets[index] = offsets[-1] + len(text)
        if not tokens:
            return None
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(names, (tokens, chosen, tops, offsets)))


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
) -> Starlette:
    """Return an ASGI application that serves `engine`

    engine: an Engine, which gets a thread of this process, between startup and shutdown; or a
    connection to one elsewhere.
    texts: tokenizer, stop tokens and chat template of the engine's model; a Pretrained has them.
    name: of the model for clients; None: the folder's.
    api_key: what clients must send; None: nothing.
    """
    client = EngineThread(engine) if isinstance(engine, Engine) else engine
    server = Server(client, texts, name or texts.folder.resolve().name, api_key, limits)

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
