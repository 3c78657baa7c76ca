"""Requests: the checks of the caller's arguments, and the state of each sequence on the host and on the device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..config import ModelConfig
from ..device import Array, to_device
from ..errors import UserError
from ..kernels.decoding.sampling import check_sampling

REASONS = {  # why a sequence ended
    "stop": "a stop token was generated",
    "length": "it has max_new_tokens",
    "full": "its slot of the KV cache is full",
    "cancelled": "it was cancelled",
    "nan": "the model's logits are NaN",
}


class Completion(list[int]):
    """The new tokens of one sequence, including the stop token that ended it.

    reason      why the sequence ended, a key of REASONS; None while it is being generated
    prefilled   prompt tokens that were computed
    reused      prompt tokens whose keys and values were in the cache already
    """

    reason: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.prefilled, self.reused = 0, 0

    def end(self, reason: str) -> str:
        """Set the reason unless there is one: the first stays, also between threads. -> the reason"""
        return vars(self).setdefault("reason", reason)  # one atomic operation


@dataclass(eq=False)
class Request:
    """One prompt, its sampling options, and the state of its sequence in the engine."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int  # 0: all tokens
    top_p: float
    seed: int
    random_stream: int  # which of the random streams of this seed
    stop: frozenset[int]  # token ids
    completion: Completion = field(default_factory=Completion)
    request_id: int = -1  # in the trace; requests are numbered in the order of submission
    slot: int = -1  # of the KV cache
    cached_tokens: int = 0  # tokens of the sequence whose keys and values are in the slot
    weights_version: int = -1  # of the model, when the request was admitted


@dataclass
class Step:
    """What happened in one step of the engine. Sequences are identified by their request_id."""

    number: int
    admitted: list[tuple[int, int]] = field(default_factory=list)  # (request_id, slot)
    prefilled: int = 0  # prompt tokens
    decoded: list[int] = field(default_factory=list)  # request_ids
    ended: list[tuple[int, str]] = field(default_factory=list)  # (request_id, reason)
    seconds: float = 0.0


# ----------------------------------------------------------------------------- requests
def make_requests(
    prompts: Iterable[Sequence[int]],
    config: ModelConfig,
    max_seq_len: int,
    stop: Iterable[int],
    seed: int | Sequence[int],
    **options: Any,
) -> list[Request]:
    """Check prompts and options, and return one Request per prompt.

    config: of the model.  max_seq_len: tokens of a sequence, prompt and answer.  stop, seed, options: as in Engine.stream;
    options are max_new_tokens, temperature, top_k and top_p.
    Raises UserError for a prompt or an option that is invalid.
    """
    try:
        prompts = list(prompts)
    except TypeError:
        raise UserError(
            f"prompts must be a list of lists of token ids, got {type(prompts).__name__}"
        ) from None
    n, seed_per_prompt = len(prompts), isinstance(seed, (list, tuple, np.ndarray))
    columns = [_one_per_prompt(name, x, n) for name, x in (options | {"seed": seed}).items()]
    try:
        if isinstance(stop, (str, bytes)):
            raise TypeError
        stop = frozenset(int(token) for token in stop)
    except (TypeError, ValueError):
        raise UserError(f"stop must hold token ids, got {stop!r}") from None
    requests = []
    for i, (prompt, *row) in enumerate(zip(prompts, *columns)):
        values = dict(zip([*options, "seed"], row))
        tokens = _checked_tokens(i, prompt, config, max_seq_len)
        _check_numbers(**values)
        k = values["top_k"]
        values["top_k"] = 0 if k is None or k >= config.vocab_size else int(k)
        try:
            float32: Any = np.float32  # as the kernels read them
            with np.errstate(over="ignore"):
                temperature, top_p = float32(values["temperature"]), float32(values["top_p"])
            check_sampling(temperature, values["top_k"], top_p)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"sampling: {error}") from None
        random_stream = 0 if seed_per_prompt else i
        requests.append(Request(tokens, **values, random_stream=random_stream, stop=stop))
    return requests


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


def _checked_tokens(i: int, prompt: Any, config: ModelConfig, max_seq_len: int) -> list[int]:
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
    if len(tokens) >= max_seq_len:
        raise UserError(
            f"prompt {i} has {len(tokens)} tokens, which leaves no room for an answer: give at most {max_seq_len - 1} tokens, "
            f"or raise max_seq_len ({max_seq_len}; the model supports {config.context})"
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
class DecodeBatch:
    """The state that sampling and the decoding step read and write: nine numbers for each of up to B sequences.

    Entry b of every column belongs to the sequence at position b of the batch; entries with slot -1 are idle. The columns
    are views of one block of memory, so one copy uploads all of them. On the device the decoding step itself updates them.

    host, device: the columns by name, each (B,).
    """

    # ids: last token.  lengths: tokens in the slot.  step: tokens drawn so far.
    COLUMNS: ClassVar[dict[str, type]] = {
        "seed": np.int64, "random_stream": np.int64, "ids": np.int32, "lengths": np.int32, "slots": np.int32,
        "step": np.int32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32,
    }  # fmt: skip

    def __init__(self, B: int, device: str):
        nbytes = B * sum(np.dtype(t).itemsize for t in self.COLUMNS.values())
        self.host_bytes = np.zeros(nbytes, np.uint8)
        self.device_bytes: Array = to_device(self.host_bytes.copy(), device)
        self.on_gpu = device == "gpu"
        self.host = self._columns(self.host_bytes, B)
        self.device = self._columns(self.device_bytes, B)
        self.host["top_p"][:] = 1

    @classmethod
    def _columns(cls, block: Array, B: int) -> dict[str, Array]:
        columns, end = {}, 0
        for name, dtype in cls.COLUMNS.items():
            start, end = end, end + B * np.dtype(dtype).itemsize
            columns[name] = block[start:end].view(dtype)
        return columns

    def fill(self, requests: list[Request]) -> None:
        """Write requests[b] to entry b, mark the entries after them as idle, and upload."""
        host = self.host
        host["slots"][:] = -1
        for b, r in enumerate(requests):
            host["seed"][b], host["random_stream"][b] = r.seed, r.random_stream
            host["slots"][b] = r.slot
            host["ids"][b] = r.completion[-1] if r.completion else 0
            host["lengths"][b], host["step"][b] = r.cached_tokens, len(r.completion)
            host["temperature"][b], host["top_k"][b] = r.temperature, r.top_k
            host["top_p"][b] = r.top_p
        self.upload()

    def upload(self) -> None:
        """Copy all columns from the host to the device."""
        if self.on_gpu:
            self.device_bytes.set(self.host_bytes)
        else:
            self.device_bytes[...] = self.host_bytes

    def first(self, b: int) -> dict[str, Array]:
        """The first b entries of every column, on the device."""
        return {name: column[:b] for name, column in self.device.items()}
