"""Exercises of lesson 45: codes of fp8 in a kernel, both orientations."""

import numpy as np

from xtrain.kernels.primitives.codes import E4M3, E5M2, nearest_codes
from xtrain.simulator import sim

from .attempt import exercise
from .lesson_34 import F64, INFINITE


# ----------------------------------------------------------------------------- codes in a kernel
def codes_of(values, kind):
    """The codes of float32 numbers / scale, NaN and infinity as 0x7F; -0 as 0"""
    codes = nearest_codes(np.where(np.isfinite(values), values, np.nan), kind)
    return np.where(codes == 0x80, 0, codes).astype(np.uint8)


def plain(codes):
    """-0 as 0, both NaN as 0x7F"""
    codes = np.array(codes).view(np.ndarray)
    return np.where(codes == 0x80, 0, np.where(codes == 0xFF, 0x7F, codes)).astype(np.uint8)


def alternatives(x, scale, kind):
    """-> the codes of x / scale and of x (1 / scale), which may round differently; x with infinite quotients saturates"""
    with np.errstate(all="ignore"):
        quotients = x / scale, x * (np.float32(1) / scale)
    most = np.float32(448.0 if kind is E4M3 else 57344.0)
    return [codes_of(np.where(np.isfinite(x), np.clip(q, -most, most), np.nan).astype(np.float32), kind) for q in quotients]  # fmt: skip


def unchanged(e, given, values):
    for name, now, value in zip(("x", "scale"), given, values):
        e.need(np.array_equal(np.asarray(now).ravel(), np.ravel(value), equal_nan=True),
               f"{name} was changed: the kernel only reads it. The model goes on with these numbers.")  # fmt: skip


@exercise(
    "45.1", "encode_kernel",
    first_step="i = cuda.grid(1), if i < x_n.size: a = abs(x_n[i] / scale_1[0]). Round it as e5m2_code does, with 20 bits dropped.",
    allow=("e5m2_code",),
    hints={
        "OutOfBoundsError": "The last block has threads past the end: `if i < x_n.size`.",
        "TimeoutError": "A search through the 127 codes gives the right one, but takes a hundred steps for each element: compute the code from the bits, as e5m2_code does.",
        "RaceError": "Several threads write counts or largest: cuda.atomic.add(counts_2, 0, 1) and cuda.atomic.max(largest_1, 0, bits).",
        "RaceError between blocks": "Several threads write the same element. Thread i writes codes[i] alone; counts and largest need cuda.atomic.add and cuda.atomic.max.",
    },
)  # fmt: skip
def encode_kernel(e):
    fixed = np.random.default_rng(343)
    normal = lambda n, s=1.0: (s * fixed.normal(size=n)).astype(np.float32)
    every = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    half = (every[1:] + every[:-1]) / 2
    near = np.concatenate([np.nextafter(half, np.float32(side)) for side in (0, 448)])
    sign = lambda x: np.concatenate([x, -x])
    inf, nan = np.inf, np.nan
    cases = (
        ("normal numbers", normal(100), 1.0),
        ("numbers that have a code", sign(every), 1.0),
        ("numbers below 2^-6", normal(70, 0.004), 1.0),
        ("a scale of 1/64", normal(64), 1 / 64),
        ("a scale of 2", sign(every[40:100]), 2.0),
        ("numbers halfway between two", sign(half), 1.0),
        ("numbers next to halfway", sign(near), 1.0),
        ("some beyond 448", np.array([448, 449, -460, -470, 464, 465, 480, -500, 1e6, -3e38, 1, -2], np.float32), 1.0),
        ("large numbers, the scale is tiny", np.array([1e30, -3e38, 2.0**-117, -(2.0**-120)], np.float32), 2.0**-126),
        ("infinity and NaN", np.array([1, inf, -inf, nan, -2, 500, nan], np.float32), 1.0),
        ("NaN alone in the second block", np.append(normal(64), np.float32(nan)), 1.0),
        ("zeros", np.zeros(33, np.float32), 0.5),
        ("one number", np.array([-0.4], np.float32), 0.03125),
        ("the largest is negative", np.array([1, -5, 2], np.float32), 1.0),
    )  # fmt: skip

    def draw(rng):
        x = rng.normal(size=int(rng.integers(65, 150))) * 2.0 ** rng.integers(-8, 10)
        x[rng.random(x.size) < 0.05] = inf
        return "random numbers", x, float(rng.uniform(0.1, 3))

    for case, x, scale in e.cases(cases, draw):
        x, scale = np.array(x, np.float32), np.float32(scale)
        codes, largest = e.blank(x.size, dtype=np.uint8), sim(np.zeros(1, np.int32))
        given = sim(x.copy()), sim(np.array([scale]))
        before = np.array([3, 10], np.int64)  # of other matrices
        counts = sim(before.copy())
        e.run(-(-x.size // 64), 64, codes, largest, counts, *given, case=f"{case}, n = {x.size}, scale {scale:g}")  # fmt: skip
        with np.errstate(all="ignore"):
            _judge_codes(e, codes, x, scale)
            _judge_largest(e, int(largest[0]), x, scale)
            _judge_counts(e, np.asarray(counts) - before, x, scale)
        unchanged(e, given, (x, scale))


def _judge_codes(e, codes, x, scale):
    unwritten = ~e.wrote(codes)
    if unwritten.any():
        e.need(False, f"codes[{int(np.flatnonzero(unwritten)[0])}] was never written. Thread i has element i = cuda.grid(1).")  # fmt: skip
    first, second = alternatives(x, scale, E4M3)
    got = plain(codes)
    want = np.where(got == second, second, first)
    v = (x / scale).astype(np.float32)
    a, finite = np.abs(v).astype(F64), np.isfinite(x)
    table = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(F64)
    halves = (table[1:] + table[:-1]) / 2
    limited = np.minimum(np.where(finite, a, 0), 448)
    signed = lambda c: np.where(finite, c + 0x80 * ((v < 0) & (c > 0)), 0x7F).astype(int)
    below = signed(np.searchsorted(table, limited, "right") - 1)
    above = signed(np.searchsorted(table, limited, "left"))
    up = signed(np.minimum(np.searchsorted(halves, limited, "right"), 126))
    down = signed(np.searchsorted(halves, limited, "left"))
    small, outside = limited < 2.0**-6, finite & (a > 448)
    wrong = got.astype(int) != want
    only = lambda mask: (wrong & mask).any() and not (wrong & ~mask).any()
    other = lambda y: alternatives(x, np.float32(y), E4M3)[0]
    no_rint = np.where(a < 2.0**-6, 0, first)
    e.same("codes", got.astype(float), want.astype(float), {
        "Infinity has become the largest number, 448: then nobody sees that something is wrong. Both infinities become NaN, code 0x7F.":
            lambda got: only(np.isinf(x)) and (got[np.isinf(x)] % 128 == 0x7E).all(),
        "NaN has become a number: its code is 0x7F.": lambda got: only(np.isnan(x)),
        "Infinity and NaN get the code 0x7F: `abs(x_n[i]) < float32(np.inf)` is false for both.": lambda got: only(~finite),
        "x is finite, but x / scale is not: it is beyond 448 and saturates. Ask whether x itself is finite.": lambda got: only(finite & ~np.isfinite(v)),
        "Numbers beyond 448 must saturate at code 0x7E: 0x7F is NaN, and more would run into the sign.": lambda got: only(outside) or only(outside | (limited >= 448)),
        "Numbers that are not negative have the sign: only a negative number has the highest bit set.": lambda got: (got % 128 == want % 128).all() and (got[wrong] > 0x80).all(),
        "The negative of a code is not the code of the negative number: set the highest bit, code | 0x80.": lambda got: (got[v > 0] == want[v > 0]).all() and (got == np.where(v < 0, -(want.astype(int) % 128) % 256, want)).all(),
        "The sign is missing: a negative number has the highest bit set, code | 0x80.": lambda got: (got % 128 == want % 128).all(),
        "The scale is missing: the code is that of x / scale.": lambda got: scale != 1 and (got == plain(other(1.0))).all(),
        "Multiplied by the scale: the code is that of x / scale.": lambda got: scale != 1 and (got == other(1 / scale)).all(),
        "Cut off: add half of what is dropped before the shift, so that it rounds to the NEAREST.": lambda got: (got == below).all() or (got == np.where(small, want, below)).all(),
        "Halfway between two numbers the even code is taken: add 0x7FFFF and the lowest bit that is kept, (bits >> 20) & 1.":
            lambda got: ((got == up) | (got == down) | (got == want)).all(),
        "Rounded up: half of the 20 bits that are dropped is 0x80000, so add one less, 0x7FFFF, and the lowest bit that is kept.":
            lambda got: (got == above).all() or (got == np.where(small, want, above)).all(),
        "Numbers below 2^-6 have become 0: they are subnormal, multiples of 2^-9.": lambda got: (got % 128 == no_rint % 128)[small].all() and only(small),
        "Below 2^-6 the steps stay 2^-9: there the bits of a are no code. Adding 16384.0 rounds to such a step, and the lowest bits of the sum count them.": lambda got: only(small),
        "Each code is too large or too small by whole exponents: float32 counts from -127, e4m3 from -7, so subtract 120 << 3.":
            lambda got: ((got.astype(int) - want)[finite & ~small & ~outside] % 8 == 0).all(),
        "This is e5m2: e4m3 keeps 3 bits of fraction, so 20 bits are dropped.": lambda got: (got == codes_of(np.where(finite, v, np.nan), E5M2)).mean() > 0.9,
    }, rtol=0, atol=0)  # fmt: skip


def _judge_largest(e, got, x, scale):
    size = np.abs(x)
    bits = lambda value: int(np.float32(value).view(np.int32))
    finite = size[np.isfinite(size)]
    want = INFINITE if finite.size < x.size else bits(size.max())
    if got == want or (want == INFINITE and got > INFINITE):  # the bits of a NaN are larger
        return
    value = np.int32(got).view(np.float32)
    why = "cuda.atomic.max(largest_1, 0, float_as_int(abs(x_n[i]))) by every thread."
    if got == 0:
        why = "It was not noted at all. " + why
    elif want == INFINITE and finite.size and got == bits(finite.max()):
        why = "A number that is not finite is lost: then largest is infinite, 0x7F800000, so that the scale of the next step does not follow it."
    elif finite.size and got == bits(np.minimum(finite.max(), np.float32(448) * scale)):
        why = "It is that of the numbers after they were limited to 448: the next scale needs the largest of x itself."
    elif scale != 1 and finite.size and np.isclose(value, finite.max() / scale, 1e-5):
        why = "It is that of x / scale: the next scale needs the largest of x itself."
    elif finite.size and np.isclose(value, min(finite.max() / scale, np.float32(448))):
        why = "It is that of the scaled, limited numbers: the next scale needs the largest of x itself."
    elif x.max() > 0 and got == bits(x.max()):
        why = "It is the largest x, not the largest |x|: take abs."
    elif finite.size and got == int(finite.max()):
        why = "It is the number itself, cut to an integer. Its bits are needed: float_as_int(abs(x_n[i]))."
    elif got < 0:
        why = "These are bits with a sign: take abs before float_as_int."
    raise e.wrong(f"largest[0] is {got:#x}, the bits of {value:g}; expected {want:#x}, the bits of {np.int32(want).view(np.float32):g}. {why}")  # fmt: skip


def _judge_counts(e, got, x, scale):
    finite = np.isfinite(x)
    v = np.abs(x[finite] / scale)
    clamped, bad = int((v > 448).sum()), int((~finite).sum())
    if tuple(got) == (clamped, bad):
        return
    why = "counts[0] counts finite x with |x / scale| > 448, counts[1] those that are not finite. Add to what is there: cuda.atomic.add(counts_2, 0, 1)."
    if (got < 0).any():
        why = "The counts were overwritten: they count for all matrices of a model. " + why
    elif tuple(got) == (0, 0):
        why = "Nothing was counted. " + why
    elif tuple(got) == (bad, clamped):
        why = "The two are exchanged: counts[0] is for numbers that saturate."
    elif tuple(got) == (clamped + bad, bad) or tuple(got) == (
        clamped + int(np.isinf(x).sum()),
        bad,
    ):
        why = "A number that is not finite does not saturate as well: it is counted once, in counts[1]."
    elif tuple(got) == (int((v >= 448).sum()), bad):
        why = "448 itself has a code and does not saturate: count numbers beyond it, > 448."
    elif got[0] == clamped and got[1] == int(np.isinf(x).sum()):
        why = "NaN is not finite either, but it is not counted."
    elif got[0] == clamped and got[1] == int(np.isnan(x).sum()):
        why = "Infinity is not finite either, but it is not counted."
    elif got[1] == bad and got[0] in ((x[finite] / scale > 448).sum(), (x[finite] / scale < -448).sum()):  # fmt: skip
        why = "Those of one sign are missing: take |x / scale|."
    elif tuple(got) == (int((v > 464).sum()), bad) or tuple(got) == (int((v >= 464).sum()), bad):
        why = "Numbers from 448 to 464 are counted, too: they are beyond 448, though 448 is the nearest number."
    elif got[1] == bad and got[0] == int((np.isfinite(x / scale) & finite & (np.abs(x / scale) > 448)).sum()):  # fmt: skip
        why = "x is finite where only x / scale overflows: that saturates, and is counted in counts[0]."
    raise e.wrong(f"counts grew by {got.tolist()}; expected {[clamped, bad]}. {why}")


# ----------------------------------------------------------------------------- both orientations
SEVERAL = "One thread writes an element of codes_NK and of codes_KN. Block (i, j) has columns from 32 i and rows from 32 j on."


@exercise(
    "45.2", "both_kernel",
    first_step="tile = cuda.shared.array((32, 36), uint8). A loop over the rows of the tile writes codes_NK and the tile; then a barrier; then a loop over its columns.",
    allow=("e5m2_code",),
    each=4,
    hints={
        "OutOfBoundsError": "The last tiles reach past N or K: n0 + r < N and k0 + x < K when rows are written; k0 + c < K and n0 + x < N when columns are. In the grid, x counts tiles of columns (K), y tiles of rows (N).",
        "RaceError in shared memory": "A thread reads from the tile what another one writes, and no barrier lies between: cuda.syncthreads() after the tile is complete.",
        "RaceError between blocks": f"Two blocks write the same element. {SEVERAL}",
        "RaceError": f"Two threads write the same element. {SEVERAL}",
        "DeadlockError": "All threads must reach the barrier: take cuda.syncthreads() out of the `if` and out of the loop, and do not `return` before it.",
        "UninitializedError": "The tile is read before it is complete: cuda.syncthreads() after all threads have written. Or it was never written at this place: tile[row, column], all 32 rows, in steps of 8, where n0 + r < N and k0 + x < K.",
    },
)  # fmt: skip
def both_kernel(e):
    fixed = (
        ("one tile", 32, 32, 1.0, 1.0),
        ("ragged edges", 40, 70, 1.0, 1.0),
        ("two tiles", 64, 32, 1.0, 0.25),
        ("fewer rows than a block has", 5, 33, 1.0, 2.0),
        ("one row", 1, 50, 1.0, 1.0),
        ("one column", 45, 1, 1.0, 1.0),
        ("large and small numbers", 32, 40, 1e6, 1.0),
        ("numbers of 1e-5", 33, 32, 1e-5, 2.0**-20),
    )
    draw = lambda rng: ("random numbers", *map(int, rng.integers(20, 65, 2)), float(rng.uniform(0.1, 9)), float(rng.uniform(0.1, 2)))  # fmt: skip
    for case, N, K, size, scale in e.cases(fixed, draw):
        x, scale = e.normal(N, K, mean=0.0, scale=size), np.float32(scale)
        plain_x, scale_1 = np.array(x), sim(np.array([scale]))
        codes, columns = e.blank(N, K, dtype=np.uint8), e.blank(K, N, dtype=np.uint8)
        grid = -(-K // 32), -(-N // 32)
        trace = e.run(grid, (32, 8), codes, columns, x, scale_1, case=f"{case}, N = {N}, K = {K}, scale {scale:g}", trace=True)  # fmt: skip
        first, second = alternatives(plain_x, scale, E5M2)
        for name, array, turned in (("codes_NK", codes, False), ("codes_KN", columns, True)):
            got, want = plain(array), np.where(plain(codes) == second, second, first)
            want = want.T if turned else want
            _judge_orientation(e, name, array, got, want, plain_x, scale, turned)
        unchanged(e, (x, scale_1), (plain_x, scale))
        _judge_accesses(e, trace, (x, codes, columns), N, K)


def _judge_orientation(e, name, array, got, want, x, scale, turned):
    written = e.wrote(array)
    if not written.any():
        raise e.wrong(f"{name} was never written." + " The transposed codes come from the tile, after a barrier." * turned)  # fmt: skip
    if not written.all():
        axis = 1 if turned else 0  # of the rows n
        rows = written.any(1 - axis)
        at = tuple(map(int, np.argwhere(~written)[0]))
        why = "The tile has 32 rows and the block 8 rows of threads: every thread goes on in steps of 8."
        if rows.size > 8 and not rows.all() and not rows[8:32].any():
            why += f" Only rows {int(np.flatnonzero(rows)[0])} to {int(np.flatnonzero(rows)[-1])} were written."
        elif written.shape[1 - axis] > 32 and not written.any(axis)[32:].any():
            why = "Only the first 32 columns were written: block (i, j) begins at column 32 i."
        elif rows.all() and not written.any(axis).all():
            why = "Whole columns are missing: blockIdx.x counts tiles of columns (K), blockIdx.y tiles of rows (N)."
        elif rows.size > 32 and not rows[32:].any():
            why = "Only the first 32 rows were written: block (i, j) begins at row 32 j."
        raise e.wrong(f"{name}[{at[0]}, {at[1]}] was never written ({int((~written).sum())} of {written.size} elements). {why}")  # fmt: skip
    y = x.T if turned else x
    codes = lambda values: plain(codes_of(np.clip(values, -57344, 57344).astype(np.float32), E5M2))
    tiles_kept = np.zeros_like(want)
    if turned:  # each tile is in its place, but not transposed in itself
        rows = want.T
        for n in range(0, rows.shape[0], 32):
            for k in range(0, rows.shape[1], 32):
                part = rows[n : n + 32, k : k + 32]
                h, w = part.shape
                if h == w:
                    tiles_kept[k : k + w, n : n + h] = part
    flat = want.T.reshape(want.shape) if turned else want
    e.same(name, got.astype(float), want.astype(float), {
        "The tile is not transposed: write tile[r, x], and read tile[x, c].": lambda got: turned and want.shape[0] > 1 and (got == tiles_kept)[tiles_kept > 0].all() and tiles_kept.any(),
        "These are the codes in the order of codes_NK: codes_KN[k, n] is the code of x[n, k].": lambda got: turned and min(want.shape) > 1 and np.array_equal(got, flat),
        "The scale is missing: the code is that of x / scale.": lambda got: scale != 1 and np.array_equal(got, codes(y)),
        "Multiplied by the scale: the code is that of x / scale.": lambda got: scale != 1 and np.array_equal(got, codes(y * scale)),
        "These are not codes, but numbers cut to whole ones: e5m2_code(x / scale).": lambda got: np.mean(got == plain(((y / scale).astype(np.int64) % 256).astype(np.uint8))) > 0.9,
    }, rtol=0, atol=0)  # fmt: skip


def _judge_accesses(e, trace, arrays, N, K):
    x, codes, columns = (e.name(a) for a in arrays)
    reads = len(trace.of(x, write=False))
    e.need(
        reads <= N * K,
        f"The values are right, but {x} is read {reads / (N * K):.3g} times over, and each number is rounded as often. Read it once: the transposed "
        "codes come from the tile in shared memory.",
    )
    back = len(trace.of(codes, write=False))
    e.need(
        not back,
        f"The values are right, but {codes} is read back from global memory: the transposed codes come from the tile in shared memory.",
    )
    if N < 32 or K < 32:
        return
    for name, write, width in ((x, False, 4), (codes, True, 1), (columns, True, 1)):
        requests = trace.requests(name, write)
        # 32 neighbours lie in one sector per 32 bytes, and in one more where they are not aligned
        most = max(len({a.index * a.bytes // 32 for a in r}) for r in requests)
        e.need(
            most <= width + 2,
            f"The values are right, but one instruction of a warp {'writes' if write else 'reads'} {most} sectors of {name}: the 32 threads of one "
            "threadIdx.y must touch 32 neighbours of a row. For codes_KN that is along n, so threadIdx.x is the row of the tile there.",
        )
    ways = max(trace.bank_conflicts(), default=1)
    if ways > 2:
        e.remark(
            f"A warp's access to the tile takes {ways} passes, because its bytes lie in few banks. With 36 bytes per row it takes one."
        )
