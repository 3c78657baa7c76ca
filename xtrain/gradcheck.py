"""Check backward passes: compare autograd with finite differences, in float64 on NumPy arrays.

python -m xtrain.gradcheck              every op of nn/functional.py, and whole models
python -m xtrain.gradcheck rmsnorm add  these ops
"""

import argparse
import sys

from rich.table import Table

from .cli import command, command_line
from .console import PrintableConsole
from .inspect.gradcheck import CASES, TOLERANCE, check, run

__all__ = ["check", "main"]


@command("xtrain.gradcheck")
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code, 0: all gradients are right, 1: a gradient is wrong,
    2: invalid arguments."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser("python -m xtrain.gradcheck", description=about)
    which = f"ops to check: {', '.join(CASES)}; none: all of them"
    parser.add_argument("op", nargs="*", help=which)
    table = Table("op", "input", "shapes", "error", "tolerance", "ok", box=None)
    failures = []
    for op in parser.parse_args(arguments).op or CASES:
        found, failure = run(op)
        for name, (shapes, error) in found.items():
            cells = op, name.removeprefix("model."), f"{len(shapes)}", f"{error:.1e}"
            table.add_row(*cells, f"{TOLERANCE:.0e}", "yes" if error <= TOLERANCE else "NO")
        failures += [f"{op} is wrong; smallest failure: {failure}"] if failure else []
    PrintableConsole().print(table, *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(command_line(main))
