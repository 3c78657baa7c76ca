"""Read a GGUF file as a model's folder: `--model FILE.gguf`.

What a Hugging Face folder says about a model and its texts is made from the file's metadata, once,
in the cache: config.json, tokenizer.json, chat templates. The weights stay in the file. They are
dequantized when they are read, so that the model is computed with the very values that the file
stands for, in any precision of xtrain.

    llama     Llama, Mistral; rows of a head of q and k in Meta's order, pairs (gguf_file.py)
    qwen2, qwen3, smollm3
    gemma3    Gemma 3 (text), whose norms have 1 + w in the file
    qwen3moe  Qwen3-MoE, with the matrices of all experts of a layer in one tensor

Types of tensors: those that the package `gguf` dequantizes. Names of keys: gguf.constants. How
SentencePiece's scores become merges: its class bpe::Model.
"""

import contextlib
import functools
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..data.tokenizer_files import MORE_TEMPLATES, TEMPLATE
from ..device import cache_folder
from ..errors import UserError
from ..json_files import listed, read_json, reading
from ..option_fields import one_line
from ..rope_scalings import LARGEST
from .architectures import ARCHITECTURES, Architecture
from .gguf_names import BEGINS_LLAMA3, NO_ROPE_EVERY, PRE_TOKENIZERS, ROTATES_PAIRS
from .gguf_tensors import INDEX, library
from .rope_config import LOCAL_THETA
from .tensor_file import DTYPES

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
RULES = 2  # version of how folders are made: a new number replaces those in the cache
LAYERS_27B = 62  # by which llama.cpp knows Gemma 3 27B, whose scores have another scale
ROPE_FACTORS = "rope_freqs.weight"
NEUTRAL: dict[str, tuple[Any, ...]] = {  # key -> the values that change nothing; others are refused
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all models of Meta
EPSILON = "attention.layer_norm_rms_epsilon"
REQUIRED = {  # key of the file, after the name of the architecture: key of config.json
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    EPSILON: "rms_norm_eps",
    "context_length": "max_position_embeddings",
}


# ----------------------------------------------------------------------------- the folder
def folder_of(path: Path) -> Path:
    """Return the folder in the cache that describes a GGUF file; it is made at the first call, when
    those of files that are gone, and of this one as it was, are removed.

    Raises UserError if xtrain would compute another model, or read other tokens.
    """
    path = path.resolve()
    state = path.stat()
    made_from = [RULES, str(path), state.st_size, state.st_mtime_ns]
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if (folder / INDEX).is_file():
        return folder
    contents = _contents(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(folder, lambda name: True) as new:
            for name, content in contents.items():
                (new / name).parent.mkdir(exist_ok=True)
                (new / name).write_text(content, encoding="utf-8")
        _remove_outdated(folder, path)
    except OSError as error:
        raise files.cannot_write(folder, error, "set XTRAIN_CACHE to another folder") from None
    return folder


def _remove_outdated(folder: Path, path: Path) -> None:
    """Remove the other folders of this file, and of files that are gone."""
    for index in folder.parent.glob(f"*/{INDEX}"):
        # another process may remove it, and the file may be out of reach
        with contextlib.suppress(UserError, KeyError, TypeError, OSError):
            file = Path(read_json(index)["file"])
            if index.parent != folder and (file == path or not file.exists()):
                shutil.rmtree(index.parent, ignore_errors=True)


def decimal(value: float) -> float:
    """Return the shortest decimal number that is the same float32: 1e-6 for 9.99999997e-07."""
    return float(str(np.float32(value)))


# ----------------------------------------------------------------------------- the file
class _File:
    """The metadata and the tensors' places of a GGUF file.

    fields: {key: gguf's ReaderField}; tensors: {name: gguf's ReaderTensor}
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with reading(path):
                reader = _reader(path)
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{path} was cut short or is damaged: {error}") from None
        self.fields = reader.fields
        self.get = functools.cache(self._get)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if reader.byte_order != "I":
            raise self.refused(
                "it is big-endian: run `gguf-convert-endian FILE little` on it first"
            )
        parts = self.whole("split.count", 1)
        if parts > 1:
            raise self.refused(
                f"it is one of {parts} files of a model: join them with llama.cpp's "
                "`llama-gguf-split --merge FIRST OUT`"
            )
        self.architecture = self.text("general.architecture")

    def _get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} is damaged: its {key} cannot be read: {error}") from None
        if isinstance(value, float):
            return decimal(value)
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """Return the whole number that a key of the architecture has. Raises UserError."""
        return self.whole(f"{self.architecture}.{key}", default)

    def own_number(self, key: str, default: Any = None) -> Any:
        """Return the number that a key of the architecture has. Raises UserError."""
        return self.number(f"{self.architecture}.{key}", default)

    def whole(self, key: str, default: Any = None) -> Any:
        """Return a whole number, not negative; `default` without the key. Raises UserError."""
        value = self.get(key, default)
        if value is not None and not (type(value) is int and 0 <= value < LARGEST):
            raise self.refused(f"its {key} must be a whole number, got {one_line(repr(value))}")
        return value

    def number(self, key: str, default: Any = None) -> Any:
        """Return a finite number; `default` without the key. Raises UserError."""
        value = self.get(key, default)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            raise self.refused(f"its {key} must be a number, got {one_line(repr(value))}")
        return value

    def list_of(self, kind: type, key: str) -> list[Any]:
        """Return a list of values of this type, empty without the key. Raises UserError."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(x, kind) for x in value):
            raise self.refused(f"its {key} must be a list of {kind.__name__}")
        return value

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a token of the vocabulary, such as "bos". Raises UserError."""
        i = self.whole(f"tokenizer.ggml.{name}_token_id", default)
        tokens = self.list_of(str, "tokenizer.ggml.tokens")
        if i is not None and i >= len(tokens):
            raise self.refused(f"its {name} token has the id {i}, of {len(tokens)} tokens")
        return i

    def text(self, key: str) -> str:
        """Return the value of a key, which must be there. Raises UserError."""
        value = self.get(key)
        if not isinstance(value, str):
            raise UserError(f"{self.path} has no {key}: it holds no language model")
        return value

    def refused(self, what: str) -> UserError:
        """Return an error about something that xtrain lacks."""
        return UserError(f"{self.path} cannot be used: {what}")


def _reader(path: Path) -> Any:
    """Return gguf's reader of a file. Raises ValueError where the file ends too early."""

    base: Any = library().GGUFReader

    class Reader(base):
        def _get(self, offset, dtype, count=1, override_order=None):
            values = super()._get(offset, dtype, count, override_order)
            if values.size != count:  # gguf would look for the items of an array without end
                raise ValueError("the file ends too early")
            return values

    return Reader(path)


def _contents(path: Path) -> dict[str, str]:
    """Return {name of a file: content} of the folder that describes a GGUF file."""
    file = _File(path)
    if file.architecture not in CLASSES:
        raise file.refused(
            f"its architecture is {file.architecture!r}, xtrain reads {', '.join(CLASSES)} from "
            "GGUF files"
        )
    config = _config(file)
    special = _special_ids(file)
    contents = {
        INDEX: {
            "file": str(path),
            "tensors": _index(file, config),
            # the file has what a norm multiplies by, a folder may have something else
            "norm_offset": -ARCHITECTURES[config["architectures"][0]].norm_offset,
        },
        "config.json": config | special,
        "generation_config.json": special,
        "tokenizer.json": _tokenizer(file),
        "tokenizer_config.json": _tokenizer_config(file),
    }
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in contents.items()}
    return texts | _templates(file)


# ----------------------------------------------------------------------------- config.json
def _config(file: _File) -> dict[str, Any]:
    config = {theirs: file.own_number(key) for key, theirs in REQUIRED.items()}
    missing = [f"{file.architecture}.{key}" for key, x in REQUIRED.items() if config[x] is None]
    if missing:
        raise file.refused(f"it has no {listed(missing)}")
    config |= {theirs: file.own(key) for key, theirs in REQUIRED.items() if key != EPSILON}
    if config["num_hidden_layers"] > len(file.tensors):
        raise file.refused(f"it has {len(file.tensors)} tensors, too few for its layers")
    heads = config["num_attention_heads"]
    width = file.own("attention.key_length", config["hidden_size"] // max(heads, 1))
    if file.own("attention.value_length", width) != width:
        raise file.refused("its values have another width than its keys")
    if file.own("rope.dimension_count", width) != width:
        raise file.refused("RoPE rotates only a part of each head")
    for key, allowed in NEUTRAL.items():
        value = file.get(f"{file.architecture}.{key}", allowed[0])
        if value not in allowed:
            raise file.refused(
                f"its {key} is {one_line(repr(value))}, which xtrain does not support"
            )
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise file.refused("it has no token_embd.weight, a matrix")
    config |= {
        "architectures": [CLASSES[file.architecture]],
        "model_type": ARCHITECTURES[CLASSES[file.architecture]].model_type,
        "vocab_size": int(table.shape[1]),
        "num_key_value_heads": file.own("attention.head_count_kv", heads),
        "head_dim": width,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.own_number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, width),
    }
    if file.architecture == "smollm3":
        layers = range(1, config["num_hidden_layers"] + 1)
        config["no_rope_layers"] = [int(i % NO_ROPE_EVERY != 0) for i in layers]
    if file.architecture == "qwen3moe":
        config |= {
            "num_experts": file.own("expert_count"),
            "num_experts_per_tok": file.own("expert_used_count"),
            "moe_intermediate_size": file.own("expert_feed_forward_length"),
            "norm_topk_prob": True,  # fixed in llama.cpp
        }
    elif file.own("expert_count"):
        raise file.refused(f"xtrain reads experts of qwen3moe, not of {file.architecture}")
    if file.architecture == "gemma3":
        return config | _gemma3(file, config)
    return config | _window(file)


def _gemma3(file: _File, config: dict[str, Any]) -> dict[str, Any]:
    """Return what Gemma 3 has of its own. What the file does not say is fixed in llama.cpp."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == LAYERS_27B:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        LOCAL_THETA: file.own_number("rope.freq_base_swa", 10000.0),
        "sliding_window": file.own("attention.sliding_window"),
        "sliding_window_pattern": file.own("attention.sliding_window_pattern", 6),
    }


def _window(file: _File) -> dict[str, Any]:
    """Return the keys of a sliding window, which Mistral's first models have."""
    window = file.own("attention.sliding_window")
    if not window:
        return {}
    if file.architecture != "llama":
        raise file.refused(f"a {file.architecture} with a sliding window does not say which layers")
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return names | {"sliding_window": window}


def _rope_scaling(file: _File, width: int) -> dict[str, Any] | None:
    # as in llama.cpp: a factor without a type is that of linear scaling, also under its older key
    kind = file.get(f"{file.architecture}.rope.scaling.type", "linear")
    factor = file.own_number("rope.scaling.factor", file.own_number("rope.scale_linear"))
    if ROPE_FACTORS in file.tensors:
        if kind != "none" and factor not in (None, 0, 1):
            raise file.refused(f"it has {ROPE_FACTORS} and a RoPE scaling by {factor}, too")
        return _llama3_scaling(file, width)
    if kind == "none" or (kind == "linear" and not factor):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise file.refused(f"its RoPE scaling is {kind!r}")
    if factor is None:
        raise file.refused("its RoPE scaling has no factor")
    original = "rope.scaling.original_context_length"
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.own(original, file.own("context_length")),
        "beta_fast": file.own_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.own_number("rope.scaling.yarn_beta_slow"),
    }
    times = file.own_number("rope.scaling.attn_factor")
    if times is not None:  # llama.cpp multiplies its own factor by it
        own = 1 + 0.1 * math.log(max(factor, 1))
        scaling["attention_factor"] = decimal(times * own)
    return scaling


def _llama3_scaling(file: _File, width: int) -> dict[str, Any]:
    """Return the scaling that gives the divisors of the frequencies in the file."""
    tensor = file.tensors[ROPE_FACTORS]
    divisors = np.array(tensor.data, np.float64).reshape(-1)
    if 2 * divisors.size != width:
        raise file.refused(f"{ROPE_FACTORS} has {divisors.size} numbers for heads of {width}")
    frequency = file.own_number("rope.freq_base", 10000.0) ** (-np.arange(0, width, 2) / width)
    low = LLAMA3_TURNS["low_freq_factor"]
    high = LLAMA3_TURNS["high_freq_factor"]
    factor = float(divisors[-1])
    for original in (2**n for n in range(3, 20)):
        turns = original * frequency / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(divisors, expected, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                **LLAMA3_TURNS,
                "original_max_position_embeddings": original,
            }
    raise file.refused(f"{ROPE_FACTORS} are not the divisors of Llama 3's RoPE scaling")


# ----------------------------------------------------------------------------- the tensors
def _index(file: _File, config: dict[str, Any]) -> dict[str, list[Any]]:
    """Return {name in the folder: [type, shape, offset in the file, heads]}."""
    gguf = library()
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[file.architecture.upper()], layers)
    known = _tensor_names(layers, ARCHITECTURES[config["architectures"][0]])
    ours = {names.get_name(name, (".weight", ".bias")): name for name in known}
    index = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        theirs = ours.get(name, name)  # what no model has is refused with the names in the folder
        shape = [int(n) for n in reversed(tensor.shape)]
        kind = tensor.tensor_type.name
        if not _can_read(gguf, tensor.tensor_type):
            raise file.refused(f"{name} has the type {kind}, which the package gguf cannot read")
        heads = 0
        if file.architecture in ROTATES_PAIRS:
            counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            heads = config.get(counts.get(theirs.split(".")[-2], ""), 0)
        offset = int(tensor.data_offset)
        if len(shape) == 3 and ".experts." in theirs:  # one matrix for each expert
            each = int(tensor.n_bytes) // shape[0]
            for e in range(shape[0]):
                own = theirs.replace(".experts.", f".experts.{e}.")
                index[own] = [kind, shape[1:], offset + e * each, 0]
        else:
            index[theirs] = [kind, shape, offset, heads]
    return index


def _tensor_names(layers: int, architecture: Architecture) -> Iterator[str]:
    """Yield all names of tensors that the architecture may have."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for i in range(layers):
        for part in ("q", "k", "v", "o"):
            yield f"model.layers.{i}.self_attn.{part}_proj.weight"
            yield f"model.layers.{i}.self_attn.{part}_proj.bias"
        for part in ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj"):
            yield f"model.layers.{i}.{part}.weight"
        for part in ("mlp.down_proj", "input_layernorm", "post_attention_layernorm", "mlp.gate"):
            yield f"model.layers.{i}.{part}.weight"
        for part in ("gate", "up", "down"):
            yield f"model.layers.{i}.mlp.experts.{part}_proj.weight"
        if "sandwich_norms" in architecture.fields:
            yield f"model.layers.{i}.pre_feedforward_layernorm.weight"
            yield f"model.layers.{i}.post_feedforward_layernorm.weight"


def _can_read(gguf: Any, kind: Any) -> bool:
    if kind.name in DTYPES:
        return True
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        gguf.quants.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


# ----------------------------------------------------------------------------- the tokenizer
def _special_ids(file: _File) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id (a list if several tokens end an answer), pad_token_id."""
    ids: dict[str, Any] = {name: file.token_id(name) for name in ("bos", "pad")}
    ends = [file.token_id(name) for name in ("eos", "eot", "eom")]
    distinct: Any = list(dict.fromkeys(i for i in ends if i is not None))
    if len(distinct) < 2:
        distinct = distinct[0] if distinct else None
    ids["eos"] = distinct
    return {f"{name}_token_id": i for name, i in ids.items() if i is not None}


def _tokenizer(file: _File) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    kinds = library().TokenType
    tokens = file.list_of(str, "tokenizer.ggml.tokens")
    types = file.list_of(int, "tokenizer.ggml.token_type")
    if not tokens or len(types) not in (0, len(tokens)):
        raise file.refused("it has no tokenizer (tokenizer.ggml.tokens)")
    added = []
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, types or [kinds.NORMAL] * len(tokens))):
        if kind == kinds.UNUSED:  # a place without a token
            continue
        vocab.setdefault(token, i)
        if kind in (kinds.CONTROL, kinds.USER_DEFINED, kinds.UNKNOWN):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            special = kind != kinds.USER_DEFINED
            added.append({"id": i, "content": token, **flags, "special": special})
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        parts = _byte_level(file, vocab)
    elif model == "llama":
        parts = _sentencepiece(file, tokens, vocab)
    else:
        raise file.refused(f"its tokenizer is {model!r}, xtrain reads gpt2 and llama")
    around = _around(file, tokens)
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return content | parts | {"post_processor": around}


def _bpe(vocab: dict[str, int], merges: list[Any], **more: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **flags, **more, "vocab": vocab, "merges": merges}


def _byte_level(file: _File, vocab: dict[str, int]) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer, model and decoder of a byte-level BPE."""
    name = str(file.get("tokenizer.ggml.pre", "default"))
    rules = {pre: rule for rule, names in PRE_TOKENIZERS.items() for pre in names}
    if name not in rules:
        raise file.refused(
            f"it splits a text by the rule {name!r}; xtrain knows {', '.join(sorted(rules))}"
        )
    regexes, ignore_merges = rules[name]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": x}, "behavior": "Isolated", "invert": False}
        for x in regexes
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps.append(level | {"use_regex": False})
    merges = [merge.split(" ", 1) for merge in file.list_of(str, "tokenizer.ggml.merges")]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": _bpe(vocab, merges, ignore_merges=ignore_merges),
        "decoder": level | {"use_regex": False},
    }


def _sentencepiece(file: _File, tokens: list[str], vocab: dict[str, int]) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer, model and decoder of SentencePiece's BPE."""
    scores = file.list_of(float, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise file.refused("its tokenizer has no scores")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    normalizers: list[dict[str, Any]] = [space]
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = tokens[file.token_id("unknown", 0) or 0]
    merges = merges_of(vocab, scores)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "model": _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def merges_of(vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Return the merges of SentencePiece's BPE: the pair whose token has the highest score first.

    Every division of a token into two tokens is one of its merges.
    """
    merges = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left = vocab.get(token[:cut])
            right = vocab.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[i], left, right, token[:cut], token[cut:]))
    return [[left, right] for *_, left, right in sorted(merges)]


def _around(file: _File, tokens: list[str]) -> dict[str, Any] | None:
    """Return the post-processor: the tokens that are put before and after a text."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    begins = file.get("tokenizer.ggml.model") == "llama"  # if the file does not say
    begins |= file.get("tokenizer.ggml.pre") in BEGINS_LLAMA3
    for name, place, usual in (("bos", 0, begins), ("eos", 2, False)):
        i = file.token_id(name)
        if i is not None and file.get(f"tokenizer.ggml.add_{name}_token", usual):
            single.insert(place, {"SpecialToken": {"id": tokens[i], "type_id": 0}})
            special[tokens[i]] = {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
    if not special:
        return None
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _tokenizer_config(file: _File) -> dict[str, Any]:
    tokens = file.list_of(str, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "pad"):
        i = file.token_id(name)
        if i is not None:
            config[f"{name}_token"] = tokens[i]
    return config | {"clean_up_tokenization_spaces": False}


def _templates(file: _File) -> dict[str, str]:
    """Return the files of the chat templates. Raises UserError for a name that is not a word."""
    key = "tokenizer.chat_template"
    templates = {}
    for name in file.fields:
        if name == key:
            templates[TEMPLATE] = file.text(name)
        elif name.startswith(f"{key}."):
            word = name.removeprefix(f"{key}.")
            if not re.fullmatch(r"\w+", word, re.ASCII):  # a path would lead out of the folder
                raise file.refused(f"{one_line(repr(word))} is not a name of a chat template")
            templates[f"{MORE_TEMPLATES}/{word}.jinja"] = file.text(name)
    return templates
