"""Tiles: the offsets of chunks, copies in and out, products of tiles against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from checks import normal, to_host, to_kernel

from xtrain.kernels.primitives.ptx import kernel
from xtrain.kernels.primitives.tensor_cores import (
    cp_async_commit,
    cp_async_wait,
    high_bf16,
    low_bf16,
)
from xtrain.kernels.primitives.tiles import (
    WIDTHS,
    make_add_product,
    make_chunk_offset,
    make_copy,
    make_copy_two,
    make_fill,
    make_scores,
    make_store,
)
from xtrain.kernels.runtime.compiler import cuda, float32, uint16, uint32
from xtrain.kernels.runtime.launch import launch

BF16 = ml_dtypes.bfloat16
ROWS = 32


@pytest.mark.parametrize("D", WIDTHS)
def test_chunk_offsets(D):
    """No two chunks overlap; the chunks of any 8 consecutive rows are in 8 different bank groups."""
    chunk_offset = make_chunk_offset(D).py_func
    offsets = np.array([[chunk_offset(r, c) for c in range(D // 8)] for r in range(ROWS)])
    assert np.array_equal(np.sort(offsets.ravel()), np.arange(0, ROWS * D, 8))
    for r in range(0, ROWS, 8):
        for c in range(D // 8):
            assert len(set(offsets[r : r + 8, c] // 8 % 8)) == 8
    for c in range(0, D // 8 - 2, 2):  # ldmatrix's `flip` relies on this
        assert np.array_equal(offsets[:, c + 2], offsets[:, 0] ^ (8 * (c + 2)))


def make_round_trip_kernel(D):
    copy_tile, store_tile = make_copy(D, ROWS, 64), make_store(D, 1)
    load_rows = make_scores(D, 1, 2)[0]
    KS, ND = D // 16, D // 8

    @kernel(64)
    def round_trip_kernel(y, x, first, stride, valid):
        """x -> tile -> fragments -> accumulators -> y, contiguous. Two warps, 16 rows each."""
        smem = cuda.shared.array(0, uint16)
        acc, fa = cuda.local.array((1, ND, 4), float32), cuda.local.array((KS, 1, 4), uint32)
        warp = cuda.threadIdx.x // 32
        copy_tile(smem, 0, x, first, stride, valid)
        cp_async_commit()
        cp_async_wait(0)
        cuda.syncthreads()
        load_rows(fa, smem, 16 * warp * D)
        for k in range(KS):
            for i in range(4):  # the inverse of pack
                n, r = 2 * k + i // 2, i % 2
                acc[0, n, 2 * r] = low_bf16(fa[k, 0, i])
                acc[0, n, 2 * r + 1] = high_bf16(fa[k, 0, i])
        store_tile(acc, smem, 16 * warp * D, y, 16 * warp * D, D, ROWS - 3 - 16 * warp)

    return round_trip_kernel


@pytest.mark.parametrize("D", WIDTHS[:3])
def test_copy_and_store(D):
    x = normal(1, 40, 2, D, dtype=BF16)  # two adjacent heads
    y = to_kernel(np.full((ROWS, D), 9, BF16))
    kernel_ = make_round_trip_kernel(D)
    launch(
        kernel_,
        1,
        64,
        y.reshape(-1),
        to_kernel(x).reshape(-1),
        (2 * 2 + 1) * D,
        2 * D,
        20,
        shared=2 * ROWS * D,
    )
    expected = np.zeros((ROWS, D), BF16)
    expected[:20] = x[2:22, 1]  # beyond the valid rows: zeros
    expected[ROWS - 3 :] = 9  # beyond the stored rows: unchanged
    assert np.array_equal(to_host(y), expected)


def make_product_kernel(D, MT, NT, REGISTERS):
    KS, ND = D // 16, D // 8
    A, B = 16 * MT, 8 * NT
    copy_a, copy_two = make_copy(D, A, 128), make_copy_two(D, B, 128)
    load_rows, scores_of, scores = make_scores(D, MT, NT)
    add_product, store = make_add_product(D, MT, NT), make_store(D, MT)
    clear, fill, scale_rows = make_fill(MT, ND)

    @kernel(128)
    def product_kernel(y, a, b, c):
        """y = 3 (a b^T) c, the scores rounded to bf16. Every warp computes it; the first one writes."""
        smem = cuda.shared.array(0, uint16)
        s, acc = cuda.local.array((MT, NT, 4), float32), cuda.local.array((MT, ND, 4), float32)
        fa, three = cuda.local.array((KS, MT, 4), uint32), cuda.local.array((MT, 2), float32)
        copy_a(smem, 0, a, 0, D, A)
        copy_two(smem, A * D, b, 0, D, c, 0, D, B)
        cp_async_wait(0)
        cuda.syncthreads()
        if REGISTERS:
            load_rows(fa, smem, 0)
            scores_of(s, fa, smem, A * D)
        else:
            scores(s, smem, 0, A * D)
        clear(acc)
        add_product(acc, s, smem, (A + B) * D)
        fill(three, float32(3.0))
        scale_rows(acc, three)
        cuda.syncthreads()
        if cuda.threadIdx.x < 32:
            store(acc, smem, 0, y, 0, D, A)

    return product_kernel


@pytest.mark.parametrize(
    "D, MT, NT", [(16, 1, 2), (32, 2, 4), (64, 1, 4), (128, 1, 2), (256, 1, 2)]
)
@pytest.mark.parametrize("registers", [False, True])
def test_products(D, MT, NT, registers):
    a, b, c = (normal(i, n, D, dtype=BF16) for i, n in enumerate((16 * MT, 8 * NT, 8 * NT)))
    y = to_kernel(np.zeros((16 * MT, D), BF16))
    flat = [to_kernel(x).reshape(-1) for x in (a, b, c)]
    shared = 2 * D * (16 * MT + 16 * NT)
    launch(make_product_kernel(D, MT, NT, registers), 1, 128, y.reshape(-1), *flat, shared=shared)
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    s = (a @ b.T).astype(BF16).astype(np.float32)
    exact = 3 * s @ c
    np.testing.assert_allclose(
        to_host(y).astype(np.float32), exact, atol=2**-8 * np.abs(exact).max()
    )
