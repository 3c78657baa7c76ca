"""The simulator rejects the kernels that Numba rejects, and no others. The tests compile with Numba, which needs no GPU."""

import enum
import linecache
import math  # noqa: F401  kernels below use it
import tokenize  # noqa: F401  kernels below use it
import types

import numpy as np
import pytest
from numba import cuda, float32, int32
from numba import types as numba_types

from xtrain.simulator import KernelError, run

KINDS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64"
ATOMICS = "add sub max min nanmax nanmin and_ or_ xor exch inc dec cas"
W, SHAPE, HALF = 4, (4, 5), 2.5
settings = types.SimpleNamespace(N=4)


class Settings:
    N = 4


class Kind(enum.IntEnum):
    FOUR = 4


@cuda.jit(device=True)
def sized(n, x):
    a = cuda.local.array(n, float32)
    a[0] = x
    return a[0]


def defined(body):
    """kernel(o, x, n, p) with this body: o, x float32, n an int32, p a bool array. `| ` starts a new line."""
    lines = "".join(f"    {line}\n" for line in body.split("| "))
    source = f"def kernel(o, x, n, p):\n{lines}"
    file = f"<refused {body}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), globals(), scope := {})
    return scope["kernel"]


def numba_compiles(monkeypatch, function, kinds):
    import numba.cuda.dispatcher
    from numba.cuda.compiler import compile_cuda

    here = types.SimpleNamespace(compute_capability=(9, 0))
    if hasattr(numba.cuda.dispatcher, "get_current_device"):
        monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: here)
    try:
        result = compile_cuda(function, None, kinds, cc=(9, 0)).signature.return_type
    except Exception:
        return False
    return result == numba_types.none  # a kernel cannot return a value


def shaped(shape, index="0", before="", where="shared"):
    return f"{before}s = cuda.{where}.array({shape}, float32)| s[{index}] = x[0]| o[0] = s[{index}]"


GOOD = [
    *map(shaped, ("W", "4", "2 * 16", "2 ** 3", "(4,)", "SHAPE[0]", "x.ndim", "W if True else 3")),
    *(shaped(shape, "0, 0") for shape in ("(W, 5)", "SHAPE", "(4,) + (5,)", "(SHAPE[0], SHAPE[1])")),
    *(shaped("m", before=f"{set_m}| ") for set_m in ("m = 4", "m = W", "m = (4,)", "k = 4| m = k")),
    *(shaped("m", before=f"{set_m}| ") for set_m in ("k, m = 4, 5", "k, m = SHAPE", "m = 2 * 16")),
    shaped("(m, W)", "0, 0", "m = 2| "),
    shaped("m()", before="def m(): return 4| "),
    "def f(m):|     s = cuda.local.array(m, float32)|     s[0] = x[0]|     return s[0]| o[0] = f(4)",
    "o[0] = sized(4, x[0]) + sized(W, x[0])",
    "o[0] = np.log(x[0]) + np.maximum(x[0], x[1]) + np.float32(np.pi)",
    "o[0] = tokenize.NAME + Kind.FOUR.value",
    "o[0] = 0| for i in [1, 2, 3]: o[0] += i",
    "o[0] = n in [1, 2]",
    "o[...] = 1",
    "if (m := n) < 9: o[0] = m",
    "o[0] = x[None, :][0, 1] + x[:, None][1, 0] + x[np.newaxis, :][0, 2] + x[..., None][3, 0]",
    "x[None, 1:3][0, 0] = 5| o[0] = math.hypot(x[1], x[0])",
    "o[1:3] = x[0]",
    "match n:|     case 1 |-1: o[0] = 1|     case 3 if x[0] > 5: o[0] = 2|     case k: o[0] = k",
    "if n > 99: raise ValueError('many')| o[0] = 1| return None",
    "o[0] = cuda.syncthreads_or(n) + cuda.syncthreads_count(int32(n > 0))",
]  # fmt: skip
BAD = [
    *map(shaped, ("W + 1", "W * W", "4 * W", "-W", "W // 2", "W / 2", "n", "2 * n", "x.shape[0]")),
    *map(shaped, ("cuda.blockDim.x", "len(x)", "x.size", "HALF", "4.0", "SHAPE[n]", "settings.N")),
    *(shaped(shape, "0, 0") for shape in ("(W, W + 1)", "(cuda.blockDim.y, 17)", "(W,) + (5,)")),
    *(shaped("m", before=f"{set_m}| ") for set_m in ("m = W // 2", "m = n", "m = 4| m += 1")),
    *(shaped("m", before=f"{set_m}| ") for set_m in ("k, m = 4, n", "m = k = W * 2", "m = len(x)")),
    shaped("n", where="local"),
    shaped("x.shape", where="local"),
    "s = cuda.shared.array(shape=W + 1, dtype=float32)| s[0] = 1",
    *(f"o[0] = np.{f}(x[0])" for f in ("sqrt", "exp", "abs", "floor", "ceil", "square", "isinf")),
    "o[0] = np.where(x[0] > 0, 1, 2)",
    *(f"o[0] = cuda.syncthreads_{f}(x[0] > 0)" for f in ("or", "and", "count")),
    "o[0] = cuda.syncthreads_or(x[0])",
    "o[0] = settings.N",
    "o[0] = Settings.N",
    "a = [n, 2]| o[0] = a[0]",
    "a = [n, 2]| a.append(3)",
    "a = [i for i in range(n)]| o[0] = a[0]",
    "o[0] = sum(v for v in (1, 2))",
    "a = {1: n}| o[0] = a[1]",
    "o[0] = n in {1, 2}",
    "try:|     o[0] = 1| except Exception:|     o[0] = 2",
    "s = f'{n}'| o[0] = 1",
    "if n > 99: raise ValueError(f'{n}')",
    "import math| o[0] = math.sqrt(x[0])",
    "global W| W = 3",
    "del n",
    "if (m := n + 1) > 3: o[0] = m",
    *(f"o[0] = math.{f}(n, n)" for f in ("gcd", "comb", "isclose", "lcm")),
    *(f"o[0] = math.{f}(n)" for f in ("fsum", "ulp", "factorial", "isqrt")),
    "o[0] = x[0].astype(np.int32)",
    *(f"s = {call}" for call in ("any((True, False))", "str(n)", "sorted((2, 1))", "hash(n)")),
    "for i in reversed(range(3)): o[i] = 1",
    "for i in map(abs, (1, 2)): o[i] = 1",
    "a, *b = (1, 2, 3)| o[0] = a",
    "match (n, n):|     case (1, k): o[0] = k",
    "o[:] = x",
    "o[0:2] = x[1:3]",
    "return x[0]",
    "return 5",
]


def verdicts(monkeypatch, body):
    """Does Numba compile it, and the simulator's error or None."""
    kinds = [numba_types.Array(k, 1, "C") for k in (float32, numba_types.boolean)]
    compiles = numba_compiles(monkeypatch, defined(body), (kinds[0], kinds[0], int32, kinds[1]))
    arrays = np.zeros(8, np.float32), np.ones(8, np.float32), np.int32(3), np.ones(8, bool)
    try:
        run(cuda.jit(defined(body)), 1, 1, *arrays)
    except KernelError as error:
        return compiles, str(error)
    return compiles, ""


@pytest.mark.parametrize("body", GOOD)
def test_what_numba_compiles_is_simulated(monkeypatch, body):
    assert verdicts(monkeypatch, body) == (True, "")


@pytest.mark.parametrize("body", BAD)
def test_what_numba_refuses_is_refused(monkeypatch, body):
    compiles, said = verdicts(monkeypatch, body)
    assert not compiles and "kernel" in said


@pytest.mark.parametrize("kind", KINDS.split())
def test_atomics_are_those_of_numba(monkeypatch, kind):
    a = numba_types.Array(getattr(numba_types, kind), 1, "C")
    for op in ATOMICS.split():
        function = defined(f"cuda.atomic.{op}(x, 0, {'x[0], ' * (op == 'cas')}x[1])")
        compiles = numba_compiles(monkeypatch, function, (a, a, int32, a))
        x = np.ones(2, kind)
        try:
            run(cuda.jit(function), 1, 1, x, x, np.int32(1), x)
        except KernelError as error:
            assert not compiles and f"cuda.atomic.{op} in kernel" in str(error)
            assert f"x is an array of {kind}" in str(error)
        else:
            assert compiles, op


def test_messages_say_what_to_write():
    x = np.zeros(8, np.float32), np.zeros(8, np.float32), np.int32(3), np.zeros(8, bool)
    for body, words in {
        shaped("(W, W + 1)"): "(W, W + 1) is not: use a literal, or a name defined outside the kernel",
        shaped("n", where="local"): "cuda.local.array must be a compile-time constant, and n is not",
        "o[0] = np.sqrt(x[0])": "Numba has no np.sqrt on a GPU: write math.sqrt",
        "o[0] = settings.N": "cannot read attributes of settings, a Python object (SimpleNamespace)",
        "o[:] = x": "stores an array to several elements of o at <refused o[:] = x>:2, which Numba does not",
        "o[0] = all((n, 1))": "Numba has no all on a GPU",
        "return 5": "a kernel cannot return a value: write the result to an array",
        "o[0] = cuda.syncthreads_or(x[0] > 0)": "it takes an integer, this is a bool: write cuda.syncthreads_or(int32(...))",
    }.items():  # fmt: skip
        with pytest.raises(KernelError) as caught:
            run(cuda.jit(defined(body)), 1, 1, *x)
        assert words in str(caught.value)


@cuda.jit
def nothing(x):
    pass


@pytest.mark.parametrize(
    "grid, block, words",
    [
        (1, (1, 1, 65), r"a block of \(1, 1, 65\) threads: the limit is 64 along z"),
        ((1, 65536), 1, r"a grid of \(1, 65536, 1\) blocks: the limit is 65535 along y and z"),
        ((1, 1, 65536), 1, "65535 along y and z; use x for the long axis"),
    ],
)
def test_launches_that_no_gpu_takes(grid, block, words):
    with pytest.raises(KernelError, match=words):
        run(nothing, grid, block, np.zeros(1))
    run(nothing, (2, 2, 2), (1, 2, 64), np.zeros(1))
