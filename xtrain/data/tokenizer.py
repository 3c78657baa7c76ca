"""Byte-level BPE (Sennrich 2016, on bytes as in GPT-2), by the `tokenizers` library: text <-> ids.

A text is first a sequence of UTF-8 bytes, so no character is unknown and nothing is lost: the bytes
of its tokens, concatenated, are the text. So `token_lengths` makes bits per byte exact for any
window of tokens, and `stream` must hold back a token that ends inside a character
until the character is complete.

A tokenizer is saved in Hugging Face's layout: tokenizer.json and tokenizer_config.json. A loaded
tokenizer keeps its companion files: the names of its special tokens, its chat templates.

Which tokens begin and end a text is decided here: encode_prompt for a text that something follows,
encode_text for a whole one, encode for one that stands as it is, such as a rendered conversation.
Which tokens end an answer is decided in formats/texts.py.
"""

import codecs
import contextlib
import copy
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ..config import MOST
from ..errors import UserError
from ..files import write_whole
from ..json_files import check_pointer
from .pieces import rule
from .tokenizer_files import (
    CONFIG,
    Files,
    add_named_tokens,
    check_added_tokens,
    config_of,
    read_companions,
    rows_of,
    special_names,
    token_text,
    with_prefix_space,
    without_rows,
)

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 257  # 256 bytes and the end of text
MAX_VOCAB = MOST["vocab_size"]
# Names of the end of text in other tokenizers, tried if tokenizer_config.json does not give it.
KNOWN_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
NOT_A_BYTE = "\uffff"  # also not in Latin-1


class Tokenizer:
    """A tokenizer with an end-of-text token. Make one with `Tokenizer.train` or `Tokenizer.load`.

    vocab_size     V: every id is below it (smaller than requested if the text is short)
    eot_id, eot    the token that ends a document, and its text. `encode` turns that text into the
                   token, as Hugging Face does. UserError if there is no such token
    token_bytes    list of V byte strings
    token_lengths  (V,) int32: their lengths, but 0 for the end of text
    bos_token_id   what tokenizer_config.json calls bos_token, or None; eos_token_id: eot_id, or None
    begin, end     the tokens that it puts before a text, and those after it
    special_ids    control tokens, which are not text: begin, end, roles of a chat
    added_ids      tokens that are never split: special_ids, and others
    sha256         of the saved tokenizer.json
    companions     {name: content} of the files next to tokenizer.json
    rule           where a text may be cut without a change of its tokens: pieces.py
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eot: str = END_OF_TEXT,
        companions: Files | None = None,
    ):
        """Make a tokenizer.

        backend: is changed: the tokens that the companions name are added
        companions: {name: content} of files that `save` writes back unchanged
        """
        # the file may hold a truncation setting, which would cut documents short
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eot = eot
        self.companions = companions or {}
        if CONFIG not in self.companions:
            own = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": eot,
                "eos_token": eot,
                "clean_up_tokenization_spaces": False,
            }
            self.companions[CONFIG] = (json.dumps(own, indent=2) + "\n").encode()
        config = config_of(self.companions)
        add_named_tokens(backend, config, [eot, *special_names(config)])
        self.eos_token_id = backend.token_to_id(eot)
        bos = token_text(config.get("bos_token"))
        self.bos_token_id = None
        if bos is not None:
            self.bos_token_id = backend.token_to_id(bos)
        self.begin, self.end = _around(backend)
        ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        if self.vocab_size > MAX_VOCAB:
            raise UserError(
                f"the tokenizer has the id {self.vocab_size - 1}, xtrain supports ids below "
                f"{MAX_VOCAB}"
            )
        content = self.content()
        added = content["added_tokens"]
        self.added_ids = frozenset(token["id"] for token in added)
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self.token_bytes = _token_bytes(ids, self.vocab_size, content)
        self._check_that_texts_are_joined()
        self.token_lengths = np.array([len(b) for b in self.token_bytes], np.int32)
        if self.eos_token_id is not None:
            self.token_lengths[self.eos_token_id] = 0
        normalizer = backend.normalizer
        self.rule = rule(content, normalizer.normalize_str if normalizer else str)

    def _check_that_texts_are_joined(self):
        """Raise UserError unless the text of tokens is their bytes, one after the other.

        The text may begin with a space less. Decoders that put spaces between tokens, take repeated
        ones away or rewrite them (WordPiece, BPEDecoder, CTC) are other than that.
        """
        some = range(0, self.vocab_size, self.vocab_size // 400 + 1)
        plain = [i for i in some if i not in self.added_ids and self.token_bytes[i].isascii()]
        ids = [i for i in plain for _ in range(2)]
        joined = b"".join(self.token_bytes[i] for i in ids).decode()
        if self.decode(ids).lstrip(" ") != joined.lstrip(" "):
            kind = (self.content()["decoder"] or {}).get("type")
            raise UserError(
                f"its decoder ({kind}) does not write the texts of tokens one after the other, "
                "which xtrain needs: use a byte-level tokenizer or one of SentencePiece"
            )

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of the file that `save` writes."""
        return hashlib.sha256(self._json()).hexdigest()

    @property
    def eot_id(self) -> int:
        """The token that ends a document.

        Raises UserError if there is none: such a tokenizer can serve, but not train.
        """
        if self.eos_token_id is None:
            raise UserError(f"the tokenizer has no token {self.eot!r} to end a document with")
        return self.eos_token_id

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the merges from texts. A pair seen only once is not merged.

        The same texts give the same file. Raises UserError if vocab_size is below MIN_VOCAB.
        """
        if vocab_size > MAX_VOCAB:
            raise UserError(f"--vocab-size must be at most {MAX_VOCAB}, got {vocab_size}")
        if vocab_size < MIN_VOCAB:
            raise UserError(
                f"--vocab-size {vocab_size} is too small: give at least {MIN_VOCAB}, "
                f"for 256 bytes and {END_OF_TEXT}"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path, model: Path | None = None) -> "Tokenizer":
        """Load a tokenizer.json, or the one in a folder.

        model: the folder of its model, if it is another one. Added tokens that the model does not
        have are left out.

        Raises UserError if it is missing or cannot be used.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            for other in (path.with_name(name) for name in ("tokenizer.model", "vocab.json")):
                if other.is_file():
                    raise UserError(
                        f"{path.parent} has a {other.name}, but no tokenizer.json: make one with "
                        "transformers.AutoTokenizer."
                        "from_pretrained(folder).save_pretrained(folder), or copy it from a newer "
                        "release of the model"
                    )
            raise UserError(
                f"there is no tokenizer at {path}: give a tokenizer.json or a folder that holds one"
            )
        try:
            text = path.read_bytes()
            check_pointer(text, path)
            companions = read_companions(path.parent)
            config = config_of(companions, path.parent)
            text = with_prefix_space(text, config)
            backend = tokenizers.Tokenizer.from_str(text.decode())
            if rows := rows_of(model or path.parent):
                backend, companions = without_rows(backend, companions, rows)
                config = config_of(companions, path.parent)
            check_added_tokens(config, backend)
            return cls(backend, _end_of_text(config, backend), companions)
        except UserError as error:
            raise UserError(f"{path} cannot be used: {error}") from None
        except OSError as error:
            raise UserError(
                f"{error.filename or path} cannot be read ({error.strerror}): fix that, then try "
                "again"
            ) from None
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise UserError(f"{path} is not a tokenizer.json: {_reason(error)}") from None

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and its companion files, for transformers.AutoTokenizer.

        Makes the folder if its parent exists. Each file is replaced atomically, so after a kill
        some are of an earlier tokenizer; `save_pretrained` of a model changes all at once. Raises
        OSError.
        """
        folder = Path(folder)
        # without parents: a run's folder that was removed must not come back
        folder.mkdir(exist_ok=True)
        for name, content in {"tokenizer.json": self._json(), **self.companions}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_whole(folder / name, content)

    def with_special(self, ids: Iterable[int]) -> "Tokenizer":
        """Return this tokenizer with more special_ids: those of these ids that are never split."""
        other = copy.copy(self)
        other.special_ids = self.special_ids | (self.added_ids & frozenset(ids))
        return other

    def without_special(self, ids: Iterable[int]) -> "Tokenizer":
        """Return this tokenizer with fewer special_ids."""
        other = copy.copy(self)
        other.special_ids = self.special_ids - frozenset(ids)
        return other

    def with_tokens(self, texts: Sequence[str]) -> "Tokenizer":
        """Return this tokenizer with special tokens of these texts after the others."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in texts])
        return Tokenizer(backend, self.eot, self.companions)

    def with_chat_template(self, source: str) -> "Tokenizer":
        """Return this tokenizer with one chat template, in chat_template.jinja."""
        other = copy.copy(self)
        kept = {name: x for name, x in self.companions.items() if not name.endswith(".jinja")}
        other.companions = kept | {"chat_template.jinja": source.encode()}
        return other

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens around it.

        Raises UserError if the library fails on this text, as the other methods do.
        """
        with _library("encode this text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that something follows: without tokens that end it.

        add_special_tokens: with `begin` before it, unless the text begins with such a token itself
        """
        ids = self.encode(text)
        if add_special_tokens and ids[:1] != self.begin[:1]:
            return self.begin + ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a whole text: with `begin` and `end`, each unless the text has it."""
        ids = self.encode_prompt(text)
        if ids[-1:] != self.end[-1:]:
            return ids + self.end
        return ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids, and the characters [start, end) of the text that each comes from.

        No tokens are put around the text.
        """
        with _library("encode this text"):
            encoding = self._untrimmed.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets

    @functools.cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        """The backend, but white space of a token belongs to its characters."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        return backend

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of a text that follows another one.

        Some tokenizers (Llama 2's) put a space in front of every text; this one is encoded after a
        line break, whose ids are then cut off.
        """
        before = self.encode("\n")
        whole = self.encode("\n" + text)
        n = len(before)
        # else the line break was merged with the text
        if whole[:n] == before:
            return whole[n:]
        return self.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode many texts, on all cores."""
        with _library("encode these texts"):
            return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids.

        Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are left out.
        """
        with _library("decode these tokens"):
            return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def entries(self, ids: Iterable[int]) -> list[str]:
        """Return the entries of the vocabulary, in which bytes may be other characters; "" for ids
        outside of it."""
        return [self._backend.id_to_token(int(i)) or "" for i in ids]

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield text as ids arrive, complete characters only; joined, it equals `decode` of all
        ids. Only of byte tokens of SentencePiece that are not UTF-8 does `decode` lose more: all
        of a run.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            text = decoder.decode(self.token_bytes[i] if i < self.vocab_size else b"")
            if text:
                yield text
        if tail := decoder.decode(b"", final=True):
            yield tail

    def content(self) -> dict[str, Any]:
        """Return the content of tokenizer.json."""
        return json.loads(self._backend.to_str())

    def _json(self) -> bytes:
        return (self._backend.to_str(pretty=True) + "\n").encode()


@contextlib.contextmanager
def _library(task: str) -> Iterator[None]:
    """Turn an error of the library into a UserError; Python's own, such as TypeError, stay."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not _is_panic(error):
            raise
        raise UserError(
            f"the tokenizer cannot {task} ({_reason(error)}): give other text or another tokenizer"
        ) from None


def _is_panic(error: BaseException) -> bool:
    """Return True for a panic in the library's Rust code, which is no Exception.

    Other errors are; parse errors are Exception itself.
    """
    return type(error).__name__ == "PanicException"


def _reason(error: BaseException) -> str:
    if str(error).strip():
        return str(error).splitlines()[0][:300]
    return type(error).__name__


def _end_of_text(config: dict[str, Any], backend: tokenizers.Tokenizer) -> str:
    """Return eos_token of tokenizer_config.json, else the first known name in the vocabulary."""
    names = (name for name in KNOWN_END_OF_TEXT if backend.token_to_id(name) is not None)
    return token_text(config.get("eos_token")) or next(names, END_OF_TEXT)


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the post-processor puts before a text, and those after it."""
    if backend.post_processor is None:
        return [], []
    one = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    whole = backend.post_processor.process(one)
    at = whole.sequence_ids.index(0)
    return whole.ids[:at], whole.ids[at + 1 :]


def _token_bytes(ids: dict[str, int], vocab_size: int, spec: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each token.

    A byte-level vocabulary writes a byte as one printable character.
    """
    if spec["model"]["type"] != "BPE":
        raise UserError(f"it is a {spec['model']['type']} tokenizer, xtrain needs BPE")
    byte_level = "ByteLevel" in json.dumps([spec["pre_tokenizer"], spec["decoder"]])
    bytes_of = _ByteOfCharacter()
    added = {token["id"] for token in spec["added_tokens"]}
    table = [b""] * vocab_size
    for token, i in ids.items():
        if byte_level:
            code = token.translate(bytes_of)
            if i in added or NOT_A_BYTE in code:  # text, as the library decodes it
                table[i] = token.encode()
            else:
                table[i] = code.encode("latin-1")
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):  # byte fallback of SentencePiece
            table[i] = bytes([int(token[3:5], 16)])
        else:  # SentencePiece writes a space as U+2581
            table[i] = token.replace("▁", " ").encode()
    return table


class _ByteOfCharacter(dict[int, str]):
    """GPT-2's table, for str.translate: printable Latin-1 is itself, the other bytes are U+0100,
    U+0101, ...; a byte is the character of its number, every other character is NOT_A_BYTE."""

    def __init__(self) -> None:
        own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        other = [b for b in range(256) if b not in own]
        super().__init__({b: chr(b) for b in own} | {256 + n: chr(b) for n, b in enumerate(other)})

    def __missing__(self, character: int) -> str:
        return NOT_A_BYTE
