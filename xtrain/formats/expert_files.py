"""Experts in the files of transformers: keys of config.json, names and layouts of tensors.

    one tensor for each expert (published)     Qwen3-MoE, OLMoE    Mixtral
        router                       (E, C)    mlp.gate            block_sparse_moe.gate
        expert N                     (F, C)    mlp.experts.N.      block_sparse_moe.experts.N.
                                               gate_proj, up_proj  w1, w3
                                     (C, F)    down_proj           w2
    packed, as transformers 5 has them in memory and writes with save_original_format=False
        mlp.experts.gate_up_proj (E, 2F, C), mlp.experts.down_proj (E, C, F)

Both layouts are read, under the names of Qwen3-MoE. Written is the published one, which all versions
of transformers read.
"""

import re
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..errors import UserError
from ..json_files import listed
from .tensor_file import Stored

_PER_TOKEN = {"num_experts_per_tok": "experts_per_token"}
_NORM = {"norm_topk_prob": "renormalized_experts"}
KEYS: dict[str, dict[str, str]] = {  # model_type -> key of config.json -> field of ModelConfig
    "qwen3_moe": {"num_experts": "n_experts", "moe_intermediate_size": "expert_hidden_dim"}
    | _PER_TOKEN
    | _NORM,
    "mixtral": {"num_local_experts": "n_experts", "intermediate_size": "expert_hidden_dim"}
    | _PER_TOKEN,
    "olmoe": {"num_experts": "n_experts", "intermediate_size": "expert_hidden_dim"}
    | _PER_TOKEN
    | _NORM,
}
# transformers 5 accepts either name for the other
COUNTS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OURS = {theirs: ours for ours, theirs in MIXTRAL.items()}
_PACKED = {  # end of a packed tensor's name -> the matrices of an expert whose rows it holds
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
}


# ----------------------------------------------------------------------------- config.json
def fields_of_experts(model_type: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that a mixture's config.json decides; {} for other models.

    Raises UserError.
    """
    keys = KEYS.get(model_type, {})
    fields = {}
    for theirs, ours in keys.items():
        value = content[COUNTS[theirs]] if COUNTS.get(theirs) in content else content.get(theirs)
        fields[ours] = value
    if model_type == "qwen3_moe":
        fields["dense_layers"] = _dense_layers(content)
    return fields


def _dense_layers(content):
    """Return the layers with an MLP, as Qwen3-MoE has them in its decoder_sparse_step."""
    step = content.get("decoder_sparse_step", 1)
    listed_layers = content.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise UserError(f"decoder_sparse_step must be a positive whole number, got {step!r}")
    if not isinstance(listed_layers, list):
        raise UserError(f"mlp_only_layers must be a list of layers, got {listed_layers!r}")
    n_layers = content["num_hidden_layers"]
    if type(n_layers) is not int:
        return ()  # ModelConfig refuses it
    return tuple(i for i in range(n_layers) if i in listed_layers or (i + 1) % step)


def keys_of_experts(model_type: str, config: ModelConfig) -> dict[str, Any]:
    """Return what config.json has for a mixture's experts; {} for other models."""
    keys = {theirs: getattr(config, ours) for theirs, ours in KEYS.get(model_type, {}).items()}
    if model_type == "qwen3_moe":
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return keys


# ----------------------------------------------------------------------------- tensors
def expert_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name in the layer: shape} of the tensors that stand in the place of an MLP."""
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (c.n_experts, c.dim)}
    if c.expert_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (c.n_experts,)
    for e in range(c.n_experts):
        for part in ("gate_proj", "up_proj"):
            shapes[f"mlp.experts.{e}.{part}.weight"] = (c.expert_hidden_dim, c.dim)
        shapes[f"mlp.experts.{e}.down_proj.weight"] = (c.dim, c.expert_hidden_dim)
    return shapes


def active_share(c: ModelConfig, name: str) -> float:
    """Return how much of a tensor computes one token: K / E of an expert's, all of the others."""
    if c.n_experts and "experts." in name:
        return c.experts_per_token / c.n_experts
    return 1.0


def one_tensor_each(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Return a mixture's tensors under the names of expert_shapes, without reading them.

    Raises UserError for a packed tensor of another form.
    """
    translated: dict[str, Stored] = {}
    for name, tensor in stored.items():
        ours = re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda m: f"{m[1]}.{_OURS[m[2]]}.", name)
        ours = ours.replace(".block_sparse_moe.", ".mlp.")
        end = next((end for end in _PACKED if ours.endswith(end)), "")
        tensors = _unpacked(ours, tensor, _PACKED[end]) if end else {ours: tensor}
        if twice := sorted(tensors.keys() & translated.keys()):
            raise UserError(f"{tensor.path} holds {listed(twice)} in two layouts")
        translated |= tensors
    return translated


def _unpacked(name, tensor, parts):
    """Return {name: matrix of one expert} of a packed tensor (E, rows, columns)."""
    E, rows, columns = tensor.shape if len(tensor.shape) == 3 else (0, 0, 0)
    n = rows // len(parts)
    if E == 0 or n * len(parts) != rows:
        kind = f"one matrix of {' and '.join(parts)} for each expert"
        raise UserError(f"{tensor.path}: {listed([name])} has shape {tensor.shape}, not {kind}")
    flat = replace(tensor, shape=(E * rows, columns))
    prefix = name[: name.rindex(".")]
    return {
        f"{prefix}.{e}.{part}.weight": flat.rows(e * rows + i * n, n, tensor.name)
        for e in range(E)
        for i, part in enumerate(parts)
    }


def mixtral_name(name: str) -> str:
    """Return what Mixtral's files call a tensor."""
    if ".mlp." not in name:
        return name
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return re.sub(r"\.(gate|up|down)_proj\.", lambda m: f".{MIXTRAL[m[1] + '_proj']}.", name)
