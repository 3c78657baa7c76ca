"""The examples of fine-tuning, with the interface of a data set: which are trained on, which are held
out, and what was left out."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..data.batches import Batch
from ..data.chat_template import ChatTemplate
from ..data.records import short_name
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..formats.huggingface import read_config
from .examples import Example, digest, has_messages, read_examples
from .rows import RowLoader, packed, rows_of
from .templates import chosen_texts, with_default_template

Item = TypeVar("Item")


class LeftOut:
    """Counts the records that are not used, by reason, with the place of the first of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, where: str, reason: str) -> None:
        """Count one. where: file and line."""
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def refuse(self, where: str, error: UserError) -> None:
        """Count a record that cannot be used; numbers in the sentence make no other reason."""
        sentence = str(error).removeprefix(where).lstrip(": ")
        self.add(where, re.sub(r"\d+", "N", sentence)[:200])

    @property
    def sentences(self) -> list[str]:
        """One for each reason, the most frequent first."""
        return [
            f"{n} left out, the first is {self.first[reason]}: {reason}"
            for reason, n in self.counts.most_common()
        ]


class Conversations:
    """Examples with the interface of a data.dataset.Corpus.

    train, val: the examples.
    skipped: records that are cut or left out.
    reasons: a sentence for each reason.
    seq_len: T of the longest in use.
    pack: several examples in a row.
    adds_tokens: the tokenizer has tokens that the model does not have, which gets them.
    is_new_template: the model had no chat template, so it gets the default one.
    """

    split = "documents"
    bigram_bpb = None
    left_out = ()
    reasons: Sequence[str] = ()
    is_new_template = False
    adds_tokens = False

    def __init__(
        self,
        name: str,
        files: int,
        train: list[Example],
        val: list[Example],
        skipped: int,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        pack: bool = False,
    ):
        self.name = name
        self.files = files
        self.skipped = skipped
        self.tokenizer = tokenizer
        self.train = train
        self.val = val
        self.template = template
        self.pack = pack
        self.documents = len(train) + len(val)
        self.vocab_size = tokenizer.vocab_size
        self.token_lengths = tokenizer.token_lengths
        self.train_tokens, self.val_tokens = (sum(len(x.ids) for x in xs) for xs in (train, val))
        ids = (x.ids for x in (*train, *val))
        self.bytes = int(sum(self.token_lengths[x].sum() for x in ids))
        self.sha256 = digest([*train, *val])

    def describe(self) -> str:
        """Return what is trained, in numbers."""
        every = (*self.train, *self.val)
        lengths = sorted(len(x.ids) for x in every)
        trained = sum(int(x.trained[1:].sum()) for x in every) / sum(lengths)
        median = lengths[len(lengths) // 2]
        return (
            f"{len(self.train)} examples and {len(self.val)} held out, of {lengths[0]} to "
            f"{lengths[-1]} tokens (median {median}), {trained:.0%} of them trained"
        )

    @property
    def seq_len(self) -> int:
        return max(len(x.ids) - 1 for x in (*self.train, *self.val))

    def rows(self, examples: list[Example], T: int, seed: int = 0) -> list[list[int]]:
        """Return which examples each row of T tokens holds."""
        if self.pack:
            return packed([len(x.ids) - 1 for x in examples], T, seed)
        return [[i] for i in range(len(examples))]

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> RowLoader:
        """Return endless shuffled batches of B rows of T tokens. With several ranks, each reads its
        share of the rows."""
        groups = self.rows(self.train, T, seed)
        return RowLoader(self.train, groups, self.pack, B, T, seed, rank, world)

    def val_batches(self, n: int, B: int, T: int) -> list[Batch]:
        """Return at most n batches of examples that are held out, always the same, as `loader` has
        them; (B, longest of the batch)."""
        examples = [x.cut(T) for x in self.val]
        groups = [[examples[i] for i in group] for group in self.rows(examples, T)]
        n_rows = min(n * B, len(groups))
        chosen = [groups[i * len(groups) // n_rows] for i in range(n_rows)]
        batches = [chosen[i : i + B] for i in range(0, n_rows, B)]
        longest = [max(sum(len(x.ids) - 1 for x in group) for group in batch) for batch in batches]
        rows = [rows_of(batch, T) for batch, T in zip(batches, longest)]
        if self.pack:
            return rows
        return [batch._replace(starts=None) for batch in rows]

    @cached_property
    def stop(self) -> frozenset[int]:
        """The special tokens at the end of what is trained: those that end an answer."""
        last_tokens: set[int] = set()
        for x in self.train[:100]:
            last_tokens |= set(x.ids[x.trained & ~np.append(x.trained[1:], False)].tolist())
        return frozenset(last_tokens & self.tokenizer.special_ids)


def read_conversations(config: Any, source: Path, context: int) -> Conversations:
    """Read --data and --val-data.

    config: a FinetuneConfig.  source: the model's folder.  context: the model's. Raises UserError.
    """
    c = config
    vocab_size = read_config(source).vocab_size
    texts = chosen_texts(c, source, adds_tokens=True)
    new_rows = max(0, texts.tokenizer.vocab_size - vocab_size)
    if c.lora and c.chat_template == "chatml" and new_rows:
        raise UserError(
            "--chat-template chatml adds tokens to the vocabulary, whose embeddings --lora does not "
            "train: leave --lora out, or choose --chat-template plain"
        )
    is_new_template = texts.template is None and has_messages((*c.data, *c.val_data))
    if is_new_template:
        texts = with_default_template(texts)
    left_out = LeftOut()
    limit = min(c.seq_len or context, context)

    def read(files: Sequence[str]) -> list[list[Example]]:
        """Return the examples of each record that has some."""
        refused = left_out.refuse if c.bad_records == "skip" else None
        records = read_examples(
            files, texts.tokenizer, texts.template, c.text_key, c.train_answers, refused
        )
        kept = [list(fitting(examples, limit, c.too_long, left_out)) for examples in records]
        if not any(kept):
            raise UserError(
                f"{', '.join(files)}: no example is left: {'; '.join(left_out.sentences)}"
            )
        return [examples for examples in kept if examples]

    if c.mix:
        entries = [read([file]) for file in c.data]
        weights = [weight for weight, records in zip(c.mix, entries) for _ in records]
        records = [examples for records in entries for examples in records]
    else:
        records = read(c.data)
        weights = [1.0] * len(records)
    if c.val_data:
        val = read(c.val_data)
        train = list(zip(records, weights))
    else:
        train, held_out = hold_out(list(zip(records, weights)), c.val_share, "example")
        val = [examples for examples, _ in held_out]
    name = short_name(c.data)
    corpus = Conversations(
        name,
        len(c.data) + len(c.val_data),
        mixed(train),
        [x for examples in val for x in examples],
        sum(left_out.counts.values()),
        texts.tokenizer,
        texts.template,
        c.pack,
    )
    corpus.is_new_template = is_new_template
    corpus.adds_tokens = new_rows > 0 and c.chat_template == "chatml"
    corpus.reasons = left_out.sentences
    if lost := sum(x.lost_reasoning for x in (*corpus.train, *corpus.val)):
        corpus.reasons += [
            f"the chat template leaves out the reasoning of {lost} answers, so they are trained "
            "without it: give --train-answers each if it keeps that of the last answer, or "
            "another --chat-template"
        ]
    return corpus


def fitting(
    examples: list[Example], limit: int, too_long: str, left_out: LeftOut
) -> Iterator[Example]:
    """Yield the examples of a record of at most `limit` tokens, or what --too-long makes of them.
    Raises UserError."""
    for x in examples:
        if len(x.ids) - 1 > limit:
            if too_long == "error":
                raise UserError(
                    f"{x.where} has {len(x.ids)} tokens, more than --seq-len {limit}: shorten "
                    "it, or give --too-long skip or cut"
                )
            x = x.cut(limit)
            if too_long == "skip":
                left_out.add(
                    x.where,
                    f"it is longer than {limit} tokens: give a larger --seq-len, or --too-long cut",
                )
                continue
            if not x.trained[1:].any():
                left_out.add(
                    x.where,
                    f"nothing of its first {limit} tokens is trained: give a larger --seq-len",
                )
                continue
        yield x


def mixed(weighted: list[tuple[list[Example], float]]) -> list[Example]:
    """Return each record's examples as often as its weight says. Of a fraction, a fixed random
    choice of the records has one more: the same for every seed."""
    rng = np.random.default_rng(1)
    chosen: list[Example] = []
    for examples, weight in weighted:
        times = int(weight)
        if weight > times:
            times += rng.random() < weight - times
        chosen += examples * times
    if not chosen:
        raise UserError("--mix leaves nothing to train on: give larger weights")
    return chosen


def hold_out(items: list[Item], share: float, what: str) -> tuple[list[Item], list[Item]]:
    """Return items to train on and to validate on, the same for every seed. share: of the second.
    what: one item is called.

    Raises UserError if there is only one.
    """
    if len(items) < 2:
        raise UserError(f"one {what} cannot be trained on and held out: give more, or --val-data")
    n = min(max(1, round(share * len(items))), len(items) - 1)
    chosen = set(np.random.default_rng(0).permutation(len(items))[:n].tolist())
    return (
        [x for i, x in enumerate(items) if i not in chosen],
        [x for i, x in enumerate(items) if i in chosen],
    )
