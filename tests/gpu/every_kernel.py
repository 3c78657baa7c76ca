"""Launch every kernel on small, odd shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no  python tests/gpu/every_kernel.py
    compute-sanitizer --tool racecheck --kernel-name kns=xtrain python tests/gpu/every_kernel.py

racecheck stops in fp8_products, inside cuBLASLt: name the other functions for it.
With XTRAIN_COMPILER=mlir the kernels' names have no module: --kernel-name kns=5ArrayI.
Arguments: names of functions below (models, rows ...) run only those; models:3 runs only the fourth of its ten models, experts:0
the first of eight cases. --apart:
run each kernel after the previous one has finished, and name a kernel that fails. pytest checks the values; this program
only has to reach every line of every kernel quickly: without PyTorch and hypothesis. Every array is a separate allocation,
because an out-of-bounds access inside a block of a memory pool would not be detected.
At the end it lists the kernels of xtrain/kernels that were never launched (exit code 1).
"""

import importlib
import itertools
import pkgutil
import sys
from unittest import mock

import cupy as cp
import numpy as np

import xtrain
import xtrain.kernels
from xtrain import lesson
from xtrain.kernels.adamw import adamw, adamw_hyper
from xtrain.kernels.attention import flash_attention
from xtrain.kernels.attention.context_attention import context_attention
from xtrain.kernels.attention.decode_attention import decode_attention
from xtrain.kernels.attention.gemm_attention import hide_keys
from xtrain.kernels.attention.key_bounds import KeyBounds, document_bounds
from xtrain.kernels.cast import BFLOAT16, cast_fwd
from xtrain.kernels.checksum import checksum, compare
from xtrain.kernels.cross_entropy import count_targets, cross_entropy, mean_loss
from xtrain.kernels.decoding import sampling
from xtrain.kernels.decoding.adapter_columns import keep_own_columns
from xtrain.kernels.decoding.gemv import add_norm_gemv, gemv, gemv_fits
from xtrain.kernels.decoding.gemv_chain import chain_add_norm_gemv, chain_fits, chain_gemv
from xtrain.kernels.decoding.kept_tokens import kept_tokens, sampled_logits
from xtrain.kernels.decoding.kv_cache import append_kv, empty_kv_cache
from xtrain.kernels.decoding.kv_codes import append_codes, dequantize_blocks, empty_kv_codes
from xtrain.kernels.decoding.logprobs import token_logprobs
from xtrain.kernels.decoding.padding import token_positions
from xtrain.kernels.decoding.penalties import (
    Penalties,
    PenaltyRules,
    apply_penalties,
    count_tokens,
)
from xtrain.kernels.decoding.token_masks import mask_logits
from xtrain.kernels.distillation import distillation
from xtrain.kernels.dora import inverse_norms, scale_columns, scale_columns_bwd
from xtrain.kernels.elementwise import add_into, scale_into
from xtrain.kernels.embedding import embedding_bwd, embedding_fwd
from xtrain.kernels.entropy import entropy
from xtrain.kernels.experts import (
    expert_rows,
    expert_swiglu,
    grouped_product,
    grouped_product_mma,
    routing,
)
from xtrain.kernels.experts.expert_gemv import expert_gemv
from xtrain.kernels.experts.expert_order import expert_order
from xtrain.kernels.experts.expert_router import expert_router
from xtrain.kernels.experts.load_balance import add_counts, move_bias
from xtrain.kernels.fp8 import DTYPES as FP8_KINDS
from xtrain.kernels.fp8 import (
    Slot,
    fp8,
    fp8_cross_entropy,
    fp8_swiglu,
    fp8_swiglu_bwd,
    update_scales,
)
from xtrain.kernels.fp8_gemm import fp8_matmul
from xtrain.kernels.fp8_norm import fp8_norm
from xtrain.kernels.grad_norm import grad_norm, norm_and_factor, sum_of_squares
from xtrain.kernels.moving_average import moving_average
from xtrain.kernels.muon import momentum, muon_update, orthogonalize
from xtrain.kernels.peers import MOST, add_peers, copy_to_peers
from xtrain.kernels.qk_norm_rope import qk_norm_rope_bwd, qk_norm_rope_fwd
from xtrain.kernels.quantize import CODES, KINDS, dequantize, quantize
from xtrain.kernels.rope import rope_tables
from xtrain.kernels.runtime import launch as _launch
from xtrain.kernels.silu_mul import silu_mul_bwd, silu_mul_fwd
from xtrain.kernels.skip_nonfinite import skip_unless_finite
from xtrain.kernels.softmax import causal_softmax_bwd, causal_softmax_fwd
from xtrain.nn import functional as F
from xtrain.nn.autograd import Tensor
from xtrain.nn.deferred import ResidualRMSNorm
from xtrain.nn.optim import clip

padding, repeat_kv = lesson.load_checks("padding"), lesson.load_checks("repeat_kv").repeat_kv
DTYPES = (np.dtype(np.float32), BFLOAT16)
RNG = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return cast_fwd(cp.asarray(RNG.standard_normal(shape, dtype=np.float32)), dtype)


def leaf(*shape, dtype=np.float32):
    return Tensor(draw(*shape, dtype=dtype), requires_grad=True)


def backward(y):
    y.backward(draw(*y.shape, dtype=y.dtype))


def models(only=None):
    """Whole training steps: forward, backward, clip, AdamW. only: the index of a single model"""
    shapes = [
        dict(vocab_size=131, dim=37, n_heads=3, n_kv_heads=1, head_dim=16, hidden_dim=53),
        dict(vocab_size=300, dim=64, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96),
        dict(vocab_size=1000, dim=200, n_heads=2, n_kv_heads=2, head_dim=64, hidden_dim=264),
        dict(vocab_size=517, dim=264, n_heads=2, n_kv_heads=1, head_dim=128, hidden_dim=1000),
        dict(vocab_size=5003, dim=1040, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=136),
    ]
    chosen = list(enumerate(itertools.product(shapes, ("fp32", "bf16"))))
    for i, (shape, precision) in chosen if only is None else [chosen[only]]:
        if precision == "bf16" and shape["head_dim"] == 8:
            shape = dict(shape, head_dim=16)
        T = (33, 65, 100)[i % 3]
        config = xtrain.ModelConfig(
            n_layers=2,
            max_seq_len=128,
            qk_norm=i % 4 < 2,
            qkv_bias=i % 4 > 1,
            tie_embeddings=i % 3 == 0,
            **shape,
        )
        recompute = ("none", "attention", "block")[i % 3]
        print(f"models:{i} {precision} T {T} recompute {recompute} {shape}", flush=True)
        model = xtrain.Transformer(config, 0, "gpu", precision, recompute=recompute)
        optimizer = xtrain.AdamW(model, 1e-3, weight_decay=0.1)
        ids = RNG.integers(0, config.vocab_size, (3, T)).astype(np.int32)
        for _ in range(2):
            model.zero_grad()
            model.loss(ids, np.where(ids % 7 == 0, -100, ids)).backward()
            optimizer.apply(cp.asarray(optimizer.advance()), clip(model, 1.0)[1])
        cp.cuda.Device().synchronize()


def tables(dtype):
    """The other ops of a training step: embedding, QK-norm + RoPE, cross-entropy over wide rows."""
    for N, V, C in ((1, 1, 1), (33, 7, 37), (300, 5003, 264), (1111, 70001, 16), (64, 3, 1040)):
        ids = cp.asarray(RNG.integers(0, V, N).astype(np.int32))
        embedding_fwd(ids, draw(V, C, dtype=dtype))
        embedding_bwd(draw(N, C, dtype=dtype), ids, cp.zeros((V, C), np.float32))
    for N, H, G, D in (
        (1, 1, 1, 8),
        (33, 4, 2, 16),
        (70, 3, 1, 32),
        (40, 2, 2, 64),
        (9, 5, 1, 128),
        (7, 3, 3, 10),
    ):
        cos_sin = tuple(map(cp.asarray, rope_tables(D, N, 10000.0)))
        qkv = draw(N, (H + 2 * G) * D, dtype=dtype)
        for norm in ((draw(D), draw(D)), (None, None)):
            q, k, _, rstd = qk_norm_rope_fwd(qkv, *norm, *cos_sin, H, G, N, 1e-6)
            d = [draw(*x.shape, dtype=dtype) for x in (qkv, q, k)]
            dw = [None if w is None else cp.zeros(D, np.float32) for w in norm]
            qk_norm_rope_bwd(*d, qkv, *norm, rstd, *cos_sin, H, G, N, *dw)
    for N, V, padded in ((3, 50257, 50304), (2, 131000, 131072), (5, 517, 640), (1, 1, 128)):
        targets = cp.asarray(np.where(RNG.random(N) < 0.2, -100, RNG.integers(0, V, N)))
        inverse = count_targets(targets)
        for gradient in (True, False):
            logits = draw(N, padded, dtype=dtype)
            entropy(logits, V)
            mean_loss(cross_entropy(logits, targets, V, inverse, gradient)[0], inverse)
            ids = cp.zeros((N, 1), np.int32)
            teacher = cp.full((N, 1), -0.7, np.float32)
            for reverse in (False, True):
                options = V, inverse, 0.5, reverse, gradient
                distillation(draw(N, padded, dtype=dtype), targets, ids, teacher, *options)

    for N, O in ((1, 1), (33, 37), (300, 264)):  # noqa: E741
        m = draw(O)
        scale_columns(draw(N, O, dtype=dtype), m, m)
        scale_columns(draw(N, O, dtype=dtype), m, m, m)
        scale_columns_bwd(draw(N, O, dtype=dtype), draw(N, O, dtype=dtype), m, m, draw(O))
        inverse_norms(draw(O), m, draw(4, O), draw(4, O), draw(O, 4), 2.0)


def optimizer():
    """AdamW with all its options, Muon, a moving average, norms and checksums of few and of many numbers, a skipped step."""
    for n in (1, 37, 4096, 100_003, 3_000_001):
        w, g, m, v = (cp.abs(draw(n)) for _ in range(4))
        norm, factor = grad_norm(g, 1.0)[:, None]
        norm_and_factor(cp.concatenate([sum_of_squares(g[: n // 2]), sum_of_squares(g)]), 1.0)
        skip_unless_finite(factor, cp.zeros(1, np.int32), norm, cp.ones(3, np.float32), 2)
        total = cp.zeros(1, np.int64)
        checksum(g.view(np.int32), total)
        compare(total, total, cp.zeros(1, np.int32))
        hyper = cp.asarray(adamw_hyper(1e-3, 0.9, 0.95, 1))
        for half, zero in itertools.product((None, cp.zeros(n, BFLOAT16)), (False, True)):
            adamw(w, g, m, v, factor, hyper, n // 3, 0.9, 0.95, 1e-8, 0.1, half, zero)
        moving_average(v, w, factor, norm)
    for (R, C), dtype in itertools.product(((1, 1), (5, 300), (384, 37)), DTYPES):
        w, g, m = (draw(3 * R * C + 7) for _ in range(3))
        first = cp.asarray(np.array([0, R * C + 7], np.int64))
        x = draw(2, R, C, dtype=dtype)
        momentum(x, m, g, first, first, factor, 0.95)
        for half in (None, cp.zeros(w.size, BFLOAT16)):
            muon_update(w, x, first, first, factor, hyper, 0.1, half)
        orthogonalize(x)


def fp8_codes():
    """Codes of bf16 matrices in both orientations, of SwiGLU, of the loss and of norms; their scales. Compute capability 8.9"""
    if int(cp.cuda.Device().compute_capability) < 89:
        return
    scales, counts = cp.ones(8, np.float32), cp.zeros(2, np.int64)
    largest = cp.zeros(8, np.int32)
    for kind, (N, K), current in itertools.product(FP8_KINDS, ((128, 128), (384, 256)), (True, False)):  # fmt: skip
        at = Slot(scales[:1], largest[:1], counts, kind)
        x, gu = draw(N, K, dtype=BFLOAT16), draw(N, 2 * K, dtype=BFLOAT16)
        x[0, 0], x[N - 1, K - 1] = np.inf, 1e30
        fp8(x, at, current)
        fp8_swiglu(gu, Slot(scales[4:5], largest[4:5], counts, "e4m3"))
        fp8_swiglu_bwd(x, gu, at, current)
        for dtype in (np.int32, np.int64):
            targets = cp.asarray(
                np.where(RNG.random(N) < 0.2, -100, RNG.integers(0, K - 27, N)).astype(dtype)
            )
            logits, lse, inverse = draw(N, K, dtype=BFLOAT16), draw(N), count_targets(targets)
            cross_entropy(logits, targets, K - 27, inverse, False, lse_N=lse)
            fp8_cross_entropy(logits, targets, lse, K - 27, inverse, at, current)
        update_scales(scales, largest, scales, counts, counts.copy())
    for C, current in itertools.product((128, 768, 1152, 2560, 4096, 5120), (True, False)):
        x, r, w = draw(128, C), draw(128, C, dtype=BFLOAT16), draw(C)
        x[1, 1], x[127, C - 1] = np.nan, 1e30
        for branch in (r, None):
            fp8_norm(x, branch, w, 1e-6, Slot(scales[:1], largest[:1], counts, "e4m3"), current)


def fp8_products():
    """Products of codes: kernels of cuBLASLt, in which racecheck stops. Compute capability 8.9"""
    if int(cp.cuda.Device().compute_capability) < 89:
        return
    scales, counts, largest = cp.ones(8, np.float32), cp.zeros(2, np.int64), cp.zeros(8, np.int32)
    for kind, (N, K) in itertools.product(FP8_KINDS, ((128, 128), (384, 256))):
        x, w = (
            fp8(draw(N, K, dtype=BFLOAT16), Slot(scales[i : i + 1], largest[i : i + 1], counts, k))
            for i, k in ((0, kind), (4, "e4m3"))
        )
        fp8_matmul(draw(N, N), x.rows, w.rows)
        fp8_matmul(draw(K, K, dtype=BFLOAT16), x.columns, w.columns, accumulate=True)


def serving(dtype):
    """Packed prefill, the cache, attention over it, products of few rows."""
    ints = lambda *numbers: cp.asarray(np.array(numbers, np.int32))
    for D, (H, G) in itertools.product((16, 32, 64, 128), ((1, 1), (4, 2), (6, 1))):
        lengths, history, (N, A, S) = (5, 1, 67), ints(0, 40, 130), (73, 3, 16 if G == 1 else 64)
        M = 208 // S + 1
        tables = cp.asarray(RNG.permutation(A * M).reshape(A, M).astype(np.int32))
        edges = padding.cumulative_lengths(ints(*lengths))
        blocks, offsets, _ = token_positions(edges, N, history, tables, S)
        padding.padding_offsets(edges, N, max(lengths))
        x = draw(N, H, D, dtype=dtype)
        padding.remove_padding(padding.restore_padding(x, edges, 67), edges, N)
        padding.remove_padding_heads(padding.restore_padding_heads(x, edges, 70), edges, N)
        k, v = empty_kv_cache(x, 1, A * M, G, S, D, dtype)[0]
        for _ in range(2):  # a second step: the same places are rewritten
            append_kv(k, v, *(draw(N, G, D, dtype=dtype) for _ in range(2)), blocks, offsets)
        repeat_kv(k, 2)
        context_attention(x, k, v, edges, history, tables, 67, 0.2)
        cos_sin = tuple(map(cp.asarray, rope_tables(D, M * S, 10000.0)))
        for norm in ((draw(D), draw(D)), (None, None)):
            qkv = draw(A, (H + 2 * G) * D, dtype=dtype)
            more = (history + 5, tables, *cos_sin, *norm, 1e-6, 0.2)
            decode_attention(qkv, k, v, *more)
            previous = cp.arange(-1, A - 1, dtype=np.int32)  # one sequence
            one = cp.tile(tables[:1], (A, 1))
            rows = history[0] + cp.arange(A, dtype=np.int32)
            decode_attention(qkv, k, v, rows, one, *more[2:], previous_B=previous)
    for N, K, M in itertools.product((1, 2, 3, 8, 16, 32), (32, 256, 1056, 5632), (2, 70, 514)):
        x = draw(N, K, dtype=dtype)
        w = draw(M, K, dtype=dtype)
        norm = draw(K)
        if gemv_fits(N, K, dtype):
            gemv(x, w)
            gemv(x, w, b_O=draw(M))
            add_norm_gemv(x, None, norm, w, 1e-6, True)
            add_norm_gemv(x, draw(N, K), norm, w, 1e-6)
        if dtype != np.float32 and chain_fits(x, w, True):
            chain_gemv(x, w, np.float32, True)
            chain_add_norm_gemv(draw(N, K), None, norm, w, 1e-6)
            chain_add_norm_gemv(draw(N, K), x, norm, w, 1e-6, True, True)
    for kind, N, K, M in itertools.product(
        KINDS, (1, 8, 9, 32), (16, 64, 1088, 5632), (2, 70, 514)
    ):
        w = quantize(draw(M, K, dtype=dtype), kind)
        if gemv_fits(N, K, dtype, quantized=kind):
            x, norm = draw(N, K, dtype=dtype), draw(K)
            gemv(x, w, b_O=draw(M))
            if gemv_fits(N, K, dtype, quantized=kind, fused=True):
                add_norm_gemv(x, draw(N, K), norm, w, 1e-6, True)
    for kind, K in itertools.product(KINDS, (1, 37, 48, 1040)):
        dequantize(quantize(draw(5, K, dtype=dtype), kind))


def experts(only=None):
    """Mixture of experts: few and many tokens, experts without tokens, one that gets all. only: the index of a single case"""
    cases = list(itertools.product(DTYPES, ((1, 2, 4), (40, 1, 1), (700, 2, 5), (1500, 8, 130))))
    for dtype, (N, K, E) in cases if only is None else [cases[only]]:
        chosen = np.argsort(-RNG.random((N, E)), 1)[:, :K]
        for ids in (chosen, np.zeros_like(chosen)):
            add_counts(cp.zeros(E, np.int32), cp.ones(E, np.int32))
            move_bias(draw(E), cp.arange(E, dtype=np.int32), 0.1)
            order = expert_order(cp.asarray(np.ascontiguousarray(ids, np.int32)), E)
            for C in (37, 264):
                expert_rows.sum_rows(expert_rows.gather_rows(draw(N, C, dtype=dtype), order), order)
                gu, w = draw(order.pairs_M.size, 2 * C, dtype=dtype), draw(N, K)
                y = expert_swiglu.expert_swiglu(gu, w, order)
                expert_swiglu.expert_swiglu_bwd(y, gu, w, order)
            M = order.pairs_M.size
            for O, I in ((19, 37), (72, 136)):  # noqa: E741
                x, dy, w = (draw(*n, dtype=dtype) for n in ((M, I), (M, O), (E, O, I)))
                for version in (grouped_product.version(x, w, w), grouped_product_mma):
                    if version is grouped_product_mma and (dtype == np.float32 or I % 8):
                        continue
                    with mock.patch.object(grouped_product, "version", return_value=version):
                        y = grouped_product.grouped_product(x, w, order)
                        grouped_product.grouped_product_dx(y, w, order)
                        for kind, buffer in itertools.product(KINDS, (1, 1 << 30)):
                            with mock.patch.object(grouped_product, "BUFFER", buffer):
                                coded = quantize(w.reshape(-1, I), kind)
                                y = grouped_product.grouped_product(x, coded, order)
                                grouped_product.grouped_product_dx(y, coded, order)
                        for accumulate in (False, True):
                            dw = draw(E, O, I)
                            grouped_product.grouped_product_dw(dy, x, order, dw, accumulate)
        for width, C in ((16, 272), (1032, 8), (1040, 16)):
            ids, few = cp.asarray(np.ascontiguousarray(chosen[:8], np.int32)), min(N, 8)
            matrices = draw(E, 2 * width, C, dtype=dtype), draw(E, C, width, dtype=dtype)
            expert_gemv(draw(few, C, dtype=dtype), draw(few, K), ids, *matrices)
            for kind in KINDS:
                if C % 16 and kind in CODES:  # their rows are read 16 columns at a time
                    continue
                coded = [quantize(m.reshape(-1, m.shape[-1]), kind) for m in matrices]
                expert_gemv(draw(few, C, dtype=dtype), draw(few, K), ids, *coded)
            gate, rows = draw(E, C, dtype=dtype), (draw(few, C), draw(few, C, dtype=dtype))
            expert_router(*rows, draw(C), gate, 1e-6, K)
        logits = draw(N, E, dtype=dtype)
        for renormalized, bias in ((True, None), (False, draw(E))):
            ids, weights = routing.routing(logits, K, renormalized, bias)
            routing.routing_bwd(weights, logits, ids, weights, renormalized)
        loss = routing.router_loss(logits, order.counts_E, 0.1, 0.1)
        routing.router_loss_bwd(loss, logits, order.counts_E, 0.1, 0.1)


def kv_codes():
    """A KV cache in fp8: codes and scales, attention over them, blocks in bf16 again."""
    ints = lambda *numbers: cp.asarray(np.array(numbers, np.int32))
    for D, (H, G) in itertools.product((32, 64, 128), ((1, 1), (4, 2), (6, 1))):
        lengths, history, (N, A, S) = (5, 1, 67), ints(0, 40, 130), (73, 3, 16 if G == 1 else 64)
        M = 208 // S + 1
        tables = cp.asarray(RNG.permutation(A * M).reshape(A, M).astype(np.int32))
        edges = cp.asarray(np.cumsum((0, *lengths), dtype=np.int32))
        blocks, offsets, _ = token_positions(edges, N, history, tables, S)
        k, v = (draw(N, G, D, dtype=BFLOAT16) for _ in range(2))
        (codes,), (scales,) = empty_kv_codes(k, 1, A * M, G, S, D)
        for _ in range(2):  # a second step: the same places are rewritten
            append_codes(*codes, scales, k, v, blocks, offsets)
        cos_sin = tuple(map(cp.asarray, rope_tables(D, M * S, 10000.0)))
        qkv = draw(A, (H + 2 * G) * D, dtype=BFLOAT16)
        for norm in ((draw(D), draw(D)), (None, None)):
            more = (history + 5, tables, *cos_sin, *norm, 1e-6, 0.2)
            decode_attention(qkv, *codes, *more, scales_RGS2=scales)
        for dtype in DTYPES:
            k, v = (draw(A * M, G, S, D, dtype=dtype) for _ in range(2))
            dequantize_blocks(*codes, scales, tables.reshape(-1), k, v)


def choosing(dtype):
    """Sampling: greedy, few and many candidates, top-p, min-p, unused rows; penalties; log-probabilities; masks."""
    for B, V, padded in ((1, 1, 128), (5, 517, 640), (7, 50257, 50304), (3, 131000, 131072)):
        temperature = RNG.choice([0.0, 0.5, 1.0], B).astype(np.float32)
        top_k = RNG.choice([0, 1, 40, 1024], B).astype(np.int32)
        top_p = RNG.choice([0.1, 0.9, 1.0], B).astype(np.float32)
        numbers = [np.arange(B, dtype=t) for t in (np.int64, np.int64, np.int32)]
        ids = cp.zeros(B, np.int32)
        chosen = list(map(cp.asarray, (temperature, top_k, top_p, *numbers)))
        logits, min_p = draw(B, padded, dtype=dtype), cp.full(B, 0.05, np.float32)
        sampling.sample(logits, ids, *chosen, V)
        sampling.sample(logits, ids, *chosen, V, min_p_B=min_p)
        slots = cp.arange(B, dtype=np.int32)
        penalties = Penalties.empty(logits, B, 300, V)
        for b in range(B):
            limits = (2, frozenset({0}), frozenset(range(0, V, 2)) if b % 2 and V > 2 else None)
            rules = PenaltyRules(1.2, 0.1, 0.1, {0: 1.0}, *limits)
            penalties.set_slot(b, rules, range(min(V, 200)), [0])
        apply_penalties(logits, penalties, slots, slots, V)
        count_tokens(penalties, slots, ids)
        for top in (0, 1, 20):
            token_logprobs(logits, ids, top, V)
        mask_logits(logits, cp.zeros((B, -(-V // 32)), np.int32), slots, V)
        owners = cp.arange(20, dtype=np.int32) % 3
        keep_own_columns(draw(B, 20, dtype=dtype), slots % 3, owners)
        masks = kept_tokens(logits, ids, *chosen[:3], min_p, V)
        for kept in (masks, None):
            sampled_logits(logits, chosen[0], kept, V)
        sampling.advance(*(cp.zeros(B, np.int32) for _ in range(3)))


def rows(dtype):
    """Ops on rows: widths below, above and between what one warp, one block and one register tile hold."""
    for N, C in ((1, 1), (3, 37), (5, 264), (2, 1040), (7, 4100), (2, 20000)):
        x, w = leaf(N, C, dtype=dtype), leaf(C)
        backward(F.rmsnorm(x, w, 1e-6))
        backward(F.add(*ResidualRMSNorm.apply(x, leaf(N, C, dtype=dtype), w, 1e-6)))
        backward(F.swiglu(leaf(N, 2 * C, dtype=dtype)))
        backward(F.geglu(leaf(N, 2 * C, dtype=dtype)))
        for op in (F.silu, lambda x: F.scale(x, 0.3), lambda x: F.add(x, x)):
            backward(op(leaf(N, C, dtype=dtype)))
        backward(F.cast(leaf(N, C, dtype=dtype), DTYPES[dtype == np.float32]))
        add_into(draw(N, C, dtype=dtype), draw(N, C, dtype=dtype))
        gate, up = draw(N, C, dtype=dtype), draw(N, C, dtype=dtype)
        for gelu in (False, True):
            silu_mul_bwd(silu_mul_fwd(gate, up, gelu), gate, up, gelu)
        scale_into(draw(N, C, dtype=dtype), cp.ones(1, np.float32))
        targets = cp.asarray(RNG.integers(0, C, N))
        for factor in (1.0, 0.5):
            logits, inverse = F.scale(leaf(N, C, dtype=dtype), 1.0), count_targets(targets)
            F.scale(F.cross_entropy(logits, targets, C, inverse), factor).backward()


def peers(dtype):
    """Sums of, and copies to, arrays of neighbours, here on one GPU."""
    for n, count in itertools.product((1, 37, 4096, 300_001), range(1, MOST + 1)):
        neighbours = [draw(n, dtype=dtype) for _ in range(count)]
        add_peers(draw(n, dtype=dtype), neighbours)
        copy_to_peers(neighbours, draw(n, dtype=dtype))


def heads(dtype):
    for B, T, H, D in ((1, 1, 1, 8), (2, 33, 3, 16), (1, 70, 2, 64), (2, 5, 5, 128), (2, 9, 3, 10)):
        cos_sin = tuple(map(cp.asarray, rope_tables(D, T, 10000.0)))
        backward(F.rope(leaf(B * T, H, D, dtype=dtype), *cos_sin, None, T))
        backward(F.swap_heads(leaf(B, T, H, D, dtype=dtype)))


def scores():
    keys = (1, 40, 300, 1100, 1101)  # rows of the last are not kept in registers
    for A, R, S, causal in itertools.product((1, 3), (1, 33, 130), keys, (0, 1)):
        if S >= R or not causal:
            p = causal_softmax_fwd(draw(A, R, S), R, 0.3, bool(causal))
            causal_softmax_bwd(draw(A, R, S), p, R, 0.3, bool(causal))


def flash(dtype):
    """FlashAttention in float32, and with mma.sync on every GPU"""
    usual, flash_attention.HOPPER = flash_attention.HOPPER, False
    for D, causal in itertools.product((16, 32, 64, 128), (True, False)):
        for B, T, H, G in ((1, 1, 1, 1), (2, 67, 4, 2), (1, 200, 3, 1)):
            q, do = (draw(B, T, H, D, dtype=dtype) for _ in range(2))
            k, v = (draw(B, T, G, D, dtype=dtype) for _ in range(2))
            o, lse = flash_attention.flash_attention_fwd(q, k, v, 0.2, causal)
            flash_attention.flash_attention_bwd(do, q, k, v, o, lse, 0.2, causal)
    bounded(dtype, (16, 32, 64, 128))
    flash_attention.HOPPER = usual


def bounded(dtype, widths):
    """A sliding window, and several documents in a row"""
    starts = np.zeros((2, 200), np.int32)
    starts[0, 37:], starts[1, 199:] = 37, 199
    documents = document_bounds(cp.asarray(starts))[0]
    for bounds in (KeyBounds(70), documents):
        hide_keys(draw(4, 200, 200), bounds, 2, 200)
    for D, bounds in itertools.product(widths, (KeyBounds(70), documents)):
        q, do = (draw(2, 200, 2, D, dtype=dtype) for _ in range(2))
        k, v = (draw(2, 200, 1, D, dtype=dtype) for _ in range(2))
        o, lse = flash_attention.flash_attention_fwd(q, k, v, 0.2, True, bounds)
        flash_attention.flash_attention_bwd(do, q, k, v, o, lse, 0.2, True, None, bounds)


def hopper(dtype):
    """wgmma and TMA, compute capability 9.0: partial tiles, several per block, shared heads, a past, a packed array"""
    if dtype == np.float32 or cp.cuda.Device().compute_capability != "90":
        return
    shapes = ((1, 1, 1, 1, 1), (2, 67, 67, 4, 2), (1, 300, 333, 3, 1), (3, 200, 900, 2, 2))
    for D, causal, (B, T, S, H, G) in itertools.product((64, 128), (True, False), shapes):
        qkv = [draw(B, n, heads, D, dtype=dtype) for n, heads in ((T, H), (S, G), (S, G))]
        o, lse = flash_attention.flash_attention_fwd(*qkv, 0.2, causal)
        flash_attention.flash_attention_bwd(draw(*o.shape, dtype=dtype), *qkv, o, lse, 0.2, causal)
    packed = draw(2, 130, 4 * 64, dtype=dtype)
    q, k, v = (
        packed[..., a * 64 : b * 64].reshape(2, 130, -1, 64) for a, b in ((0, 2), (2, 3), (3, 4))
    )
    flash_attention.flash_attention_fwd(q, k, v, 0.2)
    bounded(dtype, (64, 128))


def never_launched() -> list[str]:
    """-> the module-level kernels of xtrain/kernels that were not launched.

    Kernels that a function makes per tile size have no module-level name, and the naive ones are only for reading.
    """
    started = {key[0] for key in _launch._plans}
    missing = []
    for info in pkgutil.walk_packages(xtrain.kernels.__path__, "xtrain.kernels."):
        if info.name.endswith(("_code", "mlir_changes")):  # for one of the compilers only
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            is_kernel = name.endswith("_kernel") and hasattr(value, "py_func")
            if is_kernel and "naive" not in name and value not in started:
                missing.append(f"{info.name}.{name}")
    return missing


WORK = {
    "models": models,
    "tables": tables,
    "optimizer": optimizer,
    "fp8_codes": fp8_codes,
    "fp8_products": fp8_products,
    "serving": serving,
    "experts": experts,
    "kv_codes": kv_codes,
    "choosing": choosing,
    "rows": rows,
    "peers": peers,
    "heads": heads,
    "scores": scores,
    "flash": flash,
    "hopper": hopper,
}


def main(names: list[str]) -> int:
    cp.cuda.set_allocator(None)
    apart = "--apart" in names
    _launch.set_overlap(not apart)
    _launch.set_debug(apart)
    names = [name for name in names if name != "--apart"]
    for name in names or WORK:
        name, _, number = name.partition(":")
        each = [(d,) for d in DTYPES]
        if name in (
            "models",
            "experts",
            "optimizer",
            "fp8_codes",
            "fp8_products",
            "kv_codes",
            "scores",
        ):
            each = [(int(number),) if number else ()]
        for arguments in each:
            WORK[name](*arguments)
            cp.cuda.Device().synchronize()
            print(name, *arguments, f"{len(_launch._plans)} kernels launched", flush=True)
    missing = [] if names else never_launched()
    print("never launched:", ", ".join(missing) or "none", flush=True)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
