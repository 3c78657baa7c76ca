"""A checksum of memory that must not change between two uses.   words: (n,) int32   sum: (1,) int64

    sum = sum_i (word_i mod 2^32) ((2 i + 1) mod 2^16)   mod 2^32

Every factor is odd, so a change of one word, in one bit or in several, always changes the sum;
other changes escape with a probability of about 2^-32. The numbers are integers, so the order of
the additions does not matter: every warp writes the sum of its words, and one more warp adds these.
Everything stays on the device, so a captured step can check its memory. Bytes moved: read the words
once.
"""

import numpy as np

from ..device import Array
from .primitives.reduce import warp_sum
from .runtime.compiler import cuda, int64
from .runtime.launch import check_array, empty, launch, on_host

WARP = 32
PARTIALS = 32 * 132  # 32 one-warp blocks on each of an H200's multiprocessors
MASK = int64(0xFFFFFFFF)
FACTORS = int64(0xFFFF)
BLOCK_REF = 1 << 20  # words that the reference widens to int64 at once


# ----------------------------------------------------------------------------- reference
def checksum_ref(words_n):
    """Return the checksum, (1,) int64."""
    total = 0
    for first in range(0, words_n.size, BLOCK_REF):
        words = words_n[first : first + BLOCK_REF].astype(np.int64) & 0xFFFFFFFF
        factors = 2 * np.arange(first, first + words.size) + 1 & 0xFFFF
        total += int((words * factors & 0xFFFFFFFF).sum())
    return np.array([total & 0xFFFFFFFF], np.int64)


# ----------------------------------------------------------------------------- kernels
@cuda.jit
def checksum_kernel(partial_P, words_n):
    """Grid P, block WARP. Warp p sums words 32 p + lane, 32 (p + P) + lane, ..."""
    total = int64(0)
    first = int64(cuda.blockIdx.x) * WARP + cuda.threadIdx.x
    for i in range(first, words_n.size, int64(cuda.gridDim.x) * WARP):
        word = int64(words_n[i]) & MASK
        total = (total + word * ((2 * i + 1) & FACTORS)) & MASK
    total = warp_sum(total)
    if cuda.threadIdx.x == 0:
        partial_P[cuda.blockIdx.x] = total


@cuda.jit
def total_kernel(sum_1, partial_P):
    """Grid 1, block WARP. sum_1[0] = the sum of partial_P."""
    total = int64(0)
    for p in range(cuda.threadIdx.x, partial_P.size, WARP):
        total += partial_P[p]
    total = warp_sum(total)
    if cuda.threadIdx.x == 0:
        sum_1[0] = total & MASK


@cuda.jit
def compare_kernel(changed_1, sums_K, expected_K):
    """Grid 1, block 1. changed_1[0] = 1 if a sum is not the expected one; it stays 1."""
    for k in range(sums_K.size):
        if sums_K[k] != expected_K[k]:
            changed_1[0] = 1


# ----------------------------------------------------------------------------- launchers
def checksum(words_n: Array, sum_1: Array) -> None:
    """Set sum (1,) int64 to the checksum of words (n,) int32, on the device of words.

    Raises ValueError or TypeError otherwise.
    """
    check_array("checksum", "words", words_n, (None,), ("int32",))
    check_array("checksum", "sum", sum_1, (1,), ("int64",))
    if on_host(words_n, sum_1):
        sum_1[...] = checksum_ref(words_n)
        return
    P = max(1, min(PARTIALS, -(-words_n.size // WARP)))
    partial_P = empty(words_n, P, np.int64)
    launch(checksum_kernel, P, WARP, partial_P, words_n)
    launch(total_kernel, 1, WARP, sum_1, partial_P)


def compare(sums_K: Array, expected_K: Array, changed_1: Array) -> None:
    """Set changed (1,) int32 to 1 if sums (K,) int64 are not the expected ones.

    Else it keeps its value.
    """
    check_array("compare", "sums", sums_K, (None,), ("int64",))
    check_array("compare", "expected", expected_K, tuple(sums_K.shape), ("int64",))
    check_array("compare", "changed", changed_1, (1,), ("int32",))
    if on_host(sums_K, expected_K, changed_1):
        changed_1[0] |= not np.array_equal(sums_K, expected_K)
        return
    launch(compare_kernel, 1, 1, changed_1, sums_K, expected_K)
