"""Grouped products in float32, on any GPU; also of bf16 that tensor cores cannot read. See
grouped_product.py.

A block computes a tile of 64 x 64 elements of one expert's result. Tiles of both operands, BK = 16
terms of the sums, pass through shared memory as float32; a thread keeps 4 x 4 sums in registers, so
each number that it reads from shared memory is used four times.

The three products differ in which axis of an operand the sums run along:

                    rows      columns   terms           left operand       right operand
    FORWARD         slots     outputs   inputs          x                  w_e
    DX              slots     inputs    outputs         dy                 w_e, transposed
    DW              outputs   inputs    slots of e      dy, transposed     x, transposed

An operand that is not transposed has its terms next to each other in memory.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ...device import Array
from ..primitives.ptx import device, kernel, load1, store1
from ..runtime.compiler import cuda, float32, int32, int64
from ..runtime.cost import declare_cost
from ..runtime.launch import launch
from .expert_order import OTHER, TILE, ExpertOrder

BM = 64  # rows of a block's tile
BN = 64  # columns
BK = 16  # terms of a step: 8 KB of shared memory for both operands
SIDE = 16  # threads along the rows and along the columns of a tile
OWN = BM // SIDE  # rows and columns of a thread


@dataclass(frozen=True)
class Product:
    """Which of the three products."""

    left_transposed: bool
    right_transposed: bool
    of_slots: bool  # the rows of the result are slots; otherwise the terms are


FORWARD = Product(left_transposed=False, right_transposed=False, of_slots=True)
DX = Product(left_transposed=False, right_transposed=True, of_slots=True)
DW = Product(left_transposed=True, right_transposed=True, of_slots=False)


@functools.cache
def make_starts(product: Product, ROWS: int):
    """Return starts(order, rows, columns, K): where this block's expert begins in the arrays.

    -> (first element of the left operand, of the right one, of the result, number of terms)
    ROWS: of a block's tile. Block (x, y, z) has the y-th tile of rows, for DW of expert z.
    order: experts_T, first_E, counts_E. K: the number of terms of FORWARD and DX.
    """
    OF_SLOTS = product.of_slots

    @device
    def starts(order, rows, columns, K):
        experts, first, counts = order
        if OF_SLOTS:
            e = experts[cuda.blockIdx.y * ROWS // TILE]
            if e < 0:
                return int64(0), int64(0), int64(0), int32(0)
            return int64(0), int64(e) * columns * K, int64(0), int32(K)
        e = cuda.blockIdx.z
        slot = int64(first[e])
        return slot * rows, slot * columns, int64(e) * rows * columns, int32(counts[e])

    return starts


@functools.cache
def make_is_other(product: Product, ROWS: int):
    """Return is_other(experts): True if another launch writes this block's tile."""
    OF_SLOTS = product.of_slots

    @device
    def is_other(experts):
        return OF_SLOTS and experts[cuda.blockIdx.y * ROWS // TILE] == OTHER

    return is_other


def declare_product_cost(kernel, product: Product, accumulate: bool) -> None:
    """Declare the cost of a kernel (out, left, right, ..., rows, columns, K): M includes padding.

    A launch with the matrices of some experts counts the slots of all: the host knows no others.
    """

    def flops(out, left, right, experts, first, counts, rows, columns, K):
        slots = TILE * experts.size
        return 2.0 * slots * int(columns) * int(K if product.of_slots else rows)

    declare_cost(kernel, in_place=("out",) if accumulate else (), flops=flops)


@functools.cache
def make_load(TRANSPOSED: bool):
    """Return load(tile, x, start, first, end, k, terms): 16 terms of 64 rows or columns, tile[k, i].

    start: of the operand in x. first: the first of the rows or columns, of `end`.
    Neighbouring threads read neighbouring elements.
    """

    @device
    def load(tile, x, start, first, end, k, terms):
        for j in range(BM * BK // (SIDE * SIDE)):
            n = cuda.threadIdx.x + j * (SIDE * SIDE)
            if TRANSPOSED:
                i = n % BM
                t = n // BM
                at = start + int64(k + t) * end + (first + i)
            else:
                i = n // BK
                t = n % BK
                at = start + int64(first + i) * terms + (k + t)
            value = float32(0.0)
            if first + i < end and k + t < terms:
                value = load1(x, at)
            tile[t, i] = value

    return load


@functools.cache
def make_kernel(product: Product, ACCUMULATE: bool = False):
    """Return the kernel of a product; launch_product starts it. ACCUMULATE: add to the result."""
    PITCH = BM + 1  # stores of neighbouring terms are in different banks
    THREADS = SIDE * SIDE
    starts = make_starts(product, BM)
    is_other = make_is_other(product, BM)
    load_left = make_load(product.left_transposed)
    load_right = make_load(product.right_transposed)

    @kernel(THREADS)
    def grouped_product_tiled_kernel(out, left, right, experts, first, counts, rows, columns, K):
        """Grid (tiles of columns, tiles of rows, 1; for DW experts). Arrays are flat.

        rows, columns: of the result, for DW of one expert's.
        """
        left_tile = cuda.shared.array((BK, PITCH), float32)
        right_tile = cuda.shared.array((BK, PITCH), float32)
        sums = cuda.local.array((OWN, OWN), float32)
        a = cuda.local.array(OWN, float32)
        b = cuda.local.array(OWN, float32)
        if is_other(experts):
            return
        row = int32(cuda.blockIdx.y * BM)
        column = int32(cuda.blockIdx.x * BN)
        y = cuda.threadIdx.x // SIDE
        x = cuda.threadIdx.x % SIDE
        left_start, right_start, start, terms = starts((experts, first, counts), rows, columns, K)
        for i in range(OWN):
            for j in range(OWN):
                sums[i, j] = float32(0.0)
        for k in range(0, terms, BK):
            load_left(left_tile, left, left_start, row, rows, k, terms)
            load_right(right_tile, right, right_start, column, columns, k, terms)
            cuda.syncthreads()  # the tiles are complete
            for t in range(BK):
                for i in range(OWN):
                    a[i] = left_tile[t, y + SIDE * i]
                    b[i] = right_tile[t, x + SIDE * i]
                for i in range(OWN):
                    for j in range(OWN):
                        sums[i, j] += a[i] * b[j]
            cuda.syncthreads()  # and have been read
        for i in range(OWN):
            for j in range(OWN):
                r = row + y + SIDE * i
                c = column + x + SIDE * j
                if r < rows and c < columns:
                    at = start + int64(r) * columns + c
                    if ACCUMULATE:
                        sums[i, j] += out[at]
                    store1(out, at, sums[i, j])

    declare_product_cost(grouped_product_tiled_kernel, product, ACCUMULATE)
    return grouped_product_tiled_kernel


def launch_product(
    product: Product,
    out: Array,
    left: Array,
    right: Array,
    order: ExpertOrder,
    accumulate: bool = False,
) -> None:
    """Fill `out` with y, dx or dw, or add to it. left: x or dy. right: w, or x for DW."""
    launch_tiles(make_kernel(product, accumulate), SIDE * SIDE, (BM, BN), out, left, right, order)


def launch_tiles(kernel, block: int, tile: tuple[int, int], out, left, right, order, **options):
    """Start a kernel with the arguments of make_kernel's. tile: rows and columns of a block."""
    rows, columns = out.shape[-2:]
    experts = out.shape[0] if out.ndim == 3 else 1
    grid = -(-columns // tile[1]), -(-rows // tile[0]), experts
    arrays = (x.reshape(-1) for x in (out, left, right))
    of_order = order.experts_T, order.first_E, order.counts_E
    sizes = map(np.int32, (rows, columns, left.shape[1]))
    launch(kernel, grid, block, *arrays, *of_order, *sizes, **options)
