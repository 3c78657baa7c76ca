"""Find the sequences of the forward kernel for compute capability 9.0: in a batch or a paged
cache."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..primitives.ptx import device
from ..primitives.reduce import FULL
from ..runtime.compiler import cuda, int32, int64, uint32

# states of a sequence: its rows of o are computed, zeros, NaN
VALID = int32(0)
IDLE = int32(1)
INVALID = int32(2)


@dataclass(frozen=True)
class Sequences:
    """Device functions that find sequence b, its queries and its keys. make_sequences has the two
    kinds of `where`.

    size(where, b) -> (T, S, row, batch, state)
        its queries, its keys; its first query is row `row` of batch `batch` of Q
    look_up(entries, where, b, n0, S, state)
        entries[i] = the block of the i-th box of the tile of keys n0, for `place`
    place(entries, i, where, b, g, n0) -> (row, head, batch)
        where the i-th box of the tile begins in the maps of K and V
    check(where, b, end, state) -> state
        INVALID if one of the blocks of keys 0 .. end - 1 does not exist
    BOX: keys of a box; a tile of keys is BN // BOX boxes.
    """

    BOX: int
    size: Callable
    look_up: Callable
    place: Callable
    check: Callable


@functools.cache
def make_sequences(BN: int, PAGE: int) -> Sequences:
    """PAGE = 0: Q (B, T, H, D), K and V (B, S, G, D) hold them; where = T, S.

    PAGE > 0: queries are packed, keys are in blocks of PAGE tokens of a cache, seen as (R, G PAGE,
    1, D). where = edges, history, tables, N, R, M: see context_attention.py. A block that does not
    exist is read as R: the copy engine fills the box with zeros. A box never crosses from one block
    into the next.
    """
    return _make_paged(BN, PAGE) if PAGE else _make_batched(BN)


def _make_batched(BN):
    @device
    def size(where, b):
        return where[0], where[1], int32(0), b, VALID

    @device
    def look_up(entries, where, b, n0, S, state):
        entries[0] = uint32(0)

    @device
    def place(entries, i, where, b, g, n0):
        return n0, g, b

    @device
    def check(where, b, end, state):
        return state

    return Sequences(BN, size, look_up, place, check)


def _make_paged(BN, PAGE):
    BOX = math.gcd(BN, PAGE)
    BOXES = BN // BOX

    @device
    def size(where, b):
        edges, history, _, N, _, M = where
        begin = int64(edges[b])
        past = int64(history[b])
        T = int64(edges[b + 1]) - begin
        state = VALID
        if begin < 0 or N - begin < T:
            T = int64(0)  # rows that no array has
        if past < 0:
            state = IDLE
        elif past > int64(M) * PAGE - T:
            state = INVALID
        if state != VALID:
            past = int64(0)
        return int32(T), int32(T + past), int32(begin), int32(0), state

    @device
    def look_up(entries, where, b, n0, S, state):
        _, _, tables, _, R, M = where
        for i in range(BOXES):
            p = int32(n0 + i * BOX)
            entries[i] = uint32(R)
            if p >= 0 and p < S and state == VALID:
                entries[i] = uint32(tables[uint32(b * M) + uint32(p) // uint32(PAGE)])

    @device
    def place(entries, i, where, b, g, n0):
        R = where[4]
        offset = uint32(n0 + i * BOX) % uint32(PAGE)
        block = int32(min(entries[i], uint32(R)))
        return int32(g * PAGE + int32(offset)), int32(0), block

    @device
    def check(where, b, end, state):
        _, _, tables, _, R, M = where
        worst = uint32(0)
        if state == VALID:
            blocks = int32((end + PAGE - 1) // PAGE)
            for i in range(int32(cuda.threadIdx.x & 31), blocks, 32):
                entry = uint32(tables[uint32(b * M) + uint32(i)])
                worst = max(entry, worst)
        return INVALID if cuda.any_sync(FULL, worst >= uint32(R)) else state

    return Sequences(BOX, size, look_up, place, check)
