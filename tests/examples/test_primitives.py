"""examples/primitives: each program runs, and the simulator finds a mistake in it. kernels/test_compile.py compiles them."""

import contextlib
import inspect
import runpy

import numpy as np
import pytest
from checks import GPU
from primitive_examples import FILES, loaded

from xtrain.kernels import primitives
from xtrain.kernels.primitives import instruction
from xtrain.kernels.runtime.compiler import cuda, int32, uint32
from xtrain.simulator import simulate, simulates
from xtrain.simulator.errors import (
    AsyncError,
    DeadlockError,
    KernelError,
    RaceError,
    UninitializedError,
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_runs(path, capsys):
    with contextlib.nullcontext() if GPU else simulate():
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.skipif(GPU, reason="a GPU does not report it")
@pytest.mark.parametrize(
    "name, old, new, error",
    [
        ("wide_accesses", "i = 8 * (", "i = 4 * (", KernelError),
        ("ldmatrix", "STRIDE = 24", "STRIDE = 16", KernelError),  # bank conflicts
        ("ldmatrix", "    cuda.syncthreads()\n", "", KernelError),
        ("cp_async", "IN_FLIGHT = STAGES - 2", "IN_FLIGHT = STAGES - 1", UninitializedError),
        ("mbarrier", "mbarrier_wait(base + FULL + 8 * slot, parity)", "pass", KernelError),
        ("mbarrier", "mbarrier_arrive(base + FREE + 8 * slot)", "pass", DeadlockError),
        ("tma", "        tma_store_wait()", "        pass", AsyncError),
        ("tma", "mbarrier_wait(barrier, 0)", "pass", KernelError),
        ("wgmma", "    wait_for_product(acc)\n", "", KernelError),
        ("wgmma", "        acquire_map(maps, 1)\n", "", AsyncError),
        ("last_block", "if arrive_last(counters, 0, cuda.gridDim.x, last) and", "if", RaceError),
    ],
)
def test_a_mistake_is_found(name, old, new, error):
    (path,) = (p for p in FILES if p.stem == name)
    with simulate(), pytest.raises(error):
        loaded(path, old, new).main()


# [start:own]
dp4a = instruction(
    "dp4a",
    "dp4a.s32.s32 $0, $1, $2, $3;",
    int32,
    doc="""Return c plus the sum of the products of the four int8 of a and b. "dp4a" """,
    pure=True,
    a=uint32,
    b=uint32,
    c=int32,
)


@simulates(dp4a)
def simulated_dp4a(thread, site, a, b, c):
    a, b = (np.array([x], np.uint32).view(np.int8).astype(np.int32) for x in (a, b))
    return np.int32(c + (a * b).sum())


# [end:own]


@cuda.jit
def dp4a_kernel(y, a, b):
    i = cuda.threadIdx.x
    y[i] = dp4a(a[i], b[i], y[i])


def test_an_instruction_of_ones_own():
    a, b = np.random.default_rng(0).integers(-128, 128, (2, 32, 4)).astype(np.int8)
    y = np.ones(32, np.int32)
    with contextlib.nullcontext() if GPU else simulate():
        dp4a_kernel[1, 32](y, a.view(np.uint32)[:, 0].copy(), b.view(np.uint32)[:, 0].copy())
    assert (y == 1 + (a.astype(np.int32) * b).sum(1)).all()
    assert str(inspect.signature(dp4a._defn)) == "(typingctx, a, b, c)"


def test_every_public_primitive_is_explained():
    """A verb first, one sentence in the first line, and what it takes."""
    functions = [n for n in primitives.__all__ if callable(getattr(primitives, n))]
    assert len(functions) > 70
    for name in functions:
        doc = inspect.getdoc(getattr(primitives, name)) or ""
        first = doc.split("\n")[0]
        assert first[:1].isupper() and ("." in first or first.endswith('"')), f"{name}: {first!r}"
