"""Token shards: llm.c's .bin files.

256 int32 (magic, version, number of tokens, zeros), then the tokens, little-endian: magic 20240520,
version 1 for uint16; magic 20240801, version 7 for uint32.
"""

import os
from pathlib import Path

import numpy as np

from ..errors import UserError

HEADER_INTS = 256
# (magic, version) -> dtype of the tokens
SHARD_KINDS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Write a .bin file atomically. tokens: (n,) integers below vocab_size, n < 2^31. Raises OSError."""
    kind = 0 if vocab_size <= 1 << 16 else 1
    (magic, version), dtype = list(SHARD_KINDS.items())[kind]
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = magic, version, len(tokens)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(header.tobytes())
            file.write(np.asarray(tokens, dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_shard(path: str | Path, vocab_size: int | None = None) -> np.ndarray:
    """-> (n,) uint16 or uint32, memory-mapped.

    Raises UserError, which names the file, if it is not a complete shard or has an id >= vocab_size.
    """
    path, advice = Path(path), "delete it and start again to rebuild it"
    try:
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", HEADER_INTS)
    except OSError as error:
        raise UserError(
            f"the token shard {path} cannot be read ({error.strerror}): {advice}"
        ) from None
    if len(header) < HEADER_INTS:
        raise UserError(f"{path} is too short to be a token shard: {advice}")
    magic, version, n = (int(x) for x in header[:3])
    if magic not in [known for known, _ in SHARD_KINDS]:
        raise UserError(f"{path} is not a token shard (magic number {magic}): {advice}")
    if (magic, version) not in SHARD_KINDS:
        raise UserError(f"{path} is a token shard of unknown version {version}: {advice}")
    dtype = SHARD_KINDS[magic, version]
    expected = 4 * HEADER_INTS + n * dtype.itemsize
    if n < 1 or size != expected:
        raise UserError(f"{path} has {size} bytes, {n} tokens need {expected}: {advice}")
    tokens = np.memmap(path, dtype, mode="r", offset=4 * HEADER_INTS, shape=(n,))
    if vocab_size is not None and (largest := int(tokens.max())) >= vocab_size:
        raise UserError(
            f"{path} has the id {largest}, the tokenizer has {vocab_size} tokens: {advice}"
        )
    return tokens
