"""The fields of a dataclass as options of a command line: what each of them accepts.

A field is an option: its type says what follows the option, its comment is the text of --help, a
field without a default must be given. Types: str, int, float, Path, bool, Literal; one of them or
None; tuple and list of them.

    prompts: Annotated[tuple[str, ...], POSITIONAL]    has no name on the command line
    stop: Annotated[list[str], REPEATED]               one value, may be given several times
"""

import dataclasses
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from .errors import UserError
from .option_words import own_word

POSITIONAL = "positional"
REPEATED = "repeated"


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of the options.

    name: without --, such as "seq-len".
    kind: the type of a value.
    choices: the values of a Literal, else ().
    optional: None is a value, too.
    values: "one"; "all" that follow; "repeated": one, may be given several times; "flag": none.
    default: dataclasses.MISSING if it must be given.
    """

    name: str
    field: str
    kind: type
    choices: tuple[Any, ...]
    optional: bool
    values: Literal["one", "all", "repeated", "flag"]
    positional: bool
    default: Any

    def read(self, text: str) -> Any:
        """Return a value in xtrain's words. Raises UserError for one that xtrain has no word
        for."""
        text = own_word(self.name, text)
        if self.optional and text == "None":
            return None
        words = {str(choice): choice for choice in self.choices}
        if self.kind is bool:
            words = {"true": True, "false": False}
        if self.name == "optimizer" and text not in words:
            raise UserError(
                f"--optimizer {one_line(text)}: use adamw or muon; for another see "
                "lessons/howto/change_the_model.md"
            )
        if words:
            return self._checked(words.get(text if self.choices else text.lower()), text, words)
        if self.kind is int:
            return self._checked(_whole(text), text, "a whole number")
        if self.kind is float:
            return self._checked(_real(text), text, "a number")
        return self.kind(text)

    def _checked(self, value: Any, text: str, what: Any) -> Any:
        if value is not None:
            return value
        if isinstance(what, dict):
            what = f"one of {', '.join(what)}"
        raise UserError(f"{self.shown} {one_line(text)}: give {what}")

    @property
    def shown(self) -> str:
        """The option as a message names it."""
        if self.positional:
            return self.name.upper()
        return f"--{self.name}"


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a dataclass, by their names."""
    hints = typing.get_type_hints(kind, include_extras=True)
    options = (_option(field, hints[field.name]) for field in dataclasses.fields(kind))
    return {option.name: option for option in options}


def _option(field: dataclasses.Field, hint: Any) -> Option:
    marks = getattr(hint, "__metadata__", ())
    if marks:
        hint = hint.__origin__
    leaves = list(_leaves(hint))
    types = [leaf for leaf in leaves if isinstance(leaf, type) and leaf is not type(None)]
    choices = tuple(leaf for leaf in leaves if not isinstance(leaf, type) and leaf is not ...)
    optional = type(None) in leaves
    values: Literal["one", "all", "repeated", "flag"] = "one"
    if REPEATED in marks:
        values = "repeated"
    elif {typing.get_origin(x) for x in (hint, *typing.get_args(hint))} & {tuple, list}:
        values = "all"
    elif types == [bool] and not optional:
        values = "flag"
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif POSITIONAL in marks and values == "all":
        default = ()
    return Option(
        name=field.name.replace("_", "-"),
        field=field.name,
        kind=types[0] if types else type(choices[0]),
        choices=choices,
        optional=optional,
        values=values,
        positional=POSITIONAL in marks,
        default=default,
    )


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types that a hint consists of, and the values of a Literal."""
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    elif typing.get_args(hint):
        for part in typing.get_args(hint):
            yield from _leaves(part)
    else:
        yield hint


def _whole(text: str) -> int | None:
    """Return a whole number, also one such as 2_000 or 1e3; None if it is none."""
    if re.fullmatch(r"[-+]?\d{1,30}(_\d+)*", text):
        return int(text)
    if re.fullmatch(r"\d{1,30}(\.\d+)?[eE]\+?\d{1,2}", text):
        number = float(text)
        if number < 2**53 and number == int(number):
            return int(number)
    return None


def _real(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def one_line(text: str) -> str:
    """Return the beginning of a text, on one line."""
    return " ".join(text.split())[:120]
