"""Default signal handlers for tests of signals: `nohup pytest &` starts the suite with SIGINT and SIGHUP ignored."""

import contextlib
import signal
from collections.abc import Iterator

DEFAULTS = {
    getattr(signal, name): handler
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL))
    if hasattr(signal, name)
}


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Inside, this process handles SIGINT and SIGHUP as Python does by default. Also a decorator."""
    before = {number: signal.signal(number, handler) for number, handler in DEFAULTS.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def default_signals_in_child() -> None:
    """preexec_fn of a child process: the child does not inherit ignored signals."""
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
