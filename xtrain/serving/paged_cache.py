"""The KV cache on the device, and how a forward pass reads and writes it.

A layer has two arrays, k and v (R, G, S, D): R blocks of S tokens (serving/blocks.py says which
block belongs to which sequence). Position p of a sequence is in block table[p // S], at offset p %
S. The kernels read the tables on the device, so memory is given out block by block, and a block may
belong to several sequences.

The model gets a CachedSequences in place of the Sequences of nn/sequences.py. Everything but
attention is the same as in training. In attention, prefill appends the new keys and values and
reads the whole sequence from the cache (kernels/attention/context_attention.py). Decoding, one new
token per sequence, does all of that and RoPE in one kernel (decode_attention.py). In
batch-invariant mode both have the bits of training; where decoding has no such kernel, it computes
as prefill.

With kv_cache "fp8" the arrays are codes with scales (kernels/decoding/kv_codes.py). Decoding reads
them, prefill reads a copy of the blocks of its sequences, in the dtype of the model, one layer
after the other.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..config import ModelConfig
from ..device import Array, cupy, free_cached, to_device, to_numpy
from ..errors import UserError
from ..kernels.attention.context_attention import context_attention
from ..kernels.attention.decode_attention import CODE_WIDTHS, decode_attention, fits_exactly
from ..kernels.decoding.kv_cache import append_kv, empty_kv_cache, kv_cache_bytes
from ..kernels.decoding.kv_codes import (
    append_codes,
    dequantize_blocks,
    empty_kv_codes,
    kv_codes_bytes,
)
from ..kernels.decoding.padding import token_positions
from ..kernels.embedding import embedding_fwd
from ..kernels.primitives.tiles import WIDTHS
from ..kernels.rope import rope_frequencies, rope_tables
from ..kernels.runtime.invariance import is_batch_invariant
from ..kernels.runtime.launch import empty, zeros
from ..machine import free_memory
from ..nn.autograd import inference
from ..nn.model import Transformer
from ..nn.sequences import RotaryTables, Sequences, local_rope
from ..nn.tensor import Tensor
from ..nn.variation import overrides
from .prefill_rows import DeviceRows

KINDS = ("full", "fp8")  # of the cache
HOST_SHARE = 0.9  # of the memory that is free on a CPU; activations need the rest
COPIED_BYTES = 256 << 20  # that blocks have which are copied at once: the copy is in memory twice


@dataclass(frozen=True)
class Heads:
    """What one attention stores per token: keys and values of G heads of D channels."""

    G: int
    D: int


class Layer(NamedTuple):
    """What one attention reads and writes: k, v (R, G, S, D), and if they are codes, their scales
    (R, G, S, 2)."""

    k: Array
    v: Array
    scales: Array | None


class PagedCache:
    """Keys and values of every attention of a model, in blocks of S tokens.

    capacity: tokens of the longest sequence.
    kind: "full", in the dtype of the model's products, or "fp8".
    heads: per attention, in the order in which a forward pass calls them.
    block_bytes: of one block, all attentions together.  `allocate` makes the arrays.
    Raises UserError if no kernel supports the model's head width or dtype, or if its RoPE is not
    that of a config.
    """

    def __init__(self, model: Transformer, capacity: int, S: int, kind: str = "full"):
        self.model = model
        self.capacity = capacity
        self.S = S
        self.kind = kind
        self.dtype = model.branch_dtype or np.dtype(np.float32)
        c = model.config
        self.heads = [Heads(c.n_kv_heads, c.head_dim)] * len(model.model.layers)
        if model.variation:
            self.heads = _observed_heads(model)
        if not self.heads:
            raise UserError(
                "the engine cannot serve this model, none of whose layers has keys and values to "
                "cache: let an attention call `attend` or `attention` of its sequences"
            )
        if kind not in KINDS:
            raise UserError(f"kv_cache {kind!r} is not known: choose {', '.join(KINDS)}")
        self._check_kernels()
        if type(model.rotary) is not RotaryTables or overrides(model, Transformer, "sequences"):
            raise UserError(
                "the engine computes the angles of RoPE itself, from model.rotary.config, so it "
                "cannot serve a model with `sequences` or `rotary` of another class: change "
                "`attend` of the attentions instead"
            )
        in_full = [kv_cache_bytes(1, 1, h.G, S, h.D, self.dtype) for h in self.heads]
        if kind == "full":
            self.block_bytes = sum(in_full)
        else:  # the codes, and the copy that prefill reads
            codes = [kv_codes_bytes(1, 1, h.G, S, h.D) for h in self.heads]
            self.block_bytes = sum(codes) + max(in_full)
        self.tables = self._position_tables()
        self.local_tables = None  # of the layers with a window
        if model.rotary.config.local_rope_theta:
            positions = len(self.tables[0])
            self.local_tables = self._tables_for(
                positions, positions, local_rope(model.rotary.config)
            )
        # whether one kernel decodes with the bits of training
        token = [empty(self.tables[0], (1, h.D), self.dtype) for h in self.heads]
        self.decodes_exactly = all(fits_exactly(x, x.shape[1]) for x in token)
        self.n_blocks = 0

    def _check_kernels(self) -> None:
        """Raise UserError if a GPU has no kernel for the model's heads."""
        if self.model.device == "cpu":
            return
        codes = self.kind == "fp8"
        if codes and self.model.branch_dtype is None:
            raise UserError(
                "on a GPU kv_cache 'fp8' needs a model in bf16: load it with precision bf16"
            )
        supported = CODE_WIDTHS if codes else WIDTHS
        what = "kv_cache 'fp8'" if codes else "the engine"
        widths = sorted({h.D for h in self.heads} - set(supported))
        if widths:
            raise UserError(
                f"on a GPU {what} supports heads of {', '.join(map(str, supported))} channels, "
                f"this model has {widths[0]}: use the CPU"
            )

    def allocate(self, n_blocks: int) -> None:
        """Make the arrays. Raises UserError if there is not enough memory."""
        # One array (L, ..., R, G, S, ...) for attentions with the same heads: one operation copies
        # a block of all layers.
        same = len(set(self.heads)) == 1
        groups = [(self.heads[0], len(self.heads))] if same else [(h, 1) for h in self.heads]
        like = self.tables[0]
        self.layers = []
        self.arrays = []
        self.copies = []
        try:
            for h, L in groups:
                sizes = like, L, n_blocks, h.G, self.S, h.D
                if self.kind == "full":
                    kv = empty_kv_cache(*sizes, self.dtype)
                    scales = [None] * L
                    self.arrays.append(kv)
                else:
                    kv, scales = empty_kv_codes(*sizes)
                    self.arrays += [kv, scales[:, None]]
                self.layers += [Layer(k, v, scale) for (k, v), scale in zip(kv, scales)]
            if self.kind != "full":
                size = n_blocks * self.S * max(h.G * h.D for h in self.heads)
                self.copies = [zeros(like, size, self.dtype) for _ in range(2)]
                # for decoding in batch-invariant mode, where only the device knows which blocks are
                # used
                self.all_blocks = to_device(np.arange(n_blocks, dtype=np.int32), self.model.device)
        except Exception as error:
            text = f"{type(error).__name__} {error}".lower()
            # NumPy says "too big" for more than 2^63 bytes.
            if "memory" not in text and "too big" not in text:
                raise
            gb = n_blocks * self.block_bytes / 1e9
            raise UserError(
                f"there is not enough memory for a KV cache of {gb:.2f} GB ({n_blocks} blocks of "
                f"{self.S} tokens): give it less (gpu_memory, cache_bytes), or choose a smaller "
                "max_batch or max_seq_len"
            ) from None
        self.n_blocks = n_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.n_blocks * self.block_bytes

    def copy_blocks(self, to: list[int], source: list[int], tokens: int) -> None:
        """Copy the first tokens that blocks hold, in all layers: from source[i] to to[i], which are
        distinct blocks."""
        step = max(1, COPIED_BYTES // self.block_bytes)
        for low in range(0, len(to), step):
            some, others = to[low : low + step], source[low : low + step]
            for array in self.arrays:
                bits = array.view(f"u{array.dtype.itemsize}")  # CuPy's indexing may not have bf16
                bits[:, :, some, :, :tokens] = bits[:, :, others, :, :tokens]

    # -------------------------------------------------------------- what attention reads and writes
    def append(self, layer: Layer, k_NGD: Array, v_NGD: Array, blocks_N: Array, offsets_N: Array):
        """Write keys and values of N tokens."""
        if layer.scales is None:
            append_kv(layer.k, layer.v, k_NGD, v_NGD, blocks_N, offsets_N)
        else:
            append_codes(*layer, k_NGD, v_NGD, blocks_N, offsets_N)

    def read(self, layer: Layer, blocks_U: Array | None) -> tuple[Array, Array]:
        """Return k, v (R, G, S, D) in the model's dtype, of which these blocks (None: all) are
        valid until the next call."""
        if layer.scales is None:
            return layer.k, layer.v
        k, v = (x[: layer.k.size].reshape(layer.k.shape) for x in self.copies)
        dequantize_blocks(*layer, self.all_blocks if blocks_U is None else blocks_U, k, v)
        return k, v

    # ------------------------------------------------------------------------- positions
    def _position_tables(self) -> tuple[Array, Array]:
        """Return cos and sin of every position of a sequence, float32 (P, D/2) each, P >= capacity
        and a multiple of S.

        With dynamic scaling, a position p beyond the trained length has the angles of a sequence
        that ends at p, and keeps them when the sequence grows. transformers does the same: its
        cache holds keys that are rotated already.
        """
        c = self.model.rotary.config
        P = -(-self.capacity // self.S) * self.S
        if c.rope_type != "dynamic":
            return self._tables_for(P, P)
        tables = self._tables_for(min(P, c.max_seq_len), min(P, c.max_seq_len))
        angles = [
            p * rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, p + 1, c.max_seq_len)
            for p in range(c.max_seq_len, P)
        ]
        if not angles:
            return tables
        beyond = (
            to_device(f(np.stack(angles)).astype(np.float32), self.model.device)
            for f in (np.cos, np.sin)
        )
        cos, sin = (_join(*pair) for pair in zip(tables, beyond))
        return cos, sin

    def _tables_for(
        self, positions: int, seq_len: int, config: ModelConfig | None = None
    ) -> tuple[Array, Array]:
        c = config or self.model.rotary.config
        tables = rope_tables(
            c.head_dim, positions, c.rope_theta, c.rope_scaling, seq_len, c.max_seq_len
        )
        cos, sin = (to_device(x, self.model.device) for x in tables)
        return cos, sin

    @property
    def trained_length(self) -> int | None:
        """Return the length of the longest prompt with the usual RoPE angles, if there is a limit.

        With dynamic scaling, a longer prompt has angles of its own.
        """
        c = self.model.rotary.config
        if c.rope_type != "dynamic":
            return None
        return c.max_seq_len

    # ------------------------------------------------------------------------- forward passes
    def prefill(self, rows: DeviceRows, longest: int, prompt_length: int = 0) -> "CachedSequences":
        """Return the sequences of a pass over several tokens each (prefill_rows.py).

        longest: tokens of the longest one, at most.
        prompt_length: tokens of the whole prompt, for dynamic scaling; tokens after it, which were
        generated before a preemption, have the angles of decoding. A prompt beyond the trained
        length must be the only sequence.
        """
        position_tables = self.tables
        trained = self.trained_length
        if trained is not None and prompt_length > trained:
            stretched = self._tables_for(prompt_length, prompt_length)
            cos, sin = (_join(a, b[prompt_length:]) for a, b in zip(stretched, self.tables))
            position_tables = cos, sin
        N = len(rows.ids_N)
        places = token_positions(rows.edges_E, N, rows.history_A, rows.tables_AM, self.S)
        return self._sequences(
            B=len(rows.history_A),
            T=longest,
            position_tables=position_tables,
            places=places,
            edges_E=rows.edges_E,
            history_A=rows.history_A,
            tables_AM=rows.tables_AM,
            wanted_W=rows.wanted_W,
            one=False,
            blocks_U=rows.blocks_U,
        )

    def decode(
        self,
        lengths_B: Array,
        tables_BM: Array,
        edges_E: Array,
        previous_B: Array | None = None,
    ) -> "CachedSequences":
        """Return B sequences with one new token each.

        lengths: tokens in the cache; below 0: an idle entry.
        edges: (B + 1,): 0, 1, 2, ...
        previous: the entry of the token before, if entries are successive tokens of one sequence,
        each with a length of its own; -1: that token is in the cache. None: all are.

        All arrays are int32 on the device. The host does not read them, so a CUDA graph can capture
        the step.
        """
        B = len(lengths_B)
        places = None
        if is_batch_invariant() and not self.decodes_exactly:  # once for all layers
            places = token_positions(edges_E, B, lengths_B, tables_BM, self.S)
        return self._sequences(
            B=B,
            T=1,
            position_tables=self.tables,
            places=places,
            edges_E=edges_E,
            history_A=lengths_B,
            tables_AM=tables_BM,
            wanted_W=None,
            one=True,
            previous_B=previous_B,
            blocks_U=None,
        )

    def _sequences(self, position_tables: tuple[Array, Array], **fields: Any) -> "CachedSequences":
        cos_PR, sin_PR = position_tables
        return CachedSequences(
            cos_PR=cos_PR,
            sin_PR=sin_PR,
            dtype=self.model.branch_dtype,
            recompute="none",
            local=self.local_tables,
            cache=self,
            calls=itertools.count(),
            **fields,
        )


@dataclass(frozen=True)
class CachedSequences(Sequences):
    """B sequences, of at most T new tokens each, whose earlier tokens are in the cache.

    places: block, offset in it, and position of each row, int32 (N,) each; None: computed when
        needed.
    edges, history, tables: see kernels/decoding/padding.py.
    wanted: rows whose logits are needed; None: all.
    one: every sequence has exactly one new token.
    previous: see PagedCache.decode.
    blocks: all that the tables name, each once, if the cache has codes.
    cache: a PagedCache.
    calls: counts the attentions of the forward pass; all copies of this object share it.
    """

    places: tuple[Array, Array, Array] | None
    edges_E: Array
    history_A: Array
    tables_AM: Array
    wanted_W: Array | None
    one: bool
    blocks_U: Array | None
    cache: Any
    calls: Iterator[int]
    previous_B: Array | None = None

    def _placed(self):
        if self.places is not None:
            return self.places
        return token_positions(self.edges_E, self.B, self.history_A, self.tables_AM, self.cache.S)

    @property
    def positions_N(self) -> Array:
        return self._placed()[2]

    def attend(self, qkv_NP, q_w_D, k_w_D, H, G, eps, scale):
        if not self.one or (is_batch_invariant() and not self.cache.decodes_exactly):
            return super().attend(qkv_NP, q_w_D, k_w_D, H, G, eps, scale)
        layer = self.cache.layers[next(self.calls)]
        norms = (None, None) if q_w_D is None else (q_w_D.value, k_w_D.value)
        # The launch before is the QKV product: it writes neither cache nor lengths, so both may be
        # read before it has ended.
        return Tensor(
            decode_attention(
                qkv_NP.data,
                layer.k,
                layer.v,
                self.history_A,
                self.tables_AM,
                self.cos_PR,
                self.sin_PR,
                *norms,
                eps,
                scale,
                True,
                self.window,
                layer.scales,
                self.previous_B,
            ),
        )

    def attention(self, q_NHD, k_NGD, v_NGD, scale):
        layer = self.cache.layers[next(self.calls)]
        blocks_N, offsets_N, _ = self._placed()
        self.cache.append(layer, k_NGD.data, v_NGD.data, blocks_N, offsets_N)
        k_RGSD, v_RGSD = self.cache.read(layer, self.blocks_U)
        tables = self.edges_E, self.history_A, self.tables_AM
        o_NHD = context_attention(q_NHD.data, k_RGSD, v_RGSD, *tables, self.T, scale, self.window)
        return Tensor(o_NHD.reshape(len(o_NHD), -1))

    def wanted_rows(self, x_NC):
        if self.wanted_W is None:
            return x_NC
        return Tensor(embedding_fwd(self.wanted_W, x_NC.data))  # the rows with these indices


@dataclass(frozen=True)
class _Observer(Sequences):
    """Notes the heads of every attention that a forward pass calls, and keeps rows apart: the
    result of attention is its query."""

    heads: list[Heads]

    def attention(self, q_NHD, k_NGD, v_NGD, scale):
        self.heads.append(Heads(*k_NGD.shape[1:]))
        return q_NHD.reshape(len(q_NHD.data), -1)


def _observed_heads(model: Transformer) -> list[Heads]:
    """Return the heads of every attention of a model with changed layers, in the order of a forward
    pass.

    Raises UserError if a row depends on the token before it other than through these attentions:
    such a layer would not find that token in the KV cache.
    """
    last_rows = []
    for first_token in (0, 1):
        heads: list[Heads] = []
        ids = to_device(np.array([first_token, 0], np.int32), model.device)
        sequences = _Observer(1, 2, *model.rotary(2), model.branch_dtype, "none", heads)
        with inference():
            hidden_NC = model.hidden(ids, sequences)
        last_rows.append(to_numpy(hidden_NC.data)[-1].astype(np.float32))
    # products round a row differently if an expert computes it alone, or with others
    rounding = 1e-4 if hidden_NC.dtype == np.float32 else 0.02
    largest = float(np.abs(last_rows[0]).max())
    cached, plain = last_rows
    if not np.allclose(cached, plain, rtol=0, atol=rounding * largest, equal_nan=True):
        raise UserError(
            "the engine cannot serve this model, one of whose layers reads other tokens without "
            "the KV cache: let it call `attend` or `attention` of its sequences"
        )
    return heads


def affordable_blocks(
    device: str, block_bytes: int, n_blocks: int, gpu_memory: float, cache_bytes: int | None
) -> int:
    """Return how many blocks there may be, at most n_blocks: see the options of the same names
    (options.py). On a CPU the free memory limits them, because Linux grants more than it has."""
    limits = [] if cache_bytes is None else [cache_bytes]
    if device == "gpu":
        free_cached("gpu")
        free, total = cupy().cuda.runtime.memGetInfo()
        limits.append(int(gpu_memory * total) - (total - free))
    elif (free := free_memory()) is not None:
        limits.append(int(HOST_SHARE * free))
    return min([n_blocks, *(max(limit, 0) // block_bytes for limit in limits)])


def check_room(cache: PagedCache, n_blocks: int) -> None:
    """Raise UserError if so many blocks cannot hold one sequence."""
    tokens = n_blocks * cache.S
    if tokens < cache.capacity:
        options = ""
        if cache.model.device == "gpu":
            options = " (gpu_memory, cache_bytes)"
        raise UserError(
            f"the KV cache would have room for {tokens} tokens, one sequence may have "
            f"{cache.capacity}: choose a smaller max_seq_len, or give it more memory{options}"
        )


def _join(a: Array, b: Array) -> Array:
    """Join (n, R) and (m, R) to (n + m, R)."""
    joined = empty(a, (len(a) + len(b), a.shape[1]))
    joined[: len(a)], joined[len(a) :] = a, b
    return joined
