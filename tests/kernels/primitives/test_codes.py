"""codes.py: every int8 and every e4m3 is unpacked exactly, in order; the instructions are those that the file promises."""

import functools
import statistics

import ml_dtypes
import numpy as np
import pytest
from checks import to_host, to_kernel
from offline import CARDS_BF16, nvvm, ptx_for, signatures

from xtrain.kernels.primitives.codes import (
    BF16_UNIT,
    NF4_LEVELS,
    code_values,
    codes_to_bf16,
    codes_to_floats,
    load_codes16,
)
from xtrain.kernels.primitives.ptx import kernel
from xtrain.kernels.runtime.compiler import cuda, float32, uint32
from xtrain.kernels.runtime.launch import launch

__all__ = ["nvvm"]
CODES = [np.int8, np.uint8]


@kernel(32)
def unpack_kernel(values, pairs, codes):
    """Grid 1, block 32: thread t unpacks codes 16 t, ..., 16 t + 15."""
    t = cuda.threadIdx.x
    words, floats = cuda.local.array(4, uint32), cuda.local.array(16, float32)
    pair = cuda.local.array(2, uint32)
    if 16 * t < codes.size:
        load_codes16(words, codes, 16 * t)
        codes_to_floats(floats, words, codes)
        for j in range(16):
            values[16 * t + j] = floats[j]
        for j in range(4):
            codes_to_bf16(pair, words[j], codes)
            for i in range(2):
                pairs[8 * t + 2 * j + i] = pair[i]


def unpack(codes):
    values = to_kernel(np.zeros(codes.size, np.float32))
    pairs = to_kernel(np.zeros(codes.size // 2, np.uint32))
    launch(unpack_kernel, 1, 32, values, pairs, to_kernel(codes))
    return to_host(values), to_host(pairs).view(ml_dtypes.bfloat16).astype(np.float32) * BF16_UNIT


def numbers(dtype):
    """All codes that quantize.py writes, and further ones that are numbers."""
    codes = np.arange(256).astype(np.uint8).view(dtype)
    return np.where(np.isnan(code_values(codes)), dtype(0), codes)


@pytest.mark.parametrize("dtype", CODES)
def test_every_code(dtype):
    codes = np.random.default_rng(0).permutation(numbers(dtype))
    for found in unpack(codes):
        assert np.array_equal(found, code_values(codes))
        assert np.array_equal(np.signbit(found), np.signbit(code_values(codes)))


def permute(a, b, selector):
    """PTX's prmt; a digit from 8 on stands for copies of a byte's sign bit."""
    source = [int(x) >> 8 * j & 0xFF for x in (a, b) for j in range(4)]
    source += [0xFF * (byte >> 7) for byte in source]
    return sum(source[selector >> 4 * j & 15] << 8 * j for j in range(4))


@pytest.mark.parametrize("dtype", CODES)
def test_the_bits_by_hand(dtype):
    """The integer arithmetic of codes.py, once more in Python: the simulator runs NumPy's conversion instead."""
    codes = numbers(dtype)
    as_float = lambda bits: np.array([bits], np.uint32).view(np.float32)[0]
    halves = lambda bits: np.array([bits << 16, bits & 0xFFFF0000], np.uint64).astype(np.uint32)
    exactly = lambda bits: halves(bits).view(np.float32).astype(np.float64)  # subnormal ones too
    for word, values in zip(codes.view(np.uint32), code_values(codes).reshape(-1, 4)):
        word, found, pairs = int(word), [], []
        for j in range(4):
            if dtype == np.int8:
                shifted = word ^ 0x80808080
                found.append(as_float(permute(shifted, 0x4B000000, 0x7540 | j)) - (2.0**23 + 128))
            else:
                top = word << 24 - 8 * j & 0xFF000000
                found.append(as_float(top & 0x80000000 | top >> 4 & 0x07F00000) * 2.0**120)
        for selector in (0x4140, 0x4342) if dtype == np.int8 else (0x9180, 0xB3A2):
            if dtype == np.int8:
                a, b, c = permute(word ^ 0x80808080, 0, selector), 0x7F007F00, 0xC000C000
            else:
                a = permute(word, 0, selector) << 4 & 0x87F087F0
                b, c = 0x78807880, 0x80008000
            pairs += list((exactly(a) * exactly(b) + exactly(c)) * BF16_UNIT)
        assert found == values.tolist() and pairs == values.tolist()


def test_four_bits_by_hand():
    """The arithmetic of int4_to_bf16 and nf4_to_bf16: the simulator shifts and looks up instead."""
    value = lambda half: np.array([half], np.uint16).view(ml_dtypes.bfloat16).astype(float)[0]
    table = NF4_LEVELS.view(np.uint8).reshape(16, 4)[:, 2:]
    for word in (0x76543210, 0xFEDCBA98, 0x8F3A60C5):
        codes = [word >> 4 * j & 15 for j in range(8)]
        for j in range(4):
            mask, factor = ((0x000F000F, 2.0**127), (0x00F000F0, 2.0**123))[j % 2]
            bits = word >> j // 2 * 8 & mask
            found = [value(half) * factor for half in (bits & 0xFFFF, bits >> 16)]
            assert found == [codes[j] / BF16_UNIT, codes[j + 4] / BF16_UNIT]
        for first in (0, 4):
            half = word >> 4 * first & 0xFFFF
            mask = permute(0x80808080, 0x80808080, half)
            found = []
            for column in table.T:
                words = np.ascontiguousarray(column).view(np.uint32)
                low, high = (permute(*words[i : i + 2], half & 0x7777) for i in (0, 2))
                found.append(np.array([high & mask | low & ~mask], np.uint32).view(np.uint8))
            levels = np.stack(found, 1).view(ml_dtypes.bfloat16)[:, 0]
            assert np.array_equal(levels, NF4_LEVELS[codes[first : first + 4]])


def test_the_levels_are_those_of_qlora():
    """Quantiles of a normal distribution, 8 above 0 and 7 below (Dettmers et al. 2023, appendix E)."""
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    levels = np.sort(np.array([*above, 0, *below])) / max(above)
    assert np.array_equal(np.sort(NF4_LEVELS.astype(np.float32)), levels.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", CODES)
def test_instructions(monkeypatch, nvvm, dtype):
    """No conversion of integers, whose rate is a quarter or less."""
    call = functools.partial(unpack, numbers(dtype)[:16])
    monkeypatch.setattr("checks.GPU", False)
    ((found, types),) = signatures(monkeypatch, call)
    for ptx in ptx_for(monkeypatch, found, types, CARDS_BF16).values():
        assert ".rn.f32.s" not in ptx and ".local " not in ptx
        assert ptx.count("fma.rn.bf16x2") == 8  # two numbers each
        assert "ld.global.v4.u32" in ptx or "ld.global.v4.b32" in ptx
        assert ptx.count("prmt.b32") == (16 + 8 if dtype == np.int8 else 8)
