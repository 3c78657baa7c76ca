"""What the scheduler has chosen, on the device: prefill, decoding, sampling, and the copies of the
results to the host.

On a GPU the decoding step (model, sampling, advancing the counters) is a CUDA graph, one per batch
size, and all its inputs are on the device. The host launches a step before it knows the tokens of
the previous one. If a sequence turns out to have ended, one wasted token is computed for it and
discarded. If a sequence is constrained, the step is two graphs, and the host makes its mask while
the first one runs (masks.py). A prefill is a CUDA graph, too (prefill_rows.py).
"""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..device import Array, cupy, mapped_array, to_device, to_numpy, zeros_on
from ..kernels.decoding.kept_tokens import kept_tokens, sampled_logits
from ..kernels.decoding.logprobs import MAX_TOP, token_logprobs
from ..kernels.decoding.penalties import (
    MAX_BIASES,
    MAX_ENDS,
    Penalties,
    apply_penalties,
    count_tokens,
)
from ..kernels.decoding.sampling import advance, sample
from ..kernels.decoding.token_masks import mask_logits
from ..kernels.runtime.invariance import batch_invariant
from ..nn.autograd import Tensor, inference
from ..nn.cuda_graph import EAGER_CALLS, Graphed
from ..nn.model import Transformer
from .decode_batch import DecodeBatch
from .in_flight import ScoresInFlight, TokensInFlight, to_host_later
from .masks import TokenMasks, accepting
from .paged_cache import PagedCache
from .prefill_rows import MOST_SEQUENCES, PassSizes, PrefillRows, round_rows, unpack
from .requests import Request, State
from .scoring import LOGIT_ROWS
from .work import Arrived, Prefill, ScoredChunk, Work, graph_size

LARGEST_PASS = 1025  # rows; no kernel is chosen because there are more
# Sequences of the graphs that every_graph captures: each takes about 0.1 s, and there are 11.
CAPTURED_AHEAD = 64


class Runner:
    """Computes a Transformer's steps. The arguments of `launch` say what, `arrived` returns the
    results in order.

    cache: with its arrays allocated.
    graph: capture decoding steps and prefill passes as CUDA graphs, on a GPU.
    in_flight: launched passes whose results have not been read.
    penalties, masks: of each slot; allocated when the first request has some.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        max_batch: int,
        max_seq_len: int,
        invariant: bool = False,
        graph: bool = True,
        logprobs_of: str = "model",
    ):
        self.model = model
        self.cache = cache
        self.max_batch = max_batch
        self.max_seq_len = max_seq_len
        self.invariant = invariant
        self.logprobs_of = logprobs_of
        table_blocks = -(-max_seq_len // cache.S)
        self.batch = DecodeBatch(max_batch, table_blocks, model.device)
        self.penalties: Penalties | None = None
        self.masks: TokenMasks | None = None
        self.logits: Any = None  # of the first part of a step
        # What the batch on the device contains: its sequences, their slots, and the arguments of
        # `decode`.
        self.batch_requests: list[Request] = []
        self.batch_slots: list[int] = []
        self.batch_variant = (0, False, False, False)
        self.in_flight: collections.deque[TokensInFlight | ScoresInFlight] = collections.deque()
        self.newest = 0  # how many of them belong to the newest step, and stay in flight
        self.verifier: Any = None  # of drafts (verifying.py); None: there are none
        self.drafter: Any = None  # by heads on this model (draft_heads.py)
        self.hidden: Any = None  # (max_batch, C): its outputs of each slot's newest token
        self.ids_are_on_device = True  # else only the host knows what a verifying step has drawn
        self.graphed: Callable[..., Any] | None = None
        # The tokens of the last two steps of each slot, in host memory that the GPU writes: one is
        # read while the other is computed. The second name is the same memory as kernels see it.
        self.device_to_host_ids: Any = None
        self.device_to_host_ids_gpu: Any = None
        on_gpu = model.device == "gpu"
        if on_gpu:
            ids = mapped_array((2, max_batch), np.int32)
            self.device_to_host_ids, self.device_to_host_ids_gpu = ids
        if on_gpu and graph:
            self.graphed = Graphed(lambda part, *arguments: part(*arguments))

    @property
    def run_ahead(self) -> bool:
        """Return True if the newest step stays in flight until the next one is launched.

        Elsewhere than on a GPU a step has ended when its launch returns.
        """
        return self.model.device == "gpu"

    def launch(self, work: Work) -> None:
        """Start a step. Its results arrive later."""
        before = len(self.in_flight)
        with self.mode():
            self.model.arena.refresh()
            for copy in work.copies:
                self.cache.copy_blocks(copy.targets, copy.sources, copy.n_tokens)
            for request in work.grown:
                self.batch.write_blocks(request)
            # decoding before prefill, which puts first tokens into slots that are idle here
            if work.decoding and not work.drafts:
                self.launch_decoding(work.decoding, work.grown)
            else:
                # a preempted sequence may come back alone, in another place
                self.batch_requests = []
            if work.drafts:
                self.in_flight.append(self.verifier.launch(work.decoding, work.drafts))
                self.ids_are_on_device = False
            if work.prefill is not None:
                self._launch_prefill(work.prefill)
        self.newest = len(self.in_flight) - before
        if work.drafts:  # the next step must know how many were accepted
            self.newest = 0

    def arrived(self, everything: bool = False) -> Iterator[Arrived]:
        """Wait for what has been launched, and return it in order, but not the newest step if that
        runs ahead."""
        kept = 0
        if self.run_ahead and not everything:
            kept = self.newest
        while len(self.in_flight) > kept:
            new = self.in_flight[0].wait()
            self.in_flight.popleft()
            yield new

    def forget(self) -> None:
        """Forget what has been launched, and what the batch on the device contains."""
        self.in_flight.clear()
        self.batch_requests = []

    def use_adapters(self, rows: Array) -> None:
        """Set the number of each row's adapter in the passes that follow (adapters.py). In a CUDA
        graph they are read at the address of `rows`."""
        if self.model.adapters is not None:
            self.model.adapters.rows = rows

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Inside, forward passes are those of an engine."""
        try:
            with inference(), batch_invariant(self.invariant):
                yield
        finally:
            if self.model.adapters is not None:  # passes of others are those of the model alone
                self.model.adapters.rows = None

    # ------------------------------------------------------------------------- decoding
    def decode(self, b: int, penalized: bool, scored: bool, masked: bool) -> tuple[Array, ...]:
        """Compute one token for each of the first b entries of the batch: the step that a CUDA
        graph records.

        penalized, scored, masked: does a request have penalties, does one ask for
        log-probabilities, does one have a constraint? Returns the log-probabilities.
        """
        (logits,) = self.decode_logits(b)
        return self.draw(logits, b, penalized, scored, masked)

    def decode_logits(self, b: int) -> tuple[Array]:
        """Compute the logits: the first part of `decode`, which does not need the masks."""
        batch = self.batch
        lengths_B = batch.first(b)["lengths"]
        sequences = self.cache.decode(lengths_B, batch.device_tables[:b], batch.edges[: b + 1])
        x_BC = self.model.hidden(batch.ids[:b], sequences)
        logits = self.model.logits(x_BC).data
        if self.hidden is not None:
            self.keep_rows(slice(b), x_BC.data)
        return (logits,)

    def keep_outputs(self) -> None:
        """From now on keep the model's outputs of each slot's newest token, in `hidden`."""
        shape = self.max_batch, self.model.config.dim
        dtype = self.model.branch_dtype or np.dtype(np.float32)
        self.hidden = zeros_on(self.model.device, shape, dtype)

    def keep_rows(self, slots: Any, x_NC: Array, rows: list[int] | None = None) -> None:
        """Copy these rows of x, all by default, to `hidden`, if outputs are kept. slots: a list or a
        slice."""
        if self.hidden is None:
            return
        values = x_NC.view(f"u{x_NC.dtype.itemsize}")  # CuPy's indexing may not have bf16
        if rows is not None:
            values = values[rows]
        self.hidden.view(values.dtype)[slots] = values

    def draw_decoded(self, *variant: Any) -> tuple[Array, ...]:
        """Draw from self.logits, which decode_logits has computed: the second part of `decode`. In
        a CUDA graph they have the address of its output."""
        return self.draw(self.logits, *variant)

    def draw(
        self, logits: Array, b: int, penalized: bool, scored: bool, masked: bool
    ) -> tuple[Array, ...]:
        """Draw the tokens of the first b entries of the batch. Others as in `decode`."""
        columns = self.batch.first(b)
        ids_B = self.batch.ids[:b]
        lengths_B = columns["lengths"]
        logprobs = self.sample(logits, ids_B, columns, penalized, scored, masked)
        advance(lengths_B, columns["step"], lengths_B, ids_B, self.device_to_host_ids_gpu)
        return logprobs

    def run_part(self, part: Callable[..., tuple[Array, ...]], *variant: Any) -> tuple[Array, ...]:
        """Run a part of a step, as a CUDA graph if there is one."""
        if self.graphed is None:
            return part(*variant)
        return self.graphed(variant=(part, *variant))

    def launch_decoding(self, requests: list[Request], grown: list[Request]) -> None:
        batch = self.batch
        if self.batch_requests != requests:
            self._write_batch(requests)
        elif grown:
            batch.upload_tables()
        self.use_adapters(batch.device["adapter"])
        variant = self.batch_variant
        *_, masked = variant
        if not masked:
            logprobs = self.run_part(self.decode, *variant)
        else:
            (self.logits,) = self.run_part(self.decode_logits, variant[0])
            self.write_masks(requests)
            logprobs = self.run_part(self.draw_decoded, *variant)
        size = graph_size(variant[0], self.max_batch)
        self._put_in_flight(requests, self.batch_slots, logprobs, self.batch_slots, size)

    def _write_batch(self, requests: list[Request]) -> None:
        """Make these sequences the batch on the device."""
        slots = [r.slot for r in requests]
        self.batch.mark_idle_except(slots)
        # The counters of the requests are those after this step.
        lengths = [r.cached_tokens - 1 for r in requests]
        self.batch.write_counters(slots, lengths, _token_numbers(requests))
        self.batch.upload()
        new = [r for r in requests if r.in_flight == 1]  # only by this step
        if new and not self.ids_are_on_device:
            last = np.array([r.completion[-1] for r in new], np.int32)
            self.batch.ids[[r.slot for r in new]] = to_device(last, self.model.device)
            self.ids_are_on_device = True
        size = max(slots) + 1
        if self.model.device == "gpu":  # the same bits with a graph and without
            size = graph_size(size, self.max_batch)
        self.batch_variant = (size, *extras_of(requests))
        self.batch_slots = slots
        self.batch_requests = requests

    def compact(self, moved: list[tuple[Request, int]]) -> None:
        """Move sequences to other slots: (request, earlier slot) of the first slots. No token is in
        flight."""
        old_slots = [slot for _, slot in moved]
        self.batch.ids[: len(moved)] = self.batch.ids[old_slots]
        self.keep_rows(slice(len(moved)), self.hidden, old_slots)
        for request, old_slot in moved:
            if request.slot != old_slot:
                self._write_penalties(request)
        decoding = [request for request, _ in moved if request.state is State.DECODING]
        if decoding:
            self.batch.write(decoding)
        self.batch_requests = []

    # ------------------------------------------------------------------------- prefill
    def _launch_prefill(self, prefill: Prefill) -> None:
        chunks = prefill.chunks
        requests = [chunk.request for chunk in chunks]
        rows = PrefillRows(
            [token for chunk in chunks for token in chunk.tokens],
            [len(chunk.tokens) for chunk in chunks],
            [chunk.start for chunk in chunks],
            [request.blocks for request in requests],
            prefill.rows or [0],
            [request.adapter for request in requests],
        )
        x_WC = self.prefill(rows, len(requests[0].prompt), bool(prefill.scored))
        if prefill.copy is not None:
            copy = prefill.copy
            self.cache.copy_blocks(copy.targets, copy.sources, copy.n_tokens)
        n_drawing = len(prefill.drawing)
        if prefill.drawing:
            logits = self.model.logits(Tensor(x_WC[:n_drawing])).data
            self.keep_rows([request.slot for request in prefill.drawing], x_WC[:n_drawing])
            self.draw_first_tokens(prefill.drawing, logits)
        if prefill.scored:
            self._score(prefill.scored, x_WC[n_drawing:])

    def prefill(self, rows: PrefillRows, prompt_length: int = 0, scored: bool = False) -> Array:
        """Launch the forward pass of a prefill. Return hidden (W, C), first the wanted rows.

        prompt_length: of the whole prompt, if it is the only one. scored: do requests ask for the
        log-probabilities of the prompt's tokens?
        """
        cache = self.cache
        if self.has_rounded_sizes(rows, prompt_length, scored):
            sizes = rows.rounded_sizes(cache.S)
            packed = to_device(rows.pack(sizes), self.model.device)
            if self.graphed is not None:
                return self.graphed(packed, variant=(self.prefill_pass, sizes))[0]
        else:
            sizes = rows.sizes(cache.S, cache.kind != "full")
            packed = to_device(rows.pack(sizes), self.model.device)
        return self.prefill_pass(sizes, packed, prompt_length)[0]

    def has_rounded_sizes(self, rows: PrefillRows, prompt_length: int, scored: bool) -> bool:
        """Return True if a GPU can capture the pass: no codes in the cache, no wanted rows beyond
        one of each sequence, no RoPE angles of the prompt's own."""
        if self.model.device == "cpu" or self.cache.kind != "full" or scored:
            return False
        longest = self.cache.trained_length
        usual = longest is None or prompt_length <= longest
        return usual and len(rows.lengths) <= MOST_SEQUENCES

    def prefill_pass(self, sizes: PassSizes, packed: Array, prompt_length: int = 0) -> tuple[Array]:
        """Compute hidden (W, C) of the wanted rows: what a CUDA graph records."""
        rows = unpack(packed, sizes)
        self.use_adapters(rows.adapters_N)
        sequences = self.cache.prefill(rows, sizes.T, prompt_length)
        return (self.model.hidden(rows.ids_N, sequences).data,)

    def draw_first_tokens(self, requests: list[Request], logits: Array) -> None:
        """Sample a token for each request, row by row of logits, and put it where the decoding step
        reads it."""
        batch = self.batch
        slots = [r.slot for r in requests]
        batch.write(requests)
        lengths = [r.cached_tokens for r in requests]
        batch.write_counters(slots, lengths, _token_numbers(requests))
        for request in requests:
            self._write_penalties(request)
        ids = to_device(np.zeros(len(slots), np.int32), self.model.device)
        extras = extras_of(requests)
        self.write_masks(requests)
        logprobs = self.sample(logits, ids, batch.rows(slots), *extras)
        batch.ids[slots] = ids
        if self.device_to_host_ids_gpu is not None:
            self.device_to_host_ids_gpu[_host_rows(requests), slots] = ids
        self._put_in_flight(requests, slots, logprobs, list(range(len(requests))))

    def _score(self, chunks: list[ScoredChunk], x_WC: Array) -> None:
        """Launch the log-probabilities of the tokens that follow rows of x."""
        targets: list[int] = []
        n_top = 0
        for chunk in chunks:
            scores = chunk.request.scores
            if scores is not None:
                n = chunk.rows.stop - chunk.rows.start
                targets += scores.tokens[chunk.position + 1 :][:n]
                n_top = max(n_top, scores.n_top)
        targets_W = to_device(np.array(targets, np.int32), self.model.device)
        pieces = []
        step = LOGIT_ROWS[self.model.device]
        for low in range(0, len(targets), step):
            rows = slice(low, min(low + step, len(targets)))
            logits = self.model.logits(Tensor(x_WC[rows])).data
            arrays = token_logprobs(logits, targets_W[rows], n_top, self.model.config.vocab_size)
            pieces.append([to_host_later(x) for x in arrays])
        self.in_flight.append(ScoresInFlight(chunks, pieces, self.arrival()))

    # ------------------------------------------------------------------------- sampling
    def sample(
        self,
        logits: Array,
        ids_B: Array,
        batch: dict[str, Array],
        penalized: bool,
        scored: bool,
        masked: bool,
    ) -> tuple[Array, ...]:
        """Draw ids_B. Return what token_logprobs returns if `scored`, else nothing."""
        vocab = self.model.config.vocab_size
        if masked and self.masks is not None:
            mask_logits(logits, self.masks.device, batch["mask_slot"], vocab)
        slots_B = batch["penalty_slot"]
        of_model = logits
        if penalized and self.penalties is not None:
            if scored and self.logprobs_of == "model":
                of_model = logits.copy()
            apply_penalties(logits, self.penalties, slots_B, batch["step"], vocab)
        sample(
            logits,
            ids_B,
            batch["temperature"],
            batch["top_k"],
            batch["top_p"],
            batch["seed"],
            batch["random_stream"],
            batch["step"],
            vocab,
            min_p_B=batch["min_p"],
        )
        if penalized and self.penalties is not None:
            count_tokens(self.penalties, slots_B, ids_B)
        if not scored:
            return ()
        if self.logprobs_of == "sampled":
            temperature_B = batch["temperature"]
            rules = (temperature_B, batch["top_k"], batch["top_p"], batch["min_p"])
            masks = kept_tokens(logits, ids_B, *rules, vocab)
            sampled_logits(logits, temperature_B, masks, vocab)
        return token_logprobs(of_model, ids_B, MAX_TOP, vocab)

    def _write_penalties(self, request: Request) -> None:
        """Write the request's tokens so far to its slot of the penalties, if it has any. None of
        them may be in flight."""
        if not request.penalties.active:
            return
        if self.penalties is None:
            self.penalties = self.empty_penalties(self.max_seq_len + MAX_BIASES + MAX_ENDS)
        self.penalties.set_slot(request.slot, request.penalties, request.prompt, request.completion)

    def empty_penalties(self, tokens: int) -> Penalties:
        """Return lists for all slots, with room for so many tokens each."""
        vocab = self.model.config.vocab_size
        return Penalties.empty(self.batch.ids, self.max_batch, tokens, vocab)

    def write_masks(self, requests: list[Request]) -> None:
        """Make and upload the masks of those requests that are constrained. Waits for their tokens
        in flight."""
        constrained = {request for request in requests if request.constraint is not None}
        if not constrained:
            return
        for results in self.in_flight:
            if isinstance(results, TokensInFlight) and constrained.intersection(results.requests):
                results.wait_for_ids()
        if self.masks is None:
            self.masks = self._empty_masks()
        self.masks.write(list(constrained))

    def _empty_masks(self) -> TokenMasks:
        return TokenMasks(self.max_batch, self.model.config.vocab_size, self.model.device)

    # ------------------------------------------------------------------------- to the host
    def _put_in_flight(
        self,
        requests: list[Request],
        slots: list[int],
        logprobs: tuple[Array, ...],
        rows: list[int],
        size: int = 0,
    ) -> None:
        copies = [
            to_host_later(x) for x in logprobs
        ]  # before the event that wait_for_ids waits for
        wait_for_ids = self.read_ids_later(requests, slots)
        if self.masks is not None:  # there has been a constraint
            wait_for_ids = accepting(requests, wait_for_ids)
        self.in_flight.append(TokensInFlight(requests, wait_for_ids, copies, rows, size))

    def read_ids_later(self, requests: list[Request], slots: list[int]) -> Callable[[], list[int]]:
        """Return a function that waits for the ids of the step just launched and returns them, one
        per request."""
        if self.model.device != "gpu":
            ids = to_numpy(self.batch.ids)[slots].tolist()
            return lambda: ids
        rows = _host_rows(requests)
        wait = self.arrival()

        def wait_for_ids() -> list[int]:
            wait()
            return self.device_to_host_ids[rows, slots].tolist()

        return wait_for_ids

    def arrival(self) -> Callable[[], None]:
        """Return a function that waits for everything launched so far."""
        if self.model.device != "gpu":
            return lambda: None
        event = cupy().cuda.Event(disable_timing=True)
        event.record()
        return event.synchronize

    # ----------------------------------------------------------- compiling before the first request
    def every_shape(self, prefill_tokens: int) -> None:
        """Run a forward pass of each kind that a request may cause, for note_launches: the results
        mean nothing.

        Kernels are chosen by the number of rows, at most at powers of two, and up to 8 rows some
        are compiled for each number.
        """
        longest = min(prefill_tokens, self.max_batch * (self.max_seq_len - 1))
        longest = min(round_rows(longest), LARGEST_PASS)
        powers = [1 << i for i in range(3, longest.bit_length())]
        rows = {*range(1, 9), *powers, *(n + 1 for n in powers), longest}
        self.penalties = self.empty_penalties(1)
        self.masks = self._empty_masks()
        with self.mode():
            self.use_adapters(self.batch.device["adapter"])
            for size in self.batch_sizes():
                self.decode(size, True, True, True)
            for each in (self.verifier, self.drafter):
                if each is not None:
                    each.every_shape()
            for n in sorted(n for n in rows if n <= longest):
                self.prefill_shape(n)
        self.penalties = None
        self.masks = None

    def batch_sizes(self) -> list[int]:
        """Return the numbers of entries that a decoding step may have."""
        sizes = range(1, self.max_batch + 1)
        if self.model.device != "gpu":
            return list(sizes)
        return sorted({graph_size(b, self.max_batch) for b in sizes})

    def every_graph(self) -> None:
        """Capture the decoding steps of up to CAPTURED_AHEAD sequences without penalties,
        log-probabilities and constraints, if steps are captured. There must be no requests."""
        if self.graphed is None:
            return
        batch = self.batch
        batch.clear()
        batch.host["lengths"][0] = 0  # one sequence, which writes to the first block
        batch.host_tables[0, 0] = 0
        self.use_adapters(batch.device["adapter"])
        with self.mode():
            for size in reversed(self.batch_sizes()):  # the others fit in the memory of the largest
                if size <= CAPTURED_AHEAD:
                    batch.upload()
                    for _ in range(EAGER_CALLS + 1):
                        self.run_part(self.decode, size, False, False, False)
        batch.clear()

    def prefill_shape(self, n: int) -> None:
        """Prefill n tokens in as many sequences as possible, each of which gets a token."""
        A = min(n, self.max_batch)
        lengths = [len(x) for x in np.array_split(np.zeros(n), A)]
        tables = [[0] * -(-max(lengths) // self.cache.S)] * A
        last = (np.cumsum(lengths) - 1).tolist()
        rows = PrefillRows([0] * n, lengths, [0] * A, tables, last, [0] * A)
        x_WC = self.prefill(rows, scored=True)  # with rounded sizes there are fewer kernels
        logits = self.model.logits(Tensor(x_WC)).data
        ids = to_device(np.zeros(A, np.int32), self.model.device)
        self.sample(logits, ids, self.batch.rows(list(range(A))), True, True, True)


def extras_of(requests: list[Request]) -> tuple[bool, bool, bool]:
    """Return whether a request has penalties or a bias, whether one asks for log-probabilities, and
    whether one has a constraint."""
    penalized = any([request.penalties.active for request in requests])
    scored = any([request.logprobs is not None for request in requests])
    masked = any([request.constraint is not None for request in requests])
    return penalized, scored, masked


def _token_numbers(requests: list[Request]) -> list[int]:
    """Return the number of each request's newest launched token among the tokens of its answer."""
    return [len(r.completion) + r.in_flight - 1 for r in requests]


def _host_rows(requests: list[Request]) -> list[int]:
    """Return the row of device_to_host_ids in which each request's newest token arrives, as
    `advance` writes it."""
    return [(len(r.completion) + r.in_flight - 1) % 2 for r in requests]
