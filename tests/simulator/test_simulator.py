"""xtrain.simulator: kernels of every kind compute the right result. The types and the reports are tested in other files."""

import contextlib
import inspect
import math

import numpy as np
import pytest
from numba import cuda, float32, int32, int64, uint16
from numba.cuda import libdevice

from xtrain import simulator
from xtrain.simulator import KernelError, SimArray, run, sim
from xtrain.simulator.observers import Observer, observe

FULL = 0xFFFFFFFF
TILE = 4


def f32(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ----------------------------------------------------------------------------- kernels
@cuda.jit(device=True)
def warp_total(v):
    for step in (16, 8, 4, 2, 1):
        v += cuda.shfl_down_sync(FULL, v, step)
    return cuda.shfl_sync(FULL, v, 0)


@cuda.jit(device=True)
def block_total(v, partial):
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    v = warp_total(v)
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()
    v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0.0)
    return warp_total(v)


@cuda.jit
def row_sums(out, x):
    partial = cuda.shared.array(32, float32)
    acc = float32(0)
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        acc += x[cuda.blockIdx.x, c]
    total = block_total(acc, partial)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = total


@pytest.mark.parametrize("threads", [32, 96, 256])
def test_reduction_over_a_block(threads):
    x, out = f32(3, 150), np.zeros(3, np.float32)
    run(row_sums, 3, threads, out, x)
    np.testing.assert_allclose(out, x.sum(1), rtol=1e-5, atol=1e-5)


@cuda.jit
def matmul(c, a, b):
    """Block (TILE, TILE); no shape is a multiple of TILE."""
    sa = cuda.shared.array((TILE, TILE), float32)
    sb = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
    j, i = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    (m, k), n = a.shape, b.shape[1]
    acc = float32(0.0)
    for k0 in range(0, k, TILE):
        sa[ty, tx] = a[i, k0 + tx] if i < m and k0 + tx < k else float32(0.0)
        sb[ty, tx] = b[k0 + ty, j] if k0 + ty < k and j < n else float32(0.0)
        cuda.syncthreads()
        for t in range(TILE):
            acc += sa[ty, t] * sb[t, tx]
        cuda.syncthreads()
    if i < m and j < n:
        c[i, j] = acc


def test_tiled_product_in_two_dimensions():
    a, b, c = f32(6, 9), f32(9, 7, seed=1), np.zeros((6, 7), np.float32)
    run(matmul, (2, 2), (TILE, TILE), c, a, b)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)


def test_strided_views_and_broadcasts():
    a, b, c = f32(9, 6).T, f32(7, 18, seed=1).T[::-2], np.zeros((6, 14), np.float32)[:, ::2]
    run(matmul, (2, 2), (TILE, TILE), c, a, b)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)
    run(matmul, (2, 2), (TILE, TILE), c, np.broadcast_to(a[:1], (6, 9)), b)
    np.testing.assert_allclose(c[5], a[0] @ b, rtol=1e-5, atol=1e-5)


@cuda.jit
def histogram(counts, values):
    local = cuda.shared.array(8, int32)
    tid = cuda.threadIdx.x
    if tid < 8:
        local[tid] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.add(local, values[i], 1)
    cuda.syncthreads()
    if tid < 8:
        cuda.atomic.add(counts, tid, local[tid])


def test_atomics_in_shared_and_global_memory():
    values = np.random.default_rng(0).integers(0, 8, 100).astype(np.int64)
    counts = np.zeros(8, np.int32)
    run(histogram, 4, 32, counts, values)
    assert (counts == np.bincount(values, minlength=8)).all()


@cuda.jit
def atomics(x, old, u):
    i = cuda.threadIdx.x
    old[0, i] = cuda.atomic.sub(x, 0, 1)
    old[1, i] = cuda.atomic.max(x, (1,), i)
    old[2, i] = cuda.atomic.min(x, 2, i)
    old[3, i] = cuda.atomic.exch(x, 3, i)
    old[4, i] = cuda.atomic.cas(x, 4, i, i + 1)
    old[5, i] = cuda.atomic.or_(x, 5, 1 << i)
    old[6, i] = cuda.atomic.and_(x, 6, ~(1 << i))
    old[7, i] = cuda.atomic.xor(x, 7, 3)
    old[8, i] = cuda.atomic.inc(u, 0, 2)
    old[9, i] = cuda.atomic.dec(u, 1, 2)


def test_atomics_return_what_was_there():
    x = np.array([10, 1, 1, 9, 0, 8, 7, 0], np.int32)
    old, u = np.zeros((10, 4), np.int64), np.zeros(2, np.uint32)
    run(atomics, 1, 4, x, old, u)
    assert x.tolist() == [6, 3, 0, 3, 4, 15, 0, 0] and u.tolist() == [1, 2]
    assert old.tolist() == [
        [10, 9, 8, 7], [1, 1, 1, 2], [1, 0, 0, 0], [9, 0, 1, 2], [0, 1, 2, 3],
        [8, 9, 11, 15], [7, 6, 4, 0], [0, 3, 0, 3], [0, 1, 2, 0], [0, 2, 1, 0],
    ]  # fmt: skip


@cuda.jit
def dynamic(out, x):
    """Two dynamic arrays over the same bytes."""
    floats, bits = cuda.shared.array(0, float32), cuda.shared.array(0, uint16)
    i = cuda.threadIdx.x
    floats[i] = x[i]
    cuda.syncthreads()
    out[i] = bits[2 * (31 - i) + 1]


def test_dynamic_shared_memory_is_one_stretch_of_bytes():
    x, out = f32(32), np.zeros(32, np.uint16)
    run(dynamic, 1, 32, out, x, shared=128)
    assert (out == (x[::-1].view(np.uint32) >> 16)).all()
    with pytest.raises(
        simulator.OutOfBoundsError, match=r"thread 16 uses floats\[16\].*shape is \(16,\)"
    ):
        run(dynamic, 1, 32, out, x, shared=64)


def make_polynomial(degree, coefficients):
    """A closure over numbers, a tuple and a device function."""
    size = degree + 1  # Numba does not compile arithmetic in a shape

    @cuda.jit(device=True)
    def power(x, n=1):
        y = float32(1.0)
        for _ in range(n):
            y *= x
        return y, n

    @cuda.jit
    def kernel(out, x):
        terms = cuda.local.array(size, float32)
        i = cuda.grid(1)
        if i >= x.size:
            return
        for d in range(degree + 1):
            y, used = power(x[i], n=d)
            terms[used] = y * float32(coefficients[d])
        out[i] = float32(0.0)
        for d in range(degree, -1, -1):
            out[i] += terms[d]

    return kernel


def test_closures_local_arrays_and_device_functions():
    x, out = f32(40), np.zeros(40, np.float32)
    run(make_polynomial(2, (1, 2.5, 3)), 2, 32, out, x)
    np.testing.assert_allclose(out, 1 + 2.5 * x + 3 * x * x, rtol=1e-5)


@cuda.jit
def votes(out, x):
    i = cuda.threadIdx.x
    v = x[i]
    out[0, i] = cuda.syncthreads_count(int32(v > 2))
    out[1, i] = cuda.syncthreads_or(int32(v > 40))
    out[2, i] = cuda.syncthreads_and(int32(v < 64))
    out[3, i] = cuda.ballot_sync(FULL, v % 2 == 1)
    out[4, i] = cuda.any_sync(FULL, v == 3)
    out[5, i] = cuda.all_sync(FULL, v < 32)
    out[6, i] = cuda.eq_sync(FULL, v < 32)
    out[7, i] = cuda.match_any_sync(FULL, v // 16)
    out[8, i] = cuda.shfl_up_sync(FULL, v, 1)
    out[9, i] = cuda.shfl_xor_sync(FULL, v, 3)
    out[10, i] = cuda.shfl_sync(FULL, v, i + 1)
    mask, same = cuda.match_all_sync(FULL, v // 32)
    out[11, i] = mask if same else 0


def test_votes_and_shuffles():
    x, out = np.arange(64, dtype=np.int32), np.zeros((12, 64), np.int64)
    run(votes, 1, 64, out, x)
    odd, half = np.int32(np.uint32(0xAAAAAAAA)), np.int32(np.uint32(0xFFFF0000))
    assert (out[:3] == [[61], [1], [1]]).all() and (
        out[3] == odd
    ).all()  # int32: bit 31 is the sign
    assert (out[4] == (x < 32)).all() and (out[5] == (x < 32)).all() and (out[6] == 1).all()
    assert (out[7] == np.where(x % 32 < 16, 0xFFFF, half)).all()
    assert (out[8] == np.where(x % 32 == 0, x, x - 1)).all() and (out[9] == x ^ 3).all()
    assert (out[10] == x // 32 * 32 + (x + 1) % 32).all() and (out[11] == -1).all()


@cuda.jit
def ticket(out, counter, k):
    """All lanes get one lane's int32. `base` is an int64 for Numba, because the other lanes hold the literal 0."""
    base = 0
    if cuda.laneid == 3:
        base = cuda.atomic.add(counter, 0, 5)
    out[0, cuda.laneid] = cuda.shfl_sync(FULL, base, 3)
    v = cuda.laneid
    if v > 9:
        v = k * 2**40
    out[1, cuda.laneid] = cuda.shfl_down_sync(FULL, v, 1)


def test_a_shuffled_integer_has_one_type():
    out = np.zeros((2, 32), np.int64)
    run(ticket, 1, 32, out, np.full(1, 7, np.int32), 3)
    assert (out[0] == 7).all()
    assert out[1].tolist() == [*range(1, 10), *[3 * 2**40] * 22, 3 * 2**40]


@cuda.jit
def half_a_warp(out):
    """Shuffles and syncwarp in part of a warp, with the matching mask; the other lanes return early."""
    lane = cuda.laneid
    s = cuda.shared.array(32, int32)
    if lane >= 16:
        return
    s[lane] = lane
    cuda.syncwarp(0xFFFF)
    out[lane] = cuda.shfl_xor_sync(0xFFFF, s[lane ^ 1], 1)


def test_part_of_a_warp():
    out = np.zeros(16, np.int32)
    run(half_a_warp, 1, 32, out)
    assert (out == np.arange(16)).all()


@cuda.jit
def rows(out, x):
    row = x[cuda.threadIdx.x]
    tail = row[1:3]
    out[cuda.threadIdx.x, 1:] = tail[0]
    out[cuda.threadIdx.x, 0] = len(tail) + x.T.shape[0] + x.ndim
    x[cuda.threadIdx.x, 0], row[1] = row[1], row[0]


def test_rows_slices_and_tuples():
    x, out = f32(3, 4), np.zeros((3, 3), np.float32)
    before = x.copy()
    run(rows, 1, 3, out, x)
    assert (out[:, 0] == 8).all() and (out[:, 1:] == before[:, 1:2]).all()
    assert (x[:, :2] == before[:, 1::-1]).all()


TABLE = np.array([3.0, 5.0, 7.0], np.float32)


@cuda.jit
def constants(out):
    i = cuda.threadIdx.x
    out[i] = cuda.const.array_like(TABLE)[i] + TABLE[i]


def test_arrays_from_outside():
    out = np.zeros(3, np.float32)
    run(constants, 1, 3, out)
    assert (out == 2 * TABLE).all()


@cuda.jit
def bit_functions(out, x):
    out[0] = cuda.popc(x[0])
    out[1] = cuda.clz(x[0])
    out[2] = cuda.ffs(x[0])
    out[3] = cuda.brev(x[1])
    out[4] = cuda.popc(int64(x[0]))
    out[5] = cuda.selp(x[0] < 0, int64(7), int64(8))
    out[6] = cuda.lanemask_lt()
    out[7] = libdevice.float_as_int(float32(1.0))


def test_bit_functions():
    out = np.zeros(8, np.int64)
    run(bit_functions, 1, 1, out, np.array([-8, 1], np.int32))
    assert out.tolist() == [29, 0, 4, 1 << 31, 61, 7, 0, 0x3F800000]


@cuda.jit
def float_functions(y, x):
    i = cuda.threadIdx.x
    y[0, i] = math.exp(x[i])
    y[1, i] = math.log(x[i])
    y[2, i] = math.sqrt(x[i])
    y[3, i] = libdevice.rsqrtf(x[i])
    y[4, i] = libdevice.fast_expf(x[i])
    y[5, i] = max(x[i], float32(0.5))
    y[6, i] = min(x[i], float32(0.5))
    y[7, i] = cuda.fma(x[i], x[i], float32(1.0))
    y[8, i] = math.tanh(x[i])


def test_float_functions_never_raise():
    x = np.array([0.3, 2.0, 0.0, -1.0, 1000.0, np.inf, -np.inf, np.nan], np.float32)
    y = np.zeros((9, x.size), np.float32)
    run(float_functions, 1, x.size, y, x)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        expected = [np.exp(wide), np.log(wide), np.sqrt(wide), 1 / np.sqrt(wide), np.exp(wide)]
        expected += [np.fmax(x, 0.5), np.fmin(x, 0.5), wide * wide + 1, np.tanh(wide)]
        np.testing.assert_allclose(y, np.array(expected).astype(np.float32), rtol=2e-7)


@cuda.jit
def last_block_sums(out, partial, counter, x):
    """Every block writes its sum; the block that finishes last adds them up."""
    is_last = cuda.shared.array(1, int32)
    shared = cuda.shared.array(32, float32)
    b, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = block_total(x[b, tid], shared)
    if tid == 0:
        partial[b] = total
        cuda.threadfence()
        is_last[0] = cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1
        cuda.threadfence()
    cuda.syncthreads()
    if is_last[0] and tid == 1:
        out[0] = float32(0.0)
        for i in range(cuda.gridDim.x):
            out[0] += partial[i]


def test_threadfence_and_an_atomic_order_blocks():
    x, out = f32(5, 64), np.zeros(1, np.float32)
    run(last_block_sums, 5, 64, out, np.zeros(5, np.float32), np.zeros(1, np.int32), x)
    np.testing.assert_allclose(out, x.sum(), rtol=1e-4)


@cuda.jit
def neighbours(x):
    """syncwarp between two steps: it orders the lanes of one warp, and the two warps need no order."""
    s = cuda.shared.array(64, float32)
    i, first = cuda.threadIdx.x, cuda.threadIdx.x // 32 * 32
    s[i] = x[i]
    cuda.syncwarp()
    v = s[first + (i + 1) % 32]
    cuda.syncwarp()
    s[i] = v
    cuda.syncwarp()
    x[i] = s[first + (i + 1) % 32]


def test_syncwarp_orders_a_warp():
    x = np.arange(64, dtype=np.float32)
    run(neighbours, 1, 64, x)
    i = np.arange(64)
    assert (x == i // 32 * 32 + (i + 2) % 32).all()


# ----------------------------------------------------------------------------- arrays and launches
def test_simarray_is_a_copy_and_views_keep_the_type():
    x = f32(3, 4).T
    s = sim(x)
    assert type(s) is SimArray and s.flags.c_contiguous and not np.shares_memory(s, x)
    for view in (s[1:], s.reshape(-1), s.T, s.view(np.int32), s + 1, s.copy()):
        assert type(view) is SimArray
    assert type(sim(s)) is SimArray and float(s.sum()) == float(np.asarray(s).sum())


@cuda.jit
def indices(out):
    x, y = cuda.grid(2)
    out[y, x, 0] = cuda.gridsize(2)[0] * 100 + cuda.gridsize(2)[1]
    out[y, x, 1] = cuda.blockIdx.y * 100 + cuda.threadIdx.y
    out[y, x, 2] = cuda.laneid * 100 + cuda.warpsize


def test_grid_and_block_of_several_dimensions():
    out = np.zeros((6, 8, 3), np.int64)
    run(indices, (2, 3), (4, 2), out)
    assert (out[..., 0] == 806).all()
    assert (out[:, 0, 1] == [0, 1, 100, 101, 200, 201]).all()
    assert (out[1, :, 2] == [432, 532, 632, 732] * 2).all()


def test_bad_launches():
    x, out = f32(1, 32), np.zeros(1, np.float32)
    with pytest.raises(KernelError, match="row_sums: a block of 2048 threads: the limit is 1024"):
        run(row_sums, 1, (64, 32), out, x)
    with pytest.raises(ValueError, match="1 to 3 positive integers"):
        run(row_sums, 0, 32, out, x)
    with pytest.raises(ValueError, match=r"1 to 3 positive integers, got \(0.5\)"):
        run(row_sums, 16 / 32, 32, out, x)
    for kind in ("O", ">f4", "g"):
        with pytest.raises(
            KernelError, match=r"row_sums: x is an array of .*, which Numba does not support"
        ):
            run(row_sums, 1, 32, out, x.astype(kind))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        run(row_sums, 1, 32, out)


# ----------------------------------------------------------------------------- intrinsics, as kernels/primitives/ptx.py adds them
def only_on_a_gpu(*args):
    raise NotImplementedError


def also_only_on_a_gpu(*args):
    raise NotImplementedError


@simulator.simulates(only_on_a_gpu)
def add_pair(thread, site, x, i):
    thread.state["calls"] = thread.state.get("calls", 0) + 1
    return thread.load(x, i, site) + thread.load(x, i + 1, site) + np.float32(thread.state["calls"])


@simulator.simulates(also_only_on_a_gpu, collective=True)
def reverse(threads, sites, args):
    assert [t.lane for t in threads] == list(range(32)) and len(sites) == 32
    return [value for (value,) in reversed(args)]


@cuda.jit
def uses_intrinsics(out, x):
    i = cuda.threadIdx.x
    v = only_on_a_gpu(x, i) + only_on_a_gpu(x, i)
    out[i] = also_only_on_a_gpu(v)


def test_intrinsics_have_simulated_twins():
    x, out = f32(33), np.zeros(32, np.float32)
    run(uses_intrinsics, 1, 32, out, x)
    np.testing.assert_allclose(out, (2 * (x[:-1] + x[1:]) + 3)[::-1], rtol=1e-5)
    with pytest.raises(simulator.OutOfBoundsError, match=r"element 32 in only_on_a_gpu\(x, i\)"):
        run(uses_intrinsics, 1, 32, out, x[:32])


def doubles_registers(*args):
    raise NotImplementedError


@simulator.simulates(doubles_registers)
def double_registers(thread, site, registers, n):
    values = np.array(thread.load_registers(registers, int(n), site))
    thread.store_registers(registers, 2 * values, site)


@cuda.jit
def uses_registers(out, x, written, n):
    t = cuda.threadIdx.x
    table = cuda.local.array((2, 4), float32)
    for i in range(written):
        table[1, i] = x[t + i]
    doubles_registers(table[1], n)
    for i in range(4):
        out[t, i] = table[1, i]


def reverses_words(*args):
    raise NotImplementedError


@simulator.simulates(reverses_words)
def reverse_words(thread, site, out, x, i):
    values = np.array(thread.load_elements(x, i, 4, site))
    thread.store_elements(out, i, values[::-1], site)


@cuda.jit
def uses_words(out, x, first, step, apart):
    shared = cuda.shared.array(8, float32)
    i = apart * cuda.threadIdx.x
    reverses_words(shared[first:], x, i)
    reverses_words(out[::step], shared, i)


def test_neighbours_are_checked_as_single_elements():
    x = f32(8)
    for observer in (None, Observer()):
        with observe(observer) if observer else contextlib.nullcontext():
            for step in (1, 2):
                out = np.zeros(8 * step, np.float32)
                run(uses_words, 1, 2, out, x, 0, step, 4)
                np.testing.assert_array_equal(out[::step], x)
            out = np.zeros(8, np.float32)
            with pytest.raises(simulator.UninitializedError, match=r"element 0\b.*reverses_words"):
                run(uses_words, 1, 1, out, x, 1, 1, 4)
            with pytest.raises(simulator.RaceError):
                run(uses_words, 1, 2, out, x, 0, 1, 3)
            with pytest.raises(simulator.OutOfBoundsError, match="element 6 in reverses_words"):
                run(uses_words, 1, 2, out, x[:6], 0, 1, 4)


@cuda.jit
def shares_registers(out):
    pair = cuda.shared.array(2, float32)
    if cuda.threadIdx.x == 0:
        pair[0] = out[0]
        pair[1] = out[1]
    cuda.syncthreads()
    doubles_registers(pair, 2)
    cuda.syncthreads()
    out[0] = pair[0]


def test_registers_are_checked_as_single_elements():
    """A row of a local array, at once or, with an observer, one by one: same values, same findings."""
    x = f32(5)

    class Count(Observer):
        accesses = 0

        def access(self, thread, array, k, site, how, value):
            self.accesses += "doubles_registers" in thread.instruction

    for observer in (None, Count()):
        with observe(observer) if observer else contextlib.nullcontext():
            out = np.zeros((2, 4), np.float32)
            run(uses_registers, 1, 2, out, x, 4, 3)
            factors = np.float32([2, 2, 2, 1])
            np.testing.assert_array_equal(out, [x[:4] * factors, x[1:] * factors])
            with pytest.raises(
                simulator.UninitializedError, match=r"element 2\b.*doubles_registers"
            ):
                run(uses_registers, 1, 2, out, x, 2, 3)
            with pytest.raises(simulator.OutOfBoundsError, match=r"element 4 in doubles_registers"):
                run(uses_registers, 1, 2, out, x, 4, 5)
            with pytest.raises(simulator.RaceError):
                run(shares_registers, 1, 2, out[0])
    assert observer.accesses > 2 * 6


def test_line_numbers_survive():
    translated = inspect.getsourcelines(row_sums.py_func)
    with pytest.raises(KernelError) as caught:
        run(row_sums, 1, 32, np.zeros(0, np.float32), f32(1, 4))
    line = translated[1] + next(i for i, s in enumerate(translated[0]) if "out[cuda" in s)
    assert caught.value.sites[0].line == line and f"test_simulator.py:{line}" in str(caught.value)
