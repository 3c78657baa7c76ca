"""A conversation with a model in a terminal: the command `xtrain chat`. Earlier turns stay in the
KV cache."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..cli import print_text, say
from ..data.chat_template import template_values
from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..formats.gguf_tensors import shown
from .engine import Engine
from .options import (
    Draft,
    MaxSeqLen,
    SharedOptions,
    chosen_seq_len,
    engine_arguments,
)
from .pretrained import ModelOptions, Pretrained
from .requests import Completion, make_requests
from .text_generation import SamplingOptions, is_text, text_chunks
from .text_stream import TextStream

OWN = {"max_new_tokens": 1024, "temperature": 0.7, "top_p": 0.9}  # defaults of chat


@dataclass(frozen=True)
class Options(SharedOptions, SamplingOptions, ModelOptions):
    """Chat with a model in the terminal."""

    system: str | None = None  # instructions at the start of the conversation
    # values that the chat template reads, as JSON, such as '{"enable_thinking": false}'
    chat_template_kwargs: str | None = None
    max_seq_len: MaxSeqLen = None
    draft: Draft = None


class ContextFull(UserError):
    """The conversation leaves no room for another answer."""


class Conversation:
    """The messages of a conversation, and their tokens as the model has seen them.

    Every turn renders the whole conversation as text. If that text starts with the text of the
    earlier turns (true for nearly all templates), only the rest is tokenized and appended to the
    tokens in the cache. Otherwise (a template that leaves out earlier reasoning, for example) the
    whole text is tokenized, and the engine reuses the longest common prefix.

    One thread at a time uses it; conversations of several threads may share an engine.

    values: that the chat template reads, such as {"enable_thinking": False}.
    messages: {"role", "content"} of every message.  completion: tokens of the last answer.
    text, tokens: the conversation so far, rendered and as the model has seen it.
    turns: answers so far.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        engine: Engine,
        system: str | None = None,
        values: dict[str, Any] | None = None,
    ):
        self.pretrained = pretrained
        self.engine = engine
        self.system = system
        self.values = values
        self.stop = pretrained.chat_stop
        self.completion: Completion | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything except the system message."""
        self.messages: list[dict[str, str]] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.text = ""
        self.turns = 0
        self.tokens: list[int] = []

    def reply(self, user_text: str, **options: Any) -> Iterator[str]:
        """Return the text of the model's answer, while it is generated. options: as in
        Engine.stream.

        Leaving the iterator early keeps what was generated so far. Raises ContextFull, or UserError
        from the template; the conversation is unchanged then.
        """
        messages = [*self.messages, {"role": "user", "content": user_text}]
        text, tokens = self._rendered(messages, user_text)
        if len(tokens) >= self.engine.max_seq_len:
            raise ContextFull(self._too_long(len(tokens)))
        stream = self.engine.stream([tokens], stop=self.stop, **options)
        answer = TextStream(self.pretrained.tokenizer)
        try:
            for chunk in text_chunks(stream, [answer]):
                if chunk.text:
                    yield chunk.text
        finally:
            stream.close()
            (self.completion,) = stream.completions
            # All tokens, also those not read: another stream's step may have generated some.
            generated = list(self.completion)
            answer = TextStream(self.pretrained.tokenizer)
            for token in generated:
                answer.feed(token)
            answer.finish()
            # Special tokens are not part of the text: the template writes them.
            special = self.pretrained.tokenizer.special_ids
            answer_tokens = [t for t in generated if t not in special]
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            self.text = text + answer.text
            self.tokens = tokens + answer_tokens
            self.turns += 1

    def _too_long(self, n_tokens: int) -> str:
        context = self.engine.max_seq_len
        if not self.turns:
            what = "--system and this text have" if self.system else "this text has"
            return (
                f"{what} {n_tokens} tokens, the context {context} including the answer: shorten it"
            )
        return (
            f"the context is full: the conversation would have {n_tokens} tokens, the context has "
            f"{context} including the answer; type /reset to start again"
        )

    def _rendered(self, messages: list[dict[str, str]], user_text: str) -> tuple[str, list[int]]:
        """Return (text, tokens) of the conversation up to the start of the answer"""
        tokenizer = self.pretrained.tokenizer
        template = self.pretrained.template
        if template is None and not self.turns:
            return user_text, tokenizer.encode_prompt(user_text)
        if template is None:
            text = f"{self.text}\n{user_text}"
        else:
            text = template.render(messages, values=self.values)
        if self.turns and text.startswith(self.text):
            return text, self.tokens + tokenizer.encode_more(text[len(self.text) :])
        if not text:
            raise UserError(
                "the model's chat template renders nothing of this conversation: use another one"
            )
        return text, tokenizer.encode(text)


def chat(options: Options) -> None:
    """Read turns from stdin and answer on stdout until the input ends; notes go to stderr.

    Raises UserError for invalid options or model folders, before the first turn, and for a template
    that rejects the first turn.
    """
    o = options
    if not is_text(o.system or ""):
        raise UserError("--system is not valid UTF-8: give text")
    values = template_values(o.chat_template_kwargs)
    pretrained = o.load()
    template = pretrained.template
    context = pretrained.model.config.context
    size = chosen_seq_len(o.max_seq_len, context)
    more = dict(max_batch=1, max_seq_len=size, draft_model=pretrained.draft(o.draft))
    engine = Engine(pretrained.model, **engine_arguments(o) | more)
    conversation = Conversation(pretrained, engine, o.system, values)
    notes = [f"{shown(pretrained.folder)}; {engine.describe()}"]
    if not template:
        notes.append("no chat template: the model continues what you type")
        if o.system:
            notes.append("--system is ignored: it needs a chat template")
        if values:
            notes.append("--chat-template-kwargs is ignored: it needs a chat template")
    if size < context:
        notes.append(f"context {size} of {context} tokens (--max-seq-len)")
    defaults = GenerationDefaults.of(pretrained.model.generation)
    sampling = defaults.fill(o.given(), OWN)
    # Report invalid options before the user types.
    make_requests([[0]], pretrained.model.config, size, (), **sampling)
    seed = sampling.pop("seed")
    if engine.ready:
        notes.append(engine.ready)
    say("\n".join(["; ".join(notes), *defaults.notes(o.given(), OWN)]))
    while True:
        try:
            line = _read_line()
            if line is None or line.strip() in ("/exit", "/quit"):
                return
            if line.strip() == "/reset":
                conversation.reset()
            elif line.strip():
                _answer(conversation, line, sampling, seed)
        except KeyboardInterrupt:  # perhaps meant for an answer that has just ended: keep the chat
            if not sys.stdin.isatty():
                raise
            say("\n[type /exit or Ctrl-D to leave]")


def _read_line() -> str | None:
    """Return a line from the user; None at the end of the input. The prompt is only shown in a
    terminal."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys in input())
    try:
        return input("> ") if sys.stdin.isatty() else input()
    except EOFError:
        return None


def _answer(conversation: Conversation, line: str, sampling: dict[str, Any], seed: int) -> None:
    # Another seed for every turn: with one seed, equal turns would draw the same random numbers.
    seed = (seed + conversation.turns) % 2**63
    try:
        for text in conversation.reply(line, **sampling, seed=seed):
            print_text(text, end="", flush=True)
    except KeyboardInterrupt:
        say(" [interrupted]")
    except UserError as error:
        if not conversation.turns and not isinstance(error, ContextFull):
            raise
        say(f"[{error}]")  # and keep the earlier turns
        return
    print_text("", flush=True)
    completion = conversation.completion
    reason = None if completion is None else completion.reason  # a completion may be empty
    if reason == "full":
        say(
            f"[the context of {conversation.engine.max_seq_len} tokens is full: type /reset to "
            "start again]"
        )
    elif reason == "length":
        say("[the answer has reached --max-new-tokens]")
    elif reason == "nan":
        raise UserError("the model's logits are NaN: its weights are damaged, use another copy")
