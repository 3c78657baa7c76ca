"""Show docstrings on the reference pages as preformatted text, because their columns and formulas are aligned by hand.

The lines of a prose paragraph are joined, because they are longer than the page is wide and would wrap twice.
The fields of a dataclass are listed with their comments. An intrinsic is shown as kernels call it: without the code
generator's own argument, and with its docstring if a function makes it (`load8 = _load(...)`).
"""

import importlib
import inspect
import re

import griffe

FULL = 80  # a prose line that continues on the next line has at least this many characters
# a line that starts a new paragraph or has columns
APART = re.compile(r"\s|\S*   |[\w, ]{1,25}: |[-*>] |->|$")
# a comment at the end of a field's line
COMMENT = re.compile(r"[^#\"']*(?:\"[^\"]*\"[^#\"']*)*#\s*(.*)")


class AsWritten(griffe.Extension):
    """An extension of mkdocstrings: see the docstring of this file."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring and not obj.docstring.value.startswith("```"):
            obj.docstring.value = f"```text\n{flowing(obj.docstring.value)}\n```"

    def on_module_members(self, *, mod, **kwargs):
        """Show the intrinsics of xtrain/kernels/primitives as kernels call them."""
        if not mod.path.startswith("xtrain.kernels.primitives."):
            return
        for name, member in mod.members.items():
            if member.is_alias:
                continue
            if member.is_function and any("intrinsic" in str(d.value) for d in member.decorators):
                del member.parameters["code"]
            elif member.is_attribute:
                text = made_intrinsic(mod.path, name)
                if text:
                    member.docstring = griffe.Docstring(f"```text\n{text}\n```", parent=member)
                    member.value = None

    def on_class_members(self, *, cls, **kwargs):
        """List the fields of a dataclass with their comments below its docstring."""
        if not any("dataclass" in str(d.value) for d in cls.decorators) or not cls.docstring:
            return
        said = [(name, comment(cls, m)) for name, m in cls.members.items() if m.is_attribute]
        said = [(name, text) for name, text in said if text]
        width = max((len(name) for name, _ in said), default=0)
        rows = "".join(f"\n{name:{width}}   {text}" for name, text in said)
        if rows:
            cls.docstring.value = cls.docstring.value.removesuffix("\n```") + f"\n{rows}\n```"


def made_intrinsic(module: str, name: str) -> str:
    """-> how kernels call an intrinsic that a function makes, and its docstring; else nothing"""
    made = getattr(importlib.import_module(module), name, None)
    if not hasattr(made, "_defn"):
        return ""
    _, *parameters = inspect.signature(made._defn).parameters  # the first: Numba's context
    return flowing(f"{name}({', '.join(parameters)})\n\n{inspect.getdoc(made)}")


def comment(cls, field) -> str:
    """-> the comment at the end of the field's line, or in the lines above it"""
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
    """Join the lines of each prose paragraph."""
    lines, length = [], 0  # length of the previous source line
    for line in text.splitlines():
        goes_on = length >= FULL and not APART.match(line) and "   " not in line
        if goes_on and lines[-1][:1].strip() and "   " not in lines[-1]:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        length = len(line)
    return "\n".join(lines)
