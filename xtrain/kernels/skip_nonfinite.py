"""Should this step be skipped? Decided on the device, so that nobody has to wait.   norms: (Q,)  losses: (R,)  row: (1,)

    bad     a gradient norm or a loss is NaN or infinite
    factor  becomes NaN when the step is bad: AdamW then leaves weights and moments as they are
    row     number of bad steps in a row, and 0 after a good one. Once it has reached `limit` it stays there, and every
            step is skipped: the host, which reads these numbers later, finds the weights as they were at that step.

The losses are those of all ranks and the norm is that of the summed gradients (or there is one of each rank, where gradients
are not summed), so all ranks decide alike.
"""

import math

import numpy as np
from numba import cuda, float32, int32

from ..device import Array
from .runtime.launch import check, check_array, launch, on_host

NAN, INF = float32(math.nan), float32(math.inf)


# ----------------------------------------------------------------------------- reference
def skip_unless_finite_ref(factor_1, consecutive_1, norms_Q, losses_R, limit):
    stuck = consecutive_1[0] >= limit
    bad = not (np.isfinite(norms_Q).all() and np.isfinite(losses_R).all())
    if stuck or bad:
        factor_1[0] = np.nan
    if not stuck:
        consecutive_1[0] = consecutive_1[0] + 1 if bad else 0


# ----------------------------------------------------------------------------- kernel
@cuda.jit
def skip_kernel(factor_1, consecutive_1, norms_Q, losses_R, limit):
    """Grid 1, block 1: a handful of numbers."""
    bad = False
    for q in range(norms_Q.size):
        bad = bad or not (abs(norms_Q[q]) < INF)  # < is false for NaN
    for r in range(losses_R.size):
        bad = bad or not (abs(losses_R[r]) < INF)
    consecutive = consecutive_1[0]
    if consecutive >= limit:
        factor_1[0] = NAN
    elif bad:
        factor_1[0] = NAN
        consecutive_1[0] = consecutive + int32(1)
    else:
        consecutive_1[0] = int32(0)


# ----------------------------------------------------------------------------- launcher
def skip_unless_finite(
    factor_1: Array, consecutive_1: Array, norms_Q: Array, losses_R: Array, limit: int
) -> None:
    """factor (1,), norms (Q,), losses (R,) float32, row (1,) int32; changes factor and row in place.

    limit >= 1: bad steps in a row after which all are skipped.
    """
    check_array("skip_unless_finite", "factor", factor_1, (1,))
    check_array("skip_unless_finite", "row", consecutive_1, (1,), ("int32",))
    check_array("skip_unless_finite", "norms", norms_Q, (None,))
    check_array("skip_unless_finite", "losses", losses_R, (None,))
    check(0 < limit < 2**31, f"skip_unless_finite: limit is {limit}, expected 1 to {2**31 - 1}")
    if on_host(factor_1, consecutive_1, norms_Q, losses_R):
        skip_unless_finite_ref(factor_1, consecutive_1, norms_Q, losses_R, limit)
        return
    launch(skip_kernel, 1, 1, factor_1, consecutive_1, norms_Q, losses_R, np.int32(limit))
