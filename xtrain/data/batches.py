"""Batches of ids and targets from token shards: shuffled without end for training, fixed for
validation."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from .shards import Shard, read_shard

# epochs in one batch: more is certainly a mistake, and would take minutes and gigabytes
MAX_EPOCHS_PER_BATCH = 1000


class Batch(NamedTuple):
    """Rows of tokens.

    ids: (B, T) int32.
    targets: (B, T) int32, the token after each of the ids; -100 where none is trained.
    starts: (B, T) int32 if the rows hold several documents: where the document of each token begins (Transformer.loss).
    """

    ids: Any
    targets: Any
    starts: Any = None


class Shuffled:
    """Which windows of a text the batches have: in every epoch all of them, in another order.

    The order follows from (seed, epoch) alone, so the state is one number, `position`: the number
    of sequences that all ranks together have read. Rank r reads rows [r B/world, (r+1) B/world) of
    a batch: the batch is the same for every world.

    windows: in an epoch.  B: sequences in the batch of all ranks.  T: tokens of a sequence.
    """

    def __init__(self, windows: int, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1):
        if B % world:
            raise UserError(
                f"--batch {B} is not a multiple of the {world} ranks: choose one that is"
            )
        self.windows = windows
        self.B = B
        self.T = T
        self.seed = seed
        self.rank = rank
        self.world = world
        self.position = 0
        # a batch reads at most two epochs, unless the text is very short
        self.order = lru_cache(2)(self._order)

    @property
    def epoch(self) -> float:
        """How many times the text has been read."""
        return self.position / self.windows

    def next_windows(self) -> list[tuple[int, int]]:
        """Return the epoch, and the index in its order, of each row of this rank's next batch."""
        rows = self.B // self.world
        first = self.position + self.rank * rows
        self.position += self.B
        return [divmod(i, self.windows) for i in range(first, first + rows)]

    def _order(self, epoch: int) -> np.ndarray:
        """Return a permutation of the windows, (W,)."""
        return self._random(epoch).permutation(self.windows)

    def _random(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng((self.seed % 2**64, epoch))

    def state_dict(self) -> dict[str, int]:
        """Return the position in the text, as integers, for a checkpoint."""
        return {
            "position": self.position,
            "seed": self.seed,
            "seq_len": self.T,
            "windows": self.windows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another loader of the same text stopped; B and world may differ.

        Raises UserError if seed, seq_len or the text's number of windows differ.
        """
        mine = self.state_dict()
        for name in ("seed", "seq_len", "windows"):
            if state.get(name) != mine[name]:
                raise UserError(
                    f"the data position was saved with {name} {state.get(name)}, this run has "
                    f"{mine[name]}: resume with the same text and options"
                )
        position = state.get("position")
        if type(position) is not int or not 0 <= position < 2**53:
            raise UserError(
                f"the saved data position {repr(position)[:40]} is not a number of sequences"
            )
        self.position = position


class Loader(Shuffled):
    """Endless shuffled batches for next-token prediction.

    In an epoch each shard is a ring that starts at a random token and is cut into len // T windows,
    so the windows differ from epoch to epoch and every token is used in some epoch. (A window may
    cross the seam: the last document is followed by the first.) The first token, too, follows from
    (seed, epoch).
    """

    def __init__(
        self, shards: Sequence[Shard], B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1
    ):
        """Make a loader.

        shards: .bin files, or parts of them
        B: sequences in the batch of all ranks
        T: tokens of a sequence
        """
        self._shards = [read_shard(path) for path in shards]
        # The target of the last token is one token further: a shard of T tokens has no window.
        windows_S = [len(tokens) // T if len(tokens) > T else 0 for tokens in self._shards]
        self._ends_S = np.cumsum(windows_S)
        super().__init__(int(self._ends_S[-1]), B, T, seed, rank, world)
        if not self.windows:
            raise _too_short("training", max(map(len, self._shards)), T)
        if B / self.windows > MAX_EPOCHS_PER_BATCH:
            raise UserError(
                f"--batch {B} is {B // self.windows:,} times the text, which has "
                f"{self.windows:,} windows of --seq-len {T}: choose a smaller one"
            )
        self.first = lru_cache(2)(self._first)

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and targets, (B/world, T) int32; targets[:, t] is the token after ids[:, t]."""
        tokens = np.stack([self._window(*which) for which in self.next_windows()])
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

    def _first(self, epoch: int) -> np.ndarray:
        """Return the first token of each shard's ring, (S,)."""
        rng = self._random(epoch)
        rng.permutation(self.windows)  # the order was drawn first
        return rng.integers([len(tokens) for tokens in self._shards])

    def _window(self, epoch: int, i: int) -> np.ndarray:
        """Return the i-th window of an epoch, (T + 1,) int32."""
        w = self.order(epoch)[i]
        start_S = self.first(epoch)
        s = np.searchsorted(self._ends_S, w, side="right")
        tokens = self._shards[s]
        before = self._ends_S[s - 1] if s else 0
        first = start_S[s] + (w - before) * self.T
        return tokens[(first + np.arange(self.T + 1)) % len(tokens)].astype(np.int32)


def val_batches(
    shards: Sequence[Shard], n: int, B: int, T: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return at most n batches of ids and targets, (B, T) int32, the same every time.

    The windows are spread evenly over the text, in order. A text with fewer than n B windows gives
    fewer batches, and the last batch may have fewer rows. Raises UserError if there is no window.
    """
    parts = [read_shard(path) for path in shards]
    if len(parts) == 1:
        tokens = parts[0]
    else:
        tokens = np.concatenate(parts)
    windows = (len(tokens) - 1) // T
    if not windows:
        raise _too_short("validation", len(tokens), T)
    n_windows = min(n * B, windows)
    first = np.arange(n_windows) * windows // n_windows * T
    rows = tokens[first[:, None] + np.arange(T + 1)].astype(np.int32)
    return [
        (np.ascontiguousarray(rows[i : i + B, :-1]), np.ascontiguousarray(rows[i : i + B, 1:]))
        for i in range(0, n_windows, B)
    ]


def _too_short(which: str, tokens: int, T: int) -> UserError:
    return UserError(
        f"the {which} text has {tokens} tokens, a window needs {T + 1}: "
        "give more text (--data) or a smaller --seq-len"
    )
