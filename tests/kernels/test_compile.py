"""Every kernel compiles without a GPU, for the oldest and newest GPUs that it supports, and computes in float32.

The signatures are not listed here: the launchers are called with tiny simulator arrays, and the kernels that they would
launch are compiled instead. helpers/offline.py explains the requirements.
"""

import functools
import re
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from offline import CARDS, CARDS_BF16, compiled, nvvm, ptx_for, signatures, with_cards

from xtrain.kernels import (
    adamw,
    bias,
    cast,
    checksum,
    cross_entropy,
    elementwise,
    embedding,
    grad_norm,
    layout,
    moving_average,
    muon,
    qk_norm_rope,
    residual,
    rmsnorm,
    rope,
    softmax,
    swiglu,
)
from xtrain.kernels import skip_nonfinite as skip
from xtrain.kernels.attention import flash_attention, key_bounds
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.simulator import sim

__all__ = ["nvvm"]
BF16 = ml_dtypes.bfloat16


def f32(*shape):
    return sim(np.ones(shape, np.float32))


def launch_everything(dtype):
    """Call every launcher once for every kernel that it can choose, with activations and weights of this dtype."""
    new = lambda *shape: sim(np.ones(shape, dtype))
    ids, table = sim(np.zeros(2, np.int32)), f32(4, 4)
    key_bounds.document_bounds(ids.reshape(1, 2))
    embedding.embedding_bwd(embedding.embedding_fwd(ids, new(3, 8)), ids, f32(3, 8))
    for C in (8, 37, 1032):
        x, w = new(2, C), new(C)
        y, rstd = rmsnorm.rmsnorm_fwd(x, w, 1e-6)
        rmsnorm.rmsnorm_bwd(y, x, w, rstd, f32(C))
        h, y, rstd = residual.residual_rmsnorm_fwd(x, x, w, 1e-6)
        for recompute_y in (False, True):
            residual.residual_rmsnorm_bwd(h, y, h, w, rstd, f32(C), recompute_y)
    rope.rope_bwd(rope.rope_fwd(new(2, 3, 8), table, table, T=2), table, table, T=2)
    for w, dw in ((f32(8), f32(8)), (None, None)):
        shape = (new(2, 48), w, w, table, table, 4, 1, 2)
        q, k, _, rstd = qk_norm_rope.qk_norm_rope_fwd(*shape, 1e-6)
        grads = (4, 1, 2, dw, dw)
        qk_norm_rope.qk_norm_rope_bwd(
            new(2, 48), q, k, new(2, 48), w, w, rstd, table, table, *grads
        )
    for n in (8, 37):
        bias.fill_rows(new(2, n), f32(n))
        bias.bias_bwd(new(2, n), f32(n))
    layout.swap_heads(new(1, 2, 3, 4))
    swiglu.swiglu_bwd(swiglu.swiglu_fwd(new(2, 8)), new(2, 8))
    swiglu.swiglu_bwd(new(2, 4), new(2, 8), recompute_y=True)
    swiglu.silu_bwd(swiglu.silu_fwd(new(8)), new(8))
    elementwise.add_into(elementwise.add_fwd(new(8), new(8)), new(8))
    elementwise.scale_into(elementwise.scale_fwd(new(8), 0.5), f32(1))
    inverse = cross_entropy.count_targets(ids)
    loss, _ = cross_entropy.cross_entropy(new(2, 128), ids, 100, inverse)
    cross_entropy.mean_loss(loss, inverse)
    cast.cast_fwd(new(8), np.float32 if dtype == BF16 else BF16)
    stats = grad_norm.grad_norm(f32(8), 1.0)
    skip.skip_unless_finite(stats[1:], sim(np.zeros(1, np.int32)), stats[:1], f32(2), 3)
    total = sim(np.zeros(1, np.int64))
    checksum.checksum(ids, total)
    checksum.compare(total, total, sim(np.zeros(1, np.int32)))
    hyper = sim(adamw.adamw_hyper(1e-3, 0.9, 0.95, 1))
    first, x = sim(np.zeros(1, np.int64)), new(1, 2, 4)
    muon.momentum(x, f32(8), f32(8), first, first, f32(1), 0.95)
    muon.muon_update(f32(8), x, first, first, f32(1), hyper, 0.1, sim(np.ones(8, BF16)))
    muon.orthogonalize(x)
    moving_average.moving_average(f32(8), f32(8), f32(1), f32(1))
    arrays, half = [f32(8) for _ in range(4)], new(8) if dtype == BF16 else None
    adamw.adamw(*arrays, stats[1:], hyper, 4, 0.9, 0.95, 1e-8, 0.1, copy_n=half)
    if dtype == np.float32:
        o, saved = attention.attention_fwd(new(1, 2, 2, 8), new(1, 2, 1, 8), new(1, 2, 1, 8), 0.1)
        attention.attention_bwd(o, saved, 0.1)
        for S in (3, softmax.NARROW + 1):
            p = softmax.causal_softmax_fwd(new(1, 2, S), 2, 0.1)
            softmax.causal_softmax_bwd(new(1, 2, S), p, 2, 0.1)
    # see test_flash_attention_hopper_compile.py
    with mock.patch.object(flash_attention, "HOPPER", False):
        # One or two kernels for dQ, dK and dV; test_flash_attention_compile.py has all others.
        for T, D, causal in ((2, 32, True), (2, 128, False), (65, 32, True)):
            q, k = new(1, T, 2, D), new(1, T + 1, 1, D)
            o, lse = flash_attention.flash_attention_fwd(q, k, k, 0.1, causal)
            flash_attention.flash_attention_bwd(o, q, k, k, o, lse, 0.1, causal)


@pytest.mark.parametrize("dtype, cards", [(np.float32, CARDS), (BF16, CARDS_BF16)])
def test_every_kernel_compiles_to_float32(monkeypatch, nvvm, dtype, cards):
    found = signatures(monkeypatch, functools.partial(launch_everything, dtype))
    named = {kernel.py_func.__name__ for kernel, _ in found}
    assert len(named) >= 25, sorted(named)
    for kernel, signature, chosen in with_cards(found, cards):
        compiled(monkeypatch, kernel, signature, chosen)


def test_adamw_is_not_contracted(monkeypatch, nvvm):
    """Every float operation of AdamW is marked .rn and never contracted into an fma: it equals its reference bit for bit."""
    found = signatures(monkeypatch, functools.partial(launch_everything, BF16))
    found += signatures(monkeypatch, functools.partial(launch_everything, np.float32))
    kernels = [(k, types) for k, types in found if k.py_func.__module__ == adamw.__name__]
    assert len(kernels) >= 2  # with the bf16 copy and without
    for kernel, types in kernels:
        ptx = ptx_for(monkeypatch, kernel, types, [(9, 0)])[9, 0]
        assert "mul.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx
        free = r"\bfma\.\S+|\b(?:add|sub|mul)\.f32|\S+\.ftz\S*|\S+\.approx\S*|\S+\.f64"
        assert not re.findall(free, ptx), set(re.findall(free, ptx))


def test_every_kernel_file_is_launched_above(monkeypatch):
    """A new kernel file must be added to launch_everything, here or in test_engine_compile.py."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "serving")
    import test_engine_compile

    calls = [functools.partial(launch_everything, dtype) for dtype in (np.float32, BF16)]
    calls.append(test_engine_compile.launch_engine)
    launched = [found for call in calls for found in signatures(monkeypatch, call)]
    modules = {kernel.py_func.__module__ for kernel, _ in launched}
    folder = Path(adamw.__file__).parent
    dotted = lambda path: ".".join(
        ["xtrain", "kernels", *path.relative_to(folder).with_suffix("").parts]
    )
    has_kernel = re.compile(r"^ *@(cuda\.jit|kernel)\b(?!.*device=True)", re.M)
    files = {dotted(p) for p in folder.rglob("*.py") if has_kernel.search(p.read_text())}
    # For sm_90a: test_flash_attention_hopper_compile.py.
    files -= {dotted(p) for p in folder.rglob("*_hopper*.py")}
    # For sm_89 and up: test_fp8.py, test_fp8_norm.py
    files -= {"xtrain.kernels.fp8", "xtrain.kernels.fp8_norm"}
    missing = files - modules
    assert not missing, f"never launched here: {sorted(missing)}"
