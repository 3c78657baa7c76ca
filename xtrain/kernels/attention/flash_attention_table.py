"""Tuned tiles of the tensor-core kernels (mma.sync). bench/tune_flash_attention.py --write rewrites
TABLE.

TABLE: (kernel, D, causal) -> {longest T: tiles}, in the order of T; the last entry has no limit
(None).
kernel: "fwd", "dq" or "dkdv". D: width of a head. T: queries of a sequence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How a kernel divides the scores of a head.

    A block owns BM queries (fwd, dq) or BN keys (dkdv) and loops over the tiles of the other kind.
    """

    BM: int  # queries of a tile
    BN: int  # keys of a tile
    warps: int  # of a block
    blocks: int  # that a multiprocessor must hold at once: limits the registers of a thread
    q_in_registers: bool = False  # fwd alone; if False, Q is read from shared memory for each tile


GPU = "NVIDIA H200"
TABLE: dict[tuple[str, int, bool], dict[int | None, Tiles]] = {
    ("fwd", 16, False): {
        512: Tiles(BM=128, BN=64, warps=4, blocks=3, q_in_registers=True),
        None: Tiles(BM=64, BN=64, warps=4, blocks=5, q_in_registers=True),
    },
    ("fwd", 16, True): {
        None: Tiles(BM=64, BN=64, warps=4, blocks=4, q_in_registers=True),
    },
    ("fwd", 32, False): {
        None: Tiles(BM=64, BN=64, warps=4, blocks=4, q_in_registers=True),
    },
    ("fwd", 32, True): {
        512: Tiles(BM=64, BN=64, warps=4, blocks=4, q_in_registers=True),
        None: Tiles(BM=128, BN=64, warps=4, blocks=3, q_in_registers=True),
    },
    ("fwd", 64, False): {
        512: Tiles(BM=128, BN=32, warps=4, blocks=3),
        None: Tiles(BM=128, BN=64, warps=4, blocks=2, q_in_registers=True),
    },
    ("fwd", 64, True): {
        2048: Tiles(BM=128, BN=32, warps=4, blocks=3),
        None: Tiles(BM=128, BN=64, warps=4, blocks=2, q_in_registers=True),
    },
    ("fwd", 128, False): {
        None: Tiles(BM=128, BN=64, warps=4, blocks=2),
    },
    ("fwd", 128, True): {
        512: Tiles(BM=128, BN=32, warps=4, blocks=2),
        None: Tiles(BM=128, BN=64, warps=4, blocks=2),
    },
    ("fwd", 256, False): {
        None: Tiles(BM=128, BN=64, warps=8, blocks=1),
    },
    ("fwd", 256, True): {
        None: Tiles(BM=128, BN=64, warps=8, blocks=1),
    },
    ("dq", 16, False): {
        None: Tiles(BM=128, BN=64, warps=4, blocks=3),
    },
    ("dq", 16, True): {
        None: Tiles(BM=64, BN=64, warps=4, blocks=5),
    },
    ("dq", 32, False): {
        512: Tiles(BM=64, BN=64, warps=4, blocks=4),
        2048: Tiles(BM=128, BN=32, warps=4, blocks=3),
        None: Tiles(BM=128, BN=64, warps=4, blocks=2),
    },
    ("dq", 32, True): {
        512: Tiles(BM=64, BN=32, warps=4, blocks=5),
        2048: Tiles(BM=64, BN=64, warps=4, blocks=4),
        None: Tiles(BM=128, BN=32, warps=4, blocks=3),
    },
    ("dq", 64, False): {
        512: Tiles(BM=128, BN=32, warps=4, blocks=3),
        2048: Tiles(BM=128, BN=80, warps=4, blocks=2),
        None: Tiles(BM=128, BN=64, warps=4, blocks=2),
    },
    ("dq", 64, True): {
        512: Tiles(BM=64, BN=32, warps=4, blocks=4),
        None: Tiles(BM=128, BN=64, warps=4, blocks=2),
    },
    ("dq", 128, False): {
        None: Tiles(BM=128, BN=32, warps=4, blocks=2),
    },
    ("dq", 128, True): {
        512: Tiles(BM=64, BN=32, warps=4, blocks=3),
        None: Tiles(BM=128, BN=32, warps=4, blocks=2),
    },
    ("dq", 256, False): {
        None: Tiles(BM=128, BN=32, warps=8, blocks=1),
    },
    ("dq", 256, True): {
        None: Tiles(BM=128, BN=32, warps=8, blocks=1),
    },
    ("dkdv", 16, False): {
        None: Tiles(BM=64, BN=128, warps=4, blocks=3),
    },
    ("dkdv", 16, True): {
        None: Tiles(BM=64, BN=128, warps=4, blocks=3),
    },
    ("dkdv", 32, False): {
        None: Tiles(BM=64, BN=128, warps=4, blocks=2),
    },
    ("dkdv", 32, True): {
        None: Tiles(BM=32, BN=128, warps=4, blocks=3),
    },
    ("dkdv", 64, False): {
        2048: Tiles(BM=64, BN=64, warps=4, blocks=2),
        None: Tiles(BM=48, BN=64, warps=4, blocks=3),
    },
    ("dkdv", 64, True): {
        2048: Tiles(BM=32, BN=128, warps=4, blocks=2),
        None: Tiles(BM=48, BN=128, warps=4, blocks=2),
    },
    ("dkdv", 128, False): {
        None: Tiles(BM=64, BN=128, warps=8, blocks=1),
    },
    ("dkdv", 128, True): {
        512: Tiles(BM=32, BN=64, warps=4, blocks=2),
        None: Tiles(BM=64, BN=128, warps=8, blocks=1),
    },
    ("dkdv", 256, False): {
        None: Tiles(BM=32, BN=64, warps=8, blocks=1),
    },
    ("dkdv", 256, True): {
        None: Tiles(BM=32, BN=64, warps=8, blocks=1),
    },
}
