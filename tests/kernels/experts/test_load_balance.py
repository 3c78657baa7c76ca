"""The load of experts and the biases that level it: kernels against the references, bad input."""

import numpy as np
import pytest
from checks import int32, normal, rng, same_bytes, to_host, to_kernel

from xtrain.kernels.experts.load_balance import BLOCK, add_counts, move_bias


def test_the_reference_moves_towards_the_mean():
    bias = np.zeros(4, np.float32)
    move_bias(bias, int32([2, 0, 1, 1]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0, 0]


@pytest.mark.parametrize("E", [1, 5, BLOCK + 3])
def test_kernels(E):
    bias = normal(2, E)
    load, counts = rng(1).integers(0, 9, (2, E)).astype(np.int32)
    whole = to_kernel(np.full(E + 8, 7, np.int32))
    given, given_bias = whole[4:-4], to_kernel(bias)
    given[...] = to_kernel(load)
    add_counts(given, to_kernel(counts))
    assert np.array_equal(to_host(whole), [7] * 4 + (load + counts).tolist() + [7] * 4)
    move_bias(given_bias, given, 0.01)
    move_bias(bias, load + counts, 0.01)
    assert same_bytes(to_host(given_bias), bias)


def test_loads_beyond_32_bits():
    load = int32([2**31 - 1, 2**31 - 1, 2**31 - 3])
    bias = np.zeros(3, np.float32)
    given = to_kernel(bias)
    move_bias(given, to_kernel(load), 1.0)
    move_bias(bias, load, 1.0)
    assert to_host(given).tolist() == bias.tolist() == [-1, -1, 1]


def test_bad_input():
    with pytest.raises(TypeError, match="load is int64"):
        add_counts(np.zeros(3, np.int64), int32([1, 2, 3]))
    with pytest.raises(ValueError, match=r"bias has shape \(2,\), expected \(3\)"):
        move_bias(np.zeros(2, np.float32), int32([1, 2, 3]), 0.1)
