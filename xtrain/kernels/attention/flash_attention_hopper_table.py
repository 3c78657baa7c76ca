"""Tiles of the kernels for compute capability 9.0; bench/tune_flash_attention.py --hopper writes this file.

(kernel, D, causal) -> rows (longest T, config), the last without a limit
config  (keys per step, for dkdv queries; consumer warpgroups; stages; blocks per multiprocessor;
         own tiles in shared memory: with two the next one's operands come while this one's results leave;
         planes whose tiles are taken in turns, 0: as many as fit half of the second-level cache)
"""

GPU = "NVIDIA H200"
TABLE = {
    ("fwd", 64, False): ((512, (64, 1, 3, 3, 2, 1)), (None, (128, 3, 2, 1, 2, 0))),
    ("fwd", 64, True): ((2048, (64, 1, 3, 3, 2, 0)), (None, (128, 3, 2, 1, 1, 0))),
    ("fwd", 128, False): (
        (256, (128, 2, 2, 1, 2, 1)),
        (512, (64, 1, 2, 2, 1, 1)),
        (None, (128, 2, 2, 1, 2, 1)),
    ),
    ("fwd", 128, True): (
        (256, (64, 2, 4, 1, 2, 1)),
        (512, (64, 1, 2, 2, 1, 1)),
        (2048, (128, 2, 2, 1, 2, 1)),
        (None, (128, 2, 2, 1, 1, 0)),
    ),
    ("dq", 64, False): (
        (256, (128, 2, 3, 1, 2, 0)),
        (512, (64, 1, 4, 2, 2, 1)),
        (2048, (128, 2, 3, 1, 2, 0)),
        (None, (64, 1, 4, 2, 1, 1)),
    ),
    ("dq", 64, True): (
        (512, (64, 1, 4, 2, 2, 1)),
        (2048, (128, 2, 3, 1, 2, 0)),
        (None, (64, 1, 4, 2, 2, 1)),
    ),
    ("dq", 128, False): ((512, (64, 1, 2, 2, 1, 1)), (None, (64, 2, 4, 1, 1, 1))),
    ("dq", 128, True): ((2048, (64, 1, 2, 2, 1, 1)), (None, (64, 2, 4, 1, 1, 1))),
    ("dkdv", 64, False): (
        (512, (64, 1, 4, 2, 2, 1)),
        (2048, (64, 1, 4, 2, 2, 0)),
        (None, (64, 1, 4, 2, 1, 0)),
    ),
    ("dkdv", 64, True): ((512, (64, 1, 4, 2, 2, 1)), (None, (64, 1, 4, 2, 2, 0))),
    ("dkdv", 128, False): (
        (256, (64, 2, 2, 1, 2, 0)),
        (512, (32, 1, 3, 2, 1, 1)),
        (None, (64, 2, 2, 1, 2, 0)),
    ),
    ("dkdv", 128, True): ((512, (32, 1, 2, 2, 2, 1)), (None, (64, 2, 2, 1, 2, 0))),
}
