"""fp8_gemm.py: products of fp8 codes against float64."""

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, pairwise, to_host, to_kernel

from xtrain import device
from xtrain.kernels.fp8 import DTYPES, TILE, Operand, Slot, encode_ref, fp8
from xtrain.kernels.fp8_gemm import fp8_matmul

BF16 = ml_dtypes.bfloat16
HAS_FP8 = not GPU or int(device.cupy().cuda.Device().compute_capability) >= 89
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs compute capability 8.9")


def slot(kind) -> Slot:
    state = (np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int64))
    return Slot(*map(to_kernel, state), kind)


@pairwise(
    {
        "kinds": [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")],
        "dtype": [np.float32, BF16],
        "accumulate": [False, True],
    }
)
def test_products(kinds, dtype, accumulate):
    M, N, K = (48, 80, 112) if not GPU else (384, 272, 1040)
    operands, exact = [], []
    for i, (kind, rows) in enumerate(zip(kinds, (M, N))):
        x = normal(i, rows, K, scale=3.0)
        scale = np.float32(0.01 * (i + 1))
        codes = encode_ref(x, scale, kind)[0]
        exact.append(codes.view(DTYPES[kind]).astype(np.float64) * scale)
        operands.append(Operand(to_kernel(codes), to_kernel(np.array([scale])), kind))
    before = normal(9, M, N).astype(dtype)
    out = to_kernel(before.copy())
    assert fp8_matmul(out, *operands, accumulate=accumulate) is out
    wanted = exact[0] @ exact[1].T + (before.astype(np.float64) if accumulate else 0)
    error = np.abs(to_host(out).astype(np.float64) - wanted).max() / np.abs(wanted).max()
    # Hopper's tensor cores add fp8 products with about 14 bits: 3.4e-4 of the largest sum was measured on an H100
    assert error < (1e-3 if GPU else 2e-5) + (0 if dtype == np.float32 else 2.0**-8)


def test_the_three_products_of_a_layer():
    """Their operands are the right way round, and the errors are fp8's."""
    N, I, O = TILE, TILE, 2 * TILE  # noqa: E741
    x, w, dy = (normal(i, *s, mean=0).astype(BF16) for i, s in enumerate(((N, I), (O, I), (N, O))))
    codes = [fp8(to_kernel(a), slot(k), True) for a, k in ((x, "e4m3"), (w, "e4m3"), (dy, "e5m2"))]
    xc, wc, dyc = codes
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    for out, a, b, exact in (
        ((N, O), xc.rows, wc.rows, x @ w.T),
        ((N, I), dyc.rows, wc.columns, dy @ w),
        ((O, I), dyc.columns, xc.columns, dy.T @ x),
    ):
        found = to_host(fp8_matmul(to_kernel(np.zeros(out, np.float32)), a, b))
        assert np.linalg.norm(found - exact) < 0.08 * np.linalg.norm(exact)
