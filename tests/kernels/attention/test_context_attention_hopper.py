"""Attention of a prefill for compute capability 9.0 in the simulator: against the reference, and bugs planted in copies of it.

The cases are test_context_attention.py's: the cache is NaN wherever no sequence has tokens.
"""

import functools

import numpy as np
import pytest
from checks import GPU, load_changed, normal, planted_bugs, sentinels, source_of, to_kernel
from test_context_attention import BF16, case, check, int32, prefill, run

from xtrain.kernels.attention import context_attention as file
from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention import flash_attention_hopper_parts as parts
from xtrain.kernels.attention import flash_attention_hopper_sequences as sequences
from xtrain.kernels.attention.flash_attention_hopper_table import HopperPlan, HopperTiles
from xtrain.kernels.runtime.invariance import batch_invariant
from xtrain.simulator import KernelError

ONE = HopperPlan(HopperTiles(step=32, warpgroups=1, stages=2, blocks=1, own=1), planes=0)
TWO = HopperPlan(HopperTiles(step=32, warpgroups=2, stages=2, blocks=1, own=2), planes=0)


@pytest.fixture
def calls(monkeypatch):
    """Small tiles (on a GPU the tuned ones), whose keys lie in several blocks -> a list that grows with each launch"""
    if GPU:
        import cupy as cp

        if str(cp.cuda.Device().compute_capability) != "90":
            pytest.skip("needs compute capability 9.0")  # wgmma and TMA exist only there
    seen, real = [], file.paged_forward
    use(monkeypatch, ONE)
    monkeypatch.setattr(file, "HOPPER_BLOCK", 16)
    monkeypatch.setattr(file, "paged_forward", lambda *a: (seen.append(1), real(*a)))
    return seen


def use(monkeypatch, plan):
    if not GPU:
        monkeypatch.setattr(hopper, "choose", lambda *rest: plan)


SHAPES = [  # lengths, history, H, G, D, tiles
    ([1], [0], 1, 1, 64, ONE),
    ([5], [3], 1, 1, 128, ONE),
    ([3, 0, 20, 1], [40, 3, 0, 7], 2, 1, 64, ONE),
    ([70, 9], [30, 100], 2, 2, 64, ONE),
    ([130, 2], [5, 0], 1, 1, 64, TWO),
]
if GPU:
    SHAPES += [
        ([700, 1, 90], [0, 3000, 200], 8, 2, 64, ONE),
        ([17, 33, 129, 250, 1, 1, 511], [0, 1, 63, 64, 65, 1000, 5], 16, 8, 128, ONE),
        ([2000], [2500], 4, 1, 128, ONE),
    ]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: str(s[:-1]))
def test_as_exact_as_the_reference(calls, monkeypatch, shape):
    use(monkeypatch, shape[-1])
    with sentinels(monkeypatch):
        got = check(case(*shape[:-1], BF16))
    assert calls and not np.isnan(got.astype(float)).any()


def test_where_it_is_used(calls, monkeypatch):
    monkeypatch.setattr(file, "paged_forward", lambda *a: calls.append(1))
    monkeypatch.setattr(file, "launch", lambda *a, **options: None)
    count = lambda *args, **options: (
        run(case([2], [1], 1, 1, *args, **options), to_kernel),
        len(calls),
    )[1]
    assert count(64, BF16) == 1
    assert count(16, BF16) == 1 and count(64) == 1  # other heads, float32
    monkeypatch.setattr(file, "HOPPER_BLOCK", 64)
    assert count(64, BF16, S=96) == 1 and count(64, BF16, S=128) == 2
    with batch_invariant(True):  # with any block: training uses it
        assert count(64, BF16, S=96) == 3 and count(64, BF16, S=128) == 4
    monkeypatch.setattr(fa, "HOPPER", False)
    assert count(64, BF16, S=128) == 4


@pytest.mark.long
def test_the_bits_depend_neither_on_the_block_size_nor_on_the_other_sequences(calls):
    results = [run(case([9, 3], [70, 0], 1, 1, 64, BF16, S=S), to_kernel) for S in (16, 48, 64)]
    assert len(calls) == 3 and all(np.array_equal(x, results[0]) for x in results)
    args = case([9, 3], [70, 0], 1, 1, 64, BF16)
    alone = args[0][:9], *args[1:3], int32([0, 9]), args[4][:1], args[5][:1], 9, args[7]
    assert np.array_equal(run(alone, to_kernel), results[0][:9])


@pytest.mark.long
def test_a_prompt_in_parts_is_a_prompt_and_training_has_the_same_bits(calls):
    T, S, D = 70, 16, 64
    q, k, v = (normal(i, T, 1, D, dtype=BF16) for i in (1, 2, 3))
    empty = lambda: [to_kernel(np.full((6, 1, S, D), np.nan, BF16)) for _ in range(2)]
    table = [3, 0, 5, 1, 4]
    whole = prefill(empty(), [table], (q, k, v), [T], [0])
    for cut in (5, 40):
        caches = empty()
        first = prefill(caches, [table], [x[:cut] for x in (q, k, v)], [cut], [0])
        second = prefill(caches, [table], [x[cut:] for x in (q, k, v)], [T - cut], [cut])
        assert np.array_equal(np.concatenate([first, second]), whole)
    trained = fa.flash_attention_fwd(*(to_kernel(x[None]) for x in (q, k, v)), 0.25)[0]
    if not GPU:  # on a GPU the training forward has other tiles of keys for so few queries
        assert np.array_equal(np.asarray(trained)[0], whole)
    assert len(calls) == 5


@functools.cache
def valid_values():
    """-> arguments, o"""
    args = case([3, 7, 5], [1, 0, 4], 1, 1, 64, BF16)
    return args, run(args, to_kernel)


@pytest.mark.long
@pytest.mark.parametrize(
    "which, values",
    [
        (4, [1, 10**6, 0]),
        (4, [1, -1, 0]),
        (4, [1, 2**31 - 2, 0]),
        (5, -1),
        (5, 2**31 - 1),
        (3, [0, 3, 10**6, 15]),
        (3, [0, 3, -9, 15]),
    ],
)
def test_values_that_only_the_device_knows(calls, which, values):
    """As test_context_attention.py's test of the same: NaN or, for an idle sequence, zeros; nothing out of bounds."""
    args, want = valid_values()
    values = int32(values)
    if which == 5:
        values = np.where(np.array([0, 1, 0]) > 0, values, args[5][:, 0]).reshape(3, 1)
    o = run((*args[:which], values, *args[which + 1 :]), to_kernel).astype(np.float32)
    assert calls and np.array_equal(o[:3], want[:3].astype(np.float32))
    if which != 3:
        idle = which == 4 and values[1] < 0
        assert (o[3:10] == 0 if idle else np.isnan(o[3:10])).all()
        assert not np.isnan(o[10:]).any()


BUGS = {  # module, old, new
    "table off by one": (sequences, "uint32(p) // uint32(PAGE)])", "uint32(p) // uint32(PAGE) + uint32(1)])"),
    "table of another sequence": (sequences, "tables[uint32(b * M) + uint32(p)", "tables[uint32(p)"),
    "stale block": (parts, "                        entries[i] = next_entries[i]\n", "                        pass\n"),
    "next block asked for too early": (parts, "n0 - BN, S, state)", "n0, S, state)"),
    "row of another box": (sequences, "uint32(n0 + i * BOX) % uint32(PAGE)", "uint32(n0) % uint32(PAGE)"),
    "block of another key head": (sequences, "int32(g * PAGE + int32(offset))", "int32(offset)"),
    "block that the sequence does not have": (sequences, "if p >= 0 and p < S and", "if p >= 0 and"),
    "invalid block not reported": (sequences, "return INVALID if cuda.any_sync(FULL, worst >= uint32(R)) else state", "return state"),
    "tail of V not cleared": (hopper, "if end > S:", "if end > S + BN:"),
    "tail cleared from the next row on": (parts, "first = int32(S - n0)", "first = int32(S + 1 - n0)"),
    "tail cleared before it has come": (parts, "        mbarrier_wait(base + V_FULL + 8 * stage, phase)\n        for i in", "        for i in"),
    "tail not shown to the products": (parts, "        fence_proxy_async()  # the products", "        # the products"),
    "tail read before all have cleared it": (parts, "        bar_sync(1, CONSUMERS)\n", ""),
    "rows of the next sequence overwritten": (hopper, "row + 16 <= head.T", "row < head.T"),
    "queries of another sequence": (parts, "TILE_FULL, maps, first + q0,", "TILE_FULL, maps, q0,"),
    "history forgotten": (sequences, "int32(T + past), int32(begin)", "int32(T), int32(begin)"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
@planted_bugs
def test_planted_bugs(calls, monkeypatch, tmp_path, bug):
    """By a wrong result, a NaN of an unused place, an access out of bounds, a race or a missing fence."""
    module, old, new = BUGS[bug]
    name = module.__name__.rpartition(".")[2]
    source = source_of(f"attention.{name}")
    assert source.count(old) == 1, f"{name}.py has changed: {old!r}, {source.count(old)}"
    changed = {name: source.replace(old, new)}
    loaded = {}
    for each in (sequences, parts, hopper):
        each_name = each.__name__.rpartition(".")[2]
        text = changed.get(each_name, source_of(f"attention.{each_name}"))
        loaded[each] = load_changed(f"attention.{each_name}", text, tmp_path, monkeypatch)
    loaded[hopper].choose = lambda *rest: ONE
    monkeypatch.setattr(file, "paged_forward", loaded[hopper].paged_forward)
    heads = 2 if bug == "block of another key head" else 1
    with pytest.raises((KernelError, AssertionError)):
        args = case([3, 20], [65, 2], heads, heads, 64, BF16, S=48)
        check(args)
        args[5][0, 0] = len(args[1])
        assert np.isnan(run(args, to_kernel)[:3].astype(float)).all()
