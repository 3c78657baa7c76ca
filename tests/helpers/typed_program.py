"""A user's program with types. mypy checks it together with the package (mypy.ini); tests/test_types.py runs it.

Each `type: ignore` is a mistake that a type checker must find: mypy reports those that it does not need.
"""

from pathlib import Path
from typing import Any, assert_type

import numpy as np

import xtrain
from xtrain import AdamW, Engine, ModelConfig, Tensor, Transformer, no_grad
from xtrain import functional as F
from xtrain.data.dataset import prepare
from xtrain.data.tokenizer import Tokenizer
from xtrain.nn import Linear, Module, Parameter, RMSNorm
from xtrain.nn.autograd import Context, Function
from xtrain.nn.model import Attention, Block
from xtrain.nn.optim import clip, learning_rate
from xtrain.nn.sequences import Sequences
from xtrain.serving.requests import Completion


class Double(Function):
    @staticmethod
    def forward(ctx: Context, x: np.ndarray) -> np.ndarray:
        return 2 * x

    @staticmethod
    def backward(ctx: Context, dy: np.ndarray) -> np.ndarray:
        return 2 * dy


class GatedMLP(Module):
    def __init__(self, c: ModelConfig) -> None:
        self.gate = Parameter((c.dim,), None)
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.up = Linear(c.dim, 2 * c.hidden_dim, 0.02)
        self.down = Linear(c.hidden_dim, c.dim, 0.02)

    def __call__(self, x_NC: Tensor) -> Tensor:
        x_NC = F.rmsnorm(x_NC, self.gate, 1e-6)
        return self.down(F.swiglu(self.up(self.norm(x_NC))))


class Unscaled(Attention):
    def attend(self, sequences: Sequences, qkv: Tensor) -> Tensor:
        c = self.config
        q, k, v = sequences.split_heads(qkv, c.n_heads, c.n_kv_heads)
        return sequences.attention(sequences.rope(q), sequences.rope(k), v, 1.0)


class Parallel(Block):
    def __call__(self, h_NC: Tensor, sequences: Sequences) -> Tensor:
        x_NC = self.input_layernorm(h_NC)
        return h_NC + (self.self_attn(x_NC, sequences) + self.mlp(x_NC))


def ops() -> None:
    x = Tensor(np.ones((3, 4), np.float32), requires_grad=True)
    w = Tensor(np.ones(4, np.float32))
    assert_type(F.rmsnorm(x, w, 1e-6), Tensor)
    assert_type(2 * x - x / 3 + F.cast(x, "float32").reshape(3, -1), Tensor)
    assert_type(F.cast(x, np.float32).shape, tuple[int, ...])
    assert_type(x.ndim, int)
    assert_type(x.dtype, np.dtype[Any])
    total = Double.apply(x)
    total.backward(np.ones((3, 4), np.float32))
    mistakes = (
        lambda: F.rmsnorm(x, w),  # type: ignore[call-arg]
        lambda: F.rmsnorm("x", w, 1e-6),  # type: ignore[arg-type]
        lambda: F.linear(x, w, bias=w),  # type: ignore[call-arg]
        lambda: F.swiglu(x).no_such_name,  # type: ignore[attr-defined]
        lambda: x.shape.item(),  # type: ignore[attr-defined]
        lambda: xtrain.Engin,  # type: ignore[attr-defined]
    )
    for mistake in mistakes:
        try:
            mistake()
        except (TypeError, ValueError, AttributeError):
            continue
        raise AssertionError("a mistake was accepted")


def train(text: Path) -> list[Completion]:
    corpus = prepare(text, vocab_size=300)
    c = ModelConfig(vocab_size=corpus.vocab_size, dim=32, n_layers=3, n_heads=2, max_seq_len=32)
    model = Transformer(c)
    layers = model.model.layers
    layers[0].mlp, layers[1].self_attn, layers[2] = GatedMLP(c), Unscaled(c), Parallel(c)
    model.renew_arena()
    optimizer, loader = AdamW(model, lr=1e-3), corpus.loader(4, 16)
    for step in range(2):
        ids, targets = loader.next_batch()
        model.zero_grad()
        loss = model.loss(ids, targets)
        assert_type(loss, Tensor)
        assert_type(loss.item(), float)
        loss.backward()
        _norm, factor = clip(model, max_norm=1.0)
        optimizer.lr = learning_rate(step, 2, peak=1e-3, warmup=1, min_ratio=0.1)
        optimizer.step(factor)
        with no_grad():
            assert_type(model(ids), Tensor)
    tokenizer: Tokenizer = corpus.tokenizer
    answers = Engine(model, 2).generate([tokenizer.encode("the dog")], 4, temperature=0.8)
    assert_type(answers, list[Completion])
    assert_type(tokenizer.decode(answers[0]), str)
    try:
        Engine(model, 2).generate([[1]], temperatur=0.8)  # type: ignore[call-arg]
    except TypeError:
        return answers
    raise AssertionError("a wrong option was accepted")
