"""Read a command line.

    options = parse(Options, "python -m xtrain.train", __doc__, arguments)

The fields of the dataclass are the options (option_fields.py), and --config FILE reads some of them
from a file (option_files.py). Names and values that other programs
have for the same thing are understood (option_words.py): --learning-rate, --batch_size, --device
cuda, 1e3 for a whole number. An option that does not exist is answered with one sentence that names
the right one.
"""

import dataclasses
import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .cli import print_text
from .errors import UserError
from .option_fields import Option, one_line, options_of
from .option_files import read_options
from .option_help import help_text, texts_of
from .option_words import HINTS, OTHER_NAMES

Options = TypeVar("Options")
CONFIG = Option(
    "config",
    "config",
    str,
    choices=(),
    optional=False,
    values="one",
    positional=False,
    default=None,
)
PATHS = ("data", "val-data")  # an unset variable of the shell must not become an empty list
NAME = re.compile(r"(--?)([a-zA-Z][\w-]*)(=.*)?", re.DOTALL)  # of an option, perhaps with its value


def parse(
    kind: type[Options],
    prog: str,
    description: str | None = None,
    arguments: list[str] | None = None,
    default: Options | None = None,
) -> Options:
    """Return the options of a command line, an instance of the dataclass `kind`. arguments None:
    those of the program. default: options that are not given have its values.

    Raises UserError for what cannot be read, and SystemExit(0) for --help, after printing it.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = options_of(kind)
    if {"-h", "--help"} & set(_before_end(words)):
        print_text(help_text(kind, prog, description))
        raise SystemExit(0)
    hints = getattr(kind, "HINTS", {})
    values = read_arguments(options | {CONFIG.name: CONFIG}, words, hints)
    if file := values.pop(CONFIG.field, None):
        in_file = lambda name: known_name(name, options, hints)
        values = read_options(file, options, hints, in_file) | values
    if default is not None:
        return dataclasses.replace(default, **values)  # type: ignore[type-var]
    for option in options.values():
        if option.default is dataclasses.MISSING and option.field not in values:
            what = texts_of(kind)[option.field]
            raise UserError(f"{option.shown} is missing: give it ({what})")
    lists = {o.field: o.default for o in options.values() if o.positional and o.values == "all"}
    return kind(**lists | values)


def read_arguments(
    options: dict[str, Option], arguments: list[str], hints: dict[str, str]
) -> dict[str, Any]:
    """Return the values that the arguments give, by the names of the fields.

    hints: what to do about options that do not exist, in addition to HINTS. Raises UserError.
    """
    by_field: dict[str, Any] = {}
    positional: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":  # what follows are no options
            positional += remaining
            break
        match = NAME.fullmatch(argument)
        if match is None:
            positional.append(argument)
            continue
        name = known_name(match[2], options, hints, match[1])
        option = options[name.removeprefix("no-") if name not in options else name]
        if option.values == "flag":
            if match[3] is not None:
                raise UserError(
                    f"--{name} takes no value: give --{option.name} or --no-{option.name}"
                )
            by_field[option.field] = name == option.name
            continue
        texts = _texts(option, match[3], remaining)
        values = [option.read(text) for text in texts]
        if option.values == "repeated":
            by_field[option.field] = [*by_field.get(option.field, []), *values]
        elif option.values == "all":
            if option.field in by_field:
                raise UserError(f"--{name} is given twice: give all values after the first one")
            by_field[option.field] = tuple(values)
        else:
            by_field[option.field] = values[0]
    return by_field | _positional(options, positional)


def _texts(option: Option, after_name: str | None, remaining: list[str]) -> list[str]:
    """Return the arguments that are values of an option, and remove them from `rest`."""
    if after_name is not None:
        return [after_name[1:]]
    n = 0
    while n < len(remaining) and remaining[n] != "--" and not NAME.fullmatch(remaining[n]):
        n += 1
    if option.values != "all":
        n = min(n, 1)
    if n == 0 and option.kind is bool:
        return ["true"]  # --expert-bias alone
    if n == 0 and (option.values != "all" or option.name in PATHS):
        how = "give one, or omit the option"
        if remaining and re.match("-[^-]", remaining[0]):
            how = f"if it is to be {one_line(remaining[0])}, write --{option.name}={one_line(remaining[0])}"
        raise UserError(f"--{option.name} has no value: {how}")
    texts = remaining[:n]
    del remaining[:n]
    return texts


def _positional(options: dict[str, Option], texts: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    remaining = list(texts)
    for option in options.values():
        if option.positional and remaining:
            if option.values == "all":
                values[option.field] = tuple(option.read(text) for text in remaining)
                remaining = []
            else:
                values[option.field] = option.read(remaining.pop(0))
    if remaining:
        raise UserError(
            f"{one_line(remaining[0])!r} belongs to no option: remove it, --help lists all"
        )
    return values


def _before_end(words: list[str]) -> list[str]:
    """Return the words in front of --."""
    if "--" in words:
        return words[: words.index("--")]
    return words


def known_name(
    name: str, options: dict[str, Option], hints: dict[str, str], dashes: str = "--"
) -> str:
    """Return xtrain's name of an option, or that with no- in front. Raises UserError if there is
    none.

    hints: what to do about options that do not exist, in addition to HINTS.
    """
    name = name.replace("_", "-")
    names = [option.name for option in options.values() if not option.positional]
    names += [f"no-{option.name}" for option in options.values() if option.values == "flag"]
    pairs = [(word, ours) for ours, words in OTHER_NAMES.items() for word in words.split()]
    others = {word: ours for word, ours in pairs if ours in names}
    lower = name.lower()
    if dashes == "--":
        for candidate in (name, lower, others.get(lower)):
            if candidate in names:
                return candidate
    hint = {**HINTS, **hints}.get(dict(pairs).get(lower, lower))
    if hint is None:
        hint = "--help lists all"
        near = difflib.get_close_matches(lower, [*names, *others], 1, 0.6)
        if near:
            hint = f"did you mean --{others.get(near[0], near[0])}?"
    raise UserError(f"there is no option {dashes}{one_line(name)}: {hint}")


# ----------------------------------------------------------------------------- functions that options name
def find_function(option: str, name: str, example: str) -> Callable[..., Any]:
    """Return the function MODULE:FUNCTION that an option names; modules in the current folder are
    found, too. Raises UserError."""
    target = find_object(option, name, example, "MODULE:FUNCTION")
    if not callable(target):
        module, _, function = name.partition(":")
        raise UserError(f"{option} {name}: {module} has no function {function!r}: name another")
    return target


def find_object(option: str, name: str, example: str, form: str = "MODULE:NAME") -> Any:
    """Return the object MODULE:NAME that an option names, None if the module does not have it.
    Raises UserError if there is no such module."""
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.endswith(".py") or "/" in module:
        raise UserError(f"{option} {name!r} must be {form}, such as {example}")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        what = "there is no such module here"
        if not missing:
            what = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{option} {name}: {module} cannot be imported ({one_line(what)}): fix it, or start "
            "where it is"
        ) from None
    finally:
        sys.path.remove("")


def name_of(function: Callable[..., Any]) -> str:
    """Return MODULE:FUNCTION, with which find_function finds the function in another process; "" if
    it does not."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "")
    is_found = module != "__main__" and getattr(sys.modules.get(module), name, None) is function
    return f"{module}:{name}" if is_found else ""


def described(error: BaseException) -> str:
    """Return an error in a user's function on one line: its type, its message, and the innermost
    line that is not xtrain's."""
    own = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(own)]
    where = ""
    if theirs:
        where = f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}"
    return f"{type(error).__name__} ({one_line(str(error))}){where}"
