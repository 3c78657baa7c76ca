"""The optimizer of ZeRO-3: AdamW on this rank's share of every unit (nn/sharded_arena.py).

It reads and writes the master weights only. What lies outside the layers is sent to all ranks after
its update, a layer when it is needed (gathering.py).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..device import Array, free_cached
from ..nn.model import Transformer
from ..nn.sharded_arena import ShardedArena, Unit
from .gathering import Gathering
from .zero import ShardedAdamW


class Zero3AdamW(ShardedAdamW):
    """AdamW on the master weights of this rank's share.

    gathering: of the model's layers.
    guarded, options: as of ShardedAdamW.
    """

    arena: ShardedArena

    def __init__(
        self,
        model: Transformer,
        collectives: Any,
        gathering: Gathering,
        guarded: bool = False,
        **options: Any,
    ):
        self.gathering = gathering
        units = gathering.arena.units
        slices = [(unit.start, unit.end) for unit in units]
        super().__init__(model, collectives, slices, guarded, **options)

    def release(self) -> None:
        """Forget gathered layers: their weights may have been assigned."""
        self.master = self.arena.master
        self.gathering.forget()
        free_cached(self.arena.kind[0])  # what assigning them has used

    def restore(self) -> None:
        """Do nothing: a checkpoint is gathered in host memory (gather_moments)."""

    def owned_weights(self) -> tuple[Array, bool]:
        """As AdamW.owned_weights."""
        return self.arena.master, True

    def gradients(self, start: int, end: int, first: int) -> Array:
        """As AdamW.gradients."""
        unit = self._unit(first)
        at = start - unit.own_start
        return unit.summed[at : at + end - start]

    def _unit(self, first: int) -> Unit:
        """Return the unit of which `first` is an index in the moments."""
        units = self.gathering.arena.units
        return next(unit for unit in reversed(units) if unit.first <= first)

    def advance(self) -> Any:
        """As AdamW.advance. The captured step of a CUDA graph changes weights without this class
        noticing it, and waits for no collective that was started before it."""
        hyper = super().advance()
        self.collectives.join()
        self.gathering.forget()
        return hyper

    def update_owned(self, hyper_3: Array, factor_1: Array) -> None:
        """Update this rank's share of each unit; gather again what is always whole."""
        self.gathering.forget()
        excluded = self.excluded()
        for unit in self.gathering.arena.units:
            span = unit.own_start, unit.own_end, unit.first
            self.update_trained(*span, hyper_3, factor_1, excluded)
            if not unit.is_layer:
                self.collectives.gather_shares(unit.weights, unit.master)

    def in_use(self) -> list[Array]:
        """Return the weights that every rank must hold identically."""
        self.arena.refresh()
        return [unit.weights for unit in self.gathering.arena.whole]

    def gather_moments(self, report_progress: Callable[[], None]) -> SimpleNamespace:
        """As ShardedAdamW.gather_moments, with the weights."""
        whole = super().gather_moments(report_progress)
        whole.weights = self._gathered(self.arena.master, report_progress)
        return whole
