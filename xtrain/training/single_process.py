"""The process of a run that has only one: the methods of `parallel.ranks.Ranks` without
communication."""

from collections.abc import Callable
from typing import Any


class SingleProcess:
    """Rank 0 of 1. `Ranks` overrides every method for several processes."""

    rank = 0
    world = 1
    local_world = 1

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Run work() on rank 0. -> its result on every rank; a UserError of rank 0 is raised on
        every rank."""
        return work()

    def rank_0_first(self, work: Callable[[], Any]) -> Any:
        """Run work() on rank 0, then on all other ranks, which find the results of rank 0 in a
        cache."""
        return work()

    def sum(self, values: list[float]) -> list[float]:
        """Sum of each value over all ranks, in float64 and in rank order: the same bits on every
        rank."""
        return values

    def any(self, flag: bool) -> bool:
        """Return True on every rank if the flag of any rank is true."""
        return flag

    def gather(self, thing: Any) -> list[Any]:
        """Return the `thing` of every rank (anything that can be pickled), in rank order, on every
        rank."""
        return [thing]


SINGLE_PROCESS = SingleProcess()
