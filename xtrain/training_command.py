"""What the commands train, finetune and reinforce share: they run on any number of ranks.

xtrain train ...                    one process, which does not load MPI
mpirun -n 4 xtrain train ...        four ranks (parallel/command.py)
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from .cli import command
from .errors import INTERRUPTED_EARLY
from .machine import first_on_machine, launcher
from .options import parse
from .run_options import RunOptions
from .training.run_folder import parse_options
from .training.single_device import SingleDevice


def training_command(
    name: str,
    kind: type[RunOptions],
    description: str | None,
    work: Callable[[Any, SingleDevice], Any],
    arguments: list[str] | None,
) -> int:
    """Read the options of a command and run it, on all ranks that a launcher started.

    name: of the command's module, such as "xtrain.train".
    work: runs the command with its options, on a SingleDevice or a DataParallel.
    Returns the exit code.
    """
    cli = functools.partial(parse, kind, f"python -m {name}", description, arguments)

    @command(name, interrupted=INTERRUPTED_EARLY, one_process=False)
    def run_alone(_: list[str] | None = None) -> int:
        work(parse_options(cli), SingleDevice())
        return 0

    if arguments is None:
        words = sys.argv[1:]
    else:
        words = arguments
    if {"-h", "--help"} & set(words):  # without MPI, which may not be able to start here
        return run_alone() if first_on_machine() else 0
    started_by = launcher()
    if started_by is None or started_by.is_one_process:
        return run_alone()
    from .parallel.command import run_on_ranks

    return run_on_ranks(name, cli, work)
