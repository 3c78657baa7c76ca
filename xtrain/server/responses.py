"""The body of OpenAI's /v1/responses, and the same as a body of /v1/chat/completions.

Nothing is stored: previous_response_id and conversation are refused, so send all items again.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from .api import HARMLESS, MAX_MESSAGES, Body, ChatRequest, Drawing, TemplateValues, Translated
from .structured import JsonSchema, Part
from .tools import MAX_TOOLS, ChosenName, Function

IGNORED = {name: "of an answer that comes back" for name in ("id", "status", "annotations")}


class TextPart(Body):
    """A part of an item. Images and files have other types, which are refused."""

    harmless = IGNORED | {"logprobs": "of an answer that comes back"}
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


Parts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class InputMessage(Body):
    """A message."""

    harmless = IGNORED
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class FunctionCall(Body):
    """A call of the model's."""

    harmless = IGNORED
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(Body):
    """What a call has returned."""

    harmless = IGNORED
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(Body):
    """Reasoning of the model's."""

    harmless = IGNORED
    type: Literal["reasoning"]
    summary: Parts = []
    content: Parts | None = None


def _type(item: Any) -> Any:
    if isinstance(item, dict):
        return item.get("type", "message")
    return getattr(item, "type", None)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type),
]


class FlatTool(Function):
    """A function, as /v1/responses has it."""

    type: Literal["function"]


class FlatChosen(ChosenName):
    """tool_choice for one function."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""


class TextOptions(Part):
    """format: what an answer must be."""

    format: TextFormat | None = None
    verbosity: None = None


class ResponsesRequest(Translated, Drawing):
    """The body of /v1/responses. seed, top_k, min_p and chat_template_kwargs are vLLM's."""

    harmless = HARMLESS | {"stream_options": "they only pad the events"}
    neutral = {
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning comes back as it is
        "truncation": ("disabled",),
        "background": (False,),
        "reasoning": ({},),
    }
    source: ClassVar[str] = "input"
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: TemplateValues | None = None
    text: TextOptions | None = None
    tools: list[FlatTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FlatChosen | None = None
    parallel_tool_calls: bool | None = None

    def chat(self) -> ChatRequest:
        """Return the same as a ChatRequest. Raises ValidationError or UserError."""
        body = self.drawing()
        body["chat_template_kwargs"] = self.chat_template_kwargs
        body["parallel_tool_calls"] = self.parallel_tool_calls
        body["max_completion_tokens"] = self.max_output_tokens
        body["messages"] = self._messages()
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": one} for one in functions]
        body["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, FlatChosen):
            chosen = {"name": self.tool_choice.name}
            body["tool_choice"] = {"type": "function", "function": chosen}
        if self.text is not None and self.text.format is not None:
            wanted = self.text.format
            body["response_format"] = {"type": wanted.type}
            if wanted.type == "json_schema":
                schema = {"name": wanted.name, "schema": wanted.schema_}
                body["response_format"]["json_schema"] = schema
        return ChatRequest.model_validate(body)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, FunctionOutput):
                output = {"role": "tool", "tool_call_id": item.call_id}
                messages.append(output | {"content": _text(item.output)})
            elif isinstance(item, InputMessage) and item.role != "assistant":
                messages.append({"role": item.role, "content": _text(item.content)})
            else:  # reasoning, text and calls are items of one turn
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", "tool_calls": []})
                _add(messages[-1], item)
        return messages


def _add(turn: dict[str, Any], item: InputMessage | FunctionCall | ReasoningItem) -> None:
    """Add an item to the message of a turn of the model's."""
    if isinstance(item, InputMessage):
        turn["content"] += _text(item.content)
    elif isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        turn["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
    else:
        turn["reasoning_content"] = _text(item.content or item.summary)


def _text(content: str | list[TextPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)
