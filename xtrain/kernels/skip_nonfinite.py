"""Skip the steps with non-finite numbers, decided on the device without synchronizing.

    norms: (Q,)   losses: (R,)   factor: (1,)   consecutive: (1,)

    bad          a step in which a gradient norm or a loss is NaN or infinite
    factor       becomes NaN in a bad step: AdamW then leaves weights and moments unchanged
    consecutive  number of consecutive bad steps, 0 after a good one. When it reaches `limit` it
                 stays there, and every further step is skipped: the host reads these numbers later
                 and finds the weights of that step.

The losses are those of all ranks. The norm is that of the summed gradients, or there is one norm
per rank if gradients are not summed. So all ranks make the same decision.
"""

import math

import numpy as np

from ..device import Array
from .runtime.compiler import cuda, float32, int32
from .runtime.launch import check, check_array, launch, on_host

NAN = float32(math.nan)
INF = float32(math.inf)


# ----------------------------------------------------------------------------- reference
def skip_unless_finite_ref(factor_1, consecutive_1, norms_Q, losses_R, limit):
    """Update factor and consecutive in place."""
    stuck = consecutive_1[0] >= limit
    bad = not (np.isfinite(norms_Q).all() and np.isfinite(losses_R).all())
    if stuck or bad:
        factor_1[0] = np.nan
    if not stuck:
        consecutive_1[0] = consecutive_1[0] + 1 if bad else 0


# ----------------------------------------------------------------------------- kernel
@cuda.jit
def skip_kernel(factor_1, consecutive_1, norms_Q, losses_R, limit):
    """Grid 1, block 1: there are only a few numbers."""
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
    """Update factor (1,) float32 and consecutive (1,) int32 in place.

    norms: (Q,), losses: (R,), float32.
    limit: the number of consecutive bad steps, at least 1, after which every step is skipped.
    """
    check_array("skip_unless_finite", "factor", factor_1, (1,))
    check_array("skip_unless_finite", "consecutive", consecutive_1, (1,), ("int32",))
    check_array("skip_unless_finite", "norms", norms_Q, (None,))
    check_array("skip_unless_finite", "losses", losses_R, (None,))
    check(0 < limit < 2**31, f"skip_unless_finite: limit is {limit}, expected 1 to {2**31 - 1}")
    if on_host(factor_1, consecutive_1, norms_Q, losses_R):
        skip_unless_finite_ref(factor_1, consecutive_1, norms_Q, losses_R, limit)
        return
    launch(skip_kernel, 1, 1, factor_1, consecutive_1, norms_Q, losses_R, np.int32(limit))
