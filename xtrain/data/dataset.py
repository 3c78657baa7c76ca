"""A text as a corpus: documents -> tokenizer -> token shards, cached by the text's hash.

    prepare(data)                  read a text, train a tokenizer, write shards; cached -> Corpus
                                   (or files of tokens: token_files.py)
    Corpus.loader(B, T, seed)      endless shuffled training batches, exactly resumable -> Loader
    Corpus.val_batches(n, B, T)    the same batches of held-out text every time

In the shards (shards.py) the end-of-text token follows every document.

**Bits per byte** = nats / ln 2 / bytes, both summed over the same target tokens. `token_lengths`
has the bytes of each token; the end of text has none, so its loss only adds to the sum of nats.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..device import cache_folder
from ..errors import UserError
from . import stamps, token_files
from .batches import Loader, val_batches
from .documents import Documents, Survey, split
from .pieces import chunks
from .shards import Shard
from .sources import Data, Source
from .token_files import TokenFiles
from .tokenizer import Tokenizer
from .tokenizing import MISSING, Progress, Tokenizing, read_state, work_folder_of

# part of the cache key: increase it when the split, the shards or the tokenizer's training change
FORMAT = 4
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
    left_out: tuple[str, ...]  # of each file that is not used, the sentence that says why
    documents: int
    bytes: int  # of text in UTF-8
    sha256: str  # of the text
    split: str  # "documents" or "tail"
    train_bytes: int
    val_bytes: int
    train_tokens: int
    val_tokens: int
    # bits per validation byte of the byte-bigram model; None: there is no text, only tokens
    bigram_bpb: float | None
    folder: Path  # of the cache
    train: Sequence[Shard]
    val: Sequence[Shard]
    tokenizer: Tokenizer

    @property
    def skipped(self) -> int:
        """Number of files that are not used."""
        return len(self.left_out)

    @property
    def vocab_size(self) -> int:
        """Number of the tokenizer's tokens: fewer than requested if a short text has few pairs."""
        return self.tokenizer.vocab_size

    @property
    def token_lengths(self) -> np.ndarray:
        """Bytes of text in each token, (vocab_size,) int32."""
        return self.tokenizer.token_lengths

    def bits_per_byte(self, nats: float, targets: np.ndarray) -> float:
        """Return the bits per byte of targets. The result is exact.

        nats: the sum of their losses
        targets: their ids, in any shape
        """
        return nats / math.log(2) / int(self.token_lengths[targets].sum())

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> Loader:
        """Return endless shuffled batches of B sequences of T tokens. Ranks share the rows."""
        return Loader(self.train, B, T, seed, rank, world)  # prepare has verified the ids

    def val_batches(self, n: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return at most n batches of held-out text, ids and targets (B, T), always the same."""
        return val_batches(self.val, n, B, T)


def prepare(
    data: Data = None,
    vocab_size: int = 2048,
    cache_dir: str | Path | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress = lambda fraction, text: None,
    verify: bool = False,
    text_key: str = "text",
    strict: bool = False,
) -> Corpus:
    """Tokenize a text, or load it from the cache.

    data: file, folder or glob, or several (sources.py); None: the source of the Python standard
    library. tokenizer: a tokenizer.json to use instead of training one of vocab_size tokens.
    cache_dir: default device.cache_folder(). progress(fraction, text) is called from time to time.
    text_key: the field of a .jsonl, or the column, that holds the text. strict: a file that would
    be left out is an error. A text is tokenized in bounded memory; a killed or failed process is
    continued by the next one (tokenizing.py). Files of the text and shards of the cache whose size
    and times are as when they were read (stamps.py) are not read again, unless verify. All other
    files of the cache are. A damaged cache entry is built again, one that cannot be read at the
    moment is not. Raises UserError for every bad input.
    """
    own_tokenizer = None
    if tokenizer is not None:
        own_tokenizer = Tokenizer.load(tokenizer)
    documents = Documents(data, text_key)
    folder = Path(cache_dir or cache_folder())
    if sources := token_files.of(documents.sources):
        return _of_tokens(sources, documents.name, own_tokenizer, folder, progress, verify, strict)
    cache = _Cache(folder, documents, own_tokenizer, vocab_size, verify)
    corpus = cache.known_text()
    if corpus is None:
        progress(0.0, "reading the text")
        survey = documents.survey(_Counter(documents, progress))
        _check_left_out(documents.name, documents.left_out.values(), survey.documents > 0, strict)
        corpus = cache.open(survey.sha256) or cache.build(survey, progress)
        cache.remember_text(survey.sha256)
    _check_left_out(documents.name, corpus.left_out, True, strict)
    progress(1.0, "ready")
    return corpus


def _of_tokens(
    sources: list[Source],
    name: str,
    tokenizer: Tokenizer | None,
    cache: Path,
    progress: Progress,
    verify: bool,
    strict: bool,
) -> Corpus:
    """Return the corpus of files that hold tokens."""
    if tokenizer is None:
        raise UserError(
            f"{sources[0].path} holds tokens, not text: give the tokenizer that made them with "
            "--tokenizer FOLDER (it holds tokenizer.json)"
        )
    tell = lambda fraction: progress(fraction, "checking the tokens")
    tokens = TokenFiles(sources, tokenizer, cache, tell, verify)
    _check_left_out(name, tokens.left_out, bool(tokens.train), strict)
    facts: dict[str, Any] = tokens.summary()
    progress(1.0, "ready")
    return Corpus(
        name=name,
        files=tokens.files,
        left_out=tuple(tokens.left_out),
        split=tokens.split,
        bigram_bpb=None,
        folder=cache,
        train=tokens.train,
        val=tokens.val,
        tokenizer=tokenizer,
        **facts,
    )


def _check_left_out(name: str, left_out: Collection[str], has_data: bool, strict: bool) -> None:
    """Raise UserError if all of the data is left out, or any of it although the user wants all."""
    first = next(iter(left_out), "")
    if strict and left_out:
        others = ""
        if len(left_out) > 1:
            others = f" (and {len(left_out) - 1} more)"
        raise UserError(f"{first}{others}; without --strict-data it is left out")
    if not has_data and len(left_out) == 1:
        raise UserError(first)
    if not has_data:
        why = ""
        if left_out:
            why = f" ({len(left_out)} files are left out; {first})"
        raise UserError(f"{name} has no text: give other --data{why}")


class _Cache:
    """The cache entries of a text, and what is known about the text without reading it."""

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        verify: bool,
    ):
        self.folder = folder
        self.documents = documents
        self.tokenizer = tokenizer
        self.vocab_size, self.verify = vocab_size, verify
        which = json.dumps([documents.sources.absolute_paths, documents.key]).encode()
        self.text_name = f"text-{hashlib.sha256(which).hexdigest()[:16]}-f{FORMAT}"

    def entry(self, sha256: str) -> Path:
        """Return the cache entry of a text with this hash.

        A given tokenizer may be the one that was trained on this text.
        """
        entry = lambda which: self.folder / f"{sha256[:16]}-{which}-f{FORMAT}"
        trained = entry(f"v{self.vocab_size}")
        tokenizer = self.tokenizer
        if tokenizer is None or _has_tokenizer(trained, tokenizer):
            return trained
        return entry(f"t{tokenizer.sha256[:16]}e{tokenizer.eot_id}")

    def known_text(self) -> Corpus | None:
        """Return the corpus of a text that has not changed since it was last read, or None."""
        stored = {}
        if not self.verify:
            stored = stamps.load(self.folder, self.text_name)
        if not stored or stored.get("identity") != self.documents.identity():
            return None
        self.documents.files = stored["files"]
        self.documents.left_out = stored["left_out"]
        return self.open(stored["sha256"])

    def remember_text(self, sha256: str) -> None:
        """Store that the text, as it was when last read, has this hash."""
        documents = self.documents
        if documents.settled:
            facts = {"files": documents.files, "left_out": documents.left_out, "sha256": sha256}
            stored = {"identity": documents.identity_read, **facts}
            stamps.save(self.folder, self.text_name, stored)

    def open(self, sha256: str) -> Corpus | None:
        """Open the cache entry; None if it is missing or damaged.

        Raises UserError if it cannot be read at the moment.
        """
        folder = self.entry(sha256)
        documents = self.documents
        try:
            record = read_state(folder)
            if record.get("sha256") != sha256 or not self._is_intact(folder, record.pop("blake2b")):
                return None
        except OSError as error:
            raise UserError(
                f"the cache entry {folder} cannot be read ({error.strerror or error}): fix that, "
                "then try again; it is kept"
            ) from None
        record["train"] = [folder / name for name in record["train"]]
        record["val"] = [folder / name for name in record["val"]]
        return Corpus(
            name=documents.name,
            files=documents.files,
            left_out=tuple(documents.left_out.values()),
            folder=folder,
            tokenizer=self.tokenizer or Tokenizer.load(folder),
            **record,
        )

    def _is_intact(self, folder: Path, expected: dict[str, str]) -> bool:
        """Return True if the files have these digests.

        Large files that have not changed since they were last read are not read.
        """
        before = {}
        if not self.verify:
            before = stamps.load(self.folder, f"entry-{folder.name}")
        stored = {}
        try:
            for name, digest in expected.items():
                read_at = time.time()
                now = stamps.stamp(folder / name)
                unchanged = now[0] > ALWAYS_READ and before.get(name) == [digest, now]
                if not unchanged and files.digest(folder / name) != digest:
                    return False
                if unchanged or stamps.is_settled([now], read_at):
                    stored[name] = [digest, now]
        except MISSING:
            return False
        if stored != before:
            stamps.save(self.folder, f"entry-{folder.name}", stored)
        return True

    def build(self, survey: Survey, progress: Progress) -> Corpus:
        """Tokenize the text and put the result into the cache. Raises UserError."""
        entry = self.entry(survey.sha256)
        waiting = lambda: progress(0.1, "waiting for another process that tokenizes the same text")
        try:
            with work_folder_of(entry, waiting) as work:
                corpus = self.open(survey.sha256)  # of another process
                if corpus is not None:
                    return corpus
                self._tokenize(work, survey, progress)
                shutil.rmtree(entry, ignore_errors=True)  # damaged
                try:
                    os.rename(work, entry)
                except OSError:
                    if not entry.is_dir():  # otherwise another process has written the same bytes
                        raise
                files.sync(entry.parent)
        except OSError as error:
            raise UserError(
                f"the cache folder {entry.parent} cannot be written ({error.strerror or error}): "
                "make room, or set XTRAIN_CACHE to another "
                "folder; what is already tokenized is kept for the next run"
            ) from None
        corpus = self.open(survey.sha256)
        if corpus is None:
            raise UserError(
                f"{entry} cannot be read back: set XTRAIN_CACHE to a folder on another disk"
            )
        return corpus

    def _tokenize(self, work: Path, survey: Survey, progress: Progress) -> None:
        documents = self.documents

        def train() -> Tokenizer:
            progress(0.15, "training the tokenizer")
            return Tokenizer.train(_sample(documents, survey), self.vocab_size)

        tell = lambda fraction, text: progress(0.25 + 0.75 * fraction, text)
        with Tokenizing(work, self.tokenizer, train, tell) as tokenizing:
            tokenizing(documents, survey)
        files.sync_folder(work)


def _has_tokenizer(entry: Path, tokenizer: Tokenizer) -> bool:
    """Return True if this tokenizer made a cache entry.

    Raises UserError if it cannot be read at the moment.
    """
    try:
        own = Tokenizer.load(entry)
    except UserError as error:
        if isinstance(error.__context__, OSError):
            raise
        return False  # missing or damaged
    return (own.sha256, own.eot_id) == (tokenizer.sha256, tokenizer.eot_id)


class _Counter:
    """Called with the characters of each part that is read, it shows the progress."""

    def __init__(self, documents: Documents, progress: Progress):
        self.documents, self.progress = documents, progress
        self.n = 0
        self.told = 0.0
        self.started = time.perf_counter()

    def __call__(self, characters: int) -> None:
        self.n += characters
        seconds = time.perf_counter() - self.started
        if seconds > self.told + 0.5:
            self.told = seconds
            # a packed file has more text than bytes
            fraction = min(1, self.n / max(1, self.documents.n_bytes))
            text = f"reading the text, {self.n / 1e6 / seconds:.0f} MB/s"
            self.progress(0.1 * fraction, text)


def _sample(documents: Iterable[tuple[str, bool]], survey: Survey) -> Iterator[str]:
    """Yield about SAMPLE_BYTES of the training text, spread evenly over it."""
    seen = sampled = 0
    for part in split(documents, survey):
        for chunk in [] if part.held_out else chunks(part.text, SAMPLE_CHUNK):
            size = len(chunk.encode())
            seen += size
            if sampled * survey.n_bytes <= seen * SAMPLE_BYTES:
                sampled += size
                yield chunk
