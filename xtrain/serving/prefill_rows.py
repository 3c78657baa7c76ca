"""The rows of a prefill pass: the next tokens of several sequences, packed one after another.

What the pass needs to know of them is one int32 array, which is copied to the device at once
(PrefillRows.pack). Views of it are what the kernels read (unpack); its layout follows from PassSizes.

On a GPU a pass is a CUDA graph, which has the sizes of its capture. So that one graph serves many
prompts, the sizes are rounded up, and sequences that are idle own the rows that are left over:

    8 rows for 2 sequences     a0 a1 a2 b0 b1 .  .  .       a, b, an idle one, an empty one
    lengths  3 2 3 0           history  0 7 -1 -1           edges  0 3 5 8 8

An idle sequence has a negative history (kernels/decoding/padding.py): it writes nothing to the cache,
and its attention is zero. Rows do not see each other outside attention. Without graphs a GPU computes
the same rounded sizes, so both ways give the same bits.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..device import Array

MOST_SEQUENCES = 256  # of a pass with rounded sizes


class PassSizes(NamedTuple):
    """The sizes of a pass: everything that its launches depend on."""

    N: int  # rows
    A: int  # sequences
    T: int  # rows of the longest one, at most
    M: int  # blocks of a table
    W: int  # rows whose logits are wanted
    U: int = 0  # blocks that all tables name, each once, if the cache has codes


class DeviceRows(NamedTuple):
    """What the kernels read, int32 on the device."""

    ids_N: Array
    adapters_N: Array  # of each row, -1: none
    edges_E: Array
    history_A: Array
    wanted_W: Array
    tables_AM: Array
    blocks_U: Array


@dataclass(frozen=True)
class PrefillRows:
    """The rows of a pass, on the host.

    ids: the new tokens of all sequences, packed.
    lengths: how many of them each sequence has.
    history: how many tokens each sequence has in the cache.
    blocks: the blocks of each sequence, with room for the new tokens.
    wanted: the rows whose logits are needed.
    adapters: the number of each sequence's adapter; none: no sequence has one.
    """

    ids: list[int]
    lengths: list[int]
    history: list[int]
    blocks: list[list[int]]
    wanted: list[int]
    adapters: list[int] | None = None

    def sizes(self, S: int, codes: bool = False) -> PassSizes:
        """Return the sizes of a pass without idle sequences. S: tokens of a block; codes: of the
        cache."""
        A = len(self.lengths)
        M = max([-(-(n + h) // S) for n, h in zip(self.lengths, self.history)])
        U = len(self._used_blocks(M)) if codes else 0
        return PassSizes(len(self.ids), A, max(self.lengths), M, len(self.wanted), U)

    def rounded_sizes(self, S: int) -> PassSizes:
        """Return the sizes of a pass that is captured."""
        exact = self.sizes(S)
        N = round_rows(exact.N)
        T = min(_power(exact.T, 4), N)
        idle = -(-(N - exact.N) // T)
        A = _power(max(exact.A + idle, exact.W), 4)
        return PassSizes(N, A, T, _power(exact.M, 2), A)

    def pack(self, sizes: PassSizes) -> np.ndarray:
        """Return everything as int32, in the order of DeviceRows."""
        lengths = list(self.lengths)
        rest = sizes.N - len(self.ids)
        while rest:
            lengths.append(min(rest, sizes.T))
            rest -= lengths[-1]
        lengths += [0] * (sizes.A - len(lengths))
        numbers = self.adapters or [-1] * len(self.lengths)
        tables_AM = np.full((sizes.A, sizes.M), -1, np.int32)
        for a, row in enumerate(self.blocks):
            tables_AM[a, : min(len(row), sizes.M)] = row[: sizes.M]
        parts: list[Any] = [
            _filled(self.ids, sizes.N, 0),
            _filled(np.repeat(numbers, self.lengths), sizes.N, -1),
            [0, *itertools.accumulate(lengths)],
            _filled(self.history, sizes.A, -1),
            _filled(self.wanted, sizes.W, 0),
            tables_AM.reshape(-1),
            self._used_blocks(sizes.M) if sizes.U else [],
        ]
        return np.concatenate(parts).astype(np.int32)

    def _used_blocks(self, M: int) -> list[int]:
        return sorted({block for row in self.blocks for block in row[:M]})


def unpack(packed: Array, sizes: PassSizes) -> DeviceRows:
    """Return views of the parts of PrefillRows.pack."""
    N, A, _, M, W, U = sizes
    ends = itertools.accumulate([N, N, A + 1, A, W, A * M, U], initial=0)
    ids, adapters, edges, history, wanted, tables, blocks = (
        packed[low:high] for low, high in itertools.pairwise(ends)
    )
    return DeviceRows(ids, adapters, edges, history, wanted, tables.reshape(A, M), blocks)


def round_rows(n: int) -> int:
    """Return the rows of the pass that serves n: a power of two up to 256, then a multiple of a
    quarter of one, at most a quarter more than n."""
    if n <= 256:
        return _power(n, 2)
    step = _power(n, 2) // 8
    return -(-n // step) * step


def _power(n: int, base: int) -> int:
    """Return the smallest power of `base` that is at least n."""
    power = 1
    while power < n:
        power *= base
    return power


def _filled(values: Any, n: int, filler: int) -> np.ndarray:
    out = np.full(n, filler, np.int32)
    out[: len(values)] = values
    return out
