"""The FlashAttention kernels compile without a GPU: in float32, registers instead of local memory, no spills.

What this needs: offline.py.
"""

import re

import pytest
from numba import types
from offline import CARDS, CARDS_BF16, check_registers, compiled, nvvm, once_each, only_all

from xtrain.kernels.attention import flash_attention as fa
from xtrain.kernels.attention import flash_attention_fp32 as fp32
from xtrain.kernels.attention.flash_attention_table import TABLE
from xtrain.kernels.attention.key_bounds import BY_ARRAY

__all__ = ["nvvm"]
pytestmark = pytest.mark.usefixtures("nvvm")

HALF, FULL = types.Array(types.uint16, 1, "C"), types.Array(types.float32, 1, "C")
SCALARS = (*[types.int32] * 7, types.float32)
BOUNDS = types.Array(types.int32, 1, "C")
SIGNATURES = {  # the array before the scalars: of key_bounds.py; a kernel without bounds gets another one, which it does not read
    "fwd": (HALF, FULL, HALF, HALF, HALF, FULL, *SCALARS),
    "dq": (HALF, FULL, *[HALF] * 5, FULL, FULL, *SCALARS),
    "dkdv": (*[HALF] * 6, FULL, FULL, FULL, types.int32, *SCALARS),
}
BTHD, BHT = types.Array(types.float32, 4, "C"), types.Array(types.float32, 3, "C")
FP32 = {
    "fwd": (BTHD, BHT, BTHD, BTHD, BTHD, BHT, types.float32),
    "dq": (BTHD, BHT, *[BTHD] * 5, BHT, BHT, types.float32),
    "dkdv": (*[BTHD] * 6, BHT, BHT, BHT, types.float32),
}
CHOSEN: set[tuple] = {(*key, tiles) for key, rows in TABLE.items() for tiles in rows.values()}
SMALL = {(*key, fa.small_tiles(*key[:2])) for key in TABLE if key[2]}
ONE_OF_EACH = [(kind, D, True, TABLE[kind, D, True][None]) for kind, D in (
    ("fwd", 64), ("dq", 32), ("dkdv", 16), ("dkdv", 128),
)]  # fmt: skip


def check_bf16(monkeypatch, tmp_path, choice, cards=((9, 0),), key_bounds=0):
    kind, D, causal, tiles = choice
    kernel, _ = fa.make_kernel(kind, D, causal, tiles, key_bounds)
    signature = SIGNATURES[kind]
    if key_bounds == BY_ARRAY:
        at = max(i for i, kind in enumerate(signature) if isinstance(kind, types.Array))
        signature = (*signature[:at], BOUNDS, *signature[at + 1 :])
    for cc, ptx in compiled(monkeypatch, kernel, signature, cards).items():
        assert "mma.sync.aligned.m16n8k16" in ptx and "cp.async" in ptx and "ldmatrix" in ptx
        if cc == (9, 0):  # whose tiles are tuned
            check_registers(tmp_path, ptx, 32 * tiles.warps, tiles.blocks, cc)


@pytest.mark.parametrize("choice", ONE_OF_EACH, ids=str)
def test_tensor_core_kernels_compile(monkeypatch, tmp_path, choice):
    check_bf16(monkeypatch, tmp_path, choice)


# with bounds, dkdv for D = 128 spills 4 to 8 bytes
BOUNDED = [x for x in ONE_OF_EACH if x[:2] != ("dkdv", 128)]


@only_all
@pytest.mark.parametrize("choice", BOUNDED, ids=str)
@pytest.mark.parametrize("key_bounds", [70, BY_ARRAY])
def test_windows_and_documents_compile(monkeypatch, tmp_path, choice, key_bounds):
    check_bf16(monkeypatch, tmp_path, choice, key_bounds=key_bounds)


@only_all
@pytest.mark.parametrize("choice", [c for c in once_each(CHOSEN) if c not in ONE_OF_EACH], ids=str)
def test_all_chosen_tiles(monkeypatch, tmp_path, choice):
    check_bf16(monkeypatch, tmp_path, choice)


@only_all
@pytest.mark.parametrize("choice", sorted(SMALL, key=str), ids=str)
def test_small_tiles_on_other_cards(monkeypatch, tmp_path, choice):
    check_bf16(monkeypatch, tmp_path, choice, CARDS_BF16)


@pytest.mark.parametrize("kind", list(FP32))
def test_fp32_kernels_compile(monkeypatch, kind):
    makers = {"fwd": fp32.make_fwd_kernel, "dq": fp32.make_dq_kernel, "dkdv": fp32.make_dkdv_kernel}
    for D, cards in ((64, CARDS[:1]), (33, CARDS[-1:])):
        kernel = makers[kind](D, True)
        for ptx in compiled(monkeypatch, kernel, FP32[kind], cards).values():
            shared = [int(n) for n in re.findall(r"\.shared[^;]*\[(\d+)\];", ptx)]
            assert sum(shared) <= 48 * 1024
