"""Models other than Llama, optimizers other than AdamW, a run with its own schedule and data, a look inside.

Pieces of lessons/howto/change_the_model.md; tests/examples/test_variants.py compares each with PyTorch.
"""

# [start:imports]
import contextlib
from dataclasses import replace

import numpy as np

from xtrain import AdamW, Transformer, no_grad
from xtrain.device import array_module, to_numpy
from xtrain.nn import functional as F
from xtrain.nn.autograd import Function
from xtrain.nn.model import STD, Attention, Block
from xtrain.nn.modules import Linear, Module, Parameter
from xtrain.nn.observers import observe_ops
from xtrain.training.run import Run

# [end:imports]


# [start:mlp]
class PlainMLP(Module):
    """down(act(up(x)))"""

    def __init__(self, c, act):
        self.up_proj = Linear(c.dim, c.hidden_dim, STD)
        self.down_proj = Linear(c.hidden_dim, c.dim, STD / (2 * c.n_layers) ** 0.5)
        self.act = act

    def __call__(self, x_NC):
        return self.down_proj(self.act(self.up_proj(x_NC)))


def with_plain_mlps(model, act):
    for layer in model.model.layers:
        layer.mlp = PlainMLP(model.config, act)
    model.renew_arena()  # memory for the new parameters; the others keep their values
    return model


# [end:mlp]


# [start:change]
def change(model):
    return with_plain_mlps(model, F.silu)


# [end:change]


# [start:softcap]
class SoftCap(Function):
    """y = cap tanh(x / cap),  dx = dy (1 - tanh^2). array_module is NumPy or CuPy, whichever made x."""

    @staticmethod
    def forward(ctx, x, cap):
        tanh = array_module(x).tanh(x / cap)
        ctx.save(tanh)
        return cap * tanh

    @staticmethod
    def backward(ctx, dy):
        (tanh,) = ctx.saved
        return dy * (1 - tanh * tanh)


class Capped(Transformer):
    """Logits between -30 and 30, in training and in generate."""

    def logits(self, x_NC):
        return SoftCap.apply(super().logits(x_NC), 30.0)


# [end:softcap]


# [start:zloss]
class SquaredLogSum(Function):
    """(N, V) -> mean over rows of log(sum exp x)^2, shape ()"""

    @staticmethod
    def forward(ctx, x_NV):
        xp = array_module(x_NV)
        top_N1 = x_NV.max(-1, keepdims=True)
        p_NV = xp.exp(x_NV - top_N1)
        sum_N1 = p_NV.sum(-1, keepdims=True)
        z_N1 = xp.log(sum_N1) + top_N1
        ctx.save(p_NV / sum_N1, z_N1)
        return (z_N1 * z_N1).mean().reshape(())

    @staticmethod
    def backward(ctx, dloss):
        p_NV, z_N1 = ctx.saved
        return p_NV * (2 * z_N1 / len(z_N1)) * dloss


def loss_with_z(model, ids, targets, weight=1e-4):
    """The model's loss and the z-loss (PaLM) of the same logits."""
    logits_NV, targets_N = model(ids).reshape(ids.size, -1), targets.reshape(-1)
    inv_count = np.array([1 / np.count_nonzero(targets_N != -100)], np.float32)
    loss = F.cross_entropy(logits_NV, targets_N, model.config.vocab_size, inv_count)
    return loss + weight * SquaredLogSum.apply(logits_NV)


# [end:zloss]


# [start:attention]
class NoPE(Attention):
    """Attention without positions, as Attention(config, rotary=False)."""

    def attend(self, sequences, qkv):
        return super().attend(sequences.unrotated(), qkv)


class ParallelBlock(Block):
    """h + attention(norm(h)) + mlp(norm(h))"""

    def __call__(self, h_NC, sequences):
        x_NC = self.input_layernorm(h_NC)
        y_NC = self.post_attention_layernorm(h_NC)
        return h_NC + (self.self_attn(x_NC, sequences) + self.mlp(y_NC))


def mixed(model):
    layers, c = model.model.layers, model.config
    layers[0].self_attn = Attention(replace(c, qk_norm=False))
    layers[1].self_attn = NoPE(c)
    layers[2] = ParallelBlock(c)
    model.renew_arena()
    return model


# [end:attention]


# [start:lora]
class LoRA(Linear):
    """y = x w^T + (alpha / r) (x a^T) b^T, w frozen, b = 0 at first."""

    def __init__(self, linear, r, alpha):
        self.weight, (rows, columns) = linear.weight, linear.weight.shape
        self.a = Parameter((r, columns), STD, {"lora_a": r})
        self.b = Parameter((rows, r), 0.0, {"lora_b": rows})
        self.scale = alpha / r

    def __call__(self, x_NI):
        y_NO = F.linear(x_NI, self.weight)
        return y_NO + F.linear(F.linear(x_NI, self.a), self.b) * self.scale


def with_lora(model, r=8, alpha=16, places=("self_attn.o_proj",)):
    """places: any of self_attn.qkv, self_attn.o_proj, mlp.gate_up, mlp.down_proj. (qkv and gate_up are packed: one a for all.)"""
    for _, parameter in model.storage():
        parameter.requires_grad = False  # no gradient, and AdamW does not update it
    for layer in model.model.layers:
        for place in places:
            branch, name = place.split(".")
            owner = getattr(layer, branch)
            setattr(owner, name, LoRA(getattr(owner, name), r, alpha))
    model.renew_arena()
    return model


# [end:lora]


# [start:lion]
class Lion(AdamW):
    """Chen et al. 2023. m is the momentum; update sees [start, end) of the arena, which is decayed up to n_decay."""

    def update(self, start, end, first, hyper_3, factor_1):
        w = self.arena.weights[start:end]
        m = self.m[first : first + end - start]
        g = self.arena.grads[start:end] * factor_1
        b1, b2 = self.betas
        lr = hyper_3[0]
        xp = array_module(w)
        new = w.copy()
        new[: max(0, self.arena.n_decay - start)] *= 1 - lr * np.float32(self.weight_decay)
        new -= lr * xp.sign(b1 * m + (1 - b1) * g)
        sound = xp.isfinite(factor_1)  # else the step is skipped
        w[...] = xp.where(sound, new, w)
        m[...] = xp.where(sound, b2 * m + (1 - b2) * g, m)


# [end:lion]


# [start:muon]
class Muon(AdamW):
    """Jordan et al. 2024: matrices of the layers by orthogonalised momentum, all else by AdamW. The momentum lives in m."""

    matrix_lr = 0.02

    def excludes(self, parameter):  # AdamW does not update the matrices of the layers
        return super().excludes(parameter) or parameter in self.matrices

    @property
    def matrices(self):
        return [p for name, p in self.model.storage() if ".layers." in name and p.decay]

    def apply(self, hyper_3, factor_1=None):
        super().apply(hyper_3, factor_1)
        momenta = dict(self.model.views(self.m))  # of every tensor, under its Hugging Face name
        factor_1 = self._one if factor_1 is None else factor_1
        xp, matrices = array_module(factor_1), self.matrices
        for name, w in self.model.named_parameters():
            if w.requires_grad and w.parameter in matrices:
                m = momenta[name]
                g = w.grad * factor_1
                sound = xp.isfinite(factor_1)
                m[...] = xp.where(sound, 0.95 * m + g, m)
                rate = self.matrix_lr * max(1, w.shape[0] / w.shape[1]) ** 0.5
                w.data = xp.where(sound, w.data - rate * orthogonal(g + 0.95 * m), w.data)


def orthogonal(x):
    """The nearest matrix with orthonormal rows or columns, by five steps of Newton and Schulz."""
    x = x / (array_module(x).linalg.norm(x) + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        a = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


# [end:muon]


# [start:run]
class MyRun(Run):
    """train(TrainConfig(...), make_run=MyRun): checkpoints, --resume, metrics and the report work as before."""

    def __init__(self, config, model, corpus, parallel):
        super().__init__(config, with_plain_mlps(model, F.silu), corpus, parallel)

    def make_optimizer(self):
        c = self.config
        return Lion(self.model, c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay)

    def learning_rate(self):  # constant, then linearly to zero
        return self.config.lr * min(1, 5 * (1 - self.done / self.config.steps))

    def next_batch(self):  # resuming restores the position of self.loader
        batch = super().next_batch()
        ends = batch.ids == self.corpus.tokenizer.eot_id
        return batch._replace(targets=np.where(ends, -100, batch.targets))

    def validate(self):  # -> nats per token, bits per byte
        nats, bits = super().validate()
        return nats, bits


# [end:run]


# [start:look]
@no_grad()
def log_probabilities(model, ids):
    """ids (B, T) -> log p of ids[:, 1:], (B, T - 1)"""
    logits = to_numpy(model(ids).data)[:, :-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(logs, ids[:, 1:, None], -1)[..., 0]


@no_grad()
def attention_weights(model, ids):
    """-> {layer: (B, H, T, T)}. The observer surrounds every op; after the yield the op has run."""
    maps = {}

    @contextlib.contextmanager
    def observer(op):
        yield
        if op.name == "Attention":
            (q, k), scale = (to_numpy(x) for x in op.inputs[:2]), op.inputs[3]
            k = k.repeat(q.shape[2] // k.shape[2], 2)  # query heads share key heads
            s = np.einsum("bthd,bshd->bhts", q, k) * scale
            s[..., np.triu(np.ones(s.shape[-2:], bool), 1)] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            maps[op.layer] = p / p.sum(-1, keepdims=True)

    with observe_ops(observer):
        model(ids)
    return maps


# [end:look]
