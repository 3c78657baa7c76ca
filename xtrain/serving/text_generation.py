"""Continue texts and print them while they are generated: the command `xtrain generate`."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from typing_extensions import Doc

from ..cli import print_text, say
from ..errors import UserError
from ..formats.generation_config import GenerationDefaults
from ..option_fields import POSITIONAL, REPEATED
from .engine import Engine
from .options import (
    BatchInvariant,
    Draft,
    MaxBatch,
    SharedOptions,
    engine_arguments,
)
from .pretrained import ModelOptions, Pretrained
from .requests import MAX_ANSWERS, REASONS, Completion
from .stream import Stream
from .text_stream import TextStream

LESS_MEMORY = (
    "use a smaller model, a smaller --max-batch, fewer tokens, --precision bf16, or --weights int8"
)
MaxNewTokens = Annotated[int, Doc("tokens of an answer, at most")]  # with other defaults elsewhere


OWN = {"max_new_tokens": 128, "temperature": 0.0}  # defaults of generate


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that `generate` and `chat` share. None: as the model's generation_config.json says,
    else the command's own default."""

    # tokens of an answer, at most; none: the model's default, else 128 in generate, 1024 in chat
    max_new_tokens: int | None = None
    # 0: always the most likely token; none: the model's default, else 0 in generate, 0.7 in chat
    temperature: float | None = None
    # draw among this many of the most likely tokens (at most 1024); 0: all; none: the model's
    # default, else all
    top_k: int | None = None
    # draw among the fewest tokens that together have this share of the probability; none: the
    # model's default, else 1 in generate, 0.9 in chat
    top_p: float | None = None
    # draw among tokens with at least this share of the most likely one's probability; none: the
    # model's default, else 0
    min_p: float | None = None
    # above 1: tokens of the prompt and the answer become less likely (logits divided or
    # multiplied); none: the model's default, else 1
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0  # subtracted from the logits of tokens of the answer
    frequency_penalty: float = 0.0  # the same, once for each time that a token occurs
    seed: int = 0  # the same seed and the same input give the same texts

    def given(self) -> dict[str, Any]:
        """Return the options that are not None. Engine.stream has them under the same names."""
        values = {x.name: getattr(self, x.name) for x in fields(SamplingOptions)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Options(SharedOptions, SamplingOptions, ModelOptions):
    """Continue texts with a model."""

    prompts: Annotated[tuple[str, ...], POSITIONAL]  # texts to continue
    samples: int = 1  # texts per prompt; at temperature 0 they are all the same
    # end before this text; may be given several times
    stop: Annotated[list[str], REPEATED] = field(default_factory=list)
    stream: bool = False  # print while the text is generated
    max_batch: MaxBatch = 32
    batch_invariant: BatchInvariant = False
    draft: Draft = None


@dataclass(frozen=True)
class TextChunk:
    """The next text of one prompt's continuation."""

    number: int  # of the prompt
    text: str  # may be empty
    last: bool  # the continuation is complete with this text


def generate(options: Options, pretrained: Pretrained | None = None) -> tuple[list[str], Engine]:
    """Continue options.prompts on stdout, and print a summary on stderr. Return the new texts and
    the engine.

    pretrained: the model to use, instead of loading options.model.
    Raises UserError for invalid options, prompts or model folders.
    """
    o = options
    _check_texts(o)
    p = pretrained or o.load()
    defaults = GenerationDefaults.of(p.model.generation)
    arguments = defaults.fill(o.given(), OWN)
    tokens = [p.tokenizer.encode_prompt(prompt) for prompt in o.prompts]
    prompts = [prompt for prompt in o.prompts for _ in range(o.samples)]
    engine = make_engine(p, tokens, o, arguments["max_new_tokens"])
    start = time.perf_counter()
    stream = engine.stream(tokens, stop=p.stop, n=o.samples, **arguments)
    for note in defaults.notes(o.given(), OWN):
        say(note)
    drawing = (o.top_k or 0, o.top_p or 1.0, o.min_p or 0.0, o.seed)
    if arguments["temperature"] == 0 and drawing != (0, 1.0, 0.0, 0):
        say(
            "--top-k, --top-p, --min-p and --seed change nothing at --temperature 0: give a higher "
            "temperature to draw at random"
        )
    texts = [TextStream(p.tokenizer, o.stop) for _ in prompts]
    chunks: Iterable[TextChunk] = text_chunks(stream, texts)
    if not o.stream:
        numbers = sorted(chunk.number for chunk in chunks if chunk.last)
        chunks = [TextChunk(i, texts[i].text, True) for i in numbers]
    show = Printer(prompts)
    for chunk in chunks:
        show(chunk)
    _print_summary(stream.completions, texts, engine, time.perf_counter() - start)
    return [text.text for text in texts], engine


def _check_texts(o: Options) -> None:
    if not o.prompts:
        raise UserError('there is nothing to continue: give at least one prompt, such as "Once"')
    if "" in o.stop:
        raise UserError(
            "a --stop text is empty: give at least one character, or leave the option out"
        )
    if not 1 <= o.samples <= MAX_ANSWERS:
        raise UserError(
            f"--samples must be a positive whole number, at most {MAX_ANSWERS}, got {o.samples}"
        )
    for i, prompt in enumerate(o.prompts, 1):
        if not prompt:
            raise UserError(f"prompt {i} is empty: give at least one character")
        if not is_text(prompt):
            raise UserError(f"prompt {i} is not valid UTF-8: give text")


def is_text(argument: str) -> bool:
    """Return False if a command-line argument was not valid UTF-8: Python then has surrogates in
    place of its bytes."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_engine(p: Pretrained, tokens: list[list[int]], o: Options, max_new_tokens: int) -> Engine:
    """Return an engine with only as much KV cache as these prompts (token ids) need. Raises
    UserError if one does not fit."""
    context = p.model.config.context
    lengths = [len(t) for t in tokens]
    longest = max(lengths)
    if 0 in lengths:
        raise UserError(
            f"prompt {lengths.index(0) + 1} has no tokens after tokenization: give other text"
        )
    if longest >= context:
        raise UserError(
            f"prompt {lengths.index(longest) + 1} has {longest} tokens, the model supports "
            f"{context} including the answer: shorten it"
        )
    max_seq_len = min(context, longest + max(max_new_tokens, 1))
    sizes = dict(max_batch=min(len(tokens) * o.samples, o.max_batch), max_seq_len=max_seq_len)
    return Engine(p.model, **engine_arguments(o) | sizes, draft_model=p.draft(o.draft))


def text_chunks(stream: Stream, texts: list[TextStream]) -> Iterator[TextChunk]:
    """Iterate over a stream as text. A stop string ends its sequence.

    texts: one TextStream per prompt of the stream; afterwards they have the whole texts.
    """
    unfinished = set(range(len(texts)))
    seen = [0] * len(texts)
    for i, token in stream:
        seen[i] += 1
        text = texts[i].feed(token)
        if texts[i].stopped:
            stream.cancel(i)
        completion = stream.completions[i]
        last = completion.reason is not None and seen[i] == len(completion)
        if last:
            text += texts[i].finish()
            unfinished.remove(i)
        yield TextChunk(i, text, last)
    for i in sorted(unfinished):  # sequences that ended without a token
        yield TextChunk(i, texts[i].finish(), True)


class Printer:
    """Prints prompts and their continuations on stdout, one after the other, although they may be
    generated together.

    The text of a later prompt is buffered until the earlier ones are complete.
    """

    def __init__(self, prompts: Sequence[str]):
        self.prompts = prompts
        self.buffered = [""] * len(prompts)
        self.complete = [False] * len(prompts)
        self.current = -1
        self._print_next_prompt()

    def _print_next_prompt(self):
        self.current += 1
        if self.current < len(self.prompts):
            n = len(self.prompts)
            title = f"--- {self.current + 1} of {n}\n" if n > 1 else ""
            print_text(title + self.prompts[self.current], end="")

    def __call__(self, chunk: TextChunk) -> None:
        """Print the chunk, or buffer it if its prompt is not the current one."""
        self.buffered[chunk.number] += chunk.text
        self.complete[chunk.number] = chunk.last
        while self.current < len(self.prompts):
            print_text(self.buffered[self.current], end="")
            self.buffered[self.current] = ""
            if not self.complete[self.current]:
                break
            print_text("")
            self._print_next_prompt()
        sys.stdout.flush()


def _print_summary(
    completions: list[Completion], texts: list[TextStream], engine: Engine, seconds: float
) -> None:
    new = sum(map(len, completions))
    ready = f"; {engine.ready}" if engine.ready else ""
    say(
        f"{engine.prefilled_tokens} prompt tokens, {new} new tokens in {seconds:.2f} s "
        f"({new / seconds:.1f} tokens/s); {engine.describe()}{ready}"
    )
    for i, (completion, text) in enumerate(zip(completions, texts), 1):
        if completion.reason in ("full", "nan"):
            size = f" ({engine.max_seq_len} tokens)" if completion.reason == "full" else ""
            say(f"text {i} ended because {REASONS[completion.reason]}{size}")
        elif text.stopped:
            say(f"text {i} ended at a stop string")
