"""The wgmma version of the grouped products compiles for sm_90a without a GPU: registers as planned, nothing spilled.

test_compile.py compiles the other versions.
"""

import pytest
from numba import types
from offline import check_sm_90a, compile_for_sm_90a, nvvm

from xtrain.kernels.experts.grouped_product_hopper import TILES, Result, make_kernel
from xtrain.kernels.experts.grouped_product_tiled import DW, DX, FORWARD

__all__ = ["nvvm"]

MAPS, COUNTS = (types.Array(t, 1, "C") for t in (types.uint64, types.int32))
SIGNATURE = (MAPS, COUNTS, COUNTS, COUNTS, *[types.int32] * 5)
BF16 = Result(False, False)
FLOATS = Result(True, False)
ADDED = Result(True, True)
CASES = {
    "y": (FORWARD, BF16),
    "dx": (DX, BF16),
    "dw": (DW, FLOATS),
    "dw bf16": (DW, BF16),
    "dw added": (DW, ADDED),
}
KERNELS = {
    name: (make_kernel(product, TILES[product], result), SIGNATURE)
    for name, (product, result) in CASES.items()
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(nvvm, monkeypatch, tmp_path, name):
    kernel, signature = KERNELS[name]
    tiles = TILES[CASES[name][0]]
    threads = 128 * (tiles.warpgroups + 1)
    ptx = compile_for_sm_90a(monkeypatch, kernel, signature, threads, tiles.blocks)
    assert ("cp.reduce.async.bulk.tensor.4d" in ptx) == (name == "dw added")
    check_sm_90a(tmp_path, kernel, ptx, threads, tiles.blocks)
