"""The model with a KV cache: keys and values of earlier tokens are stored, so a new token costs the work of one token.

    prefill    N new tokens of A sequences, packed without padding -> logits of the last token of each
    decode     one new token for each of B sequences -> logits (B, V)

Both work on arrays, without autograd, with the kernels and the weights of the trained model. The residual stream h is
float32; with bf16 weights everything between two additions to it is bf16, and the logits are float32.

On a GPU, a decoding step of a few sequences uses kernels/decoding/gemv.py, which fuses norms, SwiGLU and the residual
additions into the matrix products: five kernels per layer. Otherwise it uses the kernels of training.

Batch invariance: the order of the additions in a matrix product depends on its shape, so the last bits of a token depend on
the number of tokens computed with it. With `batch_invariant` they do not: a decoding step computes each sequence with gemv,
whose rows are independent of each other, and the caller prefills one sequence at a time.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ..device import Array, array_module, to_device
from ..errors import UserError
from ..kernels.attention.context_attention import context_attention
from ..kernels.attention.decode_attention import decode_attention
from ..kernels.cast import BFLOAT16
from ..kernels.decoding.gemv import MAX_ROWS, gemv, gemv_fits
from ..kernels.decoding.kv_cache import append_kv, empty_kv_cache, kv_cache_bytes
from ..kernels.decoding.padding import token_positions
from ..kernels.embedding import embedding_fwd
from ..kernels.gemm import linear_fwd, matmul
from ..kernels.primitives.tiles import WIDTHS
from ..kernels.qk_norm_rope import qk_norm_rope_fwd
from ..kernels.residual import residual_rmsnorm_fwd
from ..kernels.rmsnorm import rmsnorm_fwd
from ..kernels.rope import rope_frequencies, rope_tables
from ..kernels.runtime.launch import empty
from ..kernels.swiglu import swiglu_fwd
from ..nn.model import Transformer

# Bytes of the gate/up weights that the output projection prefetches: memory stays busy while one kernel waits for another.
# Prefetching the weights of the other products as well was no faster.
AHEAD = 8 << 20


@dataclass(frozen=True)
class LayerWeights:
    """Views of the parameters of one layer: matrices in the precision of the computation, norm weights in float32."""

    norm: Array  # (C,) before attention
    qkv: Array  # ((H + 2G) D, C)
    q_norm: Array | None  # (D,); None without QK-norm
    k_norm: Array | None  # (D,)
    o_proj: Array  # (C, H D)
    mlp_norm: Array  # (C,)
    gate_up: Array  # (2F, C)
    down_proj: Array  # (C, F)


@dataclass(frozen=True)
class PackedTokens:
    """Where the N tokens of a prefill belong. All arrays are int32 on the device."""

    blocks_N: Array  # block of each token
    offsets_N: Array  # its offset in the block
    positions_N: Array  # position of each token in its sequence
    edges_E: Array  # sequence a owns the tokens edges[a] .. edges[a + 1] - 1 (kernels/decoding/padding.py)
    history_A: Array  # tokens of each sequence that are in the cache already
    tables_AM: Array  # block table of each sequence: its slot is a single block
    longest: int  # new tokens of the longest sequence


class CachedModel:
    """A Transformer and a KV cache of `slots` slots, each for one sequence of up to `capacity` tokens.

    kv_L2RGSD: (L, 2, slots, G, S, D) in the precision of the model, allocated once; slot r is block r of the array. S is the
    capacity, on a GPU rounded up to a multiple of 16.
    nbytes: size of that array, in bytes.
    batch_invariant: the last bits of a token do not depend on the other sequences of a decoding step.
    Raises UserError if there is not enough memory, or no kernel for the model's head width.
    """

    def __init__(
        self, model: Transformer, slots: int, capacity: int, batch_invariant: bool = False
    ):
        c = model.config
        if model.device != "cpu" and c.head_dim not in WIDTHS:
            raise UserError(
                f"on a GPU the engine supports heads of {', '.join(map(str, WIDTHS))} channels, this model has "
                f"{c.head_dim}: use the CPU"
            )
        self.model, self.config, self.device = model, c, model.device
        self.capacity = capacity if model.device == "cpu" else -(-capacity // 16) * 16
        self.batch_invariant = batch_invariant
        self.dtype = BFLOAT16 if model.precision == "bf16" else np.dtype(np.float32)
        model.arena.refresh()
        self.layers = [_layer_weights(layer, c.qk_norm) for layer in model.model.layers]
        table = model.model.embed_tokens.weight
        self.table = table.data  # as in training: its rows enter the residual stream unrounded
        self.norm = model.model.norm.weight.value
        self.head = table.value if c.tie_embeddings else model.lm_head.value
        # ModelConfig replaces None by a number in these three.
        self.head_dim = c.head_dim
        self.n_kv_heads = c.n_kv_heads
        self.hidden_dim = c.hidden_dim
        self.scale = self.head_dim**-0.5
        self.cos_PR, self.sin_PR = self._tables()
        size = (c.n_layers, slots, self.n_kv_heads, self.capacity, self.head_dim, self.dtype)
        self.nbytes = kv_cache_bytes(*size)
        try:
            self.kv_L2RGSD = empty_kv_cache(self.norm, *size)
        except Exception as error:
            text = f"{type(error).__name__} {error}".lower()
            # NumPy says "too big" for more than 2^63 bytes.
            if "memory" not in text and "too big" not in text:
                raise
            raise UserError(
                f"there is not enough memory for a KV cache of {self.nbytes / 1e9:.2f} GB ({slots} slots of {capacity} "
                "tokens): choose a smaller max_batch or max_seq_len"
            ) from None

    # ------------------------------------------------------------------------- positions
    def _tables(self) -> tuple[Array, Array]:
        """cos and sin of every position of the cache, float32 (capacity, D/2) each.

        With dynamic scaling, a position p beyond the trained length has the angles of a sequence that ends at p, and keeps
        them when the sequence grows. transformers does the same: its cache holds keys that are rotated already.
        """
        c = self.config
        if c.rope_type != "dynamic":
            return self._on_device(self._tables_for(self.capacity))
        tables = self._tables_for(min(self.capacity, c.max_seq_len))
        D, scaling = self.head_dim, c.rope_scaling
        angles = [
            p * rope_frequencies(D, c.rope_theta, scaling, p + 1, c.max_seq_len)
            for p in range(c.max_seq_len, self.capacity)
        ]
        if angles:
            beyond = (f(np.stack(angles)).astype(np.float32) for f in (np.cos, np.sin))
            tables = [np.concatenate(pair) for pair in zip(tables, beyond)]
        return self._on_device(tables)

    def _tables_for(self, length):
        c, D = self.config, self.head_dim
        return rope_tables(D, length, c.rope_theta, c.rope_scaling, length, c.max_seq_len)

    def _on_device(self, tables):
        cos, sin = tables
        return to_device(cos, self.device), to_device(sin, self.device)

    def stretched(self, length: int) -> bool:
        """True if a prompt of `length` tokens has its own RoPE angles: dynamic scaling, beyond the trained length."""
        return self.config.rope_type == "dynamic" and length > self.config.max_seq_len

    # ------------------------------------------------------------------------- prefill
    def prefill(
        self, ids: np.ndarray, lengths: list[int], history: list[int], slots: list[int],
        wanted: list[int] | None = None, prompt_length: int | None = None,
    ) -> Array | None:  # fmt: skip
        """Append lengths[a] tokens to each of A sequences, of which history[a] tokens are in slot slots[a] already.

        ids: (N,), the new tokens of all sequences, packed.
        wanted: the sequences whose last token gets logits; None: all.
        prompt_length: tokens of the whole prompt, for dynamic scaling; None: the longest history + length. A prompt beyond
        the trained length (`stretched`) must be the only sequence.
        -> logits (len(wanted), padded V) float32, or None if wanted is empty.
        """
        self.model.arena.refresh()
        edges = np.concatenate([[0], np.cumsum(lengths)])
        sequences = range(len(lengths)) if wanted is None else wanted
        last = [edges[a + 1] - 1 for a in sequences]
        ids_N, edges_E, history_A, slots_A, last_W = (
            to_device(np.ascontiguousarray(x, np.int32), self.device)
            for x in (ids, edges, history, slots, last)
        )
        prompt_length = prompt_length or max(h + n for h, n in zip(history, lengths))
        tables = self.cos_PR, self.sin_PR
        if self.stretched(prompt_length):
            tables = self._on_device(self._tables_for(prompt_length))
        tables_AM = slots_A[:, None]
        places = token_positions(edges_E, len(ids), history_A, tables_AM, self.capacity)
        packed = PackedTokens(*places, edges_E, history_A, tables_AM, max(lengths))
        return self._prefill(ids_N, tables, packed, last_W if last else None)

    def _prefill(self, ids_N, tables, packed, last_W):
        eps = self.config.norm_eps
        h_NC = embedding_fwd(ids_N, self.table, np.float32)
        x_NC, _ = rmsnorm_fwd(h_NC, self.layers[0].norm, eps, self.dtype)
        for i, w in enumerate(self.layers):
            a_NC = self._attend(i, w, x_NC, tables, packed)
            if i == len(self.layers) - 1:  # after the last attention only the last tokens matter
                if last_W is None:
                    return None
                h_NC, a_NC = (gather_rows(x, last_W) for x in (h_NC, a_NC))
            h_NC, x_NC, _ = residual_rmsnorm_fwd(h_NC, linear_fwd(a_NC, w.o_proj), w.mlp_norm, eps)
            m_NC = linear_fwd(swiglu_fwd(linear_fwd(x_NC, w.gate_up)), w.down_proj)
            h_NC, x_NC, _ = residual_rmsnorm_fwd(h_NC, m_NC, self._norm_after(i), eps)
        return self._logits(x_NC)

    def _attend(self, i, w, x_NC, tables, packed):
        """-> (N, H D)"""
        c, p, (cos_PR, sin_PR) = self.config, packed, tables
        qkv, heads = linear_fwd(x_NC, w.qkv), (c.n_heads, self.n_kv_heads)
        q, k, v, _ = qk_norm_rope_fwd(
            qkv, w.q_norm, w.k_norm, cos_PR, sin_PR, *heads, 0, c.norm_eps, p.positions_N
        )
        k_RGSD, v_RGSD = self.kv_L2RGSD[i, 0], self.kv_L2RGSD[i, 1]
        append_kv(k_RGSD, v_RGSD, k, v, p.blocks_N, p.offsets_N)
        o_NHD = context_attention(
            q, k_RGSD, v_RGSD, p.edges_E, p.history_A, p.tables_AM, p.longest, self.scale
        )
        return o_NHD.reshape(len(q), -1)

    def _norm_after(self, i):
        return self.layers[i + 1].norm if i + 1 < len(self.layers) else self.norm

    # ------------------------------------------------------------------------- decode
    def decode(self, ids_B: Array, lengths_B: Array, slots_B: Array) -> Array:
        """Append token ids_B[b] to slot slots_B[b], which holds lengths_B[b] tokens. -> logits (B, padded V) float32

        All three are int32 on the device. The host does not read them, so a CUDA graph can capture the step. An entry with
        slot -1 is idle.
        """
        lengths_B = array_module(lengths_B).where(slots_B < 0, np.int32(-1), lengths_B)
        if self._through_gemv(len(ids_B)):
            batches = [slice(i, i + MAX_ROWS) for i in range(0, len(ids_B), MAX_ROWS)]
            logits = [self._decode_gemv(ids_B[x], lengths_B[x], slots_B[x]) for x in batches]
            return logits[0] if len(logits) == 1 else concatenate_rows(logits)
        return self._decode_gemm(ids_B, lengths_B, slots_B)

    def _through_gemv(self, B: int) -> bool:
        if self.device == "cpu":
            return self.batch_invariant
        c = self.config
        widths = (c.dim, c.n_heads * self.head_dim, self.hidden_dim)
        fit = all(gemv_fits(1, k, self.dtype) for k in widths)
        if self.batch_invariant and not fit:
            raise UserError(
                "batch_invariant on a GPU needs dim, n_heads * head_dim and hidden_dim that are multiples of 32: use the CPU"
            )
        return fit and (B <= MAX_ROWS or self.batch_invariant)

    def _decode_gemv(self, ids_B, lengths_B, slots_B):
        """Five kernels per layer: norm + QKV; attention; output + residual; norm + gate/up + SwiGLU; down + residual."""
        c, half = self.config, self.dtype
        # No kernel of a step writes weights.
        product = functools.partial(gemv, weights_ready=True)
        h_BC = embedding_fwd(ids_B, self.table, np.float32)
        for i, w in enumerate(self.layers):
            qkv = product(h_BC, w.qkv, w.norm, c.norm_eps, dtype=half)
            o_BC = self._attend_decode(i, w, qkv, lengths_B, slots_B)
            prefetched = w.gate_up.reshape(-1)[: AHEAD // w.gate_up.itemsize]
            product(o_BC, w.o_proj, residual_NO=h_BC, out=h_BC, next_w=prefetched)
            y_BF = product(h_BC, w.gate_up, w.mlp_norm, c.norm_eps, swiglu=True, dtype=half)
            product(y_BF, w.down_proj, residual_NO=h_BC, out=h_BC)
        return product(h_BC, self.head, self.norm, c.norm_eps, dtype=np.float32)

    def _decode_gemm(self, ids_B, lengths_B, slots_B):
        eps = self.config.norm_eps
        h_BC = embedding_fwd(ids_B, self.table, np.float32)
        x_BC, _ = rmsnorm_fwd(h_BC, self.layers[0].norm, eps, self.dtype)
        for i, w in enumerate(self.layers):
            o_BC = self._attend_decode(i, w, linear_fwd(x_BC, w.qkv), lengths_B, slots_B)
            h_BC, x_BC, _ = residual_rmsnorm_fwd(h_BC, linear_fwd(o_BC, w.o_proj), w.mlp_norm, eps)
            m_BC = linear_fwd(swiglu_fwd(linear_fwd(x_BC, w.gate_up)), w.down_proj)
            h_BC, x_BC, _ = residual_rmsnorm_fwd(h_BC, m_BC, self._norm_after(i), eps)
        return self._logits(x_BC)

    def _attend_decode(self, i, w, qkv_BP, lengths_B, slots_B):
        """-> (B, H D). The launch before must be the QKV product: it writes neither cache nor lengths, so both may be read
        before it has ended."""
        k_RGSD, v_RGSD = self.kv_L2RGSD[i, 0], self.kv_L2RGSD[i, 1]
        where = (lengths_B, slots_B[:, None], self.cos_PR, self.sin_PR)
        norms = (w.q_norm, w.k_norm, self.config.norm_eps)
        return decode_attention(
            qkv_BP, k_RGSD, v_RGSD, *where, *norms, self.scale, True, self.batch_invariant
        )

    def _logits(self, x_NC):
        """(N, C) -> (N, padded V) float32"""
        shape = (len(x_NC), self.head.shape[0])
        return matmul(empty(x_NC, shape, np.float32), x_NC, self.head, trans_b=True)


def gather_rows(x_NC: Array, index_W: Array) -> Array:
    """-> x[index] (W, C), by the embedding's kernel. index: int32"""
    return embedding_fwd(index_W, x_NC)


def concatenate_rows(arrays: list[Array]) -> Array:
    """Arrays of shape (n_i, V) -> (sum of n_i, V)"""
    result = empty(arrays[0], (sum(map(len, arrays)), arrays[0].shape[1]))
    end = 0
    for x in arrays:
        start, end = end, end + len(x)
        result[start:end] = x
    return result


def _layer_weights(layer, qk_norm):
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm.weight, attention.k_norm.weight) if qk_norm else ()
    q_norm, k_norm = [w.value for w in norms] or (None, None)
    return LayerWeights(
        layer.input_layernorm.weight.value, attention.qkv.weight.value, q_norm, k_norm,
        attention.o_proj.weight.value, layer.post_attention_layernorm.weight.value,
        mlp.gate_up.weight.value, mlp.down_proj.weight.value,
    )  # fmt: skip
