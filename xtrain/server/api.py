"""The requests and answers of OpenAI's API, as pydantic models.

A field that would have no effect is refused: otherwise an answer looks as if the server had done
what it was asked to do. So every unknown field is an error that names it, except those in HARMLESS,
and values in NEUTRAL, which mean the same as leaving the field out, as null does. Limits that
depend on the model are checked by `make_requests` (serving/requests.py).
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import UserError
from ..kernels.decoding.penalties import MAX_BIASES
from .structured import Structured
from .tools import MAX_TOOLS, Call, Tool, ToolChoice

MAX_STOPS = 16  # stop strings of a request
MAX_STOP = 1000  # characters of each
MAX_SAMPLES = 128  # answers per prompt
MAX_MESSAGES = 10_000
MAX_PROMPTS = 1 << 16
MAX_STOP_IDS = 128
MAX_VALUES = 100  # for a chat template
HARMLESS = {  # field -> why no client can miss its effect in an answer
    **dict.fromkeys(("user", "safety_identifier"), "says who asks"),
    **dict.fromkeys(("metadata", "store"), "labels for a log of OpenAI's; nothing is stored here"),
    "prompt_cache_key": "equal beginnings are always reused",
    "prompt_cache_options": "the same",
    "prompt_cache_retention": "the same",
    "service_tier": "there is one",
    "parallel_tool_calls": "there are no tools",  # on /v1/completions; elsewhere it is a field
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {  # field -> values that mean the same as leaving it out
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "best_of": (1,), "suffix": ("",),
    # of vLLM, llama.cpp and others
    "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "bad_words": ([],), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "use_beam_search": (False,), "length_penalty": (1,), "priority": (0,),
    "repeat_penalty": (1,), "typical_p": (1,), "cache_prompt": (True,),
}  # fmt: skip

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
# fail_fast: a list with a million wrong items has one error
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TemplateValues = Annotated[dict[str, Any], Field(max_length=MAX_VALUES)]


class FieldError(UserError):
    """The refusal of one field.   field: its name"""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class Body(BaseModel):
    """An object that refuses unknown fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)
    harmless: ClassVar[dict[str, str]] = {}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def _refuse_unknown(self) -> "Body":
        unknown = [
            name
            for name, value in (self.model_extra or {}).items()
            if not (value is None or name in self.harmless)
            and value not in self.neutral.get(name, ())
        ]
        if unknown:
            # a field that another one belongs to comes first: "tools", then "tool_choice"
            name = "tools" if "tools" in unknown else unknown[0]
            raise FieldError(name, f"{name} is not supported: leave it out")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Describe the fields without an effect, too."""
        schema: dict[str, Any] = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        others: dict[str, Any] = {name: {"description": why} for name, why in cls.harmless.items()}
        others |= {name: {"enum": [None, *values]} for name, values in cls.neutral.items()}
        described["properties"] = others | described["properties"]
        described["additionalProperties"] = False
        return schema

    def forget_extra(self) -> None:
        """Forget the fields that have no effect, which may be long."""
        self.__pydantic_fields_set__.intersection_update(type(self).model_fields)
        (self.model_extra or {}).clear()


class StreamOptions(Body):
    """include_usage: a last chunk, without a choice, has the numbers of tokens.
    continuous_usage_stats: every chunk has those so far, as in vLLM."""

    harmless = {"include_obfuscation": "it only pads the events"}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Drawing(Body):
    """How tokens are drawn, in every API. None: the model's default (generation_config.json), else
    OpenAI's."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: all tokens
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)  # None: another one for every request
    stream: bool | None = None

    def drawing(self) -> dict[str, Any]:
        """Return these fields."""
        return {name: getattr(self, name) for name in Drawing.model_fields}


class Sampling(Structured, Drawing):
    """What /v1/chat/completions and /v1/completions share.

    Those of vLLM, with its meaning:
    min_tokens: of an answer, before an end token may be drawn or a stop string counts.
    ignore_eos: only stop_token_ids and stop strings end an answer.
    stop_token_ids: further end tokens. Their text is not part of the answer.
    allowed_token_ids: the only tokens that may be drawn.
    prompt_logprobs: report this many of the most likely tokens in each place of the prompt.
    """

    harmless = HARMLESS
    neutral = NEUTRAL
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: Annotated[dict[int, float], Field(max_length=MAX_BIASES)] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options",
                "stream_options needs stream: set it to true, or leave the options out",
            )
        return self

    source: ClassVar[str]  # the field that has the prompts

    @property
    def top(self) -> int | None:
        """Return of how many tokens log-probabilities are wanted; None: of none."""
        raise NotImplementedError

    @property
    def prompt_top(self) -> int | None:
        """Return the same for the tokens of the prompts."""
        return self.prompt_logprobs

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        if isinstance(self.stop, str):
            return [self.stop]
        return self.stop or []

    def options(self) -> dict[str, Any]:
        """Return the fields that are given and that make_requests takes under the same name."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
        )
        values = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in values.items() if value is not None}
        if self.top_k == -1:
            options["top_k"] = 0
        if self.min_tokens:
            options["min_new_tokens"] = self.min_tokens
        if self.allowed_token_ids is not None:
            options["allowed_token_ids"] = frozenset(self.allowed_token_ids)
        return options


class TextPart(Body):
    """A part of a message. Images and audio have other types, which are refused."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    # what the client of an answer has, and sends back with it
    neutral = {"annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tool_calls: list[Call] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    name: str | None = None  # of the function, with the role tool
    reasoning_content: str | None = None  # of the assistant, which the template may show

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> "Message":
        if self.name is not None and self.role != "tool":
            raise FieldError("name", "name is not supported: leave it out")
        if self.reasoning_content is not None and self.role != "assistant":
            raise FieldError(
                "reasoning_content", "reasoning_content belongs to a message of the assistant"
            )
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "tool_calls belong to a message of the assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise FieldError("tool_call_id", "tool_call_id belongs to a message of role tool")
        if self.content is None and not self.tool_calls:
            raise FieldError("content", "content is missing: give a text")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as a chat template reads it."""
        parts = []
        if isinstance(self.content, list):
            parts = self.content
        if isinstance(self.content, str):
            content = self.content
        else:
            content = "".join(p.text for p in parts)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.role == "developer":
            message["role"] = "system"
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
            if not content:  # a template may ask whether there is one
                del message["content"]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        for name in ("name", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(Sampling):
    """The body of /v1/chat/completions.

    chat_template_kwargs: values that the chat template reads, such as {"enable_thinking": false}.
    """

    neutral = NEUTRAL | {"echo": (False,), "add_special_tokens": (False,)}
    source = "messages"
    messages: Messages
    chat_template_kwargs: TemplateValues | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def usable_tools(self) -> list[Tool]:
        """Return the tools that the model may call."""
        if self.tool_choice == "none":
            return []
        return self.tools or []

    @property
    def top(self) -> int | None:
        """Return of how many tokens log-probabilities are wanted; None: of none."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0

    @model_validator(mode="after")
    def _choice_needs_tools(self) -> "ChatRequest":
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise FieldError("tools", "tools is missing: tool_choice needs some")
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError(
                "top_logprobs",
                "top_logprobs needs logprobs: set it to true, or leave top_logprobs out",
            )
        return self


class CompletionRequest(Sampling):
    """The body of /v1/completions.

    prompt: a text, token ids, or a list of texts or of lists of ids.
    echo: the answer begins with the prompt, and its log-probabilities, if requested.
    add_special_tokens: whether a text gets the tokens that the tokenizer puts around texts.
    """

    source = "prompt"
    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def top(self) -> int | None:
        """Return of how many tokens log-probabilities are wanted; None: of none."""
        return self.logprobs

    @property
    def scores_prompts(self) -> bool:
        """True if the echo has log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompt_top(self) -> int | None:
        """Return of how many tokens in each place of the prompts log-probabilities are wanted."""
        wanted = [self.prompt_logprobs]
        if self.scores_prompts:
            wanted.append(self.logprobs)
        return max([n for n in wanted if n is not None], default=None)

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts, each a text or token ids."""
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            return self.prompt
        return [self.prompt]


class TokenizeRequest(Body):
    """The body of vLLM's /tokenize: a text, or a conversation as the chat template writes it.

    add_special_tokens: whether it gets the tokens that the tokenizer puts around texts; None: a
    text does, a conversation does not.
    return_token_strs: return the entries of the vocabulary, too.
    """

    neutral = {"tools": ([],), "continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateValues | None = None
    return_token_strs: bool | None = None

    @property
    def source(self) -> str:
        """Return the field that has the text."""
        return "messages" if self.prompt is None else "prompt"

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(Body):
    """The body of vLLM's /detokenize."""

    source: ClassVar[str] = "tokens"
    model: str | None = None
    tokens: TokenIds


class Translated(Body):
    """A body in the form of another API, which asks for what a ChatRequest can ask for."""

    source: ClassVar[str]  # the field that has the conversation
    model: str | None = None

    def chat(self) -> ChatRequest:
        """Return the same as a ChatRequest. Raises ValidationError or UserError."""
        raise NotImplementedError

    def forget_input(self) -> None:
        """Forget the conversation, which may be long."""
        setattr(self, self.source, [])


class PromptDetails(BaseModel):
    """cached_tokens: those whose keys and values were in the cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens: of every prompt once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Error(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
