"""Typical mistakes, planted in the solutions of lesson 34: (exercise, old, new, words of the answer)."""

A = "np.minimum(np.abs(v), most)"
E = "np.frexp(np.maximum(a, 2.0**least))"
STEP = "np.ldexp(np.float32(1), e - 1 - fraction)"
LAST = "np.copysign(np.rint(a / step) * step, v)"
GOOD = "[m for m in maxima if 0 < m < np.inf]"
NEXT = "max(max(good) * (room / most), 2.0**-126) if good else scale"

MISTAKES = [
    ("34.1", A, "np.abs(v)", "Numbers beyond the largest one saturate"),
    ("34.1", A, "np.fmin(np.abs(v), most)", "NaN has become a number"),
    ("34.1", A, "np.nan_to_num(np.minimum(np.abs(v), most))", "NaN has become a number"),
    ("34.1", A, "np.minimum(np.abs(v), most * 0.9)", "Saturated too early"),
    ("34.1", "np.rint", "np.floor", "Cut off"),
    ("34.1", "np.rint", "np.ceil", "Rounded up"),
    ("34.1", LAST, "np.floor(v.clip(-most, most) / step) * step", "Rounded down"),
    ("34.1", LAST, "np.copysign(np.floor(a / step + 0.5) * step, v)", "the even multiple"),
    ("34.1", LAST, "np.rint(a / step) * step", "The sign is missing"),
    ("34.1", LAST, "np.copysign(np.where(a < 2.0**least, 0, np.rint(a / step) * step), v)", "they are subnormal"),
    ("34.1", E, "np.frexp(np.where(a > 0, a, 2.0**least))", "the steps stay as they are"),
    ("34.1", E, "np.frexp(np.maximum(a, 2.0 ** (least + 1)))", "those of the smallest normal"),
    ("34.1", "e - 1 - fraction", "e - fraction", "twice too wide"),
    ("34.1", "e - 1 - fraction", "e - 2 - fraction", "half as wide"),
    ("34.1", STEP, "np.float32(2.0**-fraction) + 0 * e", "a float's steps grow"),
    ("34.1", LAST, "np.copysign(np.ceil(a / step - 0.5) * step, v)", "the even multiple"),
    ("34.1", LAST, "np.copysign(np.where(a < 2.0 ** (least - fraction), 0, np.rint(a / step) * step), v)", "above half of it"),
    ("34.1", A, "np.minimum(np.abs(v), 448.0)", "`most` is a parameter"),
    ("34.1", LAST, "np.copysign(np.rint(a / step) * step, v).astype(np.float16)", "float16 does not hold"),
    ("34.1", E, "np.frexp(0 * a + np.nanmax(np.maximum(a, 2.0**least), initial=2.0**least))", "an exponent of its own"),
    ("34.1", LAST, "v", "Nothing is rounded"),
    ("34.1", LAST, "(np.rint(a / step) + 8 * e).astype(np.uint8)", "Codes come in lesson 45"),
    ("34.1", f"    return {LAST}", "    v[...] = 0", "Nothing is returned"),
    ("34.1", f"    return {LAST}", f"    r = {LAST}\n    v *= 2\n    return r", "An input was changed"),
    ("34.1", "    a = np", "    import ml_dtypes\n    a = np", "take the bits apart yourself"),
    ("34.2", GOOD, "maxima", "the scale stays what it was"),
    ("34.2", GOOD, "[m for m in maxima if m < np.inf]", "the scale stays what it was"),
    ("34.2", NEXT, "room * max(maxima) / most if maxima else scale", "a maximum of 0 does not count"),
    ("34.2", GOOD, "[m for m in maxima if m != 0 and not np.isnan(m)]", "an infinite maximum does not count"),
    ("34.2", GOOD, "[m for m in maxima if not m == 0 and not np.isinf(m)]", "The scale is NaN"),
    ("34.2", GOOD, "list(maxima) if all(0 < m < np.inf for m in maxima) else []", "has hidden the others"),
    ("34.2", " if good else scale", "", "empty list"),
    ("34.2", NEXT, "max(max(good) * room / most, 2.0**-126) if good else scale", "too large for float32"),
    ("34.2", NEXT, "max(good) * (room / most) if good else scale", "at least 2.0**-126"),
    ("34.2", "room / most", "1 / most", "The room is missing"),
    ("34.2", "room / most", "1 / room / most", "multiply by it"),
    ("34.2", "room / most", "2 / most", "taken as 2"),
    ("34.2", "room / most", "room / 448", "Divided by 448"),
    ("34.2", "max(good) *", "sum(good) *", "The sum of the maxima"),
    ("34.2", NEXT, "room * most / max(good) if good else scale", "except for the room"),
    ("34.2", "2.0**-126)", "1e-12)", "too large here"),
    ("34.2", "room / most", "room", "Not divided by `most`"),
    ("34.2", NEXT, "most / (room * max(good)) if good else scale", "the inverse"),
    ("34.2", "max(good)", "good[-1]", "The LAST maximum"),
    ("34.2", "max(good)", "good[0]", "The FIRST maximum"),
    ("34.2", "max(good)", "min(good)", "The smallest maximum"),
    ("34.2", "max(good)", "sum(good) / len(good)", "The mean of the maxima"),
    ("34.2", "2.0**-126)", "scale)", "The old scale takes part"),
    ("34.2", "else scale", "else 1.0", "the scale stays what it was"),
    ("34.2", f"    return {NEXT}", "    maxima.append(1)\n    return scale", "expected"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("34.1", "np.minimum(np.abs(v), most)", "np.abs(np.clip(v.astype(float), -most, most))"),
    ("34.1", LAST, "np.sign(v) * np.round(a / step) * step"),
    ("34.1", E, "np.frexp(np.where(a < 2.0**least, 2.0**least, a))"),
    ("34.2", GOOD, "[float(m) for m in maxima if np.isfinite(m) and m]"),
    ("34.2", NEXT, "float(max(good)) * room / most + 0 * scale if good and max(good) > 1e-30 else max(max(good) * (room / most), 2.0**-126) if good else scale"),
]  # fmt: skip
