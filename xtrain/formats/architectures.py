"""Map config.json and tensor names of transformers' models to ModelConfig and xtrain's names.

    LlamaForCausalLM    the decoder of nn/model.py without the following
    Qwen3ForCausalLM    qk_norm
    Qwen2ForCausalLM    qkv_bias; also Qwen2.5 and R1-Distill-Qwen
    SmolLM3ForCausalLM  no_rope_layers
    MistralForCausalLM  sliding_window in all layers; without it, a Llama
    Phi3ForCausalLM     a Llama (with a window, a Mistral) that packs q, k, v, and gate and up
    GraniteForCausalLM  a Llama with four multipliers, which are multiplied into the weights
    Gemma3ForCausalLM   qk_norm and all of config.GEMMA; windows in most layers, which have another
                        RoPE; a norm multiplies by 1 + w, which is added to the weights on reading
    Qwen3MoeForCausalLM qk_norm and n_experts, in some layers an MLP: expert_files.py
    OlmoeForCausalLM    joint_qk_norm and n_experts
    MixtralForCausalLM  n_experts; a window in all layers, or none

Phi3 and Granite are read as a Llama and written as one, which computes the same; Granite's head is then
not tied. Phi3 includes Phi-4. Qwen and SmolLM3 may have a sliding_window in some layers. A window
that is not shorter than the context is ignored.

Both config styles are read and written: rope_theta and rope_scaling at the top (transformers 4) or
inside rope_parameters (5), torch_dtype or dtype. A config that needs a feature that xtrain lacks
raises UserError, which names the feature.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import MOST, ModelConfig
from ..errors import UserError
from ..json_files import listed
from ..rope_scalings import is_positive
from .expert_files import KEYS, expert_shapes, fields_of_experts, keys_of_experts, one_tensor_each
from .four_bit_files import KEY as QUANTIZATION
from .four_bit_files import check_method
from .rope_config import LOCAL_THETA, normalize_scaling, read_rope, without_local_rope
from .tensor_file import Stored
from .unsupported import REASONS

# In the config.json of a model that transformers does not have: Transformer.variation, its
# ModelConfig, and Transformer.change.
VARIATION = "xtrain_variation"
SHAPE = "xtrain_config"
CHANGE = "xtrain_change"
TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
FIELDS = {  # Hugging Face's name -> ModelConfig's
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# The values that xtrain supports; the first is the meaning of a missing key.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    QUANTIZATION: (None,),
    "is_causal": (True, None),
    "per_layer_config": (None,),  # what single layers have instead
}


@dataclass(frozen=True)
class Architecture:
    """What is particular about one class of transformers.

    fields: of ModelConfig, that all its models have.
    defaults: of transformers, for keys that config.json lacks.
    written: keys of config.json that only this class has; None: its models are written as a Llama.
    ignored: keys of ALLOWED that it does not read.
    window: "all": sliding_window is that of all layers; "used": of all, if use_sliding_window is
    true; "some": then of some; "": it has none.
    packed: {name of a tensor in the file: those whose rows it holds}.
    multipliers: keys of config.json.
    allowed: as ALLOWED, of keys that only this class reads.
    norm_offset: what is added to the weights of norms when they are read, and subtracted when they
    are written. Weight decay does not apply to norms, so training is the same.
    """

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] | None = None
    ignored: tuple[str, ...] = ()
    window: str = ""
    packed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    multipliers: tuple[str, ...] = ()
    allowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        "llama",
        defaults={"max_position_embeddings": 2048},
        written={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        {"qk_norm": True},
        _QWEN | {"head_dim": 128},
        {"attention_bias": False} | _NO_WINDOW,
        window="some",
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", {"qkv_bias": True}, _QWEN, _NO_WINDOW, ("attention_bias",), "some"
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
        },
        written={"attention_bias": False, "mlp_bias": False} | _NO_WINDOW,
        window="some",
    ),
    "MistralForCausalLM": Architecture("mistral", defaults=_MISTRAL, written={}, window="all"),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        window="all",
        packed={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        {"tie_embeddings": False},
        {"max_position_embeddings": 2048},
        multipliers=_MULTIPLIERS,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text",
        {"qk_norm": True, "sandwich_norms": True, "gelu": True, "scaled_embedding": True},
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000.0,
            LOCAL_THETA: 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"},
        ("hidden_act",),
        "all",
        allowed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False, None),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
        },
        norm_offset=1.0,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        {"qk_norm": True},
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "sliding_window": 4096,
        },
        {"attention_bias": False} | _NO_WINDOW,
        window="used",
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        {"qk_norm": True, "joint_qk_norm": True},
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        {"attention_bias": False, "clip_qkv": None},
        allowed={"clip_qkv": (None,), "sliding_window": (None,)},
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        written={},
        ignored=("attention_bias", "mlp_bias"),
        window="all",
        allowed={"router_jitter_noise": (0.0,)},
    ),
}
WITHOUT_LAYER_TYPES = ("phi3", "qwen3_moe", "mixtral")  # do not read layer_types


# ----------------------------------------------------------------------------- config.json
def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json for a ModelConfig, for transformers 4 and 5.

    A combination that no class of transformers has (ModelConfig.family) gets the name of a Llama.
    """
    c = config
    name = f"{c.family or 'Llama'}ForCausalLM"
    scaling = normalize_scaling(c.rope_scaling, c.max_seq_len)
    content = {
        "architectures": [name],
        "model_type": ARCHITECTURES[name].model_type,
        **{theirs: getattr(c, ours) for theirs, ours in FIELDS.items()},
        **(ARCHITECTURES[name].written or {}),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        **_rope_flags(c),
        **_window_flags(c),
        **keys_of_experts(ARCHITECTURES[name].model_type, c),
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": c.rope_theta, **(scaling or {"rope_type": "default"})},
        "dtype": "float32",
        "torch_dtype": "float32",
        "use_cache": True,
        # explicit None: the defaults of transformers for a Llama are 1 and 2
        **dict.fromkeys(SPECIAL),
    }
    if c.family != "Gemma3":
        return content
    del content["hidden_act"]
    local = {"rope_theta": c.local_rope_theta, "rope_type": "default"}
    return content | {
        "query_pre_attn_scalar": c.query_pre_attn_scalar,
        LOCAL_THETA: c.local_rope_theta,
        "rope_parameters": {
            "full_attention": content["rope_parameters"],
            "sliding_attention": local,
        },
    }


def _rope_flags(c):
    """Return no_rope_layers as SmolLM3 has them, if there are any."""
    flags = [int(i not in c.no_rope_layers) for i in range(c.n_layers)]
    if c.no_rope_layers:
        return {"no_rope_layers": flags}
    return {}


def _window_flags(c):
    """Return the keys of the window as Mistral has them, as Qwen and SmolLM3, or as Gemma 3."""
    if not c.sliding_window and c.family != "Gemma3":
        return {}
    if c.family in ("Mistral", "Mixtral"):
        return {"sliding_window": c.sliding_window}
    if c.family == "Qwen3Moe":
        return {"use_sliding_window": True, "sliding_window": c.sliding_window}
    kinds = ["sliding_attention" if c.window(i) else "full_attention" for i in range(c.n_layers)]
    flags = {"sliding_window": c.sliding_window, "layer_types": kinds}
    if c.family == "Gemma3":
        # transformers wants a window even if no layer has one
        return flags | {"sliding_window": c.sliding_window or c.max_seq_len}
    return {"use_sliding_window": True} | flags | {"max_window_layers": 0}


def config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises UserError, which names what is missing or unsupported.
    """
    if isinstance(config, dict) and isinstance(config.get(SHAPE), dict):
        return ModelConfig.from_dict(config[SHAPE])
    architecture = architecture_of(config)
    quantized = config.get(QUANTIZATION)
    if isinstance(quantized, dict):
        check_method(quantized)
        config = config | {QUANTIZATION: None}
    unsupported = [
        f"{key} {config[key]!r}"
        for key, allowed in (ALLOWED | architecture.allowed).items()
        if key not in architecture.ignored and config.get(key, allowed[0]) not in allowed
    ]
    if unsupported:
        raise UserError(f"it needs {listed(unsupported)}, which xtrain does not support")
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise UserError(f"it lacks {', '.join(missing)}")
    values = {**architecture.defaults, **config}
    for theirs, ours in FIELDS.items():  # before lists of so many items are made
        value = values.get(theirs)
        if ours in MOST and isinstance(value, int) and value > MOST[ours]:
            raise UserError(f"{theirs} must be at most {MOST[ours]}, got {value}")
    fields = {ours: values[theirs] for theirs, ours in FIELDS.items() if theirs in values}
    fields |= fields_of_experts(architecture.model_type, values)
    if LOCAL_THETA in architecture.defaults:
        fields["query_pre_attn_scalar"] = values["query_pre_attn_scalar"]
        values, fields["local_rope_theta"] = without_local_rope(values)
        for name in ("query_pre_attn_scalar", "local_rope_theta"):
            if not is_positive(fields[name]):
                raise UserError(f"{name} must be a positive number, got {fields[name]!r}")
    fields["rope_theta"], fields["rope_scaling"] = read_rope(values, fields["max_seq_len"])
    if architecture.model_type == "phi3" and fields["rope_scaling"]:
        # transformers takes yarn for it, and refuses the others
        raise UserError("it needs the RoPE type 'longrope', which xtrain does not support")
    for name in ("tie_embeddings", "norm_eps"):
        if fields.get(name) is None:
            fields.pop(name, None)
    if architecture.model_type == "smollm3":
        fields["no_rope_layers"] = _no_rope_layers(config, fields["n_layers"])
    try:
        made = ModelConfig(**{"qk_norm": False, **fields, **architecture.fields})
    except UserError as error:
        keys = FIELDS | KEYS.get(architecture.model_type, {}) | {"mlp_only_layers": "dense_layers"}
        names = {ours: theirs for theirs, ours in keys.items()}
        # the message names the keys of the file instead of ModelConfig's fields
        raise UserError(re.sub(r"\w+", lambda m: names.get(m[0], m[0]), str(error))) from None
    most = MOST["max_seq_len"]
    if made.context > most:
        raise UserError(
            f"max_position_embeddings x the RoPE factor is {made.context}, more than {most}"
        )
    window, full_layers = _window(values, architecture, made)
    made = replace(made, sliding_window=window, full_attention_layers=full_layers)
    for key in architecture.multipliers:
        value = config.get(key, 1.0)
        if not is_positive(value):
            raise UserError(f"{key} must be a positive number, got {value!r}")
    return made


def architecture_of(config: dict[str, Any]) -> Architecture:
    """Return the architecture that a config.json names. Raises UserError if it is unsupported."""
    if not isinstance(config, dict):
        raise UserError("it must hold a JSON object")
    if VARIATION in config:
        raise UserError(
            f"the model is none that other programs know ({config[VARIATION]}): construct it as "
            "for training, "
            "then call model.load_weights(folder)"
        )
    names = config.get("architectures")
    model_type = config.get("model_type")
    supported = listed(list(ARCHITECTURES), most=len(ARCHITECTURES))
    if names:
        if isinstance(names, list):
            name = names[0]
        else:
            name = names
        if name not in list(ARCHITECTURES):
            reason = f" (it has {REASONS[name]})" if name in list(REASONS) else ""
            raise UserError(
                f"the architecture {name!r} is not supported{reason}: xtrain supports {supported}"
            )
        if model_type not in (None, ARCHITECTURES[name].model_type):
            raise UserError(f"model_type {model_type!r} does not belong to {name}")
        return ARCHITECTURES[name]
    for architecture in ARCHITECTURES.values():
        if architecture.model_type == model_type:
            return architecture
    raise UserError(f"model_type {model_type!r} is not supported: xtrain supports {supported}")


def _window(
    config: dict[str, Any], architecture: Architecture, made: ModelConfig
) -> tuple[int, tuple[int, ...]]:
    """Return the sliding window, 0 for none, and the layers without it.

    Raises UserError for what transformers would not do.
    """
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    layers = range(made.n_layers)
    gated = architecture.window != "all"
    if gated and not config.get("use_sliding_window"):
        window = None
    if window is not None and not (type(window) is int and window > 0):
        raise UserError(f"sliding_window must be a positive whole number, got {window!r}")
    if not kinds or architecture.model_type in WITHOUT_LAYER_TYPES:
        kinds = [_layer_type(config, architecture, made, i) for i in layers]
    if not isinstance(kinds, list):
        kinds = [kinds]
    if window is None:
        supported = ["full_attention"]
    else:
        supported = ["full_attention", "sliding_attention"]
    unknown = [kind for kind in kinds if kind not in supported]
    if unknown and not (window is None and architecture.window == "some"):
        raise UserError(f"it needs the layer type {unknown[0]!r}, which xtrain does not support")
    if unknown:
        raise UserError(
            f"it needs the layer type {unknown[0]!r}, but has no sliding_window: set "
            "use_sliding_window to true"
        )
    without_effect = window is not None and window >= made.context and not made.local_rope_theta
    if window is None or without_effect or "sliding_attention" not in kinds:
        return 0, ()
    if len(kinds) != len(layers):
        raise UserError(f"layer_types has {len(kinds)} entries for {len(layers)} layers")
    if not architecture.window:
        raise UserError(
            f"it needs a sliding window of {window} tokens, which {architecture.model_type} has not"
        )
    full = tuple(i for i in layers if kinds[i] == "full_attention")
    if full and not gated and not made.local_rope_theta:
        raise UserError(
            "it needs a sliding window in some layers only (layer_types), which "
            f"{architecture.model_type} has not"
        )
    return window, full


def _layer_type(config, architecture, made, i):
    """Return the type of layer i as transformers chooses it without layer_types."""
    if architecture.model_type == "smollm3":
        windowed = i in made.no_rope_layers
    elif made.local_rope_theta:
        every = config["sliding_window_pattern"]
        if type(every) is not int or every < 1:
            raise UserError(
                f"sliding_window_pattern must be a positive whole number, got {every!r}"
            )
        return "sliding_attention" if (i + 1) % every else "full_attention"
    else:  # Qwen: from max_window_layers on
        first = config.get("max_window_layers", 0)
        windowed = not (type(first) is int and i < first) or architecture.window != "some"
    if architecture.window != "all" and not config.get("use_sliding_window"):
        windowed = False
    if windowed and config.get("sliding_window"):
        return "sliding_attention"
    return "full_attention"


def _no_rope_layers(config, n_layers):
    """Return the layers without RoPE.

    The config has a flag per layer, 0 for those without, or the distance between two of them.
    """
    flags = config.get("no_rope_layers")
    every = config.get("no_rope_layer_interval", 4)
    if type(every) is not int or every < 1:
        raise UserError(f"no_rope_layer_interval must be a positive whole number, got {every!r}")
    if flags is None and type(n_layers) is int:
        flags = [int((i + 1) % every != 0) for i in range(n_layers)]
    if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
        raise UserError("no_rope_layers must be a list with 0 or 1 for every layer")
    if len(flags) != n_layers:
        raise UserError(f"no_rope_layers has {len(flags)} entries for {n_layers} layers")
    return tuple(i for i, flag in enumerate(flags) if not flag)


# ----------------------------------------------------------------------------- tensors
def translate(content: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Stored]:
    """Return a folder's tensors under the names of tensor_shapes, without reading them.

    Tied weights may be stored under either name, as transformers reads them.

    content: of config.json

    Raises UserError for a packed tensor with another number of rows.
    """
    try:
        architecture = architecture_of(content)
    except UserError:  # of a model that only Transformer.load_weights accepts
        return stored
    tied = {**architecture.defaults, **content}.get("tie_word_embeddings")
    if tied and TABLE not in stored and HEAD in stored:
        stored = {TABLE if name == HEAD else name: tensor for name, tensor in stored.items()}
    if architecture.norm_offset:
        stored = {
            name: replace(x, offset=x.offset + architecture.norm_offset) if is_norm(name) else x
            for name, x in stored.items()
        }
    if architecture.model_type in KEYS:
        stored = one_tensor_each(stored)
    if not (architecture.packed or architecture.multipliers):
        return stored
    config = config_from_hf(content)
    shapes = tensor_shapes(config)
    translated = {}
    for name, tensor in stored.items():
        whole = next((w for w in architecture.packed if name.endswith(f".{w}.weight")), None)
        if whole is None:
            translated[name] = tensor
            continue
        parts = [name.replace(whole, part) for part in architecture.packed[whole]]
        rows = [shapes[part][0] for part in parts if part in shapes]
        if tensor.shape[:1] != (sum(rows),):
            shape = f"{listed([name])} has shape {tensor.shape}, expected {sum(rows)} rows"
            raise UserError(f"{tensor.path}: the weights do not fit the config: {shape}")
        begin = 0
        for part, n in zip(parts, rows):
            translated[part] = tensor.rows(begin, n, name)
            begin += n
    if architecture.multipliers:
        if tied and HEAD not in translated and TABLE in translated:
            translated[HEAD] = translated[TABLE]
        scales = _scales(content, config)
        for name, tensor in translated.items():
            scale = next((x for end, x in scales.items() if name.endswith(end)), 1.0)
            translated[name] = replace(tensor, scale=scale)
    return translated


def is_norm(name: str) -> bool:
    """Return True for the name of the weights of an RMSNorm."""
    return name.endswith("norm.weight")


def norm_offset(config: ModelConfig) -> float:
    """Return what is subtracted from the weights of norms when a plain model is written."""
    return ARCHITECTURES[config_to_hf(config)["architectures"][0]].norm_offset


def _scales(content: dict[str, Any], config: ModelConfig) -> dict[str, float]:
    """Return {end of a tensor's name: factor} with the effect of Granite's multipliers."""
    embedding, attention, residual, logits = (content.get(key, 1.0) for key in _MULTIPLIERS)
    return {
        "embed_tokens.weight": embedding,
        "q_proj.weight": attention * config.head_dim**0.5,  # the scores are divided by that root
        "o_proj.weight": residual,
        "down_proj.weight": residual,
        "lm_head.weight": 1 / logits,
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every tensor that a folder must contain."""
    c = config
    C = c.dim
    F = c.hidden_dim
    D = c.head_dim
    H = c.n_heads
    G = c.n_kv_heads
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (H * D, C),
        "self_attn.k_proj": (G * D, C),
        "self_attn.v_proj": (G * D, C),
        "self_attn.o_proj": (C, H * D),
        "mlp.gate_proj": (F, C),
        "mlp.up_proj": (F, C),
        "mlp.down_proj": (C, F),
        "input_layernorm": (C,),
        "post_attention_layernorm": (C,),
    }
    if c.sandwich_norms:
        layer |= {"pre_feedforward_layernorm": (C,), "post_feedforward_layernorm": (C,)}
    if c.qk_norm:
        q_width, k_width = (H * D, G * D) if c.joint_qk_norm else (D, D)
        layer |= {"self_attn.q_norm": (q_width,), "self_attn.k_norm": (k_width,)}
    layer = {f"{name}.weight": shape for name, shape in layer.items()}
    if c.qkv_bias:
        rows = {"q": H * D, "k": G * D, "v": G * D}
        layer |= {f"self_attn.{name}_proj.bias": (n,) for name, n in rows.items()}
    shapes: dict[str, tuple[int, ...]] = {
        TABLE: (c.vocab_size, C),
        "model.norm.weight": (C,),
    }
    mixture = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
    mixture |= expert_shapes(c)
    for i in range(c.n_layers):
        tensors = mixture if c.has_experts(i) else layer
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in tensors.items()}
    if not c.tie_embeddings:
        shapes[HEAD] = (c.vocab_size, C)
    return shapes
