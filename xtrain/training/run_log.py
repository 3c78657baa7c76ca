"""What a run prints on the terminal and writes into its folder, runs/NAME.

config.json     the resolved options, the model's shape, the corpus (size, hash), versions, machine
metrics.jsonl   reproducible numbers only: step, loss, grad_norm, lr; at validations val_loss, val_bpb; of the files of
                --eval-tasks FILE/METRIC, as quiz/acc. A value that is not finite is null; "skipped"
                says why a step changed nothing, "spike" by how many standard deviations a loss
                exceeds the ones before it
layers.jsonl    gradient norm of each layer, before clipping, about 100 times in a run; of a mixture
                of experts, how many tokens of a validation each expert got; reproducible too
timing.jsonl    tokens per second, MFU (flops.py), milliseconds per step and phase (phase_timer.py),
                peak memory, seconds that the run has taken, without the time between a stop and
                --resume; different in every run
starts.jsonl    each start of the run: its command line, and the commit of the working directory
                (run_folder.py)
trackers.json   the identity of the logged run of --log (trackers.py)
samples.txt     generated text
rollouts.jsonl  of reinforcement learning, a completion a line: step, prompt, completion, reward,
                advantage, finish, tokens; of some steps all (--rollouts-every)
loss.png        the loss curve
sentence.json   a held-out sentence with the model's predictions, written at the end
report.html     all of this on one page (xtrain/report)
"""

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import ResolvedConfig
from ..errors import UserError
from ..files import FULL, Journal, cannot_write, write_whole
from ..json_files import reading
from .checkpoint import LOGS
from .loss_picture import is_number, loss_png
from .nonfinite import spike
from .trackers import Trackers

SPIKE_HISTORY = 400  # lines of metrics.jsonl that are searched for earlier losses
LINES_WITHOUT_TERMINAL = 20  # lines over a run, about, that replace the progress bar
BAR_FROM = 80  # columns of a terminal that has room for a bar
BAR_WIDTH = 5  # columns, at least
ETA_WIDTH = len(" ETA 00:00:00")


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step, read back from the device. skipped: why it changed nothing, None if
    it did not.

    extra: further numbers, which are logged and shown.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: str | None = None
    extra: dict[str, float] = field(default_factory=dict)


class RunLog:
    """Terminal and log files of one run. If the output is a pipe or a file, single lines replace
    the progress bar.

    state: state.json of the checkpoint that the run resumes from, {} for a new run. Later steps are
    cut off the log files.
    """

    def __init__(
        self, folder: Path, config: ResolvedConfig, state: dict[str, Any], console: Console
    ):
        self.folder = folder
        self.steps = config.steps
        self.console = console
        for path in (folder / name for name in LOGS):
            if os.path.lexists(path) and not path.is_file():  # opening a pipe would block forever
                raise UserError(f"{path} is not a file: move it away")
        self.spike_z = config.spike_z
        self.first_step = state.get("step", 0)
        self.every = max(1, self.steps // LINES_WITHOUT_TERMINAL)
        self.metrics: list[dict[str, Any]] = _cut_jsonl(folder / "metrics.jsonl", self.first_step)
        timing = _cut_jsonl(folder / "timing.jsonl", self.first_step)
        for name in ("layers.jsonl", "rollouts.jsonl"):
            _cut_jsonl(folder / name, self.first_step)
        seconds = [t["seconds"] for t in timing if is_number(t.get("seconds"))]
        self.seconds_before = max(seconds, default=0.0)  # of the run before it was resumed
        _truncate(folder / "samples.txt", state.get("logs", {}).get("samples.txt", 0))
        missing = self.first_step - len({m["step"] for m in self.metrics if "loss" in m})
        if missing > 0:
            self.warn(
                f"{folder / 'metrics.jsonl'} lacks {missing} of the {self.first_step} steps so far"
            )
        self.files = {name: Journal(folder / name) for name in LOGS}
        self.full = False  # has the warning about a full disk been printed?
        about = {}
        if config.log:
            about = {"train": asdict(config)}
        self.trackers = Trackers(config.log, folder, self.first_step, about, self.warn)
        columns = [TextColumn("{task.description}"), TextColumn("ETA"), TimeRemainingColumn()]
        self.beside = ETA_WIDTH
        if console.width >= BAR_FROM:
            columns.insert(1, BarColumn(None))
            self.beside += BAR_WIDTH
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("starting", total=self.steps, completed=self.first_step)
        self.live = console.is_terminal
        self.started = time.perf_counter()

    def __enter__(self) -> "RunLog":
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.progress.stop()
        self.trackers.close(kind is not None)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.print(f"[yellow]warning[/]: {escape(text)}", highlight=False, soft_wrap=True)

    def step(self, numbers: StepNumbers, timing: dict[str, Any], ended: float) -> None:
        """Log one step. timing: the fields of its line in timing.jsonl.
        ended: when it ended, by time.perf_counter."""
        n = numbers
        metrics: dict[str, Any] = {"step": n.step, "loss": n.loss}
        metrics |= {"grad_norm": n.grad_norm, "lr": n.lr, **n.extra}
        if n.skipped:
            metrics["skipped"] = n.skipped
            self.warn(f"step {n.step} is skipped: {n.skipped}")
        else:
            history = self.metrics[-SPIKE_HISTORY:]
            losses = [m["loss"] for m in history if is_number(m.get("loss"))]
            if z := spike(losses, n.loss, self.spike_z):
                metrics["spike"] = round(z, 3)
                self.warn(
                    f"step {n.step}: the loss jumps to {n.loss:.4f}, {z:.1f} standard deviations "
                    "above the previous losses"
                )
        self.record("metrics.jsonl", metrics)
        seconds = self.seconds_before + max(0.0, ended - self.started)
        self.record("timing.jsonl", {"step": n.step, **timing, "seconds": round(seconds, 3)})
        self._show(n, timing)

    def _show(self, n, timing):
        shown = {k: x for k, x in n.extra.items() if not k.startswith("fp8_")}
        extra = [f"{name.replace('_', ' ')} {x:.4g}" for name, x in shown.items()]
        extra += [fp8_text(name, n.extra) for name in ("fp8_clamped", "fp8_nonfinite")]
        norm = f"grad norm {n.grad_norm:.3f}"
        lr = f"lr {n.lr:.2e}"
        mfu = ""
        if timing.get("mfu"):
            mfu = f"MFU {100 * timing['mfu']:4.1f} %"
        fields = [f"step {n.step}/{self.steps}", f"loss {n.loss:.4f}", *extra, norm, lr]
        fields += [f"{timing['tokens_per_s']:,.0f} tok/s", mfu]
        fields = [field for field in fields if field]
        text = fitting(fields, [mfu, lr, norm, *extra[::-1]], self.console.width - self.beside)
        self.progress.update(self.task, completed=n.step, description=text)
        if not self.live and (n.step % self.every == 0 or n.step == 1):
            elapsed = time.perf_counter() - self.started
            eta = elapsed / max(1, n.step - self.first_step) * (self.steps - n.step)
            line = "  ".join([*fields, f"ETA {timedelta(seconds=round(eta))}"])
            self.console.print(line, highlight=False, soft_wrap=True)

    def layers(self, step: int, numbers: dict[str, Any]) -> None:
        """Log a number, or several, of each layer."""
        self.record("layers.jsonl", {"step": step, **numbers})

    def validation(self, step: int, loss: float, bpb: float, bigram_bpb: float | None) -> None:
        """Log a validation. loss: nats per token.
        bpb: bits per byte.
        bigram_bpb: those of the byte-bigram model, if known."""
        self.record("metrics.jsonl", {"step": step, "val_loss": loss, "val_bpb": bpb})
        verdict = ""
        if bigram_bpb is not None:
            word = "not yet below"
            if bpb < bigram_bpb:
                word = "beats"
            verdict = f" ({word} the byte-bigram model's {bigram_bpb:.3f})"
        self.console.print(
            f"[bold]step {step}: validation loss {loss:.4f}, {bpb:.3f} bits per byte[/]{verdict}",
            highlight=False,
            soft_wrap=True,
        )

    def tasks(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation on --eval-tasks. metrics: {"FILE/METRIC": value}."""
        self.record("metrics.jsonl", {"step": step, **metrics})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.console.print(
            f"[bold]step {step}:[/] {escape(shown)}", highlight=False, soft_wrap=True
        )

    def measured(self, step: int, numbers: dict[str, float], sentence: str) -> None:
        """Log numbers of a validation that is not a loss. sentence: the same for the terminal."""
        self.record("metrics.jsonl", {"step": step, **numbers})
        self.console.print(f"[bold]step {step}: {sentence}[/]", highlight=False)

    def sample(self, step: int, text: str) -> None:
        """Log generated text."""
        self.append("samples.txt", f"--- step {step}\n{text}\n")
        self.console.rule(f"sample at step {step}", align="left")
        self.console.print(text, markup=False, highlight=False)
        self.console.rule()

    def rollouts(self, lines: list[dict[str, Any]]) -> None:
        """Log the completions of a step."""
        columns = [name for name in lines[0] if name != "step"]
        rows = [[line.get(name) for name in columns] for line in lines]
        self.trackers.table(lines[0]["step"], "rollouts", columns, rows)
        self.append("rollouts.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def record(self, name: str, record: dict[str, Any]) -> None:
        """Append a line of JSON, with null for NaN and infinity, which JSON does not have."""
        line: dict[str, Any] = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        if name == "metrics.jsonl":
            self.metrics.append(line)
        kind = name.removesuffix(".jsonl")
        numbers = {f"{kind}/{k}": v for k, v in line.items() if is_number(v) and k != "step"}
        self.trackers.log(line["step"], numbers)
        self.append(name, json.dumps(line) + "\n")

    def append(self, name: str, text: str) -> None:
        """Append text to a log file. On a full disk the text is kept in memory, and a warning is
        printed once."""
        written = self.files[name].write(text)
        if not written and not self.full:
            self.warn(
                f"no space left to write {self.folder / name}: training continues, the lines are "
                "kept until there is space"
            )
        self.full = any(file.pending for file in self.files.values())  # one may have room left

    def flush(self) -> bool:
        """Write the pending lines. -> is everything in the files? A checkpoint must not be newer
        than its logs."""
        return all([file.flush() for file in self.files.values()])

    def lengths(self) -> dict[str, int]:
        """Return bytes of the files that cannot be cut back by steps."""
        file = self.files["samples.txt"]
        return {"samples.txt": file.size + len(file.pending)}

    def picture(self) -> None:
        """Write loss.png."""
        path = self.folder / "loss.png"
        content = loss_png(self.metrics, self.folder.name)
        try:
            write_whole(path, content)
        except OSError as error:  # the run does not need the picture
            if error.errno not in FULL:
                self.warn(str(cannot_write(path, error)))


def fitting(fields: list[str], less_important: list[str], width: int) -> str:
    """Return the fields on one line. While it is longer than width, leave out the next of
    less_important."""
    left = list(fields)
    for text in less_important:
        if len("  ".join(left)) > width and text in left:
            left.remove(text)
    return "  ".join(left)


def fp8_text(name: str, numbers: dict[str, float]) -> str:
    """Return a count of fp8 numbers for the terminal, with the kind of tensor that has most of
    them: "fp8 clamped 12 (down_proj x 9)"; "" if it is 0.
    """
    if not numbers.get(name):
        return ""
    parts = {k.removeprefix(name + "_"): x for k, x in numbers.items() if k.startswith(name + "_")}
    largest = max(parts, key=lambda kind: parts[kind])
    module, _, matrix = largest.rpartition("_")
    first = f"{module} {matrix} {parts[largest]:,.0f}"
    return f"{name.replace('_', ' ')} {numbers[name]:,.0f} ({first})"


class NullRunLog:
    """The log of a rank that writes nothing: the methods of RunLog, without effect."""

    metrics: tuple[dict[str, Any], ...] = ()

    def __enter__(self) -> "NullRunLog":
        return self

    def _nothing(self, *_: Any) -> None:
        pass

    __exit__ = step = layers = validation = tasks = measured = sample = picture = _nothing
    rollouts = warn = _nothing

    def flush(self) -> bool:
        """Return True: nothing is pending."""
        return True

    def lengths(self) -> dict[str, int]:
        """Return {}: there are no files."""
        return {}


def _cut_jsonl(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Cut a .jsonl file back to the steps up to last_step: the run repeats the later ones. -> the
    lines that remain.

    Lines that are not records are removed: the unfinished last line of a killed process, or damaged
    lines.
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
        _truncate(path, len(kept))
    else:
        _replace(path, kept)
    return records


def _replace(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise cannot_write(path, error) from error


def _truncate(path: Path, length: int) -> None:
    """Shorten a file to `length` bytes if it is longer."""
    try:
        if path.exists() and path.stat().st_size > length:
            os.truncate(path, length)
    except OSError as error:
        raise cannot_write(path, error) from error
