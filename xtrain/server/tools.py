"""Functions that a model may call: the fields of a body, and the forms in which models write calls.

The form of a model is that of its chat template:

hermes          <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>       Qwen, Hermes
llama           {"name": "f", "parameters": {...}}; {...}                         Llama 3.1, 3.2
mistral         [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]             Mistral to 2024
mistral_args    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]...                           Mistral since 2025

A grammar (grammars.py) holds the model to it: with tool_choice "required" or a name from the first
token on, with "auto" from the token that begins a call; not so for llama, where none does. With
"auto" and a form for the text (structured.py) the answer is calls or a document of that form. So
the arguments are valid by the function's schema. Keywords that grammars do not support are ignored
unless the function is `strict`, as OpenAI does it: then the body is refused.
"""

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..data.tokenizer import Tokenizer
from ..errors import UserError
from .grammars import Guide, json_rule, literal_rule, special_marks
from .structured import Part

MAX_TOOLS = 512
NOTHING = {"type": "object", "properties": {}}  # the parameters of a function that gives none
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


# ----------------------------------------------------------------------------- fields of a body
class Function(Part):
    """What a model reads of a function."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool. OpenAI's own tools have other types, which are refused."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool as a chat template reads it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": NOTHING, **function}}


class ChosenName(Part):
    """A function that must be called."""

    name: str


class Chosen(Part):
    """OpenAI's tool_choice for one function."""

    type: Literal["function"]
    function: ChosenName


class CalledFunction(BaseModel):
    """The function of a call in a message of the assistant."""

    model_config = ConfigDict(strict=True)
    name: str
    arguments: str


class Call(BaseModel):
    """A call in a message of the assistant, as an answer has it."""

    model_config = ConfigDict(strict=True)
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call as a chat template reads it: with the arguments as an object."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError, RecursionError):  # a model may have written anything
            arguments = json.loads(arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


ToolChoice = Literal["none", "auto", "required"] | Chosen


# ----------------------------------------------------------------------------- forms of calls
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


@dataclass(frozen=True)
class ToolUse:
    """What an answer may call, for the code that reads it.

    form: a key of FORMS.  one: at most one call.  forced: the answer is nothing but a call that
    the client has named.  alone: calls have no text before them.
    """

    form: str
    one: bool = False
    forced: bool = False
    alone: bool = False

    @property
    def marks(self) -> list[str]:
        """Return the marks of calls."""
        form = FORMS[self.form]
        return MARKS.findall(form.open + form.before + form.after)


# ----------------------------------------------------------------------------- a request
def use_of(
    tools: list[Tool],
    choice: ToolChoice,
    one: bool,
    form: str,
    tokenizer: Tokenizer,
    stop: Collection[int],
    document: Guide | None = None,
) -> tuple[ToolUse, Guide | None]:
    """Return what an answer may call, and what it must be; None: anything.

    one: at most one call. form: a key of FORMS. stop: tokens that end an answer. document: what an
    answer without calls must be. Raises UserError.
    """
    functions = {tool.function.name: tool.function for tool in tools}
    if len(functions) < len(tools):
        raise UserError("two tools have the same name: give each a name of its own")
    forced = isinstance(choice, Chosen)
    if isinstance(choice, Chosen):
        name = choice.function.name
        if name not in functions:
            raise UserError(f"tool_choice names {name!r}, which is none of the tools")
        functions = {name: functions[name]}
    auto = choice == "auto"
    free = auto and document is None
    use = ToolUse(form, one or forced, forced, not free)
    if free and not FORMS[form].trigger:
        return use, None
    chosen = list(functions.values())
    control = tokenizer.special_ids - frozenset(stop)
    guide = _guide(chosen, FORMS[form], use.one, free, tokenizer, control)
    if auto and document is not None:
        guide = Guide.of_parts(["start: @calls | @document"], calls=guide, document=document)
    return use, guide


def _guide(
    functions: list[Function],
    form: Form,
    one: bool,
    auto: bool,
    tokenizer: Tokenizer,
    control: frozenset[int],
) -> Guide:
    """Return the grammar of the calls, in Lark.

    auto: a text may take their place, or precede them. control: special tokens in that text.
    """
    special = special_marks(tokenizer, MARKS.findall(form.open + form.before + form.after))

    def literals(text: str) -> str:
        parts = filter(None, MARKS.split(text))
        return " ".join(literal_rule(part, special) for part in parts)

    first = []
    following = []
    rules = []
    for i, function in enumerate(functions):
        rules.append(f"args{i}: {_arguments(function)}")
        before = form.before.replace("NAME", function.name)
        rest = f"args{i} {literals(form.after)}"
        following.append(f"{literals(before)} {rest}")
        begin = form.open + before
        if auto:
            begin = begin.removeprefix(form.trigger)
        first.append(f"{literals(begin)} {rest}")
    more = "" if one else f"({literals(form.between)} following)*"
    calls = f"first {more} {literals(form.close)}"
    ids = ",".join(map(str, sorted(control - frozenset(special.values()))))
    begun = f"(TEXT <[{ids}]>)*" if ids else ""  # the text up to its last control token
    if not auto:
        rules.append(f"start: {calls}")
    elif form.trigger in special:
        rules.append(f"start: {begun} TEXT | {begun} TEXT {literals(form.trigger)} {calls}")
    else:
        rules.append(f"start: {begun} TEXT | {begun} before {calls}")
        rules.append(f"before[lazy]: TEXT {literal_rule(form.trigger)}")
    rules.append(r"TEXT: /(.|\n)*/")
    rules.append(f"first: {' | '.join(first)}")
    rules.append(f"following: {' | '.join(following)}")
    return Guide.of_rules(rules)


def _arguments(function: Function) -> str:
    schema = dict(function.parameters or {})
    schema.setdefault("type", "object")
    return json_rule(schema, lenient=not function.strict)
