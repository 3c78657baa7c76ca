"""What every command shares: options, standard streams, signals, and one path from an error to an
exit code.

    say(text)             a message, on standard error
    print_text(text)      a result, on standard output

    @command("xtrain.train")
    def main(arguments=None) -> int: ...        raises UserError; returns an exit code

    if __name__ == "__main__":
        sys.exit(command_line(main))

Exit codes: 0 success, 2 bad input (one sentence on stderr), 130 Ctrl-C, 141 the reader of standard
output has closed its end, 1 anything else.
"""

import contextlib
import errno
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from . import machine
from .errors import UserError, describe_out_of_memory, is_out_of_memory
from .files import FULL

EXIT_SECONDS = 30  # that threads and processes of a user's function get to end
OTHERS_SECONDS = 1  # a launcher ends all processes with the first: the one that prints needs time
BROKEN_PIPE = 141  # a shell's exit code for a program that was ended by SIGPIPE: 128 + 13
# The C0 control characters, DEL and the C1 control characters, without tab and newline. A terminal
# would obey them: they move the cursor, hide text, set the clipboard. C0 and DEL have pictures:
# U+241B for escape.
CONTROL_CHARACTERS = {
    **{c: 0x2400 + c for c in range(0x20) if chr(c) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


# ----------------------------------------------------------------------------- printing
def printable(text: str) -> str:
    """Return the text, each control character except tab and newline replaced by a visible
    character.

    Each character is replaced by itself, so a text may be passed in parts.
    """
    return text.translate(CONTROL_CHARACTERS)


def say(text: str) -> None:
    """Print a message on standard error, as printable text: it may contain names and text from
    files. A message that cannot be written, for instance on a full disk, is dropped."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr)


def print_text(text: str, end: str = "\n", flush: bool = False) -> None:
    """Print a result on standard output: as printable text in a terminal, unchanged in a pipe or a
    file."""
    text += end
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    if flush:
        sys.stdout.flush()


# ----------------------------------------------------------------------------- commands
class Output:
    """Standard output whose errors never end a run: text that cannot be written (full disk, closed
    pipe) is dropped."""

    def __init__(self) -> None:
        self.refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)  # looked up each time: sys.stdout may be redirected

    def write(self, text: str) -> int:
        """Write as io.TextIOBase.write does, but never raise."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        encodable = text.encode(encoding, "replace").decode(encoding)  # ? for other characters
        self._try(lambda: sys.stdout.write(encodable))
        return len(text)

    def flush(self) -> None:
        """Flush as io.TextIOBase.flush does, but never raise."""
        self._try(lambda: sys.stdout.flush())

    def _try(self, call: Callable[[], Any]) -> None:
        if sys.stdout is not None:
            try:
                call()
            except (OSError, ValueError):  # ValueError: it is closed
                self.refused = True

    def end(self) -> None:
        """Discard text that could not be written, so that Python does not try to write it again at
        exit and fail."""
        if self.refused:
            _discard_output()


def command(
    name: str,
    *,
    interrupted: str = "interrupted",
    less_memory: str = "",
    one_process: bool = True,
) -> Callable:
    """Decorate a command's main(arguments=None) -> exit code.

    A UserError becomes one sentence on stderr and exit code 2.
    name: the prefix of messages, such as "xtrain.train".
    interrupted: what Ctrl-C prints, with exit code 130, unless the KeyboardInterrupt has a text.
    less_memory: what to do when memory runs out; "": out-of-memory errors are raised as they are.
    one_process: refuse to be started several times by mpirun, srun or torchrun.
    """

    def decorate(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def wrapped(arguments: list[str] | None = None) -> int:
            if one_process:
                launcher = machine.launcher()
            else:
                launcher = None
            if launcher is not None and launcher.world > 1:
                refuse_once(
                    f"{name}: {launcher.name} started {launcher.world} processes "
                    f"({launcher.variable}), but this command "
                    "is one process: start it without a launcher, or train on several ranks with "
                    f"`mpirun -n {launcher.world} xtrain train`"
                )
                return 2
            try:
                return main(arguments)
            except UserError as error:
                say(f"{name}: {error}")
                return 2
            except (MemoryError, RuntimeError) as error:
                if not (less_memory and is_out_of_memory(error)):
                    raise
                say(f"{name}: {describe_out_of_memory(error)}: {less_memory}")
                return 2
            except KeyboardInterrupt as stop:
                say(f"\n{name}: {str(stop) or interrupted}")
                return 130

        return wrapped

    return decorate


def refuse_once(message: str) -> None:
    """Print the message to stderr once per machine, before every process that a launcher started
    exits."""
    if machine.first_on_machine():
        say(message)
    else:
        time.sleep(OTHERS_SECONDS)


may_hang = threading.Event()  # a user's function was called: its threads may never end


def expect_hanging_threads() -> None:
    """Let the program end within EXIT_SECONDS, whatever a user's function has left running."""
    may_hang.set()


def command_line(main: Callable[[], int]) -> int:
    """Call main(). -> the exit code of the program.

    130 for Ctrl-C, BROKEN_PIPE if the reader of its output has exited (`| head`), 1 if the output
    cannot be written.
    """
    code = _exit_code(main)
    if may_hang.is_set():
        timer = threading.Timer(EXIT_SECONDS, _exit_now, [code])
        timer.daemon = True  # Python waits for other threads
        timer.start()
    return code


def _exit_now(code: int) -> None:
    """Exit without waiting for threads and processes."""
    import multiprocessing

    say("xtrain: threads or processes that a function has started do not end: they end here")
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(code)


def _exit_code(main: Callable[[], int]) -> int:
    """Call main() and return the exit code."""
    _open_streams()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by __init__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code: Any = main()
        except SystemExit as stop:  # --help
            code = stop.code
        sys.stdout.flush()
        if not code:  # success: a signal while Python and MPI shut down must not make it a failure
            for name in {"SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"} & set(dir(signal)):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        say("\nxtrain: interrupted")
        return 130
    except MemoryError as error:
        say(f"xtrain: {describe_out_of_memory(error)}: free memory, or raise its limit (ulimit -v)")
        return 2
    except OSError as error:
        if error.filename is not None or error.errno not in {errno.EPIPE, errno.EIO, *FULL}:
            raise
        _discard_output()
        if error.errno == errno.EPIPE:
            return BROKEN_PIPE
        say(f"xtrain: standard output cannot be written: {error.strerror}")
        return 1


def _open_streams() -> None:
    """Replace closed streams (<&-, >&-) by /dev/null; write ? where an encoding lacks a
    character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif name != "stderr" and hasattr(stream, "reconfigure"):  # stderr escapes them: \\u65e5
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
