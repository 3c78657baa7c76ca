"""End all ranks when one of them fails: the others would wait for it in a collective forever.

    with AbortOnError(ranks, name):  an exception or sys.exit inside prints rank, step and
    traceback, then MPI_Abort
    with Watchdog(...):              no step for some seconds, wherever the rank hangs: the same, and the process exits

A UserError that all ranks raise is printed once, by rank 0, and every rank returns with exit code
2. If a rank is killed, or leaves without a word (os._exit), its ExitMonitor or mpirun (srun)
notices and ends the others. If its process is stopped, before the first step too, the Heartbeats of
the next rank do.
"""

import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ..cli import printable
from ..errors import INTERRUPTED_EARLY, UserError
from .heartbeats import Heartbeats
from .ranks import START_SECONDS, Ranks

AGREE_SECONDS = 2  # a rank with a UserError waits this long for the same error on all other ranks
ABORT_SECONDS = 5  # MPI_Abort itself may hang; then the process exits without it
# before the end of a job: mpirun may drop output that it has not passed on, and other hanging ranks
# need time to print where they hang
OUTPUT_SECONDS = 1


class ExitMonitor:
    """A process that ends the job with exit code 1 if this rank exits before it signs off.

    MPICH's mpirun counts a rank that exits with 0 in the middle of a run as a success, and kills
    the others. The monitor holds the rank's connection to mpirun, so that mpirun waits for it, and
    sends what MPI_Abort would (the abort command of PMI-1). Other launchers are not told: Open
    MPI's mpirun reports such a rank itself.
    """

    def __init__(self, message: str):
        self.process: subprocess.Popen | None = None
        if "PMI_FD" in os.environ and "MPI_LOCALRANKID" in os.environ:  # MPICH's mpirun
            wait = f"sleep {OUTPUT_SECONDS}"
            script = f'read signed_off || {{ echo "$0" >&2; {wait}; echo cmd=abort exitcode=1; }}'
            self.process = subprocess.Popen(
                ["sh", "-c", script, message],
                stdin=subprocess.PIPE,
                stdout=int(os.environ["PMI_FD"]),
                start_new_session=True,  # Ctrl-C is for the rank
            )

    def sign_off(self) -> None:
        """Let this rank exit."""
        if self.process is not None:
            with contextlib.suppress(OSError):  # it was killed
                self.process.communicate(b"signed off\n")
            self.process = None


class AbortOnError:
    """Aborts the whole job if an exception leaves the block on this rank.

    step: a function that returns the current step, for the message; set by the caller.
    code: the exit code after the block.
    heartbeats: None on a single rank, and if threads may not call MPI.
    """

    def __init__(self, ranks: Ranks, name: str):
        self.ranks = ranks
        self.name = name
        self.code = 0
        self.step: Callable[[], int | None] = lambda: None
        self.heartbeats: Heartbeats | None = None

    def __enter__(self) -> "AbortOnError":
        self.before = threading.excepthook
        threading.excepthook = lambda args: self._abort_with_traceback(args.exc_value, 1)
        self.monitor = ExitMonitor(
            f"{self.name}: rank {self.ranks.rank} ended in the middle of the run (by a signal or "
            "os._exit), all ranks end"
        )
        if self.ranks.world > 1 and self.ranks.threads:
            self.heartbeats = Heartbeats(self.ranks, self._abort_for_silence, START_SECONDS)
            self.heartbeats.start()
        elif self.ranks.world > 1 and self.ranks.rank == 0:
            print_error(
                f"{self.name}: warning: this MPI library allows calls from one thread only, so the "
                "other ranks wait for ever for one that is stopped before its first step"
            )
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        threading.excepthook = self.before
        if isinstance(error, UserError):
            self.code = 2
            self._print_once(f"{self.name}: {error}", 2)
        elif isinstance(error, KeyboardInterrupt):
            self.code = 130
            self._print_once(f"{self.name}: {str(error) or INTERRUPTED_EARLY}", 130)
        elif error is not None:
            if isinstance(error, SystemExit):
                code = error.code
            else:
                code = 1
            self._abort_with_traceback(error, code if isinstance(code, int) and code else 1)
        if self.heartbeats is not None:
            with contextlib.suppress(KeyboardInterrupt):  # this rank has done its work
                self.heartbeats.stop()
        self.monitor.sign_off()
        return True

    def set_watchdog(self, seconds: float) -> None:
        """Tell the heartbeats what --watchdog is."""
        if self.heartbeats is not None:
            self.heartbeats.set_watchdog(seconds)

    def _print_once(self, message: str, code: int) -> None:
        """If every rank calls this, rank 0 prints and all return. Otherwise this rank prints and
        aborts the job."""
        all_failed = self.ranks.failed.Ibarrier()
        until = time.monotonic() + AGREE_SECONDS
        while time.monotonic() < until:
            if all_failed.Test():
                if self.ranks.rank == 0:
                    print_error(message)
                return
            time.sleep(0.01)
        print_error(f"{message} (rank {self.ranks.rank})")
        self._abort(code)

    def _abort_with_traceback(self, error: BaseException | None, code: int) -> None:
        where = rank_and_step(self.ranks.rank, self.step())
        trace = "".join(traceback.format_exception(error))
        print_error(f"{self.name}: {where} failed, all ranks end\n{trace}")
        self._abort(code)

    def _abort_for_silence(self, rank: int, seconds: float) -> NoReturn:
        print_error(
            f"{self.name}: the process of rank {rank} has not run for {seconds:g} s (see --watchdog): "
            "it is stopped, holds Python's lock, or its machine cannot be reached; all ranks end"
        )
        self._abort(1)

    def _abort(self, code: int) -> NoReturn:
        time.sleep(OUTPUT_SECONDS)
        timer = threading.Timer(ABORT_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()
        self.monitor.sign_off()
        self.ranks.comm.Abort(code)
        os._exit(code)


class Watchdog(threading.Thread):
    """Ends the process if `beat` is not called for `seconds`, and prints where the main thread is.

    This covers a collective whose other ranks never call it. If a thread holds the GIL, a timer of
    faulthandler, which does not need the GIL, ends the process, without printing rank and step.

    seconds: 0: never.  step: a function that returns the current step, for the message.
    """

    def __init__(self, seconds: float, ranks: Ranks, step: Callable[[], int]):
        super().__init__(daemon=True)
        self.seconds = seconds
        self.ranks = ranks
        self.step = step
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def beat(self) -> None:
        """Report progress. The first call starts the watchdog: loading a checkpoint may take
        long."""
        self.last = time.monotonic()
        if self.seconds > 0 and self.ident is None:
            self.start()

    def stop(self) -> None:
        """Stop watching."""
        self.ended.set()
        if self.ident is not None:
            self.join()
            faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        """The thread: ends the process when the last beat is too old."""
        while not self.ended.wait(min(1.0, self.seconds / 8)):
            with contextlib.suppress(RuntimeError, ValueError, OSError):  # stderr is not a file
                faulthandler.dump_traceback_later(self.seconds + 0.5, exit=True)
            if time.monotonic() - self.last > self.seconds:
                self._report_and_exit()

    def _report_and_exit(self) -> None:
        where = rank_and_step(self.ranks.rank, self.step())
        frames = sys._current_frames()
        main_thread = threading.main_thread().ident
        stack = ""
        if main_thread:
            stack = "".join(traceback.format_stack(frames[main_thread]))
        print_error(
            f"xtrain: {where}: no progress for {self.seconds:g} s (--watchdog), this rank "
            f"exits. Its stack:\n{stack}"
        )
        time.sleep(OUTPUT_SECONDS)
        os._exit(1)


def print_error(message: str) -> None:
    """Print printable text to the real stderr.

    A progress bar replaces sys.stderr and writes to stdout, where Open MPI gives rank 0 a terminal:
    the message of rank 0 would not be where those of the other ranks are.
    """
    print(printable(message), file=getattr(sys.stderr, "rich_proxied_file", sys.stderr), flush=True)


def rank_and_step(rank: int, step: int | None) -> str:
    """Return "rank 1, step 4"; "rank 1" if the step is not known."""
    return f"rank {rank}" + ("" if step is None else f", step {step}")
