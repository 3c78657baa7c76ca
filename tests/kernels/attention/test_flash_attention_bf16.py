"""FlashAttention on tensor cores: against float64, and at least as exact as PyTorch in bf16."""

import numpy as np
import pytest
from checks import GPU, assert_as_good, to_host, to_kernel
from flash_attention_cases import BF16, case, everything, exact, small_bf16_tiles, torch_sdpa
from test_flash_attention import test_packed_arrays_are_read_and_written_in_place as packed_arrays

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention.flash_attention_bf16_bwd_whole import TILES, WIDTHS, WholeTiles

__all__ = ["small_bf16_tiles"]
# B, T, S, H, G, D, causal: one token; a whole tile; ragged and grouped; a past; few keys for many queries
SHAPES = [
    (1, 1, 1, 1, 1, 16, True), (1, 32, 32, 1, 1, 32, True), (1, 70, 70, 1, 1, 16, True),
    (2, 9, 41, 2, 2, 16, True), (1, 40, 13, 4, 2, 16, False),
]  # fmt: skip
WIDE = [(1, 18, 34, 2, 1, 64, True), (1, 18, 20, 1, 1, 128, True), (1, 3, 5, 1, 1, 128, False)]
if GPU:
    SHAPES += [
        (1, 517, 517, 4, 2, D, causal) for D in (16, 32, 64, 128) for causal in (True, False)
    ]
    SHAPES += [
        (4, 256, 256, 3, 3, 32, True),
        (1, 100, 700, 8, 1, 64, True),
        (1, 2100, 2100, 1, 1, 128, True),
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


def always_whole(monkeypatch, keys):
    tiles = TILES if GPU else WholeTiles(keys=keys, blocks=1)
    monkeypatch.setattr(fa, "choose_whole", lambda *_: tiles)


# keys of a block; fewer and more keys than queries, a past that is not a multiple of 64, several query heads, two rounds of 64
@pytest.mark.long
@pytest.mark.parametrize("keys, shape", [
    (64, (1, 1, 2, 1, 1, 32, True)), (64, (2, 9, 9, 2, 2, 32, True)), (64, (1, 41, 50, 2, 1, 16, True)),
    (64, (1, 17, 40, 2, 1, 16, False)), (128, (1, 34, 99, 1, 1, 16, True)), (128, (1, 67, 67, 1, 1, 16, True)),
    (128, (1, 67, 10, 1, 1, 16, False)),
    *[(256, (3, T, S, 4, G, D, T <= S)) for D in WIDTHS for T, S, G in (
        (256, 256, 4), (200, 201, 2), (65, 250, 1), (129, 256, 4), (256, 100, 2),
    ) if GPU],
], ids=str)  # fmt: skip
def test_a_block_that_holds_all_keys(monkeypatch, keys, shape):
    """As exact as the two kernels, which round at the same steps."""
    *shape, causal = shape
    arrays, scale = case(*shape, dtype=BF16), shape[-1] ** -0.5
    q, k, v, do = map(to_kernel, arrays)
    o, lse = map(to_kernel, fa.flash_attention_fwd(*arrays[:3], scale, causal))
    monkeypatch.setattr(fa, "choose_whole", lambda *_: None)
    theirs = fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal)
    always_whole(monkeypatch, keys)
    got = fa.flash_attention_bwd(do, q, k, v, o, lse, scale, causal)
    right = exact(arrays, scale, causal)[2:]
    for name, g, e, t in zip(("dq", "dk", "dv"), got, right, theirs):
        assert_as_good(g, e, t, floor=2e-4, what=name)


@pytest.mark.long
def test_all_keys_with_values_in_a_packed_array(monkeypatch):
    always_whole(monkeypatch, 64)
    for which in ("qkv", "v") if GPU else ("v",):
        packed_arrays(BF16, 2, 200 if GPU else 5, 2, 1, 16, which)


def test_keys_that_do_not_exist_have_no_weight(monkeypatch):
    """All scores are near -256, so exp(0 - lse), the weight of a key of zeros, would be infinite."""
    always_whole(monkeypatch, 64)
    q, k, v, do = case(1, 5, 7, 1, 1, 16)
    arrays = [x.astype(BF16) for x in (4 + q / 8, k / 8 - 4, v, do)]
    got, right = everything(*map(to_kernel, arrays), 1.0, False), exact(arrays, 1.0, False)
    for g, e, t in zip(got[2:], right[2:], torch_sdpa(*arrays, 1.0, False)[1:]):
        assert_as_good(g, e, t, floor=2e-4, what="gradient", scale=4)


def test_which_heads_get_a_block_that_holds_all_keys(monkeypatch):
    monkeypatch.undo()  # no small tiles
    monkeypatch.setattr(fa, "multiprocessors", lambda x: 132)
    x = to_kernel(np.zeros(1, np.float32))

    def chosen(B, T, S, H, G, D):
        return fa.choose_whole((B, T, H, D), (B, S, G, D), x) is not None

    assert chosen(32, 256, 256, 12, 12, 32) and chosen(6, 100, 200, 24, 12, 16)
    for other in (
        (32, 256, 256, 12, 12, 64), (32, 257, 257, 12, 12, 32), (32, 40, 40, 12, 12, 32),
        (5, 256, 256, 12, 12, 32), (32, 0, 100, 12, 12, 32), (32, 300, 200, 12, 12, 32),
    ):  # fmt: skip
        assert not chosen(*other), other
    monkeypatch.setattr(fa, "shared_limit", lambda x: 64 * 1024)  # a T4
    assert not chosen(32, 256, 256, 12, 12, 32)


@pytest.mark.parametrize("kind", ["fwd", "dq", "dkdv"])
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_every_choice_has_a_variant_for_99_kilobytes(monkeypatch, kind, D):
    monkeypatch.undo()  # the real table
    for causal in (True, False):
        for T in (1, 512, 4096, 10**6):
            small = fa.choose(kind, D, T, causal, 99 * 1024)
            assert fa._factory(kind, D)[1](D, small) <= 99 * 1024
            large = fa.choose(kind, D, T, causal, 227 * 1024)
            assert fa._factory(kind, D)[1](D, large) <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_small_tiles_on_the_gpu(monkeypatch, D):
    monkeypatch.setattr(fa, "choose", lambda kind, *rest: fa.SMALL[kind])
    test_bf16_kernels_are_as_exact_as_torch((2, 200, 200, 4, 2, D, True))
