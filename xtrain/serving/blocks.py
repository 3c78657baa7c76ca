"""The blocks of the KV cache: who uses them, and how to find again what they hold (Kwon et al.
2023, PagedAttention).

A block has room for the keys and values of S successive tokens of one sequence; the sequence's
block table lists its blocks.

    free     holds nothing
    used     by one sequence, or by several that begin with the same tokens
    cached   by none, but what it holds can be found again; the block that was used least recently
             is evicted first

A key is the hash of all tokens of a sequence up to the end of a block: hash(key of the block
before, tokens of this block). The keys and values of a token depend on all tokens before it and on
nothing else, so equal keys mean equal contents. A block that is not full, or whose tokens differ
from some point on, can still serve another sequence: it is copied first (copy on write).
"""

import collections
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

Key = bytes
ROOT: Key = b""  # before the first block
MIN_COPIED = 8  # tokens: to compute fewer takes less time than to copy a block


def block_key(previous: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a block that holds these tokens, after the block with the key `previous`"""
    return hashlib.blake2b(previous + np.array(tokens, np.int64).tobytes(), digest_size=16).digest()


def block_keys(tokens: Sequence[int], S: int) -> list[Key]:
    """Return the keys of the successive blocks of S tokens that hold `tokens`; the last block may
    hold fewer"""
    keys = []
    key = ROOT
    for i in range(0, len(tokens), S):
        key = block_key(key, tokens[i : i + S])
        keys.append(key)
    return keys


@dataclass(frozen=True)
class Prefix:
    """The part of a sequence that is in the cache."""

    blocks: list[int]  # full ones, to be shared
    partial: int | None = None  # a block that begins with the next tokens, to be copied
    n_partial: int = 0  # how many tokens of it
    whole: bool = False  # it holds no others


@dataclass(slots=True)
class _Contents:
    previous: Key
    tokens: tuple[int, ...]
    key: Key | None  # of a full block


@dataclass
class BlockPool:
    """`size` blocks of S tokens. A block is an index, 0 .. size - 1."""

    size: int
    S: int
    references: list[int] = field(init=False)
    free: list[int] = field(init=False)  # a stack
    cached: collections.OrderedDict[int, None] = field(init=False)  # least recently used first

    def __post_init__(self) -> None:
        self.references = [0] * self.size
        self.free = list(range(self.size))[::-1]
        self.cached = collections.OrderedDict()
        self._contents: dict[int, _Contents] = {}
        self._by_key: dict[Key, int] = {}
        # (key of the block before, first token) -> blocks
        self._after: dict[tuple[Key, int], set[int]] = collections.defaultdict(set)

    @property
    def available(self) -> int:
        """Return how many blocks `allocate` can give."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> int:
        """Return a block for one sequence. Raises IndexError if none is available."""
        if self.free:
            block = self.free.pop()
        elif self.cached:
            block = next(iter(self.cached))
            self.forget(block)
            del self.cached[block]
        else:
            raise IndexError("no block is available")
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Note that one more sequence uses the block."""
        self.references[block] += 1
        self.cached.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Note that a sequence uses these blocks no more. They are evicted from the last to the
        first."""
        for block in reversed(list(blocks)):
            self.references[block] -= 1
            if self.references[block] == 0 and block in self._contents:
                self.cached[block] = None
            elif self.references[block] == 0:
                self.free.append(block)

    def publish(self, block: int, previous: Key, tokens: Sequence[int]) -> None:
        """Note that the block holds these tokens, after the block with the key `previous`: other
        sequences may use it.

        A block that is not full may be published again when it holds more."""
        if not tokens:
            return
        key = block_key(previous, tokens) if len(tokens) == self.S else None
        if key in self._by_key and self._by_key[key] != block:
            return  # another block holds the same
        self.forget(block)
        self._contents[block] = _Contents(previous, tuple(tokens), key)
        self._after[previous, tokens[0]].add(block)
        if key is not None:
            self._by_key[key] = block

    def can_take(self, block: int | None) -> bool:
        """Return True if no sequence uses the block, so that one may write to it. (It shares the
        block and calls `forget`.)"""
        return block in self.cached

    def forget(self, block: int) -> None:
        """Forget what the block holds: it cannot be found any more."""
        contents = self._contents.pop(block, None)
        if contents is None:
            return
        place = contents.previous, contents.tokens[0]
        self._after[place].discard(block)
        if not self._after[place]:
            del self._after[place]
        if contents.key is not None:
            del self._by_key[contents.key]

    def forget_all(self) -> None:
        """Forget what all blocks hold, for example because the weights have
        changed."""
        self._contents.clear()
        self._by_key.clear()
        self._after.clear()
        self.free += self.cached
        self.cached.clear()

    def find(self, tokens: Sequence[int], keys: Sequence[Key]) -> Prefix:
        """Return the longest known prefix of `tokens`, without the last one, which must be
        computed: its logits are wanted.

        keys: block_keys(tokens, S)"""
        limit = len(tokens) - 1
        blocks = []
        key = ROOT
        for i in range(limit // self.S):
            if keys[i] not in self._by_key:
                break
            key = keys[i]
            blocks.append(self._by_key[key])
        next_tokens = tuple(tokens[len(blocks) * self.S : limit])
        partial = None
        n_partial = 0
        for block in sorted(self._after.get((key, next_tokens[0]), ())) if next_tokens else ():
            stored = self._contents[block].tokens
            if (
                stored[: n_partial + 1] == next_tokens[: n_partial + 1]
            ):  # longer than what was found so far
                partial = block
                n_partial = _common_prefix(stored, next_tokens)
        if partial is None:
            return Prefix(blocks)
        whole = n_partial == len(self._contents[partial].tokens)
        if whole or n_partial >= MIN_COPIED:
            return Prefix(blocks, partial, n_partial, whole)
        return Prefix(blocks)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the number of equal tokens at the start of a and b."""
    # a[:low] == b[:low], and no more than `high` are equal
    low = 0
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # slices are compared in C
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
