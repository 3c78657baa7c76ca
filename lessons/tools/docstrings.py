"""Docstrings on the reference page as they are written: their columns and formulas are laid out by hand.

Prose alone is put together again, paragraph by paragraph: its lines are longer than the page's, and those would break twice.
"""

import re

import griffe

FULL = 80  # a line of prose that goes on is at least so long
APART = re.compile(
    r"\s|\S*   |[\w, ]{1,25}: |[-*>] |->|$"
)  # begins something of its own, or has columns


class AsWritten(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring and not obj.docstring.value.startswith("```"):
            obj.docstring.value = f"```text\n{flowing(obj.docstring.value)}\n```"


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
