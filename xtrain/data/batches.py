"""Batches of ids and targets from token shards: shuffled without end for training, fixed for validation."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .shards import read_shard

# epochs in one batch: more is certainly a mistake, and would take minutes and gigabytes
MAX_EPOCHS_PER_BATCH = 1000


class Loader:
    """Endless shuffled batches for next-token prediction.

    In an epoch each shard is a ring that starts at a random token and is cut into len // T windows,
    so the windows differ from epoch to epoch and every token is used in some epoch. (A window may cross
    the seam: the last document is followed by the first.) The order of the windows is a
    permutation. Both follow from (seed, epoch) alone, so the state is one number, `position`: the
    number of sequences that all ranks together have read.

    Rank r reads rows [r B/world, (r+1) B/world) of a batch: the batch is the same for every world.
    """

    def __init__(
        self,
        shards: list[Path],
        B: int,
        T: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        vocab_size: int | None = None,
    ):
        """shards: .bin files. B: sequences in the batch of all ranks. T: tokens of a sequence.
        vocab_size: an id that is not below it raises UserError."""
        if B % world:
            raise UserError(
                f"--batch {B} is not a multiple of the {world} ranks: choose one that is"
            )
        self.B, self.T, self.seed, self.rank, self.world = B, T, seed, rank, world
        self._shards = [read_shard(path, vocab_size) for path in shards]
        # The target of the last token is one token further: a shard of T tokens has no window.
        windows_S = [len(tokens) // T if len(tokens) > T else 0 for tokens in self._shards]
        self._ends_S = np.cumsum(windows_S)
        self.windows = int(self._ends_S[-1])  # in an epoch
        if not self.windows:
            raise _too_short("training", max(map(len, self._shards)), T)
        if B / self.windows > MAX_EPOCHS_PER_BATCH:
            raise UserError(
                f"--batch {B} is {B // self.windows:,} times the text, which has "
                f"{self.windows:,} windows of --seq-len {T}: choose a smaller one"
            )
        self.position = 0
        # a batch reads at most two epochs, unless the text is very short
        self._cached_epoch = lru_cache(2)(self._epoch)

    @property
    def epoch(self) -> float:
        """How many times the text has been read."""
        return self.position / self.windows

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """-> ids, targets: (B/world, T) int32, targets[:, t] is the token after ids[:, t]."""
        rows = self.B // self.world
        first = self.position + self.rank * rows
        tokens = np.stack([self._window(i) for i in range(first, first + rows)])
        self.position += self.B
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

    def state_dict(self) -> dict[str, int]:
        """The position in the text, as integers, for a checkpoint."""
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

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """-> order of the windows (W,), first token of each shard's ring (S,)."""
        rng = np.random.default_rng((self.seed % 2**64, epoch))
        return rng.permutation(self.windows), rng.integers([len(tokens) for tokens in self._shards])

    def _window(self, i: int) -> np.ndarray:
        """-> (T + 1,) int32: the i-th window since the start of training."""
        order_W, start_S = self._cached_epoch(i // self.windows)
        w = order_W[i % self.windows]
        s = np.searchsorted(self._ends_S, w, side="right")
        tokens = self._shards[s]
        before = self._ends_S[s - 1] if s else 0
        first = start_S[s] + (w - before) * self.T
        return tokens[(first + np.arange(self.T + 1)) % len(tokens)].astype(np.int32)


def val_batches(
    shards: list[Path], n: int, B: int, T: int, vocab_size: int | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """-> at most n batches of ids, targets, (B, T) int32, the same every time.

    The windows are spread evenly over the text, in order. A text with fewer than n B windows gives
    fewer batches, and the last batch may have fewer rows. Raises UserError if there is no window.
    """
    tokens = np.concatenate([read_shard(path, vocab_size) for path in shards]).astype(np.int32)
    windows = (len(tokens) - 1) // T
    if not windows:
        raise _too_short("validation", len(tokens), T)
    wanted = min(n * B, windows)
    first = np.arange(wanted) * windows // wanted * T
    rows = tokens[first[:, None] + np.arange(T + 1)]
    return [
        (np.ascontiguousarray(rows[i : i + B, :-1]), np.ascontiguousarray(rows[i : i + B, 1:]))
        for i in range(0, wanted, B)
    ]


def _too_short(which: str, tokens: int, T: int) -> UserError:
    return UserError(
        f"the {which} text has {tokens} tokens, a window needs {T + 1}: "
        "give more text (--data) or a smaller --seq-len"
    )
