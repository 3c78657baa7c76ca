"""Tuned tiles of the kernels for compute capability 9.0. bench/tune_flash_attention.py --hopper
--write rewrites TABLE.

TABLE: (kernel, D, causal) -> {longest T: plan}, in the order of T; the last entry has no limit
(None).
kernel: "fwd", "dq" or "dkdv". D: width of a head. T: queries of a sequence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class HopperTiles:
    """What a kernel is compiled for. A block owns 64 * warpgroups rows: queries (fwd, dq) or keys
    (dkdv)."""

    # rows of the tiles that pass through the ring of stages: keys (fwd, dq) or queries (dkdv)
    step: int
    warpgroups: int  # consumers; each owns 64 rows
    stages: int  # of the ring
    blocks: int  # per multiprocessor
    # owned tiles in shared memory: with 2, the next tile's operands load while this tile's results
    # are stored
    own: int

    @property
    def rows(self) -> int:
        """Rows of the tile that a block owns."""
        return 64 * self.warpgroups


@dataclass(frozen=True)
class HopperPlan:
    """Tiles and the order in which blocks take them."""

    tiles: HopperTiles
    # heads whose tiles alternate (see find_tile); 0: as many as fit into half of the L2 cache
    planes: int


GPU = "NVIDIA H200"
TABLE: dict[tuple[str, int, bool], dict[int | None, HopperPlan]] = {
    ("fwd", 64, False): {
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=3, blocks=3, own=2), planes=1),
        None: HopperPlan(HopperTiles(step=128, warpgroups=3, stages=2, blocks=1, own=2), planes=0),
    },
    ("fwd", 64, True): {
        2048: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=3, blocks=3, own=2), planes=0),
        None: HopperPlan(HopperTiles(step=128, warpgroups=3, stages=2, blocks=1, own=1), planes=0),
    },
    ("fwd", 128, False): {
        256: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=2, blocks=1, own=2), planes=1),
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=2, blocks=2, own=1), planes=1),
        None: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=2, blocks=1, own=2), planes=1),
    },
    ("fwd", 128, True): {
        256: HopperPlan(HopperTiles(step=64, warpgroups=2, stages=4, blocks=1, own=2), planes=1),
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=2, blocks=2, own=1), planes=1),
        2048: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=2, blocks=1, own=2), planes=1),
        None: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=2, blocks=1, own=1), planes=0),
    },
    ("dq", 64, False): {
        256: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=3, blocks=1, own=2), planes=0),
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=1),
        2048: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=3, blocks=1, own=2), planes=0),
        None: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=1), planes=1),
    },
    ("dq", 64, True): {
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=1),
        2048: HopperPlan(HopperTiles(step=128, warpgroups=2, stages=3, blocks=1, own=2), planes=0),
        None: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=1),
    },
    ("dq", 128, False): {
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=2, blocks=2, own=1), planes=1),
        None: HopperPlan(HopperTiles(step=64, warpgroups=2, stages=4, blocks=1, own=1), planes=1),
    },
    ("dq", 128, True): {
        2048: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=2, blocks=2, own=1), planes=1),
        None: HopperPlan(HopperTiles(step=64, warpgroups=2, stages=4, blocks=1, own=1), planes=1),
    },
    ("dkdv", 64, False): {
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=1),
        2048: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=0),
        None: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=1), planes=0),
    },
    ("dkdv", 64, True): {
        512: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=1),
        None: HopperPlan(HopperTiles(step=64, warpgroups=1, stages=4, blocks=2, own=2), planes=0),
    },
    ("dkdv", 128, False): {
        256: HopperPlan(HopperTiles(step=64, warpgroups=2, stages=2, blocks=1, own=2), planes=0),
        512: HopperPlan(HopperTiles(step=32, warpgroups=1, stages=3, blocks=2, own=1), planes=1),
        None: HopperPlan(HopperTiles(step=64, warpgroups=2, stages=2, blocks=1, own=2), planes=0),
    },
    ("dkdv", 128, True): {
        512: HopperPlan(HopperTiles(step=32, warpgroups=1, stages=2, blocks=2, own=2), planes=1),
        None: HopperPlan(HopperTiles(step=64, warpgroups=2, stages=2, blocks=1, own=2), planes=0),
    },
}


# In batch-invariant mode the tiles have the same number of keys for all T, because it decides the
# bits: training, prefill and decoding (exact_decode_attention.py) add in the same order.
EXACT_STEP = {64: 64, 128: 128}  # by D


def exact_plan(D: int, T: int) -> HopperPlan:
    """Return the plan of the causal forward in batch-invariant mode, with tiles of EXACT_STEP[D]
    keys: the tuned one for T queries if its tiles have as many, else the nearest that has."""
    rows = TABLE["fwd", D, True].items()
    fitting = [(longest, plan) for longest, plan in rows if plan.tiles.step == EXACT_STEP[D]]
    for longest, plan in fitting:
        if longest is None or longest >= T:
            return plan
    return fitting[-1][1]
