"""Learning from preferences: the options, the data as a Run reads them, and the run.

The losses are in preference_losses.py. Those with a reference need the log-probabilities of each
answer by the model at the start:

new adapters (--lora)   the same model without the adapters, in every step
otherwise               computed once before the first step. Every checkpoint holds them, so a run
                        that resumes needs no other model, and its loss has the same bits
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console

from ..cli import say
from ..data.records import short_name
from ..device import Array, to_device, to_numpy
from ..errors import FunctionError, UserError
from ..formats.adapters import is_adapter
from ..formats.saved_runs import Saved
from ..kernels.cross_entropy import IGNORE
from ..nn import functional as F
from ..nn.autograd import Tensor, no_grad
from ..options import described, find_function, one_line
from ..run_options import RESUME_KEYS
from ..training.run import StepResult, each_array
from ..training.single_device import SingleDevice
from ..training.single_process import SingleProcess
from .corpus import LeftOut, fitting, hold_out
from .examples import Example
from .finetune import ExampleOptions, FinetuneRun, show_examples, train_from
from .finetune import prepare as prepare_examples
from .own_functions import copied, numbers
from .preference_losses import LOSSES, SMOOTHED, WITHOUT_REFERENCE, Answers, Loss, Losses
from .preferences import PairBatch, Preferences, has_conversations, mismatched, read_rows
from .templates import chosen_texts, with_default_template

BETA = 0.1
BETAS = {"simpo": 2.0}
KEYS = (
    "loss", "beta", "label_smoothing", "target_margin", "desirable_weight", "undesirable_weight",
)  # fmt: skip
SUMS = (
    "loss", "rows", "right", "chosen", "chosen_reward", "chosen_logprob", "rejected",
    "rejected_reward", "rejected_logprob",
)  # fmt: skip


@dataclass(frozen=True)
class PreferConfig(ExampleOptions):
    """One run that learns preferences, of the model in --init."""

    data: tuple[str, ...] = ()
    """.jsonl files, with "prompt", "chosen" and "rejected" in every line, for kto with "prompt",
    "completion" and "label", too"""
    # dpo, ipo, simpo, orpo or kto, or MODULE:FUNCTION, a loss as in tuning/preference_losses.py
    loss: str = "dpo"
    # how much a difference of log-probabilities counts: the larger, the closer the model stays to
    # the reference; none: 0.1, with simpo 2
    beta: float | None = None
    # dpo, simpo: the share of pairs that are assumed to be in the wrong order
    label_smoothing: float = 0.0
    target_margin: float = 1.0  # simpo: gamma, by which the rewards of a pair shall differ
    desirable_weight: float = 1.0  # kto: of the loss of a desirable answer
    undesirable_weight: float = 1.0  # kto: of the loss of another answer
    epochs: float = 1.0  # how often each row is read, without --steps
    # pairs per optimizer step, for kto answers, summed over all ranks; none: 8
    batch: int | None = None
    # peak learning rate; none: 1e-6, with --lora 1e-5
    lr: float | None = None
    # tokens of prompt and answer; none: the longest that the model accepts and the data have
    seq_len: int | None = None

    graph: ClassVar[bool] = False  # the loss is computed on the host
    fp8_head: ClassVar[bool] = False
    row_texts: ClassVar[int] = 2

    def default_name(self, gpu: bool) -> str:
        """Return the name of the run's folder if no --name is given."""
        return "prefer"

    def resume_keys(self) -> tuple[str, ...]:
        """Return those of training and KEYS."""
        return (*RESUME_KEYS, "weights", *KEYS)

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        if self.precision == "fp8":
            raise UserError(
                "--precision fp8 is not supported here, where log-probabilities are compared: "
                "choose bf16"
            )
        loss_named(self.loss)
        infinity = float("inf")
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < infinity:
                raise UserError(f"--{name.replace('_', '-')} must be positive, got {value}")
        if not 0 <= self.target_margin < infinity:
            raise UserError(f"--target-margin must not be negative, got {self.target_margin}")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"--label-smoothing must be at least 0 and below 0.5, got {self.label_smoothing}"
            )
        if self.label_smoothing and self.loss in LOSSES and self.loss not in SMOOTHED:
            raise UserError(
                f"--label-smoothing is for {' and '.join(SMOOTHED)}, not for --loss {self.loss}: "
                "leave it out"
            )

    @property
    def default_lr(self) -> float:
        """The peak learning rate without --lr."""
        if self.lora:
            return 1e-5
        return 1e-6

    def with_defaults(self) -> "PreferConfig":
        """Return the config with the beta that --loss decides."""
        if self.beta is not None:
            return self
        return replace(self, beta=BETAS.get(self.loss, BETA))


def loss_named(name: str) -> Loss:
    """Return a loss of preference_losses, or the user's. Raises UserError."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise UserError(f"--loss {name} is not known: choose {', '.join(LOSSES)}, or MODULE:FUNCTION")  # fmt: skip
    function = find_function("--loss", name, "my_loss:hinge")

    def failed(what: str) -> FunctionError:
        return FunctionError(f"--loss {name} {what}: fix the function")

    def checked(answers: Answers, options: Any) -> Losses:
        try:
            found = function(copied(answers), options)
        except (Exception, SystemExit) as error:
            raise failed(f"raised {described(error)}") from error
        if not isinstance(found, Losses):
            raise failed(f"returned {one_line(repr(found))}, not Losses")
        shape = answers.logprobs.shape
        shapes = {"losses": shape[:1], "slopes": shape, "rewards": shape}

        def array(field: str) -> np.ndarray:
            return numbers(
                getattr(found, field),
                (shapes[field],),
                lambda what: failed(f"{what}, as {field}"),
            )

        arrays = {field: array(field) for field in shapes}
        finite = [np.isfinite(x).all() for x in arrays.values()]
        if np.isfinite(answers.logprobs).all() and not all(finite):
            raise failed("returned numbers that are not finite")
        return Losses(**arrays)

    return checked


def read_preferences(config: PreferConfig, source: Path, context: int) -> Preferences:
    """Read --data and --val-data. source: the model's folder.
    context: the model's. Raises UserError."""
    c = config
    texts = chosen_texts(c, source)
    is_new_template = texts.template is None and has_conversations((*c.data, *c.val_data))
    if is_new_template:
        texts = with_default_template(texts)
    limit = min(c.seq_len or context, context)
    left_out = LeftOut()

    def read(files: tuple[str, ...]) -> list[tuple[list[Example], bool]]:
        refused = left_out.refuse if c.bad_records == "skip" else None
        options = c.loss == "kto", texts.tokenizer, texts.template, refused
        kept = []
        for answers, label in read_rows(files, *options):
            fitted = list(fitting(answers, limit, c.too_long, left_out))
            if len(fitted) == len(answers):
                kept.append((fitted, label))
        if not kept:
            raise UserError(
                f"{', '.join(files)}: no example is left: {'; '.join(left_out.sentences)}"
            )
        return kept

    train = read(c.data)
    if c.val_data:
        val = read(c.val_data)
    else:
        train, val = hold_out(train, c.val_share, "example")
    desirable = None
    if c.loss == "kto":
        splits = {"train": train, "val": val}
        desirable = {name: np.array([y for _, y in rows]) for name, rows in splits.items()}
    name = short_name(c.data)
    examples = [in_twos([x for x, _ in rows], limit) for rows in (train, val)]
    files = len(c.data) + len(c.val_data)
    skipped = sum(left_out.counts.values())
    corpus = Preferences(
        name, files, *examples, skipped, texts.tokenizer, texts.template, desirable=desirable
    )
    corpus.is_new_template = is_new_template
    corpus.reasons = left_out.sentences
    return corpus


def in_twos(rows: list[list[Example]], limit: int) -> list[Example]:
    """Return the examples of all rows; a row of one gets the answer to another prompt."""
    if len(rows[0]) == 1:
        answers = [x for (x,) in rows]
        rows = [list(row) for row in zip(answers, mismatched(answers, limit))]
    return [x for row in rows for x in row]


class PreferRun(FinetuneRun):
    """A Run on preferences.

    reference: {"train": (rows, 2) float64, "val": the same}, the log-probabilities of the texts
        before training; None if they are computed without adapters, or not needed.
    sums: of SUMS, one array for each micro-batch of the step.
    """

    config: Any
    model: Any
    loader: Any
    command = "prefer"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        c = self.config
        self.loss_of = loss_named(c.loss)
        self.has_reference = c.loss not in WITHOUT_REFERENCE
        new = c.lora > 0 and not (c.init and is_adapter(Path(c.init)))
        self.new_adapters = new and c.lora_init != "pissa"  # which changes the frozen model
        self.reference: dict[str, np.ndarray] | None = None
        self.sums: list[np.ndarray] = []
        self.kl = 0.0
        self.tokens = 0  # of the batch, of all ranks

    @property
    def step_tokens(self) -> int:
        return self.tokens

    # ------------------------------------------------------------------------- one step
    def next_batch(self) -> PairBatch:
        """Return this rank's rows of the next batch, with the numbers of the reference."""
        if self.has_reference and not self.new_adapters and self.reference is None:
            self.reference = self.reference_of_all()
        batch = self.with_constants("train", self.loader.next_batch())
        self.tokens = batch.ids.size * self.ranks.world
        return batch

    def step(self) -> StepResult:
        """Make one optimizer step; its result has the numbers of the pairs."""
        result = super().step()
        return replace(result, extra=self.numbers())

    def train_step(self, hyper: Array, inv_count: Array, batch: PairBatch) -> tuple[Array, Array]:
        self.sums = []
        return super().train_step(hyper, inv_count, batch)

    def loss(self, batch: PairBatch, inv_count: Array | None = None) -> Tensor:
        """Return the loss of some rows: their share of the mean over the whole batch."""
        logprobs = self.logprobs(batch)
        host = each_array(batch, to_numpy)
        counted = host.targets != IGNORE
        kl = 0.0
        if host.kl is not None:
            kl = float(host.kl[0])
        sums = answer_sums(to_numpy(logprobs.data), counted)
        answers = Answers(sums, host.reference, counted.sum(-1), host.desirable, kl)
        found = self.loss_of(answers, self.config)
        self.sums.append(sums_of(answers, found, self.config.beta))
        share = 1 / self.config.batch
        slopes = share * found.slopes[..., None] * counted
        gradient = slopes.astype(np.float32).reshape(logprobs.shape)
        value = share * found.losses.sum()
        return F.with_gradient(logprobs, value, to_device(gradient, self.model.device))

    def logprobs(self, batch: PairBatch) -> Tensor:
        """Return the log-probability of each token, (B K, T), NaN where none is trained."""
        longest = batch.ids.shape[-1]
        shape = -1, longest
        return self.model.logprobs(batch.ids.reshape(shape), batch.targets.reshape(shape))

    # ------------------------------------------------------------------------- constants of a step
    def with_constants(self, split: str, batch: PairBatch) -> PairBatch:
        """Compute what has no gradient: the log-probabilities of the reference; for kto the KL,
        after which only the answers remain. Every rank must call it."""
        reference = np.zeros(batch.ids.shape[:2])
        if self.reference is not None:
            reference = self.reference[split][batch.rows]
        elif self.has_reference:
            with self.model.without_adapters():
                reference = self.scores(batch)
        if batch.desirable is None:
            return batch._replace(reference=reference)
        others = batch._replace(ids=batch.ids[:, 1:], targets=batch.targets[:, 1:])
        ratios = self.scores(others)[:, 0] - reference[:, 1]
        total, rows = self.ranks.sum([float(ratios.sum()), float(len(ratios))])
        self.kl = max(0.0, total / rows)
        return batch._replace(
            ids=batch.ids[:, :1],
            targets=batch.targets[:, :1],
            reference=reference[:, :1],
            kl=np.full(len(ratios), self.kl),
        )

    @no_grad()
    def scores(self, batch: PairBatch) -> np.ndarray:
        """Return the log-probability of each text by the model now, (B, K) float64."""
        found = [np.zeros((0, batch.ids.shape[1]))]
        for part, _ in self.micro_batches(batch):
            self.parallel.report_progress()
            found.append(answer_sums(to_numpy(self.logprobs(part).data), part.targets != IGNORE))
        return np.concatenate(found)

    def reference_of_all(self) -> dict[str, np.ndarray]:
        """Return the log-probabilities of all texts by the model now. Every rank must call it."""
        found = {}
        ranks = self.ranks
        rows = {"train": len(self.corpus.train) // 2, "val": len(self.corpus.val) // 2}
        if ranks.rank == 0:
            say(f"xtrain.prefer: log-probabilities of the reference, {sum(rows.values()):,} rows")
        for split, n in rows.items():
            own = range(ranks.rank, n, ranks.world)
            step = self.config.micro_batch
            parts = [np.zeros((0, 2))]
            for first in range(0, len(own), step):
                chosen = own[first : first + step]
                parts.append(self.scores(self.corpus.batch(split, chosen)))
            whole = np.zeros((n, 2))
            for rank, part in enumerate(ranks.gather(np.concatenate(parts))):
                whole[rank :: ranks.world] = part
            found[split] = whole
        return found

    # ------------------------------------------------------------------------- measurements
    def numbers(self) -> dict[str, float]:
        """Return means over the rows of self.sums, of all ranks, without the loss."""
        total = dict(zip(SUMS, self.ranks.sum(np.sum(self.sums, 0).tolist())))
        kl = {}
        if self.corpus.desirable:
            kl = {"kl": self.kl}
        return {
            "reward_chosen": ratio(total["chosen_reward"], total["chosen"]),
            "reward_rejected": ratio(total["rejected_reward"], total["rejected"]),
            "margin": ratio(total["chosen_reward"], total["chosen"])
            - ratio(total["rejected_reward"], total["rejected"]),
            "accuracy": ratio(total["right"], total["rows"]),
            "logprob_chosen": ratio(total["chosen_logprob"], total["chosen"]),
            "logprob_rejected": ratio(total["rejected_logprob"], total["rejected"]),
        } | kl

    @no_grad()
    def report_validation(self, log: Any) -> None:
        """Log the loss and the numbers of the rows that are held out."""
        c = self.config
        share = c.batch // self.ranks.world
        own = slice(share * self.ranks.rank, share * (self.ranks.rank + 1))
        self.sums = [np.zeros(len(SUMS))]
        for batch in self.corpus.val_pairs(c.eval_batches, c.batch):
            batch = self.with_constants("val", each_array(batch, lambda x: x[own]))
            for part, _ in self.micro_batches(batch):
                self.parallel.report_progress()
                self.loss(part)
        total, rows = self.ranks.sum(np.sum(self.sums, 0).tolist()[:2])
        loss = total / rows
        self.val_loss = self.done, loss
        numbers = {f"val_{name}": x for name, x in self.numbers().items()}
        sentence = (
            f"validation loss {loss:.4f}, margin {numbers['val_margin']:.4f}, "
            f"{numbers['val_accuracy']:.0%} in the right order"
        )
        log.measured(self.done, {"val_loss": loss, **numbers}, sentence)

    # ------------------------------------------------------------------------- saving and resuming
    def _state(self, log_lengths: dict[str, int]) -> dict[str, Any]:
        state = super()._state(log_lengths)
        if self.reference is not None:
            state["reference"] = {name: x.tolist() for name, x in self.reference.items()}
        return state

    def resume(self, saved: Saved, warn: Callable[[str], None] = lambda sentence: None) -> None:
        """Continue from a checkpoint. Raises UserError as Run.resume, and if the data are others
        than those whose reference it holds."""
        super().resume(saved, warn)
        reference = saved.state.get("reference")
        if reference is None:
            return
        if saved.state["options"]["data"] != self.corpus.sha256:
            raise UserError(
                f"cannot resume {saved.folder}: its log-probabilities of the reference belong to "
                "other data: give the same --data, or start a new run with --init"
            )
        self.reference = {name: np.array(x) for name, x in reference.items()}


def answer_sums(logprobs: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Add up the log-probabilities of each answer, in float64. logprobs: (B K, T).
    counted: (B, K, T) bool, which tokens are its."""
    values = logprobs.reshape(counted.shape)
    return np.where(counted, values, 0).sum(-1, dtype=np.float64)


def sums_of(x: Answers, found: Losses, beta: float) -> np.ndarray:
    """Return the sums of SUMS over the rows of a micro-batch."""
    if x.desirable is None:
        chosen = np.broadcast_to([True, False], x.logprobs.shape)
        right = found.rewards[:, 0] > found.rewards[:, 1]
    else:
        chosen = x.desirable[:, None]
        right = (found.rewards[:, 0] > beta * x.kl) == x.desirable
    sums = [found.losses.sum(), len(x.logprobs), right.sum()]
    for which in (chosen, ~chosen):
        sums += [which.sum(), found.rewards[which].sum(), x.logprobs[which].sum()]
    return np.array(sums, float)


def ratio(total: float, n: float) -> float:
    """Return total / n, NaN without any."""
    if not n:
        return float("nan")
    return total / n


def prepare(config: PreferConfig, ranks: SingleProcess) -> tuple[PreferConfig, Any]:
    """Return the config with every option that the data decide, and the data. Raises UserError, on
    every rank."""
    return prepare_examples(config.with_defaults(), ranks, read_preferences)


def show_rows(config: PreferConfig, ranks: SingleProcess) -> None:
    """Print the first --show texts, as finetune.show_examples does. Raises UserError."""
    show_examples(config.with_defaults(), ranks, read_preferences)


def prefer(
    config: PreferConfig,
    console: Console | None = None,
    parallel: SingleDevice | None = None,
    **outside: Any,
) -> Path:
    """Make a whole run, with checkpoints and its report, and return its folder. Raises UserError.

    parallel, outside: as of training.loop.train.
    """
    parallel = parallel or SingleDevice()
    config, corpus = prepare(config, parallel.ranks)
    return train_from(config, console, parallel, PreferRun, corpus=corpus, **outside)
