"""mbarriers: one warp writes numbers to shared memory, another reads them; 2 slots, no syncthreads.

Compute capability 9.0.
"""

import numpy as np
from numba import cuda, float32, uint32

from xtrain.kernels.primitives import (
    load_floats,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    shared_base,
    store_shared,
)

SLOTS = 2
FULL = 0  # byte of the first slot's barrier: the slot has been written
FREE = 64  # the same: the slot has been read
DATA = 128
SLOT_BYTES = 32 * 8  # two numbers per lane
SHARED = DATA + SLOTS * SLOT_BYTES


@cuda.jit
def hand_over_kernel(y, x, items):
    """Grid 1, block 64. Warp 0 hands x (items, 32, 2), the bits of float32 as uint32, to warp 1,
    which writes the sum of each pair to y (items, 32) float32."""
    pair = cuda.local.array(2, float32)
    base = shared_base()
    lane = uint32(cuda.threadIdx.x % 32)
    if cuda.threadIdx.x == 0:
        for slot in range(SLOTS):
            mbarrier_init(base + FULL + 8 * slot, 1)  # one arrival a phase: that of a warp
            mbarrier_init(base + FREE + 8 * slot, 1)
    cuda.syncthreads()
    for item in range(items):
        slot = item % SLOTS
        parity = item // SLOTS % 2
        data = base + DATA + SLOT_BYTES * slot + 8 * lane
        if cuda.threadIdx.x < 32:
            mbarrier_wait(base + FREE + 8 * slot, parity ^ 1)  # does not wait on a new barrier
            for j in range(2):
                store_shared(data + 4 * j, x[item, lane, j])
            cuda.syncwarp()  # all lanes have written before lane 0 arrives
            mbarrier_arrive(base + FULL + 8 * slot)
        else:
            mbarrier_wait(base + FULL + 8 * slot, parity)
            load_floats(pair, data)
            cuda.syncwarp()
            mbarrier_arrive(base + FREE + 8 * slot)
            y[item, lane] = pair[0] + pair[1]


def main():
    x = np.random.default_rng(0).standard_normal((5, 32, 2)).astype(np.float32)
    y = np.zeros((5, 32), np.float32)
    hand_over_kernel[1, 64, 0, SHARED](y, x.view(np.uint32), np.int32(len(x)))
    assert (y == x[..., 0] + x[..., 1]).all()
    print(len(x), "items through", SLOTS, "slots")


if __name__ == "__main__":
    main()
