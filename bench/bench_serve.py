"""Serving many requests: tokens per second, prefill, waiting for a long prompt, the first prompt.

    python bench/bench_serve.py [--only requests prefill gap first] [--peers] [--models 0.6B 8B]
    python bench/bench_serve.py --only requests --batch-invariant    what the mode costs

first      a new process makes an engine of 256 slots and serves a prompt of 100 tokens, and then a
           second one. cold: the cache of machine code is empty when it starts; warm: it is not.
           value: milliseconds from the first prompt to its first token; peer: the second prompt
requests   256 requests at once, prompts and answers of 100 to 1024 random tokens each (the
           benchmark that small inference engines publish), temperature 0.6, no stop tokens; also
           with 30 GB for the KV cache. value: output tokens per second of the second run, which
           compiles nothing.
           bound: the bytes of keys and values that decoding reads, and of weights in every step, at
           copy bandwidth; also at the nominal peak of an H200
           --peers: the first 64 of these requests by continuous batching of transformers, after 4
           short ones, and by xtrain
prefill    one prompt, from submitting it to its first token on the host, warm. value: milliseconds.
           share_of_gemm: of the measured peak of a bf16 GEMM; mfu: of the nominal peak of an H200.
           Operations: 2 per parameter (without the embedding) and token, plus 4 H D per key and
           query of attention, and the head once
           --peers: transformers with SDPA, with the same weights
gap        16 sequences decode; a prompt of 30,000 tokens is submitted. value: the longest time
           between two tokens of a running sequence until the prompt has its first token, in
           milliseconds

Random weights, bf16. Models: the shapes of Qwen3-0.6B and Qwen3-8B.
"""

import gc
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Literal

import cupy as cp
import numpy as np
import tyro
from _shapes import QWEN3_06B, QWEN3_8B
from _timing import copy_bandwidth, record

import xtrain
from xtrain.device import free_cached
from xtrain.kernels.cast import cast_fwd
from xtrain.kernels.gemm import matmul

MODELS = {
    name: shape | {"max_seq_len": 32768}
    for name, shape in {"0.6B": QWEN3_06B, "8B": QWEN3_8B}.items()
}


# nominal, per second: bf16 products, memory
H200_FLOPS = 989e12
H200_BYTES = 4.8e12
PEER_REQUESTS = 64  # continuous batching of transformers is slow
PARTS = ["first", "requests", "prefill", "gap"]


@dataclass
class Options:
    only: list[Literal["first", "requests", "prefill", "gap"]] = field(
        default_factory=lambda: list(PARTS)
    )
    models: list[Literal["0.6B", "8B"]] = field(default_factory=lambda: ["0.6B"])
    peers: bool = False  # also measure transformers
    n: int = 256  # requests
    batch_invariant: bool = False  # of the engines; the records are named "batch-invariant ..."
    layers: int | None = None  # fewer: for a quick look
    start_only: bool = False  # what the part "first" starts: one new process

    @property
    def kind(self) -> str:
        return "batch-invariant " if self.batch_invariant else ""


def make_engine(o: Options, model, max_batch: int, max_seq_len: int, cache_bytes=None):
    return xtrain.Engine(
        model,
        max_batch,
        max_seq_len,
        o.batch_invariant,
        reuse_prefix=False,
        cache_bytes=cache_bytes,
    )


def random_model(o: Options, name: str) -> xtrain.Transformer:
    shape = MODELS[name] | ({} if o.layers is None else {"n_layers": o.layers})
    model = xtrain.Transformer(xtrain.ModelConfig(**shape), None, "gpu", "bf16", trainable=False)
    cp.random.seed(0)
    for _, p in model.named_parameters():
        if p.ndim == 1:
            p.data.fill(1)
        else:
            values = cp.random.standard_normal(p.shape, dtype=cp.float32)
            values *= 0.02
            p.data = cast_fwd(values, p.dtype)
    free_cached("gpu")
    return model


def gemm_peak() -> float:
    """Return FLOP/s of a bf16 product of 4096 x 4096 x 4096"""
    a, b, c = (
        cast_fwd(cp.random.standard_normal((4096, 4096), dtype=cp.float32), "bfloat16")
        for _ in range(3)
    )
    start, end = cp.cuda.Event(), cp.cuda.Event()
    times = []
    for _ in range(30):
        start.record()
        matmul(c, a, b)
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end) / 1e3)
    return 2 * 4096**3 / float(np.median(times))


# ----------------------------------------------------------------------------- requests
def workload(n: int, vocab: int):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, k).tolist() for k in rng.integers(100, 1025, n)]
    return prompts, rng.integers(100, 1025, n).tolist()


def bench_requests(o, name, model, bandwidth):
    prompts, answers = workload(o.n, model.config.vocab_size)
    c = model.config
    per_token = 4 * c.n_layers * c.n_kv_heads * c.head_dim
    kv = sum(per_token * (len(p) * n + n * n / 2) for p, n in zip(prompts, answers))
    steps = max(answers)
    bound = (kv + steps * model.arena.half.nbytes) / bandwidth
    for cache_bytes in (None, 30 * 10**9):
        engine = make_engine(o, model, o.n, 2048, cache_bytes)
        for _ in range(2):
            engine.trace.clear()
            start = time.perf_counter()
            out = engine.generate(prompts, answers, temperature=0.6, seed=1)
            seconds = time.perf_counter() - start
        assert [len(x) for x in out] == answers
        speed = sum(answers) / seconds
        preempted = sum(len(s.preempted) for s in engine.trace)
        print(
            f"{name}: {o.n} requests, cache {engine.cache_bytes / 1e9:.1f} GB: "
            f"{speed:,.0f} output tokens/s in {seconds:.2f} s, "
            f"{bound / seconds:.1%} of the bound ({bound:.2f} s); "
            f"{len(engine.trace)} steps, {preempted} preempted",
            flush=True,
        )
        record(
            "bench_serve",
            f"{o.kind}requests {name}",
            shape=f"n={o.n} cache={engine.cache_bytes / 1e9:.0f}GB",
            dtype="bf16",
            ms=seconds * 1e3,
            value=speed,
            unit="tok/s",
            share_of_bound=round(bound / seconds, 4),
            preempted=preempted,
            copy_gb_s=round(bandwidth / 1e9),
            share_of_nominal=round(bound * bandwidth / H200_BYTES / seconds, 4),
        )
        del engine
        gc.collect()
        free_cached("gpu")
    if o.peers:
        compare_requests(o, name, model, prompts[:PEER_REQUESTS], answers[:PEER_REQUESTS])


def compare_requests(o, name, model, prompts, answers):
    """Some of the requests by transformers and by xtrain."""
    theirs = their_model(model)
    their_requests(theirs, [p[:100] for p in prompts[:4]], [8] * 4)  # whatever it compiles
    seconds = their_requests(theirs, prompts, answers)
    del theirs
    gc.collect()
    free_torch()
    engine = make_engine(o, model, len(prompts), 2048)
    for _ in range(2):
        start = time.perf_counter()
        engine.generate(prompts, answers, temperature=0.6, seed=1)
        ours = time.perf_counter() - start
    record(
        "bench_serve",
        f"{o.kind}requests {name}",
        shape=f"n={len(prompts)}",
        dtype="bf16",
        ms=ours * 1e3,
        value=sum(answers) / ours,
        unit="tok/s",
        peer="transformers, continuous batching",
        peer_value=sum(answers) / seconds,
    )
    del engine
    gc.collect()
    free_cached("gpu")


def their_requests(theirs, prompts, answers):
    """Return seconds that transformers takes for the requests"""
    import transformers

    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_k=0,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=max(answers),
    )
    opened = theirs.continuous_batching_context_manager(
        generation_config=config, block=True, timeout=5
    )
    with opened as manager:
        start = time.perf_counter()
        lengths = []
        for prompt, n in zip(prompts, answers):
            manager.add_request(prompt, max_new_tokens=n)
        while len(lengths) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                lengths.append(len(result.generated_tokens))
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching of transformers has stopped")
        seconds = time.perf_counter() - start
    assert sorted(lengths) == sorted(answers), "transformers ended a request early"
    return seconds


def free_torch():
    import torch

    torch.cuda.empty_cache()


# ----------------------------------------------------------------------------- prefill
def bench_prefill(o, name, model, peak):
    c = model.config
    theirs = their_model(model) if o.peers else None
    engine = make_engine(o, model, 1, 32768)
    for T in (2048, 16384, 30000):
        prompt = np.random.default_rng(T).integers(0, c.vocab_size, T).tolist()
        times = []
        for _ in range(4):
            start = time.perf_counter()
            engine.generate([prompt], 1)
            times.append(time.perf_counter() - start)
        seconds = float(np.median(times[1:]))
        parameters = model.arena.n_decay - c.padded_vocab_size * c.dim * (
            1 if c.tie_embeddings else 2
        )
        head = 2 * c.padded_vocab_size * c.dim  # of one token
        flops = 2 * parameters * T + head + 4 * c.n_layers * c.n_heads * c.head_dim * T * T / 2
        peer = {}
        if theirs is not None:
            peer = dict(peer="transformers sdpa", peer_value=their_prefill(theirs, prompt))
        print(
            f"{name}: prefill of {T}: {seconds * 1e3:.1f} ms, "
            f"{flops / seconds / peak:.1%} of {peak / 1e12:.0f} TFLOP/s {peer}",
            flush=True,
        )
        record(
            "bench_serve",
            f"{o.kind}prefill {name}",
            shape=f"T={T}",
            dtype="bf16",
            ms=seconds * 1e3,
            value=seconds * 1e3,
            unit="ms",
            share_of_gemm=round(flops / seconds / peak, 4),
            mfu=round(flops / seconds / H200_FLOPS, 4),
            **peer,
        )
    if theirs is not None:
        del theirs
        gc.collect()
        free_torch()


def their_model(model):
    """Return a model of transformers that shares the weights' memory"""
    import torch
    import transformers

    from xtrain.formats.huggingface import config_to_hf

    config = transformers.Qwen3Config(**config_to_hf(model.config))
    config.attn_implementation = "sdpa"
    with torch.device("meta"):
        theirs = transformers.Qwen3ForCausalLM(config)
    state = {}
    for name, p in model.named_parameters():
        half = p.dtype.itemsize == 2
        tensor = torch.from_dlpack(p.data.view(cp.int16) if half else p.data)
        state[name] = tensor.view(torch.bfloat16) if half else tensor.bfloat16()
    theirs.load_state_dict(state, assign=True, strict=False)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config=config).to("cuda")
    return theirs.eval()


def their_prefill(theirs, prompt):
    """Return milliseconds to the first token, warm"""
    import torch

    ids = torch.tensor([prompt], device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(float(np.median(times[1:])) * 1e3, 2)


# ----------------------------------------------------------------------------- gap
def bench_gap(o, name, model):
    engine = make_engine(o, model, 17, 32768)
    rng = np.random.default_rng(1)
    short = rng.integers(0, model.config.vocab_size, (16, 100)).tolist()
    long = rng.integers(0, model.config.vocab_size, 30000).tolist()
    worst = 0.0
    for _ in range(2):  # the first run compiles
        running = engine.stream(short, 4000)
        for _ in range(16 * 20):
            next(running)
        other = engine.stream([long], 2)
        start = time.perf_counter()
        gaps = []
        last = None
        requests = other.requests
        engine.submit(requests[0])
        while not requests[0].completion:
            before = sum(map(len, running.completions))
            engine.step()
            now = time.perf_counter()
            if sum(map(len, running.completions)) > before:
                gaps += [] if last is None else [now - last]
                last = now
        total = time.perf_counter() - start
        worst = max(gaps)
        running.close(), other.close()
    typical = float(np.median(gaps))
    print(
        f"{name}: longest gap {worst * 1e3:.1f} ms (median {typical * 1e3:.1f}) "
        f"while 30000 tokens are admitted in {total:.2f} s",
        flush=True,
    )
    record(
        "bench_serve",
        f"{o.kind}gap {name}",
        shape="16 sequences, a prompt of 30000",
        dtype="bf16",
        ms=worst * 1e3,
        value=worst * 1e3,
        unit="ms",
        median_ms=round(typical * 1e3, 2),
        admitted_s=round(total, 3),
    )


# -------------------------------------------------------------------- the first prompt of a process
def bench_first(o, name):
    with tempfile.TemporaryDirectory() as folder:
        for state in ("cold", "warm"):
            # Only the two caches of machine code are in the folder.
            environment = os.environ | {"XTRAIN_CACHE": folder, "CUPY_CACHE_DIR": folder + "/cupy"}
            layers = [] if o.layers is None else ["--layers", str(o.layers)]
            command = [sys.executable, __file__, "--start-only", "--models", name, *layers]
            out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            *times, ready = out.stdout.decode().splitlines()[-1].split("\t")
            first, second, start = map(float, times)
            print(f"{name}, {state}: engine {start:.2f} s ({ready})", flush=True)
            record(
                "bench_serve",
                f"first prompt {name}",
                shape=f"{state}, 100 tokens",
                dtype="bf16",
                ms=first,
                value=first,
                unit="ms",
                peer="second prompt",
                peer_value=second,
                engine_s=round(start, 2),
                ready=ready,
            )


def start_once(o):
    """Run as a new process: print how long the first prompts take.

    Milliseconds to the first token of two prompts, seconds to make the engine, its line.
    """
    model = random_model(o, o.models[0])
    cp.cuda.Device().synchronize()
    start = time.perf_counter()
    engine = xtrain.Engine(model, 256, 2048, warm_up=True)
    seconds = time.perf_counter() - start
    times = []
    for seed in (1, 2):
        prompt = np.random.default_rng(seed).integers(0, model.config.vocab_size, 100).tolist()
        start = time.perf_counter()
        next(engine.stream([prompt], 20, temperature=0.6))
        times.append((time.perf_counter() - start) * 1e3)
    print(*times, seconds, engine.ready, sep="\t")


def main(o: Options) -> None:
    if o.start_only:
        return start_once(o)
    if "first" in o.only:
        for name in o.models:
            bench_first(o, name)
        if o.only == ["first"]:
            return None
    bandwidth = copy_bandwidth(1 << 30)
    peak = gemm_peak()
    print(f"copy {bandwidth / 1e9:,.0f} GB/s, GEMM {peak / 1e12:.0f} TFLOP/s", flush=True)
    for name in o.models:
        model = random_model(o, name)
        if "requests" in o.only:
            bench_requests(o, name, model, bandwidth)
        if "prefill" in o.only:
            bench_prefill(o, name, model, peak)
        if "gap" in o.only:
            bench_gap(o, name, model)
        del model
        gc.collect()
        free_cached("gpu")
    return None


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
