"""The judges' own tables of fp8, which need NumPy alone, against ml_dtypes."""

import ml_dtypes
import numpy as np

from xtrain import lesson

judge = lesson.load_checks("lesson_29")
CODES = np.arange(256, dtype=np.uint8)


def test_the_numbers_of_all_codes():
    for table, kind in (
        (judge.TABLE, ml_dtypes.float8_e4m3fn),
        (judge.E5M2, ml_dtypes.float8_e5m2),
    ):
        want = CODES.view(kind).astype(np.float64)
        assert np.array_equal(table, want, equal_nan=True)
        assert np.array_equal(np.signbit(table[[0, 128]]), [False, True])


def test_the_nearest_code():
    halves = ((judge.TABLE[:126] + judge.TABLE[1:127]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    spread = rng.uniform(0, 1, 10_000) * 10.0 ** rng.uniform(-5, 3, 10_000)
    next_to_them = [np.nextafter(halves, np.float32(x)) for x in (0, 448)]
    for a in (halves, *next_to_them, judge.TABLE[:127], np.minimum(spread, 448)):
        a = a.astype(np.float32)
        want = a.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(judge.nearest_code(a.astype(np.float64)), want)
