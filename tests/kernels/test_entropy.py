"""Entropy of a softmax: the reference against PyTorch, the kernel against the reference, refused input."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import assert_as_good, normal, to_host, to_kernel

from xtrain.kernels.entropy import BLOCK, entropy, entropy_ref


def case(N, P, V, dtype=np.float32):
    x = normal(3, N, P, mean=2.0, scale=4.0, dtype=dtype)
    x[:, V:] = 1e4  # padding
    if V > 3:
        x[0, 1:3] = -np.inf  # tokens that are not kept
    return x


def test_reference_is_that_of_pytorch():
    x = case(5, 40, 37, np.float64)
    theirs = torch.distributions.Categorical(logits=torch.tensor(x[1:, :37])).entropy()
    np.testing.assert_allclose(entropy_ref(x[1:], 37), theirs.numpy(), rtol=1e-12)
    kept = np.delete(x[:1, :37], [1, 2], 1)
    np.testing.assert_allclose(entropy_ref(x[:1], 37), entropy_ref(kept, 35), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 40, 37), (2, BLOCK + 8, BLOCK + 1)])
def test_kernel(shape, dtype):
    x = to_kernel(case(*shape).astype(dtype))
    exact = entropy_ref(to_host(x).astype(np.float64), shape[2])
    found = entropy(x, shape[2])
    assert_as_good(found, exact, entropy_ref(to_host(x).astype(np.float32), shape[2]))
    assert np.array_equal(to_host(found), to_host(entropy(x, shape[2])))


def test_refused_input():
    with pytest.raises(ValueError, match="entropy: a vocabulary of 5, the logits have 4 columns"):
        entropy(to_kernel(np.zeros((2, 4), np.float32)), 5)
    with pytest.raises(TypeError, match="logits"):
        entropy(to_kernel(np.zeros((2, 4), np.int32)), 4)
