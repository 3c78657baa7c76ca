"""Tiles of the kernels for compute capability 9.0; bench/tune_flash_attention.py --hopper writes this file.

(kernel, D, causal) -> rows (longest T, config), the last without a limit
fwd, dq     (keys per step, consumer warpgroups, stages, blocks per multiprocessor)
dkdv        (queries per step, consumer warpgroups, stages, blocks per multiprocessor)
"""

GPU = "NVIDIA H200"
TABLE = {
    ("fwd", 64, False): ((1024, (64, 1, 3, 3)), (None, (128, 3, 2, 1))),
    ("fwd", 64, True): ((2048, (64, 1, 3, 3)), (None, (128, 1, 2, 2))),
    ("fwd", 128, False): ((None, (128, 2, 2, 1)),),
    ("fwd", 128, True): ((512, (64, 1, 2, 2)), (None, (128, 2, 2, 1))),
    ("dq", 64, False): ((512, (64, 1, 3, 2)), (None, (128, 2, 3, 1))),
    ("dq", 64, True): ((2048, (64, 1, 4, 2)), (None, (128, 2, 3, 1))),
    ("dq", 128, False): ((None, (64, 2, 4, 1)),),
    ("dq", 128, True): ((None, (64, 2, 4, 1)),),
    ("dkdv", 64, False): ((None, (64, 1, 4, 2)),),
    ("dkdv", 64, True): ((None, (64, 1, 4, 2)),),
    ("dkdv", 128, False): ((None, (64, 2, 2, 1)),),
    ("dkdv", 128, True): ((None, (64, 2, 2, 1)),),
}
