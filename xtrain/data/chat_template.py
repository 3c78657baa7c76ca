"""The chat template: the Jinja template that comes with a tokenizer and renders a conversation as
text.

    chat_template.jinja, and others in additional_chat_templates/; or chat_template in
    tokenizer_config.json: one text, or a list of {"name", "template"}

Of several templates "tool_use" is used for conversations with tools, "default" for the others, as
in transformers.

It is rendered in Jinja's sandbox with the names that transformers defines for templates: messages,
add_generation_prompt, tools, documents, bos_token and the other special tokens,
raise_exception(text), strftime_now(format), the filter tojson, {% break %} and {% continue %}, and
{% generation %} blocks.

The sandbox limits what a template may touch, but not its time and memory. So it is compiled and
rendered in a process of its own, which runs template_worker.py with limits and stays alive between
conversations.
"""

import contextlib
import importlib.util
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import listed, reading
from .tokenizer_files import Files, config_of, read_companions, template_sources, token_text

TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
REASONING = ("reasoning_content", "thinking", "reasoning")  # in a message, the first that it has
WORKER = Path(__file__).with_name("template_worker.py")
# Limits. Real templates take milliseconds, a few MB, and little more text than the messages have.
SECONDS = 5  # of CPU time to compile, and for each conversation
PATIENCE = 60  # seconds until the process is killed, on a machine that gives it little CPU time
MEMORY = 1 << 30  # bytes of address space, Python's and Jinja's included
MAX_TEXT = 16 << 20  # characters of a rendered conversation
# Exit code of a process that the operating system ended at its limit.
OUT_OF_TIME = -getattr(signal, "SIGXCPU", 24)
LIMITS = {
    "time": f"{SECONDS} s",
    "memory": f"{MEMORY >> 30} GB of memory",
    "text": f"{MAX_TEXT >> 20} million characters",
}


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and whose its parts are.

    spans: [start, end) of the {% generation %} blocks; None: a block is in a macro, so its place is
        unknown.
    turns: (message, start, end) of what a loop of the template has written at a message.
    """

    text: str
    spans: list[tuple[int, int]] | None
    turns: list[tuple[int, int, int]]

    @property
    def tail(self) -> str:
        """What is written after the last message."""
        return self.text[max((end for _, _, end in self.turns), default=0) :]

    def of(self, number: int) -> list[tuple[int, int]]:
        """Return [start, end) of what is written at a message."""
        return [(start, end) for message, start, end in self.turns if message == number]

    def owner(self, place: int, but: int | None = None) -> int | None:
        """Return the message, other than `but`, that a character belongs to; None if there is
        none. What follows the last message belongs to it."""
        last = len(self.text) - len(self.tail)
        for message, start, end in self.turns:
            if message != but and start <= place < (len(self.text) if end == last else end):
                return message
        return None


class ChatTemplate:
    """Renders a list of {"role": ..., "content": ...} as text.

    sources: the Jinja template, or several by their names.  special_tokens: names such as
    "bos_token" and their texts.  values: of other names, for every conversation.
    """

    def __init__(
        self,
        sources: str | dict[str, str],
        special_tokens: dict[str, str],
        values: Mapping[str, Any] | None = None,
    ):
        if isinstance(sources, str):
            sources = {"default": sources}
        self.sources = sources
        self.special_tokens = special_tokens
        self.values = dict(values or {})
        self.worker: subprocess.Popen | None = None
        self.compiled: str | None = None  # the source that the worker renders
        self.lock = threading.Lock()  # one request at a time

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the templates; a copy starts another process."""
        return ChatTemplate, (self.sources, self.special_tokens, self.values)

    def with_values(self, values: Mapping[str, Any]) -> "ChatTemplate":
        """Return this template with values for every conversation."""
        return ChatTemplate(self.sources, self.special_tokens, {**self.values, **values})

    def source(self, tools: Any = None) -> str:
        """Return the Jinja template of a conversation. Raises UserError if there is none for it."""
        if tools is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise UserError(
                f"the model has the chat templates {listed(sorted(self.sources))}, but none named "
                "default: save the one to use as chat_template.jinja in its folder"
            )
        return self.sources["default"]

    def marks_generation(self, tools: Any = None) -> bool:
        """Return True if the template of a conversation marks the model's text with
        {% generation %} blocks."""
        return re.search(r"\{%-?\s*generation\b", self.source(tools)) is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Any = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of the conversation.

        messages: {"role": ..., "content": ...} each, of values that JSON has.
        add_generation_prompt: end with the text that starts the model's answer.
        tools: descriptions of functions, as the template expects them.
        values: of other names that the template reads, such as {"enable_thinking": False}.
        Raises UserError if Jinja cannot compile the template, or if it rejects the messages, fails,
        exceeds one of LIMITS, or does not read one of the values.
        """
        return self._render(messages, add_generation_prompt, tools, values or {})["text"]

    def render_turns(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: Any = None,
        values: Mapping[str, Any] | None = None,
    ) -> "Rendered":
        """Return the text of a conversation, and whose its parts are. Arguments and errors are
        those of render."""
        reply = self._render(messages, add_generation_prompt, tools, values or {})
        spans = reply["spans"]
        if spans is not None:
            spans = [(start, end) for start, end in spans]
        turns = [(message, start, end) for message, start, end in reply["turns"]]
        return Rendered(reply["text"], spans, turns)

    def _render(self, messages, add_generation_prompt, tools, values):
        names = {
            "messages": normalized(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.source(tools)
        values = {**self.values, **values}
        for name in values:
            if name in names or not re.search(rf"\b{re.escape(name)}\b", source):
                raise UserError(
                    f"chat_template_kwargs {listed([repr(name)])}: the model's chat template does "
                    "not read this value: leave it out"
                )
        with self.lock:
            self._compile(source)
            reply = self._ask({"documents": None, **self.special_tokens, **values, **names})
        if "error" in reply:
            raise UserError(
                f"the model's chat template rejects this conversation: {reply['error']}"
            )
        return reply

    def _start(self) -> None:
        """Start a worker. Raises UserError."""
        packages = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = [str(Path(spec.origin).parents[1]) for spec in packages if spec and spec.origin]
        limits = map(str, (SECONDS, MEMORY, MAX_TEXT))
        # -I -S: a fresh interpreter, without the user's settings, and quick to start
        command = [sys.executable, "-I", "-S", str(WORKER), *limits, *folders]
        try:
            self.worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends an answer, not the worker
            )
        except OSError as error:
            raise UserError(
                f"the chat template needs a process of its own, and {sys.executable} cannot be "
                f"started: {error.strerror}"
            ) from None
        self._end_worker = weakref.finalize(self, _end, self.worker)  # also at exit
        self.compiled = None

    def check(self) -> None:
        """Raise UserError if Jinja cannot compile the template of a conversation without tools."""
        source = self.source()
        with self.lock:
            self._compile(source)

    def _compile(self, source: str) -> None:
        """Let the worker compile a template, unless it has. Raises UserError."""
        if self.worker is None or self.worker.poll() is not None:  # it was stopped or killed
            self._start()
        if self.compiled == source:
            return
        reply = self._ask({"source": source})
        if "error" in reply:
            self._stop()
            raise UserError(f"the chat template cannot be read: {reply['error']}")
        self.compiled = source

    def _stop(self) -> None:
        self._end_worker()
        self.worker = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker and return its reply.

        Raises UserError at a limit; the worker has ended then.
        """
        worker = self.worker
        assert worker is not None
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"the messages must consist of values that JSON has: {error}") from None
        replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_exchange, args=(worker, line, replies), daemon=True).start()
        try:
            answer = replies.get(timeout=PATIENCE)
            ended = not answer.endswith(b"\n")
            code = worker.wait() if ended else None
        except queue.Empty:
            ended = True
            code = OUT_OF_TIME
        except BaseException:  # Ctrl-C
            self._stop()
            raise
        if not ended:
            reply = json.loads(answer)
        elif code == OUT_OF_TIME:
            reply = {"limit": "time"}
        else:
            reply = {"error": f"its process ended with code {code}"}
        if ended or "limit" in reply:
            self._stop()
        if "limit" in reply:
            raise UserError(
                f"the model's chat template needs more than {LIMITS[reply['limit']]}, so it was "
                "stopped: use a copy of the model with another template"
            )
        return reply

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Load the templates of a Hugging Face folder; None if it has none.

        Raises UserError if they cannot be read.
        """
        with reading(folder):
            return cls.of(read_companions(folder), folder)

    @classmethod
    def of(cls, companions: Files, folder: Path = Path()) -> "ChatTemplate | None":
        """Return the templates in the companions of a tokenizer; None if there are none.

        folder: for messages. Raises UserError.
        """
        sources = template_sources(companions, folder)
        if not sources:
            return None
        config = config_of(companions, folder)
        tokens = {name: token_text(config.get(name)) for name in TOKENS}
        return cls(sources, {name: text for name, text in tokens.items() if text is not None})


def template_values(text: str | None) -> dict[str, Any]:
    """Return what --chat-template-kwargs says. Raises UserError."""
    try:
        values = json.loads(text or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(
            f"--chat-template-kwargs must be a JSON object, got {' '.join((text or '').split())}: "
            """give it as '{"enable_thinking": false}'"""
        )
    return values


def normalized(messages: Any) -> Any:
    """Return messages as transformers shows them to a template.

    A field that is None is left out: OpenAI's format has "content": null, and many templates would
    write it as "None". Reasoning has the name that templates read, and the older one.
    """
    if not isinstance(messages, list) or not all(isinstance(x, dict) for x in messages):
        return messages  # the template rejects them
    shown = []
    for message in messages:
        fields = {key: value for key, value in message.items() if value is not None}
        reasoning = next((fields[name] for name in REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        shown.append(fields)
    return shown


def _exchange(worker: subprocess.Popen, line: bytes, replies: queue.SimpleQueue) -> None:
    """Send a line to the worker, and put its answer into the queue; b"" if it has ended."""
    assert worker.stdin and worker.stdout
    try:
        worker.stdin.write(line)
        worker.stdin.flush()
        replies.put(worker.stdout.readline())
    except (OSError, ValueError):  # ValueError: closed by _end
        replies.put(b"")


def _end(worker: subprocess.Popen) -> None:
    worker.kill()
    worker.wait()
    for pipe in filter(None, (worker.stdin, worker.stdout)):
        with contextlib.suppress(OSError):
            pipe.close()
