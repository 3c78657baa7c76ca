"""ZeRO-1 (Rajbhandari et al. 2020): the optimizer state is divided among the ranks instead of being on every rank.

Rank r owns the r-th shard of every slice (bucket) of the arena. A reduce-scatter gives it the sum of that
shard's gradients, it alone makes the AdamW update there, and an all-gather sends the new weights to all
ranks. That is the traffic of an all-reduce, which consists of the same two steps. Bytes per parameter and
rank, with R ranks:

                             weights    gradients    moments    bf16 copy
    fp32                     4          4            8                       16
    fp32, ZeRO-1             4          4            8 / R                   8 + 8 / R
    bf16                     4          4            8          2            18
    bf16, ZeRO-1             4 / R      4            8 / R      2            6 + 12 / R
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..device import Array, cupy, is_gpu, to_numpy
from ..kernels.checksum import checksum, compare
from ..kernels.elementwise import add_fwd
from ..kernels.grad_norm import norm_and_factor, sum_of_squares
from ..kernels.runtime.launch import zeros
from ..nn.model import Transformer
from ..nn.optim import AdamW

Slices = list[tuple[int, int]]  # slices [start, end) of the arena


class ShardedAdamW(AdamW):
    """AdamW on this rank's shard of every slice; the new weights of a slice are sent while the next one is computed.

    In fp32 the forward pass reads the float32 weights, so every rank has all of them. In bf16 it reads the
    bf16 copy and the few float32 norm weights, so these are sent, and only the optimizer needs the float32
    weights of matrices: `release` keeps each only on its owner, `restore` gathers all of them for a
    checkpoint.

    master: (n,) float32, the weights of the owned shards, concatenated; None in fp32.  norms: all norm weights.
    guarded: whether `changed` is kept up to date, for --check-ranks. What a rank owns exists once, so there is no other copy to
    compare it with; and the all-gather makes a wrong weight of its owner identical on all ranks.
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
        shards = [collectives.shard(a, b) for a, b in slices]
        super().__init__(model, **options, owned=[(s.start, s.stop) for s in shards])
        self.collectives, self.slices = collectives, slices
        self.master: Array = None
        self.norms: Array = None
        self.release()
        self.guarded = guarded
        arrays = len(self._state())
        self.sums, self.expected = (zeros(self.m, arrays, np.int64) for _ in range(2))
        self.changed = zeros(self.m, 1, np.int32)
        self.summed_version = (
            -1
        )  # of the arena, when `expected` was computed; -1: not for this state

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
        first = 0
        for start, end in self.owned:
            self.master[first : first + end - start] = arena.weights[start:end]
            first += end - start
        self.norms[...] = arena.weights[arena.n_decay :]
        arena.weights = None
        for _, p in self.model.storage():
            offset: Any = p.offset  # set by the arena
            first = offset - arena.n_decay
            p._data = p.half if p.decay else self.norms[first : first + p.size].reshape(p.shape)
        if is_gpu(arena.half):
            cupy().get_default_memory_pool().free_all_blocks()  # a captured step has a separate pool

    def restore(self) -> None:
        """Gather all float32 weights: the opposite of release. Every rank must call it."""
        arena = self.arena
        if arena.half is None or arena.weights is not None:
            return
        grads: Array = arena.grads
        arena.weights = zeros(grads, grads.shape)
        first = 0
        for start, end in self.owned:
            arena.weights[start:end] = self.master[first : first + end - start]
            first += end - start
        for a, b in self.slices:
            self.collectives.all_gather(arena.weights, a, b)
        self.collectives.join()
        for _, p in self.model.storage():
            p._data = arena.weights[p.offset : p.offset + p.size].reshape(p.shape)

    def weights(self, start: int, end: int, first: int) -> Array:
        """float32 weights of the owned [start, end) of the arena. first: their offset among the owned ones."""
        if self.master is None:
            return self.arena.weights[start:end]
        return self.master[first : first + end - start]

    def advance(self) -> np.ndarray:
        """As AdamW.advance. Weights that were assigned, or a state that was loaded, are no change."""
        if self.summed_version != self.arena.version.count:
            self._sum_state(self.expected)
        hyper_3 = super().advance()
        self.summed_version = self.arena.version.count
        return hyper_3

    def apply(self, hyper_3: Array, factor_1: Array | None = None) -> None:
        """The update of the owned shards, and the all-gather of the new weights."""
        first, n_decay = 0, self.arena.n_decay
        for (a, b), (start, end) in zip(self.slices, self.owned):
            self.update_trained(start, end, first, hyper_3, factor_1)
            if self.master is None:
                self.collectives.all_gather(self.arena.weights, a, b)
            elif a < n_decay:
                self.collectives.all_gather(self.arena.half, a, b)
            else:
                own = slice(start - n_decay, end - n_decay)
                self.norms[own] = self.weights(start, end, first)
                self.collectives.all_gather(self.norms, a - n_decay, b - n_decay)
            first += end - start
        self.collectives.join()
        self._sum_state(self.expected)

    def _state(self) -> list[Array]:
        """The arrays that only an update may change."""
        return [*self.in_use(), *([] if self.master is None else [self.master]), self.m, self.v]

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
        """The weights that every rank must hold identically."""
        if self.master is None:
            return [self.arena.weights]
        half: Array = self.arena.half
        return [half[: self.arena.n_decay], self.norms]

    def clip(self, max_norm: float) -> tuple[Array, Array]:
        """As optim.clip. The sums of squares of the shards are added in the order of the ranks: the same bits on all."""
        self._compare_state()  # before gather_1: after it, other ranks may already send new weights here
        grads: Array = self.arena.grads
        squares = [sum_of_squares(grads[start:end]) for start, end in self.owned]
        stats = norm_and_factor(
            self.collectives.gather_1(functools.reduce(add_fwd, squares)), max_norm
        )
        return stats[:1], stats[1:]

    def gather_moments(self) -> SimpleNamespace:
        """m and v of the whole arena in host memory on rank 0 (None elsewhere), and t. Every rank must call it."""
        moments = [self.collectives.ranks.gather_on_rank_0(to_numpy(x)) for x in (self.m, self.v)]
        return SimpleNamespace(
            m=self._in_arena_order(moments[0]), v=self._in_arena_order(moments[1]), t=self.t
        )

    def _in_arena_order(self, all_Rn: np.ndarray | None) -> np.ndarray | None:
        """The concatenated shards of each rank, (R, n) -> the arena."""
        if all_Rn is None:
            return None
        grads: Array = self.arena.grads
        array, first = np.zeros(grads.shape, np.float32), 0
        for a, b in self.slices:
            n = (b - a) // len(all_Rn)
            array[a:b] = all_Rn[:, first : first + n].reshape(-1)
            first += n
        return array

    def set_moments(self, whole: Any) -> None:
        """The opposite of gather_moments. whole: m, v of the whole arena and t, the same on every rank."""
        for mine, array in ((self.m, whole.m), (self.v, whole.v)):
            values = np.concatenate([array[start:end] for start, end in self.owned])
            if is_gpu(mine):
                mine.set(values)
            else:
                mine[...] = values
        self.t, self.summed_version = whole.t, -1
