"""The time and memory of a training step: its parts, and its kernels next to the GPU's limits."""

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import blas
from ..config import PRESETS, ModelConfig, Preset, ShapeOptions, TrainConfig, resolve
from ..data.batches import Loader
from ..data.shards import write_shard
from ..device import (
    device_name,
    gpu_available,
    memory_peak_bytes,
    resolve_device,
    synchronize,
)
from ..errors import UserError
from ..nn.cuda_graph import Graphed
from ..nn.model import Transformer, choose_precision
from ..nn.observers import Op, OpObserver, observe_ops
from ..report import page as report
from ..report.profiled import RecordingConsole, shape_of, with_options_of
from ..training import memory_plan as memory
from ..training.model_summary import describe
from ..training.out_of_memory import OutOfMemory, check_fits
from ..training.phase_timer import CAPTURED_PHASES, EAGER_PHASES, NoPhaseTimer
from ..training.run import Run
from . import kernel_times
from .kernel_times import Recorder
from .plan_tables import new_table, say, show_plan

LARGE = {  # shapes for --plan only: larger than one GPU trains in an hour
    "1b": Preset(
        dict(dim=2048, n_layers=18, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=5632),
        dict(PRESETS["gpt124m"].train, batch=8, seq_len=2048, vocab_size=50257),
    ),
    "7b": Preset(
        dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336),
        dict(PRESETS["gpt124m"].train, batch=1, seq_len=4096, vocab_size=50257),
    ),
}
PICTURES = (".png", ".svg", ".pdf")
LESS_MEMORY = "use a smaller --batch, --seq-len or model, or see what fits with --plan"


@dataclass(frozen=True)
class Options(ShapeOptions):
    """What to profile. The model is a preset; the shape options override it. With --plan, presets
    1b and 7b exist, too."""

    plan: bool = False  # only print the memory that a step needs
    run: Path | None = None  # profile the model of this run (runs/NAME), with its options
    vocab_size: int | None = None  # tokens; none: the preset's
    # sequences in one forward pass, on each GPU; none: the preset's
    batch: int | None = None
    seq_len: int | None = None  # tokens per sequence; none: the preset's
    # of activations and matrix products; auto: as in xtrain.train, with --plan as on a GPU that
    # supports bf16
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    fp8_head: bool = False  # with --precision fp8: the products of the head in fp8, too
    # on a CPU, threads of a matrix product; none: measured at the start
    blas_threads: int | None = None
    recompute: Literal["none", "attention", "block"] = "none"  # what backward recomputes
    # MODULE:FUNCTION that gets the model and returns it changed; with --run the run's
    change: str | None = None
    # --plan: rank of LoRA adapters on all matrices of a frozen model; 0: all weights are trained
    lora: int = 0
    # --plan --lora: how the frozen model is stored, as in xtrain.finetune
    weights: Literal["full", "int8", "fp8", "int4", "nf4"] = "full"
    gpus: str = "1,4,8"  # --plan: numbers of GPUs, separated by commas
    # --plan: memory of a GPU, 10^9 bytes; none: this machine's card, else 80
    gpu_gb: float | None = None
    steps: int = 20  # steps that are timed
    graph: bool = True  # time the step as one CUDA graph
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    trace: str | None = None  # write the kernels of the timed steps here, for ui.perfetto.dev
    picture: str | None = None  # write a chart of the memory over a step here (.png)


class PlanConfig(TrainConfig):
    """The options of a run, with the presets of a plan."""

    def presets(self) -> dict[str, Preset]:
        """Return those of training, and LARGE."""
        return PRESETS | LARGE


def model_config(o: Options) -> tuple[ModelConfig, int, int]:
    """Return the model's shape, sequences in a batch and tokens per sequence: those of a run with
    these options. Raises UserError."""
    if o.run is not None:
        return shape_of(o.run)
    if o.gpu_gb is not None and not 0 < o.gpu_gb < math.inf:
        raise UserError(f"--gpu-gb must be positive, got {o.gpu_gb}")
    if o.lora < 0:
        raise UserError(f"--lora must be a positive rank, or 0 for none, got {o.lora}")
    if o.weights != "full" and not o.lora:
        raise UserError(f"--weights {o.weights} needs --lora: give a rank")
    names = [*(f.name for f in fields(ShapeOptions)), "vocab_size", "batch", "seq_len"]
    kind = PlanConfig if o.plan else TrainConfig
    gpu = o.plan or (o.device != "cpu" and gpu_available())
    c, shape = resolve(kind(**{name: getattr(o, name) for name in names}), gpu)
    return ModelConfig(vocab_size=c.vocab_size, **shape), o.batch or c.micro_batch, c.seq_len


# ----------------------------------------------------------------------------- measuring
@contextlib.contextmanager
def a_run(o: Options) -> Any:
    """Return a Run over random tokens, with the loader, model, optimizer and step of training."""
    config, batch, T = model_config(o)
    device = resolve_device(o.device)
    c, _ = resolve(
        TrainConfig(
            preset="tiny",
            batch=batch,
            seq_len=T,
            precision=o.precision,
            recompute=o.recompute,
            graph=o.graph,
            steps=1000,
            save_every=1000,  # a profile writes no checkpoint
            device=o.device,
            fp8_head=o.fp8_head,
        ),
        device == "gpu",
    )
    if not o.change:
        try:
            check_fits(c, config, device)
        except OutOfMemory as error:
            needs = str(error).split(":\n")[0]
            raise UserError(f"{needs}: {LESS_MEMORY}") from None
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "tokens.bin"
        draws = np.random.default_rng(0).random(max(64 * T, batch * T) + T + 1) ** 4
        write_shard(shard, (config.vocab_size * draws).astype(np.int64), config.vocab_size)
        loader = lambda B, T, seed, rank=0, world=1: Loader([shard], B, T, seed, rank, world)
        model = Transformer(config, 0, device, c.precision, o.recompute)
        if o.change:
            model = model.changed(o.change)
        if c.fp8_head:
            model.use_fp8_head()
        corpus: Any = SimpleNamespace(loader=loader)
        yield Run(c, model, corpus)


class _SynchronizedTimer(NoPhaseTimer):
    """The phases of steps, each measured from an idle device to an idle device. ms: of each step so
    far.

    phases: those that are measured. Inside a step that is being captured nothing may wait for the
    GPU.
    """

    def __init__(self, device: str, phases: tuple[str, ...]):
        self.device, self.phases = device, phases
        self.phase = ""
        self.start = 0.0
        self.ms: dict[str, list[float]] = {phase: [] for phase in phases}

    def begin(self, phase: str) -> None:
        if phase in self.phases:
            self.end()
            self.phase = phase
            self.start = time.perf_counter()

    def end(self) -> None:
        synchronize(self.device)
        if self.phase:
            self.ms[self.phase].append(1e3 * (time.perf_counter() - self.start))
        self.phase = ""


def parts(run: Run, steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a step, and of the whole step.

    Each is synchronized before and after.

    The parts of a step that is a CUDA graph are graphs of their own; backward is then (forward +
    backward) minus forward.
    """
    device = run.model.device
    graph = run.model.device == "gpu" and run.config.graph
    for _ in range(3):  # a warm-up
        run.step()
    timer = _SynchronizedTimer(device, CAPTURED_PHASES if graph else EAGER_PHASES)
    run.phase_timer = timer
    whole = _wall(run.step, device, steps)
    median = {phase: float(np.median(times)) for phase, times in timer.ms.items()}
    run.phase_timer = NoPhaseTimer()
    names = {"optimizer": "clip + AdamW"}
    if graph:
        median = {"data": median["data"], **_graph_parts(run, steps)}
    return {**{names.get(phase, phase): t for phase, t in median.items()}, "whole step": whole}


def _graph_parts(run: Run, steps: int) -> dict[str, float]:
    model = run.model
    hyper = run.optimizer.advance()
    ids, targets, _ = run.next_batch()

    def forward(ids, targets):
        return (model.loss(ids, targets).data.reshape(1),)

    def both(ids, targets):
        model.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        return (loss.data.reshape(1),)

    def optimizer(hyper):
        norm, factor = run.parallel.clip(run.optimizer, run.config.clip)
        run.optimizer.apply(hyper, factor)
        return (norm,)

    def measured(f, *inputs):
        graph = Graphed(f, model.arena)
        for _ in range(3):
            graph(*inputs)
        return _wall(lambda: graph(*inputs), "gpu", steps)

    ms = {"forward": measured(forward, ids, targets)}
    ms["backward"] = max(0.0, measured(both, ids, targets) - ms["forward"])
    ms["optimizer"] = measured(optimizer, hyper)
    return ms


def _wall(f: Callable[[], Any], device: str, runs: int) -> float:
    times = []
    for _ in range(runs):
        synchronize(device)
        start = time.perf_counter()
        f()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def check_files(o: Options) -> None:
    """Raise UserError before measuring if an output file cannot be written."""
    if o.plan and (o.trace or o.picture):
        raise UserError("--trace and --picture need a measured step: omit them with --plan")
    if o.trace and resolve_device(o.device) == "cpu":
        raise UserError("--trace needs a GPU: omit it on a CPU")
    if o.picture and Path(o.picture).suffix.lower() not in PICTURES:
        raise UserError(f"--picture {o.picture} must end with one of {', '.join(PICTURES)}")
    for path in filter(None, (o.trace, o.picture)):
        with _writing(path):
            new = not os.path.exists(path)
            open(path, "ab").close()
            if new:
                os.unlink(path)


def measure(o: Options, console: Console) -> None:
    """Run steps, print their parts and kernels (on a CPU: ops), write the trace and the chart."""
    if o.steps < 1:
        raise UserError(f"--steps must be positive, got {o.steps}")
    with a_run(o) as run:
        c = run.config
        device = run.model.device
        if device == "cpu":
            how = ""
        elif c.graph:
            how = ", one CUDA graph"
        else:
            how = ", launch by launch"
        say(console, f"[bold]{describe(run.model.config)}[/]")
        say(
            console, f"{c.batch} x {c.seq_len} tokens, {c.precision}, on {device_name(device)}{how}"
        )
        for _ in range(3):  # compile, fill the pool, capture
            run.step()
        if device == "gpu":
            planned = _plan_of(run).reserved / 1e9
            taken = (memory_peak_bytes(device) or 0) / 1e9
            say(console, f"memory: planned {planned:.3f} GB, used {taken:.3f} GB")
        ms = parts(run, o.steps)
        table = new_table("a step", "part", "ms", "share")
        for name, t in ms.items():
            table.add_row(name, f"{t:.3f}", f"{100 * t / ms['whole step']:.1f} %")
        console.print(table)
        say(console, f"{c.batch * c.seq_len / ms['whole step'] * 1e3:,.0f} tokens per second")
        if device == "cpu":
            console.print(ops_table(run, o.steps))
        else:
            _kernels(o, run, console)
        if o.picture:
            points = None
            if device != "cpu":
                points = memory.measured_timeline(lambda: _eager(run))
            with _writing(o.picture):
                draw(_plan_of(run), points, o.picture)
            say(console, f"memory over a step: {escape(str(o.picture))}")


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def _plan_of(run: Run) -> memory.Plan:
    c, model = run.config, run.model
    shape = c.micro_batch, c.seq_len, c.precision, c.recompute
    options: dict[str, Any] = dict(optimizer=c.optimizer, ema=c.ema, fp8_head=c.fp8_head)
    return memory.plan(model.config, *shape, **options)


def _eager(run: Run) -> None:
    batch = run.next_batch()
    inv_count = run.parallel.inverse_target_count(batch.targets)
    run.eagerly(run.optimizer.advance(), inv_count, batch)


def _kernels(o: Options, run: Run, console: Console) -> None:
    recorder = Recorder()
    recorder(lambda: _eager(run), nvtx_ranges())
    copy, product = kernel_times.limits(run.config.precision)
    say(
        console,
        f"this card's limits: copy {copy / 1e9:,.0f} GB/s, product 8192^3 {product / 1e12:,.0f} "
        f"TFLOP/s ({run.config.precision})",
    )
    try:
        times = kernel_times.cupti_times(lambda: [run.step() for _ in range(o.steps + 1)])
        times = kernel_times.match(times, recorder.launches)
        steps = o.steps
        times = kernel_times.without_first_step(times, recorder.launches)
        say(console, f"the GPU is busy {100 * kernel_times.busy_share(times):.1f} % of the time")
    except kernel_times.NoTimes as reason:
        say(
            console,
            f"{escape(str(reason))}: times are from CUDA events around the launches of an eager "
            "step, each a few microseconds too long",
        )
        events = Recorder(events=True)
        steps = 1
        events(lambda: _eager(run))
        times = events.timed()
    console.print(kernel_table(kernel_times.rows(times, steps), copy, product))
    if o.trace:
        text = json.dumps(kernel_times.chrome_trace(times))
        with _writing(o.trace):
            Path(o.trace).write_text(text, encoding="utf-8")
        say(console, f"trace: {escape(str(o.trace))} (open it in ui.perfetto.dev)")


def kernel_table(rows: list[kernel_times.Row], copy: float, product: float) -> Table:
    """Return the kernel table.

    copy, product: the card's limits, bytes per second and operations per second

    "of limit" compares kernels with known operations with `product`, all others with `copy`.
    """
    total = sum(row.ns for row in rows)
    table = new_table(
        "kernels of a step", "kernel", "op", "calls", "ms", "share", "GB/s", "TFLOP/s", "of limit"
    )
    for row in rows:
        rate = None  # in 10^12 per s
        if row.flops:
            rate = row.flops / row.ns / 1e3
        moved = None  # in 10^9 per s
        if row.nbytes:
            moved = row.nbytes / row.ns
        if rate:
            share = rate * 1e12 / product
        elif moved:
            share = moved * 1e9 / copy
        else:
            share = None
        table.add_row(
            row.name,
            row.op,
            f"{row.calls:g}",
            f"{row.ns / 1e6:.3f}",
            f"{100 * row.ns / total:.1f} %",
            "" if moved is None or rate else f"{moved:,.0f}",
            f"{rate:,.1f}" if rate else "",
            "" if share is None else f"{100 * share:.0f} %",
        )
    table.add_row("[bold]all[/]", "", "", f"{total / 1e6:.3f}", "")
    return table


def ops_table(run: Run, steps: int) -> Table:
    """Return the time inside each op, forward and backward, on a CPU."""
    spent: dict[tuple[str, str], list[float]] = {}

    @contextlib.contextmanager
    def observer(op: Op) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if op.name:  # not a layer
            spent.setdefault((op.name, op.way), []).append(time.perf_counter() - start)

    start = time.perf_counter()
    with observe_ops(observer):
        for _ in range(steps):
            run.step()
    whole = time.perf_counter() - start
    table = new_table("ops of a step", "op", "way", "calls", "ms", "share")
    for (name, way), times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        t = sum(times)
        calls = f"{len(times) / steps:g}"
        share = f"{100 * t / whole:.1f} %"
        table.add_row(name, way, calls, f"{1e3 * t / steps:.3f}", share)
    return table


def nvtx_ranges() -> OpObserver | None:
    """Return an observer that opens an NVTX range per op and layer; None without nvtx."""
    try:
        import nvtx
    except ImportError:
        return None
    return lambda op: nvtx.annotate(" ".join(filter(None, (op.layer, op.name, op.way))))


def draw(plan: memory.Plan, measured: list[int] | None, path: str) -> None:
    """Write a chart: the planned memory of a step by kind, and the measured bytes of the pool."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    constant = {k for k, n in plan.timeline[0][1].items() if n}
    peaks = {k: max(now.get(k, 0) for _, now in plan.timeline) for k in plan.timeline[-1][1]}
    kinds = [k for k in peaks if peaks[k] > 5e-4 * plan.peak]
    # constant kinds at the bottom
    kinds.sort(key=lambda k: (k not in constant, -plan.kinds.get(k, 0)))
    gb = np.array([[now.get(k, 0) / 1e9 for _, now in plan.timeline] for k in kinds])
    colors = matplotlib.colormaps["tab20"](range(20))
    axes.stackplot(range(gb.shape[1]), gb, labels=kinds, colors=colors, step="post", lw=0)
    ways = [scope[1] for scope, _ in plan.timeline]
    begin = next((i for i, way in enumerate(ways) if way == "backward"), 0)
    axes.axvline(begin, color="black", lw=0.8)
    axes.text(begin, axes.get_ylim()[1], " backward", va="top")
    if measured:
        x = np.linspace(0, gb.shape[1] - 1, len(measured))
        axes.plot(x, np.array(measured) / 1e9, color="black", lw=1, label="measured")
    axes.set(
        xlabel="allocations and releases, in order", ylabel="GB", title="memory of a training step"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, dpi=120)


# ----------------------------------------------------------------------------- command line
def profile(o: Options) -> None:
    """Run `xtrain profile`. Raises UserError."""
    console = RecordingConsole()
    if o.run is not None:
        o = with_options_of(o.run, o)
    if o.plan and o.change:
        raise UserError(
            f"--plan does not support --change {o.change}: plan a preset of about the same size"
        )
    config, batch, T = model_config(o)
    if not o.plan:
        device = resolve_device(o.device)
    elif gpu_available():
        device = "gpu"
    else:
        device = "sim"
    o = replace(o, precision=choose_precision(o.precision, device, config.head_dim)[0])
    check_files(o)
    with contextlib.ExitStack() as stack:
        if device == "cpu" and not o.plan:
            shape = batch * T, config.dim, config.hidden_dim
            threads = blas.choose_threads(o.blas_threads, *shape, blas.cores())
            stack.enter_context(blas.use_threads(threads))
        if o.plan:
            show_plan(o, config, batch, T, console)
        else:
            measure(o, console)
    if o.run is not None and not o.plan:
        kept = console.save(o.run)
        say(console, escape(f"tables: {kept}; on a page: {report.write([o.run])}"))
