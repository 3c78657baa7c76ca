"""The one process of xtrain.train, with the methods that several ranks have (parallel/ranks.py)."""

from collections.abc import Callable
from typing import Any


class Alone:
    """One process that trains by itself."""

    rank, world = 0, 1

    def first(self, work: Callable[[], Any]) -> Any:
        """work() is done by rank 0; every rank gets its result, or its UserError."""
        return work()

    def in_turn(self, work: Callable[[], Any]) -> Any:
        """work() is done by rank 0, then by all others: they find what it has left in a cache."""
        return work()

    def total(self, values: list[float]) -> list[float]:
        """Sum of each value over all ranks, in float64 and in the order of the ranks: the same bits on all."""
        return values

    def any(self, flag: bool) -> bool:
        """Does any rank say yes?"""
        return flag

    def everybody(self, thing: Any) -> list[Any]:
        """What each rank gives (anything picklable), in the order of the ranks, on every rank."""
        return [thing]


ALONE = Alone()
