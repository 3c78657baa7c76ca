"""Answers as lists of blocks, made from those of /v1/chat/completions: /v1/responses and
/v1/messages."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..formats.texts import Texts
from ..serving.text_stream import text_bytes
from .answers import Event
from .api import Error, Translated
from .engine_client import Piece
from .reasoning import Reading
from .tool_answers import ParsedChat

ERRORS = {  # OpenAI's type -> Anthropic's
    "rate_limit_error": "rate_limit_error",
    "authentication_error": "authentication_error",
    "invalid_request_error": "invalid_request_error",
}


@dataclass
class Block:
    """A part of an answer.

    kind: "reasoning", "text" or "call".  id, name: of a call.  text: so far; of a call its
    arguments.
    """

    index: int
    kind: str
    id: str = ""
    name: str = ""
    text: str = ""


class BlockForm(ParsedChat):
    """An answer that is one sequence.   asked: the body.  finish: OpenAI's reason, at the end"""

    end_mark = b""

    def __init__(
        self, texts: Texts, name: str, body: Any, id: str, reading: Reading, asked: Translated
    ):
        super().__init__(texts, name, body, id, reading)
        self.request_id = id
        self.asked = asked
        self.blocks: list[Block] = []
        self.blanks = ""  # that are text if some follows
        self.ids: list[int] = []  # of all tokens
        self.finish: str | None = None

    # What an answer looks like
    def item(self, block: Block) -> dict[str, Any]:
        """Return a block of a whole answer."""
        raise NotImplementedError

    def answer(self) -> dict[str, Any]:
        """Return the answer so far."""
        raise NotImplementedError

    def opened(self, block: Block) -> list[Event]:
        """Return the events of a new block."""
        raise NotImplementedError

    def grown(self, block: Block, text: str) -> Event:
        """Return the event of new text in a block."""
        raise NotImplementedError

    def closed(self, block: Block) -> list[Event]:
        """Return the events of a complete block."""
        raise NotImplementedError

    # How it is made
    def whole(self, pieces: list[Piece], n: int) -> dict[str, Any]:
        """Return an answer without streaming."""
        for piece in pieces:
            self.next(piece)
        return self.answer()

    def next(self, piece: Piece) -> list[Event]:
        """Return the events of a piece."""
        self.ids += piece.tokens
        choice = self.choice([piece], False)
        self.finish = choice["finish_reason"]
        events: list[Event] = []
        for block, text in self._parts(choice["delta"]):
            if block is not None:
                events += self._close()
                self.blocks.append(block)
                events += self.opened(block)
            if text:
                self.blocks[-1].text += text
                events.append(self.grown(self.blocks[-1], text))
        if self.finish:
            events += self._close()
        return events

    def _parts(self, delta: dict[str, Any]) -> Iterator[tuple[Block | None, str]]:
        """Return the texts of a delta, each with the block that it begins or None."""
        calls = delta.get("tool_calls", [])
        while calls and "id" not in calls[0]:  # what follows in the call before, and ends it
            yield None, calls.pop(0)["function"]["arguments"]
        parts = [("reasoning", delta.get("reasoning_content", ""))]
        parts.append(("text", delta.get("content", "")))
        for kind, text in parts:
            if self._kind() == kind:
                yield None, text
            elif kind == "text" and (not text or text.isspace()):
                self.blanks += text
            elif text:
                yield self._new(kind), self._with_blanks(text)
        for call in calls:
            block = None
            if "id" in call:
                block = self._new("call", call["id"], call["function"]["name"])
            yield block, call["function"]["arguments"]
        if self.finish and not self.blocks:
            yield self._new("text"), self._with_blanks("")

    @property
    def reasoning_tokens(self) -> int:
        """Return how many tokens the reasoning has, with the mark at its end."""
        marks = self.reading.reasoning
        if marks is None or self.blocks[0].kind != "reasoning":
            return 0
        last = self.p.tokenizer.encode(marks.last)
        n = len(last)
        places = (i + n for i in range(len(self.ids)) if self.ids[i : i + n] == last)
        return next(places, len(self.ids))

    def _kind(self) -> str:
        return self.blocks[-1].kind if self.blocks else ""

    def _new(self, kind: str, id: str = "", name: str = "") -> Block:
        return Block(len(self.blocks), kind, id, name)

    def _with_blanks(self, text: str) -> str:
        text = self.blanks + text
        self.blanks = ""
        return text

    def _close(self) -> list[Event]:
        return self.closed(self.blocks[-1]) if self.blocks else []


class Responses(BlockForm):
    """/v1/responses"""

    prefix = "resp"
    KINDS = {"text": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.number = 0  # of the next event

    def item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        """Return an item of the output."""
        if block.kind == "call":
            call = {"type": "function_call", "call_id": block.id, "name": block.name}
            return call | {"id": self._id(block), "arguments": block.text, "status": status}
        content = []
        if block.text or status == "completed":
            content.append(self._part(block))
        item: dict[str, Any] = {"id": self._id(block), "status": status, "content": content}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _id(self, block: Block) -> str:
        prefix, _ = self.KINDS.get(block.kind, ("fc", ""))
        return f"{prefix}_{self.request_id}_{block.index}"

    def _part(self, block: Block) -> dict[str, Any]:
        """Return the content of an item."""
        part: dict[str, Any] = {"type": self.KINDS[block.kind][1], "text": block.text}
        if block.kind == "text":
            part |= {"annotations": [], "logprobs": []}
        return part

    def answer(self) -> dict[str, Any]:
        """Return the answer so far."""
        asked = self.asked
        status = {None: "in_progress", "length": "incomplete"}.get(self.finish, "completed")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        same = asked.model_dump(
            include={"instructions", "max_output_tokens", "temperature", "top_p"}
        )
        same |= asked.model_dump(include={"tools", "tool_choice", "text"}, by_alias=True)
        return {
            "id": f"{self.prefix}_{self.request_id}",
            "object": "response",
            "created_at": self.head["created"],
            "model": self.head["model"],
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": [self.item(block) for block in self.blocks],
            "usage": self._usage() if self.finish else None,
            "previous_response_id": None,
            "store": False,
            "metadata": {},
            **same,
            "tools": same["tools"] or [],
            "tool_choice": same["tool_choice"] or "auto",
            "text": same["text"] or {"format": {"type": "text"}},
            "parallel_tool_calls": self.body.parallel_tool_calls is not False,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.n_prompt,
            "input_tokens_details": {"cached_tokens": self.first_job.cached_tokens},
            "output_tokens": self.tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.n_prompt + self.tokens,
        }

    def _event(self, name: str, /, **fields: Any) -> Event:
        self.number += 1
        return {"type": name, "sequence_number": self.number - 1, **fields}

    def _of_item(self, name: str, block: Block, /, **fields: Any) -> Event:
        """Return an event about a part of the output."""
        place = {"item_id": self._id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        return self._event(f"response.{name}", **place, **fields)

    def _of_text(self, name: str, block: Block, **fields: Any) -> Event:
        if block.kind == "text":
            fields["logprobs"] = []
        return self._of_item(f"{self.KINDS[block.kind][1]}.{name}", block, **fields)

    def _item_event(self, name: str, block: Block, status: str) -> Event:
        item = self.item(block, status)
        return self._event(f"response.output_item.{name}", output_index=block.index, item=item)

    def begin(self, n: int) -> list[Event]:
        """Return the events before the first piece."""
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self.answer()) for name in names]

    def opened(self, block: Block) -> list[Event]:
        """Return the events of a new block."""
        events = [self._item_event("added", block, "in_progress")]
        if block.kind != "call":
            events.append(self._of_item("content_part.added", block, part=self._part(block)))
        return events

    def grown(self, block: Block, text: str) -> Event:
        """Return the event of new text in a block."""
        if block.kind == "call":
            return self._of_item("function_call_arguments.delta", block, delta=text)
        return self._of_text("delta", block, delta=text)

    def closed(self, block: Block) -> list[Event]:
        """Return the events of a complete block."""
        if block.kind == "call":
            done = dict(name=block.name, arguments=block.text)
            events = [self._of_item("function_call_arguments.done", block, **done)]
        else:
            events = [
                self._of_text("done", block, text=block.text),
                self._of_item("content_part.done", block, part=self._part(block)),
            ]
        return [*events, self._item_event("done", block, "completed")]

    def end(self) -> list[Event]:
        """Return the events after the last piece."""
        answer = self.answer()
        return [self._event(f"response.{answer['status']}", response=answer)]

    def failed(self, error: Error) -> Event:
        """Return the event that takes the place of all that would follow."""
        failure = {"code": error.code or error.type, "message": error.message}
        answer = self.answer() | {"status": "failed", "error": failure}
        return self._event("response.failed", response=answer)


class Messages(BlockForm):
    """/v1/messages"""

    prefix = "msg"
    REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

    length = 0  # characters of the text, with reasoning and calls

    def next(self, piece: Piece) -> list[Event]:
        """Return the events of a piece."""
        self.length += len(piece.text)
        return super().next(piece)

    def _stop(self) -> tuple[str | None, str | None]:
        """Return the reason of the end, and the stop string."""
        if self.finish is None:
            return None, None
        if self.finish == "stop" and self.body.stops:
            tokenizer = self.reading.showing_marks(self.p.tokenizer)
            data = b"".join([text_bytes(tokenizer, token) for token in self.ids])
            after_answer = data.decode("utf-8", "replace")[
                self.length :
            ]  # a stop string that was found
            for text in self.body.stops:
                if after_answer.startswith(text):
                    return "stop_sequence", text
        if self.finish == "stop" and any(block.kind == "call" for block in self.blocks):
            return "tool_use", None
        return self.REASONS.get(self.finish, "end_turn"), None

    def _usage(self) -> dict[str, Any]:
        cached = self.first_job.cached_tokens
        return {
            "input_tokens": self.n_prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.tokens,
        }

    def item(self, block: Block) -> dict[str, Any]:
        """Return a block of the content."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        try:
            arguments = json.loads(block.text or "{}")
        except (ValueError, RecursionError):  # cut off; or deeper than Python reads
            arguments = {}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}

    def answer(self) -> dict[str, Any]:
        """Return the answer so far."""
        reason, text = self._stop()
        return {
            "id": f"{self.prefix}_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": [self.item(block) for block in self.blocks],
            "stop_reason": reason,
            "stop_sequence": text,
            "usage": self._usage(),
        }

    def begin(self, n: int) -> list[Event]:
        """Return the events before the first piece."""
        return [{"type": "message_start", "message": self.answer()}]

    def opened(self, block: Block) -> list[Event]:
        """Return the events of a new block."""
        event = {"type": "content_block_start", "index": block.index}
        return [event | {"content_block": self.item(block)}]

    def grown(self, block: Block, text: str) -> Event:
        """Return the event of new text in a block."""
        names = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }
        kind, name = names[block.kind]
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def closed(self, block: Block) -> list[Event]:
        """Return the events of a complete block."""
        return [{"type": "content_block_stop", "index": block.index}]

    def end(self) -> list[Event]:
        """Return the events after the last piece."""
        reason, text = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": text}
        usage = self._usage()
        return [
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def failed(self, error: Error) -> Event:
        """Return the event that takes the place of all that would follow."""
        return messages_error(error)


def messages_error(error: Error) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = ERRORS.get(error.type, "api_error")
    if error.code == "model_not_found":
        kind = "not_found_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}
