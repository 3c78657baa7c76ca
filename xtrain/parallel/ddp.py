"""A training run on several ranks: five ways to add up gradients, from the simplest to the fastest."""

import contextlib
import functools
import gc
import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from rich.console import Console

from ..config import TrainConfig
from ..data.dataset import Corpus
from ..device import Array, resolve_device, synchronize
from ..errors import UserError
from ..files import digest
from ..formats.manifest import MANIFEST
from ..kernels.cross_entropy import IGNORE
from ..kernels.elementwise import add_fwd
from ..nn.autograd import Tensor
from ..nn.model import Transformer
from ..nn.modules import Parameter, arena_unit
from ..nn.optim import AdamW
from ..training import checkpoint
from ..training.loop import train
from ..training.run import Run
from ..training.single_process import Alone
from .collectives import HostCollectives, load_nccl
from .copy_collectives import gpu_collectives
from .ranks import Ranks, choose_gpu
from .watchdog import AbortOnError, Watchdog
from .zero import ShardedAdamW, Slices

LONGEST_WATCHDOG = 10**8  # seconds, three years; the system's timers end at some 10^10


@dataclass(frozen=True)
class ParallelConfig(TrainConfig):
    """One training run on several ranks."""

    # how gradients are added up
    dp: Literal["none", "naive", "flat", "overlap", "bucket"] = "bucket"
    # 1: the optimizer is divided among the ranks (ZeRO-1); none: 1 with --dp bucket, else 0
    zero: Literal[0, 1] | None = None
    bucket_mb: float = 32.0  # MiB of float32 gradients in one message
    grad_comm: Literal["fp32", "bf16"] = "fp32"  # what gradients travel in
    # between GPUs: NCCL's kernels, or copy engines (one machine; auto: where possible)
    transport: Literal["auto", "nccl", "copy"] = "auto"
    check_ranks: int = 0  # compare all ranks' parameters every so many steps; 0: never
    watchdog: float = 600.0  # seconds without a step after which a rank counts as hanging; 0: never

    def validate(self) -> None:
        """Raises UserError on a value that makes no sense."""
        super().validate()
        if not 0 < self.bucket_mb < float("inf"):
            raise UserError(f"--bucket-mb must be a positive number, got {self.bucket_mb}")
        if self.check_ranks < 0:
            raise UserError(f"--check-ranks must not be negative, got {self.check_ranks}")
        if not 0 <= self.watchdog <= LONGEST_WATCHDOG:
            raise UserError(
                f"--watchdog must be between 0 (never) and {LONGEST_WATCHDOG} seconds, got {self.watchdog}"
            )
        if self.sharded and self.dp == "none":
            raise UserError(
                "--zero 1 needs the gradients of all ranks: choose another --dp than none"
            )

    @property
    def sharded(self) -> bool:
        """ZeRO-1? It saves memory, and with buckets time: each rank updates only its part, and sends half the bytes."""
        return self.dp == "bucket" if self.zero is None else bool(self.zero)


# ----------------------------------------------------------------------------- the gradients of all ranks
class NoSync:
    """none: backward, and nothing else."""

    def __init__(self, model: Transformer, collectives: Any, pieces: Slices, zero: bool):
        self.model, self.collectives, self.pieces, self.zero = model, collectives, pieces, zero

    def backward(self, loss: Any, last: bool) -> None:
        """Backward of one micro-batch. After the last one the gradients are sums over the ranks (with ZeRO: where owned)."""
        loss.backward()


class Naive(NoSync):
    """One all-reduce after the other. Everything else is measured, and tested, against this."""

    def backward(self, loss, last):
        loss.backward()
        if last:
            self.model.arena.settle()  # the collectives read its memory
            for _, p in self.model.storage():
                self.collectives.all_reduce(p.offset, p.offset + p.size, idle=True)
                self.collectives.join()


class Flat(NoSync):
    """The arena is one array already: nothing has to be packed."""

    def backward(self, loss, last):
        loss.backward()
        if last:
            self.collectives.all_reduce(0, self.model.arena.grads.size, idle=True)
            self.collectives.join()


class Overlap(NoSync):
    """A piece of the arena travels as soon as all its gradients are complete.

    When is a gradient complete? A parameter may be used several times (a tied embedding is), so the first backward
    counts how often each gradient is added to; from the second on, a parameter is complete at that number.
    """

    def __init__(self, model, collectives, pieces, zero):
        super().__init__(model, collectives, pieces, zero)
        self.cut()
        self.uses: Counter | None = None  # parameter -> additions in one backward
        self.pieces_of: dict[Parameter, list[int]] = {}
        for _, p in model.storage():
            overlapping = [a < p.offset + p.size and p.offset < b for a, b in self.pieces]
            self.pieces_of[p] = [i for i, yes in enumerate(overlapping) if yes]
            p.on_gradient = self.added

    def cut(self) -> None:
        """Which pieces, and what to do with one."""
        self.pieces = [(p.offset, p.offset + p.size) for _, p in self.model.storage()]
        self.start = self.collectives.all_reduce

    def backward(self, loss, last):
        self.seen: Counter = Counter()
        self.missing = Counter(i for pieces in self.pieces_of.values() for i in pieces)
        self.sending = last and self.uses is not None
        self.to_come = sum(self.uses.values()) if self.sending else 0  # additions
        loss.backward()
        if last:
            self.model.arena.settle()  # the collectives read its memory
            for i in sorted(+self.missing):  # all, the first time; else what backward did not reach
                self.start(*self.pieces[i], idle=True)
            self.collectives.join()
            self.uses = self.uses or self.seen

    def added(self, p: Parameter) -> None:
        """Called by autograd whenever something was added to p's gradient."""
        self.seen[p] += 1
        if not self.sending:
            return
        if self.seen[p] > self.uses[p]:
            raise RuntimeError(
                f"a parameter of shape {p.shape} is used more often than in the first step: its gradient was on its "
                "way already; use --dp flat"
            )
        self.to_come -= 1
        if self.seen[p] == self.uses[p]:
            for i in self.pieces_of[p]:
                self.missing[i] -= 1
                if self.missing[i] == 0:
                    self.start(*self.pieces[i], idle=self.to_come == 0)
        self.collectives.progress()


class Bucket(Overlap):
    """The pieces are slices of one size, cut from the arena's end, where backward begins. With ZeRO, each is scattered."""

    def cut(self):
        self.start = self.collectives.reduce_scatter if self.zero else self.collectives.all_reduce


STAGES = {"none": NoSync, "naive": Naive, "flat": Flat, "overlap": Overlap, "bucket": Bucket}


def buckets(n_decay: int, size: int, world: int, nbytes: float) -> Slices:
    """Cut the arena's two regions, from their ends, into slices of about nbytes that `world` ranks can divide evenly."""
    unit = arena_unit(world)
    step = max(1, round(nbytes / 4 / unit)) * unit
    cut = lambda a, b: [(max(a, end - step), end) for end in range(b, a, -step)]
    return cut(n_decay, size) + cut(0, n_decay)


# ----------------------------------------------------------------------------- the run
class ParallelRun(Run):
    """A Run whose step is shared by all ranks. Rank 0 alone samples and writes."""

    def __init__(self, config: ParallelConfig, model: Transformer, corpus: Corpus, ranks: Ranks):
        arena, gpu = model.arena, model.device == "gpu"
        bf16 = config.grad_comm == "bf16"
        if gpu:
            self.collectives = gpu_collectives(ranks, arena, bf16, config.transport)
        else:
            self.collectives = HostCollectives(ranks, arena, bf16)
        nbytes = config.bucket_mb * 2**20
        self.pieces = buckets(arena.n_decay, arena.grads.size, ranks.world, nbytes)
        stage, self.losses = STAGES[config.dp], []
        self.sync = stage(model, self.collectives, self.pieces, config.sharded)
        super().__init__(config, model, corpus, ranks)

    def make_optimizer(self) -> AdamW:
        c = self.config
        options = dict(lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay)
        if c.sharded:
            return ShardedAdamW(self.model, self.collectives, self.pieces, **options)
        return AdamW(self.model, **options)

    def step(self) -> tuple[Any, Any, float]:
        """One optimizer step. -> this rank's share of the loss, the gradient norm of all, learning rate."""
        self.beat()
        out = super().step()
        if self.config.check_ranks and self.done % self.config.check_ranks == 0:
            self.check_ranks()
        return out

    def next_batch(self) -> tuple[np.ndarray, ...]:
        """-> ids, targets (batch / world, T), 1 / number of targets of the whole batch (1,)"""
        ids, targets = self.loader.next_batch()
        (count,) = self.ranks.total([np.count_nonzero(targets != IGNORE)])
        return ids, targets, np.array([1 / count if count else 0], np.float32)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.losses.append(loss.data.reshape(1))
        if last:  # its way to the other ranks is hidden by backward
            self.all_losses = self.collectives.start_gather(functools.reduce(add_fwd, self.losses))
            self.losses.clear()
        self.sync.backward(loss, last)

    def clip(self) -> tuple[Array, Array]:
        return self.optimizer.clip(self.config.clip) if self.config.sharded else super().clip()

    def of_all(self, norm: Array, loss: Array) -> tuple[Array, Array]:
        if self.config.dp == "none":
            norm = self.collectives.gather_1(norm)
            self.collectives.join()
        return norm, self.all_losses

    def close(self) -> None:
        """The end: captured steps first, then the communicator that they use."""
        self.on_device = None
        gc.collect()
        synchronize(self.model.device)
        self.collectives.close()

    def check_ranks(self) -> None:
        """Raises UserError, on every rank, when they do not hold the same bits."""
        weights = self.optimizer.in_use() if self.config.sharded else [self.model.arena.weights]
        self.ranks.check_identical(weights, self.done)

    def timing(self, speed: float) -> dict[str, Any]:
        more = {"ranks": self.ranks.world, "tokens_per_s_rank": speed / self.ranks.world}
        if self.collectives.exposed is not None:
            mine = [1e3 * self.collectives.exposed, 1e3 * self.collectives.hidden]
            exposed, hidden = self.ranks.total(mine)
            more |= {"comm_exposed_ms": exposed / self.ranks.world}
            more |= {"comm_hidden_ms": hidden / self.ranks.world}
        self.collectives.clear()
        return more

    def layer_squares(self) -> dict[str, float]:
        mine = super().layer_squares()  # with ZeRO of the owned parts
        sums = self.ranks.total(list(mine.values())) if self.config.sharded else mine.values()
        return dict(zip(mine, sums))

    def sample(self) -> str:
        self.beat()
        return super().sample() if self.ranks.rank == 0 else ""

    def snapshot(self, logs: dict[str, int]) -> checkpoint.Snapshot | None:
        """On rank 0; every rank must call it."""
        self.beat()
        optimizer, zero = self.optimizer, self.config.sharded
        if zero:
            optimizer.restore()
        moments = optimizer.gather_moments() if zero else optimizer
        snapshot = self.take(moments, logs) if self.ranks.rank == 0 else None
        if zero:
            optimizer.release()
        return snapshot

    def load(self, saved: checkpoint.Saved) -> None:
        # rank 0 has verified what it sees: does everybody see that?
        manifest = saved.folder / MANIFEST
        seen = f"with manifest {digest(manifest)}" if manifest.is_file() else "without a manifest"
        self.ranks.check_same({str(saved.folder): seen}, "to see the same --out")
        if not self.config.sharded:
            return super().load(saved)
        m, v = (np.zeros(self.model.arena.grads.shape, np.float32) for _ in range(2))
        whole = SimpleNamespace(m=m, v=v, t=0)
        self.optimizer.restore()
        checkpoint.load(saved, self.model, whole)
        self.optimizer.set_moments(whole)
        self.optimizer.release()


# ----------------------------------------------------------------------------- the command line
def train_parallel(
    config: ParallelConfig,
    ranks: Ranks,
    console: Console | None = None,
    guard: AbortOnError | None = None,
    write_report: Callable[..., Any] = lambda folder, run, warn: None,
) -> Path:
    """A whole run on all ranks, each of which calls this. -> its folder. Raises UserError."""
    if ranks.world == 1:
        config.validate()
        plain = {f.name: getattr(config, f.name) for f in fields(TrainConfig)}
        return train(TrainConfig(**plain), console, write_report=write_report)
    check_ranks_agree(config, ranks)
    if resolve_device(config.device) == "gpu":
        load_nccl()
        choose_gpu(ranks)
    else:
        divide_cores(ranks)
    runs = []
    with contextlib.ExitStack() as stack:

        def make_run(config: ParallelConfig, model: Transformer, corpus: Corpus, ranks: Alone):
            text = {"text": corpus.sha256[:16], "tokenizer": corpus.tokenizer.sha256[:16]}
            ranks.check_same(
                text, "the same --data and the same tokenizer (these are their sha256)"
            )
            run = ParallelRun(config, model, corpus, ranks)
            run.check_ranks()  # the same seed and libraries have made the same weights
            now = lambda: run.done + 1
            watchdog = stack.enter_context(Watchdog(config.watchdog, ranks, now))
            run.beat, run.rest = watchdog.beat, watchdog.stop
            if guard is not None:
                guard.step = now
            runs.append(run)
            return run

        folder = train(config, console, ranks, make_run, write_report)
    runs[0].close()  # not after an error: NCCL might wait for a rank that is gone
    return folder


def check_ranks_agree(config: ParallelConfig, ranks: Ranks) -> None:
    """Raises UserError, on every rank, when versions, options or kind of device are not the same."""
    from .. import __version__

    options = {f"--{key.replace('_', '-')}": value for key, value in asdict(config).items()}
    options["--device"] = resolve_device(config.device)
    versions = {"xtrain": __version__, "numpy": np.__version__, "Python": platform.python_version()}
    ranks.check_same(versions | options, "the same version and the same options")


def divide_cores(ranks: Ranks) -> None:
    """Each rank's matrix products get their share of the machine's cores; more threads than cores cost more than they give."""
    if {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threadpool_limits(max(1, (cores or 1) // ranks.local_world))
