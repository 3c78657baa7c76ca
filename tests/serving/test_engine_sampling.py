"""The engine's penalties, bias, min-p and log-probabilities: transformers' processors and log_softmax of whole sequences."""

import numpy as np
import pytest
import torch
from checks import to_host
from flash_attention_cases import small_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_batching import way
from test_engine_simulator import PROMPTS as SIMULATED
from test_engine_simulator import pair
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from twins import random_model, small

from xtrain import Engine, UserError
from xtrain.kernels.decoding.sampling import sample_ref
from xtrain.serving import runner as runner_module

__all__ = ["way"]  # every test also as on a GPU
CONFIG = small(n_layers=1, head_dim=16, max_seq_len=48)
VOCAB = CONFIG.vocab_size
OFF = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None)
STRONG = dict(
    repetition_penalty=1.8,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias={5: 2.0, 60: -100.0},
)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def logits_of(model, tokens):
    """-> logits after the last token (V,), by the forward that trains the model, without a cache"""
    return to_host(model(np.array([tokens])).data)[0, -1, :VOCAB]


def processed(logits_V, prompt, answer, o):
    """transformers' processors, then OpenAI's formula."""
    ids, scores = torch.tensor([[*prompt, *answer]]), torch.tensor(logits_V)[None]
    if o["logit_bias"]:
        scores = SequenceBiasLogitsProcessor({(t,): x for t, x in o["logit_bias"].items()})(
            ids, scores
        )
    scores = RepetitionPenaltyLogitsProcessor(o["repetition_penalty"])(ids, scores)[0].numpy()
    counts = np.bincount(np.array(answer, int), minlength=VOCAB)
    scores = scores - o["frequency_penalty"] * counts - o["presence_penalty"] * (counts > 0)
    return scores.astype(np.float32)


def expected(model, prompt, new, temperature=0.0, seed=0, random_stream=0, min_p=0.0, **options):
    """-> the tokens, by whole forward passes, transformers' processors and the reference of sampling"""
    answer = []
    for step in range(new):
        logits_V = processed(logits_of(model, [*prompt, *answer]), prompt, answer, OFF | options)
        answer.append(sample_ref(logits_V, temperature, 0, 1.0, seed, random_stream, step, min_p))
    return answer


PROMPTS = [[1, 2, 3, 2], [7], [60, 5, 5, 9, 11], [4, 4], [30, 31]]
EACH = [
    STRONG,
    OFF,
    dict(OFF, repetition_penalty=0.4),
    dict(OFF, frequency_penalty=1.5),
    dict(OFF, logit_bias={9: 4.0}),
]


def columns(rows):
    """A list of dicts -> a dict of lists"""
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize(
    "memory",
    [dict(), dict(cache_blocks=4), dict(prefill_tokens=2)],
    ids=["", "preempted", "chunks"],
)
def test_penalties_through_preemption_and_compaction(model, memory, temperature):
    """Sequences of unequal length with and without penalties: slots are freed, moved and given to others."""
    blocks = memory.pop("cache_blocks", None)
    if blocks:  # of 16 tokens
        one = Engine(model, 1, 16, block_tokens=16)
        memory = dict(cache_bytes=blocks * one.cache_bytes)
    lengths = [14, 3, 20, 9, 17]
    served = Engine(model, 3, 32, block_tokens=16, **memory)
    answers = served.generate(PROMPTS, lengths, temperature, seed=3, **columns(EACH))
    for i, (prompt, n, options) in enumerate(zip(PROMPTS, lengths, EACH)):
        want = expected(model, prompt, n, temperature, 3, i, **options)
        assert answers[i] == want, (i, options)
        if options != OFF:
            assert want != expected(model, prompt, n, temperature, 3, i), (
                "the option changes nothing"
            )
    preempted = [request for step in served.trace for request in step.preempted]
    assert bool(preempted) == bool(blocks)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_minimum_and_allowed_tokens_through_preemption(model, temperature):
    """Stop tokens are not drawn before the minimum, others than the allowed ones never; next to sequences without."""
    blocks = 2 * Engine(model, 1, 16, block_tokens=16).cache_bytes
    served = Engine(model, 3, 32, block_tokens=16, cache_bytes=blocks)
    stop = set(range(0, VOCAB, 3))
    minimum, allowed = [14, 15, 0, 20, 18], [None, {5, 7, 9, 60}, None, {3, 4, 8}, None]
    options = dict(min_new_tokens=minimum, allowed_token_ids=allowed, frequency_penalty=0.3)
    answers = served.generate(
        PROMPTS, 20, temperature, seed=3, stop=stop, logprobs=[0] * 4 + [None], **options
    )
    preempted = sum(len(step.preempted) for step in served.trace)
    assert preempted == served.scheduler.preemptions > 0
    for i, (prompt, least, only) in enumerate(zip(PROMPTS, minimum, allowed)):
        want = []
        while len(want) < 20 and not (want and want[-1] in stop):
            logits_V = logits_of(model, [*prompt, *want])
            if i < 4:
                of_model = torch.log_softmax(torch.tensor(logits_V), 0)
                logprob = of_model[answers[i][len(want)]].item()
                assert answers[i].logprobs[len(want)][0] == pytest.approx(logprob, abs=2e-5)
            logits_V = processed(logits_V, prompt, want, OFF | dict(frequency_penalty=0.3))
            if len(want) < least:
                logits_V[sorted(stop)] = -np.inf
            if only:
                logits_V[sorted(set(range(VOCAB)) - only)] = -np.inf
            want.append(sample_ref(logits_V, temperature, 0, 1.0, 3, i, len(want)))
        assert answers[i] == want, i
    assert len(answers[0]) >= 15 and len(answers[3]) == 20 and set(answers[1]) <= allowed[1]
    assert 0 < len(answers[2]) < 20


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(min_new_tokens=-1), "min_new_tokens must be a whole number, 0 or more, got -1"),
        (dict(min_new_tokens=9), "min_new_tokens 9 is more than max_new_tokens 4"),
        (dict(allowed_token_ids={VOCAB}), f"allowed_token_ids holds the token {VOCAB}"),
        (dict(allowed_token_ids={"a"}), "allowed_token_ids must be a set of token ids, or None"),
        (dict(allowed_token_ids=set()), "allowed_token_ids is empty"),
        (dict(allowed_token_ids={1}, min_new_tokens=1, stop=[1]), "has only stop tokens"),
    ],
)
def test_an_invalid_minimum_or_set(model, options, message):
    with pytest.raises(UserError, match=message):
        Engine(model, 1).generate([[1]], 4, **options)


def test_a_slot_moves_while_its_sequence_has_penalties(model):
    """The first slots are freed early; the last sequence moves, with its counts."""
    served = Engine(model, 8)
    n, options = 24, dict(OFF, frequency_penalty=0.8, presence_penalty=0.3)
    prompts, lengths = [[i + 1] for i in range(8)], [2] * 7 + [n]
    slots = []
    stream = served.stream(prompts, lengths, **options)
    for _ in stream:
        slots += [r.slot for r in served.scheduler.decoding if r is stream.requests[7]]
    assert slots[0] == 7 and slots[-1] == 0
    assert stream.completions[7] == expected(model, [8], n, **options)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_requests_equal_their_solitary_run(model, data):
    """In batch-invariant mode: whatever else is served."""
    n = data.draw(st.integers(1, 6))
    number = st.sampled_from([0.0, 0.5, -0.5, 1.5])
    rows = [
        dict(
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.0, 0.7, 1.6])),
            presence_penalty=data.draw(number), frequency_penalty=data.draw(number),
            logit_bias=data.draw(st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=4)),
            min_p=data.draw(st.sampled_from([0.0, 0.1, 1.0])), temperature=data.draw(st.sampled_from([0.0, 1.0])),
            logprobs=data.draw(st.sampled_from([None, 0, 3])), max_new_tokens=data.draw(st.integers(1, 12)),
            seed=data.draw(st.integers(0, 9)),
        )
        for _ in range(n)
    ]  # fmt: skip
    prompts = data.draw(
        st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=n, max_size=n
        )
    )
    together = Engine(model, 3, 24, batch_invariant=True, prefill_tokens=5)
    for prompt, row, answer in zip(prompts, rows, together.generate(prompts, **columns(rows))):
        (alone,) = Engine(model, 1, 24, batch_invariant=True, prefill_tokens=5).generate(
            [prompt], **columns([row])
        )
        assert answer == alone and answer.logprobs == alone.logprobs


# ----------------------------------------------------------------------------- min-p
def test_min_p(model):
    prompt, temperature = [3, 1], 1.5
    for min_p in (0.05, 0.4, 1.0):
        served = Engine(model, 4).generate([prompt] * 30, 3, temperature, seed=1, min_p=min_p)
        logits = torch.tensor(logits_of(model, prompt))[None] / temperature
        kept = torch.isfinite(MinPLogitsWarper(min_p)(None, logits)[0]).nonzero().ravel().tolist()
        assert {answer[0] for answer in served} <= set(kept)
        for i in range(4):
            assert served[i] == expected(model, prompt, 3, temperature, 1, i, min_p)


# ----------------------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("options", [dict(), dict(temperature=1.3), dict(STRONG, temperature=0.8)])
def test_logprobs_are_log_softmax_of_the_model(model, options):
    """Before temperature, penalties and bias, for requests that ask; with preemption."""
    blocks = 3 * Engine(model, 1, 16, block_tokens=16).cache_bytes
    served = Engine(model, 3, 32, block_tokens=16, cache_bytes=blocks)
    wanted = [5, None, 0, 20, 1]
    answers = served.generate(PROMPTS, 16, seed=2, logprobs=wanted, **options)
    assert any(step.preempted for step in served.trace)
    for prompt, n, answer in zip(PROMPTS, wanted, answers):
        if n is None:
            assert answer.logprobs is None
            continue
        assert len(answer.logprobs) == len(answer)
        for i, (token, (logprob, top)) in enumerate(zip(answer, answer.logprobs)):
            logits = torch.tensor(logits_of(model, [*prompt, *answer[:i]]), dtype=torch.float64)
            want = torch.log_softmax(logits, 0)
            assert logprob == pytest.approx(want[token].item(), abs=2e-5)
            assert [x for _, x in top] == pytest.approx(want.topk(n)[0].tolist(), abs=2e-5)
            ids = [t for t, _ in top]  # nearly equal ones may change places
            assert [x for _, x in top] == pytest.approx(want[ids].tolist(), abs=2e-5)
            assert len(set(ids)) == n


def test_a_vocabulary_smaller_than_the_alternatives():
    tiny = random_model(small(n_layers=1, head_dim=16, vocab_size=5))
    (answer,) = Engine(tiny, 1).generate([[1]], 2, logprobs=20)
    for _, top in answer.logprobs:
        assert sorted(t for t, _ in top) == [0, 1, 2, 3, 4]
        assert sum(np.exp(x) for _, x in top) == pytest.approx(1, abs=1e-5)


def test_what_is_not_asked_for_is_not_computed(monkeypatch):
    model = random_model(CONFIG, device="cpu")  # for a GPU every kernel is compiled ahead

    def refuse(*_):
        raise AssertionError("not asked for")

    for name in ("token_logprobs", "apply_penalties", "count_tokens"):
        monkeypatch.setattr(runner_module, name, refuse)
    served = Engine(model, 2)
    served.generate([[1], [2]], 4, temperature=1.0, min_p=0.1)
    assert served.runner.penalties is None
    for option in (dict(logprobs=0), dict(presence_penalty=0.1)):
        with pytest.raises(AssertionError, match="not asked for"):
            served.generate([[1]], 2, **option)


# ----------------------------------------------------------------------------- the kernels
@small_tiles()
@pytest.mark.parametrize("way", ["ahead"], indirect=True)  # as on a GPU
def test_in_the_simulator(way):
    there, here = pair()
    bias = {3: 1.0, 20: -100.0}
    options = dict(
        max_new_tokens=[3, 2], temperature=[0.0, 1.0], min_p=0.05, seed=3, repetition_penalty=1.5
    )
    options |= dict(presence_penalty=[0.5, 0.0], logit_bias=[None, bias], logprobs=[None, 2])
    options |= dict(min_new_tokens=2, stop=range(9), allowed_token_ids=[None, set(range(2, 15))])
    simulated, want = (Engine(m, 2, 16).generate(SIMULATED, **options) for m in (there, here))
    assert simulated == want and simulated[0].logprobs is None
    for (a, top_a), (b, top_b) in zip(simulated[1].logprobs, want[1].logprobs, strict=True):
        assert [t for t, _ in top_a] == [t for t, _ in top_b]
        assert [a, *(x for _, x in top_a)] == pytest.approx([b, *(x for _, x in top_b)], abs=1e-5)


def test_several_answers_of_a_prompt(model):
    engine = Engine(model, 3, 48, block_tokens=16)
    prompts = [[7] * 33, [3, 4]]
    few, many = (
        engine.generate(prompts, 6, temperature=1.0, seed=2, n=n, logprobs=0) for n in (2, 5)
    )
    assert few == many[:2] + many[5:7]
    assert many[0] == engine.generate(prompts[:1], 6, temperature=1.0, seed=2)[0]
    assert len(set(map(tuple, many))) > 5 and all(len(c.logprobs) == 6 for c in many)
    assert sum(c.prefilled for c in few) <= 33 + 2 + 2 * 2  # the prompt itself once
    assert engine.generate(prompts[:1], 6, temperature=1.0, seed=[2], n=2)[1] == many[1]


@pytest.mark.parametrize("n", [0, True, 1.5])
def test_an_invalid_number_of_answers(model, n):
    with pytest.raises(UserError, match="n must be a positive whole number"):
        Engine(model, 1, 48).generate([[1]], 1, n=n)
