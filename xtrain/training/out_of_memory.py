"""Out of memory: what a step needs, and which options would need less. On a CPU the kernel ends a
process that uses more memory than there is, so a run that cannot fit is refused before its first
step; on a GPU the allocation fails, and the message also says where."""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..device import cupy
from ..errors import UserError, describe_out_of_memory, is_out_of_memory
from ..kernels.fp8 import TILE
from ..machine import free_memory
from ..nn.model import bf16_obstacle
from . import memory_plan
from .single_process import SINGLE_PROCESS, SingleProcess
from .zero_plan import ARENA, MOMENTS, divided_kinds, zero1, zero3, zero3_kinds

SHOWN_KINDS = 6  # lines of the plan in the message
MARGIN = 1.1  # a run is refused if it needs so much more than there is: plans are not exact
WORKSPACE = "workspace of cuBLAS"
# what stays from step to step
STATE = ("frozen weights", "weights", "gathered weights", "gradients", *MOMENTS)


class OutOfMemory(UserError):
    """A UserError whose message has several lines: see `explain`."""


@contextlib.contextmanager
def explained(
    config: Any, model: ModelConfig, device: str, ranks: SingleProcess = SINGLE_PROCESS
) -> Iterator[None]:
    """Turn an out-of-memory error inside into OutOfMemory. model: its shape, as far as it is
    known."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed_allocation = describe_out_of_memory(error)
        error.with_traceback(None)  # its frames hold the arrays that fill the memory
        del error
        gc.collect()
        try:
            advice = explain(config, model, device, ranks)
        except (MemoryError, ValueError):
            advice = [
                "use a smaller --micro-batch, --seq-len or model; `python -m xtrain.profile "
                "--plan` shows what they need"
            ]
        raise OutOfMemory("\n".join([failed_allocation, *advice])) from None


def check_fits(
    config: Any, model: ModelConfig, device: str, ranks: SingleProcess = SINGLE_PROCESS
) -> None:
    """Raise OutOfMemory, on every rank, if a run on the CPU needs clearly more memory than a rank
    can get."""
    if device != "cpu":
        return
    refusal = None
    available = _available_bytes(device, ranks)
    # A launcher rejects an array: it will say so. Or a function that replaces one of xtrain's reads
    # values, which the arrays of a plan do not have.
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        least = needed(config, model, device, ranks).nbytes
        if available is not None and least > MARGIN * available:
            refusal = "\n".join(explain(config, model, device, ranks))
    for text in ranks.gather(refusal):
        if text is not None:
            raise OutOfMemory(text)


# ----------------------------------------------------------------------------- what a run needs
@dataclass(frozen=True)
class Needed:
    """Bytes of a rank. kinds: of which kind they are, without holes in a memory pool."""

    nbytes: int
    kinds: dict[str, int]


def needed(
    config: Any,
    model: ModelConfig,
    device: str,
    ranks: SingleProcess = SINGLE_PROCESS,
    steps: int = 1,
) -> Needed:
    """Return what a rank needs for a step, on a CPU at least: references allocate temporaries.

    config: resolved. steps: that are planned. Raises ValueError if a launcher rejects an array as
    too large.
    """
    c = config
    recompute = c.recompute
    # FlashAttention stores no probabilities, whatever backward recomputes
    if recompute == "none" and (getattr(c, "pack", False) or getattr(c, "exact", False)):
        recompute = "attention"
    accumulate = min(max(1, c.batch // ranks.world // c.micro_batch), 2)
    sequences = c.micro_batch * c.row_texts
    shape = sequences, c.seq_len, c.precision, recompute, accumulate
    options = getattr(c, "lora", 0), c.optimizer, c.ema, c.fp8_head, steps
    weights = getattr(c, "weights", "full")
    plan = memory_plan.plan(model, *shape, *options, weights)
    if device == "gpu":
        return _on_gpu(c, model, plan, ranks)
    return _on_cpu(c, model, plan.kinds, ranks)


def _on_gpu(c: Any, model: ModelConfig, plan: Any, ranks: SingleProcess) -> Needed:
    """Return what the plan for one GPU reserves, divided among the ranks as --zero says."""
    reserved: float = plan.reserved
    kinds = dict(plan.kinds)
    if ranks.world > 1 and c.sharded and c.zero_stage == 3:
        reserved = zero3(plan, model, c.precision, ranks.world)
        for name in ARENA:
            kinds.pop(name, None)
        kinds |= zero3_kinds(plan.kinds, model, c.precision, ranks.world)
    elif ranks.world > 1 and c.sharded:
        reserved = zero1(plan, ranks.world)
        for name in divided_kinds(plan):
            kinds[name] //= ranks.world
    return Needed(int(reserved + memory_plan.OUTSIDE), kinds)


def _on_cpu(c: Any, model: ModelConfig, planned: dict[str, int], ranks: SingleProcess) -> Needed:
    """Return the most that is in use at one time: in the passes of a step, in its update, or while
    a checkpoint is copied."""
    in_passes = {name: n for name, n in planned.items() if name != WORKSPACE}
    in_passes["ids and targets"] = 2 * 4 * c.batch // ranks.world * c.seq_len
    shards = 1
    if ranks.world > 1 and c.sharded:
        shards = ranks.world
    if shards > 1 and c.zero_stage == 3:
        in_passes |= zero3_kinds(planned, model, c.precision, shards)
    else:
        for name in MOMENTS:
            if name in in_passes:
                in_passes[name] //= shards
    state = {name: in_passes[name] for name in STATE if name in in_passes}
    copies = {}
    if ranks.world == ranks.local_world:  # else the memory of rank 0's machine is not known here
        saved = sum(planned.get(name, 0) for name in ("weights", *MOMENTS))
        copies = {"copies for a checkpoint": saved // ranks.world}  # rank 0 makes all of them
    kept = {}
    # a checkpoint is written during the next steps
    if 0 < c.save_every < min(c.steps, c.stop_at or c.steps):
        kept = copies
    at_one_time = [in_passes | kept, state | copies]
    if c.optimizer == "adamw" and shards == 1:  # a shard of a slice is small
        temporaries = 3 * state["moments"] // 2
        at_one_time.append(state | kept | {"temporaries of AdamW": temporaries})
    most = max(at_one_time, key=lambda kinds: sum(kinds.values()))
    return Needed(sum(most.values()), most)


# ----------------------------------------------------------------------------- advice
def explain(
    config: Any, model: ModelConfig, device: str, ranks: SingleProcess = SINGLE_PROCESS
) -> list[str]:
    """Return lines: the memory plan of a step, and options that would need less. config: resolved.
    device: "cpu" or "gpu"."""
    c = config
    available = _available_bytes(device, ranks)
    whole = needed(c, model, device, ranks, memory_plan.STEPS)
    at_least = ""
    if device == "cpu":
        at_least = "at least "
    has = ""
    if available is not None:
        has = f", {_gb(available)} are available"
    if ranks.local_world > 1 and device == "cpu":
        has += f" to each of {ranks.local_world} ranks"
    lines = [
        f"a run with steps of {c.micro_batch} x {c.seq_len} tokens, {c.precision}, --recompute "
        f"{c.recompute}, needs {at_least}{_gb(whole.nbytes)}{has}:"
    ]
    kinds = sorted(whole.kinds.items(), key=lambda item: -item[1])
    lines += [f"    {kind:32} {_gb(size):>9}" for kind, size in kinds[:SHOWN_KINDS]]
    if others := whole.nbytes - sum(size for _, size in kinds[:SHOWN_KINDS]):
        lines.append(f"    {'the rest':32} {_gb(others):>9}")
    less = []
    one_fits = False
    for option, changed, remark in _less(c, model, device, ranks):
        least = needed(changed, model, device, ranks).nbytes
        if least >= whole.nbytes:
            continue
        fits = ""
        if available is not None:
            fits = "fits" if least <= available else "does not fit"
        one_fits |= fits != "does not fit"
        row = f"    {option:42} {_gb(least):>9}  {', '.join(filter(None, (fits, remark)))}"
        less.append(row.rstrip())
    if less:
        lines += ["options that need less:", *less]
    if not one_fits:
        lines.append("use a smaller --batch, --seq-len or model")
    return lines


def _less(c, model, device, ranks):
    """Yield (option, the config with it, its cost)."""
    small = [n for n in range(1, math.isqrt(c.micro_batch) + 1) if c.micro_batch % n == 0]
    rows = sorted({*small, *(c.micro_batch // n for n in small)})
    if c.precision == "fp8":
        rows = [n for n in rows if n * c.seq_len % TILE == 0]
    least = rows[0]
    for B in dict.fromkeys((rows[-2:][0], least)):
        if c.micro_batch > B:
            yield (
                f"--micro-batch {B}",
                replace(c, micro_batch=B),
                "the same batch in more micro-batches",
            )
    kinds = ("none", "attention", "block")
    for kind in kinds[kinds.index(c.recompute) + 1 :]:
        yield f"--recompute {kind}", replace(c, recompute=kind), "slower, the same bits"
    if c.precision == "fp32" and not bf16_obstacle(device, model.head_dim):
        yield "--precision bf16", replace(c, precision="bf16"), "faster, less accurate"
    if getattr(c, "lora", 0) and c.weights == "full":
        yield "--weights nf4", replace(c, weights="nf4"), "the frozen model in four bits"
    if c.precision == "fp8":
        half = replace(c, precision="bf16", fp8_head=False)
        yield "--precision bf16", half, "no products on fp8 codes"
    if ranks.world > 1 and c.zero_stage < 3:
        with contextlib.suppress(UserError):  # not every option and command supports it
            divided = replace(c, zero=3)
            divided.validate()
            yield "--zero 3", divided, "slower, one more gather of the weights"
    smallest = replace(c, micro_batch=least, recompute="block")
    if smallest != c:
        yield f"--micro-batch {least} --recompute block", smallest, ""


def _available_bytes(device, ranks):
    """Return all memory of the GPU, or this rank's share of the free memory of the machine; None if
    unknown."""
    if device == "gpu":
        return cupy().cuda.runtime.memGetInfo()[1]
    free = free_memory()
    if free is None:
        return None
    return free // ranks.local_world


def _gb(n):
    return f"{n / 1e9:.2f} GB"
