"""Attempts at the exercises of lesson 30: see test_attempts.py."""


# %% 30.1 RIGHT: the exclusive sum by a shift at the end
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    lane = cuda.laneid
    i = cuda.grid(1)
    v = int32(0)
    if i < x_n.size:
        v = x_n[i]
    for d in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, v, d)
        v += other if lane >= d else 0
    v = cuda.shfl_up_sync(FULL, v, 1)
    if i < x_n.size:
        y_n[i] = v if lane > 0 else 0


# %% 30.1 RIGHT: by the highest set bits, with shfl_sync
# as the solution, but:
# -         other = cuda.shfl_up_sync(FULL, v, 1 << k)
# -         if lane >= 1 << k:
# +         end = ((lane >> k) << k) - 1  # the last lane of the half before
# +         other = cuda.shfl_sync(FULL, v, max(end, 0))
# +         if lane & (1 << k):


# %% 30.1 WRONG: between read and write
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    tile = cuda.shared.array(32, int32)
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    own = x_n[i] if i < x_n.size else int32(0)
    tile[lane] = own
    for k in range(5):
        cuda.syncthreads()
        if lane >= 1 << k:
            tile[lane] += tile[lane - (1 << k)]
    if i < x_n.size:
        y_n[i] = tile[lane] - own


# %% 30.1 WRONG: through shared memory
# as the attempt above, but:
# -         if lane >= 1 << k:
# -             tile[lane] += tile[lane - (1 << k)]
# +         add = tile[lane - (1 << k)] if lane >= 1 << k else 0
# +         cuda.syncthreads()
# +         tile[lane] += add


# %% 30.2 RIGHT: the totals of the warps are scanned by the first warp
@cuda.jit(device=True)
def inclusive_scan(v, lane):
    for d in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, v, d)
        if lane >= d:
            v += other
    return v


@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    ends = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    lane, warp, warps = t & 31, t >> 5, cuda.blockDim.x >> 5
    i = cuda.grid(1)
    own = x_n[i] if i < x_n.size else int32(0)
    v = inclusive_scan(own, lane)
    if lane == 31:
        ends[warp] = v
    cuda.syncthreads()
    if warp == 0:
        total = ends[lane] if lane < warps else int32(0)
        total = inclusive_scan(total, lane)
        if lane < warps:
            ends[lane] = total
    cuda.syncthreads()
    before = ends[warp - 1] if warp > 0 else int32(0)
    if i < x_n.size:
        y_n[i] = v + before - own
    if t == 0:
        total_B[cuda.blockIdx.x] = ends[warps - 1]


# %% 30.2 RIGHT: Hillis and Steele in shared memory, with two buffers
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    tile = cuda.shared.array((2, 1024), int32)
    t, T = cuda.threadIdx.x, cuda.blockDim.x
    i = cuda.grid(1)
    own = x_n[i] if i < x_n.size else int32(0)
    tile[0, t] = own
    now, d = 0, 1
    while d < T:
        cuda.syncthreads()
        tile[1 - now, t] = tile[now, t] + (tile[now, t - d] if t >= d else 0)
        now, d = 1 - now, 2 * d
    if i < x_n.size:
        y_n[i] = tile[now, t] - own
    if t == T - 1:
        total_B[cuda.blockIdx.x] = tile[now, t]


# %% 30.2 WRONG: Divide the work
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    if cuda.threadIdx.x == 0:
        first, running = cuda.blockIdx.x * cuda.blockDim.x, int32(0)
        for i in range(first, min(first + cuda.blockDim.x, x_n.size)):
            y_n[i] = running
            running += x_n[i]
        total_B[cuda.blockIdx.x] = running


# %% 30.3 RIGHT: the digits of the warp in shared memory
@cuda.jit
def scatter_kernel(order_n, digit_n, start_TB):
    digits = cuda.shared.array(32, int32)
    b, lane = cuda.blockIdx.x, cuda.threadIdx.x
    n = b * 32 + lane
    digits[lane] = digit_n[n] if n < digit_n.size else -1
    cuda.syncthreads()
    rank = 0
    for l in range(lane):
        if digits[l] == digits[lane]:
            rank += 1
    if n < digit_n.size:
        order_n[start_TB[digits[lane], b] + rank] = n


# %% 30.3 RIGHT: a ballot for every digit
@cuda.jit
def scatter_kernel(order_n, digit_n, start_TB):
    b, lane = cuda.blockIdx.x, cuda.threadIdx.x
    n = b * 32 + lane
    mine = digit_n[n] if n < digit_n.size else int32(-1)
    for digit in range(start_TB.shape[0]):
        votes = cuda.ballot_sync(FULL, mine == digit)
        if mine == digit:
            order_n[start_TB[digit, b] + cuda.popc(votes & ((1 << lane) - 1))] = n


# %% 30.3 WRONG: Two blocks write to the same place
@cuda.jit
def scatter_kernel(order_n, digit_n, start_TB):
    lane = cuda.threadIdx.x
    n = cuda.blockIdx.x * 32 + lane
    digit = digit_n[n] if n < digit_n.size else int32(-1)
    same = cuda.match_any_sync(FULL, digit)
    if n < digit_n.size:
        order_n[start_TB[digit, 0] + cuda.popc(same & ((1 << lane) - 1))] = n


# %% 30.4 RIGHT: the keys travel with their positions
def radix_order(keys, bits, split):
    order, left = np.arange(len(keys)), keys.copy()
    for _ in range(64 // bits + 1):
        if not left.any():
            break
        moved = split(left % 2**bits)
        order, left = order[moved], left[moved] // 2**bits
    return order


# %% 30.4 WRONG: keep the lowest ones
def radix_order(keys, bits, split):
    return split(keys)


# %% 30.4 WRONG: not made by split
def radix_order(keys, bits, split):
    return np.array(sorted(range(len(keys)), key=lambda n: keys[n]), int)


# %% 30.1 RIGHT: the own element is read a second time
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    i, lane = cuda.grid(1), cuda.threadIdx.x
    v = x_n[i] if i < x_n.size else 0
    for d in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, v, d)
        v += other if lane >= d else 0
    if i < x_n.size:
        y_n[i] = v - x_n[i]


# %% 30.1 WRONG: they were added as floats
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    i, lane = cuda.grid(1), cuda.threadIdx.x
    own = np.float32(x_n[i] if i < x_n.size else 0)
    v = own
    for d in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, v, d)
        if lane >= d:
            v += other
    if i < x_n.size:
        y_n[i] = int32(v - own)


# %% 30.1 WRONG: not only those with l > d
# as the attempt above, but:
# -     own = np.float32(x_n[i] if i < x_n.size else 0)
# +     own = x_n[i] if i < x_n.size else 0
# -         if lane >= d:
# +         if lane > d:
# -         y_n[i] = int32(v - own)
# +         y_n[i] = v - own


# %% 30.2 WRONG: one thread walks through the whole block
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    t, i = cuda.threadIdx.x, cuda.grid(1)
    tile = cuda.shared.array(1024, int32)
    tile[t] = x_n[i] if i < x_n.size else 0
    cuda.syncthreads()
    if t == 0:
        total = int32(0)
        for j in range(cuda.blockDim.x):
            own = tile[j]
            tile[j] = total
            total += own
        total_B[cuda.blockIdx.x] = total
    cuda.syncthreads()
    if i < x_n.size:
        y_n[i] = tile[t]


# %% 30.2 WRONG: whatever the size of the block
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    t, i = cuda.threadIdx.x, cuda.grid(1)
    warp_total = cuda.shared.array(32, int32)
    own = x_n[i] if i < x_n.size else 0
    v = own
    for d in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, v, d)
        v += other if t % 32 >= d else 0
    if t % 32 == 31:
        warp_total[t // 32] = v
    cuda.syncthreads()
    for w in range(t // 32):
        v += warp_total[w]
    if i < x_n.size:
        y_n[i] = v - own
    if t == 63:
        total_B[cuda.blockIdx.x] = v


# %% 30.2 WRONG: 1024 threads are 32 warps
# as the attempt above, but:
# -     warp_total = cuda.shared.array(32, int32)
# +     warp_total = cuda.shared.array(6, int32)
# -     if t == 63:
# +     if t == cuda.blockDim.x - 1:


# %% 30.2 WRONG: total_B holds anything at first
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    t, i = cuda.threadIdx.x, cuda.grid(1)
    tile = cuda.shared.array(1024, int32)
    own = x_n[i] if i < x_n.size else 0
    tile[t] = own
    d = 1
    while d < cuda.blockDim.x:
        cuda.syncthreads()
        other = tile[t - d] if t >= d else 0
        cuda.syncthreads()
        tile[t] += other
        d *= 2
    if i < x_n.size:
        y_n[i] = tile[t] - own
    cuda.atomic.add(total_B, cuda.blockIdx.x, own)


# %% 30.3 WRONG: lanes read the digits of others from memory
@cuda.jit
def scatter_kernel(order_n, digit_n, start_TB):
    n, lane, b = cuda.grid(1), cuda.threadIdx.x, cuda.blockIdx.x
    if n < digit_n.size:
        rank = 0
        for k in range(n - lane, n):
            rank += digit_n[k] == digit_n[n]
        order_n[start_TB[digit_n[n], b] + rank] = n


# %% 30.4 RIGHT: the highest digit first, and then each of its groups by itself
def radix_order(keys, bits, split):
    def sort(order, level):
        if level < 0 or len(order) < 2:
            return order
        digits = keys[order] >> level * bits & 2**bits - 1
        moved = split(digits)
        order, digits = order[moved], digits[moved]
        ends = np.flatnonzero(np.diff(digits)) + 1
        return np.concatenate([sort(group, level - 1) for group in np.split(order, ends)])

    digits = -(-int(keys.max(initial=0)).bit_length() // bits)
    return sort(np.arange(len(keys)), digits - 1)


# %% 30.4 WRONG: Only the lowest digit was sorted by
def radix_order(keys, bits, split):
    order, shift, mask = np.arange(len(keys)), 0, 2**bits - 1
    while (keys >> shift & mask).any():
        order = order[split(keys[order] >> shift & mask)]
        shift += bits
    return order


# %% 30.4 WRONG: keys of more than 32 bits
def radix_order(keys, bits, split):
    order, keys = np.arange(len(keys)), keys.astype(np.int32)
    for shift in range(0, 31, bits):
        order = order[split(keys[order] >> shift & 2**bits - 1)]
    return order


# %% 30.4 REMARK: passes over all keys were made where
def radix_order(keys, bits, split):
    order, shift = np.arange(len(keys)), 0
    while (keys >> shift).any():
        order = order[split(keys[order] >> shift & 1)]
        shift += 1
    return order


# %% 30.2 WRONG: all of them must share the work
@cuda.jit
def block_scan_kernel(y_n, total_B, x_n):
    sums = cuda.shared.array(1025, int32)
    t = cuda.threadIdx.x
    first = cuda.blockIdx.x * cuda.blockDim.x
    if t == 0:
        total = int32(0)
        for k in range(cuda.blockDim.x):
            sums[k] = total
            if first + k < x_n.size:
                total += x_n[first + k]
        total_B[cuda.blockIdx.x] = total
    cuda.syncthreads()
    if first + t < x_n.size:
        y_n[first + t] = sums[t]
