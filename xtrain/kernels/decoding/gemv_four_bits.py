"""The products of gemv_tensor_cores.py for codes of four bits (four_bits.py).

A chunk is 128 columns and eight steps; 32 columns of a row are one word of each of four lanes. The
codes of a word become bf16, exactly, just before its two steps. The scale of a group of columns
cannot wait for the end of the row, as that of the row does: each chunk has separate sums, which are
multiplied by the scale (nf4: by two, after half of the chunk each) and added to those of the row.
A lane's sums belong to the two rows whose codes it loads, and the 16 bits of their groups are the
fifth word of each.
"""

import functools

from ..four_bits import int4_group_scale, make_unpack, nf4_group_scale
from ..primitives.codes import load_codes16
from ..primitives.ptx import device
from ..primitives.tensor_cores import mma_bf16, opaque
from ..runtime.compiler import cuda, float32, int32, int64, uint32, uint64


@functools.cache
def make_load_four(CHUNKS, M, U, TILE, chunk_of, exists):
    """Return load_w, as gemv_operands.make_operands does, for a block with one tile at a time.

    A chunk has half the bytes per product, so the arithmetic of addresses counts twice: it is in 32
    bits, up to the last step. M: 2 with SwiGLU, whose second rows are F further.
    """

    @device
    def load_w(words, weights, tile, step):
        # else the addresses of all tiles occupy registers all the time
        tid = opaque(cuda.threadIdx.x)
        warp, lane = tid >> 5, tid & 31
        F = uint32(weights.F)
        first = uint32(uint32(tile) * uint32(TILE) + uint32(lane >> 2))
        of_lane = 16 * (lane & 3)
        for u in range(U):
            c = uint32(chunk_of(step, u, warp))
            for m in range(M):
                for r in range(2):
                    if exists(step, u, warp):
                        o = uint32(first + uint32(8 * r))
                        o = uint32((o if o < F else uint32(F - uint32(1))) + uint32(m) * F)
                        # hidden: else the compiler computes it in 64 bits
                        chunk = opaque(int32(o * uint32(CHUNKS) + c))
                        load_codes16(words[u, m, r], weights.w, int64(chunk) * 64 + of_lane)
                        group = uint32(c * uint32(F * uint32(M)) + o)
                        words[u, m, r, 4] = uint32(weights.groups[uint64(group)])
                    else:
                        for j in range(5):
                            words[u, m, r, j] = uint32(0)
            # no instruction: the compiler keeps the loads in the order of their use, before the
            # products
            cuda.syncwarp()

    return load_w


@functools.cache
def make_multiply_four(M, U, NF4, GROUPS, load_groups, exists):
    """Return multiply and multiply_groups, as gemv_tensor_cores.make_multiply does."""
    unpack = make_unpack(NF4)
    SUMS = GROUPS * M
    GROUP_WORDS = 2 if NF4 else 4  # of a lane

    @device
    def operands(fa, words, u, m, q):
        """Set fa (2, 4) to the operands of two steps: word q of both rows."""
        pairs = cuda.local.array(4, uint32)
        for r in range(2):
            unpack(pairs, words[u, m, r, q], words[u, m, r, 4])
            for j in range(4):
                fa[j // 2, r + 2 * (j % 2)] = pairs[j]

    @device
    def add_scaled(s, chunk, words, u, m, q):
        """Add the sums of word q's group to s, and clear them."""
        for r in range(2):
            group = words[u, m, r, 4]
            scale = nf4_group_scale(group, q // GROUP_WORDS) if NF4 else int4_group_scale(group)
            for j in range(2 * r, 2 * r + 2):
                s[j] += chunk[j] * scale
                chunk[j] = float32(0.0)

    @device
    def multiply(s, words, fx, w):
        fa = cuda.local.array((2, 4), uint32)
        chunk = cuda.local.array(4, float32)
        for j in range(4):
            chunk[j] = float32(0.0)
        for u in range(U):
            for m in range(M):
                for q in range(4):
                    operands(fa, words, u, m, q)
                    for i in range(2):
                        mma_bf16(chunk, fa[i], fx[u, 2 * q + i])
                    if q % GROUP_WORDS == GROUP_WORDS - 1:
                        add_scaled(s[m], chunk, words, u, m, q)

    @device
    def multiply_groups(s, words, rows, step, w):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        fa = cuda.local.array((2, 4), uint32)
        fx = cuda.local.array((GROUPS, 2, 2), uint32)
        chunk = cuda.local.array((SUMS, 4), float32)
        for i in range(SUMS):
            for j in range(4):
                chunk[i, j] = float32(0.0)
        for u in range(U):
            if exists(step, u, warp):
                for q in range(4):
                    load_groups(fx, rows.x, warp, lane, step, u, 8 * q, rows.N)
                    for m in range(M):
                        operands(fa, words, u, m, q)
                        for i in range(2):
                            for group in range(GROUPS):
                                mma_bf16(chunk[group * M + m], fa[i], fx[group, i])
                        if q % GROUP_WORDS == GROUP_WORDS - 1:
                            for group in range(GROUPS):
                                i = group * M + m
                                add_scaled(s[i], chunk[i], words, u, m, q)

    return multiply, multiply_groups
