"""Functions that a model may call: the fields of a body, and the grammar of calls.

A grammar (grammars.py) holds the model to the form of its calls (serving/tool_calls.py): with
tool_choice "required" or a name from the first token on, with "auto" from the token that begins a
call; not so for llama, where none does. With "auto" and a form for the text (structured.py) the
answer is calls or a document of that form. So the arguments are valid by the function's schema.
Keywords that grammars do not support are ignored unless the function is `strict`, as OpenAI does
it: then the body is refused.
"""

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..serving.tool_calls import FORMS, MARKS, Form
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


# ----------------------------------------------------------------------------- a request
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
