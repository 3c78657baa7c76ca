"""Tiles of the tensor-core kernels, the fastest found by bench/tune_flash_attention.py, which writes this file.

    (kernel, D, causal) -> rows (longest T, config), the last without a limit
    fwd     (BM, BN, warps, keep Q in registers?, blocks per multiprocessor)
    dq      (BM, BN, warps, blocks per multiprocessor)
    dkdv    (BN, BM, warps, keep K and V in registers?, blocks per multiprocessor)
"""

GPU = "NVIDIA H200"
_FWD = {
    16: ((None, (64, 64, 4, True, 4)),),
    32: ((None, (64, 64, 4, True, 4)),),
    64: ((None, (64, 64, 4, False, 4)),),
    128: ((None, (128, 64, 4, False, 2)),),
}
_DQ = {
    16: ((None, (64, 64, 4, 4)),),
    32: ((None, (64, 64, 4, 4)),),
    64: ((None, (128, 32, 4, 3)),),
    128: ((None, (128, 32, 4, 2)),),
}
_DKDV = {
    16: ((None, (64, 64, 4, False, 3)),),
    32: ((None, (64, 64, 4, False, 3)),),
    64: ((None, (64, 64, 4, False, 2)),),
    128: ((None, (64, 32, 4, False, 2)),),
}
TABLE = {
    (kind, D, causal): rows
    for kind, table in (("fwd", _FWD), ("dq", _DQ), ("dkdv", _DKDV))
    for D, rows in table.items()
    for causal in (True, False)
}
