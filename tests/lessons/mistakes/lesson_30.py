"""Typical mistakes, planted in the solutions of lesson 30: (exercise, old, new, words of the answer)."""

GUARDED = "x_n[i] if i < x_n.size else int32(0)"
BARRIER = "    cuda.syncthreads()  # the totals of all warps are written\n"
RANK = "cuda.popc(same & ((1 << lane) - 1))"
ORDER = "order = order[split(digits)]"

MISTAKES = [
    ("30.1", "y_n[i] = v - own", "y_n[i] = v", "This is the inclusive sum"),
    ("30.1", "        if lane >= 1 << k:\n            v += other", "        v += other", "their own v"),
    ("30.1", "range(5)", "range(4)", "The last step is missing"),
    ("30.1", "range(5)", "range(1, 5)", "The first step is missing"),
    ("30.1", "1 << k", "k + 1", "each twice the one before"),
    ("30.1", "        other = cuda.shfl_up_sync(FULL, v, 1 << k)\n        if lane >= 1 << k:", "        other = cuda.shfl_down_sync(FULL, v, 1 << k)\n        if lane + (1 << k) < 32:", "the elements AFTER"),
    ("30.1", "v += other", "v += int32(0)", "use what the shuffle returns"),
    ("30.1", GUARDED, "x_n[i]", "they contribute 0"),
    ("30.1", "cuda.blockIdx.x * 32 + lane", "lane", "block b begins with element 32 b"),
    ("30.1", "    for k in range(5):\n        other = cuda.shfl_up_sync(FULL, v, 1 << k)\n        if lane >= 1 << k:\n            v += other", "    for k in range(5):\n        if lane >= 1 << k:\n            v += cuda.shfl_up_sync(FULL, v, 1 << k)", "All 32 lanes must call the shuffle"),
    ("30.1", "    for k in range(5):\n        other = cuda.shfl_up_sync(FULL, v, 1 << k)\n        if lane >= 1 << k:\n            v += other", "    v = own\n    for j in range(cuda.blockIdx.x * 32, min(i, x_n.size)):\n        v += x_n[j]", "from memory"),
    ("30.2", "before + inclusive - own", "before + inclusive", "This is the inclusive sum"),
    ("30.2", "before + inclusive - own", "inclusive - own", "Each warp begins with 0"),
    ("30.2", "range(warp)", "range(warp + 1)", "The total of the warp itself"),
    ("30.2", "range(warp)", "range(max(0, warp - 1), warp)", "Only the total of the previous warp"),
    ("30.2", "range(warp)", "range(cuda.blockDim.x // 32)", "The totals of all warps"),
    ("30.2", BARRIER, "", "cuda.syncthreads() in between"),
    ("30.2", "    if lane == 31:\n        warp_total[warp] = inclusive\n" + BARRIER, "    if lane == 31:\n        warp_total[warp] = inclusive\n        cuda.syncthreads()\n", "not all threads reach it"),
    ("30.2", "= before + inclusive\n", "= before + inclusive - own\n", "The last element is missing"),
    ("30.2", "= before + inclusive\n", "= inclusive\n", "the last warp alone"),
    ("30.2", "t == cuda.blockDim.x - 1", "t == 31", "the first warp alone"),
    ("30.2", "t == cuda.blockDim.x - 1", "t == cuda.blockDim.x - 1 and i < x_n.size", "of the last block was not written"),
    ("30.2", "total_B[cuda.blockIdx.x]", "total_B[0]", "Two blocks write"),
    ("30.2", GUARDED, "x_n[i]", "they contribute 0"),
    ("30.3", RANK, "cuda.popc(same & ((2 << lane) - 1))", "does not count itself"),
    ("30.3", RANK, "cuda.popc(same) - 1 - cuda.popc(same & ((1 << lane) - 1))", "in the opposite order"),
    ("30.3", RANK, "0", "Two lanes write"),
    ("30.3", "start_TB[digit, b]", "start_TB[digit, 0]", "Two blocks write"),
    ("30.3", "start_TB[digit, b]", "start_TB[b, digit]", "the digit comes first"),
    ("30.3", "+ rank] = n", "+ rank] = lane", "The lane was written"),
    ("30.3", "+ rank] = n", "+ rank] = digit", "The digits were written"),
    ("30.3", "order_n[start_TB[digit, b] + rank] = n", "order_n[n] = start_TB[digit, b] + rank", "the place of each number"),
    ("30.3", "    if n < digit_n.size:\n        order_n", "    if True:\n        order_n", "-1, has no place"),
    ("30.3", "digit_n[n] if n < digit_n.size else int32(-1)", "digit_n[n]", "Lanes past the end"),
    ("30.3", "    if n < digit_n.size:\n        order_n[start_TB[digit, b] + rank] = n", "    if n < digit_n.size:\n        order_n[cuda.atomic.add(start_TB, (digit, b), 1)] = n", "hands out places"),
    ("30.4", ORDER, "order = split(digits)", "the last digit alone"),
    ("30.4", ORDER, "order = split(digits)[order]", "the wrong way round"),
    ("30.4", "keys[order] >> shift", "keys >> shift", "in the order so far"),
    ("30.4", " & (2**bits - 1)", "", "a digit has"),
    ("30.4", "        shift += bits", "        break", "Only the lowest digit"),
    ("30.4", "while (keys >> shift).any()", "while shift < 8", "any number of digits"),
    ("30.4", "return order", "return keys[order]", "return their positions"),
    ("30.4", "    order, shift", "    return np.argsort(keys, kind='stable')\n    order, shift", "not made by split"),
    ("30.4", "    order, shift = np.arange(len(keys)), 0\n", "    order, shift = np.arange(len(keys)), 0\n    last = -bits\n    while (keys >> (last + bits)).any():\n        last += bits\n    for shift in range(last, -1, -bits):\n        order = order[split((keys[order] >> shift) & (2**bits - 1))]\n    return order\n", "The highest digit was taken first"),
    ("30.4", "np.arange(len(keys))", "np.arange(len(keys))[::-1]", "stay in the order"),
    ("30.1", "    if i < x_n.size:\n        y_n[i] = v - own", "    v = cuda.shfl_up_sync(FULL, v, 1)\n    if i < x_n.size:\n        y_n[i] = v", "Lane 0 has no lane below"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("30.1", "range(5)", "range(4, -1, -1)"),
    ("30.1", "x_n[i] if i < x_n.size else int32(0)", "x_n[i] if i < x_n.size else 0"),
    ("30.2", "range(warp)", "range(warp - 1, -1, -1)"),
    ("30.3", "((1 << lane) - 1)", "(0xFFFFFFFF >> (32 - lane))"),
    ("30.4", "keys[order] >> shift", "keys[order] // 2**shift"),
    ("30.3", "    rank =", "    # not cuda.atomic: its order differs from run to run\n    rank ="),
]  # fmt: skip
