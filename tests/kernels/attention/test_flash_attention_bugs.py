"""Bugs planted in copies of the tensor-core kernels: the simulator reports each one, or the numbers are visibly wrong.

A copy of the kernel files with one line changed is imported in place of the real ones and run on one small case.
"""

import ml_dtypes
import numpy as np
import pytest
from checks import load_changed, normal, planted_bugs, source_of

from xtrain.kernels.attention import flash_attention
from xtrain.kernels.attention.flash_attention import flash_attention_bwd_ref, flash_attention_ref
from xtrain.kernels.attention.flash_attention_table import Tiles
from xtrain.kernels.attention.key_bounds import UNBOUNDED, KeyBounds
from xtrain.simulator import KernelError, RaceError, UninitializedError, sim

pytestmark = planted_bugs

FILES = (
    "primitives.tiles",
    "attention.flash_attention_bf16",
    "attention.flash_attention_bf16_bwd",
    "attention.flash_attention_bf16_bwd_d128",
    "attention.flash_attention",
)
FWD, BWD, D128 = FILES[1:4]
CHOSEN = {
    "fwd": Tiles(BM=32, BN=16, warps=2, blocks=1),
    "dq": Tiles(BM=32, BN=16, warps=2, blocks=1),
    "dkdv": Tiles(BM=32, BN=32, warps=2, blocks=1),
}
WRONG = None  # no report, but wrong numbers
SHAPE = 1, 37, 40, 2, 1, 16  # B, T, S, H, G, D
ONE_HEAD = 1, 37, 40, 1, 1, 16


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """-> plant(file, old, new): the module flash_attention, with `old` in that file replaced by `new`"""

    def plant(changed, old, new):
        for file in FILES:
            source = source_of(file)
            if file == changed:
                assert source.count(old) == 1, (
                    f"{file}.py has changed: {old!r}, {source.count(old)}"
                )
                source = source.replace(old, new)
            module = load_changed(file, source, tmp_path, monkeypatch)
        return module

    return plant


def errors(
    module, forward=True, backward=True, scale=0.3, bounds=UNBOUNDED, shape=SHAPE, tiles=CHOSEN
):
    """Run the kernels. -> {output: error relative to its largest value}. Without the forward, o and lse are the exact ones."""
    B, T, S, H, G, D = shape
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    q, k, v, do = (normal(i, *s, dtype=ml_dtypes.bfloat16) for i, s in enumerate(shapes))
    module.choose = lambda kind, *rest: tiles[kind]
    given = [sim(x) for x in (do, q, k, v)]
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    exact_o, exact_lse = flash_attention_ref(q, k, v, scale, True, bounds)
    o, lse = sim(exact_o.astype(ml_dtypes.bfloat16)), sim(exact_lse.astype(np.float32))
    if forward:
        o, lse = module.flash_attention_fwd(*given[1:], scale, True, bounds)
    gradients = ()
    if backward:
        gradients = module.flash_attention_bwd(*given, o, lse, scale, True, None, bounds)
    exact = exact_o, *flash_attention_bwd_ref(do, q, k, v, exact_o, exact_lse, scale, True, bounds)
    found = {}
    for name, x, e in zip(("o", "dq", "dk", "dv"), (o, *gradients), exact):
        found[name] = float(np.abs(np.asarray(x).astype(np.float64) - e).max() / np.abs(e).max())
    return found


@pytest.mark.long
def test_nothing_planted(planted):
    module = planted("primitives.tiles", "CHUNK = 8", "CHUNK = 8")
    assert module is not flash_attention and module.bf16 is not flash_attention.bf16
    assert max(errors(module, shape=ONE_HEAD).values()) < 1e-2


BUGS = {
    # waits and barriers
    "tile not waited for": (FWD, "            cp_async_wait(0)\n            cuda.syncthreads()  # this", "            cuda.syncthreads()  # this", UninitializedError),
    "no barrier before the next tile": (FWD, "            cp_async_wait(0)\n            cuda.syncthreads()  # this", "            cp_async_wait(0)  # this", KernelError),
    "one copy too many in flight": (BWD, "        while n0 < end:\n            cp_async_wait(0)", "        while n0 < end:\n            cp_async_wait(1)", UninitializedError),
    "copies not committed": ("primitives.tiles", "stride, valid)\n        cp_async_commit()", "stride, valid)", UninitializedError),
    "next tile into this one's place": (FWD, "copy_kv(smem, other, k,", "copy_kv(smem, now, k,", KernelError),
    "rows stored before they are complete": ("primitives.tiles", "        cuda.syncwarp()  # the rows are complete\n", "", RaceError),
    "statistics of the other stage": (BWD, "weights(s, stats, now // 2 + LSE", "weights(s, stats, other // 2 + LSE", KernelError),
    # swizzle and fragments
    "no swizzle": ("primitives.tiles", "chunk ^ ((row >> SHIFT) & MASK)", "chunk", KernelError),
    "rows swizzled by another rule than read": ("primitives.tiles", "target = a + chunk_offset(row, chunk)", "target = a + row * D + chunk * 8", WRONG),
    "right operand not transposed": ("primitives.tiles", "            ldmatrix_trans(fb, smem, b + left_lane(), 16 * n, 16 * k * D)", "            ldmatrix(fb, smem, b + left_lane(), 16 * n, 16 * k * D)", WRONG),
    "halves of the right operand exchanged": ("primitives.tiles", "mma_bf16(s[m, 2 * n + 1], fa[m], fb[1])", "mma_bf16(s[m, 2 * n + 1], fa[m], fb[0])", WRONG),
    "packed tiles in the wrong order": ("primitives.tiles", "n = 2 * k + i // 2\n                r = i % 2", "n = 2 * k + i % 2\n                r = i // 2", WRONG),
    # the maths
    "sums not rescaled": (FWD, "total[m, r] *= shrink", "total[m, r] *= float32(1.0)", WRONG),
    "diagonal off by one": (FWD, "last = int32(last - n0", "last = int32(last + 1 - n0", WRONG),
    "wrong key head": (BWD, "        head = h // group * D\n", "        head = h % group * D\n", KernelError),
    "delta forgotten": (BWD, "dp[m, n, i] - delta[m, i // 2]", "dp[m, n, i]", WRONG),
    "queries of the past are seen": (BWD, "if int32(8 * n + c) < first:", "if int32(8 * n + c) < first - 1:", WRONG),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_bugs(planted, bug):
    file, old, new, expected = BUGS[bug]
    if expected is WRONG:
        # large scores: sums are rescaled only when the largest score has grown a lot
        scale = 3.0 if bug == "sums not rescaled" else 0.3
        found = errors(
            planted(file, old, new),
            forward=file != BWD,
            backward=file == BWD,
            scale=scale,
            shape=ONE_HEAD,
        )
        assert max(found.values()) > 3e-2 or np.isnan(list(found.values())).any(), found
    else:
        with pytest.raises(expected) as caught:
            shape = SHAPE if bug == "wrong key head" else ONE_HEAD
            errors(planted(file, old, new), forward=file != BWD, shape=shape)
        assert caught.value.sites, "the report names no line"


WINDOW_BUGS = {  # of a window of 9 keys
    "a tile of keys too few": (FWD, "while n0 + BN > begin:", "while n0 > begin:"),
    "the window is a key shorter": (FWD, "here = int32(lo[m, r] - n0", "here = int32(lo[m, r] + 1 - n0"),
    "dQ sees all earlier keys": (BWD, "                hide_early(s, lo, max_lo, n0)\n", ""),
    "dK, dV see all later queries": (BWD, "                hide_late(s, hi, least, t0)\n", ""),
    "the last query is left out": (BWD, "if int32(8 * n + c) > here:", "if int32(8 * n + c) >= here:"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("bug", WINDOW_BUGS)
def test_bugs_of_a_window(planted, bug):
    file, old, new = WINDOW_BUGS[bug]
    module, passes = planted(file, old, new), dict(forward=file == FWD, backward=file == BWD)
    found = errors(module, **passes, bounds=KeyBounds(9), shape=ONE_HEAD)
    assert max(found.values()) > 3e-2 or np.isnan(list(found.values())).any(), found


D128_BUGS = {
    "weights read in the iteration that writes them": (D128, "now, new, old, read, written", "now, new, old, written, read", WRONG),
    "weights of the tile to come": (D128, "scores(s, smem, own, old + BM * D)", "scores(s, smem, own, now + BM * D)", WRONG),
    "two stages instead of three": (D128, "new = int32(STAGES + 2 * STAGE)", "new = int32(STAGES)", KernelError),
}  # fmt: skip


TILES = "primitives.tiles"
WIDE_BUGS = {  # heads of 256, with the tiles for 99 KB: 4 warps copy 4 rows at a time
    "one swizzle for all steps of a copy": (TILES, "if not SAME:", "if False:"),
    "a stage that begins inside a row": (BWD, "unit = max(128, D)", "unit = 128"),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", WIDE_BUGS)
def test_bugs_of_wide_heads(planted, bug):
    file, old, new = WIDE_BUGS[bug]
    module = planted(file, old, new)
    passes = dict(forward=file == TILES, backward=file == BWD)
    try:
        found = errors(module, **passes, shape=(1, 18, 18, 1, 1, 256), tiles=module.SMALL_WIDE)
    except KernelError:
        return
    assert max(found.values()) > 3e-2, found


@pytest.mark.long
@pytest.mark.parametrize("bug", [None, *D128_BUGS])
def test_bugs_between_two_warps(planted, bug):
    file, old, new, expected = (
        D128_BUGS[bug] if bug else ("primitives.tiles", "CHUNK = 8", "CHUNK = 8", None)
    )
    module = planted(file, old, new)
    d128 = module.bf16_bwd_d128.make_dkdv_d128_kernel, module.bf16_bwd_d128.dkdv_d128_shared_bytes
    usual = module._factory
    module._factory = lambda kind, D: d128 if kind == "dkdv" else usual(kind, D)
    if bug is None:
        assert max(errors(module, forward=False, shape=ONE_HEAD).values()) < 1e-2
        return
    try:
        found = errors(module, forward=False)
    except KernelError:
        return
    assert expected is WRONG and max(found["dk"], found["dv"]) > 3e-2, found
