"""Inference: token ids in, token ids out. (Text is generate.py's and chat.py's business.)

    engine = xtrain.Engine(model, max_batch=8, max_seq_len=1024)
    for completion in engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20, temperature=0.8):
        print(completion, completion.reason)
    for number, token in engine.stream([[1, 2, 3], [4, 5]]):     # as they come
        ...

Continuous batching (Yu et al. 2022, Orca): the engine has max_batch rows of KV cache. In every step it

    admits     waiting prompts to free rows, prefills them together, packed without padding, and picks their first tokens
    decodes    one token for every other sequence that has a row
    ends       each sequence for a reason of its own, whose row is free in the next step

`engine.trace` keeps what happened in each step. On a GPU the decoding step (model, sampling, counting up) is a CUDA graph, one
per batch size, and all it needs is on the device: only token ids come back. While nobody waits for a row the next step is
started before the ids of the last have arrived; a sequence that then turns out to have ended is computed once too often,
which nobody sees.

With the same requests a fresh engine gives the same tokens. Random numbers depend on a sequence's seed, number and step alone.
Its last bits may still depend on its neighbours, as matrix products of another shape add up in another order:
batch_invariant=True rules that out, at some cost in speed (cached_model.py).
"""

import collections
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..device import both_see, cupy, to_numpy
from ..errors import UserError
from ..kernels.decoding.sampling import advance, sample
from ..nn.cuda_graph import Graphed
from ..nn.model import Transformer
from .cached_model import CachedModel
from .requests import Completion, Lanes, Request, Step, make_requests

# Tokens of prompts in one forward pass, at most. More would take more memory than they save time: on the CPU the reference
# of attention makes all scores at once, heads x tokens x keys.
PREFILL_TOKENS = {"gpu": 8192, "cpu": 512, "sim": 512}
TRACE_STEPS = 4096  # kept


class Engine:
    """Serves a Transformer.

    max_batch: sequences at a time.  max_seq_len: tokens of a sequence, prompt and answer; None: what the model takes.
    batch_invariant: a sequence's tokens do not depend on which others are served, not even in the last bit.
    reuse_prefix: a prompt that begins like what a free row holds (the earlier turns of a chat) is computed from there
    on. New weights are noticed when they are given as `parameter.data = x`, not when they are written in place.
    graph: capture the decoding step on a GPU.  prefill_tokens: at most in one forward pass, longer prompts go in
    pieces; None: 8192 on a GPU, else 512.
    Raises UserError when the memory for the cache (`cache_bytes`) cannot be had.
    """

    def __init__(
        self,
        model: Transformer,
        max_batch: int = 8,
        max_seq_len: int | None = None,
        batch_invariant: bool = False,
        reuse_prefix: bool = False,
        graph: bool = True,
        prefill_tokens: int | None = None,
    ):
        if not isinstance(model, Transformer):
            raise UserError(
                f"model must be a Transformer, got {type(model).__name__}: Transformer.from_pretrained(folder) makes one"
            )
        if model.variation:
            raise UserError(
                f"the engine has Llama's and Qwen3's layers alone, this model has others ({model.variation}): use "
                "model.generate"
            )
        context = model.config.context
        if prefill_tokens is None:
            prefill_tokens = PREFILL_TOKENS[model.device]
        self.max_seq_len = context if max_seq_len is None else max_seq_len
        sizes = dict(
            max_batch=max_batch, prefill_tokens=prefill_tokens, max_seq_len=self.max_seq_len
        )
        for name, value in sizes.items():
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a positive whole number, got {value!r}")
        if not 2 <= self.max_seq_len <= context:
            raise UserError(
                f"max_seq_len {self.max_seq_len} must be at least 2 and at most {context}, what the model takes"
            )
        if batch_invariant and reuse_prefix:
            raise UserError(
                "batch_invariant and reuse_prefix exclude each other: what is reused was computed in other pieces, "
                "which may differ in the last bit"
            )
        self.model, self.config, self.max_batch = model, model.config, max_batch
        self.batch_invariant, self.reuse_prefix = batch_invariant, reuse_prefix
        self.prefill_tokens_at_once = prefill_tokens
        self.cached_model = CachedModel(model, max_batch, self.max_seq_len, batch_invariant)
        self.cache_bytes = self.cached_model.nbytes
        self.trace: collections.deque[Step] = collections.deque(maxlen=TRACE_STEPS)
        self.steps = self.submitted = 0
        self.prefilled_tokens = self.reused_tokens = self.decoded_tokens = 0
        self.unfinished: dict[int, Request] = {}  # by name: those waiting and those with a row
        self.waiting: collections.deque[Request] = collections.deque()
        self.active: list[Request] = []  # those with a row; lane b is active[b]
        self.free = list(range(max_batch))  # rows
        self.held: list[list[int]] = [[] for _ in range(max_batch)]  # what is in a free row's cache
        self.weights_version = model.arena.version.count
        self.lanes, on_gpu = Lanes(max_batch, model.device), model.device == "gpu"
        # The last two steps' ids, in host memory that a GPU writes to: one may be read while the other is being made.
        shape = (2, max_batch)
        self.mail, self.mail_there = both_see(shape, np.int32) if on_gpu else (None, None)
        self.stale = True  # the lanes are not as `active` says
        self.changing, self.settled = False, True
        self.flights: collections.deque[tuple[list[Request], Any]] = collections.deque()
        self.run_ahead = on_gpu  # elsewhere a step is over when it has been started
        self.graphed = Graphed(self._decode) if graph and on_gpu else None

    def describe(self) -> str:
        """One line about the memory."""
        c = self.config
        return (
            f"KV cache {self.cache_bytes:,} bytes: {c.n_layers} layers x 2 x {self.max_batch} rows x "
            f"{c.n_kv_heads} heads x {self.max_seq_len} tokens x {c.head_dim} channels in "
            f"{self.cached_model.dtype.name}"
        )

    # ------------------------------------------------------------------------- what users call
    def generate(
        self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any
    ) -> list[Completion]:
        """The whole of `stream`: one Completion (a list of new tokens) per prompt."""
        stream = self.stream(prompts, *args, **options)
        for _ in stream:
            pass
        return stream.completions

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 128,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int | None] | None = None,
        top_p: float | Sequence[float] = 1.0,
        seed: int | Sequence[int] = 0,
        stop: Iterable[int] = (),
    ) -> "Stream":
        """-> an iterator of (number of the prompt, token), with `completions` and `cancel(number)`; it computes when asked.

        temperature 0: the most likely token, the lower id of two that tie. Else a draw among the top_k most likely (None: all;
        at most 1024), of those among the fewest that hold top_p of the probability. Every option but stop may be a list, one
        value per prompt. One seed: prompt i draws from stream i of that seed; a list of seeds: each draws as if it were alone.
        stop: tokens that end a sequence. More prompts than max_batch wait for a row.
        Raises UserError, before anything is computed, on an empty prompt, one that leaves no room, or an option out of range.
        """
        requests = make_requests(
            prompts, self.config, self.max_seq_len, stop, seed, max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p,
        )  # fmt: skip
        return Stream(self, requests)

    def cancel(self, request: Request) -> None:
        """End it now; its row is free in the next step. May be called at any time, as garbage collection does."""
        if request.completion.reason is None:
            request.completion.reason = "cancelled"
            if not self.changing:  # else whoever changes things, or the next step, sees it
                self._remove_cancelled()

    def _remove_cancelled(self) -> None:
        with self._changing():
            for request in [r for r in self.active if r.completion.reason]:
                self._end(request, "cancelled", self.trace[-1])
            for request in [r for r in self.waiting if r.completion.reason]:
                self.waiting.remove(request)
                del self.unfinished[request.name]

    def submit(self, request: Request) -> None:
        """Queue it; `step` will admit it when a row is free."""
        with self._changing():
            request.name = self.submitted
            self.submitted += 1
            self.unfinished[request.name] = request
            self.waiting.append(request)

    # ------------------------------------------------------------------------- one step
    def step(self) -> list[tuple[Request, int]]:
        """Admit, decode, end. -> the new tokens. Does nothing when nobody waits and nobody is active."""
        if not (self.waiting or self.active or self.flights):
            return []
        start, now = time.perf_counter(), Step(self.steps)
        self.trace.append(now)
        self.steps += 1
        try:
            with self._changing():
                return self._step(now)
        finally:
            self._remove_cancelled()
            now.seconds = time.perf_counter() - start

    def _step(self, now: Step) -> list[tuple[Request, int]]:
        events = []
        if not self.flights:
            going_on = list(self.active)
            events += self._admit(now)
            if going_on:  # who was admitted joins in the next step: one token per sequence and step
                self._launch(going_on)
        if self.flights and self._may_run_ahead():
            self._launch(self.active)
        if self.flights:
            events += self._land(now)
        return events

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """What is broken off inside, by Ctrl-C or a failure between any two statements, is settled before the next change."""
        self.changing = True
        try:
            if not self.settled:
                self._settle()
            self.settled = False
            yield  # an exception passes by the next line
            self.settled = True
        finally:
            self.changing = False

    def _settle(self) -> None:
        """Who has tokens goes on behind the last of them, who has none waits again: no other sequence loses anything."""
        self.flights.clear()
        self.stale = True
        self.active = [r for r in self.unfinished.values() if r.completion]
        self.waiting = collections.deque(r for r in self.unfinished.values() if not r.completion)
        for request in self.waiting:
            request.cached = 0
        taken = {request.row for request in self.active}
        self.free = [row for row in range(self.max_batch) if row not in taken]
        for request in list(self.active):
            request.cached = len(request.prompt) + len(request.completion) - 1
            self._end_if_over(request, self.trace[-1])

    def _admit(self, now: Step) -> list[tuple[Request, int]]:
        """Waiting prompts get free rows, are prefilled, and have their first tokens picked."""
        new = []
        while self.waiting and self.free:
            request = self.waiting.popleft()
            self._take_row(request)
            new.append(request)
            now.admitted.append((request.name, request.row))
        return [event for pack in self._packs(new) for event in self._prefill(pack, now)]

    def _prefill(self, pack: list[tuple[Request, int]], now: Step) -> list[tuple[Request, int]]:
        """pack: (request, how many of its tokens are computed now)"""
        done = [i for i, (r, n) in enumerate(pack) if r.cached + n == len(r.prompt)]
        logits = self.cached_model.prefill(
            np.concatenate([r.prompt[r.cached : r.cached + n] for r, n in pack]),
            [n for _, n in pack],
            [r.cached for r, _ in pack],
            [r.row for r, _ in pack],
            done,
            len(pack[0][0].prompt),
        )
        for request, n in pack:
            request.cached += n
            request.completion.prefilled += n
            self.prefilled_tokens += n
            now.prefilled += n
        return self._first_tokens([pack[i][0] for i in done], logits, now) if done else []

    def _take_row(self, request: Request) -> None:
        """A free row: with reuse_prefix the one that holds the longest beginning of the prompt."""
        self.stale, row = True, self.free[0]
        version = self.model.arena.version.count
        if self.weights_version != version:  # other weights: what is held is of no use
            self.weights_version, self.held = version, [[] for _ in self.held]
        # Dynamic scaling turns the keys of a long prompt by other angles, from its first token on.
        if self.reuse_prefix and not self.cached_model.stretched(len(request.prompt)):
            common = lambda r: _common(self.held[r], request.prompt)
            row = max(self.free, key=lambda r: (common(r), -len(self.held[r])))
            request.cached = min(common(row), len(request.prompt) - 1)  # one must be computed
        self.held[row] = []
        self.free.remove(row)
        request.row, request.weights, request.completion.reused = row, version, request.cached
        self.reused_tokens += request.cached

    def _packs(self, new: list[Request]) -> Iterator[list[tuple[Request, int]]]:
        """Packs of (request, how many of its tokens), each at most prefill_tokens long."""
        pack, room = [], self.prefill_tokens_at_once
        for request in new:
            left = len(request.prompt) - request.cached
            alone = self.batch_invariant or self.cached_model.stretched(len(request.prompt))
            if alone and pack:
                yield pack
                pack, room = [], self.prefill_tokens_at_once
            while left:
                n = min(left, room)
                left -= n
                room -= n
                pack.append((request, n))
                if not room or (alone and not left):
                    yield pack
                    pack, room = [], self.prefill_tokens_at_once
        if pack:
            yield pack

    def _first_tokens(self, requests, logits, now) -> list[tuple[Request, int]]:
        lanes = Lanes(len(requests), self.model.device)
        lanes.fill(requests)
        self._sample(logits, lanes.there)
        events = []
        for request, token in zip(requests, to_numpy(lanes.there["ids"]).tolist()):
            self.active.append(request)
            events += self._give(request, token, now)
        return events

    def _sample(self, logits, lanes):
        names = ("ids", "temperature", "top_k", "top_p", "seed", "number", "step")
        parameters = [
            lanes[name] for name in names
        ]  # no kernel of a step writes temperature, top_k
        sample(logits, *parameters, vocab=self.config.vocab_size, parameters_ready=True)

    # ------------------------------------------------------------------------- decoding
    def _decode(self, b: int) -> tuple:
        """The step that a CUDA graph holds, over the first b lanes."""
        lanes = self.lanes.first(b)
        logits = self.cached_model.decode(lanes["ids"], lanes["lengths"], lanes["rows"])
        self._sample(logits, lanes)
        advance(*(lanes[name] for name in ("lengths", "step", "rows", "ids")), self.mail_there)
        return (lanes["ids"],)

    def _launch(self, requests: list[Request]) -> None:
        """Start a decoding step."""
        if self.stale:
            self.model.arena.refresh()
            self.lanes.fill(requests)
            self.stale = len(requests) < len(self.active)
        b = len(requests)
        if self.graphed:
            self.graphed(variant=(graph_size(b, self.max_batch),))
        else:  # on a GPU with the same idle lanes: the same bits as the graph's
            self._decode(graph_size(b, self.max_batch) if self.model.device == "gpu" else b)
        self.flights.append((list(requests), self._fetch(requests)))
        for request in requests:
            request.cached += 1

    def _fetch(self, requests):
        """-> a function that waits for the ids of the step just started and returns them"""
        if self.model.device != "gpu":
            ids = to_numpy(self.lanes.there["ids"][: len(requests)]).tolist()
            return lambda: ids
        # Where `advance` writes them: a request's step is its tokens so far, with those that are still on their way.
        slots = [(len(r.completion) + len(self.flights)) % 2 for r in requests]
        arrived = cupy().cuda.Event(disable_timing=True)
        arrived.record()
        return lambda: (arrived.synchronize(), self.mail[slots, range(len(slots))].tolist())[1]

    def _may_run_ahead(self) -> bool:
        """Start the next step before the ids of this one are known? While nobody waits and nobody will end by count."""
        alone = self.run_ahead and not self.waiting and not self.stale and len(self.flights) == 1
        return alone and all(
            len(r.completion) + 1 < r.max_new_tokens and r.cached + 1 < self.max_seq_len
            for r in self.active
        )

    def _land(self, now: Step) -> list[tuple[Request, int]]:
        """The ids of the oldest step that was started."""
        requests, fetch = self.flights[0]
        tokens, events = fetch(), []
        self.flights.popleft()
        for request, token in zip(requests, tokens):
            if request.completion.reason is None:
                self.decoded_tokens += 1
                now.decoded.append(request.name)
                events += self._give(request, token, now)
        return events

    def _give(self, request: Request, token: int, now: Step) -> list[tuple[Request, int]]:
        """Append a token, and end the sequence if that was its last. -> what there is to tell"""
        if request.completion.reason:  # cancelled meanwhile
            return []
        if token < 0:
            self._end(request, "nan", now)
            return []
        request.completion.append(token)
        self._end_if_over(request, now)
        return [(request, token)]

    def _end_if_over(self, request: Request, now: Step) -> None:
        if request.completion.reason:  # by `cancel`, or `_end` was broken off
            self._end(request, request.completion.reason, now)
        elif request.completion[-1] in request.stop:
            self._end(request, "stop", now)
        elif len(request.completion) == request.max_new_tokens:
            self._end(request, "length", now)
        elif len(request.prompt) + len(request.completion) == self.max_seq_len:
            self._end(request, "full", now)

    def _end(self, request: Request, reason: str, now: Step) -> None:
        request.completion.reason = reason
        self.held[request.row] = self._cached_tokens(request)
        del self.unfinished[request.name]
        self.active.remove(request)
        self.free.append(request.row)
        self.stale = True
        now.ended.append((request.name, reason))

    def _cached_tokens(self, request: Request) -> list[int]:
        """What a later prompt may find in its row: nothing under other weights, or with angles of its own."""
        same = request.weights == self.model.arena.version.count
        if not same or self.cached_model.stretched(len(request.prompt)):
            return []
        tokens = [*request.prompt, *request.completion]
        return tokens[: min(request.cached, len(tokens) - 1)]


class Stream:
    """Iterates over (number of the prompt, token). Leaving it early cancels what is not finished.

    completions: one per prompt, growing; each says in the end for what reason it ended.
    """

    def __init__(self, engine: Engine, requests: list[Request]):
        self.engine, self.requests = engine, requests
        self.completions = [request.completion for request in requests]
        self._iterator = _tokens(engine, requests)  # it does not know us: when we go, it is closed

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        return next(self._iterator)

    def cancel(self, number: int) -> None:
        """No more tokens for this prompt."""
        self.engine.cancel(self.requests[number])

    def close(self) -> None:
        """Cancel what is not finished, as leaving the loop does."""
        self._iterator.close()
        for request in self.requests:  # had it begun, they are cancelled already
            self.engine.cancel(request)


def _tokens(engine: Engine, requests: list[Request]) -> Iterator[tuple[int, int]]:
    try:
        for request in requests:
            if request.completion.reason is None:  # else cancelled before it began
                engine.submit(request)
        completions, sent = [request.completion for request in requests], [0] * len(requests)
        while True:  # by looking, for another stream may have made the step
            fresh = [i for i, c in enumerate(completions) if sent[i] < len(c)]
            for i in fresh:
                sent[i] += 1
                yield i, completions[i][sent[i] - 1]
            if fresh:
                continue
            if all(completion.reason for completion in completions):
                return
            engine.step()
    finally:
        for request in requests:
            engine.cancel(request)


def graph_size(b: int, most: int) -> int:
    """Lanes of the graph that serves b sequences: a power of two up to 8, then a multiple of 8. The rest are idle."""
    size = 1 << (b - 1).bit_length() if b <= 8 else -(-b // 8) * 8
    return min(size, most)


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens are equal from the start."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
