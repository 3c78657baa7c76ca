"""Typical mistakes, planted in the solutions of lesson 34: (exercise, old, new, words of the answer)."""

A = "np.minimum(np.abs(v), most)"
E = "np.frexp(np.maximum(a, 2.0**least))"
STEP = "np.ldexp(np.float32(1), e - 1 - fraction)"
LAST = "np.copysign(np.rint(a / step) * step, v)"
GOOD = "[m for m in maxima if 0 < m < np.inf]"
NEXT = "max(max(good) * (room / most), 2.0**-126) if good else scale"
DIVIDED = "abs(x_n[i] / scale_1[0])"
LIMIT = "                a = float32(448.0)\n"
COUNT = "                cuda.atomic.add(counts_2, 0, 1)\n"
BAD = "            cuda.atomic.add(counts_2, 1, 1)\n"
SMALL = "float_as_int(a + float32(16384.0)) - float_as_int(float32(16384.0))"
ROUND = "bits + 0x7FFFF + ((bits >> 20) & 1)"
NOTE = "        cuda.atomic.max(largest_1, 0, float_as_int(size))"
SIGN = "            if x_n[i] < float32(0.0):\n                code = code | 0x80\n"
CODE = "e5m2_code(x_NK[n0 + r, k0 + x] / scale_1[0])"
BARRIER = "    cuda.syncthreads()  # the tile is complete\n"
ROWS = "if n0 + r < N and k0 + x < K:"
COLUMNS = "if k0 + c < K and n0 + x < N:"
SECOND = "    for c in range(y, 32, 8):\n        if k0 + c < K and n0 + x < N:\n            codes_KN[k0 + c, n0 + x] = tile[x, c]"

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
    ("34.1", LAST, "(np.rint(a / step) + 8 * e).astype(np.uint8)", "Codes come in 34.3"),
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
    ("34.3", DIVIDED, "abs(x_n[i] * scale_1[0])", "Multiplied by the scale"),
    ("34.3", DIVIDED, "abs(x_n[i])", "The scale is missing"),
    ("34.3", LIMIT, "", "must saturate"),
    ("34.3", LIMIT, "                a = float32(480.0)\n", "0x7F is NaN"),
    ("34.3", COUNT, "", "Nothing was counted"),
    ("34.3", COUNT, "                counts_2[0] += 1\n", "cuda.atomic.add(counts_2, 0, 1)"),
    ("34.3", COUNT, "                cuda.atomic.add(counts_2, 1, 1)\n", "The two are exchanged"),
    ("34.3", "a > float32(448.0)", "a >= float32(448.0)", "448 itself has a code"),
    ("34.3", BAD, "", "counts[1] those that are not finite"),
    ("34.3", BAD, BAD + "            cuda.atomic.add(counts_2, 0, 1)\n", "counted once"),
    ("34.3", "if size < float32(np.inf):", "if size == size:", "Infinity has become the largest number"),
    ("34.3", "if size < float32(np.inf):", "if size != float32(np.inf):", "NaN has become a number"),
    ("34.3", "if size < float32(np.inf):", "if a < float32(np.inf):", "x is finite, but x / scale is not"),
    ("34.3", SMALL, "0", "they are subnormal"),
    ("34.3", "if a < float32(2.0**-6):", "if a < float32(0.0):", "no code"),
    ("34.3", ROUND, "bits", "add half of what is dropped"),
    ("34.3", ROUND, "bits + 0x80000", "the even code is taken"),
    ("34.3", "(120 << 3)", "(127 << 3)", "by whole exponents"),
    ("34.3", SIGN, "", "The sign is missing"),
    ("34.3", SIGN, "            code = code | 0x80\n", "only a negative number"),
    ("34.3", SIGN, SIGN.replace("code | 0x80", "-code"), "The negative of a code"),
    ("34.3", ROUND, "bits + 0xFFFFF", "Rounded up"),
    ("34.3", COUNT, COUNT.replace("    cuda", "    if x_n[i] > 0:\n                    cuda"), "Those of one sign"),
    ("34.3", COUNT, COUNT.replace("    cuda", "    if abs(x_n[i] / scale_1[0]) > float32(464.0):\n                    cuda"), "from 448 to 464"),
    ("34.3", NOTE, NOTE + "\n        x_n[i] = x_n[i] / scale_1[0]", "x was changed"),
    ("34.3", NOTE, "", "It was not noted"),
    ("34.3", "float_as_int(size)", "int(size)", "cut to an integer"),
    ("34.3", "size, a, code = abs(x_n[i])", "size, a, code = abs(x_n[i] / scale_1[0])", "It is that of x / scale"),
    ("34.3", "float_as_int(size)", "float_as_int(x_n[i])", "largest"),
    ("34.3", "            size = float32(np.inf)\n", "            size = float32(0.0)\n", "is lost"),
    ("34.3", NOTE, "        largest_1[0] = max(largest_1[0], float_as_int(size))", "cuda.atomic.max"),
    ("34.3", "if i < x_n.size:", "if True:", "`if i < x_n.size`"),
    ("34.4", BARRIER, "", "The tile is read before it is complete"),
    ("34.4", BARRIER, "    if y < 4:\n        cuda.syncthreads()\n", "not all threads reach it"),
    ("34.4", "tile[x, c]", "tile[c, x]", "The tile is not transposed"),
    ("34.4", ROWS, "if True:", "n0 + r < N and k0 + x < K"),
    ("34.4", COLUMNS, "if True:", "k0 + c < K and n0 + x < N"),
    ("34.4", COLUMNS, ROWS.replace("r", "c"), "k0 + c < K and n0 + x < N"),
    ("34.4", "k0, n0 = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32", "n0, k0 = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32", "Whole columns are missing"),
    ("34.4", ROWS, "if n0 + r < K and k0 + x < N:", "where n0 + r < N and k0 + x < K"),
    ("34.4", "cuda.blockIdx.x * 32, ", "0, ", "Two blocks write the same element"),
    ("34.4", "range(y, 32, 8)", "range(y, 8, 8)", "in steps of 8"),
    ("34.4", SECOND, "    pass", "codes_KN was never written"),
    ("34.4", SECOND, SECOND.replace("tile[x, c]", CODE.replace("n0 + r, k0 + x", "n0 + x, k0 + c")), "read 2 times over"),
    ("34.4", SECOND, SECOND.replace("tile[x, c]", "codes_NK[n0 + x, k0 + c]"), "read back from global memory"),
    ("34.4", "            tile[r, x] = code\n", "            tile[r, x] = code\n            codes_KN[k0 + x, n0 + r] = code\n", "32 sectors of codes_KN"),
    ("34.4", "            tile[r, x] = code\n", "            tile[r, x] = code\n            x_NK[n0 + r, k0 + x] = 0\n", "x was changed"),
    ("34.4", CODE, "e5m2_code(x_NK[n0 + r, k0 + x])", "The scale is missing"),
    ("34.4", CODE, "e5m2_code(x_NK[n0 + r, k0 + x] * scale_1[0])", "Multiplied by the scale"),
    ("34.4", CODE, "int32(x_NK[n0 + r, k0 + x] / scale_1[0]) & 255", "cut to whole ones"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("34.1", "np.minimum(np.abs(v), most)", "np.abs(np.clip(v.astype(float), -most, most))"),
    ("34.1", LAST, "np.sign(v) * np.round(a / step) * step"),
    ("34.1", E, "np.frexp(np.where(a < 2.0**least, 2.0**least, a))"),
    ("34.2", GOOD, "[float(m) for m in maxima if np.isfinite(m) and m]"),
    ("34.2", NEXT, "float(max(good)) * room / most + 0 * scale if good and max(good) > 1e-30 else max(max(good) * (room / most), 2.0**-126) if good else scale"),
    ("34.3", DIVIDED, "abs(x_n[i] * (float32(1.0) / scale_1[0]))"),
    ("34.3", "if x_n[i] < float32(0.0):", "if float_as_int(x_n[i]) < 0:"),
    ("34.3", "            size = float32(np.inf)\n", ""),
    ("34.4", "(32, 36)", "(32, 33)"),
    ("34.4", CODE, "e5m2_code((float32(1.0) / scale_1[0]) * x_NK[n0 + r, k0 + x])"),
    ("34.3", "            if a < float32(2.0**-6):", "            half = float32(i % 2) * float32(2.0**-1)\n            if a < float32(2.0**-6) and half < float32(1.0):"),
]  # fmt: skip
