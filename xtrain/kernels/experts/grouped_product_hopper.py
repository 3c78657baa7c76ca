"""Grouped products for compute capability 9.0: wgmma, TMA, specialized warps. See
grouped_product.py.

One loop over tiles serves the three products, which differ in their operands (the table of
grouped_product_tiled.py). A tile of the result has BM = 64 * warpgroups rows and BN columns, and is
a sum over steps of BK = 64 terms of the third axis, K.

A transposed operand has K along its rows in memory. wgmma reads it so from shared memory; only the
boxes of the copies and the descriptors differ.

A block is a producer thread, which streams both operands through a ring of stages in shared memory,
and consumer warpgroups, each with 64 rows of the result in registers. Barriers and phases are those
of flash_attention_hopper_parts.py. A launch starts as many blocks as the GPU holds at once; block b
computes the tiles b, b + blocks, ... . A sum is one chain of instructions over K in groups of 16,
which has the bits of cuBLAS's products in batch-invariant mode.

Shared memory: barriers | STAGES of the left operand | STAGES of the right operand | results.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..primitives.hopper import (
    PANEL,
    SM_90A,
    acquire_map,
    along_rows,
    down_rows,
    make_descriptor,
    make_setmaxnreg,
    make_wgmma,
    make_wgmma_wait,
    make_wgmma_wait_group,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
    shared_base,
    tma_load,
)
from ..primitives.hopper_tiles import (
    PANEL_ROW,
    find_tile,
    make_set_up,
    make_store,
    registers,
    split,
)
from ..primitives.ptx import device, kernel, let_next_start, wait_for_previous
from ..primitives.tensor_cores import opaque, warp_id
from ..primitives.tma import tensor_maps, tensors_of
from ..runtime.compiler import cuda, float32, int32, uint32
from ..runtime.cost import declare_cost
from ..runtime.launch import can_overlap, launch, multiprocessors
from .expert_order import OTHER, TILE, ExpertOrder
from .grouped_product_tiled import DW, DX, FORWARD, Product

BK = PANEL  # of a step: one panel of an operand that is not transposed
OUT = 2  # the map of the result
HEADER = 1024  # bytes before the first tile: barriers
STORED = 16  # rows of a box that a warp stores


@dataclass(frozen=True)
class Tiles:
    """What a kernel is compiled for."""

    columns: int  # of a tile of the result: 64, 128, 256
    stages: int  # of the ring
    blocks: int  # per multiprocessor
    # 1, 2 or 4: bf16 results leave through shared memory in so many parts, float32 in twice as many
    parts: int
    together: int  # tiles of rows that running blocks share, see find_tile
    warpgroups: int = TILE // 64

    @property
    def rows(self) -> int:
        """Rows of a tile of the result."""
        return 64 * self.warpgroups


TILES = {
    FORWARD: Tiles(columns=256, stages=4, blocks=1, parts=2, together=8),
    DX: Tiles(columns=256, stages=4, blocks=1, parts=2, together=8),
    DW: Tiles(columns=256, stages=4, blocks=1, parts=2, together=1),
}


@dataclass(frozen=True)
class Result:
    """What is stored: bf16, or float32 that may be added to what is there."""

    floats: bool
    added: bool

    def parts(self, tiles: Tiles) -> int:
        """Return the number of parts in which a tile leaves."""
        return tiles.parts * (2 if self.floats else 1)


# -------------------------------------------------------------------------- layout of shared memory
@dataclass(frozen=True)
class Layout:
    """Byte offsets in a block's shared memory."""

    left: int
    right: int
    out: int
    total: int  # bytes of shared memory
    full: int  # barriers of the stages
    free: int


@functools.cache
def layout_of(tiles: Tiles) -> Layout:
    """Return the layout."""
    stages = tiles.stages
    right = HEADER + stages * tiles.rows * BK * 2
    out = right + stages * tiles.columns * BK * 2
    total = out + tiles.rows * tiles.columns * 2 // tiles.parts
    return Layout(HEADER, right, out, total, 0, 8 * stages)


# ----------------------------------------------------------------------------- tiles
@functools.cache
def make_locate(product: Product, tiles: Tiles):
    """Return count(rows, columns, T, E), locate(tile, order, rows, columns, K, T): the
    number of tiles; tile -> (first row, end of the rows that are not padding, first column, expert,
    first of K, steps)

    rows, columns: of one expert's result.
    T: tiles of slots. E: experts. K: length of the third axis, of FORWARD and DX.
    """
    BM = tiles.rows
    BN = tiles.columns
    OF_SLOTS = product.of_slots
    TOGETHER = tiles.together

    @device
    def count(rows, columns, T, E):
        blocks_n = (columns + BN - 1) // BN
        if OF_SLOTS:
            return T * blocks_n
        return E * ((rows + BM - 1) // BM) * blocks_n

    @device
    def locate(tile, order, rows, columns, K, T):
        experts, first, counts = order
        blocks_n = (columns + BN - 1) // BN
        if OF_SLOTS:
            n, m = find_tile(tile, blocks_n, T, TOGETHER)
            e = experts[m]
            steps = int32(0)
            end = int32(0)
            if e >= 0:
                steps = int32((K + BK - 1) // BK)
                end = int32(first[e] + counts[e])
            return int32(m * BM), end, int32(n * BN), e, int32(0), steps
        e, rest = split(tile, ((rows + BM - 1) // BM) * blocks_n)
        m, n = split(rest, blocks_n)
        steps = int32((counts[e] + BK - 1) // BK)
        return int32(m * BM), int32(rows), int32(n * BN), e, first[e], steps

    return count, locate


@functools.cache
def make_load(WIDTH: int, TRANSPOSED: bool):
    """Return load(to, maps, i, full, start, k, sequence): copy one step of an operand.

    WIDTH: rows or columns of the result. start: the first of them. k: the first of K.
    """
    PANELS = WIDTH // PANEL

    @device
    def load(to, maps, i, full, start, k, sequence):
        if TRANSPOSED:
            for p in range(PANELS):
                at = to + p * (BK * PANEL_ROW)
                tma_load(at, maps, i, full, start + PANEL * p, k, 0, sequence)
        else:
            tma_load(to, maps, i, full, k, start, 0, sequence)

    return load


@functools.cache
def make_producer(product: Product, tiles: Tiles):
    """Return produce(base, maps, order, rows, columns, K, T, E): the producer thread."""
    STAGES = tiles.stages
    LEFT_BYTES = tiles.rows * BK * 2
    RIGHT_BYTES = tiles.columns * BK * 2
    OF_SLOTS = product.of_slots
    layout = layout_of(tiles)
    LEFT = layout.left
    RIGHT = layout.right
    FULL = layout.full
    FREE = layout.free
    count, locate = make_locate(product, tiles)
    load_left = make_load(tiles.rows, product.left_transposed)
    load_right = make_load(tiles.columns, product.right_transposed)

    @device
    def produce(base, maps, order, rows, columns, K, T, E):
        acquire_map(maps, 0)
        acquire_map(maps, 1)
        it = uint32(0)
        end = count(rows, columns, T, E)
        tile = int32(cuda.blockIdx.x)
        while tile < end:
            row, _, column, e, k, steps = locate(tile, order, rows, columns, K, T)
            sequence = int32(0)
            if OF_SLOTS:
                sequence = int32(e)
            i = int32(0)
            while opaque(i) < steps:
                stage = it % STAGES
                full = base + FULL + 8 * stage
                mbarrier_wait(base + FREE + 8 * stage, ((it // STAGES) & 1) ^ 1)
                mbarrier_arrive_expect_tx(full, LEFT_BYTES + RIGHT_BYTES)
                load_left(base + LEFT + stage * LEFT_BYTES, maps, 0, full, row, k, 0)
                load_right(base + RIGHT + stage * RIGHT_BYTES, maps, 1, full, column, k, sequence)
                it += uint32(1)
                i = int32(i + 1)
                k = int32(k + BK)
            tile = int32(tile + cuda.gridDim.x)

    return produce


# ----------------------------------------------------------------------------- consumers
@functools.cache
def make_tile_store(tiles: Tiles, result: Result, OUT_AT: int):
    """Return store(base, acc, maps, row, column, sequence), done(): a warp's rows of a tile."""
    PARTS = result.parts(tiles)
    WIDTH = tiles.columns // PARTS
    PANEL_BYTES = tiles.rows * PANEL_ROW

    def make_parts(part):
        """Return the function that stores this part and the following ones."""
        store_part, done = make_store(WIDTH, part * WIDTH, result.floats, result.added)
        LAST = part == PARTS - 1
        store_rest = done if LAST else make_parts(part + 1)
        FIRST = part * WIDTH

        @device
        def store_parts(acc, one, at, maps, row, column, sequence):
            done()  # of the part before, or the previous tile
            first = int32(column + FIRST)
            store_part(acc, one, at, PANEL_BYTES, maps, OUT, first, row, 0, sequence)
            if not LAST:
                store_rest(acc, one, at, maps, row, column, sequence)

        return store_parts

    store_parts = make_parts(0)

    @device
    def store(base, acc, maps, row, column, sequence):
        one = cuda.local.array(2, float32)
        one[0] = float32(1.0)
        one[1] = float32(1.0)
        warp = warp_id()
        at = base + OUT_AT + warp * (STORED * PANEL_ROW)
        store_parts(acc, one, at, maps, int32(row + STORED * warp), column, sequence)

    return store, make_store(WIDTH)[1]


@functools.cache
def make_consumer(product: Product, tiles: Tiles, result: Result):
    """Return consume(base, maps, order, rows, columns, K, T, E): the work of a
    consumer warpgroup"""
    STAGES = tiles.stages
    LEFT_BYTES = tiles.rows * BK * 2
    RIGHT_BYTES = tiles.columns * BK * 2
    OF_SLOTS = product.of_slots
    BN = tiles.columns
    SIZE = BN // 2
    layout = layout_of(tiles)
    LEFT = layout.left
    RIGHT = layout.right
    FULL = layout.full
    FREE = layout.free
    count, locate = make_locate(product, tiles)
    # a warpgroup's 64 rows of the left operand are one panel if it is transposed
    WARPGROUP_BYTES = 64 * PANEL_ROW
    left_steps = down_rows(BK) if product.left_transposed else along_rows(BK, 0)
    right_steps = down_rows(BK) if product.right_transposed else along_rows(BK, 0)
    multiply = make_wgmma(
        BN, left_steps, right_steps, product.right_transposed, True, product.left_transposed
    )
    wait_but_one = make_wgmma_wait_group(1)
    wait = make_wgmma_wait(BN, 0)
    descriptor = make_descriptor(BK * PANEL_ROW)
    store_tile, stores_done = make_tile_store(tiles, result, layout.out)
    ADDED = result.added

    @device
    def pass_over(base, it, steps):
        """Free the stages of a tile without reading them. -> (iteration, steps left)"""
        i = int32(0)
        while opaque(i) < steps:
            stage = it % STAGES
            mbarrier_wait(base + FULL + 8 * stage, (it // STAGES) & 1)
            cuda.syncwarp()  # all lanes have seen this phase
            mbarrier_arrive(base + FREE + 8 * stage)
            it += uint32(1)
            i = int32(i + 1)
        return it, int32(0)

    @device
    def consume(base, maps, order, rows, columns, K, T, E):
        if cuda.threadIdx.x & 31 == 0:
            acquire_map(maps, OUT)
        acc = cuda.local.array(SIZE, float32)
        mine = base + LEFT + (warp_id() >> 2) * WARPGROUP_BYTES
        it = uint32(0)
        tiles_end = count(rows, columns, T, E)
        tile = int32(cuda.blockIdx.x)
        while tile < tiles_end:
            row, end, column, e, _, steps = locate(tile, order, rows, columns, K, T)
            for i in range(SIZE):
                acc[i] = float32(0.0)
            if row + 64 * (warp_id() >> 2) >= end:  # this warpgroup has padding only
                it, steps = pass_over(base, it, steps)
            before = uint32(0)
            i = int32(0)
            while opaque(i) < steps:
                stage = it % STAGES
                mbarrier_wait(base + FULL + 8 * stage, (it // STAGES) & 1)
                left = descriptor(mine + stage * LEFT_BYTES)
                multiply(acc, left, descriptor(base + RIGHT + stage * RIGHT_BYTES))
                wait_but_one()
                if i > 0:
                    mbarrier_arrive(base + FREE + 8 * before)
                before = stage
                it += uint32(1)
                i = int32(i + 1)
            wait(acc)
            if steps > 0:
                mbarrier_arrive(base + FREE + 8 * before)
            sequence = int32(0)
            if not OF_SLOTS:
                sequence = int32(e)
            if steps > 0 or (not ADDED and e != OTHER):
                store_tile(base, acc, maps, row, column, sequence)
            tile = int32(tile + cuda.gridDim.x)
        stores_done()

    return consume


@functools.cache
def make_kernel(product: Product, tiles: Tiles, result: Result):
    """Return the kernel of a product; launch_product starts it."""
    WGS = tiles.warpgroups
    PER_SM = tiles.blocks
    CONSUMERS = 128 * WGS
    FEW, MANY = registers(WGS, PER_SM)
    layout = layout_of(tiles)
    FULLS = tuple(layout.full + 8 * i for i in range(tiles.stages))
    FREES = tuple(layout.free + 8 * i for i in range(tiles.stages))
    set_up = make_set_up(4 * WGS, FULLS, FREES)
    produce = make_producer(product, tiles)
    consume = make_consumer(product, tiles, result)
    fewer_registers = make_setmaxnreg(FEW, False)
    more_registers = make_setmaxnreg(MANY, True)

    @kernel(CONSUMERS + 128, PER_SM, **SM_90A)
    def grouped_product_hopper_kernel(maps, experts, first, counts, rows, columns, K, T, E):
        """Grid: any. maps: tensor maps of the left and right operand and of the result;
        rows, columns: of the result, of one expert for DW.
        """
        order = experts, first, counts
        base = shared_base()
        set_up(base)
        wait_for_previous()
        let_next_start()
        if warp_id() >= 4 * WGS:
            fewer_registers()
            if cuda.threadIdx.x == CONSUMERS:
                produce(base, maps, order, rows, columns, K, T, E)
        else:
            more_registers()
            consume(base, maps, order, rows, columns, K, T, E)

    def nbytes(maps, *_):
        sizes = [size for _, size in tensors_of(maps)]
        return sum(sizes) + (sizes[OUT] if result.added else 0)

    def flops(maps, *_):
        (left, _, slots, _), _, (columns, *_) = (dims for dims, _ in tensors_of(maps))
        return 2.0 * slots * left * columns

    declare_cost(grouped_product_hopper_kernel, nbytes=nbytes, flops=flops)
    return grouped_product_hopper_kernel


# ----------------------------------------------------------------------------- launching
def launch_product(
    product: Product,
    out: Array,
    left: Array,
    right: Array,
    order: ExpertOrder,
    accumulate: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out`: y (FORWARD), dx (DX) or dw (DW, = or +=). bf16 operands; dw may be float32, and must
    be with `accumulate`.

    left: x or dy, (slots, ...). right: w (E, O, I), or x for DW.
    """
    tiles = tiles or TILES[product]
    T = order.experts_T.shape[0]
    E = order.first_E.shape[0] - 1
    rows, columns = out.shape[-2:]
    wide = lambda x: x.reshape(-1, x.shape[-2], 1, x.shape[-1])
    box = lambda transposed, width: BK if transposed else width
    boxes = [
        (wide(left), box(product.left_transposed, tiles.rows)),
        (wide(right), box(product.right_transposed, tiles.columns)),
        (wide(out), STORED),
    ]
    tiles_of_rows = E * -(-rows // tiles.rows)
    if product.of_slots:
        tiles_of_rows = T
    blocks = tiles_of_rows * -(-columns // tiles.columns)
    result = Result(floats=out.dtype == np.float32, added=accumulate)
    maps = tensor_maps(*boxes)
    shared = layout_of(tiles).total
    kernel = make_kernel(product, tiles, result)
    grid = min(blocks, multiprocessors(out) * tiles.blocks)
    sizes = rows, columns, left.shape[1], T, E
    args = maps, order.experts_T, order.first_E, order.counts_E, *map(np.int32, sizes)
    overlap = can_overlap(out)
    launch(kernel, grid, 128 * (tiles.warpgroups + 1), *args, shared=shared, overlap=overlap)
