"""kv_codes.py: the codes against PyTorch's e4m3, the kernels against the reference bit by bit, and what is not finite."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import normal, planted_bugs, same_bytes, to_host, to_kernel, with_bug
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.decoding import kv_codes
from xtrain.kernels.decoding.kv_codes import (
    append_codes,
    append_codes_ref,
    dequantize_blocks,
    empty_kv_codes,
    kv_codes_bytes,
    kv_codes_ref,
    kv_values_ref,
)
from xtrain.simulator import KernelError

BF16 = ml_dtypes.bfloat16


def int32(*values):
    return np.array(values, np.int32)


def cache(R, G, S, D, seed=0):
    """-> codes of k, of v, scales: any numbers"""
    draw = np.random.default_rng(seed)
    codes = [draw.integers(0, 127, (R, G, S, D), np.uint8) for _ in range(2)]
    return (*codes, draw.random((R, G, S, 2), np.float32))


def case(N, R, G, S, D, seed=0):
    """-> arguments of append_codes. Rows of very different sizes; among them zeros, and a value of one channel that is large."""
    tokens = [normal(i + seed, N, G, D) * 10.0 ** normal(i + 9, N, G, 1) for i in (3, 4)]
    tokens[0][:1, 0] = 0
    tokens[1][-1:, 0, 1] = 1e4
    places = np.random.default_rng(seed).permutation(R * S)[:N]
    places = (places // S).astype(np.int32), (places % S).astype(np.int32)
    return (*cache(R, G, S, D, seed), *(x.astype(BF16) for x in tokens), *places)


def check_append(arrays):
    want, got = [a.copy() for a in arrays], [to_kernel(a) for a in arrays]
    append_codes_ref(*want)
    append_codes(*got)
    for g, w in zip(got, want):
        assert same_bytes(to_host(g), w)
    return want


# ----------------------------------------------------------------------------- the codes
def test_codes_are_those_of_pytorch():
    x = normal(1, 50, 2, 32) * 10.0 ** normal(2, 50, 2, 1)
    codes, scales = kv_codes_ref(x)
    np.testing.assert_allclose(scales, np.abs(x).max(-1) / 448, rtol=1e-6)
    want = torch.tensor(x / scales[..., None]).to(torch.float8_e4m3fn)
    assert np.array_equal(codes, want.view(torch.uint8).numpy())
    values = kv_values_ref(codes, scales, np.float32)
    np.testing.assert_allclose(values, want.float().numpy() * scales[..., None], rtol=1e-6)
    largest = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(values - x) <= np.maximum(np.abs(x) / 16, largest * 2.0**-18)).all()


def test_bytes_are_as_announced():
    codes, scales = empty_kv_codes(np.empty(0), 2, 3, 4, 5, 6)
    assert codes.shape == (2, 2, 3, 4, 5, 6) and scales.shape == (2, 3, 4, 5, 2)
    assert not codes.any() and not scales.any()
    assert codes.nbytes + scales.nbytes == kv_codes_bytes(2, 3, 4, 5, 6)


# ----------------------------------------------------------------------------- the kernels
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 2), (5, 3, 2, 7, 32), (3, 2, 1, 4, 6), (9, 2, 2, 16, 128)]
)
def test_append(shape):
    check_append(case(*shape))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_append_any_shape(data):
    R, G, S = (data.draw(st.integers(1, 4)) for _ in range(3))
    D, N = data.draw(st.sampled_from([2, 10, 32, 64, 66])), data.draw(st.integers(0, R * S))
    check_append(case(N, R, G, S, D, seed=N))


def test_slices_of_a_packed_array():
    k, v, scales, _, _, blocks, offsets = case(4, 2, 2, 3, 32)
    packed = normal(7, 4, 6, 32).astype(BF16)
    want = [x.copy() for x in (k, v, scales)]
    append_codes_ref(*want, packed[:, 2:4], packed[:, 4:], blocks, offsets)
    got, there = [to_kernel(x) for x in (k, v, scales)], to_kernel(packed)
    append_codes(*got, there[:, 2:4], there[:, 4:], to_kernel(blocks), to_kernel(offsets))
    assert all(to_host(g).tobytes() == w.tobytes() for g, w in zip(got, want))


def test_tokens_without_a_place_are_skipped():
    arrays = case(4, 2, 2, 3, 8)
    places = int32(-1, 0, 2, 1), int32(0, 3, 0, 2)  # no block; beyond; no block; a good one
    after = check_append((*arrays[:5], *places))
    changed = [np.argwhere((a != b).any(axis=-1))[:, [0, 2]] for a, b in zip(after[:3], arrays)]
    assert all(set(map(tuple, x.tolist())) == {(1, 2)} for x in changed)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [(3, 2, 1, 16), (4, 3, 16, 64), (2, 1, 64, 128)])
def test_dequantize_blocks(shape, dtype):
    arrays, blocks = cache(*shape), int32(1, -1, 0, shape[0])
    outs = [normal(i, *shape).astype(dtype) for i in (1, 2)]
    got = [to_kernel(x) for x in outs]
    dequantize_blocks(*map(to_kernel, arrays), to_kernel(blocks), *got)
    for i, (g, out) in enumerate(zip(got, outs)):
        want = out.copy()
        want[:2] = kv_values_ref(arrays[i], arrays[2][..., i], dtype)[:2]
        assert same_bytes(to_host(g), want)
    host = [x.copy() for x in outs]
    dequantize_blocks(*arrays, blocks, *host)
    assert all(h.tobytes() == to_host(g).tobytes() for h, g in zip(host, got))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_read_as_nan(bad):
    arrays = case(3, 2, 2, 16, 32)
    arrays[3][1, 1, 5], arrays[4][2, 0, 31] = bad, bad
    k, v, scales, *_, blocks, offsets = check_append(arrays)
    outs = [to_kernel(np.zeros(k.shape, BF16)) for _ in range(2)]
    dequantize_blocks(*map(to_kernel, (k, v, scales)), to_kernel(int32(0, 1)), *outs)
    for i, (out, place) in enumerate(zip(outs, ((1, 1), (2, 0)))):
        lost = np.isnan(to_host(out).astype(float)).all(-1)
        assert np.argwhere(lost).tolist() == [[blocks[place[0]], place[1], offsets[place[0]]]], i


# ----------------------------------------------------------------------------- planted bugs
BUGS = [
    ("make_store_codes", "scales[at] = scale if finite else float32(NAN)", "scales[at] = scale"),
    ("make_store_codes", "fmax(magnitude(x1[i]), magnitude(x2[i]))", "magnitude(x1[i])"),
    ("make_store_codes", "codes[to + r + R]", "codes[to + r]"),
    ("make_store_codes", "r = lane + 32 * i", "r = lane"),
    ("make_store_codes", "            if r < R:", "            if r <= R:"),
    ("make_append_codes_kernel", "scales, 2 * row + 1, v", "scales, 2 * row, v"),
    ("make_append_codes_kernel", "(block * G + g) * S + p", "(block * G + g) * S"),
    ("make_append_codes_kernel", "if n >= N:", "if n > N:"),
    ("make_append_codes_kernel", "block >= R or ", ""),
    ("make_dequantize_blocks_kernel", "v_codes, at, scales[2 * row + 1]", "v_codes, at, scales[2 * row]"),
    ("make_dequantize_blocks_kernel", "row = at // D", "row = i // D"),
    ("make_dequantize_blocks_kernel", "store8(out, at + 8, values[8:])", "pass"),
    ("make_dequantize_blocks_kernel", "block < 0 or ", ""),
    ("make_dequantize_blocks_kernel", "or i >= size", ""),
]  # fmt: skip


@planted_bugs
@pytest.mark.parametrize("name, old, new", BUGS, ids=[x[2] for x in BUGS])
def test_planted_bugs_are_found(monkeypatch, name, old, new):
    broken = with_bug(getattr(kv_codes, name), old, new, dict(vars(kv_codes)))[name]
    makers = (kv_codes.make_store_codes, kv_codes.make_append_codes_kernel, kv_codes.make_dequantize_blocks_kernel)  # fmt: skip
    monkeypatch.setattr(kv_codes, name, broken)
    for maker in makers:
        maker.cache_clear()
    try:
        with pytest.raises((KernelError, AssertionError)):
            check_append(case(5, 3, 2, 7, 80))
            test_tokens_without_a_place_are_skipped()
            test_what_is_not_finite_is_read_as_nan(np.inf)
            test_dequantize_blocks((4, 3, 16, 64), BF16)
    finally:
        for maker in makers:
            maker.cache_clear()


# ----------------------------------------------------------------------------- refused
def test_bad_input():
    k, v, scales, new_k, new_v, blocks, offsets = arrays = case(3, 2, 2, 3, 8)
    for i, wrong, error, message in (
        (0, k.astype(BF16), TypeError, "k codes is bfloat16, expected uint8"),
        (1, v[:1], ValueError, r"v codes has shape \(1, 2, 3, 8\)"),
        (2, scales[..., :1].copy(), ValueError, r"scales has shape \(2, 2, 3, 1\)"),
        (2, scales.astype(BF16), TypeError, "scales is bfloat16"),
        (3, new_k[:, :1].copy(), ValueError, "k has shape"),
        (4, new_v.astype(np.float32), TypeError, "v is float32, expected bfloat16"),
        (5, blocks.astype(np.int64), TypeError, "blocks is int64"),
        (6, offsets[:1], ValueError, "offsets has shape"),
    ):
        with pytest.raises(error, match=message):
            append_codes(*arrays[:i], wrong, *arrays[i + 1 :])
    there = [to_kernel(a) for a in arrays]
    with pytest.raises(ValueError, match="float32, the GPU kernel is for bf16"):
        append_codes(*there[:3], *(to_kernel(x.astype(np.float32)) for x in (new_k, new_v)), *there[5:])  # fmt: skip
    outs = [np.zeros(k.shape, BF16) for _ in range(2)]
    with pytest.raises(
        ValueError, match="heads of 8 channels, the GPU kernel needs a multiple of 16"
    ):
        dequantize_blocks(*there[:3], there[5], *map(to_kernel, outs))
    with pytest.raises(TypeError, match="v out is float32"):
        dequantize_blocks(k, v, scales, blocks, outs[0], outs[1].astype(np.float32))
    with pytest.raises(ValueError, match="kv cache: 0 blocks"):
        empty_kv_codes(k, 1, 0, 1, 1, 8)
