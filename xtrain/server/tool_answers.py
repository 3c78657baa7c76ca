"""Answers with reasoning and calls of functions: from the text of a model to the fields
reasoning_content and tool_calls, whole and streamed.

Text that is not a readable call stays the content of the answer.
"""

import secrets
import string
from collections.abc import Callable
from typing import Any

from ..formats.texts import Texts
from ..serving.tool_calls import FORMS, JsonObject
from .answers import Chat
from .engine_client import Piece
from .reasoning import Reading, ReasoningStream, beginning_at_end
from .tools import ToolUse

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
            if not self.calls or rest.strip() not in ("", self.form.close):
                content += rest
        return content, deltas

    # Each takes what it can from self.text, and returns the content in it; None: it needs more.
    def _read_before(self, deltas: list[Delta]) -> str | None:
        """Take the text before the first call; what may become its beginning stays."""
        trigger = self.form.trigger
        if self.use.alone or not trigger:  # the answer is calls, or it has none
            start = self.text.lstrip()
            begin = trigger or "{"
            if len(start) < len(begin) and begin.startswith(start):
                return None
            self.read = self._read_head if start.startswith(begin) else self._read_content
            return ""
        first = self.text.find(trigger)
        if first >= 0:
            self.read = self._read_head
            return self._cut(first)
        return self._cut(len(self.text) - beginning_at_end(self.text, trigger)) or None

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


class SequenceReader:
    """Reads the text of one sequence while it arrives.

    reasoning, tools: what reads these parts; None: there are none.
    """

    def __init__(self, reading: Reading):
        self.reasoning: ReasoningStream | None = None
        self.tools: ToolStream | None = None
        if reading.reasoning is not None:
            self.reasoning = ReasoningStream(reading.reasoning)
        if reading.tools is not None:
            self.tools = ToolStream(reading.tools)

    def feed(self, text: str, last: bool) -> Delta:
        """Take the next text. Return the fields of OpenAI's delta that are certain."""
        thought = ""
        calls: list[Delta] = []
        if self.reasoning is not None:
            thought, text = self.reasoning.feed(text, last)
        if self.tools is not None:
            text, calls = self.tools.feed(text, last)
        delta = {"reasoning_content": thought, "content": text, "tool_calls": calls}
        return {name: value for name, value in delta.items() if value}

    @property
    def has_called(self) -> bool:
        """Return True if the answer ends with calls that the model has chosen."""
        tools = self.tools
        return tools is not None and tools.calls > 0 and not tools.use.forced


class ParsedChat(Chat):
    """/v1/chat/completions with reasoning or tools.   reading: what an answer is made of"""

    def __init__(self, texts: Texts, name: str, body: Any, request_id: str, reading: Reading):
        super().__init__(texts, name, body, request_id)
        self.reading = reading
        self.readers: dict[int, SequenceReader] = {}  # of each sequence

    def choice(self, pieces: list[Piece], whole: bool) -> dict[str, Any]:
        """Return what the client sees of some successive pieces of a sequence."""
        choice = super().choice(pieces, whole)
        reader = self.readers.setdefault(pieces[0].index, SequenceReader(self.reading))
        delta = reader.feed("".join(piece.text for piece in pieces), bool(pieces[-1].reason))
        if whole:
            message = choice["message"]
            message["content"] = delta.get("content", "")
            if "reasoning_content" in delta:
                message["reasoning_content"] = delta["reasoning_content"]
            if "tool_calls" in delta:
                if not message["content"].strip():
                    message["content"] = None
                message["tool_calls"] = _merged(delta["tool_calls"])
        else:
            choice["delta"] = delta
        if choice["finish_reason"] == "stop" and reader.has_called:
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
