"""The model with a memory: keys and values of earlier tokens are kept, so that a new token costs one token's work.

    prefill    N new tokens of A sequences, packed one behind the other without padding -> logits of each last token
    decode     one new token for each of B sequences -> logits (B, V)

Both work on arrays, without autograd, with the kernels and the weights of the model that was trained. The residual stream
h is float32; with bf16 weights everything between two additions to it is bf16, and the logits are float32.

For a few rows on a GPU a decoding step goes through gemv.py, which fuses norms, SwiGLU and the residual additions into
the products: five kernels a layer. Otherwise it takes the kernels of training.

Batch-invariant: a sum is added up in an order that depends on the shape of a matrix product, so a token's last bits depend
on how many others are computed with it. With `batch_invariant` they do not: a decoding step computes each row with gemv,
whose rows do not know of each other, and the caller prefills one sequence at a time.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ..device import Array, to_device
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

# Bytes of gate/up's weights that the output projection brings nearer: memory is not idle while one kernel waits for another.
# Asking from the other products too was no faster, or slower.
AHEAD = 8 << 20


@dataclass(frozen=True)
class LayerWeights:
    """Views of the model's parameters: matrices in the precision of the computation, norms in float32."""

    norm: Array  # (C,) before attention
    qkv: Array  # ((H + 2G) D, C)
    q_norm: Array | None  # (D,) with QK-norm
    k_norm: Array | None
    o_proj: Array  # (C, H D)
    mlp_norm: Array  # (C,)
    gate_up: Array  # (2F, C)
    down_proj: Array  # (C, F)


class CachedModel:
    """A Transformer and the keys and values of up to `rows` sequences of up to `capacity` tokens.

    kv: (L, 2, rows, G, capacity, D) in the precision of the model, taken whole at the start.
    Raises UserError when the memory cannot be had or no kernel takes the model's heads.
    """

    def __init__(self, model: Transformer, rows: int, capacity: int, batch_invariant: bool = False):
        c = model.config
        if model.device != "cpu" and c.head_dim not in WIDTHS:
            raise UserError(
                f"on a GPU the engine takes heads of {', '.join(map(str, WIDTHS))} channels, this model has "
                f"{c.head_dim}: use the cpu"
            )
        self.model, self.config, self.device = model, c, model.device
        self.capacity, self.batch_invariant = capacity, batch_invariant
        self.dtype = BFLOAT16 if model.precision == "bf16" else np.dtype(np.float32)
        model.arena.refresh()
        self.layers = [_layer_weights(layer, c.qk_norm) for layer in model.model.layers]
        table = model.model.embed_tokens.weight
        self.table = table.data  # as in training: its rows enter the float32 stream unrounded
        self.norm = model.model.norm.weight.value
        self.head = table.value if c.tie_embeddings else model.lm_head.value
        self.scale = c.head_dim**-0.5
        self.cos_PR, self.sin_PR = self._tables()
        size = (c.n_layers, rows, c.n_kv_heads, capacity, c.head_dim, self.dtype)
        self.nbytes = kv_cache_bytes(*size)
        try:
            self.kv_L2RGSD = empty_kv_cache(self.norm, *size)
        except Exception as error:
            said = f"{type(error).__name__} {error}".lower()
            if (
                "memory" not in said and "too big" not in said
            ):  # the latter for more than 2^63 bytes
                raise
            raise UserError(
                f"there is no memory for a KV cache of {self.nbytes / 1e9:.2f} GB ({rows} rows of {capacity} tokens): "
                "choose a smaller max_batch or max_seq_len"
            ) from None

    # ------------------------------------------------------------------------- positions
    def _tables(self) -> tuple[Array, Array]:
        """cos and sin of every position of the cache.

        With dynamic scaling, position p beyond the trained length gets the angles of a sequence that ends with it, and keeps
        them when the sequence grows: as transformers does, whose cache holds keys that are turned already.
        """
        c = self.config
        if c.rope_type != "dynamic":
            return self._on_device(self._tables_for(self.capacity))
        tables = self._tables_for(min(self.capacity, c.max_seq_len))
        angles = [
            p * rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, p + 1, c.max_seq_len)
            for p in range(c.max_seq_len, self.capacity)
        ]
        if angles:
            beyond = (f(np.stack(angles)).astype(np.float32) for f in (np.cos, np.sin))
            tables = [np.concatenate(pair) for pair in zip(tables, beyond)]
        return self._on_device(tables)

    def _tables_for(self, length):
        c = self.config
        return rope_tables(c.head_dim, length, c.rope_theta, c.rope_scaling, length, c.max_seq_len)

    def _on_device(self, tables):
        return tuple(to_device(table, self.device) for table in tables)

    def stretched(self, length: int) -> bool:
        """Does a prompt of this length need angles of its own? (Dynamic scaling, beyond the trained length.)"""
        return self.config.rope_type == "dynamic" and length > self.config.max_seq_len

    # ------------------------------------------------------------------------- prefill
    def prefill(
        self, ids: np.ndarray, lengths: list[int], history: list[int], rows: list[int],
        wanted: list[int] | None = None, whole: int | None = None,
    ) -> Array | None:  # fmt: skip
        """Append `lengths[a]` tokens to each of A sequences, of which history[a] are in row rows[a] of the cache.

        ids (N,): all new tokens, one sequence behind the other. wanted: the sequences whose last token's logits are
        asked for; by default all. whole: length of the sequence when all of its prompt is there, for dynamic scaling;
        beyond the trained length (`stretched`) a sequence must come alone. -> logits (len(wanted), padded V) float32, or
        None for none.
        """
        self.model.arena.refresh()
        edges = np.concatenate([[0], np.cumsum(lengths)])
        wanted = range(len(lengths)) if wanted is None else wanted
        last = [edges[a + 1] - 1 for a in wanted]
        ids_N, edges_E, history_A, rows_A, last_W = (
            to_device(np.ascontiguousarray(x, np.int32), self.device)
            for x in (ids, edges, history, rows, last)
        )
        whole = whole or max(h + n for h, n in zip(history, lengths))
        tables = self.cos_PR, self.sin_PR
        if self.stretched(whole):
            tables = self._on_device(self._tables_for(whole))
        rows_N, positions_N = token_positions(edges_E, len(ids), history_A, rows_A)
        places = (rows_N, positions_N, edges_E, history_A, rows_A, max(lengths))
        return self._prefill(ids_N, tables, places, last_W if last else None)

    def _prefill(self, ids_N, tables, places, last_W):
        eps = self.config.norm_eps
        h_NC = embedding_fwd(ids_N, self.table, np.float32)
        x_NC, _ = rmsnorm_fwd(h_NC, self.layers[0].norm, eps, self.dtype)
        for i, w in enumerate(self.layers):
            a_NC = self._attend(i, w, x_NC, tables, places)
            if i == len(self.layers) - 1:  # from here on only the last tokens matter
                if last_W is None:
                    return None
                h_NC, a_NC = (take(x, last_W) for x in (h_NC, a_NC))
            h_NC, x_NC, _ = residual_rmsnorm_fwd(h_NC, linear_fwd(a_NC, w.o_proj), w.mlp_norm, eps)
            m_NC = linear_fwd(swiglu_fwd(linear_fwd(x_NC, w.gate_up)), w.down_proj)
            h_NC, x_NC, _ = residual_rmsnorm_fwd(h_NC, m_NC, self._norm_after(i), eps)
        return self._logits(x_NC)

    def _attend(self, i, w, x_NC, tables, places):
        """-> (N, H D)"""
        c = self.config
        rows_N, positions_N, edges_E, history_A, rows_A, longest = places
        qkv = linear_fwd(x_NC, w.qkv)
        heads = (c.n_heads, c.n_kv_heads, None, c.norm_eps)
        q, k, v, _ = qk_norm_rope_fwd(qkv, w.q_norm, w.k_norm, *tables, *heads, positions_N)
        k_RGSD, v_RGSD = self.kv_L2RGSD[i, 0], self.kv_L2RGSD[i, 1]
        append_kv(k_RGSD, v_RGSD, k, v, rows_N, positions_N)
        sequences = (edges_E, history_A, rows_A, longest)
        return context_attention(q, k_RGSD, v_RGSD, *sequences, self.scale).reshape(len(q), -1)

    def _norm_after(self, i):
        return self.layers[i + 1].norm if i + 1 < len(self.layers) else self.norm

    # ------------------------------------------------------------------------- decode
    def decode(self, ids_B: Array, lengths_B: Array, rows_B: Array) -> Array:
        """Token ids_B[b] is appended to row rows_B[b], of which lengths_B[b] positions are taken. -> (B, padded V) float32.

        All int32 on the device; none is looked at, so the step can be captured in a CUDA graph. A row of -1 is idle.
        """
        if self._through_gemv(len(ids_B)):
            parts = [slice(i, i + MAX_ROWS) for i in range(0, len(ids_B), MAX_ROWS)]
            logits = [self._decode_gemv(ids_B[p], lengths_B[p], rows_B[p]) for p in parts]
            return logits[0] if len(logits) == 1 else concatenate(logits)
        return self._decode_gemm(ids_B, lengths_B, rows_B)

    def _through_gemv(self, B: int) -> bool:
        if self.device == "cpu":
            return self.batch_invariant
        c = self.config
        fit = all(
            gemv_fits(1, k, self.dtype) for k in (c.dim, c.n_heads * c.head_dim, c.hidden_dim)
        )
        if self.batch_invariant and not fit:
            raise UserError(
                "batch_invariant on a GPU needs dim, heads and hidden_dim that are multiples of 32: use the cpu"
            )
        return fit and (B <= MAX_ROWS or self.batch_invariant)

    def _decode_gemv(self, ids_B, lengths_B, rows_B):
        """Five kernels a layer: norm + QKV; attention; output + residual; norm + gate/up + SwiGLU; down + residual."""
        c, half = self.config, self.dtype
        product = functools.partial(gemv, weights_ready=True)  # no kernel of a step writes weights
        h_BC = embedding_fwd(ids_B, self.table, np.float32)
        for i, w in enumerate(self.layers):
            qkv = product(h_BC, w.qkv, w.norm, c.norm_eps, dtype=half)
            o_BC = self._attend_decode(i, w, qkv, lengths_B, rows_B)
            soon = w.gate_up.reshape(-1)[: AHEAD // w.gate_up.itemsize]
            product(o_BC, w.o_proj, residual_NO=h_BC, out=h_BC, next_w=soon)
            y_BF = product(h_BC, w.gate_up, w.mlp_norm, c.norm_eps, swiglu=True, dtype=half)
            product(y_BF, w.down_proj, residual_NO=h_BC, out=h_BC)
        return product(h_BC, self.head, self.norm, c.norm_eps, dtype=np.float32)

    def _decode_gemm(self, ids_B, lengths_B, rows_B):
        eps = self.config.norm_eps
        h_BC = embedding_fwd(ids_B, self.table, np.float32)
        x_BC, _ = rmsnorm_fwd(h_BC, self.layers[0].norm, eps, self.dtype)
        for i, w in enumerate(self.layers):
            o_BC = self._attend_decode(i, w, linear_fwd(x_BC, w.qkv), lengths_B, rows_B)
            h_BC, x_BC, _ = residual_rmsnorm_fwd(h_BC, linear_fwd(o_BC, w.o_proj), w.mlp_norm, eps)
            m_BC = linear_fwd(swiglu_fwd(linear_fwd(x_BC, w.gate_up)), w.down_proj)
            h_BC, x_BC, _ = residual_rmsnorm_fwd(h_BC, m_BC, self._norm_after(i), eps)
        return self._logits(x_BC)

    def _attend_decode(self, i, w, qkv_BP, lengths_B, rows_B):
        """Called right after the QKV product, which writes neither cache nor lengths: reading them need not wait for it."""
        k_RGSD, v_RGSD = self.kv_L2RGSD[i, 0], self.kv_L2RGSD[i, 1]
        where = (lengths_B, rows_B, self.cos_PR, self.sin_PR)
        norms = (w.q_norm, w.k_norm, self.config.norm_eps)
        return decode_attention(
            qkv_BP, k_RGSD, v_RGSD, *where, *norms, self.scale, True, self.batch_invariant
        )

    def _logits(self, x_NC):
        """(N, C) -> (N, padded V) float32"""
        shape = (len(x_NC), self.head.shape[0])
        return matmul(empty(x_NC, shape, np.float32), x_NC, self.head, trans_b=True)


def take(x_NC: Array, index_W: Array) -> Array:
    """-> x[index] (W, C). A row of a table by number: the embedding's kernel."""
    return embedding_fwd(index_W, x_NC)


def concatenate(parts: list[Array]) -> Array:
    """Rows of several arrays below each other."""
    whole = empty(parts[0], (sum(map(len, parts)), parts[0].shape[1]))
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        whole[start:end] = part
    return whole


def _layer_weights(layer, qk_norm):
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm.weight, attention.k_norm.weight) if qk_norm else ()
    q_norm, k_norm = [w.value for w in norms] or (None, None)
    return LayerWeights(
        layer.input_layernorm.weight.value, attention.qkv.value, q_norm, k_norm,
        attention.o_proj.weight.value, layer.post_attention_layernorm.weight.value,
        mlp.gate_up.value, mlp.down_proj.weight.value,
    )  # fmt: skip
