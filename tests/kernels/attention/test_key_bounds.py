"""key_bounds.py: a sliding window, documents in a row. References against brute force, every attention kernel against them."""

import numpy as np
import pytest
from checks import GPU, assert_as_good, assert_directional, rng, to_host, to_kernel
from flash_attention_cases import BF16, case, small_bf16_tiles, small_fp32_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from test_context_attention import case as context_case
from test_decode_attention import case as decode_case
from test_decode_attention import few_warps, widened
from test_flash_attention_hopper import ONE, on_hopper

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention.context_attention import context_attention, context_attention_ref
from xtrain.kernels.attention.decode_attention import decode_attention, decode_attention_ref
from xtrain.kernels.attention.key_bounds import (
    KeyBounds,
    document_bounds,
    document_bounds_ref,
)

__all__ = ["few_warps", "on_hopper", "small_bf16_tiles", "small_fp32_tiles"]


def starts_of(B, T, documents=3, seed=0):
    """(B, T) int32, random"""
    starts = np.zeros((B, T), np.int32)
    for row in starts:
        for cut in sorted(
            rng(seed, T).choice(np.arange(1, T), min(documents - 1, T - 1), replace=False)
        ):
            row[cut:] = cut
        seed += 1
    return starts


# ----------------------------------------------------------------------------- the bounds
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 12), st.integers(1, 5), st.integers(0, 13), st.integers(0, 9)
)
def test_documents_against_brute_force(B, T, documents, window, seed):
    starts = starts_of(B, T, documents, seed)
    seen = np.tri(T, dtype=bool) & (np.arange(T) >= starts[..., None])
    if window:
        seen &= np.arange(T) > np.arange(T)[:, None] - window
    first, last, positions = document_bounds_ref(starts, window)
    assert np.array_equal(first, seen.argmax(2))
    assert np.array_equal(last, T - 1 - seen[:, ::-1].argmax(1))
    assert np.array_equal(positions, np.arange(T) - starts)
    bounds, flat = document_bounds(to_kernel(starts), window)
    for ours, x in zip(
        (bounds.first_BT, bounds.last_BS, flat), (first, last, positions.reshape(-1))
    ):
        assert np.array_equal(to_host(ours), x)
    assert np.array_equal(~bounds_on_host(bounds).hidden(T, T) & np.tri(T, dtype=bool), seen)


def bounds_on_host(bounds):
    if bounds.first_BT is None:
        return bounds
    return KeyBounds(0, *(np.array(to_host(x)) for x in (bounds.first_BT, bounds.last_BS)))


@pytest.mark.parametrize("T, S, window", [(5, 5, 1), (5, 5, 3), (3, 7, 2), (3, 7, 6), (4, 4, 9)])
def test_window_against_brute_force(T, S, window):
    hidden = KeyBounds(window).hidden(T, S)[0]
    for t in range(T):
        p = t + S - T
        assert [s for s in range(p + 1) if not hidden[t, s]] == list(range(p + 1))[-window:]


@pytest.mark.parametrize("bounds", [KeyBounds(2), document_bounds(starts_of(2, 5))[0]])
def test_reference_against_calculus(bounds):
    q, k, v, do = case(2, 5, 5, 4, 2, 3)
    o, lse = fa.flash_attention_ref(q, k, v, 0.4, True, bounds)
    f = lambda q, k, v: float((fa.flash_attention_ref(q, k, v, 0.4, True, bounds)[0] * do).sum())
    gradients = fa.flash_attention_bwd_ref(do, q, k, v, o, lse, 0.4, True, bounds)
    assert_directional(f, (q, k, v), gradients)


def test_bounds_that_do_not_fit():
    q, k, v, _ = case(1, 3, 5, 1, 1, 4, dtype=np.float32)
    for bounds, causal, words in (
        (KeyBounds(2), False, "need a causal mask"),
        (KeyBounds(-2), True, "window of -2"),
        (document_bounds(starts_of(1, 3))[0], True, "as many keys as queries"),
    ):
        with pytest.raises(ValueError, match=words):
            fa.flash_attention_fwd(q, k, v, 0.4, causal, bounds)
    for starts in ([[1, 1]], [[0, 0], [0, -1]], [[0, 1, 0]]):
        with pytest.raises(ValueError, match="must not decrease"):
            document_bounds(np.array(starts, np.int32))


# ----------------------------------------------------------------------------- the kernels of training
DOCUMENTS = "documents"
CASES = [  # dtype, wgmma, B, T, S, H, G, D, window
    (np.float32, False, 2, 21, 21, 1, 1, 4, DOCUMENTS),
    (np.float32, False, 1, 21, 37, 1, 1, 4, 7),
    (BF16, False, 1, 40, 40, 2, 1, 16, DOCUMENTS),
    (BF16, False, 1, 40, 75, 1, 1, 16, 20),
    (BF16, False, 1, 20, 20, 1, 1, 128, DOCUMENTS),
    (BF16, False, 1, 6, 20, 1, 1, 256, 9),
    (np.float32, False, 1, 5, 20, 2, 1, 130, 7),
    (BF16, True, 1, 70, 110, 1, 1, 64, 40),
    (BF16, True, 1, 90, 90, 1, 1, 64, DOCUMENTS),
]
if GPU:
    CASES += [
        (dtype, wgmma, B, T, S, 4, 2, D, window)
        for dtype, wgmma in ((np.float32, False), (BF16, False), (BF16, True))
        for D in (64, 128, 256)
        for B, T, S, window in (
            (2, 1000, 1000, DOCUMENTS), (2, 1000, 1000, 1), (1, 700, 1300, 129), (1, 1300, 1300, 1000)
        )
    ]  # fmt: skip


def check_flash(dtype, wgmma, B, T, S, H, G, D, window, monkeypatch):
    monkeypatch.setattr(fa, "HOPPER", wgmma)
    host = KeyBounds(window) if window != DOCUMENTS else document_bounds(starts_of(B, T, 5))[0]
    kernel = host if window != DOCUMENTS else document_bounds(to_kernel(starts_of(B, T, 5)))[0]
    q, k, v, do = case(B, T, S, H, G, D, dtype=dtype)
    scale = D**-0.5

    def everything(bounds, put, *arrays):
        q, k, v, do = map(put, arrays)
        o, lse = fa.flash_attention_fwd(q, k, v, scale, True, bounds)
        more = fa.flash_attention_bwd(do, q, k, v, o, lse, scale, True, None, bounds)
        return [np.asarray(to_host(x)) for x in (o, lse, *more)]

    got, single = (
        everything(kernel, to_kernel, q, k, v, do),
        everything(host, np.array, q, k, v, do),
    )
    exact = everything(host, np.array, *(x.astype(np.float64) for x in (q, k, v, do)))
    for name, x, e, s in zip(("o", "lse", "dq", "dk", "dv"), got, exact, single):
        floor = 2e-6 if dtype == np.float32 or name == "lse" else 1e-2
        assert_as_good(x, e, s, what=f"{name} {window}", floor=floor)
    if GPU:  # the same bits twice
        again = everything(kernel, to_kernel, q, k, v, do)
        assert all(np.array_equal(x, y) for x, y in zip(got, again))


@pytest.mark.long
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_kernels(shape, monkeypatch, request):
    if not GPU and shape[1]:
        monkeypatch.setattr(fa, "HOPPER", True)
        request.getfixturevalue("on_hopper")(ONE)
    elif not GPU:
        request.getfixturevalue("small_bf16_tiles" if shape[0] == BF16 else "small_fp32_tiles")
    check_flash(*shape, monkeypatch)


# ----------------------------------------------------------------------------- the kernels of serving
@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("window", [1, 7, 40])
def test_prefill(dtype, window):
    for D in (16, 64, 256) if GPU else (16,):
        *arrays, longest, scale = context_case(
            [20, 3], [30, 0], *((2, 1) if GPU else (1, 1)), D, dtype, S=64 if GPU else 16
        )
        put = [to_kernel(x) for x in arrays]
        got = to_host(context_attention(*put, longest, scale, window))
        single = context_attention(*arrays, longest, scale, window)
        wide = [x.astype(np.float64) for x in arrays[:3]]
        exact = context_attention_ref(*wide, *arrays[3:], scale, window)
        assert_as_good(got, exact, single, what="o", floor=1e-6 if dtype == np.float32 else 4e-3)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("window", [1, 7, 20, 100])
def test_decoding(few_warps, dtype, window):
    for D in (16, 256) if GPU else (16,):
        args = decode_case([0, 70, 31], 2, 1, D, 90, dtype)
        put = [to_kernel(a) if isinstance(a, np.ndarray) else a for a in args]
        got = to_host(decode_attention(*put, window=window))
        single = decode_attention(
            *[np.array(a) if isinstance(a, np.ndarray) else a for a in args], window=window
        )
        exact = decode_attention_ref(*widened(args, np.float64), window)
        assert_as_good(got, exact, single, what="o", floor=2e-6 if dtype == np.float32 else 4e-3)
