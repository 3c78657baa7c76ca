"""The kernels of the experts of a few rows compile with codes: registers for 4 blocks, nothing spilled.

test_compile.py compiles them for all cards, and checks that they compute in float32.
"""

import ml_dtypes
import numpy as np
import pytest
from checks import on_sim
from offline import check_registers, compiled, nvvm, signatures

from xtrain.kernels.experts.expert_gemv import BLOCK, RESIDENT, expert_gemv
from xtrain.kernels.quantize import KINDS, quantize
from xtrain.simulator import sim

__all__ = ["nvvm"]
SHAPES = {"Qwen3-30B-A3B": (2048, 768, 8), "Mixtral": (64, 14336, 2)}  # C (not Mixtral's), F, K


def launch(name, kind, dtype):
    C, F, K = SHAPES[name]
    new = lambda *shape: sim(np.ones(shape, dtype))
    matrices = [new(1, 2 * F, C), new(1, C, F)]
    if kind != "full":
        w = [np.asarray(m[0]) for m in matrices]
        matrices = [on_sim(quantize(m, kind)) for m in w]
    weights = sim(np.ones((2, K), np.float32))
    experts = sim(np.zeros((2, K), np.int32))
    expert_gemv(new(2, C), weights, experts, *matrices, weights_ready=True)


@pytest.mark.parametrize("kind", ["full", *KINDS])
@pytest.mark.parametrize("name", SHAPES)
def test_registers(monkeypatch, tmp_path, nvvm, name, kind):
    found = signatures(monkeypatch, lambda: launch(name, kind, ml_dtypes.bfloat16))
    kernels = [pair for pair in found if pair[0].py_func.__name__.startswith("expert_")]
    assert len(kernels) == 2
    for kernel, signature in kernels:
        ptx = compiled(monkeypatch, kernel, signature, [(9, 0)])
        check_registers(tmp_path, ptx[9, 0], BLOCK, RESIDENT, (9, 0), 0)
