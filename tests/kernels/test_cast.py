"""float32 <-> bfloat16, bit for bit against ml_dtypes and PyTorch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import GPU, normal, rng, sentinels, to_host, to_kernel

from xtrain.kernels.cast import cast_fwd, cast_ref, narrow_naive_kernel
from xtrain.kernels.primitives.flat import BLOCK
from xtrain.kernels.runtime.launch import launch

BF16 = ml_dtypes.bfloat16


def bits(x):
    return to_host(x).view(np.uint32 if x.dtype == np.float32 else np.uint16)


def from_bits(*groups):
    return np.concatenate([np.asarray(g).astype(np.uint32) for g in groups]).view(np.float32)


def hard_floats():
    """Every kind of rounding: around the ties of some upper halves; infinity, NaN, subnormals."""
    upper = np.concatenate(
        [
            np.arange(0, 6),  # zero and subnormals
            np.arange(0x007E, 0x0082),  # the smallest normal numbers
            np.arange(0x3F7E, 0x3F84),  # around one
            np.arange(0x7F7D, 0x7F80),  # up to the largest number: rounding may give infinity
        ]
    )
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    ties = ((upper[:, None] << 16) + lower).reshape(-1)
    special = [0x7F800000, 0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF]  # infinity and NaN
    positive = np.concatenate([ties, special])
    random = rng(1).integers(0, 1 << 32, 1 << 20 if GPU else 1 << 10)
    return from_bits(positive, positive + (1 << 31), random)


def test_narrowing_is_bit_exact():
    x = hard_floats()
    got, want = cast_fwd(to_kernel(x), BF16), cast_ref(x, BF16)
    assert got.dtype == BF16
    wrong = np.flatnonzero(bits(got) != bits(want))
    assert not wrong.size, [f"{x.view(np.uint32)[i]:08x}" for i in wrong[:5]]
    nan = np.isnan(x)
    assert np.isnan(to_host(got)[nan].astype(np.float32)).all()
    oracle = torch.tensor(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits(got)[~nan], oracle[~nan])


def test_the_naive_kernel_narrows_to_the_same_bits():
    x = hard_floats()
    y = to_kernel(np.zeros(x.size, np.uint16))
    launch(narrow_naive_kernel, -(-x.size // BLOCK), BLOCK, y, to_kernel(x.view(np.uint32)))
    assert np.array_equal(to_host(y), bits(cast_fwd(to_kernel(x), BF16)))


@pytest.mark.parametrize("first", [1, 4, 8])
def test_a_slice_at_any_address(first):
    x = hard_floats()[: 200 + first]
    narrow = cast_fwd(to_kernel(x)[first:], BF16)
    assert np.array_equal(bits(narrow), bits(cast_ref(x[first:], BF16)))
    wide = cast_fwd(to_kernel(cast_ref(x, BF16))[first:], np.float32)
    assert np.array_equal(bits(wide), bits(narrow).astype(np.uint32) << 16)


def test_widening_every_pattern_is_bit_exact():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    step = 1 if GPU else 13  # a sample in the simulator, with the ends of every exponent
    ends = np.arange(0, 1 << 16, 1 << 7)
    chosen = np.unique(np.concatenate([np.arange(0, 1 << 16, step), ends, ends + 1, ends + 127]))
    x = patterns[chosen].view(BF16)
    got = cast_fwd(to_kernel(x), np.float32)
    assert got.dtype == np.float32 and np.array_equal(bits(got), bits(cast_ref(x, np.float32)))
    every = cast_fwd(patterns.view(BF16), "float32")
    assert np.array_equal(bits(every), patterns.astype(np.uint32) << 16)


def test_there_and_back():
    """Widening is exact, so a second round trip changes nothing; the first errs by half a unit."""
    x = normal(1, 3, 5, 7, scale=100.0)
    once = cast_fwd(cast_fwd(to_kernel(x), BF16), np.float32)
    again = cast_fwd(cast_fwd(once, BF16), np.float32)
    assert once.shape == x.shape and np.array_equal(to_host(once), to_host(again))
    assert (np.abs(to_host(once) - x) <= np.abs(x) * 2.0**-8).all()


def test_same_dtype_is_the_array_itself():
    x = to_kernel(normal(1, 4))
    assert cast_fwd(x, np.float32) is x


def test_nothing_outside_the_outputs(monkeypatch):
    x = to_kernel(normal(1, 5, 7))
    with sentinels(monkeypatch):
        wide = cast_fwd(cast_fwd(x, BF16), np.float32)
    assert wide.shape == (5, 7)
    empty = cast_fwd(to_kernel(np.zeros((0, 3), np.float32)), BF16)
    assert empty.shape == (0, 3) and empty.dtype == BF16


def test_bad_input():
    x = np.ones((2, 8), np.float32)
    with pytest.raises(TypeError, match="x is int32, expected float32 or bfloat16"):
        cast_fwd(x.astype(np.int32), BF16)
    with pytest.raises(ValueError, match="cast: to float16, expected float32 or bfloat16"):
        cast_fwd(x, np.float16)
    with pytest.raises(ValueError, match="not contiguous"):
        cast_fwd(x[:, ::2], BF16)
