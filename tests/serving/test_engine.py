"""The engine's results: the cache against the full forward pass, batches against each prompt alone, seeds, prefixes."""

from dataclasses import replace

import numpy as np
import pytest
from cached import Cached
from checks import rng, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import DEVICE, GEMMA3, LLAMA3, batch, random_model, small, weights

from xtrain import Engine, Transformer
from xtrain.device import to_device
from xtrain.kernels.decoding.kv_cache import kv_cache_bytes
from xtrain.nn.cuda_graph import EAGER_CALLS

SHAPES = {
    "qwen3": small(head_dim=16),
    "llama": small(head_dim=16, qk_norm=False),
    "one key head, tied": small(head_dim=32, n_kv_heads=1, tie_embeddings=True),
    "llama3 scaling": small(head_dim=16, qk_norm=False, rope_scaling=LLAMA3),
    "linear scaling": small(head_dim=16, rope_scaling={"rope_type": "linear", "factor": 2.0}),
}
every_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15]]


def margin(logits_V):
    """The largest logit minus the second largest."""
    top = np.sort(logits_V)[-2:]
    return top[1] - top[0]


# ----------------------------------------------------------------------------- against the full forward pass
def check_every_position(model, lengths, split, slots, batch_invariant=False):
    """Prefill split[a] tokens, then the rest of each prompt in a second prefill, then decode to the end."""
    T = model.config.max_seq_len
    ids, _ = batch(model.config, len(lengths), T)
    expected = to_host(model(ids).data)
    cached = Cached(model, max(slots) + 1, T, batch_invariant)
    close = lambda got, a, t: (
        np.abs(got - expected[a, t]).max() <= 1e-5 * max(1, np.abs(expected).max())
    )
    logits = cached.prefill([ids[a, :n] for a, n in enumerate(split)], [0] * len(slots), slots)
    assert all(close(logits[a], a, n - 1) for a, n in enumerate(split))
    rest = [a for a, (n, s) in enumerate(zip(lengths, split)) if n > s]
    if rest:
        logits = cached.prefill(
            [ids[a, split[a] : lengths[a]] for a in rest], [split[a] for a in rest],
            [slots[a] for a in rest], wanted=[len(rest) - 1],
        )  # fmt: skip
        assert len(logits) == 1 and close(logits[0], rest[-1], lengths[rest[-1]] - 1)
    at = list(lengths)
    while live := [a for a in range(len(slots)) if at[a] < T]:
        got = cached.decode(
            [ids[a, at[a]] for a in live], [at[a] for a in live], [slots[a] for a in live]
        )
        for b, a in enumerate(live):
            assert close(got[b], a, at[a]), (a, at[a])
            at[a] += 1


@every_shape
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decoding_with_the_cache_is_the_full_forward_pass_at_every_position(
    config, batch_invariant
):
    model = random_model(config)
    check_every_position(model, [5, 1, 19], [3, 1, 7], [2, 0, 3], batch_invariant)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_same_for_any_heads_lengths_and_slots(data):
    draw = data.draw
    G, D = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 12))
    config = small(
        n_kv_heads=G, n_heads=G * draw(st.integers(1, 3)), head_dim=D, n_layers=draw(st.integers(1, 2)),
        qk_norm=draw(st.booleans()), qkv_bias=draw(st.booleans()), tie_embeddings=draw(st.booleans()), max_seq_len=draw(st.integers(2, 12)),
        **draw(st.sampled_from([{}, GEMMA3])) | dict(sliding_window=draw(st.sampled_from([0, 0, 1, 3]))),
    )  # fmt: skip
    lengths = draw(st.lists(st.integers(1, config.max_seq_len), min_size=1, max_size=4))
    split = [draw(st.integers(1, n)) for n in lengths]
    slots = draw(st.permutations(range(len(lengths) + 1)))[: len(lengths)]
    model = random_model(config, draw(st.integers(0, 9)), "cpu")
    check_every_position(model, lengths, split, slots, draw(st.booleans()))


def test_an_idle_entry_of_the_batch_changes_nothing():
    model = random_model(SHAPES["qwen3"])
    cached = Cached(model, 3, 16)
    cached.prefill(PROMPTS[:2], [0, 0], [0, 2])
    whole = cached.cache.arrays[0]
    before = to_host(whole).copy()
    alone = cached.decode([7, 8], [3, 1], [0, 2])
    after = to_host(whole).copy()
    whole[...] = to_device(before, model.device)
    with_idle = cached.decode([7, 9, 8, 5], [3, 0, 1, 16], [0, -1, 2, -1])
    assert np.abs(with_idle[[0, 2]] - alone).max() < 1e-5
    assert np.abs(to_host(whole) - after).max() < 1e-5 and not np.array_equal(before, after)


# ----------------------------------------------------------------------------- batches
@every_shape
def test_unequal_prompts_together_are_each_alone(config):
    model = random_model(config)
    together = Engine(model, 4).generate(PROMPTS, 20)
    cached = Cached(model, 4, config.max_seq_len)
    logits = cached.prefill(PROMPTS, [0] * 4, [0, 1, 2, 3])
    for i, prompt in enumerate(PROMPTS):
        alone = Cached(model, 1, config.max_seq_len)
        got = alone.prefill([prompt], [0], [0])[0]
        assert np.abs(got - logits[i]).max() <= 1e-4
        for step, token in enumerate(together[i]):
            if got.argmax() != token:
                assert margin(got) <= 1e-3, (i, step)
                break
            got = alone.decode([token], [len(prompt) + step], [0])[0]


@every_shape
def test_batch_invariant_is_exact(config):
    """Any batch, any order, used slots: the same tokens, with a temperature at which the last bits often matter."""
    model = random_model(config)
    options = dict(max_new_tokens=20, temperature=1.5, seed=[3, 1, 4, 1])
    engine = Engine(model, 4, batch_invariant=True)
    together = engine.generate(PROMPTS, **options)
    for order in ([3, 1, 0, 2], [2], [0, 3]):
        options["seed"] = [[3, 1, 4, 1][i] for i in order]
        again = engine.generate([PROMPTS[i] for i in order], **options)
        assert again == [together[i] for i in order]
    assert (
        Engine(model, 1, batch_invariant=True).generate(PROMPTS[:1], 20, 1.5, seed=[3])
        == together[:1]
    )


@every_shape
def test_batch_invariant_logits_have_the_same_bits(config):
    model = random_model(config)
    cached, prompt = Cached(model, 5, 32, invariant=True), rng(7).integers(0, 61, 9)
    for sequence in range(5):
        cached.prefill([prompt], [0], [sequence])
    ids, lengths, sequences = [7, 7, 7, 3, 7], [9, 9, 9, 4, 9], [0, 1, 2, 3, 4]
    together = cached.decode(ids, lengths, sequences)
    for b in (0, 2, 4):
        assert np.array_equal(cached.decode([7], [9], [b])[0], together[b])
        # The position in the batch does not matter either.
        assert np.array_equal(together[b], together[0])


# ----------------------------------------------------------------------------- sampling
def test_the_same_seed_gives_the_same_text():
    model = random_model(SHAPES["qwen3"])
    options = dict(max_new_tokens=12, temperature=0.9, top_k=20, top_p=0.95)
    first = Engine(model, 2).generate(PROMPTS, seed=5, **options)
    assert Engine(model, 2).generate(PROMPTS, seed=5, **options) == first
    other = Engine(model, 2).generate(PROMPTS, seed=6, **options)
    assert all(a != b for a, b in zip(first, other))
    twice = Engine(model, 2).generate([PROMPTS[0]] * 2, seed=5, **options)
    # Every prompt has its own random numbers.
    assert twice[0] != twice[1] and twice[0] == first[0]
    same = Engine(model, 2).generate([PROMPTS[0]] * 2, seed=[5, 5], **options)
    assert same[0] == same[1] == first[0]


def test_options_of_one_batch_may_differ():
    model = random_model(SHAPES["llama"])
    engine = Engine(model, 4)
    greedy = engine.generate(PROMPTS, 10)
    mixed = engine.generate(
        PROMPTS, [10, 4, 10, 10], [0.0, 0.0, 1.0, 2.0], [None, None, 1, 0], [1.0, 1.0, 1.0, 1e-6]
    )
    # top_k 1 is greedy, and so is a tiny top_p.
    assert [list(x) for x in mixed[:3]] == [greedy[0], greedy[1][:4], greedy[2]]
    assert mixed[3] == greedy[3]


# ----------------------------------------------------------------------------- prefixes and chunks
def test_turn_two_prefills_only_what_is_new():
    model = random_model(SHAPES["qwen3"])
    engine = Engine(model, 1, reuse_prefix=True)
    turn = PROMPTS[2]
    answer = engine.generate([turn], 6)[0]
    assert (engine.prefilled_tokens, answer.prefilled, answer.reused) == (9, 9, 0)
    second = [*turn, *answer, 20, 21, 22]
    again = engine.generate([second], 6)[0]
    # The last token of the answer has not been through the model, so it must be computed as well.
    assert (again.prefilled, again.reused) == (4, 9 + 5) and engine.prefilled_tokens == 13
    fresh = Engine(model, 1)
    assert again == fresh.generate([second], 6)[0] and fresh.prefilled_tokens == 18
    other = [*second[:12], 1, 2]  # the user changes an earlier turn
    assert engine.generate([other], 6)[0] == fresh.generate([other], 6)[0]
    assert engine.prefilled_tokens == 13 + 2
    engine.generate([other], 1)  # all of it is cached: only the last token is computed again
    assert engine.prefilled_tokens == 13 + 2 + 1 and engine.reused_tokens == 14 + 12 + 13


def test_prompts_get_the_slot_of_their_prefix_until_the_weights_change():
    model = random_model(SHAPES["llama"])
    engine, fresh = Engine(model, 3, reuse_prefix=True), Engine(model, 3)
    talks = [[i, i + 1, i + 2, i + 3] for i in (1, 20, 40)]
    answers = engine.generate(talks, 5)
    longer = [[*t, *a, 9] for t, a in zip(talks, answers)]
    order = [longer[2], longer[0], longer[1]]
    assert engine.generate(order, 5) == fresh.generate(order, 5)
    assert engine.prefilled_tokens == 12 + 3 * 2
    name, tensor = next(iter(model.named_parameters()))
    tensor.data = tensor.data * np.float32(0.5)
    assert engine.generate(order, 5) == Engine(model, 3).generate(order, 5), name
    assert engine.prefilled_tokens == 12 + 3 * 2 + 3 * 10


def test_keys_from_before_new_weights_are_not_reused():
    model = random_model(SHAPES["llama"])
    engine = Engine(model, 2, reuse_prefix=True)
    stream = engine.stream([[1, 2, 3]], 8)
    next(stream), next(stream)
    _, tensor = next(iter(model.named_parameters()))
    tensor.data = tensor.data * np.float32(0.5)
    engine.generate([[9]], 1)  # detects the new weights while the other sequence continues
    list(stream)
    (answer,) = stream.completions
    later = [[*answer[k:], 5] for k in range(6)]
    assert engine.generate(later[:1], 5) == Engine(model, 1).generate(later[:1], 5)
    for prompt in later:
        assert engine.generate([prompt], 5) == Engine(model, 1).generate([prompt], 5)


def test_stretched_keys_are_not_reused():
    """Dynamic scaling: a prompt beyond the trained length rotates all its keys by other angles than a short prompt."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = small(head_dim=16, n_layers=3, qk_norm=False, max_seq_len=16, rope_scaling=scaling)
    for seed in range(4):
        model, tokens = random_model(config, seed), rng(seed).integers(0, 61, 41).tolist()
        engine = Engine(model, 1, reuse_prefix=True)
        for prompt in (tokens[:40], tokens[:10], tokens, tokens[:12]):
            assert engine.generate([prompt], 5) == Engine(model, 1).generate([prompt], 5)
        assert engine.reused_tokens == 0, "12 tokens of 10 come after a long prompt again"
        engine.generate([tokens[:14]], 1)
        assert engine.reused_tokens == 12


@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_chunked_prefill(size):
    model = random_model(SHAPES["qwen3"])
    whole, chunked = Engine(model, 3), Engine(model, 3, prefill_tokens=size)
    assert chunked.generate(PROMPTS, 8) == whole.generate(PROMPTS, 8)
    assert chunked.prefilled_tokens == whole.prefilled_tokens == sum(map(len, PROMPTS))


# ----------------------------------------------------------------------------- memory
def test_the_memory_of_the_cache_is_exact():
    model = random_model(SHAPES["qwen3"])
    engine = Engine(model, 3, 20, block_tokens=16)  # two blocks per sequence
    assert engine.cache_bytes == engine.cache.arrays[0].nbytes == 2 * 2 * 3 * 2 * 32 * 16 * 4
    assert engine.cache_bytes == kv_cache_bytes(2, 6, 2, 16, 16, np.float32)
    assert f"{engine.cache_bytes:,} bytes" in engine.describe()


def test_a_model_without_gradients_is_served_too():
    config = SHAPES["llama"]
    a, b = (Transformer(config, 3, DEVICE, trainable=t) for t in (True, False))
    assert Engine(a, 2).generate(PROMPTS, 8) == Engine(b, 2).generate(PROMPTS, 8)


# ----------------------------------------------------------------------------- on a GPU
def half(config):
    """A model for inference with random_model's weights in bf16."""
    model = Transformer(config, None, "gpu", "bf16", trainable=False)
    values = weights(random_model(config))
    for name, tensor in model.named_parameters():
        tensor.data = to_device(values[name].astype(tensor.dtype), "gpu")
    return model


# Widths that gemv supports in bf16.
EVEN = {name: replace(SHAPES[name], hidden_dim=64) for name in ("qwen3", "llama")}
MANY = [rng(1, i).integers(0, 61, 1 + 7 * i % 23).tolist() for i in range(14)]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [random_model, half])
@pytest.mark.parametrize("slots", [1, 3, 8, 12])
def test_a_graph_changes_no_token(make, slots):
    """Both kinds of decoding step (gemv, GEMM), sequences that end at different times, steps that run ahead."""
    model = make(EVEN["qwen3"])
    options = dict(max_new_tokens=[3 + i for i in range(14)], temperature=1.2, top_k=40, seed=4)
    captured, eager = Engine(model, slots), Engine(model, slots, graph=False)
    for _ in range(2):
        assert captured.generate(MANY, **options) == eager.generate(MANY, **options)
    assert any(r.graph for r in captured.runner.graphed.recordings.values())
    free = eager.generate(MANY, **options)
    stop = [free[0][1], free[5][3]]
    assert captured.generate(MANY, **options, stop=stop) == eager.generate(
        MANY, **options, stop=stop
    )


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [2, 12])
def test_batch_invariant_in_bf16(slots):
    model = half(EVEN["llama"])
    options = dict(max_new_tokens=24, temperature=1.5, seed=[7] * 14)
    together = Engine(model, slots, batch_invariant=True).generate(MANY, **options)
    alone = Engine(model, 1, batch_invariant=True)
    options["seed"] = [7]
    assert [alone.generate([prompt], **options)[0] for prompt in MANY] == together


@pytest.mark.gpu
def test_all_memory_is_allocated_at_the_start():
    model = half(EVEN["qwen3"])
    engine = Engine(model, 4)
    for _ in range(EAGER_CALLS + 2):  # from the second one on, blocks are shared
        engine.generate(MANY, 8)
    before = engine.cache.arrays[0].data.ptr, engine.runner.graphed.pool.total_bytes()
    engine.generate(MANY, 8)
    assert before == (engine.cache.arrays[0].data.ptr, engine.runner.graphed.pool.total_bytes())
