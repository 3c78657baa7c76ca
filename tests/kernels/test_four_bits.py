"""four_bits.py: codes and scales by hand, errors, the order of codes in words. What all kinds share: test_quantize.py."""

import numpy as np
import pytest
from checks import to_host, to_kernel, with_planted_bug
from test_quantize import rows

from xtrain.kernels import four_bits
from xtrain.kernels.cast import BFLOAT16
from xtrain.kernels.quantize import dequantize, quantize
from xtrain.simulator import sim


def test_the_numbers_of_four_bits_by_hand():
    w = np.array([[-0.5, 0.27, 1]], np.float32)
    coded = quantize(w, "int4")
    assert four_bits.unpack_ref(coded.codes_OK, "int4")[0, :4].tolist() == [0, 8, 15, 5]
    np.testing.assert_allclose(dequantize(coded), [[-0.5, 0.3, 1]], rtol=1e-6)
    w[0, 1] = 0.25
    coded = quantize(w, "nf4")
    assert coded.groups_CO.tolist() == [[255 + 256]]  # the second group is empty: the least scale
    np.testing.assert_allclose(dequantize(coded), [[-0.5234375, 0.24609375, 1]], rtol=1e-6)


@pytest.mark.parametrize("kind, most", [("int4", 0.5 / 15 * 2 * 1.01), ("nf4", 0.153)])
def test_the_error_of_four_bits_is_half_a_step_of_the_group(kind, most):
    """nf4's widest step is from -1 to -0.6962, int4's a 15th of twice the largest weight."""
    w = rows(9, 300)
    w[:, 128:] *= 100  # the scales of the groups of a row differ
    error = np.abs(dequantize(quantize(w, kind), np.float64) - w)
    for columns in (
        slice(0, 64),
        slice(64, 128),
        slice(128, 192),
        slice(192, 256),
        slice(256, 300),
    ):
        group = columns if kind == "nf4" else slice(columns.start // 128 * 128, columns.stop)
        largest = np.abs(w[:, slice(group.start, group.start + four_bits.GROUP[kind])]).max(1)
        # scales of nf4 are whole numbers up to 255, of the row's largest
        assert (error[:, columns].max(1) <= most * largest + np.abs(w).max(1) / 510).all()


def on_grids(dtype=np.float32):
    """-> rows whose groups need 8 to 16 of the values of a step, and the codes from which they were made"""
    draw = np.random.default_rng(5)
    codes = np.concatenate([draw.integers(0, n + 1, (1, 256)) for n in range(8, 16)])
    for row, n in zip(codes, range(8, 16)):
        row[[3, 200]], row[[4, 201]] = 0, n
    step = draw.uniform(0.01, 0.02, (8, 2)).repeat(128, 1)
    zero = draw.integers(1, 8, (8, 2)).repeat(128, 1)
    return ((codes - zero) * step).astype(dtype), step


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_weights_on_a_grid_keep_it(dtype):
    """Also if the largest code is not 15; in bf16 they are only near to it. The simulator's kernel finds the same codes."""
    w, step = on_grids(dtype)
    coded = quantize(w, "int4")
    off = (dequantize(coded, np.float64) - w.astype(np.float64)) / step
    assert np.abs(off).max() < (0.04 if dtype == np.float32 else 0.08)
    again = quantize(dequantize(coded), "int4")
    assert np.array_equal(again.codes_OK, coded.codes_OK)
    kernel = quantize(to_kernel(w), "int4")
    assert np.array_equal(to_host(kernel.codes_OK), coded.codes_OK)
    assert np.array_equal(to_host(kernel.groups_CO), coded.groups_CO)


@pytest.mark.parametrize(
    "old, new",
    [
        ("for n in range(14, 7, -1)", "for n in range(14, 8, -1)"),
        ("limit / float32(GRID)", "limit"),
        ("found = step", "pass"),
    ],
)
def test_planted_bugs_of_grids_are_found(old, new):
    w, step = (x[[0, 6], :128] for x in on_grids())
    w[1] += 0.12 * step[1] * np.where(np.isin(np.arange(128), (3, 4)), 0, 1)  # not near enough

    def run():
        kernel, reference = quantize(sim(w), "int4"), quantize(w, "int4")
        assert np.array_equal(to_host(kernel.codes_OK), reference.codes_OK)

    run()
    with (
        with_planted_bug([four_bits], "make_quantize_four_kernel", old, new),
        pytest.raises(AssertionError),
    ):
        run()


def test_other_weights_have_15_steps():
    w = np.random.default_rng(6).standard_normal((300, 128)).astype(np.float32)
    coded = quantize(w, "int4")
    codes = four_bits.unpack_ref(coded.codes_OK, "int4")
    assert (codes.min(1) == 0).all() and (codes.max(1) >= 14).all()
    half = np.float32(0.5)
    s = (half * w.max(1) - half * w.min(1)) / np.float32(15) * 2
    assert np.array_equal(coded.scale_O, s)


def test_the_words_of_tensor_cores():
    """Word 4 t + q of a chunk has columns 32 q + 8 t ... + 7."""
    codes = np.zeros((1, 256), np.uint8)
    codes[0, 128 + 32 * 3 + 8 * 2 + 5] = 9
    for kind, nibble in (("int4", 6), ("nf4", 5)):
        words = four_bits.pack_ref(codes, kind).view(np.uint32)[0]
        assert np.flatnonzero(words).tolist() == [16 + 4 * 2 + 3]
        assert words.max() == 9 << 4 * nibble
        assert np.array_equal(four_bits.unpack_ref(four_bits.pack_ref(codes, kind), kind), codes)
