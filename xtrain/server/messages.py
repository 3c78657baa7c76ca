"""The body of Anthropic's /v1/messages, and the same as a body of /v1/chat/completions."""

import itertools
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from .api import (
    HARMLESS,
    MAX_MESSAGES,
    MAX_STOPS,
    Body,
    ChatRequest,
    Drawing,
    FieldError,
    StopText,
    TemplateValues,
    Translated,
)
from .structured import Part
from .tools import MAX_TOOLS, FunctionName

CACHE = {"cache_control": "equal beginnings are always reused"}


class TextBlock(Body):
    """Text. Images and documents have other types, which are refused."""

    harmless = CACHE | {"citations": "of an answer that comes back"}
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of the model's."""

    harmless = {"signature": "of an answer that comes back"}
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body):
    """A call of the model's."""

    harmless = CACHE | {"caller": "of an answer that comes back"}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolResultBlock(Body):
    """What a call has returned."""

    harmless = CACHE | {"is_error": "the content says so"}
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""


def _type(block: Any) -> Any:
    if isinstance(block, dict):
        return block.get("type")
    return getattr(block, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_type),
]


class Turn(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]

    def plain(self) -> list[dict[str, Any]]:
        """Return OpenAI's messages."""
        blocks = self.content
        if isinstance(blocks, str):
            return [{"role": self.role, "content": blocks}]
        if self.role == "user":
            kinds = itertools.groupby(blocks, key=type)
            return [message for _, some in kinds for message in _asked(list(some))]
        turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for block in blocks:
            if isinstance(block, TextBlock):
                turn["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                call = {"id": block.id, "type": "function", "function": function}
                turn["tool_calls"].append(call)
            else:
                raise FieldError("messages", "messages: a tool_result belongs to a user message")
        return [turn]


def _asked(blocks: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of successive blocks of the user's, all of one type."""
    kind = blocks[0].type
    if kind == "text":
        return [{"role": "user", "content": _text(blocks)}]
    if kind == "tool_result":
        return [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in blocks
        ]
    raise FieldError("messages", f"messages: a block {kind} belongs to an assistant message")


class CustomTool(Body):
    """A function. Anthropic's own tools have other types, which are refused."""

    harmless = CACHE
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class Choice(Part):
    """Which tools must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model reasons before it answers, if its chat template can be told."""

    type: Literal["adaptive", "disabled"]


class OutputFormat(Part):
    """What an answer must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """format: what an answer must be."""

    format: OutputFormat | None = None


class CountRequest(Translated):
    """The body of /v1/messages/count_tokens."""

    harmless = HARMLESS | CACHE
    source: ClassVar[str] = "messages"
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: list[CustomTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> ChatRequest:
        """Return the same as a ChatRequest. Raises ValidationError or UserError."""
        return ChatRequest.model_validate(self._chat())

    def _chat(self) -> dict[str, Any]:
        messages = [message for turn in self.messages for message in turn.plain()]
        if self.messages[-1].role == "assistant":
            raise FieldError(
                "messages", "messages: the last one is the assistant's: end with one of the user's"
            )
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        body: dict[str, Any] = {"messages": messages}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            body["chat_template_kwargs"] = {"enable_thinking": thinks}
        if self.tools:
            body["tools"] = [_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if choice is not None:
            names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
            named = {"type": "function", "function": {"name": choice.name or ""}}
            body["tool_choice"] = names.get(choice.type, named)
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            wanted = {"name": "answer", "schema": self.output_config.format.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return body


class MessagesRequest(CountRequest, Drawing):
    """The body of /v1/messages. seed, min_p and chat_template_kwargs are vLLM's."""

    max_tokens: int = Field(ge=1)
    chat_template_kwargs: TemplateValues | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None

    def _chat(self) -> dict[str, Any]:
        body = super()._chat() | self.drawing()
        if self.chat_template_kwargs is not None:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        return body | {"max_tokens": self.max_tokens, "stop": self.stop_sequences}


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"})
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
