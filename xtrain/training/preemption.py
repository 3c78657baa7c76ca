"""Stop early, with a checkpoint: on a signal, or before the time limit of a job.

On SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or SIGHUP (the terminal was closed) the current step is
finished, a checkpoint is written and the program exits with code 0. A second SIGINT exits at once.
Before the first step there is nothing to save, so any of these signals exits at once. A SIGHUP that
was ignored when the program started (nohup) stays ignored.
"""

import math
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from ..errors import UserError

BYTES_PER_SECOND = 2e8  # assumed write speed of a checkpoint until one has been written
GRACE_SECONDS = (
    10.0  # that a step gets after a request to stop, before work that hangs is interrupted
)
EXIT_SECONDS = 3.0  # reserved for the exit of the program
LONGEST_START = 600  # seconds; a process that seems older has inconsistent clocks


def _process_age() -> float:
    """Return seconds since this process started. (Importing libraries may take a noticeable part of
    a job's time.)"""
    try:
        with open("/proc/self/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        # in some sandboxes these clocks are inconsistent
        if time.process_time() <= age < LONGEST_START:
            return age
    except (OSError, ValueError, AttributeError, IndexError):  # not on Linux
        pass
    return time.process_time()


STARTED = time.monotonic() - _process_age()


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


class StopNow(KeyboardInterrupt):
    """A signal after which the program exits at once."""


class StopRequest:
    """Catches signals and watches the time limit: `with StopRequest(limit) as stop`, then
    `stop.after_step()` per step.

    limit: seconds from the start of the program, None for no limit.  now: a clock in seconds.
    reason: the signal's name or "--time-limit" once a stop was requested, else "".
    """

    def __init__(self, limit: float | None = None, now: Callable[[], float] = time.monotonic):
        self.limit = limit
        self.now = now
        self.requested = False
        self.requested_at = 0.0
        self.training = False
        self.reason = ""
        self.last_step: float | None = None  # when the last step ended
        self.slowest_step = self.slowest_save = 0.0
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks two of them
            if number is not None and not (name == "SIGHUP" and _is_ignored(number)):
                try:
                    self.previous_handlers[number] = signal.signal(number, self._on_signal)
                except ValueError:  # not in the main thread: the caller handles signals
                    break
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame):
        if not self.training or (self.requested and number == signal.SIGINT):
            raise StopNow
        self.reason = signal.Signals(number).name  # first: another signal may interrupt the call
        if not self.requested:
            self.requested_at = self.now()
        self.requested = True

    def begin(self, checkpoint_bytes: float) -> None:
        """Training begins: from now on a signal waits for the end of the step."""
        self.training = True
        self.last_step = None
        self.slowest_save = checkpoint_bytes / BYTES_PER_SECOND

    def after_step(self, save_seconds: float = 0.0) -> bool:
        """Return True if it is time to stop. Call it after every step.

        save_seconds: time of the slowest checkpoint so far.
        """
        now = self.now()
        if self.last_step is not None:  # the first step compiles kernels: it does not count
            self.slowest_step = max(self.slowest_step, now - self.last_step)
        self.last_step = now
        self.slowest_save = max(self.slowest_save, save_seconds)
        if self.limit is not None and not self.requested:
            # twice the slowest step and checkpoint, as a margin
            needed = EXIT_SECONDS + 2 * (self.slowest_step + self.slowest_save)
            if now - STARTED + needed >= self.limit:
                self.reason = "--time-limit"
                self.requested = True
        return self.requested

    def overdue(self) -> bool:
        """Must the step in progress be given up? Sets the reason."""
        now = self.now()
        if self.requested and now - self.requested_at > GRACE_SECONDS:
            return True
        if self.limit is None or now - STARTED + EXIT_SECONDS + 2 * self.slowest_save < self.limit:
            return False
        self.reason = self.reason or "--time-limit"
        self.requested = True
        return True


def parse_seconds(text: str | None) -> float | None:
    """ "5400", "90:00", "1:30:00" or "0-01:30:00" (Slurm's format) -> 5400.0. Raises UserError."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d*)?)", text)
    if match is None or (match[1] is not None and match[3] is None):
        raise UserError(
            f"--time-limit {text!r} is not a time: give seconds, MM:SS, HH:MM:SS or D-HH:MM:SS"
        )
    value = math.fsum(float(n or 0) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1)))
    if value <= 0:
        raise UserError(f"--time-limit must be positive, got {text}")
    return value
