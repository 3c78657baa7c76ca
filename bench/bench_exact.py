"""What the same bits in training and serving cost: batch-invariant (exact) mode against the fast one.

    python bench/bench_exact.py [--only bits train prefill decode requests] [--models 0.6B 1B]

Both modes run one after the other in one process, on the same random weights in bf16. `value` is
the exact mode's time in milliseconds, `peer` the fast mode's; `cost` is their quotient (1: free).

bits       4 layers of each model: the log-probabilities of 3 requests that were sampled in one batch
           with others are those of training, bit for bit; `value` counts the tokens that differ
train      a whole step (bench_train.py): gpt124m 16 x 1024; the models 4 x 2048
prefill    128 prompts of 512 tokens; one prompt of 16,384: to the first tokens on the host
decode     GPU time of the decoding step's CUDA graph, every slot at the given context
requests   256 requests of bench_serve.py, seconds of the second run
"""

import gc
import time
from dataclasses import dataclass, field
from typing import Literal

import bench_train
import cupy as cp
import numpy as np
import tyro
from _shapes import LLAMA_1B
from _timing import record
from bench_decode import step_ms
from bench_serve import MODELS, workload

import xtrain
from xtrain.device import free_cached, to_numpy
from xtrain.kernels.cast import cast_fwd

SHAPES = {"0.6B": MODELS["0.6B"], "1B": LLAMA_1B | {"max_seq_len": 32768}}
NAMES = {"0.6B": "Qwen3-0.6B", "1B": "Llama-3.2-1B"}
PARTS = ["bits", "train", "prefill", "decode", "requests"]


@dataclass
class Options:
    only: list[Literal["bits", "train", "prefill", "decode", "requests"]] = field(
        default_factory=lambda: list(PARTS)
    )
    models: list[Literal["0.6B", "1B"]] = field(default_factory=lambda: ["0.6B", "1B"])
    batch: list[int] = field(default_factory=lambda: [1, 8, 32, 128, 256])
    context: list[int] = field(default_factory=lambda: [512, 4096])
    kv_gb: float = 80.0  # of keys and values; larger cases are left out


def random_model(size, layers=None):
    shape = SHAPES[size] | ({} if layers is None else {"n_layers": layers})
    model = xtrain.Transformer(xtrain.ModelConfig(**shape), None, "gpu", "bf16", trainable=False)
    cp.random.seed(0)
    for _, p in model.named_parameters():
        if p.ndim == 1:
            p.data.fill(1)
        else:
            p.data = cast_fwd(cp.random.standard_normal(p.shape, dtype=cp.float32) * 0.02, p.dtype)
    free_cached("gpu")
    return model


def clean():
    gc.collect()
    free_cached("gpu")


def note(what, size, shape, exact, fast, **more):
    print(
        f"{what} {size} {shape}: exact {exact:.3f}, fast {fast:.3f} ms, {exact / fast:.3f}",
        flush=True,
    )
    record(
        "bench_exact",
        f"{what} {NAMES.get(size, size)}",
        shape=shape,
        dtype="bf16",
        ms=exact,
        value=exact,
        unit="ms",
        peer="fast mode",
        peer_value=fast,
        cost=round(exact / fast, 4),
        **more,
    )


def bench_bits(size):
    model = random_model(size, 4)
    vocab = model.config.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, n).tolist() for n in (700, 130, 61)]
    others = [rng.integers(0, vocab, n).tolist() for n in rng.integers(1, 400, 20)]
    engine = xtrain.Engine(model, 23, 1200, True, prefill_tokens=256)
    answers = engine.generate(prompts + others, 300, 1.0, seed=list(range(23)), logprobs=0)
    differ = 0
    for prompt, answer in zip(prompts, answers):
        ids = np.array([[*prompt, *answer]], np.int32)
        targets = np.full_like(ids, -100)
        targets[0, len(prompt) - 1 : -1] = answer
        with xtrain.batch_invariant():
            trained = to_numpy(model.logprobs(ids, targets).data)[0, len(prompt) - 1 : -1]
        served = np.array([x for x, _ in answer.logprobs], np.float32)
        differ += int((served != trained).sum())
    print(f"bits {size}: {differ} of 900 tokens differ", flush=True)
    record(
        "bench_exact", f"bits {NAMES[size]}", shape="3 x 300 tokens, 4 layers", dtype="bf16",
        ms=0, value=differ, unit="tokens that differ",
    )  # fmt: skip


def bench_train_step(size):
    if size == "gpt124m":
        config, B, T = bench_train.model_config(size)
    else:
        config = xtrain.ModelConfig(**(SHAPES[size] | {"max_seq_len": 2048}))
        B, T = 4, 2048
    medians = []
    for invariant in (True, False):
        model = xtrain.Transformer(config, 0, "gpu", "bf16")
        step = bench_train.xtrain_step(model, invariant=invariant)
        data = bench_train.batches(config, B, T, 4)
        times = []
        for i in range(16):
            start = time.perf_counter()
            step(*data[i % 4])
            cp.cuda.Device().synchronize()
            times.append(time.perf_counter() - start)
        medians.append(float(np.median(times[5:])) * 1e3)
        del model, step
        clean()
    note("training step", size, f"{B}x{T}", *medians)


def bench_prefill(size):
    model = random_model(size)
    vocab = model.config.vocab_size
    for B, T in ((128, 512), (1, 16384)):
        prompts = np.random.default_rng(T).integers(0, vocab, (B, T)).tolist()
        medians = []
        for invariant in (True, False):
            engine = xtrain.Engine(model, B, T + 8, invariant, reuse_prefix=False)
            times = []
            for _ in range(4):
                start = time.perf_counter()
                engine.generate(prompts, 1)
                times.append(time.perf_counter() - start)
            medians.append(float(np.median(times[1:])) * 1e3)
            del engine
            clean()
        note("prefill", size, f"{B}x{T}", *medians)


def bench_decode(o, size):
    model = random_model(size)
    c = model.config
    for T in o.context:
        for B in o.batch:
            if 4 * c.n_layers * c.n_kv_heads * c.head_dim * B * (T + 64) > o.kv_gb * 1e9:
                continue
            times = []
            for invariant in (True, False):
                engine = xtrain.Engine(model, B, T + 64, invariant, reuse_prefix=False)
                with engine.runner.mode():
                    times.append(step_ms(engine, B, T)[0])
                del engine
                clean()
            note("decode step", size, f"B={B} context={T}", *times)


def bench_requests(size):
    model = random_model(size)
    prompts, answers = workload(256, model.config.vocab_size)
    seconds = []
    for invariant in (True, False):
        engine = xtrain.Engine(model, 256, 2048, invariant, reuse_prefix=False)
        for _ in range(2):
            start = time.perf_counter()
            engine.generate(prompts, answers, temperature=0.6, seed=1)
            elapsed = time.perf_counter() - start
        seconds.append(elapsed * 1e3)
        del engine
        clean()
    note(
        "256 requests",
        size,
        "100 to 1024 tokens",
        *seconds,
        tokens_s=sum(answers) / seconds[0] * 1e3,
    )


def main():
    o = tyro.cli(Options)
    for size in o.models:
        if "bits" in o.only:
            bench_bits(size)
        if "decode" in o.only:
            bench_decode(o, size)
        if "prefill" in o.only:
            bench_prefill(size)
        clean()
    if "train" in o.only:
        for size in ("gpt124m", *o.models):
            bench_train_step(size)
    if "requests" in o.only:
        bench_requests(o.models[0])


if __name__ == "__main__":
    main()
