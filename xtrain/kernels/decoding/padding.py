"""Packed prompts: prompts of unequal lengths without padding, their tokens one after another.

    lengths (A,)           tokens of each sequence;  N = their sum
    edges (E,), E = A + 1  0, l0, l0 + l1, ..., N: sequence a owns the packed rows edges[a] .. edges[a + 1] - 1

    padded, T = 4      a0 a1 a2 .  b0 .  .  .  c0 c1 .  .        lengths 3 1 2
    packed             a0 a1 a2 b0 c0 c1                         edges 0 3 4 6

Matrix products see N rows instead of A T, which for unequal prompts is often half. In the cache a token needs the row of its
sequence, and its position, which begins at the history h_a of the sequence:
    row = rows[a],  position = h_a + n - edges[a]
The sequence of a token is found by a binary search in `edges`: log2 A steps, no table of N entries.
"""

import numpy as np
from numba import cuda, int32, int64

from ...device import Array
from ..primitives.ptx import device, kernel
from ..runtime.launch import check, empty, launch, on_host
from .kv_cache import check_int32

BLOCK = 256  # threads


# ----------------------------------------------------------------------------- references
def sequence_of_ref(edges_E, N):
    """sequence_of for n = 0 .. N - 1 -> (N,)"""
    return np.searchsorted(edges_E, np.arange(N), side="right") - 1


def token_positions_ref(edges_E, N, history_A=None, rows_A=None):
    """token_positions in NumPy -> rows (N,), positions (N,) int32"""
    a_N = sequence_of_ref(edges_E, N)
    positions_N = np.arange(N) - edges_E[a_N]
    if history_A is not None:
        positions_N += history_A[a_N]
    rows_N = a_N if rows_A is None else rows_A[a_N]
    return rows_N.astype(np.int32), positions_N.astype(np.int32)


# ----------------------------------------------------------------------------- kernels
@device
def sequence_of(n, edges_E):
    """-> the a with edges[a] <= n < edges[a + 1]. Empty sequences own no rows."""
    low, high = int64(0), int64(edges_E.size - 1)  # edges[low] <= n < edges[high]
    while high - low > 1:
        middle = (low + high) >> 1
        if edges_E[middle] <= n:
            low = middle
        else:
            high = middle
    return low


@kernel(BLOCK)
def token_positions_kernel(
    rows_N, positions_N, edges_E, history_A, rows_A, N, has_history, has_rows
):
    """Grid ceil(N / BLOCK), block BLOCK. One thread per token."""
    n = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if n < N:
        a = sequence_of(n, edges_E)
        past = int64(history_A[a]) if has_history else int64(0)
        positions_N[n] = int32(past + n - edges_E[a])
        rows_N[n] = rows_A[a] if has_rows else int32(a)


# ----------------------------------------------------------------------------- launchers
def token_positions(
    edges_E: Array, N: int, history_A: Array | None = None, rows_A: Array | None = None
) -> tuple[Array, Array]:
    """-> rows (N,), positions (N,) int32: where each of the N = edges[-1] packed tokens belongs in the cache.

    edges (A + 1,) int32. history (A,) int32: tokens of each sequence that are already in the cache, by default 0. rows (A,)
    int32: the cache row of each sequence, by default a. Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    A = check_edges("token_positions", edges_E, N)
    given = [x for x in (history_A, rows_A) if x is not None]
    for name, x in (("history", history_A), ("rows", rows_A)):
        if x is not None:
            check_int32("token_positions", name, x, A)
    if on_host(edges_E, *given):
        check_lengths("token_positions", edges_E, N)
        return token_positions_ref(edges_E, N, history_A, rows_A)
    rows_N, positions_N = empty(edges_E, N), empty(edges_E, N)
    history, rows = (edges_E if x is None else x for x in (history_A, rows_A))  # must not be None
    has = history_A is not None, rows_A is not None
    arrays = (rows_N, positions_N, edges_E, history, rows)
    launch(token_positions_kernel, -(-N // BLOCK), BLOCK, *arrays, N, *has)
    return rows_N, positions_N


def check_edges(op: str, edges_E: Array, N: int, T: int = 0) -> int:
    """Raise ValueError or TypeError if edges cannot belong to N packed tokens -> A, the number of sequences.

    Checks only what the host knows. T: tokens of a padded sequence.
    """
    check(edges_E.ndim == 1 and edges_E.size > 0, f"{op}: edges has shape {tuple(edges_E.shape)}")
    check_int32(op, "edges", edges_E, edges_E.size)
    A = edges_E.size - 1
    check(A > 0 or N == 0, f"{op}: {N} packed tokens of no sequence")
    fits = 0 <= N < 2**31 and T >= 0 and A * T < 2**31
    check(fits, f"{op}: {N} packed tokens, {A} sequences of {T}: expected 0 to {2**31 - 1} tokens")
    return A


def check_lengths(op: str, edges_E: np.ndarray, N: int, T: int | None = None) -> None:
    """Raise ValueError if edges do not divide N packed tokens into sequences, of at most T tokens.

    Only for arrays on the host: reading the values from a GPU would wait for it.
    """
    lengths_A = np.diff(edges_E)
    check(
        bool(edges_E[0] == 0 and (lengths_A >= 0).all()),
        f"{op}: edges must begin at 0 and not decrease",
    )
    check(edges_E[-1] == N, f"{op}: {N} packed tokens, the edges end at {edges_E[-1]}")
    longest = lengths_A.max(initial=0)
    fits = T is None or longest <= T
    check(fits, f"{op}: a sequence of {longest} tokens, expected at most {T}")
