"""fp8.py: codes in both orientations, scales and counters against NumPy, ml_dtypes and PyTorch."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, normal, planted_bugs, sentinels, to_host, to_kernel, with_planted_bug

from xtrain import device
from xtrain.kernels import fp8 as file
from xtrain.kernels.cross_entropy import IGNORE, cross_entropy
from xtrain.kernels.fp8 import (
    DTYPES,
    INFINITE,
    LARGEST,
    LEAST_SCALE,
    TILE,
    Slot,
    decode,
    encode_ref,
    fp8,
    fp8_cross_entropy,
    fp8_swiglu,
    fp8_swiglu_bwd,
    scale_factor,
    update_scales,
)
from xtrain.kernels.fp8_gemm import fp8_matmul
from xtrain.kernels.primitives.codes import nearest_codes
from xtrain.kernels.swiglu import swiglu_bwd_ref, swiglu_ref
from xtrain.simulator import KernelError

BF16 = ml_dtypes.bfloat16
KINDS = list(DTYPES)
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PADDING = 28  # columns after the vocabulary


def fp8_loss(logits, targets, lse, inv_count, *slot):
    """fp8_cross_entropy with a padded vocabulary"""
    V = logits.shape[1] - PADDING
    return fp8_cross_entropy(logits, targets, lse, V, inv_count, *slot)


OPS = (fp8, fp8_swiglu, fp8_swiglu_bwd, fp8_loss)
HAS_FP8 = not GPU or int(device.cupy().cuda.Device().compute_capability) >= 89
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs compute capability 8.9")


def slot(kind, put=to_kernel, scale=1.0) -> Slot:
    state = (np.full(1, scale, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int64))
    return Slot(*map(put, state), kind)


def logsumexp(logits):
    """Of each row"""
    return torch.tensor(logits.astype(np.float64)).logsumexp(1).numpy().astype(np.float32)


def inputs(op, N, K, seed=1, scale=1.0):
    """Arguments of op for a result (N, K)"""
    draw = lambda i, width: normal(seed + i, N, width, scale=scale).astype(BF16)
    if op is fp8:
        return (draw(0, K),)
    if op is fp8_loss:  # NaN in the padding and in ignored rows; sizes of the gradient up to 20
        logits, V = draw(0, K), K - PADDING
        targets = np.random.default_rng(seed).integers(0, V, N)
        targets[1::5] = IGNORE
        logits[1::5, 3] = logits[:, V:] = np.nan
        targets[:3] = 0, IGNORE, V - 1  # the first and the last column
        lse = logsumexp(logits[:, :V])
        return logits, targets, lse, np.full(1, 20, np.float32)
    return (draw(0, 2 * K),) if op is fp8_swiglu else (draw(0, K // 2), draw(1, K))


def values(op, *arrays):
    """The numbers that op encodes, in float32; of the loss PyTorch's gradient in float64"""
    if op is fp8_loss:
        logits, targets, _, inv_count = arrays
        x = np.where((targets == IGNORE)[:, None], 0, logits)[:, :-PADDING].astype(np.float64)
        x = torch.tensor(x, requires_grad=True)
        loss = torch.nn.functional.cross_entropy(x, torch.tensor(targets), reduction="none")
        (loss.sum() * float(inv_count[0])).backward()
        return np.pad(x.grad.numpy(), ((0, 0), (0, PADDING))).astype(np.float32)
    wide = [a.astype(np.float32) for a in arrays]
    return {fp8: lambda x: x, fp8_swiglu: swiglu_ref, fp8_swiglu_bwd: swiglu_bwd_ref}[op](*wide)


def numbers(codes, kind):
    """The numbers of codes; those of NaN may differ in their bits."""
    return np.asarray(codes).view(DTYPES[kind]).astype(np.float32)


# ----------------------------------------------------------------------------- the reference
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_codes_against_pytorch(kind):
    """Ties, subnormal numbers, the largest; beyond it PyTorch has NaN or infinity, the hardware the largest code."""
    exact = np.arange(256).astype(np.uint8).view(DTYPES[kind]).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)])
    x = np.concatenate(
        [
            exact,
            (exact[1:] + exact[:-1]) / 2,
            normal(1, 1000, scale=20.0),
            normal(2, 1000, scale=1e-4),
        ]
    )
    codes = nearest_codes(x, DTYPES[kind])
    assert np.array_equal(torch.tensor(x).to(TORCH[kind]).view(torch.uint8).numpy(), codes)
    far = np.array([1e9, -1e9, np.inf, LARGEST[kind] * 1.05, np.nan], np.float32)
    most = LARGEST[kind]
    np.testing.assert_array_equal(
        numbers(nearest_codes(far, DTYPES[kind]), kind), np.array([most, -most, most, most, np.nan])
    )


def test_the_numbers_of_the_docstring():
    x = np.zeros((TILE, TILE), BF16)
    x[0, :3] = 3, -0.4, 7
    first = fp8(x, slot("e4m3", np.array), current=True)
    assert first.scale_1[0] == 0.03125
    assert decode(first.rows)[0, :3].tolist() == [3, -0.40625, 7]
    known = slot("e4m3", np.array, 0.03125)
    x[0, :3] = 20, 1, 0
    assert decode(fp8(x, known).columns)[:3, 0].tolist() == [14, 1, 0]
    assert known.counts_2.tolist() == [1, 0]
    assert known.largest_1.view(np.float32)[0] * scale_factor("e4m3") == pytest.approx(
        0.0893, abs=1e-4
    )


@pytest.mark.parametrize("kind, error", [("e4m3", 1 / 16), ("e5m2", 1 / 8)])
def test_the_error_is_half_a_step(kind, error):
    x = normal(1, TILE, TILE).astype(BF16)
    found, x = fp8(x, slot(kind, np.array), True), x.astype(np.float32)
    large = np.abs(x) > found.scale_1[0] * 2.0**-6
    assert (np.abs(decode(found.rows) - x) <= np.abs(x) * error * 1.0001)[large].all()


# ----------------------------------------------------------------------------- kernels
ONE = TILE, TILE
SEVERAL = {fp8: (2 * TILE, 3 * TILE), fp8_loss: (2 * TILE, TILE)}
SHAPES = [ONE, *SEVERAL.values()] + ([(8192, 1024), (1024, 5632)] if GPU else [])


def runs(op, kind, shape, current):
    """On a GPU all; in the simulator each source, each kind and both passes with one tile, and what several tiles add.

    A kernel does the same with the numbers of every source, and the first pass (`current`) the same for every kind: a source
    is clamped with e5m2 and has its own scale with e4m3.
    """
    if not GPU and op in SEVERAL and (kind, current) == ("e4m3", False):
        return shape == SEVERAL[op]
    return GPU or (shape == ONE and (op is fp8 or current is (kind == "e4m3")))


CASES = [c for c in itertools.product(OPS, KINDS, SHAPES, (False, True)) if runs(*c)]


@pytest.mark.parametrize("op, kind, shape, current", CASES, ids=lambda x: getattr(x, "__name__", str(x)))  # fmt: skip
def test_the_kernels_have_the_codes_of_the_reference(op, kind, shape, current, monkeypatch):
    N, K = shape if op is not fp8_swiglu_bwd else (shape[0], 2 * shape[1])
    arrays = inputs(op, N, K, scale=2.0)
    at, scale = slot(kind), 0.01 if kind == "e4m3" else 1e-5
    at.scale_1[...] = scale  # so that some numbers are clamped
    with sentinels(monkeypatch):
        found = op(*map(to_kernel, arrays), at, current)
    v = values(op, *arrays)
    used = to_host(found.scale_1)[0]
    expected, bits, counts = encode_ref(v, used, kind)
    codes, columns = to_host(found.codes_NK), to_host(found.codes_KN)
    assert codes.shape == (N, K) and np.array_equal(codes.T, columns) and found.kind == kind
    largest = to_host(at.largest_1).view(np.float32)[0]
    if op is fp8:
        assert np.array_equal(codes, expected)
        assert to_host(at.largest_1)[0] == bits and tuple(to_host(at.counts_2)) == counts
    else:  # the last bit of a value may differ, and with it the code
        a, b = numbers(codes, kind), numbers(expected, kind)
        step = np.maximum(np.abs(b), 2.0**-6 if kind == "e4m3" else 2.0**-14) / (
            4 if kind == "e5m2" else 8
        )
        assert (np.abs(a - b) <= step).all() and (codes != expected).mean() < 1e-3
        assert largest == pytest.approx(np.abs(v).max(), rel=1e-5)
        assert np.abs(to_host(at.counts_2) - counts).sum() <= counts[0] / 100 + 1
    if current:
        assert used == largest * scale_factor(kind) and counts == (0, 0)
    else:
        assert used == np.float32(scale) and counts[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_infinity_nan_subnormals(kind):
    x = np.zeros((TILE, TILE), BF16)
    at = slot(kind)
    found = fp8(to_kernel(x), at, True)
    assert not to_host(found.codes_NK).any() and to_host(found.scale_1)[0] == 1
    assert to_host(at.largest_1)[0] == 0 and not to_host(at.counts_2).any()
    tiny = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}[kind]
    x[0, :9] = [np.inf, -np.inf, np.nan, 1e9, -1e9, tiny, tiny / 2, -1.5 * tiny, LARGEST[kind]]
    x[77, 100] = np.nan
    found = fp8(to_kernel(x), at)
    most = LARGEST[kind]
    expected = [np.nan, np.nan, np.nan, most, -most, tiny, 0, -2 * tiny, most]
    np.testing.assert_array_equal(numbers(to_host(found.codes_NK)[0, :9].copy(), kind), expected)
    np.testing.assert_array_equal(numbers(to_host(found.codes_KN)[:9, 0].copy(), kind), expected)
    assert to_host(at.counts_2).tolist() == [2, 4]
    assert to_host(at.largest_1)[0] == INFINITE
    host = slot(kind, np.array)
    expected = fp8(x, host)
    np.testing.assert_array_equal(
        numbers(expected.codes_NK, kind), numbers(to_host(found.codes_NK), kind)
    )
    assert host.largest_1[0] == INFINITE and host.counts_2.tolist() == [2, 4]


def test_the_largest_of_several_matrices_and_huge_or_tiny_scales():
    at = slot("e4m3")
    for factor in (2.0, 5.0, 1.0):
        x = np.zeros((TILE, TILE), BF16)
        x[5, 9] = -factor
        fp8(to_kernel(x), at)
    assert to_host(at.largest_1).view(np.float32)[0] == 5
    x = np.full((TILE, TILE), 1e-38, BF16)
    found = fp8(to_kernel(x), slot("e4m3"), True)
    assert to_host(found.scale_1)[0] == np.float32(LEAST_SCALE)
    assert np.isfinite(numbers(to_host(found.codes_NK), "e4m3")).all()


def test_the_same_bits_twice():
    """Whether the scale was known or is that of the matrix itself."""
    for op in OPS if GPU else (fp8_swiglu, fp8_loss):
        arrays = [
            to_kernel(a) for a in inputs(op, TILE, 2 * TILE if op is fp8_swiglu_bwd else TILE)
        ]
        at = slot("e4m3")
        first = op(*arrays, at, True)
        known = slot("e4m3", scale=to_host(first.scale_1)[0])
        second = op(*arrays, known)
        for name in ("codes_NK", "codes_KN"):
            assert np.array_equal(*(to_host(getattr(x, name)) for x in (first, second)))
        assert to_host(at.largest_1)[0] == to_host(known.largest_1)[0]


def test_a_target_that_does_not_exist():
    """On the host an error; in the kernel that row is NaN, but for its padding."""
    logits, targets, lse, inv_count = inputs(fp8_loss, TILE, TILE)
    bad = {9: TILE - PADDING, 44: -1, 127: 2**40}
    for row, target in bad.items():
        wrong = targets.copy()
        wrong[row] = target
        message = rf"target {target} in row {row} is neither in \[0, 100\)"
        with pytest.raises(ValueError, match=message):
            fp8_loss(logits, wrong, lse, inv_count, slot("e4m3", np.array))
    targets[[*bad]] = [*bad.values()]
    at = slot("e4m3", scale=1.0)
    found = fp8_loss(*map(to_kernel, (logits, targets, lse, inv_count)), at)
    numbers_NK = numbers(to_host(found.codes_NK), "e4m3")
    assert np.isnan(numbers_NK[[*bad], :-PADDING]).all() and not numbers_NK[:, -PADDING:].any()
    assert np.isfinite(np.delete(numbers_NK, [*bad], 0)).all()
    assert to_host(at.counts_2)[1] == len(bad) * (TILE - PADDING)


def test_the_loss_and_its_codes_from_one_statistic():
    """cross_entropy's logsumexp of some rows, and codes that are nearest to the gradient that it writes in float32."""
    logits, targets, lse, inv_count = inputs(fp8_loss, TILE, TILE)
    targets[targets == IGNORE] = 5  # uint8 has no -100
    logits = np.nan_to_num(logits.astype(np.float32), nan=7).astype(BF16)
    V, some = TILE - PADDING, TILE if GPU else 16
    lse = to_kernel(np.where(np.arange(TILE) < some, 0, logsumexp(logits[:, :V])).astype("f4"))
    on, count = to_kernel(logits), to_kernel(inv_count)
    rows = on[:some], to_kernel(targets[:some])
    cross_entropy(*rows, V, count, with_gradient=False, lse_N=lse[:some])
    d, _ = cross_entropy(logits.astype(np.float32), targets, V, inv_count)[::-1]
    for dtype in (np.int32, np.uint8):
        at = slot("e4m3", scale=0.09)
        found = fp8_cross_entropy(on, to_kernel(targets.astype(dtype)), lse, V, count, at)
        wrong = to_host(found.codes_NK) != encode_ref(d, to_host(found.scale_1)[0], "e4m3")[0]
        assert wrong.mean() < 1e-3 and wrong[:some].mean() < 1e-3


@pytest.mark.parametrize("put", [np.array, to_kernel])
def test_update_scales(put):
    S = 300
    largest = np.abs(normal(1, S)).astype(np.float32)
    largest[:4] = 0, np.inf, np.nan, 1e-40
    scale, factor = (
        np.full(S, 3, np.float32),
        np.where(np.arange(S) % 3, scale_factor("e4m3"), scale_factor("e5m2")),
    )
    state = [
        scale,
        largest.view(np.int32),
        factor.astype(np.float32),
        np.array([5, 7]),
        np.array([1, 2]),
    ]
    on = [put(x) for x in state]
    update_scales(*on)
    found = to_host(on[0])
    assert found[:3].tolist() == [3, 3, 3] and found[3] == np.float32(LEAST_SCALE)
    assert np.array_equal(found[4:], (largest * factor)[4:].astype(np.float32))
    assert not to_host(on[1]).any() and not to_host(on[3]).any()
    assert to_host(on[4]).tolist() == [5, 7]


@pytest.mark.parametrize("put", [np.array, to_kernel])
def test_the_largest_of_all_ranks_decides(put):
    """Also whether a rank met a number that is not finite; and there may be more counts than scales."""
    largest_RS = np.array([[1, 5, np.inf], [4, 0, 2], [3, 2, 1]], np.float32)
    scale, factor = np.full(3, 7, np.float32), np.full(3, 0.5, np.float32)
    counts = np.arange(8)
    on = [
        put(x) for x in (scale, largest_RS.reshape(-1).view(np.int32), factor, counts, 0 * counts)
    ]
    update_scales(*on)
    assert to_host(on[0]).tolist() == [2, 2.5, 7]
    assert not to_host(on[1]).any() and not to_host(on[3]).any()
    assert to_host(on[4]).tolist() == counts.tolist()


# ----------------------------------------------------------------------------- bugs and bad input
@planted_bugs
@pytest.mark.parametrize(
    "op, tiles, name, old, new",
    [
        (fp8, 1, "make_encode4", "if size < INF:", "if True:"),
        (fp8, 1, "make_encode4", "scaled = NAN", "scaled = INF"),
        (fp8, 1, "add_notes", "block_max(largest[0], partial)", "largest[0]; cuda.syncthreads()"),
        (fp8, 1, "store_transposed", "word + (4 * i + j) * words", "word + (4 * i + j) * (words - 1)"),
        (fp8, 1, "store_transposed", "transpose_codes(four)", ""),
        (fp8, 2, "add_notes", "cuda.atomic.max(largest_1, 0, float_as_int(block_largest))", "largest_1[0] = float_as_int(block_largest)"),
        (fp8, 2, "make_fp8_kernel", "* N + n0 + piece * 16", "* N + piece * 16"),
        (fp8, 2, "make_fp8_kernel", "int64(cuda.blockIdx.x) * TILE", "int64(cuda.blockIdx.y) * TILE"),
        (fp8_swiglu, 1, "swiglu_values", "gate * sigmoid(gate)", "sigmoid(gate)"),
        (fp8_swiglu_bwd, 1, "make_fp8_kernel", "(p * TILE + piece * 16) * WORDS", "(piece * 16) * WORDS"),
        (fp8_swiglu_bwd, 1, "make_fp8_kernel", "+ p * K + k0 + column, words)", "+ k0 + column, words)"),
        (fp8_loss, 2, "make_fp8_kernel", "int32(k0) + column", "int32(column)"),
        (fp8_loss, 1, "make_fp8_kernel", "b[uint32(n)]", "b[uint32(s * ROWS + row)]"),
        (fp8_loss, 1, "logits_gradient", "if target != IGNORE else int32(0)", ""),
        (fp8_loss, 1, "logits_gradient", "used < EACH or (hit >= 0 and hit < EACH)", "used < EACH"),
        (fp8_loss, 1, "logits_gradient", "used < EACH or (hit >= 0 and hit < EACH)", "hit >= 0 and hit < EACH"),
        (fp8_loss, 1, "logits_gradient", "hit < EACH", "hit < EACH - 1"),
        (fp8_loss, 1, "logits_gradient", "float32(LOG2E)", "float32(1.0)"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(op, tiles, name, old, new):
    kernel_equals_the_reference(op, tiles)
    with with_planted_bug([file], name, old, new), pytest.raises((KernelError, AssertionError)):
        kernel_equals_the_reference.__wrapped__(op, tiles)


@functools.cache  # the kernel without bugs runs once
def kernel_equals_the_reference(op, tiles):
    """tiles: of fp8 below each other, of the loss side by side; swiglu_bwd's one tile is two of its result"""
    wide = {fp8_swiglu_bwd: 2, fp8_loss: tiles}.get(op, 1)
    arrays = inputs(op, (tiles if op is fp8 else 1) * TILE, wide * TILE)
    if op is fp8:
        arrays[0][3, 5], arrays[0][100, 7], arrays[0][1, 1] = np.nan, np.inf, 1e3
    limit = {fp8: 0, fp8_loss: 1e-4}.get(op, 1e-3)
    at, host = slot("e4m3"), slot("e4m3", np.array)
    found, expected = op(*map(to_kernel, arrays), at), op(*arrays, host)
    for a in ("codes_NK", "codes_KN"):
        pair = [np.asarray(getattr(x, a)) for x in (found, expected)]
        assert (pair[0] != pair[1]).mean() <= limit
    assert at.counts_2.tolist() == host.counts_2.tolist()
    bits = [int(x.largest_1[0]) for x in (at, host)]
    assert abs(bits[0] - bits[1]) <= (0 if op is fp8 else 8)


def test_bad_input():
    x = np.ones((TILE, TILE), BF16)
    at = slot("e4m3", np.array)
    with pytest.raises(ValueError, match="a matrix of 128 x 64, expected multiples of 128 rows"):
        fp8(x[:, :64].copy(), at)
    with pytest.raises(ValueError, match="a matrix of 100 x 128, expected multiples of 128 rows"):
        fp8(x[:100], at)
    with pytest.raises(TypeError, match="x is float32, expected bfloat16"):
        fp8(x.astype(np.float32), at)
    with pytest.raises(ValueError, match=r"gu has shape \(128, 128\), expected \(128, 256\)"):
        fp8_swiglu_bwd(x, x, at)
    with pytest.raises(TypeError, match="on one device"):
        fp8(to_kernel(x), at)
    odd = to_kernel(np.ones(TILE * TILE + 1, BF16))[1:].reshape(TILE, TILE)
    with pytest.raises(ValueError, match="not a multiple of 16 bytes: copy the matrix first"):
        fp8(odd, slot("e4m3"))
    ids, row, one = np.zeros(TILE, np.int64), np.zeros(TILE, np.float32), np.ones(1, np.float32)
    with pytest.raises(ValueError, match=r"vocabulary 129, logits \(128, 128\)"):
        fp8_cross_entropy(x, ids, row, 129, one, at)
    with pytest.raises(ValueError, match=r"targets has shape \(100,\), expected \(128\)"):
        fp8_cross_entropy(x, ids[:100], row, 100, one, at)
    with pytest.raises(ValueError, match="targets must be integers, got float32"):
        fp8_cross_entropy(x, row, row, 100, one, at)
    with pytest.raises(ValueError, match=r"lse has shape \(1,\), expected \(128\)"):
        fp8_cross_entropy(x, ids, one, 100, one, at)
    with pytest.raises(ValueError, match=r"inv_count has shape \(128,\), expected \(1\)"):
        fp8_cross_entropy(x, ids, row, 100, row, at)
    with pytest.raises(ValueError, match="a matrix of 128 x 64, expected multiples of 128 rows"):
        fp8_cross_entropy(x[:, :64].copy(), ids, row, 64, one, at)
    with pytest.raises(ValueError, match="not a multiple of 16 bytes: copy the matrix first"):
        fp8_cross_entropy(odd, *map(to_kernel, (ids, row)), 100, to_kernel(one), slot("e4m3"))
    a = fp8(x, at).rows
    out = np.zeros((TILE, TILE), np.float32)
    with pytest.raises(ValueError, match=r"out has shape \(128, 128\), expected \(64, 128\)"):
        fp8_matmul(out, a._replace(codes=a.codes[:64]), a)
    with pytest.raises(ValueError, match="8 x 128 x 128, expected multiples of 16"):
        fp8_matmul(out[:8], a._replace(codes=a.codes[:8]), a)
    with pytest.raises(ValueError, match="two matrices of e5m2"):
        fp8_matmul(out, a._replace(kind="e5m2"), a._replace(kind="e5m2"))
    with pytest.raises(ValueError, match="2 numbers in largest, expected a multiple of 3"):
        update_scales(
            *(np.zeros(n, t) for n, t in ((3, "f4"), (2, "i4"), (3, "f4"), (2, "i8"), (2, "i8")))
        )
