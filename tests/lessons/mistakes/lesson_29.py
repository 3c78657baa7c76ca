"""Typical mistakes, planted in the solutions of lesson 29: (exercise, old, new, words of the answer)."""

CODES = "np.rint(w / scales[:, None])"
SAFE = "    scales = np.where(scales > 0, scales, 1)\n"
NORMAL = "(1 + m / 8) * 2.0 ** (e - 7)"
SUBNORMAL = "m / 8 * 2.0**-6"
NAN = "    value = np.where((e == 15) & (m == 7), np.nan, value)\n"
STEPS = "np.rint(a / 2.0 ** (e - 4))"
LEAST = "np.frexp(np.maximum(a, 2.0**-6))"
LOOP = "range(lane, x_K.size, 32)"
WRITE = "        if lane == 0:\n            y_O[o] = total * scale_O[o]"

MISTAKES = [
    ("29.1", "np.abs(w).max(axis=1)", "np.full(len(w), np.abs(w).max())", "scale of the whole matrix"),
    ("29.1", "np.abs(w).max(axis=1)", "np.abs(w).max(axis=1, keepdims=True)", "shape (O,)"),
    ("29.1", "np.abs(w).max(axis=1)", "w.max(axis=1)", "Use np.abs(w)"),
    ("29.1", "/ 127", "/ 128", "Divided by 128"),
    ("29.1", "/ 127", "/ 255", "codes without a sign"),
    ("29.1", "np.abs(w).max(axis=1) / 127", "(w.max(axis=1) - w.min(axis=1)) / 255", "with an offset"),
    ("29.1", "np.abs(w).max(axis=1) / 127", "127 / np.abs(w).max(axis=1)", "the inverse"),
    ("29.1", " / 127", "", "Not divided by 127"),
    ("29.1", SAFE, "", "0 / 0 is NaN"),
    ("29.1", CODES, "(w / scales[:, None])", "The fractions were cut off"),
    ("29.1", CODES, "np.floor(w / scales[:, None])", "Rounded down"),
    ("29.1", CODES, "np.ceil(w / scales[:, None])", "Rounded up"),
    ("29.1", CODES, "np.rint(np.abs(w) / scales[:, None])", "keep the sign"),
    ("29.1", CODES, "np.rint(w / scales[:, None] * 128 / 127)", "A code is -128"),
    ("29.1", ".astype(np.int8)", "", "one byte each"),
    ("29.1", f"{CODES}.astype(np.int8), scales", f"{CODES}.astype(np.int8)", "Return 2 things"),
    ("29.1", "    scales = np.abs(w)", "    w /= 2\n    w *= 4\n    scales = np.abs(w / 2)", "differ"),
    ("29.2", NAN, "", "m = 7 is NaN"),
    ("29.2", "(e == 15) & (m == 7)", "e == 15", "no infinity"),
    ("29.2", "codes.astype(int)", "codes", "3 - 7 is 252"),
    ("29.2", "e - 7", "e - 8", "not 8"),
    ("29.2", "e - 7", "e - 15", "not 15"),
    ("29.2", "e > 0", "e >= 0", "without the 1"),
    ("29.2", "2.0**-6", "2.0**-7", "have the exponent -6"),
    ("29.2", SUBNORMAL, "(1 + m / 8) * 2.0**-6", "without the 1 before the fraction"),
    ("29.2", SUBNORMAL, "0.0 * m", "have become 0"),
    ("29.2", "np.where(bits >> 7 == 1, -value, value)", "value", "The sign is missing"),
    ("29.2", "m / 8", "m / 7", "counts eighths"),
    ("29.2", "    bits", "    import ml_dtypes\n    return codes.view(ml_dtypes.float8_e4m3fn).astype(float)\n    bits", "a library's e4m3"),
    ("29.3", "np.minimum(np.abs(v), 448)", "np.abs(v)", "must saturate"),
    ("29.3", "np.minimum(np.abs(v), 448)", "np.minimum(np.abs(v), 480)", "must saturate"),
    ("29.3", "np.rint", "np.floor", "Rounded toward 0"),
    ("29.3", STEPS, "np.floor(a / 2.0 ** (e - 4) + 0.5)", "halves to even"),
    ("29.3", STEPS, "np.rint(np.where(a < 2.0**-6, 0, a) / 2.0 ** (e - 4))", "have become 0"),
    ("29.3", LEAST, "np.frexp(a)\n    e = np.maximum(e, -5)", "np.frexp(0) is (0, 0)"),
    ("29.3", LEAST, "np.frexp(np.where(a > 0, a, 2.0**-6))", "the steps stay 2^-9"),
    ("29.3", f"{STEPS} + 8 * (e + 5)", f"np.where(a < 2.0**-6, {STEPS}, 8 * (e + 6) | ({STEPS} - 8).astype(int))", "do not OR it"),
    ("29.3", "8 * (e + 5)", "8 * (e + 6)", "8 too small or too large"),
    ("29.3", "128 * np.signbit(v)", "0", "The sign is missing"),
    ("29.3", ".astype(np.uint8)", "", "one byte each"),
    ("29.4", " * scale_O[o]", "", "The scale of the row is missing"),
    ("29.4", "float32(codes_OK[o, k])", "float32(codes_OK[o, k]) * scale_O[o]", "applied twice"),
    ("29.4", "total * scale_O[o]", "total * scale_O[cuda.blockIdx.x]", "scale of another row"),
    ("29.4", "warp_sum(acc)", "acc", "the part of lane 0"),
    ("29.4", LOOP, "range(lane, min(32, x_K.size), 32)", "Only the first 32 columns"),
    ("29.4", "float32(codes_OK[o, k])", "float32(codes_OK[o, k] & 255)", "without sign"),
    ("29.4", LOOP, "range(x_K.size)", "counted 32 times"),
    ("29.4", "cuda.threadIdx.x // 32\n", "0\n", "All lanes write"),
    ("29.4", "cuda.blockIdx.x * 2 + ", "", "Two blocks write"),
    ("29.4", "if o < y_O.size:", "if True:", "a warp without a row"),
    ("29.4", WRITE, "        y_O[o] = total * scale_O[o]", "Only lane 0 of each warp"),
    ("29.4", LOOP, "range(lane * (x_K.size // 32 + 1), min(x_K.size, (lane + 1) * (x_K.size // 32 + 1)))", "far from its neighbour's"),
    ("29.4", "acc = float32(0.0)", "acc = 0.5 * 0.0", "float64"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("29.1", CODES, "np.round(w / scales[:, None])"),
    ("29.1", CODES, "np.floor(w / scales[:, None] + 0.5)"),
    ("29.1", SAFE, "    scales = np.maximum(scales, np.float32(2.0**-126))\n"),
    ("29.2", SUBNORMAL, "np.ldexp(m.astype(float), -9)"),
    ("29.3", "np.signbit(v)", "(v < 0)"),
    ("29.4", "float32(codes_OK[o, k])", "codes_OK[o, k]"),
    ("29.2", "    bits", "    # E4M3, as ml_dtypes.float8_e4m3fn\n    bits"),
]  # fmt: skip
