"""Every kernel compiles without a GPU, for the oldest and newest cards it is meant for, and computes in float32.

The signatures are not written down: the launchers are called with tiny simulator arrays, and what they would
launch is compiled instead. Needs NVVM (CUDA toolkit, or the nvidia-nvvm package); skipped without it.
"""

import re
import types as python_types

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from xtrain import simulator
from xtrain.kernels import (
    _launch,
    adamw,
    attention,
    cast,
    cross_entropy,
    elementwise,
    embedding,
    grad_norm,
    layout,
    qk_norm_rope,
    residual,
    rmsnorm,
    rope,
    skip,
    softmax,
    swiglu,
)
from xtrain.simulator import sim


def f32(*shape):
    return sim(np.ones(shape, np.float32))


def launch_everything():
    """Call every launcher once for every kernel it may choose."""
    ids, table = sim(np.zeros(2, np.int32)), f32(4, 4)
    embedding.embedding_bwd(embedding.embedding_fwd(ids, f32(3, 8)), ids, f32(3, 8))
    for C in (8, 37, 1032):
        x, w = f32(2, C), f32(C)
        y, rstd = rmsnorm.rmsnorm_fwd(x, w, 1e-6)
        rmsnorm.rmsnorm_bwd(y, x, w, rstd, f32(C))
        h, y, rstd = residual.residual_rmsnorm_fwd(x, x, w, 1e-6)
        residual.residual_rmsnorm_bwd(h, y, h, w, rstd, f32(C))
    rope.rope_bwd(rope.rope_fwd(f32(2, 3, 8), table, table, T=2), table, table, T=2)
    for w in (f32(8), None):
        shape = (f32(2, 48), w, w, table, table, 4, 1, 2)
        q, k, v, rstd = qk_norm_rope.qk_norm_rope_fwd(*shape, 1e-6)
        qk_norm_rope.qk_norm_rope_bwd(q, k, v, f32(2, 48), w, w, rstd, table, table, 4, 1, 2, w, w)
    o, saved = attention.attention_fwd(f32(1, 2, 2, 8), f32(1, 2, 1, 8), f32(1, 2, 1, 8), 0.1)
    attention.attention_bwd(o, saved, 0.1)
    for S in (3, softmax.NARROW + 1):
        p = softmax.causal_softmax_fwd(f32(1, 2, S), 2, 0.1)
        softmax.causal_softmax_bwd(f32(1, 2, S), p, 2, 0.1)
    layout.swap_heads(f32(1, 2, 3, 4))
    swiglu.swiglu_bwd(swiglu.swiglu_fwd(f32(2, 8)), f32(2, 8))
    swiglu.swiglu_bwd(f32(2, 4), f32(2, 8), again=True)
    swiglu.silu_bwd(swiglu.silu_fwd(f32(8)), f32(8))
    elementwise.add_into(elementwise.add_fwd(f32(8), f32(8)), f32(8))
    elementwise.scale_into(elementwise.scale_fwd(f32(8), 0.5), f32(1))
    inverse = cross_entropy.count_targets(ids)
    loss, _ = cross_entropy.cross_entropy(f32(2, 128), ids, 100, inverse)
    cross_entropy.mean_loss(loss, inverse)
    cast.cast_fwd(cast.cast_fwd(f32(8), ml_dtypes.bfloat16), np.float32)
    stats = grad_norm.grad_norm(f32(8), 1.0)
    skip.skip_unless_finite(stats[1:], sim(np.zeros(1, np.int32)), stats[:1], f32(2), 3)
    hyper = sim(adamw.adamw_hyper(1e-3, 0.9, 0.95, 1))
    arrays = [f32(8) for _ in range(4)]
    adamw.adamw(*arrays, stats[1:], hyper, 4, 0.9, 0.95, 1e-8, 0.1)


def signatures(monkeypatch, launch_all=None):
    """-> {(kernel, argument types)} of everything that was launched"""
    found = {}

    def note(kernel, grid, block, *args, shared=0):
        kinds = tuple(_launch.numba_type(a) for a in args)
        found[kernel, kinds] = None

    monkeypatch.setattr(simulator, "run", note)
    (launch_all or launch_everything)()
    return list(found)


def ptx_of(kernel, signature, cc):
    return cuda.compile(
        kernel.py_func, signature, device=False, abi="numba", cc=cc, output="ptx",
        **{k: v for k, v in kernel.targetoptions.items() if k in ("fastmath", "fma", "opt")},
    )[0]  # fmt: skip


@pytest.fixture(scope="module")
def nvvm():
    try:
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
    except Exception as error:
        pytest.skip(f"no NVVM here: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_every_kernel_compiles_to_float32(monkeypatch, nvvm, cc):
    import numba.cuda.dispatcher

    # Device functions ask the current device what to compile for; there is none here.
    here = python_types.SimpleNamespace(compute_capability=cc)
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: here)
    found = signatures(monkeypatch)
    named = {kernel.py_func.__name__ for kernel, _ in found}
    assert len(named) >= 25, sorted(named)
    for kernel, signature in found:
        ptx, name = ptx_of(kernel, signature, cc), kernel.py_func.__name__
        if f".target sm_{cc[0]}{cc[1]}" not in ptx:
            pytest.skip(f"this Numba does not know compute capability {cc}")
        wide = [line.strip() for line in ptx.splitlines() if re.search(r"\.f64\b", line)]
        assert not wide, f"{name} computes in float64: {wide[0]}"
        assert ".local " not in ptx, f"{name} keeps an array in local memory"


def test_every_kernel_file_is_launched_above(monkeypatch):
    """A new kernel file must be added to launch_everything, here or in test_engine_compile.py."""
    import test_engine_compile

    launched = signatures(monkeypatch) + signatures(monkeypatch, test_engine_compile.launch_engine)
    modules = {kernel.py_func.__module__ for kernel, _ in launched}
    package = _launch.__name__.rsplit(".", 1)[0]
    from pathlib import Path

    folder = Path(_launch.__file__).parent
    files = {f"{package}.{p.stem}" for p in folder.glob("*.py") if "@cuda.jit\n" in p.read_text()}
    assert files <= modules, f"never launched here: {sorted(files - modules)}"
