"""Inference: token ids in, token ids out. (text_generation.py and conversation.py add text.)

    engine = xtrain.Engine(model, max_batch=8, max_seq_len=1024)
    for completion in engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20, temperature=0.8):
        print(completion, completion.reason)
    for number, token in engine.stream([[1, 2, 3], [4, 5]]):     # token by token
        ...

Any Transformer is served by the forward that trains it. Its KV cache is divided into blocks
(blocks.py, paged_cache.py), and requests are batched continuously (Yu et al. 2022, Orca). Every
step

    admits     waiting requests, while there is a free slot in the decode batch and there are blocks
               for their tokens. Blocks that other sequences have computed for the same first tokens
               are shared. Requests with equal prompts begin together: one of them prefills, and the
               others join it in the pass that completes the prompt
    decodes    one token for every other sequence, or verifies several that were guessed
               (speculation.py)
    prefills   the next tokens of the admitted prompts, several prompts in one pass, or part of a
               long one: so many that other sequences do not wait for long. A prompt that is
               complete gets its first token
    ends       finished sequences; their slots and blocks are free in the next step

The scheduler (scheduler.py) decides what a step computes, the runner (runner.py) computes it on the
device, and the scheduler takes the new tokens. If no block is left for a sequence, the newest
sequence is preempted: it gives up its blocks, waits in front of the other requests, and later
computes its tokens again, together with what it has generated. `engine.trace` records all of this.

A fresh engine gives the same tokens for the same requests. Random numbers depend only on a
request's seed, random stream and step. The last bits of the logits may still depend on the other
sequences of the batch, because matrix products of different shapes add in a different order;
batch_invariant=True prevents this, at some cost in speed (kernels/runtime/invariance.py).
"""

import collections
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import UserError
from ..formats.expert_files import active_share
from ..nn.draft_heads import DraftHeads
from ..nn.model import Transformer
from ..nn.quantized import quantize_weights
from .adapters import number_of
from .constraints import Grammar
from .draft_heads import HeadsDrafter
from .draft_model import DraftModel
from .options import EngineOptions, described, engine_parameters
from .paged_cache import PagedCache, affordable_blocks, check_room
from .requests import Completion, Request, Step, make_requests, make_scoring_requests
from .runner import Runner
from .scheduler import Limits, Scheduler
from .scoring import Scores
from .speculation import Drafter, PromptLookup, Speculation
from .stream import Stream
from .verifying import Verifier
from .warm_up import compile_ahead, warm_up

# Floating-point operations of a prefill pass while other sequences wait for their next token: some
# 25 ms of an H200.
PREFILL_FLOPS = {"gpu": 9e12, "cpu": 4e9, "sim": 4e9}
T = TypeVar("T")
P = ParamSpec("P")


def _with_arguments_of(
    method: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """For type checkers: the decorated method, whose arguments are passed on, takes those of
    `method`."""
    return lambda decorated: decorated


def _with_options(
    options: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Transformer, P], None]]:
    """For type checkers: the decorated constructor takes a model and the arguments of `options`."""
    return lambda constructor: constructor


class Engine:
    """Serves a Transformer to many requests at a time.

    Several threads may use one engine: a step runs in one thread at a time and computes the
    requests of all of them. Every method may be called from any thread; a Stream is iterated by one
    thread at a time, others may cancel or close it. On a GPU, the threads must have the same
    current device and stream (they do by default). A finalizer or a signal handler may interrupt a
    step, so it may call `cancel` and `close`, which never wait, but not `step` or `submit`.

    In batch-invariant mode the logits have the bits of `with xtrain.batch_invariant(): model(ids)`,
    also where blocks are shared and after a preemption: products have a fixed number of rows, and
    decoding uses the attention of prefill.

    With `speculate` a step may verify several guessed tokens of a sequence (speculation.py). In
    batch-invariant mode that changes neither tokens nor log-probabilities. Sequences with a grammar
    guess none.

    New weights are detected if AdamW has written them or if they are assigned, as in
    `parameter.data = x`; if they are written in place, call `forget_prefixes`. Weights in int8 or
    fp8 (nn/quantized.py) need a model made with trainable=False, which can only be served from then
    on: half of bf16's memory, and decoding reads half the bytes. A cache in fp8
    (kernels/decoding/kv_codes.py) is for models in bf16 with heads of 32, 64 or 128 channels if
    they are on a GPU, not for batch-invariant mode: with 12 and more layers it holds 1.6 to 1.8
    times the tokens of bf16 in the same memory.

    The cache has blocks for max_batch sequences of max_seq_len tokens, if there is memory; if
    sequences need more, some are preempted. The first request with penalties, a bias or tokens that
    are forbidden allocates lists for all: 16 bytes x max_batch x max_seq_len.

    Raises UserError for an invalid option, or if there is not enough memory for one sequence of
    max_seq_len tokens.
    """

    runner_type = Runner
    scheduler_type = Scheduler
    speculation_type = Speculation

    @_with_options(EngineOptions)
    def __init__(self, model: Transformer, *arguments: Any, **named: Any):
        if not isinstance(model, Transformer):
            raise UserError(
                f"model must be a Transformer, got {type(model).__name__}: make one with "
                "Transformer.from_pretrained(folder)"
            )
        self.options = options = EngineOptions(*arguments, **named)
        self.sizes = options.sizes(model)
        self.model = model
        self.config = model.config
        self.adapters = model.adapters  # graphs have no others
        self.max_batch = options.max_batch
        self.max_seq_len = self.sizes.max_seq_len
        self.cache, *draft_cache = _make_caches(model, options, self.max_seq_len)
        self.cache_bytes = self.cache.nbytes
        self.runner = self.runner_type(
            model,
            self.cache,
            self.max_batch,
            self.max_seq_len,
            options.batch_invariant,
            options.graph,
            options.logprobs_of,
        )
        weights_version = lambda: model.arena.version.count
        self.runners = [self.runner]
        speculation = None
        if options.speculate:
            self.runner.verifier = Verifier(self.runner, options.speculate)
            drafter: Drafter = PromptLookup()
            if isinstance(options.draft_model, DraftHeads):
                drafter = HeadsDrafter(options.draft_model, self.runner)
            for cache in draft_cache:
                drafter = DraftModel(cache, self.runner, self.sizes.prefill_tokens)
                self.runners.append(drafter.runner)
            speculation = self.speculation_type(drafter, options.speculate)
        make = functools.partial(
            self.scheduler_type, self._limits(), weights_version, speculation=speculation
        )
        self.make_scheduler = make
        self.scheduler = make()
        # lock: held by the thread that changes the state.  turn: held by the thread that waits for
        # the lock, so that no thread takes the lock twice in succession while another one waits.
        self.lock = threading.RLock()
        self.turn = threading.RLock()
        self.state_is_consistent = True
        self.ready = ""  # one line on the start, for the user
        if options.warm_up and model.device == "gpu":
            self.ready = warm_up(self)
        elif model.device == "gpu" and not model.variation:
            compile_ahead(self)

    def _limits(self) -> Limits:
        heads = self.cache.heads
        n_weights = sum(
            p.size * active_share(self.config, next(iter(p.parts)))
            for _, p in self.model.storage()
            if p.decay
        )
        return Limits(
            max_batch=self.max_batch,
            max_seq_len=self.max_seq_len,
            n_blocks=self.cache.n_blocks,
            block_tokens=self.cache.S,
            prefill_tokens=self.sizes.prefill_tokens,
            prefill_interval=self.sizes.prefill_interval,
            reuse_prefix=self.options.reuse_prefix,
            run_ahead=self.runner.run_ahead,
            trained_length=self.cache.trained_length,
            pass_flops=PREFILL_FLOPS[self.model.device],
            token_flops=int(2 * n_weights),
            past_flops=4 * self.config.n_heads * heads[0].D * len(heads),
        )

    def describe(self) -> str:
        """Return one line on the size of the KV cache, in bytes, and its factors."""
        c = self.cache
        heads = sorted({(h.G, h.D) for h in c.heads})
        shapes = " or ".join(f"{G} heads x {D} channels" for G, D in heads)
        kind = c.dtype.name
        if c.kind != "full":
            kind = f"{c.kind}, with scales and a copy of one layer in {kind}"
        return (
            f"KV cache {self.cache_bytes:,} bytes: {len(c.heads)} layers x 2 x {c.n_blocks} blocks "
            f"x {c.S} tokens x {shapes} in {kind}"
        )

    # ----------------------------------------------------------------- the numbers of the scheduler
    @property
    def trace(self) -> collections.deque[Step]:
        """Return what happened in the last steps."""
        return self.scheduler.trace

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.scheduler.steps

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.scheduler.prefilled_tokens

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose keys and values were in the cache."""
        return self.scheduler.reused_tokens

    @property
    def decoded_tokens(self) -> int:
        """Tokens of answers, without the first of each."""
        return self.scheduler.decoded_tokens

    @property
    def busy(self) -> bool:
        """Return True if there are unfinished requests, or results that have not arrived."""
        return bool(self.scheduler.unfinished or self.runner.in_flight)

    # ------------------------------------------------------------------------- requests
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
        min_new_tokens: int | Sequence[int] = 0,
        allowed_token_ids: Set[int] | Sequence[Set[int] | None] | None = None,
        logprobs: int | Sequence[int | None] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        n: int = 1,
        adapter: str | None = None,
    ) -> Stream:
        """Return an iterator over (number, token) with `completions` and `cancel(number)`; it
        computes when iterated.

        prompts: lists of token ids. Every option except stop, n and adapter may be a list with one
        value per prompt.
        n: answers per prompt; prompt i has numbers i n, ..., i n + n - 1. Each prompt is computed
        once, and each answer has random numbers of its own: the first k answers are the same
        whatever n is.
        max_new_tokens: per prompt, at most.
        temperature: 0 picks the most likely token, the lower id of two that tie; otherwise tokens
        are drawn at random.
        top_k: draw among the top_k most likely tokens, at most 1024; None: all.
        top_p: draw among the fewest of these that together have at least this share of the
        probability.
        seed: with one seed, prompt i uses random stream i of that seed; with a list of seeds, each
        prompt uses stream 0 of its own seed, as if it were alone.
        stop: ids of tokens that end a sequence.
        min_p: draw among tokens with at least this share of the most likely one's probability
        (before top_k and top_p).
        repetition_penalty: logits of tokens of the prompt and the answer are divided by it if
        positive, else multiplied.
        presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens,
        once, and once per occurrence.
        logit_bias: token id to a number from -100 to 100 that is added to its logit, at most 300
        tokens. Bias and penalties also change what temperature 0 picks.
        min_new_tokens: tokens of an answer, before one of `stop` may be drawn.
        allowed_token_ids: a set of the only tokens that may be drawn; None: all.
        logprobs: report this many of the most likely tokens, 0 to 20, and their log-probabilities,
        and that of the chosen token, in Completion.logprobs; None: no log-probabilities.
        grammar: what the answers must be (serving/constraints.py); None: anything.
        adapter: a name of add_adapters (serving/adapters.py); None: the model itself.

        Prompts beyond max_batch, and those for which there are no blocks, wait. Raises UserError,
        before anything is computed, for an empty prompt, for one that leaves no room for an answer,
        or for an option out of range.
        """
        requests = make_requests(
            prompts,
            self.config,
            self.max_seq_len,
            stop,
            seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            min_new_tokens=min_new_tokens,
            allowed_token_ids=allowed_token_ids,
            logprobs=logprobs,
            grammar=grammar,
            n=n,
        )
        if adapter is not None:
            number = number_of(self.adapters, adapter)
            for request in requests:
                request.adapter = number
        return Stream(self, requests)

    @_with_arguments_of(stream)
    def generate(
        self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any
    ) -> list[Completion]:
        """Run `stream` to its end. Return n Completions (lists of new tokens) per prompt. Arguments
        and errors as in stream."""
        stream = self.stream(prompts, *args, **options)
        self._compute(stream.requests)
        return stream.completions

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]] | None = None,
        top: int = 0,
    ) -> list[Scores]:
        """Compute the log-probabilities of the tokens of continuations[i] after prompts[i]. Return
        one Scores each.

        continuations: None: every token of the prompts but the first, which nothing precedes.
        top: also report so many of the most likely tokens at each place, at most 20.

        Nothing is sampled. Sequences are computed together, and what several of them begin with is
        computed once. Other threads may generate at the same time. The last token of a sequence is
        only predicted: there may be max_seq_len + 1. Raises UserError, before anything is computed,
        for an empty prompt or continuation, for a sequence that is too long, or for an id that is
        no token.
        """
        requests = make_scoring_requests(prompts, continuations, self.config, self.max_seq_len, top)
        self._compute(requests)
        return [request.scores for request in requests if request.scores is not None]

    def _compute(self, requests: list[Request]) -> None:
        """Submit the requests and step until all have ended. If that is interrupted, they are
        cancelled."""
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
        """Append requests to the waiting ones; `step` admits each when there is room."""
        self.scheduler.prepare(requests)
        self._exclusively(lambda: self.scheduler.add(requests))

    def cancel(self, request: Request) -> None:
        """End the request: the next step frees its slot.

        It never waits, so it is safe at any time, also during garbage collection. A step that is
        running in another thread may append one more token.
        """
        request.completion.end("cancelled")

    def forget_prefixes(self) -> None:
        """Reuse nothing that has been computed so far.

        Call it after weights were written in place, as `weights[...] = x`: AdamW and
        `parameter.data = x` are detected. Unfinished sequences keep their keys and values.
        """
        self.model.arena.version.count += 1

    # ------------------------------------------------------------------------- one step
    def step(self) -> list[tuple[Request, int]]:
        """Compute one step. Return the (request, new token) pairs that have arrived.

        Without unfinished requests there is no step. On a GPU the tokens that a step launches
        arrive in the next step.
        """
        return self._exclusively(self._next_step)

    def _next_step(self) -> list[tuple[Request, int]]:
        self.scheduler.remove_cancelled()
        if not self.busy:
            return []
        start = time.perf_counter()
        step = self.scheduler.begin_step()
        try:
            return self._step(step)
        finally:
            step.seconds = time.perf_counter() - start

    def _step(self, step: Step) -> list[tuple[Request, int]]:
        scheduler = self.scheduler
        runner = self.runner
        new_tokens = []
        if scheduler.is_sparse():
            new_tokens += scheduler.take(runner.arrived(everything=True))
            runner.compact(scheduler.compact())
        elif scheduler.wants_tokens():
            new_tokens += scheduler.take(runner.arrived(everything=True))
        runner.launch(scheduler.next(step))
        return new_tokens + scheduler.take(runner.arrived())

    def _exclusively(self, change: Callable[[], T]) -> T:
        """Call change() while no other thread changes the state. Threads take turns.

        If Ctrl-C or an error interrupts it between any two statements, both locks are released and
        the next change recovers first. Ctrl-C may arrive after `acquire` has succeeded and before
        the next statement; therefore `acquire` is inside `try`, and `release`, which raises
        RuntimeError in a thread that does not hold the lock, comes first in `finally`.
        """
        try:
            try:
                self.turn.acquire()
                self.lock.acquire()
            finally:
                # not contextlib.suppress, whose Python code Ctrl-C could interrupt before the
                # release
                try:  # noqa: SIM105
                    self.turn.release()
                except RuntimeError:
                    pass
            if not self.state_is_consistent:
                self.runner.forget()
                self.scheduler.recover()
            self.state_is_consistent = False
            result = change()
            self.state_is_consistent = True
            return result
        finally:
            try:  # noqa: SIM105
                self.lock.release()
            except RuntimeError:
                pass


def _make_caches(model: Transformer, options: EngineOptions, max_seq_len: int) -> list[PagedCache]:
    """Quantize the weights, and allocate the KV cache in the memory that is free then, and one with
    as many blocks for the draft model."""
    caches = [PagedCache(model, max_seq_len, options.block_tokens, options.kv_cache)]
    if isinstance(options.draft_model, Transformer):
        caches.append(PagedCache(options.draft_model, max_seq_len, options.block_tokens))
    block_bytes = sum(cache.block_bytes for cache in caches)
    if options.cache_bytes is not None:
        check_room(caches[0], options.cache_bytes // block_bytes)
    quantize_weights(model, options.weights)
    model.arena.refresh()
    n_blocks = options.max_batch * -(-max_seq_len // options.block_tokens)
    limits = options.gpu_memory, options.cache_bytes
    n_blocks = affordable_blocks(model.device, block_bytes, n_blocks, *limits)
    check_room(caches[0], n_blocks)
    for cache in caches:
        cache.allocate(n_blocks)
    return caches


def _document(kind: Any) -> None:
    """Let `help` show the options, with their texts."""
    self, model = list(inspect.signature(kind.__init__).parameters.values())[:2]
    kind.__init__.__signature__ = inspect.Signature([self, model, *engine_parameters()])
    kind.__doc__ = f"{inspect.cleandoc(kind.__doc__ or '')}\n\n{described()}\n"


_document(Engine)
