"""A command of training on the ranks that a launcher started: one message for all of them."""

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

from ..cli import refuse_once, say
from ..errors import UserError
from ..run_options import RunOptions
from ..training.run_folder import parse_options
from ..training.single_device import SingleDevice
from .ddp import DataParallel
from .ranks import connect
from .watchdog import AbortOnError


def run_on_ranks(
    name: str, cli: Callable[[Any], Any], work: Callable[[Any, SingleDevice], Any]
) -> int:
    """Run a command on every rank and return its exit code.

    cli: returns the options of the command line, given their defaults.
    work: see training_command.
    """
    try:
        ranks = connect()
    except UserError as error:
        refuse_once(f"{name}: {error}")
        return 2
    with AbortOnError(ranks, name) as guard:
        config, code = _parse(name, lambda: cli(None), guard)
        if config is not None and config.resume:  # no rank waits for one that has left
            config, code = _parse(name, lambda: parse_options(cli, ranks), guard)
        if config is None:
            return code
        work(config, DataParallel(ranks, guard) if ranks.world > 1 else SingleDevice())
    return guard.code


def _parse(
    name: str, parse: Callable[[], Any], guard: AbortOnError
) -> tuple[RunOptions | None, int]:
    """Return (options, 0), or (None, exit code) on every rank if any cannot parse its options.

    Rank 0 prints the first error.
    """
    ranks = guard.ranks
    config: Any = None
    code: Any = 0
    printed = io.StringIO()
    # where print_error writes: a thread of the guard may end the job meanwhile
    printed.rich_proxied_file = sys.stderr  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            config = parse()
            guard.set_watchdog(config.watchdog)
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
        print(text, end="", file=sys.stderr if code else sys.stdout)
    return None, code
