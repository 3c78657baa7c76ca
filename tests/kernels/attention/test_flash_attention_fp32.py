"""FlashAttention in float32, the version to read first: against float64, and as exact as its reference in float32."""

import numpy as np
import pytest
from checks import GPU, assert_as_good, to_kernel
from flash_attention_cases import case, everything, exact

FP32 = [
    (1, 1, 1, 1, 1, 1, True),
    (1, 35, 40, 1, 1, 4, True),
    (1, 9, 12, 2, 1, 3, False),
    (1, 3, 18, 1, 1, 66, True),
    (1, 5, 18, 2, 1, 130, True),  # K and V take turns in one tile; backward by gemm_attention.py
]
if GPU:
    FP32 += [
        (1, 300, 517, 4, 2, 128, True),
        (1, 300, 517, 4, 2, 256, True),
        (1, 700, 700, 1, 1, 64, True),
        (1, 77, 50, 2, 1, 33, False),
    ]


@pytest.mark.long
@pytest.mark.parametrize("shape", FP32, ids=str)
def test_fp32_kernels(shape):
    *shape, causal = shape
    arrays = case(*shape, dtype=np.float32)
    got = everything(*map(to_kernel, arrays), 0.4, causal)
    right, plain = exact(arrays, 0.4, causal), everything(*arrays, 0.4, causal)
    for name, g, e, p in zip(("o", "lse", "dq", "dk", "dv"), got, right, plain):
        assert_as_good(g, e, p, floor=4e-7, what=name)
