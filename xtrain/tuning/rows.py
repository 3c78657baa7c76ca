"""Rows of examples: padded, or several in a row, in an order that a seed decides.

    one per row     [ a a a a a . . . . ]        ids of padding 0, its targets -100
    packed          [ a a a a a b b b . ]        starts  [ 0 0 0 0 0 5 5 5 8 ]

An example of n tokens has n - 1 inputs, each with the next token as its target; targets that are
not trained are -100. `starts` has for each input the column at which its example begins: attention
must not look further back, and positions count from there. Padding is an example of its own.
"""

from collections.abc import Sequence

import numpy as np

from ..data.batches import Batch, Shuffled
from ..kernels.cross_entropy import IGNORE
from .examples import Example


def rows_of(groups: Sequence[Sequence[Example]], T: int) -> Batch:
    """Return one row of T tokens per group of examples. The inputs of a group must fit into T."""
    ids = np.zeros((len(groups), T), np.int32)
    targets = np.full_like(ids, IGNORE)
    starts = np.zeros_like(ids)
    for row, group in enumerate(groups):
        start = 0
        for x in group:
            end = start + len(x.ids) - 1
            ids[row, start:end] = x.ids[:-1]
            targets[row, start:end] = np.where(x.trained[1:], x.ids[1:], IGNORE)
            starts[row, start:end] = start
            start = end
        starts[row, start:] = start
    return Batch(ids, targets, starts)


def packed(lengths: Sequence[int], T: int, seed: int = 0) -> list[list[int]]:
    """Divide examples among rows by first fit, in an order drawn with `seed`. -> the examples of
    each row

    lengths: the inputs of each example, at most T.
    """
    order = np.random.default_rng([seed % 2**64, len(lengths)]).permutation(len(lengths))
    room = np.zeros(len(lengths), np.int64)
    rows: list[list[int]] = []
    for i in map(int, order):
        fits = room[: len(rows)] >= lengths[i]
        if fits.any():
            row = int(fits.argmax())
        else:
            row = len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = T
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


class RowLoader(Shuffled):
    """Endless shuffled batches of rows.

    groups: which examples each row holds.
    packed: several; batches have `starts`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        groups: Sequence[Sequence[int]],
        packed: bool,
        B: int,
        T: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        super().__init__(len(groups), B, T, seed, rank, world)
        self.examples = examples
        self.groups = groups
        self.packed = packed

    def next_batch(self) -> Batch:
        """Return the next batch: (B / world, T)."""
        chosen = [self.groups[self.order(e)[w]] for e, w in self.next_windows()]
        batch = rows_of([[self.examples[i] for i in group] for group in chosen], self.T)
        if self.packed:
            return batch
        return batch._replace(starts=None)
