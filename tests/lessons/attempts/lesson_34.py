"""Attempts at the exercises of lesson 34: see test_attempts.py."""


# %% 34.1 RIGHT: number by number
def round_to(v, fraction, least, most):
    import math

    def one(x):
        if math.isnan(x):
            return x
        a = min(abs(x), most)
        e = max(math.frexp(a)[1] - 1, least) if a else least
        n = round(a / 2.0 ** (e - fraction))  # Python rounds halves to even
        return math.copysign(n * 2.0 ** (e - fraction), x)

    return np.array([one(float(x)) for x in v.ravel()], np.float64).reshape(v.shape)


# %% 34.1 RIGHT: the addition of a large number rounds
def round_to(v, fraction, least, most):
    a = np.minimum(np.abs(v.astype(np.float64)), most)
    power = 2.0 ** np.floor(np.log2(np.maximum(a, 2.0**least)))
    large = power * 2.0 ** (52 - fraction)
    return np.copysign((a + large) - large, v)


# %% 34.1 RIGHT: saturates at the end
def round_to(v, fraction, least, most):
    e = np.floor(np.log2(np.abs(v).astype(float)))
    e = np.where(np.isfinite(v), np.clip(e, least, None), 0)
    step = np.exp2(e - fraction)
    return np.clip(np.rint(v / step) * step, -most, most)


# %% 34.1 RIGHT: the nearest in a table
def round_to(v, fraction, least, most):
    numbers, e = [m * 2.0 ** (least - fraction) for m in range(2**fraction)], least
    while numbers[-1] < most:
        numbers += [(2**fraction + m) * 2.0 ** (e - fraction) for m in range(2**fraction)]
        e += 1
    numbers = np.array([x for x in numbers if x <= most])
    a = np.minimum(np.abs(v.astype(float)), most)
    i = np.clip(np.searchsorted(numbers, a), 1, len(numbers) - 1)
    low, high = numbers[i - 1], numbers[i]
    up = (a - low > high - a) | ((a - low == high - a) & (i % 2 == 0))
    return np.where(np.isnan(v), v, np.where(up, high, low) * np.where(v < 0, -1, 1))


# %% 34.1 WRONG: the even multiple
def round_to(v, fraction, least, most):
    bits = v.view(np.uint32) & 0x7FFFFFFF
    drop = 23 - fraction
    r = ((bits + (1 << (drop - 1))) >> drop << drop).view(np.float32)
    small = np.floor(np.abs(v) * 2.0 ** (fraction - least) + 0.5) * 2.0 ** (least - fraction)
    r = np.where(np.abs(v) < 2.0**least, small, np.minimum(r, most))
    r = np.where(np.isnan(v), v, r)
    return np.copysign(r, v)


# %% 34.1 WRONG: The exponent is rounded
def round_to(v, fraction, least, most):
    e = np.round(np.log2(np.maximum(np.abs(v), 2.0**least)))
    step = 2.0 ** (e - fraction)
    return np.clip(np.round(v / step) * step, -most, most)


# %% 34.1 WRONG: Numbers beyond the largest one saturate
def round_to(v, fraction, least, most):
    e = np.frexp(np.maximum(np.abs(v), 2.0**least))[1]
    step = 2.0 ** (e - 1.0 - fraction)
    r = np.rint(v / step) * step
    return np.where(np.abs(r) > most, np.sign(v) * np.inf, r)


# %% 34.1 WRONG: NaN has become a number
def round_to(v, fraction, least, most):
    v = np.nan_to_num(v, posinf=most, neginf=-most).clip(-most, most)
    e = np.frexp(np.maximum(np.abs(v), 2.0**least))[1]
    step = 2.0 ** (e - 1.0 - fraction)
    return np.rint(v / step) * step


# %% 34.1 WRONG: The sign is missing
def round_to(v, fraction, least, most):
    a = np.minimum(np.abs(v), most)
    m, e = np.frexp(a)
    e = np.maximum(e, least + 1)
    a = np.rint(np.ldexp(a, fraction + 1 - e))
    return np.ldexp(a, e - fraction - 1)


# %% 34.1 WRONG: a float's steps grow
def round_to(v, fraction, least, most):
    return np.clip(np.rint(v * 2**fraction) / 2**fraction, -most, most)


# %% 34.1 WRONG: choose with np.where
def round_to(v, fraction, least, most):
    a = np.abs(v)
    if a > most:
        a = most
    step = 2.0 ** (np.floor(np.log2(a)) - fraction)
    return np.rint(v / step) * step


# %% 34.2 RIGHT: an array and a mask
def next_scale(maxima, scale, most, room):
    m = np.array(maxima, np.float64)
    m = m[np.isfinite(m) & (m > 0)]
    if m.size == 0:
        return np.float32(scale)
    return max(np.float64(2.0**-126), m.max() / most * room)


# %% 34.2 RIGHT: a running maximum
def next_scale(maxima, scale, most, room):
    largest = 0.0
    for m in maxima:
        if largest < m != float("inf"):
            largest = float(m)
    if not largest:
        return scale
    new = largest * room / most
    return new if new > 2.0**-126 else 2.0**-126


# %% 34.2 RIGHT: the largest that counts, by sorting
def next_scale(maxima, scale, most, room):
    for m in sorted((float(m) for m in maxima if m == m), reverse=True):
        if m in (float("inf"), 0.0):
            continue
        return np.clip(m / (most / room), 2.0**-126, 3e38)
    return scale


# %% 34.2 WRONG: a maximum that is NaN does not count
def next_scale(maxima, scale, most, room):
    m = np.array(maxima, float)
    m = m[(m != 0) & (m != np.inf)]
    return max(m.max() * room / most, 2.0**-126) if m.size else scale


# %% 34.2 WRONG: has hidden the others
def next_scale(maxima, scale, most, room):
    m = max(maxima, default=0)
    return max(float(m) * room / most, 2.0**-126) if 0 < m < np.inf else scale


# %% 34.2 WRONG: The old scale takes part
def next_scale(maxima, scale, most, room):
    good = [float(m) for m in maxima if 0 < m < np.inf]
    return max([scale, *(m * room / most for m in good)])


# %% 34.2 WRONG: an infinite maximum does not count
def next_scale(maxima, scale, most, room):
    good = [float(m) for m in maxima if m > 0]
    return max(max(good) * room / most, 2.0**-126) if good else scale


# %% 34.2 WRONG: Nothing is returned
def next_scale(maxima, scale, most, room):
    good = [float(m) for m in maxima if 0 < m < np.inf]
    if good:
        return max(max(good) * room / most, 2.0**-126)


# %% 34.1 WRONG: Rounded twice
def round_to(v, fraction, least, most):
    a = np.minimum(np.abs(v), most).astype(np.float16).astype(np.float64)
    e = np.frexp(np.maximum(a, 2.0**least))[1]
    step = 2.0 ** (e - 1.0 - fraction)
    return np.copysign(np.rint(a / step) * step, v)


# %% 34.1 RIGHT: rounded in the bits, as the kernel does
def round_to(v, fraction, least, most):
    a = np.minimum(np.abs(v), np.float32(most))
    a = np.where(np.isnan(a), np.float32(0), a)
    drop = 23 - fraction
    bits = a.view(np.int32)
    bits = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) >> drop << drop
    small = np.rint(a.astype(float) * 2.0 ** (fraction - least)) * 2.0 ** (least - fraction)
    r = np.where(a < 2.0**least, small, bits.view(np.float32).astype(float))
    return np.where(np.isnan(v), v, np.copysign(np.minimum(r, most), v))


# %% 34.2 WRONG: multiply by it
def next_scale(maxima, scale, most, room):
    good = [float(m) for m in maxima if 0 < m < np.inf]
    return max(max(good) / most / room, 2.0**-126) if good else scale


# %% 34.2 WRONG: expected
def next_scale(maxima, scale, most, room):
    good = [float(m) for m in maxima if 0 < m < np.inf]
    return max(max(good) / most + room, 2.0**-126) if good else scale
