"""ZeRO-1 (Rajbhandari et al. 2020): the optimizer state is divided among the ranks instead of being
on every rank.

Rank r owns the r-th shard of every slice (bucket) of the arena. A reduce-scatter gives it the sum
of that shard's gradients, it alone makes the AdamW update there, and an all-gather sends the new
weights to all ranks. That is the traffic of an all-reduce, which consists of the same two steps.
Bytes per parameter and rank, with R ranks:

                             weights    gradients    moments    bf16 copy
    fp32                     4          4            8                       16
    fp32, ZeRO-1             4          4            8 / R                   8 + 8 / R
    bf16                     4          4            8          2            18
    bf16, ZeRO-1             4 / R      4            8 / R      2            6 + 12 / R

Muon needs whole matrices: `whole_matrices` cuts slices between them and gives each to one rank, so
that every rank has about the same number of operations of Newton-Schulz. The rest of the arena is
divided as for AdamW, and the traffic is the same. A moving average of the weights is divided like
the moments.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..device import Array, cupy, is_gpu, to_numpy
from ..kernels.checksum import checksum, compare
from ..kernels.grad_norm import norm_and_factor, sum_of_squares
from ..kernels.muon import newton_schulz_flops
from ..kernels.runtime.launch import zeros
from ..nn.arena import arena_unit
from ..nn.model import Transformer
from ..nn.optim import AdamW, Muon, muon_matrices, parts_of
from .collectives import Pieces, Slices, equal_shards


class ShardedAdamW(AdamW):
    """AdamW on this rank's shard of every slice; the new weights of a slice are sent while the next
    one is computed.

    In fp32 the forward pass reads the float32 weights, so every rank has all of them. In bf16 it
    reads the bf16 copy and the few float32 norm weights, so these are sent, and only the optimizer
    needs the float32 weights of matrices: `release` keeps each only on its owner, `restore` gathers
    all of them for a checkpoint.

    slices: of the arena, each communicated separately.  own: of each slice, what this rank owns.
    master: (n,) float32, the weights of the owned shards, concatenated; None in fp32.
    norms: all norm weights.
    guarded: whether `changed` is kept up to date, for --check-ranks. What a rank owns exists once,
    so there is no other copy to compare it with; and the all-gather makes a wrong weight of its
    owner identical on all ranks.
    changed: (1,) int32, becomes 1 when weights or moments on this rank change between two updates.
    """

    def __init__(
        self,
        model: Transformer,
        collectives: Any,
        slices: Slices,
        guarded: bool = False,
        **options: Any,
    ):
        own = [collectives.own(model.arena.grads, a, b) for a, b in slices]
        super().__init__(model, **options, owned=[part for parts in own for part in parts])
        self.collectives = collectives
        self.slices = slices
        self.own = own
        self.master: Array = None
        self.norms: Array = None
        self.release()
        self.guarded = guarded
        arrays = len(self._state())
        self.sums, self.expected = (zeros(self.m, arrays, np.int64) for _ in range(2))
        self.changed = zeros(self.m, 1, np.int32)
        # of the arena, when `expected` was computed; -1: not for this state
        self.summed_version = -1

    def release(self) -> None:
        """In bf16: drop all float32 weights except the norms and this rank's shards."""
        arena = self.arena
        if arena.half is None or arena.weights is None:
            return
        arena.refresh()
        if self.master is None:  # allocated once: a captured step keeps using this memory
            self.master = zeros(arena.weights, self.m.shape)
            self.norms = zeros(arena.weights, arena.weights.size - arena.n_decay)
            self.collectives.register(self.norms)
        for start, end, first in self.owned_at():
            self.master[first : first + end - start] = arena.weights[start:end]
        self.norms[...] = arena.weights[arena.n_decay :]
        arena.weights = None
        for _, p in self.model.storage():
            offset: Any = p.offset  # set by the arena
            first = offset - arena.n_decay
            if p.decay:
                p._data = p.half
            else:
                p._data = self.norms[first : first + p.size].reshape(p.shape)
        if is_gpu(arena.half):
            # a captured step has a separate pool
            cupy().get_default_memory_pool().free_all_blocks()

    def restore(self) -> None:
        """Gather all float32 weights: the opposite of release. Every rank must call it."""
        arena = self.arena
        if arena.half is None or arena.weights is not None:
            return
        grads: Array = arena.grads
        arena.weights = zeros(grads, grads.shape)
        for start, end, first in self.owned_at():
            arena.weights[start:end] = self.master[first : first + end - start]
        for a, b in self.slices:
            self.collectives.all_gather(arena.weights, a, b)
        self.collectives.join()
        for _, p in self.model.storage():
            p._data = arena.weights[p.offset : p.offset + p.size].reshape(p.shape)

    def owned_weights(self) -> tuple[Array, bool]:
        """As AdamW.owned_weights."""
        if self.arena.weights is not None:
            return (self.arena.weights, False)
        return (self.master, True)

    def advance(self) -> np.ndarray:
        """As AdamW.advance. Weights that were assigned, or a state that was loaded, are no
        change."""
        fresh = self.summed_version != self.arena.version.count
        hyper = super().advance()  # starts a moving average
        if fresh:
            self._sum_state(self.expected)
        self.summed_version = self.arena.version.count
        return hyper

    def apply(self, hyper: Array, factor_1: Array | None = None) -> None:
        """As AdamW.apply, until all ranks have the new weights."""
        super().apply(hyper, factor_1)
        self.collectives.join()
        self._sum_state(self.expected)

    def update_owned(self, hyper_3: Array, factor_1: Array) -> None:
        """Update what this rank owns of each slice, then start the all-gather of its new
        weights."""
        first = 0
        n_decay = self.arena.n_decay
        excluded = self.excluded()
        for (a, b), own in zip(self.slices, self.own):
            for start, end in own:
                self.update_trained(start, end, first, hyper_3, factor_1, excluded)
                if self.master is not None and a >= n_decay:
                    norms = slice(start - n_decay, end - n_decay)
                    self.norms[norms] = self.weights(start, end, first)
                first += end - start
            if self.master is None:
                self.collectives.all_gather(self.arena.weights, a, b, idle=True)
            elif a < n_decay:
                self.collectives.all_gather(self.arena.half, a, b, idle=True)
            else:
                self.collectives.all_gather(self.norms, a - n_decay, b - n_decay, idle=True)

    def _state(self) -> list[Array]:
        """Return the arrays that only an update may change."""
        optional = [x for x in (self.master, self.ema) if x is not None]
        return [*self.in_use(), *optional, self.m, self.v]

    def _sum_state(self, sums_K: Array) -> None:
        """Compute the checksums, if guarded."""
        for k, array in enumerate(self._state() if self.guarded else []):
            checksum(array.view(np.int32), sums_K[k : k + 1])

    def _compare_state(self) -> None:
        """Set `changed`, if guarded and the checksums are not those after the last update."""
        if self.guarded:
            self._sum_state(self.sums)
            compare(self.sums, self.expected, self.changed)

    def in_use(self) -> list[Array]:
        """Return the weights that every rank must hold identically."""
        if self.master is None:
            return [self.arena.weights]
        half: Array = self.arena.half
        return [half[: self.arena.n_decay], self.norms]

    def clip(self, max_norm: float) -> tuple[Array, Array]:
        """As optim.clip. The sums of squares of the shards are added in the order of the ranks: the
        same bits on all."""
        # before gather_1: after it, other ranks may already send new weights here
        self._compare_state()
        square = sum_of_squares(*(self.gradients(*span) for span in self.owned_at()))
        stats = norm_and_factor(self.collectives.gather_1(square), max_norm)
        return stats[:1], stats[1:]

    def gather_moments(self, report_progress: Callable[[], None]) -> SimpleNamespace:
        """m, v and ema of the whole arena in host memory on rank 0 (None elsewhere), and t. Every
        rank must call it.

        report_progress: is called after each slice, which may take long between machines.
        """
        m = self._gathered(self.m, report_progress)
        v = self._gathered(self.v, report_progress)
        if self.ema is None:
            ema = None
        else:
            ema = self._gathered(self.ema, report_progress)
        return SimpleNamespace(m=m, v=v, ema=ema, t=self.t)

    def _gathered(self, own_n: Array, report_progress: Callable[[], None]) -> np.ndarray | None:
        """Return what the ranks own, as in the arena, on rank 0: one slice after the other, so that
        no message is large."""
        ranks = self.collectives.ranks
        whole: Any = None
        if ranks.rank == 0:
            whole = np.zeros(self.arena.size, np.float32)
        first = 0
        for (a, b), own in zip(self.slices, self.own):
            n = sum(end - start for start, end in own)
            parts = ranks.gather_on_rank_0(to_numpy(own_n[first : first + n]))
            first += n
            report_progress()
            for rank, part_n in enumerate(parts or ()):
                at = 0
                for start, end in self.collectives.own(self.arena.grads, a, b, rank):
                    whole[start:end] = part_n[at : at + end - start]
                    at += end - start
        return whole


class ShardedMuon(Muon, ShardedAdamW):
    """Muon on this rank's matrices, AdamW on its shards of the rest. slices: of
    `whole_matrices`."""


def whole_matrices(model: Transformer, world: int, nbytes: float) -> tuple[Slices, Pieces]:
    """Return slices that cover the arena, the last ones first; and of those that are not divided
    evenly, the pieces.

    A piece of a slice with matrices of Muon is one of them, with the gap behind it. Such a slice
    has about nbytes bytes, but at least as many pieces as there are ranks: with copy engines its
    ranks copy at the same time. The largest pieces of a slice are given away first, each to the
    rank that has the fewest operations so far.
    """
    arena = model.arena
    ours = muon_matrices(model)
    ordered = sorted((p for _, p in model.storage()), key=lambda p: p.offset)
    ends = [*(p.offset for p in ordered[1:]), arena.grads.size]
    runs: list[tuple[int, int, list[tuple[int, int]]]] = []  # (start, end, [(start, flops)])
    for p, end in zip(ordered, ends):
        matrices = []
        if p in ours:
            matrices = [(at, newton_schulz_flops(rows, cols)) for at, rows, cols in parts_of(p)]
        same_kind = runs and bool(runs[-1][2]) == bool(matrices)
        if same_kind and p.offset != arena.n_decay:
            start, _, before = runs.pop()
            runs.append((start, end, before + matrices))
        else:
            runs.append((p.offset, end, matrices))
    slices: Slices = []
    pieces: Pieces = {}
    flops = [0] * world
    for start, end, matrices in reversed(runs):
        if not matrices:
            for a, b in cut(start, end, world, nbytes):
                slices.append((a, b))
                if (b - a) % arena_unit(world):
                    pieces[a, b] = [
                        (*shard, r) for r, shard in enumerate(equal_shards(a, b, world))
                    ]
            continue
        stop = end
        group = []
        for i, (at, work) in reversed(list(enumerate(matrices))):
            group.append((at, matrices[i + 1][0] if i + 1 < len(matrices) else end, work))
            if i == 0 or (4 * (stop - at) >= nbytes and len(group) >= world):
                owned = []
                for a, b, work in sorted(group, key=lambda piece: -piece[2]):
                    rank = flops.index(min(flops))
                    flops[rank] += work
                    owned.append((a, b, rank))
                slices.append((at, stop))
                pieces[at, stop] = sorted(owned)
                stop = at
                group = []
    return slices, pieces


def cut(a: int, b: int, world: int, nbytes: float) -> Slices:
    """Cut [a, b) from its end into slices of about nbytes bytes. `world` ranks can divide each
    evenly, but the last one only if they can divide [a, b).
    """
    unit = arena_unit(world)
    step = max(1, round(nbytes / 4 / unit)) * unit
    return [(max(a, end - step), end) for end in range(b, a, -step)]
