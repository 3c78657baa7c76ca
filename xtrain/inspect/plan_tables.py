"""The memory plan of a training step as tables: one step, what fits on a GPU, several GPUs."""

import functools
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import ModelConfig
from ..device import cupy, gpu_available
from ..errors import UserError
from ..kernels.fp8 import TILE
from ..training import memory_plan as memory
from ..training.model_summary import describe
from ..training.zero_plan import zero1, zero3


def show_plan(o: Any, config: ModelConfig, batch: int, T: int, console: Console) -> None:
    """Print the plan of a step, the largest batches that fit, and the plan for several GPUs.

    o: profile.Options
    """
    gpus = _whole_numbers(o.gpus)
    gpu_gb = o.gpu_gb or (_card_gb() if gpu_available() else 80.0)
    options: dict[str, Any] = dict(lora=o.lora, fp8_head=o.fp8_head, weights=o.weights)
    plan = memory.plan(config, batch, T, o.precision, o.recompute, **options)
    parameters = memory.parameters(config)
    say(console, f"[bold]Memory plan[/]: {describe(config)}, {parameters:,} parameters")
    if o.lora:
        lora = f", LoRA of rank {o.lora} on frozen weights"
        if o.weights != "full":
            lora += f" in {o.weights}"
    else:
        lora = ""
    sequences = f"{batch} sequences of {T} tokens at once"
    say(console, f"{o.precision}, recompute {o.recompute}, {sequences}{lora}")
    console.print(_plan_table(plan))
    say(
        console,
        f"The peak is in: {plan.op}. Outside the pool, the CUDA context and the kernels take "
        f"{memory.OUTSIDE / 1e9:.1f} GB.",
    )
    precisions = ["fp32", "bf16"]
    if o.precision == "fp8":
        precisions.append("fp8")
    console.print(_fit_table(config, batch, T, gpu_gb, options, precisions))
    precision = "" if o.lora or o.precision == "fp8" else o.precision
    console.print(_gpus_table(gpus, plan, gpu_gb, config, precision))
    say(
        console,
        "This is a plan, computed from the arrays that the code allocates. With several GPUs, each "
        "has the batch above. ZeRO-1\n"
        "divides moments and float32 master weights among the ranks, ZeRO-3 also weights and "
        "gradients of the layers. NCCL's\nbuffers are not counted.",
    )


def _plan_table(plan: memory.Plan) -> Table:
    table = new_table("one step", "what", "when backward begins, GB", "at the peak, GB")
    for kind in dict.fromkeys([*plan.kinds, *plan.kept]):
        sizes = (plan.kept.get(kind, 0), plan.kinds.get(kind, 0))
        if max(sizes) >= 2e-4 * plan.peak:
            table.add_row(kind, *(f"{n / 1e9:.3f}" for n in sizes))
    table.add_row("holes in the memory pool", "", f"{(plan.reserved - plan.peak) / 1e9:.3f}")
    table.add_row(
        "[bold]all[/]", f"{sum(plan.kept.values()) / 1e9:.3f}", f"{plan.reserved / 1e9:.3f}"
    )
    return table


def _fit_table(
    config: ModelConfig,
    batch: int,
    T: int,
    gpu_gb: float,
    options: dict[str, Any],
    precisions: list[str],
) -> Table:
    columns = ("precision", "recompute", f"GB at batch {batch}", "largest batch")
    table = new_table(f"what fits on a GPU of {gpu_gb:.0f} GB", *columns)
    for precision in precisions:
        # in fp8 a forward pass has a multiple of TILE tokens
        unit = 1
        if precision == "fp8":
            unit = TILE // math.gcd(T, TILE)
        options = options | {"fp8_head": options["fp8_head"] and precision == "fp8"}
        for recompute in ("none", "attention", "block"):
            shape = config, T, precision, recompute, options
            largest = unit * memory.largest(functools.partial(_fits, shape, gpu_gb, unit))
            row = precision, recompute, f"{_gb(shape, batch):.2f}", str(largest or "none")
            table.add_row(*row)
    return table


def _fits(shape, gpu_gb, unit, batches):
    return _gb(shape, unit * batches) <= gpu_gb


def _gb(shape, batch):
    """Return the GB that a step needs, infinite if a launcher rejects its arrays as too large.

    shape: config, T, precision, recompute, options
    """
    config, T, precision, recompute, options = shape
    try:
        plan = memory.plan(config, batch, T, precision, recompute, **options)
    except ValueError:  # a launcher rejects so large an array
        return math.inf
    return (plan.reserved + memory.OUTSIDE) / 1e9


def _gpus_table(
    gpus: list[int], plan: memory.Plan, gpu_gb: float, config: ModelConfig, precision: str
) -> Table:
    """Return the table of several GPUs. precision: "" if ZeRO-3 is not supported."""
    kinds = ["as now", "ZeRO-1"]
    if precision:
        kinds.append("ZeRO-3")
    table = new_table(
        "data parallel", "GPUs", *(x for kind in kinds for x in (f"{kind}, GB", "fits"))
    )
    for n in gpus:
        sizes: list[float] = [plan.reserved, zero1(plan, n)]
        if precision:
            sizes.append(zero3(plan, config, precision, n) if n > 1 else plan.reserved)
        cells = []
        for size in sizes:
            size += memory.OUTSIDE
            cells += [f"{size / 1e9:.2f}", "yes" if size <= gpu_gb * 1e9 else "no"]
        table.add_row(str(n), *cells)
    return table


def _whole_numbers(text: str) -> list[int]:
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(
            f"--gpus takes whole numbers separated by commas, such as 1,4,8, not {text!r}"
        )
    return numbers


def _card_gb() -> float:
    return cupy().cuda.runtime.memGetInfo()[1] / 1e9


def new_table(title: str, *columns: str) -> Table:
    """Return a table without rows: the first column, of names that are never divided, aligned
    left, the others right."""
    table = Table(title=title, title_justify="left")
    first, *others = columns
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table


def say(console: Console, text: str) -> None:
    """Print a line as it is: neither highlighted nor wrapped."""
    console.print(text, highlight=False, soft_wrap=True)
