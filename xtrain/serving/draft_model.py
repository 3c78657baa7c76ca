"""A smaller model that drafts tokens for speculative decoding (speculation.py).

Its KV cache has the blocks of the large model's: position p of a sequence is in the same block, at
the same offset. So blocks are allocated once for both, and rejected drafts are rolled back by
position. It is filled when a sequence drafts: with all of its tokens at first, later with those that
have come since. Blocks that sequences share are written by each of them, with the same keys.

    known            ... x y z            z: the last token of the sequence, at position L - 1
    in the cache     ... x                or ... x y: all but one or two, after a step that drafted
    computed         y z -> d1            one pass, a CUDA graph
                     d1 -> d2  d2 -> d3   a decoding step each, for all sequences

It draws by the sequence's own rules and random numbers: the more alike the two distributions are,
the more often both draw the same token.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from ..device import to_device
from .in_flight import to_host_later
from .paged_cache import PagedCache
from .prefill_rows import PrefillRows
from .requests import Request
from .runner import Runner
from .speculation import Rate, Timing, count_accepted
from .verifying import Row, Verifier
from .work import graph_size

PRIOR = 0.8  # acceptance of a token before it is known: so high that drafting is tried
AT_ONCE = 2  # tokens of a sequence in the first pass; more are prefilled before it


@dataclass
class Drafted:
    """What the draft model has of a sequence.

    blocks: in which its keys are; another list: they are lost.
    valid: of how many first tokens of the sequence.
    start: tokens of the answer when it drafted last.
    draft: what it drafted then; the keys of all but the last are in the cache, too.
    rate: how often a drafted token was accepted.
    """

    blocks: list[int]
    valid: int = 0
    start: int = 0
    draft: list[int] = field(default_factory=list)
    rate: Rate = field(default_factory=lambda: Rate(PRIOR))


class DraftModel:
    """Drafts with the model of a cache, which has as many blocks as that of `runner`.

    prefill_tokens: in one forward pass, at most.
    """

    def __init__(self, cache: PagedCache, runner: Runner, prefill_tokens: int):
        self.model = cache.model
        self.cache = cache
        sizes = runner.max_batch, runner.max_seq_len
        self.runner = Runner(self.model, cache, *sizes, graph=runner.graphed is not None)
        self.verifier = Verifier(self.runner, AT_ONCE - 1)
        self.runner.verifier = self.verifier
        self.prefill_tokens = prefill_tokens
        self.size = 0  # of the decoding steps
        self.timing = Timing()

    def seconds(self, n: int) -> float:
        """Return the time of n drafted tokens of all sequences, one after the other."""
        return n * (self.timing.seconds or 0.0)

    def prepare(self, requests: list[Request]) -> None:
        pass

    def chances(self, request: Request, n: int) -> list[float]:
        rate = self._state(request).rate.value
        return [rate**i for i in range(1, n + 1)]

    def draft(self, requests: list[Request], lengths: list[int]) -> list[list[int]]:
        chosen = [request for request, n in zip(requests, lengths) if n]
        wanted = [n for n in lengths if n]
        start = time.perf_counter()
        with self.runner.mode():
            self.model.arena.refresh()
            filled = any([self._fill(request) for request in chosen])
            self.runner.batch.write(chosen)
            self.runner.batch.upload_tables()
            passes = [self._first(chosen)]
            for place in range(1, max(wanted)):
                passes.append(self._next(chosen, wanted, place))
            self.runner.arrival()()
        if not filled:
            self.timing.note((time.perf_counter() - start) / max(wanted))
        drafts: dict[Request, list[int]] = {request: [] for request in requests}
        for request, n in zip(chosen, wanted):
            for ids in passes[:n]:
                token = int(ids[request.slot])
                if token < 0:  # the logits are NaN
                    break
                drafts[request].append(token)
            self._note(request, drafts[request])
        return list(drafts.values())

    # ------------------------------------------------------------------------- the cache
    def _state(self, request: Request) -> Drafted:
        """Return what the cache has of a request, after the tokens that have arrived."""
        state = request.history
        if state is None or state.blocks is not request.blocks:
            before = state
            state = request.history = Drafted(request.blocks)
            if before is not None:
                state.rate = before.rate
        if state.draft and len(request.completion) > state.start:
            n = count_accepted(state.draft, request.completion[state.start :])
            for i in range(min(n + 1, len(state.draft))):
                state.rate.note(i < n)
            state.valid += min(n, len(state.draft) - 1)
            state.draft = []
        return state

    @staticmethod
    def _note(request: Request, draft: list[int]) -> None:
        state = request.history
        state.valid = request.length
        state.start = len(request.completion)
        state.draft = draft

    def _fill(self, request: Request) -> bool:
        """Prefill the tokens that are missing in the cache, up to the last one. Return False if the
        first pass can compute them."""
        state = self._state(request)
        if request.length - state.valid <= AT_ONCE:
            return False
        tokens = request.tokens[:-1]
        for low in range(state.valid, len(tokens), self.prefill_tokens):
            chunk = tokens[low : low + self.prefill_tokens]
            rows = PrefillRows(chunk, [len(chunk)], [low], [request.blocks], [0])
            self.runner.prefill(rows)
        state.valid = len(tokens)
        return True

    # ------------------------------------------------------------------------- tokens
    def _first(self, requests: list[Request]) -> np.ndarray:
        """Launch the pass that draws the first draft of each request. Return the ids of the slots,
        which arrive later."""
        rows = [Row(request, 0, request.completion[-1]) for request in requests]
        for request in requests:
            missing = range(self._state(request).valid - request.length + 1, 0)
            rows += [Row(request, place, request.tokens[place - 1]) for place in missing]
        logits = self.verifier.compute(rows)
        n = len(requests)
        ids = to_device(np.zeros(n, np.int32), self.model.device)
        self.runner.sample(logits[:n], ids, self.verifier.batch.first(n), False, False, False)
        self.runner.batch.ids[[request.slot for request in requests]] = ids
        return to_host_later(self.runner.batch.ids.copy())

    def _next(self, requests: list[Request], wanted: list[int], place: int) -> np.ndarray:
        """Launch a step that draws the draft after the one at this place. Return as _first.

        wanted: tokens that each request drafts.
        """
        batch = self.runner.batch
        if place == 1 or place in wanted:  # else the device has counted on
            active = [request for request, n in zip(requests, wanted) if n > place]
            slots = [request.slot for request in active]
            batch.mark_idle_except(slots)
            lengths = [request.length - 1 + place for request in active]
            batch.write_counters(slots, lengths, [len(r.completion) + place for r in active])
            batch.upload(tables=0)
            self.size = graph_size(max(slots) + 1, self.runner.max_batch)
        self.runner.run_part(self.runner.decode, self.size, False, False, False)
        return to_host_later(batch.ids.copy())
