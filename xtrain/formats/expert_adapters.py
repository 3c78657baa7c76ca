"""LoRA adapters of experts in the files of peft. See adapters.py, and expert_files.py for the models.

    one a and one b for each expert, as peft writes them with transformers 4; written here, too
        mlp.experts.N.gate_proj.lora_A   (r, C)      Mixtral: block_sparse_moe.experts.N.w1.lora_A
        mlp.experts.N.gate_proj.lora_B   (F, r)
    packed, as peft writes them with transformers 5 (target_parameters of its LoraConfig)
        mlp.experts.base_layer.lora_A    (E r, C)    of gate_up_proj (E, 2F, C): b_e a_e is added
        mlp.experts.base_layer.lora_B    (2F, r E)   to gate and up of expert e; column i E + e is
        mlp.experts.lora_A               (E r, F)    the i-th of b_e
        mlp.experts.lora_B               (C, r E)    of down_proj; of the only parameter, if there
                                                     is one

peft 0.18 and later read the first with transformers 5, if gate_proj and up_proj both have adapters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import UserError
from .expert_files import MIXTRAL, mixtral_name
from .tensor_file import Stored

PACKED = "target_parameters"  # the key of adapter_config.json
_A = ".lora_A.weight"
_B = ".lora_B.weight"
_INNER = ".mlp.experts.base_layer"
_OUTER = ".mlp.experts"
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ExpertUpdate:
    """What packed adapters add to one matrix of one expert: factor b a."""

    target: str  # the name of the matrix
    a: Stored
    b: Stored
    factor: float


def packed_updates(
    adapters: dict[str, Stored], content: dict[str, Any], ranks: Any
) -> Iterator[tuple[set[str], list[ExpertUpdate]]]:
    """Yield the names of packed adapters, a and b, and what they add to which matrices.

    adapters: {name: tensor}. content: of adapter_config.json. ranks: adapters.Ranks
    Raises UserError for tensors of another form.
    """
    ends = tuple(f".{name}" for name in content.get(PACKED) or ())
    for name, a in adapters.items():
        module = name.removesuffix(_A)
        b = adapters.get(module + _B)
        if module == name or b is None or not module.endswith((_INNER, _OUTER)):
            continue
        prefix = module.removesuffix(".base_layer")
        # of this module's, in the order in which peft wraps them, the innermost first
        named = [matrix for matrix in _MATRICES if f".{prefix}.{matrix}".endswith(ends)]
        matrix = (named or [*_MATRICES])[0 if module.endswith(_INNER) else -1]
        parts = _MATRICES[matrix]
        r, factor = ranks.of(f"{prefix}.{matrix}")
        flat = len(a.shape) == len(b.shape) == 2
        if not flat or a.shape[0] != b.shape[1] or a.shape[0] % r:
            shapes = f"{a.shape} and {b.shape}, expected rank {r} for each expert"
            raise UserError(f"{a.path}: {name} and its b have shapes {shapes}")
        E = a.shape[0] // r
        rows = b.shape[0] // len(parts)
        yield (
            {name, module + _B},
            [
                ExpertUpdate(
                    f"{prefix}.{e}.{part}.weight",
                    a.rows(e * r, r, a.name),
                    b.every(e, E).rows(i * rows, rows, b.name),
                    factor,
                )
                for e in range(E)
                for i, part in enumerate(parts)
            ],
        )


def file_names(
    tensors: dict[str, Any], adapter: dict[str, Any], config: ModelConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of adapters and the content of their config, under the names of a model's
    files."""
    if config.family != "Mixtral":
        return tensors, adapter
    changed: dict[str, Any] = {}
    if "target_modules" in adapter:  # of LoRA
        changed["target_modules"] = [
            MIXTRAL.get(name) or mixtral_name(f"{name}.").removesuffix(".")
            for name in adapter["target_modules"]
        ]
    for key in ("rank_pattern", "alpha_pattern"):
        if key in adapter:
            changed[key] = {_renamed(name, MIXTRAL): x for name, x in adapter[key].items()}
    renamed = {mixtral_name(name): tensor for name, tensor in tensors.items()}
    return renamed, adapter | changed


def own_names(pattern: dict[str, Any]) -> dict[str, Any]:
    """Return a pattern of ranks under the names that matrices have here."""
    ours = {theirs: name for name, theirs in MIXTRAL.items()}
    return {_renamed(name, ours): value for name, value in pattern.items()}


def _renamed(name: str, names: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda m: names.get(m[0], m[0]), name)
