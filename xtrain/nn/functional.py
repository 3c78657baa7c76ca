"""The ops of Tensors: what the rest of xtrain and your own code call.

Each applies one Function of functions.py. Four are computed when their result is first read, often as
a part of the op that reads it (deferred.py): linear and rmsnorm in the blocks of a model, swiglu, and
logits.

    Tensor   an argument that may have a gradient: float32 or bf16, on NumPy arrays also float64
    Array    one that has none: ids, targets, tables; on the device of the Tensors

Every op raises ValueError for shapes that do not match and TypeError for such dtypes, and its message
has them. Results have the dtype of the first argument unless it says otherwise. Sums and statistics
are float32. The maths, its sources and the bytes moved are in the file of kernels/ that is named.

Array names end in their shape: N rows (tokens), C width, I/O in and out features, H query heads,
G key/value heads, D head width, F MLP width, V vocabulary, P columns with padding, or positions of a
table.
"""

from numpy.typing import DTypeLike

from ..device import Array
from ..kernels.attention.key_bounds import UNBOUNDED, KeyBounds
from . import fp8 as _fp8
from .deferred import Deferred, Gated, Logits, Stream, linear_of, matching
from .functions import (
    Add,
    Attention,
    Cast,
    CastGradient,
    CausalSoftmax,
    CrossEntropy,
    Embedding,
    LinearCrossEntropy,
    LinearLogprobs,
    LoraLinear,
    Narrow,
    QKNormRope,
    Reshape,
    RMSNorm,
    Rope,
    Scale,
    SiLU,
    SwapHeads,
    WithGradient,
)
from .functions import Linear as Linear  # linear and swiglu apply these where nothing is fused
from .functions import SwiGLU as SwiGLU
from .tensor import Tensor, ops


def embedding(ids_N: Array, w_VC: Tensor) -> Tensor:
    """The rows w[ids] of a table: ids (N,) of any integer dtype, w (V, C) -> (N, C) float32.

    An id outside [0, V) raises ValueError on the CPU; on a GPU its row is NaN. Sources: kernels/embedding.py.
    """
    return Embedding.apply(ids_N, w_VC)


def linear(
    x_NI: Tensor, w_OI: Tensor, dtype: DTypeLike | None = None, b_O: Tensor | None = None
) -> Tensor:
    """y = x w^T + b: x (N, I), w (O, I), b (O,) or None -> (N, O) in `dtype`. See kernels/gemm.py.

    dtype: None: that of w. With bf16 operands it may be np.float32: sums are float32, and y is then
        not rounded.
    x and w have one dtype; only a float32 x is cast if w is bf16.
    In fp8 training the product is one of fp8 codes (nn/fp8.py).
    """
    if isinstance(x_NI, Deferred) and dtype is None:
        return x_NI.linear(w_OI, b_O)
    return linear_of(x_NI, w_OI, dtype, b_O)


def lora_linear(
    x_NI: Tensor,
    w_OI: Tensor,
    a_AI: Tensor,
    b_Br: Tensor,
    slices: list[tuple[int, int]],
    factor: float,
    bias_O: Tensor | None = None,
) -> Tensor:
    """linear(x, w, bias), to which adapters of rank r are added (LoRA, Hu et al. 2021; nn/lora.py).

    slices: (first row, number of rows) of the n matrices in w that have an adapter. The i-th adds factor (x a_i^T) b_i^T to its
    columns of y. a (n r, I), b (sum of the numbers of rows, r): those of all slices, one below the other.
    """
    return LoraLinear.apply(matching(x_NI, w_OI), w_OI, a_AI, b_Br, slices, factor, bias_O)


def rmsnorm(x_NC: Tensor, w_C: Tensor, eps: float, dtype: DTypeLike | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) w of each row: x (N, C), w (C,) -> (N, C) in `dtype`, None: that of x. See kernels/rmsnorm.py."""
    if isinstance(x_NC, Stream) and dtype is None:
        return x_NC.rmsnorm(w_C, eps)
    return RMSNorm.apply(x_NC, w_C, eps, dtype)


def rope(
    x_NHD: Tensor,
    cos_PR: Array,
    sin_PR: Array,
    positions_N: Array | None = None,
    T: int | None = None,
) -> Tensor:
    """Rotate x (N, H, D) to its positions (RoPE, Su et al. 2021) -> the same shape. Sources: kernels/rope.py, also the tables.

    cos, sin (P, D / 2) float32: of each position, as rope_tables there makes them.  Row n has position positions_N[n], without
    positions n % T (T None: N). A position outside the tables raises ValueError on the CPU; on a GPU its row is NaN.
    """
    return Rope.apply(x_NHD, cos_PR, sin_PR, positions_N, T)


def qk_norm_rope(
    qkv_NP: Tensor,
    q_w_D: Tensor | None,
    k_w_D: Tensor | None,
    cos_PR: Array,
    sin_PR: Array,
    H: int,
    G: int,
    T: int,
    eps: float,
    positions_N: Array | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed heads, normalise those of q and k (QK-norm, Henry et al. 2020) and rotate them. See kernels/qk_norm_rope.py.

    qkv (N, (H + 2G) D), first the H heads of q -> q (N, H, D), k (N, G, D), v (N, G, D), a view.
    q_w, k_w (D,) float32, weights of the norms; both None: no norm.  Tables and positions as in rope.
    """
    return QKNormRope.apply(qkv_NP, q_w_D, k_w_D, cos_PR, sin_PR, H, G, T, eps, positions_N)


def attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    scale: float,
    causal: bool = True,
    bounds: KeyBounds = UNBOUNDED,
) -> Tensor:
    """softmax(scale q k^T) v of each head: q (B, T, H, D), k, v (B, S, G, D) -> (B, T, H, D). H / G query heads share a key head.

    causal: query t sees the keys up to t + (S - T), with `bounds` not all of these: kernels/attention/key_bounds.py.
    scale: usually D^-0.5.  bf16 on a GPU needs D = 16, 32, 64 or 128. See kernels/attention/flash_attention.py.
    """
    return Attention.apply(q_BTHD, k_BSGD, v_BSGD, scale, causal, bounds)


def causal_softmax(s_ARS: Tensor, T: int, scale: float, causal: bool = True) -> Tensor:
    """softmax(scale s) of each row: s (A, R, S) float32 -> the same shape. See kernels/softmax.py.

    Row r is position r % T, and with `causal` sees the keys up to r % T + (S - T); the others get 0. R is a multiple of T.
    """
    return CausalSoftmax.apply(s_ARS, T, scale, causal)


def swiglu(gu_N2F: Tensor) -> Tensor:
    """silu(gate) up (Shazeer 2020): gu (N, 2F), first the columns of gate -> (N, F). See kernels/swiglu.py."""
    return Gated(gu_N2F)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), of any shape. See kernels/swiglu.py."""
    return SiLU.apply(x)


def logits(x_NC: Tensor, w_PC: Tensor) -> Tensor:
    """linear(x, w) in float32: x (N, C), w (P, C), float32 or bf16 -> (N, P).

    Computed when it is read. cross_entropy computes it for a few rows at a time: linear_cross_entropy.
    """
    return Logits(x_NC, w_PC)


def cross_entropy(
    logits_NP: Tensor, targets_N: Array, vocab_size: int, inv_count_1: Array
) -> Tensor:
    """-> the mean of -log softmax(logits)[target] over the targets that are not -100, in nats; shape (). kernels/cross_entropy.py

    logits (N, P): columns from vocab_size on are padding.  targets (N,) of any integer dtype.
    inv_count (1,) float32, on the device: 1 / number of targets, as count_targets(targets) in that file gives it.
    """
    if isinstance(logits_NP, Logits) and logits_NP.is_pending():
        product = logits_NP.x, logits_NP.w
        return linear_cross_entropy(*product, targets_N, vocab_size, inv_count_1)
    return CrossEntropy.apply(logits_NP, targets_N, vocab_size, inv_count_1)


def linear_cross_entropy(
    x_NC: Tensor,
    w_PC: Tensor,
    targets_N: Array,
    vocab_size: int,
    inv_count_1: Array,
    rows: int | None = None,
) -> Tensor:
    """cross_entropy(linear(x, w), ...): x (N, C), w (P, C). See kernels/linear_cross_entropy.py.

    The logits exist for at most `rows` rows at a time (None: a number that suits). Forward also computes the gradients: use
    no_grad where no backward follows. In fp8 training the products may be on fp8 codes (Transformer.use_fp8_head).
    """
    given = x_NC, w_PC, targets_N, vocab_size, inv_count_1, rows
    layer = _fp8.fp8_layer(w_PC)
    if layer is None:
        return LinearCrossEntropy.apply(*given)
    return _fp8.Fp8LinearCrossEntropy.apply(*given, layer)


def linear_logprobs(
    x_NC: Tensor, w_PC: Tensor, targets_N: Array, vocab_size: int, rows: int | None = None
) -> Tensor:
    """log softmax(x w^T) at the targets, in nats, NaN where the target is -100: x (N, C), w (P, C) -> (N,) float32.

    For a loss of any form: see with_gradient.  vocab_size, rows: as in linear_cross_entropy.  targets (N,) int32 or int64.
    """
    return LinearLogprobs.apply(x_NC, w_PC, targets_N, vocab_size, rows)


def with_gradient(x: Tensor, value: float, dx: Array) -> Tensor:
    """-> a loss, shape (), whose value and derivative by x are known already: dx, an array like x, on its device.

    For losses over few numbers, such as log-probabilities, that are written in NumPy: examples/dpo.py.
    """
    return WithGradient.apply(x, value, dx)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, of one shape and dtype. The operator + of Tensors."""
    return Add.apply(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """factor x. The operator * of Tensors."""
    return Scale.apply(x, factor)


def cast(x: Tensor, dtype: DTypeLike) -> Tensor:
    """x in another dtype. Its gradient comes in the dtype of x."""
    return x if x.dtype == dtype else Cast.apply(x, dtype)


def cast_gradient(x: Tensor, dtype: DTypeLike) -> Tensor:
    """x itself. Its gradient comes in `dtype`."""
    return CastGradient.apply(x, dtype)


def swap_heads(x: Tensor) -> Tensor:
    """(B, X, Y, D) -> (B, Y, X, D), in new memory."""
    return SwapHeads.apply(x)


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same numbers in another shape, a view; one length may be -1."""
    return Reshape.apply(x, shape)


def narrow(x: Tensor, n: int) -> Tensor:
    """The first n of the last axis: logits without the padding of the vocabulary. A copy if there are more, else x itself."""
    return Narrow.apply(x, n)


ops.update(reshape=reshape, add=add, scale=scale)  # the operators of Tensor
