"""The Python that a kernel may be written in: the simulator runs what Numba compiles, and says what it does not."""

import numpy as np
import pytest
from numba import cuda, float32

from xtrain.simulator import DeadlockError, KernelError, UninitializedError, run


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
        (handed_on, KernelError, "handed_on, meet waits for other threads, so it may only be called"),
        (waiting_lambda, KernelError, "write it with def"),
        (decorated, KernelError, "one has a decorator: write it outside the kernel"),
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
