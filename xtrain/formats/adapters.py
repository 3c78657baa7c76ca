"""Read and write LoRA adapters in PEFT's format: adapter_config.json, adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      a (r, I)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      b (O, r)

    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector   m (O,), with use_dora
    base_model.model.model.embed_tokens.lora_embedding_A                a (r, V), and b (C, r)
    base_model.model.lm_head.weight                                     in place of the model's: a bias,
                                                                        or one of modules_to_save

The weight w of q_proj becomes w + factor b a, and with m each row of that gets the norm m. The table w
becomes w + factor (b a)^T. With PiSSA w is first reduced (tensor_file.LowRank.residual). Rank and alpha
may differ by matrix (rank_pattern, alpha_pattern). The config names the folder of the model to which the
adapters belong. A folder with adapters can be given wherever a model's folder can: they are added
to the weights while these are read.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import listed, read_json
from .architectures import HEAD, TABLE, VARIATION, architecture_of
from .expert_adapters import PACKED, own_names, packed_updates
from .expert_files import one_tensor_each
from .saved_runs import CONFIG, model_folder
from .tensor_file import LowRank, Stored, read_header, write_safetensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DRAFT_HEADS = "XTRAIN_DRAFT_HEADS"  # peft_type of what is not LoRA: nn/draft_heads.py
A = ".lora_A.weight"
B = ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
EMBEDDING_A = ".lora_embedding_A"
EMBEDDING_B = ".lora_embedding_B"
PISSA = "pissa"  # of init_lora_weights
PATTERNS = ("rank_pattern", "alpha_pattern")
# what nn/lora.py can train, and `merged` add to a model, but not switched adapters: keys, or a value
TRAINED = (*PATTERNS, "use_dora", "bias", "modules_to_save", PISSA)
MERGED = (*TRAINED, PACKED)
# keys of adapter_config.json that change the result -> the values that mean "not used"
UNUSED: dict[str, tuple] = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # pissa, olora, corda and others: peft changes the model's own weights before it adds such
    # adapters
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def is_adapter(folder: Path) -> bool:
    """Return True if the folder holds adapters instead of a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """Return the folder of the model that the adapters in `folder` belong to, or `folder` itself.

    Raises UserError if the model cannot be found.
    """
    if not is_adapter(folder):
        return folder
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / ADAPTER_CONFIG} names no model: set base_model_name_or_path to its folder"
        )
    try:
        model = model_folder(Path(base))
    except UserError as error:
        raise UserError(
            f"{folder} holds adapters of a model that cannot be read: {error}, or set "
            f"base_model_name_or_path in its {ADAPTER_CONFIG}"
        ) from None
    if is_adapter(model):
        raise UserError(f"{folder} holds adapters of adapters, in {model}: merge those first")
    return model


def source_of(folder: Path, *names: str) -> Path:
    """Return `folder` if it has one of these files, else the folder of its adapters' model."""
    if any((folder / n).is_file() for n in names):
        return folder
    return base_folder(folder)


@dataclass(frozen=True)
class Ranks:
    """The rank and alpha of each matrix.

    rank, alpha: of all that have none in a pattern.
    ranks, alphas: {regular expression of the end of a name: number}; the first that fits decides.
    by_root: the factor is alpha / sqrt(rank), not alpha / rank.

    Raises UserError if a pattern is not a regular expression.
    """

    rank: int
    alpha: float
    ranks: dict[str, int]
    alphas: dict[str, float]
    by_root: bool

    def __post_init__(self):
        for key in (*self.ranks, *self.alphas):
            try:
                re.compile(key)
            except re.error as error:
                raise UserError(
                    f"{key!r} is not a regular expression ({error}): give the end of a matrix's name"
                ) from None

    def of(self, name: str) -> tuple[int, float]:
        """Return the rank and the factor of b a of a matrix: "model.layers.0.self_attn.q_proj"."""
        rank = _first_match(self.ranks, name, self.rank)
        alpha = _first_match(self.alphas, name, self.alpha)
        return rank, alpha / (rank**0.5 if self.by_root else rank)

    def unused(self, names: list[str]) -> list[str]:
        """Return the patterns that fit none of these matrices."""
        patterns = (*self.ranks, *self.alphas)
        return [key for key in patterns if not any(_fits(key, name) for name in names)]


@dataclass(frozen=True)
class LoraPart:
    """Where one of several adapters of a packed matrix (O, I) adds its product to y (N, O).

    columns: of y.
    ranks: columns of x a^T, its own.
    factor: of its product.
    """

    columns: slice
    ranks: slice
    factor: float


def _first_match(pattern: dict[str, Any], name: str, default: Any) -> Any:
    for key, value in pattern.items():
        if _fits(key, name):
            return value
    return default


def _fits(key: str, name: str) -> bool:
    """Return True if a pattern is the end of a matrix's name."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def read_ranks(folder: Path, supported: tuple[str, ...]) -> Ranks:
    """Return the ranks of the adapters in a folder. Raises UserError for what is not supported.

    supported: keys of UNUSED that the caller can use, or their values.
    """
    path = folder / ADAPTER_CONFIG
    content = read_json(path)
    if content.get("peft_type") == DRAFT_HEADS:
        raise UserError(
            f"{folder} holds draft heads, not a model: give the folder of their model with "
            f"--model {content.get('base_model_name_or_path')}, and this one with --draft"
        )
    if content.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type {content.get('peft_type')!r} is not supported, LORA is")
    for key, values in UNUSED.items():
        value = content.get(key, values[0])
        if value not in values and not {key, str(value)}.intersection(supported):
            how = "merge it with peft"
            if {key, str(value)}.intersection(MERGED):
                how = "merge it with `xtrain export --merge`"
            raise UserError(f"{path}: {key} {value!r} is not supported here: {how}")
    ranks = content.get("rank_pattern") or {}
    alphas = content.get("alpha_pattern") or {}
    r: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise UserError(f"{path}: rank_pattern and alpha_pattern must be objects")
    all_ranks = [r, *ranks.values()]
    all_alphas = [alpha, *alphas.values()]
    are_ranks = all(type(x) is int and x > 0 for x in all_ranks)
    if not (are_ranks and all(type(x) in (int, float) and 0 < x < 1e6 for x in all_alphas)):
        raise UserError(f"{path}: r {r!r} and lora_alpha {alpha!r} must be positive numbers")
    by_root = bool(content.get("use_rslora"))
    return Ranks(r, alpha, own_names(ranks), own_names(alphas), by_root)


def read_adapters(folder: Path) -> dict[str, Stored]:
    """Return {name without PREFIX: tensor}, those of experts as Qwen3-MoE has them. Raises
    UserError."""
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise UserError(
            f"{folder} has an {ADAPTER_CONFIG}, but no {ADAPTER_WEIGHTS}: copy it there, or save "
            "the adapters as safetensors"
        )
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in read_header(path).items()}
    return one_tensor_each(stored)


def read_modules(folder: Path) -> frozenset[str]:
    """Return the names of the matrices that have adapters: "model.layers.0.self_attn.q_proj"."""
    names = [name for name in read_adapters(folder) if name.endswith((A, EMBEDDING_A))]
    return frozenset(name.removesuffix(A).removesuffix(EMBEDDING_A) for name in names)


def merged(stored: dict[str, Stored], folder: Path, tied: bool) -> dict[str, Stored]:
    """Add the adapters in `folder` to a model's tensors, on reading.

    tied: the model has one matrix as embedding and head, which adapters would divide.
    Raises UserError if they do not fit.
    """
    ranks = read_ranks(folder, MERGED)
    adapters = read_adapters(folder)
    unused = set(adapters)
    updated = {n: w for n, w in stored.items() if not (tied and n in (TABLE, HEAD))}
    for name, tensor in adapters.items():  # a bias, or of modules_to_save
        target = name.replace(".base_layer.", ".")
        if target in updated and tensor.shape == updated[target].shape:
            updated[target] = tensor
            unused.remove(name)
    content = read_json(folder / ADAPTER_CONFIG)
    for names, updates in packed_updates(adapters, content, ranks):
        for x in updates:
            w = updated.get(x.target)
            if w is None or w.shape != (x.b.shape[0], x.a.shape[1]):
                raise UserError(
                    f"{folder}: the adapters do not fit the model: {listed(sorted(names))} belong "
                    f"to {x.target} {w and w.shape}"
                )
            updated[x.target] = replace(w, update=LowRank(x.a, x.b, x.factor))
        unused -= names
    residual = content.get("init_lora_weights") == PISSA
    for name in [n for n in adapters if n.endswith((A, EMBEDDING_A))]:
        transposed = name.endswith(EMBEDDING_A)
        module = name.removesuffix(A).removesuffix(EMBEDDING_A)
        target = f"{module}.weight"
        of_b = module + (EMBEDDING_B if transposed else B)
        w = updated.get(target)
        b = adapters.get(of_b)
        if w is None or b is None:
            continue
        rank, factor = ranks.of(module)
        a = adapters[name]
        m = adapters.get(module + MAGNITUDE)
        shape = w.shape[::-1] if transposed else w.shape
        fits = len(shape) == 2 and (a.shape, b.shape) == ((rank, shape[1]), (shape[0], rank))
        if not fits or (m is not None and (transposed or m.shape != shape[:1])):
            shapes = f"{a.shape} and {b.shape} with rank {rank}, {target} {w.shape}"
            raise UserError(f"{folder}: the adapters do not fit the model: {name} has {shapes}")
        update = LowRank(a, b, factor, m, transposed, residual and not transposed)
        updated[target] = replace(w, update=update)
        unused -= {name, of_b, module + MAGNITUDE}
    if unused:
        raise without_matrices(folder, unused)
    return stored | updated


def without_matrices(folder: Path, unused: set[str]) -> UserError:
    """Return the refusal of tensors in `folder` that are adapters of none of the model's matrices."""
    return UserError(
        f"{folder}: the model has no matrices for the adapters {listed(sorted(unused))}: if it "
        "is the right one, merge them with peft"
    )


def check_writable(folder: Path) -> None:
    """Raise UserError if PEFT has other names for this model's adapters.

    This is so where the model's file packs or scales the matrices.
    """
    content = read_json(folder / CONFIG)
    if VARIATION in content:
        return  # peft does not know such a model
    architecture = architecture_of(content)
    if architecture.packed or architecture.multipliers:
        raise UserError(
            f"{folder}: the files of a {architecture.model_type} hold other matrices than peft's "
            "adapters would need: write it as a "
            "Llama first, Transformer.from_pretrained(folder).save_pretrained(new folder, "
            "tokenizer)"
        )


def write_adapters(folder: Path, tensors: dict[str, Any], adapter: dict[str, Any]) -> None:
    """Write both files into a folder. Raises OSError.

    tensors: {name: tensor}
    adapter: keys of adapter_config.json
    """
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **adapter,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    named = {PREFIX + name: tensors[name] for name in sorted(tensors)}
    write_safetensors(folder / ADAPTER_WEIGHTS, named)
