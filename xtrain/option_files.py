"""Options from a file: --config FILE.

{"steps": 100, "seq-len": 64}      options of the command in JSON, or in TOML if the name ends
                                   in .toml; names and values as on the command line
runs/NAME/config.json, runs/NAME   those of a run, but not what it says about the process and
                                   the folder (run_options.NOT_STORED)
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import UserError
from .json_files import read_json, reading
from .option_fields import Option, one_line
from .run_options import NOT_STORED


def read_options(
    file: str,
    options: dict[str, Option],
    decided: dict[str, str],
    known_name: Callable[[str], str],
) -> dict[str, Any]:
    """Return the values that a file gives, by the names of the fields.

    decided: options that a run of this command has and no command line can give.
    known_name: returns xtrain's name of an option, raises UserError if there is none.
    Raises UserError, which names the file.
    """
    path = Path(file)
    if path.is_dir():
        path = path / "config.json"
    content = _content(path)
    if isinstance(content.get("train"), dict) and "model" in content:  # config.json of a run
        left_out = {*NOT_STORED, *(name.replace("-", "_") for name in decided)}
        if is_whole_share(content["train"], content):
            left_out.add("micro_batch")
        content = {name: x for name, x in content["train"].items() if name not in left_out}
    values = {}
    for key, value in content.items():
        try:
            name = known_name(key)
            if name not in options:
                raise UserError(f"{one_line(key)}: write {name.removeprefix('no-')} = false")
            values[options[name].field] = _value(options[name], value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return values


def is_whole_share(options: dict[str, Any], record: dict[str, Any]) -> bool:
    """Was the micro-batch of a run the whole share of a rank, which depends on the number of ranks?
    Earlier versions did not store that number.

    options: of the run. record: its config.json.
    """
    ranks = None
    if isinstance(record.get("machine"), dict):
        ranks = record["machine"].get("ranks")
    if "dp" not in options:
        ranks = ranks or 1
    numbers: list[Any] = [options.get("batch"), ranks, options.get("micro_batch")]
    all_whole = all(type(x) is int for x in numbers)
    return not all_whole or numbers[0] == numbers[1] * numbers[2]


def _content(path: Path) -> dict[str, Any]:
    if path.suffix != ".toml":
        return read_json(path)
    try:
        with reading(path), open(path, "rb") as file:
            return tomllib.load(file)
    except ValueError as error:
        raise UserError(f"{path} is not TOML: {one_line(str(error))}") from None


def _value(option: Option, value: Any) -> Any:
    """Return the value of an option. Raises UserError."""
    if value is None and option.optional:
        return None
    if option.values in ("all", "repeated"):
        values = value
        if not isinstance(value, list):
            values = [value]
        read = [_single(option, x) for x in values]
        if option.values == "all":
            return tuple(read)
        return read
    return _single(option, value)


def _single(option: Option, value: Any) -> Any:
    is_text = isinstance(value, str)
    fits = isinstance(value, (int, float)) and isinstance(value, bool) == (option.kind is bool)
    if not (is_text or fits) or (option.kind in (str, Path) and not is_text):
        raise UserError(f"--{option.name} cannot be {one_line(repr(value))}")
    if isinstance(value, float) and option.kind is int and value.is_integer():
        value = int(value)
    return option.read(str(value))
