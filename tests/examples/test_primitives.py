"""examples/primitives: each program runs, and the simulator finds a mistake in it. kernels/test_compile.py compiles them."""

import contextlib
import inspect
import runpy

import pytest
from checks import GPU
from primitive_examples import FILES, loaded

from xtrain.kernels import primitives
from xtrain.simulator import simulate
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
        ("cp_async", "cp_async_wait(IN_FLIGHT)", "cp_async_wait(STAGES - 2)", KernelError),
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


def test_an_instruction_has_the_names_of_its_arguments():
    assert list(inspect.signature(primitives.mbarrier_init._defn).parameters)[1:] == [
        "address",
        "count",
    ]


def test_every_public_primitive_is_explained():
    """A verb first, one sentence in the first line, and what it takes."""
    functions = [n for n in primitives.__all__ if callable(getattr(primitives, n))]
    assert len(functions) > 70
    for name in functions:
        doc = inspect.getdoc(getattr(primitives, name)) or ""
        first = doc.split("\n")[0]
        assert first[:1].isupper() and ("." in first or first.endswith('"')), f"{name}: {first!r}"
