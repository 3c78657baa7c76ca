"""A whole run: text, model, the loop around the training step, and the work between steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from .. import blas
from ..cli import Output
from ..config import ModelConfig, ResolvedConfig, TrainConfig, resolve
from ..console import PrintableConsole
from ..data.dataset import Corpus, prepare
from ..data.sources import from_standard_input
from ..device import cache_folder, device_name, resolve_device, to_numpy
from ..errors import UserError
from ..formats.huggingface import dropout_of, read_config
from ..formats.saved_runs import Saved, model_folder
from ..kernels.runtime.launch import set_debug
from ..nn.fp8 import Fp8Scales, check_tokens
from ..nn.model import Transformer, choose_precision
from . import checkpoint, out_of_memory, run_folder
from .checkpoint_writer import CheckpointWriter
from .flops import flops_per_token, peak_flops
from .model_summary import describe, parameter_table
from .nonfinite import unsound
from .phase_timer import PhaseTimer, memory_bytes
from .preemption import StopRequest, parse_seconds
from .run import Run, StepResult
from .run_log import NullRunLog, RunLog, StepNumbers
from .single_process import SINGLE_PROCESS, SingleProcess
from .summary import print_summary
from .trackers import check_installed

GPU_READ_EVERY = 10  # steps whose numbers are read together: reading waits for the GPU
LAYER_RECORDS = 100  # lines in layers.jsonl over a run
CHECKPOINT_BYTES = 12  # per parameter: weight and two moments in float32
EMA_BYTES = 4  # more with a moving average
Evaluation = Callable[[], Iterator[dict[str, float]]]  # of all tasks -> the metrics of each


@dataclass(frozen=True)
class Due:
    """What is due after a step."""

    layers: bool
    validation: bool
    tasks: bool
    sample: bool
    checkpoint: bool

    def __bool__(self) -> bool:
        return self.layers or self.validation or self.tasks or self.sample or self.checkpoint


class Loop:
    """Train until the last step, or until `stop` requests it; log, validate, evaluate, sample and save in between.

    evaluation: of --eval-tasks, on rank 0.
    """

    def __init__(
        self,
        run: Run,
        log: RunLog | NullRunLog,
        stop: StopRequest,
        writer: CheckpointWriter,
        evaluation: Evaluation | None = None,
    ):
        self.run, self.log, self.stop, self.writer = run, log, stop, writer
        self.evaluation = evaluation
        c, gpu = run.config, run.model.device == "gpu"
        self.stopping = False  # stop early: no time for anything but the checkpoint
        self.unread: list[StepResult] = []  # steps whose numbers are still on the device
        self.since = 0.0  # when the first of them began
        self.flops_per_token = flops_per_token(run.model, run.document_tokens)
        self.peak_flops = peak_flops(run.model.precision) if gpu else None
        self.read_every = GPU_READ_EVERY if gpu else 1
        self.layers_every = max(self.read_every, c.steps // LAYER_RECORDS)
        self.phase_timer = run.phase_timer = PhaseTimer(run.model.device, gpu and c.graph)

    def __call__(self) -> None:
        run, c = self.run, self.run.config
        last = c.steps if c.stop_at is None else min(c.steps, c.stop_at)
        if run.done >= last and run.ranks.rank == 0:  # killed after its last checkpoint
            checkpoint.prune(self.writer.run, run.done, c.keep)
        self.stop.begin(_checkpoint_bytes(run))
        self.since = time.perf_counter()
        while run.done < last and not self.stopping:
            self.unread.append(run.step())
            self.stopping = self.stop_requested()
            due = self.due(last)
            if due or len(self.unread) == self.read_every:
                self.read_numbers()
                self.between_steps(due)
                self.since = time.perf_counter()
        self.wait_for_writer()
        run.ranks.on_rank_0(self.writer.finish)

    def stop_requested(self) -> bool:
        """Has any rank received a stop request? Raises, on every rank, an error of the checkpoint writer."""
        flags = [self.stop.after_step(self.writer.seconds), self.writer.failed]
        requested, failed = self.run.ranks.sum([float(flag) for flag in flags])
        if failed:
            self.run.ranks.on_rank_0(self.writer.check)
        if requested:
            self.stop.reason = self.stop.reason or "requested on another rank"
        return bool(requested)

    def due(self, last: int) -> Due:
        """What is due after the step just made. last: the step at which this process ends."""
        c, done = self.run.config, self.run.done
        end = done == c.steps
        return Due(
            layers=end or done % self.layers_every == 0,
            validation=end or done % c.eval_every == 0,
            tasks=bool(c.eval_tasks) and (end or done % (c.eval_tasks_every or c.eval_every) == 0),
            sample=end or done % c.sample_every == 0,
            checkpoint=end or done % c.save_every == 0 or done == last or self.stopping,
        )

    def between_steps(self, due: Due) -> None:
        """Do what is due."""
        run, log = self.run, self.log
        if due.layers:
            log.layers(run.done, run.layer_norms())
        if due.validation:
            run.report_validation(log)
        if due.tasks:
            self.evaluate_tasks()
        if due.sample:
            run.beat()
            log.sample(run.done, run.sample() if run.ranks.rank == 0 else "")
        if due.checkpoint:
            self.wait_for_writer()
            run.ranks.on_rank_0(self.writer.check)
            afterwards = (lambda: None) if self.stopping else log.picture
            self.writer.save(lambda: run.snapshot(log.lengths()), log.flush, afterwards)

    def evaluate_tasks(self) -> None:
        """Evaluate on --eval-tasks, on rank 0. The others wait for one task at a time, so that no watchdog reports a hang."""
        tasks = self.evaluation() if self.evaluation else iter(())
        found: dict[str, float] = {}
        self.run.beat()
        while self.run.ranks.any(bool(metrics := next(tasks, {}))):
            found |= metrics
            self.run.beat()
        if found:
            self.log.tasks(self.run.done, found)

    def wait_for_writer(self) -> None:
        """Wait until no checkpoint is being written. All ranks wait together, so that no watchdog reports a hang."""
        while self.run.ranks.any(self.writer.busy(0.1)):
            self.run.beat()

    def read_numbers(self) -> None:
        """Wait for the steps so far and log their numbers. Raises UserError after max_skips skipped steps in a row."""
        run, c, steps = self.run, self.run.config, self.unread
        norms = [float(to_numpy(step.grad_norm)[0]) for step in steps]
        losses = [float(to_numpy(step.loss)[0]) for step in steps]
        counts = [to_numpy(step.fp8_counts) for step in steps if step.fp8_counts is not None]
        n = len(steps)
        bad_norms = [float(not np.isfinite(norm)) for norm in norms]
        sums = run.ranks.sum(
            losses + bad_norms + [float(x) for counts_K in counts for x in counts_K]
        )
        counts_nK2 = np.reshape(sums[2 * n :], (n, -1, 2))
        now = time.perf_counter()
        seconds = (now - self.since) / n
        timing = self.timing(seconds, self.phase_timer.read(n))
        for i, (step, loss, norm, bad) in enumerate(zip(steps, sums[:n], norms, sums[n : 2 * n])):
            # with --dp none the norm may be finite here and not on another rank
            skipped = unsound(loss, np.nan if bad and np.isfinite(norm) else norm)
            run.skips_in_a_row_read = run.skips_in_a_row_read + 1 if skipped else 0
            run.skipped += skipped is not None
            extra = step.extra | fp8_numbers(run.model.fp8, counts_nK2[i])
            numbers = StepNumbers(step.step, loss, norm, step.lr, skipped, extra)
            self.log.step(numbers, timing, now - (n - 1 - i) * seconds)
            if run.skips_in_a_row_read == c.max_skips:
                raise UserError(
                    f"{c.max_skips} steps in a row were skipped (--max-skips), the last at step {step.step}: {skipped}. First "
                    f"value that is not finite: {run.explain(step.step)}. Resume from the last checkpoint with a smaller --lr "
                    "(--resume --allow-change lr)"
                )
        steps.clear()

    def timing(self, seconds: float, phases_ms: dict[str, float]) -> dict[str, Any]:
        """A line of timing.jsonl. seconds, phases_ms: of one step."""
        run = self.run
        speed = run.step_tokens / seconds
        flops = speed / run.ranks.world * self.flops_per_token
        return {
            "tokens_per_s": speed,
            "ms": 1e3 * seconds,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "phases_ms": phases_ms,
            "memory_bytes": memory_bytes(run.model.device),
            **run.parallel.timing(speed),
        }


def fp8_numbers(fp8: Fp8Scales | None, counts_K2: np.ndarray) -> dict[str, float]:
    """Of the numbers that a step encoded as fp8: how many were clamped, how many not finite; then the same of each kind of tensor
    that has some, as "fp8_clamped_down_proj_x". Without fp8: nothing. Ranks and micro-batches count the weights again.
    """
    if fp8 is None:
        return {}
    names = ("fp8_clamped", "fp8_nonfinite")
    numbers = dict(zip(names, counts_K2.sum(0).tolist()))
    for kind, counts_2 in zip(fp8.kinds, counts_K2.tolist()):
        suffix = kind.replace(" ", "_")
        numbers |= {f"{name}_{suffix}": x for name, x in zip(names, counts_2) if x}
    return numbers


# ----------------------------------------------------------------------------- a whole run
def train(
    config: TrainConfig,
    console: Console | None = None,
    ranks: SingleProcess = SINGLE_PROCESS,
    make_run: Callable[..., Run] = Run,
    *,
    corpus: Any = None,
    make_model: Callable[..., Transformer] | None = None,
    evaluation: Callable[[Run], Evaluation] | None = None,
    write_report: Callable[[Path, Run, Callable[[str], None]], Any],
) -> Path:
    """A whole run. -> its folder. Raises UserError on anything that the user can fix.

    make_run: a class derived from Run, with another model, optimizer, schedule, data or evaluation
    (lessons/howto/change_the_model.md).  ranks: parallel.ddp.train_parallel.  corpus: the data, if not the text of --data:
    an object with what a Corpus offers (tuning.finetune.Conversations).  make_model: in place of the function of that name, with
    its arguments.  evaluation: called with the run on rank 0 -> its evaluation on --eval-tasks.  write_report: called with
    folder, run and warn at the end on rank 0, unless the run was asked to stop early. xtrain.train.train passes both.
    """
    output = Output()
    console = console or PrintableConsole(file=cast(IO[str], output), quiet=ranks.rank > 0)
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    warn = lambda text: say(f"[yellow]warning[/]: {escape(text)}")
    with (
        StopRequest(parse_seconds(config.time_limit)) as stop,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(output.end)
        device = resolve_device(config.device)
        set_debug(config.debug)
        name = config.name
        if config.init and not config.resume:
            init = ranks.on_rank_0(lambda: model_folder(Path(config.init or ""), warn))
            config = replace(config, init=str(init))
            if dropout := ranks.on_rank_0(lambda: dropout_of(init)):
                warn(f"{dropout} of {init} is not applied: xtrain trains without dropout")
        resolved, shape = resolve(config, device == "gpu", ranks.world)
        ranks.on_rank_0(lambda: check_installed(resolved.log))
        folder = ranks.on_rank_0(lambda: run_folder.choose(resolved, name, warn))
        run_folder.check_seen(folder, ranks)
        resolved = run_folder.with_first_options(resolved, folder)
        known = _known_shape(resolved, shape, folder.saved)
        precision, obstacle = choose_precision(resolved.precision, device, known.head_dim)
        resolved = replace(resolved, precision=precision)
        if precision == "fp8":
            check_tokens(resolved.micro_batch * resolved.seq_len)
        stack.enter_context(out_of_memory.explained(resolved, shape, device))
        if device == "cpu":
            resolved = _with_blas_threads(resolved, known, folder.saved, ranks)
            stack.enter_context(blas.use_threads(resolved.blas_threads))
        if corpus is None:
            copied = lambda: from_standard_input(resolved.data, cache_folder())
            resolved = replace(resolved, data=ranks.on_rank_0(copied))
            corpus = _read_text(resolved, folder.tokenizer(resolved), ranks, console)
        shape["vocab_size"] = corpus.vocab_size
        # the model gets no name here: make_run may replace it, and the memory of the first must then be freed
        run = make_run(
            resolved,
            (make_model or _make_model)(resolved, shape, corpus, folder.saved, device, ranks.world),
            corpus,
            ranks,
        )
        # raises if there is too little text
        corpus.val_batches(1, resolved.micro_batch, resolved.seq_len)
        evaluations: list[Evaluation] = []  # one on rank 0, if there are tasks
        if resolved.eval_tasks:
            if evaluation is None:
                raise UserError("this program cannot evaluate: omit --eval-tasks")
            prepare_evaluation = evaluation
            ranks.on_rank_0(lambda: evaluations.append(prepare_evaluation(run)))
        folder = ranks.on_rank_0(lambda: run_folder.claim(folder, resolved, name, warn, stack))
        path, saved = folder.path, run_folder.check_seen(folder, ranks).saved
        _introduce(console, path, run, device, obstacle)
        left_out = getattr(corpus, "left_out", ())
        _name_left_out(
            say, left_out, ranks.on_rank_0(lambda: run_folder.write_left_out(path, left_out))
        )
        if saved:
            run.resume(saved, warn)
            say(f"resumed from {escape(str(saved.folder))}")
        ranks.on_rank_0(
            lambda: run_folder.write_config(
                path, resolved, run.model.config, corpus, device, ranks.world
            )
        )
        ranks.on_rank_0(lambda: run_folder.record_start(path, run.done, warn))
        log: RunLog | NullRunLog = NullRunLog()
        if ranks.rank == 0:
            log = RunLog(path, resolved, saved.state if saved else {}, console)
            _warn_of_little_room(run, path, warn)
        with log:
            with CheckpointWriter(path, resolved.keep, warn) as writer:
                Loop(run, log, stop, writer, *evaluations)()
            run.rest()  # a tracker of --log may take long to end: no watchdog may report a hang
        # All ranks wait for the report: a signal would end a rank that has already left, and with it the job
        ranks.on_rank_0(lambda: stop.reason or write_report(path, run, warn))
        print_summary(console, run, path, stop)
    return path


def _checkpoint_bytes(run: Run) -> int:
    per_parameter = CHECKPOINT_BYTES + (EMA_BYTES if run.config.ema else 0)
    return per_parameter * sum(math.prod(x.shape) for _, x in run.model.named_parameters())


def _warn_of_little_room(run: Run, path: Path, warn: Callable[[str], None]) -> None:
    c = run.config
    left = -(-(c.steps - run.done) // c.save_every)
    if left and (
        sentence := checkpoint.too_little_room(path, _checkpoint_bytes(run), c.keep, left)
    ):
        warn(sentence)


def _known_shape(config: ResolvedConfig, shape: dict[str, Any], saved: Saved | None) -> ModelConfig:
    """The model's shape, as far as it is known before the text is read: its vocabulary may become smaller."""
    if saved is not None and config.init is not None:
        return _saved_shape(saved)
    if config.init is not None:
        return read_config(Path(config.init))
    return ModelConfig(vocab_size=config.vocab_size, **shape)


def _saved_shape(saved: Saved) -> ModelConfig:
    names = {f.name for f in fields(ModelConfig)}
    return ModelConfig.from_dict({n: x for n, x in saved.state["options"].items() if n in names})


def _with_blas_threads(
    config: ResolvedConfig, model: ModelConfig, saved: Saved | None, ranks: SingleProcess
) -> ResolvedConfig:
    """blas_threads on a CPU: on resuming those of the checkpoint, else blas.choose_threads, the fewest of all ranks."""
    number, share = config.blas_threads, max(1, blas.cores() // ranks.local_world)
    made_on = {} if saved is None else saved.state["made_on"]
    if number is None and made_on.get("ranks") == ranks.world:
        before = made_on.get("blas_threads")
        if before is None and not blas.in_environment():
            before = share  # earlier versions took all cores, and did not record it
        number = before if type(before) is int and 0 < before <= blas.cores() else None
    rows = config.micro_batch * config.seq_len
    number = blas.choose_threads(number, rows, model.dim, model.hidden_dim, share)
    found = ranks.gather(number)
    return replace(config, blas_threads=None if None in found else min(found))


def _introduce(console: Console, path: Path, run: Run, device: str, obstacle: str) -> None:
    """Print the run's name, model, device and text. obstacle: why it is not bf16, if that would be the default."""
    corpus, model = run.corpus, run.model
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    how: str = run.config.precision
    if device == "cpu" and run.config.blas_threads:
        how += f", matrix products on {run.config.blas_threads} of {blas.cores()} cores (--blas-threads)"
    elif obstacle and device == "gpu":
        how += f" ({obstacle})"
    if model.fp8 is not None:
        how += f" ({model.fp8.coverage(model)})"
    say(f"[bold]{escape(path.name)}[/]: {describe(model.config)}, on {device_name(device)}, {how}")
    say(
        f"text: {escape(corpus.name)}, {corpus.bytes / 1e6:.1f} MB in {corpus.files} files, sha256 {corpus.sha256[:16]}, "
        f"{corpus.train_tokens:,} training tokens, {corpus.val_tokens:,} held out"
    )
    console.print(parameter_table(model))


def _name_left_out(
    say: Callable[[str], None], left_out: Sequence[str], whole_list: Path | None
) -> None:
    """Print the files of the text that are not used, or the first ones. whole_list: the file that has all."""
    if left_out:
        say(
            f"files left out: {len(left_out)}"
            + (f", all in {escape(str(whole_list))}" if whole_list else "")
        )
    for sentence in left_out[: run_folder.LEFT_OUT_SHOWN]:
        say(f"  {escape(sentence)}")


def _read_text(
    config: ResolvedConfig, tokenizer: str | None, ranks: SingleProcess, console: Console
) -> Corpus:
    """Read and tokenize the text, on rank 0 first: the others read its cache."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading the text", total=1)
        show = lambda fraction, text: progress.update(task, completed=fraction, description=text)
        read = lambda: prepare(
            config.data,
            config.vocab_size,
            tokenizer=tokenizer,
            progress=show,
            verify=config.verify_data,
            text_key=config.text_key,
            strict=config.strict_data,
        )
        return ranks.rank_0_first(read)


def _make_model(
    config: ResolvedConfig,
    shape: dict[str, Any],
    corpus: Corpus,
    saved: Saved | None,
    device: str,
    world: int,
) -> Transformer:
    """The model of a run: new, from --init, or empty in the shape of the checkpoint `saved` that will fill it."""
    options = (device, config.precision, config.recompute, world)
    change = config.change
    if config.init is None:
        model = Transformer(ModelConfig(**shape), config.seed, *options)
        model = model.changed(change) if change else model
    elif saved is None:
        model = Transformer.from_pretrained(
            config.init, device, config.precision, world=world, change=change
        )
        model.recompute = config.recompute
    else:
        model = Transformer(_saved_shape(saved), None, *options)
        model = model.changed(change) if change else model
    check_fit(model, config, corpus)
    if config.fp8_head:
        model.use_fp8_head()
    return model


def check_fit(model: Transformer, config: ResolvedConfig, corpus: Corpus) -> None:
    """Raises UserError if the model of --init does not fit the tokenizer or --seq-len."""
    if corpus.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {corpus.vocab_size} tokens, the model in {config.init} only {model.config.vocab_size}: "
            f"give the model's own with --tokenizer {config.init}/tokenizer.json"
        )
    if config.seq_len > model.config.max_seq_len:
        raise UserError(
            f"--seq-len {config.seq_len} is longer than the model's max_seq_len {model.config.max_seq_len}: choose a shorter one"
        )
