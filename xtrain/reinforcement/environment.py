"""An environment: the function that answers each turn of the model, and the tokens of its answers.

    def reply(record, messages):        once for each conversation: a line of the data, and the
        return "higher"                 messages so far, the last one of the model

It returns the next message, or None at the end of the episode. A message is a text, which the user
says, or {"role", "content"}, or a list of several, such as the results of tools. Of a prompt with
"tools" the model's messages have "tool_calls", with their arguments as objects. It decides from the
messages alone, so a step that is repeated has the same bits. An `async def` is called for all
conversations at the same time.

The tokens that the model has drawn stay as they are: a conversation only grows, and the next turn
finds their keys and values in the cache. The chat template decides what stands between two turns.
A template that would remove something from the model's earlier turns (its reasoning) does not: the
model reads what it has written.
"""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..data.chat_template import ChatTemplate
from ..data.conversations import Conversation
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..formats.texts import end_of_turn
from ..options import one_line
from ..serving.tool_calls import form_of, read_calls
from .calls import Call, CallError, Limits, UserFunction
from .prompts import Prompt

Messages = list[dict[str, Any]]
MARK = "turn_of_the_model_7f3a"  # in place of the model's words: no text has it


class Environment(UserFunction):
    """The function MODULE:FUNCTION."""

    kind = "environment"
    option = "--environment"
    example = "my_task:reply"

    def replies(
        self, conversations: Sequence[tuple[Prompt, Messages]], limits: Limits
    ) -> Iterator[Messages | CallError]:
        """Yield the next messages of each conversation, none at its end, or the error of the call.
        Raises calls.Interrupted."""
        calls = [
            Call(prompt.where, (copy.deepcopy(prompt.fields), copy.deepcopy(messages)))
            for prompt, messages in conversations
        ]
        for call, found in zip(calls, self.results(calls, limits)):
            yield self._checked(found, call.where)

    def cannot_append(self, where: str, why: UserError) -> CallError:
        """Return the error of messages that the chat template does not render."""
        return CallError(
            f"the environment {self.name} returned messages that cannot be appended for {where}: "
            f"{why}"
        )

    def _checked(self, found: Any, where: str) -> Messages | CallError:
        if isinstance(found, CallError):
            return found
        if found is None:
            return []
        messages = found if isinstance(found, list) else [found]
        messages = [{"role": "user", "content": x} if isinstance(x, str) else x for x in messages]
        for message in messages:
            fields = message if isinstance(message, dict) else {}
            if not all(is_text(fields.get(name)) for name in ("role", "content")):
                what = (
                    f"returned {one_line(repr(found))}, not a message (a text, or role and content)"
                )
                return self.failure(what, where)
        try:
            return copy.deepcopy(messages)  # the function may keep and change them
        except Exception:  # the user's types may raise anything
            return self.failure(f"returned {one_line(repr(found))}, which cannot be copied,", where)


def is_text(value: Any) -> bool:
    """Return True for a string without half a surrogate pair."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return isinstance(value, str)


class Turns:
    """Turns of the model as messages, and messages of the environment as tokens.

    template: None if prompts are texts: then the environment's text follows the model's.
    stop: the tokens that end a turn.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, stop: frozenset[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.stop = stop
        self.end_of_turn = tokenizer.decode(end_of_turn(template, tokenizer))

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise UserError if calls of tools cannot be read in the form of the chat template."""
        for x in (x.conversation for x in prompts):
            if x is not None and x.tools and self.template is not None:
                form_of(self.template.source(x.tools))

    def message(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Return what the model has said, with the calls that it has made."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        tools = prompt.conversation.tools if prompt.conversation is not None else None
        if self.template is None or not tools:
            return message
        with contextlib.suppress(UserError):  # of a form that is not supported: see check
            content, calls = read_calls(text, form_of(self.template.source(tools)))
            if calls:
                message |= {"content": content, "tool_calls": calls}
        return message

    def following(self, prompt: Prompt, messages: Messages, new: Messages, last: int) -> list[int]:
        """Return the tokens from the end of the model's turn to the beginning of its next one.

        messages: the conversation; the last one is the model's.   new: what follows.
        last: the last token of the model's turn.   Raises UserError of the chat template.
        """
        if prompt.conversation is None or self.template is None:
            return self.tokenizer.encode_more("".join(x["content"] for x in new))
        after = _after_turn(self.template, prompt.conversation, messages, new)
        ended = last in self.stop  # else at a stop string
        ends = [self.tokenizer.decode([last]) if ended else "", self.end_of_turn]
        end = next((x for x in ends if x and x in after), "")
        if not end:
            raise UserError(
                "the chat template writes no token after a turn of the model, so where the next "
                "one begins is unknown: use another template"
            )
        rest = after[after.index(end) + len(end) :]
        for text in (x["content"].strip() for x in new):
            if text not in rest and json.dumps(text, ensure_ascii=False)[1:-1] not in rest:
                raise UserError(
                    f"the chat template leaves out the environment's {one_line(text)!r}: return a "
                    "message of another role, or use another template"
                )
        return self.tokenizer.encode_more(rest if ended else end + rest)


def _after_turn(
    template: ChatTemplate, conversation: Conversation, messages: Messages, new: Messages
) -> str:
    """Return what the template writes after the beginning of the model's last turn."""
    turn = {**messages[-1], "content": MARK}
    if "tool_calls" in turn:  # some templates leave out the text of a message with calls
        turn["tool_calls"] = copy.deepcopy(turn["tool_calls"])
        turn["tool_calls"][-1]["function"]["name"] = MARK
    rendered = [*messages[:-1], turn, *new]
    text = template.render(rendered, True, conversation.tools, conversation.values)
    _, found, after = text.rpartition(MARK)
    if not found:
        raise UserError("the chat template leaves out a turn of the model: use another one")
    return after
