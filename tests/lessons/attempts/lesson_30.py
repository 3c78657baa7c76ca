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
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    own = x_n[i] if i < x_n.size else int32(0)
    v = own
    for k in range(5):
        end = ((lane >> k) << k) - 1  # the last lane of the half before
        other = cuda.shfl_sync(FULL, v, max(end, 0))
        if lane & (1 << k):
            v += other
    if i < x_n.size:
        y_n[i] = v - own


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
@cuda.jit
def warp_scan_kernel(y_n, x_n):
    tile = cuda.shared.array(32, int32)
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    own = x_n[i] if i < x_n.size else int32(0)
    tile[lane] = own
    for k in range(5):
        cuda.syncthreads()
        add = tile[lane - (1 << k)] if lane >= 1 << k else 0
        cuda.syncthreads()
        tile[lane] += add
    if i < x_n.size:
        y_n[i] = tile[lane] - own


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
