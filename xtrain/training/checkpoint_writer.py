"""Writes checkpoints on a thread while training continues.

Training waits only while the state is copied to host memory, and for the previous checkpoint if
that is still being written. On a full disk old checkpoints are removed, but never the newest good
one. An error on the thread is reported in the next step: a disk that is still full is a warning,
and the run continues with the checkpoints it has; any other error ends the run.
"""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import DiskFull, cannot_write
from ..formats import saved_runs
from . import checkpoint
from .checkpoint import Snapshot


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, and removes those beyond `keep`.

    warn(sentence): reports a warning.
    """

    def __init__(self, run: Path, keep: int, warn: Callable[[str], None]):
        self.run = run
        self.keep = keep
        self.warn = warn
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.failed = False  # is there an error that `check` has not reported yet?
        self.has_written = False  # a checkpoint, in this process
        self.seconds = 0.0  # time of the slowest checkpoint

    def save(
        self,
        make_snapshot: Callable[[], Snapshot | None],
        flush_logs: Callable[[], bool] = lambda: True,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the state with make_snapshot() and write it on the thread; None: another rank
        writes.

        flush_logs() -> False means that the logs up to this step could not be written, so the
        checkpoint is not written either. The thread calls afterwards() once the checkpoint is
        written.
        """
        self.wait()
        self.check()
        snapshot = make_snapshot()
        if snapshot is None:
            return
        while not flush_logs():
            if self._make_room(snapshot):
                continue
            self.error = DiskFull(
                f"no space left for a checkpoint of step {snapshot.state['step']}"
            )
            self.failed = True
            return
        self.thread = threading.Thread(target=self._write, args=(snapshot, afterwards), daemon=True)
        self.thread.start()

    def busy(self, seconds: float = 0.0) -> bool:
        """Return True if a checkpoint is still being written after waiting for at most
        `seconds`."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return True
        self.thread = None
        return False

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        while self.busy(1.0):  # in intervals, so that signals are handled
            pass

    def check(self) -> None:
        """Report an error of the thread: warn about a full disk, raise any other."""
        error = self.error
        self.error = None
        self.failed = False
        if isinstance(error, DiskFull):
            self.warn(f"{error}; training continues, {self._last_checkpoint()}")
        elif error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the last checkpoint of the run. Raises UserError if it could not be written."""
        self.wait()
        if isinstance(self.error, DiskFull):
            raise DiskFull(f"{self.error}; {self._last_checkpoint()}")
        self.check()

    def _last_checkpoint(self):
        checkpoints = saved_runs.folders(self.run)
        if checkpoints:
            return f"the last checkpoint is {checkpoints[-1]}"
        return "there is no checkpoint yet"

    def _write(self, snapshot, afterwards):
        started = time.monotonic()
        try:
            self._check_folders()
            self._write_and_make_room(snapshot)
            self.has_written = True
            checkpoint.prune(self.run, snapshot.state["step"], self.keep)
            afterwards()
        except BaseException as error:
            self.error = error
            self.failed = True
        self.seconds = max(self.seconds, time.monotonic() - started)

    def _write_and_make_room(self, snapshot):
        while True:
            try:
                checkpoint.write(self.run, snapshot)
                return
            except DiskFull:
                if not self._make_room(snapshot):
                    raise

    def _make_room(self, snapshot):
        """Remove an old checkpoint. -> could one be removed?"""
        step = snapshot.state["step"]
        name = checkpoint.make_room(self.run, step, snapshot.nbytes)
        if name is not None:
            self.warn(f"no space left for a checkpoint of step {step}: {name} is removed")
        return name is not None

    def _check_folders(self):
        """A folder may have vanished together with its disk: do not create it again without its
        logs."""
        for folder in (self.run, self.run / "checkpoints") if self.has_written else (self.run,):
            if not folder.is_dir():
                raise cannot_write(folder, FileNotFoundError(errno.ENOENT, "it is gone"))

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, KeyboardInterrupt):  # a second Ctrl-C exits at once
            self.wait()
