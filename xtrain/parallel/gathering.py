"""ZeRO-3: a layer's weights are gathered before it computes, its gradients are summed after it.

    forward     layer i     computes while layer i + 1 is gathered
    backward    layer i     computes while layer i - 1 is gathered, and while the gradients of layer
                            i + 1 are summed over the ranks, each rank its share

The last two layers of a forward are still there when backward begins, and the first two of a
backward when the next micro-batch does. What lies outside the layers is whole on every rank, as
with ZeRO-1: it is gathered after an update, and its gradients are summed at the end of a step.
Traffic with one micro-batch: that of ZeRO-1 and one more gather of the weights, for backward.

With several micro-batches the gradients of a layer are summed over the ranks after each, and the
sums of the micro-batches are added by their owner. ZeRO-1 adds the micro-batches first: the last
bits differ.
"""

from collections.abc import Callable
from typing import Any

from ..errors import UserError
from ..nn.autograd import Function, Tensor
from ..nn.mode import current_mode
from ..nn.model import Transformer
from ..nn.sharded_arena import BUFFERS, Buffer, ShardedArena, Unit
from ..nn.tensor import as_tuple


class Gathering:
    """Gathers weights and sums gradients of the layers of one model, in the order of computation.

    arena: its ShardedArena.
    gathers: marks of the gathers in flight.
    sums: of each buffer, the mark of the last sum of its gradients, if nothing has waited for it.
    report_progress: is called before each layer: a sample gathers all of them for each token.
    """

    def __init__(
        self,
        model: Transformer,
        collectives: Any,
        report_progress: Callable[[], None] = lambda: None,
    ):
        arena = model.arena
        assert isinstance(arena, ShardedArena)
        self.arena = arena
        self.collectives = collectives
        self.report_progress = report_progress
        self.layers = arena.layers
        if len(self.layers) != len(model.model.layers):  # they are gathered by their numbers
            raise UserError(
                "with --zero 3 every layer needs matrices that no other layer has: use --zero 1"
            )
        self.gathers: dict[Unit, Any] = {}
        self.sums: dict[int, Any] = {}
        self.old_marks: list[Any] = []
        self.buffers: list[Buffer] = list({id(u.buffer): u.buffer for u in arena.units}.values())
        for buffer in self.buffers:
            collectives.register(buffer.weights)
            collectives.register(buffer.grads)
        arena.refresh_whole = self.gather_whole
        model.model.around_layer = self.around_layer

    # ------------------------------------------------------------------------- weights
    def forget(self) -> None:
        """The weights are going to change: no buffer holds those of a layer any more."""
        for unit in self.layers:
            unit.buffer.holds = None
        self.old_marks += [*self.gathers.values(), *self.sums.values()]
        self.gathers.clear()
        self.sums.clear()

    def gather_whole(self) -> None:
        """Gather what lies outside the layers."""
        for unit in self.arena.whole:
            self.start(unit)
        self.collectives.join()

    def start(self, unit: Unit) -> None:
        """Start gathering a unit in its buffer, unless it is there."""
        if unit.buffer.holds is unit:
            return
        self.collectives.gather_shares(unit.weights, unit.master)
        unit.buffer.holds = unit
        if unit.is_layer:
            self.gathers[unit] = self.mark()

    def mark(self) -> Any:
        """Mark what was started so far."""
        return self.collectives.mark(self.old_marks.pop() if self.old_marks else None)

    def need(self, i: int) -> None:
        """Make what follows wait for the weights of layer i."""
        self.report_progress()
        unit = self.layers[i]
        self.start(unit)
        if unit in self.gathers:
            self.wait(self.gathers.pop(unit))

    def wait(self, mark: Any) -> None:
        """Wait for a mark, which is then free."""
        self.collectives.wait(mark)
        self.old_marks.append(mark)

    # ------------------------------------------------------------------------- around a layer
    def around_layer(
        self, i: int, compute: Callable[..., tuple[Tensor, ...]], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        """Return compute(*parts), the forward of layer i, which has its weights then and in its
        backward."""
        self.need(i)
        if i + 1 < len(self.layers):
            self.start(self.layers[i + 1])
        if not any(x.requires_grad for x in parts):
            self.check_untrained(i)
            return compute(*parts)
        parts = as_tuple(Begin.apply(self, i, *parts))
        return as_tuple(End.apply(self, i, *compute(*parts)))

    def check_untrained(self, i: int) -> None:
        """Raise UserError if layer i has gradients, of which its input would not tell backward."""
        if current_mode().on and any(p.requires_grad for p in self.layers[i].parameters):
            raise UserError(
                f"with --zero 3 a frozen embedding is not supported, because layer {i} is trained: "
                "leave its requires_grad True, or use --zero 1"
            )

    def begin_backward(self, i: int) -> None:
        """Prepare for the backward of layer i."""
        self.need(i)
        unit = self.layers[i]
        buffer = id(unit.buffer)
        if buffer in self.sums:
            self.wait(self.sums.pop(buffer))
        unit.begin_gradients()
        self.collectives.progress()

    def end_backward(self, i: int) -> None:
        """After the backward of layer i: gather the layer that takes its place, sum its
        gradients."""
        if i >= BUFFERS:
            self.start(self.layers[i - BUFFERS])
        unit = self.layers[i]
        unit.zero_unwritten_grads()
        self.collectives.sum_share(unit.grads, unit.summed, unit.has_sum)
        unit.has_sum = True
        self.sums[id(unit.buffer)] = self.mark()

    def end_step(self) -> None:
        """After the last backward of a step: all sums are complete after it."""
        self.arena.zero_unwritten_grads()
        for unit in self.arena.whole:
            self.collectives.sum_share(unit.grads, unit.summed, False)
        for unit in self.layers:
            if not unit.has_sum:  # backward did not reach it, on any rank
                unit.summed.fill(0)
        self.collectives.join()


class Begin(Function):
    """x -> x, before a layer. Its backward is the last of the layer."""

    @staticmethod
    def forward(ctx, gathering, i, *parts):
        ctx.save(gathering, i)
        return parts

    @staticmethod
    def backward(ctx, *gradients):
        gathering, i = ctx.saved
        gathering.end_backward(i)
        return None, None, *gradients


class End(Begin):
    """x -> x, behind a layer. Its backward is the first of the layer."""

    @staticmethod
    def backward(ctx, *gradients):
        gathering, i = ctx.saved
        gathering.begin_backward(i)
        return None, None, *gradients


class Gathered:
    """The stage of ZeRO-3, as those of ddp.py: gradients are summed around each layer."""

    def __init__(self, gathering: Gathering):
        self.gathering = gathering

    def backward(self, loss: Tensor, last: bool) -> None:
        """Run backward of one micro-batch. After the last one, this rank has the sums of its
        share."""
        loss.backward()
        if last:
            self.gathering.end_step()
