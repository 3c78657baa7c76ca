"""What each step of the engine computes: integers and lists only, no arrays and no model.

    work = scheduler.next(step)    admit, choose what decodes and which prompt tokens are prefilled
    ...                            the runner computes it (runner.py)
    scheduler.take(arrived)        append the new tokens and end finished sequences

`next` notes everything in `work` as done: the blocks are allocated, and the counters of the
requests are those after the step. If the step fails, `recover` makes all unfinished requests wait
again with the tokens that they have.

`waiting_in_order` is the policy: the order in which waiting requests are admitted.
"""

import collections
import heapq
import math
import time
from collections.abc import Callable, Iterable

from .blocks import MIN_COPIED, ROOT, BlockPool, Prefix, block_key, block_keys
from .requests import Request, State, Step
from .speculation import Speculation, count_accepted
from .work import (
    Arrived,
    BlockCopy,
    Limits,
    NewScores,
    NewTokens,
    Prefill,
    PrefillChunk,
    VerifiedTokens,
    Work,
    graph_size,
)

TRACE_STEPS = 4096  # steps that the trace keeps


class Scheduler:
    """Gives slots and blocks to requests, step by step. One thread at a time uses it.

    weights_version: returns a number that changes when the weights do; keys and values of other
    weights are not shared.
    unfinished: all submitted requests that have not ended, by request_id.
    waiting, prefilling, decoding: the same requests by their state, in order.
    trace: what happened in the last steps.
    speculation: how many tokens sequences draft; None: none.
    """

    def __init__(
        self,
        limits: Limits,
        weights_version: Callable[[], int] = lambda: 0,
        speculation: Speculation | None = None,
    ):
        self.limits = limits
        self.speculation = speculation
        self.current_weights = weights_version
        self.weights_version = weights_version()  # at the last admission
        self.trace: collections.deque[Step] = collections.deque(maxlen=TRACE_STEPS)
        self.steps = 0
        self.submitted = 0
        self.last_prefill = -1  # number of the last step that had one
        self.prefilled_tokens = 0
        self.reused_tokens = 0
        self.decoded_tokens = 0
        self.preemptions = 0
        self.unfinished: dict[int, Request] = {}
        self.recover()

    def recover(self) -> None:
        """Begin again after an interrupted step: all requests wait, with the tokens that they have.
        What was launched is computed again."""
        self.pool = BlockPool(self.limits.n_blocks, self.limits.block_tokens)
        self.free_slots = list(range(self.limits.max_batch))  # a heap
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        requests = [request for _, request in sorted(self.unfinished.items())]
        self.waiting = {request.request_id: request for request in requests}
        for request in requests:
            request.state = State.WAITING
            request.slot = -1
            request.blocks = []
            request.published = 0
            request.cached_tokens = 0
            request.in_flight = 0
            request.start_constraint()
            if not request.completion:
                request.completion.prefilled = 0  # its prompt is computed again
        for request in requests:
            self._end_if_finished(request)

    # ------------------------------------------------------------------------- requests come and go
    def prepare(self, requests: Iterable[Request]) -> None:
        """Compute what `add` needs of the requests. It changes nothing else, so any thread may call
        it at any time."""
        keys_of: dict[tuple[int, int], list[bytes]] = {}  # by prompt and adapter
        for request in requests:
            room = self.limits.max_seq_len - len(request.prompt)
            request.room = min(request.max_new_tokens, room)
            prompt = (id(request.prompt), request.adapter)
            if prompt not in keys_of:
                keys_of[prompt] = self._keys(request)
            request.keys = keys_of[prompt]
            request.start_constraint()

    def add(self, requests: Iterable[Request]) -> None:
        """Append prepared requests to the waiting ones."""
        for request in requests:
            request.request_id = self.submitted
            self.submitted += 1
            request.submitted = time.perf_counter()
            self.unfinished[request.request_id] = request
            self.waiting[request.request_id] = request

    def remove_cancelled(self) -> None:
        """End the requests that were cancelled since the last step."""
        for request in [r for r in self.unfinished.values() if r.completion.reason]:
            self._end(request, "cancelled")

    def begin_step(self) -> Step:
        """Return the next entry of the trace."""
        step = Step(self.steps)
        self.trace.append(step)
        self.steps += 1
        return step

    def next(self, step: Step) -> Work:
        """Decide what a step computes."""
        work = Work()
        self._admit(step, work)
        self._choose_decoding(step, work)
        self._choose_prefill(step, work)
        return work

    def take(self, arrived: Iterable[Arrived]) -> list[tuple[Request, int]]:
        """Append what has been computed and end finished sequences. Return the (request, new token)
        pairs."""
        pairs: list[tuple[Request, int]] = []
        for new in arrived:
            if self.speculation is not None:
                self.speculation.note_arrival(new)
            if isinstance(new, NewScores):
                self._take_scores(new)
            elif isinstance(new, VerifiedTokens):
                self._take_verified(new, pairs)
            else:
                self._take_tokens(new, pairs)
        return pairs

    def _take_verified(self, new: VerifiedTokens, pairs: list[tuple[Request, int]]) -> None:
        """Append the accepted drafts of each request and the token after them."""
        rows = zip(new.requests, new.drafts, new.drawn, new.logprobs)
        for request, draft, drawn, logprobs in rows:
            n = count_accepted(draft, drawn)
            request.cached_tokens += n
            request.in_flight += n
            before = len(request.completion)
            self._take_tokens(NewTokens([request] * (n + 1), drawn, logprobs), pairs)
            if self.speculation is not None:  # fewer, if the sequence has ended
                self.speculation.accepted_tokens += min(n, len(request.completion) - before)

    def _take_tokens(self, new: NewTokens, pairs: list[tuple[Request, int]]) -> None:
        for request, token, logprobs in zip(new.requests, new.tokens, new.logprobs):
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
                # First, for readers in other threads. Ctrl-C may have come between these two
                # statements before.
                completion.logprobs[len(completion) :] = [logprobs]
            completion.append(token)
            pairs.append((request, token))
            complete = request.constraint is not None and request.constraint.ended
            if token in request.stop or len(completion) >= request.room or complete:
                self._end_if_finished(request)

    def _take_scores(self, new: NewScores) -> None:
        for chunk in new.chunks:
            request = chunk.request
            request.in_flight -= 1
            if request.completion.reason is None and request.scores is not None:
                request.scores.take(chunk.position, new.arrays, chunk.rows)
                self._end_if_finished(request)

    # ------------------------------------------------------------------------- admission
    def waiting_in_order(self) -> list[Request]:
        """Return the waiting requests in the order of their admission: first come, first served.

        Here a preempted request stands in front of the others. A request for which there are no
        blocks keeps those after it waiting, so that large ones get their turn. Another policy is
        a derived class with another order, such as by `(not request.completion,
        len(request.prompt))`, the shortest first, and an Engine with it as `scheduler_type`.
        """
        return list(self.waiting.values())

    def _admit(self, step: Step, work: Work) -> None:
        """Give waiting requests a slot and blocks."""
        version = self.current_weights()
        if self.weights_version != version:  # keys and values of other weights cannot be reused
            self.weights_version = version
            self.pool.forget_all()
        due = step.number - self.last_prefill >= self.limits.prefill_interval
        if not self.free_slots or (self.decoding and not (self.prefilling or due)):
            return
        # What the prefilling requests compute: a request that needs the same waits, and shares it.
        computed = {key for request in self.prefilling for key in request.keys}
        leaders = {request.keys[-1] for request in self.prefilling if _may_join(request)}
        reserved = 0  # slots, for the requests that will join a leader (_join)
        for request in self.waiting_in_order():
            if len(self.free_slots) <= reserved:
                break
            if request.must_wait:
                continue
            if request.completion:  # it was preempted
                request.keys = self._keys(request)
            joins = _may_join(request)
            if joins and request.keys[-1] in leaders:
                reserved += 1
                continue
            prefix = Prefix([])
            if request.keys:
                tokens = request.own_tokens(request.reusable)
                prefix = self.pool.find(tokens, request.keys)
                missing = len(tokens) - 1 - len(prefix.blocks) * self.pool.S
                if missing >= MIN_COPIED and request.keys[len(prefix.blocks)] in computed:
                    continue
            if not self._assign_blocks(request, prefix, work):
                break
            self._occupy_slot(request, step)
            request.state = State.PREFILLING
            self.prefilling.append(request)
            computed.update(request.keys)
            if joins:
                leaders.add(request.keys[-1])

    def _occupy_slot(self, request: Request, step: Step) -> None:
        del self.waiting[request.request_id]
        request.slot = heapq.heappop(self.free_slots)
        request.weights_version = self.weights_version
        step.admitted.append((request.request_id, request.slot))
        if not request.completion:  # else it was preempted
            request.completion.queue_seconds = time.perf_counter() - request.submitted
            request.completion.reused = request.cached_tokens
            self.reused_tokens += request.cached_tokens

    def has_own_angles(self, request: Request) -> bool:
        """Return True if the prompt has RoPE angles of its own: dynamic scaling, beyond the trained
        length."""
        longest = self.limits.trained_length
        return longest is not None and len(request.prompt) > longest

    def _keys(self, request: Request) -> list[bytes]:
        """Return the keys of the request's blocks; none if it does not share them."""
        if not self.limits.reuse_prefix or self.has_own_angles(request):
            return []
        return block_keys(request.own_tokens(request.tokens), self.limits.block_tokens)

    # ------------------------------------------------------------------------- blocks
    def _assign_blocks(self, request: Request, prefix: Prefix, work: Work) -> bool:
        """Share or allocate blocks for all tokens of the request. Return False if there are not
        enough.

        prefix: the blocks that hold its first tokens.
        """
        pool = self.pool
        n_blocks = -(-request.length // pool.S)
        # A block that begins with the next tokens is copied (copy on write), or taken over if that
        # loses nothing or there is no other way. If all this keeps too many blocks from being
        # evicted, less is shared.
        ways = (
            (prefix, prefix.whole),
            (prefix, True),
            (Prefix(prefix.blocks), False),
            (Prefix([]), False),
        )
        for way, take_over in ways:
            if take_over and not pool.can_take(way.partial):
                continue
            partial = [] if way.partial is None else [way.partial]
            shared = way.blocks + partial
            for block in shared:  # must not be evicted
                pool.share(block)
            n_new = n_blocks - len(way.blocks) - take_over
            if self._leaves_room(n_new):
                break
            pool.release(shared)
        else:
            return False
        own = [pool.allocate() for _ in range(n_new)]
        if take_over:
            own = partial + own
            pool.forget(partial[0])
        elif partial:
            work.copies.append(BlockCopy(own[:1], partial, way.n_partial))
            pool.release(partial)
        request.blocks = way.blocks + own
        request.published = len(way.blocks)
        request.cached_tokens = len(way.blocks) * pool.S + way.n_partial
        return True

    def _leaves_room(self, n_new: int) -> bool:
        """Return True if `n_new` blocks may be allocated: some stay for the sequences that grow,
        half a block for each."""
        left = self.pool.available - n_new
        if left < 0 or left >= (len(self.decoding) + 1) // 2:
            return left >= 0
        return left >= sum(map(self._blocks_to_come, self.decoding + self.prefilling))

    def _blocks_to_come(self, request: Request) -> int:
        """Return how many more blocks the request may need."""
        longest = min(len(request.prompt) + request.max_new_tokens, self.limits.max_seq_len)
        return -(-longest // self.pool.S) - len(request.blocks)

    def _publish(self, request: Request, last: bool = False) -> None:
        """Let other sequences find the request's full blocks; the last one too, if the prompt is
        complete, or if `last`: the request gives up its blocks."""
        if (
            not request.keys
            or request.weights_version != self.current_weights()
            or request.completion.reason == "nan"
        ):
            return
        tokens = request.own_tokens(request.tokens)
        S = self.pool.S
        valid = min(request.cached_tokens, len(tokens))
        while (i := request.published) * S < valid:
            previous = request.keys[i - 1] if i else ROOT
            piece = tokens[i * S : min((i + 1) * S, valid)]
            if len(piece) == S or last or valid == len(tokens):
                self.pool.publish(request.blocks[i], previous, piece)
            if len(piece) < S:
                break
            key = block_key(previous, piece)
            if request.keys[i : i + 1] != [key]:  # the sequence has grown since it was waiting
                request.keys = [*request.keys[:i], key]
            request.published += 1

    # ------------------------------------------------------------------------- decoding
    def _choose_decoding(self, step: Step, work: Work) -> None:
        """Choose the sequences that get another token, each with a block for it.

        If no block is left, the newest sequences are preempted.
        """
        for request in list(self.decoding):
            if step.preempted and request.state is not State.DECODING:
                continue  # preempted in this loop
            if len(request.completion) + request.in_flight >= request.room:
                continue  # its last token is in flight
            if request.cached_tokens == len(request.blocks) * self.pool.S:
                self._make_room(request, step)
                if request.state is not State.DECODING:
                    continue
                request.blocks.append(self.pool.allocate())
                work.grown.append(request)
            work.decoding.append(request)
        if step.preempted:
            self.preemptions += len(step.preempted)
            work.decoding = [r for r in work.decoding if r.state is State.DECODING]
            work.grown = [r for r in work.grown if r.state is State.DECODING]
        if self.speculation is not None and not any([r.in_flight for r in work.decoding]):
            self._draft(self.speculation, work)
        for request in work.decoding:
            request.cached_tokens += 1
            request.in_flight += 1
        step.decoded = [request.request_id for request in work.decoding]

    def wants_tokens(self) -> bool:
        """Return True if drafts pay that need the tokens in flight."""
        requests = self.decoding
        if self.speculation is None or not any([r.in_flight for r in requests]):
            return False
        return any(self.speculation.lengths(requests, self._plain_size(requests)))

    def _draft(self, speculation: Speculation, work: Work) -> None:
        """Draft tokens, as many as pay and as there are blocks for."""
        requests = work.decoding
        lengths = speculation.lengths(requests, self._plain_size(requests))
        for i, (request, n) in enumerate(zip(requests, lengths)):
            end = request.cached_tokens + 1 + n
            while end > len(request.blocks) * self.pool.S and self._leaves_room(1):
                request.blocks.append(self.pool.allocate())
                work.grown.append(request)
            lengths[i] = min(n, len(request.blocks) * self.pool.S - request.cached_tokens - 1)
        work.drafts = speculation.draft(requests, lengths)

    def _plain_size(self, requests: list[Request]) -> int:
        """Return the entries of a plain decoding step."""
        return graph_size(_last_slot(requests) + 1, self.limits.max_batch)

    def _make_room(self, request: Request, step: Step) -> None:
        """Preempt the newest sequences until a block is available; one of them may be the request
        itself."""
        while not self.pool.available and request.state is State.DECODING:
            newest = max(self.decoding + self.prefilling, key=lambda r: r.request_id)
            self._give_up_place(newest)
            newest.state = State.WAITING
            newest.cached_tokens = 0
            newest.published = 0
            self.waiting = {newest.request_id: newest, **self.waiting}
            step.preempted.append(newest.request_id)

    # ------------------------------------------------------------------------- prefill
    def _choose_prefill(self, step: Step, work: Work) -> None:
        """Choose the prompt tokens of one forward pass. Prompts that it completes get their first
        token."""
        chunks = self._next_chunks()
        if not chunks:
            return
        self.last_prefill = step.number
        work.prefill = prefill = Prefill(chunks)
        ends = []
        end = 0
        for chunk in chunks:
            end += len(chunk.tokens)
            ends.append(end)
        complete = [i for i, c in enumerate(chunks) if c.start + len(c.tokens) == c.request.length]
        leaders = [i for i in complete if chunks[i].request.scores is None]
        groups = self._join([chunks[i].request for i in leaders], step)
        for i, group in zip(leaders, groups):
            prefill.drawing += group
            prefill.rows += [ends[i] - 1] * len(group)
        for chunk, end in zip(chunks, ends):
            prefill.add_scored(chunk, end)
        for chunk in chunks:
            self._note_prefilled(chunk, step)
        prefill.copy = self._copy_of_last_blocks(groups)
        for request in prefill.drawing:
            request.in_flight += 1
        for i in complete:
            request = chunks[i].request
            self.prefilling.remove(request)
            request.state = State.DECODING
            self.decoding.append(request)

    def _next_chunks(self) -> list[PrefillChunk]:
        """Return the next tokens of the prefilling requests, as many as one pass may have."""
        chunks: list[PrefillChunk] = []
        limits = self.limits
        free = limits.prefill_tokens
        flops = limits.pass_flops if self.decoding else math.inf
        for request in self.prefilling:
            start = request.cached_tokens
            alone = self.has_own_angles(request)
            if alone and chunks:
                break
            token_flops = limits.token_flops + start * limits.past_flops
            affordable = int(min(flops / token_flops, request.length))
            n = min(request.length - start, free, max(limits.block_tokens, affordable))
            chunks.append(PrefillChunk(request, start, request.tokens[start : start + n]))
            free -= n
            flops -= n * token_flops
            if alone or free <= 0 or flops <= 0:
                break
        return chunks

    def _join(self, leaders: list[Request], step: Step) -> list[list[Request]]:
        """Admit waiting requests whose prompt the next pass completes for a leader. Return each
        leader with those.

        They get first tokens from the same logits. They share the leader's full blocks; its last
        block is copied if it is not full.
        """
        groups = [[leader] for leader in leaders]
        group_of = {
            leader.keys[-1]: group
            for leader, group in zip(leaders, groups)
            if _may_join(leader) and leader.weights_version == self.weights_version
        }
        if not group_of:
            return groups
        for request in self.waiting_in_order():
            if not self.free_slots:
                break
            if request.must_wait or not _may_join(request) or request.keys[-1] not in group_of:
                continue
            group = group_of[request.keys[-1]]
            n_full, tail_tokens = divmod(len(request.prompt), self.pool.S)
            if not self._leaves_room(tail_tokens > 0):
                break
            request.blocks = group[0].blocks[:n_full]
            for block in request.blocks:
                self.pool.share(block)
            if tail_tokens:
                request.blocks.append(self.pool.allocate())
            request.published = n_full
            request.cached_tokens = len(request.prompt)
            self._occupy_slot(request, step)
            request.state = State.DECODING
            self.decoding.append(request)
            group.append(request)
        return groups

    def _note_prefilled(self, chunk: PrefillChunk, step: Step) -> None:
        request = chunk.request
        n = len(chunk.tokens)
        request.cached_tokens += n
        if not request.completion:  # else it was preempted
            request.completion.prefilled += n
        self.prefilled_tokens += n
        step.prefilled += n
        self._publish(request)

    def _copy_of_last_blocks(self, groups: list[list[Request]]) -> BlockCopy | None:
        """Return the copy of each leader's partial last block to those that have joined it."""
        targets = []
        sources = []
        longest = 0
        for leader, *others in groups:
            tail_tokens = len(leader.prompt) % self.pool.S
            if others and tail_tokens:
                targets += [request.blocks[-1] for request in others]
                sources += [leader.blocks[-1]] * len(others)
                longest = max(longest, tail_tokens)
        if not targets:
            return None
        return BlockCopy(targets, sources, longest)

    # ------------------------------------------------------------------------- slots
    def is_sparse(self) -> bool:
        """Return True if the sequences should move to lower slots.

        With steps that run ahead, if the batch is less than half full; otherwise if a decoding
        sequence is not in the first slots.
        """
        if not self.limits.run_ahead:
            return _last_slot(self.decoding) >= len(self.decoding)
        requests = self.decoding + self.prefilling
        full = graph_size(max(len(requests), 1), self.limits.max_batch)
        return _last_slot(requests) + 1 > 2 * full

    def compact(self) -> list[tuple[Request, int]]:
        """Move the sequences to the first slots. Return the (request, earlier slot) pairs of the
        sequences in all slots.

        No token may be in flight: it arrives by the slot.
        """
        requests = sorted(self.decoding, key=lambda r: r.slot) + self.prefilling
        moved = [(request, request.slot) for request in requests]
        for slot, request in enumerate(requests):
            request.slot = slot
        self.free_slots = list(range(len(requests), self.limits.max_batch))
        return moved

    # ------------------------------------------------------------------------ the end of a sequence
    def _end_if_finished(self, request: Request) -> None:
        completion = request.completion
        if completion.reason:  # cancelled, or `_end` was interrupted
            self._end(request, completion.reason)
        elif request.scores is not None:
            if request.scores.complete:
                self._end(request, "scored")
        elif request.constraint is not None and request.constraint.ended:
            self._end(request, request.constraint.ended)
        elif completion and completion[-1] in request.stop:
            self._end(request, "stop")
        elif len(completion) == request.max_new_tokens:
            self._end(request, "length")
        elif request.length == self.limits.max_seq_len:
            self._end(request, "full")

    def _end(self, request: Request, reason: str) -> None:
        reason = request.completion.end(reason)
        if request.state is State.WAITING:
            del self.waiting[request.request_id]
        else:
            self._give_up_place(request)
        request.state = State.ENDED
        del self.unfinished[request.request_id]
        if request.weights_version is not None:  # else it was never admitted
            self.trace[-1].ended.append((request.request_id, reason))

    def _give_up_place(self, request: Request) -> None:
        """Free the request's slot and blocks. What the blocks hold can still be found."""
        self._publish(request, last=True)
        if request.state is State.PREFILLING:
            self.prefilling.remove(request)
        else:
            self.decoding.remove(request)
        self.pool.release(request.blocks)
        heapq.heappush(self.free_slots, request.slot)
        request.blocks = []
        request.slot = -1


def _may_join(request: Request) -> bool:
    """Return True if the request may share a prompt, computed once, with others that begin together
    with it."""
    return bool(request.keys) and not request.completion and request.scores is None


def _last_slot(requests: list[Request]) -> int:
    return max([request.slot for request in requests], default=-1)
