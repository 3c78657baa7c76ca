"""Tiles of the tensor-core kernels, the fastest found by bench/tune_flash_attention.py, which writes this file.

(kernel, D, causal) -> rows (longest T, config), the last without a limit
fwd     (BM, BN, warps, blocks per multiprocessor, keep Q in registers?)
dq      (BM, BN, warps, blocks per multiprocessor)
dkdv    (BN, BM, warps, blocks per multiprocessor)
"""

GPU = "NVIDIA H200"
TABLE = {
    ("fwd", 16, False): ((512, (128, 64, 4, 3, True)), (None, (64, 64, 4, 5, True))),
    ("fwd", 16, True): ((None, (64, 64, 4, 4, True)),),
    ("fwd", 32, False): ((None, (64, 64, 4, 4, True)),),
    ("fwd", 32, True): ((512, (64, 64, 4, 4, True)), (None, (128, 64, 4, 3, True))),
    ("fwd", 64, False): ((512, (128, 32, 4, 3, False)), (None, (128, 64, 4, 2, True))),
    ("fwd", 64, True): ((2048, (128, 32, 4, 3, False)), (None, (128, 64, 4, 2, True))),
    ("fwd", 128, False): ((None, (128, 64, 4, 2, False)),),
    ("fwd", 128, True): ((512, (128, 32, 4, 2, False)), (None, (128, 64, 4, 2, False))),
    ("dq", 16, False): ((None, (128, 64, 4, 3)),),
    ("dq", 16, True): ((None, (64, 64, 4, 5)),),
    ("dq", 32, False): ((512, (64, 64, 4, 4)), (2048, (128, 32, 4, 3)), (None, (128, 64, 4, 2))),
    ("dq", 32, True): ((512, (64, 32, 4, 5)), (2048, (64, 64, 4, 4)), (None, (128, 32, 4, 3))),
    ("dq", 64, False): ((512, (128, 32, 4, 3)), (2048, (128, 80, 4, 2)), (None, (128, 64, 4, 2))),
    ("dq", 64, True): ((512, (64, 32, 4, 4)), (None, (128, 64, 4, 2))),
    ("dq", 128, False): ((None, (128, 32, 4, 2)),),
    ("dq", 128, True): ((512, (64, 32, 4, 3)), (None, (128, 32, 4, 2))),
    ("dkdv", 16, False): ((None, (128, 64, 4, 3)),),
    ("dkdv", 16, True): ((None, (128, 64, 4, 3)),),
    ("dkdv", 32, False): ((None, (128, 64, 4, 2)),),
    ("dkdv", 32, True): ((None, (128, 32, 4, 3)),),
    ("dkdv", 64, False): ((2048, (64, 64, 4, 2)), (None, (64, 48, 4, 3))),
    ("dkdv", 64, True): ((2048, (128, 32, 4, 2)), (None, (128, 48, 4, 2))),
    ("dkdv", 128, False): ((None, (128, 64, 8, 1)),),
    ("dkdv", 128, True): ((512, (64, 32, 4, 2)), (None, (128, 64, 8, 1))),
}
