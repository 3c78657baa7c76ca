"""The kernels for compute capability 9.0 compile for sm_90a without a GPU: registers as planned, nothing spilled.

What this needs is in offline.py; ptxas must not be older than NVVM.
"""

import re

import pytest
from numba import types
from offline import check_sm_90a, compile_for_sm_90a, nvvm, once_each, only_all

from xtrain.kernels.attention import flash_attention_hopper as hopper
from xtrain.kernels.attention import flash_attention_hopper_bwd as backward
from xtrain.kernels.attention.flash_attention_hopper_table import TABLE
from xtrain.kernels.attention.key_bounds import BY_ARRAY

__all__ = ["nvvm"]
pytestmark = pytest.mark.usefixtures("nvvm")

I32, F32 = types.int32, types.float32
MAPS, ROWS, COUNTER = (types.Array(t, 1, "C") for t in (types.uint64, F32, I32))
HALF = types.Array(types.uint16, 1, "C")
SIGNATURES = {
    "fwd": (MAPS, ROWS, ROWS, COUNTER, *[I32] * 6, F32),
    # S, tokens of a block of the cache, in place of causal
    "paged": (MAPS, HALF, *[COUNTER] * 4, *[I32] * 9, F32),
    "dq": (MAPS, ROWS, ROWS, COUNTER, *[I32] * 7, F32),
    "dkdv": (MAPS, MAPS, COUNTER, *[I32] * 6, F32),
}
STATISTICS = ROWS, HALF, HALF, ROWS, I32, I32, I32
MAKERS = {
    "fwd": hopper.make_fwd_kernel,
    "paged": hopper.make_paged_kernel,
    "dq": backward.make_dq_kernel,
    "dkdv": backward.make_dkdv_kernel,
}
CHOSEN = sorted(
    {(*key, plan.tiles) for key, rows in TABLE.items() for plan in rows.values()}, key=str
)
LONGEST = {D: TABLE["fwd", D, True][None].tiles for D in hopper.WIDTHS}
PAGED = [("paged", D, S, tiles) for D, tiles in LONGEST.items() for S in (64, 192)]
ONE_OF_EACH = [
    (kind, *rest, TABLE[kind, *rest][None].tiles) for kind, *rest in TABLE if rest == [128, True]
]
ONE_OF_EACH += PAGED[::2]


def check(monkeypatch, tmp_path, choice, key_bounds=0):
    kind, D, causal, tiles = choice
    threads, per_sm = 128 * (tiles.warpgroups + 1), tiles.blocks
    kernel, signature = MAKERS[kind](D, causal, tiles, key_bounds), SIGNATURES[kind]
    if key_bounds == BY_ARRAY:
        at = signature.index(COUNTER)
        signature = (*signature[: at - 1], COUNTER, *signature[at:])
    ptx = compile_for_sm_90a(monkeypatch, kernel, signature, threads, per_sm)
    check_sm_90a(tmp_path, kernel, ptx, threads, per_sm)


@pytest.mark.parametrize("choice", ONE_OF_EACH, ids=str)
def test_kernels_compile(monkeypatch, tmp_path, choice):
    check(monkeypatch, tmp_path, choice)


@only_all
@pytest.mark.parametrize("choice", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("key_bounds", [70, BY_ARRAY])
def test_windows_and_documents_compile(monkeypatch, tmp_path, choice, key_bounds):
    if choice[0] != "paged" or key_bounds != BY_ARRAY:  # a cache holds one document
        check(monkeypatch, tmp_path, choice, key_bounds)


@only_all
@pytest.mark.parametrize(
    "choice", [c for c in once_each(CHOSEN) + PAGED if c not in ONE_OF_EACH], ids=str
)
def test_all_chosen_tiles(monkeypatch, tmp_path, choice):
    check(monkeypatch, tmp_path, choice)


@pytest.mark.parametrize("D", [64, 128])
def test_statistics_kernel_compiles(monkeypatch, D):
    kernel, _ = backward.make_statistics_kernel(D)
    ptx = compile_for_sm_90a(monkeypatch, kernel, STATISTICS, backward.THREADS, 1)
    assert not re.search(r"\.f64\b", ptx) and ".local " not in ptx and "ld.global.v4" in ptx
