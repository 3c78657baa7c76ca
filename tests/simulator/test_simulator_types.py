"""The numbers of xtrain.simulator have the types of Numba's type inference, which needs no GPU."""

import linecache
import math
import operator
import types as python_types

import numpy as np
import pytest
from numba import (
    boolean,
    cuda,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    types,
    uint8,
    uint16,
    uint32,
    uint64,
)
from numba.cuda import libdevice  # noqa: F401  the expressions below use it

from xtrain import simulator
from xtrain.simulator import run, scalars, twins

KINDS = [boolean, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float32, float64]
OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
    operator.lt, operator.eq,
]  # fmt: skip


def value(kind, x=3):
    return twins.twin(kind)(np.int64(x))


def kind_of(x):
    return scalars.scalar_type(np.asarray(x).dtype) if isinstance(x, bool) else type(x)


@pytest.fixture(scope="module")
def typing_context():
    from numba.cuda.descriptor import cuda_target

    cuda_target.typing_context.refresh()
    return cuda_target.typing_context


def check_against_numba(context, function, simulated, kinds):
    try:
        expected = context.resolve_function_type(function, kinds, {}).return_type
    except Exception:  # Numba refuses these types
        return 0
    with np.errstate(all="ignore"):
        result = simulated(*map(value, kinds))
    want = twins.twin(expected).scalar
    assert kind_of(result) is want, f"{function.__name__}{kinds}: {type(result)}, Numba: {expected}"
    return 1


def test_operators_have_numbas_types(typing_context):
    checked = 0
    for op in OPERATORS:
        for a in KINDS:
            for b in KINDS:
                if a is not boolean or b is not boolean:  # as an expression, below
                    checked += check_against_numba(typing_context, op, op, (a, b))
    for op in (operator.neg, operator.pos, operator.invert):
        for a in KINDS[1:]:
            checked += check_against_numba(typing_context, op, op, (a,))
    assert checked > 1200


def test_functions_have_numbas_types(typing_context):
    for function in (math.exp, math.sqrt, math.log, math.fabs, math.floor, math.isnan, round, int):
        for a in KINDS[1:]:
            assert check_against_numba(typing_context, function, twins.TWINS[function], (a,))
    for function in (min, max, math.atan2, math.copysign, math.hypot):
        for a in KINDS[1:]:
            for b in KINDS[1:]:
                if function in (min, max) or float32 in (a, b) or float64 in (a, b):
                    assert check_against_numba(
                        typing_context, function, twins.TWINS[function], (a, b)
                    )


# With x, y float32, d float64, n, m int32, k int64, u uint32, w uint64, t boolean.
EXPRESSIONS = """
x * y | x * 0.5 | x * 2 | x / 2 | x + n | x + k | x * float32(0.5) | 0.5 | 3 | -3 | n * m | n + 1 | n / m | n // m
n % 32 | -n | ~n | n << 1 | u & 0xffff | u * u | u + n | u >> 3 | w * w | w + k | w >> 3 | x ** 2 | x ** n | n ** 2
1.0 / x | float32(1.0) / x | x / cuda.blockDim.x | x / float32(n) | float32(n) * 2 | int32(x) | int64(n) * m
uint32(n) * uint32(m) | math.exp(x) | math.exp(n) | math.sqrt(x / n) | math.pow(x, y) | math.floor(x) | abs(n) | abs(x)
cuda.threadIdx.x | cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x | cuda.grid(1) | cuda.gridsize(1)
cuda.laneid | cuda.grid(2)[0] | cuda.blockDim.x // 32 | 1 if t else 2.5 | x if t else 0.0
0.0 if t else x | x if t else float32(0.0) | x if t else 0 | n if t else 0 | -1.0 if t else x
x if t else d | x if t else 0 | n if t else x * y | x * 2 if t else x | -x if t else n | x if t else int32(d)
x < y | n == m | not t | t and n > 0 | (x < y) + (n < m) | x * (n < m) | round(x) | int(x) | int(n) | float(n) | float(x)
cuda.popc(n) | cuda.clz(k) | cuda.ffs(n) | cuda.brev(u) | cuda.fma(x, y, x) | cuda.selp(t, x, y) | libdevice.rsqrtf(x)
libdevice.fast_expf(x) | cuda.ballot_sync(1, n) | cuda.shfl_sync(1, x, 0) | cuda.shfl_sync(1, n, 0)
cuda.shfl_xor_sync(1, k, 0) | cuda.shfl_sync(1, d, 0) | cuda.any_sync(1, t) | cuda.match_any_sync(1, n)
cuda.syncthreads_count(n) | cuda.syncthreads_or(n) | np.float32(n) | np.int32(x) * n | math.inf | math.pi * x
HALF * x | HALF32 * x | COUNT * n | COUNT * x
t + t | t - t | t * t | t / t | t // t | t % t | t << t | t >> t | t ** 2 | -t | +t | ~t | t & t | t + n | t * u | t * x
math.trunc(x) | math.trunc(d) | math.trunc(n) | libdevice.truncf(x) | math.ldexp(x, n) | math.ldexp(d, n) | t + d | (t + t) * x
(x > 0) + t | t + False | (t + t) / x | w / k | ~u | -u
"""
HALF, HALF32, COUNT = 0.5, np.float32(0.5), 8
ARGUMENTS = dict(
    x=float32, y=float32, d=float64, n=int32, m=int32, k=int64, u=uint32, w=uint64, t=boolean
)


def noted(x):
    """Records a value inside a simulated kernel."""


seen = []


@simulator.simulates(noted)
def note(thread, site, x):
    seen.append(x)


def defined(name, source):
    """A function compiled from text, whose source inspect can find."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), globals(), scope := {})
    return scope[name]


def inferred(monkeypatch, function, kinds):
    """Numba's type for what the function returns; no GPU and no NVVM needed."""
    import numba.cuda.dispatcher
    from numba.cuda.compiler import compile_cuda

    here = python_types.SimpleNamespace(compute_capability=(9, 0))
    if hasattr(numba.cuda.dispatcher, "get_current_device"):
        monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: here)
    return compile_cuda(function, None, kinds, cc=(9, 0)).signature.return_type


@pytest.mark.parametrize(
    "expression", [e.strip() for line in EXPRESSIONS.strip().splitlines() for e in line.split("|")]
)
def test_expressions_have_numbas_types(monkeypatch, expression):
    names = ", ".join(ARGUMENTS)
    function = defined("function", f"def function({names}):\n    return {expression}\n")
    kernel = defined("kernel", f"@cuda.jit\ndef kernel({names}):\n    noted({expression})\n")
    seen.clear()
    for t in (0, 1):
        args = (value(k, t if k is boolean else 3) for k in ARGUMENTS.values())
        run(kernel, 1, 1, *args, allow={"division_by_zero"})
    expected = inferred(monkeypatch, function, tuple(ARGUMENTS.values()))
    want = twins.twin(expected).scalar
    assert [kind_of(x) for x in seen] == [want, want], f"{seen}, Numba: {expected}"


@cuda.jit
def accumulate(out, x, h):
    single, double, mixed = float32(0.0), 0.0, 0
    for i in range(x.size):
        single += x[i]
        double += x[i]
        mixed += x[i] * 0.1
    out[0], out[1], out[2] = single, double, mixed
    v = h[0]
    for _ in range(5):
        v = uint32(v * 747796405 + 2891336453)
    h[0] = v
    h[1] = uint32(int32(2147483647) + int32(1)) >> 1
    h[2] = int32(int64(1) << 40 | 5)
    h[3] = (h[3] + 1) * 65537 * 65537


def test_values_round_and_wrap_as_on_a_gpu():
    x = (np.random.default_rng(0).standard_normal(1000) * 1000).astype(np.float32)
    out = np.zeros(3)
    h = np.array([7, 0, 0, 2**31], np.uint32)
    run(accumulate, 1, 1, out, x, h)
    single = np.float32(0)
    for v in x:
        single += v
    mixed = np.float64(0)
    for v in x:
        mixed += np.float64(v) * 0.1
    assert out[0] == single and out[1] == np.cumsum(x.astype(np.float64))[-1] and out[2] == mixed
    v = 7
    for _ in range(5):
        v = (v * 747796405 + 2891336453) % 2**32
    assert h.tolist() == [v, 2**30, 5, (2**31 + 1) * 65537 * 65537 % 2**32]


@cuda.jit
def bools_and_bits(out, p, x, u8, u16, u32, u64, i32):
    t, f = x[0] > 0, x[1] > 0
    both, many = False, False
    for i in range(4):
        both += p[0]
        many += x[i] > -2
    p_sum = p[0] + p[0]
    out[0], out[1], out[2], out[3], out[4] = t + t, f - t, p_sum, both, many
    out[5] = p[0]
    out[5] += p[0] * p[0]
    out[6], out[7], out[8] = ~u8[0], ~u16[0], ~u32[0]
    out[9], out[10], out[11] = -u8[0], -u16[0], -u32[0]
    out[12] = cuda.popc(~u32[0])
    out[13], out[14] = -i32[0], abs(i32[0])
    x[0] = u64[0] / i32[1]
    p[1] = ~p[0]


def test_bools_count_as_integers_and_bits_turn_before_they_widen():
    """As Numba's code: `zext` of both bools to int64; `xor i32 %a, -1` and `sub i32 0, %a`, extended to 64 bits afterwards."""
    out, x, p = np.zeros(15, np.int64), np.array([1, -1, 2, 3], np.float32), np.ones(2, bool)
    least = np.array([-(2**31), -7], np.int32)
    unsigned = [np.ones(1, np.uint8), np.ones(1, np.uint16), np.ones(1, np.uint32)]
    run(bools_and_bits, 1, 1, out, p, x, *unsigned, np.array([2**63 + 5], np.uint64), least)
    bits = [2**b - 2 for b in (8, 16, 32)] + [2**b - 1 for b in (8, 16, 32)]
    assert out.tolist() == [2, -1, 2, 4, 4, 2, *bits, 31, -(2**31), -(2**31)]
    assert x[0] == np.float32(-(2**63) / 7) and not p[1]


def test_scalar_arguments_have_numbas_types():
    kernel = defined("kernel", "@cuda.jit\ndef kernel(a, b, c, d):\n    noted((a, b, c, d))\n")
    seen.clear()
    run(kernel, 1, 1, 3, 0.5, np.int32(4), True)
    assert [type(v) for v in seen[0]] == [np.int64, np.float64, scalars.Int32, np.bool_]


def test_numba_types_are_known():
    for kind in KINDS:
        assert scalars.dtype_of(kind) == np.dtype(str(types.bool_ if kind is boolean else kind))


@pytest.mark.parametrize(
    "kind, gives",
    [(np.int64, np.int64), (scalars.Int32, scalars.Int32), (scalars.UInt32, scalars.UInt64)],
)
def test_ranges_are_those_of_python(kind, gives):
    for given in ((5,), (0,), (-3,), (2, 9), (9, 2), (1, 12, 5), (1020, 1030), (5000, 3), (7, -1, -2), (-4, 3)):  # fmt: skip
        if kind is scalars.UInt32 and min(given) < 0:
            continue
        numbers = [*twins.TWINS[range](*map(kind, given))]
        assert [*map(int, numbers)] == [*range(*given)] and {*map(type, numbers)} <= {gives}


@cuda.jit
def bools_next_to_numbers(y):
    tile = cuda.shared.array((2, 2), float32)
    flags = cuda.shared.array(2, np.bool_)
    tile[0, 0] = 2
    flags[0] = flags[1] = True

    def total(tile):  # another array of this name
        return tile[0] + tile[1]

    y[0] = tile[0, 0] * flags[0]
    y[1] = flags[0] + flags[1]
    y[2] = total(flags)


def test_an_array_without_bools_hides_no_other():
    y = np.zeros(3)
    run(bools_next_to_numbers, 1, 1, y)
    assert y.tolist() == [2, 2, 2]
