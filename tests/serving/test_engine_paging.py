"""Any stream of requests through a cache of a few blocks: shared, preempted, prefilled in pieces, cancelled.

A sequence that completes has the tokens of its solitary run, and at the end no block, slot or request is left over. The same
through transformers: every token equal.
"""

import functools

import pytest
from checks import rng
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_ahead import AheadEngine
from serving_state import check_nothing_is_used
from test_engine_transformers import CONFIGS, greedy
from twins import random_model, small, twin

from xtrain import Engine
from xtrain.serving.requests import make_requests

CONFIG = small(head_dim=4, n_layers=1, max_seq_len=64)
BLOCK, LONGEST, MAX_BATCH = 16, 48, 4
BLOCKS = 4  # one sequence may need three
# Prompts begin like one of these, so that blocks are shared, also in part.
STEMS = [rng(7, i).integers(0, CONFIG.vocab_size, LONGEST).tolist() for i in range(2)]

token = st.integers(0, CONFIG.vocab_size - 1)
prompt = st.builds(
    lambda stem, n, end: (STEMS[stem][:n] + end)[: LONGEST - 1],
    st.integers(0, 1),
    st.sampled_from([0, 3, 15, 16, 17, 24, 31, 32, 33, 40]),
    st.lists(token, min_size=1, max_size=6),
)
# (prompt, max_new_tokens, temperature, seed, repetition_penalty)
call = st.tuples(
    prompt, st.integers(1, 24), st.sampled_from([0.0, 0.0, 1.5]), st.integers(0, 2),
    st.sampled_from([1.0, 1.0, 1.5]),
)  # fmt: skip
event = st.one_of(
    st.tuples(st.just("submit"), st.lists(call, min_size=1, max_size=5)),
    st.tuples(st.just("submit"), st.lists(call, min_size=1, max_size=5)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


@functools.cache
def model():
    return random_model(CONFIG, device="cpu")


@functools.cache
def alone(prompt, max_new_tokens, temperature, seed, penalty):
    """-> (tokens, reason) of this request in an engine of its own, with room for all of it"""
    engine = Engine(model(), 1, LONGEST, batch_invariant=True, reuse_prefix=False)
    (answer,) = engine.generate(
        [list(prompt)], max_new_tokens, temperature, seed=[seed], repetition_penalty=penalty
    )
    return list(answer), answer.reason


def tiny(model, batch_invariant, blocks=BLOCKS, ahead=False, **options):
    """An engine whose cache has a few blocks, far fewer than its slots need."""
    probe = Engine(model, 1, LONGEST, block_tokens=BLOCK)
    one = probe.cache_bytes // (LONGEST // BLOCK)
    options = dict(prefill_tokens=7, block_tokens=BLOCK, cache_bytes=blocks * one) | options
    kind = AheadEngine if ahead else Engine
    engine = kind(model, MAX_BATCH, LONGEST, batch_invariant, **options)
    assert engine.scheduler.pool.size == blocks
    return engine


def play(engine, events):
    """-> [(call, Completion)] of all requests, after the engine has served them; and the numbers of those that were cancelled"""
    requests, sent, cancelled = [], [], set()
    for what, value in events:
        if what == "submit":
            prompts, lengths, temperatures, seeds, penalties = map(list, zip(*value))
            made = make_requests(
                prompts, CONFIG, LONGEST, (), seeds, max_new_tokens=lengths, temperature=temperatures,
                repetition_penalty=penalties,
            )  # fmt: skip
            engine.submit(*made)
            requests += made
            sent += zip(value, [request.completion for request in made])
        elif what == "step":
            for _ in range(value):
                engine.step()
        elif requests:
            cancelled.add(value % len(requests))
            engine.cancel(requests[value % len(requests)])
    for _ in range(60 * len(sent) + 2):  # more steps than tokens and pieces of prompts
        engine.step()
    return sent, cancelled


def check(events, batch_invariant, ahead):
    engine = tiny(model(), batch_invariant, ahead=ahead)
    sent, cancelled = play(engine, events)
    for i, (asked, completion) in enumerate(sent):
        tokens, why = alone(tuple(asked[0]), *asked[1:])
        assert completion.reason in (why, "cancelled") and completion.reason
        assert completion.reason == why or i in cancelled
        if batch_invariant:
            assert completion == tokens[: len(completion)], asked
        if completion.reason == why:
            assert len(completion) == len(tokens)
    check_nothing_is_used(engine)
    return engine, sent


MODES = dict(
    argnames="batch_invariant, ahead",
    argvalues=[(True, False), (True, True), (False, False), (False, True)],
    ids=["batch-invariant", "batch-invariant, ahead", "fast", "fast, ahead"],
)


@pytest.mark.parametrize(**MODES)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(event, min_size=2, max_size=14))
def test_any_stream_of_requests(batch_invariant, ahead, events):
    """Each answer is that of its request alone, in batch-invariant mode in every token."""
    check(events, batch_invariant, ahead)


@pytest.mark.parametrize(**MODES)
def test_a_stream_in_which_everything_happens(batch_invariant, ahead):
    """Sharing, also of part of a block, preemption, prompts in pieces, and cancelling at every stage."""
    draw, events = rng(2), []
    beginning = lambda: STEMS[draw.integers(2)][: draw.integers(12, 30)]
    for _ in range(12):
        calls = [(beginning() + [i], 20, 0.0, 0, 1.0 + 0.5 * (i == 2)) for i in range(3)]
        events += [("submit", calls), ("step", 9), ("cancel", int(draw.integers(30)))]
    engine, sent = check(events, batch_invariant, ahead)
    reasons = [completion.reason for _, completion in sent]
    assert reasons.count("cancelled") > 5 and reasons.count("length") > 15
    assert sum(step.prefilled == engine.sizes.prefill_tokens for step in engine.trace) > 20
    assert sum(len(step.preempted) for step in engine.trace) > 5
    assert engine.reused_tokens > 100


def test_the_only_sequence_is_preempted_and_comes_back():
    """The next batch has the same requests as the last one, but their blocks are others."""
    prompt = STEMS[0][: BLOCK - 2]
    (expected,) = Engine(model(), 2, LONGEST, block_tokens=BLOCK).generate([prompt], 12)
    engine = Engine(model(), 2, LONGEST, block_tokens=BLOCK)
    stream = engine.stream([prompt], 12)
    for _ in range(3):
        next(stream)
    pool = engine.scheduler.pool
    used = [pool.allocate() for _ in range(pool.available)]
    engine.step()
    assert engine.trace[-1].preempted == [0]
    pool.release(used)
    list(stream)
    assert stream.completions == [expected]


NAMES = ["llama", "qwen3", "qwen3, tied, one key head"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_token_is_that_of_transformers(name, batch_invariant):
    """Greedy, in a cache with room for one and a half of the eight sequences."""
    model = random_model(CONFIGS[name], device="cpu")
    theirs, vocab = twin(model), CONFIGS[name].vocab_size
    stem = rng(3).integers(0, vocab, 20).tolist()
    prompts = [stem[: 20 - i % 3] + rng(4, i).integers(0, vocab, 1 + i).tolist() for i in range(8)]
    engine = tiny(model, batch_invariant, blocks=4)
    answers = engine.generate(prompts, 20)
    for prompt, tokens in zip(prompts, answers):
        assert tokens == greedy(theirs, prompt, 20)[0]
    check_nothing_is_used(engine)
    assert sum(len(step.preempted) for step in engine.trace) > 0
    assert engine.reused_tokens > 0
    assert max(step.prefilled for step in engine.trace) <= 7
