"""The ways in which the frequencies of RoPE are scaled for longer texts, and their parameters."""

from typing import Any

from .run_options import need

# Parameters of each type of RoPE scaling (names and meaning as in Hugging Face configs).
ROPE_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
}  # fmt: skip
LARGEST = 1e30  # limit of every number in a model's config, below the float32 maximum


def is_positive(value: Any) -> bool:
    """Return True for a number above 0 that is not out of range."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < LARGEST


def rope_type(scaling: dict[str, Any]) -> str:
    """Return the type of a scaling, a key of ROPE_SCALINGS. (Older configs call the field `type`.)"""
    return scaling.get("rope_type", scaling.get("type", "default"))


def check_rope_scaling(scaling: Any) -> None:
    """Raise UserError unless a model's rope_scaling has a known type, and its numbers."""
    need(isinstance(scaling, dict), f"rope_scaling must be a dict or None, got {scaling!r}")
    kind = rope_type(scaling)
    kinds = ", ".join(ROPE_SCALINGS)
    need(
        kind in list(ROPE_SCALINGS),  # `in` a list, because an invalid kind may not be hashable
        f"rope_scaling type {kind!r} is not supported: choose one of {kinds}",
    )
    for key in ROPE_SCALINGS[kind]:
        value = scaling.get(key)
        need(
            is_positive(value),
            f"rope_scaling {kind!r} needs a positive number for {key!r}, got {value!r}",
        )
    need(
        kind != "llama3" or scaling["high_freq_factor"] > scaling["low_freq_factor"],
        "rope_scaling 'llama3': high_freq_factor must be larger than low_freq_factor",
    )
    need(
        kind != "yarn" or scaling["beta_fast"] > scaling["beta_slow"],
        "rope_scaling 'yarn': beta_fast must be larger than beta_slow",
    )
