"""What the engine keeps about each sequence, on the host and on the device, and the check of what users ask for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..device import to_device
from ..errors import UserError
from ..kernels.decoding.sampling import check_sampling

REASONS = {  # why a sequence ended
    "stop": "a stop token came",
    "length": "it has max_new_tokens",
    "full": "its row of the KV cache is full",
    "cancelled": "it was cancelled",
    "nan": "the model's logits are no numbers",
}


class Completion(list):
    """The new tokens of one sequence, a stop token included.

    reason      why it ended (a key of REASONS); None while it goes on
    prefilled   prompt tokens that were computed
    reused      prompt tokens that were in the cache already
    """

    def __init__(self):
        super().__init__()
        self.reason, self.prefilled, self.reused = None, 0, 0


@dataclass(eq=False)
class Request:
    """A sequence on its way through the engine."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int  # 0: all
    top_p: float
    seed: int
    number: int  # which of the random streams of that seed
    stop: frozenset[int]
    completion: Completion = field(default_factory=Completion)
    name: int = -1  # in the trace: its number, in the order of submission
    row: int = -1  # of the cache
    cached: int = 0  # tokens of it that are in the cache
    weights: int = -1  # version of the weights that it began with


@dataclass
class Step:
    """What happened in one step of the engine. Sequences go by the order in which they were submitted."""

    number: int
    admitted: list[tuple[int, int]] = field(default_factory=list)  # (sequence, row)
    prefilled: int = 0  # tokens
    decoded: list[int] = field(default_factory=list)  # sequences
    ended: list[tuple[int, str]] = field(default_factory=list)  # (sequence, reason)
    seconds: float = 0.0


# ----------------------------------------------------------------------------- requests
def make_requests(
    prompts: Sequence[Sequence[int]],
    config: ModelConfig,
    room: int,
    stop: Iterable[int],
    seed: int | Sequence[int],
    **options: Any,
) -> list[Request]:
    """Options as in Engine.stream; room: max_seq_len. Raises UserError on whatever makes no sense."""
    try:
        prompts = list(prompts)
    except TypeError:
        raise UserError(
            f"prompts must be a list of lists of token ids, got {type(prompts).__name__}"
        ) from None
    n, seeds = len(prompts), isinstance(seed, (list, tuple, np.ndarray))
    columns = [_each(name, value, n) for name, value in (options | {"seed": seed}).items()]
    try:
        if isinstance(stop, (str, bytes)):
            raise TypeError
        stop = frozenset(int(token) for token in stop)
    except (TypeError, ValueError):
        raise UserError(f"stop must hold token ids, got {stop!r}") from None
    requests = []
    for i, (prompt, *values) in enumerate(zip(prompts, *columns)):
        values = dict(zip([*options, "seed"], values))
        tokens = _tokens(i, prompt, config, room)
        _check_numbers(**values)
        k = values["top_k"]
        values["top_k"] = 0 if k is None or k >= config.vocab_size else int(k)
        try:
            with np.errstate(over="ignore"):  # as the kernels will see them
                temperature, top_p = (np.float32(values[name]) for name in ("temperature", "top_p"))
            check_sampling(temperature, values["top_k"], top_p)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"sampling: {error}") from None
        requests.append(Request(tokens, **values, number=0 if seeds else i, stop=stop))
    return requests


def _each(name, value, n):
    if not isinstance(value, (list, tuple, np.ndarray)):
        return [value] * n
    if np.ndim(value) == 0:
        return [value[()]] * n
    if len(value) != n:
        raise UserError(
            f"{name} has {len(value)} values for {n} prompts: give one, or one per prompt"
        )
    return list(value)


def _tokens(i, prompt, config, room):
    try:
        tokens = [int(token) for token in prompt]
        whole = all(a == b for a, b in zip(tokens, prompt))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise UserError(f"prompt {i} must be a list of token ids, got {type(prompt).__name__}")
    if not tokens:
        raise UserError(f"prompt {i} is empty: give at least one token")
    outside = [token for token in tokens if not 0 <= token < config.vocab_size]
    if outside:
        raise UserError(
            f"prompt {i} holds the token {outside[0]}: ids must be from 0 to {config.vocab_size - 1}"
        )
    if len(tokens) >= room:
        raise UserError(
            f"prompt {i} has {len(tokens)} tokens, which leaves no room for an answer: the engine takes sequences "
            f"of {room} tokens (max_seq_len; the model takes {config.context})"
        )
    return tokens


def _check_numbers(max_new_tokens, temperature, top_k, top_p, seed):
    whole = lambda x: isinstance(x, (int, np.integer)) and not isinstance(x, bool)
    number = lambda x: whole(x) or isinstance(x, (float, np.floating))
    for name, value, ok, wanted in (
        ("max_new_tokens", max_new_tokens, whole(max_new_tokens) and max_new_tokens > 0, "a positive whole number"),
        ("temperature", temperature, number(temperature), "a number"),
        ("top_k", top_k, top_k is None or (whole(top_k) and top_k >= 0), "a whole number, or None"),
        ("top_p", top_p, number(top_p), "a number"),
        ("seed", seed, whole(seed) and 0 <= seed < 2**63, "a whole number from 0 to 2^63 - 1"),
    ):  # fmt: skip
        if not ok:
            raise UserError(f"{name} must be {wanted}, got {value!r}")


# ----------------------------------------------------------------------------- on the device
class Lanes:
    """What sampling and the decoding step read and write: nine numbers for each of B sequences.

    One block of memory, so that one copy brings all of it to the device; there the step itself keeps it up to date.
    """

    COLUMNS = {
        "seed": np.int64, "number": np.int64, "ids": np.int32, "lengths": np.int32, "rows": np.int32,
        "step": np.int32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32,
    }  # fmt: skip

    def __init__(self, B: int, device: str):
        self.host = np.zeros(B * sum(np.dtype(t).itemsize for t in self.COLUMNS.values()), np.uint8)
        self.block, self.on_gpu = to_device(self.host.copy(), device), device == "gpu"
        self.B, self.there, self.here = B, self._columns(self.block, B), self._columns(self.host, B)
        self.here["top_p"][:] = 1

    @classmethod
    def _columns(cls, block, B):
        columns, end = {}, 0
        for name, dtype in cls.COLUMNS.items():
            start, end = end, end + B * np.dtype(dtype).itemsize
            columns[name] = block[start:end].view(dtype)
        return columns

    def fill(self, requests: list[Request]) -> None:
        """Lane b is requests[b]; the lanes after them are idle."""
        here = self.here
        here["rows"][:] = -1
        for b, r in enumerate(requests):
            here["seed"][b], here["number"][b], here["rows"][b] = r.seed, r.number, r.row
            here["ids"][b] = r.completion[-1] if r.completion else 0
            here["lengths"][b], here["step"][b] = r.cached, len(r.completion)
            here["temperature"][b], here["top_k"][b] = r.temperature, r.top_k
            here["top_p"][b] = r.top_p
        if self.on_gpu:
            self.block.set(self.host)
        else:
            self.block[...] = self.host

    def first(self, b: int) -> dict[str, Any]:
        """The first b lanes, on the device."""
        return {name: column[:b] for name, column in self.there.items()}
