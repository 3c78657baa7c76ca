"""Training speed, whole steps: a new batch, forward, loss, backward, clip by global norm, AdamW.

    python bench/bench_train.py [--models dim384 ...] [--against torch] [--batch N]

xtrain and PyTorch run in turns in one process, from the same weights on the same batches; the loss curves of the first
20 steps are printed beside each other. Tokens per second are batch * T / median step time. Peak memory is what each
library's own allocator took.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

import cupy as cp
import numpy as np
import tyro
from _timing import record

import xtrain
from xtrain.config import PRESETS
from xtrain.optim import clip

VOCAB = {"gpt124m": 50304}  # GPT-2's 50257 for the others: its odd width is part of the comparison
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclass
class Options:
    models: list[str] = field(default_factory=lambda: ["dim384"])
    against: Literal["none", "torch"] = "torch"
    steps: int = 20  # timed, after as many for warm-up and the loss curve
    batch: int | None = None  # sequences; none: the preset's


def model_config(name: str) -> tuple[xtrain.ModelConfig, int, int]:
    """-> config, batch, T"""
    preset = PRESETS[name]
    T = preset.train["seq_len"]
    config = xtrain.ModelConfig(vocab_size=VOCAB.get(name, 50257), max_seq_len=T, **preset.model)
    return config, preset.train["batch"], T


def batches(config, B, T, n, seed=0):
    """n batches of ids that can be learned a little: a few tokens are much more frequent."""
    rng = np.random.default_rng(seed)
    draws = (config.vocab_size * rng.random((n, B, T + 1)) ** 4).astype(np.int32)
    return [(np.ascontiguousarray(d[:, :-1]), np.ascontiguousarray(d[:, 1:])) for d in draws]


def xtrain_step(model):
    optimizer = xtrain.AdamW(model, LR, BETAS, weight_decay=DECAY)

    def step(ids, targets):
        model.zero_grad()
        loss = model.loss(cp.asarray(ids), cp.asarray(targets))
        loss.backward()
        optimizer.step(clip(model, CLIP)[1])
        return loss.data

    return step


def torch_step(config, T, ours):
    import torch
    from torch_model import Model, load_weights

    torch.backends.cuda.matmul.allow_tf32 = False
    model = Model(config, T, padded=False).cuda()
    load_weights(model, ours)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def step(ids, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.from_numpy(ids).cuda().long(), torch.from_numpy(targets).cuda().long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return step, torch


def run(step, data, synchronize):
    """-> losses (host), median ms per step over the second half of the data"""
    losses, times = [], []
    for ids, targets in data:
        synchronize()
        start = time.perf_counter()
        losses.append(step(ids, targets))
        synchronize()
        times.append(time.perf_counter() - start)
    half = times[len(times) // 2 :]
    return [float(x) for x in losses], 1e3 * np.percentile(half, [50, 20, 80])


def main(o: Options) -> None:
    for name in o.models:
        config, B, T = model_config(name)
        B = o.batch or B
        data = batches(config, B, T, 2 * o.steps)
        synchronize = lambda: cp.cuda.Device().synchronize()
        model = xtrain.Transformer(config, device="gpu")
        more = {}
        if o.against == "torch":
            step, torch = torch_step(config, T, model)
            theirs, ms = run(step, data, synchronize)
            peer_peak = torch.cuda.max_memory_reserved() / 1e9
            more = {
                "peer": "torch eager", "peer_value": B * T / ms[0] * 1e3,
                "peer_ms": [round(x, 3) for x in ms], "peer_peak_gb": round(peer_peak, 2),
            }  # fmt: skip
            del step
            torch.cuda.empty_cache()
        losses, ms = run(xtrain_step(model), data, synchronize)
        peak = cp.get_default_memory_pool().total_bytes() / 1e9
        record(
            "bench_train", name, shape=f"B={B} T={T} V={config.vocab_size}", dtype="fp32", ms=ms[0],
            value=B * T / ms[0] * 1e3, unit="tok/s", peak_gb=round(peak, 2),
            p20_p80=[round(x, 3) for x in ms[1:]], **more,
        )  # fmt: skip
        if more:
            gap = max(abs(a - b) for a, b in zip(losses[:20], theirs))
            print("loss xtrain", " ".join(f"{x:.4f}" for x in losses[:20]))
            print("loss torch ", " ".join(f"{x:.4f}" for x in theirs[:20]))
            print(f"largest difference {gap:.2e}")
        del model
        cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
