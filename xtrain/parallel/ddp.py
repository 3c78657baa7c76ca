"""Data parallel training on several ranks: five ways to sum gradients over them, from the simplest
to the fastest."""

import contextlib
import functools
import platform
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from .. import version
from ..config import ResolvedConfig
from ..device import Array, resolve_device, synchronize, to_numpy
from ..errors import UserError
from ..formats import saved_runs
from ..kernels.elementwise import add_fwd
from ..kernels.experts.load_balance import add_counts
from ..kernels.runtime.launch import zeros
from ..nn.autograd import Tensor
from ..nn.model import Transformer
from ..nn.modules import Parameter
from ..nn.optim import OPTIMIZERS, AdamW
from ..nn.sharded_arena import ShardedArena
from ..run_options import RunOptions, option_name
from ..training import checkpoint
from ..training.run import Run
from ..training.single_device import SingleDevice
from .collectives import HostCollectives, Slices, load_nccl
from .copy_collectives import gpu_collectives
from .gathering import Gathered, Gathering
from .ranks import Ranks, choose_gpu
from .watchdog import AbortOnError, Watchdog
from .zero import ShardedAdamW, ShardedMuon, cut, whole_matrices
from .zero3 import Zero3AdamW


# ----------------------------------------------------------------------------- gradients of all ranks
class NoSync:
    """none: backward without communication. The base class of the other stages.

    slices: ranges [start, end) of the arena, each communicated separately.
    zero: reduce-scatter them (ZeRO-1).
    """

    def __init__(self, model: Transformer, collectives: Any, slices: Slices, zero: bool):
        self.model = model
        self.collectives = collectives
        self.slices = slices
        self.zero = zero

    def backward(self, loss: Tensor, last: bool) -> None:
        """Run backward of one micro-batch.

        After the last one, gradients are sums over the ranks (with ZeRO: where owned).
        """
        loss.backward()


class Naive(NoSync):
    """One all-reduce after the other. The specification: the other stages are tested and measured
    against it."""

    def backward(self, loss, last):
        loss.backward()
        if last:
            self.model.arena.zero_unwritten_grads()  # the collectives read its memory
            for _, p in self.model.storage():
                self.collectives.all_reduce(p.offset, p.offset + p.size, idle=True)
                self.collectives.join()


class Flat(NoSync):
    """A single all-reduce. The arena is one array, so nothing has to be packed."""

    def backward(self, loss, last):
        loss.backward()
        if last:
            self.collectives.all_reduce(0, self.model.arena.grads.size, idle=True)
            self.collectives.join()


class Overlap(NoSync):
    """A slice of the arena, here one parameter, is sent as soon as all its gradients are complete.

    When is a gradient complete? A parameter may be used several times (a tied embedding is), so the
    first backward counts how often each gradient is added to; from the second on, a gradient is
    complete at that count, or, of a parameter that the first one did not reach, at the end.

    All ranks start the slices in the order in which the first backward of rank 0 completed them,
    because collectives are matched by their order. A slice that is complete earlier waits: on a
    rank whose backward skips a parameter others may be.
    """

    def __init__(self, model, collectives, slices, zero):
        super().__init__(model, collectives, slices, zero)
        self.choose_slices()
        # parameter -> additions to its gradient in the first backward
        self.uses: Counter[Parameter] = Counter()
        self.order: list[int] = []  # of the slices; empty before the first backward
        self.slices_of: dict[Parameter, list[int]] = {}
        for _, p in model.storage():
            overlapping = [a < p.offset + p.size and p.offset < b for a, b in self.slices]
            self.slices_of[p] = [i for i, yes in enumerate(overlapping) if yes]
            p.on_gradient = self.added

    def choose_slices(self) -> None:
        """Set `slices`, and `start`, the collective for one of them."""
        self.slices = [(p.offset, p.offset + p.size) for _, p in self.model.storage()]
        self.start = self.collectives.all_reduce

    def backward(self, loss, last):
        # parameter -> additions so far; the order of the keys is that of the last ones
        self.seen: Counter[Parameter] = Counter()
        self.waiting = deque(self.order or range(len(self.slices)))  # slices to start
        # slice -> its parameters that are not complete
        self.incomplete = Counter(i for slices in self.slices_of.values() for i in slices)
        self.sending = last and bool(self.order)
        self.additions_left = 0
        if self.sending:
            self.additions_left = sum(self.uses.values())
        loss.backward()
        if last:
            self.model.arena.zero_unwritten_grads()  # the collectives read its memory
            # in the first step all slices, later those that backward did not reach
            for i in self.waiting:
                self.start(*self.slices[i], idle=True)
            self.collectives.join()
            if not self.order:  # on all ranks, also where backward reached nothing
                self.uses = self.seen
                self.order = self.collectives.ranks.on_rank_0(self.order_of_completion)

    def order_of_completion(self) -> list[int]:
        """Return the slices in the order in which backward has completed them, last those that it
        did not reach."""
        at = {i: k for k, p in enumerate(self.seen) for i in self.slices_of[p]}
        missing = self.slices_of.keys() - self.seen.keys()
        unreached = {i for p in missing for i in self.slices_of[p]}
        return sorted(range(len(self.slices)), key=lambda i: (i in unreached, at.get(i, 0)))

    def added(self, p: Parameter) -> None:
        """Autograd calls this after every addition to p's gradient."""
        self.seen[p] = self.seen.pop(p, 0) + 1
        if not self.sending or p not in self.uses:
            return
        if self.seen[p] > self.uses[p]:
            raise RuntimeError(
                f"a parameter of shape {p.shape} is used more often than in the first step, after "
                "its gradient was sent: use --dp flat"
            )
        self.additions_left -= 1
        if self.seen[p] == self.uses[p]:
            for i in self.slices_of[p]:
                self.incomplete[i] -= 1
            while self.waiting and self.incomplete[self.waiting[0]] == 0:
                i = self.waiting.popleft()
                self.start(*self.slices[i], idle=self.additions_left == 0)
        self.collectives.progress()


class Bucket(Overlap):
    """The slices have one size and are cut from the end of the arena, where backward begins. With
    ZeRO: reduce-scatter."""

    def choose_slices(self):
        if self.zero:
            self.start = self.collectives.reduce_scatter
        else:
            self.start = self.collectives.all_reduce


STAGES = {"none": NoSync, "naive": Naive, "flat": Flat, "overlap": Overlap, "bucket": Bucket}


def buckets(n_decay: int, size: int, world: int, nbytes: float) -> Slices:
    """Cut both regions of the arena, [0, n_decay) and [n_decay, size), into slices of about nbytes
    bytes.

    Each region is cut from its end, and `world` ranks can divide every slice evenly.
    """
    return cut(n_decay, size, world, nbytes) + cut(0, n_decay, world, nbytes)


# ----------------------------------------------------------------------------- a step on several ranks
class DataParallel(SingleDevice):
    """Every rank computes its share of the batch; the gradients are summed, and every rank makes
    the same update.

    guard: receives a function that returns the current step, for its error message.
    stage: how gradients are summed, one of STAGES.
    collectives: how arrays are communicated.
    """

    ranks: Ranks
    watchdog: Watchdog | None = None

    def __init__(self, ranks: Ranks, guard: AbortOnError | None = None):
        self.ranks = ranks
        self.guard = guard

    # ------------------------------------------------------------------------- the course of a run
    def begin(self, config: RunOptions) -> None:
        options = {option_name(key): value for key, value in asdict(config).items()}
        options["--device"] = resolve_device(config.device)
        versions = {
            "xtrain": version.VERSION,
            "numpy": np.__version__,
            "Python": platform.python_version(),
        }
        self.ranks.check_same(versions | options, "the same version and the same options")
        if self.guard is not None:
            self.guard.set_watchdog(options["--watchdog"])
        if options["--device"] == "gpu":
            load_nccl()
            choose_gpu(self.ranks)

    def check_data(self, corpus: Any) -> None:
        hashes = {"text": corpus.sha256[:16], "tokenizer": corpus.tokenizer.sha256[:16]}
        needed = "the same --data and the same tokenizer (these are their sha256)"
        self.ranks.check_same(hashes, needed)

    def attach(self, config: ResolvedConfig, model: Transformer) -> None:
        super().attach(config, model)
        ranks = self.ranks
        arena = model.arena
        bf16 = config.grad_comm == "bf16"
        nbytes = config.bucket_mb * 2**20
        self.sharded = config.sharded
        self.zero = config.zero_stage
        self.collectives: Any
        if model.device == "gpu":
            self.collectives = gpu_collectives(ranks, arena, bf16, config.transport)
        else:
            self.collectives = HostCollectives(ranks, arena, bf16)
        if isinstance(arena, ShardedArena):
            self.gathering = Gathering(model, self.collectives, self.report_progress)
            self.stage: Any = Gathered(self.gathering)
        elif config.zero == 3:
            raise UserError("--zero 3 needs a model that was made for it: use --zero 1")
        elif config.sharded and config.optimizer == "muon":
            self.slices, self.collectives.pieces = whole_matrices(model, ranks.world, nbytes)
        else:
            self.slices = buckets(arena.n_decay, arena.grads.size, ranks.world, nbytes)
        if config.zero != 3:
            self.stage = STAGES[config.dp](model, self.collectives, self.slices, config.sharded)
        self.losses: list[Array] = []  # of this rank's micro-batches in the current step
        self.all_losses: Array = None  # of all ranks
        self.largest: Array = None  # in fp8: the largest number of each matrix on each rank
        c = model.config
        self.loads: Array = None  # with biases of routers: the load of the experts of each rank
        if c.expert_bias:
            if config.sharded:
                raise UserError(
                    f"--expert-bias is not supported with --zero {self.zero}: give --zero 0"
                )
            numbers = sum(c.has_experts(i) for i in range(c.n_layers)) * c.n_experts
            width = -(-numbers // 4) * 4  # whole units of 16 bytes
            self.loads = zeros(arena.grads, ranks.world * width, np.int32)
            self.collectives.register(self.loads)
        if model.fp8 is not None:
            self.largest = model.fp8.divide(ranks.rank, ranks.world)
            self.collectives.register(self.largest)

    def watch(self, run: Run) -> Watchdog:
        # among these are checksums of the teacher's and the reference's weights
        options = {*self.config.resume_keys(), "precision"}
        values = run.resume_options().items()
        self.ranks.check_same({option_name(k) if k in options else k: v for k, v in values})
        # the same seed and libraries must have given the same weights
        self.compare_weights(run.optimizer, 0)
        step_in_progress = lambda: run.done + 1
        self.watchdog = Watchdog(self.config.watchdog, self.ranks, step_in_progress)
        if self.guard is not None:
            self.guard.step = step_in_progress
        return self.watchdog

    def report_progress(self) -> None:
        if self.watchdog is not None:
            self.watchdog.beat()

    def stop_watchdog(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()

    def close(self) -> None:
        synchronize(self.model.device)
        self.collectives.close()

    # ------------------------------------------------------------------------- in the step
    def backward(self, loss: Tensor, last: bool) -> None:
        self.losses.append(loss.data.reshape(1))
        if last:  # the losses are gathered while backward computes
            self.all_losses = self.collectives.start_gather(functools.reduce(add_fwd, self.losses))
            self.losses.clear()
        self.stage.backward(loss, last)
        if last and self.largest is not None:
            self.collectives.all_gather(self.largest, 0, self.largest.size)
            self.collectives.join()

    def clip(self, optimizer: AdamW, max_norm: float) -> tuple[Array, Array]:
        if isinstance(optimizer, ShardedAdamW):
            return optimizer.clip(max_norm)
        return super().clip(optimizer, max_norm)

    def gather_norm_and_loss(self, norm: Array, loss: Array) -> tuple[Array, Array]:
        if self.config.dp == "none":  # every rank has a different norm
            norm = self.collectives.gather_1(norm)
            self.collectives.join()
        return norm, self.all_losses

    def sum_load(self, load_LE: Array) -> None:
        if load_LE.size:
            own_N = load_LE.reshape(-1)
            loads_RN = self.loads.reshape(self.ranks.world, -1)[:, : own_N.size]
            loads_RN[self.ranks.rank][...] = own_N
            self.collectives.all_gather(self.loads, 0, self.loads.size)
            self.collectives.join()
            own_N.fill(0)
            for load_N in loads_RN:
                add_counts(own_N, load_N)

    # ------------------------------------------------------------------------- between steps
    def check_identical(self, optimizer: AdamW, step: int) -> None:
        """Every --check-ranks steps."""
        every = self.config.check_ranks
        if every and step % every == 0:
            self.compare_weights(optimizer, step)

    def compare_weights(self, optimizer: AdamW, step: int) -> None:
        """Raises UserError, on every rank, if the ranks do not hold the same weights and in fp8
        scales, bit for bit.

        With ZeRO also if a rank's weights or moments have changed between two updates.
        """
        fp8 = self.model.fp8
        arena = self.model.arena
        arrays = [arena.weights]
        if isinstance(optimizer, ShardedAdamW):
            arrays = optimizer.in_use()
            changed = self.ranks.gather(bool(to_numpy(optimizer.changed)[0]))
            if any(changed):
                before = max(0, step - self.config.check_ranks)
                raise UserError(
                    f"after step {step} weights or optimizer state of rank {changed.index(True)} "
                    "are not what its last update "
                    f"wrote ({sum(changed)} of {self.ranks.world} ranks; checked every "
                    f"{self.config.check_ranks} steps): check "
                    f"that machine's memory, and resume from a checkpoint of step {before} or "
                    "earlier"
                )
        if isinstance(arena, ShardedArena):
            arrays.append(arena.assigned())
        self.ranks.check_identical(arrays + ([] if fp8 is None else [fp8.scale_S]), step)

    def sum_over_owners(self, values: list[float]) -> list[float]:
        if self.sharded:
            return self.ranks.sum(values)
        return values

    def timing(self, tokens_per_s: float) -> dict[str, Any]:
        world = self.ranks.world
        collectives = self.collectives
        timing: dict[str, Any] = {"ranks": world, "tokens_per_s_rank": tokens_per_s / world}
        if collectives.exposed is not None:
            times = [1e3 * collectives.exposed, 1e3 * collectives.hidden]
            exposed, hidden = self.ranks.sum(times)
            timing |= {"comm_exposed_ms": exposed / world, "comm_hidden_ms": hidden / world}
        collectives.clear()
        return timing

    # ------------------------------------------------------------------------- optimizer state
    def make_optimizer(self, name: str, **options: Any) -> AdamW:
        if not self.sharded:
            return OPTIMIZERS[name](self.model, **options)
        share: dict[str, Any] = dict(
            collectives=self.collectives, guarded=self.config.check_ranks > 0
        )
        if self.zero == 3:
            return Zero3AdamW(self.model, gathering=self.gathering, **share, **options)
        kind = {"adamw": ShardedAdamW, "muon": ShardedMuon}[name]
        return kind(self.model, slices=self.slices, **share, **options)

    @contextlib.contextmanager
    def full_moments(self, optimizer: AdamW) -> Iterator[Any]:
        """On rank 0; the other ranks must enter it as well."""
        if not isinstance(optimizer, ShardedAdamW):
            yield optimizer
            return
        optimizer.restore()
        yield optimizer.gather_moments(self.report_progress)
        optimizer.release()

    def load(self, saved: saved_runs.Saved, optimizer: AdamW) -> None:
        if not isinstance(optimizer, ShardedAdamW):
            super().load(saved, optimizer)
            return
        optimizer.restore()
        checkpoint.load(saved, self.model, optimizer)
        optimizer.summed_version = -1
        optimizer.release()
