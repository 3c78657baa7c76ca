"""A model that does not fit on one GPU, trained with --zero 3: memory of each GPU, planned and measured.

    mpirun -n 2 python bench/bench_zero3.py
    mpirun -n 2 python bench/bench_zero3.py --batch 2 --seq-len 2048 --transport nccl

Llama-3.1-8B's shape by default, bf16, activation checkpointing of blocks, random weights and tokens.
The memory of a GPU is what the driver says is in use, the CUDA context and NCCL's buffers included,
after all steps: the memory pools keep what they have reserved.
"""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import tyro


@dataclass
class Options:
    layers: int = 32
    batch: int = 1  # sequences per GPU
    seq_len: int = 4096
    steps: int = 6  # timed ones, after as many for warm-up
    transport: Literal["auto", "nccl", "copy"] = "auto"
    recompute: Literal["none", "attention", "block"] = "block"
    graph: bool = True


def main(o: Options) -> None:
    import cupy as cp
    from _shapes import LLAMA_8B
    from _timing import record
    from bench_ddp import Batches

    from xtrain.config import ModelConfig, TrainConfig
    from xtrain.device import to_numpy
    from xtrain.nn.model import Transformer
    from xtrain.nn.sharded_arena import Share
    from xtrain.parallel.ddp import DataParallel
    from xtrain.parallel.ranks import choose_gpu, connect
    from xtrain.parallel.watchdog import AbortOnError
    from xtrain.training import memory_plan
    from xtrain.training.run import Run
    from xtrain.training.zero_plan import zero3

    ranks = connect()
    with AbortOnError(ranks, "bench_zero3"):
        choose_gpu(ranks)
        free, total = cp.cuda.runtime.memGetInfo()
        others = total - free  # in use before, this process's context included
        shape = ModelConfig(**LLAMA_8B | {"n_layers": o.layers, "max_seq_len": o.seq_len})
        plan = memory_plan.plan(shape, o.batch, o.seq_len, "bf16", o.recompute, steps=1)
        planned = zero3(plan, shape, "bf16", ranks.world) + memory_plan.OUTSIDE
        share = Share(ranks.rank, ranks.world)
        options = "gpu", "bf16", o.recompute, ranks.world
        model = Transformer(shape, None, *options, share=share)
        random = cp.random.default_rng(ranks.rank)
        for unit in model.arena.units:
            unit.master[...] = 1
            if unit.parameters[0].decay:
                unit.master[...] = random.standard_normal(unit.master.size, dtype=cp.float32)
                unit.master *= 0.02
        cp.get_default_memory_pool().free_all_blocks()
        kind = dict(batch=o.batch * ranks.world, micro_batch=o.batch, seq_len=o.seq_len)
        kind |= dict(steps=10**6, lr=1e-4, warmup=10, zero=3, transport=o.transport, graph=o.graph)
        corpus = SimpleNamespace(loader=lambda *_: Batches(shape, o.batch, o.seq_len, ranks.rank))
        run = Run(TrainConfig(recompute=o.recompute, **kind), model, corpus, DataParallel(ranks))
        losses = []
        for _ in range(max(3, o.steps)):
            losses.append(run.step().loss)
        cp.cuda.Device().synchronize()
        ranks.sum([0.0])  # a barrier
        start = time.perf_counter()
        for _ in range(o.steps):
            losses.append(run.step().loss)
        cp.cuda.Device().synchronize()
        seconds = (time.perf_counter() - start) / o.steps
        run.parallel.compare_weights(run.optimizer, run.done)
        free, _ = cp.cuda.runtime.memGetInfo()
        used = ranks.gather((total - free) / 1e9)
        sums = ranks.sum([float(to_numpy(loss)[0]) for loss in losses])
        if ranks.rank == 0:
            tokens = o.batch * ranks.world * o.seq_len
            how = f"{type(run.parallel.collectives).__name__}, graph {o.graph}"
            print(f"loss {sums[0]:.4f} -> {sums[-1]:.4f}; {others / 1e9:.2f} GB in use before")
            record(
                "bench_zero3",
                f"Llama-3.1-8B's shape with {o.layers} layers, {ranks.world} GPU, ZeRO-3, {how}",
                shape=f"{o.batch} x {o.seq_len} per GPU",
                dtype="bf16",
                ms=1e3 * seconds,
                value=tokens / seconds,
                unit="tok/s",
                peak_gb=round(max(used), 2),
                planned_gb=round(planned / 1e9, 2),
                recompute=o.recompute,
                parameters=model.arena.size,
                first_loss=round(sums[0], 4),
                last_loss=round(sums[-1], 4),
            )
        run.close()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
