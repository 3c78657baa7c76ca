"""Configuration: the shape of a model and the options of a training run, as frozen dataclasses with
units on every field.

The command line (`python -m xtrain.train --help`) is generated from TrainConfig; checkpoints store
both as JSON.
"""

import math
import numbers
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from . import family
from .rope_scalings import LARGEST, check_rope_scaling, is_positive, rope_type
from .run_options import (
    MAX_COUNT,
    ExpertOptions,
    OptimizerOptions,
    ParallelOptions,
    RowOptions,
    RunOptions,
    need,
    need_positive,
    option_name,
)

GEMMA = (
    "sandwich_norms",
    "gelu",
    "scaled_embedding",
    "query_pre_attn_scalar",
    "local_rope_theta",
)
FEATURES = (
    "qk_norm",
    "joint_qk_norm",
    "qkv_bias",
    "no_rope_layers",
    *GEMMA,
    "n_experts",
    "expert_bias",
    "sliding_window",
)  # of ModelConfig, in which families of models differ
FAMILIES = {
    "Llama": "",
    "Qwen3": "qk_norm",
    "Qwen2": "qkv_bias",
    "SmolLM3": "no_rope_layers",
    "Gemma3": " with ".join(("qk_norm", *GEMMA)),
    "Qwen3Moe": "qk_norm with n_experts",
    "Olmoe": "qk_norm with joint_qk_norm with n_experts",
    "Mixtral": "n_experts",
}
# Fields of ModelConfig on which the shapes of tensors depend.
SHAPES = (
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "qk_norm",
    "joint_qk_norm",
    "qkv_bias",
    "tie_embeddings",
    "sandwich_norms",
    "n_experts",
    "expert_hidden_dim",
    "dense_layers",
    "expert_bias",
)
# Larger sizes are damage or a mistake: they would fill the memory before they are found to be wrong.
MOST = {
    "vocab_size": 1 << 22,
    "dim": 1 << 18,
    "hidden_dim": 1 << 20,
    "n_layers": 1 << 10,
    "n_heads": 1 << 12,
    "n_kv_heads": 1 << 12,
    "max_seq_len": 1 << 24,
    "n_experts": 1 << 10,
    "experts_per_token": 32,  # kernels/experts/routing.py: a lane of a warp for each
    "expert_hidden_dim": 1 << 20,
}
MOST_TOKENS = 1 << 24  # of one forward pass
# the vocabulary is padded to a multiple in memory: an odd width makes the head's GEMM 5 times
# slower
VOCAB_MULTIPLE = 128
SHAPE_OPTIONS = {  # of a command -> the field of ModelConfig
    "dim": "dim", "layers": "n_layers", "heads": "n_heads", "kv_heads": "n_kv_heads", "head_dim": "head_dim",
    "hidden_dim": "hidden_dim", "qk_norm": "qk_norm", "tie_embeddings": "tie_embeddings",
    "experts": "n_experts", "experts_per_token": "experts_per_token",
    "expert_hidden_dim": "expert_hidden_dim", "expert_bias": "expert_bias",
}  # fmt: skip
LENGTHS = {"vocab_size": "vocab_size", "seq_len": "max_seq_len"}  # the same of other options
FLAGS = ("qk_norm", "tie_embeddings", "expert_bias")  # of SHAPE_OPTIONS; the others are sizes
SIZE_OPTIONS = [name for name in SHAPE_OPTIONS if name not in FLAGS]
DERIVED: Any = None  # default of a field that __post_init__ computes from the others


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder: of a Llama, or of another family (FAMILIES) by its features. Raises
    UserError on an invalid shape."""

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
    sandwich_norms: bool = False  # RMSNorm after attention and after the MLP, too (Gemma 3)
    gelu: bool = False  # GELU instead of SiLU in the MLP (Gemma)
    scaled_embedding: bool = False  # times sqrt(dim) (Gemma)
    query_pre_attn_scalar: float = 0.0  # scores are divided by its root; 0: by that of head_dim
    local_rope_theta: float = 0.0  # rope_theta of layers with a window, unscaled; 0: as the others
    # E, experts of a layer, each an MLP, in the place of its MLP; 0: none (Mixtral, Qwen3-MoE)
    n_experts: int = 0
    experts_per_token: int = 0  # K, those of largest probability
    expert_hidden_dim: int = 0  # F, width of one expert; 0: hidden_dim
    # the K probabilities are divided by their sum (Mixtral; norm_topk_prob of Qwen3-MoE and OLMoE)
    renormalized_experts: bool = True
    dense_layers: tuple[int, ...] = ()  # that keep their MLP
    # a bias is added to the probabilities when experts are chosen; training levels the load with it
    expert_bias: bool = False
    joint_qk_norm: bool = False  # each of the QK-norms is over all heads at once (OLMoE)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len"):
            self._positive_int(name)
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.head_dim is None:
            need(
                self.dim % self.n_heads == 0,
                f"dim {self.dim} is not divisible by n_heads {self.n_heads}: choose a divisor or "
                "give head_dim",
            )
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", -(-8 * self.dim // (3 * 64)) * 64)
        for name in ("n_kv_heads", "head_dim", "hidden_dim"):
            self._positive_int(name)
        need(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}: "
            "every key/value head must serve the same number of query heads",
        )
        need(
            self.head_dim % 2 == 0,
            f"head_dim {self.head_dim} is odd: RoPE rotates pairs, give an even head_dim",
        )
        need(
            self.head_dim <= 256,
            f"head_dim {self.head_dim} is larger than 256, the widest head that the kernels "
            "support",
        )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            need(is_positive(value), f"{name} must be a positive number, got {value!r}")
        for name in ("query_pre_attn_scalar", "local_rope_theta"):
            value = getattr(self, name)
            ok = type(value) in (int, float) and 0 <= value < LARGEST
            need(ok, f"{name} must be a positive number, or 0, got {value!r}")
        for name in (field.name for field in fields(self) if field.type is bool):
            value = getattr(self, name)
            need(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        for name in ("no_rope_layers", "full_attention_layers", "dense_layers"):
            layers = getattr(self, name)
            ok = isinstance(layers, (tuple, list)) and all(type(i) is int for i in layers)
            need(ok, f"{name} must be numbers of layers, got {layers!r}")
            need(
                all(0 <= i < self.n_layers for i in layers),
                f"{name} names a layer beyond the {self.n_layers}: {list(layers)}",
            )
            object.__setattr__(self, name, tuple(sorted(set(layers))))
        if self.sliding_window != 0:
            self._positive_int("sliding_window")
        need(
            self.sliding_window > 0 or not self.full_attention_layers,
            "full_attention_layers are given, but no sliding_window that the other layers have",
        )
        need(
            self.qk_norm or not self.joint_qk_norm,
            "joint_qk_norm is given, but no qk_norm: set qk_norm, too",
        )
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)
        self._check_experts()

    def _check_experts(self):
        if self.n_experts == 0:
            for name in ("experts_per_token", "expert_hidden_dim", "dense_layers", "expert_bias"):
                need(not getattr(self, name), f"{name} is given, but no n_experts: give both")
            return
        if self.expert_hidden_dim == 0:
            object.__setattr__(self, "expert_hidden_dim", self.hidden_dim)
        for name in ("n_experts", "experts_per_token", "expert_hidden_dim"):
            self._positive_int(name)
        need(
            self.experts_per_token <= self.n_experts,
            f"experts_per_token {self.experts_per_token} is larger than n_experts "
            f"{self.n_experts}: give at most as many",
        )
        need(
            len(self.dense_layers) < self.n_layers,
            "dense_layers names every layer, so that none has experts: set n_experts to 0",
        )
        need(not self.gelu, "gelu is not supported with n_experts: experts have SwiGLU")

    def _positive_int(self, name):
        value = getattr(self, name)
        ok = isinstance(value, numbers.Integral) and not isinstance(value, bool) and value > 0
        need(ok, f"{name} must be a positive whole number, got {value!r}")
        object.__setattr__(self, name, int(value))  # also of NumPy
        limit = MOST.get(name, MAX_COUNT)
        need(value <= limit, f"{name} must be at most {limit}, got {value}")

    @property
    def family(self) -> str:
        """The models of transformers that have these features: a key of FAMILIES; "" if none has
        all of them.

        A window is Mistral's, in all layers; or, in some or all layers, that of the others.
        """
        features = self.features.removesuffix("sliding_window").removesuffix(" with ")
        family = next((name for name, has in FAMILIES.items() if has == features), "")
        if family == "Llama" and self.sliding_window:
            if self.full_attention_layers:
                return ""
            return "Mistral"
        if self.n_experts and not self._is_mixture(family):
            return ""
        return family

    def _is_mixture(self, family):
        """Return True if the family's class of transformers can express the mixture of experts."""
        if self.full_attention_layers:
            return False
        if family == "Qwen3Moe":
            return True
        if family == "Mixtral":
            return self.renormalized_experts and not self.dense_layers
        plain = not (self.dense_layers or self.sliding_window)
        return plain and self.n_heads * self.head_dim == self.dim  # OLMoE has no head_dim

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has experts in the place of its MLP."""
        return self.n_experts > 0 and layer not in self.dense_layers

    @property
    def attention_scale(self) -> float:
        """The factor of the scores."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    def window(self, layer: int) -> int:
        """Return the sliding window of a layer, 0 for none."""
        if layer in self.full_attention_layers:
            return 0
        return self.sliding_window

    @property
    def features(self) -> str:
        """The features in which families of models differ: names of fields, "" for none."""
        return " with ".join(name for name in FEATURES if getattr(self, name))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table and of the head in memory; those from vocab_size on are zero
        and stay zero."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def rope_type(self) -> str:
        """The type of RoPE scaling, a key of ROPE_SCALINGS."""
        return rope_type(self.rope_scaling or {})

    @property
    def context(self) -> int:
        """Longest sequence that the model accepts: max_seq_len, and with dynamic RoPE scaling
        `factor` times that.

        With YaRN at least `factor` times the length for which the model was trained before.
        """
        if self.rope_scaling is None or self.rope_type not in ("dynamic", "yarn"):
            return self.max_seq_len
        trained = self.rope_scaling.get("original_max_position_embeddings", self.max_seq_len)
        if self.rope_type == "dynamic":
            trained = self.max_seq_len
        return max(self.max_seq_len, int(min(self.rope_scaling["factor"], 2**31) * trained))

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value}, ready for JSON; the opposite of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Make a config of what `to_dict` returns. Raises UserError that names every unknown and
        every missing key."""
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - names)
        missing = sorted({"vocab_size", "dim", "n_layers", "n_heads"} - set(values))
        need(
            not unknown,
            f"unknown model config {', '.join(unknown)}: the fields are {', '.join(sorted(names))}",
        )
        need(not missing, f"the model config lacks {', '.join(missing)}")
        return cls(**values)


@dataclass(frozen=True)
class ShapeOptions:
    """The shape of a new model: a preset's, with what is given instead."""

    # tiny, dim384, dim512, dim768 or gpt124m; auto: tiny on a CPU, dim384 on a GPU
    preset: str = "auto"
    # instead of a preset, a member of a family: layers, from which width, heads, batch, rate and
    # steps follow (xtrain/family.py)
    depth: int | None = None
    dim: int | None = None  # width; none: the preset's
    layers: int | None = None  # blocks; none: the preset's
    heads: int | None = None  # query heads; none: the preset's
    kv_heads: int | None = None  # key/value heads; none: the preset's, or as many as query heads
    head_dim: int | None = None  # width of a head; none: the preset's, or dim / heads
    # width of the MLP; none: the preset's, or about 8/3 of a given dim
    hidden_dim: int | None = None
    qk_norm: bool | None = None  # RMSNorm over each query and key head; none: the preset's
    tie_embeddings: bool | None = None  # the output head is the embedding; none: the preset's
    # experts in the place of each MLP: a mixture of experts; none: no experts
    experts: int | None = None
    experts_per_token: int | None = None  # experts that compute each token; none: 2 of --experts
    expert_hidden_dim: int | None = None  # width of one expert; none: that of the MLP
    # experts are chosen with a bias, moved after each step so that they get equally many tokens;
    # none: without
    expert_bias: bool | None = None

    def shape(self, preset: "Preset") -> dict[str, Any]:
        """Return the fields of ModelConfig, without vocab_size and max_seq_len."""
        values = {name: getattr(self, option) for option, name in SHAPE_OPTIONS.items()}
        values = {name: value for name, value in values.items() if value is not None}
        shape = dict(preset.model)
        if "dim" in values:  # heads of the same width as before, and the default MLP
            shape |= {"n_heads": max(values["dim"] // shape["head_dim"], 1), "n_kv_heads": None}
            shape["hidden_dim"] = None
        if "n_heads" in values:
            shape |= {"head_dim": None, "n_kv_heads": None}
        if "n_experts" in values:
            shape["experts_per_token"] = min(2, values["n_experts"])
        return shape | values


@dataclass(frozen=True)
class TrainConfig(ShapeOptions, ParallelOptions, ExpertOptions, OptimizerOptions, RowOptions):
    """One training run on text. Defaults come from the preset; explicit options override them."""

    divides_weights: ClassVar[bool] = True
    # stop at a file that cannot be read, instead of leaving it out
    strict_data: bool = False
    # vocabulary size of the tokenizer that is trained on the text; none: the preset's
    vocab_size: int | None = None
    # use this tokenizer.json, or that of a folder, instead of training one; none: with --init the
    # model's own
    tokenizer: str | None = None
    # read the text and its token cache and compare checksums, even if sizes and times say that
    # nothing has changed
    verify_data: bool = False

    def validate(self) -> None:
        """Raise UserError on a value out of range."""
        super().validate()
        need_positive(self, ("vocab_size", "depth", *SIZE_OPTIONS))
        need(
            self.depth is None or self.preset == "auto" or not self.resume,
            "--depth decides the shape, which a resumed run keeps: omit --depth",
        )
        need(
            self.depth is None or (self.preset == "auto" and not (self.init and not self.resume)),
            "--depth decides the shape: give neither --preset nor --init with it",
        )
        need(
            (self.depth or 0) <= family.MAX_DEPTH,
            f"--depth must be at most {family.MAX_DEPTH}, got {self.depth}",
        )
        for option, name in (SHAPE_OPTIONS | LENGTHS).items():
            value = getattr(self, option)
            most = MOST.get(name, MAX_COUNT)
            need(
                value is None or value <= most,
                f"{option_name(option)} must be at most {most}, got {value}",
            )
        shape_options = [name for name in SHAPE_OPTIONS if getattr(self, name) is not None]
        need(
            not (shape_options and self.init and not self.resume),
            f"{', '.join(map(option_name, shape_options))} cannot be given with --init: the model "
            "has the shape of that folder",
        )
        need(self.tokenizer != "", "--tokenizer is empty: give a path, or omit the option")

    def default_name(self, gpu: bool) -> str:
        """Return the preset, with auto replaced: dN with --depth N, else tiny on a CPU, dim384 on a
        GPU."""
        if self.depth is not None:
            return f"d{self.depth}"
        if self.preset != "auto":
            return self.preset
        return "dim384" if gpu else "tiny"

    def presets(self) -> "dict[str, Preset]":
        """Return what --preset may name."""
        return PRESETS

    def _preset(self, name: str) -> "Preset":
        """Return the preset of this name, or that of --depth. Raises UserError."""
        if self.depth is not None:
            shape = family.shape(self.depth)
            fields_of_shape = self.shape(Preset(shape, {}))
            model = ModelConfig(vocab_size=self.vocab_size or family.VOCAB_SIZE, **fields_of_shape)
            seq_len = self.seq_len or family.SEQ_LEN
            return Preset(shape, family.options(model, seq_len, self.batch, self.steps))
        presets = self.presets()
        names = ", ".join(presets)
        need(name in presets, f"--preset {name!r} is not known: choose one of auto, {names}")
        return presets[name]

    def filled(self, gpu: bool) -> "tuple[TrainConfig, dict[str, Any]]":
        """Return the config with the options that its preset decides, and the shape of a new model
        without its vocabulary."""
        name = self.default_name(gpu)
        preset = self._preset(name)
        if self.depth is not None:
            name = self.preset
        values = {key: x for key, x in preset.train.items() if getattr(self, key) is None}
        steps = self.steps or preset.train["steps"]
        if "warmup" in values and values["warmup"] > steps - 2:
            values["warmup"] = (steps - 1) // 2
        if self.init and self.tokenizer is None and self.vocab_size is None:
            own = Path(self.init) / "tokenizer.json"  # the weights need their own tokenizer
            values["tokenizer"] = None
            if own.is_file():
                values["tokenizer"] = str(own)
        return replace(self, preset=name, **values), self.shape(preset)


class ResolvedConfig(TrainConfig):
    """The type of a config after `resolve`: these fields are no longer None. (For type checkers;
    never instantiated.)"""

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
    """A named model shape and the training options that suit it. The tokenizer determines the
    vocabulary size."""

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


def may_change(config: RunOptions) -> set[str]:
    """Return what --allow-change may name."""
    return config.may_change() | {f.name for f in fields(ModelConfig)}


def resolve(config: RunOptions, gpu: bool, world: int = 1) -> tuple[ResolvedConfig, dict[str, Any]]:
    """Return the config with every None filled from its preset, and the shape of a new model
    without its vocabulary.

    gpu: is the run on a GPU?
    world: ranks that share a batch.
    Raises UserError on values out of range, alone or in combination with the preset's.
    """
    config.validate()
    allowed = may_change(config)
    for name in config.allow_change:
        need(
            name.replace("-", "_") in allowed,
            f"--allow-change {repr(name)[1:-1]} is not known: choose from "
            f"{', '.join(sorted(allowed))}",
        )
    filled, shape = config.filled(gpu)
    steps, batch = filled.steps, filled.batch
    need(
        config.resume or not filled.warmup or filled.warmup <= steps - 2,
        f"--warmup {filled.warmup} leaves no steps of --steps {steps} for the decay of the "
        f"learning rate: give at most {max(0, steps - 2)}",
    )  # earlier versions accepted it: such a run can be resumed
    need(
        batch % world == 0,
        f"--batch {batch} is not a multiple of the {world} ranks: choose one that is",
    )
    micro_batch = filled.micro_batch or batch // world
    if config.micro_batch is None:
        micro_batch = math.gcd(micro_batch, batch // world)
    need(
        world == 1 or batch // world % micro_batch == 0,
        f"--batch {batch} is not a multiple of {world} ranks x --micro-batch {micro_batch}",
    )
    tokens = micro_batch * filled.seq_len
    need(
        tokens <= MOST_TOKENS,
        f"--micro-batch {micro_batch} x --seq-len {filled.seq_len} are {tokens} tokens in one "
        f"forward pass, more than {MOST_TOKENS}: give a smaller --micro-batch, the same step in "
        "several passes",
    )
    name = filled.name or filled.default_name(gpu)
    resolved = replace(filled, micro_batch=micro_batch, name=name)
    resolved.validate()
    return cast(ResolvedConfig, resolved), dict(shape, max_seq_len=resolved.seq_len)
