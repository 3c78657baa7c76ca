"""Exercises of lesson 12: bf16."""

import ml_dtypes
import numpy as np

from .attempt import exercise

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def as_float(bits):
    return np.asarray(bits).astype(np.uint32).view(np.float32)


@exercise(
    "12.1", "narrow_kernel",
    first_step="the upper half of the 32 bits is bits >> 16. What must you add before the shift so that it rounds instead of truncating?",
    hints={
        "OutOfBoundsError": "Threads past the end do nothing: if i < y_n.size.",
        "RaceError": "Thread i owns y[i]: i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x.",
    },
)  # fmt: skip
def narrow_kernel(e):
    draws = np.asarray(e.normal(70)).view(np.uint32)
    upper = (
        np.array([0x3F80, 0x3F81, 0x4000, 0x4001, 0xBF80, 0xBF81, 0x0001, 0x7F7E], np.uint32) << 16
    )
    cases = {
        "ordinary numbers": draws,
        "numbers half-way between two bf16 numbers": upper | 0x8000,
        "numbers just below and above half-way": np.concatenate([upper | 0x7FFF, upper | 0x8001]),
        "the largest numbers, infinity, zero": np.array([0x7F7FFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 0xFF7FFFFF], np.uint32),
        "NaN": np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32),
    }  # fmt: skip
    draw = lambda rng: (
        "random bits",
        rng.integers(0, 2**32, 50, np.uint32) & np.uint32(0xFF7FFFFF),
    )
    for case, bits in e.cases(cases.items(), draw):
        bits = np.asarray(bits, np.uint32)
        x, y = e.blank(bits.size, dtype=np.uint32), e.blank(bits.size, dtype=np.uint16)
        x[:] = bits
        block = 32 if bits.size > 32 else 8
        e.run(-(-bits.size // block), block, y, x, case=case)
        got, b = np.asarray(y).astype(np.int64), bits.astype(np.int64)
        nan = (b & 0x7FFFFFFF) > 0x7F800000
        if nan.any():
            number = (got & 0x7FFF) <= 0x7F80
            became = ", ".join(str(v) for v in as_float(got[number] << 16)[:1])
            e.need(
                not number.any(),
                f"A NaN has become {became}: the carry of the rounding changed its exponent. Test for NaN first, and write sign | 0x7FC0.",
            )
            e.same("the bits of y", got.astype(np.float64), ((b >> 16 & 0x8000) | 0x7FC0).astype(np.float64), {
                "The sign of NaN is lost: keep the highest bit, (bits >> 16) & 0x8000.": lambda got: (got == 0x7FC0).all(),
            })  # fmt: skip
            continue
        lowest = (b >> 16) & 1
        want = (b + 0x7FFF + lowest) >> 16
        e.same("the bits of y", got.astype(np.float64), want.astype(np.float64), {
            "All ties were rounded away from zero. Ties to even: a half-way number goes to the neighbour whose lowest kept bit is 0.":
                (b + 0x8000) >> 16,
            "All ties were rounded towards zero. Ties to even: a half-way number goes to the neighbour whose lowest kept bit is 0.":
                (b + 0x7FFF) >> 16,
            "Ties went to odd: add the lowest KEPT bit, (bits >> 16) & 1.": (b + 0x8000 - lowest) >> 16,
            "The lower half was truncated, which rounds towards zero. Add 0x7FFF and the lowest kept bit before the shift.": b >> 16,
            "That is the LOWER half of the bits.": b & 0xFFFF,
            "Infinity has become NaN. Both have all exponent bits set, but only a NaN has a fraction bit set as well.":
                lambda got: (np.isinf(as_float(bits)) & ((got.astype(np.int64) & 0x7FFF) > 0x7F80)).any(),
        })  # fmt: skip


@exercise(
    "12.2", "sgd_step",
    first_step="update the float32 master first; then round it into the bf16 copy.",
    kernel=False,
)  # fmt: skip
def sgd_step(e):
    fixed = (
        ("two large steps", 0.5, 2),
        ("100 steps, each far below bf16's resolution", 2e-4, 100),
    )
    draw = lambda rng: ("several steps", rng.uniform(0.01, 0.3), rng.integers(2, 9))
    for case, scale, steps in e.cases(fixed, draw):
        master = np.asarray(e.normal(40, mean=1.0, scale=0.1)).copy()
        gradients = [np.asarray(e.normal(40, mean=1.0, scale=0.1)).copy() for _ in range(steps)]
        half, lr = master.astype(BFLOAT16), np.float32(scale)
        first, first_half = master.copy(), half.copy()
        e.case(f"{case}, lr = {lr}")
        for g in gradients:
            e.call(master, half, g.copy(), lr)
        e.need(
            master.dtype == np.float32 and half.dtype == BFLOAT16,
            "Write into the given arrays: master[...] = ...",
        )
        want, lost, up, rough = first.copy(), first.copy(), first.copy(), first.copy()
        whole, alone, late = first.copy(), first_half.astype(np.float32), first_half
        narrow = alone
        bf16 = lambda a: a.astype(BFLOAT16).astype(np.float32)
        for g in gradients:
            late = bf16(want)
            want -= lr * g
            whole -= g
            alone = bf16(alone - lr * g)
            narrow = bf16(narrow - bf16(lr * g))
            lost = bf16(lost) - lr * g
            up += lr * g
            rough -= bf16(lr * g)
        e.same("master", master, want, {
            "The master is unchanged: apply the step to it.": first,
            "The step started from the bf16 copy, so everything that bf16 rounds off was lost: start from the master.": lost,
            "The sign is wrong: step against the gradient.": up,
            "The step was rounded to bf16 before it was applied: lr g stays in float32.": rough,
            "The master holds rounded numbers: round only the copy to bf16.": bf16(want),
            "The step was taken in bf16 and then copied to the master, so everything that bf16 rounds off is lost: update the master, then round it into the copy.": alone,
            "The learning rate is missing: the step is lr g.": whole,
        }, rtol=1e-6, atol=0)  # fmt: skip
        e.same("the bf16 copy", half.astype(np.float32), bf16(want), {
            "The copy is unchanged, but the next forward reads it: write it too, after the master: half[...] = ...": first_half.astype(np.float32),
            "The copy was made before the master was updated, so it is one step behind.": late,
            "The copy was updated separately, in bf16: it must be the new master, rounded.":
                lambda got: any(np.array_equal(got, a) for a in (alone, narrow)),
        }, rtol=0, atol=0)  # fmt: skip


@exercise(
    "12.3", "row_sums_kernel",
    first_step="each lane accumulates load1(x, n * C + c) in a float32 variable; then sum over the warp; then call store1 ONCE.",
    allow=("load1", "store1", "warp_sum"),
    hints={
        "RaceError": "Only one lane stores the sum of the row.",
        "CollectiveError": "All lanes of the warp must call warp_sum: call it outside of any `if`.",
        "OutOfBoundsError": "Row n begins at x[n * C]; each lane takes the columns lane, lane + 32, ... below C.",
    },
)  # fmt: skip
def row_sums_kernel(e):
    for N, C in e.cases(((3, 40), (2, 1000), (2, 5)), lambda rng: rng.integers((2, 20), (5, 200))):
        x, y = e.normal(N * C, mean=1.0, scale=0.3, dtype=BFLOAT16), e.blank(N, dtype=BFLOAT16)
        trace = e.run(N, 32, y, x, C, case=f"{N} rows of {C}", trace=True)
        wrote = e.wrote(y)
        got = np.asarray(y).astype(np.float64)
        x_NC = np.asarray(x).astype(np.float64).reshape(N, C)
        want = x_NC.sum(1)
        rounding = np.zeros(N, BFLOAT16)
        for c in range(C):
            rounding = (rounding.astype(np.float32) + x_NC[:, c].astype(np.float32)).astype(
                BFLOAT16
            )
        bits = np.asarray(x).view(np.uint16).astype(np.float64).reshape(N, C)
        stalled = rounding.astype(np.float64)
        e.same("y", got, want, {
            "The sum was rounded to bf16 after each addition: it stalls when the next number is less than half of bf16's "
            "spacing there. Accumulate in a float32 variable, and store once.": stalled if C > 5 else np.empty(0),
            "The bits were added, not the numbers: a kernel sees x[i] as an integer, and load1(x, i) converts it to the number.":
                bits.sum(1).astype(BFLOAT16).astype(np.float64),
            "The bits were added and stored as an integer: load1(x, i) converts bf16 bits to a number, and store1(y_N, n, acc) converts it back.":
                lambda got: np.array_equal(np.asarray(y).view(np.uint16), bits.sum(1).astype(np.int64) & 0xFFFF),
            "The stored bits are not a bf16 number: y[n] = acc writes an integer. Use store1(y_N, n, acc).":
                lambda got: np.allclose(np.asarray(y).view(np.uint16), np.floor(want), atol=2),
            "The sum includes only the first 32 columns: continue in steps of 32.": x_NC[:, :32].sum(1) if C > 32 else np.empty(0),
            "The reads of row n do not begin at n * C: only the first row is read from the right place.":
                lambda got: wrote.all() and np.allclose(got[0], want[0], 2.0**-7) and not np.isclose(got[1:], want[1:], 2.0**-7).any(),
            "That is the mean: do not divide the sum.": want / C,
            "That is the sum of one lane: warp_sum sums over the lanes.": x_NC[:, ::32].sum(1) if C > 32 else np.empty(0),
        }, rtol=2.0**-7)  # fmt: skip
        e.divided(trace, x, N * min(C, 32))
