"""The Python of a kernel: the simulator runs what Numba compiles, and reports what Numba does not compile."""

import linecache
from collections import namedtuple

import numpy as np
import pytest
from numba import cuda, float32, int32
from numba.cuda import syncthreads, threadIdx  # noqa: F401  a kernel below names it

from xtrain.simulator import DeadlockError, KernelError, UninitializedError, run, thread


def ramp(n=8, dtype=np.float32):
    return np.arange(n, dtype=dtype)


# ----------------------------------------------------------------------------- functions inside a kernel
x = np.float32(
    2
)  # these names are parameters and locals below: the inner function's own come first
scale = 3


@cuda.jit
def inner_functions(o, x_n):
    def square(x, w: int = 2) -> float:
        scale = x * x
        return scale * float32(w)

    double = lambda x: x + x
    i = cuda.grid(1)
    o[i] = double(square(x_n[i])) + scale + x + (lambda v: v)(float32(1))


def test_an_inner_functions_names_are_its_own():
    o = np.zeros(8, np.float32)
    run(inner_functions, 1, 8, o, ramp())
    assert (o == 4 * ramp() ** 2 + 6).all()


@cuda.jit
def inner_functions_wait(o, x_n):
    s = cuda.shared.array(8, float32)

    def meet():
        cuda.syncthreads()

    def total(v):
        def added(v, step):
            return v + cuda.shfl_xor_sync(0xFF, v, step)

        return added(added(added(v, 4), 2), step=1)

    i = cuda.grid(1)
    s[i] = x_n[i]
    meet()
    o[i] = s[7 - i] + total(x_n[i])


def test_an_inner_function_may_wait():
    o = np.zeros(8, np.float32)
    run(inner_functions_wait, 1, 8, o, ramp())
    assert (o == ramp()[::-1] + 28).all()


@cuda.jit
def never_called(o, x_n):
    s = cuda.shared.array(8, float32)

    def meet():
        cuda.syncthreads()

    i = cuda.grid(1)
    s[i] = x_n[i]
    o[i] = s[7 - i]


@cuda.jit
def some_meet(o, x_n):
    def meet():
        cuda.syncthreads()
        return

    if cuda.grid(1) < 4:
        meet()


@cuda.jit
def handed_on(o, x_n):
    def meet():
        cuda.syncthreads()

    def call(f):
        f()

    call(meet)


@cuda.jit
def waiting_lambda(o, x_n):
    meet = lambda: cuda.syncthreads()
    meet()


@cuda.jit
def decorated(o, x_n):
    @cuda.jit(device=True)
    def one():
        return 1

    o[0] = one()


@pytest.mark.parametrize(
    "kernel, error, words",
    [
        (never_called, UninitializedError, "reads s[7]"),
        (some_meet, DeadlockError, "4 threads (0-3) wait in syncthreads"),
        (handed_on, KernelError, "handed_on, meet waits for other threads: call it, but do not pass it on"),
        (waiting_lambda, KernelError, "a lambda that waits for other threads: use def"),
        (decorated, KernelError, "one has a decorator: move it out of the kernel"),
    ],
)  # fmt: skip
def test_mistakes_with_inner_functions(kernel, error, words):
    with pytest.raises(error) as caught:
        run(kernel, 1, 8, np.zeros(8, np.float32), ramp())
    assert words in str(caught.value) and "test_simulator_source.py:" in str(caught.value)


# ----------------------------------------------------------------------------- conditional expressions
@cuda.jit
def only_one_side(o, x_n, n):
    i = cuda.grid(1)
    if i < n:
        w = x_n[i]
    o[0, i] = w if i < n else float32(-1)
    o[1, i] = 2 ** (i - 4) if i >= 4 else 0
    o[2, i] = w * 2 if i < n else 7


def test_the_side_that_is_not_taken_need_not_have_a_value():
    o = np.zeros((3, 8), np.float32)
    run(only_one_side, 1, 8, o, ramp(), 5)
    assert o[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert o[1].tolist() == [0, 0, 0, 0, 1, 2, 4, 8]
    assert o[2].tolist() == [0, 2, 4, 6, 8, 7, 7, 7]


@cuda.jit
def left_early(o, n):
    for j in range(n):
        if j == cuda.threadIdx.x:
            break
    for k in range(n, 0, -1):
        o[cuda.threadIdx.x] = j + k - n
        break


def test_a_long_range_takes_no_memory():
    o = np.zeros(4, np.int64)
    run(left_early, 1, 4, o, 1 << 50)
    assert o.tolist() == [0, 1, 2, 3]


# ----------------------------------------------------------------------------- loops over arrays
STEPS = (4, 2, 1)


@cuda.jit
def loops_over_arrays(o, x_n, m):
    i = cuda.grid(1)
    row = m[i]
    for k, (v, w) in enumerate(zip(row, x_n), 1):
        o[i] += v * w * k
    for v in m[i, 1:]:
        o[i] += v
    for row in m:
        o[i] += row[0]
    for step in STEPS:
        o[i] += step
    for j in range(3):
        o[i] += j
    else:
        o[i] += 1


def test_loops_over_arrays():
    m, o = ramp(12).reshape(4, 3), np.zeros(4, np.float32)
    run(loops_over_arrays, 1, 4, o, ramp() + 1, m)
    want = m @ [1, 4, 9] + m[:, 1:].sum(1) + m[:, 0].sum() + 7 + 3 + 1
    assert (o == want).all()
    with pytest.raises(UninitializedError, match=r"reads s\[0\]"):
        run(loops_over_nothing, 1, 1, o)


@cuda.jit
def loops_over_nothing(o):
    s = cuda.shared.array(4, float32)
    for v in s:
        o[0] += v


# ----------------------------------------------------------------------------- what an error says
FULL, TABLE = 0xFFFFFFFF, [1, 2, 3]


@cuda.jit(device=True)
def endless(n):
    return endless(n + 1)


def body(text):
    """A kernel with this one line. h: int32, p: bool, m: two axes"""
    lines = f"def kernel(o, x_n, h, p, m):\n    i = cuda.grid(1)\n    {text}\n"
    file = f"<body {text}>"
    linecache.cache[file] = (len(lines), None, lines.splitlines(True), file)
    exec(compile(lines, file, "exec"), globals(), scope := {})
    return cuda.jit(scope["kernel"])


@pytest.mark.parametrize(
    "text, words",
    [
        ("cuda.syncthreads", "cuda.syncthreads is a function: write cuda.syncthreads()"),
        ("cuda.syncthreads(1)", "cuda.syncthreads takes ()"),
        ("cuda.atomic.add(h, x_n[i] / 2, 1)", "thread 0 uses h[0.0]"),
        ("cuda.atomic.add(h, i / 2, 1); cuda.syncthreads()", "an index is an integer"),
        ("o[i] = cuda.shfl_down_sync(FULL, x_n[i])", "takes (mask, value, delta), in this order"),
        ("o[i] = cuda.shfl_down_sync(x_n[i], 1)", "takes (mask, value, delta), in this order"),
        ("o[i] = cuda.any_sync(p[i])", "cuda.any_sync takes (mask, predicate)"),
        ("o[i] = cuda.any_sync(mask=FULL, predicate=p[i])", "without keywords"),
        ("cuda.syncwarp(mask=0xFF)", "cuda.syncwarp takes (mask), in this order and without keywords"),
        ("cuda.atomic.add(ary=h, idx=0, val=1)", "takes an array, an index and a value, without keywords"),
        ("m[i].x = 5", "attributes other than the fields of a record are read-only"),
        ("o[i] = x_n.flat[i]", "x_n.flat is not simulated: use x_n.ravel()"),
        ("o[threadIdx.x] = 1", "Numba does not compile a bare threadIdx: write cuda.threadIdx"),
        ("o[i] = m[i]", "stores an array of shape (2,) to o[0]"),
        ("h[i] = m[i]", "to h[0] at <body"),
        ("cuda.atomic.append(h, 0, 1)", "cuda.atomic.append is not simulated"),
        ("cuda.atomic.ad(h, 0, 1)", "did you mean cuda.atomic.add?"),
        ("cuda.syncthread()", "cuda.syncthread is not simulated; did you mean cuda.syncthreads?"),
        ("o[i] = endless(i)", "RecursionError in endless"),
        ("o[i] = TABLE[i]", "TABLE is a list: use numbers, tuples and arrays"),
        ("for k in range(h[0]): o[i] = 1\n    o[i] = k", "the branch or loop that sets it was not taken"),
        ("s = cuda.shared.array(0, int32); s[i] = 1", "the launch requests no dynamic shared memory"),
        ("o[i] = x_n.reshape(3, 4)[0, i]", "an array of shape (8,) cannot have the shape (3, 4)"),
    ],
)  # fmt: skip
def test_what_an_error_says(text, words):
    h, p, m = np.zeros(8, np.int32), np.zeros(8, bool), np.zeros((8, 2), np.float32)
    with pytest.raises(KernelError) as caught:
        run(body(text), 1, 8, np.zeros(8, np.float32), ramp(), h, p, m)
    assert words in str(caught.value)


@cuda.jit
def waits_in_a_loop(flag, o):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.add(flag, 0, 0) == 0:
            pass
        o[0] = 1
    else:
        cuda.atomic.exch(flag, 0, 1)


def test_a_thread_that_waits_in_a_loop():
    o, flag = np.zeros(1, np.float32), np.zeros(1, np.int32)
    run(waits_in_a_loop, 1, 2, flag, o)
    assert o[0] == 1
    flag[0] = 0
    with pytest.raises(DeadlockError) as caught:
        run(waits_in_a_loop, 1, 1, flag, o)
    line = waits_in_a_loop.py_func.__code__.co_firstlineno + 3
    words = f"wait in while cuda.atomic.add(flag, 0, 0) == 0 at test_simulator_source.py:{line}"
    assert words in str(caught.value) and "that no thread makes" in str(caught.value)


@cuda.jit
def counted_loops(o, n):
    i = j = 0
    while i < n:
        i += 1
        if i == 3:
            continue
        while j < 2 * i:
            j += 1
            cuda.syncthreads()
    else:
        o[0] = 10 * j
    while True:
        i += 1
        if i > 100:
            break
    else:
        o[0] = -1
    o[1] = i


def test_while_loops(monkeypatch):
    o = np.zeros(2, np.int64)
    monkeypatch.setattr(thread, "MAX_TURNS", 97)  # per execution of a loop
    with pytest.raises(KernelError, match=r"starts iteration 98 of while i < n at "):
        run(counted_loops, 1, 1, o, 98)
    run(counted_loops, 1, 1, o, 5)
    assert o.tolist() == [100, 101]


Pair = namedtuple("Pair", "first second")


def test_a_tuple_with_names():
    o = np.zeros(8, np.float32)
    kernel = body("o[i] = h.first + h[1] * p.second")
    run(kernel, 1, 8, o, 0, Pair(1, 2.5), Pair(0, np.int32(4)), 0)
    assert (o == 11).all()


def test_arguments_that_no_kernel_takes():
    kernel = body("o[i] = 1")
    with pytest.raises(KernelError, match="kernel: o is a list: a kernel takes arrays"):
        run(kernel, 1, 1, [1, 2], 0, 0, 0, 0)
    with pytest.raises(KernelError, match="kernel: m is a Python function: decorate it with"):
        run(kernel, 1, 1, ramp(), 0, 0, 0, ramp)


@cuda.jit
def by_name(o, x_n):
    s = cuda.shared.array(8, int32)
    s[cuda.threadIdx.x] = cuda.threadIdx.x
    syncthreads()
    v = cuda.shfl_xor_sync(0xFF, value=s[7 - cuda.threadIdx.x], lane_mask=1)
    o[cuda.threadIdx.x] = v + cuda.syncthreads_or(predicate=1)


def test_names_imported_from_cuda_and_keywords():
    o = np.zeros(8, np.float32)
    run(by_name, 1, 8, o, ramp())
    assert o.tolist() == [7, 8, 5, 6, 3, 4, 1, 2]
