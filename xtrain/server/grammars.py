"""What an answer must be, as masks of tokens: JSON schemas, regular expressions and grammars, by the
library llguidance.

A Guide is a text that describes the answer; requests carry it to the engine's process. There
Grammars compiles it for the tokens of the model. With its limits the worst grammar found takes 0.1 s
to compile and 20 ms for the mask of a token (a usual one: 2 ms and 0.1 ms); a sequence that exceeds
them ends as "constraint".
"""

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..formats.texts import Texts

# Between the tokens of JSON: without a limit, some models write blanks until their answer is cut.
WHITESPACE = r"[ ]?|\n[ \t]{0,24}"
# Of the lexer: at the start, where the library's default allows 7 s, and for one mask.
START_FUEL = 100_000
STEP_FUEL = 100_000
COMPILED = 16  # guides that stay compiled; each may have 20 MB, a usual one 0.1 MB
# Of each, as its sequences grow: a matcher and what llguidance calls a deep copy of it share a lexer,
# and one waits while the other makes a mask.
COPIES = 4
MAX_THREADS = 8  # that make masks
MAX_MESSAGE = 300  # characters


def library() -> Any:
    """Return llguidance. Raises UserError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "structured output and tools need llguidance, which is not installed: "
            "pip install -e '.[serve]'"
        ) from None
    return llguidance


@dataclass(frozen=True)
class Guide:
    """A grammar in llguidance's form."""

    text: str

    @classmethod
    def of_schema(cls, schema: Any) -> "Guide":
        """Return the guide of a JSON schema, a dict or bool. Raises UserError if it is neither."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise UserError(f"a JSON schema must be an object, got {json.dumps(schema)[:40]}")
        return cls.of_rules([f"start: {json_rule(schema)}"])

    @classmethod
    def of_regex(cls, pattern: str) -> "Guide":
        """Return the guide of a regular expression for the whole answer."""
        return cls(library().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def of_choice(cls, choices: list[str]) -> "Guide":
        """Return the guide of some texts."""
        return cls.of_rules(["start: " + " | ".join(map(literal_rule, choices))])

    @classmethod
    def of_rules(cls, rules: list[str]) -> "Guide":
        """Return the guide of rules in llguidance's form of Lark."""
        return cls(library().LLMatcher.grammar_from_lark("\n".join(["%llguidance {}", *rules])))

    @classmethod
    def of_parts(cls, rules: list[str], **parts: "Guide") -> "Guide":
        """Return the guide of rules in which @NAME stands for the part NAME."""
        grammars = [{"lark_grammar": cls.of_rules(rules).text}]
        for name, part in parts.items():
            if part.text.startswith("{"):
                first, *others = json.loads(part.text)["grammars"]
            else:
                first, *others = [{"lark_grammar": part.text}]
            grammars += [{**first, "name": name}, *others]
        return cls(json.dumps({"grammars": grammars}))

    @classmethod
    def of_lark(cls, grammar: str) -> "Guide":
        """Return the guide of a grammar in Lark's or llama.cpp's (GBNF) form. Raises UserError."""
        try:
            return cls(library().grammar_from("grammar", grammar))
        except ValueError as error:
            raise UserError(f"the grammar cannot be used: {_in_one_line(str(error))}") from None


def json_rule(schema: dict[str, Any], lenient: bool = False) -> str:
    """Return the right side of a rule for the documents of a schema, in Lark.

    lenient: ignore keywords that are not supported.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
    return "%json " + json.dumps(schema | {"x-guidance": options})


def special_marks(tokenizer: Tokenizer, marks: Iterable[str]) -> dict[str, int]:
    """Return the marks that are special tokens, with their ids."""
    special = {}
    for mark in marks:
        ids = tokenizer.encode(mark)
        if len(ids) == 1 and ids[0] in tokenizer.special_ids:
            special[mark] = ids[0]
    return special


def literal_rule(text: str, special: Mapping[str, int] = {}) -> str:
    """Return the right side of a rule for a text, or for a special token, in Lark."""
    if text in special:
        return f"<[{special[text]}]>"
    return json.dumps(text, ensure_ascii=False)


class Grammars:
    """Compiles guides for a tokenizer, in threads.

    stop: tokens that may end an answer. A pickled copy has compiled nothing.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[int]):
        self.tokenizer = tokenizer
        self.stop = sorted(stop)
        self.threads = ThreadPoolExecutor(2, "grammars")
        self.compiled = functools.lru_cache(COMPILED)(self._compiled)

    @classmethod
    def of(cls, texts: Texts) -> "Grammars":
        """Return those of a model's folder."""
        return cls(texts.tokenizer, texts.chat_stop | texts.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments."""
        return Grammars, (self.tokenizer, self.stop)

    def check(self, guide: Guide) -> None:
        """Raise UserError if a guide cannot be used. Waits until it is compiled."""
        error = self.compiled(guide).copy(0).result().error
        if error:
            raise UserError(f"the grammar cannot be used: {error}")

    def _compiled(self, guide: Guide) -> "GuideInUse":
        """Begin to compile a guide: milliseconds, at most about a second, mostly without the
        interpreter's lock. Return a Grammar of the engine."""
        return GuideInUse(lambda: self.threads.submit(lambda: Compiled(self.tokens, guide)))

    @functools.cached_property
    def tokens(self) -> Any:
        """The tokenizer as llguidance reads it: 0.1 s for 50,000 tokens. Raises UserError."""
        if not self.stop:
            raise UserError("the model has no token that ends an answer, which grammars need")
        wrapper = library().TokenizerWrapper(_Tokens(self.tokenizer, self.stop))
        tokens = library().LLTokenizer(wrapper, eos_token=self.stop)
        wrapper._gtokenizer.fallback = tokens.greedy_tokenize
        return tokens


class _Tokens:
    """A Tokenizer with the members that llguidance asks for."""

    bos_token_id = None
    fallback: Any = None

    def __init__(self, tokenizer: Tokenizer, stop: list[int]):
        self.tokenizer = tokenizer
        self.eos_token_id = stop[0]
        self.tokens = tokenizer.token_bytes
        # they are no text; nor do they end an answer elsewhere than at its end
        self.special = tokenizer.special_ids | frozenset(stop)
        self.special_token_ids = sorted(self.special)

    def __call__(self, data: bytes) -> list[int]:
        """Return the tokens of a text that a grammar forces. Their bytes must be those of the text:
        no special tokens, and no space in front of it, which some tokenizers add."""
        text = data.decode()
        for before in ("", "\n"):
            ids = self.tokenizer.encode(before + text)
            for i in range(len(ids)):
                some = ids[i:]
                same = b"".join(self.tokens[t] for t in some) == data
                if same and self.special.isdisjoint(some):
                    return some
        return self.fallback(text) if self.fallback else []


class Compiled:
    """A guide's matcher before the first token.   first: its mask.  error: why it cannot be used"""

    def __init__(self, tokens: Any, guide: Guide):
        limits = library().LLParserLimits(
            initial_lexer_fuel=START_FUEL, step_lexer_fuel=STEP_FUEL, verbose_errors=False
        )
        self.matcher = library().LLMatcher(tokens, guide.text, log_level=0, limits=limits)
        self.first = np.zeros(-(-tokens.vocab_size // 32), np.int32)
        if not self.matcher.is_error():
            _masks_into([(self.matcher, self.first)])  # with what a lexer does once
        self.error = _in_one_line(self.matcher.get_error())


class GuideInUse:
    """A Grammar of the engine (serving/constraints.py), compiled or about to be.

    compile: begins to compile it once more.
    """

    def __init__(self, compile: "Callable[[], Future[Compiled]]"):
        self.copy = functools.cache(lambda number: compile())
        self.copy(0)
        self.started = itertools.count()

    def start(self) -> "GuidedSequence":
        """Return a Constraint before the first token."""
        return GuidedSequence(self.copy(next(self.started) % COPIES))


class GuidedSequence:
    """A Constraint of the engine, for one sequence.   ended: as there"""

    def __init__(self, compiled: "Future[Compiled]"):
        self.compiled = compiled
        self.ended: str | None = None
        self.at_start = True

    @property
    def ready(self) -> bool:
        """Return True if the guide is compiled."""
        return self.compiled.done()

    @functools.cached_property
    def matcher(self) -> Any:
        """The state of this sequence."""
        return self.compiled.result().matcher.deep_copy()

    def accept(self, token: int) -> None:
        """Append a token."""
        self.at_start = False
        if not self.matcher.consume_token(token):
            self.ended = "constraint"
        elif self.matcher.is_stopped():
            self.ended = "stop"

    @staticmethod
    def masks_into(pairs: "Sequence[tuple[GuidedSequence, np.ndarray]]") -> None:
        """Write the masks of the next tokens, on several cores."""
        later = []
        for sequence, row in pairs:
            first = sequence.compiled.result().first
            words = row[: len(first)]  # the model may have more tokens than the tokenizer
            if sequence.at_start:
                words[:] = first
            else:
                later.append((sequence.matcher, words))
        _masks_into(later)


@functools.cache
def _executor() -> Any:
    return library().LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))


def _masks_into(pairs: list[tuple[Any, np.ndarray]]) -> None:
    """Write the masks of matchers of one tokenizer."""
    if len(pairs) == 1:
        ((matcher, words),) = pairs
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    elif pairs:
        masks = np.empty((len(pairs), len(pairs[0][1])), np.int32)
        numbered = [(matcher, i) for i, (matcher, _) in enumerate(pairs)]
        _executor().unsafe_compute_mask_ptr(
            numbered, masks.ctypes.data, masks[0].nbytes, len(pairs)
        )
        for (_, words), mask in zip(pairs, masks):
            words[:] = mask


def _in_one_line(message: str) -> str:
    """Return a message without the library's own state, which may follow."""
    return " ".join(message.partition("<state>")[0].split())[:MAX_MESSAGE]
