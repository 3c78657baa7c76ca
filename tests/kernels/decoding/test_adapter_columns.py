"""adapter_columns.py: the columns of other adapters than a row's own become 0, and nothing else changes."""

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, to_host, to_kernel, with_planted_bug

from xtrain.kernels.decoding import adapter_columns
from xtrain.kernels.decoding.adapter_columns import THREADS, keep_own_columns
from xtrain.simulator import KernelError, sim

put_both = pytest.mark.parametrize("put", [np.array, to_kernel], ids=["reference", "kernel"])


@put_both
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("N, A", [(1, 1), (5, 7), (3, THREADS + 3)])
def test_equals_the_definition(put, dtype, N, A):
    rng = np.random.default_rng(N)
    adapters = rng.integers(-1, 3, N).astype(np.int32)
    owners = rng.integers(0, 3, A).astype(np.int32)
    u = (normal(0, N, A, scale=3.0) + 2).astype(dtype)
    want = u.copy()
    for n in range(N):
        for a in range(A):
            if owners[a] != adapters[n]:
                want[n, a] = 0
    on_device = put(u)
    keep_own_columns(on_device, put(adapters), put(owners))
    np.testing.assert_array_equal(to_host(on_device), want)


def test_bad_values():
    u = np.ones((2, 3), np.float32)
    two = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="owners has shape"):
        keep_own_columns(u, two, two)
    with pytest.raises(ValueError, match="adapters has shape"):
        keep_own_columns(u, np.zeros(3, np.int32), np.zeros(3, np.int32))


@pytest.mark.skipif(GPU, reason="planted bugs are for the simulator")
@pytest.mark.parametrize("old, new", [
    ("owners_A[a] != adapter", "owners_A[a] == adapter"), ("n * A + a", "n + a"), ("adapters_N[n]", "adapters_N[0]"),
])  # fmt: skip
def test_planted_bugs_are_found(old, new):
    with (
        with_planted_bug([adapter_columns], "make_keep_kernel", old, new),
        pytest.raises((KernelError, AssertionError)),
    ):
        test_equals_the_definition(lambda x: sim(np.array(x)), np.float32, 5, 7)
