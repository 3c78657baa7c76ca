"""The kernels of the engine compile without a GPU: float32 arithmetic, registers instead of local memory, no spills.

As in test_compile.py, the launchers determine what to compile. For the requirements see offline.py.
"""

import functools

import ml_dtypes
import numpy as np
import pytest
from checks import on_sim
from offline import (
    CARDS,
    CARDS_BF16,
    check_registers,
    compiled,
    every_share,
    nvvm,
    signatures,
    with_cards,
)

from xtrain.kernels.attention import context_attention, decode_attention, flash_attention
from xtrain.kernels.decoding import (
    adapter_columns,
    gemv,
    gemv_chain,
    kept_tokens,
    kv_cache,
    kv_codes,
    logprobs,
    padding,
    penalties,
    sampling,
    token_masks,
)
from xtrain.kernels.quantize import CODES, KINDS, Quantized, dequantize, quantize
from xtrain.simulator import sim

__all__ = ["nvvm"]
BF16 = ml_dtypes.bfloat16


def i32(*values):
    return sim(np.array(values, np.int32))


def launch_engine(dtypes=(np.float32, BF16)):
    for dtype in dtypes:
        full = lambda *shape: sim(np.ones(shape, dtype))  # noqa: B023
        for D in (8, 6):
            caches, tokens = full(1, 2, 4, D), full(2, 2, D)
            kv_cache.append_kv(caches, caches.copy(), tokens, tokens.copy(), i32(0, 0), i32(1, 2))
        for B, H, D in (
            (1, 8, 64),
            (17, 8, 64),
            (1, 9, 16),
            (1, 1, 128),
            (1, 4, 256),
        ):  # few and many key heads
            decode(full, dtype, B, H, D)
        if dtype == BF16:
            for B, H, D in ((1, 8, 64), (65, 16, 128), (1, 1, 32), (1, 4, 256)):
                decode(full, dtype, B, H, D, codes=True)
                read_codes(full, D)
        for D, S in (
            (64, 64),
            (128, 64),
            (64, 16),
            (256, 64),
        ):  # a tile of keys lies in one block, or in several
            caches, ends = (full(1, 1, S, D), full(1, 1, S, D)), i32(0, 3)
            where = ends, i32(0), tables(1), 3
            context_attention.context_attention(full(3, 2, D), *caches, *where, 0.1)
        multiply(full, dtype)
        if dtype == BF16:
            multiply_chains(full)
        row = lambda kind: sim(np.ones(1, kind))
        floats, ints, longs = row(np.float32), row(np.int32), row(np.int64)
        parameters = ints, floats, ints, floats, longs, longs, ints
        sampling.sample(full(1, 8), *parameters)
        sampling.sample(full(1, 8), *parameters, min_p_B=floats)
        rules = penalties.Penalties.empty(ints, 1, 2, 8)
        penalties.apply_penalties(full(1, 8), rules, ints, ints, 8)
        penalties.count_tokens(rules, ints, ints)
        token_masks.mask_logits(full(1, 8), sim(np.ones((1, 1), np.int32)), ints, 8)
        adapter_columns.keep_own_columns(full(1, 1), ints, ints)
        masks = kept_tokens.kept_tokens(full(1, 8), ints, floats, ints, floats, floats, 8)
        for kept in (masks, None):
            kept_tokens.sampled_logits(full(1, 8), floats, kept, 8)
        logprobs.token_logprobs(full(1, 8), ints, 2)
    sampling.advance(i32(0), i32(0), i32(0))
    padding.token_positions(i32(0, 1, 2), 2, i32(0, 0), tables(2), 16)


def tables(B):
    return sim(np.zeros((B, 4), np.int32))


def decode(full, dtype, B, H, D, codes=False):
    table, w = sim(np.ones((256, D // 2), np.float32)), sim(np.ones(D, np.float32))
    weights = (w, w) if D == 64 else (None, None)
    if codes:
        (caches,), (scales,) = kv_codes.empty_kv_codes(table, 1, 1, 1, 64, D)
    else:
        caches, scales = full(2, 1, 1, 64, D), None
    arrays = (full(B, (H + 2) * D), *caches, i32(*[3] * B), tables(B), table, table, *weights)
    more = dict(scales_RGS2=scales)
    decode_attention.decode_attention(*arrays, 1e-6, 0.1, cache_ready=True, **more)
    if B == 1:  # drafts
        decode_attention.decode_attention(*arrays, 1e-6, 0.1, previous_B=i32(-1), **more)


def read_codes(full, D):
    (caches,), (scales,) = kv_codes.empty_kv_codes(full(1), 1, 1, 1, 64, D)
    kv_codes.append_codes(*caches, scales, full(2, 1, D), full(2, 1, D), i32(0, 0), i32(1, 2))
    kv_codes.dequantize_blocks(*caches, scales, i32(0), full(1, 1, 64, D), full(1, 1, 64, D))


def multiply(full, dtype):
    """The four matrix products of a layer of a Llama of 1.1 B parameters."""
    x, norm_w = sim(np.ones((1, 2048), np.float32)), sim(np.ones(2048, np.float32))
    product = functools.partial(gemv.gemv, weights_ready=True)
    normed = functools.partial(gemv.add_norm_gemv, weights_ready=True)
    normed(x, None, norm_w, full(2560, 2048), 1e-6)
    normed(x, full(1, 2048), norm_w, full(2560, 2048), 1e-6)
    normed(x, full(1, 2048), norm_w, full(128, 2048), 1e-6, True)
    normed(x, full(1, 2048), norm_w, full(128, 2048), 1e-6, b_O=sim(np.ones(128, np.float32)))
    product(full(1, 2048), full(64, 2048))
    product(full(1, 5632), full(64, 5632))
    for kind in KINDS:
        multiply_codes(full, functools.partial(codes, kind, dtype), x, norm_w)
        quantize(full(2, 48), kind)


def multiply_chains(full):
    """The products of a layer in batch-invariant mode: each piece of w, and one of few registers."""
    x, norm_w = sim(np.ones((1, 2048), np.float32)), sim(np.ones(2048, np.float32))
    normed = functools.partial(gemv_chain.chain_add_norm_gemv, weights_ready=True)
    normed(x, None, norm_w, full(2560, 2048), 1e-6)
    normed(x, full(1, 2048), norm_w, full(128, 2048), 1e-6)
    normed(x, full(1, 2048), norm_w, full(4608, 2048), 1e-6, True)
    gemv_chain.chain_gemv(full(1, 5632), full(64, 5632))
    gemv_chain.chain_gemv(full(1, 576), full(8192, 576), np.float32, weights_ready=True)
    gemv_chain.chain_gemv(full(8, 96), full(40, 96), weights_ready=True)


def codes(kind, dtype, rows, K):
    if kind not in CODES:
        return on_sim(quantize(np.ones((rows, K), dtype), kind))
    ones = sim(np.ones((rows, K), CODES[kind])), sim(np.ones(rows, np.float32))
    return Quantized(*ones, np.dtype(dtype))


def multiply_codes(full, codes, x, norm_w):
    """The same with quantized weights; those without a norm also for more rows."""
    normed = functools.partial(gemv.add_norm_gemv, weights_ready=True)
    normed(x, full(1, 2048), norm_w, codes(128, 2048), 1e-6, True)
    bias = sim(np.ones(128, np.float32))
    normed(x, full(1, 2048), norm_w, codes(128, 2048), 1e-6, b_O=bias)
    gemv.gemv(full(1, 2048), codes(64, 2048), weights_ready=True)  # all of a tile at once
    gemv.gemv(full(1, 5632), codes(64, 5632), weights_ready=True)  # 16 warps, two steps
    if full(1).dtype == BF16 and codes(1, 64).kind in (
        "int8",
        "nf4",
    ):  # others need fewer registers
        gemv.gemv(full(9, 5632), codes(64, 5632), weights_ready=True)
        gemv.gemv(full(32, 4096), codes(4096, 4096), weights_ready=True)
        rows = 16 * (gemv.MULTIPROCESSORS + 1)  # two tiles per block
        gemv.gemv(full(32, 2048), codes(rows, 2048), weights_ready=True)
        gemv.gemv(full(9, 2048), codes(32 * 300, 2048), weights_ready=True)  # several per block
    for K in (37, 48):
        dequantize(codes(3, K))


# NVVM 13.5 keeps an array of this kernel in local memory, NVVM 13.0 (CUDA 13.0) does not
LOCAL = {"decode_attention_kernel"}
# bytes. Of 384 threads, with successive rows of a sequence, it takes all 168 registers of each; of 128
# threads, with heads of 256, all 255.
SPILLS = {("decode_attention_kernel", 384): 8, ("decode_attention_kernel", 128): 56}
# The last block merges what the others wrote.
MERGES = {
    "decode_attention_kernel",
    "top_key_kernel",
    "sample_weigh_kernel",
    "score_kernel",
}
SHARED_ROWS = dict.fromkeys(
    ["top_key_kernel", "sample_weigh_kernel", "sample_gather_kernel", "score_kernel", "top_gather_kernel"], (256, 4)
)  # fmt: skip


@every_share
@pytest.mark.parametrize("dtype, cards", [(np.float32, CARDS), (BF16, CARDS_BF16)])
def test_engine_kernels_compile(monkeypatch, tmp_path, nvvm, dtype, cards, share):
    monkeypatch.setattr(flash_attention, "HOPPER", False)  # test_flash_attention_hopper_compile.py
    found = signatures(monkeypatch, lambda: launch_engine([dtype]))
    if dtype == BF16:  # those that have no argument of this dtype are compiled above
        same = signatures(monkeypatch, lambda: launch_engine([np.float32]))
        found = [pair for pair in found if pair not in same]
    for kernel, signature, chosen in with_cards(found, cards, share):
        name = kernel.py_func.__name__
        ptx = compiled(monkeypatch, kernel, signature, chosen, [] if name in LOCAL else [(9, 0)])
        if name in MERGES:  # the results of a weaker atomic would look the same
            assert all("atom.acq_rel.gpu.global.add.s32" in text for text in ptx.values())
        bounds = kernel.targetoptions.get("launch_bounds") or threads_of(name)
        threads, blocks = bounds if isinstance(bounds, tuple) else (bounds, 1)
        spills = SPILLS.get((name, threads), 0)
        check_registers(tmp_path, ptx[9, 0], threads, blocks, (9, 0), spills)


def threads_of(name):
    """Threads of a block: without numba-cuda a kernel has no launch_bounds."""
    known = {
        "decode_attention_kernel": 256,
        "context_attention_fp32_kernel": 128,
        "context_attention_bf16_kernel": 128,
        "sample_draw_kernel": 512,
        "top_list_kernel": 512,
        "gemv_tensor_kernel": (256, 2),
    } | SHARED_ROWS
    return known.get(name, 256)
