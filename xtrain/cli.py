"""What every command shares: options, standard streams, signals, and one path from an error to an exit code.

    @command("xtrain.train")
    def main(arguments=None) -> int: ...        raises UserError; returns an exit code

    if __name__ == "__main__":
        sys.exit(command_line(main))

Exit codes: 0 success, 2 bad input (one sentence on stderr), 130 Ctrl-C, 141 the reader of standard output has gone,
1 anything else.
"""

import contextlib
import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from .errors import UserError, ran_out, wanted
from .files import FULL

UNREAD = 141  # what a shell says of a program that wrote to a pipe without a reader: 128 + SIGPIPE


class Output:
    """Standard output for a run, which does not depend on it: what a full disk or a closed pipe refuses is dropped."""

    def __init__(self):
        self.refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)  # the one of now: somebody may redirect it

    def write(self, text: str) -> int:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        known = text.encode(encoding, "replace").decode(encoding)  # ? for what it does not know
        self._try(lambda: sys.stdout.write(known))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: sys.stdout.flush())

    def _try(self, call):
        if sys.stdout is not None:
            try:
                call()
            except (OSError, ValueError):  # ValueError: it is closed
                self.refused = True

    def end(self) -> None:
        """Let nothing of what was refused be tried again at the end of the program, where it would be an error."""
        if self.refused:
            _discard_output()


def command(name: str, *, interrupted: str = "interrupted", less_memory: str = "") -> Callable:
    """Decorate a command's main(arguments=None) -> exit code: a UserError becomes one sentence on stderr and exit code 2.

    name: how messages begin, such as "xtrain.train".  interrupted: what Ctrl-C prints, with exit code 130.
    less_memory: what to do when memory runs out; "": running out of memory is an ordinary error here.
    """

    def decorate(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def wrapped(arguments: list[str] | None = None) -> int:
            try:
                return main(arguments)
            except UserError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2
            except (MemoryError, RuntimeError) as error:
                if not (less_memory and ran_out(error)):
                    raise
                print(f"{name}: {wanted(error)}: {less_memory}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print(f"\n{name}: {interrupted}", file=sys.stderr)
                return 130

        return wrapped

    return decorate


def command_line(main: Callable[[], int]) -> int:
    """main() -> the exit code of the program: 130 for Ctrl-C, UNREAD when nobody reads its output (`| head`), 1 when that
    has no room."""
    _open_streams()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as __init__.py left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = main()
        except SystemExit as stop:  # --help
            code = stop.code
        sys.stdout.flush()
        if not code:  # all is done: a signal while Python and MPI end must not make it a failure
            for name in {"SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"} & set(dir(signal)):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        print("\nxtrain: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in {errno.EPIPE, errno.EIO, *FULL}:
            raise
        _discard_output()
        if error.errno == errno.EPIPE:
            return UNREAD
        print(f"xtrain: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _open_streams():
    """Streams that are closed (<&-, >&-) lead nowhere; those without Unicode show ? instead of ending us."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif name != "stderr" and hasattr(stream, "reconfigure"):  # stderr shows \\u65e5 by itself
            stream.reconfigure(errors="replace")


def _discard_output():
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
