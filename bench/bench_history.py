"""The phases from one sequence at a time to a batch in a CUDA graph, on this card (dim384, T 256).

    python bench/bench_history.py

    one sequence       B = 1: the GPU waits for Python
    batch by loop      32 sequences one after the other, one optimizer step
    looped attention   linears over the whole batch, attention head by head with copies to the host
                       and back
    batched            everything over the whole batch, each kernel launched from Python
    graph              the same step in one CUDA graph
    bf16 eager         bf16 with fp32 masters, FlashAttention on tensor cores, each kernel launched
                       from Python
    bf16               the same in one CUDA graph: xtrain's step

The optimizer was thought to slow down the second phase, and the linears the third. The measurement
shows the causes: launches and copies between device and host. See lesson 9.
"""

import time

import cupy as cp
import numpy as np
from _timing import record
from bench_train import batches, model_config, xtrain_step

import xtrain
from xtrain.kernels.attention.gemm_attention import attention_bwd, attention_fwd
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function
from xtrain.nn.optim import clip


class LoopedAttention(Function):
    """Attention head by head and sequence by sequence, slow on purpose.

    Each slice is copied through the host.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        o = cp.empty_like(q)
        saved = []
        rep = q.shape[2] // k.shape[2]
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                part = [
                    cp.asarray(x.get()) for x in (q[b, :, h], k[b, :, h // rep], v[b, :, h // rep])
                ]
                o_1T1D, kept = attention_fwd(*(x[None, :, None] for x in part), scale, causal)
                o[b, :, h] = cp.asarray(o_1T1D[0, :, 0].get())
                saved.append(kept)
        ctx.save(saved, k.shape, scale, causal)
        return o

    @staticmethod
    def backward(ctx, do):
        saved, shape, scale, causal = ctx.saved
        dq = cp.empty_like(do)
        dk = cp.zeros(shape, do.dtype)
        dv = cp.zeros(shape, do.dtype)
        H = do.shape[2]
        rep = do.shape[2] // shape[2]
        for i, kept in enumerate(saved):
            b, h = divmod(i, H)
            part = cp.asarray(do[b, :, h].get())[None, :, None]
            dq_h, dk_h, dv_h = (
                cp.asarray(x.get())[0, :, 0] for x in attention_bwd(part, kept, scale, causal)
            )
            dq[b, :, h] = dq_h
            dk[b, :, h // rep] += dk_h
            dv[b, :, h // rep] += dv_h
        return dq, dk, dv


def tokens_per_second(step, data, tokens, repeat):
    """Return tokens per second, ms per step: medians over `repeat` steps"""
    for ids, targets in data[:4]:  # compile, and capture a graph
        step(ids, targets)
    times = []
    for i in range(repeat):
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        step(*data[i % len(data)])
        cp.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    return tokens / np.median(times), 1e3 * np.median(times)


def measure(name, step, data, sequences, repeat, dtype="fp32"):
    T = data[0][0].shape[1]
    speed, ms = tokens_per_second(step, data, sequences * T, repeat)
    record(
        "bench_history",
        name,
        shape=f"B={sequences} T={T}",
        dtype=dtype,
        ms=ms,
        value=speed,
        unit="tok/s",
    )


def main() -> None:
    config, B, T = model_config("dim384")
    data = batches(config, B, T, 4)
    model = xtrain.Transformer(config, device="gpu")
    step = xtrain_step(model, graph=False)
    optimizer = xtrain.AdamW(model, 3e-4)

    def by_loop(ids, targets):
        model.zero_grad()
        part = cp.full(1, 1 / targets.size, np.float32)
        for b in range(len(ids)):
            model.loss(cp.asarray(ids[b : b + 1]), cp.asarray(targets[b : b + 1]), part).backward()
        optimizer.step(clip(model, 1.0)[1])

    measure("one sequence", step, [(i[:1], t[:1]) for i, t in data], 1, 10)
    measure("batch by loop", by_loop, data, B, 4)
    batched = F.attention
    F.attention = LoopedAttention.apply
    measure("looped attention", step, data, B, 2)
    F.attention = batched
    measure("batched", step, data, B, 10)
    measure("graph", xtrain_step(model), data, B, 20)
    model = xtrain.Transformer(config, device="gpu", precision="bf16")
    measure("bf16 eager", xtrain_step(model, graph=False), data, B, 20, "bf16")
    measure("bf16", xtrain_step(model), data, B, 20, "bf16")


if __name__ == "__main__":
    main()
