"""The load of experts: pairs of each expert, added over micro-batches, and a bias that levels it.

    add       load_e += counts_e
    move      b_e += rate sign(mean_e(load_e) - load_e)      (Wang et al. 2024)

counts: of ExpertOrder. load: (E,) int32. b: (E,) float32, the bias of routing.py; it is moved after
a step. The comparison is one of whole numbers, sum_e load_e against E load_e.
"""

import numpy as np

from ...device import Array
from ..primitives.ptx import kernel
from ..runtime.compiler import cuda, int64
from ..runtime.cost import declare_cost
from ..runtime.launch import check_array, launch, on_host, zeros

BLOCK = 256


# ----------------------------------------------------------------------------- reference
def move_bias_ref(bias_E, load_E, rate, factor_1=None):
    """Move the bias in place."""
    if factor_1 is not None and np.isnan(factor_1[0]):
        return
    load_E = load_E.astype(np.int64)
    bias_E += np.float32(rate) * np.sign(load_E.sum() - load_E.size * load_E).astype(np.float32)


# ----------------------------------------------------------------------------- kernels
@kernel(BLOCK)
def add_counts_kernel(load_E, counts_E):
    """Grid ceil(E / BLOCK), block BLOCK."""
    e = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    if e < load_E.size:
        load_E[e] += counts_E[e]


@kernel(BLOCK)
def move_bias_kernel(bias_E, load_E, rate, factor_1):
    """Grid ceil(E / BLOCK), block BLOCK. Every thread adds all loads: there are few."""
    e = cuda.blockIdx.x * BLOCK + cuda.threadIdx.x
    E = load_E.size
    if e >= E or factor_1[0] != factor_1[0]:  # NaN: the step is skipped
        return
    total = int64(0)
    for i in range(E):
        total += int64(load_E[i])
    difference = total - int64(E) * int64(load_E[e])
    if difference > 0:
        bias_E[e] += rate
    elif difference < 0:
        bias_E[e] -= rate


declare_cost(add_counts_kernel, in_place=("load_E",))
declare_cost(move_bias_kernel, in_place=("bias_E",))


# ----------------------------------------------------------------------------- launchers
def add_counts(load_E: Array, counts_E: Array) -> None:
    """Add counts (E,) to load (E,), both int32."""
    check_array("add_counts", "load", load_E, (None,), ("int32",))
    check_array("add_counts", "counts", counts_E, load_E.shape, ("int32",))
    if on_host(load_E, counts_E):
        load_E += counts_E
    else:
        launch(add_counts_kernel, -(-load_E.size // BLOCK), BLOCK, load_E, counts_E)


def move_bias(bias_E: Array, load_E: Array, rate: float, factor_1: Array | None = None) -> None:
    """Add rate to bias (E,) float32 where load (E,) int32 is below its mean; subtract it above.

    factor: (1,) float32; NaN: do nothing (skip_nonfinite.py). None: 1.
    """
    check_array("move_bias", "load", load_E, (None,), ("int32",))
    check_array("move_bias", "bias", bias_E, load_E.shape)
    if on_host(bias_E, load_E):
        move_bias_ref(bias_E, load_E, rate, factor_1)
    else:
        if factor_1 is None:
            factor_1 = zeros(bias_E, 1)
        grid = -(-load_E.size // BLOCK)
        launch(move_bias_kernel, grid, BLOCK, bias_E, load_E, np.float32(rate), factor_1)
