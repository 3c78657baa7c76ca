"""penalties.py equals transformers' processors and OpenAI's formula, through many steps and slots."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import normal, planted_bugs, to_host, to_kernel, with_planted_bug
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from xtrain.kernels.decoding import penalties
from xtrain.kernels.decoding.penalties import (
    Penalties,
    PenaltyRules,
    apply_penalties,
    count_tokens,
)
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
V = 50
put_both = pytest.mark.parametrize("put", [np.array, to_kernel], ids=["reference", "kernel"])


def by_definition(logits_V, rules, prompt, answer):
    """transformers' processors, then OpenAI's formula (platform.openai.com/docs: "presence and frequency penalties")."""
    ids, scores = torch.tensor([[*prompt, *answer]]), torch.tensor(logits_V)[None]
    if rules.bias:
        scores = SequenceBiasLogitsProcessor({(t,): float(x) for t, x in rules.bias.items()})(
            ids, scores
        )
    scores = RepetitionPenaltyLogitsProcessor(float(rules.repetition))(ids, scores)
    if rules.min_tokens:
        ends = MinNewTokensLengthLogitsProcessor(len(prompt), rules.min_tokens, sorted(rules.ends))
        scores = ends(ids, scores)
    counts = np.bincount(answer, minlength=len(logits_V)) if len(answer) else np.zeros(V)
    scores = scores[0].numpy() - rules.frequency * counts - rules.presence * (counts > 0)
    if rules.allowed is not None:
        scores[sorted(set(range(V)) - rules.allowed)] = -np.inf
    return scores


RULES = [
    PenaltyRules(repetition=1.7),
    PenaltyRules(frequency=0.6, presence=-0.3),
    PenaltyRules(bias={3: -100.0, 4: 2.5, 49: 1.0}),
    PenaltyRules(0.5, 0.2, 1.1, {0: -3.0, 7: 4.0}),
    PenaltyRules(min_tokens=4, ends=frozenset({5, 9})),
    PenaltyRules(1.3, 0.4, bias={5: 1.0, 8: 2.0}, allowed=frozenset({3, 5, 31, 32, 49})),
]


@put_both
def test_equals_the_definition_through_many_steps(put):
    """Each sequence in its slot; some rows have none."""
    slots = np.array([2, -1, 0, 5, 3, 1, 4], np.int32)
    state = Penalties.empty(put(np.zeros(1, np.float32)), 6, 40, V)
    prompts = [[1, 2, 3, 2], [5], list(range(20)), [7, 7, 48], [5], [5, 6, 49]]
    answers = [[], [5, 5, 9], [3], [], [], [31]]
    for slot, rules in enumerate(RULES):
        state.set_slot(slot, rules, prompts[slot], answers[slot])
    for step in range(6):
        logits = normal(step, 7, V + 3, scale=3.0)
        ids = np.array([3, 9, 5, 49, step, 11, 9], np.int32)
        on_device = put(logits)
        steps = np.array([len(answers[slot]) if slot >= 0 else 0 for slot in slots], np.int32)
        apply_penalties(on_device, state, put(slots), put(steps), V)
        changed = to_host(on_device)
        for row, slot in enumerate(slots):
            want = logits[row].copy()
            if slot >= 0:
                want[:V] = by_definition(want[:V], RULES[slot], prompts[slot], answers[slot])
                answers[slot].append(int(ids[row]))
            np.testing.assert_allclose(changed[row], want, rtol=1e-6, atol=1e-6)
        count_tokens(state, put(slots), put(ids))


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_kernels_have_the_bits_of_the_reference(data):
    dtype = data.draw(st.sampled_from([np.float32, BF16]))
    R, number = 3, st.floats(-2, 2, width=32)
    tokens = st.lists(st.integers(0, V - 1), max_size=20)
    ids_of = st.frozensets(st.integers(0, V - 1), min_size=1, max_size=9)
    states = [Penalties.empty(put(np.zeros(1)), R, 2 * V, V) for put in (np.array, to_kernel)]
    for slot in range(R):
        bias = data.draw(st.dictionaries(st.integers(0, V - 1), number, max_size=9))
        penalties = (data.draw(st.floats(0.25, 4, width=32)), data.draw(number), data.draw(number))
        limits = (data.draw(st.integers(0, 3)), data.draw(ids_of), data.draw(st.none() | ids_of))
        rules = PenaltyRules(*penalties, bias, *limits)
        prompt, answer = data.draw(tokens), data.draw(tokens)
        for state in states:
            state.set_slot(slot, rules, prompt, answer)
    for step in range(3):
        logits = normal(step, R, V, scale=3.0).astype(dtype)
        slots = np.array(data.draw(st.permutations([0, 1, -1])), np.int32)
        ids = np.array([data.draw(st.integers(-1, V - 1)) for _ in range(R)], np.int32)
        results = []
        for state, put in zip(states, (np.array, to_kernel)):
            x = put(logits)
            apply_penalties(x, state, put(slots), put(np.full(R, step, np.int32)), V)
            changed = to_host(x)
            count_tokens(state, put(slots), put(ids))
            sizes = to_host(state.sizes_R)
            lists = [to_host(a)[r, :n] for a in state.arrays[:4] for r, n in enumerate(sizes)]
            results.append([changed, sizes, *lists])
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)


@put_both
def test_a_full_list_and_a_token_that_is_none(put):
    state = Penalties.empty(put(np.zeros(1)), 1, 2, V)
    state.set_slot(0, PenaltyRules(presence=1.0), [], [4, 4])
    slots = put(np.zeros(1, np.int32))
    for token in (-1, 5, 6):  # 6 has no room
        count_tokens(state, slots, put(np.array([token], np.int32)))
    assert to_host(state.tokens_RL).tolist() == [[4, 5]]
    assert to_host(state.counts_RL).tolist() == [[2, 1]]
    state.set_slot(0, PenaltyRules(presence=1.0), [], [])  # another sequence
    assert to_host(state.sizes_R).tolist() == [0]
    with pytest.raises(ValueError, match="3 different tokens, a slot has room for 2"):
        state.set_slot(0, PenaltyRules(repetition=2.0), [1, 2, 3], [])


def test_bad_values():
    for rules, message in (
        (dict(repetition=0.0), "repetition_penalty 0.0"),
        (dict(repetition=np.inf), "repetition_penalty inf"),
        (dict(repetition=np.nan), "repetition_penalty nan"),
        (dict(frequency=np.nan), "frequency_penalty nan"),
        (dict(presence=-101), "presence_penalty -101"),
        (dict(bias={1: np.nan}), "logit_bias nan"),
        (dict(bias={1: 101}), "logit_bias 101"),
        (dict(bias=dict.fromkeys(range(301), 0.0)), "logit_bias has 301 tokens"),
        (dict(min_tokens=1, ends=frozenset(range(257))), "stop has 257 tokens"),
        (dict(allowed=frozenset()), "allowed_token_ids is empty"),
        (dict(min_tokens=2, ends={1, 2}, allowed={1}), "allowed_token_ids has only stop tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            PenaltyRules(**rules).check()
    PenaltyRules(1.2, -2, 2, {1: -100}).check()
    assert not PenaltyRules(bias={}).active and PenaltyRules(bias={1: 1.0}).active
    assert not PenaltyRules(ends={1}).active and PenaltyRules(ends={1}, min_tokens=1).active
    assert PenaltyRules(allowed={1}).active
    state = Penalties.empty(np.zeros(1), 1, 2, V)
    logits = np.zeros((2, V), np.float32)
    one, two = np.zeros(1, np.int32), np.zeros(2, np.int32)
    for slots, steps, vocab, message in (
        (one, two, V, "slots has shape"),
        (two, one, V, "steps has shape"),
        (two, two, V + 1, f"a vocabulary of {V + 1}, there is room for {V} tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_penalties(logits, state, slots, steps, vocab)


@planted_bugs
@pytest.mark.parametrize("name, old, new", [
    ("make_count_kernel", "cuda.syncthreads()  # also", "pass  # also"),
    ("make_count_kernel", "sizes_R[r] = size + 1", "pass"),
    ("make_apply_kernel", "cuda.syncthreads()  # penalties", "pass  # penalties"),
    ("make_apply_kernel", "int32(v & 31)", "int32(v & 15)"),
    ("make_apply_kernel", "steps_B[b] < from_RL", "steps_B[b] <= from_RL"),
    ("make_apply_kernel", "r = int64(slots_B[b])", "r = b"),
    ("penalized", "if x > float32(0.0)", "if x < float32(0.0)"),
])  # fmt: skip
def test_planted_bugs_are_found(name, old, new):
    with (
        with_planted_bug([penalties], name, old, new),
        pytest.raises((KernelError, AssertionError)),
    ):
        test_equals_the_definition_through_many_steps(lambda x: sim(np.array(x)))
