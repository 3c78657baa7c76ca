"""The options that the commands of training share, one small dataclass for each purpose.

A command has those that apply to it: config.TrainConfig, tuning.finetune.FinetuneConfig,
reinforcement.reinforce.ReinforceConfig.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from .errors import UserError

# Options that determine the numbers: a resumed run must have the same values, unless --allow-change
# names them. The same holds for every field of ModelConfig, the text ("data") and the tokenizer.
# (steps: where the learning-rate schedule ends.)
RESUME_KEYS = (
    "steps", "batch", "micro_batch", "seq_len", "lr", "min_lr_ratio", "warmup", "weight_decay",
    "beta1", "beta2", "eps", "clip", "seed", "precision", "grad_comm", "optimizer", "schedule",
    "decay_fraction", "decay_shape", "ema", "change", "fp8_head", "balance_loss", "router_z_loss",
    "expert_bias_rate",
)  # fmt: skip
COUNTS = (
    "steps", "batch", "micro_batch", "eval_batches", "eval_items", "stop_at", "max_skips", "blas_threads", "patience",
)  # fmt: skip
INTERVALS = ("eval_every", "eval_tasks_every", "sample_every", "save_every")  # steps; 0: never
# Options of a run that its config.json does not decide: how a process ends, where the run is;
# blas_threads is in the checkpoint.
NOT_STORED = (
    "resume", "allow_change", "stop_at", "time_limit", "debug", "verify_data", "out", "name",
    "blas_threads",
)  # fmt: skip
TRACKERS = ("wandb", "trackio", "tensorboard")  # what --log knows: training/trackers.py
DP_STAGES = ("none", "naive", "flat", "overlap", "bucket")  # parallel/ddp.py
MAX_COUNT = 2**31 - 1  # of steps, sequences, tokens: the device counts with 32 bits
LONGEST_WATCHDOG = 10**8  # seconds, three years; system timers overflow at about 10^10


def option_name(field: str) -> str:
    """Return the name of a field on the command line."""
    return f"--{field.replace('_', '-')}"


def need(ok: bool, sentence: str) -> None:
    """Raise UserError unless ok."""
    if not ok:
        raise UserError(sentence)


def need_text(name: str, value: str | None) -> None:
    """Raise UserError for a command-line argument that was not valid UTF-8, or contains a zero."""
    if value is None:
        return
    try:
        value.encode()  # Python decodes invalid bytes to surrogates
        ok = "\0" not in value
    except UnicodeEncodeError:
        ok = False
    need(ok, f"{option_name(name)} {value!r} is not valid UTF-8 text")


def _is_inside(name: str) -> bool:
    """Return True if the path is relative and below the folder that it is relative to."""
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@dataclass(frozen=True)
class RunOptions:
    """What every run of training has."""

    # files, folders, globs in quotes, or - for standard input: text, .jsonl, .parquet, all as .gz
    # or .zst, saved datasets, tokens in .bin; none: the source of Python's standard library
    data: tuple[str, ...] = ()
    name: str | None = None  # the run is written to OUT/NAME; none: the preset's name
    out: str = "runs"  # folder for all runs
    steps: int | None = None  # optimizer steps; none: the preset's
    # sequences per optimizer step, summed over all ranks; none: the preset's
    batch: int | None = None
    # sequences per forward pass on each rank; none: its whole share of the batch
    micro_batch: int | None = None
    eval_every: int | None = None  # steps between validations; 0: no validation; none: the preset's
    eval_batches: int = 8  # batches per validation, of --batch sequences each
    eval_tasks: tuple[str, ...] = ()  # files of test items to evaluate on, as of `xtrain evaluate`
    # steps between these evaluations; 0: only at the end; none: at validations
    eval_tasks_every: int | None = None
    eval_items: int | None = None  # only the first items of each of these files
    # steps between generated samples; 0: no samples; none: the preset's
    sample_every: int | None = None
    sample_prompt: str = "def "  # prompt of the generated samples
    # steps between checkpoints; 0: only the one at the end; none: the preset's
    save_every: int | None = None
    seed: int = 0  # random seed of initialisation, batches and samples
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    # dtype of activations and matrix products; auto: bf16 on a GPU that supports it, else fp32;
    # fp8: bf16, with the products of the blocks in fp8
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    # on a CPU, threads of a matrix product on each rank, which decide its last bits; none: measured
    # once, kept on resuming
    blas_threads: int | None = None
    # activation checkpointing: what backward recomputes instead of storing; less memory, slower,
    # the same bits
    recompute: Literal["none", "attention", "block"] = "none"
    # start from the weights in this folder: in Hugging Face format, or a run
    init: str | None = None
    # MODULE:FUNCTION that gets the model and returns it changed (lessons/howto/change_the_model.md)
    change: str | None = None
    # newest checkpoints to keep, in addition to the best one; 0: keep all
    keep: int = 3
    # the metric that decides the best checkpoint, such as val_loss or FILE/acc of --eval-tasks: a
    # checkpoint is saved at each new best, and RUN means the best; none: the validation decides,
    # and RUN means the newest
    best: str | None = None
    # stop after so many measurements in a row without a better value of that metric; none: never
    patience: int | None = None
    resume: bool = False  # continue the run from its newest undamaged checkpoint
    # with --resume: options that may differ from the checkpoint's, including data and tokenizer
    allow_change: tuple[str, ...] = ()
    # stop after this step, with a checkpoint; the learning-rate schedule still ends at --steps
    stop_at: int | None = None
    # stop, with a checkpoint, before this much time has passed since the program's start: seconds,
    # MM:SS, HH:MM:SS or D-HH:MM:SS
    time_limit: str | None = None
    # stop after this many steps in a row whose loss or gradient norm is not finite
    max_skips: int = 10
    # warn about a loss this many standard deviations above the mean of the last 50; 0: never
    spike_z: float = 6.0
    # also log for these, through their own packages: wandb, trackio, tensorboard
    log: tuple[str, ...] = ()
    debug: bool = False  # synchronize after every kernel and name the one that failed

    answers: ClassVar[bool] = False  # the model learns to answer: it is used in a chat
    row_texts: ClassVar[int] = 1  # sequences of seq_len tokens in a row of the batch
    divides_weights: ClassVar[bool] = False  # does the command support --zero 3?

    def __post_init__(self) -> None:
        data: Any = () if self.data is None else self.data
        if isinstance(data, (str, Path)):  # from Python, one path is enough
            data = (data,)
        object.__setattr__(self, "data", tuple(map(str, data)))

    def validate(self) -> None:
        """Raise UserError on a value out of range. (Not called on construction: the command line
        reports the error better.)"""
        self._check_counts()
        self._check_words()
        need(self.spike_z >= 0, f"--spike-z must not be negative, got {self.spike_z}")
        self.check_place()

    def check_place(self) -> None:
        """Raise UserError if --out and --name do not name a folder."""
        for name in ("name", "out"):
            need_text(name, getattr(self, name))
        need(self.out != "", "--out is empty: give a path, or omit the option")
        need(
            self.name is None or _is_inside(self.name),
            f"--name {self.name!r} is not a folder inside --out: give a name such as tiny-2",
        )

    def default_name(self, gpu: bool) -> str:
        """Return the name of the run's folder if no --name is given."""
        raise NotImplementedError

    def filled(self, gpu: bool) -> tuple[Any, dict[str, Any]]:
        """Return the config with the options that its preset decides, and the shape of a new
        model."""
        return self, {}

    def resume_keys(self) -> tuple[str, ...]:
        """Return the options that determine the numbers, see RESUME_KEYS."""
        return RESUME_KEYS

    def may_change(self) -> set[str]:
        """Return what --allow-change may name, without the shape of the model."""
        return {*self.resume_keys(), "data", "tokenizer", "variation"}

    def _check_counts(self):
        need_positive(self, COUNTS)
        need_positive(self, INTERVALS, ", or 0 for never")
        for name in ("seed", "keep"):
            value = getattr(self, name)
            need(value >= 0, f"{option_name(name)} must not be negative, got {value}")
        if self.batch is not None and self.micro_batch is not None:
            need(
                self.batch % self.micro_batch == 0,
                f"--batch {self.batch} is not a multiple of --micro-batch {self.micro_batch}",
            )

    def _check_words(self):
        for name in ("eval_tasks_every", "eval_items"):
            need(
                getattr(self, name) is None or bool(self.eval_tasks) or self.resume,
                f"{option_name(name)} needs --eval-tasks: give both or neither",
            )
        for name in self.log:
            need(
                name in TRACKERS,
                f"--log {repr(name)[1:-1]} is not known: choose from {', '.join(TRACKERS)}",
            )
        for name in ("best", "patience"):
            need(
                getattr(self, name) is None or self.eval_every != 0 or bool(self.eval_tasks),
                f"{option_name(name)} needs measurements: give --eval-every or --eval-tasks",
            )
        need_text("sample_prompt", self.sample_prompt)
        # --data "$UNSET": Path("") would be the current folder
        need("" not in self.data, "--data is empty: give a path, or omit the option")
        need(self.init != "", "--init is empty: give a path, or omit the option")
        need(
            self.change is None or isinstance(self.change, str),
            f"--change must be the name of a function, MODULE:FUNCTION, not {self.change!r}",
        )


def need_positive(options: Any, names: tuple[str, ...], or_zero: str = "") -> None:
    """Raise UserError unless each of these options is positive and at most MAX_COUNT, or None.

    or_zero: what 0 means, if that is allowed.
    """
    for name in names:
        value = getattr(options, name)
        if value is None:
            continue
        ok = value > 0 or (value == 0 and bool(or_zero))
        need(ok, f"{option_name(name)} must be positive{or_zero}, got {value}")
        need(value <= MAX_COUNT, f"{option_name(name)} must be at most {MAX_COUNT}, got {value}")


@dataclass(frozen=True)
class OptimizerOptions(RunOptions):
    """The optimizer and the schedule of its learning rate."""

    lr: float | None = None  # peak learning rate; none: the preset's
    # after the warm-up, cosine: half a cosine down; wsd: the peak (stable), then a decay over the
    # last steps
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float = 0.2  # with --schedule wsd: the steps of the decay, as a fraction of all
    # with --schedule wsd: the form of the decay; sqrt: 1 - sqrt(progress)
    decay_shape: Literal["sqrt", "linear", "cosine"] = "sqrt"
    min_lr_ratio: float = 0.1  # final learning rate of the schedule, as a fraction of the peak
    # steps of linear warm-up; none: the preset's, or if the run is too short for it, half of the
    # run
    warmup: int | None = None
    # muon: orthogonalised momentum for the matrices of the blocks, AdamW for the rest, with the
    # same --lr and --weight-decay
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = 0.1  # decoupled weight decay of matrices; norms have none
    beta1: float = 0.9  # AdamW: decay of the running mean of the gradient
    beta2: float = 0.95  # AdamW: decay of the running mean of the squared gradient
    eps: float = 1e-8  # AdamW: added to the square root of the mean squared gradient
    clip: float = 1.0  # clip the global gradient norm to this; 0: no clipping
    # decay of a moving average of the weights, such as 0.999; checkpoints hold it as a second
    # model, in ema; 0: none
    ema: float = 0.0

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        infinity = float("inf")
        need(
            self.lr is None or 0 < self.lr < infinity,
            f"--lr must be a positive number, got {self.lr}",
        )
        need(
            self.warmup is None or self.warmup >= 0,
            f"--warmup must not be negative, got {self.warmup}",
        )
        need(
            0 <= self.min_lr_ratio <= 1,
            f"--min-lr-ratio must be between 0 and 1, got {self.min_lr_ratio}",
        )
        need(
            0 < self.decay_fraction <= 1,
            f"--decay-fraction must be above 0 and at most 1, got {self.decay_fraction}",
        )
        defaults = {f.name: f.default for f in fields(OptimizerOptions)}
        for name in ("decay_fraction", "decay_shape"):
            need(
                self.schedule == "wsd" or getattr(self, name) == defaults[name],
                f"{option_name(name)} is for --schedule wsd, but the schedule is {self.schedule}: "
                "give both or neither",
            )
        need(0 <= self.ema < 1, f"--ema must be at least 0 and below 1, got {self.ema}")
        need(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "--beta1 and --beta2 must be at least 0 and below 1",
        )
        need(0 < self.eps < infinity, f"--eps must be a positive number, got {self.eps}")
        need(
            self.clip >= 0 and 0 <= self.weight_decay < infinity,
            "--clip and --weight-decay must be numbers and not negative",
        )


@dataclass(frozen=True)
class ExpertOptions(RunOptions):
    """What else trains the routers of a mixture of experts; without effect on a dense model."""

    # weight of a loss that is smallest if all experts get equally many tokens (Switch); 0: none
    balance_loss: float = 0.01
    router_z_loss: float = 0.001  # weight of a loss that keeps the router's logits small; 0: none
    expert_bias_rate: float = 0.001  # by which a step moves the biases of --expert-bias

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        for name in ("balance_loss", "router_z_loss", "expert_bias_rate"):
            value = getattr(self, name)
            ok = 0 <= value < float("inf")
            need(ok, f"{option_name(name)} must be a number and not negative, got {value}")


@dataclass(frozen=True)
class RowOptions(RunOptions):
    """Rows of tokens that are read from a text."""

    text_key: str = "text"  # the field of a .jsonl, or the column, that holds the text
    seq_len: int | None = None  # T, tokens per sequence; none: the preset's
    sample_tokens: int = 100  # tokens generated per sample
    fp8_head: bool = False  # with --precision fp8: the products of the head in fp8, too
    # on a GPU, capture the step in a CUDA graph and replay it: faster, the same bits
    graph: bool = True

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        need_positive(self, ("seq_len", "sample_tokens"))
        need(self.text_key != "", "--text-key is empty: give the name of a field or column")
        need(
            not self.fp8_head or self.precision == "fp8",
            f"--fp8-head needs --precision fp8, not {self.precision}: give both, or neither",
        )


@dataclass(frozen=True)
class ParallelOptions(RunOptions):
    """How several ranks share a run; without effect on one."""

    # divide the optimizer state among the ranks (ZeRO-1): 1; the weights and gradients of layers,
    # too (ZeRO-3): 3; nothing: 0; none: 1 with --dp bucket, else 0
    zero: Literal[0, 1, 3] | None = None
    bucket_mb: float = 32.0  # size of a bucket: MiB of float32 gradients in one message
    grad_comm: Literal["fp32", "bf16"] = "fp32"  # dtype in which gradients are communicated
    # between GPUs: NCCL's kernels, or copy engines (one machine only; auto: copy where possible)
    transport: Literal["auto", "nccl", "copy"] = "auto"
    # steps between comparisons of all ranks' parameters, with ZeRO-1 also of what only one rank has
    # with its checksum; 0: never
    check_ranks: int = 0
    # seconds without a step after which a rank counts as hanging and the job is aborted; half of
    # them, but 60 at least, if its process does not run at all, also before the first step; 0: never
    watchdog: float = 600.0
    dp: str = "bucket"  # how gradients are summed; the slower ways of lesson 15 are for comparison

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        need(
            self.dp in DP_STAGES,
            f"--dp {self.dp!r} is not known: choose from {', '.join(DP_STAGES)}",
        )
        need(
            0 < self.bucket_mb < float("inf"),
            f"--bucket-mb must be a positive number, got {self.bucket_mb}",
        )
        need(self.check_ranks >= 0, f"--check-ranks must not be negative, got {self.check_ranks}")
        need(
            0 <= self.watchdog <= LONGEST_WATCHDOG,
            f"--watchdog must be between 0 (never) and {LONGEST_WATCHDOG} seconds, got "
            f"{self.watchdog}",
        )
        need(
            not self.sharded or self.dp != "none",
            f"--zero {self.zero_stage} needs the gradients of all ranks: choose another --dp than none",
        )
        if self.zero == 3:
            self._check_zero_3()

    def _check_zero_3(self):
        need(
            self.divides_weights,
            "--zero 3 is supported by xtrain train only: use --zero 1 here",
        )
        possible = {"dp": ("bucket",), "grad_comm": ("fp32",), "optimizer": ("adamw",)}
        possible |= {"precision": ("auto", "fp32", "bf16"), "change": (None,), "eval_tasks": ((),)}
        for name, values in possible.items():
            value = getattr(self, name)
            given = option_name(name)
            if isinstance(value, str):
                given += f" {value}"
            need(
                value in values,
                f"{given} is not supported with --zero 3: leave it out, or use --zero 1",
            )

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 for none. (--zero without its default.)"""
        if self.zero is None:
            return int(self.dp == "bucket")
        return self.zero

    @property
    def sharded(self) -> bool:
        """Is the optimizer state divided among the ranks (ZeRO-1 and 3)?

        This saves memory, and time with --dp bucket: each rank updates only its shard and sends
        half the bytes.
        """
        return self.zero_stage > 0
