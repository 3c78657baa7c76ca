"""Attempts at the exercises of lesson 14: see test_attempts.py."""


# %% 14.1 WRONG: mma_bf16
# the product without a tensor core
@cuda.jit
def mma_kernel(c, a, b):
    lane = cuda.threadIdx.x
    for i in range(lane, 128, 32):
        acc = float32(0.0)
        for k in range(16):
            acc += a[i // 8, k] * b[k, i % 8]
        c[i // 8, i % 8] = acc


# %% 14.1 RIGHT: register by register
@cuda.jit
def mma_kernel(c, a, b):
    fa, fb = cuda.local.array(4, uint32), cuda.local.array(2, uint32)
    acc = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x >> 2, (cuda.threadIdx.x & 3) << 1
    fa[0] = pack_bf16(a[g, t], a[g, t + 1])
    fa[1] = pack_bf16(a[g + 8, t], a[g + 8, t + 1])
    fa[2] = pack_bf16(a[g, t + 8], a[g, t + 9])
    fa[3] = pack_bf16(a[g + 8, t + 8], a[g + 8, t + 9])
    fb[0] = pack_bf16(b[t, g], b[t + 1, g])
    fb[1] = pack_bf16(b[t + 8, g], b[t + 9, g])
    acc[0] = acc[1] = acc[2] = acc[3] = float32(0.0)
    mma_bf16(acc, fa, fb)
    c[g, t], c[g, t + 1], c[g + 8, t], c[g + 8, t + 1] = acc[0], acc[1], acc[2], acc[3]


# %% 14.2 RIGHT: rotated by the row
def place(row, chunk):
    return 64 * row + 8 * ((row + chunk) % 8)


# %% 14.2 WRONG: only 4 different ones
def place(row, chunk):
    return 64 * row + 8 * (chunk ^ row % 4)
