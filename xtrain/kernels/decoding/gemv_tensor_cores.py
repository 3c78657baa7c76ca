"""gemv.py on tensor cores: weights in bf16, up to 8 rows of x, or of one byte, up to 32 rows.

One mma multiplies 16 rows of w with 8 rows of x, so one kernel serves all N, and a row's result
does not depend on the others. Lane 4 g + t reads 16 contiguous bytes of rows g and g + 8 of w
directly into the operand of mma_bf16, and the same columns of row g of x: the inner index of a
product may have any order if both operands have the same one.

    chunk    32 columns of a tile, 16 rows: lanes t = 0..3 read columns 0..7, 8..15, 16..23, 24..31
             step 0 multiplies the first 4 of each lane, step 1 its last 4

Quantized weights (quantize.py) are the same with twice as many columns: the 16 bytes of a lane are
16 of them, a chunk is 64 columns and four steps. Just before a step its codes become bf16, exactly
(primitives/codes.py), and the scale of a row of w multiplies its sum at the end; it is loaded with
the first weights, because a load at the end would only be waited for. A GEMM would need a
dequantized copy, so more than 8 rows of x are multiplied here too, in up to four groups of 8 rows,
by the same order of additions, and a lane reads its columns of x where it needs them. Every block
then reads all of x, so it may multiply several tiles of w by what it has read (Variant.tiles).
gemv_four_bits.py multiplies by codes of four bits.

The warps of a block share the columns of a tile of 16 rows; their sums are added in the order of
the warps. The weights of the next chunks, or of the next tile, are loaded while the current ones
are multiplied, into the other one of two sets of registers, which change their roles with every
step. The first weights are loaded before the kernel waits for its input (wait_for_previous in
primitives/ptx.py) if they are known to be ready. A block that has one tile of at most 2048 columns
loads all of it at once. Any other block first copies x, times the norm weight, to shared memory, if
it
fits: loaded chunk by chunk, x would cost an access to the L2 cache per chunk.
x is rounded to bf16 after the norm weight, before r; sums, r and everything after are float32.
"""

import functools

from ..four_bits import FOUR_BITS
from ..primitives.codes import BF16_UNIT, codes_to_bf16
from ..primitives.ptx import (
    device,
    kernel,
    let_next_start,
    prefetch_run,
    store1,
    wait_for_previous,
)
from ..primitives.reduce import FULL
from ..primitives.tensor_cores import mma_bf16
from ..runtime.compiler import cuda, float32, int64, rsqrtf, uint16, uint32, uint64
from ..swiglu import sigmoid
from .gemv_four_bits import make_multiply_four
from .gemv_operands import (
    MAX_ROWS,
    TILE,
    Config,
    Rows,
    Share,
    Shared,
    Variant,
    Weights,
    chunk_columns,
    make_operands,
    make_row_of_w,
    make_stage,
    staged,
)

AT_ONCE = 8  # chunks of w that a warp loads at once if they are all it needs
MOST_OF_16 = 11  # the same with 16 warps and x in shared memory: their registers hold no more
MULTIPROCESSORS = 132  # of an H200; on other GPUs this number affects only the speed
PREFETCH = 1024  # elements of one prefetch instruction


@functools.cache
def make_reduce(M, WARPS, GROUPS):
    """Return store_sums and total.

    store_sums(s (GROUPS M, 4), sums, tid)    write a warp's tiles to shared memory
    total(sums, m, row, n)                    add the warps' sums in order
    """
    COLUMNS = GROUPS * MAX_ROWS
    SIZE = M * TILE * COLUMNS

    @device
    def store_sums(s, sums, tid):
        warp, lane = tid >> 5, tid & 31
        # unsigned: no test for a negative index
        # 64 bits: the other indices are constants away from it
        first = uint64(warp * SIZE + (lane >> 2) * COLUMNS + 2 * (lane & 3))
        for group in range(GROUPS):
            for m in range(M):
                for i in range(4):
                    at = (m * TILE + 8 * (i >> 1)) * COLUMNS + 8 * group + (i & 1)
                    sums[first + uint64(at)] = s[group * M + m, i]

    @device
    def total(sums, m, row, n):
        acc = float32(0.0)
        first = uint64(row * COLUMNS + n)
        for warp in range(WARPS):
            acc += sums[first + uint64(warp * SIZE + m * TILE * COLUMNS)]
        return acc

    return store_sums, total


@functools.cache
def make_multiply(M, U, QUANTIZED, GROUPS, load_groups, exists):
    """Return multiply and multiply_groups.

    multiply(s (M, 4), words, fx, w)                        s += U chunks of w times x
    multiply_groups(s (GROUPS M, 4), words, rows, step, w)  the same for all rows of x, which it
    reads w gives the dtype of the codes.
    """
    STEPS = 4 if QUANTIZED else 2  # of a chunk

    @device
    def operand(fa, words, u, m, i, w):
        if QUANTIZED:
            pairs = cuda.local.array(2, uint32)
            for r in range(2):
                codes_to_bf16(pairs, words[u, m, r, i], w)
                for j in range(2):
                    fa[r + 2 * j] = pairs[j]
        else:
            for j in range(4):
                fa[j] = words[u, m, j % 2, 2 * i + j // 2]

    @device
    def multiply(s, words, fx, w):
        fa = cuda.local.array(4, uint32)
        for u in range(U):
            for m in range(M):
                for i in range(STEPS):
                    operand(fa, words, u, m, i, w)
                    mma_bf16(s[m], fa, fx[u, i])

    @device
    def multiply_groups(s, words, rows, step, w):
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        fa = cuda.local.array(4, uint32)
        fx = cuda.local.array((GROUPS, 2, 2), uint32)
        for u in range(U):
            if exists(step, u, warp):
                for first in range(0, STEPS, 2):
                    load_groups(fx, rows.x, warp, lane, step, u, 4 * first, rows.N)
                    for m in range(M):
                        for i in range(2):
                            operand(fa, words, u, m, first + i, w)
                            for group in range(GROUPS):
                                mma_bf16(s[group * M + m], fa, fx[group, i])

    return multiply, multiply_groups


@functools.cache
def make_copies(M, U, WORDS, STEPS):
    """Return copy_words(words, next_words) and copy_fx(fx, next_fx)."""

    @device
    def copy_words(words, next_words):
        for u in range(U):
            for m in range(M):
                for r in range(2):
                    for i in range(WORDS):
                        words[u, m, r, i] = next_words[u, m, r, i]

    @device
    def copy_fx(fx, next_fx):
        for u in range(U):
            for i in range(2 * STEPS):
                fx[u, i // 2, i % 2] = next_fx[u, i // 2, i % 2]

    return copy_words, copy_fx


@functools.cache
def make_finish(K, variant, config):
    """Return load_scales and finish.

    load_scales(scales (M,), weights, tile)
        the scales of the rows of w that this thread finishes; nothing if w is not quantized
    finish(y, shared, weights, scales, tile, N, eps, tid)
        apply scale, r, b and SwiGLU to a tile of 16 TILES x 8 GROUPS elements, and write y
    """
    NORM = variant.norm
    SWIGLU = variant.swiglu
    BIAS = variant.bias
    QUANTIZED = variant.quantized != ""
    UNIT = 1.0 if variant.four_bits else BF16_UNIT
    TILES = variant.tiles
    GROUPS = variant.groups
    M = variant.parts
    WARPS = config.warps
    THREADS = 32 * WARPS
    total = make_reduce(M, WARPS, GROUPS)[1]
    row_of_w = make_row_of_w(SWIGLU)
    EACH = -(-TILE * MAX_ROWS * GROUPS // THREADS)

    @device
    def load_scales(scales, weights, tile):
        if QUANTIZED:
            o = tile * TILES * TILE + (cuda.threadIdx.x & TILE - 1)
            for m in range(M):
                scales[m] = weights.scale[row_of_w(o, m, weights.F)] * float32(UNIT)

    @device
    def finish(y, shared, weights, scales, tile, N, eps, tid):
        F = weights.F
        row = tid & TILE - 1
        for j in range(EACH):
            n = (tid >> 4) + j * (THREADS // TILE)  # tid // TILE, for any sign
            r = float32(1.0)
            if NORM and n < N:
                acc = float32(0.0)
                for warp in range(WARPS):
                    acc += shared.squares[uint64(n) + uint64(warp * MAX_ROWS)]
                r = rsqrtf(acc * float32(1 / K) + eps)
            for m in range(TILES):
                o = (tile * TILES + m) * TILE + row
                if n < N and o < F:
                    value = total(shared.sums, m, row, n) * r
                    if QUANTIZED:
                        value *= scales[m]
                    if BIAS:
                        value += weights.b[o]
                    if SWIGLU:
                        up = total(shared.sums, 1, row, n) * r
                        if QUANTIZED:
                            up *= scales[1]
                        if BIAS:
                            up += weights.b[F + o]
                        value *= sigmoid(value) * up
                    store1(y, n * F + o, value)

    return load_scales, finish


@device
def prefetch_start(w):
    """Prefetch this block's part of the first elements of w into the L2 cache."""
    i = int64(cuda.blockIdx.x) * PREFETCH
    if i < w.size and cuda.threadIdx.x == 0:
        prefetch_run(w, i, min(w.size - i, int64(PREFETCH)))


def make_product(K: int, variant: Variant, config: Config):
    """Return load_first and product: what a block does before and after it waits for its input.

    load_first(words (U, M, 2, variant.words), scales (M,), weights, tile)
        the first weights of a tile, and the scales of its rows; U = config.chunks
    product(y, rows, weights, shared, words, scales, share, eps)
        the tiles of `share`; the block also writes this share of h
    """
    NORM = variant.norm
    once = variant.once
    STAGED = variant.staged
    GROUPS = variant.groups
    M = variant.parts
    WARPS = config.warps
    U = config.chunks
    X_STEPS = variant.steps
    WORDS = variant.words
    SUMS = GROUPS * M
    SPAN = variant.tiles * TILE
    CHUNKS = -(-K // chunk_columns(variant.quantized))
    STEPS = -(-CHUNKS // (WARPS * U))
    PAIRS = STEPS // 2
    ODD = STEPS % 2 == 1
    DIRECT = not STAGED and GROUPS == 1  # x is loaded together with w
    load_w, load_x, load_staged_x, load_groups, exists = make_operands(K, variant, config)
    if variant.four_bits:
        nf4 = variant.quantized == "nf4"
        products = make_multiply_four(M, U, nf4, GROUPS, load_groups, exists)
    else:
        products = make_multiply(M, U, variant.quantized != "", GROUPS, load_groups, exists)
    multiply_staged, multiply_groups = products
    copy_words, copy_fx = make_copies(M, U, WORDS, X_STEPS)
    store_sums = make_reduce(M, WARPS, GROUPS)[0]
    load_scales, finish = make_finish(K, variant, config)
    stage = make_stage(K, variant, config)

    @device
    def load_first(words, scales, weights, tile):
        load_w(words, weights, tile, 0)
        load_scales(scales, weights, tile)

    @device
    def load(words, fx, rows, weights, tile, step, share):
        """Return this lane's squares of the x that it loads, 0 if they have been counted."""
        load_w(words, weights, tile, step)
        squares = float32(0.0)
        if DIRECT:
            squares = load_x(fx, rows, step, share)
        return squares if tile == share.first else float32(0.0)

    @device
    def multiply(s, words, fx, rows, weights, shared, step):
        if STAGED:
            load_staged_x(fx, shared.x, step, rows.N)
        if GROUPS == 1:
            multiply_staged(s, words, fx, weights.w)
        else:
            multiply_groups(s, words, rows, step, weights.w)

    @device
    def product(y, rows, weights, shared, words, scales, share, eps):
        """Multiply. An even number of steps restores the roles of both sets of registers."""
        tid = cuda.threadIdx.x
        next_words = cuda.local.array((U, M, 2, WORDS), uint32)
        fx = cuda.local.array((U, X_STEPS, 2), uint32)
        next_fx = cuda.local.array((U, X_STEPS, 2), uint32)
        s = cuda.local.array((SUMS, 4), float32)
        squares = float32(0.0)
        if STAGED:
            stage(shared, rows, share)
            cuda.syncthreads()  # x is in shared memory
        elif DIRECT:
            squares = load_x(fx, rows, 0, share)
        tile = share.first
        while tile * SPAN < weights.F:  # a range would divide by the number of blocks
            next_tile = tile + share.blocks
            has_next = not once and next_tile * SPAN < weights.F
            if tile != share.first:
                load_scales(scales, weights, tile)
            for m in range(SUMS):
                for j in range(4):
                    s[m, j] = float32(0.0)
            for pair in range(PAIRS):
                step = 2 * pair
                squares += load(next_words, next_fx, rows, weights, tile, step + 1, share)
                multiply(s, words, fx, rows, weights, shared, step)
                if ODD or step + 2 < STEPS:
                    squares += load(words, fx, rows, weights, tile, step + 2, share)
                elif has_next:
                    load(words, fx, rows, weights, next_tile, 0, share)
                multiply(s, next_words, next_fx, rows, weights, shared, step + 1)
            if ODD:
                if has_next:
                    load(next_words, next_fx, rows, weights, next_tile, 0, share)
                multiply(s, words, fx, rows, weights, shared, STEPS - 1)
                if has_next:
                    copy_words(words, next_words)
                    if DIRECT:
                        copy_fx(fx, next_fx)
            store_sums(s, shared.sums, tid)
            if NORM and not STAGED and tile == share.first:
                squares += cuda.shfl_xor_sync(FULL, squares, 1)
                squares += cuda.shfl_xor_sync(FULL, squares, 2)
                if tid & 3 == 0:
                    shared.squares[(tid >> 5) * MAX_ROWS + ((tid & 31) >> 2)] = squares
            cuda.syncthreads()
            finish(y, shared, weights, scales, tile, rows.N, eps, tid)
            if once:
                break
            cuda.syncthreads()  # the sums have been read
            tile = next_tile

    return load_first, product


def sums_size(variant: Variant, config: Config) -> int:
    """Return the floats of shared memory for the sums of a block."""
    return config.warps * variant.parts * TILE * MAX_ROWS * variant.groups


@functools.cache
def make_tensor_kernel(K: int, variant: Variant, config: Config):
    """Return the kernel for weights of K columns.

    Launch it with 32 * config.warps threads and, if variant.staged, with
    shared_bytes(N, K, variant.quantized) of shared memory.
    """
    NORM = variant.norm
    overlap = variant.overlap
    ready = variant.ready
    U = config.chunks
    M = variant.parts
    WORDS = variant.words
    SUMS = sums_size(variant, config)
    SQUARES = config.warps * MAX_ROWS
    # more groups need more registers (with 16 warps, 4 groups spill some 7)
    BLOCKS = config.blocks if variant.groups == 1 else 1
    load_first, product = make_product(K, variant, config)

    @kernel(32 * config.warps, BLOCKS)
    def gemv_tensor_kernel(y, h, x, delta, w, norm_w, scale, groups, b, N, F, eps):
        """Compute tiles p, p + grid, ... with block p of any number. All arrays flat.

        F: columns of y.  scale, groups: of the rows of quantized weights.
        """
        sums = cuda.shared.array(SUMS, float32)
        squares_s = cuda.shared.array(SQUARES, float32)
        x_s = cuda.shared.array(0, uint16)
        words = cuda.local.array((U, M, 2, WORDS), uint32)
        scales = cuda.local.array(M, float32)
        rows = Rows(x, delta, h, norm_w, N)
        weights = Weights(w, scale, groups, b, F)
        shared = Shared(sums, squares_s, x_s)
        share = Share(int64(cuda.blockIdx.x), int64(cuda.gridDim.x))
        if overlap:
            let_next_start()
        if ready:
            load_first(words, scales, weights, share.first)
            if NORM and overlap:
                prefetch_start(norm_w)
        if overlap:
            wait_for_previous()
        if not ready:
            load_first(words, scales, weights, share.first)
        product(y, rows, weights, shared, words, scales, share, eps)

    return gemv_tensor_kernel


# -------------------------------------------------------------------------- the tuned configuration
def choose(K: int, F: int, swiglu: bool, norm: bool, quantized: str = "") -> Config:
    """Return the configuration for weights of K columns and F columns of y. Measured on one H200
    with bench/tune_decode.py, in bf16.

    The number of bytes of w in flight decides. A block with a single narrow tile loads it at once;
    a wide tile is read by as many warps as a block may have. Large products (gate/up, lm_head) use
    small blocks: when one ends, the next kernel can start while its neighbours still run.
    """
    chunks = -(-K // chunk_columns(quantized))
    if quantized in FOUR_BITS:  # of 128 columns x and the codes as bf16 take many registers
        warps = min(8, chunks)
        each = 1 if swiglu or chunks % (2 * warps) else 2  # a remainder takes more of them
        config = Config(warps, each, 2, swiglu or norm)
        if config.stage and not staged(K, config, quantized):
            return Config(warps, each, 1)  # x is loaded, added to and multiplied with w
        return config
    tiles = -(-F // TILE)
    # a chunk of codes has as many bytes of w, but twice the columns of x, whose registers hold
    # fewer chunks then
    at_once = AT_ONCE // 2 if quantized else AT_ONCE
    most_of_16 = 4 if quantized else MOST_OF_16
    if not (swiglu or norm) and tiles <= MULTIPROCESSORS and chunks > 8 * at_once:
        each = -(-chunks // 16)
        if each > most_of_16:
            each = min(4, -(-each // 2))
        return Config(16, each, 1)
    large = swiglu or (norm and tiles > 2 * MULTIPROCESSORS)
    warps = 16 if norm else 8
    if large:
        warps = 4
    warps = min(warps, chunks)
    each = -(-chunks // warps)
    if swiglu:
        return Config(warps, min(4, each), 3)
    if norm:
        return Config(warps, min(4, each), 4 if large else 1)
    once = each <= at_once and tiles <= 2 * MULTIPROCESSORS
    # more chunks would spill registers
    return Config(warps, each if once else min(4, each), 2, not once)
