"""The ops of Tensors: what the rest of xtrain and your own code call.

Each applies one Function of functions.py. Five are computed when their result is first read, often
as a part of the op that reads it (deferred.py): linear and rmsnorm in the blocks of a model,
swiglu, geglu, and logits.

    Tensor   an argument that may have a gradient: float32 or bf16, on NumPy arrays also float64
    Array    one that has none: ids, targets, tables; on the device of the Tensors

Every op raises ValueError for shapes that do not match and TypeError for such dtypes, and its
message has them. Results have the dtype of the first argument unless it says otherwise. Sums and
statistics are float32. The maths, its sources and the bytes moved are in the file of kernels/ that
is named.

Array names end in their shape: N rows (tokens), C width, I/O in and out features, H query heads,
G key/value heads, D head width, F MLP width, V vocabulary, P columns with padding, or positions of
a table.
"""

from collections.abc import Sequence

from numpy.typing import DTypeLike

from ..device import Array
from ..formats.adapters import LoraPart
from ..kernels.attention.key_bounds import UNBOUNDED, KeyBounds
from ..kernels.decoding.sampling import UNCHANGED, Sampling
from ..kernels.experts.expert_order import ExpertOrder
from . import fp8 as _fp8
from .deferred import Deferred, Gated, Logits, Stream, linear_of, matching
from .expert_functions import ExpertMLP, Factors, LoraExpertMLP, RouterLoss, Routing
from .functions import (
    AdaptedMatrix,
    Add,
    Attention,
    Cast,
    CastGradient,
    CausalSoftmax,
    Embedding,
    LoraLinear,
    Narrow,
    QKNormRope,
    ReplaceRows,
    Reshape,
    RMSNorm,
    Rope,
    Scale,
    SiLU,
    SwapHeads,
)
from .functions import Linear as Linear  # linear and swiglu apply these where nothing is fused
from .functions import SwiGLU as SwiGLU
from .loss_functions import (
    CrossEntropy,
    LinearCrossEntropy,
    LinearDistillation,
    LinearLogprobs,
    WithGradient,
)
from .tensor import Tensor, ops


def embedding(ids_N: Array, w_VC: Tensor) -> Tensor:
    """Return the rows w[ids] of a table, float32. See kernels/embedding.py.

    ids (N,) of any integer dtype, w (V, C) -> (N, C). An id outside [0, V) raises ValueError on the
    CPU; on a GPU its row is NaN.
    """
    return Embedding.apply(ids_N, w_VC)


def linear(
    x_NI: Tensor, w_OI: Tensor, dtype: DTypeLike | None = None, b_O: Tensor | None = None
) -> Tensor:
    """Return x w^T + b. See kernels/gemm.py.

    x (N, I), w (O, I), b (O,) or None -> (N, O). x and w have one dtype; a float32 x is cast if w
    is bf16. In fp8 training the product is one of fp8 codes (nn/fp8.py).

    dtype: of the result; None: as w. With bf16 operands it may be np.float32: sums are float32, and
        the result is then not rounded.
    """
    if isinstance(x_NI, Deferred) and dtype is None:
        return x_NI.linear(w_OI, b_O)
    return linear_of(x_NI, w_OI, dtype, b_O)


def lora_linear(
    x_NI: Tensor,
    w_OI: Tensor,
    a_AI: Tensor,
    bias_O: Tensor | None,
    m_O: Tensor | None,
    c_O: Array | None,
    parts: Sequence[LoraPart],
    *b: Tensor,
) -> Tensor:
    """Return linear(x, w, bias) plus adapters (LoRA, Hu et al. 2021; nn/lora.py).

    parts: of each adapter: it adds factor (x a_i^T) b_i^T to its columns of the result.
    a: (A, I), the a_i (r_i, I) of all, one below the other.
    b: the b_i, (columns, r_i).
    m, c: None, or with DoRA (kernels/dora.py) magnitudes and inverse norms, by which the result
        without the bias is multiplied; (O,) float32.
    """
    return LoraLinear.apply(matching(x_NI, w_OI), w_OI, a_AI, bias_O, m_O, c_O, parts, *b)


def adapted_matrix(
    w_PC: Tensor, a: Tensor, b: Tensor, factor: float, transposed: bool = False
) -> Tensor:
    """Return w + factor b a in float32, for a (r, C), b (V, r): rows from V on stay w.

    transposed: w + factor (b a)^T, for a (r, V), b (C, r).
    """
    return AdaptedMatrix.apply(w_PC, a, b, factor, transposed)


def replace_rows(x_O: Array, y: Tensor, places: Sequence[slice]) -> Tensor:
    """Return a copy of x (O,), in which y's elements, one place after the other, stand at
    `places`. float32; x has no gradient."""
    return ReplaceRows.apply(x_O, y, places)


def rmsnorm(x_NC: Tensor, w_C: Tensor, eps: float, dtype: DTypeLike | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) w of each row. See kernels/rmsnorm.py.

    x (N, C), w (C,) -> (N, C).

    dtype: of the result; None: as x, or for a residual stream that of the branches.
    """
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
    """Rotate x (N, H, D) to its positions (RoPE, Su et al. 2021). See kernels/rope.py.

    cos, sin: (P, D / 2) float32, of each position, as rope_tables in that file makes them.
    positions: of each row; None: row n has position n % T (T None: N). A position outside the
        tables raises ValueError on the CPU; on a GPU its row is NaN.
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
    """Split packed heads, normalise those of q and k (QK-norm, Henry et al. 2020), rotate them.

    qkv (N, (H + 2G) D), first the H heads of q -> q (N, H, D), k (N, G, D), v (N, G, D), a view.
    See kernels/qk_norm_rope.py.

    q_w, k_w: (D,) float32, weights of the norms; both None: no norm.
    cos, sin, positions, T: as in rope.
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
    """Return softmax(scale q k^T) v of each head. See kernels/attention/flash_attention.py.

    q (B, T, H, D), k, v (B, S, G, D) -> (B, T, H, D). H / G query heads share a key head.
    bf16 on a GPU needs D = 16, 32, 64 or 128.

    scale: usually D^-0.5.
    causal: query t sees the keys up to t + (S - T).
    bounds: which of these it does not see: kernels/attention/key_bounds.py.
    """
    return Attention.apply(q_BTHD, k_BSGD, v_BSGD, scale, causal, bounds)


def causal_softmax(s_ARS: Tensor, T: int, scale: float, causal: bool = True) -> Tensor:
    """Return softmax(scale s) of each row: s (A, R, S) float32. See kernels/softmax.py.

    Row r is position r % T, and R is a multiple of T.

    causal: a row sees the keys up to r % T + (S - T); the others get 0.
    """
    return CausalSoftmax.apply(s_ARS, T, scale, causal)


def swiglu(gu_N2F: Tensor) -> Tensor:
    """Return silu(gate) up (Shazeer 2020). See kernels/swiglu.py.

    gu (N, 2F), first the columns of gate -> (N, F). Computed when it is read.
    """
    return Gated(gu_N2F)


def geglu(gu_N2F: Tensor) -> Tensor:
    """Return gelu(gate) up, with the tanh form of GELU: otherwise as swiglu."""
    return Gated(gu_N2F, gelu=True)


def routing(
    logits_NE: Tensor, K: int, renormalized: bool = False, bias_E: Array | None = None
) -> tuple[Tensor, Tensor]:
    """Return the K experts of each row, (N, K) int32, and their weights (N, K), float32.

    logits (N, E). See kernels/experts/routing.py. Of equal logits the lower expert is chosen.

    renormalized: the weights of a row are divided by their sum.
    bias: (E,) float32, added to the probabilities to choose; it does not weight.
    """
    return Routing.apply(logits_NE, K, renormalized, bias_E)


def router_loss(logits_NE: Tensor, counts_E: Array, balance: float, z: float) -> Tensor:
    """Return two terms of the loss of a router, shape (1,). See kernels/experts/routing.py.

    counts: (E,) int32, how many rows each expert computes: ExpertOrder.counts_E.
    balance: weight of the loss that is smallest for equal counts. z: of that for small logits.
    """
    return RouterLoss.apply(logits_NE, counts_E, balance, z)


def expert_mlp(
    x_NC: Tensor,
    weights_NK: Tensor,
    gate_up_RC: Tensor,
    down_RF: Tensor,
    experts_NK: Array,
    order: ExpertOrder | None = None,
) -> Tensor:
    """Return the sum over the K experts of each row of weight down(swiglu(gate_up x)): (N, C).

    x (N, C). See kernels/experts/grouped_product.py.

    experts, weights: (N, K) int32 and float32, of routing.
    gate_up: (E 2F, C), of each expert first F rows of gate. down: (E C, F). Both in the dtype of x.
    order: kernels/experts/expert_order.py of the experts; None: it is computed here if necessary.
        In inference few rows need none (kernels/experts/expert_gemv.py).
    """
    return ExpertMLP.apply(x_NC, weights_NK, gate_up_RC, down_RF, experts_NK, order)


def lora_expert_mlp(
    x_NC: Tensor,
    weights_NK: Tensor,
    gate_up_RC: Tensor,
    down_RF: Tensor,
    experts_NK: Array,
    order: ExpertOrder | None,
    factors: Factors,
    adapters: Sequence[Tensor | None],
) -> Tensor:
    """Return expert_mlp with LoRA adapters on the matrices of all experts: (N, C).

    factors: by which the adapters' products are multiplied.
    adapters: a of gate and up, (E r, C), of each expert first the ranks of gate; b of gate and b of
        up, (E F, their rank); a of down, (E r, F), and b of down, (E C, r). None: there is none.
    """
    both = gate_up_RC, down_RF, experts_NK
    return LoraExpertMLP.apply(x_NC, weights_NK, *both, order, factors, *adapters)


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x), of any shape. See kernels/swiglu.py."""
    return SiLU.apply(x)


def logits(x_NC: Tensor, w_PC: Tensor) -> Tensor:
    """Return linear(x, w) in float32. Computed when it is read.

    x (N, C), w (P, C) -> (N, P). cross_entropy computes a few rows at a time instead.
    """
    return Logits(x_NC, w_PC)


def cross_entropy(
    logits_NP: Tensor, targets_N: Array, vocab_size: int, inv_count_1: Array
) -> Tensor:
    """Return the mean of -log softmax(logits)[target] over the targets that are not -100.

    In nats, of shape (). See kernels/cross_entropy.py, and for `logits` linear_cross_entropy.

    logits: (N, P); columns from vocab_size on are padding.
    targets: (N,) of any integer dtype.
    inv_count: (1,) float32, on the device: 1 / number of targets, as count_targets(targets) in that
        file gives it.
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
    """Return cross_entropy(linear(x, w), ...). See kernels/linear_cross_entropy.py.

    x (N, C), w (P, C). Forward also computes the gradients: use no_grad where no backward follows.
    In fp8 training the products may be on fp8 codes (Transformer.use_fp8_head).

    rows: how many rows of logits exist at a time, at most; None: a number that suits.
    """
    arguments = x_NC, w_PC, targets_N, vocab_size, inv_count_1, rows
    layer = _fp8.fp8_layer(w_PC)
    if layer is None:
        return LinearCrossEntropy.apply(*arguments)
    return _fp8.Fp8LinearCrossEntropy.apply(*arguments, layer)


def linear_distillation(
    x_NC: Tensor,
    w_PC: Tensor,
    targets_N: Array,
    ids_NK: Array,
    teacher_NK: Array,
    vocab_size: int,
    inv_count_1: Array,
    weight: float,
    reverse: bool = False,
) -> Tensor:
    """Return inv_count times the sum of (1 - weight) cross-entropy + weight KL, with the logits
    x w^T, and a teacher whose tokens are ids (N, K) int32 with the log-probabilities teacher
    (N, K). See kernels/distillation.py.

    x (N, C), w (P, C). Forward also computes the gradients: use no_grad where no backward follows.
    """
    return LinearDistillation.apply(
        x_NC, w_PC, targets_N, ids_NK, teacher_NK, vocab_size, inv_count_1, weight, reverse
    )


def linear_logprobs(
    x_NC: Tensor,
    w_PC: Tensor,
    targets_N: Array,
    vocab_size: int,
    rows: int | None = None,
    sampling: Sampling = UNCHANGED,
    kept_NW: Array | None = None,
    entropies_N: Array | None = None,
) -> Tensor:
    """Return log softmax(x w^T) at the targets, in nats, NaN where the target is -100.

    x (N, C), w (P, C), targets (N,) int32 or int64 -> (N,) float32. For a loss of any form: see
    with_gradient.

    vocab_size, rows: as in linear_cross_entropy.
    sampling: of the distribution that tokens are drawn from with it: logits divided by the
        temperature, softmax over the kept tokens (and the target) alone.
    kept_NW: the kept tokens, a constant: masks (N, W) int32 of kernels/decoding/kept_tokens.py;
        None: those of these logits.
    entropies_N: (N,) float32, is filled with the entropies of the same distributions, in nats.
    """
    options = (rows, sampling, kept_NW, entropies_N)
    return LinearLogprobs.apply(x_NC, w_PC, targets_N, vocab_size, *options)


def with_gradient(x: Tensor, value: float, dx: Array) -> Tensor:
    """Return a loss, shape (), whose value and derivative by x are known already.

    For losses over few numbers, such as log-probabilities, that are written in NumPy:
    tuning/prefer.py.

    dx: the derivative, an array like x, on its device.
    """
    return WithGradient.apply(x, value, dx)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, of one shape and dtype: the operator + of Tensors."""
    return Add.apply(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """Return factor x: the operator * of Tensors."""
    return Scale.apply(x, factor)


def cast(x: Tensor, dtype: DTypeLike) -> Tensor:
    """Return x in another dtype. Its gradient comes in the dtype of x."""
    return x if x.dtype == dtype else Cast.apply(x, dtype)


def cast_gradient(x: Tensor, dtype: DTypeLike) -> Tensor:
    """Return x itself. Its gradient comes in `dtype`."""
    return CastGradient.apply(x, dtype)


def swap_heads(x: Tensor) -> Tensor:
    """Return (B, X, Y, D) as (B, Y, X, D), in new memory."""
    return SwapHeads.apply(x)


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the same numbers in another shape, a view; one length may be -1."""
    return Reshape.apply(x, shape)


def narrow(x: Tensor, n: int) -> Tensor:
    """Return the first n of the last axis: logits without the padding of the vocabulary.

    A copy if there are more, else x itself.
    """
    return Narrow.apply(x, n)


ops.update(reshape=reshape, add=add, scale=scale)  # the operators of Tensor
