"""A decoding step in one kernel, in the simulator: the bits of the separate kernels, the tokens of the engine, planted bugs."""

import functools

import numpy as np
import pytest
from cached import Cached
from checks import rng, same_bytes, to_host, with_planted_bug
from twins import random_model, small

from xtrain import Engine, Transformer, UserError
from xtrain.device import to_device
from xtrain.kernels.attention import decode_attention as attention
from xtrain.kernels.decoding import gemv
from xtrain.kernels.embedding import embedding_fwd
from xtrain.kernels.runtime.launch import RESIDENT_IN_SIMULATOR, empty, zeros
from xtrain.kernels.step import step_kernel
from xtrain.kernels.step.step_kernel import DOWN, GATE_UP, HEAD, OUT, QKV
from xtrain.serving import one_kernel
from xtrain.simulator import DeadlockError, RaceError, run
from xtrain.simulator.api import SimArray

SHAPE = dict(dim=32, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32, vocab_size=21)
WARPS = 2  # the simulator takes as long as there are threads


def pair(precision="fp32", layers=1, device="sim", **changes):
    """-> (a model in the simulator or on the GPU, the same model on the CPU)"""
    config = small(**(SHAPE | dict(n_layers=layers) | changes))
    here = random_model(config, device="cpu")
    there = Transformer(config, None, device, precision, trainable=precision == "fp32")
    for (_, a), (_, b) in zip(there.named_parameters(), here.named_parameters()):
        a.data = to_device(b.data.astype(a.dtype), device)
    return there, here


def make(precision="fp32", lengths=(1,), capacity=48, warps=WARPS, **changes):
    """-> a model in the simulator, its twin on the CPU, their caches with the same random contents, the step, its inputs"""
    there, here = pair(precision, **changes)
    caches = [Cached(model, len(lengths), capacity).cache for model in (there, here)]
    tables = Cached(here, len(lengths), capacity).blocks
    values = rng(1).standard_normal(caches[0].arrays[0].shape).astype(caches[0].arrays[0].dtype)
    for cache in caches:
        cache.arrays[0][...] = to_device(values, cache.model.device)
    inputs = np.arange(3, 3 + len(lengths), dtype=np.int32), np.array(lengths, np.int32), tables
    step = one_kernel.make_step(there, caches[0], len(lengths), warps=warps)
    return there, here, caches, step, inputs


def separate(model, cache, step, ids, lengths, tables):
    """-> the logits by one kernel after the other, each with the configuration that it has in the step"""
    c, decoder, shape = model.config, model.model, step.shape
    dtype = model.branch_dtype or np.float32

    def product(kind, x, weight, norm=None, delta=None, bias=None, out=dtype):
        _, columns, _, config = shape.product(kind)
        y, h = empty(x, (len(x), columns), out), empty(x, x.shape)
        values = [None if p is None else p.value for p in (norm, weight, bias)]
        rest = values[0], values[1], c.norm_eps, kind == GATE_UP, False, config, values[2]
        gemv._launch(y, h, x, delta, *rest)
        return h, y

    h = embedding_fwd(ids, decoder.embed_tokens.weight.data, np.float32)
    delta = zeros(h, h.shape, dtype)
    for layer, (k, v, _) in zip(decoder.layers, cache.layers):
        a, mlp = layer.self_attn, layer.mlp
        norms = (a.q_norm.weight.value, a.k_norm.weight.value) if c.qk_norm else (None, None)
        h, qkv = product(QKV, h, a.qkv.weight, layer.input_layernorm.weight, delta, a.qkv.bias)
        cos_sin, scale = cache.tables, c.head_dim**-0.5
        o = attention.decode_attention(
            qkv, k, v, lengths, tables, *cos_sin, *norms, c.norm_eps, scale
        )
        delta = product(OUT, o, a.o_proj.weight)[1]
        norm = layer.post_attention_layernorm.weight
        h, y = product(GATE_UP, h, mlp.gate_up.weight, norm, delta)
        delta = product(DOWN, y, mlp.down_proj.weight)[1]
    return product(HEAD, h, model._head(), decoder.norm.weight, delta, out=np.float32)[1]


def on_cpu(model, cache, ids, lengths, tables):
    """-> the logits by the CPU's references"""
    rows = cache.decode(lengths, tables, np.arange(len(ids) + 1, dtype=np.int32))
    return model.logits(model.hidden(ids, rows)).data


CASES = [
    ("fp32", (19, -1), {}),  # Qwen3; several splits of the keys, an idle entry
    pytest.param("fp32", (33,), dict(qk_norm=False, qkv_bias=True, tie_embeddings=True), marks=pytest.mark.long),
    pytest.param("bf16", (40, 5), dict(layers=2), marks=pytest.mark.long),
]  # fmt: skip


def check_bits(monkeypatch, config, precision, lengths, steps=1, **changes):
    """`steps` tokens for each sequence: the step and the separate kernels with the same configurations, both against the CPU.
    config: of attention"""
    monkeypatch.setattr(attention, "choose", lambda *_: config)
    monkeypatch.setattr(step_kernel, "choose_attention", lambda *_: config)
    made = make(precision, lengths, warps=config.warps, **changes)
    there, here, (cache, other), step, (ids, lengths, tables) = made
    live = lengths >= 0
    for i in range(steps):
        inputs = ids + i, np.where(live, lengths + i, -1).astype(np.int32), tables
        arrays = [to_device(x, there.device) for x in inputs]
        before = to_host(cache.arrays[0]).copy()
        got, written = to_host(step(*arrays)).copy(), to_host(cache.arrays[0]).copy()
        cache.arrays[0][...] = to_device(before, there.device)
        expected = to_host(separate(there, cache, step, *arrays))
        assert (written != before).any()
        assert same_bytes(written, to_host(cache.arrays[0]))
        assert same_bytes(got[live], expected[live])
        oracle = on_cpu(here, other, *inputs)[live]
        most = 1e-5 if precision == "fp32" else 0.05
        most *= 1 if there.device == "sim" else 4  # wider models; a wrong kernel is about 1 off
        assert np.abs(got[live] - oracle).max() / np.abs(oracle).max() <= most


@pytest.mark.parametrize("precision, lengths, changes", CASES)
def test_the_bits_of_the_separate_kernels(monkeypatch, precision, lengths, changes):
    few_keys = attention.Config(WARPS, 1, 16, 32, prefetched=16)
    check_bits(monkeypatch, few_keys, precision, lengths, **changes)


WIDE = dict(dim=576, n_heads=9, n_kv_heads=3, head_dim=64, hidden_dim=1536, vocab_size=3001)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [(400,), (900, 5, -1), (0, 17, 100, 200, 300, 400, 500, 600)])
def test_the_bits_on_a_gpu(monkeypatch, precision, lengths):
    """With as many blocks as the GPU runs. A block that does not wait long enough would change some bits in 20 steps."""
    config = attention.Config(8, 1, 192, 32, prefetched=512)
    rest = dict(steps=20, capacity=1024, layers=3, device="gpu", qk_norm=False, max_seq_len=1024)
    check_bits(monkeypatch, config, precision, lengths, **WIDE | rest)


def test_the_tokens_of_the_engine(monkeypatch):
    """Greedy and random sampling, and one step object used twice: its counters are never reset."""
    monkeypatch.setattr(
        one_kernel, "make_step", functools.partial(one_kernel.make_step, warps=WARPS)
    )
    there, here = pair()
    options = dict(max_new_tokens=[3, 3], temperature=[0.0, 1.0], top_k=5, seed=3)
    served = Engine(there, 2, 16, one_kernel=True)
    prompts = [[1, 2, 3], [6]]
    assert served.generate(prompts, **options) == Engine(here, 2, 16).generate(prompts, **options)
    assert served.one_kernel_steps.keys() == {2}


# ----------------------------------------------------------------------------- bugs
BUGS = [
    ("arrive", "    cuda.syncthreads()  # all threads have written\n", ""),
    ("arrive", "atomic_add_release(counters, i, int64(1))", "cuda.atomic.add(counters, i, int64(1))"),
    ("wait_for_count", "< target", "< target - 1"),
    ("wait_for_count", "    cuda.syncthreads()\n", ""),
]  # fmt: skip


@pytest.mark.parametrize("name, old, new", BUGS, ids=["barrier", "fence", "off by one", "order"])
def test_planted_bugs_are_found(name, old, new):
    with with_planted_bug([step_kernel], name, old, new), pytest.raises(RaceError):
        _, _, _, step, inputs = make(lengths=(1,))
        step(*(to_device(x, "sim") for x in inputs))


def test_an_arrival_that_never_comes():
    bug = with_planted_bug([step_kernel], "wait_for_count", "< target", "< target + 1")
    with bug, pytest.raises(DeadlockError, match="while load_acquire"):
        _, _, _, step, inputs = make(lengths=(1,))
        step(*(to_device(x, "sim") for x in inputs))


def test_a_block_too_many(monkeypatch):
    """It is refused before the launch; if it were launched, the simulator would find the deadlock."""
    _, _, _, step, inputs = make(lengths=(1,))
    arrays, most = [to_device(x, "sim") for x in inputs], RESIDENT_IN_SIMULATOR
    monkeypatch.setattr(step_kernel, "resident_blocks", lambda *_, **__: most + 1)
    text = (
        f"step_kernel: its {most + 1} blocks wait for each other, but only {most} run at the same"
    )
    with pytest.raises(ValueError, match=text):
        step(*arrays)
    unchecked = lambda kernel, grid, block, *args, shared, resident: run(
        kernel, grid, block, *map(_argument, args), shared=shared, resident=most
    )
    monkeypatch.setattr(step_kernel, "launch", unchecked)
    with pytest.raises(DeadlockError, match=f"1 of {most + 1} blocks have not started"):
        step(*arrays)


def _argument(x):
    return np.int64(x) if isinstance(x, int) else x


# ----------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "changes, options, text",
    [
        (dict(sliding_window=4), {}, "a sliding window"),
        (dict(no_rope_layers=(0,), qk_norm=False), {}, "layers without RoPE"),
        (dict(dim=30), {}, "a product of 30 columns, expected a multiple of 4"),
        ({}, dict(batch_invariant=True), "one_kernel and batch_invariant cannot be combined"),
        ({}, dict(weights="int8"), "one_kernel and weights 'int8' cannot be combined"),
    ],
)
def test_what_is_refused(changes, options, text):
    there, _ = pair(**changes)
    with pytest.raises(UserError, match=text):
        Engine(there, 2, 16, one_kernel=True, **options)


def test_the_cpu_is_refused():
    _, here = pair()
    assert isinstance(here, Transformer) and not isinstance(here.arena.weights, SimArray)
    with pytest.raises(UserError, match="it is on the CPU"):
        Engine(here, 2, 16, one_kernel=True)


def test_heads_whose_sums_need_too_much_shared_memory():
    """ptxas refuses more than 48 KB, and the engine would find out at the first token."""
    there, _ = pair("bf16", n_heads=16, head_dim=128)
    text = (
        "16 heads of 128 share a key head: 81232 bytes of shared memory, at most 49152 are possible"
    )
    with pytest.raises(UserError, match=text):
        Engine(there, 2, 16, one_kernel=True)


def test_tokens_that_need_too_much_shared_memory():
    """16 heads of 64 to a key head, matrices of 4000 columns: 8 tokens need more than 99 KB, the limit of many GPUs."""
    widths = dict(C=4000, H=16, G=1, D=64, F=3072, V=32000, L=1, S=16)
    shape = lambda N: step_kernel.StepShape(N=N, half=True, qk_norm=False, bias=False, **widths)
    assert step_kernel.no_room(shape(4), 99 << 10) == ""
    text = f"110976 bytes of shared memory for 8 tokens, this GPU has {99 << 10}"
    assert step_kernel.no_room(shape(8), 99 << 10) == text
    assert step_kernel.no_room(shape(8), 227 << 10) == ""


def test_shared_memory_as_ptxas_counts_it():
    """Of the kernels for a Llama of 135 M parameters and one token, of 1.1 B and eight: CUDA 13, sm_80, sm_90, sm_120."""
    shape = functools.partial(step_kernel.StepShape, D=64, V=128, L=1, S=64, half=True, qk_norm=False, bias=False)  # fmt: skip
    assert shape(N=1, C=576, H=9, G=3, F=1536).fixed_shared == 16256
    assert shape(N=8, C=2048, H=32, G=4, F=5632).fixed_shared == 27520


def test_more_rows_than_one_kernel_supports():
    assert one_kernel.fits(8) and not one_kernel.fits(9)
    assert step_kernel.obstacle(9, 32, 32, 32, False) == "9 tokens, at most 8 are supported"
