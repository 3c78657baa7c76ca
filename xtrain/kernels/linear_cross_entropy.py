"""The head and the loss in one op, a few rows at a time.   x: (N, C)   w: (P, C)   targets: (N,)

    forward    logits = x w^T        loss = cross_entropy(logits)        (gemm.py, cross_entropy.py)
    backward   with d = dL/dlogits:  dx = d w        dw = d^T x

The logits are by far the largest array of a small model: with GPT-2's vocabulary they take as much
memory per token as the activations of four layers of width 768. They are never needed as a whole.
The loss and d of a row depend on that row alone, each row of dx on the same row of d, and dw is a
sum over rows. So the rows are processed in chunks: compute the logits, overwrite them with d,
compute dx, add to dw inside the matrix product. The next chunk uses the same memory.

So the forward computes the gradients before the incoming gradient of the loss is known. That
gradient is one factor for all elements: forward computes the gradients for the factor 1, and
backward multiplies them by any other (Hsu et al. 2024, Liger-Kernel). Until then dx, N C elements,
and dw, P C float32, are kept in place of N P logits.

Every chunk reads and writes dw once more, 8 P C bytes, in a product of 2 rows P C operations, and
its product for dx may have fewer tiles than the GPU has multiprocessors. So smaller chunks take
less memory and more time: bench/bench_head.py measures both. The sum of the chunks is float32 also
where dw becomes bf16: rounded after each of k chunks, its error would grow as sqrt(k).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..device import Array
from .cast import cast_fwd
from .cross_entropy import check_targets_on_host, cross_entropy
from .gemm import linear_into, matmul
from .quantize import Quantized, dense
from .runtime.launch import FLOATS, check, check_array, check_ids, dtype_name, empty, on_host

ROWS = 2048
UNIT = 64  # all chunks but the last are a multiple of it


def linear_cross_entropy_ref(x_NC, w_PC, targets_N, vocab_size, inv_count_1):
    """Return loss (N,), dx (N, C), dw (P, C), all rows at once."""
    loss_N, d_NP = cross_entropy(x_NC @ w_PC.T, targets_N, vocab_size, inv_count_1)
    return loss_N, d_NP @ w_PC, d_NP.T @ x_NC


def chunk_rows(N: int, rows: int | None = None) -> int:
    """Return the rows of a chunk: N is divided into equal chunks, as few as possible.

    rows: of a chunk at most; None: ROWS.
    """
    if rows is None:
        rows = ROWS
    even = -(-N // max(-(-N // rows), 1))
    return min(-(-even // UNIT) * UNIT, rows)


def linear_cross_entropy(
    x_NC: Array,
    w_PC: Array | Quantized,
    targets_N: Array,
    vocab_size: int,
    inv_count_1: Array | None,
    want_dx: bool = True,
    want_dw: bool = True,
    rows: int | None = None,
    change_logits: Callable[[Array, slice], None] | None = None,
    loss_of: Callable[[Array, slice, Array, bool], Any] | None = None,
    dw_dtype: Any = None,
) -> tuple[Array, Array | None, Array | None]:
    """Return loss (N,) float32, dx like x, and dw (P, C) in `dw_dtype`, by default float32.

    dx and dw are the gradients of inv_count sum(loss), None if not wanted.

    x, w: (N, C) and (P >= vocab_size, C), both float32 or both bf16; w may be quantized.
    targets: (N,) whole numbers.
    inv_count: (1,), or (N,): one factor per row; may be None if neither gradient is wanted.
    rows: the largest chunk.
    change_logits: called with the logits of a chunk and its rows, changes the logits in place; the
        gradients are then those by the changed logits, times x and w.
    loss_of: in place of cross_entropy, called with the logits of a chunk, its rows, the array of
        their losses, and whether the gradient is wanted, which overwrites the logits.
    dw_dtype: bf16 for bf16 w: the sum of the chunks is rounded once.
    Errors as in cross_entropy.
    """
    op = "linear_cross_entropy"
    check_array(op, "x", x_NC, (None, None), FLOATS)
    N, C = x_NC.shape
    w_PC = dense(w_PC, x_NC.dtype)
    check_array(op, "w", w_PC, (None, C), (dtype_name(x_NC.dtype),))
    P = w_PC.shape[0]
    check(rows is None or rows > 0, f"{op}: {rows} rows at a time, expected at least 1")
    check(targets_N.shape == (N,), f"{op}: targets have shape {targets_N.shape}, expected ({N},)")
    check_ids(op, "targets", targets_N)
    wide = np.float64 if x_NC.dtype == np.float64 else np.float32
    loss_N = empty(x_NC, N, wide)
    dx_NC = empty(x_NC, (N, C)) if want_dx else None
    step = chunk_rows(N, rows)
    sums = wide if dw_dtype is None or step < N else dw_dtype  # one chunk needs no addition
    dw_PC = empty(w_PC, (P, C), sums) if want_dw else None
    if dw_PC is not None and not N:
        dw_PC.fill(0)
    if on_host(x_NC, w_PC, targets_N):
        check_targets_on_host(targets_N, vocab_size)  # here, where rows have the caller's numbers
    want_gradient = want_dx or want_dw
    per_row = getattr(inv_count_1, "shape", None) == (N,)
    logits_RP = empty(x_NC, (min(step, N), P))
    d_RP = logits_RP
    for first in range(0, N, max(step, 1)):
        part = slice(first, min(first + step, N))
        x_RC = x_NC[part]
        d_RP = logits_RP[: part.stop - first]
        linear_into(d_RP, x_RC, w_PC)
        if change_logits is not None:
            change_logits(d_RP, part)
        factors = inv_count_1
        if inv_count_1 is not None and per_row:
            factors = inv_count_1[part]
        if loss_of is not None:
            loss_of(d_RP, part, loss_N[part], want_gradient)
        else:
            cross_entropy(d_RP, targets_N[part], vocab_size, factors, want_gradient, loss_N[part])
        if dx_NC is not None:
            matmul(dx_NC[part], d_RP, w_PC)
        if dw_PC is not None:
            matmul(dw_PC, d_RP, x_RC, trans_a=True, accumulate=first > 0)
    if dw_PC is not None and dw_dtype is not None:
        del logits_RP, d_RP  # their memory is free for the result
        dw_PC = cast_fwd(dw_PC, dw_dtype)
    return loss_N, dx_NC, dw_PC
