"""Token shards: llm.c's .bin files.

256 int32 (magic, version, number of tokens, zeros), then the tokens, little-endian: magic 20240520,
version 1 for uint16; magic 20240801, version 7 for uint32.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError

HEADER_INTS = 256
# (magic, version) -> dtype of the tokens
SHARD_KINDS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
MAGICS = [magic for magic, _ in SHARD_KINDS]


class ShardWriter:
    """A .bin file to which tokens are appended. It is valid after `finish`.

    tokens: how many are in it.  digest: BLAKE2b of their bytes. All methods raise OSError.
    """

    def __init__(self, path: Path, vocab_size: int, resume_at: int | None = None):
        """Begin a file, or continue one.

        resume_at: continue after this many tokens and cut off what follows; None: a new file
        """
        self.path, self.vocab_size = path, vocab_size
        self._kind = 1
        if vocab_size <= 1 << 16:
            self._kind = 0
        self._dtype = list(SHARD_KINDS.values())[self._kind]
        self._hash = hashlib.blake2b(digest_size=16)
        self.tokens = 0
        self._file = open(path, "wb" if resume_at is None else "r+b")  # noqa: SIM115
        try:
            self._file.seek(4 * HEADER_INTS)
            if resume_at is not None:
                self._read_back(resume_at)
        except BaseException:
            self._file.close()
            raise

    def _read_back(self, tokens: int) -> None:
        left = tokens * self._dtype.itemsize
        while left and (block := self._file.read(min(left, 1 << 22))):
            self._hash.update(block)
            left -= len(block)
        self.tokens = tokens - -(-left // self._dtype.itemsize)
        self._file.seek(self._file.tell())  # reading and writing must not mix without a seek
        self._file.truncate()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,) integers. Raises UserError if one is not below vocab_size."""
        _check_tokens(self.path, tokens, self.vocab_size)
        stored = tokens.astype(self._dtype).tobytes()
        self._file.write(stored)
        self._hash.update(stored)
        self.tokens += len(tokens)

    def sync(self) -> None:
        """Wait until the tokens are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Write the header and close the file."""
        magic, version = list(SHARD_KINDS)[self._kind]
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = magic, version, self.tokens
        self._file.seek(0)
        self._file.write(header.tobytes())
        self.sync()
        self._file.close()

    def close(self) -> None:
        """Close the file without finishing it. What cannot be written is dropped."""
        with contextlib.suppress(OSError):
            self._file.close()


def _check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise UserError if the file cannot hold the tokens."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"{path} cannot hold an array of {tokens.dtype} of shape {tokens.shape}: give integers "
            "of shape (n,)"
        )
    for token in (int(tokens.min()), int(tokens.max())) if tokens.size else ():
        if not 0 <= token < min(vocab_size, 1 << 32):
            raise UserError(
                f"{path} cannot hold the id {token}, the vocabulary has {vocab_size} tokens: give "
                "ids of this vocabulary"
            )


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Write a .bin file atomically.

    tokens: (n,) integers from 0 to vocab_size - 1, 0 < n < 2^31

    Raises OSError, and UserError, which names the file, for tokens that a shard cannot hold.
    """
    tokens = np.asarray(tokens)
    _check_tokens(path, tokens, vocab_size)
    if not 0 < len(tokens) < 1 << 31:
        raise UserError(f"{path} cannot hold {len(tokens)} tokens: give from 1 to {2**31 - 1}")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        writer = ShardWriter(temporary, vocab_size)
        try:
            writer.append(tokens)
            writer.finish()
        finally:
            writer.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Span:
    """n tokens in a file, from the byte `offset` on. dtype: as NumPy writes it."""

    path: Path
    dtype: str
    offset: int
    n: int


Shard = Path | Span


def read_shard(shard: str | Shard) -> np.ndarray:
    """Map the tokens of a file into memory: (n,) uint16 or uint32.

    Raises UserError, which names the file, if it is not a complete shard.
    """
    if isinstance(shard, Span):
        span = shard
    else:
        span = span_of(Path(shard), "delete it and start again to rebuild it")
    with _reading(span.path):
        return np.memmap(span.path, span.dtype, mode="r", offset=span.offset, shape=(span.n,))


def span_of(path: Path, advice: str) -> Span:
    """Return the tokens of a .bin file, from its header. Raises UserError.

    advice: what to do if it is damaged
    """
    with _reading(path):
        size = path.stat().st_size
        with open(path, "rb") as file:
            raw = file.read(4 * HEADER_INTS)
    header = np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")
    if len(header) < HEADER_INTS:
        raise UserError(f"{path} is too short to be a token shard: {advice}")
    magic, version, n = (int(x) for x in header[:3])
    if magic not in MAGICS:
        raise UserError(f"{path} is not a token shard (magic number {magic}): {advice}")
    if (magic, version) not in SHARD_KINDS:
        raise UserError(f"{path} is a token shard of unknown version {version}: {advice}")
    dtype = SHARD_KINDS[magic, version]
    expected = 4 * HEADER_INTS + n * dtype.itemsize
    if n < 1 or size != expected:
        raise UserError(f"{path} has {size} bytes, {n} tokens need {expected}: {advice}")
    return Span(path, dtype.str, 4 * HEADER_INTS, n)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError. Only a missing file must be rebuilt."""
    try:
        yield
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        advice = "fix that, then try again"
        if missing:
            advice = "start again to rebuild it"
        raise UserError(
            f"the token shard {path} cannot be read ({error.strerror}): {advice}"
        ) from None
