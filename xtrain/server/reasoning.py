"""The reasoning of a model before its answer: which marks surround it, and how both are separated.

A chat template with the second mark of a pair in MARKS shows reasoning between the two. If a prompt
ends with the first one, the answer begins with reasoning, also before calls and documents that a
grammar demands (grammars.py). Else the model may begin it, but not where a grammar demands others.
"""

from dataclasses import dataclass

from ..data.tokenizer import Tokenizer
from .grammars import Guide, literal_rule, special_marks
from .tools import ToolUse

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Reasoning:
    """How the reasoning of an answer is marked.   begun: the prompt has the first mark"""

    first: str
    last: str
    begun: bool

    @classmethod
    def of(cls, template: str, prompt: str) -> "Reasoning | None":
        """Return that of the answer to a prompt that a template has written; None: there is none."""
        for first, last in MARKS:
            if last in template:
                return cls(first, last, prompt.rstrip().endswith(first))
        return None

    @property
    def marks(self) -> list[str]:
        """Return both marks."""
        return [self.first, self.last]

    def before(self, guide: Guide, tokenizer: Tokenizer) -> Guide:
        """Return the guide of the same answers after reasoning that has begun."""
        special = special_marks(tokenizer, self.marks)
        lazy = "" if self.last in special else "[lazy]"
        rules = [
            "start: thought GAP? @answer",
            f"thought{lazy}: TEXT {literal_rule(self.last, special)}",
            "TEXT: /(.|\\n)*/",
            "GAP: /\\n{1,2}/",
        ]
        return Guide.of_parts(rules, answer=guide)


@dataclass(frozen=True)
class Reading:
    """What the text of a chat's answer is made of.

    reasoning, tools: how it is marked, and which calls there may be; None: there are none.
    """

    reasoning: Reasoning | None = None
    tools: ToolUse | None = None

    def showing_marks(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a tokenizer for which all marks are text."""
        marks = [mark for part in (self.reasoning, self.tools) if part for mark in part.marks]
        return tokenizer.without_special(special_marks(tokenizer, marks).values())


PLAIN = Reading()


class ReasoningStream:
    """Reads one answer while it arrives: its reasoning, and what follows, without blanks between."""

    def __init__(self, reasoning: Reasoning):
        self.marks = reasoning
        self.text = ""  # that has not been used yet
        self.reasoning = reasoning.begun
        self.undecided = not reasoning.begun
        self.blank = True  # nothing of this part has been returned

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """Take the next text. Return reasoning and content that are certain."""
        self.text += text
        if self.undecided:
            begun = self.text.lstrip()
            if begun.startswith(self.marks.first):
                self.text = begun[len(self.marks.first) :]
                self.reasoning = True
            elif self.marks.first.startswith(begun) and not last:
                return "", ""
            self.undecided = False
            self.blank = self.reasoning  # an answer without reasoning is returned as it is
        thought = ""
        if self.reasoning:
            thought, mark, after_mark = self.text.partition(self.marks.last)
            kept = ""
            if not mark and not last:
                certain = thought[: len(thought) - beginning_at_end(thought, self.marks.last)]
                kept = thought[len(certain.rstrip()) :]
            thought = self._without_blanks(thought[: len(thought) - len(kept)].rstrip())
            self.text = after_mark or kept
            if not mark:
                return thought, ""
            self.reasoning = False
            self.blank = True
        content = self._without_blanks(self.text)
        self.text = ""
        return thought, content

    def _without_blanks(self, text: str) -> str:
        """Return text of a part, which does not begin with blanks."""
        if self.blank:
            text = text.lstrip()
        self.blank = self.blank and not text
        return text


def beginning_at_end(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text with which a mark may begin."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in sizes if mark.startswith(text[-n:])), 0)
