"""Numbers of one byte or of four bits: loaded as words, unpacked where they are used.

quantize.py and four_bits.py say what the bits mean.

    load_codes16(words, x, i)          words[0:4] = x[i : i + 16]; i: a multiple of 16; also
                                       load_codes8: 2 words, load_codes4: 1 word
    store_codes8(x, i, words)          x[i : i + 8] = words[0:2]; i: a multiple of 8; also
                                       store_codes4: 1 word, store_codes16: 4 words
    codes_to_floats(values, words, x)  values[0:16] = the 16 codes of 4 words as float32
    codes_to_bf16(pairs, word, x)      pairs[0:2] = the 4 codes of one word / BF16_UNIT, as pairs
                                       of bf16. Compute capability 8.0
    e4m3_codes4(a, b, c, d)            a word of the 4 codes nearest to float32, ties to even, a the
                                       lowest byte. Beyond the largest code: that one; NaN stays
                                       NaN. Compute capability 8.9; also e5m2_codes4
    int4_to_bf16(pairs, word, zeros)   pairs[0:4] = the 8 codes of a word, 0 ... 15, less a zero
                                       point, / BF16_UNIT; zeros: int4_zeros(zero point)
    nf4_to_bf16(pairs, word)           pairs[0:4] = the levels that the 8 codes of a word stand for
    transpose_codes(words)             words[0:4], 4 rows of 4 codes, become the 4 columns
    interleave_codes(words)            words[0:2], codes a b c d and A B C D, become a A b B and
                                       c C d D

x is flat, int8 or uint8. Its dtype says what a code is: int8 a whole number, uint8 the bits of an
e4m3 (as uint16 is a bf16). Every int8 and every e4m3 is a bf16, so nothing is rounded here; the
scale of the row is applied to the sum.

A conversion instruction is slow: at the speed of an H200's memory a multiprocessor gets 18 codes a
cycle, and converts 16 integers to float32 in one. So bits are moved to where a float has them, by
instructions of which 64 to 128 run in a cycle:

    int8 -> float32   0x4B0000uu is the float 2^23 + uu. With uu = code + 128: one byte permutation,
                      one subtraction
    int8 -> bf16      0x00uu is the bf16 uu 2^-133: for bytes below 128 a subnormal number, and the
                      next exponent, which is for bytes from 128 on, has the same step. With uu =
                      code + 128, times 2^127 and less 2 is code / 64. Both halves of a register at
                      once: for 4 codes one mask, 2 permutations and 2 multiply-adds
    e4m3              sign, exponent and fraction move to their places in the wider float. The
                      exponent is then too small by the difference of the biases, 127 - 7 = 120,
                      also where it is 0 (subnormal numbers): times 2^120. As bf16 times 2^114, so
                      that both kinds have one unit. A byte permutation can fill a byte with copies
                      of a sign bit: shifted by 4, sign and number are where they belong. For 4
                      codes 2 permutations, 2 shifts, 2 masks and 2 products

    int4 -> bf16      the bits of a code, masked, are such a subnormal number, too: code 2^-133, or
                      16 times as much in the next nibble. Pair j has the codes of nibbles j and
                      j + 4: times 2^127 or 2^123, less z / 64. For 8 codes 1 shift, 4 masks, 4
                      multiply-adds, each with one constant: a second one would need a move
    nf4 -> bf16       the codes themselves select bytes: a permutation looks 4 codes up among 8, so
                      two and a choice by the upper bit of each code among 16, for the upper and the
                      lower bytes of the levels. The choice is by a mask of bits 0 to 6 of a byte: a
                      permutation of bytes 0x80 gives 0x80, or with the upper bit copies of the sign,
                      0xFF. So bit 7 must not differ between the two: NF4_LEVELS are in an order in
                      which levels i and i + 8 have the same sign and the same lowest bit of the
                      exponent. For 8 codes 14 permutations, 6 logical operations, 1 shift

BF16_UNIT: no bf16 is 2^133, so codes_to_bf16 gives codes / 64; the scale of a row, times 64, makes
up for it, exactly.
"""

import ml_dtypes
import numpy as np

from ...simulator import simulates
from ..runtime.compiler import float32, int8, uint32
from .intrinsics import GLOBAL, instruction, intrinsic

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
NAN_CODE = 0x7F  # what a conversion of NaN gives, in both kinds
BF16_UNIT = 64.0
# QLoRA's levels: code -> level
_NF4_LEVELS = np.array(
    [
        [0.079580300, 0.44070983, 0.16093020, 0.56261700],
        [-1.0, -0.28444138, -0.69619280, -0.18477343],
        [0.33791524, 1.0, 0.24611230, 0.72295684],  # levels i and i + 8: see above
        [-0.39491749, -0.091050036, -0.52507305, -0.0],
    ],
    np.float32,
).reshape(16)
# The same as float32 numbers that are bf16 numbers, which changes them by less than 1/256: the lower
# half of the bits is rounded to the nearest, ties to even. Without ml_dtypes: a browser imports this
# file and has no bf16 (lessons/browser/python).
_BITS = _NF4_LEVELS.view(np.uint32)
NF4_LEVELS = ((_BITS + 0x7FFF + (_BITS >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


# ----------------------------------------------------------------------------- code generation
def _permute(code, a, b, selector):
    """Return 4 bytes of the pair a (bytes 0 to 3), b (bytes 4 to 7). "prmt"

    The selector names one per hexadecimal digit, the lowest byte last; 8 more: copies of the sign
    bit of that byte.
    """
    return code.asm(f"prmt.b32 $0, $1, $2, {selector:#06x};", uint32, [a, b], effect=False)


def _fma_pairs(code, a, b, c):
    """Return a b + c for pairs of bf16; b and c are bits.

    "fma" for half precision: subnormal numbers are not flushed.
    """
    return code.asm("fma.rn.bf16x2 $0, $1, $2, $3;", uint32, [a, b, c], effect=False)


def _int8_floats(code, word):
    shifted = code.xor(word, 0x80808080)  # code + 128
    for j in range(4):
        bits = _permute(code, shifted, 0x4B000000, 0x7540 | j)
        yield code.fsub(code.bitcast(bits, float32), 2.0**23 + 128)


def _e4m3_floats(code, word):
    for j in range(4):
        top = code.and_(code.shl(word, 24 - 8 * j), 0xFF000000)
        rest = code.and_(code.lshr(top, 4), 0x07F00000)
        bits = code.or_(code.and_(top, 0x80000000), rest)
        yield code.fmul(code.bitcast(bits, float32), 2.0**120)


def _int8_pairs(code, word):
    shifted = code.xor(word, 0x80808080)  # code + 128
    for selector in (0x4140, 0x4342):
        bits = _permute(code, shifted, 0, selector)
        yield _fma_pairs(code, bits, 0x7F007F00, 0xC000C000)  # 2^127, -2


def _e4m3_pairs(code, word):
    for selector in (0x9180, 0xB3A2):  # from 8 on: copies of a sign bit
        bits = code.and_(code.shl(_permute(code, word, 0, selector), 4), 0x87F087F0)
        yield _fma_pairs(code, bits, 0x78807880, 0x80008000)  # 2^114, -0


def _select(code, table, word):
    """Return the bytes of a table of 16 for the lower 4 codes of a word; bit 7: see above."""
    permute = lambda a, b, order: code.asm(
        "prmt.b32 $0, $1, $2, $3;", uint32, [int(a), int(b), order], effect=False
    )
    words = table.view(np.uint32)
    index = code.and_(word, 0x7777)
    lower = permute(words[0], words[1], index)
    upper = permute(words[2], words[3], index)
    mask = permute(0x80808080, 0x80808080, word)
    return code.or_(code.and_(upper, mask), code.and_(lower, code.xor(mask, 0xFFFFFFFF)))


@intrinsic(word=uint32, zeros=uint32)
def int4_to_bf16(code, pairs, word, zeros):
    """Set pairs[0:4] to the 8 codes of a word less the zero point / BF16_UNIT."""
    for_pair = []
    for half in (word, code.lshr(word, 8)):
        for mask, factor in ((0x000F000F, 0x7F007F00), (0x00F000F0, 0x7D007D00)):
            for_pair.append(_fma_pairs(code, code.and_(half, mask), factor, zeros))
    code.set_registers(pairs, for_pair)


@intrinsic(returns=uint32, zero=uint32)
def int4_zeros(code, zero):
    """Return -zero / BF16_UNIT as a pair of bf16; zero: 0 ... 15."""
    return _fma_pairs(code, code.mul(zero, 0x10001), 0xFF00FF00, 0x80008000)  # -2^127, -0


@intrinsic(word=uint32)
def nf4_to_bf16(code, pairs, word):
    """Set pairs[0:4] to the levels of the 8 codes of a word, in the order of columns."""
    bytes_of = NF4_LEVELS.view(np.uint8).reshape(16, 4)[:, 2:]
    lower, upper = (np.ascontiguousarray(bytes_of[:, i]) for i in range(2))
    for_pair = []
    for half in (word, code.lshr(word, 16)):
        both = _select(code, lower, half), _select(code, upper, half)
        for_pair += [_permute(code, *both, order) for order in (0x5140, 0x7362)]
    code.set_registers(pairs, for_pair)


def _load_codes(name, count):
    def load(code, words, x, i):
        code.set_registers(words, code.load(code.pointer(x, i), uint32, GLOBAL, count // 4))

    return intrinsic(name=name)(load)


load_codes4 = _load_codes("load_codes4", 4)
load_codes8 = _load_codes("load_codes8", 8)
load_codes16 = _load_codes("load_codes16", 16)


@intrinsic()
def codes_to_floats(code, values, words, x):
    """Set values[0:16] to the codes in words[0:4]."""
    unpack = _int8_floats if x.type.dtype == int8 else _e4m3_floats
    loaded = code.registers(words, 4)
    code.set_registers(values, [value for word in loaded for value in unpack(code, word)])


@intrinsic(word=uint32)
def codes_to_bf16(code, pairs, word, x):
    """Set pairs[0:2] to the codes of a word / BF16_UNIT, in their order."""
    unpack = _int8_pairs if x.type.dtype == int8 else _e4m3_pairs
    code.set_registers(pairs, unpack(code, word))


# ----------------------------------------------------------------------------- float32 to codes
def _codes4(kind):
    """Return the conversion to this kind.

    PTX ISA, cvt: the first of two sources becomes the upper byte.
    """
    pair = f"cvt.rn.satfinite.{kind}x2.f32"
    text = (
        f"{{ .reg .b16 low, high; {pair} low, $2, $1; {pair} high, $4, $3; "
        "mov.b32 $0, {low, high}; }"
    )
    return instruction(
        f"{kind}_codes4", text, uint32, pure=True, a=float32, b=float32, c=float32, d=float32
    )


e4m3_codes4 = _codes4("e4m3")
e5m2_codes4 = _codes4("e5m2")


@intrinsic()
def transpose_codes(code, words):
    """Make byte j of word i byte i of word j: first pairs of rows, then pairs of pairs."""
    a, b, c, d = code.registers(words, 4)
    ab_low, ab_high = (_permute(code, a, b, order) for order in (0x5140, 0x7362))
    cd_low, cd_high = (_permute(code, c, d, order) for order in (0x5140, 0x7362))
    pairs = ((ab_low, cd_low), (ab_high, cd_high))
    columns = [_permute(code, *pair, order) for pair in pairs for order in (0x5410, 0x7632)]
    code.set_registers(words, columns)


@intrinsic()
def interleave_codes(code, words):
    """Take the bytes of two words in turn."""
    pair = code.registers(words, 2)
    code.set_registers(words, [_permute(code, *pair, order) for order in (0x5140, 0x7362)])


def _store_codes(name, count):
    def store(code, x, i, words):
        values = code.registers(words, count // 4)
        code.store(code.pointer(x, i), values, GLOBAL, count // 4)

    return intrinsic(name=name)(store)


store_codes4 = _store_codes("store_codes4", 4)
store_codes8 = _store_codes("store_codes8", 8)
store_codes16 = _store_codes("store_codes16", 16)


# ------------------------------------------------------------------------ the same in the simulator
def nearest_codes(values: np.ndarray, dtype) -> np.ndarray:
    """Return the codes (uint8) of float32 numbers as the hardware's conversion gives them.

    dtype: E4M3 or E5M2.
    """
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    codes = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(NAN_CODE), codes)


def code_values(codes: np.ndarray) -> np.ndarray:
    """Return the numbers that int8 or e4m3 codes stand for, in float32."""
    if codes.dtype != np.int8:
        codes = codes.view(E4M3)
    return codes.astype(np.float32)


def nibbles(words: np.ndarray) -> np.ndarray:
    """Return the 8 codes of each word, in the order of its bits: (..., 8) uint8."""
    return (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.uint8)


def _check_multiple(site, i, count):
    if i % count:
        raise ValueError(
            f"{site.what}: access to {count} codes at element {i}: "
            f"the index must be a multiple of {count}"
        )


def _simulated_load(count):
    def simulated(thread, site, words, x, i):
        _check_multiple(site, i, count)
        codes = np.array(thread.load_elements(x, i, count, site), x.dtype)
        thread.store_registers(words, codes.view(np.uint32), site)

    return simulated


simulates(load_codes4)(_simulated_load(4))
simulates(load_codes8)(_simulated_load(8))
simulates(load_codes16)(_simulated_load(16))


def _codes(words, x):
    return np.array(words, np.uint32).view(x.dtype)


@simulates(codes_to_floats)
def _simulated_floats(thread, site, values, words, x):
    codes = _codes(thread.load_registers(words, 4, site), x)
    thread.store_registers(values, code_values(codes), site)


@simulates(codes_to_bf16)
def _simulated_pairs(thread, site, pairs, word, x):
    values = (code_values(_codes([word], x)) / np.float32(BF16_UNIT)).astype(ml_dtypes.bfloat16)
    thread.store_registers(pairs, values.view(np.uint32), site)


def _store_pairs(thread, site, pairs, values):
    thread.store_registers(pairs, values.astype(ml_dtypes.bfloat16).view(np.uint32), site)


@simulates(int4_to_bf16)
def _simulated_int4(thread, site, pairs, word, zeros):
    zero = np.array([zeros], np.uint32).view(ml_dtypes.bfloat16).astype(np.float32)
    codes = nibbles(np.array(word, np.uint32)).reshape(2, 4).T / np.float32(BF16_UNIT)
    _store_pairs(thread, site, pairs, (codes + zero).reshape(-1))


@simulates(int4_zeros)
def _simulated_zeros(thread, site, zero):
    pair = np.full(2, -float(zero) / BF16_UNIT, ml_dtypes.bfloat16)
    return pair.view(np.uint32)[0]


@simulates(nf4_to_bf16)
def _simulated_nf4(thread, site, pairs, word):
    _store_pairs(thread, site, pairs, NF4_LEVELS[nibbles(np.array(word, np.uint32))])


def _simulated_codes4(dtype):
    def simulated(thread, site, *values):
        codes = nearest_codes(np.array(values, np.float32), dtype)
        return codes.view(np.uint32)[0]

    return simulated


simulates(e4m3_codes4)(_simulated_codes4(E4M3))
simulates(e5m2_codes4)(_simulated_codes4(E5M2))


@simulates(transpose_codes)
def _simulated_transpose(thread, site, words):
    rows = np.array(thread.load_registers(words, 4, site), np.uint32).view(np.uint8)
    columns = np.ascontiguousarray(rows.reshape(4, 4).T).reshape(-1).view(np.uint32)
    thread.store_registers(words, columns, site)


@simulates(interleave_codes)
def _simulated_interleave(thread, site, words):
    rows = np.array(thread.load_registers(words, 2, site), np.uint32).view(np.uint8)
    pairs = np.ascontiguousarray(rows.reshape(2, 4).T).reshape(-1).view(np.uint32)
    thread.store_registers(words, pairs, site)


def _simulated_store(count):
    def simulated(thread, site, x, i, words):
        _check_multiple(site, i, count)
        codes = np.array(thread.load_registers(words, count // 4, site), np.uint32)
        thread.store_elements(x, i, codes.view(np.uint8), site)

    return simulated


simulates(store_codes4)(_simulated_store(4))
simulates(store_codes8)(_simulated_store(8))
simulates(store_codes16)(_simulated_store(16))
