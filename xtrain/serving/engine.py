"""Inference: token ids in, token ids out. (text_generation.py and conversation.py add text.)

    engine = xtrain.Engine(model, max_batch=8, max_seq_len=1024)
    for completion in engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20, temperature=0.8):
        print(completion, completion.reason)
    for number, token in engine.stream([[1, 2, 3], [4, 5]]):     # token by token
        ...

Continuous batching (Yu et al. 2022, Orca): the KV cache has max_batch slots, each for one sequence. Every step

    admits     pending requests to free slots, prefills them together, packed without padding, and samples their first tokens
    decodes    one token for every other sequence that has a slot
    ends       finished sequences; their slots are free in the next step

`engine.trace` records what happened in each step. On a GPU the decoding step (model, sampling, advancing the counters) is a
CUDA graph, one per batch size, and all its inputs are on the device: only token ids are copied to the host. While no request
is pending, the next step is launched before the ids of the previous one have arrived. If a sequence turns out to have ended,
one wasted token is computed for it and discarded.

A fresh engine gives the same tokens for the same requests. Random numbers depend only on a request's seed, random stream and
step. The last bits of the logits may still depend on the other sequences of the batch, because matrix products of different
shapes add in a different order; batch_invariant=True prevents this, at some cost in speed (cached_model.py).
"""

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..device import Array, cupy, mapped_array, to_numpy
from ..errors import UserError
from ..kernels.decoding.sampling import advance, sample
from ..nn.cuda_graph import Graphed
from ..nn.model import Transformer
from .cached_model import CachedModel
from .requests import Completion, DecodeBatch, Request, Step, make_requests

# Prompt tokens in one forward pass, at most. More would cost more memory than they save time: on the CPU the reference
# of attention computes all scores at once, heads x tokens x keys.
PREFILL_TOKENS = {"gpu": 8192, "cpu": 512, "sim": 512}
TRACE_STEPS = 4096  # steps that the trace keeps
T = TypeVar("T")


@dataclass(frozen=True)
class PrefillChunk:
    """The next n_tokens of a request's prompt, to be computed in one forward pass."""

    request: Request
    n_tokens: int


@dataclass(frozen=True)
class InFlightStep:
    """A decoding step that has been launched and whose token ids the host has not read yet."""

    requests: list[Request]
    wait_for_ids: Callable[[], list[int]]  # -> one id per request


class Engine:
    """Serves a Transformer to many requests at a time.

    max_batch: sequences at a time.  max_seq_len: tokens of a sequence, prompt and answer; None: the longest that the model
    supports.
    batch_invariant: the tokens of a sequence do not depend on the other sequences in the batch, not even in the last bit.
    reuse_prefix: if a free slot still holds a prefix of a new prompt (earlier turns of a chat), only the rest is computed.
    New weights are detected if they are assigned as `parameter.data = x`, not if they are written in place.
    graph: capture the decoding step as a CUDA graph (GPU only).  prefill_tokens: prompt tokens in one forward pass, at most;
    longer prompts are computed in several chunks; None: 8192 on a GPU, else 512.

    Several threads may use one engine: a step runs in one thread at a time and computes the requests of all of them. Every
    method may be called from any thread; a Stream is iterated by one thread at a time, others may cancel or close it. On a
    GPU, the threads must have the same current device and stream (they do by default). A finalizer or a signal handler may
    interrupt a step, so it may call `cancel` and `close`, which never wait, but not `step` or `submit`.
    Raises UserError for an invalid option, or if there is not enough memory for the cache (`cache_bytes`).
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
                f"model must be a Transformer, got {type(model).__name__}: make one with "
                "Transformer.from_pretrained(folder)"
            )
        if model.variation:
            raise UserError(
                f"the engine supports only the layers of Llama and Qwen3, this model has others ({model.variation}): use "
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
                f"max_seq_len {self.max_seq_len} must be at least 2 and at most {context}, the longest sequence of the model"
            )
        if batch_invariant and reuse_prefix:
            raise UserError(
                "batch_invariant and reuse_prefix exclude each other, set one to False: a reused prefix was computed in other chunks, which "
                "may change the last bit"
            )
        self.model, self.config, self.max_batch = model, model.config, max_batch
        self.batch_invariant, self.reuse_prefix = batch_invariant, reuse_prefix
        self.max_prefill_tokens = prefill_tokens
        self.cached_model = CachedModel(model, max_batch, self.max_seq_len, batch_invariant)
        self.cache_bytes = self.cached_model.nbytes
        self.trace: collections.deque[Step] = collections.deque(maxlen=TRACE_STEPS)
        self.steps = self.submitted = 0
        self.prefilled_tokens = self.reused_tokens = self.decoded_tokens = 0
        # By request_id: the pending and the active ones.
        self.unfinished_requests: dict[int, Request] = {}
        self.pending_requests: collections.deque[Request] = collections.deque()
        # Those that have a slot; entry b of the decode batch is active_requests[b].
        self.active_requests: list[Request] = []
        self.free_slots = list(range(max_batch))
        # The tokens whose keys and values a free slot holds.
        self.slot_tokens: list[list[int]] = [[] for _ in range(max_batch)]
        self.weights_version = model.arena.version.count
        self.batch, on_gpu = DecodeBatch(max_batch, model.device), model.device == "gpu"
        self.batch_outdated = True  # the batch on the device does not match active_requests
        # The ids of the last two steps, in host memory that the GPU writes: one is read while the other is computed.
        # The second name is the same memory as kernels see it.
        self.device_to_host_ids: Any = None
        self.device_to_host_ids_gpu: Any = None
        if on_gpu:
            self.device_to_host_ids, self.device_to_host_ids_gpu = mapped_array(
                (2, max_batch), np.int32
            )
        # lock: held by the thread that changes the state.  turn: held by the thread that waits for the lock, so that no
        # thread takes the lock twice in succession while another one waits.
        self.lock, self.turn, self.state_is_consistent = threading.RLock(), threading.RLock(), True
        self.steps_in_flight: collections.deque[InFlightStep] = collections.deque()
        self.run_ahead = on_gpu  # elsewhere a step has finished when its launch returns
        self.graphed: Callable[..., Any] | None = (
            Graphed(self._decode) if graph and on_gpu else None
        )

    def describe(self) -> str:
        """One line on the size of the KV cache, in bytes, and its factors."""
        c = self.config
        return (
            f"KV cache {self.cache_bytes:,} bytes: {c.n_layers} layers x 2 x {self.max_batch} slots x "
            f"{c.n_kv_heads} heads x {self.max_seq_len} tokens x {c.head_dim} channels in "
            f"{self.cached_model.dtype.name}"
        )

    # ------------------------------------------------------------------------- the public interface
    def generate(
        self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any
    ) -> list[Completion]:
        """Run `stream` to its end. -> one Completion (a list of new tokens) per prompt. Arguments and errors as in stream."""
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
        """-> an iterator over (prompt number, token) with `completions` and `cancel(number)`; it computes when iterated.

        prompts: lists of token ids. Every option except stop may be a list with one value per prompt.
        max_new_tokens: per prompt, at most.
        temperature: 0 picks the most likely token, the lower id of two that tie; otherwise tokens are drawn at random.
        top_k: draw among the top_k most likely tokens, at most 1024; None: all.
        top_p: draw among the fewest of these that together have at least this share of the probability.
        seed: with one seed, prompt i uses random stream i of that seed; with a list of seeds, each prompt uses stream 0 of
        its own seed, as if it were alone.
        stop: ids of tokens that end a sequence.
        Prompts beyond max_batch wait until a slot is free. Raises UserError, before anything is computed, for an empty
        prompt, for one that leaves no room for an answer, or for an option out of range.
        """
        requests = make_requests(
            prompts, self.config, self.max_seq_len, stop, seed, max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p,
        )  # fmt: skip
        return Stream(self, requests)

    def submit(self, *requests: Request) -> None:
        """Append requests to the pending ones; `step` admits each when a slot is free."""

        def append() -> None:
            for request in requests:
                request.request_id = self.submitted
                self.submitted += 1
                self.unfinished_requests[request.request_id] = request
                self.pending_requests.append(request)

        self._exclusively(append)

    def cancel(self, request: Request) -> None:
        """End the request: the next step frees its slot. Never waits, so it is safe at any time, also during garbage
        collection. A step that is running in another thread may append one more token."""
        request.completion.end("cancelled")

    def _remove_cancelled(self) -> None:
        for request in [r for r in self.active_requests if r.completion.reason]:
            self._end(request, "cancelled", self.trace[-1])
        for request in [r for r in self.pending_requests if r.completion.reason]:
            self.pending_requests.remove(request)
            del self.unfinished_requests[request.request_id]

    # ------------------------------------------------------------------------- one step
    def step(self) -> list[tuple[Request, int]]:
        """Admit, decode, end. -> (request, new token) pairs; none, and no step, if there are no unfinished requests."""
        return self._exclusively(self._next_step)

    def _next_step(self) -> list[tuple[Request, int]]:
        self._remove_cancelled()
        if not (self.pending_requests or self.active_requests or self.steps_in_flight):
            return []
        start, step = time.perf_counter(), Step(self.steps)
        self.trace.append(step)
        self.steps += 1
        try:
            return self._step(step)
        finally:
            step.seconds = time.perf_counter() - start

    def _step(self, step: Step) -> list[tuple[Request, int]]:
        new_tokens = []
        if not self.steps_in_flight:
            already_active = list(self.active_requests)
            new_tokens += self._admit(step)
            # One token per sequence and step: the requests just admitted join in the next step.
            if already_active:
                self._launch(already_active)
        if self.steps_in_flight and self._may_run_ahead():
            self._launch(self.active_requests)
        if self.steps_in_flight:
            new_tokens += self._collect_oldest_step(step)
        return new_tokens

    def _exclusively(self, change: Callable[[], T]) -> T:
        """change(), while no other thread changes the state. Threads take turns.

        If Ctrl-C or an error interrupts it between any two statements, both locks are released and the next change recovers
        first. Ctrl-C may arrive after `acquire` has succeeded and before the next statement; therefore `acquire` is inside
        `try`, and `release`, which raises RuntimeError in a thread that does not hold the lock, comes first in `finally`.
        """
        try:
            try:
                self.turn.acquire()
                self.lock.acquire()
            finally:
                try:  # noqa: SIM105  (suppress is Python code, which Ctrl-C could interrupt before the release)
                    self.turn.release()
                except RuntimeError:
                    pass
            if not self.state_is_consistent:
                self._recover()
            self.state_is_consistent = False
            result = change()
            self.state_is_consistent = True
            return result
        finally:
            try:  # noqa: SIM105
                self.lock.release()
            except RuntimeError:
                pass

    def _recover(self) -> None:
        """Rebuild the state from the completions after an interrupted change.

        A request with tokens resumes after the last of them, one without tokens is pending again: no sequence loses a token.
        """
        self.steps_in_flight.clear()
        self.batch_outdated = True
        unfinished = self.unfinished_requests.values()
        self.active_requests = [r for r in unfinished if r.completion]
        self.pending_requests = collections.deque(r for r in unfinished if not r.completion)
        for request in self.pending_requests:
            request.cached_tokens = 0
        used = {request.slot for request in self.active_requests}
        self.free_slots = [slot for slot in range(self.max_batch) if slot not in used]
        for request in list(self.active_requests):
            request.cached_tokens = len(request.prompt) + len(request.completion) - 1
            self._end_if_finished(request, self.trace[-1])

    # ------------------------------------------------------------------------- prefill
    def _admit(self, step: Step) -> list[tuple[Request, int]]:
        """Assign free slots to pending requests, prefill them and sample their first tokens. -> (request, token) pairs"""
        admitted = []
        while self.pending_requests and self.free_slots:
            request = self.pending_requests.popleft()
            self._assign_slot(request)
            admitted.append(request)
            step.admitted.append((request.request_id, request.slot))
        return [x for chunks in self._prefill_passes(admitted) for x in self._prefill(chunks, step)]

    def _assign_slot(self, request: Request) -> None:
        """Choose a free slot: with reuse_prefix the one that holds the longest prefix of the prompt."""
        self.batch_outdated, slot = True, self.free_slots[0]
        version = self.model.arena.version.count
        if self.weights_version != version:  # keys and values of other weights cannot be reused
            self.weights_version, self.slot_tokens = version, [[] for _ in self.slot_tokens]
        # With dynamic RoPE scaling, a long prompt has other angles from its first token.
        if self.reuse_prefix and not self.cached_model.stretched(len(request.prompt)):
            common = lambda s: _common_prefix(self.slot_tokens[s], request.prompt)
            slot = max(self.free_slots, key=lambda s: (common(s), -len(self.slot_tokens[s])))
            # At least one token must be computed: its logits give the first new one.
            request.cached_tokens = min(common(slot), len(request.prompt) - 1)
        self.slot_tokens[slot] = []
        self.free_slots.remove(slot)
        request.slot, request.weights_version = slot, version
        request.completion.reused = request.cached_tokens
        self.reused_tokens += request.cached_tokens

    def _prefill_passes(self, requests: list[Request]) -> Iterator[list[PrefillChunk]]:
        """Split the prompts into forward passes of at most max_prefill_tokens tokens."""
        chunks: list[PrefillChunk] = []
        free = self.max_prefill_tokens
        for request in requests:
            left = len(request.prompt) - request.cached_tokens
            alone = self.batch_invariant or self.cached_model.stretched(len(request.prompt))
            if alone and chunks:
                yield chunks
                chunks, free = [], self.max_prefill_tokens
            while left:
                n = min(left, free)
                left -= n
                free -= n
                chunks.append(PrefillChunk(request, n))
                if not free or (alone and not left):
                    yield chunks
                    chunks, free = [], self.max_prefill_tokens
        if chunks:
            yield chunks

    def _prefill(self, chunks: list[PrefillChunk], step: Step) -> list[tuple[Request, int]]:
        """One forward pass. -> (request, token) pairs of the prompts that are complete with it"""
        requests, counts = [c.request for c in chunks], [c.n_tokens for c in chunks]
        starts = [r.cached_tokens for r in requests]
        complete = [
            i
            for i, (r, start, n) in enumerate(zip(requests, starts, counts))
            if start + n == len(r.prompt)
        ]
        logits = self.cached_model.prefill(
            np.concatenate(
                [r.prompt[start : start + n] for r, start, n in zip(requests, starts, counts)]
            ),
            counts,
            starts,
            [r.slot for r in requests],
            complete,
            len(requests[0].prompt),
        )
        for request, n in zip(requests, counts):
            request.cached_tokens += n
            request.completion.prefilled += n
            self.prefilled_tokens += n
            step.prefilled += n
        return self._first_tokens([requests[i] for i in complete], logits, step) if complete else []

    def _first_tokens(
        self, requests: list[Request], logits: Array, step: Step
    ) -> list[tuple[Request, int]]:
        batch = DecodeBatch(len(requests), self.model.device)
        batch.fill(requests)
        self._sample(logits, batch.device)
        new_tokens = []
        for request, token in zip(requests, to_numpy(batch.device["ids"]).tolist()):
            self.active_requests.append(request)
            new_tokens += self._append_token(request, token, step)
        return new_tokens

    def _sample(self, logits: Array, batch: dict[str, Array]) -> None:
        # parameters_ready: no kernel of a step writes temperature or top_k.
        sample(
            logits, batch["ids"], batch["temperature"], batch["top_k"], batch["top_p"], batch["seed"],
            batch["random_stream"], batch["step"], vocab=self.config.vocab_size, parameters_ready=True,
        )  # fmt: skip

    # ------------------------------------------------------------------------- decoding
    def _decode(self, b: int) -> tuple[Array]:
        """The step that a CUDA graph records: one token for each of the first b entries of the batch."""
        batch = self.batch.first(b)
        logits = self.cached_model.decode(batch["ids"], batch["lengths"], batch["slots"])
        self._sample(logits, batch)
        advance(
            batch["lengths"], batch["step"], batch["slots"], batch["ids"], self.device_to_host_ids_gpu
        )  # fmt: skip
        return (batch["ids"],)

    def _launch(self, requests: list[Request]) -> None:
        """Start a decoding step."""
        if self.batch_outdated:
            self.model.arena.refresh()
            self.batch.fill(requests)
            self.batch_outdated = len(requests) < len(self.active_requests)
        b = len(requests)
        if self.graphed:
            self.graphed(variant=(graph_size(b, self.max_batch),))
        else:  # on a GPU with the idle entries of the graph, for the same bits
            self._decode(graph_size(b, self.max_batch) if self.model.device == "gpu" else b)
        self.steps_in_flight.append(InFlightStep(list(requests), self._read_ids_later(requests)))
        for request in requests:
            request.cached_tokens += 1

    def _read_ids_later(self, requests: list[Request]) -> Callable[[], list[int]]:
        """-> a function that waits for the ids of the step just launched and returns them, one per request"""
        if self.model.device != "gpu":
            ids = to_numpy(self.batch.device["ids"][: len(requests)]).tolist()
            return lambda: ids
        # `advance` writes ids to row step % 2. A request's step is the number of its tokens, those in flight included.
        rows = [(len(r.completion) + len(self.steps_in_flight)) % 2 for r in requests]
        arrived = cupy().cuda.Event(disable_timing=True)
        arrived.record()

        def wait_for_ids() -> list[int]:
            arrived.synchronize()
            return self.device_to_host_ids[rows, range(len(rows))].tolist()

        return wait_for_ids

    def _may_run_ahead(self) -> bool:
        """May the next step be launched before the ids of this one are known?

        Yes, while no request is pending and no sequence will end because of its length.
        """
        possible = (
            self.run_ahead
            and not self.pending_requests
            and not self.batch_outdated
            and len(self.steps_in_flight) == 1
        )
        return possible and all(
            len(r.completion) + 1 < r.max_new_tokens and r.cached_tokens + 1 < self.max_seq_len
            for r in self.active_requests
        )

    def _collect_oldest_step(self, step: Step) -> list[tuple[Request, int]]:
        """Wait for the ids of the oldest step in flight. -> (request, token) pairs"""
        oldest = self.steps_in_flight[0]
        tokens, new_tokens = oldest.wait_for_ids(), []
        self.steps_in_flight.popleft()
        for request, token in zip(oldest.requests, tokens):
            if request.completion.reason is None:
                self.decoded_tokens += 1
                step.decoded.append(request.request_id)
                new_tokens += self._append_token(request, token, step)
        return new_tokens

    # ------------------------------------------------------------------------- the end of a sequence
    def _append_token(self, request: Request, token: int, step: Step) -> list[tuple[Request, int]]:
        """Append a token, and end the sequence if it was the last. -> the (request, token) pair, or none"""
        if request.completion.reason:  # cancelled since the step was launched
            return []
        if token < 0:
            self._end(request, "nan", step)
            return []
        request.completion.append(token)
        self._end_if_finished(request, step)
        return [(request, token)]

    def _end_if_finished(self, request: Request, step: Step) -> None:
        if request.completion.reason:  # cancelled, or `_end` was interrupted
            self._end(request, request.completion.reason, step)
        elif request.completion[-1] in request.stop:
            self._end(request, "stop", step)
        elif len(request.completion) == request.max_new_tokens:
            self._end(request, "length", step)
        elif len(request.prompt) + len(request.completion) == self.max_seq_len:
            self._end(request, "full", step)

    def _end(self, request: Request, reason: str, step: Step) -> None:
        reason = request.completion.end(reason)
        self.slot_tokens[request.slot] = self._reusable_tokens(request)
        del self.unfinished_requests[request.request_id]
        self.active_requests.remove(request)
        self.free_slots.append(request.slot)
        self.batch_outdated = True
        step.ended.append((request.request_id, reason))

    def _reusable_tokens(self, request: Request) -> list[int]:
        """The tokens whose keys and values a later prompt may reuse: none of other weights, none with stretched angles."""
        same_weights = request.weights_version == self.model.arena.version.count
        if not same_weights or self.cached_model.stretched(len(request.prompt)):
            return []
        tokens = [*request.prompt, *request.completion]
        return tokens[: min(request.cached_tokens, len(tokens) - 1)]


class Stream:
    """Iterates over (prompt number, token). Leaving the loop early cancels the unfinished requests.

    completions: one per prompt; each grows while it is generated and gets a `reason` when it ends.
    """

    def __init__(self, engine: Engine, requests: list[Request]):
        self.engine, self.requests = engine, requests
        self.completions = [request.completion for request in requests]
        # It has no reference to this Stream, so deleting the Stream closes it.
        self._iterator = _tokens(engine, requests)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        return next(self._iterator)

    def cancel(self, number: int) -> None:
        """Generate no more tokens for prompt `number`."""
        self.engine.cancel(self.requests[number])

    def close(self) -> None:
        """Cancel the unfinished requests, as leaving the loop does. Any thread may call it."""
        for request in self.requests:
            self.engine.cancel(request)
        with contextlib.suppress(ValueError):  # another thread is iterating: its loop ends
            self._iterator.close()


def _tokens(engine: Engine, requests: list[Request]) -> Generator[tuple[int, int], None, None]:
    try:
        # Some may have been cancelled before the first token.
        engine.submit(*[r for r in requests if r.completion.reason is None])
        completions, sent = [request.completion for request in requests], [0] * len(requests)
        # Read the completions, not what `step` returns: another stream may have made the step.
        while True:
            # First the reasons: another thread may append the last tokens after this line.
            ended = all(completion.reason for completion in completions)
            fresh = [i for i, c in enumerate(completions) if sent[i] < len(c)]
            fresh = [i for i in fresh if completions[i].reason != "cancelled"]
            for i in fresh:
                sent[i] += 1
                yield i, completions[i][sent[i] - 1]
            if fresh:
                continue
            if ended:
                return
            engine.step()
    finally:
        for request in requests:
            engine.cancel(request)


def graph_size(b: int, max_batch: int) -> int:
    """Entries of the CUDA graph that serves b sequences: a power of two up to 8, then a multiple of 8. The rest are idle."""
    size = 1 << (b - 1).bit_length() if b <= 8 else -(-b // 8) * 8
    return min(size, max_batch)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the start of a and b."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
