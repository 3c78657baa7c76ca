"""When to stop early, with a checkpoint: a signal, or the end of the time that a job has.

SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGHUP (the terminal is closed): the step is finished, a checkpoint is written, the program
ends with 0. A second SIGINT ends at once. Before the first step there is nothing to save: any of them ends the program. A
SIGHUP that is ignored (nohup) stays so.
"""

import math
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from ..errors import UserError

BYTES_PER_SECOND = 2e8  # what a checkpoint is guessed to be written with, before one was
EXIT_SECONDS = 3.0  # to end the program
LONGEST_START = 600  # seconds


def _age() -> float:
    """Seconds since this process began. (Loading libraries may take some of a job's time.)"""
    try:
        with open("/proc/self/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
        if (
            time.process_time() <= age < LONGEST_START
        ):  # some sandboxes have clocks that do not fit together
            return age
    except (OSError, ValueError, AttributeError, IndexError):  # not on Linux
        pass
    return time.process_time()


STARTED = time.monotonic() - _age()


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


class Stop:
    """with Stop(limit) as stop: training calls stop.step() after every step.

    limit: seconds from the start of the program, None for no limit.  now: the clock, in seconds.
    """

    def __init__(self, limit: float | None = None, now: Callable[[], float] = time.monotonic):
        self.limit, self.now = limit, now
        self.asked, self.training, self.why = False, False, ""
        self.slowest_step = self.slowest_save = 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks two of them
            if number is not None and not (name == "SIGHUP" and _ignored(number)):
                try:
                    self.before[number] = signal.signal(number, self._ask)
                except ValueError:  # not in the main thread: the caller handles signals
                    break
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if not self.training or (self.asked and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.asked, self.why = True, signal.Signals(number).name

    def begin(self, checkpoint_bytes: float) -> None:
        """Training begins: from now on signals wait for the end of a step."""
        self.training, self.last = True, None
        self.slowest_save = checkpoint_bytes / BYTES_PER_SECOND

    def step(self, save_seconds: float = 0.0) -> bool:
        """A step is done, with what came before it. save_seconds: what a checkpoint takes. -> is it time to stop?"""
        now = self.now()
        if self.last is not None:  # the first step compiles kernels, which the next ones need not
            self.slowest_step = max(self.slowest_step, now - self.last)
        self.last, self.slowest_save = now, max(self.slowest_save, save_seconds)
        if self.limit is not None and not self.asked:
            needed = EXIT_SECONDS + 2 * (self.slowest_step + self.slowest_save)  # twice, to be sure
            if now - STARTED + needed >= self.limit:
                self.asked, self.why = True, "--time-limit"
        return self.asked


def seconds(text: str | None) -> float | None:
    """ "5400", "90:00", "1:30:00" or "0-01:30:00" (as Slurm writes it) -> 5400.0. Raises UserError."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d*)?)", text)
    if found is None or (found[1] is not None and found[3] is None):
        raise UserError(
            f"--time-limit {text!r} is no time: give seconds, MM:SS, HH:MM:SS or D-HH:MM:SS"
        )
    value = math.fsum(float(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1)))
    if value <= 0:
        raise UserError(f"--time-limit must be positive, got {text}")
    return value
