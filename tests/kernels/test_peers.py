"""add_peers and copy_to_peers: the kernels equal the references bit for bit, for any number of peers and any address."""

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, planted_bugs, same_bytes, to_host, to_kernel, with_planted_bug

from xtrain.kernels import peers as file
from xtrain.kernels.peers import MOST, add_peers, add_peers_ref, copy_to_peers
from xtrain.kernels.primitives.flat import TILE
from xtrain.simulator import KernelError

BF16 = ml_dtypes.bfloat16
SIZES = [0, 1, 5, 64, TILE + 9] + [3 * TILE * file.COPYING + 5] * GPU


def arrays(count, n, dtype):
    return [normal(i, n).astype(dtype) for i in range(count)]


def check_both(count, n, dtype=np.float32, first=0):
    """Both ops on elements `first` and later of longer arrays; nothing else is written."""
    y, *others = arrays(count + 1, n + first + 3, dtype)
    part = slice(first, first + n)
    want = y.astype(np.float32)
    for x in others:
        want[part] += x[part].astype(np.float32)
    total, given = to_kernel(y), [to_kernel(x) for x in others]
    add_peers(total[part], [x[part] for x in given])
    # in bf16 with more than MOST peers the sum is rounded several times
    if dtype == np.float32 or count <= MOST:
        assert same_bytes(to_host(total), want.astype(dtype))
    assert all(np.array_equal(to_host(x), host) for x, host in zip(given, others))
    copy_to_peers([x[part] for x in given], to_kernel(y)[part])
    for x, host in zip(given, others):
        host[part] = y[part]
        assert same_bytes(to_host(x), host)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("count", [*range(1, MOST + 1), MOST + 2])
def test_any_number_of_peers(count, dtype):
    check_both(count, 70, dtype)


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("n", SIZES)
def test_any_size_at_any_address(n, first):
    check_both(3, n, first=first)


def test_the_sum_has_the_order_of_the_peers():
    y, a, b = np.float32([1e8]), np.float32([-1e8]), np.float32([1.0])
    for peers, want in (([a, b], 1.0), ([b, a], 0.0)):
        total = to_kernel(y)
        add_peers(total, [to_kernel(x) for x in peers])
        assert to_host(total)[0] == want
        reference = y.copy()
        add_peers_ref(reference, peers)
        assert reference[0] == want


def test_references_on_the_host():
    y, a, b = arrays(3, 9, np.float32)
    want = y + a + b
    add_peers(y, [a, b])
    assert np.array_equal(y, want)
    copy_to_peers([a, b], y)
    assert np.array_equal(a, y) and np.array_equal(b, y)


@planted_bugs
@pytest.mark.parametrize(
    "name, old, new",
    [
        ("make_add_peers_kernel", "load(x[s * COUNT + 2], c_n", "load(x[s * COUNT + 2], b_n"),
        ("make_add_peers_kernel", "total[s, j] += x[s * COUNT + k, j]", "total[s, j] += x[s * COUNT, j]"),
        ("make_copy_to_peers_kernel", "store(c_n, i, GAP, n, x[s], vectorized)", "pass"),
        ("make_copy_to_peers_kernel", "int64(cuda.gridDim.x) * TILE", "int64(cuda.gridDim.x) * 2 * TILE"),
        ("make_copy_to_peers_kernel", "if can_vectorize(first, n, aligned)", "if aligned"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(monkeypatch, name, old, new):
    monkeypatch.setattr(file, "COPYING", 1)
    with with_planted_bug([file], name, old, new), pytest.raises((KernelError, AssertionError)):
        check_both(3, 2 * TILE + 9)


def test_bad_input():
    x = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="add_peers: no peer"):
        add_peers(x, [])
    with pytest.raises(ValueError, match=r"copy_to_peers: b has shape \(7,\), expected \(8\)"):
        copy_to_peers([x, x[1:]], x)
    with pytest.raises(TypeError, match="add_peers: b is bfloat16"):
        add_peers(x, [x.astype(BF16)])
    with pytest.raises(ValueError, match="not contiguous"):
        add_peers(x, [np.ones(16, np.float32)[::2]])
    with pytest.raises(TypeError, match="on one device"):
        add_peers(x, [to_kernel(x)])
