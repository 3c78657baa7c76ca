"""Checkpoints are written by a thread, while training goes on.

Training waits for the copy into host memory only (and, if a checkpoint is due before the last one is on the disk, for that).
What goes wrong in the thread is told in the next step. A full disk is a warning: the run goes on, the checkpoints that are
there stay. Anything else ends the run.
"""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import DiskFull, cannot_write
from . import checkpoint
from .checkpoint import Snapshot


class Writer:
    """Writes the checkpoints of one run, one after the other, and removes those beyond `keep`.

    say(sentence): for warnings.
    """

    def __init__(self, run: Path, keep: int, say: Callable[[str], None]):
        self.run, self.keep, self.say = run, keep, say
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.failed = False  # is there something to tell?
        self.written = False  # a checkpoint, by this writer
        self.seconds = 0.0  # what the slowest checkpoint took

    def save(
        self,
        take: Callable[[], Snapshot | None],
        flush: Callable[[], bool] = lambda: True,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """take() copies the state; nothing is written where that gives None (another rank writes).

        flush() writes the log that belongs to it; when there is no room for that, there is none for a checkpoint.
        then() is called by the thread, after the checkpoint is written.
        """
        self.wait()
        self.check()
        snapshot = take()
        if snapshot is not None and not flush():
            step = snapshot.state["step"]
            self.error, self.failed = (
                DiskFull(f"no space left for a checkpoint of step {step}"),
                True,
            )
        elif snapshot is not None:
            self.thread = threading.Thread(target=self._work, args=(snapshot, then), daemon=True)
            self.thread.start()

    def busy(self, seconds: float = 0.0) -> bool:
        """Is something being written? Waits at most so long for the end of it."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return True
        self.thread = None
        return False

    def wait(self) -> None:
        """Until nothing is being written."""
        while self.busy(1.0):  # in pieces: a signal can come between
            pass

    def check(self) -> None:
        """Tells what has gone wrong: a full disk by a warning, anything else by raising it."""
        error, self.error, self.failed = self.error, None, False
        if isinstance(error, DiskFull):
            self.say(f"{error}; training goes on, {self._there()}")
        elif error is not None:
            raise error

    def finish(self) -> None:
        """The end of training: waits for the last checkpoint. Raises UserError when that could not be written."""
        self.wait()
        if isinstance(self.error, DiskFull):
            raise DiskFull(f"{self.error}; {self._there()}")
        self.check()

    def _there(self):
        there = checkpoint.folders(self.run)
        return f"the last checkpoint is {there[-1]}" if there else "there is no checkpoint yet"

    def _work(self, snapshot, then):
        started = time.monotonic()
        try:
            there = (self.run, self.run / "checkpoints") if self.written else (self.run,)
            for where in there:  # it was there: a disk may be gone
                if not where.is_dir():
                    raise cannot_write(where, FileNotFoundError(errno.ENOENT, "it is gone"))
            checkpoint.write(self.run, snapshot)
            self.written = True
            checkpoint.prune(self.run, snapshot.state["step"], self.keep)
            then()
        except BaseException as error:
            self.error, self.failed = error, True
        self.seconds = max(self.seconds, time.monotonic() - started)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, KeyboardInterrupt):  # that one ends at once
            self.wait()
