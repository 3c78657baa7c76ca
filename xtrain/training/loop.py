"""A whole run: text, model, the loop around the training step, and the work between steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress

from .. import blas
from ..cli import Output
from ..console import PrintableConsole
from ..data.dataset import Corpus, prepare
from ..device import device_name, to_numpy
from ..errors import FunctionError, UserError
from ..formats import saved_runs
from ..kernels.runtime.launch import set_debug
from ..machine import free_memory
from ..nn.fp8 import Fp8Scales
from ..nn.model import Transformer
from ..run_options import RunOptions
from . import checkpoint, out_of_memory, run_folder, start
from .checkpoint_writer import CheckpointWriter
from .flops import flops_per_token, peak_flops
from .model_summary import describe, parameter_table
from .nonfinite import unsound
from .phase_timer import PhaseTimer, memory_bytes
from .preemption import StopRequest, parse_seconds
from .progress import progress
from .run import Run, StepAbandoned, StepResult, is_own
from .run_folder import RunFolder
from .run_log import NullRunLog, RunLog, StepNumbers
from .single_device import SingleDevice
from .single_process import SingleProcess
from .start import Start
from .summary import print_summary

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
    """Train until the last step, or until `stop` requests it; log, validate, evaluate, sample and
    save in between.

    evaluation: of --eval-tasks, on rank 0.
    thread_watch: of the BLAS threads, if their number may change.
    """

    def __init__(
        self,
        run: Run,
        log: RunLog | NullRunLog,
        stop: StopRequest,
        writer: CheckpointWriter,
        evaluation: Evaluation | None = None,
        thread_watch: blas.ThreadWatch | None = None,
    ):
        self.run = run
        self.log = log
        self.stop = stop
        self.writer = writer
        self.evaluation = evaluation
        self.thread_watch = thread_watch
        c = run.config
        gpu = run.model.device == "gpu"
        run.overdue = stop.overdue
        self.saved_step = run.done  # of the newest checkpoint; 0: there is none
        self.stopping = False  # stop early: no time for anything but the checkpoint
        self.enough = False  # --patience
        self.unread: list[StepResult] = []  # steps whose numbers are still on the device
        self.since = 0.0  # when the first of them began
        self.flops_per_token = flops_per_token(run.model, run.document_tokens)
        self.peak_flops = None
        if gpu:
            self.peak_flops = peak_flops(run.model.precision)
        self.read_every = 1
        if gpu:
            self.read_every = GPU_READ_EVERY
        self.layers_every = max(self.read_every, c.steps // LAYER_RECORDS)
        self.phase_timer = run.phase_timer = PhaseTimer(run.model.device, gpu and c.graph)

    def __call__(self) -> None:
        run = self.run
        c = self.run.config
        if c.stop_at is None:
            last = c.steps
        else:
            last = min(c.steps, c.stop_at)
        if run.done >= last and run.ranks.rank == 0:  # killed after its last checkpoint
            checkpoint.prune(self.writer.run, run.done, c.keep)
        self.stop.begin(_checkpoint_bytes(run))
        self.since = time.perf_counter()
        while run.done < last and not self.stopping and not self.enough:
            try:
                self.step(last)
            except StepAbandoned as error:
                self.end_early(error)
            except FunctionError as error:
                if run.ranks.world > 1:  # the others wait for this rank's part of the step
                    raise
                self.end_early(StepAbandoned(str(error)))
        self.wait_for_writer()
        run.ranks.on_rank_0(self.writer.finish)

    def step(self, last: int) -> None:
        """Make a step, and what is due after it. last: the step at which this process ends."""
        self.unread.append(self.made_step())
        self.stopping = self.stop_requested()
        due = self.due(last)
        if due or len(self.unread) == self.read_every:
            self.read_numbers()
            self.between_steps(due)
            self.since = time.perf_counter()

    def made_step(self) -> StepResult:
        """Return the result of a step. If it fails before it has changed the weights, the run is in
        the state after the step before."""
        run = self.run
        position = run.loader.state_dict()
        t = run.optimizer.t
        try:
            return run.step()
        except (FunctionError, StepAbandoned):
            run.loader.load_state_dict(position)
            run.optimizer.t = t
            raise

    def end_early(self, error: StepAbandoned) -> None:
        """Write a checkpoint of the last step. Then raise the error, unless the run was only to
        stop."""
        run = self.run
        if error.interrupted:
            self.stopping = True
            self.stop.reason = self.stop.reason or "requested on another rank"
        if self.unread:
            self.read_numbers()
        if run.done != self.saved_step:
            self.save()
        if error.interrupted and run.done:
            return
        self.wait_for_writer()
        run.ranks.on_rank_0(self.writer.finish)
        if error.interrupted:  # there is nothing to save
            raise KeyboardInterrupt
        raise error

    def stop_requested(self) -> bool:
        """Return True if any rank has received a stop request. Raises, on every rank, an error of
        the checkpoint writer."""
        flags = [self.stop.after_step(self.writer.seconds), self.writer.failed]
        requested, failed = self.run.ranks.sum([float(flag) for flag in flags])
        if failed:
            self.run.ranks.on_rank_0(self.writer.check)
        if requested:
            self.stop.reason = self.stop.reason or "requested on another rank"
        return bool(requested)

    def due(self, last: int) -> Due:
        """Return what is due after the step just made. last: the step at which this process
        ends."""
        c, done = self.run.config, self.run.done
        end = done == c.steps
        is_due = lambda every: every > 0 and (end or done % every == 0)
        tasks_every = c.eval_tasks_every
        if tasks_every is None:
            tasks_every = c.eval_every
        return Due(
            layers=is_due(self.layers_every),
            validation=is_due(c.eval_every),
            tasks=bool(c.eval_tasks) and (end or is_due(tasks_every)),
            sample=is_due(c.sample_every),
            checkpoint=is_due(c.save_every) or done == last or self.stopping,
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
        is_best = (due.validation or due.tasks) and self.judge(due)
        if due.sample:
            run.parallel.report_progress()
            takes_part = run.ranks.rank == 0 or run.parallel.zero == 3
            log.sample(run.done, run.sample() if takes_part else "")
        if due.checkpoint or is_best or self.enough:
            self.save()

    def judge(self, due: Due) -> bool:
        """Return whether --best names a metric that has never been better. With --patience, decide
        whether the run ends. Raises UserError if there is no such metric."""
        run = self.run
        c = run.config
        if c.best is None and c.patience is None:
            return False
        if c.best and c.eval_tasks and not due.tasks:  # it may be one of the tasks
            run.val_loss = None
            return False
        name = c.best or run.metric
        try:
            best = run.ranks.on_rank_0(lambda: progress(self.log.metrics, name, run.done))
        except UserError:  # the steps so far are not to blame
            self.save()
            raise
        self.enough = bool(c.patience) and best.since_best >= c.patience
        if self.enough:
            run.ended = f"{best.since_best} measurements without a better {name}"
        if c.best is None:
            return False
        run.val_loss = None
        if best.score is not None:
            run.val_loss = run.done, best.score
        return best.since_best == 0 and best.score is not None

    def save(self) -> None:
        """Begin to write a checkpoint."""
        run, log = self.run, self.log
        self.wait_for_writer()
        run.ranks.on_rank_0(self.writer.check)
        if self.stopping:
            afterwards = lambda: None
        else:
            afterwards = log.picture
        self.saved_step = run.done
        self.writer.save(lambda: run.snapshot(log.lengths()), log.flush, afterwards)

    def evaluate_tasks(self) -> None:
        """Evaluate on --eval-tasks, on rank 0. The others wait for one task at a time, so that no
        watchdog reports a hang."""
        if self.evaluation:
            tasks = self.evaluation()
        else:
            tasks = iter(())
        results: dict[str, float] = {}
        self.run.parallel.report_progress()
        while self.run.ranks.any(bool(metrics := next(tasks, {}))):
            results |= metrics
            self.run.parallel.report_progress()
        if results:
            self.log.tasks(self.run.done, results)

    def wait_for_writer(self) -> None:
        """Wait until no checkpoint is being written. All ranks wait together, so that no watchdog
        reports a hang."""
        while self.run.ranks.any(self.writer.busy(0.1)):
            self.run.parallel.report_progress()

    def read_numbers(self) -> None:
        """Wait for the steps so far and log their numbers. Raises UserError after max_skips skipped
        steps in a row."""
        run = self.run
        c = self.run.config
        steps = self.unread
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
        watch = self.thread_watch
        if watch is not None and watch.after_step(seconds / run.step_tokens):
            self.log.warn(
                f"matrix products now use {watch.number} of {blas.cores()} cores, which is faster "
                "at the moment: give --blas-threads for a number that stays"
            )
        for i, (step, loss, norm, bad) in enumerate(zip(steps, sums[:n], norms, sums[n : 2 * n])):
            # with --dp none the norm may be finite here and not on another rank
            skipped = unsound(loss, np.nan if bad and np.isfinite(norm) else norm)
            if skipped:
                run.skips_in_a_row_read = run.skips_in_a_row_read + 1
            else:
                run.skips_in_a_row_read = 0
            run.skipped += skipped is not None
            extra = step.extra | fp8_numbers(run.model.fp8, counts_nK2[i])
            numbers = StepNumbers(step.step, loss, norm, step.lr, skipped, extra)
            self.log.step(numbers, timing, now - (n - 1 - i) * seconds)
            if step.rollouts:
                self.log.rollouts(step.rollouts)
            if run.skips_in_a_row_read == c.max_skips:
                raise UserError(
                    f"{c.max_skips} steps in a row were skipped (--max-skips), the last at step "
                    f"{step.step}: {skipped}. First "
                    f"value that is not finite: {run.explain(step.step)}. Resume from the last "
                    "checkpoint with a smaller --lr (--resume --allow-change lr)"
                )
        steps.clear()

    def timing(self, seconds: float, phases_ms: dict[str, float]) -> dict[str, Any]:
        """Return a line of timing.jsonl. seconds, phases_ms: of one step."""
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
    """Count the numbers of a step's fp8 codes that were clamped, and those not finite; then
    the same of each kind of tensor that has some, as "fp8_clamped_down_proj_x". Without fp8:
    nothing. Ranks and micro-batches count the weights again.
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
    config: RunOptions,
    console: Console | None = None,
    parallel: SingleDevice | None = None,
    make_run: Callable[..., Run] = Run,
    *,
    corpus: Any = None,
    make_model: Callable[..., Transformer] = start.make_model,
    evaluation: Callable[[Run], Evaluation] | None = None,
    write_report: Callable[[Path, Run, Callable[[str], None]], Any],
) -> Path:
    """Make a whole run and return its folder. Raises UserError on anything that the user can fix.

    parallel: a SingleDevice, the default, or a DataParallel; then every rank must call this.
    make_run: a class derived from Run, with another model, optimizer, schedule, data or evaluation
        (lessons/howto/change_the_model.md).
    corpus: the data, if not the text of --data: an object with what a Corpus offers
    (tuning.finetune.Conversations).
    make_model: in place of the function of that name, with its arguments.
    evaluation: called with the run on rank 0, returns its evaluation on --eval-tasks.
    write_report: called with folder, run and warn at the end on rank 0, unless the run was asked to
    stop early. xtrain.train.train passes the last two.
    """
    parallel = parallel or SingleDevice()
    ranks = parallel.ranks
    output = Output()
    console = console or PrintableConsole(file=cast(IO[str], output), quiet=ranks.rank > 0)
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    warn = lambda text: say(f"[yellow]warning[/]: {escape(text)}")
    with (
        StopRequest(parse_seconds(config.time_limit)) as stop,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(output.end)
        parallel.begin(config)
        set_debug(config.debug)
        begin = start.decide(config, ranks, corpus is None, warn)
        c = begin.config
        stack.enter_context(out_of_memory.explained(c, begin.model, begin.device, ranks))
        if begin.device == "cpu":
            stack.enter_context(blas.use_threads(c.blas_threads))
        if corpus is None:
            corpus = _read_text(begin, ranks, console)
        parallel.check_data(corpus)
        if c.eval_every:
            corpus.val_batches(1, c.micro_batch, c.seq_len)  # raises if there is too little text
        shape = begin.shape_with(corpus)
        if is_own(make_run) and not c.change:  # the plan knows no other model
            out_of_memory.check_fits(c, shape, begin.device, ranks)
        stack.enter_context(out_of_memory.explained(c, shape, begin.device, ranks))
        # the model gets no name here: make_run may replace it, and the memory of the first must
        # then be freed
        run = make_run(c, make_model(begin, corpus, ranks.world), corpus, parallel)
        stack.enter_context(parallel.watch(run))
        evaluate = _prepare_evaluation(run, evaluation)
        claimed = lambda: run_folder.claim(begin.folder, c, begin.name, warn, stack)
        folder = run_folder.check_seen(ranks.on_rank_0(claimed), ranks)
        stack.enter_context(_saying_what_is_saved(folder.path))
        _introduce(console, folder.path, run, begin)
        if folder.saved:
            run.resume(folder.saved, warn)
            say(f"resumed from {escape(str(folder.saved.folder))}")
        _record(run, folder.path, begin.device, warn)
        _loop(run, folder, stop, console, warn, evaluate, begin.thread_watch)
        # All ranks wait for the report: a signal would end a rank that has already left, and with
        # it the job
        ranks.on_rank_0(lambda: stop.reason or write_report(folder.path, run, warn))
        print_summary(console, run, folder.path, stop)
    if ranks.world > 1:  # not after an error: NCCL might wait for a rank that has ended
        run.close()
    return folder.path


@contextlib.contextmanager
def _saying_what_is_saved(folder: Path) -> Iterator[None]:
    """A KeyboardInterrupt inside gets a text: which checkpoint the run has."""
    try:
        yield
    except KeyboardInterrupt:
        saved = saved_runs.folders(folder)
        what = "no checkpoint was written yet"
        if saved:
            what = f"the last checkpoint is intact: {saved[-1]}"
        raise KeyboardInterrupt(f"interrupted; {what}") from None


def _prepare_evaluation(
    run: Run, evaluation: Callable[[Run], Evaluation] | None
) -> Evaluation | None:
    """Return the evaluation on --eval-tasks, on rank 0. Raises UserError."""
    if not run.config.eval_tasks:
        return None
    if evaluation is None:
        raise UserError("this program cannot evaluate: omit --eval-tasks")
    prepared: list[Evaluation] = []  # not broadcast
    run.ranks.on_rank_0(lambda: prepared.append(evaluation(run)))
    if prepared:
        return prepared[0]
    return None


def _record(run: Run, folder: Path, device: str, warn: Callable[[str], None]) -> None:
    """Write config.json and a line of starts.jsonl, on rank 0."""
    ranks = run.ranks
    options = (run.config, run.model.config, run.corpus, device, ranks.world)
    ranks.on_rank_0(lambda: run_folder.write_config(folder, *options))
    ranks.on_rank_0(lambda: run_folder.record_start(folder, run.done, warn))


def _loop(
    run: Run,
    folder: RunFolder,
    stop: StopRequest,
    console: Console,
    warn: Callable[[str], None],
    evaluate: Evaluation | None,
    thread_watch: blas.ThreadWatch | None,
) -> None:
    """Make the steps of the run. Rank 0 writes the log and the checkpoints."""
    log: RunLog | NullRunLog = NullRunLog()
    if run.ranks.rank == 0:
        if folder.saved:
            state = folder.saved.state
        else:
            state = {}
        log = RunLog(folder.path, run.config, state, console)
        _warn_of_little_room(run, folder.path, warn)
    with log:
        with CheckpointWriter(folder.path, run.config.keep, warn) as writer:
            Loop(run, log, stop, writer, evaluate, thread_watch)()
        # a tracker of --log may take long to end: no watchdog may report a hang
        run.parallel.stop_watchdog()


def _checkpoint_bytes(run: Run) -> int:
    per_parameter = CHECKPOINT_BYTES + (EMA_BYTES if run.config.ema else 0)
    return per_parameter * sum(math.prod(x.shape) for _, x in run.model.named_parameters())


def _warn_of_little_room(run: Run, path: Path, warn: Callable[[str], None]) -> None:
    """Warn if a checkpoint has too little room on the disk, or in the memory of this machine."""
    c = run.config
    needed = _checkpoint_bytes(run)
    left = -(-(c.steps - run.done) // (c.save_every or c.steps))
    if left and (sentence := checkpoint.too_little_room(path, needed, c.keep, left)):
        warn(sentence)
    free = free_memory()
    if left and free is not None and free < needed:
        warn(
            f"a checkpoint is copied to the memory of this machine before it is written, "
            f"{needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free: the first one may end the run, "
            "make room"
        )


def _introduce(console: Console, path: Path, run: Run, begin: Start) -> None:
    """Print the run's name, model, device and text, and the files that are left out."""
    corpus = run.corpus
    model = run.model
    device = begin.device
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)
    how: str = run.config.precision
    if run.ranks.world > 1:
        how = f"{run.ranks.world} ranks, {how}"
    if device == "cpu" and run.config.blas_threads:
        threads = f"{run.config.blas_threads} of {blas.cores()} cores"
        how += f", matrix products on {threads} (--blas-threads)"
    elif begin.obstacle and device == "gpu":
        how += f" ({begin.obstacle})"
    if model.fp8 is not None:
        how += f" ({model.fp8.coverage(model)})"
    say(
        f"[bold]{escape(path.name)}[/]: {describe(model.saved_config)}, on {device_name(device)}, {how}"
    )
    files = "1 file" if corpus.files == 1 else f"{corpus.files} files"
    say(
        f"text: {escape(corpus.name)}, {decimal(corpus.bytes)} in {files}, "
        f"sha256 {corpus.sha256[:16]}, "
        f"{corpus.train_tokens:,} training tokens, {corpus.val_tokens:,} held out"
    )
    console.print(parameter_table(model))
    left_out = getattr(corpus, "left_out", ())
    whole_list = run.ranks.on_rank_0(lambda: run_folder.write_left_out(path, left_out))
    if left_out:
        where = ""
        if whole_list:
            where = f", all in {escape(str(whole_list))}"
        say(f"files left out: {len(left_out)}{where}")
    for sentence in left_out[: run_folder.LEFT_OUT_SHOWN]:
        say(f"  {escape(sentence)}")


def _read_text(begin: Start, ranks: SingleProcess, console: Console) -> Corpus:
    """Read and tokenize the text, on rank 0 first: the others read its cache."""
    config = begin.config
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading the text", total=1)
        show = lambda fraction, text: progress.update(task, completed=fraction, description=text)
        read = lambda: prepare(
            config.data,
            config.vocab_size,
            tokenizer=begin.tokenizer,
            progress=show,
            verify=config.verify_data,
            text_key=config.text_key,
            strict=config.strict_data,
        )
        return ranks.rank_0_first(read)
