"""Seven ways to compute y (N, O) = x (N, K) w (O, K)^T in float32: lesson 35 asks in which of them a row's bits depend on
more than the row and w. Each function fills y; arrays on a GPU or in the simulator.
"""

from xtrain.kernels.runtime.compiler import cuda, float32
from xtrain.kernels.runtime.launch import empty, launch

FULL = 0xFFFFFFFF  # all 32 lanes of a warp
FEW = 4  # rows
PARTS = 8


# ----------------------------------------------------------------------------- a thread per element
@cuda.jit
def thread_kernel(y_NO, x_NK, w_OK):
    i = cuda.grid(1)
    width = y_NO.shape[1]
    if i < y_NO.size:
        total = float32(0.0)
        for k in range(x_NK.shape[1]):
            total += x_NK[i // width, k] * w_OK[i % width, k]
        y_NO[i // width, i % width] = total


def per_thread(y_NO, x_NK, w_OK):
    launch(thread_kernel, -(-y_NO.size // 64), 64, y_NO, x_NK, w_OK)


# ----------------------------------------------------------------------------- a warp per element
@cuda.jit
def adding_kernel(y_NO, x_NK, w_OK):
    o = cuda.blockIdx.x
    n = cuda.blockIdx.y
    total = float32(0.0)
    for k in range(cuda.threadIdx.x, x_NK.shape[1], 32):
        total += x_NK[n, k] * w_OK[o, k]
    cuda.atomic.add(y_NO, (n, o), total)


def added(y_NO, x_NK, w_OK):
    y_NO.fill(0)
    launch(adding_kernel, y_NO.shape[::-1], 32, y_NO, x_NK, w_OK)


# ----------------------------------------------------------------------------- K in parts
@cuda.jit
def part_kernel(part_PNO, x_NK, w_OK):
    o = cuda.threadIdx.x
    n = cuda.blockIdx.x
    p = cuda.blockIdx.y
    P = part_PNO.shape[0]
    K = x_NK.shape[1]
    total = float32(0.0)
    for k in range(p * K // P, (p + 1) * K // P):
        total += x_NK[n, k] * w_OK[o, k]
    part_PNO[p, n, o] = total


@cuda.jit
def add_parts_kernel(y_NO, part_PNO):
    o = cuda.threadIdx.x
    n = cuda.blockIdx.x
    total = float32(0.0)
    for p in range(part_PNO.shape[0]):
        total += part_PNO[p, n, o]
    y_NO[n, o] = total


def in_parts(y_NO, x_NK, w_OK, parts):
    N, width = y_NO.shape
    part_PNO = empty(x_NK, (parts, N, width))
    launch(part_kernel, (N, parts), width, part_PNO, x_NK, w_OK)
    launch(add_parts_kernel, N, width, y_NO, part_PNO)


def filled(y_NO, x_NK, w_OK):
    in_parts(y_NO, x_NK, w_OK, max(1, PARTS // y_NO.shape[0]))


def split(y_NO, x_NK, w_OK):
    in_parts(y_NO, x_NK, w_OK, PARTS)


# ----------------------------------------------------------------------------- two kernels
@cuda.jit
def warp_kernel(y_NO, x_NK, w_OK):
    o = cuda.blockIdx.x
    n = cuda.blockIdx.y
    total = float32(0.0)
    for k in range(cuda.threadIdx.x, x_NK.shape[1], 32):
        total += x_NK[n, k] * w_OK[o, k]
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL, total, step)
    if cuda.threadIdx.x == 0:
        y_NO[n, o] = total


def tuned(y_NO, x_NK, w_OK):
    if y_NO.shape[0] < FEW:
        launch(warp_kernel, y_NO.shape[::-1], 32, y_NO, x_NK, w_OK)
    else:
        launch(thread_kernel, -(-y_NO.size // 64), 64, y_NO, x_NK, w_OK)


# ----------------------------------------------------------------------------- tiles of rows
@cuda.jit
def tile_kernel(y_NO, x_NK, w_OK):
    o = cuda.threadIdx.x
    N, K = x_NK.shape
    first = cuda.blockIdx.x * FEW
    full = first + FEW <= N
    for n in range(first, min(first + FEW, N)):
        even = float32(0.0)
        odd = float32(0.0)
        for k in range(K):
            if full and k % 2 == 1:
                odd += x_NK[n, k] * w_OK[o, k]
            else:
                even += x_NK[n, k] * w_OK[o, k]
        y_NO[n, o] = even + odd


def tiled(y_NO, x_NK, w_OK):
    N, width = y_NO.shape
    launch(tile_kernel, -(-N // FEW), width, y_NO, x_NK, w_OK)


# ----------------------------------------------------------------------------- a scale
@cuda.jit
def scaled_kernel(y_NO, x_NK, w_OK, scale):
    o = cuda.threadIdx.x
    n = cuda.blockIdx.x
    total = float32(0.0)
    for k in range(x_NK.shape[1]):
        total += x_NK[n, k] / scale * w_OK[o, k]
    y_NO[n, o] = total * scale


def scaled(y_NO, x_NK, w_OK):
    N, width = y_NO.shape
    launch(scaled_kernel, N, width, y_NO, x_NK, w_OK, float32(abs(x_NK).max()))


PRODUCTS = {f.__name__: f for f in (per_thread, added, filled, split, tuned, tiled, scaled)}
