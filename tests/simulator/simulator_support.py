"""What the simulator runs, refuses and does not model: the cases behind the tables of lessons/simulator.md.

python tests/simulator/simulator_support.py       writes the tables
"""

import linecache
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from numba import cuda, float32, from_dtype, int32, uint32
from numba.cuda import libdevice
from numba.cuda import random as cuda_random

from xtrain.simulator import KINDS, check

PAGE = Path(__file__).resolve().parents[2] / "lessons" / "simulator.md"
POINT = np.dtype(
    [("x", np.float32), ("y", np.float32), ("p", np.float32, (2,)), ("q", np.float32, (2,))],
    align=True,
)
POINT_TYPE = from_dtype(POINT)


@cuda.jit(device=True)
def doubled(v):
    return v + v


@cuda.jit(device=True)
def called(f, o, i, v):
    return f(o, i, v)


@cuda.jit(device=True)
def fibonacci(n):
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


# Feature -> the body of kernel(o, x, r, f): o and x float32 of 8 elements, r records, f a device function; 8 threads with i =
# cuda.grid(1). A body ends by storing to o[i] the number that follows it, an expression of x as a NumPy array.
RUNS = {
    "type annotations, default arguments": ("v: float = x[i]; o[i] = v", "x"),
    "shared memory, static and dynamic (`cuda.shared.array`)": (
        "s = cuda.shared.array(8, float32); s[i] = x[i]; cuda.syncthreads(); o[i] = s[7 - i]",
        "x[::-1]",
    ),
    "local arrays, constant arrays": ("l = cuda.local.array(1, float32); l[0] = x[i]; o[i] = l[0]", "x"),
    "barriers with votes (`syncthreads_and`, `_or`, `_count`)": (
        "o[i] = cuda.syncthreads_count(int32(x[i] > 3))",
        "0 * x + 4",
    ),
    "warp functions (`shfl_*`, votes, `match_*`, `syncwarp`)": ("o[i] = cuda.shfl_xor_sync(0xFF, x[i], 1)", "x[[1, 0, 3, 2, 5, 4, 7, 6]]"),
    "`cuda.activemask`": ("o[i] = cuda.activemask()", "0 * x + 255"),
    "atomics, also as arguments of device functions": ("o[i] = 0; cuda.syncthreads(); called(cuda.atomic.add, o, 7 - i, x[i])", "x[::-1]"),
    "spin locks and waiting loops": (
        "s = cuda.shared.array(1, int32)\n    if i == 0: s[0] = 0\n    cuda.syncthreads()\n"
        "    while cuda.atomic.add(s, 0, 0) != i: pass\n    cuda.atomic.add(s, 0, 1); o[i] = x[i]",
        "x",
    ),
    "cooperative grids (`cuda.cg.this_grid().sync()`)": ("o[i] = x[i]; cuda.cg.this_grid().sync()", "x"),
    "device functions, nested functions, lambdas": ("g = lambda v: v + 1; o[i] = g(doubled(x[i]))", "2 * x + 1"),
    "functions as arguments": ("o[i] = f(x[i])", "2 * x"),
    "recursion": ("o[i] = fibonacci(i)", "[0, 1, 1, 2, 3, 5, 8, 13]"),
    "tuples and namedtuples, also of arrays and functions": ("t = (x, f); o[i] = t[1](t[0][i])", "2 * x"),
    "slices, rows, `.T`, `reshape`, `ravel`, `view`": ("o[i] = x.reshape(2, 4).T[i % 4][i // 4]", "x"),
    "complex numbers, `.real`, `.imag`": ("z = complex(x[i], 1) * 1j; o[i] = z.imag - z.real", "x + 1"),
    "records (structured dtypes), array fields": ("r[i].y = r[i].x + x[i]; r[i].p = r[0].q; o[i] = r.y[i] + r[i].p[1]", "2 * x + 5"),
    "vector types (`cuda.float32x4`)": ("v = cuda.float32x2(x[i], 3); o[i] = v.x + v.y", "x + 3"),
    "`math`, `cuda.fma`, `cuda.popc` and the like": ("o[i] = math.sqrt(x[i] * x[i]) + cuda.popc(7)", "x + 3"),
    "all 317 functions of `libdevice`": ("o[i] = libdevice.fdim(x[i], 3)", "np.maximum(x - 3, 0)"),
    "`cuda.fp16`": ("o[i] = cuda.fp16.hadd(x[i], x[i])", "2 * x"),
    "bfloat16 numbers and arrays, the functions of `numba.cuda.bf16`": (
        "s = cuda.shared.array(8, bfloat16); s[i] = x[i]; o[i] = s[i] + bfloat16(256)",
        "[256, 256, 258, 260, 260, 260, 262, 264]",
    ),
    "NumPy's functions of numbers, and of arrays with an output": (
        "if i == 0: np.maximum(x, 3.0, o)\n    cuda.syncthreads(); o[i] = o[i] + np.log(1.0)",
        "np.maximum(x, 3)",
    ),
    "random numbers (`xoroshiro128p_*`), whose state is a record array": (
        "o[i] = cuda_random.uint64_to_unit_float32(0) + x[i]",
        "x",
    ),
}  # fmt: skip
# What -> (body, words of the error)
REFUSED = {
    "what Numba does not compile: lists, sets, `try`, `with`, f-strings, classes": ("v = {1: x[i]}; o[i] = v[1]", "a dict does not compile"),
    "shapes of shared and local arrays that are computed": ("s = cuda.shared.array(o.size, float32); s[0] = 1", "compile-time constant"),
    "atomics on dtypes that have none": ("h = cuda.shared.array(1, np.uint8); h[0] = 0; cuda.atomic.add(h, 0, 1)", "is an array of uint8"),
    "calls of Python functions": ("o[i] = plain(x[i])", "is a Python function"),
    "array expressions without an output (`x + 1` for an array x)": ("o[i] = (x + 1)[i]", "unsupported operand"),
    "`x.flat`": ("o[i] = x.flat[i]", "use x.ravel()"),
    "slices assigned from arrays": ("o[:] = x", "which Numba does not compile"),
    "attributes of Python objects": ("o[i] = SETTINGS.n", "cannot read attributes of SETTINGS"),
    "functions that wait for other threads, passed on inside a kernel": ("def g(): cuda.syncthreads()\n    def h(f): f()\n    h(g)", "do not pass it on"),
}  # fmt: skip
NOT_MODELLED = {
    "time: `nanosleep`, clocks, occupancy, caches": "the simulator has no clock; lessons measure on a GPU",
    "scheduling within a warp": "lanes run one after the other; `activemask` gives the lanes that reach the same call",
    "the number of blocks that are resident at once, unless `run(..., resident=n)` gives it": "every block of a grid may wait for every other",
    "rounding of fast approximations": "`fast_expf` and the like are correctly rounded",
    "bfloat16 arrays of `simulator.sim`": "xtrain's launchers pass them as their bits (uint16); give a NumPy array",
    "`@vectorize`, `@guvectorize` in `simulator.run`": "Numba generates their kernels when they are called: call them inside `with simulate()`",
    "arrays of vector types": "a vector is a value",
}


class Settings:
    n = 3


SETTINGS = Settings()


def plain(v):
    return v


def kernel(body):
    text = f"def kernel(o, x, r, f):\n    i = cuda.grid(1)\n    {body}\n"
    file = f"<support {body}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), {**globals(), "math": __import__("math")}, scope := {})
    return cuda.jit(scope["kernel"])


def arguments():
    x = np.arange(8, dtype=np.float32)
    records = np.zeros(8, POINT)
    records["x"], records["q"] = x, 5
    return np.zeros(8, np.float32), x, records, doubled


def findings(body, threads=8):
    """(what the kernel left in o, its findings)"""
    args = arguments()
    return args[0], check(kernel(body), 1, threads, *args)


def tables() -> str:
    lines = ["| runs |", "|---|", *(f"| {feature} |" for feature in RUNS), ""]
    lines += ["| refused, with a message |", "|---|", *(f"| {what} |" for what in REFUSED), ""]
    lines += ["| not modelled | instead |", "|---|---|"]
    lines += [f"| {what} | {instead} |" for what, instead in NOT_MODELLED.items()]
    lines += ["", "| finding | severity | reported | meaning |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        reported = "yes" if kind.reported else f'with `enable={{"{name}"}}`'
        lines.append(f"| `{name}` | {kind.severity} | {reported} | {kind.meaning} |")
    return "\n".join(lines)


BEGIN, END = "<!-- tables: tests/simulator/simulator_support.py -->", "<!-- end of tables -->"


def page() -> str:
    """lessons/simulator.md with current tables."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


USED = (bfloat16, float32, int32, uint32, libdevice, cuda_random)  # by the bodies above

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
