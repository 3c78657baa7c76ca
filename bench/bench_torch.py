"""xtrain's kernels in PyTorch: ops, training steps of transformers models, host time of a call.

    python bench/bench_torch.py [--parts ops steps host] [--widths llama-1b qwen3-8b]
                                [--tokens 8192] [--models llama-1b] [--only rmsnorm rope]

ops     forward and backward of every op of xtrain.torch, in bf16, at the widths of Llama-3.2-1B and
        Qwen3-8B, against PyTorch eager, torch.compile and, where it is installed, Liger-Kernel. The
        results are compared with those of eager first. The time is that inside a CUDA graph, L2
        flushed before every run; the host's share is in `host`. peak_gb is what torch allocated in
        one forward and backward.
steps   forward, loss, backward and torch's fused AdamW of a transformers model with random weights
        in bf16, B T tokens: plain, compiled, with Liger-Kernel, with xtrain.torch.apply, and with
        apply, compiled. The mean loss of the first steps is printed for comparison.
host    microseconds that a call of each op takes on the host, on tensors so small that the GPU
        never lags: without gradients, with, with its backward, and with its share of the backward
        pass of ten calls, against torch and Liger-Kernel.

The defaults of ops and steps take four minutes on an H200. All of it:
--tokens 8192 16384 32768 --models llama-1b qwen3-0.6b. Peers are the fastest of the others; `peer`
names it, and every time is in the record.
"""

import functools
import gc
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from _timing import gpu_ms, graph_ms, record

import xtrain.torch as xt

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
WIDTHS = {  # C, F, H, G, D, V
    "llama-1b": (2048, 8192, 32, 8, 64, 128256),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936),
    "tiny": (64, 128, 4, 2, 64, 256),  # the GPU never lags behind the host
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family, config
    "llama-1b": (
        "Llama",
        dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-0.6b": (
        "Qwen3",
        dict(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
}
T = 2048  # tokens of a sequence
LR = 1e-4


@dataclass
class Options:
    parts: list[Literal["ops", "steps", "host"]] = field(
        default_factory=lambda: ["ops", "steps", "host"]
    )
    widths: list[str] = field(default_factory=lambda: ["llama-1b", "qwen3-8b"])
    tokens: list[int] = field(default_factory=lambda: [8192])
    models: list[str] = field(default_factory=lambda: ["llama-1b"])
    only: list[str] = field(default_factory=list)  # ops; default: all
    variants: list[str] = field(default_factory=list)  # of steps; default: all
    batch: int = 4  # sequences of 2048 tokens, of a step
    steps: int = 10  # timed, after half as many


@dataclass
class Case:
    """An op: the inputs, and how each library computes it.

    inputs: tensors; those of bf16 and float32 have gradients, but for the last `fixed`.
    nbytes: that a perfect kernel would move, forward and backward; 0: flops is given.
    """

    inputs: list[torch.Tensor]
    ours: Callable
    plain: Callable
    liger: Callable | None
    nbytes: float = 0
    flops: float = 0
    fixed: int = 0
    captured: bool = True  # Liger's linear cross-entropy reads a number back: no graph can hold it


def draw(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def leaf(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return draw(*shape, dtype=dtype).requires_grad_()


# ----------------------------------------------------------------------------- the ops
def plain_rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = (t[:, None].to(x.dtype) for t in (cos, sin))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


def liger_ops() -> dict[str, Callable]:
    """Return Liger-Kernel's ops by our names; none if it is not installed."""
    if not HAS_LIGER:
        return {}
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from liger_kernel.transformers.functional import liger_rms_norm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    linear_loss = LigerFusedLinearCrossEntropyLoss()

    def residual(x, r, w):
        h = x + r
        return h, liger_rms_norm(h, w, 1e-6)

    def rope(q, k, cos, sin):
        both = (torch.cat((t, t), -1)[None].to(q.dtype) for t in (cos, sin))
        turned = liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *both)
        return tuple(x.transpose(1, 2) for x in turned)

    return {
        "rmsnorm": lambda x, w: liger_rms_norm(x, w, 1e-6),
        "residual_rmsnorm": residual,
        "swiglu": LigerSiLUMulFunction.apply,
        "rope": rope,
        "linear_cross_entropy": lambda x, w, targets: linear_loss(w, x, targets),
    }


def cases(width: str, N: int, T: int = T) -> dict[str, Callable[[], Case]]:
    """Return name -> a function that makes the case, for N tokens in sequences of T."""
    C, hidden, H, G, D, V = WIDTHS[width]
    B = N // T
    liger = liger_ops()
    angles = torch.arange(T, device="cuda")[:, None] * 1e4 ** (
        -torch.arange(0, D, 2, device="cuda") / D
    )
    tables = angles.cos(), angles.sin()

    def residual(x, r, w):
        h = x + r
        return h, F.rms_norm(h, (C,), w, 1e-6)

    def rope(q, k, cos, sin):
        return plain_rope(q, cos, sin), plain_rope(k, cos, sin)

    def case(name, *arguments, **sizes):
        return Case(*arguments, liger.get(name), **sizes)

    return {
        "rmsnorm": lambda: case(
            "rmsnorm",
            [leaf(N, C), leaf(C)],
            xt.rmsnorm,
            lambda x, w: F.rms_norm(x, (C,), w, 1e-6),
            nbytes=10.0 * N * C,  # 2 and 3 arrays
        ),
        "residual_rmsnorm": lambda: case(
            "residual_rmsnorm",
            [leaf(N, C), leaf(N, C), leaf(C)],
            xt.residual_rmsnorm,
            residual,
            nbytes=16.0 * N * C,  # 4 and 4 arrays
        ),
        "swiglu": lambda: case(
            "swiglu",
            [leaf(N, hidden), leaf(N, hidden)],
            xt.swiglu,
            lambda gate, up: F.silu(gate) * up,
            nbytes=16.0 * N * hidden,  # 3 and 5 arrays
        ),
        "rope": lambda: case(
            "rope",
            [leaf(B, T, H, D), leaf(B, T, G, D), *tables],
            lambda q, k, cos, sin: (xt.rope(q, cos, sin), xt.rope(k, cos, sin)),
            rope,
            nbytes=8.0 * N * (H + G) * D,
            fixed=2,
        ),
        "norm_rope": lambda: case(
            "norm_rope",
            [leaf(B, T, H, D), leaf(D), *tables],
            xt.norm_rope,
            lambda x, w, cos, sin: plain_rope(F.rms_norm(x, (D,), w, 1e-6), cos, sin),
            nbytes=10.0 * N * H * D,  # 2 and 3 arrays
            fixed=2,
        ),
        "attention": lambda: case(
            "attention",
            [leaf(B, T, H, D), leaf(B, T, G, D), leaf(B, T, G, D)],
            xt.attention,
            plain_attention,
            flops=7.0 * B * H * T * T * D,  # 2 and 5 products of T T D, half of it hidden
        ),
        "linear_cross_entropy": lambda: case(
            "linear_cross_entropy",
            [leaf(N, C), leaf(V, C), torch.randint(0, V, (N,), device="cuda")],
            xt.linear_cross_entropy,
            lambda x, w, targets: F.cross_entropy((x @ w.T).float(), targets),
            flops=6.0 * N * C * V,
            captured=False,
        ),
        "embedding": lambda: case(
            "embedding",
            [torch.randint(0, V, (N,), device="cuda"), leaf(V, C)],
            xt.embedding,
            F.embedding,
            nbytes=8.0 * N * C + 2.0 * V * C,
        ),
        "softmax": lambda: case(
            "softmax",
            [leaf(H, T, T, dtype=torch.float32)],
            functools.partial(xt.softmax, scale=1.0),
            lambda s: s.softmax(-1),
            nbytes=20.0 * H * T * T,
        ),
    }


def both_passes(function: Callable, case: Case, calls: int = 1) -> Callable[[], list[torch.Tensor]]:
    """Return a function that computes results and gradients, of several calls in one backward pass.

    Each run has new leaves: the gradient of a leaf belongs to the stream of its first use, and
    that must be the stream that is captured.
    """

    def leaves() -> list[torch.Tensor]:
        return [x.detach().requires_grad_(x.requires_grad) for x in case.inputs]

    results = _tuple(function(*[x.clone() for x in leaves()]))  # Liger's RoPE turns its input
    grads = [draw(*y.shape, dtype=y.dtype) if y.dim() else torch.ones_like(y) for y in results]

    def run():
        results: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for _ in range(calls):
            inputs = leaves()
            results += _tuple(function(*inputs))
            tensors = inputs[: len(inputs) - case.fixed]
            wanted += [x for x in tensors if x.requires_grad]
        return [*results, *torch.autograd.grad(results, wanted, grads * calls)]

    return run


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the largest relative difference of the norms of results."""
    norms = [(x.float() - y.float()).norm() / (y.float().norm() + 1e-6) for x, y in zip(a, b)]
    return max(float(n.detach()) for n in norms)


def peak_gb(run: Callable) -> float:
    """Return what torch allocates above the inputs in one run."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def bench_op(name: str, width: str, N: int, case: Case) -> None:
    functions = {"xtrain": case.ours, "eager": case.plain, "compile": torch.compile(case.plain)}
    if case.liger is not None:
        functions["liger"] = case.liger
    times = {}
    peaks = {}
    errors = {}
    torch.manual_seed(1)
    expected = both_passes(case.plain, case)()
    for label, function in functions.items():
        torch.manual_seed(1)
        run = both_passes(function, case)
        errors[label] = round(difference(run(), expected), 5)
        peaks[label] = round(peak_gb(run), 3)
        if case.captured:
            times[label] = float(graph_ms(run, runs=10, torch=torch)[0])
        else:  # takes milliseconds, so the host is ahead of the GPU
            times[label] = float(gpu_ms(run, runs=10)[0])
    del expected
    ms = times["xtrain"]
    others = {k: v for k, v in times.items() if k != "xtrain"}
    peer = min(others, key=others.__getitem__)
    if case.flops:
        amount, unit = case.flops / 1e9, "TFLOP/s"
    else:
        amount, unit = case.nbytes / 1e6, "GB/s"
    record(
        "bench_torch",
        f"{name} fwd+bwd",
        shape=f"{width} N={N}",
        dtype="bf16" if case.inputs[-1].dtype != torch.float32 or case.fixed else "fp32",
        ms=ms,
        value=amount / ms,
        unit=unit,
        peer=peer,
        peer_value=amount / others[peer],
        peak_gb=peaks["xtrain"],
        all_ms={k: round(v, 4) for k, v in times.items()},
        all_peak_gb=peaks,
        difference=errors,
    )


# ----------------------------------------------------------------------------- training steps
def make_model(name: str) -> torch.nn.Module:
    """Return a transformers model with random weights in bf16, the same each time."""
    import transformers

    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**options, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.train()


def with_liger(model: torch.nn.Module, name: str) -> torch.nn.Module:
    from liger_kernel.transformers import monkey_patch

    kind = {"Llama": "llama", "Qwen3": "qwen3"}[MODELS[name][0]]
    getattr(monkey_patch, f"apply_liger_kernel_to_{kind}")(model=model)
    return model


@dataclass
class StepTimes:
    ms: float
    peak_gb: float
    loss: float  # mean of the steps for warm-up


def time_steps(model: torch.nn.Module, vocab: int, B: int, steps: int) -> StepTimes:
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)
    losses = []
    times = []
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps + steps // 2):
        ids = torch.randint(0, vocab, (B, T), device="cuda", generator=generator)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step < steps // 2:
            losses.append(float(loss))
        else:
            times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 1e9
    return StepTimes(float(np.median(times)), peak, float(np.mean(losses)))


def bench_steps(name: str, options: Options) -> None:
    variants: dict[str, Callable] = {
        "plain": lambda model: model,
        "compile": torch.compile,
        "xtrain": xt.apply,
        "xtrain + compile": lambda model: torch.compile(xt.apply(model)),
    }
    if HAS_LIGER:  # last: it changes the classes of transformers
        variants["liger"] = functools.partial(with_liger, name=name)
    found = {}
    for label, change in variants.items():
        if options.variants and label not in options.variants:
            continue
        torch._dynamo.reset()
        model = change(make_model(name))
        found[label] = time_steps(
            model, MODELS[name][1]["vocab_size"], options.batch, options.steps
        )
        print(f"{name} {label}: {found[label]}", flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    tokens = options.batch * T
    ours = {k: v for k, v in found.items() if k.startswith("xtrain")}
    others = {k: v for k, v in found.items() if k not in ours}
    if not (ours and others):
        return
    best = min(ours, key=lambda k: ours[k].ms)
    peer = "liger" if "liger" in others else min(others, key=lambda k: others[k].ms)
    record(
        "bench_torch",
        f"step {name}",
        shape=f"{options.batch}x{T}",
        dtype="bf16",
        ms=ours[best].ms,
        value=tokens / ours[best].ms * 1e3,
        unit="tok/s",
        peer=peer,
        peer_value=tokens / others[peer].ms * 1e3,
        peak_gb=round(ours[best].peak_gb, 3),
        variant=best,
        all_ms={k: round(v.ms, 3) for k, v in found.items()},
        all_peak_gb={k: round(v.peak_gb, 3) for k, v in found.items()},
        all_losses={k: round(v.loss, 5) for k, v in found.items()},
    )


# ----------------------------------------------------------------------------- the host
def host_us(f: Callable, calls: int = 50) -> float:
    """Return the median microseconds of a call on the host; the GPU is idle before each block."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return float(np.median(times[5:]))


def bench_host(options: Options) -> None:
    """Print a line for each op: inference, forward, forward and backward; ours, torch's, Liger's."""
    print("op: microseconds of inference, forward, both passes, both of ten | torch | liger")
    for name, make in cases("tiny", 16, T=8).items():
        if options.only and name not in options.only:
            continue
        case = make()
        functions = {"xtrain": case.ours, "torch": case.plain, "liger": case.liger}
        functions = {k: f for k, f in functions.items() if f is not None}
        times = {k: [round(t, 1) for t in host_times(f, case)] for k, f in functions.items()}
        print(f"{name}: " + " | ".join(str(t) for t in times.values()), flush=True)
        record(
            "bench_torch",
            f"host {name}",
            shape="16 tokens",
            dtype="bf16",
            ms=times["xtrain"][2] / 1e3,
            value=times["xtrain"][2],
            unit="us",
            peer="torch",
            peer_value=times["torch"][2],
            all_us=times,
        )


def host_times(function: Callable, case: Case) -> list[float]:
    """Return the microseconds of a call without gradients, with, with its backward pass, and with its
    share of a backward pass of ten calls, which the autograd thread begins once, as in a model."""
    call = functools.partial(function, *case.inputs)
    with torch.no_grad():
        inference = host_us(call)
    both = host_us(both_passes(function, case))
    ten = host_us(both_passes(function, case, 10), calls=5) / 10
    return [inference, host_us(call), both, ten]


def main(options: Options) -> None:
    if "host" in options.parts:
        bench_host(options)
    if "ops" in options.parts:
        for width in options.widths:
            for N in options.tokens:
                for name, make in cases(width, N).items():
                    if options.only and name not in options.only:
                        continue
                    torch._dynamo.reset()
                    bench_op(name, width, N, make())
                    gc.collect()
                    torch.cuda.empty_cache()
    if "steps" in options.parts:
        for name in options.models:
            bench_steps(name, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
