"""From the body of a request to what the engine computes: JSON, checks, chat template, tokenizer.

Each of these holds the interpreter's lock for as long as its input is long: seconds for a few
megabytes. So a body of more than SMALL bytes is prepared in a separate process, which is ended
after SECONDS, and streams continue meanwhile. Smaller ones take milliseconds, in a thread.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pickle
import re
import secrets
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from pydantic import ValidationError

from ..config import ModelConfig
from ..data.chat_template import ChatTemplate
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..json_files import listed
from ..serving.requests import Request, check_ids, make_requests, make_scoring_requests
from ..serving.tool_calls import form_of
from .api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Error,
    FieldError,
    Sampling,
    TokenizeRequest,
    Translated,
)
from .grammars import Grammars, Guide
from .messages import CountRequest, MessagesRequest
from .reasoning import PLAIN, Reading, Reasoning
from .responses import ResponsesRequest
from .tools import ToolUse, use_of

SMALL = 1 << 14  # bytes of a body that a thread of this process prepares
SECONDS = 30  # for a larger one, in another process
PROCESSES = 2
MAX_MESSAGE = 600  # characters of an error
MAX_SCORES = 1 << 18  # log-probabilities of prompts in one answer
COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as at OpenAI
# pydantic's names for the types of a value
UNION_BRANCH = re.compile(r"str|constrained-str|list\[.*\]")


def _shortened(text: str) -> str:
    """Return a text that may have a client's own words, in at most MAX_MESSAGE characters."""
    if len(text) <= MAX_MESSAGE:
        return text
    half = MAX_MESSAGE // 2
    return f"{text[: half - 1]}\u2026{text[-half:]}"


class ApiError(Exception):
    """A refusal. status: of HTTP.  headers: of the answer."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, **fields: Any
    ):
        super().__init__(status, message, headers)
        self.status = status
        self.error = Error(message=_shortened(message), **fields)
        self.error.param = self.error.param and _shortened(self.error.param)
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        return {"error": self.error.model_dump()}


def _invalid(error: ValidationError) -> ApiError:
    """Return the refusal of a body that does not fit its model."""
    errors = error.errors(include_url=False, include_input=False)

    # a value that may have one of several types has an error for each: best is one that is not
    # about the type, then the one that is deepest inside the value
    def fits(error: Any) -> tuple[bool, int, int]:
        last = error["loc"][-1] if error["loc"] else 0
        depth = len(error["loc"])
        return not error["type"].endswith("_type"), depth, last if isinstance(last, int) else 0

    best = max(errors, key=fits)
    places = [str(x) for x in best["loc"] if not UNION_BRANCH.fullmatch(str(x))]
    ours = best.get("ctx", {}).get("error")
    if isinstance(ours, FieldError):
        where = ".".join([*places, ours.field])
        return ApiError(400, where + str(ours).removeprefix(ours.field), param=where)
    param = ".".join(places) or None
    return ApiError(400, f"{param or 'body'}: {best['msg']}", param=param)


def _invalid_value(error: UserError, body: Any) -> ApiError:
    """Return the refusal of a value: "logit_bias holds ...", "sampling: top_k ...", "prompt 0 has
    ..."."""
    names = [word.rstrip(":") for word in str(error).split()[:2]]
    fields = [name for name in names if name in type(body).model_fields]
    return ApiError(400, str(error), param=[*fields, body.source][0])


@dataclass(frozen=True)
class Prepared:
    """A body, as the server needs it.

    body: without messages, without prompts unless they are echoed, and without unknown fields.
    requests: n for each prompt.  scoring: one for each prompt of several tokens, if wanted.
    reading: what the answers of a chat are made of.  asked: the body in the form of another API
    (responses.py, messages.py).
    """

    body: Any
    requests: list[Request]
    scoring: list[Request]
    reading: Reading = PLAIN
    asked: Any = None


@dataclass(frozen=True)
class Preparation:
    """Prepares bodies.   max_answers: of one request.   Other fields: of the model and its server"""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop: frozenset[int]
    chat_stop: frozenset[int]
    name: str
    config: ModelConfig
    max_seq_len: int
    max_answers: int
    defaults: GenerationDefaults
    grammars: Grammars
    adapters: tuple[str, ...] = ()  # names, in the order of their numbers

    def __call__(self, kind: type[Any], data: bytes) -> Any:
        """Check a body, and return a Prepared; or the content of the answer, if only the tokenizer
        is needed.

        kind: a class of api.py. Raises ApiError.
        """
        try:
            body = kind.model_validate_json(data)
        except ValidationError as error:
            raise _invalid(error) from None
        self.check_model(body.model)
        body.forget_extra()
        try:
            prepared = KINDS[kind](self, body)
        except ValidationError as error:
            raise _invalid(error) from None
        except UserError as error:
            raise _invalid_value(error, body) from None
        if isinstance(prepared, Prepared) and body.model in self.adapters:
            for request in prepared.requests + prepared.scoring:
                request.adapter = self.adapters.index(body.model)
        return prepared

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for the name of another model."""
        names = (self.name, *self.adapters)
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"there is no model {name!r} here: use {listed([*map(repr, names)])}",
                code="model_not_found",
                param="model",
            )

    def _chat(self, body: ChatRequest) -> Prepared:
        self._check_answers(body.n or 1)
        text = self._rendered(body, True)
        body.messages = []
        body.chat_template_kwargs = None
        limits = (body.max_completion_tokens or body.max_tokens, self.max_seq_len)
        self._check_length(text)
        prompts = [self.tokenizer.encode(text)]
        assert self.template is not None
        source = self.template.source(body.usable_tools or None)
        reading, guide = self._answer(body, source, Reasoning.of(source, text))
        body.tools = []
        requests = self._requests(body, prompts, limits, self.chat_stop, guide)
        return Prepared(body, requests, self._scoring(body, prompts), reading)

    def _translated(self, asked: Translated) -> Prepared:
        """Prepare a body in the form of another API."""
        prepared = self._chat(asked.chat())
        asked.forget_input()
        return dataclasses.replace(prepared, asked=asked)

    def _count(self, asked: CountRequest) -> bytes:
        """Return how many tokens a conversation has."""
        text = self._rendered(asked.chat(), True)
        return json.dumps({"input_tokens": len(self.tokenizer.encode(text))}).encode()

    def _rendered(self, body: ChatRequest | TokenizeRequest, add_generation_prompt: bool) -> str:
        if self.template is None:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions", code="no_chat_template"
            )
        messages = [message.plain() for message in body.messages or []]
        tools = None
        if isinstance(body, ChatRequest):
            tools = [tool.plain() for tool in body.usable_tools] or None
        return self.template.render(
            messages, add_generation_prompt, values=body.chat_template_kwargs, tools=tools
        )

    def _answer(
        self, body: ChatRequest, template: str, reasoning: Reasoning | None
    ) -> tuple[Reading, Guide | None]:
        """Return what the answers are made of, and their grammar; None: anything."""
        guide = self._guide(body)
        use: ToolUse | None = None
        if body.usable_tools:
            use, guide = self._tools(body, template, guide)
        alone = use is None or use.alone
        if guide is not None and reasoning is not None and reasoning.begun and alone:
            guide = reasoning.before(guide, self.tokenizer)
            self.grammars.check(guide)
        return Reading(reasoning, use), guide

    def _tools(
        self, body: ChatRequest, template: str, document: Guide | None
    ) -> tuple[ToolUse, Guide | None]:
        """Return what the answers may call, and their grammar. document: of those that do not."""
        one = body.parallel_tool_calls is False
        choice = body.tool_choice or "auto"
        try:
            form = form_of(template)
            use, guide = use_of(
                body.usable_tools, choice, one, form, self.tokenizer, self.chat_stop, document
            )
            if guide is not None:
                self.grammars.check(guide)
        except UserError as error:
            raise ApiError(400, str(error), param="tools") from None
        return use, guide

    def _completion(self, body: CompletionRequest) -> Prepared:
        self._check_answers(len(body.prompts) * (body.n or 1))
        special = body.add_special_tokens is not False
        prompts: list[list[int]] = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self._check_length(prompt)
                prompt = self.tokenizer.encode_prompt(prompt, special)
            prompts.append(prompt)
        limits = (body.max_tokens, COMPLETION_TOKENS)
        requests = self._requests(body, prompts, limits, self.stop, self._guide(body))
        if not body.echo:
            body.prompt = ""
        return Prepared(body, requests, self._scoring(body, prompts))

    def _scoring(self, body: Sampling, prompts: list[list[int]]) -> list[Request]:
        """Return the requests for the log-probabilities of prompts, if they are wanted."""
        top = body.prompt_top
        if top is None:
            return []
        several = [tokens for tokens in prompts if len(tokens) > 1]
        if sum(map(len, several)) * (top + 1) * (body.n or 1) > MAX_SCORES:
            raise UserError(
                f"at most {MAX_SCORES} log-probabilities of prompts are returned: give fewer or "
                "shorter prompts, or a smaller logprobs, prompt_logprobs or n"
            )
        return make_scoring_requests(several, None, self.config, self.max_seq_len, top)

    def _tokenize(self, body: TokenizeRequest) -> bytes:
        special = body.add_special_tokens
        if body.prompt is None:
            text = self._rendered(body, body.add_generation_prompt)
            tokens = self.tokenizer.encode_prompt(text, bool(special))
        else:
            tokens = self.tokenizer.encode_prompt(body.prompt, special is not False)
        entries = self.tokenizer.entries(tokens) if body.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": self.max_seq_len,
            "tokens": tokens,
            "token_strs": entries,
        }
        return json.dumps(answer).encode()

    def _detokenize(self, body: DetokenizeRequest) -> bytes:
        check_ids("tokens", body.tokens, self.tokenizer.vocab_size)
        return json.dumps({"prompt": self.tokenizer.decode(body.tokens)}).encode()

    @functools.cached_property
    def max_characters(self) -> int:
        """Characters of a prompt, at most: a character is a byte at least."""
        return self.max_seq_len * max(map(len, self.tokenizer.token_bytes))

    def _check_answers(self, number: int) -> None:
        if number > self.max_answers:
            raise UserError(
                f"n: a request may have {self.max_answers} answers in all: give fewer prompts or a "
                "smaller n"
            )

    def _check_length(self, text: str) -> None:
        if len(text) > self.max_characters:
            raise UserError(
                f"a prompt of {len(text)} characters leaves no room for an answer: the model reads "
                f"at most {self.max_seq_len} tokens"
            )

    def _requests(
        self,
        body: Sampling,
        prompts: list[list[int]],
        limits: tuple[int | None, int],
        stop: frozenset[int],
        guide: Guide | None,
    ) -> list[Request]:
        """Return the requests for the answers to a body.

        limits: tokens of each answer, as the body says, and by default. guide: of the answers.
        """
        if body.seed is None:
            seed = secrets.randbits(62)
        else:
            seed = body.seed
        for name in ("min_tokens", "allowed_token_ids"):
            if guide is not None and getattr(body, name):
                raise UserError(f"{name} may forbid what a grammar or tools need: leave one out")
        given = body.options()
        body.allowed_token_ids = None  # it may be long, and the requests have it
        if limits[0] is not None:
            given["max_new_tokens"] = limits[0]
        options = self.defaults.fill(given, {"temperature": 1.0, "max_new_tokens": limits[1]})
        options["max_new_tokens"] = min(options["max_new_tokens"], self.max_seq_len)
        end_ids = body.stop_token_ids or []
        if body.ignore_eos:
            stop = frozenset()
        check_ids("stop_token_ids", end_ids, self.config.vocab_size)
        if (body.min_tokens or 0) > options["max_new_tokens"]:
            raise UserError(
                f"min_tokens {body.min_tokens} is more than the {options['max_new_tokens']} tokens "
                "of the answer: give a smaller one, or a larger max_tokens"
            )
        requests = make_requests(
            prompts,
            self.config,
            self.max_seq_len,
            stop.union(end_ids),
            seed,
            body.n or 1,
            logprobs=body.top,
            **options,
        )
        for request in requests:
            request.grammar = guide
        return requests

    def _guide(self, body: Sampling) -> Guide | None:
        """Return what the answers must be; None: anything."""
        try:
            guide = body.guide()
            if guide is not None:
                self.grammars.check(guide)
        except UserError as error:
            raise ApiError(400, str(error), param=body.guide_field) from None
        return guide


KINDS: dict[type[Any], Callable[[Preparation, Any], Any]] = {
    ChatRequest: Preparation._chat,
    CompletionRequest: Preparation._completion,
    ResponsesRequest: Preparation._translated,
    MessagesRequest: Preparation._translated,
    CountRequest: Preparation._count,
    TokenizeRequest: Preparation._tokenize,
    DetokenizeRequest: Preparation._detokenize,
}


# ------------------------------------------------------------------------- processes
class Preparers:
    """Applies a Preparation in processes that start when they are needed. Call every method in the
    event loop."""

    def __init__(self, preparation: Preparation):
        self.preparation = preparation
        self.free = asyncio.Semaphore(PROCESSES)
        self.idle: list[asyncio.subprocess.Process] = []
        self.all: set[asyncio.subprocess.Process] = set()

    async def small(self, kind: type[Any], data: bytes) -> Any:
        """Prepare a body of at most SMALL bytes."""
        return await to_thread.run_sync(self.preparation, kind, data, abandon_on_cancel=True)

    async def large(self, kind: type[Any], data: bytes) -> Any:
        """Prepare a body of any size. A process that is not done in SECONDS, or when the caller is
        cancelled, is killed."""
        async with self.free:
            process = self.idle.pop() if self.idle else await self._start()
            try:
                async with asyncio.timeout(SECONDS):
                    reply = await _ask(process, (kind, data))
                self.idle.append(process)
            except TimeoutError:
                raise ApiError(
                    413, f"reading the body takes more than {SECONDS} s: send a shorter one"
                ) from None
            except (OSError, EOFError):
                message = "the process that reads large bodies has ended: see the server's log"
                raise ApiError(500, message, type="server_error") from None
            finally:
                if process not in self.idle:
                    self._kill(process)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _start(self) -> asyncio.subprocess.Process:
        # not multiprocessing: it would import the caller's main module again
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the server's process
        )
        self.all.add(process)
        assert process.stdin
        process.stdin.write(pickle.dumps(self.preparation))
        return process

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        self.all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def close(self) -> None:
        """End the processes."""
        for process in list(self.all):
            self._kill(process)
            await process.wait()


async def _ask(process: asyncio.subprocess.Process, body: tuple[type[Any], bytes]) -> Any:
    assert process.stdin and process.stdout
    process.stdin.write(pickle.dumps(body))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(8))
    return pickle.loads(await process.stdout.readexactly(size))


def main() -> None:
    """Run the other process: read a Preparation and then bodies, write what becomes of them."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write to the pipe
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server ends it when it has drained
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: on Windows
        os.nice(5)  # streams first
    preparation = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(EOFError, OSError):  # the server has ended
        while True:
            kind, data = pickle.load(sys.stdin.buffer)
            try:
                reply = preparation(kind, data)
            except ApiError as error:
                reply = error
            except Exception:
                traceback.print_exc()
                reply = ApiError(500, "the server failed: see its log", type="server_error")
            content = pickle.dumps(reply)
            replies.write(len(content).to_bytes(8) + content)
            replies.flush()
