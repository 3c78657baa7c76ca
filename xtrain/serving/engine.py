"""Inference: token ids in, token ids out. (text_generation.py and conversation.py add text.)

    engine = xtrain.Engine(model, max_batch=8, max_seq_len=1024)
    for completion in engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20, temperature=0.8):
        print(completion, completion.reason)
    for number, token in engine.stream([[1, 2, 3], [4, 5]]):     # token by token
        ...

Any Transformer is served by the forward that trains it. Its KV cache is divided into blocks (blocks.py, paged_cache.py), and
requests are batched continuously (Yu et al. 2022, Orca). Every step

    admits     pending requests, while there is a free slot in the decode batch and there are blocks for their tokens. Blocks that
               other sequences have computed for the same first tokens are shared. Requests with equal prompts begin together:
               one of them prefills, and the others join it in the pass that completes the prompt
    prefills   the next tokens of the admitted prompts, several prompts in one pass, or part of a long one: so many that other
               sequences do not wait for long. A prompt that is complete gets its first token
    decodes    one token for every other sequence
    ends       finished sequences; their slots and blocks are free in the next step

If no block is left for a sequence, the newest sequence is preempted: it gives up its blocks, waits in front of the pending
requests, and later computes its tokens again, together with what it has generated. `engine.trace` records all of this.

On a GPU the decoding step (model, sampling, advancing the counters) is a CUDA graph, one per batch size, and all its inputs are
on the device. The host launches a step before it knows the tokens of the previous one. If a sequence turns out to have ended,
one wasted token is computed for it and discarded.

A fresh engine gives the same tokens for the same requests. Random numbers depend only on a request's seed, random stream and
step. The last bits of the logits may still depend on the other sequences of the batch, because matrix products of different
shapes add in a different order; batch_invariant=True prevents this, at some cost in speed (kernels/runtime/invariance.py).
"""

import collections
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..device import Array, cupy, free_cached, is_gpu, mapped_array, to_device, to_numpy
from ..errors import UserError
from ..kernels.decoding.logprobs import MAX_TOP, token_logprobs
from ..kernels.decoding.penalties import MAX_BIASES, Penalties, apply_penalties, count_tokens
from ..kernels.decoding.sampling import advance, sample
from ..kernels.runtime.invariance import batch_invariant as in_batch_invariant_mode
from ..kernels.runtime.launch import compile_noted, note_launches
from ..nn.autograd import Tensor, inference
from ..nn.cuda_graph import Graphed
from ..nn.model import Transformer
from ..nn.quantized import quantize_weights
from .blocks import MIN_COPIED, ROOT, BlockPool, Prefix, block_key, block_keys
from .paged_cache import KINDS as CACHE_KINDS
from .paged_cache import PagedCache
from .requests import (
    Completion,
    DecodeBatch,
    Request,
    Step,
    TokenLogprobs,
    make_requests,
    make_scoring_requests,
)
from .scoring import LOGIT_ROWS, Scores
from .stream import Stream

# Prompt tokens in one forward pass, at most. More would cost more memory than they save time: on the CPU the reference
# of attention computes all scores at once, heads x tokens x keys.
PREFILL_TOKENS = {"gpu": 8192, "cpu": 512, "sim": 512}
# Floating-point operations of a prefill pass while other sequences wait for their next token, at most: some 25 ms of an H200.
PREFILL_FLOPS = {"gpu": 9e12, "cpu": 4e9, "sim": 4e9}
PREFILL_INTERVAL = {"gpu": 8, "cpu": 1, "sim": 1}  # steps: some 30 ms
BLOCK_TOKENS = 64  # 16 KB of keys per head of 128 channels in bf16; larger blocks would waste more of their last one
TRACE_STEPS = 4096  # steps that the trace keeps
MOST_ROWS = 1025  # no kernel is chosen because there are more
T = TypeVar("T")
P = ParamSpec("P")


def _with_arguments_of(
    method: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """For type checkers: the decorated method, whose arguments are passed on, takes those of `method`."""
    return lambda decorated: decorated


@dataclass(frozen=True)
class PrefillChunk:
    """The next n_tokens of a request's sequence, to be computed in one forward pass."""

    request: Request
    n_tokens: int


@dataclass(frozen=True)
class InFlightScores:
    """A forward pass whose log-probabilities the host has not read yet."""

    parts: list[tuple[Request, int, slice]]  # request, first position, rows of the forward's result
    first: int  # row, the first one that is scored
    arrays: list[list[np.ndarray]]  # from token_logprobs, for some rows each
    wait: Callable[[], None]


@dataclass(frozen=True)
class InFlightStep:
    """A forward pass that has been launched and whose tokens the host has not read yet, one per request."""

    requests: list[Request]
    wait_for_ids: Callable[[], list[int]]
    # what token_logprobs returns, after wait_for_ids; empty if no request asks for it
    logprobs: list[np.ndarray]
    rows: list[int]  # of the requests, in these arrays

    def token_logprobs(self) -> Iterable[TokenLogprobs | None]:
        """What the Completion of each request says about its token; None if it was not asked for."""
        if not self.logprobs:
            return itertools.repeat(None)
        wanted = [r.logprobs for r in self.requests]
        most = max([n for n in wanted if n is not None])
        chosen, tops, values = self.logprobs
        own = chosen[self.rows].tolist()
        if most == 0:
            return [None if n is None else (x, []) for n, x in zip(wanted, own)]
        columns = (x[self.rows, :most].tolist() for x in (tops, values))
        pairs = lambda ids, values: [(t, x) for t, x in zip(ids, values) if t >= 0]
        rows = zip(wanted, own, *columns)
        return [None if n is None else (x, pairs(t[:n], v[:n])) for n, x, t, v in rows]


class Engine:
    """Serves a Transformer to many requests at a time.

    max_batch: sequences at a time.  max_seq_len: tokens of a sequence, prompt and answer; None: the longest that the model
    supports.
    batch_invariant: the tokens of a sequence do not depend on the other sequences, not even in the last bit. Its logits have the
    bits of `with xtrain.batch_invariant(): model(ids)`, also where blocks are shared and after a preemption. It costs speed:
    products have a fixed number of rows, and decoding uses the attention of prefill.
    reuse_prefix: sequences that begin with the same tokens share the blocks of the KV cache that hold them, also after the first
    of them has ended (earlier turns of a chat). New weights are detected if AdamW has written them or if they are assigned as
    `parameter.data = x`; if they are written in place, call `forget_prefixes`.
    weights: "int8" or "fp8" stores the matrices of the model's Linear modules in one byte per weight, in place
    (nn/quantized.py): half of bf16's memory, and decoding reads half the bytes. The model must have been made with
    trainable=False, and can only be served from then on. "full": the model stays as it is.
    kv_cache: "fp8" stores keys and values in one byte per number, with a scale per token and head (kernels/decoding/kv_codes.py):
    with 12 and more layers the same memory holds 1.6 to 1.8 times the tokens of bf16, and decoding reads half the bytes of the
    cache. On a GPU for models in bf16 with heads of 32, 64 or 128 channels; not with batch_invariant. "full": in
    the dtype of the model.
    graph: capture the decoding step as a CUDA graph (GPU only).  prefill_tokens: prompt tokens in one forward pass, at most;
    longer prompts are computed in several chunks; None: 8192 on a GPU, else 512.
    Memory of the KV cache: enough for max_batch sequences of max_seq_len tokens, but on a GPU at most what is left of the share
    gpu_memory of its memory, and at most cache_bytes if given. If sequences need more, some are preempted.
    The first request with penalties or a bias allocates lists for all: 16 bytes x max_batch x max_seq_len.
    block_tokens: of a block of the cache, 16, 32, 64, ...
    warm_up: on a GPU, compile every kernel that a request may need before the constructor returns (`ready` says how long that
    took: seconds, also with all machine code in the cache), so that no request waits for the compiler. Otherwise a kernel is
    compiled when a request needs it.
    prefill_interval: while sequences decode, admit pending requests at most every so many steps. On a GPU, launching a prefill
    takes the host as long for one prompt as for many, and the other sequences wait for it. A larger interval gives more tokens
    per second to requests that arrive or end at random; a request may wait so many steps longer for its first token. None: 8 on
    a GPU, else 1, as soon as there is room.

    Several threads may use one engine: a step runs in one thread at a time and computes the requests of all of them. Every
    method may be called from any thread; a Stream is iterated by one thread at a time, others may cancel or close it. On a
    GPU, the threads must have the same current device and stream (they do by default). A finalizer or a signal handler may
    interrupt a step, so it may call `cancel` and `close`, which never wait, but not `step` or `submit`.

    Raises UserError for an invalid option, or if there is not enough memory for one sequence of max_seq_len tokens.
    """

    def __init__(
        self,
        model: Transformer,
        max_batch: int = 8,
        max_seq_len: int | None = None,
        batch_invariant: bool = False,
        reuse_prefix: bool = True,
        graph: bool = True,
        prefill_tokens: int | None = None,
        gpu_memory: float = 0.9,
        cache_bytes: int | None = None,
        block_tokens: int = BLOCK_TOKENS,
        warm_up: bool = False,
        weights: str = "full",
        prefill_interval: int | None = None,
        kv_cache: str = "full",
    ):
        if not isinstance(model, Transformer):
            raise UserError(
                f"model must be a Transformer, got {type(model).__name__}: make one with "
                "Transformer.from_pretrained(folder)"
            )
        context = model.config.context
        if prefill_tokens is None:
            prefill_tokens = PREFILL_TOKENS[model.device]
        if prefill_interval is None:
            prefill_interval = PREFILL_INTERVAL[model.device]
        self.max_seq_len = context if max_seq_len is None else max_seq_len
        sizes = dict(
            max_batch=max_batch, prefill_tokens=prefill_tokens, max_seq_len=self.max_seq_len,
            block_tokens=block_tokens, cache_bytes=1 if cache_bytes is None else cache_bytes,
            prefill_interval=prefill_interval,
        )  # fmt: skip
        for name, value in sizes.items():
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a positive whole number, got {value!r}")
        if not 2 <= self.max_seq_len <= context:
            raise UserError(
                f"max_seq_len {self.max_seq_len} must be at least 2 and at most {context}, the longest sequence of the model"
            )
        if block_tokens < 16 or block_tokens & (block_tokens - 1):
            raise UserError(f"block_tokens must be 16, 32, 64 or so on, got {block_tokens}")
        if not 0 < gpu_memory <= 1:
            raise UserError(f"gpu_memory must be a share, above 0 and at most 1, got {gpu_memory}")
        self.model, self.config, self.max_batch = model, model.config, max_batch
        self.batch_invariant, self.reuse_prefix = batch_invariant, reuse_prefix
        self.max_prefill_tokens, self.prefill_interval = prefill_tokens, prefill_interval
        if kv_cache not in CACHE_KINDS:
            raise UserError(f"kv_cache {kv_cache!r} is not known: choose {', '.join(CACHE_KINDS)}")
        if batch_invariant and kv_cache != "full":
            raise UserError(
                f"batch_invariant and kv_cache {kv_cache!r} cannot be combined: leave one of them out"
            )
        self.cache = PagedCache(model, self.max_seq_len, block_tokens, kv_cache)
        if cache_bytes is not None:
            self._check_room(cache_bytes // self.cache.block_bytes)
        # changes the model: what follows checks the memory that is free then
        quantize_weights(model, weights)
        model.arena.refresh()
        # that a forward pass multiplies by, about
        self.n_weights = sum(p.size for _, p in model.storage() if p.decay)
        table_blocks = -(-self.max_seq_len // block_tokens)
        n_blocks = self._affordable_blocks(max_batch * table_blocks, gpu_memory, cache_bytes)
        self._check_room(n_blocks)
        self.cache.allocate(n_blocks)
        self.cache_bytes = self.cache.nbytes
        self.trace: collections.deque[Step] = collections.deque(maxlen=TRACE_STEPS)
        self.steps = self.submitted = 0
        self.last_prefill = -1  # number of the last step that had one
        self.prefilled_tokens = self.reused_tokens = self.decoded_tokens = 0
        # By request_id: all below.
        self.unfinished_requests: dict[int, Request] = {}
        self.pending_requests: collections.deque[Request] = collections.deque()
        # Those that have a slot and blocks: until all their tokens are computed, and from then on.
        self.prefilling_requests: list[Request] = []
        self.active_requests: list[Request] = []
        self.free_slots = list(range(max_batch))  # a heap
        self.pool = BlockPool(n_blocks, block_tokens)
        self.weights_version = model.arena.version.count
        self.batch = DecodeBatch(max_batch, table_blocks, model.device)
        # of each slot; allocated when the first request has some
        self.penalties: Penalties | None = None
        # Those that the batch on the device contains, their slots, and the arguments of _decode.
        self.batch_requests: list[Request] = []
        self.batch_slots: list[int] = []
        self.batch_variant = (0, False, False)
        # The tokens of the last two steps of each slot, in host memory that the GPU writes: one is read while the other is
        # computed. The second name is the same memory as kernels see it.
        self.device_to_host_ids: Any = None
        self.device_to_host_ids_gpu: Any = None
        on_gpu = model.device == "gpu"
        if on_gpu:
            self.device_to_host_ids, self.device_to_host_ids_gpu = mapped_array(
                (2, max_batch), np.int32
            )
        # lock: held by the thread that changes the state.  turn: held by the thread that waits for the lock, so that no
        # thread takes the lock twice in succession while another one waits.
        self.lock, self.turn, self.state_is_consistent = threading.RLock(), threading.RLock(), True
        self.steps_in_flight: collections.deque[InFlightStep | InFlightScores] = collections.deque()
        self.run_ahead = on_gpu  # elsewhere a step has finished when its launch returns
        self.graphed: Callable[..., Any] | None = (
            Graphed(self._decode) if graph and on_gpu else None
        )
        self.ready = ""  # one line on the start, for the user
        if warm_up and on_gpu:
            self._warm_up()

    def _affordable_blocks(self, wanted: int, gpu_memory: float, cache_bytes: int | None) -> int:
        """-> how many blocks of the cache there may be, at most `wanted`"""
        limits = [] if cache_bytes is None else [cache_bytes]
        if self.model.device == "gpu":
            free_cached("gpu")
            free, total = cupy().cuda.runtime.memGetInfo()
            limits.append(int(gpu_memory * total) - (total - free))
        return min([wanted, *(max(limit, 0) // self.cache.block_bytes for limit in limits)])

    def _check_room(self, n_blocks: int) -> None:
        """Raises UserError if so many blocks cannot hold one sequence."""
        tokens = n_blocks * self.cache.S
        if tokens < self.max_seq_len:
            raise UserError(
                f"the KV cache would have room for {tokens} tokens, one sequence may have {self.max_seq_len}: choose a smaller "
                "max_seq_len, or give it more memory (gpu_memory, cache_bytes)"
            )

    def describe(self) -> str:
        """One line on the size of the KV cache, in bytes, and its factors."""
        c = self.cache
        heads = sorted({(h.G, h.D) for h in c.heads})
        shapes = " or ".join(f"{G} heads x {D} channels" for G, D in heads)
        kind = c.dtype.name
        if c.kind != "full":
            kind = f"{c.kind}, with scales and a copy of one layer in {kind}"
        return (
            f"KV cache {self.cache_bytes:,} bytes: {len(c.heads)} layers x 2 x {c.n_blocks} blocks x {c.S} tokens x {shapes} in "
            f"{kind}"
        )

    # ------------------------------------------------------------------------- compiling before the first request
    def _warm_up(self) -> None:
        """Compile what `_every_shape` needs, in parallel. CuPy compiles its kernels when they first run, so let them run."""
        start = time.perf_counter()
        with note_launches() as found:
            self._every_shape()
        compiled = compile_noted(found)
        free_cached(self.model.device)
        self.cache.copy_blocks([0], [0], 1)
        self.batch.ids[:1] = self.batch.ids[[0]]
        # a graph would keep the addresses of the short lists
        graphed, self.graphed = self.graphed, None
        prompt = [0] * min(2, self.max_seq_len - 1)
        self.penalties = Penalties.empty(self.batch.ids, self.max_batch, 8)  # short lists
        for n in (1, 2):
            self.generate([prompt], 2, repetition_penalty=2.0, logit_bias={0: 1.0}, logprobs=1, n=n)
        self.logprobs([[0]], [[0]], 1)
        self._exclusively(self._recover)  # the cache is empty again
        # lists are allocated when a request needs them
        self.penalties, self.graphed = None, graphed
        self.trace.clear()
        self.steps, self.submitted, self.last_prefill = 0, 0, -1
        self.prefilled_tokens = self.reused_tokens = self.decoded_tokens = 0
        self.ready = f"{compiled} kernels compiled, ready in {time.perf_counter() - start:.1f} s"

    def _every_shape(self) -> None:
        """A forward pass of each kind that a request may cause. It is for note_launches: the results mean nothing.

        Kernels are chosen by the number of rows, at most at powers of two, and up to 8 rows some are compiled for each number.
        """
        room = self.max_batch * (self.max_seq_len - 1)
        longest = min(self.max_prefill_tokens, room, MOST_ROWS)
        powers = [1 << i for i in range(3, longest.bit_length())]
        rows = {*range(1, 9), *powers, *(n + 1 for n in powers), longest}
        sizes: Iterable[int] = range(1, self.max_batch + 1)
        if self.model.device == "gpu":
            sizes = {graph_size(b, self.max_batch) for b in sizes}
        self.penalties = Penalties.empty(self.batch.ids, self.max_batch, 1)
        with inference(), in_batch_invariant_mode(self.batch_invariant):
            for size in sizes:
                self._decode(size, True, True)
            for n in sorted(n for n in rows if n <= longest):
                self._prefill_shape(n)
        self.penalties = None

    def _prefill_shape(self, n: int) -> None:
        """n tokens in as many sequences as possible, each of which gets a token."""
        A = min(n, self.max_batch)
        lengths = [len(x) for x in np.array_split(np.zeros(n), A)]
        tables = [[0] * -(-max(lengths) // self.pool.S)] * A
        last = (np.cumsum(lengths) - 1).tolist()
        ids_N, sequences = self.cache.prefill([0] * n, lengths, [0] * A, tables, last)
        logits = self.model.logits(self.model.hidden(ids_N, sequences)).data
        ids = to_device(np.zeros(A, np.int32), self.model.device)
        self._sample(logits, ids, self.batch.rows(list(range(A))), True, True)

    # ------------------------------------------------------------------------- the public interface
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 128,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int | None] | None = None,
        top_p: float | Sequence[float] = 1.0,
        seed: int | Sequence[int] = 0,
        stop: Iterable[int] = (),
        *,
        min_p: float | Sequence[float] = 0.0,
        repetition_penalty: float | Sequence[float] = 1.0,
        presence_penalty: float | Sequence[float] = 0.0,
        frequency_penalty: float | Sequence[float] = 0.0,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
        logprobs: int | Sequence[int | None] | None = None,
        n: int = 1,
    ) -> Stream:
        """-> an iterator over (number, token) with `completions` and `cancel(number)`; it computes when iterated.

        prompts: lists of token ids. Every option except stop and n may be a list with one value per prompt.
        n: answers per prompt; prompt i has numbers i n, ..., i n + n - 1. Each prompt is computed once, and each answer has
        random numbers of its own: the first k answers are the same whatever n is.
        max_new_tokens: per prompt, at most.
        temperature: 0 picks the most likely token, the lower id of two that tie; otherwise tokens are drawn at random.
        top_k: draw among the top_k most likely tokens, at most 1024; None: all.
        top_p: draw among the fewest of these that together have at least this share of the probability.
        seed: with one seed, prompt i uses random stream i of that seed; with a list of seeds, each prompt uses stream 0 of
        its own seed, as if it were alone.
        stop: ids of tokens that end a sequence.
        min_p: draw among tokens with at least this share of the most likely one's probability (before top_k and top_p).
        repetition_penalty: logits of tokens of the prompt and the answer are divided by it if positive, else multiplied.
        presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens, once, and once per occurrence.
        logit_bias: token id to a number from -100 to 100 that is added to its logit, at most 300 tokens. Bias and penalties
        also change what temperature 0 picks.
        logprobs: report this many of the most likely tokens, 0 to 20, and their log-probabilities, and that of the chosen token,
        in Completion.logprobs; None: no log-probabilities.
        Prompts beyond max_batch, and those for which there are no blocks, wait. Raises UserError, before anything is computed,
        for an empty prompt, for one that leaves no room for an answer, or for an option out of range.
        """
        requests = make_requests(
            prompts, self.config, self.max_seq_len, stop, seed, max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, logit_bias=logit_bias, logprobs=logprobs, n=n,
        )  # fmt: skip
        return Stream(self, requests)

    @_with_arguments_of(stream)
    def generate(
        self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any
    ) -> list[Completion]:
        """Run `stream` to its end. -> n Completions (lists of new tokens) per prompt. Arguments and errors as in stream."""
        found = self.stream(prompts, *args, **options)
        self._compute(found.requests)
        return found.completions

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]] | None = None,
        top: int = 0,
    ) -> list[Scores]:
        """The log-probabilities of the tokens of continuations[i] after prompts[i], computed without sampling. -> one Scores each

        Without continuations: of every token of the prompts but the first, which nothing precedes.
        top: also report so many of the most likely tokens at each place, at most 20.
        Sequences are computed together, and what several of them begin with is computed once. Other threads may generate at
        the same time. The last token of a sequence is only predicted: there may be max_seq_len + 1. Raises UserError, before
        anything is computed, for an empty prompt or continuation, for a sequence that is too long, or for an id that is no token.
        """
        requests = make_scoring_requests(prompts, continuations, self.config, self.max_seq_len, top)
        self._compute(requests)
        return [request.scores for request in requests if request.scores is not None]

    def _compute(self, requests: list[Request]) -> None:
        """Submit the requests and step until all have ended. If that is interrupted, they are cancelled."""
        try:
            self.submit(*requests)
            for request in requests:
                while request.completion.reason is None:
                    self.step()
        finally:
            for request in requests:
                if request.completion.reason is None:
                    self.cancel(request)

    def submit(self, *requests: Request) -> None:
        """Append requests to the pending ones; `step` admits each when there is room."""
        keys_of: dict[int, list[bytes]] = {}  # by prompt
        for request in requests:
            request.room = min(request.max_new_tokens, self.max_seq_len - len(request.prompt))
            keys = keys_of.get(id(request.prompt))
            if keys is None:
                keys = keys_of[id(request.prompt)] = self._keys(request)
            request.keys = keys

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

    def forget_prefixes(self) -> None:
        """Reuse nothing that has been computed so far. For weights that were written in place, as `weights[...] = x`: AdamW and
        `parameter.data = x` are detected. Unfinished sequences keep their earlier keys and values."""
        self.model.arena.version.count += 1

    def _remove_cancelled(self) -> None:
        for request in [r for r in self.unfinished_requests.values() if r.completion.reason]:
            self._end(request, "cancelled")

    # ------------------------------------------------------------------------- one step
    def step(self) -> list[tuple[Request, int]]:
        """Admit, decode, prefill, end. -> the (request, new token) pairs that have arrived; none, and no step, if there are no
        unfinished requests. On a GPU the tokens that a step launches arrive in the next step."""
        return self._exclusively(self._next_step)

    def _next_step(self) -> list[tuple[Request, int]]:
        self._remove_cancelled()
        if not (self.unfinished_requests or self.steps_in_flight):
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
        if self._is_sparse():
            new_tokens += self._collect(0)  # the tokens in flight have their places by slot
            self._compact_slots()
        in_flight = len(self.steps_in_flight)
        with inference(), in_batch_invariant_mode(self.batch_invariant):
            self.model.arena.refresh()
            self._admit(step)
            ready = self._ready_to_decode(step)
            if ready:  # before prefill, which puts first tokens into slots that are idle here
                self._launch(ready, step)
            self._prefill(step)
        # What earlier steps have launched is collected now. On the CPU everything is: nothing is computed at the same time.
        launched = len(self.steps_in_flight) - in_flight
        return new_tokens + self._collect(launched if self.run_ahead else 0)

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
        """Begin again after an interrupted change: all requests are pending, with the tokens that they have. No sequence loses
        a token, and what was launched is computed again."""
        self.steps_in_flight.clear()
        self.batch_requests = []
        self.pool = BlockPool(self.pool.size, self.pool.S)
        self.prefilling_requests, self.active_requests = [], []
        self.free_slots = list(range(self.max_batch))
        unfinished = sorted(self.unfinished_requests.values(), key=lambda r: r.request_id)
        for request in unfinished:
            request.blocks, request.published = [], 0
            request.slot, request.cached_tokens, request.in_flight = -1, 0, 0
        self.pending_requests = collections.deque(unfinished)
        for request in unfinished:
            self._end_if_finished(request)

    # ------------------------------------------------------------------------- admission
    def _admit(self, step: Step) -> None:
        """Give pending requests a slot and blocks, first come, first served."""
        version = self.model.arena.version.count
        if self.weights_version != version:  # keys and values of other weights cannot be reused
            self.weights_version = version
            self.pool.forget_all()
        waited = step.number - self.last_prefill >= self.prefill_interval
        if self.active_requests and not (self.prefilling_requests or waited):
            return
        # What the prefilling requests compute: a request that needs the same waits, and shares it.
        computed = {key for request in self.prefilling_requests for key in request.keys}
        leaders = {request.keys[-1] for request in self.prefilling_requests if _may_join(request)}
        reserved = 0  # slots, for the requests that will join a leader (_join)
        for request in list(self.pending_requests) if self.free_slots else ():
            if len(self.free_slots) <= reserved:
                break
            if request.in_flight:
                continue  # it waits for its own last token
            if request.completion:  # it was preempted
                request.keys = self._keys(request)
            joins = _may_join(request)
            if joins and request.keys[-1] in leaders:
                reserved += 1
                continue
            found = Prefix([])
            if request.keys:
                tokens = request.reusable
                found = self.pool.find(tokens, request.keys)
                known = len(found.blocks)
                worthwhile = len(tokens) - 1 - known * self.pool.S >= MIN_COPIED
                if worthwhile and request.keys[known] in computed:
                    continue
            if not self._assign_blocks(request, found):
                break
            self.pending_requests.remove(request)
            self._occupy_slot(request, step)
            self.prefilling_requests.append(request)
            computed.update(request.keys)
            if joins:
                leaders.add(request.keys[-1])

    def _occupy_slot(self, request: Request, step: Step) -> None:
        request.slot, request.weights_version = heapq.heappop(self.free_slots), self.weights_version
        step.admitted.append((request.request_id, request.slot))
        if not request.completion:  # else it was preempted
            request.completion.reused = request.cached_tokens
            self.reused_tokens += request.cached_tokens

    def _join(self, leaders: list[Request], step: Step) -> list[list[Request]]:
        """Admit pending requests whose prompt the next pass completes for a leader. -> for each leader, itself and those

        They get first tokens from the same logits. They share the leader's full blocks; what its last block holds is copied."""
        groups = [[r] for r in leaders]
        alike = {
            group[0].keys[-1]: group
            for group in groups
            if _may_join(group[0]) and group[0].weights_version == self.weights_version
        }
        for request in self.pending_requests if alike else ():
            if not self.free_slots:
                break
            if request.in_flight or not _may_join(request) or request.keys[-1] not in alike:
                continue
            group = alike[request.keys[-1]]
            full, rest = divmod(len(request.prompt), self.pool.S)
            if not self._leaves_room(rest > 0):
                break
            for block in group[0].blocks[:full]:
                self.pool.share(block)
            own = [self.pool.allocate()] if rest else []
            request.blocks, request.published = group[0].blocks[:full] + own, full
            request.cached_tokens = len(request.prompt)
            self._occupy_slot(request, step)
            self.active_requests.append(request)
            group.append(request)
        if any(len(group) > 1 for group in groups):
            pending = [r for r in self.pending_requests if r.slot < 0]
            self.pending_requests = collections.deque(pending)
        return groups

    def _can_share(self, request: Request) -> bool:
        # With dynamic RoPE scaling, a long prompt has other angles from its first token.
        return self.reuse_prefix and not self.cache.stretched(len(request.prompt))

    def _keys(self, request: Request) -> list[bytes]:
        """Of its blocks; none if it does not share them."""
        return block_keys(request.tokens, self.pool.S) if self._can_share(request) else []

    def _assign_blocks(self, request: Request, found: Prefix) -> bool:
        """Share or allocate blocks for all tokens of the request. found: those that hold its first tokens. -> False if there are
        not enough"""
        tokens, pool, nothing = request.tokens, self.pool, Prefix([])
        # A block that begins with the next tokens is copied (copy on write), or taken over if that loses nothing or there is no
        # other way. If all this keeps too many blocks from being evicted, less is shared.
        ways = (found, found.whole), (found, True), (Prefix(found.blocks), False), (nothing, False)
        for prefix, take in ways:
            if take and not pool.can_take(prefix.partial):
                continue
            used = prefix.blocks + ([] if prefix.partial is None else [prefix.partial])
            for block in used:  # must not be evicted
                pool.share(block)
            needed = -(-len(tokens) // pool.S) - len(prefix.blocks) - take
            if self._leaves_room(needed):
                break
            pool.release(used)
        else:
            return False
        taken = [prefix.partial] if take and prefix.partial is not None else []
        request.blocks = prefix.blocks + taken + [pool.allocate() for _ in range(needed)]
        request.published = len(prefix.blocks)
        request.cached_tokens = len(prefix.blocks) * pool.S + prefix.n_partial
        if taken:
            pool.forget(taken[0])
        elif prefix.partial is not None:
            copy = request.blocks[len(prefix.blocks)]
            self.cache.copy_blocks([copy], [prefix.partial], prefix.n_partial)
            pool.release([prefix.partial])
        return True

    def _leaves_room(self, needed: int) -> bool:
        """Whether `needed` blocks may be allocated: some are left for the sequences that are growing, half of one for each."""
        available, most = self.pool.available - needed, (len(self.active_requests) + 1) // 2
        if not 0 <= available < most:
            return available >= 0
        return available >= sum(
            map(self._blocks_to_come, self.active_requests + self.prefilling_requests)
        )

    def _blocks_to_come(self, request: Request) -> int:
        """How many more blocks the request may need."""
        longest = min(len(request.prompt) + request.max_new_tokens, self.max_seq_len)
        return -(-longest // self.pool.S) - len(request.blocks)

    # ------------------------------------------------------------------------- prefill
    def _prefill(self, step: Step) -> None:
        """Launch one forward pass over the next tokens of the prefilling requests; those that are complete get a token."""
        chunks = self._next_chunks()
        if not chunks:
            return
        self.last_prefill = step.number
        requests, counts = [c.request for c in chunks], [c.n_tokens for c in chunks]
        starts = [r.cached_tokens for r in requests]
        tokens = [r.tokens for r in requests]
        ends = list(itertools.accumulate(counts))
        complete = [i for i, (t, a, n) in enumerate(zip(tokens, starts, counts)) if a + n == len(t)]
        leaders = [i for i in complete if requests[i].scores is None]
        groups = self._join([requests[i] for i in leaders], step)
        drawing = list(itertools.chain(*groups))
        parts, wanted = [], [ends[i] - 1 for i, group in zip(leaders, groups) for _ in group]
        for request, start, n, end in zip(requests, starts, counts, ends):
            if request.scores is not None and (rows := request.scores.wanted(start, n)):
                parts.append((request, rows[0], slice(len(wanted), len(wanted) + len(rows))))
                wanted += range(end - len(rows), end)
        ids_N, sequences = self.cache.prefill(
            [x for t, a, n in zip(tokens, starts, counts) for x in t[a : a + n]], counts, starts,
            [r.blocks for r in requests], wanted or [0], len(requests[0].prompt),
        )  # fmt: skip
        x_WC = self.model.hidden(ids_N, sequences)
        for request, n in zip(requests, counts):
            request.cached_tokens += n
            request.completion.prefilled += 0 if request.completion else n
            self.prefilled_tokens += n
            step.prefilled += n
            self._publish(request)
        self._copy_last_blocks(groups)
        if drawing:
            logits = self.model.logits(Tensor(x_WC.data[: len(drawing)])).data
            self._draw_first_tokens(drawing, logits)
        if parts:
            self._score(parts, x_WC.data, len(drawing))
        for i in complete:
            self.prefilling_requests.remove(requests[i])
            self.active_requests.append(requests[i])

    def _copy_last_blocks(self, groups: list[list[Request]]) -> None:
        """Of the leader of each group, for the others in it, if it is not full."""
        to, source, most = [], [], 0
        for leader, *others in groups:
            tokens = len(leader.prompt) % self.pool.S
            if others and tokens:
                to += [r.blocks[-1] for r in others]
                source += [leader.blocks[-1]] * len(others)
                most = max(most, tokens)
        if to:
            self.cache.copy_blocks(to, source, most)

    def _score(self, parts: list[tuple[Request, int, slice]], x_WC: Array, first: int) -> None:
        """Launch the log-probabilities of the tokens after rows first, first + 1, ... of x."""
        targets, n_top = [], 0
        for request, position, rows in parts:
            if request.scores is not None:
                targets += request.scores.tokens[position + 1 :][: rows.stop - rows.start]
                n_top = max(n_top, request.scores.n_top)
        targets_W, each = to_device(np.array(targets, np.int32), self.model.device), []
        for low in range(0, len(targets), LOGIT_ROWS[self.model.device]):
            high = min(low + LOGIT_ROWS[self.model.device], len(targets))
            logits = self.model.logits(Tensor(x_WC[first + low : first + high])).data
            found = token_logprobs(logits, targets_W[low:high], n_top, self.config.vocab_size)
            each.append([_to_host_later(x) for x in found])
        self.steps_in_flight.append(InFlightScores(parts, first, each, self._arrival()))
        for request, *_ in parts:
            request.in_flight += 1

    def _next_chunks(self) -> list[PrefillChunk]:
        """The next tokens of the prefilling requests, as many as one pass may have."""
        chunks: list[PrefillChunk] = []
        free, S = self.max_prefill_tokens, self.pool.S
        flops = PREFILL_FLOPS[self.model.device] if self.active_requests else float("inf")
        for request in self.prefilling_requests:
            past = request.cached_tokens
            total = len(request.tokens)
            alone = self.cache.stretched(len(request.prompt))
            if alone and chunks:
                break
            each = self._flops_of_token(past)
            n = min(total - past, free, max(S, int(min(flops / each, total))))
            chunks.append(PrefillChunk(request, n))
            free, flops = free - n, flops - n * each
            if alone or free <= 0 or flops <= 0:
                break
        return chunks

    def _flops_of_token(self, past: int) -> float:
        """About how many floating-point operations the forward of one token after `past` others takes."""
        products = 2 * self.n_weights
        keys = 4 * past * self.config.n_heads * self.cache.heads[0].D * len(self.cache.heads)
        return products + keys

    def _draw_first_tokens(self, requests: list[Request], logits: Array) -> None:
        """Sample a token for each request, row by row of logits, and put it where the decoding step reads it."""
        batch, slots = self.batch, [r.slot for r in requests]
        batch.write(requests)
        for request in requests:
            self._write_penalties(request)
        ids = to_device(np.zeros(len(slots), np.int32), self.model.device)
        logprobs = self._sample(logits, ids, batch.rows(slots), *_extras(requests))
        batch.ids[slots] = ids
        if self.device_to_host_ids_gpu is not None:
            self.device_to_host_ids_gpu[_host_rows(requests), slots] = ids
        self._put_in_flight(requests, logprobs, list(range(len(requests))))

    def _write_penalties(self, request: Request) -> None:
        """Write the request's tokens so far, of which none may be in flight, to its slot of the penalties, if it has any."""
        if request.penalties.active:
            if self.penalties is None:
                room = self.max_seq_len + MAX_BIASES
                self.penalties = Penalties.empty(self.batch.ids, self.max_batch, room)
            self.penalties.set_slot(
                request.slot, request.penalties, request.prompt, request.completion
            )

    def _sample(
        self, logits: Array, ids_B: Array, batch: dict[str, Array], penalized: bool, scored: bool
    ) -> tuple[Array, ...]:
        """Draw ids_B. -> what token_logprobs returns if `scored`, else nothing. Others: see _extras"""
        vocab, slots_B = self.config.vocab_size, batch["penalty_slot"]
        if penalized and self.penalties is not None:
            apply_penalties(logits, self.penalties, slots_B)
        sample(
            logits, ids_B, batch["temperature"], batch["top_k"], batch["top_p"], batch["seed"],
            batch["random_stream"], batch["step"], vocab, min_p_B=batch["min_p"],
        )  # fmt: skip
        if penalized and self.penalties is not None:
            count_tokens(logits, self.penalties, slots_B, ids_B)
        return token_logprobs(logits, ids_B, MAX_TOP, vocab) if scored else ()

    def _publish(self, request: Request, last: bool = False) -> None:
        """Let other sequences find the blocks that are full, and the last one if the prompt is complete or at the `last` call."""
        if (
            not request.keys
            or request.weights_version != self.model.arena.version.count
            or request.completion.reason == "nan"
        ):
            return
        tokens, S = request.tokens, self.pool.S
        valid = min(request.cached_tokens, len(tokens))
        while (i := request.published) * S < valid:
            previous = request.keys[i - 1] if i else ROOT
            piece = tokens[i * S : min((i + 1) * S, valid)]
            if len(piece) == S or last or valid == len(tokens):
                self.pool.publish(request.blocks[i], previous, piece)
            if len(piece) < S:
                break
            key = block_key(previous, piece)
            if request.keys[i : i + 1] != [key]:  # the sequence has grown since it was pending
                request.keys = [*request.keys[:i], key]
            request.published += 1

    # ------------------------------------------------------------------------- decoding
    def _decode(self, b: int, penalized: bool, scored: bool) -> tuple[Array, ...]:
        """The step that a CUDA graph records: one token for each of the first b entries of the batch. -> their log-probabilities,
        if `scored`"""
        batch, columns, ids_B = self.batch, self.batch.first(b), self.batch.ids[:b]
        lengths_B = columns["lengths"]
        tables_BM = batch.device_tables[:b]
        sequences = self.cache.decode(lengths_B, tables_BM, batch.edges[: b + 1])
        logits = self.model.logits(self.model.hidden(ids_B, sequences)).data
        logprobs = self._sample(logits, ids_B, columns, penalized, scored)
        advance(lengths_B, columns["step"], lengths_B, ids_B, self.device_to_host_ids_gpu)
        return logprobs

    def _ready_to_decode(self, step: Step) -> list[Request]:
        """The active requests that get another token, each with a block for it; others are preempted if there are none left."""
        ready = []
        for request in list(self.active_requests):
            drawn = len(request.completion) + request.in_flight
            if request.slot < 0 or drawn >= request.room:
                continue  # preempted in this loop, or its last token is in flight
            if request.cached_tokens == len(request.blocks) * self.pool.S:
                self._make_room(request, step)
                if request.slot < 0:
                    continue
                request.blocks.append(self.pool.allocate())
                row = self.batch.host_tables[request.slot]
                row[len(request.blocks) - 1] = request.blocks[-1]
                self.batch.tables_changed = True
            ready.append(request)
        return [r for r in ready if r.slot >= 0]

    def _make_room(self, request: Request, step: Step) -> None:
        """Preempt the newest sequences until a block is available; it may be the request itself."""
        while not self.pool.available and request.slot >= 0:
            newest = max(
                self.active_requests + self.prefilling_requests, key=lambda r: r.request_id
            )
            self._give_up_place(newest)
            newest.cached_tokens = newest.published = 0
            self.pending_requests.appendleft(newest)
            step.preempted.append(newest.request_id)

    def _launch(self, requests: list[Request], step: Step) -> None:
        """Start a decoding step."""
        batch = self.batch
        if self.batch_requests != requests:
            slots = [r.slot for r in requests]
            batch.mark_idle_except(slots)
            batch.write_counters(requests, slots)
            batch.upload()
            size = max(slots) + 1
            if self.model.device == "gpu":  # the same bits with a graph and without
                size = graph_size(size, self.max_batch)
            self.batch_variant = (size, *_extras(requests))
            self.batch_slots, self.batch_requests = slots, requests
        elif batch.tables_changed:
            batch.upload_tables()
        variant = self.batch_variant
        logprobs = self.graphed(variant=variant) if self.graphed else self._decode(*variant)
        self._put_in_flight(requests, logprobs, self.batch_slots)
        for request in requests:
            request.cached_tokens += 1
        step.decoded = [r.request_id for r in requests]

    def _is_sparse(self) -> bool:
        """True if the sequences should move to lower slots: on a GPU if the batch is less than half full, elsewhere if the active
        ones are not in the first slots."""
        if not self.run_ahead:
            n = len(self.active_requests)
            return max([r.slot for r in self.active_requests], default=-1) >= n
        requests = self.active_requests + self.prefilling_requests
        size = max([r.slot for r in requests], default=-1) + 1
        return size > 2 * graph_size(max(len(requests), 1), self.max_batch)

    def _compact_slots(self) -> None:
        active = sorted(self.active_requests, key=lambda r: r.slot)
        requests = active + self.prefilling_requests
        old = [r.slot for r in requests]
        self.batch.ids[: len(old)] = self.batch.ids[old]
        for slot, request in enumerate(requests):
            if slot != request.slot:
                request.slot = slot
                self._write_penalties(request)  # no token is in flight
        if active:
            self.batch.write(active)
        self.free_slots = list(range(len(requests), self.max_batch))
        self.batch_requests = []

    def _put_in_flight(
        self, requests: list[Request], logprobs: tuple[Array, ...], rows: list[int]
    ) -> None:
        copies = list(map(_to_host_later, logprobs))  # before the event that wait_for_ids waits for
        wait_for_ids = self._read_ids_later(requests)
        self.steps_in_flight.append(InFlightStep(list(requests), wait_for_ids, copies, rows))
        for request in requests:
            request.in_flight += 1

    def _read_ids_later(self, requests: list[Request]) -> Callable[[], list[int]]:
        """-> a function that waits for the ids of the step just launched and returns them, one per request"""
        slots = [r.slot for r in requests]
        if self.model.device != "gpu":
            ids = to_numpy(self.batch.ids)[slots].tolist()
            return lambda: ids
        rows, wait = _host_rows(requests), self._arrival()

        def wait_for_ids() -> list[int]:
            wait()
            return self.device_to_host_ids[rows, slots].tolist()

        return wait_for_ids

    def _arrival(self) -> Callable[[], None]:
        """-> a function that waits for everything launched so far"""
        if self.model.device != "gpu":
            return lambda: None
        arrived = cupy().cuda.Event(disable_timing=True)
        arrived.record()
        return arrived.synchronize

    def _collect(self, kept: int) -> list[tuple[Request, int]]:
        """Wait for the tokens of all steps in flight but the newest `kept`. -> (request, token) pairs"""
        new_tokens = []
        while len(self.steps_in_flight) > kept:
            oldest = self.steps_in_flight[0]
            if isinstance(oldest, InFlightScores):
                oldest.wait()
                self.steps_in_flight.popleft()
                self._take_scores(oldest)
                continue
            tokens = oldest.wait_for_ids()
            self.steps_in_flight.popleft()
            for request, token, logprobs in zip(oldest.requests, tokens, oldest.token_logprobs()):
                request.in_flight -= 1
                completion = request.completion
                if completion.reason is not None:
                    continue
                if token < 0:
                    self._end(request, "nan")
                    continue
                if completion:
                    self.decoded_tokens += 1
                if completion.logprobs is not None and logprobs is not None:
                    # First, for readers in other threads. Ctrl-C may have come between these two statements before.
                    completion.logprobs[len(completion) :] = [logprobs]
                completion.append(token)
                new_tokens.append((request, token))
                if token in request.stop or len(completion) >= request.room:
                    self._end_if_finished(request)
        return new_tokens

    def _take_scores(self, step: InFlightScores) -> None:
        arrays = [np.concatenate(pieces) for pieces in zip(*step.arrays)]
        for request, position, rows in step.parts:
            request.in_flight -= 1
            if request.completion.reason is None and request.scores is not None:
                rows = slice(rows.start - step.first, rows.stop - step.first)
                request.scores.take(position, arrays, rows)
                self._end_if_finished(request)

    # ------------------------------------------------------------------------- the end of a sequence
    def _end_if_finished(self, request: Request) -> None:
        completion = request.completion
        if completion.reason:  # cancelled, or `_end` was interrupted
            self._end(request, completion.reason)
        elif request.scores is not None:
            if request.scores.complete:
                self._end(request, "scored")
        elif completion and completion[-1] in request.stop:
            self._end(request, "stop")
        elif len(completion) == request.max_new_tokens:
            self._end(request, "length")
        elif len(request.prompt) + len(completion) == self.max_seq_len:
            self._end(request, "full")

    def _end(self, request: Request, reason: str) -> None:
        reason = request.completion.end(reason)
        if request.slot >= 0:
            self._give_up_place(request)
        else:
            self.pending_requests.remove(request)
        del self.unfinished_requests[request.request_id]
        if request.weights_version >= 0:  # else it was never admitted
            self.trace[-1].ended.append((request.request_id, reason))

    def _give_up_place(self, request: Request) -> None:
        """The request loses its slot and its blocks. What they hold can still be found."""
        self._publish(request, last=True)
        prefilling = request in self.prefilling_requests
        (self.prefilling_requests if prefilling else self.active_requests).remove(request)
        self.pool.release(request.blocks)
        heapq.heappush(self.free_slots, request.slot)
        request.blocks, request.slot = [], -1


def _extras(requests: list[Request]) -> tuple[bool, bool]:
    """-> does a request have penalties or a bias? does one ask for log-probabilities?"""
    penalized = any([request.penalties.active for request in requests])
    return penalized, any([request.logprobs is not None for request in requests])


def _may_join(request: Request) -> bool:
    """May it share a prompt, computed once, with others that begin together with it?"""
    return bool(request.keys) and not request.completion and request.scores is None


def _host_rows(requests: list[Request]) -> list[int]:
    """Of device_to_host_ids, where the next token of each request arrives: as `advance` writes them"""
    return [(len(r.completion) + r.in_flight) % 2 for r in requests]


def _to_host_later(x: Array) -> np.ndarray:
    """-> an array in host memory that has the values of x when the kernels launched so far, and the copy, have ended"""
    if not is_gpu(x):
        return to_numpy(x)
    host, host_gpu = mapped_array(x.shape, x.dtype)
    host_gpu[...] = x
    return host


def graph_size(b: int, max_batch: int) -> int:
    """Entries of the CUDA graph that serves b sequences: a power of two up to 8, then a multiple of 8. The rest are idle."""
    size = 1 << (b - 1).bit_length() if b <= 8 else -(-b // 8) * 8
    return min(size, max_batch)
