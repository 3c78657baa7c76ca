"""Training speed of whole steps: a new batch, forward, loss, backward, clip by global norm, AdamW.

    python bench/bench_train.py [--models dim384 dim768 gpt124m] [--precision fp32 bf16]
                                [--against torch]

    bf16 and fp8:    --models gpt124m qwen3-0.6b --precision bf16 fp8 [--fp8-head]
    old attention:   --models gpt124m --precision bf16 --against none --no-wgmma
    experts:         --models 16x0.1b 16x0.1b-dense --precision bf16
    invariant mode:  --models gpt124m --precision bf16 --against none --batch-invariant

xtrain and PyTorch run one after the other in one process, from the same weights and on the same
batches. The loss curves of the first 20 steps are printed for comparison. (The learning rate warms
up during these steps. At the full rate from the start, the loss of dim768 goes through a peak, in
which two roundings of the same mathematics differ by 0.1.) Tokens per second are batch * T / median
step time; the GPU is synchronized after each step.
Peak memory is what each library's allocator reserved on the card.

A mixture of experts is compared with transformers' model in bf16 (its grouped products have no other
dtype), compiled, with `experts_implementation="grouped_mm"`; without a loss that balances experts, as
here. `16x0.1b-dense` is a dense model with the FLOPs of the active experts.

The peer: in fp32 eager PyTorch without TF32; in bf16, also for fp8, the fastest of torch.compile's
modes, with autocast, fused AdamW, and the vocabulary padded as in xtrain. Where Liger-Kernel is
installed, also PyTorch with its norms, RoPE, SwiGLU and fused linear cross-entropy, eager and
compiled; its tokens per second are in the record as `liger`, whichever is fastest. For fp8, where
torchao is installed, also its float8 training, compiled, with one scale per matrix and with one per
row (recipes "tensorwise" and "rowwise"), of the same matrices as here; the fastest is in the record
as `torchao`.
"""

import gc
import itertools
import time
from dataclasses import dataclass, field
from typing import Literal

import cupy as cp
import numpy as np
import tyro
from _shapes import DENSE_AS_MIXTURE, MIXTURE, QWEN3_06B, TINYLLAMA
from _timing import record

import xtrain
from xtrain.config import PRESETS
from xtrain.device import memory_peak_bytes
from xtrain.kernels.attention import flash_attention
from xtrain.nn.cuda_graph import Graphed
from xtrain.nn.optim import clip

VOCAB = {"gpt124m": 50304}  # the other presets use GPT-2's 50257, which xtrain pads in memory
SHAPES = {  # of models that are no presets: config, batch, T
    "300m": (
        dict(dim=1024, n_layers=20, n_heads=16, head_dim=64, hidden_dim=2816, vocab_size=16384),
        16,
        512,
    ),
    "qwen3-0.6b": (QWEN3_06B, 4, 2048),
    "tinyllama-1.1b": (TINYLLAMA, 4, 2048),
    "16x0.1b": (MIXTURE, 16, 1024),
    "16x0.1b-dense": (DENSE_AS_MIXTURE, 16, 1024),
}
LR = 3e-4
BETAS = (0.9, 0.95)
DECAY = 0.1
CLIP = 1.0
WARMUP = 100  # steps in which the learning rate grows to LR
MODES = ("default", "reduce-overhead", "max-autotune")  # of torch.compile


@dataclass
class Options:
    models: list[str] = field(default_factory=lambda: ["dim384"])
    precision: list[Literal["fp32", "bf16", "fp8"]] = field(default_factory=lambda: ["fp32"])
    against: Literal["none", "torch"] = "torch"
    # modes of torch.compile to try, in bf16
    modes: list[str] = field(default_factory=lambda: list(MODES))
    steps: int = 20  # timed steps, after as many for warm-up and the loss curve
    wgmma: bool = True  # attention kernels for compute capability 9.0, if supported
    batch_invariant: bool = False  # forward passes have the bits of Engine(batch_invariant=True)
    fp8_head: bool = False  # in fp8, the products of the head too
    # batch sizes to measure; default: the preset's
    batch: list[int] = field(default_factory=list)


def model_config(name: str) -> tuple[xtrain.ModelConfig, int, int]:
    """Return config, batch, T"""
    if name in SHAPES:
        shape, B, T = SHAPES[name]
        return xtrain.ModelConfig(max_seq_len=T, **shape), B, T
    preset = PRESETS[name]
    T = preset.train["seq_len"]
    config = xtrain.ModelConfig(vocab_size=VOCAB.get(name, 50257), max_seq_len=T, **preset.model)
    return config, preset.train["batch"], T


def batches(config, B, T, n, seed=0):
    """Return n batches of random ids.

    A few tokens are much more frequent, so that the loss can fall.
    """
    rng = np.random.default_rng(seed)
    draws = (config.vocab_size * rng.random((n, B, T + 1)) ** 4).astype(np.int32)
    return [(np.ascontiguousarray(d[:, :-1]), np.ascontiguousarray(d[:, 1:])) for d in draws]


def learning_rate(step: int) -> float:
    return LR * min((step + 1) / WARMUP, 1.0)


def xtrain_step(model, graph=True, invariant=False, kind=xtrain.AdamW):
    """Return xtrain's training step: host arrays in, loss (on the GPU) out.

    graph: capture it in a CUDA graph.  invariant: the forward in batch-invariant mode.  kind: class
    of the optimizer.
    """
    optimizer = kind(model, LR, betas=BETAS, weight_decay=DECAY)

    def compute(ids, targets, hyper):
        model.zero_grad()
        with xtrain.batch_invariant(invariant):
            loss = model.loss(ids, targets)
        loss.backward()
        optimizer.apply(hyper, clip(model, CLIP)[1])
        return (loss.data.reshape(1),)

    eager = lambda *inputs: compute(*map(cp.asarray, inputs))
    captured = Graphed(compute, model.arena) if graph else eager

    def step(ids, targets):
        optimizer.lr = learning_rate(optimizer.t)
        return captured(ids, targets, optimizer.advance())[0].copy()

    return step


def torch_step(config, T, ours, precision, mode, liger=False, recipe=None, head=False):
    """Return PyTorch's training step; mode None: eager. liger: with Liger-Kernel's ops.

    recipe: of float8, None: bf16; head: too
    """
    import torch
    from torch_model import LigerOps, Mixture, Model, load_weights, to_float8

    torch.backends.cuda.matmul.allow_tf32 = False
    if config.n_experts:
        model = Mixture(ours)
    else:
        ops = LigerOps() if liger else None
        model = Model(config, T, precision == "bf16", ops).cuda()
        load_weights(model, ours)
    if recipe:
        to_float8(model, recipe, head)
    groups = [[p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    decay = [{"params": g, "weight_decay": d} for g, d in zip(groups, (DECAY, 0.0))]
    optimizer = torch.optim.AdamW(decay, lr=LR, betas=BETAS, fused=True)
    forward = torch.compile(model, mode=mode) if mode else model
    bf16 = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")
    count = itertools.count()

    def step(ids, targets):
        lr = learning_rate(next(count))
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids, targets = (torch.from_numpy(x).cuda(non_blocking=True).long() for x in (ids, targets))
        optimizer.zero_grad(set_to_none=True)
        with bf16:
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach().clone()

    return step


def torch_best(config, B, T, ours, precision, modes, data, synchronize, head=False):
    """Return (losses, ms, peak GB, name) of the fastest variant, and tok/s of other libraries.

    ms: (median, p20, p80).
    The others: the fastest with Liger-Kernel and with torchao's float8, as "liger" and "torchao".
    precision fp8: bf16 and float8.
    head: the head in float8, too.
    """
    import torch
    from torch_model import HAS_FLOAT8, HAS_LIGER, RECIPES

    best = None
    others = {}
    dtype = "fp32" if precision == "fp32" else "bf16"
    variants = [(mode, False, None) for mode in ([None] if dtype == "fp32" else modes)]
    if HAS_LIGER and not config.n_experts:
        compiled = [(mode, True, None) for mode in modes[:1] if dtype == "bf16"]
        variants += [(None, True, None), *compiled]
    if precision == "fp8" and HAS_FLOAT8:
        variants += [(mode, False, recipe) for recipe in RECIPES for mode in modes]
    for mode, with_liger, recipe in variants:
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        kind = "Liger " * with_liger + (f"float8 {recipe} " if recipe else "")
        name = f"torch {kind}{'.compile ' + mode if mode else 'eager'}"
        try:
            step = torch_step(config, T, ours, dtype, mode, with_liger, recipe, head)
            losses, ms = run(step, data, synchronize)
        except Exception as error:  # one peer that cannot run here must not end the run
            print(f"  {name} {dtype} failed: {type(error).__name__}: {error}", flush=True)
            others.setdefault("peers_failed", []).append(name)
            continue
        finally:
            step = None
            gc.collect()
            torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_reserved() / 1e9
        speed = B * T / ms[0] * 1e3
        print(f"  {name} {dtype}: {speed:,.0f} tok/s, {peak:.2f} GB", flush=True)
        for library in ["liger"] * with_liger + ["torchao"] * bool(recipe):
            others[library] = max(speed, others.get(library, 0.0))
        if best is None or ms[0] < best[1][0]:
            best = losses, ms, peak, name
    if best is None:
        raise RuntimeError("no variant of torch ran: their errors are printed above")
    return best, others


def run(step, data, synchronize):
    """Return losses (host), median ms per step over the second half of the data"""
    losses = []
    times = []
    for ids, targets in data:
        synchronize()
        start = time.perf_counter()
        losses.append(step(ids, targets))
        synchronize()
        times.append(time.perf_counter() - start)
    half = times[len(times) // 2 :]
    return [x.item() for x in losses], 1e3 * np.percentile(half, [50, 20, 80])


def bench(name, precision, o, batch=None):
    """Measure one model in one precision, and PyTorch in the same run, and append the record."""
    config, B, T = model_config(name)
    B = batch or B
    data = batches(config, B, T, 2 * o.steps)
    synchronize = lambda: cp.cuda.Device().synchronize()
    model = xtrain.Transformer(config, device="gpu", precision=precision)
    head = o.fp8_head and precision == "fp8"
    if head:
        model.use_fp8_head()
    more = {}
    theirs = None
    if o.against == "torch":
        (theirs, ms, peak, peer), more = torch_best(
            config, B, T, model, precision, o.modes, data, synchronize, head
        )
        more |= {
            "peer": peer,
            "peer_value": B * T / ms[0] * 1e3,
            "peer_modes": o.modes if precision != "fp32" else [],
            "peer_ms": [round(x, 3) for x in ms],
            "peer_peak_gb": round(peak, 2),
        }
    step = xtrain_step(model, invariant=o.batch_invariant)
    losses, ms = run(step, data, synchronize)
    kind = "batch-invariant " * o.batch_invariant
    model_name = f"{name}, head in fp8" if head else name
    # step must live until the peak memory is read: it owns the graph's memory
    record(
        "bench_train",
        f"{kind}{model_name}",
        shape=f"B={B} T={T} V={config.vocab_size}",
        dtype=precision,
        ms=ms[0],
        value=B * T / ms[0] * 1e3,
        unit="tok/s",
        peak_gb=round(memory_peak_bytes("gpu") / 1e9, 2),
        p20_p80=[round(x, 3) for x in ms[1:]],
        **({} if o.wgmma else {"attention": "mma.sync"}),
        **more,
    )
    if theirs:
        print("loss xtrain", " ".join(f"{x:.4f}" for x in losses[:20]))
        print("loss torch ", " ".join(f"{x:.4f}" for x in theirs[:20]))
        print(
            f"largest difference {max(abs(a - b) for a, b in zip(losses[:20], theirs)):.2e}",
            flush=True,
        )


def main(o: Options) -> None:
    flash_attention.HOPPER = o.wgmma
    for name in o.models:
        for batch in o.batch or [None]:
            for precision in o.precision:
                bench(name, precision, o, batch)
                gc.collect()
                cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
