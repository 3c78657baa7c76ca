"""Attempts at the exercises of lesson 3: see test_attempts.py."""


# %% 3.1 WRONG: floats are added by an atomic
@cuda.jit
def warp_sums_kernel(sums_W, x_n):
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    if lane == 0:
        sums_W[cuda.blockIdx.x] = float32(0.0)
    cuda.syncthreads()
    if i < x_n.size:
        cuda.atomic.add(sums_W, cuda.blockIdx.x, x_n[i])


# %% 3.1 WRONG: one lane reads one element after the other
@cuda.jit
def warp_sums_kernel(sums_W, x_n):
    if cuda.threadIdx.x == 0:
        first = cuda.blockIdx.x * 32
        total = float32(0.0)
        for i in range(first, min(first + 32, x_n.size)):
            total += x_n[i]
        sums_W[cuda.blockIdx.x] = total


# %% 3.1 RIGHT: shuffles downwards, only lane 0 has the whole sum
@cuda.jit
def warp_sums_kernel(sums_W, x_n):
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    v = float32(0.0)
    if i < x_n.size:
        v = x_n[i]
    step = 16
    while step > 0:
        v += cuda.shfl_down_sync(FULL, v, step)
        step //= 2
    if lane == 0:
        sums_W[cuda.blockIdx.x] = v


# %% 3.1 RIGHT: a tree in shared memory, and the last lane writes
@cuda.jit
def warp_sums_kernel(sums_W, x_n):
    s = cuda.shared.array(32, float32)
    lane = cuda.threadIdx.x
    i = cuda.blockIdx.x * 32 + lane
    s[lane] = x_n[i] if i < x_n.size else float32(0.0)
    for step in (16, 8, 4, 2, 1):
        cuda.syncthreads()
        if lane < step:
            s[lane] += s[lane + step]
    cuda.syncthreads()
    if lane == 31:
        sums_W[cuda.blockIdx.x] = s[0]


# %% 3.2 WRONG: floats are added by an atomic
@cuda.jit
def block_sum_kernel(total_1, x_n):
    tid = cuda.threadIdx.x
    if tid == 0:
        total_1[0] = float32(0.0)
    cuda.syncthreads()
    acc = float32(0.0)
    for i in range(tid, x_n.size, cuda.blockDim.x):
        acc += x_n[i]
    cuda.atomic.add(total_1, 0, acc)


# %% 3.2 WRONG: floats are added by an atomic
# in shared memory, after the warps have added theirs
@cuda.jit
def block_sum_kernel(total_1, x_n):
    partial = cuda.shared.array(1, float32)
    tid = cuda.threadIdx.x
    if tid == 0:
        partial[0] = float32(0.0)
    cuda.syncthreads()
    acc = float32(0.0)
    for i in range(tid, x_n.size, cuda.blockDim.x):
        acc += x_n[i]
    v = warp_sum(acc)
    if tid % 32 == 0:
        cuda.atomic.add(partial, 0, v)
    cuda.syncthreads()
    if tid == 0:
        total_1[0] = partial[0]


# %% 3.2 WRONG: There is a barrier, but not all threads reach it
# as the solution, but:
# -     cuda.syncthreads()
# +         cuda.syncthreads()


# %% 3.2 WRONG: threads read x_n
@cuda.jit
def block_sum_kernel(total_1, x_n):
    if cuda.threadIdx.x == 0:
        acc = float32(0.0)
        for i in range(x_n.size):
            acc += x_n[i]
        total_1[0] = acc


# %% 3.2 RIGHT: the first thread adds up the warps' sums one by one
@cuda.jit
def block_sum_kernel(total_1, x_n):
    partial = cuda.shared.array(32, float32)
    tid = cuda.threadIdx.x
    acc = float32(0.0)
    i = tid
    while i < x_n.size:
        acc += x_n[i]
        i += cuda.blockDim.x
    acc = warp_sum(acc)
    if tid % 32 == 31:
        partial[tid // 32] = acc
    cuda.syncthreads()
    if tid == 0:
        total = float32(0.0)
        for w in range(cuda.blockDim.x // 32):
            total += partial[w]
        total_1[0] = total


# %% 3.2 RIGHT: every thread owns a contiguous part
@cuda.jit
def block_sum_kernel(total_1, x_n):
    s = cuda.shared.array(1024, float32)
    tid, T = cuda.threadIdx.x, cuda.blockDim.x
    part = (x_n.size + T - 1) // T
    acc = float32(0.0)
    for i in range(tid * part, min((tid + 1) * part, x_n.size)):
        acc += x_n[i]
    s[tid] = acc
    cuda.syncthreads()
    if tid == 0:
        total = float32(0.0)
        for t in range(T):
            total += s[t]
        total_1[0] = total


# %% 3.3 WRONG: Another number than the argument `eps`
# as the solution, but:
# -     rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)
# +     rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + float32(1e-5))


# %% 3.3 WRONG: eps is missing under the root
# as the solution, but:
# -     rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C) + eps)
# +     rstd = float32(1.0) / math.sqrt(block_sum(acc, partial) / float32(C))


# %% 3.3 WRONG: Divide the work
@cuda.jit
def rmsnorm_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    n = cuda.blockIdx.x
    C = x_NC.shape[1]
    if cuda.threadIdx.x == 0:
        acc = float32(0.0)
        for c in range(C):
            acc += x_NC[n, c] * x_NC[n, c]
        rstd = float32(1.0) / math.sqrt(acc / float32(C) + eps)
        rstd_N[n] = rstd
        for c in range(C):
            y_NC[n, c] = x_NC[n, c] * rstd * w_C[c]


# %% 3.3 WRONG: are added by an atomic
@cuda.jit
def rmsnorm_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    total = cuda.shared.array(1, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C = x_NC.shape[1]
    if tid == 0:
        total[0] = float32(0.0)
    cuda.syncthreads()
    for c in range(tid, C, cuda.blockDim.x):
        cuda.atomic.add(total, 0, x_NC[n, c] * x_NC[n, c])
    cuda.syncthreads()
    rstd = float32(1.0) / math.sqrt(total[0] / float32(C) + eps)
    if tid == 0:
        rstd_N[n] = rstd
    for c in range(tid, C, cuda.blockDim.x):
        y_NC[n, c] = x_NC[n, c] * rstd * w_C[c]


# %% 3.3 RIGHT: the mean of the squares by a division before the sum, rstd written by the last thread
@cuda.jit
def rmsnorm_kernel(y_NC, rstd_N, x_NC, w_C, eps):
    partial = cuda.shared.array(32, float32)
    n, tid = cuda.blockIdx.x, cuda.threadIdx.x
    C = x_NC.shape[1]
    acc = float32(0.0)
    for c in range(tid, C, cuda.blockDim.x):
        acc += x_NC[n, c] ** 2 / float32(C)
    mean = block_sum(acc, partial)
    rstd = math.pow(mean + eps, float32(-0.5))
    if tid == cuda.blockDim.x - 1:
        rstd_N[n] = rstd
    for c in range(tid, C, cuda.blockDim.x):
        y_NC[n, c] = w_C[c] * (rstd * x_NC[n, c])
