"""A conversation with a model in a terminal, its earlier turns kept in the KV cache."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError
from .engine import Engine
from .pretrained import Pretrained, load
from .requests import make_requests
from .text_generation import is_text, pieces
from .text_stream import TextStream

MAX_SEQ_LEN = 8192  # tokens, where the model takes more and nobody asked for it: the cache is taken whole at the start


@dataclass(frozen=True)
class Options:
    """Talk with a model."""

    model: str  # a Hugging Face folder, or one of xtrain's runs
    system: str | None = None  # instructions that stand before the conversation
    max_new_tokens: int = 1024  # per answer
    temperature: float = 0.7  # 0: always the most likely token
    # draw among so many of the most likely tokens (at most 1024); none: all
    top_k: int | None = None
    top_p: float = 0.9  # draw among the fewest tokens that hold this share of the probability
    seed: int = 0  # the same seed and the same words give the same answers
    # tokens of the whole conversation; none: what the model takes, at most 8192
    max_seq_len: int | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU that has it


class ContextFull(UserError):
    """The conversation leaves no room for another answer."""


class Conversation:
    """Messages, and the tokens that the model has seen of them.

    A turn's text is rendered with all that came before. When it begins with the text of the turns before (as nearly all
    templates have it) only the rest is made into tokens, behind the very tokens that are in the cache. Else (a template
    that leaves out former reasoning, say) the whole is, and the engine reuses the part that is still the same.
    """

    def __init__(self, p: Pretrained, engine: Engine, system: str | None = None):
        self.p, self.engine, self.system = p, engine, system
        self.stop = p.stop | ({p.tokenizer.eot_id} if p.template else set())
        self.completion = None  # of the last answer
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.text, self.tokens, self.turns = "", [], 0

    def reply(self, said: str, **options) -> Iterator[str]:
        """The model's answer, piece by piece. options: as for Engine.stream.

        Leaving the iterator early keeps what was given out so far. Raises ContextFull, or UserError from the template;
        then the conversation is as it was.
        """
        messages = [*self.messages, {"role": "user", "content": said}]
        text, tokens = self._rendered(messages, said)
        if len(tokens) >= self.engine.max_seq_len:
            raise ContextFull(self._too_long(len(tokens)))
        stream = self.engine.stream([tokens], stop=self.stop, **options)
        answer = TextStream(self.p.tokenizer)
        try:
            for _, piece, _ in pieces(stream, [answer]):
                if piece:
                    yield piece
        finally:
            stream.close()
            (self.completion,) = stream.completions
            answer.finish()
            special = self.p.tokenizer.special_ids  # no part of the text; the template writes them
            spoken = [t for t in self.completion if t not in special]
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            self.text, self.tokens = text + answer.text, tokens + spoken
            self.turns += 1

    def _too_long(self, tokens):
        most = self.engine.max_seq_len
        if not self.turns:
            what = "--system and this text have" if self.system else "this text has"
            return f"{what} {tokens} tokens, the context {most}, answer included: shorten it"
        return (
            f"the context is full: the conversation would have {tokens} tokens, and {most} with the answer is all; "
            "/reset begins anew"
        )

    def _rendered(self, messages, said):
        """-> (text, tokens) of the conversation up to where the answer begins"""
        tokenizer, template = self.p.tokenizer, self.p.template
        if template is None and not self.turns:
            return said, tokenizer.encode(said, special=True)
        text = f"{self.text}\n{said}" if template is None else template.render(messages)
        if self.turns and text.startswith(self.text):
            return text, self.tokens + tokenizer.encode_more(text[len(self.text) :])
        return text, tokenizer.encode(text)


def chat(options: Options) -> None:
    """Read from stdin, answer on stdout until the input ends. Raises UserError."""
    o = options
    if not is_text(o.system or ""):
        raise UserError("--system holds bytes that are no UTF-8: give text")
    p = load(o.model, o.device, o.precision)
    template, context = p.template, p.model.config.context
    size = min(context, MAX_SEQ_LEN) if o.max_seq_len is None else o.max_seq_len
    engine = Engine(p.model, 1, size, reuse_prefix=True)
    conversation = Conversation(p, engine, o.system)
    notes = [] if template else ["no chat template: the model continues what you type"]
    notes += [] if template or not o.system else ["--system is left out, it needs one"]
    notes += [f"context {size} of {context} tokens (--max-seq-len)"] if size < context else []
    sampling = dict(
        max_new_tokens=o.max_new_tokens, temperature=o.temperature, top_k=o.top_k, top_p=o.top_p
    )
    make_requests(
        [[0]], p.model.config, size, (), o.seed, **sampling
    )  # refuses before anyone types
    print(f"{p.folder}; {engine.describe()}", *notes, sep="; ", file=sys.stderr)
    while True:
        try:
            said = _read()
            if said is None or said.strip() in ("/exit", "/quit"):
                return
            if said.strip() == "/reset":
                conversation.reset()
            elif said.strip():
                _answer(conversation, said, sampling, o.seed)
        except KeyboardInterrupt:  # just after an answer: the talk must not be lost
            if not sys.stdin.isatty():
                raise
            print("\n[/exit or Ctrl-D leaves]", file=sys.stderr)


def _read() -> str | None:
    """A line from the user; None at the end of the input. The prompt is for people only."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys in input())
    try:
        return input("> ") if sys.stdin.isatty() else input()
    except EOFError:
        return None


def _answer(conversation: Conversation, said: str, sampling: dict, seed: int) -> None:
    try:
        # a seed of its own for every turn, or equal turns would draw alike
        for piece in conversation.reply(said, **sampling, seed=(seed + conversation.turns) % 2**63):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [interrupted]", file=sys.stderr)
    except UserError as refused:  # what was said before is not lost
        if not conversation.turns and not isinstance(refused, ContextFull):
            raise
        return print(f"[{refused}]", file=sys.stderr)
    print(flush=True)
    completion, engine = conversation.completion, conversation.engine
    if completion.reason == "full":
        print(
            f"[the context of {engine.max_seq_len} tokens is full: /reset begins anew]",
            file=sys.stderr,
        )
    elif completion.reason == "length":
        print("[the answer has --max-new-tokens and ends here]", file=sys.stderr)
    elif completion.reason == "nan":
        raise UserError("the model's logits are no numbers: its weights are damaged")
