"""Requests: the checks of the caller's arguments, and the state of each sequence."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..errors import UserError
from ..kernels.decoding.logprobs import MAX_TOP
from ..kernels.decoding.penalties import PenaltyRules
from ..kernels.decoding.sampling import check_sampling
from ..options import one_line
from .constraints import Constraint
from .scoring import Scores

MAX_ANSWERS = 1 << 16  # to one prompt
REASONS = {  # why a sequence ended
    "scored": "its log-probabilities are known",
    "stop": "a stop token was generated",
    "length": "it has max_new_tokens",
    "full": "its context is full",
    "cancelled": "it was cancelled",
    "nan": "the model's logits are NaN",
    "constraint": "its grammar allows no token, or is too complex here",
}


class State(enum.Enum):
    """Where a request is on its way through the engine. A preempted request waits again."""

    WAITING = "for a slot and blocks"
    PREFILLING = "it has them, and tokens without keys and values"
    DECODING = "it gets one token a step"
    ENDED = "it has a result, and neither slot nor blocks"


# The log-probability of a token; (token, log-probability) of the most likely ones.
TokenLogprobs = tuple[float, list[tuple[int, float]]]


class Completion(list[int]):
    """The new tokens of one sequence, including the stop token that ended it.

    reason      why the sequence ended, a key of REASONS; None while it is being generated
    prefilled   prompt tokens that were computed
    reused      prompt tokens whose keys and values were in the cache already
    queue_seconds   until it got a slot
    logprobs    if requested, for each token: its log-probability, and the most likely tokens with
                theirs, in order; else None. They are log_softmax of the model's logits, before
                temperature, bias and penalties; in an engine with logprobs_of="sampled" of the
                logits after them, -inf for a token that is not kept
    """

    reason: str | None = None
    prefilled = reused = 0
    queue_seconds = 0.0

    def __init__(self, logprobs: bool = False) -> None:
        self.logprobs: list[TokenLogprobs] | None = [] if logprobs else None

    def end(self, reason: str) -> str:
        """Set the reason unless there is one: the first stays, also between threads. -> the
        reason"""
        return vars(self).setdefault("reason", reason)  # one atomic operation


@dataclass(eq=False, slots=True)
class Request:
    """One prompt, its sampling options, and the state of its sequence in the engine."""

    prompt: list[int]  # the n requests of one prompt share the list: it is never changed
    max_new_tokens: int
    temperature: float
    top_k: int  # 0: all tokens
    top_p: float
    seed: int
    random_stream: int  # which of the random streams of this seed
    stop: frozenset[int]  # token ids
    min_p: float = 0.0  # 0: all tokens
    penalties: PenaltyRules = field(default_factory=PenaltyRules)
    logprobs: int | None = None  # of how many of the most likely tokens, and its own; None: of none
    scores: Scores | None = None  # what to compute instead of an answer (scoring.py)
    # what the answer must be, a Grammar; until the server's engine has it, a Guide; None: anything
    grammar: Any = None
    constraint: Constraint | None = None  # of the grammar, after the tokens that have arrived
    completion: Completion = field(default_factory=Completion)
    request_id: int = -1  # in the trace; requests are numbered in the order of submission
    state: State = State.WAITING
    # the tokens that the completion has at most: max_new_tokens, or less in a short context
    room: int = 0
    slot: int = -1  # entry of the decode batch; -1: none
    blocks: list[int] = field(default_factory=list)  # of the KV cache, in the order of the tokens
    # tokens of the sequence whose keys and values are in the blocks, or will be when all launches
    # end
    cached_tokens: int = 0
    in_flight: int = 0  # tokens that are launched and that the host does not know yet
    # of the blocks of the first tokens; replaced, never changed, because requests share the list;
    # empty: it shares no blocks
    keys: list[bytes] = field(default_factory=list)
    published: int = 0  # how many full blocks other sequences can find
    weights_version: int | None = None  # of the model, when the request was last admitted
    submitted: float = 0.0  # seconds of a clock
    adapter: int = -1  # its number (adapters.py); -1: none
    history: Any = None  # of its tokens, for drafts (speculation.py); None: not needed yet

    def start_constraint(self) -> None:
        """Begin the grammar again, and bring it to the tokens so far."""
        if self.grammar is not None:
            self.constraint = self.grammar.start()
            for token in self.completion:
                self.constraint.accept(token)

    @property
    def must_wait(self) -> bool:
        """Return True if it cannot be admitted yet: its last token is in flight, or its constraint
        is not ready."""
        return bool(self.in_flight) or not (self.constraint is None or self.constraint.ready)

    @property
    def tokens(self) -> list[int]:
        """Return the sequence so far."""
        return self.prompt + self.completion

    def own_tokens(self, tokens: list[int]) -> list[int]:
        """Return tokens as the cache knows them: with other numbers for each adapter, under which
        they have other keys and values."""
        if self.adapter < 0:
            return tokens
        return [token + ((self.adapter + 1) << 32) for token in tokens]

    @property
    def length(self) -> int:
        """Return how many tokens the sequence has so far."""
        return len(self.prompt) + len(self.completion)

    @property
    def reusable(self) -> list[int]:
        """Return the first tokens: the keys and values of all but the last may come from another
        sequence, its logits are wanted."""
        return self.tokens if self.scores is None else self.prompt[: self.scores.first]


@dataclass
class Step:
    """What happened in one step of the engine. Sequences are identified by their request_id."""

    number: int
    admitted: list[tuple[int, int]] = field(default_factory=list)  # (request_id, slot)
    prefilled: int = 0  # prompt tokens
    decoded: list[int] = field(default_factory=list)  # request_ids
    preempted: list[int] = field(default_factory=list)  # request_ids
    ended: list[tuple[int, str]] = field(default_factory=list)  # (request_id, reason)
    seconds: float = 0.0


# ------------------------------------------------------------------------- requests
def make_requests(
    prompts: Iterable[Sequence[int]],
    config: ModelConfig,
    max_seq_len: int,
    stop: Iterable[int],
    seed: int | Sequence[int],
    n: int = 1,
    **options: Any,
) -> list[Request]:
    """Check prompts and options, and return n Requests per prompt, one after the other.

    config: of the model.
    max_seq_len: tokens of a sequence, prompt and answer.
    stop, seed, options: as in Engine.stream; options are max_new_tokens and those of DEFAULTS.
    Raises UserError for a prompt or an option that is invalid.
    """
    prompts = _listed("prompts", prompts)
    if not _is_whole(n) or not 1 <= n <= MAX_ANSWERS:
        raise UserError(f"n must be a positive whole number, at most {MAX_ANSWERS}, got {n!r}")
    seed_per_prompt = isinstance(seed, (list, tuple, np.ndarray))
    options = DEFAULTS | options | {"seed": seed}
    columns = [_one_per_prompt(name, x, len(prompts)) for name, x in options.items()]
    try:
        if isinstance(stop, (str, bytes)):
            raise TypeError
        stop = frozenset(int(token) for token in stop)
    except (TypeError, ValueError):
        raise UserError(f"stop must hold token ids, got {stop!r}") from None
    requests = []
    for i, (prompt, *row) in enumerate(zip(prompts, *columns)):
        values = dict(zip(options, row))
        tokens = _checked_tokens(f"prompt {i}", prompt, config)
        if len(tokens) >= max_seq_len:
            raise UserError(
                f"prompt {i} has {len(tokens)} tokens, which leaves no room for an answer: give at "
                f"most {max_seq_len - 1} tokens, or raise max_seq_len ({max_seq_len}; the model "
                f"supports {config.context})"
            )
        for name, value in values.items():
            valid, expected = EXPECTED[name]
            if not valid(value):
                raise UserError(f"{name} must be {expected}, got {value!r}")
        k = values["top_k"]
        values["top_k"] = 0 if k is None or k >= config.vocab_size else int(k)
        penalties = _penalties(values, stop, config.vocab_size)
        try:
            float32: Any = np.float32  # as the kernels read them
            with np.errstate(over="ignore"):
                rules = [float32(values[name]) for name in ("temperature", "top_p", "min_p")]
            check_sampling(rules[0], values["top_k"], *rules[1:])
            penalties.check()
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"sampling: {error}") from None
        for sample in range(n):  # a sample's stream does not depend on how many there are
            random_stream = (0 if seed_per_prompt else i) + (sample << 32)
            requests.append(
                Request(
                    tokens,
                    **values,
                    random_stream=random_stream,
                    stop=stop,
                    penalties=penalties,
                    completion=Completion(values["logprobs"] is not None),
                ),
            )
    return requests


def make_scoring_requests(
    prompts: Iterable[Sequence[int]],
    continuations: Iterable[Sequence[int]] | None,
    config: ModelConfig,
    max_seq_len: int,
    top: int,
) -> list[Request]:
    """Return one Request per prompt whose result is its Scores. Arguments and errors as in
    Engine.logprobs."""
    prompts = _listed("prompts", prompts)
    if continuations is not None:
        continuations = _listed("continuations", continuations)
        if len(continuations) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts and {len(continuations)} continuations: give one each"
            )
    if not _is_whole(top) or not 0 <= top <= MAX_TOP:
        raise UserError(f"top must be a whole number from 0 to {MAX_TOP}, got {top!r}")
    requests = []
    for i, prompt in enumerate(prompts):
        tokens = _checked_tokens(f"prompt {i}", prompt, config)
        first = 1
        if continuations is not None:
            first = len(tokens)
            tokens += _checked_tokens(f"continuation {i}", continuations[i], config)
        if len(tokens) == first:
            raise UserError(f"prompt {i} has one token, which nothing precedes: give at least two")
        if len(tokens) > max_seq_len + 1:  # the last one is not computed
            raise UserError(
                f"sequence {i} has {len(tokens)} tokens: give at most {max_seq_len + 1}, or raise "
                f"max_seq_len ({max_seq_len}; the model supports {config.context})"
            )
        scores = Scores(tokens, first, int(top))
        requests.append(
            Request(
                tokens[:-1],
                max_new_tokens=0,
                temperature=0.0,
                top_k=0,
                top_p=1.0,
                seed=0,
                random_stream=0,
                stop=frozenset(),
                scores=scores,
            )
        )
    return requests


DEFAULTS: dict[str, Any] = dict(
    temperature=0.0,
    top_k=None,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=None,
    min_new_tokens=0,
    allowed_token_ids=None,
    logprobs=None,
    grammar=None,
)


def _is_whole(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return _is_whole(x) or isinstance(x, (float, np.floating))


def _is_bias(x: Any) -> bool:
    return isinstance(x, Mapping) and all(map(_is_whole, x)) and all(map(_is_number, x.values()))


# What each option may be, before its range is checked.
EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda x: _is_whole(x) and x > 0, "a positive whole number"),
    "top_k": (lambda x: x is None or (_is_whole(x) and x >= 0), "a whole number, or None"),
    "seed": (lambda x: _is_whole(x) and 0 <= x < 2**63, "a whole number from 0 to 2^63 - 1"),
    "logit_bias": (lambda x: x is None or _is_bias(x), "a dict from token ids to numbers, or None"),
    "min_new_tokens": (lambda x: _is_whole(x) and x >= 0, "a whole number, 0 or more"),
    "allowed_token_ids": (
        lambda x: x is None or (isinstance(x, (set, frozenset)) and all(map(_is_whole, x))),
        "a set of token ids, or None",
    ),
    "logprobs": (
        lambda x: x is None or (_is_whole(x) and 0 <= x <= MAX_TOP),
        f"a whole number from 0 to {MAX_TOP}, or None",
    ),
    "grammar": (lambda x: x is None or hasattr(x, "start"), "an object with a method start"),
} | {name: (_is_number, "a number") for name, x in DEFAULTS.items() if isinstance(x, float)}


def _penalties(values: dict[str, Any], stop: frozenset[int], vocab_size: int) -> PenaltyRules:
    """Take the options of the penalties out of `values`."""
    minimum = int(values.pop("min_new_tokens"))
    if minimum > values["max_new_tokens"]:
        raise UserError(
            f"min_new_tokens {minimum} is more than max_new_tokens {values['max_new_tokens']}: give "
            "a smaller one"
        )
    repetition, frequency, presence = (
        values.pop(f"{name}_penalty") for name in ("repetition", "frequency", "presence")
    )
    bias = values.pop("logit_bias") or {}
    allowed = values.pop("allowed_token_ids")
    check_ids("logit_bias", bias, vocab_size)
    check_ids("allowed_token_ids", allowed or (), vocab_size)
    return PenaltyRules(
        repetition,
        frequency,
        presence,
        {int(t): x for t, x in bias.items()},
        minimum,
        frozenset(token for token in stop if 0 <= token < vocab_size),
        allowed if allowed is None else frozenset(allowed),
    )


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise UserError if one of the ids is no token."""
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise UserError(
            f"{name} holds the token {outside[0]}: ids must be from 0 to {vocab_size - 1}"
        )


def _one_per_prompt(name: str, value: Any, n: int) -> list:
    if not isinstance(value, (list, tuple, np.ndarray)):
        return [value] * n
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return [value[()]] * n
    if len(value) != n:
        raise UserError(
            f"{name} has {len(value)} values for {n} prompts: give one, or one per prompt"
        )
    return list(value)


def _listed(name: str, lists: Any) -> list[Any]:
    try:
        return list(lists)
    except TypeError:
        raise UserError(
            f"{name} must be a list of lists of token ids, got {type(lists).__name__}"
        ) from None


def _checked_tokens(name: str, tokens: Any, config: ModelConfig) -> list[int]:
    try:
        ids = [int(token) for token in tokens]
        whole = all(a == b for a, b in zip(ids, tokens))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise UserError(f"{name} must be a list of token ids, got {one_line(repr(tokens))}")
    if not ids:
        raise UserError(f"{name} is empty: give at least one token")
    check_ids(name, ids, config.vocab_size)
    return ids
