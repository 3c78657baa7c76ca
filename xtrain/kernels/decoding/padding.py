"""Packed prompts: prompts of unequal lengths without padding, their tokens one after another.

    lengths (A,)           tokens of each sequence;  N = their sum
    edges (E,), E = A + 1  0, l0, l0 + l1, ..., N: sequence a owns the packed rows edges[a] ..
    edges[a + 1] - 1

    padded, T = 4      a0 a1 a2 .  b0 .  .  .  c0 c1 .  .        lengths 3 1 2
    packed             a0 a1 a2 b0 c0 c1                         edges 0 3 4 6

Matrix products see N rows instead of A T, which for unequal prompts is often half. A token's
position begins at the history h_a of its sequence, and the sequence's block table (kv_cache.py)
says where in the cache that is:
    position p = h_a + n - edges[a],  block = tables[a, p // S],  offset = p % S
The sequence of a token is found by a binary search in `edges`: log2 A steps, no table of N entries.
"""

import numpy as np

from ...device import Array
from ..primitives.ptx import device, kernel
from ..runtime.compiler import cuda, int32, int64
from ..runtime.launch import check, empty, launch, on_host
from .kv_cache import check_block_tables, check_int32

BLOCK = 256  # threads


# ----------------------------------------------------------------------------- references
def sequence_of_ref(edges_E, N):
    """sequence_of for n = 0 .. N - 1 -> (N,)"""
    return np.searchsorted(edges_E, np.arange(N), side="right") - 1


def token_positions_ref(edges_E, N, history_A, tables_AM, S):
    """token_positions in NumPy -> blocks (N,), offsets (N,), positions (N,) int32"""
    a_N = sequence_of_ref(edges_E, N)
    positions_N = np.arange(N) - edges_E[a_N] + history_A[a_N]
    live_N = history_A[a_N] >= 0
    positions_N = np.where(live_N, positions_N, 0)
    known_N = live_N & (positions_N >= 0) & (positions_N < tables_AM.shape[1] * S)
    blocks_N = np.full(N, -1)
    blocks_N[known_N] = tables_AM[a_N[known_N], positions_N[known_N] // S]
    return tuple(x.astype(np.int32) for x in (blocks_N, positions_N % S, positions_N))


# ----------------------------------------------------------------------------- kernels
@device
def sequence_of(n, edges_E):
    """Return the a with edges[a] <= n < edges[a + 1]. Empty sequences own no rows."""
    # edges[low] <= n < edges[high]
    low = int64(0)
    high = int64(edges_E.size - 1)
    while high - low > 1:
        middle = (low + high) >> 1
        if edges_E[middle] <= n:
            low = middle
        else:
            high = middle
    return low


@kernel(BLOCK)
def token_positions_kernel(blocks_N, offsets_N, positions_N, edges_E, history_A, tables_AM, N, S):
    """Grid ceil(N / BLOCK), block BLOCK. One thread per token."""
    n = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    if n < N:
        a = sequence_of(n, edges_E)
        past = int64(history_A[a])
        p = past + n - edges_E[a] if past >= 0 else int64(0)
        inside = past >= 0 and p >= 0 and p < tables_AM.shape[1] * S
        blocks_N[n] = tables_AM[a, p // S] if inside else int32(-1)
        offsets_N[n] = int32(p % S)
        positions_N[n] = int32(p)


# ----------------------------------------------------------------------------- launchers
def token_positions(
    edges_E: Array, N: int, history_A: Array, tables_AM: Array, S: int
) -> tuple[Array, Array, Array]:
    """Return blocks (N,), offsets (N,), positions (N,) int32: where each of the N = edges[-1]
    packed tokens belongs.

    Token n has position positions[n] in its sequence, and its key belongs at offset offsets[n] of
    block blocks[n] of the cache. edges (A + 1,) int32. history (A,) int32: tokens of each sequence
    that are already in the cache. tables (A, M) int32: the blocks of each sequence, S tokens each.
    The block is -1, which kv_cache.append_kv skips, if the position is not in 0 .. M S - 1, and if
    the history is negative: the sequence is idle, and its tokens have position 0. Raises ValueError
    or TypeError if shapes or dtypes do not match.
    """
    op = "token_positions"
    A = check_edges(op, edges_E, N)
    check_int32(op, "history", history_A, A)
    check_block_tables(op, tables_AM, A, S)
    if on_host(edges_E, history_A, tables_AM):
        check_lengths(op, edges_E, N)
        return token_positions_ref(edges_E, N, history_A, tables_AM, S)
    places = tuple(empty(edges_E, N) for _ in range(3))
    arrays = (*places, edges_E, history_A, tables_AM)
    launch(token_positions_kernel, -(-N // BLOCK), BLOCK, *arrays, N, S)
    return places


def check_edges(op: str, edges_E: Array, N: int, T: int = 0) -> int:
    """Raise ValueError or TypeError if edges cannot belong to N packed tokens -> A, the number of
    sequences.

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
