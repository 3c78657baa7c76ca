"""Training examples from .jsonl files: which tokens a conversation has, and which of them are
trained.

    a conversation (data/conversations.py)       the assistant's messages, with the ends of the turns
    {"prompt": ..., "completion": ...} as texts  the completion
    {"text": ...}                                everything
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..data.chat_template import ChatTemplate
from ..data.conversations import Answers, Conversation, has_conversation, naming
from ..data.records import Record, records_of
from ..data.tokenizer import Tokenizer
from ..errors import UserError


@dataclass(frozen=True)
class Example:
    """ids (n,) int32, the tokens.  trained (n,) bool: what the model shall say.
    prompt: the tokens before it.  lost_reasoning: answers whose reasoning the template leaves out."""

    where: str  # file and line
    ids: np.ndarray
    trained: np.ndarray
    lost_reasoning: int = 0

    @property
    def prompt(self) -> np.ndarray:
        return self.ids[: int(self.trained.argmax())]

    def cut(self, T: int) -> "Example":
        """Its first T inputs, and the target of the last one."""
        return replace(self, ids=self.ids[: T + 1], trained=self.trained[: T + 1])

    def shown(self, tokenizer: Tokenizer, colour: bool) -> str:
        """Return the text, with what is trained in green or between ⟦ and ⟧."""
        around = ("\033[32m", "\033[0m") if colour else ("⟦", "⟧")
        edges = [0, *(np.flatnonzero(np.diff(self.trained)) + 1).tolist(), len(self.ids)]
        text = f"{self.where}\n"
        for start, end in itertools.pairwise(edges):
            part = tokenizer.decode(self.ids[start:end])
            text += part.join(around) if self.trained[start] else part
        return text


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
    refused: Callable[[str, UserError], None] | None = None,
) -> Iterator[list[Example]]:
    """Yield the examples of each record of these files, which may be globs.

    text_key: the field in place of "text".
    answers: of a conversation that are trained; with "each" a record may have several examples.
    refused: gets the place of a record that cannot be used, and why; None: it is an error.
    Raises UserError, which names file and line.
    """
    for record in records_of(files):
        try:
            examples = _examples(record, tokenizer, template, text_key, answers)
        except UserError as error:
            if refused is None:
                raise
            refused(record.where, error)
            continue
        yield examples


def example_of(record: Record, tokenizer: Tokenizer, template: ChatTemplate | None) -> Example:
    """Return the example of one record. Raises UserError, which names file and line."""
    (example,) = _examples(record, tokenizer, template, "text", "all")
    return example


def has_messages(files: Sequence[str | Path]) -> bool:
    """Return True if a record of these files is a conversation. Raises UserError."""
    return any(map(has_conversation, records_of(files)))


def _examples(
    record: Record,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    text_key: str,
    answers: Answers,
) -> list[Example]:
    """Return the examples of a record. Raises UserError."""
    conversation = Conversation.of(record)
    if conversation is None:
        with naming(record.where):
            ids, prompt = _text_ids(record, tokenizer, text_key)
        trained = np.arange(len(ids)) >= prompt
        return [Example(record.where, np.array(ids, np.int32), trained)]
    examples = []
    for part in conversation.parts(answers):
        ids, is_trained = part.tokens(tokenizer, template)
        lost = part.lost_reasoning(tokenizer.decode(ids))
        trained = np.array(is_trained, bool)
        examples.append(Example(record.where, np.array(ids, np.int32), trained, lost))
    return examples


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
