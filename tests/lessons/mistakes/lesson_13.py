"""Typical mistakes, planted in the solutions of lesson 13: (exercise, old, new, words of the answer)."""

SKIP = "range(0, cuda.blockIdx.x * TILE + TILE, TILE)"
BEGIN = "    top, total, acc = -np.inf, 0.0, np.zeros(v_SD.shape[1])\n"
ONE_BY_ONE = """    m, l, o = -np.inf, 0.0, 0.0
    for j in range(len(k_SD)):
        s = scale * (k_SD[j] @ q_D)
        new = max(m, s)
        l = l * np.exp(m - new) + np.exp(s - new)
        o = o * np.exp(m - new) + np.exp(s - new) * v_SD[j]
        m = new
    return o / l, m + np.log(l)
"""

MISTAKES = [
    ("13.1", "k_SD.shape[0], tile)", "k_SD.shape[0] // tile * tile, tile)", "The last, incomplete tile is missing"),
    ("13.1", "acc / total, top", "acc, top", "not divided by the sum"),
    ("13.1", "acc = acc * shrink", "acc = acc", "acc was not multiplied by exp"),
    ("13.1", "total = total * shrink", "total = total", "The sum was not multiplied by exp"),
    ("13.1", "np.exp(top - new), np.exp(s - new)", "1.0, np.exp(s - new)", "Neither the sum nor acc"),
    ("13.1", "new = max(top, s.max())", "new = 0.0", "exp overflows"),
    ("13.1", "-np.inf, 0.0, np", "0.0, 0.0, np", "must begin below every possible score"),
    ("13.1", "top + np.log(total)", "np.log(total)", "add the maximum"),
    ("13.1", "top + np.log(total)", "top", "That is the maximum alone"),
    ("13.1", "k_SD[first : first + tile]", "k_SD[first:]", "keys at once"),
    ("13.1", "k_SD[first : first + tile] @", "np.asarray(k_SD) @", "All 4 keys at once"),
    ("13.1", "k_SD[first : first + tile] @", "k_SD @", "keys at once"),
    ("13.1", "np.exp(top - new)", "np.exp(new - top)", "The factor is inverted"),
    ("13.1", "scale * (k_SD", "1.0 * (k_SD", "not multiplied by scale"),
    ("13.1", "max(top, s.max())", "s.max()", "never falls"),
    ("13.2", "if first + j <= t:", "if True:", "There is no mask"),
    ("13.2", "if first + j <= t:", "if j <= cuda.threadIdx.x:", "the key's position in the whole sequence"),
    ("13.2", SKIP, "range(0, cuda.blockIdx.x * TILE, TILE)", "saw no key at all"),
    ("13.2", "if first + j <= t:", "if first + j < t:", "A query also sees its own key"),
    ("13.2", "s *= scale", "s *= float32(1.0)", "not multiplied by scale"),
    ("13.2", "acc[d] / total", "acc[d]", "not divided by the sum"),
    ("13.2", "acc[d] * shrink", "acc[d]", "acc was not multiplied"),
    ("13.2", "total * shrink", "total", "The sum was not multiplied"),
    ("13.2", SKIP, "range(cuda.blockIdx.x * TILE, cuda.blockIdx.x * TILE + TILE, TILE)", "Only the block's own tile"),
    ("13.2", "        cuda.syncthreads()  # no thread still reads the previous tile\n", "", "needs two barriers"),
    ("13.2", "        cuda.syncthreads()\n", "", "cuda.syncthreads()"),
    ("13.2", "q_TD[t, d] if t < T else float32(0.0)", "q_TD[t, d]", "Threads past the end have no query"),
    ("13.2", "    for d in range(D):\n        q[d] =", "    if t >= T:\n        return\n    for d in range(D):\n        q[d] =", "do not return early"),
    ("13.2", "top + math.log(total)", "math.log(total)", "add the maximum"),
    ("13.3", "(dp - delta)", "dp", "delta is missing"),
    ("13.3", "(dp - delta)", "(dp + delta)", "The sign of delta"),
    ("13.3", "ds * k[j, d]", "ds * v[j, d]", "not ds times the value"),
    ("13.3", "scale * acc[d]", "acc[d]", "scale is missing at the end"),
    ("13.3", "math.exp(scale * s - lse)", "math.exp(s - lse)", "before exp"),
    ("13.3", "math.exp(scale * s - lse) * (dp", "float32(1.0) * (dp", "p is missing"),
    ("13.3", "first + j <= t and t < T", "t < T", "There is no mask"),
    ("13.3", "s += q[d] * k[j, d]", "s += q[d] * k_TD[first + j, d]", "several threads of a block read the same element"),
    ("13.3", "    if t < T:\n        lse", "    if True:\n        lse", "Threads past the end have no query"),
    ("13.1", "range(0, k_SD.shape[0], tile)", "range(tile, k_SD.shape[0], tile)", "Keys are missing"),
    ("13.2", "s *= scale", "s *= float32(1.0) / math.sqrt(float32(D))", "expected"),
    ("13.2", "math.exp(s - new)", "math.exp(s - top)", "with the new maximum"),
    ("13.2", "if first + j <= t:", "if j <= t:", "compares t with j"),
    ("13.1", "        top = new\n    return acc", "    return acc", "its initial value"),
]  # fmt: skip

UNTRUE = [  # words that must not appear in these answers
    ("13.2", "math.exp(s - new)", "math.exp(s - top)", "saw no key at all"),
]  # fmt: skip

RIGHT = [  # unusual, but correct
    ("13.2", "        acc[d] = float32(0.0)", "        acc[d] = 0.0"),
    ("13.2", SKIP, "range(0, T, TILE)"),
    ("13.3", SKIP, "range(0, T, TILE)"),
    ("13.1", BEGIN, ONE_BY_ONE + BEGIN),
]  # fmt: skip
