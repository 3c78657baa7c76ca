"""Tiles of the tensor-core kernels, the fastest found by bench/tune_flash_attention.py, which writes this file.

(kernel, D, causal) -> rows (longest T, config), the last without a limit
fwd     (BM, BN, warps, blocks per multiprocessor, keep Q in registers?)
dq      (BM, BN, warps, blocks per multiprocessor)
dkdv    (BN, BM, warps, blocks per multiprocessor)
"""

GPU = "NVIDIA H200"
_FWD = {
    16: (64, 64, 4, 4, True),
    32: (64, 64, 4, 4, True),
    64: (128, 64, 4, 2, True),
    128: (128, 64, 4, 2, False),
}
_DQ = {16: (64, 64, 4, 4), 32: (64, 64, 4, 4), 64: (128, 64, 4, 2), 128: (128, 32, 4, 2)}
_DKDV = {16: (64, 64, 4, 4), 32: (64, 64, 4, 4), 64: (128, 32, 4, 2), 128: (128, 64, 8, 1)}
TABLE = {
    (kind, D, causal): ((None, config),)
    for kind, table in (("fwd", _FWD), ("dq", _DQ), ("dkdv", _DKDV))
    for D, config in table.items()
    for causal in (True, False)
}
