"""Lines on standard error about a launch that takes long: how many blocks have ended, and an
estimate of the time left."""

import sys
import time

FIRST = 10.0  # seconds before the first line; each later one comes after twice the time


class Progress:
    """The progress of one launch."""

    def __init__(self, name: str, blocks: int):
        self.name = name
        self.blocks = blocks
        self.start = time.perf_counter()
        self.next = FIRST

    def ended(self, blocks: int) -> None:
        """So many blocks have ended."""
        seconds = time.perf_counter() - self.start
        if blocks and seconds >= self.next:
            self.next = 2 * seconds
            self.tell(blocks, seconds * (self.blocks - blocks) / blocks)

    def tell(self, blocks: int, left: float) -> None:
        """Print a line. left: seconds"""
        print(
            f"simulator: {self.name}: {blocks:,} of {self.blocks:,} blocks have ended, about "
            f"{_time(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
