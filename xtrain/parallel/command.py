"""The commands of training, on any number of ranks:   mpirun -n 4 xtrain train ...

Without a launcher, a command is one process and does not load MPI.
"""

import contextlib
import functools
import io
import sys
from collections.abc import Callable
from typing import Any

from ..cli import command, refuse_once, say
from ..errors import UserError
from ..machine import first_on_machine
from ..options import parse
from ..run_options import RunOptions
from ..training.run_folder import parse_options
from ..training.single_device import SingleDevice
from ..training.single_process import SingleProcess
from .ranks import Ranks, launched
from .watchdog import AbortOnError

Parse = Callable[[Any], Any]  # the defaults -> the options of the command line
Work = Callable[[Any, SingleDevice], Any]  # the options, SingleDevice or DataParallel


def training_command(
    name: str,
    kind: type[RunOptions],
    description: str | None,
    work: Work,
    arguments: list[str] | None,
) -> int:
    """Read the options of a command and run it, on all ranks that a launcher started. Return its
    exit code.

    name: of the command's module, such as "xtrain.train".
    work: runs the command with its options.
    """
    cli = functools.partial(parse, kind, f"python -m {name}", description, arguments)
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(given):  # without MPI, which may not be able to start here
        return _on_one(name, cli, work) if first_on_machine() else 0
    try:
        ranks = launched()
    except UserError as error:
        refuse_once(f"{name}: {error}")
        return 2
    if ranks.world == 1:
        return _on_one(name, cli, work)
    assert isinstance(ranks, Ranks)
    return _on_all(name, cli, work, ranks)


def _on_one(name: str, cli: Parse, work: Work) -> int:
    @command(name, interrupted="interrupted; the last checkpoint is intact", one_process=False)
    def run(_: Any = None) -> int:
        work(parse_options(cli), SingleDevice())
        return 0

    return run()


def _on_all(name: str, cli: Parse, work: Work, ranks: Ranks) -> int:
    from .ddp import DataParallel

    with AbortOnError(ranks, name) as guard:
        config, code = _parse_together(name, lambda: cli(None), ranks)
        if config is not None and config.resume:  # no rank waits for one that has left
            config, code = _parse_together(name, lambda: parse_options(cli, ranks), ranks)
        if config is None:
            return code
        work(config, DataParallel(ranks, guard))
    return guard.code


def _parse_together(
    name: str, parse: Callable[[], Any], ranks: SingleProcess
) -> tuple[RunOptions | None, int]:
    """Return (options, 0), or (None, exit code) on every rank if any cannot parse its options. Rank
    0 prints the first error."""
    config: Any = None
    code: Any = 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            config = parse()
        except SystemExit as stop:
            code = stop.code
        except UserError as error:
            say(f"{name}: {error}")
            code = 2
    results = ranks.gather((config is None, code, printed.getvalue()))
    failed = next((result for result in results if result[0]), None)
    if failed is None:
        if ranks.rank == 0:
            print(printed.getvalue(), end="", file=sys.stderr)  # warnings
        return config, 0
    _, code, text = failed
    if ranks.rank == 0:
        print(text, end="", file=sys.stderr if code else sys.stdout)  # in tyro's colors
    return None, code
