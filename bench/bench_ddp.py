"""Data parallelism: the same step on 1, 2, 4 GPUs, compared with torch DDP + torch.compile.

    python bench/bench_ddp.py [--gpus 1 2 4] [--models dim384 dim768] [--against torch]
                              [--buckets 8 16 32 64]
    python bench/bench_ddp.py --gpus 4 --models tinyllama-1.1b --batch 4

Batch 32 per GPU if none is given, bf16. A time is the mean of `steps` consecutive steps (without
waiting in between, as in training), and the median of five such runs, on a chip warmed up by one
second of the same work. Printed for each variant, in ms:

    step           the whole step
    alone          the step of xtrain.train on each of the same GPUs, all busy, run alternately with
                   the variant: chips differ, and a warm chip is slower
    exposed        step minus the step of --dp none, which does not communicate: the cost of
                   communication
    communication  the same collectives alone, without other work; GB/s: bytes per rank * 2 (n-1)/n
                   / that time
    optimizer      norm, AdamW and, with ZeRO, the all-gather, alone
    of linear      tokens/s divided by the sum of the tokens/s of the GPUs alone
    of one GPU     tokens/s divided by n times those of the job with one GPU, which ran before
    bytes          allocated per parameter and GPU: weights, gradients, moments, bf16 copies

The script starts itself again, under mpirun for xtrain and under torchrun for PyTorch.
"""

import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import tyro

WARMUP = 1.0  # seconds: a warm chip is slower by 2 to 5 %
RUNS = 5


@dataclass
class Options:
    gpus: list[int] = field(default_factory=lambda: [1, 2, 4])
    models: list[str] = field(default_factory=lambda: ["dim384", "dim768"])
    against: Literal["none", "torch"] = "torch"
    # numbers of GPUs for which PyTorch runs, too
    torch_gpus: list[int] = field(default_factory=lambda: [1, 2, 4])
    stages: list[str] = field(
        default_factory=lambda: ["none", "naive", "flat", "overlap", "bucket"]
    )
    buckets: list[float] = field(default_factory=lambda: [32.0])  # MiB, for --dp bucket
    transports: list[str] = field(default_factory=lambda: ["nccl", "copy"])
    grad_comm: list[str] = field(default_factory=lambda: ["fp32"])
    zero: list[int] = field(default_factory=lambda: [0, 1])
    precision: Literal["fp32", "bf16"] = "bf16"
    batch: int = 32  # sequences per GPU
    steps: int = 20
    worker: str = ""  # internal: the task of a worker process, as JSON


def variants(o: Options, n: int) -> list[dict]:
    """Return the options of every variant that runs on n GPUs"""
    if n == 1:
        return [dict(dp="none")]
    # all stages only on the largest number of GPUs
    few = "none", *(o.stages if n == max(o.gpus) else ())
    stages = [dict(dp=dp, transport="nccl") for dp in o.stages if dp in few and dp != "bucket"]
    if "bucket" not in o.stages:
        return stages
    names = "bucket_mb", "transport", "grad_comm", "zero"
    kinds = itertools.product(o.buckets, o.transports, o.grad_comm, o.zero)
    kinds = [dict(zip(names, kind), dp="bucket") for kind in kinds]
    return stages + [k for k in kinds if (k["transport"], k["grad_comm"]) != ("copy", "bf16")]


def label(v: dict) -> str:
    """Return the name of a variant in the records."""
    words = [v["dp"]]
    if v["dp"] == "bucket":
        words += [f"{v['bucket_mb']:g} MiB", v["transport"], v["grad_comm"]]
        if v["zero"]:
            words.append(f"ZeRO-{v['zero']}")
    return " ".join(words)


# ----------------------------------------------------------------------------- one rank of xtrain
class Batches:
    """A loader of random tokens that are already in memory."""

    def __init__(self, config, B, T, rank):
        from bench_train import batches

        self.batches = batches(config, B, T, 8, seed=rank)
        self.taken = 0

    def next_batch(self):
        self.taken += 1
        return self.batches[self.taken % 8]


def measure(runs, ranks, steps, warmup=WARMUP):
    """Return ms per step of each run (median, best, worst of RUNS); the runs alternate"""
    import cupy as cp

    def once(run):
        cp.cuda.Device().synchronize()
        ranks.sum([0.0])  # a barrier
        start = time.perf_counter()
        for _ in range(steps):
            run.step()
        cp.cuda.Device().synchronize()
        return 1e3 * (time.perf_counter() - start) / steps

    start = time.perf_counter()
    while ranks.any(time.perf_counter() - start < warmup):
        for run in runs:
            once(run)
    times = [[once(run) for run in runs] for _ in range(RUNS)]
    return np.percentile(times, [50, 0, 100], axis=0).T


def alone(work, ranks, steps):
    """Return ms of work() on the GPU, captured in a graph"""
    import cupy as cp

    from xtrain.nn.cuda_graph import Graphed

    graph = Graphed(lambda: (work(), cp.zeros(1))[1:])
    for _ in range(3):
        graph()
    return measure([SimpleNamespace(step=graph)], ranks, steps, warmup=0.1)[0][0]


def kind_of(T, batch, ranks=1):
    return dict(batch=batch * ranks, micro_batch=batch, seq_len=T, steps=10**6, lr=3e-4, warmup=100)


@functools.cache
def run_alone(name, precision, batch, rank):
    """Return a run of xtrain.train, with which every variant is compared, and its initial weights.

    Created once; the weights are the same on all ranks.
    """
    from bench_train import model_config

    from xtrain.config import TrainConfig
    from xtrain.nn.model import Transformer
    from xtrain.training.run import Run

    shape, _, T = model_config(name)
    corpus = SimpleNamespace(loader=lambda *_: Batches(shape, batch, T, rank))
    model = Transformer(shape, 0, "gpu", precision)
    run = Run(TrainConfig(**kind_of(T, batch)), model, corpus)
    first = [p.data.copy() for _, p in model.storage()]
    for _ in range(3):
        run.step()
    return run, first


def one_variant(o, name, v, ranks):
    import cupy as cp
    from bench_train import model_config

    from xtrain.config import TrainConfig
    from xtrain.device import memory_peak_bytes
    from xtrain.nn.model import Transformer
    from xtrain.nn.optim import clip
    from xtrain.nn.sharded_arena import Share
    from xtrain.parallel.ddp import DataParallel
    from xtrain.training.run import Run

    shape, _, T = model_config(name)
    n = ranks.world
    zero = v.get("zero", 0)
    pool = cp.get_default_memory_pool()
    by_itself, first = run_alone(name, o.precision, o.batch, ranks.rank)
    pool.free_all_blocks()
    taken = memory_peak_bytes("gpu")
    runs = [by_itself]
    if n > 1:
        kind = kind_of(T, o.batch, n)
        share = Share(ranks.rank, n) if zero == 3 else None
        model = Transformer(shape, None, "gpu", o.precision, world=n, share=share)
        for (_, p), values in zip(model.storage(), first):
            p.data = values
        corpus = SimpleNamespace(loader=lambda *_: Batches(shape, o.batch, T, ranks.rank))
        config = TrainConfig(**kind, **v)
        runs.insert(0, Run(config, model, corpus, DataParallel(ranks)))
        for _ in range(3):
            runs[0].step()
        taken = memory_peak_bytes("gpu") - taken
    run = runs[0]
    model = runs[0].model
    ms, *others = measure(runs, ranks, o.steps)
    arena = model.arena
    optimizer = run.optimizer
    state = [arena.weights, arena.grads, arena.half, optimizer.m, optimizer.v]
    state += [getattr(optimizer, name, None) for name in ("master", "norms")]
    if zero == 3:
        for buffer in run.parallel.gathering.buffers:
            state += [buffer.weights, buffer.grads]
    size = arena.size
    result = dict(ms=list(ms), tokens=o.batch * n * T / ms[0] * 1e3, parameters=size)
    result["alone_ms"] = ranks.gather(float(others[0][0]) if others else ms[0])
    hyper = cp.asarray(optimizer.advance())
    factor = cp.ones(1, np.float32)

    def update():
        optimizer.clip(1.0) if zero else clip(model, 1.0)
        optimizer.apply(hyper, factor)

    result["optimizer_ms"] = alone(update, ranks, o.steps)
    if n > 1:
        state.append(run.parallel.collectives.half)
        if v["dp"] != "none":
            run.parallel.compare_weights(optimizer, run.done)
            result["comm_ms"] = alone(lambda: communicate(run), ranks, o.steps)
            width = 2 if v.get("grad_comm") == "bf16" else 4
            moved = size * width * (n - 1) / n
            if zero == 0:
                moved *= 2
            elif zero == 3:  # of layers alone, and the weights, too, twice
                moved *= sum(unit.weights.size for unit in arena.layers) / size
                moved *= 2 if o.precision == "bf16" else 3
            result["bus_gb_s"] = moved / result["comm_ms"] / 1e6
    result["state_bytes"] = sum(x.nbytes for x in state if x is not None) / size
    result["peak_gb"] = taken / 1e9
    if n > 1:
        run.close()
    return result


def communicate(run):
    """Run only the collectives of one backward pass, with ZeRO-3 those of a forward pass, too."""
    stage = run.parallel.stage
    collectives = run.parallel.collectives
    if run.parallel.zero == 3:
        layers = run.model.arena.layers
        for unit in layers:
            collectives.gather_shares(unit.weights, unit.master)
        for unit in reversed(layers):
            collectives.gather_shares(unit.weights, unit.master)
            collectives.sum_share(unit.grads, unit.summed, False)
        collectives.join()
        return
    slices = stage.slices
    start = getattr(stage, "start", collectives.all_reduce)
    if run.config.dp == "flat":
        slices = [(0, run.model.arena.grads.size)]
    if run.config.dp == "naive":
        slices = [(p.offset, p.offset + p.size) for _, p in run.model.storage()]
    for a, b in slices:
        start(a, b)
    collectives.join()


def worker(o: Options) -> None:
    import cupy as cp

    from xtrain.parallel.ranks import choose_gpu, connect
    from xtrain.parallel.watchdog import AbortOnError

    task = json.loads(o.worker)
    ranks = connect()
    with AbortOnError(ranks, "bench_ddp"):
        choose_gpu(ranks)
        for v in task["variants"]:
            result = one_variant(o, task["model"], v, ranks)
            if ranks.rank == 0:
                print("RESULT " + json.dumps({**v, **result}), flush=True)
            gc.collect()
            cp.get_default_memory_pool().free_all_blocks()


# ----------------------------------------------------------------------------- one rank of PyTorch
def torch_worker(o: Options) -> None:
    import torch
    from bench_train import BETAS, CLIP, DECAY, LR, model_config
    from torch_model import Model

    task = json.loads(o.worker)
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    n = torch.distributed.get_world_size()
    shape, _, T = model_config(task["model"])
    torch.manual_seed(0)
    model = Model(shape, T, padded=o.precision == "bf16").cuda()
    groups = [[p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    decay = [{"params": g, "weight_decay": d} for g, d in zip(groups, (DECAY, 0.0))]
    optimizer = torch.optim.AdamW(decay, lr=LR, betas=BETAS, fused=True)
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    forward = torch.compile(parallel if n > 1 else model)
    bf16 = torch.autocast("cuda", torch.bfloat16, enabled=o.precision == "bf16")
    loader = Batches(shape, o.batch, T, rank)

    def step():
        ids, targets = (
            torch.from_numpy(x).cuda(non_blocking=True).long() for x in loader.next_batch()
        )
        optimizer.zero_grad(set_to_none=True)
        with bf16:
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    for _ in range(5):  # compiles
        step()
    one = torch.ones(1, device="cuda")
    start = time.perf_counter()
    while one.item() == 1:  # all ranks stop when rank 0 does
        for _ in range(o.steps):
            step()
        one.fill_(time.perf_counter() - start < WARMUP)
        torch.distributed.broadcast(one, 0)
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(o.steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / o.steps)
    if rank == 0:
        ms = 1e3 * np.median(times)
        result = dict(ms=ms, tokens=o.batch * n * T / ms * 1e3)
        result["peak_gb"] = torch.cuda.max_memory_reserved() / 1e9
        print("RESULT " + json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------- the whole
def results(command, o, task):
    """Run one job -> the results that its rank 0 printed."""
    task_options = ["--precision", o.precision, "--batch", o.batch, "--steps", o.steps]
    task_options += ["--worker", json.dumps(task)]
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*map(str, command), str(here), *map(str, task_options)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    lines = [x[7:] for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    if done.returncode:
        print(
            f"{' '.join(map(str, command))} ended with {done.returncode}", done.stdout, flush=True
        )
    return [json.loads(line) for line in lines]


EXTRA = ("optimizer_ms", "comm_ms", "bus_gb_s", "state_bytes", "peak_gb")


def main(o: Options) -> None:
    from _timing import record

    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for name in o.models:
        one = torch_one = None
        for n in o.gpus:
            task = dict(model=name, variants=variants(o, n))
            ours = results(["mpirun", "-n", n, sys.executable], o, task)
            peer = None
            if o.against == "torch" and n in o.torch_gpus:
                peer = next(iter(results([*run, n], o, dict(task, torch=True))), None)
            silent = None
            if peer:
                if n == 1:
                    torch_one = peer["tokens"]
                peer["of_linear"] = torch_one and round(peer["tokens"] / n / torch_one, 4)
                print(
                    f"{name} {n} GPUs torch DDP + compile: {peer['tokens']:,.0f} tok/s, "
                    f"{peer['of_linear']} of linear",
                    flush=True,
                )
            for measured in ours:
                if n == 1:
                    one = measured["tokens"]
                if measured["dp"] == "none":
                    silent = measured["ms"][0]
                fields = {k: round(measured[k], 4) for k in EXTRA if k in measured}
                by_itself = measured["alone_ms"]
                fields["alone_ms"] = [round(ms, 4) for ms in by_itself]
                if silent and measured["dp"] != "none":
                    fields["exposed_ms"] = round(measured["ms"][0] - silent, 4)
                fields["of_linear"] = round(
                    n / measured["ms"][0] / sum(1 / ms for ms in by_itself), 4
                )
                if one:
                    fields["of_one_gpu"] = round(measured["tokens"] / n / one, 4)
                if peer and (n == 1 or measured["dp"] != "none"):
                    fields |= {"peer": "torch DDP + compile", "peer_value": peer["tokens"]}
                    fields["peer_of_linear"] = peer["of_linear"]
                variant = label(measured) if n > 1 else "one GPU"
                record(
                    "bench_ddp",
                    f"{name}, {n} GPU, {variant}",
                    shape=f"batch {o.batch} per GPU",
                    dtype=o.precision,
                    ms=measured["ms"][0],
                    value=measured["tokens"],
                    unit="tok/s",
                    **fields,
                )
                print("   ", fields, flush=True)


if __name__ == "__main__":
    chosen = tyro.cli(Options, description=__doc__)
    if not chosen.worker:
        main(chosen)
    elif json.loads(chosen.worker).get("torch"):
        torch_worker(chosen)
    else:
        worker(chosen)
