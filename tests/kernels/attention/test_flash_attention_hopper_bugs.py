"""Bugs planted in copies of the kernels for compute capability 9.0: the simulator reports each, with a line.

As in test_flash_attention_bugs.py, a copy of the kernel files with one place changed is imported beside the real ones.
"""

import ml_dtypes
import numpy as np
import pytest
from checks import load_changed, normal, only_slow, source_of

from xtrain.kernels.attention.flash_attention import flash_attention_bwd_ref, flash_attention_ref
from xtrain.kernels.attention.flash_attention_hopper import Gpu
from xtrain.kernels.attention.flash_attention_hopper_table import HopperPlan, HopperTiles
from xtrain.kernels.cast import cast_fwd
from xtrain.simulator import (
    AsyncError,
    DeadlockError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    UninitializedError,
    sim,
)

pytestmark = [pytest.mark.slow, only_slow]

FILES = (
    "primitives.hopper",
    "primitives.hopper_tiles",
    "attention.flash_attention_hopper_sequences",
    "attention.flash_attention_hopper_parts",
    "attention.flash_attention_hopper",
    "attention.flash_attention_hopper_dkdv",
    "attention.flash_attention_hopper_bwd",
)
INSTRUCTIONS, TILES, _, PARTS, FWD, DKDV, BWD = FILES
PLANS = {
    "fwd": HopperPlan(HopperTiles(step=16, warpgroups=1, stages=2, blocks=1, own=1), planes=0),
    "dq": HopperPlan(HopperTiles(step=32, warpgroups=1, stages=2, blocks=1, own=2), planes=0),
    "dkdv": HopperPlan(HopperTiles(step=16, warpgroups=1, stages=2, blocks=1, own=2), planes=0),
}
WRONG = None  # no report, but wrong numbers
# B, T, S, H, G, D
SHAPES = {
    "fwd": (1, 9, 61, 2, 1, 64),
    "bwd": (1, 40, 72, 1, 1, 64),
    "group": (1, 40, 72, 2, 1, 64),
    "skip": (1, 128, 128, 1, 1, 64),
}
# two warpgroups: the first does not see the last keys of a block
WIDE = HopperPlan(HopperTiles(step=32, warpgroups=2, stages=2, blocks=1, own=2), planes=0)
GPU = Gpu(multiprocessors=1, l2_bytes=1536)  # one block takes all tiles


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """-> plant(run, file, old, new): the modules forward and backward, with `old` in that file replaced by `new`"""

    def plant(run, changed, old, new):
        modules = {}
        for file in FILES:
            source = source_of(file)
            if file == changed:
                count = source.count(old)
                assert count == 1, f"{file}.py has changed: {old!r}, {count}"
                source = source.replace(old, new)
            modules[file] = load_changed(file, source, tmp_path, monkeypatch)
        plans = {**PLANS, "fwd": WIDE} if run == "skip" else PLANS
        for module in (modules[FWD], modules[BWD]):
            module.choose = lambda kind, *rest: plans[kind]
        return modules[FWD], modules[BWD]

    return plant


def errors(modules, run):
    """Run the forward, or with exact o and lse the backward. -> the largest error relative to the largest value"""
    forward, backward = modules
    B, T, S, H, G, D = SHAPES[run]
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    arrays = [normal(i, *s, dtype=ml_dtypes.bfloat16) for i, s in enumerate(shapes)]
    q, k, v, do = (x.astype(np.float64) for x in arrays)
    o, lse = flash_attention_ref(q, k, v, 0.3)
    _, k_, v_, do_ = map(sim, arrays)
    q_ = cast_fwd(sim(q.astype(np.float32)), arrays[0].dtype)  # a kernel runs before the first one
    empty = lambda *shape: sim(np.full(shape, np.nan, ml_dtypes.bfloat16))
    if run in ("fwd", "skip"):
        got, exact = [empty(*o.shape)], [o]
        forward.forward(got[0], sim(np.zeros(lse.shape, np.float32)), q_, k_, v_, 0.3, True, GPU)
    else:
        got, exact = (
            [empty(*x.shape) for x in (q, k, v)],
            flash_attention_bwd_ref(do, q, k, v, o, lse, 0.3),
        )
        rest = sim(o.astype(ml_dtypes.bfloat16)), sim(lse.astype(np.float32)), 0.3, True, GPU
        backward.backward(tuple(got), do_, q_, k_, v_, *rest)
    pairs = [(np.asarray(x).astype(np.float64), e) for x, e in zip(got, exact)]
    return max(float(np.abs(x - e).max() / np.abs(e).max()) for x, e in pairs)


@pytest.mark.long
@pytest.mark.parametrize("run", list(SHAPES))
def test_nothing_planted(planted, run):
    assert errors(planted(run, PARTS, "HEADER = 1024", "HEADER = 1024"), run) < 2e-2


BUGS = {
    # copies and their barriers
    "tile read before it has come": (FWD, "            mbarrier_wait(base + K_FULL + 8 * stage, phase)\n            scores(", "            scores(", AsyncError, "fwd"),
    "wrong parity, the wait passes": (FWD, "            mbarrier_wait(base + V_FULL + 8 * stage, phase)\n            for _", "            mbarrier_wait(base + V_FULL + 8 * stage, phase ^ 1)\n            for _", AsyncError, "fwd"),
    "wrong parity, the producer never continues": (PARTS, "mbarrier_wait(free + 8 * stage, ((it // STAGES) & 1) ^ 1)", "mbarrier_wait(free + 8 * stage, (it // STAGES) & 1)", DeadlockError, "fwd"),
    "stage not waited for": (PARTS, "        mbarrier_wait(free + 8 * stage, ((it // STAGES) & 1) ^ 1)\n", "", AsyncError, "fwd"),
    "too few bytes expected": (PARTS, "        mbarrier_arrive_expect_tx(full, RING)", "        mbarrier_arrive_expect_tx(full, RING // 2)", KernelError, "fwd"),
    "too many bytes expected": (PARTS, "mbarrier_arrive_expect_tx(full, QUERIES * ROWS)", "mbarrier_arrive_expect_tx(full, 2 * QUERIES * ROWS)", DeadlockError, "fwd"),
    "barriers not shown to the copy engine": (TILES, "            mbarrier_init_fence()\n", "", AsyncError, "fwd"),
    "threads meet no barrier that is made": (TILES, "            mbarrier_init_fence()\n        cuda.syncthreads()", "            mbarrier_init_fence()", AsyncError, "fwd"),
    "one warp's arrival for four": (FWD, "make_barriers(4 * WGS,", "make_barriers(1,", KernelError, "fwd"),
    "map not acquired": (FWD, "            acquire_map(maps, OUT)\n", "            pass\n", AsyncError, "fwd"),
    "tiles off their boundary": (PARTS, "HEADER = 1024", "HEADER = 512", AsyncError, "fwd"),
    "tile number overwritten while it is read": (PARTS, "        mbarrier_wait(barriers + TILE_FREE, ((done // OWN) & 1) ^ 1)\n        post(", "        post(", AsyncError, "fwd"),
    "tile number read before it is written": (PARTS, "        mbarrier_wait(barriers + TILE_FULL, (done // OWN) & 1)\n", "", UninitializedError, "fwd"),
    # products
    "scores used before they are computed": (FWD, "            wait_s(s)\n", "", AsyncError, "fwd"),
    "one product too many in flight": (FWD, "wait_s = make_wgmma_wait(BN, 0)", "wait_s = make_wgmma_wait(BN, 1)", AsyncError, "fwd"),
    "operand changed while a product reads it": (FWD, "                hold_s(s)\n", "                pack(p, s)\n", AsyncError, "fwd"),
    "sum used before it is computed": (FWD, "                wait_o(o)\n", "", AsyncError, "fwd"),
    "stage given back before the product is done": (FWD, "                wait_o(o)\n                mbarrier_arrive(base + V_FREE + 8 * before)\n", "                mbarrier_arrive(base + V_FREE + 8 * before)\n                wait_o(o)\n", AsyncError, "fwd"),
    "product of half a warpgroup": (FWD, "            wait_s(s)\n", "            wait_s(s)\n            if warp < 2:\n                wait_s(s)\n            if warp < 2:\n                scores(s, q, descriptor(base + K))\n", KernelError, "fwd"),
    # descriptors
    "wrong stride": (INSTRUCTIONS, "(1024 >> 4) << 32", "(512 >> 4) << 32", AsyncError, "fwd"),
    "wrong swizzle": (INSTRUCTIONS, "SWIZZLE_128 = 1", "SWIZZLE_128 = 2", AsyncError, "fwd"),
    "slices too far apart": (INSTRUCTIONS, "32 * (k % 4) + k // 4", "64 * (k % 4) + k // 4", AsyncError, "fwd"),
    "slices down the rows too close": (INSTRUCTIONS, "16 * 128 * k", "8 * 128 * k", AsyncError, "bwd"),
    "not transposed": (FWD, "down_rows(BN), b_rows=True", "down_rows(BN), b_rows=False", KernelError, "fwd"),
    "tile of another stage": (FWD, "            mbarrier_wait(base + V_FULL + 8 * stage, phase)\n            for _", "            for _", AsyncError, "fwd"),
    "past the end of shared memory": (FWD, "lse = lse_BHT.reshape(-1)\n    shared = fwd_shared_bytes(D, tiles)", "lse = lse_BHT.reshape(-1)\n    shared = fwd_shared_bytes(D, tiles) - 1024", OutOfBoundsError, "fwd"),
    # results
    "no fence before the results leave": (TILES, "        fence_proxy_async()\n", "", AsyncError, "fwd"),
    "rows leave before all lanes have written them": (TILES, "        cuda.syncwarp()\n        if lane == 0:", "        if lane == 0:", UninitializedError, "fwd"),
    "rows overwritten while they leave": (FWD, "        stores_done()  # of the previous tile\n", "", AsyncError, "fwd"),
    "stores not committed": (TILES, "            tma_store_commit()\n", "", AsyncError, "fwd"),
    "end before the stores are read": (FWD, "        stores_done()\n\n    return consume", "        return\n\n    return consume", AsyncError, "fwd"),
    "rows not swizzled": (TILES, "((n ^ g) << 4)", "(n << 4)", WRONG, "fwd"),
    # backward
    "K given back while dQ reads it": (BWD, "                if i > 0:\n                    mbarrier_arrive(base + K_FREE + 8 * before)\n", "                mbarrier_arrive(base + K_FREE + 8 * stage)\n", KernelError, "bwd"),
    "statistics overwritten while they are read": (DKDV, "                        cuda.syncwarp()  # all lanes have read its statistics\n", "", AsyncError, "bwd"),
    "K overwritten while other warps read it": (DKDV, "        bar_sync(1 + (warp >> 2), 128)  # all its warps have finished with them\n", "", AsyncError, "bwd"),
    "P overwritten while dV reads it": (DKDV, "                    wait_out(dv)  # then `a` may be written again\n", "", AsyncError, "bwd"),
    "stage passed over and not given back": (PARTS, "            mbarrier_arrive(base + V_FREE + 8 * stage)\n            it +=", "            it +=", DeadlockError, "skip"),
    "statistics of another head": (DKDV, "before + h)", "before)", WRONG, "group"),
    # one kernel beginning while the one before still runs
    "statistics read before they are written": (BWD, "        wait_for_previous()  # for the statistics. Q, K, V and dO are older\n        let_next_start()\n", "", RaceError, "bwd"),
    "dK, dV may start while the statistics are written": (BWD, "        wait_for_previous()  # for the statistics. Q, K, V and dO are older\n        let_next_start()\n", "        let_next_start()\n        wait_for_previous()\n", RaceError, "bwd"),
    "queries read before they are written": (FWD, "        wait_for_previous()\n        let_next_start()\n", "", RaceError, "fwd"),
    "dK, dV end before dQ": (DKDV, "        wait_for_previous()  # a kernel", "        # a kernel", KernelError, "bwd"),
    # results
    "delta forgotten": (DKDV, "dp[4 * n + j] - drop[j % 2]", "dp[4 * n + j]", WRONG, "bwd"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_bugs(planted, bug):
    file, old, new, expected, run = BUGS[bug]
    modules = planted(run, file, old, new)
    if expected is WRONG:
        assert not errors(modules, run) < 3e-2
        return
    with pytest.raises(expected) as caught:
        errors(modules, run)
    assert caught.value.sites or "never calls" in str(caught.value), "the report names no line"
