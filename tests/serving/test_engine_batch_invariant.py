"""Engine(batch_invariant=True): the logits of every generated token have the bits of the training forward, whatever else is
served, however the prompt is cut, and after preemption and with shared blocks."""

import numpy as np
import pytest
from checks import rng
from flash_attention_cases import small_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import Observed, check, tight
from twins import GEMMA3, LLAMA3, random_model, small

from xtrain import Engine, ModelConfig, Transformer
from xtrain.device import to_device
from xtrain.kernels import gemm
from xtrain.nn import functions

MIXTURE = dict(n_experts=5, experts_per_token=2, expert_bias=True)
SCALINGS = (None, LLAMA3, {"rope_type": "linear", "factor": 2.0})


def prompts_with_common_beginnings(seed, lengths, vocab=61):
    """Each is random, or begins like the one before and differs at the end."""
    out = []
    for i, n in enumerate(lengths):
        prompt = rng(seed, i).integers(0, vocab, n).tolist()
        if i % 2:
            shared = min(n, len(out[-1])) * 3 // 4
            prompt[:shared] = out[-1][:shared]
        out.append(prompt)
    return out


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_model_and_any_requests(data):
    draw = data.draw
    G, S = draw(st.integers(1, 2)), draw(st.sampled_from([16, 32]))
    config = small(
        n_kv_heads=G, n_heads=G * draw(st.integers(1, 3)), head_dim=2 * draw(st.integers(1, 20)),
        dim=draw(st.sampled_from([24, 32, 100])), hidden_dim=draw(st.sampled_from([40, 65, 192])),
        n_layers=draw(st.integers(1, 2)), qk_norm=draw(st.booleans()), qkv_bias=draw(st.booleans()), tie_embeddings=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from(SCALINGS)), max_seq_len=80,
        **draw(st.sampled_from([{}, GEMMA3, MIXTURE])) | dict(sliding_window=draw(st.sampled_from([0, 0, 1, 20]))),
    )  # fmt: skip
    model = random_model(config, draw(st.integers(0, 9)), "cpu")
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    prompts = prompts_with_common_beginnings(draw(st.integers(0, 9)), lengths)
    engine = tight(
        model, draw(st.integers(-(-80 // S), 12)), S, 80, max_batch=draw(st.integers(1, 4)),
        prefill_tokens=draw(st.integers(1, 70)), reuse_prefix=draw(st.booleans()),
    )  # fmt: skip
    for _ in range(2):  # the second time with a cache that has been used
        new = draw(st.lists(st.integers(1, 25), min_size=len(prompts), max_size=len(prompts)))
        seeds = list(range(len(prompts)))
        first, warmth = engine.scheduler.submitted, draw(st.sampled_from([0.0, 1.3]))
        logprobs = draw(st.sampled_from([None, 2]))
        out = engine.generate(prompts, new, warmth, seed=seeds, logprobs=logprobs)
        check(model, engine, prompts, out, first)


def test_preemption_and_sharing_happen_here():
    """The same with a stream of requests of which it is known that it preempts, shares, copies and cuts."""
    model = random_model(small(head_dim=16, max_seq_len=80), device="cpu")
    prompts = prompts_with_common_beginnings(3, [40, 44, 30, 38])
    engine = tight(model, 8, 16, 80, max_batch=4, prefill_tokens=24)
    out = engine.generate(prompts, 30, 1.0, seed=[1, 2, 3, 4])
    assert sum(len(s.preempted) for s in engine.trace) and engine.reused_tokens
    check(model, engine, prompts, out)
    for i, prompt in enumerate(prompts):
        alone = Engine(model, 1, 80, batch_invariant=True, reuse_prefix=False)
        assert alone.generate([prompt], 30, 1.0, seed=[1 + i]) == [out[i]]


def test_preemption_with_dynamic_scaling_keeps_the_angles_of_decoding():
    """Sequences that grow beyond the trained length, from a short prompt and from a long one."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = small(head_dim=16, qk_norm=False, max_seq_len=24, rope_scaling=scaling)
    model = random_model(config, 2, "cpu")
    prompts = prompts_with_common_beginnings(5, [20, 22, 30, 9])
    engine = tight(model, 7, 16, 80, max_batch=4, prefill_tokens=24)
    out = engine.generate(prompts, 40, 1.0, seed=[1, 2, 3, 4])
    preempted = {i for step in engine.trace for i in step.preempted}
    assert len(preempted) >= 2
    for i, prompt in enumerate(prompts):
        alone = Observed(model, max_batch=1, max_seq_len=80)
        assert alone.generate([prompt], 40, 1.0, seed=[1 + i]) == [out[i]]
        for n in range(40):
            assert np.array_equal(alone.logits[0, n], engine.logits[i, n]), (i, n)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@small_tiles()
def test_kernels_in_the_simulator(precision):
    config = small(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32, vocab_size=21)  # fmt: skip
    model = Transformer(config, None, "sim", precision)
    for (_, a), (_, b) in zip(
        model.named_parameters(), random_model(config, device="cpu").named_parameters()
    ):
        a.data = to_device(b.data.astype(a.dtype), "sim")
    prompts = prompts_with_common_beginnings(1, [17, 2], 21)
    engine = Observed(model, 2, 32, block_tokens=16, prefill_tokens=12)
    check(model, engine, prompts, engine.generate(prompts, 2))


# ----------------------------------------------------------------------------- planted bugs
def in_two_orders(y, x, w, b):
    """The sums of every second row run backwards."""
    gemm.matmul(y, x, w, trans_b=True)
    y[1::2] = x[1::2, ::-1] @ w[:, ::-1].T
    return y


PLANTED = {
    "products of all rows at once": (gemm, "linear_into", lambda y, x, w, b: gemm.matmul(y, x, w, trans_b=True)),
    "rows computed in two orders": (gemm, "linear_into", in_two_orders),
    "attention of training": (functions, "is_batch_invariant", lambda: False),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_another_order_of_additions_is_found(monkeypatch, planted):
    monkeypatch.setattr(*planted)
    model = random_model(small(head_dim=16, dim=100, max_seq_len=80), device="cpu")
    prompts = prompts_with_common_beginnings(3, [40, 44, 30])
    engine = tight(model, 12, 16, 80, max_batch=3)
    out = engine.generate(prompts, 20)
    with pytest.raises(AssertionError):
        check(model, engine, prompts, out)


# ----------------------------------------------------------------------------- on a GPU
def gpu_model(precision, trainable, **shape):
    config = ModelConfig(max_seq_len=1024, vocab_size=1000, **shape)
    model = Transformer(config, 3, "gpu", precision, trainable=trainable)
    for i, (_, p) in enumerate(model.named_parameters()):
        if p.ndim == 1:  # else all norm weights are 1
            p.data = to_device(rng(7, i).uniform(0.5, 1.5, p.shape).astype(p.dtype), "gpu")
    return model


GPU_SHAPES = {
    "llama": dict(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768),
    "qwen3, tied": dict(
        dim=1024, n_layers=2, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072, qk_norm=True,
        tie_embeddings=True,
    ),
    "narrow heads": dict(dim=384, n_layers=2, n_heads=12, n_kv_heads=12, head_dim=32, hidden_dim=1024),
    "8B": dict(dim=4096, n_layers=1, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=12288),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("precision, trainable", [("fp32", True), ("bf16", True), ("bf16", False)])
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_on_a_gpu(shape, precision, trainable):
    """With cuBLAS: preemption, sharing and cuts, then the tokens of the captured graph."""
    model = gpu_model(precision, trainable, **shape)
    lengths = [300, 310, 1, 64, 257, 100, 90, 500, 600, 33, 30, 128]
    prompts = prompts_with_common_beginnings(3, lengths, 1000)
    engine = tight(model, 17, 64, 1024, max_batch=9, prefill_tokens=200)
    options = dict(max_new_tokens=60, temperature=1.0, seed=list(range(12)), logprobs=2)
    out = engine.generate(prompts, **options)
    assert sum(len(s.preempted) for s in engine.trace) and engine.reused_tokens
    check(model, engine, prompts, out)
    graphed = Engine(model, 12, 1024, batch_invariant=True)
    again = graphed.generate(prompts, **options)
    assert again == out and [x.logprobs for x in again] == [x.logprobs for x in out]
