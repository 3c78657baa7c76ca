"""Products of many experts: each row with the matrix of its expert.

    x: (M, I)   w: (E, O, I)   y: (M, O)

    forward    y_m = w_e x_m           e: the expert of slot m
    backward   dx_m = w_e^T dy_m       dw_e = sum over the slots m of e of dy_m x_m^T

The slots of an expert are next to each other and begin at a multiple of TILE (expert_order.py), so a
tile of rows has one matrix, and each product is as many ordinary ones as there are tiles. The
experts of the tiles and the counts are read on the device: a launch depends on shapes alone, and one
CUDA graph serves every routing. Rows of padding must be zeros; they and unused tiles give zeros, and
a matrix without slots has a gradient of zeros.

    NumPy                      the references below: one product per expert
    bf16, capability 9.0       grouped_product_hopper.py: wgmma and TMA
    bf16, capability 8.0       grouped_product_mma.py: mma.sync
    float32, and bf16 whose    grouped_product_tiled.py: the version to read first
    rows are not on 16 bytes

w may be codes (quantize.py), (E O, I), which no kernel here reads: the matrices of as many experts as
BUFFER holds are dequantized, those without tokens left out, and multiplied, then the next ones. Of
Qwen3-30B-A3B (128 experts, gate_up 1536 x 2048, down 2048 x 768, in bf16) that is 42 and 85 at a
time. A product reads 1 byte or 0.5 of a weight, writes 2 and reads 2, and computes the same bits as
with the dequantized array.

Operations: 2 M I O for each of the three, M with the padding. A sum is one chain in the order of its
terms, whatever the other rows are, so the products are batch-invariant. In the first two versions
for bf16 it is a chain of tensor-core instructions over 16 terms each, as in cuBLAS's products in
batch-invariant mode and in decoding/gemv_chain.py, with the same bits.
"""

from typing import Any

import numpy as np

from ...device import Array
from ...simulator import SimArray
from ..gemm import linear_into
from ..primitives.flat import on_16_bytes
from ..quantize import Quantized, check_quantized, dequantize, dequantize_rows
from ..runtime.launch import FLOATS, check, check_array, dtype_name, empty, on_host
from . import grouped_product_hopper, grouped_product_mma, grouped_product_tiled
from .expert_order import ExpertOrder, experts_between
from .grouped_product_tiled import DW, DX, FORWARD, Product

BUFFER = 256 << 20  # bytes of dequantized matrices at a time, at least one matrix
ALIGNED = 8  # bf16 in 16 bytes: the rows of operands of tensor cores


# ----------------------------------------------------------------------------- references
def grouped_product_ref(x_MI, w_EOI, order: ExpertOrder):
    """Return y (M, O)."""
    y_MO = np.zeros((x_MI.shape[0], _widths(w_EOI, order)[0]), x_MI.dtype)
    for e, rows in _rows_of_experts(order):
        w_OI = _matrix(w_EOI, e, order, x_MI.dtype)
        linear_into(y_MO[rows], x_MI[rows], w_OI)  # batch-invariant in that mode
    return y_MO


def grouped_product_dx_ref(dy_MO, w_EOI, order: ExpertOrder):
    """Return dx (M, I)."""
    dx_MI = np.zeros((dy_MO.shape[0], w_EOI.shape[-1]), dy_MO.dtype)
    for e, rows in _rows_of_experts(order):
        dx_MI[rows] = dy_MO[rows] @ _matrix(w_EOI, e, order, dy_MO.dtype)
    return dx_MI


def grouped_product_dw_ref(dy_MO, x_MI, order: ExpertOrder):
    """Return dw (E, O, I)."""
    E = order.counts_E.size
    dw_EOI = np.zeros((E, dy_MO.shape[1], x_MI.shape[1]), x_MI.dtype)
    for e, rows in _rows_of_experts(order):
        dw_EOI[e] = dy_MO[rows].T @ x_MI[rows]
    return dw_EOI


def _widths(w_EOI: Array | Quantized, order: ExpertOrder) -> tuple[int, int]:
    """Return O and I."""
    rows = w_EOI.shape[-2]
    if isinstance(w_EOI, Quantized):
        rows //= order.counts_E.size
    return rows, w_EOI.shape[-1]


def _matrix(w_EOI, e, order, dtype):
    """Return w_e (O, I)."""
    if isinstance(w_EOI, Quantized):
        O, _ = _widths(w_EOI, order)  # noqa: E741
        return dequantize(w_EOI.rows(e * O, e * O + O), dtype)
    return w_EOI[e]


def _rows_of_experts(order):
    """Yield (expert, slice of its rows without the padding) of the experts that have some."""
    for e in np.flatnonzero(order.counts_E):
        first = int(order.first_E[e])
        yield int(e), slice(first, first + int(order.counts_E[e]))


# ----------------------------------------------------------------------------- launchers
def grouped_product(x_MI: Array, w_EOI: Array | Quantized, order: ExpertOrder) -> Array:
    """Return y (M, O), y_m = w_e x_m, in the dtype of x and w: float32 or bf16, or codes of it."""
    op = "grouped_product"
    O, I = _check_matrices(op, w_EOI, order)  # noqa: E741
    _check_rows(op, "x", x_MI, I, w_EOI, order)
    if on_host(x_MI, *_stored(w_EOI), *order):
        return grouped_product_ref(x_MI, w_EOI, order)
    y_MO = empty(x_MI, (x_MI.shape[0], O))
    _multiply(FORWARD, y_MO, x_MI, w_EOI, order)
    return y_MO


def grouped_product_dx(dy_MO: Array, w_EOI: Array | Quantized, order: ExpertOrder) -> Array:
    """Return dx (M, I), dx_m = w_e^T dy_m, in the dtype of dy and w, as in grouped_product."""
    op = "grouped_product_dx"
    O, I = _check_matrices(op, w_EOI, order)  # noqa: E741
    _check_rows(op, "dy", dy_MO, O, w_EOI, order)
    if on_host(dy_MO, *_stored(w_EOI), *order):
        return grouped_product_dx_ref(dy_MO, w_EOI, order)
    dx_MI = empty(dy_MO, (dy_MO.shape[0], I))
    _multiply(DX, dx_MI, dy_MO, w_EOI, order)
    return dx_MI


def _multiply(
    product: Product, out: Array, left: Array, w_EOI: Array | Quantized, order: ExpertOrder
) -> None:
    """Fill `out` with y or dx. left: x or dy."""
    if not isinstance(w_EOI, Quantized):
        version(left, w_EOI, out).launch_product(product, out, left, w_EOI, order)
        return
    E = order.counts_E.size
    O, I = _widths(w_EOI, order)  # noqa: E741
    n = min(E, max(1, BUFFER // max(1, O * I * left.itemsize)))
    buffer_nOI = empty(left, (n, O, I))
    for first in range(0, E, n):
        last = min(first + n, E)
        some = buffer_nOI[: last - first]
        part = order if n == E else experts_between(order, first, last)
        dequantize_rows(some.reshape(-1, I), w_EOI, first * O, part.counts_E)
        version(left, some, out).launch_product(product, out, left, some, part)


def grouped_product_dw(
    dy_MO: Array, x_MI: Array, order: ExpertOrder, dw_EOI: Array, accumulate: bool = False
) -> Array:
    """Set dw_e to the sum over the slots of e of dy_m x_m^T, or add it with accumulate. Returns dw.

    dy, x: float32 or bf16. dw: float32, or bf16 as they are if it does not accumulate.
    """
    op = "grouped_product_dw"
    check_array(op, "dw", dw_EOI, (None, None, None), FLOATS if not accumulate else ("float32",))
    E, O, I = dw_EOI.shape  # noqa: E741
    check_array(op, "counts", order.counts_E, (E,), ("int32",))
    _check_rows(op, "x", x_MI, I, x_MI, order)
    _check_rows(op, "dy", dy_MO, O, x_MI, order)
    if on_host(dy_MO, x_MI, dw_EOI, *order):
        dw = grouped_product_dw_ref(dy_MO, x_MI, order)
        if accumulate:
            dw_EOI += dw
        else:
            dw_EOI[...] = dw
    else:
        version(dy_MO, x_MI, dw_EOI).launch_product(DW, dw_EOI, dy_MO, x_MI, order, accumulate)
    return dw_EOI


def _stored(w):
    """Return the arrays of w."""
    return w.arrays if isinstance(w, Quantized) else (w,)


def _check_matrices(op, w, order):
    """Check w and the order of its experts. Return O and I."""
    E = order.counts_E.size
    if isinstance(w, Quantized):
        check_quantized(op, w)
        check(
            w.shape[0] % E == 0, f"{op}: w has {w.shape[0]} rows, which {E} experts do not divide"
        )
    else:
        check_array(op, "w", w, (None, None, None), FLOATS)
        E = w.shape[0]
    check_array(op, "counts", order.counts_E, (E,), ("int32",))
    return _widths(w, order)


def _check_rows(op, name, x, width, other, order):
    M = order.pairs_M.shape[0]
    check_array(op, name, x, (M, width), (dtype_name(other.dtype),))


def version(left: Array, right: Array, out: Array) -> Any:
    """Return the module whose launch_product computes `out` from these operands."""
    if dtype_name(left.dtype) == "float32" or not left.size:
        return grouped_product_tiled
    rows = left.shape[-1], right.shape[-1], right.shape[-2]
    if any(n % ALIGNED for n in rows) or not on_16_bytes(left, right, out):
        return grouped_product_tiled
    capability = 90 if isinstance(left, SimArray) else int(left.device.compute_capability)
    if capability == 90:
        return grouped_product_hopper
    return grouped_product_mma if capability >= 80 else grouped_product_tiled
