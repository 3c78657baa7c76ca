"""Cases of bench_kernels.py: memory-bound kernels of serving.

bench_engine.py measures a whole decoding step.
"""

import cupy as cp
import numpy as np
from _cases import C, Case, D, H, N, Peer, case, double, draw, size
from _cases_fp8 import only_bf16

from xtrain import lesson
from xtrain.kernels.decoding import gemv, kv_cache, kv_codes
from xtrain.kernels.decoding.padding import token_positions
from xtrain.kernels.primitives.codes import code_values
from xtrain.kernels.runtime.launch import launch

# packed sequences of a prefill, key heads, tokens of a block of the cache
A = 64
G = 4
S = 64
LENGTHS = np.random.default_rng(0).integers(64, 2 * N // A - 64, A)
T, TOKENS = int(LENGTHS.max()), int(LENGTHS.sum())
SHAPE = f"A={A} T={T} N={TOKENS} H={H} D={D}"
padding, repeat = lesson.load_checks("padding"), lesson.load_checks("repeat_kv")


def packed_tokens():
    """Return edges, blocks, offsets, positions on the GPU; blocks of S tokens in random order"""
    edges = padding.cumulative_lengths(cp.asarray(LENGTHS, np.int32))
    history = cp.full(A, 5, np.int32)
    M = -(-(T + 8) // S)
    tables = cp.asarray(np.random.default_rng(1).permutation(A * M).reshape(A, M).astype(np.int32))
    return edges, *token_positions(edges, TOKENS, history, tables, S)


@case
def append_kv(dtype):
    _, blocks, offsets, _ = packed_tokens()
    k = draw(dtype, TOKENS, G, D)
    v = draw(dtype, TOKENS, G, D, seed=1)
    caches = [cp.zeros((A * -(-(T + 8) // S), G, S, D), dtype) for _ in range(2)]

    def want():
        new = [cp.zeros(c.shape) for c in caches]
        for cache, x in zip(new, (k, v)):
            cache.swapaxes(1, 2)[blocks, offsets] = double(x)
        return tuple(new)

    naive = lambda: launch(
        kv_cache.append_kv_naive_kernel, (TOKENS, G), kv_cache.BLOCK, *caches, k, v, blocks, offsets
    )
    return Case(
        2 * size(k, v),
        lambda: kv_cache.append_kv(*caches, k, v, blocks, offsets),
        got=lambda: (kv_cache.append_kv(*caches, k, v, blocks, offsets), *caches)[1:],
        want=want,
        naive=naive if dtype == np.float32 else None,
        shape=SHAPE,
    )


@case
def append_codes(dtype):
    only_bf16(dtype)
    _, blocks, offsets, _ = packed_tokens()
    k = draw(dtype, TOKENS, G, D)
    v = draw(dtype, TOKENS, G, D, seed=1)
    (codes,), (scales,) = kv_codes.empty_kv_codes(k, 1, A * -(-(T + 8) // S), G, S, D)

    def read():
        kv_codes.append_codes(*codes, scales, k, v, blocks, offsets)
        outs = [cp.zeros(codes[0].shape, np.float32) for _ in range(2)]
        kv_codes.dequantize_blocks(*codes, scales, cp.arange(len(outs[0]), dtype=np.int32), *outs)
        return tuple(outs)

    def want():
        new = [cp.zeros(codes[0].shape) for _ in range(2)]
        for cache, x in zip(new, (k, v)):
            s = cp.maximum(abs(double(x)).max(-1, keepdims=True) / 448, 2.0**-126)
            step = 2.0 ** cp.maximum(
                cp.floor(cp.log2(cp.maximum(abs(double(x)) / s, 2.0**-9))) - 3, -9
            )
            cache.swapaxes(1, 2)[blocks, offsets] = cp.rint(double(x) / s / step) * step * s
        return tuple(new)

    return Case(
        size(k, v) + TOKENS * G * 2 * (D + 4),
        lambda: kv_codes.append_codes(*codes, scales, k, v, blocks, offsets),
        got=read,
        want=want,
        shape=SHAPE,
    )


@case
def dequantize_blocks(dtype):
    only_bf16(dtype)
    R = 1024
    (codes,), (scales,) = kv_codes.empty_kv_codes(cp.empty(0), 1, R, G, S, D)
    codes[...] = cp.random.randint(0, 127, codes.shape, np.uint8)
    scales[...] = cp.random.random(scales.shape, np.float32)
    outs = [cp.zeros(codes[0].shape, dtype) for _ in range(2)]
    blocks = cp.asarray(np.random.default_rng(1).permutation(R).astype(np.int32))
    run = lambda: kv_codes.dequantize_blocks(*codes, scales, blocks, *outs)
    want = lambda: tuple(
        cp.asarray(code_values(cp.asnumpy(c)).astype(np.float64)) * scales[..., i, None]
        for i, c in enumerate(codes)
    )
    nbytes = codes.nbytes + scales.nbytes + 2 * outs[0].nbytes
    return Case(
        nbytes, run, got=lambda: (run(), *outs)[1:], want=want, shape=f"R={R} G={G} S={S} D={D}"
    )


@case
def repeat_kv(dtype):
    x = draw(dtype, 8, G, 2048, D)
    return Case(
        9 * x.nbytes,
        lambda: repeat.repeat_kv(x, 8),
        want=lambda: cp.repeat(double(x), 8, axis=1),
        peer=Peer(lambda x: x.repeat_interleave(8, 1), (x,)),
        shape="R=8 G=4 S=2048 D=64, 8 times",
    )


@case
def remove_padding_heads(dtype):
    edges = packed_tokens()[0]
    x = draw(dtype, A, H, T, D)
    want = lambda: cp.concatenate(
        [double(x[a])[:, :n].swapaxes(0, 1) for a, n in enumerate(LENGTHS)]
    )
    return Case(
        2 * TOKENS * H * D * dtype.itemsize,
        lambda: padding.remove_padding_heads(x, edges, TOKENS),
        want=want,
        shape=SHAPE,
    )


@case
def restore_padding_heads(dtype):
    edges = packed_tokens()[0]
    x = draw(dtype, TOKENS, H, D)

    def want():
        y = cp.zeros((A, H, T, D))
        first = 0
        for a, n in enumerate(LENGTHS):
            y[a, :, :n] = double(x[first : first + n]).swapaxes(0, 1)
            first += n
        return y

    return Case(
        x.nbytes + A * H * T * D * dtype.itemsize,
        lambda: padding.restore_padding_heads(x, edges, T),
        want=want,
        shape=SHAPE,
    )


@case
def gemv_norm_swiglu(dtype):
    F = 5632
    x = draw(np.float32, 1, C)
    w = draw(dtype, 2 * F, C, seed=1, scale=0.05)
    norm_w = cp.ones(C, np.float32)

    def want():
        normed = double(x) / cp.sqrt(cp.mean(double(x) ** 2) + 1e-6)
        gate, up = cp.split(normed @ double(w).T, 2, axis=1)
        return gate / (1 + cp.exp(-gate)) * up

    return Case(
        w.nbytes,
        lambda: gemv.add_norm_gemv(x, None, norm_w, w, 1e-6, True)[1],
        want=want,
        shape=f"N=1 K={C} F={F}",
    )
