"""Calls of functions in the text of an answer, in the form of the model's chat template:

hermes          <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>       Qwen, Hermes
llama           {"name": "f", "parameters": {...}}; {...}                         Llama 3.1, 3.2
mistral         [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]             Mistral to 2024
mistral_args    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]...                           Mistral since 2025
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class Form:
    """How a model writes calls.

    open, close: around all calls.  before, after: around the arguments of each; NAME stands for the
    function's name.  between: two calls.  trigger: the text that begins the first call; "": a call
    is the whole answer.
    head, tail: patterns for what a model may write as `before` and `after`; head.group(1) is the
    name.
    """

    before: str
    after: str
    between: str
    head: re.Pattern[str]
    tail: re.Pattern[str]
    open: str = ""
    close: str = ""
    trigger: str = ""
    id_length: int = 24


_NAMED = r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"%s"\s*:\s*(?=\{)'
FORMS = {
    "hermes": Form(
        before='<tool_call>\n{"name": "NAME", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
        head=re.compile(r"\s*<tool_call>\s*" + _NAMED % "arguments"),
        tail=re.compile(r"\s*\}\s*</tool_call>"),
        trigger="<tool_call>",
    ),
    "llama": Form(
        before='{"name": "NAME", "parameters": ',
        after="}",
        between="; ",
        head=re.compile(r"[\s;]*" + _NAMED % "(?:parameters|arguments)"),
        tail=re.compile(r"\s*\}"),
    ),
    "mistral": Form(
        open="[TOOL_CALLS] [",
        before='{"name": "NAME", "arguments": ',
        after="}",
        between=", ",
        close="]",
        head=re.compile(r"\s*(?:\[TOOL_CALLS\]\s*\[|,)\s*" + _NAMED % "arguments"),
        tail=re.compile(r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}(?:\s*\])?'),
        trigger="[TOOL_CALLS]",
        id_length=9,  # its template refuses others
    ),
    "mistral_args": Form(
        before="[TOOL_CALLS]NAME[ARGS]",
        after="",
        between="",
        head=re.compile(r"\s*\[TOOL_CALLS\]\s*([\w.-]+)\[ARGS\]\s*(?=\{)"),
        tail=re.compile(""),
        trigger="[TOOL_CALLS]",
        id_length=9,
    ),
}
MARKS = re.compile(r"(</?tool_call>|\[TOOL_CALLS\]|\[ARGS\])")


def form_of(template: str) -> str:
    """Return the key in FORMS of a model with this chat template. Raises UserError if there is
    none."""
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "ipython" in template and '"parameters"' in template:
        return "llama"
    raise UserError(
        "the model's chat template shows no tools, or calls in a form that is not supported: leave "
        f"tools out, or use a model with one of {', '.join(FORMS)}"
    )


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


def read_calls(text: str, form: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the calls of a whole answer, and the calls as a chat template reads
    them: {"id", "type", "function": {"name", "arguments"}}, the arguments as an object.

    form: a key of FORMS. Text that is not a readable call stays text.
    """
    how = FORMS[form]
    start = text.find(how.trigger) if how.trigger else 0
    unread = text[max(start, 0) :]
    calls: list[dict[str, Any]] = []
    while match := how.head.match(unread):
        end = match.end() + JsonObject().end_in(unread[match.end() :])
        after = how.tail.match(unread, end)
        try:
            arguments = json.loads(unread[match.end() : end])
        except (ValueError, RecursionError):
            break
        if after is None:
            break
        function = {"name": match.group(1), "arguments": arguments}
        # Mistral's templates want nine letters or digits
        calls.append({"id": f"call{len(calls):05}", "type": "function", "function": function})
        unread = unread[after.end() :]
    return (text[:start] if calls else text), calls
