"""Answers with calls of functions: from the text of a model to OpenAI's tool_calls, whole and
streamed.

Text that is not a readable call stays the content of the answer.
"""

import secrets
import string
from collections.abc import Callable
from typing import Any

from ..formats.texts import Texts
from .answers import Chat
from .api import ChatRequest
from .engine_client import Piece
from .tools import FORMS, ToolUse

Delta = dict[str, Any]
LETTERS = string.ascii_letters + string.digits
LONGEST_HEAD = 512  # characters until a call has begun, or is none


class ToolStream:
    """Reads one answer while it arrives.

    use: what it may call.  calls: how many it has called.
    """

    def __init__(self, use: ToolUse):
        self.use = use
        self.form = FORMS[use.form]
        self.text = ""  # that has not been used yet
        self.calls = 0
        self.arguments: JsonObject | None = None  # of the call that is being read
        self.read: Callable[[list[Delta]], str | None] = self._read_before

    def feed(self, text: str, last: bool) -> tuple[str, list[Delta]]:
        """Take the next text. Return the content and OpenAI's deltas of calls that are certain."""
        self.text += text
        content = ""
        deltas: list[Delta] = []
        while self.text and (new := self.read(deltas)) is not None:
            content += new
        if last and self.arguments is None:
            rest = self._cut(len(self.text))
            if rest.strip() not in ("", self.form.close):
                content += rest
        return content, deltas

    # Each takes what it can from self.text, and returns the content in it; None: it needs more.
    def _read_before(self, deltas: list[Delta]) -> str | None:
        """Take the text before the first call; what may become its beginning stays."""
        trigger = self.form.trigger
        if not trigger:  # the answer is a call, or it is not
            start = self.text.lstrip()
            if start:
                self.read = self._read_head if start[0] == "{" else self._read_content
            return "" if start else None
        found = self.text.find(trigger)
        if found >= 0:
            self.read = self._read_head
            return self._cut(found)
        sizes = range(min(len(trigger) - 1, len(self.text)), 0, -1)
        kept = next((n for n in sizes if trigger.startswith(self.text[-n:])), 0)
        return self._cut(len(self.text) - kept) or None

    def _read_content(self, deltas: list[Delta]) -> str | None:
        return self._cut(len(self.text))

    def _read_head(self, deltas: list[Delta]) -> str | None:
        """Take the beginning of a call, up to its arguments."""
        match = self.form.head.match(self.text)
        if match is None or (self.use.one and self.calls):
            if len(self.text) > LONGEST_HEAD:
                self.read = self._read_content
                return ""
            return None
        self._cut(match.end())
        number = "".join(secrets.choice(LETTERS) for _ in range(self.form.id_length))
        function = {"name": match.group(1), "arguments": ""}
        deltas.append({"index": self.calls, "id": number, "type": "function", "function": function})
        self.calls += 1
        self.arguments = JsonObject()
        self.read = self._read_arguments
        return ""

    def _read_arguments(self, deltas: list[Delta]) -> str | None:
        """Take text of the arguments, and the end of the call."""
        assert self.arguments is not None
        if not self.arguments.complete:
            function = {"arguments": self._cut(self.arguments.end_in(self.text))}
            deltas.append({"index": self.calls - 1, "function": function})
            return ""
        match = self.form.tail.match(self.text)
        if match is None:
            return None
        self._cut(match.end())
        self.arguments = None
        self.read = self._read_head
        return ""

    def _cut(self, n: int) -> str:
        taken = self.text[:n]
        self.text = self.text[n:]
        return taken


class JsonObject:
    """Finds the end of a JSON object that arrives in pieces.   complete: it has been found"""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.escaped = False
        self.complete = False

    def end_in(self, text: str) -> int:
        """Return how many characters of the next piece belong to it."""
        for i, character in enumerate(text):
            if self.in_string:
                self.in_string = self.escaped or character != '"'
                self.escaped = character == "\\" and not self.escaped
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if not self.depth:
                    self.complete = True
                    return i + 1
        return len(text)


class ToolChat(Chat):
    """/v1/chat/completions with tools."""

    def __init__(self, texts: Texts, name: str, body: ChatRequest, request_id: str, use: ToolUse):
        super().__init__(texts, name, body, request_id)
        self.use = use
        self.streams: dict[int, ToolStream] = {}  # of each sequence

    def choice(self, pieces: list[Piece], whole: bool) -> dict[str, Any]:
        """Return what the client sees of some successive pieces of a sequence."""
        choice = super().choice(pieces, whole)
        stream = self.streams.setdefault(pieces[0].index, ToolStream(self.use))
        last = bool(pieces[-1].reason)
        content, deltas = stream.feed("".join(piece.text for piece in pieces), last)
        if whole:
            calls = _merged(deltas)
            message = choice["message"]
            message["content"] = content
            if calls:
                message["content"] = content if content.strip() else None
                message["tool_calls"] = calls
        else:
            delta: dict[str, Any] = {"content": content} if content else {}
            if deltas:
                delta["tool_calls"] = deltas
            choice["delta"] = delta
        if choice["finish_reason"] == "stop" and stream.calls and not self.use.forced:
            choice["finish_reason"] = "tool_calls"
        return choice


def _merged(deltas: list[Delta]) -> list[dict[str, Any]]:
    """Return whole calls, from their deltas."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({name: value for name, value in delta.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
