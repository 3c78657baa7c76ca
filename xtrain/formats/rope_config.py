"""Read the parameters of RoPE in a config.json of transformers.

Both styles: rope_theta and rope_scaling at the top (transformers 4), or rope_parameters (5).
"""

import math
from typing import Any

from ..errors import UserError
from ..rope_scalings import ROPE_SCALINGS, is_positive, rope_type

ZERO_IS_ABSENT = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # keys of YaRN
LOCAL_THETA = "rope_local_base_freq"  # of Gemma 3's layers with a window


def without_local_rope(config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a config with the RoPE of the global layers alone, and theta of the local layers.

    transformers 5 has a set of parameters for either type of layer; rope_scaling is of the global
    ones.
    """
    of_types = config.get("rope_parameters") or {}
    known = ("full_attention", "sliding_attention")
    parameters = [of_types.get(kind) or {} for kind in known] if isinstance(of_types, dict) else []
    if not parameters or set(of_types) - {*known} or not all(type(x) is dict for x in parameters):
        raise UserError(
            f"it needs RoPE {of_types!r}, xtrain supports one set for each type of layer"
        )
    of_global, of_local = parameters
    if rope_type(of_local) != "default":
        raise UserError(
            f"it needs the RoPE type {rope_type(of_local)!r} in layers with a window, which "
            "xtrain does not support"
        )
    scaling = config.get("rope_scaling") or {}
    if isinstance(scaling, dict):
        scaling = {**of_global, **scaling}
    config = {**config, "rope_parameters": None, "rope_scaling": scaling}
    return config, of_local.get("rope_theta", config[LOCAL_THETA])


def read_rope(config: dict[str, Any], max_seq_len: int) -> tuple[float, dict[str, Any] | None]:
    """Return theta, and the scaling or None. The old style wins, as in transformers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"it needs RoPE {rope!r}, xtrain supports one set of parameters")
    for key, supported in (("partial_rotary_factor", (1, None)), ("mrope_section", (None,))):
        if rope.get(key) not in supported:
            raise UserError(f"it needs {key} {rope[key]!r}, which xtrain does not support")
    original = config.get("original_max_position_embeddings")
    if original is not None:
        rope = {**rope, "original_max_position_embeddings": original}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return (10000.0 if theta is None else theta), normalize_scaling(rope, max_seq_len)


def normalize_scaling(scaling: dict[str, Any] | None, max_seq_len: int) -> dict[str, Any] | None:
    """Return {"rope_type": ..., the parameters of that type}, or None without scaling."""
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in list(ROPE_SCALINGS):
        supported = ", ".join(ROPE_SCALINGS)
        raise UserError(f"it needs the RoPE type {kind!r}: xtrain supports {supported}")
    if kind == "default":
        return None
    parameters = {"original_max_position_embeddings": max_seq_len, **scaling}
    if kind == "yarn":
        parameters = _yarn(parameters, max_seq_len)
    return {"rope_type": kind, **{key: parameters.get(key) for key in ROPE_SCALINGS[kind]}}


def _yarn(scaling: dict[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Fill in the missing keys of a YaRN scaling as transformers does."""
    if scaling.get("truncate", True) is not True:
        raise UserError("it needs YaRN with truncate false, which xtrain does not support")
    absent = lambda key, x: x is None or (x == 0 and key in ZERO_IS_ABSENT)
    parameters = {key: x for key, x in scaling.items() if not absent(key, x)}
    parameters = {"beta_fast": 32, "beta_slow": 1} | parameters
    for key in ("mscale", "mscale_all_dim"):
        if key in parameters and not is_positive(parameters[key]):
            raise UserError(f"{key} must be a positive number, got {parameters[key]!r}")
    numbers = ("original_max_position_embeddings", "factor")
    if not all(is_positive(parameters[key]) for key in numbers if key in parameters):
        return parameters  # ModelConfig names what is wrong
    if "factor" not in parameters:
        parameters["factor"] = max_seq_len / parameters["original_max_position_embeddings"]
    size = lambda m: 1 + 0.1 * m * math.log(max(parameters["factor"], 1))
    both = "mscale" in parameters and "mscale_all_dim" in parameters
    if both:
        factor = size(parameters["mscale"]) / size(parameters["mscale_all_dim"])
    else:
        factor = size(1)
    return {"attention_factor": factor} | parameters
