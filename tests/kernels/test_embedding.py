"""Embedding: the reference against calculus and PyTorch, the kernels against the reference."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    normal,
    rng,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
)

from xtrain.kernels.embedding import (
    SEGMENT,
    SLICES,
    TILE_IDS,
    VALUES,
    digit_values,
    embedding_bwd,
    embedding_bwd_naive_kernel,
    embedding_bwd_ref,
    embedding_fwd,
    embedding_plan,
    embedding_ref,
    make_sort_kernel,
    make_split_kernel,
    sorting_warps,
)
from xtrain.kernels.primitives.flat import BLOCK
from xtrain.kernels.runtime.launch import launch

BF16 = ml_dtypes.bfloat16
HIGH = digit_values(1)  # tokens per block of the sort kernel
SHAPES = [(1, 1, 1), (3, 8, 5), (9, 37, HIGH + 3), (70, 264, 10)]  # N, C, V
SHAPES += [(7, 4096, 300), (8192, 768, 50304)] if GPU else []


def case(N, C, V):
    """-> ids, w, dx, the old dw; a tenth of the ids are the same, as in text"""
    ids = rng(1, N).integers(0, V, N)
    ids[rng(2, N).random(N) < 0.1] = V // 2
    return ids, normal(3, V, C), normal(4, N, C), normal(5, V, C)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 5), (40, 3, 7)])
def test_reference_against_calculus(shape):
    ids, w, dx, _ = case(*shape)
    w, dx = w.astype(np.float64), dx.astype(np.float64)
    f = lambda w: float((embedding_ref(ids, w) * dx).sum())
    assert_directional(f, (w,), (embedding_bwd_ref(dx, ids, shape[2]),))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, np.int8])
def test_forward_kernel_copies_exactly(dtype):
    for N, C, V in SHAPES:
        ids, w, *_ = case(N, C, V)
        if np.iinfo(dtype).max >= V:
            got = embedding_fwd(to_kernel(ids.astype(dtype)), to_kernel(w))
            assert np.array_equal(to_host(got), w[ids])


@pytest.mark.parametrize("table", [np.float32, BF16])
@pytest.mark.parametrize("rows", [np.float32, BF16])
def test_forward_between_dtypes(table, rows):
    for shape in SHAPES[1:3]:
        ids, w, *_ = case(*shape)
        w = w.astype(table)
        want = w[ids].astype(rows)
        for place in (to_kernel, np.array):
            got = to_host(embedding_fwd(place(ids), place(w), rows))
            assert got.dtype == rows and same_bytes(got, want)
    assert to_host(embedding_fwd(to_kernel(ids), to_kernel(w))).dtype == table


@pytest.mark.parametrize(
    "N, V, T",
    [(9, 5, 32), (600, 127, 64), (TILE_IDS + 70, 70, 32), (70, 521, 1024), (70, 9001, 4096)],
)
def test_the_plan_is_a_stable_sort(N, V, T):
    """Ids outside the table are skipped, including those that the last block would own."""
    ids = rng(1).integers(-2, V + 3, N)
    ids[rng(2).random(N) < 0.3] = V // 2
    plan, tiles = to_kernel(np.full((N, 4), -7, np.int32)), -(-N // TILE_IDS)
    split, first = (to_kernel(np.full(n, -7, np.int32)) for n in (tiles * TILE_IDS, (tiles, T + 1)))
    threads = 32 * sorting_warps(T)
    launch(make_split_kernel(T), tiles, threads, split, first, to_kernel(ids), V)
    launch(make_sort_kernel(T), -(-V // T), threads, plan, split, first)
    n = np.argsort(ids, kind="stable")
    n = n[(ids[n] >= 0) & (ids[n] < V)]
    first = np.searchsorted(ids[n], ids[n], "left")
    last = np.searchsorted(ids[n], ids[n], "right")
    plan = to_host(plan)
    assert np.array_equal(plan[: n.size], np.stack([n, ids[n], first, last], 1))
    assert (plan[n.size :, 2] == -1).all()


def test_two_digits_are_enough():
    sizes = {1: 32, 1 << 8: 32, (1 << 8) + 1: 64, 50304: 512, 1 << 16: 512, 1 << 22: 4096}
    assert {V: digit_values(V) for V in sizes} == sizes
    with pytest.raises(
        ValueError, match="the table has 4194305 rows, at most 4194304 are supported"
    ):
        digit_values((1 << 22) + 1)


def test_a_sorting_block_fits_into_48_kb():
    """Counters, sums of warps and starts of digits, each aligned to 8 bytes as numba-cuda-mlir does"""
    aligned = lambda n: -(-4 * n // 8) * 8
    for T in (32, 64, 128, 256, 512, 1024, 2048, VALUES):
        warps = sorting_warps(T)
        assert aligned(warps * T) + aligned(warps) + aligned(T + 1) <= 48 * 1024
        assert TILE_IDS % (32 * warps) == 0


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_kernel(shape, dtype):
    ids, _, dx, dw0 = case(*shape)
    dx, dw = dx.astype(dtype), to_kernel(dw0)
    assert embedding_bwd(to_kernel(dx), to_kernel(ids), dw) is None
    exact = embedding_bwd_ref(dx.astype(np.float64), ids, shape[2]) + dw0
    reference = embedding_bwd_ref(dx.astype(np.float32), ids, shape[2]) + dw0
    assert_as_good(dw, exact, reference, what="dw")
    untouched = np.setdiff1d(np.arange(shape[2]), ids)
    assert np.array_equal(to_host(dw)[untouched], dw0[untouched])


@pytest.mark.parametrize("shape", [(9, 37, 5), (150, 264, 3)])  # one segment; several
def test_bf16_gradient(shape):
    """The bits of the sum in float32 from zero, rounded once; rows without an id stay."""
    ids, _, dx, _ = case(*shape)
    ids[ids == 1] = 0
    for place in (np.array, to_kernel):
        wide, dw = (place(np.zeros((shape[2], shape[1]), dtype)) for dtype in (np.float32, BF16))
        for out in (wide, dw):
            embedding_bwd(place(dx), place(ids), out)
        assert np.array_equal(to_host(dw), to_host(wide).astype(BF16))
        assert (to_host(dw)[1] == 0).all()


def in_pieces(dx_NC, ids_N, V):
    """The documented order: SEGMENT rows at a time, then segments i, i + SLICES, ..., then the slices."""
    dw_VC = np.zeros((V, dx_NC.shape[1]), np.float32)
    add = lambda rows: functools.reduce(np.add, rows, np.zeros_like(dw_VC[0]))
    for v in range(V):
        rows = dx_NC[ids_N == v]
        segments = [add(rows[i : i + SEGMENT]) for i in range(0, len(rows), SEGMENT)]
        dw_VC[v] = (
            segments[0]
            if len(segments) == 1
            else add([add(segments[s::SLICES]) for s in range(SLICES)])
        )
    return dw_VC


@pytest.mark.long
@pytest.mark.parametrize("length", [SEGMENT, SEGMENT + 1, 2 * SEGMENT, 11 * SEGMENT + 3])
def test_backward_adds_in_a_fixed_order(length):
    """Adjacent tokens with one, two and many segments: the documented bits; up to SEGMENT rows those of the reference."""
    lengths = [3, length, 1, SEGMENT + 5, 2, length]
    ids = rng(1).permutation(np.repeat(np.arange(6), lengths)).astype(np.int32)
    dx = normal(2, ids.size, 9, scale=100.0)
    want, reference = in_pieces(dx, ids, 6), embedding_bwd_ref(dx, ids, 6)
    assert not np.array_equal(reference, embedding_bwd_ref(dx[::-1], ids[::-1], 6))  # order matters
    for _ in range(2):
        dw = to_kernel(np.zeros((6, 9), np.float32))
        embedding_bwd(to_kernel(dx), to_kernel(ids), dw)
        assert np.array_equal(to_host(dw), want)
    short = np.array(lengths) <= SEGMENT
    assert np.array_equal(want[short], reference[short])


def test_naive_kernel_agrees_bit_for_bit():
    ids, _, dx, dw0 = case(30, 9, 5)
    dw, naive = to_kernel(dw0), to_kernel(dw0)
    embedding_bwd(to_kernel(dx), to_kernel(ids), dw)
    grid = (5, -(-9 // BLOCK))
    launch(embedding_bwd_naive_kernel, grid, BLOCK, naive, to_kernel(dx), to_kernel(ids))
    assert np.array_equal(to_host(dw), to_host(naive))


@pytest.mark.parametrize("bad", [-1, HIGH - 3, HIGH, 1 << 40, -(1 << 32)])
def test_an_id_outside_the_table(bad):
    """The CPU names the id. A kernel cannot, so the forward gives NaN and the backward ignores it."""
    V = HIGH - 3  # the last block owns tokens past the end
    ids, w, dx, dw0 = case(6, 4, V)
    ids[2] = bad
    message = f"id {bad} at position 2 is outside the table of {V} rows"
    with pytest.raises(ValueError, match=message):
        embedding_fwd(ids, w)
    with pytest.raises(ValueError, match=message):
        embedding_bwd(dx, ids, dw0.copy())
    x = to_host(embedding_fwd(to_kernel(ids), to_kernel(w)))
    good = np.arange(6) != 2
    assert np.isnan(x[2]).all() and np.array_equal(x[good], w[ids[good]])
    dw, want = to_kernel(dw0), to_kernel(dw0)
    embedding_bwd(to_kernel(dx), to_kernel(ids), dw)
    embedding_bwd(to_kernel(dx[good]), to_kernel(ids[good]), want)
    assert np.array_equal(to_host(dw), to_host(want))


def test_nothing_outside_the_outputs(monkeypatch):
    ids, w, dx, _ = case(9, 5, 7)
    with sentinels(monkeypatch):
        embedding_fwd(to_kernel(ids), to_kernel(w))
    whole = to_kernel(np.full((7 + 4, 5), 7.0, np.float32))
    embedding_bwd(to_kernel(dx), to_kernel(ids), whole[2:-2])
    assert (to_host(whole)[:2] == 7).all() and (to_host(whole)[-2:] == 7).all()


def test_against_pytorch():
    ids, w, dx, _ = case(50, 6, 9)
    tw = torch.tensor(w, requires_grad=True)
    tx = torch.nn.functional.embedding(torch.tensor(ids), tw)
    tx.backward(torch.tensor(dx))
    dw = np.zeros_like(w)
    embedding_bwd(dx, ids, dw)
    assert np.array_equal(embedding_fwd(ids, w), tx.detach().numpy())
    np.testing.assert_allclose(dw, tw.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_no_ids():
    ids, w = to_kernel(np.zeros(0, np.int64)), to_kernel(normal(1, 5, 4))
    assert embedding_fwd(ids, w).shape == (0, 4)
    dw = to_kernel(np.ones((5, 4), np.float32))
    embedding_bwd(embedding_fwd(ids, w), ids, dw)
    assert (to_host(dw) == 1).all()


def test_bad_input():
    ids, w = np.zeros(3, np.int64), np.ones((5, 4), np.float32)
    with pytest.raises(ValueError, match="ids must be integers, got float32"):
        embedding_fwd(ids.astype(np.float32), w)
    with pytest.raises(ValueError, match=r"ids has shape \(1, 3\), expected \(any\)"):
        embedding_fwd(ids.reshape(1, 3), w)
    with pytest.raises(TypeError, match="w is int64"):
        embedding_fwd(ids, w.astype(np.int64))
    with pytest.raises(ValueError, match=r"dx has shape \(2, 4\), expected \(3, 4\)"):
        embedding_bwd(w[:2], ids, w)
    with pytest.raises(TypeError, match="on one device"):
        embedding_fwd(to_kernel(ids), w)
    on_gpu = [to_kernel(x) for x in (w[:3], ids, w)]
    # The kernels use its entries as indices.
    for given in (to_kernel(np.zeros((3, 4), np.int32)), 1):
        with pytest.raises(TypeError, match=r"plan is .*, pass the result of embedding_plan"):
            embedding_bwd(*on_gpu, given)
    with pytest.raises(ValueError, match="the plan is for 6 rows, dw has 5"):
        embedding_bwd(*on_gpu, embedding_plan(on_gpu[1], 6))
    with pytest.raises(ValueError, match=r"plan has shape \(2, 4\), expected \(3, 4\)"):
        embedding_bwd(*on_gpu, embedding_plan(on_gpu[1][:2], 5))
