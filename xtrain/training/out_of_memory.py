"""Out of memory: the allocation that failed and where, what a step needs, and which options would
need less."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import ModelConfig, TrainConfig
from ..device import cupy
from ..errors import UserError, describe_out_of_memory, is_out_of_memory
from ..formats.huggingface import read_config
from ..kernels.fp8 import TILE
from ..machine import free_memory
from ..nn.model import bf16_obstacle
from . import memory_plan

SHOWN_KINDS = 6  # lines of the plan in the message


class OutOfMemory(UserError):
    """A UserError whose message has several lines: see `explain`."""


@contextlib.contextmanager
def explained(config: TrainConfig, shape: dict[str, Any], device: str) -> Iterator[None]:
    """Turn an out-of-memory error inside into OutOfMemory. shape: the fields of ModelConfig known
    by then."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed_allocation = describe_out_of_memory(error)
        error.with_traceback(None)  # its frames hold the arrays that fill the memory
        del error
        gc.collect()
        advice = _advice(config, shape, device)
        raise OutOfMemory("\n".join([failed_allocation, *advice])) from None


# ----------------------------------------------------------------------------- advice
def _advice(config, shape, device) -> list[str]:
    try:
        if config.init:
            model = read_config(Path(config.init))
        else:
            model = _model(config, shape)
        return explain(config, model, device)
    except (MemoryError, UserError, ValueError):
        return [
            "use a smaller --micro-batch, --seq-len or model; `python -m xtrain.profile --plan` "
            "shows what they need"
        ]


def _model(config, shape):
    return ModelConfig(**{"vocab_size": config.vocab_size, **shape})


def explain(config: TrainConfig, model: ModelConfig, device: str) -> list[str]:
    """Return lines: the memory plan of a step, and options that would need less. config: resolved.
    device: "cpu" or "gpu"."""
    c = config
    available = _available_bytes(device)
    plan = _plan(model, c)
    # the NumPy references allocate temporaries
    at_least = ""
    if device == "cpu":
        at_least = "at least "
    has = ""
    if available is not None:
        has = f", {_gb(available)} are available"
    lines = [
        f"a step of {c.micro_batch} x {c.seq_len} tokens, {c.precision}, --recompute "
        f"{c.recompute}, needs "
        f"{at_least}{_gb(_whole(plan, device))}{has}:"
    ]
    kinds = sorted(plan.kinds.items(), key=lambda item: -item[1])
    lines += [f"    {kind:32} {_gb(size):>9}" for kind, size in kinds[:SHOWN_KINDS]]
    if rest := plan.reserved - sum(size for _, size in kinds[:SHOWN_KINDS]):
        lines.append(f"    {'the rest':32} {_gb(rest):>9}")
    lines.append("options that need less:")
    for option, changed, remark in _less(c, model, device):
        needed = _whole(_plan(model, changed), device)
        if needed > _whole(plan, device):
            continue
        if available is None:
            fits = ""
        elif needed <= available:
            fits = "fits"
        else:
            fits = "does not fit"
        lines.append(f"    {option:42} {_gb(needed):>9}  {', '.join(filter(None, (fits, remark)))}")
    return lines


def _less(c, model, device):
    """Yield (option, the config with it, its cost)."""
    rows = [n for n in range(1, c.micro_batch + 1) if c.micro_batch % n == 0]
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
    if c.precision == "fp8":
        half = replace(c, precision="bf16", fp8_head=False)
        yield "--precision bf16", half, "no products on fp8 codes"
    smallest = replace(c, micro_batch=least, recompute="block")
    if smallest != c:
        yield f"--micro-batch {least} --recompute block", smallest, ""


def _plan(model, c):
    accumulate = max(1, c.batch // c.micro_batch)
    shape = c.micro_batch, c.seq_len, c.precision, c.recompute, min(accumulate, 2)
    return memory_plan.plan(model, *shape, getattr(c, "lora", 0), c.optimizer, c.ema, c.fp8_head)


def _whole(plan, device):
    return plan.reserved + (memory_plan.OUTSIDE if device == "gpu" else 0)


def _available_bytes(device):
    """Return all memory of the GPU, or the free memory of the machine; None if unknown."""
    if device == "gpu":
        return cupy().cuda.runtime.memGetInfo()[1]
    return free_memory()


def _gb(n):
    return f"{n / 1e9:.2f} GB"
