"""A Llama (qk_norm=False) or Qwen3 (qk_norm=True) decoder, from token ids to logits.

    ids (B, T) -> embedding (N, C) -> L x [ norm, attention, + ; norm, MLP, + ] -> norm -> head (N, V)

Everything per token is 2-D, (N, C) with N = B T: one large matrix product instead of B small ones. Only attention
uses the division into sequences. Positions start at 0 in every sequence.

Initialisation: norm weights 1; matrices and embeddings normal with standard deviation 0.02; the two matrices that
write to the residual stream (o_proj, down_proj) 0.02 / sqrt(2 L), so that its variance does not grow with depth
(Radford et al. 2019).
"""

import functools
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..config import ModelConfig
from ..device import Array, has_bf16, is_gpu, resolve_device, to_device, to_numpy
from ..errors import UserError
from ..formats import huggingface
from ..formats.manifest import verify_weights
from ..kernels.cast import BFLOAT16
from ..kernels.cross_entropy import count_targets
from ..kernels.primitives.tiles import WIDTHS
from ..kernels.rope import rope_tables
from . import functional as F
from .autograd import no_grad
from .modules import Embedding, Linear, Module, Parameter, RMSNorm
from .observers import in_layer
from .recompute import recompute
from .tensor import Tensor

STD = 0.02  # of the initialisation


class RotaryTables:
    """cos and sin of every position, (positions, D/2) float32, computed once and kept on the device.

    Calling it with a sequence length gives tables of at least that many positions.
    """

    def __init__(self, config: ModelConfig, device: str):
        self.config, self.device = config, device
        self.tables: dict[int, tuple[Array, Array]] = {}

    def __call__(self, T: int) -> tuple[Array, Array]:
        c = self.config
        P = max(T, c.max_seq_len)  # larger with dynamic scaling only, where the angles depend on T
        found = self.tables.get(P)
        if found is None:
            for longer in [n for n in list(self.tables) if n > c.max_seq_len]:
                self.tables.pop(longer, None)  # generate would keep one for every length
            tables = rope_tables(
                c.head_dim, P, c.rope_theta, c.rope_scaling, seq_len=P, max_seq_len=c.max_seq_len
            )
            cos, sin = (to_device(t, self.device) for t in tables)
            found = self.tables[P] = cos, sin
        return found  # not self.tables[P]: another thread may have removed it


def add_norm_linear(
    h_NC: Tensor, delta_NC: Tensor | None, norm: Module, linear: Module
) -> tuple[Tensor, Tensor]:
    """-> h + delta, linear(norm(h + delta)): one op where both modules are the library's own. delta None: nothing is added."""
    if type(norm) is RMSNorm and type(linear) is Linear:
        w, eps, dtype = norm.weight, norm.eps, norm.out_dtype
        return F.add_norm_linear(h_NC, delta_NC, w, linear.weight, eps, dtype)
    h_NC, x_NC = add_norm(h_NC, delta_NC, norm)
    return h_NC, linear(x_NC)


def add_norm(h_NC: Tensor, delta_NC: Tensor | None, norm: Module) -> tuple[Tensor, Tensor]:
    """-> h + delta, norm(h + delta), in one op where the norm is the library's own. delta None: nothing is added."""
    if delta_NC is None:
        return h_NC, norm(h_NC)
    if type(norm) is RMSNorm:
        return norm(h_NC, delta_NC)
    # In bf16 training the residual stream is float32, its gradient and everything else bf16.
    h_NC = h_NC + F.cast(delta_NC, h_NC.dtype)
    return h_NC, F.cast(norm(F.cast_gradient(h_NC, delta_NC.dtype)), delta_NC.dtype)


class Attention(Module):
    """QK-norm if the model has it, RoPE, causal softmax over grouped heads, output projection.

    `qkv` is the packed projection to q, k and v. The block calls it together with the norm before it, see add_norm_linear.
    `q_norm` and `k_norm` only hold weights: `attend` uses them in one op together with RoPE and does not call the modules.
    """

    def __init__(self, c: ModelConfig):
        D, H, G = c.head_dim, c.n_heads, c.n_kv_heads
        rows = {"q_proj.weight": H * D, "k_proj.weight": G * D, "v_proj.weight": G * D}
        self.qkv = Linear(c.dim, (H + 2 * G) * D, STD, rows)
        self.o_proj = Linear(H * D, c.dim, STD / (2 * c.n_layers) ** 0.5)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, c.norm_eps), RMSNorm(D, c.norm_eps)
        self.config = c

    def __call__(
        self, qkv: Tensor, B: int, rotary: tuple[Array, Array], recompute_attention: bool = False
    ) -> Tensor:
        """qkv (N, (H + 2G) D) of B sequences -> (N, C).  recompute_attention: backward computes `attend` again."""
        attend = functools.partial(self.attend, B, rotary)
        o = recompute(attend, qkv) if recompute_attention else attend(qkv)
        return self.o_proj(o)  # (N, C)

    def attend(self, B: int, rotary: tuple[Array, Array], qkv: Tensor) -> Tensor:
        """(N, (H + 2G) D) -> (N, H D)"""
        c = self.config
        D, H, G, T = c.head_dim, c.n_heads, c.n_kv_heads, qkv.shape[0] // B
        norms = (self.q_norm.weight, self.k_norm.weight) if c.qk_norm else (None, None)
        q, k, v = F.qk_norm_rope(qkv, *norms, *rotary, H, G, T, c.norm_eps, None)
        q_BTHD, k_BTGD, v_BTGD = (x.reshape(B, T, -1, D) for x in (q, k, v))
        o_BTHD = F.attention(q_BTHD, k_BTGD, v_BTGD, D**-0.5, True)
        return o_BTHD.reshape(B * T, H * D)


class MLP(Module):
    """down(silu(gate) * up).

    `gate_up` is the packed projection to gate and up. The block calls it together with the norm before it, see add_norm_linear.
    """

    def __init__(self, c: ModelConfig):
        F_ = c.hidden_dim
        self.gate_up = Linear(c.dim, 2 * F_, STD, {"gate_proj.weight": F_, "up_proj.weight": F_})
        self.down_proj = Linear(F_, c.dim, STD / (2 * c.n_layers) ** 0.5)

    def __call__(self, gu_N2F: Tensor) -> Tensor:
        """gate and up (N, 2F) -> (N, C)"""
        if type(self.down_proj) is Linear:
            return F.swiglu_linear(gu_N2F, self.down_proj.weight)
        return self.down_proj(F.swiglu(gu_N2F))


class Block(Module):
    """h = h + attention(norm(h)),  h = h + mlp(norm(h)), where h is the residual stream.

    Each addition is computed together with the norm that follows it. So a block gets the residual stream and the branch output
    `delta` that still has to be added to it, and returns such a pair.
    """

    def __init__(self, c: ModelConfig):
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)

    def __call__(
        self,
        B: int,
        rotary: tuple[Array, Array],
        recompute_attention: bool,
        h_NC: Tensor,
        delta_NC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """h, delta (N, C) of B sequences -> h, delta. delta None: nothing is pending (before the first block)."""
        attention, mlp = self.self_attn, self.mlp
        h_NC, qkv = add_norm_linear(h_NC, delta_NC, self.input_layernorm, attention.qkv)
        delta_NC = attention(qkv, B, rotary, recompute_attention)
        h_NC, gu_N2F = add_norm_linear(h_NC, delta_NC, self.post_attention_layernorm, mlp.gate_up)
        return h_NC, mlp(gu_N2F)


class Decoder(Module):
    """Everything below the head. Its attributes have the names of the Hugging Face layout."""

    def __init__(self, c: ModelConfig):
        self.embed_tokens = Embedding(c.vocab_size, c.padded_vocab_size, c.dim, STD)
        self.layers = [Block(c) for _ in range(c.n_layers)]
        self.norm = RMSNorm(c.dim, c.norm_eps)

    def __call__(
        self, ids_N: Array, B: int, rotary: tuple[Array, Array], recomputed: str = "none"
    ) -> Tensor:
        """ids (N,) of B sequences -> (N, C). recomputed: what backward recomputes of each block: none, attention, block."""
        h_NC, delta_NC = self.embed_tokens(ids_N), None
        for i, layer in enumerate(self.layers):
            block = functools.partial(layer, B, rotary, recomputed == "attention")
            block = functools.partial(recompute, block) if recomputed == "block" else block
            stream = (h_NC,) if delta_NC is None else (h_NC, delta_NC)
            h_NC, delta_NC = in_layer(i, block, *stream)  # names the layer for observers
        return add_norm(h_NC, delta_NC, self.norm)[1]


STANDARD = (Decoder, Block, Attention, MLP, Embedding, Linear, RMSNorm)


class Transformer(Module):
    """The model. Calling it gives logits, `loss` the mean cross-entropy.

    device: "cpu" (NumPy) or "gpu" (CuPy). The same seed gives the same weights on both.

    precision: "fp32", or on a GPU "bf16": activations and a copy of the matrices in bf16; weights, their gradients,
    moments, the residual stream and all sums in float32.
    seed None: all weights are zero, to be loaded.  arena: all parameters (nn.Arena).
    recompute: which activations backward recomputes instead of keeping them (activation checkpointing): "none", "attention"
    (between its matrix products) or "block". May be set at any time; changes no bit of any gradient.
    world: the number of ranks among which the arena can be divided (nn.Arena).
    trainable False: for inference: no memory for gradients, and in bf16 none for float32 matrices.
    special_tokens: bos_token_id, eos_token_id, pad_token_id of the folder that the model was read from, for `save_pretrained`.
    Raises UserError when precision or recompute is unknown or the device does not support it.

    To change the model, replace modules (`model.model.layers[3].mlp = MyMLP(config)`) and call `renew_arena`, or derive a class
    and override `logits` or `loss`: lessons/howto/change_the_model.md.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int | None = 0,
        device: str = "cpu",
        precision: Literal["fp32", "bf16"] = "fp32",
        recompute: Literal["none", "attention", "block"] = "none",
        world: int = 1,
        trainable: bool = True,
    ):
        self.config, self.precision, self.recompute = config, precision, recompute
        self.device = device if device == "sim" else resolve_device(device)
        self.model = Decoder(config)
        if not config.tie_embeddings:
            self.lm_head = Parameter(
                (config.padded_vocab_size, config.dim), STD, {"lm_head.weight": config.vocab_size}
            )
        self._check_precision()
        if recompute not in ("none", "attention", "block"):
            raise UserError(
                f"recompute {recompute!r} is not known: choose none, attention or block"
            )
        if precision == "bf16":  # the first norm reads the float32 embedding and writes bf16
            self.model.layers[0].input_layernorm.out_dtype = BFLOAT16
        self.arena = self.make_arena(self.device, seed, precision == "bf16", world, trainable)
        self.rotary = RotaryTables(config, self.device)
        self.special_tokens: dict[str, Any] = {}

    def _check_precision(self) -> None:
        D, half = self.config.head_dim, self.precision == "bf16"
        if self.precision not in ("fp32", "bf16") or (half and self.device == "cpu"):
            raise UserError(
                f"precision {self.precision!r} is not supported on the {self.device}: choose fp32, or bf16 on a GPU"
            )
        if half and D not in WIDTHS:
            widths = ", ".join(map(str, WIDTHS))
            raise UserError(
                f"attention in bf16 supports head_dim {widths}, this model has {D}: choose precision fp32"
            )
        if half and self.device == "gpu" and not has_bf16():
            raise UserError(
                "this GPU has no bf16 instructions, which need compute capability 8.0 (Ampere): choose precision fp32"
            )

    def __call__(self, ids: Array) -> Tensor:
        """ids (B, T), whole numbers, NumPy or CuPy -> logits Tensor (B, T, V), float32.

        Raises UserError when T > max_seq_len or an id is not in [0, vocab_size). (Ids that are already on the GPU
        are not checked, because reading them would wait for the GPU: an invalid id gives NaN logits.)
        """
        ids = self._check_ids(ids, "ids")
        B, T = ids.shape
        logits_BTP = self.logits(self.hidden(ids)).reshape(B, T, -1)
        return F.narrow(logits_BTP, self.config.vocab_size)

    def loss(self, ids: Array, targets: Array, inv_count: Array | None = None) -> Tensor:
        """ids, targets (B, T) -> mean cross-entropy over the targets that are not -100, in nats; shape ().

        inv_count: (1,) float32 on the model's device: 1 / the number of targets of the whole batch, if this call gets only
        a part of it. Raises UserError like calling the model. Without any target the loss is 0.
        The logits never exist as a whole, and this call already computes their gradient: use no_grad if no backward follows.
        """
        ids, targets = self._check_ids(ids, "ids"), self._check_ids(targets, "targets")
        if targets.shape != ids.shape:
            raise UserError(
                f"targets have shape {targets.shape}, ids {ids.shape}: they must be the same"
            )
        targets_N = self._to_device(targets.reshape(-1))
        if inv_count is None:
            inv_count = count_targets(targets_N)
        x_NC, vocab_size = self.hidden(ids), self.config.vocab_size
        if type(self).logits is not Transformer.logits:  # overridden
            return F.cross_entropy(self.logits(x_NC), targets_N, vocab_size, inv_count)
        return F.linear_cross_entropy(x_NC, self._head(), targets_N, vocab_size, inv_count)

    def hidden(self, ids: Array) -> Tensor:
        """ids (B, T) -> (N, C), N = B T: the output of the last norm. Raises UserError like calling the model."""
        ids = self._check_ids(ids, "ids")
        B, T = ids.shape
        self.arena.refresh()
        return self.model(self._to_device(ids.reshape(-1)), B, self.rotary(T), self.recompute)

    def _head(self) -> Parameter:
        return self.model.embed_tokens.weight if self.config.tie_embeddings else self.lm_head

    def logits(self, x_NC: Tensor) -> Tensor:
        """hidden (N, C) -> (N, padded V) float32, also in bf16: small differences between them decide the next token.

        If a derived class overrides it, calling the model, `loss` and `generate` use the new one.
        """
        dtype = np.float32 if x_NC.dtype == BFLOAT16 else None
        return F.linear(x_NC, self._head(), dtype)

    def _to_device(self, array: Array) -> Array:
        return array if is_gpu(array) else to_device(np.ascontiguousarray(array), self.device)

    def _check_ids(self, ids: Array, what: str) -> Array:
        c = self.config
        ids = ids if hasattr(ids, "strides") else np.asarray(ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise UserError(
                f"{what} must be whole numbers of shape (B, T), got {ids.dtype} of shape {ids.shape}"
            )
        if not ids.size:
            raise UserError(f"{what} of shape {ids.shape} are empty: give at least one token")
        if ids.shape[1] > c.context:
            raise UserError(
                f"{what} have {ids.shape[1]} tokens per sequence, the model supports {c.context} (max_seq_len): give shorter sequences"
            )
        if is_gpu(ids) and self.device != "gpu":
            raise UserError(
                f"{what} are on the GPU, the model on the CPU: use device='gpu' or {what}.get()"
            )
        if not is_gpu(ids):
            ignored = 0 if what == "ids" else -100
            bad = (ids < 0) & (ids != ignored) | (ids >= c.vocab_size)
            if bad.any():
                raise UserError(
                    f"{what} hold {int(ids[bad][0])}: they must be below vocab_size, {c.vocab_size}"
                )
        return ids

    @no_grad()
    def generate(
        self,
        ids: Array,
        max_new_tokens: int,
        temperature: float = 0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Array:
        """ids (B, T) or (T,) -> the same with max_new_tokens appended to every sequence.

        temperature 0 takes the most likely token; otherwise one is drawn from softmax(logits / temperature), among
        the top_k most likely tokens if given. Every sequence has a separate random stream. The whole prefix is recomputed
        for every token (serving/engine.py has a KV cache). Raises UserError when prompt and new tokens exceed max_seq_len.
        """
        ids = ids if hasattr(ids, "strides") else np.asarray(ids)
        tokens = np.atleast_2d(to_numpy(ids))
        if not tokens.size:
            raise UserError("the prompt is empty: give at least one token")
        tokens = self._check_ids(tokens, "ids").astype(np.int64)
        total = tokens.shape[1] + max_new_tokens
        if total > self.config.context or max_new_tokens < 0:
            raise UserError(
                f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones do not fit into "
                f"max_seq_len {self.config.context}"
            )
        if not 0 <= temperature < math.inf:
            raise UserError(f"temperature must be 0 or a positive number, got {temperature}")
        if top_k is not None and top_k < 1:
            raise UserError(f"top_k must be at least 1, or None for all tokens, got {top_k}")
        streams = [np.random.default_rng([seed, row]) for row in range(len(tokens))]
        for _ in range(max_new_tokens):
            B, T = tokens.shape
            last_BC = self.hidden(tokens).data.reshape(B, T, -1)[:, -1].copy()
            logits = to_numpy(self.logits(Tensor(last_BC)).data)[:, : self.config.vocab_size]
            picks = [pick(row, temperature, top_k, stream) for row, stream in zip(logits, streams)]
            tokens = np.concatenate([tokens, np.array(picks, tokens.dtype)[:, None]], axis=1)
        fits = self.config.vocab_size - 1 <= np.iinfo(ids.dtype).max
        out = tokens.reshape(*ids.shape[:-1], -1).astype(ids.dtype if fits else np.int64)
        return to_device(out, "gpu") if is_gpu(ids) else out

    @property
    def variation(self) -> str:
        """How the model differs from a Llama or Qwen3, the only architectures that other programs can load; "" if it does not."""
        found = [f"{len(self.model.layers)} layers"] * (
            len(self.model.layers) != self.config.n_layers
        )
        if len(list(self._storage(""))) > len(list(self.storage())):
            found.append("parameters in two places")
        for name in ("__call__", "hidden", "logits"):
            if getattr(type(self), name) is not getattr(Transformer, name):
                found.append(f"{name} of {type(self).__name__}")
        for path, module in list(self.modules())[1:]:
            if type(module) not in STANDARD:
                found.append(f"{path}{type(module).__name__}")
            elif isinstance(module, Attention) and module.config != self.config:
                found.append(f"{path}config")
        return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if found[3:] else "")

    def load_weights(self, folder: str | Path) -> None:
        """Read the weights of a folder that `save_pretrained` or a run has written. The model may have a `variation`.
        Raises UserError when names, shapes or checksums do not match; the model is then unchanged."""
        verify_weights(Path(folder))
        huggingface.load_into(self, Path(folder))

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the Hugging Face layout (LlamaForCausalLM or Qwen3ForCausalLM); see huggingface.save.

        A model with a `variation` gets a config.json that only load_weights accepts.
        """
        huggingface.save(self, Path(folder), tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str = "cpu",
        precision: Literal["fp32", "bf16"] = "fp32",
        trainable: bool = True,
        world: int = 1,
    ) -> "Transformer":
        """Read a folder in the Hugging Face layout; see huggingface.load. Raises UserError when it is not a supported model."""
        return huggingface.load(
            Path(folder),
            lambda config: cls(config, None, device, precision, world=world, trainable=trainable),
        )


def pick(
    logits_V: np.ndarray, temperature: float, top_k: int | None, rng: np.random.Generator
) -> int:
    """Choose a token. Ties go to the lower id, both at temperature 0 and at the limit of the top_k."""
    if temperature == 0:
        return int(logits_V.argmax())
    scaled = logits_V.astype(np.float64) / temperature
    if top_k is not None and top_k < scaled.size:
        kept = np.argsort(-scaled, kind="stable")[:top_k]
        masked = np.full_like(scaled, -np.inf)
        masked[kept] = scaled[kept]
        scaled = masked
    p = np.exp(scaled - scaled.max())
    return int(
        np.searchsorted(np.cumsum(p) / p.sum(), rng.random(), side="right").clip(0, p.size - 1)
    )
