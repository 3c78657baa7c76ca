"""Conversations in records: the one reader of every command.

    {"messages": [{"role": "user", "content": ...}, ...]}     as OpenAI and Hugging Face write them
    {"conversations": [{"from": "human", "value": ...}, ...]} ShareGPT
    {"instruction": ..., "input": ..., "output": ...}         Alpaca
    {"prompt": [message, ...], "completion": [message, ...]}  the prompt is not trained

A record may also have "tools", a list of functions or its JSON, "system" (ShareGPT, Alpaca), and
"chat_template_kwargs", values that the chat template reads. The calls of a message may have their
arguments as an object or as JSON.

What is trained: the template is rendered once, and its own loop over the messages says which part of
the text belongs to which message (`ChatTemplate.render_turns`). Of an assistant's message this is
what follows the generation prompt, up to the token that ends the turn. If the template has
{% generation %} blocks, their text is trained instead.
"""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import UserError
from .chat_template import REASONING, ChatTemplate, Rendered
from .records import Record
from .tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content
CALLED = "called_function_7f3a"  # in place of a function's name: no text has it
Answers = Literal["all", "last", "each"]
Message = dict[str, Any]
Span = tuple[int, int]


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Put file and line in front of a UserError that does not begin with them."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(where):
            raise
        raise UserError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Conversation:
    """Checked messages, and what else the chat template gets.

    where: file and line.
    messages: {"role", "content"} and other fields of each, as a template reads them.
    tools: descriptions of functions, or None.
    values: of other names that the template reads, such as {"enable_thinking": False}.
    untrained: the numbers of the assistant's messages that are not trained ("weight": 0).
    """

    where: str
    messages: list[Message]
    tools: list[Any] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()

    @classmethod
    def of(cls, record: Record) -> "Conversation | None":
        """Return the conversation in a record; None if there is none. Raises UserError, which names
        file and line."""
        messages = _messages_of(record)
        if messages is None:
            return None
        return cls.read(record, messages)

    @classmethod
    def read(cls, record: Record, messages: Any, name: str = "messages") -> "Conversation":
        """Return a conversation of these messages, with the tools and values of the record. Raises
        UserError.

        messages: as the record has them.  name: of the field, for errors.
        """
        if not isinstance(messages, list) or not messages:
            raise UserError(
                f'{record.where}: "{name}" must be a list of messages: fix or remove the line'
            )
        messages = record.without_nulls(messages)
        read = [_message(record, i, message) for i, message in enumerate(messages, 1)]
        return cls(
            record.where,
            [message for message, _ in read],
            _decoded(record, "tools", list, "a list of functions") or None,
            _decoded(record, "chat_template_kwargs", dict, "an object") or {},
            frozenset(i for i, (_, weight) in enumerate(read) if weight == 0),
        )

    @property
    def asked(self) -> list[Message]:
        """The messages without answers at the end."""
        messages = self.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return messages

    @property
    def trained(self) -> list[int]:
        """The numbers of the messages that are trained."""
        roles = enumerate(message["role"] for message in self.messages)
        return [i for i, role in roles if role == "assistant" and i not in self.untrained]

    def parts(self, answers: Answers) -> list["Conversation"]:
        """Return the conversations to train on: "all": this one; "each": for every answer what
        leads to it, and that answer alone is trained; "last": the last of these."""
        if answers == "all" or not self.trained:
            return [self]
        chosen = self.trained
        if answers == "last":
            chosen = chosen[-1:]
        return [
            dataclasses.replace(
                self, messages=self.messages[: i + 1], untrained=frozenset(range(i))
            )
            for i in chosen
        ]

    def lost_reasoning(self, text: str) -> int:
        """Return how many answers that are trained have reasoning that the template leaves out.

        text: of the conversation, as rendered.
        """
        lost = 0
        for i in self.trained:
            message = self.messages[i]
            reasoning = next((message[name] for name in REASONING if name in message), "")
            before, mark, _ = message.get("content", "").partition("</think>")
            if mark:
                reasoning = before.removeprefix("<think>")
            lost += str(reasoning).strip() not in text
        return lost

    def prompt(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
        """Return the ids of prompt_text. Raises UserError."""
        return tokenizer.encode(self.prompt_text(template))

    def prompt_text(self, template: ChatTemplate | None) -> str:
        """Return the text up to where the next answer begins. Answers at the end, which a record for
        fine-tuning has, are not part of it. Raises UserError."""
        messages = self.asked
        if not messages:
            raise UserError(
                f"{self.where} has only messages of the assistant, so there is nothing to answer: "
                "add a message of the user, or remove the line"
            )
        with naming(self.where):
            text = _needed(template).render(messages, True, self.tools, self.values)
            if not text:
                raise UserError("the chat template renders nothing: use another template")
        return text

    def tokens(
        self, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of the whole conversation, and which of them are trained. Raises
        UserError."""
        if not self.trained:
            raise UserError(
                f"{self.where} has no message of the assistant that is trained: add one, or remove "
                "the line"
            )
        with naming(self.where):
            return self._tokens(tokenizer, _needed(template))

    def _tokens(self, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], list[bool]]:
        rendered = template.render_turns(self.messages, False, self.tools, self.values)
        self._check(rendered, template)
        ids, places = tokenizer.encode_spans(rendered.text)
        if template.marks_generation(self.tools):
            spans = self._marked(rendered)
        else:
            spans = [self._answer(i, rendered, tokenizer, template) for i in self.trained]
        trained = [False] * len(ids)
        for start, end in spans:
            for i, (a, b) in enumerate(places):
                if a < end and start < b:
                    trained[i] = True
        if not any(trained[1:]):
            raise UserError(
                "the chat template renders nothing of the assistant: remove the line, or use "
                "another template"
            )
        return ids, trained

    def _marked(self, rendered: Rendered) -> list[Span]:
        """Return the generation blocks of the messages that are trained."""
        if rendered.spans is None:
            raise UserError(
                "the chat template has a generation block whose place in the text is unknown: "
                "move it out of its macro"
            )
        if not self.untrained:
            return rendered.spans
        owners = [rendered.owner(start) for start, _ in rendered.spans]
        if None in owners:
            raise UserError(
                "the chat template does not say whose each generation block is, so what has "
                '"weight": 0 is unknown: leave the weight out, or use another template'
            )
        return [span for span, i in zip(rendered.spans, owners) if i in self.trained]

    def _answer(
        self, i: int, rendered: Rendered, tokenizer: Tokenizer, template: ChatTemplate
    ) -> Span:
        """Return the text of answer `i`: from the generation prompt to the end of the turn."""
        turns = rendered.of(i)
        if len(turns) != 1:
            raise UserError(
                f"where message {i + 1} is in the text is unknown, because no loop of the chat "
                "template writes it once: mark answers in the template with {% generation %}"
            )
        ((start, end),) = turns
        if i == len(self.messages) - 1:
            end = len(rendered.text)  # some write the token that ends the text after the loop
        said = rendered.text[start:end]
        before = self.messages[:i] or [self.messages[i], {"role": "user", "content": "question"}]
        prompt = self._prompt(before, template)
        if prompt == rendered.tail:  # it is written without being asked for
            prompt = ""
        if i == 0 and prompt in said:  # it may follow the beginning of the text
            start += said.index(prompt) + len(prompt)
        else:
            start += _shared(prompt, said, tokenizer)
        ids, places = tokenizer.encode_spans(rendered.text[start:end])
        last = max((n for n, x in enumerate(ids) if x in tokenizer.special_ids), default=None)
        # a line break after the token that ends the turn is not the model's
        if last is not None and not rendered.text[start + places[last][1] : end].strip():
            end = start + places[last][1]
        return start, end

    def _prompt(self, messages: list[Message], template: ChatTemplate) -> str:
        """Return the generation prompt after these messages, with what the template writes between
        the last of them and the prompt."""
        asked = template.render_turns(messages, True, self.tools, self.values)
        last = asked.of(len(messages) - 1)
        prompt = asked.text[last[-1][1] :] if last else ""
        if prompt:
            return prompt
        # the loop writes the prompt, or does not write the last message
        text = template.render(messages, False, self.tools, self.values)
        return asked.text.removeprefix(text) if asked.text.startswith(text) else ""

    def _left_out(self, template: ChatTemplate) -> Iterator[tuple[str, int]]:
        """Yield function and number of the message of each call that the template leaves out of
        what is trained: it is rendered with other names, which no text has."""
        messages = copy.deepcopy(self.messages)
        names: dict[str, tuple[str, int]] = {}
        for i in self.trained:
            for call in messages[i].get("tool_calls") or ():
                function = call.get("function", call)
                mark = f"{CALLED}_{len(names)}_"
                names[mark] = function["name"], i
                function["name"] = mark
        if names:
            text = template.render(messages, False, self.tools, self.values)
            yield from (call for mark, call in names.items() if mark not in text)

    def _check(self, rendered: Rendered, template: ChatTemplate) -> None:
        """Raise UserError if the text lacks a call that is trained, or if an answer has a tool's
        message in it, which would be trained, too."""
        for name, i in self._left_out(template):
            raise UserError(
                f"the chat template leaves out the call of {name} in message {i + 1}: use another "
                "template, or write the call as text"
            )
        if rendered.spans:
            return
        for i, message in enumerate(self.messages):
            if message["role"] != "tool" or not message["content"].strip():
                continue
            if not any(rendered.owner(start, i) is None for start, _ in rendered.of(i)):
                raise UserError(
                    f"the chat template writes message {i + 1} (tool) inside another one, so what "
                    "is the model's is unknown: mark answers in the template with {% generation %}"
                )


def _needed(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise UserError(
            "the model's folder has no chat template, which messages need: give one with "
            "--chat-template"
        )
    return template


def _shared(prompt: str, said: str, tokenizer: Tokenizer) -> int:
    """Return the characters at the beginning of a message that are the generation prompt's: all of
    it, or tokens of it, if it begins reasoning that this answer does not have."""
    if said.startswith(prompt):
        return len(prompt)
    n = 0
    ids, places = tokenizer.encode_spans(said)
    for ours, theirs, place in zip(ids, tokenizer.encode(prompt), places):
        if ours != theirs:
            break
        n = place[1]
    return n


# ----------------------------------------------------------------------------- fields of a record
def has_conversation(record: Record) -> bool:
    """Return True if a record is a conversation."""
    fields = record.non_null
    if {"messages", "conversations"} & fields or {"instruction", "output"} <= fields:
        return True
    return isinstance(record.fields.get("prompt"), list)


def _messages_of(record: Record) -> Any:
    """Return the messages of a record as it has them; None if it is no conversation."""
    if not has_conversation(record):
        return None
    fields = record.fields
    system = []
    if fields.get("system"):
        system = [{"role": "system", "content": record.text("system")}]
    for name in ("messages", "conversations"):
        if fields.get(name) is not None:
            if isinstance(fields[name], list):
                return system + fields[name]
            return fields[name]
    if isinstance(fields.get("prompt"), list):
        prompt = [without_weight(message) for message in fields["prompt"]]
        completion = fields.get("completion") or []
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not isinstance(completion, list):
            raise UserError(
                f'{record.where}: "completion" must be a list of messages: fix the line'
            )
        return prompt + completion
    asked = record.text("instruction")
    if str(fields.get("input") or "").strip():
        asked += "\n\n" + record.text("input")
    answer = {"role": "assistant", "content": record.text("output")}
    return [*system, {"role": "user", "content": asked}, answer]


def role_of(message: Any) -> Any:
    """Return the role of a message as a record has it, in xtrain's words; None without one."""
    if not isinstance(message, dict):
        return None
    role = message.get("role") or message.get("from")
    return OTHER_ROLES.get(str(role), role)


def without_weight(message: Any) -> Any:
    """Return a message that is not trained."""
    if isinstance(message, dict):
        return message | {"weight": 0}
    return message


def _decoded(record: Record, name: str, kind: type, what: str) -> Any:
    """Return a field that may be JSON in a string, as tables have it."""
    value = record.without_nulls(record.fields.get(name))
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value or "null")
    if value is not None and not isinstance(value, kind):
        raise UserError(f'{record.where}: "{name}" must be {what}, or its JSON: fix the line')
    return value


def _message(record: Record, number: int, message: Any) -> tuple[Message, int | None]:
    """Return a message as a template reads it, and its weight. Raises UserError."""
    name = f"message {number}"
    if isinstance(message, dict) and "from" in message and "role" not in message:
        message = {"role": message["from"], "content": message.get("value")} | {
            key: x for key, x in message.items() if key not in ("from", "value")
        }
    if not isinstance(message, dict) or message.get("role") is None:
        raise UserError(f'{record.where}: {name} needs "role" and "content": add them')
    message = {key: x for key, x in message.items() if x is not None}
    role = message["role"]
    weight = message.pop("weight", None)
    if weight not in (None, 0, 1):
        raise UserError(
            f"{record.where}: {name} has the weight {repr(weight)[:40]}: give 0, not to train it, "
            "or 1"
        )
    role = OTHER_ROLES.get(str(role), role)
    if role not in ROLES:
        raise UserError(
            f"{record.where}: {name} has the role {str(role)[:40]!r}: choose one of "
            f"{', '.join((*ROLES, *OTHER_ROLES))}"
        )
    message["role"] = role
    calls = _calls(record, name, message)
    if calls and not message.get("content"):
        message.pop("content", None)
        return message, weight
    if "content" not in message:
        raise UserError(f'{record.where}: {name} has no "content": add it')
    message["content"] = _content(record, name, message["content"])
    empty = role not in ("assistant", "user")
    record.check_text(message["content"], f'"content" of {name} ({role})', empty)
    return message, weight


def _content(record: Record, name: str, content: Any) -> Any:
    """Return parts of text as one text, and anything else as it is. Raises UserError for an image
    or another part that is not text."""
    if not isinstance(content, list):
        return content
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (None, *TEXT_PARTS):
            raise UserError(
                f"{record.where}: {name} has a part of the type {str(kind)[:40]!r}, but only text is "
                "supported: remove the part, or the line"
            )
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return content
        text += part["text"]
    return text


def _calls(record: Record, name: str, message: Message) -> bool:
    """Return True if a message calls functions. Raises UserError."""
    calls = message.get("tool_calls")
    if not calls or message["role"] != "assistant":
        return False
    functions = [None]
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        functions = [call.get("function", call) for call in calls]
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f'{record.where}: "tool_calls" of {name} must be a list of functions with "name" '
                'and "arguments": fix the line'
            )
    return True
