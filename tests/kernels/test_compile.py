"""Every kernel compiles without a GPU, for the oldest and newest GPUs that it supports, and computes in float32.

The signatures are not listed here: the launchers are called with tiny simulator arrays, and the kernels that they would
launch are compiled instead. helpers/offline.py explains the requirements.
"""

import functools
import re
from unittest import mock

import every_signature
import ml_dtypes
import numpy as np
import primitive_examples
import pytest
from checks import on_sim
from offline import (
    CARDS,
    CARDS_BF16,
    compiled,
    every_share,
    nvvm,
    ptx_for,
    signatures,
    with_cards,
)

from xtrain.kernels import (
    adamw,
    bias,
    cast,
    checksum,
    cross_entropy,
    distillation,
    dora,
    elementwise,
    embedding,
    entropy,
    grad_norm,
    layout,
    moving_average,
    muon,
    peers,
    qk_norm_rope,
    residual,
    rmsnorm,
    rope,
    silu_mul,
    softmax,
    swiglu,
)
from xtrain.kernels import skip_nonfinite as skip
from xtrain.kernels.attention import flash_attention, key_bounds
from xtrain.kernels.attention import gemm_attention as attention
from xtrain.kernels.decoding import gemv, kv_cache
from xtrain.kernels.experts import (
    expert_gemv,
    expert_order,
    expert_router,
    expert_rows,
    expert_swiglu,
    grouped_product,
    grouped_product_mma,
    grouped_product_tiled,
    load_balance,
    routing,
)
from xtrain.kernels.quantize import KINDS, dequantize_rows, quantize
from xtrain.kernels.runtime.launch import launch
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
    embedding.embedding_bwd(new(2, 8), ids, new(3, 8))
    for C in (8, 37, 1032):
        x, w = new(2, C), new(C)
        y, rstd = rmsnorm.rmsnorm_fwd(x, w, 1e-6)
        rmsnorm.rmsnorm_bwd(y, x, w, rstd, f32(C))
        rmsnorm.rmsnorm_bwd(y, x, w, rstd, new(C), add=False)
        h, y, rstd = residual.residual_rmsnorm_fwd(x, x, w, 1e-6)
        for recompute_y in (False, True):
            residual.residual_rmsnorm_bwd(h, y, h, w, rstd, f32(C), recompute_y)
    rope.rope_bwd(rope.rope_fwd(new(2, 3, 8), table, table, T=2), table, table, T=2)
    for w, dw in ((f32(8), f32(8)), (new(8), new(8)), (None, None)):
        shape = (new(2, 48), w, w, table, table, 4, 1, 2)
        q, k, _, rstd = qk_norm_rope.qk_norm_rope_fwd(*shape, 1e-6)
        grads = (4, 1, 2, dw, dw)
        qk_norm_rope.qk_norm_rope_bwd(
            new(2, 48), q, k, new(2, 48), w, w, rstd, table, table, *grads, add=False
        )
    for n in (8, 37):
        bias.fill_rows(new(2, n), f32(n))
        bias.bias_bwd(new(2, n), f32(n))
        dora.inverse_norms(f32(n), f32(n), f32(2, n), f32(2, n), f32(n, 2), 1.5)
        dora.scale_columns_bwd(new(2, n), new(2, n), f32(n), f32(n), f32(n))
        for more in ((), (f32(n),)):
            dora.scale_columns(new(2, n), f32(n), f32(n), *more)
    layout.swap_heads(new(1, 2, 3, 4))
    swiglu.swiglu_bwd(swiglu.swiglu_fwd(new(2, 8)), new(2, 8))
    swiglu.swiglu_bwd(new(2, 4), new(2, 8), recompute_y=True)
    swiglu.swiglu_bwd(swiglu.swiglu_fwd(new(2, 8), gelu=True), new(2, 8), gelu=True)
    swiglu.swiglu_bwd(new(2, 4), new(2, 8), recompute_y=True, gelu=True)
    swiglu.silu_bwd(swiglu.silu_fwd(new(8)), new(8))
    launch_experts(new)
    for gelu in (False, True):
        silu_mul.silu_mul_bwd(silu_mul.silu_mul_fwd(new(8), new(8), gelu), new(8), new(8), gelu)
    elementwise.add_into(elementwise.add_fwd(new(8), new(8)), new(8))
    elementwise.scale_into(elementwise.scale_fwd(new(8), 0.5), f32(1))
    for count in (1, 3, peers.MOST):  # GPUs of a machine with two, four and eight
        peers.add_peers(new(8), [new(8)] * count)
        peers.copy_to_peers([new(8) for _ in range(count)], new(8))
    inverse = cross_entropy.count_targets(ids)
    loss, _ = cross_entropy.cross_entropy(new(2, 128), ids, 100, inverse)
    cross_entropy.mean_loss(loss, inverse)
    entropy.entropy(new(2, 128), 100)
    teacher = sim(np.zeros((2, 1), np.int32)), f32(2, 1), 100, inverse, 0.5
    distillation.distillation(new(2, 128), ids, *teacher)
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
        for bounds in (key_bounds.KeyBounds(1), key_bounds.document_bounds(ids.reshape(1, 2))[0]):
            attention.hide_keys(new(2, 2, 2), bounds, 1, 2)
        for S in (3, 4, 2048, softmax.NARROW + 1):  # 4, 2048: the row in registers
            p = softmax.causal_softmax_fwd(new(1, 2, S), 2, 0.1)
            softmax.causal_softmax_bwd(new(1, 2, S), p, 2, 0.1)
        launch_plain()
    # see test_flash_attention_hopper_compile.py
    with mock.patch.object(flash_attention, "HOPPER", False):
        # One or two kernels for dQ, dK and dV; test_flash_attention_compile.py has all others.
        for T, D, causal in ((2, 32, True), (2, 128, False), (65, 32, True), (2, 256, True)):
            q, k = new(1, T, 2, D), new(1, T + 1, 1, D)
            o, lse = flash_attention.flash_attention_fwd(q, k, k, 0.1, causal)
            flash_attention.flash_attention_bwd(o, q, k, k, o, lse, 0.1, causal)


def launch_experts(new):
    """The kernels of a mixture of experts; test_grouped_product_compile.py has the wgmma version."""
    order = expert_order.expert_order(sim(np.zeros((3, 2), np.int32)), 4)
    experts = sim(np.zeros((2, 2), np.int32))
    for F in (8, 2600):
        expert_gemv.expert_gemv(new(2, 16), f32(2, 2), experts, new(3, 2 * F, 16), new(3, 16, F))
    launch_codes_of_experts(new)
    for E, bias_E in ((3, None), (40, f32(40))):
        expert_router.expert_router(
            f32(2, 16), new(2, 16), f32(16), new(E, 16), 1e-6, 2, True, bias_E
        )
    M, counts = order.pairs_M.size, sim(np.zeros(4, np.int32))
    load_balance.add_counts(counts, counts)
    load_balance.move_bias(f32(4), counts, 0.1)
    for width in (37, 256):
        expert_rows.sum_rows(expert_rows.gather_rows(new(3, width), order), order)
        y = expert_swiglu.expert_swiglu(new(M, 2 * width), f32(3, 2), order)
        expert_swiglu.expert_swiglu_bwd(y, new(M, 2 * width), f32(3, 2), order)
    for logits, bias_E in ((new(3, 4), None), (new(3, 40), f32(40))):
        experts, weights = routing.routing(logits, 2, bias_E is None, bias_E)
        routing.routing_bwd(weights, logits, experts, weights, bias_E is None)
    routing.router_loss_bwd(
        routing.router_loss(new(3, 4), counts, 0.1, 0.1), new(3, 4), counts, 0.1, 0.1
    )
    x, w = new(order.pairs_M.size, 8), new(4, 8, 8)
    versions = [grouped_product_tiled] + [grouped_product_mma] * (x.dtype == BF16)
    for version in versions:
        with mock.patch.object(grouped_product, "version", return_value=version):
            grouped_product.grouped_product(x, w, order)
            grouped_product.grouped_product_dx(x, w, order)
            grouped_product.grouped_product_dw(x, x, order, w.copy())
            for accumulate in (False, True):
                grouped_product.grouped_product_dw(x, x, order, f32(4, 8, 8), accumulate)


def launch_codes_of_experts(new):
    """Qwen3-30B-A3B's matrices, and Mixtral's down, of whose rows 8 warps share the steps."""
    experts = sim(np.zeros((2, 2), np.int32))
    tokens = expert_order.expert_order(experts, 4)
    expert_order.experts_between(tokens, 1, 2)
    counts = sim(np.ones(2, np.int32))
    for kind in KINDS:
        codes = lambda rows, K: on_sim(quantize(np.ones((rows, K), new(1).dtype), kind))  # noqa: B023
        for C, F in ((2048, 768), (16, 14336)):
            matrices = codes(2 * F, C), codes(C, F)
            expert_gemv.expert_gemv(new(2, C), f32(2, 2), experts, *matrices, weights_ready=True)
        for K in (37, 48):
            dequantize_rows(new(4, K), codes(8, K), 2, counts)


def launch_plain():
    """The kernels that show the maths of an op, and one that only a program with several GPUs launches."""
    ids, row = sim(np.zeros(2, np.int32)), lambda: f32(2, 8)
    cache, tokens = f32(1, 2, 4, 8), f32(2, 2, 8)
    for kernel, *args in (
        (elementwise.add_naive_kernel, f32(8), f32(8), f32(8)),
        (cast.narrow_naive_kernel, sim(np.ones(8, np.uint16)), sim(np.ones(8, np.uint32))),
        (swiglu.swiglu_fwd_naive_kernel, row(), f32(2, 16)),
        (rmsnorm.rmsnorm_fwd_naive_kernel, row(), f32(2), row(), f32(8), 1e-6),
        (embedding.embedding_bwd_naive_kernel, f32(3, 8), row(), ids),
        (cross_entropy.cross_entropy_naive_kernel, f32(2), row(), ids, f32(1), 8, True),
        (gemv.gemv_naive_kernel, row(), row(), f32(8, 8)),
        (kv_cache.append_kv_naive_kernel, cache, cache.copy(), tokens, tokens.copy(), ids, ids),
    ):
        launch(kernel, 1, 32, *args)
    grad_norm.sum_of_squares(f32(8))


@every_share
@pytest.mark.parametrize("dtype, cards", [(np.float32, CARDS), (BF16, CARDS_BF16)])
def test_every_kernel_compiles_to_float32(monkeypatch, nvvm, dtype, cards, share):
    found = signatures(monkeypatch, functools.partial(launch_everything, dtype))
    named = {kernel.py_func.__name__ for kernel, _ in found}
    assert len(named) >= 25, sorted(named)
    if dtype == BF16:  # those that have no argument of this dtype are compiled above
        same = signatures(monkeypatch, functools.partial(launch_everything, np.float32))
        found = [pair for pair in found if pair not in same]
    for kernel, signature, chosen in with_cards(found, cards, share):
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


# what the PTX of each program in examples/primitives contains
PRIMITIVES = {
    "cp_async": r"cp\.async\.cg\.shared\.global",
    "last_block": r"atom\.acq_rel\.gpu\.global",
    "ldmatrix": r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans",
    "mbarrier": r"mbarrier\.try_wait\.parity",
    "own_instruction": r"dp4a\.s32\.s32",
    "tensor_cores": r"mma\.sync\.aligned\.m16n8k16",
    "tma": r"cp\.async\.bulk\.tensor\.4d\.global",
    "wgmma": r"wgmma\.mma_async\.sync\.aligned\.m64n64k16",
    "wide_accesses": r"ld\.global\.v4",
}


def test_the_examples_of_primitives_compile(monkeypatch, nvvm):
    found = primitive_examples.launched()
    assert set(found) == set(PRIMITIVES)
    for name, (kernel, signature) in found.items():
        ptx = compiled(monkeypatch, kernel, signature, [(9, 0)])[9, 0]
        assert re.search(PRIMITIVES[name], ptx), f"{name}: no {PRIMITIVES[name]}"


def test_every_kernel_is_compiled():
    found = every_signature.every_signature((9, 0)).values()
    named = {(k.py_func.__module__, k.py_func.__name__) for group in found for k, _ in group}
    missing = every_signature.kernels_in_source() - named
    assert not missing, (
        f"{sorted(missing)}: launch it in launch_everything above, or in another file of every_signature.py"
    )
