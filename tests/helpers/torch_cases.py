"""The ops of xtrain.torch and the same formulas in plain PyTorch, for tests/torch_ops."""

import contextlib
import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as TF

import xtrain.torch as xt


def tables(T: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cos and sin (T, D / 2) float32."""
    angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
    return angles.cos(), angles.sin()


def random(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers with a mean that is not zero, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3


def plain_rmsnorm(x, w, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def plain_residual(x, r, w):
    h = x + r
    return h, plain_rmsnorm(h, w)


def plain_rope(x, cos, sin, positions=None):
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device)
    cos, sin = (t.to(x)[positions][..., None, :] for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_qk(qkv, q_w, k_w, cos, sin, H, G):
    q, k, v = qkv.unflatten(-1, (H + 2 * G, 16)).split((H, G, G), -2)
    if q_w is not None:
        q = plain_rmsnorm(q, q_w)
        k = plain_rmsnorm(k, k_w)
    return plain_rope(q, cos, sin), plain_rope(k, cos, sin), v


def targets(*shape):
    """Token ids below 24, some of them -100."""
    ids = torch.arange(torch.Size(shape).numel()) * 7 % 24
    return torch.where(ids % 5 == 0, -100, ids).view(shape)


def plain_loss(logits, targets, count=None):
    logits, targets = logits.flatten(0, -2), targets.flatten()
    total = TF.cross_entropy(logits.to(wide(logits)), targets, reduction="sum")
    return total / ((targets >= 0).sum().clamp(min=1) if count is None else count)


def plain_linear_loss(x, w, targets, count=None):
    return plain_loss(x @ w.T, targets, count)


def wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def plain_softmax(s, scale):
    T, S = s.shape[-2:]
    hidden = torch.ones(T, S, dtype=torch.bool, device=s.device).triu(S - T + 1)
    return (s * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def attention_inputs(B, T):
    """q, k, v with four query heads, two key heads; v is a part of a packed array."""
    return [random(1, B, T, 4, 16), random(2, B, T, 2, 16), random(3, B, T, 4, 16)[:, :, :2]]


def plain_attention(q, k, v, scale=0.25, window=0, cu_seqlens=None, causal=True):
    T, S = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    t = torch.arange(T, device=q.device)[:, None] + S - T
    s = torch.arange(S, device=q.device)
    hidden = (s > t) & causal
    if window:
        hidden |= s <= t - window
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, s, right=True)
        hidden |= document[:, None] != document
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, v)


@dataclasses.dataclass
class Case:
    """An op, the same in plain PyTorch, and inputs.

    inputs: (N) -> tensors, float32 and integers; N is a number of tokens and may be 0.
    fixed: indices of float inputs that stay float32 and have no gradient.
    """

    op: Callable
    plain: Callable
    inputs: Callable[[int], list]
    fixed: tuple[int, ...] = ()
    opname: str = ""
    once: bool = False  # backward changes what the forward has saved
    simulated: int = 6  # tokens in the simulator; 0: other tests run the kernel there
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def make(self, N=6, dtype=torch.float32, device="cpu", grad=True) -> list:
        """The inputs on a device; those with a gradient in `dtype`."""
        made = []
        for i, x in enumerate(self.inputs(N)):
            if isinstance(x, torch.Tensor):
                x = x.to(device)
                if i in self.floats():
                    x = x.to(dtype).requires_grad_(grad)
                elif x.is_floating_point() and dtype == torch.float64:
                    x = x.double()
            made.append(x)
        return made

    def floats(self) -> list[int]:
        """Indices of the inputs with a gradient."""
        of = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
        return [i for i, x in enumerate(self.inputs(1)) if of(x) and i not in self.fixed]


CASES = {
    "rmsnorm": Case(
        xt.rmsnorm, plain_rmsnorm, lambda N: [random(1, 2, N, 40), random(2, 40)], opname="rmsnorm"
    ),
    "residual_rmsnorm": Case(
        xt.residual_rmsnorm,
        plain_residual,
        lambda N: [random(1, N, 24), random(2, N, 24), random(3, 24)],
        opname="residual_rmsnorm",
    ),
    "swiglu": Case(
        xt.swiglu,
        lambda gate, up: TF.silu(gate) * up,
        lambda N: [random(1, N, 24), random(2, N, 24)],
        opname="silu_mul",
    ),
    "swiglu_packed": Case(
        xt.swiglu,
        lambda gu: TF.silu(gu.chunk(2, -1)[0]) * gu.chunk(2, -1)[1],
        lambda N: [random(1, 2, N, 48)],
        opname="swiglu",
    ),
    "geglu": Case(
        xt.geglu,
        lambda gate, up: TF.gelu(gate, approximate="tanh") * up,
        lambda N: [random(1, N, 24), random(2, N, 24)],
        opname="silu_mul",
    ),
    "geglu_packed": Case(
        xt.geglu,
        lambda gu: TF.gelu(gu.chunk(2, -1)[0], approximate="tanh") * gu.chunk(2, -1)[1],
        lambda N: [random(1, 2, N, 48)],
        opname="swiglu",
    ),
    "rope": Case(
        xt.rope,
        plain_rope,
        lambda N: [random(1, 2, N, 3, 16), *tables(8, 16)],
        fixed=(1, 2),
        opname="rope",
    ),
    "rope_positions": Case(
        xt.rope,
        plain_rope,
        lambda N: [random(1, N, 3, 16), *tables(8, 16), torch.arange(N) * 5 % 8],
        fixed=(1, 2),
        opname="rope",
    ),
    "qk_norm_rope": Case(
        xt.qk_norm_rope,
        plain_qk,
        lambda N: [random(1, 2, N, 6 * 16), random(2, 16), random(3, 16), *tables(8, 16), 4, 1],
        fixed=(3, 4),
        opname="qk_norm_rope",
    ),
    "qk_rope": Case(
        lambda qkv, cos, sin: xt.qk_norm_rope(qkv, None, None, cos, sin, 4, 1),
        lambda qkv, cos, sin: plain_qk(qkv, None, None, cos, sin, 4, 1),
        lambda N: [random(1, 2, N, 6 * 16), *tables(8, 16)],
        fixed=(1, 2),
        opname="qk_norm_rope",
    ),
    "norm_rope": Case(
        xt.norm_rope,
        lambda x, w, cos, sin: plain_rope(plain_rmsnorm(x, w), cos, sin),
        lambda N: [random(1, 2, N, 3, 16), random(2, 16), *tables(8, 16)],
        fixed=(2, 3),
        opname="norm_rope",
    ),
    "linear_cross_entropy": Case(
        lambda x, w, targets: xt.linear_cross_entropy(x, w, targets, rows=64),
        plain_linear_loss,
        lambda N: [random(1, 2, N, 16), random(2, 24, 16), targets(2, N)],
        opname="linear_cross_entropy",
        once=True,
    ),
    "linear_cross_entropy_count": Case(
        xt.linear_cross_entropy,
        plain_linear_loss,
        lambda N: [random(1, 2, N, 16), random(2, 24, 16), targets(2, N), torch.tensor(7)],
        opname="linear_cross_entropy",
        once=True,
    ),
    "cross_entropy": Case(
        xt.cross_entropy,
        plain_loss,
        lambda N: [random(1, N, 24), targets(N)],
        opname="cross_entropy",
        once=True,
    ),
    "softmax": Case(
        lambda s: xt.softmax(s, 0.3, causal=True),
        lambda s: plain_softmax(s, 0.3),
        lambda N: [random(1, 2, N, N + 2)],
        opname="softmax",
        dtypes=(torch.float32,),
    ),
    "embedding": Case(
        lambda ids, weight: xt.embedding(ids, weight),
        lambda ids, weight: weight[ids],
        lambda N: [torch.arange(2 * N).view(2, N) * 5 % 7, random(1, 9, 24)],
        opname="embedding",
    ),
    "linear_logprobs": Case(
        xt.linear_logprobs,
        lambda x, w, tokens: (
            (x @ w.T).to(wide(x)).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        ),
        lambda N: [random(1, N, 16), random(2, 24, 16), torch.arange(N) * 7 % 24],
        opname="linear_logprobs",
    ),
    "attention": Case(
        xt.attention,
        plain_attention,
        lambda N: attention_inputs(2, N),
        opname="attention",
        simulated=2,
    ),
    "attention_window": Case(
        lambda q, k, v: xt.attention(q, k, v, scale=0.2, window=3),
        lambda q, k, v: plain_attention(q, k, v, 0.2, window=3),
        lambda N: attention_inputs(2, N),
        opname="attention",
        simulated=0,
    ),
    "attention_documents": Case(
        lambda q, k, v, cu_seqlens: xt.attention(q, k, v, cu_seqlens=cu_seqlens),
        lambda q, k, v, cu_seqlens: plain_attention(q, k, v, cu_seqlens=cu_seqlens),
        lambda N: [*attention_inputs(1, N), torch.tensor([0, N // 3, N // 2, N])],
        opname="attention",
        simulated=0,
    ),
    "attention_not_causal": Case(
        lambda q, k, v: xt.attention(q[:, :2], k, v, causal=False),
        lambda q, k, v: plain_attention(q[:, :2], k, v, causal=False),
        lambda N: attention_inputs(1, N),
        opname="attention",
        simulated=0,
    ),
}


def on(place: str):
    """A context in which the ops of xtrain.torch run in the simulator, if the place is "simulator"."""
    return xt.simulated() if place == "simulator" else contextlib.nullcontext()


def outputs(result) -> tuple[torch.Tensor, ...]:
    """The result of an op as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def with_gradients(function: Callable, inputs: list) -> list[torch.Tensor]:
    """The results of a function and the gradients of all inputs that want one, for fixed random gradients."""
    results = [y for y in outputs(function(*inputs)) if y.is_floating_point()]
    grads = [random(100 + i, *y.shape).to(y) for i, y in enumerate(results)]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return [y.detach() for y in results] + list(torch.autograd.grad(results, wanted, grads))
