"""Requests with the same prompt: it is computed once, and all of them begin together."""

import cProfile
import pstats
import sys
from pathlib import Path

import pytest
from observed import Observed, check, tight
from serving_state import check_nothing_is_used
from twins import random_model, small

from xtrain import Engine
from xtrain.serving.requests import make_requests

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

CONFIG = small(head_dim=4, n_layers=2, max_seq_len=64)
S = 16


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, device="cpu")


def prompt_of(n, seed=1):
    """n tokens"""
    return [(seed * 7 + 5 * i) % 60 for i in range(n)]


def alone(model, prompt, n, new):
    """-> n completions of a prompt, each computed by itself"""
    engine, found = Engine(model, 1, batch_invariant=True, reuse_prefix=False), []
    for i in range(n):
        (request,) = make_requests(
            [prompt], CONFIG, 64, (), [3], max_new_tokens=new, temperature=1.0
        )
        request.random_stream = i << 32
        engine._compute([request])
        found.append(request.completion)
    return found


@pytest.mark.parametrize("length", [1, 7, S - 1, S, S + 1, 2 * S, 2 * S + 9])
def test_a_prompt_is_computed_once_for_its_completions(model, length):
    """The completions begin in the step in which the prompt is complete, and have the tokens and the logits of each alone."""
    engine = Observed(model, 8, block_tokens=S)
    prompt = prompt_of(length)
    found = engine.generate([prompt], 20, temperature=1.0, seed=[3], n=5)
    assert found == alone(model, prompt, 5, 20)
    assert engine.prefilled_tokens == length and engine.reused_tokens == 4 * length
    assert [x.prefilled for x in found] == [length, 0, 0, 0, 0]
    assert [x.reused for x in found] == [0, *[length] * 4]
    first = engine.trace[0]
    assert [slot for _, slot in first.admitted] == [0, 1, 2, 3, 4]
    assert len(engine.trace) == 20
    check_nothing_is_used(engine)
    check(model, engine, [prompt] * 5, found)


def test_full_blocks_are_shared_and_the_last_one_is_not(model):
    engine, prompt = Engine(model, 4, block_tokens=S), prompt_of(2 * S + 3)
    engine.submit(*make_requests([prompt], CONFIG, 64, (), [3], max_new_tokens=9, n=3))
    engine.step()
    tables = [request.blocks for request in engine.scheduler.decoding]
    assert len({*map(tuple, (t[:2] for t in tables))}) == 1 and len({t[2] for t in tables}) == 3
    assert [engine.scheduler.pool.references[b] for b in tables[0]] == [3, 3, 1]


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_more_completions_than_slots(model, slots):
    """The slots go to one prompt after the other."""
    engine, prompts = Observed(model, slots, block_tokens=S), [prompt_of(20, i) for i in range(3)]
    found = engine.generate(prompts, [3, 9, 5], temperature=1.0, seed=[3, 3, 3], n=4)
    for i, new in enumerate((3, 9, 5)):
        assert found[4 * i : 4 * i + 4] == alone(model, prompts[i], 4, new)
    admitted = [x for step in engine.trace for x in sorted(request for request, _ in step.admitted)]
    assert admitted == sorted(admitted)
    assert max(len(step.decoded) for step in engine.trace) == slots
    check_nothing_is_used(engine)


@pytest.mark.parametrize("blocks", [4, 5, 6, 7, 9, 14])
def test_too_few_blocks_for_all_completions(model, blocks):
    """Some begin later, or are preempted, and have the same tokens."""
    engine, prompt = tight(model, blocks, S, 64, max_batch=6), prompt_of(2 * S + 9)
    found = engine.generate([prompt], 15, temperature=1.0, seed=[3], n=6)
    assert found == alone(model, prompt, 6, 15)
    check_nothing_is_used(engine)


def test_a_prompt_of_several_passes(model):
    """Slots stay free for the completions that wait for the prompt, and another request gets what is left."""
    engine = Engine(model, 4, block_tokens=S, prefill_tokens=10, batch_invariant=True)
    prompt, other = prompt_of(25), prompt_of(3, 2)
    found = engine.generate([prompt, other], 6, temperature=1.0, seed=[3, 3], n=3)
    assert found == alone(model, prompt, 3, 6) + alone(model, other, 3, 6)
    admitted = [[request for request, _ in step.admitted] for step in engine.trace]
    assert admitted[:3] == [[0, 3], [], [1, 2]], admitted[:4]


def test_cancelling_the_one_that_computes_the_prompt(model):
    engine = Engine(model, 4, block_tokens=S, prefill_tokens=10, batch_invariant=True)
    prompt = prompt_of(25)
    stream = engine.stream([prompt], 6, temperature=1.0, seed=[3], n=3)
    engine.submit(*stream.requests)
    engine.step()
    stream.cancel(0)
    while engine.scheduler.unfinished:
        engine.step()
    assert stream.completions[1:] == alone(model, prompt, 3, 6)[1:]
    assert stream.completions[0].reason == "cancelled" and stream.completions[0] == []
    assert engine.prefilled_tokens == 25  # what the first one had computed is not computed again
    check_nothing_is_used(engine)


def test_equal_prompts_of_several_calls_join(model):
    engine, prompt = Engine(model, 4, block_tokens=S, batch_invariant=True), prompt_of(20)
    requests = [
        make_requests([list(prompt)], CONFIG, 64, (), [seed], max_new_tokens=6, temperature=1.0)[0]
        for seed in (3, 4, 5)
    ]
    engine._compute(requests)
    assert engine.prefilled_tokens == 20 and len(engine.trace) == 6
    assert requests[0].completion == alone(model, prompt, 1, 6)[0]


def test_penalties_and_log_probabilities_of_each(model):
    options = dict(temperature=1.0, seed=[3], repetition_penalty=1.5, logprobs=2, logit_bias={5: 3})
    prompt = prompt_of(20)
    together = Engine(model, 4, batch_invariant=True).generate([prompt], 8, n=4, **options)
    apart = Engine(model, 1, batch_invariant=True, reuse_prefix=False)
    apart = apart.generate([prompt], 8, n=4, **options)
    assert together == apart and [x.logprobs for x in together] == [x.logprobs for x in apart]
    assert len({tuple(x) for x in together}) > 1


def test_new_weights_in_the_middle_of_a_prompt(model):
    """Keys of the old weights are not shared with requests that begin afterwards."""
    mine = random_model(CONFIG, device="cpu")
    engine = Engine(mine, 4, block_tokens=S, prefill_tokens=10, batch_invariant=True)
    prompt = prompt_of(25)
    requests = make_requests([prompt], CONFIG, 64, (), [3], max_new_tokens=6, n=2)
    engine.submit(*requests)
    engine.step()
    for _, p in mine.named_parameters():
        p.data = p.data[::-1].copy()
    while engine.scheduler.unfinished:
        engine.step()
    expected = Engine(mine, 1, batch_invariant=True).generate([prompt], 6)
    assert requests[1].completion == expected[0]


# ----------------------------------------------------------------------------- the host's work
@pytest.mark.parametrize("length", [7, 20, 150])
def test_python_calls_of_a_rollout(length):
    """512 completions of 64 prompts, with forward passes that cost nothing. The bounds are 1.3 times what was measured."""
    from host_work import rollouts

    work, engine = rollouts(length, 8)
    work()
    steps = engine.steps
    profile = cProfile.Profile()
    profile.enable()
    completions = work()
    profile.disable()
    assert len(completions) == 512 and engine.steps - steps <= 13
    calls = pstats.Stats(profile).total_calls
    assert calls < 512 * (210 if length > 64 else 175), calls
