"""The kernels of a decoding step, alone and in sequence, for a Llama of 1.1 B parameters in bf16.

    python bench/bench_engine.py [--only gemv] [--configs]

gemv, decode_attention      a call in a CUDA graph with the cache flushed before it, as a share of a
                            copy that moves the same bytes; decode_attention also over a cache of
                            codes
context_attention           of a packed prefill, TFLOP/s: 4 H D operations per query and key that it
                            sees; compared with our attention of training on as many tokens in equal
                            sequences, if there is no history
sample                      microseconds for 1, 32 and 256 rows, of this vocabulary and of Qwen3's;
                            also penalties, masks and log-probabilities
step                        all layers as the engine launches them, in one CUDA graph replayed many
                            times: tokens/s, and the share of the memory bound, (weights + cache
                            read) / copy bandwidth

Shape: dim 2048, 22 layers, 32 heads of 64, 4 of k and v, hidden 5632, vocabulary 32000. Weights and
cache are random; the cache is paged, blocks of 64 tokens in random order.
"""

import functools
import itertools
import math
from dataclasses import dataclass, field

import cupy as cp
import numpy as np
import tyro
from _cases import DTYPES, converted, draw
from _timing import copy_bandwidth, copy_ms, graph_ms, record

from xtrain.kernels import rope
from xtrain.kernels.attention.context_attention import context_attention
from xtrain.kernels.attention.decode_attention import decode_attention
from xtrain.kernels.attention.flash_attention import flash_attention_fwd
from xtrain.kernels.decoding import gemv, gemv_tensor_cores, sampling
from xtrain.kernels.decoding.kv_codes import empty_kv_codes
from xtrain.kernels.decoding.logprobs import token_logprobs
from xtrain.kernels.decoding.penalties import (
    Penalties,
    PenaltyRules,
    apply_penalties,
    count_tokens,
)
from xtrain.kernels.decoding.token_masks import mask_logits, mask_words
from xtrain.kernels.gemm import linear_fwd
from xtrain.kernels.runtime.launch import set_overlap

C = 2048
L = 22
H = 32
G = 4
D = 64
F = 5632
V = 32000
P = (H + 2 * G) * D
S = 64  # tokens of a block of the KV cache
BF16 = DTYPES["bf16"]
EPS = 1e-5
MATRICES = {  # name -> rows, columns of w, and the options of the call
    "qkv": (P, C, dict(norm=True)),
    "o": (C, H * D, dict(residual=True)),
    "gate_up": (2 * F, C, dict(norm=True, swiglu=True)),
    "down": (C, F, dict(residual=True)),
    "head": (V, C, dict(norm=True, dtype=np.float32)),
}


def int32(x):
    return cp.asarray(np.asarray(x, np.int32))


# ----------------------------------------------------------------------------- one kernel
def product(name, N, w=None):
    """Return a call of gemv on random numbers, the bytes of its weights, (x, w)"""
    rows, columns, form = MATRICES[name]
    w = draw(BF16, rows, columns, scale=columns**-0.5) if w is None else w
    norm, swiglu = form.get("norm", False), form.get("swiglu", False)
    x = draw(np.float32 if norm else BF16, N, columns, seed=1)
    norm_w = draw(np.float32, columns, seed=2) if norm else None
    delta = draw(BF16, N, columns, seed=3)
    dtype = form.get("dtype")
    if norm:
        call = lambda: gemv.add_norm_gemv(x, delta, norm_w, w, EPS, swiglu, True, dtype)
    else:
        call = lambda: gemv.gemv(x, w, dtype, True)
    return call, w.nbytes, (x, w)


def bench_gemv(o):
    for name, N in itertools.product(MATRICES, o.rows):
        call, nbytes, (x, w) = product(name, N)
        ms = graph_ms(call, o.runs)
        copy = copy_ms(nbytes)
        half = converted(x, BF16)
        cublas = graph_ms(lambda: linear_fwd(half, w), o.runs)[0]  # noqa: B023
        record(
            "bench_engine",
            f"gemv_{name}",
            shape=f"N={N} {w.shape[0]}x{w.shape[1]}",
            dtype="bf16",
            ms=ms[0],
            value=nbytes / ms[0] / 1e6,
            unit="GB/s",
            peer="cuBLAS, product alone",
            peer_value=nbytes / float(cublas) / 1e6,
            share=round(copy / float(ms[0]), 3),
        )


def paged(count, B, tokens, layers=()):
    """Return `count` random caches (*layers, R, G, S, D) and block tables.

    R = B M blocks, (B, M) tables of up to `tokens` tokens.
    """
    M = -(-tokens // S)
    tables = int32(np.random.default_rng(0).permutation(B * M).reshape(B, M))
    return [
        draw(BF16, *layers, B * M, G, S, D, seed=i + 1, scale=0.5) for i in range(count)
    ], tables


def bench_attention(o):
    for B, context in o.shapes:
        args, nbytes = attention_inputs(B, context)
        ms = graph_ms(lambda: decode_attention(*args), o.runs)  # noqa: B023
        copy = copy_ms(nbytes)
        record(
            "bench_engine",
            "decode_attention",
            shape=f"B={B} context={context} H={H} G={G} D={D}",
            dtype="bf16",
            ms=ms[0],
            value=nbytes / ms[0] / 1e6,
            unit="GB/s",
            share=round(copy / float(ms[0]), 3),
        )
        bench_codes(o, args, B, context, nbytes / ms[0] / 1e6)


def bench_codes(o, args, B, context, full):
    """Measure the same attention over a cache of codes."""
    nbytes = 2 * B * G * context * (D + 4)
    bf16 = 4 * B * G * context * D
    args, scales = with_codes(args)
    call = lambda: decode_attention(*args, scales_RGS2=scales)
    ms = graph_ms(call, o.runs)
    copy = copy_ms(nbytes)
    record(
        "bench_engine",
        "decode_attention_fp8",
        shape=f"B={B} context={context} H={H} G={G} D={D}",
        dtype="fp8",
        ms=ms[0],
        value=bf16 / ms[0] / 1e6,
        unit="GB/s",
        share=round(copy / float(ms[0]), 3),
        peer="bf16",
        peer_value=full,
    )


def with_codes(args):
    """Return the arguments of decode_attention with random codes and scales for keys and values."""
    qkv, k, _, *rest = args
    (codes,), (scales,) = empty_kv_codes(qkv, 1, *k.shape)
    codes[...] = cp.random.randint(0, 127, codes.shape, np.uint8)
    scales[...] = cp.random.random(scales.shape, np.float32) / 448
    return (qkv, *codes, *rest), scales


def attention_inputs(B, context, kv=None, tables=None, angles=None):
    if kv is None:
        kv, tables = paged(2, B, context + 128)
    angles = angles or [cp.asarray(t) for t in rope.rope_tables(D, tables.shape[1] * S, 1e4)]
    qkv = draw(BF16, B, P)
    lengths = int32([context - 1] * B)
    return (qkv, *kv, lengths, tables, *angles, None, None, EPS, D**-0.5), 4 * B * G * context * D


def bench_context(o):
    for A, T, past in o.prompts:
        edges = int32(np.arange(A + 1) * T)
        history = int32([past] * A)
        q = draw(BF16, A * T, H, D)
        (k, v), tables = paged(2, A, past + T)
        places = (edges, history, tables, T)
        run = lambda: context_attention(q, k, v, *places, D**-0.5)  # noqa: B023
        ms = graph_ms(run, o.runs)[0]
        flops = 4 * H * D * A * T * (past + (T + 1) / 2)
        more = {}
        if not past:
            q_BTHD = q.reshape(A, T, H, D)
            k_BSGD, v_BSGD = (draw(BF16, A, T, G, D, seed=i) for i in (1, 2))
            train = lambda: flash_attention_fwd(q_BTHD, k_BSGD, v_BSGD, D**-0.5)  # noqa: B023
            more = dict(
                peer="attention of training", peer_value=flops / graph_ms(train, o.runs)[0] / 1e9
            )
        record(
            "bench_engine",
            "context_attention",
            shape=f"A={A} T={T} history={past} H={H} G={G} D={D}",
            dtype="bf16",
            ms=ms,
            value=flops / ms / 1e9,
            unit="TFLOP/s",
            **more,
        )


def sampling_inputs(B, temperature, top_k, top_p):
    full = lambda value, dtype: cp.full(B, value, dtype)
    return (
        cp.zeros(B, np.int32),
        full(temperature, np.float32),
        full(top_k, np.int32),
        full(top_p, np.float32),
        full(1, np.int64),
        cp.arange(B, dtype=np.int64),
        cp.zeros(B, np.int32),
    )


RULES = dict(  # temperature, top-k, top-p
    greedy=(0, 0, 1),
    top_50=(0.8, 50, 1),
    top_p=(1, 0, 0.9),
    all=(1, 0, 1),
    top_20_and_p=(0.6, 20, 0.95),
)


def sampling_calls(B, vocab):
    """Return (name, call) of what follows the logits of a step.

    Every row has the same rules, and 1000 tokens with penalties.
    """
    logits = draw(np.float32, B, vocab, scale=3.0)
    slots = cp.arange(B, dtype=np.int32)
    for name, rules in RULES.items():
        inputs = sampling_inputs(B, *rules)
        min_p = cp.zeros(B, np.float32)
        yield (
            f"sample_{name}",
            functools.partial(sampling.sample, logits, *inputs, min_p_B=min_p),
        )
    lists = Penalties.empty(logits, B, 1024, vocab)
    ids = cp.zeros(B, np.int32)
    for b in range(B):
        lists.set_slot(b, PenaltyRules(1.1, 0.1, 0.1), range(1000), ())

    def penalties():
        apply_penalties(logits, lists, slots, ids, vocab)
        count_tokens(lists, slots, ids)

    yield "penalties", penalties
    masks = cp.zeros((B, mask_words(vocab)), np.int32)  # nothing is allowed: the most writes
    yield "masks", functools.partial(mask_logits, logits, masks, slots, vocab)
    yield "logprobs_and_top_20", functools.partial(token_logprobs, logits, ids, 20)


def bench_sample(o):
    for B, vocab in itertools.product(o.batches, o.vocabularies):
        for name, call in sampling_calls(B, vocab):
            ms = graph_ms(call, o.runs)
            record(
                "bench_engine",
                name,
                shape=f"B={B} V={vocab}",
                dtype="fp32",
                ms=ms[0],
                value=1e3 * ms[0],
                unit="us",
            )


# ----------------------------------------------------------------------------- a whole step
class Step:
    """The kernels that the engine launches for one token of each of B <= 8 rows."""

    def __init__(self, B, context):
        self.weights = [{n: self.weight(n, i) for n in MATRICES if n != "head"} for i in range(L)]
        self.head = self.weight("head", L)
        self.norm_w = cp.ones(C, np.float32)
        self.h = draw(np.float32, B, C, scale=0.1)
        (kv,), tables = paged(1, B, context + 128, (L, 2))
        angles = [cp.asarray(t) for t in rope.rope_tables(D, tables.shape[1] * S, 1e4)]
        self.attention = [attention_inputs(B, context, x, tables, angles)[0][1:] for x in kv]
        self.sampling = sampling_inputs(B, 0, 0, 1)
        matrices = [w for layer in self.weights for w in layer.values()]
        self.nbytes = (
            sum(w.nbytes for w in matrices) + self.head.nbytes + L * 4 * B * G * context * D
        )

    def weight(self, name, seed):
        rows, columns, _ = MATRICES[name]
        return draw(BF16, rows, columns, seed=seed, scale=0.3 * columns**-0.5)

    def __call__(self):
        h = self.h
        delta = None
        product = functools.partial(gemv.gemv, weights_ready=True)
        normed = functools.partial(gemv.add_norm_gemv, weights_ready=True)
        for w, attention in zip(self.weights, self.attention):
            h, qkv = normed(h, delta, self.norm_w, w["qkv"], EPS)
            delta = product(decode_attention(qkv, *attention, cache_ready=True), w["o"])
            h, y = normed(h, delta, self.norm_w, w["gate_up"], EPS, True)
            delta = product(y, w["down"])
        _, logits = normed(h, delta, self.norm_w, self.head, EPS, dtype=np.float32)
        sampling.sample(logits, *self.sampling)


def replay_ms(f, replays=20):
    """Return milliseconds per replay of a CUDA graph of f, many replays back to back"""
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        for _ in range(2):
            f()
        stream.synchronize()
        stream.begin_capture()
        f()
        graph = stream.end_capture()
        times = []
        for _ in range(5):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            for _ in range(replays):
                graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, end) / replays)
    return float(np.median(times))


def bench_step(o):
    bandwidth = copy_bandwidth(1 << 30)
    for B, context in o.shapes:
        if B > gemv.MAX_ROWS:
            continue
        step = Step(B, context)
        for overlap in (True, False):
            set_overlap(overlap)
            ms = replay_ms(step)
            bound = step.nbytes / bandwidth * 1e3
            record(
                "bench_engine",
                "step" if overlap else "step_without_overlap",
                shape=f"B={B} context={context}",
                dtype="bf16",
                ms=ms,
                value=1e3 * B / ms,
                unit="tokens/s",
                share=round(bound / ms, 3),
                nbytes=step.nbytes,
                copy_gbs=round(bandwidth / 1e9, 1),
            )
        set_overlap(True)
        del step
        cp.get_default_memory_pool().free_all_blocks()


def bench_configs(o):
    """Try other divisions of the work; gemv_tensor_cores.choose should be the fastest."""
    choose = gemv_tensor_cores.choose
    for name in o.matrices:
        rows, columns, form = MATRICES[name]
        call, nbytes, _ = product(name, 1)
        lines = []
        for warps, chunks, blocks in itertools.product((8, 16), (1, 2, 4), (1, 2)):
            if warps * blocks > 32 or warps * chunks > 2 * columns // gemv_tensor_cores.CHUNK:
                continue
            config = gemv_tensor_cores.Config(warps, chunks, blocks)
            gemv.choose = lambda *_, config=config: config
            lines.append((float(graph_ms(call, o.runs)[0]), config))
        gemv.choose = choose
        fastest = sorted(lines, key=lambda line: line[0])[:8]
        best = ", ".join(f"{config} {1e3 * ms:.1f}" for ms, config in fastest)
        swiglu = form.get("swiglu", False)
        mine = choose(columns, rows // (1 + swiglu), swiglu, form.get("norm", False))
        now = next((1e3 * ms for ms, config in lines if config == mine), math.nan)
        print(
            f"{name}: chosen {mine} {now:.1f} us; {best}; copy {1e3 * copy_ms(nbytes):.1f}",
            flush=True,
        )


@dataclass
class Options:
    only: list[str] = field(default_factory=list)  # gemv attention context sample step; none: all
    rows: list[int] = field(default_factory=lambda: [1, 8])
    batches: list[int] = field(default_factory=lambda: [1, 32, 256])
    vocabularies: list[int] = field(default_factory=lambda: [V, 151936])  # the second is Qwen3's
    shapes: list[tuple[int, int]] = field(
        default_factory=lambda: [(1, 128), (1, 4096), (32, 128), (32, 4096)]
    )
    prompts: list[tuple[int, int, int]] = field(  # prompts, tokens of each, tokens in the cache
        default_factory=lambda: [(64, 128, 0), (8, 1024, 0), (2, 4096, 0), (8, 1024, 3072)]
    )
    matrices: list[str] = field(default_factory=lambda: list(MATRICES))
    configs: bool = False  # try other divisions of the work of gemv
    runs: int = 20


def main(o: Options) -> None:
    benches = dict(
        gemv=bench_gemv,
        attention=bench_attention,
        context=bench_context,
        sample=bench_sample,
        step=bench_step,
    )
    for name, bench in benches.items():
        if not o.only or name in o.only:
            bench(o)
    if o.configs:
        bench_configs(o)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
