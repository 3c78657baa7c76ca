"""The sums of the embedding's backward (embedding.py), organised by runs of the plan.

A thread owns one or two quads of columns (4 neighbouring columns, `gap` apart) of all pieces that begin at `positions`
neighbouring positions of the plan, and goes through their rows in one run, whatever token they belong to:

    plan      token   2 2 | 7 7 7 7 7 7 7 7 | 9 | 11 | 12 12 | 13        positions = 4
    threads of          0                     2 .    .     3 .            (7's piece began with the first: 1 has nothing)

So a thread always has `ahead` rows under way, whether tokens occur once or a thousand times; and where few pieces begin, few
threads are started for nothing. Rows wait as words (_words.py): a branch may ask for one without waiting for it.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from ._flat import BLOCK, EACH, QUAD, load, make_place, position, row_gap, store
from ._ptx import device, kernel, let_next_start, load1, store1, store4, wait_for_previous
from ._reduce import FULL
from ._words import load_words4, pack4, unpack4

PIECE = 32  # rows that one thread adds up at most
SLICES = 8  # of the pieces, when they are joined
JOIN_LOOK = 8  # positions that a block looks at there
AHEAD, MIN_BLOCKS = 4, 4  # of the kernels with a position per thread, see embedding.py
JOIN_GAP = 32 * QUAD
NOWHERE = 0x7FFFFFFF  # a sum that goes on with the next row


class Config(NamedTuple):
    """See tune_rows.py in bench/."""

    positions: int = 8  # of the plan whose pieces a thread adds up
    ahead: int = 4  # rows that it asks for at once
    quads: int = 1  # of a thread
    threads: int = 192  # of a block
    blocks: int = 4  # that fit a multiprocessor, at least
    join_ahead: int = 16  # pieces that a thread of the join asks for at once


# ----------------------------------------------------------------------------- what both kernels share
@device
def slot(first, piece):
    """The row of `partial` for a piece of the token that begins at `first`.

    Two tokens may share PIECE neighbouring positions: one ends there, another begins. So first pieces have rows of
    their own, the even ones.
    """
    return 2 * (first // PIECE + piece) + (1 if piece > 0 else 0)


def make_quad_ops(C, quads, gap, whole):
    """-> fetch(words_QW, x, i, c), put(x, i, c, values_QE): columns c.. and c + gap.. of the row that begins at x[i].

    whole: every quad lies before the end of the row, and on 16 bytes (bf16: 8).
    """

    @device
    def fetch(words_QW, x, i, c):
        for k in range(quads):
            if whole:
                load_words4(words_QW[k], x, i + (c + k * gap))
            else:
                values = cuda.local.array(QUAD, float32)
                for j in range(QUAD):
                    column = c + k * gap + j
                    values[j] = load1(x, i + column) if column < C else float32(0.0)
                pack4(words_QW[k], values, x)

    @device
    def put(x, i, c, values_QE):
        for k in range(quads):
            if whole:
                store4(x, i + (c + k * gap), values_QE[k])
            else:
                for j in range(QUAD):
                    column = c + k * gap + j
                    if column < C:
                        store1(x, i + column, values_QE[k, j])

    return SimpleNamespace(fetch=fetch, put=put)


def chunks_of_row(C: int, quads: int) -> int:
    return row_gap(C) // QUAD if quads == 2 else -(-C // QUAD)


# ----------------------------------------------------------------------------- sum
@functools.cache
def make_sum_kernel(C, whole, overlap, config):
    QUADS, AHEAD, POSITIONS, THREADS = config.quads, config.ahead, config.positions, config.threads
    CHUNKS, ops = chunks_of_row(C, QUADS), make_quad_ops(C, QUADS, row_gap(C), whole)
    fetch, put = ops.fetch, ops.put

    @device
    def entry(plan, p):
        """-> n, token, first, last"""
        words = cuda.local.array(4, uint32)
        load_words4(words, plan, int64(p) * 4)
        return int32(words[0]), int32(words[1]), int32(words[2]), int32(words[3])

    @device
    def run_of(plan, p, N):
        """-> begin and end of the pieces that begin at positions p .. p + POSITIONS - 1; all they hold is whole pieces"""
        q = int32(p + POSITIONS - 1 if p + POSITIONS < N else N - 1)
        _, _, first, last = entry(plan, p)
        _, _, first_q, last_q = entry(plan, q)
        before = int32(uint32(p - first) % uint32(PIECE))  # rows of the first position's piece
        begin = p if before == 0 else min(int32(p - before + PIECE), last)
        after = int32(uint32(q - first_q) % uint32(PIECE))
        end = min(int32(q - after + PIECE), last_q) if first_q >= 0 else int32(q + 1)
        return begin, end if first >= 0 else begin

    @device
    def goal(q, token, first, last):
        """Where the sum goes after position q: a row of dw, a row s of partial as -1 - s, or NOWHERE."""
        end = q + 1 == last or uint32(q + 1 - first) % uint32(PIECE) == 0
        if not end or first < 0:
            return int32(NOWHERE)
        if last - first <= PIECE:
            return token
        return int32(-1 - slot(first, (q - first) // PIECE))

    @kernel(THREADS, config.blocks)
    def embedding_sum_kernel(dw, partial, dx, plan):
        """Grid ceil(ceil(N / POSITIONS) CHUNKS / THREADS), block THREADS. All arrays flat; plan: its words, as float32."""
        if overlap:
            let_next_start()  # the join
        k = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        tile = k // uint32(CHUNKS)
        c, p = int64(k - tile * uint32(CHUNKS)) * QUAD, int32(tile * uint32(POSITIONS))
        N = int32(plan.size >> 2)
        if p >= N:
            return
        rows_AQW = cuda.local.array((AHEAD, QUADS, QUAD), uint32)
        old_AQW = cuda.local.array((AHEAD, QUADS, QUAD), uint32)
        row_QE, acc_QE = (
            cuda.local.array((QUADS, QUAD), float32),
            cuda.local.array((QUADS, QUAD), float32),
        )
        n, to = cuda.local.array(AHEAD, int32), cuda.local.array(AHEAD, int32)
        for i in range(QUADS):
            for j in range(QUAD):
                acc_QE[i, j] = float32(0.0)
        p, end = run_of(plan, p, N)
        while p < end:
            for a in range(AHEAD):
                q = int32(p + a if p + a < end else end - 1)
                n[a], token, first, last = entry(plan, q)
                to[a] = goal(q, token, first, last)
                n[a] = n[a] if p + a < end and first >= 0 else -1
            for a in range(AHEAD):
                if n[a] >= 0:
                    fetch(rows_AQW[a], dx, int64(n[a]) * C, c)
                    if to[a] >= 0 and to[a] != NOWHERE:
                        fetch(old_AQW[a], dw, int64(to[a]) * C, c)
            for a in range(AHEAD):
                if n[a] >= 0:
                    for i in range(QUADS):
                        unpack4(row_QE[i], rows_AQW[a, i], dx)
                        for j in range(QUAD):
                            acc_QE[i, j] += row_QE[i, j]
                    if to[a] != NOWHERE:
                        if to[a] >= 0:
                            for i in range(QUADS):
                                unpack4(row_QE[i], old_AQW[a, i], dw)
                                for j in range(QUAD):
                                    acc_QE[i, j] += row_QE[i, j]
                            put(dw, int64(to[a]) * C, c, acc_QE)
                        else:
                            put(partial, int64(-1 - to[a]) * C, c, acc_QE)
                        for i in range(QUADS):
                            for j in range(QUAD):
                                acc_QE[i, j] = float32(0.0)
            p = int32(p + AHEAD)

    return embedding_sum_kernel


# ----------------------------------------------------------------------------- join
@functools.cache
def make_join_kernel(C, whole, overlap, config):
    AHEAD, fetch = config.join_ahead, make_quad_ops(C, 1, 0, whole).fetch

    @kernel(32 * SLICES)
    def embedding_join_kernel(dw, partial, plan_N4):
        """Grid (ceil(N / (JOIN_LOOK PIECE)), ceil(C / 128)), block (32, SLICES). dw += the pieces of tokens with several.

        Such a token covers a position that is a multiple of PIECE; whoever looks at the first of these joins it. A block
        looks at JOIN_LOOK, and owns 128 columns. Slice y adds pieces y, y + SLICES, ...; then the slices are added.
        """
        tile = cuda.shared.array((SLICES, QUAD, 32), float32)
        parts_A1W = cuda.local.array((AHEAD, 1, QUAD), uint32)
        acc, part = cuda.local.array(QUAD, float32), cuda.local.array(QUAD, float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        c = cuda.blockIdx.y * (32 * QUAD) + x * QUAD
        p0 = int64(cuda.blockIdx.x) * (JOIN_LOOK * PIECE)
        p = p0 + x * PIECE
        joins = False
        if x < JOIN_LOOK and p < plan_N4.shape[0]:  # the plan was there before the sums began
            first, last = plan_N4[p, 2], plan_N4[p, 3]
            joins = first >= 0 and last - first > PIECE and p - first < PIECE
        found = cuda.ballot_sync(FULL, joins)  # the same in all warps
        if overlap:
            wait_for_previous()
        for k in range(JOIN_LOOK):
            if found & (1 << k):
                p = p0 + k * PIECE
                token, first, last = int64(plan_N4[p, 1]), int64(plan_N4[p, 2]), plan_N4[p, 3]
                pieces = (last - first + PIECE - 1) // PIECE
                for j in range(QUAD):
                    acc[j] = float32(0.0)
                for q in range(y, pieces, AHEAD * SLICES):
                    for a in range(AHEAD):
                        piece = q + a * SLICES
                        if piece < pieces and c < C:
                            fetch(parts_A1W[a], partial, slot(first, piece) * C, c)
                    for a in range(AHEAD):
                        if q + a * SLICES < pieces and c < C:
                            unpack4(part, parts_A1W[a, 0], partial)
                            for j in range(QUAD):
                                acc[j] += part[j]
                for j in range(QUAD):
                    tile[y, j, x] = acc[j]
                cuda.syncthreads()  # the sums of all slices are there
                if y < QUAD and c + y < C:
                    total = float32(0.0)
                    for s in range(SLICES):
                        total += tile[s, y, x]
                    dw[token * C + c + y] += total
                cuda.syncthreads()  # the tile is free for the next token

    return embedding_join_kernel


# ----------------------------------------------------------------------------- a position per thread
@functools.cache
def make_position_kernel(C, whole):
    place, gap = make_place(C)

    @kernel(BLOCK, MIN_BLOCKS)
    def embedding_bwd_kernel(dw, partial, dx, plan_N4):
        """Grid blocks_for_rows(N, C), block BLOCK. Position p of the plan, if a piece begins there; 8 columns.

        dw: flat (V C), dx: flat (N C), partial: flat (slots, C). A thread waits for memory, so it asks early: for all
        of the plan, then for its first row and dw, then for AHEAD rows at once. Numbers are short to save registers.
        """
        acc = cuda.local.array(EACH, float32)
        old = cuda.local.array(EACH, float32)
        rows = cuda.local.array((AHEAD, EACH), float32)
        p, c = place()
        if p >= plan_N4.shape[0]:
            return
        p = uint32(p)
        n, token, first, last = plan_N4[p, 0], plan_N4[p, 1], plan_N4[p, 2], plan_N4[p, 3]
        if (n | token | first | last) < 0:  # first is; a sum of all keeps the loads together
            return
        if uint32(p - uint32(first)) % uint32(PIECE) != 0:
            return
        alone = last - first <= PIECE
        if alone:
            i = int64(token) * C
            load(old, dw, i + c, gap, i + C, whole)
        i = int64(n) * C
        load(acc, dx, i + c, gap, i + C, whole)
        count = int32(PIECE if p + PIECE < last else last - p)
        for q in range(int32(1), count, int32(AHEAD)):  # most tokens occur once: no loop
            for a in range(AHEAD):  # without a condition, so that all are under way at once
                step = q + a if q + a < count else count - 1
                i = int64(plan_N4[uint32(p + step), 0]) * C
                load(rows[a], dx, i + c, gap, i + C, whole)
            for a in range(AHEAD):
                for j in range(EACH):
                    acc[j] += rows[a, j] if q + a < count else float32(0.0)
        if alone:
            i = int64(token) * C
            for j in range(EACH):
                acc[j] += old[j]
            store(dw, i + c, gap, i + C, acc, whole)
        else:
            i = slot(int64(first), (int64(p) - first) // PIECE) * C
            store(partial, i + c, gap, i + C, acc, whole)

    return embedding_bwd_kernel


@functools.cache
def make_position_join_kernel(C, whole, overlap):
    @kernel(32 * SLICES)
    def embedding_join_kernel(dw, partial, plan_N4):
        """Grid (ceil(N / (JOIN_LOOK PIECE)), ceil(C / 256)), block (32, SLICES). dw += the pieces of tokens with several.

        Such a token covers a position that is a multiple of PIECE; whoever looks at the first of these joins it. A block
        looks at JOIN_LOOK, and owns 256 columns. Slice y adds pieces y, y + SLICES, ...; then the slices are added.
        """
        tile = cuda.shared.array((SLICES, EACH, 32), float32)
        acc = cuda.local.array(EACH, float32)
        parts = cuda.local.array((AHEAD, EACH), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        c = cuda.blockIdx.y * (2 * JOIN_GAP) + x * QUAD
        inside = whole and c + JOIN_GAP + QUAD <= C
        if overlap:
            wait_for_previous()
        p0 = int64(cuda.blockIdx.x) * (JOIN_LOOK * PIECE)
        p = p0 + x * PIECE
        joins = False
        if x < JOIN_LOOK and p < plan_N4.shape[0]:
            first, last = plan_N4[p, 2], plan_N4[p, 3]
            joins = first >= 0 and last - first > PIECE and p - first < PIECE
        found = cuda.ballot_sync(FULL, joins)  # the same in all warps
        for k in range(JOIN_LOOK):
            if found & (1 << k):
                p = p0 + k * PIECE
                token, first, last = int64(plan_N4[p, 1]), int64(plan_N4[p, 2]), plan_N4[p, 3]
                pieces = (last - first + PIECE - 1) // PIECE
                for j in range(EACH):
                    acc[j] = float32(0.0)
                for q in range(y, pieces, AHEAD * SLICES):
                    for a in range(AHEAD):
                        piece = q + a * SLICES
                        i = slot(first, piece if piece < pieces else q) * C
                        load(parts[a], partial, i + c, JOIN_GAP, i + C, inside)
                    for a in range(AHEAD):
                        for j in range(EACH):
                            acc[j] += parts[a, j] if q + a * SLICES < pieces else float32(0.0)
                for j in range(EACH):
                    tile[y, j, x] = acc[j]
                cuda.syncthreads()  # the sums of all slices are there
                column = position(c, JOIN_GAP, y)  # SLICES = EACH: a warp per register
                if column < C:
                    total = float32(0.0)
                    for s in range(SLICES):
                        total += tile[s, y, x]
                    dw[token * C + column] += total
                cuda.syncthreads()  # the tile is free for the next token

    return embedding_join_kernel
