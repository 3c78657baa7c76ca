"""What a run says: live on the terminal, and as files in runs/NAME.

    config.json     the resolved options, the model's shape, the corpus (size, hash), versions, machine
    metrics.jsonl   only what is reproducible: step, loss, grad_norm, lr; at validations val_loss, val_bpb
    timing.jsonl    tokens per second, MFU, milliseconds: different every time
    samples.txt     generated text
    loss.png        the loss curve

MFU, model FLOP/s utilisation (Chowdhery et al. 2022): the floating-point operations that the model's mathematics needs,
per second, over what the GPU can do at most in the precision in use. Per token they are 6 per matrix parameter
(2 forward, 4 backward; the embedding look-up is none) and 12 L H D T / 2 for causal attention.
"""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .checkpoint import cannot_write
from .config import ModelConfig
from .device import cupy
from .model import Transformer


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
    groups = {"embedding": 0, "attention": 0, "MLP": 0, "norms": 0, "head": 0}
    for name, tensor in model.named_parameters():
        marks = {
            "norm": "norms",
            "embed": "embedding",
            "lm_head": "head",
            "self_attn": "attention",
            "mlp": "MLP",
        }
        kind = next(group for mark, group in marks.items() if mark in name)
        groups[kind] += tensor.size
    if model.config.tie_embeddings:
        del groups["head"]
    total, core = sum(groups.values()), groups["attention"] + groups["MLP"] + groups["norms"]
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
    """Terminal and files of one run. In a pipe or a file the live line becomes a line now and then."""

    def __init__(self, folder: Path, steps: int, first_step: int, console: Console):
        self.folder, self.steps, self.console = folder, steps, console
        self.every = max(1, steps // 20)  # lines in a pipe
        self.metrics: list[dict[str, Any]] = _keep(folder / "metrics.jsonl", first_step)
        _keep(folder / "timing.jsonl", first_step)
        columns = [
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        ]
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("starting", total=steps, completed=first_step)
        self.live = console.is_terminal
        self.started = time.perf_counter()
        self.first_step = first_step

    def __enter__(self) -> "Logbook":
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def step(self, metrics: dict[str, Any], timing: dict[str, Any]) -> None:
        """One optimizer step is done and its numbers are on the host."""
        self.append("metrics.jsonl", metrics)
        self.append("timing.jsonl", timing)
        self.metrics.append(metrics)
        done = metrics["step"]
        mfu = f"  MFU {100 * timing['mfu']:4.1f} %" if timing.get("mfu") else ""
        text = (
            f"step {done}/{self.steps}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  "
            f"lr {metrics['lr']:.2e}  {timing['tokens_per_s']:,.0f} tok/s{mfu}"
        )
        self.progress.update(self.task, completed=done, description=text)
        if not self.live and (done % self.every == 0 or done == 1):
            elapsed = time.perf_counter() - self.started
            eta = elapsed / max(1, done - self.first_step) * (self.steps - done)
            self.console.print(f"{text}  ETA {eta:.0f} s", highlight=False)

    def validation(self, step: int, loss: float, bpb: float, bigram_bpb: float) -> None:
        record = {"step": step, "val_loss": loss, "val_bpb": bpb}
        self.append("metrics.jsonl", record)
        self.metrics.append(record)
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

    def append(self, name: str, record: dict[str, Any] | str) -> None:
        line = record if isinstance(record, str) else json.dumps(record) + "\n"
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise cannot_write(self.folder / name, error) from error

    def picture(self) -> None:
        """loss.png: training loss, its running mean, validation loss."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = FigureCanvasAgg(figure).figure.add_subplot()
        train = [(m["step"], m["loss"]) for m in self.metrics if "loss" in m]
        held_out = [(m["step"], m["val_loss"]) for m in self.metrics if "val_loss" in m]
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
        try:
            figure.savefig(self.folder / "loss.png", dpi=120)
        except OSError as error:
            raise cannot_write(self.folder / "loss.png", error) from error


class NoLogbook:
    """For the ranks that do not write: the same methods, and nothing happens."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> "NoLogbook":
        return self

    def nothing(self, *_: Any) -> None:
        pass

    __exit__ = step = validation = sample = picture = nothing


def _keep(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Cut a .jsonl back to the steps up to last_step: what came after the checkpoint will be done again."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break  # the end of a file whose writer was killed
        if record["step"] > last_step:
            break
        records.append((line, record))
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line for line, _ in records), encoding="utf-8")
    temporary.replace(path)
    return [record for _, record in records]
