"""generation_config.json: how a model's publisher wants its texts to be chosen.

What the engine can do is the default of serve, chat, generate and evaluate, with the meaning of
transformers' generate: without sampling the most likely token is taken, and only repetition_penalty
counts; temperature, top_k, top_p and min_p count when tokens are drawn. One difference: a top_k
that the file does not give is off, in transformers it is 50.

What the engine cannot do is named in a warning. It is not refused: the texts are still the model's,
chosen by another rule, and log-probabilities do not depend on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_files import listed, read_json, read_json_if_present

FILE = "generation_config.json"
NUMBER = ((int, float), "a number")
WHOLE = ((int,), "a whole number")
TYPES = {  # what is taken over; all but do_sample are options of Engine.stream
    "do_sample": ((bool,), "true or false"),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": WHOLE,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "max_new_tokens": WHOLE,
}
OFF: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}  # they change nothing
# What changes the text and is not supported -> the value that changes nothing. Neither do None, 0,
# False and an empty list.
UNSUPPORTED = {
    "num_beams": 1, "num_return_sequences": 1, "typical_p": 1, "encoder_repetition_penalty": 1, "guidance_scale": 1,
} | dict.fromkeys([
    "min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "suppress_tokens",
    "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "top_h",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "penalty_alpha", "dola_layers", "stop_strings",
    "max_time", "token_healing", "watermarking_config", "constraints", "force_words_ids",
], 0)  # fmt: skip
IGNORED = {  # they do not change which tokens are chosen
    # ids that are read elsewhere, or that only encoder-decoder models have
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    # the version of the file
    "transformers_version", "_from_model_config",
    # a limit of the whole sequence: --max-seq-len
    "max_length",
    # of beam search: num_beams itself is named
    "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty",
    # how it is computed
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
    "compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits", "remove_invalid_values",
    # what is returned next to the text
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    # speculative decoding, which keeps the distribution
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp",
}  # fmt: skip


def read_generation(folder: Path, config: Path) -> dict[str, Any] | None:
    """Return the content of a folder's generation_config.json; without one, what config.json says
    about generating, as in transformers; None if neither says anything. Raises UserError.

    folder, config: the folders that have the one file, and the other.
    """
    if (folder / FILE).is_file():
        return read_json(folder / FILE)
    content = read_json_if_present(config / "config.json")
    # older models repeat transformers' defaults there
    known = dict.fromkeys(TYPES, 1) | {"top_k": 50} | UNSUPPORTED
    return {k: x for k, x in content.items() if k in known and x and x != known[k]} or None


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says; None: nothing.

    unsupported: "name value" of each entry that the engine cannot do.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    unsupported: tuple[str, ...] = ()

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> "GenerationDefaults":
        """Read the content of a file, the `generation` of a model. Raises UserError for a value
        that is out of range."""
        content = {name: value for name, value in (content or {}).items() if value is not None}
        values = {name: content[name] for name in TYPES if name in content}
        _check(values)
        other = {k: x for k, x in content.items() if k not in values and k not in IGNORED and x}
        wrong = [f"{name} {x!r}" for name, x in other.items() if x != UNSUPPORTED.get(name)]
        return cls(**values, unsupported=tuple(wrong))

    def fill(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of Engine.stream: those that the user has given, else the file's, else the
        command's own.

        own: must have a temperature. A do_sample that the file does not give is temperature > 0.
        """
        values = dict(own)
        if self.do_sample:  # what the file does not give is off then
            values |= OFF | {"temperature": 1.0}
        drawn = self.do_sample is not False and values["temperature"] > 0
        taken = {name: getattr(self, name) for name in TYPES if name != "do_sample"}
        values |= {name: value for name, value in taken.items() if value is not None}
        if not drawn:
            values["temperature"] = 0.0
        return {**values, **given}

    def notes(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Return lines for the user: what the file decides, and what it says in vain. Arguments as
        in `fill`."""
        lines = []
        values = self.fill(given, own)
        drawing = values["temperature"] or own["temperature"]  # a request may give another one
        if not given.get("temperature", drawing):
            values = {k: x for k, x in values.items() if k not in ("top_k", "top_p", "min_p")}
        used = {k: x for k, x in values.items() if k not in given and x != {**OFF, **own}.get(k)}
        if used:
            lines.append(f"{FILE}: {', '.join(f'{k} {x}' for k, x in used.items())}")
        if self.unsupported:
            lines.append(
                f"{FILE} sets {listed(list(self.unsupported))}: xtrain does not support this, so "
                "its texts differ from those of transformers; remove it for the same texts in both"
            )
        return lines


def _check(values: dict[str, Any]) -> None:
    """Raise UserError unless each value has its type and is in range."""
    # here, because commands that do not generate start sooner without the kernels
    from ..kernels.decoding.penalties import PenaltyRules
    from ..kernels.decoding.sampling import check_sampling

    for name, value in values.items():
        kinds, expected = TYPES[name]
        if type(value) not in kinds:
            raise UserError(
                f"{FILE}: {name} must be {expected}, got {listed([repr(value)])}: correct it"
            )
    if values.get("max_new_tokens", 1) < 1:
        raise UserError(f"{FILE}: max_new_tokens must be at least 1: correct it")
    values = OFF | {"temperature": 0.0} | values
    try:
        check_sampling(values["temperature"], values["top_k"], values["top_p"], values["min_p"])
        PenaltyRules(values["repetition_penalty"]).check()
    except ValueError as error:
        raise UserError(f"{FILE}: {error}: correct it") from None
