"""When one rank of several fails, all must end: a rank that waits for a dead one would wait for ever.

    with Guard(ranks, name):    an exception or sys.exit inside: rank, step and traceback on stderr, then MPI_Abort
    with Watchdog(...):         no step for some seconds, wherever the rank hangs: the same, and the process ends

A UserError is no accident: rank 0 says its sentence and every rank leaves with exit code 2.
A rank that is killed is noticed by mpirun (srun), which ends the others.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from .ranks import Ranks

AGREE_SECONDS = (
    2  # how long a rank with a UserError waits to see whether all others have one as well
)
ABORT_SECONDS = 5  # MPI_Abort itself may hang; then the process ends without it
LAST_WORDS_SECONDS = 1  # mpirun may drop what it has not passed on when a job ends; and all ranks that hang can say where


class Guard:
    """Ends the whole job when this rank leaves the block by anything but its end.

    step: a function that tells the step, for the message.  code: what to exit with after the block.
    """

    def __init__(self, ranks: Ranks, name: str):
        self.ranks, self.name, self.code = ranks, name, 0
        self.step: Callable[[], int | None] = lambda: None

    def __enter__(self) -> "Guard":
        self.before = threading.excepthook
        threading.excepthook = lambda about: self._die(about.exc_value, 1)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        threading.excepthook = self.before
        if isinstance(error, UserError):
            self.code = 2
            self._say_once(f"{self.name}: {error}", 2)
        elif isinstance(error, KeyboardInterrupt):
            self.code = 130
            self._say_once(f"{self.name}: interrupted; the last checkpoint is intact", 130)
        elif error is not None:
            code = error.code if isinstance(error, SystemExit) else 1
            self._die(error, code if isinstance(code, int) and code else 1)
        return True

    def _say_once(self, sentence, code):
        """If every rank comes here, rank 0 alone speaks and all leave in peace. Otherwise this one speaks and ends all."""
        everybody, until = self.ranks.failed.Ibarrier(), time.monotonic() + AGREE_SECONDS
        while time.monotonic() < until:
            if everybody.Test():
                if self.ranks.rank == 0:
                    say(sentence)
                return
            time.sleep(0.01)
        say(f"{sentence} (rank {self.ranks.rank})")
        self._abort(code)

    def _die(self, error, code):
        where = place(self.ranks.rank, self.step())
        trace = "".join(traceback.format_exception(error))
        say(f"{self.name}: {where} failed, all ranks end\n{trace}")
        self._abort(code)

    def _abort(self, code):
        time.sleep(LAST_WORDS_SECONDS)
        timer = threading.Timer(ABORT_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()
        self.ranks.comm.Abort(code)
        os._exit(code)


class Watchdog(threading.Thread):
    """Ends the process when `beat` is not called for so many seconds, with the place where every thread stands.

    That goes for a collective whose partner does not come, too. Should a thread not let go of Python's lock, a timer
    that does not need it does the same, without saying rank and step.
    """

    def __init__(self, seconds: float, ranks: Ranks, step: Callable[[], int]):
        super().__init__(daemon=True)
        self.seconds, self.ranks, self.step = seconds, ranks, step
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: Any) -> None:
        self.rest()

    def beat(self) -> None:
        """All is well. It begins to watch with the first: loading a checkpoint may take its time."""
        self.last = time.monotonic()
        if self.seconds > 0 and self.ident is None:
            self.start()

    def rest(self) -> None:
        """No more to watch."""
        self.ended.set()
        if self.ident is not None:
            self.join()
            faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        while not self.ended.wait(min(1.0, self.seconds / 8)):
            with contextlib.suppress(RuntimeError, ValueError, OSError):  # a stderr that is no file
                faulthandler.dump_traceback_later(self.seconds + 0.5, exit=True)
            if time.monotonic() - self.last > self.seconds:
                self._bark()

    def _bark(self):
        where = place(self.ranks.rank, self.step())
        frames = sys._current_frames()
        main = "".join(traceback.format_stack(frames[threading.main_thread().ident]))
        say(
            f"xtrain.ddp: {where}: no progress for {self.seconds:g} s (--watchdog), it ends. It stands at\n{main}"
        )
        time.sleep(LAST_WORDS_SECONDS)
        os._exit(1)


def say(words: str) -> None:
    """On stderr itself. While a progress bar is drawn sys.stderr belongs to the bar, which writes to stdout: as Open MPI
    gives rank 0 a terminal there, its last words would be missing where all others' are.
    """
    print(words, file=getattr(sys.stderr, "rich_proxied_file", sys.stderr), flush=True)


def place(rank: int, step: int | None) -> str:
    return f"rank {rank}" + ("" if step is None else f", step {step}")
