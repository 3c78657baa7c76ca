"""FlashAttention: the reference against calculus and GEMM attention, the launcher, and what both precisions guarantee.

Shapes: test_flash_attention_bf16.py and test_flash_attention_fp32.py.
"""

import numpy as np
import pytest
from checks import GPU, assert_as_good, assert_directional, normal, sentinels, to_host, to_kernel
from flash_attention_cases import (
    BF16,
    case,
    everything,
    exact,
    small_bf16_tiles,
    small_fp32_tiles,
    torch_sdpa,
)

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention.flash_attention import (
    flash_attention_bwd,
    flash_attention_bwd_ref,
    flash_attention_fwd,
    flash_attention_ref,
)
from xtrain.kernels.attention.gemm_attention import attention_bwd, attention_fwd
from xtrain.kernels.runtime.launch import empty

__all__ = ["small_bf16_tiles", "small_fp32_tiles"]


# ----------------------------------------------------------------------------- the reference
@pytest.mark.parametrize("shape", [(1, 3, 3, 1, 1, 2), (2, 3, 5, 4, 2, 3), (1, 4, 4, 6, 3, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_reference_against_calculus(shape, causal):
    q, k, v, do = case(*shape)
    o, lse = flash_attention_ref(q, k, v, 0.4, causal)
    f = lambda q, k, v: float((flash_attention_ref(q, k, v, 0.4, causal)[0] * do).sum())
    gradients = flash_attention_bwd_ref(do, q, k, v, o, lse, 0.4, causal)
    assert_directional(f, (q, k, v), gradients)


@pytest.mark.parametrize("causal", [True, False])
def test_reference_against_gemm_attention(causal):
    q, k, v, do = case(2, 5, 9, 6, 3, 4)
    o, saved = attention_fwd(q, k, v, 0.4, causal)
    theirs = o, *attention_bwd(do, saved, 0.4, causal)
    ours = everything(q, k, v, do, 0.4, causal)
    for a, b in zip((ours[0], *ours[2:]), theirs):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


# ----------------------------------------------------------------------------- the kernels
@pytest.mark.long
@pytest.mark.parametrize("D", [16, 32, 64, 128] if GPU else [16])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_large_scores(dtype, D):
    """Softmaxes that are almost one-hot, and rows whose maximum increases along the keys."""
    q, k, v, do = case(1, 36, 36, 1, 1, D if dtype == BF16 else 2, dtype=dtype)
    ramp = np.linspace(30, 0, 36, dtype=np.float32).reshape(1, 36, 1, 1)
    k = (k * ramp).astype(dtype)
    arrays = q, k, v, do
    got, right = everything(*map(to_kernel, arrays), 1.0, True), exact(arrays, 1.0, True)
    plain = everything(*arrays, 1.0, True)
    if dtype == BF16:
        o, *gradients = torch_sdpa(*arrays, 1.0, True)
        plain = o, plain[1], *gradients
    for name, g, e, p in zip(("o", "lse", "dq", "dk", "dv"), got, right, plain):
        # a score of 60 is rounded by 4e-6, its probability by as much of itself: gradients by that times a key
        scale = np.abs(k).max() if name[0] == "d" else 1e-30
        assert_as_good(g, e, p, floor=2e-4 if dtype == BF16 else 1e-6, what=name, scale=scale)


@pytest.mark.parametrize("heads", [1, 3, 7, 64, 997])
@pytest.mark.parametrize("rows", [1, 100, 5000])
@pytest.mark.parametrize("l2", [1, 10**5, 10**9])
def test_grid_covers_every_head_and_row(heads, rows, l2):
    q_shape, k_shape = (1, rows, heads, 16), (1, rows + 30, heads, 16)
    gpu, tiles = fa.Gpu(13, l2), fa.Tiles(BM=64, BN=64, warps=4, blocks=2)
    for kind, own in (("fwd", rows), ("dq", rows), ("dkdv", rows + 30)):
        for causal in (True, False):
            side, blocks, times = fa.make_grid(kind, tiles, causal, q_shape, k_shape, gpu)
            assert heads <= side * times < heads + times and 64 * (blocks - 1) < own <= 64 * blocks
            assert side * 4 * 16 * rows <= max(2 * l2, 2 * 4 * 16 * (rows + 30))
            assert causal or side == 1
    assert fa.make_grid("fwd", tiles, True, (0, 5, 2, 16), (0, 5, 2, 16), gpu)[2] == 0


def test_grid_of_unequal_tiles():
    """A block of the dK, dV kernel owns BN keys, one of the others BM queries."""
    tiles, shape = fa.Tiles(BM=32, BN=128, warps=4, blocks=2), (1, 256, 3, 16)
    blocks = [fa.make_grid(k, tiles, False, shape, shape, fa.Gpu(13, 1))[1] for k in fa.SMALL]
    assert dict(zip(fa.SMALL, blocks)) == {"fwd": 8, "dq": 8, "dkdv": 2}


def heads_of(packed_BTP, first, n, D):
    """n heads from `first` on, out of the columns of a packed array: a view"""
    B, T, P = packed_BTP.shape
    return packed_BTP.reshape(B, T, P // D, D)[:, :, first : first + n]


def same_bits(results, others):
    for a, b in zip(results, others):
        assert np.array_equal(to_host(a).view(np.uint8), to_host(b).view(np.uint8))


PACKED = [(np.float32, 1, 3, 1, 1, 3), (BF16, 2, 5, 2, 1, 16)]  # D = 128: packed and paired, below
PACKED = (
    [(d, 2, 600, 4, 2, D) for d in (np.float32, BF16) for D in (16, 64, 128)] if GPU else PACKED
)


@pytest.mark.long
@pytest.mark.parametrize("which", ["qkv", "v"])
@pytest.mark.parametrize("dtype, B, T, H, G, D", PACKED)
def test_packed_arrays_are_read_and_written_in_place(dtype, B, T, H, G, D, which):
    """The same bits as from separate arrays; in the packed gradient only dv is written."""
    packed = to_kernel(normal(0, B, T, (H + 2 * G) * D, dtype=dtype))
    places = {"q": (0, H), "k": (H, G), "v": (H + G, G)}
    q, k, v = (heads_of(packed, *places[n], D) for n in "qkv")
    right = q.copy(), k.copy(), v.copy(), to_kernel(normal(1, B, T, H, D, dtype=dtype))
    given = [x if n in which else y for n, x, y in zip("qkv", (q, k, v), right)]
    assert not v.flags.c_contiguous
    if dtype == BF16:
        flat, row = fa._rows(v)
        assert row == (H + 2 * G) * D and flat.ndim == 1
        assert GPU or np.shares_memory(flat, packed)
    expected = everything(*right, 0.25, True)
    o, lse = flash_attention_fwd(*given, 0.25)
    gradient = empty(packed, packed.shape)
    gradient.view(np.uint8)[...] = 0x5A
    dv = heads_of(gradient, *places["v"], D)
    *others, returned = flash_attention_bwd(right[3], *given, o, lse, 0.25, True, dv)
    assert returned is dv
    same_bits((o, lse, *others, heads_of(gradient, *places["v"], D).copy()), expected)
    rest = (
        to_host(gradient).view(np.uint8).reshape(B, T, -1)[..., : (H + G) * D * gradient.itemsize]
    )
    assert (rest == 0x5A).all()


def test_packed_arrays_on_the_cpu():
    packed = normal(0, 2, 5, 4 * 3)
    q, k, v = (heads_of(packed, *at, 3) for at in ((0, 2), (2, 1), (3, 1)))
    right, gradient = (
        [x.copy() for x in (q, k, v)] + [normal(1, 2, 5, 2, 3)],
        np.full_like(packed, 7),
    )
    expected = everything(*right, 0.3, True)
    o, lse = flash_attention_fwd(q, k, v, 0.3)
    dv = heads_of(gradient, 3, 1, 3)
    got = flash_attention_bwd(right[3], q, k, v, o, lse, 0.3, True, dv)
    assert got[2] is dv and (gradient[..., :9] == 7).all()
    same_bits([x.copy() for x in (o, lse, *got)], expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "odd", ["a gap between sequences", "heads apart", "not on 16 bytes", "rows not"]
)
def test_layouts_that_are_copied_first(odd):
    """Tensor-core kernels copy 16 bytes at a time: other layouts are copied first and give the right result."""
    B, T, G, D = 1 + ("apart" in odd or "gap" in odd), 4, 1, 16
    whole = to_kernel(normal(3, B, T + 1, 3, D + 8, dtype=BF16))
    flat = whole.reshape(-1)
    v = {
        "a gap between sequences": lambda: whole.reshape(B, T + 1, 3 * (D + 8))[:, 1:, :D],
        "heads apart": lambda: whole[:, :T, :1, :D],
        "not on 16 bytes": lambda: flat[1 : 1 + B * T * 32].reshape(B, T, 32)[..., :D],
        "rows not": lambda: flat[: B * T * 35].reshape(B, T, 35)[..., :D],
    }[odd]().reshape(B, T, G, D)  # fmt: skip
    if GPU or odd != "not on 16 bytes":
        assert not fa.in_place(v)
    q, k, _, do = map(to_kernel, case(B, T, T, 2, G, D, dtype=BF16))
    expected = everything(q, k, v.copy(), do, 0.3, True)
    o, lse = flash_attention_fwd(q, k, v, 0.3)
    before, dv = to_host(whole).copy(), v
    dq, dk, dv = flash_attention_bwd(do, q, k, v.copy(), o, lse, 0.3, True, dv)
    same_bits([x.copy() for x in (o, lse, dq, dk, dv)], expected)
    changed = (to_host(whole).view(np.uint8) != before.view(np.uint8)).reshape(-1, whole.itemsize)
    assert 0 < changed.any(-1).sum() <= v.size


@pytest.mark.gpu
def test_arrays_that_begin_anywhere():
    """Copies of 16 bytes need aligned rows: arrays that begin 2 bytes later are copied first."""
    arrays = [to_kernel(x) for x in case(1, 70, 90, 4, 2, 32, dtype=BF16)]
    right = everything(*arrays, 0.3, True)
    for i in range(4):
        moved = list(arrays)
        moved[i] = _moved(arrays[i])
        for a, b in zip(everything(*moved, 0.3, True), right):
            assert np.array_equal(to_host(a).view(np.uint8), to_host(b).view(np.uint8))
    q, k, v, do = arrays
    again = flash_attention_bwd(do, q, k, v, _moved(right[0]), _moved(right[1]), 0.3, True)
    for a, b in zip(again, right[2:]):
        assert np.array_equal(to_host(a).view(np.uint8), to_host(b).view(np.uint8))


def _moved(x):
    longer = empty(x, (x.size + 1,))
    longer[1:] = x.reshape(-1)
    return longer[1:].reshape(x.shape)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_nothing_outside_the_outputs_and_the_same_bits_twice(monkeypatch, dtype):
    shape = (2, 517, 600, 4, 2, 64) if GPU else (1, 5, 18, 1, 1, 16)
    q, k, v, do = map(to_kernel, case(*shape, dtype=dtype))
    with sentinels(monkeypatch):
        first = everything(q, k, v, do, 0.3, True)
    for a, b in zip(first, everything(q, k, v, do, 0.3, True)):
        assert np.array_equal(to_host(a).view(np.uint8), to_host(b).view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_no_queries(dtype):
    q, k, v, do = (to_kernel(x) for x in case(2, 0, 3, 2, 1, 16, dtype=dtype))
    o, lse, dq, dk, dv = everything(q, k, v, do, 0.3, True)
    assert o.shape == dq.shape == (2, 0, 2, 16) and lse.shape == (2, 2, 0)
    assert not to_host(dk).any() and not to_host(dv).any()


def test_bad_input():
    q, k, v, do = case(1, 3, 4, 4, 2, 24, dtype=np.float32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads"):
        flash_attention_fwd(q, np.repeat(k, 2, 2)[:, :, :3], np.repeat(v, 2, 2)[:, :, :3], 1.0)
    with pytest.raises(ValueError, match=r"v has shape \(1, 3, 2, 24\), expected \(1, 4, 2, 24\)"):
        flash_attention_fwd(q, k, v[:, :3], 1.0)
    with pytest.raises(ValueError, match="3 causal queries need at least 3 keys"):
        flash_attention_fwd(q, k[:, :2], v[:, :2], 1.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        flash_attention_fwd(q, k, v, 0.0)
    with pytest.raises(TypeError, match="k is bfloat16, expected float32"):
        flash_attention_fwd(q, k.astype(BF16), v, 1.0)
    with pytest.raises(TypeError, match="on one device"):
        flash_attention_fwd(to_kernel(q), k, v, 1.0)
    with pytest.raises(ValueError, match=r"head dim 24, but bfloat16 needs one of \(16, 32, 64"):
        flash_attention_fwd(*(to_kernel(x.astype(BF16)) for x in (q, k, v)), 1.0)
    with pytest.raises(ValueError, match="head dim 258, but float32 needs at most 256"):
        flash_attention_fwd(*map(to_kernel, case(1, 2, 2, 1, 1, 258, dtype=np.float32)[:3]), 1.0)
    o, lse = flash_attention_fwd(q, k, v, 1.0)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 4, 2\), expected \(1, 4, 3\)"):
        flash_attention_bwd(do, q, k, v, o, lse[:, :, :2].copy(), 1.0)
    with pytest.raises(TypeError, match="do is bfloat16"):
        flash_attention_bwd(do.astype(BF16), q, k, v, o, lse, 1.0)
    with pytest.raises(ValueError, match=r"dv has shape \(1, 4, 4, 24\), expected \(1, 4, 2, 24\)"):
        flash_attention_bwd(do, q, k, v, o, lse, 1.0, True, np.repeat(v, 2, 2))
    with pytest.raises(TypeError, match="dv is bfloat16, expected float32"):
        flash_attention_bwd(do, q, k, v, o, lse, 1.0, True, v.astype(BF16))
