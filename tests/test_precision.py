"""bf16 training against fp32 from the same weights: how far apart may they be, and does bf16 leave fp32 alone?"""

import numpy as np
import pytest

from xtrain import AdamW, ModelConfig, Transformer, UserError
from xtrain.device import cupy, to_device, to_numpy
from xtrain.optim import clip

SHAPE = dict(
    vocab_size=2000, dim=384, n_layers=12, n_heads=12, head_dim=32, hidden_dim=1536, max_seq_len=256
)


def batch(seed, B=8, T=256):
    rng = np.random.default_rng(seed)
    ids = (SHAPE["vocab_size"] * rng.random((B, T + 1)) ** 3).astype(np.int32)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def norm(x):
    return float(np.linalg.norm(to_numpy(x).astype(np.float64)))


def test_bf16_needs_a_gpu():
    with pytest.raises(UserError, match="choose fp32, or bf16 on a GPU"):
        Transformer(ModelConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1), precision="bf16")
    with pytest.raises(UserError, match="fp8"):
        Transformer(ModelConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1), precision="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gqa-tied"])
def test_gates(kind):
    more = {
        "qwen3": {},
        "llama": {"qk_norm": False},
        "gqa-tied": {"n_kv_heads": 4, "tie_embeddings": True},
    }
    config = ModelConfig(**SHAPE, **more[kind])
    fp32, bf16 = (Transformer(config, device="gpu", precision=p) for p in ("fp32", "bf16"))
    ids, targets = batch(0)
    losses = [m.loss(ids, targets) for m in (fp32, bf16)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0].item() - losses[1].item()) < 2e-4
    off = np.abs(to_numpy(fp32(ids[:2]).data) - to_numpy(bf16(ids[:2]).data).astype(np.float32))
    assert off.mean() < 3e-3 and np.quantile(off, 0.99) < 1e-2
    grads = [m.arena.grads for m in (fp32, bf16)]
    assert norm(grads[0] - grads[1]) < 1.2e-2 * norm(grads[0])


@pytest.mark.gpu
def test_150_steps_end_together():
    ends = []
    for precision in ("fp32", "bf16"):
        model = Transformer(ModelConfig(**SHAPE), device="gpu", precision=precision)
        optimizer = AdamW(model, lr=5e-4)
        tail = []
        for step in range(150):
            model.zero_grad()
            loss = model.loss(*batch(step))
            loss.backward()
            optimizer.step(clip(model, 1.0)[1])
            tail.append(loss.data)
        ends.append(np.mean([float(to_numpy(x)) for x in tail[-10:]]))
    assert abs(ends[0] - ends[1]) < 0.01, ends


@pytest.mark.gpu
def test_the_copy_follows_the_weights():
    model = Transformer(ModelConfig(**{**SHAPE, "n_layers": 1}), device="gpu", precision="bf16")
    optimizer = AdamW(model, lr=1e-2)
    ids, targets = batch(1, 2, 16)
    same = lambda: np.array_equal(
        to_numpy(model.arena.half).astype(np.float32),
        to_numpy(model.arena.weights.astype(model.arena.half.dtype)).astype(np.float32),
    )
    for _ in range(2):
        model.zero_grad()
        model.loss(ids, targets).backward()
        optimizer.step()
        assert same()  # written by AdamW itself
    name, weight = next(model.named_parameters())
    weight.data = to_device(np.ones(weight.shape, np.float32), "gpu")
    before = model.loss(ids, targets).item()  # refreshed on the way
    assert same() and np.isfinite(before)
    assert cupy() is not None and name == "model.embed_tokens.weight"
