"""What a run says: live on the terminal, and as files in runs/NAME.

    config.json     the resolved options, the model's shape, the corpus (size, hash), versions, machine
    metrics.jsonl   only what is reproducible: step, loss, grad_norm, lr; at validations val_loss, val_bpb. A number that is
                    not finite is null; "skipped" says why a step changed nothing, "spike" how far a loss lies off the others
    layers.jsonl    gradient norm of each layer, before clipping, now and then; reproducible too
    timing.jsonl    tokens per second, MFU, milliseconds, also by phase (clock.py), memory so far: different every time
    samples.txt     generated text
    loss.png        the loss curve
    sentence.json   what the model makes of a sentence of held-out text, at the end
    report.html     all of it on one page (report.py)

MFU, model FLOP/s utilisation (Chowdhery et al. 2022): the floating-point operations that the model's mathematics needs,
per second, over what the GPU can do at most in the precision in use. Per token they are 6 per matrix parameter
(2 forward, 4 backward; the embedding look-up is none) and 12 L H D T / 2 for causal attention.
"""

import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..config import ModelConfig, TrainConfig
from ..device import cupy
from ..errors import UserError
from ..files import FULL, Journal, cannot_write, write_whole
from ..json_files import reading
from ..nn.model import Transformer
from .checkpoint import LOGS
from .nonfinite import spike


def flops_per_token(model: Transformer, T: int) -> float:
    """Forward and backward, for sequences of T tokens; see the file's docstring."""
    c = model.config
    matrices = sum(
        t.size for n, t in model.named_parameters() if t.ndim == 2 and "embed_tokens" not in n
    )
    head = c.vocab_size * c.dim if c.tie_embeddings else 0  # used as a matrix too
    return 6 * (matrices + head) + 6 * c.n_layers * c.n_heads * c.head_dim * T


# Operations (a multiply-add counts as two) per multiprocessor and clock, by compute capability: on the ordinary cores in
# float32, and on tensor cores from bf16 to float32 without sparsity. From NVIDIA's architecture white papers.
FP32_OPS = {
    (7, 5): 128,
    (8, 0): 128,
    (8, 6): 256,
    (8, 9): 256,
    (9, 0): 256,
    (10, 0): 256,
    (12, 0): 256,
}
BF16_OPS = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}


def peak_flops(precision: str) -> float | None:
    """What the current GPU can do at its highest clock, operations per second; None for a card not in the tables.

    An H200 at 1.98 GHz: 67e12 in fp32, 1070e12 in bf16 (its datasheet counts with a lower clock: 989e12).
    GeForce cards add bf16 products up in float32 at half the rate given here.
    """
    runtime = cupy().cuda.runtime
    device = runtime.getDevice()
    capability = tuple(runtime.deviceGetAttribute(a, device) for a in (75, 76))
    clock_khz, multiprocessors = (runtime.deviceGetAttribute(a, device) for a in (13, 16))
    ops = (BF16_OPS if precision == "bf16" else FP32_OPS).get(capability)
    return ops and float(ops) * multiprocessors * clock_khz * 1e3


def parameter_table(model: Transformer) -> Table:
    """Parameters of the embedding, the head and the core, apart: a large vocabulary dominates small models."""
    marks = {
        "norm": "norms", "embed": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "MLP",
    }  # fmt: skip
    groups = dict.fromkeys(("embedding", "attention", "MLP", "norms", "head", "other"), 0)
    for name, tensor in model.named_parameters():
        kind = next((group for mark, group in marks.items() if mark in name), "other")
        groups[kind] += tensor.size
    total = sum(groups.values())
    core = total - groups["embedding"] - groups["head"]
    if model.config.tie_embeddings:
        del groups["head"]
    if not groups["other"]:
        del groups["other"]
    table = Table(title="parameters", title_justify="left")
    table.add_column("part")
    table.add_column("number", justify="right")
    table.add_column("share", justify="right")
    for name, n in [*groups.items(), ("core (without embedding and head)", core), ("all", total)]:
        table.add_row(name, f"{n:,}", f"{100 * n / total:.1f} %")
    return table


def describe(config: ModelConfig) -> str:
    kind = "Qwen3" if config.qk_norm else "Llama"
    return (
        f"{kind}-style, {config.n_layers} layers, width {config.dim}, {config.n_heads} heads x {config.head_dim} "
        f"({config.n_kv_heads} for keys), MLP {config.hidden_dim}, vocabulary {config.vocab_size}"
    )


class Logbook:
    """Terminal and files of one run. In a pipe or a file the live line becomes a line now and then.

    state: what the checkpoint says that the run goes on from; {} for a new run. What the files hold of later steps is cut off.
    """

    def __init__(self, folder: Path, config: TrainConfig, state: dict[str, Any], console: Console):
        self.folder, self.steps, self.console = folder, config.steps, console
        for path in (folder / name for name in LOGS):
            if os.path.lexists(path) and not path.is_file():  # opening a pipe would wait for ever
                raise UserError(f"{path} is no file: move it away")
        self.spike_z, self.first_step = config.spike_z, state.get("step", 0)
        self.every = max(1, self.steps // 20)  # lines in a pipe
        self.metrics: list[dict[str, Any]] = _keep(folder / "metrics.jsonl", self.first_step)
        for name in ("timing.jsonl", "layers.jsonl"):
            _keep(folder / name, self.first_step)
        _cut(folder / "samples.txt", state.get("logs", {}).get("samples.txt", 0))
        missing = self.first_step - len({m["step"] for m in self.metrics if "loss" in m})
        if missing > 0:
            self.warn(
                f"{folder / 'metrics.jsonl'} lacks {missing} of the {self.first_step} steps so far"
            )
        self.files = {name: Journal(folder / name) for name in LOGS}
        self.full = False  # has a full disk been told?
        self.board = None
        if config.tensorboard:  # what it has of later steps is hidden there
            board = str(folder / "tensorboard")
            self.board = summary_writer()(board, purge_step=self.first_step + 1)
        columns = [
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        ]
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("starting", total=self.steps, completed=self.first_step)
        self.live = console.is_terminal
        self.started = time.perf_counter()

    def __enter__(self) -> "Logbook":
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()
        if self.board is not None:
            self.board.close()

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning[/]: {escape(text)}", highlight=False, soft_wrap=True)

    def step(
        self,
        step: int,
        loss: float,
        norm: float,
        lr: float,
        wrong: str | None,
        timing: dict[str, Any],
    ) -> None:
        """One optimizer step is done and its numbers are on the host. wrong: why it was skipped."""
        metrics = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr}
        if wrong:
            metrics["skipped"] = wrong
            self.warn(f"step {step} is skipped: {wrong}")
        else:
            before = [m["loss"] for m in self.metrics[-400:] if is_number(m.get("loss"))]
            if z := spike(before, loss, self.spike_z):
                metrics["spike"] = round(z, 3)
                self.warn(
                    f"step {step}: the loss jumps to {loss:.4f}, {z:.1f} standard deviations above those before"
                )
        self.record("metrics.jsonl", metrics)
        self.record("timing.jsonl", {"step": step, **timing})
        mfu = f"  MFU {100 * timing['mfu']:4.1f} %" if timing.get("mfu") else ""
        text = (
            f"step {step}/{self.steps}  loss {loss:.4f}  grad norm {norm:.3f}  "
            f"lr {lr:.2e}  {timing['tokens_per_s']:,.0f} tok/s{mfu}"
        )
        self.progress.update(self.task, completed=step, description=text)
        if not self.live and (step % self.every == 0 or step == 1):
            elapsed = time.perf_counter() - self.started
            eta = elapsed / max(1, step - self.first_step) * (self.steps - step)
            self.console.print(f"{text}  ETA {eta:.0f} s", highlight=False)

    def layers(self, step: int, norms: dict[str, float]) -> None:
        self.record("layers.jsonl", {"step": step, **norms})

    def validation(self, step: int, loss: float, bpb: float, bigram_bpb: float) -> None:
        self.record("metrics.jsonl", {"step": step, "val_loss": loss, "val_bpb": bpb})
        verdict = "beats" if bpb < bigram_bpb else "not yet below"
        self.console.print(
            f"[bold]step {step}: validation loss {loss:.4f}, {bpb:.3f} bits per byte[/] "
            f"({verdict} the byte-bigram model's {bigram_bpb:.3f})",
            highlight=False,
        )

    def sample(self, step: int, text: str) -> None:
        self.append("samples.txt", f"--- step {step}\n{text}\n")
        self.console.rule(f"sample at step {step}", align="left")
        self.console.print(text, markup=False, highlight=False)
        self.console.rule()

    def record(self, name: str, record: dict[str, Any]) -> None:
        """A line of JSON, which knows neither NaN nor infinity."""
        sound = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        if name == "metrics.jsonl":
            self.metrics.append(sound)
        if self.board is not None:
            for key, value in sound.items():
                if is_number(value) and key != "step":
                    self.board.add_scalar(
                        f"{name.removesuffix('.jsonl')}/{key}", value, sound["step"]
                    )
        self.append(name, json.dumps(sound) + "\n")

    def append(self, name: str, text: str) -> None:
        written = self.files[name].write(text)
        if not written and not self.full:
            self.warn(
                f"no space left to write {self.folder / name}: training goes on, the lines are kept until there is"
            )
        self.full = any(file.pending for file in self.files.values())  # one may have room left

    def flush(self) -> bool:
        """-> is everything in the files? A checkpoint must not be newer than they are."""
        return all([file.flush() for file in self.files.values()])

    def lengths(self) -> dict[str, int]:
        """Bytes of the files that cannot be cut back by steps."""
        file = self.files["samples.txt"]
        return {"samples.txt": file.size + len(file.pending)}

    def picture(self) -> None:
        """loss.png: training loss, its running mean, validation loss."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = FigureCanvasAgg(figure).figure.add_subplot()
        train = [(m["step"], m["loss"]) for m in self.metrics if is_number(m.get("loss"))]
        held_out = [
            (m["step"], m["val_loss"]) for m in self.metrics if is_number(m.get("val_loss"))
        ]
        if train:
            axes.plot(*zip(*train), lw=0.6, alpha=0.4, color="tab:blue")
            smooth, mean = [], train[0][1]
            for step, loss in train:
                mean += 0.05 * (loss - mean)
                smooth.append((step, mean))
            axes.plot(*zip(*smooth), color="tab:blue", label="training (running mean)")
        if held_out:
            axes.plot(*zip(*held_out), "o-", color="tab:red", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=self.folder.name)
        axes.grid(alpha=0.3)
        if train or held_out:
            axes.legend()
        content = io.BytesIO()
        figure.savefig(content, dpi=120, format="png")
        try:
            write_whole(self.folder / "loss.png", content.getvalue())
        except OSError as error:  # a run does not end for want of a picture
            if error.errno not in FULL:
                self.warn(str(cannot_write(self.folder / "loss.png", error)))


class NoLogbook:
    """For the ranks that do not write: the same methods, and nothing happens."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> "NoLogbook":
        return self

    def nothing(self, *_: Any) -> None:
        pass

    __exit__ = step = layers = validation = sample = picture = nothing

    def flush(self) -> bool:
        return True

    def lengths(self) -> dict[str, int]:
        return {}


def summary_writer() -> Any:
    """The class that writes TensorBoard's files. Raises UserError without the package for it."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard needs a package that is not installed: `pip install tensorboardX`"
        ) from None
    return SummaryWriter


def is_number(x: Any) -> bool:
    """One that can be computed with and drawn; what somebody has written into a log may be anything."""
    return isinstance(x, (int, float)) and abs(x) < 1e300


def _keep(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Cut a .jsonl back to the steps up to last_step: what came after the checkpoint will be done again.

    Lines that are no records are dropped: the last one of a process that was killed, or what a disk has spoilt.
    """
    if not path.exists():
        return []
    records, lines = [], []
    with reading(path):
        content = path.read_bytes()
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line)
            if not line.endswith(b"\n") or record["step"] > last_step:
                continue
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        records.append(record)
        lines.append(line)
    kept = b"".join(lines)
    if content.startswith(kept):
        _cut(path, len(kept))
    else:
        _replace(path, kept)
    return records


def _replace(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise cannot_write(path, error) from error


def _cut(path: Path, length: int) -> None:
    """Forget what a file holds beyond so many bytes."""
    try:
        if path.exists() and path.stat().st_size > length:
            os.truncate(path, length)
    except OSError as error:
        raise cannot_write(path, error) from error
