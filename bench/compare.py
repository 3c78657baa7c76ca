"""Compare two sets of bench results.   python bench/compare.py OLD NEW

OLD, NEW: a results file (.jsonl), or a folder with bench_*.jsonl files. Lines match if bench, name,
shape, dtype and gpu are equal; the last of several matching lines counts. The time (ms) is
compared; lower is better. Changes of more than 3 % are marked. Exit code: 0, 1 if a marked change
is slower, 2 if nothing could be compared.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

KEY = ("bench", "name", "shape", "dtype", "gpu")


@dataclass
class Options:
    old: tyro.conf.Positional[Path]  # .jsonl file, or folder of bench_*.jsonl
    new: tyro.conf.Positional[Path]  # the same
    percent: float = 3.0  # smaller changes are noise
    all: bool = False  # also list unchanged measurements


@dataclass(frozen=True)
class Change:
    """The two times, in ms, of one measurement."""

    key: tuple[str, ...]
    old: float
    new: float

    @property
    def percent(self) -> float:
        """The change of the time in percent; positive is slower."""
        return 100 * (self.new / self.old - 1)


def read(path: Path) -> dict[tuple[str, ...], float]:
    """Return {key: ms} of a file or of the files of a folder.

    Raises ValueError with file and line for an invalid line, OSError for an unreadable file.
    """
    files = sorted(path.glob("bench_*.jsonl")) if path.is_dir() else [path]
    times = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                key = tuple(str(record[k]) for k in KEY)
                ms = float(record["ms"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}:{number} is not a measurement: {error!r}") from error
            if ms > 0:
                times[key] = ms
    return times


def compare(old: dict, new: dict) -> list[Change]:
    """Return the measurements that both have, the worst change first."""
    changes = [Change(key, old[key], new[key]) for key in old.keys() & new.keys()]
    return sorted(changes, key=lambda c: (-c.percent, c.key))


def table(changes: list[Change], percent: float) -> Table:
    """Return a table of the changes; those of more than `percent` are marked."""
    out = Table()
    for column in KEY:
        out.add_column(column, overflow="fold")
    for column in ("old ms", "new ms", "change", ""):
        out.add_column(column, justify="right", no_wrap=True)
    for c in changes:
        verdict = ""
        if c.percent > percent:
            verdict = "[red]slower[/]"
        elif c.percent < -percent:
            verdict = "[green]faster[/]"
        out.add_row(*c.key, f"{c.old:.4f}", f"{c.new:.4f}", f"{c.percent:+.1f} %", verdict)
    return out


def main(o: Options, console: Console) -> int:
    try:
        old = read(o.old)
        new = read(o.new)
    except (OSError, ValueError) as error:
        console.print(f"compare: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    changes = compare(old, new)
    if not changes:
        console.print(
            "compare: the two have no measurement with the same bench, name, shape, dtype and gpu"
        )
        return 2
    marked = [c for c in changes if abs(c.percent) > o.percent]
    slower = [c for c in marked if c.percent > 0]
    if marked or o.all:
        console.print(table(changes if o.all else marked, o.percent))
    console.print(
        f"{len(changes)} compared, {len(slower)} slower and {len(marked) - len(slower)} faster "
        f"by more than {o.percent:g} %; only in old {len(old.keys() - new.keys())}, "
        f"only in new {len(new.keys() - old.keys())}",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if slower else 0


if __name__ == "__main__":
    console = Console(width=None if sys.stdout.isatty() else 160)
    sys.exit(main(tyro.cli(Options, description=__doc__), console))
