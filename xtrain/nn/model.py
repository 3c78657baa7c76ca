"""A Llama (qk_norm=False) or Qwen3 (qk_norm=True) decoder, from token ids to logits. Every line says its shapes.

    ids (B, T) -> embedding (N, C) -> L x [ norm, attention, + ; norm, MLP, + ] -> norm -> head (N, V)

Per token everything is 2-D, (N, C) with N = B T: one large matrix product instead of B small ones. Only attention
knows about sequences. Positions start again at 0 in every sequence.

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
from .autograd import Tensor, no_grad
from .modules import Embedding, Linear, Module, Parameter, RMSNorm
from .observers import in_layer
from .recompute import recompute

STD = 0.02  # of the initialisation


class RotaryTables:
    """cos and sin of every position, (positions, D/2) float32, made once per length class and kept on the device."""

    def __init__(self, config: ModelConfig, device: str):
        self.config, self.device, self.tables = config, device, {}

    def __call__(self, T: int) -> tuple[Array, Array]:
        c = self.config
        P = max(T, c.max_seq_len)  # more with dynamic scaling alone: there the angles follow T
        if P not in self.tables:
            for longer in [n for n in self.tables if n > c.max_seq_len]:
                del self.tables[longer]  # generating would leave one for every length
            tables = rope_tables(
                c.head_dim, P, c.rope_theta, c.rope_scaling, seq_len=P, max_seq_len=c.max_seq_len
            )
            self.tables[P] = tuple(to_device(t, self.device) for t in tables)
        return self.tables[P]


class Attention(Module):
    """Packed q, k, v of B sequences -> (N, C): QK-norm if the model has it, RoPE, causal softmax over grouped heads."""

    def __init__(self, c: ModelConfig):
        D, H, G = c.head_dim, c.n_heads, c.n_kv_heads
        rows = {"q_proj.weight": H * D, "k_proj.weight": G * D, "v_proj.weight": G * D}
        self.qkv = Parameter(((H + 2 * G) * D, c.dim), STD, rows)
        self.o_proj = Linear(H * D, c.dim, STD / (2 * c.n_layers) ** 0.5)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, c.norm_eps), RMSNorm(D, c.norm_eps)
        self.config = c

    def __call__(
        self, qkv: Tensor, B: int, rotary: tuple[Array, Array], again: bool = False
    ) -> Tensor:
        """qkv (N, (H + 2G) D) -> (N, C).  again: forget what lies between the two, and compute it again in backward."""
        attend = functools.partial(self.attend, B, rotary)
        return self.o_proj(recompute(attend, qkv) if again else attend(qkv))  # (N, C)

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
    """Packed gate and up -> down(silu(gate) * up), (N, C)."""

    def __init__(self, c: ModelConfig):
        F_ = c.hidden_dim
        self.gate_up = Parameter(
            (2 * F_, c.dim), STD, {"gate_proj.weight": F_, "up_proj.weight": F_}
        )
        self.down_proj = Linear(F_, c.dim, STD / (2 * c.n_layers) ** 0.5)

    def __call__(self, gu_N2F: Tensor) -> Tensor:
        """gate and up (N, 2F) -> (N, C)"""
        return F.swiglu_linear(gu_N2F, self.down_proj.weight)


class Block(Module):
    """The residual stream h and what the last block still has to add to it travel apart, so that each addition is
    fused with the norm that follows it; the norm is joined to the matrix product that follows it."""

    def __init__(self, c: ModelConfig):
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)

    def __call__(self, B, rotary, attend_again, h_NC, pending_NC=None):
        attention, mlp = self.self_attn, self.mlp
        h_NC, qkv = self.input_layernorm(
            h_NC, pending_NC, attention.qkv
        )  # nothing is pending at first
        attended_NC = attention(qkv, B, rotary, attend_again)
        h_NC, gu_N2F = self.post_attention_layernorm(h_NC, attended_NC, mlp.gate_up)
        return h_NC, mlp(gu_N2F)


class Decoder(Module):
    """Everything below the head; its attribute names are those of the Hugging Face layout."""

    def __init__(self, c: ModelConfig):
        self.embed_tokens = Embedding(c.vocab_size, c.padded_vocab_size, c.dim, STD)
        self.layers = [Block(c) for _ in range(c.n_layers)]
        self.norm = RMSNorm(c.dim, c.norm_eps)

    def __call__(
        self, ids_N: Array, B: int, rotary: tuple[Array, Array], again: str = "none"
    ) -> Tensor:
        """again: what of each block backward computes a second time, "none", "attention" or "block"."""
        stream = (self.embed_tokens(ids_N),)  # h, and from the first block on what is pending
        for i, layer in enumerate(self.layers):
            block = functools.partial(layer, B, rotary, again == "attention")
            block = functools.partial(recompute, block) if again == "block" else block
            stream = in_layer(i, block, *stream)
        return self.norm(*stream)[1]  # (N, C)


STANDARD = (Decoder, Block, Attention, MLP, Embedding, Linear, RMSNorm)


class Transformer(Module):
    """The model. device: "cpu" (NumPy) or "gpu" (CuPy). The same seed gives the same weights on both.

    precision: "fp32", or on a GPU "bf16": activations and a copy of the matrices in bf16; weights, their gradients,
    moments, the residual stream and all sums in float32.
    seed None: all weights are zero, to be loaded.  arena: all parameters (nn.Arena).
    recompute: what backward computes again instead of keeping it: "none", "attention" (between its matrix products) or
    "block"; may be set at any time, and changes no bit of any gradient.
    world: the number of ranks among which the arena can be divided (nn.Arena).
    trainable False: to compute with only: no memory for gradients, and in bf16 none for float32 matrices.
    special_tokens: bos_token_id, eos_token_id, pad_token_id of the folder that it was read from, for `save_pretrained`.
    Calling the model gives logits, `loss` the mean cross-entropy.

    To change it, put modules of your own in the place of others (`model.model.layers[3].mlp = MyMLP(config)`) and call
    `renew_arena`; or derive a class with a `logits` or `loss` of its own: lessons/howto/change_the_model.md.
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
        if (
            precision == "bf16"
        ):  # here the float32 residual stream enters the bf16 branches for the first time
            self.model.layers[0].input_layernorm.out_dtype = BFLOAT16
        self.arena = self.make_arena(self.device, seed, precision == "bf16", world, trainable)
        self.rotary = RotaryTables(config, self.device)
        self.special_tokens: dict[str, Any] = {}

    def _check_precision(self) -> None:
        D, half = self.config.head_dim, self.precision == "bf16"
        if self.precision not in ("fp32", "bf16") or (half and self.device == "cpu"):
            raise UserError(
                f"precision {self.precision!r} cannot be had on the {self.device}: choose fp32, or bf16 on a GPU"
            )
        if half and D not in WIDTHS:
            widths = ", ".join(map(str, WIDTHS))
            raise UserError(
                f"in bf16 attention takes heads of {widths} channels, this model has {D}: choose precision fp32"
            )
        if half and self.device == "gpu" and not has_bf16():
            raise UserError(
                "this GPU has no bf16 instructions, they begin with compute capability 8.0 (Ampere): choose precision fp32"
            )

    def __call__(self, ids: Array) -> Tensor:
        """ids (B, T), whole numbers, NumPy or CuPy -> logits Tensor (B, T, V), float32.

        Raises UserError when T > max_seq_len or an id is not in [0, vocab_size). (Ids that are on the GPU
        already are not looked at, for that would mean waiting: a wrong one gives NaN logits.)
        """
        ids = self._check_ids(ids, "ids")
        B, T = ids.shape
        logits_BTP = self.logits(self.hidden(ids)).reshape(B, T, -1)
        return F.narrow(logits_BTP, self.config.vocab_size)

    def loss(self, ids: Array, targets: Array, inv_count: Array | None = None) -> Tensor:
        """ids, targets (B, T) -> mean cross-entropy over the targets that are not -100, in nats; shape ().

        inv_count: (1,) float32 on the model's device, 1 / number of targets to divide by, when this call sees only
        a part of the batch. Raises UserError like calling the model; without a single target the loss is 0.
        The logits never exist as a whole, and their gradient is computed at once: where no backward will follow, use no_grad.
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
        if type(self).logits is not Transformer.logits:  # a class with a head of its own
            return F.cross_entropy(self.logits(x_NC), targets_N, vocab_size, inv_count)
        return F.linear_cross_entropy(x_NC, self._head(), targets_N, vocab_size, inv_count)

    def hidden(self, ids: Array) -> Tensor:
        """ids (B, T) -> (N, C), N = B T: the last norm's output, of which the head makes logits. Raises UserError."""
        ids = self._check_ids(ids, "ids")
        B, T = ids.shape
        self.arena.refresh()
        return self.model(self._to_device(ids.reshape(-1)), B, self.rotary(T), self.recompute)

    def _head(self) -> Parameter:
        return self.model.embed_tokens.weight if self.config.tie_embeddings else self.lm_head

    def logits(self, x_NC: Tensor) -> Tensor:
        """hidden (N, C) -> (N, padded V) float32, also in bf16: the next token is chosen by their differences.

        A derived class may change them: calling the model, `loss` and `generate` all follow.
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
                f"{what} have {ids.shape[1]} tokens a sequence, the model takes {c.context} (max_seq_len)"
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
        the top_k most likely if given. Every sequence has random numbers of its own. The whole prefix is computed
        again for every token. Raises UserError when prompt and new tokens do not fit into max_seq_len.
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
        """What of this model is neither Llama's nor Qwen3's, for others compute those alone; "" if nothing."""
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
        """Take the weights in a folder, as `save_pretrained` or a run has written them, into this model, whatever it computes.
        Raises UserError when names or shapes do not fit, or checksums beside them; then it is unchanged."""
        verify_weights(Path(folder))
        huggingface.load_into(self, Path(folder))

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> None:
        """Write the Hugging Face layout (LlamaForCausalLM or Qwen3ForCausalLM); see huggingface.save.

        Of a model with a `variation` the weights are written, under a config.json that only load_weights accepts.
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
        """Read a folder in the Hugging Face layout; see huggingface.load. Raises UserError."""
        return huggingface.load(
            Path(folder),
            lambda config: cls(config, None, device, precision, world=world, trainable=trainable),
        )


def pick(
    logits_V: np.ndarray, temperature: float, top_k: int | None, rng: np.random.Generator
) -> int:
    """Choose a token. Ties go to the lower id, at temperature 0 and at the border of the top_k."""
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
