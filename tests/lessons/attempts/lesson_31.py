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


# %% 31.3 RIGHT: thread t counts digit t, without atomics in shared memory
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
