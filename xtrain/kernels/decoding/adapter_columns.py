"""Several LoRA adapters in one product: what remains of x a^T for each row.

    u: (N, A), changed in place      adapters_N: of each row, -1: none      owners_A: of each column

    u_na = 0   unless owners_a = adapters_n

The matrices a of all adapters lie one below the other, so u = x a^T is one product. After this, so is
u b^T, which adds to a row what its own adapter says: zeros add nothing. That is more work than each
row's own product, by the number of adapters, but little next to x w^T: a rank is about 16.
Bytes moved: at most N A elements to write.
"""

import functools

import numpy as np

from ...device import Array
from ..primitives.ptx import kernel, let_next_start, store1, wait_for_previous
from ..runtime.compiler import cuda, float32, int64
from ..runtime.launch import FLOATS, can_overlap, check_array, launch, on_host

THREADS = 128  # few columns: ranks add up to tens or hundreds


# ----------------------------------------------------------------------------- reference
def keep_own_columns_ref(u_NA, adapters_N, owners_A):
    """u, with 0 in the columns of other adapters than the row's"""
    own_NA = adapters_N[:, None] == owners_A[None, :]
    return np.where(own_NA, u_NA, u_NA.dtype.type(0))


# ----------------------------------------------------------------------------- kernel
@functools.cache
def make_keep_kernel(overlap: bool):
    """overlap: the kernel may start before the previous one has ended."""

    @kernel(THREADS)
    def keep_own_columns_kernel(u, adapters_N, owners_A):
        """Grid N, block THREADS. u: flat (N A). Block n owns row n; neighbouring threads write
        neighbouring columns."""
        n = int64(cuda.blockIdx.x)
        A = owners_A.shape[0]
        if overlap:
            wait_for_previous()
            let_next_start()
        adapter = adapters_N[n]
        for a in range(cuda.threadIdx.x, A, THREADS):
            if owners_A[a] != adapter:
                store1(u, n * A + a, float32(0.0))

    return keep_own_columns_kernel


# ----------------------------------------------------------------------------- launcher
def keep_own_columns(u_NA: Array, adapters_N: Array, owners_A: Array) -> None:
    """Set u to 0, in place, in the columns of other adapters than the row's own.

    u (N, A): float32 or bf16. adapters (N,), owners (A,): int32. Raises ValueError or TypeError if
    shapes or dtypes do not match.
    """
    check_array("keep_own_columns", "u", u_NA, (None, None), FLOATS)
    check_array("keep_own_columns", "adapters", adapters_N, u_NA.shape[:1], ("int32",))
    check_array("keep_own_columns", "owners", owners_A, u_NA.shape[1:], ("int32",))
    if on_host(u_NA, adapters_N, owners_A):
        u_NA[...] = keep_own_columns_ref(u_NA, adapters_N, owners_A)
        return
    overlap = can_overlap(u_NA)
    arguments = (u_NA.reshape(-1), adapters_N, owners_A)
    launch(make_keep_kernel(overlap), len(u_NA), THREADS, *arguments, overlap=overlap)
