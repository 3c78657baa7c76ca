"""Device functions for kernels of your own: PTX instructions that Numba has no words for.

    from numba import cuda, float32
    from xtrain.kernels.primitives import load8, store8

    @cuda.jit
    def double_kernel(y, x):
        values = cuda.local.array(8, float32)
        i = 8 * cuda.grid(1)
        if i < x.size:
            load8(values, x, i)  # 16 bytes of bf16 in one access
            for j in range(8):
                values[j] *= float32(2.0)
            store8(y, i, values)

    16-byte accesses     load8, store8, load4, store4 (global), load8_shared ... (shared memory);
                         load1, store1; load_words8 ... keep bf16 packed; store16, load16_shared
    tensor cores         mma_bf16 (mma.sync), ldmatrix, ldmatrix_trans, transpose_pairs, pack_bf16
    asynchronous copies  cp_async16, cp_async4, cp_async_commit, cp_async_wait
    compute 9.0          TMA: tensor_maps, acquire_map, tma_load, tma_store; mbarrier_init,
                         mbarrier_wait; make_wgmma, make_descriptor; make_setmaxnreg, bar_sync
    cross-block merging  arrive_last, zero_counters; atomic_add_acq_rel, load_acquire
    warps and blocks     warp_sum, warp_max, block_sum, block_max
    dependent launches   wait_for_previous, let_next_start, prefetch
    your own             instruction: one PTX statement; intrinsic: generated code; device, kernel:
                         cuda.jit with inlining and launch bounds

They work in any kernel of numba-cuda or numba-cuda-mlir, launched by Numba, CuPy or xtrain, and in
the simulator (xtrain.simulator), which checks what a GPU does not: a copy that is read before it
has arrived, a bank conflict of ldmatrix, a descriptor that describes no tile. examples/primitives/
has a complete program for each kind.

bf16 arrays are passed as uint16: `x.view(numpy.uint16)`. A register array is a `cuda.local.array`
of constant size, or a row of one. Names in "quotes" in a docstring are sections of NVIDIA's PTX ISA
manual.

Needs NumPy, ml_dtypes, and one of the two compilers. On a GPU, tensor_maps and zero_counters also
need CuPy. The import loads none of the rest of xtrain: it takes less than a tenth of a second more
than `import numba.cuda`.

Stable: the names in __all__, their arguments and meaning; a change is announced in CHANGELOG.md one
release before. Not stable: `code` of intrinsic, which follows the compilers, and all names that are
not in __all__, such as the layouts of xtrain's own kernels in flat.py, rows.py, heads.py, tiles.py.
"""

from .hopper import (
    MAP_WORDS,
    PANEL,
    SHARED_ALIGNMENT,
    SM_90A,
    WARPGROUP,
    acquire_map,
    along_rows,
    bar_sync,
    down_rows,
    fence_proxy_async,
    load_floats,
    make_descriptor,
    make_hold,
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    shared_base,
    store_shared,
    tma_load,
    tma_load_row,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from .intrinsics import GLOBAL, LITERAL, SHARED, instruction, intrinsic
from .last_block import arrive_last, zero_counters
from .ptx import (
    atomic_add_acq_rel,
    atomic_add_release,
    device,
    kernel,
    let_next_start,
    load1,
    load4,
    load4_shared,
    load8,
    load8_shared,
    load_acquire,
    prefetch,
    prefetch_run,
    store1,
    store4,
    store4_shared,
    store8,
    store8_shared,
    wait_for_previous,
)
from .reduce import block_max, block_sum, warp_max, warp_sum
from .tensor_cores import (
    cp_async4,
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    exp2,
    fmax,
    high_bf16,
    ldmatrix,
    ldmatrix_trans,
    load2_shared,
    load16_shared,
    log2,
    low_bf16,
    mma_bf16,
    opaque,
    pack_bf16,
    store16,
    store16_shared,
    store_pair_shared,
    transpose_pairs,
    warp_id,
)
from .tma import mappable, tensor_maps
from .words import (
    load_words2,
    load_words4,
    load_words4_shared,
    load_words8,
    load_words8_shared,
    pack4,
    store_words4,
    store_words4_shared,
    store_words8,
    store_words8_shared,
    unpack4,
    unpack8,
)

__all__ = [
    "GLOBAL",
    "LITERAL",
    "MAP_WORDS",
    "PANEL",
    "SHARED",
    "SHARED_ALIGNMENT",
    "SM_90A",
    "WARPGROUP",
    "acquire_map",
    "along_rows",
    "arrive_last",
    "atomic_add_acq_rel",
    "atomic_add_release",
    "bar_sync",
    "block_max",
    "block_sum",
    "cp_async4",
    "cp_async16",
    "cp_async_commit",
    "cp_async_wait",
    "device",
    "down_rows",
    "exp2",
    "fence_proxy_async",
    "fmax",
    "high_bf16",
    "instruction",
    "intrinsic",
    "kernel",
    "ldmatrix",
    "ldmatrix_trans",
    "let_next_start",
    "load1",
    "load2_shared",
    "load4",
    "load4_shared",
    "load8",
    "load8_shared",
    "load16_shared",
    "load_acquire",
    "load_floats",
    "load_words2",
    "load_words4",
    "load_words4_shared",
    "load_words8",
    "load_words8_shared",
    "log2",
    "low_bf16",
    "make_descriptor",
    "make_hold",
    "make_setmaxnreg",
    "make_wgmma",
    "make_wgmma_wait",
    "mappable",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_init",
    "mbarrier_init_fence",
    "mbarrier_wait",
    "mma_bf16",
    "opaque",
    "pack4",
    "pack_bf16",
    "prefetch",
    "prefetch_run",
    "shared_base",
    "store1",
    "store4",
    "store4_shared",
    "store8",
    "store8_shared",
    "store16",
    "store16_shared",
    "store_pair_shared",
    "store_shared",
    "store_words4",
    "store_words4_shared",
    "store_words8",
    "store_words8_shared",
    "tensor_maps",
    "tma_load",
    "tma_load_row",
    "tma_store",
    "tma_store_commit",
    "tma_store_wait",
    "transpose_pairs",
    "unpack4",
    "unpack8",
    "wait_for_previous",
    "warp_id",
    "warp_max",
    "warp_sum",
    "zero_counters",
]
