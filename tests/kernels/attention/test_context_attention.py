"""context_attention.py: the reference against PyTorch with masks, the kernels against the reference."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import (
    GPU,
    assert_as_good,
    int32,
    normal,
    planted_bugs,
    rng,
    sentinels,
    to_host,
    to_kernel,
    with_bug,
)
from flash_attention_cases import small_fp32_tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.kernels.attention import context_attention as file
from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention.context_attention import context_attention, context_attention_ref
from xtrain.kernels.decoding import kv_cache
from xtrain.kernels.decoding.kv_cache import append_kv
from xtrain.kernels.decoding.padding import token_positions
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.simulator import KernelError, sim

__all__ = ["small_fp32_tiles"]
BF16 = ml_dtypes.bfloat16


def case(lengths, history, H, G, D, dtype=np.float32, more=3, S=16):
    """-> q, k, v caches, edges, history, tables, longest, scale. The cache is NaN where no sequence has tokens.

    Tokens do not depend on S and the tables. Each table has entries for `more` tokens more than the longest sequence needs;
    those that a sequence does not need are invalid.
    """
    A, N = len(lengths), sum(lengths)
    M = -(-(max(n + h for n, h in zip(lengths, history)) + more) // S)
    tables = int32(rng(7).permutation(A * M + 1)[: A * M]).reshape(A, M)
    q, k, v = normal(1, N, H, D), *(np.full((A * M + 1, G, S, D), np.nan) for _ in "kv")
    for a in range(A):
        p = np.arange(lengths[a] + history[a])
        for i, x in enumerate((k, v)):
            x[tables[a, p // S], :, p % S] = normal((2 + i, a), len(p), G, D)
        tables[a, -(-len(p) // S) :] = -1
    edges = int32(np.cumsum([0, *lengths]))
    arrays = [x.astype(dtype) for x in (q, k, v)]
    return (*arrays, edges, int32(history), tables, max(lengths), D**-0.5)


def run(args, put):
    return to_host(context_attention(*[put(a) if isinstance(a, np.ndarray) else a for a in args]))


def check(args):
    got, single = run(args, to_kernel), run(args, np.array)
    exact = context_attention_ref(*(x.astype(np.float64) for x in args[:3]), *args[3:6], args[7])
    assert got.dtype == args[0].dtype
    floor = 1e-6 if got.dtype == np.float32 else 4e-3  # p is rounded to bf16 on tensor cores
    assert_as_good(got, exact, single, what="o", floor=floor)
    return got


SHAPES = [  # lengths, history, H, G, D
    ([1], [0], 1, 1, 16),
    ([3, 0, 10], [2, 1, 0], 2, 1, 16),
    ([5], [20], 1, 1, 32),
    ([5], [3], 1, 1, 64),
    ([1], [9], 1, 1, 128),
    ([3], [20], 2, 1, 256),
    ([34], [20], 1, 1, 16),  # several tiles of queries, and of keys before them
]
SHAPES += (
    [
        ([700, 1, 90], [0, 3000, 200], 8, 2, 64),
        ([300, 65], [100, 0], 4, 4, 128),
        ([300, 65], [100, 0], 4, 1, 256),
    ]
    if GPU
    else []
)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype):
    check(case(*shape, dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_the_bits_depend_neither_on_the_block_size_nor_on_the_blocks(dtype):
    """Tiles of 64 keys (float32: 16) that lie in several blocks, in one, and in a part of one."""
    results = [
        run(case([9, 3], [70, 0], 1, 1, 16, dtype, S=S), to_kernel) for S in (16, 48, 64, 128)
    ]
    args = case([9, 3], [70, 0], 1, 1, 16, dtype)
    R = len(args[1])
    moved, order = rng(1).permutation(R), np.empty(R, np.int32)
    order[moved] = np.arange(R)
    tables = np.where(args[5] < 0, args[5], order[args[5]])
    elsewhere = (args[0], *(x[moved] for x in args[1:3]), *args[3:5], tables, *args[6:])
    assert not np.array_equal(elsewhere[5], args[5])
    results.append(run(elsewhere, to_kernel))
    assert not np.isnan(results[0].astype(float)).any()
    assert all(np.array_equal(x, results[0]) for x in results)


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_any_lengths_heads_and_batch(data):
    A, (H, G) = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    numbers = lambda low, high: data.draw(st.lists(st.integers(low, high), min_size=A, max_size=A))
    lengths, history = numbers(0, 9), numbers(0, 20)
    dtype, S = (data.draw(st.sampled_from(x)) for x in ([np.float32, BF16], [16, 32, 48, 64]))
    check(case(lengths, history, H, G, 16, dtype, data.draw(st.integers(1, 40)), S))


def test_against_pytorch():
    lengths, history, H, G, D = [4, 7], [3, 0], 2, 1, 16
    args = case(lengths, history, H, G, D)
    o = run(args, to_kernel)
    q, k, v, edges, _, tables, _, _ = args
    for a, (T, past) in enumerate(zip(lengths, history)):
        mask = torch.arange(past + T)[None] <= torch.arange(T)[:, None] + past
        here = torch.tensor(q[edges[a] : edges[a + 1]]).transpose(0, 1)
        # every block by itself, one after the other
        keys, values = (np.concatenate(list(x[tables[a]]), 1)[:, : past + T] for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            here[None],
            *(torch.tensor(x[None]) for x in (keys, values)),
            mask[None, None],
            enable_gqa=True,
        )
        np.testing.assert_allclose(o[edges[a] : edges[a + 1]], want[0].transpose(0, 1), atol=2e-6)


def prefill(caches, tables, packed, lengths, history):
    """Append and attend, as the engine does. packed: q, k, v"""
    edges, history, tables = (
        to_kernel(int32(x)) for x in (np.cumsum([0, *lengths]), history, tables)
    )
    blocks, offsets, _ = token_positions(edges, sum(lengths), history, tables, caches[0].shape[2])
    append_kv(*caches, *map(to_kernel, packed[1:]), blocks, offsets)
    args = (to_kernel(packed[0]), *caches, edges, history, tables, max(lengths), 0.25)
    return to_host(context_attention(*args))


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, sizes, cuts", [(np.float32, 1, (7, 20)), (BF16, 1, (5, 40)), (BF16, 30, (37,))]
)
def test_a_prompt_in_parts_is_a_prompt(dtype, sizes, cuts):
    """The same bits, wherever a prompt is cut, packed together with another sequence or not, and whose blocks it shares."""
    H, G, D, T, S = 1, 1, 16, 45, 16
    q, k, v = (
        (normal(i, T, heads, D) * np.linspace(1, sizes, T)[:, None, None]).astype(dtype)
        for i, heads in ((1, H), (2, G), (3, G))
    )
    other = [normal(i, 4, heads, D).astype(dtype) for i, heads in ((4, H), (5, G), (6, G))]
    empty = lambda: [to_kernel(np.full((6, G, S, D), np.nan, dtype)) for _ in range(2)]
    mine, its = [3, 0, 5], [1, -1, -1]
    whole = prefill(empty(), [mine], (q, k, v), [T], [0])
    alone = prefill(empty(), [its], other, [4], [0])
    for cut in cuts:
        caches = empty()
        first = prefill(caches, [mine], [x[:cut] for x in (q, k, v)], [cut], [0])
        both = [np.concatenate([x[cut:], y]) for x, y in zip((q, k, v), other)]
        second = prefill(caches, [mine, its], both, [T - cut, 4], [cut, 0])
        assert np.array_equal(np.concatenate([first, second[: T - cut]]), whole)
        assert np.array_equal(second[T - cut :], alone)
    sharing = [3, 0, 2]  # another sequence with the same first two blocks
    last = prefill(caches, [sharing], [x[32:] for x in (q, k, v)], [T - 32], [32])
    assert np.array_equal(last, whole[32:])


def test_a_row_does_not_depend_on_the_other_queries_of_its_warp():
    """Queries with large scores raise their maximum in the second tile; those with small ones, next to them, must not care."""
    args = list(case([10], [70], 1, 1, 16, BF16))
    args[0][:5] *= 30
    args[1] *= np.linspace(4, 1, 16)[:, None].astype(BF16)
    together, alone = run(args, to_kernel), list(args)
    alone[0], alone[3], alone[4] = args[0][5:], int32([0, 5]), int32([75])
    assert np.array_equal(run(alone, to_kernel), together[5:])


@pytest.mark.long
@pytest.mark.parametrize("S", [16, 48])
def test_float32_tiles_in_several_blocks(monkeypatch, S):
    monkeypatch.setattr(file.fp32, "tile_rows", lambda D: 32)
    check(case([3, 5], [45, 2], 1, 1, 16, S=S))


def test_the_size_of_a_tile_of_keys_does_not_depend_on_the_lengths():
    """Other sequences of the launch decide `longest`, so the tiles must not follow it."""
    kernels = []
    note = lambda kernel, *args, **options: kernels.append(kernel)
    for longest in (1, 600, 5000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "launch", note)
            patch.setattr(fa, "HOPPER", False)  # another kernel, with tiles of one size
            q = sim(np.ones((longest, 1, 128), BF16))
            caches = [sim(np.ones((80, 1, 64, 128), BF16)) for _ in range(2)]
            where = (sim(int32(x)) for x in ([0, longest], [0], [range(80)]))
            context_attention(q, *caches, *where, longest, 1.0)
    assert len(kernels) == 3 and len(set(kernels)) == 1


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_nothing_outside_the_output_and_the_same_bits_twice(monkeypatch, dtype):
    args = case([3, 5], [2, 7], 1, 1, 16, dtype)
    with sentinels(monkeypatch):
        first = run(args, to_kernel)
    assert np.array_equal(first, run(args, to_kernel))


def test_large_scores():
    args = case([10], [3], 2, 1, 16)
    check((args[0] * 30, args[1] * 30, *args[2:]))


def test_no_tokens_at_all():
    for put in (np.array, to_kernel):
        assert run(case([0, 0], [3, 0], 2, 1, 16), put).shape == (0, 2, 16)


@pytest.mark.parametrize(
    "old, new",
    [
        ("            cuda.syncthreads()  # all warps have left the previous tile\n", ""),
        ("            cuda.syncthreads()\n            dots", "            dots"),
        ("            cuda.syncwarp()  # a row of p", "            # a row of p"),
        ("if t < T and d < D:", "if d < D:"),
    ],
)
def test_planted_bugs_are_found(old, new):
    scope = with_bug(file.make_fp32_kernel, old, new, dict(vars(file)))
    args = case([20, 40], [2, 3], 1, 1, 16)
    arrays = [sim(a) for a in args[:6]]
    flat = [x.reshape(-1) for x in (sim(args[0]), *arrays[:3])]
    R, M = len(args[1]), args[5].shape[1]
    with pytest.raises(KernelError):
        grid, threads = (2, 2), file.fp32.THREADS
        file.launch(
            scope["make_fp32_kernel"](16, 16),
            grid,
            threads,
            *flat,
            *arrays[3:5],
            arrays[5].reshape(-1),
            *(60, R, M, 1, 1, 16 * 16),
            np.float32(0.25),
        )


@pytest.mark.parametrize(
    "old, new",
    [
        ("                cuda.syncthreads()  # all warps have read the keys\n", ""),
        (
            "                cuda.syncthreads()\n                add_weighted",
            "                add_weighted",
        ),
    ],
)
def test_planted_bugs_of_wide_heads_are_found(monkeypatch, old, new):
    """Keys and values of more than 128 channels take turns in one tile."""
    scope = with_bug(file.make_fp32_kernel, old, new, dict(vars(file)))
    monkeypatch.setattr(file, "make_fp32_kernel", scope["make_fp32_kernel"])
    with pytest.raises(KernelError):
        run(case([3], [2], 1, 1, 130), sim)


PAGING_BUGS = [  # module, name of a factory in it, a line, the changed line, dtype, S
    (
        kv_cache,
        "make_block_table",
        "uint32(p) // uint32(S)",
        "uint32(p) // uint32(S) + uint32(1)",
        np.float32,
        16,
    ),
    (
        kv_cache,
        "make_block_table",
        "block = min(entry, last)",
        "block = entry",
        BF16,
        64,
    ),
    (kv_cache, "make_block_table", "uint32(p) % uint32(S)", "uint32(p)", BF16, 64),
    (file, "make_fp32_kernel", "if S % TILE != 0:", "if False:", np.float32, 48),
    (file, "make_fp32_kernel", "tables, a * M, ", "tables, a, ", np.float32, 16),
    (file, "make_fp32_kernel", "total[i] = NAN", "pass", np.float32, 16),
    (file, "make_copy_keys", "ONE_BLOCK = S % BN == 0", "ONE_BLOCK = True", BF16, 16),
    (file, "make_copy_keys", "n0 + (row if inside else 0)", "n0 + row", BF16, 16),
    (file, "make_copy_keys", "return worst >= pages.blocks", "return False", BF16, 16),
    (
        file,
        "make_copy_keys",
        "        cp_async_commit()\n        return worst",
        "        return worst",
        BF16,
        16,
    ),
    # the entry of an earlier tile is used again: a stale block
    (
        file,
        "make_bf16_kernel",
        "entry = entry_for(pages, n0 - BN if n0 > 0 else 0)",
        "pass",
        BF16,
        64,
    ),
    (
        file,
        "make_bf16_kernel",
        "            cuda.syncthreads()  # this tile",
        "            # this tile",
        BF16,
        64,
    ),
    (file, "make_bf16_kernel", "fill(total, NAN)", "pass", BF16, 64),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "module, name, old, new, dtype, S", PAGING_BUGS, ids=[x[3] for x in PAGING_BUGS]
)
@planted_bugs
def test_planted_bugs_of_paging_are_found(monkeypatch, module, name, old, new, dtype, S):
    """By a wrong result, a NaN of an unused place, an access out of bounds or a race, in this file's cases."""
    factories = file.make_fp32_kernel, file.make_bf16_kernel, file.make_copy_keys
    if not GPU and S == 48:
        monkeypatch.setattr(file.fp32, "tile_rows", lambda D: 32)
    broken = with_bug(getattr(module, name), old, new, dict(vars(module)))[name]
    for user in (kv_cache, file):
        if hasattr(user, name):
            monkeypatch.setattr(user, name, broken)
    for f in factories:
        f.cache_clear()
    try:
        with pytest.raises((KernelError, AssertionError)):
            args = case([3, 5], [65, 2], 1, 1, 16, dtype, S=S, more=64)
            check(args)
            args[5][0, 0] = len(args[1])
            args = (args[0], *(np.where(np.isnan(x), dtype(0), x) for x in args[1:3]), *args[3:])
            assert np.isnan(run(args, to_kernel)[:3].astype(float)).all()
    finally:
        for f in factories:
            f.cache_clear()


@functools.cache
def valid_values(dtype):
    """-> arguments, o"""
    args = case([3, 7, 5], [1, 0, 4], 1, 1, 16, dtype)
    return args, run(args, to_kernel)


@pytest.mark.long
@pytest.mark.parametrize(
    "which, values, dtype",
    [
        (4, [1, 10**6, 0], np.float32),
        (4, [1, -1, 0], BF16),
        (4, [1, 2**31 - 2, 0], BF16),
        (5, 9, np.float32),
        (5, -1, BF16),
        (5, 2**31 - 1, BF16),
        (3, [0, 3, 10**6, 15], BF16),
        (3, [0, 3, -9, 15], BF16),
        (3, [0, 3, 2**31 - 1, 15], np.float32),
    ],
)
def test_the_kernel_checks_values_that_only_the_device_knows(which, values, dtype):
    """Invalid history, tables and edges: nothing is read or written out of bounds (the simulator would report it), and the
    sequence's rows become NaN, those of an idle one 0; the first sequence, which is valid, is unchanged."""
    args, want = valid_values(dtype)
    assert args[5].shape == (3, 1)
    values = int32(values)
    if which == 5:
        values = np.where(np.array([0, 1, 0]) > 0, values, args[5][:, 0]).reshape(3, 1)
    o = run((*args[:which], values, *args[which + 1 :]), to_kernel)
    assert np.array_equal(o[:3], want[:3])
    if which != 3:
        idle = which == 4 and values[1] < 0
        assert (o[3:10] == 0 if idle else np.isnan(o[3:10].astype(np.float32))).all()
        assert not np.isnan(o[10:].astype(np.float32)).any()


@pytest.mark.parametrize("invariant", [False, True])
def test_an_idle_sequence_on_the_host(invariant):
    args = case([3, 2, 1], [1, 5, 4], 4, 2, 16)
    idle = *args[:4], int32([1, -1, 4]), np.where([[0], [1], [0]], -1, args[5]), *args[6:]
    with batch_invariant(invariant):
        want, o = run(args, np.array), run(idle, np.array)
    assert np.array_equal(o[[0, 1, 2, 5]], want[[0, 1, 2, 5]]) and (o[3:5] == 0).all()


def test_bad_input():
    args = case([3, 2], [1, 0], 4, 2, 16)
    replace = lambda i, x: (*args[:i], x, *args[i + 1 :])
    with pytest.raises(ValueError, match="a sequence of 3 tokens, expected at most 2"):
        context_attention(*replace(6, 2))
    with pytest.raises(ValueError, match="longest is -1"):
        run(replace(6, -1), to_kernel)
    # not as many blocks
    assert np.array_equal(run(replace(6, 2**31), to_kernel), run(args, to_kernel))
    with pytest.raises(
        ValueError, match="history and new tokens do not fit the tables of 16 tokens"
    ):
        context_attention(*replace(4, int32([14, 0])))
    with pytest.raises(ValueError, match="a table names block 3, the cache has 3 blocks"):
        context_attention(*replace(5, int32([[0], [3]])))
    with pytest.raises(ValueError, match=r"tables has shape \(2,\), expected \(2, any\)"):
        context_attention(*replace(5, int32([0, 1])))
    with pytest.raises(
        ValueError, match="blocks of 24 tokens, the GPU kernels need a multiple of 16"
    ):
        run(case([3], [0], 2, 1, 16, S=24), to_kernel)
    with pytest.raises(ValueError, match="5 packed tokens, the edges end at 4"):
        context_attention(*replace(3, int32([0, 3, 4])))
    for edges in ([1, 3, 5], [0, 6, 5]):
        with pytest.raises(ValueError, match="edges must begin at 0 and not decrease"):
            context_attention(*replace(3, int32(edges)))
    with pytest.raises(TypeError, match="q is bfloat16, expected float32"):
        context_attention(*replace(0, args[0].astype(BF16)))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        context_attention(*replace(0, args[0][:, :3].copy()))
    with pytest.raises(ValueError, match="head dim 24, the GPU kernels for bf16 support"):
        odd = case([3], [0], 2, 1, 24, BF16)
        run(odd, np.array)
        run(odd, to_kernel)
