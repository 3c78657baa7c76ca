"""The checksum of memory: kernel against reference, every flipped bit, and the flag that stays."""

import numpy as np
import pytest
from checks import to_host, to_kernel

from xtrain.kernels.checksum import PARTIALS, WARP, checksum, checksum_ref, compare

PLACES = pytest.mark.parametrize("place", [np.array, to_kernel], ids=["reference", "kernel"])


def words(n, seed=0):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, n).astype(np.int32)


def of(place, x):
    total = place(np.zeros(1, np.int64))
    checksum(place(x), total)
    return int(to_host(total)[0])


@pytest.mark.parametrize("n", [0, 1, 2, 31, 33, 1000, 5000])
def test_kernel_against_reference(n):
    x = words(n, n)
    exact = sum((int(w) % 2**32) * ((2 * i + 1) % 2**16) for i, w in enumerate(x)) % 2**32
    assert of(np.array, x) == of(to_kernel, x) == exact
    assert of(np.array, -np.ones(n, np.int32)) == of(to_kernel, -np.ones(n, np.int32))


@pytest.mark.gpu
def test_more_words_than_warps():
    x = words(3 * PARTIALS * WARP + 5)
    assert of(to_kernel, x) == checksum_ref(x)[0]


@PLACES
def test_every_flipped_bit_changes_it(place):
    x = words(40)
    before = of(place, x)
    for bit in range(0, 40 * 32, 7):
        flipped = x.copy()
        flipped.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert of(place, flipped) != before, bit
    assert of(place, x[::-1].copy()) != before, "the order counts"


@PLACES
def test_a_change_is_remembered(place):
    changed, expected = place(np.zeros(1, np.int32)), np.array([3, 5, 0], np.int64)
    for sums, flag in (([3, 5, 0], 0), ([3, 5, 1], 1), ([3, 5, 0], 1)):
        compare(place(np.array(sums, np.int64)), place(expected), changed)
        assert to_host(changed).tolist() == [flag]


def test_other_arrays_are_refused():
    total = np.zeros(1, np.int64)
    with pytest.raises(TypeError, match="words is float32"):
        checksum(np.zeros(3, np.float32), total)
    with pytest.raises(ValueError, match="sum has shape"):
        checksum(np.zeros(3, np.int32), np.zeros(2, np.int64))
