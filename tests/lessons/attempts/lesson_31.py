"""Attempts at the exercises of lesson 31: see test_attempts.py."""


# %% 31.1 RIGHT: one block after the other, until one does not fit
def resident_blocks(threads, registers, shared, card):
    warps, each = (threads + 31) // 32, 32 * ((registers + 7) // 8 * 8)
    n = 0
    while n < card["blocks"]:
        used = (n + 1) * warps
        if used > card["warps"] or used > 4 * (card["registers"] // 4 // each):
            break
        if (n + 1) * (shared + card["reserved"]) > card["shared"]:
            break
        n += 1
    return n


# %% 31.1 WRONG: limit by registers is missing
def resident_blocks(threads, registers, shared, card):
    warps = -(-threads // 32)
    least = min(card["warps"] // warps, card["blocks"])
    bytes_ = shared + card["reserved"]
    return min(least, card["shared"] // bytes_) if bytes_ else least


# %% 31.2 RIGHT: padded and reshaped
def active_lanes(trips):
    warps = np.concatenate([trips, np.zeros(-len(trips) % 32, trips.dtype)]).reshape(-1, 32)
    executed = warps.max(axis=1).sum() if len(warps) else 0
    return warps.sum() / executed if executed else 0.0


# %% 31.2 RIGHT: simulated, one execution at a time
def active_lanes(trips):
    lanes = executions = 0
    for i in range(0, len(trips), 32):
        left = trips[i : i + 32].copy()
        while (left > 0).any():
            executions += 1
            lanes += int((left > 0).sum())
            left -= 1
    return lanes / executions if executions else 0.0


# %% 31.2 WRONG: that run the body at all
def active_lanes(trips):
    warps = [trips[i : i + 32] for i in range(0, len(trips), 32)]
    return float(np.mean([np.count_nonzero(w) for w in warps])) if warps else 0.0


# %% 31.3 RIGHT: each warp has counters of its own
@cuda.jit
def histogram_kernel(count_T, digit_n):
    mine = cuda.shared.array((2, 64), int32)
    t = cuda.threadIdx.x
    mine[0, t] = 0
    mine[1, t] = 0
    cuda.syncthreads()
    for n in range(cuda.grid(1), digit_n.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, (t // 32, digit_n[n]), 1)
    cuda.syncthreads()
    if t < count_T.size:
        cuda.atomic.add(count_T, t, mine[0, t] + mine[1, t])


# %% 31.3 WRONG: the 64 digits are read 256 times
@cuda.jit
def histogram_kernel(count_T, digit_n):
    t, mine = cuda.threadIdx.x, int32(0)
    if t < count_T.size:
        for first in range(cuda.blockIdx.x * 64, digit_n.size, cuda.gridsize(1)):
            for n in range(first, min(first + 64, digit_n.size)):
                if digit_n[n] == t:
                    mine += 1
        cuda.atomic.add(count_T, t, mine)


# %% 31.3 WRONG: Count in shared memory first
@cuda.jit
def histogram_kernel(count_T, digit_n):
    for n in range(cuda.grid(1), digit_n.size, cuda.gridsize(1)):
        cuda.atomic.add(count_T, digit_n[n], 1)


# %% 31.4 RIGHT: the recurrence, written out
def overlap(chunks):
    spans = []
    a = b = c = 0  # ends of the last chunk's parts
    for copy_in, compute, copy_out in chunks:
        first = (a, a + copy_in)
        begin = max(first[1], b)
        second = (begin, begin + compute)
        begin = max(second[1], c)
        third = (begin, begin + copy_out)
        a, b, c = first[1], second[1], third[1]
        spans.append([first, second, third])
    return spans


# %% 31.4 WRONG: nothing overlaps
def overlap(chunks):
    now, spans = 0, []
    for chunk in chunks:
        parts = []
        for duration in chunk:
            parts.append((now, now + duration))
            now += duration
        spans.append(parts)
    return spans


# %% 31.1 WRONG: in different quarters
def resident_blocks(threads, registers, shared, card):
    warps, registers = -(-threads // 32), -(-registers // 8) * 8
    limits = [card["warps"] // warps, card["blocks"]]
    limits.append(4 * (card["registers"] // 4 // (32 * registers) // warps))
    if shared:
        limits.append(card["shared"] // (shared + card["reserved"]))
    return min(limits)


# %% 31.1 WRONG: Cards differ
def resident_blocks(threads, registers, shared, card):
    warps, registers = -(-threads // 32), -(-registers // 8) * 8
    limits = [64 // warps, 32, 4 * (65536 // 4 // (32 * registers)) // warps]
    return min(*limits, 228 * 1024 // (shared + 1024))


# %% 31.1 WRONG: the answer may be 0
def resident_blocks(threads, registers, shared, card):
    warps, registers = -(-threads // 32), -(-registers // 8) * 8
    limits = [card["warps"] // warps, card["blocks"]]
    limits.append(4 * (card["registers"] // 4 // (32 * registers)) // warps)
    if shared:
        limits.append(card["shared"] // (shared + card["reserved"]))
    return max(1, min(limits))


# %% 31.2 RIGHT: step by step
def active_lanes(trips):
    took_part = executions = 0
    for first in range(0, len(trips), 32):
        left = np.array(trips[first : first + 32])
        while (left > 0).any():
            took_part += (left > 0).sum()
            executions += 1
            left = left - 1
    return took_part / executions if executions else 0.0


# %% 31.2 WRONG: the trips of ONE thread
def active_lanes(trips):
    return trips.sum() / trips.max() if trips.any() else 0.0


# %% 31.2 WRONG: as if it had 32 threads
def active_lanes(trips):
    warps = [trips[i : i + 32] for i in range(0, len(trips), 32)]
    executions = sum(w.max() for w in warps)
    return 32 * len(warps) * trips.mean() / executions if executions else 0.0


# %% 31.2 WRONG: divide with /
def active_lanes(trips):
    executions = sum(trips[i : i + 32].max() for i in range(0, len(trips), 32))
    return trips.sum() // executions if executions else 0.0


# %% 31.3 RIGHT: thread t counts the digit t, in a tile that the block has loaded
@cuda.jit
def histogram_kernel(count_T, digit_n):
    tile, t, own = cuda.shared.array(64, int32), cuda.threadIdx.x, int32(0)
    for first in range(cuda.blockIdx.x * 64, digit_n.size, cuda.gridsize(1)):
        cuda.syncthreads()
        tile[t] = digit_n[first + t] if first + t < digit_n.size else -1
        cuda.syncthreads()
        for k in range(64):
            own += tile[k] == t
    if t < count_T.size:
        cuda.atomic.add(count_T, t, own)


# %% 31.3 WRONG: 1 of 4 blocks read digits
@cuda.jit
def histogram_kernel(count_T, digit_n):
    mine, t = cuda.shared.array(64, int32), cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        mine[t] = 0
        cuda.syncthreads()
        for n in range(t, digit_n.size, 64):
            cuda.atomic.add(mine, digit_n[n], 1)
        cuda.syncthreads()
        if t < count_T.size:
            cuda.atomic.add(count_T, t, mine[t])


# %% 31.4 WRONG: does not wait for its engine
def overlap(chunks):
    start, spans = 0, []
    for chunk in chunks:
        ends = start + np.cumsum(chunk)
        spans.append([(end - d, end) for end, d in zip(ends, chunk)])
        start += chunk[0]
    return spans


# %% 31.3 WRONG: all of them must share the work
@cuda.jit
def histogram_kernel(count_T, digit_n):
    mine = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    mine[t] = 0
    cuda.syncthreads()
    if t == 0:
        for n in range(cuda.blockIdx.x, digit_n.size, cuda.gridDim.x):
            mine[digit_n[n]] += 1
    cuda.syncthreads()
    if t < count_T.size:
        cuda.atomic.add(count_T, t, mine[t])
