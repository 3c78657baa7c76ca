"""The requests and answers of OpenAI's API, as pydantic models.

Fields of OpenAI or vLLM that xtrain does not have and that would change the answer are in
UNSUPPORTED; a request that sets one is refused. Other unknown fields are ignored, as clients send
many. Limits that depend on the model are checked by `make_requests` (serving/requests.py).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import UserError

MAX_STOPS = 16  # stop strings of a request
MAX_SAMPLES = 128  # answers per prompt
UNSUPPORTED = {  # field -> values that mean the same as leaving it out
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (), "suffix": ("",), "echo": (False,), "best_of": (1,),
    # of vLLM
    "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "stop_token_ids": ([],), "ignore_eos": (False,), "min_tokens": (0,), "bad_words": ([],), "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (),
}  # fmt: skip

StopText = Annotated[str, Field(min_length=1)]
TokenIds = list[int]


class StreamOptions(BaseModel):
    """include_usage: a last chunk, without a choice, has the numbers of tokens."""

    include_usage: bool = False


class Sampling(BaseModel):
    """What /v1/chat/completions and /v1/completions share. None: the default."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    seed: int | None = None  # None: another one for every request
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "Sampling":
        for name, value in (self.model_extra or {}).items():
            neutral = UNSUPPORTED.get(name)
            if neutral is not None and value is not None and value not in neutral:
                raise UserError(f"{name} is not supported: leave it out")
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options needs stream: set it to true, or leave the options out")
        return self

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
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
        )
        values = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in values.items() if value is not None}
        options.setdefault("temperature", 1.0)
        if self.top_k not in (None, -1, 0):
            options["top_k"] = self.top_k
        return options


class TextPart(BaseModel):
    """A part of a message. Images and audio have other types, which are refused."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template reads it."""
        parts = []
        if isinstance(self.content, list):
            parts = self.content
        if isinstance(self.content, str):
            content = self.content
        else:
            content = "".join(p.text for p in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError(
                "top_logprobs needs logprobs: set it to true, or leave top_logprobs out"
            )
        return self


class CompletionRequest(Sampling):
    """The body of /v1/completions. prompt: a text, token ids, or a list of texts or of lists of
    ids."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=20)


class Usage(BaseModel):
    """Numbers of tokens: of every prompt once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Error(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
