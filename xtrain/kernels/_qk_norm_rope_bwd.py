"""The backward kernels of qk_norm_rope.py, which has the maths.

A thread owns its part of one head of q or k, of every so many tokens, and adds up dw in registers. What it needs of its next
tokens is on its way, in registers (qk_norm_rope_bwd_kernel) or, more of it, in shared memory (_rings.py).
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from ._heads import head_plan, make_head_ops
from ._ptx import device, kernel, let_next_start
from ._rings import (
    start_copy4,
    start_copy4_once,
    start_copy8,
    start_copy8_once,
    take4,
    take8,
)
from ._tensor_cores import commit_copies, wait_copies
from .rope import position_of

BWD_THREADS = 192  # of a block, about
RESIDENT = {4: 24, 8: 20}  # warps on a multiprocessor, for chunks of 4 and 8
SPARE = 16384  # bytes of a multiprocessor's shared memory for other things than rings


class Ring(NamedTuple):
    """See tune_rows.py in bench/."""

    stages: int = 3  # tokens of a thread, one of which it deals with
    threads: int = 192  # of a block, about
    warps: int = 24  # on a multiprocessor
    once: bool = False  # inputs leave the second-level cache first


def make_parts(H, D, each, plan, ops):
    """-> device functions: load_angles, backward_of_norm, add_heads"""
    HEADS, S, TOKENS, THREADS = plan.heads, plan.S, plan.tokens, plan.THREADS
    load, total, R, INVERSE = ops.load, ops.total, D // 2, 1 / D

    @device
    def load_angles(cos, sin, cos_PR, sin_PR, positions_N, n, T, r):
        p = position_of(n, positions_N, T)
        load(cos, cos_PR, p * R + r)
        load(sin, sin_PR, p * R + r)

    @device
    def backward_of_norm(d_2E, x_2E, dw_2E, w_D, rstd, r):
        """d_2E, the gradient of u, becomes that of x. Adds to dw_2E."""
        w, acc = cuda.local.array(each, float32), float32(0.0)
        for i in range(2):
            load(w, w_D, r + i * R)
            for j in range(each):
                x_2E[i, j] *= rstd  # xhat
                dw_2E[i, j] += d_2E[i, j] * x_2E[i, j]
                d_2E[i, j] *= w[j]  # g
                acc += d_2E[i, j] * x_2E[i, j]
        mean = total(acc) * float32(INVERSE)
        for i in range(2):
            for j in range(each):
                d_2E[i, j] = rstd * (d_2E[i, j] - x_2E[i, j] * mean)

    @device
    def add_heads(partial, at, dw_2E, tile):
        """partial[at : at + 2D] = the block's sums of dw, of its query heads and of its key heads"""
        tid, low = cuda.threadIdx.x, cuda.blockIdx.y * HEADS
        for i in range(2):
            for j in range(each):
                tile[(i * each + j) * THREADS + tid] = dw_2E[i, j]
        cuda.syncthreads()  # every thread's sums are there
        for d in range(tid, D, THREADS):
            first = (d // R * each + d % each) * THREADS + d % R // each
            total_q, total_k = float32(0.0), float32(0.0)
            for k in range(TOKENS * HEADS):  # in this order: same bits every run
                if low + k % HEADS < H:
                    total_q += tile[first + k * S]
                else:  # threads without a head have added nothing
                    total_k += tile[first + k * S]
            partial[at + d] = total_q
            partial[at + D + d] = total_k

    return SimpleNamespace(
        load_angles=load_angles, backward_of_norm=backward_of_norm, add_heads=add_heads
    )


@functools.cache
def make_bwd_kernel(H, G, D, each, normalise, overlap):
    """As soon as a thread has unpacked a head it asks for that of its next token."""
    A, X = H + G, H + 2 * G
    plan = head_plan(A, D, each, BWD_THREADS)
    if plan is None:
        return None, None
    ops, TOKENS, THREADS = make_head_ops(A, D, each, plan), plan.tokens, plan.THREADS
    place, fetch, put = ops.place, ops.fetch, ops.put
    unpack, pack, turn_back = ops.unpack, ops.pack, ops.turn_back
    parts, TILE = make_parts(H, D, each, plan, ops), 2 * each * THREADS
    load_angles, backward_of_norm = parts.load_angles, parts.backward_of_norm
    add_heads = parts.add_heads
    plan.blocks = max(RESIDENT[each] * 32 // THREADS, 1)  # on a multiprocessor
    plan.bytes = 0

    @kernel(THREADS, plan.blocks)
    def qk_norm_rope_bwd_kernel(
        dqkv, partial, dq, dk, qkv, q_w_D, k_w_D, rstd, cos_PR, sin_PR, positions_N, N, T
    ):
        """Grid (B, parts), block THREADS. Block b owns tokens b TOKENS, ..., then those B TOKENS further. Arrays flat.

        partial: (parts B, 2D), a block's sums for q_w, then for k_w.
        """
        cos, sin = cuda.local.array(each, float32), cuda.local.array(each, float32)
        d_2E, x_2E = cuda.local.array((2, each), float32), cuda.local.array((2, each), float32)
        dw_2E = cuda.local.array((2, each), float32)
        d_2W, x_2W = cuda.local.array((2, 4), uint32), cuda.local.array((2, 4), uint32)
        new_2W = cuda.local.array((2, 4), uint32)
        for i in range(2):
            for j in range(each):
                dw_2E[i, j] = float32(0.0)
        token, slot, r = place()
        a = int32(
            slot if slot < A else A - 1
        )  # a thread without a head repeats one, and stores nothing
        dy, w_D, heads, h = (dq, q_w_D, H, a) if a < H else (dk, k_w_D, G, a - H)
        start, step = int32(cuda.blockIdx.x * TOKENS), int32(cuda.gridDim.x * TOKENS)
        end, scale = int32(N), float32(0.0)
        n = int32(start + token if start + token < end else end - 1)
        fetch(d_2W, dy, (int64(n) * heads + h) * D + r)
        if normalise:
            fetch(x_2W, qkv, (int64(n) * X + a) * D + r)
            scale = rstd[int64(n) * A + a]
        load_angles(cos, sin, cos_PR, sin_PR, positions_N, n, T, r)
        while start < end:
            live, row = start + token < end and slot < A, int64(n) * (X * D)
            rstd_now = scale if live else float32(0.0)  # 0 adds nothing to dw
            n = int32(n + step if n + step < end else end - 1)
            unpack(d_2E, d_2W, dy)
            fetch(d_2W, dy, (int64(n) * heads + h) * D + r)
            if normalise:
                unpack(x_2E, x_2W, qkv)
                fetch(x_2W, qkv, (int64(n) * X + a) * D + r)
                scale = rstd[int64(n) * A + a]
            turn_back(d_2E, cos, sin)
            if normalise:
                backward_of_norm(d_2E, x_2E, dw_2E, w_D, rstd_now, r)
            load_angles(cos, sin, cos_PR, sin_PR, positions_N, n, T, r)
            pack(new_2W, d_2E, dqkv)
            if live:
                put(dqkv, row + a * D + r, new_2W)
            start = int32(start + step)
        if normalise:
            if overlap:
                let_next_start()  # add_column_sums
            block = int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
            add_heads(partial, block * (2 * D), dw_2E, cuda.shared.array(TILE, float32))

    return qk_norm_rope_bwd_kernel, plan


@functools.cache
def make_ring_kernel(H, G, D, each, normalise, overlap, ring, shared):
    """`stages` - 1 tokens are under way. shared: bytes that a multiprocessor has. -> kernel and plan; None twice: this shape does not fit."""
    A, X = H + G, H + 2 * G
    plan = head_plan(A, D, each, ring.threads)
    if plan is None:
        return None, None
    ops, TOKENS, THREADS = make_head_ops(A, D, each, plan), plan.tokens, plan.THREADS
    place, put, unpack, pack = ops.place, ops.put, ops.unpack, ops.pack
    turn_back, parts = ops.turn_back, make_parts(H, D, each, plan, ops)
    load_angles, backward_of_norm = parts.load_angles, parts.backward_of_norm
    add_heads = parts.add_heads
    plan.blocks = max(ring.warps * 32 // THREADS, 1)  # on a multiprocessor
    CHUNK, STAGE = 4 * THREADS, 16 * THREADS  # words: two chunks of d, two of x
    STAGES = max(min(ring.stages, (shared - SPARE) // plan.blocks // (4 * STAGE)), 2)
    plan.bytes = max(STAGES * STAGE, 2 * each * THREADS) * 4
    R, AHEAD, WAIT = D // 2, STAGES - 1, STAGES - 2
    copies = (start_copy8_once, start_copy4_once) if ring.once else (start_copy8, start_copy4)
    copy, take = (copies[0], take8) if each == 8 else (copies[1], take4)

    @device
    def begin(smem, stage, dy, qkv, i, j):
        """The chunks at dy[i] and qkv[j] are on their way to `stage`."""
        at = stage * STAGE + cuda.threadIdx.x * 4
        copy(smem, at, dy, i)
        copy(smem, at + CHUNK, dy, i + R)
        if normalise:
            copy(smem, at + 2 * CHUNK, qkv, j)
            copy(smem, at + 3 * CHUNK, qkv, j + R)

    @device
    def come(x_2E, x_2W, smem, at, x):
        take(x_2W[0], smem, at, x)
        take(x_2W[1], smem, at + CHUNK, x)
        unpack(x_2E, x_2W, x)

    @kernel(THREADS, plan.blocks)
    def qk_norm_rope_bwd_ring_kernel(
        dqkv, partial, dq, dk, qkv, q_w_D, k_w_D, rstd, cos_PR, sin_PR, positions_N, N, T
    ):
        """Grid (B, parts), block THREADS, as the kernel above."""
        smem = cuda.shared.array(0, float32)
        cos, sin = cuda.local.array(each, float32), cuda.local.array(each, float32)
        d_2E, x_2E = cuda.local.array((2, each), float32), cuda.local.array((2, each), float32)
        dw_2E, new_2W = cuda.local.array((2, each), float32), cuda.local.array((2, 4), uint32)
        for i in range(2):
            for j in range(each):
                dw_2E[i, j] = float32(0.0)
        token, slot, r = place()
        a = int32(
            slot if slot < A else A - 1
        )  # a thread without a head repeats one, and stores nothing
        dy, w_D, heads, h = (dq, q_w_D, H, a) if a < H else (dk, k_w_D, G, a - H)
        start, step = int32(cuda.blockIdx.x * TOKENS), int32(cuda.gridDim.x * TOKENS)
        end, scale, stage, free = int32(N), float32(0.0), int32(0), int32(AHEAD)
        for k in range(AHEAD):
            later = int32(start + k * step)
            if later < end:
                n = int32(later + token if later + token < end else end - 1)
                i, j = (int64(n) * heads + h) * D + r, (int64(n) * X + a) * D + r
                begin(smem, k, dy, qkv, i, j)
            commit_copies()
        n = int32(start + token if start + token < end else end - 1)
        if normalise:
            scale = rstd[int64(n) * A + a]
        load_angles(cos, sin, cos_PR, sin_PR, positions_N, n, T, r)
        while start < end:
            live, row = start + token < end and slot < A, int64(n) * (X * D)
            rstd_now = scale if live else float32(0.0)  # 0 adds nothing to dw
            later = int32(start + AHEAD * step)
            wait_copies(WAIT)
            if later < end:
                n = int32(later + token if later + token < end else end - 1)
                i, j = (int64(n) * heads + h) * D + r, (int64(n) * X + a) * D + r
                begin(smem, free, dy, qkv, i, j)
            commit_copies()
            at = stage * STAGE + cuda.threadIdx.x * 4
            come(d_2E, new_2W, smem, at, dy)
            n = int32(start + step + token if start + step + token < end else end - 1)
            turn_back(d_2E, cos, sin)
            if normalise:
                come(x_2E, new_2W, smem, at + 2 * CHUNK, qkv)
                scale = rstd[int64(n) * A + a]
                backward_of_norm(d_2E, x_2E, dw_2E, w_D, rstd_now, r)
            load_angles(cos, sin, cos_PR, sin_PR, positions_N, n, T, r)
            pack(new_2W, d_2E, dqkv)
            if live:
                put(dqkv, row + a * D + r, new_2W)
            free, stage = stage, int32(stage + 1 if stage < AHEAD else 0)
            start = int32(start + step)
        wait_copies(0)
        if normalise:
            if overlap:
                let_next_start()  # add_column_sums
            cuda.syncthreads()  # all rings are at rest: their memory takes the sums
            block = int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
            add_heads(partial, block * (2 * D), dw_2E, smem)

    return qk_norm_rope_bwd_ring_kernel, plan
