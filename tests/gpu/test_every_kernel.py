"""tests/gpu/every_kernel.py needs a GPU. Whether its calls are valid and reach every kernel can be tested without one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain import Transformer, simulator
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.runtime.compiler import COMPILER

FOLDER = Path(__file__).parent


@pytest.fixture
def every_kernel(monkeypatch):
    """The module with simulator arrays; launches are recorded instead of run."""
    sim = simulator.sim
    device = SimpleNamespace(compute_capability="90", synchronize=lambda: None)
    cuda = SimpleNamespace(Device=lambda: device, set_allocator=lambda allocator: None)
    cupy = SimpleNamespace(
        asarray=sim, abs=np.abs, concatenate=np.concatenate, cuda=cuda,
        zeros=lambda *a: sim(np.zeros(*a)), ones=lambda *a: sim(np.ones(*a)), full=lambda *a: sim(np.full(*a)),
        arange=lambda *a, **k: sim(np.arange(*a, **k)), tile=lambda a, n: sim(np.tile(np.asarray(a), n)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.syspath_prepend(FOLDER)
    import every_kernel

    make = lambda config, seed, device, *a, **k: Transformer(config, seed, "sim", *a, **k)
    monkeypatch.setattr(every_kernel.xtrain, "Transformer", make)
    monkeypatch.setattr(_launch, "_plans", {})
    # The values do not matter.
    new = lambda shape, dtype: np.zeros(shape, dtype).view(simulator.SimArray)
    monkeypatch.setattr(every_kernel, "draw", lambda *shape, dtype=np.float32: new(shape, dtype))
    monkeypatch.setattr(_launch, "_allocate", lambda like, shape, dtype: new(shape, dtype))
    run = lambda kernel, *a, **k: _launch._plans.setdefault((kernel,))
    monkeypatch.setattr(simulator, "run", run)
    yield every_kernel
    del sys.modules["every_kernel"]


@pytest.mark.skipif(
    COMPILER == "mlir", reason="numba-cuda-mlir imports CuPy, which this test replaces"
)
def test_it_reaches_every_kernel(every_kernel):
    """All but whole models: they take seconds, and the others launch the same kernels."""
    every_kernel.main([name for name in every_kernel.WORK if name != "models"])
    missing = every_kernel.never_launched()
    assert not missing, f"{missing}: launch it in tests/gpu/every_kernel.py"
