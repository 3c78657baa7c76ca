"""What surrounds the training step: preparing the text, when to validate, sample, save and stop, and what went wrong."""

import contextlib
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..cli import Output
from ..config import ModelConfig, TrainConfig, resolve
from ..data.dataset import Corpus, prepare
from ..device import device_name, memory_peak_bytes, resolve_device, to_numpy
from ..errors import UserError
from ..files import Busy, cannot_write, locked, write_whole
from ..json_files import read_json
from ..kernels.runtime.launch import set_debug
from ..nn.model import Transformer
from . import checkpoint, out_of_memory
from .checkpoint import Saved
from .checkpoint_writer import Writer
from .nonfinite import unsound
from .phase_timer import Clock, memory_bytes
from .preemption import Stop, seconds
from .run import Run
from .run_log import (
    Logbook,
    NoLogbook,
    describe,
    flops_per_token,
    parameter_table,
    peak_flops,
    summary_writer,
)
from .single_process import ALONE, Alone

POINTS = 100  # of the gradient norms per layer, over a run


class Loop:
    """Train until the last step, or until `stop` says so; validate, sample and save on the way and at the end."""

    def __init__(self, run: Run, log: Logbook, stop: Stop, writer: Writer):
        self.run, self.log, self.stop, self.writer = run, log, stop, writer
        c, gpu = run.config, run.model.device == "gpu"
        self.hurry = False  # asked to stop early: nothing but the checkpoint
        self.waiting: list[tuple] = []  # steps whose numbers are still on the device
        self.per_token = flops_per_token(run.model, c.seq_len)
        self.peak = peak_flops(c.precision) if gpu else None
        # reading a number means waiting for the GPU: not every step
        self.every = 10 if gpu else 1
        run.clock = Clock(run.model.device, gpu and c.graph)
        self.apart = max(self.every, c.steps // POINTS)  # steps between gradient norms per layer

    def __call__(self) -> None:
        run, c = self.run, self.run.config
        last = c.steps if c.stop_at is None else min(c.steps, c.stop_at)
        if run.done >= last and run.ranks.rank == 0:  # killed between the last checkpoint and this
            checkpoint.prune(self.log.folder, run.done, c.keep)
        self.stop.begin(12 * run.model.arena.grads.size)
        self.since = time.perf_counter()
        while run.done < last:
            self.waiting.append((run.done + 1, *run.step()))
            signs = [self.stop.step(self.writer.seconds), self.writer.failed]
            asked, failed = run.ranks.total([float(x) for x in signs])
            if failed:
                run.ranks.first(self.writer.check)
            due = {
                n: run.done == c.steps or run.done % getattr(c, f"{n}_every") == 0
                for n in ("eval", "sample", "save")
            }
            due["save"] |= bool(asked) or run.done == last
            due["layers"] = run.done == c.steps or run.done % self.apart == 0
            if any(due.values()) or len(self.waiting) == self.every:
                self.hurry = bool(asked)
                self.read_numbers()
                self.do(due)
                self.since = time.perf_counter()
            if asked:
                self.stop.why = self.stop.why or "asked on another rank"
                break
        self.settle()
        run.ranks.first(self.writer.finish)

    def settle(self) -> None:
        """Until nothing is being written. All ranks wait together, or a watchdog would take it for a hang."""
        while self.run.ranks.any(self.writer.busy(0.1)):
            self.run.beat()

    def do(self, due: dict[str, bool]) -> None:
        run, log = self.run, self.log
        if due["layers"]:
            log.layers(run.done, run.layer_norms())
        if due["eval"]:
            log.validation(run.done, *run.validate(), run.corpus.bigram_bpb)
        if due["sample"]:
            log.sample(run.done, run.sample())
        if due["save"]:
            self.settle()
            run.ranks.first(self.writer.check)
            then = (lambda: None) if self.hurry else log.picture
            self.writer.save(lambda: run.snapshot(log.lengths()), log.flush, then)

    def read_numbers(self) -> None:
        """Wait for the steps done so far, and log them. Raises UserError after too many bad ones."""
        run, c, steps = self.run, self.run.config, self.waiting
        norms = [float(to_numpy(norm)[0]) for _, _, norm, _ in steps]
        losses = [float(to_numpy(loss)[0]) for _, loss, _, _ in steps]
        n = len(steps)
        sums = run.ranks.total(losses + [float(not np.isfinite(norm)) for norm in norms])
        seconds, phases = (time.perf_counter() - self.since) / n, run.clock.read(n)
        for (step, _, _, lr), loss, norm, bad in zip(steps, sums[:n], norms, sums[n:]):
            wrong = unsound(loss, np.nan if bad and np.isfinite(norm) else norm)
            run.row_seen = run.row_seen + 1 if wrong else 0
            run.skipped += wrong is not None
            self.log.step(step, loss, norm, lr, wrong, self.timing(seconds, phases))
            if run.row_seen == c.max_skips:
                raise UserError(
                    f"{c.max_skips} steps in a row were skipped (--max-skips), at last step {step}: {wrong}. First not "
                    f"finite: {run.explain(step)}. Go on from the last checkpoint with a smaller --lr (--resume "
                    "--allow-change lr)"
                )
        steps.clear()

    def timing(self, seconds: float, phases: dict[str, float]) -> dict[str, Any]:
        """seconds: of one step. phases: their ms."""
        run, c = self.run, self.run.config
        speed = c.batch * c.seq_len / seconds
        mfu = speed / run.ranks.world * self.per_token / self.peak if self.peak else None
        return {
            "tokens_per_s": speed, "ms": 1e3 * seconds, "mfu": mfu, "phases_ms": phases,
            "memory_bytes": memory_bytes(run.model.device), **run.timing(speed),
        }  # fmt: skip


def train(
    config: TrainConfig,
    console: Console | None = None,
    ranks: Alone = ALONE,
    make_run: Callable[..., Run] = Run,
    write_report: Callable[[Path, Run, Callable], Any] = lambda folder, run, warn: None,
) -> Path:
    """A whole run. -> its folder. Raises UserError on anything the user can mend.

    make_run: a class derived from Run, with another model, optimizer, schedule, data or evaluation
    (lessons/howto/change_the_model.md).  ranks: see ddp.py.
    """
    output = Output()
    console = console or Console(file=output, quiet=ranks.rank > 0)
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    warn = lambda text: say(f"[yellow]warning[/]: {escape(text)}")
    with Stop(seconds(config.time_limit)) as stop, contextlib.ExitStack() as stack:
        stack.callback(output.end)
        device = resolve_device(config.device)
        set_debug(config.debug)
        if config.tensorboard:
            summary_writer()  # is it there?
        asked_name = config.name
        config, shape = resolve(config, device == "gpu", ranks.world)
        stack.enter_context(out_of_memory.explained(config, shape, device))
        place = ranks.first(lambda: _run_folder(config, asked_name, warn))
        config = _as_it_began(config, place)
        corpus = _read_text(config, ranks, console)
        shape["vocab_size"] = corpus.vocab_size
        model = _make_model(config, shape, corpus, place.saved, device, ranks.world)
        run = make_run(config, model, corpus, ranks)
        model = run.model  # a Run of one's own may have changed it
        corpus.val_batches(1, config.micro_batch, config.seq_len)  # too little text is said now
        place = ranks.first(lambda: _claim(place, config, asked_name, warn, stack))
        folder, saved = place.folder, place.saved
        say(f"[bold]{escape(folder.name)}[/]: {describe(model.config)}, on {device_name(device)}")
        say(
            f"text: {escape(corpus.name)}, {corpus.bytes / 1e6:.1f} MB in {corpus.files} files, sha256 {corpus.sha256[:16]}, "
            f"{corpus.train_tokens:,} training tokens, {corpus.val_tokens:,} held out"
            + (f", files left out (no text): {corpus.skipped}" if corpus.skipped else "")
        )
        console.print(parameter_table(model))
        if saved:
            run.resume(saved, warn)
            say(f"resumed from {escape(str(saved.folder))}")
        ranks.first(lambda: _write_config(folder, config, model.config, corpus, device))
        log = NoLogbook(folder)
        if ranks.rank == 0:
            log = Logbook(folder, config, saved.state if saved else {}, console)
        with log, Writer(folder, config.keep, warn) as writer:
            Loop(run, log, stop, writer)()
        run.rest()
        # There may be no time for it. Until it is there no rank leaves: a signal would end one that has
        ranks.first(lambda: stop.why or write_report(folder, run, warn))
        _farewell(console, run, folder, stop)
    return folder


def _read_text(config: TrainConfig, ranks: Alone, console: Console) -> Corpus:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading the text", total=1)
        show = lambda fraction, text: progress.update(task, completed=fraction, description=text)
        read = lambda: prepare(
            config.data, config.vocab_size, tokenizer=config.tokenizer, progress=show
        )
        return ranks.in_turn(read)


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    """The run's folder is ours until the stack is left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(folder))
    except Busy:
        raise UserError(
            f"{folder} is being written by another process: wait for it, or choose another --name"
        ) from None
    except OSError as error:
        raise cannot_write(folder, error) from error


@dataclass(frozen=True)
class Place:
    """Where a run is written. saved: the checkpoint to resume from.  there: what is in the folder.
    began: the options that the run began with, as far as they are known."""

    folder: Path
    saved: Saved | None = None
    there: tuple[str, ...] = ()
    began: dict[str, Any] = field(default_factory=dict)


def _run_folder(config: TrainConfig, asked_name: str | None, warn: Callable[[str], None]) -> Place:
    """A run that is there already is never overwritten."""
    folder = Path(config.out) / config.name
    if config.resume:
        while asked_name is None and _there(folder.with_name(_next_name(folder.name, config.name))):
            folder = folder.with_name(_next_name(folder.name, config.name))
        there, saved = _there(folder), None
        if there and not checkpoint.folders(folder):
            warn(f"{folder} holds no checkpoint yet: the run starts from its beginning")
        else:
            saved = checkpoint.newest(folder, warn)
        return Place(folder, saved, there, _began(folder))
    if asked_name is not None and _there(folder):
        raise UserError(
            f"{folder} is there already: add --resume to go on with it, or choose another --name"
        )
    while _there(folder):
        folder = folder.with_name(_next_name(folder.name, config.name))
    return Place(folder)


def _there(folder: Path) -> tuple[str, ...]:
    """What makes this the folder of a run, its checkpoints by name; nothing where there is none."""
    found = [name for name in ("config.json", "checkpoints") if os.path.exists(folder / name)]
    return (*found, *(path.name for path in checkpoint.folders(folder)))


def _claim(
    place: Place,
    config: TrainConfig,
    asked_name: str | None,
    warn: Callable[[str], None],
    stack: contextlib.ExitStack,
) -> Place:
    """Lock the run's folder. Reading the text takes time, in which another process may have written there: look again."""
    while True:
        with contextlib.ExitStack() as attempt:
            _lock(place.folder, attempt)
            if _there(place.folder) == place.there:
                stack.push(attempt.pop_all())
                return place
        before, place = place, _run_folder(config, asked_name, warn)
        if before.saved and not place.saved:  # the model was made to be filled from it
            raise UserError(f"{before.saved.folder} is gone: start again")


def _began(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(UserError):
        began = read_json(folder / "config.json").get("train")
        return began if isinstance(began, dict) else {}
    return {}


def _as_it_began(config: TrainConfig, place: Place) -> TrainConfig:
    """On --resume shape, weights and tokenizer come from the checkpoint: the folder of --init may be gone."""
    if place.saved is None:
        return config
    tokenizer = config.tokenizer
    if tokenizer is None and place.began.get("tokenizer"):
        tokenizer = str(place.saved.folder / "tokenizer.json")
    return replace(config, init=config.init or place.began.get("init"), tokenizer=tokenizer)


def _next_name(name: str, first: str) -> str:
    """tiny -> tiny-2 -> tiny-3"""
    return f"{first}-{int(name[len(first) + 1 :] or 1) + 1}"


def _make_model(
    config: TrainConfig,
    shape: dict[str, Any],
    corpus: Corpus,
    saved: Saved | None,
    device: str,
    world: int,
) -> Transformer:
    kind = (device, config.precision, config.recompute, world)
    if config.init is None:
        return Transformer(ModelConfig(**shape), config.seed, *kind)
    if saved is None:
        model = Transformer.from_pretrained(config.init, device, config.precision, world=world)
        model.recompute = config.recompute
    else:
        names = {f.name for f in fields(ModelConfig)}
        shape = {name: x for name, x in saved.state["options"].items() if name in names}
        model = Transformer(ModelConfig(**shape), None, *kind)
    if corpus.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {corpus.vocab_size} tokens, the model in {config.init} only {model.config.vocab_size}: "
            f"give the model's own with --tokenizer {config.init}/tokenizer.json"
        )
    if config.seq_len > model.config.max_seq_len:
        raise UserError(
            f"--seq-len {config.seq_len} is longer than the model's max_seq_len {model.config.max_seq_len}"
        )
    return model


def _write_config(
    folder: Path, config: TrainConfig, model: ModelConfig, corpus: Corpus, device: str
) -> None:
    import numba

    from .. import __version__

    record = {
        "train": asdict(config),
        "model": model.to_dict(),
        "data": {
            "name": corpus.name, "files": corpus.files, "skipped": corpus.skipped, "documents": corpus.documents,
            "bytes": corpus.bytes, "sha256": corpus.sha256, "train_tokens": corpus.train_tokens,
            "val_tokens": corpus.val_tokens, "bigram_bpb": corpus.bigram_bpb, "vocab_size": corpus.vocab_size,
        },
        "machine": {"device": device_name(device), "system": platform.platform()},
        "versions": {
            "xtrain": __version__, "python": platform.python_version(),
            "numpy": np.__version__, "numba": numba.__version__,
        },
    }  # fmt: skip
    path = folder / "config.json"
    for stray in folder.glob("*.tmp"):  # of a process that was killed
        with contextlib.suppress(OSError):
            stray.unlink()
    try:
        write_whole(path, (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise cannot_write(path, error) from error


def _farewell(console: Console, run: Run, folder: Path, stop: Stop) -> None:
    last = folder / "checkpoints" / f"step-{run.done:06d}"
    peak = memory_peak_bytes(run.model.device)
    if peak:
        console.print(f"peak GPU memory {peak / 1e9:.2f} GB", highlight=False)
    why = f" ({stop.why})" if stop.why else ""
    state = "done" if run.done == run.config.steps else f"stopped after step {run.done}{why}"
    if run.skipped:
        console.print(f"{run.skipped} steps were skipped", highlight=False)
    go_on = "" if run.done == run.config.steps else f"\n  go on with this run       {_go_on(run)}"
    page = folder / "report.html" if not stop.why else f"python -m xtrain.report {quote(folder)}"
    use = [
        f"go on from these weights  python -m xtrain.train --init {quote(last)}",
        f"let it write              python -m xtrain.generate --model {quote(folder)} {quote(run.config.sample_prompt)}",
        f"use it from Python        xtrain.Transformer.from_pretrained({str(last)!r})",
    ]
    if run.model.variation:
        use = [f"use it from Python        make it again, then model.load_weights({str(last)!r})"]
    console.print(
        f"{state}. What next:{go_on}\n"
        f"  look at the run           {page}\n"
        f"  train on your own text    python -m xtrain.train --data FILE_OR_FOLDER",
        *use,
        sep="\n  ",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _go_on(run: Run) -> str:
    c = run.config
    if run.done > c.steps:
        return f"with --resume and more --steps: it is past {c.steps}"
    if c.stop_at is not None and run.done >= c.stop_at:
        return f"the same command with --resume and another --stop-at than {c.stop_at}"
    return "the same command with --resume"


def quote(text: str | Path) -> str:
    """As this machine's shell takes it for one word."""
    return subprocess.list2cmdline([str(text)]) if os.name == "nt" else shlex.quote(str(text))
