"""Checks backward passes: compares autograd with finite differences, in float64 on NumPy arrays.

    L(inputs) = sum of <c, output> over the outputs, c random. For a random direction v of one input:
    (L(x + e v) - L(x - e v)) / 2e  =  <dL/dx, v> + O(e^2)

The left side needs two forward passes, the right side the gradient from backward(). One number
checks a whole gradient, because a wrong element anywhere changes <dL/dx, v> for almost every v. e =
1e-5 balances the error e^2 of the formula against the rounding error 1e-16 / e of the subtraction;
both stay below 1e-9 of the result.

To check another op:

    from xtrain.gradcheck import check
    errors = check(MyOp.apply, [x, w])      # float64 arrays -> one relative error per input
    assert max(errors) < 1e-6
"""

import functools
from collections.abc import Callable

import numpy as np

from ..config import ModelConfig
from ..errors import UserError
from ..formats.adapters import LoraPart
from ..kernels.cross_entropy import IGNORE, count_targets
from ..kernels.experts.expert_order import expert_order
from ..kernels.rope import rope_tables
from ..nn import functional as F
from ..nn.autograd import Function, Tensor, no_grad
from ..nn.deferred import AddNormLinear, ResidualRMSNorm, SwiGLULinear
from ..nn.expert_functions import Factors
from ..nn.model import Transformer

STEP = 1e-5  # e, relative to the size of an input
TOLERANCE = 1e-6
EPS = 0.01  # eps of the norms: with 1e-6 they are not linear within one step near 0
FLAT = 1e-4  # slopes below this fraction of the output count as zero; rounding alone gives 1e-11
EXAMPLES = 40  # random shapes per op


# ----------------------------------------------------------------------------- one function
class _Inner(Function):
    """(outputs..., c...) -> sum of <c, output>: reduces any outputs to one number."""

    @staticmethod
    def forward(ctx, *outputs_and_c):
        n = len(outputs_and_c) // 2
        ctx.save(*outputs_and_c[n:])
        return np.array(sum(np.vdot(c, y) for y, c in zip(outputs_and_c, ctx.saved)))

    @staticmethod
    def backward(ctx, dL):
        return ctx.saved  # dL is 1, because backward starts here


def check(f: Callable, inputs: list[np.ndarray], seed: int = 0, step: float = STEP) -> list[float]:
    """Compare the gradients of f with finite differences and return each input's relative error.

    f: takes Tensors, returns a Tensor or a tuple of Tensors. It is called several times with the
    same values and must return the same result. inputs: float64 arrays. step: e, relative to the
    size of an input. The gradients of the inputs start with random numbers, because backward must
    *add* to them. Raises TypeError for other dtypes.
    """
    if not all(isinstance(x, np.ndarray) and x.dtype == np.float64 for x in inputs):
        raise TypeError("gradcheck.check needs float64 NumPy arrays: use x.astype(np.float64)")

    def outputs_of(*tensors):
        outputs = f(*tensors)
        if isinstance(outputs, tuple):
            return outputs
        return (outputs,)

    normal = np.random.default_rng(seed).standard_normal
    tensors = [Tensor(x.copy(), requires_grad=True) for x in inputs]
    before = [normal(x.shape) for x in inputs]
    for tensor, gradient in zip(tensors, before):
        tensor.grad = gradient.copy()
    outputs = outputs_of(*tensors)
    weights = [np.asarray(normal(y.shape)).astype(y.dtype) for y in outputs]
    size = _norm(c * y.data for y, c in zip(outputs, weights))
    _Inner.apply(*outputs, *weights).backward()
    errors = []
    for i, (x, tensor) in enumerate(zip(inputs, tensors)):
        v = normal(x.shape) * (np.sqrt(np.square(x).mean()) or 1.0)
        shift = [step * v if j == i else np.zeros(z.shape) for j, z in enumerate(inputs)]
        with no_grad():
            up = outputs_of(*(Tensor(z + s) for z, s in zip(inputs, shift)))
            down = outputs_of(*(Tensor(z - s) for z, s in zip(inputs, shift)))
        numeric = [c * (y1.data - y0.data) / (2 * step) for c, y1, y0 in zip(weights, up, down)]
        assert tensor.grad is not None
        analytic = (tensor.grad - before[i]) * v
        difference = abs(sum(terms.sum() for terms in numeric) - analytic.sum())
        error = difference / max(_norm(numeric), _norm([analytic]), FLAT * size, 1e-300)
        errors.append(np.inf if np.isnan(error) else float(error))
    return errors


def _norm(arrays):
    return np.sqrt(sum(np.square(a).sum() for a in arrays))


# ----------------------------------------------------------------------------- every op
# The values of each size: 1, odd, larger than a block of the kernel. The smallest comes first,
# because hypothesis shrinks to it.
SIZES = dict(
    N=(1, 2, 5, 67), C=(1, 2, 7, 300), I=(1, 3, 33), O=(1, 2, 65), V=(1, 2, 37, 1030), F=(1, 3, 257),
    B=(1, 2, 3), T=(1, 2, 5, 33), past=(0, 3), G=(1, 2, 3), rep=(1, 2, 3), R=(1, 2, 17), pad=(0, 1, 5),
    norm=(True, False), biased=(False, True), given=(False, True), causal=(True, False), tied=(False, True),
)  # fmt: skip


class Draw:
    """Sizes as attributes, drawn at the first access; sizes derived from them; and arguments of ops
    other than their inputs."""

    def __init__(self, draw):
        self.draw = draw

    def __getattr__(self, name):  # called for attributes that are not set yet
        if name[0] == "E":  # rows of the matrices of all experts: EC, EFF
            return self.E * getattr(self, name[1:])
        setattr(self, name, self.draw(SIZES[name]))
        return getattr(self, name)

    D = property(lambda d: 2 * d.R)  # head width
    H = property(lambda d: d.G * d.rep)  # query heads
    S = property(lambda d: d.T + d.past)  # keys
    A = property(lambda d: d.rep * d.T)  # rows of scores
    M = property(lambda d: d.B * d.T)  # tokens
    Q = property(lambda d: (d.H + 2 * d.G) * d.D)  # columns of packed q, k, v
    P = property(lambda d: d.V + d.pad)  # padded vocabulary
    FF = property(lambda d: 2 * d.F)  # gate and up
    W = property(lambda d: d.O + d.pad + d.V)  # rows of a matrix with adapters of ranks G and rep
    AA = property(lambda d: d.G + d.rep)  # rows of both a
    E = property(lambda d: d.G + d.pad)  # experts, of which G compute a row
    AC = property(lambda d: d.V if d.given else d.C)  # columns of a, rows of b of an adapted matrix
    BC = property(lambda d: d.C if d.given else d.V)
    inverse_norms = property(lambda d: np.linspace(0.5, 2, d.W))
    cos = property(lambda d: rope_tables(d.D, d.T, 100.0)[0])
    sin = property(lambda d: rope_tables(d.D, d.T, 100.0)[1])
    positions = property(lambda d: d.ids(d.M, d.T) if d.given else None)

    @property
    def lora(self):
        """Return the adapters of two blocks of the W rows."""
        first = LoraPart(slice(0, self.O), slice(0, self.G), -1.7)
        return first, LoraPart(slice(self.O + self.pad, self.W), slice(self.G, self.AA), 0.6)

    def ids(self, n, below):
        """Return n token ids below `below`, the same every time."""
        return np.random.default_rng(n).integers(below, size=n)

    def targets(self, n, below):
        """Return n target ids; every id that is a multiple of 3 becomes IGNORE."""
        ids = self.ids(n, below)
        return np.where(ids % 3 == 0, IGNORE, ids)

    @property
    def experts(self):
        """Return G of E experts for each of N rows."""
        scores_NE = np.random.default_rng(self.N).random((self.N, self.E))
        return np.argsort(scores_NE, 1)[:, : self.G].astype(np.int32)

    @functools.cached_property
    def model(self):
        """Return a small model with the drawn heads and options."""
        shape = dict(vocab_size=11, dim=6, n_layers=2, n_heads=self.H, n_kv_heads=self.G)
        sizes = dict(head_dim=4, hidden_dim=5, max_seq_len=64, norm_eps=EPS, qk_norm=self.norm)
        return Transformer(
            ModelConfig(**shape, **sizes, qkv_bias=self.biased, tie_embeddings=self.tied)
        )


def _transformer(d, *weights):
    """Return the loss of a whole model in float64.

    The parameters share the memory of the tensors, so gradients are added in place.
    """
    for (_, parameter), weight in zip(d.model.storage(), weights):
        parameter._data, parameter._grad = weight.data, weight.grad
    ids, targets = (x.reshape(d.B, d.T) for x in (d.ids(d.M, 11), d.targets(d.M, 11)))
    return d.model.loss(ids, targets)


# op -> (its differentiable inputs with their shapes as attributes of Draw, a call)
CASES: dict[str, tuple[str | None, Callable]] = {
    "embedding": ("w: V C", lambda d, w: F.embedding(d.ids(d.N, d.V), w)),
    "linear": ("x: N I, w: O I, b: O", lambda d, x, w, b: F.linear(x, w, None, b)),
    "lora_linear": ("x: N I, w: W I, a: AA I, b: O G, c: V rep, bias: W, m: W", lambda d, x, w, a, b, c, bias, m: F.lora_linear(x, w, a, bias, *((m, d.inverse_norms) if d.given else (None, None)), d.lora, b, c)),
    "adapted_matrix": ("w: P C, a: R AC, b: BC R", lambda d, w, a, b: F.adapted_matrix(w, a, b, -1.7, d.given)),
    "replace_rows": ("y: P", lambda d, y: F.replace_rows(np.ones(d.P + 3), y, [slice(0, d.V), slice(d.V + 1, d.P + 1)])),
    "rmsnorm": ("x: N C, w: C", lambda d, x, w: F.rmsnorm(x, w, EPS)),
    "residual_rmsnorm": ("x: N C, r: N C, w: C", lambda d, x, r, w: ResidualRMSNorm.apply(x, r, w, EPS)),
    "add_norm_linear": ("x: N C, r: N C, w: C, v: O C, b: O", lambda d, x, r, w, v, b: AddNormLinear.apply(x, r if d.given else None, w, v, EPS, False, b)),
    "rope": ("x: M H D", lambda d, x: F.rope(x, d.cos, d.sin, d.positions, d.T)),
    "qk_norm_rope": ("qkv: M Q, q_w: D, k_w: D", lambda d, x, q_w, k_w: F.qk_norm_rope(x, q_w if d.norm else None, k_w if d.norm else None, d.cos, d.sin, d.H, d.G, d.T, EPS, d.positions)),
    "attention": ("q: B T H D, k: B S G D, v: B S G D", lambda d, q, k, v: F.attention(q, k, v, 0.3, d.causal)),
    "causal_softmax": ("s: B A S", lambda d, s: F.causal_softmax(s, d.T, 0.7, d.causal)),
    "swiglu": ("gu: N FF", lambda d, gu: F.swiglu(gu)),
    "swiglu_linear": ("gu: N FF, w: O F", lambda d, gu, w: SwiGLULinear.apply(gu, w)),
    "geglu": ("gu: N FF", lambda d, gu: F.geglu(gu)),
    "geglu_linear": ("gu: N FF, w: O F", lambda d, gu, w: SwiGLULinear.apply(gu, w, True)),
    "routing": ("logits: N E", lambda d, x: F.routing(x, d.G, d.causal)[1]),
    "router_loss": ("logits: N E", lambda d, x: F.router_loss(x, expert_order(d.experts, d.E).counts_E, 0.7, 0.3)),
    "expert_mlp": ("x: N C, weights: N G, gate_up: EFF C, down: EC F", lambda d, x, w, gu, down: F.expert_mlp(x, w, gu, down, d.experts)),
    "lora_expert_mlp": ("x: N C, weights: N G, gate_up: EFF C, down: EC F, a: EAA C, b: EF G, c: EF rep, d: ER F, e: EC R", lambda d, x, w, gu, down, *lora: F.lora_expert_mlp(x, w, gu, down, d.experts, None, Factors(-1.7, 0.6, 1.3), lora)),
    "silu": ("x: N F", lambda d, x: F.silu(x)),
    "cross_entropy": ("logits: N P", lambda d, x: F.cross_entropy(x, (t := d.targets(d.N, d.V)), d.V, count_targets(t))),
    "logits": ("x: N C, w: P C", lambda d, x, w: F.logits(x, w)),
    "linear_cross_entropy": ("x: N C, w: P C", lambda d, x, w: F.linear_cross_entropy(x, w, (t := d.targets(d.N, d.V)), d.V, count_targets(t), 2)),
    "linear_distillation": ("x: N C, w: P C", lambda d, x, w: F.linear_distillation(x, w, (t := d.targets(d.N, d.V)), d.ids(d.N, d.V)[:, None].astype(np.int32), np.full((d.N, 1), -0.7), d.V, count_targets(t), 0.6, d.causal)),
    "linear_logprobs": ("x: N C, w: P C", lambda d, x, w: F.linear_logprobs(x, w, d.ids(d.N, d.V), d.V, 2)),
    "with_gradient": ("x: N C", lambda d, x: F.with_gradient(x, (x.data**3).sum(), 3 * x.data**2)),
    "add": ("a: N C, b: N C", lambda d, a, b: F.add(a, b)),
    "scale": ("x: N C", lambda d, x: F.scale(x, -1.7)),
    "cast": ("x: N C", lambda d, x: F.cast(x, np.float32)),
    "cast_gradient": ("x: N C", lambda d, x: F.cast_gradient(x, np.float64)),
    "swap_heads": ("x: B T G D", lambda d, x: F.swap_heads(x)),
    "reshape": ("x: N C", lambda d, x: F.reshape(x, (d.C, d.N))),
    "narrow": ("x: N P", lambda d, x: F.narrow(x, d.V)),
    "transformer": (None, _transformer),  # the inputs are all parameters
}  # fmt: skip
# A cast rounds to 24 bits, which a short step would magnify; it is linear, so a long step is exact.
# A model is not linear.
STEPS = {"cast": 1.0, "transformer": 3e-6}


def run(op: str) -> tuple[dict[str, tuple[set, float]], str]:
    """Check one op on EXAMPLES random shapes, the same every time.

    Returns {input: (shapes tried, worst error)} and a description of the smallest failure ("": no
    failure). Raises UserError if the op is unknown or hypothesis is not installed.
    """
    if op not in CASES:
        raise UserError(f"unknown op {op!r}: choose one of {', '.join(CASES)}")
    try:
        from hypothesis import Phase, given, settings, strategies
    except ImportError:
        raise UserError("gradcheck needs hypothesis: pip install hypothesis") from None
    errors: dict[str, tuple[set, float]] = {}
    phases = [Phase.generate, Phase.shrink]  # the last failure is the smallest

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=phases)
    @given(strategies.data())
    def explore(data):
        wrong = []
        d = Draw(lambda values: data.draw(strategies.sampled_from(values)))
        for name, shape, error in _check_case(op, d):
            shapes, worst = errors.get(name, (set(), 0.0))
            errors[name] = shapes | {shape}, max(worst, error)
            wrong += [f"{name} {shape}"] if error > TOLERANCE else []
        assert not wrong, ", ".join(wrong)

    try:
        explore()
        return errors, ""
    except AssertionError as error:
        return errors, str(error)


def _check_case(op, d):
    """Return [(input, shape, error)] for one draw."""
    inputs, call = CASES[op]
    if inputs is None:
        named = [(module + next(iter(p.parts)), p.shape) for module, p in d.model.storage()]
    else:
        texts = [text.split(": ") for text in inputs.split(", ")]
        named = [(name, tuple(getattr(d, s) for s in sizes.split())) for name, sizes in texts]
    names, shapes = zip(*named)
    normal = np.random.default_rng(0).standard_normal
    values = [0.3 + 0.7 * normal(shape) for shape in shapes]
    errors = check(functools.partial(call, d), values, step=STEPS.get(op, STEP))
    return list(zip(names, shapes, errors))
