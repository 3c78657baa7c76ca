"""Constrained sequences: the tokens of whole forward passes with a mask, through everything that happens to a sequence."""

import contextlib

import numpy as np
import pytest
from flash_attention_cases import small_tiles
from run_ahead import AheadEngine
from test_engine_batching import way
from test_engine_sampling import CONFIG, OFF, PROMPTS, VOCAB, logits_of, model, processed
from test_engine_simulator import PROMPTS as SIMULATED
from test_engine_simulator import pair
from twins import random_model

from xtrain import Engine, UserError
from xtrain.kernels.decoding.sampling import sample_ref
from xtrain.serving import runner as runner_module
from xtrain.serving.requests import make_requests

__all__ = ["model", "way"]  # every test also as on a GPU


class Modulo:
    """After c tokens with the sum s only tokens v with v % n == (s + c) % n may follow; ends after `end` tokens."""

    def __init__(self, n, end=1000, reason="stop", vocab=VOCAB):
        self.arguments = n, end, reason, vocab
        self.n, self.end, self.reason, self.vocab = n, end, reason, vocab
        self.sum = self.count = 0

    ready = True

    def start(self):
        return Modulo(*self.arguments)

    @property
    def ended(self):
        return self.reason if self.count >= self.end else None

    def accept(self, token):
        assert token in self.allowed(), "not allowed"
        self.sum += token
        self.count += 1

    @staticmethod
    def masks_into(pairs):
        for sequence, row in pairs:
            assert not row.any() and row.dtype == np.int32
            for v in sequence.allowed():
                row[v // 32] |= np.array(1 << (v % 32), np.uint32).view(np.int32)

    def allowed(self):
        return list(range((self.sum + self.count) % self.n, self.vocab, self.n))


def expected(model, prompt, new, n=None, temperature=0.0, random_stream=0, seed=3, **options):
    """-> the tokens by whole forward passes: the mask, then bias and penalties, then sampling"""
    answer, state = [], Modulo(n) if n else None
    for step in range(new):
        logits_V = logits_of(model, [*prompt, *answer])
        if state:
            masked = np.full(VOCAB, -np.inf, np.float32)
            masked[state.allowed()] = logits_V[state.allowed()]
            logits_V = masked
        logits_V = processed(logits_V, prompt, answer, OFF | options)
        answer.append(sample_ref(logits_V, temperature, 0, 1.0, seed, random_stream, step, 0.0))
        if state:
            state.accept(answer[-1])
    return answer


STRONG = dict(repetition_penalty=1.8, presence_penalty=0.7, logit_bias={5: 2.0, 60: -100.0})


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize(
    "memory",
    [dict(), dict(cache_blocks=4), dict(prefill_tokens=2)],
    ids=["", "preempted", "chunks"],
)
def test_through_preemption_and_compaction(model, memory, temperature):
    """Sequences of unequal length with and without a constraint: slots are freed, moved and given to others."""
    blocks = memory.pop("cache_blocks", None)
    if blocks:  # of 16 tokens
        one = Engine(model, 1, 16, block_tokens=16)
        memory = dict(cache_bytes=blocks * one.cache_bytes)
    lengths, numbers = [14, 3, 20, 9, 17], [3, None, 7, 2, None]
    served = Engine(model, 3, 32, block_tokens=16, **memory)
    grammars = [n and Modulo(n) for n in numbers]
    answers = served.generate(PROMPTS, lengths, temperature, seed=3, grammar=grammars, **STRONG)
    for i, (prompt, length, n) in enumerate(zip(PROMPTS, lengths, numbers)):
        assert answers[i] == expected(model, prompt, length, n, temperature, i, **STRONG), i
    preempted = [request for step in served.trace for request in step.preempted]
    assert bool(preempted) == bool(blocks)


def test_every_sequence_decodes_in_every_step(model):
    """Also when steps run ahead of the tokens: nobody waits for a constrained sequence, nor does it skip steps."""
    served = AheadEngine(model, 4, 32)
    answers = served.generate([[1], [2], [3]], 9, grammar=[None, Modulo(3), Modulo(2)])
    assert answers == [expected(model, [i + 1], 9, n) for i, n in enumerate([None, 3, 2])]
    decoded = [step.decoded for step in served.trace if step.decoded]
    assert decoded == [[0, 1, 2]] * 8


def test_answers_of_one_prompt_and_log_probabilities(model):
    """n answers have a constraint each. The log-probabilities are those among the allowed tokens."""
    answers = Engine(model, 4).generate(
        [[4, 4]], 6, 1.0, seed=[3], n=3, grammar=Modulo(8), logprobs=20
    )
    for i, answer in enumerate(answers):
        assert answer == expected(model, [4, 4], 6, 8, 1.0, i << 32)
        state = Modulo(8)
        for token, (own, top) in zip(answer, answer.logprobs):
            finite = {t: x for t, x in top if np.isfinite(x)}
            assert sorted(finite) == state.allowed() and finite[token] == own
            assert sum(np.exp(list(finite.values()))) == pytest.approx(1, abs=1e-5)
            state.accept(token)


@pytest.mark.parametrize("reason", ["stop", "constraint"])
def test_the_end(model, reason):
    """The constraint's end is the sequence's; others continue."""
    served = Engine(model, 2)
    answers = served.generate([[1], [2]], 9, grammar=[Modulo(3, 4, reason), Modulo(3)])
    assert [a.reason for a in answers] == [reason, "length"]
    assert answers[0] == expected(model, [1], 4, 3)
    assert answers[1] == expected(model, [2], 9, 3)


def test_a_constraint_that_is_not_ready_waits(model):
    """Also one that could join a prompt. Others are admitted."""
    late = Modulo(3)
    late.start = lambda: late
    late.ready = False
    served = Engine(model, 4)
    options = dict(max_new_tokens=5, grammar=[late, None, Modulo(2)])
    requests = make_requests([[1], [1], [2]], CONFIG, 48, (), 3, **options)
    served.submit(*requests)
    while requests[1].completion.reason is None or requests[2].completion.reason is None:
        served.step()
    assert requests[0].slot == -1 and not requests[0].completion
    late.ready = True
    while served.busy:
        served.step()
    for request, n in zip(requests, [3, None, 2]):
        assert request.completion == expected(model, request.prompt, 5, n)


def test_an_interrupted_step(model, monkeypatch):
    """A constraint that has accepted tokens of the lost step begins again."""
    served = Engine(model, 2, graph=False)  # of which Python runs every step
    options = dict(max_new_tokens=12, grammar=[Modulo(3), None])
    requests = make_requests([[1], [2]], CONFIG, 48, (), 3, **options)
    served.submit(*requests)
    steps = 0

    def fail(*arguments, **options):
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            raise KeyboardInterrupt
        return sample(*arguments, **options)

    sample = runner_module.sample
    monkeypatch.setattr(runner_module, "sample", fail)
    while served.busy:
        with contextlib.suppress(KeyboardInterrupt):
            served.step()
    assert steps > 12
    assert requests[0].completion == expected(model, [1], 12, 3)


def test_what_is_not_asked_for_is_not_computed(monkeypatch):
    model = random_model(CONFIG, device="cpu")  # for a GPU every kernel is compiled ahead
    monkeypatch.setattr(runner_module, "mask_logits", None)
    served = Engine(model, 2)
    served.generate([[1], [2]], 4, temperature=1.0)
    assert served.runner.masks is None
    with pytest.raises(UserError, match="grammar must be an object with a method start, got 7"):
        served.generate([[1]], 2, grammar=7)


@small_tiles()
@pytest.mark.parametrize("way", ["ahead"], indirect=True)  # as on a GPU
def test_in_the_simulator(way):
    there, here = pair()
    options = dict(max_new_tokens=2, seed=3, logprobs=1, grammar=Modulo(3, vocab=21))
    (want,) = Engine(here, 1).generate(SIMULATED[1:], **options)
    (found,) = Engine(there, 1).generate(SIMULATED[1:], **options)
    assert list(found) == list(want) and found[0] % 3 == 0
    for (a, _), (b, _) in zip(found.logprobs, want.logprobs):
        assert a == pytest.approx(b, abs=1e-4)
