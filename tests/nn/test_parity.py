"""The whole model against transformers, against itself one sequence at a time, and on the simulator."""

import numpy as np
import pytest
import torch
import twins
from checks import to_host
from flash_attention_cases import small_tiles
from twins import (
    DEVICE,
    GEMMA3,
    LLAMA3,
    batch,
    gradients,
    random_model,
    small,
    torch_loss,
    twin,
    weights,
)

from xtrain import AdamW, Transformer
from xtrain.formats.huggingface import save
from xtrain.nn import optim

LLAMA, QWEN3, QWEN2 = dict(qk_norm=False), dict(qk_norm=True), dict(qk_norm=False, qkv_bias=True)
MODELS = {
    "llama": dict(LLAMA, n_kv_heads=4),
    "llama grouped tied": dict(LLAMA, tie_embeddings=True),
    "llama one kv head": dict(LLAMA, n_kv_heads=1, head_dim=16),
    "qwen3": dict(QWEN3, n_kv_heads=4, head_dim=8),
    "qwen3 grouped": dict(QWEN3, norm_eps=1e-3, rope_theta=500.0),
    "qwen3 grouped tied": dict(QWEN3, tie_embeddings=True),
    "qwen2 grouped": dict(QWEN2),
    "qwen2 tied": dict(QWEN2, tie_embeddings=True, n_kv_heads=4, head_dim=8),
    "mistral window": dict(LLAMA, sliding_window=9),
    "qwen2 windows in some layers": dict(QWEN2, sliding_window=9, full_attention_layers=(1,)),
    "gemma3": dict(
        QWEN3,
        **GEMMA3,
        full_attention_layers=(1,),
        tie_embeddings=True,
        rope_scaling=dict(rope_type="linear", factor=2.5),
    ),
    "gemma3 local": dict(QWEN3, **GEMMA3, n_kv_heads=1, head_dim=16),
    "gemma3 heads of 256": dict(
        QWEN3,
        **(GEMMA3 | dict(query_pre_attn_scalar=256)),
        full_attention_layers=(1,),
        tie_embeddings=True,
        n_kv_heads=1,
        head_dim=256,
    ),
    "linear": dict(LLAMA, rope_scaling=dict(rope_type="linear", factor=2.5)),
    "llama3": dict(LLAMA, rope_scaling=LLAMA3),
    "qwen3 llama3": dict(QWEN3, rope_scaling=LLAMA3),
    "dynamic": dict(LLAMA, rope_scaling=dict(type="dynamic", factor=3.0), max_seq_len=24),
}


@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients_are_those_of_transformers(name):
    model = random_model(small(**MODELS[name]))
    other = twin(model)
    ids, targets = batch(model.config, 3, 37)
    their_loss, their_logits = torch_loss(other, ids, targets)
    their_loss.backward()
    loss = model.loss(ids, targets)
    loss.backward()
    theirs = their_logits.detach().numpy()
    assert 0.3 < theirs.std() < 3  # the tolerances below are meant for logits of order 1
    assert np.abs(to_host(model(ids).data) - theirs).max() <= 1e-5
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    expected = dict(other.named_parameters())
    for parameter, ours in gradients(model).items():
        gradient = expected[parameter].grad.numpy()
        error = np.linalg.norm(ours - gradient) / np.linalg.norm(gradient)
        assert error <= 1e-4, f"{parameter}: {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma3", "gemma3 heads of 256"])
def test_gemma3_in_bf16(name, tmp_path):
    options = dict(MODELS[name], head_dim=16) if name == "gemma3" else MODELS[name]
    model = random_model(small(**options))
    other = twin(model)
    save(model, tmp_path)
    half = Transformer.from_pretrained(tmp_path, "gpu", "bf16")
    ids, targets = batch(model.config, 3, 37)
    their_loss, their_logits = torch_loss(other, ids, targets)
    their_loss.backward()
    loss = half.loss(ids, targets)
    loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-2)
    theirs = their_logits.detach().numpy()
    assert np.abs(to_host(half(ids).data).astype(np.float32) - theirs).mean() <= 2e-2 * theirs.std()
    expected = dict(other.named_parameters())
    for parameter, ours in gradients(half).items():
        gradient = expected[parameter].grad.numpy()
        error = np.linalg.norm(ours - gradient) / np.linalg.norm(gradient)
        assert error <= 5e-2, f"{parameter}: {error:.2e}"


@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic"])
def test_scaling_matters_in_those_tests(kind):
    """Or they would pass with no scaling at all."""
    options = MODELS[kind]
    ids, _ = batch(small(**options), 1, 24 if kind != "dynamic" else 37)
    scaled = random_model(small(**options))
    plain = random_model(small(**(options | dict(rope_scaling=None, max_seq_len=48))))
    assert np.abs(to_host(scaled(ids).data) - to_host(plain(ids).data)).max() > 1e-2


# ----------------------------------------------------------------------------- AdamW
STEPS, LR, DECAY = 20, 1e-3, 0.1
BETAS, EPS = (0.9, 0.95), 1e-8


def train_torch(model):
    """20 steps of torch.optim.AdamW on the twin -> weights. Matrices are decayed, norms are not."""
    other = twin(model)
    groups = [
        {"params": [p for p in other.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in other.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LR, BETAS, EPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch_loss(other, *batch(model.config, 2, 16, seed=step))[0].backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in other.named_parameters()}


def train_ours(model, decay=DECAY):
    optimizer = AdamW(model, LR, BETAS, EPS, decay)
    for step in range(STEPS):
        model.zero_grad()
        model.loss(*batch(model.config, 2, 16, seed=step)).backward()
        optimizer.step()
    return weights(model)


def distance(ours, theirs):
    return max(np.abs(ours[name] - theirs[name]).max() for name in ours)


@pytest.fixture(scope="module")
def trained_by_torch():
    return train_torch(random_model(small()))


def test_twenty_steps_of_adamw(trained_by_torch):
    before = weights(random_model(small()))
    assert distance(before, trained_by_torch) > 1e-2
    assert distance(train_ours(random_model(small())), trained_by_torch) <= 1e-6


@pytest.mark.parametrize(
    "mistake", ["no decay", "decayed norms", "no bias correction", "one step late"]
)
def test_a_wrong_adamw_would_be_found(mistake, trained_by_torch, monkeypatch):
    model, decay, hyper = random_model(small()), DECAY, optim.adamw_hyper
    if mistake == "no decay":
        decay = 0.0
    elif mistake == "decayed norms":
        model.arena.n_decay = model.arena.weights.size
    else:
        shift = 10**6 if mistake == "no bias correction" else 1
        late = lambda lr, beta1, beta2, t: hyper(lr, beta1, beta2, t + shift)
        monkeypatch.setattr(optim, "adamw_hyper", late)
    assert distance(train_ours(model, decay), trained_by_torch) > 1e-5


# ----------------------------------------------------------------------------- batches
@pytest.mark.parametrize("options", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_batched_is_looped(options):
    model = random_model(small(**options))
    ids, targets = batch(model.config, 5, 29)
    together = to_host(model(ids).data)
    alone = np.concatenate([to_host(model(ids[b : b + 1]).data) for b in range(len(ids))])
    # The BLAS chooses the order of a sum by the height of the matrix, so not every bit agrees.
    assert np.abs(together - alone).max() <= 1e-6 * max(1, np.abs(alone).max())
    model.loss(ids, targets).backward()
    expected = gradients(model)
    model.zero_grad()
    inv_count = np.array([1 / (targets != -100).sum()], np.float32)
    inv_count = twins.device.to_device(inv_count, DEVICE)
    total = 0
    for b in range(len(ids)):
        loss = model.loss(ids[b : b + 1], targets[b : b + 1], inv_count)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(model.loss(ids, targets).item(), rel=1e-6)
    for name, gradient in gradients(model).items():
        error = np.linalg.norm(gradient - expected[name]) / np.linalg.norm(expected[name])
        assert error <= 1e-4, f"{name}: {error:.2e}"


def test_a_token_never_sees_what_follows():
    model = random_model(small())
    ids, _ = batch(model.config, 2, 20)
    changed = ids.copy()
    changed[:, 11:] = (changed[:, 11:] + 7) % model.config.vocab_size
    first, second = (to_host(model(x).data) for x in (ids, changed))
    assert np.array_equal(first[:, :11], second[:, :11])
    assert np.abs(first[:, 11] - second[:, 11]).max() > 1e-2


def test_the_padding_of_the_vocabulary_stays_zero():
    model = random_model(small())
    optimizer = AdamW(model, LR)
    for step in range(3):
        model.zero_grad()
        model.loss(*batch(model.config, 2, 16, seed=step)).backward()
        optimizer.step()
    for table in (model.model.embed_tokens.weight, model.lm_head):
        padding = to_host(table.data)[model.config.vocab_size :]
        assert padding.size and not padding.any()
        assert not to_host(table.grad)[model.config.vocab_size :].any()


# ----------------------------------------------------------------------------- simulator
@pytest.mark.parametrize(
    "options",
    [LLAMA, QWEN3, QWEN2, dict(QWEN3, **GEMMA3, full_attention_layers=(1,))],
    ids=["llama", "qwen3", "qwen2", "gemma3"],
)
@small_tiles()
def test_every_kernel_of_the_model_in_the_simulator(options):
    """Forward, backward and an optimizer step with every kernel run thread by thread; the GEMMs are NumPy's."""
    shape = dict(
        dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=24, vocab_size=21
    )
    config = small(**shape, **options)
    there, here = (random_model(config, device=d) for d in ("sim", "cpu"))
    ids, targets = batch(config, 1, 5)
    losses = []
    for model in (there, here):
        loss = model.loss(ids, targets)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    expected = gradients(here)
    for name, gradient in gradients(there).items():
        error = np.linalg.norm(gradient - expected[name]) / np.linalg.norm(expected[name])
        assert error <= 1e-5, f"{name}: {error:.2e}"
    for model in (there, here):
        AdamW(model, LR).step()
    assert distance(weights(there), weights(here)) <= 1e-5
