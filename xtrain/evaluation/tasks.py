"""Files of test items: one task per file, its kind decided by the fields of the first line.

    .txt                                              a text: perplexity
    .jsonl  {"prompt", "choices", "answer"}           multiple choice; answer: index of the right one
            {"prompt", "continuation"}                cloze: would the model say the continuation?
            {"prompt", "answer"}                      generation: is the answer what the model says?
            {"messages", "answer"}                    the same, in a chat
            and the published files of HellaSwag, ARC, MMLU (also .csv) and GSM8K (benchmarks.py)

A prompt may also be a list of messages, and a chat any conversation of data/conversations.py.
Prompt and continuation are joined by a space, unless a line has another "delimiter"; a
"description" comes first, before the examples of k-shot evaluation. What is wrong with a file is a
UserError that names it and the line.
"""

import csv
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.chat_template import ChatTemplate
from ..data.compressed import open_file, suffix
from ..data.conversations import Conversation
from ..data.records import Record, decoded, json_records
from ..data.text_files import read_text
from ..errors import UserError
from ..json_files import listed, reading

BETWEEN_EXAMPLES = "\n\n"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text whose every token is scored."""

    where: str  # the file
    text: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt and what should follow it.

    conversation: in place of a prompt.
    is_chat: the prompt is a conversation that the chat template has rendered.
    """

    where: str  # file and line, for messages
    prompt: str
    conversation: Conversation | None = None
    is_chat: bool = False
    delimiter: str = " "  # between the prompt and what follows it
    description: str = ""  # in front of all examples and the prompt

    @property
    def target(self) -> str:
        """Return the right continuation, without the delimiter."""
        raise NotImplementedError

    def asked(self, template: ChatTemplate | None, system: str | None) -> "Item":
        """Return this item as a conversation that the chat template has rendered: its messages, or
        the prompt as the user's message. Raises UserError.

        system: the system message, unless there is one.
        """
        talk = self.conversation
        if talk is None:
            talk = Conversation(self.where, [{"role": "user", "content": self.prompt}])
        if system is not None and talk.messages[0]["role"] != "system":
            first = {"role": "system", "content": system}
            talk = dataclasses.replace(talk, messages=[first, *talk.messages])
        prompt = talk.prompt_text(template)
        return dataclasses.replace(self, prompt=prompt, delimiter="", is_chat=True)

    def with_examples(self, examples: list["Item"]) -> "Item":
        """Return this item with solved examples in front of its prompt. Raises UserError."""
        talks = [x for x in (self, *examples) if x.conversation is not None]
        if examples and talks:
            raise UserError(
                f"{talks[0].where} has messages, which --shots cannot be put in front of: write the "
                "examples as messages"
            )
        shots = (x.prompt + x.delimiter + x.target + BETWEEN_EXAMPLES for x in examples)
        prompt = self.description + "".join(shots) + self.prompt
        return dataclasses.replace(self, prompt=prompt, description="")


@dataclass(frozen=True, kw_only=True)
class Choice(Item):
    """Multiple choice: which of the choices has the highest log-probability after the prompt?"""

    choices: tuple[str, ...]
    answer: int  # index of the right one

    @property
    def target(self) -> str:
        return self.choices[self.answer]


@dataclass(frozen=True, kw_only=True)
class Cloze(Item):
    """Is each token of the continuation the most likely one?"""

    continuation: str

    @property
    def target(self) -> str:
        return self.continuation


@dataclass(frozen=True, kw_only=True)
class Question(Item):
    """Does the model generate the answer?

    stop: texts that end the generated one.
    extract: a regular expression that finds the answer in a text, or "".
    flexible: another one, whose last match is the answer of a second, less strict metric, or "".
    ignore: regular expressions; what they match is removed from both answers, one after the other,
    before they are compared.
    ignore_case: compare in lower case.
    """

    answer: str
    stop: tuple[str, ...] = ()
    extract: str = ""
    flexible: str = ""
    ignore: tuple[str, ...] = ()
    ignore_case: bool = False

    @property
    def target(self) -> str:
        return self.answer


@dataclass(frozen=True)
class Task:
    """The items of one file."""

    path: Path
    kind: str  # the format: "text", a key of KINDS
    items: list[Text] | list[Item]


# ------------------------------------------------------------------------- lines of a file
def csv_records(path: Path, columns: list[str]) -> Iterator[Record]:
    """Return the rows of a .csv, which may begin with a header. A row may have several lines; its
    first one is named."""
    with reading(path), open_file(path) as file:
        rows = csv.reader(map(decoded, file), strict=True)
        begin = 1
        try:
            for row in rows:
                line = begin
                begin = rows.line_num + 1
                if not row or row == columns:
                    continue
                if len(row) != len(columns):
                    raise UserError(
                        f"{path} line {line} has {len(row)} columns: it needs {', '.join(columns)}"
                    )
                yield Record(path, line, dict(zip(columns, row)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} line {begin} is not valid CSV in UTF-8: {error}") from None


# ------------------------------------------------------------------------- kinds
@dataclass(frozen=True)
class Kind:
    """A format of lines.

    fields: what a line must have at least, to be recognized.  read: a line's item.
    examples: where the published data set keeps its examples for k-shot evaluation, seen from a
    file: candidates.
    """

    fields: frozenset[str]
    read: Callable[[Record], Item]
    examples: Callable[[Path], list[Path]] = lambda path: []


def _common(r: Record) -> dict[str, Any]:
    conversation = None if isinstance(r.fields.get("prompt"), str) else Conversation.of(r)
    return {
        "where": r.where,
        "prompt": "" if conversation else r.text("prompt"),
        "conversation": conversation,
        "delimiter": r.text("delimiter", " "),
        "description": r.text("description", ""),
    }


def read_choice(r: Record) -> Item:
    choices = r.texts("choices")
    return Choice(**_common(r), choices=choices, answer=r.index("answer", len(choices)))


def read_cloze(r: Record) -> Item:
    return Cloze(**_common(r), continuation=r.text("continuation"))


def read_question(r: Record) -> Item:
    return Question(**_common(r), answer=r.text("answer"))


def read_task(path: Path, kinds: dict[str, Kind], limit: int | None = None) -> Task:
    """Return the items of a file, at most `limit`.
    kinds: of .jsonl and .csv files; the first one whose fields a line has.

    Raises UserError for a file that cannot be read, is empty, or has a line that is not valid.
    """
    if not path.is_file():
        what = "does not exist"
        if path.is_dir():
            what = "is a folder"
        raise UserError(f"{path} {what}: give a file of test items")
    if suffix(path) not in (".jsonl", ".csv"):
        text = "".join(read_text(path))
        if not text.strip():
            raise UserError(f"{path} has no text: give a file that is not empty")
        return Task(path, "text", [Text(where=str(path), text=text)])
    records = json_records(path)
    kind = None
    if suffix(path) == ".csv":
        records = csv_records(path, MMLU_COLUMNS)
        kind = "mmlu"
    items: list[Item] = []
    for record in records:
        kind = kind or _kind_of(record, kinds)
        items.append(kinds[kind].read(record))
        if len(items) == limit:
            break
    if kind is None or not items:
        raise UserError(f"{path} has no items: give a file that is not empty")
    return Task(path, kind, items)


MMLU_COLUMNS = ["question", "A", "B", "C", "D", "answer"]


def _kind_of(record: Record, kinds: dict[str, Kind]) -> str:
    present = record.non_null
    if "conversations" in present:  # ShareGPT
        present = present | {"messages"}
    for name, kind in kinds.items():
        if kind.fields <= present:
            return name
    kinds_text = "; ".join(
        f"{name}: {', '.join(sorted(kind.fields))}" for name, kind in kinds.items()
    )
    raise UserError(
        f"{record.where} has the fields {listed(sorted(record.fields)) or '(none)'}, which belong "
        f"to no known task ({kinds_text}): rename or add fields"
    )
