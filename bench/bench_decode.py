"""Serving speed: time to the first token, and tokens per second while decoding.

    python bench/bench_decode.py [--batch 1 32] [--context 128 4096] [--new 64]
                                 [--weights full int8 fp8 int4 nf4] [--peers plain compile]
                                 [--kv-cache full fp8] [--profile]
                                 [--model 1.1B 8B 0.6B 135M 16x0.1B G1B G4B]

A Llama of 1.1 B parameters (dim 2048, 22 layers, 32 heads of 64, 4 key heads, hidden 5632,
vocabulary 32000), bf16, random weights created on the device. `batch` prompts of `context` random
tokens are submitted at once; every sequence gets `new` greedy tokens.

    first token    from submitting the prompts to having all of their first tokens on the host
    decoding       tokens per second from then on, by the host's clock, everything included
    bound          batch / ((bytes of weights + bytes of keys and values that a step reads) / copy
                   bandwidth): a step reads every weight once (except the embedding's rows) and all
                   keys and values so far, on average those of context + new / 2 tokens; the
                   bandwidth is that of a device-to-device copy of 1 GB, read plus written

--model 8B, 0.6B and 135M: the shapes of Qwen3-8B, Qwen3-0.6B and SmolLM2-135M. G1B, G4B: those of
Gemma 3 1B and 4B, whose heads have 256 channels; the bound counts all keys in every layer. 16x0.1B: a mixture of
experts; the bytes are those of the experts that a step reads, on average if every choice is equally
likely.

--kv-cache fp8: keys and values in codes. The speed of `full` in the same run, with the same
weights, is the one to compare with. These records are in bench/results/bench_kv_codes.jsonl.

--weights int8, fp8, int4 and nf4: the matrices of the layers, also of experts, in codes. The model is then another
one of the same shape, and `bytes of weights` are those of its codes and scales; the speed of `full`
in the same run is the one to compare with.

The peer: the same weights in transformers' LlamaForCausalLM, bf16, SDPA: `plain` as generate() runs
it by default, and `compile` with a static cache, where generate() decodes through torch.compile.
Each step is timed to its end.
"""

import gc
import itertools
import time
from dataclasses import dataclass, field
from typing import Literal

import cupy as cp
import numpy as np
import tyro
from _shapes import GEMMA3_1B, GEMMA3_4B, MIXTURE, QWEN3_06B, QWEN3_8B, SMOLLM2, TINYLLAMA
from _timing import copy_bandwidth, gpu_ms, record

import xtrain
from xtrain.device import memory_peak_bytes
from xtrain.formats.huggingface import config_to_hf
from xtrain.inspect.kernel_times import NoTimes, cupti_times
from xtrain.kernels.cast import cast_fwd
from xtrain.nn.quantized import quantize_weights
from xtrain.serving.scheduler import graph_size

NAME = "llama 1.1B"
SHAPES = {
    "1.1B": (NAME, TINYLLAMA | {"max_seq_len": 8192}),
    "8B": ("Qwen3-8B", QWEN3_8B | {"max_seq_len": 20480}),
    "0.6B": ("Qwen3-0.6B", QWEN3_06B | {"max_seq_len": 8192}),
    "135M": ("SmolLM2-135M", SMOLLM2 | {"max_seq_len": 8192}),
    "G1B": ("Gemma-3-1B", GEMMA3_1B | {"max_seq_len": 8192}),
    "G4B": ("Gemma-3-4B", GEMMA3_4B | {"max_seq_len": 8192}),
    "16x0.1B": ("16 x 0.1 B", MIXTURE | {"max_seq_len": 8192}),
}


@dataclass
class Options:
    batch: list[int] = field(default_factory=lambda: [1, 32])
    context: list[int] = field(default_factory=lambda: [128, 4096])
    new: int = 64  # tokens per sequence
    peers: list[Literal["plain", "compile"]] = field(default_factory=list)
    # of the matrices; peers are measured with "full" alone
    weights: list[Literal["full", "int8", "fp8", "int4", "nf4"]] = field(
        default_factory=lambda: ["full"]
    )
    # of keys and values; peers are measured with "full" alone
    kv_cache: list[Literal["full", "fp8"]] = field(default_factory=lambda: ["full"])
    profile: bool = False  # print which kernels a decoding step consists of
    layers: int | None = None  # fewer than the model has: for a quick look
    model: list[Literal["1.1B", "8B", "0.6B", "135M", "16x0.1B", "G1B", "G4B"]] = field(
        default_factory=lambda: ["1.1B"]
    )


# ----------------------------------------------------------------------------- ours
def random_model(o: Options, size: str = "1.1B") -> xtrain.Transformer:
    shape = SHAPES[size][1]
    config = xtrain.ModelConfig(**(shape | {"n_layers": o.layers or shape["n_layers"]}))
    model = xtrain.Transformer(config, None, "gpu", "bf16", trainable=False)
    cp.random.seed(0)
    for _, p in model.named_parameters():
        if p.ndim == 1:
            p.data.fill(1)
        else:
            p.data = cast_fwd(cp.random.standard_normal(p.shape, dtype=cp.float32) * 0.02, p.dtype)
    return model


def ours(model, prompts, new, kv_cache="full"):
    """Return engine, seconds to the first tokens, milliseconds per decoding step, and tokens.

    By the wall clock. Prompts of more tokens than one pass may have are prefilled while the first
    sequences decode:
    only the steps that decode all sequences count.
    """
    B = len(prompts)
    T = len(prompts[0])
    options = dict(reuse_prefix=False, kv_cache=kv_cache)
    engine = xtrain.Engine(model, B, T + new, **options)
    first = None
    engine.generate(prompts, new)  # compiles the kernels, captures the graph, wakes the clocks
    engine.trace.clear()
    start = time.perf_counter()
    stream = engine.stream(prompts, new)
    for _ in stream:
        if first is None and all(stream.completions):
            first = time.perf_counter() - start
    steps = [s.seconds for s in engine.trace if len(s.decoded) == B and not s.prefilled]
    return engine, first, float(np.mean(steps[1:])) * 1e3, stream.completions


def step_ms(engine, B, T):
    """Return milliseconds of GPU time of a decoding step alone, and the step.

    It is the graph, replayed with T tokens in every slot.
    """
    batch = engine.runner.batch
    batch.clear()
    batch.host["lengths"][:B] = T
    batch.host["temperature"][:B] = 0
    each = batch.host_tables.shape[1]
    batch.host_tables[:B] = np.arange(B * each).reshape(B, each)  # each sequence in its own blocks

    variant = (engine.runner.decode, graph_size(B, engine.max_batch), False, False, False)

    def step():
        batch.upload()  # back to length T
        engine.runner.graphed(variant=variant)

    step()
    return gpu_ms(step, runs=20, flush=False)[0], step


def profile(step):
    """Print the kernels of a step, how often and how long they run, and the idle time."""
    try:
        times = cupti_times(lambda: [step() for _ in range(5)])
    except NoTimes as error:
        return print(f"  no profile: {error}")
    table = {}
    for t in times:
        calls, ns = table.get(t.name, (0, 0))
        table[t.name] = calls + 1, ns + t.end - t.start
    for name, (calls, ns) in sorted(table.items(), key=lambda item: -item[1][1])[:14]:
        print(f"  {name:48} {calls / 5:6.0f} x {ns / calls / 1e3:8.2f} us = {ns / 5e3:9.1f} us")
    busy = sum(ns for _, ns in table.values()) / 5e3
    total = (times[-1].end - times[0].start) / 5e3
    print(f"  kernels {busy:.1f} us a step, from first to last {total:.1f} us", flush=True)


def step_bytes(model, B, T, new, kv_cache="full"):
    """Return the bytes of weights, and of keys and values."""
    c = model.config
    head_bytes = 2 * c.head_dim if kv_cache == "full" else c.head_dim + 4
    table = 0
    if not c.tie_embeddings:
        table = model.model.embed_tokens.weight.data.nbytes
    codes = sum(p.quantized.nbytes for _, p in model.storage() if p.quantized is not None)
    weights = model.arena.half.nbytes + codes - table
    if c.n_experts:
        idle = (1 - c.experts_per_token / c.n_experts) ** B  # probability that none reads an expert
        experts = (p for _, p in model.storage() if "experts." in next(iter(p.parts)))
        weights -= round(idle * sum(p.value.nbytes for p in experts))
    return weights, 2 * c.n_layers * c.n_kv_heads * head_bytes * B * (T + new / 2)


# ----------------------------------------------------------------------------- transformers
def their_model(model):
    """Return a model of transformers that shares the weights' memory."""
    import torch
    import transformers
    from torch_model import as_torch

    config = transformers.LlamaConfig(**config_to_hf(model.config))
    config.attn_implementation = "sdpa"
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    state = {}
    for name, p in model.named_parameters():
        state[name] = as_torch(p.data).bfloat16()
    theirs.load_state_dict(state, assign=True)
    rotary = type(theirs.model.rotary_emb)(config=config).to("cuda")
    theirs.model.rotary_emb = rotary
    return theirs.eval()


def their_times(theirs, prompts, new, static):
    """Return seconds to the first tokens, median milliseconds per decoding step, new tokens."""
    import torch
    import transformers

    times = []
    ids = torch.tensor(prompts, device="cuda")

    class Clock(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    options = dict(
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[Clock()],
        **({"cache_implementation": "static"} if static else {}),
    )
    for _ in range(2 if static else 1):  # the first runs compile and capture
        theirs.generate(ids, **options)
    times.clear()
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = theirs.generate(ids, **options)
    return times[0] - start, float(np.median(np.diff(times))) * 1e3, out[:, ids.shape[1] :].tolist()


# ----------------------------------------------------------------------------- all of it
def bench(
    model,
    theirs,
    B,
    T,
    o,
    bandwidth,
    kind="full",
    full=None,
    size="1.1B",
    kv_cache="full",
):
    """Measure and record; return tokens per second.

    full: those of the same run with weights, or keys and values, in bf16.
    """
    prompts = np.random.default_rng(B + T).integers(0, model.config.vocab_size, (B, T)).tolist()
    engine, first, ms, tokens = ours(model, prompts, o.new, kv_cache)
    gpu, step = step_ms(engine, B, T + o.new // 2)
    weights, kv = step_bytes(model, B, T, o.new, kv_cache)
    bound = (weights + kv) / bandwidth * 1e3
    print(
        f"{size}, weights {kind}, cache {kv_cache}, B={B} context={T}: {B / ms * 1e3:,.0f} tok/s, "
        f"{bound / ms:.1%} of the bound ({bound:.3f} ms); step {ms:.3f} ms, of "
        f"which GPU {gpu:.3f} ({bound / gpu:.1%}); first token {first * 1e3:.1f} ms; "
        f"cache {engine.cache_bytes / 1e9:.2f} GB",
        flush=True,
    )
    if o.profile:
        profile(step)
    fields = dict(
        bound=round(B / bound * 1e3, 1),
        share_of_bound=round(bound / ms, 4),
        gpu_ms=round(float(gpu), 4),
        first_token_ms=round(first * 1e3, 2),
        new=o.new,
        copy_gb_s=round(bandwidth / 1e9),
        weights_gb=round(weights / 1e9, 3),
        kv_gb=round(kv / 1e9, 3),
        peak_gb=round(memory_peak_bytes("gpu") / 1e9, 2),
    )
    del engine, step
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    name = SHAPES[size][0]
    layers = SHAPES[size][1]["n_layers"]
    if o.layers not in (None, layers):
        name = f"{name}, {o.layers} of {layers} layers"
    shape = f"B={B} context={T}"
    speeds = dict(ms=ms, value=B / ms * 1e3, unit="tok/s")
    plain = kind == kv_cache == "full"
    dtype = "bf16" if kind == "full" else kind
    peers = o.peers if plain else []
    peer_fields = [measure_peer(theirs, peer, prompts, o.new, tokens) for peer in peers]
    if kind != "full" and full:
        peer_fields = [dict(peer="bf16 weights", peer_value=full)]
    if kv_cache != "full":
        dtype = f"{dtype}, cache {kv_cache}"
        peer_fields = []
        if full:
            peer_fields = [dict(peer="keys and values in bf16", peer_value=full)]
    file = "bench_decode" if kv_cache == "full" else "bench_kv_codes"
    for peer in [p for p in peer_fields if p] or [{}]:
        record(file, name, shape=shape, dtype=dtype, **speeds, **fields, **peer)
    return speeds["value"]


def measure_peer(theirs, peer, prompts, new, tokens):
    """Return a record's fields about a peer.

    None if it fails, so that the other peers are still measured.
    """
    try:
        first, ms, their_tokens = their_times(theirs, prompts, new, peer == "compile")
    except Exception as error:
        reason = f"{type(error).__name__} {str(error)[:300]}"
        return print(f"  transformers {peer}: {reason}", flush=True)
    same = np.mean([a[0] == b[0] for a, b in zip(tokens, their_tokens)])
    return dict(
        peer=f"transformers {peer}",
        peer_value=len(prompts) / ms * 1e3,
        peer_ms=round(ms, 3),
        peer_first_token_ms=round(first * 1e3, 2),
        same_first_tokens=round(float(same), 3),
    )


def main(o: Options) -> None:
    bandwidth = copy_bandwidth(1 << 30)
    print(f"copy {bandwidth / 1e9:,.0f} GB/s", flush=True)
    full: dict[tuple, float] = {}
    for size in o.model:
        for kind in o.weights:
            bench_model(o, size, kind, bandwidth, full)


def bench_model(o, size, kind, bandwidth, full) -> None:
    """Measure all batches and contexts of one model."""
    model = random_model(o, size)
    theirs = None
    if o.peers and kind == "full" and size == "1.1B":
        theirs = their_model(model)
    quantize_weights(model, kind)
    for T, B in itertools.product(o.context, o.batch):
        values: dict[str, float] = {}
        for cache in o.kv_cache:
            first = full.get((size, B, T)) if cache == "full" else values.get("full")
            values[cache] = bench(model, theirs, B, T, o, bandwidth, kind, first, size, cache)
        if kind == "full" and "full" in values:
            full[size, B, T] = values["full"]
    del model, theirs
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
