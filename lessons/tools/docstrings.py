"""Docstrings on the reference page as they are written: their columns and formulas are laid out by hand.

Prose alone is put together again, paragraph by paragraph: its lines are longer than the page's, and those would break twice.
Fields of dataclasses come with the comments that say what they are.
"""

import re

import griffe

FULL = 80  # a line of prose that goes on is at least so long
APART = re.compile(
    r"\s|\S*   |[\w, ]{1,25}: |[-*>] |->|$"
)  # begins something of its own, or has columns


COMMENT = re.compile(r"[^#\"']*(?:\"[^\"]*\"[^#\"']*)*#\s*(.*)")  # what stands behind a field


class AsWritten(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring and not obj.docstring.value.startswith("```"):
            obj.docstring.value = f"```text\n{flowing(obj.docstring.value)}\n```"

    def on_class_members(self, *, cls, **kwargs):
        """The fields of a dataclass say in comments what they are: below its docstring."""
        if not any("dataclass" in str(d.value) for d in cls.decorators) or not cls.docstring:
            return
        said = [(name, comment(cls, m)) for name, m in cls.members.items() if m.is_attribute]
        said = [(name, text) for name, text in said if text]
        width = max((len(name) for name, _ in said), default=0)
        rows = "".join(f"\n{name:{width}}   {text}" for name, text in said)
        if rows:
            cls.docstring.value = cls.docstring.value.removesuffix("\n```") + f"\n{rows}\n```"


def comment(cls, field) -> str:
    """Behind the field, or in the lines above it."""
    lines, number = cls.lines_collection[cls.filepath], field.lineno - 1
    found = COMMENT.match(lines[field.endlineno - 1])
    if found:
        return found[1]
    above = []
    while lines[number - 1].strip().startswith("# "):
        number -= 1
        above.insert(0, lines[number].strip()[2:])
    return " ".join(above)


def flowing(text: str) -> str:
    lines, length = [], 0  # length: of the line as it was written
    for line in text.splitlines():
        goes_on = length >= FULL and not APART.match(line) and "   " not in line
        if goes_on and lines[-1][:1].strip() and "   " not in lines[-1]:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        length = len(line)
    return "\n".join(lines)
