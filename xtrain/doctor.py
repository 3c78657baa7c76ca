"""Check the machine: what is missing or incompatible, and the command that fixes it.

    python -m xtrain.doctor            a table; exit code 0: all checks pass, 1: something needs a fix
    python -m xtrain.doctor --json     the same for programs

Checks that could crash the interpreter (drivers, MPI) run in a subprocess. A small kernel is
compiled and run in the simulator, and on the GPU if there is one. Nothing on the machine is
changed.
"""

import argparse  # needs no package that may be missing
import json
import sys
from dataclasses import asdict

from .cli import command, command_line, print_text
from .inspect.doctor import examine, show


@command("xtrain.doctor", one_process=False)
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code, 0: all is well, 1: something needs a fix."""
    parser = argparse.ArgumentParser(
        "python -m xtrain.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    o = parser.parse_args(arguments)
    checks = examine()
    wrong = any(c.ok is False for c in checks)
    if o.json:
        print_text(json.dumps({"ok": not wrong, "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        show(checks)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(command_line(main))
