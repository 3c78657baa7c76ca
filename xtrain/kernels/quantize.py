"""Quantized weights: one byte per weight instead of two or four, and one float32 scale per row.

Weights of half a byte, int4 and nf4, are in four_bits.py: with scales for groups of columns, too.

w: (O, K)

    quantize      s_o = max_k |w_ok| / Q        c_ok = round(w_ok / s_o)
    dequantize    w'_ok = c_ok s_o
    product       y_no = sum_k x_nk w'_ok = s_o sum_k x_nk c_ok

A decoding step reads every weight once and computes two operations with it for each sequence, so
its time is the bytes that it reads. The scale does not depend on k, so it is one multiplication per
sum, after the sum, and the product reads codes alone: K + 4 bytes of a row instead of 2 K in bf16.
Quantization is symmetric: no offset is added, 0 stays 0, and no term like offset x sum of x has to
be computed.

Two kinds of codes, which differ in where their values lie:

    int8   Q = 127: the whole numbers -127 ... 127, in equal steps of s. The error of a weight is at
           most s / 2; if it is spread evenly over a step, its standard deviation is s / sqrt(12). A
           row of 4096 normal weights with standard deviation a has its maximum near 3.8 a, so s =
           0.030 a, and the error is 0.0086 a: 0.9 % of a typical weight.
    fp8    Q = 448: e4m3, a float of 1 sign, 4 exponent and 3 fraction bits. A code is
           (1 + m/8) 2^(e - 7) for e = 1 ... 15, and (m/8) 2^-6 for e = 0 (subnormal numbers). It
           has no infinity, and only e = 15, m = 7 is NaN, so the largest number is 1.75 x 2^8 =
           448, the smallest 2^-9. The steps grow with the number: the error is at most 1/16 of the
           weight, 2.6 % of it in the root mean square, however small the weight is, down to 2^-15
           of the largest of its row.

For normal weights int8 is three times as accurate, with the same bytes. fp8 needs no row of equally
sized weights: one outlier in a row, 20 times as large as without it, makes all of int8's steps
there 20 times as large, but shifts fp8's exponents alone.

The scale is per row, not per matrix: a row with small weights has small errors then. The errors of
a row's terms are independent, so that of a sum grows like the square root of K, as the sum itself
does: y is as accurate as w.

    numbers, by hand   w = (0.5, -1.27, 0.003)
        int8    s = 0.01        c = (50, -127, 0)     w' = (0.5, -1.27, 0)
        fp8     s = 0.002835    w / s = (176.4, -448, 1.0583)
                                c = (176, -448, 1)    w' = (0.499, -1.27, 0.002835)

Codes are computed once, when a model is prepared for serving (nn/quantized.py). They are used in
two ways: a product of few rows reads the codes (decoding/gemv.py, experts/expert_gemv.py), a product of
many rows reads a dequantized copy that is freed after it (gemm.py), of experts one of those that have
tokens (experts/grouped_product.py). The copy costs 3 bytes of traffic per weight in
bf16 (read 1, write 2), at 4.2 TB/s as long as 816 TFLOP/s compute 290 rows (an H200's measured
speeds). So a prefill of thousands of tokens is slowed little, one of a hundred by more than half.

Bytes moved: quantize reads w twice (the second time from the cache, if the row fits) and writes K
bytes and 4 a row. Dequantize: 1 + 2 per weight in bf16, 1 + 4 in float32.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..device import Array, to_numpy
from ..errors import UserError
from .cast import BFLOAT16
from .four_bits import (
    CHUNK,
    FOUR_BITS,
    chunks_of,
    dequantize_four_ref,
    make_dequantize_four_kernel,
    make_is_used,
    quantize_four,
)
from .primitives.codes import E4M3, code_values, codes_to_floats, load_codes16
from .primitives.flat import on_16_bytes
from .primitives.ptx import device, kernel, load1, store1, store8
from .primitives.reduce import MAX_WARPS, block_max
from .runtime.compiler import cuda, float32, float_as_int, int32, int64, int_as_float, uint32
from .runtime.launch import FLOATS, check, check_array, dtype_name, empty, launch, on_host, wide

CODES = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}  # kind -> dtype of the codes
KINDS = (*CODES, *FOUR_BITS)
LARGEST = {"int8": 127.0, "fp8": 448.0}
LEAST_SCALE = 2.0**-126  # the smallest normal float32: also the scale of a row of zeros
BLOCK = 256
EACH = 16  # codes of a thread: one 16-byte access
# float32 from here on have no fractions: adding it rounds to a whole number, in the lowest bits
ROUND = 1.5 * 2.0**23


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix (O, K) as codes and scales. Ops that know it take it in place of the matrix."""

    codes_OK: Array  # int8, or uint8 for e4m3
    scale_O: Array  # float32
    dtype: Any  # of the matrix, float32 or bf16, in which products compute

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes_OK.shape

    @property
    def size(self) -> int:
        return self.codes_OK.size

    ndim = 2

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return self.codes_OK.nbytes + self.scale_O.nbytes

    @property
    def kind(self) -> str:
        """ "int8" or "fp8" """
        return next(kind for kind, dtype in CODES.items() if dtype == self.codes_OK.dtype)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it consists of."""
        return self.codes_OK, self.scale_O

    def rows(self, first: int, last: int) -> "Quantized":
        """Return some rows."""
        return replace(self, codes_OK=self.codes_OK[first:last], scale_O=self.scale_O[first:last])

    def check(self, op: str, K: int | None) -> None:
        """See check_quantized."""
        dtypes = [d.name for d in CODES.values()]
        check_array(op, "the codes of w", self.codes_OK, (None, K), dtypes)
        check_array(op, "the scales of w", self.scale_O, (self.codes_OK.shape[0],))


@dataclass(frozen=True, eq=False)
class FourBits(Quantized):
    """The same with codes of four bits (four_bits.py): codes (O, 64 chunks) uint8."""

    groups_CO: Array  # uint16, the scales of the groups
    K: int
    four_bits: str  # the kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scale_O.shape[0], self.K

    @property
    def size(self) -> int:
        return self.scale_O.shape[0] * self.K

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def kind(self) -> str:
        return self.four_bits

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.codes_OK, self.scale_O, self.groups_CO

    def rows(self, first: int, last: int) -> "FourBits":
        some = cast(FourBits, super().rows(first, last))
        return replace(some, groups_CO=self.groups_CO[:, first:last].copy())

    def check(self, op: str, K: int | None) -> None:
        O, chunks = self.scale_O.shape[0], chunks_of(self.K)  # noqa: E741
        check(K in (None, self.K), f"{op}: w has {self.K} columns, expected {K}")
        check_array(op, "the codes of w", self.codes_OK, (O, CHUNK // 2 * chunks), ["uint8"])
        check_array(op, "the groups of w", self.groups_CO, (chunks, O), ["uint16"])
        check_array(op, "the scales of w", self.scale_O, (O,))


# ----------------------------------------------------------------------------- reference
def quantize_ref(w_OK, kind):
    """Return codes (O, K), scales (O,) float32.

    A scale is not finite where the row holds NaN or infinity.
    """
    w = wide(w_OK).astype(np.float32, copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        largest_O = np.abs(w).max(axis=1, initial=0)
        scale_O = np.maximum(largest_O / np.float32(LARGEST[kind]), np.float32(LEAST_SCALE))
        scaled = w / scale_O[:, None]
        if kind == "int8":
            return np.rint(scaled).astype(np.int8), scale_O
        return scaled.astype(E4M3).view(np.uint8), scale_O


def dequantize_ref(codes_OK, scale_O, dtype):
    """Return the matrix (O, K) that the codes stand for, in dtype.

    It is computed in dtype, at least float32.
    """
    computed = np.float32
    if np.dtype(dtype) != BFLOAT16:
        computed = np.result_type(np.float32, dtype)
    w = code_values(codes_OK).astype(computed, copy=False) * scale_O[:, None].astype(computed)
    return w.astype(dtype, copy=False)


# ----------------------------------------------------------------------------- kernels
@device
def to_int8(v):
    """Return the whole number nearest to v, |v| <= 127, ties to even."""
    return float_as_int(v + float32(ROUND)) - float_as_int(float32(ROUND))


@device
def to_e4m3(v):
    """Return the bits of the e4m3 nearest to v, |v| <= 448, ties to even."""
    bits = float_as_int(v)
    sign = (bits >> int32(24)) & int32(0x80)
    size = bits & int32(0x7FFFFFFF)  # bits of |v|
    if size < int32(0x3C800000):  # below 2^-6: multiples of 2^-9
        return sign | to_int8(int_as_float(size) * float32(512.0))
    size += int32(0x7FFFF) + ((size >> int32(20)) & int32(1))  # round to 3 fraction bits
    return sign | ((size >> int32(20)) - int32(120 << 3))  # the biases are 127 and 7


@device
def from_int8(code):
    """Return the number that a code stands for."""
    return float32(code)


@device
def from_e4m3(code):
    """Return the number that a code stands for."""
    bits = int32(code)
    placed = ((bits & int32(0x80)) << int32(24)) | ((bits & int32(0x7F)) << int32(20))
    return int_as_float(placed) * float32(2.0**120)


@functools.cache
def make_quantize_kernel(kind: str):
    """Return the kernel that writes codes of this kind."""
    to_code = to_int8 if kind == "int8" else to_e4m3
    Q = LARGEST[kind]

    @kernel(BLOCK)
    def quantize_kernel(codes, scale_O, w, K):
        """Grid O, block BLOCK. Block o owns row o. w: float32 or bf16; codes, w: flat."""
        o = int64(cuda.blockIdx.x)
        partial = cuda.shared.array(MAX_WARPS, float32)
        largest = float32(0.0)
        for k in range(cuda.threadIdx.x, K, BLOCK):
            v = abs(load1(w, o * K + k))
            v = v if v == v else int_as_float(int32(0x7F800000))  # a maximum would lose a NaN
            largest = v if v > largest else largest
        scale = block_max(largest, partial) / float32(Q)
        scale = scale if scale > float32(LEAST_SCALE) else float32(LEAST_SCALE)
        if cuda.threadIdx.x == 0:
            scale_O[o] = scale
        for k in range(cuda.threadIdx.x, K, BLOCK):
            codes[o * K + k] = to_code(load1(w, o * K + k) / scale)

    return quantize_kernel


@functools.cache
def make_dequantize_naive_kernel(kind: str, USED: bool = False):
    """Return the kernel for rows of any width. USED: as in make_is_used."""
    from_code = from_int8 if kind == "int8" else from_e4m3
    is_used = make_is_used(USED)

    @kernel(BLOCK)
    def dequantize_naive_kernel(w, codes, scale_O, K, counts, each):
        """Grid ceil(O K / BLOCK), block BLOCK. One thread per weight. w, codes: flat."""
        i = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
        if i < w.size and is_used(counts, i // K, each):
            store1(w, i, from_code(codes[i]) * scale_O[i // K])

    return dequantize_naive_kernel


@functools.cache
def make_dequantize_kernel(USED: bool = False):
    """Return the kernel for rows of multiples of EACH. USED: as in make_is_used."""
    is_used = make_is_used(USED)

    @kernel(BLOCK)
    def dequantize_kernel(w, codes, scale_O, K, counts, each):
        """Grid ceil(O K / (EACH BLOCK)), block BLOCK.

        A thread owns EACH weights of one row. w, codes: flat.
        """
        words = cuda.local.array(4, uint32)
        values = cuda.local.array(EACH, float32)
        i = EACH * (int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x)
        if i < w.size and is_used(counts, i // K, each):
            load_codes16(words, codes, i)
            codes_to_floats(values, words, codes)
            scale = scale_O[i // K]
            for j in range(EACH):
                values[j] *= scale
            store8(w, i, values[:8])
            store8(w, i + 8, values[8:])

    return dequantize_kernel


# ----------------------------------------------------------------------------- launchers
def quantize(w_OK: Array, kind: str) -> Quantized:
    """Return the matrix in codes of this kind, one of KINDS. w: float32 or bf16.

    A row with NaN or infinity has no codes: its scale is not finite, which check_finite finds.
    Raises ValueError or TypeError for another kind, shape or dtype.
    """
    check(kind in KINDS, f"quantize: kind {kind!r}, expected one of {', '.join(KINDS)}")
    check_array("quantize", "w", w_OK, (None, None), FLOATS)
    if kind in FOUR_BITS:
        codes_OB, groups_CO, scale_O = quantize_four(w_OK, kind)
        return FourBits(codes_OB, scale_O, w_OK.dtype, groups_CO, w_OK.shape[1], kind)
    O, K = w_OK.shape  # noqa: E741
    if on_host(w_OK):
        codes_OK, scale_O = quantize_ref(w_OK, kind)
    else:
        codes_OK = empty(w_OK, (O, K), CODES[kind])
        scale_O = empty(w_OK, O, np.float32)
        codes = codes_OK.reshape(-1)
        w = w_OK.reshape(-1)
        launch(make_quantize_kernel(kind), O, BLOCK, codes, scale_O, w, K)
    return Quantized(codes_OK, scale_O, w_OK.dtype)


def check_finite(w: Quantized, name: str) -> None:
    """Raise UserError, with the matrix's name, if it held NaN or infinity. Waits for the GPU."""
    bad_O = ~np.isfinite(to_numpy(w.scale_O))
    if bad_O.any():
        raise UserError(
            f"{name} holds NaN or infinity in row {int(bad_O.argmax())}, "
            "so it cannot be quantized: use another copy of the model"
        )


def check_quantized(op: str, w: Quantized, K: int | None = None) -> None:
    """Raise ValueError or TypeError unless w is a consistent matrix of K columns.

    K None: any number.
    """
    w.check(op, K)


def dequantize(w: Quantized, dtype: Any = None) -> Array:
    """Return the matrix (O, K), an array of float32 or bf16; by default in w's dtype."""
    check_quantized("dequantize", w)
    dtype = np.dtype(dtype or w.dtype)
    if on_host(*w.arrays):
        if isinstance(w, FourBits):
            return dequantize_four_ref(w.codes_OK, w.groups_CO, w.scale_O, w.K, w.kind, dtype)
        return dequantize_ref(w.codes_OK, w.scale_O, dtype)
    check(dtype_name(dtype) in FLOATS, f"dequantize: to {dtype}, expected float32 or bf16")
    w_OK = empty(w.codes_OK, w.shape, dtype)
    dequantize_rows(w_OK, w)
    return w_OK


def dequantize_rows(
    w_RK: Array, w: Quantized, first: int = 0, counts_G: Array | None = None
) -> None:
    """Set w_RK, on a GPU, to the R rows of w from `first` on, in its dtype: float32 or bf16.

    counts: int32, of G groups of R / G rows each. A group whose count is 0 is left out: its rows
    keep what is there.
    """
    R, K = w_RK.shape
    used = counts_G is not None
    rows = slice(first, first + R)
    scale_R = w.scale_O[rows]
    codes = w.codes_OK[rows].reshape(-1)
    w_flat = w_RK.reshape(-1)
    skip = (counts_G, R // counts_G.shape[0]) if counts_G is not None else (scale_R, R)
    if isinstance(w, FourBits):
        groups = w.groups_CO.reshape(-1)[first:]  # of a chunk, all rows of w are neighbours
        arrays = w_flat, codes, groups, scale_R
        grid = -(-4 * chunks_of(K) * R // BLOCK)
        four = make_dequantize_four_kernel(w.kind, used)
        launch(four, grid, BLOCK, *arrays, K, w.shape[0], *skip)
        return
    if K % EACH == 0 and on_16_bytes(w_flat, codes):
        grid = -(-R * K // (EACH * BLOCK))
        launch(make_dequantize_kernel(used), grid, BLOCK, w_flat, codes, scale_R, K, *skip)
    else:
        naive_kernel = make_dequantize_naive_kernel(w.kind, used)
        launch(naive_kernel, -(-R * K // BLOCK), BLOCK, w_flat, codes, scale_R, K, *skip)


def kind_of(w: Array | Quantized) -> str:
    """Return the kind of a quantized matrix, "" of an array."""
    return w.kind if isinstance(w, Quantized) else ""


def dense(w: Array, dtype: Any = None) -> Array:
    """Return a matrix as an array: w itself, or dequantized."""
    if isinstance(w, Quantized):
        return dequantize(w, dtype)
    return w
