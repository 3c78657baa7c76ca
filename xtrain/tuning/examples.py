"""Training examples from .jsonl files: which tokens a conversation has, and which of them are
trained.

    a conversation (data/conversations.py)       the assistant's messages, with the ends of the turns
    {"prompt": ..., "completion": ...} as texts  the completion
    {"text": ...}                                everything
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.chat_template import ChatTemplate
from ..data.conversations import Answers, Conversation, has_conversation, naming
from ..data.records import Record, json_records, record_files
from ..data.tokenizer import Tokenizer
from ..errors import UserError


@dataclass(frozen=True)
class Example:
    """ids (n,) int32, the tokens.  trained (n,) bool: what the model shall say.
    prompt: the tokens before it."""

    where: str  # file and line
    ids: np.ndarray
    trained: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        return self.ids[: int(self.trained.argmax())]

    def cut(self, T: int) -> "Example":
        """Its first T inputs, and the target of the last one."""
        return Example(self.where, self.ids[: T + 1], self.trained[: T + 1])


def digest(examples: Iterable[Example]) -> str:
    """Return sha256 of the tokens and of which of them are trained."""
    checksum = hashlib.sha256()
    for x in examples:
        checksum.update(len(x.ids).to_bytes(8, "little") + x.ids.tobytes() + x.trained.tobytes())
    return checksum.hexdigest()


def read_examples(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    text_key: str = "text",
    answers: Answers = "all",
) -> Iterator[Example]:
    """Return the examples of .jsonl files, which may be globs.

    text_key: the field in place of "text".
    answers: of a conversation that are trained.
    Raises UserError, which names file and line.
    """
    for path in record_files(files):
        empty = True
        for record in json_records(path):
            empty = False
            yield from _examples(record, tokenizer, template, text_key, answers)
        if empty:
            raise UserError(f"{path} has no records: give a file that is not empty")


def has_messages(files: Sequence[str | Path]) -> bool:
    """Return True if a record of these files is a conversation. Raises UserError."""
    records = (record for path in record_files(files) for record in json_records(path))
    return any(map(has_conversation, records))


def _examples(
    record: Record,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    text_key: str,
    answers: Answers,
) -> Iterator[Example]:
    """Yield the examples of a record: one, or with "each" one for every answer."""
    conversation = Conversation.of(record)
    if conversation is not None:
        for part in conversation.parts(answers):
            ids, trained = part.tokens(tokenizer, template)
            yield Example(record.where, np.array(ids, np.int32), np.array(trained, bool))
        return
    with naming(record.where):
        ids, prompt = _text_ids(record, tokenizer, text_key)
    yield Example(record.where, np.array(ids, np.int32), np.arange(len(ids)) >= prompt)


def _text_ids(record: Record, tokenizer: Tokenizer, text_key: str) -> tuple[list[int], int]:
    """Return the ids of a record, and how many of them are not trained."""
    fields = record.non_null
    if "prompt" in fields or "completion" in fields:
        prompt = tokenizer.encode_prompt(record.text("prompt"))
        completion = answer_ids(record.text("completion"), tokenizer)
        return prompt + completion, len(prompt)
    if text_key in fields:
        return _ended(tokenizer.encode_text(record.text(text_key)), tokenizer), 1
    raise UserError(
        f'{record.where} has neither "messages" nor "prompt" and "completion" nor "{text_key}": '
        "add one of them, or choose the field of the text with --text-key"
    )


def answer_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that follows a prompt, with the end of the document, once."""
    return _ended(tokenizer.encode_more(text), tokenizer)


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    if ids[-1:] == [tokenizer.eot_id]:
        return ids
    return [*ids, tokenizer.eot_id]
