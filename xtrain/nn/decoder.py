"""The decoder of a Llama, and with further features (ModelConfig) of other families.

    ids (N,) -> embedding (N, C) -> L x [ norm, attention, + ; norm, MLP, + ] -> norm (N, C)

Everything per token is 2-D, (N, C) with N = B T: one large matrix product instead of B small ones.
Only attention uses the division into sequences. Positions start at 0 in every sequence.

Initialisation: norm weights 1; matrices and embeddings normal with standard deviation 0.02; the two
matrices that write to the residual stream (o_proj, down_proj) 0.02 / sqrt(2 L), so that its
variance does not grow with depth (Radford et al. 2019).
"""

import functools
from collections.abc import Callable

import numpy as np

from ..config import ModelConfig
from ..device import Array
from . import functional as F
from .deferred import Stream, parts_of
from .experts import MixtureOfExperts
from .modules import STD, Embedding, Linear, Module, RMSNorm
from .observers import in_layer
from .recompute import recompute
from .sequences import Sequences
from .tensor import Tensor


class Attention(Module):
    """Bias and QK-norm if the model has them, RoPE, causal softmax over grouped heads, projection.

    `qkv` is the packed projection to q, k and v.
    rotary: False: without RoPE, so the layer sees the order of tokens only through the mask.
    window: keys that a query sees, itself among them; 0: all.
    """

    def __init__(self, c: ModelConfig, rotary: bool = True, window: int = 0):
        D, H, G = c.head_dim, c.n_heads, c.n_kv_heads
        rows = {"q_proj.weight": H * D, "k_proj.weight": G * D, "v_proj.weight": G * D}
        self.qkv: Module = Linear(c.dim, (H + 2 * G) * D, STD, rows, c.qkv_bias)
        self.o_proj: Module = Linear(H * D, c.dim, STD / (2 * c.n_layers) ** 0.5)
        if c.qk_norm:
            self.q_norm: Module = RMSNorm(D, c.norm_eps)
            self.k_norm: Module = RMSNorm(D, c.norm_eps)
        self.config = c
        self.rotary = rotary
        self.window = window

    def __call__(self, x_NC: Tensor, sequences: Sequences) -> Tensor:
        """Return the attention of x (N, C), the rows of `sequences`: (N, C)."""
        attend = functools.partial(self.attend, sequences)
        if sequences.recompute == "attention":
            attend = functools.partial(recompute, attend)
        return self.o_proj(attend(self.qkv(x_NC)))

    def attend(self, sequences: Sequences, qkv: Tensor) -> Tensor:
        """Compute everything between the two products: (N, (H + 2G) D) -> (N, H D)."""
        c = self.config
        D, H, G = c.head_dim, c.n_heads, c.n_kv_heads
        scale = c.attention_scale
        if self.window:
            sequences = sequences.windowed(self.window)
        if not self.rotary:
            sequences = sequences.unrotated()
        if not c.qk_norm:
            return sequences.attend(qkv, None, None, H, G, c.norm_eps, scale)
        q_norm, k_norm = self.q_norm, self.k_norm
        if type(q_norm) is RMSNorm and type(k_norm) is RMSNorm:  # norms and RoPE in one op
            weights = q_norm.weight, k_norm.weight
            return sequences.attend(qkv, *weights, H, G, c.norm_eps, scale)
        q, k, v = sequences.split_heads(qkv, H, G)
        q = q_norm(q.reshape(-1, D)).reshape(q.shape)
        k = k_norm(k.reshape(-1, D)).reshape(k.shape)
        return sequences.attention(sequences.rope(q), sequences.rope(k), v, scale)


class JointNormAttention(Attention):
    """With one RMSNorm over all query heads of a row, and one over all its key heads (OLMoE)."""

    def __init__(self, c: ModelConfig, rotary: bool = True, window: int = 0):
        super().__init__(c, rotary, window)
        self.q_norm = RMSNorm(c.n_heads * c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.n_kv_heads * c.head_dim, c.norm_eps)

    def attend(self, sequences: Sequences, qkv: Tensor) -> Tensor:
        """Compute everything between the two products: (N, (H + 2G) D) -> (N, H D)."""
        c = self.config
        if self.window:
            sequences = sequences.windowed(self.window)
        if not self.rotary:
            sequences = sequences.unrotated()
        q, k, v = sequences.split_heads(qkv, c.n_heads, c.n_kv_heads)
        q = self.q_norm(q.reshape(q.shape[0], -1)).reshape(q.shape)
        k = self.k_norm(k.reshape(k.shape[0], -1)).reshape(k.shape)
        return sequences.attention(sequences.rope(q), sequences.rope(k), v, c.attention_scale)


class MLP(Module):
    """down(silu(gate) * up). `gate_up` is the packed projection to gate and up.

    gelu: with GELU in place of SiLU.
    """

    def __init__(self, c: ModelConfig):
        self.gelu = c.gelu
        rows = {"gate_proj.weight": c.hidden_dim, "up_proj.weight": c.hidden_dim}
        self.gate_up: Module = Linear(c.dim, 2 * c.hidden_dim, STD, rows)
        self.down_proj: Module = Linear(c.hidden_dim, c.dim, STD / (2 * c.n_layers) ** 0.5)

    def __call__(self, x_NC: Tensor) -> Tensor:
        """Return the MLP of x (N, C): (N, C)."""
        gate = F.geglu if self.gelu else F.swiglu
        return self.down_proj(gate(self.gate_up(x_NC)))


class Block(Module):
    """h = h + attention(norm(h)),  h = h + mlp(norm(h)), where h is the residual stream.

    Any module may be replaced. Additions, norms and SwiGLU are computed by the op that reads them,
    in its own pass where it can: deferred.py.
    """

    def __init__(self, c: ModelConfig, rotary: bool = True, window: int = 0):
        self.self_attn: Module = Attention(c, rotary, window)
        self.mlp: Module = MLP(c)
        self.input_layernorm: Module = RMSNorm(c.dim, c.norm_eps)
        self.post_attention_layernorm: Module = RMSNorm(c.dim, c.norm_eps)

    def __call__(self, h_NC: Tensor, sequences: Sequences) -> Tensor:
        """Return the next h (N, C). h: the rows of `sequences`."""
        h_NC = h_NC + self.self_attn(self.input_layernorm(h_NC), sequences)
        return h_NC + self.mlp(self.post_attention_layernorm(h_NC))


class SandwichBlock(Block):
    """h = h + norm(attention(norm(h))),  h = h + norm(mlp(norm(h))): Gemma 3, and its names."""

    def __init__(self, c: ModelConfig, rotary: bool = True, window: int = 0):
        super().__init__(c, rotary, window)
        self.pre_feedforward_layernorm: Module = RMSNorm(c.dim, c.norm_eps)
        self.post_feedforward_layernorm: Module = RMSNorm(c.dim, c.norm_eps)

    def __call__(self, h_NC: Tensor, sequences: Sequences) -> Tensor:
        """Return the next h (N, C). h: the rows of `sequences`."""
        x_NC = self.self_attn(self.input_layernorm(h_NC), sequences)
        h_NC = h_NC + self.post_attention_layernorm(x_NC)
        x_NC = self.mlp(self.pre_feedforward_layernorm(h_NC))
        return h_NC + self.post_feedforward_layernorm(x_NC)


class Decoder(Module):
    """Everything below the head. Its attributes have the names of the Hugging Face layout.

    around_layer: None, or a function that is called as around_layer(i, compute, *parts) and returns
        compute(*parts), the computation of layer i (ZeRO-3: parallel/gathering.py).
    """

    around_layer: Callable[..., tuple[Tensor, ...]] | None = None

    def __init__(self, c: ModelConfig):
        self.embed_tokens = Embedding(c.vocab_size, c.padded_vocab_size, c.dim, STD)
        block = SandwichBlock if c.sandwich_norms else Block
        self.layers = [block(c, i not in c.no_rope_layers, c.window(i)) for i in range(c.n_layers)]
        for i, layer in enumerate(self.layers):
            if c.joint_qk_norm:
                rotary = i not in c.no_rope_layers
                layer.self_attn = JointNormAttention(c, rotary, c.window(i))
            if c.has_experts(i):
                layer.mlp = MixtureOfExperts(c)
        self.norm: Module = RMSNorm(c.dim, c.norm_eps)
        self.scale = c.dim**0.5 if c.scaled_embedding else 1.0

    def __call__(self, ids_N: Array, sequences: Sequences) -> Tensor:
        """Return (N, C) of ids (N,), the rows of `sequences`; or fewer (Sequences.wanted_rows)."""
        x_NC = self.embed_tokens(ids_N)
        if self.scale != 1:  # rounded as in transformers, to the dtype of the weights
            x_NC = F.scale(x_NC, float(np.dtype(sequences.dtype or x_NC.dtype).type(self.scale)))
        h_NC = Stream(x_NC, dtype=sequences.dtype)
        for i, layer in enumerate(self.layers):
            compute = functools.partial(_through, layer, sequences)
            if sequences.recompute == "block":
                compute = functools.partial(recompute, compute)
            if self.around_layer is not None:
                compute = functools.partial(self.around_layer, i, compute)
            parts = in_layer(i, compute, *h_NC.parts())  # names the layer for observers
            h_NC = Stream(*parts, dtype=sequences.dtype)
        x_NC = self.norm(h_NC.rows(sequences.wanted_rows))
        return F.cast(x_NC, h_NC.branch_dtype)


def _through(layer: Block, sequences: Sequences, *parts: Tensor) -> tuple[Tensor, ...]:
    """Compute a layer, from the parts of one stream to those of the next."""
    return parts_of(layer(Stream(*parts, dtype=sequences.dtype), sequences))
