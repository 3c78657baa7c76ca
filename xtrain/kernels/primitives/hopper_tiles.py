"""Common parts of kernels for compute capability 9.0: the order of tiles, registers of a thread,
barriers, and results that leave through shared memory by TMA.
"""

import functools

from ..runtime.compiler import cuda, float32, int32, uint32
from .hopper import (
    PANEL_ROW,
    fence_proxy_async,
    mbarrier_init,
    mbarrier_init_fence,
    store_floats,
    store_shared,
    tma_add,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from .ptx import device
from .tensor_cores import opaque, pack_bf16


def registers(warpgroups: int, per_sm: int, producer: int = 0) -> tuple[int, int]:
    """Return registers of a producer's and of a consumer's thread; in total no more than the launch
    gives the block.

    A setmaxnreg that requests more never returns. A launch gives every thread the same number, a
    multiple of 8.
    """
    producer = producer or (32 if warpgroups == 3 else 40)
    alike = 65536 // (128 * (warpgroups + 1) * per_sm) // 8 * 8
    consumer = (alike * (warpgroups + 1) - producer) // warpgroups // 8 * 8
    return producer, min(consumer, 240)


@device
def split(i, n):
    """Return i // n, i % n for i >= 0, n > 0: an unsigned division of 32 bits is enough."""
    quotient = int32(uint32(i) // uint32(n))
    return quotient, int32(i - quotient * n)


@device
def find_tile(tile, blocks, planes, together):
    """Number of a tile -> (block of rows, plane). A plane is one head of one sequence.

    Order: block 0 of `together` planes, then block 1 of the same planes, ..., then the next planes.
    So what all running blocks read at one time fits into the L2 cache.
    """
    turn, rest = split(tile, together * blocks)
    width = planes - turn * together
    if width > together:
        width = together
    block, plane = split(rest, width)
    return block, turn * together + plane


@functools.cache
def make_set_up(ARRIVALS, FULLS, FREES):
    """Return set_up(base): one thread initializes the block's barriers.

    FULLS, FREES: byte offsets of pairs of barriers; ARRIVALS: of a phase of those in FREES.
    """
    N = len(FULLS)

    @device
    def set_up(base):
        if cuda.threadIdx.x == 0:
            for i in range(N):
                mbarrier_init(base + FULLS[i], 1)
                mbarrier_init(base + FREES[i], ARRIVALS)
            mbarrier_init_fence()
        cuda.syncthreads()

    return set_up


@functools.cache
def make_store(D, FIRST=0, FLOATS=False, ADD=False):
    """Return store_rows, stores_done: write results through shared memory by TMA, a warp's 16 rows
    at a time.

    D: columns to store. FIRST: the first of them in the accumulator.
    FLOATS: the results are float32, else bf16. ADD: to a float32 tensor.

    store_rows(acc, factor, at, panel, maps, i, column, row, h, b)
        writes acc * factor[half of the rows] to shared memory from `at` on, panels `panel` bytes
        apart, and starts the copy to rows `row`, row + 1, ... and columns `column`, column + 1, ...
        of map i
    stores_done()
        waits until the shared memory may be written again
    """
    WIDTH = PANEL_ROW // (4 if FLOATS else 2)  # columns of a panel
    PANELS = D // WIDTH
    GROUPS = WIDTH // 8
    START = FIRST // 2
    send = tma_add if ADD else tma_store

    @device
    def store_rows(acc, factor, at, panel, maps, i, column, row, h, b):
        pair = cuda.local.array(2, float32)
        lane = int32(cuda.threadIdx.x & 31)
        g = lane >> 2
        # opaque: otherwise its addresses are computed, and spilled, before the loop
        at = uint32(opaque(int32(at)))
        for p in range(PANELS):
            for n in range(GROUPS):
                for r in range(2):
                    j = START + GROUPS * 4 * p + 4 * n + 2 * r
                    to = at + p * panel + PANEL_ROW * (g + 8 * r)
                    if FLOATS:
                        chunk = (2 * n + ((lane >> 1) & 1)) ^ g
                        pair[0] = acc[j] * factor[r]
                        pair[1] = acc[j + 1] * factor[r]
                        store_floats(to + (chunk << 4) + 8 * (lane & 1), pair)
                    else:
                        packed = pack_bf16(acc[j] * factor[r], acc[j + 1] * factor[r])
                        store_shared(to + ((n ^ g) << 4) + 4 * (lane & 3), packed)
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            for p in range(PANELS):
                send(maps, i, at + p * panel, column + WIDTH * p, row, h, b)
            tma_store_commit()

    @device
    def stores_done():
        if cuda.threadIdx.x & 31 == 0:
            tma_store_wait()
        cuda.syncwarp()

    return store_rows, stores_done
