"""Training examples from .jsonl files: which tokens a conversation has, and which of them are
trained.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}    the assistant's turns
    {"prompt": ..., "completion": ...}                                                         the completion
    {"text": ...}                                                                              everything

A conversation is rendered by the model's chat template. Its {% generation %} blocks are what is
trained. A template without them is rendered message by message: what an assistant's message adds to
the text of the messages before it and of the generation prompt is trained, with the token that ends
the turn. That needs a template whose text only grows; this is checked. An assistant's message with
"weight": 0 is not trained.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.chat_template import ChatTemplate
from ..data.records import Record, json_records, record_files
from ..data.tokenizer import Tokenizer
from ..errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """ids (n,) int32, the tokens.  trained (n,) bool: what the model shall say.
    prompt: the tokens before it."""

    where: str  # file and line
    ids: np.ndarray
    trained: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        return self.ids[: int(self.trained.argmax())]

    def cut(self, T: int) -> "Example":
        """Its first T inputs, and the target of the last one."""
        return Example(self.where, self.ids[: T + 1], self.trained[: T + 1])


def digest(examples: Iterable[Example]) -> str:
    """Return sha256 of the tokens and of which of them are trained."""
    checksum = hashlib.sha256()
    for x in examples:
        checksum.update(len(x.ids).to_bytes(8, "little") + x.ids.tobytes() + x.trained.tobytes())
    return checksum.hexdigest()


def read_examples(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    text_key: str = "text",
) -> Iterator[Example]:
    """Return the examples of .jsonl files, which may be globs. text_key: the field in place of
    "text".

    Raises UserError, which names file and line.
    """
    for path in record_files(files):
        empty = True
        for record in json_records(path):
            empty = False
            try:
                ids, trained = _tokens(record, tokenizer, template, text_key)
            except UserError as error:
                if str(error).startswith(record.where):
                    where = ""
                else:
                    where = f"{record.where}: "
                raise UserError(f"{where}{error}") from None
            yield Example(record.where, np.array(ids, np.int32), np.array(trained, bool))
        if empty:
            raise UserError(f"{path} has no records: give a file that is not empty")


def has_messages(files: Sequence[str | Path]) -> bool:
    """Return True if a record of these files is a conversation. Raises UserError."""
    records = (record for path in record_files(files) for record in json_records(path))
    return any("messages" in record.non_null for record in records)


def _tokens(
    record: Record, tokenizer: Tokenizer, template: ChatTemplate | None, text_key: str
) -> tuple[list[int], list[bool]]:
    fields = record.non_null
    if "messages" in fields:
        if template is None:
            raise UserError(
                "the model's folder has no chat template, which messages need: add "
                "chat_template.jinja to it, or give "
                '"prompt" and "completion"'
            )
        return _conversation(record, tokenizer, template)
    if "prompt" in fields or "completion" in fields:
        prompt = tokenizer.encode_prompt(record.text("prompt"))
        completion = answer_ids(record.text("completion"), tokenizer)
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)
    if text_key in fields:
        ids = _ended(tokenizer.encode_text(record.text(text_key)), tokenizer)
        return ids, [False] + [True] * (len(ids) - 1)
    hint = ""
    if "conversations" in fields:
        hint = ' (rename "conversations" and its fields)'
    raise UserError(
        f'{record.where} has neither "messages" nor "prompt" and "completion" nor "{text_key}": '
        "add one of them, or choose the field "
        f"of the text with --text-key{hint}"
    )


def answer_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that follows a prompt, with the end of the document, once."""
    return _ended(tokenizer.encode_more(text), tokenizer)


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    if ids[-1:] == [tokenizer.eot_id]:
        return ids
    return [*ids, tokenizer.eot_id]


# ----------------------------------------------------------------------------- conversations
def _messages(record: Record) -> list[dict[str, Any]]:
    """Return the checked messages of a record. Raises UserError."""
    messages = record.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f'{record.where}: "messages" must be a list of messages: fix or remove the line'
        )
    for i, message in enumerate(messages, 1):
        name = f"message {i}"
        if not isinstance(message, dict) or "role" not in message:
            raise UserError(f'{record.where}: {name} needs "role" and "content": add them')
        role = message["role"]
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise UserError(
                f"{record.where}: {name} has the weight {str(weight)[:40]}: give 0, not to train "
                "it, or 1"
            )
        if role not in ROLES:
            raise UserError(
                f"{record.where}: {name} has the role {str(role)[:40]!r}: choose one of "
                f"{', '.join(ROLES)}"
            )
        if role == "assistant" and message.get("tool_calls") and not message.get("content"):
            continue
        if "content" not in message:
            raise UserError(f'{record.where}: {name} has no "content": add it')
        needs_text = role in ("assistant", "user")
        record.check_text(message["content"], f'"content" of {name} ({role})', not needs_text)
    if not any(map(_is_trained, messages)):
        raise UserError(
            f"{record.where} has no message of the assistant, so nothing to train: add one, or "
            "remove the line"
        )
    return messages


def _is_trained(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _conversation(
    record: Record, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[bool]]:
    messages = _messages(record)
    tools = record.fields.get("tools")
    marked = template.marks_generation(tools)
    plain = [{k: x for k, x in message.items() if k != "weight"} for message in messages]
    if marked:
        text, spans = template.render_spans(plain, tools)
    else:
        text, spans = _growing(record, plain, tools, template)
    spans = _trained_spans(record, messages, spans)
    ids, places = tokenizer.encode_spans(text)
    trained = [False] * len(ids)
    for start, end in spans:
        inside = [i for i, (a, b) in enumerate(places) if a < end and start < b]
        # a line break after the token that ends the turn is not the model's
        if not marked:
            last = [n for n, i in enumerate(inside) if ids[i] in tokenizer.special_ids]
            blank = bool(last) and not text[places[inside[last[-1]]][1] : end].strip()
            if blank:
                inside = inside[: last[-1] + 1]
        for i in inside:
            trained[i] = True
    if not any(trained[1:]):
        raise UserError(
            f"{record.where}: the chat template renders nothing of the assistant: remove the "
            "line, or use another template"
        )
    return ids, trained


def _trained_spans(record: Record, messages: list[dict[str, Any]], spans: list[Span]) -> list[Span]:
    """Return the spans of messages whose weight is not 0.

    spans: of the assistant's messages. Raises UserError if it is unknown which span is whose.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if all(map(_is_trained, answers)):
        return spans
    if len(spans) != len(answers):
        raise UserError(
            f"{record.where}: the chat template has {len(spans)} generation blocks for "
            f'{len(answers)} messages of the assistant, so which of them has "weight": 0 is '
            "unknown: leave the weight out, or use another template"
        )
    return [span for span, message in zip(spans, answers) if _is_trained(message)]


def _growing(
    record: Record, messages: list[dict[str, Any]], tools: Any, template: ChatTemplate
) -> tuple[str, list[Span]]:
    """Return the text, and what each message of the assistant adds. Raises UserError if the text
    does not only grow."""
    text = template.render(messages, False, tools)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            after = template.render(messages[: i + 1], False, tools)
            if i:
                before = template.render(messages[:i], True, tools)
            else:
                before = _before_the_first(record, message, after, tools, template)
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"{record.where}: the chat template changes the text before message {i + 1} "
                    "when more messages follow, so "
                    "what the model says is unknown: mark it in the template with {% generation "
                    "%}, or give one answer per line"
                )
            spans.append((len(before), len(after)))
    return text, spans


def _before_the_first(
    record: Record, message: dict[str, Any], text: str, tools: Any, template: ChatTemplate
) -> str:
    """Return what the template writes before the text of the assistant's message with which the
    conversation begins: a system message of its own, and the generation prompt.

    text: of this message alone. Raises UserError if it is unknown where the message begins.
    """
    user = {"role": "user", "content": "question"}
    asked = template.render([message, user], False, tools)
    header = template.render([message, user], True, tools).removeprefix(asked)
    if header and header in text:
        return text[: text.index(header) + len(header)]
    content = (message.get("content") or "").strip()
    if content and content in text:  # the template writes no generation prompt, or another one
        return text[: text.index(content)].rstrip(" ")
    raise UserError(
        f"{record.where}: the conversation begins with the assistant, and where its message begins "
        "in the text is unknown: mark it in the template with {% generation %}, or begin with a "
        "message of the user"
    )
