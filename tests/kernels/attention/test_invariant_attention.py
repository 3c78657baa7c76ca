"""In batch-invariant mode, attention of training and of serving compute the same bits for every position of a sequence."""

import functools

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, planted_bugs, rng, to_host, to_kernel, with_bug
from flash_attention_cases import small_fp32_tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.attention import context_attention as serving
from xtrain.kernels.attention import flash_attention as training
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention.flash_attention import flash_attention_bwd, flash_attention_fwd
from xtrain.kernels.runtime.invariance import batch_invariant

__all__ = ["small_fp32_tiles"]
BF16 = ml_dtypes.bfloat16


def sequence(T, H, G, D, dtype, seed=0):
    """-> q (T, H, D), k, v (T, G, D)"""
    return tuple(normal((seed, i), T, n, D).astype(dtype) for i, n in enumerate((H, G, G)))


def trained(sequences, put):
    """-> o (T, H, D) of each sequence; those of the same length are one batch."""
    with batch_invariant():
        out = {}
        for T in {len(q) for q, _, _ in sequences}:
            same = [i for i, (q, _, _) in enumerate(sequences) if len(q) == T]
            q, k, v = (put(np.stack(x)) for x in zip(*[sequences[i] for i in same]))
            o, _ = training.flash_attention_fwd(q, k, v, q.shape[-1] ** -0.5, True)
            out |= dict(zip(same, to_host(o)))
    return [out[i] for i in range(len(sequences))]


def served(sequences, cuts, put, S=16, seed=0):
    """-> o (T, H, D) of each sequence. Pass i computes, for each sequence a, the positions cuts[a][i] .. cuts[a][i + 1] - 1."""
    (_, _, D), G = sequences[0][0].shape, sequences[0][1].shape[1]
    M = max(-(-len(q) // S) for q, _, _ in sequences) + 1
    R = M * len(sequences) + 1
    tables = rng(7, seed).permutation(R)[:-1].astype(np.int32).reshape(len(sequences), M)
    caches = [np.full((R, G, S, D), np.nan, sequences[0][0].dtype) for _ in "kv"]
    out = [np.full(q.shape, np.nan, q.dtype) for q, _, _ in sequences]
    for i in range(max(map(len, cuts)) - 1):
        now = [(a, c[i], c[i + 1]) for a, c in enumerate(cuts) if i + 1 < len(c)]
        for a, first, last in now:
            p = np.arange(first, last)
            for cache, x in zip(caches, sequences[a][1:]):
                cache[tables[a, p // S], :, p % S] = x[p]
        q = np.concatenate([sequences[a][0][first:last] for a, first, last in now])
        edges = np.cumsum([0, *[last - first for _, first, last in now]]).astype(np.int32)
        history = np.array([first for _, first, _ in now], np.int32)
        arrays = [put(x) for x in (q, *caches, edges, history, tables[[a for a, _, _ in now]])]
        longest = max(last - first for _, first, last in now)
        with batch_invariant():
            o = to_host(serving.context_attention(*arrays, longest, D**-0.5))
        for b, (a, first, last) in enumerate(now):
            out[a][first:last] = o[edges[b] : edges[b + 1]]
    return out


def check(sequences, cuts, put, S=16):
    for a, b in zip(trained(sequences, put), served(sequences, cuts, put, S), strict=True):
        assert not np.isnan(a.astype(np.float32)).any()
        assert np.array_equal(a, b), np.argwhere(a != b)[:3]


CASES = [  # lengths, H, G, D, cuts, dtype; tiles of 16 tokens in float32, of 64 in bf16
    ([20, 20], 1, 1, 16, [[0, 9, 10, 20], [0, 1, 20]], np.float32),
    ([18], 2, 1, 32, [[0, 16, 18]], np.float32),
    ([18], 1, 1, 128, [[0, 17, 18]], np.float32),
    ([20, 20], 1, 1, 16, [[0, 9, 10, 20], [0, 1, 20]], BF16),
    ([70], 1, 1, 16, [[0, 69, 70]], BF16),
    ([18], 2, 1, 32, [[0, 16, 18]], BF16),
    ([19], 1, 1, 64, [[0, 18, 19]], BF16),
    ([18], 1, 1, 128, [[0, 17, 18]], BF16),
]
LARGE = [
    ([1500, 301, 64], 8, 2, D, [[0, 700, 701, 1499, 1500], [0, 64, 128, 301], [0, 63, 64]], dtype)
    for D in (16, 32, 64, 128)
    for dtype in (np.float32, BF16)
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES + (LARGE if GPU else []), ids=str)
def test_kernels(case):
    """Also where training would use wgmma, and tiles for other lengths, if it were not for the mode."""
    lengths, H, G, D, cuts, dtype = case
    sequences = [sequence(T, H, G, D, dtype, a) for a, T in enumerate(lengths)]
    check(sequences, cuts, to_kernel, 64 if D == 16 else 16)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_references(data):
    draw = data.draw
    G, D, dtype = draw(st.integers(1, 3)), draw(st.integers(1, 70)), draw(st.sampled_from("fde"))
    H, lengths = (
        G * draw(st.integers(1, 3)),
        draw(st.lists(st.integers(1, 150), min_size=1, max_size=3)),
    )
    cut = lambda T: [
        0,
        *sorted(draw(st.sets(st.integers(1, T - 1), max_size=3)) if T > 1 else ()),
        T,
    ]
    sequences = [
        sequence(T, H, G, D, BF16 if dtype == "e" else dtype, a) for a, T in enumerate(lengths)
    ]
    check(sequences, [cut(T) for T in lengths], np.array, draw(st.sampled_from([16, 64])))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_tiled_reference_is_attention_and_has_its_gradients(dtype):
    q, k, v = (x[None] for x in sequence(150, 4, 2, 12, dtype))
    do, tolerance = normal(9, *q.shape).astype(dtype), 1e-5 if dtype == np.float32 else 1e-12
    results = []
    for on in (False, True):
        with batch_invariant(on):
            o, lse = flash_attention_fwd(q, k, v, 0.3, True)
        results.append((o, lse, *flash_attention_bwd(do, q, k, v, o, lse, 0.3, True)))
    assert not np.array_equal(results[0][0], results[1][0])
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# ----------------------------------------------------------------------------- planted bugs
def test_a_reference_whose_sums_depend_on_the_length_is_found(monkeypatch):
    old, new = "p.sum(-1, keepdims=True)", "p[..., : end - b * TILE_S].sum(-1, keepdims=True)"
    scope = with_bug(training.tiled_attention_ref, old, new, dict(vars(training)))
    for module in (training, serving):
        monkeypatch.setattr(module, "tiled_attention_ref", scope["tiled_attention_ref"])
    with pytest.raises(AssertionError):
        check([sequence(60, 2, 1, 16, np.float32)], [[0, 41, 60]], np.array)


KERNEL_BUGS = [  # module, what, old, new, D, dtype, wgmma
    (serving, "make_fp32_kernel", "acc[i, w] * factor", "acc[i, w] / row_sum(total[i])", 16, np.float32, True),
    (training, "_launch_bf16", "T = INVARIANT_T if", "T = q_shape[1] if", 128, BF16, False),
    (serving, "context_attention", "D, INVARIANT_T, True", "D, longest, True", 128, BF16, False),
    (hopper, "choose", "and is_batch_invariant()", "and False", 128, BF16, True),
]  # fmt: skip


@functools.cache
def same_bits(D, dtype, wgmma):
    """-> a sequence, and the o that training and serving compute for it"""
    T = 70 if wgmma and D > 16 else 40
    given_ = [sequence(T, 1, 1, D, dtype)]
    o, served_o = trained(given_, to_kernel)[0], served(given_, [[0, T]], to_kernel)[0]
    assert np.array_equal(o, served_o) and not np.isnan(o.astype(np.float32)).any()
    return given_, o


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize(
    "module, name, old, new, D, dtype, wgmma", KERNEL_BUGS, ids=[x[1] for x in KERNEL_BUGS]
)
def test_a_kernel_that_adds_in_another_order_is_found(
    monkeypatch, module, name, old, new, D, dtype, wgmma
):
    monkeypatch.setattr(training, "HOPPER", wgmma)
    given_, want = same_bits(D, dtype, wgmma)
    monkeypatch.setattr(
        module, name, with_bug(getattr(module, name), old, new, dict(vars(module)))[name]
    )
    if module is serving:
        o = served(given_, [[0, len(want)]], to_kernel)[0]
    else:
        o = trained(given_, to_kernel)[0]
    assert not np.array_equal(o, want)
