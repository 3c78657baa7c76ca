"""Engine.logprobs: against torch's log_softmax, in one batch with other requests, in chunks, after preemption and sharing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import small

from xtrain import Engine, Transformer, UserError
from xtrain.nn.autograd import inference
from xtrain.serving import scoring
from xtrain.serving.requests import make_requests

CONFIG = small(n_layers=2, vocab_size=97, max_seq_len=96)


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, 5, "cpu")


def exact(model, tokens):
    """-> log-probabilities (T - 1, V) in float64, from the logits of the training forward"""
    with inference():
        logits = model(np.array([tokens], np.int32)).data[0, :, : CONFIG.vocab_size]
    return torch.log_softmax(torch.tensor(np.asarray(logits, np.float64)), -1).numpy()[:-1]


def check(model, scores, prompt, continuation):
    tokens, first = list(prompt) + list(continuation), len(prompt)
    want = exact(model, tokens)[first - 1 :]
    assert scores.tokens == tokens and len(scores.logprobs) == len(continuation)
    assert scores.logprobs.dtype == np.float32
    rows = np.arange(len(want))
    np.testing.assert_allclose(scores.logprobs, want[rows, tokens[first:]], atol=1e-5)
    assert scores.total == pytest.approx(want[rows, tokens[first:]].sum(), abs=1e-4)
    for found, row in zip(scores.top, want):
        ids = [token for token, _ in found]
        np.testing.assert_allclose([x for _, x in found], np.sort(row)[::-1][: len(ids)], atol=1e-5)
        np.testing.assert_allclose(row[ids], [x for _, x in found], atol=1e-5)


def sequences(rng, n, longest=40):
    return [rng.integers(0, CONFIG.vocab_size, rng.integers(1, longest)).tolist() for _ in range(n)]


def test_continuations(model):
    rng = np.random.default_rng(1)
    prompts, continuations = sequences(rng, 7), sequences(rng, 7)
    engine = Engine(model, 3, 90)
    for top in (0, 4):
        found = engine.logprobs(prompts, continuations, top)
        for scores, *pair in zip(found, prompts, continuations):
            check(model, scores, *pair)
            assert all(len(x) == top for x in scores.top)
    assert (
        engine.scheduler.pool.available == engine.scheduler.pool.size
        and not engine.scheduler.unfinished
    )


def test_every_token_of_the_prompts(model):
    prompts = sequences(np.random.default_rng(2), 4)
    prompts = [p + [3] for p in prompts]
    for scores, prompt in zip(Engine(model, 2, 90).logprobs(prompts, top=1), prompts):
        check(model, scores, prompt[:1], prompt[1:])


def test_a_common_prompt_is_computed_once(model):
    rng = np.random.default_rng(3)
    prompt, continuations = rng.integers(0, 97, 50).tolist(), sequences(rng, 4, 20)
    engine = Engine(model, 4, 90, block_tokens=16)
    found = engine.logprobs([prompt] * 4, continuations)
    for scores, continuation in zip(found, continuations):
        check(model, scores, prompt, continuation)
    assert engine.reused_tokens >= 3 * 48
    # A second time, all is in the cache but the positions whose logits are wanted.
    before = engine.prefilled_tokens
    again = engine.logprobs([prompt] * 4, continuations)
    assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in zip(found, again))
    assert engine.prefilled_tokens - before <= 4 * 2 + sum(map(len, continuations))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_together_with_generation_in_a_tight_cache(model, data):
    """Chunks, preemption and sharing; the generated tokens are those of a run without scoring."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    options = dict(
        prefill_tokens=data.draw(st.sampled_from([16, 40])), block_tokens=16,
        cache_bytes=6 * 16 * bytes_per_token(), batch_invariant=data.draw(st.booleans()),
    )  # fmt: skip
    engine = Engine(model, 3, 90, **options)
    n = data.draw(st.integers(1, 4))
    prompts, continuations, others = sequences(rng, n), sequences(rng, n), sequences(rng, 2)
    stream = engine.stream(others, 20)
    engine.submit(*stream.requests)
    for _ in range(data.draw(st.integers(0, 5))):
        engine.step()
    for scores, *pair in zip(engine.logprobs(prompts, continuations, 2), prompts, continuations):
        check(model, scores, *pair)
    while engine.scheduler.unfinished:
        engine.step()
    alone = [Engine(model, 3, 90, **options).generate([p], 20)[0] for p in others]
    if options["batch_invariant"]:
        assert stream.completions == alone
    assert engine.scheduler.pool.available == engine.scheduler.pool.size


def bytes_per_token():
    c = CONFIG
    return 2 * c.n_layers * c.n_kv_heads * c.head_dim * 4


def test_few_rows_of_logits_at_a_time(model, monkeypatch):
    prompt, continuation = [1, 2, 3], list(range(30))
    want = Engine(model, 1, 90).logprobs([prompt], [continuation], 3)[0]
    monkeypatch.setitem(scoring.LOGIT_ROWS, "cpu", 7)
    got = Engine(model, 1, 90).logprobs([prompt], [continuation], 3)[0]
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    check(model, got, prompt, continuation)


def test_cancelled_and_interrupted(model, monkeypatch):
    engine = Engine(model, 2, 90, prefill_tokens=16)
    monkeypatch.setattr(engine.scheduler, "_take_scores", lambda new: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.logprobs([[1] * 40], [[2] * 20])
    monkeypatch.undo()
    check(model, engine.logprobs([[1] * 40], [[2] * 20])[0], [1] * 40, [2] * 20)
    assert (
        engine.scheduler.pool.available == engine.scheduler.pool.size
        and not engine.scheduler.unfinished
    )


def test_nan():
    broken = Transformer(CONFIG, 5, "cpu")
    dict(broken.named_parameters())["model.norm.weight"].data[:] = np.nan
    assert np.isnan(Engine(broken, 1, 90).logprobs([[1, 2]], [[3]])[0].logprobs).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([[1]],), "prompt 0 has one token, which nothing precedes: give at least two"),
        (([[1], []], [[1], [2]]), "prompt 1 is empty"),
        (([[1]], [[]]), "continuation 0 is empty"),
        (([[1]], [[97]]), "continuation 0 holds the token 97"),
        (([[1]], [[1], [2]]), "1 prompts and 2 continuations"),
        (([[1] * 60], [[1] * 32]), "sequence 0 has 92 tokens: give at most 91"),
        ((3,), "prompts must be a list of lists"),
        (([[1, 2]], None, 21), "top must be a whole number from 0 to 20"),
    ],
)
def test_bad_input(model, arguments, message):
    engine = Engine(model, 1, 90)
    with pytest.raises(UserError, match=message):
        engine.logprobs(*arguments)
    assert not engine.scheduler.unfinished
    # The last token is only predicted, so there may be one more than max_seq_len.
    check(model, engine.logprobs([[1] * 60], [[1] * 31])[0], [1] * 60, [1] * 31)


def test_the_engine_still_generates(model):
    engine = Engine(model, 2, 90)
    want = engine.generate([[5, 6, 7]], 8)
    engine.logprobs([[5, 6, 7]], [want[0]])
    assert engine.generate([[5, 6, 7]], 8) == want
    (request,) = make_requests([[1]], CONFIG, 90, (), 0, max_new_tokens=1)
    assert request.scores is None


def test_scores_are_those_of_generation(model):
    """What the engine reports while it draws is what it computes for the finished text."""
    engine = Engine(model, 2, 90)
    completions = engine.generate([[5, 6, 7], [8]], 9, temperature=1.0, logprobs=3)
    for scores, completion in zip(engine.logprobs([[5, 6, 7], [8]], completions, 3), completions):
        drawn = [chosen for chosen, _ in completion.logprobs]
        np.testing.assert_allclose(scores.logprobs, drawn, atol=1e-5)
        assert [[t for t, _ in x] for x in scores.top] == [
            [t for t, _ in x] for _, x in completion.logprobs
        ]
