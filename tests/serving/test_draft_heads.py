"""Drafts of heads: those of the model's newest output for each sequence, and answers that they do not change."""

import numpy as np
import pytest
import twins
from checks import rng, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_state import check_nothing_is_used
from test_engine_batch_invariant import GPU_SHAPES, gpu_model, prompts_with_common_beginnings
from test_speculation import PROMPTS, RULES, Drafting, DraftingAhead, everything, model

from xtrain import Engine, UserError
from xtrain.nn.draft_heads import DraftHeads


def heads_of(base, K=3, seed=0):
    heads = DraftHeads(base.config.dim, K)
    heads.arena = heads.make_arena(base.device, None, trainable=False)
    for i, (_, tensor) in enumerate(heads.named_parameters()):
        tensor.data = (0.3 * rng(seed, i).standard_normal(tensor.shape)).astype(np.float32)
    return heads


def drafted_alone(base, heads, tokens, n):
    """-> the drafts of a greedy sequence, from a forward pass of all its tokens but the last"""
    h = base.hidden(np.array([tokens[:-1]])).data[-1:]
    found = []
    for w in (to_host(p.data) for _, p in heads.named_parameters()):
        x = h @ w.T
        logits = (h + x / (1 + np.exp(-x))) @ to_host(base._head().data).T
        found.append(int(logits[0, : base.config.vocab_size].argmax()))
    return found[:n]


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_drafts_come_from_the_newest_output_of_each_sequence(data):
    """Whatever happened before: prefill, plain and verifying steps, preemption, moved slots, equal prompts."""
    draw = data.draw
    one = Engine(model(), 1, block_tokens=16).cache.block_bytes
    sizes = dict(
        max_batch=3,
        block_tokens=16,
        cache_bytes=draw(st.integers(5, 9)) * one,
        batch_invariant=True,
    )
    heads = heads_of(model())
    kind = draw(st.sampled_from([Drafting, DraftingAhead]))
    engine = kind(model(), **sizes, speculate=3, draft_model=heads)
    drafter = engine.scheduler.speculation.drafter
    compute, skip = drafter.draft, draw(st.sets(st.integers(0, 40)))
    seen = []

    def draft(requests, lengths):
        if engine.steps in skip:  # a plain step
            return [[] for _ in requests]
        drafts = compute(requests, lengths)
        seen.extend(
            (list(r.tokens), x) for r, x in zip(requests, drafts) if x and not r.temperature
        )
        return drafts

    drafter.draft = draft
    options = dict(temperature=[0.0, 0.0, 1.0, 0.0], n=draw(st.integers(1, 2)), logprobs=1)
    options |= RULES if draw(st.booleans()) else {}
    new = [draw(st.integers(2, 24)) for _ in PROMPTS]
    wanted = Engine(model(), **sizes).generate(PROMPTS, new, **options)
    assert everything(engine.generate(PROMPTS, new, **options)) == everything(wanted)
    engine.step()
    check_nothing_is_used(engine)
    assert seen or skip or max(new) < 4
    for tokens, drafts in seen[::5]:
        assert drafts == drafted_alone(model(), heads, tokens, len(drafts))


def test_rates_are_those_of_each_head():
    engine = Drafting(model(), 1, batch_invariant=True, speculate=3, draft_model=heads_of(model()))
    stream = engine.stream(PROMPTS[:1], 20)
    list(stream)
    rates = [rate.value for rate in stream.requests[0].history.rates]
    assert rates[0] < 0.5 and rates[1] <= 0.5  # wrong: these heads are random


def test_heads_that_do_not_fit():
    wide = twins.random_model(twins.small(head_dim=16, dim=64), device="cpu")
    with pytest.raises(UserError, match="the draft heads are of width"):
        Engine(model(), speculate=2, draft_model=heads_of(wide))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu(precision):
    """With CUDA graphs, and random heads: drafts are drawn, and answers are those of plain decoding."""
    served = gpu_model(precision, False, **next(iter(GPU_SHAPES.values())))
    heads = DraftHeads(served.config.dim, 3)
    heads.arena = heads.make_arena("gpu", 0, precision == "bf16", trainable=False)
    prompts = prompts_with_common_beginnings(3, [300, 310, 1, 64, 257], 1000)
    sizes = dict(max_batch=4, max_seq_len=1024, batch_invariant=True)
    engine = Drafting(served, **sizes, speculate=3, draft_model=heads)
    for options in (dict(seed=3), dict(temperature=1.0, n=2, logprobs=1, **RULES)):
        wanted = Engine(served, **sizes).generate(prompts, 60, **options)
        for _ in range(2):
            assert everything(engine.generate(prompts, 60, **options)) == everything(wanted)
    assert engine.scheduler.speculation.drafted_tokens
