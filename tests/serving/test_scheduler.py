"""The scheduler without a model: any stream of requests, and what it promises for every step.

`Device` stands for the runner. It keeps in each block what the forward passes would write there, one entry per token: all tokens
of the sequence up to it. So a block that is shared, copied or reused wrongly is found when it is read.
"""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_state import check_scheduler_is_empty

from xtrain import ModelConfig
from xtrain.serving.requests import State, make_requests, make_scoring_requests
from xtrain.serving.scheduler import Limits, Scheduler, graph_size
from xtrain.serving.work import NewScores, NewTokens

S, LONGEST, VOCAB = 16, 64, 50
CONFIG = ModelConfig(vocab_size=VOCAB, dim=8, n_layers=1, n_heads=1, max_seq_len=LONGEST)
STOP = 7
STEMS = [[(5 * i + 11 * stem) % VOCAB for i in range(LONGEST)] for stem in range(2)]


def next_token(request, number):
    """The token that the model would draw: it depends on the prompt and the seed, sometimes it is STOP or NaN (-1)."""
    draw = (sum(request.prompt) * 31 + request.seed * 17 + number * 7) % 61
    return -1 if draw == 60 else draw % VOCAB


class Device:
    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.blocks = collections.defaultdict(
            dict
        )  # block -> offset -> weights, tokens up to there
        self.tokens = {}  # request id -> its sequence, with the tokens in flight
        self.in_flight = collections.deque()
        self.copied = 0

    def write(self, request, tokens, start):
        for p in range(start, len(tokens)):
            entry = self.scheduler.current_weights(), tuple(tokens[: p + 1])
            self.blocks[request.blocks[p // S]][p % S] = entry

    def check(self, request, tokens, n):
        """The first n tokens are in the request's blocks, computed with no older weights than those of its admission."""
        for p in range(n):
            version, prefix = self.blocks[request.blocks[p // S]].get(p % S)
            assert prefix == tuple(tokens[: p + 1]), (request.request_id, p)
            assert version >= request.weights_version

    def copy(self, copy):
        for target, source in zip(copy.targets, copy.sources, strict=True):
            assert target != source
            self.copied += 1
            held = self.blocks[source]
            self.blocks[target] = {i: held[i] for i in range(copy.n_tokens) if i in held}

    def draw(self, requests):
        for request in requests:
            known = self.tokens.setdefault(request.request_id, list(request.tokens))
            number = len(request.completion) + request.in_flight - 1
            del known[len(request.prompt) + number :]  # it was preempted, or the step was lost
            known.append(next_token(request, number))
        ids = [self.tokens[r.request_id][-1] for r in requests]
        self.in_flight.append(NewTokens(list(requests), ids, itertools.repeat(None)))

    def launch(self, work):
        before = len(self.in_flight)
        for copy in work.copies:
            self.copy(copy)
        if work.decoding:
            for request in work.decoding:
                tokens = self.tokens[request.request_id]
                n = request.cached_tokens
                assert len(request.blocks) * S >= n == len(tokens)
                self.check(request, tokens, n - 1)
                self.write(request, tokens, n - 1)
            self.draw(work.decoding)
        if work.prefill is not None:
            self.prefill(work.prefill)
        self.newest = len(self.in_flight) - before

    def prefill(self, prefill):
        limits = self.scheduler.limits
        assert 0 < sum(len(chunk.tokens) for chunk in prefill.chunks) <= limits.prefill_tokens
        rows = []  # the tokens of the pass: (request, position)
        for chunk in prefill.chunks:
            request = chunk.request
            end = chunk.start + len(chunk.tokens)
            tokens = request.tokens[:end]
            assert chunk.tokens == tokens[chunk.start :] and chunk.tokens
            self.check(request, tokens, chunk.start)
            self.write(request, tokens, chunk.start)
            rows += [(request, p) for p in range(chunk.start, end)]
        if prefill.copy is not None:
            self.copy(prefill.copy)
        n_drawing = len(prefill.drawing)
        for request, row in zip(prefill.drawing, prefill.rows):
            computed, p = rows[row]
            assert p == request.length - 1 and computed.tokens == request.tokens
            self.check(request, request.tokens, request.length)
        if prefill.drawing:
            self.draw(prefill.drawing)
        if prefill.scored:
            scored = prefill.rows[n_drawing:]
            for chunk in prefill.scored:
                for i, row in enumerate(scored[chunk.rows]):
                    assert rows[row] == (chunk.request, chunk.position + i)
            n = len(scored)
            arrays = [np.zeros(n, np.float32), np.zeros((n, 0), int), np.zeros((n, 0), np.float32)]
            self.in_flight.append(NewScores(list(prefill.scored), arrays))

    def arrived(self, everything=False):
        kept = self.newest if self.scheduler.limits.run_ahead and not everything else 0
        while len(self.in_flight) > kept:
            yield self.in_flight.popleft()


class Play:
    """An engine of the scheduler and the Device."""

    def __init__(self, kind=Scheduler, **limits):
        self.version = 0
        sizes = dict(
            max_batch=3, max_seq_len=LONGEST, n_blocks=8, block_tokens=S, prefill_tokens=20
        )
        self.scheduler = kind(Limits(**sizes | limits), lambda: self.version)
        self.device = Device(self.scheduler)
        self.requests = []

    def submit(self, requests):
        self.scheduler.prepare(requests)
        self.scheduler.add(requests)
        self.requests += requests

    def step(self, fails=False):
        scheduler, device = self.scheduler, self.device
        scheduler.remove_cancelled()
        if not (scheduler.unfinished or device.in_flight):
            return False
        step = scheduler.begin_step()
        if scheduler.is_sparse():
            scheduler.take(device.arrived(everything=True))
            moved = scheduler.compact()
            assert [request.slot for request, _ in moved] == list(range(len(moved)))
        decoding, prefilling = bool(scheduler.decoding), bool(scheduler.prefilling)
        last_prefill = scheduler.last_prefill
        work = scheduler.next(step)
        if fails:
            device.in_flight.clear()
            scheduler.recover()
            return True
        if step.admitted and decoding and not prefilling:
            assert step.number - last_prefill >= scheduler.limits.prefill_interval
        device.launch(work)
        scheduler.take(device.arrived())
        self.check()
        return True

    def check(self):
        """Each slot and each block has the owners that the scheduler says, and each request is where its state says."""
        scheduler = self.scheduler
        lists = {
            State.WAITING: list(scheduler.waiting.values()),
            State.PREFILLING: scheduler.prefilling,
            State.DECODING: scheduler.decoding,
        }
        for state, requests in lists.items():
            assert all(request.state is state for request in requests)
        listed = [request.request_id for requests in lists.values() for request in requests]
        assert sorted(listed) == sorted(scheduler.unfinished)
        running = scheduler.prefilling + scheduler.decoding
        slots = [request.slot for request in running]
        everything = list(range(scheduler.limits.max_batch))
        assert sorted(slots + scheduler.free_slots) == everything, (
            "a slot is lost or has two owners"
        )
        users = collections.Counter(block for request in running for block in request.blocks)
        pool = scheduler.pool
        assert pool.references == [users[block] for block in range(pool.size)]
        assert sorted([*pool.free, *pool.cached, *users]) == list(range(pool.size))
        for request in scheduler.waiting.values():
            assert request.slot == -1 and not request.blocks

    def finish(self):
        """Step until all requests have ended, in at most a step for each token, several times over."""
        for _ in range(40 * sum(LONGEST for _ in self.requests) + 2):
            if not self.step():
                break
        assert all(r.completion.reason and r.state is State.ENDED for r in self.requests)
        check_scheduler_is_empty(self.scheduler)


def expected(request):
    """-> the tokens of a request that nothing disturbs, and why it ends"""
    tokens = []
    for number in range(request.room):
        token = next_token(request, number)
        if token < 0:
            return tokens, "nan"
        tokens.append(token)
        if token in request.stop:
            return tokens, "stop"
    return tokens, "length" if len(tokens) == request.max_new_tokens else "full"


# ----------------------------------------------------------------------------- any stream of requests
prompt = st.builds(
    lambda stem, n, end: (STEMS[stem][:n] + end)[: LONGEST - 1],
    st.integers(0, 1),
    st.sampled_from([0, 3, 15, 16, 17, 24, 31, 32, 33, 40]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
)
event = st.one_of(
    # prompts, max_new_tokens, seed, answers per prompt
    st.tuples(
        st.just("submit"),
        st.lists(prompt, min_size=1, max_size=3),
        st.integers(1, 24),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    st.tuples(st.just("score"), st.lists(prompt, min_size=1, max_size=3), st.integers(1, 6)),
    st.tuples(st.just("step"), st.sampled_from([1, 2, 5, 60])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("new weights")),
    st.tuples(st.just("failure")),
)
limits = st.fixed_dictionaries(
    dict(
        max_batch=st.sampled_from([1, 3, 4, 20]),
        n_blocks=st.sampled_from([4, 5, 7, 14, 60]),
        prefill_tokens=st.sampled_from([3, 7, 16, 100]),
        prefill_interval=st.sampled_from([1, 1, 3, 8]),
        reuse_prefix=st.sampled_from([True, True, False]),
        run_ahead=st.booleans(),
        trained_length=st.sampled_from([None, None, 30]),
        pass_flops=st.sampled_from([float("inf"), 50]),
        past_flops=st.sampled_from([0, 1]),
    )
)


def run(limits, events):
    """-> the Play of these events, after everything that must hold at the end has been checked"""
    play, cancelled = Play(**limits), set()
    for what, *values in events:
        if what == "submit":
            prompts, new, seed, n = values
            options = dict(max_new_tokens=new, n=n)
            play.submit(make_requests(prompts, CONFIG, LONGEST, [STOP], seed, **options))
        elif what == "score":
            prompts, n = values
            continuations = [[3] * min(n, LONGEST - len(p)) for p in prompts]
            play.submit(make_scoring_requests(prompts, continuations, CONFIG, LONGEST, 0))
        elif what == "step":
            for _ in range(values[0]):
                play.step()
        elif what == "cancel" and play.requests:
            request = play.requests[-1 - values[0] % len(play.requests)]
            cancelled.add(request.request_id)
            request.completion.end("cancelled")
        elif what == "new weights":
            play.version += 1
        elif what == "failure":
            play.step(fails=True)
    play.finish()
    for request in play.requests:
        reason = request.completion.reason
        if request.scores is not None:
            assert reason == ("scored" if request.scores.complete else "cancelled")
            continue
        tokens, why = expected(request)
        assert reason in (why, "cancelled") and (reason == why or request.request_id in cancelled)
        assert request.completion == tokens[: len(request.completion)]
        assert reason == "cancelled" or request.completion == tokens
    return play


@settings(max_examples=60, deadline=None)
@given(limits=limits, events=st.lists(event, min_size=2, max_size=16))
def test_any_stream_of_requests(limits, events):
    run(limits, events)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("n_blocks", [4, 5, 9, 30])
def test_a_stream_in_which_everything_happens(n_blocks, run_ahead):
    draw, events = np.random.default_rng(n_blocks), []
    pick = lambda *values: values[draw.integers(len(values))]
    beginning = lambda: STEMS[pick(0, 1)][: pick(0, 3, 15, 16, 17, 24, 31, 32, 33, 40)]
    for _ in range(40):
        prompts = [beginning() + [int(draw.integers(VOCAB))] for _ in range(pick(1, 2, 3))]
        events.append(("submit", prompts, pick(1, 9, 24), pick(0, 1), pick(1, 1, 2, 4)))
        events.append(("step", pick(1, 3, 9, 30)))
        if pick(0, 1):
            events.append(("cancel", pick(0, 1, 2, 5)))
        if pick(0, 0, 1):
            events.append(("score", [beginning() + [5, 6]], pick(1, 5)))
        events += pick([], [], [], [("new weights",)], [("failure",)])
    limits = dict(max_batch=4, n_blocks=n_blocks, prefill_tokens=pick(7, 20), run_ahead=run_ahead)
    play = run(limits, events)
    reasons = [request.completion.reason for request in play.requests]
    assert reasons.count("cancelled") > 1 and reasons.count("length") > 30
    assert play.scheduler.reused_tokens > 100 and play.device.copied > 3
    preempted = sum(len(step.preempted) for step in play.scheduler.trace)
    assert (preempted > 3) == (n_blocks < 9)


# ----------------------------------------------------------------------------- single promises
def requests_of(lengths, new=4, **options):
    prompts = [[i + 1] * n for i, n in enumerate(lengths)]
    return make_requests(prompts, CONFIG, LONGEST, (), 0, max_new_tokens=new, **options)


def admitted(play):
    return [request_id for step in play.scheduler.trace for request_id, _ in step.admitted]


def test_first_come_first_served():
    play = Play(max_batch=1)
    play.submit(requests_of([9, 2, 5]))
    play.finish()
    assert admitted(play) == [0, 1, 2]


class ShortestFirst(Scheduler):
    def waiting_in_order(self):
        return sorted(self.waiting.values(), key=lambda request: len(request.prompt))


def test_another_policy_is_another_order():
    play = Play(kind=ShortestFirst, max_batch=1)
    play.submit(requests_of([9, 2, 5]))
    play.finish()
    assert admitted(play) == [1, 2, 0]


def test_the_newest_sequence_is_preempted_and_resumes():
    play = Play(max_batch=2, n_blocks=4, reuse_prefix=False)
    requests = requests_of([30, 30], new=12)
    play.submit(requests)
    play.finish()
    preempted = [request_id for step in play.scheduler.trace for request_id in step.preempted]
    assert preempted and set(preempted) == {1}
    for request in requests:
        assert (request.completion, request.completion.reason) == expected(request)


def test_a_large_request_is_not_overtaken():
    """It waits for blocks, and small requests that come later wait behind it."""
    play = Play(max_batch=4, n_blocks=4)
    play.submit(requests_of([30, 60, 2], new=3))
    play.finish()
    assert list(dict.fromkeys(admitted(play))) == [0, 1, 2]


def test_equal_prompts_are_computed_once():
    play = Play(max_batch=4, n_blocks=20, prefill_tokens=100)
    play.submit(requests_of([40], new=3, n=4))
    play.step()
    (step,) = play.scheduler.trace
    assert step.prefilled == 40 and len(step.admitted) == 4
    tables = [request.blocks for request in play.scheduler.decoding]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    play.finish()


@pytest.mark.parametrize("what", ["waiting", "prefilling", "decoding"])
def test_cancelled_in_each_state(what):
    play = Play(max_batch=1)
    requests = requests_of([30, 3], new=6)
    play.submit(requests)
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 4}[what]):
        play.step()
    assert requests[0].state is State[what.upper()]
    requests[0].completion.end("cancelled")
    play.step()
    assert requests[0].state is State.ENDED
    play.finish()
    assert requests[1].completion.reason == "length"


def test_graph_sizes_cover_every_batch():
    for max_batch in (1, 3, 8, 12, 32):
        for b in range(1, max_batch + 1):
            assert b <= graph_size(b, max_batch) <= min(max_batch, max(2 * b, b + 7))
    assert len({graph_size(b, 32) for b in range(1, 33)}) == 7
