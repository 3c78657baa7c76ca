"""From documents to token shards, in bounded memory; continued after a kill.

A text is encoded in batches of pieces (pieces.py), on all cores, while the next batch is read, and
their tokens are appended to the shards. After COMMIT bytes of text the shards are synced, and STATE
records how many tokens they hold and their checksums. A process that finds STATE verifies the
tokens, cuts off what came later, reads the text again up to there without encoding it, and
continues: every bit is that of an uninterrupted run.

The work folder is `.tmp-NAME` next to the cache entry NAME that it becomes, locked by the process
that writes it; another process waits. Where folders cannot be locked (Windows, some network disks),
every process writes its own folder, and a killed one starts from the beginning.
"""

import array
import contextlib
import hashlib
import itertools
import json
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from ..errors import UserError
from ..files import STRAY_SECONDS, Busy, digest, locked, sync, work_folder, write_whole
from . import pieces
from .bigram import bigram_bpb, count_bigrams
from .documents import Documents, Part, Survey, split
from .pieces import Cutter
from .shards import ShardWriter
from .text_files import PART
from .tokenizer import Tokenizer

# Bytes encoded at once, on all cores: a token takes up to 250 bytes of memory meanwhile.
ENCODE_BATCH = 2 << 20
SHARD_TOKENS = 100_000_000
COMMIT = 16 << 20  # bytes of text between two commits: what a kill may cost
STATE = "corpus.json"  # in the work folder: the progress; in the cache entry: its facts
KEEP_SECONDS = 7 * 86400  # the work folder of a killed process, if its text is not tokenized again
POLL_SECONDS = 0.5

# errors that say that a file is not there; after any other, it may be intact
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

Progress = Callable[[float, str], None]


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_state(folder: Path, content: dict[str, Any]) -> None:
    """Replace STATE. Raises OSError."""
    text = json.dumps({**content, "itself": _hash_of(content)}, indent=2)
    write_whole(folder / STATE, (text + "\n").encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Return what write_state wrote; {} if it is missing or damaged.

    Raises OSError if it cannot be read at the moment.
    """
    try:
        content = json.loads((folder / STATE).read_bytes())
    except (*MISSING, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    itself = content.pop("itself", None)
    if itself is not None and itself == _hash_of(content):
        return content
    return {}


# ----------------------------------------------------------------------------- the work folder
@contextlib.contextmanager
def work_folder_of(entry: Path, wait: Callable[[], None]) -> Iterator[Path]:
    """Yield the locked work folder of a cache entry, with what a killed process has left there.

    It is removed at the end, unless the caller has renamed it or STATE is in it. wait(): called
    from time to time while another process holds the lock. Raises OSError.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    folder = entry.with_name(f".tmp-{entry.name}")
    for stray in entry.parent.glob(".tmp-*"):
        if stray != folder:
            _remove_if_dead(stray)
    with contextlib.ExitStack() as stack:
        while (is_locked := _lock(folder, stack)) is None:
            wait()
            time.sleep(POLL_SECONDS)
        if not is_locked:
            stack.close()
            with contextlib.suppress(OSError):
                folder.rmdir()
            folder = stack.enter_context(work_folder(entry.parent))
        try:
            yield folder
        finally:
            if not is_locked or not (folder / STATE).is_file():
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, stack: contextlib.ExitStack) -> bool | None:
    """Make and lock a folder until the stack closes.

    Returns True, False where locks are not supported, None if another process has it.
    """
    folder.mkdir(exist_ok=True)
    try:
        inode = folder.stat().st_ino
        with contextlib.ExitStack() as mine:
            is_locked = mine.enter_context(locked(folder))
            if folder.stat().st_ino == inode:  # else another process has renamed or removed it
                stack.push(mine.pop_all())
                return is_locked
    except (Busy, FileNotFoundError):
        pass
    return None


def _remove_if_dead(stray: Path) -> None:
    # OSError: another process has just removed it
    with contextlib.suppress(Busy, OSError), locked(stray) as is_locked:
        unused = time.time() - stray.stat().st_mtime
        keep = 0 if is_locked else STRAY_SECONDS
        if unused > (KEEP_SECONDS if (stray / STATE).is_file() else keep):
            shutil.rmtree(stray, ignore_errors=True)


# ----------------------------------------------------------------------------- shards
class _Side:
    """The training or the validation text: its pieces, and the shards with their tokens."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer):
        self.folder = folder
        self.name = name
        self.tokenizer = tokenizer
        self.cutter = Cutter(tokenizer.rule)
        self.bytes = 0
        self.bigrams_AB = np.zeros((256, 256), np.int64)
        self.written: list[tuple[int, str]] = []  # of each full shard: tokens, digest
        self.shard: ShardWriter | None = None
        # text whose bigrams are not yet counted, where its documents start, and the byte before it
        self._raw = bytearray()
        self._before = 0
        self._starts: list[int] = []
        self._ended = True  # is the document before the next part complete?

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(n for n, _ in self.state())

    def add(self, part: Part) -> Iterator[tuple[str, bool]]:
        """Count a part of the text. Yields (piece, True if it ends a document)."""
        if part.raw and self._ended:
            self._starts.append(len(self._raw))
            self._ended = False
        self._ended |= part.ends
        self._raw += part.raw
        self.bytes += len(part.raw)
        return self.cutter.add(part.text, part.ends)

    def count(self) -> None:
        """Count the bigrams of the text so far."""
        if self._raw:
            self.bigrams_AB += count_bigrams(bytes(self._raw), self._starts, self._before)
            self._before = self._raw[-1]
            self._raw = bytearray()
            self._starts = []

    def resume(self, written: list[list[Any]]) -> bool:
        """Continue shards, and return True if they hold these tokens. Raises OSError.

        written: their state(), from STATE
        """
        for i, (tokens, digest_then) in enumerate(written):
            path = self.folder / self.file_name(i)
            shard = ShardWriter(path, self.tokenizer.vocab_size, resume_at=tokens)
            if (shard.tokens, shard.digest) != (tokens, digest_then):
                shard.close()
                return False
            if tokens == SHARD_TOKENS:
                shard.close()
                self.written.append((tokens, digest_then))
            else:
                self.shard = shard
        return True

    def append(self, tokens: np.ndarray) -> None:
        """Append to the shards; a full one is finished."""
        while len(tokens):
            if self.shard is None:
                path = self.folder / self.file_name(len(self.written))
                self.shard = ShardWriter(path, self.tokenizer.vocab_size)
            room = SHARD_TOKENS - self.shard.tokens
            self.shard.append(tokens[:room])
            tokens = tokens[room:]
            if self.shard.tokens == SHARD_TOKENS:
                self.finish()

    def finish(self) -> None:
        """Finish the last shard."""
        if self.shard is not None:
            self.shard.finish()
            self.written.append((self.shard.tokens, self.shard.digest))
            self.shard = None

    def close(self) -> None:
        """Close the last shard, unfinished."""
        if self.shard is not None:
            self.shard.close()

    def file_name(self, i: int) -> str:
        return f"{self.name}_{i:06d}.bin"

    def state(self) -> list[tuple[int, str]]:
        """Return tokens and their digest, of each shard."""
        open_shard = []
        if self.shard is not None:
            open_shard = [(self.shard.tokens, self.shard.digest)]
        return self.written + open_shard


# ----------------------------------------------------------------------------- the work
class _Batch(NamedTuple):
    """Pieces that are being encoded.

    number: of the batch, from 1
    done: bytes of text up to its end
    """

    number: int
    done: int
    queue: list[tuple[_Side, str, bool]]  # side, piece, does it end a document?
    ids: Future[list[list[int]]]  # of each piece


class Tokenizing:
    """Fill a work folder: tokenizer, shards, STATE. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        train: Callable[[], Tokenizer],
        progress: Progress,
    ):
        """Begin, or continue what a killed process has left in the folder. Raises OSError,
        UserError.

        tokenizer: None: the one that train() returns
        """
        self.folder, self.progress = folder, progress
        self.committed = 0  # batches whose tokens are in the shards
        state = read_state(folder)
        self.complete = "blake2b" in state and intact(folder, state["blake2b"])
        if self.complete or self._resume(state, tokenizer):
            return
        for path in folder.iterdir():
            path.unlink()
        self._begin(tokenizer or train())
        self.tokenizer.save(folder)
        self.files = {path.name: digest(path) for path in sorted(folder.iterdir())}

    def _begin(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.train, self.val = (_Side(self.folder, name, tokenizer) for name in ("train", "val"))

    def _resume(self, state: dict[str, Any], tokenizer: Tokenizer | None) -> bool:
        """Continue what a killed process has left, if it is undamaged and of the same settings."""
        if state.get("settings") != _settings() or not intact(self.folder, state["files"]):
            return False
        self._begin(tokenizer or Tokenizer.load(self.folder))
        try:
            if self.train.resume(state["train"]) and self.val.resume(state["val"]):
                self.committed, self.files = state["batches"], state["files"]
                return True
        except MISSING:
            pass
        self.__exit__()
        return False

    def __enter__(self) -> "Tokenizing":
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.complete:
            self.train.close()
            self.val.close()

    def __call__(self, documents: Documents, survey: Survey) -> None:
        """Tokenize the text.

        Raises OSError; UserError if the text has changed or is too short.
        """
        if not self.complete:
            with ThreadPoolExecutor(1) as pool:
                self._tokenize(documents, survey, pool)
            self._finish(survey)

    def _tokenize(self, documents: Documents, survey: Survey, pool: ThreadPoolExecutor) -> None:
        """Encode a batch in the pool, on all cores, while this thread reads the next one."""
        queue: list[tuple[_Side, str, bool]] = []
        queued = batches = last_commit = 0
        started = time.perf_counter()
        skipped = 0
        encoding = None
        for part in itertools.chain(split(documents, survey), [None]):
            if part is not None:
                if part.held_out:
                    side = self.val
                else:
                    side = self.train
                for piece, ends in side.add(part):
                    queue.append((side, piece, ends))
                    queued += len(piece.encode())
                if queued < ENCODE_BATCH:
                    continue
            for side in (self.train, self.val):
                side.count()
            done = self.train.bytes + self.val.bytes
            batches = batches + 1
            if batches > self.committed:
                last_commit = self._append(encoding, last_commit)
                texts = [piece for _, piece, _ in queue]
                ids = pool.submit(self.tokenizer.encode_batch, texts)
                encoding = _Batch(batches, done, queue, ids)
                speed = (done - skipped) / 1e6 / (time.perf_counter() - started)
                text = f"tokenizing, {speed:.1f} MB/s"
            else:
                started = time.perf_counter()
                skipped = done
                last_commit = done
                text = "reading what is already tokenized"
            queue = []
            queued = 0
            self.progress(done / survey.n_bytes, text)
        self._append(encoding, last_commit)

    def _append(self, batch: "_Batch | None", last_commit: int) -> int:
        """Append the tokens of a batch to the shards, and commit if it is time.

        Returns the bytes of text at the last commit.
        """
        if batch is None:
            return last_commit
        flat = {self.train: array.array("I"), self.val: array.array("I")}
        for (side, _, ends), ids in zip(batch.queue, batch.ids.result()):
            flat[side].extend(ids)
            if ends:
                flat[side].append(self.tokenizer.eot_id)
        for side, tokens in flat.items():
            side.append(np.frombuffer(tokens, np.uintc))
        if batch.done - last_commit < COMMIT:
            return last_commit
        self._commit(batch.number)
        return batch.done

    def _commit(self, batches: int) -> None:
        for side in (self.train, self.val):
            if side.shard is not None:
                side.shard.sync()
        sides = {side.name: side.state() for side in (self.train, self.val)}
        content = {"settings": _settings(), "files": self.files, "batches": batches, **sides}
        write_state(self.folder, content)
        sync(self.folder)

    def _finish(self, survey: Survey) -> None:
        for side in (self.train, self.val):
            if not side.bytes:
                raise UserError(
                    f"the text has {survey.n_bytes} bytes, too few to hold some out for "
                    "validation: give more text"
                )
            side.finish()
        train, val = self.train, self.val
        shards = {
            side.name: [side.file_name(i) for i in range(len(side.written))]
            for side in (train, val)
        }
        names = shards["train"] + shards["val"]
        write_state(
            self.folder,
            {
                "documents": survey.documents,
                "bytes": survey.n_bytes,
                "sha256": survey.sha256,
                "split": "documents" if survey.by_document else "tail",
                "train_bytes": train.bytes,
                "val_bytes": val.bytes,
                "train_tokens": train.tokens,
                "val_tokens": val.tokens,
                "bigram_bpb": bigram_bpb(train.bigrams_AB, val.bigrams_AB),
                **shards,
                "blake2b": self.files | {name: digest(self.folder / name) for name in names},
            },
        )


def intact(folder: Path, files: dict[str, str]) -> bool:
    """Return True if files of a folder have these digests.

    Raises OSError if one cannot be read at the moment.
    """
    try:
        return all(digest(folder / name) == expected for name, expected in files.items())
    except MISSING:
        return False


def _settings() -> dict[str, Any]:
    """Return what decides the batches and their tokens."""
    return {
        "tokenizers": tokenizers.__version__,
        "unicode": unicodedata.unidata_version,
        "sizes": [ENCODE_BATCH, SHARD_TOKENS, PART, pieces.PIECE, pieces.LONGEST],
    }
