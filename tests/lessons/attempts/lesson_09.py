"""Attempts at the exercises of lesson 9: see test_attempts.py."""


# %% 9.1 RIGHT: a running sum over the sequence, from which every row takes its own
@cuda.jit
def prefix_mean_kernel(y_NC, x_NC, T):
    n = cuda.blockIdx.x
    t = n % T
    for c in range(cuda.threadIdx.x, y_NC.shape[1], cuda.blockDim.x):
        mean = float32(0.0)
        for i in range(t + 1):
            mean += (x_NC[n - t + i, c] - mean) / float32(i + 1)
        y_NC[n, c] = mean


# %% 9.1 WRONG: Divide the work
@cuda.jit
def prefix_mean_kernel(y_NC, x_NC, T):
    n = cuda.blockIdx.x
    if n % T == 0:  # the first block of a sequence writes all its rows
        for c in range(cuda.threadIdx.x, y_NC.shape[1], cuda.blockDim.x):
            acc = float32(0.0)
            for i in range(T):
                acc += x_NC[n + i, c]
                y_NC[n + i, c] = acc / float32(i + 1)


# %% 9.2 RIGHT: the scale is multiplied into the query
@cuda.jit
def scores_kernel(s_BHTT, q_BTHD, k_BTHD, scale):
    T, H, D = q_BTHD.shape[1], q_BTHD.shape[2], q_BTHD.shape[3]
    b = cuda.blockIdx.z // H
    h = cuda.blockIdx.z - b * H
    j, i, _ = cuda.grid(3)
    if max(i, j) < T:
        acc = float32(0.0)
        for d in range(D):
            acc += (scale * q_BTHD[b, i, h, d]) * k_BTHD[b, j, h, d]
        s_BHTT[b, h, i, j] = acc


# %% 9.3 RIGHT: looks back to the last kernel before which the GPU was idle
def queue_ends(gpu_us, launch_us):
    ends = []
    for i in range(len(gpu_us)):
        ends.append(max((j + 1) * launch_us + sum(gpu_us[j : i + 1]) for j in range(i + 1)))
    return ends


# %% 9.3 WRONG: a kernel also waits for the end of the previous one
def queue_ends(gpu_us, launch_us):
    return [(i + 1) * launch_us + t for i, t in enumerate(gpu_us)]
