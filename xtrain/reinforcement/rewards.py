"""The function that rewards completions: its calls, their time limit, and what it may return.

A call is interrupted by a signal (SIGALRM), which also reaches a regular expression that backtracks
without end, a sleep and a wait for another process; code in C that checks no signals is not
interrupted. Without that signal (Windows), and elsewhere than on the main thread, there is no
limit. A function that sets an alarm replaces it.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..errors import UserError
from ..options import described, find_function, one_line
from .prompts import Prompt

TICK = 0.2  # seconds between two looks at the clock


class RewardError(UserError):
    """A call that failed: the message names the function and the prompt."""


class TooLong(BaseException):
    """The call has reached its time limit. (Not an Exception: a reward function may catch those.)"""


class Interrupted(BaseException):
    """The run must stop and cannot wait for the call."""


class Task:
    """The function MODULE:FUNCTION. It is called with the line of a prompt and the texts of its
    completions, and returns one number for each; None: the completion has no reward, and is not
    trained:

        def reward(record: dict, completions: list[str]) -> list[float | None]

    Modules in the current folder are found too. Raises UserError if there is no such function.
    """

    def __init__(self, name: str):
        self.name = name
        self.function = find_function("--task", name, "my_task:reward")

    def rewards(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        seconds: float = 0.0,
        overdue: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """Return one reward for each completion, NaN for None. Raises RewardError if the function
        fails or returns something else, and Interrupted.

        seconds: that it may take; 0: no limit.
        overdue: must the run stop at once?
        """
        say = f"the task {self.name} {{}} for {prompt.where}: fix the function"
        try:
            with time_limit(seconds, overdue):
                found = self.function(dict(prompt.fields), list(completions))
                if isinstance(found, Iterator):  # a generator or a map: it computes when it is read
                    found = list(found)
        except TooLong:
            what = f"took more than {seconds:g} s (--reward-timeout)"
            raise RewardError(say.format(what)) from None
        except SystemExit as error:
            raise RewardError(say.format(f"called sys.exit({error.code!r})")) from error
        except Exception as error:
            raise RewardError(say.format(f"raised {described(error)}")) from error
        try:
            rewards = [math.nan if x is None else float(x) for x in found]
        except (TypeError, ValueError, OverflowError):
            what = f"returned {one_line(repr(found))}, not a list of numbers,"
            raise RewardError(say.format(what)) from None
        if len(rewards) != len(completions):
            what = f"returned {len(rewards)} rewards for {len(completions)} completions"
            raise RewardError(say.format(what))
        for reward, returned in zip(rewards, found):
            if returned is not None and not math.isfinite(reward):
                raise RewardError(say.format(f"returned the reward {reward}"))
        return rewards


@contextlib.contextmanager
def time_limit(seconds: float, overdue: Callable[[], bool]) -> Iterator[None]:
    """Raise TooLong inside after `seconds` (0: never), Interrupted once overdue() is true."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    start = time.monotonic()
    inside = True

    def tick(number, frame):
        if inside and seconds and time.monotonic() - start >= seconds:
            raise TooLong
        if inside and overdue():
            raise Interrupted

    handler = signal.signal(signal.SIGALRM, tick)
    before, interval = signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        try:
            yield
        finally:
            inside = False
    finally:  # also if a tick has come before that statement; the next one is TICK later
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:  # another timer was running
            left = max(before - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
