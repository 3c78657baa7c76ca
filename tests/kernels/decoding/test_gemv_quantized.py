"""gemv.py with quantized weights: every form and every number of rows against float64; rows do not depend on each other."""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    normal,
    on_kernel,
    pairwise,
    planted_bugs,
    sentinels,
    to_host,
    to_kernel,
    with_planted_bug,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.decoding import gemv as file
from xtrain.kernels.decoding import gemv_four_bits, gemv_operands, gemv_tensor_cores
from xtrain.kernels.decoding.gemv import add_norm_gemv, gemv, gemv_fits, gemv_ref
from xtrain.kernels.decoding.gemv_operands import Config, shared_bytes, staged
from xtrain.kernels.decoding.gemv_tensor_cores import choose
from xtrain.kernels.quantize import KINDS, Quantized, dequantize, quantize
from xtrain.simulator import KernelError

BF16 = ml_dtypes.bfloat16
EPS = 1e-6


def matrix(kind, rows, K, dtype=BF16):
    """Quantized; the scales of its rows differ by powers of ten, and one row is zero."""
    w = normal(2, rows, K) * K**-0.5 * 10.0 ** (np.arange(rows) % 3 - 1)[:, None].astype(np.float32)
    w[rows // 2] = 0
    return quantize(w.astype(dtype), kind)


def put(a):
    if isinstance(a, Quantized):
        return on_kernel(a)
    return None if a is None else to_kernel(a)


def product(x, w, b=None, **more):
    return to_host(gemv(put(x), put(w), b_O=put(b), **more))


def fused(x, delta, norm_w, w, swiglu=False, b=None, **more):
    arrays = (put(a) for a in (x, delta, norm_w, w))
    return tuple(map(to_host, add_norm_gemv(*arrays, EPS, swiglu, b_O=put(b), **more)))


def exactly(x, w, norm_w=None, delta=None, swiglu=False, b=None):
    wide = lambda a: None if a is None else a.astype(np.float64)
    whole = dequantize(w, np.float64)
    return gemv_ref(wide(x), whole, wide(norm_w), EPS, wide(delta), swiglu, wide(b))[1]


def check(y, exact, reference, rounded):
    # rounded: x becomes bf16. Tensor cores truncate when they add
    assert_as_good(y, exact, reference, what="y", floor=6e-3 if rounded else 4e-6, scale=1.0)


# ----------------------------------------------------------------------------- every form
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, dtype):
    N, K, rows = 3, 192, 21
    x, w, b = normal(1, N, K).astype(dtype), matrix(kind, rows, K, dtype), normal(5, rows)
    y = product(x, w, b, dtype=np.float32)
    check(y, exactly(x, w, b=b), gemv(x, w, np.float32, b_O=b), False)
    assert product(x, w).dtype == dtype
    # x in float32, rounded by a kernel for bf16
    x = normal(1, N, K)
    y = product(x, w, b, dtype=np.float32, weights_ready=True)
    check(y, exactly(x, w, b=b), gemv(x, w, np.float32, b_O=b), dtype == BF16)


@pairwise({"kind": KINDS, "swiglu": [False, True], "dtype": [BF16, np.float32]})
def test_with_norm_and_residual(kind, swiglu, dtype):
    N, K, rows = 2, 192, 19 * (1 + swiglu)
    x, norm_w, b = normal(1, N, K), normal(3, K), normal(5, rows)
    delta, w = normal(4, N, K).astype(dtype), matrix(kind, rows, K, dtype)
    for args in ((x, delta), (x, None)):
        h, y = fused(*args, norm_w, w, swiglu, b, dtype=np.float32)
        reference = add_norm_gemv(*args, norm_w, w, EPS, swiglu, b_O=b, dtype=np.float32)
        assert np.array_equal(h, reference[0])
        check(y, exactly(x, w, norm_w, args[1], swiglu, b), reference[1], dtype == BF16)


@pytest.mark.parametrize("dtype, most", [(BF16, 32), (np.float32, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows(kind, dtype, most):
    """All of them are right, and a row's bits depend neither on their number nor on its place."""
    K, rows = 64, 5
    x, w, b = normal(1, most, K).astype(dtype), matrix(kind, rows, K, dtype), normal(5, rows)
    together = product(x, w, b, dtype=np.float32)
    check(together, exactly(x, w, b=b), gemv(x, w, np.float32, b_O=b), False)
    numbers = range(1, most) if GPU else [n for n in (1, 7, 8, 9, 16, 17, 25, 31) if n < most]
    for n in numbers:
        assert np.array_equal(product(x[:n], w, b, dtype=np.float32), together[:n]), n
    turned = product(x[::-1].copy(), w, b, dtype=np.float32)
    assert np.array_equal(turned[::-1], together)


@pytest.mark.long
@pytest.mark.parametrize("N", [2, 19])
@pytest.mark.parametrize(
    "config", [Config(1, 1, 1), Config(2, 3, 1), Config(16, 1, 1, False)], ids=str
)
def test_every_division_of_the_work(monkeypatch, config, N):
    """Several tiles per block, several steps per tile, chunks that not every warp has."""
    K, rows = 64 * 7, 40
    x, w, b = normal(1, N, K).astype(BF16), matrix("int8", rows, K), normal(5, rows)
    monkeypatch.setattr(file, "MULTIPROCESSORS", 1)
    y, x_, w_, b_ = to_kernel(np.full((N, rows), np.nan, np.float32)), put(x), put(w), put(b)
    file._launch(y, x_, x_, None, None, w_, 0.0, False, True, config, b_)
    check(to_host(y), exactly(x, w, b=b), gemv(x, w, np.float32, b_O=b), False)


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_shape(data):
    kind, dtype = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([BF16, np.float32]))
    N, rows = data.draw(st.integers(1, 12 if dtype == BF16 else 8)), data.draw(st.integers(1, 40))
    K = data.draw(st.integers(1, 4)) * (64 if dtype == BF16 else 16)
    x, w = normal(1, N, K).astype(dtype), matrix(kind, rows, K, dtype)
    check(product(x, w, dtype=np.float32), exactly(x, w), gemv(x, w, np.float32), False)


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_and_huge_scales(kind):
    """Sums of codes are of moderate size, whatever the scale is."""
    w = normal(2, 6, 64) * np.array([1e-30, 1e-10, 1, 1e10, 1e25, 1e30], np.float32)[:, None]
    x, coded = normal(1, 2, 64).astype(BF16), quantize(w, kind)
    coded = replace(coded, dtype=np.dtype(BF16))
    exact, y = exactly(x, coded), product(x, coded, dtype=np.float32)
    assert (np.abs(y - exact) <= 1e-4 * np.abs(exact).max(0)).all()


@pytest.mark.parametrize("rows, tiles", [(32, 1), (33, 2)])
def test_two_tiles_only_where_each_multiprocessor_has_one(monkeypatch, rows, tiles):
    chosen, make = [], file.make_tensor_kernel
    monkeypatch.setattr(file, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(file, "choose", lambda *_: Config(2, 1, 1))
    monkeypatch.setattr(
        file,
        "make_tensor_kernel",
        lambda K, variant, c: chosen.append(variant) or make(K, variant, c),
    )
    product(normal(1, 11, 64).astype(BF16), matrix("int8", rows, 64))
    assert [v.tiles for v in chosen] == [tiles]


@pytest.mark.parametrize("rows", [17, 32, 33, 53])
def test_two_tiles_of_rows_have_the_bits_of_one(monkeypatch, rows):
    """Also where the second tile is partly or wholly beyond the last row, and a warp has no chunk in a step."""
    N, K = 11, 64 * 3
    x, w, b = normal(1, N, K).astype(BF16), matrix("fp8", rows, K), normal(5, rows)
    monkeypatch.setattr(file, "choose", lambda *_: Config(2, 1, 1))
    with monkeypatch.context() as one:
        one.setattr(file, "ROW_TILES", 1)
        y = product(x, w, b, dtype=np.float32)
    monkeypatch.setattr(file, "MULTIPROCESSORS", 1)  # several tiles per block
    with sentinels(monkeypatch):
        assert np.array_equal(product(x, w, b, dtype=np.float32), y)


def test_against_pytorch():
    x, w = normal(1, 3, 64).astype(BF16), matrix("fp8", 10, 64)
    fp8 = torch.tensor(w.codes_OK).view(torch.float8_e4m3fn).double()
    whole = fp8 * torch.tensor(w.scale_O).double()[:, None]
    want = torch.nn.functional.linear(torch.tensor(x.astype(np.float64)), whole)
    np.testing.assert_allclose(product(x, w, dtype=np.float32), want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("N", [3, 11])
def test_nothing_outside_the_output_and_the_same_bits_twice(monkeypatch, N):
    x, w = normal(1, N, 128).astype(BF16), matrix("int8", 21, 128)
    with sentinels(monkeypatch):
        first = product(x, w)
    assert np.array_equal(first, product(x, w))


def test_what_fits():
    fits = lambda *args, **more: gemv_fits(*args, quantized="int8", **more)
    assert fits(32, 64, BF16) and fits(8, 64, BF16, fused=True) and fits(8, 16, np.float32)
    assert not any(
        (
            fits(33, 64, BF16),
            fits(9, 64, BF16, fused=True),
            fits(1, 96, BF16),
            fits(9, 16, np.float32),
            fits(1, 24, np.float32),
            fits(0, 64, BF16),
        )
    )


def test_the_products_of_a_decoder():
    """As many bytes in flight as bf16's, where registers allow it; the staged rows fit into shared memory."""
    kinds = [(2048, 2560, False, True), (2048, 2048, False, False), (2048, 5632, True, True)]
    kinds += [(5632, 2048, False, False), (2048, 32000, False, True), (14336, 4096, False, False)]
    assert [choose(*kind, quantized="int8") for kind in kinds] == [
        Config(warps=16, chunks=2, blocks=1),
        Config(warps=8, chunks=4, blocks=2, stage=False),
        Config(warps=4, chunks=4, blocks=3),
        Config(warps=16, chunks=3, blocks=1),
        Config(warps=4, chunks=4, blocks=4),
        Config(warps=8, chunks=4, blocks=2),
    ]
    assert staged(4096, Config(8, 2, 1), "int8") and not staged(8192, Config(8, 2, 1), "int8")
    assert shared_bytes(8, 4096, "int8") == 8 * 2 * (4096 + 8)


# ----------------------------------------------------------------------------- bugs and bad input
@planted_bugs
@pytest.mark.parametrize(
    "dtype, name, old, new",
    [
        # the scale of another row, or of no row
        (BF16, "make_finish", "o = tile * TILES * TILE + (cuda.threadIdx.x & TILE - 1)", "o = cuda.threadIdx.x & TILE - 1"),
        (BF16, "make_finish", "o = tile * TILES * TILE + (cuda.threadIdx.x & TILE - 1)", "o = tile * TILES * TILE + cuda.threadIdx.x // TILE"),
        (BF16, "make_finish", "row_of_w(o, m, weights.F)", "o"),
        (BF16, "make_finish", "up *= scales[1]", "up *= scales[0]"),
        # the unit of bf16 codes
        (BF16, "make_finish", " * float32(UNIT)", ""),
        (np.float32, "make_multiply_row", "value *= weights.scale[o]", "value *= weights.scale[o + 1]"),
        (np.float32, "make_multiply_row", "up *= weights.scale[F + o]", "up *= weights.scale[o]"),
        # the bias is scaled too
        (np.float32, "make_multiply_row", "value += weights.b[o]", "value = (value / weights.scale[o] + weights.b[o]) * weights.scale[o]"),
        # a word too few, or another one
        (np.float32, "make_multiply_row", "range(0, E, 4)", "range(0, E - 4, 4)"),
        (BF16, "make_multiply", "STEPS = 4 if", "STEPS = 3 if"),
        (BF16, "make_multiply", "words[u, m, r, i], w)", "words[u, m, r, i ^ 1], w)"),
        (BF16, "make_multiply", "fa[r + 2 * j]", "fa[2 * r + j]"),
        # 16 columns of w with 8 of x
        (BF16, "make_operands", "E = WIDTH // 4", "E = 8"),
        # a group of rows reads the first one
        (BF16, "make_operands", "first + (8 * group * K + c", "first + (c"),
        (BF16, "make_reduce", "8 * group + (i & 1)", "(i & 1)"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(dtype, name, old, new):
    """By the simulator, or by wrong numbers."""
    check_fused_and_plain(dtype)
    module = module_of(name)
    planted = with_planted_bug([module, file, gemv_operands, gemv_tensor_cores], name, old, new)
    with planted, pytest.raises((KernelError, AssertionError, IndexError, ValueError)):
        check_fused_and_plain.__wrapped__(dtype)


def module_of(name):
    if name == "make_multiply_row":
        return file
    if name in ("make_multiply_four", "make_load_four"):
        return gemv_four_bits
    return gemv_operands if hasattr(gemv_operands, name) else gemv_tensor_cores


@functools.cache  # the kernels without bugs run once
def check_fused_and_plain(dtype):
    K = 64
    norm_w, x, delta = normal(3, K), normal(1, 2, K), normal(4, 2, K).astype(dtype)
    w, b = matrix("int8", 42, K, dtype), normal(5, 42)
    y = fused(x, delta, norm_w, w, True, b, dtype=np.float32)[1]
    reference = add_norm_gemv(x, delta, norm_w, w, EPS, True, b_O=b, dtype=np.float32)[1]
    check(y, exactly(x, w, norm_w, delta, True, b), reference, dtype == BF16)
    if dtype == BF16:
        many = normal(6, 11, K).astype(dtype)
        y = product(many, w, dtype=np.float32)
        check(y, exactly(many, w), gemv(many, w, np.float32), False)


@planted_bugs
@pytest.mark.parametrize(
    "kind, dtype, name, old, new",
    [
        # the first half of a chunk is not scaled, or by the scale of the other one; sums stay
        ("nf4", BF16, "make_multiply_four", "GROUP_WORDS = 2 if NF4 else 4", "GROUP_WORDS = 4"),
        ("nf4", BF16, "make_multiply_four", "nf4_group_scale(group, q // GROUP_WORDS)", "nf4_group_scale(group, 0)"),
        ("nf4", BF16, "make_multiply_four", "                chunk[j] = float32(0.0)\n\n    @device", "\n    @device"),
        ("int4", BF16, "make_multiply_four", "group = words[u, m, r, 4]", "group = words[u, m, 0, 4]"),
        ("int4", BF16, "make_multiply_four", "fa[j // 2, r + 2 * (j % 2)]", "fa[j % 2, r + 2 * (j // 2)]"),
        # other columns of x, or those of the next row
        ("int4", BF16, "make_operands", "BETWEEN = 4 if FOUR_BITS else 1", "BETWEEN = 1"),
        ("int4", BF16, "make_operands", "FULL_CHUNKS = K % WIDTH == 0", "FULL_CHUNKS = True"),
        ("int4", BF16, "make_load_four", "c * uint32(F * uint32(M)) + o", "c * F + o"),
        ("int4", BF16, "make_finish", "1.0 if variant.four_bits else BF16_UNIT", "BF16_UNIT"),
        ("nf4", np.float32, "make_multiply_row", "o + m * F, M * F)", "o + m * F, F)"),
        ("int4", np.float32, "make_multiply_row", "e // 8 * 32 + first % 128 // 4", "e // 8 * 8 + first % 128"),
    ],
)  # fmt: skip
def test_planted_bugs_of_four_bits_are_found(kind, dtype, name, old, new):
    """By the simulator, or by wrong numbers."""
    check_four_bits(kind, dtype)
    modules = [module_of(name), file, gemv_four_bits, gemv_operands, gemv_tensor_cores]
    planted = with_planted_bug(modules, name, old, new)
    with planted, pytest.raises((KernelError, AssertionError, IndexError, ValueError)):
        check_four_bits.__wrapped__(kind, dtype)


@functools.cache  # the kernels without bugs run once
def check_four_bits(kind, dtype):
    K = 192
    norm_w, x, delta = normal(3, K), normal(1, 2, K), normal(4, 2, K).astype(dtype)
    w = matrix(kind, 42, K, dtype)
    y = fused(x, delta, norm_w, w, True, dtype=np.float32)[1]
    reference = add_norm_gemv(x, delta, norm_w, w, EPS, True, dtype=np.float32)[1]
    check(y, exactly(x, w, norm_w, delta, True), reference, dtype == BF16)
    many = normal(6, 11 if dtype == BF16 else 3, K).astype(dtype)
    y = product(many, w, dtype=np.float32)
    check(y, exactly(many, w), gemv(many, w, np.float32), False)


@planted_bugs
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_row_of_w", "o += m * TILE", "pass"),
        ("make_row_of_w", "        o += m * TILE\n        return o if o < F else F - 1", "        return o + m * TILE"),
        ("make_finish", "o = (tile * TILES + m) * TILE + row", "o = (tile + m) * TILE + row"),
        ("make_finish", "if n < N and o < F", "if n < N"),
        ("make_finish", "value *= scales[m]", "value *= scales[0]"),
        ("make_finish", "total(shared.sums, m, row, n)", "total(shared.sums, 0, row, n)"),
        # two sets of registers, and several tiles per block
        ("make_product", "            if tile != share.first:\n                load_scales(scales, weights, tile)", ""),
        ("make_product", "tile, step + 1, share", "tile, step, share"),
        ("make_product", "tile, step + 2, share", "tile, step + 1, share"),
        ("make_product", "multiply(s, next_words, next_fx, rows, weights, shared, step + 1)", "multiply(s, words, fx, rows, weights, shared, step + 1)"),
        ("make_product", "                    copy_words(words, next_words)\n", ""),
        ("make_product", "            tile = next_tile", "            tile = next_tile + share.blocks"),
        ("make_product", "next_tile * SPAN < weights.F", "(next_tile + share.blocks) * SPAN < weights.F"),
        ("make_product", "(words, fx, rows, weights, next_tile, 0", "(words, fx, rows, weights, tile, 0"),
    ],
)  # fmt: skip
def test_planted_bugs_of_several_tiles_are_found(name, old, new):
    """By the simulator, or by other bits."""
    expected = one_tile_at_a_time()
    modules = [module_of(name), file, gemv_operands, gemv_tensor_cores]
    planted = with_planted_bug(modules, name, old, new)
    with planted, pytest.raises((KernelError, AssertionError, IndexError, ValueError)):
        for y, one in zip(few_warps_and_blocks(MULTIPROCESSORS=1), expected):
            assert np.array_equal(y, one)


def few_warps_and_blocks(**sizes):
    """Yields products of a block with one warp: 3 steps of one chunk with 9 rows of x, 2 with one"""
    for N, K in ((9, 192), (1, 128)):
        x, w = normal(N, N, K).astype(BF16), matrix("int8", 53, K)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "choose", lambda *_: Config(1, 1, 1))
            for name, value in sizes.items():
                patch.setattr(file, name, value)
            y = product(x, w, dtype=np.float32)
        yield y


@functools.cache  # the kernels without bugs run once
def one_tile_at_a_time():
    expected = [*few_warps_and_blocks(ROW_TILES=1)]
    assert all(map(np.array_equal, few_warps_and_blocks(MULTIPROCESSORS=1), expected))
    return expected


def test_bad_input():
    x, w = normal(1, 33, 64).astype(BF16), matrix("int8", 6, 64)
    with pytest.raises(
        ValueError, match=r"the codes of w has shape \(6, 64\), expected \(any, 32\)"
    ):
        gemv(x[:2, :32].copy(), w)
    with pytest.raises(
        ValueError, match="33 rows of 64, the GPU supports 1 to 32 of a multiple of 64"
    ):
        product(x, w)
    with pytest.raises(
        ValueError, match="9 rows of 64, the GPU supports 1 to 8 of a multiple of 64"
    ):
        fused(normal(1, 9, 64), None, normal(3, 64), w)
    with pytest.raises(ValueError, match="2 rows of 96, the GPU"):
        product(normal(1, 2, 96), matrix("fp8", 6, 96))
    with pytest.raises(TypeError, match="on one device"):
        gemv(to_kernel(x[:2]), w)
