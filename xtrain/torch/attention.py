"""Attention as a PyTorch op, and as an attention implementation of transformers.

    xtrain.torch.register_attention()
    AutoModelForCausalLM.from_pretrained(folder, attn_implementation="xtrain")

Padding and several documents in a row
become `starts`: where in the row the document of each token begins.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.attention import flash_attention as _flash
from ..kernels.attention.key_bounds import UNBOUNDED, KeyBounds, document_bounds
from ..kernels.runtime.launch import check
from .ops import autocast, check_shape, new_like, wide
from .register import call, register_op

NAME = "xtrain"  # of the implementation in transformers


def _bounds(first, last, window, S):
    if first is not None:
        return KeyBounds(0, first, last)
    return KeyBounds(window) if 0 != window < S else UNBOUNDED


def _check(q, k, v, causal):
    check_shape("attention", "q", q, (None,) * 4)
    B, T, H, D = q.shape
    check_shape("attention", "k", k, (B, None, None, D))
    check_shape("attention", "v", v, k.shape)
    S, G = k.shape[1:3]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    torch._check_value(
        G > 0 and H % G == 0,
        lambda: f"attention: {H} query heads cannot share {G} key heads: {shapes}",
    )
    if causal:
        torch._check_value(
            S >= T, lambda: f"attention: {T} causal queries need at least {T} keys: {shapes}"
        )


def _fake(q, k, v, first, last, scale, causal, window):
    _check(q, k, v, causal)
    return new_like(q, q.shape), new_like(q, (q.shape[0], q.shape[2], q.shape[1]), wide(q))


def _forward(q, k, v, first, last, scale, causal, window):
    _check(q, k, v, causal)
    return _flash.flash_attention_fwd(
        q, k, v, scale, causal, _bounds(first, last, window, k.shape[1])
    )


def _backward(do, q, k, v, o, lse, first, last, scale, causal, window):
    bounds = _bounds(first, last, window, k.shape[1])
    return _flash.flash_attention_bwd(do, q, k, v, o, lse, scale, causal, bounds=bounds)


_OPTIONS = "Tensor? first, Tensor? last, float scale, bool causal, int window"
_STRIDED = ("q", "k", "v")  # the kernels read parts of packed arrays
_backward_op = register_op(
    f"xtrain::attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _backward,
    strided=_STRIDED,
)
_forward_op = register_op(
    f"xtrain::attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _forward,
    fake=_fake,
    backward=_backward_op,
    strided=_STRIDED,
)


def _document_bounds(starts, window):
    bounds, _ = document_bounds(starts, window)
    return bounds.first_BT, bounds.last_BS


_bounds_op = register_op(
    "xtrain::document_bounds(Tensor starts, int window) -> (Tensor first, Tensor last)",
    _document_bounds,
    fake=lambda starts, window: (new_like(starts, starts.shape), new_like(starts, starts.shape)),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    cu_seqlens: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale q k^T) v for q (B, T, H, D) and k, v (B, S, G, D), like q.

    H is a multiple of G (grouped-query attention). bf16 with D = 16, 32, 64, 128 or 256, or float32
    with D up to 256 (slower); positions may be further apart than H D elements.
    causal: query t sees the keys up to t + S - T; S >= T.
    scale: of the scores; None: 1 / sqrt(D).
    window: a query sees this many keys at most, itself among them; 0: all. Causal only.
    cu_seqlens: (n + 1,) integers, where the documents of the only row begin, and its end: B = 1.
    starts: (B, T) int32, where in the row the document of each token begins; T = S. Give one of the
        two; the values of both are checked on the CPU only.
    Memory grows with T, not with T^2; the same input gives the same bits. Under autocast q, k and v
    are converted.
    """
    q, k, v = autocast(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if cu_seqlens is not None:
        check(starts is None, "attention: give cu_seqlens or starts, not both")
        if not isinstance(cu_seqlens, Tensor):
            kind = type(cu_seqlens).__name__
            raise TypeError(f"attention: cu_seqlens is a {kind}, expected a tensor of integers")
        starts = starts_of(cu_seqlens, q)
    if not causal and (window or starts is not None):
        raise ValueError("attention: a window or documents need causal=True")
    first = last = None
    if starts is not None:
        first, last = call(_bounds_op, starts, window)
        window = 0
    return call(_forward_op, q, k, v, first, last, scale, causal, window)[0]


def starts_of(cu_seqlens: Tensor, q: Tensor) -> Tensor:
    """Return `starts` (1, T) of attention for its cu_seqlens.

    Raises ValueError for several rows, and if cu_seqlens is not what attention expects.
    """
    T = q.shape[1]
    if q.shape[0] != 1:
        raise ValueError(
            f"attention: cu_seqlens describes one row, and q has {q.shape[0]}: give starts (B, T)"
        )
    vector = cu_seqlens.dim() == 1 and len(cu_seqlens) > 0
    if not vector or cu_seqlens.is_floating_point():
        raise ValueError(
            f"attention: cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, "
            "expected integers (n + 1,)"
        )
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        check(
            ends[0] == 0 and ends == sorted(ends) and ends[-1] <= T,
            f"attention: cu_seqlens must begin with 0, not decrease, and not exceed {T}",
        )
    positions = torch.arange(T, device=q.device)
    document = torch.searchsorted(cu_seqlens.to(q.device, torch.int64), positions, right=True) - 1
    return cu_seqlens.to(q.device)[document].int()[None]


# ----------------------------------------------------------------------------- transformers
def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a transformers module -> (B, T, H, D), None.

    query: (B, H, T, D), key, value: (B, G, S, D). attention_mask: what transformers_mask returned.
    position_ids: each document of a row begins with position 0.
    Raises ValueError for dropout, and for masks and options that the kernels do not have.
    """
    unsupported = [
        name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None
    ]
    if dropout:
        unsupported.append(f"dropout {dropout}")
    if attention_mask is not None and attention_mask.dim() != 2:
        unsupported.append(f"a mask with {attention_mask.dim()} axes")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal and (attention_mask is not None or sliding_window):
        unsupported.append("padding or a window without a causal mask")
    if unsupported:
        raise _unsupported(", ".join(unsupported))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    starts = attention_mask
    if cu_seq_lens_q is not None:
        starts = starts_of(cu_seq_lens_q, q)
    elif is_causal and position_ids is not None and q.shape[1] == k.shape[1] > 1:
        documents = starts_of_positions(position_ids)
        if documents is not None:
            documents = documents.expand(q.shape[:2])
            starts = documents if starts is None else torch.maximum(starts, documents)
    if starts is not None:
        starts = starts.contiguous()
    o = attention(q, k, v, is_causal, scaling, sliding_window or 0, starts=starts)
    return o, None


def _unsupported(what: str) -> ValueError:
    return ValueError(f"attn_implementation='{NAME}' does not support {what}: choose sdpa")


def starts_of_positions(position_ids: Tensor) -> Tensor | None:
    """Return where the document of each token begins, (B, T) int32, for positions (B, T).

    A document begins where positions do not count on, as in transformers. None if every row is one
    document. This looks at the values, once per tensor: all layers get the same. While
    torch.compile traces, it cannot look, and documents are always assumed.
    """
    if torch.compiler.is_compiling():
        return _starts_of_documents(position_ids)
    counted = not position_ids.is_inference()  # of other tensors, torch counts the changes
    known = getattr(position_ids, "_xtrain_starts", None)
    if known is not None and counted and known[0] == position_ids._version:
        return known[1]
    starts = _starts_of_documents(position_ids)
    found = starts if bool(starts.any()) else None
    if counted:
        position_ids._xtrain_starts = position_ids._version, found  # type: ignore[attr-defined]
    return found


def _starts_of_documents(position_ids):
    indices = torch.arange(position_ids.shape[-1], device=position_ids.device)
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1)
    return torch.where(steps != 1, indices, 0).cummax(1).values.int()


def transformers_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    **options: Any,
) -> Tensor | None:
    """Return `starts` (B, T) for a mask of padding (B, S), True for tokens; None without padding.

    The first query has the position q_offset, the first key kv_offset. The padding of a row counts
    as a document. Raises ValueError for padding inside a sequence, and next to a KV cache, and for
    a mask that is more than causal, a window and padding.
    """
    if "allow_is_bidirectional_skip" not in options:  # else every query sees every key
        if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
            raise _unsupported("a static KV cache")
        _check_causal(batch_size, q_length, q_offset, kv_offset + kv_length, **options)
    if attention_mask is None:
        return None
    mask = attention_mask.bool()[:, kv_offset:]
    compiling = torch.compiler.is_compiling()
    if not compiling and bool(mask.all()) and mask.shape[1] == kv_length:
        return None
    if q_length != kv_length or mask.shape[1] != kv_length:
        raise ValueError(
            f"attn_implementation='{NAME}' does not support padding next to a KV cache: "
            "generate with sdpa, or one sequence at a time"
        )
    begins = torch.zeros_like(mask)
    begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    if not compiling and bool((begins.sum(1) > 2).any() | (mask[:, 0] & (begins.sum(1) > 1)).any()):
        raise _unsupported("padding inside a sequence")
    positions = torch.arange(kv_length, device=mask.device).expand(batch_size, kv_length)
    return torch.where(begins, positions, 0).cummax(1).values.int()


def _check_causal(
    batch_size: int,
    q_length: int,
    first: int,
    length: int,
    mask_function: Callable | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    device: Any = None,
    **options: Any,
) -> None:
    """Raise ValueError if a mask of transformers is not causal, or more than that and a window.

    first: position of the first query, length: of all keys, the others as transformers gives them:
    with allow_is_causal_skip there is nothing special. While torch.compile traces, it cannot look.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk == local_size and length > chunk:
        raise _unsupported("attention in chunks")
    special = use_vmap
    looks = not (allow_is_causal_skip or use_vmap or torch.compiler.is_compiling())
    if looks and mask_function is not None:
        rows = torch.arange(batch_size, device=device)[:, None]
        t = torch.arange(first, first + q_length - 1, device=device)
        special = bool(mask_function(rows, 0, t, t + 1).any())  # do queries see the next key?
    if special:
        raise _unsupported("a mask in which tokens see later ones")


def register_attention() -> None:
    """Make attn_implementation="xtrain" known to transformers. `apply` does this, too."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, transformers_attention)
    AttentionMaskInterface.register(NAME, transformers_mask)
