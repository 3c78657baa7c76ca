"""The memory of a step on several GPUs, from the plan of one (memory_plan.py)."""

from ..config import ModelConfig
from ..nn.model import Transformer
from ..nn.sharded_arena import ShardedArena, Share
from .memory_plan import Plan, planning

MOMENTS = ("moments", "moving average")  # kinds of a plan, those that ZeRO-1 divides
# kinds of a plan that a sharded arena has in other sizes
ARENA = ("weights", "bf16 copy of the weights", "gradients")


def zero1(plan: Plan, ranks: int) -> float:
    """Return bytes reserved on each of `ranks` GPUs that divide moments, moving average and float32
    master weights among them (Rajbhandari et al. 2020, stage 1). In fp32 every rank keeps all
    weights, because the forward pass reads them.
    """
    divided = sum(plan.kinds[kind] for kind in divided_kinds(plan))
    return plan.reserved - divided * (1 - 1 / ranks)


def divided_kinds(plan: Plan) -> list[str]:
    """Return the kinds of a plan that ZeRO-1 divides among the ranks."""
    kinds = [kind for kind in MOMENTS if kind in plan.kinds]
    if "bf16 copy of the weights" in plan.kinds:
        kinds.append("weights")
    return kinds


def zero3(plan: Plan, config: ModelConfig, precision: str, ranks: int) -> float:
    """Return bytes reserved on each of `ranks` GPUs that divide weights and gradients of layers,
    too (stage 3)."""
    before = sum(plan.kinds.get(kind, 0) for kind in (*ARENA, *MOMENTS))
    return plan.reserved - before + sum(zero3_kinds(plan.kinds, config, precision, ranks).values())


def zero3_kinds(
    kinds: dict[str, int], config: ModelConfig, precision: str, ranks: int
) -> dict[str, int]:
    """Return the bytes of weights, gradients and moments on a rank with ZeRO-3, by kind.

    kinds: those of a plan for one GPU.
    """
    arena = sharded_arena(config, precision, ranks)
    buffers = list({id(unit.buffer): unit.buffer for unit in arena.units}.values())
    gathered = "bf16 copy of the weights" if precision == "bf16" else "gathered weights"
    bytes_of = {
        "weights": arena.master.nbytes,
        gathered: sum(buffer.weights.nbytes for buffer in buffers),
        "gradients": arena.summed.nbytes + sum(buffer.grads.nbytes for buffer in buffers),
        "moments": 2 * arena.master.nbytes,
    }
    if "moving average" in kinds:
        bytes_of["moving average"] = arena.master.nbytes
    return bytes_of


def sharded_arena(config: ModelConfig, precision: str, ranks: int) -> ShardedArena:
    """Return the arena of a rank with ZeRO-3, of arrays without memory."""
    with planning(config.padded_vocab_size):
        how: dict = dict(world=ranks, share=Share(0, ranks))
        arena = Transformer(
            config, None, "gpu", "bf16" if precision == "bf16" else "fp32", **how
        ).arena
    assert isinstance(arena, ShardedArena)
    return arena
