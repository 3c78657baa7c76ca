"""bfloat16 numbers in the simulator against PyTorch and exact arithmetic, and their types against numba-cuda's rules."""

import itertools
import math
import operator
import types
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from numba import cuda, float32, int32

from xtrain.simulator import check, half, run, scalars, sim, twins
from xtrain.simulator.half import BFloat16

BITS = [
    0,
    1,
    0x7F,
    0x80,
    0x3F80,
    0x3F81,
    0x3FC0,
    0x4049,
    0x4B7F,
    0x7F7F,
    0x7F80,
    0x7FC0,
    0x0042,
    0x3A83,
    0x5F00,
    0x1234,
]
BITS += [b | 0x8000 for b in BITS]


def function(name, module="cuda_bf16"):
    """What the simulator calls for a function of numba-cuda, which has these names and this module."""
    stub = types.FunctionType(compile("None", "", "eval"), {}, f"__{name}")
    stub.__module__ = f"numba.cuda._internal.{module}"
    return twins.twin(stub)


bfloat16 = np.dtype(ml_dtypes.bfloat16).type  # what a kernel calls


def tensor(*bits):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same(got, want):
    """The same bits, or both NaN."""
    assert type(got) is BFloat16
    want = want.view(torch.int16).item() & 0xFFFF
    assert got.bits == want or (got != got and want & 0x7FFF > 0x7F80)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "truediv"])
def test_arithmetic_rounds_once(op):
    op = getattr(operator, op)
    name = {"add": "hadd", "sub": "hsub", "mul": "hmul", "truediv": "hdiv"}[op.__name__]
    with np.errstate(all="ignore"):
        for a, b in itertools.product(BITS, BITS):
            x, y = BFloat16.of_bits(a), BFloat16.of_bits(b)
            want = op(tensor(a), tensor(b))
            same(op(x, y), want)
            same(function(name)(x, y), want)


def test_conversion_from_float32_and_float64():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 3000, np.uint32).view(np.float32)
    ties = (np.arange(0x3F800000, 0x3F900000, 0x8000, dtype=np.uint32)).view(np.float32)
    for v in (*x, *ties):
        same(BFloat16(v), torch.tensor(v).to(torch.bfloat16))
    # just above a tie: a first rounding to float32 would lose the difference
    assert float(BFloat16(np.float64(1 + 2**-8 + 2**-40))) == 1 + 2**-7
    assert float(BFloat16(np.int64(2**62 + 2**54 + 1))) == 2**62 + 2**55


def neighbours(value):
    """The largest bfloat16 <= value and the smallest >= value."""
    every = [b for b in range(0x7F80)]
    numbers = np.array(every, np.uint32) << 16
    floats = sorted({s * float(f) for f in numbers.view(np.float32) for s in (1, -1)})
    return max(f for f in floats if f <= value), min(f for f in floats if f >= value)


@pytest.mark.parametrize("value", [1.00001, -1.00001, 3e-41, 2.5, 123456789])
def test_directed_roundings(value):
    below, above = neighbours(value)
    source = "int" if isinstance(value, int) else "double"
    kinds = {"rd": below, "ru": above, "rz": below if value > 0 else above}
    for how, want in kinds.items():
        got = half.rounded(
            np.int64(value) if source == "int" else value, BFloat16, half._ROUNDINGS[f"_{how}"]
        )
        assert got == want
    if source == "int":
        assert {
            how: float(function(f"int2bfloat16_{how}")(int32_of(value))) for how in kinds
        } == kinds


def int32_of(value):
    return scalars.Int32(value)


def test_fused_multiply_add_rounds_once():
    a, b, c = BFloat16(1 + 2**-7), BFloat16(1 + 2**-7), BFloat16(2.0**-100)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    got = Fraction(float(function("hfma")(a, b, c)))
    assert abs(got - exact) <= Fraction(1, 256)
    tie = BFloat16(2.0**-8), BFloat16(1.0), BFloat16(1.0)  # 1 + 2**-8 lies between two numbers
    assert float(function("hfma")(*tie)) == 1.0
    # a b is a tie, and c too small for float64 decides
    assert float(function("hfma")(BFloat16(1.5), BFloat16(1 + 2**-7), c)) == 1.5 + 2**-7 + 2**-7


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "log",
        "sin",
        "cos",
        "tanh",
        "sqrt",
        "rsqrt",
        "floor",
        "ceil",
        "trunc",
        "exp2",
        "log2",
        "log10",
    ],
)
def test_functions_are_correctly_rounded(name):
    f = getattr(torch, name)
    with np.errstate(all="ignore"):
        for bits in BITS:
            wide = f(tensor(bits).double())
            same(
                function(f"h{name}")(BFloat16.of_bits(bits)),
                torch.tensor(float(half.rounded(wide.item(), BFloat16))).to(torch.bfloat16),
            )
            if name in half._MATH.split():
                same(
                    twins.twin(getattr(math, name))(BFloat16.of_bits(bits)),
                    wide.to(torch.bfloat16),
                )


def test_comparisons_of_nan():
    nan, one = BFloat16(math.nan), BFloat16(1)
    ordered = {name: bool(function(name)(nan, one)) for name in ("heq", "hne", "hlt", "hge")}
    assert not any(ordered.values())
    assert all(function(name)(nan, one) for name in ("hequ", "hneu", "hltu", "hgeu"))
    assert (
        function("hisnan")(nan)
        and not function("hisnan")(one)
        and function("hisinf")(BFloat16(math.inf)) == 1
    )
    assert float(function("hmax")(nan, one)) == 1 and math.isnan(function("hmax_nan")(nan, one))
    assert (
        float(function("hadd_sat")(one, one)) == 1
        and float(function("hfma_relu")(-one, one, -one)) == 0
    )


def test_bits_and_integers():
    x = BFloat16(-2.5)
    assert (
        function("bfloat16_as_ushort")(x) == 0xC020
        and function("ushort_as_bfloat16")(np.uint16(0xC020)) == x
    )
    assert [int(function(f"bfloat162int_{r}")(x)) for r in ("rn", "rz", "rd", "ru")] == [
        -2,
        -2,
        -3,
        -2,
    ]
    assert type(function("bfloat162float")(x)) is np.float32


def test_types_of_mixed_arithmetic():
    """numba-cuda 0.30.4's type inference: with int8 and uint8 bfloat16 stays, otherwise it acts as a float32."""
    x = BFloat16(1.5)
    kinds = {
        scalars.Int8: BFloat16, scalars.UInt8: BFloat16, scalars.Int16: np.float32, scalars.Int32: np.float64,
        np.int64: np.float64, scalars.UInt16: np.float64, scalars.UInt32: np.float64, np.float16: np.float32,
        np.float32: np.float32, np.float64: np.float64,
    }  # fmt: skip
    for kind, want in kinds.items():
        assert type(x + kind(2)) is type(kind(2) * x) is type(kind(2) / x) is want, kind
        assert kind(2) > x and x < kind(2) and kind(2) != x
    assert type(x // x) is type(x % x) is type(x**x) is type(abs(x)) is np.float32
    assert type(-x) is BFloat16 and type(twins.twin(max)(x, x)) is BFloat16
    assert type(twins.twin(math.log1p)(x)) is np.float32


@cuda.jit
def axpy(y, x, a):
    tile = cuda.shared.array(8, bfloat16)
    i = cuda.grid(1)
    tile[i] = x[7 - i]
    cuda.syncthreads()
    y[i] = bfloat16(a) * tile[7 - i] + y[i]


def test_arrays_of_bfloat16_hold_numbers():
    x, y = np.linspace(-3, 5, 16).astype(ml_dtypes.bfloat16).reshape(2, 8)
    want = ml_dtypes.bfloat16(1.1) * x + y
    run(axpy, 1, 8, y, x, 1.1)
    assert y.tolist() == want.tolist()


@cuda.jit
def unwritten(y):
    tile = cuda.shared.array(8, bfloat16)
    y[0] = float32(tile[1] + bfloat16(1))


@cuda.jit
def atomic(x):
    cuda.atomic.add(x, 0, x[int32(1)])


def test_findings_name_bfloat16():
    (found,) = check(unwritten, 1, 1, np.zeros(1, np.float32))
    assert found.kind == "uninitialized"
    x = np.zeros(2, ml_dtypes.bfloat16)
    (found,) = check(atomic, 1, 1, x)
    assert "is an array of bfloat16" in str(found)


def test_fp16_of_numba_cuda():
    assert function("hadd", "cuda_fp16")(np.float16(1), np.float16(2)) == 3
    assert function("float2half_rz", "cuda_fp16")(np.float32(1 + 2**-10 + 2**-11)) == 1 + 2**-10
    assert function("half_as_ushort", "cuda_fp16")(np.float16(1)) == 0x3C00


def test_a_launchers_bfloat16_array_arrives_as_bits():
    @cuda.jit
    def halve_exponent(x):
        x[cuda.threadIdx.x] = x[cuda.threadIdx.x] - 128

    x = sim(np.array([1.0, 2.0], ml_dtypes.bfloat16))
    run(halve_exponent, 1, 2, x)
    assert x.tolist() == [0.5, 1.0]


@cuda.jit
def kinds_of(o, x, h, n):
    o[0] = isinstance(h[0], bfloat16) and not isinstance(x[0], bfloat16)
    o[1] = isinstance(x[0], float) and isinstance(n, (float, int)) and not isinstance(n, float)
    o[2] = isinstance(x[0], float32) and not isinstance(n, int32)


def test_isinstance():
    o, h = np.zeros(3, np.bool_), np.ones(1, ml_dtypes.bfloat16)
    run(kinds_of, 1, 1, o, np.ones(1, np.float32), h, 3)
    assert o.all()
