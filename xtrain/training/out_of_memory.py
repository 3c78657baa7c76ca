"""When memory runs out: what was being allocated and where, what a step needs, and what would need less."""

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
from ..machine import free_memory
from . import memory_plan as memory

PARTS = 6  # of the plan that are shown


class OutOfMemory(UserError):
    """Of several lines: see `explain`."""


@contextlib.contextmanager
def explained(config: TrainConfig, shape: dict[str, Any], device: str) -> Iterator[None]:
    """Inside, running out of memory becomes OutOfMemory. shape: fields of ModelConfig, as far as they are known then."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        wish = describe_out_of_memory(error)
        error.with_traceback(None)  # its frames hold the arrays that fill the memory
        error = None
        gc.collect()
        raise OutOfMemory("\n".join([wish, *_advice(config, shape, device)])) from None


# ----------------------------------------------------------------------------- what to do
def _advice(config, shape, device) -> list[str]:
    try:
        model = read_config(Path(config.init)) if config.init else _model(config, shape)
        return explain(config, model, device)
    except (MemoryError, UserError, ValueError):
        return [
            "use a smaller --micro-batch, --seq-len or model; `python -m xtrain.profile --plan` shows what they need"
        ]


def _model(config, shape):
    return ModelConfig(**{"vocab_size": config.vocab_size, **shape})


def explain(config: TrainConfig, model: ModelConfig, device: str) -> list[str]:
    """The plan of a step as lines, and options with which it would need less. config: resolved."""
    c, room = config, _room(device)
    plan = _plan(model, c)
    at_least = "at least " if device == "cpu" else ""  # the references make arrays in between
    has = "" if room is None else f", there are {_gb(room)}"
    lines = [
        f"a step of {c.micro_batch} x {c.seq_len} tokens, {c.precision}, --recompute {c.recompute}, needs "
        f"{at_least}{_gb(_whole(plan, device))}{has}:"
    ]
    parts = sorted(plan.kinds.items(), key=lambda item: -item[1])
    lines += [f"    {kind:32} {_gb(size):>9}" for kind, size in parts[:PARTS]]
    if rest := plan.reserved - sum(size for _, size in parts[:PARTS]):
        lines.append(f"    {'the rest':32} {_gb(rest):>9}")
    lines.append("what needs less:")
    for option, changed, remark in _less(c, device):
        needed = _whole(_plan(model, changed), device)
        fits = "" if room is None else "fits" if needed <= room else "does not fit"
        lines.append(f"    {option:42} {_gb(needed):>9}  {', '.join(filter(None, (fits, remark)))}")
    return lines


def _less(c, device):
    """-> option, the config with it, what it costs"""
    parts = next((n for n in (2, 3, 4, 5, 7) if c.micro_batch % n == 0), c.micro_batch)
    half, one = c.micro_batch // parts, 1
    for B in dict.fromkeys((half, one)):
        if c.micro_batch > B:
            yield f"--micro-batch {B}", replace(c, micro_batch=B), "the same batch in more parts"
    kinds = ("none", "attention", "block")
    for kind in kinds[kinds.index(c.recompute) + 1 :]:
        yield f"--recompute {kind}", replace(c, recompute=kind), "slower, the same bits"
    if device == "gpu" and c.precision == "fp32":
        yield "--precision bf16", replace(c, precision="bf16"), "faster, less exact"
    least = replace(c, micro_batch=1, recompute="block")
    if least != c:
        yield "--micro-batch 1 --recompute block", least, ""


def _plan(model, c):
    accumulate = max(1, c.batch // c.micro_batch)
    return memory.plan(
        model, c.micro_batch, c.seq_len, c.precision, c.recompute, min(accumulate, 2)
    )


def _whole(plan, device):
    return plan.reserved + (memory.OUTSIDE if device == "gpu" else 0)


def _room(device):
    """Bytes that there are: of the GPU all, of the machine those that nobody else uses."""
    return cupy().cuda.runtime.memGetInfo()[1] if device == "gpu" else free_memory()


def _gb(n):
    return f"{n / 1e9:.2f} GB"
