"""Every libdevice function in the simulator against PyTorch, NumPy and exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numba import cuda
from numba.cuda import libdevice, libdevicefuncs

from xtrain.simulator import run, twins

twins.learn()  # the functions of Numba
NAMES = sorted(full.removeprefix("__nv_") for full in libdevicefuncs.functions)


def called(name, *args):
    with np.errstate(all="ignore"):  # as in a launch
        return twins.TWINS[getattr(libdevice, name)](*args)


@pytest.mark.parametrize("name", NAMES)
def test_every_function_has_numbas_types(name):
    returns, parameters = libdevicefuncs.functions[f"__nv_{name}"]
    given = [twins.twin(p.ty)(1) for p in parameters if not p.is_ptr]
    results = [returns] * (str(returns) != "none") + [p.ty for p in parameters if p.is_ptr]
    got = called(name, *given)
    got = got if len(results) > 1 else (got,)
    assert [type(g) for g in got] == [twins.twin(t).scalar for t in results]


def of_torch(name):
    f = getattr(torch.special, name)
    return lambda x: f(torch.from_numpy(x)).numpy()


TORCH = {
    "erfinv": "erfinv", "erfcx": "erfcx", "normcdf": "ndtr", "normcdfinv": "ndtri", "j0": "bessel_j0", "j1": "bessel_j1",
    "y0": "bessel_y0", "y1": "bessel_y1", "lgamma": "gammaln", "erf": "erf", "erfc": "erfc", "exp2": "exp2",
}  # fmt: skip
ORACLES = {name: of_torch(f) for name, f in TORCH.items()} | {
    "tgamma": lambda x: np.exp(of_torch("gammaln")(x)), "exp10": lambda x: np.power(10.0, x), "rsqrt": lambda x: x**-0.5,
    "rcbrt": lambda x: 1 / np.cbrt(x), "cospi": lambda x: np.cos(np.pi * x), "sinpi": lambda x: np.sin(np.pi * x),
    "expm1": np.expm1, "log1p": np.log1p, "acosh": np.arccosh, "atanh": np.arctanh, "tanh": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", ORACLES)
def test_float_functions(name):
    x = np.array(
        [1e-9, 1e-3, 0.1, 0.25, 0.5, 0.7, 0.93, 0.999, 1.3, 1.999, 2.0, 3.7, 11.5, 26.0, 47.0]
    )
    got = np.array([called(name, v) for v in x])
    with np.errstate(all="ignore"):
        want = ORACLES[name](x)
    loose = 100 * (name[0] in "jy")  # PyTorch's Bessel functions have fewer digits
    np.testing.assert_allclose(got, want, rtol=2e-11 + loose * 1e-11, atol=2e-13 + loose * 2e-12)
    single = np.array([called(f"{name}f", np.float32(v)) for v in x])
    assert single.dtype == np.float32
    with np.errstate(all="ignore"):
        want = ORACLES[name](x.astype(np.float32).astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(single, want, rtol=2e-7, atol=1e-12 + loose * 2e-12)


def test_bessel_functions_of_other_orders():
    """By their recurrence, and by the Wronskian of the two kinds."""
    for x in (0.3, 2.5, 20.0):
        for n in (1, 2, 5):
            for kind in ("jn", "yn"):
                below, f, above = (called(kind, k, x) for k in (n - 1, n, n + 1))
                assert below + above == pytest.approx(2 * n / x * f, rel=1e-8, abs=1e-13)
            j, y = ([called(kind, k, x) for k in (n, n + 1)] for kind in ("jn", "yn"))
            assert j[1] * y[0] - j[0] * y[1] == pytest.approx(2 / math.pi / x, rel=1e-7)


@pytest.mark.parametrize("x", [1e-30, 1e-5, 0.2, 0.9, 1.0, 1.3, 1.9, 2 - 1e-12])
def test_erfcinv_is_the_inverse_of_erfc(x):
    assert math.erfc(called("erfcinv", x)) == pytest.approx(x, rel=1e-12)


MODES = ["rd", "rn", "ru", "rz"]
OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@pytest.mark.parametrize(
    "kind, letter, operation",
    [(np.float32, "f", op) for op in OPERATIONS]
    + [(np.float64, "d", op) for op in ("add", "mul", "div")],
)
def test_directed_rounding(kind, letter, operation):
    random = np.random.default_rng(0)
    for a, b in random.standard_normal((40, 2)).astype(kind):
        exact = OPERATIONS[operation](Fraction(float(a)), Fraction(float(b)))
        down, near, up, zero = (called(f"{letter}{operation}_{m}", a, b) for m in MODES)
        assert near == OPERATIONS[operation](a, b)
        assert Fraction(float(down)) <= exact <= Fraction(float(up))
        assert up in (down, np.nextafter(down, kind(math.inf))) and near in (down, up)
        assert zero == (down if exact > 0 else up)


def test_fma_is_rounded_once():
    a, b = np.float32(1 + 2**-12), np.float32(1 - 2**-12)
    assert called("fmaf", a, b, np.float32(-1)) == np.float32(-(2**-24))
    tiny = np.float32(1e-12)
    assert called("fmaf_rd", a, b, -tiny) < called("fmaf_ru", a, b, -tiny)
    x = 1 + 2.0**-30
    assert called("fma", x, x, -(1 + 2.0**-29)) == 2.0**-60


def test_square_roots_and_conversions_are_rounded_as_named():
    assert called("fsqrt_rd", 2) == np.float32(1.4142135) and called("fsqrt_ru", 2) == np.nextafter(
        np.float32(1.4142135), np.float32(2)
    )
    assert [called(f"double2int_{m}", -2.5) for m in MODES] == [-3, -2, -2, -2]
    assert called("double2int_rn", math.nan) == 0 and called("float2int_rz", 3e9) == 2**31 - 1
    assert called("double2uint_rz", 3e9) == np.int32(np.uint32(3_000_000_000))  # its bits
    x = 2**24 + 1
    assert [called(f"int2float_{m}", x) for m in ("rd", "ru", "rn", "rz")] == [
        2**24,
        2**24 + 2,
        2**24,
        2**24,
    ]
    assert called("ull2double_rn", -1) == 2.0**64 and called("ll2double_rn", -1) == -1
    assert called("double2float_ru", 0.1) > called("double2float_rd", 0.1)


def test_integer_functions():
    assert called("brev", 1) == -(2**31) and called("clz", 1) == 31 and called("clzll", -1) == 0
    assert called("mulhi", -(2**31), 2) == -1 and called("umulhi", -1, -1) == -2
    assert (
        called("mul64hi", 2**62, 4) == 1
        and called("hadd", -3, 0) == -2
        and called("urhadd", 3, 2) == 3
    )
    assert called("byte_perm", 0x33221100, 0x77665544, 0x7520) == 0x77552200
    assert called("mul24", 0xFFFFFF, 2) == -2 and called("umul24", 0xFFFFFF, 2) == 0x1FFFFFE
    assert called("sad", 3, 10, 5) == 12 and called("usad", -1, 0, 1) == 0
    assert called("popcll", -1) == 64 and called("ffs", 8) == 4 and called("umax", -1, 5) == -1


def test_several_results_and_special_values():
    assert called("frexp", 12.0) == (0.75, 4) and called("modf", 3.25) == (0.25, 3.0)
    assert called("remquo", 7.0, 2.0) == (-1.0, 4) and called("sincospi", 0.5) == (1.0, 0.0)
    assert called("round", -2.5) == -3 and called("llrint", 2.5) == 2 and called("ilogb", 12.0) == 3
    assert (
        called("log", 0.0) == -math.inf
        and math.isnan(called("log", -1.0))
        and called("exp", 1e4) == math.inf
    )
    assert called("isnand", math.nan) == 1 and called("signbitf", np.float32(-0.0)) == 1
    assert called("nextafterf", 1, 2) == np.nextafter(np.float32(1), np.float32(2))


@cuda.jit
def uses_libdevice(o, x):
    s, c = libdevice.sincosf(x[0])
    fraction, exponent = libdevice.frexp(x[1])
    o[0], o[1], o[2], o[3] = s, c, fraction, exponent
    o[4] = libdevice.double2int_ru(x[1])


def test_in_a_kernel():
    o, x = np.zeros(5), np.array([0.5, 12.2], np.float32)
    run(uses_libdevice, 1, 1, o, x)
    want = [np.sin(np.float32(0.5)), np.cos(np.float32(0.5)), x[1].astype(float) / 16, 4, 13]
    np.testing.assert_allclose(o, want, rtol=1e-7)
