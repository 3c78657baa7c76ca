"""Configuration: the shape of a model and the options of a training run, as frozen dataclasses with units on every field.

The command line (`python -m xtrain.train --help`) is generated from TrainConfig; checkpoints store both as JSON.
"""

import numbers
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from .errors import UserError


def _is_inside(name: str) -> bool:
    """Is the path relative and below the folder that it is relative to?"""
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _encodes(text: str) -> bool:
    """False if a command-line argument was not valid UTF-8: Python decodes such bytes to surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _option(name: str) -> str:
    """The name of a field on the command line."""
    return f"--{name.replace('_', '-')}"


def _need(ok: bool, sentence: str) -> None:
    if not ok:
        raise UserError(sentence)


def _need_text(name: str, value: str | None) -> None:
    ok = value is None or (_encodes(value) and "\0" not in value)
    _need(ok, f"{_option(name)} {value!r} is not valid UTF-8 text")


# Parameters of each type of RoPE scaling (names and meaning as in Hugging Face configs).
ROPE_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
}  # fmt: skip
FEATURES = (
    "qk_norm",
    "qkv_bias",
    "no_rope_layers",
    "sliding_window",
)  # of ModelConfig, in which families of models differ
FAMILIES = {"Llama": "", "Qwen3": "qk_norm", "Qwen2": "qkv_bias", "SmolLM3": "no_rope_layers"}
# Options that determine the numbers: a resumed run must have the same values, unless --allow-change names them. The same holds
# for every field of ModelConfig, the text ("data") and the tokenizer. (steps: where the learning-rate schedule ends.)
RESUME_KEYS = (
    "steps", "batch", "micro_batch", "seq_len", "lr", "min_lr_ratio", "warmup", "weight_decay", "beta1", "beta2",
    "eps", "clip", "seed", "precision", "grad_comm", "optimizer", "schedule", "decay_fraction", "decay_shape", "ema", "change",
    "fp8_head",
)  # fmt: skip
# Fields of ModelConfig on which the shapes of tensors depend.
SHAPES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "qk_norm", "qkv_bias", "tie_embeddings")  # fmt: skip
LARGEST = 1e30  # limit of every number in a model's config, below the float32 maximum
VOCAB_MULTIPLE = 128  # the vocabulary is padded to a multiple in memory: an odd width makes the head's GEMM 5 times slower
SHAPE_OPTIONS = {  # of a command -> the field of ModelConfig
    "dim": "dim", "layers": "n_layers", "heads": "n_heads", "kv_heads": "n_kv_heads", "head_dim": "head_dim",
    "hidden_dim": "hidden_dim", "qk_norm": "qk_norm", "tie_embeddings": "tie_embeddings",
}  # fmt: skip
TRACKERS = ("wandb", "trackio", "tensorboard")  # what --log knows: training/trackers.py
DERIVED: Any = None  # default of a field that __post_init__ computes from the others


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder: of a Llama, or of another family (FAMILIES) by its features. Raises UserError on an invalid shape."""

    vocab_size: int  # V, tokens
    dim: int  # C, width of the residual stream
    n_layers: int  # L
    n_heads: int  # H, query heads
    n_kv_heads: int = DERIVED  # G, key/value heads; None: as many as query heads
    head_dim: int = DERIVED  # D, width of one head; None: dim / n_heads
    # F, width of the MLP; None: 8/3 dim, rounded up to a multiple of 64
    hidden_dim: int = DERIVED
    max_seq_len: int = 1024  # longest sequence, tokens
    rope_theta: float = 10000.0  # base of the rotation frequencies
    # {"rope_type": "linear" | "dynamic" | "llama3", "factor": ..., ...}
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = 1e-6  # added to the mean square in every RMSNorm
    qk_norm: bool = True  # RMSNorm over each query and key head (Qwen3)
    qkv_bias: bool = False  # a bias on the projections to queries, keys and values (Qwen2)
    tie_embeddings: bool = False  # the output head is the embedding table
    no_rope_layers: tuple[int, ...] = ()  # whose queries and keys are not rotated (SmolLM3)
    # keys that a query sees, itself among them; 0: all (Mistral v0.1, Qwen2)
    sliding_window: int = 0
    full_attention_layers: tuple[int, ...] = ()  # that have no sliding window

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            self._positive_int(name)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.head_dim is None:
            _need(
                self.dim % self.n_heads == 0,
                f"dim {self.dim} is not divisible by n_heads {self.n_heads}: choose a divisor or give head_dim",
            )
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", -(-8 * self.dim // (3 * 64)) * 64)
        for name in ("n_kv_heads", "head_dim", "hidden_dim"):
            self._positive_int(name)
        _need(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}: "
            "every key/value head must serve the same number of query heads",
        )
        _need(
            self.head_dim % 2 == 0,
            f"head_dim {self.head_dim} is odd: RoPE rotates pairs, give an even head_dim",
        )
        _need(
            self.head_dim <= 256,
            f"head_dim {self.head_dim} is larger than 256, the widest head that the kernels support",
        )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            ok = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and 0 < value < LARGEST
            )
            _need(ok, f"{name} must be a positive number, got {value!r}")
        for name in ("qk_norm", "qkv_bias", "tie_embeddings"):
            _need(
                isinstance(getattr(self, name), bool),
                f"{name} must be true or false, got {getattr(self, name)!r}",
            )
        for name in ("no_rope_layers", "full_attention_layers"):
            layers = getattr(self, name)
            ok = isinstance(layers, (tuple, list)) and all(type(i) is int for i in layers)
            _need(ok, f"{name} must be numbers of layers, got {layers!r}")
            _need(
                all(0 <= i < self.n_layers for i in layers),
                f"{name} names a layer beyond the {self.n_layers}: {list(layers)}",
            )
            object.__setattr__(self, name, tuple(sorted(set(layers))))
        if self.sliding_window != 0:
            self._positive_int("sliding_window")
        _need(
            self.sliding_window > 0 or not self.full_attention_layers,
            "full_attention_layers are given, but no sliding_window that the other layers have",
        )
        self._check_rope_scaling()

    def _positive_int(self, name):
        value = getattr(self, name)
        ok = isinstance(value, numbers.Integral) and not isinstance(value, bool) and value > 0
        _need(ok, f"{name} must be a positive whole number, got {value!r}")
        object.__setattr__(self, name, int(value))  # also of NumPy
        _need(value < 2**31, f"{name} must be less than 2^31, got {value}")

    def _check_rope_scaling(self):
        scaling = self.rope_scaling
        if scaling is None:
            return
        _need(isinstance(scaling, dict), f"rope_scaling must be a dict or None, got {scaling!r}")
        kind = self.rope_type
        known = ", ".join(ROPE_SCALINGS)
        _need(
            kind in list(ROPE_SCALINGS),  # `in` a list, because an invalid kind may not be hashable
            f"rope_scaling type {kind!r} is not supported: choose one of {known}",
        )
        for key in ROPE_SCALINGS[kind]:
            value = scaling.get(key)
            ok = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and 0 < value < LARGEST
            )
            _need(ok, f"rope_scaling {kind!r} needs a positive number for {key!r}, got {value!r}")
        _need(
            kind != "llama3" or scaling["high_freq_factor"] > scaling["low_freq_factor"],
            "rope_scaling 'llama3': high_freq_factor must be larger than low_freq_factor",
        )
        _need(
            kind != "yarn" or scaling["beta_fast"] > scaling["beta_slow"],
            "rope_scaling 'yarn': beta_fast must be larger than beta_slow",
        )

    @property
    def family(self) -> str:
        """The models of transformers that have these features: a key of FAMILIES; "" if none has all of them.

        A window is Mistral's, in all layers; or, in some or all layers, that of the others.
        """
        features = self.features.removesuffix("sliding_window").removesuffix(" with ")
        found = next((name for name, has in FAMILIES.items() if has == features), "")
        if found == "Llama" and self.sliding_window:
            return "" if self.full_attention_layers else "Mistral"
        return found

    def window(self, layer: int) -> int:
        """The sliding window of a layer, 0 for none."""
        return 0 if layer in self.full_attention_layers else self.sliding_window

    @property
    def features(self) -> str:
        """The features in which families of models differ: names of fields, "" for none."""
        return " with ".join(name for name in FEATURES if getattr(self, name))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table and of the head in memory; those from vocab_size on are zero and stay zero."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def rope_type(self) -> str:
        """The type of RoPE scaling, a key of ROPE_SCALINGS. (Older configs call the field `type`.)"""
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type", scaling.get("type", "default"))

    @property
    def context(self) -> int:
        """Longest sequence that the model accepts: max_seq_len, and with dynamic RoPE scaling `factor` times that.

        With YaRN at least `factor` times the length for which the model was trained before.
        """
        if self.rope_scaling is None or self.rope_type not in ("dynamic", "yarn"):
            return self.max_seq_len
        trained = self.rope_scaling.get("original_max_position_embeddings", self.max_seq_len)
        trained = self.max_seq_len if self.rope_type == "dynamic" else trained
        return max(self.max_seq_len, int(min(self.rope_scaling["factor"], 2**31) * trained))

    def to_dict(self) -> dict[str, Any]:
        """{field: value}, ready for JSON; the opposite of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """The opposite of `to_dict`. Raises UserError that names every unknown and every missing key."""
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - names)
        missing = sorted({"vocab_size", "dim", "n_layers", "n_heads"} - set(values))
        _need(
            not unknown,
            f"unknown model config {', '.join(unknown)}: the fields are {', '.join(sorted(names))}",
        )
        _need(not missing, f"the model config lacks {', '.join(missing)}")
        return cls(**values)


@dataclass(frozen=True)
class ShapeOptions:
    """The shape of a new model: a preset's, with what is given instead."""

    # tiny, dim384, dim512, dim768 or gpt124m; auto: tiny on a CPU, dim384 on a GPU
    preset: str = "auto"
    dim: int | None = None  # width; none: the preset's
    layers: int | None = None  # blocks; none: the preset's
    heads: int | None = None  # query heads; none: the preset's
    kv_heads: int | None = None  # key/value heads; none: the preset's, or as many as query heads
    head_dim: int | None = None  # width of a head; none: the preset's, or dim / heads
    # width of the MLP; none: the preset's, or about 8/3 of a given dim
    hidden_dim: int | None = None
    qk_norm: bool | None = None  # RMSNorm over each query and key head; none: the preset's
    tie_embeddings: bool | None = None  # the output head is the embedding; none: the preset's

    def shape(self, preset: "Preset") -> dict[str, Any]:
        """The fields of ModelConfig, without vocab_size and max_seq_len."""
        given = {name: getattr(self, option) for option, name in SHAPE_OPTIONS.items()}
        given = {name: value for name, value in given.items() if value is not None}
        shape = dict(preset.model)
        if "dim" in given:  # heads of the same width as before, and the default MLP
            shape |= {"n_heads": max(given["dim"] // shape["head_dim"], 1), "n_kv_heads": None}
            shape["hidden_dim"] = None
        if "n_heads" in given:
            shape |= {"head_dim": None, "n_kv_heads": None}
        return shape | given


@dataclass(frozen=True)
class TrainConfig(ShapeOptions):
    """One training run. Defaults come from the preset; explicit options override them."""

    # files, folders, globs in quotes, or - for standard input: text, .jsonl, .parquet, all as .gz or .zst, saved datasets, tokens
    # in .bin; none: the source of Python's standard library
    data: tuple[str, ...] = ()
    text_key: str = "text"  # the field of a .jsonl, or the column, that holds the text
    # stop at a file that cannot be read, instead of leaving it out
    strict_data: bool = False
    name: str | None = None  # the run is written to OUT/NAME; none: the preset's name
    out: str = "runs"  # folder for all runs
    steps: int | None = None  # optimizer steps; none: the preset's
    # sequences per optimizer step, summed over all ranks; none: the preset's
    batch: int | None = None
    # sequences per forward pass on each rank; none: its whole share of the batch
    micro_batch: int | None = None
    seq_len: int | None = None  # T, tokens per sequence; none: the preset's
    lr: float | None = None  # peak learning rate; none: the preset's
    # after the warm-up, cosine: half a cosine down; wsd: the peak (stable), then a decay over the last steps
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float = 0.2  # with --schedule wsd: the steps of the decay, as a fraction of all
    # with --schedule wsd: the form of the decay; sqrt: 1 - sqrt(progress)
    decay_shape: Literal["sqrt", "linear", "cosine"] = "sqrt"
    min_lr_ratio: float = 0.1  # final learning rate of the schedule, as a fraction of the peak
    # steps of linear warm-up; none: the preset's, or if the run is too short for it, half of the run
    warmup: int | None = None
    # muon: orthogonalised momentum for the matrices of the blocks, AdamW for the rest, with the same --lr and --weight-decay
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = 0.1  # decoupled weight decay of matrices; norms have none
    beta1: float = 0.9  # AdamW: decay of the running mean of the gradient
    beta2: float = 0.95  # AdamW: decay of the running mean of the squared gradient
    eps: float = 1e-8  # AdamW: added to the square root of the mean squared gradient
    clip: float = 1.0  # clip the global gradient norm to this; 0: no clipping
    # decay of a moving average of the weights, such as 0.999; checkpoints hold it as a second model, in ema; 0: none
    ema: float = 0.0
    # vocabulary size of the tokenizer that is trained on the text; none: the preset's
    vocab_size: int | None = None
    # use this tokenizer.json, or that of a folder, instead of training one; none: with --init the model's own
    tokenizer: str | None = None
    # read the text and its token cache and compare checksums, even if sizes and times say that nothing has changed
    verify_data: bool = False
    eval_every: int | None = None  # steps between validations; none: the preset's
    eval_batches: int = 8  # batches per validation, of --batch sequences each
    eval_tasks: tuple[str, ...] = ()  # files of test items to evaluate on, as of `xtrain evaluate`
    eval_tasks_every: int | None = None  # steps between these evaluations; none: at validations
    eval_items: int | None = None  # only the first items of each of these files
    sample_every: int | None = None  # steps between generated samples; none: the preset's
    sample_prompt: str = "def "  # prompt of the generated samples
    sample_tokens: int = 100  # tokens generated per sample
    # steps between checkpoints (one is always written at the end); none: the preset's
    save_every: int | None = None
    seed: int = 0  # random seed of initialisation, batches and samples
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: the GPU if there is one
    # dtype of activations and matrix products; auto: bf16 on a GPU that supports it, else fp32; fp8: bf16, with the products of
    # the blocks in fp8
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    fp8_head: bool = False  # with --precision fp8: the products of the head in fp8, too
    # on a CPU, threads of a matrix product on each rank, which decide its last bits; none: measured once, kept on resuming
    blas_threads: int | None = None
    # on a GPU, capture the step in a CUDA graph and replay it: faster, the same bits
    graph: bool = True
    # activation checkpointing: what backward recomputes instead of storing; less memory, slower, the same bits
    recompute: Literal["none", "attention", "block"] = "none"
    # start from the weights in this folder: in Hugging Face format, or a run
    init: str | None = None
    # MODULE:FUNCTION that gets the model and returns it changed (lessons/howto/change_the_model.md)
    change: str | None = None
    # newest checkpoints to keep, in addition to the one with the best validation loss; 0: keep all
    keep: int = 3
    resume: bool = False  # continue the run from its newest undamaged checkpoint
    # with --resume: options that may differ from the checkpoint's, including data and tokenizer
    allow_change: tuple[str, ...] = ()
    # stop after this step, with a checkpoint; the learning-rate schedule still ends at --steps
    stop_at: int | None = None
    # stop, with a checkpoint, before this much time has passed since the program's start: seconds, MM:SS, HH:MM:SS or D-HH:MM:SS
    time_limit: str | None = None
    # stop after this many steps in a row whose loss or gradient norm is not finite
    max_skips: int = 10
    # warn about a loss this many standard deviations above the mean of the last 50; 0: never
    spike_z: float = 6.0
    # also log for these, through their own packages: wandb, trackio, tensorboard
    log: tuple[str, ...] = ()
    debug: bool = False  # synchronize after every kernel and name the one that failed

    def __post_init__(self) -> None:
        given: Any = () if self.data is None else self.data
        one = isinstance(given, (str, Path))  # from Python, one path is enough
        object.__setattr__(self, "data", (str(given),) if one else tuple(map(str, given)))

    def validate(self) -> None:
        """Raises UserError on a value out of range. (Not called on construction: the command line reports the error better.)"""
        self._check_counts()
        self._check_numbers()
        self._check_words()
        self.check_place()

    def check_place(self) -> None:
        """Raises UserError if --out and --name do not name a folder."""
        for name in ("name", "out"):
            _need_text(name, getattr(self, name))
        _need(self.out != "", "--out is empty: give a path, or omit the option")
        _need(
            self.name is None or _is_inside(self.name),
            f"--name {self.name!r} is not a folder inside --out: give a name such as tiny-2",
        )

    def resume_keys(self) -> tuple[str, ...]:
        """The options that determine the numbers, see RESUME_KEYS."""
        return RESUME_KEYS

    def may_change(self) -> set[str]:
        """What --allow-change may name."""
        shape = (f.name for f in fields(ModelConfig))
        return {*self.resume_keys(), "data", "tokenizer", "variation", *shape}

    def presets(self) -> "dict[str, Preset]":
        """The presets to choose from."""
        return PRESETS

    def _check_counts(self):
        optional = (
            "steps batch micro_batch seq_len vocab_size eval_every eval_tasks_every eval_items sample_every save_every "
            "stop_at blas_threads"
        )
        counts = [name for name in optional.split() if getattr(self, name) is not None]
        sizes = [x for x in SHAPE_OPTIONS if x not in ("qk_norm", "tie_embeddings")]
        counts += [name for name in sizes if getattr(self, name) is not None]
        for name in (*counts, "eval_batches", "sample_tokens", "max_skips"):
            value = getattr(self, name)
            _need(value > 0, f"{_option(name)} must be positive, got {value}")
        most = 2**31 - 1  # the device counts with 32 bits
        _need(self.max_skips <= most, f"--max-skips must be at most {most}, got {self.max_skips}")
        for name in ("warmup", "seed", "keep"):
            value = getattr(self, name)
            _need(value is None or value >= 0, f"{_option(name)} must not be negative, got {value}")
        if self.batch is not None and self.micro_batch is not None:
            _need(
                self.batch % self.micro_batch == 0,
                f"--batch {self.batch} is not a multiple of --micro-batch {self.micro_batch}",
            )

    def _check_numbers(self):
        _need(
            self.lr is None or 0 < self.lr < float("inf"),
            f"--lr must be a positive number, got {self.lr}",
        )
        _need(self.spike_z >= 0, f"--spike-z must not be negative, got {self.spike_z}")
        _need(
            0 <= self.min_lr_ratio <= 1,
            f"--min-lr-ratio must be between 0 and 1, got {self.min_lr_ratio}",
        )
        _need(
            0 < self.decay_fraction <= 1,
            f"--decay-fraction must be above 0 and at most 1, got {self.decay_fraction}",
        )
        defaults = {f.name: f.default for f in fields(TrainConfig)}
        for name in ("decay_fraction", "decay_shape"):
            _need(
                self.schedule == "wsd" or getattr(self, name) == defaults[name],
                f"{_option(name)} is for --schedule wsd, but the schedule is {self.schedule}: give both or neither",
            )
        _need(0 <= self.ema < 1, f"--ema must be at least 0 and below 1, got {self.ema}")
        _need(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "--beta1 and --beta2 must be at least 0 and below 1",
        )
        _need(0 < self.eps < float("inf"), f"--eps must be a positive number, got {self.eps}")
        _need(
            self.clip >= 0 and 0 <= self.weight_decay < float("inf"),
            "--clip and --weight-decay must be numbers and not negative",
        )

    def _check_words(self):
        given = [name for name in SHAPE_OPTIONS if getattr(self, name) is not None]
        _need(
            not (given and self.init and not self.resume),
            f"{', '.join(map(_option, given))} cannot be given with --init: the model has the shape of that folder",
        )
        _need(
            not self.fp8_head or self.precision == "fp8",
            f"--fp8-head needs --precision fp8, not {self.precision}: give both, or neither",
        )
        for name in ("eval_tasks_every", "eval_items"):
            _need(
                getattr(self, name) is None or bool(self.eval_tasks) or self.resume,
                f"{_option(name)} needs --eval-tasks: give both or neither",
            )
        known = self.may_change()
        for name in self.allow_change:
            _need(
                name.replace("-", "_") in known,
                f"--allow-change {repr(name)[1:-1]} is not known: choose from {', '.join(sorted(known))}",
            )
        for name in self.log:
            _need(
                name in TRACKERS,
                f"--log {repr(name)[1:-1]} is not known: choose from {', '.join(TRACKERS)}",
            )
        _need_text("sample_prompt", self.sample_prompt)
        # --data "$UNSET": Path("") would be the current folder
        for name in ("data", "init", "tokenizer"):
            value = getattr(self, name)
            empty = "" in value if isinstance(value, tuple) else value == ""
            _need(not empty, f"--{name} is empty: give a path, or omit the option")
        _need(
            self.change is None or isinstance(self.change, str),
            f"--change must be the name of a function, MODULE:FUNCTION, not {self.change!r}",
        )
        _need(self.text_key != "", "--text-key is empty: give the name of a field or column")


class ResolvedConfig(TrainConfig):
    """The type of a TrainConfig after `resolve`: these fields are no longer None. (For type checkers; never instantiated.)"""

    name: str
    steps: int
    batch: int
    micro_batch: int
    seq_len: int
    lr: float
    warmup: int
    vocab_size: int
    precision: Literal["fp32", "bf16", "fp8"]
    eval_every: int
    sample_every: int
    save_every: int


@dataclass(frozen=True)
class Preset:
    """A named model shape and the training options that suit it. The tokenizer determines the vocabulary size."""

    model: dict[str, Any]
    train: dict[str, Any]


def _model(dim, n_layers, n_heads, head_dim, hidden_dim, **more):
    return dict(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        head_dim=head_dim,
        hidden_dim=hidden_dim,
        **more,
    )


_RUN = dict(eval_every=250, sample_every=500, save_every=500, warmup=100, vocab_size=16384)
PRESETS = {
    "tiny": Preset(
        _model(128, 4, 4, 32, 384),
        dict(
            steps=800, batch=8, seq_len=128, lr=3e-3, warmup=30, vocab_size=2048,
            eval_every=100, sample_every=200, save_every=200,
        ),
    ),
    "dim384": Preset(_model(384, 12, 12, 32, 1536), dict(_RUN, steps=3000, batch=32, seq_len=256, lr=1e-3)),
    "dim512": Preset(_model(512, 16, 16, 32, 1536), dict(_RUN, steps=4000, batch=32, seq_len=256, lr=8e-4)),
    "dim768": Preset(_model(768, 18, 24, 32, 2048), dict(_RUN, steps=5000, batch=32, seq_len=256, lr=6e-4)),
    "gpt124m": Preset(_model(768, 12, 12, 64, 2048), dict(_RUN, steps=5000, batch=16, seq_len=1024, lr=6e-4)),
}  # fmt: skip


def preset_name(config: TrainConfig, gpu: bool) -> str:
    """The preset, with auto replaced: tiny on a CPU, dim384 on a GPU."""
    return ("dim384" if gpu else "tiny") if config.preset == "auto" else config.preset


def resolve(
    config: TrainConfig, gpu: bool, world: int = 1
) -> tuple[ResolvedConfig, dict[str, Any]]:
    """-> (the config with every None filled from its preset, the model's shape without vocab_size)

    gpu: is the run on a GPU?  world: ranks that share a batch. Raises UserError on values out of range, alone or in
    combination with the preset's.
    """
    config.validate()
    name, presets = preset_name(config, gpu), config.presets()
    _need(
        name in presets, f"--preset {name!r} is not known: choose one of auto, {', '.join(presets)}"
    )
    preset = presets[name]
    filled = {key: value for key, value in preset.train.items() if getattr(config, key) is None}
    steps, warmup = (filled.get(key, getattr(config, key)) for key in ("steps", "warmup"))
    if warmup and warmup > steps - 2:
        if "warmup" in filled:
            filled["warmup"] = (steps - 1) // 2
        else:  # earlier versions accepted it: such a run can be resumed
            _need(
                config.resume,
                f"--warmup {warmup} leaves no steps of --steps {steps} for the decay of the learning rate: give at most {max(0, steps - 2)}",
            )
    batch = config.batch or preset.train["batch"]
    _need(
        batch % world == 0,
        f"--batch {batch} is not a multiple of the {world} ranks: choose one that is",
    )
    if config.micro_batch is None:
        filled["micro_batch"] = batch // world
    else:
        _need(
            world == 1 or batch // world % config.micro_batch == 0,
            f"--batch {batch} is not a multiple of {world} ranks x --micro-batch {config.micro_batch}",
        )
    if config.init and config.tokenizer is None and config.vocab_size is None:
        own = Path(config.init) / "tokenizer.json"  # the weights need their own tokenizer
        filled["tokenizer"] = str(own) if own.is_file() else None
    if config.name is None:
        filled["name"] = name
    config = replace(config, preset=name, **filled)
    config.validate()
    return cast(ResolvedConfig, config), dict(config.shape(preset), max_seq_len=config.seq_len)
