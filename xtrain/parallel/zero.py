"""ZeRO-1 (Rajbhandari et al. 2020): the optimizer's state exists once, divided among the ranks, instead of on every rank.

Rank r owns the r-th part of every bucket of the arena. A reduce-scatter brings it the sum of that part's gradients, it
alone makes the AdamW step there, and an all-gather sends the new weights to all. That is the traffic of an all-reduce, which
does the same two things at once. Bytes per parameter and rank, with R ranks:

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
from ..kernels.elementwise import add_fwd
from ..kernels.grad_norm import norm_and_factor, sum_of_squares
from ..kernels.runtime.launch import zeros
from ..nn.model import Transformer
from ..nn.optim import AdamW

Slices = list[tuple[int, int]]  # slices [start, end) of the arena


class ShardedAdamW(AdamW):
    """AdamW on this rank's part of every bucket; the new weights of a bucket travel while the next one is computed.

    In fp32 the forward pass reads the float32 weights, so every rank has all of them. In bf16 it reads the bf16 copy, and
    float32 norm weights, which are few: these travel. The float32 weights of matrices are then only the optimizer's:
    `release` leaves each on its owner alone, `restore` brings all of them back, for a checkpoint.

    master: (n,) float32, the weights of the owned parts, one after the other.  norms: all norm weights.
    """

    def __init__(self, model: Transformer, collectives: Any, slices: Slices, **options: Any):
        parts = [collectives.part(a, b) for a, b in slices]
        super().__init__(model, **options, owned=[(part.start, part.stop) for part in parts])
        self.collectives, self.slices, self.master, self.norms = collectives, slices, None, None
        self.release()

    def release(self) -> None:
        """In bf16: forget all float32 weights but the norms and this rank's own."""
        arena = self.arena
        if arena.half is None or arena.weights is None:
            return
        arena.refresh()
        if self.master is None:  # made once: a captured step goes on using this memory
            self.master = zeros(arena.weights, self.m.shape)
            self.norms = zeros(arena.weights, arena.weights.size - arena.n_decay)
            self.collectives.share(self.norms)
        first = 0
        for start, end in self.owned:
            self.master[first : first + end - start] = arena.weights[start:end]
            first += end - start
        self.norms[...] = arena.weights[arena.n_decay :]
        arena.weights = None
        for _, p in self.model.storage():
            first = p.offset - arena.n_decay
            p._data = p.half if p.decay else self.norms[first : first + p.size].reshape(p.shape)
        if is_gpu(arena.half):
            cupy().get_default_memory_pool().free_all_blocks()  # a captured step has a pool of its own

    def restore(self) -> None:
        """The opposite of release. Every rank must call it."""
        arena = self.arena
        if arena.half is None or arena.weights is not None:
            return
        arena.weights = zeros(arena.grads, arena.grads.shape)
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
        if self.master is None:
            return self.arena.weights[start:end]
        return self.master[first : first + end - start]

    def apply(self, hyper_3: Array, factor_1: Array | None = None) -> None:
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

    def in_use(self) -> list[Array]:
        """The weights that every rank has."""
        if self.master is None:
            return [self.arena.weights]
        return [self.arena.half[: self.arena.n_decay], self.norms]

    def clip(self, max_norm: float) -> tuple[Array, Array]:
        """optim.clip, from the owned parts' sums of squares, added in the order of the ranks: the same bits on all."""
        grads = self.arena.grads
        squares = [sum_of_squares(grads[start:end]) for start, end in self.owned]
        stats = norm_and_factor(
            self.collectives.gather_1(functools.reduce(add_fwd, squares)), max_norm
        )
        return stats[:1], stats[1:]

    def gather_moments(self) -> SimpleNamespace:
        """m, v of the whole arena on the host of rank 0 (None elsewhere), and t. Every rank must call it."""
        moments = [self.collectives.ranks.parts(to_numpy(x)) for x in (self.m, self.v)]
        return SimpleNamespace(m=self._laid_out(moments[0]), v=self._laid_out(moments[1]), t=self.t)

    def _laid_out(self, all_Rn):
        if all_Rn is None:
            return None
        array, first = np.zeros(self.arena.grads.shape, np.float32), 0
        for a, b in self.slices:
            n = (b - a) // len(all_Rn)
            array[a:b] = all_Rn[:, first : first + n].reshape(-1)
            first += n
        return array

    def set_moments(self, whole: Any) -> None:
        """The opposite of gather_moments, from arrays that every rank has."""
        for mine, array in ((self.m, whole.m), (self.v, whole.v)):
            values = np.concatenate([array[start:end] for start, end in self.owned])
            mine.set(values) if hasattr(mine, "set") else mine.__setitem__(..., values)
        self.t = whole.t
