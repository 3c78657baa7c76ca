"""decode_attention.py: the reference against PyTorch and against the attention of a whole prompt, the kernels against it."""

import functools
import inspect

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
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
    with_bug,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain import simulator
from xtrain.kernels.attention import decode_attention as file
from xtrain.kernels.attention import decode_attention_loops as loops
from xtrain.kernels.attention import decode_attention_parts
from xtrain.kernels.attention import decode_attention_schedule as schedule
from xtrain.kernels.attention.decode_attention import (
    decode_attention,
    decode_attention_ref,
    make_decode_kernel,
)
from xtrain.kernels.attention.decode_attention_parts import Cache, Inputs, Places, Shared
from xtrain.kernels.attention.flash_attention import flash_attention_ref
from xtrain.kernels.decoding import kv_cache
from xtrain.kernels.decoding.kv_cache import Pages
from xtrain.kernels.primitives import last_block
from xtrain.kernels.primitives.ptx import kernel
from xtrain.kernels.qk_norm_rope import qk_norm_rope_ref, values_of
from xtrain.kernels.rope import rope_tables
from xtrain.simulator import KernelError, sim

BF16 = ml_dtypes.bfloat16
EPS = 1e-6


def block_tables(B, capacity, S):
    """-> (B, M) int32, M S >= capacity: different blocks in random order; the cache has one block more"""
    M = -(-capacity // S)
    return int32(rng(9).permutation(B * M + 1)[: B * M]).reshape(B, M)


def case(lengths, H, G, D, capacity, dtype=np.float32, norm=False, S=16, scaling=None):
    """-> qkv, k, v caches, then the other arguments. The cache is NaN where no sequence has tokens.

    The entries of the tables that a sequence does not need are invalid.
    """
    B = len(lengths)
    tables = block_tables(B, capacity, S)
    R, capacity = tables.size + 1, tables.shape[1] * S
    qkv, k, v = normal(1, B, (H + 2 * G) * D), *full_cache(2, lengths, tables, R, G, S, D)
    for b, n in enumerate(lengths):
        tables[b, max(n, -1) // S + 1 :] = -1
    angles = rope_tables(D, capacity, 1e4, scaling, max_seq_len=capacity)
    weights = (normal(4, D), normal(5, D)) if norm else (None, None)
    arrays = [x.astype(dtype) for x in (qkv, k, v)]
    return (*arrays, int32(lengths), tables, *angles, *weights, EPS, D**-0.5)


def full_cache(seed, lengths, tables, R, G, S, D):
    """-> k, v (R, G, S, D), NaN but for the first lengths[b] positions of sequence b, which do not depend on S or the tables"""
    caches = [np.full((R, G, S, D), np.nan, np.float32) for _ in range(2)]
    for b, n in enumerate(lengths):
        for i, cache in enumerate(caches):
            tokens = normal((seed + i, b), max(n, 0), G, D)
            p = np.arange(min(len(tokens), tables.shape[1] * S))
            cache[tables[b, p // S], :, p % S] = tokens[: len(p)]
    return caches


def run(args, put, **more):
    """-> o, k, v after the launch"""
    given_ = [put(a) if isinstance(a, np.ndarray) else a for a in args]
    o = decode_attention(*given_, **more)
    return tuple(to_host(a) for a in (o, *given_[1:3]))


def widened(args, dtype):
    return [a.astype(dtype) if getattr(a, "dtype", None) in (BF16, np.float32) else a for a in args]


def check(args):
    kernel_, single, exact = run(args, to_kernel), run(args, np.array), widened(args, np.float64)
    o64 = decode_attention_ref(*exact)
    for what, got, one, want in zip("okv", kernel_, single, (o64, *exact[1:3])):
        assert got.dtype == args[0].dtype
        if what != "o":  # NaN is left where no token is
            got, one, want = (x.astype(np.float64) for x in (got, one, want))
            assert np.array_equal(np.isnan(got), np.isnan(want))
            got, one, want = map(np.nan_to_num, (got, one, want))
        # exp2 is off by two units; q, p are rounded to bf16
        floor = 2e-6 if args[0].dtype == np.float32 else 4e-3
        assert_as_good(got, want, one, what=what, floor=floor)
    return kernel_


SHAPES = [  # lengths, H, G, D, capacity
    ([3], 2, 1, 16, 8),
    ([0, 20], 4, 2, 16, 40),
    ([31, 7], 1, 1, 32, 33),
    ([20], 8, 1, 64, 24),
    ([20], 2, 1, 128, 24),
    ([20], 4, 2, 256, 24),
    ([17], 10, 1, 256, 24),  # more than 8 such heads share a key head
    ([20], 9, 1, 16, 24),  # more than 8 query heads share a key head
    ([17], 18, 1, 16, 24),  # more than 16
]
if GPU:
    SHAPES += [
        ([4000, 129, 7000], 32, 4, 64, 8192),
        ([5000, 1], 16, 8, 128, 5001),
        ([3000, 1], 4, 1, 256, 3001),
    ]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype):
    check(case(*shape, dtype, norm=len(shape[0]) > 1, S=64 if GPU else 16))


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 16 keys instead of 256, so that short rows have several."""
    monkeypatch.setattr(decode_attention_parts, "CHUNK", 16)
    monkeypatch.setattr(decode_attention_parts, "FEW_CHUNK", 16)


@pytest.fixture
def few_warps(monkeypatch):
    """In the simulator the blocks of a launch of many rows: 4 warps, each with its own tile of keys, instead of 8 or 12."""
    if not GPU:
        config = lambda *_: file.Config(4, 1, decode_attention_parts.FEW_CHUNK, 32, prefetched=128)
        monkeypatch.setattr(file, "choose", config)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("S", [32, 48, 128])
def test_block_sizes(few_warps, S, dtype):
    check(case([2, 33], 2, 1, 16, 2 * S, dtype, S=S))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [([50, 15], 2, 1, 16, 64), ([36], 9, 1, 16, 48)], ids=str)
def test_split_keys_equal_unsplit(short_splits, few_warps, monkeypatch, shape, dtype):
    args = case(*shape, dtype, True)
    o, k, v = check(args)
    monkeypatch.setattr(decode_attention_parts, "CHUNK", 256)
    monkeypatch.setattr(decode_attention_parts, "FEW_CHUNK", 256)
    o1, k1, v1 = run(args, to_kernel)
    assert same_bytes(k, k1) and same_bytes(v, v1)
    tolerance = 2e-6 if dtype == np.float32 else 2e-2
    np.testing.assert_allclose(o.astype(float), o1.astype(float), atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_row_does_not_depend_on_the_others(short_splits, few_warps, dtype):
    """Alone, in a batch, in another place and with longer tables: the same bits."""
    args = case([20, 3], 2, 1, 16, 24, dtype, True)
    together = run(args, to_kernel)[0]
    for b in range(2):
        alone = (args[0][[b]], *args[1:3], args[3][[b]], args[4][[b]], *args[5:])
        assert np.array_equal(run(alone, to_kernel, cache_ready=b == 0)[0][0], together[b])
    turned = (args[0][::-1].copy(), *args[1:3], *(x[::-1].copy() for x in args[3:5]), *args[5:])
    assert np.array_equal(run(turned, to_kernel)[0], together[::-1])
    longer = np.concatenate(
        [args[4], int32([[-1, 9], [7, 10**6]])], 1
    )  # entries that no token needs
    angles = rope_tables(16, 64, 1e4)
    with_longer = (*args[:4], longer, *angles, *args[7:])
    assert np.array_equal(run(with_longer, to_kernel)[0], together)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_the_bits_depend_neither_on_the_block_size_nor_on_the_blocks(
    short_splits, few_warps, dtype
):
    results = [run(case([40, 3], 2, 1, 16, 64, dtype, True, S), to_kernel)[0] for S in (16, 64)]
    args = case([40, 3], 2, 1, 16, 64, dtype, True)
    R = len(args[1])
    moved, order = rng(1).permutation(R), np.empty(R, np.int32)
    order[moved] = np.arange(R)
    tables = np.where(args[4] < 0, args[4], order[args[4]])
    elsewhere = (args[0], *(x[moved] for x in args[1:3]), args[3], tables, *args[5:])
    assert not np.array_equal(elsewhere[4], args[4])
    results.append(run(elsewhere, to_kernel)[0])
    assert not np.isnan(results[0].astype(float)).any()
    assert all(np.array_equal(x, results[0]) for x in results)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_sequences_share_full_blocks(few_warps, dtype):
    """A common prefix in shared blocks gives the bits of a prefix in each sequence's own blocks."""
    args = case([35, 40, 33], 2, 1, 16, 48, dtype)
    k, v, tables = args[1].copy(), args[2].copy(), args[4].copy()
    for x in (k, v):
        for b in (1, 2):
            x[tables[b, :2]] = x[tables[0, :2]]
    want = run((args[0], k, v, *args[3:]), to_kernel)[0]
    tables[1:, :2] = tables[0, :2]
    for x in (k, v):
        x[args[4][1:, :2]] = np.nan  # no sequence has them any more
    shared = (args[0], k, v, args[3], tables, *args[5:])
    o, k1, _ = check(shared)
    assert np.array_equal(o, want)
    assert np.array_equal(k1[tables[0, :2]], k[tables[0, :2]])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_few_blocks_and_several_launches(short_splits, few_warps, monkeypatch, dtype):
    """The bits depend neither on how many blocks share the work nor on how many rows there are in a launch."""
    args = case([-1, 20, 3], 2, 1, 16, 32, dtype, True)
    want = check(args)[0]
    monkeypatch.setattr(file, "choose", lambda *_: file.Config(4, 1, 16, 32, prefetched=16))
    for grid, rows, ready in ((1, 1024, True), (3, 2, False)):
        monkeypatch.setattr(file, "MULTIPROCESSORS", grid)
        monkeypatch.setattr(file, "MOST_ROWS", rows)
        make_decode_kernel.cache_clear()
        assert np.array_equal(run(args, to_kernel, cache_ready=ready)[0], want)
    make_decode_kernel.cache_clear()


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_lengths_heads_and_batch(data):
    G, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    S, M = data.draw(st.sampled_from([16, 32, 48])), data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(-1, min(M * S, 24)), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([np.float32, BF16]))
    check(case(lengths, G * group, G, 16, M * S, dtype, data.draw(st.booleans()), S))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_idle_entries(dtype):
    """No length, or full tables: zeros come out, and nothing is appended, whatever the tables hold."""
    args = case([-1, 16, -(2**31), 3], 4, 2, 16, 16, dtype)
    args[4][0] = args[4][2] = -1
    for put in (to_kernel, np.array):
        o, k, v = run(args, put)
        assert not o[:3].any() and o[3].all()
        assert changed_places(args, k, v) == {(args[4][3, 0], 3)}


def changed_places(args, k, v):
    """-> {(block, offset)} at which the caches have changed; the same in both"""
    bits = [x.view(np.uint16 if x.dtype == BF16 else np.uint32) for x in (k, args[1], v, args[2])]
    places = [(x != y).any(axis=(1, 3)) for x, y in (bits[:2], bits[2:])]
    assert np.array_equal(*places)
    return set(map(tuple, np.argwhere(places[0]).tolist()))


@functools.cache
def valid_blocks(dtype):
    """-> arguments, then o, k, v after the launch"""
    args = case([36, 5], 2, 1, 16, 48, dtype)
    return args, *run(args, to_kernel)


@pytest.mark.parametrize(
    "which, entry, cache_ready, dtype",
    [
        (0, 7, True, np.float32),  # keys are prefetched, too
        (1, 7, True, BF16),
        (2, 7, True, np.float32),
        (0, -1, False, BF16),
        (2, -1, False, BF16),
        (1, 2**31 - 1, False, np.float32),
        (2, -(2**31), True, BF16),
    ],
)
def test_invalid_blocks(short_splits, few_warps, which, entry, cache_ready, dtype):
    """o becomes NaN and the other sequences do not change; the simulator would report an access out of bounds."""
    args, want, k, v = valid_blocks(dtype)
    assert len(args[1]) == 7
    both = changed_places(args, k, v)
    wrong = args[4].copy()
    wrong[0, which] = entry
    bad = (*args[:4], wrong, *args[5:])
    o, k, v = run(bad, to_kernel, cache_ready=cache_ready)
    assert np.isnan(o[0].astype(float)).all() and np.array_equal(o[1], want[1])
    expected = both - {(args[4][0, 2], 4)} if which == 2 else both
    assert changed_places(args, k, v) == expected
    ref = [x.copy() if isinstance(x, np.ndarray) else x for x in bad]
    o = decode_attention_ref(*ref)
    assert np.isnan(o[0].astype(float)).all() and not np.isnan(o[1].astype(float)).any()
    assert changed_places(args, *ref[1:3]) == expected
    with pytest.raises(ValueError, match=f"a table names block {entry}, the cache has 7"):
        decode_attention(*bad)


@pytest.mark.long
@pytest.mark.parametrize("norm, scaling", [(False, None), (True, dict(type="linear", factor=2.0))])
def test_step_by_step_is_the_whole_prompt_at_once(few_warps, norm, scaling):
    H, G, D, T = 2, 1, 16, 18
    qkv, _, _, _, _, cos, sin, q_w, k_w, eps, scale = case(
        [0] * T, H, G, D, 2 * 16, norm=norm, scaling=scaling
    )
    q, k, _ = qk_norm_rope_ref(qkv, q_w, k_w, cos, sin, H, G, np.arange(T), eps)
    v = values_of(qkv, H, G, 2 * cos.shape[1])
    want, _ = flash_attention_ref(q[None], k[None], v[None], scale)
    begun = [np.zeros((2, G, 16, D), np.float32) for _ in range(2)]
    for put, steps in ((np.array, range(15)), (np.array, range(15, T)), (to_kernel, range(15, T))):
        caches = begun if steps.start == 0 else [put(x) for x in begun]
        tables = put(int32([[1, 0]]))
        others = [None if x is None else put(x) for x in (cos, sin, q_w, k_w)]
        for t in steps:
            o = decode_attention(
                put(qkv[t : t + 1]), *caches, put(int32([t])), tables, *others, eps, scale
            )
            np.testing.assert_allclose(to_host(o)[0], want[0, t].reshape(-1), atol=1e-5)


def related_rows(args, first, n):
    """Let the first n rows of a case be positions first, first + 1, ... of one sequence, in any order. -> the arguments
    of each row alone, in the order of positions, those of all, `previous`"""
    qkv, k, v, lengths, tables, *more = args
    lengths[:n] = first + np.arange(n)
    tables[:n] = tables[0]
    tables[:n, 1] = len(k) - 1  # unused
    order = rng(3).permutation(len(qkv))
    row_of = np.argsort(order)
    previous = np.full(len(qkv), -1, np.int32)
    previous[row_of[1:n]] = row_of[: n - 1]
    alone = [(qkv[[i]], k, v, lengths[[i]], tables[[i]], *more) for i in range(len(qkv))]
    return alone, (qkv[order], k, v, lengths[order], tables[order], *more), order, previous


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_successive_tokens_of_one_sequence_in_one_launch(short_splits, few_warps, dtype):
    """The bits of one launch after the other, in any order of the rows, which have keys of two splits. Without `previous`
    they would race."""
    args = case([15] + [3] * 9 + [5], 2, 1, 16, 32, dtype, True)
    alone, together, order, previous = related_rows(args, 15, 10)
    caches = [to_kernel(x) for x in args[1:3]]
    put = lambda x: to_kernel(x) if isinstance(x, np.ndarray) else x
    rows = [decode_attention(put(row[0]), *caches, *map(put, row[3:])) for row in alone]
    one_by_one = np.concatenate([to_host(x) for x in rows])
    o, *written = run(together, to_kernel, previous_B=put(previous))
    assert np.array_equal(o, one_by_one[order])
    assert all(same_bytes(to_host(x), y) for x, y in zip(caches, written))
    near = run(together, np.array, previous_B=previous)[0]
    np.testing.assert_allclose(o.astype(np.float32), near.astype(np.float32), atol=0.03)
    if not GPU:
        with pytest.raises(KernelError, match="race"):
            run(together, to_kernel)


def test_against_pytorch():
    H, G, D, lengths = 4, 2, 32, [18, 4]
    args = case(lengths, H, G, D, 32)
    o, k, v = run(args, to_kernel)
    q = qk_norm_rope_ref(args[0], None, None, *args[5:7], H, G, args[3], EPS)[0]
    mask = torch.arange(32)[None] <= torch.tensor(lengths)[:, None]
    # every block by itself, one after the other
    rows = [np.stack([np.concatenate(list(x[t]), 1) for t in args[4]]) for x in (k, v)]
    rows = [torch.tensor(np.nan_to_num(x)) for x in rows]
    want = torch.nn.functional.scaled_dot_product_attention(
        torch.tensor(q)[:, :, None], *rows, mask[:, None, None], enable_gqa=True
    )
    np.testing.assert_allclose(o, want.reshape(2, -1).numpy(), atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_nothing_outside_the_output_and_the_same_bits_twice(
    short_splits, few_warps, monkeypatch, dtype
):
    args = case([20, 2], 2, 1, 16, 24, dtype, True)
    with sentinels(monkeypatch):
        first = run(args, to_kernel)
    for a, b in zip(first, run(args, to_kernel)):
        assert same_bytes(a, b)


def test_large_scores(short_splits):
    args = case([20], 2, 1, 16, 24)
    check((args[0] * 30, args[1] * 30, *args[2:]))


# ----------------------------------------------------------------------------- planted bugs
def planted(monkeypatch, old, new):
    """Replace decode_attention_parts, or last_block, by a copy with one line changed, for the kernel factory."""
    module = last_block if old in inspect.getsource(last_block) else decode_attention_parts
    name = module.__name__
    scope = with_bug(module, old, new, dict(__name__=name, __package__=name.rpartition(".")[0]))
    scope["CHUNK"] = scope["FEW_CHUNK"] = 16
    for key in ("CHUNK", "FEW_CHUNK", "make_new_heads", "make_merge"):
        if key in scope:
            monkeypatch.setattr(decode_attention_parts, key, scope[key])
    if module is last_block:
        monkeypatch.setattr(file, "arrive_last", scope["arrive_last"])
    make_decode_kernel.cache_clear()


PAGING_BUGS = [  # module, name of a factory in it, a line, the changed line
    (kv_cache, "make_block_table", "uint32(p) // uint32(S)", "uint32(p) // uint32(S) + uint32(1)"),
    (kv_cache, "make_block_table", "uint32(p) % uint32(S)", "uint32(p)"),
    (kv_cache, "make_block_table", "block = min(entry, last)", "block = entry"),
    # the entry of an earlier tile is used again: a stale block
    (loops, "make_attend_tensor", "n0, entry = after, following", "n0 = after"),
    (loops, "make_attend_tensor", "        entry = worst\n", "        entry = uint32(0)\n"),
    (loops, "make_attend_tensor", "total[b, e] if valid else NAN", "total[b, e]"),
    (loops, "make_attend_plain", "k, base + d)", "k, start_of(entry, n, pages) + d)"),
    (loops, "make_attend_plain", "int32(here), 16 * half)", "int32(here), 0)"),
    (loops, "make_attend_plain", "total[h] if worst < pages.blocks else NAN", "total[h]"),
    (schedule, "make_items", "uint32(uint32(b) * uint32(batch.M))", "uint32(b)"),
    # the schedule: a row too late, the splits of an earlier row, a barrier that is missing
    (schedule, "make_schedule", "first_s[middle] <= i", "first_s[middle] < i"),
    (schedule, "make_schedule", "before -= mine", "pass"),
    (schedule, "make_schedule", "        cuda.syncthreads()  # the table of all rows\n", ""),
    (schedule, "make_schedule", "        cuda.syncthreads()  # the sums of all warps\n", ""),
    (
        file,
        "make_decode_kernel",
        "start_of(own, t, pages)",
        "start_of(own, 0, pages)",
    ),
    (file, "make_decode_kernel", "chunk == 0 and own < batch.R", "chunk == 0"),
]


@pytest.mark.long
@planted_bugs
@pytest.mark.parametrize("module, name, old, new", PAGING_BUGS, ids=[x[3] for x in PAGING_BUGS])
def test_planted_bugs_of_paging_are_found(short_splits, monkeypatch, module, name, old, new):
    """By a wrong result, a NaN of an unused place, an access out of bounds or a race, in this file's cases."""
    factory = getattr(module, name)
    dtype = BF16 if name == "make_attend_tensor" else np.float32
    broken = with_bug(factory, old, new, dict(vars(module)))[name]
    for user in (kv_cache, loops, schedule, file):
        if hasattr(user, name):
            monkeypatch.setattr(user, name, broken)
    for f in (make_decode_kernel, loops.make_attend_plain, loops.make_attend_tensor):
        f.cache_clear()
    monkeypatch.setattr(file, "choose", lambda *_: file.Config(4, 1, 128, 32, prefetched=64))
    try:
        with pytest.raises((KernelError, AssertionError)):
            check(case([70, 5, 66], 1, 1, 16, 80, dtype))
            invalid_block_is_noticed(dtype)
    finally:
        for f in (make_decode_kernel, loops.make_attend_plain, loops.make_attend_tensor):
            f.cache_clear()


def invalid_block_is_noticed(dtype):
    args = case([36, 5], 2, 1, 16, 48, dtype)
    for which in range(3):
        args[4][0, which], entry = 7, args[4][0, which]
        o, k, v = run(args, to_kernel)
        assert np.isnan(o[0].astype(float)).all()
        own = set() if which == 2 else {(args[4][0, 2], 4)}
        assert changed_places(args, k, v) == own | {(args[4][1, 0], 5)}
        args[4][0, which] = entry


BUGS = [
    (
        "atomic_add_acq_rel(counters, i, int32(1))",
        "cuda.atomic.add(counters, i, 1)",
        "race between blocks",
    ),
    ("    cuda.syncthreads()  # the block's writes come before thread 0's addition\n", "", "race"),
    (
        "weigh(shared, partials, first, used)\n        cuda.syncthreads()\n",
        "weigh(shared, partials, first, used)\n",
        "race",
    ),
    (
        "            cuda.syncthreads()\n            if share == 0:\n",
        "            if share == 0:\n",
        "race",
    ),
    (
        "        if owner and warp == WARPS - 1:",
        "        if owner and warp >= WARPS - 2:",
        "race",
    ),
    ("== used - 1)", "== used)", None),
]


@pytest.mark.long
@pytest.mark.parametrize("old, new, message", BUGS)
def test_planted_bugs_are_found(monkeypatch, old, new, message):
    args = [sim(a) if isinstance(a, np.ndarray) else a for a in case([40], 4, 1, 16, 48)]
    planted(monkeypatch, old, new)
    if message is None:  # no block is the last one: o is never written
        assert np.isnan(np.asarray(decode_attention(*args))).any()
    else:
        with pytest.raises(KernelError, match=message):
            decode_attention(*args)
    make_decode_kernel.cache_clear()


def test_keys_that_are_used_before_they_are_written():
    """A planted bug: the barrier between append and loop is missing."""
    attend = loops.make_attend_plain(16, 16, 2, 2, 4)
    new_heads = decode_attention_parts.make_new_heads(16, 2, 2, 4, False)
    cuda, float32 = file.cuda, file.float32

    @kernel(128)
    def broken(out, k, v, qkv, cos, sin, tables):
        q_s = cuda.shared.array(128, float32)
        acc_s = cuda.shared.array(512, float32)
        m_s = cuda.shared.array(32, float32)
        l_s = cuda.shared.array(32, float32)
        weight_s = cuda.shared.array(256, float32)
        shared = Shared(q_s, acc_s, m_s, l_s, weight_s, last=m_s)
        cache = Cache(k, v, scales=cos)
        inputs = Inputs(qkv, cos, cos, cos, sin, float32(0.0))
        new_heads(q_s, cache, inputs, Places(0, 32, 48, 0), 0, 0, True)
        attend(shared, cache, Pages(tables, 0, 1, 256, 0), 0, 1, 0, float32(1.0))
        out[cuda.threadIdx.x] = acc_s[cuda.threadIdx.x]

    cos, sin = rope_tables(16, 1, 1e4)
    arrays = [
        sim(a.reshape(-1))
        for a in (
            normal(1, 128),
            normal(2, 256),
            normal(3, 256),
            normal(4, 64),
            cos,
            sin,
            int32([0]),
        )
    ]
    with pytest.raises(KernelError, match=r"in attend .called by broken"):
        simulator.run(broken, 1, 128, *arrays)


def test_bad_input():
    args = case([3], 4, 2, 16, 8)
    replace = lambda i, x: (*args[:i], x, *args[i + 1 :])
    with pytest.raises(ValueError, match="qkv of 72 columns"):
        decode_attention(*replace(0, args[0][:, :72].copy()))
    with pytest.raises(TypeError, match="qkv is bfloat16, expected float32"):
        decode_attention(*replace(0, args[0].astype(BF16)))
    with pytest.raises(TypeError, match="lengths is int64, expected int32"):
        decode_attention(*replace(3, args[3].astype(np.int64)))
    with pytest.raises(ValueError, match="cos and sin of 4 positions, the block tables hold 16"):
        decode_attention(*args[:5], args[5][:4], args[6][:4], *args[7:])
    with pytest.raises(ValueError, match="both norm weights or none"):
        decode_attention(*replace(7, normal(1, 16)))
    with pytest.raises(ValueError, match="a table names block 7, the cache has 2"):
        decode_attention(*replace(4, int32([[7]])))
    with pytest.raises(ValueError, match=r"tables has shape \(2, 1\), expected \(1, any\)"):
        decode_attention(*replace(4, int32([[0], [1]])))
    with pytest.raises(ValueError, match="1 tables of 0 blocks of 16 tokens"):
        decode_attention(*replace(4, int32([[]])))
    odd = case([3], 2, 1, 24, 8)
    decode_attention(*odd)  # any even width on the CPU
    with pytest.raises(ValueError, match="head dim 24, the GPU kernels support"):
        run(odd, to_kernel)
    small = case([3], 2, 1, 16, 24, S=8)
    decode_attention(*small)  # any size of block
    with pytest.raises(
        ValueError, match="blocks of 8 tokens, the GPU kernels need a multiple of 16"
    ):
        run(small, to_kernel)
