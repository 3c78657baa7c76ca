"""Typical mistakes, planted in the solutions of lesson 45: (exercise, old, new, words of the answer)."""

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
    ("45.1", DIVIDED, "abs(x_n[i] * scale_1[0])", "Multiplied by the scale"),
    ("45.1", DIVIDED, "abs(x_n[i])", "The scale is missing"),
    ("45.1", LIMIT, "", "must saturate"),
    ("45.1", LIMIT, "                a = float32(480.0)\n", "0x7F is NaN"),
    ("45.1", COUNT, "", "Nothing was counted"),
    ("45.1", COUNT, "                counts_2[0] += 1\n", "cuda.atomic.add(counts_2, 0, 1)"),
    ("45.1", COUNT, "                cuda.atomic.add(counts_2, 1, 1)\n", "The two are exchanged"),
    ("45.1", "a > float32(448.0)", "a >= float32(448.0)", "448 itself has a code"),
    ("45.1", BAD, "", "counts[1] those that are not finite"),
    ("45.1", BAD, BAD + "            cuda.atomic.add(counts_2, 0, 1)\n", "counted once"),
    ("45.1", "if size < float32(np.inf):", "if size == size:", "Infinity has become the largest number"),
    ("45.1", "if size < float32(np.inf):", "if size != float32(np.inf):", "NaN has become a number"),
    ("45.1", "if size < float32(np.inf):", "if a < float32(np.inf):", "x is finite, but x / scale is not"),
    ("45.1", SMALL, "0", "they are subnormal"),
    ("45.1", "if a < float32(2.0**-6):", "if a < float32(0.0):", "no code"),
    ("45.1", ROUND, "bits", "add half of what is dropped"),
    ("45.1", ROUND, "bits + 0x80000", "the even code is taken"),
    ("45.1", "(120 << 3)", "(127 << 3)", "by whole exponents"),
    ("45.1", SIGN, "", "The sign is missing"),
    ("45.1", SIGN, "            code = code | 0x80\n", "only a negative number"),
    ("45.1", SIGN, SIGN.replace("code | 0x80", "-code"), "The negative of a code"),
    ("45.1", ROUND, "bits + 0xFFFFF", "Rounded up"),
    ("45.1", COUNT, COUNT.replace("    cuda", "    if x_n[i] > 0:\n                    cuda"), "Those of one sign"),
    ("45.1", COUNT, COUNT.replace("    cuda", "    if abs(x_n[i] / scale_1[0]) > float32(464.0):\n                    cuda"), "from 448 to 464"),
    ("45.1", NOTE, NOTE + "\n        x_n[i] = x_n[i] / scale_1[0]", "x was changed"),
    ("45.1", NOTE, "", "It was not noted"),
    ("45.1", "float_as_int(size)", "int(size)", "cut to an integer"),
    ("45.1", "size = abs(x_n[i])", "size = abs(x_n[i] / scale_1[0])", "It is that of x / scale"),
    ("45.1", "float_as_int(size)", "float_as_int(x_n[i])", "largest"),
    ("45.1", "            size = float32(np.inf)\n", "            size = float32(0.0)\n", "is lost"),
    ("45.1", NOTE, "        largest_1[0] = max(largest_1[0], float_as_int(size))", "cuda.atomic.max"),
    ("45.1", "if i < x_n.size:", "if True:", "`if i < x_n.size`"),
    ("45.2", BARRIER, "", "The tile is read before it is complete"),
    ("45.2", BARRIER, "    if y < 4:\n        cuda.syncthreads()\n", "not all threads reach it"),
    ("45.2", "tile[x, c]", "tile[c, x]", "The tile is not transposed"),
    ("45.2", ROWS, "if True:", "n0 + r < N and k0 + x < K"),
    ("45.2", COLUMNS, "if True:", "k0 + c < K and n0 + x < N"),
    ("45.2", COLUMNS, ROWS.replace("r", "c"), "k0 + c < K and n0 + x < N"),
    ("45.2", "k0, n0 = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32", "n0, k0 = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32", "Whole columns are missing"),
    ("45.2", ROWS, "if n0 + r < K and k0 + x < N:", "where n0 + r < N and k0 + x < K"),
    ("45.2", "cuda.blockIdx.x * 32, ", "0, ", "Two blocks write the same element"),
    ("45.2", "range(y, 32, 8)", "range(y, 8, 8)", "in steps of 8"),
    ("45.2", SECOND, "    pass", "codes_KN was never written"),
    ("45.2", SECOND, SECOND.replace("tile[x, c]", CODE.replace("n0 + r, k0 + x", "n0 + x, k0 + c")), "read 2 times over"),
    ("45.2", SECOND, SECOND.replace("tile[x, c]", "codes_NK[n0 + x, k0 + c]"), "read back from global memory"),
    ("45.2", "            tile[r, x] = code\n", "            tile[r, x] = code\n            codes_KN[k0 + x, n0 + r] = code\n", "32 sectors of codes_KN"),
    ("45.2", "            tile[r, x] = code\n", "            tile[r, x] = code\n            x_NK[n0 + r, k0 + x] = 0\n", "x was changed"),
    ("45.2", CODE, "e5m2_code(x_NK[n0 + r, k0 + x])", "The scale is missing"),
    ("45.2", CODE, "e5m2_code(x_NK[n0 + r, k0 + x] * scale_1[0])", "Multiplied by the scale"),
    ("45.2", CODE, "int32(x_NK[n0 + r, k0 + x] / scale_1[0]) & 255", "cut to whole ones"),
]  # fmt: skip
RIGHT = [  # unusual but correct
    ("45.1", DIVIDED, "abs(x_n[i] * (float32(1.0) / scale_1[0]))"),
    ("45.1", "if x_n[i] < float32(0.0):", "if float_as_int(x_n[i]) < 0:"),
    ("45.1", "            size = float32(np.inf)\n", ""),
    ("45.2", "(32, 36)", "(32, 33)"),
    ("45.2", CODE, "e5m2_code((float32(1.0) / scale_1[0]) * x_NK[n0 + r, k0 + x])"),
    ("45.1", "            if a < float32(2.0**-6):", "            half = float32(i % 2) * float32(2.0**-1)\n            if a < float32(2.0**-6) and half < float32(1.0):"),
]  # fmt: skip
