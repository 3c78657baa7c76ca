"""Attempts at the exercises of lesson 29: see test_attempts.py."""


# %% 29.1 RIGHT: row by row, in a loop
def quantize_rows(w):
    codes, scales = np.zeros(w.shape, np.int8), np.ones(len(w), np.float32)
    for o, row in enumerate(w):
        largest = max(row.max(), -row.min())
        if largest:
            scales[o] = largest / 127
            codes[o] = [round(float(x)) for x in row.astype(float) * 127 / largest]
    return codes, scales


# %% 29.1 WRONG: These are scales of columns
def quantize_rows(w):
    s = np.abs(w).max(axis=0) / 127
    s[s == 0] = 1
    if len(s) != len(w):
        s = np.abs(w).max(axis=1) / 127
        s[s == 0] = 1
        return np.rint(w / s[:, None]).astype(np.int8), s
    return np.rint(w / s).astype(np.int8), s


# %% 29.1 WRONG: scale of the whole matrix
def quantize_rows(w):
    s = np.abs(w).max() / 127
    return np.rint(w / s).astype(np.int8), np.full(len(w), s)


# %% 29.2 RIGHT: the bits are moved to where a float32 has them
def decode(codes):
    bits = codes.astype(np.uint32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    value = moved.view(np.float32) * np.float32(2.0**120)
    return np.where(bits & 0x7F == 0x7F, np.float32(np.nan), value)


# %% 29.2 RIGHT: a table that is computed code by code
def decode(codes):
    def one(c):
        e, m = c // 8 % 16, c % 8
        if c % 128 == 127:
            return float("nan")
        v = 2.0 ** (e - 7) * (1 + m / 8) if e else m / 512
        return -v if c > 127 else v

    return np.array([one(c) for c in range(256)])[codes]


# %% 29.2 WRONG: e4m3 has no infinity
# as the solution, but:
# -     value = np.where((e == 15) & (m == 7), np.nan, value)
# +     value = np.where(e == 15, np.where(m == 0, np.inf, np.nan), value)


# %% 29.3 RIGHT: the nearest of a table of all numbers
def encode(v):
    c = np.arange(127)
    e, m = c >> 3, c & 7
    numbers = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 7), m / 512)
    a = np.minimum(np.abs(v.astype(float)), 448)
    far = np.abs(a[..., None] - numbers) + 1e-12 * (c % 2)  # of two equally near ones the even
    return (far.argmin(-1) + 128 * (v < 0)).astype(np.uint8)


# %% 29.3 RIGHT: rounded in the bits of the float32
def encode(v):
    bits = np.minimum(np.abs(v), np.float32(448)).view(np.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = np.rint(bits.view(np.float32) * 512).astype(np.int32)
    code = np.where(bits < 0x3C800000, small, normal)
    return (code | (128 * np.signbit(v))).astype(np.uint8)


# %% 29.3 WRONG: must saturate
def encode(v):
    a = np.abs(v)
    e = np.maximum(np.floor(np.log2(np.maximum(a, 1e-9))), -6)
    code = np.rint(a / 2.0 ** (e - 3)) + 8 * (e + 6)
    return (np.minimum(code, 127) + 128 * np.signbit(v)).astype(np.uint8)


# %% 29.3 WRONG: halves to even
def encode(v):
    c = np.arange(127)
    e, m = c >> 3, c & 7
    numbers = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 7), m / 512)
    a = np.minimum(np.abs(v.astype(float)), 448)
    code = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, a)
    return (code + 128 * np.signbit(v)).astype(np.uint8)


# %% 29.4 RIGHT: four neighbouring codes per lane
@cuda.jit
def gemv_int8_kernel(y_O, x_K, codes_OK, scale_O):
    lane, o = cuda.threadIdx.x & 31, cuda.blockIdx.x * 2 + (cuda.threadIdx.x >> 5)
    K = x_K.size
    acc = float32(0.0)
    if o < y_O.size:
        for first in range(4 * lane, K, 128):
            for k in range(first, min(first + 4, K)):
                acc += x_K[k] * float32(codes_OK[o, k])
    total = warp_sum(acc)
    if o < y_O.size and lane == 0:
        y_O[o] = scale_O[o] * total


# %% 29.4 RIGHT: the sum of the warp by hand
@cuda.jit
def gemv_int8_kernel(y_O, x_K, codes_OK, scale_O):
    lane, o = cuda.threadIdx.x % 32, cuda.blockIdx.x * 2 + cuda.threadIdx.x // 32
    if o >= y_O.size:
        return
    acc = float32(0.0)
    for k in range(lane, x_K.size, 32):
        acc += x_K[k] * codes_OK[o, k]
    for step in (16, 8, 4, 2, 1):
        acc += cuda.shfl_xor_sync(0xFFFFFFFF, acc, step)
    if lane == 0:
        y_O[o] = acc * scale_O[o]


# %% 29.4 REMARK: The scale can leave the sum
# as the solution, but:
# -             acc += x_K[k] * float32(codes_OK[o, k])
# +             acc += x_K[k] * float32(codes_OK[o, k]) * scale_O[o]
# -             y_O[o] = total * scale_O[o]
# +             y_O[o] = total


# %% 29.4 WRONG: all of them must share the work
@cuda.jit
def gemv_int8_kernel(y_O, x_K, codes_OK, scale_O):
    lane, o = cuda.threadIdx.x % 32, cuda.blockIdx.x * 2 + cuda.threadIdx.x // 32
    if o < y_O.size and lane == 0:
        acc = float32(0.0)
        for k in range(x_K.size):
            acc += x_K[k] * float32(codes_OK[o, k])
        y_O[o] = acc * scale_O[o]


# %% 29.1 WRONG: The scale of a row is too large
def quantize_rows(w):
    scales = np.maximum(np.abs(w).max(axis=1), 1) / 127
    return np.rint(w / scales[:, None]).astype(np.int8), scales


# %% 29.2 WRONG: not 8
# as the solution, but:
# -     value = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 7), m / 8 * 2.0**-6)
# +     value = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 8), m / 8 * 2.0**-7)


# %% 29.2 WRONG: 0xFF is NaN
def decode(codes):
    bits = codes.astype(int)
    e, m = (bits >> 3) & 15, bits & 7
    value = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 7), m / 8 * 2.0**-6)
    value = np.where(bits >> 7 == 1, -value, value)
    return np.where(bits == 0x7F, np.nan, value)


# %% 29.3 WRONG: Rounded twice
def encode(v):
    a = np.abs(np.clip(v, -448, 448).astype(np.float16)).astype(np.float64)
    e = np.frexp(np.maximum(a, 2.0**-6))[1]
    return (np.rint(a / 2.0 ** (e - 4)) + 8 * (e + 5) + 128 * np.signbit(v)).astype(np.uint8)


# %% 29.3 WRONG: have become 240
def encode(v):
    a = np.minimum(np.abs(v), 240)
    e = np.frexp(np.maximum(a, 2.0**-6))[1]
    return (np.rint(a / 2.0 ** (e - 4)) + 8 * (e + 5) + 128 * np.signbit(v)).astype(np.uint8)


# %% 29.4 WRONG: past the last multiple of 32
@cuda.jit
def gemv_int8_kernel(y_O, x_K, codes_OK, scale_O):
    o, lane = cuda.blockIdx.x * 2 + cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    acc = float32(0)
    if o < y_O.size:
        for i in range(x_K.size // 32):
            acc += x_K[32 * i + lane] * codes_OK[o, 32 * i + lane]
    acc = warp_sum(acc)
    if lane == 0 and o < y_O.size:
        y_O[o] = acc * scale_O[o]


# %% 29.4 WRONG: every other 32 columns
# as the attempt above, but:
# -         for i in range(x_K.size // 32):
# -             acc += x_K[32 * i + lane] * codes_OK[o, 32 * i + lane]
# +         for k in range(cuda.threadIdx.x, x_K.size, 64):
# +             acc += x_K[k] * codes_OK[o, k]


# %% 29.4 WRONG: cut to whole numbers
@cuda.jit
def gemv_int8_kernel(y_O, x_K, codes_OK, scale_O):
    o, lane = cuda.blockIdx.x * 2 + cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    acc = 0
    if o < y_O.size:
        for k in range(lane, x_K.size, 32):
            acc += int(x_K[k] * codes_OK[o, k])
    acc = warp_sum(acc)
    if lane == 0 and o < y_O.size:
        y_O[o] = acc * scale_O[o]
