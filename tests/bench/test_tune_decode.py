"""tune_decode.py needs a GPU. Whether its candidates can be launched can be tested without one, with simulator arrays."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xtrain import simulator
from xtrain.kernels import residual
from xtrain.kernels.attention import decode_attention
from xtrain.kernels.decoding import gemv

ARRAYS = lambda shape, dtype=np.float32: simulator.sim(np.zeros(shape, dtype))


@pytest.fixture
def tune(monkeypatch):
    """The module; what it launches is noted in `launched` instead of run."""
    device = SimpleNamespace(compute_capability="90", synchronize=lambda: None)
    cupy = types.ModuleType("cupy")
    vars(cupy).update(
        cuda=SimpleNamespace(Device=lambda: device), empty=ARRAYS, zeros=ARRAYS,
        asarray=lambda x: simulator.sim(np.asarray(x)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "bench")
    before = set(sys.modules)
    for module, names in (
        (gemv, ("choose", "ROW_TILES")), (decode_attention, ("choose",)), (residual, ("FEW", "FEW_COLUMNS"))
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    import tune_decode

    tune_decode.launched = []
    note = lambda kernel, *args, **options: tune_decode.launched.append(kernel.py_func.__name__)
    monkeypatch.setattr(simulator, "run", note)
    yield tune_decode
    for name in set(sys.modules) - before:  # they have seen this cupy
        if not name.startswith("xtrain"):
            del sys.modules[name]
    residual.make_fwd_kernel.cache_clear()


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_every_candidate_can_be_launched(tune, weights):
    alternatives = tune.ALTERNATIVES | (tune.CODES if weights != "full" else {})
    library = dict(tune.chosen(weights))
    assert library.keys() == tune.ALTERNATIVES.keys()
    for stage, values in alternatives.items():
        for value in (library[stage], *values):
            tune.launched.clear()
            assert tune.compile_one((stage, value), weights) == ((stage, value), "")
            few = stage == "residual" or (stage == "row_tiles" and weights == "full")
            assert few or any("kernel" in name for name in tune.launched)
            # a worker that has tried a candidate compiles the next one on top of the library's choice
            assert tune.chosen(weights) == library
