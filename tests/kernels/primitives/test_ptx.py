"""Single instructions of primitives/ptx.py and primitives/tensor_cores.py against NVIDIA's manual.

Without a GPU this tests the Python implementations that the simulator runs; with one, the instructions.
"""

import ml_dtypes
import numpy as np
import pytest
from checks import GPU, normal, rng, to_host, to_kernel

from xtrain.kernels.primitives.ptx import kernel, load1, load8, store1, store8
from xtrain.kernels.primitives.tensor_cores import (
    cp_async4,
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    exp2,
    fmax,
    high_bf16,
    ldmatrix,
    ldmatrix_trans,
    load2_shared,
    load16_shared,
    log2,
    low_bf16,
    mma_bf16,
    pack_bf16,
    store16,
    store16_shared,
    store_pair_shared,
    transpose_pairs,
    warp_id,
)
from xtrain.kernels.runtime.compiler import cuda, float32, int32, uint16, uint32
from xtrain.kernels.runtime.launch import launch
from xtrain.simulator import KernelError, RaceError, UninitializedError

BF16 = ml_dtypes.bfloat16
simulated = pytest.mark.skipif(GPU, reason="a GPU does not notice")


# ----------------------------------------------------------------------------- memory
@kernel(32)
def copy_kernel(y, x, at, one):
    registers = cuda.local.array(8, float32)
    if cuda.threadIdx.x == 0:
        if one:
            store1(y, at, load1(x, at))
        else:
            load8(registers, x, at)
            store8(y, at, registers)


@pytest.mark.parametrize("to", [np.float32, BF16])
@pytest.mark.parametrize("source", [np.float32, BF16])
def test_load_and_store(source, to):
    x = normal(1, 24, scale=100).astype(source)
    for one, n in ((False, 8), (True, 1)):
        y = to_kernel(np.zeros(24, to))
        launch(copy_kernel, 1, 32, y, to_kernel(x), 8, one)
        expected = np.zeros(24, to)
        expected[8 : 8 + n] = x[8 : 8 + n].astype(to)  # rounded to nearest even
        assert np.array_equal(to_host(y).view(np.uint8), expected.view(np.uint8))


@simulated
def test_unaligned_vectors_are_reported():
    with pytest.raises(
        KernelError, match="access to 8 elements at element 4: the index must be a multiple of 8"
    ):
        launch(
            copy_kernel,
            1,
            32,
            to_kernel(np.zeros(16, BF16)),
            to_kernel(np.ones(16, BF16)),
            4,
            False,
        )


@kernel(32)
def shared_vectors_kernel(y, x, pairs):
    """x -> shared memory two elements at a time -> 16 bytes -> y; and float pairs reversed"""
    smem, floats = cuda.shared.array(256, uint16), cuda.shared.array(64, float32)
    registers, two = cuda.local.array(4, uint32), cuda.local.array(2, float32)
    lane = cuda.threadIdx.x
    for j in range(4):
        i = 8 * lane + 2 * j
        store_pair_shared(smem, i, uint32(x[i]) | (uint32(x[i + 1]) << uint32(16)))
    floats[lane], floats[lane + 32] = float32(lane), float32(lane + 32)
    cuda.syncwarp()
    load16_shared(registers, smem, 8 * (31 - lane))
    cuda.syncwarp()
    store16_shared(smem, 8 * lane, registers)
    load16_shared(registers, smem, 8 * lane)
    store16(y, 8 * lane, registers)
    load2_shared(two, floats, 2 * (31 - lane))
    pairs[2 * lane], pairs[2 * lane + 1] = two[0], two[1]


def test_shared_vectors():
    x = normal(1, 256, dtype=BF16)
    y, pairs = to_kernel(np.zeros(256, BF16)), to_kernel(np.zeros(64, np.float32))
    launch(shared_vectors_kernel, 1, 32, y, to_kernel(x), pairs)
    assert np.array_equal(to_host(y).reshape(32, 8), x.reshape(32, 8)[::-1])
    assert np.array_equal(to_host(pairs).reshape(32, 2), np.arange(64).reshape(32, 2)[::-1])


# ----------------------------------------------------------------------------- values
@kernel(64)
def values_kernel(y, x, warps):
    i = cuda.threadIdx.x
    pair = pack_bf16(x[i], x[i + 1])
    y[0, i], y[1, i], y[2, i] = exp2(x[i]), log2(x[i] * x[i]), fmax(x[i], x[i + 1])
    y[3, i], y[4, i] = low_bf16(pair), high_bf16(pair)
    warps[i] = warp_id()


def test_values():
    x = normal(1, 65, scale=20)
    x[[3, 9]], x[5] = -np.inf, np.nan
    y, warps = to_kernel(np.zeros((5, 64), np.float32)), to_kernel(np.zeros(64, np.int32))
    launch(values_kernel, 1, 64, y, to_kernel(x), warps)
    a, b = x[:-1].astype(np.float64), x[1:].astype(np.float64)
    y = to_host(y)
    np.testing.assert_allclose(y[0], np.exp2(a), rtol=5e-7)
    np.testing.assert_allclose(y[1], np.log2(a * a), rtol=1e-6, atol=1e-6)
    assert y[0, 3] == 0 and np.isnan(y[0, 5])
    assert np.array_equal(y[2], np.fmax(a, b).astype(np.float32), equal_nan=True)
    assert np.array_equal(y[3], a.astype(BF16).astype(np.float32), equal_nan=True)
    assert np.array_equal(y[4], b.astype(BF16).astype(np.float32), equal_nan=True)
    assert np.array_equal(to_host(warps), np.arange(64) // 32)


# ----------------------------------------------------------------------------- the tensor core
@kernel(32)
def mma_kernel(c, a, b):
    """Fragments computed from the figures in the manual: lane 4 g + t."""
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    fa, fb = cuda.local.array(4, uint32), cuda.local.array(2, uint32)
    fc = cuda.local.array(4, float32)
    for j in range(4):
        row, column = g + 8 * (j % 2), 2 * t + 8 * (j // 2)
        fa[j] = pack_bf16(a[row, column], a[row, column + 1])
        fc[j] = c[g + 8 * (j // 2), 2 * t + j % 2]
    for j in range(2):
        fb[j] = pack_bf16(b[2 * t + 8 * j, g], b[2 * t + 8 * j + 1, g])
    mma_bf16(fc, fa, fb)
    for j in range(4):
        c[g + 8 * (j // 2), 2 * t + j % 2] = fc[j]


def test_mma():
    a, b, c = (
        normal(i, *s, dtype=BF16).astype(np.float32)
        for i, s in enumerate([(16, 16), (16, 8), (16, 8)])
    )
    got = to_kernel(c)
    launch(mma_kernel, 1, 32, got, to_kernel(a), to_kernel(b))
    np.testing.assert_allclose(to_host(got), c + a @ b, rtol=1e-5, atol=1e-5)


@kernel(32)
def transpose_kernel(y, x):
    y[cuda.threadIdx.x] = transpose_pairs(x[cuda.threadIdx.x])


def test_transpose_pairs():
    x = rng(1).integers(0, 2**16, (8, 8)).astype(np.uint16)
    y = to_kernel(np.zeros(32, np.uint32))
    launch(
        transpose_kernel, 1, 32, y, to_kernel(np.ascontiguousarray(x).view(np.uint32).reshape(-1))
    )
    assert np.array_equal(to_host(y).view(np.uint16).reshape(8, 8), x.T)


@kernel(32)
def ldmatrix_kernel(y, x, transpose, flip, more):
    """y[lane] = the lane's four registers as numbers; x: 64 rows of 8 elements, of which the lanes address 32"""
    smem = cuda.shared.array(1024, uint16)
    lane = cuda.threadIdx.x
    registers = cuda.local.array(4, uint32)
    for i in range(lane, x.size, 32):
        smem[i] = x[i]
    cuda.syncwarp()
    if transpose:
        ldmatrix_trans(registers, smem, 8 * lane, flip, more)
    else:
        ldmatrix(registers, smem, 8 * lane, flip, more)
    for j in range(4):
        y[lane, 2 * j] = uint16(registers[j] & uint32(0xFFFF))
        y[lane, 2 * j + 1] = uint16(registers[j] >> uint32(16))


@pytest.mark.parametrize("flip, more", [(0, 0), (8, 0), (0, 256), (16, 256)])
@pytest.mark.parametrize("transpose", [False, True])
def test_ldmatrix(transpose, flip, more):
    x = np.arange(512, dtype=np.uint16)
    y = to_kernel(np.zeros((32, 8), np.uint16))
    launch(ldmatrix_kernel, 1, 32, y, to_kernel(x), transpose, flip, more)
    rows = x.reshape(64, 8)[[((8 * i ^ flip) + more) // 8 for i in range(32)]].reshape(4, 8, 8)
    y = to_host(y).reshape(8, 4, 4, 2)  # g, t, matrix, half
    for m, matrix in enumerate(rows.transpose(0, 2, 1) if transpose else rows):
        assert np.array_equal(y[:, :, m].reshape(8, 8), matrix)


@simulated
def test_bank_conflicts_are_reported():
    @kernel(32)
    def conflict_kernel(x):
        smem = cuda.shared.array(2048, uint16)
        for i in range(cuda.threadIdx.x, 2048, 32):
            smem[i] = uint16(0)
        cuda.syncwarp()
        # Rows of 128 bytes: always the same banks.
        ldmatrix(x, smem, 64 * (cuda.threadIdx.x & 7), 0, 0)

    with pytest.raises(
        KernelError, match="bank conflict: 8 rows of 16 bytes use 1 of 8 bank groups"
    ):
        launch(conflict_kernel, 1, 32, to_kernel(np.zeros(4, np.uint32)))


# ----------------------------------------------------------------------------- copies
def make_copies_kernel(wait=True, commit=True, barrier=True):
    @kernel(64)
    def copies_kernel(y, z, x, f):
        """The second group may still be in flight when y is written. Threads read what others have copied."""
        smem, stats = cuda.shared.array(1024, uint16), cuda.shared.array(64, float32)
        registers, tid = cuda.local.array(4, uint32), cuda.threadIdx.x
        cp_async16(smem, 8 * tid, x, 8 * tid, tid < 60)  # 60 and beyond: zeros
        if commit:
            cp_async_commit()
        cp_async4(stats, tid, f, tid, tid != 7)
        cp_async_commit()
        if wait:
            cp_async_wait(1)
        if barrier:
            cuda.syncthreads()
        load16_shared(registers, smem, 8 * (63 - tid))
        store16(y, 8 * tid, registers)
        cp_async_wait(0)
        cuda.syncthreads()
        z[tid] = stats[63 - tid]

    return copies_kernel


def run_copies(**options):
    y, z = to_kernel(np.zeros(512, BF16)), to_kernel(np.zeros(64, np.float32))
    x, f = normal(1, 480, dtype=BF16), normal(2, 64)
    launch(make_copies_kernel(**options), 1, 64, y, z, to_kernel(x), to_kernel(f))
    return to_host(y), to_host(z), x, f


def test_copies():
    y, z, x, f = run_copies()
    f[7] = 0
    assert np.array_equal(y.reshape(64, 8)[::-1][:60], x.reshape(60, 8)) and not y[:32].any()
    assert np.array_equal(z[::-1], f)


@simulated
def test_copies_without_waiting_are_reported():
    with pytest.raises(UninitializedError, match="uninitialized read in copies_kernel"):
        run_copies(wait=False)
    with pytest.raises((RaceError, UninitializedError)):
        run_copies(barrier=False)


@simulated
def test_one_group_instead_of_two():
    """Without the first commit both copies are one group, which cp_async_wait(1) does not wait for."""
    with pytest.raises(UninitializedError):
        run_copies(commit=False)


@simulated
def test_a_copy_over_data_in_use_is_reported():
    @kernel(64)
    def overwrite_kernel(x):
        smem, tid = cuda.shared.array(1024, uint16), cuda.threadIdx.x
        smem[tid] = uint16(tid)
        cuda.syncthreads()
        x[tid] = smem[63 - tid]
        cp_async16(smem, 8 * int32(tid), x, 8 * int32(tid), tid < 8)

    with pytest.raises(RaceError):
        launch(overwrite_kernel, 1, 64, to_kernel(np.zeros(64, np.uint16)))
