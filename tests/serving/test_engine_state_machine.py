"""Any order of submit, step, cancel, streams, and requests of a second thread: every answer is that of its prompt alone.

Only the engine's public interface is used, so the test holds for any scheduling inside.
"""

import functools
import itertools
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)
from test_speculation import Drafting
from twins import random_model, small

from xtrain import Engine
from xtrain.serving.requests import make_requests

CONFIG = small(head_dim=4, n_layers=1, max_seq_len=16)
MAX_BATCH, LAST_TOKEN = 3, CONFIG.vocab_size - 1
STOP = range(0, LAST_TOKEN, 6)
SECONDS = 60  # until the second thread counts as blocked

prompt = st.lists(st.integers(0, LAST_TOKEN), min_size=1, max_size=7)
# (prompt, max_new_tokens, temperature, seed, frequency_penalty)
calls = st.lists(
    st.tuples(
        prompt, st.integers(1, 12), st.sampled_from([0.0, 1.5]), st.integers(0, 3), st.sampled_from([0.0, 1.0])
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@functools.cache
def model():
    return random_model(CONFIG, device="cpu")


def alone(call):
    """-> (the tokens of this request alone, why it ended)"""
    return _alone(tuple(call[0]), *call[1:])


@functools.cache
def _alone(prompt, max_new_tokens, temperature, seed, penalty):
    engine = Engine(model(), 1, batch_invariant=True)
    (answer,) = engine.generate(
        [prompt], max_new_tokens, temperature, seed=[seed], stop=STOP, frequency_penalty=penalty
    )
    return list(answer), answer.reason


def arguments(calls):
    """The arguments of Engine.generate and Engine.stream, as keywords"""
    prompts, lengths, temperatures, seeds, penalties = map(list, zip(*calls))
    return dict(
        prompts=prompts, max_new_tokens=lengths, temperature=temperatures, seed=seeds, stop=STOP,
        frequency_penalty=penalties,
    )  # fmt: skip


class OpenStream:
    """A stream, the position of its first request in `sent`, and the tokens that were read from it."""

    def __init__(self, stream, first):
        self.stream, self.first, self.started = stream, first, False
        self.seen = [[] for _ in stream.completions]


class EngineMachine(RuleBasedStateMachine):
    """sent: (call, Completion) of every request of this thread.  cancelled: positions in it.  reasons: seen so far."""

    requests, streams = Bundle("requests"), Bundle("streams")

    def __init__(self):
        super().__init__()
        self.sent, self.cancelled, self.reasons = [], set(), {}
        self.opened, self.threads, self.failed = [], [], []

    @initialize(most=st.sampled_from([0, 3]))
    def serve(self, most):
        options = dict(batch_invariant=True, prefill_tokens=5, speculate=most)
        self.served = Drafting(model(), MAX_BATCH, **options)

    # ------------------------------------------------------------------------- rules
    @rule(target=requests, calls=calls)
    def submit(self, calls):
        given = arguments(calls) | dict(config=CONFIG, max_seq_len=self.served.max_seq_len)
        made = make_requests(**given, top_k=None, top_p=1.0)
        for request in made:
            self.served.submit(request)
        first = len(self.sent)
        self.sent += zip(calls, [request.completion for request in made])
        return multiple(*[(first + i, request) for i, request in enumerate(made)])

    @rule(n=st.integers(1, 4))
    def step(self, n):
        for _ in range(n):
            ended = {id(completion) for _, completion in self.sent if completion.reason}
            for request, token in self.served.step():
                assert id(request.completion) not in ended, "a token after the end"
                assert token in request.completion

    @rule(request=requests)
    def cancel(self, request):
        i, request = request
        self.cancelled.add(i)
        self.served.cancel(request)

    @rule(target=streams, calls=calls)
    def open_stream(self, calls):
        self.opened.append(OpenStream(self.served.stream(**arguments(calls)), len(self.sent)))
        self.sent += zip(calls, self.opened[-1].stream.completions)
        return self.opened[-1]

    @rule(opened=streams, n=st.integers(1, 12))
    def read(self, opened, n):
        if opened.stream:
            self.read_up_to(opened, n)

    def read_up_to(self, opened, n):
        opened.started = True
        completions = opened.stream.completions
        for number, token in itertools.islice(opened.stream, n):
            n -= 1
            opened.seen[number].append(token)
        for i, (seen, completion) in enumerate(zip(opened.seen, completions)):
            assert seen == completion[: len(seen)]
            if n and opened.first + i not in self.cancelled:  # the stream has ended
                assert seen == completion and completion.reason

    @rule(opened=streams, number=st.integers(0, 3))
    def cancel_in_stream(self, opened, number):
        if opened.stream and number < len(opened.seen):
            self.cancelled.add(opened.first + number)
            opened.stream.cancel(number)

    @rule(opened=streams, forget=st.booleans())
    def close_stream(self, opened, forget):
        if opened.stream:
            self.cancelled |= {opened.first + i for i in range(len(opened.seen))}
            if not (forget and opened.started):  # deleting a stream that was read closes it
                opened.stream.close()
                assert next(opened.stream, None) is None
            opened.stream = None

    @rule(calls=calls)
    def generate(self, calls):
        answers = self.served.generate(**arguments(calls))
        assert [(list(answer), answer.reason) for answer in answers] == list(map(alone, calls))

    @rule(calls=calls)
    def generate_in_another_thread(self, calls):
        """It computes while this thread applies the following rules."""

        def run():
            try:
                self.generate(calls)
            except BaseException as error:
                self.failed.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    @rule()
    def wait_for_the_other_threads(self):
        while self.threads:
            self.threads[-1].join(SECONDS)
            assert not self.threads.pop().is_alive(), "a thread waits forever"
        if self.failed:
            raise self.failed.pop()

    # ------------------------------------------------------------------------- invariants
    @invariant()
    def every_answer_is_that_of_its_prompt_alone(self):
        for i, (call, completion) in enumerate(self.sent):
            reason, got = completion.reason, list(completion)  # in the order that a reader needs
            tokens, why = alone(call)
            assert got == tokens[: len(got)], (call, got, tokens)
            assert reason in (None, why) or (reason == "cancelled" and i in self.cancelled), call
            assert reason or i not in self.cancelled, "a cancelled request has no reason"
            assert reason != why or got == tokens, (call, got, tokens)
            assert self.reasons.setdefault(i, reason) in (None, reason), "a reason has changed"
            self.reasons[i] = reason

    def teardown(self):
        """Complete what is unfinished. No request is lost, none ends twice, and all slots are free."""
        for opened in self.opened:
            if opened.stream:
                self.read_up_to(opened, 10**9)
        self.wait_for_the_other_threads()
        for _ in range(12 * len(self.sent) + 12):  # more steps than tokens
            self.served.step()
        self.every_answer_is_that_of_its_prompt_alone()
        assert all(completion.reason for _, completion in self.sent), "a request was lost"
        trace = list(self.served.trace)
        admitted = [entry[0] for step in trace for entry in step.admitted]
        ended = [request_id for step in trace for request_id, _ in step.ended]
        assert len(set(admitted)) == len(admitted), "a request was admitted twice"
        assert sorted(ended) == sorted(admitted), "an admitted request ended twice, or never"
        self.served.generate([[1]] * MAX_BATCH, 2)
        first = next(step for step in self.served.trace if step.number == len(trace))
        assert len(first.admitted) == MAX_BATCH, "a slot was lost"


pytestmark = pytest.mark.usefixtures("switch_often")


EngineMachine.TestCase.settings = settings(
    max_examples=16, stateful_step_count=25, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestEngine = EngineMachine.TestCase
