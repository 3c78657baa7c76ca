"""A text as a corpus: documents -> tokenizer -> token shards, cached by the text's hash.

    prepare(data)                  read a text, train a tokenizer, write shards; cached -> Corpus
    Corpus.loader(B, T, seed)      endless shuffled training batches, exactly resumable -> Loader
    Corpus.val_batches(n, B, T)    the same batches of held-out text every time

In the shards (shards.py) the end-of-text token follows every document.

**Bits per byte** = nats / ln 2 / bytes, both summed over the same target tokens. `token_lengths`
has the bytes of each token; the end of text has none, so its loss only adds to the sum of nats.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..device import cache_folder
from ..errors import UserError
from ..files import digest, sync, sync_folder, work_folder
from .batches import Loader, val_batches
from .bigram import bigram_bpb, byte_bigrams
from .documents import Documents, Survey, chunks, split, survey
from .shards import read_shard, write_shard
from .tokenizer import Tokenizer

# part of the cache key: increase it when the split, the shards or the tokenizer's training change
FORMAT = 2
SAMPLE_BYTES = 8_000_000  # of text to train the tokenizer on
# characters sampled from one place: few, so that many places are sampled, and because BPE is slow
# on a very long word
SAMPLE_CHUNK = 8192
ENCODE_CHUNK = 1 << 20  # characters encoded as one string: bounds the memory for one huge document
ENCODE_BATCH = 8 << 20  # bytes encoded at once, on all cores
SHARD_TOKENS = 100_000_000

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Corpus:
    """A tokenized text, with the facts that training needs."""

    name: str  # of the text
    files: int  # read
    skipped: int  # files that were not text
    documents: int
    bytes: int  # of text in UTF-8
    sha256: str  # of the text
    split: str  # "documents" or "tail"
    train_bytes: int
    val_bytes: int
    train_tokens: int
    val_tokens: int
    bigram_bpb: float  # bits per validation byte of the byte-bigram model
    folder: Path  # of the cache
    train: list[Path]  # shards
    val: list[Path]
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer. May be fewer than requested: a short text has few repeated pairs."""
        return self.tokenizer.vocab_size

    @property
    def token_lengths(self) -> np.ndarray:
        """(vocab_size,) int32: bytes of text in each token."""
        return self.tokenizer.token_lengths

    def bits_per_byte(self, nats: float, targets: np.ndarray) -> float:
        """-> bits per byte. nats: the sum of the losses of the targets. targets: their ids, any shape. The result is exact."""
        return nats / math.log(2) / int(self.token_lengths[targets].sum())

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> Loader:
        """Endless shuffled batches of B sequences of T tokens. With several ranks, each reads its share of the rows."""
        return Loader(self.train, B, T, seed, rank, world, self.vocab_size)

    def val_batches(self, n: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """At most n batches of the held-out text, always the same: ids and targets (B, T)."""
        return val_batches(self.val, n, B, T, self.vocab_size)


def prepare(
    data: str | Path | None = None,
    vocab_size: int = 2048,
    cache_dir: str | Path | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress = lambda fraction, text: None,
) -> Corpus:
    """Tokenize a text, or load it from the cache. The text is read and hashed each time.

    data: file or folder; None: the source of the Python standard library. tokenizer: a
    tokenizer.json to use instead of training one of vocab_size tokens. cache_dir: default
    device.cache_folder(). progress(fraction, text) is called from time to time.
    A cache entry is built in a temporary folder and renamed, so it is either complete or absent,
    even if several processes prepare the same text. Raises UserError for every bad input.
    """
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    progress(0.0, "reading the text")
    documents = Documents(data)
    found = survey(documents)
    if not found.documents:
        raise UserError(
            f"{documents.name} has no text (files that are not text: {documents.skipped}): "
            "give other --data"
        )
    which = f"t{given.sha256[:16]}e{given.eot_id}" if given else f"v{vocab_size}"
    key = f"{found.sha256[:16]}-{which}-f{FORMAT}"
    folder = Path(cache_dir or cache_folder()) / key
    about = {"name": documents.name, "files": documents.files, "skipped": documents.skipped}
    corpus = _open(folder, found, about, given)
    if corpus is None:
        shutil.rmtree(folder, ignore_errors=True)  # damaged or missing
        try:
            _build(folder, documents, found, given, vocab_size, progress)
        except OSError as error:
            where = f"the cache folder {folder.parent} cannot be written ({error.strerror})"
            raise UserError(f"{where}: make room, or set XTRAIN_CACHE to another folder") from None
        corpus = _open(folder, found, about, given)
        if corpus is None:
            raise UserError(
                f"{folder} cannot be read back: set XTRAIN_CACHE to a folder on another disk"
            )
    progress(1.0, "ready")
    return corpus


def _open(
    folder: Path, found: Survey, about: dict[str, Any], given: Tokenizer | None
) -> Corpus | None:
    """The cache entry, or None if it is missing or damaged."""
    try:
        record = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        for name, expected in record.pop("blake2b").items():
            if digest(folder / name) != expected:
                return None
        record["train"] = [folder / name for name in record["train"]]
        record["val"] = [folder / name for name in record["val"]]
        tokenizer = given or Tokenizer.load(folder)
        corpus = Corpus(**about, **record, folder=folder, tokenizer=tokenizer)
        sizes = [
            sum(len(read_shard(path)) for path in shards) for shards in (corpus.train, corpus.val)
        ]
        complete = sizes == [corpus.train_tokens, corpus.val_tokens]
        return corpus if complete and corpus.sha256 == found.sha256 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # UserError is a ValueError
        return None


def _build(
    folder: Path,
    documents: Documents,
    found: Survey,
    given: Tokenizer | None,
    vocab_size: int,
    progress: Progress,
) -> None:
    """Write a cache entry: tokenizer, shards and corpus.json. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(folder.parent) as temporary:
        if given is None:
            progress(0.1, "training the tokenizer")
        tokenizer = given or Tokenizer.train(_sample(documents, found), vocab_size)
        tokenizer.save(temporary)
        record = _tokenize(temporary, documents, found, tokenizer, progress)
        record["blake2b"] = {path.name: digest(path) for path in sorted(temporary.glob("*.bin"))}
        (temporary / "corpus.json").write_text(
            json.dumps(record, indent=2) + "\n", encoding="utf-8"
        )
        sync_folder(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written the same bytes
                raise
        sync(folder.parent)


def _sample(documents: Iterable[str], found: Survey) -> Iterator[str]:
    """About SAMPLE_BYTES of the training text, spread evenly over it."""
    seen = sampled = 0
    for text, _, is_val in split(documents, found):
        for chunk in [] if is_val else chunks(text, SAMPLE_CHUNK):
            size = len(chunk.encode())
            seen += size
            if sampled * found.n_bytes <= seen * SAMPLE_BYTES:
                sampled += size
                yield chunk


class _ShardWriter:
    """Encodes training or validation text and writes its shards."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer):
        self.folder, self.name, self.tokenizer = folder, name, tokenizer
        self.bytes = self.tokens = 0
        self.shards: list[str] = []
        self.bigrams_AB = np.zeros((256, 256), np.int64)
        self._texts: list[str] = []
        self._raws: list[bytes] = []
        self._encoded: list[np.ndarray] = []

    def add(self, text: str, raw: bytes) -> None:
        """Queue a document; raw: the same in UTF-8."""
        self._texts.append(text)
        self._raws.append(raw)
        self.bytes += len(raw)

    def encode(self) -> None:
        """Encode the queued documents and write the shards that are full."""
        self.bigrams_AB += byte_bigrams(self._raws)
        cut = [list(chunks(text, ENCODE_CHUNK)) for text in self._texts]
        ids = iter(self.tokenizer.encode_batch([chunk for document in cut for chunk in document]))
        flat: list[int] = []
        for document in cut:
            for _ in document:
                flat += next(ids)
            flat.append(self.tokenizer.eot_id)
        self._encoded.append(np.array(flat, np.uint32))
        self._texts, self._raws = [], []
        self.write(SHARD_TOKENS)

    def write(self, least: int) -> None:
        """Write shards while at least `least` encoded tokens are left."""
        while sum(map(len, self._encoded)) >= least:
            tokens = np.concatenate(self._encoded)
            name = f"{self.name}_{len(self.shards):06d}.bin"
            write_shard(self.folder / name, tokens[:SHARD_TOKENS], self.tokenizer.vocab_size)
            self.shards.append(name)
            self.tokens += len(tokens[:SHARD_TOKENS])
            self._encoded = [tokens[SHARD_TOKENS:]]


def _tokenize(
    folder: Path, documents: Documents, found: Survey, tokenizer: Tokenizer, progress: Progress
) -> dict[str, Any]:
    """Write the training and validation shards. -> what corpus.json records."""
    train, val = (_ShardWriter(folder, name, tokenizer) for name in ("train", "val"))
    done = 0
    for text, raw, is_val in split(documents, found):
        (val if is_val else train).add(text, raw)
        if train.bytes + val.bytes - done >= ENCODE_BATCH:
            done = train.bytes + val.bytes
            train.encode()
            val.encode()
            progress(0.25 + 0.75 * done / found.n_bytes, "tokenizing")
    for writer in (train, val):
        if not writer.bytes:
            raise UserError(
                f"the text has {found.n_bytes} bytes, too few to hold some out for validation: give more text"
            )
        writer.encode()
        writer.write(1)
    return {
        "documents": found.documents,
        "bytes": found.n_bytes,
        "sha256": found.sha256,
        "split": "documents" if found.by_document else "tail",
        "train_bytes": train.bytes,
        "val_bytes": val.bytes,
        "train_tokens": train.tokens,
        "val_tokens": val.tokens,
        "bigram_bpb": bigram_bpb(train.bigrams_AB, val.bigrams_AB),
        "train": train.shards,
        "val": val.shards,
    }
