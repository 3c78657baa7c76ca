"""Write a folder as one GGUF file, for llama.cpp and the programs that use it (Ollama, LM Studio).

    Llama    llama     rows of a head of q and k in the order of Meta's rotation: pairs, not halves
    Qwen2    qwen2     bias on q, k, v
    Qwen3    qwen3     RMSNorm on q and k
    SmolLM3  smollm3   as llama; llama.cpp leaves out RoPE in every fourth layer

Names of tensors and keys are those of the package `gguf`, which belongs to llama.cpp. What
llama.cpp would compute in another way (a pre-tokenizer or a RoPE scaling that it lacks) raises
UserError instead. Its source: src/llama-vocab.cpp, src/models/*.cpp.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import files
from ..config import ModelConfig
from ..errors import UserError
from ..json_files import listed
from .architectures import tensor_shapes
from .gguf_names import GPT2, NO_ROPE_EVERY, PRE_TOKENIZERS, ROTATES_PAIRS
from .gguf_tensors import library
from .huggingface import as_ids, open_weights, read_special_tokens
from .tensor_file import Stored
from .texts import Texts, load_texts

ARCHITECTURES = {
    "Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "SmolLM3": "smollm3", "Qwen3Moe": "qwen3moe",
}  # fmt: skip
YARN_BETAS = (32, 1)  # beta_fast, beta_slow: fixed in llama.cpp for these architectures
LARGEST_F16 = 65504.0
EXPERT = re.compile(r"\.experts\.\d+\.")
ELSEWHERE = "convert the folder with llama.cpp's convert_hf_to_gguf.py instead"
Kind = Literal["f32", "f16", "q8_0"]


# ----------------------------------------------------------------------------- the file
def write(folder: Path, path: Path, kind: Kind) -> None:
    """Write the model in a Hugging Face folder, with tokenizer and chat templates, as a GGUF file.

    kind: of the matrices; biases and norm weights are f32. A matrix whose rows are not a multiple
    of 32 wide is f16 instead of q8_0, as in llama.cpp.

    One tensor at a time is in memory. An existing file is replaced when the new one is complete.
    Raises UserError if llama.cpp could not compute the same, or if the file cannot be written.
    """
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: give the name of a file, such as {path / 'model.gguf'}"
        )
    config, stored = open_weights(folder)
    texts = load_texts(folder)
    architecture = _architecture(config)
    gguf = library()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.n_layers)
    vocabulary = _vocabulary(config, texts)
    together: dict[str, list[Stored]] = {}  # the matrices of all experts are one tensor
    for name in tensor_shapes(config):
        together.setdefault(EXPERT.sub(".experts.", name), []).append(stored[name])
    tensors = {
        names.get_name(name, (".weight", ".bias")): _Tensor(
            gguf, name, parts, kind, _heads(name, config, architecture)
        )
        for name, parts in together.items()
    }
    factors = _rope_factors(config)
    try:
        with files.replaced(path) as temporary:
            writer = gguf.GGUFWriter(temporary, architecture)
            try:
                _add_config(gguf, writer, config, kind)
                _add_vocabulary(writer, vocabulary)
                _add_templates(writer, texts)
                if factors is not None:
                    writer.add_tensor_info(
                        "rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes
                    )
                for name, tensor in tensors.items():
                    tensor.announce(writer, name)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                if factors is not None:
                    writer.write_tensor_data(factors)
                for tensor in tensors.values():
                    writer.write_tensor_data(tensor.read())
            finally:
                writer.close()
    except OSError as error:
        raise files.cannot_write(path, error, "give another --gguf") from None


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file.

    name: in the folder, without the number of an expert.
    stored: one tensor, or that of each expert.
    heads: how many heads its rows belong to if they are permuted, else 0
    """

    gguf: Any
    name: str
    stored: list[Stored]
    kind: Kind
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        shape = self.stored[0].shape
        return (len(self.stored), *shape) if ".experts." in self.name else shape

    @property
    def dtype(self) -> str:
        """F32, F16 or Q8_0. A router is F32, as in llama.cpp."""
        if len(self.shape) < 2 or self.kind == "f32" or self.name.endswith(".mlp.gate.weight"):
            return "F32"
        if self.kind == "q8_0" and self.shape[-1] % 32 == 0:
            return "Q8_0"
        return "F16"

    def announce(self, writer: Any, name: str) -> None:
        """Add the tensor's name, shape and type to the header."""
        dtype = self.gguf.GGMLQuantizationType[self.dtype]
        block, size = self.gguf.GGML_QUANT_SIZES[dtype]
        nbytes = math.prod(self.shape) // block * size
        writer.add_tensor_info(name, self.shape, np.dtype("f4"), nbytes, raw_dtype=dtype)

    def read(self) -> np.ndarray:
        """Return the values as the file has them.

        Raises UserError if they are not finite, or too large for f16.
        """
        if ".experts." in self.name:
            return np.stack([self._read(stored) for stored in self.stored])
        return self._read(self.stored[0])

    def _read(self, stored):
        values = stored.read_finite()
        if self.heads:
            values = pairs_from_halves(values, self.heads)
        if self.dtype == "Q8_0":
            return self.gguf.quants.quantize(values, self.gguf.GGMLQuantizationType.Q8_0)
        if self.dtype == "F16" and np.abs(values).max() > LARGEST_F16:
            raise UserError(
                f"{listed([stored.name])} holds values above {LARGEST_F16:.0f}, the largest "
                "of f16: use --type f32"
            )
        return np.ascontiguousarray(values, np.float32 if self.dtype == "F32" else np.float16)


def pairs_from_halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Move rows i and i + D/2 of each head, which RoPE rotates together, to rows 2i and 2i + 1."""
    halves = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(w.shape))


def _heads(name: str, config: ModelConfig, architecture: str) -> int:
    if architecture not in ROTATES_PAIRS:
        return 0
    return {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2], 0)


# ----------------------------------------------------------------------------- the model
def _architecture(config: ModelConfig) -> str:
    """Return llama.cpp's name of the architecture. Raises UserError if none computes the same."""
    c = config
    scaling = config.rope_scaling or {}
    if c.family == "Gemma3":
        raise UserError(f"xtrain writes no Gemma 3 to GGUF: {ELSEWHERE}")
    if not c.family or c.sliding_window:
        raise UserError(f"llama.cpp has no model with {c.features}")
    if c.n_experts and not (
        c.family == "Qwen3Moe" and c.renormalized_experts and not c.dense_layers
    ):
        raise UserError(
            "xtrain writes experts to GGUF of a Qwen3-MoE with experts in every layer and "
            f"norm_topk_prob: {ELSEWHERE}"
        )
    name = ARCHITECTURES[c.family]
    if name == "smollm3" and c.no_rope_layers != tuple(
        range(NO_ROPE_EVERY - 1, c.n_layers, NO_ROPE_EVERY)
    ):
        raise UserError(
            f"llama.cpp leaves out RoPE in every {NO_ROPE_EVERY}th layer, this model in the layers "
            f"{list(c.no_rope_layers)}"
        )
    if name == "qwen2" and c.head_dim * c.n_heads != c.dim:
        raise UserError(
            f"llama.cpp needs heads of width {c.dim // c.n_heads} for a Qwen2 of width {c.dim}, "
            f"this one has {c.head_dim}"
        )
    if c.rope_type == "llama3" and name != "llama":
        raise UserError(
            f"llama.cpp has the RoPE scaling llama3 only for a Llama, not for {c.family}"
        )
    if c.rope_type == "yarn" and (scaling["beta_fast"], scaling["beta_slow"]) != YARN_BETAS:
        raise UserError(
            "llama.cpp has YaRN with beta_fast {} and beta_slow {}".format(*YARN_BETAS)
            + f" only, this model has {scaling['beta_fast']} and {scaling['beta_slow']}"
        )
    return name


def _add_config(gguf: Any, writer: Any, c: ModelConfig, kind: Kind) -> None:
    writer.add_file_type(
        gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(c.vocab_size)
    writer.add_block_count(c.n_layers)
    # dynamic scaling begins beyond max_seq_len, and llama.cpp has none
    writer.add_context_length(c.max_seq_len if c.rope_type == "dynamic" else c.context)
    writer.add_embedding_length(c.dim)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    if c.n_experts:
        writer.add_expert_count(c.n_experts)
        writer.add_expert_used_count(c.experts_per_token)
        writer.add_expert_feed_forward_length(c.expert_hidden_dim)
    scaling = c.rope_scaling or {}
    if c.rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[c.rope_type.upper()])
        writer.add_rope_scaling_factor(scaling["factor"])
    if c.rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        # llama.cpp multiplies its own factor, 1 + 0.1 ln(factor), by this one
        own = 1 + 0.1 * math.log(max(scaling["factor"], 1))
        writer.add_rope_scaling_attn_factors(scaling["attention_factor"] / own)


def _rope_factors(c: ModelConfig) -> np.ndarray | None:
    """Return the divisors (D/2,) of the frequencies under Llama 3's scaling; None without it."""
    if c.rope_type != "llama3":
        return None
    s: Any = c.rope_scaling
    frequency = c.rope_theta ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
    turns = s["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / s["factor"] + smooth)).astype(np.float32)


# ----------------------------------------------------------------------------- the tokenizer
@dataclass(frozen=True)
class _Vocabulary:
    """What llama.cpp needs of a tokenizer.

    ids: {bos, eos, eot, eom, pad: id}
    adds: {bos, eos: True if it is put around a text}
    """

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int]
    adds: dict[str, bool]


def _vocabulary(config: ModelConfig, texts: Texts) -> _Vocabulary:
    """Return the tokenizer's vocabulary.

    Raises UserError if llama.cpp would tokenize differently.
    """
    folder = texts.folder
    tokenizer = texts.tokenizer
    content = tokenizer.content()
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{config.vocab_size}: "
            "use the tokenizer that belongs to the model"
        )
    gguf = library()
    kinds = gguf.TokenType
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    types = [kinds.UNUSED] * config.vocab_size
    for token, i in content["model"]["vocab"].items():
        tokens[i] = token
        types[i] = kinds.NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        if added["id"] in tokenizer.special_ids:
            types[added["id"]] = kinds.CONTROL
        else:
            types[added["id"]] = kinds.USER_DEFINED
    twice = len(tokens) - len(set(tokens))
    if twice:
        raise UserError(
            f"{folder}: {twice} tokens have the text of another, llama.cpp needs different ones"
        )
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    pre = pre_tokenizer(folder, content)
    ids, adds = _special(texts)
    return _Vocabulary(pre, tokens, [int(t) for t in types], merges, ids, adds)


def pre_tokenizer(folder: Path, content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a tokenizer.json.

    Raises UserError if none splits in the same way.
    """
    model, normalizer = content["model"], content["normalizer"]
    steps = _steps(content["pre_tokenizer"], "pretokenizers")
    if model.get("byte_fallback") or not any(s["type"] == "ByteLevel" for s in steps):
        raise UserError(
            f"{folder}: the tokenizer is SentencePiece's, xtrain writes only byte-level BPE to "
            f"GGUF: {ELSEWHERE}"
        )
    plain = not any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    )
    # llama.cpp does not normalize: for texts in NFC, nearly all are, the tokens are the same
    plain &= all(s["type"] == "NFC" for s in _steps(normalizer, "normalizers"))
    patterns = [_regex(step) for step in steps]
    regexes = tuple(regex for regex in patterns if regex)
    name = PRE_TOKENIZERS.get((regexes, bool(model.get("ignore_merges"))), [None])[0]
    if not plain or None in patterns or steps[-1]["type"] != "ByteLevel" or name is None:
        raise UserError(
            f"{folder}: its tokenizer splits a text in a way that xtrain knows no name of in "
            f"llama.cpp: {ELSEWHERE}"
        )
    return name


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return part[inner]
    return [part]


def _regex(step: dict[str, Any]) -> str | None:
    """Return the regular expression by which a step of a pre-tokenizer splits.

    "": it does not split; None: it splits in another way.
    """
    if step["type"] == "ByteLevel":
        if step["add_prefix_space"]:
            return None
        if step.get("use_regex", True):
            return GPT2
        return ""
    if step["type"] == "Digits" and step["individual_digits"]:
        return r"\p{N}"
    whole = (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True))
    if step["type"] == "Split" and whole:
        return step["pattern"].get("Regex")
    return None


def _special(texts: Texts) -> tuple[dict[str, int], dict[str, bool]]:
    """Return the special tokens, and which of them are put around a text."""
    folder = texts.folder
    tokenizer = texts.tokenizer
    named = read_special_tokens(folder)
    single = lambda name: next(iter(as_ids(named.get(name))), None)
    before = tokenizer.begin
    after = tokenizer.end
    bos = tokenizer.bos_token_id
    if before:
        bos = before[0]
    ends = sorted(texts.stop)
    own = tokenizer.eos_token_id
    if own in ends:  # the first, as in the tokenizer
        ends = [own, *(i for i in ends if i != own)]
    ends += sorted(texts.chat_stop - {*ends, own})
    if len(before) > 1 or len(after) > 1 or (after and after != ends[:1]):
        raise UserError(
            f"{folder}: the tokenizer puts {before} before and {after} behind a text, llama.cpp "
            "only one token for begin and end"
        )
    ids = {"bos": single("bos_token_id") if bos is None else bos, "pad": single("pad_token_id")}
    ids |= dict(zip(("eos", "eot", "eom"), ends))
    present = {name: i for name, i in ids.items() if i is not None}
    return present, {"bos": bool(before), "eos": bool(after)}


def _add_vocabulary(writer: Any, v: _Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(v.pre)
    writer.add_token_list(v.tokens)
    writer.add_token_types(v.types)
    writer.add_token_merges(v.merges)
    for name, i in v.ids.items():
        getattr(writer, f"add_{name}_token_id")(i)
    for name, adds in v.adds.items():
        getattr(writer, f"add_add_{name}_token")(adds)


def _add_templates(writer: Any, texts: Texts) -> None:
    if texts.template is not None:
        sources = texts.template.sources.items()
        writer.add_chat_template([{"name": name, "template": x} for name, x in sources])
