"""A text as a corpus: documents -> tokenizer -> token shards, cached by the text's hash.

    prepare(data)                  read a text, train a tokenizer, write shards; cached -> Corpus
    Corpus.loader(B, T, seed)      endless shuffled training batches, exactly resumable -> Loader
    Corpus.val_batches(n, B, T)    the same batches of held-out text every time

In the shards (shards.py) the end-of-text token follows every document.

**Bits per byte** = nats / ln 2 / bytes, both summed over the same target tokens. `token_lengths`
has the bytes of each token; the end of text has none, so its loss only adds to the sum of nats.
"""

import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import files
from ..device import cache_folder
from ..errors import UserError
from . import stamps
from .batches import Loader, val_batches
from .documents import Documents, Survey, split, survey
from .pieces import chunks
from .tokenizer import Tokenizer
from .tokenizing import MISSING, Progress, Tokenizing, read_state, work_folder_of

# part of the cache key: increase it when the split, the shards or the tokenizer's training change
FORMAT = 3
SAMPLE_BYTES = 8_000_000  # of text to train the tokenizer on
# characters sampled from one place: few, so that many places are sampled, and because BPE is slow
# on a very long word
SAMPLE_CHUNK = 8192
ALWAYS_READ = 1 << 20  # bytes: smaller files of the cache are read at every start


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
        return Loader(self.train, B, T, seed, rank, world)  # prepare has verified the ids

    def val_batches(self, n: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """At most n batches of the held-out text, always the same: ids and targets (B, T)."""
        return val_batches(self.val, n, B, T)


def prepare(
    data: str | Path | None = None,
    vocab_size: int = 2048,
    cache_dir: str | Path | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress = lambda fraction, text: None,
    verify: bool = False,
) -> Corpus:
    """Tokenize a text, or load it from the cache.

    data: file or folder; None: the source of the Python standard library. tokenizer: a
    tokenizer.json to use instead of training one of vocab_size tokens. cache_dir: default
    device.cache_folder(). progress(fraction, text) is called from time to time.
    A text is tokenized in bounded memory; a killed or failed process is continued by the next one
    (tokenizing.py). Files of the text and shards of the cache whose size and times are as when they were
    read (stamps.py) are not read again, unless verify. All other files of the cache are.
    A damaged cache entry is built again, one that cannot be read at the moment is not. Raises UserError for every bad input.
    """
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    documents = Documents(data)
    cache = _Cache(Path(cache_dir or cache_folder()), documents, given, vocab_size, verify)
    corpus = cache.known_text()
    if corpus is None:
        progress(0.0, "reading the text")
        found = survey(_counted(documents, progress))
        if not found.documents:
            raise UserError(
                f"{documents.name} has no text (files that are not text: {documents.skipped}): "
                "give other --data"
            )
        corpus = cache.open(found.sha256) or cache.build(found, progress)
        cache.remember_text(found.sha256)
    progress(1.0, "ready")
    return corpus


class _Cache:
    """The cache entries of a text, and what is known about the text without reading it."""

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        given: Tokenizer | None,
        vocab_size: int,
        verify: bool,
    ):
        self.folder, self.documents, self.given = folder, documents, given
        self.vocab_size, self.verify = vocab_size, verify
        root = os.fsencode(os.path.abspath(documents.root))
        self.text_name = f"text-{hashlib.sha256(root).hexdigest()[:16]}-f{FORMAT}"

    def entry(self, sha256: str) -> Path:
        """The cache entry of a text with this hash. A given tokenizer may be the one that was trained on this text."""
        entry = lambda which: self.folder / f"{sha256[:16]}-{which}-f{FORMAT}"
        trained, given = entry(f"v{self.vocab_size}"), self.given
        if given is None or _has_tokenizer(trained, given):
            return trained
        return entry(f"t{given.sha256[:16]}e{given.eot_id}")

    def known_text(self) -> Corpus | None:
        """The corpus of a text that has not changed since it was last read, if there is one."""
        known = {} if self.verify else stamps.load(self.folder, self.text_name)
        if not known or known.get("identity") != self.documents.identity():
            return None
        self.documents.files, self.documents.skipped = known["files"], known["skipped"]
        return self.open(known["sha256"])

    def remember_text(self, sha256: str) -> None:
        """Store that the text, as it was when last read, has this hash."""
        documents = self.documents
        if documents.settled:
            facts = {"files": documents.files, "skipped": documents.skipped, "sha256": sha256}
            known = {"identity": documents.identity_read, **facts}
            stamps.save(self.folder, self.text_name, known)

    def open(self, sha256: str) -> Corpus | None:
        """The cache entry, None if it is missing or damaged. Raises UserError if it cannot be read at the moment."""
        folder, documents = self.entry(sha256), self.documents
        try:
            record = read_state(folder)
            if record.get("sha256") != sha256 or not self._is_intact(folder, record.pop("blake2b")):
                return None
        except OSError as error:
            raise UserError(
                f"the cache entry {folder} cannot be read ({error.strerror or error}): fix that, then try again; it is kept"
            ) from None
        record["train"] = [folder / name for name in record["train"]]
        record["val"] = [folder / name for name in record["val"]]
        return Corpus(
            name=documents.name,
            files=documents.files,
            skipped=documents.skipped,
            folder=folder,
            tokenizer=self.given or Tokenizer.load(folder),
            **record,
        )

    def _is_intact(self, folder: Path, expected: dict[str, str]) -> bool:
        """Do the files have these digests? Large ones that have not changed since they were last read are not read."""
        before = {} if self.verify else stamps.load(self.folder, f"entry-{folder.name}")
        known = {}
        try:
            for name, digest in expected.items():
                read_at, now = time.time(), stamps.stamp(folder / name)
                unchanged = now[0] > ALWAYS_READ and before.get(name) == [digest, now]
                if not unchanged and files.digest(folder / name) != digest:
                    return False
                if unchanged or stamps.is_settled([now], read_at):
                    known[name] = [digest, now]
        except MISSING:
            return False
        if known != before:
            stamps.save(self.folder, f"entry-{folder.name}", known)
        return True

    def build(self, found: Survey, progress: Progress) -> Corpus:
        """Tokenize the text and put the result into the cache. Raises UserError."""
        entry = self.entry(found.sha256)
        waiting = lambda: progress(0.1, "waiting for another process that tokenizes the same text")
        try:
            with work_folder_of(entry, waiting) as work:
                corpus = self.open(found.sha256)  # of another process
                if corpus is not None:
                    return corpus
                self._tokenize(work, found, progress)
                shutil.rmtree(entry, ignore_errors=True)  # damaged
                try:
                    os.rename(work, entry)
                except OSError:
                    if not entry.is_dir():  # otherwise another process has written the same bytes
                        raise
                files.sync(entry.parent)
        except OSError as error:
            raise UserError(
                f"the cache folder {entry.parent} cannot be written ({error.strerror or error}): make room, or set XTRAIN_CACHE to another "
                "folder; what is already tokenized is kept for the next run"
            ) from None
        corpus = self.open(found.sha256)
        if corpus is None:
            raise UserError(
                f"{entry} cannot be read back: set XTRAIN_CACHE to a folder on another disk"
            )
        return corpus

    def _tokenize(self, work: Path, found: Survey, progress: Progress) -> None:
        documents = self.documents

        def train() -> Tokenizer:
            progress(0.15, "training the tokenizer")
            return Tokenizer.train(_sample(documents, found), self.vocab_size)

        tell = lambda fraction, text: progress(0.25 + 0.75 * fraction, text)
        with Tokenizing(work, self.given, train, tell) as tokenizing:
            tokenizing(documents, found)
        files.sync_folder(work)


def _has_tokenizer(entry: Path, tokenizer: Tokenizer) -> bool:
    """Is there a cache entry that was made with this tokenizer? Raises UserError if it cannot be read at the moment."""
    try:
        own = Tokenizer.load(entry)
    except UserError as error:
        if isinstance(error.__context__, OSError):
            raise
        return False  # missing or damaged
    return (own.sha256, own.eot_id) == (tokenizer.sha256, tokenizer.eot_id)


def _counted(documents: Documents, progress: Progress) -> Iterator[tuple[str, bool]]:
    """The documents, with progress."""
    n, told, started = 0, 0.0, time.perf_counter()
    for text, ends in documents:
        yield text, ends
        n += len(text)
        seconds = time.perf_counter() - started
        if seconds > told + 0.5:
            told = seconds
            fraction = min(1, n / max(1, documents.n_bytes))  # a compressed file has more text
            progress(0.1 * fraction, f"reading the text, {n / 1e6 / seconds:.0f} MB/s")


def _sample(documents: Iterable[tuple[str, bool]], found: Survey) -> Iterator[str]:
    """About SAMPLE_BYTES of the training text, spread evenly over it."""
    seen = sampled = 0
    for part in split(documents, found):
        for chunk in [] if part.held_out else chunks(part.text, SAMPLE_CHUNK):
            size = len(chunk.encode())
            seen += size
            if sampled * found.n_bytes <= seen * SAMPLE_BYTES:
                sampled += size
                yield chunk
