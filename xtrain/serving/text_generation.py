"""Continue texts and print them as they come: what `xtrain.generate` does."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from ..errors import UserError
from .engine import Engine, Stream
from .pretrained import Pretrained, load
from .requests import REASONS
from .text_stream import TextStream

MAX_BATCH = 32  # sequences at a time, unless asked for more


LESS_MEMORY = "use a smaller model, --max-batch or number of tokens, or --precision bf16"


@dataclass(frozen=True)
class Options:
    """Continue texts with a model."""

    prompts: Annotated[tuple[str, ...], tyro.conf.Positional]  # texts to continue
    model: str  # a Hugging Face folder, or one of xtrain's runs
    max_new_tokens: int = 128  # per prompt
    temperature: float = 0.0  # 0: always the most likely token
    # draw among so many of the most likely tokens (at most 1024); none: all
    top_k: int | None = None
    top_p: float = 1.0  # draw among the fewest tokens that hold this share of the probability
    seed: int = 0  # the same seed gives the same texts
    # end before this text; may be given several times
    stop: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    stream: bool = False  # print while it is generated
    max_batch: int | None = None  # prompts at a time, the others wait; none: all, at most 32
    # a text does not depend on the other prompts, not even by rounding
    batch_invariant: bool = False
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU that has it


def generate(options: Options, pretrained: Pretrained | None = None) -> tuple[list[str], Engine]:
    """Write to stdout, and a summary to stderr. -> the new texts, the engine. Raises UserError."""
    o = options
    if not o.prompts:
        raise UserError('there is nothing to continue: give at least one prompt, such as "Once"')
    if "" in o.stop:
        raise UserError("a --stop text is empty: give at least one character, or leave it out")
    for i, prompt in enumerate(o.prompts, 1):
        if not prompt:
            raise UserError(f"prompt {i} is empty: give at least one character")
        if not is_text(prompt):
            raise UserError(f"prompt {i} holds bytes that are no UTF-8: give text")
    p = pretrained or load(o.model, o.device, o.precision)
    tokens = [p.tokenizer.encode(prompt, special=True) for prompt in o.prompts]
    engine = make_engine(p, tokens, o)
    start = time.perf_counter()
    stream = engine.stream(
        tokens, o.max_new_tokens, o.temperature, o.top_k, o.top_p, o.seed, stop=p.stop
    )
    if o.temperature == 0 and (o.top_k, o.top_p, o.seed) != (None, 1.0, 0):
        print(
            "with --temperature 0 nothing is drawn: --top-k, --top-p and --seed change nothing",
            file=sys.stderr,
        )
    texts = [TextStream(p.tokenizer, o.stop) for _ in tokens]
    events = pieces(stream, texts)
    if not o.stream:
        events = [(i, texts[i].text, True) for i in sorted(i for i, _, done in events if done)]
    show = Printer(o.prompts)
    for event in events:
        show(*event)
    _summary(stream.completions, texts, engine, time.perf_counter() - start)
    return [text.text for text in texts], engine


def is_text(text: str) -> bool:
    """False for what the operating system handed over as bytes without a meaning."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_engine(p: Pretrained, tokens: list[list[int]], o: Options) -> Engine:
    """As much cache as these prompts need. Raises UserError when one does not fit into the model."""
    context, lengths = p.model.config.context, [len(t) for t in tokens]
    longest = max(lengths)
    if 0 in lengths:
        raise UserError(
            f"prompt {lengths.index(0) + 1} holds nothing that the tokenizer knows: give other text"
        )
    if longest >= context:
        raise UserError(
            f"prompt {lengths.index(longest) + 1} has {longest} tokens, the model takes {context} with the answer: shorten it"
        )
    size = min(context, longest + max(o.max_new_tokens, 1))
    rows = min(len(tokens), MAX_BATCH if o.max_batch is None else o.max_batch)
    return Engine(p.model, rows, size, o.batch_invariant)


def pieces(stream: Stream, texts: list[TextStream]) -> Iterator[tuple[int, str, bool]]:
    """(number of the prompt, text, is it complete?) as it becomes certain. A stop string ends its sequence."""
    left, seen = set(range(len(texts))), [0] * len(texts)
    for i, token in stream:
        seen[i] += 1
        piece = texts[i].feed(token)
        if texts[i].stopped:
            stream.cancel(i)
        done = stream.completions[i].reason is not None and seen[i] == len(stream.completions[i])
        if done:
            piece += texts[i].finish()
            left.remove(i)
        yield i, piece, done
    for i in sorted(left):  # ended without a token
        yield i, texts[i].finish(), True


class Printer:
    """Prompts and texts on stdout, one behind the other, though they may be generated together: what belongs to a
    later prompt waits until those before it are complete."""

    def __init__(self, prompts: tuple[str, ...]):
        self.prompts, self.waiting = prompts, [""] * len(prompts)
        self.done, self.now = [False] * len(prompts), -1  # now: which prompt is being printed
        self._next()

    def _next(self):
        self.now += 1
        if self.now < len(self.prompts):
            n = len(self.prompts)
            title = f"--- {self.now + 1} of {n}\n" if n > 1 else ""
            sys.stdout.write(title + self.prompts[self.now])

    def __call__(self, i: int, piece: str, done: bool) -> None:
        self.waiting[i] += piece
        self.done[i] = done
        while self.now < len(self.prompts):
            sys.stdout.write(self.waiting[self.now])
            self.waiting[self.now] = ""
            if not self.done[self.now]:
                break
            sys.stdout.write("\n")
            self._next()
        sys.stdout.flush()


def _summary(completions, texts, engine, seconds):
    new = sum(map(len, completions))
    print(
        f"{engine.prefilled_tokens} prompt tokens, {new} new ones in {seconds:.2f} s "
        f"({new / seconds:.1f} tokens/s); {engine.describe()}",
        file=sys.stderr,
    )
    for i, (completion, text) in enumerate(zip(completions, texts), 1):
        if completion.reason in ("full", "nan"):
            more = f" ({engine.max_seq_len} tokens)" if completion.reason == "full" else ""
            print(f"text {i} ended because {REASONS[completion.reason]}{more}", file=sys.stderr)
        elif text.stopped:
            print(f"text {i} ended at a stop string", file=sys.stderr)
