"""The order in which blocks and threads run, if it is not that of their numbers (orders.py)."""

import random

PAUSES = 32  # of each thread
PAUSE = 0.3  # the share of the atomics before which a thread stops


class Schedule:
    """One order."""

    def __init__(self, seed: int):
        self.seed = seed
        self.random = random.Random(seed)

    def order(self, items) -> list:
        """Return the same items in the order in which they run."""
        items = [*items]
        self.random.shuffle(items)
        return items

    def pauses(self) -> bool:
        """Does a thread stop before its next atomic?"""
        return self.random.random() < PAUSE

    def parks(self) -> bool:
        """Do other blocks run before those threads of a block that have stopped?"""
        return self.random.random() < 0.5
