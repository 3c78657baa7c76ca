"""Findings about speed: slow kernels, each with a fast twin of the same result."""

import numpy as np
import pytest
from numba import cuda, float32, int32

from xtrain.simulator import KINDS, check, run

SPEED = {"bank_conflict", "uncoalesced", "divergent_warp", "float64", "order_dependent"}


@cuda.jit
def transposed(y, x, pad):
    """Tiles of 32 x 32 by 32 x 8 threads."""
    tile = cuda.shared.array((32, 32), float32)
    tile_padded = cuda.shared.array((32, 33), float32)
    i, j = cuda.threadIdx.y, cuda.threadIdx.x
    for r in range(i, 32, 8):
        if pad:
            tile_padded[r, j] = x[r, j]
        else:
            tile[r, j] = x[r, j]
    cuda.syncthreads()
    for r in range(i, 32, 8):
        if pad:
            y[r, j] = tile_padded[j, r]
        else:
            y[r, j] = tile[j, r]


@cuda.jit
def copied(y, x, stride):
    i = cuda.grid(1)
    y[i] = x[i * stride]


@cuda.jit
def copied_by_columns(y, x):
    for k in range(8):
        y[cuda.threadIdx.x, k] = x[cuda.threadIdx.x, k]


@cuda.jit
def summed(total, x, interleaved):
    s = cuda.shared.array(128, int32)
    tid = cuda.threadIdx.x
    s[tid] = x[tid]
    cuda.syncthreads()
    step = 1
    while step < 128:
        if interleaved:
            if tid % (2 * step) == 0:
                s[tid] += s[tid + step]
        elif tid < 64 // step:
            s[tid] += s[tid + 64 // step]
        cuda.syncthreads()
        step *= 2
    if tid == 0:
        total[0] = s[0]


@cuda.jit
def of_two_kinds(y, x, by_warp):
    i = cuda.grid(1)
    odd = i % 2
    if by_warp:
        odd = i // 32 % 2
    if odd == 1:
        y[i] = x[i] + float32(1)
    else:
        y[i] = x[i] - float32(1)


@cuda.jit
def warp_leaders(y, x):
    """Lane 0 of each warp writes, thread 0 of the block, and the threads below n: not divergent."""
    i = cuda.grid(1)
    if i % 32 == 0:
        y[i // 32] = x[i]
    if i == 0:
        y[100] = x[0]
    if i < 77:
        y[i] += float32(1)


@cuda.jit
def halved(y, x, factor):
    i = cuda.grid(1)
    y[i] = x[i] * factor


@cuda.jit
def halved_by_a_literal(y, x):
    i = cuda.grid(1)
    y[i] = x[i] * 0.5


@cuda.jit
def added(total, x):
    cuda.atomic.add(total, 0, x[cuda.grid(1)])


F, N = np.float32, np.arange(1024, dtype=np.float32)
SQUARE, ROWS = N.reshape(32, 32), N.reshape(128, 8)
RANDOM = np.random.default_rng(0).standard_normal(256).astype(F)
# kernel, grid, block, arguments, kind and factor of each finding
CASES = {
    "bank conflicts": (transposed, 1, (32, 8), (SQUARE, SQUARE, 0), [("bank_conflict", "32.0 x")]),
    "a padded tile": (transposed, 1, (32, 8), (SQUARE, SQUARE, 1), []),
    "a stride": (copied, 2, 64, (N, N, 8), [("uncoalesced", "8.0 x")]),
    "no stride": (copied, 2, 64, (N, N, 1), []),
    "one element for all": (copied, 2, 64, (N, N, 0), []),
    "columns": (copied_by_columns, 1, 128, (ROWS, ROWS), [("uncoalesced", "8.0 x")] * 2),
    "a sum over scattered threads": (
        summed, 1, 128, (np.zeros(1, np.int32), np.ones(128, np.int32), 1), [("divergent_warp", "3.2 x")],
    ),
    "a sum over whole warps": (summed, 1, 128, (np.zeros(1, np.int32), np.ones(128, np.int32), 0), []),
    "two kinds of threads": (of_two_kinds, 2, 64, (N, N, 0), [("divergent_warp", "2.0 x")] * 2 + [("uncoalesced", "2.0 x")] * 4),
    "two kinds of warps": (of_two_kinds, 2, 64, (N, N, 1), []),
    "leaders": (warp_leaders, 1, 128, (N, N), []),
    "a Python float": (halved, 1, 32, (N, N, 0.5), [("float64", "1/64")]),
    "a literal": (halved_by_a_literal, 1, 32, (N, N), [("float64", "1/64")]),
    "a float32": (halved, 1, 32, (N, N, F(0.5)), []),
    "float64 arrays": (halved, 1, 32, (np.zeros(32), np.ones(32), 0.5), []),
    "a rounded sum": (added, 4, 64, (np.zeros(1, F), RANDOM), [("order_dependent", "last bits")]),
    "an exact sum": (added, 4, 64, (np.zeros(1, F), N), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_slow_kernels_and_their_twins(case):
    kernel, grid, block, args, expected = CASES[case]
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    found = check(kernel, grid, block, *args, enable=SPEED, allow={"race", "same_value_race"})
    found.sort(key=lambda finding: finding.kind)
    assert [f.kind for f in found] == [kind for kind, _ in expected], found
    for finding, (_, words) in zip(found, expected):
        assert words in str(finding) and finding.severity == "warning" and len(finding.sites) == 1
    again = [a.copy() if isinstance(a, np.ndarray) else a for a in CASES[case][3]]
    assert check(kernel, grid, block, *again, allow={"race", "same_value_race"}) == []
    for a, b in zip(args, again):
        np.testing.assert_array_equal(a, b)


def test_a_finding_is_given_to_warn_and_allowed_at_its_line():
    warnings = []
    run(copied, 2, 64, N.copy(), N, 8, enable=SPEED, warn=warnings.append)
    assert [w.kind for w in warnings] == ["uncoalesced"]
    run(copied, 2, 64, N.copy(), N, 8, enable=SPEED, allow={"uncoalesced:x"})
    assert not any(KINDS[kind].reported for kind in SPEED)
