"""How the rows of a forward pass divide into sequences, and what attention reads.

    training   B sequences of T tokens: row n is position n % T of sequence n // T, and attends to
               the rows of its sequence
    packed     the same, but a sequence holds several documents: attention stays in the document,
               positions count from its start
    serving    rows of any sequences at any positions, whose earlier keys and values are in a KV
               cache (serving/paged_cache.py)

The model passes one such object to every block, and only attention uses it: one forward for all.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ..config import ModelConfig
from ..device import Array, is_gpu, to_device
from ..kernels.attention.key_bounds import UNBOUNDED, KeyBounds, document_bounds
from ..kernels.rope import rope_tables
from ..kernels.runtime.launch import zeros
from . import functional as F
from .tensor import Tensor


class RotaryTables:
    """cos and sin of every position, (positions, D/2) float32, computed once, on the device.

    Calling it with a sequence length gives tables of at least that many positions.
    """

    def __init__(self, config: ModelConfig, device: str):
        self.config, self.device = config, device
        self.tables: dict[int, tuple[Array, Array]] = {}
        self.local: RotaryTables | None = None  # of the layers with a window
        if config.local_rope_theta:
            self.local = RotaryTables(local_rope(config), device)

    def __call__(self, T: int) -> tuple[Array, Array]:
        c = self.config
        P = max(T, c.max_seq_len)
        if c.max_seq_len < T and c.rope_type != "dynamic":  # there the angles depend on T
            P = c.context
        pair = self.tables.get(P)
        if pair is None:
            for longer in [n for n in list(self.tables) if n > c.max_seq_len]:
                self.tables.pop(longer, None)  # generate would keep one for every length
            tables = rope_tables(
                c.head_dim, P, c.rope_theta, c.rope_scaling, seq_len=P, max_seq_len=c.max_seq_len
            )
            cos, sin = (to_device(t, self.device) for t in tables)
            pair = self.tables[P] = cos, sin
        return pair  # not self.tables[P]: another thread may have removed it


def local_rope(config: ModelConfig) -> ModelConfig:
    """Return a config with the RoPE of the layers with a window: another base, no scaling."""
    return replace(
        config,
        rope_theta=config.local_rope_theta,
        rope_scaling=None,
        local_rope_theta=0.0,
        max_seq_len=config.context,
    )


_unrotated: dict = {}  # (type, GPU, shape) -> tables; kept, because CUDA graphs use their address


def _unrotated_tables(like_PR: Array) -> tuple[Array, Array]:
    key = type(like_PR), like_PR.device.id if is_gpu(like_PR) else None, like_PR.shape
    if key not in _unrotated:
        cos_PR, sin_PR = (zeros(like_PR, like_PR.shape) for _ in range(2))
        cos_PR.fill(1)
        _unrotated.setdefault(key, (cos_PR, sin_PR))
    return _unrotated[key]


@dataclass(frozen=True)
class Sequences:
    """B sequences of T tokens, as in training.

    cos, sin: (P, D/2), of every position. `dataclasses.replace` gives an attention other tables.
    dtype: of everything but the residual stream; None: the same.
    recompute: what backward recomputes, see Transformer.
    window: keys that a query sees, itself among them; 0: all.
    local: cos and sin of layers with a window; None: the same.
    """

    B: int
    T: int
    cos_PR: Array
    sin_PR: Array
    dtype: Any
    recompute: str
    window: int = field(default=0, kw_only=True)
    local: tuple[Array, Array] | None = field(default=None, kw_only=True)

    @property
    def positions_N(self) -> Array | None:
        """Return the position of each row, int32; None: row n is position n % T."""
        return None

    def attend(
        self,
        qkv_NP: Tensor,
        q_w_D: Tensor | None,
        k_w_D: Tensor | None,
        H: int,
        G: int,
        eps: float,
        scale: float,
    ) -> Tensor:
        """Compute QK-norm if there are weights, RoPE and causal attention.

        Packed (N, (H + 2G) D) -> (N, H D).
        """
        tables = self.cos_PR, self.sin_PR, H, G, self.T, eps, self.positions_N
        q_NHD, k_NGD, v_NGD = F.qk_norm_rope(qkv_NP, q_w_D, k_w_D, *tables)
        return self.attention(q_NHD, k_NGD, v_NGD, scale)

    def split_heads(self, qkv_NP: Tensor, H: int, G: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (N, H, D), k and v (N, G, D), as they are, of packed (N, (H + 2G) D).

        RoPE by angles of 0 does it.
        """
        cos_1R, sin_1R = (zeros(x, (1, x.shape[1])) for x in (self.cos_PR, self.sin_PR))
        cos_1R.fill(1)
        return F.qk_norm_rope(qkv_NP, None, None, cos_1R, sin_1R, H, G, 1, 0.0, None)

    def unrotated(self) -> "Sequences":
        """Return the same sequences for a layer without RoPE: all angles are 0."""
        cos, sin = _unrotated_tables(self.cos_PR)
        return replace(self, cos_PR=cos, sin_PR=sin)

    def windowed(self, window: int) -> "Sequences":
        """Return the same sequences for a layer with a sliding window."""
        cos_PR, sin_PR = self.local or (self.cos_PR, self.sin_PR)
        return replace(self, window=window, cos_PR=cos_PR, sin_PR=sin_PR)

    def rope(self, x_NHD: Tensor) -> Tensor:
        """Rotate each row to its position."""
        return F.rope(x_NHD, self.cos_PR, self.sin_PR, self.positions_N, self.T)

    def attention(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, scale: float) -> Tensor:
        """Return softmax(scale q k^T) v over the keys of the row's sequence up to its position.

        q (N, H, D), k and v (N, G, D) of each row -> (N, H D). Query heads share key heads.
        """
        q_BTHD, k_BTGD, v_BTGD = (
            x.reshape(self.B, self.T, *x.shape[1:]) for x in (q_NHD, k_NGD, v_NGD)
        )
        o_BTHD = F.attention(q_BTHD, k_BTGD, v_BTGD, scale, True, self.key_bounds())
        return o_BTHD.reshape(q_NHD.shape[0], -1)

    def key_bounds(self) -> KeyBounds:
        """Return the keys that each query sees."""
        if 0 < self.window < self.T:
            return KeyBounds(self.window)
        return UNBOUNDED

    def wanted_rows(self, x_NC: Tensor) -> Tensor:
        """Return the rows whose logits are wanted: here all."""
        return x_NC


@dataclass(frozen=True)
class PackedSequences(Sequences):
    """B rows of T tokens that hold several documents each.

    starts: (B, T) int32, the column at which the document of each token begins (document_bounds).
    """

    starts_BT: Array = field(kw_only=True)
    # window -> bounds, positions: the layers share them
    bounds_of: dict[int, tuple[KeyBounds, Array]] = field(default_factory=dict, kw_only=True)

    def _bounds(self, window: int) -> tuple[KeyBounds, Array]:
        if window not in self.bounds_of:
            self.bounds_of[window] = document_bounds(self.starts_BT, window)
        return self.bounds_of[window]

    @property
    def positions_N(self) -> Array:
        """Return the position of each row in its document, int32."""
        return self._bounds(0)[1]

    def key_bounds(self) -> KeyBounds:
        """Return the keys of the query's document, with a window the last of them."""
        return self._bounds(self.window if self.window < self.T else 0)[0]
