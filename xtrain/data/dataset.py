"""Text -> token shards -> batches.

    prepare(data)                  read a text, train a tokenizer, write shards; cached -> Corpus
    Corpus.loader(B, T, seed)      endless shuffled training batches, exactly resumable -> Loader
    Corpus.val_batches(n, B, T)    the same batches of held-out text every time

**Shards** are llm.c's .bin files: 256 int32 (magic, version, number of tokens, zeros), then the
tokens, little-endian: magic 20240520, version 1 for uint16; magic 20240801, version 7 for uint32.
Every document is followed by the end-of-text token.

**Bits per byte** = nats / ln 2 / bytes, both summed over the same target tokens. `token_lengths`
has the bytes of each token; the end of text has none, so its loss counts against the model.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..device import cache_folder
from ..errors import UserError
from ..files import digest, sync, sync_folder, work_folder
from .corpus import Survey, Texts, bigram_bpb, byte_bigram_bpb, byte_bigrams, pieces, split, survey
from .tokenizer import Tokenizer

__all__ = [
    "Corpus",
    "Loader",
    "byte_bigram_bpb",
    "prepare",
    "read_shard",
    "val_batches",
    "write_shard",
]

FORMAT = (
    2  # in the cache's key: raise it when the split, the shards or the tokenizer's training change
)
SAMPLE_BYTES = 8_000_000  # of text to train the tokenizer on
SAMPLE_PIECE = (
    8192  # characters from one place: many places, and no endless word (BPE slows down on those)
)
ENCODE_PIECE = 1 << 20  # characters encoded as one string: bounds the memory for one huge document
ENCODE_BATCH = 8 << 20  # bytes encoded at once, on all cores
SHARD_TOKENS = 100_000_000
MOST_EPOCHS = 1000  # in one batch: more is a slip, and would take minutes and gigabytes to say so
HEADER_INTS = 256
SHARD_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}

Progress = Callable[[float, str], None]


# --- shards ---


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Write a .bin file, whole or not at all. tokens: (n,) integers below vocab_size, n < 2^31."""
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

    Raises UserError, naming the file, if it is not a whole shard or has an id >= vocab_size.
    """
    path, again = Path(path), "delete it and start again to make it anew"
    try:
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", HEADER_INTS)
    except OSError as error:
        raise UserError(
            f"the token shard {path} cannot be read ({error.strerror}): {again}"
        ) from None
    if len(header) < HEADER_INTS:
        raise UserError(f"{path} is too short to be a token shard: {again}")
    magic, version, n = (int(x) for x in header[:3])
    if magic not in [known for known, _ in SHARD_KINDS]:
        raise UserError(f"{path} is not a token shard (magic number {magic}): {again}")
    if (magic, version) not in SHARD_KINDS:
        raise UserError(f"{path} is a token shard of unknown version {version}: {again}")
    dtype = SHARD_KINDS[magic, version]
    expected = 4 * HEADER_INTS + n * dtype.itemsize
    if n < 1 or size != expected:
        raise UserError(f"{path} has {size} bytes, {n} tokens need {expected}: {again}")
    tokens = np.memmap(path, dtype, mode="r", offset=4 * HEADER_INTS, shape=(n,))
    if vocab_size is not None and (largest := int(tokens.max())) >= vocab_size:
        raise UserError(
            f"{path} has the id {largest}, the tokenizer has {vocab_size} tokens: {again}"
        )
    return tokens


# --- prepare ---


@dataclass(frozen=True)
class Corpus:
    """A text, tokenised: what training needs to know about it."""

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
        """May be smaller than asked: a short text has few repeated pairs."""
        return self.tokenizer.vocab_size

    @property
    def token_lengths(self) -> np.ndarray:
        """(vocab_size,) int32: bytes of text in each token."""
        return self.tokenizer.token_lengths

    def bits_per_byte(self, nats: float, targets: np.ndarray) -> float:
        """nats: the summed losses of the targets; targets: their ids, any shape. Exact for them."""
        return nats / math.log(2) / int(self.token_lengths[targets].sum())

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> "Loader":
        """Shuffled batches of B sequences of T tokens, for ever. With several ranks each reads a part of its own."""
        return Loader(self.train, B, T, seed, rank, world, self.vocab_size)

    def val_batches(self, n: int, B: int, T: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The first n batches of the held-out text, always the same: ids and targets (B, T)."""
        return val_batches(self.val, n, B, T, self.vocab_size)


def prepare(
    data: str | Path | None = None,
    vocab_size: int = 2048,
    cache_dir: str | Path | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress = lambda fraction, text: None,
) -> Corpus:
    """Tokenise a text, or find it tokenised: it is read and hashed each time, all else is cached.

    data: file or folder; None: Python's own source. tokenizer: a tokenizer.json to use instead of
    training one of vocab_size tokens. progress(fraction, text) is called now and then.
    A cache entry is built in a temporary folder and renamed, so it is whole or absent, also when
    several processes prepare the same text. Raises UserError for every bad input.
    """
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    progress(0.0, "reading the text")
    texts = Texts(data)
    found = survey(texts)
    if not found.documents:
        raise UserError(
            f"{texts.name} has no text (files that are no text: {texts.skipped}): give other --data"
        )
    which = f"t{given.sha256[:16]}e{given.eot_id}" if given else f"v{vocab_size}"
    key = f"{found.sha256[:16]}-{which}-f{FORMAT}"
    folder = Path(cache_dir or cache_folder()) / key
    about = {"name": texts.name, "files": texts.files, "skipped": texts.skipped}
    corpus = _open(folder, found, about, given)
    if corpus is None:
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or not there
        try:
            _build(folder, texts, found, given, vocab_size, progress)
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


def _open(folder: Path, found: Survey, about: dict, given: Tokenizer | None) -> Corpus | None:
    """The cache entry, or None if it is absent or not whole."""
    try:
        record = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        for name, right in record.pop("blake2b").items():
            if digest(folder / name) != right:
                return None
        record["train"] = [folder / name for name in record["train"]]
        record["val"] = [folder / name for name in record["val"]]
        tokenizer = given or Tokenizer.load(folder)
        corpus = Corpus(**about, **record, folder=folder, tokenizer=tokenizer)
        sizes = [
            sum(len(read_shard(path)) for path in shards) for shards in (corpus.train, corpus.val)
        ]
        whole = sizes == [corpus.train_tokens, corpus.val_tokens] and corpus.sha256 == found.sha256
        return corpus if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # UserError is a ValueError
        return None


def _build(
    folder: Path,
    texts: Texts,
    found: Survey,
    given: Tokenizer | None,
    vocab_size: int,
    progress: Progress,
):
    folder.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(folder.parent) as temporary:
        if given is None:
            progress(0.1, "training the tokenizer")
        tokenizer = given or Tokenizer.train(_sample(texts, found), vocab_size)
        tokenizer.save(temporary)
        record = _tokenise(temporary, texts, found, tokenizer, progress)
        record["blake2b"] = {path.name: digest(path) for path in sorted(temporary.glob("*.bin"))}
        (temporary / "corpus.json").write_text(
            json.dumps(record, indent=2) + "\n", encoding="utf-8"
        )
        sync_folder(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same bytes
                raise
        sync(folder.parent)


def _sample(texts: Texts, found: Survey) -> Iterator[str]:
    """About SAMPLE_BYTES of the training text, spread evenly over it."""
    seen = taken = 0
    for text, _, val in split(texts, found):
        for piece in [] if val else pieces(text, SAMPLE_PIECE):
            size = len(piece.encode())
            seen += size
            if taken * found.bytes <= seen * SAMPLE_BYTES:
                taken += size
                yield piece


class _Side:
    """Training or validation text on its way into shards."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer):
        self.folder, self.name, self.tokenizer = folder, name, tokenizer
        self.bytes = self.tokens = 0
        self.shards: list[str] = []
        self.bigrams_AB = np.zeros((256, 256), np.int64)
        self._texts: list[str] = []
        self._raws: list[bytes] = []
        self._parts: list[np.ndarray] = []

    def add(self, text: str, raw: bytes) -> None:
        self._texts.append(text)
        self._raws.append(raw)
        self.bytes += len(raw)

    def encode(self) -> None:
        """Everything added since the last call; complete shards are written."""
        self.bigrams_AB += byte_bigrams(self._raws)
        cut = [list(pieces(text, ENCODE_PIECE)) for text in self._texts]
        ids = iter(self.tokenizer.encode_batch([piece for document in cut for piece in document]))
        flat: list[int] = []
        for document in cut:
            for _ in document:
                flat += next(ids)
            flat.append(self.tokenizer.eot_id)
        self._parts.append(np.array(flat, np.uint32))
        self._texts, self._raws = [], []
        self.write(SHARD_TOKENS)

    def write(self, least: int) -> None:
        """Write shards while at least `least` tokens wait."""
        while sum(map(len, self._parts)) >= least:
            tokens = np.concatenate(self._parts)
            name = f"{self.name}_{len(self.shards):06d}.bin"
            write_shard(self.folder / name, tokens[:SHARD_TOKENS], self.tokenizer.vocab_size)
            self.shards.append(name)
            self.tokens += len(tokens[:SHARD_TOKENS])
            self._parts = [tokens[SHARD_TOKENS:]]


def _tokenise(
    folder: Path, texts: Texts, found: Survey, tokenizer: Tokenizer, progress: Progress
) -> dict:
    """Write the shards of both sides; -> what corpus.json records."""
    train, val = sides = [_Side(folder, name, tokenizer) for name in ("train", "val")]
    done = 0
    for text, raw, is_val in split(texts, found):
        sides[is_val].add(text, raw)
        if train.bytes + val.bytes - done >= ENCODE_BATCH:
            done = train.bytes + val.bytes
            train.encode()
            val.encode()
            progress(0.25 + 0.75 * done / found.bytes, "tokenising")
    for side in sides:
        if not side.bytes:
            raise UserError(
                f"the text has {found.bytes} bytes, too few to hold some out: give more text"
            )
        side.encode()
        side.write(1)
    return {
        "documents": found.documents,
        "bytes": found.bytes,
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


# --- batches ---


class Loader:
    """Endless shuffled batches of next-token prediction.

    In an epoch each shard is a ring that starts at a random token and is cut into len // T windows,
    so the windows lie differently every time and no token is left out for good. (A window may run
    over the seam: the last document is followed by the first.) The order of the windows is a
    permutation. Both come from (seed, epoch) alone, so the state is one number, `position`: the
    sequences that all ranks together have taken.

    Rank r takes rows [r B/world, (r+1) B/world) of a batch: the batch is the same in every world.
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
        """shards: .bin files. vocab_size: refuse shards with an id that is not below it."""
        if B % world:
            raise UserError(
                f"--batch {B} is not a multiple of the {world} ranks: choose one that is"
            )
        self.B, self.T, self.seed, self.rank, self.world = B, T, seed, rank, world
        self._shards = [read_shard(path, vocab_size) for path in shards]
        # The target of the last token is one further: a shard of T tokens has no window.
        windows_S = [len(tokens) // T if len(tokens) > T else 0 for tokens in self._shards]
        self._ends_S = np.cumsum(windows_S)
        self.windows = int(self._ends_S[-1])  # in an epoch
        if not self.windows:
            _too_short("training", max(map(len, self._shards)), T)
        if B / self.windows > MOST_EPOCHS:
            raise UserError(
                f"--batch {B} is {B // self.windows:,} times the text, which has {self.windows:,} windows of "
                f"--seq-len {T}: choose a smaller one"
            )
        self.position = 0
        self._epoch = lru_cache(2)(
            self._epoch
        )  # a batch touches two epochs at most, unless the text is tiny

    @property
    def epoch(self) -> float:
        """How often the text has been seen."""
        return self.position / self.windows

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """-> ids, targets: (B/world, T) int32, targets[:, t] is the token after ids[:, t]."""
        rows = self.B // self.world
        first = self.position + self.rank * rows
        tokens = np.stack([self._window(i) for i in range(first, first + rows)])
        self.position += self.B
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

    def state_dict(self) -> dict[str, int]:
        """Where in the text it is, as whole numbers: what a checkpoint keeps."""
        return {
            "position": self.position,
            "seed": self.seed,
            "seq_len": self.T,
            "windows": self.windows,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where another loader of the same text stopped; B and world may differ."""
        mine = self.state_dict()
        for name in ("seed", "seq_len", "windows"):
            if state.get(name) != mine[name]:
                raise UserError(
                    f"the data position was saved with {name} {state.get(name)}, this run has "
                    f"{mine[name]}: resume with the same text and options"
                )
        if not isinstance(state.get("position"), int) or state["position"] < 0:
            raise UserError(
                f"the saved data position {state.get('position')!r} is no number of sequences"
            )
        self.position = state["position"]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """-> order of the windows (W,), first token of each shard's ring (S,)."""
        rng = np.random.default_rng((self.seed % 2**64, epoch))
        return rng.permutation(self.windows), rng.integers([len(tokens) for tokens in self._shards])

    def _window(self, i: int) -> np.ndarray:
        """-> (T + 1,) int32: the i-th window since the start of training."""
        order_W, start_S = self._epoch(i // self.windows)
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
    fewer batches, and its last one may have fewer rows.
    """
    tokens = np.concatenate([read_shard(path, vocab_size) for path in shards]).astype(np.int32)
    windows = (len(tokens) - 1) // T
    if not windows:
        _too_short("validation", len(tokens), T)
    wanted = min(n * B, windows)
    first = np.arange(wanted) * windows // wanted * T
    rows = tokens[first[:, None] + np.arange(T + 1)]
    return [
        (np.ascontiguousarray(rows[i : i + B, :-1]), np.ascontiguousarray(rows[i : i + B, 1:]))
        for i in range(0, wanted, B)
    ]


def _too_short(which: str, tokens: int, T: int) -> None:
    raise UserError(
        f"the {which} text has {tokens} tokens, a window needs {T + 1}: "
        "give more text (--data) or a smaller --seq-len"
    )
