"""Preferences from .jsonl files: pairs of answers to a prompt, or answers with a label.

    {"prompt": ..., "chosen": ..., "rejected": ...}           a pair
    {"chosen": [messages], "rejected": [messages]}            a pair; the prompt is what both begin with
    {"prompt": ..., "completion": ..., "label": true}         for kto; a pair is two of these

A prompt and an answer are texts, or lists of messages. If one of them is a list, the whole is a
conversation, and a text is the content of one message. Texts alone are tokens without a template.
Trained are the answers (examples.py).

Examples are kept in twos: a pair; for kto an answer, and the answer to another prompt in its place.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..data.batches import Batch, Shuffled
from ..data.chat_template import ChatTemplate
from ..data.conversations import role_of, without_weight
from ..data.records import Record, records_of
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from .corpus import Conversations
from .examples import Example, example_of
from .rows import rows_of

OWN = ("prompt", "chosen", "rejected", "completion", "label", "messages", "text")


class PairBatch(NamedTuple):
    """Rows of two texts: chosen and rejected; for kto an answer, and the answer to another prompt.

    ids, targets: (B, 2, T) int32, T of the longest; targets are -100 where nothing is trained.
    rows: (B,) which rows of the data these are.
    desirable: (B,) bool, for kto.
    reference: (B, K) float64, the log-probabilities of the reference; None without one.
    kl: (B,) float64, for kto, z of preference_losses.
    """

    ids: Any
    targets: Any
    rows: Any
    desirable: Any = None
    reference: Any = None
    kl: Any = None


class Preferences(Conversations):
    """Examples in twos: those of row i are 2 i and 2 i + 1.

    desirable: for kto, {"train": (rows,) bool, "val": the same}; None for pairs.
    """

    desirable: dict[str, np.ndarray] | None = None

    def __init__(self, *arguments: Any, desirable: dict[str, np.ndarray] | None = None):
        super().__init__(*arguments)
        self.desirable = desirable
        if desirable is not None:
            labels = b"".join(x.tobytes() for x in desirable.values())
            self.sha256 = hashlib.sha256(self.sha256.encode() + labels).hexdigest()

    def rows(self, examples: list[Example], T: int, seed: int = 0) -> list[list[int]]:
        """Return which examples each row holds."""
        return [[i, i + 1] for i in range(0, len(examples), 2)]

    def describe(self) -> str:
        """Return what is trained, in numbers."""
        rows = f"{len(self.train) // 2} rows and {len(self.val) // 2} held out, each of two texts: "
        return rows + super().describe()

    def batch(self, split: str, rows: Sequence[int]) -> PairBatch:
        """Return these rows. split: "train" or "val"."""
        examples = {"train": self.train, "val": self.val}[split]
        texts = [examples[2 * row + k] for row in rows for k in range(2)]
        longest = max((len(x.ids) - 1 for x in texts), default=1)
        ids, targets, _ = rows_of([[x] for x in texts], longest)
        shape = len(rows), 2, longest
        chosen = np.array(rows, np.int32)
        batch = PairBatch(ids.reshape(shape), targets.reshape(shape), chosen)
        if self.desirable is None:
            return batch
        return batch._replace(desirable=self.desirable[split][chosen])

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> Any:
        """Return endless shuffled batches of B rows; each rank reads its share."""
        return PairLoader(self, B, T, seed, rank, world)

    def val_pairs(self, n: int, B: int) -> list[PairBatch]:
        """Return at most n batches of B rows that are held out, always the same."""
        chosen = range(min(n * B, len(self.val) // 2))
        return [self.batch("val", chosen[i : i + B]) for i in chosen[::B]]

    def val_batches(self, n: int, B: int, T: int) -> list[Batch]:
        """Return the first answers of the rows that are held out, at most n batches of B."""
        answers = [x.cut(T) for x in self.val[: 2 * n * B : 2]]
        batches = [answers[i : i + B] for i in range(0, len(answers), B)]
        longest = [max(len(x.ids) - 1 for x in batch) for batch in batches]
        rows = [rows_of([[x] for x in batch], T) for batch, T in zip(batches, longest)]
        return [batch._replace(starts=None) for batch in rows]


class PairLoader(Shuffled):
    """Endless shuffled batches of the training rows."""

    def __init__(
        self, corpus: Preferences, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1
    ):
        super().__init__(len(corpus.train) // 2, B, T, seed, rank, world)
        self.corpus = corpus

    def next_batch(self) -> PairBatch:
        """Return the next batch of this rank."""
        chosen = [int(self.order(e)[w]) for e, w in self.next_windows()]
        return self.corpus.batch("train", chosen)


# ----------------------------------------------------------------------------- reading
def read_rows(
    files: Sequence[str],
    labelled: bool,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    refused: Callable[[str, UserError], None] | None = None,
) -> Iterator[tuple[list[Example], bool]]:
    """Yield the chosen and the rejected answer of each record, and True; if labelled, each answer
    alone, and whether it is desirable.

    refused: gets the place of a record that cannot be used, and why; None: it is an error.
    Raises UserError, which names file and line.
    """
    for record in records_of(files):
        try:
            if labelled:
                rows = labelled_of(record)
            else:
                rows = [(pair_of(record), True)]
            found = [
                ([example_of(x, tokenizer, template) for x in answers], label)
                for answers, label in rows
            ]
        except UserError as error:
            if refused is None:
                raise
            refused(record.where, error)
            continue
        yield from found


def labelled_of(record: Record) -> list[tuple[list[Record], bool]]:
    """Return the answers of a record, and whether each is desirable. Raises UserError."""
    if "chosen" in record.non_null:
        chosen, rejected = pair_of(record)
        return [([chosen], True), ([rejected], False)]
    label = record.fields.get("label")
    if not isinstance(label, bool):
        raise UserError(
            f'{record.where}: "label" must be true or false, got {str(label)[:40]}: fix it, '
            'or give "chosen" and "rejected"'
        )
    prompt = _prompt(record)
    answer = record.fields.get("completion")
    if isinstance(prompt, str) and isinstance(answer, str):
        return [([_texts(record, answer)], label)]
    messages = _whole(record, "completion")
    asked = len(_messages(prompt, "user"))
    _check_answer(record, "completion", messages[:asked], messages[asked:])
    return [([_conversation(record, messages, asked)], label)]


def has_conversations(files: Sequence[str]) -> bool:
    """Return True if a record of these files has messages. Raises UserError."""
    values = (x.fields.get(name) for x in records_of(files) for name in OWN)
    return any(isinstance(value, list) for value in values)


def pair_of(record: Record) -> list[Record]:
    """Return chosen and rejected answer as records that examples.py reads. Raises UserError."""
    for name in ("chosen", "rejected"):
        if name not in record.non_null:
            hint = ""
            if "completion" in record.non_null:
                hint = ', or use --loss kto for "completion" and "label"'
            raise UserError(f'{record.where} has no field "{name}": add it{hint}')
        if isinstance(record.fields[name], str):
            record.text(name)  # raises UserError for an empty one
    chosen = record.fields["chosen"]
    rejected = record.fields["rejected"]
    if chosen == rejected:
        raise UserError(f'{record.where}: "chosen" and "rejected" are the same: remove the line')
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        _prompt(record)
    if all(isinstance(x, str) for x in (record.fields.get("prompt"), chosen, rejected)):
        return [_texts(record, chosen), _texts(record, rejected)]
    right = _whole(record, "chosen")
    wrong = _whole(record, "rejected")
    shared = 0
    while shared < min(len(right), len(wrong)) and right[shared] == wrong[shared]:
        shared += 1
    for name, messages in (("chosen", right), ("rejected", wrong)):
        _check_answer(record, name, messages[:shared], messages[shared:])
    return [_conversation(record, answer, shared) for answer in (right, wrong)]


def _check_answer(record: Record, name: str, prompt: list[Any], answer: list[Any]) -> None:
    """Raise UserError unless a message of the assistant follows a prompt."""
    roles = [role_of(message) for message in (*prompt, *answer[:1])]
    if None in roles:
        return  # data/conversations.py says what is wrong
    if "user" not in roles[: len(prompt)]:
        raise UserError(
            f'{record.where} has no prompt that its answers share: add "prompt", or let "chosen" '
            'and "rejected" begin with the same messages'
        )
    if roles[len(prompt) :] != ["assistant"]:
        raise UserError(
            f'{record.where}: "{name}" must be an answer to the prompt, so that a message of the '
            "assistant follows what its answers share: fix or remove the line"
        )


def _prompt(record: Record) -> Any:
    """Return the prompt. Raises UserError if there is none."""
    prompt = record.fields.get("prompt")
    if prompt is None:
        raise UserError(f'{record.where} has no field "prompt": add it, or remove the line')
    return prompt


def _texts(record: Record, answer: str) -> Record:
    """Return the record of a prompt that is a text and this answer."""
    fields = {"prompt": record.fields.get("prompt"), "completion": answer}
    return replace(record, fields=fields)


def _whole(record: Record, name: str) -> list[Any]:
    """Return the messages of prompt and answer. A prompt that is a text may be the first message
    of the answer, too, as in UltraFeedback. name: of the field with the answer."""
    prompt = _messages(record.fields.get("prompt"), "user")
    answer = _messages(record.fields.get(name), "assistant")
    if isinstance(record.fields.get("prompt"), str) and answer[:1] == prompt:
        return answer
    return prompt + answer


def _messages(value: Any, role: str) -> list[Any]:
    """Return a prompt or an answer as messages; data/conversations.py checks them."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [{"role": role, "content": value}]


def _conversation(record: Record, messages: list[Any], shared: int) -> Record:
    """Return the record of a conversation whose first messages are the prompt, so not trained."""
    fields = {name: x for name, x in record.fields.items() if name not in OWN}
    prompt = [without_weight(message) for message in messages[:shared]]
    fields["messages"] = prompt + messages[shared:]
    return replace(record, fields=fields)


# ----------------------------------------------------------------------------- rows for kto
def mismatched(answers: Sequence[Example], limit: int) -> list[Example]:
    """Return for each example its prompt with the answer to another one, always the same.

    limit: tokens that the inputs may have; the rest of a longer one is cut off. Raises UserError
    for fewer than two examples.
    """
    if len(answers) < 2:
        raise UserError(
            "--loss kto compares with the answer to another prompt, but there is one example: "
            "give at least two, also in --val-data"
        )
    order = np.random.default_rng(0).permutation(len(answers))
    other = np.empty_like(order)
    other[order] = np.roll(order, 1)
    mixed = []
    for x, n in zip(answers, other):
        y = answers[n]
        begin = len(y.prompt)
        ids = np.concatenate([x.prompt, y.ids[begin:]])
        trained = np.concatenate([np.zeros(len(x.prompt), bool), y.trained[begin:]])
        mixed.append(Example(x.where, ids, trained).cut(limit))
    return mixed
