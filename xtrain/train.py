"""Train a language model:   python -m xtrain.train [--preset NAME] [--data FILE_OR_FOLDER] ...

The step is ten lines in `Run.step`: batch, forward, loss, backward, clip, AdamW. The rest of this file is what
surrounds it: preparing the text, validation, samples, checkpoints, and saying clearly what is wrong.
"""

import functools
import json
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from . import checkpoint, huggingface
from .autograd import no_grad
from .communicator import ALONE, Alone
from .config import ModelConfig, TrainConfig, UserError, resolve
from .data import Corpus, prepare
from .device import (
    Array,
    device_name,
    memory_peak_bytes,
    resolve_device,
    to_device,
    to_numpy,
)
from .graph import Graphed
from .kernels._launch import set_debug
from .kernels.cross_entropy import count_targets
from .kernels.elementwise import add_fwd
from .logbook import Logbook, NoLogbook, describe, flops_per_token, parameter_table, peak_flops
from .model import Transformer
from .optim import AdamW, clip, learning_rate

# Options that decide the numbers: a resumed run must have the same. (steps: the schedule's end.)
MATTERS = (
    "steps", "batch", "micro_batch", "seq_len", "lr", "min_lr_ratio", "warmup", "weight_decay", "beta1", "beta2",
    "eps", "clip", "seed",
)  # fmt: skip


class Run:
    """Model, optimizer and data of one training run, and the training step. (With several ranks: ParallelRun in ddp.py.)"""

    def __init__(
        self, config: TrainConfig, model: Transformer, corpus: Corpus, ranks: Alone = ALONE
    ):
        self.config, self.model, self.corpus, self.ranks = config, model, corpus, ranks
        c = config
        self.optimizer = self.make_optimizer()
        self.loader = corpus.loader(c.batch, c.seq_len, c.seed, ranks.rank, ranks.world)
        self.done = 0  # steps
        if model.device == "cpu":
            self.on_device = self.compute
        elif config.graph:
            graphed = Graphed(self.compute)
            self.on_device = lambda *inputs: [
                x.copy() for x in graphed(*inputs)
            ]  # the next step overwrites x
        else:
            self.on_device = lambda *inputs: self.compute(*(to_device(x, "gpu") for x in inputs))

    def make_optimizer(self) -> AdamW:
        c = self.config
        return AdamW(self.model, c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay)

    def step(self) -> tuple[Any, Any, float]:
        """One optimizer step. -> loss and gradient norm, (1,) arrays still on the device; learning rate."""
        c, optimizer = self.config, self.optimizer
        ids, targets = self.loader.next_batch()  # (batch, T)
        optimizer.lr = learning_rate(self.done, c.steps, c.lr, c.warmup, c.min_lr_ratio)
        loss, norm = self.on_device(ids, targets, optimizer.advance())
        self.done += 1
        return loss, norm, optimizer.lr

    def compute(self, ids: Array, targets: Array, hyper: Array) -> tuple[Array, Array]:
        """The part of a step that runs on the device: arrays in, arrays out, no look at a value."""
        c, model = self.config, self.model
        inv_count = count_targets(
            targets.reshape(-1)
        )  # of the whole batch: micro-batches add up to its mean
        model.zero_grad()
        losses = []
        for i in range(0, c.batch, c.micro_batch):
            loss = model.loss(ids[i : i + c.micro_batch], targets[i : i + c.micro_batch], inv_count)
            loss.backward()
            losses.append(loss.data.reshape(1))
        norm, factor = clip(model, c.clip)
        self.optimizer.apply(hyper, factor)
        return functools.reduce(add_fwd, losses), norm

    def timing(self, speed: float) -> dict[str, Any]:
        """More numbers for timing.jsonl."""
        return {}

    @no_grad()
    def validate(self) -> tuple[float, float]:
        """-> (mean loss in nats per token, bits per byte) over the fixed validation batches."""
        c, ranks, nats, tokens, lengths = self.config, self.ranks, 0.0, 0, 0
        B = c.micro_batch * ranks.world
        mine = slice(c.micro_batch * ranks.rank, c.micro_batch * (ranks.rank + 1))
        for ids, targets in self.corpus.val_batches(c.eval_batches, B, c.seq_len):
            ids, targets = ids[mine], targets[mine]
            if not targets.size:  # the last batch may have fewer rows
                continue
            nats += self.model.loss(ids, targets).item() * targets.size
            tokens += targets.size
            lengths += int(self.corpus.token_lengths[targets].sum())
        nats, tokens, lengths = ranks.total([nats, tokens, lengths])
        return nats / tokens, nats / np.log(2) / max(lengths, 1)

    def sample(self) -> str:
        """The prompt, continued with temperature 0.8 from the 50 most likely tokens."""
        c, tokenizer = self.config, self.corpus.tokenizer
        prompt = tokenizer.encode(c.sample_prompt)[: self.model.config.max_seq_len - 1] or [
            tokenizer.eot_id
        ]
        new = min(c.sample_tokens, self.model.config.max_seq_len - len(prompt))
        ids = self.model.generate(np.array(prompt), new, temperature=0.8, top_k=50, seed=c.seed)
        return tokenizer.decode(ids.tolist())

    def save(self, folder: Path) -> Path:
        return self.write(folder, self.optimizer)

    def write(self, folder: Path, optimizer: Any) -> Path:
        """optimizer: anything with the moments m and v of the whole arena, and t."""
        state = {
            "step": self.done,
            "loader": self.loader.state_dict(),
            "options": {name: getattr(self.config, name) for name in MATTERS},
            "data_sha256": self.corpus.sha256,
            "ranks": self.ranks.world,
        }
        return checkpoint.save(folder, self.model, optimizer, state, self.corpus.tokenizer)

    def resume(self, saved: checkpoint.Saved) -> None:
        """Continue from a checkpoint. Raises UserError when an option that matters, or the text, is another one."""
        options = {name: getattr(self.config, name) for name in MATTERS}
        then = saved.state["options"]
        different = [
            f"{k} was {then.get(k)}, is {v}" for k, v in options.items() if then.get(k) != v
        ]
        if saved.state.get("ranks", 1) != self.ranks.world:  # then each has another share
            different = [text for text in different if not text.startswith("micro_batch ")]
        if saved.state.get("data_sha256") != self.corpus.sha256:
            different.append("the text is not the same")
        if different:
            raise UserError(
                f"cannot resume {saved.folder}: {'; '.join(different)}: use the options it was started with"
            )
        self.load(saved)
        self.loader.load_state_dict(saved.state["loader"])
        self.done = saved.step

    def load(self, saved: checkpoint.Saved) -> None:
        checkpoint.load(saved, self.model, self.optimizer)


def loop(run: Run, log: Logbook, stop: Callable[[], bool]) -> None:
    """Train until the last step, or until stop() says so; validate, sample and save on the way and at the end."""
    c, waiting = run.config, []  # steps whose numbers are still on the device
    per_token = flops_per_token(run.model, c.seq_len)
    peak = peak_flops(c.precision) if run.model.device == "gpu" else None
    every = (
        10 if run.model.device == "gpu" else 1
    )  # reading a number means waiting for the GPU: not every step
    last = c.steps if c.stop_at is None else min(c.steps, c.stop_at)
    since = time.perf_counter()
    while run.done < last:
        waiting.append((run.done + 1, *run.step()))
        ending = run.ranks.any(stop()) or run.done == last
        due = {
            n: ending or run.done % getattr(c, f"{n}_every") == 0
            for n in ("eval", "sample", "save")
        }
        if not (any(due.values()) or len(waiting) == every):
            continue
        losses = run.ranks.total([float(to_numpy(loss)[0]) for _, loss, _, _ in waiting])
        numbers = [
            (step, loss, float(to_numpy(norm)[0]), lr)
            for loss, (step, _, norm, lr) in zip(losses, waiting)
        ]
        seconds = (time.perf_counter() - since) / len(waiting)
        speed = c.batch * c.seq_len / seconds
        for step, loss, norm, lr in numbers:
            mfu = speed / run.ranks.world * per_token / peak if peak else None
            timing = {"step": step, "tokens_per_s": speed, "ms": 1e3 * seconds, "mfu": mfu}
            timing |= run.timing(speed)
            log.step({"step": step, "loss": loss, "grad_norm": norm, "lr": lr}, timing)
            if not np.isfinite(loss):
                raise UserError(
                    f"the loss is {loss} at step {step}: try a smaller --lr or a longer --warmup"
                )
        waiting.clear()
        if due["eval"]:
            log.validation(run.done, *run.validate(), run.corpus.bigram_bpb)
        if due["sample"]:
            log.sample(run.done, run.sample())
        if due["save"]:
            run.save(log.folder)
            log.picture()
        if ending:
            return
        since = time.perf_counter()


def train(
    config: TrainConfig,
    console: Console | None = None,
    ranks: Alone = ALONE,
    make_run: Callable[..., Run] = Run,
) -> Path:
    """A whole run. -> its folder. Raises UserError on anything the user can mend. ranks, make_run: see ddp.py."""
    console = console or Console(quiet=ranks.rank > 0)
    device = resolve_device(config.device)
    set_debug(config.debug)
    asked_name = config.name
    config, shape = resolve(config, device == "gpu", ranks.world)
    folder, saved = ranks.first(lambda: _run_folder(config, asked_name))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading the text", total=1)
        show = lambda fraction, text: progress.update(task, completed=fraction, description=text)
        read = lambda: prepare(
            config.data, config.vocab_size, tokenizer=config.tokenizer, progress=show
        )
        corpus = ranks.in_turn(read)
    model = _make_model(config, shape, corpus, device, ranks.world)
    run = make_run(config, model, corpus, ranks)
    run.corpus.val_batches(1, config.micro_batch, config.seq_len)  # too little text is said now
    console.print(
        f"[bold]{folder.name}[/]: {describe(model.config)}, on {device_name(device)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"text: {corpus.name}, {corpus.bytes / 1e6:.1f} MB in {corpus.files} files, sha256 {corpus.sha256[:16]}, "
        f"{corpus.train_tokens:,} training tokens, {corpus.val_tokens:,} held out",
        highlight=False,
        soft_wrap=True,
    )
    console.print(parameter_table(model))
    if saved:
        run.resume(saved)
        console.print(f"resumed from {saved.folder}", highlight=False)
    ranks.first(lambda: _write_config(folder, config, model.config, corpus, device))
    make_log = lambda: Logbook(folder, config.steps, run.done, console)
    with make_log() if ranks.rank == 0 else NoLogbook(folder) as log, _signals() as stop:
        loop(run, log, stop)
    _farewell(console, run, folder)
    return folder


def _run_folder(
    config: TrainConfig, asked_name: str | None
) -> tuple[Path, checkpoint.Saved | None]:
    """-> (folder of this run, the checkpoint to resume from). A run that is there already is never overwritten."""
    folder = Path(config.out) / config.name
    taken = lambda path: (path / "config.json").exists() or (path / "checkpoints").exists()
    if config.resume:
        while asked_name is None and taken(folder.with_name(_next_name(folder.name, config.name))):
            folder = folder.with_name(_next_name(folder.name, config.name))
        return folder, checkpoint.newest(folder)
    if asked_name is not None and taken(folder):
        raise UserError(
            f"{folder} is there already: add --resume to go on with it, or choose another --name"
        )
    while taken(folder):
        folder = folder.with_name(_next_name(folder.name, config.name))
    return folder, None


def _next_name(name: str, first: str) -> str:
    """tiny -> tiny-2 -> tiny-3"""
    return f"{first}-{int(name[len(first) + 1 :] or 1) + 1}"


def _make_model(
    config: TrainConfig, shape: dict[str, Any], corpus: Corpus, device: str, world: int
) -> Transformer:
    if config.init is None:
        model = ModelConfig(vocab_size=corpus.vocab_size, **shape)
        return Transformer(model, config.seed, device, config.precision, config.recompute, world)
    model = huggingface.load(Path(config.init), device, config.precision, world)
    model.recompute = config.recompute
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

    from . import __version__

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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise checkpoint.cannot_write(folder, error) from error


class _signals:
    """Ctrl-C or SIGTERM: the step is finished, a checkpoint written. A second Ctrl-C ends at once."""

    def __enter__(self) -> Callable[[], bool]:
        self.asked = False
        self.before = {}
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            number = getattr(signal, name, None)
            if number is not None:
                try:
                    self.before[number] = signal.signal(number, self._ask)
                except ValueError:  # not in the main thread: the caller handles signals
                    break
        return lambda: self.asked

    def _ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _farewell(console: Console, run: Run, folder: Path) -> None:
    last = folder / "checkpoints" / f"step-{run.done:06d}"
    peak = memory_peak_bytes(run.model.device)
    if peak:
        console.print(f"peak GPU memory {peak / 1e9:.2f} GB", highlight=False)
    state = "done" if run.done == run.config.steps else f"stopped after step {run.done}"
    go_on = (
        ""
        if run.done == run.config.steps
        else "\n  go on with this run     the same command with --resume"
    )
    console.print(
        f"[bold]{state}[/]. What next:{go_on}\n"
        f"  look at the curve       {folder / 'loss.png'}\n"
        f"  train on your own text  python -m xtrain.train --data FILE_OR_FOLDER\n"
        f"  go on from these weights  python -m xtrain.train --init {last} --tokenizer {last / 'tokenizer.json'}\n"
        f'  let it write            python -m xtrain.generate --model {folder} "{run.config.sample_prompt}"\n'
        f"  use it from Python      xtrain.Transformer.from_pretrained({str(last)!r})",
        highlight=False,
        soft_wrap=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line. -> exit code: 0, or 2 when the user can mend something (said in one sentence on stderr)."""
    try:
        train(_parse(arguments))
        return 0
    except UserError as error:
        print(f"xtrain.train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("xtrain.train: interrupted; the last checkpoint is intact", file=sys.stderr)
        return 130


def _parse(arguments: list[str] | None) -> TrainConfig:
    return tyro.cli(TrainConfig, prog="python -m xtrain.train", description=__doc__, args=arguments)


if __name__ == "__main__":
    sys.exit(main())
