"""What Numba CUDA has besides arrays and numbers: functions and tuples of arrays as arguments, views, records, random numbers,
cooperative grids, half precision, vector types, recursion, activemask.
"""

import enum
import math
from collections import namedtuple

import numpy as np
import pytest
from numba import cuda, float32, int16, int32, uint8, uint32
from numba import float32 as numba_float32
from numba.cuda import random as cuda_random

from xtrain import simulator
from xtrain.simulator import DeadlockError, KernelError, OutOfBoundsError, RaceError, check, run


def ramp(n=8, dtype=np.float32):
    return np.arange(n, dtype=dtype)


# ----------------------------------------------------------------------------- functions as values
@cuda.jit(device=True)
def square(v):
    return v * v


@cuda.jit(device=True)
def neighbour(v):
    return cuda.shfl_xor_sync(0xFF, v, 1)


@cuda.jit(device=True)
def twice(f, v):
    return f(f(v))


@cuda.jit
def applies(o, f, functions, x):
    i = cuda.threadIdx.x
    o[0, i] = f(x[i])
    o[1, i] = twice(f, x[i])
    o[2, i] = functions[1](x[i]) + twice(square, x[i])
    for g in functions:
        o[3, i] += g(x[i])


@pytest.mark.parametrize(
    "f, of", [(square, lambda x: x * x), (neighbour, lambda x: x[np.arange(8) ^ 1])]
)
def test_functions_as_arguments(f, of):
    o, x = np.zeros((4, 8), np.float32), ramp()
    run(applies, 1, 8, o, f, (square, neighbour), x)
    near = x[np.arange(8) ^ 1]
    assert (o == [of(x), of(of(x)), near + x**4, x * x + near]).all()
    with pytest.raises(KernelError, match=r"f is a Python function: decorate it with @cuda.jit"):
        run(applies, 1, 8, o, lambda v: v, (square,), x)


HALF = 0.5
half_of = cuda.jit(device=True)(lambda v: float32(v * HALF))


@cuda.jit
def calls_a_lambda(o, x):
    i = cuda.threadIdx.x
    o[i] = half_of(x[i]) + twice(half_of, x[i])


def test_lambdas_as_device_functions():
    o, x = np.zeros(8, np.float32), ramp()
    run(calls_a_lambda, 1, 8, o, x)
    assert (o == 0.75 * x).all()


@pytest.mark.parametrize("n", [1, 31, 300])
def test_the_kernels_of_cuda_reduce(n):
    """Numba's own kernels for cuda.reduce, launched as it launches them."""
    from numba.cuda.kernels.reduction import _gpu_reduce_factory

    kernel = _gpu_reduce_factory(lambda a, b: a + b, numba_float32)
    x, init = ramp(n) + 1, np.float32(3)
    full, rest = divmod(n, 128)
    partials = simulator.empty(full + bool(rest), np.float32)
    if full:
        run(
            kernel,
            full,
            128,
            x[: 128 * full],
            partials[:full],
            init,
            True,
            allow={"exited_threads"},
        )
    if rest:
        run(kernel, 1, rest, x[128 * full :], partials[full:], init, not full)
    if len(partials) > 1:
        run(kernel, 1, len(partials), partials, partials, init, False)
    assert partials[0] == n * (n + 1) // 2 + 3


@cuda.jit(device=True)
def into_shared(o, op, v, first):
    """op is one of cuda.atomic's functions."""
    s = cuda.shared.array(1, uint32)
    i = cuda.threadIdx.x
    if i == 0:
        s[0] = first
    cuda.syncthreads()
    old = op(s, 0, v)
    cuda.syncthreads()
    o[i], o[8] = old, s[0]


@cuda.jit
def passes_an_atomic(o, which):
    i = cuda.threadIdx.x
    if which == 0:
        into_shared(o, cuda.atomic.add, i + 1, 3)
    elif which == 1:
        into_shared(o, cuda.atomic.or_, uint32(1) << i, 3)
    else:
        into_shared(o, cuda.atomic.inc, 5, 3)


def test_atomics_as_arguments():
    o = np.zeros(9, np.int64)
    for which, want in enumerate((3 + 36, 255, 5)):
        run(passes_an_atomic, 1, 8, o, which, allow={"same_value_race"})
        assert o[8] == want
    assert sorted(o[:8]) == [0, 1, 2, 3, 3, 4, 4, 5]  # inc wraps around after 5


@cuda.jit(device=True)
def waits_for(op, a, turn):
    while op(a, 0, 0) != turn:
        pass


@cuda.jit
def in_turns(a, o):
    i = cuda.grid(1)
    waits_for(cuda.atomic.add, a, 3 - i)
    o[i] = cuda.atomic.add(a, 0, 1)


def test_a_waiting_loop_whose_atomic_is_an_argument():
    o = np.zeros(4)
    run(in_turns, 2, 2, np.zeros(1, np.int32), o)
    assert o.tolist() == [3, 2, 1, 0]


@cuda.jit
def extremes(x, o):
    o[0] = cuda.atomic.max(x, 0, 5)
    o[1] = cuda.atomic.min(x, 1, math.nan)
    o[2] = cuda.atomic.nanmax(x, 2, 5)
    o[3] = cuda.atomic.max(x, 3, 5)


def test_atomic_max_keeps_nan_in_memory_and_nanmax_replaces_it():
    x, o = np.array([np.nan, 2, np.nan, 4]), np.zeros(4)
    run(extremes, 1, 1, x, o)
    np.testing.assert_array_equal(o, [np.nan, 2, np.nan, 4])
    np.testing.assert_array_equal(x, [np.nan, 2, 5, 5])


# ----------------------------------------------------------------------------- recursion
@cuda.jit(device=True)
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


@cuda.jit(device=True)
def is_even(n):
    if n == 0:
        return True
    return is_odd(n - 1)


@cuda.jit(device=True)
def is_odd(n):
    if n == 0:
        return False
    return is_even(n - 1)


@cuda.jit
def recursive(o):
    i = cuda.threadIdx.x
    o[0, i], o[1, i] = factorial(i), is_even(i)


def test_recursion():
    o = np.zeros((2, 6), np.int64)
    run(recursive, 1, 6, o)
    assert o.tolist() == [[1, 1, 2, 6, 24, 120], [1, 0, 1, 0, 1, 0]]


# ----------------------------------------------------------------------------- tuples of arrays
Pair = namedtuple("Pair", "left right scale")


@cuda.jit
def uses_tuples(arrays, pair, k):
    i = cuda.threadIdx.x
    for a in arrays:
        a[i] += 1
    arrays[k][i] = pair.left[i] * pair.scale + pair.right[0, i]


@cuda.jit
def reads_a_neighbour(arrays):
    i = cuda.threadIdx.x
    arrays[0][i] = arrays[1][7 - i]


def test_tuples_and_namedtuples_of_arrays():
    a, b, x = np.zeros(8, np.float32), np.zeros(8, np.int64), ramp()
    run(uses_tuples, 1, 8, (a, b), Pair(x, x.reshape(1, 8), 2), 1)
    assert (a == 1).all() and (b == 3 * x).all()
    with pytest.raises(RaceError):  # both are one array
        run(reads_a_neighbour, 1, 8, (x, x))
    with pytest.raises(OutOfBoundsError, match=r"uses arrays\[1\]\[7\]"):
        run(reads_a_neighbour, 1, 8, (a, x[:4]))


# ----------------------------------------------------------------------------- views of an array
@cuda.jit
def complex_parts(z, o):
    i = cuda.threadIdx.x
    local = cuda.local.array(2, np.complex64)
    local[0] = complex(o[i], 1)
    o[i] = z[i].real * 10 + z[i].imag
    z.real[i] = local.real[0]
    z.imag[i] = -z.imag[i] + local[0].imag
    z[i] = z[i] * 2j


def test_real_and_imag():
    z, o = (ramp(4) + 1j * ramp(4)[::-1]).astype(np.complex64), ramp(4)
    run(complex_parts, 1, 4, z, o)
    assert o.tolist() == [3, 12, 21, 30]
    assert (z == (ramp(4) + 1j * (1 - ramp(4)[::-1])) * 2j).all()


@cuda.jit
def reshapes(o, m):
    i = cuda.threadIdx.x
    s = cuda.shared.array(8, float32)
    tile = s.reshape((2, 4))
    tile[i // 4, i % 4] = m.ravel()[i]
    cuda.syncthreads()
    o[i] = s.reshape(4, -1)[i % 4, i // 4] + m.reshape(8)[0] + m.T.shape[0]


@cuda.jit
def reshapes_a_column(m):
    m.T.ravel()[0] = 1


def test_reshape_and_ravel():
    o, m = np.zeros(8, np.float32), ramp().reshape(4, 2) + 1
    run(reshapes, 1, 8, o, m)
    assert (o == m.ravel().reshape(4, 2).T.ravel() + 3).all()
    with pytest.raises(KernelError, match="reshape and ravel need a C-contiguous array"):
        run(reshapes_a_column, 1, 1, m)


@cuda.jit
def views(o, x, early):
    i = cuda.threadIdx.x
    s = cuda.shared.array(8, int32)
    s[i] = x.view(int32)[i]
    if not early:
        cuda.syncthreads()
    o[i] = s.view(int16)[2 * (7 - i) + 1]
    local = cuda.local.array(2, uint32)
    local.view(np.float32)[0] = x[i]
    o[8 + i] = local[0] >> uint32(16)
    x.view(uint8)[4 * i] = 1


def test_views_of_the_bytes():
    x, o = ramp() + 1, np.zeros(16, np.int64)
    high = x.view(np.int16)[1::2].copy()
    run(views, 1, 8, o, x, False)
    assert (
        (o[:8] == high[::-1]).all() and (o[8:] == high).all() and (x.view(np.uint8)[::4] == 1).all()
    )
    assert {f.kind for f in check(views, 1, 8, o, ramp(), True)} >= {"race"}


# ----------------------------------------------------------------------------- warps
@cuda.jit
def active(o, x):
    i = cuda.threadIdx.x
    if x[i] > 2:
        o[i] = cuda.activemask()
    else:
        o[i] = -1


def test_activemask():
    o = np.zeros(64, np.int64)
    run(active, 1, 64, o, np.arange(64) % 5)
    lanes = [[i % 5 > 2 for i in range(first, first + 32)] for first in (0, 32)]
    masks = [sum(1 << i for i, on in enumerate(warp) if on) for warp in lanes]
    assert o.tolist() == [masks[i // 32] if i % 5 > 2 else -1 for i in range(64)]


# ----------------------------------------------------------------------------- records
POINT = np.dtype(
    [
        ("tag", np.int8),
        ("x", np.float32),
        ("h", np.int32, (3,)),
        ("in", [("u", np.int16), ("v", np.float64)]),
    ]
)


@cuda.jit
def uses_records(o, a, one):
    i = cuda.threadIdx.x
    r = a[i]
    r.x = r.x * 2 + a.tag[i]
    a[i].tag += 1
    r["h"][1] = one.h[2]
    a[i].h[0], o[i] = i, r.h[1] + a[i]["x"]
    field = a[i]["in"]
    field.v = field["u"] + 0.5


@cuda.jit
def copies_records(a, b):
    s = cuda.shared.array(4, POINT_TYPE)
    i = cuda.threadIdx.x
    s[i] = b[i]
    cuda.syncthreads()
    a[i] = s[3 - i]


@cuda.jit
def records_race(a, o, other):
    i = cuda.threadIdx.x
    a[i].x = 1
    o[i] = a[3 - i].x if other == 0 else a[3 - i].tag


POINT_TYPE = __import__("numba").from_dtype(np.dtype(POINT, align=True))


@cuda.jit
def fields_by_name(a, o):
    i = cuda.threadIdx.x
    a["n"][i] += 1
    cuda.syncthreads()
    o[i] = cuda.atomic.add(a["n"], 0, 1)


def test_the_array_of_a_field_by_its_name():
    a, o = np.zeros(4, np.dtype([("x", np.float32), ("n", np.int32)])), np.zeros(4, np.int32)
    run(fields_by_name, 1, 4, a, o)
    assert a["n"].tolist() == [5, 1, 1, 1] and sorted(o) == [1, 2, 3, 4]


def points(n=4, align=False):
    a = np.zeros(n, np.dtype(POINT.descr, align=align) if align else POINT)
    a["tag"], a["x"], a["in"]["u"] = np.arange(n), np.arange(n) + 10, 7
    a["h"] = np.arange(3 * n).reshape(n, 3)
    return a


@pytest.mark.parametrize("step", [1, -1, 2])
def test_records(step):
    a, o = points(8)[::step][:4], np.zeros(4, np.float32)
    before = a.copy()
    run(uses_records, 1, 4, o, a, points()[3])
    assert (a["x"] == before["x"] * 2 + before["tag"]).all() and (
        a["tag"] == before["tag"] + 1
    ).all()
    assert (a["h"] == np.stack([np.arange(4), np.full(4, 11), before["h"][:, 2]], 1)).all()
    assert (o == 11 + a["x"]).all() and (a["in"]["v"] == 7.5).all() and (a["in"]["u"] == 7).all()


def test_whole_records_and_races_between_fields():
    b = points()
    a = np.zeros_like(b)
    b = b.astype(np.dtype(POINT, align=True))
    a = np.zeros_like(b)
    run(copies_records, 1, 4, a, b)
    assert (a == b[::-1]).all()
    o = np.zeros(4)
    with pytest.raises(RaceError, match=r"read a.x\[\d\].*wrote it"):
        run(records_race, 1, 4, points(), o, 0)
    run(records_race, 1, 4, points(), o, 1)  # another field of the same record
    with pytest.raises(OutOfBoundsError, match=r"uses a\[7\]"):
        run(uses_records, 1, 8, np.zeros(8, np.float32), points(7), points()[3])
    with pytest.raises(KernelError, match="has no missing"):
        run(cuda.jit(missing_field), 1, 1, points())


def missing_field(a):
    a[0].x = a[0].missing


@cuda.jit
def writes_records(r, pair, source):
    r.x = pair[0].x + source[1].x
    r["h"] = source[2].h
    pair[1].tag = 5


def test_a_record_by_itself_is_changed_in_place():
    a, b, source = points(), points(2), points()
    run(writes_records, 1, 1, a[3], (b[0], b[1]), source)
    assert a["x"].tolist() == [10, 11, 12, 21] and a["h"][3].tolist() == [6, 7, 8]
    assert (a["in"] == points()["in"]).all() and (a[:3] == points()[:3]).all()
    assert b["tag"].tolist() == [0, 5] and (source == points()).all()
    with pytest.raises(KernelError, match=r"several elements of record\.h"):
        run(cuda.jit(wrong_shape), 1, 1, a[0], np.zeros(2))


def wrong_shape(r, x):
    r["h"] = x


class Colour(enum.Enum):
    RED, GREEN = 1, 2


@cuda.jit
def compares_members(o):
    o[0] = Colour["RED"] == Colour.RED
    o[1] = Colour["RED"] != Colour["GREEN"]


def test_members_of_an_enum_by_name():
    o = np.zeros(2, np.bool_)
    run(compares_members, 1, 1, o)
    assert o.all()


# ----------------------------------------------------------------------------- random numbers
@cuda.jit
def draws(o, states):
    i = cuda.grid(1)
    o[0, i] = cuda_random.xoroshiro128p_uniform_float32(states, i)
    o[1, i] = cuda_random.xoroshiro128p_uniform_float64(states, i)
    o[2, i] = cuda_random.xoroshiro128p_normal_float32(states, i)
    o[3, i] = cuda_random.xoroshiro128p_normal_float64(states, i)


def xoroshiro(state):
    """The generator in Python's integers, from its paper (Blackman and Vigna)."""
    s0, s1 = state
    result, s1 = (s0 + s1) % 2**64, s1 ^ s0
    rotated = [(x << k | x >> 64 - k) % 2**64 for x, k in ((s0, 55), (s1, 36))]
    state[:] = rotated[0] ^ s1 ^ (s1 << 14) % 2**64, rotated[1]
    return (result >> 11) / 2**53


def test_xoroshiro128p():
    states = np.zeros(6, cuda_random.xoroshiro128p_dtype)
    states["s0"], states["s1"] = np.random.default_rng(0).integers(
        1, 2**63, (2, 6), dtype=np.uint64
    )
    python = [[int(a), int(b)] for a, b in states]
    o = np.zeros((4, 6))
    run(draws, 2, 3, o, states)
    want = []
    for state in python:
        uniform = [xoroshiro(state) for _ in range(6)]
        normal = [
            math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
            for u, v in (uniform[2:4], uniform[4:])
        ]
        want.append([*uniform[:2], *normal])
    np.testing.assert_allclose(o.T, want, rtol=2e-6, atol=1e-6)
    assert [[int(a), int(b)] for a, b in states] == python


@cuda.jit
def sums(o, x, h):
    o[0] = x.sum() + np.sum(x[1]) + x[:, 0].sum()
    h[0] = h.sum()


def test_sums_of_arrays_as_numba_cuda_has_them():
    x, o, h = ramp(8).reshape(2, 4), np.zeros(1), np.array([2**30, 2**30, 2**30])
    run(sums, 1, 1, o, x, h)
    assert o[0] == 28 + 22 + 4 and h[0] == 3 * 2**30


# ----------------------------------------------------------------------------- cooperative grids
@cuda.jit
def passes_on(x, steps):
    """Every block reads what the block before it wrote in the last step."""
    grid = cuda.cg.this_grid()
    i, n = cuda.grid(1), cuda.gridsize(1)
    for _ in range(steps):
        v = x[(i + 1) % n]
        grid.sync()
        x[i] = v + 1
        cuda.cg.this_grid().sync()


@cuda.jit
def forgets_a_sync(x, o):
    i, n = cuda.grid(1), cuda.gridsize(1)
    x[i] = i
    cuda.cg.this_grid().sync()
    o[i] = x[(i + 1) % n]
    x[i] = 0


@cuda.jit
def some_blocks_sync(x):
    if cuda.blockIdx.x > 0:
        cuda.cg.this_grid().sync()


@cuda.jit
def some_threads_return(x, o, first):
    i = cuda.grid(1)
    if not first <= cuda.threadIdx.x < first + 2:
        return
    x[i] = i
    cuda.cg.this_grid().sync()
    o[i] = x[(i + 4) % 8]


def test_threads_that_have_returned_before_a_grid_sync():
    """The grid waits for thread 0 of every block, which a barrier of the block makes wait for the others."""
    x, o = np.zeros(8), np.zeros(8)
    found = check(some_threads_return, 2, 4, x, o, 0)
    assert {f.kind for f in found} == {"exited_threads"}
    assert o.tolist() == [4, 5, 0, 0, 0, 1, 0, 0]
    with pytest.raises(DeadlockError, match=r"wait in grid.sync"):
        run(some_threads_return, 2, 4, x, o, 1, allow={"exited_threads"})


def test_cooperative_grids():
    x = ramp(12)
    run(passes_on, 4, 3, x, 5)
    assert (x == np.roll(ramp(12), -5) + 5).all()
    with pytest.raises(RaceError, match="between blocks"):
        run(forgets_a_sync, 12, 1, x, np.zeros(12))
    returned = (
        r"wait in grid.sync(.|\n)*block \(\d, 0, 0\) has returned and never reaches grid.sync"
    )
    with pytest.raises(DeadlockError, match=returned):
        run(some_blocks_sync, 3, 2, x)


# ----------------------------------------------------------------------------- half precision, vectors, NumPy's functions
@cuda.jit
def halves(o, x, b):
    i = cuda.threadIdx.x
    y = x[i] * x[i] + x[i]
    o[0, i] = y
    o[1, i] = cuda.fp16.hfma(x[i], x[i], x[i])
    o[2, i] = cuda.fp16.hsqrt(cuda.fp16.habs(cuda.fp16.hneg(x[i])))
    o[3, i] = cuda.fp16.hmax(x[i], x[0]) if cuda.fp16.hgt(x[i], x[1]) else cuda.fp16.hrcp(x[i])
    b[i] = x[i] * float32(1.0001)


def test_half_precision():
    x = (ramp(4) * 0.37 + 0.61).astype(np.float16)
    o, b = np.zeros((4, 4), np.float16), np.zeros(4, np.float32)
    run(halves, 1, 4, o, x, b)
    wide = x.astype(np.float64)
    fma = (wide * wide + wide).astype(np.float16)
    last = np.where(x > x[1], x, (1 / wide).astype(np.float16))
    assert (o == [x * x + x, fma, np.sqrt(wide).astype(np.float16), last]).all()
    assert (b == x.astype(np.float32) * np.float32(1.0001)).all()


@cuda.jit
def vectors(o, x):
    i = cuda.threadIdx.x
    v = cuda.float32x4(x[0], x[1], cuda.float32x2(x[2], i))
    w = cuda.int3(i, 2.9, 3)
    o[i] = v.x + 10 * v.y + 100 * v.z + 1000 * v.w + w.y


def test_vector_types():
    o = np.zeros(3, np.float32)
    run(vectors, 1, 3, o, ramp() + 1)
    assert o.tolist() == [323, 1323, 2323]
    with pytest.raises(KernelError, match="float32x2 takes 2 components, got 3"):
        run(cuda.jit(wrong_vector), 1, 1, o)


def wrong_vector(o):
    o[0] = cuda.float32x2(1, 2, 3).x


@cuda.jit
def array_functions(o, x, m):
    np.sin(x, o)
    np.hypot(m, o, m)


def test_numpys_functions_with_an_output():
    o, x, m = np.zeros(4, np.float32), ramp(4), ramp(8).reshape(2, 4)
    want = np.hypot(m, np.sin(x))
    run(array_functions, 1, 1, o, x, m)
    np.testing.assert_allclose(o, np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(m, want, rtol=1e-6)


@cuda.jit
def functions_of_integers(o, a, b):
    np.bitwise_and(a, b, o[0])
    np.maximum(a, b, o[1])
    np.logical_xor(a, b, o[2])
    np.invert(a, o[3])
    i = np.minimum(a[3], b[3])
    o[4, 0] = i
    o[4, 1] = np.less_equal(a[3], b[3])


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "uint32", "int64", "uint64"])
def test_numpys_functions_of_integers(dtype):
    a, b = ramp(4, dtype), ramp(4, dtype)[::-1] + np.ones((), dtype)
    o = np.zeros((5, 4), dtype)
    run(functions_of_integers, 1, 1, o, a, b)
    last = [min(a[3], b[3]), a[3] <= b[3], 0, 0]
    assert (o == [a & b, np.maximum(a, b), np.logical_xor(a, b), ~a, last]).all()


@cuda.jit
def remainders(o, x, y):
    i = cuda.grid(1)
    o[i] = math.remainder(x[i], y[i])


def test_remainder():
    x, y, o = np.array([5.0, -7, 1, np.inf]), np.array([3.0, 2, 0, 1]), np.zeros(4)
    run(remainders, 1, 4, o, x, y)
    np.testing.assert_array_equal(o, [-1, 1, np.nan, np.nan])
