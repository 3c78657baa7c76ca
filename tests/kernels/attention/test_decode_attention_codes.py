"""decode_attention.py on a cache of codes: the kernel against the reference, the codes that it appends, planted bugs."""

import functools

import numpy as np
import pytest
from checks import (
    GPU,
    assert_as_good,
    normal,
    planted_bugs,
    sentinels,
    to_host,
    to_kernel,
    with_bug,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode_attention import BF16, case, few_warps, int32, related_rows, widened

from xtrain.kernels.attention import decode_attention as file
from xtrain.kernels.attention import decode_attention_loops as loops
from xtrain.kernels.attention import decode_attention_parts as parts
from xtrain.kernels.attention.decode_attention import (
    decode_attention,
    decode_attention_ref,
    make_decode_kernel,
)
from xtrain.kernels.decoding.kv_codes import append_codes, kv_codes_ref, kv_values_ref
from xtrain.kernels.qk_norm_rope import qk_norm_rope_fwd
from xtrain.simulator import KernelError

__all__ = ["few_warps"]


def code_case(*shape, norm=False, S=16):
    """-> the arguments of decode_attention, scales. Where no sequence has tokens, codes and scales are NaN.

    Keys and values of each token and head have different sizes, so that no scale can replace another.
    """
    args = list(case(*shape, BF16, norm, S))
    scales = np.empty((*args[1].shape[:3], 2), np.float32)
    for i in (1, 2):
        x = args[i].astype(np.float32) * 2.0 ** (
            normal(20 + i, *args[i].shape[:3], 1) / (1 if i == 2 else 4)
        )
        unused = np.isnan(x).any(-1)
        codes, scale = kv_codes_ref(np.nan_to_num(x).astype(BF16))
        args[i] = np.where(unused[..., None], np.uint8(0x7F), codes)
        scales[..., i - 1] = np.where(unused, np.nan, scale)
    return (*args, scales)


def run(args, put, **more):
    """-> o, codes of k, of v, scales after the launch"""
    given_ = [put(a) if isinstance(a, np.ndarray) else a for a in args]
    o = decode_attention(*given_[:-1], scales_RGS2=given_[-1], **more)
    return tuple(to_host(a) for a in (o, *given_[1:3], given_[-1]))


def check(args, **more):
    got, single = run(args, to_kernel, **more), run(args, np.array, **more)
    exact = widened(args, np.float64)
    o64 = decode_attention_ref(*exact[:-1], scales_RGS2=exact[-1], **more)
    assert got[0].dtype == BF16
    assert_as_good(got[0], o64, single[0], floor=4e-3)
    same_codes(got[1:], single[1:])
    return got


@pytest.mark.long
def test_successive_tokens_of_one_sequence_in_one_launch(monkeypatch):
    """The bits of one launch after the other. By one block: several would write the same codes at the same time."""
    monkeypatch.setattr(file, "MULTIPROCESSORS", 1)
    config = file.Config(4, 1, 16, 32, prefetched=16)
    monkeypatch.setattr(file, "choose", lambda *_: config)
    make_decode_kernel.cache_clear()
    *args, scales = code_case([15, 3, 3, 5], 2, 1, 32, 32)
    alone, together, order, previous = related_rows(args, 15, 3)
    caches = [to_kernel(x) for x in (*args[1:3], scales)]
    put = lambda x: to_kernel(x) if isinstance(x, np.ndarray) else x
    rows = [
        decode_attention(put(row[0]), *caches[:2], *map(put, row[3:]), scales_RGS2=caches[2])
        for row in alone
    ]
    one_by_one = np.concatenate([to_host(x) for x in rows])
    o, *written = run((*together, scales), to_kernel, previous_B=put(previous))
    make_decode_kernel.cache_clear()
    assert np.array_equal(o, one_by_one[order])
    assert all(np.array_equal(to_host(x), y, equal_nan=True) for x, y in zip(caches, written))


def same_codes(a, b):
    """A key may be rounded to another bf16, and then a number of its row to the next code: very few do."""
    for x, y in zip(a[:2], b[:2]):
        assert np.abs(x.astype(int) - y.astype(int)).max() <= 1 and (x != y).mean() < 1e-3
    np.testing.assert_allclose(a[2], b[2], rtol=2.0**-7)


SHAPES = [  # lengths, H, G, D, capacity
    ([3], 2, 1, 32, 8),
    ([0, 20], 4, 2, 32, 40),
    ([20, 7], 8, 1, 64, 24),
    ([20], 2, 1, 128, 24),
    ([20], 4, 2, 256, 24),
    ([17], 9, 1, 64, 24),  # more than 8 query heads share a key head
]
if GPU:
    SHAPES += [
        ([4000, 129, 7000], 32, 4, 64, 8192),
        ([5000, 1], 16, 8, 128, 5001),
        ([3000, 1], 4, 1, 256, 3001),
    ]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape):
    check(code_case(*shape, norm=len(shape[0]) > 1, S=64 if GPU else 16))


@pytest.mark.long
@pytest.mark.parametrize("S", [32, 48, 64])
def test_block_sizes(S):
    check(code_case([2, 33], 2, 1, 32, 2 * S, S=S))


@pytest.fixture
def short_splits(monkeypatch):
    monkeypatch.setattr(parts, "CHUNK", 16)
    monkeypatch.setattr(parts, "FEW_CHUNK", 16)


@pytest.mark.long
def test_several_splits_and_a_window(short_splits, few_warps, monkeypatch):
    args = code_case([36, 3], 2, 1, 32, 48, norm=True)
    check(args)
    check(args, window=20)
    with sentinels(monkeypatch):
        first = run(args, to_kernel, cache_ready=True)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, run(args, to_kernel)))


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_lengths_heads_and_batch(data):
    G, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    S, M = data.draw(st.sampled_from([16, 32, 48])), data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(-1, min(M * S, 24)), min_size=1, max_size=3))
    check(code_case(lengths, G * group, G, 32, M * S, norm=data.draw(st.booleans()), S=S))


def test_it_is_attention_over_what_the_codes_stand_for():
    """The reference with codes against the reference with the numbers that they stand for, in float64."""
    args = code_case([20, 3], 4, 2, 32, 24, norm=True)
    exact = widened(args, np.float64)
    o = decode_attention_ref(*exact[:-1], scales_RGS2=exact[-1])
    # the new token's codes are in the cache now
    numbers = [kv_values_ref(np.where(exact[i] == 0x7F, 0, exact[i]), np.nan_to_num(exact[-1][..., i - 1]), np.float64) for i in (1, 2)]  # fmt: skip
    again = [*exact[:1], *numbers, *exact[3:-1]]
    own = [(args[4][b, t // 16], t % 16) for b, t in enumerate(args[3])]
    kept = [[x[r, :, s].copy() for r, s in own] for x in numbers]
    want = decode_attention_ref(*again)
    # it has written the new key and value without rounding: they are the codes', but for the rounding
    for x, before in zip(numbers, kept):
        for (r, s), row in zip(own, before):
            scale = np.abs(row).max(-1, keepdims=True)
            assert (np.abs(x[r, :, s] - row) <= np.maximum(np.abs(row), scale * 0.01) / 14).all()
    np.testing.assert_allclose(o, want, atol=0.05)
    assert np.abs(o - want).max() > 0


@pytest.mark.long
def test_prefill_and_decoding_append_the_same_codes(few_warps):
    """Values get identical codes in both, keys may differ in the last bit of their bf16."""
    H, G, D, lengths = 4, 2, 64, [17, 3, 30]
    args = code_case(lengths, H, G, D, 32)
    _, *decoded = run(args, to_kernel)
    qkv, t = to_kernel(args[0]), int32(lengths)
    angles = map(to_kernel, args[5:7])
    _, k, v, _ = qk_norm_rope_fwd(qkv, None, None, *angles, H, G, 1, 1e-6, to_kernel(t))
    places = [args[4][b, n // 16] for b, n in enumerate(lengths)], [n % 16 for n in lengths]
    prefilled = [to_kernel(args[i]) for i in (1, 2, -1)]
    append_codes(*prefilled, k, v, *(to_kernel(int32(x)) for x in places))
    same_codes([to_host(x) for x in prefilled], decoded)
    assert np.array_equal(to_host(prefilled[1]), decoded[1])  # values are not rotated: no rounding


@functools.cache
def valid_blocks():
    """-> arguments, then o and the cache after the launch"""
    args = code_case([36, 5], 2, 1, 32, 48)
    return args, run(args, to_kernel)


@pytest.mark.parametrize("which, entry", [(0, -1), (0, 7), (2, -1), (2, 2**31 - 1)])
def test_invalid_blocks(short_splits, few_warps, which, entry):
    args, want = valid_blocks()
    assert len(args[1]) == 7
    tables = args[4].copy()
    tables[0, which] = entry
    args = (*args[:4], tables, *args[5:])
    o, *caches = run(args, to_kernel)
    assert np.isnan(o[0].astype(float)).all() and np.array_equal(o[1], want[0][1])
    if which == 0:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(caches, want[1:]))
    with pytest.raises(ValueError, match=f"a table names block {entry}, the cache has 7"):
        run(args, np.array)


def test_idle_entries():
    args = code_case([-1, 16, 3], 4, 2, 32, 16)
    for put in (to_kernel, np.array):
        o = run(args, put)[0]
        assert not o[:2].any() and o[2].all()


@pytest.mark.parametrize("what", ["key", "value"])
def test_a_token_that_is_not_finite(what):
    """All that is computed from it is NaN."""
    H, G, D = 2, 1, 32
    args = code_case([20, 3], H, G, D, 24)
    args[0][0, (H + (what == "value") * G) * D + 3] = np.inf
    for put in (to_kernel, np.array):
        with np.errstate(invalid="ignore"):
            o, *_, scales = run(args, put)
        assert np.isnan(o[0].astype(float)).all() and not np.isnan(o[1].astype(float)).any()
        assert np.isnan(scales[args[4][0, 1], 0, 4, int(what == "value")])


BUGS = [  # module, name of a factory in it, a line, the changed line
    (loops, "make_attend_tensor", "s[b, i] *= of_k[i // 2]", "s[b, i] *= of_k[0]"),
    (loops, "make_attend_tensor", "s[b, i] *= of_v[i // 2]", "s[b, i] *= of_k[i // 2]"),
    (loops, "make_attend_tensor", "scales[at + 1] * UNIT", "scales[at + 1]"),
    (loops, "make_attend_tensor", "min(n, last)", "n"),
    (loops, "make_attend_tensor", "start // D + int64", "start + int64"),
    (loops, "make_load_codes", "fk[K_WORDS * c + j, 2 * i + m]", "fk[K_WORDS * c + j, i + 2 * m]"),
    (loops, "make_load_codes", "fq[b, K_WORDS * c + j, i]", "fq[b, K_WORDS * c + j, 1 - i]"),
    (loops, "make_load_codes", "                    interleave_codes(both)\n", ""),
    (loops, "make_load_codes", "+ EACH * (lane & 3)", "+ 8 * (lane & 3)"),
    (parts, "make_new_heads", "scales, 2 * (at // D) + 1, new1", "scales, 2 * (at // D), new1"),
    (parts, "make_new_heads", "store_codes(cache.k, at, cache.scales", "store_codes(cache.k, at + D, cache.scales"),
    (file, "make_decode_kernel", "attend = make_attend_tensor(D, S, HEADS, LIVE, WARPS, WINDOW > 0, CODES)", "attend = make_attend_tensor(D, S, HEADS, LIVE, WARPS, WINDOW > 0)"),
]  # fmt: skip


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize("module, name, old, new", BUGS, ids=[x[3] for x in BUGS])
def test_planted_bugs_are_found(few_warps, monkeypatch, module, name, old, new):
    broken = with_bug(getattr(module, name), old, new, dict(vars(module)))[name]
    makers = (
        make_decode_kernel,
        loops.make_attend_tensor,
        loops.make_load_codes,
        parts.make_new_heads,
    )
    for user in (module, file):
        if hasattr(user, name):
            monkeypatch.setattr(user, name, broken)
    for f in makers:
        f.cache_clear()
    try:
        with pytest.raises((KernelError, AssertionError)):
            check(code_case([37, 5], 2, 1, 64, 48))
    finally:
        for f in makers:
            f.cache_clear()


def test_bad_input():
    args = code_case([3], 4, 2, 32, 8)
    replace = lambda i, x: (*args[:i], x, *args[i + 1 :])
    for bad, error, message in (
        (replace(1, args[1].astype(BF16)), TypeError, "k codes is bfloat16, expected uint8"),
        (replace(11, args[-1][:, :1].copy()), ValueError, "scales has shape"),
        (replace(0, args[0].astype(np.int32)), TypeError, "qkv is int32"),
    ):
        with pytest.raises(error, match=message):
            run(bad, np.array)
    with pytest.raises(ValueError, match="float32, the GPU kernel for codes is for bf16"):
        run(replace(0, args[0].astype(np.float32)), to_kernel)
    with pytest.raises(
        ValueError, match=r"head dim 16, the GPU kernels support \(32, 64, 128, 256\)"
    ):
        run(code_case([3], 2, 1, 16, 8), to_kernel)
