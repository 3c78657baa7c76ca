"""quantize.py: codes and scales against ml_dtypes and float64, every code, rows of any size, what is refused."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_bug_is_found,
    normal,
    on_kernel,
    pairwise,
    planted_bugs,
    sentinels,
    to_host,
    to_kernel,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.errors import UserError
from xtrain.kernels import four_bits
from xtrain.kernels import quantize as file
from xtrain.kernels.gemm import linear_fwd
from xtrain.kernels.quantize import (
    CODES,
    KINDS,
    LARGEST,
    LEAST_SCALE,
    Quantized,
    check_finite,
    dequantize,
    dequantize_ref,
    dequantize_rows,
    quantize,
    quantize_ref,
)

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1), (3, 16), (2, 37), (5, 48), (2, 272)] + ([(7, 4096), (300, 1000)] if GPU else [])


def rows(O, K, dtype=np.float32):  # noqa: E741
    """Rows of very different sizes; one of zeros, if there are several."""
    w = normal(1, O, K) * 10.0 ** np.linspace(-3, 4, O)[:, None].astype(np.float32)
    w[O // 2] *= O == 1
    return w.astype(dtype)


def same(a: Quantized, b: Quantized) -> bool:
    return all(np.array_equal(to_host(x), to_host(y)) for x, y in zip(a.arrays, b.arrays))


# ----------------------------------------------------------------------------- the reference
@pytest.mark.parametrize("kind, most", [("int8", 0.5 / 127), ("fp8", 16 / 448)])
def test_the_error_is_half_a_step(kind, most):
    w = rows(9, 300)
    exact = dequantize_ref(*quantize_ref(w, kind), np.float64)
    largest = np.abs(w).max(1, keepdims=True)
    assert (np.abs(exact - w) <= largest * most * (1 + 1e-6)).all()
    if kind == "fp8":  # relative to the weight itself, above the subnormal numbers
        normals = np.abs(w) > largest / 448 * 2.0**-6
        assert (np.abs(exact - w) <= np.abs(w) / 16)[normals].all()


def test_the_numbers_of_the_docstring():
    w = np.array([[0.5, -1.27, 0.003]], np.float32)
    assert to_host(quantize(w, "int8").codes_OK).tolist() == [[50, -127, 0]]
    assert quantize(w, "int8").scale_O[0] == np.float32(0.01)
    found = dequantize(quantize(w, "fp8")) / np.float32(1.27 / 448)
    np.testing.assert_allclose(found, [[176, -448, 1]], rtol=1e-6)
    many = normal(3, 100, 4096, mean=0)
    error = lambda kind: np.sqrt(np.mean((dequantize(quantize(many, kind)) - many) ** 2))
    assert 0.008 < error("int8") < 0.0095 and 0.025 < error("fp8") < 0.028


def test_fp8_against_pytorch():
    w = rows(4, 64)
    codes, scale = quantize_ref(w, "fp8")
    scaled = torch.tensor(w / scale[:, None]).to(torch.float8_e4m3fn)
    assert np.array_equal(scaled.view(torch.uint8).numpy(), codes)


# ----------------------------------------------------------------------------- kernels
@pairwise({"kind": KINDS, "shape": SHAPES, "dtype": [np.float32, BF16]})
def test_the_kernels_have_the_bits_of_the_reference(kind, shape, dtype):
    w = rows(*shape, dtype)
    reference, found = quantize(w, kind), quantize(to_kernel(w), kind)
    assert same(reference, found) and found.kind == kind and found.shape == shape
    bytes_of_row = shape[1] if kind in CODES else -(-shape[1] // 128) * (64 + 2)
    assert found.nbytes == shape[0] * (bytes_of_row + 4)
    for to in (np.float32, BF16):
        expected = dequantize(reference, to)
        assert expected.dtype == to
        assert np.array_equal(to_host(dequantize(found, to)), expected)


@pairwise({"kind": KINDS, "width": [37, 48, 272], "first": [0, 4]})
def test_some_rows_and_only_groups_with_a_count(kind, width, first):
    w = quantize(rows(8, width), kind)
    expected = dequantize(w)
    counts = np.array([0, 3], np.int32)
    out = to_kernel(np.full((4, width), 7, np.float32))
    dequantize_rows(out, on_kernel(w), first, to_kernel(counts))
    found = to_host(out)
    assert (found[:2] == 7).all()
    assert np.array_equal(found[2:], expected[first + 2 : first + 4])
    assert np.array_equal(dequantize(w.rows(first, first + 4)), expected[first : first + 4])
    dequantize_rows(out, on_kernel(w), first)
    assert np.array_equal(to_host(out), expected[first : first + 4])


@pytest.mark.parametrize("kind", CODES)
def test_every_code(kind):
    """Every number that a code stands for keeps it, in both dequantizing kernels."""
    codes = np.arange(256).astype(np.uint8).view(CODES[kind])
    values = file.code_values(codes)
    wanted = np.isfinite(values) & (np.abs(values) <= LARGEST[kind])
    values, codes = values[wanted], codes[wanted]
    w = np.append(values, np.float32(LARGEST[kind]))[None]  # so that the scale is 1
    found = quantize(to_kernel(w), kind)
    assert np.array_equal(to_host(found.codes_OK)[0, :-1], codes)
    for width in (len(codes) // 16 * 16, 37):
        part = Quantized(codes[None, :width].copy(), np.ones(1, np.float32), np.dtype(np.float32))
        assert np.array_equal(to_host(dequantize(on_kernel(part)))[0], values[:width])


@pytest.mark.parametrize("kind", KINDS)
def test_the_range_of_a_group_may_be_beyond_float32(kind):
    w = np.array([[2.0**127, -(2.0**127)]], np.float32)
    found = quantize(to_kernel(w), kind)
    assert same(quantize(w, kind), found)
    np.testing.assert_allclose(to_host(dequantize(found)), w, rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_numbers(kind, data):
    """Halfway between codes, subnormal, tiny, huge."""
    width = data.draw(st.integers(1, 20))
    floats = st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-1, 1, width=32)
    w = np.array([data.draw(st.lists(floats, min_size=width, max_size=width))], np.float32)
    w *= np.float32(data.draw(st.sampled_from([1, 1e-30, 2.0**-126, 0])))
    reference, found = quantize(w, kind), quantize(to_kernel(w), kind)
    assert same(reference, found)
    assert np.isfinite(to_host(dequantize(found))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_no_rows(kind):
    zeros = quantize(to_kernel(np.zeros((2, 16), np.float32)), kind)
    assert (to_host(zeros.scale_O) == np.float32(LEAST_SCALE)).all()
    assert not to_host(dequantize(zeros)).any()
    for none in (np.zeros((0, 16), np.float32), to_kernel(np.zeros((0, 16), np.float32))):
        assert to_host(dequantize(quantize(none, kind))).shape == (0, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_the_outputs(monkeypatch, kind):
    with sentinels(monkeypatch):
        w = quantize(to_kernel(rows(3, 48)), kind)
        assert same(w, quantize(rows(3, 48), kind))
        dequantize(w, BF16)
        dequantize(quantize(to_kernel(rows(3, 37)), kind))


# ----------------------------------------------------------------------------- products of many rows
@pytest.mark.parametrize("kind", KINDS)
def test_a_gemm_dequantizes(kind):
    w, x = quantize(rows(6, 32), kind), normal(2, 40, 32)
    y = linear_fwd(x, w, None, normal(3, 6))
    exact = x.astype(np.float64) @ dequantize(w, np.float64).T
    within = 1e-5 * np.abs(exact).max(0)  # of each row of w
    assert (np.abs(y - exact - normal(3, 6)) <= within + 1e-5).all()
    part = linear_fwd(to_kernel(x), on_kernel(w), None, to_kernel(normal(3, 6)))
    assert (np.abs(to_host(part) - y) <= within + 1e-5).all()


# ----------------------------------------------------------------------------- bugs and bad input
@planted_bugs
@pytest.mark.parametrize(
    "kind, name, old, new",
    [
        ("int8", "make_quantize_kernel", "scale_O[o] = scale", "scale_O[0] = scale"),
        ("int8", "make_dequantize_kernel", "scale_O[i // K]", "scale_O[i // K + 1]"),
        ("int8", "make_dequantize_kernel", "store8(w, i + 8, values[8:])", ""),
        ("fp8", "make_dequantize_naive_kernel", "scale_O[i // K]", "scale_O[i % 2]"),
        ("fp8", "to_e4m3", "int32(0x7FFFF)", "int32(0x80000)"),
        ("fp8", "to_e4m3", "int32(0x3C800000)", "int32(0x3C000000)"),
        ("int8", "make_quantize_kernel", "block_max(largest, partial)", "largest"),
        # four bits: a neighbour's group, half a group, the wrong half, an unrounded scale
        ("int4", "make_load_values", "int64(c) * rows + o", "int64(c) + o"),
        ("int4", "make_quantize_four_kernel", "step = WIDTH // 2", "step = WIDTH // 4"),
        ("nf4", "make_quantize_four_kernel", "step = WIDTH // 2", "step = WIDTH"),
        ("nf4", "make_quantize_four_kernel", "nf4_codes(codes_8, w_8, relative, row_scale)\n                bits |= ", "nf4_codes(codes_8, w_8, relative, row_scale)\n                bits = "),
        ("nf4", "make_load_values", "nf4_group_scale(group, q // 2)", "nf4_group_scale(group, q % 2)"),
        ("int4", "make_quantize_four_kernel", "float32(UNIT) * row_scale", "relative * row_scale"),
        ("int4", "make_quantize_four_kernel", "4 * (owner % 4) + owner // 4", "owner"),
        ("int4", "make_dequantize_four_kernel", "32 * q + 8 * (i & 3)", "8 * q + 32 * (i & 3)"),
        ("nf4", "make_quantize_four_kernel", "v > float32(MIDPOINTS[i])", "v >= float32(MIDPOINTS[i])"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(kind, name, old, new):
    """By the simulator, or by wrong bits."""
    modules = [four_bits, file] if hasattr(four_bits, name) else [file]
    assert_bug_is_found(CHECKS[kind], modules, name, old, new)


def check_kernels(kind):
    w = {48: rows(3, 48), 37: rows(3, 37)} | ({200: rows(3, 200)} if kind not in CODES else {})
    w[48][1, :2] = 1, four_bits.NF4_MIDPOINTS[9]  # a tie, with the scale of 1 / 255
    w[48][0, :4] = np.array([1.0625, 1.1875, 448, 2.0**-7]) * 1e-3  # ties, and a subnormal number
    for a in w.values():
        found, reference = quantize(to_kernel(a), kind), quantize(a, kind)
        assert same(found, reference)
        assert np.array_equal(to_host(dequantize(found)), dequantize(reference))


CHECKS = {kind: functools.partial(check_kernels, kind) for kind in KINDS}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_numbers(kind, bad):
    w = rows(4, 300)
    check_finite(quantize(w, kind), "w")
    w[2, 270] = bad
    for put in (np.array, to_kernel):
        with pytest.raises(UserError, match=r"q_proj\.weight holds NaN or infinity in row 2, so"):
            check_finite(quantize(put(w), kind), "q_proj.weight")


def test_bad_input():
    w = rows(3, 16)
    with pytest.raises(ValueError, match="kind 'int3', expected one of int8, fp8, int4, nf4"):
        quantize(w, "int3")
    with pytest.raises(ValueError, match=r"w has shape \(16,\), expected \(any, any\)"):
        quantize(w[0], "int8")
    with pytest.raises(TypeError, match="w is int32"):
        quantize(w.astype(np.int32), "int8")
    found = quantize(w, "int8")
    with pytest.raises(ValueError, match=r"the scales of w has shape \(2,\), expected \(3\)"):
        dequantize(Quantized(found.codes_OK, found.scale_O[:2], found.dtype))
    with pytest.raises(TypeError, match="the codes of w is int16, expected int8 or uint8"):
        dequantize(Quantized(found.codes_OK.astype(np.int16), found.scale_O, found.dtype))
    with pytest.raises(ValueError, match="dequantize: to float16, expected float32 or bf16"):
        dequantize(on_kernel(found), np.float16)
