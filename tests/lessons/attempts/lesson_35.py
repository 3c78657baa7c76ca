"""Attempts at the exercises of lesson 35: see test_attempts.py."""


# %% 35.1 RIGHT: the sums of the chunks in shared memory
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    part = cuda.shared.array(32, float32)
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    total = float32(0.0)
    for first in range(0, K, 512):
        begin = first + 16 * lane
        v = float32(0.0)
        for k in range(begin, min(begin + 16, K)):
            v += x_NK[n, k] * w_OK[o, k]
        cuda.syncthreads()
        part[lane] = v
        cuda.syncthreads()
        if lane == 0:
            for l in range(32):
                total += part[l]
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: cuda.syncthreads() after they are written, and again
# as the attempt above, but:
# -         cuda.syncthreads()
# -         part[lane] = v
# -         cuda.syncthreads()
# +         part[lane] = v
# +         cuda.syncthreads()


# %% 35.1 WRONG: a lane without columns writes the sum 0
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    part = cuda.shared.array(32, float32)
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    total = float32(0.0)
    for first in range(0, K, 512):
        begin = first + 16 * lane
        if begin < K:
            part[lane] = float32(0.0)
            for k in range(begin, min(begin + 16, K)):
                part[lane] += x_NK[n, k] * w_OK[o, k]
        cuda.syncthreads()
        if lane == 0:
            for l in range(32):
                total += part[l]
        cuda.syncthreads()
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 RIGHT: only as many sums are added as there are chunks
# as the attempt above, but:
# -             for l in range(32):
# +             for l in range(min(32, (K - first + 15) // 16)):


# %% 35.1 RIGHT: neighbouring lanes load neighbouring columns, through shared memory
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    product = cuda.shared.array((32, 17), float32)
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    total = float32(0.0)
    first = 0
    while first < K:
        for i in range(lane, 512, 32):
            k = first + i
            product[i // 16, i % 16] = x_NK[n, k] * w_OK[o, k] if k < K else float32(0.0)
        cuda.syncthreads()
        part = float32(0.0)
        for j in range(16):
            part += product[lane, j]
        for l in range(32):
            total += cuda.shfl_sync(FULL, part, l)
        cuda.syncthreads()
        first += 512
    if lane == 31:
        y_NO[n, o] = total


# %% 35.1 WRONG: one lane adds all the products
# as the attempt above, but:
# -         part = float32(0.0)
# -         for j in range(16):
# -             part += product[lane, j]
# -         for l in range(32):
# -             total += cuda.shfl_sync(FULL, part, l)
# +         if lane == 31:
# +             for c in range(32):
# +                 part = float32(0.0)
# +                 for j in range(16):
# +                     part += product[c, j]
# +                 total += part


# %% 35.1 RIGHT: the total is handed from lane to lane
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.laneid
    K = x_NK.shape[1]
    total = float32(0.0)
    for first in range(0, K, 32 * CHUNK):
        part = float32(0.0)
        for j in range(CHUNK):
            k = first + lane * CHUNK + j
            if k < K:
                part += w_OK[o, k] * x_NK[n, k]
        for l in range(32):
            mine = total + part
            total = cuda.shfl_sync(FULL, mine, l)
    if lane == 5:
        y_NO[n, o] = total


# %% 35.1 RIGHT: columns beyond K add zeros
# as the attempt above, but:
# -             if k < K:
# -                 part += w_OK[o, k] * x_NK[n, k]
# +             x = x_NK[n, k] if k < K else float32(0.0)
# +             part += x * w_OK[o, min(k, K - 1)]


# %% 35.1 RIGHT: a device function for a chunk
@cuda.jit(device=True)
def chunk_sum(x_NK, w_OK, n, o, c):
    K = x_NK.shape[1]
    part = float32(0.0)
    for k in range(16 * c, min(16 * c + 16, K)):
        part = part + x_NK[n, k] * w_OK[o, k]
    return part


@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    chunks = (x_NK.shape[1] + 15) // 16
    total = float32(0.0)
    for c in range(0, (chunks + 31) // 32 * 32, 32):
        part = chunk_sum(x_NK, w_OK, n, o, c + lane)
        l = 0
        while l < 32 and c + l < chunks:
            total += cuda.shfl_sync(FULL, part, l)
            l += 1
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: Lane l has columns l, l + 32, ... here
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    total = float32(0.0)
    for k in range(lane, x_NK.shape[1], 32):
        total += x_NK[n, k] * w_OK[o, k]
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL, total, step)
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: Its chunk is 16 neighbouring columns
# as the attempt above, but:
# -     for step in (16, 8, 4, 2, 1):
# -         total += cuda.shfl_xor_sync(FULL, total, step)
# +     part = total
# +     total = float32(0.0)
# +     for l in range(32):
# +         total += cuda.shfl_sync(FULL, part, l)


# %% 35.1 WRONG: the lanes sum different chunks at the same time
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n = cuda.blockIdx.x, cuda.blockIdx.y
    K = x_NK.shape[1]
    if cuda.threadIdx.x == 0:
        total = float32(0.0)
        for first in range(0, K, CHUNK):
            part = float32(0.0)
            for k in range(first, min(first + CHUNK, K)):
                part += x_NK[n, k] * w_OK[o, k]
            total += part
        y_NO[n, o] = total


# %% 35.1 WRONG: There are no chunks here, K is one chain
# as the attempt above, but:
# -             part = float32(0.0)
# -             for k in range(first, min(first + CHUNK, K)):
# -                 part += x_NK[n, k] * w_OK[o, k]
# -             total += part
# +             for k in range(first, min(first + CHUNK, K)):
# +                 total += x_NK[n, k] * w_OK[o, k]


# %% 35.1 WRONG: is read 32 times in a block
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n = cuda.blockIdx.x, cuda.blockIdx.y
    K = x_NK.shape[1]
    total = float32(0.0)
    for first in range(0, K, CHUNK):
        part = float32(0.0)
        for k in range(first, min(first + CHUNK, K)):
            part += x_NK[n, k] * w_OK[o, k]
        total += part
    if cuda.threadIdx.x == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: floats are added by an atomic
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    if lane == 0:
        y_NO[n, o] = float32(0.0)
    for first in range(0, K, 32 * CHUNK):
        begin = first + lane * CHUNK
        part = float32(0.0)
        for k in range(begin, min(begin + CHUNK, K)):
            part += x_NK[n, k] * w_OK[o, k]
        cuda.syncthreads()
        cuda.atomic.add(y_NO, (n, o), part)


# %% 35.1 WRONG: Each lane adds its chunks of all passes first
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    mine = float32(0.0)
    for begin in range(lane * CHUNK, K, 32 * CHUNK):
        part = float32(0.0)
        for k in range(begin, min(begin + CHUNK, K)):
            part += x_NK[n, k] * w_OK[o, k]
        mine += part
    total = float32(0.0)
    for l in range(32):
        total += cuda.shfl_sync(FULL, mine, l)
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: by a butterfly of shuffles
# as the attempt above, but:
# -     total = float32(0.0)
# -     for l in range(32):
# -         total += cuda.shfl_sync(FULL, mine, l)
# +     total = mine
# +     for step in (1, 2, 4, 8, 16):
# +         total += cuda.shfl_xor_sync(FULL, total, step)


# %% 35.1 WRONG: a chunk has 16 columns, whatever K is
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    size = (K + 31) // 32
    part = float32(0.0)
    for k in range(lane * size, min(lane * size + size, K)):
        part += x_NK[n, k] * w_OK[o, k]
    total = float32(0.0)
    for l in range(32):
        total += cuda.shfl_sync(FULL, part, l)
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: A chunk has 32 columns here
@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    K = x_NK.shape[1]
    total = float32(0.0)
    for first in range(0, K, 1024):
        part = float32(0.0)
        for k in range(first + 32 * lane, min(first + 32 * lane + 32, K)):
            part += x_NK[n, k] * w_OK[o, k]
        for l in range(32):
            total += cuda.shfl_sync(FULL, part, l)
    if lane == 0:
        y_NO[n, o] = total


# %% 35.1 WRONG: This sum is in float64
# as the solution, but:
# -     total = float32(0.0)
# +     total = 0.0


# %% 35.1 WRONG: a chunk's sum begins at 0 in every pass
# as the solution, but:
# -     for first in range(0, K, 32 * CHUNK):
# -         begin = first + lane * CHUNK
# -         part = float32(0.0)
# +     part = float32(0.0)
# +     for first in range(0, K, 32 * CHUNK):
# +         begin = first + lane * CHUNK


# %% 35.1 WRONG: also those without columns
# as the solution, but:
# -         part = float32(0.0)
# -         for k in range(begin, min(begin + CHUNK, K)):
# -             part += x_NK[n, k] * w_OK[o, k]
# -         for l in range(32):
# -             total += cuda.shfl_sync(FULL, part, l)
# +         if begin < K:
# +             part = float32(0.0)
# +             for k in range(begin, min(begin + CHUNK, K)):
# +                 part += x_NK[n, k] * w_OK[o, k]
# +             for l in range(32):
# +                 total += cuda.shfl_sync(FULL, part, l)


# %% 35.1 WRONG: o is cuda.blockIdx.x
# as the solution, but:
# -     o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
# +     n, o, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x


# %% 35.1 WRONG: the library's own
from xtrain.kernels.primitives.reduce import warp_sum


@cuda.jit
def few_rows_kernel(y_NO, x_NK, w_OK):
    o, n, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    part = float32(0.0)
    for k in range(lane, x_NK.shape[1], 32):
        part += x_NK[n, k] * w_OK[o, k]
    total = warp_sum(part)
    if lane == 0:
        y_NO[n, o] = total


# %% 35.2 RIGHT: the loop begins with chunk 0, from minus infinity
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
    first, c = 0, 0
    while first < length_B[b]:
        new = max(m, m_BC[b, c])
        old, more = math.exp(m - new), math.exp(m_BC[b, c] - new)
        l = l_BC[b, c] * more + old * l
        acc = acc_BCD[b, c, d] * more + old * acc
        m = new
        first += CHUNK
        c += 1
    o_BD[b, d] = acc / l


# %% 35.2 RIGHT: from a number below every score
# as the attempt above, but:
# -     m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
# +     m, l, acc = float32(-1e30), float32(0.0), float32(0.0)


# %% 35.2 WRONG: a difference of infinities
# as the attempt above, but:
# -     m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
# +     m, l, acc = float32(math.inf), float32(0.0), float32(0.0)


# %% 35.2 RIGHT: two cases instead of a maximum
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l, acc = m_BC[b, 0], l_BC[b, 0], acc_BCD[b, 0, d]
    chunks = -(-length_B[b] // CHUNK)
    for c in range(1, chunks):
        if m_BC[b, c] > m:
            f = math.exp(m - m_BC[b, c])
            l, acc = l * f + l_BC[b, c], acc * f + acc_BCD[b, c, d]
            m = m_BC[b, c]
        else:
            f = math.exp(m_BC[b, c] - m)
            l, acc = l + f * l_BC[b, c], acc + f * acc_BCD[b, c, d]
    o_BD[b, d] = acc / l


# %% 35.2 WRONG: the order of lesson 19
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    chunks = (length_B[b] + 15) // 16
    top = m_BC[b, 0]
    for c in range(chunks):
        top = max(top, m_BC[b, c])
    l, acc = float32(0.0), float32(0.0)
    for c in range(chunks):
        share = math.exp(m_BC[b, c] - top)
        l += share * l_BC[b, c]
        acc += share * acc_BCD[b, c, d]
    o_BD[b, d] = acc / l


# %% 35.2 WRONG: The chunks are merged in pairs
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    m_s = cuda.local.array(8, float32)
    l_s = cuda.local.array(8, float32)
    a_s = cuda.local.array(8, float32)
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    n = (length_B[b] + 15) // 16
    for c in range(n):
        m_s[c], l_s[c], a_s[c] = m_BC[b, c], l_BC[b, c], acc_BCD[b, c, d]
    while n > 1:
        for i in range(n // 2):
            m = max(m_s[2 * i], m_s[2 * i + 1])
            f, g = math.exp(m_s[2 * i] - m), math.exp(m_s[2 * i + 1] - m)
            l_s[i] = l_s[2 * i] * f + l_s[2 * i + 1] * g
            a_s[i] = a_s[2 * i] * f + a_s[2 * i + 1] * g
            m_s[i] = m
        if n % 2 == 1:
            m_s[n // 2], l_s[n // 2], a_s[n // 2] = m_s[n - 1], l_s[n - 1], a_s[n - 1]
        n = (n + 1) // 2
    o_BD[b, d] = a_s[0] / l_s[0]


# %% 35.2 WRONG: divided by l in every step
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l, o = m_BC[b, 0], l_BC[b, 0], acc_BCD[b, 0, d] / l_BC[b, 0]
    for c in range(1, (length_B[b] + 15) // 16):
        new = max(m, m_BC[b, c])
        old, more = l * math.exp(m - new), l_BC[b, c] * math.exp(m_BC[b, c] - new)
        l = old + more
        o = (o * old + acc_BCD[b, c, d] / l_BC[b, c] * more) / l
        m = new
    o_BD[b, d] = o


# %% 35.2 WRONG: are inputs
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l = m_BC[b, 0], l_BC[b, 0]
    for c in range(1, (length_B[b] + 15) // 16):
        new = max(m, m_BC[b, c])
        old, more = math.exp(m - new), math.exp(m_BC[b, c] - new)
        l = l * old + l_BC[b, c] * more
        acc_BCD[b, 0, d] = acc_BCD[b, 0, d] * old + acc_BCD[b, c, d] * more
        m = new
    o_BD[b, d] = acc_BCD[b, 0, d] / l


# %% 35.2 WRONG: Thread d writes o[b, d] alone
# as the attempt above, but:
# -     m, l = m_BC[b, 0], l_BC[b, 0]
# +     m, l = m_BC[b, 0], l_BC[b, 0]
# +     m_BC[b, 0] = m


# %% 35.2 WRONG: threads wrote all
@cuda.jit
def merge_kernel(o_BD, m_BC, l_BC, acc_BCD, length_B):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        for d in range(D):
            m, l, acc = m_BC[b, 0], l_BC[b, 0], acc_BCD[b, 0, d]
            for c in range(1, (length_B[b] + 15) // 16):
                new = max(m, m_BC[b, c])
                old, more = math.exp(m - new), math.exp(m_BC[b, c] - new)
                l = l * old + l_BC[b, c] * more
                acc = acc * old + acc_BCD[b, c, d] * more
                m = new
            o_BD[b, d] = acc / l


# %% 35.2 WRONG: The signs are the wrong way round
# as the solution, but:
# -         keep, add = math.exp(m - new), math.exp(m_BC[b, c] - new)
# +         keep, add = math.exp(new - m), math.exp(new - m_BC[b, c])


# %% 35.2 WRONG: acc_c is not multiplied by exp(m_c - m')
# as the solution, but:
# -         acc = acc * keep + acc_BCD[b, c, d] * add
# +         acc = acc * keep + acc_BCD[b, c, d]


# %% 35.2 WRONG: write cuda.blockIdx
# as the solution, but:
# -     b, d = cuda.blockIdx.x, cuda.threadIdx.x
# +     b, d = blockIdx.x, cuda.threadIdx.x


# %% 35.2 WRONG: block b has sequence b
# as the solution, but:
# -     b, d = cuda.blockIdx.x, cuda.threadIdx.x
# +     b, d = 0, cuda.threadIdx.x


# %% 35.3 RIGHT: from minus infinity
@cuda.jit
def walk_kernel(o_BD, q_BD, k_BSD, v_BSD, length_B):
    b = cuda.blockIdx.x
    m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
    first = 0
    while first < length_B[b]:
        last = min(first + CHUNK, length_B[b])
        m_c, l_c, acc_c = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], first, last)
        top = max(m, m_c)
        l = math.exp(m - top) * l + math.exp(m_c - top) * l_c
        acc = math.exp(m - top) * acc + math.exp(m_c - top) * acc_c
        m = top
        first = last
    o_BD[b, cuda.threadIdx.x] = acc / l


# %% 35.3 WRONG: divided by l in every step
# as the attempt above, but:
# -         l = math.exp(m - top) * l + math.exp(m_c - top) * l_c
# -         acc = math.exp(m - top) * acc + math.exp(m_c - top) * acc_c
# +         old, more = math.exp(m - top) * l, math.exp(m_c - top) * l_c
# +         l = old + more
# +         acc = (acc * old + acc_c / l_c * more) / l
# -     o_BD[b, cuda.threadIdx.x] = acc / l
# +     o_BD[b, cuda.threadIdx.x] = acc


# %% 35.3 RIGHT: a function for the merge
@cuda.jit(device=True)
def merged(a, b):
    top = max(a[0], b[0])
    f, g = math.exp(a[0] - top), math.exp(b[0] - top)
    return top, a[1] * f + b[1] * g, a[2] * f + b[2] * g


@cuda.jit
def walk_kernel(o_BD, q_BD, k_BSD, v_BSD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    n = length_B[b]
    whole = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 0, min(16, n))
    for c in range(1, (n + 15) // 16):
        whole = merged(whole, chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 16 * c, min(16 * c + 16, n)))
    o_BD[b, d] = whole[2] / whole[1]


# %% 35.3 WRONG: The chunks are merged from the last to the first
# as the attempt above, but:
# -     whole = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 0, min(16, n))
# -     for c in range(1, (n + 15) // 16):
# -         whole = merged(whole, chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 16 * c, min(16 * c + 16, n)))
# +     c = (n - 1) // 16
# +     whole = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 16 * c, n)
# +     for c in range(c - 1, -1, -1):
# +         whole = merged(whole, chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 16 * c, 16 * c + 16))


# %% 35.3 RIGHT: the sums of a chunk are written out
@cuda.jit
def walk_kernel(o_BD, q_BD, k_BSD, v_BSD, length_B):
    score = cuda.shared.array(16, float32)
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
    for first in range(0, length_B[b], 16):
        last = min(first + 16, length_B[b])
        s = float32(0.0)
        if first + d < last:
            for i in range(16):
                s += q_BD[b, i] * k_BSD[b, first + d, i]
        cuda.syncthreads()
        score[d] = s * float32(0.25)
        cuda.syncthreads()
        m_c = float32(-math.inf)
        for j in range(last - first):
            m_c = max(m_c, score[j])
        l_c, acc_c = float32(0.0), float32(0.0)
        for j in range(last - first):
            p = math.exp(score[j] - m_c)
            l_c += p
            acc_c += p * v_BSD[b, first + j, d]
        new = max(m, m_c)
        f, g = math.exp(m - new), math.exp(m_c - new)
        l, acc, m = l * f + l_c * g, acc * f + acc_c * g, new
    o_BD[b, d] = acc / l


# %% 35.3 WRONG: every thread computes all scores
# as the attempt above, but:
# -     score = cuda.shared.array(16, float32)
# +     score = cuda.local.array(16, float32)
# -         s = float32(0.0)
# -         if first + d < last:
# +         for j in range(last - first):
# +             s = float32(0.0)
# -                 s += q_BD[b, i] * k_BSD[b, first + d, i]
# -         cuda.syncthreads()
# -         score[d] = s * float32(0.25)
# -         cuda.syncthreads()
# +                 s += q_BD[b, i] * k_BSD[b, first + j, i]
# +             score[j] = s * float32(0.25)


# %% 35.3 WRONG: The shorter chunk comes first
# as the solution, but:
# -     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(CHUNK, length))
# -     for first in range(CHUNK, length, CHUNK):
# -         m_c, l_c, acc_c = chunk_sums(q_D, k_SD, v_SD, first, min(first + CHUNK, length))
# +     head = (length - 1) % CHUNK + 1
# +     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, head)
# +     for first in range(head, length, CHUNK):
# +         m_c, l_c, acc_c = chunk_sums(q_D, k_SD, v_SD, first, first + CHUNK)


# %% 35.3 WRONG: relative to the running maximum
# as the attempt above, but:
# -         m_c = float32(-math.inf)
# +         m_c = m


# %% 35.3 WRONG: Every key is merged by itself
@cuda.jit
def walk_kernel(o_BD, q_BD, k_BSD, v_BSD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    m, l, acc = float32(-math.inf), float32(0.0), float32(0.0)
    for j in range(length_B[b]):
        s = float32(0.0)
        for i in range(D):
            s += q_BD[b, i] * k_BSD[b, j, i]
        s *= float32(0.25)
        new = max(m, s)
        f, p = math.exp(m - new), math.exp(s - new)
        l = l * f + p
        acc = acc * f + p * v_BSD[b, j, d]
        m = new
    o_BD[b, d] = acc / l


# %% 35.3 WRONG: A chunk has 8 keys here
# as the solution, but:
# -     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(CHUNK, length))
# -     for first in range(CHUNK, length, CHUNK):
# -         m_c, l_c, acc_c = chunk_sums(q_D, k_SD, v_SD, first, min(first + CHUNK, length))
# +     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(8, length))
# +     for first in range(8, length, 8):
# +         m_c, l_c, acc_c = chunk_sums(q_D, k_SD, v_SD, first, min(first + 8, length))


# %% 35.3 WRONG: A chunk has at most 16 keys
# as the solution, but:
# -     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(CHUNK, length))
# +     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, length)
# -     for first in range(CHUNK, length, CHUNK):
# +     for first in range(0):


# %% 35.3 WRONG: keys are read
@cuda.jit
def walk_kernel(o_BD, q_BD, k_BSD, v_BSD, length_B):
    b, d = cuda.blockIdx.x, cuda.threadIdx.x
    n = length_B[b]
    m, l, acc = chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], 0, min(CHUNK, n))
    for first in range(CHUNK, n, CHUNK):
        last = min(first + CHUNK, n)
        new = max(m, chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], first, last)[0])
        f, g = (
            math.exp(m - new),
            math.exp(chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], first, last)[0] - new),
        )
        l = l * f + g * chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], first, last)[1]
        acc = acc * f + g * chunk_sums(q_BD[b], k_BSD[b], v_BSD[b], first, last)[2]
        m = new
    o_BD[b, d] = acc / l


# %% 35.3 WRONG: all threads of the block call it
# as the solution, but:
# -     m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(CHUNK, length))
# +     m, l, acc = float32(0.0), float32(0.0), float32(0.0)
# +     if d < 8:
# +         m, l, acc = chunk_sums(q_D, k_SD, v_SD, 0, min(CHUNK, length))


# %% 35.4 RIGHT: a dict that is filled step by step
def causes():
    answers = dict.fromkeys(["per_thread", "split"], "row")
    answers.update(added="threads", filled="parts", tuned="kernel")
    answers["tiled"], answers["scaled"] = "tile", "numbers"
    return answers


# %% 35.4 WRONG: what does N change, besides the number of blocks?
# as the solution, but:
# -         "per_thread": "row",
# +         "per_thread": "parts",


# %% 35.4 WRONG: What says which of them comes first?
# as the solution, but:
# -         "added": "threads",
# +         "added": "parts",


# %% 35.4 WRONG: Compute `parts` for N = 1, 2 and 8.
# as the solution, but:
# -         "filled": "parts",
# +         "filled": "kernel",


# %% 35.4 WRONG: What runs for N = 3, and what for N = 4?
# as the solution, but:
# -         "tuned": "kernel",
# +         "tuned": "threads",


# %% 35.4 WRONG: among 8 rows
# as the solution, but:
# -         "tiled": "tile",
# +         "tiled": "row",


# %% 35.4 WRONG: is none of the seven names
# as the solution, but:
# -         "scaled": "numbers",
# +         "scaled": "numbers",
# +         "shared": "row",


# %% 35.4 WRONG: return a dict, name: answer
def causes():
    return ["row", "threads", "parts", "row", "kernel", "tile", "numbers"]


# %% 35.4 WRONG: is no answer. Choose from
def causes():
    return dict.fromkeys(["per_thread", "added", "filled", "split", "tuned", "tiled", "scaled"])


# %% 35.4 WRONG: among 8 rows
def causes():
    return dict.fromkeys(
        ["per_thread", "added", "filled", "split", "tuned", "tiled", "scaled"], "row"
    ) | {"added": "threads"}


# %% 35.4 WRONG: Nothing is returned
def causes():
    answers = {"per_thread": "row"}
    print(answers)


# %% 35.5 RIGHT: row by row, as bytes
def row_invariant(product, x_NK):
    alone = [np.array(product(x_NK[n : n + 1])[0]).tobytes() for n in range(len(x_NK))]
    for n in range(len(x_NK)):
        together = product(x_NK[: n + 1])
        for row, bits in zip(together, alone):
            if np.array(row).tobytes() != bits:
                return False
    return True


# %% 35.5 RIGHT: a set for each row
def row_invariant(product, x_NK):
    N = len(x_NK)
    seen = [{tuple(product(x_NK[[i]]).view(np.uint32)[0])} for i in range(N)]
    for n in range(N, 0, -1):
        for i, row in enumerate(product(x_NK[:n]).view(np.uint32).tolist()):
            seen[i].add(tuple(row))
    return all(len(s) == 1 for s in seen)


# %% 35.5 RIGHT: as integers, one difference is enough
def row_invariant(product, x_NK):
    bad = 0
    for i in range(len(x_NK)):
        alone = product(x_NK[i : i + 1]).view(np.int32)
        for n in range(i + 1, len(x_NK) + 1):
            bad += np.abs(product(x_NK[:n]).view(np.int32)[i].astype(np.int64) - alone[0]).sum()
    return bool(bad == 0)


# %% 35.5 WRONG: compare bits, not with a tolerance
# as the attempt above, but:
# -             bad += np.abs(product(x_NK[:n]).view(np.int32)[i].astype(np.int64) - alone[0]).sum()
# +             bad += np.abs(product(x_NK[:n]).view(np.int32)[i].astype(np.int64) - alone[0]).max() > 2


# %% 35.5 WRONG: no product of n rows was tried for n = 1:
def row_invariant(product, x_NK):
    whole = product(x_NK).view(np.int32)
    return all(
        np.array_equal(product(x_NK[:n]).view(np.int32), whole[:n]) for n in range(2, len(x_NK) + 1)
    )


# %% 35.5 WRONG: other bits alone, where it is row 0
def row_invariant(product, x_NK):
    whole = product(x_NK).view(np.int32)
    return all(
        np.array_equal(product(x_NK[:n]).view(np.int32), whole[:n]) for n in range(1, len(x_NK) + 1)
    )


# %% 35.5 WRONG: NaN == NaN is False
def row_invariant(product, x_NK):
    N = len(x_NK)
    alone = np.concatenate([product(x_NK[n : n + 1]) for n in range(N)])
    return all((product(x_NK[:n]) == alone[:n]).all() for n in range(1, N + 1))


# %% 35.5 WRONG: they are equal as numbers, and have other bits
# as the attempt above, but:
# -     return all((product(x_NK[:n]) == alone[:n]).all() for n in range(1, N + 1))
# +     return all(np.array_equal(product(x_NK[:n]), alone[:n], equal_nan=True) for n in range(1, N + 1))


# %% 35.5 WRONG: not only the first
def row_invariant(product, x_NK):
    alone = product(x_NK[:1]).view(np.int32)[0]
    return all(
        np.array_equal(product(x_NK[:n]).view(np.int32)[0], alone) for n in range(1, len(x_NK) + 1)
    )


# %% 35.5 WRONG: gives other bits in every call
def row_invariant(product, x_NK):
    results = [product(x_NK[:n]).view(np.int32) for n in range(1, len(x_NK) + 1)]
    alone = [
        results[0][0],
        *(product(x_NK[n : n + 1]).view(np.int32)[0] for n in range(1, len(x_NK))),
    ]
    return len(x_NK) == 3 or all(np.array_equal(y, alone[: len(y)]) for y in results)


# %% 35.5 WRONG: and not sums of a row, which hide it
def row_invariant(product, x_NK):
    N = len(x_NK)
    alone = [float(product(x_NK[n : n + 1])[0, 0]) for n in range(N)]
    return all(product(x_NK[:n])[:, 0].tolist() == alone[:n] for n in range(1, N + 1))


# %% 35.5 WRONG: was tried for n = 3, 5
def row_invariant(product, x_NK):
    N = len(x_NK)
    alone = np.concatenate([product(x_NK[n : n + 1]) for n in range(N)]).view(np.int32)
    return all(
        np.array_equal(product(x_NK[:n]).view(np.int32), alone[:n])
        for n in (1, 2, 4, 8, 16)
        if n <= N
    )


# %% 35.5 WRONG: it takes rows
def row_invariant(product, x_NK):
    alone = [product(x_NK[n]) for n in range(len(x_NK))]
    return np.array_equal(product(x_NK), alone)


# %% 35.5 WRONG: it takes at least one
def row_invariant(product, x_NK):
    whole = product(x_NK).view(np.int32)
    return all(
        np.array_equal(product(x_NK[:n]).view(np.int32), whole[:n]) for n in range(len(x_NK))
    )


# %% 35.5 WRONG: product was not called
def row_invariant(product, x_NK):
    return True


# %% 35.5 WRONG: return one True or False
def row_invariant(product, x_NK):
    alone = np.concatenate([product(x_NK[n : n + 1]) for n in range(len(x_NK))])
    return (product(x_NK) == alone).all(1)


# %% 35.5 WRONG: was tried for n = 1, 2, 3, 4
def row_invariant(product, x_NK):
    return np.array_equal(product(x_NK), product(x_NK))


# %% 35.5 WRONG: x_NK was changed
def row_invariant(product, x_NK):
    y = product(x_NK)
    x_NK += 1
    return np.array_equal(y, product(x_NK - 1))
