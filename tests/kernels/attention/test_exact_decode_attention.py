"""exact_decode_attention.py: a decoding step has, bit for bit, the row of training's forward in batch-invariant mode."""

import functools

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, planted_bugs, rng, to_host, to_kernel, with_bug

from xtrain.kernels.attention import exact_decode_attention as file
from xtrain.kernels.attention.decode_attention import decode_attention, fits_exactly
from xtrain.kernels.attention.flash_attention import flash_attention_fwd
from xtrain.kernels.attention.key_bounds import UNBOUNDED, KeyBounds
from xtrain.kernels.qk_norm_rope import qk_norm_rope_fwd
from xtrain.kernels.rope import rope_tables
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
EPS = 1e-6
WGMMA = not GPU or fits_exactly(to_kernel(np.zeros((1, 192), BF16)), 64)
pytestmark = pytest.mark.skipif(not WGMMA, reason="for GPUs where training uses wgmma")  # 9.0


def some_heads(H, G):
    """The heads that the simulator computes in training: those at the ends of tiles, if they share a key head."""
    return range(H) if GPU or G > 1 else [h for h in range(H) if h in (0, 1, 7, 8, 15, 16, H - 1)]


def trained(D, H, G, T, norm, window, seed=0):
    """-> qkv (T, P), norm weights, tables of angles, and training's k, v (T, G, D), o (T, some_heads D)."""
    random = rng(seed, D, H, T)
    qkv = random.standard_normal((T, (H + 2 * G) * D)).astype(BF16)
    weights = (
        [np.float32(1 + 0.3 * random.standard_normal(D)) for _ in "qk"] if norm else [None] * 2
    )
    angles = [np.float32(x) for x in rope_tables(D, T, 1e4, None, T, T)]
    put = lambda x: None if x is None else to_kernel(x)
    q, k, v, _ = qk_norm_rope_fwd(*map(put, (qkv, *weights, *angles)), H, G, T, EPS)
    bounds = KeyBounds(window) if window else UNBOUNDED
    q, k4, v4 = (x.reshape(1, T, -1, D) for x in (q, k, v))
    q = to_kernel(to_host(q)[:, :, list(some_heads(H, G))])
    with batch_invariant():
        o, _ = flash_attention_fwd(q, k4, v4, D**-0.5, True, bounds)
    return qkv, weights, angles, to_host(k), to_host(v).reshape(T, G, D), to_host(o).reshape(T, -1)


def decoded(case, positions, S, window=0, idle=False, previous=None):
    """-> o (B, H D), caches: one row per position of the trained sequence, whose earlier tokens are in the cache.

    previous: of decode_attention: all rows are one sequence, whose tokens before the first position are in the cache.
    """
    qkv, weights, angles, k, v, _ = case
    T, G, D = k.shape
    M = -(-T // S)
    B = len(positions) + idle
    tables = rng(1).permutation(B * M + 1)[: B * M].astype(np.int32).reshape(B, M)
    caches = [np.full((B * M + 1, G, S, D), np.nan, BF16) for _ in "kv"]
    for b, t in enumerate(positions):
        if previous is not None:
            tables[b] = tables[0]
            t = min(positions)
        p = np.arange(t)
        for cache, x in zip(caches, (k, v)):
            cache[tables[b, p // S], :, p % S] = x[:t]
    rows = np.concatenate([qkv[positions], qkv[:1]]) if idle else qkv[positions]
    lengths = np.array([*positions, *[-1] * idle], np.int32)
    pad = [np.concatenate([x, np.zeros((M * S - T, D // 2), np.float32)]) for x in angles]
    arrays = [
        None if x is None else to_kernel(x)
        for x in (rows, *caches, lengths, tables, *pad, *weights)
    ]
    with batch_invariant():
        related = None if previous is None else to_kernel(np.int32(previous))
        o = decode_attention(*arrays, EPS, D**-0.5, False, window, previous_B=related)
    return to_host(o), [to_host(x) for x in arrays[1:3]], tables


CASES = [  # D, H, G, T, QK-norm, positions, S, window
    (64, 2, 1, 5, False, [0, 4], 16, 0),
    (64, 2, 1, 70, True, [63, 64, 69], 16, 0),
    (64, 3, 1, 130, True, [129], 32, 40),
    (64, 18, 1, 20, True, [19], 64, 0),  # more heads than an item has
    (64, 9, 1, 40, False, [39], 16, 0),  # more than half of a tile of heads
    (128, 1, 1, 130, True, [129], 16, 0),
]
LARGE = [
    (D, H, G, T, norm, [0, 1, T // 3, T - 2, T - 1], S, window)
    for D, H, G in ((64, 32, 8), (128, 16, 8), (128, 8, 8), (128, 40, 2))
    for T, norm, S, window in ((2000, True, 64, 0), (700, False, 16, 300), (4096, True, 128, 0))
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES + (LARGE if GPU else []), ids=str)
def test_a_decoding_step_has_the_bits_of_training(case):
    D, H, G, T, norm, positions, S, window = case
    given = trained(D, H, G, T, norm, window)
    o, (k_cache, v_cache), tables = decoded(given, positions, S, window, idle=True)
    heads = list(some_heads(H, G))
    for b, t in enumerate(positions):
        assert np.array_equal(o[b].reshape(H, D)[heads].ravel(), given[-1][t]), t
        for cache, x in ((k_cache, given[3]), (v_cache, given[4])):
            assert np.array_equal(cache[tables[b, t // S], :, t % S], x[t])
    assert (o[-1] == 0).all()  # the idle row


SUCCESSIVE = [  # D, H, G, T, QK-norm, first position, rows, window
    (64, 2, 1, 67, True, 62, 5, 0),  # in two tiles
    (64, 3, 1, 5, False, 0, 3, 2),
    (128, 2, 1, 20, True, 18, 2, 0),
]


@pytest.mark.long
@pytest.mark.parametrize("case", SUCCESSIVE, ids=str)
def test_successive_tokens_of_one_sequence_have_the_bits_of_training(case):
    """In any order of the rows; no key of theirs is in the cache before."""
    D, H, G, T, norm, first, n, window = case
    given = trained(D, H, G, T, norm, window)
    order = rng(2).permutation(n)
    row_of = np.argsort(order)
    previous = np.full(n, -1)
    previous[row_of[1:]] = row_of[:-1]
    positions = (first + order).tolist()
    o, (k_cache, v_cache), tables = decoded(given, positions, 16, window, previous=previous)
    for b, t in enumerate(positions):
        assert np.array_equal(o[b], given[-1][t]), t
        for cache, x in ((k_cache, given[3]), (v_cache, given[4])):
            assert np.array_equal(cache[tables[b, t // 16], :, t % 16], x[t])
    if window and not GPU:  # once
        with pytest.raises((KernelError, AssertionError)):  # a race, or NaN of the cache
            o = decoded(given, positions, 16, window, previous=np.full(n, -1))[0]
            assert np.array_equal(o[row_of[-1]], given[-1][first + n - 1])


def test_a_block_that_does_not_exist_gives_nan(monkeypatch):
    given = trained(64, 2, 1, 40, False, 0)
    qkv, _, angles, _, _, _ = given
    tables = np.array([[0, 9, 2], [3, 4, -1], [6, 7, 9]], np.int32)  # of 9 blocks
    caches = [np.zeros((9, 1, 16, 64), BF16) for _ in "kv"]
    lengths = np.array([39, 39, 20], np.int32)
    pad = [np.concatenate([x, np.zeros((8, 32), np.float32)]) for x in angles]
    arrays = [to_kernel(x) for x in (qkv[:3], *caches, lengths, tables, *pad)]
    with batch_invariant():
        o = to_host(decode_attention(*arrays, None, None, EPS, 0.1)).astype(np.float32)
    assert np.isnan(o[:2]).all() and not np.isnan(o[2]).any()


@functools.cache
def small_case():
    return trained(64, 2, 1, 66, False, 0)


BUGS = [  # of make_tile_sums: old, new
    ("(even + odd)", "even"),
    ("acc[n, i] *= shrink[i // 2]", "acc[n, i] *= float32(1.0)"),
    ("mine > item.t or", "mine > item.t + 1 or"),
    ("for i in range(WARPS):", "for i in range(1):"),
]


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize("old, new", BUGS, ids=[x[0] for x in BUGS])
def test_another_order_is_found(monkeypatch, old, new):
    given = small_case()
    position = 62 if "mine" in old else 65
    assert np.array_equal(decoded(given, [position], 16)[0][0], given[-1][position])
    scope = with_bug(file.make_tile_sums, old, new, dict(vars(file)))
    monkeypatch.setattr(file, "make_tile_sums", scope["make_tile_sums"])
    file.make_exact_kernel.cache_clear()
    try:
        o = decoded(given, [position], 16)[0][0]
    finally:
        file.make_exact_kernel.cache_clear()
    assert not np.array_equal(o, given[-1][position])


@pytest.mark.skipif(GPU, reason="found by the simulator")
def test_static_arrays_that_move_the_tiles_are_found(monkeypatch):
    monkeypatch.setattr(file, "ROUNDED", 16)
    file.make_exact_kernel.cache_clear()
    try:
        with pytest.raises(KernelError, match="bytes of static arrays"):
            decoded(small_case(), [5], 16)
    finally:
        file.make_exact_kernel.cache_clear()


def launch_all():
    """Launch the kernel for the kinds of model that use it."""
    for D, group, norm, S, window in (
        (128, 2, True, 64, 0),
        (64, 12, False, 16, 33),
        (128, 32, True, 128, 0),
    ):
        new = lambda *shape: sim(np.zeros(shape, BF16))
        floats = lambda *shape: sim(np.zeros(shape, np.float32))
        ints = lambda *shape: sim(np.zeros(shape, np.int32))
        weights = (floats(D), floats(D)) if norm else (None, None)
        cache = new(3, 1, S, D), new(3, 1, S, D)
        angles = floats(2 * S, D // 2), floats(2 * S, D // 2)
        with batch_invariant():
            for previous in (None, ints(2)):
                decode_attention(
                    new(2, (group + 2) * D), *cache, ints(2), ints(2, 2), *angles, *weights, EPS, 0.1, True, window,
                    previous_B=previous,
                )  # fmt: skip
