"""The prompts of reinforcement learning.

{"prompt": ..., and anything that the function reads}
a conversation (data/conversations.py), without answers at its end
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.batches import Batch, Shuffled
from ..data.chat_template import ChatTemplate
from ..data.conversations import Conversation
from ..data.records import record_files, records
from ..data.tokenizer import Tokenizer
from ..errors import UserError
from ..tuning.examples import Example
from ..tuning.rows import rows_of


@dataclass(frozen=True)
class Prompt:
    """One line of the data.

    ids: its tokens.  fields: the whole line, for the reward.  conversation: that it is, or None.
    """

    where: str  # file and line
    ids: list[int]
    fields: dict[str, Any]
    conversation: Conversation | None = None

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Return it as messages; a text is the user's."""
        if self.conversation is not None:
            return list(self.conversation.asked)
        return [{"role": "user", "content": self.fields.get("prompt", "")}]


def read_prompts(
    files: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[Prompt]:
    """Return the prompts of .jsonl files, which may be globs. Raises UserError, which names file
    and line."""
    prompts: list[Prompt] = []
    for file in record_files(files):
        before = len(prompts)
        for record in records(file):
            conversation = Conversation.of(record)
            if conversation is not None:
                ids = conversation.prompt(tokenizer, template)
            else:
                ids = tokenizer.encode_prompt(record.text("prompt"))
            prompts.append(Prompt(record.where, ids, record.fields, conversation))
        if len(prompts) == before:
            raise UserError(f"{file} has no prompts: give a file that is not empty")
    return prompts


class Prompts:
    """Prompts with the interface of a data.dataset.Corpus. A batch of B completions has B / group
    prompts.

    train, val: the prompts.
    skipped: those left out, because they are too long.
    group: completions per prompt.
    stop: the tokens that end a completion.
    template: of conversations.
    """

    split = "documents"
    bigram_bpb = None
    left_out = ()

    def __init__(
        self,
        name: str,
        files: int,
        train: list[Prompt],
        val: list[Prompt],
        skipped: int,
        tokenizer: Tokenizer,
        group: int,
        stop: frozenset[int],
        template: ChatTemplate | None = None,
    ):
        self.name = name
        self.files = files
        self.skipped = skipped
        self.tokenizer = tokenizer
        self.train = train
        self.val = val
        self.group = group
        self.stop = stop
        self.template = template
        self.documents = len(train) + len(val)
        self.vocab_size = tokenizer.vocab_size
        self.token_lengths = tokenizer.token_lengths
        self.train_tokens, self.val_tokens = (sum(len(x.ids) for x in xs) for xs in (train, val))
        self.bytes = int(sum(self.token_lengths[x.ids].sum() for x in (*train, *val)))
        lines = ([x.ids, x.fields] for x in (*train, *val))
        text = "\n".join(json.dumps(line, sort_keys=True, default=str) for line in lines)
        self.sha256 = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(x.ids) for x in (*self.train, *self.val))

    def loader(self, B: int, T: int, seed: int = 0, rank: int = 0, world: int = 1) -> Shuffled:
        """Return which prompts each step has: in every epoch all of them, in another order."""
        return Shuffled(len(self.train), B // self.group, T, seed, rank, world)

    def val_batches(self, n: int, B: int, T: int) -> list[Batch]:
        """Return the prompts that are held out, as rows of ids and targets (B, longest of the
        batch); at most n batches of B."""
        prompts = [x for x in self.val if len(x.ids) > 1][: n * B] or self.val[:1]
        rows = [
            Example(x.where, np.array(x.ids, np.int32), np.ones(len(x.ids), bool)) for x in prompts
        ]
        groups = [rows[i : i + B] for i in range(0, len(rows), B)]
        batches = [rows_of([[x] for x in g], max(len(x.ids) - 1 for x in g) or 1) for g in groups]
        return [batch._replace(starts=None) for batch in batches]
