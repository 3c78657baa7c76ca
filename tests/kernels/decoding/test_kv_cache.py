"""kv_cache.py: which elements an append writes, and that it changes no others."""

import ml_dtypes
import numpy as np
import pytest
from checks import normal, to_host, to_kernel
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.decoding.kv_cache import (
    BLOCK,
    append_kv,
    append_kv_naive_kernel,
    append_kv_ref,
    empty_kv_cache,
    kv_cache_bytes,
)
from xtrain.kernels.runtime.launch import launch
from xtrain.simulator import sim

BF16 = ml_dtypes.bfloat16


def int32(*values):
    return np.array(values, np.int32)


def case(N, R, G, S, D, dtype, seed=0):
    """-> k, v caches, k, v of N tokens, and a different block and offset for each"""
    caches = [normal(i + seed, R, G, S, D).astype(dtype) for i in (1, 2)]
    tokens = [normal(i + seed, N, G, D).astype(dtype) for i in (3, 4)]
    places = np.random.default_rng(seed).permutation(R * S)[:N]
    return (*caches, *tokens, (places // S).astype(np.int32), (places % S).astype(np.int32))


def check_append(arrays):
    want = [a.copy() for a in arrays]
    append_kv_ref(*want)
    got = [to_kernel(a) for a in arrays]
    append_kv(*got)
    for g, w in zip(got, want):
        assert np.array_equal(to_host(g).view(np.uint8), w.view(np.uint8))
    return want


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (5, 3, 2, 7, 16), (3, 2, 1, 4, 6)])
def test_append(shape, dtype):
    check_append(case(*shape, dtype))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_append_any_shape(data):
    R, G, S = (data.draw(st.integers(1, 4)) for _ in range(3))
    D, N = data.draw(st.sampled_from([2, 8, 10, 32])), data.draw(st.integers(0, R * S))
    check_append(case(N, R, G, S, D, data.draw(st.sampled_from([np.float32, BF16])), seed=N))


def test_tokens_without_a_place_are_skipped():
    arrays = case(4, 2, 2, 3, 8, np.float32)
    places = int32(-1, 0, 1, 1), int32(0, 3, -1, 2)  # no block; beyond; before; a good one
    k, v, *_ = check_append((*arrays[:4], *places))
    for new, old, given_ in ((k, arrays[0], arrays[2]), (v, arrays[1], arrays[3])):
        assert np.array_equal(new[1, :, 2], given_[3])
        new[1, :, 2] = old[1, :, 2]
        assert np.array_equal(new, old)


def test_naive_kernel_agrees():
    arrays = case(3, 2, 2, 4, 8, np.float32)
    want, got = [a.copy() for a in arrays], [to_kernel(a) for a in arrays]
    append_kv_ref(*want)
    launch(append_kv_naive_kernel, (3, 2), BLOCK, *got)
    assert np.array_equal(to_host(got[0]), want[0]) and np.array_equal(to_host(got[1]), want[1])


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_bytes_are_as_announced(dtype):
    kv = empty_kv_cache(np.empty(0), 2, 3, 4, 5, 6, dtype)
    assert kv.shape == (2, 2, 3, 4, 5, 6) and kv.dtype == dtype and not kv.any()
    assert kv.nbytes == kv_cache_bytes(2, 3, 4, 5, 6, dtype)
    assert kv[1, 0].flags.c_contiguous and np.shares_memory(kv[1, 0], kv)


@pytest.mark.parametrize("block, offset", [(1, 0), (2**31 - 1, 0), (-1, 0), (0, 2), (0, -1)])
def test_invalid_blocks_and_offsets_are_skipped(block, offset):
    arrays = case(1, 1, 1, 2, 8, np.float32)
    cache, places = [x.copy() for x in arrays[:2]], (int32(block), int32(offset))
    append_kv(*arrays[:4], *places)
    got = [sim(x) for x in (*arrays[:4], *places)]
    append_kv(*got)
    launch(append_kv_naive_kernel, (1, 1), BLOCK, *got)
    for x in (arrays[:2], got[:2]):
        assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(cache, x))


def test_bad_input():
    k, v, nk, nv, blocks, offsets = case(2, 1, 2, 4, 8, np.float32)
    with pytest.raises(ValueError, match=r"v has shape \(2, 1, 8\), expected \(2, 2, 8\)"):
        append_kv(k, v, nk, nv[:, :1].copy(), blocks, offsets)
    with pytest.raises(TypeError, match="k is bfloat16, expected float32"):
        append_kv(k, v, nk.astype(BF16), nv, blocks, offsets)
    with pytest.raises(TypeError, match="blocks is int64, expected int32"):
        append_kv(k, v, nk, nv, blocks.astype(np.int64), offsets)
    with pytest.raises(ValueError, match=r"offsets has shape \(1,\), expected \(2,\)"):
        append_kv(k, v, nk, nv, blocks, offsets[:1])
    with pytest.raises(ValueError, match="v cache has shape"):
        append_kv(k, v[:, :, :3].copy(), nk, nv, blocks, offsets)
    with pytest.raises(ValueError, match="0 positions, expected at least one"):
        empty_kv_cache(k, 1, 1, 1, 0, 8, np.float32)
    with pytest.raises(ValueError, match="int32, expected float32 or bf16"):
        empty_kv_cache(k, 1, 1, 1, 1, 8, np.int32)
