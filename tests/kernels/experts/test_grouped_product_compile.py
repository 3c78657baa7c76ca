"""The wgmma version of the grouped products compiles for sm_90a without a GPU: registers as planned, nothing spilled.

test_compile.py compiles the other versions.
"""

import pytest
from numba import types
from offline import check_sm_90a, compile_for_sm_90a, nvvm

from xtrain.kernels.experts.grouped_product_hopper import TILES, make_kernel
from xtrain.kernels.experts.grouped_product_tiled import DW, DX, FORWARD

__all__ = ["nvvm"]

MAPS, ROWS, COUNTS, HALF = (
    types.Array(t, 1, "C") for t in (types.uint64, types.float32, types.int32, types.uint16)
)
END = (COUNTS, COUNTS, COUNTS, *[types.int32] * 5)
KERNELS = {
    "y": (make_kernel(FORWARD, TILES[FORWARD]), (MAPS, COUNTS, *END)),
    "dx": (make_kernel(DX, TILES[DX]), (MAPS, COUNTS, *END)),
    "dw": (make_kernel(DW, TILES[DW]), (MAPS, ROWS, *END)),
    "dw bf16": (make_kernel(DW, TILES[DW]), (MAPS, HALF, *END)),
    "dw added": (make_kernel(DW, TILES[DW], True), (MAPS, ROWS, *END)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(nvvm, monkeypatch, tmp_path, name):
    kernel, signature = KERNELS[name]
    tiles = TILES[DW if "dw" in name else FORWARD]
    threads = 128 * (tiles.warpgroups + 1)
    ptx = compile_for_sm_90a(monkeypatch, kernel, signature, threads, tiles.blocks)
    assert ("red.relaxed.gpu.global.add.v2.f32" in ptx) == (name == "dw added")
    check_sm_90a(tmp_path, kernel, ptx, threads, tiles.blocks)
