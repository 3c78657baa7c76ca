"""FlashAttention on tensor cores: against float64, and at least as exact as PyTorch in bf16."""

import numpy as np
import pytest
from checks import GPU, assert_as_good, to_host, to_kernel
from flash_attention_cases import BF16, case, everything, exact, small_bf16_tiles, torch_sdpa

from xtrain.kernels.attention import flash_attention as fa

__all__ = ["small_bf16_tiles"]
# B, T, S, H, G, D, causal: one token; a whole tile; ragged and grouped; a past; few keys for many queries
SHAPES = [
    (1, 1, 1, 1, 1, 16, True), (1, 32, 32, 1, 1, 32, True), (1, 40, 40, 1, 1, 16, True),
    (2, 9, 41, 1, 1, 16, True), (1, 40, 13, 2, 1, 16, False),
]  # fmt: skip
WIDE = [
    (1, 18, 34, 1, 1, 64, True),
    (1, 18, 20, 1, 1, 128, True),
    (1, 3, 5, 1, 1, 128, False),
    (1, 18, 20, 1, 1, 256, True),
]
if GPU:
    SHAPES += [
        (1, 517, 517, 4, 2, D, causal) for D in (16, 32, 64, 128, 256) for causal in (True, False)
    ]
    SHAPES += [
        (4, 256, 256, 3, 3, 32, True),
        (1, 100, 700, 8, 1, 64, True),
        (1, 2100, 2100, 1, 1, 128, True),
        (1, 1100, 1500, 4, 1, 256, True),
    ]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES + WIDE, ids=str)
def test_bf16_kernels_are_as_exact_as_torch(shape):
    *shape, causal = shape
    arrays, scale = case(*shape, dtype=BF16), shape[-1] ** -0.5
    got = everything(*map(to_kernel, arrays), scale, causal)
    right = exact(arrays, scale, causal)
    theirs = torch_sdpa(*arrays, scale, causal)
    for name, g, e, t in zip(
        ("o", "dq", "dk", "dv"), (got[0], *got[2:]), (right[0], *right[2:]), theirs
    ):
        assert_as_good(g, e, t, floor=2e-4, what=name)
    np.testing.assert_allclose(to_host(got[1]), right[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fwd", "dq", "dkdv"])
@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_every_choice_has_a_variant_for_99_kilobytes(monkeypatch, kind, D):
    monkeypatch.undo()  # the real table
    for causal in (True, False):
        for T in (1, 512, 4096, 10**6):
            small = fa.choose(kind, D, T, causal, 99 * 1024)
            assert fa._factory(kind, D)[1](D, small) <= 99 * 1024
            large = fa.choose(kind, D, T, causal, 227 * 1024)
            assert fa._factory(kind, D)[1](D, large) <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_small_tiles_on_the_gpu(monkeypatch, D):
    monkeypatch.setattr(fa, "choose", lambda kind, D, *rest: fa.small_tiles(kind, D))
    test_bf16_kernels_are_as_exact_as_torch((2, 200, 200, 4, 2, D, True))
