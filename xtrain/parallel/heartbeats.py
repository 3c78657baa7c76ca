"""Messages by which a rank notices that the process of another does not run, at any time of a job.

A watchdog counts steps. Before the first one and after the last, ranks may wait for each other as
long as it takes: for a text that rank 0 reads, for kernels that it compiles. A thread of every rank
sends a message a second to the next rank, so silence means that the process is stopped or its
machine is out of reach, not that its work takes long.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .ranks import Ranks

SECONDS = 1.0  # between two messages
LEAVING_SECONDS = 0.005  # the same, while this rank waits for the end of the one before
TAG = 58  # of the messages
RUNS = 0  # the two messages, one byte each
LEAVES = 1
SHARE = 0.5  # of --watchdog: the sentence comes before the stacks that watchdogs print
SHORTEST = 60.0  # seconds: native code may hold Python's lock for a while, and stop this thread


class Heartbeats(threading.Thread):
    """Calls `on_silence` if the rank before this one sends no message for `limit` seconds.

    The ranks form a ring, so that one rank reports a silent one. Time in which this process did not
    run either does not count.

    on_silence: gets the silent rank and the limit, and ends the process.
    limit: 0: never.
    """

    def __init__(self, ranks: Ranks, on_silence: Callable[[int, float], None], limit: float):
        super().__init__(daemon=True)
        self.comm = ranks.failed
        self.before = (ranks.rank - 1) % ranks.world
        self.after = (ranks.rank + 1) % ranks.world
        self.on_silence = on_silence
        self.limit = limit
        self.leaving = threading.Event()
        self.silence = 0.0  # seconds since the last message
        self.received = np.full(1, RUNS, np.uint8)  # the last message

    def set_watchdog(self, seconds: float) -> None:
        """Set the limit that belongs to --watchdog."""
        self.limit = 0.0
        if seconds > 0:
            self.limit = max(SHORTEST, SHARE * seconds)

    def stop(self) -> None:
        """Tell the next rank that this one leaves, and wait until the rank before says so."""
        self.leaving.set()
        self.join()

    def run(self) -> None:
        """The thread. It ends when this rank and the one before it leave."""
        receiving = self._receive()
        sent = np.full(1, RUNS, np.uint8)
        sending = self._send(sent)
        last = time.monotonic()
        while True:
            leaving = self._wait()
            now = time.monotonic()
            self.silence += min(now - last, 2 * SECONDS)
            last = now
            while self.received[0] != LEAVES and receiving.Test():
                self.silence = 0.0
                if self.received[0] != LEAVES:
                    receiving = self._receive()
            if sending.Test():
                if sent[0] != LEAVES:
                    sent = np.full(1, LEAVES if leaving else RUNS, np.uint8)
                    sending = self._send(sent)
                elif self.received[0] == LEAVES:
                    return
            if 0 < self.limit < self.silence and self.received[0] != LEAVES:
                self.on_silence(self.before, self.limit)

    def _wait(self) -> bool:
        """Wait for the next look at the messages. Return whether this rank leaves."""
        if self.leaving.is_set():
            time.sleep(LEAVING_SECONDS)
            return True
        return self.leaving.wait(SECONDS)

    def _send(self, message: np.ndarray) -> Any:
        return self.comm.Isend(message, self.after, TAG)

    def _receive(self) -> Any:
        return self.comm.Irecv(self.received, self.before, TAG)
